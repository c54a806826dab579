"""Laws of decoding, token-equal over every decoder preset: however a text is computed, it is the same text.

Prompts of 7 different lengths, padded on the left; with an encoder they are sources, and targets begin with START.
"""

import copy
import functools

import pytest
import torch
from support import has_both, is_decoder, presets, toy

from monoblock.decoding.beam import Beams
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings

DECODERS = presets(is_decoder)
ROWS, SHORTEST, NEW, VOCAB = 7, 2, 8, 61
CAPACITY = SHORTEST + ROWS - 1 + NEW
START, PAD = 5, 0
GREEDY = {"max_new_tokens": NEW, "suppress_tokens": (PAD,)}
SAMPLED = GREEDY | {"temperature": 1.1, "top_p": 0.95, "top_k": 29, "seed": 3}
BEAMS = GREEDY | {"num_beams": 4, "length_penalty": 0.6}
WAYS = {"greedy": GREEDY, "beams": BEAMS, "sampled": SAMPLED}


@functools.cache
def texts():
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(6, VOCAB, (SHORTEST + n,), generator=draw) for n in range(ROWS)]


@functools.cache
def batch():
    """All prompts, padded on the left, and the mask."""
    wide = SHORTEST + ROWS - 1
    ids = torch.stack([torch.cat((torch.full((wide - len(text),), PAD), text)) for text in texts()])
    return ids, torch.arange(wide) >= wide - torch.tensor([len(text) for text in texts()])[:, None]


@functools.cache
def ends(name):
    """Two tokens that greedy texts contain, so that some of them stop before the last token."""
    model = toy(name)
    said = asked(model, *batch(), **GREEDY)[:, -NEW:]
    return tuple(dict.fromkeys([int(said[0, 4]), int(said[-1, 6])]))


def asked(model, ids, mask=None, **options):
    both = {"decoder_start_token_id": START} if has_both(model.config) else {}
    return model.generate(ids, attention_mask=mask, pad_token_id=PAD, **both, **options)


def new(name, out, width):
    return out[:, 1 if has_both(toy(name).config) else width :]


def together(name, options):
    """The new tokens of the whole batch."""
    ids, mask = batch()
    return new(name, asked(toy(name), ids, mask, eos_token_id=ends(name), **options), ids.shape[1])


def steps(engine):
    """Run an engine dry: the new tokens of each request."""
    found = {}
    while engine.busy:
        for event in engine.step():
            found.setdefault(event.id, []).extend(event.tokens)
    return [found[number] for number in sorted(found)]


def fill(engine, settings, *, beams=False):
    for text in texts():
        both = engine.model.encoder is not None
        engine.add([START] if both else text.tolist(), settings, text.tolist() if both else None)
        if beams:
            engine.waiting[-1].beams = Beams(settings)
    return engine


def cut(rows):
    """Rows without the padding at their ends."""
    out = []
    for row in rows.tolist():
        while row and row[-1] == PAD:
            row.pop()
        out.append(row)
    return out


@pytest.mark.parametrize("name", DECODERS)
def test_a_beam_of_one_is_greedy(name):
    wanted = cut(together(name, GREEDY))
    assert min(map(len, wanted)) < NEW, "none ends early: stopping is not tried"
    settings = Settings(eos_token_id=ends(name), early_stopping=True, **GREEDY)
    assert steps(fill(Engine(toy(name), capacity=CAPACITY), settings, beams=True)) == wanted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_batch_says_what_each_prompt_says_alone(name, way):
    got = cut(together(name, WAYS[way]))
    for row, text in enumerate(texts()):
        alone = asked(toy(name), text[None], eos_token_id=ends(name), **WAYS[way])
        assert got[row] == cut(new(name, alone, len(text)))[0], f"prompt {row}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_the_cache_changes_nothing(name, way):
    """Everything read anew at each step, and prompts read three tokens at a time."""
    got = cut(together(name, WAYS[way]))
    assert cut(together(name, WAYS[way] | {"use_cache": False})) == got
    settings = Settings(eos_token_id=ends(name), **WAYS[way])
    assert steps(fill(Engine(toy(name), capacity=CAPACITY, chunk=3), settings)) == got


@functools.cache
def draft(name, noise):
    """The model with its weights shaken: it agrees always (no noise), often or seldom."""
    model = copy.deepcopy(toy(name))
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std().nan_to_num(0.0) * torch.randn(weight.shape, generator=draw))
    return model


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("name", DECODERS)
def test_proposals_change_nothing(name, way):
    """A draft that is often right, and looking up the text: token by token what is said without them."""
    got = cut(together(name, WAYS[way]))
    assert cut(together(name, WAYS[way] | {"draft": draft(name, 0.1)})) == got
    assert cut(together(name, WAYS[way] | {"prompt_lookup": 3})) == got


@pytest.mark.parametrize("name", DECODERS)
def test_a_stream_is_what_generate_says(name):
    ids, mask = batch()
    both = {"decoder_start_token_id": START} if has_both(toy(name).config) else {}
    options = SAMPLED | {"eos_token_id": ends(name), "pad_token_id": PAD}
    said = list(toy(name).stream(ids, attention_mask=mask, **both, **options))
    assert all(step.shape == (ROWS,) for step in said)
    assert torch.equal(torch.stack(said, 1), together(name, SAMPLED))
