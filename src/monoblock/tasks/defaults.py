"""generation_config.json: how a model's text is chosen unless somebody says otherwise.

Read by an allow-list, from our folders and published ones; a word that is not on it is ignored, and known by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from monoblock.decoding.settings import Settings, settings
from monoblock.errors import FileError, InputError
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted import inside, present, read_json, shown

FILE, CONFIG, RECIPE = "generation_config.json", "config.json", "recipe.toml"
START = "decoder_start_token_id"
KNOWN = {field.name for field in fields(Settings)} - {"seed"}
TOKENS = ("eos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id", START)  # config.json's, too
SILENT = {"bos_token_id", "do_sample", "transformers_version", "_from_model_config", "use_cache"}


@dataclass(frozen=True)
class Defaults:
    """What a folder says about choosing tokens."""

    options: dict[str, Any] = field(default_factory=dict)  # words of Settings
    start: int | None = None  # what a target begins with, where there is an encoder
    ignored: tuple[str, ...] = ()  # words of the file that mean nothing here
    here: bool = False  # trained by a recipe: texts are framed as in our training

    def merged(self, given: Mapping[str, Any]) -> Settings:
        """The defaults with what is asked for instead; a default that contradicts what is asked for gives way."""
        options = {**self.options, **given}
        asked = {name for name, value in given.items() if value is not None}
        if _above(options.get("num_beams"), 1) and _above(options.get("temperature"), 0):
            if "num_beams" in asked and "temperature" not in asked:
                options["temperature"] = 0.0
            elif "temperature" in asked and "num_beams" not in asked:
                options["num_beams"] = 1
        return settings({name: value for name, value in options.items() if value is not None})


def read(folder: str | Path, tokenizer: Tokenizer) -> Defaults:
    """The defaults of a model folder; what it does not say, the tokenizer does."""
    folder = Path(folder)
    said = read_json(inside(folder, FILE)) if folder.is_dir() and present(folder, FILE) else {}
    config = read_json(inside(folder, CONFIG)) if folder.is_dir() and present(folder, CONFIG) else {}
    published = {} if "format" in config else {name: config[name] for name in TOKENS if name in config}
    told = {name: value for name, value in {**published, **said}.items() if value is not None}
    options = {name: value for name, value in told.items() if name in KNOWN}
    here = folder.is_dir() and present(folder, RECIPE)
    if not told.get("do_sample", here):  # theirs names a temperature even where it is not used
        options["temperature"] = 0.0
    elif "temperature" not in options:
        options["temperature"] = 1.0
    if _above(options.get("num_beams"), 1):
        options["temperature"] = 0.0
    for role, token in (("eos_token_id", tokenizer.eos_id), ("pad_token_id", tokenizer.pad_id)):
        if token is not None:
            options.setdefault(role, token)
    ignored = tuple(sorted(name for name in said if name not in KNOWN | SILENT | {START}))
    try:
        settings(options)
    except (InputError, TypeError) as problem:
        raise FileError(f"{folder / FILE}: {problem}") from None
    return Defaults(options, _start(told.get(START), folder, tokenizer), ignored, here)


def _above(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and value > least


def _start(given: Any, folder: Path, tokenizer: Tokenizer) -> int | None:
    if given is None:
        return tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.pad_id
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise FileError(f"{folder}: {START}={shown(given)} is no token")
    return given


def described(part: Any, objective: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a training run leaves in its folder: samples of a language model, the most probable of the others."""
    speaks = objective in ("causal", "chat")
    chosen: dict[str, Any] = {"max_new_tokens": part.max_new_tokens}
    if speaks:
        sampled = {"temperature": part.temperature, "top_p": part.top_p, "top_k": part.top_k}
        chosen = {"do_sample": part.temperature > 0, **sampled, **chosen}
    elif objective == "pairs":
        search = {"num_beams": part.num_beams, "length_penalty": part.length_penalty}
        chosen = {"do_sample": False, **search, **chosen}
    if tokenizer is None:
        return chosen
    roles = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.bos_id}
    if objective in ("pairs", "spans"):
        begins = objective == "pairs" and tokenizer.bos_id is not None
        roles[START] = tokenizer.bos_id if begins else tokenizer.pad_id
    return chosen | roles
