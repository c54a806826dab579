"""A step that is interrupted, as by Ctrl-C, is void: whoever goes on gets the texts that each request has alone."""

from contextlib import suppress

import pytest
import torch
from generate_support import gpt, translator
from interrupt_support import interrupted_step

import monoblock as mb
from monoblock.inference.speculative import DraftModel, PromptLookup
from monoblock.nn.paged_cache import PagePool

PROMPTS = ([5, 7, 11], [2], [1, 2, 3, 4, 1, 2], [9, 8, 9])
NEW = 7


CASES = {
    "greedy": (gpt, {}, {}),
    "prompt in chunks": (gpt, {}, {"prefill_chunk": 2}),
    "no cache": (gpt, {}, {"use_cache": False}),
    "samples": (gpt, {"temperature": 1.0, "num_return_sequences": 3, "seed": 5}, {}),
    "beams": (gpt, {"num_beams": 3}, {}),
    "penalties": (gpt, {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}, {}),
    "prompt lookup": (gpt, {}, {"proposer": lambda: PromptLookup(3)}),
    "draft model": (gpt, {}, {"proposer": lambda: DraftModel(gpt(1), 3)}),
    "sampled with a draft": (gpt, {"temperature": 0.9, "num_return_sequences": 2, "seed": 1}, {"proposer": "draft"}),
    "sources": (translator, {}, {}),
    "beams of sources": (translator, {"num_beams": 3}, {}),
}


def make_engine(case):
    make, _, options = CASES[case]
    proposers = {"draft": lambda: DraftModel(gpt(1), 3)}
    made = {name: proposers.get(value, value)() if name == "proposer" else value for name, value in options.items()}
    return mb.Engine(make().double(), max_rows=9, **made)


def add_all(engine, case):
    """Four requests, of which some wait if a request has several rows; they end after different numbers of tokens."""
    make, options, _ = CASES[case]
    return [
        engine.add(
            [0] if make is translator else prompt,
            mb.Settings(max_new_tokens=NEW - number, **options),
            prompt if make is translator else None,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def collect(outputs, texts, ends):
    for output in outputs:
        key = (output.request_id, output.sequence_index)
        assert output.error is None, output.error
        assert key not in ends
        texts.setdefault(key, []).extend(output.tokens)
        if output.finish_reason:
            ends[key] = output.finish_reason


def decode_with_interrupts(case, interrupts):
    """Decode all requests; `interrupts` gives the call at which to interrupt a step, for each step that has one.

    Without any, the calls of every step are counted.
    """
    engine, texts, ends, steps, calls = make_engine(case), {}, {}, 0, []
    add_all(engine, case)
    while engine.busy:
        outputs, count = interrupted_step(engine, interrupts.get(steps, None if interrupts else 0))
        calls.append(count)
        collect(outputs, texts, ends)
        steps += 1
    return (texts, ends), calls


@pytest.mark.parametrize("case", CASES)
def test_requests_go_on_after_an_interrupt_as_if_there_had_been_none(case):
    wanted, calls = decode_with_interrupts(case, {})
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        chosen = {step: int(torch.randint(1, count + 1, (), generator=generator)) for step, count in enumerate(calls)}
        kept = {step: call for step, call in chosen.items() if torch.rand((), generator=generator) < 0.6}
        assert decode_with_interrupts(case, kept)[0] == wanted, kept


def test_a_request_can_be_cancelled_after_its_admission_was_interrupted():
    for call in range(1, 60):
        engine = make_engine("sources")
        first, *_ = add_all(engine, "sources")
        interrupted_step(engine, call)
        engine.cancel(first)
        for pages in (engine.pages, engine.sources):
            assert len(set(pages.free_rows)) == len(pages.free_rows)
        while engine.busy:
            assert all(output.request_id != first for output in engine.step())
        assert engine.pages.num_in_use == engine.sources.num_in_use == 0


def test_an_interrupt_in_a_logits_processor_changes_no_other_request():
    """The interrupt comes when the cache has the new tokens already, and the requests have not."""
    model, calls = gpt().double(), []

    def interrupt_once(ids, logits):
        calls.append(ids.shape[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return logits

    engine, tokens = mb.Engine(model), {}
    ids = [engine.add(PROMPTS[0], mb.Settings(max_new_tokens=NEW, logits_processor=interrupt_once))]
    ids += [engine.add(prompt, mb.Settings(max_new_tokens=NEW)) for prompt in PROMPTS[1:]]
    interrupts = 0
    while engine.busy:
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    assert interrupts == 1
    for number, prompt in zip(ids, PROMPTS, strict=True):
        assert tokens[number] == model.generate(torch.tensor([prompt]), max_new_tokens=NEW)[0, len(prompt) :].tolist()


def test_a_sample_that_has_filled_the_context_stays_finished_after_an_interrupt():
    model = gpt().double()
    options = {"max_new_tokens": 90, "temperature": 0.6, "num_return_sequences": 3, "seed": 5}
    engine, texts, ends = mb.Engine(model, proposer=PromptLookup(3)), {}, {}
    engine.add(PROMPTS[0], mb.Settings(**options))
    while engine.busy:
        if 0 < len(ends) < 3:
            assert interrupted_step(engine, 9)[0] == []
        collect(engine.step(), texts, ends)
    assert set(ends.values()) == {"context"}
    wanted = model.generate(torch.tensor([PROMPTS[0]]), **options)[:, len(PROMPTS[0]) :].tolist()
    assert [texts[1, row] for row in range(3)] == wanted


def test_a_request_can_be_cancelled_and_another_added_after_an_interrupt():
    wanted, _ = decode_with_interrupts("greedy", {})
    engine, texts, ends = make_engine("greedy"), {}, {}
    first, second, *_ = add_all(engine, "greedy")
    for interrupt in (0, 0, 20):
        collect(interrupted_step(engine, interrupt)[0], texts, ends)
    engine.cancel(second)
    again = engine.add(PROMPTS[0], mb.Settings(max_new_tokens=NEW))
    while engine.busy:
        collect(engine.step(), texts, ends)
    assert len(texts.pop((second, 0))) == 2
    assert texts.pop((again, 0)) == texts[first, 0]
    assert texts == {key: tokens for key, tokens in wanted[0].items() if key[0] != second}


@pytest.mark.parametrize("make", [gpt, translator])
def test_a_step_in_which_the_pools_of_pages_grow_can_be_interrupted(make, monkeypatch):
    """A short request runs when a long one comes, for which the pools of the blocks have no room."""
    model, prompts, grow = make().double(), ([7], list(range(30))), PagePool.grow

    def decode(interrupts):
        engine, texts, calls = mb.Engine(model), {}, iter(range(100))

        def interrupted_grow(*arguments):
            if number and next(calls) in interrupts:
                raise KeyboardInterrupt
            grow(*arguments)

        monkeypatch.setattr(PagePool, "grow", interrupted_grow)
        for number, prompt in enumerate(prompts):
            source = prompt if make is translator else None
            engine.add([0] if make is translator else prompt, mb.Settings(max_new_tokens=3), source)
            collect(engine.step() if not number else (), texts, {})
        while engine.busy:
            with suppress(KeyboardInterrupt):
                collect(engine.step(), texts, {})
        return texts, next(calls)

    texts, count = decode(())
    assert count >= 2
    assert all(decode((call,))[0] == texts for call in range(count))
