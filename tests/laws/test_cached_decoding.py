"""Cached logits equal those of one full pass: by steps, in chunks, for ragged rows, after rows are reordered or cut."""

import pytest
import torch
from support import (
    B,
    assert_bit_equal,
    assert_near,
    chunk_lengths,
    has_decoder,
    is_encoder_decoder,
    law_names,
    pad_rows,
    random_source,
    random_tokens,
    run_cached,
    run_model,
    tiny_model,
)

DECODERS = law_names(has_decoder)
LONG = 23  # several windows, and longer than any ring below
CHUNKS = {  # sizes of the chunks, and the chunk size the cache is made for
    "steps": ((1,), 1),
    "steps, larger ring": ((1,), 7),
    "prompt then steps": ((11, 1), 11),
    "uneven": ((5, 3, 1, 7), 7),
    "longer than the ring": ((13, 2, 8), 2),
    "all at once": ((LONG,), 1),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_cached_logits_are_the_full_ones(name, chunks):
    model, ids = tiny_model(name), random_tokens(length=LONG)
    sizes, chunk = CHUNKS[chunks]
    assert_near(run_cached(model, ids, sizes, chunk=chunk), run_model(model, ids))


@pytest.mark.parametrize("name", DECODERS)
def test_cached_logits_are_the_full_ones_in_double_precision(name):
    model, ids = tiny_model(name, torch.float64), random_tokens(length=LONG)
    assert_near(run_cached(model, ids, (4, 1, 9), chunk=3), run_model(model, ids))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_different_lengths_are_decoded_as_if_alone(name, side):
    """Prompts of 4 to 10 tokens in one padded batch, then steps: each row as in its own full pass."""
    model, ids, new = tiny_model(name), random_tokens(length=LONG), 9
    lengths = 4 + torch.arange(B) % 7
    padding = int(lengths.max()) - lengths
    prompts, valid = cut_prompts(ids, lengths, padding if side == "left" else torch.zeros_like(padding))
    cache, full = model.make_cache(B, LONG, chunk=3), run_model(model, ids)
    last = valid.long() * torch.arange(valid.shape[1])
    out = [run_model(model, prompts, valid, cache=cache)[torch.arange(B), last.amax(1)][:, None]]
    cache.advance(lengths)
    for step in range(new):
        out.append(run_model(model, ids.gather(1, lengths[:, None] + step), cache=cache))
        cache.advance(1)
    positions = (lengths - 1)[:, None] + torch.arange(new + 1)
    assert_near(torch.cat(out, 1), full[torch.arange(B)[:, None], positions])


def cut_prompts(ids, lengths, left):
    """The first `lengths` tokens of each row, after `left` padding tokens; and the mask."""
    width = int(lengths.max())
    positions = torch.arange(width) - left[:, None]
    valid = (positions >= 0) & (positions < lengths[:, None])
    return torch.where(valid, ids.gather(1, positions.clamp(0, ids.shape[1] - 1)), 0), valid


@pytest.mark.parametrize("name", DECODERS)
def test_steps_with_padding_leave_a_row_unchanged(name):
    """A row whose token is padding takes no room in the cache and continues as if the step had not been."""
    model, ids = tiny_model(name), random_tokens(length=LONG)
    full, cache = run_model(model, ids), model.make_cache(B, LONG, chunk=2)
    read = torch.zeros(B, dtype=torch.long)
    rows = torch.arange(B)
    for step in range(17):
        active = (rows + step) % 3 > 0
        actual = run_model(model, ids[rows, read][:, None], active[:, None], cache=cache)
        assert_near(actual[active, 0], full[rows, read][active])
        cache.advance(active.long())
        read = read + active


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("draft", [1, 4])
def test_a_truncated_draft_leaves_no_trace(name, draft):
    model, ids = tiny_model(name), random_tokens(length=LONG)
    cache, wrong = model.make_cache(B, LONG + draft, chunk=draft), random_tokens(length=LONG, seed=8)
    out = []
    for piece in ids.split(chunk_lengths(LONG, (9, 1, 2)), 1):
        read = sum(part.shape[1] for part in out)
        run_model(model, wrong[:, :draft], cache=cache)
        cache.advance(draft)
        cache.truncate(read)
        out.append(run_model(model, piece, cache=cache))
        cache.advance(piece.shape[1])
    assert_near(torch.cat(out, 1), run_model(model, ids))


@pytest.mark.parametrize("name", DECODERS)
def test_each_row_may_keep_a_different_part_of_a_draft(name):
    """Four tokens are written, of which the first 0 to 4 are right: each row continues after them."""
    model, ids, rows = tiny_model(name), random_tokens(length=LONG), torch.arange(B)
    num_right = rows % 5
    full, cache = run_model(model, ids), model.make_cache(B, LONG, chunk=4)
    run_model(model, ids[:, :10], cache=cache)
    cache.advance(10)
    draft = torch.where(torch.arange(4) < num_right[:, None], ids[:, 10:14], 0)
    run_model(model, draft, cache=cache)
    cache.advance(4)
    cache.truncate(10 + num_right)
    for _ in range(4):
        actual = run_model(model, ids[rows, cache.lengths][:, None], cache=cache)
        assert_near(actual[:, 0], full[rows, cache.lengths])
        cache.advance(1)


@pytest.mark.parametrize("name", DECODERS)
def test_a_pass_that_is_not_advanced_can_be_repeated(name):
    model, ids = tiny_model(name), random_tokens(length=LONG)
    cache = model.make_cache(B, LONG, chunk=4)
    run_model(model, ids[:, :12], cache=cache)
    cache.advance(12)
    first = run_model(model, ids[:, 12:16], cache=cache)
    assert_bit_equal(run_model(model, ids[:, 12:16], cache=cache), first)


@pytest.mark.parametrize("name", DECODERS)
def test_selected_rows_continue_in_their_new_order(name):
    model, ids = tiny_model(name), random_tokens(length=LONG)
    order = torch.tensor([7, 7, 0, 3, 10])
    cache, source = model.make_cache(B, LONG, chunk=5), random_source()
    run_model(model, ids[:, :12], cache=cache, source_ids=source)
    cache.advance(12)
    cache.select(order)
    text = torch.cat((ids[order, :12], random_tokens(len(order), LONG - 12, seed=4)), 1)
    expected = run_model(model, text, source_ids=source[order])[:, 12:]
    actual = [
        run_model(model, piece, cache=cache, source_ids=source[order])
        for piece in advance_after(cache, text[:, 12:], (1, 4))
    ]
    assert_near(torch.cat(actual, 1), expected)


def advance_after(cache, ids, sizes):
    for piece in ids.split(chunk_lengths(ids.shape[1], sizes), 1):
        yield piece
        cache.advance(piece.shape[1])


@pytest.mark.parametrize("name", DECODERS)
def test_a_forked_row_continues_independently(name):
    model, ids = tiny_model(name), random_tokens(3, LONG)
    cache, source = model.make_cache(3, LONG, chunk=2), random_source(3)
    run_model(model, ids[:, :12], cache=cache, source_ids=source)
    cache.advance(12)
    cache.fork(1)
    rows = torch.tensor([0, 1, 2, 1])
    text = torch.cat((ids[rows, :12], random_tokens(4, LONG - 12, seed=4)), 1)
    actual = [
        run_model(model, piece, cache=cache, source_ids=source[rows])
        for piece in advance_after(cache, text[:, 12:], (2,))
    ]
    assert_near(torch.cat(actual, 1), run_model(model, text, source_ids=source[rows])[:, 12:])


@pytest.mark.parametrize("name", law_names(is_encoder_decoder))
def test_the_source_is_encoded_and_its_keys_are_computed_once(name):
    model, ids, source = tiny_model(name), random_tokens(), random_source()
    calls = []
    modules = [block.cross.key for block in model.decoder.blocks] + [model.encoder]
    hooks = [module.register_forward_hook(lambda module, *_: calls.append(id(module))) for module in modules]
    cache = model.make_cache(B, ids.shape[1])
    actual = [model(source if step == 0 else None, ids[:, [step]], cache=cache) for step in step_through(cache, ids)]
    for hook in hooks:
        hook.remove()
    assert sorted(calls) == sorted(map(id, modules))
    assert_near(torch.cat(actual, 1), model(source, ids))


def step_through(cache, ids):
    for step in range(ids.shape[1]):
        yield step
        cache.advance(1)


@pytest.mark.parametrize("name", law_names(is_encoder_decoder))
def test_a_padded_source_stays_padded_in_the_cache(name):
    model, ids, source = tiny_model(name), random_tokens(), random_source()
    width, valid = pad_rows(source, 2, 3)
    cache = model.make_cache(B, ids.shape[1])
    actual = [model(width, ids[:, [step]], source_mask=valid, cache=cache) for step in step_through(cache, ids)]
    assert_near(torch.cat(actual, 1), model(source, ids))
