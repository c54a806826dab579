"""Pipeline parallelism: other numbers of stages, uneven micro-batches, data parallelism, bad losses and refusals."""

import copy

import pytest
import torch
from training_support import (
    MASKED_LM_RECIPE,
    SEQ2SEQ_RECIPE,
    merge_recipes,
    read_metrics,
    run_jobs,
    train_to_end,
    train_until,
    write_recipe,
)

import monoblock as mb
from monoblock.accounting.parallel import pipeline_size
from monoblock.config.presets import tiny
from monoblock.errors import ConfigError
from monoblock.nn.embedding import PatchEmbedding
from monoblock.parallel.pipeline_parallel import Stage, _group_by_rows, _sum_together, plan_stages
from monoblock.training.collate import TensorBatch
from monoblock.training.events import EvaluationEvent, StepEvent

SHORT = {
    "model": {"dropout": 0.0},
    "train": {"steps": 8, "batch": 7, "save_every": 4, "eval_every": 4, "eval_batches": 3, "clip": 0.5},
}
T5 = merge_recipes(  # six blocks: in four stages the decoder begins in the middle of the second
    SEQ2SEQ_RECIPE,
    {"model": {"family": "t5", "width": 21, "depth": 3, "heads": 3, "hidden": 35, "context": 47, "tie": "three_way"}},
    {"tokenizer": {"dropout": 0.0}, "train": {"schedule": "cosine", "layer_decay": 0.8}},
)
EXPERTS = {
    "model": {
        "family": "llama",
        "width": 24,
        "depth": 4,
        "heads": 3,
        "hidden": 19,
        "context": 13,
        "experts": 3,
        "top_k": 2,
        "tie": "output",
    },
    "train": {"ema": 0.9, "batch": 4, "accumulate": 2, "load_balancing": 0.1},
}
CASES = {  # the recipe, and what the run in several processes changes
    "t5": (T5, []),
    "experts": (EXPERTS, []),
    "gpt": (  # 7 rows are split into 2, 3 and 2; all weights of the first of four stages are frozen
        {"model": {"depth": 5}, "train": {"freeze_layers": 2}},
        ["parallel.microbatches=3", "parallel.schedule=gpipe"],
    ),
    "bert": (merge_recipes(MASKED_LM_RECIPE, {"model": {"depth": 4}}), ["train.activation_checkpointing=true"]),
}
LAYOUTS = {"four stages": 4, "two stages, two parts of a batch": 2}
BAD_STEPS = [5, 6, 7]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipeline")
    for name, (changes, _) in CASES.items():
        write_recipe(root / name, SHORT, changes, {"model": {"dropout": 0.0}})
    return root


@pytest.fixture(scope="module")
def alone(root):
    return {name: train_to_end(root / name / "recipe.toml", root / name / "alone") for name in CASES}


@pytest.fixture(scope="module")
def together(root):
    names, jobs = [], []
    for layout, stages in LAYOUTS.items():
        for name, (_, changes) in CASES.items():
            overrides = ["train.parallel=pp", f"parallel.pipeline={stages}", *changes]
            folders = {"recipe": str(root / name / "recipe.toml"), "folder": str(root / name / layout)}
            jobs.append({**folders, "overrides": overrides})
            names.append((name, layout))
        overrides = ["train.parallel=pp", f"parallel.pipeline={stages}", "train.max_skipped_updates=3"]
        folders = {"recipe": str(root / "experts/recipe.toml"), "folder": str(root / f"bad {stages}")}
        jobs.append({**folders, "overrides": [*overrides, "train.save_every=2"], "nan": BAD_STEPS})
        names.append(("bad", layout))
    return dict(zip(names, zip(*run_jobs(root, jobs, 4), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_one_process(name, layout, alone, together, root):
    run, events = alone[name]
    steps = [event for event in events if isinstance(event, StepEvent)]
    evaluations = [event.metrics["val_loss"] for event in events if isinstance(event, EvaluationEvent)]
    for seen in together[name, layout]:
        assert seen["losses"] == pytest.approx([event.loss for event in steps], rel=1e-5)
        assert seen["norms"] == pytest.approx([event.grad_norm for event in steps], rel=1e-4)
        assert seen["evaluations"] == pytest.approx(evaluations, rel=1e-5)
    weights = mb.Transformer.from_pretrained(root / name / layout).state_dict()
    for key, weight in run.model.state_dict().items():
        torch.testing.assert_close(weights[key], weight, atol=2e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_updates_are_skipped_and_rolled_back_in_all_processes(layout, together, alone):
    for seen in together["bad", layout]:
        assert seen["skipped"] == [step + 1 for step in BAD_STEPS]
        assert any("rolled back to step-4" in warning for warning in seen["warnings"])
        losses = [event.loss for event in alone["experts"][1] if isinstance(event, StepEvent)]
        assert seen["losses"] == pytest.approx(losses[:5], rel=1e-5)


@pytest.mark.slow
def test_each_process_stores_some_of_the_blocks(alone, together):
    whole = sum(weight.numel() for weight in alone["gpt"][0].model.parameters())
    assert max(seen["stored"] for seen in together["gpt", "four stages"]) < 0.6 * whole


@pytest.mark.slow
def test_a_run_is_resumed_across_pipelines_and_other_strategies(root, alone, tmp_path):
    """2 stages → 1 process → 2 stages with 2 parts of a batch → fsdp in 2: the losses are those of one process."""
    recipe, folder = root / "experts/recipe.toml", tmp_path / "run"
    job = {"recipe": str(recipe), "folder": str(folder), "overrides": ["train.parallel=pp", "train.save_every=1"]}
    seen = [run_jobs(tmp_path, [job | {"until": 3}])[0][0]]
    text = recipe.read_text()
    recipe.write_text(text.replace("save_every = 4", "save_every = 1"))
    train_until(recipe, folder, 5, resume=True)
    recipe.write_text(text)
    job["resume"] = True
    seen += run_jobs(tmp_path, [job | {"until": 7, "overrides": [*job["overrides"], "parallel.pipeline=2"]}], 4)[0]
    seen += run_jobs(tmp_path, [job | {"overrides": ["train.parallel=fsdp"]}])[0]
    steps = [event for event in alone["experts"][1] if isinstance(event, StepEvent)]
    lines = [line for line in read_metrics(folder) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == pytest.approx([event.loss for event in steps], rel=1e-5)
    plan = alone["experts"][0].task_data.batch_plan
    for part, first in zip(seen, (1, 5, 7), strict=True):
        assert min(map(int, part["samples"])) == first
        for step, samples in part["samples"].items():
            assert samples == plan.batch_at(int(step) - 1).indices.tolist()


# -- stages -----------------------------------------------------------------------------------------------------------


def example_arguments(model):
    """Return inputs of a model by name: tokens with padding, or pixels."""
    config, generator = model.config, torch.Generator().manual_seed(2)

    def ids(length):
        return torch.randint(0, 11, (3, length), generator=generator)

    def padded(length):
        return torch.arange(length) < torch.tensor([length, length - 1, length - 2])[:, None]

    if isinstance(model.input, PatchEmbedding):
        return {"source": torch.rand(3, config.input.channels, config.input.image, config.input.image)}
    if config.family == "encoder-decoder":
        return {"source": ids(7), "target": ids(6), "source_mask": padded(7)}
    return {"source": ids(7), "attention_mask": padded(7)}


@pytest.mark.parametrize(
    ("name", "stages"),
    [(name, 2) for name in ("gpt2", "gemma2-2b", "mixtral-8x7b", "bert-base", "electra-small", "deit-base")]
    + [(name, 3) for name in ("t5-small", "mt5-small", "vaswani-base", "bart-base", "m2m100-418m")]
    + [("t5-small", 2), ("bart-base", 4)],
)
def test_the_stages_of_a_model_compute_what_it_computes(name, stages):
    """The output, the router logits and the gradient of every weight, summed over its copies."""
    whole = mb.Transformer(tiny(name)).eval()
    inputs, labels = example_arguments(whole), torch.zeros(3)
    length = whole._embed_source(inputs["source"])[0].shape[1]
    seen, routers = [], []
    tap = lambda name, tensor: (routers if name.endswith("router") else []).append(tensor) or tensor
    expected = whole(**inputs, tap=tap)
    gradients = dict.fromkeys((name for name, _ in whole.named_parameters()), 0.0)
    (expected.square().sum() + sum(logits.sum() for logits in routers)).backward()
    received, routers[:] = (), []
    parts = [copy.deepcopy(whole) for _ in range(stages)]
    plans = plan_stages(whole, stages)
    for number, part in enumerate(parts):
        part.zero_grad()
        stage = Stage(part, plans, number, None)
        stage.objective = lambda run, inputs, labels: run(**inputs, tap=tap)
        expected_input, expected_output = stage.examples(inputs, length)
        assert [t.shape for t in received] == [t.shape for t in expected_input]
        seen.append(received := stage(*received, **{f"input_{key}": x for key, x in inputs.items()}, labels=labels))
        if number < stages - 1:
            assert [t.shape for t in received] == [t.shape for t in expected_output]
    torch.testing.assert_close(received, expected)
    (received.square().sum() + sum(logits.sum() for logits in routers)).backward()
    for part in parts:
        for key, weight in part.named_parameters():
            gradients[key] = gradients[key] + (0.0 if weight.grad is None else weight.grad)
    for key, weight in whole.named_parameters():
        torch.testing.assert_close(gradients[key], weight.grad, atol=1e-4, rtol=1e-3)


def test_gradients_are_summed_in_buckets(monkeypatch):
    weights = [torch.nn.Parameter(torch.full((size, 2), 1.0)) for size in range(1, 31)]
    weights[3].requires_grad_(False)
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for weight in weights[:-1]:
        weight.grad = weight.detach().T.contiguous().T * 3 if weight.requires_grad else None
    half.grad = half.detach() * 5
    calls = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: calls.append(tensor.mul_(2)))
    _sum_together([*weights, half], None)
    assert len(calls) == 2, "one for each dtype"
    assert weights[3].grad is None
    assert not weights[-1].grad.any(), "a process without a gradient takes part"
    trained = [weight for weight in weights[:-1] if weight.requires_grad]
    assert all(torch.equal(weight.grad, torch.full_like(weight, 6)) for weight in trained)
    assert torch.equal(half.grad, torch.full_like(half, 10))


def test_all_parts_of_a_batch_run_their_micro_batches_in_the_same_order():
    """The load-balancing loss sums over the parts, so that the n-th micro-batch of each has to be the same one."""
    rows = [(2, 2), (1, 1), (1, 2), (2, 2)]  # of each micro-batch in the first part of the batch and in the second
    orders = []
    for part in (0, 1):
        batches = [TensorBatch({}, torch.full((counts[part], 1), n), 0, []) for n, counts in enumerate(rows)]
        groups = _group_by_rows(batches, rows)
        assert all(len({batch.labels.shape for batch in group}) == 1 for group in groups)
        orders.append([int(batch.labels[0]) for group in groups for batch in group])
        own = [int(batch.labels[0]) for group in _group_by_rows(batches) for batch in group]
        assert own == [[0, 3, 1, 2], [0, 2, 3, 1]][part], "by its own rows alone, each part has another order"
    assert orders[0] == orders[1] == [0, 3, 1, 2]


def test_what_cannot_be_a_pipeline_is_refused_in_one_line():
    model = mb.Transformer(mb.gpt(width=16, depth=3, heads=2, vocab=11, context=9))
    with pytest.raises(ConfigError, match=r"has 3 blocks, fewer than the 4 pipeline stages; lower parallel.pipeline"):
        plan_stages(model, 4)
    with pytest.raises(ConfigError, match=r"layers of this model share weights"):
        plan_stages(mb.Transformer(tiny("albert-xxlarge")), 2)
    with pytest.raises(ConfigError, match=r"blocks of a Transformer only"):
        plan_stages(torch.nn.Linear(2, 2), 2)
    with pytest.raises(ConfigError, match=r"parallel\.pipeline=3 does not divide 4 processes"):
        pipeline_size("pp", 3, 4)
