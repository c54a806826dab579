"""`monoblock account`: count the parameters, FLOPs and memory of a model from its configuration alone."""

import json
from dataclasses import asdict
from typing import Any

import click

from monoblock.accounting.memory import DTYPE_BITS, OPTIMIZER_STATES
from monoblock.accounting.report import Account
from monoblock.cli._shared.account_report import print_account
from monoblock.cli._shared.number_types import NumberRange
from monoblock.cli._shared.output import json_option, print_json, suggest_next
from monoblock.cli._shared.plan_options import COUNT, PLAN_OPTIONS, build_plan, plan_options
from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.parts import CheckpointMode
from monoblock.errors import ConfigError, InputError
from monoblock.interop.config_file import read_any_config
from monoblock.runs.account import account, is_recipe

# Option -> (the options without any of which it has no effect, its default value).
DEPENDENT_OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "peak_tflops": (("tokens", "strategy"), 989.0),
    "mfu": (("tokens", "strategy"), 0.4),
    "price": (("tokens",), None),
    "prompt": (("new",), 1),
    "beams": (("new",), 1),
    **PLAN_OPTIONS,
}
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022


# -- configuration ---------------------------------------------------------------------------------------------------


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


# -- report ----------------------------------------------------------------------------------------------------------


def build_report(model_account: Account, options: dict[str, Any]) -> dict[str, Any]:
    """Return the report that --json prints: `Account.to_dict`, and what further options add to it."""
    sizes = {key: options[key] for key in ("batch", "length", "target_length")}
    report: dict[str, Any] = model_account.to_dict(
        **sizes, dtype=options["dtype"], optimizer=options["optimizer"], gpus=options["gpus"]
    )
    if options["tokens"]:
        lengths = {key: options[key] for key in ("length", "target_length", "gpus", "mfu", "price")}
        budget = model_account.budget(options["tokens"], peak=1e12 * options["peak_tflops"], **lengths)
        report["budget"] = asdict(budget)
    if options["strategy"]:
        report["plan"] = build_plan(model_account, options)
    elif options["gpus"] == 1 and not isinstance(model_account.config, RecurrentConfig):
        report["memory"]["peak"] = _peak_memory(model_account, options)
    if options["new"]:
        report["decoding"] = _decoding_costs(model_account, options)
    if options["measure"]:
        report["measured"] = _measure_components(model_account, options)
    return report


def _peak_memory(model_account: Account, options: dict[str, Any]) -> dict[str, int]:
    """Return the largest memory of a step of `monoblock train` on one GPU, by how activations are kept."""
    sizes = {key: options[key] for key in ("batch", "length", "target_length", "optimizer")}
    modes: dict[str, CheckpointMode] = {"kept": False, "selective": "selective", "checkpointed": True}
    return {name: model_account.plan(**sizes, checkpointing=mode).memory.peak for name, mode in modes.items()}


def _measure_components(model_account: Account, options: dict[str, Any]) -> dict[str, Any]:
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


def _decoding_costs(model_account: Account, options: dict[str, Any]) -> dict[str, Any]:
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


# -- command ---------------------------------------------------------------------------------------------------------

POSITIVE_INT = click.IntRange(min=1)


def fill_dependent_options(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of DEPENDENT_OPTIONS; raise UsageError for an option without the one it depends on."""
    for name, (needed, default) in DEPENDENT_OPTIONS.items():
        if options[name] is not None and all(options[other] is None for other in needed):
            flag, others = f"--{name.replace('_', '-')}", " or ".join(f"--{other}" for other in needed)
            raise click.UsageError(f"{flag} {options[name]} has no effect without {others}; give both or neither")
        options = options | {name: default if options[name] is None else options[name]}
    return options


@click.command(
    name="account",
    help="Count the parameters, FLOPs and memory of WHAT: a preset from `monoblock ls presets`, a recipe, a "
    "model folder, a config.json or a GGUF file.\n\nArguments of the form key=value change the configuration first, as "
    "in depth=24, and those of a recipe its keys, as in model.depth=24.",
)
@click.argument("what")
@click.argument("overrides", nargs=-1, metavar="[key=value …]")
@click.option("--batch", type=POSITIVE_INT, default=1, show_default=True, help="Sequences per pass on each GPU.")
@click.option(
    "--length",
    type=POSITIVE_INT,
    help="Tokens per sequence; for an encoder-decoder, source tokens.  [default: the context length]",
)
@click.option(
    "--target-length",
    type=POSITIVE_INT,
    help="Target tokens per sequence, for an encoder-decoder.  [default: as many as source tokens]",
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPE_BITS)), default="bf16", show_default=True, help="Dtype of the weights."
)
@click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMIZER_STATES)),
    default="adamw",
    show_default=True,
    help="Optimizer whose state is counted in the training memory.",
)
@click.option(
    "--gpus",
    type=POSITIVE_INT,
    default=1,
    show_default=True,
    help="Shard the training state over this many GPUs, or train on them as --strategy says.",
)
@plan_options
@click.option("--tokens", type=COUNT, help="Also report the time to train on this many tokens, as in 2e12.")
@click.option(
    "--peak-tflops",
    type=float,
    help="With --tokens or --strategy: peak speed of one GPU in TFLOP/s.  [default: 989, an H100 with dense bf16]",
)
@click.option(
    "--mfu",
    type=float,
    help="With --tokens: model FLOPs utilization, from 0 to 1; with --strategy: that of the computation alone.  "
    "[default: 0.4]",
)
@click.option("--price", type=NumberRange(min=0), help="With --tokens: price of a GPU hour, to report the cost too.")
@click.option("--new", type=POSITIVE_INT, help="Also report the cost of generating this many tokens.")
@click.option("--prompt", type=POSITIVE_INT, help="With --new: tokens in the prompt.  [default: 1]")
@click.option("--beams", type=POSITIVE_INT, help="With --new: number of beams.  [default: 1]")
@click.option("--measure", is_flag=True, help="Also build the model and time each component in a forward pass.")
@json_option
def command(what: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    options = fill_dependent_options(options)
    is_changed = overrides and not is_recipe(what)  # the keys of a recipe are changed before its model is built
    source = apply_overrides(read_any_config(what), overrides) if is_changed else what
    model_account = account(source, name=" ".join([what, *overrides]), overrides=() if is_changed else overrides)
    try:
        report = build_report(model_account, options)
    except InputError as problem:  # sizes from the command line that do not fit this model
        raise click.UsageError(str(problem)) from None
    if as_json:
        print_json(report)
        return
    print_account(model_account, report)
    if options["tokens"] is None:
        suggest_next(f"account {model_account.name} --tokens {TOKENS_PER_PARAMETER * model_account.active_parameters}")
    else:
        suggest_next("ls presets")
