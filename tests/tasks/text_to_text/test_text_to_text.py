"""Every task as text: prefixes, labels as words, several tasks in one model, each measured in its own way."""

import json
import tomllib

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.config.schema import from_dict
from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.data.corpora import load as corpora
from monoblock.data.corpora.load import Corpus
from monoblock.data.corpora.table import CorpusSpec
from monoblock.data.readers.records import LabelledText, Pair, Question
from monoblock.data.readers.squad import to_squad_json
from monoblock.errors import ConfigError, FileError
from monoblock.metrics.rouge import rouge
from monoblock.recipes.parse import read_recipe
from monoblock.recipes.schema import DataSection, Recipe, TaskSection
from monoblock.runs.build_data import build_task_data
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.text_to_text.data import convert_to_pairs, first_word, group_by_task, load_extra_tasks, prefix_for
from monoblock.tasks.text_to_text.evaluate import METRICS_BY_TASK, evaluate_text_to_text

SIZES = {"width": 16, "depth": 1, "heads": 2}
PART = DataSection(
    corpus="kjv-web",
    prefix="translate to modern English:",
    tasks=(TaskSection(corpus="languages", prefix="classify:"), TaskSection(corpus="mine.tsv", prefix="summarize:")),
)


# -- rows as text -----------------------------------------------------------------------------------------------------


def test_labels_pairs_of_texts_and_answers_become_text():
    labelled = Corpus("c", "labelled", "train", [LabelledText("a verse", "law"), LabelledText("one", "same", "other")])
    assert convert_to_pairs(labelled).rows == [Pair("a verse", "law"), Pair("one and: other", "same")]
    asked = Corpus("q", "questions", "train", [Question("Who?", "He did.", ("He",), (0,)), Question("Who?", "No.")])
    assert convert_to_pairs(asked).rows == [Pair("Who? context: He did.", "He"), Pair("Who? context: No.", "no answer")]
    tagged = Corpus("t", "tagged", "train", [])
    assert convert_to_pairs(tagged) is tagged, "words with labels are no text"


def test_a_source_belongs_to_the_task_whose_prefix_it_has():
    rows = [Pair("classify: x", "a"), Pair("summarize: y", "b"), Pair("classify: z", "c")]
    assert group_by_task(rows, PART) == {"classify:": [rows[0], rows[2]], "summarize:": [rows[1]]}
    with pytest.raises(ConfigError, match=r"'clasify: x' has no prefix; begin it with .* did you mean 'classify:'"):
        group_by_task([Pair("clasify: x", "a")], PART)
    assert prefix_for(PART, "languages") == "classify:"
    assert prefix_for(PART, "kjv-web") == "translate to modern English:"
    assert prefix_for(PART, "strange.tsv") == "", "its sources must have prefixes of their own"
    assert prefix_for(DataSection(corpus="a", prefix="sort:"), "strange.tsv") == "sort:"


def test_what_is_measured_goes_by_the_first_word():
    assert first_word("translate English to German:") == "translate"
    assert first_word("Classify:") == "classify"
    texts, golds = ["the law", "gospels "], [["law"], ["gospels"]]
    assert METRICS_BY_TASK["classify"](texts, golds) == {"accuracy": 50.0}
    assert METRICS_BY_TASK["summarize"](texts, golds) == rouge(texts, golds)
    assert METRICS_BY_TASK["question"](texts, golds)["exact_match"] == 100
    assert "translate" not in METRICS_BY_TASK, "anything else is a translation"


# -- in a recipe ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    for split, count in (("train", 40), ("valid", 8), ("test", 12)):
        copies = "".join(f"{n} and {n % 7}\t{n % 7} and {n}\n" for n in range(count))
        signs = "".join(f"number {n}\t{'odd' if n % 2 else 'even'}\n" for n in range(count))
        (tmp_path / f"swap-{split}.tsv").write_text(copies, encoding="utf-8")
        (tmp_path / f"parity-{split}.tsv").write_text(signs, encoding="utf-8")
    return {name: str(tmp_path / f"{name}-{{split}}.tsv") for name in ("swap", "parity")}


def recipe(files, **train):
    data = {
        "corpus": files["swap"],
        "prefix": "swap:",
        "tasks": [{"corpus": files["parity"], "prefix": "classify:", "limit": 11}],
    }
    return from_dict(
        Recipe,
        {
            "data": data,
            "tokenizer": {"kind": "word", "vocab": 128},
            "model": {"family": "t5", "context": 19, **SIZES},
            "train": {"objective": "pairs", "batch": 7, "steps": 2, "device": "cpu", "compile": "no", **train},
            "generate": {"max_new_tokens": 5, "num_beams": 1},
        },
    )


def test_one_model_is_trained_on_all_tasks_each_with_its_prefix(files):
    ground = build_task_data(recipe(files), 19)
    sources = []
    for step in range(-(-51 // 7)):
        batch = ground.build_batch(ground.batch_plan.batch_at(step))
        sources += [ground.tokenizer.decode(row) for row in batch.inputs["source"].tolist()]
    assert sum(source.startswith("swap:") for source in sources) == 40
    assert sum(source.startswith("classify:") for source in sources) == 11, "a task has a limit of its own"
    held = list(ground.evaluation_batches())
    assert sum(batch.batch_size for batch in held) == 16


def test_labels_are_words_of_the_target(files):
    ground = build_task_data(recipe(files), 19)
    said = set()
    for batch in ground.evaluation_batches():
        for source, labels in zip(batch.inputs["source"].tolist(), batch.labels.tolist(), strict=True):
            if ground.tokenizer.decode(source).startswith("classify:"):
                said.add(ground.tokenizer.decode([label for label in labels if label != IGNORE_INDEX]))
    assert said == {"odd", "even"}


def test_a_recipe_with_tasks_is_written_and_read_again(files, tmp_path):
    one = recipe(files)
    (tmp_path / "again.toml").write_text(one.to_toml(), encoding="utf-8")
    assert read_recipe(str(tmp_path / "again.toml")).data == one.data
    assert tomllib.loads(one.to_toml())["data"]["tasks"] == [
        {"corpus": files["parity"], "prefix": "classify:", "limit": 11}
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"corpus": "digits", "prefix": "describe:"}, "data.prefix is about pairs, and digits is images"),
        ({"tasks": [{"corpus": "digits", "prefix": "describe:"}]}, "the corpus digits is images"),
        ({"tasks": [{"corpus": "nothing.tsv", "prefix": "x:"}]}, "no corpus, file or folder 'nothing.tsv'"),
        ({"tasks": [{"corpus": "x", "prefx": "x:"}]}, "did you mean 'prefix'"),
    ],
)
def test_what_cannot_be_text_is_refused(data, told, files):
    pytest.importorskip("sklearn")
    given = {"corpus": files["swap"], **data}
    model = {"family": "t5", "context": 19, **SIZES}
    with pytest.raises((ConfigError, FileError), match=told):
        build_task_data(from_dict(Recipe, {"data": given, "model": model, "train": {"objective": "pairs"}}), 19)


def test_labels_are_not_taken_for_text_where_no_prefix_says_so(monkeypatch):
    rows = [LabelledText(f"a text {n}", f"sort {n % 3}") for n in range(20)]
    small = CorpusSpec(
        description="",
        kind="labelled",
        licence="",
        origin="",
        packages=("monoblock",),
        load_split=lambda split: iter(rows),
    )
    monkeypatch.setitem(corpora.CORPORA, "small", small)
    one = {"data": {"corpus": "small"}, "model": {"family": "t5", "context": 19, **SIZES}}
    one |= {"train": {"objective": "pairs"}, "tokenizer": {"kind": "char", "vocab": 64}}
    with pytest.raises(ConfigError, match="needs pairs, but the corpus small is labelled"):
        build_task_data(from_dict(Recipe, one), 19)
    one["data"] |= {"prefix": "sort:", "limit": 7}
    ground = build_task_data(from_dict(Recipe, one), 31)
    assert ground.validation_rows[5] == Pair("sort: a text 5", "sort 2")
    assert ground.summary.startswith("7 pairs")


def test_each_task_is_measured_in_its_own_way_and_stands_on_the_card(files, tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    (tmp_path / "mix.toml").write_text(recipe(files).to_toml(), encoding="utf-8")
    assert run(["train", str(tmp_path / "mix.toml"), "--out", str(tmp_path / "mix")]) == 0
    torch.use_deterministic_algorithms(False)
    card = (tmp_path / "mix" / "README.md").read_text(encoding="utf-8")
    assert "val_swap_bleu" in card
    assert "val_classify_accuracy" in card
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "mix"), files["parity"], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    pipe = mb.load(tmp_path / "mix")
    right = [pipe.translate(f"classify: number {n}").strip() == ("odd" if n % 2 else "even") for n in range(12)]
    assert told["accuracy"] == pytest.approx(100 * np.mean(right))
    assert (told["sources"], told["split"], told["samples"]) == (12, "test", [])
    both = tmp_path / "both.tsv"
    both.write_text("swap: 1 and 2\t2 and 1\nclassify: number 3\todd\nclassify: number 4\teven\n" * 10)
    assert run(["evaluate", str(tmp_path / "mix"), str(both), "--split", "all", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"swap_bleu", "swap_sources", "classify_accuracy", "classify_sources"} <= set(told)
    assert (told["swap_sources"], told["classify_sources"]) == (10, 20)


# -- after span corruption --------------------------------------------------------------------------------------------


@pytest.fixture
def spans(tmp_path):
    """A recipe of span corruption on a small text."""
    text = tmp_path / "book.txt"
    text.write_text("".join(f"the {n} sons and the {n % 7} kings went up\n" for n in range(90)), encoding="utf-8")
    one = from_dict(
        Recipe,
        {
            "data": {"corpus": str(text)},
            "tokenizer": {"kind": "bpe", "vocab": 400},
            "model": {"family": "t5", "context": 23, **SIZES},
            "train": {"objective": "spans", "batch": 5, "steps": 2, "device": "cpu", "compile": "no", "eval_every": 0},
        },
    )
    (tmp_path / "spans.toml").write_text(one.to_toml(), encoding="utf-8")
    return str(tmp_path / "spans.toml")


def test_a_model_of_spans_goes_on_with_pairs_and_keeps_its_tokenizer(files, spans, tmp_path):
    assert run(["train", spans, "--out", str(tmp_path / "spans")]) == 0
    fine = tomllib.loads(recipe(files).to_toml())
    fine["model"] = {"folder": str(tmp_path / "spans")}
    fine["train"] |= {"steps": 1, "lr": 0.0, "weight_decay": 0.0}
    (tmp_path / "pairs.toml").write_text(from_dict(Recipe, fine).to_toml(), encoding="utf-8")
    assert run(["train", str(tmp_path / "pairs.toml"), "--out", str(tmp_path / "pairs")]) == 0
    torch.use_deterministic_algorithms(False)
    first, second = (mb.Transformer.from_pretrained(tmp_path / name) for name in ("spans", "pairs"))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), "a rate of 0 leaves what was laid in"
    tokenizer = mb.Tokenizer.from_pretrained(tmp_path / "pairs")
    assert tokenizer.fingerprint == mb.Tokenizer.from_pretrained(tmp_path / "spans").fingerprint
    assert len(tokenizer.sentinel_ids) == 100
    settings = json.loads((tmp_path / "pairs" / "generation_config.json").read_text())
    assert settings["decoder_start_token_id"] == tokenizer.pad_id, "as T5 starts"


def test_the_comparison_differs_only_in_where_the_weights_come_from(files, spans, tmp_path):
    pytest.importorskip("sacrebleu")
    (tmp_path / "task.toml").write_text(recipe(files).to_toml(), encoding="utf-8")
    words = [f"recipe={tmp_path / 'task.toml'}", f"pretraining={spans}"]
    words = [*words, "train.lr=0.0", "train.weight_decay=0.0", "data.tasks=[]", "figure=accuracy"]
    assert run(["compare", "pretraining", *words, "--smoke", "--out", str(tmp_path / "both")]) == 0
    torch.use_deterministic_algorithms(False)
    found = json.loads((tmp_path / "both" / "result.json").read_text())
    assert [row["arm"] for row in found["rows"]] == ["none", "spans"]
    assert found["about"]["steps"] == 4
    places = [tmp_path / "both" / name for name in ("pretrained", "seed-1/none", "seed-1/spans")]
    began, none, after = (mb.Transformer.from_pretrained(place).state_dict() for place in places)
    assert all(torch.equal(began[name], after[name]) for name in began), "a rate of 0 leaves what was laid in"
    assert not any(torch.equal(began[name], none[name]) for name in began if began[name].dim() > 1)
    assert len({mb.Tokenizer.from_pretrained(place).fingerprint for place in places}) == 1
    plans = [tomllib.loads((place / "recipe.toml").read_text())["train"] for place in places[1:]]
    assert plans[0] == plans[1]


# -- a user's own files -----------------------------------------------------------------------------------------------


def own(path, prefix, text):
    path.write_text(text, encoding="utf-8")
    given = {"data": {"corpus": str(path), "prefix": prefix}, "tokenizer": {"kind": "char", "vocab": 64}}
    given |= {"model": {"family": "t5", "context": 97, **SIZES}, "train": {"objective": "pairs"}}
    return from_dict(Recipe, given)


@pytest.mark.parametrize("line", ["{label}\t{text}\n", "{text}\t{label}\n"])
def test_two_columns_are_labels_and_texts_whichever_comes_first(line, tmp_path):
    rows = [{"label": "odd" if n % 2 else "even", "text": f"number {n}"} for n in range(40)]
    ground = build_task_data(own(tmp_path / "mine.tsv", "classify:", "".join(line.format(**row) for row in rows)), 97)
    assert ground.validation_rows[-1] == Pair("classify: number 39", "odd")
    task = TaskSection(corpus=str(tmp_path / "mine.tsv"), prefix="classify:")
    assert (
        load_extra_tasks(DataSection(corpus="reverse", tasks=(task,)), "valid", None)[-1] == ground.validation_rows[-1]
    )
    turned = build_task_data(own(tmp_path / "pairs.tsv", "translate:", "ja\tyes one\nja\tyes two\n" * 20), 97)
    assert turned.validation_rows[-1] == Pair("translate: ja", "yes two"), "pairs keep their order"


def test_a_task_whose_validation_rows_have_a_fault_is_refused(tmp_path):
    (tmp_path / "train.tsv").write_text("a\tb\n" * 9)
    part = DataSection(corpus="reverse", tasks=(TaskSection(corpus=str(tmp_path), prefix="x:"),))
    assert load_extra_tasks(part, "valid", None) == []
    (tmp_path / "valid.tsv").write_text("a\n")
    with pytest.raises(FileError, match=r"valid.tsv, line 1: 1 column"):
        load_extra_tasks(part, "valid", None)


def test_of_several_gold_answers_each_is_right(tmp_path, monkeypatch):
    rows = [Question(f"Who {n}?", "He and she did.", ("He", "she"), (0, 7), str(n)) for n in range(20)]
    recipe = own(tmp_path / "mine.json", "question:", json.dumps(to_squad_json(rows)))
    assert build_task_data(recipe, 97).validation_rows[-1] == Pair("question: Who 19? context: He and she did.", "He")

    def translations(loaded, sources, **options):
        return ["she" if number else "they" for number, _ in enumerate(sources)]

    monkeypatch.setattr("monoblock.tasks.text_to_text.evaluate.best_translations", translations)
    found = evaluate_text_to_text(
        None, EvaluationRequest(data=str(tmp_path / "mine.json"), samples=2), recipe.data, lambda *_: {}
    )
    assert found.metrics["exact_match"] == 50
    assert (found.metrics["sources"], found.metrics["split"]) == (2, "valid")
