"""Which split of a file is evaluated."""

from monoblock.recipes.schema import DataSection
from monoblock.runs.evaluate import resolve_split
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.text_to_text import ExtraTask, TextToTextSection


def test_a_whole_file_is_evaluated_unless_the_model_was_trained_on_it(tmp_path, monkeypatch):
    for name in ("mine.tsv", "other.tsv", "task.tsv"):
        (tmp_path / name).write_text("a\tb\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.tsv").write_text("a\tb\n")
    monkeypatch.chdir(tmp_path)
    section = TextToTextSection(prefix="x:", tasks=(ExtraTask(corpus="task.tsv", prefix="y:"),))
    trained = LoadedModel(None, None, data_section=DataSection(corpus="mine.tsv"), task_section=section)
    splits = {
        "other.tsv": "all",
        "mine.tsv": None,
        "./folder/../mine.tsv": None,
        str(tmp_path / "mine.tsv"): None,
        "task.tsv": None,
        "folder": None,
        "reverse": None,
    }
    assert {data: resolve_split(EvaluationRequest(data=data), trained).split for data in splits} == splits
    assert resolve_split(EvaluationRequest(data="other.tsv", split="valid"), trained).split == "valid"
    assert resolve_split(EvaluationRequest(data="other.tsv", rescore=True), trained).split is None
    assert resolve_split(EvaluationRequest(data="mine.tsv"), LoadedModel(None, None)).split == "all"
