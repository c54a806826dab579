"""Back-translation (Sennrich et al. 2016): generate synthetic sources for monolingual targets.

    method = BacktranslationMethod("noised", noise=("drop", "blank"), tag=True)
    for pair in backtranslate(loaded, sentences, method): ...

The methods are those of Edunov et al. 2018: "beam" is beam search, "sample" is sampling, "restricted" is sampling from
the ten most probable tokens, and "noised" is beam search with noise added to its output. With tag=True, sources begin
with the tag <bt>, which tells the model that they are synthetic (Caswell et al. 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from monoblock.data.noise import NOISE_FUNCTIONS, add_noise, check_kinds
from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError, InputError, did_you_mean
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.tags import BACKTRANSLATION_TAG
from monoblock.tasks.translate import best_translations, fits_context
from monoblock.untrusted_files import write_atomically

CHUNK_SIZE = 2048  # number of lines that are sorted by length and translated together
# Maps each method to its decoding options.
DECODING_OPTIONS: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 5, "temperature": 0.0},
    "sample": {"num_beams": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "restricted": {"num_beams": 1, "temperature": 1.0, "top_k": 10, "top_p": 1.0},
    "noised": {"num_beams": 5, "temperature": 0.0},
}


@dataclass(frozen=True)
class BacktranslationMethod:
    name: str = "beam"
    noise: tuple[str, ...] = ()  # the kinds of noise of the method "noised"; () means all kinds
    tag: bool = False  # begin each source with <bt>

    def __post_init__(self) -> None:
        if self.name not in DECODING_OPTIONS:
            names = ", ".join(DECODING_OPTIONS)
            raise ConfigError(f"method={self.name!r} is not one of {names}{did_you_mean(self.name, DECODING_OPTIONS)}")
        if self.name == "noised":
            object.__setattr__(self, "noise", check_kinds(self.noise or NOISE_FUNCTIONS))
        elif self.noise:
            raise ConfigError(f"noise has no effect with method={self.name!r}; leave it out, or write method='noised'")

    def prepare_source(self, source: str, *, seed: int, index: int) -> str:
        """Add the noise and the tag of this method to a synthetic source.

        The noise depends only on the source, `seed` and `index`, the line number of the source.
        """
        text = add_noise(source, self.noise, seed=seed, line_number=index) if self.noise else source
        return f"{BACKTRANSLATION_TAG} {text}" if self.tag else text


def backtranslate(
    loaded: LoadedModel,
    texts: Iterable[str],
    method: BacktranslationMethod,
    *,
    seed: int = 1,
    batch: int | None = None,
    **options: Any,
) -> Iterator[Pair | None]:
    """Yield a pair for each text: a synthetic source, and the text as its target.

    If the text is empty or longer than the context of the model, it has no source, and None is yielded.

    options: decoding options that override those of the method.
    """
    for index, (source, target) in enumerate(
        generate_sources(loaded, texts, method.name, seed=seed, batch=batch, **options)
    ):
        prepared = method.prepare_source(source, seed=seed, index=index)
        yield Pair(prepared, target) if source.strip() and target.strip() else None


def generate_sources(
    loaded: LoadedModel, texts: Iterable[str], method: str, *, seed: int, batch: int | None = None, **options: Any
) -> Iterator[tuple[str, str]]:
    """Yield (synthetic source, text) for each text, without noise or tag.

    The source of a text that is longer than the context is "".
    """
    options = {**DECODING_OPTIONS[method], **options}
    lines, first_index = iter(texts), 0
    while chunk := list(islice(lines, CHUNK_SIZE)):
        fitting = [text if fits_context(loaded, text) else "" for text in chunk]
        sources = best_translations(loaded, fitting, batch=batch, seed=seed, first_index=first_index, **options)
        for source, text in zip(sources, chunk, strict=True):
            yield " ".join(source.split()), " ".join(text.split())
        first_index += len(chunk)


def write_pairs(path: Path, pairs: Iterable[Pair | None]) -> tuple[int, int]:
    """Write each pair as a line `source<TAB>target`; return how many pairs were written and how many were None."""
    lines, missing = [], 0
    for pair in pairs:
        if pair is None:
            missing += 1
        else:
            lines.append(f"{pair.source}\t{pair.target}\n")
    if not lines:
        raise InputError("every line is empty or longer than the model's context; give shorter sentences")
    write_atomically(path, "".join(lines))
    return len(lines), missing
