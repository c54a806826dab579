"""Names that are in inspection/edits.py."""

from monoblock.inspection.edits import (
    layout_of as layout_of,
)
