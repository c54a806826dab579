"""Memory and time of attention by length: step by step against one fused kernel, forward and backward.

Batch, heads and head size are those of the table in document C: 4 sequences, 8 heads, width 512, fp32. `saved_bytes`
are the bytes of the tensors that the forward pass keeps for the backward pass, counted by hooks of PyTorch; on a GPU
`peak_bytes` is the largest allocation. The closed form of one score matrix is batch · heads · length² · 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from monoblock.accounting.memory import attention_matrix_bytes
from monoblock.config.model import AttentionConfig
from monoblock.config.schema import check_types
from monoblock.experiments.costs.time_and_memory import best_seconds, default_device, peak_bytes, saved_bytes
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial, selection
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.models.reversal import parse_lengths
from monoblock.nn.attention import AttentionContext, attend, attend_fused
from monoblock.nn.masks import mask_from_config
from monoblock.nn.token_positions import arange_positions

BATCH, HEADS, HEAD_DIM = 4, 8, 64


@dataclass(frozen=True, kw_only=True)
class Options:
    lengths: str | int = "512,1024,2048,4096"
    batch: int = BATCH
    rounds: int = selection(3)  # the best time of these counts

    def __post_init__(self) -> None:
        check_types(self)
        parse_lengths(self.lengths)


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Measure one attention operation at every length."""
    device, batch = default_device(), trial.options.batch
    saved, peak, times, form = {}, {}, {}, {}
    for length in parse_lengths(trial.options.lengths):
        torch.manual_seed(trial.seed)
        shape = (batch, HEADS, length, HEAD_DIM)
        q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
        tokens = arange_positions(length, device=q.device)
        context = AttentionContext(mask_from_config(AttentionConfig(heads=HEADS, mask="full")).resolve(tokens, tokens))
        forward = partial(_attend, trial.arm.name, q, k, v, context)
        step = partial(_backward, forward)
        name = str(length)
        saved[name] = saved_bytes(forward)
        form[name] = attention_matrix_bytes(batch=batch, heads=HEADS, queries=length, dtype="fp32")
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


def _fused_share(words: str, at_most: float, *, late: str = "") -> Rule:
    return Rule(
        statement=f"at 4,096 tokens the fused kernel keeps at most {words} of the bytes",
        metric="saved_bytes",
        arm="fused",
        at="4096",
        quantity="ratio",
        other="plain",
        at_most=at_most,
        is_exact=True,
        late=late,
    )


EXPERIMENT = Experiment(
    name="attention-memory",
    claim="attention memory is quadratic in the length: 32 MB at 512 tokens and 2,048 MB at 4,096; fused kernels "
    "avoid it",
    source="C, parameter scaling and question 1; B §12",
    arms=(
        Arm(name="plain", about="scores, softmax and weighted sum as separate operations"),
        Arm(name="fused", about="one fused kernel, which stores no scores"),
    ),
    measure=measure,
    options=Options,
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
            statement="doubling the length from 2,048 to 4,096 multiplies the memory of plain attention by at least "
            "3.5",
            metric="saved_bytes",
            arm="plain",
            at="4096",
            quantity="ratio",
            other_at="2048",
            at_least=3.5,
            is_exact=True,
        ),
        Rule(
            statement="plain attention keeps at least one score matrix of the closed form",
            metric="saved_bytes",
            arm="plain",
            at="4096",
            quantity="ratio",
            other_metric="matrix_bytes",
            at_least=1.0,
            is_exact=True,
        ),
        Rule(
            statement="the memory of the fused kernel doubles with the length: at most 2.1 times",
            metric="saved_bytes",
            arm="fused",
            at="4096",
            quantity="ratio",
            other_at="2048",
            at_most=2.1,
            is_exact=True,
        ),
        _fused_share("a twentieth", 0.05),
        _fused_share("a tenth", 0.1, late="the rule, with the factor of the document,"),
    ),
    reading="`matrix_bytes` is one matrix of scores by the closed form; the MB of the documents are 2^20 bytes, so 32 "
    "MB are 33,554,432 bytes. The bytes do not vary between runs.",
)
