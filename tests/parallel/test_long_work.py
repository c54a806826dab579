"""What only the main process does may take longer than parallel.timeout; the last validation is divided."""

import json

import long_work_worker
import pytest
import torch
from processes import run_ranks
from training_support import train_to_end, write_recipe

import monoblock
from monoblock.config.presets import tiny
from monoblock.model import Transformer
from monoblock.parallel.strategy import Strategy, TensorParallel, call_with_whole_model, count_bytes, has_room
from monoblock.parallel.world import SINGLE_PROCESS

SHORT = {"model": {"dropout": 0.0}, "train": {"steps": 2, "save_every": 1, "eval_every": 0, "sample_every": 2}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(
        tmp_path_factory.mktemp("long"), SHORT, {"train": {"parallel": "fsdp", "average_checkpoints": 2}}
    )


@pytest.fixture(scope="module")
def seen(recipe):
    run_ranks(long_work_worker.main, recipe.parent, 2)
    return [json.loads((recipe.parent / f"seen-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_the_main_process_may_work_longer_than_the_time_out(seen):
    """It builds its run first, generates a sample, and saves the model, each for longer than the time-out."""
    assert seen[0]["order"][1] <= seen[1]["order"][0], "the other process waits for the main one"
    assert [len(process["samples"]) for process in seen] == [1, 0]


@pytest.mark.slow
def test_all_processes_divide_the_last_validation(seen, recipe):
    counts = [process["evaluated"] for process in seen]
    assert counts[0] == counts[1] == -(-seen[0]["batches"] // 2)
    assert seen[0]["metrics"] == seen[1]["metrics"]


@pytest.mark.slow
def test_the_final_weights_and_metrics_are_those_of_one_process(seen, recipe, tmp_path):
    run, _ = train_to_end(recipe, tmp_path / "alone")
    assert seen[0]["metrics"] == pytest.approx(run.metrics, rel=1e-5)
    state, saved = run.model.state_dict(), monoblock.load(recipe.parent / "run").model.state_dict()
    for name in state:
        torch.testing.assert_close(saved[name], state[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("free", "fits"), [(1.2, False), (1.3, True)])
def test_a_model_larger_than_the_device_is_not_put_on_it(free, fits, monkeypatch):
    model = Transformer(tiny("gpt2"))
    strategy = TensorParallel(SINGLE_PROCESS)
    strategy.split_bytes = count_bytes(model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * count_bytes(model)), 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert has_room(strategy, torch.device("cuda")) is fits
    if not fits:
        assert call_with_whole_model(strategy, model, torch.device("cuda"), lambda model: "text", "none") == "none"
    assert has_room(strategy, torch.device("cpu"))
    assert has_room(Strategy(), torch.device("cuda"))
