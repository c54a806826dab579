"""Decoding on the CPU, one text: this package beside transformers and CTranslate2, each in a process of its own.

Random weights, the first 32 bytes of five texts as prompts and 64 new tokens, greedy, no end token; medians are shown.
In one process the threads of one runner would spin while another works.  The figures are those of `monoblock bench`,
with the ratios that matter.  A token needs every weight once, so beside each stands how fast weights were read, and
what share that is of the fastest this machine reads memory, measured in the same run; where a draft runs ahead, weights
are read once for several tokens.  How many of its proposals are kept, and that the text is the same, is told of all
five.  --smoke runs a toy size once; --write keeps the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import monoblock as mb
from monoblock.cli.bench import measured, report
from monoblock.cli.peers import PLAIN
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.decoding.speculative import Draft

RESULTS = Path(__file__).with_name("results") / "decode-cpu.md"
SHARED = ("device", "dtype", "threads", "torch", "prompt", "new", "batch", "rounds", "kv_cache_bytes")
DRAFTED = "monoblock, own 8-bit draft"
TEXTS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.",
    "First Citizen: Before we proceed any further, hear me speak. All: Speak, speak. First Citizen: You are resolved.",
)
RATIOS = (
    (DRAFTED, "transformers"),
    (DRAFTED, "CTranslate2, fp32"),
    ("monoblock", "transformers"),
    ("monoblock", "CTranslate2, fp32"),
    ("monoblock, 8 bits", "CTranslate2, int8"),
    ("monoblock, 4 bits", "CTranslate2, int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", action="append", help="gpt2 when not given; may be given several times")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="every runner so often, in turn; its best turn is told")
    parser.add_argument("--only", action="append", help="run these alone")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"put the tables into results/{RESULTS.name}")
    parser.add_argument("--here", action="store_true", help="all in this process")
    parser.add_argument("--memory", action="store_true", help="only tell how fast memory is read")
    parser.add_argument("--proposals", action="store_true", help="only tell how many proposals are kept")
    given = parser.parse_args()
    if given.memory or given.proposals:
        print(reading() if given.memory else json.dumps(proposals((given.preset or ["gpt2"])[0], given)))
        return
    for name in given.preset or ["gpt2"]:
        found = in_turn(name, given) if given.here or given.smoke else apart(name, given)
        found["ratios"] = ratios(found)
        if given.json:
            print(json.dumps(found))
            continue
        report(found)
        for pair, ratio in found["ratios"].items():
            print(f"  {pair}: {ratio:.2f} ×")
        if given.write:
            kept(found)


def in_turn(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The runners in this process, round after round."""
    torch.manual_seed(0)
    toy = mb.gpt(vocab=256, width=64, depth=2, heads=4, context=64, activation="gelu_tanh")
    model = mb.Transformer(toy if given.smoke else mb.preset(name)).eval()
    prompt, new, rounds = (5, 8, 1) if given.smoke else (given.prompt, given.new, given.rounds)
    with tempfile.TemporaryDirectory() as folder:
        texts = [[ids] for ids in prompts(prompt)]
        found = measured(model, Path(folder), given.only or PLAIN, prompt, new, 1, rounds, texts)
    return {"model": "a toy" if given.smoke else name} | found


def prompts(length: int) -> list[list[int]]:
    """The first bytes of each text, which stand for themselves among the tokens."""
    return [list(text.encode()[:length]) for text in TEXTS]


def proposals(name: str, given: argparse.Namespace) -> dict[str, int]:
    """Of all texts: tokens that the model's own copy proposed, those that were kept, and texts that are the same."""
    torch.manual_seed(0)
    model = mb.Transformer(mb.preset(name)).eval()
    found = {"proposed": 0, "kept": 0, "same": 0, "texts": len(TEXTS)}
    for ids in prompts(given.prompt):
        engine = Engine(model, capacity=given.prompt + given.new)
        engine.add(ids, Settings(max_new_tokens=given.new, draft="8-bit"))
        said: list[int] = []
        while engine.busy:
            said += [token for event in engine.step() for token in event.tokens]
        assert isinstance(engine.proposer, Draft)
        found["proposed"] += engine.proposer.proposed
        found["kept"] += engine.proposer.accepted
        found["same"] += (
            model.generate(torch.tensor([ids]), max_new_tokens=given.new)[0, given.prompt :].tolist() == said
        )
    return found


def reading(size: int = 1 << 29, rounds: int = 15) -> float:
    """Bytes a second: the fastest of some passes over half a gigabyte, added up or multiplied as a step does it."""
    numbers = torch.ones(size // 4)
    rows, vector = numbers.view(-1, 4096), torch.ones(4096)
    seconds = []
    for run in (numbers.sum, lambda: torch.mv(rows, vector), lambda: torch.dot(numbers, numbers)):
        for _ in range(rounds):
            begun = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begun)
    return size / min(seconds)


def apart(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Every runner in a process of its own, one after the other, in turn."""
    found: dict[str, Any] = {"model": name, "runners": {}, "absent": {}}
    memory = [_said(["--memory"])]
    sizes = ["--prompt", str(given.prompt), "--new", str(given.new), "--rounds", str(given.rounds)]
    for runner in given.turns * list(given.only or PLAIN):
        one = json.loads(_said(["--here", "--json", "--preset", name, "--only", runner, *sizes]))
        found["absent"] |= one["absent"]
        for who, row in one["runners"].items():  # what else runs on the machine only ever makes a turn slower
            before = found["runners"].get(who, row)
            found["runners"][who] = max(before, row, key=lambda turn: turn["decode_tokens_per_second"] or 0)
        found |= {key: one[key] for key in SHARED}
        memory.append(_said(["--memory"]))
    if DRAFTED in found["runners"]:
        found["proposals"] = json.loads(_said(["--proposals", "--preset", name, *sizes]))
    return found | {"turns": given.turns, "memory_bytes_per_second": max(map(float, memory))}


def _said(words: list[str]) -> str:
    """The last line of this file run with these words."""
    command = [sys.executable, __file__, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


def ratios(found: dict[str, Any]) -> dict[str, float]:
    speeds = {name: row["decode_tokens_per_second"] for name, row in found["runners"].items()}
    pairs = [pair for pair in RATIOS if all(speeds.get(name) for name in pair)]
    return {f"{one} / {other}": speeds[one] / speeds[other] for one, other in pairs}


def kept(found: dict[str, Any]) -> None:
    """Put this model's table into the file of results, in the place of an older one."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Decoding on the CPU, one text\n"
    head, *tables = text.split("\n## ")
    tables = [table.strip() for table in tables if table.split("\n")[0] != found["model"]]
    tables.append(_table(found).strip())
    RESULTS.write_text("\n\n## ".join([head.strip(), *sorted(tables)]) + "\n", encoding="utf-8")


def _table(found: dict[str, Any]) -> str:
    sizes = f"--preset {found['model']} --rounds {found['rounds']} --turns {found['turns']}"
    lines = [
        found["model"],
        "",
        f"`python benchmarks/decode_cpu.py {sizes} --write`, {date.today()}: {_processor()}, "
        f"{found['threads']} threads, torch {found['torch']}; random weights, {found['prompt']} bytes of a text are "
        f"read and {found['new']} tokens made, another text each round, median of {found['rounds']} rounds, the best "
        f"of {found['turns']} turns, each in a process of its own.",
        "",
        "| runner | prefill tok/s | decode tok/s | ms a token | weights | read GB/s | of what memory gives |",
        "|---|---|---|---|---|---|---|",
    ]
    memory = found["memory_bytes_per_second"]
    for name, row in found["runners"].items():
        speed, size = row["decode_tokens_per_second"], row["weight_bytes"]
        decode = "| | |" if speed is None else f"| {speed:.1f} | {1000 / speed:.2f} |"
        read = "| | | |" if speed is None else f" {size / 1e6:.0f} MB | {speed * size / 1e9:.1f} | "
        share = "" if speed is None else f"{speed * size / memory:.0%} |"
        if name == DRAFTED:  # one reading for several tokens, and several of the copy
            read, share = f" {size / 1e6:.0f} MB and the 8-bit copy | | ", "|"
        lines.append(f"| {name} | {row['prefill_tokens_per_second']:.1f} {decode}{read}{share}")
    lines += ["", f"Memory is read at {memory / 1e9:.1f} GB/s at best, with all threads."]
    if "proposals" in found:
        seen = found["proposals"]
        lines += [
            f"The own 8-bit draft: {seen['kept']} of {seen['proposed']} proposals were kept "
            f"({seen['kept'] / seen['proposed']:.1%}); {seen['same']} of {seen['texts']} texts are token by token "
            "those of plain greedy decoding.",
        ]
    lines += ["", *(f"- {pair}: {ratio:.2f} ×" for pair, ratio in found["ratios"].items())]
    lines += [f"- {name}: {why}" for name, why in found["absent"].items()]
    return "\n".join(lines)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "this processor")


if __name__ == "__main__":
    main()
