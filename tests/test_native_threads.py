"""A search's operators with fewer threads than were asked for, with tensors that do not fit, and what they keep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import build

import monoblock as mb
from monoblock.decoding import prepare
from monoblock.decoding.engine import Engine
from monoblock.decoding.prepare import prepared
from monoblock.decoding.search_cpu import operators
from monoblock.decoding.settings import Settings
from monoblock.native import library

SIZES = {"vocab": 37, "width": 24, "depth": 2, "heads": 3, "hidden": 29, "context": 23}
PATIENCE = 240  # seconds for what takes a few, so that a search that waits for ever fails


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    if not library.load().ready:
        pytest.skip(library.load().reason)
    monkeypatch.setattr(prepare, "LARGE", 0)


def translator():
    return build(mb.vaswani(**SIZES), seed=5)


def texts(model, **options):
    chance = torch.Generator().manual_seed(2)
    given = [torch.randint(3, 37, (2 + n % 7,), generator=chance).tolist() for n in range(11)]
    engine, found = Engine(model, rows=1000, **options), {}
    order = [engine.add((1,), Settings(max_new_tokens=7, num_beams=4, eos_token_id=(2,)), source) for source in given]
    while engine.busy:
        found |= {order.index(event.id): list(event.tokens) for event in engine.step()}
    return [found[number] for number in range(11)]


def served():
    """What two threads find by the operator, said by a process that may not have as many."""
    torch.set_num_threads(2)
    prepare.LARGE = 0
    model = translator()
    assert torch.get_num_threads() == 2
    assert operators(prepared(model)) is not None
    print(json.dumps(texts(model)))


@pytest.mark.parametrize("fewer", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}, {}])
def test_a_search_ends_as_the_plain_one_whatever_threads_come(fewer):
    folders = [str(Path(__file__).parent), str(Path(mb.__file__).parents[1])]
    there = {**os.environ, "OMP_NUM_THREADS": "2", **fewer, "PYTHONPATH": os.pathsep.join(folders)}
    line = [sys.executable, "-c", "import test_native_threads as own; own.served()"]
    said = subprocess.run(line, env=there, capture_output=True, text=True, timeout=PATIENCE)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == texts(translator().double(), fast=False, use_cache=False)


def searcher(bias=None):
    model = prepared(translator())
    return torch.classes.monoblock.Searcher(model.decoder.whole.plan, model.table.detach(), bias, 1.0, None, 1.0)


@pytest.mark.parametrize("bias", [torch.zeros(36), torch.zeros(37).double(), torch.zeros(74)[::2]])
def test_a_bias_that_does_not_fit_the_table_is_refused(bias):
    searcher(torch.zeros(37))
    with pytest.raises(RuntimeError, match="number for each row of the table"):
        searcher(bias)


def searched(texts=3, sources=2, others=2, groups=3, seen=3):
    """A search for three texts of two beams in five columns; arguments: what its sources are like."""
    own = [torch.zeros(6, 3, 5, 8) for _ in range(4)]
    keys, values = [[torch.zeros(texts, groups, 7, 8)] * count for count in (sources, others)]
    mask = torch.ones(seen, 7, dtype=torch.bool)
    lengths = torch.zeros(6, dtype=torch.long)
    return torch.classes.monoblock.Search(
        searcher(), own[:2], own[2:], keys, values, mask, lengths, None, [2, 4, 0], 1.0
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"texts": 2}, "keys or values"),
        ({"groups": 2}, "keys or values"),
        ({"sources": 1}, "a source for each"),
        ({"others": 1}, "a source for each"),
        ({"seen": 2}, "a mask"),
    ],
)
def test_sources_that_do_not_fit_a_search_are_refused(wrong, says):
    searched()
    with pytest.raises(RuntimeError, match=says):
        searched(**wrong)


def test_room_is_used_again_unless_it_is_read_or_far_too_large():
    own = searcher()
    held = own.room(1009)
    other = own.room(1009)
    assert other.data_ptr() != held.data_ptr()
    del other
    assert own.room(601).numel() == 1009
    assert own.room(211).numel() == 211
    assert own.room(409).numel() == 409
