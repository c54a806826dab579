"""Time and memory of attention patterns by length: full, window, Longformer, BigBird and linear attention.

One attention layer runs forward and backward on batches with the same number of tokens at every length: one text of the
longest length, or many short ones. Linear attention then takes the same time at every length, full attention does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monoblock.config.families import gpt
from monoblock.config.knobs import vary
from monoblock.config.schema import check_at_least, check_types
from monoblock.errors import ConfigError
from monoblock.experiments.costs.time_and_memory import best_seconds, default_device, peak_bytes, saved_bytes
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial, selection
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.models.reversal import parse_lengths
from monoblock.model import Transformer

WINDOW, VOCAB = 128, 64
CHECKED_TOKENS = 6 * WINDOW  # enough for every pattern to hide some
DEFAULT_ROUNDS = {"cpu": 3, "cuda": 20}
DEFAULT_LENGTHS = {"cpu": "512,1024,2048,4096", "cuda": "1024,2048,4096,8192,16384,32768,65536"}


@dataclass(frozen=True, kw_only=True)
class Options:
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


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Measure a model of one block without a feed-forward network at every length, with equally many tokens."""
    options, device = trial.options, default_device()
    lengths = options.lengths_on(device)
    knobs: dict[str, Any] = {"positions": "none", "hidden": 0, **trial.arm.values}
    config = gpt(vocab=VOCAB, width=options.width, depth=1, heads=options.heads, context=max(lengths))
    torch.manual_seed(trial.seed)
    model = Transformer(vary(config, **knobs)).to(device)
    total, rounds = max(lengths), options.rounds or DEFAULT_ROUNDS[device]
    per_token, saved, peak = {}, {}, {}
    for length in lengths:
        ids = torch.randint(VOCAB, (max(1, total // length), length), device=device)

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
    ids = torch.randint(VOCAB, (2, CHECKED_TOKENS), device=model.device)
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


EXPERIMENT = Experiment(
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
    measure=measure,
    options=Options,
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
            statement="linear attention takes the same time per token at the longest length, within 15 %",
            metric="time_longest_to_shortest",
            arm="linear",
            at_least=0.85,
            at_most=1.15,
            late="the lower bound",
        ),
        Rule(
            statement="full attention takes at least twice the time per token at the longest length",
            metric="time_longest_to_shortest",
            arm="full",
            at_least=2.0,
        ),
        Rule(
            statement="a window takes at most 1.5 times the time per token at the longest length",
            metric="time_longest_to_shortest",
            arm="window",
            at_most=1.5,
        ),
        Rule(
            statement="a cached step of linear attention is its full pass, to 1e-5",
            metric="cached_step_error",
            arm="linear",
            at_most=1e-5,
        ),
        Rule(
            statement="a window with a global token takes at most 1.5 times the time per token at the longest length",
            metric="time_longest_to_shortest",
            arm="longformer",
            at_most=1.5,
            late="the rule",
        ),
    ),
    reading="Times and bytes are divided by the number of tokens, which is the same at every length; a time is the "
    "best of `rounds` passes. Saved bytes are "
    "those that the forward pass keeps for the backward pass. A fused kernel keeps no scores, so full attention is "
    "linear in memory too, though not in time.",
)
