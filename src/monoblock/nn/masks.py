"""Attention masks as predicates on positions, such as `causal & window(128) & same_document`.

A mask compares the `TokenPositions` of queries and keys, not rows and columns of a matrix, so the same mask holds in
training, under padding, for packed documents and in cached decoding.  `dense` writes it out as a matrix, `to_mask_mod`
passes it to FlexAttention, and `resolve` finds the cases that need no matrix.  `may_allow` finds the tiles of the
matrix in which a query may see a key, so that sparse_attention.py need not compute
the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from monoblock.config.model import AttentionConfig
from monoblock.nn.packed_documents import DocumentRows, PackedDocuments


@dataclass(frozen=True)
class TokenPositions:
    """The position of every token; each field is (B, T), or (1, T) if all rows are equal.

    `start` is set if the host knows, without reading a tensor, that every row has the positions start, start + 1, …,
    no padding and one document.
    """

    positions: Tensor
    document: Tensor | None = None
    valid: Tensor | None = None  # False on padding, which no query sees
    prefix_or_global: Tensor | None = None  # True on global tokens, or on the tokens of a prefix
    start: int | None = None
    packed: PackedDocuments | None = None  # the same documents as `document`, if it is known where they begin
    features: dict[str, Tensor] = field(default_factory=dict, compare=False)  # of every token, by name (see MaskTerm)

    @property
    def length(self) -> int:
        return self.positions.shape[-1]

    @property
    def batch(self) -> int:
        """The number of rows: 1 if every field is the same in all rows."""
        fields = (self.positions, self.document, self.valid, self.prefix_or_global)
        return max(field.shape[0] for field in fields if field is not None)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> TokenPositions:
        """Return a copy with a function applied to every tensor."""
        fields = {name: getattr(self, name) for name in ("positions", "document", "valid", "prefix_or_global")}
        changed: dict[str, Any] = {name: fn(field) for name, field in fields.items() if field is not None}
        if self.features:
            changed["features"] = {name: fn(feature) for name, feature in self.features.items()}
        return replace(self, **changed)

    def as_rows(self, *, padding: bool = True) -> TokenPositions:
        """Return the positions of packed documents as rows, one for each document, padded to equal length.

        With padding=False the padding is not marked as such, for a mask that hides it in any case.
        """
        assert self.packed is not None
        tokens = arange_positions(self.packed.max_length, device=self.positions.device)
        flags = self.prefix_or_global
        flags = None if flags is None else DocumentRows(self.packed).to_rows(flags[0])
        if flags is None and not padding:
            return tokens
        return TokenPositions(tokens.positions, valid=self.packed.valid() if padding else None, prefix_or_global=flags)


@dataclass(frozen=True)
class TokenRanges:
    """The smallest and the largest value of every field in each tile of successive tokens, (B, tiles) each.

    Padding is left out of the ranges; `high.valid` is False for a tile of padding only.
    """

    low: TokenPositions
    high: TokenPositions

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> TokenRanges:
        """Return a copy with a function applied to every tensor."""
        return TokenRanges(self.low.map_tensors(fn), self.high.map_tensors(fn))


def arange_positions(length: int, start: int = 0, device: torch.device | None = None) -> TokenPositions:
    """Return the positions start, start + 1, …, which are the same in every row."""
    return TokenPositions(torch.arange(start, start + length, device=device)[None], start=start)


MaskPredicate = Callable[[TokenPositions, TokenPositions], Tensor | bool]
TilePredicate = Callable[[TokenRanges, TokenRanges], Tensor | bool]
Feature = Callable[[TokenPositions], Tensor]


@dataclass(frozen=True)
class MaskTerm:
    name: str
    predicate: MaskPredicate  # of queries and keys, whose fields broadcast against each other
    reach: int | None = None  # the term allows every pair of positions closer than this
    # whether the term may allow a pair in these tiles of queries and keys; None: it may in every tile
    tile_predicate: TilePredicate | None = None
    # what the predicate needs of every token and is slow to compute, by name; see `TokenPositions.features`
    features: tuple[tuple[str, Feature], ...] = ()


@dataclass(frozen=True)
class Mask:
    """A conjunction of terms: `a & b` allows what both allow, `a | b` what either allows."""

    terms: tuple[MaskTerm, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        predicate: MaskPredicate,
        *,
        reach: int | None = None,
        tile_predicate: TilePredicate | None = None,
        features: tuple[tuple[str, Feature], ...] = (),
    ) -> Mask:
        """Return a mask of one term."""
        return cls((MaskTerm(name, predicate, reach, tile_predicate, features),))

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.terms + other.terms)

    def __or__(self, other: Mask) -> Mask:
        return Mask.of(
            f"({self} | {other})",
            lambda q, k: self.allows(q, k) | other.allows(q, k),
            tile_predicate=lambda q, k: self.may_allow(q, k) | other.may_allow(q, k),
            features=tuple(feature for term in (*self.terms, *other.terms) for feature in term.features),
        )

    def __str__(self) -> str:
        return " & ".join(term.name for term in self.terms) or "everything"

    def allows(self, q: TokenPositions, k: TokenPositions) -> Tensor | bool:
        """Return whether queries may see keys, ignoring padding; fields of q and k broadcast against each other."""
        allowed: Tensor | bool = True
        for term in self.terms:
            allowed = allowed & term.predicate(q, k)
        return allowed

    def may_allow(self, q: TokenRanges, k: TokenRanges) -> Tensor | bool:
        """Return False where no query of a tile may see any key of a tile; fields of q and k broadcast.

        The result may be True although no pair is allowed: it only says which tiles need not be computed.
        """
        possible: Tensor | bool = True
        for term in self.terms:
            if term.tile_predicate is not None:
                possible = possible & term.tile_predicate(q, k)
        return possible

    def dense(self, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "B 1 T S"]:
        """Return the mask as booleans, True where a query may see a key; padding keys are never seen."""
        queries, keys = q.map_tensors(lambda t: t[:, None, :, None]), k.map_tensors(lambda t: t[:, None, None, :])
        allowed = self.allows(queries, keys)
        if keys.valid is not None:
            allowed = allowed & keys.valid
        shape = (max(q.batch, k.batch), 1, q.length, k.length)
        if isinstance(allowed, bool):
            return torch.full(shape, allowed, device=q.positions.device)
        return allowed.expand(-1, -1, q.length, k.length)

    def to_mask_mod(self, q: TokenPositions, k: TokenPositions) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the mask as a FlexAttention function mask_mod(batch, head, query index, key index)."""
        q, k = self._add_features(q), self._add_features(k)

        def pick(tokens: TokenPositions, b: Tensor, i: Tensor) -> TokenPositions:
            return tokens.map_tensors(lambda t: t[b if t.shape[0] > 1 else 0, i])

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            query, key = pick(q, b, i), pick(k, b, j)
            allowed = self.allows(query, key)
            if key.valid is not None:
                allowed = allowed & key.valid
            return allowed if isinstance(allowed, Tensor) else (i >= 0) & allowed

        return mask_mod

    def _add_features(self, tokens: TokenPositions) -> TokenPositions:
        found = {name: feature(tokens) for term in self.terms for name, feature in term.features}
        return replace(tokens, features=found) if found else tokens

    def resolve(self, q: TokenPositions, k: TokenPositions) -> ResolvedMask:
        """Find the cheapest way to apply the mask to these queries and keys, without reading the values of a tensor."""
        terms = tuple(term for term in self.terms if not _is_vacuous(term, q, k))
        if k.valid is None and not terms:
            return ResolvedMask("all", Mask(), q, k)
        if k.valid is None and [term.name for term in terms] == ["causal"] and q.start is not None and k.start == 0:
            if q.start == 0 and q.length == k.length:
                return ResolvedMask("causal", Mask(terms), q, k)
            if q.length == 1 and q.start + 1 == k.length:  # the last token sees every key
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

    def dense(self) -> Bool[Tensor, "#B #H #T #S"]:
        """Return the mask as booleans, or as the matrix that was given."""
        return self.mask.dense(self.q, self.k) if self.matrix is None else self.matrix


# -- masks --------------------------------------------------------------------------------------------------------

everything = Mask()
causal = Mask.of(
    "causal",
    lambda q, k: k.positions <= q.positions,
    tile_predicate=lambda q, k: k.low.positions <= q.high.positions,
)
prefix = Mask.of(
    "prefix",
    lambda q, k: False if k.prefix_or_global is None else k.prefix_or_global,
    tile_predicate=lambda q, k: False if k.high.prefix_or_global is None else k.high.prefix_or_global,
)


def _share_document(q: TokenRanges, k: TokenRanges) -> Any:
    """Return whether tiles may hold tokens of the same document."""
    if q.low.document is None or k.low.document is None:
        return True
    assert q.high.document is not None
    assert k.high.document is not None
    return (k.low.document <= q.high.document) & (q.low.document <= k.high.document)


same_document = Mask.of(
    "same_document",
    lambda q, k: q.document is None or k.document is None or q.document == k.document,
    tile_predicate=_share_document,
)


def window(size: int) -> Mask:
    """Return a mask that allows positions closer than `size`.

    Together with `causal` a token sees the last `size` tokens including itself, without it `size - 1` to each side.
    """

    def tile_predicate(q: TokenRanges, k: TokenRanges) -> Tensor:
        return (k.low.positions - q.high.positions < size) & (q.low.positions - k.high.positions < size)

    def predicate(q: TokenPositions, k: TokenPositions) -> Tensor:
        return (q.positions - k.positions).abs() < size

    return Mask.of(f"window({size})", predicate, reach=size, tile_predicate=tile_predicate)


def _is_global(tokens: TokenPositions) -> Any:
    """Return which tokens are global: those flagged or, if there are no flags, the first of each document."""
    return tokens.positions == 0 if tokens.prefix_or_global is None else tokens.prefix_or_global


def _has_global(tiles: TokenRanges) -> Any:
    """Return which tiles may hold a global token."""
    if tiles.high.prefix_or_global is not None:
        return tiles.high.prefix_or_global
    return (tiles.low.positions <= 0) & (tiles.high.positions >= 0)


# Longformer (Beltagy et al. 2020): global tokens see all tokens and are seen by all.
global_tokens = Mask.of(
    "global_tokens",
    lambda q, k: _is_global(q) | _is_global(k),
    tile_predicate=lambda q, k: _has_global(q) | _has_global(k),
)


def random_blocks(count: int, size: int = 64, seed: int = 0) -> Mask:
    """Return BigBird's mask (Zaheer et al. 2020), which links each block of positions to random earlier blocks.

    Each block of `size` positions is linked to itself and to up to `count` earlier blocks, and positions in linked
    blocks see each other.  The links are computed by hashing the index of the block and the seed, so they do not depend
    on the length of the text.
    """
    name = f"random_blocks({count}, {size}, {seed})"

    def draw_block(block: Tensor, draw: int) -> Tensor:
        """Return a random block that is not later than `block`."""
        hashed = block * 1_000_003 + (seed * 31 + draw + 1) * 777_767_777
        hashed = ((hashed ^ (hashed >> 15)) * 2_654_435) & 0x7FFFFFFF
        return (hashed ^ (hashed >> 13)) % (block + 1)

    def are_linked(q_block: Tensor, k_block: Tensor, q_draws: list[Tensor], k_draws: list[Tensor]) -> Tensor:
        linked = q_block == k_block
        for q_draw, k_draw in zip(q_draws, k_draws, strict=True):
            linked = linked | (q_draw == k_block) | (k_draw == q_block)
        return linked

    def draw_blocks(block: Tensor) -> list[Tensor]:
        return [draw_block(block, draw) for draw in range(count)]

    def drawn_by(tokens: TokenPositions) -> list[Tensor]:
        known = [tokens.features[feature] for feature, _ in features if feature in tokens.features]
        return known if len(known) == count else draw_blocks(tokens.positions // size)

    def predicate(q: TokenPositions, k: TokenPositions) -> Tensor:
        return are_linked(q.positions // size, k.positions // size, drawn_by(q), drawn_by(k))

    def tile_predicate(q: TokenRanges, k: TokenRanges) -> Tensor | bool:
        (q_first, q_blocks), (k_first, k_blocks) = _block_span(q, size), _block_span(k, size)
        if q_blocks * k_blocks > MAX_BLOCK_PAIRS:
            return True
        linked: Tensor | bool = False
        for i in range(q_blocks):
            for j in range(k_blocks):
                q_block, k_block = q_first + i, k_first + j
                linked = linked | are_linked(q_block, k_block, draw_blocks(q_block), draw_blocks(k_block))
        return linked

    features = tuple(
        (f"{name}, {draw}", lambda tokens, draw=draw: draw_block(tokens.positions // size, draw))
        for draw in range(count)
    )
    return Mask.of(name, predicate, tile_predicate=tile_predicate, features=features)


MAX_BLOCK_PAIRS = 32  # tiles that span more pairs of random blocks are not examined, but assumed to be linked


def _block_span(tiles: TokenRanges, size: int) -> tuple[Tensor, int]:
    """Return the first block of `size` positions in each tile, and in how many blocks at most the tokens of a tile lie.

    Tiles of padding only, whose ranges are empty, have the first block 0.
    """
    first = tiles.low.positions // size
    num_blocks = tiles.high.positions // size - first + 1
    return first.masked_fill(num_blocks < 1, 0), max(int(num_blocks.max()), 1)


def mask_from_matrix(allowed: Bool[Tensor, "*BH T S"]) -> ResolvedMask:
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
