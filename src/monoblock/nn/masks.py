"""Attention masks as predicates on positions, such as `causal & window(128) & same_document`.

A mask compares the `TokenPositions` of queries and keys, not rows and columns of a matrix, so the same mask holds in
training, under padding, for packed documents and in cached decoding.  `dense` writes it out as a matrix, `to_mask_mod`
passes it to FlexAttention, and `resolve` finds the cases that need no matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoblock.config.model import AttentionConfig
from monoblock.nn.token_positions import TokenPositions, arange_positions

MaskPredicate = Callable[[TokenPositions, TokenPositions], Tensor | bool]


@dataclass(frozen=True)
class MaskTerm:
    name: str
    predicate: MaskPredicate  # of queries and keys, whose fields broadcast against each other
    reach: int | None = None  # the term allows every pair of positions closer than this


@dataclass(frozen=True)
class Mask:
    """A conjunction of terms: `a & b` allows what both allow, `a | b` what either allows."""

    terms: tuple[MaskTerm, ...] = ()

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.terms + other.terms)

    def __or__(self, other: Mask) -> Mask:
        return Mask((MaskTerm(f"({self} | {other})", lambda q, k: self.allows(q, k) | other.allows(q, k)),))

    def __str__(self) -> str:
        return " & ".join(term.name for term in self.terms) or "everything"

    def allows(self, q: TokenPositions, k: TokenPositions) -> Tensor | bool:
        """Return whether queries may see keys, ignoring padding; fields of q and k broadcast against each other."""
        allowed: Tensor | bool = True
        for term in self.terms:
            allowed = allowed & term.predicate(q, k)
        return allowed

    def dense(self, q: TokenPositions, k: TokenPositions) -> Tensor:
        """Return the mask as booleans (B, 1, T, S), True where a query may see a key; padding keys are never seen."""
        queries, keys = q.map_tensors(lambda t: t[:, None, :, None]), k.map_tensors(lambda t: t[:, None, None, :])
        allowed = self.allows(queries, keys)
        if keys.valid is not None:
            allowed = allowed & keys.valid
        batch = max(q.positions.shape[0], k.positions.shape[0])
        shape = (batch, 1, q.length, k.length)
        if isinstance(allowed, bool):
            return torch.full(shape, allowed, device=q.positions.device)
        return allowed.expand(torch.broadcast_shapes(allowed.shape, (1, 1, q.length, k.length)))

    def to_mask_mod(self, q: TokenPositions, k: TokenPositions) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the mask as a FlexAttention function mask_mod(batch, head, query index, key index)."""

        def pick(tokens: TokenPositions, b: Tensor, i: Tensor) -> TokenPositions:
            return tokens.map_tensors(lambda t: t[b if t.shape[0] > 1 else 0, i])

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            query, key = pick(q, b, i), pick(k, b, j)
            allowed = self.allows(query, key)
            if key.valid is not None:
                allowed = allowed & key.valid
            return allowed if isinstance(allowed, Tensor) else (i >= 0) & allowed

        return mask_mod

    def resolve(self, q: TokenPositions, k: TokenPositions) -> ResolvedMask:
        """Find the cheapest way to apply the mask to these queries and keys, without reading the values of a tensor."""
        terms = tuple(term for term in self.terms if not _is_vacuous(term, q, k))
        if k.valid is not None or (terms and (q.start is None or k.start != 0)):
            return ResolvedMask("dense", Mask(terms), q, k)
        if not terms:
            return ResolvedMask("all", Mask(), q, k)
        if [term.name for term in terms] == ["causal"] and q.start is not None and q.start + q.length == k.length:
            if q.length == k.length:
                return ResolvedMask("causal", Mask(terms), q, k)
            if q.length == 1:  # the last token sees every key
                return ResolvedMask("all", Mask(), q, k)
        return ResolvedMask("dense", Mask(terms), q, k)


def _is_vacuous(term: MaskTerm, q: TokenPositions, k: TokenPositions) -> bool:
    """Return whether a term is known to allow every pair of these queries and keys."""
    if term.name == "same_document":
        return q.document is None or k.document is None
    return (
        term.reach is not None
        and q.start is not None
        and k.start == 0
        and max(q.start + q.length, k.length) <= term.reach
    )


@dataclass(frozen=True)
class ResolvedMask:
    """A mask for given queries and keys.

    `kind` is "all" if every key is visible, "causal", or "dense"; only "dense" needs the mask as a matrix.
    """

    kind: str
    mask: Mask
    q: TokenPositions
    k: TokenPositions
    matrix: Tensor | None = None  # the mask itself, if it was given as a matrix (see `mask_from_matrix`)

    def dense(self) -> Tensor:
        """Return the mask as booleans (B, 1, T, S), or as the matrix that was given."""
        return self.mask.dense(self.q, self.k) if self.matrix is None else self.matrix


# -- masks --------------------------------------------------------------------------------------------------------

everything = Mask()
causal = Mask((MaskTerm("causal", lambda q, k: k.positions <= q.positions),))
same_document = Mask(
    (MaskTerm("same_document", lambda q, k: q.document is None or k.document is None or q.document == k.document),)
)
prefix = Mask((MaskTerm("prefix", lambda q, k: False if k.prefix_or_global is None else k.prefix_or_global),))


def window(size: int) -> Mask:
    """Return a mask that allows positions closer than `size`.

    Together with `causal` a token sees the last `size` tokens including itself, without it `size - 1` to each side.
    """
    return Mask((MaskTerm(f"window({size})", lambda q, k: (q.positions - k.positions).abs() < size, reach=size),))


def _is_global(tokens: TokenPositions) -> Any:
    """Return which tokens are global: those flagged or, if there are no flags, the first of each document."""
    return tokens.positions == 0 if tokens.prefix_or_global is None else tokens.prefix_or_global


# Longformer (Beltagy et al. 2020): global tokens see all tokens and are seen by all.
global_tokens = Mask((MaskTerm("global_tokens", lambda q, k: _is_global(q) | _is_global(k)),))


def random_blocks(count: int, size: int = 64, seed: int = 0) -> Mask:
    """Return BigBird's mask (Zaheer et al. 2020), which links each block of positions to random earlier blocks.

    Each block of `size` positions is linked to itself and to up to `count` earlier blocks, and positions in linked
    blocks see each other.  The links are computed by hashing the index of the block and the seed, so they do not depend
    on the length of the text.
    """

    def predicate(q: TokenPositions, k: TokenPositions) -> Tensor:
        q_block, k_block = q.positions // size, k.positions // size
        later, earlier = torch.maximum(q_block, k_block), torch.minimum(q_block, k_block)
        linked = later == earlier
        for draw in range(count):
            hashed = later * 1_000_003 + (seed * 31 + draw + 1) * 777_767_777
            hashed = ((hashed ^ (hashed >> 15)) * 2_654_435) & 0x7FFFFFFF
            linked = linked | ((hashed ^ (hashed >> 13)) % (later + 1) == earlier)
        return linked

    return Mask((MaskTerm(f"random_blocks({count}, {size})", predicate),))


def mask_from_matrix(allowed: Tensor) -> ResolvedMask:
    """Return a mask given as booleans that broadcast to (B, H, T, S), True where a query may see a key.

    A mask that follows from positions is better built from the masks above: it then holds in cached decoding as well.
    """
    matrix = allowed[(None,) * (4 - allowed.dim())]
    q, k = (arange_positions(length, device=allowed.device) for length in matrix.shape[-2:])
    return ResolvedMask("dense", everything, q, k, matrix)


def mask_from_config(config: AttentionConfig) -> Mask:
    """Build the mask of an attention configuration."""
    nearby = everything
    if config.window is not None:
        nearby = window(config.window)
        if config.global_tokens:
            nearby = nearby | global_tokens
        if config.random_blocks:
            nearby = nearby | random_blocks(config.random_blocks, config.block_size, config.random_seed)
    order = {"causal": causal, "prefix": causal | prefix, "full": everything}[config.mask]
    return order & nearby & same_document
