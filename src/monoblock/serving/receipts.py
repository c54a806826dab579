"""Receipts: what an answer was computed from, so that it can be derived again.

A receipt names the weights and the code by their hashes, and has the settings, the seed and all token ids.  It is no
signature: whoever has the model can write one.  `replay` derives the tokens again and compares.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
import tokenizers
import torch

from monoblock import __version__
from monoblock.errors import FileError
from monoblock.inference.engine import Engine
from monoblock.inference.scheduler import Edit
from monoblock.inference.settings import Settings
from monoblock.serving.inspect_request import Inspection
from monoblock.serving.requests import InspectBody

if TYPE_CHECKING:
    from monoblock.serving.served_model import Job, ServedModel

VERSION = 1
NOT_A_SIGNATURE = "This receipt is no signature: it says how to derive the answer again, not who derived it."


def make_receipt(model: ServedModel, jobs: Sequence[Job], texts: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Return the receipt of the texts that a model has generated for some jobs."""
    answers = [
        {
            "prompt": list(job.prompt.ids),
            "source": None if job.prompt.source is None else list(job.prompt.source),
            "settings": _write_settings(job.settings),
            "edits": [] if job.inspection is None else [edit.model_dump() for edit in job.inspection.body.edits],
            "texts": [list(tokens) for tokens in found[:: job.copies]],
        }
        for job, found in zip(jobs, texts, strict=True)
    ]
    return {"version": VERSION, "note": NOT_A_SIGNATURE, "computed_with": circumstances(model), "answers": answers}


def circumstances(model: ServedModel) -> dict[str, Any]:
    """Return everything besides a request that decides about the bits of its answer."""
    tokenizer, device = model.pipe.tokenizer, model.pipe.model.device
    template = tokenizer.chat_template
    return {
        "weights_sha256": model.weights_digest,
        "code_sha256": code_digest(),
        "monoblock": __version__,
        "tokenizer": tokenizer.fingerprint,
        "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "adapter": None,
        "exact": model.loop.engine.is_exact,
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "processor": platform.machine(),
        "dtype": str(next(model.pipe.model.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "safetensors": safetensors.__version__,
    }


@cache
def code_digest() -> str:
    """Return the SHA-256 of the source files of the package."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that are not the defaults, as JSON has them."""
    assert not settings.logits_processor
    written = asdict(settings)
    written["logit_bias"] = {str(token): bias for token, bias in settings.logit_bias.items()}
    defaults = asdict(Settings())
    return {name: value for name, value in written.items() if value != defaults[name]}


def _read_settings(written: Mapping[str, Any]) -> Settings:
    values = {**written, "logit_bias": {int(token): bias for token, bias in written.get("logit_bias", {}).items()}}
    unknown = set(values) - {field.name for field in fields(Settings)}
    if unknown:
        raise FileError(f"the receipt has a setting {sorted(unknown)[0]!r}, which this version does not know")
    return Settings(**values)


class Replay(NamedTuple):
    """How an answer that is derived again compares with its receipt."""

    differences: dict[str, tuple[Any, Any]]  # of the circumstances: what the receipt says, what is here
    first_difference: tuple[int, int, int, int | None, int | None] | None  # answer, text, place, token there and here

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None


def replay(receipt: Any, model: ServedModel) -> Replay:
    """Derive the texts of a receipt again, each request alone, and compare them token by token."""
    try:
        if receipt["version"] != VERSION:
            raise FileError(f"this receipt has version {receipt['version']!r:.20}, and {VERSION} is known")
        there, answers = dict(receipt["computed_with"]), list(receipt["answers"])
        requests = [
            (
                list(one["prompt"]),
                one["source"],
                _read_settings(one["settings"]),
                InspectBody.model_validate({"edits": one["edits"]}),
                [list(text) for text in one["texts"]],
            )
            for one in answers
        ]
        if not requests or any(len(texts) != settings.num_return_sequences for *_, settings, _, texts in requests):
            raise FileError("this receipt has no text for one of its sequences, so there is nothing to compare")
    except FileError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError):
        raise FileError('this is not a receipt; give the JSON object under "receipt" in an answer') from None
    here = circumstances(model)
    differences = {
        name: (there.get(name), here.get(name)) for name in {**there, **here} if there.get(name) != here.get(name)
    }
    engine = model.loop.engine
    for number, (prompt, source, settings, body, texts) in enumerate(requests):
        derived = _decode(engine, prompt, source, settings, Inspection(model.model, body).edits)
        for index, (said, found) in enumerate(zip(texts, derived, strict=True)):
            for place in range(max(len(said), len(found))):
                there_is, here_is = (tokens[place] if place < len(tokens) else None for tokens in (said, found))
                if there_is != here_is:
                    return Replay(differences, (number, index, place, there_is, here_is))
    return Replay(differences, None)


def _decode(
    engine: Engine,
    prompt: Sequence[int],
    source: Sequence[int] | None,
    settings: Settings,
    edits: Sequence[Edit],
) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(settings.num_return_sequences)]
    engine.add(prompt, settings, source, edits=edits)
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            texts[output.sequence_index] += output.tokens
    return texts
