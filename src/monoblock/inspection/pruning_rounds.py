"""Names that are in inspection/pruning.py."""

from monoblock.inspection.pruning import (
    prune_in_rounds as prune_in_rounds,
)
