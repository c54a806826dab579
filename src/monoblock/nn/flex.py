"""Names that are in nn/sparse_attention.py."""

from monoblock.nn.sparse_attention import (
    RECOMPILE_LIMIT as RECOMPILE_LIMIT,
    build_from_tiles as build_from_tiles,
    compile_once as compile_once,
)
