"""The corpus `docstrings`: pairs from source code, and splits that share no folder."""

import pytest

from monoblock.data.corpora import docstrings
from monoblock.data.readers.records import Pair

CODE = '''
def mean_degree(graph):
    """Return the mean
    degree of a `graph`.

    The **mean** degree is :func:`sum` of all degrees [1]_ divided by
    the number of nodes, and ``0`` for an empty graph.

    >>> mean_degree(g)

    Notes
    -----
    It takes linear time.

    Parameters
    ----------
    graph : a graph with many nodes and with even more edges than it has nodes
    """

class Short:
    """Hold one value."""

    def method(self):
        """Compute a value that is not yet known.

        The body of this docstring is long enough to be a source of its own.
        """
'''


def test_a_docstring_is_split_into_summary_and_prose():
    first, second = docstrings.read_module(CODE)
    body = "The mean degree is sum of all degrees divided by the number of nodes, and 0 for an empty graph."
    assert first == Pair(f"mean_degree: {body} It takes linear time.", "Return the mean degree of a graph.")
    assert second.source == "method: The body of this docstring is long enough to be a source of its own."


def test_summaries_and_bodies_of_unusual_length_are_left_out():
    body = "word " * 200
    assert docstrings.make_pair("f", f"Two words.\n\n{body}") is None
    assert docstrings.make_pair("f", "Return a good value.\n\nToo short.") is None
    assert docstrings.make_pair("f", f"Return a góod value.\n\n{body}") is None, "not ASCII"
    pair = docstrings.make_pair("f", f"Return a good value.\n\n{body}")
    assert len(pair.source) <= len("f: ") + docstrings.MAX_BODY_CHARACTERS
    assert pair.source.endswith("word")


def test_a_folder_is_in_one_split_and_held_out_rows_are_new(tmp_path, monkeypatch):
    names = [f"package/part{n}/{file}.py" for n in range(40) for file in "ab"]
    splits = {name: docstrings.split_of_module(name) for name in names}
    assert set(splits.values()) == set(docstrings.SPLITS)
    assert all(splits[name] == splits[name.replace("/a.py", "/b.py")] for name in names)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        docstring = f"Return what only {name} has.\n\n    The body of {name} {'has words ' * 6}"
        (tmp_path / name).write_text(f'{CODE}\ndef own():\n    """{docstring}"""\n')
    (tmp_path / "package" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(docstrings, "PACKAGES", ("package",))
    docstrings._read_split.cache_clear()
    rows = {split: list(docstrings.load_docstrings(split)) for split in docstrings.SPLITS}
    docstrings._read_split.cache_clear()
    for position in (0, 1):
        texts = [{row[position] for row in rows[split]} for split in docstrings.SPLITS]
        assert sum(map(len, texts)) == len(set().union(*texts)), "no source and no summary is in two splits"
    assert sum(map(len, rows.values())) == 2 + len(names), "the rows of CODE once, and one row of each file"


@pytest.mark.parametrize("text", [">>> f(3)", "- a list", ".. note:: x", "[1] a reference"])
def test_a_summary_is_prose(text):
    assert docstrings.make_pair("f", f"{text} of four words\n\n{'word ' * 20}") is None
