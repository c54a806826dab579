"""The text normalizations of seq2seq.normalize."""

from collections.abc import Callable

from monoblock.data.indic_normalization import normalize_indic

NORMALIZERS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "indic": normalize_indic}
