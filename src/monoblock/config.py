"""What a model is, as data: frozen, keyword-only, validated; derived values are properties, never fields.

ModelConfig = input + encoder and/or decoder + head.  A StackConfig is a pattern of blocks, a BlockConfig is one row:
attention, perhaps cross-attention, feed-forward, and how they are normed and added.  The family follows from
which stacks exist.  `width` is D everywhere.  The parts are in parts.py and schemes.py, the JSON in
schema.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from monoblock.errors import ConfigError
from monoblock.parts import (
    Activation,
    AttentionConfig,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    FramesConfig,
    HeadConfig,
    InitConfig,
    NormConfig,
    PatchConfig,
)
from monoblock.schema import check, check_at_least, check_fraction, from_dict, to_dict
from monoblock.schemes import Alibi, Buckets, Learned, Rotary, Scaling, Sinusoid

__all__ = [
    "Activation",
    "Alibi",
    "AttentionConfig",
    "BlockConfig",
    "Buckets",
    "EmbeddingConfig",
    "ExpertsConfig",
    "Family",
    "FeedForwardConfig",
    "FramesConfig",
    "HeadConfig",
    "InitConfig",
    "Learned",
    "ModelConfig",
    "NormConfig",
    "PatchConfig",
    "QuantizeConfig",
    "RecurrentConfig",
    "Repeat",
    "Rotary",
    "Scaling",
    "Sinusoid",
    "StackConfig",
]

DEEPEST = 100_000  # repetitions of a run
Family = Literal["encoder-only", "decoder-only", "encoder-decoder", "vision"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    width: int
    attention: AttentionConfig
    feedforward: FeedForwardConfig
    cross: AttentionConfig | None = None
    norm: NormConfig = NormConfig()
    norm_place: Literal["pre", "post", "output", "sandwich"] = "pre"
    attention_norm: bool = True  # False: the input is normed already (ModernBERT's first block)
    residual: Literal["sequential", "parallel", "parallel_shared"] = "sequential"  # shared: one norm feeds both
    residual_scale: float = 1.0  # what is added is multiplied by this (Granite)
    layer_scale: float | None = None  # a learned gain a channel on what is added, starting here (DINOv2)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "width")
        check_fraction(self, "dropout")
        self.attention.check_width(self.width)
        if self.residual != "sequential" and (self.norm_place != "pre" or self.cross is not None):
            raise ConfigError("parallel attention and feed-forward need norm_place='pre' and no cross-attention")
        if not self.attention_norm and (self.norm_place != "pre" or self.residual == "parallel_shared"):
            raise ConfigError("attention_norm=False needs norm_place='pre' and a feed-forward norm of its own")
        if self.cross is not None:
            self._check_cross(self.cross)

    def _check_cross(self, cross: AttentionConfig) -> None:
        cross.check_width(self.width)
        if cross.window is not None:
            raise ConfigError("cross-attention has no window: source and target places are not comparable; drop it")
        if cross.mask != "full" or cross.positions is not None:
            raise ConfigError("cross-attention sees the whole source: write mask='full' and positions=None")


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A run of blocks repeated; `tied`: every repetition uses the same weights (ALBERT)."""

    blocks: tuple[BlockConfig, ...]
    times: int = 1
    tied: bool = False

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "times")
        if self.times > DEEPEST:
            raise ConfigError(f"{self.times} repetitions are more than any stack has; write {DEEPEST} or less")
        if not self.blocks:
            raise ConfigError("a Repeat needs at least one block")


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    pattern: tuple[Repeat, ...]
    norm: NormConfig | None = None  # after the last block

    def __post_init__(self) -> None:
        check(self)
        if len({block.width for block in self.layers()}) != 1:
            raise ConfigError("a stack needs one width, and at least one block, all through its pattern")
        tables = {(a.positions, a.all_heads) for a in self._attentions() if getattr(a.positions, "shared", False)}
        if len(tables) > 1:
            raise ConfigError("blocks that share one table of buckets need equal buckets and heads; write shared=False")

    def _attentions(self) -> Iterator[AttentionConfig]:
        return (block.attention for block in self.layers())

    def layers(self) -> Iterator[BlockConfig]:
        """The blocks in the order they run."""
        return (block for run in self.pattern for _ in range(run.times) for block in run.blocks)

    def owned(self) -> Iterator[tuple[BlockConfig, bool]]:
        """The blocks in the order they run, with whether each owns weights (else it runs an earlier one's again)."""
        return ((b, not (run.tied and time)) for run in self.pattern for time in range(run.times) for b in run.blocks)

    @property
    def depth(self) -> int:
        return sum(run.times * len(run.blocks) for run in self.pattern)

    @property
    def width(self) -> int:
        return self.pattern[0].blocks[0].width


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Matrices stored as small whole numbers, with a scale for each group of neighbours in a row.

    Routers, positions, patches, norms and biases stay as they are.
    """

    bits: Literal[8, 4] = 8
    group: int = 64  # weights that share a scale
    table_bits: Literal[8, 4] = 8  # of the token table and of the output matrix, which every logit hangs on

    def __post_init__(self) -> None:
        check(self)
        if self.group < 32 or self.group % 32:
            raise ConfigError(f"group={self.group} cannot be: weights are packed by 32; write 32, 64 or 128")

    def columns(self, inputs: int) -> int:
        """The stored length of a row: whole groups."""
        return -(-inputs // self.group) * self.group

    def stored_bytes(self, inputs: int, outputs: int, *, table: bool = False) -> int:
        """Bytes of a matrix: its numbers, a scale of 2 bytes a group, at 4 bits a least value of 2 bytes as well."""
        bits, columns = self.table_bits if table else self.bits, self.columns(inputs)
        return outputs * (columns * bits // 8 + columns // self.group * (2 if bits == 8 else 4))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    input: EmbeddingConfig | PatchConfig | FramesConfig
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    target: EmbeddingConfig | None = None  # the decoder's own input; None: it shares `input`
    tie: Literal["none", "output", "source_target", "three_way"] = "none"
    head: HeadConfig | None = None
    init: InitConfig = InitConfig()
    quantize: QuantizeConfig | None = None  # how the matrices are stored; None: as they were trained

    def __post_init__(self) -> None:
        check(self)
        if self.encoder is None and self.decoder is None:
            raise ConfigError("a model needs an encoder, a decoder or both; give encoder=… or decoder=…")
        if self.encoder and self.decoder and self.encoder.width != self.decoder.width:
            raise ConfigError(
                f"encoder width {self.encoder.width} and decoder width {self.decoder.width} must be equal"
            )
        self._check_stacks()
        self._check_tie()
        self._check_head()

    def _check_stacks(self) -> None:
        if self.encoder and any(b.cross or b.attention.mask != "full" for b in self.encoder.layers()):
            raise ConfigError("an encoder block sees everything and has no cross-attention: mask='full', cross=None")
        if self.decoder and any(b.attention.mask == "full" for b in self.decoder.layers()):
            raise ConfigError("a decoder block must not see the future; write mask='causal' (or 'prefix')")
        if self.decoder and any((b.cross is not None) != (self.encoder is not None) for b in self.decoder.layers()):
            raise ConfigError("decoder blocks have cross-attention exactly when there is an encoder to look at")
        if isinstance(self.input, PatchConfig) and self.decoder:
            raise ConfigError("image patches feed an encoder only; leave decoder=None")
        if isinstance(self.input, FramesConfig) and (self.encoder is None or (self.decoder and self.target is None)):
            raise ConfigError(
                "frames feed an encoder, and a decoder beside it reads words; give encoder=… and target=…"
            )
        if self.target is not None and not (self.encoder and self.decoder):
            raise ConfigError("target is the decoder's input beside an encoder's; with one stack write input alone")

    def _check_tie(self) -> None:
        shares = self.tie in ("source_target", "three_way")
        if shares and self.family != "encoder-decoder":
            raise ConfigError(f"tie={self.tie!r} ties source and target, but there is one input; write tie='output'")
        if self.family == "encoder-decoder" and self.target is None and not shares:
            raise ConfigError(f"tie={self.tie!r} with target=None cannot be: one input is shared; give target=…")
        if shares and self.target is not None and self._table(self.target) != self._table(self.input):
            raise ConfigError("tied source and target need the same vocab and dim; write tie='output' or 'none'")
        if self.tie in ("output", "three_way") and (
            not self.head or self.head.kind not in ("language_model", "masked_lm")
        ):
            raise ConfigError(f"tie={self.tie!r} needs a language_model or masked_lm head to tie; write tie='none'")

    def _check_head(self) -> None:
        kind = self.head.kind if self.head else None
        if kind == "language_model" and self.decoder is None:
            raise ConfigError("a language_model head needs a decoder, or it would see the answer; write 'masked_lm'")
        if kind == "masked_lm" and (self.family != "encoder-only" or not isinstance(self.input, EmbeddingConfig)):
            raise ConfigError("a masked_lm head reads both sides: it needs an encoder alone")
        if kind in ("tagger", "spans", "pooled", "classifier") and self.family == "encoder-decoder":
            raise ConfigError(f"a {kind} head goes on one stack; drop the decoder, or write 'language_model'")
        if self.head and self.head.teacher and not getattr(self.input, "distillation_token", False):
            raise ConfigError("teacher=True reads a distillation token; write distillation_token=True in the input")

    @staticmethod
    def _table(given: EmbeddingConfig | PatchConfig | FramesConfig) -> tuple[int, int | None] | None:
        return (given.vocab, given.dim) if isinstance(given, EmbeddingConfig) else None

    @property
    def family(self) -> Family:
        if isinstance(self.input, PatchConfig):
            return "vision"
        if self.encoder is not None and self.decoder is not None:
            return "encoder-decoder"
        return "encoder-only" if self.encoder is not None else "decoder-only"

    @property
    def width(self) -> int:
        stack = self.encoder or self.decoder
        assert stack is not None
        return stack.width

    @property
    def stacks(self) -> dict[str, StackConfig]:
        """The stacks that exist, in the order they run."""
        return {name: stack for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)) if stack}

    @property
    def inputs(self) -> dict[str, EmbeddingConfig | PatchConfig | FramesConfig]:
        """The inputs that own weights, by the name of those weights."""
        return {"input": self.input} if self.target is None else {"input": self.input, "target": self.target}

    @property
    def output_input(self) -> EmbeddingConfig | PatchConfig | FramesConfig:
        """The input whose vocabulary the head speaks."""
        return self.target if self.target is not None else self.input

    @property
    def context(self) -> int | None:
        return self.output_input.context

    @property
    def depth(self) -> int:
        return sum(stack.depth for stack in self.stacks.values())

    def to_dict(self) -> dict[str, Any]:
        return to_dict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, data: Any) -> ModelConfig:
        return from_dict(cls, data)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"the configuration is not JSON: {problem}") from None
        return cls.from_dict(data)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The baselines attention replaced: an LSTM language model, or an LSTM encoder-decoder with additive attention."""

    kind: Literal["language_model", "encoder_decoder"] = "language_model"
    vocab: int
    width: int  # of the embedding and of every LSTM layer
    depth: int = 2
    target_vocab: int | None = None  # None: as the source
    tie: bool = True  # output matrix = (target) embedding
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "vocab", "width", "depth", "target_vocab")
        check_fraction(self, "dropout")

    @property
    def family(self) -> Family:
        """What a Transformer of the same task would be."""
        return "decoder-only" if self.kind == "language_model" else "encoder-decoder"

    @property
    def context(self) -> None:
        """An LSTM reads texts of any length."""
