"""Recorded beam search without a GPU: replaying runs the step again, in the same buffers."""

from dataclasses import replace

import pytest
import torch
from support import block_configs, preset_names, tiny_model

from monoblock.decoding.backends import prepared_model, select
from monoblock.decoding.backends.cuda_graph import SUPPORTED, CudaGraphDecoderState
from monoblock.decoding.backends.search import cuda_search
from monoblock.decoding.backends.search.cuda_search import MAX_IDLE_BUFFERS, BufferPool, round_up_searches
from monoblock.decoding.backends.supported_fields import unsupported_field
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.errors import InputError

SOURCES = ([5, 7, 11, 2, 3], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3], [12, 13], [40, 8, 1, 30])
SETTINGS = Settings(max_new_tokens=13, num_beams=3, num_return_sequences=2, eos_token_id=(2, 7, 19))


@pytest.fixture(autouse=True)
def searches_begun(monkeypatch):
    """Search as on a GPU; the list has the sizes of the buffers of each batch."""
    begun, take = [], BufferPool.take

    def count(self, key):
        begun.append(key)
        return take(self, key)

    monkeypatch.setattr(BufferPool, "take", count)
    monkeypatch.setattr(select, "supports_cuda_graph", lambda model: True)
    return begun


def make_engine(model, **options):
    prepared_model.release(model)
    return Engine(model, **{"capacity": 26, "max_rows": 64, **options})


def plain_engine(model, **options):
    return Engine(model, optimize=False, **{"capacity": 26, "max_rows": 64, **options})


def add(engine, prompts, settings):
    has_encoder = engine.model.encoder is not None
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


SUPPORTED_PRESETS = preset_names(is_supported)
ENCODER_DECODERS = preset_names(lambda config: is_supported(config) and config.family == "encoder-decoder")
DECODERS = ["gpt2", "llama-7b", "mistral-7b", "bloom-560m", "gemma-2-2b"]


@pytest.mark.parametrize("name", [*ENCODER_DECODERS, *(name for name in DECODERS if name in SUPPORTED_PRESETS)])
def test_texts_and_scores_are_those_of_the_plain_model(name, searches_begun):
    model = tiny_model(name)
    expected = search(plain_engine(model))
    assert not searches_begun
    assert_same(search(make_engine(model)), expected)
    assert len(searches_begun) == 1
