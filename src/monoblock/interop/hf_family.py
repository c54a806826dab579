"""A published family as one row: a structure to start from, its fields, its weights, the classes that have a head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monoblock.config import HeadConfig, ModelConfig
from monoblock.errors import ConfigError, FileError
from monoblock.interop.hf_config import (
    Row,
    Tree,
    check_fields,
    difference,
    read_rows,
    roll,
    sized,
    write_rows,
)
from monoblock.interop.hf_harmless import HARMLESS
from monoblock.interop.rename import Rule
from monoblock.schema import to_dict

SPEAKS = ("language_model", "masked_lm")


def head(**words: Any) -> Tree:
    return to_dict(HeadConfig(**words))


LM = head(kind="language_model")
LM_BIAS = head(kind="language_model", bias="learned")
LM_FIXED = head(kind="language_model", bias="fixed")


def over(rows: Sequence[Row], *later: Row) -> tuple[Row, ...]:
    """Rows with later ones in the place of those that say the same fields."""
    said = {name for row in later for name in row.names}
    return (*(row for row in rows if not said & set(row.names)), *later)


def without(rows: Sequence[Row], *fields: str) -> tuple[Row, ...]:
    return tuple(row for row in rows if not set(fields) & set(row.names))


@dataclass(frozen=True, kw_only=True)
class Family:
    """`start` is the structure, its sizes do not matter.  The first class is the one a model without a name has.

    Names of weights stand in `weights` as the classes with a head have them; a class in `bare` leaves `prefix` out.
    `ignored` are weights that can be made from the configuration or that no head here reads; `alike` names
    that may be stored beside another for the same tensor.
    """

    kind: str  # their model_type
    start: ModelConfig
    rows: Sequence[Row]
    weights: Sequence[Rule]
    classes: Mapping[str, Tree | None]  # head by class
    prefix: str = ""
    bare: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # patterns, `*` is a number
    alike: Mapping[str, str] = field(default_factory=dict)
    tied: bool = True  # what the class takes where a file says nothing
    synonyms: Mapping[str, str] = field(default_factory=dict)  # older names of fields
    others: tuple[tuple[Callable[[ModelConfig], bool], Sequence[Rule]], ...] = ()  # weights of some configurations
    heads: Mapping[str, Sequence[Rule]] = field(default_factory=dict)  # weights of a class's head, before the others

    settle: Callable[[Tree, Mapping[str, Any], bool], Tree] = lambda tree, given, tied: tree  # what hangs on the tie

    def table(self, config: ModelConfig, name: str) -> tuple[Rule, ...]:
        """The names of weights for a configuration and a class."""
        chosen = next((table for holds, table in self.others if holds(config)), self.weights)
        return (*self.heads.get(name, ()), *chosen)

    def tree(self, given: Mapping[str, Any], name: str, harmless: frozenset[str] = HARMLESS) -> Tree:
        """Our tree for a configuration of theirs; whether the output is tied is left to the tensors."""
        if name not in self.classes:
            raise FileError(f"the class {name!r} is not known; of this family {', '.join(self.classes)} are")
        known = {field: value for field, value in given.items() if field not in self.synonyms}
        given = {self.synonyms[field]: value for field, value in given.items() if field in self.synonyms} | known
        filled = check_fields(self.rows, given, harmless)
        return read_rows(self.rows, filled, self.start, copy.deepcopy(self.classes[name]))

    def config(self, tree: Tree, *, tied: bool) -> ModelConfig:
        """The configuration, once the tensors have said whether the output is tied."""
        speaks = tree["head"] is not None and tree["head"]["kind"] in SPEAKS
        shared = tree["encoder"] is not None and tree["decoder"] is not None and tree["share"]
        words = {(False, False): "none", (False, True): "output", (True, False): "source_target"}
        tree["tie"] = words.get((shared, tied and speaks), "three_way")
        return roll(tree)

    def write(self, config: ModelConfig, name: str) -> dict[str, Any]:
        """Their configuration for ours, or ConfigError where the family cannot say it."""
        tied = config.tie in ("output", "three_way")
        found = {"architectures": [name], "model_type": self.kind, "tie_word_embeddings": tied}
        try:
            found |= write_rows(self.rows, sized(config))
            again = self.config(self.settle(self.tree(found, name), found, tied), tied=tied)
        except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, StopIteration) as problem:
            raise ConfigError(f"{self.kind} has another structure") from problem
        except FileError as problem:
            raise ConfigError(str(problem)) from None
        apart = difference(config, again)
        if apart is not None:
            raise ConfigError(f"{self.kind} cannot say {apart}")
        return found
