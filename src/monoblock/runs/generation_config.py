"""Read and build generation_config.json, the default decoding options of a model.

The file is read from run folders and Hugging Face folders. Fields that are not supported are ignored and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from monoblock.errors import FileError, InputError
from monoblock.inference.settings import ENGINE_OPTIONS, Settings, parse_settings
from monoblock.interop.generation import UNREPORTED_FIELDS, is_neutral
from monoblock.interop.model_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, ModelFolder
from monoblock.recipes.schema import GenerateSection
from monoblock.tasks.loaded_model import GenerationDefaults
from monoblock.tasks.task import Task
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted_files import short_repr

DECODER_START_KEY = "decoder_start_token_id"
SETTINGS_FIELDS = {field.name for field in fields(Settings)} - {"seed", "logits_processor", *ENGINE_OPTIONS}


def read_generation_defaults(folder: ModelFolder, tokenizer: Tokenizer) -> GenerationDefaults:
    """Read the default decoding options of a model folder; ids of special tokens that it lacks are the tokenizer's."""
    values, path = folder.generation, folder.path
    data = folder.read_json(GENERATION_CONFIG_FILE)
    options = {name: value for name, value in values.items() if name in SETTINGS_FIELDS}
    if not values.get("do_sample", folder.is_run):  # Hugging Face files give a temperature even without sampling
        options["temperature"] = 0.0
    elif "temperature" not in options:
        options["temperature"] = 1.0
    if _is_count(options.get("num_beams")):
        options["temperature"] = 0.0
    for name, token in (("eos_token_id", tokenizer.eos_id), ("pad_token_id", tokenizer.pad_id)):
        if token is not None:
            options.setdefault(name, token)
    is_encoder_decoder = folder.read_json(CONFIG_FILE).get("is_encoder_decoder")
    if is_encoder_decoder and _is_count(values.get("max_length")) and "max_new_tokens" not in options:
        options["max_new_tokens"] = values["max_length"] - 1  # it counts the start token of the target
    known = SETTINGS_FIELDS | UNREPORTED_FIELDS | {DECODER_START_KEY}
    ignored = tuple(sorted(name for name, value in data.items() if name not in known and not is_neutral(name, value)))
    try:
        parse_settings({"num_beams": 1, **options})
    except (InputError, TypeError) as problem:
        raise FileError(f"{path / GENERATION_CONFIG_FILE}: {problem}") from None
    start = _decoder_start_token_id(values.get(DECODER_START_KEY), path, tokenizer)
    return GenerationDefaults(options, start, ignored, folder.is_run)


def stated_settings(folder: ModelFolder) -> dict[str, Any]:
    """Return the content of a generation_config.json that states how texts are generated; {} if it has only ids."""
    options = folder.generation
    stated = [name for name in options if name in SETTINGS_FIELDS | {"max_length"} and not name.endswith("_token_id")]
    return {name: value for name, value in options.items() if not name.startswith("_")} if stated else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _decoder_start_token_id(value: Any, folder: Path, tokenizer: Tokenizer) -> int | None:
    if value is None:
        return tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.pad_id
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FileError(f"{folder}: {DECODER_START_KEY}={short_repr(value)} is not a token id; write 0 or more")
    return value


def build_generation_config(
    section: GenerateSection,
    task: Task,
    tokenizer: Tokenizer | None,
    context: int | None,
    stored: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of generation_config.json for a run.

    It has the options for sampling or beam search, as `task.decoding` says, and the ids of special tokens.  If training
    starts from a model with settings of its own, `stored`, these are kept, but for those that the recipe changes.

    context: the maximum number of tokens of the model, None for no limit.
    """
    section = replace(section, max_new_tokens=section.new_tokens_within(context))
    if stored:
        default = GenerateSection()
        default = replace(default, max_new_tokens=default.new_tokens_within(context))
        changed = {name: value for name, value in asdict(section).items() if value != getattr(default, name)}
        stated = {name: value for name, value in changed.items() if name in SETTINGS_FIELDS}
        return {**stored, **stated} | ({"do_sample": section.temperature > 0} if "temperature" in changed else {})
    data: dict[str, Any] = {"max_new_tokens": section.max_new_tokens}
    if task.decoding == "sampling":
        sampling = {"temperature": section.temperature, "top_p": section.top_p, "top_k": section.top_k}
        data = {"do_sample": section.temperature > 0, **sampling, **data}
    elif task.decoding == "beam_search":
        search: dict[str, Any] = {"num_beams": section.num_beams, "length_penalty": section.length_penalty}
        if section.length_penalty_form != "length":  # a field of ours, which transformers ignores
            search["length_penalty_form"] = section.length_penalty_form
        data = {"do_sample": False, **search, **data}
    if tokenizer is None:
        return data
    tokens = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.bos_id}
    if "encoder-decoder" in task.families:
        has_bos = task.decoding != "none" and tokenizer.bos_id is not None
        tokens[DECODER_START_KEY] = tokenizer.bos_id if has_bos else tokenizer.pad_id
    return data | tokens
