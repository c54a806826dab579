"""A classic fault: what it is, the model it is planted into, and the check that must name it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from monoblock.config.knobs import vary
from monoblock.config.model import EmbeddingConfig, FeedForwardConfig, HeadConfig, Learned, ModelConfig, Rotary
from monoblock.config.presets import tiny
from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.nn.stack import Stack


@dataclass
class Patient:
    """A model to plant a fault into, and what is handed to the doctor with it."""

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

    def tokens(self, rows: int = 4, length: int = 13, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, self.vocab, (rows, length), generator=generator).to(self.model.device)


@dataclass(frozen=True)
class Fault:
    name: str
    about: str
    check: str  # the check that must find it
    plant: Callable[[Patient], None]
    host: str = "decoder"  # a key of HOSTS: the kind of model that can have this fault
    control: Callable[[Patient], None] = lambda patient: None  # planted in its place, it must not be found


def _gpt(**changes: Any) -> ModelConfig:
    return vary(tiny("gpt2"), **changes) if changes else tiny("gpt2")


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


def _deep() -> ModelConfig:
    config = tiny("gpt2")
    assert config.decoder is not None
    return replace(config, decoder=replace(config.decoder, pattern=(replace(config.decoder.pattern[0], times=6),)))


def _blocks(config: ModelConfig) -> list[Any]:
    stack = config.decoder or config.encoder
    return list(stack.layers()) if stack is not None else []


def _attentions(config: ModelConfig) -> list[Any]:
    return [block.attention for block in _blocks(config)]


def _reads_text(config: ModelConfig) -> bool:
    return isinstance(config.input, EmbeddingConfig)


# Kind of model -> (does a configuration have it, a built-in example, what it is in words)
HOSTS: dict[str, tuple[Callable[[ModelConfig], bool], Callable[[], ModelConfig], str]] = {
    "any": (_reads_text, lambda: tiny("gpt2"), "a model of text"),
    "decoder": (lambda c: c.family == "decoder-only", lambda: tiny("gpt2"), "a decoder"),
    "deep decoder": (
        lambda c: c.family == "decoder-only" and len(_attentions(c)) >= 6,
        _deep,
        "a decoder of at least six layers",
    ),
    "sequential decoder": (
        lambda c: c.family == "decoder-only" and len(_blocks(c)) > 1 and not any(b.is_parallel for b in _blocks(c)),
        lambda: tiny("gpt2"),
        "a decoder of several layers whose attention and feed-forward layer follow each other",
    ),
    "decoder without gates": (
        lambda c: (
            c.family == "decoder-only"
            and all(isinstance(b.feedforward, FeedForwardConfig) and not b.feedforward.gated for b in _blocks(c))
        ),
        lambda: tiny("gpt2"),
        "a decoder with a feed-forward layer of two matrices",
    ),
    "own blocks": (
        lambda c: c.family == "decoder-only" and len(set(_blocks(c))) == 1 < len(_blocks(c)),
        lambda: tiny("gpt2"),
        "a decoder of several equal layers with weights of their own",
    ),
    "learned positions": (
        lambda c: c.family == "decoder-only" and isinstance(getattr(c.input, "positions", None), Learned),
        lambda: tiny("gpt2"),
        "a decoder with learned positions",
    ),
    "rotary positions": (
        lambda c: c.family == "decoder-only" and all(isinstance(a.positions, Rotary) for a in _attentions(c)),
        lambda: tiny("llama-7b"),
        "a decoder with rotary positions",
    ),
    "tied decoder": (
        lambda c: c.family == "decoder-only" and c.tie == "output",
        lambda: tiny("gpt2"),
        "a decoder with tied embeddings",
    ),
    "window": (
        lambda c: c.family == "decoder-only" and all(a.window for a in _attentions(c)),
        lambda: tiny("mistral-7b"),
        "a decoder with a window",
    ),
    "prefix": (lambda c: any(a.mask == "prefix" for a in _attentions(c)), _prefix, "a prefix decoder"),
    "encoder": (lambda c: c.family == "encoder-only" and _reads_text(c), lambda: tiny("bert-base"), "an encoder"),
    "classifier": (
        lambda c: c.family == "encoder-only" and c.head is not None and c.head.pooling == "mean",
        lambda: _classifier("bert-base", "mean"),
        "an encoder with a classifier that averages its tokens",
    ),
    "decoder with a classifier": (
        lambda c: c.family == "decoder-only" and c.head is not None and c.head.kind == "classifier",
        lambda: _classifier("gpt2", "last"),
        "a decoder with a classifier",
    ),
    "encoder-decoder": (
        lambda c: c.family == "encoder-decoder" and _reads_text(c),
        lambda: tiny("vaswani-base"),
        "an encoder-decoder",
    ),
    "post-norm": (
        lambda c: _reads_text(c) and any(b.norm_place == "post" for s in c.stacks.values() for b in s.layers()),
        lambda: tiny("vaswani-base"),
        "a post-norm model",
    ),
}


def make_patient(fault: Fault, model: Transformer | None = None, *, is_healthy: bool = False) -> Patient:
    """Return the model with the fault planted in a copy of it; None takes a small built-in model of the right kind.

    is_healthy: plant the control of the fault in its place.
    """
    fits, example, words = HOSTS[fault.host]
    if model is None:
        state = torch.get_rng_state()
        torch.manual_seed(0)
        model = Transformer(example())
        torch.set_rng_state(state)
    elif not fits(model.config):
        raise InputError(f"{fault.name} needs {words}; leave MODEL out to plant it into a small built-in model")
    else:
        model = copy.deepcopy(model)
    patient = Patient(model.eval())
    (fault.control if is_healthy else fault.plant)(patient)
    return patient
