"""Where the time of a recorded step goes on a GPU: the replay, its kernels, the host around it.

python benchmarks/decode_profile.py gpt2 --batch 64
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time

import torch
from decode_gpu import NEW, PROMPT, random_model
from torch.profiler import ProfilerActivity, profile

import monoblock as mb
from monoblock.decoding.captured import Captured
from monoblock.decoding.generate import KEPT

STEPS = 64


def replayed(rows: Captured) -> tuple[float, float]:
    """Milliseconds of a step, and those of them in which the host is busy starting it."""
    assert rows.graph is not None
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(STEPS):
        rows.graph.replay()
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / STEPS, 1e3 * host / STEPS


def rewound(rows: Captured) -> None:
    assert rows.cache is not None
    with torch.inference_mode():
        rows.cache.lengths.fill_(PROMPT + NEW // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="gpt2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--kernels", type=int, default=20, help="how many to list")
    given = parser.parse_args()
    model = random_model(mb.preset(given.preset))
    ids = torch.randint(1000, (given.batch, PROMPT), device="cuda")
    model.generate(ids, max_new_tokens=NEW)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    model.generate(ids, max_new_tokens=NEW)
    torch.cuda.synchronize()
    print(f"{given.preset}, batch {given.batch}: {time.perf_counter() - begun:.3f} s for {NEW} steps and the prompt")
    rows = KEPT[model][1].rows
    assert isinstance(rows, Captured)
    rewound(rows)
    print("a replayed step: {:.3f} ms, of them {:.3f} on the host".format(*replayed(rows)))
    rewound(rows)
    assert rows.graph is not None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        rows.graph.replay()
        torch.cuda.synchronize()
    for kernel in sorted(seen.key_averages(), key=lambda kernel: -kernel.device_time_total)[: given.kernels]:
        print(f"{kernel.device_time_total:9.1f} us  {kernel.count:4d} ×  {kernel.key[:100]}")
    host = cProfile.Profile()
    host.enable()
    model.generate(ids, max_new_tokens=NEW)
    torch.cuda.synchronize()
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(12)
    print("\n".join(line for line in text.getvalue().splitlines() if line.strip()))


if __name__ == "__main__":
    main()
