"""Planned memory: the state equals that of rank 0 of a fake group; the peak is within 10 % of measured peaks."""

import pytest

from monoblock.accounting.fused_loss import fuses_loss
from monoblock.accounting.parallel import ParallelPlan, plan_ranks
from monoblock.accounting.report import account
from monoblock.config.families import bert, gpt, llama, t5
from monoblock.config.knobs import vary
from monoblock.config.presets import preset
from monoblock.model import Transformer
from monoblock.parallel.tensor_parallel import split_model, to_local

SIZES = {"vocab": 1024, "width": 256, "depth": 4, "heads": 8, "context": 512}
MODELS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=4, hidden=768),
    "bert": bert(**SIZES, head="masked_lm"),
    "t5": t5(vocab=1024, width=256, depth=4, heads=8, head_dim=32, hidden=1024),
}
MODES = pytest.mark.parametrize("checkpointing", [False, "selective", True], ids=["plain", "selective", "checkpointed"])


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "fsdp+tp"])
def test_the_state_of_a_rank_is_that_of_its_shards(fake, name, strategy):
    plan = account(MODELS[name]).plan(
        strategy, 2 if strategy == "tp" else 8, tensor=2 if strategy == "fsdp+tp" else None
    )
    assert plan.memory.state == pytest.approx(fake.sharded_state_bytes(MODELS[name], plan.parallel), rel=0.01)


def test_key_value_heads_that_do_not_divide_are_replicated(fake):
    plan = account(MODELS["llama"]).plan("tp", 8, tensor=8)
    assert plan.memory.state == pytest.approx(fake.sharded_state_bytes(MODELS["llama"], plan.parallel), rel=0.01)


SMALL = {"vocab": 97, "width": 48, "depth": 2, "heads": 8}
SPLIT = {
    "gpt": gpt(**SMALL, context=32),
    "llama": llama(**SMALL, context=32, kv_heads=4, hidden=96),
    "two key/value heads": llama(**SMALL, context=32, kv_heads=2, hidden=96),
    "bert": bert(**SMALL, context=32, head="masked_lm"),
    "t5": t5(**SMALL, head_dim=6, hidden=64),
    "experts": vary(preset("mixtral-8x7b"), **SMALL, kv_heads=4, hidden=64, context=32),
}


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("name", SPLIT)
def test_a_rank_has_the_weights_that_training_gives_it(fake, name, tensor):
    plan = account(SPLIT[name]).plan("tp", tensor)
    with fake.fake_group(plan.parallel) as mesh:
        model = Transformer(SPLIT[name])
        assert split_model(model, mesh["tensor"]) == []
        weights = sum(to_local(weight).numel() for weight in model.parameters())
    assert plan.memory.weights == 4 * weights


@pytest.mark.parametrize("preset_name", ["llama2-70b", pytest.param("gpt3-175b", marks=pytest.mark.slow)])
def test_the_state_of_a_large_model_on_512_ranks(fake, preset_name):
    config = preset(preset_name)
    plan = account(config).plan("fsdp+tp", 512)
    assert plan.memory.state == pytest.approx(fake.sharded_state_bytes(config, plan.parallel), rel=0.01)


LLAMA_134M = {"vocab": 32_000, "width": 768, "depth": 12, "heads": 12, "hidden": 2048, "context": 1024}
H200_PEAKS = {  # MiB of benchmarks/results/planned-memory.md
    "gpt2": (preset("gpt2"), 8, 1024, False, 5366),
    "gpt2, 32 texts": (preset("gpt2"), 32, 1024, False, 13_290),
    "llama": (llama(**LLAMA_134M), 8, 1024, False, 5853),
    "bert": (bert(vocab=30_522, width=768, depth=12, heads=12, context=512, head="masked_lm"), 16, 512, False, 4922),
    "t5": (preset("t5-base"), 8, 512, False, 6223),
    "checkpointed": (
        llama(vocab=32_000, width=2048, depth=18, heads=16, hidden=5632, context=2048),
        *(4, 2048, True, 16_797),
    ),
    "selective": (llama(**LLAMA_134M, kv_heads=4), 8, 1024, "selective", 3876),
}


@pytest.mark.parametrize(("config", "batch", "length", "checkpointing", "peak"), H200_PEAKS.values(), ids=H200_PEAKS)
def test_the_peak_of_a_step_on_an_h200(config, batch, length, checkpointing, peak):
    memory = account(config).plan(batch=batch, length=length, checkpointing=checkpointing).memory
    assert memory.peak / 2**20 == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(("checkpointing", "peak"), [(False, 54_785), ("selective", 24_658), (True, 8893)])
def test_the_peak_of_a_70b_on_512_ranks_as_in_the_results(checkpointing, peak):
    """The peaks of benchmarks/results/planned-memory.md, in MiB, on fake tensors."""
    memory = account("llama2-70b").plan("fsdp+tp", 512, checkpointing=checkpointing).memory
    assert (memory.peak - memory.workspace) / 2**20 == pytest.approx(peak, rel=0.1)


def compare_peaks(fake, config, batch, checkpointing):
    memory = account(config).plan(batch=batch, length=512, checkpointing=checkpointing).memory
    peak = fake.step_peak_bytes(config, ParallelPlan(), batch, 512, checkpointing=checkpointing)
    assert memory.peak - memory.workspace == pytest.approx(peak, rel=0.1)


@MODES
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step_on_one_gpu(fake, name, checkpointing):
    compare_peaks(fake, MODELS[name], 4, checkpointing)


@pytest.mark.parametrize(("name", "checkpointing"), [*((name, False) for name in MODELS), ("llama", "selective")])
def test_the_peak_in_the_fused_loss(fake, name, checkpointing):
    """The weight is padded, and its gradient is as large as the logits."""
    compare_peaks(fake, vary(MODELS[name], vocab=20_011), 4, checkpointing)


def test_the_peak_of_a_loss_of_few_classes(fake):
    """With fewer than 1,024 classes the logits are stored."""
    compare_peaks(fake, vary(MODELS["gpt"], vocab=1000), 4, "selective")


def test_the_logits_are_computed_for_a_part_of_the_tokens_at_a_time(fake):
    compare_peaks(fake, vary(MODELS["gpt"], vocab=120_000), 16, True)


@pytest.mark.parametrize(
    ("strategy", "config", "expected"),
    [
        ("ddp", MODELS["gpt"], True),
        ("fsdp", MODELS["gpt"], True),
        ("tp", MODELS["gpt"], False),
        ("fsdp+tp", MODELS["gpt"], False),
        ("pp", MODELS["gpt"], False),
        ("ddp", vary(MODELS["gpt"], vocab=1023), False),
        ("ddp", preset("gemma2-2b"), False),
    ],
)
def test_which_losses_are_fused(strategy, config, expected):
    tensor = 2 if strategy == "fsdp+tp" else None
    assert fuses_loss(config, plan_ranks(config, strategy, 4, tensor=tensor)) == expected


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_selective_checkpointing_inside_a_block(fake, name):
    """With few logits, the peak is where the last block is recomputed, not in the loss."""
    compare_peaks(fake, vary(MODELS[name], vocab=32), 8, "selective")


def test_selective_checkpointing_recomputes_a_block_with_batch_norms_entirely(fake):
    config = vary(MODELS["gpt"], vocab=32, norm="batch")
    full, selective = (account(config).plan(batch=8, length=512, checkpointing=mode) for mode in (True, "selective"))
    assert (selective.memory, selective.compute_seconds) == (full.memory, full.compute_seconds)
    peaks = [fake.step_peak_bytes(config, ParallelPlan(), 8, 512, checkpointing=mode) for mode in (True, "selective")]
    assert peaks[0] == peaks[1]


@MODES
@pytest.mark.parametrize(("strategy", "vocab"), [("fsdp", 20_011), ("fsdp+tp", 1024), ("fsdp+tp", 20_011)])
def test_the_peak_of_a_step_on_8_ranks(fake, strategy, checkpointing, vocab):
    """With RMS norms: autocast computes layer norms in fp32 on a GPU, but not on the CPU that the fake ranks are."""
    config = vary(MODELS["llama"], vocab=vocab)
    plan = account(config).plan(strategy, 8, batch=4, length=512, checkpointing=checkpointing)
    peak = fake.step_peak_bytes(config, plan.parallel, 4, 512, checkpointing=checkpointing)
    assert plan.memory.peak - plan.memory.workspace == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(("strategy", "gpus"), [("ddp", 1), ("fsdp", 8)])
def test_the_peak_of_a_small_batch_with_a_tied_embedding(fake, strategy, gpus):
    config = vary(MODELS["gpt"], vocab=20_011)
    plan = account(config).plan(strategy, gpus, length=128, checkpointing=True)
    peak = fake.step_peak_bytes(config, plan.parallel, 1, 128, checkpointing=True)
    assert gpus > 1 or plan.memory.peak_at == "input"
    assert plan.memory.peak - plan.memory.workspace == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@MODES
def test_the_peak_of_a_70b_on_512_ranks(fake, checkpointing):
    config = preset("llama2-70b")
    plan = plan_ranks(config, "fsdp+tp", 512)
    memory = account(config).plan("fsdp+tp", 512, checkpointing=checkpointing).memory
    peak = fake.step_peak_bytes(config, plan, 1, 4096, checkpointing=checkpointing)
    assert memory.peak - memory.workspace == pytest.approx(peak, rel=0.1)
