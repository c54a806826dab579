"""Text-to-text tasks: prefixes, labels as words, several tasks in one model, each with its own metrics."""

import json
import re
import tomllib

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.data.corpora.load import Corpus
from monoblock.data.corpora.table import CORPORA, CorpusSpec
from monoblock.data.encode import IGNORE_INDEX
from monoblock.data.readers.records import LabelledText, Pair, Question
from monoblock.data.readers.squad import to_squad_json
from monoblock.errors import ConfigError, FileError
from monoblock.metrics.text import rouge
from monoblock.recipes.schema import DataSection
from monoblock.runs.build_data import build_task_data
from monoblock.runs.recipe import parse_recipe, read_recipe
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.text_to_text import (
    METRICS_BY_TASK,
    ExtraTask,
    TextToText,
    TextToTextSection,
    convert_to_pairs,
    first_word,
    group_by_task,
    load_extra_tasks,
    prefix_for,
    score_lead,
)

SIZES = {"width": 16, "depth": 1, "heads": 2}
DATA = DataSection(corpus="kjv-web")
SECTION = TextToTextSection(
    prefix="translate to modern English:",
    tasks=(ExtraTask(corpus="languages", prefix="classify:"), ExtraTask(corpus="mine.tsv", prefix="summarize:")),
)


# -- conversion to pairs ----------------------------------------------------------------------------------------------


def test_labels_and_answers_become_target_texts():
    labelled = Corpus("c", "labelled", "train", [LabelledText("a verse", "law"), LabelledText("one", "same", "other")])
    assert convert_to_pairs(labelled).rows == [Pair("a verse", "law"), Pair("one and: other", "same")]
    rows = [Question("Who?", "He did.", ("He",), (0,)), Question("Who?", "No.")]
    questions = Corpus("q", "questions", "train", rows)
    assert convert_to_pairs(questions).rows == [
        Pair("Who? context: He did.", "He"),
        Pair("Who? context: No.", "no answer"),
    ]
    tagged = Corpus("t", "tagged", "train", [])
    assert convert_to_pairs(tagged) is tagged, "tagged words cannot be converted"


def test_a_source_belongs_to_the_task_whose_prefix_it_has():
    rows = [Pair("classify: x", "a"), Pair("summarize: y", "b"), Pair("classify: z", "c")]
    assert group_by_task(rows, SECTION) == {"classify:": [rows[0], rows[2]], "summarize:": [rows[1]]}
    with pytest.raises(ConfigError, match=r"'clasify: x' has no prefix; begin it with .* did you mean 'classify:'"):
        group_by_task([Pair("clasify: x", "a")], SECTION)
    assert prefix_for(SECTION, "languages", DATA) == "classify:"
    assert prefix_for(SECTION, "kjv-web", DATA) == "translate to modern English:"
    assert prefix_for(SECTION, "strange.tsv", DATA) == "", "its sources must have prefixes of their own"
    assert prefix_for(TextToTextSection(prefix="sort:"), "strange.tsv", DATA) == "sort:"


def test_the_first_word_of_the_prefix_selects_the_metrics():
    assert first_word("translate English to German:") == "translate"
    assert first_word("Classify:") == "classify"
    texts, references = ["the law", "gospels "], [["law"], ["gospels"]]
    assert METRICS_BY_TASK["classify"](texts, references) == {"accuracy": 0.5}
    assert METRICS_BY_TASK["summarize"](texts, references) == rouge(texts, references)
    assert METRICS_BY_TASK["question"](texts, references)["exact_match"] == 100
    assert "translate" not in METRICS_BY_TASK, "translation is the default"


def test_the_lead_baseline_is_the_first_sentence_of_the_source():
    sources, references = ["The cat sat. It was a mat.", "", "One. Two."], [["the cat sat"], ["a"], ["two"]]
    assert score_lead(sources, references) == {
        f"lead_{name}": value for name, value in rouge(["The cat sat.", "", "One."], references).items()
    }
    assert score_lead(sources, references)["lead_rougeL"] == pytest.approx(100 / 3)


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Two corpora of pairs: swapped numbers, and numbers with their parity."""
    for split, count in (("train", 40), ("valid", 8), ("test", 12)):
        swaps = "".join(f"{n} and {n % 7}\t{n % 7} and {n}\n" for n in range(count))
        parities = "".join(f"number {n}\t{'odd' if n % 2 else 'even'}\n" for n in range(count))
        (tmp_path / f"swap-{split}.tsv").write_text(swaps, encoding="utf-8")
        (tmp_path / f"parity-{split}.tsv").write_text(parities, encoding="utf-8")
    return {name: str(tmp_path / f"{name}-{{split}}.tsv") for name in ("swap", "parity")}


def make_recipe(files, **train):
    section = {"prefix": "swap:", "tasks": [{"corpus": files["parity"], "prefix": "classify:", "limit": 11}]}
    return parse_recipe(
        {
            "data": {"corpus": files["swap"]},
            "text_to_text": section,
            "tokenizer": {"kind": "word", "vocab": 128},
            "model": {"family": "t5", "context": 19, **SIZES},
            "train": {"objective": "text_to_text", "batch": 7, "steps": 2, "device": "cpu", "compile": "no", **train},
            "generate": {"max_new_tokens": 5, "num_beams": 1},
        },
    )


def test_training_batches_mix_all_tasks_each_with_its_prefix(files):
    data = build_task_data(make_recipe(files), 19)
    sources = []
    for step in range(-(-51 // 7)):
        batch = data.build_batch(data.batch_plan.batch_at(step))
        sources += [data.tokenizer.decode(row) for row in batch.inputs["source"].tolist()]
    assert sum(source.startswith("swap:") for source in sources) == 40
    assert sum(source.startswith("classify:") for source in sources) == 11, "the limit of the task"
    assert sum(batch.batch_size for batch in data.evaluation_batches()) == 16


def test_labels_are_target_texts(files):
    data = build_task_data(make_recipe(files), 19)
    targets = set()
    for batch in data.evaluation_batches():
        for source, labels in zip(batch.inputs["source"].tolist(), batch.labels.tolist(), strict=True):
            if data.tokenizer.decode(source).startswith("classify:"):
                targets.add(data.tokenizer.decode([label for label in labels if label != IGNORE_INDEX]))
    assert targets == {"odd", "even"}


def test_a_recipe_with_tasks_reads_back_the_same(files, tmp_path):
    recipe = make_recipe(files)
    (tmp_path / "again.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(str(tmp_path / "again.toml")).data == recipe.data
    assert tomllib.loads(recipe.to_toml())["text_to_text"]["tasks"] == [
        {"corpus": files["parity"], "prefix": "classify:", "limit": 11}
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"prefix": "describe:"},
            "needs pairs or questions or labelled, but the corpus digits is images",
        ),
        ({"tasks": [{"corpus": "digits", "prefix": "describe:"}]}, "the corpus digits is of the kind images"),
        ({"tasks": [{"corpus": "nothing.tsv", "prefix": "x:"}]}, "no corpus, file or folder 'nothing.tsv'"),
        ({"tasks": [{"corpus": "x", "prefx": "x:"}]}, "did you mean 'prefix'"),
    ],
)
def test_corpora_that_cannot_be_converted_to_pairs_are_refused(section, message, files):
    pytest.importorskip("sklearn")
    recipe = {"data": {"corpus": "digits" if "prefix" in section else files["swap"]}, "text_to_text": section}
    recipe |= {"model": {"family": "t5", "context": 19, **SIZES}, "train": {"objective": "text_to_text"}}
    with pytest.raises((ConfigError, FileError), match=message):
        build_task_data(parse_recipe(recipe), 19)


def test_labels_are_not_targets_without_a_prefix(monkeypatch):
    rows = [LabelledText(f"a text {n}", f"sort {n % 3}") for n in range(20)]
    small = CorpusSpec(
        description="",
        kind="labelled",
        licence="",
        origin="",
        packages=("monoblock",),
        load_split=lambda split: iter(rows),
    )
    monkeypatch.setitem(CORPORA, "small", small)
    recipe = {"data": {"corpus": "small"}, "model": {"family": "t5", "context": 19, **SIZES}}
    recipe |= {"train": {"objective": "seq2seq"}, "tokenizer": {"kind": "char", "vocab": 64}}
    with pytest.raises(ConfigError, match="needs pairs, but the corpus small is labelled"):
        build_task_data(parse_recipe(recipe), 19)
    recipe |= {"data": {"corpus": "small", "limit": 7}, "text_to_text": {"prefix": "sort:"}}
    recipe["train"] = {"objective": "text_to_text"}
    data = build_task_data(parse_recipe(recipe), 31)
    assert data.validation_rows[5] == Pair("sort: a text 5", "sort 2")
    assert data.summary.startswith("7 pairs")


def test_each_task_has_its_own_metrics_in_the_evaluation_and_on_the_model_card(files, tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    (tmp_path / "mix.toml").write_text(make_recipe(files).to_toml(), encoding="utf-8")
    assert run(["train", str(tmp_path / "mix.toml"), "--out", str(tmp_path / "mix")]) == 0
    torch.use_deterministic_algorithms(False)
    card = (tmp_path / "mix" / "README.md").read_text(encoding="utf-8")
    assert "val_swap_bleu" in card
    assert re.search(r"\| val_classify_accuracy \| [\d.]+ % \|", card)
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "mix"), files["parity"], "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    pipe = mb.load(tmp_path / "mix")
    correct = [pipe.translate(f"classify: number {n}").strip() == ("odd" if n % 2 else "even") for n in range(12)]
    assert metrics["accuracy"] == pytest.approx(np.mean(correct))
    assert (metrics["sources"], metrics["split"], metrics["samples"]) == (12, "test", [])
    both = tmp_path / "both.tsv"
    both.write_text("swap: 1 and 2\t2 and 1\nclassify: number 3\todd\nclassify: number 4\teven\n" * 10)
    assert run(["evaluate", str(tmp_path / "mix"), str(both), "--split", "all", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert {"swap_bleu", "swap_sources", "classify_accuracy", "classify_sources"} <= set(metrics)
    assert (metrics["swap_sources"], metrics["classify_sources"]) == (10, 20)


# -- after span corruption --------------------------------------------------------------------------------------------


@pytest.fixture
def pretraining_recipe(tmp_path):
    """The path of a recipe for span corruption on a small text."""
    text = tmp_path / "book.txt"
    text.write_text("".join(f"swap: the {n} sons and the {n % 7} kings went up\n" for n in range(90)), encoding="utf-8")
    recipe = parse_recipe(
        {
            "data": {"corpus": str(text)},
            "tokenizer": {"kind": "bpe", "vocab": 400},
            "model": {"family": "t5", "context": 23, **SIZES},
            "train": {
                "objective": "span_corruption",
                "batch": 5,
                "steps": 2,
                "device": "cpu",
                "compile": "no",
                "eval_every": 0,
            },
        },
    )
    (tmp_path / "spans.toml").write_text(recipe.to_toml(), encoding="utf-8")
    return str(tmp_path / "spans.toml")


def test_a_pretrained_model_is_fine_tuned_on_pairs_with_its_own_tokenizer(files, pretraining_recipe, tmp_path):
    assert run(["train", pretraining_recipe, "--out", str(tmp_path / "spans")]) == 0
    fine = tomllib.loads(make_recipe(files).to_toml())
    fine["model"] = {"folder": str(tmp_path / "spans")}
    fine["train"] |= {"steps": 1, "lr": 0.0, "weight_decay": 0.0}
    (tmp_path / "pairs.toml").write_text(parse_recipe(fine).to_toml(), encoding="utf-8")
    assert run(["train", str(tmp_path / "pairs.toml"), "--out", str(tmp_path / "pairs")]) == 0
    torch.use_deterministic_algorithms(False)
    first, second = (mb.Transformer.from_pretrained(tmp_path / name) for name in ("spans", "pairs"))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), "a learning rate of 0 keeps the initial weights"
    tokenizer = mb.Tokenizer.from_pretrained(tmp_path / "pairs")
    assert tokenizer.fingerprint == mb.Tokenizer.from_pretrained(tmp_path / "spans").fingerprint
    assert len(tokenizer.sentinel_ids) == 100
    settings = json.loads((tmp_path / "pairs" / "generation_config.json").read_text())
    assert settings["decoder_start_token_id"] == tokenizer.pad_id, "as in T5"


def test_the_pretraining_experiment_varies_only_the_initial_weights(files, pretraining_recipe, tmp_path):
    pytest.importorskip("sacrebleu")
    (tmp_path / "task.toml").write_text(make_recipe(files).to_toml(), encoding="utf-8")
    options = [f"recipe={tmp_path / 'task.toml'}", f"pretraining={pretraining_recipe}"]
    options += ["train.lr=0.0", "train.weight_decay=0.0", "text_to_text.tasks=[]"]
    assert run(["compare", "pretraining", *options, "--smoke", "--keep", "--out", str(tmp_path / "both")]) == 0
    torch.use_deterministic_algorithms(False)
    result = json.loads((tmp_path / "both" / "result.json").read_text())
    assert [row["arm"] for row in result["rows"]] == ["none", "spans"]
    assert result["about"]["options"]["steps"] == 4
    (work,) = (tmp_path / "both").glob("work-*")
    folders = [work / name for name in ("pretrained", "seed-1/none", "seed-1/spans")]
    pretrained, fresh, tuned = (mb.Transformer.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(pretrained[name], tuned[name]) for name in pretrained), "the learning rate is 0"
    assert not any(torch.equal(pretrained[name], fresh[name]) for name in pretrained if pretrained[name].dim() > 1)
    assert len({mb.Tokenizer.from_pretrained(folder).fingerprint for folder in folders}) == 1
    sections = [tomllib.loads((folder / "recipe.toml").read_text())["train"] for folder in folders[1:]]
    assert sections[0] == sections[1]


# -- files of the user ------------------------------------------------------------------------------------------------


def recipe_for_file(path, prefix, text):
    """Write a corpus file and return a recipe for it."""
    path.write_text(text, encoding="utf-8")
    data = {"data": {"corpus": str(path), "split": "last"}, "text_to_text": {"prefix": prefix}}
    data |= {"tokenizer": {"kind": "char", "vocab": 64}, "train": {"objective": "text_to_text"}}
    data |= {"model": {"family": "t5", "context": 97, **SIZES}}
    return parse_recipe(data)


@pytest.mark.parametrize("line", ["{label}\t{text}\n", "{text}\t{label}\n"])
def test_the_columns_of_a_classification_file_may_have_either_order(line, tmp_path):
    rows = [{"label": "odd" if n % 2 else "even", "text": f"number {n}"} for n in range(40)]
    text = "".join(line.format(**row) for row in rows)
    data = build_task_data(recipe_for_file(tmp_path / "mine.tsv", "classify:", text), 97)
    assert data.validation_rows[-1] == Pair("classify: number 39", "odd")
    task = ExtraTask(corpus=str(tmp_path / "mine.tsv"), prefix="classify:")
    extra_rows = load_extra_tasks(TextToTextSection(tasks=(task,)), "valid", None, "last")
    assert extra_rows[-1] == data.validation_rows[-1]
    translation = recipe_for_file(tmp_path / "pairs.tsv", "translate:", "ja\tyes one\nja\tyes two\n" * 20)
    assert build_task_data(translation, 97).validation_rows[-1] == Pair("translate: ja", "yes two"), (
        "pairs keep their order"
    )


def test_a_faulty_validation_split_of_a_task_raises_instead_of_counting_as_missing(tmp_path):
    (tmp_path / "train.tsv").write_text("a\tb\n" * 9)
    section = TextToTextSection(tasks=(ExtraTask(corpus=str(tmp_path), prefix="x:"),))
    assert load_extra_tasks(section, "valid", None) == []
    (tmp_path / "valid.tsv").write_text("a\n")
    with pytest.raises(FileError, match=r"valid.tsv, line 1: 1 column"):
        load_extra_tasks(section, "valid", None)


def test_any_of_several_gold_answers_is_correct(tmp_path, monkeypatch):
    rows = [Question(f"Who {n}?", "He and she did.", ("He", "she"), (0, 7), str(n)) for n in range(20)]
    recipe = recipe_for_file(tmp_path / "mine.json", "question:", json.dumps(to_squad_json(rows)))
    assert build_task_data(recipe, 97).validation_rows[-1] == Pair("question: Who 19? context: He and she did.", "He")

    def fake_translations(loaded, sources, **options):
        return ["she" if index else "they" for index in range(len(sources))]

    monkeypatch.setattr("monoblock.tasks.translate.best_translations", fake_translations)
    request = EvaluationRequest(data=str(tmp_path / "mine.json"), samples=2)
    loaded = LoadedModel(None, None, data_section=recipe.data, task_section=recipe.task)
    metrics = TextToText().evaluate(loaded, request).metrics
    assert metrics["exact_match"] == 50
    assert (metrics["sources"], metrics["split"]) == (2, "valid")
