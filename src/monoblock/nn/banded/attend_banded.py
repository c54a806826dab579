"""Names that are in nn/sparse_attention.py."""

from monoblock.nn.sparse_attention import (
    attend_banded as attend_banded,
)
