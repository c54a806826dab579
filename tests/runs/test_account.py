"""`mb.account` counts what is there: a subclass, a changed model, their folders and cards; and it reads recipes."""

import pytest
import torch
from torch import nn

import monoblock as mb
from monoblock.cli.main import run
from monoblock.runs.recipe import build_model_config, read_recipe

CONFIG = mb.gpt(vocab=61, width=24, depth=3, heads=2, context=17)


class AdapterBlock(mb.Block):
    """A block with one more layer."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(config.width, 7)
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x, *arguments, **options):
        return super().forward(x, *arguments, **options)


class AdapterTransformer(mb.Transformer):
    block_class = AdapterBlock


def extended():
    return AdapterTransformer(CONFIG)


def widened():
    model = mb.Transformer(CONFIG)
    model.decoder.blocks[1].feedforward.up = nn.Linear(24, 101)
    model.decoder.blocks[1].feedforward.down = nn.Linear(101, 24)
    return model


def shortened():
    model = mb.Transformer(CONFIG)
    model.decoder.blocks[2].attention_norm = nn.Identity()
    return model


def adapted():
    model = mb.Transformer(CONFIG)
    mb.add_lora(model, rank=3)
    return model


def with_head_of_its_own():
    model = mb.Transformer(mb.vary(CONFIG, tie="none"))
    model.head.output = nn.Sequential(nn.Linear(24, 5), nn.Linear(5, 61, bias=False))
    return model


def lstm():
    model = mb.Recurrent(mb.RecurrentConfig(vocab=61, width=12))
    model.probe = nn.Linear(12, 3)
    return model


CHANGED = [extended, widened, shortened, adapted, with_head_of_its_own, lstm]


def count(model):
    return sum(weight.numel() for weight in {id(weight): weight for weight in model.parameters()}.values())


@pytest.mark.parametrize("build", CHANGED)
def test_a_changed_model_has_the_parameters_that_are_there(build):
    model = build()
    costs = mb.account(model)
    assert costs.parameters == costs.active_parameters == count(model)
    assert sum(costs.not_covered.values()) == count(model) - mb.account(model.config).parameters != 0
    assert costs.to_dict()["not_covered"] == costs.not_covered


def test_the_modules_that_the_closed_form_does_not_cover_are_named():
    assert mb.account(extended()).not_covered == {"decoder.*.extra": 3 * (24 * 7 + 7), "decoder.*": 3 * 5}
    assert mb.account(shortened()).not_covered == {"decoder.*.attention_norm": -2 * 24}
    assert mb.account(mb.Transformer(CONFIG)).not_covered == {}
    assert mb.account(mb.Transformer(mb.vary(CONFIG, norm="batch"))).not_covered == {}


def test_a_quantized_model_is_counted_by_its_configuration():
    model = mb.quantize(mb.Transformer(mb.vary(CONFIG, width=64)), bits=8)
    assert mb.account(model).parameters == mb.account(mb.vary(CONFIG, width=64)).parameters


@pytest.mark.parametrize("build", [extended, widened, with_head_of_its_own])
def test_a_folder_has_the_parameters_that_it_stores(build, tmp_path, capsys):
    model = build()
    model.save_pretrained(tmp_path)
    assert mb.account(tmp_path).parameters == count(model)
    assert mb.account(tmp_path).not_covered == mb.account(model).not_covered
    assert run(["account", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{count(model):,} parameters" in out.splitlines()[0]
    assert "the FLOPs and the memory below leave them out" in out


@pytest.mark.parametrize("changes", [{"norm": "batch"}, {"tie": "none"}, {"norm": "rms", "positions": "rotary"}])
def test_a_folder_of_a_plain_model_is_covered(changes, tmp_path):
    model = mb.Transformer(mb.vary(CONFIG, **changes))
    model.save_pretrained(tmp_path, max_shard_size=2**13)
    assert mb.account(tmp_path).parameters == count(model)
    assert mb.account(tmp_path).not_covered == {}


def test_the_model_card_says_how_many_parameters_were_trained(tmp_path):
    ids = torch.randint(61, (3, 11))
    recipe = {
        "data": {"corpus": "kjv"},
        "model": {"family": "gpt", "vocab": 61, "width": 24, "depth": 3, "heads": 2, "context": 17},
        "train": {"steps": 1, "warmup": 0, "device": "cpu", "compile": "no", "eval_every": 0},
    }
    batches = [({"source": ids}, ids)]
    trained = mb.train(
        recipe, out=tmp_path / "run", model_class=AdapterTransformer, batches=batches, progress=False
    ).model
    card = (tmp_path / "run/README.md").read_text(encoding="utf-8")
    assert f"{count(trained):,} parameters" in card
    assert mb.account(tmp_path / "run").parameters == count(trained)


# -- recipes -------------------------------------------------------------------------------------------------------


def test_a_recipe_is_counted_as_the_model_that_it_trains(capsys):
    recipe = read_recipe("demo", ["model.depth=2"])
    config = build_model_config(recipe, recipe.tokenizer.vocab)
    assert mb.account("demo", overrides=["model.depth=2"]).parameters == count(mb.Transformer(config))
    assert run(["account", "demo", "model.depth=2"]) == 0
    assert f"{count(mb.Transformer(config)):,} parameters" in capsys.readouterr().out.splitlines()[0]


def test_a_recipe_file_is_counted(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(read_recipe("demo").to_toml(), encoding="utf-8")
    assert mb.account(path).parameters == mb.account("demo").parameters


def test_sizes_that_follow_from_the_data_are_asked_for(capsys):
    with pytest.raises(mb.ConfigError, match=r"give model\.classes=… as well"):
        mb.account("conll2003")
    assert run(["account", "reverse"]) == 2
    assert "give model.vocab=…" in capsys.readouterr().err
    config = build_model_config(read_recipe("reverse"), 23)
    assert mb.account("reverse", overrides={"model.vocab": 23}).parameters == count(mb.Transformer(config))


def test_a_name_that_is_nothing_is_an_error_that_suggests_one():
    with pytest.raises(mb.ConfigError, match="gpt2"):
        mb.account("gtp2")
