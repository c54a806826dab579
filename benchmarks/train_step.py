"""A training step (forward, loss, backward) of a GPT preset beside transformers' GPT-2 of the same shape.

Both run eagerly in one process, without dropout, in turn so that neither has the quieter machine; the table gives the
median and the best step of each, and the median over rounds of how many times faster ours was in the same round.  Where
our time goes is told by torch's profiler; beside it stands how fast the products ran, and how fast this machine
multiplies large matrices.  --smoke runs a toy size once, to see that the script still works; --write keeps the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import monoblock as mb

RESULTS = Path(__file__).with_name("results") / "train-cpu.md"
OURS, THEIRS = "monoblock", "transformers"
WARM = 3  # rounds before any counts
GROUPS = {  # what an operator's name begins with -> where its time is counted; the first that fits
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("monoblock::attend", "aten::_scaled_dot_product"),
    "activation": ("monoblock::gelu", "aten::gelu", "aten::silu"),
    "norms": ("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rsqrt"),
    "copies": ("aten::copy_", "aten::cat", "aten::fill_", "aten::clone"),
    "sums and residuals": ("aten::sum", "aten::add"),
}


def reference(config: mb.ModelConfig) -> GPT2LMHeadModel:
    attention = next(config.decoder.layers()).attention
    sizes = {"n_embd": config.width, "n_layer": config.depth, "n_head": attention.heads, "n_positions": config.context}
    ends = {"bos_token_id": None, "eos_token_id": None}
    settings = GPT2Config(
        vocab_size=config.input.vocab, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes, **ends
    )
    return GPT2LMHeadModel(settings)


def step(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Seconds of one forward, loss and backward."""
    model.zero_grad(set_to_none=True)
    begun = time.perf_counter()
    out = model(ids)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return time.perf_counter() - begun


def in_turn(models: dict[str, torch.nn.Module], ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """The seconds of each model's steps, round after round."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + min(WARM, rounds)):
        for name, model in models.items():
            taken = step(model.train(), ids)
            if turn >= min(WARM, rounds):
                seconds[name].append(taken)
    return seconds


def shares(model: torch.nn.Module, ids: torch.Tensor, rounds: int) -> tuple[dict[str, float], float]:
    """What part of a step each group of operators takes, and how many seconds the products take."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(rounds):
            step(model, ids)
    found = dict.fromkeys((*GROUPS, "the rest"), 0.0)
    for row in seen.key_averages():
        group = next((name for name, heads in GROUPS.items() if row.key.startswith(heads)), "the rest")
        found[group] += row.self_cpu_time_total / 1e6 / rounds
    total = sum(found.values())
    return {name: taken / total for name, taken in found.items()}, found["products"]


def peak(size: int, rounds: int = 8) -> float:
    """Operations a second in the product of two large matrices, at best."""
    one, two = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        one @ two
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    config = mb.tiny("gpt2") if given.smoke else mb.preset(given.preset)
    batch, length, rounds = (2, 16, 1) if given.smoke else (given.batch, given.length, given.rounds)
    size = 64 if given.smoke else 2048
    torch.manual_seed(0)
    ids = torch.randint(0, config.input.vocab, (batch, length))
    models: dict[str, torch.nn.Module] = {OURS: mb.Transformer(config), THEIRS: reference(config)}
    if given.compile:
        models[f"{OURS}, compiled"] = torch.compile(mb.Transformer(config))
    seconds = in_turn(models, ids, rounds)
    inside, products = shares(models[OURS], ids, min(rounds, 5))
    weights = sum(w.numel() for name, w in models[OURS].named_parameters() if w.dim() == 2 and "position" not in name)
    return {
        "model": "a toy" if given.smoke else given.preset,
        "batch": batch,
        "length": length,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "best": {name: min(taken) for name, taken in seconds.items()},
        "times_faster": {name: _faster(seconds[THEIRS], taken) for name, taken in seconds.items() if name != THEIRS},
        "shares": inside,
        "products_per_second": 6 * weights * batch * length / products,
        "peak_per_second": peak(size),
        "peak_size": size,
    }


def _faster(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """By the medians of steps, by the best ones, and as the median over rounds."""
    return {
        "medians": statistics.median(theirs) / statistics.median(ours),
        "best": min(theirs) / min(ours),
        "rounds": statistics.median(one / other for one, other in zip(theirs, ours, strict=True)),
    }


def table(found: dict[str, Any]) -> str:
    """All of it, as Markdown."""
    lines = [
        f"{found['model']}, batch {found['batch']} × {found['length']}",
        "",
        f"`python benchmarks/train_step.py --preset {found['model']} --batch {found['batch']} "
        f"--length {found['length']} --rounds {found['rounds']} --write`, "
        f"{date.today()}: {_processor()}, {found['threads']} threads, "
        f"torch {found['torch']}; forward, loss and backward in fp32, {found['rounds']} rounds in turn.",
        "",
        "| runner | ms a step | at best | tokens/s | times as fast as transformers: rounds, medians, best |",
        "|---|---|---|---|---|",
    ]
    for name, taken in found["seconds"].items():
        ratio = found["times_faster"].get(name, {})
        faster = ", ".join(f"{ratio[way]:.2f} ×" for way in ("rounds", "medians", "best") if ratio)
        speed = found["batch"] * found["length"] / taken
        lines.append(f"| {name} | {1000 * taken:.0f} | {1000 * found['best'][name]:.0f} | {speed:.0f} | {faster} |")
    lines += ["", "| where our step's time goes | share |", "|---|---|"]
    lines += [f"| {name} | {share:.1%} |" for name, share in found["shares"].items()]
    reached, most, size = found["products_per_second"], found["peak_per_second"], found["peak_size"]
    most_said = f"{most / 1e9:.0f} GFLOP/s at which torch multiplies two matrices of {size} × {size} here"
    lines += ["", f"The products ran at {reached / 1e9:.0f} GFLOP/s, {reached / most:.0%} of the {most_said}."]
    return "\n".join(lines)


def kept(found: dict[str, Any]) -> None:
    """Put this table into the file of results, in the place of an older one."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Training on the CPU\n"
    head, *tables = text.split("\n## ")
    made = table(found)
    tables = [old.strip() for old in tables if old.split("\n")[0] != made.split("\n")[0]]
    RESULTS.write_text("\n\n## ".join([head.strip(), *sorted([*tables, made])]) + "\n", encoding="utf-8")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "this processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--compile", action="store_true", help="a third row: ours compiled")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"put the table into results/{RESULTS.name}")
    given = parser.parse_args()
    found = measured(given)
    print(json.dumps(found) if given.json else table(found))
    if given.write:
        kept(found)


if __name__ == "__main__":
    main()
