"""`monoblock demo`, interrupted."""

import signal
from contextlib import contextmanager
from itertools import islice

import torch

from monoblock.cli import training
from monoblock.cli.main import run
from monoblock.data.corpora import bible
from monoblock.training import checkpoint
from monoblock.training.interrupt import StopRequest


def test_an_interrupted_demo_names_the_demo_that_continues_it(tmp_path, monkeypatch, capsys):
    stop = StopRequest()
    stop.signal = signal.SIGINT

    @contextmanager
    def interrupted(*_):
        yield stop

    monkeypatch.setattr(training, "stop_on_interrupt", interrupted)
    whole = bible.load_verses
    monkeypatch.setattr(bible, "load_verses", lambda split: dict(islice(whole(split).items(), 3000)))
    folder = tmp_path / "demo-1"
    for words in (["demo", "--out", str(tmp_path)], ["demo", "--resume", str(folder)]):
        assert run(words) == 130
        line = capsys.readouterr().err.splitlines()[-1]
        assert line == f"Saved {folder} at step 0. Resume with: monoblock demo --resume {folder}"
    assert checkpoint.list_steps(folder / "checkpoints") == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["demo-1"]
    torch.use_deterministic_algorithms(False)
