"""Time and memory to load a Hugging Face folder of SmolLM2's size, compared with transformers.

    python benchmarks/load.py --out table.md

Every measurement is a new process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORTS = {
    "monoblock": "from monoblock.model import Transformer as Model",
    "transformers": "from transformers import AutoModelForCausalLM as Model",
}
# Imports are not timed. Memory is the increase of the peak, pages of the mapped file included.
PROGRAM = """
import json, re, sys, time
{imports}
import torch
torch.manual_seed(0)
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
memory, start = peak(), time.perf_counter()
model = Model.from_pretrained(sys.argv[1], dtype=torch.float32)
total = sum(float(weight.sum()) for weight in model.parameters())  # touch every weight
print(json.dumps({{"seconds": time.perf_counter() - start, "kilobytes": peak() - memory, "sum": total}}))
"""


def measure(library: str, folder: Path) -> dict[str, float]:
    program = PROGRAM.format(imports=IMPORTS[library])
    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import transformers as tf

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49_152}
    small = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True}
    settings = tf.LlamaConfig(**(small if args.smoke else sizes), **heads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = tf.LlamaForCausalLM(settings)
        model.save_pretrained(folder)
        weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        del model
        results: dict[str, list[dict[str, float]]] = {library: [] for library in IMPORTS}
        for _ in range(1 if args.smoke else args.rounds):
            for library in IMPORTS:
                results[library].append(measure(library, folder))
    lines = [
        f"Loading {weights / 1e6:.0f} MB of safetensors in fp32, medians of {len(results['monoblock'])} rounds",
        "",
    ]
    lines += ["| | seconds | memory added / weights |", "|---|---|---|"]
    for library, rows in results.items():
        seconds = statistics.median(row["seconds"] for row in rows)
        memory = statistics.median(row["kilobytes"] for row in rows) * 1024 / weights
        lines.append(f"| {library} | {seconds:.3f} | {memory:.2f} × |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
