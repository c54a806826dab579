"""Plain and fused attention: bytes and time by length.

Attention is computed step by step, and with one fused kernel, forward and backward. Batch, heads and head size are
those of the table in document C: 4 sequences, 8 heads, width 512, fp32. `saved_bytes` are the bytes of the tensors that
the forward pass keeps for the backward pass, counted by hooks of PyTorch; on a GPU `peak_bytes` is the largest
allocation. The closed form of one score matrix is batch · heads · length² · 4 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoblock.accounting.memory import attention_matrix_bytes
from monoblock.config.model import AttentionConfig
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Options, Trial, selection
from monoblock.experiments.rules import read_rules
from monoblock.experiments.synthetic_data import parse_lengths
from monoblock.experiments.timing import best_seconds, default_device, peak_bytes, saved_bytes
from monoblock.nn.attention import AttentionContext, attend, attend_fused
from monoblock.nn.masks import arange_positions, mask_from_config

HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    lengths: str | int = "512,1024,2048,4096"
    batch: int = 4
    rounds: int = selection(3)  # the best time of these counts


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Measure one attention operation at every length."""
    device, batch = default_device(), trial.options.batch
    curves: dict[str, dict[str, float]] = defaultdict(dict)
    for length in parse_lengths(trial.options.lengths):
        torch.manual_seed(trial.seed)
        shape = (batch, HEADS, length, HEAD_DIM)
        q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
        tokens = arange_positions(length, device=q.device)
        mask = mask_from_config(AttentionConfig(heads=HEADS, mask="full")).resolve(tokens, tokens)
        context = AttentionContext(mask)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, context: AttentionContext = context) -> Tensor:
            return attend(q, k, v) if trial.arm.name == "plain" else attend_fused(q, k, v, context)

        def step(forward: Any = forward) -> None:
            forward().sum().backward()

        name = str(length)
        curves["saved_bytes"][name] = saved_bytes(forward)
        curves["milliseconds"][name] = 1000 * best_seconds(step, trial.options.rounds, device)
        form = attention_matrix_bytes(batch=batch, heads=HEADS, queries=length, dtype="fp32")
        curves["matrix_bytes"][name] = form
        if (allocated := peak_bytes(step, device)) is not None:
            curves["peak_bytes"][name] = allocated
        yield f"length {length}"
    last = max(curves["matrix_bytes"], key=float)
    ends = {"saved_mib": curves["saved_bytes"][last] / 2**20, "milliseconds_longest": curves["milliseconds"][last]}
    yield {**curves, **ends}


EXPERIMENT = Experiment(
    name="attention-memory",
    claim="attention memory is quadratic in the length: 32 MB at 512 tokens and 2,048 MB at 4,096; fused kernels "
    "avoid it",
    source="C, parameter scaling and question 1; B §12",
    arms=(
        Arm("plain", "scores, softmax and weighted sum as separate operations"),
        Arm("fused", "one fused kernel, which stores no scores"),
    ),
    measure=measure,
    options=MemoryOptions,
    smoke_options={"lengths": "16,32", "batch": 1, "rounds": 1},
    seeds=(1,),
    is_timed=True,
    budget="8 heads of size 64, fp32, forward and backward; the best of the rounds; on a CPU, processor time",
    data="random queries, keys and values",
    columns=("saved_mib", "milliseconds_longest"),
    curves=dict.fromkeys(("saved_bytes", "peak_bytes", "matrix_bytes", "milliseconds"), "length"),
    logarithmic=True,
    rules=read_rules("""
        doubling the length from 2,048 to 4,096 multiplies the memory of plain attention by at least 3.5
            saved_bytes of plain at 4096 / saved_bytes of plain at 2048 >= 3.5 [exact]
        plain attention keeps at least one score matrix of the closed form
            saved_bytes of plain at 4096 / matrix_bytes of plain at 4096 >= 1 [exact]
        the memory of the fused kernel doubles with the length: at most 2.1 times
            saved_bytes of fused at 4096 / saved_bytes of fused at 2048 <= 2.1 [exact]
        at 4,096 tokens the fused kernel keeps at most a twentieth of the bytes
            saved_bytes of fused at 4096 / saved_bytes of plain at 4096 <= 0.05 [exact]
        at 4,096 tokens the fused kernel keeps at most a tenth of the bytes
            saved_bytes of fused at 4096 / saved_bytes of plain at 4096 <= 0.1 [exact later: the rule, with the \
factor of the document,]
    """),
    reading="`matrix_bytes` is one matrix of scores by the closed form; the MB of the documents are 2^20 bytes, so 32 "
    "MB are 33,554,432 bytes. The bytes do not vary between runs.",
)
