"""The cache by itself: what is written where, what is handed out, and what taking back and moving rows leave behind."""

import pytest
import torch
from support import build, close, tokens

from monoblock.cache import Cache
from monoblock.config import AttentionConfig, BlockConfig, FeedForwardConfig, Repeat, StackConfig
from monoblock.errors import InputError
from monoblock.families import stack
from monoblock.knobs import rebuild, vary
from monoblock.masks import Where, run
from monoblock.presets import tiny

B, G, K = 2, 3, 5
BLOCK = BlockConfig(width=6, attention=AttentionConfig(heads=3), feedforward=FeedForwardConfig(hidden=7))
NEAR = BlockConfig(width=6, attention=AttentionConfig(heads=3, window=4), feedforward=FeedForwardConfig(hidden=7))


def make(*blocks, capacity=11, chunk=2, batch=B):
    return Cache(stack(len(blocks), *blocks), batch=batch, capacity=capacity, chunk=chunk)


def keys(length, start=0):
    """Keys that say which token they belong to."""
    return torch.arange(start, start + length).float().view(1, 1, length, 1).expand(B, G, length, K).contiguous()


def write(cache, new, where=None):
    """One pass over all slots: what each hands out, and where that stands."""
    where = where if where is not None else run(new.shape[2], cache.start)
    entries = cache.enter(where)
    return [(slot.store(new, -new, entry), entry.where) for slot, entry in zip(cache.slots, entries, strict=True)]


def seen(handed, where, row=0):
    """The tokens a row may see, in order."""
    found = handed.keys[row, 0, :, 0]
    real = torch.ones_like(found, dtype=torch.bool) if where.real is None else where.real.expand(B, -1)[row]
    return sorted(found[real].int().tolist())


def test_a_full_slot_hands_out_everything_so_far():
    cache = make(BLOCK)
    for start, length in ((0, 3), (3, 1), (4, 5)):
        [(handed, where)] = write(cache, keys(length, start))
        assert seen(handed, where) == list(range(start + length))
        assert torch.equal(handed.values, -handed.keys)
        cache.advance(length)


def test_a_ring_keeps_what_a_window_can_still_see():
    cache = make(NEAR, capacity=97)
    assert cache.slots[0].capacity == 5  # window + chunk - 1
    for start in range(0, 40, 2):
        [(handed, where)] = write(cache, keys(2, start))
        assert set(range(max(0, start - 3), start + 2)) <= set(seen(handed, where))
        assert set(seen(handed, where)) <= set(range(start + 2))
        cache.advance(2)


def test_a_chunk_longer_than_the_ring_is_handed_out_whole_with_what_came_before():
    cache = make(NEAR, capacity=97)
    write(cache, keys(2))
    cache.advance(2)
    [(handed, where)] = write(cache, keys(19, 2))
    assert seen(handed, where) == list(range(21))
    cache.advance(19)
    [(handed, where)] = write(cache, keys(1, 21))
    assert {18, 19, 20, 21} <= set(seen(handed, where))


def test_padding_takes_no_room():
    cache, real = make(BLOCK), torch.tensor([[True, True, False], [False, True, False]])
    where = Where(torch.tensor([[0, 1, 1], [0, 0, 0]]), real=real)
    [(handed, at)] = write(cache, keys(3), where)
    assert [seen(handed, at, row) for row in range(B)] == [[0, 1], [1]]
    cache.advance(real.sum(1))
    assert cache.lengths.tolist() == [2, 1]
    assert cache.longest == 2


def test_a_pass_moves_nothing_until_it_is_advanced():
    cache = make(BLOCK, NEAR)
    write(cache, keys(2))
    assert cache.lengths.tolist() == [0, 0]
    for handed, where in write(cache, keys(2, 50)):
        assert seen(handed, where) == [50, 51]


@pytest.mark.parametrize("block", [BLOCK, NEAR], ids=["full", "ring"])
@pytest.mark.parametrize("lengths", [4, torch.tensor([4, 5])], ids=["one length", "one a row"])
def test_what_is_taken_back_is_never_seen_again(block, lengths):
    cache = make(block)
    for start in range(0, 6, 2):
        write(cache, keys(2, start))
        cache.advance(2)
    cache.truncate(lengths)
    where = Where(cache.lengths[:, None])
    [(handed, at)] = write(cache, keys(1, 70), where)
    for row, kept in enumerate(cache.lengths.tolist()):
        inside = range(max(0, kept - 3), kept) if block is NEAR else range(kept)
        assert set(inside) | {70} <= set(seen(handed, at, row)) <= set(range(kept)) | {70}


def test_to_truncate_beyond_the_length_changes_nothing():
    cache = make(BLOCK)
    write(cache, keys(3))
    cache.advance(3)
    cache.truncate(9)
    assert (cache.lengths.tolist(), cache.start, cache.longest) == ([3, 3], 3, 3)


def test_rows_are_selected_in_order_and_may_repeat():
    cache, new = make(BLOCK), keys(3)
    new[1] += 100
    write(cache, new)
    cache.advance(torch.tensor([3, 2]))
    cache.select(torch.tensor([1, 0, 1]))
    assert cache.batch == 3
    assert cache.lengths.tolist() == [2, 3, 2]
    assert cache.slots[0].keys[:, 0, 0, 0].tolist() == [100, 0, 100]


@pytest.mark.parametrize("row", [0, 1, -1])
def test_a_forked_row_is_a_copy_at_the_end(row):
    cache, new = make(BLOCK, NEAR), keys(2)
    new[1] += 100
    write(cache, new)
    cache.advance(2)
    cache.fork(row)
    assert cache.batch == 3
    for slot in cache.slots:
        assert torch.equal(slot.keys[2], slot.keys[row if row >= 0 else 1])


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_that_is_full_says_how_large_it_must_be(ragged):
    cache = make(BLOCK, capacity=5)
    write(cache, keys(3))
    cache.advance(torch.tensor([3, 3]) if ragged else 3)
    with pytest.raises(InputError, match=r"holds 5 tokens.*3 are in it and 3 more.*capacity=6"):
        cache.enter(run(3, 3))


def test_padding_is_not_counted_against_the_capacity():
    cache = make(BLOCK, capacity=5)
    real = torch.arange(9).expand(B, 9) < 4
    [entry] = cache.enter(Where(torch.arange(9).expand(B, 9), real=real))
    assert entry.where.real.sum(-1).tolist() == [4] * B


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"capacity": 0}, {"chunk": 0}])
def test_a_cache_of_nothing_cannot_be(wrong):
    with pytest.raises(InputError, match="write 1 or more"):
        make(BLOCK, **wrong)


def test_bytes_are_those_of_keys_and_values_without_the_spare_column():
    cache = make(BLOCK, NEAR, capacity=13)
    assert cache.bytes == 0
    write(cache, keys(2))
    assert cache.bytes == 2 * 4 * B * G * K * (13 + 5)


def test_windows_share_a_ring_of_their_own_size():
    far = vary_window(NEAR, 6)
    cache = make(NEAR, BLOCK, far, NEAR, capacity=31)
    assert [slot.capacity for slot in cache.slots] == [5, 31, 7, 5]
    assert set(cache.places) == {5, 7, 31}


def vary_window(block, size):
    def edit(part, values):
        if isinstance(part, AttentionConfig):
            values["window"] = size

    return rebuild(block, edit)


def test_a_window_no_shorter_than_the_capacity_needs_no_ring():
    assert [slot.capacity for slot in make(NEAR, capacity=5).slots] == [5]
    assert make(NEAR, capacity=5).places[5].window is None


def test_flags_given_with_the_prompt_hold_for_later_steps():
    """Global tokens named once are seen by every later token, as in one full pass."""

    def edit(part, values):
        if isinstance(part, AttentionConfig):
            values.update(window=3, global_tokens=True)

    model, ids = build(rebuild(tiny("llama-7b"), edit), torch.float64), tokens(B, 13)
    flags = torch.zeros_like(ids, dtype=torch.bool)
    flags[:, 2] = True
    cache = model.make_cache(B, 13)
    with torch.no_grad():
        out = [model(ids[:, :7], flags=flags[:, :7], cache=cache)]
        for step in range(7, 13):
            cache.advance(7 if step == 7 else 1)
            out.append(model(ids[:, [step]], cache=cache))
        close(torch.cat(out, 1), model(ids, flags=flags))


def test_a_prefix_in_the_first_chunk_is_seen_both_ways():
    model, ids = build(vary(tiny("gpt2"), mask="prefix"), torch.float64), tokens(B, 13)
    flags = torch.arange(13).expand(B, 13) < torch.tensor([[5], [3]])
    cache = model.make_cache(B, 13)
    with torch.no_grad():
        out = [model(ids[:, :7], flags=flags[:, :7], cache=cache)]
        cache.advance(7)
        out.append(model(ids[:, 7:], cache=cache))
        full = model(ids, flags=flags)
        close(torch.cat(out, 1), full)
        assert not torch.allclose(full, model(ids))


def test_a_cache_of_a_stack_has_a_slot_a_layer_also_where_weights_are_tied():
    tied = StackConfig(pattern=(Repeat(blocks=(BLOCK,), times=3, tied=True),))
    assert len(Cache(tied, batch=B, capacity=5).slots) == 3


def test_a_draft_longer_than_a_ring_can_take_back_is_refused():
    """What the window needs has been overwritten: better one line than other logits."""
    cache = make(NEAR, capacity=97, chunk=1)
    for start in range(9):
        write(cache, keys(1, start))
        cache.advance(1)
    with pytest.raises(InputError, match="chunk"):
        cache.truncate(4)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b"])
def test_packed_documents_may_come_in_chunks(name):
    """A document that goes on in the next chunk goes on counting; a new one begins at 0."""
    model, ids = build(tiny(name), torch.float64), tokens(B, 13)
    documents = torch.tensor([0] * 5 + [1] * 6 + [2] * 2).expand(B, 13)
    cache, out = model.make_cache(B, 13), []
    with torch.no_grad():
        for piece in torch.arange(13).split((8, 1, 4)):
            out.append(model(ids[:, piece], documents=documents[:, piece], cache=cache))
            cache.advance(len(piece))
        close(torch.cat(out, 1), model(ids, documents=documents))
