"""Write a Transformer as a Hugging Face folder that transformers loads with the same weights and logits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError, FileError, InputError, did_you_mean
from monoblock.interop.huggingface.equivalents import Form, equivalent_forms
from monoblock.interop.huggingface.families import FAMILIES
from monoblock.interop.huggingface.family import Family
from monoblock.interop.rename import TensorMapping, map_weights
from monoblock.interop.weights_writer import MAX_SHARD_SIZE, TensorFactory, commit_file, save_weights
from monoblock.quantization.convert import merge_adapters

if TYPE_CHECKING:
    from monoblock.nn.transformer import Transformer

CONFIG_FILE = "config.json"
MAX_REASONS = 3  # families named in an error
# Written as null unless given, since otherwise transformers takes the ids of a published model.
TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
START_FIELD = "decoder_start_token_id"
TOKEN_ID_FIELDS_OF_FAMILY = {
    "encoder-only": ("cls_token_id", "sep_token_id"),
    "encoder-decoder": (START_FIELD, "forced_bos_token_id", "forced_eos_token_id"),
}


def choose_family(config: ModelConfig, model_type: str | None = None) -> tuple[Family, str, dict[str, Any]]:
    """Return the first Hugging Face family that can express a configuration, the class name and the config.json fields.

    If `model_type` is given, only the family with this model_type is tried.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(f"there is no Hugging Face family {model_type!r}{did_you_mean(model_type, FAMILIES)}")
    if config.quantize is not None:
        raise ConfigError(
            "a quantized model cannot be written as a Hugging Face folder; convert the model before quantizing"
        )
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


def choose_form(
    config: ModelConfig, model_type: str | None, special_token_ids: Mapping[str, int]
) -> tuple[Form, Family, str, dict[str, Any]]:
    """Return what `choose_family` returns, for the model itself or else for an equivalent form of it, and this form."""
    errors = []
    for form in (Form(config, lambda weights: weights), *equivalent_forms(config, special_token_ids)):
        try:
            return form, *choose_family(form.config, model_type)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def export_hf(
    model: Transformer,
    folder: str | Path,
    *,
    family: str | None = None,
    special_token_ids: Mapping[str, int] | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write a folder that transformers loads with the same weights and logits; LoRA adapters are written merged.

    family: the model_type to write; by default the first that can express the model.
    special_token_ids: fields of config.json such as eos_token_id, with their values.
    max_shard_size: the maximum size of a weights file in bytes.
    """
    model, special_token_ids = merge_adapters(model), special_token_ids or {}
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise InputError("a model on the meta device has no weights to save; build it on a real device first")
    (config, convert), chosen, class_name, fields = choose_form(model.config, family, special_token_ids)
    state = convert(dict(state))
    read = {field for rule in chosen.fields for field in rule.defaults}  # fields that follow from the configuration
    ids: dict[str, Any] = dict.fromkeys((*TOKEN_ID_FIELDS, *TOKEN_ID_FIELDS_OF_FAMILY.get(config.family, ())))
    fields = ids | fields | {field: id_ for field, id_ in special_token_ids.items() if field not in read}
    if fields.get(START_FIELD, 0) is None:  # it must be a number; `generate` starts with the same one
        fields[START_FIELD] = 0 if fields["pad_token_id"] is None else fields["pad_token_id"]
    fields["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    omitted_prefix = chosen.prefix if class_name in chosen.unprefixed_classes else ""
    rules = chosen.weight_rules(config, class_name)
    factories, sizes = list[dict[str, TensorFactory]](), dict[str, int]()
    for mapping in map_weights(rules, {name: tensor.shape for name, tensor in state.items()}, config):
        tensors = _LazyTensors(mapping, [state[name] for name in mapping.ours])
        names = [name.removeprefix(omitted_prefix) for name in mapping.theirs]
        factories.append({name: tensors.factory(index) for index, name in enumerate(names)})
        sizes |= dict.fromkeys(names, sum(state[name].nbytes for name in mapping.ours) // len(names))
    folder = Path(folder)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(folder, factories, sizes, max_shard_size)
        (folder / f"{CONFIG_FILE}.tmp").write_text(text, encoding="utf-8")
        commit_file(folder / CONFIG_FILE)
    except OSError as error:
        raise FileError(f"the model cannot be written to {folder}: {error.strerror or error}") from None


class _LazyTensors:
    """The Hugging Face tensors of one mapping, computed when the first is needed and freed after the last."""

    def __init__(self, mapping: TensorMapping, ours: Sequence[Tensor]) -> None:
        self.mapping, self.ours = mapping, ours
        self.tensors: list[Tensor | None] = []

    def factory(self, index: int) -> TensorFactory:
        def take() -> Tensor:
            if not self.tensors:
                self.tensors = list(self.mapping.save(self.ours))
            tensor, self.tensors[index] = self.tensors[index], None
            assert tensor is not None
            if all(left is None for left in self.tensors):
                self.tensors = []
            return tensor

        return take
