"""Every strategy gives the losses of a single process, and a run can be resumed with another one.

The models compute in float64, so that a wrong formula cannot hide among rounding errors, which training amplifies.
"""

import functools
from contextlib import contextmanager

import pytest
import strategy_families
import torch
import training_support
from strategy_families import EXACT
from training_support import read_metrics, train_to_end, train_until, write_recipe

import monoblock as mb
from monoblock.training import checkpoint, sharded_checkpoint
from monoblock.training.events import EvaluationEvent, StepEvent

run_jobs = functools.partial(training_support.run_jobs, dtype="float64")
STRATEGIES = ("ddp", "fsdp", "tp", "fsdp+tp", "pp")
# The other families are trained in test_fifty_steps.py.
FAMILIES = {name: strategy_families.FAMILIES[name] for name in ("gpt", "bert", "divisible", "experts")}
STEPS = {"experts": 12}  # for the resumed runs
BACKGROUND = ("fsdp", "pp")  # also saved in the background
DIVIDED = ("divisible", "experts", "bert")  # tensor parallelism divides the positions too


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("strategies")
    for family, changes in FAMILIES.items():
        train = {"steps": STEPS.get(family, 6), "batch": 5, "save_every": 4, "eval_every": 3}
        write_recipe(root / family, {"train": train}, changes, EXACT)
    return root


@pytest.fixture(scope="module")
def alone(root):
    """The events of each family in this process."""
    events = {}
    for family in FAMILIES:
        with default_dtype(torch.float64):
            run, seen = train_to_end(root / family / "recipe.toml", root / family / "alone")
        events[family] = run, seen
    return events


@pytest.fixture(scope="module")
def together(root):
    """What each process saw, for each family and strategy."""
    seen = {}
    for processes, strategies in ((2, ("ddp", "fsdp", "tp", "pp")), (4, ("fsdp+tp",))):
        cases = [(family, strategy) for strategy in strategies for family in FAMILIES]
        cases += [("experts", f"{strategy} in the background") for strategy in strategies if strategy in BACKGROUND]
        jobs = [
            {
                "recipe": str(root / family / "recipe.toml"),
                "folder": str(root / family / strategy),
                "overrides": [
                    f"train.parallel={strategy.split()[0]}",
                    f"parallel.tensor={2 if 'tp' in strategy else 0}",
                    f"train.save_async={str('background' in strategy).lower()}",
                    f"parallel.sequence={str(family in DIVIDED).lower()}",
                ],
            }
            for family, strategy in cases
        ]
        seen |= dict(zip(cases, zip(*run_jobs(root, jobs, processes), strict=True), strict=True))
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_are_those_of_one_process(family, strategy, alone, together):
    steps = [event for event in alone[family][1] if isinstance(event, StepEvent)]
    evaluations = [event.metrics["val_loss"] for event in alone[family][1] if isinstance(event, EvaluationEvent)]
    for seen in together[family, strategy]:
        assert seen["losses"] == pytest.approx([event.loss for event in steps], rel=1e-7)
        assert seen["norms"] == pytest.approx([event.grad_norm for event in steps], rel=1e-5)
        assert seen["evaluations"] == pytest.approx(evaluations, rel=1e-7)
        assert seen["metrics"] == pytest.approx(alone[family][0].metrics, rel=1e-7), "all divide the last validation"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_finished_run_is_an_ordinary_model_folder(family, strategy, root, alone, together):
    model = mb.Transformer.from_pretrained(root / family / strategy)
    assert sum(weight.numel() for weight in model.parameters()) == sum(
        weight.numel() for weight in alone[family][0].model.parameters()
    )
    main, *others = together[family, strategy]
    assert main["metrics"] == pytest.approx(alone[family][0].metrics, rel=1e-3)
    assert all(other["metrics"] == {} for other in others)


def test_each_process_stores_its_part_of_the_weights(alone, together):
    for family, (run, _) in alone.items():
        whole = sum(weight.numel() for weight in run.model.parameters())
        assert [seen["stored"] for seen in together[family, "ddp"]] == [whole, whole]
        parts = [seen["stored"] for seen in together[family, "fsdp"]]
        assert sum(parts) == whole
        assert max(parts) < 0.56 * whole
    whole = sum(weight.numel() for weight in alone["divisible"][0].model.parameters())
    assert max(seen["stored"] for seen in together["divisible", "tp"]) < 0.6 * whole
    assert max(seen["stored"] for seen in together["divisible", "fsdp+tp"]) < 0.31 * whole


def test_a_checkpoint_of_several_processes_is_safetensors_and_json_and_can_be_read_whole(root, together):
    path = root / "gpt/fsdp/checkpoints/step-6"
    assert checkpoint.find_problem(path) is None
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    parts = sharded_checkpoint.load(path).tensors
    whole = checkpoint.load(root / "gpt/ddp/checkpoints/step-6").tensors
    assert parts.keys() == whole.keys()
    for group in ("model", "optimizer"):
        assert parts[group].keys() == whole[group].keys()
        for name, tensor in whole[group].items():
            torch.testing.assert_close(parts[group][name], tensor, atol=1e-5, rtol=1e-3)


def test_a_run_is_resumed_with_other_strategies_and_numbers_of_processes(root, alone, tmp_path):
    """2 pp → 1 → 4 fsdp+tp → 2 tp: no sample is repeated or left out, and the losses are those of one process."""
    recipe, folder = root / "experts/recipe.toml", tmp_path / "run"
    job = {"recipe": str(recipe), "folder": str(folder), "overrides": ["train.parallel=pp", "train.save_every=3"]}
    seen = [run_jobs(tmp_path, [job | {"until": 4}])[0][0]]
    text = recipe.read_text()
    recipe.write_text(text.replace("save_every = 4", "save_every = 3"))
    with default_dtype(torch.float64):
        train_until(recipe, folder, 7, resume=True)
    recipe.write_text(text)
    job["resume"] = True
    job["overrides"] = ["train.parallel=fsdp+tp", "parallel.tensor=2", "train.save_every=3"]
    seen += run_jobs(tmp_path, [job | {"until": 10}], processes=4)[0]
    seen += run_jobs(tmp_path, [job | {"overrides": ["train.parallel=tp"]}])[0]
    steps = [event for event in alone["experts"][1] if isinstance(event, StepEvent)]
    lines = [line for line in read_metrics(folder) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["loss"] for line in lines] == pytest.approx([event.loss for event in steps], rel=1e-5)
    plan = alone["experts"][0].task_data.batch_plan
    for part in seen:
        for step, samples in part["samples"].items():
            assert samples == plan.batch_at(int(step) - 1).indices.tolist()
    for part, first in zip(seen, (1, 7, 10), strict=True):
        assert min(map(int, part["samples"])) == first


@pytest.mark.parametrize("strategy", BACKGROUND)
def test_checkpoints_written_in_the_background_are_the_same(strategy, root, together):
    assert (
        together["experts", strategy][0]["losses"] == together["experts", f"{strategy} in the background"][0]["losses"]
    )
    for step in (4, 8, 12):
        folders = [
            root / "experts" / name / f"checkpoints/step-{step}" for name in (strategy, f"{strategy} in the background")
        ]
        assert [checkpoint.find_problem(folder) for folder in folders] == [None, None]
        first, second = (sharded_checkpoint.load(folder).tensors for folder in folders)
        for group in ("model", "optimizer", "average"):
            assert first[group].keys() == second[group].keys()
            assert all(torch.equal(tensor, second[group][name]) for name, tensor in first[group].items())


def test_processes_that_share_matrices_drop_the_same_elements_after_a_resume(tmp_path):
    """Weights that every process stores whole stay equal, although the run was begun with other random streams."""
    recipe = write_recipe(tmp_path, EXACT, {"model": {"dropout": 0.3}, "train": {"steps": 4, "save_every": 2}})
    job = {"recipe": str(recipe), "folder": str(tmp_path / "run"), "overrides": ["train.parallel=ddp"], "until": 3}
    resumed = job | {"overrides": ["train.parallel=tp"], "resume": True, "until": 9}
    main, other = (seen[1]["replicated"] for seen in run_jobs(tmp_path, [job, resumed]))
    assert other
    assert {name: main[name] for name in other} == other  # at the end, the main process has the whole model


def test_every_group_of_processes_has_the_time_out_of_the_recipe(tmp_path):
    recipe = write_recipe(tmp_path, EXACT, {"train": {"steps": 1}})
    overrides = ["train.parallel=fsdp+tp", "parallel.tensor=2", "parallel.timeout=77"]
    job = {"recipe": str(recipe), "folder": str(tmp_path / "run"), "overrides": overrides}
    for seen in run_jobs(tmp_path, [job], processes=4):
        assert seen[0]["timeouts"] == [77.0, 77.0]
