"""The recipe section [seq2seq]: the direction of translation, normalization, tags and synthetic pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monoblock.config.schema import check_positive, check_types


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSection:
    """The direction of translation, normalization, tags and synthetic pairs."""

    direction: Literal["forward", "backward", "both"] = (
        "forward"  # "backward": swap source and target; "both": both ways
    )
    normalize: Literal["none", "indic"] = "none"  # "indic": spell Indic words that look the same in one way
    tag: Literal["none", "script"] = "none"  # "script": begin each source with the script of its target, as in <2tamil>
    synthetic: str | None = None  # a file of synthetic training pairs, written by `monoblock backtranslate`
    synthetic_ratio: float = 1.0  # how many synthetic pairs to train on for each real pair

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "synthetic_ratio")
