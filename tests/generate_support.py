"""Small models for the tests of `generate`, and the greedy tokens that whole forward passes give."""

import copy

import torch
from support import build_model

import monoblock as mb

IDS = torch.tensor([[5, 7, 11, 2, 3], [1, 2, 3, 9, 4]])
NEW = 7


def gpt(seed=0, **changes):
    return build_model(mb.gpt(vocab=31, width=24, depth=2, heads=3, context=41, **changes), seed=seed)


def translator(seed=0):
    return build_model(mb.vaswani(vocab=31, width=24, depth=2, heads=3, context=41), seed=seed)


def eager(model, ids=IDS, new=NEW):
    """Return the greedy tokens (B, T + new) by whole passes of a copy of the model, in which nothing is prepared."""
    model = copy.deepcopy(model).eval()
    for _ in range(new):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    return ids


def generate(model, ids=IDS, **options):
    return model.generate(ids, max_new_tokens=NEW, **options)
