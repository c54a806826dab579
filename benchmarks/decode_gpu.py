"""Tokens a second on one GPU: GPT-2 124M with batch 1 and 64, a 7B LLaMA shape with batch 1; beside transformers.

    python benchmarks/decode_gpu.py --out table.md          # checks first, then times
    python benchmarks/decode_gpu.py --only ours

Weights are random, bf16; 128 tokens of prompt, 256 new ones, greedy, nothing ends early.  The second call of a shape is
timed (the first records CUDA graphs and compiles kernels); time includes reading the prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import monoblock as mb
from monoblock import kernels
from monoblock.config import ModelConfig
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings

PROMPT, NEW = 128, 256


def close(name: str, one: torch.Tensor, two: torch.Tensor, tolerance: float) -> str:
    worst = (one.float() - two.float()).abs().max().item() / max(two.float().abs().max().item(), 1e-9)
    assert worst <= tolerance, f"{name}: {worst:.2e} apart"
    return f"{name} {worst:.1e}"


def check_kernels() -> list[str]:
    """Each kernel against the plain path in fp64."""
    torch.manual_seed(0)
    found = []
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    for N, K in ((2304, 768), (768, 3072), (50257, 768), (4096, 11008), (37, 100)):
        x, w, b = make(1, 1, K), make(N, K), make(N)
        wanted = x.double() @ w.double().T + b.double()
        found.append(close(f"matvec {N}×{K}", kernels.matvec(x, w, b), wanted, 1e-2))
        added = make(1, 1, N)
        found.append(close("  added", kernels.matvec(x, w, None, added), wanted - b.double() + added.double(), 1e-2))
    x, w = make(5, 1, 300), make(300)
    plain, more = mb_rms(x, w), make(300)
    kind = {"centered": False, "cast_after_scale": False}
    found.append(close("rms", kernels.norm(x, w, None, 1e-6, **kind), plain, 1e-2))
    kind = {"centered": True, "cast_after_scale": True}
    wide = torch.nn.functional.layer_norm(x.double(), (300,), w.double(), more.double(), 1e-5)
    found.append(close("layer norm", kernels.norm(x, w, more, 1e-5, **kind), wide, 1e-2))
    both = make(3, 1, 2 * 700)
    gate, up = both.double().chunk(2, -1)
    found.append(close("gated", kernels.gated(both, "silu"), torch.nn.functional.silu(gate) * up, 2e-2))
    for B, H, G, K, turned in (
        (1, 12, 12, 64, None),
        (3, 6, 2, 32, "halves"),
        (64, 12, 12, 64, "halves"),
        (2, 8, 1, 128, "interleaved"),
    ):
        found.append(check_attention(B, H, G, K, turned))
    return found


def mb_rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    from monoblock.norm import rms_norm

    return rms_norm(x, w, 1e-6)


def check_attention(B: int, H: int, G: int, K: int, layout: str | None) -> str:
    from monoblock.attention import attend
    from monoblock.positions import Turn, rotate

    capacity = 320
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(B, H, 1, K), make(B, G, 1, K), make(B, G, 1, K)
    keys, values = make(B, G, capacity + 1, K), make(B, G, capacity + 1, K)
    lengths = torch.randint(0, capacity, (B,), device="cuda")
    cos = sin = None
    wide_q, wide_k = q.double(), k.double()
    if layout is not None:
        angle = torch.rand(B, 1, 1, K // 4, device="cuda") * 6
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        turn = Turn(cos.double(), sin.double(), layout == "interleaved")
        wide_q, wide_k = rotate(wide_q, turn), rotate(wide_k, turn)
    all_k, all_v = keys.double(), values.double()
    for row in range(B):
        all_k[row, :, lengths[row]], all_v[row, :, lengths[row]] = wide_k[row, :, 0], v[row, :, 0].double()
    mask = (torch.arange(capacity + 1, device="cuda")[None] <= lengths[:, None])[:, None, None]
    wanted = attend(wide_q, all_k, all_v, mask)
    out = kernels.attend_step(q, k, v, keys, values, lengths, scale=None, cos=cos, sin=sin, layout=layout)
    stored = torch.stack([keys[row, :, lengths[row]] for row in range(B)])
    assert (stored.double() - wide_k[:, :, 0]).abs().max() < 0.05, "the new key was not stored"
    return close(f"attention {B}×{H}/{G}×{K} {layout}", out, wanted, 2e-2)


def check_tokens() -> list[str]:
    """Recorded steps give the tokens of plain steps, fp32, for every decoder preset made tiny."""
    torch.backends.cuda.matmul.allow_tf32 = False
    said, wrong = [], []
    for name in sorted(mb.PRESETS):
        config = mb.tiny(name)
        if config.decoder is None:
            continue
        torch.manual_seed(1)
        model = mb.Transformer(config).cuda().eval()
        for settings in (Settings(max_new_tokens=9), Settings(max_new_tokens=9, temperature=1.0, seed=3)):
            try:
                fast, plain = (texts_of(model, settings, fast) for fast in (True, False))
                if fast != plain:
                    wrong.append(f"{name}: {fast} instead of {plain}")
            except RuntimeError as problem:
                wrong.append(f"{name}: {str(problem)[:300]}")
                torch.cuda.synchronize()
        said.append(name)
    for line in wrong:
        print("WRONG", line, flush=True)
    return said if not wrong else [f"only {len(said) - len(wrong)}"]


def texts_of(model: mb.Transformer, settings: Settings, fast: bool) -> list[list[int]]:
    """What the engine makes of three prompts of different lengths."""
    config = model.config
    vocab = config.input.vocab
    prompts = [[(7 * place + 3 * n) % vocab for place in range(n)] for n in (5, 3, 7)]
    engine = Engine(model, capacity=24, fast=fast, burst=4)
    both = config.encoder is not None
    asked = [engine.add([0] if both else prompt, settings, prompt if both else None) for prompt in prompts]
    new: dict[int, list[int]] = {number: [] for number in asked}
    while engine.busy:
        for event in engine.step():
            new[event.id] += event.tokens
    return [new[number] for number in asked]


def random_model(config: ModelConfig) -> mb.Transformer:
    with torch.device("meta"):
        model = mb.Transformer(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
    for name, weight in model.state_dict().items():
        torch.nn.init.ones_(weight) if "norm" in name and name.endswith("weight") else torch.nn.init.normal_(
            weight, 0, 0.02
        )
    return model


def timed(run, repeats: int = 3) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def ours(config: ModelConfig, batch: int) -> float:
    model = random_model(config)
    ids = torch.randint(1000, (batch, PROMPT), device="cuda")
    return batch * NEW / timed(lambda: model.generate(ids, max_new_tokens=NEW))


def theirs(kind: str, batch: int, cache: str) -> float:
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
        return (
            batch * NEW / timed(lambda: model.generate(ids, **options), 1 if cache == "static" or kind != "gpt2" else 2)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("all", "ours", "checks"), default="all")
    parser.add_argument("--skip-checks", action="store_true")
    given = parser.parse_args()
    if not given.skip_checks:
        for line in check_kernels():
            print("ok", line, flush=True)
        names = check_tokens()
        print(f"ok recorded = plain tokens for {len(names)} presets: {' '.join(names)}", flush=True)
    if given.only == "checks":
        return
    rows = []
    shapes = (("gpt2", mb.preset("gpt2"), 1), ("gpt2", mb.preset("gpt2"), 64), ("llama-7b", mb.preset("llama-7b"), 1))
    for name, config, batch in shapes:
        row = {"model": name, "batch": batch, "monoblock": ours(config, batch)}
        print(row, flush=True)
        torch.cuda.empty_cache()
        if given.only == "all":
            for cache in ("dynamic", "static"):
                try:
                    row[cache] = theirs(name, batch, cache)
                except Exception as problem:
                    row[cache] = float("nan")
                    print("transformers", cache, type(problem).__name__, str(problem)[:200], flush=True)
                torch.cuda.empty_cache()
                print(row, flush=True)
        rows.append(row)
    lines = [f"Tokens a second, {PROMPT} + {NEW}, bf16, {torch.cuda.get_device_name()}, torch {torch.__version__}", ""]
    lines += ["| model | batch | monoblock | transformers, dynamic cache | static cache |", "|---|---|---|---|---|"]
    for row in rows:
        rates = " | ".join(f"{row[key]:,.0f}" if key in row else "" for key in ("monoblock", "dynamic", "static"))
        lines.append(f"| {row['model']} | {row['batch']} | {rates} |")
    print("\n".join(lines))
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
