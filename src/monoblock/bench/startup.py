"""Time from the start of Python to the first token of a model in a GGUF file, beside transformers and llama.cpp.

Every run is a new process, which imports the library, loads the file and generates one token after a prompt of 32.
transformers reads the GGUF file too, and dequantizes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PROMPT = list(range(5, 37))
# Programs that print the seconds of import, of loading and of the first token, given the file, the device and the
# number of threads.
TIMER = "import sys, time; started = time.perf_counter(); times = []; path, device, threads = sys.argv[1:]\n"
MARK = "times.append(time.perf_counter() - started)\n"
REPORT = "import json; print(json.dumps(times))"
PROGRAMS = {
    "monoblock": f"""{TIMER}import torch, monoblock as mb
torch.set_num_threads(int(threads))
mb.Transformer
{MARK}model = mb.Transformer.from_pretrained(path, device=device).eval()
{MARK}mb.optimize(model).generate(torch.tensor([{PROMPT}], device=device), max_new_tokens=1).tolist()
{MARK}{REPORT}""",
    "transformers": f"""{TIMER}import os, torch, transformers
torch.set_num_threads(int(threads))
from transformers import AutoModelForCausalLM
{MARK}folder, name = os.path.split(path)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).to(device).eval()
{MARK}prompt = torch.tensor([{PROMPT}], device=device)
mask = torch.ones_like(prompt)
model.generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0).tolist()
{MARK}{REPORT}""",
    "llama.cpp": f"""{TIMER}import llama_cpp
{MARK}model = llama_cpp.Llama(path, n_ctx=64, n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
{MARK}model.eval({PROMPT})
{MARK}{REPORT}""",
}
PACKAGES = {"monoblock": "monoblock", "transformers": "transformers", "llama.cpp": "llama_cpp"}


def run_program(name: str, path: Path, device: str, threads: int) -> list[float] | str:
    """Return the seconds until each mark, or the last line of the error."""
    command = [sys.executable, "-c", PROGRAMS[name], str(path), device, str(threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        return (result.stderr.strip().splitlines() or ["failed"])[-1][:120]
    times: list[float] = json.loads(result.stdout.strip().splitlines()[-1])
    return times


def time_startup(
    path: Path, names: list[str], rounds: int, device: str, threads: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Run the programs in turns; return the times of the best run of each, and why others could not run."""
    best: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    for number in range(rounds + 1):  # the first fills the caches
        for name in names:
            is_there = name == "monoblock" or find_spec(PACKAGES[name]) is not None
            times = run_program(name, path, device, threads) if is_there else "not installed"
            if isinstance(times, str):
                absent[name] = times
            elif number and (name not in best or times[-1] < best[name][-1]):
                best[name] = times
    return best, absent
