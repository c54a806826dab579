"""Generate questions from the King James Bible: who said this, to whom, whose son, who slew whom, where, how old.

A template is a regular expression for a clause, and questions about the clause. The answer to each question is a group
of the expression, so that every answer is a span of the text. The context of a question is several whole verses, long
enough to contain several names and sayings. A question with two different answers in one context is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from monoblock.data.corpora.bible import group_verses, load_verses
from monoblock.data.readers.records import Question

# The held-out books differ from those in `bible.py`, because few people speak in letters and proverbs.
HELD_OUT_BOOKS = {
    "valid": {7: "Judges", 8: "Ruth", 17: "Esther"},
    "test": {9: "1 Samuel", 27: "Daniel", 32: "Jonah", 43: "John"},
}
MIN_CONTEXT_WORDS = 60  # at the end of a chapter, half as many are enough
MAX_QUOTE_WORDS = 9  # of a saying that a question quotes; longer ones are cut
MIN_QUOTE_WORDS = 3

NOT_NAMES = "And|But|For|Now|So|Then|When|He|She|They|It|I|We|Ye|Thou|Thy|My|His|Her|The|This|That|These|Those|Which"
NOT_NAMES += "|Who|Whose|What|Where|Wherefore|Therefore|Thus|Behold|Let|In|Of|At|By|As|If|Yet|Also|Moreover|There|All|O"
NOT_NAMES += "|Some|Others|Is"
NAME = rf"(?!(?:{NOT_NAMES})\b)[A-Z][a-z]+(?:-[a-z]+)*"
NAME_WITH_TITLE = (
    rf"{NAME}(?: {NAME}| and {NAME}| the (?:son|daughter|wife|priest|prophet|king|high priest)(?: of {NAME})?)?"
)
DIVINE_NAME = (
    r"the (?:LORD|Lord)(?: GOD| God| of hosts)?|the (?:angel|spirit|servant|man|sons?) of (?:the LORD|God)|God"
)
NOUN = r"(?!(?:of|and|in|to|that|which|who|was|same|other)\b)[a-z]+"
PEOPLE_PHRASE = rf"(?:the|all the|his|her|their) (?:{NOUN} )?{NOUN}(?: of (?:the )?(?:{NAME}|{NOUN}))?"
PERSON = rf"(?:{DIVINE_NAME}|{NAME_WITH_TITLE}|{PEOPLE_PHRASE})"
CLAUSE_START = r"(?:^|(?<=[.:;?!,] ))(?:(?:And|Then|Now|But|So|For|and|then|but|Therefore|therefore) )?(?:when )?"
PLACE_NAME = rf"(?:the (?:land|city|house|field|plains|mount|tent|valley|wilderness) of )?{NAME}"
QUOTATION = r"(?P<what>[A-Z][^:;?!.]*)"
SPEECH_VERB = "(?:answered and |spake and )?(?:said|spake)(?: again| also| moreover)?"
YEARS = "(?:[a-z]+ ){1,6}years"

ACTION_VERBS = {"slew": "slay", "smote": "smite", "blessed": "bless", "buried": "bury", "loved": "love"}
ACTION_VERBS |= {
    "begat": "beget",
    "anointed": "anoint",
    "took": "take",
    "brought": "bring",
    "sent": "send",
    "saw": "see",
}
ACTION_VERBS |= {"heard": "hear", "answered": "answer", "commanded": "command", "feared": "fear"}
MOTION_VERBS = {"went": "go", "came": "come", "fled": "flee", "returned": "return", "journeyed": "journey"}


class QuestionTemplate(NamedTuple):
    pattern: re.Pattern[str]
    questions: tuple[tuple[str, str], ...]  # (question, group of the pattern that answers it)


def _question_template(pattern: str, *questions: tuple[str, str]) -> QuestionTemplate:
    return QuestionTemplate(re.compile(pattern), questions)


TEMPLATES = (
    _question_template(
        rf"{CLAUSE_START}(?P<who>{PERSON}) {SPEECH_VERB} (?:unto|to) (?P<whom>{PERSON}), (?:saying, )?{QUOTATION}",
        ("Who said unto {whom}, {what}?", "who"),
        ("Unto whom did {who} say, {what}?", "whom"),
    ),
    _question_template(
        rf"{CLAUSE_START}(?P<who>{PERSON}) {SPEECH_VERB}(?: (?:unto|to) (?:him|her|them|me))?, {QUOTATION}",
        ("Who said, {what}?", "who"),
    ),
    _question_template(
        rf"(?<!of )(?P<who>{NAME}),? the (?P<kin>son|daughter|wife|brother|father) of (?P<whom>{NAME})",
        ("Whose {kin} was {who}?", "whom"),
        ("Who was the {kin} of {whom}?", "who"),
    ),
    _question_template(
        rf"(?:the|whose) name(?: of (?P<of>(?:his|her|the) [a-z]+(?: [a-z]+)?|{NAME}))? was (?P<who>{NAME})",
        ("What was the name of {of}?", "who"),
    ),
    _question_template(rf"(?P<who>{NAME}) was (?P<age>{YEARS}) old", ("How old was {who}?", "age")),
    _question_template(
        rf"(?P<who>{NAME}) (?P<did>lived|reigned)(?: over {NAME})?(?: in {NAME})? (?P<age>{YEARS})",
        ("How many years was it that {who} {did}?", "age"),
    ),
    _question_template(
        rf"{CLAUSE_START}(?P<who>{PERSON}) dwelt (?:in|at) (?P<where>{PLACE_NAME})",
        ("Where did {who} dwell?", "where"),
        ("Who dwelt in {where}?", "who"),
    ),
    _question_template(
        rf"{CLAUSE_START}(?P<who>{PERSON}) (?P<did>{'|'.join(MOTION_VERBS)})(?: up| down| out| forth| again| over)? "
        rf"(?P<way>to|unto|into) (?P<where>{PLACE_NAME})\b",
        ("Whither did {who} {do}?", "where"),
        ("Who {did} {way} {where}?", "who"),
    ),
    _question_template(
        rf"{CLAUSE_START}(?P<who>{PERSON}) (?P<did>{'|'.join(ACTION_VERBS)}) "
        rf"(?P<whom>{DIVINE_NAME}|{NAME_WITH_TITLE})\b(?! of)",
        ("Who {did} {whom}?", "who"),
        ("Whom did {who} {do}?", "whom"),
    ),
)


def load_questions(split: str) -> Iterator[Question]:
    """Yield the questions of one split, which consists of whole books."""
    verses = dict(sorted(load_verses(split, held_out_books=HELD_OUT_BOOKS).items()))
    for verse, context in group_verses(verses, MIN_CONTEXT_WORDS, MIN_CONTEXT_WORDS / 2):
        for number, (question, (answer, start)) in enumerate(_find_questions(context).items()):
            yield Question(question, context, (answer,), (start,), f"{verse}-{number}")


def _find_questions(context: str) -> dict[str, tuple[str, int]]:
    """Return a dict from questions about a context to (answer, character offset of the answer in the context).

    Questions that have two answers, or that contain their answer, are left out.
    """
    candidates: dict[str, set[tuple[str, int]]] = {}
    for template in TEMPLATES:
        for match in template.pattern.finditer(context):
            for wording, group in template.questions:
                question = _fill_template(wording, match)
                if question is not None:
                    candidates.setdefault(question, set()).add((match[group], match.start(group)))
    unique = {question: next(iter(answers)) for question, answers in candidates.items() if len(answers) == 1}
    return {question: answer for question, answer in unique.items() if answer[0].lower() not in question.lower()}


def _fill_template(template: str, match: re.Match[str]) -> str | None:
    """Return a question: the template filled with the groups of a matched clause.

    Return None if a group is missing or the quotation is too short.
    """
    groups = match.groupdict()
    if "what" in groups:
        quote = groups["what"].split()
        groups["what"] = " ".join(quote[:MAX_QUOTE_WORDS]).rstrip(",")
        if len(quote) < MIN_QUOTE_WORDS:
            return None
    if "did" in groups:
        groups["do"] = {**ACTION_VERBS, **MOTION_VERBS}.get(groups["did"], "")
    if any(value is None for name, value in groups.items() if f"{{{name}}}" in template):
        return None
    question = template.format(**groups)
    return question[0].upper() + question[1:]
