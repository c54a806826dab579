"""The cache against none: prompt of 50 and 100 new tokens, positions counted and time measured in one run.

The documents' 66 ×: 149 positions with the cache, 9,950 without.  Time falls less than positions do, because one token
at a time uses a machine worse than many.  --smoke runs a toy size once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import monoblock as mb


def taken(model: mb.Transformer, ids: torch.Tensor, new: int, use_cache: bool) -> tuple[float, int]:
    """Seconds, and the positions the model read."""
    read: list[int] = []
    hook = model.input.register_forward_hook(lambda module, given, out: read.append(out.shape[0] * out.shape[1]))
    begun = time.perf_counter()
    model.generate(ids, max_new_tokens=new, use_cache=use_cache)
    if ids.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    hook.remove()
    return seconds, sum(read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", help="a published shape, such as gpt2, instead of the lecture's")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=50)
    parser.add_argument("--new", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    width, depth, rounds = (24, 2, 1) if given.smoke else (given.width, given.depth, given.rounds)
    torch.manual_seed(0)
    lecture = mb.gpt(vocab=65, width=width, depth=depth, heads=6, context=given.prompt + given.new)
    model = mb.Transformer(mb.preset(given.preset) if given.preset else lecture).to(given.device).eval()
    ids = torch.randint(65, (1, given.prompt), device=given.device)
    found: dict[str, Any] = {}
    for name, use_cache in (("with the cache", True), ("without", False)):
        model.generate(ids, max_new_tokens=3, use_cache=use_cache)  # warm up
        times, counts = zip(*[taken(model, ids, given.new, use_cache) for _ in range(rounds)], strict=True)
        found[name] = {"positions": counts[0], "seconds": statistics.median(times)}
    one, other = found.values()
    found["positions_ratio"] = other["positions"] / max(one["positions"], 1)
    found["time_ratio"] = other["seconds"] / one["seconds"]
    if given.json:
        print(json.dumps(found))
        return
    shape = given.preset or f"{width} × {depth}"
    print(f"{shape}, prompt {given.prompt}, {given.new} new, {given.device}, torch {torch.__version__}")
    for name in ("with the cache", "without"):
        row = found[name]
        print(f"  {name:<15} {row['positions']:6,} positions  {row['seconds']:8.3f} s")
    print(f"  {found['positions_ratio']:.1f} × the positions, {found['time_ratio']:.1f} × the time")


if __name__ == "__main__":
    main()
