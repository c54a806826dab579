"""Warm starts: configuration, weights and tokenizer from a folder, the head from the objective, resumed bit for bit."""

import json
import random

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from training_support import WORDS, assert_same_run, assert_same_weights, train, train_until, weights, write_corpora

import monoblock as mb
from monoblock.config import ModelConfig
from monoblock.errors import ConfigError, FileError
from monoblock.model import Transformer
from monoblock.tasks.finetuning import recipe_for
from monoblock.tasks.recipe import model_config, read
from monoblock.tasks.run import prepare
from monoblock.training.events import Chosen

SIZES = {"family": "bert", "width": 22, "depth": 2, "heads": 2, "hidden": 34, "context": 31}
TRAIN = {"steps": 7, "batch": 5, "warmup": 2, "save_every": 3, "eval_every": 7, "device": "cpu", "lr": 3e-3}


def write(path, **sections):
    """A recipe file."""
    path.write_text(tomli_w.dumps(sections))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Corpora, and the run of a masked language model on them."""
    folder = tmp_path_factory.mktemp("warm")
    write_corpora(folder)
    draw = random.Random(5)
    rows = (folder / "text.txt").read_text().split(".\n")
    (folder / "labelled.tsv").write_text("".join(f"{draw.choice(['good', 'bad'])}\t{row}\n" for row in rows[:61]))
    (folder / "three.tsv").write_text("".join(f"{draw.choice('abc')}\t{row}\n" for row in rows[:61]))
    tagged = "".join("".join(f"{word} {len(word)}\n" for word in row.split()) + "\n" for row in rows[:47])
    (folder / "tagged.conll").write_text(tagged)
    recipe = write(
        folder / "masked.toml",
        data={"corpus": str(folder / "text.txt")},
        tokenizer={"kind": "wordpiece", "vocab": 60},
        model={**SIZES, "head": "masked_lm"},
        train={**TRAIN, "objective": "masked"},
    )
    train(recipe, folder / "masked")
    return folder


def warm(place, path, objective, corpus, start="masked", *, model=None, **more):
    return write(
        path,
        data={"corpus": str(place / corpus)},
        model={"folder": str(place / start), **(model or {})},
        train={**TRAIN, "objective": objective, **more},
    )


# -- what is taken over and what is fresh ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "corpus", "outputs"), [("classify", "labelled.tsv", 2), ("label", "tagged.conll", 3)]
)
def test_a_new_head_is_fresh_and_everything_else_is_the_folders(place, tmp_path, objective, corpus, outputs):
    run = prepare(read(str(warm(place, tmp_path / "warm.toml", objective, corpus))), tmp_path / "out")
    stored, own = load_file(place / "masked" / "model.safetensors"), weights(run.model)
    body = {name: tensor for name, tensor in own.items() if not name.startswith("head.")}
    assert_same_weights(body, {name: tensor for name, tensor in stored.items() if not name.startswith("head.")})
    assert own["head.output.weight"].shape == (outputs, 22)
    named = set(run.begun.why.removeprefix("fresh: ").split(", "))
    assert named == {name for name in own if name.startswith("head.")}
    assert run.ground.tokenizer.fingerprint == mb.Tokenizer.from_pretrained(place / "masked").fingerprint


def test_a_run_goes_on_from_a_head_of_the_same_kind(place, tmp_path):
    run = prepare(read(str(warm(place, tmp_path / "warm.toml", "masked", "text.txt"))), tmp_path / "out")
    assert_same_weights(weights(run.model), load_file(place / "masked" / "model.safetensors"))
    assert run.begun.why == "fresh: nothing"


def test_weights_are_the_runs_own_and_the_folder_is_left_as_it_is(place, tmp_path):
    before = (place / "masked" / "model.safetensors").read_bytes()
    run, events = train(warm(place, tmp_path / "warm.toml", "masked", "text.txt"), tmp_path / "out")
    count = sum(tensor.numel() for tensor in run.model.state_dict().values())
    assert Chosen(f"begins with {count:,} weights of {place / 'masked'}", "fresh: nothing") in events
    assert (place / "masked" / "model.safetensors").read_bytes() == before
    stored = load_file(place / "masked" / "model.safetensors")
    assert not torch.equal(run.model.state_dict()["input.token.weight"], stored["input.token.weight"])


def test_dropout_may_be_changed_and_structure_may_not(place, tmp_path):
    recipe = warm(place, tmp_path / "warm.toml", "classify", "labelled.tsv", model={"dropout": 0.3, "pooling": "mean"})
    config = model_config(read(str(recipe)), 60, classes=2)
    assert isinstance(config, ModelConfig)
    assert {block.dropout for block in config.encoder.layers()} == {0.3}
    assert config.head.pooling == "mean"
    for knob, value in {"heads": 11, "width": 44, "norm_place": "pre", "activation": "relu"}.items():
        with pytest.raises(ConfigError, match=rf"model.{knob}=.* is not what the weights .* leave it out"):
            model_config(read(str(recipe), [f"model.{knob}={value}"]), 60, classes=2)
    assert model_config(read(str(recipe), ["model.heads=2"]), 60, classes=2) == config


def test_a_folder_on_the_command_line_replaces_the_recipes_own_sizes(place):
    recipe = read("languages", [f"model.folder={place / 'masked'}", "model.head_dropout=0.2"])
    assert recipe.model == {"folder": str(place / "masked"), "dropout": 0.1, "head_dropout": 0.2}


# -- a chain: masked -> classifier -> classifier -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(place):
    train(warm(place, place / "classify.toml", "classify", "labelled.tsv"), place / "classifier")
    return place / "classifier"


def test_a_run_from_a_start_is_a_folder_of_its_own(classifier, tmp_path):
    data = json.loads((classifier / "config.json").read_text())
    assert data["format"] == "monoblock"
    assert data["tokenizer"] == mb.Tokenizer.from_pretrained(classifier).fingerprint
    assert json.loads((classifier / "labels.json").read_text()) == ["bad", "good"]
    model = Transformer.from_pretrained(classifier)
    assert model(torch.randint(1, 50, (3, 11))).shape == (3, 2)


def test_a_head_whose_classes_are_others_is_refused_in_one_line_unless_a_fresh_one_is_asked_for(
    place, classifier, tmp_path
):
    recipe = warm(place, tmp_path / "warm.toml", "classify", "three.tsv", "classifier")
    with pytest.raises(ConfigError, match=r"a label 'a' that the head .* does not know: it has bad, good; .*fresh"):
        prepare(read(str(recipe)), tmp_path / "out")
    with pytest.raises(ConfigError, match="knows 2 classes, and 3 are asked for"):
        model_config(read(str(recipe)), 60, classes=3)
    run = prepare(read(str(recipe), ["model.head=fresh"]), tmp_path / "out")
    assert run.model.config.head.classes == 3
    assert "head.output.weight" in run.begun.why


def test_labels_keep_the_order_of_the_head(place, classifier, tmp_path):
    (tmp_path / "one.tsv").write_text("good\tthe king said go up\n" * 9)
    recipe = write(
        tmp_path / "warm.toml",
        data={"corpus": str(tmp_path / "one.tsv")},
        model={"folder": str(classifier)},
        train={**TRAIN, "objective": "classify"},
    )
    run = prepare(read(str(recipe)), tmp_path / "out")
    assert run.ground.labels == ["bad", "good"]
    assert set(run.ground.make(run.ground.plan.at(0)).labels.tolist()) == {1}


# -- how long, and which model a run ends with -------------------------------------------------------------------------


def test_passes_become_steps_and_shares_of_them_numbers(place, tmp_path):
    recipe = warm(
        place, tmp_path / "warm.toml", "classify", "labelled.tsv", epochs=4, warmup=0.25, save_every=0.5, batch=9
    )
    run = prepare(read(str(recipe)), tmp_path / "out")
    part = run.recipe.train  # 54 rows train
    assert (part.steps, part.warmup, part.save_every, part.eval_every) == (24, 6, 12, 7)
    assert read(str(tmp_path / "out" / "recipe.toml")).train == part
    assert prepare(read(str(recipe), ["train.steps=5"]), tmp_path / "other").recipe.train.steps == 5


def test_the_best_checkpoint_can_be_the_final_model(place, tmp_path):
    """With a rate that ruins it: the first evaluation stays the best."""
    recipe = warm(
        place, tmp_path / "warm.toml", "masked", "text.txt", best=True, eval_every=1, save_every=1, lr=90.0, warmup=99
    )
    run, _ = train(recipe, tmp_path / "out")
    best = run.trainer.best["step"]
    assert best < TRAIN["steps"]
    stored = load_file(tmp_path / "out" / "checkpoints" / f"step-{best}" / "model.safetensors")
    assert_same_weights(load_file(tmp_path / "out" / "model.safetensors"), stored)
    assert run.figures["val_loss"] == pytest.approx(run.trainer.best["loss"], rel=1e-6)


def test_texts_can_be_cut_otherwise_in_every_epoch(place, tmp_path):
    """BPE-dropout for classifiers and for masked tokens a text at a time: the same text, other pieces."""
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": "the king said unto them"}) + "\n" for _ in range(9))
    )
    for objective, corpus in (("classify", place / "labelled.tsv"), ("masked", tmp_path / "texts.jsonl")):
        recipe = write(
            tmp_path / "cut.toml",
            data={"corpus": str(corpus), "packing": "documents"},
            tokenizer={"kind": "bpe", "vocab": 300, "dropout": 0.5},
            model={**SIZES, "head": "classifier" if objective == "classify" else "masked_lm"},
            train={**TRAIN, "objective": objective, "batch": 3, "mask_rate": 0.0},
        )
        run = prepare(read(str(recipe)), tmp_path / objective)
        ground, tokenizer = run.ground, run.ground.tokenizer
        batches = [ground.make(ground.plan.at(step)) for step in range(2 * ground.plan.batches)]
        seen = [row[row != tokenizer.pad_id].tolist() for batch in batches for row in batch.inputs["source"]]
        assert all(ids[0] == tokenizer.cls_id and ids[-1] == tokenizer.id("<sep>") for ids in seen)
        texts = [tokenizer.decode(ids) for ids in seen]
        assert len({tuple(ids) for ids in seen}) > len(set(texts))
        again = ground.make(ground.plan.at(0)).inputs["source"]
        assert torch.equal(again, batches[0].inputs["source"])


# -- published folders -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny BERT without a head, randomly initialised, as transformers saves it, with a vocabulary of words."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("published")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    sizes = {"hidden_size": 22, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 34}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=31, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


def test_a_published_encoder_becomes_a_classifier_in_a_folder_of_ours(published, place, tmp_path):
    recipe = warm(published.parent, tmp_path / "warm.toml", "classify", str(place / "labelled.tsv"), published.name)
    run, _ = train(recipe, tmp_path / "out")
    batch = run.ground.make(run.ground.plan.at(0))
    for ids, real in zip(batch.inputs["source"], batch.inputs["attention_mask"], strict=True):
        assert ids[0] == 2  # [CLS]
        assert ids[real][-1] == 3  # [SEP]
    assert "head.pooler.weight" not in run.begun.why  # BERT's own goes on
    loaded = Transformer.from_pretrained(tmp_path / "out")
    assert_same_weights(weights(loaded), weights(run.model))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["format"] == "monoblock"
    told = mb.Tokenizer.from_pretrained(tmp_path / "out").encode("the king said", add_specials=True)
    assert told == [2, 6, 7, 8, 3]


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_a_warm_run_dropped_and_resumed_ends_as_one_never_stopped(place, tmp_path):
    recipe = warm(place, tmp_path / "warm.toml", "classify", "labelled.tsv", model={"dropout": 0.2})
    train(recipe, tmp_path / "whole")
    train_until(recipe, tmp_path / "broken", 4)
    train(recipe, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "broken", tmp_path / "whole", TRAIN["steps"])


def test_a_run_is_not_resumed_from_other_weights(place, tmp_path):
    Transformer.from_pretrained(place / "masked").save_pretrained(tmp_path / "start")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "start" / name).write_bytes((place / "masked" / name).read_bytes())
    recipe = warm(tmp_path, tmp_path / "warm.toml", "classify", str(place / "labelled.tsv"), "start")
    train_until(recipe, tmp_path / "out", 4)
    model = Transformer.from_pretrained(tmp_path / "start")
    with torch.no_grad():
        model.get_parameter("encoder.0.attention.query.weight")[3, 5] += 1e-3
    model.save_pretrained(tmp_path / "start")
    with pytest.raises(FileError, match=r"another set of weights in model\.folder; put it back"):
        train(recipe, tmp_path / "out", resume=True)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_or_holds_no_model_is_said_in_one_line(place, tmp_path):
    with pytest.raises(FileError, match="nowhere: there is no such folder"):
        prepare(read(str(warm(place, tmp_path / "a.toml", "masked", "text.txt", "nowhere"))), tmp_path / "out")
    (place / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileError, match=r"empty is no model folder: it has no config\.json"):
        prepare(read(str(warm(place, tmp_path / "b.toml", "masked", "text.txt", "empty"))), tmp_path / "out")


def test_a_model_of_another_kind_is_refused(place, tmp_path):
    with pytest.raises(ConfigError, match="'causal' trains decoder-only models"):
        prepare(read(str(warm(place, tmp_path / "warm.toml", "causal", "text.txt"))), tmp_path / "out")


def test_two_names_for_one_model_are_refused(place):
    with pytest.raises(ConfigError, match="a preset, a family or a folder with weights; write one of the three"):
        read("languages", [f"model.folder={place}", "model.family=bert"])


def test_a_validation_split_with_a_fault_is_no_reason_to_hold_rows_back(place, tmp_path):
    (tmp_path / "train.tsv").write_text((place / "labelled.tsv").read_text())
    assert recipe_for(str(place / "masked"), str(tmp_path)).data.held == 6
    (tmp_path / "valid.tsv").write_bytes(b"good\t\xff\n")
    with pytest.raises(FileError, match=r"valid.tsv, line 1: a byte is not UTF-8"):
        recipe_for(str(place / "masked"), str(tmp_path))
