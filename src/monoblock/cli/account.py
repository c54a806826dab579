"""`monoblock account`: parameters, FLOPs and memory of a model, from its configuration alone."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from monoblock.accounting.memory import BITS, STATES
from monoblock.accounting.report import Account, account
from monoblock.cli.common import as_json, human_bytes, human_count, next_verb, print_json, table
from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.knobs import vary
from monoblock.presets import PRESETS
from monoblock.schema import from_dict

BAR = 24  # columns of a full bar
EIGHTHS = " ▏▎▍▌▋▊▉"
WAYS = {  # key of the JSON -> heading
    "fused": "fused",
    "fused_checkpointed": "fused, checkpointed",
    "plain": "plain attention",
    "plain_checkpointed": "plain, checkpointed",
}
PARTS = ("weights", "gradients", "optimizer", "activations", "attention_matrices", "total")
TOTALS = ("forward", "forward_needed", "backward", "training", "training_checkpointed")


# -- what is accounted for -------------------------------------------------------------------------------------------


def find(what: str) -> ModelConfig | RecurrentConfig:
    """A preset by name, or the configuration in a file or folder."""
    if what in PRESETS:
        return PRESETS[what].config
    if not what:
        raise ConfigError("'' names nothing; give a preset, a config.json or a folder with one")
    path = Path(what)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise FileError(f"{what} holds no config.json; give a preset, a config.json or a folder with one")
    if not file.is_file():
        if path.name != what or path.suffix == ".json":  # meant as a path
            raise FileError(f"there is no file or folder {what}; give a preset, a config.json or a folder with one")
        return account(what).config  # no such preset: the error says which comes close
    if file.suffix == ".gguf":
        from monoblock.interop.gguf import gguf_config

        return gguf_config(file)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise FileError(f"{file} is not JSON: {problem}") from None
    if isinstance(data, dict) and "format" in data:  # a model folder's file says who wrote it
        data = data.get("model") if data["format"] == "monoblock" else None
    if isinstance(data, dict) and "model_type" in data:
        return _published(file)
    if not isinstance(data, dict):
        raise FileError(f"{file} describes no model of ours; give a configuration that monoblock wrote")
    recurrent = "vocab" in data  # a Transformer's vocabulary is its input's
    return from_dict(RecurrentConfig, data) if recurrent else ModelConfig.from_dict(data)


def _published(file: Path) -> ModelConfig:
    from monoblock.interop.hf import said_config
    from monoblock.untrusted import read_json

    try:
        return said_config(read_json(file))
    except (ConfigError, FileError) as problem:
        raise FileError(f"{file}: {problem}") from None


def changed(config: ModelConfig | RecurrentConfig, words: tuple[str, ...]) -> ModelConfig | RecurrentConfig:
    """The configuration with `key=value` words applied."""
    if not words:
        return config
    if isinstance(config, RecurrentConfig):
        raise ConfigError(f"{words[0]!r} changes a Transformer, but this is an LSTM; leave it out")
    knobs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no choice; write name=value, as in depth=24")
        try:
            knobs[name] = json.loads(value)
        except ValueError:
            knobs[name] = value
    return vary(config, **knobs)


def gather(found: Account, options: dict[str, Any]) -> dict[str, Any]:
    """The JSON: what `to_dict` gives, and where asked for the training budget and the decoding cost."""
    sizes = {key: options[key] for key in ("batch", "length", "target_length")}
    gathered = found.to_dict(**sizes, dtype=options["dtype"], optimizer=options["optimizer"], gpus=options["gpus"])
    if options["tokens"]:
        lengths = {key: options[key] for key in ("length", "target_length", "gpus", "mfu")}
        gathered["budget"] = asdict(found.budget(options["tokens"], peak=1e12 * options["peak_tflops"], **lengths))
    if options["new"]:
        gathered["decoding"] = _decoding(found, options)
    if options["measure"]:
        gathered["measured"] = _measured(found, options)
    return gathered


def _measured(found: Account, options: dict[str, Any]) -> dict[str, Any]:
    """The same model with random weights, timed on this machine."""
    import torch

    from monoblock.config import EmbeddingConfig, PatchConfig
    from monoblock.inspection.profile import profile
    from monoblock.model import Transformer

    config = found.config
    if isinstance(config, RecurrentConfig):
        raise ConfigError("--measure times a Transformer's components, but this is an LSTM; leave it out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = found.flops(**{key: options[key] for key in ("batch", "length", "target_length")}).size
    batch = sizes.batch
    with device:
        model = Transformer(config)
        if isinstance(config.input, PatchConfig):
            inputs = [torch.zeros(batch, config.input.channels, config.input.image, config.input.image)]
        else:
            if not isinstance(config.input, EmbeddingConfig):
                raise ConfigError("--measure times models that read words or images; leave it out")
            lengths = (sizes.source, sizes.target) if found.family == "encoder-decoder" else (sizes.source,)
            inputs = [torch.randint(config.input.vocab, (batch, length)) for length in lengths]
    return {"device": str(device), "parts": {name: asdict(part) for name, part in profile(model, *inputs).items()}}


def _decoding(found: Account, options: dict[str, Any]) -> dict[str, Any]:
    common = {"prompt": options["prompt"], "new": options["new"], "batch": options["batch"], "dtype": options["dtype"]}
    source = options["length"] if found.family == "encoder-decoder" else None
    beams = (1, options["beams"]) if options["beams"] > 1 else (1,)
    return {
        f"{f'{count} beams' if count > 1 else 'greedy'}, {'cache' if cached else 'no cache'}": asdict(
            found.decoding(**common, beams=count, cached=cached, source=source)
        )
        for count in beams
        for cached in (True, False)
    }


# -- how it is shown ---------------------------------------------------------------------------------------------------


def bar(share: float) -> str:
    """A bar as long as a share of the whole, to an eighth of a column."""
    eighths = round(8 * BAR * share)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def shares(column: str, components: dict[str, int]) -> None:
    """A table of components, their share of the sum, and a bar each."""
    whole = sum(components.values()) or 1
    rows = [(name, count, f"{count / whole:6.1%}", bar(count / whole)) for name, count in components.items()]
    table(("component", column, "share", ""), [*rows, ("total", whole, "", "")])


def _show(found: Account, gathered: dict[str, Any]) -> None:
    experts = ""
    if found.active_parameters != found.parameters:
        experts = f", {found.active_parameters:,} of them active for a token"
    click.echo(f"{found.name}: {found.family}, {found.parameters:,} parameters{experts}\n")
    shares("parameters", gathered["components"])
    size = gathered["flops"]
    length = f"{size['source']} tokens"
    if found.family == "encoder-decoder":
        length = f"{size['source']} source and {size['target']} target tokens"
    click.echo(f"\nFLOPs of a pass, batch {size['batch']}, {length}")
    shares("forward", size["components"])
    rows = [(name.replace("_", " "), size[name], human_count(size[name])) for name in TOTALS]
    click.echo()
    table(("pass", "FLOPs", ""), rows)
    _show_memory(gathered)
    _show_rest(gathered)


def _show_memory(gathered: dict[str, Any]) -> None:
    memory, size = gathered["memory"], gathered["flops"]
    gpus = f", on each of {memory['gpus']} GPUs" if memory["gpus"] > 1 else ""
    click.echo(f"\nTraining memory, {memory['trained_in']}, {memory['optimizer']}, batch {size['batch']}{gpus}")
    rows = [(part.replace("_", " "), *(human_bytes(memory["training"][way][part]) for way in WAYS)) for part in PARTS]
    table(("part", *WAYS.values()), rows)
    click.echo(f"\nTo run: weights in {memory['dtype']} {human_bytes(memory['weights'])}, ", nl=False)
    click.echo(f"key/value cache in {memory['trained_in']} {human_bytes(gathered['kv_cache_bytes'])}")


def _show_rest(gathered: dict[str, Any]) -> None:
    if "decoding" in gathered:
        columns = ("decoding", "positions", "FLOPs", "bytes moved")
        rows = [
            (way, one["positions"], human_count(one["flops"]), human_bytes(one["bytes_moved"]))
            for way, one in gathered["decoding"].items()
        ]
        click.echo()
        table(columns, rows)
    if "measured" in gathered:
        parts = gathered["measured"]["parts"]
        click.echo(f"\nMeasured on {gathered['measured']['device']}, fp32, one forward pass")
        whole = parts["total"]["seconds"]
        rows = [
            (name, f"{1e3 * one['seconds']:.2f} ms", f"{one['seconds'] / whole:6.1%}", human_bytes(one["kept_bytes"]))
            for name, one in parts.items()
        ]
        table(("component", "time", "share", "kept for backward"), rows)
    if "budget" in gathered:
        one = gathered["budget"]
        click.echo(f"\nTraining on {human_count(one['tokens'])} tokens: {one['flops']:.3g} FLOPs ", nl=False)
        click.echo(f"(6N: {one['rule_of_six']:.3g}), {one['gpu_hours']:,.4g} GPU hours, {one['days']:.3g} days")


# -- the command -------------------------------------------------------------------------------------------------------

COUNT = click.IntRange(min=1)
# Option -> the option without which it says nothing, and its value where it is not given.
BESIDE = {"peak_tflops": ("tokens", 989.0), "mfu": ("tokens", 0.4), "prompt": ("new", 1), "beams": ("new", 1)}


def completed(options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of BESIDE filled in; one that would be ignored is refused."""
    for name, (other, default) in BESIDE.items():
        if options[name] is not None and options[other] is None:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} {options[name]} says nothing without --{other}; give both or neither")
        options = options | {name: default if options[name] is None else options[name]}
    return options


@click.command(name="account", help="Parameters, FLOPs and memory of a preset, a config.json or a folder with one.")
@click.argument("what")
@click.argument("changes", nargs=-1, metavar="[key=value …]")
@click.option("--batch", type=COUNT, default=1, show_default=True, help="Sequences in a pass (on each GPU).")
@click.option("--length", type=COUNT, help="Tokens in a sequence; of the source in an encoder-decoder. [the context]")
@click.option("--target-length", type=COUNT, help="Tokens of the target in an encoder-decoder. [as the source]")
@click.option("--dtype", type=click.Choice(list(BITS)), default="bf16", show_default=True, help="Of the weights.")
@click.option("--optimizer", type=click.Choice(list(STATES)), default="adamw", show_default=True)
@click.option("--gpus", type=COUNT, default=1, show_default=True, help="Share the training state among so many.")
@click.option("--tokens", type=COUNT, help="Also the time to train on so many tokens.")
@click.option("--peak-tflops", type=float, help="With --tokens: of one GPU.  [989, an H100 in bf16, dense]")
@click.option("--mfu", type=float, help="With --tokens: the share of the peak that is reached.  [0.4]")
@click.option("--new", type=COUNT, help="Also the cost of writing so many tokens.")
@click.option("--prompt", type=COUNT, help="With --new: tokens given before them.  [1]")
@click.option("--beams", type=COUNT, help="With --new: hypotheses kept while writing.  [1]")
@click.option("--measure", is_flag=True, help="Also build it here and measure a forward pass by component.")
@as_json
def command(what: str, changes: tuple[str, ...], as_json: bool, **options: Any) -> None:
    options = completed(options)
    found = account(changed(find(what), changes), name=" ".join([what, *changes]))
    try:
        gathered = gather(found, options)
    except InputError as problem:  # the sizes asked for do not fit this model
        raise click.UsageError(str(problem)) from None
    if as_json:
        print_json(gathered)
        return
    _show(found, gathered)
    if options["tokens"] is None:
        # Hoffmann et al. 2022: about 20 tokens a parameter
        next_verb(f"account {found.name} --tokens {20 * found.active_parameters}")
    else:
        next_verb("ls presets")
