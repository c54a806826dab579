"""An LSTM goes on from its state as a Transformer from its cache: greedy, beams, batches of many."""

import itertools

import pytest
import torch

from monoblock.config import RecurrentConfig
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.errors import InputError
from monoblock.recurrent import Recurrent

VOCAB, START = 7, 1
SOURCES = [(3, 5), (2, 4, 6, 5, 3), (6,), (5, 5, 2)]


def build(kind, **more):
    torch.manual_seed(3)
    model = Recurrent(RecurrentConfig(kind=kind, vocab=VOCAB, width=11, depth=2, **more)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (1.5 if weight.dim() > 1 else 0.5))
    return model


@pytest.fixture(scope="module")
def both():
    return build("encoder_decoder")


@pytest.fixture(scope="module")
def speaker():
    return build("language_model")


def said(model, requests, settings, **options):
    """[(tokens, score) of each text] of each request, in the order they were asked."""
    engine = Engine(model, capacity=30, **options)
    order = [engine.add(ids, settings, source) for ids, source in requests]
    found = {(request, n): ([], None) for request in order for n in range(settings.num_return_sequences)}
    while engine.busy:
        for event in engine.step():
            found[event.id, event.number] = (found[event.id, event.number][0] + [*event.tokens], event.score)
    return [[found[request, n] for n in range(settings.num_return_sequences)] for request in order]


@torch.no_grad()
def greedy(model, source, count, ends=()):
    ids = torch.tensor([[START]])
    for _ in range(count):
        logits = model(torch.tensor([source]), ids)
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        if ids[0, -1].item() in ends:
            break
    return ids[0, 1:].tolist()


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_greedy_is_the_whole_pass_again_at_every_step(both, rows):
    settings = Settings(max_new_tokens=9, eos_token_id=2)
    got = said(both, [((START,), source) for source in SOURCES], settings, rows=rows)
    assert [texts[0][0] for texts in got] == [greedy(both, source, 9, ends=(2,)) for source in SOURCES]


@torch.no_grad()
def test_enough_beams_find_the_most_probable_of_all_texts(both):
    settings = Settings(max_new_tokens=3, num_beams=VOCAB**2, num_return_sequences=3)
    for source, texts in zip(SOURCES, said(both, [((START,), s) for s in SOURCES], settings, rows=200), strict=True):
        every = torch.tensor(list(itertools.product(range(VOCAB), repeat=3)))
        fed = torch.cat((torch.full((len(every), 1), START), every[:, :-1]), 1)
        shares = both(torch.tensor([source]).expand(len(every), -1), fed).log_softmax(-1)
        totals = shares.gather(-1, every[..., None]).sum((1, 2)) / 3
        best = totals.topk(3)
        assert [text for text, _ in texts] == every[best.indices].tolist()
        assert [score for _, score in texts] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_neighbours_and_newcomers_change_no_beam(both):
    settings = Settings(max_new_tokens=8, num_beams=3, num_return_sequences=2, eos_token_id=2)
    requests = [((START,), source) for source in SOURCES * 3]
    alone = [said(both, [request], settings)[0] for request in requests]
    for rows in (6, 9, 64):
        together = said(both, requests, settings, rows=rows)
        assert [[text for text, _ in texts] for texts in together] == [[text for text, _ in texts] for texts in alone]


@torch.no_grad()
def test_a_language_model_reads_prompts_of_unequal_length(speaker):
    prompts = [(3,), (2, 5, 6, 1), (4, 4)]
    got = said(speaker, [(prompt, None) for prompt in prompts], Settings(max_new_tokens=6))
    for prompt, texts in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(6):
            ids = torch.cat((ids, speaker(ids)[:, -1:].argmax(-1)), 1)
        assert texts[0][0] == ids[0, len(prompt) :].tolist()


def test_what_an_lstm_cannot_do_is_said(both, speaker):
    with pytest.raises(InputError, match="one way to go on"):
        Engine(both, capacity=9, use_cache=False)
    with pytest.raises(InputError, match="needs a source"):
        Engine(both, capacity=9).add((1,))
    with pytest.raises(InputError, match="no encoder"):
        Engine(speaker, capacity=9).add((1,), source=(2,))
    with pytest.raises(InputError, match="capacity="):
        Engine(both)
