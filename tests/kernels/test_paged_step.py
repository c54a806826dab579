"""A pass of a stack over pages gives what the plain modules compute in fp64 for whole sequences."""

import copy

import pytest
import torch
from operator_support import use_cpu_kernels
from paged_support import PagedRows, assert_close, draw, draw_rows, no_sources, on_whole_sequences, randomize
from support import build_model, has_decoder, tiny_config, tiny_model, tiny_names
from torch.nn.utils.rnn import pad_sequence

import monoblock as mb
from monoblock.config.model import Alibi, AttentionConfig, Buckets, NormConfig, Rotary
from monoblock.config.parts import BlockConfig, FeedForwardConfig, Repeat, StackConfig
from monoblock.inference.runners.cpu import fuse_encoder, fuse_stack
from monoblock.inference.supported_models import NATIVE_ACTIVATIONS
from monoblock.kernels.cpu import library
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.stack import Stack

WIDTH = 44
RMS = NormConfig(kind="rms", affine="scale")


@pytest.fixture(scope="module", autouse=True)
def compiler():
    status = library.load_kernels()
    assert status.is_ready, status.reason


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def stack_of(attention, blocks=2, cross=None, norm=RMS, feedforward=None, **options):
    block = BlockConfig(
        **{"width": WIDTH, "attention": attention, "cross": cross, "norm": norm},
        feedforward=feedforward or FeedForwardConfig(hidden=52, activation="silu", gated=True),
        **options,
    )
    return randomize(Stack(StackConfig(pattern=(Repeat(blocks=(block,), times=blocks),), norm=norm)))


GROUPED = {"heads": 6, "kv_heads": 2, "head_dim": 10}
CASES = {
    "multi-head": stack_of(AttentionConfig(heads=4)),
    "grouped": stack_of(AttentionConfig(**GROUPED)),
    "many heads a group, values of another size": stack_of(
        AttentionConfig(heads=7, kv_heads=1, head_dim=6, value_dim=37, scale=0.7)
    ),
    "large heads": stack_of(AttentionConfig(heads=3, kv_heads=1, head_dim=96, positions=Rotary())),
    "rotary": stack_of(AttentionConfig(**GROUPED, positions=Rotary(dim=6, layout="interleaved"))),
    "alibi": stack_of(AttentionConfig(heads=4, positions=Alibi())),
    "buckets": stack_of(AttentionConfig(heads=4, positions=Buckets(count=8, max_distance=30))),
    "window": stack_of(AttentionConfig(**GROUPED, positions=Rotary(), window=19)),
    "window and alibi": stack_of(AttentionConfig(heads=4, positions=Alibi(), window=5)),
    "softcap": stack_of(AttentionConfig(**GROUPED, softcap=1.5, clip=0.8)),
    "sinks": stack_of(AttentionConfig(**GROUPED, sinks=True, window=4)),
    **{
        f"norm over {over}": stack_of(AttentionConfig(**GROUPED, qk_norm=RMS, qk_norm_over=over, positions=Rotary()))
        for over in ("head", "each_head", "width")
    },
    "cross-attention": stack_of(
        AttentionConfig(heads=4, kv_heads=2), cross=AttentionConfig(heads=6, kv_heads=3, head_dim=8, mask="full")
    ),
    **{place: stack_of(AttentionConfig(heads=4), norm_place=place) for place in ("post", "output", "sandwich")},
    **{residual: stack_of(AttentionConfig(heads=4), residual=residual) for residual in ("parallel", "parallel_shared")},
    "gains": stack_of(
        AttentionConfig(heads=4),
        norm=NormConfig(),
        layer_scale=0.8,
        residual_scale=0.6,
        feedforward=FeedForwardConfig(hidden=52, gated=True, clamp=0.5),
    ),
}


@pytest.mark.parametrize("sizes", [(0, 1, 1), (0, 1, 2, 5), (17, 40, 3)], ids=["one token", "a few", "many"])
@pytest.mark.parametrize("name", CASES)
def test_rows_in_pages_give_the_outputs_of_whole_sequences(name, sizes):
    stack = CASES[name]
    inputs = draw_rows((45, 17, 70, 1, 32), WIDTH)
    has_cross = stack.blocks[0].cross is not None
    sources = draw_rows((19, 3, 32, 16, 40), WIDTH) if has_cross else no_sources(inputs)
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, sources)
    assert_close(PagedRows(stack, sources).run(inputs, sizes), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["rotary", "window", "sinks", "cross-attention", "alibi"])
def test_long_rows_beside_short_ones_give_the_outputs_of_whole_sequences(name, threads):
    """The keys of one row are then shared out among threads."""
    stack = CASES[name]
    inputs = draw_rows((1100, 4, 600), WIDTH)
    sources = draw_rows((700, 3, 40), WIDTH) if stack.blocks[0].cross is not None else no_sources(inputs)
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, sources)
    paged, before = PagedRows(stack, sources, pages=260), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = paged.run([x[:-3] for x in inputs], (150, 200))
        last = paged.run([x[-3:] for x in inputs], (1, 1, 2))
    finally:
        torch.set_num_threads(before)
    assert_close([torch.cat(parts) for parts in zip(first, last, strict=True)], expected)


@pytest.mark.parametrize("size", [8, 29, 32])
def test_rows_that_share_pages_give_the_outputs_of_whole_sequences(size):
    """Three rows continue one prompt."""
    stack, prompt = CASES["rotary"], draw(size, WIDTH)
    inputs = [torch.cat([prompt, x]) for x in draw_rows((20, 9, 33), WIDTH)]
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, no_sources(inputs))
    paged = PagedRows(stack, no_sources(inputs))
    paged.step([prompt, prompt[:0], prompt[:0]])
    paged.fork(0, 1)
    paged.fork(1, 2)
    actual = paged.run([x[size:] for x in inputs], (0, 1, 3))
    assert_close(actual, [out[size:] for out in expected])
    assert len({tuple(row[: size // PAGE_SIZE].tolist()) for row in paged.tables}) == 1


def test_pages_of_rows_without_new_tokens_do_not_change():
    stack, inputs = CASES["grouped"], draw_rows((21, 18, 5), WIDTH)
    paged = PagedRows(stack, no_sources(inputs))
    paged.step(inputs)
    pages = paged.tables[1][paged.tables[1] > 0].long()
    before = [pool[pages].nan_to_num() for pair in paged.pools for pool in pair]
    paged.step([inputs[0][:1], inputs[1][:0], inputs[2][:3]])
    after = [pool[pages].nan_to_num() for pair in paged.pools for pool in pair]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("exact", [False, True])
def test_a_pass_without_tokens_gives_zeros(exact):
    paged = PagedRows(CASES["grouped"], [None, None])
    assert [len(out) for out in paged.step([draw(0, WIDTH)] * 2, exact=exact)] == [0, 0]


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", tiny_names(has_decoder))
def test_presets_give_the_outputs_of_whole_sequences(name, bits):
    if any(block.feedforward.experts for block in tiny_config(name).decoder.layers()):
        pytest.skip("experts run in the modules")
    plain = copy.deepcopy(tiny_model(name))
    plain.decoder = randomize(plain.decoder)
    fast = plain
    if bits is not None:
        plain = mb.quantize(plain, bits=bits).eval()
        fast = use_cpu_kernels(plain)
    width = plain.decoder.config.width
    inputs = draw_rows((29, 3, 40), width)
    sources = draw_rows((19, 3, 32), width) if plain.encoder is not None else no_sources(inputs)
    expected = on_whole_sequences(copy.deepcopy(plain.decoder).double(), inputs, sources)
    for sizes in ((0, 1, 3), (16, 31)):
        actual = PagedRows(fast.decoder, sources).run(inputs, sizes)
        assert_close(actual, expected, 2e-5 if bits is None else 3e-3)


def quantized(model, bits, activation_bits=16):
    if bits is None:
        return model.eval()
    return use_cpu_kernels(mb.quantize(model, bits=bits, activation_bits=activation_bits).eval())


@pytest.mark.parametrize("name", ["grouped", "alibi", "window", "cross-attention", "norm over width", 8, 4])
def test_exact_steps_give_the_same_bits_alone_and_in_company(name):
    stack = CASES[name] if isinstance(name, str) else quantized(tiny_model("llama3-8b"), name).decoder
    inputs = draw_rows((45, 17, 70, 600, 32), stack.config.width)
    sources = draw_rows((19, 3, 32, 16, 40), WIDTH) if stack.blocks[0].cross is not None else no_sources(inputs)
    outputs = [
        PagedRows(stack, sources, seed=seed).run(inputs, sizes, exact=True)
        for seed, sizes in enumerate([(1,), (0, 2, 40), (11, 100)])
    ]
    alone = [
        PagedRows(stack, [source], seed=5).run([x], (33, 1), exact=True)[0]
        for x, source in zip(inputs, sources, strict=True)
    ]
    assert all(torch.equal(*pair) for other in outputs for pair in zip(other, alone, strict=True))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("bits", "activation_bits"), [(None, 16), (8, 16), (4, 16), (8, 8), (4, 8)])
def test_a_few_tokens_at_once_equal_single_steps_bit_for_bit(bits, activation_bits, window):
    """As those of a proposal, also if what comes after them is rejected and written again."""
    config = mb.llama(vocab=61, width=64, depth=2, heads=4, kv_heads=2, hidden=160, context=64, window=window)
    stack = quantized(build_model(config), bits, activation_bits).decoder
    inputs, wrong = draw_rows((20, 11), 64), draw(8, 64)
    several, single = PagedRows(stack, no_sources(inputs)), PagedRows(stack, no_sources(inputs), seed=1)
    expected = single.run(inputs, (1,))
    for start, end, row in [(0, 4, 0), (4, 9, 0), (0, 7, 1), (9, 15, 0), (7, 8, 1), (15, 20, 0), (8, 11, 1)]:
        parts = [x[start:end] if row == number else x[:0] for number, x in enumerate(inputs)]
        before = several.lengths.clone()
        several.step([torch.cat((part, wrong[: 8 - len(part)])) if len(part) else part for part in parts])
        several.lengths.copy_(before)
        out = several.step(parts)[row]
        assert torch.equal(out, expected[row][start:end])


@pytest.mark.parametrize("sizes", [(1, 3), (16, 31)], ids=["a few", "many"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "t5-small"])
def test_activations_of_8_bits_give_the_outputs_of_whole_sequences(name, bits, sizes):
    """A rounding error in fp32 may round an activation another way, so that some rows differ by more."""
    plain = mb.quantize(tiny_model(name), bits=bits, activation_bits=8).eval()
    inputs = draw_rows((29, 3, 40), plain.decoder.config.width)
    sources = draw_rows((19, 3, 32), plain.decoder.config.width) if plain.encoder is not None else no_sources(inputs)
    actual = torch.cat(PagedRows(use_cpu_kernels(plain).decoder, sources).run(inputs, sizes)).double()
    expected = torch.cat(on_whole_sequences(copy.deepcopy(plain.decoder).double(), inputs, sources))
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.quantile(0.25)) < 1e-4
    assert float(errors.max()) < 0.1


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
def test_every_activation_and_odd_sizes(activation, gated):
    feedforward = FeedForwardConfig(hidden=83, activation=activation, gated=gated)
    stack, inputs = stack_of(AttentionConfig(heads=4), feedforward=feedforward), draw_rows((23, 9), WIDTH)
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, no_sources(inputs))
    for sizes in ((1, 2), (23,)):
        assert_close(PagedRows(stack, no_sources(inputs)).run(inputs, sizes), expected)


def test_positions_of_rotary_angles_may_begin_anywhere():
    """Only distances matter, up to rounding."""
    stack, inputs = CASES["rotary"], draw_rows((9, 4), WIDTH)
    shifted, plain = PagedRows(stack, [None, None]), PagedRows(stack, [None, None])
    positions = (torch.tensor([[70], [0]]) + torch.arange(10)).contiguous()
    assert_close(shifted.step(inputs, positions=positions), [out.double() for out in plain.step(inputs)], 1e-4)
    assert not torch.equal(shifted.pools[0][0][shifted.tables[0, 0]], plain.pools[0][0][plain.tables[0, 0]])


def test_what_is_not_supported_is_left_to_the_modules():
    stack = CASES["grouped"]
    operator = fuse_stack(stack)
    x = draw(2, 300, WIDTH)
    assert operator.supports(x, 512)
    assert not operator.supports(x, 513)
    assert not operator.supports(x.double(), 512)
    with torch.enable_grad():
        assert not operator.supports(x, 512)
    assert fuse_stack(copy.deepcopy(stack).double()) is None
    assert fuse_stack(copy.deepcopy(stack).bfloat16()) is None


@pytest.mark.parametrize(
    "options", [{}, {"feedforward": FeedForwardConfig(hidden=52)}, {"norm_place": "post"}, {"residual": "parallel"}]
)
def test_an_encoder_gives_the_outputs_of_each_text_alone(options):
    stack = stack_of(AttentionConfig(heads=4, mask="full"), norm=NormConfig(), **options)
    inputs = draw_rows((5, 1, 140, 30, 100), WIDTH)
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, no_sources(inputs))
    encoder = fuse_encoder(stack)
    lengths = torch.tensor([len(x) for x in inputs])
    out = encoder.encode(pad_sequence(inputs, batch_first=True, padding_value=torch.nan), lengths)
    assert_close([row[:length] for row, length in zip(out, lengths, strict=True)], expected)
    assert all((row[length:] == 0).all() for row, length in zip(out, lengths, strict=True))
    assert fuse_encoder(None) is None
    assert fuse_encoder(CASES["rotary"]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_copied_up_to_what_is_used(dtype):
    pools = [draw(50, heads, PAGE_SIZE, size).to(dtype) for heads, size in ((3, 8), (1, 5), (3, 6))]
    expected = [pool.clone() for pool in pools]
    sources, targets, used = [3, 17, 3, 40], [5, 49, 0, 41], [16, 1, 0, 9]
    torch.ops.monoblock.copy_pages(pools, *map(torch.tensor, (sources, targets, used)))
    for pool in expected:
        for source, target, count in zip(sources, targets, used, strict=True):
            pool[target, :, :count] = pool[source, :, :count]
    assert all(torch.equal(*pair) for pair in zip(pools, expected, strict=True))


@pytest.mark.parametrize(
    ("sources", "targets", "used"),
    [([4], [0], [1]), ([-1], [0], [1]), ([0], [4], [1]), ([0], [1], [17]), ([0], [1], [-1]), ([0, 1], [1], [1])],
)
def test_pages_outside_of_a_pool_are_not_copied(sources, targets, used):
    with pytest.raises(RuntimeError):
        torch.ops.monoblock.copy_pages([draw(4, 2, PAGE_SIZE, 3)], *map(torch.tensor, (sources, targets, used)))


def test_pages_outside_of_a_pool_are_not_read():
    paged = PagedRows(CASES["grouped"], [None, None])
    paged.step([draw(1, WIDTH)] * 2)
    paged.tables[1] = 90
    with pytest.raises(RuntimeError, match="tables is 90"):
        paged.step([draw(1, WIDTH), draw(1, WIDTH)])
