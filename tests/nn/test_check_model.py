"""Functions that take a model answer an object that is none with one typed line: what was given, what to write."""

import itertools

import pytest
import torch
from torch import nn

import monoblock as mb
from monoblock.classic import lecture
from monoblock.errors import ConfigError, InputError
from monoblock.inference.speculative import DraftModel

CONFIG = mb.gpt(vocab=11, width=12, depth=1, heads=2, context=8)
IDS = torch.zeros(2, 3, dtype=torch.long)


class WithConfigAndDecoder(nn.Linear):
    """A module of another package that has attributes of the same names."""

    def __init__(self):
        super().__init__(5, 7)
        self.config, self.decoder = {"hidden": 5}, nn.Linear(3, 2)


MODEL = mb.Transformer(CONFIG)
OTHERS = {
    "a Linear": nn.Linear(5, 7),
    "a WithConfigAndDecoder": WithConfigAndDecoder(),
    "the text 'runs/demo'": "runs/demo",
    "None": None,
    "an int": 5,
    "the class Transformer": mb.Transformer,
    "an OrderedDict": MODEL.state_dict(),
    "a list": [MODEL],
    "a Tensor": IDS,
    "a ModelConfig": CONFIG,
    "a Block": MODEL.decoder.blocks[0],
}


FUNCTIONS = {
    "account": mb.account,
    "export_hf": lambda model: mb.export_hf(model, "never-written"),
    "Engine": mb.Engine,
    "ensemble": lambda model: mb.Engine(MODEL, ensemble=[model]),
    "DraftModel": DraftModel,
    "trace": lambda model: mb.trace(model, IDS),
    "optimize": mb.optimize,
    "quantize": mb.quantize,
    "interpolate": lambda model: mb.interpolate(model, 12),
    "add_lora": mb.add_lora,
    "merge_lora": mb.merge_lora,
    "unmerge_lora": mb.unmerge_lora,
    "fold_lora": mb.fold_lora,
    "save_adapter": lambda model: mb.save_adapter(model, "never-written"),
    "load_adapter": lambda model: mb.load_adapter(model, "never-read"),
}
TAKE_ANY_MODULE = ("trace", "add_lora", "merge_lora", "unmerge_lora", "fold_lora")
READS = {("account", "the text 'runs/demo'"), ("account", "a ModelConfig")} | {
    (name, given) for name in TAKE_ANY_MODULE for given in OTHERS if isinstance(OTHERS[given], nn.Module)
}


@pytest.mark.parametrize(
    ("function", "given"), [case for case in itertools.product(FUNCTIONS, OTHERS) if case not in READS]
)
def test_an_object_that_is_no_model_is_answered_with_one_typed_line(function, given):
    with pytest.raises(InputError, match=rf"takes .*, but got {given}; .*(give|write|load|build)") as caught:
        FUNCTIONS[function](OTHERS[given])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (torch.nn.DataParallel(mb.Transformer(CONFIG)), r"write its attribute \.module"),
        (lecture.GPT(11), r"write model\.to_monoblock\(\)"),
        ("gpt2", r"load it first: mb\.load\('gpt2'\)\.model"),
        (CONFIG, r"build the model first: mb\.Transformer\(config\)"),
        (mb.Transformer, r"give an instance, such as Transformer\(…\)"),
    ],
)
def test_the_line_says_how_to_get_the_model(value, advice):
    with pytest.raises(InputError, match=advice):
        mb.quantize(value)


def test_a_pipeline_in_place_of_its_model_is_named(tmp_path):
    mb.Transformer(mb.vit(image=8, patch=4, width=12, depth=1, heads=2, classes=3)).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"quantize takes a Transformer, but got a Pipeline; write its attribute \.model"
    ):
        mb.quantize(mb.load(tmp_path))


@pytest.mark.parametrize(
    ("value", "instead"),
    [("gpt2", r"mb\.preset\('gpt2'\)"), (mb.Transformer(CONFIG), r"model\.config"), (None, r"mb\.preset\(name\)")],
)
def test_vary_names_the_configuration_to_give(value, instead):
    with pytest.raises(ConfigError, match=rf"vary changes a ModelConfig, but got .*; write mb\.vary\({instead}, …\)"):
        mb.vary(value, norm="rms")


@pytest.mark.parametrize("load", [mb.load, mb.Transformer.from_pretrained])
@pytest.mark.parametrize("value", [None, 5, CONFIG, [1], mb.Transformer])
def test_only_a_path_is_loaded(load, value):
    with pytest.raises(InputError, match=r"a model is loaded from a folder or a file, but got .*; give a path"):
        load(value)


@pytest.mark.parametrize("build", [mb.Block, mb.Recurrent])
@pytest.mark.parametrize("value", [None, "gpt2", CONFIG, 5])
def test_parts_are_built_from_their_own_configuration(build, value):
    with pytest.raises(ConfigError, match=f"a {build.__name__} is built from a {build.__name__}Config, not from "):
        build(value)
