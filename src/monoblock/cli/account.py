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
from monoblock.cli.account_report import PLAN_MODES, print_account
from monoblock.cli.output import report
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
        model_account = account(source, name=name, overrides=() if is_changed else self.overrides)
        try:
            result = build_report(model_account, asdict(self))
        except InputError as problem:  # sizes from the command line that do not fit this model
            raise click.UsageError(str(problem)) from None
        tokens = TOKENS_PER_PARAMETER * model_account.active_parameters
        report(
            self.as_json,
            result,
            lambda result: print_account(model_account, result),
            f"account {model_account.name} --tokens {tokens}" if self.tokens is None else "ls presets",
        )


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


def build_report(model_account: accounting.Account, options: dict[str, Any]) -> dict[str, Any]:
    """Return the report that --json prints: `Account.to_dict`, and what further options add to it."""
    sizes = {key: options[key] for key in ("batch", "length", "target_length")}
    optimizer = {"optimizer": options["optimizer"]}
    report: dict[str, Any] = model_account.to_dict(**sizes, **optimizer, dtype=options["dtype"], gpus=options["gpus"])
    if options["tokens"]:
        lengths = {key: options[key] for key in ("length", "target_length", "gpus", "mfu", "price")}
        budget = model_account.budget(options["tokens"], peak=1e12 * options["peak_tflops"], **lengths)
        report["budget"] = asdict(budget)
    if options["strategy"]:
        report["plan"] = build_plan(model_account, options)
    elif options["gpus"] == 1 and not isinstance(model_account.config, RecurrentConfig):
        modes: dict[str, CheckpointMode] = {"kept": False, "selective": "selective", "checkpointed": True}
        plans = {name: model_account.plan(**sizes, **optimizer, checkpointing=mode) for name, mode in modes.items()}
        report["memory"]["peak"] = {name: plan.memory.peak for name, plan in plans.items()}  # of one step on one GPU
    if options["new"]:
        report["decoding"] = _decoding_costs(model_account, options)
    if options["measure"]:
        report["measured"] = _measure_components(model_account, options)
    return report


def _measure_components(model_account: accounting.Account, options: dict[str, Any]) -> dict[str, Any]:
    """Build the model with random weights and profile a forward pass; return the device and the cost by component."""
    import torch

    from monoblock.config.model import EmbeddingConfig, PatchConfig
    from monoblock.inspection.profile import profile
    from monoblock.model import Transformer

    config = model_account.config
    if isinstance(config, RecurrentConfig):
        raise ConfigError("--measure profiles only Transformers, but this model is an LSTM; leave out --measure")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = model_account.flops(**{key: options[key] for key in ("batch", "length", "target_length")}).shape
    batch = shape.batch
    with device:
        model = Transformer(config)
        if isinstance(config.input, PatchConfig):
            inputs = [torch.zeros(batch, config.input.channels, config.input.image, config.input.image)]
        else:
            if not isinstance(config.input, EmbeddingConfig):
                raise ConfigError(
                    "--measure profiles models that read tokens or images, but this one reads neither; leave it out"
                )
            lengths = (shape.source, shape.target) if model_account.family == "encoder-decoder" else (shape.source,)
            inputs = [torch.randint(config.input.vocab, (batch, length)) for length in lengths]
    return {"device": str(device), "parts": {name: asdict(cost) for name, cost in profile(model, *inputs).items()}}


def _decoding_costs(model_account: accounting.Account, options: dict[str, Any]) -> dict[str, Any]:
    common = {"prompt": options["prompt"], "new": options["new"], "batch": options["batch"], "dtype": options["dtype"]}
    source = options["length"] if model_account.family == "encoder-decoder" else None
    beams = (1, options["beams"]) if options["beams"] > 1 else (1,)
    return {
        f"{f'{count} beams' if count > 1 else 'greedy'}, {'cache' if cached else 'no cache'}": asdict(
            model_account.decoding(**common, beams=count, cached=cached, source=source)
        )
        for count in beams
        for cached in (True, False)
    }


def build_plan(model_account: accounting.Account, options: dict[str, Any]) -> dict[str, Any]:
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
    for mode, (checkpointing, _) in PLAN_MODES.items():
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
