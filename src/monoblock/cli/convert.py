"""`monoblock convert`: convert a model between formats, with a certificate of how its logits compare."""

from __future__ import annotations

import json
from pathlib import Path

import click

from monoblock.cli._shared.output import suggest_next
from monoblock.errors import ConfigError


@click.command(name="convert")
@click.argument("source")
@click.option("--to", "target", required=True, help="Folder to write, or a file name that ends in .gguf.")
@click.option(
    "--format",
    "target_format",
    type=click.Choice(["monoblock", "hf", "gguf"]),
    help="Format to write.  [gguf if --to ends in .gguf, else monoblock]",
)
@click.option("--kind", default="f16", show_default=True, help="GGUF: type of the matrices, f32, f16 or q8_0.")
@click.option("--family", help="Hugging Face: family to write, if several can express the model.")
@click.option("--adapter", type=click.Path(path_type=Path), help="LoRA adapter (ours or peft's) to merge first.")
@click.option("--force", is_flag=True, help="Write into a folder that exists.")
def command(
    source: str,
    target: str,
    target_format: str | None,
    kind: str,
    family: str | None,
    adapter: Path | None,
    force: bool,
) -> None:
    """Convert SOURCE: a monoblock folder, a Hugging Face folder (weights may be pickled) or a GGUF file.

    The last line printed is the certificate: family, parameters, tensors and, if transformers is installed, the largest
    difference between its logits and ours.
    """
    target_format = target_format or ("gguf" if target.endswith(".gguf") else "monoblock")
    if Path(target).exists() and not force:
        raise ConfigError(f"{target} already exists; name another with --to, or write into it with --force")
    from monoblock.interop.certificate import certify
    from monoblock.interop.convert import merge_adapter, open_model, write_model

    with open_model(source) as base, merge_adapter(base, adapter) as model:
        click.echo(f"Read {source}: {model.model.config.family}", err=True)
        write_model(model, target, target_format, kind=kind, family=family)
        certificate = certify(model, target, target_format, lambda line: click.echo(line, err=True))
    if target_format == "monoblock":
        suggest_next(f"account {target}")
    click.echo(json.dumps(certificate._asdict()))
