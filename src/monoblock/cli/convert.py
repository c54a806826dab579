"""`monoblock convert`: convert a model between formats, and compare its logits with those of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from monoblock.cli.output import dump_json, echo, suggest_next
from monoblock.cli.verb import REQUIRED, argument, option
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert SOURCE to another format. SOURCE is a monoblock or Hugging Face model folder, or a GGUF file.

    The weights of a Hugging Face folder may be safetensors or pickles. The last line printed is a JSON object, the
    parity certificate: the family, the number of parameters, the number of tensors and, if transformers is installed,
    the largest difference between the logits of monoblock and of transformers.
    """

    source: str = argument()
    to: str = option("Folder to write, or a file name that ends in .gguf.", REQUIRED)
    format: Literal["monoblock", "hf", "gguf"] | None = option(
        "Format to write.  [default: gguf if --to ends in .gguf, else monoblock]"
    )
    kind: str = option("For GGUF: type of the weight matrices: f32, f16, q8_0.", "f16")
    dtype: Literal["fp64", "fp32", "fp16", "bf16"] | None = option(
        "For folders: round the weights to this type.  [default: that of SOURCE]"
    )
    family: str | None = option("For hf: model_type to write, if more than one Hugging Face family fits the model.")
    adapter: Path | None = option(
        "LoRA adapter folder, written by monoblock or by peft, to merge into the weights first."
    )
    ignore_field: tuple[str, ...] = option(
        "Field of a Hugging Face config.json or GGUF file that has no effect, but is not known here; repeatable.",
        (),
        metavar="NAME",
    )
    no_tokenizer: bool = option("Leave out the tokenizer, for instance one that GGUF has no name for.", False)
    force: bool = option("Write even if --to exists already.", False)

    def run(self) -> None:
        target_format = self.format or ("gguf" if self.to.endswith(".gguf") else "monoblock")
        if Path(self.to).exists() and not self.force:
            raise ConfigError(
                f"{self.to} already exists; give another path with --to, or add --force to write there anyway"
            )
        from monoblock.interop.certificate import certify
        from monoblock.interop.convert import merge_adapter, open_model, write_model

        with (
            open_model(self.source, ignore_fields=self.ignore_field) as base,
            merge_adapter(base, self.adapter) as model,
        ):
            echo(f"Read {self.source}: {model.model.config.family}", err=True)
            options: dict[str, Any] = {"kind": self.kind, "dtype": self.dtype, "family": self.family}
            write_model(model, self.to, target_format, with_tokenizer=not self.no_tokenizer, **options)
            certificate = certify(model, self.to, target_format, partial(echo, err=True), dtype=self.dtype)
        if target_format == "monoblock":
            suggest_next(f"account {self.to}")
        echo(dump_json(certificate._asdict()))
