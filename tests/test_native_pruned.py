"""Layers of different sizes by the operators: each reads what it made itself, and nothing that a larger one left."""

from dataclasses import replace

import pytest
import torch
from operator_support import watched
from support import build, near, source, tokens

import monoblock as mb
from monoblock.config import Repeat
from monoblock.decoding import prepare
from monoblock.decoding.engine import Engine
from monoblock.decoding.prepare import prepared
from monoblock.decoding.rows import Prompt
from monoblock.decoding.search_cpu import Searched, operators
from monoblock.decoding.settings import Settings
from monoblock.inspection.heads import prune_heads
from monoblock.native import library

TRANSLATOR = {"vocab": 37, "width": 48, "depth": 3, "heads": 6, "hidden": 29, "context": 211}
ENCODER = {"encoder.1.attention": [0, 1, 2, 4, 5], "encoder.2.attention": [3]}
DECODER = {
    "decoder.0.attention": [2],
    "decoder.1.attention": [0, 1, 3, 5],
    "decoder.1.cross": [4],
    "decoder.2.cross": [1, 2, 3],
}
FAR = 2.0**13  # how much more a large layer leaves than a small one has


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Whether each step was taken by the operator; toys are given to it too."""
    found = library.load()
    assert found.ready, found.reason
    return watched(monkeypatch)


@pytest.fixture
def threads():
    """How many threads there are may be changed."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- many rows ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_an_encoder_of_unequal_layers_is_read_by_several_threads_as_in_fp64(threads):
    """One thread has a long text and stays in a layer while the other, with short ones, goes on to the next."""
    model = prune_heads(build(mb.vaswani(**TRANSLATOR), seed=5), ENCODER)
    lengths = [199] + [2 + n % 3 for n in range(67)]
    given = [Prompt((1,), tuple(row.tolist())) for row in tokens(1, sum(lengths), 37)[0].split(lengths)]
    by = operators(prepared(model))
    assert by.encoder is not None
    threads(2)
    found = [Searched(prepared(model), 17, 1, by=by)._read_sources(given) for _ in range(13)]
    threads(1)
    mask = found[0][1]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor([token for prompt in given for token in prompt.source])
    wanted = model.double().encode(ids, mask)[mask]
    for memory, _ in found:
        torch.testing.assert_close(memory[mask].double(), wanted, rtol=0, atol=2e-5)


def test_a_search_with_heads_pruned_here_and_there_finds_the_texts_of_fp64(threads):
    model = prune_heads(build(mb.vaswani(**TRANSLATOR), seed=5), ENCODER | DECODER)
    assert operators(prepared(model)) is not None
    asked = Settings(max_new_tokens=11, num_beams=4, eos_token_id=(2,))

    def texts(**options):
        engine, found = Engine(model, **options), {}
        order = [engine.add((1,), asked, tuple(row[: 3 + n % 5].tolist())) for n, row in enumerate(tokens(9, 7, 37))]
        while engine.busy:
            found |= {order.index(event.id): event for event in engine.step()}
        return found

    threads(2)
    runs = [texts() for _ in range(2)]
    threads(1)
    model.double()
    wanted = texts(fast=False, use_cache=False)
    for run in runs:
        assert {n: event.tokens for n, event in run.items()} == {n: event.tokens for n, event in wanted.items()}
        assert all(event.score == pytest.approx(wanted[n].score, abs=2e-5) for n, event in run.items())


# -- a few rows, quantised: rows are read in whole groups --------------------------------------------------------------


def stepped(model, count=3):
    """Logits of some steps after a beginning."""
    both, cache = model.encoder is not None, model.make_cache(2, 17, chunk=5)
    memory = model.encode(source(2)) if both else None
    found = []
    for number in range(count + 1):
        ids = tokens(2, 1 if number else 5, seed=number)
        found.append(model.decode(ids, memory, cache=cache) if both else model(ids, cache=cache))
        cache.advance(ids.shape[1])
        memory = None
    return torch.cat(found[1:], dim=1)


@torch.no_grad()
def larger(matrix, back):
    """What a matrix makes is much larger, and what reads it makes up for that."""
    matrix.weight.mul_(FAR)
    if matrix.bias is not None:
        matrix.bias.mul_(FAR)
    back.weight.div_(FAR)


def few_heads():
    model = build(mb.gpt(vocab=61, width=64, depth=3, heads=4, hidden=544, context=23))
    own = model.decoder.blocks[0].attention
    larger(own.value, own.output)
    return prune_heads(model, {"decoder.1.attention": [2]})  # 48 inputs in 64 columns


def few_cross_heads():
    model = build(mb.vaswani(vocab=61, width=64, depth=2, heads=4, hidden=544, context=23))
    own = model.decoder.blocks[1].attention  # comes right before
    larger(own.value, own.output)
    return prune_heads(model, {"decoder.1.cross": [0]})


def few_hidden():
    config = mb.llama(vocab=61, width=64, depth=3, heads=4, hidden=544, context=23)
    first, second, third = config.decoder.layers()
    second = replace(second, feedforward=replace(second.feedforward, hidden=83))
    pattern = tuple(Repeat(blocks=(block,)) for block in (first, second, third))
    model = build(replace(config, decoder=replace(config.decoder, pattern=pattern)))
    larger(model.decoder.blocks[0].feedforward.up, model.decoder.blocks[0].feedforward.down)
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("made", [few_heads, few_cross_heads, few_hidden])
@torch.no_grad()
def test_a_small_layer_after_a_large_one_reads_zeros_behind_its_rows(made, bits, served, threads):
    threads(1)
    model = mb.quantized(made(), bits=bits, group=32)
    wanted = stepped(model)
    assert not served
    for count in (1, 2):
        threads(count)
        near(stepped(prepare._made(model).eval()), wanted)
    assert served == [True] * 6
