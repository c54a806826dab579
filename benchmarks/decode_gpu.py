"""Tokens per second on one GPU, compared with transformers: GPT-2 124M with batch 1 and 64, LLaMA 7B in 16, 8, 4 bits.

    python benchmarks/decode_gpu.py --out table.md          # checks correctness first, then measures
    python benchmarks/decode_gpu.py --only ours

Random weights in bf16, a prompt of 128 tokens and 256 new tokens, greedy, no end token. Two calls record CUDA graphs
and compile kernels; the median of the next three is shown, and it includes the prompt.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from _report import command_line, commit

import monoblock as mb
from monoblock.config.model import ModelConfig
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import DraftModel, PromptLookup, Proposer
from monoblock.kernels.gpu import Activations, QuantizedVector, argmax, gated_activation, gated_linear, linear, norm
from monoblock.kernels.gpu_attention import attend_pages
from monoblock.kernels.gpu_quantized import NextNorm, prepare_matrix, quantized_linear
from monoblock.nn.attention import attend
from monoblock.nn.norm import rms_norm
from monoblock.nn.positions import RotaryAngles, apply_rotary
from monoblock.quantization.packing import pack, unpack

PROMPT, NEW = 128, 256
SHAPES = (("gpt2", 1, 16), ("gpt2", 64, 16), ("llama-7b", 1, 16), ("llama-7b", 1, 8), ("llama-7b", 1, 4))
QUANTIZED_GROUPS = {8: 64, 4: 128}  # bits -> weights that share a scale


def check_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    error = (actual.float() - expected.float()).abs().max().item() / max(expected.float().abs().max().item(), 1e-9)
    assert error <= tolerance, f"{name}: relative error {error:.2e}"
    return f"{name} {error:.1e}"


def check_kernels() -> list[str]:
    """Compare each kernel with the plain path in fp64."""
    torch.manual_seed(0)
    checks = []
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    for N, K in ((2304, 768), (768, 3072), (50257, 768), (4096, 11008), (37, 100)):
        x, w, b = make(1, 1, K), make(N, K), make(N)
        expected = x.double() @ w.double().T + b.double()
        checks.append(check_close(f"linear {N}×{K}", linear(x, w, b), expected, 1e-2))
        residual = make(1, 1, N)
        sum_expected = expected - b.double() + residual.double()
        checks.append(check_close("  with residual", linear(x, w, None, residual), sum_expected, 1e-2))
    for M, N, K in ((64, 2304, 768), (7, 768, 768), (33, 768, 3072), (2, 37, 256)):
        x, w, b, residual = make(M, 1, K), make(N, K), make(N), make(M, 1, N)
        expected = F.gelu(x.double() @ w.double().T + b.double(), approximate="tanh") + residual.double()
        checks.append(check_close(f"linear {M} rows {N}×{K}", linear(x, w, b, residual, "gelu_tanh"), expected, 1e-2))
    checks += check_quantized(make)
    x, w = make(5, 1, 300), make(300)
    options = {"centered": False, "cast_after_scale": False}
    checks.append(check_close("rms", norm(x, w, None, 1e-6, **options).values, rms_norm(x, w, 1e-6), 1e-2))
    options, bias = {"centered": True, "cast_after_scale": True}, make(300)
    expected = F.layer_norm(x.double(), (300,), w.double(), bias.double(), 1e-5)
    checks.append(check_close("layer norm", norm(x, w, bias, 1e-5, **options).values, expected, 1e-2))
    gate_and_up = make(3, 1, 2 * 700)
    gate, up = gate_and_up.double().chunk(2, -1)
    checks.append(check_close("gated", gated_activation(gate_and_up, "silu").values, F.silu(gate) * up, 2e-2))
    for N, K in ((11008, 4096), (2048, 768), (37, 100)):
        x, w = make(1, 1, K), make(2 * N, K) * K**-0.5
        gate, up = (x.double() @ w.double().T).chunk(2, -1)
        checks.append(check_close(f"gated linear {N}×{K}", gated_linear(x, w, "silu"), F.silu(gate) * up, 2e-2))
    for B, V in ((1, 50257), (64, 32000), (3, 100)):
        x = make(B, V + 7)[:, :V]  # rounded to 8 bits of mantissa, so that several are equal
        first = (x == x.max(-1, keepdim=True).values).int().argmax(-1)
        assert torch.equal(argmax(x), first), f"argmax of {B}×{V}"
    for B, H, G, K, layout in (
        (1, 12, 12, 64, None),
        (3, 6, 2, 32, "halves"),
        (64, 12, 12, 64, "halves"),
        (2, 8, 1, 128, "interleaved"),
        (1, 32, 32, 128, "halves"),
        (1, 32, 8, 128, "halves"),
    ):
        checks.append(check_attention(B, H, G, K, layout))
    return checks


def check_quantized(make: Callable[..., torch.Tensor]) -> list[str]:
    """Compare products with quantized weights, for which x is rounded to 8 bits, with the dequantized weights."""
    checks = []
    for bits, group in ((8, 64), (8, 32), (4, 32), (4, 128)):
        for N, K in ((12288, 4096), (500, 4096), (4096, 11008), (37, 128)):
            x, w, b, residual = make(1, 1, K), make(N, K), make(N), make(1, 1, N)
            matrix = pack(w, bits, group)
            expected = x.double() @ unpack(matrix, K, torch.float64).T
            h = Activations(x)
            error = (quantized_linear(h, prepare_matrix(*matrix)).values.double() - expected).norm() / expected.norm()
            assert error < 1e-2, f"{bits} bits {N}×{K}: relative error {error:.2e}"
            both = quantized_linear(h, prepare_matrix(*matrix), b, residual).values
            error_both = (both.double() - expected - b.double() - residual.double()).norm() / expected.norm()
            assert error_both < 1.5e-2, f"{bits} bits {N}×{K} with bias and residual: relative error {error_both:.2e}"
            checks.append(f"{bits} bits, groups of {group}, {N}×{K} {error:.1e}")
    checks += [check_joined_norm(make, 4, group) for group in (32, 128)]
    return checks


def check_joined_norm(make: Callable[..., torch.Tensor], bits: int, group: int) -> str:
    """Compare an RMS norm that the products before and after it compute with one in fp64."""
    x, w, residual, norm_weight = make(1, 1, 11008), make(4096, 11008), make(1, 1, 4096), make(4096)
    before, after = pack(w, bits, group), pack(make(500, 4096), bits, group)
    begun = quantized_linear(
        Activations(x), prepare_matrix(*before), None, residual, next_norm=NextNorm(norm_weight, 1e-5)
    )
    out = begun.values
    expected = x.double() @ unpack(before, 11008, torch.float64).T + residual.double()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 1e-2, f"product before a norm, {bits} bits: relative error {error:.2e}"
    assert begun.rounded is not None, "the norm was not begun"
    result = quantized_linear(begun, prepare_matrix(*after)).values
    expected = rms_norm(out.double(), norm_weight.double(), 1e-5) @ unpack(after, 4096, torch.float64).T
    error = (result.double() - expected).norm() / expected.norm()
    assert error < 1e-2, f"product after a norm, {bits} bits: relative error {error:.2e}"
    return f"norm between products, {bits} bits, groups of {group} {error:.1e}"


def check_rounded(found: Activations) -> None:
    """Check that the 8-bit form of a vector, which a kernel has computed beside it, is the vector up to rounding."""
    out, quantized = found
    assert isinstance(quantized, QuantizedVector), "there is no 8-bit form"
    rounded = quantized.integers.double().view(-1, 32) * quantized.scales.double()[:, None]
    error = (rounded - out.double().view(-1, 32)).norm() / out.double().norm()
    assert error < 1e-2, f"8-bit form: relative error {error:.2e}"
    assert torch.allclose(quantized.sums.double(), rounded.sum(1), rtol=1e-4, atol=1e-4), "8-bit form: wrong sums"


def check_quantized_steps() -> list[str]:
    """Compare logits of recorded steps of quantized models with those of plain modules in fp32.

    The steps round the vector of each product to 8 bits, and the rest to bfloat16, so they differ by a few percent.
    """
    checks = []
    config = mb.vary(mb.preset("llama-7b"), depth=2, hidden=8704)  # wide enough for all kernels
    for bits, group in QUANTIZED_GROUPS.items():
        quantized = mb.quantize(random_model(config), bits=bits, group=group)
        ids = torch.randint(1000, (1, 200), device="cuda")
        with torch.inference_mode():
            expected = copy.deepcopy(quantized).float()(ids)[0, -8:]
        logits = torch.stack(step_logits(mb.optimize(quantized), ids[0].tolist(), 8)).float()
        error = (logits - expected).norm() / expected.norm()
        assert error < 4e-2, f"recorded steps, {bits} bits: relative error {error:.2e}"
        checks.append(f"recorded steps, {bits} bits {error:.1e}")
    return checks


def step_logits(model: mb.OptimizedModel, ids: list[int], count: int) -> list[torch.Tensor]:
    """Return the logits (V,) after each of the last `count` tokens, which are run one by one."""
    found: list[torch.Tensor] = []

    def follow(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        found.append(logits[0].clone())
        forced = torch.full_like(logits, -torch.inf)
        forced[0, ids[min(tokens.shape[1], len(ids) - 1)]] = 0
        return forced

    engine = Engine(model, capacity=256)
    engine.add(ids[:-count], Settings(max_new_tokens=count + 1, logits_processor=(follow,)))
    while engine.busy:
        engine.step()
    return found[1:]


def check_attention(B: int, H: int, G: int, K: int, layout: str | None) -> str:
    capacity = 320
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(B, H, 1, K), make(B, G, 1, K), make(B, G, 1, K)
    tables = torch.arange(B * capacity // 16, device="cuda", dtype=torch.int32).view(B, -1)
    keys, values = make(tables.numel(), G, 16, K), make(tables.numel(), G, 16, K)
    lengths, counts = torch.randint(0, capacity, (B,), device="cuda"), torch.ones(B, dtype=torch.long, device="cuda")
    rows = lambda pages: pages.unflatten(0, tables.shape).transpose(1, 2).flatten(2, 3)  # (B, G, capacity, K)
    cos = sin = None
    wide_q, wide_k = q.double(), k.double()
    if layout is not None:
        angle = torch.rand(B, 1, 1, K // 4, device="cuda") * 6
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        angles = RotaryAngles(cos.double(), sin.double(), layout == "interleaved")
        wide_q, wide_k = apply_rotary(wide_q, angles), apply_rotary(wide_k, angles)
    all_k, all_v = rows(keys).double(), rows(values).double()
    for row in range(B):
        all_k[row, :, lengths[row]], all_v[row, :, lengths[row]] = wide_k[row, :, 0], v[row, :, 0].double()
    mask = (torch.arange(capacity, device="cuda")[None] <= lengths[:, None])[:, None, None]
    expected = attend(wide_q, all_k, all_v, mask)
    options = {"scale": None, "cos": cos, "sin": sin, "layout": layout}
    for _ in range(3):  # a pass may be repeated
        out = attend_pages(q, k, v, keys, values, tables, lengths, counts, **options, quantize=B == 1)
    stored = torch.stack([one[:, length] for one, length in zip(rows(keys), lengths, strict=True)])
    assert (stored.double() - wide_k[:, :, 0]).abs().max() < 0.05, "the new key was not stored"
    if B == 1:
        check_rounded(out)
    return check_close(f"attention {B}×{H}/{G}×{K} {layout}", out.values, expected.transpose(1, 2).flatten(2), 2e-2)


def check_tokens() -> list[str]:
    """Compare tokens of recorded and plain steps in fp32 for a tiny model of every decoder preset."""
    torch.backends.cuda.matmul.allow_tf32 = False
    checked, failures = [], []
    for name in sorted(mb.PRESETS):
        config = mb.tiny(name)
        if config.decoder is None:
            continue
        torch.manual_seed(1)
        model = mb.Transformer(config).cuda().eval()
        for settings in (Settings(max_new_tokens=9), Settings(max_new_tokens=9, temperature=1.0, seed=3)):
            try:
                plain = generate_tokens(model, settings, fast=False)
                for kind, proposer in make_proposers(model).items():
                    fast = generate_tokens(model, settings, fast=True, proposer=proposer)
                    if fast != plain:
                        failures.append(f"{name}, {kind}: {fast} instead of {plain}")
            except RuntimeError as problem:
                failures.append(f"{name}: {str(problem)[:300]}")
                torch.cuda.synchronize()
        checked.append(name)
    for line in failures:
        print("WRONG", line, flush=True)
    assert not failures, f"{len(failures)} checks of recorded steps failed"
    return checked


def make_proposers(model: mb.Transformer) -> dict[str, Proposer | None]:
    """Return what a decoder is checked with: nothing, a draft, and the tokens of the prompt."""
    if model.encoder is not None:
        return {"alone": None}
    return {"alone": None, "draft": DraftModel(mb.optimize(similar_model(model))), "lookup": PromptLookup(3)}


def similar_model(model: mb.Transformer) -> mb.Transformer:
    """Return a copy with slightly different weights, as a draft."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.05 * weight.abs().mean() * torch.randn_like(weight))
    return draft


def generate_tokens(
    model: mb.Transformer, settings: Settings, fast: bool, proposer: Proposer | None = None
) -> list[list[int]]:
    """Continue three prompts of different lengths, and then three times three of one length, which are recorded."""
    engine = Engine(mb.optimize(model) if fast else model, capacity=24, max_burst=4, proposer=proposer)
    batches = ((5, 3, 7), *[(6, 6, 6)] * 3)
    return [row for start, lengths in enumerate(batches) for row in continue_prompts(engine, settings, lengths, start)]


def continue_prompts(engine: Engine, settings: Settings, lengths: Sequence[int], start: int) -> list[list[int]]:
    config = engine.model.config
    vocab = config.input.vocab
    prompts = [[(start + row + 7 * i + 3 * n) % vocab for i in range(n)] for row, n in enumerate(lengths)]
    if config.encoder is not None:
        requests = [engine.add([0], settings, prompt) for prompt in prompts]
    else:
        requests = [engine.add(prompt, settings, None) for prompt in prompts]
    tokens: dict[int, list[int]] = {request: [] for request in requests}
    while engine.busy:
        for event in engine.step():
            tokens[event.request_id] += event.tokens
    return [tokens[request] for request in requests]


def random_model(config: ModelConfig) -> mb.Transformer:
    with torch.device("meta"):
        model = mb.Transformer(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
    for name, weight in model.state_dict().items():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.ones_(weight)
        else:
            torch.nn.init.normal_(weight, 0, 0.02)
    return model


def median_seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the median time of `run`, after two calls to warm up, in which steps and prompts are recorded."""
    run(), run()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def quantized_model(config: ModelConfig, bits: int) -> mb.OptimizedModel:
    """Return a random optimized model whose weights have 16 bits (of bf16), 8 or 4."""
    model = random_model(config)
    model = model if bits == 16 else mb.quantize(model, bits=bits, group=QUANTIZED_GROUPS[bits]).eval()
    torch.cuda.empty_cache()
    return mb.optimize(model)


def measure_monoblock(config: ModelConfig, batch: int, bits: int = 16) -> float:
    model = quantized_model(config, bits)
    ids = torch.randint(1000, (batch, PROMPT), device="cuda")
    return batch * NEW / median_seconds(lambda: model.generate(ids, max_new_tokens=NEW))


def measure_transformers(kind: str, batch: int, cache: str) -> float:
    import transformers as tf

    if kind == "gpt2":
        model = tf.GPT2LMHeadModel(tf.GPT2Config())
    else:
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model = tf.LlamaForCausalLM(tf.LlamaConfig())
            torch.set_default_dtype(torch.float32)
    model = model.to("cuda", torch.bfloat16).eval()
    ids = torch.randint(1000, (batch, PROMPT), device="cuda")
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    if cache == "static":
        options["cache_implementation"] = "static"
    with torch.inference_mode():
        return batch * NEW / median_seconds(lambda: model.generate(ids, **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("all", "ours", "checks"), default="all")
    parser.add_argument("--skip-checks", action="store_true")
    rows = range(1, len(SHAPES) + 1)
    parser.add_argument("--rows", type=int, nargs="+", choices=rows, help="numbers of the rows of the table to measure")
    parser.add_argument("--caches", nargs="+", choices=("dynamic", "static"), default=["dynamic", "static"])
    parser.add_argument("--smoke", action="store_true", help="check correctness only; without a GPU, do nothing")
    args = parser.parse_args()
    if args.smoke and not torch.cuda.is_available():
        print("skipped: there is no GPU")
        return
    if not args.skip_checks:
        for check in (check_kernels, check_quantized_steps):
            for line in check():
                print("ok", line, flush=True)
        names = check_tokens()
        print(f"ok recorded steps = plain steps for {len(names)} presets: {' '.join(names)}", flush=True)
    if args.only == "checks" or args.smoke:
        return
    rows = []
    for name, batch, bits in [SHAPES[index - 1] for index in args.rows or range(1, len(SHAPES) + 1)]:
        speed = measure_monoblock(mb.preset(name), batch, bits)
        row = {"model": name, "bits": bits, "batch": batch, "monoblock": speed}
        print(row, flush=True)
        torch.cuda.empty_cache()
        if args.only == "all" and bits == 16:
            for cache in args.caches:
                try:
                    row[cache] = measure_transformers(name, batch, cache)
                except Exception as problem:
                    row[cache] = float("nan")
                    print("transformers", cache, type(problem).__name__, str(problem)[:200], flush=True)
                torch.cuda.empty_cache()
                print(row, flush=True)
        rows.append(row)
    lines = [
        f"Tokens per second, {PROMPT} + {NEW}, {torch.cuda.get_device_name()}, torch {torch.__version__}",
        f"(`{command_line()}`, {date.today()}, commit {commit()}). Models are optimized by `mb.optimize`; activations "
        "are in bf16, and with 8 and 4 bits the vector of each product is rounded to 8 bits in blocks of 32. "
        f"With 8 bits {QUANTIZED_GROUPS[8]} weights share a scale, with 4 bits {QUANTIZED_GROUPS[4]}.",
        "",
    ]
    lines += [
        "| model | bits | batch | monoblock | transformers, dynamic cache | static cache |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = " | ".join(f"{row[key]:,.0f}" if key in row else "" for key in ("monoblock", "dynamic", "static"))
        lines.append(f"| {row['model']} | {row['bits']} | {row['batch']} | {rates} |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
