"""Planned memory beside allocated memory: models on this GPU or on fake tensors, and 512 ranks of a fake process group.

On a GPU, three training steps run as the trainer runs them without compilation (bf16 autocast, fused AdamW, clipping),
and the peak that `Account.plan` computes is compared with `torch.cuda.max_memory_allocated`. Without a GPU, or with
--fake, steps of the same models on fake tensors are compared instead, and rank 0 of 512 fake ranks: its shards of
weights, gradients and optimizer states, and the peak of a step on fake tensors, in every mode of checkpointing. --smoke
takes toy sizes; --write saves the tables.
"""

from __future__ import annotations

import argparse
import gc
import json
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _fake_group import sharded_state_bytes, step_peak_bytes
from _report import commit, device_name, write_section

import monoblock as mb
from monoblock.accounting.report import account
from monoblock.config.families import bert, llama
from monoblock.config.parts import CheckpointMode
from monoblock.training.loss import CrossEntropyLoss
from monoblock.training.optimizer import build_optimizers

RESULTS = Path(__file__).with_name("results") / "planned-memory.md"
STEPS = 3
RANKS = 512
MIB = 2**20


class Case(NamedTuple):
    name: str
    config: mb.ModelConfig
    batch: int
    length: int
    checkpointing: CheckpointMode = False


CASES = [
    Case("gpt2, 124M", mb.preset("gpt2"), 8, 1024),
    Case("gpt2, 124M", mb.preset("gpt2"), 32, 1024),
    Case("llama, 134M", llama(vocab=32_000, width=768, depth=12, heads=12, hidden=2048, context=1024), 8, 1024),
    Case(
        "bert-base, masked LM",
        bert(vocab=30_522, width=768, depth=12, heads=12, context=512, head="masked_lm"),
        16,
        512,
    ),
    Case("t5-base", mb.preset("t5-base"), 8, 512),
    Case(
        "llama, 1.06B, checkpointed",
        llama(vocab=32_000, width=2048, depth=18, heads=16, hidden=5632, context=2048),
        4,
        2048,
        checkpointing=True,
    ),
    Case(
        "llama, 134M, selectively checkpointed",
        llama(vocab=32_000, width=768, depth=12, heads=12, kv_heads=4, hidden=2048, context=1024),
        8,
        1024,
        checkpointing="selective",
    ),
]
MODES = {"": False, ", selectively checkpointed": "selective", ", checkpointed": True}
SMOKE_CASE = Case("a toy", llama(vocab=512, width=64, depth=2, heads=8, hidden=128, context=64), 2, 64)


# -- one GPU ---------------------------------------------------------------------------------------------------------


def train_steps(case: Case) -> None:
    """Run STEPS training steps on the GPU."""
    torch.manual_seed(0)
    model = mb.Transformer(case.config).cuda().train().recompute(case.checkpointing)
    optimizers, loss = build_optimizers(model), CrossEntropyLoss()
    optimizers.set_lr(1e-4)
    vocab = case.config.input.vocab
    for _ in range(STEPS):
        ids = torch.randint(0, vocab, (case.batch, case.length), device="cuda")
        inputs = {"source": ids, "target": ids} if case.config.family == "encoder-decoder" else {"source": ids}
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(model, inputs, ids) / ids.numel()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()
        del value


def measure_gpu(case: Case) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train_steps(case)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return _row(case.name, case, _plan(case, 1).memory.peak, peak)


# -- fake tensors and a fake process group ----------------------------------------------------------------------------


def measure_on_fake_tensors(case: Case) -> dict[str, Any]:
    """Compare the plan of one GPU with a step on fake tensors, without the workspace of cuBLAS."""
    plan = _plan(case, 1)
    peak = step_peak_bytes(case.config, plan.parallel, case.batch, case.length, checkpointing=case.checkpointing)
    return _row(case.name, case, plan.memory.peak - plan.memory.workspace, peak)


def measure_fake(config: mb.ModelConfig, ranks: int, length: int) -> list[dict[str, Any]]:
    """Compare the plan with the shards and with the steps of rank 0, in every mode of checkpointing."""
    rows = []
    for ending, checkpointing in MODES.items():
        case = Case("peak of a step" + ending, config, 1, length, checkpointing)
        plan = _plan(case, ranks)
        if not checkpointing:
            state = sharded_state_bytes(config, plan.parallel)
            rows.append(_row("weights, gradients, optimizer", case, plan.memory.state, state))
        peak = step_peak_bytes(config, plan.parallel, case.batch, length, checkpointing=checkpointing)
        rows.append(_row(case.name, case, plan.memory.peak - plan.memory.workspace, peak))
    return rows


def _plan(case: Case, ranks: int) -> Any:
    strategy = "fsdp+tp" if ranks > 1 else "ddp"
    sizes = {"batch": case.batch, "length": case.length, "checkpointing": case.checkpointing}
    return account(case.config).plan(strategy, ranks, **sizes)


def _row(name: str, case: Case, planned: int, allocated: int) -> dict[str, Any]:
    error = 100 * (planned / allocated - 1)
    return {"name": name, "batch": case.batch, "length": case.length, "planned": planned, "allocated": allocated} | {
        "error_percent": error
    }


# -- report ----------------------------------------------------------------------------------------------------------


def format_section(title: str, command: str, rows: list[dict[str, Any]], machine: str) -> str:
    lines = [
        title,
        "",
        f"`python benchmarks/planned_memory.py{command} --write`, {date.today()}, commit {commit()}: {machine}, "
        f"torch {torch.__version__}.",
        "",
        "| what | batch | planned, MiB | allocated, MiB | error |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['batch']} × {row['length']} | {row['planned'] / MIB:,.0f} | "
        f"{row['allocated'] / MIB:,.0f} | {row['error_percent']:+.1f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", action="store_true", help="compare with a fake process group, also if there is a GPU")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    cases = [SMOKE_CASE] if args.smoke else CASES
    if torch.cuda.is_available() and not args.fake:
        rows = [measure_gpu(case) for case in cases]
        sections = [format_section("One GPU", "", rows, device_name())]
    else:
        rows = [measure_on_fake_tensors(case) for case in cases]
        sections = [format_section("One GPU, on fake tensors", " --fake", rows, "fake tensors")]
        config, ranks = (SMOKE_CASE.config, 8) if args.smoke else (mb.preset("llama2-70b"), RANKS)
        group_rows = measure_fake(config, ranks, SMOKE_CASE.length if args.smoke else 4096)
        title = f"{'a toy' if args.smoke else 'llama2-70b'}, fsdp+tp on {ranks} ranks"
        sections.append(format_section(title, " --fake", group_rows, "rank 0 of a fake process group"))
        rows += group_rows
    print(json.dumps(rows, indent=2) if args.json else "\n\n".join(f"## {section}" for section in sections))
    if args.write and not args.smoke:
        for section in sections:
            write_section(RESULTS, "Planned and allocated memory", section)


if __name__ == "__main__":
    main()
