"""Choose the rows that are held out for validation from a file or a corpus that has no validation rows of its own.

They are drawn at random with a fixed seed, so that a file sorted by class, source or date is split like any other, and
every run and evaluation of the file has the same split. Each class keeps its share. Rows that belong together are held
out together: sentences of one document, questions about one context, targets of one source, copies of one text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from monoblock.data.readers.records import LabelledImage, LabelledPicture, LabelledText, Pair, Question, TaggedSentence
from monoblock.errors import ConfigError, SplitError

SplitMethod = Literal["random", "last"]
VALIDATION_FRACTION = 0.1
SEED = 0


@dataclass(frozen=True)
class Holdout:
    """How many rows are held out for validation, and which.

    method: "random" draws them, with a fixed seed; "last" takes the last rows of the file.
    count: the number of rows; 0 means a tenth of a file without splits, and none of a corpus that has splits.
    """

    method: SplitMethod = "random"
    count: int = 0


DEFAULT_HOLDOUT = Holdout()


class SplitRows(NamedTuple):
    rows: list[Any]
    selection: str  # which rows are held out for validation, in words for the user


def split_rows(rows: list[Any], split: str, name: str, holdout: Holdout) -> SplitRows:
    """Return the rows of one split, in their order: "valid" is what is held out, "train" the rest, "all" every row.

    If the only row is a text, its characters are divided instead: the last tenth is held out. `name` is the path that
    an error names.
    """
    if split == "all":
        return SplitRows(rows, "")
    if split == "test":
        raise SplitError(f"{name} is one file and has no split 'test'; give a folder with train, valid and test files")
    if len(rows) == 1 and isinstance(rows[0], str):
        return _split_text(rows[0], split, name, holdout)
    if holdout.count and holdout.count >= len(rows):
        raise ConfigError(
            f"data.validation_rows={holdout.count} leaves none of the {len(rows)} rows to train on; "
            "write a smaller number"
        )
    held_out, selection = choose_held_out(rows, holdout)
    chosen = set(held_out)
    return SplitRows([row for index, row in enumerate(rows) if (index in chosen) == (split == "valid")], selection)


def _split_text(text: str, split: str, name: str, holdout: Holdout) -> SplitRows:
    if holdout.count:
        raise ConfigError(
            f"{name} is one running text, of which the last tenth is held out; leave out data.validation_rows, "
            "or give documents as the rows of a .jsonl file"
        )
    cut = int(len(text) * (1 - VALIDATION_FRACTION))
    part = text[:cut] if split == "train" else text[cut:]
    return SplitRows([part] * bool(part), "the last tenth of the text")


def choose_held_out(rows: Sequence[Any], holdout: Holdout) -> tuple[list[int], str]:
    """Return the ascending indices of the rows to hold out, and in words how they were chosen."""
    count = holdout.count or len(rows) - int(len(rows) * (1 - VALIDATION_FRACTION))
    if holdout.method == "last":
        return list(range(len(rows) - count, len(rows))), "the last rows"
    classes = _classes(rows)
    by_class = "drawn at random with a fixed seed" + (", the same share of each class" if classes else "")
    groups = _groups(rows)
    if len(groups) < len(rows):
        chosen = _draw(groups, classes, count)
        if chosen:
            return chosen, f"{by_class}, rows of one {_group_name(rows[0])} together"
    single = [[index] for index in range(len(rows))]
    return _draw(single, classes, count) or _draw(single, [], count), by_class


def _classes(rows: Sequence[Any]) -> list[Any]:
    """Return the class of each row; [] if rows have no class, or if their labels are the numbers of a regression."""
    if not isinstance(rows[0], LabelledText | LabelledImage | LabelledPicture):
        return []
    labels = [row.label for row in rows]
    distinct = set(labels)
    is_regression = 2 * len(distinct) > len(rows) and all(map(is_number, distinct))
    return [] if is_regression else labels


def is_number(label: object) -> bool:
    """Return whether a label is written as a number."""
    try:
        float(str(label))
    except ValueError:
        return False
    return True


def _groups(rows: Sequence[Any]) -> list[list[int]]:
    """Return the indices of the rows that belong together, for each group."""
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(_group_key(row, index), []).append(index)
    return list(groups.values())


def _group_key(row: Any, index: int) -> Hashable:
    match row:
        case Pair():
            return row.source
        case LabelledText():
            return row.text, row.text_pair
        case TaggedSentence(document=document) if document:
            return "document", document
        case Question():
            return row.context
    return index


def _group_name(row: Any) -> str:
    names = {Pair: "source", LabelledText: "text", TaggedSentence: "document", Question: "context"}
    return names[type(row)]


def _draw(groups: Sequence[list[int]], classes: Sequence[Any], count: int) -> list[int]:
    """Draw groups with about `count` rows in all; every class gives its share, and keeps a row to train on.

    classes: the class of each row; [] if there are none. A group has the class of its first row.
    """
    from monoblock.data.batching.plans import permutation

    by_class: dict[Any, list[list[int]]] = {}
    for group in groups:
        by_class.setdefault(classes[group[0]] if classes else None, []).append(group)
    strata = [by_class[label] for label in sorted(by_class)] if classes else list(by_class.values())
    chosen: list[int] = []
    for number, (members, quota) in enumerate(zip(strata, _quotas(strata, count), strict=True)):
        for index in permutation(SEED, number, len(members), "holdout").tolist() if quota else ():
            if len(members[index]) <= quota:
                chosen += members[index]
                quota -= len(members[index])
    return sorted(chosen)


def _quotas(strata: Sequence[list[list[int]]], count: int) -> list[int]:
    """Divide `count` rows among classes in proportion to their sizes, by the method of largest remainders."""
    sizes = [sum(map(len, members)) for members in strata]
    total = sum(sizes)
    quotas = [min(count * size // total, size - 1) for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda number: (-(count * sizes[number] % total), -sizes[number]))
    missing = count - sum(quotas)
    while missing and any(quota < size - 1 for quota, size in zip(quotas, sizes, strict=True)):
        for number in by_remainder:
            if missing and quotas[number] < sizes[number] - 1:
                quotas[number] += 1
                missing -= 1
    return quotas
