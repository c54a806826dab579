"""Names that are in config/parts.py."""

from monoblock.config.parts import (
    Learned as Learned,
    Rotary as Rotary,
    Scaling as Scaling,
    Sinusoid as Sinusoid,
)
