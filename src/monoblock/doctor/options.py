"""The keyword arguments of `mb.diagnose`: what the user says of the model, and what is handed over with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

import torch
from torch import Tensor

from monoblock.doctor.examination import Handed
from monoblock.doctor.plain_subject import PlainOptions
from monoblock.doctor.subject import KINDS, Kind
from monoblock.errors import InputError, did_you_mean


class DiagnoseOptions(TypedDict, total=False):
    """The keyword arguments of `mb.diagnose`, for type checkers and editors; `mb.diagnose` explains them."""

    vocab: int | None
    length: int | None
    kind: Kind | None
    pad_id: int | None
    mask_argument: str | None
    source: Tensor | None
    source_mask_argument: str | None
    cached: Callable[..., Any] | None
    window: int | None
    tied: bool | None
    documents_argument: str | None
    prefix_argument: str | None
    tokenizer: Any
    texts: Sequence[str]
    batch: tuple[Tensor, Tensor] | None
    loss: Callable[[Tensor, Tensor], Tensor] | None
    step: Callable[[], Any] | None
    generate: Callable[[Tensor], Any] | None
    optimizer: torch.optim.Optimizer | None
    objective: str | None
    labels: Sequence[str]
    generation: Mapping[str, Any] | None
    checks: str | Sequence[str] | None


ABOUT_MODEL = frozenset(field.name for field in fields(PlainOptions))
HANDED = frozenset(field.name for field in fields(Handed))


def split_options(options: Mapping[str, Any]) -> tuple[PlainOptions, Handed]:
    """Return what is said of the model and what is handed over with it; raise InputError for what cannot be."""
    check_names(options)
    about_model = PlainOptions(**{name: value for name, value in options.items() if name in ABOUT_MODEL})
    handed = Handed(**{name: value for name, value in options.items() if name in HANDED})
    _check_values(about_model.kind, about_model.length, about_model.window, handed.batch)
    return about_model, handed


def check_names(options: Mapping[str, Any]) -> None:
    """Raise InputError for a keyword argument that there is not."""
    public = [*DiagnoseOptions.__annotations__]
    unknown = next((name for name in options if name not in public and name not in HANDED), None)
    if unknown is not None:
        hint = did_you_mean(unknown, public) or f"; it takes {', '.join(public)}"
        raise InputError(f"mb.diagnose has no argument {unknown!r:.60}{hint}")


def _check_values(kind: str | None, length: int | None, window: int | None, batch: Any) -> None:
    if kind is not None and kind not in KINDS:
        raise InputError(f"kind={kind!r}: write one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if length is not None and length < 3:
        raise InputError(f"length={length} is too short to examine; give 8 tokens or more")
    if window is not None and window < 1:
        raise InputError(f"window={window}: a token sees at least itself; give 1 or more")
    if batch is None:
        return
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)
    if not is_pair:
        raise InputError("batch= takes two tensors, (ids, labels); for a language model ids[:, :-1] and ids[:, 1:]")
    if batch[0].dim() < 2 or len(batch[0]) != len(batch[1]):
        shapes = " and ".join(str(tuple(t.shape)) for t in batch)
        raise InputError(f"batch= has shapes {shapes}; ids are (B, T), and labels have as many rows")
