"""FLOPs in closed form: equal to torch's flop counter, forward and backward, and to counting pairs one by one."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from monoblock.accounting.flops import gpu_hours, pairs, rule_of_six
from monoblock.accounting.report import account
from monoblock.config import AttentionConfig, FramesConfig, RecurrentConfig
from monoblock.errors import InputError
from monoblock.families import bert, gpt, llama, t5, vaswani
from monoblock.model import Transformer
from monoblock.presets import PRESETS, preset, tiny
from monoblock.recurrent import Recurrent

BATCH, SOURCE, TARGET = 2, 13, 11
EXPERTS = {"mixtral-8x7b"}  # without data there are no routes: counted below, on the CPU
NAMED = ("gpt2", "bert-base", "t5-small", "vit-b16", "mistral-7b")


def plain(name, tensor):
    """A tap that wants to see everything, attention weights too: the plain path."""
    return tensor


class Weights:
    """A tap that wants attention weights alone: attention runs plain, experts gather their tokens."""

    def __call__(self, name, tensor):
        return tensor

    def wants(self, name):
        return name.endswith("attention.weights")


def build(config, device="meta"):
    with torch.device(device):
        return Transformer(config)


def read(config, device="meta", batch=BATCH, source=SOURCE, target=TARGET):
    """What a model of this kind takes, and the lengths to account for."""
    with torch.device(device):
        if config.family == "vision":
            image = config.input
            return (torch.zeros(batch, image.channels, image.image, image.image),), {}
        ids = torch.zeros(batch, source, dtype=torch.long)
        if config.family == "encoder-decoder":
            return (ids, torch.zeros(batch, target, dtype=torch.long)), {"length": source, "target_length": target}
        return (ids,), {"length": source}


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def agree(config, tap, **sizes):
    model = build(config)
    inputs, lengths = read(config, **sizes)
    found = account(config).flops(sizes.get("batch", BATCH), **lengths)
    assert counted(lambda: model(*inputs, tap=tap)) == found.forward
    assert counted(lambda: model(*inputs, tap=tap).sum().backward()) == found.training


@pytest.mark.parametrize("tap", [None, plain], ids=["fused", "plain"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in EXPERTS])
def test_a_toy_size_preset_takes_the_flops_that_torch_counts(name, tap):
    agree(tiny(name), tap)


@pytest.mark.parametrize("name", NAMED)
def test_a_published_model_takes_the_flops_that_torch_counts(name):
    agree(preset(name), plain, batch=3, source=101, target=67)


def test_frames_take_the_flops_that_torch_counts():
    words = vaswani(vocab=53, target_vocab=59, width=30, depth=2, heads=3, hidden=17)
    config = replace(words, input=FramesConfig(channels=11, context=17))
    model, inputs = Transformer(config), (torch.randn(3, 11, 2 * 17), torch.randint(59, (3, 13)))
    found = account(config).flops(3, 17, 13)
    assert counted(lambda: model(*inputs, tap=plain)) == found.forward
    assert counted(lambda: model(*inputs, tap=plain).sum().backward()) == found.training


def test_a_window_shorter_than_the_text_is_still_counted_whole():
    agree(tiny("mistral-7b"), plain, source=31)


def test_experts_are_counted_where_a_token_is_sent():
    config = tiny("mixtral-8x7b")
    model, (ids,) = build(config, "cpu").eval(), read(config, "cpu")[0]
    assert counted(lambda: model(ids, tap=Weights())) == account(config).flops(BATCH, SOURCE).forward


def test_checkpointing_costs_one_more_forward_pass_of_the_blocks():
    config = tiny("gpt2")
    model, (ids,) = build(config, "cpu"), read(config, "cpu")[0]
    for block in model.decoder.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with set_checkpoint_early_stop(False):
        work = counted(lambda: model(ids, tap=plain).sum().backward())
    assert work == account(config).flops(BATCH, SOURCE).checkpointed


def test_the_pixels_of_an_image_need_no_gradient():
    found = account("vit-b16").flops()
    assert found.training == 3 * found.forward - found.components["input.patch"]
    assert found.components["input.patch"] == 2 * 14**2 * 768 * 3 * 16**2


def test_a_pass_over_vit_b16_takes_its_published_17_5_giga_multiplications():
    """Dosovitskiy et al. 2021 and the model zoos state 17.5 to 17.6 GMACs at 224 pixels."""
    assert 17.5e9 < account("vit-b16").flops().forward / 2 < 17.6e9


# The pairs a mask lets through


@pytest.mark.parametrize("window", [None, 1, 2, 5, 13, 40])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("length", [1, 2, 7, 13])
def test_needed_pairs_are_those_counted_one_by_one(mask, window, length):
    attention = AttentionConfig(heads=3, mask=mask, window=window)
    seen = sum(
        (j <= i or mask == "full") and (window is None or abs(i - j) < window)
        for i in range(length)
        for j in range(length)
    )
    assert pairs(attention, length) == seen


def test_needed_work_leaves_out_the_future_and_nothing_else():
    config = gpt(vocab=53, width=30, depth=2, heads=3, context=29)
    found = account(config).flops(7, 29)
    assert found.forward - found.needed == 2 * 7 * (29 * 28 // 2) * 4 * 30
    both_sides = account(bert(vocab=53, width=30, depth=2, heads=3, context=29)).flops(7, 29)
    assert both_sides.needed == both_sides.forward


# Decoding


@pytest.mark.parametrize("name", ["gpt2", "mistral-7b", "t5-small"])
def test_decoding_without_a_cache_takes_the_flops_that_torch_counts(name):
    config, prompt, new = tiny(name), 3, 7
    model, work = build(config), 0
    both = config.family == "encoder-decoder"
    with torch.device("meta"):
        source = torch.zeros(BATCH, SOURCE, dtype=torch.long)
        memory = model.encode(source) if both else None
        for length in range(prompt, prompt + new):
            ids, last = torch.zeros(BATCH, length, dtype=torch.long), torch.zeros(BATCH, 1, dtype=torch.long)
            words = (None, ids) if both else (ids,)
            work += counted(partial(model, *words, memory=memory, logits_at=last, tap=plain))
        work += counted(lambda: model.encode(source)) if both else 0
    found = account(config).decoding(prompt=prompt, new=new, batch=BATCH, cached=False, source=SOURCE if both else None)
    assert found.flops == work
    assert found.positions == BATCH * sum(range(prompt, prompt + new))


def test_decoding_with_a_cache_takes_the_flops_of_single_rows():
    config, prompt, new = gpt(vocab=53, width=30, depth=2, heads=3, context=29), 5, 11
    whole = account(config)
    blocks = whole.flops(1, prompt).blocks
    for length in range(prompt + 1, prompt + new):
        blocks += whole.flops(1, 1).blocks + 2 * (length - 1) * 4 * 30  # one row of scores, beside its own
    found = whole.decoding(prompt=prompt, new=new)
    assert found.flops == blocks + new * 2 * 30 * 53
    assert found.positions == prompt + new - 1


def test_a_windowed_cache_keeps_the_row_short():
    sizes = {"vocab": 53, "width": 30, "depth": 2, "heads": 3, "context": 97}
    near, far = llama(**sizes, window=5), llama(**sizes)
    saved = account(far).decoding(prompt=10, new=20).flops - account(near).decoding(prompt=10, new=20).flops
    assert saved == 2 * 4 * 30 * sum(length - 5 for length in range(11, 30))


def test_beams_repeat_every_step_but_the_first():
    found = account("gpt2")
    greedy, beams = found.decoding(prompt=50, new=100), found.decoding(prompt=50, new=100, beams=5)
    first = found.decoding(prompt=50, new=1)
    assert beams.positions - first.positions == 5 * (greedy.positions - first.positions)
    assert beams.flops - first.flops == 5 * (greedy.flops - first.flops)
    assert beams.bytes_moved < 5 * greedy.bytes_moved  # the weights are read once for all of them


def test_a_cache_spares_work_more_than_it_moves_bytes():
    found = account("gpt2")
    cached, again = found.decoding(prompt=50, new=100), found.decoding(prompt=50, new=100, cached=False)
    assert again.flops / cached.flops > 20
    assert 100 * 2 * 85e6 < cached.bytes_moved < again.bytes_moved  # a hundred readings of 85 million weights and more


def test_an_encoder_is_run_once_however_much_is_written():
    config = t5(vocab=53, width=30, depth=2, heads=3, hidden=17)
    found = account(config)
    encoder = sum(n for name, n in found.flops(1, 23, 1).components.items() if name.startswith("encoder."))
    for new in (1, 5):
        with_it = found.decoding(new=new, source=23).flops
        assert with_it > encoder
    assert found.decoding(new=5, source=23).flops < 2 * encoder + found.decoding(new=5, source=1).flops * 23


# Budgets


def test_six_n_is_near_the_exact_count_for_a_wide_model():
    """The rule leaves out the scores and counts the embedding; both are small in a large model at a short length."""
    found = account("llama-7b").budget(10**12, peak=312e12, length=512)
    assert abs(found.flops / found.rule_of_six - 1) < 0.03


def test_gpu_hours_are_work_over_speed():
    assert gpu_hours(3600e12, peak=2e12, mfu=0.5) == pytest.approx(1.0)
    assert rule_of_six(7, 11) == 462
    found = account("gpt2").budget(10**9, peak=312e12, mfu=0.4, gpus=8)
    assert found.days == pytest.approx(found.gpu_hours / 24 / 8)


def test_impossible_speeds_are_refused():
    with pytest.raises(InputError, match="mfu"):
        gpu_hours(1.0, peak=1e12, mfu=40)


# The recurrent baselines


@pytest.mark.parametrize("depth", [1, 2])
def test_an_lstm_step_by_step_takes_the_flops_that_torch_counts(depth):
    """The fused LSTM is opaque to the counter, so the language model is compared by its cells."""
    config = RecurrentConfig(vocab=53, width=14, depth=depth)
    cells = [torch.nn.LSTMCell(14, 14) for _ in range(depth)]
    output = torch.nn.Linear(14, 53)

    def run():
        x, states = torch.zeros(3, 14), [None] * depth
        for _ in range(7):
            below = x
            for layer, cell in enumerate(cells):
                states[layer] = cell(below, states[layer])
                below = states[layer][0]
            output(below)

    assert counted(run) == account(config).flops(3, 7).forward


def test_an_lstm_encoder_decoder_repeats_its_decoder_for_every_target_token():
    config = RecurrentConfig(kind="encoder_decoder", vocab=53, width=14)
    found = account(config)
    model, ids = Recurrent(config), torch.zeros(3, 11, dtype=torch.long)
    with torch.no_grad():
        memory = model.encode(ids)
        state = model.initial(memory)
        step = counted(lambda: model.step(ids[:, 0], state, memory))
    one, two = found.flops(3, 11, 1), found.flops(3, 11, 2)
    uncounted = 2 * 3 * 11 * 14  # the counter knows no product of a matrix and a vector: v · tanh(…)
    assert two.forward - one.forward == step + uncounted
