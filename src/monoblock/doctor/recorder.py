"""Record the operations of any model.

A `Recorder` sees every PyTorch operation of a forward pass, also inside a plain function.  It recognizes attention by
its steps: a product of queries and keys, a softmax over it, and a product with the values.  On the way it follows for
each tensor whether it depends on the token ids, by which numbers it was multiplied, how often it was rotated by
position, and which terms it sums: results of products with weights, rows of tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Operations that give another view or copy of their first tensor.
COPIES = _names(
    "view _unsafe_view reshape transpose permute expand clone _to_copy slice select split split_with_sizes "
    "unsqueeze squeeze t contiguous alias detach unbind repeat index narrow chunk to view_as_complex view_as_real "
    "_conj flatten unfold index_select gather cat stack constant_pad_nd roll neg lift_fresh copy_ movedim "
    "as_strided"
)
# Operations whose result says where tokens are or how many there are, not which: it does not depend on the ids.
ID_FREE = _names(
    "eq ne lt gt le ge zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty isin "
    "rand_like randn_like arange logical_not bitwise_not any all _local_scalar_dense"
)
# Operations on scores and weights that keep what is known of their first (or second) tensor.
KEEPS = _names(
    "add add_ sub sub_ rsub masked_fill masked_fill_ where tanh clamp clamp_ nan_to_num native_dropout dropout "
    "minimum maximum nan_to_num_ _to_copy"
)

# Products with weights, whose result is a term of its own.
PRODUCTS = _names("mm addmm bmm baddbmm matmul linear convolution _addmm_activation")
# Operations that norms are computed with.
NORMS = _names(
    "native_layer_norm _fused_rms_norm native_batch_norm _native_batch_norm_legit_no_training native_group_norm "
    "linalg_vector_norm rsqrt sqrt std norm"
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
    def final_weights(self) -> Tensor:
        """The weights (N, T, S) that the values were multiplied by, where they are known."""
        used = self.used_weights
        return used if used is not None and used.shape == self.weights.shape else self.weights

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


@dataclass(frozen=True)
class _Lineage:
    """What is known about a tensor."""

    depends: bool = False  # on the token ids
    factor: float | None = 1.0  # product of the constants it was multiplied by since the last matrix product
    rotations: int = 0
    scores: tuple[Tensor, Tensor] | None = None  # the queries and keys whose product it is
    record: AttentionRecord | None = None  # it holds the weights of this attention
    terms: frozenset[int] = frozenset()  # numbers of the products and positions that it holds as a sum


_UNKNOWN = _Lineage()


@dataclass
class Recorder:
    """The attentions, added positions, lookups and random draws of one forward pass."""

    attentions: list[AttentionRecord] = field(default_factory=list)
    position_adds: list[PositionAdd] = field(default_factory=list)
    lookups: list[TableLookup] = field(default_factory=list)
    token_tables: list[tuple[int, int]] = field(default_factory=list)  # shapes of tables that ids are looked up in
    products: list[Product] = field(default_factory=list)
    norms: int = 0  # operations that norms are computed with
    same_adds: int = 0  # additions of one and the same vector to all tokens, before the first attention
    random_draws: int = 0
    states: Tensor | None = None  # the last result with a vector for each token, (B, T, D)

    @contextmanager
    def recording(self, *inputs: Tensor) -> Iterator[Recorder]:
        """Record the operations inside `with`; `inputs` are the tensors of token ids."""
        self._lineages: dict[int, tuple[Tensor, _Lineage]] = {}
        self._shape = inputs[0].shape if inputs else torch.Size()
        self._lengths = {tensor.shape[1] for tensor in inputs if tensor.dim() > 1}
        self._in_fused = False
        self._count = 0  # of terms
        self._results: dict[int, Tensor] = {}  # of products, by their numbers
        self._unmasked: dict[int, Tensor] = {}  # scores that masked_fill has copied
        self._written: set[int] = set()  # memory that values which depend on the ids were written into
        for tensor in inputs:
            self._set(tensor, _Lineage(depends=True))
        fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # its single operation would hide the attention inside
        try:
            with _FusedAttention(self), _Operations(self):
                yield self
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            self._lineages, self._unmasked, self._results = {}, {}, {}

    # -- lineages -------------------------------------------------------------------------------------------------

    def _get(self, value: Any) -> _Lineage:
        if not isinstance(value, Tensor):
            return _UNKNOWN
        lineage = self._lineages.get(id(value), (None, _UNKNOWN))[1]
        is_written = not lineage.depends and bool(self._written) and _storage(value) in self._written
        return replace(lineage, depends=True) if is_written else lineage

    def _set(self, tensor: Tensor, lineage: _Lineage) -> None:
        self._lineages[id(tensor)] = (tensor, lineage)  # holding the tensor keeps its id from being used again

    def observe(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Record one operation."""
        if self._in_fused:
            return
        if name in ("native_dropout", "bernoulli", "bernoulli_", "rand", "rand_like", "normal_", "uniform_"):
            self.random_draws += 1
        tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
        count = len(self.position_adds)
        lineage = self._result_lineage(name, args, kwargs, tensors, result)
        terms = self._terms(name, args, tensors, lineage, result)
        terms |= frozenset(added.number for added in self.position_adds[count:])
        lineage = lineage if lineage.terms == terms else replace(lineage, terms=terms)
        self.norms += name in NORMS and lineage.depends
        if name == "masked_fill" and lineage.scores is not None:
            self._unmasked[id(args[0])] = args[0]
        for out in tree_leaves(result):
            if isinstance(out, Tensor):
                self._set(out, lineage)
                if out.dim() == 3 and out.shape[:2] == self._shape and lineage.depends and out.is_floating_point():
                    self.states = out
                if name.endswith("_") and lineage.depends:
                    self._written.add(_storage(out))  # a part of a buffer, such as a cache

    def _terms(
        self, name: str, args: Sequence[Any], tensors: list[Tensor], lineage: _Lineage, result: Any
    ) -> frozenset[int]:
        """Return the terms that the result of an operation holds as a sum."""
        if name in HOLDS:
            is_zero = name in ("mul", "mul_") and not isinstance(args[1], Tensor) and args[1] == 0
            return frozenset() if is_zero else frozenset().union(*(self._get(t).terms for t in tensors))
        if name.startswith("_scaled_dot_product") and self.attentions:
            return frozenset([self.attentions[-1].term])
        if not lineage.depends or (name not in PRODUCTS and name != "embedding"):
            return frozenset()
        given = next((t for t in tensors[-2:] if self._get(t).depends), tensors[0])
        held = self._get(tensors[0]).terms if "add" in name else frozenset[int]()  # addmm(x, a, b) is x + a @ b
        self._count += 1
        reads = self._get(given).terms
        before = self._results.get(min(reads)) if len(reads) == 1 else None
        is_direct = before is not None and torch.equal(before.flatten(), given.flatten())
        self._results[self._count] = result
        self.products.append(Product(self._count, given, result.shape[-1], reads, is_direct, name == "embedding"))
        attention = self._get(given).record
        if attention is not None and attention.term < 0:
            attention.term = self._count
        return held | {self._count}

    def _result_lineage(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor], result: Any
    ) -> _Lineage:
        depends = any(self._get(t).depends for t in tensors)
        if name in ID_FREE:
            return _UNKNOWN
        if name == "embedding":
            table, indices = args[0], args[1]
            depends = self._get(indices).depends
            if depends:
                self.token_tables.append((table.shape[0], table.shape[1]))
            elif isinstance(indices, Tensor) and set(indices.shape) & self._lengths:
                self.lookups.append(TableLookup(table.shape[0], indices.detach().clone()))
            return _Lineage(depends=depends)
        if name in ("mul", "mul_", "div", "div_"):
            return self._multiplied(args, result, divide=name.startswith("div"))
        if name in ("bmm", "baddbmm", "mm") or (name == "matmul" and len(tensors) == 2):
            return self._product(name, args, kwargs, result)
        if name in ("_softmax", "softmax", "_safe_softmax", "special_softmax"):
            return self._softmax(args[0], int(args[1]), result)
        if name in ("add", "add_"):
            self._record_position_add(args[0], args[1])
        if name in COPIES or name in KEEPS:
            known = [self._get(t) for t in tensors]
            special = next((k for k in known if k.scores is not None or k.record is not None), None)
            first = special or next((k for k in known if k.depends), known[0] if known else _UNKNOWN)
            return replace(first, depends=depends, rotations=max((k.rotations for k in known), default=0))
        return _Lineage(depends=depends)

    def _multiplied(self, args: Sequence[Any], result: Any, *, divide: bool) -> _Lineage:
        first, second = args[0], args[1]
        if not isinstance(first, Tensor) or (not self._get(first).depends and self._get(second).depends):
            first, second = second, first
        lineage = self._get(first)
        if isinstance(second, Tensor) and second.numel() != 1:
            if self._get(second).depends:
                kept = lineage if lineage.record is not None else self._get(second)
                return _Lineage(depends=True, factor=_norm_factor(result), record=kept.record)
            turns = int(lineage.depends and lineage.scores is None and lineage.record is None and self._varies(second))
            return replace(lineage, rotations=lineage.rotations + turns)
        if isinstance(second, Tensor) and (second.requires_grad or second.is_meta):
            return replace(lineage, factor=None)
        number = float(second.real if isinstance(second, complex) else second)
        if lineage.factor is None or number == 0 or not math.isfinite(number):
            return lineage
        return replace(lineage, factor=lineage.factor / number if divide else lineage.factor * number)

    def _varies(self, tensor: Tensor) -> bool:
        """Return whether a tensor has an axis as long as the text, along which it differs."""
        for axis, size in enumerate(tensor.shape[:-1]):
            if size in self._lengths and size > 1:
                steps = tensor.narrow(axis, 1, 1), tensor.narrow(axis, 0, 1)
                return not torch.equal(*steps)
        return False

    # -- attention ------------------------------------------------------------------------------------------------

    def _product(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> _Lineage:
        a, b = (args[1], args[2]) if name == "baddbmm" else (args[0], args[1])
        left, right = self._get(a), self._get(b)
        depends = left.depends or right.depends
        if left.record is not None:
            if left.record.value is None:
                left.record.value, left.record.used_weights, left.record.value_rotations = b, a, right.rotations
            return _Lineage(depends=True)
        if not (left.depends and right.depends):
            return _Lineage(depends=depends)
        alpha = kwargs.get("alpha", 1) if name == "baddbmm" else 1
        factors = (left.factor, right.factor)
        factor = None if None in factors else left.factor * right.factor * float(alpha)  # type: ignore[operator]
        # A clone, because the keys may lie in a cache that is written again.
        return _Lineage(True, factor, max(left.rotations, right.rotations), scores=(a, b.mT.clone()))

    def _softmax(self, scores: Tensor, dim: int, weights: Tensor) -> _Lineage:
        lineage = self._get(scores)
        if lineage.scores is None:
            return _Lineage(depends=lineage.depends)
        q, k = lineage.scores
        q, k, flat_scores, flat_weights = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, scores, weights))
        record = AttentionRecord(q, k, flat_scores, flat_weights, lineage.factor, lineage.rotations, scores.dtype)
        record.softmax_axis = dim if dim < 0 else dim - scores.dim()
        record.scores_dim, record.query_terms = scores.dim(), self._get(lineage.scores[0]).terms
        record.is_mask_lost = id(scores) in self._unmasked
        self.attentions.append(record)
        return _Lineage(depends=True, record=record)

    def record_fused(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        """Record a call of scaled_dot_product_attention: its scores and weights are computed again."""
        query, key = self._get(q), self._get(k)
        if not query.depends:
            return
        given = options.get("scale")
        scale = q.shape[-1] ** -0.5 if given is None else float(given)
        with self._paused():
            tensors = _attention_by_hand(q, k, v, scale, options.get("attn_mask"), bool(options.get("is_causal")))
        if options.get("dropout_p"):
            self.random_draws += 1
        factors = (query.factor, key.factor)
        factor = None if None in factors else scale * factors[0] * factors[1]  # type: ignore[operator]
        rotations, (flat_q, flat_k, flat_v, scores, weights) = max(query.rotations, key.rotations), tensors
        self.attentions.append(
            AttentionRecord(
                flat_q, flat_k, scores, weights, factor, rotations, torch.float32, True, flat_v, used_weights=weights
            )
        )
        record = self.attentions[-1]
        record.value_rotations, record.query_terms = self._get(v).rotations, query.terms
        self._count += 1
        record.term = self._count

    @contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._in_fused = self._in_fused, True
        try:
            yield
        finally:
            self._in_fused = before

    # -- positions ------------------------------------------------------------------------------------------------

    def _record_position_add(self, a: Any, b: Any) -> None:
        """Record an addition of vectors that depend on the position and not on the ids."""
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return
        x, added = (a, b) if self._get(a).depends else (b, a)
        lineage = self._get(x)
        if not lineage.depends or self._get(added).depends or lineage.scores is not None:
            return
        if not added.is_floating_point() or x.dim() != 3:
            return
        if not self._varies(added):
            is_stream = any(p.is_lookup and p.number in lineage.terms for p in self.products)
            self.same_adds += is_stream and not self.attentions and bool(added.any())
            return
        axis = next(i for i, size in enumerate(added.shape[:-1]) if size in self._lengths and size > 1)
        vectors = added.movedim(axis, 0).reshape(added.shape[axis], -1, added.shape[-1])[:, 0]
        if vectors.isfinite().all():
            vectors = vectors.detach().float().clone()
            self._count += 1
            self.position_adds.append(PositionAdd(vectors, len(self.attentions), self._count, lineage.terms))


def _attention_by_hand(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, ...]:
    """Return q, k, v, scores and weights with one leading axis for rows and heads."""
    heads = q.shape[-3] if q.dim() > 3 else 1
    if k.dim() > 3 and k.shape[-3] != heads:
        k, v = (t.repeat_interleave(heads // t.shape[-3], dim=-3) for t in (k, v))
    scores = q.float() @ k.float().mT * scale
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
    tensors = (q, k, v, scores, torch.softmax(scores, -1))
    return tuple(t.reshape(-1, *t.shape[-2:]) for t in tensors)


def _norm_factor(result: Tensor) -> float:
    """Return the root mean square of vectors that a norm has just made equally long, else 1.

    `F.normalize` gives vectors of length 1, whose numbers are by sqrt(size) smaller than after an RMS norm.
    """
    if result.is_meta or result.dim() < 3 or not result.is_floating_point() or result.shape[-1] < 2:
        return 1.0
    sizes = result.detach().float().square().mean(-1).sqrt()
    lowest, highest = (float(size) for size in (sizes.min(), sizes.max()))
    return highest if lowest > 0.999 * highest > 0 else 1.0


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.is_meta or tensor.is_sparse else tensor.untyped_storage().data_ptr()


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, recorder = func.overloadpacket.__name__, self.recorder
        if name.startswith("_scaled_dot_product") and not recorder._in_fused:  # inside nn.MultiheadAttention
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            options = {"attn_mask": given.get("attn_bias"), **given}
            recorder.record_fused(given["query"], given["key"], given["value"], options)
        recorder.observe(name, args, kwargs or {}, result)
        return result


class _FusedAttention(TorchFunctionMode):
    """Records scaled_dot_product_attention, which is one operation or several, depending on its inputs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        options = {name: value for name, value in given.items() if name not in names[:3]}
        q, k, v = given["query"], given["key"], given["value"]
        recorder = self.recorder
        with recorder._paused():
            out = func(*args, **kwargs)
        recorder.record_fused(q, k, v, options)
        is_known = recorder._get(q).depends
        recorder._set(out, _Lineage(is_known, terms=frozenset([recorder.attentions[-1].term] if is_known else [])))
        return out
