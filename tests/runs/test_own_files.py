"""Runs on a user's own file: which rows are held out, what is said about them, and that evaluation uses them."""

from collections import Counter

import pytest

import monoblock as mb
from monoblock.data.corpora.load import load_corpus
from monoblock.data.readers.by_path import Holdout
from monoblock.errors import FileError
from monoblock.runs.build_data import build_task_data
from monoblock.runs.recipe import parse_recipe
from monoblock.training.events import DecisionEvent, WarningEvent

TRAIN = {"steps": 2, "batch": 4, "warmup": 1, "device": "cpu", "compile": "no", "eval_every": 0}


def make_recipe(path, *overrides, objective="classification", **data):
    family = {"classification": "bert", "seq2seq": "vaswani", "causal_lm": "gpt"}[objective]
    model = {"family": family, "width": 16, "depth": 1, "heads": 2, "context": 32}
    tables = {
        "data": {"corpus": str(path), **data},
        "tokenizer": {"kind": "char"},
        "model": model | ({"head": "classifier"} if objective == "classification" else {}),
        "train": {"objective": objective, **TRAIN},
    }
    return parse_recipe(tables, overrides)


@pytest.fixture
def sorted_file(tmp_path):
    """A file of 60 rows, sorted by class."""
    path = tmp_path / "sorted.tsv"
    rows = [(label, f"{label} text {n}") for label in ("bad", "fine", "good") for n in range(20)]
    path.write_text("".join(f"{label}\t{text}\n" for label, text in rows), encoding="utf-8")
    return path


def notices(recipe):
    return build_task_data(recipe, 32).notices


def validation_labels(recipe):
    data = build_task_data(recipe, 32)
    ids = [label for batch in data.evaluation_batches() for label in batch.labels.tolist()]
    return Counter(data.labels[index] for index in ids)


def test_a_file_sorted_by_class_is_validated_on_every_class(sorted_file):
    assert validation_labels(make_recipe(sorted_file)) == {"bad": 2, "fine": 2, "good": 2}
    assert notices(make_recipe(sorted_file)) == (
        DecisionEvent(
            "6 rows are held out for validation", "drawn at random with a fixed seed, the same share of each class"
        ),
    )


def test_validation_rows_are_counted_in_all_rows_of_the_file(sorted_file):
    assert validation_labels(make_recipe(sorted_file, validation_rows=15)) == {"bad": 5, "fine": 5, "good": 5}
    data = build_task_data(make_recipe(sorted_file, validation_rows=15), 32)
    assert data.summary.startswith("45 samples")


def test_the_last_rows_are_held_out_on_request_and_missing_classes_are_named(sorted_file):
    recipe = make_recipe(sorted_file, split="last")
    assert validation_labels(recipe) == {"good": 6}
    decision, warning = notices(recipe)
    assert decision == DecisionEvent("6 rows are held out for validation", "the last rows")
    assert isinstance(warning, WarningEvent)
    assert warning.text.startswith("no validation row has any of 2 classes: 'bad', 'fine'")


def test_a_limit_that_loses_a_class_is_named(sorted_file):
    warning = next(event for event in notices(make_recipe(sorted_file, limit=20)) if isinstance(event, WarningEvent))
    assert "no training row has the class 'good': data.limit=20 takes the first rows" in warning.text


def test_a_running_text_is_cut_and_this_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("the king went up to the land of the north " * 20, encoding="utf-8")
    assert notices(make_recipe(tmp_path / "a.txt", objective="causal_lm")) == (
        DecisionEvent("the last tenth of the text is held out for validation", "a running text has no rows to draw"),
    )


def test_a_corpus_with_splits_of_its_own_has_nothing_to_say(tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.tsv").write_text("a\tone\nb\ttwo\n", encoding="utf-8")
    assert notices(make_recipe(tmp_path)) == ()


@pytest.mark.parametrize("count", [0, 13])
def test_evaluation_uses_the_rows_that_were_held_out(sorted_file, tmp_path, count):
    events = []
    recipe = make_recipe(sorted_file, validation_rows=count)
    run = mb.train(recipe, out=tmp_path / "run", progress=False, callbacks=[events.append])
    held_out = load_corpus(sorted_file, "valid", kind="labelled", holdout=Holdout(count=count))
    assert any(isinstance(event, DecisionEvent) and "held out" in event.decision for event in events)
    result = mb.evaluate(run.folder, str(sorted_file))
    assert result["sources"] == len(held_out) == (count or 6)
    assert result["loss"] == pytest.approx(run.metrics["val_loss"], rel=1e-4)


def test_a_run_with_another_split_is_not_resumed(sorted_file, tmp_path):
    run = {"out": tmp_path / "run", "progress": False}
    mb.train(make_recipe(sorted_file), **run)
    with pytest.raises(FileError, match=r"another data\.split \('random', and now 'last'\)"):
        mb.train(make_recipe(sorted_file, "train.steps=3", split="last"), resume=True, **run)


def test_a_header_that_names_nothing_known_is_asked_about(tmp_path):
    rows = "".join(f"{label}\t{label} text {n}\n" for n in range(20) for label in ("gut", "schlecht"))
    (tmp_path / "a.tsv").write_text(f"Urteil\tSatz\n{rows}", encoding="utf-8")
    warning = next(event for event in notices(make_recipe(tmp_path / "a.tsv")) if isinstance(event, WarningEvent))
    assert warning.text.startswith("no validation row has the class 'Urteil'")
    assert warning.text.endswith("(if the first line of the file names its columns, call them label and text)")


def test_a_csv_file_is_trained_on(tmp_path):
    rows = "".join(f'"{label}, text {n}",{label}\n' for n in range(20) for label in ("bad", "good"))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    run = mb.train(make_recipe(tmp_path / "a.csv"), out=tmp_path / "run", progress=False)
    assert run.task_data.labels == ["bad", "good"]
    assert mb.evaluate(run.folder, str(tmp_path / "a.csv"))["sources"] == 4
