"""Names that are in config/knobs.py."""

from monoblock.config.knobs import (
    Knobs as Knobs,
    StyleKnobs as StyleKnobs,
)
