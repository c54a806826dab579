"""Warm starts: configuration, weights and tokenizer from a folder, the head from the objective, resumed bit for bit."""

import json
import random

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from training_support import (
    WORDS,
    assert_same_run,
    assert_same_weights,
    clone_weights,
    train_to_end,
    train_until,
    write_corpora,
)

import monoblock as mb
from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError, FileError
from monoblock.model import Transformer
from monoblock.runs.finetune import build_finetuning_recipe
from monoblock.runs.recipe import build_model_config, read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.events import DecisionEvent

SIZES = {"family": "bert", "width": 22, "depth": 2, "heads": 2, "hidden": 34, "context": 31}
TRAIN = {"steps": 7, "batch": 5, "warmup": 2, "save_every": 3, "eval_every": 7, "device": "cpu", "lr": 3e-3}


def write(path, **sections):
    """Write a recipe file."""
    path.write_text(tomli_w.dumps(sections))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpora, and a masked language model trained on them in the sub-folder `masked`."""
    folder = tmp_path_factory.mktemp("start")
    write_corpora(folder)
    rng = random.Random(5)
    rows = (folder / "text.txt").read_text().split(".\n")
    (folder / "labelled.tsv").write_text("".join(f"{rng.choice(['good', 'bad'])}\t{row}\n" for row in rows[:61]))
    (folder / "three.tsv").write_text("".join(f"{rng.choice('abc')}\t{row}\n" for row in rows[:61]))
    tagged = "".join("".join(f"{word} {len(word)}\n" for word in row.split()) + "\n" for row in rows[:47])
    (folder / "tagged.conll").write_text(tagged)
    recipe = write(
        folder / "masked.toml",
        data={"corpus": str(folder / "text.txt")},
        tokenizer={"kind": "wordpiece", "vocab": 60},
        model={**SIZES, "head": "masked_lm"},
        train={**TRAIN, "objective": "masked_lm"},
    )
    train_to_end(recipe, folder / "masked_lm")
    return folder


def warm_recipe(folder, path, objective, corpus, start="masked_lm", *, model=None, **more):
    return write(
        path,
        data={"corpus": str(folder / corpus)},
        model={"folder": str(folder / start), **(model or {})},
        train={**TRAIN, "objective": objective, **more},
    )


# -- which weights are copied and which are fresh ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "corpus", "outputs"),
    [("classification", "labelled.tsv", 2), ("token_classification", "tagged.conll", 3)],
)
def test_a_new_head_is_fresh_and_all_other_weights_are_copied(folder, tmp_path, objective, corpus, outputs):
    run = prepare_run(
        read_recipe(str(warm_recipe(folder, tmp_path / "warm.toml", objective, corpus))), tmp_path / "out"
    )
    stored, weights = load_file(folder / "masked_lm" / "model.safetensors"), clone_weights(run.model)
    body = {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}
    assert_same_weights(body, {name: tensor for name, tensor in stored.items() if not name.startswith("head.")})
    assert weights["head.output.weight"].shape == (outputs, 22)
    fresh = set(run.warm_start_event.reason.removeprefix("fresh: ").split(", "))
    assert fresh == {name for name in weights if name.startswith("head.")}
    assert run.task_data.tokenizer.fingerprint == mb.Tokenizer.from_pretrained(folder / "masked_lm").fingerprint


def test_a_head_of_the_same_kind_is_copied(folder, tmp_path):
    run = prepare_run(
        read_recipe(str(warm_recipe(folder, tmp_path / "warm.toml", "masked_lm", "text.txt"))), tmp_path / "out"
    )
    assert_same_weights(clone_weights(run.model), load_file(folder / "masked_lm" / "model.safetensors"))
    assert run.warm_start_event.reason == "fresh: nothing"


def test_training_does_not_change_the_folder_it_starts_from(folder, tmp_path):
    before = (folder / "masked_lm" / "model.safetensors").read_bytes()
    run, events = train_to_end(warm_recipe(folder, tmp_path / "warm.toml", "masked_lm", "text.txt"), tmp_path / "out")
    count = sum(tensor.numel() for tensor in run.model.state_dict().values())
    assert DecisionEvent(f"begins with {count:,} weights of {folder / 'masked_lm'}", "fresh: nothing") in events
    assert (folder / "masked_lm" / "model.safetensors").read_bytes() == before
    stored = load_file(folder / "masked_lm" / "model.safetensors")
    assert not torch.equal(run.model.state_dict()["input.token.weight"], stored["input.token.weight"])


def test_dropout_may_be_changed_and_structure_may_not(folder, tmp_path):
    recipe = warm_recipe(
        folder, tmp_path / "warm.toml", "classification", "labelled.tsv", model={"dropout": 0.3, "pooling": "mean"}
    )
    config = build_model_config(read_recipe(str(recipe)), 60, classes=2)
    assert isinstance(config, ModelConfig)
    assert {block.dropout for block in config.encoder.layers()} == {0.3}
    assert config.head.pooling == "mean"
    for knob, value in {"heads": 11, "width": 44, "norm_place": "pre", "activation": "relu"}.items():
        with pytest.raises(ConfigError, match=rf"model.{knob}=.* is not what the weights .* leave it out"):
            build_model_config(read_recipe(str(recipe), [f"model.{knob}={value}"]), 60, classes=2)
    assert build_model_config(read_recipe(str(recipe), ["model.heads=2"]), 60, classes=2) == config


def test_a_folder_on_the_command_line_replaces_the_sizes_of_the_recipe(folder):
    recipe = read_recipe("languages", [f"model.folder={folder / 'masked_lm'}", "model.head_dropout=0.2"])
    assert recipe.model == {"folder": str(folder / "masked_lm"), "dropout": 0.1, "head_dropout": 0.2}


# -- a chain: masked -> classifier -> classifier -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(folder):
    train_to_end(warm_recipe(folder, folder / "classify.toml", "classification", "labelled.tsv"), folder / "classifier")
    return folder / "classifier"


def test_a_fine_tuned_model_folder_is_complete(classifier, tmp_path):
    data = json.loads((classifier / "config.json").read_text())
    assert data["format"] == "monoblock"
    assert data["tokenizer"] == mb.Tokenizer.from_pretrained(classifier).fingerprint
    assert json.loads((classifier / "labels.json").read_text()) == ["bad", "good"]
    model = Transformer.from_pretrained(classifier)
    assert model(torch.randint(1, 50, (3, 11))).shape == (3, 2)


def test_a_head_with_other_classes_is_refused_unless_a_fresh_one_is_requested(folder, classifier, tmp_path):
    recipe = warm_recipe(folder, tmp_path / "warm.toml", "classification", "three.tsv", "classifier")
    with pytest.raises(ConfigError, match=r"label 'a' of the data is not a label of the model .*: bad, good; .*fresh"):
        prepare_run(read_recipe(str(recipe)), tmp_path / "out")
    with pytest.raises(ConfigError, match="has 2 classes, but 3 are needed"):
        build_model_config(read_recipe(str(recipe)), 60, classes=3)
    run = prepare_run(read_recipe(str(recipe), ["model.head=fresh"]), tmp_path / "out")
    assert run.model.config.head.classes == 3
    assert "head.output.weight" in run.warm_start_event.reason


def test_labels_keep_the_order_of_the_head(folder, classifier, tmp_path):
    (tmp_path / "one.tsv").write_text("good\tthe king said go up\n" * 9)
    recipe = write(
        tmp_path / "warm.toml",
        data={"corpus": str(tmp_path / "one.tsv")},
        model={"folder": str(classifier)},
        train={**TRAIN, "objective": "classification"},
    )
    run = prepare_run(read_recipe(str(recipe)), tmp_path / "out")
    assert run.task_data.labels == ["bad", "good"]
    assert set(run.task_data.build_batch(run.task_data.batch_plan.batch_at(0)).labels.tolist()) == {1}


# -- the number of steps and the final model -------------------------------------------------------------------------


def test_epochs_become_steps_and_fractions_become_counts(folder, tmp_path):
    recipe = warm_recipe(
        folder, tmp_path / "warm.toml", "classification", "labelled.tsv", epochs=4, warmup=0.25, save_every=0.5, batch=9
    )
    run = prepare_run(read_recipe(str(recipe)), tmp_path / "out")
    section = run.recipe.train  # 54 rows train
    assert (section.steps, section.warmup, section.save_every, section.eval_every) == (24, 6, 12, 7)
    assert read_recipe(str(tmp_path / "out" / "recipe.toml")).train == section
    assert prepare_run(read_recipe(str(recipe), ["train.steps=5"]), tmp_path / "other").recipe.train.steps == 5


def test_the_best_checkpoint_can_be_the_final_model(folder, tmp_path):
    """The learning rate ruins the model, so that the first evaluation stays the best."""
    recipe = warm_recipe(
        folder,
        tmp_path / "warm.toml",
        "masked_lm",
        "text.txt",
        load_best=True,
        eval_every=1,
        save_every=1,
        lr=90.0,
        warmup=99,
    )
    run, _ = train_to_end(recipe, tmp_path / "out")
    best = run.trainer.best["step"]
    assert best < TRAIN["steps"]
    stored = load_file(tmp_path / "out" / "checkpoints" / f"step-{best}" / "model.safetensors")
    assert_same_weights(load_file(tmp_path / "out" / "model.safetensors"), stored)
    assert run.metrics["val_loss"] == pytest.approx(run.trainer.best["loss"], rel=1e-6)


def test_bpe_dropout_segments_texts_anew_in_every_epoch(folder, tmp_path):
    """For classifiers and for masked documents: the same text, other pieces."""
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": "the king said unto them"}) + "\n" for _ in range(9))
    )
    for objective, corpus in (("classification", folder / "labelled.tsv"), ("masked_lm", tmp_path / "texts.jsonl")):
        recipe = write(
            tmp_path / "cut.toml",
            data={"corpus": str(corpus), "packing": "documents"},
            tokenizer={"kind": "bpe", "vocab": 300, "dropout": 0.5},
            model={**SIZES, "head": "classifier" if objective == "classification" else "masked_lm"},
            train={**TRAIN, "objective": objective, "batch": 3},
            **({"masked_lm": {"mask_rate": 0.0}} if objective == "masked_lm" else {}),
        )
        run = prepare_run(read_recipe(str(recipe)), tmp_path / objective)
        data, tokenizer = run.task_data, run.task_data.tokenizer
        batches = [data.build_batch(data.batch_plan.batch_at(step)) for step in range(2 * data.batch_plan.batches)]
        seen = [row[row != tokenizer.pad_id].tolist() for batch in batches for row in batch.inputs["source"]]
        assert all(ids[0] == tokenizer.cls_id and ids[-1] == tokenizer.id("<sep>") for ids in seen)
        texts = [tokenizer.decode(ids) for ids in seen]
        assert len({tuple(ids) for ids in seen}) > len(set(texts))
        again = data.build_batch(data.batch_plan.batch_at(0)).inputs["source"]
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


def test_a_published_encoder_becomes_a_classifier_in_a_folder_of_ours(published, folder, tmp_path):
    recipe = warm_recipe(
        published.parent, tmp_path / "warm.toml", "classification", str(folder / "labelled.tsv"), published.name
    )
    run, _ = train_to_end(recipe, tmp_path / "out")
    batch = run.task_data.build_batch(run.task_data.batch_plan.batch_at(0))
    for ids, valid in zip(batch.inputs["source"], batch.inputs["attention_mask"], strict=True):
        assert ids[0] == 2  # [CLS]
        assert ids[valid][-1] == 3  # [SEP]
    assert "head.pooler.weight" not in run.warm_start_event.reason  # that of BERT is copied
    saved = Transformer.from_pretrained(tmp_path / "out")
    assert_same_weights(clone_weights(saved), clone_weights(run.model))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["format"] == "monoblock"
    ids = mb.Tokenizer.from_pretrained(tmp_path / "out").encode("the king said", add_specials=True)
    assert ids == [2, 6, 7, 8, 3]


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_a_warm_run_that_is_resumed_equals_one_never_stopped(folder, tmp_path):
    recipe = warm_recipe(folder, tmp_path / "warm.toml", "classification", "labelled.tsv", model={"dropout": 0.2})
    train_to_end(recipe, tmp_path / "uninterrupted")
    train_until(recipe, tmp_path / "resumed", 4)
    train_to_end(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "resumed", tmp_path / "uninterrupted", TRAIN["steps"])


def test_a_run_is_not_resumed_from_other_weights(folder, tmp_path):
    Transformer.from_pretrained(folder / "masked_lm").save_pretrained(tmp_path / "start")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "start" / name).write_bytes((folder / "masked_lm" / name).read_bytes())
    recipe = warm_recipe(tmp_path, tmp_path / "warm.toml", "classification", str(folder / "labelled.tsv"), "start")
    train_until(recipe, tmp_path / "out", 4)
    model = Transformer.from_pretrained(tmp_path / "start")
    with torch.no_grad():
        model.get_parameter("encoder.0.attention.query.weight")[3, 5] += 1e-3
    model.save_pretrained(tmp_path / "start")
    with pytest.raises(FileError, match=r"another set of weights in model\.folder; restore the original"):
        train_to_end(recipe, tmp_path / "out", resume=True)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_missing_folder_and_one_without_a_model_are_refused(folder, tmp_path):
    with pytest.raises(FileError, match="nowhere does not exist"):
        prepare_run(
            read_recipe(str(warm_recipe(folder, tmp_path / "a.toml", "masked_lm", "text.txt", "nowhere"))),
            tmp_path / "out",
        )
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileError, match=r"empty is not a model folder: it has no config\.json"):
        prepare_run(
            read_recipe(str(warm_recipe(folder, tmp_path / "b.toml", "masked_lm", "text.txt", "empty"))),
            tmp_path / "out",
        )


def test_a_model_of_another_family_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="'causal_lm' trains decoder-only models"):
        prepare_run(
            read_recipe(str(warm_recipe(folder, tmp_path / "warm.toml", "causal_lm", "text.txt"))), tmp_path / "out"
        )


def test_two_names_for_one_model_are_refused(folder):
    with pytest.raises(ConfigError, match="exactly one of the keys preset, family and folder"):
        read_recipe("languages", [f"model.folder={folder}", "model.family=bert"])


def test_a_faulty_validation_split_raises_instead_of_counting_as_missing(folder, tmp_path):
    (tmp_path / "train.tsv").write_text((folder / "labelled.tsv").read_text())
    assert build_finetuning_recipe(str(folder / "masked_lm"), str(tmp_path)).data.validation_rows == 6
    (tmp_path / "valid.tsv").write_bytes(b"good\t\xff\n")
    with pytest.raises(FileError, match=r"valid.tsv, line 1: a byte is not UTF-8"):
        build_finetuning_recipe(str(folder / "masked_lm"), str(tmp_path))
