"""Build the components of a tokenizer.json as JSON objects, and from them a tokenizer of the `tokenizers` library."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]


def component_sequence(key: str, *components: JsonObject | None) -> JsonObject | None:
    """Return a "Sequence" that applies components one after the other; `key` is the key of its list of components.

    Components that are None are left out. A single component is returned unchanged; without any, return None.
    """
    present = [component for component in components if component is not None]
    return {"type": "Sequence", key: present} if len(present) > 1 else (present[0] if present else None)


def split_regex(pattern: str, behavior: str = "Isolated", invert: bool = False) -> JsonObject:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def replace_string(old: str, new: str) -> JsonObject:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def replace_regex(pattern: str, new: str) -> JsonObject:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}


def byte_level(*, add_prefix_space: bool = False, use_regex: bool = False) -> JsonObject:
    """Return the component that maps bytes to `byte_symbols`; `use_regex` first splits the text by GPT-2's pattern."""
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def bpe_model(
    vocab: dict[str, int],
    merges: list[Any],
    *,
    unk_token: str | None = None,
    end_of_word_suffix: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> JsonObject:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": end_of_word_suffix,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def join_sections(
    sections: JsonObject, added_tokens: list[JsonObject], post_processor: JsonObject | None
) -> JsonObject:
    """Return the content of a tokenizer.json; `sections` has the keys normalizer, pre_tokenizer, decoder and model."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": sections["normalizer"],
        "pre_tokenizer": sections["pre_tokenizer"],
        "post_processor": post_processor,
        "decoder": sections["decoder"],
        "model": sections["model"],
    }


def byte_symbols() -> list[str]:
    """Return GPT-2's printable symbol for each byte value (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(substitutes)) for value in range(256)]
