"""What leaves the last block: seven heads in one class, told apart by `kind` (and, the seventh, by what is read).

language_model   logits over the vocabulary for each place, tied to the embedding or not
masked_lm        the same after a transform, for encoders
classifier       one distribution for a whole sequence - or, over patches, for an image
tagger           one distribution for each token
spans            a start and an end score for each token
pooled           one vector for a whole sequence
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config import EmbeddingConfig, HeadConfig, ModelConfig
from monoblock.embedding import matrix_of
from monoblock.feedforward import ACTIVATIONS
from monoblock.norm import Norm
from monoblock.tap import Tap, tapped


def pool(hidden: Tensor, real: Tensor | None, how: str) -> Tensor:
    """(B, T, D) -> (B, D): the first or last real token, or the mean of the real ones."""
    B, T, _ = hidden.shape
    if how == "mean":
        if real is None:
            return hidden.mean(1)
        weights = real.expand(B, T).to(hidden.dtype)[..., None]
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    if real is None:
        return hidden[:, 0] if how == "first" else hidden[:, -1]
    places = torch.arange(T, device=hidden.device).expand(B, T)
    real = real.expand(B, T)
    at = places.masked_fill(~real, T - 1).amin(1) if how == "first" else places.masked_fill(~real, 0).amax(1)
    return hidden[torch.arange(B, device=hidden.device), at]


class Head(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        config, width = model.head, model.width
        assert config is not None
        self.config = config
        self.tied = model.tie in ("output", "three_way")
        dim = self._output_dim(model)
        self.scale = width**-0.5 if config.scale == "inverse_sqrt_width" else float(config.scale)
        self.pooler = nn.Linear(width, width) if config.pooler != "none" else None
        self.transform = nn.Linear(width, dim, bias=config.transform_bias) if config.transform else None
        self.norm = Norm(dim, config.norm) if config.norm is not None else None
        needs_projection = self.transform is None and dim != width
        self.projection = nn.Linear(width, dim, bias=False) if needs_projection else None
        outputs = _outputs(config, model)
        self.output = nn.Linear(dim, outputs, bias=False) if outputs and not self.tied else None
        self.teacher = nn.Linear(dim, outputs, bias=config.bias == "learned") if config.teacher else None
        self.bias = nn.Parameter(torch.zeros(outputs)) if outputs and config.bias == "learned" else None
        if outputs and config.bias == "fixed":
            self.register_buffer("fixed_bias", torch.zeros(outputs))
        else:
            self.fixed_bias: Tensor | None = None

    def _output_dim(self, model: ModelConfig) -> int:
        """What the output matrix is multiplied with: the embedding's size where tied to it or transformed for it."""
        given = model.output_input
        factorised = isinstance(given, EmbeddingConfig) and given.dim is not None
        speaks = self.config.kind == "masked_lm" or self.tied
        return given.dim if factorised and speaks else model.width  # type: ignore[return-value, union-attr]

    def forward(
        self,
        hidden: Tensor,
        *,
        real: Tensor | None = None,
        table: Tensor | nn.Module | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """hidden (B, T, D) -> (B, T, V), (B, T, classes), (B, T, 2), (B, classes) or (B, D) by kind."""
        config = self.config
        x = hidden
        if config.kind in ("classifier", "pooled"):
            x = self._pooled(hidden, real)
        if config.kind == "pooled":
            return tapped(tap, "pooled", x if self.output is None else self.output(x))
        if self.transform is not None:
            assert config.transform is not None
            x = ACTIVATIONS[config.transform](self.transform(x))
        if self.projection is not None:
            x = self.projection(x)
        if self.norm is not None:
            x = self.norm(x)
        x = F.dropout(x, config.dropout, self.training)
        logits = self._logits(x, table)
        if self.teacher is not None:  # the second token was trained to say what a teacher says
            logits = (logits + self.teacher(hidden[:, 1])) / 2
        return tapped(tap, "logits", logits)

    def _pooled(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        x = pool(hidden, real, self.config.pooling)
        if self.pooler is not None:
            x = ACTIVATIONS[self.config.pooler](self.pooler(x))
        return F.normalize(x, dim=-1) if self.config.normalize else x

    def _logits(self, x: Tensor, table: Tensor | nn.Module | None) -> Tensor:
        weight = matrix_of(self.output) if self.output is not None else table
        assert weight is not None
        bias = self.bias if self.bias is not None else self.fixed_bias
        x = x if self.scale == 1.0 else x * self.scale
        logits = self.product(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)  # type: ignore[operator]
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x times the rows of the table; where steps are to be fast, something quicker takes its place."""
        return F.linear(x, weight, bias)


def _outputs(config: HeadConfig, model: ModelConfig) -> int:
    if config.kind in ("language_model", "masked_lm"):
        given = model.output_input
        assert isinstance(given, EmbeddingConfig)
        return given.vocab
    if config.kind == "pooled":
        return config.project or 0
    return {"classifier": config.classes or 0, "tagger": config.classes or 0, "spans": 2}[config.kind]
