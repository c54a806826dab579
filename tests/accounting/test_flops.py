"""FLOPs in closed form equal those of the FLOP counter of torch, forward and backward."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support import has_experts, tiny_names
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from monoblock.accounting.flops import count_attention_pairs, gpu_hours, rule_of_six
from monoblock.accounting.report import account
from monoblock.accounting.training_plan import recomputed_flops
from monoblock.baselines.lstm import Recurrent
from monoblock.config.families import bert, gpt, llama, t5, vaswani
from monoblock.config.knobs import vary
from monoblock.config.model import AttentionConfig, FramesConfig, RecurrentConfig
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.config.presets import preset, tiny
from monoblock.errors import InputError
from monoblock.model import Transformer

BATCH, SOURCE, TARGET = 2, 13, 11
NAMED = ("gpt2", "bert-base", "t5-small", "vit-b16", "mistral-7b")


def identity_tap(name, tensor):
    """A tap that receives everything, attention weights too, and so selects the identity_tap path."""
    return tensor


class AttentionWeightsTap:
    """A tap for attention weights only: attention takes the identity_tap path, experts gather their tokens."""

    def __call__(self, name, tensor):
        return tensor

    def wants(self, name):
        return name.endswith("attention.weights")


def build_model(config, device="meta"):
    with torch.device(device):
        return Transformer(config)


def model_inputs(config, device="meta", batch=BATCH, source=SOURCE, target=TARGET):
    """The inputs of a model, and their lengths."""
    with torch.device(device):
        if config.family == "vision":
            image = config.input
            return (torch.zeros(batch, image.channels, image.image, image.image),), {}
        ids = torch.zeros(batch, source, dtype=torch.long)
        if config.family == "encoder-decoder":
            return (ids, torch.zeros(batch, target, dtype=torch.long)), {"length": source, "target_length": target}
        return (ids,), {"length": source}


def count_flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def assert_flops(config, tap, device="meta", **sizes):
    model = build_model(config, device)
    inputs, lengths = model_inputs(config, device, **sizes)
    costs = account(config).flops(sizes.get("batch", BATCH), **lengths)
    with FlopCounterMode(display=False) as counter:
        output = model(*inputs, tap=tap)
        assert counter.get_total_flops() == costs.forward
        output.sum().backward()
    assert counter.get_total_flops() == costs.training


@pytest.mark.parametrize("tap", [None, identity_tap], ids=["fused", "plain path"])
@pytest.mark.parametrize("name", tiny_names(lambda config: not has_experts(config)))  # routing needs data
def test_a_tiny_preset_has_the_flops_that_torch_counts(name, tap):
    """On the CPU, which is faster than the meta device, with products instead of a kernel that the counter ignores."""
    with sdpa_kernel(SDPBackend.MATH):
        assert_flops(tiny(name), tap, "cpu")


@pytest.mark.parametrize("name", NAMED)
def test_a_published_model_has_the_flops_that_torch_counts(name):
    assert_flops(preset(name), identity_tap, batch=3, source=101, target=67)


@pytest.mark.parametrize("head", HEADS_WITH_CLASSES)
def test_a_head_with_classes_has_the_flops_that_torch_counts(head):
    assert_flops(bert(vocab=53, width=30, depth=2, heads=3, context=29, head=head, classes=7), identity_tap)


def test_frames_have_the_flops_that_torch_counts():
    text_model = vaswani(vocab=53, target_vocab=59, width=30, depth=2, heads=3, hidden=17)
    config = replace(text_model, input=FramesConfig(channels=11, context=17))
    model, inputs = Transformer(config), (torch.randn(3, 11, 2 * 17), torch.randint(59, (3, 13)))
    costs = account(config).flops(3, 17, 13)
    assert count_flops(lambda: model(*inputs, tap=identity_tap)) == costs.forward
    assert count_flops(lambda: model(*inputs, tap=identity_tap).sum().backward()) == costs.training


def test_a_window_does_not_reduce_forward_flops():
    assert_flops(tiny("mistral-7b"), identity_tap, source=31)


def test_only_experts_that_tokens_are_routed_to_are_counted():
    config = tiny("mixtral-8x7b")
    model, (ids,) = build_model(config, "cpu").eval(), model_inputs(config, "cpu")[0]
    assert count_flops(lambda: model(ids, tap=AttentionWeightsTap())) == account(config).flops(BATCH, SOURCE).forward


def test_checkpointing_costs_one_more_forward_pass_of_the_blocks():
    config = tiny("gpt2")
    model, (ids,) = build_model(config, "cpu"), model_inputs(config, "cpu")[0]
    for block in model.decoder.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with set_checkpoint_early_stop(False):
        flops = count_flops(lambda: model(ids, tap=identity_tap).sum().backward())
    assert flops == account(config).flops(BATCH, SOURCE).training_checkpointed


@pytest.mark.parametrize("mode", [False, "selective", True])
def test_what_checkpointing_computes_a_second_time(mode):
    """The tap makes attention plain, so that selective checkpointing recomputes it; a fused kernel's output is kept."""
    costs = account("gpt2").flops(BATCH)
    assert recomputed_flops(preset("gpt2"), costs, mode) == (costs.forward_blocks if mode is True else 0)
    model, (ids,) = build_model(tiny("gpt2"), "cpu").train().recompute(mode), model_inputs(tiny("gpt2"), "cpu")[0]
    with set_checkpoint_early_stop(False):
        measured = count_flops(lambda: model(ids, tap=identity_tap).sum().backward())
    costs = account(tiny("gpt2")).flops(BATCH, SOURCE)
    plain = costs.components["decoder.attention.scores"] if mode == "selective" else 0
    assert measured == costs.training + plain + recomputed_flops(tiny("gpt2"), costs, mode)


@pytest.mark.parametrize("changes", [{"window": 64}, {"window": 64, "attention_dropout": 0.1}, {"softcap": 5.0}])
def test_selective_checkpointing_recomputes_attention_whose_output_it_cannot_keep(changes):
    """FlexAttention, banded attention and plain attention."""
    config = vary(gpt(vocab=61, width=32, depth=3, heads=2, context=512), **changes)
    costs = account(config).flops(BATCH, 512)
    assert recomputed_flops(config, costs, "selective") == costs.components["decoder.attention.scores"]


def test_the_pixels_of_an_image_need_no_gradient():
    costs = account("vit-b16").flops()
    assert costs.training == 3 * costs.forward - costs.components["input.patch"]
    assert costs.components["input.patch"] == 2 * 14**2 * 768 * 3 * 16**2


def test_a_pass_over_vit_b16_takes_its_published_17_5_giga_multiplications():
    """Dosovitskiy et al. 2021 and the model zoos state 17.5 to 17.6 GMACs at 224 pixels."""
    assert 17.5e9 < account("vit-b16").flops().forward / 2 < 17.6e9


# -- attention pairs -------------------------------------------------------------------------------------------------


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
    assert count_attention_pairs(attention, length) == seen


def test_needed_flops_leave_out_only_masked_pairs():
    config = gpt(vocab=53, width=30, depth=2, heads=3, context=29)
    costs = account(config).flops(7, 29)
    assert costs.forward - costs.forward_needed == 2 * 7 * (29 * 28 // 2) * 4 * 30
    both_sides = account(bert(vocab=53, width=30, depth=2, heads=3, context=29)).flops(7, 29)
    assert both_sides.forward_needed == both_sides.forward


# -- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "mistral-7b", "t5-small"])
def test_decoding_without_a_cache_has_the_flops_that_torch_counts(name):
    config, prompt, new = tiny(name), 3, 7
    model, flops = build_model(config), 0
    is_encoder_decoder = config.family == "encoder-decoder"
    with torch.device("meta"):
        source = torch.zeros(BATCH, SOURCE, dtype=torch.long)
        memory = model.encode(source) if is_encoder_decoder else None
        for length in range(prompt, prompt + new):
            ids, last = torch.zeros(BATCH, length, dtype=torch.long), torch.zeros(BATCH, 1, dtype=torch.long)
            inputs = (None, ids) if is_encoder_decoder else (ids,)
            flops += count_flops(partial(model, *inputs, memory=memory, logits_at=last, tap=identity_tap))
        flops += count_flops(lambda: model.encode(source)) if is_encoder_decoder else 0
    source_length = SOURCE if is_encoder_decoder else None
    cost = account(config).decoding(prompt=prompt, new=new, batch=BATCH, cached=False, source=source_length)
    assert cost.flops == flops
    assert cost.positions == BATCH * sum(range(prompt, prompt + new))


def test_decoding_with_a_cache_has_the_flops_of_single_rows():
    config, prompt, new = gpt(vocab=53, width=30, depth=2, heads=3, context=29), 5, 11
    model_account = account(config)
    blocks = model_account.flops(1, prompt).forward_blocks
    for length in range(prompt + 1, prompt + new):
        blocks += model_account.flops(1, 1).forward_blocks + 2 * (length - 1) * 4 * 30  # one more row of scores
    costs = model_account.decoding(prompt=prompt, new=new)
    assert costs.flops == blocks + new * 2 * 30 * 53
    assert costs.positions == prompt + new - 1


def test_a_windowed_cache_limits_the_keys_of_a_step():
    sizes = {"vocab": 53, "width": 30, "depth": 2, "heads": 3, "context": 97}
    local, full = llama(**sizes, window=5), llama(**sizes)
    saved = account(full).decoding(prompt=10, new=20).flops - account(local).decoding(prompt=10, new=20).flops
    assert saved == 2 * 4 * 30 * sum(length - 5 for length in range(11, 30))


PATTERNS = {
    "full": {},
    "prefix": {"mask": "prefix"},
    "window": {"window": 5},
    "window with global tokens": {"window": 5, "global_tokens": True},
    "window with random blocks": {"window": 5, "random_blocks": 2, "block_size": 4},
}


class ReadTap:
    """A tap that counts the elements of the keys and values that attention reads."""

    def __init__(self):
        self.elements = 0

    def __call__(self, name, tensor):
        if name.endswith(("attention.key", "attention.value")):
            self.elements += tensor.numel()
        return tensor


@torch.no_grad()
@pytest.mark.parametrize("changes", PATTERNS.values(), ids=list(PATTERNS))
def test_steps_with_a_cache_have_the_flops_and_read_the_keys_that_the_model_does(changes):
    config, prompt, new = vary(gpt(vocab=53, width=30, depth=2, heads=3, context=29), **changes), 7, 20
    model, ids, tap = build_model(config, "cpu").eval(), torch.zeros(BATCH, prompt + new, dtype=torch.long), ReadTap()
    cache = model.make_cache(BATCH, prompt + new, chunk=1)
    flags = torch.arange(prompt).expand(BATCH, prompt) < 3 if model.decoder.uses_flags else None
    model(ids[:, :prompt], cache=cache, flags=flags)
    flops = 0
    for length in range(prompt, prompt + new - 1):
        cache.advance(prompt if length == prompt else 1)
        flops += count_flops(partial(model, ids[:, length : length + 1], cache=cache, tap=tap))
    costs, first = (account(config).decoding(prompt=prompt, new=n, batch=BATCH, dtype="fp32") for n in (new, 1))
    assert costs.flops - first.flops == flops
    weights = sum(p.numel() for p in model.decoder.parameters() if p.dim() == 2) + 53 * 30
    written = BATCH * 2 * 2 * 30  # a key and a value in each of two blocks
    assert costs.bytes_moved - first.bytes_moved == 4 * ((new - 1) * (weights + written) + tap.elements)


def test_beams_repeat_every_step_but_the_first():
    costs = account("gpt2")
    greedy, beams = costs.decoding(prompt=50, new=100), costs.decoding(prompt=50, new=100, beams=5)
    first = costs.decoding(prompt=50, new=1)
    assert beams.positions - first.positions == 5 * (greedy.positions - first.positions)
    assert beams.flops - first.flops == 5 * (greedy.flops - first.flops)
    assert beams.bytes_moved < 5 * greedy.bytes_moved  # the weights are model_inputs once for all of them


def test_a_cache_saves_flops_and_bytes():
    costs = account("gpt2")
    cached, recomputed = costs.decoding(prompt=50, new=100), costs.decoding(prompt=50, new=100, cached=False)
    assert recomputed.flops / cached.flops > 20
    assert 100 * 2 * 85e6 < cached.bytes_moved < recomputed.bytes_moved  # at least 100 times all weights


def test_an_encoder_runs_once_for_any_number_of_tokens():
    config = t5(vocab=53, width=30, depth=2, heads=3, hidden=17)
    costs = account(config)
    encoder = sum(n for name, n in costs.flops(1, 23, 1).components.items() if name.startswith("encoder."))
    for new in (1, 5):
        assert costs.decoding(new=new, source=23).flops > encoder
    assert costs.decoding(new=5, source=23).flops < 2 * encoder + costs.decoding(new=5, source=1).flops * 23


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_six_n_is_near_the_exact_count_for_a_wide_model():
    """The rule omits the scores and includes the embedding; both are small in a wide model with a short context."""
    costs = account("llama-7b").budget(10**12, peak=312e12, length=512)
    assert abs(costs.flops / costs.rule_of_six - 1) < 0.03


def test_gpu_hours_are_flops_over_speed():
    assert gpu_hours(3600e12, peak=2e12, mfu=0.5) == pytest.approx(1.0)
    assert rule_of_six(7, 11) == 462
    costs = account("gpt2").budget(10**9, peak=312e12, mfu=0.4, gpus=8)
    assert costs.days == pytest.approx(costs.gpu_hours / 24 / 8)


def test_an_impossible_utilization_is_an_error():
    with pytest.raises(InputError, match="mfu"):
        gpu_hours(1.0, peak=1e12, mfu=40)


# -- recurrent baselines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_an_lstm_step_by_step_has_the_flops_that_torch_counts(depth):
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

    assert count_flops(run) == account(config).flops(3, 7).forward


def test_an_lstm_encoder_decoder_repeats_its_decoder_for_every_target_token():
    config = RecurrentConfig(kind="encoder_decoder", vocab=53, width=14)
    costs = account(config)
    model, ids = Recurrent(config), torch.zeros(3, 11, dtype=torch.long)
    with torch.no_grad():
        memory = model.encode(ids)
        state = model.initial_state(memory)
        step = count_flops(lambda: model.step(ids[:, 0], state, memory))
    one, two = costs.flops(3, 11, 1), costs.flops(3, 11, 2)
    # The hooks of the counter make the model call the linear layer of v · tanh(…), so that its product is counted too.
    assert two.forward - one.forward == step
