"""Names that are in inspection/pruning.py."""

from monoblock.inspection.pruning import (
    HeadGroup as HeadGroup,
    choose_heads as choose_heads,
    list_groups as list_groups,
    prunable_layers as prunable_layers,
    rank_heads as rank_heads,
)
