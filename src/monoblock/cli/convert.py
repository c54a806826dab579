"""`monoblock convert`: convert a model between formats, and compare its logits with those of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from monoblock.cli._shared.output import dump_json, echo, suggest_next
from monoblock.errors import ConfigError


@click.command(name="convert")
@click.argument("source")
@click.option("--to", "target", required=True, help="Folder to write, or a file name that ends in .gguf.")
@click.option(
    "--format",
    "target_format",
    type=click.Choice(["monoblock", "hf", "gguf"]),
    help="Format to write.  [default: gguf if --to ends in .gguf, else monoblock]",
)
@click.option("--kind", default="f16", show_default=True, help="For GGUF: type of the weight matrices: f32, f16, q8_0.")
@click.option(
    "--dtype",
    type=click.Choice(["fp64", "fp32", "fp16", "bf16"]),
    help="For folders: round the weights to this type.  [default: that of SOURCE]",
)
@click.option("--family", help="For hf: model_type to write, if more than one Hugging Face family fits the model.")
@click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    help="LoRA adapter folder, written by monoblock or by peft, to merge into the weights first.",
)
@click.option(
    "--ignore-field",
    "ignore_fields",
    multiple=True,
    metavar="NAME",
    help="Field of a Hugging Face config.json or GGUF file that has no effect, but is not known here; repeatable.",
)
@click.option(
    "--no-tokenizer", is_flag=True, help="Leave out the tokenizer, for instance one that GGUF has no name for."
)
@click.option("--force", is_flag=True, help="Write even if --to exists already.")
def command(
    source: str,
    target: str,
    target_format: str | None,
    kind: str,
    dtype: str | None,
    family: str | None,
    adapter: Path | None,
    ignore_fields: tuple[str, ...],
    no_tokenizer: bool,
    force: bool,
) -> None:
    """Convert SOURCE to another format. SOURCE is a monoblock or Hugging Face model folder, or a GGUF file.

    The weights of a Hugging Face folder may be safetensors or pickles. The last line printed is a JSON object, the
    parity certificate: the family, the number of parameters, the number of tensors and, if transformers is installed,
    the largest difference between the logits of monoblock and of transformers.
    """
    target_format = target_format or ("gguf" if target.endswith(".gguf") else "monoblock")
    if Path(target).exists() and not force:
        raise ConfigError(f"{target} already exists; give another path with --to, or add --force to write there anyway")
    from monoblock.interop.certificate import certify
    from monoblock.interop.convert import merge_adapter, open_model, write_model

    with open_model(source, ignore_fields=ignore_fields) as base, merge_adapter(base, adapter) as model:
        echo(f"Read {source}: {model.model.config.family}", err=True)
        options: dict[str, Any] = {"kind": kind, "dtype": dtype, "family": family}
        write_model(model, target, target_format, with_tokenizer=not no_tokenizer, **options)
        certificate = certify(model, target, target_format, partial(echo, err=True), dtype=dtype)
    if target_format == "monoblock":
        suggest_next(f"account {target}")
    echo(dump_json(certificate._asdict()))
