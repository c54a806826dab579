"""The laws of heads that give one output for a sequence: classifiers and regressions, with every kind of pooling."""

import pytest
import torch
from support import PADDINGS, B, assert_bit_equal, assert_near, build_model, pad_rows, random_pixels, random_tokens

from monoblock.accounting.report import account
from monoblock.config.families import bert, vit
from monoblock.config.knobs import vary
from monoblock.model import Transformer

BERT = bert(vocab=61, width=12, depth=2, heads=3, context=37, head="none")
VIT = vary(vit(image=6, patch=2, width=12, depth=2, heads=3, classes=5), head="none")
CASES = {
    f"{kind} of {classes}, {pooling}, {pooler}": {
        "head": kind,
        "classes": classes,
        "pooling": pooling,
        "pooler": pooler,
    }
    for kind, classes in (("classifier", 5), ("regression", 1), ("regression", 3))
    for pooling in ("first", "last", "mean")
    for pooler in ("none", "tanh")
}
cases = pytest.mark.parametrize("knobs", CASES.values(), ids=list(CASES))
families = pytest.mark.parametrize("config", [BERT, VIT], ids=["text", "images"])


def random_inputs(config, dtype=torch.float32):
    return random_pixels(config).to(dtype) if config.family == "vision" else random_tokens()


@cases
@pytest.mark.parametrize("side", PADDINGS)
def test_padding_and_its_ids_change_nothing(knobs, side):
    model, ids = build_model(vary(BERT, **knobs), torch.float64), random_tokens()
    padded, valid = pad_rows(ids, *PADDINGS[side])
    other = torch.where(valid, padded, random_tokens(*padded.shape, seed=9))
    with torch.no_grad():
        expected = model(ids)
        assert expected.shape == (B, knobs["classes"])
        assert_near(model(padded, attention_mask=valid), expected)
        assert_near(model(other, attention_mask=valid), expected)
        assert_bit_equal(model(ids, attention_mask=torch.ones_like(ids)), expected)


@cases
@families
def test_a_row_does_not_depend_on_the_other_rows(config, knobs):
    model, inputs = build_model(vary(config, **knobs), torch.float64), random_inputs(config, torch.float64)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(inputs)
        assert_near(model(inputs[order]), expected[order])
        assert_near(model(inputs[4:5]), expected[4:5])


@cases
@families
def test_the_closed_form_counts_the_built_model(config, knobs):
    config = vary(config, **knobs)
    assert account(config).parameters == sum(weight.numel() for weight in build_model(config).parameters())


@cases
@families
def test_saved_then_loaded_is_the_same_model_bit_for_bit(config, knobs, tmp_path):
    config = vary(config, **knobs)
    model, inputs = build_model(config), random_inputs(config)
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path).eval()
    assert loaded.config == config
    with torch.no_grad():
        assert_bit_equal(loaded(inputs), model(inputs))
