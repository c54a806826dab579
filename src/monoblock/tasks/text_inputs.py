"""Check the texts that a user gives to the methods of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable

from monoblock.errors import InputError


def list_inputs(
    inputs: object, method: str, kinds: tuple[type, ...] = (str,), also: tuple[type, ...] = ()
) -> list[object]:
    """Return the inputs of a call as a list: a single input, or all elements of an iterable.

    method: the method of the pipeline, for the error text.
    kinds: the types of a single input; an array is an image and always allowed.
    also: further types that elements may have.
    """
    single = _is_input(inputs, kinds)
    if not single and not isinstance(inputs, Iterable):
        raise InputError(f"{method} takes one input or a list of inputs, but got {_type_name(inputs)}")
    rows = [inputs] if single else list(inputs)  # type: ignore[call-overload]
    for index, row in enumerate(rows):
        if not _is_input(row, kinds + also):
            raise InputError(f"{method} takes texts, but element {index} of the list is {_type_name(row)}")
    return rows


def _is_input(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) or hasattr(value, "ndim")


def _type_name(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
