"""The configurations of the inputs: tokens, image patches and audio frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monoblock.config.limits import MAX_CONTEXT, MAX_IMAGE, MAX_POSITION_WEIGHTS, MAX_VOCAB, MAX_WIDTH
from monoblock.config.parts import NormConfig
from monoblock.config.positions import Learned, Sinusoid
from monoblock.config.schema import check_at_least, check_at_most, check_fraction, check_types, nearest_divisor
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """A token input: embedding, positions, segments and norm."""

    kind: Literal["tokens"] = "tokens"  # the name of this input in JSON
    vocab: int  # V, the size of the vocabulary
    context: int | None = None  # length of the longest sequence in training; a limit for learned positions
    dim: int | None = None  # size of the token embedding, which is projected to the width (ALBERT); None: the width
    projection: Literal["last", "first"] = "last"  # project after positions and norm (ALBERT) or before (OPT-350m)
    projection_bias: bool = True  # whether that projection has a bias
    scale: float | Literal["sqrt_width"] = 1.0  # factor on the token embedding
    positions: Learned | Sinusoid | None = None  # positions added to the embedding
    segments: int = 0  # number of token types; 0: none
    norm: NormConfig | None = None  # norm of the embedding
    dropout: float = 0.0  # dropout probability of the embedding
    word_dropout: float = 0.0  # rate of tokens whose whole embedding is zeroed (cf. Gal and Ghahramani 2016)

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "vocab", "context", "dim")
        check_at_least(self, 0, "segments")
        check_at_most(self, MAX_VOCAB, "vocab", "segments")
        check_at_most(self, MAX_POSITION_WEIGHTS if isinstance(self.positions, Learned) else MAX_CONTEXT, "context")
        check_at_most(self, MAX_WIDTH, "dim")
        check_fraction(self, "dropout", "word_dropout")
        if isinstance(self.positions, Learned) and self.context is None:
            raise ConfigError("learned positions need a context, which is the number of positions; write context=…")
        if isinstance(self.positions, Sinusoid) and self.positions.form == "grid":
            raise ConfigError("form='grid' is for images; write 'interleaved', 'halves' or 'fairseq' for tokens")


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """An image input, cut into patches of patch × patch pixels that become tokens."""

    kind: Literal["patches"] = "patches"  # the name of this input in JSON
    image: int  # height and width of the image in pixels
    patch: int  # height and width of a patch in pixels
    channels: int = 3  # number of colours of a pixel
    class_token: bool = True  # whether a learned token comes before the patches
    distillation_token: bool = False  # a second token with a position, read by the `teacher` head (DeiT)
    registers: int = 0  # additional learned tokens before the patches
    mask_token: bool = False  # a learned vector that replaces marked patches (DINOv2)
    bias: bool = True  # whether the projection of patches has a bias
    positions: Learned | Sinusoid | None = Learned()  # positions added to the embedding
    norm: NormConfig | None = None  # norm of the embedding
    dropout: float = 0.0  # dropout probability of the embedding

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "image", "patch", "channels")
        check_at_least(self, 0, "registers")
        check_at_most(self, MAX_IMAGE, "image", "patch", "channels", "registers")
        check_fraction(self, "dropout")
        if isinstance(self.positions, Learned) and self.positions.offset:
            raise ConfigError("patches are counted from 0; write positions=Learned() without an offset")
        if self.distillation_token and not self.class_token:
            raise ConfigError("a distillation token comes after a class token; write class_token=True")
        if self.image % self.patch:
            fix = nearest_divisor(self.image, self.patch)
            raise ConfigError(f"patch={self.patch} does not divide image={self.image}; try patch={fix}")
        if self.num_positions > MAX_POSITION_WEIGHTS:
            raise ConfigError(
                f"image={self.image} with patch={self.patch} is {self.num_positions} tokens; write a larger patch, for "
                f"at most {MAX_POSITION_WEIGHTS} tokens"
            )

    @property
    def num_prefix_tokens(self) -> int:
        """The number of tokens before the patches: class token, distillation token and registers."""
        return self.num_class_tokens + self.registers

    @property
    def num_positions(self) -> int:
        """The number of tokens with a position: class token, distillation token and patches, but not registers."""
        return (self.image // self.patch) ** 2 + self.num_class_tokens

    @property
    def num_class_tokens(self) -> int:
        """The number of class and distillation tokens, which have positions."""
        return int(self.class_token) + int(self.distillation_token)

    @property
    def context(self) -> int:
        return self.num_positions + self.registers


@dataclass(frozen=True, kw_only=True)
class FramesConfig:
    """An audio input: two convolutions over three frames each, the second with stride two (Whisper)."""

    kind: Literal["frames"] = "frames"  # the name of this input in JSON
    channels: int  # features of a frame
    context: int  # positions after the second convolution
    positions: Learned | Sinusoid | None = Learned()  # positions added to the embedding
    norm: NormConfig | None = None  # norm of the embedding
    dropout: float = 0.0  # dropout probability of the embedding

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "channels", "context")
        check_at_most(self, MAX_IMAGE, "channels")
        check_at_most(self, MAX_POSITION_WEIGHTS, "context")
        check_fraction(self, "dropout")
        if isinstance(self.positions, Learned) and self.positions.offset:
            raise ConfigError("frames are counted from 0; write positions=Learned() without an offset")
        if isinstance(self.positions, Sinusoid) and self.positions.form == "grid":
            raise ConfigError("form='grid' is for images; write 'interleaved', 'halves' or 'fairseq' for frames")
