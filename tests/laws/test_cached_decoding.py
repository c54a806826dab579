"""Cached logits are those of one full pass: by steps, in chunks, ragged, after rows moved or were taken back."""

import pytest
import torch
from support import B, bit_equal, cached, close, cut, has_both, is_decoder, padded, presets, read, source, tokens, toy

DECODERS = presets(is_decoder)
LONG = 23  # several windows, and more than any ring below holds
CHUNKS = {  # sizes of the pieces, and the chunk the cache is made for
    "steps": ((1,), 1),
    "steps, roomy ring": ((1,), 7),
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
@pytest.mark.parametrize("how", CHUNKS)
def test_cached_logits_are_the_full_ones(name, how):
    model, ids = toy(name), tokens(length=LONG)
    sizes, chunk = CHUNKS[how]
    close(cached(model, ids, sizes, chunk=chunk), read(model, ids))


@pytest.mark.parametrize("name", DECODERS)
def test_cached_logits_are_the_full_ones_in_double_precision(name):
    model, ids = toy(name, torch.float64), tokens(length=LONG)
    close(cached(model, ids, (4, 1, 9), chunk=3), read(model, ids))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_different_lengths_are_decoded_as_if_alone(name, side):
    """Prompts of 4 to 10 tokens in one padded batch, then steps: each row as in its own full pass."""
    model, ids, new = toy(name), tokens(length=LONG), 9
    lengths = 4 + torch.arange(B) % 7
    padding = int(lengths.max()) - lengths
    prompts, real = _prompts(ids, lengths, padding if side == "left" else torch.zeros_like(padding))
    cache, full = model.make_cache(B, LONG, chunk=3), read(model, ids)
    last = real.long() * torch.arange(real.shape[1])
    out = [read(model, prompts, real, cache=cache)[torch.arange(B), last.amax(1)][:, None]]
    cache.advance(lengths)
    for step in range(new):
        out.append(read(model, ids.gather(1, lengths[:, None] + step), cache=cache))
        cache.advance(1)
    places = (lengths - 1)[:, None] + torch.arange(new + 1)
    close(torch.cat(out, 1), full[torch.arange(B)[:, None], places])


def _prompts(ids, lengths, left):
    """The first `lengths` tokens of each row, after `left` of padding."""
    wide = int(lengths.max())
    places = torch.arange(wide) - left[:, None]
    real = (places >= 0) & (places < lengths[:, None])
    return torch.where(real, ids.gather(1, places.clamp(0, ids.shape[1] - 1)), 0), real


@pytest.mark.parametrize("name", DECODERS)
def test_steps_with_padding_leave_a_row_where_it_was(name):
    """A row that pauses (its token is padding) takes no room and goes on as if nothing had happened."""
    model, ids = toy(name), tokens(length=LONG)
    full, cache = read(model, ids), model.make_cache(B, LONG, chunk=2)
    done = torch.zeros(B, dtype=torch.long)
    rows = torch.arange(B)
    for step in range(17):
        goes = (rows + step) % 3 > 0
        found = read(model, ids[rows, done][:, None], goes[:, None], cache=cache)
        close(found[goes, 0], full[rows, done][goes])
        cache.advance(goes.long())
        done = done + goes


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("draft", [1, 4])
def test_a_draft_taken_back_leaves_no_trace(name, draft):
    model, ids = toy(name), tokens(length=LONG)
    cache, wrong = model.make_cache(B, LONG + draft, chunk=draft), tokens(length=LONG, seed=8)
    out = []
    for piece in ids.split(cut(LONG, (9, 1, 2)), 1):
        done = sum(part.shape[1] for part in out)
        read(model, wrong[:, :draft], cache=cache)
        cache.advance(draft)
        cache.truncate(done)
        out.append(read(model, piece, cache=cache))
        cache.advance(piece.shape[1])
    close(torch.cat(out, 1), read(model, ids))


@pytest.mark.parametrize("name", DECODERS)
def test_each_row_may_keep_a_different_part_of_a_draft(name):
    """Four tokens are written, the first 0 to 4 of them are right: each row goes on from there."""
    model, ids, rows = toy(name), tokens(length=LONG), torch.arange(B)
    right = rows % 5
    full, cache = read(model, ids), model.make_cache(B, LONG, chunk=4)
    read(model, ids[:, :10], cache=cache)
    cache.advance(10)
    draft = torch.where(torch.arange(4) < right[:, None], ids[:, 10:14], 0)
    read(model, draft, cache=cache)
    cache.advance(4)
    cache.truncate(10 + right)
    for _ in range(4):
        found = read(model, ids[rows, cache.lengths][:, None], cache=cache)
        close(found[:, 0], full[rows, cache.lengths])
        cache.advance(1)


@pytest.mark.parametrize("name", DECODERS)
def test_a_pass_that_is_not_advanced_can_be_repeated(name):
    model, ids = toy(name), tokens(length=LONG)
    cache = model.make_cache(B, LONG, chunk=4)
    read(model, ids[:, :12], cache=cache)
    cache.advance(12)
    first = read(model, ids[:, 12:16], cache=cache)
    bit_equal(read(model, ids[:, 12:16], cache=cache), first)


@pytest.mark.parametrize("name", DECODERS)
def test_selected_rows_go_on_in_their_new_order(name):
    model, ids = toy(name), tokens(length=LONG)
    order = torch.tensor([7, 7, 0, 3, 10])
    cache, src = model.make_cache(B, LONG, chunk=5), source()
    read(model, ids[:, :12], cache=cache, src=src)
    cache.advance(12)
    cache.select(order)
    text = torch.cat((ids[order, :12], tokens(len(order), LONG - 12, seed=4)), 1)
    expected = read(model, text, src=src[order])[:, 12:]
    found = [read(model, piece, cache=cache, src=src[order]) for piece in _advancing(cache, text[:, 12:], (1, 4))]
    close(torch.cat(found, 1), expected)


def _advancing(cache, ids, sizes):
    for piece in ids.split(cut(ids.shape[1], sizes), 1):
        yield piece
        cache.advance(piece.shape[1])


@pytest.mark.parametrize("name", DECODERS)
def test_a_forked_row_goes_its_own_way(name):
    model, ids = toy(name), tokens(3, LONG)
    cache, src = model.make_cache(3, LONG, chunk=2), source(3)
    read(model, ids[:, :12], cache=cache, src=src)
    cache.advance(12)
    cache.fork(1)
    rows = torch.tensor([0, 1, 2, 1])
    text = torch.cat((ids[rows, :12], tokens(4, LONG - 12, seed=4)), 1)
    found = [read(model, piece, cache=cache, src=src[rows]) for piece in _advancing(cache, text[:, 12:], (2,))]
    close(torch.cat(found, 1), read(model, text, src=src[rows])[:, 12:])


@pytest.mark.parametrize("name", presets(has_both))
def test_the_source_is_read_and_its_keys_are_made_once(name):
    model, ids, src = toy(name), tokens(), source()
    calls = []
    hooked = [block.cross.key for block in model.decoder.blocks] + [model.encoder]
    hooks = [module.register_forward_hook(lambda module, *_: calls.append(id(module))) for module in hooked]
    cache = model.make_cache(B, ids.shape[1])
    found = [model(src if step == 0 else None, ids[:, [step]], cache=cache) for step in _stepping(cache, ids)]
    for hook in hooks:
        hook.remove()
    assert sorted(calls) == sorted(map(id, hooked))
    close(torch.cat(found, 1), model(src, ids))


def _stepping(cache, ids):
    for step in range(ids.shape[1]):
        yield step
        cache.advance(1)


@pytest.mark.parametrize("name", presets(has_both))
def test_a_padded_source_stays_padded_in_the_cache(name):
    model, ids, src = toy(name), tokens(), source()
    wide, real = padded(src, 2, 3)
    cache = model.make_cache(B, ids.shape[1])
    found = [model(wide, ids[:, [step]], source_mask=real, cache=cache) for step in _stepping(cache, ids)]
    close(torch.cat(found, 1), model(src, ids))
