"""Names that are in nn/interpolate_positions.py."""

from monoblock.nn.interpolate_positions import (
    interpolate as interpolate,
)
