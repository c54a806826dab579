"""Each filter against transformers' logits processor of the same name, on random logits, to 1e-6."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.generation import logits_process as theirs  # noqa: E402

from monoblock.decoding.filters import Filters  # noqa: E402
from monoblock.decoding.logits import Past  # noqa: E402
from monoblock.decoding.settings import Settings  # noqa: E402

B, V, PROMPT, NEW = 7, 61, 17, 5
END = (3, 11)
WORDS = [[13], [17, 19], [23, 29, 31]]
CPU = torch.device("cpu")
DRAWN = {"temperature": 1.0}

# What is asked for -> the processors that do it, in transformers' order.
CASES = {
    "temperature 0.7": ({"temperature": 0.7}, lambda: [theirs.TemperatureLogitsWarper(0.7)]),
    "temperature 1.9": ({"temperature": 1.9}, lambda: [theirs.TemperatureLogitsWarper(1.9)]),
    "top-k 5": (DRAWN | {"top_k": 5}, lambda: [theirs.TopKLogitsWarper(5)]),
    "top-k of more than there are": (DRAWN | {"top_k": 99}, lambda: [theirs.TopKLogitsWarper(99)]),
    "top-p 0.9": (DRAWN | {"top_p": 0.9}, lambda: [theirs.TopPLogitsWarper(0.9)]),
    "top-p 0.05": (DRAWN | {"top_p": 0.05}, lambda: [theirs.TopPLogitsWarper(0.05)]),
    "min-p 0.1": (DRAWN | {"min_p": 0.1}, lambda: [theirs.MinPLogitsWarper(0.1)]),
    "typical 0.8": (DRAWN | {"typical_p": 0.8}, lambda: [theirs.TypicalLogitsWarper(0.8)]),
    "typical 0.2": (DRAWN | {"typical_p": 0.2}, lambda: [theirs.TypicalLogitsWarper(0.2)]),
    "the chances together": (
        {"temperature": 1.3, "top_k": 17, "top_p": 0.8, "min_p": 0.03, "typical_p": 0.9},
        lambda: [
            theirs.TemperatureLogitsWarper(1.3),
            theirs.TopKLogitsWarper(17),
            theirs.TopPLogitsWarper(0.8),
            theirs.MinPLogitsWarper(0.03),
            theirs.TypicalLogitsWarper(0.9),
        ],
    ),
    "repetition 1.2": ({"repetition_penalty": 1.2}, lambda: [theirs.RepetitionPenaltyLogitsProcessor(1.2)]),
    "repetition 0.8": ({"repetition_penalty": 0.8}, lambda: [theirs.RepetitionPenaltyLogitsProcessor(0.8)]),
    "no 1-gram twice": ({"no_repeat_ngram_size": 1}, lambda: [theirs.NoRepeatNGramLogitsProcessor(1)]),
    "no 2-gram twice": ({"no_repeat_ngram_size": 2}, lambda: [theirs.NoRepeatNGramLogitsProcessor(2)]),
    "no 3-gram twice": ({"no_repeat_ngram_size": 3}, lambda: [theirs.NoRepeatNGramLogitsProcessor(3)]),
    "no 40-gram twice": ({"no_repeat_ngram_size": 40}, lambda: [theirs.NoRepeatNGramLogitsProcessor(40)]),
    "bad words": ({"bad_words_ids": WORDS}, lambda: [theirs.NoBadWordsLogitsProcessor(WORDS, eos_token_id=list(END))]),
    "suppressed": ({"suppress_tokens": [5, 7]}, lambda: [theirs.SuppressTokensLogitsProcessor([5, 7])]),
    "suppressed at first": (
        {"begin_suppress_tokens": [5, 7]},
        lambda: [theirs.SuppressTokensAtBeginLogitsProcessor([5, 7], PROMPT)],
    ),
    "at least 4": (
        {"min_new_tokens": 4, "eos_token_id": END},
        lambda: [theirs.MinNewTokensLengthLogitsProcessor(PROMPT, 4, list(END))],
    ),
    "forced end": (
        {"forced_eos_token_id": 11, "max_new_tokens": 6},
        lambda: [theirs.ForcedEOSTokenLogitsProcessor(PROMPT + 6, 11)],
    ),
    "the rules together": (
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
            "bad_words_ids": WORDS,
            "min_new_tokens": 4,
            "eos_token_id": END,
            "suppress_tokens": [5],
        },
        lambda: [
            theirs.RepetitionPenaltyLogitsProcessor(1.2),
            theirs.NoRepeatNGramLogitsProcessor(2),
            theirs.NoBadWordsLogitsProcessor(WORDS, eos_token_id=list(END)),
            theirs.MinNewTokensLengthLogitsProcessor(PROMPT, 4, list(END)),
            theirs.SuppressTokensLogitsProcessor([5]),
        ],
    ),
}


def given(new=NEW):
    """Logits, and texts of few different tokens, so that they repeat; some end with the beginning of a bad word."""
    draw = torch.Generator().manual_seed(new)
    texts = torch.randint(15, 25, (B, PROMPT + new), generator=draw)
    texts[2, -1], texts[3, -2:] = 17, torch.tensor([23, 29])
    return 3 * torch.randn(B, V, generator=draw), texts


def past(texts):
    return Past(texts, torch.full((len(texts),), texts.shape[1]))


def filtered(rows, logits, texts, new):
    """Ours, as the engine does it."""
    filters = Filters(rows, CPU)
    return filters.chances(filters.rules(logits, past(texts), [new] * len(rows)))


def wanted(processors, logits, texts):
    logits = logits.clone()
    for processor in processors:
        logits = processor(texts, logits)
    return logits


def agree(got, expected):
    assert torch.equal(got == -math.inf, expected == -math.inf), "other tokens are ruled out"
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.softmax(-1), expected.softmax(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("new", [0, 1, NEW])
@pytest.mark.parametrize("name", CASES)
def test_a_filter_gives_what_the_processor_of_transformers_gives(name, new):
    asked, processors = CASES[name]
    logits, texts = given(new)
    agree(filtered([Settings(**asked)] * B, logits, texts, new), wanted(processors(), logits, texts))


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("top-k of more than there are", "no 40-gram twice")]
)
def test_the_cases_change_something(name):
    """Else the comparison above would compare nothing."""
    asked, _ = CASES[name]
    settings = Settings(**asked)
    changed = False
    for new in (0, 1, NEW):
        logits, texts = given(new)
        changed |= not torch.equal(filtered([settings] * B, logits, texts, new), logits)
    assert changed


@pytest.mark.parametrize("new", [0, 1, NEW])
def test_rows_with_settings_of_their_own_are_filtered_each_by_its_own(new):
    names = list(CASES)
    draw = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(len(names), V, generator=draw)
    texts = torch.randint(15, 25, (len(names), PROMPT + new), generator=draw)
    rows = [Settings(**CASES[name][0]) for name in names]
    got = filtered(rows, logits, texts, new)
    for row, name in enumerate(names):
        one = slice(row, row + 1)
        agree(got[one], wanted(CASES[name][1](), logits[one], texts[one]))


@pytest.mark.parametrize("length", [1, 2, 5, PROMPT])
def test_rows_of_different_lengths_look_back_over_their_own(length):
    """A short row beside a long one: what lies beyond its end is no part of it."""
    draw = torch.Generator().manual_seed(length)
    texts = torch.randint(15, 19, (B, PROMPT), generator=draw)
    logits = torch.randn(B, V, generator=draw)
    texts[0, length:] = -1
    lengths = torch.full((B,), PROMPT)
    lengths[0] = length
    first = int(texts[0, 0])  # said once, so nothing that begins with it twice has begun
    words = [[16], [17, 18], [15, 16, 17], [first, first, 21]]
    asked = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": words}
    filters = Filters([Settings(**asked)] * B, CPU)
    got = filters.rules(logits, Past(texts, lengths), [1] * B)[:1]
    processors = [
        theirs.RepetitionPenaltyLogitsProcessor(1.3),
        theirs.NoRepeatNGramLogitsProcessor(2),
        theirs.NoBadWordsLogitsProcessor(asked["bad_words_ids"], eos_token_id=list(END)),
    ]
    agree(got, wanted(processors, logits[:1], texts[:1, :length]))


def test_the_first_token_is_forced_where_a_target_begins():
    """transformers forces it when one token, the start, stands there."""
    logits, texts = given(0)
    got = filtered([Settings(forced_bos_token_id=23)] * B, logits, texts, 0)
    agree(got, wanted([theirs.ForcedBOSTokenLogitsProcessor(23)], logits, texts[:, :1]))
    logits, texts = given(1)
    assert torch.equal(filtered([Settings(forced_bos_token_id=23)] * B, logits, texts, 1), logits)


def test_ties_are_kept_or_cut_as_transformers_does():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0], [0.0] * 6])
    texts = torch.zeros(2, 1, dtype=torch.long)
    for asked, processor in [
        ({"top_k": 2}, theirs.TopKLogitsWarper(2)),
        ({"min_p": 0.3}, theirs.MinPLogitsWarper(0.3)),
    ]:
        agree(filtered([Settings(temperature=1.0, **asked)] * 2, logits, texts, 0), processor(texts, logits.clone()))
