"""Send random requests to one engine and compare each text with the same request alone.

Requests arrive at random steps with random settings; some are cancelled, some are invalid, and some fail in a logits
processor. A text must equal that of its request alone, every sequence must end with exactly one last output, an invalid
request must be refused when it is added, and the memory of the process must not grow.

    python benchmarks/reliability/engine.py --requests 20000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from typing import Any

import torch

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference import fast_modules
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings

VOCAB, CONTEXT = 31, 24
SIZES: dict[str, Any] = {"vocab": VOCAB, "width": 24, "depth": 2, "heads": 3}
MODELS = {
    "gpt": mb.gpt(**SIZES, context=CONTEXT),
    "llama": mb.llama(**SIZES, kv_heads=3, hidden=40, context=CONTEXT),
    "t5": mb.t5(**SIZES, hidden=40, context=CONTEXT),
    "vaswani": mb.vaswani(**SIZES, context=CONTEXT),
}
BATCH = 200  # requests to one engine
INVALID: list[dict[str, Any]] = [
    {"ids": []},
    {"ids": [-3]},
    {"ids": [VOCAB]},
    {"ids": [1.5]},
    {"ids": ["a"]},
    {"ids": None},
    {"ids": [1] * CONTEXT},
    {"source": [-3]},
    {"source": [VOCAB]},
    {"source": []},
    {"settings": {"eos_token_id": VOCAB}},
    {"settings": {"suppress_tokens": range(VOCAB)}},
    {"settings": {"num_beams": 10**9}},
    {"settings": {"num_beams": 65}},
    {"settings": {"seed": 2**64}},
    {"settings": {"bad_words_ids": [[1]] * 100_000}},
]


def failing_processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a processor of the user")


def random_settings(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 12)}
    if rng.random() < 0.35:
        options["num_beams"] = groups = rng.choice((2, 3, 4))
        options["num_return_sequences"] = rng.randint(1, options["num_beams"])
        options["length_penalty"] = rng.choice((0.0, 0.6, 1.0, 2.0))
        options["early_stopping"] = rng.choice((False, True, "never"))
        if rng.random() < 0.4:
            options["num_beam_groups"] = groups
            options["diversity_penalty"] = rng.choice((0.0, 0.5, 3.0))
    elif rng.random() < 0.6:
        options["temperature"] = rng.choice((0.3, 1.0, 2.0))
        options["seed"] = rng.randrange(2**40)
        options["num_return_sequences"] = rng.choice((1, 1, 2, 3))
        for name, values in {
            "top_k": (0, 1, 5),
            "top_p": (1.0, 0.8),
            "min_p": (0.0, 0.1),
            "typical_p": (1.0, 0.7),
        }.items():
            options[name] = rng.choice(values)
    if rng.random() < 0.3:
        options["repetition_penalty"] = rng.choice((0.7, 1.3))
    if rng.random() < 0.2:
        options["no_repeat_ngram_size"] = rng.choice((1, 2, 3))
    if rng.random() < 0.2:
        options["bad_words_ids"] = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(3)]
    if rng.random() < 0.2:
        options["suppress_tokens"] = rng.sample(range(VOCAB), rng.choice((1, 5, VOCAB - 1)))
    if rng.random() < 0.1:
        options["begin_suppress_tokens"] = rng.sample(range(VOCAB), 3)
    if rng.random() < 0.1:
        options["forced_bos_token_id"] = rng.randrange(VOCAB)
    if rng.random() < 0.1:
        options["forced_eos_token_id"] = rng.randrange(VOCAB)
    if rng.random() < 0.5:
        options["eos_token_id"] = rng.sample(range(VOCAB), rng.choice((1, 2, 4)))
        options["min_new_tokens"] = rng.randint(0, options["max_new_tokens"])
    return options


def random_request(rng: random.Random, has_encoder: bool) -> dict[str, Any]:
    request = {"ids": [rng.randrange(VOCAB) for _ in range(rng.randint(1, CONTEXT - 1))], "source": None}
    if has_encoder:
        request["source"] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, CONTEXT))]
    return request | {"settings": random_settings(rng)}


def run_alone(model: mb.Transformer, request: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
    engine = Engine(mb.optimize(model))
    engine.add(request["ids"], Settings(**request["settings"]), request["source"])
    texts: dict[int, tuple[Any, ...]] = {}
    while engine.busy:
        for output in engine.step():
            tokens = texts.get(output.sequence_index, ((), None))[0] + output.tokens
            texts[output.sequence_index] = (tokens, output.finish_reason)
    return texts


class Trial:
    """One engine and its requests."""

    def __init__(self, name: str, model: mb.Transformer, rng: random.Random, counts: Counter[str]) -> None:
        self.name, self.model, self.rng, self.counts = name, model, rng, counts
        self.engine = Engine(mb.optimize(model), max_rows=rng.choice((8, 64)), prefill_chunk=rng.choice((None, 1, 5)))
        self.requests: dict[int, dict[str, Any]] = {}
        self.texts: dict[tuple[int, int], tuple[int, ...]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.cancelled: set[int] = set()
        self.failing: set[int] = set()
        self.problems: list[str] = []

    def add_one(self) -> None:
        request = random_request(self.rng, self.model.encoder is not None)
        if self.rng.random() < 0.1:
            self._add_invalid(request)
            return
        settings = Settings(**request["settings"])
        fails = self.rng.random() < 0.03
        if fails:
            settings = Settings(**request["settings"], logits_processor=(failing_processor,))
        number = self.engine.add(request["ids"], settings, request["source"])
        self.requests[number] = request
        if fails:
            self.failing.add(number)

    def _add_invalid(self, request: dict[str, Any]) -> None:
        change = self.rng.choice(INVALID)
        if "source" in change and self.model.encoder is None:
            change = INVALID[1]
        if "settings" in change:
            change = {
                "settings": request["settings"] | {"temperature": 0.0, "num_return_sequences": 1} | change["settings"]
            }
        wrong = request | change
        try:
            self.engine.add(wrong["ids"], Settings(**wrong["settings"]), wrong["source"])
            self.problems.append(f"{self.name}: an invalid request was accepted: {change}")
        except InputError as problem:
            if "\n" in str(problem):
                self.problems.append(f"{self.name}: an error of several lines: {problem}")
        self.counts["invalid"] += 1

    def step(self) -> None:
        for output in self.engine.step():
            key = (output.request_id, output.sequence_index)
            if key in self.reasons:
                self.problems.append(f"{self.name}: an output after the last one: {self.requests[key[0]]}")
            self.texts[key] = self.texts.get(key, ()) + output.tokens
            if output.finish_reason:
                self.reasons[key] = output.finish_reason

    def cancel_one(self) -> None:
        running = [request.id for request in (*self.engine.running, *self.engine.waiting) if not request.is_done]
        if running:
            self.cancelled.add(self.rng.choice(running))
            self.engine.cancel(max(self.cancelled & set(running)))

    def check(self) -> None:
        for number, request in self.requests.items():
            count = request["settings"].get("num_return_sequences", 1)
            found = {
                index: (self.texts.get((number, index), ()), self.reasons.get((number, index)))
                for index in range(count)
            }
            if number in self.cancelled:
                self.counts["cancelled"] += 1
            elif number in self.failing:
                self.counts["failing"] += 1
                if {reason for _, reason in found.values()} != {"error"}:
                    self.problems.append(f"{self.name}: a failing processor ended with {found}")
            else:
                self.counts["compared"] += 1
                if found != run_alone(self.model, request):
                    self.problems.append(f"{self.name}: {found} is not the text alone: {request}")


def run_trial(name: str, model: mb.Transformer, rng: random.Random, requests: int, counts: Counter[str]) -> list[str]:
    trial = Trial(name, model, rng, counts)
    left = requests
    while left or trial.engine.busy:
        for _ in range(min(left, rng.choice((0, 1, 1, 5)))):
            trial.add_one()
            left -= 1
        if rng.random() < 0.05:
            trial.cancel_one()
        trial.step()
    trial.check()
    return trial.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", action="store_true", help="also use the C++ kernels, as for models of usual size")
    parser.add_argument("--smoke", action="store_true", help="send a few hundred requests")
    args = parser.parse_args()
    total = 400 if args.smoke else args.requests
    if args.kernels:
        fast_modules.MIN_NATIVE_WEIGHTS = 0
    counts: Counter[str] = Counter()
    problems: list[str] = []
    memory: list[int] = []
    start, done = time.perf_counter(), 0
    torch.manual_seed(args.seed)
    models = {name: mb.Transformer(config).eval() for name, config in MODELS.items()}
    for number in range((total + BATCH - 1) // BATCH):
        name = list(models)[number % len(models)]
        size = min(BATCH, total - done)
        problems += run_trial(name, models[name], random.Random(args.seed * 1_000_003 + number), size, counts)
        done += size
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        sys.stderr.write(f"\r{done}/{total} requests, {len(problems)} problems, {memory[-1]} MiB")
    warm = memory[min(len(memory) - 1, 2 * len(models))]
    result = {
        "requests": total,
        **counts,
        "problems": len(problems),
        "peak_mib_after_warm_up": warm,
        "peak_mib_at_the_end": memory[-1],
        "seconds": round(time.perf_counter() - start, 1),
    }
    sys.stderr.write("\n")
    print(json.dumps(result))
    for problem in problems[:20]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
