"""Recorded steps without a GPU: replaying runs the step again, in the same buffers."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import tiny_model, tiny_names

import monoblock as mb
from monoblock.config.knobs import vary
from monoblock.inference import fast_modules
from monoblock.inference.backends import cuda_graph, prepared_model, select
from monoblock.inference.backends.cuda_graph import CudaGraphDecoderState, supports_cuda_graph
from monoblock.inference.backends.recorded_prompts import RecordedPrompts
from monoblock.inference.engine import Engine
from monoblock.inference.fast_modules import FastExperts
from monoblock.inference.settings import Settings
from monoblock.nn.transformer import Transformer

PROMPTS = ([5, 7, 11, 2, 3], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3])


class FakeGraphState(CudaGraphDecoderState):
    """A recording whose replay runs the step, in place like a CUDA graph."""

    recordings = 0

    def _record(self):
        type(self).recordings += 1
        self._run_once()
        lengths, tokens, keys = self.cache.lengths, self.tokens, [layer.keys for layer in self.cache.layers]

        def replay():
            assert lengths is self.cache.lengths
            assert tokens is self.tokens
            assert all(old is layer.keys for old, layer in zip(keys, self.cache.layers, strict=True))
            self._run_once()

        return SimpleNamespace(replay=replay)


def graph_engine(model, monkeypatch, **options):
    """An engine whose steps are recorded; the model is prepared anew for it."""
    monkeypatch.setattr(prepared_model, "CudaGraphDecoderState", FakeGraphState)
    monkeypatch.setattr(select, "supports_cuda_graph", lambda model: True)
    FakeGraphState.recordings = 0
    return Engine(mb.optimize(model), capacity=26, **options)


def plain_engine(model):
    return Engine(model, capacity=26)


def decode(engine, settings, prompts=PROMPTS, has_encoder=False):
    for prompt in prompts:
        if has_encoder:
            engine.add([0], settings, source=prompt)
        else:
            engine.add(prompt, settings)
    tokens = {}
    while engine.busy:
        for output in engine.step():
            tokens.setdefault((output.request_id, output.sequence_index), []).extend(output.tokens)
    return [tokens[key] for key in sorted(tokens)]


SETTINGS = {
    "greedy": Settings(max_new_tokens=11),
    "sampled": Settings(max_new_tokens=11, temperature=0.9, top_k=20, seed=3),
    "ends early": Settings(max_new_tokens=11, temperature=1.3, seed=5, eos_token_id=tuple(range(0, 61, 7))),
    "repetition penalty": Settings(max_new_tokens=11, repetition_penalty=1.4),
    "several samples": Settings(max_new_tokens=9, temperature=1.0, seed=2, num_return_sequences=2),
    "beams": Settings(max_new_tokens=9, num_beams=3),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "t5-small"])
def test_recorded_steps_give_the_tokens_of_plain_ones(name, settings, monkeypatch):
    model, settings = tiny_model(name), SETTINGS[settings]
    has_encoder = model.encoder is not None
    expected = decode(plain_engine(model), settings, has_encoder=has_encoder)
    assert decode(graph_engine(model, monkeypatch), settings, has_encoder=has_encoder) == expected
    assert FakeGraphState.recordings or settings.num_beams > 1  # a beam search has recorded steps of its own


@pytest.mark.parametrize("burst", [1, 2, 16])
def test_the_length_of_a_burst_changes_nothing(burst, monkeypatch):
    model = tiny_model("gpt2")
    expected = decode(plain_engine(model), SETTINGS["ends early"])
    assert decode(graph_engine(model, monkeypatch, max_burst=burst), SETTINGS["ends early"]) == expected


def test_a_recording_is_reused_for_the_same_shapes(monkeypatch):
    model = tiny_model("gpt2")
    engine = graph_engine(model, monkeypatch)
    others = [[token + 1 for token in prompt] for prompt in PROMPTS]
    first, second = (decode(engine, SETTINGS["greedy"], prompts) for prompts in (PROMPTS, others))
    assert FakeGraphState.recordings == 1
    plain = plain_engine(model)
    assert [first, second] == [decode(plain, SETTINGS["greedy"], prompts) for prompts in (PROMPTS, others)]
    assert decode(engine, SETTINGS["greedy"], PROMPTS[:2]) == decode(plain, SETTINGS["greedy"], PROMPTS[:2])
    assert FakeGraphState.recordings == 2


def test_a_request_of_one_token_does_not_affect_the_next(monkeypatch):
    model = tiny_model("gpt2")
    engine, plain, short = graph_engine(model, monkeypatch), plain_engine(model), Settings(max_new_tokens=1)
    for settings in (short, SETTINGS["greedy"], short, SETTINGS["sampled"]):
        assert decode(engine, settings) == decode(plain, settings)


def test_a_request_that_joins_a_running_batch_changes_nothing(monkeypatch):
    model = tiny_model("gpt2")
    engine = graph_engine(model, monkeypatch, max_burst=2)
    first = engine.add(PROMPTS[0], SETTINGS["greedy"])
    outputs = [output for _ in range(3) for output in engine.step()]
    second = engine.add(PROMPTS[1], SETTINGS["greedy"])
    while engine.busy:
        outputs += engine.step()
    tokens = {first: [], second: []}
    for output in outputs:
        tokens[output.request_id] += output.tokens
    assert [tokens[first], tokens[second]] == decode(plain_engine(model), SETTINGS["greedy"], PROMPTS[:2])


def test_every_decoder_with_softmax_attention_is_recorded():
    names = tiny_names(lambda config: config.decoder is not None)
    for name in names:
        on_gpu = SimpleNamespace(decoder=tiny_model(name).decoder, device=torch.device("cuda"))
        assert supports_cuda_graph(on_gpu), name
    assert not supports_cuda_graph(tiny_model("gpt2"))


@pytest.mark.parametrize("settings", ["greedy", "sampled", "ends early"])
@pytest.mark.parametrize("count", [5, 24], ids=["all experts run", "weights are gathered"])
def test_experts_of_recorded_steps_have_fixed_shapes(count, settings, monkeypatch):
    """Neither way reads on the host which expert a token goes to."""
    config = tiny_model("mixtral-8x7b").config
    torch.manual_seed(0)
    model, settings = Transformer(vary(config, experts=count)).eval(), SETTINGS[settings]
    expected = decode(plain_engine(model), settings)
    monkeypatch.setattr(fast_modules, "needs_fixed_shapes", lambda x: x.shape[0] <= 3)
    gathered = []
    run_gathered = FastExperts._run_gathered
    monkeypatch.setattr(
        FastExperts, "_run_gathered", lambda self, *args: gathered.append(1) or run_gathered(self, *args)
    )
    assert decode(graph_engine(model, monkeypatch), settings) == expected
    assert bool(gathered) == (count == 24)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "mistral-7b", "gemma2-2b"])
def test_recorded_prompts_give_the_tokens_of_plain_ones(name, monkeypatch):
    """Prompts of a shape that is repeated are recorded; other tokens, other shapes and padding change nothing."""
    model, shapes = tiny_model(name), []
    monkeypatch.setattr(
        cuda_graph, "RecordedPrompts", lambda model, shape: shapes.append(shape) or RecordedPrompts(model, shape)
    )
    engine, plain = graph_engine(model, monkeypatch), plain_engine(model)
    batches = [[[(start + row + 3 * i) % 61 for i in range(6)] for row in range(3)] for start in range(4)]
    longer = [row + [1, 2] for row in batches[0]]
    for prompts in (*batches, PROMPTS, batches[1], batches[2], longer, longer, batches[3][:2], batches[0]):
        assert decode(engine, SETTINGS["greedy"], prompts) == decode(plain, SETTINGS["greedy"], prompts)
    assert [shape[:2] for shape in shapes] == [(3, 6), (3, 8)]


def test_prompts_that_cannot_be_recorded_are_run_as_they_are(monkeypatch):
    def fail(model, shape):
        raise RuntimeError("operation not permitted when stream is capturing")

    model = tiny_model("gpt2")
    monkeypatch.setattr(cuda_graph, "RecordedPrompts", fail)
    engine, prompts = graph_engine(model, monkeypatch), [[1, 2, 3], [4, 5, 6]]
    expected = decode(plain_engine(model), SETTINGS["greedy"], prompts)
    assert all(decode(engine, SETTINGS["greedy"], prompts) == expected for _ in range(4))


def test_no_garbage_is_collected_while_a_step_is_recorded():
    """A graph that was freed during a recording broke it."""
    from monoblock.inference.backends.search.record import _without_collections

    with _without_collections():
        assert not gc.isenabled()
        with _without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_kept_state_does_not_keep_its_optimized_model(monkeypatch):
    model = tiny_model("gpt2")
    engine = graph_engine(model, monkeypatch)
    decode(engine, SETTINGS["greedy"])
    fast = weakref.ref(engine.model)
    assert fast()._idle_graphs
    gc.disable()
    try:
        del engine
        assert fast() is None
    finally:
        gc.enable()
