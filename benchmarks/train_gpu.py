"""Training steps on one GPU: our models beside transformers and nn.Transformer, and `monoblock train` beside the step.

    python benchmarks/train_gpu.py --write                          # the bare steps and their peers
    python benchmarks/train_gpu.py --only fp8 --write
    python benchmarks/train_gpu.py --only trainer --text FILE --tokenizer FOLDER --write
    python benchmarks/train_gpu.py --only curves --text FILE --write

A step is forward pass, loss, backward pass, clipping and fused AdamW, compiled, under autocast to bfloat16, without
dropout, on random tokens of one shape; that of Transformer base is recorded as CUDA graphs (`train.compile=graphs`).
Ours uses the loss of the trainer; "fp8": with products of linear layers in 8 bits (`train.precision=fp8`).  MFU counts
6 N + 12 L D T FLOPs a token against the 989 TFLOP/s of an H200 in bfloat16.  --smoke runs toy sizes on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _report import source, write_section
from torch import Tensor, nn

import monoblock as mb
from monoblock.kernels.fp8_linear import fp8_linear
from monoblock.nn.stack import Stack
from monoblock.training.loss import CrossEntropyLoss

RESULTS = Path(__file__).with_name("results") / "train-h200.md"
PEAK_FLOPS = 989e12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def llama_config(smoke: bool) -> mb.ModelConfig:
    """A LLaMA-style model of 162M parameters with the shape of GPT-2."""
    if smoke:
        return mb.tiny("llama-7b")
    shape = {"width": 768, "depth": 12, "heads": 12, "hidden": 2048, "vocab": 50257, "context": 1024}
    return mb.vary(mb.preset("llama-7b"), **shape)


def our_loss(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, *, fp8: bool = False) -> Callable[[], Tensor]:
    loss, count = CrossEntropyLoss(fp8=fp8), labels.numel()
    return lambda: loss(model, inputs, labels) / count


def build_gpt2(batch: int, smoke: bool) -> tuple[nn.Module, Callable[[], Tensor], int]:
    return build_decoder(mb.tiny("gpt2") if smoke else mb.preset("gpt2"), batch, smoke)


def build_gpt2_fp8(batch: int, smoke: bool) -> tuple[nn.Module, Callable[[], Tensor], int]:
    return build_decoder(mb.tiny("gpt2") if smoke else mb.preset("gpt2"), batch, smoke, fp8=True)


def use_fp8(model: nn.Module) -> None:
    for stack in [part for part in model.modules() if isinstance(part, Stack)]:
        stack.use_fp8_products()


def build_llama(batch: int, smoke: bool) -> tuple[nn.Module, Callable[[], Tensor], int]:
    return build_decoder(llama_config(smoke), batch, smoke)


def build_decoder(
    config: mb.ModelConfig, batch: int, smoke: bool, *, fp8: bool = False
) -> tuple[nn.Module, Callable[[], Tensor], int]:
    model = mb.Transformer(config).to(DEVICE)
    if fp8:
        use_fp8(model)
    ids, labels = random_ids(config.input.vocab, batch, 16 if smoke else 1024)
    return model, our_loss(model, {"source": ids}, labels, fp8=fp8), labels.numel()


def random_ids(vocab: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocab, (batch, length + 1), device=DEVICE)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_base(batch: int, smoke: bool) -> tuple[nn.Module, Callable[[], Tensor], int]:
    config = mb.vary(mb.tiny("vaswani-base") if smoke else mb.preset("vaswani-base"), dropout=0.0)
    model, length = mb.Transformer(config).to(DEVICE), 8 if smoke else 128
    source, _ = random_ids(config.input.vocab, batch, length)
    target, labels = random_ids(config.input.vocab, batch, length)
    return model, our_loss(model, {"source": source, "target": target}, labels), labels.numel()


def build_transformers(kind: str) -> Callable[[int, bool], tuple[nn.Module, Callable[[], Tensor], int]]:
    def build(batch: int, smoke: bool) -> tuple[nn.Module, Callable[[], Tensor], int]:
        import transformers as tf

        length = 16 if smoke else 1024
        if kind == "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96} if smoke else {}
            config = tf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
            model: nn.Module = tf.GPT2LMHeadModel(config)
        else:
            width, hidden, depth, vocab = (32, 64, 2, 96) if smoke else (768, 2048, 12, 50257)
            sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": depth, "vocab_size": vocab}
            heads = 2 if smoke else 12
            config = tf.LlamaConfig(num_attention_heads=heads, max_position_embeddings=1024, **sizes)
            model = tf.LlamaForCausalLM(config)
        model = model.to(DEVICE)
        ids, labels = random_ids(config.vocab_size, batch, length)

        def loss() -> Tensor:
            return F.cross_entropy(model(ids).logits.float().flatten(0, 1), labels.flatten())

        return model, loss, labels.numel()

    return build


class TorchTransformer(nn.Module):
    """nn.Transformer with embeddings, learned positions and an output matrix tied to the embedding."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.body = nn.Transformer(width, heads, depth, depth, hidden, dropout=0.0, batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = (self.token(ids) + self.position.weight[: ids.shape[1]] for ids in (source, target))
        return F.linear(self.body(x, y, tgt_mask=self.mask, tgt_is_causal=True), self.token.weight)


def build_torch(batch: int, smoke: bool) -> tuple[nn.Module, Callable[[], Tensor], int]:
    vocab, width, depth, heads, hidden, length = (96, 32, 2, 2, 64, 8) if smoke else (37000, 512, 6, 8, 2048, 128)
    model = TorchTransformer(vocab, width, depth, heads, hidden, length).to(DEVICE)
    source, _ = random_ids(vocab, batch, length)
    target, labels = random_ids(vocab, batch, length)
    return model, lambda: F.cross_entropy(model(source, target).float().flatten(0, 1), labels.flatten()), labels.numel()


WITH_GRAPHS = ("Transformer base, 128 + 128",)  # small kernels: the step is recorded as CUDA graphs
ROWS = [  # work, batch, who, how to build model and loss
    ("GPT-2 124M", 32, "monoblock", build_gpt2),
    ("GPT-2 124M", 64, "monoblock", build_gpt2),
    ("GPT-2 124M", 32, "transformers", build_transformers("gpt2")),
    ("LLaMA-style 162M", 32, "monoblock", build_llama),
    ("LLaMA-style 162M", 32, "transformers", build_transformers("llama")),
    ("Transformer base, 128 + 128", 256, "monoblock", build_base),
    ("Transformer base, 128 + 128", 256, "nn.Transformer", build_torch),
]
FP8_ROWS = [
    ("GPT-2 124M", 32, "monoblock, fp8", build_gpt2_fp8),
    ("GPT-2 124M", 64, "monoblock, fp8", build_gpt2_fp8),
    ("GPT-2 124M", 32, "monoblock", build_gpt2),
    ("GPT-2 124M", 32, "transformers", build_transformers("gpt2")),
]


def make_step(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    compiled: bool = True,
    mode: str | None = None,
) -> Callable[[], Tensor]:
    fused = DEVICE == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    compute = torch.compile(loss, mode=mode) if compiled else loss

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            value = compute()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_steps(step: Callable[[], Tensor], repeats: int = 20, warmup: int = 5) -> float:
    """Return the seconds of a step: the median of three means, so that steps may overlap as in training."""
    for _ in range(warmup):
        step()
    means = []
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize()
        means.append((time.perf_counter() - start) / repeats)
    return statistics.median(means)


def measure_row(work: str, batch: int, who: str, build: Callable[..., Any], smoke: bool) -> dict[str, float]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, loss, tokens = build(2 if smoke else batch, smoke)
    mode = "reduce-overhead" if work in WITH_GRAPHS else None
    step = make_step(model, loss, compiled=not smoke, mode=mode)
    seconds = time_steps(step, *((1, 1) if smoke else ()))
    memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else math.nan
    parameters = sum(weight.numel() for weight in model.parameters())
    result = {"speed": tokens / seconds, "ms": 1000 * seconds, "memory": memory, "parameters": parameters}
    del model, loss, step
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return result


def is_ours(who: str) -> bool:
    return who.startswith("monoblock")


def steps_section(title: str, rows: list[Any], smoke: bool) -> str:
    torch.set_float32_matmul_precision("high")
    lines = [*heading(title), "", "MFU counts against the peak in bfloat16, also with products in 8 bits.", ""]
    lines += ["| model | batch | | parameters | ms per step | target tokens/s | of the peer | MFU | peak, GiB |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    measured = []
    for work, batch, who, build in rows:
        measured.append((work, batch, who, measure_row(work, batch, who, build, smoke)))
        print(f"{work}, {batch}, {who}: {measured[-1][3]['speed']:,.0f} tokens/s", file=sys.stderr, flush=True)
    peers = {(work, batch): row["speed"] for work, batch, who, row in measured if not is_ours(who)}
    for work, batch, who, row in measured:
        peer = peers.get((work, batch)) if is_ours(who) else None
        ratio = "" if peer is None else f"{row['speed'] / peer:.2f} ×"
        is_decoder = "base" not in work
        flops = 6 * row["parameters"] + (12 * 12 * 768 * 1024 if is_decoder else 0)
        mfu = f"{row['speed'] * flops / PEAK_FLOPS:.1%}" if is_decoder and not smoke else ""
        lines.append(
            f"| {work} | {batch} | {who} | {row['parameters'] / 1e6:.0f}M | {row['ms']:.1f} | {row['speed']:,.0f} | "
            f"{ratio} | {mfu} | {row['memory']:.1f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def heading(title: str) -> list[str]:
    return [title, "", f"{source()}."]


# -- monoblock train ------------------------------------------------------------------------------------------------


def trainer_section(smoke: bool, text: Path, tokenizer: Path | None) -> str:
    """Compare the steps of `monoblock train gpt2-124m` with bare steps of the same model afterwards."""
    batch, steps = (2, 6) if smoke else (32, 120)
    words = ["train", "gpt2-124m", f"data.corpus={text}", f"train.batch={batch}", "train.accumulate=1"]
    words += [f"train.steps={steps}", f"train.warmup={steps // 2}", "train.sample_every=0", "train.eval_every=0"]
    words += ["train.save_every=0"]
    words += ["train.compile=no", "model.depth=1", "tokenizer.vocab=300"] if smoke else ["train.compile=yes"]
    words += [f"tokenizer.folder={tokenizer}"] if tokenizer is not None else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "monoblock", *words, "--out", str(run)], check=True)
        print(f"trained in {time.perf_counter() - start:.0f} s", flush=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = mb.Transformer.from_pretrained(run).config
    seconds = statistics.mean(row["seconds"] for row in rows if "loss" in row and row["step"] > steps // 2)
    torch.manual_seed(0)
    model, loss, tokens = build_decoder(config, batch, smoke)
    torch.set_float32_matmul_precision("high")
    bare = time_steps(make_step(model, loss, compiled=not smoke), *((1, 1) if smoke else ()))
    lines = heading("`monoblock train` and the bare step")
    lines += [
        "",
        f"gpt2-124m, {batch} × {tokens // batch:,} tokens a step, {config.input.vocab:,} types, compiled; "
        f"the mean of the last {steps - steps // 2} of {steps} steps.",
        "",
        "| | ms per step | tokens/s | share |",
        "|---|---|---|---|",
        f"| bare step | {1000 * bare:.1f} | {tokens / bare:,.0f} | 100% |",
        f"| `monoblock train` | {1000 * seconds:.1f} | {tokens / seconds:,.0f} | {bare / seconds:.1%} |",
    ]
    return "\n".join(lines)


# -- loss curves ------------------------------------------------------------------------------------------------------


def curves_section(smoke: bool, text: Path) -> str:
    """Train the same model on the same batches by the plain path and by the fast one, and the plain one again."""
    steps, batch, length = (6, 2, 16) if smoke else (300, 16, 512)
    data = torch.tensor(list(text.read_bytes()[: 2**24]), dtype=torch.long)
    losses = {
        name: train_bytes(data, steps, batch, length, fast=fast, fp8=fp8, smoke=smoke, seed=seed)
        for name, fast, fp8, seed in (
            ("plain", False, False, 0),
            ("fast", True, False, 0),
            ("fast, products in 8 bits", True, True, 0),
            ("plain, other initial weights", False, False, 1),
        )
    }
    plain = losses["plain"]
    lines = heading("Loss of the plain and the fast path")
    lines += [
        "",
        f"GPT-2 124M on the bytes of {text.name} (256 of its 50,257 types occur), {steps} steps of {batch} × {length}, "
        "the same batches; plain: eager, logits stored; fast: compiled, output layer and loss fused.",
        "",
        f"Relative errors of one layer of 768 inputs and 3,072 outputs against fp64: {layer_errors()}.",
        "",
        "| run | mean loss of the last 50 steps | mean difference to plain | largest difference (mean of 10 steps) |",
        "|---|---|---|---|",
    ]
    for name, values in losses.items():
        difference = values - plain
        windows = difference[: len(difference) // 10 * 10].view(-1, 10).mean(1) if len(difference) >= 10 else difference
        lines.append(f"| {name} | {values[-50:].mean():.4f} | {difference.mean():+.5f} | {windows.abs().max():.5f} |")
    return "\n".join(lines)


def layer_errors() -> str:
    """Return the errors of a layer in bfloat16 and with products in 8 bits: output, gradients of input and weight."""
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, device=DEVICE) for shape in ((4096, 768), (3072, 768), (4096, 3072))]
    exact_x, exact_weight, exact_grad = (tensor.double() for tensor in tensors)
    exact = (exact_x @ exact_weight.T, exact_grad @ exact_weight, exact_grad.T @ exact_x)
    texts = []
    for name, apply in (("bf16", F.linear), ("8 bits", fp8_linear)):
        x, weight, grad = (tensor.clone().requires_grad_() for tensor in tensors)
        with torch.autocast(DEVICE, torch.bfloat16):
            out = apply(x, weight, None)
        found = (out, *torch.autograd.grad(out, (x, weight), grad.to(out.dtype)))
        errors = [float((f.detach().double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]
        texts.append(f"{name} {errors[0]:.1e} (output), {errors[1]:.1e} (gradient of input), {errors[2]:.1e} (weight)")
    return "; ".join(texts)


def train_bytes(
    data: Tensor, steps: int, batch: int, length: int, *, fast: bool, fp8: bool, smoke: bool, seed: int
) -> Tensor:
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model = mb.Transformer(mb.vary(mb.tiny("gpt2"), vocab=2048) if smoke else mb.preset("gpt2")).to(DEVICE)
    ids = torch.empty(batch, length, dtype=torch.long, device=DEVICE)
    labels = torch.empty_like(ids)
    loss = CrossEntropyLoss(fp8=fp8)
    if fp8:
        use_fp8(model)

    def fast_loss() -> Tensor:
        return loss(model, {"source": ids}, labels) / labels.numel()

    def plain_loss() -> Tensor:
        return loss.from_logits(model(ids), labels) / labels.numel()

    step = make_step(model, fast_loss if fast else plain_loss, compiled=fast and not smoke)
    generator = torch.Generator().manual_seed(7)
    values = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
        rows = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
        ids.copy_(rows[:, :-1])
        labels.copy_(rows[:, 1:])
        values.append(step())
    return torch.stack(values).float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("steps", "fp8", "trainer", "curves"), default="steps")
    parser.add_argument("--rows", type=int, nargs="*", help=f"measure only these of the {len(ROWS)} steps, from 0")
    parser.add_argument(
        "--text", type=Path, help="a text file, for trainer and curves; with --smoke by default this program"
    )
    parser.add_argument("--tokenizer", type=Path, help="the folder of a tokenizer, for trainer")
    parser.add_argument("--smoke", action="store_true", help="toy sizes")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    if args.rows is not None and args.only != "steps":
        parser.error("--rows needs --only steps")
    if args.rows is not None and not all(0 <= row < len(ROWS) for row in args.rows):
        parser.error(f"--rows takes numbers from 0 to {len(ROWS) - 1}")
    if args.only in ("trainer", "curves") and args.text is None and not args.smoke:
        parser.error(f"--only {args.only} needs --text FILE")
    text = args.text or Path(__file__)
    if not text.is_file():
        parser.error(f"--text {text} is not a file")
    if args.only == "steps":
        title = "Bare steps" if args.rows is None else f"Bare steps, rows {', '.join(map(str, args.rows))}"
        section = steps_section(title, [ROWS[n] for n in args.rows or range(len(ROWS))], args.smoke)
    elif args.only == "fp8":
        section = steps_section("Bare steps, products in 8 bits", FP8_ROWS, args.smoke)
    elif args.only == "trainer":
        section = trainer_section(args.smoke, text, args.tokenizer)
    else:
        section = curves_section(args.smoke, text)
    print(section)
    if args.write and not args.smoke:
        write_section(RESULTS, "Training on the H200", section)


if __name__ == "__main__":
    main()
