"""The table of tasks: every row is complete, and no file asks for a task by its name."""

import ast
from pathlib import Path

import pytest

import monoblock
from monoblock.errors import ConfigError
from monoblock.tasks.table import TASKS, find_task, task_of_corpus
from monoblock.tasks.task import Task

SOURCE = Path(monoblock.__file__).parent
NAMES = {task.name for task in TASKS}
# These words have other meanings too: kinds of heads, corpora and masks.
AMBIGUOUS = {"masked_lm", "chat"}
FACTS = {"doctor/checks/fit.py"}  # a table of the architectures that suit a task, for models of any library


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_says_what_it_is_and_builds_data(task):
    assert task.about
    assert task.families
    assert task.corpus_kinds
    assert type(task).data is not Task.data


def test_a_task_is_found_by_its_name_and_by_its_data():
    assert find_task("question_answering").name == "question_answering"
    with pytest.raises(ConfigError, match="did you mean 'seq2seq'"):
        find_task("seq2sec")
    assert task_of_corpus("text", "encoder-only").name == "masked_lm"
    assert task_of_corpus("text", "encoder-decoder").name == "span_corruption"
    assert task_of_corpus("labelled", "encoder-only").name == "classification"
    assert task_of_corpus("text", "vision") is None


def constants(node):
    """The strings in an expression that is compared."""
    return {item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def mentions_objective(node):
    return "objective" in ast.unparse(node)


def name_comparisons(tree):
    """Yield each comparison, match or dict in a file that tells tasks apart by their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            words = constants(node) & NAMES
            if words - AMBIGUOUS or (words and mentions_objective(node)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Match) and mentions_objective(node.subject):
            yield ast.unparse(node.subject)
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if len(keys & NAMES) > 2 and keys <= NAMES:
                yield ast.unparse(node)


def test_no_file_compares_the_name_of_an_objective():
    found = {
        str(path.relative_to(SOURCE)): comparisons
        for path in SOURCE.rglob("*.py")
        if (comparisons := list(name_comparisons(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found.keys() == FACTS


def test_the_search_for_comparisons_finds_them():
    code = "if train.objective == 'chat': pass\nx = {'causal_lm': 1, 'masked_lm': 2, 'chat': 3}\nkind == 'seq2seq'"
    assert len(list(name_comparisons(ast.parse(code)))) == 3
