"""Decoding with the operators of a CPU gives the texts and scores of the plain model."""

import pytest
import torch
from operator_support import record_operator_steps
from support import build_model, is_encoder_decoder, random_source, random_tokens, tiny_model

import monoblock as mb
from monoblock.inference.engine import Engine
from monoblock.inference.fast_modules import build_fast_model
from monoblock.inference.settings import Settings
from monoblock.kernels.cpu import library
from monoblock.nn.lora import add_lora, fold_lora, lora_layers
from monoblock.quantization.convert import dequantize

SIZES = {"vocab": 37, "width": 24, "depth": 2, "heads": 3, "hidden": 29, "context": 23}
BLOCKS = {
    "pre": {},
    "post": {"norm_place": "post"},
    "output": {"norm_place": "output", "norm": "rms"},
    "sandwich": {"norm_place": "sandwich", "activation": "gelu"},
    "gated": {"gated": True, "activation": "silu", "kv_heads": 1},
}
SEARCH = Settings(max_new_tokens=17, num_beams=5, eos_token_id=(2, 7), num_return_sequences=2)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    status = library.load_kernels()
    assert status.is_ready, status.reason


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The number of tokens in each step that the operator takes."""
    return record_operator_steps(monkeypatch)


def decode(model, requests, **options):
    """The tokens and the score by (number of the request, sequence); requests are (ids, settings, source)."""
    engine, results = Engine(model, **options), {}
    numbers = {engine.add(*request): number for number, request in enumerate(requests)}
    while engine.busy:
        for output in engine.step():
            key = numbers[output.request_id], output.sequence_index
            tokens, _ = results.get(key, ((), None))
            results[key] = (*tokens, *output.tokens), output.score
    return results


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m", "gemma3-1b", "bart-base", "t5-small"])
def test_the_engine_generates_the_same_tokens(name, bits, taken):
    model = tiny_model(name) if bits is None else mb.quantize(tiny_model(name), bits=bits)
    has_encoder = is_encoder_decoder(model.config)
    for options in ({}, {"num_beams": 2}):
        requests = [
            (prompt[: 3 + n], Settings(max_new_tokens=11 + n, **options), source if has_encoder else None)
            for n, (prompt, source) in enumerate(
                zip(random_tokens(4, 7).tolist(), random_source(4).tolist(), strict=True)
            )
        ]
        results = [decode(one, requests, capacity=23) for one in (mb.optimize(model), model)]
        tokens = [{key: row for key, (row, _) in result.items()} for result in results]
        assert tokens[0] == tokens[1]
    assert len(taken) > 20


# -- translation ------------------------------------------------------------------------------------------------------


def translator(**changes):
    return build_model(mb.vary(mb.vaswani(**SIZES), **changes), seed=5)


def translations(settings=SEARCH, count=11):
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randint(3, 37, (2 + n % 7,), generator=generator).tolist() for n in range(count)]
    return [((1,), settings, source) for source in sources]


def assert_same(actual, expected, tolerance=2e-5):
    assert actual.keys() == expected.keys()
    for key, (tokens, score) in expected.items():
        assert actual[key][0] == tokens
        assert actual[key][1] == pytest.approx(score, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("block", BLOCKS)
def test_searches_find_the_texts_and_scores_of_the_plain_model_in_fp64(block, taken):
    model, requests = translator(**BLOCKS[block]), translations()
    results = decode(mb.optimize(model), requests)
    assert len(taken) == SEARCH.max_new_tokens
    assert_same(results, decode(model.double(), requests, use_cache=False))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", ["pre", "gated"])
def test_quantized_weights_give_the_texts_and_scores_of_the_dequantized_model_in_fp64(block, bits, taken):
    """Rows and widths are no multiples of a tile's, and the table has its own bits."""
    model = mb.quantize(translator(**BLOCKS[block]), bits=bits, group=32, table_bits=12 - bits)
    results = decode(mb.optimize(model), translations())
    assert len(taken) == SEARCH.max_new_tokens
    assert_same(results, decode(dequantize(model).double(), translations(), use_cache=False), tolerance=2e-4)


@pytest.mark.parametrize("target", ["encoder.0.attention.query", "decoder.1.cross.output", "decoder.0.cross.key"])
def test_adapters_run_on_the_plain_path(target):
    model, requests = translator(), translations()
    add_lora(model, rank=3, alpha=9, targets=(target,))
    for _, layer in lora_layers(model):
        torch.nn.init.normal_(layer.b)
    fast = mb.optimize(model)
    assert (fast.model.encoder.cpu_encoder is None) == target.startswith("encoder")
    assert (fast.model.decoder.cpu_stack is None) == target.endswith("output")  # it never reads the key's weight
    assert_same(decode(fast, requests), decode(fold_lora(model).double(), requests, use_cache=False))


@torch.inference_mode()
def test_the_encoder_gives_the_same_for_concatenated_as_for_padded_sources():
    model = translator(norm_place="post", activation="gelu")
    fast, ids = build_fast_model(model), random_tokens(4, 9, 37)
    mask = torch.arange(9) < torch.tensor([9, 1, 6, 3])[:, None]
    assert fast.encoder.cpu_encoder is not None
    actual, expected = fast.encode(ids, mask), model.double().encode(ids, mask)
    torch.testing.assert_close(actual[mask].double(), expected[mask], rtol=0, atol=2e-5)
