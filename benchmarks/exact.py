"""Exact mode: completions beside others have the bits of the completion alone, and what the mode costs.

    python benchmarks/exact.py --write             # on a GPU in bf16, otherwise on the CPU in fp32
    python benchmarks/exact.py --only cost

1. Random requests with random weights of GPT-2's shape: prompts of 1 to 200 tokens, half of them with a shared prefix,
   which come from the cache.  Engines of 1 to 64 rows and random chunks decode them together, and one engine decodes
   them alone; a logits processor adds the logits of every token to a hash.  The control does the same without the mode.
2. Tokens per second with and without the mode, in turns, greedy, prompts of 128 tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _report import source, write_section
from torch import Tensor

import monoblock as mb

RESULTS = Path(__file__).with_name("results") / "exact.md"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
PROMPT = 128


class Hash:
    """A number of 64 bits for the logits of a request; it stays on the device until the end."""

    factors: Tensor | None = None

    def __init__(self) -> None:
        self.value: Tensor | int = 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        if Hash.factors is None:
            Hash.factors = torch.randint(1, 1 << 62, logits.shape, device=logits.device) | 1
        self.value = self.value * 31 + (logits.float().view(torch.int32) * Hash.factors).sum()
        return logits


def random_prompts(count: int, vocab: int) -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(vocab) for _ in range(100)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 100))] for _ in range(count)]
    return [shared + prompt if index % 2 else prompt for index, prompt in enumerate(prompts)]


def hash_logits(engine: mb.Engine, prompts: Sequence[list[int]], new: int) -> list[int]:
    """Decode all prompts in an engine; return the hash of the logits of each."""
    hashes = [Hash() for _ in prompts]
    for prompt, processor in zip(prompts, hashes, strict=True):
        engine.add(prompt, mb.Settings(max_new_tokens=new, logits_processor=(processor,)))
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise output.error
    return [int(one.value) for one in hashes]


def count_differences(model: mb.Transformer, exact: bool, count: int, new: int) -> str:
    fast, rng = mb.optimize(model, exact=exact), random.Random(2)
    prompts = random_prompts(count, model.config.input.vocab)
    together: list[int] = []
    start = time.perf_counter()
    while len(together) < count:
        engine = mb.Engine(fast, max_rows=rng.randint(1, 64), prefill_chunk=rng.choice((None, 16, 64, 100)))
        together += hash_logits(engine, prompts[len(together) :][: rng.randint(50, 150)], new)
    seconds = time.perf_counter() - start
    alone = [hash_logits(mb.Engine(fast, max_rows=1), [prompt], new)[0] for prompt in prompts]
    different = sum(a != b for a, b in zip(together, alone, strict=True))
    seconds_alone = time.perf_counter() - start - seconds
    return f"| {'yes' if exact else 'no'} | {different} of {count} | {seconds:,.0f} | {seconds_alone:,.0f} |"


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_cost(model: mb.Transformer, batches: Sequence[int], new: int, rounds: int) -> list[str]:
    lines = ["| rows | without, tokens/s | exact, tokens/s | time, exact / without |", "|---|---|---|---|"]
    models = [mb.optimize(model), mb.optimize(model, exact=True)]
    for batch in batches:
        ids = torch.randint(model.config.input.vocab, (batch, PROMPT), device=DEVICE)
        seconds = [float("inf")] * 2
        for turn in range(rounds + 2):  # two to record graphs and compile
            for index, fast in enumerate(models):
                passed = timed(lambda fast=fast, ids=ids: fast.generate(ids, max_new_tokens=new))
                seconds[index] = min(seconds[index], passed) if turn > 1 else float("inf")
        rates = " | ".join(f"{batch * new / value:,.0f}" for value in seconds)
        lines.append(f"| {batch} | {rates} | {seconds[1] / seconds[0]:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("bits", "cost"))
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--completions", type=int, default=1000)
    parser.add_argument("--control", type=int, default=250, help="completions without the mode")
    parser.add_argument("--new", type=int, default=128, help="tokens of a completion")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write the tables to results/{RESULTS.name}")
    parser.add_argument("--smoke", action="store_true", help="a few completions of a tiny model")
    args = parser.parse_args()
    if args.smoke:
        args.completions, args.control, args.new, args.batches, args.rounds, args.write = 12, 6, 5, [1, 3], 1, False
    torch.manual_seed(1)
    config = mb.vary(mb.tiny(args.preset), width=192, context=256) if args.smoke else mb.preset(args.preset)
    model = mb.Transformer(config).to(DEVICE, DTYPE).eval()
    what = f"{DEVICE.upper()}, {args.preset}, random weights, {str(DTYPE).removeprefix('torch.')}"
    sections = {}
    if args.only != "cost":
        lines = ["| exact | differ | seconds | alone |", "|---|---|---|---|"]
        for exact, count in ((True, args.completions), (False, args.control)):
            lines.append(count_differences(model, exact, count, args.new))
            print(lines[-1], flush=True)
        sections[f"Logits of {args.new} tokens beside others and alone ({what})"] = lines
    if args.only != "bits":
        sections[f"Cost ({what})"] = measure_cost(model, args.batches, args.new, args.rounds)
    for title, lines in sections.items():
        section = "\n".join([title, "", f"{source()}.", "", *lines])
        print(f"\n## {section}", flush=True)
        if args.write:
            write_section(RESULTS, "Exact mode", section)


if __name__ == "__main__":
    main()
