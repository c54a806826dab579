"""Experiments that measure attention: memory and time by length, sparse kinds, and the scale of the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from monoblock.accounting.memory import attention_matrix_bytes
from monoblock.config.families import gpt
from monoblock.config.knobs import vary
from monoblock.config.model import AttentionConfig
from monoblock.config.schema import check_at_least, check_types
from monoblock.errors import ConfigError
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial, selection
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.reversal import parse_lengths
from monoblock.experiments.time_and_memory import best_seconds, default_device, peak_bytes, saved_bytes
from monoblock.model import Transformer
from monoblock.nn.attention import AttentionContext, attend, attend_fused
from monoblock.nn.masks import arange_positions, mask_from_config

# -- plain and fused attention ----------------------------------------------------------------------------------------

# Memory and time of attention by length: step by step against one fused kernel, forward and backward. Batch, heads and
# head size are those of the table in document C: 4 sequences, 8 heads, width 512, fp32. `saved_bytes` are the bytes of
# the tensors that the forward pass keeps for the backward pass, counted by hooks of PyTorch; on a GPU `peak_bytes` is
# the largest allocation. The closed form of one score matrix is batch · heads · length² · 4 bytes.

MEMORY_BATCH, MEMORY_HEADS, HEAD_DIM = 4, 8, 64


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    lengths: str | int = "512,1024,2048,4096"
    batch: int = MEMORY_BATCH
    rounds: int = selection(3)  # the best time of these counts

    def __post_init__(self) -> None:
        check_types(self)
        parse_lengths(self.lengths)


def measure_memory(trial: Trial) -> Iterator[str | Metrics]:
    """Measure one attention operation at every length."""
    device, batch = default_device(), trial.options.batch
    saved, peak, times, form = {}, {}, {}, {}
    for length in parse_lengths(trial.options.lengths):
        torch.manual_seed(trial.seed)
        shape = (batch, MEMORY_HEADS, length, HEAD_DIM)
        q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
        tokens = arange_positions(length, device=q.device)
        context = AttentionContext(
            mask_from_config(AttentionConfig(heads=MEMORY_HEADS, mask="full")).resolve(tokens, tokens)
        )
        forward = partial(_attend, trial.arm.name, q, k, v, context)
        step = partial(_backward, forward)
        name = str(length)
        saved[name] = saved_bytes(forward)
        form[name] = attention_matrix_bytes(batch=batch, heads=MEMORY_HEADS, queries=length, dtype="fp32")
        times[name] = 1000 * best_seconds(step, trial.options.rounds, device)
        allocated = peak_bytes(step, device)
        if allocated is not None:
            peak[name] = allocated
        yield f"length {length}"
    last = max(form, key=float)
    curves = {
        "saved_bytes": saved,
        "milliseconds": times,
        "matrix_bytes": form,
        **({"peak_bytes": peak} if peak else {}),
    }
    yield {**curves, "saved_mib": saved[last] / 2**20, "milliseconds_longest": times[last]}


def _attend(arm: str, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    return attend(q, k, v) if arm == "plain" else attend_fused(q, k, v, context)


def _backward(forward: Callable[[], Tensor]) -> None:
    forward().sum().backward()


def _fused_share(words: str, at_most: float, *, added_later: str = "") -> Rule:
    return Rule(
        f"at 4,096 tokens the fused kernel keeps at most {words} of the bytes",
        f"saved_bytes of fused at 4096 / saved_bytes of plain at 4096 <= {at_most}",
        is_exact=True,
        added_later=added_later,
    )


ATTENTION_MEMORY = Experiment(
    name="attention-memory",
    claim="attention memory is quadratic in the length: 32 MB at 512 tokens and 2,048 MB at 4,096; fused kernels "
    "avoid it",
    source="C, parameter scaling and question 1; B §12",
    arms=(
        Arm(name="plain", about="scores, softmax and weighted sum as separate operations"),
        Arm(name="fused", about="one fused kernel, which stores no scores"),
    ),
    measure=measure_memory,
    options=MemoryOptions,
    smoke_options={"lengths": "16,32", "batch": 1, "rounds": 1},
    seeds=(1,),
    is_timed=True,
    budget="8 heads of size 64, fp32, forward and backward; the best of the rounds; on a CPU, processor time",
    data="random queries, keys and values",
    columns=("saved_mib", "milliseconds_longest"),
    curves=dict.fromkeys(("saved_bytes", "peak_bytes", "matrix_bytes", "milliseconds"), "length"),
    logarithmic=True,
    rules=(
        Rule(
            "doubling the length from 2,048 to 4,096 multiplies the memory of plain attention by at least 3.5",
            "saved_bytes of plain at 4096 / saved_bytes of plain at 2048 >= 3.5",
            is_exact=True,
        ),
        Rule(
            "plain attention keeps at least one score matrix of the closed form",
            "saved_bytes of plain at 4096 / matrix_bytes of plain at 4096 >= 1",
            is_exact=True,
        ),
        Rule(
            "the memory of the fused kernel doubles with the length: at most 2.1 times",
            "saved_bytes of fused at 4096 / saved_bytes of fused at 2048 <= 2.1",
            is_exact=True,
        ),
        _fused_share("a twentieth", 0.05),
        _fused_share("a tenth", 0.1, added_later="the rule, with the factor of the document,"),
    ),
    reading="`matrix_bytes` is one matrix of scores by the closed form; the MB of the documents are 2^20 bytes, so 32 "
    "MB are 33,554,432 bytes. The bytes do not vary between runs.",
)


# -- sparse attention -------------------------------------------------------------------------------------------------

# Time and memory of attention patterns by length: full, window, Longformer, BigBird and linear attention. One attention
# layer runs forward and backward on batches with the same number of tokens at every length: one text of the longest
# length, or many short ones. Linear attention then takes the same time at every length, full attention does not.

WINDOW, SPARSE_VOCAB = 128, 64
CHECKED_TOKENS = 6 * WINDOW  # enough for every pattern to hide some
DEFAULT_ROUNDS = {"cpu": 3, "cuda": 20}
DEFAULT_LENGTHS = {"cpu": "512,1024,2048,4096", "cuda": "1024,2048,4096,8192,16384,32768,65536"}


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    lengths: str | int = ""  # "": 512 to 4,096 on a CPU, 1,024 to 65,536 on a GPU
    width: int = 256
    heads: int = 4
    rounds: int = selection(0)  # the best time of these counts; 0: 3 on a CPU, 20 on a GPU

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "width", "heads")
        check_at_least(self, 0, "rounds")
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} is not a multiple of heads={self.heads}; change one of them")
        self.lengths_on("cpu")

    def lengths_on(self, device: str) -> list[int]:
        """Return the lengths, shortest first; each divides the longest, so that all have equally many tokens."""
        lengths = sorted(set(parse_lengths(DEFAULT_LENGTHS[device] if self.lengths == "" else self.lengths)))
        odd = next((length for length in lengths if lengths[-1] % length), None)
        if odd is not None:
            raise ConfigError(f"{odd} tokens do not divide {lengths[-1]}, the longest of lengths=; leave one out")
        return lengths


def measure_sparse(trial: Trial) -> Iterator[str | Metrics]:
    """Measure a model of one block without a feed-forward network at every length, with equally many tokens."""
    options, device = trial.options, default_device()
    lengths = options.lengths_on(device)
    knobs: dict[str, Any] = {"positions": "none", "hidden": 0, **trial.arm.values}
    config = gpt(vocab=SPARSE_VOCAB, width=options.width, depth=1, heads=options.heads, context=max(lengths))
    torch.manual_seed(trial.seed)
    model = Transformer(vary(config, **knobs)).to(device)
    total, rounds = max(lengths), options.rounds or DEFAULT_ROUNDS[device]
    per_token, saved, peak = {}, {}, {}
    for length in lengths:
        ids = torch.randint(SPARSE_VOCAB, (max(1, total // length), length), device=device)

        def forward(ids: torch.Tensor = ids) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                return model(ids).float().mean()

        def step() -> None:
            forward().backward()
            model.zero_grad()

        name = str(length)
        try:
            saved_here = saved_bytes(forward) / ids.numel()
            time_here = 1e6 * best_seconds(step, rounds, device) / ids.numel()
            allocated = peak_bytes(step, device)
        except torch.OutOfMemoryError:
            yield f"length {length}: out of memory, left out"
            break
        saved[name], per_token[name] = saved_here, time_here
        if allocated is not None:
            peak[name] = allocated / ids.numel()
        yield f"length {length}"
    shortest, longest = next(iter(per_token)), list(per_token)[-1]
    metrics: Metrics = {"microseconds_per_token": per_token, "saved_bytes_per_token": saved, "rounds": rounds}
    metrics |= {"peak_bytes_per_token": peak} if peak else {}
    metrics["time_longest_to_shortest"] = per_token[longest] / per_token[shortest]
    metrics["memory_longest_to_shortest"] = saved[longest] / saved[shortest]
    yield {**metrics, "cached_step_error": cached_step_error(model)}


def cached_step_error(model: Transformer) -> float:
    """Return the largest difference of a logit between single cached steps and a full pass."""
    ids = torch.randint(SPARSE_VOCAB, (2, CHECKED_TOKENS), device=model.device)
    model.eval()
    with torch.no_grad():
        full, worst = model(ids), 0.0
        cache = model.make_cache(batch=2, capacity=CHECKED_TOKENS)
        for position in range(CHECKED_TOKENS):
            step = model(ids[:, position : position + 1], cache=cache)
            cache.advance(1)
            worst = max(worst, float((step[:, 0] - full[:, position]).abs().max()))
    model.train()
    return worst


SPARSE = Experiment(
    name="sparse",
    claim="sparse and linear attention make long texts cheap, because they avoid the quadratic matrix of scores",
    source="B §12; C, question 1",
    arms=(
        Arm(name="full", about="causal attention to all earlier tokens"),
        Arm(name="window", about=f"to the last {WINDOW} tokens", values={"window": WINDOW}),
        Arm(
            name="longformer",
            about="a window and a global token (Beltagy et al. 2020)",
            values={"window": WINDOW, "global_tokens": True},
        ),
        Arm(
            name="bigbird",
            about="a window, a global token and three random blocks (Zaheer et al. 2020)",
            values={"window": WINDOW, "global_tokens": True, "random_blocks": 3},
        ),
        Arm(
            name="linear",
            about="linear attention (Katharopoulos et al. 2020)",
            values={"attention": "linear"},
        ),
    ),
    measure=measure_sparse,
    options=SparseOptions,
    smoke_options={"lengths": "16,32", "width": 16, "heads": 2, "rounds": 1},
    is_timed=True,
    budget="one attention layer of width 256 with 4 heads, equally many tokens at every length, forward and backward; "
    "the best of the rounds; on a CPU, processor time",
    data="random tokens",
    columns=("time_longest_to_shortest", "memory_longest_to_shortest", "cached_step_error", "rounds"),
    curves=dict.fromkeys(("microseconds_per_token", "saved_bytes_per_token", "peak_bytes_per_token"), "length"),
    logarithmic=True,
    rules=(
        Rule(
            "linear attention takes the same time per token at the longest length, within 15 %",
            "0.85 <= time_longest_to_shortest of linear <= 1.15",
            added_later="the lower bound",
        ),
        Rule(
            "full attention takes at least twice the time per token at the longest length",
            "time_longest_to_shortest of full >= 2",
        ),
        Rule(
            "a window takes at most 1.5 times the time per token at the longest length",
            "time_longest_to_shortest of window <= 1.5",
        ),
        Rule("a cached step of linear attention is its full pass, to 1e-5", "cached_step_error of linear <= 1e-05"),
        Rule(
            "a window with a global token takes at most 1.5 times the time per token at the longest length",
            "time_longest_to_shortest of longformer <= 1.5",
            added_later="the rule",
        ),
    ),
    reading="Times and bytes are divided by the number of tokens, which is the same at every length; a time is the "
    "best of `rounds` passes. Saved bytes are "
    "those that the forward pass keeps for the backward pass. A fused kernel keeps no scores, so full attention is "
    "linear in memory too, though not in time.",
)


# -- the scale of the scores ------------------------------------------------------------------------------------------

# The scale 1 / sqrt(d) of attention scores: entropy and gradient of the softmax with and without it. Queries and keys
# are random vectors with d independent entries of variance 1, so that a score q · k has variance d. For each d the
# entropy of the softmax over 64 keys is measured, and the size of its gradient with respect to the scores: the
# Frobenius norm of its Jacobian, whose mean is dominated by the few rows with two large scores, and its median.

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
CURVES = ("gradient", "median_gradient", "entropy", "largest_weight", "variance")
KEYS, QUERIES, SMOKE_QUERIES = 64, 1024, 64


def measure_scale(trial: Trial) -> Iterator[str | Metrics]:
    """Measure the softmax of random scores for every size of the head."""
    generator = torch.Generator().manual_seed(trial.seed)
    queries = SMOKE_QUERIES if trial.smoke else QUERIES
    curves: dict[str, dict[str, float]] = {name: {} for name in CURVES}
    for size in SIZES:
        q = torch.randn(queries, size, generator=generator, dtype=torch.float64)
        k = torch.randn(queries, KEYS, size, generator=generator, dtype=torch.float64)
        scores = torch.einsum("qd,qkd->qk", q, k)
        if trial.arm.values["scaled"]:
            scores = scores / size**0.5
        weights = scores.softmax(-1)
        curves["entropy"][str(size)] = float(-(weights * scores.log_softmax(-1)).sum(-1).mean())
        norms = jacobian_norm(weights)
        curves["gradient"][str(size)] = float(norms.mean())
        curves["median_gradient"][str(size)] = float(norms.median())
        curves["largest_weight"][str(size)] = float(weights.amax(-1).mean())
        curves["variance"][str(size)] = float(scores.var())
    last = str(SIZES[-1])
    yield {**curves, "entropy_1024": curves["entropy"][last], "gradient_1024": curves["gradient"][last]}


def jacobian_norm(weights: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of diag(p) - p p^T for each row p, the Jacobian of the softmax.

    Its square is sum_i p_i^2 - 2 sum_i p_i^3 + (sum_i p_i^2)^2.
    """
    squares = weights.square().sum(-1)
    return (squares - 2 * weights.pow(3).sum(-1) + squares.square()).clamp(min=0).sqrt()


SCALE = Experiment(
    name="scale",
    claim="without the division by the square root of the head size, scores grow with it, and the softmax saturates: "
    "its gradients become tiny",
    source="B §04; D, scaled dot product; E §8.2.3",
    arms=(
        Arm(name="scaled", about="scores divided by the square root of the head size", values={"scaled": True}),
        Arm(name="unscaled", about="plain dot products", values={"scaled": False}),
    ),
    measure=measure_scale,
    seeds=(1, 2, 3, 4, 5),
    budget="1,024 random queries with 64 keys for each size, in double precision",
    data="independent normal entries with variance 1",
    columns=("entropy_1024", "gradient_1024"),
    curves=dict.fromkeys(CURVES, "head size"),
    logarithmic=True,
    rules=(
        Rule(
            "without the scale, the variance of the scores at size 1,024 is at least 100 times that at size 8",
            "variance of unscaled at 1024 / variance of unscaled at 8 >= 100",
        ),
        Rule(
            "with the scale, the entropy at size 1,024 is that at size 8, within 10 %",
            "0.9 <= entropy of scaled at 1024 / entropy of scaled at 8 <= 1.1",
            added_later="the upper bound",
        ),
        Rule(
            "without the scale, the mean gradient at size 1,024 is at most a fifth of that with the scale",
            "gradient of unscaled at 1024 / gradient of scaled at 1024 <= 0.2",
        ),
        Rule(
            "without the scale, the median gradient at size 1,024 is at most a fifth of that with the scale",
            "median_gradient of unscaled at 1024 / median_gradient of scaled at 1024 <= 0.2",
        ),
        Rule(
            "without the scale, the largest weight at size 1,024 is at least 0.9",
            "largest_weight of unscaled at 1024 >= 0.9",
        ),
    ),
    reading="`gradient` is the Frobenius norm of the Jacobian of the softmax. The largest entropy of 64 keys is 4.16 "
    "nats.",
)
