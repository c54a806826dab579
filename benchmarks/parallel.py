"""Strategies on two processes (gloo, CPU): peak memory of each, and when gradients are summed; their speed on one GPU.

memory     the peak of the resident memory of a process while it trains, above that before the model was built
overlap    with ddp, when each bucket of gradients is summed, beside the backward pass, from a profile
speed      `monoblock train` on a GPU in a plain process and as a single rank (nccl) under torchrun, in turns

--smoke takes a toy model; --write saves the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _report import device_name, write_section

import monoblock as mb
from monoblock.config.families import gpt
from monoblock.kernels.cpu.library import processor_name
from monoblock.parallel.strategy import DataParallel, FullySharded, TensorParallel
from monoblock.parallel.world import World, init_distributed
from monoblock.training.loss import CrossEntropyLoss
from monoblock.training.optimizer import build_optimizers

RESULTS = Path(__file__).with_name("results") / "parallel.md"
STRATEGIES = {"ddp": DataParallel, "fsdp": FullySharded, "tp": TensorParallel}
STEPS = 3


def build_config(smoke: bool) -> mb.ModelConfig:
    sizes = {"vocab": 512, "width": 64, "depth": 2, "heads": 4} if smoke else {"vocab": 16_384, "width": 768}
    return gpt(**({"depth": 12, "heads": 12} | sizes), context=64)


# -- in each process ---------------------------------------------------------------------------------------------------


def read_status(key: str) -> int:
    """Return a figure of this process, in bytes: VmRSS, or VmHWM for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def train(name: str, world: World, smoke: bool) -> tuple[Any, Any]:
    """Build a model and split it; return a function that trains a step, and the model."""
    torch.manual_seed(0)
    model = mb.Transformer(build_config(smoke))
    strategy = STRATEGIES[name](world)
    module = strategy.prepare(model)
    optimizers, loss = build_optimizers(model), CrossEntropyLoss()
    ids = torch.randint(0, 500, (1, 64))

    def step() -> None:
        with strategy.accumulate(module, is_last=True):
            (strategy.compute_loss(module, loss, {"source": ids}, ids) / ids.numel()).backward()
        optimizers.step()
        optimizers.zero_grad()

    return step, model


def measure_memory(name: str, world: World, smoke: bool) -> dict[str, Any]:
    before = read_status("VmRSS")
    step, model = train(name, world, smoke)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew; building the whole model is not counted
    for _ in range(STEPS):
        step()
    parts = [w.to_local() if hasattr(w, "to_local") else w for w in model.parameters()]
    return {
        "strategy": name,
        "weights": sum(part.numel() * part.element_size() for part in parts),
        "peak": read_status("VmHWM") - before,
    }


def measure_overlap(world: World, smoke: bool) -> dict[str, Any]:
    """Profile a step: return the times of the backward pass and of each sum of gradients, in ms from its begin."""
    step, _ = train("ddp", world, smoke)
    step()
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    folder = tempfile.mkdtemp()
    profile.export_chrome_trace(f"{folder}/trace.json")
    events = [e for e in json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"] if e.get("ph") == "X"]
    shutil.rmtree(folder)
    backward = [e for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    start, stop = min(e["ts"] for e in backward), max(e["ts"] + e["dur"] for e in backward)
    sums = [e for e in events if e["name"].startswith("gloo:all_reduce")]
    return {
        "backward": [0.0, (stop - start) / 1000],
        "sums": sorted([(e["ts"] - start) / 1000, (e["ts"] + e["dur"] - start) / 1000] for e in sums),
    }


def run_worker(what: str, folder: Path, smoke: bool) -> None:
    tensor = 2 if what == "tp" else 1
    world = init_distributed(os.environ, "cpu", lambda size, local: tensor)
    found = measure_overlap(world, smoke) if what == "overlap" else measure_memory(what, world, smoke)
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    world.shut_down()


def run_processes(what: str, smoke: bool) -> list[dict[str, Any]]:
    """Run a measurement in two processes; return what each found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += ["--nproc-per-node=2", __file__, what, "--worker", folder] + ["--smoke"] * smoke
        # Freed tensors are returned to the system at once, so that the resident memory is that of living tensors.
        settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run(command, check=True, env=os.environ | settings)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


# -- tables ------------------------------------------------------------------------------------------------------------


def heading(title: str, command: str) -> list[str]:
    machine = f"{device_name()}, torch {torch.__version__}"
    source = f"`python benchmarks/parallel.py {command} --write`, {date.today()}: {machine}."
    return [f"## {title}", "", source, ""]


def memory_section(smoke: bool) -> str:
    rows = {name: run_processes(name, smoke) for name in STRATEGIES}
    peak = {name: max(row["peak"] for row in found) for name, found in rows.items()}
    weights = {name: max(row["weights"] for row in found) for name, found in rows.items()}
    millions = mb.account(build_config(smoke)).parameters / 1e6
    lines = heading(f"Memory of each of two processes, {millions:.0f}M parameters", "memory")
    lines += ["| strategy | weights, MiB | of ddp | peak, MiB | of ddp |", "|---|---|---|---|---|"]
    for name in STRATEGIES:
        shares = weights[name] / weights["ddp"], peak[name] / peak["ddp"]
        lines.append(
            f"| {name} | {weights[name] / 2**20:,.0f} | {shares[0]:.0%} | {peak[name] / 2**20:,.0f} | {shares[1]:.0%} |"
        )
    return "\n".join(lines)


def overlap_section(smoke: bool) -> str:
    found = run_processes("overlap", smoke)[0]
    end = found["backward"][1]
    lines = heading("When ddp sums gradients, two processes", "overlap")
    lines += [f"The backward pass takes {end:.0f} ms.", "", "| bucket | begins, ms | ends, ms | share before its end |"]
    lines.append("|---|---|---|---|")
    for number, (start, stop) in enumerate(found["sums"]):
        share = max(0.0, min(stop, end) - start) / (stop - start)
        lines.append(f"| {number + 1} | {start:.0f} | {stop:.0f} | {share:.0%} |")
    total = sum(stop - start for start, stop in found["sums"])
    hidden = sum(max(0.0, min(stop, end) - start) for start, stop in found["sums"])
    lines += ["", f"{hidden / total:.0%} of the time of the sums lies in the backward pass."]
    return "\n".join(lines)


def speed_section(smoke: bool, text: str) -> str:
    """Train gpt2-124m for a while with and without torchrun, three times in turns."""
    batch, steps = (2, 6) if smoke else (32, 160)
    words = ["train", "gpt2-124m", f"data.corpus={text}", f"train.batch={batch}", "train.accumulate=1"]
    words += [f"train.steps={steps}", f"train.warmup={steps // 2}", "train.sample_every=0", "train.compile=yes"]
    plain, torchrun = [sys.executable, "-m"], [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m"]
    speeds: dict[str, list[float]] = {"a plain process": [], "one rank under torchrun": []}
    for _ in range(3):
        for (name, found), start in zip(speeds.items(), (plain, torchrun), strict=True):
            folder = Path(tempfile.mkdtemp())
            subprocess.run([*start, "monoblock", *words, "--out", str(folder / "run")], check=True)
            rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
            seconds = [row["seconds"] for row in rows if "loss" in row and row["step"] > steps // 3]
            found.append(batch * 1024 / statistics.median(seconds))
            shutil.rmtree(folder)
            print(name, f"{found[-1]:,.0f} tokens/s", flush=True)
    plain_speed = statistics.median(speeds["a plain process"])
    lines = heading("Speed of a single rank", "speed")
    lines += [
        f"gpt2-124m, {batch} × 1,024 tokens a step, compiled; the median step of each of three runs in turns.",
        "",
    ]
    lines += ["| | tokens/s | share |", "|---|---|---|"]
    lines += [
        f"| {name} | {', '.join(f'{s:,.0f}' for s in found)} | {statistics.median(found) / plain_speed:.1%} |"
        for name, found in speeds.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "overlap", "speed", *STRATEGIES), nargs="?", default="memory")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", help="a text file to train on (speed)", default="kjv")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.worker:
        return run_worker(options.what, options.worker, options.smoke)
    begin = time.perf_counter()
    section = {"memory": memory_section, "overlap": overlap_section}.get(options.what)
    text = section(options.smoke) if section else speed_section(options.smoke, options.text)
    print(text, f"\n({processor_name()}, {time.perf_counter() - begin:.0f} s)")
    if options.write:
        write_section(RESULTS, "Strategies for several processes", text.removeprefix("## "))


if __name__ == "__main__":
    main()
