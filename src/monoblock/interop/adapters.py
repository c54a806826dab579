"""LoRA adapters as files that peft reads and writes: adapter_config.json beside adapter_model.safetensors.

A projection is called what the model's published family calls it.  Where that family keeps query, key and value in one
matrix and we keep three, our three adapters become one of a larger rank: the A's on top of each other, the B's along a
diagonal.  A model that no published family can say keeps our own names.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from monoblock.errors import ConfigError, FileError, InputError
from monoblock.interop.hf import choose
from monoblock.interop.rename import CONV, CONV_ROWS, Heads, Move, plan
from monoblock.interop.safely import Weights, on_meta
from monoblock.interop.shards import settle
from monoblock.lora import Adapted, adapted, replace as put, size_of
from monoblock.model import Transformer
from monoblock.untrusted import inside, present, read_json, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DIGEST = "monoblock_base"  # in the head of the weights' file, where peft reads past it
TASKS = {"classifier": "SEQ_CLS", "tagger": "TOKEN_CLS", "spans": "QUESTION_ANS"}
PLAIN = {
    "bias": "none",
    "use_dora": False,
    "layer_replication": None,
    "lora_bias": False,
    "alora_invocation_tokens": None,
}
LETTER = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


@dataclass(frozen=True)
class Names:
    """What the weights of a model are called in an adapter's file."""

    moves: list[Move]
    prefix: str = ""  # before the names of the family's body
    bare: str = ""  # the same, where the class of this model leaves it out

    def theirs(self, move: Move) -> str:
        return move.theirs[0].removesuffix(".weight").removeprefix(self.bare)

    def find(self, name: str) -> Move | None:
        """The move for a module of theirs, with or without the prefix of the family."""
        table = {move.theirs[0].removesuffix(".weight"): move for move in self.moves}
        return table.get(name) or table.get(self.prefix + name)


def names_of(model: Transformer) -> Names:
    config = replace(model.config, quantize=None)
    shapes = {key: tuple(tensor.shape) for key, tensor in on_meta(Transformer, config, 10**6).state_dict().items()}
    try:
        family, name, _ = choose(config)
    except ConfigError:
        return Names([Move((key,), (key,), None, Heads()) for key in shapes])
    moves = list(plan(family.table(config, name), shapes, config))
    return Names(moves, family.prefix, family.prefix if name in family.bare else "")


def _modules(move: Move) -> list[str]:
    return [key.removesuffix(".weight") for key in move.ours if key.endswith(".weight")]


# -- writing ----------------------------------------------------------------------------------------------------------


def save_adapter(model: Transformer, folder: str | Path, *, base: str | None = None, digest: str | None = None) -> None:
    """Write the adapters of a model, and whatever of its head was trained, as peft would.

    `base` names the model they are for, and `digest` says which weights it has (interop/digest.py).
    """
    parts = dict(adapted(model))
    if not parts:
        raise InputError("this model has no adapters to save; add_lora puts some beside its projections")
    names, tensors, sizes = names_of(model), dict[str, Tensor](), dict[str, tuple[int, float]]()
    for move in names.moves:
        mine = [parts.get(name) for name in _modules(move)]
        if any(part is not None for part in mine):
            a, b, scale = _joined(move, mine, [size_of(model.get_submodule(name)) for name in _modules(move)])
            name = names.theirs(move)
            tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
            sizes[name] = a.shape[0], scale * a.shape[0]
    heads = _head(model, names)
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in heads.items()}
    turned = any(move.step in (CONV, CONV_ROWS) for move in names.moves if names.theirs(move) in sizes)
    config = _config(model, names, sizes, next(iter(parts.values())).dropout, sorted(heads))
    config |= {"base_model_name_or_path": base, "fan_in_fan_out": turned}
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = {DIGEST: digest} if digest is not None else {}
        stored = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(stored, folder / f"{WEIGHTS}.tmp", metadata={"format": "pt"} | known)
        (folder / f"{CONFIG}.tmp").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        settle(folder / WEIGHTS)
        settle(folder / CONFIG)
    except OSError as problem:
        raise FileError(f"the adapter cannot be written to {folder}: {problem.strerror or problem}") from None


@torch.no_grad()
def _joined(
    move: Move, parts: Sequence[Adapted | None], sizes: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, float]:
    """A, B and the scale of the one matrix that several of ours are there."""
    some = [part for part in parts if part is not None]
    if len(parts) == 1:
        return some[0].a, some[0].b, some[0].scale
    alike = len(some) == len(parts) and all(
        torch.equal(part.a, some[0].a) and part.scale == some[0].scale for part in some
    )
    a: Tensor = some[0].a
    columns: list[Tensor] = [part.b for part in some]
    if not alike:  # else they came from one
        a, width, at = torch.cat([part.a for part in some]), sum(part.rank for part in some), 0
        columns = []
        for part, (outputs, _) in zip(parts, sizes, strict=True):
            column = a.new_zeros(outputs, width)
            if part is not None:
                column[:, at : at + part.rank] = part.b * (part.scale / some[0].scale)
                at += part.rank
            columns.append(column)
    b = move.save(columns)[0]
    return a, b.T if move.step is CONV_ROWS else b, some[0].scale


def _head(model: Transformer, names: Names) -> dict[str, Tensor]:
    """What was trained beside the adapters, in their names; peft expects the head of a classifier in any case."""
    state = model.state_dict()
    whole = model.config.head is not None and model.config.head.kind in TASKS
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    trained |= {name for name in state if whole and name.startswith("head.")}
    found: dict[str, Tensor] = {}
    for move in names.moves:
        if trained & set(move.ours):
            made = move.save([state[key] for key in move.ours])  # no adapter's: those are not in a table
            found |= {key.removeprefix(names.bare): tensor for key, tensor in zip(move.theirs, made, strict=True)}
    return found


def _config(
    model: Transformer, names: Names, sizes: Mapping[str, tuple[int, float]], dropout: float, heads: Sequence[str]
) -> dict[str, Any]:
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    config, head = model.config, model.config.head
    task = TASKS.get(head.kind) if head is not None else None
    if head is not None and head.kind == "language_model":
        task = "CAUSAL_LM" if config.family == "decoder-only" else "SEQ_2_SEQ_LM"
    kept = sorted({name.rsplit(".", 1)[0] for name in heads})
    return {
        "peft_type": "LORA",
        "task_type": task,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": _targets(names, list(sizes)),
        "modules_to_save": kept or None,
        "rank_pattern": {name: r for name, (r, _) in sizes.items() if r != rank},
        "alpha_pattern": {name: a for name, (_, a) in sizes.items() if a != alpha},
        "bias": "none",
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _targets(names: Names, chosen: Sequence[str]) -> list[str]:
    """The last words of the names, where those mean just these modules; else the whole names."""
    every = {names.theirs(move) for move in names.moves}
    words = {name.rsplit(".", 1)[-1] for name in chosen}
    meant = {name for name in every if name.rsplit(".", 1)[-1] in words}
    return sorted(words if meant == set(chosen) else chosen)


# -- reading ----------------------------------------------------------------------------------------------------------


def load_adapter(model: Transformer, folder: str | Path) -> list[str]:
    """Put the adapters of a folder beside the projections they are for, the model frozen; the names of those.

    An adapter for a model of another make or size is refused.
    """
    folder = Path(folder)
    if not present(folder, CONFIG) or not present(folder, WEIGHTS):
        raise FileError(f"{folder} is no adapter: it has no {CONFIG if not present(folder, CONFIG) else WEIGHTS}")
    if any(True for _ in adapted(model)):
        raise InputError("this model has adapters already; merge or fold them first")
    config = _checked(read_json(inside(folder, CONFIG)), folder)
    stored, names = Weights([inside(folder, WEIGHTS)]), names_of(model)
    made = dict(_made(model, names, stored, config, folder))
    heads = dict(_heads(model, names, stored, folder))
    for weight in model.parameters():
        weight.requires_grad_(False)
    for name, part in made.items():
        put(model, name, part)
    model.load_state_dict(heads, strict=False)
    return list(made)


def base_in(folder: str | Path) -> str | None:
    """The digest of the weights an adapter was trained beside, where its file says it."""
    with safe_open(inside(Path(folder), WEIGHTS), "pt") as file:
        return (file.metadata() or {}).get(DIGEST)


def _checked(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    if config.get("peft_type") != "LORA":
        raise FileError(f"{folder}: peft_type={shown(config.get('peft_type'))} is not read; LORA is")
    odd = next((key for key, plain in PLAIN.items() if (config.get(key) or plain) != plain), None)
    if odd is not None:
        raise FileError(f"{folder}: {odd}={shown(config[odd])} is a kind of LoRA that is not read")
    for key in ("r", "lora_alpha"):
        if isinstance(config.get(key), bool) or not isinstance(config.get(key), int | float):
            raise FileError(f"{folder}: {key}={shown(config.get(key))} is no number")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise FileError(f"{folder}: {key} is no table")
    return config


def _made(
    model: Transformer, names: Names, stored: Weights, config: Mapping[str, Any], folder: Path
) -> Iterator[tuple[str, Adapted]]:
    letters: dict[str, dict[str, Tensor]] = {}
    for key in stored:
        found = LETTER.fullmatch(key.removeprefix(PREFIX))
        if found:
            letters.setdefault(found[1], {})[found[2]] = stored[key].float()
    if not letters:
        raise FileError(f"{folder} holds no lora_A and lora_B")
    for name, pair in letters.items():
        move = names.find(name)
        if move is None or set(pair) != {"A", "B"} or move.ours[0].startswith(("input.", "target.", "head.")):
            raise FileError(f"{folder} is an adapter for another model: {shown(name)} is nothing here")
        a, b = pair["A"], pair["B"]
        alpha = _scale(name, a.shape[0], config) * a.shape[0]
        modules = _modules(move)
        sizes = [size_of(model.get_submodule(one)) for one in modules]
        wanted = (sum(out for out, _ in sizes), sizes[0][1])
        if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != wanted or a.shape[0] != b.shape[1]:
            said = f"{tuple(b.shape)} times {tuple(a.shape)}"
            raise FileError(f"{folder} is an adapter for another model: {shown(name)} is {said}, and {wanted} here")
        parts = move.load([b.T if move.step is CONV_ROWS else b]) if len(modules) > 1 else [b]
        used = [part for part in parts if len(parts) == 1 or part.any()]
        for one, part in zip(modules, parts, strict=True):
            if part.any() or not used or len(parts) == 1:
                yield one, _filled(model, one, a, part, alpha, float(config.get("lora_dropout") or 0.0))


def _filled(model: Transformer, name: str, a: Tensor, b: Tensor, alpha: float, dropout: float) -> Adapted:
    part = Adapted(model.get_submodule(name), a.shape[0], alpha, dropout)
    part.a.data.copy_(a)
    part.b.data.copy_(b)
    return part


def _scale(name: str, rank: int, config: Mapping[str, Any]) -> float:
    """alpha over the rank, or over its root where the file says so (rsLoRA)."""
    patterns = config.get("alpha_pattern") or {}
    fitting = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?{re.escape(key)}", name))
    alpha = float(next(fitting, config["lora_alpha"]))
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _heads(model: Transformer, names: Names, stored: Weights, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors that were trained whole: a new head."""
    keys = {key.removeprefix(PREFIX): key for key in stored if not LETTER.fullmatch(key.removeprefix(PREFIX))}
    own = model.state_dict()
    known = {names.prefix + key: key for key in keys} | {key: key for key in keys}
    for move in names.moves:
        if any(name in known for name in move.theirs):
            found = move.load([stored[keys.pop(known[name])] for name in move.theirs])
            for key, tensor in zip(move.ours, found, strict=True):
                if own[key].shape != tensor.shape:
                    shapes = f"{tuple(tensor.shape)}, and {tuple(own[key].shape)} here"
                    raise FileError(f"{folder} is an adapter for another model: {shown(move.theirs[0])} is {shapes}")
                yield key, tensor
    if keys:
        raise FileError(f"{folder} is an adapter for another model: {shown(min(keys))} is nothing here")
