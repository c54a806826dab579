"""The recipe section [question_answering]: the windows of a long context, and questions without an answer."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_at_least, check_types


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringSection:
    """The windows of a long context, and questions without an answer."""

    stride: int | None = None  # tokens from the start of a window to that of the next; by default half a window
    unanswerable: bool = False  # whether questions may have no answer, as in SQuAD 2.0

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "stride")
