"""A warm start: `[model] folder` gives configuration, weights and tokenizer, the objective gives the head.

The folder is a run's, a Hugging Face folder or a GGUF file.  What regularises may be changed, what a weight is
multiplied with may not; a head of another kind begins anew, and all the rest goes on from where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monoblock.config import HeadConfig, ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, FileError, InputError, did_you_mean
from monoblock.interop.digest import digest_of
from monoblock.interop.folder import CONFIG, FORMAT, load_model, read_config
from monoblock.interop.hub import at_hand
from monoblock.interop.labels import labels_in
from monoblock.knobs import KNOBS, vary
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent
from monoblock.tasks import defaults as generation
from monoblock.tasks.folder import tokenizer_in, vocab_of
from monoblock.tokenizers.identity import check_belongs
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted import inside, present, read_json

# What may be changed of a model that has weights: they mean the same afterwards.
FREE = ("context", "dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout")
OF_THE_HEAD = ("head", "classes", "pooling", "pooler")  # a new head may be of any make
FRESH = "fresh"  # model.head: begin anew even where the kind is the same
POOLER = "head.pooler."  # it goes before several kinds of head, and is taken over by all of them


@dataclass(frozen=True)
class Start:
    """What a folder gives to begin with."""

    folder: Path
    model: Transformer | Recurrent  # as it is stored, fp32 on the CPU
    tokenizer: Tokenizer | None
    labels: tuple[str, ...]  # of its head, where it has names for them
    tokens: Mapping[str, Any]  # what ends its texts and pads them, what a target begins with

    @property
    def config(self) -> ModelConfig | RecurrentConfig:
        return self.model.config

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights, by name: a run that is resumed must have begun with the same."""
        return digest_of(self.model.state_dict())

    def keeps_head(self, kind: str, model: Mapping[str, Any]) -> bool:
        """Whether an objective goes on with the head there is."""
        head = self.config.head if isinstance(self.config, ModelConfig) else None
        return head is not None and head.kind == model.get("head", kind) == kind

    def agreed(self, labels: Sequence[str]) -> list[str]:
        """The labels of the head in its order, if it knows those of the data; the data's where it has no names."""
        unknown = next((label for label in labels if label not in self.labels), None)
        if not self.labels or unknown is None:
            return list(self.labels or labels)
        raise ConfigError(
            f"the data have a label {unknown!r}{did_you_mean(unknown, self.labels)} that the head of {self.folder} "
            f"does not know: it has {', '.join(self.labels[:8])}; write model.head={FRESH} to begin with a new one"
        )


def find(model: Mapping[str, Any]) -> Start | None:
    """The start that the [model] of a recipe names, or None."""
    if "folder" not in model:
        return None
    folder = _place(model["folder"])
    kind: Any = Recurrent if isinstance(stored_config(folder), RecurrentConfig) else Transformer
    loaded = load_model(kind, folder)
    tokenizer = _tokenizer(folder, loaded.config)
    return Start(folder, loaded, tokenizer, tuple(labels_in(folder)), _tokens(folder, tokenizer, loaded.config))


def _tokens(folder: Path, tokenizer: Tokenizer | None, config: ModelConfig | RecurrentConfig) -> dict[str, Any]:
    """The special tokens that the folder's own defaults name."""
    if tokenizer is None:
        return {}
    said = generation.read(folder, tokenizer)
    found = {name: said.options[name] for name in ("eos_token_id", "pad_token_id") if name in said.options}
    both = config.family == "encoder-decoder" if isinstance(config, ModelConfig) else config.kind == "encoder_decoder"
    return found | ({generation.START: said.start} if both else {})


def _place(given: Any) -> Path:
    folder = at_hand(str(given))
    if not folder.exists():
        raise FileError(
            f"model.folder={given}: there is no such folder; give a run, a Hugging Face folder or a .gguf file"
        )
    return folder


def stored_config(given: Any) -> ModelConfig | RecurrentConfig:
    """The configuration of what lies in a folder, without its weights."""
    folder = _place(given)
    if folder.is_file() and folder.suffix == ".gguf":
        from monoblock.interop.gguf import gguf_config

        return gguf_config(folder)
    if not present(folder, CONFIG):
        raise FileError(f"model.folder={folder} is no model folder: it has no {CONFIG}")
    data = read_json(inside(folder, CONFIG))
    if data.get("format") == FORMAT:
        return read_config(folder)
    from monoblock.interop.hf import said_config

    try:
        return said_config(data)
    except (ConfigError, FileError) as problem:
        raise FileError(f"{folder}: {problem}") from None


def _tokenizer(folder: Path, config: ModelConfig | RecurrentConfig) -> Tokenizer | None:
    if isinstance(config, ModelConfig) and config.family == "vision":
        return None
    if folder.is_dir() and read_json(inside(folder, CONFIG)).get("format") == FORMAT:
        return tokenizer_in(folder)
    tokenizer = Tokenizer.from_pretrained(folder)
    try:
        check_belongs(tokenizer, vocab_of(config))
    except InputError as problem:
        raise FileError(f"{folder}: {problem}") from None
    return tokenizer


# -- the configuration --------------------------------------------------------------------------------------------


def adapted(
    config: ModelConfig | RecurrentConfig, head: str, model: Mapping[str, Any], **sizes: Any
) -> ModelConfig | RecurrentConfig:
    """The stored configuration with an objective's head and what [model] changes; `sizes` are the data's."""
    knobs = {name: value for name, value in model.items() if name != "folder"}
    if isinstance(config, RecurrentConfig):
        return _recurrent(config, knobs)
    for name, value in knobs.items():
        if name not in KNOBS:
            raise ConfigError(f"there is no knob {name!r}{did_you_mean(name, KNOBS)}")
        if name not in (*FREE, *OF_THE_HEAD) and vary(config, **{name: value}) != config:
            raise ConfigError(
                f"model.{name}={value!r} is not what the weights of model.folder were trained with; leave it out "
                f"(free are {', '.join(FREE)})"
            )
    for name, value in sizes.items():
        if name != "classes" and vary(config, **{name: value}) != config:
            raise ConfigError(f"the data have {name}={value}, and the model of model.folder was made for another")
    free = {name: value for name, value in knobs.items() if name in FREE and name != "head_dropout"}
    return _headed(vary(config, **free), head, knobs, sizes.get("classes"))


def _headed(config: ModelConfig, kind: str, knobs: Mapping[str, Any], classes: int | None) -> ModelConfig:
    """The configuration with a head of a kind: the one there is, or a new one."""
    asked, wanted = knobs.get("head", kind), knobs.get("classes", classes)
    if config.head is not None and asked == config.head.kind:
        if wanted is not None and config.head.classes != wanted:
            raise ConfigError(
                f"the head of model.folder knows {config.head.classes} classes, and {wanted} are asked for; "
                f"write model.head={FRESH} to begin with a new one"
            )
    elif config.family not in ("encoder-only", "vision") or kind == "language_model":
        return config  # that the objective cannot train it is said by who asked
    else:
        config = _renewed(config, kind if asked == FRESH else asked, wanted)
    of_head = {name: knobs[name] for name in ("head_dropout", "pooling", "pooler") if name in knobs}
    return vary(config, **of_head) if of_head else config


def _renewed(config: ModelConfig, kind: str, classes: int | None) -> ModelConfig:
    """The same model with another head, of the usual make."""
    bare = replace(config, head=None, tie="none")
    if config.family == "vision" and kind == "classifier":
        return replace(bare, head=HeadConfig(kind="classifier", classes=classes or 2, bias="learned"))
    made = vary(bare, head=kind)
    return vary(made, classes=classes) if classes is not None and kind in ("classifier", "tagger") else made


def _recurrent(config: RecurrentConfig, knobs: Mapping[str, Any]) -> RecurrentConfig:
    changes = {name: value for name, value in knobs.items() if name != "context"}
    strange = next((name for name in changes if "dropout" not in name or not hasattr(config, name)), None)
    if strange is not None:
        raise ConfigError(f"model.{strange}: of an LSTM with weights only dropout can be changed; leave it out")
    return replace(config, **changes)


# -- the weights --------------------------------------------------------------------------------------------------


@torch.no_grad()
def lay_in(model: nn.Module, start: Start, *, head: bool) -> list[str]:
    """Copy the stored weights into a model that has its first ones; the names of those that stay fresh.

    `head`: whether the head is the stored one.
    """
    own, stored = model.state_dict(), start.model.state_dict()
    taken = {name: tensor for name, tensor in stored.items() if head or not name.startswith("head.")}
    taken |= {name: tensor for name, tensor in stored.items() if name.startswith(POOLER) and name in own}
    for name, tensor in taken.items():
        if name not in own or own[name].shape != tensor.shape:
            wanted = tuple(own[name].shape) if name in own else "nothing"
            raise ConfigError(
                f"model.folder={start.folder} stores {name} of shape {tuple(tensor.shape)}, and this recipe asks for "
                f"{wanted}; leave out what changes it (model.context: write data.longest instead)"
            )
        own[name].copy_(tensor)
    fresh = [name for name in own if name not in taken]
    strange = next((name for name in fresh if not name.startswith("head.")), None)
    if strange is not None:
        raise ConfigError(f"model.folder={start.folder} does not hold {strange}, which this recipe asks for")
    return fresh
