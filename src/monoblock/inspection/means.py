"""Names that are in inspection/trace.py."""

from monoblock.inspection.trace import (
    mean_activations as mean_activations,
)
