"""The configuration of a model: frozen, keyword-only, validated dataclasses; derived values are properties.

ModelConfig = input + encoder and/or decoder + head. A StackConfig is a pattern of blocks. A BlockConfig describes
attention, optional cross-attention and feed-forward, and how they are normalized and added. The family of a model
follows from which stacks it has. This module re-exports the classes of parts.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from monoblock.config.parts import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    VOCABULARY_HEADS,
    Activation,
    Alibi,
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    FramesConfig,
    HeadConfig,
    InitConfig,
    Learned,
    NormConfig,
    PatchConfig,
    Repeat,
    Rotary,
    Scaling,
    Sinusoid,
    StackConfig,
)
from monoblock.config.schema import check_fraction, check_types, from_dict, to_dict, within
from monoblock.errors import ConfigError

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

Family = Literal["encoder-only", "decoder-only", "encoder-decoder", "vision"]


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Store matrices as 8- or 4-bit integers, with a scale for each group of consecutive weights in a row.

    Routers, positions, patches, norms and biases are not quantized.
    """

    bits: Literal[8, 4] = 8  # bits of a weight
    group: Annotated[int, within(high=MAX_WIDTH)] = 64  # weights that share a scale
    table_bits: Literal[8, 4] = 8  # bits of the token embedding and the output matrix, which every logit depends on
    # bits to which the inputs of a matrix are rounded before the product, with a step for each group: 16 on a CPU with
    # C++ kernels and not at all elsewhere, or 8 everywhere, which is less exact and faster for many tokens on a CPU
    activation_bits: Literal[16, 8] = 16

    def __post_init__(self) -> None:
        check_types(self)
        if self.group < 32 or self.group % 32:
            raise ConfigError(
                f"group={self.group} is not a multiple of 32, although weights are packed in blocks of 32; "
                "write 32, 64 or 128"
            )

    def padded_columns(self, inputs: int) -> int:
        """Return the number of weights stored for a row of `inputs` weights, which is padded to whole groups."""
        return -(-inputs // self.group) * self.group

    def packed_bytes(self, inputs: int, outputs: int, *, is_vocab_matrix: bool = False) -> int:
        """Return the size in bytes of a quantized matrix (outputs, inputs).

        It counts the integers and, for each group of weights, a 2-byte scale and at 4 bits also a 2-byte minimum.
        """
        bits, columns = self.table_bits if is_vocab_matrix else self.bits, self.padded_columns(inputs)
        return outputs * (columns * bits // 8 + columns // self.group * (2 if bits == 8 else 4))


# A part that some families lack. Type checkers accept `preset("gpt2").decoder.depth`: the caller knows the family.
if TYPE_CHECKING:
    MaybeStack = StackConfig | Any
    MaybeHead = HeadConfig | Any
else:
    MaybeStack = StackConfig | None
    MaybeHead = HeadConfig | None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A complete model: an input, an encoder or a decoder or both, and a head."""

    # what the first stack reads: tokens, image patches or audio frames
    input: EmbeddingConfig | PatchConfig | FramesConfig
    encoder: MaybeStack = None  # the encoder; None: a decoder-only model
    decoder: MaybeStack = None  # the decoder; None: an encoder-only or vision model
    target: EmbeddingConfig | None = None  # input of the decoder; None: it shares `input`
    # which of source embedding, target embedding and output share a matrix
    tie: Literal["none", "output", "source_target", "three_way"] = "none"
    head: MaybeHead = None  # the output layers; None: the model returns hidden states
    init: InitConfig = InitConfig()  # how the weights are initialized
    quantize: QuantizeConfig | None = None  # how matrices are quantized; None: not quantized

    def __post_init__(self) -> None:
        check_types(self)
        if self.encoder is None and self.decoder is None:
            raise ConfigError("a model needs an encoder, a decoder or both; give encoder=… or decoder=…")
        if self.encoder and self.decoder and self.encoder.width != self.decoder.width:
            raise ConfigError(
                f"encoder width {self.encoder.width} and decoder width {self.decoder.width} differ; write equal widths"
            )
        self._check_stacks()
        self._check_tie()
        self._check_head()

    def _check_stacks(self) -> None:
        if self.encoder and any(b.cross or b.attention.mask != "full" for b in self.encoder.layers()):
            raise ConfigError(
                "an encoder block sees all tokens and has no cross-attention; write mask='full' and cross=None"
            )
        if self.decoder and any(b.attention.mask == "full" for b in self.decoder.layers()):
            raise ConfigError("a decoder block must not see the future; write mask='causal' (or 'prefix')")
        if self.decoder and any((b.cross is not None) != (self.encoder is not None) for b in self.decoder.layers()):
            fix = "this model has one, so add cross=…" if self.encoder else "this model has none, so write cross=None"
            raise ConfigError(f"decoder blocks have cross-attention exactly when there is an encoder; {fix}")
        if isinstance(self.input, PatchConfig) and self.decoder:
            raise ConfigError("image patches are read by an encoder only; leave decoder=None")
        if isinstance(self.input, FramesConfig) and (self.encoder is None or (self.decoder and self.target is None)):
            raise ConfigError(
                "an encoder reads the frames, and a decoder reads tokens; give encoder=…, and target=… for a decoder"
            )
        if self.target is not None and not (self.encoder and self.decoder):
            raise ConfigError("target is the decoder input of an encoder-decoder; with one stack leave target=None")

    def _check_tie(self) -> None:
        ties_inputs = self.tie in ("source_target", "three_way")
        if ties_inputs and self.family != "encoder-decoder":
            raise ConfigError(
                f"tie={self.tie!r} ties source and target, but this model has only one input; write tie='output'"
            )
        if self.family == "encoder-decoder" and self.target is None and not ties_inputs:
            fix = "three_way" if self.tie == "output" else "source_target"
            raise ConfigError(
                f"with target=None, source and target share one input, but tie={self.tie!r} does not tie them; "
                f"write tie={fix!r}, or give target=…"
            )
        if (
            ties_inputs
            and self.target is not None
            and self._embedding_shape(self.target) != self._embedding_shape(self.input)
        ):
            raise ConfigError(
                "tied source and target need the same vocab and dim, which input and target do not have; "
                "write tie='output' or 'none'"
            )
        if self.tie in ("output", "three_way") and (not self.head or self.head.kind not in VOCABULARY_HEADS):
            raise ConfigError(f"tie={self.tie!r} needs a language_model or masked_lm head to tie; write tie='none'")

    def _check_head(self) -> None:
        kind = self.head.kind if self.head else None
        if kind == "language_model" and self.decoder is None:
            raise ConfigError(
                "a language_model head needs a decoder, since an encoder sees the next token; write 'masked_lm'"
            )
        if kind == "masked_lm" and (self.family != "encoder-only" or not isinstance(self.input, EmbeddingConfig)):
            raise ConfigError(
                "a masked_lm head needs an encoder-only model that reads tokens; for a decoder write 'language_model'"
            )
        if kind is not None and kind not in VOCABULARY_HEADS and self.family == "encoder-decoder":
            raise ConfigError(f"a {kind} head is for a model of one stack; drop the decoder, or write 'language_model'")
        if self.head and self.head.teacher and not getattr(self.input, "distillation_token", False):
            raise ConfigError("teacher=True needs a distillation token; write distillation_token=True in the input")

    @staticmethod
    def _embedding_shape(input_config: EmbeddingConfig | PatchConfig | FramesConfig) -> tuple[int, int | None] | None:
        return (input_config.vocab, input_config.dim) if isinstance(input_config, EmbeddingConfig) else None

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
        """The stacks the model has, in the order they run."""
        return {name: stack for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)) if stack}

    @property
    def inputs(self) -> dict[str, EmbeddingConfig | PatchConfig | FramesConfig]:
        """The input configurations, by the prefix of their weights: "input", and "target" if it is separate."""
        return {"input": self.input} if self.target is None else {"input": self.input, "target": self.target}

    @property
    def vocab_sizes(self) -> list[int]:
        """The sizes of the vocabularies that the model reads."""
        return [part.vocab for part in self.inputs.values() if isinstance(part, EmbeddingConfig)]

    @property
    def target_input(self) -> EmbeddingConfig | PatchConfig | FramesConfig:
        """The input whose vocabulary the head predicts."""
        return self.target if self.target is not None else self.input

    @property
    def output_shape(self) -> tuple[int, int]:
        """The inputs and outputs of the last matrix of the head; 0 outputs if it has none.

        It reads vectors of the width, or of the size of a factorized embedding if the output is tied to it or the head
        is a masked LM.
        """
        head, embedding, inputs, outputs = self.head, self.target_input, self.width, 0
        if isinstance(embedding, EmbeddingConfig) and head:
            has_embedding_size = head.kind == "masked_lm" or self.tie in ("output", "three_way")
            inputs = embedding.dim or inputs if has_embedding_size else inputs
            outputs = embedding.vocab if head.kind in VOCABULARY_HEADS else 0
        if head and head.kind not in VOCABULARY_HEADS:
            outputs = {"spans": 2, "pooled": head.project or 0}.get(head.kind, head.classes or 0)
        return inputs, outputs

    @property
    def context(self) -> int | None:
        return self.target_input.context

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
            raise ConfigError(f"the configuration is not valid JSON: {problem}") from None
        return cls.from_dict(data)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The recurrent baselines: an LSTM language model, or an LSTM encoder-decoder with or without attention."""

    kind: Literal["language_model", "encoder_decoder"] = "language_model"  # predict the next token, or translate
    vocab: Annotated[int, within(1, MAX_VOCAB)]  # size of the vocabulary
    width: Annotated[int, within(1, MAX_WIDTH)]  # size of the embedding and of every LSTM layer
    depth: Annotated[int, within(1, MAX_LAYERS)] = 2  # number of LSTM layers, in the encoder and in the decoder
    # size of the target vocabulary; None: it is that of the source
    target_vocab: Annotated[int | None, within(1, MAX_VOCAB)] = None
    attention: bool = True  # encoder-decoder: attend to the source; False: only a summary of it (Cho et al. 2014)
    tie: bool = True  # share the output matrix with the (target) embedding
    # dropout probability of the embedding, between layers and before the output
    dropout: Annotated[float, check_fraction] = 0.0
    # dropout probability of the embedding; None: `dropout`
    embedding_dropout: Annotated[float | None, check_fraction] = None
    # dropout probability before the output; None: `dropout`
    head_dropout: Annotated[float | None, check_fraction] = None
    # rate of tokens whose whole embedding is zeroed (cf. Gal and Ghahramani 2016)
    word_dropout: Annotated[float, check_fraction] = 0.0
    # language model: drop the same features, and the same words, at all time steps of a row (Gal and Ghahramani 2016)
    variational_dropout: bool = False
    # language model: rate of weights of the hidden-to-hidden matrices that are zeroed (AWD-LSTM, Merity et al. 2018)
    recurrent_dropout: Annotated[float, check_fraction] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("variational_dropout", "recurrent_dropout"):
            if self.kind == "encoder_decoder" and getattr(self, name):
                raise ConfigError(f"{name} is for LSTM language models; leave it out for kind='encoder_decoder'")

    @property
    def family(self) -> Family:
        """The family of a Transformer for the same task."""
        return "decoder-only" if self.kind == "language_model" else "encoder-decoder"

    @property
    def vocab_sizes(self) -> list[int]:
        """The sizes of the vocabularies that the model reads."""
        return [self.vocab] if self.target_vocab is None else [self.vocab, self.target_vocab]

    @property
    def context(self) -> None:
        """Always None, because an LSTM reads sequences of any length."""


AnyConfig = ModelConfig | RecurrentConfig  # of the models that a folder can hold
CONFIG_KEYS: dict[type[AnyConfig], str] = {ModelConfig: "model", RecurrentConfig: "recurrent"}  # in its config.json


def parse_config(data: Any) -> AnyConfig:
    """Return the configuration in the content of our config.json, or in a JSON object that is a configuration."""
    if isinstance(data, dict) and "recurrent" in data:
        return from_dict(RecurrentConfig, data["recurrent"], "recurrent")
    if isinstance(data, dict) and "format" in data:
        data = data.get("model")
    if isinstance(data, dict) and "vocab" in data:  # the configuration of a Transformer has it in "input"
        return from_dict(RecurrentConfig, data)
    return ModelConfig.from_dict(data)
