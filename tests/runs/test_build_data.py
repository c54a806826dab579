"""Task data: each target counts once, a step always has the same batch, labels come from the whole corpus."""

import json
import math

import numpy as np
import pytest
import torch

from monoblock.config.families import bert
from monoblock.config.knobs import vary
from monoblock.data.encode import IGNORE_INDEX
from monoblock.data.readers.tables import read_conll
from monoblock.errors import ConfigError, FileError
from monoblock.model import Transformer
from monoblock.runs.build_data import build_task_data
from monoblock.runs.progress import TrainingProgress
from monoblock.runs.recipe import build_model_config, parse_recipe
from monoblock.runs.train import prepare_run
from monoblock.tasks.task_data import validate
from monoblock.training.events import FinishedEvent, StepEvent
from monoblock.training.loss import CrossEntropyLoss

SIZES = {"width": 16, "depth": 1, "heads": 2}
MODELS = {
    "causal_lm": {"family": "gpt", "context": 19, **SIZES},
    "masked_lm": {"family": "bert", "head": "masked_lm", "context": 19, **SIZES},
    "span_corruption": {"family": "t5", "context": 19, **SIZES},
    "seq2seq": {"family": "vaswani", "context": 97, **SIZES},
    "classification": {"family": "bert", "head": "classifier", "context": 97, **SIZES},
    "token_classification": {"family": "bert", "head": "tagger", "context": 97, **SIZES},
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
    names = dict.fromkeys(("causal_lm", "masked_lm", "span_corruption"), "text.txt")
    names |= {"seq2seq": "pairs.tsv", "classification": "labelled.jsonl", "token_classification": "tagged.conll"}
    return {objective: str(tmp_path / name) for objective, name in names.items()}


def make_recipe(objective, corpora, **parts):
    data = {
        "data": {"corpus": corpora[objective], **parts.pop("data", {})},
        "tokenizer": {"kind": "bpe", "vocab": 400, **parts.pop("tokenizer", {})},
        "model": MODELS[objective],
        "train": {"objective": objective, "batch": 7, "steps": 3, **parts.pop("train", {})},
    }
    return parse_recipe(data)


def build_data(recipe):
    return build_task_data(recipe, recipe.model["context"])


@pytest.mark.parametrize("objective", MODELS)
def test_a_step_always_has_the_same_batch(objective, corpora):
    recipe = make_recipe(objective, corpora, tokenizer={"dropout": 0.2 if objective == "seq2seq" else 0.0})
    first, again = build_data(recipe), build_data(recipe)
    for step in (0, 5, 2):
        a, b = first.build_batch(first.batch_plan.batch_at(step)), again.build_batch(again.batch_plan.batch_at(step))
        assert a.samples == b.samples
        assert torch.equal(a.labels, b.labels)
        assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
        assert a.target_count > 0


@pytest.mark.parametrize("objective", MODELS)
def test_the_loss_of_an_untrained_model_is_close_to_chance(objective, corpora):
    """An evaluation that counted padding, or a target twice, would be far from it."""
    recipe = make_recipe(objective, corpora)
    data = build_data(recipe)
    torch.manual_seed(0)
    config = build_model_config(recipe, data.tokenizer.vocab_size, **data.model_sizes)
    metrics = validate(Transformer(config).eval(), data, CrossEntropyLoss(), torch.device("cpu"))
    choices = len(data.labels) or data.tokenizer.vocab_size
    assert metrics["val_loss"] == pytest.approx(math.log(choices), rel=0.35)
    assert metrics["val_tokens"] == sum(batch.target_count for batch in data.evaluation_batches())


def test_the_evaluation_does_not_depend_on_the_batch_size(corpora):
    losses = []
    for batch in (3, 7):
        recipe = make_recipe("seq2seq", corpora, train={"batch": batch})
        data = build_data(recipe)
        torch.manual_seed(0)
        model = Transformer(build_model_config(recipe, data.tokenizer.vocab_size)).eval()
        losses.append(validate(model, data, CrossEntropyLoss(), torch.device("cpu"))["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bpe_dropout_segments_a_pair_anew_every_epoch_but_not_in_the_evaluation(corpora):
    data = build_data(make_recipe("seq2seq", corpora, tokenizer={"dropout": 0.5}))
    plain = build_data(make_recipe("seq2seq", corpora))
    batch = data.batch_plan.batch_at(0)
    first, second = data.build_batch(batch), data.build_batch(batch._replace(epoch=1))
    assert first.inputs["source"].tolist() != second.inputs["source"].tolist()
    decode = data.tokenizer.decode
    assert [decode(row) for row in first.inputs["source"].tolist()] == [
        decode(row) for row in second.inputs["source"].tolist()
    ]
    validation, plain_validation = next(iter(data.evaluation_batches())), next(iter(plain.evaluation_batches()))
    assert torch.equal(validation.labels, plain_validation.labels)


def test_every_word_is_a_target_once_at_its_first_piece(corpora):
    recipe = make_recipe("token_classification", corpora, tokenizer={"kind": "char"}, data={"split": "last"})
    data = build_data(recipe)
    words = sum(len(row.words) for row in list(read_conll(corpora["token_classification"]))[54:])
    num_targets = sum(batch.target_count for batch in data.evaluation_batches())
    assert num_targets == words
    batch = data.build_batch(data.batch_plan.batch_at(0))
    assert int((batch.labels != IGNORE_INDEX).sum()) < batch.labels.numel()


@pytest.mark.parametrize("objective", ["classification", "token_classification"])
def test_a_limit_keeps_the_labels_of_the_whole_corpus(objective, corpora):
    assert (
        build_data(make_recipe(objective, corpora, data={"limit": 1})).labels
        == build_data(make_recipe(objective, corpora)).labels
    )


def test_a_folder_of_arrays_is_read_as_images(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "train.npz", images=rng.random((13, 8, 8), np.float32), labels=np.arange(13) % 3)
    recipe = parse_recipe(
        {
            "data": {"corpus": str(tmp_path)},
            "model": {"family": "vit", "patch": 2, **SIZES},
            "train": {"objective": "classification", "batch": 5},
        },
    )
    data = build_task_data(recipe, None)
    assert data.model_sizes == {"classes": 3, "channels": 1, "image": 8}
    assert data.tokenizer is None
    assert data.build_batch(data.batch_plan.batch_at(0)).inputs["source"].shape == (5, 1, 8, 8)


@pytest.mark.parametrize(
    ("objective", "model"),
    [("causal_lm", "masked_lm"), ("masked_lm", "causal_lm"), ("token_classification", "classification")],
)
def test_a_model_that_the_objective_cannot_train_is_refused(objective, model, corpora):
    recipe = make_recipe(objective, corpora)
    wrong = parse_recipe({"data": {"corpus": "kjv"}, "model": MODELS[model], "train": {"objective": objective}})
    assert build_model_config(recipe, 31)
    with pytest.raises(ConfigError, match=f"train.objective='{objective}' trains"):
        build_model_config(wrong, 31)


# -- presets ---------------------------------------------------------------------------------------------------------

ENCODERS = ["bert-base", "distilbert", "modernbert-base", "roberta-base"]
HEADS = {"masked_lm": "masked_lm", "classification": "classifier", "token_classification": "tagger"}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("objective", HEADS)
def test_a_published_encoder_gets_the_head_its_objective_needs(name, objective, corpora):
    data = {
        "data": {"corpus": corpora[objective]},
        "tokenizer": {"kind": "bpe", "vocab": 300},
        "model": {"preset": name, "context": 19, **SIZES},
        "train": {"objective": objective, "batch": 7, "steps": 1},
    }
    recipe = parse_recipe(data)
    data = build_task_data(recipe, 19)
    config = build_model_config(recipe, data.tokenizer.vocab_size, **data.model_sizes)
    assert config.head.kind == HEADS[objective]
    assert config.tie == ("output" if objective == "masked_lm" else "none")
    batch = data.build_batch(data.batch_plan.batch_at(0))
    logits = Transformer(config)(**batch.inputs)
    classes = len(data.labels) or data.tokenizer.vocab_size
    assert logits.shape == (7, classes) if objective == "classification" else (*batch.labels.shape, classes)
    assert CrossEntropyLoss().from_logits(logits, batch.labels) > 0


def test_an_explicit_head_is_not_replaced(corpora):
    data = {
        "data": {"corpus": "kjv"},
        "model": {"preset": "bert-base", "head": "pooled"},
        "train": {"objective": "masked_lm"},
    }
    with pytest.raises(ConfigError, match="this model is encoder-only with the head 'pooled'"):
        build_model_config(parse_recipe(data), 31)


def test_a_masked_lm_head_added_to_a_preset_is_that_of_bert():
    sizes = {"vocab": 31, "context": 19, **SIZES}
    assert vary(bert(**sizes), head="masked_lm") == bert(**sizes, head="masked_lm")
    assert vary(bert(**sizes), head="tagger", classes=5) == bert(**sizes, head="tagger", classes=5)
    assert vary(bert(**sizes, head="masked_lm"), head="pooled") == bert(**sizes)


@pytest.mark.parametrize("model", [{"preset": "vit-b16", "patch": 32}, {"family": "vit", "patch": 2}])
def test_a_preset_trains_on_images_like_a_family(model, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "train.npz", images=rng.random((13, 8, 8), np.float32), labels=np.arange(13) % 3)
    data = {
        "data": {"corpus": str(tmp_path)},
        "model": {**model, **SIZES},
        "train": {"objective": "classification", "batch": 5, "steps": 2, "device": "cpu"},
    }
    run = prepare_run(parse_recipe(data), tmp_path / "run")
    events = list(run.events())
    torch.use_deterministic_algorithms(False)
    assert run.model.config.head.classes == 3
    assert [event.tokens for event in events if isinstance(event, StepEvent)] == [5, 10]
    assert run.task_data.unit == "images"


def test_throughput_is_counted_in_the_unit_of_the_targets(corpora, capsys):
    units = {objective: build_data(make_recipe(objective, corpora)).unit for objective in MODELS}
    assert units == {
        "causal_lm": "tokens",
        "masked_lm": "tokens",
        "span_corruption": "tokens",
        "seq2seq": "tokens",
        "classification": "texts",
        "token_classification": "words",
    }
    progress = TrainingProgress(3, "images")
    progress.handle_event(StepEvent(1, 2.0, 0.1, 1.0, 5, 0.1))
    progress.handle_event(FinishedEvent(1, False))
    assert "images/s" in capsys.readouterr().err


def test_a_faulty_validation_split_raises_instead_of_counting_as_missing(tmp_path):
    (tmp_path / "train.tsv").write_text("a\tone\nb\ttwo\n" * 20, encoding="utf-8")
    recipe = make_recipe("classification", {"classification": str(tmp_path)})
    assert build_data(recipe).evaluation_batches is None
    (tmp_path / "valid.tsv").write_bytes(b"a\tone\nb\t\xff\n")
    with pytest.raises(FileError, match=r"valid.tsv, line 2: a byte is not UTF-8"):
        build_data(recipe)
