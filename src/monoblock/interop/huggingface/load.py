"""Load a Hugging Face folder as a Transformer.

config.json states a family (model_type) and a class.  Its fields are converted to a configuration (field_rules.py), and
the stored tensors to weights (rename.py), by the rules of the family.  Whether the output is tied to the embedding is
decided by the stored tensors.  No code in the folder is run, no file outside it is opened, and a missing or unexpected
tensor is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monoblock.config.model import ModelConfig
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.huggingface.decoders import DECODERS
from monoblock.interop.huggingface.encoder_decoders import SEQ2SEQ
from monoblock.interop.huggingface.encoders import ENCODERS
from monoblock.interop.huggingface.family import Family
from monoblock.interop.huggingface.field_rules import without_fields
from monoblock.interop.huggingface.vision_audio import VISION_AUDIO
from monoblock.interop.rename import SUFFIXES, Rule, TensorMapping, map_weights
from monoblock.interop.weights import SafetensorsWeights, WeightReader, build_on_meta, split_weights
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
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION_AUDIO)}


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
    return family.build_config(family.apply_tying(family.config_tree(fields, name), fields, tied), tied=tied)


# -- weights ----------------------------------------------------------------------------------------------------------


class StoredNames:
    """The tensor names in a file, found by the names in a family's rules.

    The file may leave out the prefix of the family, or use an older spelling or an alias of a name.
    """

    def __init__(self, weights: SafetensorsWeights, family: Family, rules: Sequence[Rule]) -> None:
        self.ignored = [_compile_pattern(name) for name in family.ignored_weights]
        self.aliases, self.prefix, self.rules = family.weight_aliases, family.prefix, tuple(rules)
        self.originals = {self._normalize(name): name for name in weights}

    def __contains__(self, name: str) -> bool:
        return name in self.originals or any(alias in self.originals for alias in self._aliases_of(name))

    def __getitem__(self, name: str) -> str:
        known = next((key for key in (name, *self._aliases_of(name)) if key in self.originals), None)
        if known is None:
            raise KeyError(name)
        return self.originals[known]

    def _normalize(self, name: str) -> str:
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            name = name.removesuffix(old) + new if name.endswith(old) else name
        full = name.startswith(self.prefix) or name in self.aliases or any(p.fullmatch(name) for p in self.ignored)
        return name if full or _has_rule(self.rules, name) else self.prefix + name

    def _aliases_of(self, name: str) -> Iterator[str]:
        return (alias for alias, target in self.aliases.items() if target == name)

    def duplicates(self, used: set[str]) -> Iterator[tuple[str, str]]:
        """Yield pairs of stored names, an alias and the name it stands for, whose tensors must be equal."""
        for alias, target in self.aliases.items():
            if target in used and target in self.originals and alias in self.originals:
                yield self.originals[alias], self.originals[target]

    def unexpected(self, used: set[str]) -> list[str]:
        """Return the stored names that are neither used, nor aliases of used names, nor ignored."""
        rest = (name for name in self.originals if name not in used and self.aliases.get(name) not in used)
        return sorted(self.originals[name] for name in rest if not any(p.fullmatch(name) for p in self.ignored))


@cache
def _compile_pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+").replace(r"\#", r"\d+"))


@cache
def _has_rule(rules: Sequence[Rule], name: str) -> bool:
    """Return whether one of the rules is for this Hugging Face weight name."""
    return any(_compile_pattern(rule.theirs).fullmatch(name.removesuffix(end)) for rule in rules for end in SUFFIXES)


def load_hf(
    cls: type[Transformer],
    path: Path,
    fields: Mapping[str, Any],
    weights: SafetensorsWeights,
    ignore_fields: Sequence[str],
    **options: Any,
) -> Transformer:
    """Load the model of a Hugging Face folder, or the parts of this process; errors name the folder `path`."""
    try:
        return _load(cls, without_fields(fields, ignore_fields), weights, **options)
    except (ConfigError, FileError) as error:
        message = str(error)
        raise FileError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def _load(
    cls: type[Transformer],
    fields: Mapping[str, Any],
    weights: SafetensorsWeights,
    *,
    dtype: torch.dtype,
    device: str,
    mesh: DeviceMesh | None,
) -> Transformer:
    family, name = find_family(fields)
    tree = family.config_tree(fields, name)
    rules = family.weight_rules(family.build_config(tree, tied=False), name)
    names = StoredNames(weights, family, rules)
    has_vocabulary_head = tree["head"] is not None and tree["head"]["kind"] in VOCABULARY_HEADS
    output = _output_name(rules) if has_vocabulary_head else None
    declared_tied = bool(fields.get("tie_word_embeddings", family.tied_by_default))
    tied = output is not None and _is_tied(output, names, weights, rules, tree, declared_tied)
    config = family.build_config(family.apply_tying(tree, fields, tied), tied=tied)
    model = build_on_meta(cls, config, len(weights))
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    mappings = list(map_weights(rules, shapes, config))
    _check_names(mappings, names, weights, {output} if tied and output else set())
    reader, state, parts = WeightReader(weights, dtype, device), dict[str, Tensor](), split_weights(model, mesh)

    def load_parts(mapping: TensorMapping, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        tensors = mapping.load(stored)
        for key, tensor in zip(mapping.ours, tensors, strict=True):
            if tensor.shape != shapes[key]:
                difference = f"{tuple(tensor.shape)}, but the configuration requires {tuple(shapes[key])}"
                raise FileError(f"{short_repr(names[mapping.theirs[0]])} becomes {key} with shape {difference}")
        return parts.select(mapping.ours, tensors)

    for mapping in mappings:
        tensors = reader.load([names[key] for key in mapping.theirs], partial(load_parts, mapping))
        state |= {key: parts.join(key, tensor) for key, tensor in zip(mapping.ours, tensors, strict=True)}
    model.load_state_dict(state, assign=True, strict=True)
    return model


def _output_name(rules: Sequence[Rule]) -> str | None:
    """Return the Hugging Face name of the output matrix in these rules, or None."""
    rule = next((rule for rule in rules if rule.ours in ("head.output", "head.output.weight")), None)
    return None if rule is None else f"{rule.theirs.removesuffix('.weight')}.weight"


def _is_tied(
    output: str,
    names: StoredNames,
    weights: SafetensorsWeights,
    rules: Sequence[Rule],
    tree: Mapping[str, Any],
    declared_tied: bool,
) -> bool:
    """Return whether the output is tied: its matrix is not stored, or declared tied and equal to the embedding."""
    if output not in names.originals:
        return True
    token_table = "target.token" if tree["target"] is not None and not tree["share"] else "input.token"
    embedding = next(f"{rule.theirs}.weight" for rule in rules if rule.ours == token_table)
    if not declared_tied or embedding not in names:
        return False
    first, second = names.originals[output], names[embedding]
    return weights.shapes[first] == weights.shapes[second] and torch.equal(weights[first], weights[second])


def _check_names(
    mappings: Sequence[TensorMapping], names: StoredNames, weights: SafetensorsWeights, optional: set[str]
) -> None:
    required = [key for mapping in mappings for key in mapping.theirs]
    missing = [key for key in required if key not in names]
    unexpected = names.unexpected({*required, *optional})
    for keys, problem in ((missing, "lacks the tensor"), (unexpected, "has a tensor that this family does not use")):
        if keys:
            rest = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise FileError(f"it {problem}: {short_repr(keys[0])}{rest}")
    for first, second in names.duplicates(set(required)):
        if not torch.equal(weights[first], weights[second]):
            raise FileError(f"its {short_repr(first)} and {short_repr(second)} should be one tensor, but they differ")
