"""Speculative decoding of models with windows or linear attention: any number of proposals gives the plain text.

The engine keeps whole pages, from which proposals that are wrong are dropped however many there are.
"""

import functools

import pytest
import torch
from support import build_model

import monoblock as mb
from monoblock.config.presets import tiny
from monoblock.inference.speculative import DraftModel, PromptLookup

VOCAB, NEW = 31, 23
LLAMA = mb.llama(vocab=VOCAB, width=16, depth=2, heads=2, kv_heads=1, hidden=19, context=256)
MODELS = {
    "window of 6": mb.vary(LLAMA, window=6),
    "window of 1": mb.vary(LLAMA, window=1),
    "window in every other block": mb.vary(tiny("gemma2-2b"), context=256),
    "linear attention": mb.vary(LLAMA, attention="linear"),
}


def build(name, seed):
    """A model in fp64 with weights large enough that its texts differ and repeat themselves only sometimes."""
    model = build_model(MODELS[name], seed=seed).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return model


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (9, 1, 13)]


def decode(model, prompts, **options):
    engine, settings = mb.Engine(model, **options), mb.Settings(max_new_tokens=NEW)
    tokens = {engine.add(prompt, settings): [] for prompt in prompts}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.tokens
    return list(tokens.values())


@functools.cache
def plain_texts(name):
    return [decode(build(name, 0), [prompt])[0] for prompt in prompts()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefill_chunk", [None, 2])
def test_more_proposals_than_a_window_has_tokens_change_no_text(name, prefill_chunk):
    model, ids = build(name, 0), prompts()
    proposers = [PromptLookup(5), PromptLookup(24), DraftModel(build(name, 1), 24)]
    for proposer in proposers:
        assert decode(model, ids, proposer=proposer, prefill_chunk=prefill_chunk) == plain_texts(name)


@pytest.mark.parametrize("name", ["window of 6", "linear attention"])
def test_generate_with_many_proposals_gives_the_plain_text(name):
    model = build(name, 0)
    for prompt in prompts()[::2]:
        ids = torch.tensor([prompt])
        plain = model.generate(ids, max_new_tokens=NEW)
        for count in (15, 16, 24):
            assert torch.equal(model.generate(ids, max_new_tokens=NEW, prompt_lookup=count), plain), count
