"""Names that are in nn/sparse_attention.py."""

from monoblock.nn.sparse_attention import (
    plan_tiles as plan_tiles,
)
