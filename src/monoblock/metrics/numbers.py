"""Readable numbers: counts and bytes with three significant digits."""

from collections.abc import Sequence


def format_count(number: int | float) -> str:
    """Format a number with three significant digits: 65, 1.50k, 124M, 7.24B."""
    return _format_scaled(number, 1000, ("", "k", "M", "B", "T", "P", "E"))


def format_bytes(number: int | float) -> str:
    """Format a number of bytes with three significant digits in powers of 1024: 512 B, 1.50 KiB, 13.5 GiB."""
    return _format_scaled(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"))


def _format_scaled(number: int | float, base: int, units: Sequence[str]) -> str:
    if abs(number) < base:
        return f"{number:.3g}{units[0]}" if isinstance(number, float) else f"{number}{units[0]}"
    size = float(number)
    for unit in units[1:]:
        size /= base
        # Compare the rounded value, or 999,999 would be printed as 1000k.
        if abs(size) < base - 0.5 or unit == units[-1]:
            break
    decimals = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{decimals}f}{unit}"
