"""What a `Recorder` writes down: attentions, added positions, lookups in tables; and the operations that it knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Operations that give another view or copy of their first tensor.
COPIES = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "permute",
        "expand",
        "clone",
        "_to_copy",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "t",
        "contiguous",
        "alias",
        "detach",
        "unbind",
        "repeat",
        "index",
        "narrow",
        "chunk",
        "to",
        "view_as_complex",
        "view_as_real",
        "_conj",
        "flatten",
        "unfold",
        "index_select",
        "gather",
        "cat",
        "stack",
        "constant_pad_nd",
        "roll",
        "neg",
        "lift_fresh",
        "copy_",
        "movedim",
        "as_strided",
    ]
)
# Operations whose result says where tokens are or how many there are, not which: it does not depend on the ids.
ID_FREE = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "gt",
        "le",
        "ge",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "isin",
        "rand_like",
        "randn_like",
        "arange",
        "logical_not",
        "bitwise_not",
        "any",
        "all",
        "_local_scalar_dense",
    ]
)
# Operations on scores and weights that keep what is known of their first (or second) tensor.
KEEPS = frozenset(
    [
        "add",
        "add_",
        "sub",
        "sub_",
        "rsub",
        "masked_fill",
        "masked_fill_",
        "where",
        "tanh",
        "clamp",
        "clamp_",
        "nan_to_num",
        "native_dropout",
        "dropout",
        "minimum",
        "maximum",
        "nan_to_num_",
        "_to_copy",
    ]
)

# Products with weights, whose result is a term of its own.
PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "_addmm_activation"])
# Operations of which norms are made.
NORMS = frozenset(
    [
        "native_layer_norm",
        "_fused_rms_norm",
        "native_batch_norm",
        "_native_batch_norm_legit_no_training",
        "native_group_norm",
        "linalg_vector_norm",
        "rsqrt",
        "sqrt",
        "std",
        "norm",
    ]
)
# Operations whose result still holds, as a sum, the terms of their tensors: products and position vectors.
HOLDS = COPIES | KEEPS | {"mul", "mul_", "div", "div_", "native_layer_norm", "_fused_rms_norm"}

MASKED = -5e3  # masks are written as -inf, the least number of a dtype, -1e9 or -1e4


@dataclass
class AttentionRecord:
    """One attention: queries (N, T, K), keys (N, S, K), values (N, S, *), scores and weights (N, T, S); N = B · H."""

    query: Tensor
    key: Tensor
    scores: Tensor  # as given to the softmax, with mask and bias
    weights: Tensor  # the result of the softmax
    scale: float | None  # the factor between q·k and the scores; None if it is not a constant
    rotations: int  # how often the position rotated queries and keys
    dtype: torch.dtype  # in which the softmax was computed
    is_fused: bool = False
    value: Tensor | None = None
    used_weights: Tensor | None = None  # what the values were multiplied by
    softmax_axis: int = -1  # of the scores, counted from the last
    value_rotations: int = 0  # how often the position rotated the values
    scores_dim: int = 3  # axes of the scores: (B, T, S), (B, H, T, S)
    is_mask_lost: bool = False  # masked_fill was called on the scores, and its result was not used
    query_terms: frozenset[int] = frozenset()  # what the queries hold as a sum
    term: int = -1  # the number of its result

    @property
    def size(self) -> int:
        """K, the size of a query."""
        return self.query.shape[-1]

    @property
    def visible(self) -> Tensor:
        """Which keys a query may see, (N, T, S); a weight may be 0 because another score is much larger."""
        return (self.weights > 0) | (self.scores > MASKED)


@dataclass
class Product:
    """A term of the stream: a product with weights, or rows of a table that ids are looked up in."""

    number: int
    given: Tensor
    width: int  # of the result
    reads: frozenset[int]  # the terms that `given` holds
    is_direct: bool = False  # `given` is the result of another product, and nothing was computed between the two
    is_lookup: bool = False


@dataclass
class PositionAdd:
    """Positions (T, D) added to the embeddings of the tokens; `attentions` had run before."""

    vectors: Tensor
    attentions: int
    number: int
    before: frozenset[int] = frozenset()  # the terms that the stream holds already


@dataclass
class TableLookup:
    """A lookup of rows that do not depend on the ids, as in a table of learned positions."""

    rows: int
    indices: Tensor

    def positions(self, length: int) -> Tensor | None:
        """Return the row of the table for each token of a text; None if the indices are of another kind.

        Relative positions, which are looked up for pairs of tokens, differ from query to query.
        """
        if self.indices.shape[-1:] != (length,):
            return None
        rows = self.indices.reshape(-1, length)
        return rows[0] if bool((rows == rows[0]).all()) else None
