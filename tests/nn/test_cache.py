"""The cache alone: which columns are written and returned, and what truncating and reordering rows leave behind."""

import pytest
import torch
from support import assert_near, build_model, random_tokens

from monoblock.config.families import build_stack
from monoblock.config.knobs import rebuild, vary
from monoblock.config.model import AttentionConfig, BlockConfig, FeedForwardConfig, Repeat, StackConfig
from monoblock.config.presets import tiny
from monoblock.errors import InputError
from monoblock.nn.cache import Cache
from monoblock.nn.masks import TokenPositions, arange_positions

B, G, K = 2, 3, 5
BLOCK = BlockConfig(width=6, attention=AttentionConfig(heads=3), feedforward=FeedForwardConfig(hidden=7))
WINDOWED = BlockConfig(width=6, attention=AttentionConfig(heads=3, window=4), feedforward=FeedForwardConfig(hidden=7))


def build_cache(*blocks, capacity=11, chunk=2, batch=B):
    return Cache(build_stack(len(blocks), *blocks), batch=batch, capacity=capacity, chunk=chunk)


def keys(length, start=0):
    """Keys that hold the index of their token."""
    return torch.arange(start, start + length).float().view(1, 1, length, 1).expand(B, G, length, K).contiguous()


def write(cache, new, positions=None):
    """One pass over all layers: what each returns, and the positions of its keys."""
    positions = positions if positions is not None else arange_positions(new.shape[2], cache.common_length)
    writes = cache.prepare_write(positions)
    return [
        (layer.update(new, -new, write_), write_.key_positions)
        for layer, write_ in zip(cache.layers, writes, strict=True)
    ]


def visible_tokens(key_values, positions, row=0):
    """The tokens a row may see, sorted."""
    tokens = key_values.keys[row, 0, :, 0]
    valid = torch.ones_like(tokens, dtype=torch.bool) if positions.valid is None else positions.valid.expand(B, -1)[row]
    return sorted(tokens[valid].int().tolist())


def test_a_full_layer_returns_all_tokens_so_far():
    cache = build_cache(BLOCK)
    for start, length in ((0, 3), (3, 1), (4, 5)):
        [(key_values, positions)] = write(cache, keys(length, start))
        assert visible_tokens(key_values, positions) == list(range(start + length))
        assert torch.equal(key_values.values, -key_values.keys)
        cache.advance(length)


def test_a_ring_keeps_what_a_window_still_sees():
    cache = build_cache(WINDOWED, capacity=97)
    assert cache.layers[0].capacity == 5  # window + chunk - 1
    for start in range(0, 40, 2):
        [(key_values, positions)] = write(cache, keys(2, start))
        assert set(range(max(0, start - 3), start + 2)) <= set(visible_tokens(key_values, positions))
        assert set(visible_tokens(key_values, positions)) <= set(range(start + 2))
        cache.advance(2)


def test_a_chunk_longer_than_the_ring_is_returned_after_the_old_tokens():
    cache = build_cache(WINDOWED, capacity=97)
    write(cache, keys(2))
    cache.advance(2)
    [(key_values, positions)] = write(cache, keys(19, 2))
    assert visible_tokens(key_values, positions) == list(range(21))
    cache.advance(19)
    [(key_values, positions)] = write(cache, keys(1, 21))
    assert {18, 19, 20, 21} <= set(visible_tokens(key_values, positions))


@pytest.mark.parametrize("counts", [3, torch.tensor([3, 19])[:B]], ids=["a number", "one for each row"])
def test_tokens_of_a_pass_longer_than_the_chunk_cannot_be_dropped_or_written_again(counts):
    """The pass has overwritten what the window of the token after the kept ones needs."""
    cache = build_cache(WINDOWED, capacity=97)
    write(cache, keys(7))
    cache.advance(7)
    write(cache, keys(19, 7))
    with pytest.raises(InputError, match=r"16 tokens cannot be dropped.*chunk=16 or more"):
        cache.advance(counts)
    with pytest.raises(InputError, match=r"19 tokens cannot be dropped.*chunk=19 or more"):
        write(cache, keys(19, 7))
    cache.advance(19)  # all may be kept
    write(cache, keys(2, 26))
    cache.advance(1)  # and of a chunk, some


@pytest.mark.parametrize(("block", "chunk", "droppable"), [(WINDOWED, 2, 2), (WINDOWED, 5, 5), (WINDOWED, 94, 97)])
def test_a_cache_knows_how_many_tokens_it_can_drop_again(block, chunk, droppable):
    assert build_cache(block, capacity=97, chunk=chunk).max_droppable == droppable


def test_padding_is_not_stored():
    cache, valid = build_cache(BLOCK), torch.tensor([[True, True, False], [False, True, False]])
    positions = TokenPositions(torch.tensor([[0, 1, 1], [0, 0, 0]]), valid=valid)
    [(key_values, key_positions)] = write(cache, keys(3), positions)
    assert [visible_tokens(key_values, key_positions, row) for row in range(B)] == [[0, 1], [1]]
    cache.advance(valid.sum(1))
    assert cache.lengths.tolist() == [2, 1]
    assert cache.max_length == 2


def test_a_pass_does_not_advance_the_cache():
    cache = build_cache(BLOCK, WINDOWED)
    write(cache, keys(2))
    assert cache.lengths.tolist() == [0, 0]
    for key_values, positions in write(cache, keys(2, 50)):
        assert visible_tokens(key_values, positions) == [50, 51]


@pytest.mark.parametrize("block", [BLOCK, WINDOWED], ids=["full", "ring"])
@pytest.mark.parametrize("lengths", [4, torch.tensor([4, 5])], ids=["one length", "one a row"])
def test_truncated_tokens_are_never_seen_again(block, lengths):
    cache = build_cache(block)
    for start in range(0, 6, 2):
        write(cache, keys(2, start))
        cache.advance(2)
    cache.truncate(lengths)
    positions = TokenPositions(cache.lengths[:, None])
    [(key_values, key_positions)] = write(cache, keys(1, 70), positions)
    for row, length in enumerate(cache.lengths.tolist()):
        inside = range(max(0, length - 3), length) if block is WINDOWED else range(length)
        assert set(inside) | {70} <= set(visible_tokens(key_values, key_positions, row)) <= set(range(length)) | {70}


def test_truncating_beyond_the_length_changes_nothing():
    cache = build_cache(BLOCK)
    write(cache, keys(3))
    cache.advance(3)
    cache.truncate(9)
    assert (cache.lengths.tolist(), cache.common_length, cache.max_length) == ([3, 3], 3, 3)


def test_rows_are_selected_in_order_and_may_repeat():
    cache, new = build_cache(BLOCK), keys(3)
    new[1] += 100
    write(cache, new)
    cache.advance(torch.tensor([3, 2]))
    cache.select(torch.tensor([1, 0, 1]))
    assert cache.batch == 3
    assert cache.lengths.tolist() == [2, 3, 2]
    assert cache.layers[0].keys[:, 0, 0, 0].tolist() == [100, 0, 100]


@pytest.mark.parametrize("row", [0, 1, -1])
def test_a_forked_row_is_a_copy_at_the_end(row):
    cache, new = build_cache(BLOCK, WINDOWED), keys(2)
    new[1] += 100
    write(cache, new)
    cache.advance(2)
    cache.fork(row)
    assert cache.batch == 3
    for layer in cache.layers:
        assert torch.equal(layer.keys[2], layer.keys[row if row >= 0 else 1])


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_that_is_full_says_how_large_it_must_be(ragged):
    cache = build_cache(BLOCK, capacity=5)
    write(cache, keys(3))
    cache.advance(torch.tensor([3, 3]) if ragged else 3)
    with pytest.raises(InputError, match=r"holds at most 5 tokens.*3 are in it and 3 more.*capacity=6"):
        cache.prepare_write(arange_positions(3, 3))


def test_padding_is_not_counted_against_the_capacity():
    cache = build_cache(BLOCK, capacity=5)
    valid = torch.arange(9).expand(B, 9) < 4
    [write_] = cache.prepare_write(TokenPositions(torch.arange(9).expand(B, 9), valid=valid))
    assert write_.key_positions.valid.sum(-1).tolist() == [4] * B


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"capacity": 0}, {"chunk": 0}])
def test_an_empty_cache_is_refused(wrong):
    with pytest.raises(InputError, match="write 1 or more"):
        build_cache(BLOCK, **wrong)


def test_nbytes_counts_keys_and_values_without_the_scratch_column():
    cache = build_cache(BLOCK, WINDOWED, capacity=13)
    assert cache.nbytes == 0
    write(cache, keys(2))
    assert cache.nbytes == 2 * 4 * B * G * K * (13 + 5)


def test_blocks_with_one_window_share_an_index():
    far = with_window(WINDOWED, 6)
    cache = build_cache(WINDOWED, BLOCK, far, WINDOWED, capacity=31)
    assert [layer.capacity for layer in cache.layers] == [5, 31, 7, 5]
    assert set(cache.index_by_capacity) == {5, 7, 31}


def with_window(block, size):
    def edit(part, values):
        if isinstance(part, AttentionConfig):
            values["window"] = size

    return rebuild(block, edit)


def test_a_window_no_shorter_than_the_capacity_needs_no_ring():
    assert [layer.capacity for layer in build_cache(WINDOWED, capacity=5).layers] == [5]
    assert build_cache(WINDOWED, capacity=5).index_by_capacity[5].window is None


def test_flags_of_the_prompt_hold_for_later_steps():
    """Global tokens named once are seen by every later token, as in one full pass."""

    def edit(part, values):
        if isinstance(part, AttentionConfig):
            values.update(window=3, global_tokens=True)

    model, ids = build_model(rebuild(tiny("llama-7b"), edit), torch.float64), random_tokens(B, 13)
    flags = torch.zeros_like(ids, dtype=torch.bool)
    flags[:, 2] = True
    cache = model.make_cache(B, 13)
    with torch.no_grad():
        out = [model(ids[:, :7], flags=flags[:, :7], cache=cache)]
        for step in range(7, 13):
            cache.advance(7 if step == 7 else 1)
            out.append(model(ids[:, [step]], cache=cache))
        assert_near(torch.cat(out, 1), model(ids, flags=flags))


def test_a_prefix_in_the_first_chunk_is_seen_both_ways():
    model, ids = build_model(vary(tiny("gpt2"), mask="prefix"), torch.float64), random_tokens(B, 13)
    flags = torch.arange(13).expand(B, 13) < torch.tensor([[5], [3]])
    cache = model.make_cache(B, 13)
    with torch.no_grad():
        out = [model(ids[:, :7], flags=flags[:, :7], cache=cache)]
        cache.advance(7)
        out.append(model(ids[:, 7:], cache=cache))
        full = model(ids, flags=flags)
        assert_near(torch.cat(out, 1), full)
        assert not torch.allclose(full, model(ids))


def test_tied_layers_have_separate_caches():
    tied = StackConfig(pattern=(Repeat(blocks=(BLOCK,), times=3, tied=True),))
    assert len(Cache(tied, batch=B, capacity=5).layers) == 3


def test_truncating_more_than_a_ring_keeps_is_refused():
    cache = build_cache(WINDOWED, capacity=97, chunk=1)
    for start in range(9):
        write(cache, keys(1, start))
        cache.advance(1)
    with pytest.raises(InputError, match="chunk"):
        cache.truncate(4)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b"])
def test_packed_documents_may_come_in_chunks(name):
    """A document that continues in the next chunk continues counting; a new one begins at 0."""
    model, ids = build_model(tiny(name), torch.float64), random_tokens(B, 13)
    documents = torch.tensor([0] * 5 + [1] * 6 + [2] * 2).expand(B, 13)
    cache, out = model.make_cache(B, 13), []
    with torch.no_grad():
        for index in torch.arange(13).split((8, 1, 4)):
            out.append(model(ids[:, index], documents=documents[:, index], cache=cache))
            cache.advance(len(index))
        assert_near(torch.cat(out, 1), model(ids, documents=documents))
