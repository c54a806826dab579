"""The names of a model's weights in a PEFT adapter file: those of its Hugging Face family, else our own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from monoblock.errors import ConfigError
from monoblock.interop.huggingface.export import choose_family
from monoblock.interop.rename import AttentionShape, TensorMapping, map_weights
from monoblock.interop.safetensors_reader import build_on_meta
from monoblock.nn.transformer import Transformer


@dataclass(frozen=True)
class AdapterNames:
    """Pairs of our weight names and the names in an adapter file."""

    mappings: list[TensorMapping]
    prefix: str = ""  # of the family's names except those of the head, such as "model."
    omitted_prefix: str = ""  # the same prefix, if the class of this model omits it

    def module_name(self, mapping: TensorMapping) -> str:
        return mapping.theirs[0].removesuffix(".weight").removeprefix(self.omitted_prefix)

    def find(self, name: str) -> TensorMapping | None:
        """Return the mapping of a module by its name in the file, with or without the family's prefix; else None."""
        table = {mapping.theirs[0].removesuffix(".weight"): mapping for mapping in self.mappings}
        return table.get(name) or table.get(self.prefix + name)


def build_adapter_names(model: Transformer) -> AdapterNames:
    config = replace(model.config, quantize=None)
    state = build_on_meta(Transformer, config, 10**6).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    try:
        family, class_name, _ = choose_family(config)
    except ConfigError:
        return AdapterNames([TensorMapping((key,), (key,), None, AttentionShape()) for key in shapes])
    mappings = list(map_weights(family.weight_rules(config, class_name), shapes, config))
    return AdapterNames(mappings, family.prefix, family.prefix if class_name in family.unprefixed_classes else "")


def module_names(mapping: TensorMapping) -> list[str]:
    """Return our names of the modules whose weights a mapping joins."""
    return [key.removesuffix(".weight") for key in mapping.ours if key.endswith(".weight")]
