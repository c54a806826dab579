"""Recorded beam search without a GPU: replaying runs the step again, in the same buffers."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from graph_support import FIRST_BYTES
from interrupt_support import interrupted_step
from support import block_configs, tiny_model, tiny_names

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference import beam, fast_modules, prepared_model
from monoblock.inference.engine import Engine
from monoblock.inference.runners import cuda, cuda_search
from monoblock.inference.runners.cuda_search import MAX_IDLE_BUFFERS, RecordedSearch, round_up_searches, search_shape
from monoblock.inference.scheduler import Prompt, Request, Variant
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import PromptLookup
from monoblock.inference.supported_models import SUPPORTED, unsupported_field
from monoblock.nn.attention import attend

SOURCES = ((5, 7, 11, 2, 3), (1, 2, 3), (9, 8, 7, 6, 5, 4, 3), (12, 13), (40, 8, 1, 30))
SETTINGS = Settings(max_new_tokens=13, num_beams=3, num_return_sequences=2, eos_token_id=(2, 7, 19))


@pytest.fixture(autouse=True)
def searches_begun(monkeypatch):
    """Search as on a GPU; the list has the sizes of the buffers of each batch."""
    begun, begin = [], RecordedSearch.__init__

    def count(self, buffers, requests, searches):
        begun.append(buffers.key)
        begin(self, buffers, requests, searches)

    monkeypatch.setattr(RecordedSearch, "__init__", count)
    monkeypatch.setattr(prepared_model, "supports_cuda_graph", lambda model: True)
    monkeypatch.setattr(cuda, "FIRST_BYTES", FIRST_BYTES)
    monkeypatch.setattr(beam, "_has_kernel", lambda logits: False)
    return begun


def make_engine(model, **options):
    return Engine(mb.optimize(model), **{"capacity": 26, "max_rows": 64, **options})


def plain_engine(model, **options):
    return Engine(model, **{"capacity": 26, "max_rows": 64, **options})


def add(engine, prompts, settings):
    has_encoder = engine.model.config.encoder is not None
    own = settings if isinstance(settings, list) else [settings] * len(prompts)
    pairs = zip(prompts, own, strict=True)
    return [engine.add([0], s, source=p) if has_encoder else engine.add(p, s) for p, s in pairs]


def collect(engine, found):
    for output in engine.step():
        assert output.error is None
        found[output.request_id, output.sequence_index] = output.tokens, output.score, output.finish_reason


def search(engine, prompts=SOURCES, settings=SETTINGS):
    """The (tokens, score, finish reason) of each returned sequence, in the order of the prompts."""
    requests, found = add(engine, prompts, settings), {}
    while engine.busy:
        collect(engine, found)
    return [found[key] for key in sorted(found) if key[0] in requests]


def assert_same(actual, expected):
    assert [row[0] for row in actual] == [row[0] for row in expected]
    assert [row[2] for row in actual] == [row[2] for row in expected]
    assert [row[1] for row in actual] == pytest.approx([row[1] for row in expected], abs=2e-5, rel=2e-5)


def is_supported(config):
    blocks = block_configs(config)
    return config.decoder is not None and all(unsupported_field(block, SUPPORTED) is None for block in blocks)


SUPPORTED_PRESETS = tiny_names(is_supported)
ENCODER_DECODERS = tiny_names(lambda config: is_supported(config) and config.family == "encoder-decoder")
DECODERS = ["gpt2", "llama-7b", "mistral-7b", "bloom-560m", "gemma2-2b"]


@pytest.mark.parametrize("name", [*ENCODER_DECODERS, *(name for name in DECODERS if name in SUPPORTED_PRESETS)])
def test_texts_and_scores_are_those_of_the_plain_model(name, searches_begun):
    model = tiny_model(name)
    expected = search(plain_engine(model))
    assert not searches_begun
    assert_same(search(make_engine(model)), expected)
    assert len(searches_begun) == 1


# -- the kernels of a GPU -----------------------------------------------------------------------------------------


def reference_beams(q, k, v, keys, values, writers, lengths, *, scale):
    """What `attend_beams` computes, with a mask and the plain formula."""
    beams, size = q.shape[2:]
    slots = (lengths[:, None] * beams + torch.arange(beams))[:, None, :, None].expand(-1, k.shape[1], -1, size)
    keys.scatter_(2, slots, k)
    values.scatter_(2, slots, v)
    known = writers.masked_fill(torch.arange(writers.shape[2]) > lengths[:, None, None], beams)
    visible = (known[..., None] == torch.arange(beams)).flatten(2)[:, None]
    columns = slice(visible.shape[-1])
    out = attend(q, keys[:, :, columns], values[:, :, columns], visible, scale=scale)
    return out.transpose(1, 2).flatten(2)


def reference_source(q, keys, values, valid, *, scale):
    mask = None if valid is None else valid[:, None, None]
    return attend(q, keys, values, mask, scale=scale).transpose(1, 2).flatten(2)


def reference_tokens(logits, scores, count):
    """What `best_tokens` computes, by sorting all continuations."""
    totals = (logits.log_softmax(-1) + scores.float()[..., None]).flatten(1)
    values, indices = (found[:, :count] for found in totals.sort(dim=-1, descending=True, stable=True))
    return values.double(), indices // logits.shape[-1], indices % logits.shape[-1]


@pytest.fixture
def kernel_calls(monkeypatch):
    """Use the formulas above as if they were the kernels of a GPU; return the list of the calls."""
    calls = []

    def counted(function):
        return lambda *args, **options: calls.append(function.__name__) or function(*args, **options)

    monkeypatch.setattr(fast_modules, "supports_beams", lambda x, size, queries: True)
    monkeypatch.setattr(fast_modules, "attend_beams", counted(reference_beams))
    monkeypatch.setattr(fast_modules, "attend_source", counted(reference_source))
    monkeypatch.setattr(beam, "supports_best_tokens", lambda logits, count: True)
    monkeypatch.setattr(beam, "best_tokens", counted(reference_tokens))
    return calls


# Windows, biases and caps of the scores have no kernel.
WITH_BEAM_KERNEL = ("vaswani-base", "bart-base", "gpt2", "llama-7b", "llama3-8b", "qwen3-0.6b")
WITH_SOURCE_KERNEL = ("vaswani-base", "bart-base", "t5-small", "mt5-small")


@pytest.mark.parametrize(
    "name", dict.fromkeys((*WITH_BEAM_KERNEL, *WITH_SOURCE_KERNEL, "mistral-7b", "bloom-560m", "gemma2-2b"))
)
def test_with_the_kernels_texts_and_scores_are_the_same(name, kernel_calls):
    model = tiny_model(name)
    expected = search(plain_engine(model))
    assert_same(search(make_engine(model)), expected)
    assert "reference_tokens" in kernel_calls
    assert ("reference_beams" in kernel_calls) == (name in WITH_BEAM_KERNEL)
    assert ("reference_source" in kernel_calls) == (name in WITH_SOURCE_KERNEL)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-0.7, 1.3])
def test_searches_end_as_those_of_the_plain_model(early_stopping, penalty):
    model = tiny_model("vaswani-base")
    settings = replace(SETTINGS, early_stopping=early_stopping, length_penalty=penalty, max_new_tokens=17)
    assert_same(search(make_engine(model), settings=settings), search(plain_engine(model), settings=settings))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_beams": 8, "num_return_sequences": 8},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2, "eos_token_id": ()},
        {"min_new_tokens": 5, "suppress_tokens": (3, 4), "begin_suppress_tokens": (9, 11)},
    ],
)
def test_settings(changes, searches_begun):
    model, settings = tiny_model("gpt2"), replace(SETTINGS, **changes)
    results = search(make_engine(model), settings=settings)
    assert_same(results, search(plain_engine(model), settings=settings))
    assert searches_begun[0].is_constrained == ("min_new_tokens" in changes)


@pytest.mark.parametrize(
    "changes", [{"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"repetition_penalty": 1.3}]
)
def test_other_settings_take_plain_steps(changes, searches_begun):
    model, settings = tiny_model("gpt2"), replace(SETTINGS, **changes)
    assert_same(search(make_engine(model), settings=settings), search(plain_engine(model), settings=settings))
    assert not searches_begun


@pytest.mark.parametrize(
    "changes",
    [{"logprobs": 2}, {"score_prompt": True, "logprobs": 0}, {"logit_bias": {5: 1.0}}, {"bad_words_ids": [[3]]}]
    + [{"logits_processor": lambda ids, logits: logits}, {"forced_bos_token_id": 4}, {"num_beams": 65}],
)
def test_settings_that_recorded_steps_do_not_follow(changes):
    request = Request(1, Prompt((1, 2)), replace(SETTINGS, **changes), 9)
    assert search_shape(request) is None
    assert search_shape(Request(1, Prompt((1, 2)), SETTINGS, 9)) is not None
    assert search_shape(Request(1, Prompt((1, 2)), SETTINGS, 9, variant=Variant(capture=("*",)))) is None


def test_prompts_longer_than_a_chunk_take_plain_steps(searches_begun):
    model = tiny_model("gpt2")
    assert_same(search(make_engine(model, prefill_chunk=4)), search(plain_engine(model)))
    assert [key.searches for key in searches_begun] == [3]


def test_rows_that_reach_the_context_take_plain_steps():
    model, long = tiny_model("gpt2"), [[1 + n % 50 for n in range(20)], *SOURCES]
    assert_same(search(make_engine(model), long), search(plain_engine(model), long))


def test_buffers_and_recordings_are_reused_by_batches_of_other_sizes(searches_begun, monkeypatch):
    recorded, record = [], cuda_search.record
    monkeypatch.setattr(cuda_search, "record", lambda *args: recorded.append(args) or record(*args))
    model = tiny_model("vaswani-base")
    engine, plain = make_engine(model), plain_engine(model)
    batches = [SOURCES + SOURCES[:1], SOURCES, [[7] * 12] * 6, SOURCES[1:] + SOURCES[2:3]]
    for prompts in batches:
        assert_same(search(engine, prompts), search(plain, prompts))
    assert len(searches_begun) == 4
    assert len(set(searches_begun)) == 1
    assert len(recorded) == 1


def test_a_bounded_number_of_buffers_waits_for_the_next_batch():
    fast = mb.optimize(tiny_model("vaswani-base"))
    for _ in range(2):
        engine = Engine(fast, capacity=26)
        searches = engine.runner.memory.searches
        for count in (1, 2, 3, 4, 6, 2):
            search(engine, [*SOURCES, *SOURCES][:count])
        assert [buffers.key.searches for buffers in searches.idle] == [3, 4, 6, 2]
        assert len(searches.idle) == MAX_IDLE_BUFFERS
        del engine  # the next engine uses the same buffers
        assert fast._idle_pages[0].searches is searches


def test_numbers_of_searches_are_rounded_up():
    assert [round_up_searches(count) for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 1000)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 1024)
    ]  # fmt: skip


def test_requests_wait_for_the_end_of_a_search(searches_begun):
    model, prompts = tiny_model("vaswani-base"), [*SOURCES, *SOURCES[::-1], *SOURCES]
    engine, plain = make_engine(model, max_rows=12), plain_engine(model, max_rows=12)
    assert_same(search(engine, prompts), search(plain, prompts))
    assert len(searches_begun) == 4  # batches of 4, 4, 4 and 3


def test_a_cancelled_request_does_not_change_the_others():
    model, settings = tiny_model("vaswani-base"), replace(SETTINGS, eos_token_id=())
    expected = search(plain_engine(model), settings=settings)
    engine, found = make_engine(model), {}
    requests = add(engine, SOURCES, settings)
    collect(engine, found)
    assert not found
    engine.cancel(requests[1])
    while engine.busy:
        collect(engine, found)
    assert_same([found[key] for key in sorted(found)], expected[:2] + expected[4:])


@pytest.mark.parametrize("name", ["vaswani-base", "mistral-7b", "bloom-560m"])
def test_searches_that_fail_run_in_pages(name, monkeypatch):
    model = tiny_model(name)
    expected = search(plain_engine(model))
    engine, found = make_engine(model), {}
    add(engine, SOURCES, SETTINGS)
    collect(engine, found)
    monkeypatch.setattr(RecordedSearch, "step", lambda self: 1 / 0)
    collect(engine, found)
    assert not engine.scheduler.searching
    while engine.busy:
        collect(engine, found)
    assert_same([found[key] for key in sorted(found)], expected)


def test_nan_logits_end_the_request_with_an_error():
    model = tiny_model("vaswani-base")
    engine = make_engine(model)
    add(engine, SOURCES[:1], SETTINGS)
    weight = model.decoder.blocks[0].feedforward.down.weight
    kept = weight[0, 0].item()
    try:
        weight.data[0, 0] = torch.nan
        (*_, output) = [output for _ in range(9) if engine.busy for output in engine.step()]
        assert isinstance(output.error, InputError)
        assert "NaN" in str(output.error)
    finally:
        weight.data[0, 0] = kept


# -- beside other requests ----------------------------------------------------------------------------------------

KINDS = {
    "beams": SETTINGS,
    "more beams": replace(SETTINGS, num_beams=4, max_new_tokens=9),
    "diverse beams": replace(SETTINGS, num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "greedy": Settings(max_new_tokens=11, eos_token_id=(2, 7)),
    "samples": Settings(max_new_tokens=8, temperature=1.0, num_return_sequences=3, seed=4),
    "urgent beams": replace(SETTINGS, priority=1),
    "urgent": Settings(max_new_tokens=6, priority=1),
}


@functools.cache
def alone(model, source, settings):
    """The tokens that one request gets in pages, by sequence."""
    return run(plain_engine(model), {0: [(source, settings)]})[0][0]


def run(engine, arrivals, cancelled=(), interrupts=None):
    """Decode requests (source, settings) that arrive before steps; return what each one gets, and the step of its end.

    cancelled: (step, number of the request) pairs.
    interrupts: for some steps, the call of a function at which the step is interrupted.
    """
    numbers, texts, ends, step = {}, {}, {}, 0
    while engine.busy or step <= max(arrivals):
        for source, settings in arrivals.get(step, ()):
            (request,) = add(engine, [source], [settings])
            numbers[request] = len(numbers)
        for request in [own for own, number in numbers.items() if (step, number) in cancelled]:
            engine.cancel(request)
        for output in interrupted_step(engine, (interrupts or {}).get(step))[0]:
            assert output.error is None
            number = numbers[output.request_id]
            assert (step, number) not in cancelled
            text = texts.setdefault(number, {}).setdefault(output.sequence_index, [])
            text.extend(output.tokens)
            if output.finish_reason:
                ends[number] = step
        step += 1
    return texts, ends


@pytest.mark.parametrize("name", ["vaswani-base", "gpt2"])
@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_gives_each_request_what_it_gets_alone(name, seed, searches_begun):
    """Requests of all shapes arrive, are cancelled, and are interrupted at random moments."""
    generator, model = random.Random(seed), tiny_model(name)
    requests = [(generator.choice(SOURCES), KINDS[generator.choice(list(KINDS))]) for _ in range(24)]
    arrivals = {step: requests[4 * step : 4 * step + 4] for step in range(6)}
    cancelled = {(generator.randrange(3, 12), generator.randrange(24)) for _ in range(4)}
    interrupts = {step: generator.randrange(1, 400) for step in range(1, 40) if generator.random() < 0.4}
    proposer = PromptLookup(3) if seed % 2 else None
    engine = make_engine(model, max_rows=generator.choice([12, 24, 64]), proposer=proposer)
    texts, _ = run(engine, arrivals, cancelled, interrupts)
    for number in set(range(24)) - {number for _, number in cancelled}:
        assert texts[number] == alone(model, *requests[number]), (number, requests[number])
    assert searches_begun
    assert engine.pages.num_in_use == engine.sources.num_in_use == 0


def test_an_interrupted_step_of_a_search_changes_nothing(searches_begun):
    model = tiny_model("vaswani-base")
    wanted, _ = run(make_engine(model), {0: [(source, SETTINGS) for source in SOURCES]})
    generator = random.Random(5)
    for _ in range(12):
        engine, interrupts = make_engine(model), {step: generator.randrange(1, 500) for step in range(3)}
        assert run(engine, {0: [(source, SETTINGS) for source in SOURCES]}, (), interrupts)[0] == wanted
    assert len(searches_begun) > 13  # an interrupted search begins again


def test_only_searches_of_the_same_shape_wait_for_the_end_of_a_search(searches_begun):
    model, long = tiny_model("gpt2"), replace(SETTINGS, max_new_tokens=20, eos_token_id=())
    late = [(SOURCES[1], one) for one in (long, KINDS["more beams"], KINDS["greedy"], KINDS["urgent beams"])]
    _, ends = run(make_engine(model), {0: [(SOURCES[0], long)] * 2, 1: late, 2: [(SOURCES[2], KINDS["samples"])]})
    assert ends[2] > ends[0] == ends[1]
    assert len(searches_begun) == 2


def test_a_request_of_higher_priority_takes_the_rows_of_a_search():
    model = tiny_model("vaswani-base")
    engine, urgent = make_engine(model, max_rows=6), KINDS["urgent"]
    texts, ends = run(engine, {0: [(SOURCES[0], SETTINGS)] * 2, 1: [(SOURCES[0], urgent)]})
    assert ends[0] < ends[1]
    assert ends[2] < ends[1]
    wanted = alone(model, SOURCES[0], SETTINGS)
    assert texts == {0: wanted, 1: wanted, 2: alone(model, SOURCES[0], urgent)}


@pytest.mark.parametrize("exact", [False, True])
def test_an_exact_engine_records_no_search(exact):
    """What a recorded search computes depends on the sizes of its batch."""
    engine = Engine(mb.optimize(tiny_model("gpt2"), exact=exact), capacity=26)
    add(engine, SOURCES, SETTINGS)
    assert all((request.search_shape is None) == exact for request in engine.scheduler.waiting)
