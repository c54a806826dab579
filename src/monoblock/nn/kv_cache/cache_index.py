"""Names that are in nn/cache.py."""

from monoblock.nn.cache import (
    CacheWrite as CacheWrite,
)
