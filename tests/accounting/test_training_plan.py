"""Plans of runs on many GPUs: sizes of the dimensions, communication in closed form, time, and the price of GPT-3."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from monoblock.accounting.flops import resolve_batch_shape
from monoblock.accounting.parallel import (
    STRATEGIES,
    ParallelPlan,
    narrow_block,
    pipeline_size,
    plan_ranks,
    rank_block_parameters,
    replicated_kv_heads,
    tensor_size,
)
from monoblock.accounting.parameters import block_matrix_weights, block_parameters
from monoblock.accounting.rank_memory import rank_memory
from monoblock.accounting.report import account
from monoblock.accounting.training_plan import (
    Hardware,
    all_gather_bytes,
    all_reduce_bytes,
    pipeline_bubble,
    plan_training,
)
from monoblock.cli.account import Account
from monoblock.cli.verb import build_command
from monoblock.config.families import gpt, llama, t5
from monoblock.config.model import RecurrentConfig
from monoblock.config.presets import preset
from monoblock.errors import ConfigError, InputError

LLAMA = llama(vocab=96, width=64, depth=4, heads=8, kv_heads=4, hidden=96, context=32)
GPT = gpt(vocab=96, width=64, depth=4, heads=8, context=32)
LLAMA_70B = preset("llama2-70b")


def sends(config, plan, **options):
    """The bytes that a rank sends, by dimension."""
    return {transfer.dimension: transfer.bytes for transfer in plan_training(config, plan, **options).transfers}


# -- dimensions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", ParallelPlan(data=512)),
        ("fsdp", ParallelPlan(shard=512)),
        ("fsdp+tp", ParallelPlan(shard=64, tensor=8)),
    ],
)
def test_a_strategy_divides_512_gpus(strategy, expected):
    assert plan_ranks(LLAMA_70B, strategy, 512) == expected
    assert expected.size == 512


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["tp", "fsdp+tp", "pp"])
def test_a_plan_has_the_groups_that_training_forms(strategy, gpus):
    config = gpt(vocab=96, width=64, depth=8, heads=8, context=32)
    plan = plan_ranks(config, strategy, gpus, gpus_per_node=4)
    assert plan.tensor == tensor_size(strategy, 0, gpus, min(4, gpus))
    assert plan.pipeline == pipeline_size(strategy, 0, gpus)
    assert plan.size == gpus


def test_what_training_refuses_or_leaves_whole_is_not_planned():
    with pytest.raises(ConfigError, match=r"does not fit 16 processes .*write train.parallel=fsdp\+tp"):
        plan_ranks(GPT, "tp", 16, tensor=8)  # training makes one group of all processes
    with pytest.raises(ConfigError, match="tensor=16 does not divide attention with heads=8 of this model"):
        plan_ranks(GPT, "tp", 16)
    with pytest.raises(ConfigError, match="does not divide attention with heads=24"):
        plan_ranks(llama(vocab=96, width=48, depth=2, heads=24, kv_heads=6, hidden=96, context=32), "tp", 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gpu_is_a_plan_of_every_strategy(strategy):
    assert plan_ranks(LLAMA, strategy, 1) == ParallelPlan()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"strategy": "fdsp"}, "did you mean 'fsdp'"),
        ({"strategy": "ddp", "tensor": 2}, "tensor=2 has no effect with strategy='ddp'"),
        ({"strategy": "fsdp+tp", "tensor": 3, "gpus": 6}, "tensor=3 does not divide attention with heads=8"),
        ({"strategy": "fsdp+tp", "tensor": 8, "gpus": 12}, "tensor=8 does not fit 12 processes"),
        ({"strategy": "pp", "pipeline": 8}, "pipeline=8 is more than the 4 layers"),
        ({"strategy": "pp", "pipeline": 3}, "pipeline=3 does not divide 16 processes"),
        ({"strategy": "fsdp", "gpus": 0}, "gpus=0 is too small"),
    ],
)
def test_a_plan_that_is_impossible_is_an_error(words, message):
    words = {"gpus": 16} | words
    with pytest.raises(ConfigError, match=message):
        plan_ranks(GPT, words.pop("strategy"), words.pop("gpus"), **words)


def test_a_pipeline_is_for_one_stack_and_plans_are_for_transformers():
    with pytest.raises(ConfigError, match="two stacks"):
        account(t5(vocab=53, width=32, depth=2, heads=4, hidden=16)).plan("pp", 2)
    with pytest.raises(ConfigError, match="LSTM"):
        account(RecurrentConfig(vocab=53, width=14)).plan()


def test_a_tensor_group_lies_within_a_node():
    plan = ParallelPlan(shard=64, tensor=8)
    assert not plan.crosses_nodes("tensor")
    assert plan.crosses_nodes("shard")
    assert not ParallelPlan(shard=2, tensor=4).crosses_nodes("shard")
    assert ParallelPlan(data=2, tensor=4).crosses_nodes("data", gpus_per_node=4)


# -- parameters of a rank ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_ranks_of_a_group_have_all_matrices_once_and_what_is_added_to_hidden_states_on_each(config, tensor):
    block = next(config.decoder.layers())
    whole, part = sum(block_parameters(block).values()), rank_block_parameters(block, tensor)
    replicated = 2 * 64 * (1 if config is LLAMA else 2) + (0 if config is LLAMA else 2 * 64)  # norms, output biases
    assert tensor * part.matrices == block_matrix_weights(block)
    assert tensor * (part.total - replicated) + replicated == whole


def test_key_value_heads_that_do_not_divide_are_on_every_rank():
    block = next(LLAMA.decoder.layers())
    keys_and_values = 2 * 64 * (4 * 8)
    divided = block_matrix_weights(block) - keys_and_values
    assert replicated_kv_heads(block.attention, 8) == 3  # the narrow block has one head, which needs one
    assert rank_block_parameters(block, 8).matrices == divided // 8 + keys_and_values
    assert narrow_block(block, 8).attention.heads == 1


# -- communication -----------------------------------------------------------------------------------------------------


def test_collectives_send_as_much_as_a_ring():
    assert all_reduce_bytes(800, 8) == 2 * 7 * 100
    assert all_gather_bytes(800, 8) == 7 * 100
    assert all_reduce_bytes(800, 1) == all_gather_bytes(800, 1) == 0


def test_ddp_sends_the_gradients_once_whatever_the_number_of_micro_batches():
    size = 4 * account(GPT).parameters
    for micro_batches in (1, 5):
        sent = sends(GPT, ParallelPlan(data=16), micro_batches=micro_batches)
        assert sent == {"data": 2 * size * 15 // 16}


def test_fsdp_gathers_16_bit_weights_twice_and_scatters_fp32_gradients_for_each_micro_batch():
    count = account(GPT).parameters
    sent = sends(GPT, ParallelPlan(shard=16), micro_batches=3)["shard"]
    assert sent == pytest.approx(3 * (2 * 2 * count + 4 * count) * 15 / 16, abs=10)


@pytest.mark.parametrize(("checkpointing", "count"), [(False, 4 * 4 + 2), ("selective", 4 * 6 + 2), (True, 4 * 6 + 2)])
def test_tensor_parallelism_reduces_hidden_states_four_times_a_block_and_six_if_recomputed(checkpointing, count):
    hidden = 2 * 3 * 32 * 64
    sent = sends(GPT, ParallelPlan(tensor=4), batch=3, checkpointing=checkpointing)
    assert sent == {"tensor": count * 2 * hidden * 3 // 4}


def test_a_pipeline_sends_hidden_states_forward_and_gradients_back():
    sent = sends(GPT, ParallelPlan(pipeline=4), batch=3, micro_batches=5)
    assert sent == {"pipeline": 5 * 2 * 4 * 3 * 32 * 64}


# -- time and money ----------------------------------------------------------------------------------------------------


def test_the_bubble_of_a_pipeline_shrinks_with_the_number_of_micro_batches():
    assert pipeline_bubble(1, 7) == 0
    assert pipeline_bubble(4, 12) == pytest.approx(3 / 15)
    plan = plan_training(GPT, ParallelPlan(pipeline=4), micro_batches=12)
    assert plan.step_seconds == pytest.approx((plan.compute_seconds + plan.exposed_seconds) / (1 - 3 / 15))
    assert plan_training(GPT, ParallelPlan(pipeline=4)).micro_batches == 16


def test_one_gpu_computes_at_the_given_utilization():
    hardware = Hardware(peak=100e12, utilization=0.3)
    plan = account("gpt2").plan(batch=8, hardware=hardware)
    assert plan.mfu == pytest.approx(0.3)
    assert plan.step_seconds == pytest.approx(account("gpt2").flops(8).training / 30e12)
    assert (plan.transfers, plan.exposed_seconds, plan.tokens_per_step) == ((), 0.0, 8 * 1024)
    checkpointed = account("gpt2").plan(batch=8, hardware=hardware, checkpointing=True)
    assert checkpointed.mfu < 0.3  # recomputation is no work of the model


def test_fsdp_overlaps_with_computation_and_ddp_with_the_last_backward_pass():
    fast = Hardware(intra_bandwidth=1e18, inter_bandwidth=1e18)
    slow = Hardware(intra_bandwidth=1e6, inter_bandwidth=1e6)
    for plan in (ParallelPlan(shard=8), ParallelPlan(data=8)):
        assert plan_training(GPT, plan, hardware=fast).exposed_seconds == 0
    sharded = plan_training(GPT, ParallelPlan(shard=8), hardware=slow)
    assert sharded.step_seconds == pytest.approx(sharded.transfer_seconds)
    replicated = plan_training(GPT, ParallelPlan(data=8), hardware=slow, micro_batches=2)
    backward = replicated.compute_seconds / 2 * 2 / 3
    assert replicated.exposed_seconds == pytest.approx(replicated.transfer_seconds - backward)


def test_transfers_of_tensor_parallelism_never_overlap():
    plan = plan_training(GPT, ParallelPlan(tensor=4))
    assert plan.exposed_seconds == plan.transfer_seconds > 0


def test_gpu_hours_follow_from_the_speed_of_a_step():
    plan = account(LLAMA_70B).plan("fsdp+tp", 512)
    steps = 2 * 10**12 / plan.tokens_per_step
    assert plan.gpu_hours(2 * 10**12) == pytest.approx(steps * plan.step_seconds * 512 / 3600)
    assert plan.tokens_per_step == 64 * 4096


def test_gpt_3_cost_4_6_million_dollars():
    """The documents say $4.6M: 300 billion tokens, 28 TFLOP/s of a V100, 1.50 dollars an hour."""
    budget = account("gpt3-175b").budget(300 * 10**9, peak=125e12, mfu=28 / 125, gpus=10_000, price=1.5)
    assert budget.rule_of_six == pytest.approx(3.14e23, rel=0.01)
    assert budget.gpu_hours / 24 / 365 == pytest.approx(355, rel=0.05)  # GPU years
    assert budget.cost == pytest.approx(4.6e6, rel=0.05)


def test_gpt_3_took_10_000_gpus_about_two_weeks():
    budget = account("gpt3-175b").budget(300 * 10**9, peak=125e12, mfu=28 / 125, gpus=10_000)
    assert 12 < budget.days < 15
    assert budget.cost is None


def test_gpt_3_fits_on_no_gpu_but_on_many():
    """Its weights and states take 2.8 TB, of which 1,024 GPUs hold 2.7 GB each."""
    gpt3 = account("gpt3-175b")
    assert not gpt3.plan("ddp", 1024, checkpointing=True).fits
    plan = gpt3.plan("fsdp+tp", 1024, checkpointing=True)
    assert plan.fits
    assert plan.memory.state == pytest.approx(16 * gpt3.parameters / 1024, rel=0.01)


def test_hardware_that_cannot_be_is_an_error():
    with pytest.raises(InputError, match="mfu=1"):
        Hardware(utilization=1.5)
    with pytest.raises(InputError, match="peak=0"):
        Hardware(peak=0)
    with pytest.raises(InputError, match="micro_batches=0"):
        account("gpt2").plan(micro_batches=0)


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(config, plan, **options):
    return rank_memory(config, resolve_batch_shape(config, 2, 32), plan, **options)


def test_shards_divide_the_state_and_tensor_ranks_nearly_do():
    whole = memory(LLAMA, ParallelPlan())
    assert whole.state == 16 * account(LLAMA).parameters
    assert memory(LLAMA, ParallelPlan(shard=8)).state * 8 == pytest.approx(whole.state, rel=1e-3)
    assert whole.state / 4 < memory(LLAMA, ParallelPlan(tensor=4)).state < whole.state / 3.5
    assert memory(LLAMA, ParallelPlan(data=8)).state == whole.state
    assert (
        whole.peak < memory(LLAMA, ParallelPlan(data=8)).peak <= whole.peak + whole.gradients
    )  # buckets from the start


def test_the_first_stage_of_a_pipeline_holds_the_most_micro_batches():
    one, many = (memory(LLAMA, ParallelPlan(pipeline=4), micro_batches=count) for count in (1, 16))
    assert many.stage == 0
    assert many.activations > 3 * one.activations


def test_a_tied_embedding_is_on_the_first_and_the_last_stage():
    tied, untied = replace(GPT, tie="output"), replace(GPT, tie="none")
    for config in (tied, untied):
        assert memory(config, ParallelPlan(pipeline=2)).weights == memory(untied, ParallelPlan(pipeline=2)).weights


def test_checkpointing_lowers_the_peak_of_a_deep_model():
    plain, checkpointed = (account("gpt2").plan(batch=8, checkpointing=on).memory for on in (False, True))
    assert checkpointed.peak < 0.8 * plain.peak
    assert checkpointed.state == plain.state


def test_selective_checkpointing_is_between_both():
    plain, selective, full = (account("gpt2").plan(batch=8, checkpointing=mode) for mode in (False, "selective", True))
    assert full.memory.peak < selective.memory.peak < plain.memory.peak
    assert plain.compute_seconds == selective.compute_seconds < full.compute_seconds


def test_an_optimizer_without_states_saves_their_memory():
    adamw, sgd = (memory(LLAMA, ParallelPlan(), optimizer=name) for name in ("adamw", "sgd"))
    assert adamw.optimizer == 8 * account(LLAMA).parameters
    assert sgd.optimizer == 0
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        memory(LLAMA, ParallelPlan(), optimizer="moun")


# -- command line ------------------------------------------------------------------------------------------------------


def run(*words):
    return CliRunner().invoke(build_command("account", Account), list(words))


def test_the_plan_of_a_70b_on_512_gpus_with_its_price():
    words = ("llama2-70b", "--gpus", "512", "--strategy", "fsdp+tp", "--tokens", "2e12", "--price", "2.5")
    report = json.loads(run(*words, "--json").stdout)
    plan = report["plan"]
    assert plan["parallel"] == {"data": 1, "shard": 64, "tensor": 8, "pipeline": 1}
    assert report["budget"]["tokens"] == 2 * 10**12
    for mode in plan["modes"].values():
        assert mode["cost"] == pytest.approx(2.5 * mode["gpu_hours"])
        assert mode["days"] == pytest.approx(mode["gpu_hours"] / 24 / 512)
    text = run(*words).stdout
    assert all(line in text for line in plan["assumptions"])
    assert "all-gather of weights, reduce-scatter of gradients" in text


def test_every_mode_of_checkpointing_is_reported():
    words = ("gpt2", "--batch", "8")
    assert all(
        heading in run(*words).stdout for heading in ("fused, selective", "plain, checkpointed", "selective: it")
    )
    training = json.loads(run(*words, "--json").stdout)["memory"]["training"]
    endings = ("", "_selective", "_checkpointed")
    assert list(training) == [kernel + ending for kernel in ("fused", "plain") for ending in endings]
    plan = ("gpt2", "--strategy", "ddp", "--gpus", "2")
    assert "without checkpointing  selective checkpointing  full checkpointing" in run(*plan).stdout
    modes = json.loads(run(*plan, "--json").stdout)["plan"]["modes"]
    assert {name: mode["checkpointing"] for name, mode in modes.items()} == {
        "plain": False,
        "selective": "selective",
        "checkpointed": True,
    }


def test_options_of_a_plan_need_a_strategy_and_a_price_needs_tokens():
    assert "--tensor 2 has no effect without --strategy" in run("gpt2", "--tensor", "2").stderr
    assert "--price 2.5 has no effect without --tokens" in run("gpt2", "--price", "2.5").stderr
    assert "--mfu 0.3 has no effect without --tokens or --strategy" in run("gpt2", "--mfu", "0.3").stderr


@pytest.mark.parametrize("tokens", ["2.5", "many", "0", "-3", "inf", "nan"])
def test_tokens_are_a_whole_number(tokens):
    assert "is not a whole number of 1 or more" in run("gpt2", f"--tokens={tokens}").stderr
