"""Load a Hugging Face folder as a Transformer.

config.json states a family (model_type) and a class.  Its fields are converted to a configuration (field_rules.py), and
the stored tensors to weights (rename.py), by the rules of the family.  Whether the output is tied to the embedding is
decided by the stored tensors.  No code in the folder is run, no file outside it is opened, and a missing or unexpected
tensor is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from monoblock.config.model import ModelConfig
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.huggingface.decoders import DECODERS
from monoblock.interop.huggingface.encoder_decoders import SEQ2SEQ
from monoblock.interop.huggingface.encoders import ENCODERS
from monoblock.interop.huggingface.family import Family
from monoblock.interop.huggingface.field_rules import without_fields
from monoblock.interop.rename import SUFFIXES, Rule, map_weights
from monoblock.interop.weights import SafetensorsWeights, WeightReader, build_on_meta, check_names, read_weights
from monoblock.untrusted_files import short_repr

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from monoblock.nn.transformer import Transformer


# Families that are asked for, and why the block cannot compute them.
DISENTANGLED = "each head adds scores between contents and relative positions, which the block does not have"
LATENT = "its attention keeps a latent vector for keys and values (MLA), which the block does not have"
UNSUPPORTED_FAMILIES = {
    "deberta": DISENTANGLED,
    "deberta-v2": DISENTANGLED,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "minicpm3": LATENT,
}
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*DECODERS, *ENCODERS, *SEQ2SEQ)}


# -- configurations ---------------------------------------------------------------------------------------------------


def find_family(fields: Mapping[str, Any]) -> tuple[Family, str]:
    """Return the family and the class name of a model, from the fields of its config.json.

    A file without model_type (transformers wrote them until 2020) has the family of its class.
    """
    model_type, classes = fields.get("model_type"), fields.get("architectures")
    if classes is not None and (not isinstance(classes, list) or [type(name) for name in classes] != [str]):
        raise FileError(f"architectures={short_repr(classes)} is not a list of one class name")
    if model_type is None and classes is not None:
        model_type = next((family.model_type for family in FAMILIES.values() if classes[0] in family.classes), None)
    if isinstance(model_type, str) and model_type in UNSUPPORTED_FAMILIES:
        raise FileError(f"model_type={model_type!r} is not supported: {UNSUPPORTED_FAMILIES[model_type]}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = did_you_mean(str(model_type), FAMILIES)
        raise FileError(f"model_type={short_repr(model_type)} is none of the {len(FAMILIES)} supported families{hint}")
    family = FAMILIES[model_type]
    name = next(iter(family.classes)) if classes is None else classes[0]
    return family, family.class_aliases.get(name, name)


def config_from_hf(fields: Mapping[str, Any], ignore_fields: Sequence[str] = ()) -> ModelConfig:
    """Convert the fields of a config.json to a configuration; tie_word_embeddings decides if the output is tied."""
    fields = without_fields(fields, ignore_fields)
    family, name = find_family(fields)
    tied = bool(fields.get("tie_word_embeddings", family.tied_by_default))
    return family.build_config(family.config_tree(fields, name), fields, tied=tied)


# -- weights ----------------------------------------------------------------------------------------------------------


def load_hf(
    cls: type[Transformer],
    path: Path,
    fields: Mapping[str, Any],
    weights: SafetensorsWeights,
    ignore_fields: Sequence[str],
    *,
    dtype: torch.dtype,
    device: str,
    mesh: DeviceMesh | None,
) -> Transformer:
    """Load the model of a Hugging Face folder, or the parts of this process; errors name the folder `path`."""
    try:
        fields = without_fields(fields, ignore_fields)
        family, class_name = find_family(fields)
        tree = family.config_tree(fields, class_name)
        rules = family.weight_rules(family.build_config(tree, fields, tied=False), class_name)
        stored = stored_names(weights, family, rules)
        names = {key: originals[0] for key, originals in stored.items()}
        has_vocabulary_head = tree["head"] is not None and tree["head"]["kind"] in VOCABULARY_HEADS
        output = next((r.theirs for r in rules if r.ours in ("head.output", "head.output.weight")), None)
        tied = has_vocabulary_head and output is not None
        if output is not None and tied:
            output = f"{output.removesuffix('.weight')}.weight"
            if output in stored:  # tied only if the configuration says so, and it is equal to the embedding
                table = "target.token" if tree["target"] is not None and not tree["share"] else "input.token"
                embedding = stored.get(next(f"{rule.theirs}.weight" for rule in rules if rule.ours == table))
                declared = bool(fields.get("tie_word_embeddings", family.tied_by_default))
                tied = declared and embedding is not None and _are_equal(weights, [*stored[output], *embedding])
        config = family.build_config(tree, fields, tied=tied)
        model: Transformer = build_on_meta(cls, config, len(weights))
        shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
        mappings = list(map_weights(rules, shapes, config))
        required = {key: None for mapping in mappings for key in mapping.theirs}
        ignored = [_compile_pattern(name) for name in family.ignored_weights]
        unneeded = {key for key in names if key not in required and any(p.fullmatch(key) for p in ignored)}
        check_names(names, required, unneeded | ({output} if tied and output else set()))
        for key in required:
            if not _are_equal(weights, stored[key]):
                raise FileError(
                    f"its {' and '.join(map(short_repr, stored[key]))} should be one tensor, but they differ"
                )
        state = read_weights(model, mappings, names, WeightReader(weights, dtype, device), mesh)
        model.load_state_dict(state, assign=True, strict=True)
        return model
    except (ConfigError, FileError) as error:
        message = str(error)
        raise FileError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def stored_names(stored: Iterable[str], family: Family, rules: Sequence[Rule]) -> dict[str, list[str]]:
    """Return the names of tensors in a file, by the names in a family's rules.

    The file may leave out the prefix of the family, or use an older spelling or an alias of a name; there are several
    names if a tensor is stored under its own name and an alias.
    """
    ignored, names = [_compile_pattern(name) for name in family.ignored_weights], dict[str, list[str]]()
    for original in stored:
        name = original
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if not _has_rule(tuple(rules), name):
            known = name.startswith(family.prefix) or name in family.weight_aliases
            name = name if known or any(pattern.fullmatch(name) for pattern in ignored) else family.prefix + name
        if not _has_rule(tuple(rules), name):
            name = family.weight_aliases.get(name, name)
        names.setdefault(name, []).append(original)
    return names


@cache
def _compile_pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+").replace(r"\#", r"\d+"))


@cache
def _has_rule(rules: Sequence[Rule], name: str) -> bool:
    """Return whether one of the rules is for this Hugging Face weight name."""
    return any(_compile_pattern(rule.theirs).fullmatch(name.removesuffix(end)) for rule in rules for end in SUFFIXES)


def _are_equal(weights: SafetensorsWeights, names: Sequence[str]) -> bool:
    first, *others = names
    return all(
        weights.shapes[first] == weights.shapes[other] and torch.equal(weights[first], weights[other])
        for other in others
    )
