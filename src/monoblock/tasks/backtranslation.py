"""Sources made from targets (Sennrich et al. 2016): a model of the other direction writes what might have been said.

    for pair in backtranslate(pipe, sentences, Method("noised", noise=("drop", "blank")), tag=True): ...

Methods (Edunov et al. 2018): beam search; sampling from the whole distribution; restricted sampling, from the ten most
probable tokens; noised beam.  A tag at the head of a made source tells the model what it is (Caswell et al. 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from monoblock.data.noise import KINDS, kinds_of, noised
from monoblock.data.readers import Pair
from monoblock.errors import ConfigError, InputError, did_you_mean
from monoblock.tasks.folder import write
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.tags import BACKTRANSLATED
from monoblock.tasks.translating import readable

CHUNK = 2048  # lines that are sorted and translated together
# Method -> how tokens are chosen.
METHODS: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 5, "temperature": 0.0},
    "sample": {"num_beams": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "restricted": {"num_beams": 1, "temperature": 1.0, "top_k": 10, "top_p": 1.0},
    "noised": {"num_beams": 5, "temperature": 0.0},
}


@dataclass(frozen=True)
class Method:
    name: str = "beam"
    noise: tuple[str, ...] = ()  # "noised" without a word means all kinds
    tag: bool = False

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            listed = ", ".join(METHODS)
            raise ConfigError(f"--method {self.name} is none of {listed}{did_you_mean(self.name, METHODS)}")
        if self.name == "noised":
            object.__setattr__(self, "noise", kinds_of(self.noise or KINDS))
        elif self.noise:
            raise ConfigError(f"noise is for method='noised', and this is {self.name!r}; leave it out")

    def dress(self, source: str, *, seed: int, number: int) -> str:
        """A made source as a model is to read it: noised, then tagged."""
        text = noised(source, self.noise, seed=seed, number=number) if self.noise else source
        return f"{BACKTRANSLATED} {text}" if self.tag else text


def backtranslate(
    pipe: Pipeline,
    texts: Iterable[str],
    method: Method,
    *,
    seed: int = 1,
    batch: int = 64,
    **options: Any,
) -> Iterator[Pair | None]:
    """For each text a pair: a made source and the text; None where there is none (an empty line, or one too long)."""
    for number, (source, target) in enumerate(raw(pipe, texts, method.name, seed=seed, batch=batch, **options)):
        made = method.dress(source, seed=seed, number=number)
        yield Pair(made, target) if source.strip() and target.strip() else None


def raw(
    pipe: Pipeline, texts: Iterable[str], method: str, *, seed: int, batch: int = 64, **options: Any
) -> Iterator[tuple[str, str]]:
    """(made source, text) before noise and tags; "" for the source of what cannot be translated."""
    chosen = {**METHODS[method], **options}
    lines, first = iter(texts), 0
    while some := list(islice(lines, CHUNK)):
        fitting = [text if readable(pipe, text) else "" for text in some]
        made = pipe.translate(fitting, batch=batch, seed=seed, first=first, **chosen)
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
    write(path, "".join(lines))
    return len(lines), missing
