"""`mb.Transformer` is the core of nn/ with generation and folders; whatever the package builds for users is one."""

import copy
import pickle

import pytest
import torch

import monoblock as mb
from monoblock.inspection.pruning import prune_heads
from monoblock.nn import transformer
from monoblock.quantization.convert import dequantize


def build(name="gpt2"):
    torch.manual_seed(0)
    return mb.Transformer(mb.tiny(name)).eval()


def reload(model, folder):
    model.save_pretrained(folder)
    return mb.Transformer.from_pretrained(folder)


@pytest.mark.parametrize(
    "make",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        mb.quantize,
        lambda model: dequantize(mb.quantize(model)),
        lambda model: prune_heads(model, {"decoder.0.attention": [1]}),
        mb.fold_lora,
    ],
    ids=["deepcopy", "pickle", "quantize", "dequantize", "prune", "fold_lora"],
)
def test_what_is_made_from_a_model_is_of_its_class(make):
    class_of = type(make(build()))
    assert class_of is mb.Transformer
    assert issubclass(class_of, transformer.Transformer)


def test_a_loaded_model_is_of_the_class_that_loads_it(tmp_path):
    for model in (build(), mb.quantize(build())):
        assert type(reload(model, tmp_path / str(model.config.quantize))) is mb.Transformer


def test_an_interpolated_model_is_of_its_class():
    model = build("vit-b16")
    patch = model.config.input.patch
    assert type(mb.interpolate(model, 3 * patch)) is mb.Transformer


def test_the_core_knows_neither_text_nor_folders():
    names = ("generate", "stream", "from_pretrained", "save_pretrained")
    assert not [name for name in names if hasattr(transformer.Transformer, name)]
