"""Weight names in a PEFT adapter file: those of the model's Hugging Face family or, if there is none, our own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError
from monoblock.interop.huggingface.export import choose_family
from monoblock.interop.rename import AttentionShape, TensorMapping, map_weights
from monoblock.interop.safetensors_reader import build_on_meta
from monoblock.nn.transformer import Transformer


@dataclass(frozen=True)
class AdapterNames:
    """The correspondence between our weight names and the names in an adapter file."""

    mappings: list[TensorMapping]
    prefix: str = ""  # with which all names of the family begin except the head's, such as "model."
    omitted_prefix: str = ""  # equal to `prefix` if the class of this model stores names without it, else empty

    def module_name(self, mapping: TensorMapping) -> str:
        return mapping.theirs[0].removesuffix(".weight").removeprefix(self.omitted_prefix)

    def find(self, name: str) -> TensorMapping | None:
        """Return the mapping of a module, given its name in the file with or without `prefix`; None if unknown."""
        table = {mapping.theirs[0].removesuffix(".weight"): mapping for mapping in self.mappings}
        return table.get(name) or table.get(self.prefix + name)


def build_adapter_names(config: ModelConfig) -> AdapterNames:
    config = replace(config, quantize=None)
    state = build_on_meta(Transformer, config, 10**6).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    try:
        family, class_name, _ = choose_family(config)
    except ConfigError:
        return AdapterNames([TensorMapping((key,), (key,), None, AttentionShape()) for key in shapes])
    mappings = list(map_weights(family.weight_rules(config, class_name), shapes, config))
    return AdapterNames(mappings, family.prefix, family.prefix if class_name in family.unprefixed_classes else "")


def module_names(mapping: TensorMapping) -> list[str]:
    """Return our module names in a mapping; there are several if the family stores them as one matrix."""
    return [key.removesuffix(".weight") for key in mapping.ours if key.endswith(".weight")]
