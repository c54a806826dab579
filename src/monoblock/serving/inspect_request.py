"""What a request may look into while its text is generated: the logit lens, rows of attention, edits of activations.

    {"inspect": {"lens": 3, "attention": [[1, 0]], "edits": [{"names": "decoder.1.attention.heads", "heads": [2]}]}}

Such rows run the modules of the model, in the same steps as the others; every new token comes with what was seen when
it was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.edits import Edit, ablate
from monoblock.model import Transformer
from monoblock.serving.requests import InspectBody

MAX_TOKENS = 512  # new ones of a request that looks inside
MAX_NUMBERS = 2_000_000  # weights of attention in an answer


@dataclass(frozen=True)
class Inspection:
    """What to look into, for one model."""

    model: Transformer
    body: InspectBody

    def __post_init__(self) -> None:
        decoder = self.model.decoder
        assert decoder is not None
        if len({*map(tuple, self.body.attention)}) < len(self.body.attention):
            raise InputError("inspect.attention names a head twice; write each [layer, head] once")
        blocks = list(decoder.config.layers())
        for layer, head in self.body.attention:
            if not 0 <= layer < len(blocks) or not 0 <= head < blocks[layer].attention.heads:
                raise InputError(
                    f"attention has [{layer}, {head}], but layers are 0 to {len(blocks) - 1} and heads 0 to "
                    f"{blocks[0].attention.heads - 1}"
                )

    @property
    def edits(self) -> tuple[Edit, ...]:
        said = self.body.edits
        return tuple(ablate(one.names, one.method, heads=one.heads, positions=one.positions) for one in said)

    @property
    def capture(self) -> tuple[str, ...]:
        """The names of the activations that are read."""
        lens = ("decoder.*.output",) if self.body.lens is not None else ()
        return (*lens, *dict.fromkeys(f"decoder.{layer}.attention.weights" for layer, _ in self.body.attention))

    @torch.inference_mode()
    def read(self, captured: Mapping[str, Tensor], spell: Any) -> dict[str, Any]:
        """Return what a pass has shown of its last token, with tokens as `spell` writes them."""
        found: dict[str, Any] = {}
        if self.body.lens is not None:
            found["lens"] = [self._read_layer(captured, layer, spell) for layer in range(self._depth)]
        if self.body.attention:
            found["attention"] = [
                {
                    "layer": layer,
                    "head": head,
                    "weights": captured[f"decoder.{layer}.attention.weights"][head, -1].float().tolist(),
                }
                for layer, head in self.body.attention
            ]
        return found

    @property
    def _depth(self) -> int:
        assert self.model.decoder is not None
        return len(self.model.decoder.blocks)

    def _read_layer(self, captured: Mapping[str, Tensor], layer: int, spell: Any) -> list[dict[str, Any]]:
        """Return the tokens that the output layer would choose after a layer."""
        model = self.model
        assert model.decoder is not None
        assert model.head is not None
        assert self.body.lens is not None
        hidden = captured[f"decoder.{layer}.output"][None, -1:]  # of (T, D)
        hidden = hidden if model.decoder.norm is None else model.decoder.norm(hidden)
        logits = model.head(hidden, table=model.output_embedding)
        top = logits[0, -1].float().softmax(-1).topk(self.body.lens)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [{"token": spell(token), "probability": probability} for token, probability in pairs]
