"""Decoding with and without a cache: positions, time and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from monoblock.accounting.report import account
from monoblock.config.families import gpt
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Options, Trial, selection
from monoblock.experiments.rules import read_rules
from monoblock.experiments.synthetic_data import parse_lengths
from monoblock.experiments.timing import best_seconds, default_device
from monoblock.model import Transformer

VOCAB, CACHED_TOKENS = 512, 512


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Options):
    prompt: int = 50
    lengths: str | int = "25,50,100,200,400"  # new tokens
    width: int = 384
    depth: int = 6
    rounds: int = selection(3)  # the best time of these counts


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Generate texts of several lengths; count positions, and compare the cache with its closed form."""
    options, device, use_cache = trial.options, default_device(), trial.arm.name == "cache"
    lengths = parse_lengths(options.lengths)
    torch.manual_seed(trial.seed)
    context = max(CACHED_TOKENS, options.prompt + max(lengths))
    config = gpt(vocab=VOCAB, width=options.width, depth=options.depth, heads=options.width // 32, context=context)
    model = Transformer(config).to(device).eval()
    ids = torch.randint(VOCAB, (1, options.prompt), device=device)
    times, counted = {}, {}
    for length in lengths:
        generate = partial(model.generate, ids, max_new_tokens=length, use_cache=use_cache)
        times[str(length)] = best_seconds(generate, options.rounds, device)
        counted[str(length)] = count_positions(options.prompt, length, use_cache=use_cache)
        yield f"{length} new tokens"
    metrics: Metrics = {"seconds": times, "positions": counted, "seconds_longest": times[str(lengths[-1])]}
    if use_cache:
        metrics |= {"cache_bytes": cache_bytes(model, CACHED_TOKENS)}
        metrics["closed_form_bytes"] = account(config).kv_cache_bytes(length=CACHED_TOKENS, batch=1, dtype="fp32")
    yield metrics


def count_positions(prompt: int, new: int, *, use_cache: bool) -> int:
    """Return how many positions the model processes: the last new token is never read."""
    return prompt + new - 1 if use_cache else sum(prompt + step for step in range(new))


def cache_bytes(model: Transformer, capacity: int) -> int:
    """Return the bytes of the keys and values of a filled cache."""
    cache, sizes = model.make_cache(batch=1, capacity=capacity), dict[int, int]()
    with torch.no_grad():
        model(torch.zeros(1, capacity, dtype=torch.long, device=model.device), cache=cache)

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    cache.map_tensors(count)
    return sum(sizes.values())


EXPERIMENT = Experiment(
    name="kv-cache",
    claim="without a cache, 100 tokens after a prompt of 50 cost 9,950 positions instead of about 150: 66 times as "
    "many",
    source="C, question 4 and the KV cache; B §11",
    arms=(
        Arm("cache", "keys and values of earlier tokens are kept"),
        Arm("no-cache", "every new token reads the whole text again"),
    ),
    measure=measure,
    options=CacheOptions,
    smoke_options={"prompt": 3, "lengths": "2,4", "width": 32, "depth": 1, "rounds": 1},
    is_timed=True,
    budget="one sequence after a prompt, with the sizes below; the best of the rounds; on a CPU, processor time",
    data="random weights and random tokens, since time does not depend on them",
    columns=("seconds_longest", "cache_bytes", "closed_form_bytes"),
    curves={"seconds": "new tokens", "positions": "new tokens"},
    logarithmic=True,
    rules=read_rules("""
        at 100 new tokens, the cache saves at least 66 times the positions
            positions of no-cache at 100 / positions of cache at 100 >= 66 [exact]
        it does not save 66 times the time: at 100 new tokens at most 20 times
            seconds of no-cache at 100 / seconds of cache at 100 <= 20
        at 400 new tokens, decoding with the cache is at least twice as fast
            seconds of no-cache at 400 / seconds of cache at 400 >= 2
        the bytes of the cache are those of the closed form, up to 1 %
            0.99 <= cache_bytes of cache / closed_form_bytes of cache <= 1.01 [exact later: the lower bound]
    """),
    reading="A single new token uses the machine less well than a long sequence does, so the time falls less than the "
    "number of positions.",
)
