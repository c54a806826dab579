"""The text normalizers that the recipe key seq2seq.normalize selects."""

from collections.abc import Callable

from monoblock.data.indic_normalization import normalize_indic

NORMALIZERS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "indic": normalize_indic}
