"""Laws of decoding for every decoder preset: batching, caching and speculation give the same tokens.

Prompts of 7 different lengths, padded on the left; with an encoder they are sources, and targets begin with START.
"""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from support import has_decoder, is_encoder_decoder, law_names, tiny_model

from monoblock.inference.engine import Engine
from monoblock.inference.scheduler import Request
from monoblock.inference.settings import Settings

DECODERS = law_names(has_decoder)
ROWS, SHORTEST, NEW, VOCAB = 7, 2, 8, 61
CAPACITY = SHORTEST + ROWS - 1 + NEW
START, PAD = 5, 0
GREEDY = {"max_new_tokens": NEW, "suppress_tokens": (PAD,)}
SAMPLED = GREEDY | {"temperature": 1.1, "top_p": 0.95, "top_k": 29, "seed": 3}
BEAMS = GREEDY | {"num_beams": 4, "length_penalty": 0.6}
METHODS = {"greedy": GREEDY, "beams": BEAMS, "sampled": SAMPLED}


@functools.cache
def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(6, VOCAB, (SHORTEST + n,), generator=generator) for n in range(ROWS)]


@functools.cache
def padded_batch():
    """All prompts, padded on the left, and the mask."""
    width = SHORTEST + ROWS - 1
    ids = torch.stack([torch.cat((torch.full((width - len(prompt),), PAD), prompt)) for prompt in prompts()])
    return ids, torch.arange(width) >= width - torch.tensor([len(prompt) for prompt in prompts()])[:, None]


@functools.cache
def eos_tokens(name):
    """Two tokens that greedy decoding produces, so that some rows stop early."""
    model = tiny_model(name)
    tokens = generate(model, *padded_batch(), **GREEDY)[:, -NEW:]
    return tuple(dict.fromkeys([int(tokens[0, 4]), int(tokens[-1, 6])]))


def generate(model, ids, mask=None, **options):
    start = {"decoder_start_token_id": START} if is_encoder_decoder(model.config) else {}
    return model.generate(ids, attention_mask=mask, pad_token_id=PAD, **start, **options)


def new_tokens(name, out, width):
    return out[:, 1 if is_encoder_decoder(tiny_model(name).config) else width :]


def generate_batch(name, options):
    """The new tokens of all prompts in one batch."""
    ids, mask = padded_batch()
    return new_tokens(
        name, generate(tiny_model(name), ids, mask, eos_token_id=eos_tokens(name), **options), ids.shape[1]
    )


def run_engine(engine):
    """The new tokens of each request of an engine."""
    outputs = {}
    while engine.busy:
        for event in engine.step():
            outputs.setdefault(event.request_id, []).extend(event.tokens)
    return [outputs[number] for number in sorted(outputs)]


def add_requests(engine, settings):
    for row, prompt in enumerate(prompts()):
        start = engine.model.encoder is not None
        own = settings if settings.seed is None else replace(settings, seed=settings.seed + row)
        engine.add([START] if start else prompt.tolist(), own, prompt.tolist() if start else None)
    return engine


def strip_padding(rows):
    """Rows without padding on the right."""
    out = []
    for row in rows.tolist():
        while row and row[-1] == PAD:
            row.pop()
        out.append(row)
    return out


@pytest.mark.parametrize("name", DECODERS)
def test_a_beam_of_one_is_greedy(name, monkeypatch):
    expected = strip_padding(generate_batch(name, GREEDY))
    assert min(map(len, expected)) < NEW, "no row ends early, so stopping is not tested"
    settings = Settings(eos_token_id=eos_tokens(name), num_beams=1, early_stopping=True, **GREEDY)
    monkeypatch.setattr(Request, "is_beam_search", True)
    assert run_engine(add_requests(Engine(tiny_model(name), capacity=CAPACITY), settings)) == expected


def own_seed(options, row):
    """The options of one prompt of a batch: prompt n has seed + n."""
    return options | {"seed": options["seed"] + row} if "seed" in options else options


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_batch_gives_what_each_prompt_gives_alone(name, method):
    expected = strip_padding(generate_batch(name, METHODS[method]))
    for row, prompt in enumerate(prompts()):
        options = own_seed(METHODS[method], row)
        alone = generate(tiny_model(name), prompt[None], eos_token_id=eos_tokens(name), **options)
        assert expected[row] == strip_padding(new_tokens(name, alone, len(prompt)))[0], f"prompt {row}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DECODERS)
def test_the_cache_changes_nothing(name, method):
    """Neither without a cache nor with prompts read three tokens at a time."""
    expected = strip_padding(generate_batch(name, METHODS[method]))
    assert strip_padding(generate_batch(name, METHODS[method] | {"use_cache": False})) == expected
    settings = Settings(eos_token_id=eos_tokens(name), **METHODS[method])
    assert run_engine(add_requests(Engine(tiny_model(name), capacity=CAPACITY, prefill_chunk=3), settings)) == expected


@functools.cache
def draft(name, noise):
    """A copy of the model with noise on its weights, which agrees with it more or less often."""
    model = copy.deepcopy(tiny_model(name))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std().nan_to_num(0.0) * torch.randn(weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("method", ["greedy", "sampled"])
@pytest.mark.parametrize("name", DECODERS)
def test_speculation_changes_nothing(name, method):
    """Neither a draft model that is often right nor prompt lookup changes a token."""
    expected = strip_padding(generate_batch(name, METHODS[method]))
    assert strip_padding(generate_batch(name, METHODS[method] | {"draft": draft(name, 0.1)})) == expected
    assert strip_padding(generate_batch(name, METHODS[method] | {"prompt_lookup": 3})) == expected


@pytest.mark.parametrize("name", DECODERS)
def test_a_stream_yields_the_tokens_of_generate(name):
    ids, mask = padded_batch()
    start = {"decoder_start_token_id": START} if is_encoder_decoder(tiny_model(name).config) else {}
    options = SAMPLED | {"eos_token_id": eos_tokens(name), "pad_token_id": PAD}
    tokens = list(tiny_model(name).stream(ids, attention_mask=mask, **start, **options))
    assert all(step.shape == (ROWS,) for step in tokens)
    assert torch.equal(torch.stack(tokens, 1), generate_batch(name, SAMPLED))
