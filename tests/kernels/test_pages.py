"""Attention over pages against a gather and a softmax in fp64: on a GPU or, with TRITON_INTERPRET=1, on a CPU."""

import os

import pytest
import torch
from support import assert_near_in_norm

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from monoblock.kernels import gpu, gpu_attention
from monoblock.kernels.gpu_attention import (
    PAGE_SIZE,
    attend_pages,
    attend_source_pages,
    make_counters,
)

# Triton's interpreter of loops whose bounds are arrays of one number
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES = 23


@pytest.fixture(autouse=True)
def options(monkeypatch):
    if DEVICE.type == "cpu":
        for module in (gpu, gpu_attention):
            monkeypatch.setattr(module, "launch_options", lambda: {"PDL": False})


def random(*shape, seed=0, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def random_tables(rows, width, seed=3):
    """A table of different pages for each row; page 0 is nobody's."""
    order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(seed))[: rows * width] + 1
    return order.reshape(rows, width).int().to(DEVICE)


def read(pool, table):
    """The tokens (G, tokens, K) on the pages of a row, in fp64."""
    return pool[table.long()].double().transpose(0, 1).flatten(1, 2)


def rotated(x, cos, sin, layout):
    """x (heads, T, K) with its first features rotated; cos and sin (T, pairs)."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    pairs = cos.shape[-1]
    size = 2 * pairs
    first, second = (x[..., :pairs], x[..., pairs:size]) if layout == "halves" else (x[..., :size:2], x[..., 1:size:2])
    turned = first * cos - second * sin, second * cos + first * sin
    both = torch.cat(turned, -1) if layout == "halves" else torch.stack(turned, -1).flatten(-2)
    return torch.cat((both, x[..., size:]), -1)


def softmax_attention(q, keys, values, visible, scale=None):
    """q (H, T, K), keys and values (G, S, K) and visible (T, S): the heads (T, H K), 0 where nothing is visible."""
    group = len(q) // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = q.double() @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
    return (weights @ values).transpose(0, 1).flatten(1)


# rows have lengths and counts; heads, groups, head size; T
CASES = {
    "one token": ((37, 0, 48), (1, 1, 1), (3, 3, 16), 1),
    "an idle row": ((37, 29, 64), (1, 0, 1), (2, 1, 32), 1),
    "groups": ((5, 97), (1, 1), (10, 2, 32), 1),
    "a proposal": ((31, 0, 62), (5, 2, 3), (4, 2, 16), 5),
    "a chunk": ((17, 3), (41, 35), (6, 2, 16), 41),
}


@pytest.mark.parametrize("programs", [264, 1], ids=["splits", "whole"])
@pytest.mark.parametrize("layout", [None, "halves", "interleaved"])
@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("case", CASES)
def test_new_tokens_are_written_to_their_pages_and_see_all_before(case, window, layout, programs, monkeypatch):
    monkeypatch.setattr(gpu_attention, "TARGET_PROGRAMS", programs)
    lengths, counts, (H, G, K), T = CASES[case]
    R, P = len(lengths), 7
    q, k, v = random(R, H, T, K), random(R, T, G, K, seed=1).transpose(1, 2), random(R, G, T, K, seed=2)
    keys, values = random(PAGES, G, PAGE_SIZE, K, seed=4), random(PAGES, G, PAGE_SIZE, K, seed=5)
    tables = random_tables(R, P)
    angles = random(R, 1, T, 3, seed=6, dtype=torch.float32)
    cos, sin = (None, None) if layout is None else (angles.cos().half(), angles.sin().half())
    expected_keys, expected_values = keys.clone(), values.clone()
    expected = torch.zeros(R, T, H * K, dtype=torch.double, device=DEVICE)
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rope = [] if layout is None else [cos[r, 0, :count], sin[r, 0, :count], layout]
        queries, new = (rotated(x[r, :, :count], *rope).half() if rope else x[r, :, :count] for x in (q, k))
        for n in range(count):
            page, slot = tables[r, (length + n) // PAGE_SIZE], (length + n) % PAGE_SIZE
            expected_keys[page, :, slot], expected_values[page, :, slot] = new[:, n], v[r, :, n]
        place, column = torch.arange(length, length + count)[:, None], torch.arange(P * PAGE_SIZE)
        visible = (column <= place) & (column > place - (window or 1000))
        row = read(expected_keys, tables[r]), read(expected_values, tables[r])
        expected[r, :count] = softmax_attention(queries, *row, visible.to(DEVICE))
    counters = make_counters(R * keys.shape[1], keys.device)
    both = torch.tensor(lengths, device=DEVICE), torch.tensor(counts, device=DEVICE)
    out = attend_pages(
        q, k, v, keys, values, tables, *both,
        scale=None, cos=cos, sin=sin, layout=layout, window=window, finished=counters,
    ).values  # fmt: skip
    assert (counters == 0).all()
    assert_near_in_norm(keys, expected_keys, 1e-3)
    assert torch.equal(values, expected_values)
    assert out.isfinite().all()
    for r, count in enumerate(counts):
        assert_near_in_norm(out[r, :count], expected[r, :count], 2e-3)
        assert count > 0 or not out[r].any()


@pytest.mark.parametrize("programs", [264, 1], ids=["splits", "whole"])
@pytest.mark.parametrize("queries", [1, 3])
def test_every_token_sees_its_whole_source(queries, programs, monkeypatch):
    monkeypatch.setattr(gpu_attention, "TARGET_PROGRAMS", programs)
    lengths, R, P, (H, G, K) = (79, 0, 18, 31), 4, 5, (4, 2, 32)
    q, tables = random(R, H, queries, K), random_tables(R, P)
    keys, values = random(PAGES, G, PAGE_SIZE, K, seed=4), random(PAGES, G, PAGE_SIZE, K, seed=5)
    both = torch.tensor(lengths, device=DEVICE), torch.tensor((1, 1, queries, 0), device=DEVICE)
    out = attend_source_pages(q, keys, values, tables, *both, scale=0.3).values
    for r, length in enumerate((79, 0, 18, 0)):  # the last row has no token
        visible = (torch.arange(P * PAGE_SIZE, device=DEVICE) < length).expand(queries, -1)
        expected = softmax_attention(q[r], read(keys, tables[r]), read(values, tables[r]), visible, scale=0.3)
        assert_near_in_norm(out[r], expected, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16])
@pytest.mark.parametrize("size", [64, 256])
def test_other_dtypes_and_head_sizes(size, dtype):
    q, k, v = (random(2, 2, 1, size, seed=seed, dtype=dtype) for seed in range(3))
    keys, values = (random(PAGES, 2, PAGE_SIZE, size, seed=seed, dtype=dtype) for seed in (4, 5))
    tables, lengths, counts = random_tables(2, 6), torch.tensor((70, 33)), torch.ones(2, dtype=torch.long)
    both = lengths.to(DEVICE), counts.to(DEVICE)
    out = attend_pages(q, k, v, keys, values, tables, *both, scale=None).values
    for r, length in enumerate((70, 33)):
        visible = (torch.arange(6 * PAGE_SIZE, device=DEVICE) <= length)[None]
        expected = softmax_attention(q[r], read(keys, tables[r]), read(values, tables[r]), visible)
        assert_near_in_norm(out[r], expected, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("layout", [None, "halves"])
@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("case", CASES)
def test_exact_attention_has_the_bits_of_single_tokens(case, window, layout, monkeypatch):
    """In one pass with the parts of all rows in turn, and token by token with a program for each part."""
    monkeypatch.setattr(gpu_attention, "EXACT_PART", 64)
    lengths, counts, (H, G, K), T = CASES[case]
    R, tables = len(lengths), random_tables(len(lengths), 7)
    q, k, v = random(R, H, T, K), random(R, T, G, K, seed=1).transpose(1, 2), random(R, G, T, K, seed=2)
    angles = random(R, 1, T, 3, seed=6, dtype=torch.float32)
    cos, sin = angles.cos().half(), angles.sin().half()

    def attend(pools, before, new, first, last, exact=True):
        part = slice(first, last)
        turned = {} if layout is None else {"cos": cos[:, :, part], "sin": sin[:, :, part], "layout": layout}
        inputs = (one[:, :, part] for one in (q, k, v))
        numbers = (torch.tensor(one, device=DEVICE) for one in (before, new))
        return attend_pages(*inputs, *pools, tables, *numbers, scale=None, window=window, exact=exact, **turned)

    def pools():
        return random(PAGES, G, PAGE_SIZE, K, seed=4), random(PAGES, G, PAGE_SIZE, K, seed=5)

    monkeypatch.setattr(gpu_attention, "TARGET_PROGRAMS", 1)
    at_once = attend(pools(), lengths, counts, 0, T).values
    expected = attend(pools(), lengths, counts, 0, T, exact=False).values
    monkeypatch.setattr(gpu_attention, "TARGET_PROGRAMS", 264)
    same = pools()
    for n in range(T):
        now = [length + n for length in lengths], [int(n < count) for count in counts]
        single = attend(same, *now, n, n + 1).values
        for r, count in enumerate(counts):
            assert n >= count or torch.equal(single[r, 0], at_once[r, n])
    for r, count in enumerate(counts):
        assert_near_in_norm(at_once[r, :count], expected[r, :count], 2e-3)


def test_exact_attention_to_sources():
    lengths, (H, G, K) = torch.tensor((79, 0, 18), device=DEVICE), (4, 2, 32)
    q, tables = random(3, H, 5, K), random_tables(3, 5)
    pools = random(PAGES, G, PAGE_SIZE, K, seed=4), random(PAGES, G, PAGE_SIZE, K, seed=5)
    counts = torch.full_like(lengths, 5)
    out = attend_source_pages(q, *pools, tables, lengths, counts, scale=0.3, exact=True).values
    assert_near_in_norm(out, attend_source_pages(q, *pools, tables, lengths, counts, scale=0.3).values, 2e-3)
    first = (tables[:1], lengths[:1], counts[:1])
    single = attend_source_pages(q[:1, :, 3:4], *pools, *first, scale=0.3, exact=True).values
    assert torch.equal(single[0, 0], out[0, 3])


NUMPY = pytest.mark.skipif(DEVICE.type == "cpu", reason="numpy adds up tiles of other sizes in another order")


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 48, 32), (70, 100, 144), pytest.param(200, 300, 256, marks=NUMPY)]
)
def test_exact_products_have_the_bits_of_single_rows(rows, outputs, inputs):
    x, residual = random(rows, inputs), random(rows, outputs, seed=3)
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2)
    y = gpu.linear(x, weight, bias, residual, exact=True)
    assert_near_in_norm(y, x.double() @ weight.double().T + bias + residual, 2e-3)
    for first, last in ((0, 1), (rows // 2, rows // 2 + 3), (0, min(rows, 64))):
        assert torch.equal(gpu.linear(x[first:last], weight, bias, residual[first:last], exact=True), y[first:last])
