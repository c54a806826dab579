"""Input embeddings of tokens (with positions and segments added), of image patches, and of audio frames."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from monoblock.config.model import EmbeddingConfig, FramesConfig, Learned, PatchConfig, Sinusoid
from monoblock.errors import InputError
from monoblock.nn.arguments import can_read_values
from monoblock.nn.masks import TokenPositions
from monoblock.nn.norm import Norm
from monoblock.nn.positions import grid_sinusoid, sinusoid
from monoblock.nn.tap import Tap, apply_tap


def tied_table(token: nn.Module) -> Tensor | nn.Module:
    """Return what a tied output multiplies by: the weight of the token embedding, or the module if it is quantized."""
    return token if hasattr(token, "linear") else cast(Tensor, token.weight)


def draw_kept_words(x: Float[Tensor, "*places D"], rate: float) -> Float[Tensor, "*places 1"]:
    """Return a factor for every embedding: 0 with probability `rate`, else 1 / (1 - rate)."""
    return F.dropout(torch.ones_like(x[..., :1]), rate)


class Embedding(nn.Module):
    """Token embedding, with positions, segments and a norm if configured.

    With `owns_tokens=False` it has no token embedding of its own, and `forward` is given that of the source as
    `tied_token`.
    """

    def __init__(self, width: int, config: EmbeddingConfig, *, owns_tokens: bool = True) -> None:
        super().__init__()
        self.config = config
        dim = config.dim if config.dim is not None else width
        self.scale = math.sqrt(width) if config.scale == "sqrt_width" else float(config.scale)
        self.token = nn.Embedding(config.vocab, dim) if owns_tokens else None
        added_dim = width if config.projection == "first" else dim  # the size that positions are added to
        self.position: nn.Embedding | None = None
        if isinstance(config.positions, Learned):
            assert config.context is not None
            self.position = nn.Embedding(config.context + config.positions.offset, added_dim)
        self.segment = nn.Embedding(config.segments, added_dim) if config.segments else None
        self.norm = Norm(added_dim, config.norm) if config.norm is not None else None
        self.projection = nn.Linear(dim, width, bias=config.projection_bias) if dim != width else None

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        token_positions: TokenPositions,
        *,
        segments: Int[Tensor, "B T"] | None = None,
        tied_token: nn.Module | None = None,
        tap: Tap | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Look up the vector of every id, and add positions and segments."""
        token = self.token if self.token is not None else tied_token
        assert token is not None
        x: Tensor = token(ids)
        if self.training and self.config.word_dropout:
            x = self._drop_words(x, token_positions)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype)  # rounded to the dtype first, as published weights expect
        x = apply_tap(tap, "token", x)
        if self.projection is not None and self.config.projection == "first":
            x = self.projection(x)
        x = self._add_positions(x, token_positions)
        if self.segment is not None:
            x = x + self.segment(torch.zeros_like(ids) if segments is None else segments)
        if self.norm is not None:
            x = self.norm(x)
        x = F.dropout(x, self.config.dropout, self.training)
        if self.projection is not None and self.config.projection == "last":
            x = self.projection(x)
        return apply_tap(tap, "output", x)

    def _drop_words(self, x: Tensor, token_positions: TokenPositions) -> Tensor:
        """Zero the embeddings of random tokens and scale up the rest; the first token of each text is left alone.

        In a causal model the first token sees only itself.  If it were zero, every norm would divide by almost zero and
        blow up its gradient.
        """
        kept = draw_kept_words(x, self.config.word_dropout)
        return x * torch.where(token_positions.positions[..., None] == 0, 1.0, kept)

    def _add_positions(self, x: Tensor, token_positions: TokenPositions) -> Tensor:
        """Add learned or sinusoidal positions."""
        positions = self.config.positions
        if self.position is not None:
            assert isinstance(positions, Learned)
            return x + self.position(token_positions.positions + positions.offset)
        if isinstance(positions, Sinusoid):
            return x + sinusoid(token_positions.positions, x.shape[-1], positions).to(x.dtype)
        return x

    def check_inputs(self, ids: Tensor, token_positions: TokenPositions, segments: Tensor | None = None) -> None:
        """Check that ids, positions and segments are in range; values on a GPU are not read, which would be slow."""
        limit = self.config.context if self.position is not None else None
        if segments is not None and self.segment is None:
            raise InputError(
                "segments were given, but this model has no segment embedding; leave them out, "
                "or build the model with segments=2"
            )
        if limit is not None and token_positions.start is not None and token_positions.start + ids.shape[1] > limit:
            raise InputError(_too_long_message(token_positions.start + ids.shape[1], limit))
        if not can_read_values(ids) or not ids.numel():
            return
        low, high = (int(v) for v in ids.aminmax())
        if low < 0 or high >= self.config.vocab:
            wrong = low if low < 0 else high
            raise InputError(
                f"token id {wrong} is outside the vocabulary of {self.config.vocab} tokens "
                f"(0 to {self.config.vocab - 1}); "
                f"use the tokenizer that the model was trained with"
            )
        if segments is not None and not 0 <= int(segments.min()) <= int(segments.max()) < self.config.segments:
            wrong = int(segments.min()) if int(segments.min()) < 0 else int(segments.max())
            raise InputError(f"segment {wrong} is out of range; write segments from 0 to {self.config.segments - 1}")
        if token_positions.start is None and int(token_positions.positions.min()) < 0:
            raise InputError(f"position {int(token_positions.positions.min())} is negative; count positions from 0")
        if limit is not None and token_positions.start is None and int(token_positions.positions.max()) >= limit:
            raise InputError(_too_long_message(int(token_positions.positions.max()) + 1, limit))


def _too_long_message(length: int, limit: int) -> str:
    return (
        f"a sequence of {length} tokens is longer than the {limit} learned positions of this model; shorten it, "
        f"or build the model with context={length} or with positions that are not learned, such as rotary"
    )


class PatchEmbedding(nn.Module):
    """Image embedding: the image is cut into patches, and each patch becomes a token (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int, config: PatchConfig) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.patch = nn.Conv2d(config.channels, width, config.patch, stride=config.patch, bias=config.bias)
        self.class_token = nn.Parameter(torch.zeros(width)) if config.class_token else None
        self.distillation_token = nn.Parameter(torch.zeros(width)) if config.distillation_token else None
        self.mask_token = nn.Parameter(torch.zeros(width)) if config.mask_token else None
        self.registers = nn.Parameter(torch.zeros(config.registers, width)) if config.registers else None
        self.position = nn.Embedding(config.num_positions, width) if isinstance(config.positions, Learned) else None
        self.norm = Norm(width, config.norm) if config.norm is not None else None

    def forward(
        self,
        pixels: Float[Tensor, "B channels height width"],
        masked_patches: Shaped[Tensor, "B patches"] | None = None,
        tap: Tap | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Embed pixels as tokens, one for each patch, row by row.

        The class token, the distillation token and the registers come first, if the model has them.  `masked_patches`
        is True for patches that are replaced by the mask token.
        """
        dtype = next(self.patch.parameters()).dtype
        x = self.patch(pixels).flatten(2).mT.to(dtype)  # (B, N, D); in full precision under autocast
        x = apply_tap(tap, "patch", x)
        B, _, D = x.shape
        if masked_patches is not None and self.mask_token is not None:
            x = torch.where(masked_patches[..., None].bool(), self.mask_token, x)
        class_tokens = [t.expand(B, 1, D) for t in (self.class_token, self.distillation_token) if t is not None]
        if class_tokens:
            x = torch.cat((*class_tokens, x), dim=1)
        if self.config.positions is not None:
            x = x + self.position_table().to(x.dtype)
        if self.registers is not None:  # after the class token, without positions
            first = self.config.num_class_tokens
            x = torch.cat((x[:, :first], self.registers.expand(B, -1, D), x[:, first:]), dim=1)
        if self.norm is not None:
            x = self.norm(x)
        return apply_tap(tap, "output", F.dropout(x, self.config.dropout, self.training))

    def position_table(self) -> Float[Tensor, "positions D"]:
        """Return the position embeddings of class tokens and patches.

        They are learned, or sinusoids, which are zero for class tokens.
        """
        device = next(self.patch.parameters()).device
        if self.position is not None:
            table: Tensor = self.position(torch.arange(self.config.num_positions, device=device))
            return table
        side, positions, width = self.config.image // self.config.patch, self.config.positions, self.width
        assert isinstance(positions, Sinusoid)
        if positions.form == "grid":
            waves = grid_sinusoid(side, width, positions, device)
        else:
            waves = sinusoid(torch.arange(side * side, device=device), width, positions)
        return F.pad(waves, (0, 0, self.config.num_class_tokens, 0))

    def check_inputs(self, pixels: Tensor, masked_patches: Tensor | None = None) -> None:
        if masked_patches is not None and self.mask_token is None:
            raise InputError(
                "flags mark patches to replace by the mask token, but this model has no mask token; leave flags out"
            )
        shape = (self.config.channels, self.config.image, self.config.image)
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
            raise InputError("pixels must be a tensor of floating-point numbers; write pixels.float() / 255")
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != shape:
            raise InputError(
                f"pixels of shape {tuple(pixels.shape)} do not fit: this model takes (batch, "
                f"{', '.join(map(str, shape))}); resize the images, or resize the model with mb.interpolate"
            )
        patches = (self.config.image // self.config.patch) ** 2
        if masked_patches is not None and masked_patches.shape != (pixels.shape[0], patches):
            raise InputError(
                f"flags of shape {tuple(masked_patches.shape)} do not fit; give one flag for each patch, "
                f"in the shape ({pixels.shape[0]}, {patches})"
            )


class FrameEmbedding(nn.Module):
    """Audio embedding: two convolutions over three frames each, the second with stride two (Radford et al. 2022)."""

    def __init__(self, width: int, config: FramesConfig) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Conv1d(config.channels, width, kernel_size=3, padding=1)
        self.second = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.position = nn.Embedding(config.context, width) if isinstance(config.positions, Learned) else None
        self.norm = Norm(width, config.norm) if config.norm is not None else None

    def forward(self, features: Float[Tensor, "B channels frames"], tap: Tap | None = None) -> Float[Tensor, "B T D"]:
        """Embed features, with one position for every two frames."""
        x = F.gelu(self.second(F.gelu(self.first(features)))).mT.contiguous()  # else every projection would copy it
        x = apply_tap(tap, "frames", x)
        if self.position is not None:
            x = x + self.position(torch.arange(x.shape[1], device=x.device))
        elif isinstance(self.config.positions, Sinusoid):
            positions = torch.arange(x.shape[1], device=x.device)
            x = x + sinusoid(positions, x.shape[-1], self.config.positions).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return apply_tap(tap, "output", F.dropout(x, self.config.dropout, self.training))

    def check_inputs(self, features: Tensor) -> None:
        channels, max_frames = self.config.channels, 2 * self.config.context
        if not isinstance(features, Tensor) or not features.is_floating_point():
            raise InputError("features must be floating-point; give a float tensor of shape (batch, channels, frames)")
        if features.dim() != 3 or features.shape[1] != channels or not 0 < features.shape[2] <= max_frames:
            raise InputError(
                f"features of shape {tuple(features.shape)} do not fit: this model takes (batch, {channels}, "
                f"1 to {max_frames} frames)"
            )


def build_input(
    width: int, config: EmbeddingConfig | PatchConfig | FramesConfig
) -> Embedding | PatchEmbedding | FrameEmbedding:
    if isinstance(config, FramesConfig):
        return FrameEmbedding(width, config)
    return PatchEmbedding(width, config) if isinstance(config, PatchConfig) else Embedding(width, config)
