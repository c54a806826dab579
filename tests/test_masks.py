"""Masks against a double loop that reads the statement literally, one query and one key at a time."""

import pytest
import torch
from support import bit_equal

from monoblock.config import AttentionConfig
from monoblock.masks import (
    Where,
    causal,
    everything,
    global_tokens,
    prefix,
    random_blocks,
    run,
    same_document,
    statement,
    window,
)

B, T, S = 2, 11, 13


def places(length, seed, *, documents=True, real=True, flags=True):
    """Places, documents, padding and flags at random, in no order."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high):
        return torch.randint(0, high, (B, length), generator=generator)

    return Where(
        integers(19),
        integers(3) if documents else None,
        integers(4) > 0 if real else None,
        integers(5) == 0 if flags else None,
    )


def by_hand(rule, q, k):
    """rule(query, key) for each pair, both as plain numbers; padding is never seen."""
    out = torch.zeros(B, 1, q.length, k.length, dtype=torch.bool)
    for b in range(B):
        for i in range(q.length):
            for j in range(k.length):
                real = k.real is None or bool(k.real[b, j])
                out[b, 0, i, j] = real and bool(rule(_one(q, b, i), _one(k, b, j)))
    return out


def _one(where, b, i):
    return {
        name: None if getattr(where, name) is None else int(getattr(where, name)[b, i])
        for name in ("at", "document", "flags")
    }


def flagged(one):
    return one["at"] == 0 if one["flags"] is None else one["flags"]


MASKS = {
    "everything": (everything, lambda q, k: True),
    "causal": (causal, lambda q, k: k["at"] <= q["at"]),
    "window": (window(4), lambda q, k: abs(k["at"] - q["at"]) < 4),
    "same document": (same_document, lambda q, k: q["document"] is None or q["document"] == k["document"]),
    "prefix": (causal | prefix, lambda q, k: k["at"] <= q["at"] or k["flags"]),
    "global": (global_tokens, lambda q, k: flagged(q) or flagged(k)),
    "decoder": (
        causal & window(3) & same_document,
        lambda q, k: 0 <= q["at"] - k["at"] < 3 and (q["document"] is None or q["document"] == k["document"]),
    ),
    "longformer": (
        (window(3) | global_tokens) & same_document,
        lambda q, k: (
            (abs(q["at"] - k["at"]) < 3 or flagged(q) or flagged(k))
            and (q["document"] is None or q["document"] == k["document"])
        ),
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fields", [True, False], ids=["all fields", "places only"])
def test_a_mask_written_out_is_its_statement_pair_by_pair(name, fields):
    mask, rule = MASKS[name]
    options = {"documents": fields, "real": fields, "flags": fields}
    q, k = places(T, 1, **options), places(S, 2, **options)
    if name == "prefix" and not fields:
        rule = MASKS["causal"][1]
    assert torch.equal(mask.dense(q, k).expand(B, 1, T, S), by_hand(rule, q, k))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fields", [True, False], ids=["all fields", "places only"])
def test_a_mask_mod_says_the_same_as_the_matrix(name, fields):
    mask = MASKS[name][0] & random_blocks(1, 3)
    options = {"documents": fields, "real": fields, "flags": fields}
    q, k = places(T, 1, **options), places(S, 2, **options)
    mask_mod, dense = mask.flex(q, k), mask.dense(q, k)
    found = [
        bool(mask_mod(torch.tensor(b), torch.tensor(0), torch.tensor(i), torch.tensor(j)))
        for b in range(B)
        for i in range(T)
        for j in range(S)
    ]
    assert torch.equal(torch.tensor(found).view(B, 1, T, S), dense.expand(B, 1, T, S))


def test_a_mask_mod_over_rows_that_are_all_alike():
    mask_mod = (causal & window(3)).flex(run(5), run(5))
    found = [[bool(mask_mod(torch.tensor(1), 0, torch.tensor(i), torch.tensor(j))) for j in range(5)] for i in range(5)]
    assert found == [[0 <= i - j < 3 for j in range(5)] for i in range(5)]


def test_random_blocks_are_symmetric_whole_blocks_and_the_same_at_any_length():
    mask = random_blocks(2, 3)
    long = mask.dense(run(30), run(30))[0, 0]
    assert torch.equal(long, long.T)
    assert torch.equal(mask.dense(run(12), run(12))[0, 0], long[:12, :12])
    by_block = long.unfold(0, 3, 3).unfold(1, 3, 3).flatten(2)
    assert torch.equal(by_block.any(-1), by_block.all(-1))
    assert by_block.any(-1).diagonal().all()
    earlier = by_block.any(-1).tril(-1).sum(1)
    assert earlier.max() <= 2
    assert earlier.sum() > 4
    other = random_blocks(2, 3, seed=1).dense(run(30), run(30))[0, 0]
    assert not torch.equal(other, long)


@pytest.mark.parametrize("order", ["causal", "prefix", "full"])
def test_a_configuration_states_its_mask(order):
    q, k = places(T, 1), places(S, 2)
    mask = statement(AttentionConfig(heads=1, mask=order))
    allowed = {
        "causal": lambda q, k: k["at"] <= q["at"],
        "prefix": lambda q, k: k["at"] <= q["at"] or k["flags"],
        "full": lambda q, k: True,
    }[order]
    assert torch.equal(mask.dense(q, k), by_hand(lambda q, k: allowed(q, k) and q["document"] == k["document"], q, k))


@pytest.mark.parametrize("order", ["causal", "full"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["global", ""])
@pytest.mark.parametrize("blocks", [0, 2])
def test_bigbird_is_a_window_with_global_tokens_and_random_blocks(order, everywhere, blocks):
    config = AttentionConfig(
        heads=1, mask=order, window=3, global_tokens=everywhere, random_blocks=blocks, block_size=2
    )
    q, k = places(T, 1), places(S, 2)
    linked = random_blocks(blocks, 2).dense(run(19), run(19))[0, 0] if blocks else torch.zeros(19, 19)

    def rule(q, k):
        near = abs(q["at"] - k["at"]) < 3 or bool(linked[q["at"], k["at"]])
        near = near or (everywhere and bool(flagged(q) or flagged(k)))
        return near and q["document"] == k["document"] and (order == "full" or k["at"] <= q["at"])

    assert torch.equal(statement(config).dense(q, k), by_hand(rule, q, k))


@pytest.mark.parametrize("mask", [everything, causal, causal & window(4), causal & window(40), causal & same_document])
@pytest.mark.parametrize(("start", "length", "keys"), [(0, 7, 7), (6, 1, 7), (4, 3, 7), (0, 3, 7)])
def test_the_cheapest_way_to_run_a_mask_says_the_same(mask, start, length, keys):
    q, k = run(length, start), run(keys)
    sight = mask.between(q, k)
    cheap = {
        "all": torch.ones(length, keys, dtype=torch.bool),
        "causal": torch.ones(length, keys, dtype=torch.bool).tril(),
        "dense": sight.dense()[0, 0],
    }[sight.kind]
    bit_equal(cheap, mask.dense(q, k)[0, 0].expand(length, keys))


def test_no_matrix_is_written_where_none_is_needed():
    full, decoder = everything & same_document, causal & window(40) & same_document
    assert full.between(run(7), run(7)).kind == "all"
    assert decoder.between(run(7), run(7)).kind == "causal"
    assert decoder.between(run(1, 6), run(7)).kind == "all"
    assert decoder.between(run(2, 5), run(7)).kind == "dense"
    padding = Where(torch.arange(7)[None], real=torch.arange(7)[None] < 5)
    assert full.between(padding, padding).kind == "dense"


def test_masks_are_named_by_what_they_say():
    assert str(causal & window(3) & same_document) == "causal & window(3) & same_document"
    assert str(causal | prefix) == "(causal | prefix)"
    assert str(everything) == "everything"
