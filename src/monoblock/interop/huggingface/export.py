"""Write a Transformer as a Hugging Face folder that transformers loads with the same weights and logits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoblock.config.model import EmbeddingConfig, Learned, ModelConfig, Sinusoid
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.huggingface.family import Family
from monoblock.interop.huggingface.field_rules import config_difference, is_harmless
from monoblock.interop.huggingface.load import FAMILIES, find_family
from monoblock.interop.model_folder import CONFIG_FILE, label_fields, parse_dtype
from monoblock.interop.rename import map_weights
from monoblock.interop.save import (
    START_FIELD,
    TOKEN_ID_FIELDS,
    TOKEN_ID_FIELDS_OF_FAMILY,
    Companions,
    choose_dtype,
    read_companions,
    state_to_save,
    writing,
)
from monoblock.interop.weights import MAX_SHARD_SIZE, save_weights
from monoblock.nn.arguments import check_model
from monoblock.nn.positions import sinusoid
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import dequantize, merge_adapters
from monoblock.untrusted_files import write_atomically

MAX_REASONS = 3  # families named in an error


def choose_family(config: ModelConfig, model_type: str | None = None) -> tuple[Family, str, dict[str, Any]]:
    """Return the first Hugging Face family that can express a configuration, the class name and the config.json fields.

    If `model_type` is given, only the family with this model_type is tried.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(f"there is no Hugging Face family {model_type!r}{did_you_mean(model_type, FAMILIES)}")
    kind = None if config.head is None else config.head.kind
    kind = "classifier" if kind == "regression" else kind  # the same classes, with another problem_type
    reason, reasons = "", []
    for family in [FAMILIES[model_type]] if model_type is not None else FAMILIES.values():
        for name, head in family.classes.items():
            if (None if head is None else head["kind"]) != kind:
                continue
            try:
                return family, name, family.write_config(config, name)
            except ConfigError as error:
                reason = str(error)
                reasons += [reason] if "cannot express" in reason else []
    if model_type is not None:
        raise ConfigError(
            f"this {config.family} model cannot be written as {model_type}: "
            f"{reason or 'that family has no class with this head'}"
        )
    details = f": {'; '.join(reasons[:MAX_REASONS])}" if reasons else ""
    raise ConfigError(f"no Hugging Face family can express this {config.family} model{details}")


def export_hf(
    model: Transformer,
    folder: str | Path,
    *,
    family: str | None = None,
    special_token_ids: Mapping[str, int] | None = None,
    dtype: torch.dtype | str | None = None,
    companions: Companions | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write a folder that transformers loads with the same weights and logits.

    A model that was loaded is written with the tokenizer, the labels, the settings of generation and the other fields
    that lay beside it.  LoRA adapters are written merged, and a quantized model is dequantized.

    family: the model_type to write; by default that of the folder the model was loaded from, else the first that can
        express the model.
    special_token_ids: fields of config.json such as eos_token_id, with their values.
    dtype: the dtype of the weights; by default that of the files the model was loaded from if it holds the weights
        exactly, else that of the model.
    companions: what else is written; by default what lies beside the weights that the model was loaded from.
    max_shard_size: the maximum size of a weights file in bytes.
    """
    check_model(model, Transformer, "export_hf")
    companions = read_companions(model.loaded_from) if companions is None else companions
    model = merge_adapters(model)
    if model.config.quantize is not None:
        warnings.warn(f"the weights are dequantized from {model.config.quantize.bits} bits", stacklevel=2)
        model = dequantize(model)
    ids = companions.special_token_ids(model.config.family) | dict(special_token_ids or {})
    state = state_to_save(model)
    (config, convert), chosen, class_name, fields = choose_form(model.config, family, companions.model_type, ids)
    state = convert(dict(state))
    stored = parse_dtype(dtype) if dtype else choose_dtype(state, companions.dtype)
    fields = _with_companions(fields, chosen, config, companions, ids, special_token_ids or {})
    fields["dtype"] = str(stored or next(iter(state.values())).dtype).removeprefix("torch.")
    omitted_prefix = chosen.prefix if class_name in chosen.unprefixed_classes else ""
    rules = chosen.weight_rules(config, class_name)
    mappings = list(map_weights(rules, {name: tensor.shape for name, tensor in state.items()}, config))
    folder = Path(folder)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    with writing(folder):
        save_weights(folder, state, mappings, stored, max_shard_size, omitted_prefix)
        companions.write(folder, config, published=True)
        write_atomically(folder / CONFIG_FILE, text)


def choose_form(
    config: ModelConfig, model_type: str | None, source_type: str | None, ids: Mapping[str, int]
) -> tuple[Form, Family, str, dict[str, Any]]:
    """Return what `choose_family` returns, for the model itself or else for an equivalent form of it, and this form.

    model_type: the only family that is tried; if None, the family of the source (`source_type`), and then all.
    ids: fields of config.json such as pad_token_id, with their values.
    """
    reasons = dict[str | None, ConfigError]()
    for wanted in dict.fromkeys((model_type or source_type, model_type)):
        for form in (Form(config, lambda weights: weights), *equivalent_forms(config, ids)):
            try:
                chosen = choose_family(form.config, wanted)
            except ConfigError as error:
                reasons.setdefault(wanted, error)
                continue
            if wanted is None and source_type is not None:
                warnings.warn(f"written as {chosen[0].model_type}: {reasons[source_type]}", stacklevel=3)
            return form, *chosen
    raise reasons[model_type]


def _with_companions(
    fields: dict[str, Any],
    chosen: Family,
    config: ModelConfig,
    companions: Companions,
    ids: Mapping[str, Any],
    given_ids: Mapping[str, Any],
) -> dict[str, Any]:
    """Add the labels, the token ids and the other fields of the source to those that follow from the configuration."""
    known, tied = {field for rule in chosen.fields for field in rule.defaults}, fields["tie_word_embeddings"]
    if companions.model_type != chosen.model_type:
        # null unless given, since otherwise transformers takes the ids of a published model
        names = (*TOKEN_ID_FIELDS, *TOKEN_ID_FIELDS_OF_FAMILY.get(config.family, ()))
        fields = dict.fromkeys(names) | fields | {field: id_ for field, id_ in ids.items() if field not in known}
        if fields.get(START_FIELD, 0) is None:
            # it must be a number; `generate` starts with the same one
            fields[START_FIELD] = 0 if fields.get("pad_token_id") is None else fields["pad_token_id"]
    else:
        # The source may say the same in another way, and has the fields that change no output.
        (class_name,), source = fields["architectures"], dict(companions.fields)
        if config.head is not None and config.head.kind in VOCABULARY_HEADS:
            source["tie_word_embeddings"] = tied
        try:
            read = chosen.build_config(chosen.config_tree(source, class_name), source, tied=tied)
            same = find_family(source)[1] == class_name and config_difference(config, read) is None
        except (ConfigError, FileError):
            same = False
        if same:
            fields = source | {"architectures": [class_name]}
        else:
            replaced = known | {*chosen.field_aliases}
            kept = {name: x for name, x in source.items() if name not in replaced and is_harmless(name, x)}
            fields = kept | fields
        fields |= {field: id_ for field, id_ in given_ids.items() if field not in known}
    labels = companions.labels_for(config)
    return fields | (label_fields(labels) if labels else {})


# -- equivalent configurations -----------------------------------------------------------------------------------------


Weights = dict[str, Tensor]
# The axis of a weight that is the residual stream, by the end of its name; the first pattern that matches decides.
RESIDUAL_AXES = (
    ("*norm.weight", 0),
    ("*norm.bias", 0),
    ("*.token.weight", 1),
    ("head.output.weight", 1),
    ("*coder.*.output.*", 0),
    ("*.down.*", 0),
    ("*coder.*.weight", 1),  # query, key, value, up and gate read it
)


class Form(NamedTuple):
    """A configuration, and the function that converts the weights of the model to it."""

    config: ModelConfig
    convert: Callable[[Weights], Weights]


def equivalent_forms(config: ModelConfig, ids: Mapping[str, int]) -> Iterator[Form]:
    """Yield other forms of a model, each of which some family may be able to express; for `ids`, see `choose_form`."""
    source, positions = config.input, getattr(config.input, "positions", None)
    if not isinstance(source, EmbeddingConfig) or config.head is None:
        return
    pad = ids.get("pad_token_id")
    if config.family == "encoder-only" and positions == Learned() and pad is not None:
        yield _offset_positions(config, source, pad + 1)
    if config.family == "encoder-decoder" and isinstance(positions, Sinusoid) and source.context is not None:
        config, convert = _separate_target(config, source)
        if positions == Sinusoid() and config.width % 2 == 0:
            yield _reorder_sinusoids(config, convert)
        yield _store_positions(config, convert)


def _offset_positions(config: ModelConfig, source: EmbeddingConfig, offset: int) -> Form:
    """Number positions from `offset` on, as RoBERTa does; the rows of the table before it are not used."""

    def convert(weights: Weights) -> Weights:
        table = weights["input.position.weight"]
        return weights | {"input.position.weight": torch.cat([table.new_zeros(offset, table.shape[1]), table])}

    return Form(replace(config, input=replace(source, positions=Learned(offset=offset))), convert)


def _separate_target(config: ModelConfig, source: EmbeddingConfig) -> Form:
    """Give source and target one configuration each, and the output a bias of zeros."""
    assert config.head is not None
    target = config.target or source
    head = replace(config.head, bias="fixed") if config.head.bias == "none" else config.head

    def convert(weights: Weights) -> Weights:
        if head == config.head:
            return weights
        token = weights.get("target.token.weight", weights["input.token.weight"])
        return weights | {"head.fixed_bias": token.new_zeros(target.vocab)}

    return Form(replace(config, target=target, head=head), convert)


def _reorder_sinusoids(config: ModelConfig, convert: Callable[[Weights], Weights]) -> Form:
    """Put all sines before all cosines, as Marian does, by reordering the features of the whole residual stream."""
    halves = Sinusoid(form="halves")
    order = torch.arange(config.width).view(-1, 2).T.flatten()  # 0, 2, 4, …, 1, 3, 5, …

    def reorder(weights: Weights) -> Weights:
        reordered = {}
        for name, tensor in convert(weights).items():
            axis = next((axis for pattern, axis in RESIDUAL_AXES if fnmatchcase(name, pattern)), None)
            reordered[name] = tensor if axis is None else tensor.index_select(axis, order.to(tensor.device))
        return reordered

    return Form(_with_positions(config, halves), reorder)


def _store_positions(config: ModelConfig, convert: Callable[[Weights], Weights]) -> Form:
    """Store the sinusoids as a table, as Pegasus does."""

    def store(weights: Weights) -> Weights:
        weights = convert(weights)
        token = weights["input.token.weight"]
        for name, part in (("input", config.input), ("target", config.target)):
            assert isinstance(part, EmbeddingConfig)
            assert isinstance(part.positions, Sinusoid)
            assert part.context is not None
            positions = torch.arange(part.context, device=token.device)
            weights[f"{name}.position.weight"] = sinusoid(positions, config.width, part.positions).to(token.dtype)
        return weights

    return Form(_with_positions(config, Learned()), store)


def _with_positions(config: ModelConfig, positions: Learned | Sinusoid) -> ModelConfig:
    parts = {"input": config.input, "target": config.target}
    return replace(config, **{name: replace(part, positions=positions) for name, part in parts.items()})  # type: ignore
