"""Names that are in config/parts.py."""

from monoblock.config.parts import (
    MAX_CONTEXT as MAX_CONTEXT,
)
