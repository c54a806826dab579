"""Position tables for the C++ operator of cpu_step.py: rotary angles by position, attention biases by distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from monoblock.config.model import Alibi, AttentionConfig, Buckets, Rotary
from monoblock.nn.attention import Attention, select_kept_heads
from monoblock.nn.positions import alibi_bias, relative_position_bucket, rotary_angles
from monoblock.nn.stack import Stack


class _Tables(NamedTuple):
    """Tables for the positions 0 to `length` - 1."""

    length: int
    rotary_cos: list[Tensor]  # one table (length, K/2) for each rotary scheme
    rotary_sin: list[Tensor]
    distances: list[Tensor]  # for each bias, by distance: ALiBi's values (H, length) or bucket indices (length,)


class PositionTables:
    """The position tables of a stack; blocks with the same position scheme share a table.

    `rotary_index` and `bias_index` register a block's position scheme and return its index in the lists that `get`
    returns.
    """

    def __init__(self, stack: Stack) -> None:
        self.width, self.shared_bias = stack.config.width, stack.position_bias
        self.rotary_configs: list[AttentionConfig] = []
        self.bias_sources: list[tuple[AttentionConfig, nn.Embedding | None]] = []
        self._tables = _Tables(0, [], [], [])

    def rotary_index(self, config: AttentionConfig) -> int:
        """Return the index of an attention layer's rotary tables, or -1 if its positions are not rotary."""
        if not isinstance(config.positions, Rotary):
            return -1
        if config not in self.rotary_configs:
            self.rotary_configs.append(config)
        return self.rotary_configs.index(config)

    def bias_index(self, attention: Attention) -> int:
        """Return the index of an attention layer's bias table, or -1 if the layer has no position bias."""
        config = attention.config
        if not isinstance(config.positions, (Alibi, Buckets)):
            return -1
        table = attention.position_bias if attention.position_bias is not None else self.shared_bias
        if (config, table) not in self.bias_sources:
            self.bias_sources.append((config, table))
        return self.bias_sources.index((config, table))

    def get(self, length: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return three lists of tables for at least `length` positions: rotary cosines, rotary sines, attention biases.

        Cosines and sines have shape (N, K/2) and are indexed by position.  Biases have shape (H, N), are indexed by
        distance, and are computed from the current weights of the model.  N is `length` or more.
        """
        tables = self._at_least(length)
        sources = zip(self.bias_sources, tables.distances, strict=True)
        biases = [_bias_by_distance(config, table, distances) for (config, table), distances in sources]
        return tables.rotary_cos, tables.rotary_sin, biases

    def _at_least(self, length: int) -> _Tables:
        """Return tables for at least `length` positions; build longer ones if the present tables are too short.

        They are replaced in one assignment, so that several threads may call this at once.
        """
        tables = self._tables
        if length > tables.length:
            with torch.inference_mode(False), torch.no_grad():
                self._tables = tables = self._build(1 << (length - 1).bit_length())
        return tables

    def _build(self, length: int) -> _Tables:
        positions, cos, sin = torch.arange(length)[None], [], []
        for config in self.rotary_configs:
            assert isinstance(config.positions, Rotary)
            angles = rotary_angles(config.positions, config.key_size(self.width), positions, torch.float32)
            cos.append(angles.cos[0, 0].contiguous())
            sin.append(angles.sin[0, 0].contiguous())
        distances = [_distance_table(config, positions, self.width) for config, _ in self.bias_sources]
        return _Tables(length, cos, sin, distances)


def _distance_table(config: AttentionConfig, positions: Tensor, width: int) -> Tensor:
    """Return, for each distance, ALiBi's bias (H, length) or the index of the relative-position bucket (length,)."""
    if isinstance(config.positions, Buckets):
        return relative_position_bucket(config.positions, -positions[0], bidirectional=False)
    assert isinstance(config.positions, Alibi)
    first = torch.zeros_like(positions[:, :1])
    bias = alibi_bias(config.positions, config.num_unpruned_heads, config.key_size(width), first, positions)
    return select_kept_heads(bias, config)[0, :, 0].contiguous()


def _bias_by_distance(config: AttentionConfig, table: nn.Embedding | None, distances: Tensor) -> Tensor:
    if table is None:
        return distances
    return select_kept_heads(table.weight[distances].T[None], config)[0].contiguous()
