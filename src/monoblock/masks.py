"""Masks are statements about places: `causal & window(128) & same_document` says who may see whom.

The same statement holds in training, under padding, for packed documents and in cached decoding, because it speaks of
`Where` each query and key stands, not of rows and columns.  `dense` writes it out as a matrix, the plainest way to run
it; `flex` gives it to FlexAttention; `between` finds out when no matrix is needed at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from monoblock.config import AttentionConfig


@dataclass(frozen=True)
class Where:
    """Where tokens stand, each field (B, T), or (1, T) where all rows are alike.

    `start` is what the host knows without looking: places start, start + 1, … in every row, all real, one document.
    """

    at: Tensor
    document: Tensor | None = None
    real: Tensor | None = None  # False: padding, never seen
    flags: Tensor | None = None  # a global token, or part of the prefix
    start: int | None = None

    @property
    def length(self) -> int:
        return self.at.shape[-1]

    def each(self, change: Callable[[Tensor], Tensor]) -> Where:
        """The same places with every tensor changed."""
        fields = {n: getattr(self, n) for n in ("at", "document", "real", "flags")}
        changed: dict[str, Any] = {n: change(field) for n, field in fields.items() if field is not None}
        return replace(self, **changed)


def run(length: int, start: int = 0, device: torch.device | None = None) -> Where:
    """Places start, start + 1, … the same in every row."""
    return Where(torch.arange(start, start + length, device=device)[None], start=start)


Rule = Callable[[Where, Where], Tensor | bool]


@dataclass(frozen=True)
class Term:
    name: str
    rule: Rule  # fields of q and k come in shapes that broadcast against each other
    reach: int | None = None  # a term that lets through everything nearer than this


@dataclass(frozen=True)
class Mask:
    """A conjunction of terms; `&` joins, `|` makes one term that holds when either side does."""

    terms: tuple[Term, ...] = ()

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.terms + other.terms)

    def __or__(self, other: Mask) -> Mask:
        return Mask((Term(f"({self} | {other})", lambda q, k: self.allows(q, k) | other.allows(q, k)),))

    def __str__(self) -> str:
        return " & ".join(term.name for term in self.terms) or "everything"

    def allows(self, q: Where, k: Where) -> Tensor | bool:
        allowed: Tensor | bool = True
        for term in self.terms:
            allowed = allowed & term.rule(q, k)
        return allowed

    def dense(self, q: Where, k: Where) -> Tensor:
        """Who may see whom as booleans (B, 1, T, S); padding is never seen, whatever the statement says."""
        rows, columns = q.each(lambda t: t[:, None, :, None]), k.each(lambda t: t[:, None, None, :])
        allowed = self.allows(rows, columns)
        if columns.real is not None:
            allowed = allowed & columns.real
        batch = max(q.at.shape[0], k.at.shape[0])
        shape = (batch, 1, q.length, k.length)
        if isinstance(allowed, bool):
            return torch.full(shape, allowed, device=q.at.device)
        return allowed.expand(torch.broadcast_shapes(allowed.shape, (1, 1, q.length, k.length)))

    def flex(self, q: Where, k: Where) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The statement as a FlexAttention mask_mod(batch, head, query index, key index)."""

        def pick(where: Where, b: Tensor, i: Tensor) -> Where:
            return where.each(lambda t: t[b if t.shape[0] > 1 else 0, i])

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            one, other = pick(q, b, i), pick(k, b, j)
            allowed = self.allows(one, other)
            if other.real is not None:
                allowed = allowed & other.real
            return allowed if isinstance(allowed, Tensor) else (i >= 0) & allowed

        return mask_mod

    def between(self, q: Where, k: Where) -> Sight:
        """The cheapest way to run this statement for these places, from what is known without looking at them."""
        terms = tuple(t for t in self.terms if not _vacuous(t, q, k))
        if k.real is not None or (terms and (q.start is None or k.start != 0)):
            return Sight("dense", Mask(terms), q, k)
        if not terms:
            return Sight("all", Mask(), q, k)
        if [t.name for t in terms] == ["causal"] and q.start is not None and q.start + q.length == k.length:
            if q.length == k.length:
                return Sight("causal", Mask(terms), q, k)
            if q.length == 1:  # the newest token sees all there is
                return Sight("all", Mask(), q, k)
        return Sight("dense", Mask(terms), q, k)


def _vacuous(term: Term, q: Where, k: Where) -> bool:
    """Whether a term surely excludes nothing here."""
    if term.name == "same_document":
        return q.document is None or k.document is None
    return (
        term.reach is not None
        and q.start is not None
        and k.start == 0
        and max(q.start + q.length, k.length) <= term.reach
    )


@dataclass(frozen=True)
class Sight:
    """A mask laid over places: "all" and "causal" need no matrix, "dense" writes one."""

    kind: str
    mask: Mask
    q: Where
    k: Where

    def dense(self) -> Tensor:
        return self.mask.dense(self.q, self.k)


# -- the statements -----------------------------------------------------------------------------------------------

everything = Mask()
causal = Mask((Term("causal", lambda q, k: k.at <= q.at),))
same_document = Mask(
    (Term("same_document", lambda q, k: q.document is None or k.document is None or q.document == k.document),)
)
prefix = Mask((Term("prefix", lambda q, k: False if k.flags is None else k.flags),))


def window(size: int) -> Mask:
    """Places closer than `size`, itself included: with `causal` the last `size`, without it `size - 1` to each side."""
    return Mask((Term(f"window({size})", lambda q, k: (q.at - k.at).abs() < size, reach=size),))


def _flagged(where: Where) -> Any:
    """The global tokens; where none is flagged, the first of each document stands for them."""
    return where.at == 0 if where.flags is None else where.flags


# Longformer (Beltagy et al. 2020): global tokens see all and are seen by all.
global_tokens = Mask((Term("global_tokens", lambda q, k: _flagged(q) | _flagged(k)),))


def random_blocks(count: int, size: int = 64, seed: int = 0) -> Mask:
    """BigBird (Zaheer et al. 2020): each block of `size` places has up to `count` random earlier ones linked.

    The links are a function of the two block numbers and the seed, so neither length nor chunking moves them.
    """

    def rule(q: Where, k: Where) -> Tensor:
        one, other = q.at // size, k.at // size
        later, earlier = torch.maximum(one, other), torch.minimum(one, other)
        linked = later == earlier
        for draw in range(count):
            mixed = later * 1_000_003 + (seed * 31 + draw + 1) * 777_767_777
            mixed = ((mixed ^ (mixed >> 15)) * 2_654_435) & 0x7FFFFFFF
            linked = linked | ((mixed ^ (mixed >> 13)) % (later + 1) == earlier)
        return linked

    return Mask((Term(f"random_blocks({count}, {size})", rule),))


def statement(config: AttentionConfig) -> Mask:
    """The statement an attention configuration makes."""
    near = everything
    if config.window is not None:
        near = window(config.window)
        if config.global_tokens:
            near = near | global_tokens
        if config.random_blocks:
            near = near | random_blocks(config.random_blocks, config.block_size, config.random_seed)
    order = {"causal": causal, "prefix": causal | prefix, "full": everything}[config.mask]
    return order & near & same_document
