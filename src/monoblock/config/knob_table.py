"""Names that are in config/knobs.py."""

from monoblock.config.knobs import (
    list_knobs as list_knobs,
    read_knob as read_knob,
)
