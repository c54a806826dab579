"""Recorded passes without a GPU: a replay runs the recorded operations again, in the memory that they had."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from graph_support import record_passes
from support import tiny_model, tiny_names

import monoblock as mb
from monoblock.config.knobs import vary
from monoblock.inference import fast_modules
from monoblock.inference.engine import Engine
from monoblock.inference.fast_modules import FastExperts
from monoblock.inference.runners.cuda import round_up_rows, supports_cuda_graph
from monoblock.inference.runners.record import _without_collections
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import DraftModel, PromptLookup
from monoblock.model import Transformer

PROMPTS = ([5, 7, 11, 2, 3], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3])


@pytest.fixture
def recordings(monkeypatch):
    return record_passes(monkeypatch)


def graph_engine(model, **options):
    return Engine(mb.optimize(model), capacity=26, **options)


def plain_engine(model):
    return Engine(model, capacity=26)


def decode(engine, settings, prompts=PROMPTS):
    for prompt in prompts:
        if engine.model.config.encoder is not None:
            engine.add([0], settings, source=prompt)
        else:
            engine.add(prompt, settings)
    tokens = {}
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault((output.request_id, output.sequence_index), []).extend(output.tokens)
    return [tokens[key] for key in sorted(tokens)]


SETTINGS = {
    "greedy": Settings(max_new_tokens=11),
    "sampled": Settings(max_new_tokens=11, temperature=0.9, top_k=20, seed=3),
    "ends early": Settings(max_new_tokens=11, temperature=1.3, seed=5, eos_token_id=tuple(range(0, 61, 7))),
    "repetition penalty": Settings(max_new_tokens=11, repetition_penalty=1.4),
    "several samples": Settings(max_new_tokens=9, temperature=1.0, seed=2, num_return_sequences=2),
    "beams": Settings(max_new_tokens=9, num_beams=4, num_beam_groups=2, diversity_penalty=0.5),  # these are in pages
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "gemma2-2b", "t5-small"])
def test_recorded_steps_give_the_tokens_of_plain_ones(name, settings, recordings):
    model, settings = tiny_model(name), SETTINGS[settings]
    expected = decode(plain_engine(model), settings)
    assert decode(graph_engine(model), settings) == expected
    assert recordings


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "gemma2-2b", "t5-small"])
def test_recorded_searches_give_the_tokens_of_plain_ones(name, recordings):
    model, settings = tiny_model(name), Settings(max_new_tokens=17, num_beams=3, eos_token_id=(2, 7, 19))
    assert decode(graph_engine(model), settings) == decode(plain_engine(model), settings)
    assert not recordings


@pytest.mark.parametrize("burst", [1, 2, 16])
def test_the_length_of_a_burst_changes_nothing(burst, recordings):
    model = tiny_model("gpt2")
    expected = decode(plain_engine(model), SETTINGS["ends early"])
    assert decode(graph_engine(model, max_burst=burst), SETTINGS["ends early"]) == expected


def test_a_long_text_is_run_in_few_steps(recordings):
    engine = graph_engine(tiny_model("gpt2"), max_burst=8)
    engine.add(PROMPTS[0], Settings(max_new_tokens=18))
    steps = [len(engine.step()[0].tokens) for _ in range(4)]
    assert steps == [1, 8, 8, 1]


def test_a_short_text_beside_a_long_one_does_not_shorten_its_bursts(recordings):
    model = tiny_model("gpt2")
    requests = [(prompt, Settings(max_new_tokens=new)) for prompt, new in zip(PROMPTS, (3, 18, 6), strict=True)]
    engine, tokens, steps = graph_engine(model, max_burst=8), {}, 0
    ids = [engine.add(*request) for request in requests]
    while engine.busy:
        steps += 1
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    assert steps == 4  # the prompts, 8 tokens, 8 and 1
    plain = [decode(plain_engine(model), settings, [prompt])[0] for prompt, settings in requests]
    assert [tokens[one] for one in ids] == plain


def test_a_recording_serves_other_prompts_and_the_engine_after(recordings):
    model = tiny_model("gpt2")
    fast, plain = mb.optimize(model), plain_engine(model)
    others = [[token + 1 for token in prompt] for prompt in (*PROMPTS, PROMPTS[0])]
    for prompts in (PROMPTS, others):
        engine = Engine(fast, capacity=26)
        assert decode(engine, SETTINGS["greedy"], prompts) == decode(plain, SETTINGS["greedy"], prompts)
        del engine
    assert decode(Engine(fast, capacity=26), SETTINGS["greedy"], PROMPTS[:2]) == decode(
        plain, SETTINGS["greedy"], PROMPTS[:2]
    )
    assert [shape.rows for shape in recordings] == [4, 2]


def test_a_request_that_joins_a_running_batch_changes_nothing(recordings):
    model = tiny_model("gpt2")
    engine = graph_engine(model, max_burst=2)
    first = engine.add(PROMPTS[0], SETTINGS["greedy"])
    outputs = [output for _ in range(3) for output in engine.step()]
    second = engine.add(PROMPTS[1], SETTINGS["greedy"])
    while engine.busy:
        outputs += engine.step()
    tokens = {first: [], second: []}
    for output in outputs:
        tokens[output.request_id] += output.tokens
    assert [tokens[first], tokens[second]] == decode(plain_engine(model), SETTINGS["greedy"], PROMPTS[:2])


def test_a_burst_ends_where_pages_end(recordings):
    """Requests that wait for pages are decoded as if there were enough."""
    model, settings = tiny_model("gpt2"), Settings(max_new_tokens=21)
    prompts = [[n, n + 1, n + 2] for n in range(5)]
    engine = Engine(mb.optimize(model), capacity=26, num_pages=5)
    assert decode(engine, settings, prompts) == decode(plain_engine(model), settings, prompts)
    assert engine.pages.num_in_use == 0


def test_rows_may_differ_in_everything(recordings):
    model = tiny_model("gpt2")
    results = []
    for engine in (plain_engine(model), graph_engine(model)):
        ids = [engine.add(PROMPTS[n % 3], settings) for n, settings in enumerate(SETTINGS.values())]
        tokens = {}
        while engine.busy:
            for output in engine.step():
                tokens.setdefault((ids.index(output.request_id), output.sequence_index), []).extend(output.tokens)
        results.append(tokens)
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["draft", "lookup"])
def test_proposals_are_checked_in_recorded_passes(kind, recordings):
    model = tiny_model("llama-7b")
    draft = tiny_model("llama-7b")
    proposer = DraftModel(mb.optimize(draft)) if kind == "draft" else PromptLookup(3)
    expected = decode(plain_engine(model), SETTINGS["greedy"], [[1, 2, 3, 1, 2, 3, 1, 2]])
    assert decode(graph_engine(model, proposer=proposer), SETTINGS["greedy"], [[1, 2, 3, 1, 2, 3, 1, 2]]) == expected
    assert any(shape.tokens > 1 and not shape.is_prompt for shape in recordings)


def test_every_decoder_with_softmax_attention_is_recorded():
    names = tiny_names(lambda config: config.decoder is not None)
    for name in names:
        on_gpu = SimpleNamespace(decoder=tiny_model(name).decoder, device=torch.device("cuda"))
        assert supports_cuda_graph(on_gpu), name
    assert not supports_cuda_graph(tiny_model("gpt2"))


@pytest.mark.parametrize("settings", ["greedy", "sampled", "ends early"])
@pytest.mark.parametrize("count", [5, 24], ids=["all experts run", "weights are gathered"])
def test_experts_of_recorded_steps_have_fixed_shapes(count, settings, recordings, monkeypatch):
    """Neither way reads on the host which expert a token goes to."""
    config = tiny_model("mixtral-8x7b").config
    torch.manual_seed(0)
    model, settings = Transformer(vary(config, experts=count)).eval(), SETTINGS[settings]
    expected = decode(plain_engine(model), settings)
    monkeypatch.setattr(fast_modules, "needs_fixed_shapes", lambda x: x.shape[0] <= 4)
    gathered = []
    run_gathered = FastExperts._run_gathered
    monkeypatch.setattr(
        FastExperts, "_run_gathered", lambda self, *args: gathered.append(1) or run_gathered(self, *args)
    )
    assert decode(graph_engine(model), settings) == expected
    assert bool(gathered) == (count == 24)
    assert recordings


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "gemma2-2b"])
def test_recorded_prompts_give_the_tokens_of_plain_ones(name, recordings):
    """Prompts of a shape that is repeated are recorded; other tokens, other shapes and padding change nothing."""
    model = tiny_model(name)
    engine, plain = graph_engine(model), plain_engine(model)
    batches = [[[(start + row + 3 * i) % 61 for i in range(6)] for row in range(3)] for start in range(4)]
    longer = [row + [1, 2] for row in batches[0]]
    for prompts in (*batches, PROMPTS, batches[1], batches[2], longer, longer, batches[3][:2], batches[0]):
        assert decode(engine, SETTINGS["greedy"], prompts) == decode(plain, SETTINGS["greedy"], prompts)
    assert {shape[:2] for shape in recordings if shape.is_prompt} == {(3, 6), (3, 8)}


def test_rows_are_rounded_up_to_few_sizes():
    assert [round_up_rows(count) for count in (1, 3, 5, 9, 17, 33, 64, 65, 200)] == [1, 4, 8, 16, 24, 48, 64, 128, 256]


def test_no_garbage_is_collected_while_a_step_is_recorded():
    """A graph that was freed during a recording broke it."""
    with _without_collections():
        assert not gc.isenabled()
        with _without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_kept_pages_do_not_keep_their_optimized_model(recordings):
    fast = mb.optimize(tiny_model("gpt2"))
    engine = Engine(fast, capacity=26)
    decode(engine, SETTINGS["greedy"])
    gc.disable()
    try:
        del engine
        assert len(fast._idle_pages) == 1
        gone = weakref.ref(fast)
        del fast
        assert gone() is None
    finally:
        gc.enable()
