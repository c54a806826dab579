"""The settings of generation that a GGUF file has room for: llama.cpp's fields general.sampling.*."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoblock.interop.generation_fields import UNREPORTED_FIELDS, is_neutral
from monoblock.tokenizers.formats.gguf import read_gguf_header

PREFIX = "general.sampling"
# Fields of generation_config.json: the GGUF field and its type.
FIELDS: dict[str, tuple[str, type]] = {
    "temperature": ("temp", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}
WITH_THE_TOKENIZER = {"eos_token_id", "pad_token_id"}


def sampling_fields(generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the GGUF fields for a generation_config.json, and the names of its fields that GGUF has no room for."""
    given = {name: value for name, value in generation.items() if value is not None}
    known = {name: value for name, value in given.items() if name in FIELDS and isinstance(value, int | float)}
    if given.get("do_sample") is False or ("do_sample" not in given and known):
        known["temperature"] = 0.0  # greedy
    elif given.get("do_sample"):
        known.setdefault("temperature", 1.0)
    fields = {f"{PREFIX}.{FIELDS[name][0]}": FIELDS[name][1](value) for name, value in known.items()}
    elsewhere = {*known, *WITH_THE_TOKENIZER, *UNREPORTED_FIELDS}
    lost = [name for name, value in given.items() if name not in elsewhere and not is_neutral(name, value)]
    ends = given.get("eos_token_id")
    return fields, lost + (["eos_token_id (only one)"] if isinstance(ends, list) and len(ends) > 1 else [])


def read_sampling(path: Path) -> dict[str, Any]:
    """Return the settings of generation in a GGUF file, as the fields of a generation_config.json."""
    stored = read_gguf_header(path).fields
    values = {name: stored.get(f"{PREFIX}.{key}") for name, (key, _) in FIELDS.items()}
    values = {name: value for name, value in values.items() if isinstance(value, int | float)}
    if "temperature" not in values:
        return values
    if values["temperature"] == 0.0:
        del values["temperature"]
        return values | {"do_sample": False}
    return values | {"do_sample": True}
