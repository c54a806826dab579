"""Which split of a file is evaluated."""

from monoblock.recipes.schema import DataSection, TaskSection
from monoblock.runs.evaluate import resolve_split
from monoblock.tasks.evaluation_report import EvaluationRequest


def test_a_whole_file_is_evaluated_unless_the_model_was_trained_on_it(tmp_path, monkeypatch):
    for name in ("mine.tsv", "other.tsv", "task.tsv"):
        (tmp_path / name).write_text("a\tb\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.tsv").write_text("a\tb\n")
    monkeypatch.chdir(tmp_path)
    section = DataSection(corpus="mine.tsv", prefix="x:", tasks=(TaskSection(corpus="task.tsv", prefix="y:"),))
    splits = {
        "other.tsv": "all",
        "mine.tsv": None,
        "./folder/../mine.tsv": None,
        str(tmp_path / "mine.tsv"): None,
        "task.tsv": None,
        "folder": None,
        "reverse": None,
    }
    assert {data: resolve_split(EvaluationRequest(data=data), section).split for data in splits} == splits
    assert resolve_split(EvaluationRequest(data="other.tsv", split="valid"), section).split == "valid"
    assert resolve_split(EvaluationRequest(data="other.tsv", rescore=True), section).split is None
    assert resolve_split(EvaluationRequest(data="mine.tsv"), None).split == "all"
