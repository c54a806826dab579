"""`monoblock convert`: a model from one form to another, with a certificate of what that did to its logits."""

from __future__ import annotations

import json
from pathlib import Path

import click

from monoblock.cli.common import next_verb
from monoblock.errors import ConfigError


@click.command(name="convert")
@click.argument("source")
@click.option("--to", "target", required=True, help="The folder to write, or a file that ends in .gguf.")
@click.option("--format", "form", type=click.Choice(["monoblock", "hf", "gguf"]), help="[by the name after --to]")
@click.option("--kind", default="f16", show_default=True, help="How GGUF stores matrices: f32, f16 or q8_0.")
@click.option("--family", help="Whose names and configuration Hugging Face gets, where several could say the model.")
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="A LoRA adapter, ours or peft's, to put into the weights."
)
@click.option("--force", is_flag=True, help="Write into a folder that exists.")
def command(
    source: str, target: str, form: str | None, kind: str, family: str | None, adapter: Path | None, force: bool
) -> None:
    """Convert SOURCE, a folder of ours, a Hugging Face folder or a GGUF file, pickled weights included.

    The last line is the certificate: family, parameters, tensors, and the largest difference of logits from those of
    transformers, where that is installed.
    """
    form = form or ("gguf" if target.endswith(".gguf") else "monoblock")
    if Path(target).exists() and not force:
        raise ConfigError(f"{target} exists; name another place with --to, or write into it with --force")
    from monoblock.interop.certificate import certify
    from monoblock.interop.convert import merged, opened, write

    with opened(source) as base, merged(base, adapter) as found:
        click.echo(f"Read {source}: {found.model.config.family}", err=True)
        write(found, target, form, kind=kind, family=family)
        certificate = certify(found, target, form, lambda line: click.echo(line, err=True))
    if form == "monoblock":
        next_verb(f"account {target}")
    click.echo(json.dumps(certificate._asdict()))
