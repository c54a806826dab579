"""Names that are in nn/beam_cache.py."""

from monoblock.nn.beam_cache import (
    MAX_BEAMS as MAX_BEAMS,
    SAME_HYPOTHESIS as SAME_HYPOTHESIS,
    BeamCache as BeamCache,
)
