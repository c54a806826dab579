"""Profile a recorded decoding step on a GPU: the replay, its kernels, and the work of the host.

python benchmarks/decode_profile.py gpt2 --batch 64
python benchmarks/decode_profile.py llama-7b --batch 1 --bits 4
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time

import torch
from decode_gpu import NEW, PROMPT, QUANTIZED_GROUPS, quantized_model
from torch.profiler import ProfilerActivity, profile

import monoblock as mb
from monoblock.inference.runners.cuda import MAX_STEPS, RecordedPass


def time_replay(step: RecordedPass) -> tuple[float, float]:
    """Return the milliseconds of a step, and of its launch on the host."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(MAX_STEPS):
        step.replay()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / MAX_STEPS, 1e3 * host / MAX_STEPS


def rewind(step: RecordedPass) -> None:
    """Go back to the middle of the generated text."""
    step.step.zero_()
    step.lengths.fill_(PROMPT + NEW // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="gpt2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--bits", type=int, choices=(16, *QUANTIZED_GROUPS), default=16, help="bits of a weight")
    parser.add_argument("--kernels", type=int, default=20, help="number of kernels to list")
    parser.add_argument("--smoke", action="store_true", help="a small batch; without a GPU, do nothing")
    args = parser.parse_args()
    if args.smoke and not torch.cuda.is_available():
        print("skipped: there is no GPU")
        return
    args.batch = 1 if args.smoke else args.batch
    model = quantized_model(mb.preset(args.preset), args.bits)
    ids = torch.randint(1000, (args.batch, PROMPT), device="cuda")
    model.generate(ids, max_new_tokens=NEW)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=NEW)
    torch.cuda.synchronize()
    name, seconds = f"{args.preset}, {args.bits} bits, batch {args.batch}", time.perf_counter() - start
    print(f"{name}: {seconds:.3f} s for the prompt and {NEW} steps")
    step = [one for one in model._idle_pages[-1].recordings.values() if one.filters is not None][-1]
    rewind(step)
    print("replayed step: {:.3f} ms, launch on the host {:.3f} ms".format(*time_replay(step)))
    rewind(step)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step.replay()
        torch.cuda.synchronize()
    for kernel in sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)[: args.kernels]:
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
