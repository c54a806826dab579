"""Time from the start of Python to the first token of a model in a GGUF file, compared with transformers and llama.cpp.

The model has the shape of SmolLM2-135M and random weights; every run is a new process, which imports the library, loads
the file and generates one token after a prompt of 32 tokens. Runners take turns, and the best run of each counts; the
files and compiled kernels are cached by then. transformers reads the GGUF file too, and dequantizes it. --smoke takes a
toy size; --write saves the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import torch
from _report import commit, processor_name, write_section

import monoblock as mb
from monoblock.interop.gguf.writer import save_gguf

RESULTS = Path(__file__).with_name("results") / "startup-cpu.md"
PROMPT = list(range(5, 37))
# Programs that print the seconds of import, of loading and of the first token, given the path of the file.
TIMER = "import sys, time; started = time.perf_counter(); path = sys.argv[1]; times = []\n"
MARK = "times.append(time.perf_counter() - started)\n"
REPORT = "import json; print(json.dumps(times))"
PROGRAMS = {
    "monoblock": f"""{TIMER}import torch, monoblock as mb
mb.Transformer
{MARK}model = mb.Transformer.from_pretrained(path)
{MARK}model.generate(torch.tensor([{PROMPT}]), max_new_tokens=1)
{MARK}{REPORT}""",
    "transformers": f"""{TIMER}import os, torch, transformers
from transformers import AutoModelForCausalLM
{MARK}folder, name = os.path.split(path)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
{MARK}prompt = torch.tensor([{PROMPT}])
model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False, pad_token_id=0)
{MARK}{REPORT}""",
    "llama.cpp": f"""{TIMER}import llama_cpp
{MARK}model = llama_cpp.Llama(path, n_ctx=64, n_threads=2, n_threads_batch=2, verbose=False)
{MARK}model.eval({PROMPT})
{MARK}{REPORT}""",
}
PACKAGES = {"monoblock": "monoblock", "transformers": "transformers", "llama.cpp": "llama_cpp"}


def run_program(name: str, path: Path) -> list[float] | str:
    """Return the seconds until each mark, or the last line of the error."""
    command = [sys.executable, "-c", PROGRAMS[name], str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        return (result.stderr.strip().splitlines() or ["failed"])[-1][:120]
    times: list[float] = json.loads(result.stdout.strip().splitlines()[-1])
    return times


def measure(path: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    best: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    for number in range(rounds + 1):  # the first fills the caches
        for name, package in PACKAGES.items():
            times = run_program(name, path) if find_spec(package) else "not installed"
            if isinstance(times, str):
                absent[name] = times
            elif number and (name not in best or times[-1] < best[name][-1]):
                best[name] = times
    return best, absent


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
        best, absent = measure(path, 1 if args.smoke else args.rounds)
    section = format_section(best, absent, args.kind, args.rounds)
    print(section)
    if args.write:
        write_section(RESULTS, "Start-up", section)


if __name__ == "__main__":
    main()
