"""The recipe section [seq2seq]: which side is translated, tags, and synthetic pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monoblock.config.schema import check_positive, check_types


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSection:
    direction: Literal["forward", "backward", "both"] = "forward"  # which side of a pair is the source
    normalize: Literal["none", "indic"] = "none"  # give Indic letters that look the same one spelling
    tag: Literal["none", "script"] = "none"  # begin each source with the script of its target, as in <2tamil>
    synthetic: str | None = None  # a file of synthetic pairs, such as `monoblock backtranslate` writes
    synthetic_ratio: float = 1.0  # synthetic pairs for each real pair

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "synthetic_ratio")
