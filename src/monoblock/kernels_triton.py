"""The Triton source of `kernels`; imported only where Triton is installed and a GPU is there."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def matvec_kernel(
    x, weight, bias, beside, out, N, K,
    BIASED: tl.constexpr, BESIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> Any:  # fmt: skip
    """A program multiplies ROWS rows of the weight with x, COLUMNS numbers at a time, and adds them up in fp32."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    columns = tl.arange(0, COLUMNS)
    start = weight + rows.to(tl.int64)[:, None] * K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, COLUMNS):
        at = first + columns
        within = at < K
        w = tl.load(
            start + at[None, :], mask=inside[:, None] & within[None, :], other=0.0, eviction_policy="evict_first"
        )
        part = tl.load(x + at, mask=within, other=0.0)
        total += w.to(tl.float32) * part.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if BIASED:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if BESIDE:
        y = y.to(out.dtype.element_ty).to(tl.float32) + tl.load(beside + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(
    x, weight, bias, out, K, eps,
    CENTERED: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
) -> Any:  # fmt: skip
    """One vector a program."""
    row = tl.program_id(0).to(tl.int64) * K
    at = tl.arange(0, BLOCK)
    within = at < K
    wide = tl.load(x + row + at, mask=within, other=0.0).to(tl.float32)
    if CENTERED:
        wide = tl.where(within, wide - tl.sum(wide, 0) / K, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
    if SCALED:
        gain = tl.load(weight + at, mask=within, other=0.0).to(tl.float32)
        if AFTER:
            wide = wide * gain
        else:
            wide = wide.to(out.dtype.element_ty).to(tl.float32) * gain.to(out.dtype.element_ty).to(tl.float32)
    if BIASED:
        wide += tl.load(bias + at, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row + at, wide.to(out.dtype.element_ty), mask=within)


@triton.jit
def gated_kernel(x, out, F, KIND: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """act(gate) * up, rounded after the activation as two separate kernels would."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < F
    gate = tl.load(x + row * 2 * F + at, mask=within, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + at, mask=within, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate * tl.sigmoid(gate)
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2 * inner)
    elif KIND == 2:
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:
        gate = tl.maximum(gate, 0.0)
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + at, (gate * up).to(out.dtype.element_ty), mask=within)


@triton.jit
def turned(start, at, cos, sin, PAIRS: tl.constexpr, TURNED: tl.constexpr, mask) -> Any:
    """Numbers of a head at places `at`, turned by their angles; places beyond the pairs stay as they are."""
    x = tl.load(start + at, mask=mask, other=0.0).to(tl.float32)
    if TURNED == 0:
        return x
    if TURNED == 1:
        partner = tl.where(at < PAIRS, at + PAIRS, at - PAIRS)
        pair = at % PAIRS
        sign = tl.where(at < PAIRS, -1.0, 1.0)
    else:
        partner = at ^ 1
        pair = at // 2
        sign = tl.where(at % 2 == 0, -1.0, 1.0)
    inside = (at < 2 * PAIRS) & mask
    other = tl.load(start + partner, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + pair, mask=inside, other=0.0).to(tl.float32)
    return x * c + sign * other * s


@triton.jit
def attend_kernel(
    q, k, v, keys, values, lengths, cos, sin, out, parts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    keys_row, keys_head, keys_place, values_row, values_head, values_place,
    cos_row, H, G, splits,
    HEADS: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:  # fmt: skip
    """One group of heads of one row, one stretch of what is cached; the first stretch also takes the new token."""
    row, group, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    at = tl.arange(0, K)
    head = tl.arange(0, PADDED)
    real = head < HEADS
    length = tl.load(lengths + row)
    cos += row * cos_row
    sin += row * cos_row
    kind = out.dtype.element_ty
    first_head = group * HEADS
    heads = (first_head + head)[:, None] * q_head + tl.zeros((1, K), tl.int32)
    spread = tl.zeros((PADDED, 1), tl.int32) + at[None, :]
    query = turned(q + row * q_row + heads, spread, cos, sin, PAIRS, TURNED, real[:, None] & (spread < K))
    query = query.to(kind)  # (PADDED, K): matrix units multiply sixteen rows at least, real ones or not

    most = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED, K), tl.float32)
    keys += row.to(tl.int64) * keys_row + group * keys_head
    values += row.to(tl.int64) * values_row + group * values_head
    if split == 0:
        new_key = turned(k + row * k_row + group * k_head, at, cos, sin, PAIRS, TURNED, at < K).to(kind)
        new_value = tl.load(v + row * v_row + group * v_head + at)
        tl.store(keys + length * keys_place + at, new_key)
        tl.store(values + length * values_place + at, new_value)
        most = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        mixed += new_value.to(tl.float32)[None, :]
    stretch = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    begin = split * stretch
    end = tl.minimum(begin + stretch, length)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = place < end
        key = tl.load(keys + place[:, None] * keys_place + at[None, :], mask=seen[:, None], other=0.0)
        value = tl.load(values + place[:, None] * values_place + at[None, :], mask=seen[:, None], other=0.0)
        score = tl.where(seen[None, :], tl.dot(query, tl.trans(key)) * scale, -float("inf"))  # (PADDED, BLOCK)
        above = tl.maximum(most, tl.max(score, 1))
        shrink = tl.exp(most - above)
        share = tl.exp(score - above[:, None])
        total = total * shrink + tl.sum(share, 1)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(kind), value)
        most = above

    place = row * H + first_head + head
    if splits == 1:
        tl.store(out + place[:, None] * K + at[None, :], (mixed / total[:, None]).to(kind), mask=real[:, None])
    else:
        slot = parts + (place * splits + split) * (K + 2)
        tl.store(slot[:, None] + at[None, :], mixed, mask=real[:, None])
        tl.store(slot + K, most, mask=real)
        tl.store(slot + K + 1, total, mask=real)


@triton.jit
def combine_kernel(parts, out, splits, SPLITS: tl.constexpr, K: tl.constexpr) -> Any:
    """The stretches of one head put together; one that saw nothing weighs nothing."""
    head = tl.program_id(0)
    at, split = tl.arange(0, K), tl.arange(0, SPLITS)
    there = split < splits
    slot = parts + (head * splits + split) * (K + 2)
    most = tl.load(slot + K, mask=there, other=-float("inf"))
    weight = tl.exp(most - tl.max(most, 0))
    total = tl.sum(tl.load(slot + K + 1, mask=there, other=0.0) * weight, 0)
    mixed = tl.load(slot[:, None] + at[None, :], mask=there[:, None], other=0.0)
    y = tl.sum(mixed * weight[:, None], 0) / total
    tl.store(out + head * K + at, y.to(out.dtype.element_ty))
