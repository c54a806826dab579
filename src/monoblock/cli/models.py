"""The verbs that make another model of one, or a picture: `convert`, `quantize`, `prune` and `draw`."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.cli.account import apply_overrides
from monoblock.cli.model_options import device_option
from monoblock.cli.output import ProgressBar, dump_json, echo, format_bytes, print_table, report, suggest_next
from monoblock.cli.verb import (
    REQUIRED,
    argument,
    check_empty,
    data_folder_option,
    json_option,
    option,
    resolve_data_folder,
)
from monoblock.errors import ConfigError, FileError

if TYPE_CHECKING:
    from torch import nn

MAX_TOKENS = 50_000  # on which perplexity is measured
TOKENS_PER_BATCH = 4096
MAX_WINDOW = 1024  # the most tokens evaluated in one window, even if the context is longer
SHOWN_LAYERS = 24


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


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Quantize the weight matrices of MODEL, and compare the perplexity."""

    model: Path = argument()
    bits: Literal["8", "4"] = option("Bits per weight.", "8")
    group: int | None = option("Number of weights that share a scale.  [default: 64 for 8 bits, 32 for 4]")
    table_bits: Literal["8", "4"] = option("Bits per weight of the embedding and the output matrix.", "8")
    activation_bits: Literal["16", "8"] = option(
        "Bits to which the inputs of a matrix are rounded; 8 is less exact, and faster for prompts on a CPU.", "16"
    )
    out: Path = option("Model folder to write.", REQUIRED, path="folder")
    text: str = option("Text file or corpus to measure perplexity on.", "kjv")
    data: Path | None = option("Folder with corpora, or a text file to use as --text.", exists=True)
    tokens: int = option("Measure on at most N tokens.", MAX_TOKENS, least=1)
    as_json: bool = json_option()

    def run(self) -> None:
        check_empty(self.out)
        is_file = self.data is not None and self.data.is_file()
        text, data = (str(self.data), None) if is_file else (self.text, self.data)
        from monoblock.data.corpora.load import load_corpus
        from monoblock.interop.model_folder import ModelFolder, load_model
        from monoblock.model import Transformer
        from monoblock.quantization.convert import quantize

        folder = ModelFolder(self.model)
        before = load_model(Transformer, folder).eval()
        is_language_model = before.config.family == "decoder-only" and before.config.head is not None
        tokenizer, documents = None, None
        with contextlib.suppress(FileError):  # a tokenizer that cannot be read is copied, too
            tokenizer = folder.tokenizer if folder.has_tokenizer else None
        if is_language_model and tokenizer is not None:
            corpus = load_corpus(text, "all" if Path(text).is_file() else "valid", folder=resolve_data_folder(data))
            documents = tokenizer.encode_batch(list(corpus.texts()))
        names = ("bits", "group", "table_bits", "activation_bits")
        options: dict[str, Any] = {name: value and int(value) for name in names for value in [getattr(self, name)]}
        with ProgressBar("matrices") as progress:
            after = quantize(before, **options, progress=lambda done, total: progress(1))
        group = after.config.quantize.group  # type: ignore[union-attr]
        sizes = {"before": state_dict_bytes(before), "after": state_dict_bytes(after)}
        result: dict[str, Any] = {"folder": str(self.out), **options, "group": group, "bytes": sizes}
        if documents is not None:
            tokens, losses = 0, {}
            for name, model in (("before", before), ("after", after)):
                with ProgressBar(f"tokens evaluated, {name}", min(self.tokens, sum(map(len, documents)))) as progress:
                    losses[name], tokens = measure_loss(model, documents, self.tokens, progress)
            perplexity = {name: math.exp(min(loss, 700.0)) for name, loss in losses.items()}
            result |= {"text": text, "tokens": tokens, "loss": losses, "perplexity": perplexity}
            result["perplexity_loss"] = perplexity["after"] / perplexity["before"] - 1
        after.save_pretrained(self.out)
        next_command = f"generate {shlex.quote(str(self.out))}" if is_language_model else f"account {self.out}"
        report(self.as_json, result, print_quantization, next_command)


def print_quantization(result: dict[str, Any]) -> None:
    size = result["bytes"]
    smaller = f"{size['before'] / size['after']:.2f} times smaller"
    rows: list[tuple[object, ...]] = [("weights", format_bytes(size["before"]), format_bytes(size["after"]), smaller)]
    if "perplexity" in result:
        before, after = (f"{result['perplexity'][name]:.4f}" for name in ("before", "after"))
        rows.append((f"perplexity on {result['text']}", before, after, f"{100 * result['perplexity_loss']:+.3f} %"))
    print_table(("", "before", f"{result['bits']} bits, groups of {result['group']}", "change"), rows)
    if "perplexity" not in result:
        echo("Perplexity was not measured, because it needs a decoder-only model with a tokenizer.", err=True)
    echo(f"Saved {result['folder']}")


def state_dict_bytes(model: nn.Module) -> int:
    """Return the size in bytes of all tensors in the state_dict of a model."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def measure_loss(
    model: Any, documents: list[list[int]], max_tokens: int, progress: Callable[[int], None]
) -> tuple[float, int]:
    """Return the mean loss of a language model over tokenized documents, and of how many tokens, at most about so many.

    `progress` is called after each batch with its number of tokens.
    """
    import torch
    import torch.nn.functional as F

    from monoblock.data.token_folder import TokenDataset
    from monoblock.tasks.task_data import iterate_windows

    tokens = TokenDataset.from_documents(documents, model.config.input.vocab)
    context, total, count = min(model.config.context or MAX_WINDOW, MAX_WINDOW), 0.0, 0
    for batch in iterate_windows(tokens, context, max(1, TOKENS_PER_BATCH // context)):
        labels = batch.labels.flatten()
        with torch.no_grad():
            logits = model(batch.inputs["source"])
        total += float(F.cross_entropy(logits.flatten(0, 1).double(), labels, reduction="sum"))
        found = int((labels >= 0).sum())
        count += found
        progress(found)
        if count >= max_tokens:
            break
    return total / max(count, 1), count


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Rank the attention heads of MODEL by their importance for its loss on DATA, remove the least important ones
    together with their weights, and write the smaller model. DATA is a corpus from `monoblock ls corpora`, a file or a
    folder. Every layer keeps at least one head. Heads that share keys and values are removed together. Heads are
    removed in several rounds, and their importance is measured anew in each, since a head may be needed only once
    another one is gone.
    """

    model: str = argument()
    data: str = argument()
    remove: int | None = option("Remove N heads.", least=1)
    keep: float | None = option("Keep this fraction of the heads, such as 0.5.", least=0, most=1, metavar="F")
    layers: str = option("Prune the layers that match this pattern, such as 'encoder.*' or '*.cross'.", "*")
    method: Literal["gradient", "ablation"] = option(
        "Importance of a head: by the gradient, or by the loss without it (one pass for each head).", "gradient"
    )
    rounds: int | None = option(
        "Remove the heads in N rounds; 1 ranks all heads once.  [default: a head in each round, in at most 16 rounds]",
        least=1,
    )
    batches: int = option("Rank on N training batches.", 16, least=1)
    out: Path = option("Model folder to write.", REQUIRED, path="folder")
    folder: Path | None = data_folder_option()
    device: str | None = device_option()
    as_json: bool = json_option()

    def run(self) -> None:
        if (self.remove is None) == (self.keep is None):
            raise ConfigError("give either --remove N or --keep F, as in --keep 0.5")
        check_empty(self.out)
        from monoblock.interop.model_folder import resolve_model_path
        from monoblock.runs.device import resolve_device
        from monoblock.runs.prune import prune_model

        with ProgressBar("passes") as progress:
            result = prune_model(
                resolve_model_path(self.model),
                self.data,
                remove=self.remove,
                keep=self.keep,
                layers=self.layers,
                method=self.method,
                rounds=self.rounds,
                num_batches=self.batches,
                device=resolve_device(self.device, "fp32")[0],
                data_folder=resolve_data_folder(self.folder),
                progress=progress,
            )
        result.model.cpu().save_pretrained(self.out)
        summary = {
            "folder": str(self.out),
            "removed": result.removed,
            "rounds": result.num_rounds,
            "heads": result.num_heads,
            "parameters": result.parameters,
            "accounted_parameters": result.accounted_parameters,
            "metrics": result.metrics,
            "max_logit_difference": result.max_logit_difference,
            "ranking": [
                {"layer": group.layer, "heads": list(group.heads), "importance": round(group.importance, 6)}
                for group in result.ranking
            ],
        }
        next_command = f"finetune {shlex.quote(str(self.out))} {shlex.quote(self.data)} --out DIR"
        report(self.as_json, summary, print_pruning, next_command)


def print_pruning(result: dict[str, Any]) -> None:
    rows = [(layer, ", ".join(map(str, heads))) for layer, heads in sorted(result["removed"].items())]
    print_table(("layer", "heads removed"), rows[:SHOWN_LAYERS])
    if len(rows) > SHOWN_LAYERS:
        echo(f"… and of {len(rows) - SHOWN_LAYERS} more layers")
    echo()
    sizes = {name: result[name] for name in ("heads", "parameters")}
    before, after = result["metrics"]["before"], result["metrics"]["after"]
    losses = {f"validation {name}": {"before": before[name], "after": after[name]} for name in before}
    print_table(("", "before", "after"), [(name, *pair.values()) for name, pair in (sizes | losses).items()])
    echo(
        "The pruned model and the original with these heads set to zero differ by at most "
        f"{result['max_logit_difference']:.1e} in a logit."
    )
    echo(f"Saved {result['folder']}")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw the architecture of WHAT as SVG: a preset from `monoblock ls presets`, a model folder, a config.json or a
    GGUF file.

    Arguments of the form key=value change the configuration first, as in norm=rms gated=true.
    """

    what: str = argument()
    overrides: tuple[str, ...] = argument((), metavar="[key=value …]")
    out: Path | None = option("File to write.  [default: the name of WHAT, as .svg]")

    def run(self) -> None:
        from monoblock.config.model import ModelConfig
        from monoblock.interop.model_folder import read_any_config
        from monoblock.plots.architecture import draw

        config = apply_overrides(read_any_config(self.what), self.overrides)
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"{self.what} is an LSTM; only Transformers are drawn")
        name = Path(self.what).name
        picture = draw(config, name=" ".join([name, *self.overrides]))
        echo(picture.save(self.out or Path(f"{name.removesuffix('.json')}.svg")))
        suggest_next(f"account {' '.join([self.what, *self.overrides])}")
