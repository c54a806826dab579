"""A step of a whole stack by one operator says what the plain path says, and leaves the cache as it would."""

import pytest
import torch
from operator_support import watched
from support import build, close, has_both, is_decoder, near, presets, source, tokens, toy

import monoblock as mb
from monoblock.decoding import prepare, step_cpu
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.feedforward import ACTIVATIONS
from monoblock.native import library

ROWS, LONGEST = 3, 23
LENGTHS = torch.tensor([7, 4, 5])


@pytest.fixture(scope="module", autouse=True)
def compiler():
    found = library.load()
    assert found.ready, found.reason


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Whether each step was taken by the operator; toys are given to it too."""
    return watched(monkeypatch)


def twin_of(model):
    return prepare._made(model).eval()


def quantised(name, bits):
    return toy(name) if bits is None else mb.quantized(toy(name), bits=bits)


class Reading:
    """A model with a cache that has read rows of different lengths."""

    def __init__(self, model, rows=ROWS, lengths=LENGTHS):
        self.model, self.both = model, has_both(model.config)
        self.cache = model.make_cache(rows, LONGEST, chunk=int(lengths.max()))
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        memory = (
            model.encode(source(rows), torch.arange(17) < torch.tensor([17, 11, 13])[:rows, None])
            if self.both
            else None
        )
        self.seen = torch.arange(17) < torch.tensor([17, 11, 13])[:rows, None]
        self.say(tokens(rows, mask.shape[1]), mask, memory)
        self.cache.advance(mask.sum(-1))

    def say(self, ids, mask=None, memory=None, **more):
        if self.both:
            seen = self.seen if memory is not None else None
            return self.model.decode(ids, memory, seen, mask, cache=self.cache, **more)
        return self.model(ids, mask, cache=self.cache, **more)

    def step(self, number, live=None):
        rows = self.cache.batch
        logits = self.say(tokens(rows, 1, seed=number), None if live is None else live[:, None])
        self.cache.advance(1 if live is None else live.long())
        return logits


def alike(one, other, equal=close):
    """Two caches that hold the same."""
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.written, other.written)
    for mine, theirs in zip(one.places.values(), other.places.values(), strict=True):
        assert torch.equal(mine.index, theirs.index)
        assert torch.equal(mine.at[:, :-1], theirs.at[:, :-1])  # the spare column takes anything
    for mine, theirs in zip(one.slots, other.slots, strict=True):
        equal(mine.keys[:, :, :-1], theirs.keys[:, :, :-1])
        equal(mine.values[:, :, :-1], theirs.values[:, :, :-1])


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", presets(is_decoder))
@torch.no_grad()
def test_a_step_gives_the_plain_paths_logits_and_cache(name, bits, served):
    model, equal = quantised(name, bits), close if bits is None else near
    plain, quick = Reading(model), Reading(twin_of(model))
    for number in range(9):  # beyond the window of those that have one
        equal(quick.step(number), plain.step(number))
    live = torch.tensor([True, False, True])
    equal(quick.step(9, live)[live], plain.step(9, live)[live])
    equal(quick.step(10), plain.step(10))
    alike(quick.cache, plain.cache, equal)
    assert served == ([] if has_experts(model) else [True] * 11)


def has_experts(model):
    return any(block.feedforward.experts for block in model.config.decoder.layers())


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", presets(is_decoder))
@torch.no_grad()
def test_several_tokens_of_a_row_give_the_plain_paths_logits_and_cache(name, bits, served):
    """Some of them are taken back in between, as when a proposal was wrong."""
    model, equal = quantised(name, bits), close if bits is None else near
    plain, quick = (Reading(made, 1, LENGTHS[:1]) for made in (model, twin_of(model)))
    for number, (size, kept) in enumerate([(5, 2), (7, 0), (2, 2), (3, 1)]):
        ids = tokens(1, size, seed=number)
        equal(quick.say(ids), plain.say(ids))
        for one in (plain, quick):
            one.cache.advance(kept)
    alike(quick.cache, plain.cache, equal)
    assert served == ([] if has_experts(model) else [True] * 4)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("bits", [None, 8, 4])
@torch.no_grad()
def test_several_tokens_are_what_they_are_one_by_one_bit_for_bit(bits, window, served):
    config = mb.llama(vocab=61, width=64, depth=2, heads=4, kv_heads=2, hidden=160, context=LONGEST, window=window)
    model = build(config) if bits is None else mb.quantized(build(config), bits=bits)
    several, single = (Reading(twin_of(model), 2, LENGTHS[:2]) for _ in range(2))
    for number, (size, going) in enumerate([(3, [True, True]), (4, [True, False]), (2, [True, True])]):
        ids, live = tokens(2, size, seed=number), torch.tensor(going)
        found = several.say(ids, live[:, None].expand(ids.shape))
        several.cache.advance(size * live.long())
        for place in range(size):
            one = single.say(ids[:, place : place + 1], live[:, None])
            single.cache.advance(live.long())
            assert torch.equal(one[live, 0], found[live, place])
    assert served == [True] * 12


@pytest.mark.parametrize("name", ["gpt2", "mistral-7b", "t5-small"])
@torch.no_grad()
def test_steps_taken_back_rows_moved_and_plain_passes_between(name, served):
    model = toy(name)
    plain, quick = Reading(model), Reading(twin_of(model))
    for one in (plain, quick):
        one.step(0)
        one.cache.truncate(LENGTHS)
        one.step(1)
        if not one.both:
            one.cache.select(torch.tensor([2, 0, 0, 1]))
        one.say(tokens(one.cache.batch, 3, seed=5))  # several tokens at once
        one.cache.advance(3)
    for number in range(2, 5):
        close(quick.step(number), plain.step(number))
    alike(quick.cache, plain.cache)
    assert served == [True] * 5


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 11])
@torch.no_grad()
def test_any_number_of_rows(rows, served):
    model = toy("qwen2-0.5b")
    lengths = torch.arange(rows) % 4 + 2
    plain, quick = Reading(model, rows, lengths), Reading(twin_of(model), rows, lengths)
    for number in range(2):
        close(quick.step(number), plain.step(number))
    assert served == ([True, True] if rows <= step_cpu.MOST else [])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_every_activation_and_odd_sizes(activation, gated, served):
    config = mb.gpt(
        vocab=61, width=35, depth=2, heads=5, hidden=83, context=LONGEST, activation=activation, gated=gated
    )
    model = build(config)
    plain, quick = Reading(model), Reading(twin_of(model))
    close(quick.step(0), plain.step(0))
    assert served == [True]


@pytest.fixture
def threads():
    """How many threads there are may be changed."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
@torch.no_grad()
def test_the_number_of_threads_does_not_matter(count, served, threads):
    model = build(mb.llama(vocab=61, width=128, depth=3, heads=8, kv_heads=2, hidden=352, context=LONGEST))
    threads(count)
    plain, quick = Reading(model), Reading(twin_of(model))
    for number in range(3):
        close(quick.step(number), plain.step(number))
    assert served == [True] * 3


@torch.no_grad()
def test_places_out_of_order_are_left_to_the_plain_path(served):
    model = toy("llama-7b")
    plain, quick = Reading(model), Reading(twin_of(model))
    for one in (plain, quick):
        found = [one.say(tokens(ROWS, 1), positions=LENGTHS[:, None] + 2)]
        one.cache.advance(1)
        one.found = [*found, one.step(0)]
    for mine, theirs in zip(quick.found, plain.found, strict=True):
        close(mine, theirs)
    assert served == [False, False]


@torch.no_grad()
def test_what_training_changes_is_changed_in_the_step(served):
    model = build(mb.gpt(vocab=61, width=36, depth=2, heads=3, context=LONGEST))
    twin = twin_of(model)
    before = Reading(twin).step(0)
    for weight in model.parameters():
        weight.mul_(1.25)
    after = Reading(twin).step(0)
    assert (after - before).abs().max() > 1e-2
    close(after, Reading(model).step(0))
    assert served == [True, True]


def said(model, fast, **settings):
    engine = Engine(model, capacity=LONGEST, fast=fast)
    both = has_both(model.config)
    prompts = [tuple(row[: 3 + number].tolist()) for number, row in enumerate(tokens(4, 7))]
    for number, prompt in enumerate(prompts):
        engine.add(
            prompt,
            Settings(max_new_tokens=11 + number, **settings),
            tuple(source(4)[number].tolist()) if both else None,
        )
    events = []
    while engine.busy:
        events += engine.step()
    texts = {}
    for event in events:
        texts.setdefault((event.id, event.number), []).extend(event.tokens)
    return texts


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m", "gemma3-1b", "bart-base", "t5-small"])
def test_the_engine_says_the_same_tokens(name, bits, served):
    model = quantised(name, bits)
    for settings in ({}, {"num_beams": 2}):
        assert said(model, True, **settings) == said(model, False, **settings)
    assert sum(served) > 20


def test_gradients_and_taps_are_left_to_the_plain_path(served):
    quick = Reading(twin_of(toy("gpt2")))
    assert quick.step(0).requires_grad
    assert served == []
