"""Settings of generation: which fields of generation_config.json change no text, and those that GGUF can store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields that are not reported as ignored: do_sample is read, and the others do not change the text, only how it is
# computed or what is returned beside it.  max_length is read for encoder-decoders; elsewhere it counts the prompt.
UNREPORTED_NAMES = """
assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id cache_config cache_implementation
compile_config continuous_batching_config disable_compile do_sample _from_model_config is_assistant low_memory
max_cache_len max_length max_matching_ngram_size max_time num_assistant_tokens num_assistant_tokens_schedule
output_attentions output_hidden_states output_logits output_scores prefill_chunk_size prompt_lookup_num_tokens
remove_invalid_values return_dict_in_generate return_legacy_cache target_lookbehind transformers_version use_cache
"""
UNREPORTED_FIELDS = frozenset(UNREPORTED_NAMES.split())
# Values with which further fields change nothing, besides null and false.
NEUTRAL_VALUES = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "penalty_alpha": 0.0,
}


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a field with this value would not change what is generated."""
    return value is None or value is False or (name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name])


# -- GGUF: llama.cpp's fields general.sampling.* -----------------------------------------------------------------------

GGUF_PREFIX = "general.sampling"
# Fields of generation_config.json: the GGUF field and its type.
GGUF_FIELDS: dict[str, tuple[str, type]] = {
    "temperature": ("temp", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}
STORED_WITH_THE_TOKENIZER = {"eos_token_id", "pad_token_id"}


def sampling_fields(generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the GGUF fields for a generation_config.json, and the names of its fields that GGUF has no room for."""
    given = {name: value for name, value in generation.items() if value is not None}
    known = {name: value for name, value in given.items() if name in GGUF_FIELDS and isinstance(value, int | float)}
    if given.get("do_sample") is False or ("do_sample" not in given and known):
        known["temperature"] = 0.0  # greedy
    elif given.get("do_sample"):
        known.setdefault("temperature", 1.0)
    fields = {f"{GGUF_PREFIX}.{GGUF_FIELDS[name][0]}": GGUF_FIELDS[name][1](value) for name, value in known.items()}
    elsewhere = {*known, *STORED_WITH_THE_TOKENIZER, *UNREPORTED_FIELDS}
    lost = [name for name, value in given.items() if name not in elsewhere and not is_neutral(name, value)]
    ends = given.get("eos_token_id")
    return fields, lost + (["eos_token_id (only one)"] if isinstance(ends, list) and len(ends) > 1 else [])


def read_sampling(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields of a GGUF header to those of a generation_config.json."""
    values = {name: stored.get(f"{GGUF_PREFIX}.{key}") for name, (key, _) in GGUF_FIELDS.items()}
    values = {name: value for name, value in values.items() if isinstance(value, int | float)}
    if "temperature" not in values:
        return values
    if values["temperature"] == 0.0:
        del values["temperature"]
        return values | {"do_sample": False}
    return values | {"do_sample": True}
