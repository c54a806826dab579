"""Names that are in config/knobs.py."""

from monoblock.config.knobs import (
    resize_pattern as resize_pattern,
)
