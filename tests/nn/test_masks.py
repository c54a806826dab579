"""Masks against a double loop over queries and keys."""

import pytest
import torch
from support import assert_bit_equal

from monoblock.config.model import AttentionConfig
from monoblock.nn.attention import FUSED, AttentionContext, ScoreOptions, attend, attend_fused, choose_kernel
from monoblock.nn.masks import (
    TokenPositions,
    arange_positions,
    causal,
    everything,
    global_tokens,
    mask_from_config,
    mask_from_matrix,
    prefix,
    random_blocks,
    same_document,
    window,
)

B, T, S = 2, 11, 13


def random_positions(length, seed, *, documents=True, valid=True, flags=True):
    """Random positions, documents, padding and flags."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high):
        return torch.randint(0, high, (B, length), generator=generator)

    return TokenPositions(
        integers(19),
        integers(3) if documents else None,
        integers(4) > 0 if valid else None,
        integers(5) == 0 if flags else None,
    )


def mask_by_loop(rule, q, k):
    """rule(query, key) for each pair, as plain numbers; padding is never seen."""
    out = torch.zeros(B, 1, q.length, k.length, dtype=torch.bool)
    for b in range(B):
        for i in range(q.length):
            for j in range(k.length):
                valid = k.valid is None or bool(k.valid[b, j])
                out[b, 0, i, j] = valid and bool(rule(fields_at(q, b, i), fields_at(k, b, j)))
    return out


def fields_at(positions, b, i):
    return {
        name: None if getattr(positions, name) is None else int(getattr(positions, name)[b, i])
        for name in ("positions", "document", "prefix_or_global")
    }


def is_global(token):
    return token["positions"] == 0 if token["prefix_or_global"] is None else token["prefix_or_global"]


MASKS = {
    "everything": (everything, lambda q, k: True),
    "causal": (causal, lambda q, k: k["positions"] <= q["positions"]),
    "window": (window(4), lambda q, k: abs(k["positions"] - q["positions"]) < 4),
    "same document": (same_document, lambda q, k: q["document"] is None or q["document"] == k["document"]),
    "prefix": (causal | prefix, lambda q, k: k["positions"] <= q["positions"] or k["prefix_or_global"]),
    "global": (global_tokens, lambda q, k: is_global(q) or is_global(k)),
    "decoder": (
        causal & window(3) & same_document,
        lambda q, k: (
            0 <= q["positions"] - k["positions"] < 3 and (q["document"] is None or q["document"] == k["document"])
        ),
    ),
    "longformer": (
        (window(3) | global_tokens) & same_document,
        lambda q, k: (
            (abs(q["positions"] - k["positions"]) < 3 or is_global(q) or is_global(k))
            and (q["document"] is None or q["document"] == k["document"])
        ),
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fields", [True, False], ids=["all fields", "places only"])
def test_a_mask_written_out_is_its_statement_pair_by_pair(name, fields):
    mask, rule = MASKS[name]
    options = {"documents": fields, "valid": fields, "flags": fields}
    q, k = random_positions(T, 1, **options), random_positions(S, 2, **options)
    if name == "prefix" and not fields:
        rule = MASKS["causal"][1]
    assert torch.equal(mask.dense(q, k).expand(B, 1, T, S), mask_by_loop(rule, q, k))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fields", [True, False], ids=["all fields", "places only"])
def test_a_mask_mod_says_the_same_as_the_matrix(name, fields):
    mask = MASKS[name][0] & random_blocks(1, 3)
    options = {"documents": fields, "valid": fields, "flags": fields}
    q, k = random_positions(T, 1, **options), random_positions(S, 2, **options)
    mask_mod, dense = mask.to_mask_mod(q, k), mask.dense(q, k)
    found = [
        bool(mask_mod(torch.tensor(b), torch.tensor(0), torch.tensor(i), torch.tensor(j)))
        for b in range(B)
        for i in range(T)
        for j in range(S)
    ]
    assert torch.equal(torch.tensor(found).view(B, 1, T, S), dense.expand(B, 1, T, S))


def test_a_mask_mod_over_rows_that_are_all_alike():
    mask_mod = (causal & window(3)).to_mask_mod(arange_positions(5), arange_positions(5))
    found = [[bool(mask_mod(torch.tensor(1), 0, torch.tensor(i), torch.tensor(j))) for j in range(5)] for i in range(5)]
    assert found == [[0 <= i - j < 3 for j in range(5)] for i in range(5)]


def test_random_blocks_are_symmetric_whole_blocks_and_the_same_at_any_length():
    mask = random_blocks(2, 3)
    long = mask.dense(arange_positions(30), arange_positions(30))[0, 0]
    assert torch.equal(long, long.T)
    assert torch.equal(mask.dense(arange_positions(12), arange_positions(12))[0, 0], long[:12, :12])
    by_block = long.unfold(0, 3, 3).unfold(1, 3, 3).flatten(2)
    assert torch.equal(by_block.any(-1), by_block.all(-1))
    assert by_block.any(-1).diagonal().all()
    earlier = by_block.any(-1).tril(-1).sum(1)
    assert earlier.max() <= 2
    assert earlier.sum() > 4
    other = random_blocks(2, 3, seed=1).dense(arange_positions(30), arange_positions(30))[0, 0]
    assert not torch.equal(other, long)


@pytest.mark.parametrize("order", ["causal", "prefix", "full"])
def test_a_configuration_states_its_mask(order):
    q, k = random_positions(T, 1), random_positions(S, 2)
    mask = mask_from_config(AttentionConfig(heads=1, mask=order))
    allowed = {
        "causal": lambda q, k: k["positions"] <= q["positions"],
        "prefix": lambda q, k: k["positions"] <= q["positions"] or k["prefix_or_global"],
        "full": lambda q, k: True,
    }[order]
    assert torch.equal(
        mask.dense(q, k), mask_by_loop(lambda q, k: allowed(q, k) and q["document"] == k["document"], q, k)
    )


@pytest.mark.parametrize("order", ["causal", "full"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["global", ""])
@pytest.mark.parametrize("blocks", [0, 2])
def test_bigbird_is_a_window_with_global_tokens_and_random_blocks(order, everywhere, blocks):
    config = AttentionConfig(
        heads=1, mask=order, window=3, global_tokens=everywhere, random_blocks=blocks, block_size=2
    )
    q, k = random_positions(T, 1), random_positions(S, 2)
    linked = (
        random_blocks(blocks, 2).dense(arange_positions(19), arange_positions(19))[0, 0]
        if blocks
        else torch.zeros(19, 19)
    )

    def rule(q, k):
        near = abs(q["positions"] - k["positions"]) < 3 or bool(linked[q["positions"], k["positions"]])
        near = near or (everywhere and bool(is_global(q) or is_global(k)))
        return near and q["document"] == k["document"] and (order == "full" or k["positions"] <= q["positions"])

    assert torch.equal(mask_from_config(config).dense(q, k), mask_by_loop(rule, q, k))


@pytest.mark.parametrize("mask", [everything, causal, causal & window(4), causal & window(40), causal & same_document])
@pytest.mark.parametrize(("start", "length", "keys"), [(0, 7, 7), (6, 1, 7), (4, 3, 7), (0, 3, 7)])
def test_a_resolved_mask_allows_the_same_pairs(mask, start, length, keys):
    q, k = arange_positions(length, start), arange_positions(keys)
    resolved = mask.resolve(q, k)
    cheap = {
        "all": torch.ones(length, keys, dtype=torch.bool),
        "causal": torch.ones(length, keys, dtype=torch.bool).tril(),
        "dense": resolved.dense()[0, 0],
    }[resolved.kind]
    assert_bit_equal(cheap, mask.dense(q, k)[0, 0].expand(length, keys))


def test_no_matrix_is_built_if_none_is_needed():
    full, decoder = everything & same_document, causal & window(40) & same_document
    assert full.resolve(arange_positions(7), arange_positions(7)).kind == "all"
    assert decoder.resolve(arange_positions(7), arange_positions(7)).kind == "causal"
    assert decoder.resolve(arange_positions(1, 6), arange_positions(7)).kind == "all"
    assert decoder.resolve(arange_positions(2, 5), arange_positions(7)).kind == "dense"
    padding = TokenPositions(torch.arange(7)[None], valid=torch.arange(7)[None] < 5)
    assert full.resolve(padding, padding).kind == "dense"


def test_masks_print_their_terms():
    assert str(causal & window(3) & same_document) == "causal & window(3) & same_document"
    assert str(causal | prefix) == "(causal | prefix)"
    assert str(everything) == "everything"


@pytest.mark.parametrize("shape", [(T, S), (1, T, S), (B, 1, 1, S), (B, 3, T, S)])
def test_a_mask_given_as_a_matrix_is_applied_by_the_fused_kernel_too(shape):
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(shape, generator=generator) < 0.5
    allowed[..., 0, :] = False  # a query, or with one row all queries, without a visible key
    q, k, v = (torch.randn(B, 3, length, 4, generator=generator) for length in (T, S, S))
    context = AttentionContext(mask_from_matrix(allowed))
    expected = attend(q, k, v, allowed.expand(B, 3, T, S))
    assert torch.equal(context.dense_mask().expand(B, 3, T, S), allowed.expand(B, 3, T, S))
    out = attend_fused(q, k, v, context)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert (out[:, :, 0] == 0).all()
    assert choose_kernel(q, k, v, context, ScoreOptions()) is FUSED
