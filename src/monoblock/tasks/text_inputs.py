"""Check the texts or images that a user gives to the methods of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterable

from monoblock.errors import InputError


def list_inputs(
    inputs: object,
    method: str,
    kinds: tuple[type, ...] = (str,),
    also: tuple[type, ...] = (),
    *,
    images: bool = False,
) -> list[object]:
    """Return the inputs of a call as a list: a single input, or all elements of an iterable.

    method: the method of the pipeline, for the error text.
    kinds: the types of a single input.
    also: further types that elements may have.
    images: the model reads images: paths, pictures of Pillow, and arrays of two or three axes.
    """
    single = is_single(inputs, kinds, images=images)
    if not single and (not isinstance(inputs, Iterable) or (hasattr(inputs, "ndim") and not images)):
        raise InputError(f"{method} takes one input or a list of inputs, but got {_type_name(inputs)}")
    rows = [inputs] if single else list(inputs)  # type: ignore[call-overload]
    for index, row in enumerate(rows):
        if not is_single(row, kinds + also, images=images):
            what = "images" if images else "texts"
            raise InputError(f"{method} takes {what}, but element {index} of the list is {_type_name(row)}")
    return rows


def is_single(value: object, kinds: tuple[type, ...] = (str,), *, images: bool = False) -> bool:
    """Return whether a value is one input, and not several."""
    if not images:
        return isinstance(value, kinds)
    return isinstance(value, str | os.PathLike) or getattr(value, "ndim", 0) in (2, 3) or hasattr(value, "getbands")


def _type_name(value: object) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"an object of type {type(value).__name__}{shape}"
