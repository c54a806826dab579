"""Beam search: greedy is not optimal, more beams are better, and enough beams are an exhaustive search.

Every step of many searches together is compared with a plain implementation for one search, hypothesis by hypothesis.
"""

import copy
import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from operator_support import use_kernels_for_toys
from support import build_model

import monoblock as mb
from monoblock.inference import beam
from monoblock.inference.beam import BeamSearches, best_continuations, first_state, make_options, top_sums
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.kernels.cpu import library

VOCAB, LENGTH, END = 5, 4, 3
CPU = torch.device("cpu")


@pytest.fixture
def compiled():
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)


def begin(*settings):
    """Searches with these settings."""
    searches = BeamSearches(settings[0].num_beams, settings[0].num_beam_groups, CPU)
    for own in settings:
        searches.add([own], [own.max_new_tokens])
    return searches


# -- a table of probabilities instead of a model ----------------------------------------------------------------------


def search_table(next_probs, settings):
    """The best hypotheses of a beam search; next_probs(tokens) gives the probabilities of the next token."""
    searches = begin(settings)
    rows = [()] * settings.num_beams
    while not searches.is_done[0]:
        log_probs = torch.tensor([next_probs(tokens) for tokens in rows], dtype=torch.double).log()
        (origins,) = searches.advance(log_probs, normalized=True).tolist()
        rows = [(*rows[origin], token) for origin, token in zip(origins, searches.last_tokens, strict=True)]
        assert rows == [tuple(tokens) for tokens in searches.tokens(0)]
    return searches.best_hypotheses(0)


# The two steps of the lecture's example; its third and fourth words have the same name.
FIRST = [0.5, 0.4, 0.0, 0.0, 0.0, 0.0]
SECOND = {0: [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], 1: [0.1, 0.4, 0.2, 0.1, 0.0, 0.0]}


def lecture_probs(tokens):
    return FIRST if not tokens else SECOND.get(tokens[0], [1 / 6] * 6)


@pytest.mark.parametrize(("beams", "words", "probability"), [(1, (0, 2), 0.15), (2, (1, 1), 0.16), (3, (1, 1), 0.16)])
def test_greedy_misses_what_two_beams_find(beams, words, probability):
    """By the printed table greedy reaches 0.15, and the best is 0.16."""
    best, *_ = search_table(lecture_probs, Settings(max_new_tokens=2, num_beams=beams, length_penalty=0.0))
    assert best.tokens == words
    assert math.exp(best.score) == pytest.approx(probability)


def test_two_beams_find_the_best_of_all_two_word_sentences_of_the_lecture():
    probabilities = {(a, b): FIRST[a] * SECOND[a][b] for a in SECOND for b in range(6)}
    best, *_ = search_table(lecture_probs, Settings(max_new_tokens=2, num_beams=2, length_penalty=0.0))
    assert best.tokens == max(probabilities, key=probabilities.__getitem__)


# -- a model whose texts can all be enumerated ------------------------------------------------------------------------


def small_model(seed):
    return build_model(mb.gpt(vocab=VOCAB, width=12, depth=2, heads=3, context=13), seed=seed)


def all_texts(eos_tokens):
    """Every text of at most LENGTH tokens that stops at an end token or at the last position."""
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        stop = next((index for index, token in enumerate(text) if token in eos_tokens), LENGTH - 1)
        if set(text[stop + 1 :]) <= {0}:  # count texts that differ only after their end once
            yield text[: stop + 1]


@torch.no_grad()
def exhaustive_search(model, prompt, eos_tokens, penalty, form="length"):
    """The score of every text, best first, computed by full passes."""
    scores = {}
    for length, group in itertools.groupby(sorted(all_texts(eos_tokens), key=len), key=len):
        texts = list(group)
        ids = torch.tensor([[*prompt, *text] for text in texts])
        log_probs = model(ids).log_softmax(-1)[:, len(prompt) - 1 : -1]
        divisor = length**penalty if form == "length" else (5 + length) ** penalty / (5 + 1) ** penalty  # Wu et al., 7
        sums = log_probs.gather(-1, ids[:, len(prompt) :, None]).sum((1, 2)) / divisor
        scores |= dict(zip(texts, sums.tolist(), strict=True))
    return sorted(scores.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("eos_tokens", [(), (END,), (END, 1)], ids=["no end", "one end", "two ends"])
@pytest.mark.parametrize(
    ("penalty", "form"), [(0.0, "length"), (0.6, "length"), (1.0, "length"), (2.0, "length"), (0.6, "gnmt")]
)
@pytest.mark.parametrize("seed", range(3))
def test_as_many_beams_as_prefixes_find_the_three_best_texts(seed, penalty, form, eos_tokens):
    model, prompt = small_model(seed), [4, 2]
    num_beams = VOCAB ** (LENGTH - 1)
    engine = Engine(model, max_rows=num_beams)
    settings = Settings(
        max_new_tokens=LENGTH,
        num_beams=num_beams,
        num_return_sequences=3,
        length_penalty=penalty,
        length_penalty_form=form,
        early_stopping="never",
        eos_token_id=eos_tokens,
    )
    engine.add(prompt, settings)
    outputs = [output for _ in range(LENGTH) for output in engine.step()]
    expected = exhaustive_search(model, prompt, eos_tokens, penalty, form)[:3]
    assert [output.tokens for output in outputs] == [text for text, _ in expected]
    assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_greedy_is_not_optimal_in_a_model_either():
    missed = 0
    for seed in range(9):
        model = small_model(seed)
        with torch.no_grad():
            model.input.token.weight.mul_(0.4)  # flatter distributions, in which greedy misses more
        scores = dict(exhaustive_search(model, [4, 2], (), 0.0))
        greedy = tuple(model.generate(torch.tensor([[4, 2]]), max_new_tokens=LENGTH)[0, 2:].tolist())
        beam = tuple(model.generate(torch.tensor([[4, 2]]), max_new_tokens=LENGTH, num_beams=9)[0, 2:].tolist())
        assert scores[greedy] <= scores[beam]
        missed += scores[greedy] < scores[beam]
    assert missed


# -- groups -----------------------------------------------------------------------------------------------------------


def test_groups_of_beams_are_penalized_for_tokens_of_earlier_groups():
    """Vijayakumar et al. 2018 by hand: one beam a group, one step."""
    log_probs = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05]).log()
    chosen = {}
    for penalty in (0.0, 0.3, 9.0):
        settings = Settings(
            max_new_tokens=1, num_beams=3, num_beam_groups=3, diversity_penalty=penalty, num_return_sequences=3
        )
        searches = begin(settings)
        searches.advance(log_probs.expand(3, -1), normalized=True)
        chosen[penalty] = searches.last_tokens
    # 0.4 · e⁻⁰·³ = 0.296 < 0.3, then 0.3 · e⁻⁰·³ = 0.222 and 0.296 again
    assert chosen == {0.0: [0, 0, 0], 0.3: [0, 1, 0], 9.0: [0, 1, 2]}


def test_a_diversity_penalty_makes_groups_differ():
    model, ids = small_model(1), torch.tensor([[4, 2]])
    options = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 4}
    plain = model.generate(ids, **options, num_beam_groups=4, diversity_penalty=0.0)
    diverse = model.generate(ids, **options, num_beam_groups=4, diversity_penalty=1e3)
    assert len({tuple(row) for row in plain.tolist()}) == 1, "without a penalty all groups find the same text"
    assert len({tuple(row) for row in diverse.tolist()}) == 4


# -- a plain implementation -------------------------------------------------------------------------------------------


class PlainSearch:
    """Beam search as its definition says, for one search, with lists and sorting."""

    def __init__(self, settings, limit):
        size = settings.num_beams // settings.num_beam_groups
        self.settings, self.limit, self.size, self.length = settings, limit, size, 0
        self.groups = [([((), 0.0)] + [((), -1e9)] * (size - 1), []) for _ in range(settings.num_beam_groups)]
        self.done = [False] * settings.num_beam_groups

    def advance(self, log_probs):
        """Take log-probabilities (num_beams, V) in fp32, which is the precision of the sums."""
        own, counts, origins = self.settings, Counter(), []
        if all(self.done):
            return list(range(own.num_beams))
        self.length += 1
        is_last = self.length >= self.limit
        for number, ((running, finished), rows) in enumerate(zip(self.groups, log_probs.split(self.size), strict=True)):
            sums = rows + torch.tensor([score for _, score in running])[:, None]
            used = torch.tensor([own.diversity_penalty * counts[token] for token in range(rows.shape[1])])
            sums = (sums - used).tolist()
            every = [(score, b, token) for b, row in enumerate(sums) for token, score in enumerate(row)]
            every = sorted(every, key=lambda one: -one[0])[: max(2, 1 + len(own.eos_token_id)) * self.size]
            ends = [is_last or token in own.eos_token_id for _, _, token in every]
            for (score, b, token), end in list(zip(every, ends, strict=True))[: self.size]:
                if end and score > -5e8 and not self.done[number]:
                    finished.append(((*running[b][0], token), score / own.length_divisor(self.length)))
            finished.sort(key=lambda hypothesis: -hypothesis[1])
            del finished[self.size :]
            every = [(score - 1e9 * end, b, token) for (score, b, token), end in zip(every, ends, strict=True)]
            chosen = sorted(every, key=lambda one: -one[0])[: self.size]
            origins += [number * self.size + b for _, b, _ in chosen]
            running[:] = [((*running[b][0], token), score) for score, b, token in chosen]
            counts.update(token for _, _, token in chosen)
            self.done[number] = self.done[number] or is_last or self.can_stop(running, finished)
        return origins

    def can_stop(self, running, finished):
        own = self.settings
        best_length = self.limit if own.early_stopping == "never" and own.length_penalty > 0 else self.length
        best = running[0][1] / own.length_divisor(best_length)
        return len(finished) == self.size and (own.early_stopping is True or best <= finished[-1][1])

    def best_hypotheses(self):
        every = [hypothesis for _, finished in self.groups for hypothesis in finished]
        return sorted(every, key=lambda hypothesis: -hypothesis[1])[: self.settings.num_return_sequences]


def assert_same(searches, plain):
    """The searches have the hypotheses of the plain ones, and the same scores, bit by bit."""
    assert len(searches) == len(plain)
    assert searches.is_done == [all(one.done) for one in plain]
    assert searches.lengths == [one.length for one in plain]
    for index, one in enumerate(plain):
        assert searches.best_hypotheses(index) == one.best_hypotheses()
        if not all(one.done):
            texts = [text for running, _ in one.groups for text, _ in running]
            assert [tuple(text) for text in searches.tokens(index)] == texts
            rows = slice(index * searches.num_beams, (index + 1) * searches.num_beams)
            assert searches.last_tokens[rows] == [text[-1] if text else 0 for text in texts]


def advance_both(searches, plain, vocab, generator, sharpness=2.0):
    shape = (len(plain) * searches.num_beams, vocab)
    log_probs = (sharpness * torch.randn(shape, generator=generator)).log_softmax(-1)
    origins = searches.advance(log_probs, normalized=True)
    parts = log_probs.view(len(plain), searches.num_beams, vocab)
    assert origins.tolist() == [one.advance(rows) for one, rows in zip(plain, parts, strict=True)]
    assert_same(searches, plain)


def run_both(settings, vocab, seed, **options):
    """Run searches with these settings on random logits to their ends; return the plain ones."""
    generator, searches = torch.Generator().manual_seed(seed), begin(*settings)
    plain = [PlainSearch(own, own.max_new_tokens) for own in settings]
    while not all(searches.is_done):
        advance_both(searches, plain, vocab, generator, **options)
    return plain


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(
    ("penalty", "form"), [(-0.7, "length"), (0.0, "length"), (1.0, "length"), (1.3, "length"), (0.6, "gnmt")]
)
def test_every_step_gives_the_hypotheses_of_a_plain_search(early_stopping, penalty, form):
    lengths = set()
    for seed, (beams, eos) in enumerate(itertools.product((2, 3, 5), ((), (2,), (1, 4, 6, 9)))):
        own = Settings(
            max_new_tokens=12, num_beams=beams, num_return_sequences=beams, eos_token_id=eos,
            early_stopping=early_stopping, length_penalty=penalty, length_penalty_form=form,
        )  # fmt: skip
        for search in run_both([own] * 3, 37, seed):
            lengths |= {len(tokens) for tokens, _ in search.best_hypotheses()}
    assert len(lengths) > 1


@pytest.mark.parametrize("penalty", [0.0, 0.3, 2.0])
@pytest.mark.parametrize(("beams", "groups"), [(3, 3), (4, 2), (6, 3)])
def test_diverse_groups_are_those_of_a_plain_search(beams, groups, penalty):
    own = Settings(max_new_tokens=11, num_beams=beams, num_beam_groups=groups, num_return_sequences=beams)
    ends = [(), (3,), (1, 5)]
    several = [replace(own, eos_token_id=eos, diversity_penalty=penalty) for eos in ends]
    for seed in range(5):
        run_both(several, 17, seed)
        run_both([*several, replace(own, diversity_penalty=1.1)], 19, seed)


@pytest.mark.parametrize("vocab", [2, 11, 64, 600, 1013])
def test_vocabularies_with_and_without_segments(vocab):
    run_both([Settings(max_new_tokens=9, num_beams=4, eos_token_id=(1,))] * 5, vocab, seed=vocab, sharpness=3.0)


def test_searches_may_differ_in_length_penalty_and_ends():
    own = Settings(max_new_tokens=12, num_beams=3, eos_token_id=(3, 8))
    changes = (
        {},
        {"max_new_tokens": 4},
        {"length_penalty": 2.0},
        {"length_penalty": 2.0, "length_penalty_form": "gnmt"},
        {"early_stopping": True},
        {"early_stopping": "never"},
        {"eos_token_id": ()},
        {"eos_token_id": (5,)},
    )
    for seed in range(10):
        run_both([replace(own, **change) for change in changes], 41, seed)


def test_fewer_hypotheses_than_beams_and_a_single_new_token():
    run_both([Settings(max_new_tokens=1, num_beams=5, eos_token_id=(1,))] * 2, 17, seed=0)
    run_both([Settings(max_new_tokens=5, num_beams=5, eos_token_id=(1,))] * 2, 17, seed=1)
    run_both([Settings(max_new_tokens=5, num_beams=5, eos_token_id=(1,), num_return_sequences=5)] * 2, 2, seed=1)


def test_texts_may_be_much_longer_than_the_room_at_first():
    own = Settings(max_new_tokens=131, num_beams=2, eos_token_id=(1,), early_stopping="never")
    run_both([own, replace(own, max_new_tokens=67)], 29, seed=3)


# -- searches that come and go ----------------------------------------------------------------------------------------


def random_settings(rng, beams, groups):
    return Settings(
        max_new_tokens=rng.choice((1, 3, 8, 40)),
        num_beams=beams,
        num_beam_groups=groups,
        diversity_penalty=rng.choice((0.0, 0.7)) if groups > 1 else 0.0,
        num_return_sequences=rng.randint(1, beams),
        length_penalty=rng.choice((-0.5, 0.0, 1.0, 1.6)),
        length_penalty_form=rng.choice(("length", "gnmt")),
        early_stopping=rng.choice((True, False, "never")),
        eos_token_id=rng.choice(((), (2,), (1, 4, 6))),
    )


@pytest.mark.parametrize("seed", range(12))
def test_searches_that_come_go_and_are_undone_are_those_of_plain_searches(seed):
    """A random walk of steps, additions, removals, snapshots and returns to any of them, inside and outside of
    `torch.inference_mode`.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    beams, groups = rng.choice(((2, 1), (3, 1), (5, 1), (4, 2), (3, 3)))
    searches, plain, snapshots = BeamSearches(beams, groups, CPU), [], []
    for _ in range(150):
        action = rng.random()
        with torch.inference_mode(rng.random() < 0.5):
            if action < 0.25 and len(plain) < 6:
                own = random_settings(rng, beams, groups)
                limit = rng.randint(1, own.max_new_tokens)
                searches.add([own], [limit])
                plain.append(PlainSearch(own, limit))
            elif action < 0.35:
                kept = rng.sample(range(len(plain)), rng.randint(0, len(plain)))
                searches.keep(kept)
                plain = [plain[index] for index in kept]
            elif action < 0.45:
                snapshots.append((vars(searches).copy(), copy.deepcopy(plain)))
            elif action < 0.55 and snapshots:
                saved, plain = rng.choice(snapshots)
                plain = copy.deepcopy(plain)
                vars(searches).update(saved)
                assert_same(searches, plain)
            elif action < 0.65 and plain:
                with pytest.raises(RuntimeError):  # a step that fails changes nothing
                    searches.advance(torch.zeros(len(plain) * beams + 1, 23), normalized=True)
                assert_same(searches, plain)
            else:
                advance_both(searches, plain, 23, generator)


def test_a_search_is_the_same_alone():
    generator = torch.Generator().manual_seed(4)
    own = Settings(max_new_tokens=12, num_beams=3, num_return_sequences=3, eos_token_id=(2,))
    several = [own, replace(own, eos_token_id=(1, 5, 7)), replace(own, length_penalty=2.0), own]
    together, alone = begin(*several), [begin(settings) for settings in several]
    while not all(together.is_done):
        logits = 2 * torch.randn(4 * 3, 61, generator=generator)
        together.advance(logits)
        for one, rows in zip(alone, logits.split(3), strict=True):
            one.advance(rows)
    for index, one in enumerate(alone):
        assert together.best_hypotheses(index) == one.best_hypotheses(0)


# -- the best continuations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [5, 40, 128, 640, 1013, 5000])
@pytest.mark.parametrize("levels", [None, 11, 201])
def test_continuations_are_those_of_sorting(vocab, levels):
    """Of equal ones the first; those that are equal to the last one may be others."""
    generator = torch.Generator().manual_seed(vocab)
    log_probs = torch.randn(7, 2, 4, vocab, generator=generator).log_softmax(-1)
    scores = -torch.rand(7, 2, 4, generator=generator)
    if levels is not None:
        log_probs, scores = (torch.round(one * levels) / levels for one in (log_probs / 9, scores))
    best = top_sums(log_probs, scores, 12)
    expected = (log_probs + scores[..., None]).flatten(2).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best.scores, expected.values[..., :12].double())
    is_certain = best.scores > best.scores[..., -1:] if levels else ...
    assert torch.equal((best.beams * vocab + best.tokens)[is_certain], expected.indices[..., :12][is_certain])
    assert levels is None or (best.scores.diff() == 0)[is_certain[..., 1:]].any()


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("vocab", [13, 211, 1201])
@pytest.mark.parametrize("suppressed", [(), (5, 3)])
def test_scores_are_sums_of_log_probabilities(kernel, vocab, suppressed, request, monkeypatch):
    if kernel:
        request.getfixturevalue("compiled")
    monkeypatch.setattr(beam, "_has_kernel", lambda logits: kernel)
    generator = torch.Generator().manual_seed(vocab)
    logits, scores = 4 * torch.randn(2 * 3, vocab, generator=generator), torch.randn(2, 1, 3, generator=generator)
    state = first_state(2, 1, 3, 7, CPU)._replace(scores=scores.double())
    options = make_options([Settings(num_beams=3, eos_token_id=(1,))] * 2, [7, 7], 7, CPU)
    best = best_continuations(logits.clone(), state, options, suppressed)
    totals = logits.double().log_softmax(-1) + scores.double().view(6, 1)
    totals[:, list(suppressed)] = -torch.inf  # after the softmax: suppressed tokens keep their probability
    expected = totals.view(2, 1, -1).sort(descending=True)
    assert torch.equal(best.beams * vocab + best.tokens, expected.indices[..., :6])
    torch.testing.assert_close(best.scores, expected.values[..., :6], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_sums_are_at_least_float32_whatever_the_dtypes(dtype, default):
    logits = torch.randn(3, 41, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.set_default_dtype(default)  # the C++ kernel takes no other scores than fp32
    try:
        searches = begin(Settings(num_beams=3, num_return_sequences=3, max_new_tokens=1))
        searches.advance(logits)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = logits[0].double().log_softmax(-1).topk(3)
    tokens, scores = zip(*searches.best_hypotheses(0), strict=True)
    torch.testing.assert_close(torch.tensor(scores).double(), expected.values, rtol=0, atol=2e-6)
    assert logits[0, [token for (token,) in tokens]].tolist() == logits[0].topk(3).values.tolist()


@pytest.mark.parametrize("groups", [1, 3])
def test_ends_are_suppressed_before_the_minimum_length_of_each_search(groups):
    own = Settings(
        max_new_tokens=9, num_beams=3, num_return_sequences=3, eos_token_id=(2, 4), num_beam_groups=groups,
        diversity_penalty=0.4 if groups > 1 else 0.0, early_stopping=True,
    )  # fmt: skip
    minimums, lengths = (0, 3, 7), Counter()
    for seed in range(9):
        generator = torch.Generator().manual_seed(seed)
        searches = begin(*(replace(own, min_new_tokens=least) for least in minimums))
        searches.advance(torch.randn(9, 7, generator=generator), suppressed=(5,))
        searches.add([replace(own, min_new_tokens=5)], [9])
        while not all(searches.is_done):
            logits = torch.randn(12, 7, generator=generator)
            logits[:, 2] += 2
            searches.advance(logits, suppressed=(5,))
        for index, least in enumerate((*minimums, 5)):
            for tokens, _ in searches.best_hypotheses(index):
                assert len(tokens) > least
                assert not {2, 4} & set(tokens[: max(least, len(tokens) - 1)])
                assert 5 not in tokens
                lengths[least, len(tokens)] += 1
    assert all(lengths[least, least + 1] for least in minimums)


@pytest.mark.parametrize("beams", [3, 5])
def test_kernels_find_the_texts_of_the_plain_model(beams, compiled, monkeypatch):
    """With more rows than the operator of a step takes; sources differ, and rows end at different steps."""
    use_kernels_for_toys(monkeypatch)
    model = build_model(mb.vaswani(vocab=37, width=24, depth=2, heads=3, hidden=29, context=23), seed=5)
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randint(3, 37, (2 + n % 7,), generator=generator).tolist() for n in range(11)]
    settings = Settings(max_new_tokens=17, num_beams=beams, eos_token_id=(2, 7), num_return_sequences=2)
    results = []
    for decoder in (mb.optimize(model), model):
        engine = Engine(decoder, max_rows=11 * beams)
        for source in sources:
            engine.add((1,), settings, source)
        texts = {}
        while engine.busy:
            texts |= {(output.request_id, output.sequence_index): output.tokens for output in engine.step()}
        results.append(texts)
    assert len(results[0]) == 22
    assert results[0] == results[1]


# -- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def their_model():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 43, "n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 3}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(7)
    return model.double()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos_tokens", [(7,), (7, 11, 23)])
@torch.no_grad()
def test_texts_and_scores_are_those_of_transformers(their_model, early_stopping, penalty, eos_tokens):
    """Ours on the logits of their model, theirs by their `generate`."""
    prompts = torch.randint(2, 43, (5, 3), generator=torch.Generator().manual_seed(1))
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12, "length_penalty": penalty}
    options["early_stopping"] = early_stopping
    theirs = their_model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, eos_token_id=list(eos_tokens),
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    searches = begin(*[Settings(eos_token_id=eos_tokens, **options)] * 5)
    rows = prompts.repeat_interleave(4, 0)
    while not all(searches.is_done):
        origins = searches.advance(their_model(rows).logits[:, -1])
        rows = rows[(origins + 4 * torch.arange(5)[:, None]).flatten()]
        rows = torch.cat((rows, torch.tensor(searches.last_tokens)[:, None]), 1)
    found = [hypothesis for index in range(5) for hypothesis in searches.best_hypotheses(index)]
    expected = [row[: len(own.tokens)] for row, own in zip(theirs.sequences[:, 3:].tolist(), found, strict=True)]
    assert [list(own.tokens) for own in found] == expected
    assert [own.score for own in found] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-5)
