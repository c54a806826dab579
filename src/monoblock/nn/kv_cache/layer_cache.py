"""Names that are in nn/cache.py."""

from monoblock.nn.cache import (
    CrossAttentionCache as CrossAttentionCache,
    KeyValues as KeyValues,
    LayerCache as LayerCache,
)
