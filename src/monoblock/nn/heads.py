"""Output heads, selected by `kind`.

language_model   logits over the vocabulary for each token, with or without a tied output matrix
masked_lm        the same for encoders, after a linear layer with activation and norm
classifier       class logits for a sequence, or for an image made of patches
regression       numbers for a sequence or an image, computed as the logits of a classifier
tagger           class logits for each token
spans            a start and an end score for each token
pooled           one vector for a sequence
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from monoblock.config.model import ModelConfig
from monoblock.config.parts import SEQUENCE_HEADS, VOCABULARY_HEADS
from monoblock.kernels.cpu.autograd import linear
from monoblock.nn.feedforward import ACTIVATIONS
from monoblock.nn.linear import Linear
from monoblock.nn.norm import Norm
from monoblock.nn.tap import Tap, apply_tap

OutputLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # input (…, D), weight (V, D) and bias (V,) or None


def pool(hidden: Float[Tensor, "B T D"], valid: Bool[Tensor, "#B T"] | None, pooling: str) -> Float[Tensor, "B D"]:
    """Select the first or last valid token of each text, or average all its valid tokens."""
    B, T, _ = hidden.shape
    if pooling == "mean":
        if valid is None:
            return hidden.mean(1)
        weights = valid.expand(B, T).to(hidden.dtype)[..., None]
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    if valid is None:
        return hidden[:, 0] if pooling == "first" else hidden[:, -1]
    index = torch.arange(T, device=hidden.device).expand(B, T)
    valid = valid.expand(B, T)
    index = index.masked_fill(~valid, T - 1).amin(1) if pooling == "first" else index.masked_fill(~valid, 0).amax(1)
    return hidden[torch.arange(B, device=hidden.device), index]


class Head(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        config, width = model.head, model.width
        assert config is not None
        self.config = config
        self.is_tied = model.tie in ("output", "three_way")
        dim, outputs = model.output_shape
        self.scale = width**-0.5 if config.scale == "inverse_sqrt_width" else float(config.scale)
        self.pooler = nn.Linear(width, width) if config.pooler != "none" else None
        self.transform = nn.Linear(width, dim, bias=config.transform_bias) if config.transform else None
        self.norm = Norm(dim, config.norm) if config.norm is not None else None
        needs_projection = self.transform is None and dim != width
        self.projection = nn.Linear(width, dim, bias=False) if needs_projection else None
        self.output = Linear(dim, outputs, bias=False) if outputs and not self.is_tied else None
        self.teacher = nn.Linear(dim, outputs, bias=config.bias == "learned") if config.teacher else None
        self.bias = nn.Parameter(torch.zeros(outputs)) if outputs and config.bias == "learned" else None
        if outputs and config.bias == "fixed":
            self.register_buffer("fixed_bias", torch.zeros(outputs))
        else:
            self.fixed_bias: Tensor | None = None

    def forward(
        self,
        hidden: Float[Tensor, "B T D"],
        *,
        valid: Bool[Tensor, "#B T"] | None = None,
        table: Float[Tensor, "V dim"] | nn.Module | None = None,
        output_linear: OutputLinear | None = None,
        tap: Tap | None = None,
    ) -> Float[Tensor, ...]:
        """Apply the head to hidden states; `table` is the token embedding that a tied output multiplies by.

        `output_linear` replaces the last matrix product, and its result is returned (see `takes_output_linear`).

        The output is (B, T, V) for a language_model or masked_lm head, (B, T, classes) for a tagger, (B, T, 2) for
        spans, (B, classes) for a classifier or regression head, and (B, D) for a pooled head.
        """
        config = self.config
        x = hidden
        if config.kind in SEQUENCE_HEADS:
            x = pool(hidden, valid, config.pooling)
            if self.pooler is not None:
                x = ACTIVATIONS[config.pooler](self.pooler(x))
            x = F.normalize(x, dim=-1) if config.normalize else x
        if config.kind == "pooled":
            return apply_tap(tap, "pooled", x if self.output is None else self.output(x))
        if self.transform is not None:
            assert config.transform is not None
            x = ACTIVATIONS[config.transform](self.transform(x))
        if self.projection is not None:
            x = self.projection(x)
        if self.norm is not None:
            x = self.norm(x)
        x = F.dropout(x, config.dropout, self.training)
        x = x if self.scale == 1.0 else x * self.scale
        bias = self.bias if self.bias is not None else self.fixed_bias
        if output_linear is not None:
            weight = table if self.output is None else self.output.weight
            assert isinstance(weight, Tensor)
            return output_linear(x, weight, bias)
        if self.output is not None:
            logits = self._own_product(x, bias)
        elif isinstance(table, Tensor):
            logits = self.linear(x, table, bias)
        else:  # a quantized token embedding
            assert table is not None
            logits = table.linear(x, bias)  # type: ignore[operator]
        if config.softcap is not None:
            logits = config.softcap * torch.tanh(logits / config.softcap)
        if self.teacher is not None:  # a second classifier, on the distillation token (Touvron et al. 2021)
            logits = (logits + self.teacher(hidden[:, 1])) / 2
        return apply_tap(tap, "logits", logits)

    def takes_output_linear(self, table: Tensor | nn.Module | None) -> bool:
        """Return whether the head ends in a plain matrix product, which a function can replace."""
        is_product = self.config.kind in VOCABULARY_HEADS and self.config.softcap is None and self.teacher is None
        return is_product and isinstance(table if self.output is None else self.output, (Tensor, Linear))

    def _own_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x by the head's own output matrix."""
        assert self.output is not None
        logits: Tensor = self.output(x)
        return logits if bias is None else logits + bias

    def linear(
        self,
        x: Float[Tensor, "*places dim"],
        weight: Float[Tensor, "outputs dim"],
        bias: Float[Tensor, " outputs"] | None,
    ) -> Float[Tensor, "*places outputs"]:
        """Multiply x by weight and add the bias; subclasses for inference override this."""
        return linear(x, weight, bias)
