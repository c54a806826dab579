"""Decoding a 124M GPT-2 shape on the CPU, one text: this package beside transformers and CTranslate2, in one run.

Random weights, a prompt of 32 tokens and 64 new ones, greedy, no end token; the runners take turns, medians are shown.
The same as `monoblock bench gpt2`, with the ratios that matter.  --smoke runs a toy size once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

import monoblock as mb
from monoblock.cli.bench import measured, report
from monoblock.cli.peers import PLAIN

RATIOS = (
    ("monoblock", "transformers"),
    ("monoblock", "CTranslate2, fp32"),
    ("monoblock, 8 bits", "CTranslate2, int8"),
    ("monoblock, 4 bits", "CTranslate2, int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="run these alone")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    toy = mb.gpt(vocab=97, width=64, depth=2, heads=4, context=64, activation="gelu_tanh")
    model = mb.Transformer(toy if given.smoke else mb.preset(given.preset)).eval()
    prompt, new, rounds = (5, 8, 1) if given.smoke else (given.prompt, given.new, given.rounds)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(model, Path(folder), given.only or PLAIN, prompt, new, 1, rounds)
    found = {"model": "a toy" if given.smoke else given.preset} | found
    speeds = {name: row["decode_tokens_per_second"] for name, row in found["runners"].items()}
    found["ratios"] = {
        f"{one} / {other}": speeds[one] / speeds[other]
        for one, other in RATIOS
        if speeds.get(one) and speeds.get(other)
    }
    if given.json:
        print(json.dumps(found))
        return
    report(found)
    for pair, ratio in found["ratios"].items():
        print(f"  {pair}: {ratio:.2f} ×")


if __name__ == "__main__":
    main()
