"""Names that are in inspection/head_scores.py."""

from monoblock.inspection.head_scores import (
    PAIRS as PAIRS,
    CoreferencePair as CoreferencePair,
    find_coreference_head as find_coreference_head,
    find_word as find_word,
)
