"""Names that are in nn/masks.py."""

from monoblock.nn.masks import (
    TokenPositions as TokenPositions,
    arange_positions as arange_positions,
)
