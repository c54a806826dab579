"""What the modules of the documents share: masks given as matrices, attention weights, and names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.nn.attention import attend
from monoblock.nn.attention_context import AttentionContext
from monoblock.nn.masks import everything, mask_from_matrix
from monoblock.nn.token_positions import arange_positions
from monoblock.nn.transformer import Transformer


class WeightsRecorder:
    """A tap that keeps the attention weights (B, H, T, S) and changes nothing."""

    weights: Tensor

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name == "weights":
            self.weights = tensor
        return tensor

    def wants(self, name: str) -> bool:
        return name == "weights"

    def changes(self, name: str) -> bool:
        return False


def scaled_dot_product_attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q K^T / sqrt(d_k)) V, and return it with the attention weights.

    The shapes are Q (…, T, d_k), K (…, S, d_k) and V (…, S, d_v); those of the results are (…, T, d_v) and (…, T, S).
    `mask` broadcasts to the weights and is 0 or False where a query may not see a key.  A query that may see no key
    gives zeros.
    """
    batch, recorder = Q.shape[:-2], WeightsRecorder()
    shape = (*Q.shape[:-1], K.shape[-2])
    allowed = None if mask is None else (mask != 0).broadcast_to(shape).reshape(-1, 1, *shape[-2:])
    q, k, v = (tensor.reshape(-1, 1, *tensor.shape[-2:]) for tensor in (Q, K, V))
    output = attend(q, k, v, allowed, tap=recorder)
    return output.reshape(*batch, *output.shape[-2:]), recorder.weights.reshape(shape)


def attention_context(mask: Tensor | None, queries: Tensor, keys: Tensor) -> AttentionContext:
    """Return the context of attention from queries (B, T, D) to keys (B, S, D).

    `mask` broadcasts to (B, H, T, S) and is 0 or False where a query may not see a key; without it, all keys are seen.
    """
    if mask is not None:
        return AttentionContext(mask_from_matrix(mask != 0))
    q, k = (arange_positions(x.shape[1], device=x.device) for x in (queries, keys))
    return AttentionContext(everything.resolve(q, k))


class SizedTransformer(Transformer):
    """A Transformer that is built from a few sizes, not from a ModelConfig."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> NoReturn:
        """Refuse: a saved model is loaded as a plain Transformer, which computes the same."""
        raise InputError(
            f"{cls.__name__} is built from sizes and cannot be loaded from {folder}; "
            "call monoblock.Transformer.from_pretrained, which loads the same model"
        )


# -- names ------------------------------------------------------------------------------------------------------------


def alias(path: str) -> Any:
    """Return a property that reads an attribute under a listing's name, as in `norm1 = alias("attention_norm")`."""
    return property(attrgetter(path), doc=f"The document's name of `{path}`.")


def accept_listing_names(module: nn.Module, names: Mapping[str, str]) -> None:
    """Let `module.load_state_dict` accept the names of a document's listing as well as those of the module.

    `names` maps a weight of the listing, or a submodule, to ours.  A weight that holds several of ours, one after the
    other along its first axis, maps to their names separated by spaces.
    """
    module.register_load_state_dict_pre_hook(partial(_rename, dict(names)))


def _rename(names: Mapping[str, str], module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        theirs = next((rule for rule in names if name == rule or name.startswith(f"{rule}.")), None)
        if theirs is None:
            continue
        ours = [f"{prefix}{our_name}{name.removeprefix(theirs)}" for our_name in names[theirs].split()]
        state.update(zip(ours, torch.chunk(state.pop(key), len(ours)), strict=True))


def layer_names(names: Mapping[str, str], theirs: str, ours: str, layers: int) -> dict[str, str]:
    """Return the names of a block for every layer: {"norm1": …} becomes {"blocks.0.norm1": "decoder.0.…", …}."""
    return {
        f"{theirs}.{layer}.{name}": " ".join(f"{ours}.{layer}.{our_name}" for our_name in our_names.split())
        for layer in range(layers)
        for name, our_names in names.items()
    }
