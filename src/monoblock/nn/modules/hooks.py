"""Names that are in nn/hooks.py."""

from monoblock.nn.hooks import (
    is_customized as is_customized,
    is_patched as is_patched,
)
