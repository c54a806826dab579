"""Linear attention against the explicit N × N formula in fp64: chunks, documents, padding, rotary positions, cache."""

import pytest
import torch
from support import ActivationTap, assert_near, build_model
from torch.utils.flop_counter import FlopCounterMode

from monoblock.accounting.report import account
from monoblock.config.families import bert, gpt, llama
from monoblock.config.model import Rotary
from monoblock.errors import ConfigError, InputError
from monoblock.inference.supported_models import SUPPORTED, reason_not_to_optimize, unsupported_field
from monoblock.interop.huggingface.export import choose_family
from monoblock.model import Transformer
from monoblock.nn.linear_attention import (
    CHUNK,
    Features,
    attend_causal_chunks,
    attend_documents,
    attend_full,
    cumulative_sum,
    feature_map,
)
from monoblock.nn.positions import apply_rotary, rotary_angles

B, H, G, K, V = 2, 6, 3, 4, 5
SIZES = {"vocab": 61, "width": 24, "depth": 2, "heads": 4, "context": 300}


def random_heads(length, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, length, K), (B, G, length, K), (B, G, length, V))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def explicit(q, k, v, mask, rotate=lambda x: x):
    """Σ_j R φ(q_i)·R φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j), with the matrix of all pairs, head by head."""
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = rotate(phi_q)[:, head] @ rotate(phi_k)[:, group].mT * mask
        sums = (phi_q[:, head] @ phi_k[:, group].mT * mask).sum(-1, keepdim=True)
        out[:, head] = scores / sums @ v[:, group]
    return out


def features(q, k):
    q, k = feature_map(q), feature_map(k)
    return Features(q, q), Features(k, k)


@pytest.mark.parametrize("length", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_causal_chunks_and_full_sums_are_the_explicit_formula(length):
    q, k, v = random_heads(length)
    mask = torch.ones(length, length, dtype=torch.float64)
    assert_near(attend_causal_chunks(*features(q, k), v), explicit(q, k, v, mask.tril()))
    assert_near(attend_full(*features(q, k), v), explicit(q, k, v, mask))


def test_rotary_positions_rotate_the_numerator_only():
    q, k, v = random_heads(CHUNK + 9)
    angles = rotary_angles(Rotary(), K, torch.arange(q.shape[2])[None], torch.float64)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.float64).tril()
    turned = [Features(apply_rotary(f.plain, angles), f.plain) for f in features(q, k)]
    expected = explicit(q, k, v, mask, lambda x: apply_rotary(x, angles))
    assert_near(attend_causal_chunks(*turned, v), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_separate(causal):
    length = 2 * CHUNK + 11
    q, k, v = random_heads(length)
    document = torch.stack([torch.arange(length) // 50, (torch.arange(length) > 3).long()])
    same = (document[:, :, None] == document[:, None, :]).double()
    expected = explicit(q, k, v, same.tril() if causal else same)
    assert_near(attend_documents(*features(q, k), v, document, causal=causal), expected)


@pytest.mark.parametrize("attend", [attend_causal_chunks, attend_full])
def test_gradients(attend):
    q, k, v = (x[:1, :2, :5] if x.shape[1] == H else x[:1, :1, :5] for x in random_heads(5))
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(*features(q, k), v), tensors)


def test_a_query_that_sees_nothing_gives_zeros_and_no_nan_gradient():
    q, k, v = (x.requires_grad_() for x in random_heads(3))
    q_features, k_features = features(q, k)
    out = attend_full(q_features, Features(k_features.rotated * 0, k_features.plain * 0), v)
    out.sum().backward()
    assert not out.any()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_input_are_fp32(dtype):
    config = gpt(**SIZES, attention="linear")
    model, ids = build_model(config), torch.randint(61, (2, 200))
    with torch.no_grad():
        half = model.to(dtype)(ids).float()
        assert_relative(half, model.float()(ids), 0.05)


def assert_relative(actual, expected, limit):
    assert float((actual - expected).norm()) <= limit * float(expected.norm())


@torch.no_grad()
@pytest.mark.parametrize("positions", ["none", "learned", "rotary"])
def test_cached_steps_are_the_full_pass_and_the_cache_does_not_grow(positions):
    config = gpt(**SIZES, attention="linear", positions=positions, kv_heads=2)
    model, ids = build_model(config), torch.randint(61, (3, 260))
    cache, out, sizes = model.make_cache(3, 300, chunk=4), [], set()
    for piece in ids.split([200, *[1] * 60], 1):
        out.append(model(piece, cache=cache))
        cache.advance(piece.shape[1])
        sizes.add(cache.nbytes)
    full = model(ids)
    assert float((torch.cat(out, 1) - full).abs().max()) <= 1e-5 * float(full.abs().max())
    ring = 4 * 3 * 2 * 2 * 4 * (6 + 6 + (6 if positions == "rotary" else 0))  # fp32, rows, layers, key heads, chunk
    assert sizes == {account(config).kv_cache_bytes(3, 300, "fp32") + ring}
    assert account(config).kv_cache_bytes(3, 10, "bf16") == account(config).kv_cache_bytes(3, 300, "fp32")


@torch.no_grad()
def test_tokens_beyond_the_chunk_cannot_be_dropped_from_the_sums():
    model = build_model(gpt(**SIZES, attention="linear"))
    cache = model.make_cache(1, 50, chunk=4)
    model(torch.randint(61, (1, 20)), cache=cache)
    cache.advance(20)
    cache.truncate(16)
    with pytest.raises(InputError, match="cannot be dropped"):
        cache.truncate(15)
    with pytest.raises(InputError, match="packed documents"):
        model(torch.randint(61, (1, 2)), documents=torch.tensor([[0, 1]]), cache=cache)


@torch.no_grad()
def test_a_tap_sees_the_weights_that_are_applied():
    model = build_model(bert(**SIZES, attention="linear", head="masked_lm"))
    ids, tap = torch.randint(61, (2, 9)), ActivationTap("attention.weights", "attention.value", "attention.heads")
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    assert_near(model(ids, mask, tap=tap), model(ids, mask))
    weights, value, heads = (tap.activations[f"encoder.0.attention.{name}"] for name in ("weights", "value", "heads"))
    assert_near(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert not weights[0, :, :, 6:].any()
    assert_near(weights @ value, heads)


@pytest.mark.parametrize("length", [13, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("build", [gpt, bert])
def test_the_flops_are_those_that_torch_counts(build, length):
    config = build(**SIZES, attention="linear", kv_heads=2)
    with torch.device("meta"):
        model, ids = Transformer(config), torch.zeros(3, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == account(config).flops(3, length).training


def test_flops_grow_with_the_length_and_not_with_its_square():
    costs = account(gpt(**(SIZES | {"context": 65_536}), attention="linear"))
    per_token = [costs.flops(1, length).components["decoder.attention.scores"] / length for length in (1024, 65_536)]
    assert per_token[1] == pytest.approx(per_token[0], rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 1.0}, "scale=1.0 acts on scores"),
        ({"window": 5}, "window=5 acts on scores"),
        ({"softcap": 3.0}, "softcap=3.0 acts on scores"),
        ({"mask": "prefix"}, "no prefix mask"),
        ({"positions": "alibi"}, "add a bias to scores"),
    ],
)
def test_options_of_the_scores_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        gpt(**SIZES, attention="linear", **options)


def test_fast_backends_and_hugging_face_folders_refuse_it():
    config = llama(**SIZES, hidden=32, attention="linear")
    model = Transformer(config)
    assert "attention.kind='linear'" in reason_not_to_optimize(model.eval())
    assert unsupported_field(config.decoder.pattern[0].blocks[0], SUPPORTED) == "attention.kind='linear'"
    with pytest.raises(ConfigError, match="no Hugging Face family can express") as problem:
        choose_family(config)
    assert "\n" not in str(problem.value)
    prompt = torch.randint(61, (2, 5))
    assert torch.equal(
        model.generate(prompt, max_new_tokens=9), model.generate(prompt, max_new_tokens=9, use_cache=False)
    )


@pytest.mark.parametrize("length", [1, 64, 65, 4097])
def test_sums_in_blocks_are_cumulative_sums(length):
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    for one, other in zip(
        (found := cumulative_sum(x), *torch.autograd.grad((found * weights).sum(), x)),
        (plain := x.cumsum(2), *torch.autograd.grad((plain * weights).sum(), x)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)
