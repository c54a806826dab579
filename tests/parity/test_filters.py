"""Each filter against the logits processor of transformers with the same name, on random logits."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.generation import logits_process as theirs  # noqa: E402

from monoblock.inference.sampler import Filters, TokenHistory  # noqa: E402
from monoblock.inference.settings import Settings  # noqa: E402

B, V, PROMPT, NEW = 7, 61, 17, 5
EOS_IDS = (3, 11)
BAD_WORDS = [[13], [17, 19], [23, 29, 31]]
CPU = torch.device("cpu")
SAMPLING = {"temperature": 1.0}

# name -> our options, and the processors of transformers in its order
CASES = {
    "temperature 0.7": ({"temperature": 0.7}, lambda: [theirs.TemperatureLogitsWarper(0.7)]),
    "temperature 1.9": ({"temperature": 1.9}, lambda: [theirs.TemperatureLogitsWarper(1.9)]),
    "top-k 5": (SAMPLING | {"top_k": 5}, lambda: [theirs.TopKLogitsWarper(5)]),
    "top-k above the vocabulary": (SAMPLING | {"top_k": 99}, lambda: [theirs.TopKLogitsWarper(99)]),
    "top-p 0.9": (SAMPLING | {"top_p": 0.9}, lambda: [theirs.TopPLogitsWarper(0.9)]),
    "top-p 0.05": (SAMPLING | {"top_p": 0.05}, lambda: [theirs.TopPLogitsWarper(0.05)]),
    "min-p 0.1": (SAMPLING | {"min_p": 0.1}, lambda: [theirs.MinPLogitsWarper(0.1)]),
    "typical 0.8": (SAMPLING | {"typical_p": 0.8}, lambda: [theirs.TypicalLogitsWarper(0.8)]),
    "typical 0.2": (SAMPLING | {"typical_p": 0.2}, lambda: [theirs.TypicalLogitsWarper(0.2)]),
    "all sampling filters": (
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
    "bad words": (
        {"bad_words_ids": BAD_WORDS},
        lambda: [theirs.NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=list(EOS_IDS))],
    ),
    "suppressed": ({"suppress_tokens": [5, 7]}, lambda: [theirs.SuppressTokensLogitsProcessor([5, 7])]),
    "suppressed at first": (
        {"begin_suppress_tokens": [5, 7]},
        lambda: [theirs.SuppressTokensAtBeginLogitsProcessor([5, 7], PROMPT)],
    ),
    "at least 4": (
        {"min_new_tokens": 4, "eos_token_id": EOS_IDS},
        lambda: [theirs.MinNewTokensLengthLogitsProcessor(PROMPT, 4, list(EOS_IDS))],
    ),
    "forced end": (
        {"forced_eos_token_id": 11, "max_new_tokens": 6},
        lambda: [theirs.ForcedEOSTokenLogitsProcessor(PROMPT + 6, 11)],
    ),
    "all constraints": (
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
            "bad_words_ids": BAD_WORDS,
            "min_new_tokens": 4,
            "eos_token_id": EOS_IDS,
            "suppress_tokens": [5],
        },
        lambda: [
            theirs.RepetitionPenaltyLogitsProcessor(1.2),
            theirs.NoRepeatNGramLogitsProcessor(2),
            theirs.NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=list(EOS_IDS)),
            theirs.MinNewTokensLengthLogitsProcessor(PROMPT, 4, list(EOS_IDS)),
            theirs.SuppressTokensLogitsProcessor([5]),
        ],
    ),
}


def random_inputs(num_new=NEW):
    """Draw logits, and texts of few different tokens, so that they repeat; some end with a prefix of a bad word."""
    generator = torch.Generator().manual_seed(num_new)
    tokens = torch.randint(15, 25, (B, PROMPT + num_new), generator=generator)
    tokens[2, -1], tokens[3, -2:] = 17, torch.tensor([23, 29])
    return 3 * torch.randn(B, V, generator=generator), tokens


def token_history(tokens):
    return TokenHistory(tokens, *(torch.full((len(tokens),), length) for length in (tokens.shape[1], PROMPT)))


def apply_ours(settings, logits, tokens, num_new):
    """Apply our filters in the order of the engine."""
    filters = Filters(settings, CPU)
    return filters.apply_sampling_filters(
        filters.apply_constraints(logits, token_history(tokens), [num_new] * len(settings))
    )


def apply_theirs(processors, logits, tokens):
    logits = logits.clone()
    for processor in processors:
        logits = processor(tokens, logits)
    return logits


def assert_same_logits(ours, theirs):
    assert torch.equal(ours == -math.inf, theirs == -math.inf), "different tokens are excluded"
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_new", [0, 1, NEW])
@pytest.mark.parametrize("name", CASES)
def test_a_filter_equals_the_processor_of_transformers(name, num_new):
    options, processors = CASES[name]
    logits, tokens = random_inputs(num_new)
    assert_same_logits(
        apply_ours([Settings(**options)] * B, logits, tokens, num_new), apply_theirs(processors(), logits, tokens)
    )


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("top-k above the vocabulary", "no 40-gram twice")]
)
def test_the_cases_change_something(name):
    """Otherwise the comparison above would be empty."""
    options, _ = CASES[name]
    settings = Settings(**options)
    changed = False
    for num_new in (0, 1, NEW):
        logits, tokens = random_inputs(num_new)
        changed |= not torch.equal(apply_ours([settings] * B, logits, tokens, num_new), logits)
    assert changed


@pytest.mark.parametrize("num_new", [0, 1, NEW])
def test_rows_of_a_batch_are_filtered_by_their_own_settings(num_new):
    names = list(CASES)
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(len(names), V, generator=generator)
    tokens = torch.randint(15, 25, (len(names), PROMPT + num_new), generator=generator)
    settings = [Settings(**CASES[name][0]) for name in names]
    filtered = apply_ours(settings, logits, tokens, num_new)
    for row, name in enumerate(names):
        single = slice(row, row + 1)
        assert_same_logits(filtered[single], apply_theirs(CASES[name][1](), logits[single], tokens[single]))


@pytest.mark.parametrize("length", [1, 2, 5, PROMPT])
def test_rows_of_different_lengths_use_only_their_own_tokens(length):
    """A short row in a batch with longer ones: what lies beyond its end does not count."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(15, 19, (B, PROMPT), generator=generator)
    logits = torch.randn(B, V, generator=generator)
    tokens[0, length:] = -1
    lengths = torch.full((B,), PROMPT)
    lengths[0] = length
    first = int(tokens[0, 0])  # occurs once, so a bad word that starts with it twice has not begun
    bad_words = [[16], [17, 18], [15, 16, 17], [first, first, 21]]
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": bad_words}
    filters = Filters([Settings(**options)] * B, CPU)
    filtered = filters.apply_constraints(logits, TokenHistory(tokens, lengths, lengths - 1), [1] * B)[:1]
    processors = [
        theirs.RepetitionPenaltyLogitsProcessor(1.3),
        theirs.NoRepeatNGramLogitsProcessor(2),
        theirs.NoBadWordsLogitsProcessor(options["bad_words_ids"], eos_token_id=list(EOS_IDS)),
    ]
    assert_same_logits(filtered, apply_theirs(processors, logits[:1], tokens[:1, :length]))


def test_forced_bos_applies_to_the_first_token_only():
    """transformers forces it when the sequence has one token, the start token."""
    logits, tokens = random_inputs(0)
    filtered = apply_ours([Settings(forced_bos_token_id=23)] * B, logits, tokens, 0)
    assert_same_logits(filtered, apply_theirs([theirs.ForcedBOSTokenLogitsProcessor(23)], logits, tokens[:, :1]))
    logits, tokens = random_inputs(1)
    assert torch.equal(apply_ours([Settings(forced_bos_token_id=23)] * B, logits, tokens, 1), logits)


def test_ties_are_resolved_as_in_transformers():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0], [0.0] * 6])
    tokens = torch.zeros(2, 1, dtype=torch.long)
    for options, processor in [
        ({"top_k": 2}, theirs.TopKLogitsWarper(2)),
        ({"min_p": 0.3}, theirs.MinPLogitsWarper(0.3)),
    ]:
        assert_same_logits(
            apply_ours([Settings(temperature=1.0, **options)] * 2, logits, tokens, 0), processor(tokens, logits.clone())
        )
