"""Beam search by whole steps of an operator: the texts and scores of the plain model in fp64."""

from dataclasses import replace

import pytest
import torch
from operator_support import optimize, search_operators, use_kernels_for_toys
from support import build_model

import monoblock as mb
from monoblock.inference.backends.cpu_search import CpuSearchDecoderState
from monoblock.inference.engine import Engine
from monoblock.inference.prompt import Prompt
from monoblock.inference.settings import Settings
from monoblock.kernels.cpu import library
from monoblock.nn.lora import add_lora, fold_lora, lora_layers
from monoblock.quantization.convert import dequantize, quantize

SIZES = {"vocab": 37, "width": 24, "depth": 2, "heads": 3, "hidden": 29, "context": 23}
BLOCKS = {
    "pre": {},
    "post": {"norm_place": "post"},
    "output": {"norm_place": "output", "norm": "rms"},
    "sandwich": {"norm_place": "sandwich", "activation": "gelu"},
    "gated": {"gated": True, "activation": "silu", "kv_heads": 1},
}
SETTINGS = Settings(max_new_tokens=17, num_beams=5, eos_token_id=(2, 7), num_return_sequences=2)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)
    use_kernels_for_toys(monkeypatch)


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """For each call of `begin_search` and `step_search`, whether the operator took it."""
    calls = {"begin_search": [], "step_search": []}

    def record(name, method):
        def run(self, *args):
            result = method(self, *args)
            calls[name].append(result is not None and result is not False)
            return result

        return run

    for name in calls:
        monkeypatch.setattr(CpuSearchDecoderState, name, record(name, getattr(CpuSearchDecoderState, name)))
    return calls


def translator(**changes):
    return build_model(mb.vary(mb.vaswani(**SIZES), **changes), seed=5)


def random_sources(count):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 37, (2 + n % 7,), generator=generator).tolist() for n in range(count)]


class Searches:
    """An engine that searches for translations; `results` are (tokens, score) by index of the source and rank."""

    def __init__(self, model, settings=SETTINGS, max_rows=1000, **options):
        model = model if "use_cache" in options else optimize(model)
        self.engine, self.settings = Engine(model, max_rows=max_rows, **options), settings
        self.request_ids, self.results = [], {}

    def add(self, sources):
        self.request_ids += [self.engine.add((1,), self.settings, source) for source in sources]
        return self

    def step(self):
        for output in self.engine.step():
            index = self.request_ids.index(output.request_id)
            self.results[index, output.sequence_index] = output.tokens, output.score

    def run(self):
        while self.engine.busy:
            self.step()
        return self.results


def search(model, sources, settings=SETTINGS, **options):
    return Searches(model, settings, **options).add(sources).run()


def search_plain(model, sources, settings=SETTINGS):
    """The results of the plain model in fp64."""
    return search(model.double(), sources, settings, use_cache=False)


def assert_same(actual, expected, tolerance=2e-5):
    assert actual.keys() == expected.keys()
    for key, (tokens, score) in expected.items():
        assert actual[key][0] == tokens
        assert actual[key][1] == pytest.approx(score, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("block", BLOCKS)
def test_texts_and_scores_are_those_of_the_plain_model_in_fp64(block, taken):
    model, sources = translator(**BLOCKS[block]), random_sources(11)
    assert search_operators(model) is not None
    results = search(model, sources)
    assert taken == {"begin_search": [True], "step_search": [True] * 17}
    assert_same(results, search_plain(model, sources))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", ["pre", "gated"])
def test_quantized_weights_give_the_texts_and_scores_of_the_dequantized_model_in_fp64(block, bits, taken):
    """Rows and widths are no multiples of a tile's; the last panel has one vector, and the table has its own bits."""
    if not library.can_multiply_many_rows(32):
        pytest.skip("this processor has no products of many rows with quantized weights")
    model = quantize(translator(**BLOCKS[block]), bits=bits, group=32, table_bits=12 - bits)
    sources = random_sources(11)
    operators = search_operators(model)
    assert operators is not None
    assert operators.encoder is not None
    results = search(model, sources)
    assert taken == {"begin_search": [True], "step_search": [True] * 17}
    assert_same(results, search_plain(dequantize(model), sources), tolerance=2e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_activations_of_8_bits_give_the_scores_of_the_plain_model_in_fp64(bits):
    """A rounding error in fp32 may round an activation another way, so that a few searches differ."""
    if not library.can_multiply_many_rows(32):
        pytest.skip("this processor has no products of many rows with quantized weights")
    model = quantize(translator(**BLOCKS["pre"]), bits=bits, group=32, table_bits=12 - bits, activation_bits=8)
    sources = random_sources(11)
    results = search(model, sources)
    expected = search_plain(model, sources)
    errors = [abs(score / expected[key][1] - 1) for key, (_, score) in results.items()]
    assert sorted(errors)[len(errors) // 4] < 1e-4
    assert sum(results[key][0] == tokens for key, (tokens, _) in expected.items()) >= 0.8 * len(expected)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(("penalty", "form"), [(-0.7, "length"), (0.0, "length"), (1.3, "length"), (0.6, "gnmt")])
def test_searches_end_as_those_of_the_plain_model(early_stopping, penalty, form, taken):
    model, sources = translator(), random_sources(11)
    settings = Settings(max_new_tokens=13, num_beams=3, num_return_sequences=3)
    results = search(model, sources, settings)
    eos_tokens = {tokens[3 + n % 7] for (n, _), (tokens, _) in results.items()} - {results[0, 0][0][0]}
    penalties = {"length_penalty": penalty, "length_penalty_form": form}
    settings = replace(settings, eos_token_id=tuple(eos_tokens), early_stopping=early_stopping, **penalties)
    results = search(model, sources, settings)
    assert all(taken["step_search"])
    assert len({len(tokens) for tokens, _ in results.values()}) > 1
    assert_same(results, search_plain(model, sources, settings))


@pytest.mark.parametrize("changes", [{"embedding_norm": True}, {"positions": "learned"}, {"positions": "none"}])
def test_tokens_are_embedded_as_the_model_does(changes, taken):
    model, sources = translator(**changes), random_sources(11)
    operators = search_operators(model)
    assert (operators.embedding is None) == ("embedding_norm" in changes)  # the operator has no embedding norm
    results = search(model, sources)
    assert taken["step_search"] == [True] * 17
    assert_same(results, search_plain(model, sources))


def test_other_searches_and_the_number_of_threads_change_nothing():
    model, sources = translator(), random_sources(23)
    num_threads = torch.get_num_threads()
    expected = search(model, sources)
    try:
        torch.set_num_threads(1 if num_threads > 1 else 3)
        assert_same(search(model, sources), expected)
    finally:
        torch.set_num_threads(num_threads)
    for first, count in ((0, 7), (7, 16)):
        results = search(model, sources[first : first + count])
        rows = {(n - first, rank): row for (n, rank), row in expected.items() if first <= n < first + count}
        assert_same(results, rows)


def test_two_engines_at_once_do_not_share_a_cache():
    model, sources = translator(), random_sources(11)
    expected, both = search(model, sources), [Searches(model).add(sources) for _ in range(2)]
    while any(searches.engine.busy for searches in both):
        for searches in both:
            searches.step()
    assert [searches.results for searches in both] == [expected, expected]


def test_a_cancelled_request_does_not_change_the_others():
    model, sources = translator(), random_sources(11)
    expected, searches = search(model, sources), Searches(model).add(sources)
    for _ in range(5):
        searches.step()
    searches.engine.cancel(searches.request_ids[4])
    assert_same(searches.run(), {key: row for key, row in expected.items() if key[0] != 4})


@pytest.mark.parametrize("left", [0, 1, 4])
def test_cancelling_while_other_searches_are_finished(left):
    """All running requests but a few are cancelled as soon as one search has ended."""
    settings = Settings(max_new_tokens=13, num_beams=3, eos_token_id=tuple(range(3, 18)))
    model, sources = translator(), random_sources(11)
    expected, searches, cancelled = search(model, sources, settings), Searches(model, settings).add(sources), set()
    engine = searches.engine
    while engine.busy:
        searches.step()
        running = [request.id for request in engine.running if not request.is_done]
        if not cancelled and len(running) < len(engine.running):
            for request_id in running[left:]:
                cancelled.add(searches.request_ids.index(request_id))
                engine.cancel(request_id)
    assert 0 < len(cancelled) < len(sources)
    assert_same(searches.results, {key: row for key, row in expected.items() if key[0] not in cancelled})


def test_a_new_request_takes_the_rows_of_a_finished_search():
    settings = Settings(max_new_tokens=20, num_beams=5, eos_token_id=tuple(range(3, 18)))
    engine = Engine(optimize(translator()), max_rows=55)
    for source in random_sources(11):
        engine.add((1,), settings, source)
    while not any(request.is_done for request in engine.running):
        engine.step()
    assert len(engine.running) == 11
    new = engine.add((1,), settings, [4, 5])
    engine.step()
    assert new in {request.id for request in engine.running}


def test_under_autocast_the_plain_path_searches(taken):
    with torch.autocast("cpu", torch.bfloat16):
        search(translator(), random_sources(7))
    assert not any(taken["step_search"])


def test_suppressed_tokens_and_a_minimum_length(taken):
    settings = Settings(max_new_tokens=9, min_new_tokens=5, num_beams=4, eos_token_id=(2,), suppress_tokens=(11, 13))
    model, sources = translator(), random_sources(7)
    results = search(model, sources, settings)
    assert taken == {"begin_search": [True], "step_search": [True] * 9}
    assert_same(results, search_plain(model, sources, settings))


@pytest.mark.parametrize("max_rows", [25, 1000])
def test_requests_that_join_change_nothing(max_rows, taken):
    """They join while others run, at once or as soon as there are rows for them."""
    model, sources = translator(), random_sources(11)
    searches = Searches(model, max_rows=max_rows).add(sources[:7])
    for _ in range(3):
        searches.step()
    results = searches.add(sources[7:]).run()
    assert sum(taken["step_search"]) > 10
    assert_same(results, search_plain(model, sources))


def test_finished_samples_are_removed_from_the_batch(taken):
    """The operator does not take samples, so a finished row would be computed to the end."""
    engine = Engine(optimize(translator()), capacity=23)
    for n, source in enumerate(random_sources(11)):
        settings = Settings(max_new_tokens=1 + n, num_return_sequences=3, temperature=1.0, seed=n)
        engine.add((1,), settings, source)
    engine.step()
    assert isinstance(engine.state, CpuSearchDecoderState)
    while engine.running:
        assert 4 * sum(request.is_done for request in engine.running) < len(engine.running)
        assert engine.state.cache.batch == 3 * len(engine.running)
        engine.step()
    assert not any(taken["step_search"])


@pytest.mark.parametrize("target", ["encoder.0.attention.query", "decoder.1.cross.output", "decoder.0.cross.key"])
def test_adapters_run_on_the_plain_path(target):
    model, sources = translator(), random_sources(11)
    add_lora(model, rank=3, alpha=9, targets=(target,))
    for _, layer in lora_layers(model):
        torch.nn.init.normal_(layer.b)
    plain, operators = fold_lora(model), search_operators(model)
    has_all = operators is not None and operators.encoder is not None
    assert has_all == target.endswith("key")  # the operators read the keys of a source, not their weight
    assert_same(search(model, sources), search_plain(plain, sources))


def test_a_decoder_searches_from_prompts_of_several_tokens(taken):
    model = build_model(mb.gpt(vocab=37, width=24, depth=2, heads=3, context=23), seed=3)
    assert search_operators(model) is not None
    ids = torch.arange(3 * 5).view(3, 5) % 37
    options = {"max_new_tokens": 11, "num_beams": 4, "eos_token_id": 2}
    out = optimize(model).generate(ids, **options)
    assert taken == {"begin_search": [False], "step_search": [True] * 10}  # prefill runs on the plain path
    assert torch.equal(out, model.double().generate(ids, use_cache=False, **options))


def test_the_encoder_gives_the_same_for_concatenated_as_for_padded_sources():
    model = translator(norm_place="post", activation="gelu")
    operators = search_operators(model)
    assert operators.encoder is not None
    prompts = [Prompt((1,), tuple(source)) for source in random_sources(11)]
    with torch.inference_mode():
        state = CpuSearchDecoderState(optimize(model).model, 17, 3, operators=operators)
        memory, mask = state._encode_sources(prompts)
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([token for prompt in prompts for token in prompt.source])
        expected = model.double().encode(ids, mask)
    torch.testing.assert_close(memory[mask].double(), expected[mask], rtol=0, atol=2e-5)


@pytest.mark.parametrize("changes", [{"positions": "rotary"}, {"norm_place": "pre", "qk_norm": True}])
def test_unsupported_configurations_run_on_the_plain_path(changes):
    model, sources = translator(**changes), random_sources(7)
    assert search_operators(model) is None
    assert_same(search(model, sources), search_plain(model, sources))
