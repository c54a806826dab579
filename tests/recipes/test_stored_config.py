"""A stored configuration gets the head that an objective needs."""

import pytest

from monoblock.config.families import bert, vit
from monoblock.config.model import HeadConfig
from monoblock.errors import ConfigError
from monoblock.runs.recipe import adapt_config

BERT = bert(vocab=61, width=12, depth=1, heads=3, context=37, head="masked_lm")
VIT = vit(image=6, patch=2, width=12, depth=1, heads=3, classes=5)


@pytest.mark.parametrize(("kind", "default"), [("classifier", 2), ("regression", 1), ("tagger", 2)])
def test_an_encoder_gets_a_new_head_with_the_classes_of_the_data(kind, default):
    pooler = "none" if kind == "tagger" else "tanh"
    for classes in (None, 3):
        sizes = {} if classes is None else {"classes": classes}
        expected = HeadConfig(kind=kind, classes=classes or default, pooler=pooler, bias="learned")
        assert adapt_config(BERT, kind, {}, **sizes).head == expected


@pytest.mark.parametrize(("kind", "default"), [("classifier", 2), ("regression", 1)])
def test_a_new_head_of_a_vision_model_has_no_pooler(kind, default):
    for classes in (None, 3):
        sizes = {} if classes is None else {"classes": classes}
        expected = HeadConfig(kind=kind, classes=classes or default, bias="learned")
        assert adapt_config(VIT, kind, {"head": "fresh"}, **sizes).head == expected


def test_a_regression_head_of_another_size_is_an_error():
    config = adapt_config(BERT, "regression", {}, classes=3)
    assert adapt_config(config, "regression", {}, classes=3) == config
    with pytest.raises(ConfigError, match="has 3 classes, but 1 are needed"):
        adapt_config(config, "regression", {}, classes=1)
