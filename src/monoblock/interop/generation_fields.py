"""DATA: fields of generation_config.json that change no text, and values with which others change none."""

from __future__ import annotations

from typing import Any

# Fields that are not reported as ignored: do_sample is read, and the others do not change the text, only how it is
# computed or what is returned beside it.
UNREPORTED_FIELDS = {
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "disable_compile",
    "do_sample",
    "_from_model_config",
    "is_assistant",
    "low_memory",
    "max_cache_len",
    "max_length",  # read for encoder-decoders; the prompt of another model is not part of max_new_tokens
    "max_matching_ngram_size",
    "max_time",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "return_dict_in_generate",
    "return_legacy_cache",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
}
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
