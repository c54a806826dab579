"""Names that are in config/parts.py."""

from monoblock.config.parts import (
    EmbeddingConfig as EmbeddingConfig,
    PatchConfig as PatchConfig,
)
