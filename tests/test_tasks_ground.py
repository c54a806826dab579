"""The ground a recipe stands on: every place asked once, the same batch for the same step, labels from all there is."""

import json
import math

import numpy as np
import pytest
import torch

from monoblock.cli.drawing import Drawing
from monoblock.data.readers import read_conll
from monoblock.errors import ConfigError, FileError
from monoblock.families import bert
from monoblock.knobs import vary
from monoblock.model import Transformer
from monoblock.tasks.ground import evaluate
from monoblock.tasks.lay import lay
from monoblock.tasks.recipe import Recipe, from_dict, model_config
from monoblock.tasks.run import prepare
from monoblock.training.events import Finished, Stepped
from monoblock.training.objectives import IGNORE, Loss

SIZES = {"width": 16, "depth": 1, "heads": 2}
MODELS = {
    "causal": {"family": "gpt", "context": 19, **SIZES},
    "masked": {"family": "bert", "head": "masked_lm", "context": 19, **SIZES},
    "spans": {"family": "t5", "context": 19, **SIZES},
    "pairs": {"family": "vaswani", "context": 97, **SIZES},
    "classify": {"family": "bert", "head": "classifier", "context": 97, **SIZES},
    "label": {"family": "bert", "head": "tagger", "context": 97, **SIZES},
}
WORDS = ["the", "king", "of", "the", "north", "went", "up", "and", "the", "king", "of", "the", "south", "came", "down"]


@pytest.fixture
def corpora(tmp_path):
    """A small file for every objective."""
    text = "".join(f"{' '.join(WORDS[n % 5 :])} {n}.\n" for n in range(300))
    pairs = "".join(f"{' '.join(WORDS[n % 5 :])} {n}\t{' '.join(WORDS[n % 7 :])} {n}\n" for n in range(100))
    labelled = "".join(json.dumps({"text": f"{WORDS[n % 11]} {n}", "label": f"l{n % 3}"}) + "\n" for n in range(60))
    tagged = "".join("".join(f"{word} T{len(word)}\n" for word in WORDS[n % 5 :]) + "\n" for n in range(60))
    files = {"text.txt": text, "pairs.tsv": pairs, "labelled.jsonl": labelled, "tagged.conll": tagged}
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    names = dict.fromkeys(("causal", "masked", "spans"), "text.txt")
    names |= {"pairs": "pairs.tsv", "classify": "labelled.jsonl", "label": "tagged.conll"}
    return {objective: str(tmp_path / name) for objective, name in names.items()}


def recipe(objective, corpora, **parts):
    data = {
        "data": {"corpus": corpora[objective], **parts.pop("data", {})},
        "tokenizer": {"kind": "bpe", "vocab": 400, **parts.pop("tokenizer", {})},
        "model": MODELS[objective],
        "train": {"objective": objective, "batch": 7, "steps": 3, **parts.pop("train", {})},
    }
    return from_dict(Recipe, data)


def ground_of(one):
    return lay(one, one.model["context"])


@pytest.mark.parametrize("objective", MODELS)
def test_a_step_has_the_same_batch_whenever_it_is_asked_for(objective, corpora):
    one = recipe(objective, corpora, tokenizer={"dropout": 0.2 if objective == "pairs" else 0.0})
    first, again = ground_of(one), ground_of(one)
    for step in (0, 5, 2):
        a, b = first.make(first.plan.at(step)), again.make(again.plan.at(step))
        assert a.samples == b.samples
        assert torch.equal(a.labels, b.labels)
        assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
        assert a.asked > 0


@pytest.mark.parametrize("objective", MODELS)
def test_a_model_fresh_from_its_recipe_is_about_as_good_as_chance(objective, corpora):
    """An evaluation that counted padding, or a place twice, would be far from it."""
    one = recipe(objective, corpora)
    ground = ground_of(one)
    torch.manual_seed(0)
    config = model_config(one, ground.tokenizer.vocab_size, **ground.sizes)
    found = evaluate(Transformer(config).eval(), ground, Loss(), torch.device("cpu"))
    choices = len(ground.labels) or ground.tokenizer.vocab_size
    assert found["val_loss"] == pytest.approx(math.log(choices), rel=0.35)
    assert found["val_tokens"] == sum(batch.asked for batch in ground.evaluation())


def test_the_evaluation_does_not_depend_on_the_batch_size(corpora):
    losses = []
    for batch in (3, 7):
        one = recipe("pairs", corpora, train={"batch": batch})
        ground = ground_of(one)
        torch.manual_seed(0)
        model = Transformer(model_config(one, ground.tokenizer.vocab_size)).eval()
        losses.append(evaluate(model, ground, Loss(), torch.device("cpu"))["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_dropped_merges_cut_a_pair_anew_every_epoch_but_never_in_the_evaluation(corpora):
    ground = ground_of(recipe("pairs", corpora, tokenizer={"dropout": 0.5}))
    plain = ground_of(recipe("pairs", corpora))
    batch = ground.plan.at(0)
    first, second = ground.make(batch), ground.make(batch._replace(epoch=1))
    assert first.inputs["source"].tolist() != second.inputs["source"].tolist()
    decode = ground.tokenizer.decode
    assert [decode(row) for row in first.inputs["source"].tolist()] == [
        decode(row) for row in second.inputs["source"].tolist()
    ]
    held, held_plain = next(iter(ground.evaluation())), next(iter(plain.evaluation()))
    assert torch.equal(held.labels, held_plain.labels)


def test_every_word_is_asked_for_once_and_at_its_first_piece(corpora):
    ground = ground_of(recipe("label", corpora, tokenizer={"kind": "char"}))
    words = sum(len(row.words) for row in list(read_conll(corpora["label"]))[54:])
    asked = sum(batch.asked for batch in ground.evaluation())
    assert asked == words
    batch = ground.make(ground.plan.at(0))
    assert int((batch.labels != IGNORE).sum()) < batch.labels.numel()


@pytest.mark.parametrize("objective", ["classify", "label"])
def test_a_limit_keeps_the_labels_of_the_whole_corpus(objective, corpora):
    assert (
        ground_of(recipe(objective, corpora, data={"limit": 1})).labels == ground_of(recipe(objective, corpora)).labels
    )


def test_arrays_are_images_and_other_files_are_texts(tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "train.npz", images=draw.random((13, 8, 8), np.float32), labels=np.arange(13) % 3)
    one = from_dict(
        Recipe,
        {
            "data": {"corpus": str(tmp_path)},
            "model": {"family": "vit", "patch": 2, **SIZES},
            "train": {"objective": "classify", "batch": 5},
        },
    )
    ground = lay(one, None)
    assert ground.sizes == {"classes": 3, "channels": 1, "image": 8}
    assert ground.tokenizer is None
    assert ground.make(ground.plan.at(0)).inputs["source"].shape == (5, 1, 8, 8)


@pytest.mark.parametrize(("objective", "model"), [("causal", "masked"), ("masked", "causal"), ("label", "classify")])
def test_a_model_that_the_objective_cannot_train_is_refused(objective, model, corpora):
    one = recipe(objective, corpora)
    wrong = from_dict(Recipe, {"data": {"corpus": "kjv"}, "model": MODELS[model], "train": {"objective": objective}})
    assert model_config(one, 31)
    with pytest.raises(ConfigError, match=f"train.objective='{objective}' trains"):
        model_config(wrong, 31)


# -- presets ---------------------------------------------------------------------------------------------------------

ENCODERS = ["bert-base", "distilbert", "modernbert-base", "roberta-base"]
HEADS = {"masked": "masked_lm", "classify": "classifier", "label": "tagger"}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("objective", HEADS)
def test_a_published_encoder_gets_the_head_its_objective_needs(name, objective, corpora):
    data = {
        "data": {"corpus": corpora[objective]},
        "tokenizer": {"kind": "bpe", "vocab": 300},
        "model": {"preset": name, "context": 19, **SIZES},
        "train": {"objective": objective, "batch": 7, "steps": 1},
    }
    one = from_dict(Recipe, data)
    ground = lay(one, 19)
    config = model_config(one, ground.tokenizer.vocab_size, **ground.sizes)
    assert config.head.kind == HEADS[objective]
    assert config.tie == ("output" if objective == "masked" else "none")
    batch = ground.make(ground.plan.at(0))
    logits = Transformer(config)(**batch.inputs)
    classes = len(ground.labels) or ground.tokenizer.vocab_size
    assert logits.shape == (7, classes) if objective == "classify" else (*batch.labels.shape, classes)
    assert Loss().of(logits, batch.labels) > 0


def test_a_head_that_is_named_stays_named(corpora):
    data = {
        "data": {"corpus": "kjv"},
        "model": {"preset": "bert-base", "head": "pooled"},
        "train": {"objective": "masked"},
    }
    with pytest.raises(ConfigError, match="this one is encoder-only with 'pooled'"):
        model_config(from_dict(Recipe, data), 31)


def test_a_masked_lm_head_put_on_a_preset_is_berts_own():
    sizes = {"vocab": 31, "context": 19, **SIZES}
    assert vary(bert(**sizes), head="masked_lm") == bert(**sizes, head="masked_lm")
    assert vary(bert(**sizes), head="tagger", classes=5) == bert(**sizes, head="tagger", classes=5)
    assert vary(bert(**sizes, head="masked_lm"), head="pooled") == bert(**sizes)


@pytest.mark.parametrize("model", [{"preset": "vit-b16", "patch": 2}, {"family": "vit", "patch": 2}])
def test_images_are_trained_on_by_preset_as_by_family(model, tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "train.npz", images=draw.random((13, 8, 8), np.float32), labels=np.arange(13) % 3)
    data = {
        "data": {"corpus": str(tmp_path)},
        "model": {**model, **SIZES},
        "train": {"objective": "classify", "batch": 5, "steps": 2, "device": "cpu"},
    }
    run = prepare(from_dict(Recipe, data), tmp_path / "run")
    events = list(run.events())
    torch.use_deterministic_algorithms(False)
    assert run.model.config.head.classes == 3
    assert [event.tokens for event in events if isinstance(event, Stepped)] == [5, 10]
    assert run.ground.unit == "images"


def test_speed_is_told_in_what_is_asked(corpora, capsys):
    units = {objective: ground_of(recipe(objective, corpora)).unit for objective in MODELS}
    assert units == {
        "causal": "tokens",
        "masked": "tokens",
        "spans": "tokens",
        "pairs": "tokens",
        "classify": "texts",
        "label": "words",
    }
    drawing = Drawing(3, "images")
    drawing.show(Stepped(1, 2.0, 0.1, 1.0, 5, 0.1))
    drawing.show(Finished(1, False))
    assert "images/s" in capsys.readouterr().err


def test_a_validation_split_with_a_fault_is_no_missing_one(tmp_path):
    (tmp_path / "train.tsv").write_text("a\tone\nb\ttwo\n" * 20, encoding="utf-8")
    one = recipe("classify", {"classify": str(tmp_path)})
    assert ground_of(one).evaluation is None
    (tmp_path / "valid.tsv").write_bytes(b"a\tone\nb\t\xff\n")
    with pytest.raises(FileError, match=r"valid.tsv, line 2: a byte is not UTF-8"):
        ground_of(one)
