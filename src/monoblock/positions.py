"""Where a token stands: sinusoids (added), rotary angles (turned), ALiBi and T5 buckets (a bias on the scores).

All are functions of positions, never of an index into a buffer, so padding, packing and caches need no special case.
Angles are made in fp32 at every dtype, as in the published models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.config import Alibi, Buckets, Rotary, Scaling, Sinusoid


def sinusoid(positions: Tensor, width: int, config: Sinusoid = Sinusoid()) -> Tensor:
    """PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos(the same) (Vaswani et al. 2017, 3.5): (…, D)."""
    half = width // 2 if config.form == "fairseq" else (width + 1) // 2
    spread = max(half - 1, 1) if config.form == "fairseq" else width / 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float64) / spread
    angles = (positions + config.offset).unsqueeze(-1) * config.base**-exponents  # (…, D/2)
    if config.form == "interleaved":
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    else:
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
    waves = F.pad(waves, (0, max(0, width - waves.shape[-1])))  # fairseq leaves the last of an odd width empty
    return waves[..., :width].float()


def grid_sinusoid(side: int, width: int, config: Sinusoid, device: torch.device) -> Tensor:
    """Half of the width tells the row of a patch, half its column: (side * side, D)."""
    half = width // 2
    places = torch.arange(side, device=device)
    waves = sinusoid(places, half, Sinusoid(form="halves", base=config.base))  # (side, D/2)
    rows = waves[:, None].expand(side, side, half)
    columns = sinusoid(places, width - half, Sinusoid(form="halves", base=config.base))[None].expand(
        side, side, width - half
    )
    return torch.cat((rows, columns), dim=-1).flatten(0, 1)


def regrid(table: Tensor, side: int) -> Tensor:
    """Places learned on one grid, (places, D) row by row, read off at side × side points by bicubic interpolation.

    Corners of the two images, not of their patches, lie on each other (Dosovitskiy et al. 2021, 3.2).
    """
    before = math.isqrt(table.shape[0])
    grid = table.detach().float().mT.unflatten(-1, (before, before))[None]  # (1, D, before, before)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return grid[0].flatten(1).mT.contiguous().to(table.dtype)


# -- rotary -------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """Cosines and sines to turn query and key pairs by, each (B, 1, T, pairs)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def rotary_frequencies(config: Rotary, size: int, positions: Tensor | None = None) -> tuple[Tensor, float]:
    """Radians a place for each pair (pairs,), and the factor on cosine and sine.

    `positions` (B, T) matter to dynamic and longrope only, which look at how long each text is: (B, pairs).
    """
    dim = config.dim if config.dim is not None else size
    device = positions.device if positions is not None else None
    scaling = config.scaling
    even = torch.arange(0, dim, 2, device=device).float()
    if scaling is None:
        return 1.0 / config.base ** (even / dim), 1.0
    if scaling.kind == "proportional":  # a part of the pairs of the whole head is turned, the rest stands still
        turned = 1.0 / config.base ** (even / size) / scaling.factor
        return torch.cat((turned, turned.new_zeros(size // 2 - dim // 2))), 1.0
    if scaling.kind in ("ntk", "dynamic"):
        return 1.0 / _stretched_base(config.base, scaling, dim, positions) ** (even / dim), 1.0
    plain = 1.0 / config.base ** (even / dim)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, config.base, dim), _yarn_factor(scaling)
    return _longrope(plain, scaling, positions)


def _stretched_base(base: float, scaling: Scaling, dim: int, positions: Tensor | None) -> float | Tensor:
    """NTK-aware: a larger base stretches slow pairs most; dynamic: as much as the longest position needs."""
    power = dim / (dim - 2) if dim > 2 else 1.0
    if scaling.kind == "ntk":
        return base * scaling.factor**power
    assert scaling.original_context is not None
    length: int | Tensor = scaling.original_context
    if positions is not None:  # each row by itself, whatever its neighbours: (B, 1)
        length = (positions.amax(-1, keepdim=True) + 1).clamp(min=scaling.original_context)
    return base * (scaling.factor * length / scaling.original_context - (scaling.factor - 1)) ** power


def _llama3(plain: Tensor, scaling: Scaling) -> Tensor:
    """Fast pairs kept, slow ones divided by the factor, a ramp between (Grattafiori et al. 2024)."""
    assert scaling.original_context is not None
    turns = scaling.original_context * plain / (2 * math.pi)  # whole turns within the original context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * plain / scaling.factor + ramp * plain


def _yarn(plain: Tensor, scaling: Scaling, base: float, dim: int) -> Tensor:
    """As llama3, but the ramp is linear in the index of the pair (Peng et al. 2023)."""
    assert scaling.original_context is not None

    def pair_with(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))  # type: ignore[operator]

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, device=plain.device).float() - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def _yarn_factor(scaling: Scaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _longrope(plain: Tensor, scaling: Scaling, positions: Tensor | None) -> tuple[Tensor, float]:
    """A factor for each pair, one set within the original context and one beyond (Ding et al. 2024)."""
    assert scaling.original_context is not None
    short, long = (on_device(factors, plain.device) for factors in (scaling.short_factors, scaling.long_factors))
    beyond = torch.zeros(1, 1, dtype=torch.bool, device=plain.device)
    if positions is not None:  # each row by itself: (B, 1)
        beyond = positions.amax(-1, keepdim=True) + 1 > scaling.original_context
    factor = scaling.attention_factor
    if factor is None:
        factor = (
            math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context)) if scaling.factor > 1 else 1.0
        )
    return plain / torch.where(beyond.to(plain.device), long, short), factor


def turn(config: Rotary, size: int, positions: Tensor, dtype: torch.dtype) -> Turn:
    """The angles for heads of `size` at `positions` (B, T)."""
    frequencies, factor = rotary_frequencies(config, size, positions)
    frequencies = frequencies.to(positions.device).unflatten(0, (-1, 1, 1)) if frequencies.dim() > 1 else frequencies
    angles = positions[:, None, :, None].float() * frequencies.to(positions.device)  # (B, 1, T, pairs)
    return Turn((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype), config.layout == "interleaved")


def rotate(x: Tensor, by: Turn) -> Tensor:
    """Turn the first pairs of x (B, H, T, K) and leave the rest of each head as it is."""
    dim = 2 * by.cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    if by.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    one, two = first * by.cos - second * by.sin, second * by.cos + first * by.sin
    turned = torch.stack((one, two), dim=-1).flatten(-2) if by.interleaved else torch.cat((one, two), dim=-1)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


_SENT: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def on_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Numbers of the host on a device; to a GPU they are sent once, because sending stalls and cannot be recorded."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(numbers, device=device)
    key = tuple(numbers), device
    if key not in _SENT:
        with torch.inference_mode(False):
            _SENT[key] = torch.tensor(numbers, device=device)
    return _SENT[key]


# -- biases on the scores -----------------------------------------------------------------------------------------


def alibi_slopes(heads: int, config: Alibi = Alibi()) -> list[float]:
    """2^(-8k/h) for k = 1…h where h is a power of two; other counts take every second slope of twice that power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** -(config.max_bias * k / power) for k in range(1, power + 1)]
    between = [2.0 ** -(config.max_bias * k / (2 * power)) for k in range(1, 2 * power, 2)]
    return slopes + between[: heads - power]


def alibi(config: Alibi, heads: int, size: int, q_at: Tensor, k_at: Tensor) -> Tensor:
    """-slope * |distance|: (B, H, T, S).  Falcon rounds to bf16 and scales the bias as it scales the scores."""
    slopes = on_device(alibi_slopes(heads, config), q_at.device).view(1, heads, 1, 1)
    distance = (q_at[:, None, :, None] - k_at[:, None, None, :]).abs()
    if config.form == "falcon":
        at = k_at[:, None, None, :].bfloat16()  # the published kernel adds slope * key position, rounded
        return ((slopes.bfloat16() * at).float() * size**-0.5).expand(-1, -1, q_at.shape[-1], -1)
    return -slopes * distance


def bucket(config: Buckets, offset: Tensor, *, both_sides: bool) -> Tensor:
    """T5's bucket of `offset` = key place - query place: exact when near, logarithmic when far."""
    count = config.count
    buckets = torch.zeros_like(offset)
    if both_sides:
        count //= 2
        buckets = (offset > 0).long() * count
        distance = offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    exact = count // 2
    far = (distance.clamp(min=1).float() / exact).log() / math.log(config.max_distance / exact) * (count - exact)
    far = (exact + far.long()).clamp(max=count - 1)
    return buckets + torch.where(distance < exact, distance, far)


def bucket_bias(config: Buckets, table: Tensor, q_at: Tensor, k_at: Tensor, *, both_sides: bool) -> Tensor:
    """The learned bias of each pair of places from table (count, H): (B, H, T, S)."""
    offset = k_at[:, None, :] - q_at[:, :, None]
    return table[bucket(config, offset, both_sides=both_sides)].permute(0, 3, 1, 2)
