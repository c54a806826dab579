"""Full, window, Longformer, BigBird and linear attention: time and bytes by length.

One attention layer runs forward and backward on batches with the same number of tokens at every length: one text of the
longest length, or many short ones. Linear attention then takes the same time at every length, full attention does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monoblock.config.families import gpt
from monoblock.config.knobs import vary
from monoblock.errors import ConfigError
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Options, Trial, selection
from monoblock.experiments.rules import read_rules
from monoblock.experiments.synthetic_data import parse_lengths
from monoblock.experiments.timing import best_seconds, default_device, peak_bytes, saved_bytes
from monoblock.model import Transformer

WINDOW, VOCAB = 128, 64
CHECKED_TOKENS = 6 * WINDOW  # enough for every pattern to hide some
DEFAULT_ROUNDS = {"cpu": 3, "cuda": 20}
DEFAULT_LENGTHS = {"cpu": "512,1024,2048,4096", "cuda": "1024,2048,4096,8192,16384,32768,65536"}


@dataclass(frozen=True, kw_only=True)
class SparseOptions(Options):
    lengths: str | int = ""  # "": 512 to 4,096 on a CPU, 1,024 to 65,536 on a GPU
    width: int = 256
    heads: int = 4
    rounds: int = selection(0)  # the best time of these counts; 0: 3 on a CPU, 20 on a GPU

    def __post_init__(self) -> None:
        super().__post_init__()
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
    lengths, rounds = options.lengths_on(device), options.rounds or DEFAULT_ROUNDS[device]
    knobs: dict[str, Any] = {"positions": "none", "hidden": 0, **trial.arm.values}
    config = gpt(vocab=VOCAB, width=options.width, depth=1, heads=options.heads, context=max(lengths))
    torch.manual_seed(trial.seed)
    model = Transformer(vary(config, **knobs)).to(device)
    curves: dict[str, dict[str, float]] = defaultdict(dict)
    for length in lengths:
        ids = torch.randint(VOCAB, (max(1, max(lengths) // length), length), device=device)

        def forward(ids: torch.Tensor = ids) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                return model(ids).float().mean()

        def step(forward: Any = forward) -> None:
            forward().backward()
            model.zero_grad()

        try:
            saved, seconds, peak = saved_bytes(forward), best_seconds(step, rounds, device), peak_bytes(step, device)
        except torch.OutOfMemoryError:
            yield f"length {length}: out of memory, left out"
            break
        curves["microseconds_per_token"][str(length)] = 1e6 * seconds / ids.numel()
        curves["saved_bytes_per_token"][str(length)] = saved / ids.numel()
        if peak is not None:
            curves["peak_bytes_per_token"][str(length)] = peak / ids.numel()
        yield f"length {length}"
    times, bytes_ = ([*curves[name].values()] for name in ("microseconds_per_token", "saved_bytes_per_token"))
    yield {
        **curves,
        "rounds": rounds,
        "time_longest_to_shortest": times[-1] / times[0],
        "memory_longest_to_shortest": bytes_[-1] / bytes_[0],
        "cached_step_error": cached_step_error(model),
    }


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
        Arm("full", "causal attention to all earlier tokens"),
        Arm("window", f"to the last {WINDOW} tokens", values={"window": WINDOW}),
        Arm(
            "longformer",
            "a window and a global token (Beltagy et al. 2020)",
            values={"window": WINDOW, "global_tokens": True},
        ),
        Arm(
            "bigbird",
            "a window, a global token and three random blocks (Zaheer et al. 2020)",
            values={"window": WINDOW, "global_tokens": True, "random_blocks": 3},
        ),
        Arm("linear", "linear attention (Katharopoulos et al. 2020)", values={"attention": "linear"}),
    ),
    measure=measure,
    options=SparseOptions,
    smoke_options={"lengths": "16,32", "width": 16, "heads": 2, "rounds": 1},
    is_timed=True,
    budget="one attention layer of width 256 with 4 heads, equally many tokens at every length, forward and backward; "
    "the best of the rounds; on a CPU, processor time",
    data="random tokens",
    columns=("time_longest_to_shortest", "memory_longest_to_shortest", "cached_step_error", "rounds"),
    curves=dict.fromkeys(("microseconds_per_token", "saved_bytes_per_token", "peak_bytes_per_token"), "length"),
    logarithmic=True,
    rules=read_rules("""
        linear attention takes the same time per token at the longest length, within 15 %
            0.85 <= time_longest_to_shortest of linear <= 1.15 [later: the lower bound]
        full attention takes at least twice the time per token at the longest length
            time_longest_to_shortest of full >= 2
        a window takes at most 1.5 times the time per token at the longest length
            time_longest_to_shortest of window <= 1.5
        a cached step of linear attention is its full pass, to 1e-5
            cached_step_error of linear <= 1e-05
        a window with a global token takes at most 1.5 times the time per token at the longest length
            time_longest_to_shortest of longformer <= 1.5 [later: the rule]
    """),
    reading="Times and bytes are divided by the number of tokens, which is the same at every length; a time is the "
    "best of `rounds` passes. Saved bytes are "
    "those that the forward pass keeps for the backward pass. A fused kernel keeps no scores, so full attention is "
    "linear in memory too, though not in time.",
)
