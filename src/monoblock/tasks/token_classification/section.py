"""The recipe section [token_classification]: how training rows are augmented and joined."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_at_least, check_fraction, check_types


@dataclass(frozen=True, kw_only=True)
class TokenClassificationSection:
    """How training rows are augmented and joined."""

    replace_entities: float = 0.0  # training: replace this fraction of the entities by others of the same type
    mask_words: float = 0.0  # training: replace this fraction of the words by the mask token
    uppercase_rows: float = 0.0  # training: write this fraction of the rows in capitals, like headlines
    join_rows: int = 1  # join up to this many neighbouring rows into one sample, also in evaluation

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "join_rows")
        check_fraction(self, "replace_entities", "mask_words", "uppercase_rows")

    @property
    def changes_rows(self) -> bool:
        """Whether training rows are joined or augmented."""
        return self.join_rows > 1 or bool(self.replace_entities or self.mask_words or self.uppercase_rows)
