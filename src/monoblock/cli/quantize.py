"""`monoblock quantize MODEL --bits 8|4 --out DIR`: quantize a model folder and compare its perplexity."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.cli.output import echo, format_bytes, print_table, report
from monoblock.cli.verb import REQUIRED, argument, check_empty, json_option, option, resolve_data_folder
from monoblock.errors import FileError

if TYPE_CHECKING:
    from torch import nn


DEFAULT_TEXT = "kjv"  # a corpus that needs no download
MAX_TOKENS = 50_000
TOKENS_PER_BATCH = 4096
MAX_WINDOW = 1024  # the most tokens evaluated in one window, even if the context is longer


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
    text: str = option("Text file or corpus to measure perplexity on.", DEFAULT_TEXT)
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
        options: dict[str, Any] = {"bits": int(self.bits), "group": self.group, "table_bits": int(self.table_bits)}
        options["activation_bits"] = int(self.activation_bits)
        after = quantize(before, **options, progress=_progress_callback("quantizing"))
        group = after.config.quantize.group  # type: ignore[union-attr]
        result: dict[str, Any] = {"folder": str(self.out), **options, "group": group}
        result["bytes"] = {"before": state_dict_bytes(before), "after": state_dict_bytes(after)}
        if documents is not None:
            result |= {"text": text, **compare_perplexity(before, after, documents, self.tokens)}
        after.save_pretrained(self.out)
        next_command = f"generate {shlex.quote(str(self.out))}" if is_language_model else f"account {self.out}"
        report(self.as_json, result, print_report, next_command)


def print_report(result: dict[str, Any]) -> None:
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


def _progress_callback(action: str) -> Callable[..., None]:
    """Return a function of (done, of) that prints `action` and a percentage on stderr at every tenth of `of`."""
    last_tenth = -1

    def report(done: int, of: int) -> None:
        nonlocal last_tenth
        if (tenth := min(10, 10 * done // max(of, 1))) > last_tenth:
            last_tenth = tenth
            echo(f"{action} {10 * tenth} %", err=True)

    return report


def state_dict_bytes(model: nn.Module) -> int:
    """Return the size in bytes of all tensors in the state_dict of a model."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def measure_loss(
    model: Any, documents: list[list[int]], max_tokens: int, progress: Callable[[int], None]
) -> tuple[float, int]:
    """Return the mean loss of a language model over tokenized documents, and of how many tokens, at most about so many.

    `progress(tokens)` is called after each batch with the number of tokens so far.
    """
    import torch
    import torch.nn.functional as F

    from monoblock.data.token_folder import TokenDataset
    from monoblock.tasks.running_text import iterate_windows

    tokens = TokenDataset.from_documents(documents, model.config.input.vocab)
    context, total, count = min(model.config.context or MAX_WINDOW, MAX_WINDOW), 0.0, 0
    for batch in iterate_windows(tokens, context, max(1, TOKENS_PER_BATCH // context)):
        labels = batch.labels.flatten()
        with torch.no_grad():
            logits = model(batch.inputs["source"])
        total += float(F.cross_entropy(logits.flatten(0, 1).double(), labels, reduction="sum"))
        count += int((labels >= 0).sum())
        progress(count)
        if count >= max_tokens:
            break
    return total / max(count, 1), count


def compare_perplexity(before: Any, after: Any, documents: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Return the loss and the perplexity of both models on the same documents, and by how much the latter increases."""
    total = min(max_tokens, sum(map(len, documents)))
    tokens, losses, perplexity = 0, {}, {}
    for name, model in (("before", before), ("after", after)):
        progress = partial(_progress_callback(f"evaluating, {name}"), of=total)
        losses[name], tokens = measure_loss(model, documents, max_tokens, progress)
        perplexity[name] = math.exp(min(losses[name], 700.0))
    increase = perplexity["after"] / perplexity["before"] - 1
    return {"tokens": tokens, "loss": losses, "perplexity": perplexity, "perplexity_loss": increase}
