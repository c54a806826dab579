"""Sources made from targets (Sennrich et al. 2016): a model of the other direction writes what might have been said.

    for pair in backtranslate(loaded, sentences, Method("noised", noise=("drop", "blank")), tag=True): ...

Methods (Edunov et al. 2018): beam search; sampling from the whole distribution; restricted sampling, from the ten most
probable tokens; noised beam.  A tag at the head of a made source tells the model what it is (Caswell et al. 2019).
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
from monoblock.interop.atomic_write import write_atomically
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.seq2seq.predict import best_translations, fits_context
from monoblock.tasks.tags import BACKTRANSLATION_TAG

CHUNK_SIZE = 2048  # lines that are sorted and translated together
# Method -> how tokens are chosen.
DECODING_OPTIONS: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 5, "temperature": 0.0},
    "sample": {"num_beams": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "restricted": {"num_beams": 1, "temperature": 1.0, "top_k": 10, "top_p": 1.0},
    "noised": {"num_beams": 5, "temperature": 0.0},
}


@dataclass(frozen=True)
class BacktranslationMethod:
    name: str = "beam"
    noise: tuple[str, ...] = ()  # "noised" without a word means all kinds
    tag: bool = False

    def __post_init__(self) -> None:
        if self.name not in DECODING_OPTIONS:
            listed = ", ".join(DECODING_OPTIONS)
            raise ConfigError(f"--method {self.name} is none of {listed}{did_you_mean(self.name, DECODING_OPTIONS)}")
        if self.name == "noised":
            object.__setattr__(self, "noise", check_kinds(self.noise or NOISE_FUNCTIONS))
        elif self.noise:
            raise ConfigError(f"noise is for method='noised', and this is {self.name!r}; leave it out")

    def prepare_source(self, source: str, *, seed: int, index: int) -> str:
        """A made source as a model is to read it: noised, then tagged."""
        text = add_noise(source, self.noise, seed=seed, line_number=index) if self.noise else source
        return f"{BACKTRANSLATION_TAG} {text}" if self.tag else text


def backtranslate(
    loaded: LoadedModel,
    texts: Iterable[str],
    method: BacktranslationMethod,
    *,
    seed: int = 1,
    batch: int = 64,
    **options: Any,
) -> Iterator[Pair | None]:
    """For each text a pair: a made source and the text; None where there is none (an empty line, or one too long)."""
    for number, (source, target) in enumerate(
        generate_sources(loaded, texts, method.name, seed=seed, batch=batch, **options)
    ):
        made = method.prepare_source(source, seed=seed, index=number)
        yield Pair(made, target) if source.strip() and target.strip() else None


def generate_sources(
    loaded: LoadedModel, texts: Iterable[str], method: str, *, seed: int, batch: int = 64, **options: Any
) -> Iterator[tuple[str, str]]:
    """(made source, text) before noise and tags; "" for the source of what cannot be translated."""
    chosen = {**DECODING_OPTIONS[method], **options}
    lines, first = iter(texts), 0
    while some := list(islice(lines, CHUNK_SIZE)):
        fitting = [text if fits_context(loaded, text) else "" for text in some]
        made = best_translations(loaded, fitting, batch=batch, seed=seed, first_index=first, **chosen)
        for source, text in zip(made, some, strict=True):
            yield " ".join(source.split()), " ".join(text.split())
        first += len(some)


def write_pairs(path: Path, pairs: Iterable[Pair | None]) -> tuple[int, int]:
    """`source<TAB>target` a line; how many were written, and how many there was nothing to write of."""
    lines, missing = [], 0
    for pair in pairs:
        if pair is None:
            missing += 1
        else:
            lines.append(f"{pair.source}\t{pair.target}\n")
    if not lines:
        raise InputError("not one line could be translated; give sentences within the model's context")
    write_atomically(path, "".join(lines))
    return len(lines), missing
