"""Time from the start of Python to the first token of a model in a GGUF file, compared with transformers and llama.cpp.

The model has the shape of SmolLM2-135M and random weights; every run is a new process, which imports the library, loads
the file and generates one token after a prompt of 32 tokens. Runners take turns, and the best run of each counts; the
files and compiled kernels are cached by then. transformers reads the GGUF file too, and dequantizes it. --smoke takes a
toy size; --write saves the table.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import date
from pathlib import Path

import torch
from _report import commit, write_section

import monoblock as mb
from monoblock.bench.startup import PROGRAMS, time_startup
from monoblock.interop.gguf.writer import save_gguf
from monoblock.kernels.cpu.library import processor_name

RESULTS = Path(__file__).with_name("results") / "startup-cpu.md"


def format_section(best: dict[str, list[float]], absent: dict[str, str], kind: str, rounds: int) -> str:
    lines = [
        f"SmolLM2-135M, {kind}",
        "",
        f"`python benchmarks/startup.py --kind {kind} --rounds {rounds} --write`, {date.today()}, commit "
        f"{commit()}: {processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}; seconds "
        f"since the start of the program, best of {rounds} runs.",
        "",
        "| runner | imported | loaded | first token |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(f'{seconds:.2f}' for seconds in times)} |" for name, times in best.items()),
        *(["", *(f"- {name}: {reason}" for name, reason in absent.items())] if absent else []),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="q8_0", help="how the file stores matrices: f32, f16 or q8_0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = mb.Transformer(mb.tiny("smollm2-135m") if args.smoke else mb.preset("smollm2-135m"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        save_gguf(model, path, kind="f32" if args.smoke else args.kind)
        best, absent = time_startup(
            path, list(PROGRAMS), 1 if args.smoke else args.rounds, "cpu", torch.get_num_threads()
        )
    section = format_section(best, absent, args.kind, args.rounds)
    print(section)
    if args.write:
        write_section(RESULTS, "Start-up", section)


if __name__ == "__main__":
    main()
