"""The options of `monoblock account` that plan a training run on many GPUs, and the report of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from monoblock.accounting.parallel import GPUS_PER_NODE, STRATEGIES, plan_ranks
from monoblock.accounting.training_plan import (
    INTER_BANDWIDTH,
    INTRA_BANDWIDTH,
    PIPELINE_MICRO_BATCHES,
    Hardware,
    list_assumptions,
    plan_training,
)
from monoblock.cli._shared.number_types import NumberRange
from monoblock.cli._shared.output import echo, format_bytes, format_count, print_table
from monoblock.config.model import RecurrentConfig
from monoblock.config.parts import CheckpointMode
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.accounting.report import Account

DEFAULT_MEMORY = 80  # GB of an H100
MODES: dict[str, tuple[CheckpointMode, str]] = {  # JSON key -> (mode of checkpointing, heading)
    "plain": (False, "without checkpointing"),
    "selective": ("selective", "selective checkpointing"),
    "checkpointed": (True, "full checkpointing"),
}
HEADINGS = tuple(heading for _, heading in MODES.values())
MEMORY_ROWS = ("weights", "gradients", "optimizer", "weight_copies", "gathered_layers", "activations", "loss")

# Option -> (the options without any of which it has no effect, its default value).
PLAN_OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "tensor": (("strategy",), None),
    "pipeline": (("strategy",), None),
    "micro_batches": (("strategy",), None),
    "gpus_per_node": (("strategy",), GPUS_PER_NODE),
    "intra_gbps": (("strategy",), INTRA_BANDWIDTH / 1e9),
    "inter_gbps": (("strategy",), INTER_BANDWIDTH / 1e9),
    "gpu_memory": (("strategy",), DEFAULT_MEMORY),
}


class Count(click.ParamType):
    """A positive whole number, also written like 2e12."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value) if str(value).isdecimal() else float(value)
        except ValueError:
            number = 0
        if number < 1 or number != number or number == float("inf") or number != int(number):
            self.fail(f"{value!r} is not a whole number of 1 or more; write one, as in 2e12", param, ctx)
        return int(number)


COUNT, POSITIVE = Count(), click.IntRange(min=1)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the plan to a command."""
    above_zero = NumberRange(min=0, min_open=True)
    options = [
        click.option(
            "--strategy",
            type=click.Choice(list(STRATEGIES)),
            help="Also plan the training on --gpus GPUs: memory, communication and time of a step on each.",
        ),
        click.option(
            "--tensor",
            type=POSITIVE,
            help="With --strategy: ranks that split every layer.  [default: all GPUs; with fsdp+tp those of a node]",
        ),
        click.option(
            "--pipeline",
            type=POSITIVE,
            help="With --strategy: pipeline stages.  [default: as many as GPUs]",
        ),
        click.option(
            "--micro-batches",
            type=POSITIVE,
            help=f"With --strategy: passes per step.  [default: 1; of a pipeline {PIPELINE_MICRO_BATCHES} a stage]",
        ),
        click.option("--gpus-per-node", type=POSITIVE, help="With --strategy: GPUs of a machine.  [default: 8]"),
        click.option(
            "--intra-gbps",
            type=above_zero,
            help="With --strategy: bandwidth of a GPU within a machine, in GB/s.  [default: 450, NVLink of an H100]",
        ),
        click.option(
            "--inter-gbps",
            type=above_zero,
            help="With --strategy: bandwidth of a GPU between machines, in GB/s.  [default: 50]",
        ),
        click.option("--gpu-memory", type=above_zero, help="With --strategy: memory of a GPU, in GB.  [default: 80]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def build_plan(model_account: Account, options: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as JSON values, for every mode of checkpointing."""
    config = model_account.config
    if isinstance(config, RecurrentConfig):
        raise ConfigError("--strategy plans the training of Transformers, but this model is an LSTM; leave it out")
    hardware = Hardware(
        peak=1e12 * options["peak_tflops"],
        utilization=options["mfu"],
        gpus_per_node=options["gpus_per_node"],
        intra_bandwidth=1e9 * options["intra_gbps"],
        inter_bandwidth=1e9 * options["inter_gbps"],
        memory=int(1e9 * options["gpu_memory"]),
    )
    sizes = {key: options[key] for key in ("tensor", "pipeline", "gpus_per_node")}
    parallel = plan_ranks(config, options["strategy"], options["gpus"], **sizes)
    shape = {key: options[key] for key in ("batch", "length", "target_length", "micro_batches", "optimizer")}
    modes = {}
    for mode, (checkpointing, _) in MODES.items():
        plan = plan_training(config, parallel, **shape, checkpointing=checkpointing, hardware=hardware)
        modes[mode] = plan.to_dict()
        if options["tokens"]:
            hours = plan.gpu_hours(options["tokens"])
            modes[mode] |= {"gpu_hours": hours, "days": hours / 24 / parallel.size}
            modes[mode] |= {} if options["price"] is None else {"cost": hours * options["price"]}
    return {
        "strategy": options["strategy"],
        "parallel": asdict(parallel),
        "hardware": asdict(hardware),
        "assumptions": list_assumptions(config, parallel, hardware),
        "modes": modes,
    }


# -- report ----------------------------------------------------------------------------------------------------------


def print_plan(report: dict[str, Any]) -> None:
    """Print the plan as tables, and its assumptions."""
    plan = report["plan"]
    modes = [plan["modes"][mode] for mode in MODES]
    sizes = " × ".join(f"{name} {size}" for name, size in plan["parallel"].items() if size > 1)
    first = modes[0]
    echo(
        f"\nPlan {plan['strategy']}: {sizes or 'one GPU'}; {first['micro_batches']} × {report['flops']['batch']} "
        f"sequences a rank, {format_count(first['tokens_per_step'])} tokens a step"
    )
    rows = [
        (name.replace("_", " "), *(format_bytes(mode["memory"][name]) for mode in modes))
        for name in MEMORY_ROWS
        if any(mode["memory"][name] for mode in modes)
    ]
    rows.append(("peak", *(format_bytes(mode["memory"]["peak"]) for mode in modes)))
    rows.append(("reached at", *(mode["memory"]["peak_at"] for mode in modes)))
    capacity = f"fits in {plan['hardware']['memory'] / 1e9:g} GB"
    rows.append((capacity, *("yes" if mode["fits"] else "no" for mode in modes)))
    print_table(("memory of a rank", *HEADINGS), rows)
    if first["transfers"]:
        echo()
        print_table(("a rank sends in a step", *HEADINGS, "over"), _transfer_rows(modes))
    echo()
    print_table(("time of a step", *HEADINGS), _time_rows(modes))
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
