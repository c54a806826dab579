"""Position encodings: sinusoids added to the embedding, rotary angles, and ALiBi and T5 biases on attention scores.

All are functions of positions, not of an index into a buffer, so padding, packing and caches need no special case.
Angles are computed in fp32 whatever the dtype of the model, as in the published models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from monoblock.config.model import Alibi, AttentionConfig, Buckets, Rotary, Scaling, Sinusoid


def sinusoid(
    positions: Int[Tensor, "*places"], width: int, config: Sinusoid = Sinusoid()
) -> Float[Tensor, "*places {width}"]:
    """Return sinusoidal encodings of positions (Vaswani et al. 2017, 3.5); D is `width`.

    PE(pos, 2i) = sin(pos / base^(2i/D)) and PE(pos, 2i+1) = cos(pos / base^(2i/D)); `config.form` selects other orders
    of the sines and cosines.
    """
    half = width // 2 if config.form == "fairseq" else (width + 1) // 2
    spread = max(half - 1, 1) if config.form == "fairseq" else width / 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float64) / spread
    angles = (positions + config.offset).unsqueeze(-1) * config.base**-exponents  # (…, D/2)
    if config.form == "interleaved":
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    else:
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
    waves = F.pad(waves, (0, max(0, width - waves.shape[-1])))  # fairseq leaves the last column of an odd width 0
    return waves[..., :width].float()


def grid_sinusoid(
    side: int, width: int, config: Sinusoid, device: torch.device
) -> Float[Tensor, "{side*side} {width}"]:
    """Return sinusoidal encodings of the patches of a square image, row by row.

    The first half of the features encodes the row of a patch, the second half its column.
    """
    half, halves = width // 2, Sinusoid(form="halves", base=config.base)
    positions = torch.arange(side, device=device)
    rows = sinusoid(positions, half, halves)[:, None].expand(side, side, half)
    columns = sinusoid(positions, width - half, halves)[None].expand(side, side, width - half)
    return torch.cat((rows, columns), dim=-1).flatten(0, 1)


# -- rotary -------------------------------------------------------------------------------------------------------


class RotaryAngles(NamedTuple):
    """Cosines and sines that rotate pairs of query and key components."""

    cos: Float[Tensor, "B 1 T pairs"]
    sin: Float[Tensor, "B 1 T pairs"]
    interleaved: bool


def rotary_frequencies(
    config: Rotary, head_dim: int, positions: Int[Tensor, "B T"] | None = None
) -> tuple[Float[Tensor, "*B pairs"], float]:
    """Return the angle by which each pair of features turns per position, and a factor for cosine and sine.

    With dynamic or longrope scaling the angles depend on the length of each text, which is read from `positions`; only
    then do they have an axis B.
    """
    dim = config.dim if config.dim is not None else head_dim
    device = positions.device if positions is not None else None
    scaling = config.scaling
    even = torch.arange(0, dim, 2, device=device).float()
    if scaling is None:
        return 1.0 / config.base ** (even / dim), 1.0
    if scaling.kind == "proportional":  # some pairs of the head are rotated, the others have frequency 0
        rotated = 1.0 / config.base ** (even / head_dim) / scaling.factor
        return torch.cat((rotated, rotated.new_zeros(head_dim // 2 - dim // 2))), 1.0
    if scaling.kind in ("ntk", "dynamic"):
        return 1.0 / _scaled_base(config.base, scaling, dim, positions) ** (even / dim), 1.0
    plain = 1.0 / config.base ** (even / dim)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn_frequencies(plain, scaling, config.base, dim), _yarn_attention_factor(scaling)
    return _longrope_frequencies(plain, scaling, positions)


def _scaled_base(base: float, scaling: Scaling, dim: int, positions: Tensor | None) -> float | Tensor:
    """Return the larger base of NTK-aware scaling, which slows down slowly turning pairs most.

    Dynamic scaling enlarges the base only as far as the last position of each text needs; the result is then (B, 1).
    """
    power = dim / (dim - 2) if dim > 2 else 1.0
    if scaling.kind == "ntk":
        return base * scaling.factor**power
    assert scaling.original_context is not None
    length: int | Tensor = scaling.original_context
    if positions is not None:  # (B, 1)
        length = (positions.amax(-1, keepdim=True) + 1).clamp(min=scaling.original_context)
    return base * (scaling.factor * length / scaling.original_context - (scaling.factor - 1)) ** power


def _llama3_frequencies(frequencies: Tensor, scaling: Scaling) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, interpolate in between (Grattafiori et al. 2024)."""
    assert scaling.original_context is not None
    turns = scaling.original_context * frequencies / (2 * math.pi)  # whole turns within the original context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def _yarn_frequencies(frequencies: Tensor, scaling: Scaling, base: float, dim: int) -> Tensor:
    """Scale as llama3 does, but interpolate linearly in the index of the pair (Peng et al. 2023)."""
    assert scaling.original_context is not None

    def pair_with(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))  # type: ignore[operator]

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, device=frequencies.device).float() - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def _yarn_attention_factor(scaling: Scaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _longrope_frequencies(frequencies: Tensor, scaling: Scaling, positions: Tensor | None) -> tuple[Tensor, float]:
    """Divide each frequency by its short factor, or by its long factor if the text exceeds the original context.

    Return frequencies (B, pairs) and the factor for cosine and sine (Ding et al. 2024).
    """
    assert scaling.original_context is not None
    short, long = (
        device_constant(factors, frequencies.device) for factors in (scaling.short_factors, scaling.long_factors)
    )
    beyond = torch.zeros(1, 1, dtype=torch.bool, device=frequencies.device)
    if positions is not None:  # (B, 1)
        beyond = positions.amax(-1, keepdim=True) + 1 > scaling.original_context
    factor = scaling.attention_factor
    if factor is None:
        factor = (
            math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context)) if scaling.factor > 1 else 1.0
        )
    return frequencies / torch.where(beyond.to(frequencies.device), long, short), factor


_FREQUENCIES: dict[tuple[Rotary, int, torch.device], tuple[Tensor, float]] = {}


def _kept_frequencies(config: Rotary, head_dim: int, positions: Tensor) -> tuple[Tensor, float]:
    """Return `rotary_frequencies`; on a GPU, those that do not depend on the texts are computed once and kept."""
    depends_on_text = config.scaling is not None and config.scaling.kind in ("dynamic", "longrope")
    if positions.device.type != "cuda" or depends_on_text or torch.compiler.is_compiling():
        return rotary_frequencies(config, head_dim, positions)
    key = config, head_dim, positions.device
    if key not in _FREQUENCIES:
        with torch.inference_mode(False):
            _FREQUENCIES[key] = rotary_frequencies(config, head_dim, positions)
    return _FREQUENCIES[key]


def rotary_angles(config: Rotary, head_dim: int, positions: Int[Tensor, "B T"], dtype: torch.dtype) -> RotaryAngles:
    """Compute the rotary angles at `positions` for heads of size `head_dim` (Su et al. 2021)."""
    frequencies, factor = _kept_frequencies(config, head_dim, positions)
    frequencies = frequencies.to(positions.device).unflatten(0, (-1, 1, 1)) if frequencies.dim() > 1 else frequencies
    angles = positions[:, None, :, None].float() * frequencies.to(positions.device)  # (B, 1, T, pairs)
    cos, sin = angles.cos(), angles.sin()
    cos, sin = (cos.to(dtype), sin.to(dtype)) if factor == 1.0 else ((cos * factor).to(dtype), (sin * factor).to(dtype))
    if torch.compiler.is_compiling():
        cos, sin = materialize(cos), materialize(sin)
    return RotaryAngles(cos, sin, config.layout == "interleaved")


@torch.library.custom_op("monoblock_python::materialize", mutates_args=())
def materialize(x: Tensor) -> Tensor:
    """Copy a tensor, so that a compiled graph stores it; else every kernel that reads it would compute it again."""
    return x.clone()


@materialize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def apply_rotary(x: Float[Tensor, "B H T K"], angles: RotaryAngles) -> Float[Tensor, "B H T K"]:
    """Rotate the first 2·pairs features of every head of x; the other features stay as they are."""
    dim = 2 * angles.cos.shape[-1]
    x, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    first, second = (x[..., 0::2], x[..., 1::2]) if angles.interleaved else x.chunk(2, dim=-1)
    pairs = first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if angles.interleaved else torch.cat(pairs, dim=-1)
    return rotated if rest is None else torch.cat((rotated, rest), dim=-1)


_DEVICE_CONSTANTS: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def device_constant(numbers: Sequence[float], device: torch.device) -> Float[Tensor, " {len(numbers)}"]:
    """Return numbers as a tensor on a device; a tensor on a GPU is kept for later calls.

    Copying the numbers to the GPU again would synchronize, and cannot be recorded in a CUDA graph.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(numbers, device=device)
    key = tuple(numbers), device
    if key not in _DEVICE_CONSTANTS:
        with torch.inference_mode(False):
            _DEVICE_CONSTANTS[key] = torch.tensor(numbers, device=device)
    return _DEVICE_CONSTANTS[key]


# -- biases on the scores -----------------------------------------------------------------------------------------


def alibi_slopes(heads: int, config: Alibi = Alibi()) -> list[float]:
    """Return the slopes 2^(-8k/H), k = 1…H, if the number of heads H is a power of two (Press et al. 2022).

    For other numbers, with P the next smaller power of two, they are the slopes for P heads followed by every second
    slope for 2P heads.  The 8 is `config.max_bias`.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** -(config.max_bias * k / power) for k in range(1, power + 1)]
    between = [2.0 ** -(config.max_bias * k / (2 * power)) for k in range(1, 2 * power, 2)]
    return slopes + between[: heads - power]


def alibi_bias(
    config: Alibi, heads: int, head_dim: int, q_positions: Int[Tensor, "#B T"], k_positions: Int[Tensor, "#B S"]
) -> Float[Tensor, "B {heads} T S"]:
    """Return the ALiBi bias, which is -slope * |distance|.

    The form "falcon" is slope * key position, rounded to bf16 and scaled like the scores.
    """
    slopes = device_constant(alibi_slopes(heads, config), q_positions.device).view(1, heads, 1, 1)
    distance = (q_positions[:, None, :, None] - k_positions[:, None, None, :]).abs()
    if config.form == "falcon":
        keys = k_positions[:, None, None, :].bfloat16()  # the published kernel adds slope * key position, rounded
        return ((slopes.bfloat16() * keys).float() * head_dim**-0.5).expand(-1, -1, q_positions.shape[-1], -1)
    return -slopes * distance


def relative_position_bucket(
    config: Buckets, relative_position: Int[Tensor, "*pairs"], *, bidirectional: bool
) -> Int[Tensor, "*pairs"]:
    """Return the T5 bucket of each relative position, which is key position - query position (Raffel et al. 2020).

    Small distances have a bucket each; large distances share buckets that are spaced logarithmically.
    """
    count = config.count
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        count //= 2
        buckets = (relative_position > 0).long() * count
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(min=0)
    exact = count // 2
    far = (distance.clamp(min=1).float() / exact).log() / math.log(config.max_distance / exact) * (count - exact)
    far = (exact + far.long()).clamp(max=count - 1)
    return buckets + torch.where(distance < exact, distance, far)


def bucket_bias(
    config: Buckets,
    embedding: Callable[[Tensor], Tensor],
    q_positions: Int[Tensor, "#B T"],
    k_positions: Int[Tensor, "#B S"],
    *,
    bidirectional: bool,
) -> Float[Tensor, "B H T S"]:
    """Return the learned bias for every query and key by their relative position.

    `embedding` looks buckets up in a table (count, H).
    """
    relative_position = k_positions[:, None, :] - q_positions[:, :, None]
    buckets = relative_position_bucket(config, relative_position, bidirectional=bidirectional)
    return embedding(buckets).permute(0, 3, 1, 2)


def score_bias(
    config: AttentionConfig,
    head_size: int,
    q_positions: Int[Tensor, "#B T"],
    k_positions: Int[Tensor, "#B S"],
    table: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "B H T S"]:
    """Return the bias that positions add to the scores; `table` looks up learned biases."""
    positions, heads = config.positions, config.num_unpruned_heads
    if isinstance(positions, Alibi):
        return select_kept_heads(alibi_bias(positions, heads, head_size, q_positions, k_positions), config)
    if isinstance(positions, Buckets) and table is not None:
        is_full = config.mask == "full"
        return select_kept_heads(bucket_bias(positions, table, q_positions, k_positions, bidirectional=is_full), config)
    raise NotImplementedError(f"score bias of {positions}")


def select_kept_heads(bias: Float[Tensor, "B unpruned T S"], config: AttentionConfig) -> Float[Tensor, "B H T S"]:
    """Select the heads that head pruning has kept from a bias."""
    return bias[:, list(config.kept_heads)] if config.kept_heads else bias
