"""Names that are in inspection/head_scores.py."""

from monoblock.inspection.head_scores import (
    head_statistics as head_statistics,
)
