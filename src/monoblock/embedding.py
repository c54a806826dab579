"""What enters the first block: tokens (scaled, with places and segments added) or the patches of an image."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config import EmbeddingConfig, FramesConfig, Learned, PatchConfig, Sinusoid
from monoblock.errors import InputError
from monoblock.masks import Where
from monoblock.norm import Norm
from monoblock.positions import grid_sinusoid, sinusoid
from monoblock.tap import Tap, tapped


def matrix_of(module: nn.Module) -> Tensor | nn.Module:
    """The weight of a plain module; one that stores it otherwise is its own: it looks rows up and multiplies itself."""
    return module.weight if isinstance(module, (nn.Embedding, nn.Linear)) else module


class Embedding(nn.Module):
    """Tokens to vectors.  A target tied to the source owns no table and is given the source's."""

    def __init__(self, width: int, config: EmbeddingConfig, *, owns_tokens: bool = True) -> None:
        super().__init__()
        self.config = config
        dim = config.dim if config.dim is not None else width
        self.scale = math.sqrt(width) if config.scale == "sqrt_width" else float(config.scale)
        self.token = nn.Embedding(config.vocab, dim) if owns_tokens else None
        placed = width if config.projection == "first" else dim  # the size that positions are added to
        learned = isinstance(config.positions, Learned)
        self.position = nn.Embedding(self._rows(config), placed) if learned else None
        self.segment = nn.Embedding(config.segments, placed) if config.segments else None
        self.norm = Norm(placed, config.norm) if config.norm is not None else None
        self.projection = nn.Linear(dim, width, bias=config.projection_bias) if dim != width else None

    @staticmethod
    def _rows(config: EmbeddingConfig) -> int:
        assert isinstance(config.positions, Learned)
        assert config.context is not None
        return config.context + config.positions.offset

    def forward(
        self,
        ids: Tensor,
        where: Where,
        *,
        segments: Tensor | None = None,
        table: Tensor | nn.Module | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """ids (B, T) -> (B, T, D)."""
        weight = matrix_of(self.token) if self.token is not None else table
        assert weight is not None
        x = F.embedding(ids, weight) if isinstance(weight, Tensor) else weight(ids)
        if self.training and self.config.word_dropout:
            x = self._without_words(x, where)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype)  # rounded to the dtype first, as published weights expect
        x = tapped(tap, "token", x)
        if self.projection is not None and self.config.projection == "first":
            x = self.projection(x)
        x = self._placed(x, where)
        if self.segment is not None:
            x = x + self.segment(torch.zeros_like(ids) if segments is None else segments)
        if self.norm is not None:
            x = self.norm(x)
        x = F.dropout(x, self.config.dropout, self.training)
        if self.projection is not None and self.config.projection == "last":
            x = self.projection(x)
        return tapped(tap, "output", x)

    def _without_words(self, x: Tensor, where: Where) -> Tensor:
        """Some words zeroed, the rest scaled.  The first of a text stays: alone it sees itself only, and a norm of
        zeros in every block would multiply its gradient beyond all numbers."""
        kept = F.dropout(torch.ones_like(x[..., :1]), self.config.word_dropout)
        return x * torch.where(where.at[..., None] == 0, 1.0, kept)

    def _placed(self, x: Tensor, where: Where) -> Tensor:
        """Learned or sinusoidal places added."""
        positions = self.config.positions
        if self.position is not None:
            assert isinstance(positions, Learned)
            return x + self.position(where.at + positions.offset)
        if isinstance(positions, Sinusoid):
            return x + sinusoid(where.at, x.shape[-1], positions).to(x.dtype)
        return x

    def check(self, ids: Tensor, where: Where, segments: Tensor | None = None) -> None:
        """One line for what cannot be embedded; looks at the ids only where that stalls nothing."""
        limit = self.config.context if self.position is not None else None
        if segments is not None and self.segment is None:
            raise InputError("this model knows no segments; drop them, or build it with segments=2")
        if limit is not None and where.start is not None and where.start + ids.shape[1] > limit:
            raise InputError(_too_long(where.start + ids.shape[1], limit))
        if ids.device.type != "cpu" or not ids.numel():
            return
        low, high = (int(v) for v in ids.aminmax())
        if low < 0 or high >= self.config.vocab:
            wrong = low if low < 0 else high
            raise InputError(
                f"id {wrong} is outside the vocabulary of {self.config.vocab} (0 to {self.config.vocab - 1}); "
                f"is this the model's own tokenizer?"
            )
        if segments is not None and not 0 <= int(segments.min()) <= int(segments.max()) < self.config.segments:
            raise InputError(f"segments must lie in 0 to {self.config.segments - 1}; {int(segments.max())} was given")
        if where.start is None and int(where.at.min()) < 0:
            raise InputError(f"position {int(where.at.min())} cannot be: places are counted from 0")
        if limit is not None and where.start is None and int(where.at.max()) >= limit:
            raise InputError(_too_long(int(where.at.max()) + 1, limit))


def _too_long(length: int, limit: int) -> str:
    return (
        f"a sequence of {length} tokens is longer than the {limit} learned positions; shorten it, "
        f"or build the model with context={length} or with other positions"
    )


class Patches(nn.Module):
    """An image cut into patches, each a token (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int, config: PatchConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Conv2d(config.channels, width, config.patch, stride=config.patch, bias=config.bias)
        self.class_token = nn.Parameter(torch.zeros(width)) if config.class_token else None
        self.distillation_token = nn.Parameter(torch.zeros(width)) if config.distillation_token else None
        self.mask_token = nn.Parameter(torch.zeros(width)) if config.mask_token else None
        self.registers = nn.Parameter(torch.zeros(config.registers, width)) if config.registers else None
        self.position = nn.Embedding(config.places, width) if isinstance(config.positions, Learned) else None
        self.norm = Norm(width, config.norm) if config.norm is not None else None

    def forward(self, pixels: Tensor, flags: Tensor | None = None, tap: Tap | None = None) -> Tensor:
        """pixels (B, channels, height, width) -> (B, T, D): class token, registers, then the patches row by row.

        `flags` (B, patches) marks patches that the mask token stands for.
        """
        x = self.patch(pixels).flatten(2).mT.to(self.patch.weight.dtype)  # (B, N, D); in full precision under autocast
        x = tapped(tap, "patch", x)
        B, _, D = x.shape
        if flags is not None and self.mask_token is not None:
            x = torch.where(flags[..., None].bool(), self.mask_token, x)
        in_front = [t.expand(B, 1, D) for t in (self.class_token, self.distillation_token) if t is not None]
        if in_front:
            x = torch.cat((*in_front, x), dim=1)
        if self.config.positions is not None:
            x = x + self.places().to(x.dtype)
        if self.registers is not None:  # after the class token, without positions
            first = self.config.first
            x = torch.cat((x[:, :first], self.registers.expand(B, -1, D), x[:, first:]), dim=1)
        if self.norm is not None:
            x = self.norm(x)
        return tapped(tap, "output", F.dropout(x, self.config.dropout, self.training))

    def places(self) -> Tensor:
        """What is added to class token and patches (places, D): a learned table, or sinusoids, none for the token."""
        if self.position is not None:
            return self.position.weight
        side, positions = self.config.image // self.config.patch, self.config.positions
        assert isinstance(positions, Sinusoid)
        width, device = self.patch.out_channels, self.patch.weight.device
        if positions.form == "grid":
            waves = grid_sinusoid(side, width, positions, device)
        else:
            waves = sinusoid(torch.arange(side * side, device=device), width, positions)
        return F.pad(waves, (0, 0, self.config.first, 0))

    def check(self, pixels: Tensor, flags: Tensor | None = None) -> None:
        if flags is not None and self.mask_token is None:
            raise InputError("flags mark patches to hide, but this model has no mask token; drop them")
        wanted = (self.config.channels, self.config.image, self.config.image)
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
            raise InputError("pixels must be a tensor of floating-point numbers; write pixels.float() / 255")
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != wanted:
            raise InputError(
                f"pixels of shape {tuple(pixels.shape)} do not fit: this model takes (batch, "
                f"{', '.join(map(str, wanted))}); resize the images, or see mb.interpolated"
            )
        patches = (self.config.image // self.config.patch) ** 2
        if flags is not None and flags.shape != (pixels.shape[0], patches):
            raise InputError(f"flags of shape {tuple(flags.shape)} do not fit; give (batch, {patches})")


class Frames(nn.Module):
    """Sound as frames of features, read three at a time by two convolutions (Radford et al. 2022)."""

    def __init__(self, width: int, config: FramesConfig) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Conv1d(config.channels, width, kernel_size=3, padding=1)
        self.second = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.position = nn.Embedding(config.context, width) if isinstance(config.positions, Learned) else None
        self.norm = Norm(width, config.norm) if config.norm is not None else None

    def forward(self, features: Tensor, tap: Tap | None = None) -> Tensor:
        """features (B, channels, frames) -> (B, T, D), a place for every two frames."""
        x = F.gelu(self.second(F.gelu(self.first(features)))).mT.contiguous()  # each projection would copy it
        x = tapped(tap, "frames", x)
        if self.position is not None:
            x = x + self.position.weight[: x.shape[1]]
        elif isinstance(self.config.positions, Sinusoid):
            at = torch.arange(x.shape[1], device=x.device)
            x = x + sinusoid(at, x.shape[-1], self.config.positions).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return tapped(tap, "output", F.dropout(x, self.config.dropout, self.training))

    def check(self, features: Tensor) -> None:
        channels, longest = self.config.channels, 2 * self.config.context
        if not isinstance(features, Tensor) or not features.is_floating_point():
            raise InputError("features must be a tensor of floating-point numbers, one column a frame")
        if features.dim() != 3 or features.shape[1] != channels or not 0 < features.shape[2] <= longest:
            raise InputError(
                f"features of shape {tuple(features.shape)} do not fit: this model takes (batch, {channels}, "
                f"1 to {longest} frames)"
            )
