"""A published family as one row: a structure to start from, its fields, its weights, the classes that have a head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monoblock.config import ModelConfig
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
from monoblock.interop.rename import Rule

SPEAKS = ("language_model", "masked_lm")


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

    def tree(self, given: Mapping[str, Any], name: str, harmless: frozenset[str]) -> Tree:
        """Our tree for a configuration of theirs; whether the output is tied is left to the tensors."""
        if name not in self.classes:
            raise FileError(f"the class {name!r} is not known; of this family {', '.join(self.classes)} are")
        filled = check_fields(self.rows, given, harmless)
        return read_rows(self.rows, filled, self.start, copy.deepcopy(self.classes[name]))

    def config(self, tree: Tree, *, tied: bool) -> ModelConfig:
        """The configuration, once the tensors have said whether the output is tied."""
        speaks = tree["head"] is not None and tree["head"]["kind"] in SPEAKS
        shared = tree["encoder"] is not None and tree["decoder"] is not None and tree["share"]
        words = {(False, False): "none", (False, True): "output", (True, False): "source_target"}
        tree["tie"] = words.get((shared, tied and speaks), "three_way")
        return roll({name: value for name, value in tree.items() if name != "share"})

    def write(self, config: ModelConfig, name: str) -> dict[str, Any]:
        """Their configuration for ours, or ConfigError where the family cannot say it."""
        tied = config.tie in ("output", "three_way")
        found = {"architectures": [name], "model_type": self.kind, "tie_word_embeddings": tied}
        try:
            found |= write_rows(self.rows, sized(config))
            again = self.config(self.tree(found, name, WRITTEN), tied=tied)
        except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, StopIteration) as problem:
            raise ConfigError(f"{self.kind} has another structure ({type(problem).__name__}: {problem})") from None
        except FileError as problem:
            raise ConfigError(str(problem)) from None
        apart = difference(config, again)
        if apart is not None:
            raise ConfigError(f"{self.kind} cannot say {apart}")
        return found


WRITTEN = frozenset({"architectures", "model_type", "tie_word_embeddings"})
