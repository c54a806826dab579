"""A classic fault: what it is, the kind of model it is planted into, and the check that must name it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from monoblock.config.knobs import vary
from monoblock.config.model import (
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    Learned,
    ModelConfig,
    Rotary,
)
from monoblock.config.presets import tiny
from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.nn.stack import Stack


@dataclass
class Setup:
    """A model, and the options to examine it with."""

    model: Transformer
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        stack = self.model.decoder or self.model.encoder
        assert stack is not None
        return stack

    @property
    def blocks(self) -> list[Any]:
        return self.stack.blocks

    @property
    def vocab(self) -> int:
        part = self.model.config.target or self.model.config.input
        assert isinstance(part, EmbeddingConfig)
        return part.vocab

    def tokens(self, rows: int = 4, length: int = 13, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, self.vocab, (rows, length), generator=generator).to(self.model.device)


Plant = Callable[[Setup], object]


@dataclass(frozen=True)
class Fault:
    name: str
    about: str
    check: str  # the check that must find it
    plant: Plant
    kind: str = "decoder"  # a key of MODEL_KINDS: the models that can have this fault
    control: Plant = lambda setup: None  # planted in its place, it must not be found


@dataclass(frozen=True)
class ModelKind:
    """A kind of model: what it is, a built-in example, and which configurations are of it."""

    words: str
    example: Callable[[], ModelConfig] = lambda: tiny("gpt2")
    includes: Callable[[ModelConfig], bool] = lambda config: True
    family: str | None = "decoder-only"  # None: any

    def fits(self, config: ModelConfig) -> bool:
        is_family = self.family in (None, config.family) and isinstance(config.input, EmbeddingConfig)
        return is_family and self.includes(config)


def _blocks(config: ModelConfig) -> list[BlockConfig]:
    return [block for stack in config.stacks.values() for block in stack.layers()]


def _classifier(name: str, pooling: Any) -> ModelConfig:
    config = tiny(name)
    return replace(config, head=HeadConfig(kind="classifier", classes=5, pooling=pooling, bias="learned"), tie="none")


def _prefix() -> ModelConfig:
    config = tiny("gpt2")
    assert config.decoder is not None
    repeats = tuple(
        replace(r, blocks=tuple(replace(b, attention=replace(b.attention, mask="prefix")) for b in r.blocks))
        for r in config.decoder.pattern
    )
    return replace(config, decoder=replace(config.decoder, pattern=repeats))


MODEL_KINDS = {
    "decoder": ModelKind("a decoder"),
    "deep decoder": ModelKind(
        "a decoder of at least six layers", lambda: vary(tiny("gpt2"), depth=6), lambda c: len(_blocks(c)) >= 6
    ),
    "sequential decoder": ModelKind(
        "a decoder of several layers whose attention and feed-forward layer follow each other",
        includes=lambda c: len(_blocks(c)) > 1 and not any(b.is_parallel for b in _blocks(c)),
    ),
    "decoder without gates": ModelKind(
        "a decoder with a feed-forward layer of two matrices",
        includes=lambda c: all(
            isinstance(b.feedforward, FeedForwardConfig) and not b.feedforward.gated for b in _blocks(c)
        ),
    ),
    "own blocks": ModelKind(
        "a decoder of several equal layers with weights of their own",
        includes=lambda c: len(set(_blocks(c))) == 1 < len(_blocks(c)),
    ),
    "learned positions": ModelKind(
        "a decoder with learned positions", includes=lambda c: isinstance(getattr(c.input, "positions", None), Learned)
    ),
    "rotary positions": ModelKind(
        "a decoder with rotary positions",
        lambda: tiny("llama-7b"),
        lambda c: all(isinstance(b.attention.positions, Rotary) for b in _blocks(c)),
    ),
    "tied decoder": ModelKind("a decoder with tied embeddings", includes=lambda c: c.tie == "output"),
    "window": ModelKind(
        "a decoder with a window", lambda: tiny("mistral-7b"), lambda c: all(b.attention.window for b in _blocks(c))
    ),
    "prefix": ModelKind("a prefix decoder", _prefix, lambda c: any(b.attention.mask == "prefix" for b in _blocks(c))),
    "encoder": ModelKind("an encoder", lambda: tiny("bert-base"), family="encoder-only"),
    "classifier": ModelKind(
        "an encoder with a classifier that averages its tokens",
        lambda: _classifier("bert-base", "mean"),
        lambda c: c.head is not None and c.head.pooling == "mean",
        "encoder-only",
    ),
    "decoder with a classifier": ModelKind(
        "a decoder with a classifier",
        lambda: _classifier("gpt2", "last"),
        lambda c: c.head is not None and c.head.kind == "classifier",
    ),
    "encoder-decoder": ModelKind("an encoder-decoder", lambda: tiny("vaswani-base"), family="encoder-decoder"),
    "post-norm": ModelKind(
        "a post-norm model",
        lambda: tiny("vaswani-base"),
        lambda c: any(b.norm_place == "post" for b in _blocks(c)),
        None,
    ),
}


def plant_fault(fault: Fault, model: Transformer | None = None, *, is_healthy: bool = False) -> Setup:
    """Plant a fault into a copy of the model, or into a small built-in model of the right kind.

    is_healthy: plant the control of the fault in its place.
    """
    kind = MODEL_KINDS[fault.kind]
    if model is None:
        state = torch.get_rng_state()
        torch.manual_seed(0)
        model = Transformer(kind.example())
        torch.set_rng_state(state)
    elif not kind.fits(model.config):
        raise InputError(f"{fault.name} needs {kind.words}; leave MODEL out to plant it into a small built-in model")
    else:
        model = copy.deepcopy(model)
    setup = Setup(model.eval())
    (fault.control if is_healthy else fault.plant)(setup)
    return setup


def change_output(find: Callable[[Setup], Any], change: Callable[[Tensor], Tensor]) -> Plant:
    """Return what changes the output of a module."""
    return lambda setup: find(setup).register_forward_hook(lambda module, inputs, output: change(output))
