"""A Hugging Face folder as a model of ours, and back.

Reading: config.json names a family and a class; its fields become a configuration (hf_config.py), its tensors, by the
family's table, weights (rename.py).  Whether the output is tied is read off the tensors.  Nothing is executed, nothing
outside the folder is opened, and a name left over on either side is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monoblock.config import ModelConfig
from monoblock.errors import ConfigError, FileError, InputError, did_you_mean
from monoblock.interop.hf_family import SPEAKS, Family
from monoblock.interop.hf_table import FAMILIES
from monoblock.interop.reader import Reader
from monoblock.interop.rename import Move, Rule, plan
from monoblock.interop.safely import Weights, on_meta
from monoblock.interop.shards import LARGEST, save_weights, settle
from monoblock.untrusted import shown

if TYPE_CHECKING:
    from monoblock.model import Transformer

CONFIG = "config.json"


# -- configurations ---------------------------------------------------------------------------------------------------


def find_family(given: Mapping[str, Any]) -> tuple[Family, str]:
    """The family and the class a config.json names."""
    kind, classes = given.get("model_type"), given.get("architectures")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = did_you_mean(str(kind), FAMILIES)
        raise FileError(f"the model_type {shown(kind)} is none of the {len(FAMILIES)} families known here{known}")
    family = FAMILIES[kind]
    if classes is None:
        return family, next(iter(family.classes))
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        raise FileError(f"architectures={shown(classes)} must name one class")
    return family, classes[0]


def said_config(given: Mapping[str, Any]) -> ModelConfig:
    """Our configuration for a config.json of theirs by itself: whether the output is tied is as it says."""
    family, name = find_family(given)
    tied = bool(given.get("tie_word_embeddings", family.tied))
    return family.config(family.settle(family.tree(given, name), given, tied), tied=tied)


# -- tensors ----------------------------------------------------------------------------------------------------------


class Names:
    """The names of a file, as the tables have them: with the prefix of the family, and in today's spelling."""

    def __init__(self, stored: Weights, family: Family, table: Sequence[Rule]) -> None:
        self.ignored = [_pattern(name) for name in family.ignored]
        self.alike, self.prefix, self.table = family.alike, family.prefix, tuple(table)
        self.stored = {self._spelled(name): name for name in stored}

    def __contains__(self, name: str) -> bool:
        return name in self.stored or any(other in self.stored for other in self._others(name))

    def __getitem__(self, name: str) -> str:
        found = next((one for one in (name, *self._others(name)) if one in self.stored), None)
        if found is None:
            raise KeyError(name)
        return self.stored[found]

    def _spelled(self, name: str) -> str:
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            name = name.removesuffix(old) + new if name.endswith(old) else name
        full = name.startswith(self.prefix) or name in self.alike or any(p.fullmatch(name) for p in self.ignored)
        return name if full or _speaks(self.table, name) else self.prefix + name

    def _others(self, name: str) -> Iterator[str]:
        return (other for other, meant in self.alike.items() if meant == name)

    def doubled(self, used: set[str]) -> Iterator[tuple[str, str]]:
        """Pairs of stored names that must be the same tensor."""
        for other, meant in self.alike.items():
            if meant in used and meant in self.stored and other in self.stored:
                yield self.stored[other], self.stored[meant]

    def left_over(self, used: set[str]) -> list[str]:
        """What nobody asked for, but for what is known to be needless, and the same tensor under another name."""
        rest = (name for name in self.stored if name not in used and self.alike.get(name) not in used)
        return sorted(self.stored[name] for name in rest if not any(p.fullmatch(name) for p in self.ignored))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+").replace(r"\#", r"\d+"))


@cache
def _speaks(table: Sequence[Rule], name: str) -> bool:
    """Whether a table has a rule for this name of theirs."""
    return any(_pattern(rule.theirs).fullmatch(name.removesuffix(part)) for rule in table for part in _PARTS)


_PARTS = ("", ".weight", ".bias")


def _output(table: Sequence[Rule]) -> str | None:
    """What a table calls the output matrix."""
    rule = next((rule for rule in table if rule.ours in ("head.output", "head.output.weight")), None)
    return None if rule is None else f"{rule.theirs.removesuffix('.weight')}.weight"


def _is_tied(
    output: str, names: Names, stored: Weights, table: Sequence[Rule], tree: Mapping[str, Any], flag: bool
) -> bool:
    """Whether the output matrix is the embedding: it is when it is not stored, or is called tied and is the same."""
    if output not in names.stored:
        return True
    side = "target.token" if tree["target"] is not None and not tree["share"] else "input.token"
    embedding = next(f"{rule.theirs}.weight" for rule in table if rule.ours == side)
    if not flag or embedding not in names:
        return False
    one, other = names.stored[output], names[embedding]
    return stored.shapes[one] == stored.shapes[other] and torch.equal(stored[one], stored[other])


def load_hf(
    cls: type[Transformer], given: Mapping[str, Any], stored: Weights, dtype: torch.dtype, device: str
) -> Transformer:
    """A model from a configuration and tensors of theirs."""
    family, name = find_family(given)
    tree = family.tree(given, name)
    flag = bool(given.get("tie_word_embeddings", family.tied))
    table = family.table(family.config(tree, tied=False), name)
    names = Names(stored, family, table)
    speaks = tree["head"] is not None and tree["head"]["kind"] in SPEAKS
    output = _output(table) if speaks else None
    tied = output is not None and _is_tied(output, names, stored, table, tree, flag)
    config = family.config(family.settle(tree, given, tied), tied=tied)
    model = on_meta(cls, config, len(stored))
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    moves = list(plan(table, shapes, config))
    _compare(moves, names, stored, {output} if tied and output else set())
    reader, found = Reader(stored, dtype, device), dict[str, Tensor]()
    for move in moves:
        parts = reader.take([names[key] for key in move.theirs], move.load)
        for key, part in zip(move.ours, parts, strict=True):
            if part.shape != shapes[key]:
                said = f"{tuple(part.shape)} where the configuration says {tuple(shapes[key])}"
                raise FileError(f"{shown(names[move.theirs[0]])} becomes {key} with shape {said}")
        found |= dict(zip(move.ours, parts, strict=True))
    model.load_state_dict(found, assign=True, strict=True)
    return model


def _compare(moves: Sequence[Move], names: Names, stored: Weights, also: set[str]) -> None:
    wanted = [key for move in moves for key in move.theirs]
    lacking = [key for key in wanted if key not in names]
    left = names.left_over({*wanted, *also})
    for found, what in ((lacking, "lacks"), (left, "holds a tensor this family has no place for")):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise FileError(f"it {what}: {shown(found[0])}{more}")
    for one, other in names.doubled(set(wanted)):
        if not torch.equal(stored[one], stored[other]):
            raise FileError(f"its {shown(one)} and {shown(other)} should be one tensor, and they differ")


# -- writing ----------------------------------------------------------------------------------------------------------


def choose(config: ModelConfig, kind: str | None = None) -> tuple[Family, str, dict[str, Any]]:
    """The first family and class that can say this configuration, and their config.json for it."""
    if kind is not None and kind not in FAMILIES:
        raise ConfigError(f"there is no family {kind!r}{did_you_mean(kind, FAMILIES)}")
    refused = ""
    for family in [FAMILIES[kind]] if kind is not None else FAMILIES.values():
        for name, head in family.classes.items():
            if (head is None) != (config.head is None) or (head and config.head and head["kind"] != config.head.kind):
                continue
            try:
                return family, name, family.write(config, name)
            except ConfigError as problem:
                refused = str(problem)
    if kind is not None:
        raise ConfigError(f"this {config.family} model is none of {kind}: {refused or 'that family has no such head'}")
    raise ConfigError(f"no published family can say this {config.family} model; family=… tells why one of them cannot")


def export_hf(
    model: Transformer,
    folder: str | Path,
    *,
    family: str | None = None,
    special: Mapping[str, int] | None = None,
    largest: int = LARGEST,
) -> None:
    """Write a folder that transformers loads with the same weights and logits.

    `family` names one where several could say the model; `special` are ids such as eos_token_id.
    """
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise InputError("a model on the meta device has no weights to save; build it on a real device first")
    chosen, name, found = choose(model.config, family)
    read = {field for row in chosen.rows for field in row.names}  # ids that places are counted from are no choice
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    found = ids | found | {field: number for field, number in (special or {}).items() if field not in read}
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    found["dtype"] = dtype
    bare = chosen.prefix if name in chosen.bare else ""
    groups, sizes = [], dict[str, int]()
    for move in plan(chosen.table(model.config, name), {k: t.shape for k, t in state.items()}, model.config):
        made = _Made(move, [state[key] for key in move.ours])
        keys = [key.removeprefix(bare) for key in move.theirs]
        groups.append({key: made.part(n) for n, key in enumerate(keys)})
        each = sum(state[key].nbytes for key in move.ours) // len(keys)
        sizes |= dict.fromkeys(keys, each)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(folder, groups, sizes, largest)
        (folder / f"{CONFIG}.tmp").write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        settle(folder / CONFIG)
    except OSError as problem:
        raise FileError(f"the model cannot be written to {folder}: {problem.strerror or problem}") from None


class _Made:
    """The tensors of theirs that one move gives, made once and let go with the last of them."""

    def __init__(self, move: Move, ours: Sequence[Tensor]) -> None:
        self.move, self.ours = move, ours
        self.made: list[Tensor | None] = []

    def part(self, number: int) -> Any:
        def make() -> Tensor:
            if not self.made:
                self.made = list(self.move.save(self.ours))
            tensor, self.made[number] = self.made[number], None
            assert tensor is not None
            if all(one is None for one in self.made):
                self.made = []
            return tensor

        return make
