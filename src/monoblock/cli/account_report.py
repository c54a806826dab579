"""Print the report of `monoblock account`: tables of parameters, FLOPs and memory, with a bar for each share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monoblock.cli.output import echo, format_bytes, format_count, print_table
from monoblock.config.parts import CheckpointMode

if TYPE_CHECKING:
    from monoblock.accounting.report import Account

BAR_WIDTH = 24  # characters of a full bar
BAR_EIGHTHS = " ▏▎▍▌▋▊▉"
MEMORY_MODES = {  # JSON key -> heading
    "fused": "fused",
    "fused_selective": "fused, selective",
    "fused_checkpointed": "fused, checkpointed",
    "plain": "plain attention",
    "plain_selective": "plain, selective",
    "plain_checkpointed": "plain, checkpointed",
}
CHECKPOINTING_NOTE = (
    "checkpointed: training keeps the input of each block, and recomputes the rest\n"
    "selective: it also keeps the outputs of matrix products and attention"
)
PLAN_MODES: dict[str, tuple[CheckpointMode, str]] = {  # JSON key -> (mode of checkpointing, heading)
    "plain": (False, "without checkpointing"),
    "selective": ("selective", "selective checkpointing"),
    "checkpointed": (True, "full checkpointing"),
}
PLAN_HEADINGS = tuple(heading for _, heading in PLAN_MODES.values())
PLAN_ROWS = ("weights", "gradients", "optimizer", "weight_copies", "gathered_layers", "activations", "loss")
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "attention_matrices", "total")
FLOP_TOTALS = ("forward", "forward_needed", "backward", "training", "training_checkpointed")


def format_bar(share: float) -> str:
    """Return a bar of block characters; share=1 gives BAR_WIDTH of them, and the last can be an eighth of a block."""
    eighths = round(8 * BAR_WIDTH * share)
    return "█" * (eighths // 8) + BAR_EIGHTHS[eighths % 8].strip() if eighths > 0 else ""


def print_shares(column: str, components: dict[str, int]) -> None:
    """Print a table with the name, the count and the share of each component; the heading of the counts is `column`."""
    total = sum(components.values()) or 1
    rows = [(name, count, f"{count / total:6.1%}", format_bar(count / total)) for name, count in components.items()]
    print_table(("component", column, "share", ""), [*rows, ("total", total, "", "")])


def print_account(model_account: Account, report: dict[str, Any]) -> None:
    experts = ""
    if model_account.active_parameters != model_account.parameters:
        experts = f", {model_account.active_parameters:,} of them active per token"
    echo(f"{model_account.name}: {model_account.family}, {model_account.parameters:,} parameters{experts}\n")
    print_shares("parameters", report["components"])
    if model_account.not_covered:
        echo(
            f"\nThe configuration does not describe {', '.join(model_account.not_covered)}: these parameters are "
            "counted as they are there, but the FLOPs and the memory below leave them out."
        )
    flops = report["flops"]
    length = f"{flops['source']} tokens"
    if model_account.family == "encoder-decoder":
        length = f"{flops['source']} source and {flops['target']} target tokens"
    echo(f"\nFLOPs of one pass, batch {flops['batch']}, {length}")
    print_shares("forward", flops["components"])
    echo()
    print_table(
        ("pass", "FLOPs", ""),
        [(name.replace("_", " "), flops[name], format_count(flops[name])) for name in FLOP_TOTALS],
    )
    _print_memory(report)
    _print_extras(report)


def _print_memory(report: dict[str, Any]) -> None:
    memory, batch = report["memory"], report["flops"]["batch"]
    if "plan" not in report:
        gpus = f", on each of {memory['gpus']} GPUs" if memory["gpus"] > 1 else ""
        echo(f"\nTraining memory, {memory['trained_in']}, {memory['optimizer']}, batch {batch}{gpus}")
        rows = [
            (part.replace("_", " "), *(format_bytes(memory["training"][mode][part]) for mode in MEMORY_MODES))
            for part in MEMORY_PARTS
        ]
        print_table(("part", *MEMORY_MODES.values()), rows)
        echo(CHECKPOINTING_NOTE)
    if "peak" in memory:
        peak = {mode: format_bytes(count) for mode, count in memory["peak"].items()}
        echo(
            f"\nPeak of a step of `monoblock train` on one GPU: {peak['kept']}, selective {peak['selective']}, "
            f"checkpointed {peak['checkpointed']}\n"
            "There, weights are in fp32 and products in bf16, and most losses store no logits; the table counts the "
            "tensors of the formulas."
        )
    echo(f"\nInference: weights in {memory['dtype']} {format_bytes(memory['weights'])}, ", nl=False)
    echo(f"key/value cache in {memory['trained_in']} {format_bytes(report['kv_cache_bytes'])}")


def _print_extras(report: dict[str, Any]) -> None:
    if "decoding" in report:
        rows = [
            (mode, cost["positions"], format_count(cost["flops"]), format_bytes(cost["bytes_moved"]))
            for mode, cost in report["decoding"].items()
        ]
        echo()
        print_table(("decoding", "positions", "FLOPs", "bytes moved"), rows)
    if "measured" in report:
        costs = report["measured"]["parts"]
        total = costs["total"]["seconds"]
        echo(f"\nMeasured on {report['measured']['device']}, fp32, one forward pass")
        rows = []
        for name, cost in costs.items():
            time, share = f"{1e3 * cost['seconds']:.2f} ms", f"{cost['seconds'] / total:6.1%}"
            rows.append((name, time, share, format_bytes(cost["kept_bytes"])))
        print_table(("component", "time", "share", "kept for backward"), rows)
    if "budget" in report:
        budget = report["budget"]
        echo(f"\nTraining on {format_count(budget['tokens'])} tokens: {budget['flops']:.3g} FLOPs ", nl=False)
        echo(
            f"(6 × parameters × tokens: {budget['rule_of_six']:.3g}), "
            f"{budget['gpu_hours']:,.4g} GPU hours, {budget['days']:.3g} days"
            + ("" if budget["cost"] is None else f", cost {budget['cost']:,.0f}")
            + (" without communication and recomputation" if "plan" in report else "")
        )
    if "plan" in report:
        print_plan(report)


# -- the plan of the training ----------------------------------------------------------------------------------------


def print_plan(report: dict[str, Any]) -> None:
    """Print the plan as tables, and its assumptions."""
    plan = report["plan"]
    modes = [plan["modes"][mode] for mode in PLAN_MODES]
    sizes = " × ".join(f"{name} {size}" for name, size in plan["parallel"].items() if size > 1)
    first = modes[0]
    echo(
        f"\nPlan {plan['strategy']}: {sizes or 'one GPU'}; {first['micro_batches']} × {report['flops']['batch']} "
        f"sequences a rank, {format_count(first['tokens_per_step'])} tokens a step"
    )
    rows = [
        (name.replace("_", " "), *(format_bytes(mode["memory"][name]) for mode in modes))
        for name in PLAN_ROWS
        if any(mode["memory"][name] for mode in modes)
    ]
    rows.append(("peak", *(format_bytes(mode["memory"]["peak"]) for mode in modes)))
    rows.append(("reached at", *(mode["memory"]["peak_at"] for mode in modes)))
    capacity = f"fits in {plan['hardware']['memory'] / 1e9:g} GB"
    rows.append((capacity, *("yes" if mode["fits"] else "no" for mode in modes)))
    print_table(("memory of a rank", *PLAN_HEADINGS), rows)
    if first["transfers"]:
        echo()
        print_table(("a rank sends in a step", *PLAN_HEADINGS, "over"), _transfer_rows(modes))
    echo()
    print_table(("time of a step", *PLAN_HEADINGS), _time_rows(modes))
    echo("\nThe plan assumes:")
    for line in plan["assumptions"]:
        echo(f"- {line}")


def _transfer_rows(modes: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (
            f"{pair[0]['dimension']}: {pair[0]['operation']}",
            *(format_bytes(transfer["bytes"]) for transfer in pair),
            "the network" if pair[0]["between_nodes"] else "NVLink",
        )
        for pair in zip(*(mode["transfers"] for mode in modes), strict=True)
    ]


def _time_rows(modes: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("compute", lambda mode: f"{mode['compute_seconds']:.3g} s"),
        ("communication", lambda mode: f"{mode['transfer_seconds']:.3g} s"),
        ("of it not overlapped", lambda mode: f"{mode['exposed_seconds']:.3g} s"),
        ("pipeline bubble", lambda mode: f"{mode['bubble']:.1%}"),
        ("step", lambda mode: f"{mode['step_seconds']:.3g} s"),
        ("MFU", lambda mode: f"{mode['mfu']:.1%}"),
        ("tokens per second", lambda mode: f"{mode['tokens_per_second']:,.0f}"),
    ]
    if "gpu_hours" in modes[0]:
        lines.append(("GPU hours", lambda mode: f"{mode['gpu_hours']:,.0f}"))
        lines.append(("days", lambda mode: f"{mode['days']:,.1f}"))
    if "cost" in modes[0]:
        lines.append(("cost", lambda mode: f"{mode['cost']:,.0f}"))
    return [(name, *(value(mode) for mode in modes)) for name, value in lines]
