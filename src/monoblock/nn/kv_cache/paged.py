"""Names that are in nn/paged_cache.py."""

from monoblock.nn.paged_cache import (
    PagedCache as PagedCache,
    PagedLayer as PagedLayer,
    PagedRows as PagedRows,
    PagedSource as PagedSource,
    PagePool as PagePool,
    StaticRows as StaticRows,
    token_bytes as token_bytes,
)
