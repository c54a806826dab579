"""Save and load LoRA adapters in peft's format: the files adapter_config.json and adapter_model.safetensors.

Projections have the names of the model's Hugging Face family, or our own names if no family can express the model.  If
the family stores query, key and value in one matrix and our model has three, the three adapters are stored as one of a
larger rank: their A matrices are stacked, and their B matrices form one block-diagonal matrix.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from monoblock.config.model import HeadConfig, ModelConfig
from monoblock.config.schema import from_dict, to_dict
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.interop.huggingface.export import choose_family
from monoblock.interop.model_folder import write_labels
from monoblock.interop.rename import CONV1D, CONV1D_QKV, map_weights
from monoblock.interop.weights import (
    SafetensorsWeights,
    TensorMapping,
    build_on_meta,
    commit_file,
    same_names,
    write_safetensors,
)
from monoblock.nn.arguments import check_model
from monoblock.nn.heads import Head
from monoblock.nn.lora import LoraLinear, linear_shape, lora_layers, replace_module
from monoblock.nn.transformer import Transformer
from monoblock.untrusted_files import (
    has_file,
    read_json,
    reading,
    safe_join,
    short_repr,
    write_atomically,
)

ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
DIGEST_KEY = "monoblock_base"  # key in the metadata of the weights file, which peft ignores
PEFT_CLASSIFIERS = ("classifier", "score")  # modules that peft adds to modules_to_save of a classifier or tagger
SUPPORTED_VALUES = {
    "bias": "none",
    "use_dora": False,
    "layer_replication": None,
    "lora_bias": False,
    "alora_invocation_tokens": None,
}


# -- writing ----------------------------------------------------------------------------------------------------------


def save_adapter(
    model: Transformer,
    folder: str | Path,
    *,
    base: str | None = None,
    digest: str | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Write the adapters of a model, and its other trained weights such as those of a new head, as peft does.

    base: the name or path of the model that the adapters were trained for.
    digest: identifies the weights of that model (`compute_digest`).
    labels: the class names of the head.
    """
    check_model(model, Transformer, "save_adapter")
    layers = dict(lora_layers(model))
    if not layers:
        raise InputError("this model has no adapters to save; add them to its projections with add_lora")
    names, tensors, sizes = build_adapter_names(model.config), dict[str, Tensor](), dict[str, tuple[int, float]]()
    fan_in_fan_out = False
    for mapping in names.mappings:
        modules = module_names(mapping)
        adapters = [layers.get(name) for name in modules]
        if any(adapter is not None for adapter in adapters):
            shapes = [linear_shape(model.get_submodule(name)) for name in modules]
            a, b, scale = _join_adapters(mapping, adapters, shapes)
            name = names.module_name(mapping)
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            sizes[name] = a.shape[0], scale * a.shape[0]
            fan_in_fan_out |= mapping.transform in (CONV1D, CONV1D_QKV)
    head_weights = collect_head_weights(model, names)
    config = _build_config(model, names, sizes, next(iter(layers.values())).dropout, sorted(head_weights))
    config |= {"base_model_name_or_path": base, "fan_in_fan_out": fan_in_fan_out}
    metadata = {"format": "pt"} | ({} if digest is None else {DIGEST_KEY: digest})
    if head_weights and model.config.head is not None:
        metadata[HEAD_KEY] = json.dumps({"head": to_dict(model.config.head), "tie": model.config.tie})
    stored = {
        f"{PEFT_PREFIX}{key}": tensor.detach().cpu().contiguous() for key, tensor in (tensors | head_weights).items()
    }
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / ADAPTER_WEIGHTS_FILE, stored, metadata)
        commit_file(folder / ADAPTER_WEIGHTS_FILE)
        write_atomically(folder / ADAPTER_CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise FileError(f"the adapter cannot be written to {folder}: {error.strerror or error}") from None
    if labels:
        write_labels(folder, labels, "monoblock")


@torch.no_grad()
def _join_adapters(
    mapping: TensorMapping, adapters: Sequence[LoraLinear | None], shapes: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, float]:
    """Return A, B and the scale of one stored adapter.

    adapters: the adapters of our modules that the family stores as one matrix, None for modules without an adapter.
    shapes: the weight shape (out, in) of each module.
    """
    present = [adapter for adapter in adapters if adapter is not None]
    first = present[0]
    if len(adapters) == 1:
        return first.a, first.b, first.scale
    a: Tensor = first.a
    b_parts: list[Tensor] = [adapter.b for adapter in present]
    complete = len(present) == len(adapters)
    if not complete or any(not torch.equal(p.a, first.a) or p.scale != first.scale for p in present):
        # The adapters have different A matrices, unlike those loaded from one stored adapter: B becomes block-diagonal.
        a, rank, start = torch.cat([adapter.a for adapter in present]), sum(adapter.rank for adapter in present), 0
        b_parts = []
        for adapter, (out_features, _) in zip(adapters, shapes, strict=True):
            b_part = a.new_zeros(out_features, rank)
            if adapter is not None:
                b_part[:, start : start + adapter.rank] = adapter.b * (adapter.scale / first.scale)
                start += adapter.rank
            b_parts.append(b_part)
    b = mapping.save(b_parts)[0]
    return a, b.T if mapping.transform is CONV1D_QKV else b, first.scale


def _build_config(
    model: Transformer,
    names: AdapterNames,
    sizes: Mapping[str, tuple[int, float]],
    dropout: float,
    head_weights: Sequence[str],
) -> dict[str, Any]:
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    config, head = model.config, model.config.head
    task = PEFT_TASK_TYPES.get(head.kind) if head is not None else None
    if head is not None and head.kind == "language_model":
        task = "CAUSAL_LM" if config.family == "decoder-only" else "SEQ_2_SEQ_LM"
    # The last components of the modules' names, such as q_proj, unless these would also select other modules.
    suffixes = {name.rsplit(".", 1)[-1] for name in sizes}
    selected = {name for name in map(names.module_name, names.mappings) if name.rsplit(".", 1)[-1] in suffixes}
    # The module of each weight of the head, or the whole classifier as peft saves it.
    modules = ((name.split(".", 1)[0], name.rsplit(".", 1)[0]) for name in head_weights)
    modules_to_save = sorted({first if first in PEFT_CLASSIFIERS else module for first, module in modules})
    return {
        "peft_type": "LORA",
        "task_type": task,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(suffixes if selected == set(sizes) else sizes),
        "modules_to_save": modules_to_save or None,
        "rank_pattern": {name: r for name, (r, _) in sizes.items() if r != rank},
        "alpha_pattern": {name: a for name, (_, a) in sizes.items() if a != alpha},
        "bias": "none",
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


# -- reading ----------------------------------------------------------------------------------------------------------


def load_adapter(model: Transformer, folder: str | Path) -> list[str]:
    """Add the adapters in a folder to a model and freeze its other weights; return the names of the adapted modules.

    An adapter that monoblock trained together with a new head gives the model this head.
    Raise FileError if the adapters were made for a model of another structure or size.
    """
    check_model(model, Transformer, "load_adapter")
    folder = Path(folder)
    with reading(folder):
        for file in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE):
            if not has_file(folder, file):
                raise FileError(f"{folder} is not an adapter: it has no {file}")
        if any(True for _ in lora_layers(model)):
            raise InputError("this model has adapters already; merge them into its weights first with fold_lora")
        config = _check_config(read_json(safe_join(folder, ADAPTER_CONFIG_FILE)), folder)
        stored = SafetensorsWeights([safe_join(folder, ADAPTER_WEIGHTS_FILE)])
        head = build_stored_head(model, _read_metadata(folder), folder)
        names = build_adapter_names(model.config if head is None else head[0])
        adapters = dict(_build_adapters(model, names, stored, config, folder))
        state = model.state_dict()
        if head is not None:
            state = {name: tensor for name, tensor in state.items() if not name.startswith(HEAD_PREFIX)}
            state |= {f"{HEAD_PREFIX}{name}": tensor for name, tensor in head[1].state_dict().items()}
        head_weights = dict(load_head_weights(state, names, stored, folder))
        if head is not None:
            missing = next((name for name in state if name.startswith(HEAD_PREFIX) and name not in head_weights), None)
            if missing is not None:
                raise FileError(f"{folder} lacks {missing}, a weight of the head that it was trained with")
            model.config, model.head = head
        for weight in model.parameters():
            weight.requires_grad_(False)
        for name, adapter in adapters.items():
            replace_module(model, name, adapter)
        model.load_state_dict(head_weights, strict=False)
        return list(adapters)


def read_base_digest(folder: str | Path) -> str | None:
    """Return the digest of the weights that an adapter was trained for, or None if the file does not contain one."""
    return _read_metadata(Path(folder)).get(DIGEST_KEY)


def _read_metadata(folder: Path) -> dict[str, str]:
    with reading(folder), safe_open(safe_join(folder, ADAPTER_WEIGHTS_FILE), "pt") as file:
        return file.metadata() or {}


def _check_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    if config.get("peft_type") != "LORA":
        raise FileError(f"{folder}: peft_type={short_repr(config.get('peft_type'))} is not supported; only LORA is")
    unsupported = next((key for key, value in SUPPORTED_VALUES.items() if (config.get(key) or value) != value), None)
    if unsupported is not None:
        value = short_repr(config[unsupported])
        raise FileError(f"{folder}: {unsupported}={value} is a kind of LoRA that is not supported")
    for key in ("r", "lora_alpha"):
        if not _is_number(config.get(key)):
            raise FileError(f"{folder}: {key}={short_repr(config.get(key))} is not a number")
    dropout = config.get("lora_dropout") or 0.0
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise FileError(f"{folder}: lora_dropout={short_repr(dropout)} is not a rate; write 0 or more and less than 1")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
            raise FileError(f"{folder}: {key} is not a JSON object from names to numbers")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _build_adapters(
    model: Transformer, names: AdapterNames, stored: SafetensorsWeights, config: Mapping[str, Any], folder: Path
) -> Iterator[tuple[str, LoraLinear]]:
    """Yield (our module name, adapter) for each stored adapter.

    If the family stores several of our modules as one matrix, their adapters get the same A and their rows of B.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    for key in stored:
        match = LORA_WEIGHT.fullmatch(key.removeprefix(PEFT_PREFIX))
        if match:
            pairs.setdefault(match[1], {})[match[2]] = stored[key].float()
    if not pairs:
        raise FileError(f"{folder} is not a LoRA adapter: its {ADAPTER_WEIGHTS_FILE} has no lora_A and lora_B tensors")
    dropout, alpha_pattern = float(config.get("lora_dropout") or 0.0), config.get("alpha_pattern") or {}
    table = {mapping.theirs[0].removesuffix(".weight"): mapping for mapping in names.mappings}
    for name, pair in pairs.items():
        mapping = table.get(name) or table.get(names.prefix + name)
        if mapping is None or set(pair) != {"A", "B"} or mapping.ours[0].startswith(("input.", "target.", "head.")):
            raise FileError(f"{folder} is an adapter for another model: this model has no {short_repr(name)}")
        a, b = pair["A"], pair["B"]
        modules = module_names(mapping)
        shapes = [linear_shape(model.get_submodule(module)) for module in modules]
        expected = (sum(out_features for out_features, _ in shapes), shapes[0][1])
        fits = a.dim() == b.dim() == 2 and (b.shape[0], a.shape[1]) == expected and a.shape[0] == b.shape[1] > 0
        if not fits:
            product = f"{tuple(b.shape)} times {tuple(a.shape)}"
            raise FileError(
                f"{folder} is an adapter for another model: the product B A of {short_repr(name)} is {product}, "
                f"but the weight in this model has shape {expected}"
            )
        rank = a.shape[0]
        matches = (value for key, value in alpha_pattern.items() if re.fullmatch(rf"(.*\.)?{re.escape(key)}", name))
        alpha = float(next(matches, config["lora_alpha"]))
        # The product B A is multiplied by alpha / rank, or by alpha / sqrt(rank) in rsLoRA (Kalajdzievski 2023).
        scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
        parts = [b] if len(modules) == 1 else mapping.load([b.T if mapping.transform is CONV1D_QKV else b])
        for module, part in zip(modules, parts, strict=True):
            if part.any() or not b.any():
                adapter = LoraLinear(model.get_submodule(module), rank, scale * rank, dropout)
                adapter.a.data.copy_(a)
                adapter.b.data.copy_(part)
                yield module, adapter


# -- names of modules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterNames:
    """The correspondence between our weight names and the names in an adapter file."""

    mappings: list[TensorMapping]
    prefix: str = ""  # which begins all names of the family but the head's, such as "model."; files may leave it out
    omitted_prefix: str = ""  # equal to `prefix` if the class of this model stores names without it, else empty

    def module_name(self, mapping: TensorMapping) -> str:
        return mapping.theirs[0].removesuffix(".weight").removeprefix(self.omitted_prefix)


def build_adapter_names(config: ModelConfig) -> AdapterNames:
    config = replace(config, quantize=None)
    state = build_on_meta(Transformer, config, 10**6).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    try:
        family, class_name, _ = choose_family(config)
    except ConfigError:
        return AdapterNames(same_names(shapes))
    mappings = list(map_weights(family.weight_rules(config, class_name), shapes, config))
    return AdapterNames(mappings, family.prefix, family.prefix if class_name in family.unprefixed_classes else "")


def module_names(mapping: TensorMapping) -> list[str]:
    """Return our module names in a mapping; there are several if the family stores them as one matrix."""
    return [key.removesuffix(".weight") for key in mapping.ours if key.endswith(".weight")]


# -- the head of an adapter --------------------------------------------------------------------------------------------


HEAD_KEY = "monoblock_head"  # key in the metadata of the weights file, which peft ignores
HEAD_PREFIX = "head."
PEFT_PREFIX = "base_model.model."
PEFT_TASK_TYPES = {
    "classifier": "SEQ_CLS",
    "regression": "SEQ_CLS",
    "tagger": "TOKEN_CLS",
    "spans": "QUESTION_ANS",
}
LORA_WEIGHT = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


def collect_head_weights(model: Transformer, names: AdapterNames) -> dict[str, Tensor]:
    """Return the trained weights that are not adapters, by their names in the file.

    A head whose kind is in PEFT_TASK_TYPES is always included.
    """
    state = model.state_dict()
    has_classifier = model.config.head is not None and model.config.head.kind in PEFT_TASK_TYPES
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    trained |= {name for name in state if has_classifier and name.startswith(HEAD_PREFIX)}
    weights: dict[str, Tensor] = {}
    for mapping in names.mappings:
        if trained & set(mapping.ours):  # adapters have no mapping, so they are left out
            tensors = mapping.save([state[key] for key in mapping.ours])
            keys = [key.removeprefix(names.omitted_prefix) for key in mapping.theirs]
            weights |= dict(zip(keys, tensors, strict=True))
    return weights


def build_stored_head(model: Transformer, metadata: Mapping[str, str], folder: Path) -> tuple[ModelConfig, Head] | None:
    """Build the head that an adapter was trained with, and the configuration of the model with it.

    Return None if the model has this head already, or if the file does not describe its head.
    """
    text = metadata.get(HEAD_KEY)
    if text is None:
        return None
    try:
        data = json.loads(text)
        config = replace(model.config, head=from_dict(HeadConfig, data["head"], "head"), tie=data["tie"])
    except (ConfigError, ValueError, TypeError, KeyError) as error:
        raise FileError(f"{folder}: the head of this adapter does not fit: {error}") from None
    if config == model.config:
        return None
    dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
    return config, Head(config).to(model.device, dtype).train(model.training)


def load_head_weights(
    state: Mapping[str, Tensor], names: AdapterNames, stored: SafetensorsWeights, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) for stored weights that are not adapters, such as those of a new head.

    state: the weights of the model, by our names.
    """
    unprefixed = {key.removeprefix(PEFT_PREFIX): key for key in stored}
    keys = {name: key for name, key in unprefixed.items() if not LORA_WEIGHT.fullmatch(name)}
    known = {names.prefix + key: key for key in keys} | {key: key for key in keys}
    for mapping in names.mappings:
        if any(name in known for name in mapping.theirs):
            tensors = mapping.load([stored[keys.pop(known[name])] for name in mapping.theirs])
            for key, tensor in zip(mapping.ours, tensors, strict=True):
                if state[key].shape != tensor.shape:
                    name = short_repr(mapping.theirs[0])
                    shapes = f"{tuple(tensor.shape)}, but {tuple(state[key].shape)} in this model"
                    raise FileError(f"{folder} is an adapter for another model: {name} has shape {shapes}")
                yield key, tensor
    if keys:
        raise FileError(
            f"{folder} is an adapter for another model: this model has no {short_repr(min(keys))}; "
            "give a model with the head that the adapter was trained with"
        )
