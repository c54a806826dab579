"""Names that are in nn/cache.py."""

from monoblock.nn.cache import (
    Cache as Cache,
)
