"""`monoblock replay RECEIPT MODEL`: derive a served answer again, and compare it token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monoblock.cli.model_options import device_option, dtype_option, force_option
from monoblock.cli.output import echo, print_json, print_table
from monoblock.cli.serve import serve_models
from monoblock.cli.verb import argument, json_option
from monoblock.errors import FileError
from monoblock.untrusted_files import read_json

CHECK_FAILED = 3  # exit code


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Derive the answer of RECEIPT again with MODEL; the exit code is 3 if a token differs.

    RECEIPT is a JSON file: the receipt itself, or an answer that has one. That of a server with --exact is derived
    with the same bits.
    """

    receipt: Path = argument()
    model: str = argument()
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = force_option()
    as_json: bool = json_option()

    def run(self) -> int | None:
        found: Any = read_json(self.receipt)
        found = found.get("receipt", found) if isinstance(found, dict) else found
        if not isinstance(found, dict) or "answers" not in found:
            raise FileError(f"{self.receipt} has no receipt; give an answer to a request with receipt=true")
        exact = bool(found.get("computed_with", {}).get("exact"))
        (model,) = serve_models((self.model,), self.device, self.dtype, exact=exact, force=self.force)
        from monoblock.serving.receipts import replay

        result = replay(found, model)
        if self.as_json:
            print_json({"equal": result.is_equal, "differences": result.differences, "first": result.first_difference})
        else:
            if result.differences:
                rows = [(name, *map(_shorten, pair)) for name, pair in result.differences.items()]
                print_table(("differs", "receipt", "here"), rows)
            echo(_conclude(result.first_difference, len(found["answers"])))
        return None if result.is_equal else CHECK_FAILED


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:16]}…"


def _conclude(first: Any, count: int) -> str:
    if first is None:
        return f"every token is equal ({count} prompt{'s' if count > 1 else ''})"
    number, index, place, there, here = first
    return f"prompt {number}, text {index}: token {place} is {here}, and {there} in the receipt"
