"""`monoblock account`: count the parameters, FLOPs and memory of a model from its configuration alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from monoblock.accounting.memory import DTYPE_BITS, OPTIMIZER_STATES
from monoblock.accounting.parallel import GPUS_PER_NODE, STRATEGIES, plan_ranks
from monoblock.accounting.training_plan import (
    INTER_BANDWIDTH,
    INTRA_BANDWIDTH,
    PIPELINE_MICRO_BATCHES,
    Hardware,
    list_assumptions,
    plan_training,
)
from monoblock.cli.output import echo, format_bytes, format_count, print_table, report
from monoblock.cli.verb import Count, argument, json_option, option
from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.parts import CheckpointMode
from monoblock.errors import ConfigError, InputError
from monoblock.interop.model_folder import read_any_config
from monoblock.runs.account import account, is_recipe

if TYPE_CHECKING:
    from monoblock.accounting import report as accounting

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
WITH_STRATEGY = {"needs": ("strategy",)}
ABOVE_ZERO = {"least": 0, "is_open": (True, False)}
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
PLAN_ROWS = ("weights", "gradients", "optimizer", "weight_copies", "gathered_layers", "activations", "loss")
PLAN_TIMES = (  # name, JSON key and format
    ("compute", "compute_seconds", "{:.3g} s"),
    ("communication", "transfer_seconds", "{:.3g} s"),
    ("of it not overlapped", "exposed_seconds", "{:.3g} s"),
    ("pipeline bubble", "bubble", "{:.1%}"),
    ("step", "step_seconds", "{:.3g} s"),
    ("MFU", "mfu", "{:.1%}"),
    ("tokens per second", "tokens_per_second", "{:,.0f}"),
    ("GPU hours", "gpu_hours", "{:,.0f}"),
    ("days", "days", "{:,.1f}"),
    ("cost", "cost", "{:,.0f}"),
)
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "attention_matrices", "total")
FLOP_TOTALS = ("forward", "forward_needed", "backward", "training", "training_checkpointed")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Count the parameters, FLOPs and memory of WHAT: a preset from `monoblock ls presets`, a recipe, a model folder, a
    config.json or a GGUF file.

    Arguments of the form key=value change the configuration first, as in depth=24, and those of a recipe its keys, as
    in model.depth=24.
    """

    what: str = argument()
    overrides: tuple[str, ...] = argument((), metavar="[key=value …]")
    batch: int = option("Sequences per pass on each GPU.", 1, least=1)
    length: int | None = option(
        "Tokens per sequence; for an encoder-decoder, source tokens.  [default: the context length]", least=1
    )
    target_length: int | None = option(
        "Target tokens per sequence, for an encoder-decoder.  [default: as many as source tokens]", least=1
    )
    dtype: str = option("Dtype of the weights.", "bf16", choices=tuple(DTYPE_BITS))
    optimizer: str = option(
        "Optimizer whose state is counted in the training memory.", "adamw", choices=tuple(OPTIMIZER_STATES)
    )
    gpus: int = option("Shard the training state over this many GPUs, or train on them as --strategy says.", 1, least=1)
    strategy: str | None = option(
        "Also plan the training on --gpus GPUs: memory, communication and time of a step on each.",
        choices=tuple(STRATEGIES),
    )
    tensor: int | None = option(
        "ranks that split every layer.  [default: all GPUs; with fsdp+tp those of a node]", least=1, **WITH_STRATEGY
    )
    pipeline: int | None = option("pipeline stages.  [default: as many as GPUs]", least=1, **WITH_STRATEGY)
    micro_batches: int | None = option(
        f"passes per step.  [default: 1; of a pipeline {PIPELINE_MICRO_BATCHES} a stage]", least=1, **WITH_STRATEGY
    )
    gpus_per_node: int = option("GPUs of a machine.", least=1, otherwise=GPUS_PER_NODE, **WITH_STRATEGY)
    intra_gbps: float = option(
        "bandwidth of a GPU within a machine, in GB/s, by default that of NVLink of an H100.",
        otherwise=INTRA_BANDWIDTH / 1e9,
        **ABOVE_ZERO,
        **WITH_STRATEGY,
    )
    inter_gbps: float = option(
        "bandwidth of a GPU between machines, in GB/s.", otherwise=INTER_BANDWIDTH / 1e9, **ABOVE_ZERO, **WITH_STRATEGY
    )
    gpu_memory: float = option("memory of a GPU, in GB.", otherwise=80, **ABOVE_ZERO, **WITH_STRATEGY)
    tokens: int | None = option("Also report the time to train on this many tokens, as in 2e12.", kind=Count())
    peak_tflops: float = option(
        "peak speed of one GPU in TFLOP/s, by default that of an H100 with dense bf16.",
        needs=("tokens", "strategy"),
        otherwise=989.0,
    )
    mfu: float = option(
        "model FLOPs utilization, from 0 to 1; with --strategy that of the computation alone.",
        needs=("tokens", "strategy"),
        otherwise=0.4,
    )
    price: float | None = option("price of a GPU hour, to report the cost too.", least=0, needs=("tokens",))
    new: int | None = option("Also report the cost of generating this many tokens.", least=1)
    prompt: int = option("tokens in the prompt.", least=1, needs=("new",), otherwise=1)
    beams: int = option("number of beams.", least=1, needs=("new",), otherwise=1)
    measure: bool = option("Also build the model and time each component in a forward pass.", False)
    as_json: bool = json_option()

    def run(self) -> None:
        is_changed = self.overrides and not is_recipe(self.what)  # a recipe's keys change before its model is built
        source = apply_overrides(read_any_config(self.what), self.overrides) if is_changed else self.what
        name = " ".join([self.what, *self.overrides])
        costs = account(source, name=name, overrides=() if is_changed else self.overrides)
        try:
            result = self._build_report(costs)
        except InputError as problem:  # sizes from the command line that do not fit this model
            raise click.UsageError(str(problem)) from None
        tokens = TOKENS_PER_PARAMETER * costs.active_parameters
        next_command = f"account {costs.name} --tokens {tokens}" if self.tokens is None else "ls presets"
        report(self.as_json, result, lambda result: print_account(costs, result), next_command)

    def _build_report(self, costs: accounting.Account) -> dict[str, Any]:
        """Return the report that --json prints: `Account.to_dict`, and what further options add to it."""
        sizes: dict[str, Any] = {"batch": self.batch, "length": self.length, "target_length": self.target_length}
        is_lstm = isinstance(costs.config, RecurrentConfig)
        result: dict[str, Any] = costs.to_dict(**sizes, optimizer=self.optimizer, dtype=self.dtype, gpus=self.gpus)
        if self.tokens:
            training: dict[str, Any] = {"gpus": self.gpus, "peak": 1e12 * self.peak_tflops, "mfu": self.mfu}
            training |= {"price": self.price, "length": self.length, "target_length": self.target_length}
            result["budget"] = asdict(costs.budget(self.tokens, **training))
        if self.strategy:
            result["plan"] = self._build_plan(costs, sizes)
        elif self.gpus == 1 and not is_lstm:  # the peak of one step on one GPU
            modes: dict[str, CheckpointMode] = {"kept": False, "selective": "selective", "checkpointed": True}
            result["memory"]["peak"] = {
                name: costs.plan(**sizes, optimizer=self.optimizer, checkpointing=mode).memory.peak
                for name, mode in modes.items()
            }
        if self.new:
            shape: dict[str, Any] = {"prompt": self.prompt, "new": self.new, "batch": self.batch, "dtype": self.dtype}
            shape["source"] = self.length if costs.family == "encoder-decoder" else None
            result["decoding"] = {
                f"{f'{beams} beams' if beams > 1 else 'greedy'}, {'cache' if cached else 'no cache'}": asdict(
                    costs.decoding(**shape, beams=beams, cached=cached)
                )
                for beams in sorted({1, self.beams})
                for cached in (True, False)
            }
        if self.measure:
            result["measured"] = _measure_components(costs, sizes)
        return result

    def _build_plan(self, costs: accounting.Account, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return the plan of the training as JSON values, for every mode of checkpointing."""
        config, strategy = costs.config, self.strategy
        assert strategy is not None
        if isinstance(config, RecurrentConfig):
            raise ConfigError("--strategy plans the training of Transformers, but this model is an LSTM; leave it out")
        hardware = Hardware(
            peak=1e12 * self.peak_tflops,
            utilization=self.mfu,
            gpus_per_node=self.gpus_per_node,
            intra_bandwidth=1e9 * self.intra_gbps,
            inter_bandwidth=1e9 * self.inter_gbps,
            memory=int(1e9 * self.gpu_memory),
        )
        ranks: dict[str, Any] = {"tensor": self.tensor, "pipeline": self.pipeline, "gpus_per_node": self.gpus_per_node}
        parallel = plan_ranks(config, strategy, self.gpus, **ranks)
        options = sizes | {"micro_batches": self.micro_batches, "optimizer": self.optimizer, "hardware": hardware}
        modes = {}
        for mode, (checkpointing, _) in PLAN_MODES.items():
            plan = plan_training(config, parallel, **options, checkpointing=checkpointing)
            modes[mode] = plan.to_dict()
            if self.tokens:
                hours = plan.gpu_hours(self.tokens)
                modes[mode] |= {"gpu_hours": hours, "days": hours / 24 / parallel.size}
                modes[mode] |= {} if self.price is None else {"cost": hours * self.price}
        return {
            "strategy": strategy,
            "parallel": asdict(parallel),
            "hardware": asdict(hardware),
            "assumptions": list_assumptions(config, parallel, hardware),
            "modes": modes,
        }


def apply_overrides(config: ModelConfig | RecurrentConfig, overrides: tuple[str, ...]) -> ModelConfig | RecurrentConfig:
    """Return the configuration with `key=value` arguments applied."""
    if not overrides:
        return config
    if isinstance(config, RecurrentConfig):
        raise ConfigError(f"the override {overrides[0]!r} is for Transformers, but this model is an LSTM; leave it out")
    knobs = {}
    for word in overrides:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not an override; write name=value, as in depth=24")
        try:
            knobs[name] = json.loads(value)
        except ValueError:
            knobs[name] = value
    return vary(config, **knobs)


def _measure_components(costs: accounting.Account, sizes: dict[str, Any]) -> dict[str, Any]:
    """Build the model with random weights and profile a forward pass; return the device and the cost by component."""
    import torch

    from monoblock.config.model import EmbeddingConfig, PatchConfig
    from monoblock.inspection.profile import profile
    from monoblock.model import Transformer

    config = costs.config
    if isinstance(config, RecurrentConfig):
        raise ConfigError("--measure profiles only Transformers, but this model is an LSTM; leave out --measure")
    shape, given = costs.flops(**sizes).shape, config.input
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Transformer(config)
        if isinstance(given, PatchConfig):
            inputs = [torch.zeros(shape.batch, given.channels, given.image, given.image)]
        elif isinstance(given, EmbeddingConfig):
            lengths = (shape.source, shape.target) if costs.family == "encoder-decoder" else (shape.source,)
            inputs = [torch.randint(given.vocab, (shape.batch, length)) for length in lengths]
        else:
            raise ConfigError(
                "--measure profiles models that read tokens or images, but this one reads neither; leave it out"
            )
    return {"device": str(device), "parts": {name: asdict(cost) for name, cost in profile(model, *inputs).items()}}


# -- printing ----------------------------------------------------------------------------------------------------------


def print_shares(column: str, components: dict[str, int]) -> None:
    """Print a table with the name, the count, the share and a bar of each component; `column` heads the counts."""
    total, rows = sum(components.values()) or 1, []
    for name, count in components.items():
        eighths = round(8 * BAR_WIDTH * count / total)
        bar = "█" * (eighths // 8) + BAR_EIGHTHS[eighths % 8].strip()
        rows.append((name, count, f"{count / total:6.1%}", bar))
    print_table(("component", column, "share", ""), [*rows, ("total", total, "", "")])


def print_account(costs: accounting.Account, report: dict[str, Any]) -> None:
    experts = ""
    if costs.active_parameters != costs.parameters:
        experts = f", {costs.active_parameters:,} of them active per token"
    echo(f"{costs.name}: {costs.family}, {costs.parameters:,} parameters{experts}\n")
    print_shares("parameters", report["components"])
    if costs.not_covered:
        echo(
            f"\nThe configuration does not describe {', '.join(costs.not_covered)}: these parameters are counted as "
            "they are there, but the FLOPs and the memory below leave them out."
        )
    flops, memory, plan = report["flops"], report["memory"], report.get("plan")
    length = f"{flops['source']} tokens"
    if costs.family == "encoder-decoder":
        length = f"{flops['source']} source and {flops['target']} target tokens"
    echo(f"\nFLOPs of one pass, batch {flops['batch']}, {length}")
    print_shares("forward", flops["components"])
    echo()
    totals = [(name.replace("_", " "), flops[name], format_count(flops[name])) for name in FLOP_TOTALS]
    print_table(("pass", "FLOPs", ""), totals)
    if plan is None:
        gpus = f", on each of {memory['gpus']} GPUs" if memory["gpus"] > 1 else ""
        echo(f"\nTraining memory, {memory['trained_in']}, {memory['optimizer']}, batch {flops['batch']}{gpus}")
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
    if "decoding" in report:
        echo()
        costs_of = report["decoding"].items()
        cells = [(key, c["positions"], format_count(c["flops"]), format_bytes(c["bytes_moved"])) for key, c in costs_of]
        print_table(("decoding", "positions", "FLOPs", "bytes moved"), cells)
    if "measured" in report:
        _print_measured(report["measured"])
    if "budget" in report:
        budget = report["budget"]
        echo(
            f"\nTraining on {format_count(budget['tokens'])} tokens: {budget['flops']:.3g} FLOPs "
            f"(6 × parameters × tokens: {budget['rule_of_six']:.3g}), "
            f"{budget['gpu_hours']:,.4g} GPU hours, {budget['days']:.3g} days"
            + ("" if budget["cost"] is None else f", cost {budget['cost']:,.0f}")
            + ("" if plan is None else " without communication and recomputation")
        )
    if plan is not None:
        print_plan(plan, flops["batch"])


def _print_measured(measured: dict[str, Any]) -> None:
    total, rows = measured["parts"]["total"]["seconds"], []
    for name, cost in measured["parts"].items():
        time, share = f"{1e3 * cost['seconds']:.2f} ms", f"{cost['seconds'] / total:6.1%}"
        rows.append((name, time, share, format_bytes(cost["kept_bytes"])))
    echo(f"\nMeasured on {measured['device']}, fp32, one forward pass")
    print_table(("component", "time", "share", "kept for backward"), rows)


def print_plan(plan: dict[str, Any], batch: int) -> None:
    """Print the plan of a training as tables, and its assumptions."""
    modes = [plan["modes"][mode] for mode in PLAN_MODES]
    headings = [heading for _, heading in PLAN_MODES.values()]
    sizes = " × ".join(f"{name} {size}" for name, size in plan["parallel"].items() if size > 1)
    first = modes[0]
    echo(
        f"\nPlan {plan['strategy']}: {sizes or 'one GPU'}; {first['micro_batches']} × {batch} sequences a rank, "
        f"{format_count(first['tokens_per_step'])} tokens a step"
    )
    rows = [
        (name.replace("_", " "), *(format_bytes(mode["memory"][name]) for mode in modes))
        for name in (*PLAN_ROWS, "peak")
        if name == "peak" or any(mode["memory"][name] for mode in modes)
    ]
    rows.append(("reached at", *(mode["memory"]["peak_at"] for mode in modes)))
    capacity = f"fits in {plan['hardware']['memory'] / 1e9:g} GB"
    rows.append((capacity, *("yes" if mode["fits"] else "no" for mode in modes)))
    print_table(("memory of a rank", *headings), rows)
    if first["transfers"]:
        transfers = [
            (
                f"{one[0]['dimension']}: {one[0]['operation']}",
                *(format_bytes(transfer["bytes"]) for transfer in one),
                "the network" if one[0]["between_nodes"] else "NVLink",
            )
            for one in zip(*(mode["transfers"] for mode in modes), strict=True)
        ]
        echo()
        print_table(("a rank sends in a step", *headings, "over"), transfers)
    echo()
    times = [(name, *(text.format(mode[key]) for mode in modes)) for name, key, text in PLAN_TIMES if key in first]
    print_table(("time of a step", *headings), times)
    echo("\nThe plan assumes:")
    for line in plan["assumptions"]:
        echo(f"- {line}")
