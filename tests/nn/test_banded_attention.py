"""Banded attention against dense attention, for all kinds of masks and positions; its memory is linear."""

import pytest
import torch
from support import randomize_weights
from torch.autograd import forward_ad, gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monoblock.config.families import bert, gpt, llama
from monoblock.config.knobs import vary
from monoblock.config.model import AttentionConfig
from monoblock.model import Transformer
from monoblock.nn import attention
from monoblock.nn.attention import (
    BANDED,
    FUSED,
    Attention,
    AttentionContext,
    ScoreOptions,
    attend,
    choose_kernel,
    prepare,
)
from monoblock.nn.masks import (
    Mask,
    MaskTerm,
    TokenPositions,
    arange_positions,
    causal,
    global_tokens,
    mask_from_config,
    prefix,
    random_blocks,
    same_document,
    window,
)
from monoblock.nn.sparse_attention import attend_banded, plan_tiles

B, H, G, T, K = 2, 4, 2, 75, 8
SMALL_TILES = (8, 16)

MASKS = {
    "causal window": causal & window(10) & same_document,
    "window": window(10) & same_document,
    "window of one": window(1) & same_document,
    "causal window and global": causal & (window(7) | global_tokens) & same_document,
    "window and global": (window(7) | global_tokens) & same_document,
    "causal window, global and random": causal & (window(7) | global_tokens | random_blocks(2, 8)) & same_document,
    "window, global and random": (window(7) | global_tokens | random_blocks(1, 5, seed=3)) & same_document,
    "documents": causal & same_document,
    "prefix": (causal | prefix) & same_document,
}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def random_flags(share, seed, length=T):
    return torch.rand(B, length, generator=generator(seed)) < share


def packed():
    starts = random_flags(0.05, 5)
    starts[:, 0] = True
    index = torch.arange(T).expand(B, T)
    return TokenPositions(index - torch.where(starts, index, 0).cummax(-1).values, starts.long().cumsum(-1))


def left_padded():
    valid = torch.arange(T) >= torch.tensor([[13], [40]])
    return TokenPositions((valid.long().cumsum(-1) - 1).clamp(min=0), valid=valid)


def everything_at_once():
    tokens = packed()
    return TokenPositions(tokens.positions, tokens.document, random_flags(0.8, 7), random_flags(0.05, 8))


INDEX = torch.arange(T).expand(B, T)
POSITIONS = {
    "no padding": lambda: arange_positions(T),
    "right padding": lambda: TokenPositions(INDEX, valid=torch.arange(T) < torch.tensor([[60], [20]])),
    "left padding": left_padded,
    "packed": packed,
    "flags": lambda: TokenPositions(INDEX, prefix_or_global=random_flags(0.05, 6)),
    "everything": everything_at_once,
    "shuffled": lambda: TokenPositions(torch.rand(B, T, generator=generator(9)).argsort(-1)),
}


def resolve(mask, positions):
    tokens = POSITIONS[positions]()
    return MASKS[mask].resolve(tokens, tokens)


def small_plan(resolved, sizes=SMALL_TILES):
    return plan_tiles(resolved, sizes=sizes, max_density=2.0)


def inputs(dtype=torch.float64, kv_heads=G, value_size=K, keys=T):
    sizes = ((H, T, K), (kv_heads, keys, K), (kv_heads, keys, value_size))
    tensors = [randn(B, *size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]
    return [t.requires_grad_() for t in tensors]


def assert_equal_with_gradients(q, k, v, resolved, tolerance=1e-12, **options):
    """Compare output and gradients with those of `attend`."""
    leaves = [q, k, v, *(t for t in options.values() if isinstance(t, torch.Tensor))]
    dense = attend(q, k, v, resolved.dense(), **options)
    banded = attend_banded(q, k, v, small_plan(resolved), **options)
    grad = randn(*dense.shape, seed=11, dtype=dense.dtype)
    torch.testing.assert_close(banded, dense, atol=tolerance, rtol=tolerance)
    for ours, reference in zip(
        torch.autograd.grad(banded, leaves, grad), torch.autograd.grad(dense, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, reference, atol=20 * tolerance, rtol=20 * tolerance)


# -- equal to dense attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_banded_attention_is_dense_attention(mask, positions):
    resolved = resolve(mask, positions)
    assert_equal_with_gradients(*inputs(), resolved)
    assert_equal_with_gradients(*inputs(torch.float32), resolved, tolerance=1e-6)


OPTIONS = {
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": randn(H, seed=5).requires_grad_()},
    "softcap and sinks": {"softcap": 1.5, "sinks": randn(H, seed=5).requires_grad_(), "scale": 0.3},
}


@pytest.mark.parametrize(("kv_heads", "value_size"), [(1, K), (2, 5), (4, K)])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("positions", ["no padding", "everything"])
def test_options_and_grouped_heads_are_those_of_dense_attention(name, kv_heads, value_size, positions):
    resolved = resolve("causal window, global and random", positions)
    assert_equal_with_gradients(*inputs(kv_heads=kv_heads, value_size=value_size), resolved, **OPTIONS[name])


@pytest.mark.parametrize("name", ["scale", "softcap and sinks"])
def test_gradients_are_those_of_finite_differences(name):
    tokens = arange_positions(13)
    plan = small_plan((causal & (window(3) | global_tokens)).resolve(tokens, tokens), sizes=(4,))
    q, k, v = (randn(1, heads, 13, 3, seed=heads).requires_grad_() for heads in (2, 1, 1))
    options = {key: value for key, value in OPTIONS[name].items() if key != "sinks"}
    sinks = (randn(2, seed=5).requires_grad_(),) if "sinks" in OPTIONS[name] else ()

    def run(q, k, v, *sinks):
        return attend_banded(q, k, v, plan, sinks=sinks[0] if sinks else None, **options)

    assert gradcheck(run, (q, k, v, *sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sixteen_bits_are_as_exact_as_dense_attention(dtype, softcap):
    resolved = resolve("window and global", "packed")
    exact = attend(*inputs(), resolved.dense(), softcap=softcap)
    q, k, v = inputs(dtype)
    banded = attend_banded(q, k, v, small_plan(resolved), softcap=softcap)
    dense = attend(q, k, v, resolved.dense(), softcap=softcap)
    assert banded.dtype == dtype
    assert (banded - exact).abs().max() < 2 * (dense - exact).abs().max()
    for ours, reference in zip(
        torch.autograd.grad(banded.sum(), (q, k, v)), torch.autograd.grad(dense.sum(), (q, k, v)), strict=True
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, reference, atol=0.06, rtol=0.06)


def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients():
    tokens = TokenPositions(INDEX, valid=torch.arange(T) < torch.tensor([[20], [0]]))
    q, k, v = inputs()
    out = attend_banded(q, k, v, small_plan((causal & window(5)).resolve(tokens, tokens)))
    assert not out[1].any()
    assert not out[0, :, 25:].any()
    assert out[0, :, :24].all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.isfinite().all() and not grad[1].any() for grad in grads)


@pytest.mark.parametrize("start", [0, 30, 100])
def test_queries_after_cached_keys(start):
    mask, keys = causal & (window(9) | global_tokens), arange_positions(start + T)
    q, k, v = inputs(keys=start + T)
    assert_equal_with_gradients(q, k, v, mask.resolve(arange_positions(T, start), keys))


# -- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_has_the_mean_of_attention_without_it():
    resolved, (q, k, v) = resolve("causal window", "no padding"), inputs()
    plan = small_plan(resolved)
    torch.manual_seed(0)
    with torch.no_grad():
        dropped = torch.stack([attend_banded(q, k, v, plan, dropout=0.3) for _ in range(150)])
        torch.testing.assert_close(dropped.mean(0), attend_banded(q, k, v, plan), atol=0.4, rtol=0)
        assert 0 < dropped.std(0).mean() < 1
        assert not attend_banded(q, k, v, plan, dropout=1.0).any()


def test_the_backward_pass_drops_the_same_weights():
    tokens = arange_positions(13)
    plan = small_plan((causal & window(5)).resolve(tokens, tokens), sizes=(4,))
    q, k, v = (randn(1, 2, 13, 3, seed=seed).requires_grad_() for seed in range(3))

    def run(q, k, v):
        torch.manual_seed(3)
        return attend_banded(q, k, v, plan, dropout=0.4)

    assert gradcheck(run, (q, k, v))


# -- when it is used -------------------------------------------------------------------------------------------------


def context_of(mask, length=600):
    return AttentionContext(mask.resolve(arange_positions(length), arange_positions(length)))


def kernel_of(context):
    x = torch.zeros(1, 2, 600, 8)
    return choose_kernel(x, x, x, context, ScoreOptions(context.bias))


def test_it_is_used_if_few_tiles_are_visible_and_the_text_is_long():
    assert kernel_of(context_of(causal & window(100))) is BANDED
    assert kernel_of(context_of(causal & window(100), length=400)) is FUSED
    assert kernel_of(context_of(causal & window(500))) is FUSED
    biased = context_of(causal & window(100))
    biased.bias = torch.zeros(1, 1, 600, 600)
    assert kernel_of(biased) is FUSED


def test_a_mask_that_says_nothing_about_tiles_is_dense():
    even = Mask((MaskTerm("even", lambda q, k: (q.positions - k.positions) % 2 == 0),))
    assert kernel_of(context_of(even)) is FUSED
    tokens = arange_positions(T)
    assert_equal_with_gradients(*inputs(), (even & causal & window(9)).resolve(tokens, tokens))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_differentiation_and_vmap_take_the_dense_path():
    config = AttentionConfig(heads=2, window=10, softcap=3.0)
    layer, x = Attention(8, config), randn(1, 600, 8, dtype=torch.float32)

    def run(x):
        tokens = arange_positions(600)
        return layer(x, prepare(AttentionContext(mask_from_config(config).resolve(tokens, tokens)), x))

    with torch.no_grad(), forward_ad.dual_level():
        torch.testing.assert_close(torch.vmap(run)(x[None])[0], run(x))
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    step = 1e-3
    torch.testing.assert_close(tangent, (run(x + step) - run(x - step)) / (2 * step), atol=1e-3, rtol=1e-3)


def test_a_compiled_layer_takes_the_dense_path():
    config = AttentionConfig(heads=2, window=10)
    layer, x, tokens = Attention(8, config), randn(1, 520, 8, dtype=torch.float32), arange_positions(520)

    def run(x):
        return layer(x, prepare(AttentionContext(mask_from_config(config).resolve(tokens, tokens)), x))

    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


def test_a_tap_that_only_reads_does_not_change_a_bit():
    config = AttentionConfig(heads=2, window=10, sinks=True)
    layer, x, seen = Attention(8, config), randn(1, 520, 8, dtype=torch.float32), {}

    class Reader:
        def __call__(self, name, tensor):
            seen[name] = tensor.shape
            return tensor

        def changes(self, name):
            return False

    def run(tap):
        tokens = arange_positions(520)
        return layer(x, AttentionContext(mask_from_config(config).resolve(tokens, tokens)), tap=tap)

    assert torch.equal(run(Reader()), run(None))
    assert seen["weights"] == (1, 2, 520, 520)


def dense_only(monkeypatch):
    monkeypatch.setattr(attention, "KERNELS", [kernel for kernel in attention.KERNELS if kernel is not BANDED])


SIZES = {"vocab": 61, "width": 16, "depth": 2, "heads": 4, "context": 700}
MODELS = {
    "window": gpt(**SIZES, window=50),
    "rotary, grouped": llama(**SIZES, window=33, kv_heads=2),
    "softcap": vary(gpt(**SIZES, window=50), softcap=3.0),
    "bidirectional": bert(**SIZES, window=20),
    "global tokens": vary(bert(**SIZES, window=20), global_tokens=True),
    "causal, global and random": vary(gpt(**SIZES, window=20), global_tokens=True, random_blocks=1, block_size=16),
    "prefix": vary(gpt(**SIZES), mask="prefix"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_padded", [False, True], ids=["", "padded"])
def test_a_model_gives_the_same_logits_and_gradients(name, is_padded, monkeypatch):
    model = randomize_weights(Transformer(MODELS[name])).double().eval()
    ids = torch.randint(61, (2, 600), generator=generator(1))
    options = {"attention_mask": torch.arange(600) < torch.tensor([[600], [431]])} if is_padded else {}
    if (model.encoder or model.decoder).uses_flags:
        options["flags"] = torch.arange(600) < torch.tensor([[7], [40]])

    def run():
        out = model(ids, **options)
        model.zero_grad()
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    banded = run()
    dense_only(monkeypatch)
    for ours, reference in zip(banded, run(), strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("prompts", [(650,), (600, 50), (100, 550)], ids=str)
def test_a_long_prompt_is_read_into_a_cache(prompts):
    model = randomize_weights(Transformer(MODELS["rotary, grouped"])).double().eval()
    ids = torch.randint(61, (2, 660), generator=generator(1))
    with torch.no_grad():
        whole = model(ids)
        cache, outputs, first = model.make_cache(2, 660), [], 0
        for length in (*prompts, 4, 6):
            outputs.append(model(ids[:, first : first + length], cache=cache))
            cache.advance(length)
            first += length
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-9, rtol=1e-9)


# -- memory ----------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(out) if torch.is_tensor(t)]
        self.largest = max(self.largest, *sizes, 0)
        return out


def largest_tensor(length, **options):
    config = AttentionConfig(heads=2, **options)
    layer, tokens = Attention(8, config), arange_positions(length)
    with LargestTensor() as mode:
        x = torch.zeros(1, length, 8, requires_grad=True)
        layer(x, prepare(AttentionContext(mask_from_config(config).resolve(tokens, tokens)), x)).sum().backward()
    return mode.largest


@pytest.mark.parametrize("order", ["causal", "full"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 64},
        {"window": 64, "sinks": True},
        {"window": 64, "softcap": 3.0},
        {"window": 64, "dropout": 0.1},
        {"window": 64, "global_tokens": True},
        {"window": 64, "global_tokens": True, "random_blocks": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_the_largest_tensor_does_not_grow_with_the_square_of_the_length(order, options):
    short, long = (largest_tensor(length, mask=order, **options) for length in (2048, 4096))
    assert long <= 2 * short
    assert long < 4096**2 / 4
