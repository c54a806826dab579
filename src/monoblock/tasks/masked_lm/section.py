"""The recipe section of the tasks that restore corrupted tokens: [masked_lm] and [span_corruption]."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_fraction, check_types
from monoblock.data.readers.records import CorpusKind

MASKED_LM_CORPUS_KINDS: tuple[CorpusKind, ...] = ("text", "labelled", "tagged")  # labels are ignored


@dataclass(frozen=True, kw_only=True)
class CorruptionSection:
    """How many tokens are masked or replaced by sentinels."""

    mask_rate: float = 0.15  # the fraction of the tokens that are masked, or in masked spans

    def __post_init__(self) -> None:
        check_types(self)
        check_fraction(self, "mask_rate")
