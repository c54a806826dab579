"""The recipe section [token_classification]: augmentation of the training rows, and context across rows."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_at_least, check_fraction, check_types


@dataclass(frozen=True, kw_only=True)
class TokenClassificationSection:
    replace_entities: float = 0.0  # fraction of the entities replaced by others of their type, in training only
    mask_words: float = 0.0  # fraction of the words replaced by the mask token, in training only
    uppercase_rows: float = 0.0  # fraction of the rows written in capitals, as in headlines, in training only
    join_rows: int = 1  # up to this many neighbouring rows in one sample

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "join_rows")
        check_fraction(self, "replace_entities", "mask_words", "uppercase_rows")

    @property
    def changes_rows(self) -> bool:
        """Whether training rows are joined or augmented."""
        return self.join_rows > 1 or bool(self.replace_entities or self.mask_words or self.uppercase_rows)
