"""Names that are in inspection/pruning.py."""

from monoblock.inspection.pruning import (
    HeadImportance as HeadImportance,
    ImportanceMethod as ImportanceMethod,
    head_importance as head_importance,
)
