"""Planned memory equals that of rank 0 of a fake process group, and that of steps on tensors without data."""

import importlib.util
from pathlib import Path

import pytest

from monoblock.accounting.parallel import ParallelPlan, plan_ranks
from monoblock.accounting.report import account
from monoblock.config.families import bert, gpt, llama
from monoblock.config.presets import preset

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "_fake_group.py"
SIZES = {"vocab": 1024, "width": 256, "depth": 4, "heads": 8, "context": 512}
MODELS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=4, hidden=768),
    "bert": bert(**SIZES, head="masked_lm"),
}


@pytest.fixture(scope="module")
def fake():
    spec = importlib.util.spec_from_file_location("fake_group", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "fsdp+tp"])
def test_the_state_of_a_rank_is_that_of_its_shards(fake, name, strategy):
    plan = account(MODELS[name]).plan(strategy, 8, tensor=2 if "tp" in strategy else None)
    assert plan.memory.state == pytest.approx(fake.sharded_state_bytes(MODELS[name], plan.parallel), rel=0.01)


def test_key_value_heads_that_do_not_divide_are_replicated(fake):
    plan = account(MODELS["llama"]).plan("tp", 8, tensor=8)
    assert plan.memory.state == pytest.approx(fake.sharded_state_bytes(MODELS["llama"], plan.parallel), rel=0.01)


@pytest.mark.parametrize("preset_name", ["llama2-70b", pytest.param("gpt3-175b", marks=pytest.mark.slow)])
def test_the_state_of_a_large_model_on_512_ranks(fake, preset_name):
    config = preset(preset_name)
    plan = account(config).plan("fsdp+tp", 512)
    assert plan.memory.state == pytest.approx(fake.sharded_state_bytes(config, plan.parallel), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step_on_one_gpu(fake, name, checkpointing):
    memory = account(MODELS[name]).plan(batch=4, length=512, checkpointing=checkpointing).memory
    peak = fake.step_peak_bytes(MODELS[name], ParallelPlan(), 4, 512, checkpointing=checkpointing)
    assert memory.peak - memory.workspace == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp+tp"])
def test_the_peak_of_a_step_on_8_ranks(fake, strategy, checkpointing):
    """With RMS norms: autocast computes layer norms in fp32 on a GPU, but not on the CPU that the fake ranks are."""
    config = MODELS["llama"]
    plan = account(config).plan(strategy, 8, batch=4, length=512, checkpointing=checkpointing)
    peak = fake.step_peak_bytes(config, plan.parallel, 4, 512, checkpointing=checkpointing)
    assert plan.memory.peak - plan.memory.workspace == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_the_peak_of_a_70b_on_512_ranks(fake, checkpointing):
    config = preset("llama2-70b")
    plan = plan_ranks(config, "fsdp+tp", 512)
    memory = account(config).plan("fsdp+tp", 512, checkpointing=checkpointing).memory
    peak = fake.step_peak_bytes(config, plan, 1, 4096, checkpointing=checkpointing)
    assert memory.peak - memory.workspace == pytest.approx(peak, rel=0.05)
