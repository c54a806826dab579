"""A training step on padded batches beside the same step on batches without padding (`data.padding = "none"`).

The sentences have the lengths of Multi30k, in subwords of a BPE vocabulary of 8,000, and come in random order: a batch
is padded to its longest sentence. A step is forward, loss, backward and fused AdamW, compiled, in bf16 autocast on a
GPU. Both kinds take turns over the same batches, which all differ, so that recompilation would show; the compilations
during the measured steps are counted. Before, the kernel for variable lengths is compared with the plain formula in
fp64. --lengths FOLDER counts the lengths in a folder of Multi30k and prints them; --data FOLDER draws from them.
--smoke takes toy sizes; --write saves the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import source, write_section
from torch import Tensor, nn
from torch._dynamo.utils import counters

import monoblock as mb
from monoblock.nn.attention import attend
from monoblock.nn.masks import TokenPositions, causal, same_document
from monoblock.nn.packed_documents import PackedDocuments, attend_varlen
from monoblock.training.collate import SpecialTokenIds, TensorBatch, collate_masked_lm, collate_seq2seq
from monoblock.training.loss import CrossEntropyLoss

RESULTS = Path(__file__).with_name("results") / "unpadded.md"
KINDS = ("padded", "unpadded")
FIRST_ID = 4  # after the special tokens
SPECIAL = SpecialTokenIds(pad_id=0, bos_id=1, eos_id=2, mask_id=3, unmaskable_ids=frozenset(range(FIRST_ID)))
# The first number is the length; then follow, for English and for German, how many training sentences are as long
# (python benchmarks/unpadded.py --lengths FOLDER).
LENGTHS: dict[str, list[int]] = {
    "first": [2, 2],
    "source": [
        *[0, 1, 6, 78, 418, 979, 1574, 2110, 2714, 2804, 2774, 2647, 2313, 1999, 1719, 1469, 1109, 981, 751, 584],
        *[470, 358, 300, 200, 147, 118, 76, 70, 59, 33, 18, 17, 24, 20, 15, 11, 7, 9, 2, 2, 3, 4, 3, 0, 2, 1, 1],
    ],
    "target": [
        *[2, 0, 48, 201, 597, 1064, 1524, 1997, 2314, 2455, 2460, 2361, 2209, 1948, 1738, 1440, 1216, 1040, 875, 719],
        *[534, 449, 386, 294, 250, 158, 180, 94, 107, 73, 52, 32, 34, 31, 20, 22, 17, 10, 12, 11, 5, 5, 4, 3, 2, 0],
        *[1, 3, 2, 1],
    ],
}


# -- lengths and batches ------------------------------------------------------------------------------------------


def count_lengths(folder: Path) -> dict[str, list[int]]:
    """Return how many sentences of each length Multi30k's training data have, from `first` on."""
    texts = {side: (folder / f"train.{code}").read_text(encoding="utf-8").splitlines() for side, code in SIDES.items()}
    tokenizer = mb.Tokenizer.train("bpe", [*texts["source"], *texts["target"]], 8000, marker="@@", specials=["pad"])
    counts = {side: Counter(len(tokenizer.encode(row)) for row in rows) for side, rows in texts.items()}
    first = min(min(count) for count in counts.values())
    return {"first": [first] * 2} | {
        side: [count[length] for length in range(first, max(count) + 1)] for side, count in counts.items()
    }


SIDES = {"source": "en", "target": "de"}


def draw_lengths(table: dict[str, list[int]], side: str, count: int, rng: np.random.Generator) -> list[int]:
    frequencies = np.array(table[side], float)
    lengths = np.arange(len(frequencies)) + table["first"][0]
    drawn: list[int] = rng.choice(lengths, count, p=frequencies / frequencies.sum()).tolist()
    return drawn


def make_batch(task: str, vocab: int, size: int, table: dict[str, list[int]], seed: int) -> TensorBatch:
    """Return a padded batch of random tokens with the lengths of Multi30k."""
    rng = np.random.default_rng(seed)

    def texts(side: str) -> list[Any]:
        return [rng.integers(FIRST_ID, vocab, length) for length in draw_lengths(table, side, size, rng)]

    if task == "seq2seq":
        pairs = [{"source": s, "target": t} for s, t in zip(texts("source"), texts("target"), strict=True)]
        inputs, labels = collate_seq2seq(pairs, SPECIAL, start=1)
    else:
        rows = [{"ids": ids, "sample": number} for number, ids in enumerate(texts("source"))]
        special = SpecialTokenIds(**{**vars(SPECIAL), "vocab_size": vocab})
        inputs, labels = collate_masked_lm(rows, special, seed=seed, epoch=0)
    return TensorBatch(inputs, labels, 0, [])


def count_tokens(batch: TensorBatch, task: str) -> int:
    """Return the number of target tokens, or the number of tokens of an encoder's texts."""
    if task == "seq2seq":
        return batch.target_count
    mask = batch.inputs.get("attention_mask")
    return batch.inputs["source"].numel() if mask is None else int(mask.sum())


# -- the kernel against the plain formula ---------------------------------------------------------------------------


RESULT_NAMES = ("output", "dq", "dk", "dv")


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


ATTENTIONS = {  # heads, key heads, whether the mask is causal, the texts of queries and keys
    "encoder": (8, 8, False, ("source", "source")),
    "decoder": (8, 8, True, ("target", "target")),
    "cross": (8, 8, False, ("target", "source")),
    "grouped heads": (8, 2, True, ("target", "target")),
}


def compare_kernel(name: str, table: dict[str, list[int]], size: int) -> list[dict[str, Any]]:
    """Compare the kernel with the plain formula in fp64, for q, k and v in bf16: output and gradients."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    heads, kv_heads, is_causal, sides = ATTENTIONS[name]
    lengths = {side: [*draw_lengths(table, side, size, rng), 0, 0] for side in dict.fromkeys(sides)}
    packed = {side: PackedDocuments.from_lengths(counts).to("cuda") for side, counts in lengths.items()}
    documents = [packed[side] for side in sides]
    shapes = [(1, h, d.numbers.shape[1], 64) for h, d in zip((heads, kv_heads), documents, strict=True)]
    tensors = [torch.randn(shapes[n], generator=generator).to("cuda", torch.bfloat16) for n in (0, 1, 1)]
    grad = torch.randn(shapes[0], generator=generator).to("cuda", torch.bfloat16)
    tokens = [TokenPositions(d.positions(), d.numbers) for d in documents]
    mask = (causal & same_document if is_causal else same_document).dense(*tokens)

    def run_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask)

    def run_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_varlen(q, k, v, *documents, causal=is_causal, scale=None, dtype=torch.bfloat16)

    exact = differentiate(run_plain, [t.double() for t in tensors], grad.double())
    rows = []
    for kind, function in (("kernel", run_kernel), ("plain formula in bf16", run_plain)):
        found = differentiate(function, tensors, grad)
        errors = {key: relative_error(f, e) for key, f, e in zip(RESULT_NAMES, found, exact, strict=True)}
        rows.append({"attention": name, "by": kind, **errors})
    return rows


def differentiate(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare_models(model: nn.Module, batch: TensorBatch, device: str) -> dict[str, float]:
    """Return the loss of a batch and the relative errors of the gradient, against padded rows in fp32."""
    loss = CrossEntropyLoss()
    results = {}
    for name, unpadded, dtype in (
        ("padded, fp32", False, None),
        ("unpadded, fp32", True, None),
        ("padded, bf16", False, torch.bfloat16),
        ("unpadded, bf16", True, torch.bfloat16),
    ):
        moved = batch._replace(unpadded=unpadded).to(torch.device(device))
        if dtype is not None and device == "cpu":
            continue
        with torch.autocast(device, dtype, enabled=dtype is not None):
            value = loss(model, moved.inputs, moved.labels) / batch.target_count
        grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
        results[name] = float(value.detach()), torch.cat([g.double().flatten() for g in grads if g is not None])
    exact = results["padded, fp32"][1]
    return {name: (value, relative_error(grad, exact)) for name, (value, grad) in results.items()}


# -- training steps -------------------------------------------------------------------------------------------------


def mark_lengths_dynamic(batch: TensorBatch) -> None:
    """Let torch.compile expect other lengths from the first batch on, so that it compiles fewer graphs."""
    documents = [value for value in batch.inputs.values() if isinstance(value, PackedDocuments)]
    tensors = [value for value in batch.inputs.values() if isinstance(value, Tensor)]
    for tensor in [*tensors, batch.labels, *(d.numbers for d in documents)]:
        if tensor.dim() > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)


class Runner:
    """One kind of batch with its own compiled step; both kinds train the same weights."""

    def __init__(self, model: nn.Module, kind: str, device: str, compiled: bool) -> None:
        self.model, self.kind, self.device = model, kind, device
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")
        loss = CrossEntropyLoss()

        def compute_loss(inputs: dict[str, Any], labels: Tensor) -> Tensor:
            return loss(model, inputs, labels)

        self.compute_loss = torch.compile(compute_loss) if compiled else compute_loss

    def move(self, batch: TensorBatch) -> TensorBatch:
        moved = batch._replace(unpadded=self.kind == "unpadded").to(torch.device(self.device))
        mark_lengths_dynamic(moved)
        return moved

    def step(self, batch: TensorBatch, target_count: int) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.compute_loss(batch.inputs, batch.labels) / target_count
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time_steps(self, batches: list[TensorBatch], *, with_data: bool) -> float:
        """Return the seconds of a step on each batch; with_data: padding is removed and batches are moved in it."""
        counts = [batch.target_count for batch in batches]
        moved = batches if with_data else [self.move(batch) for batch in batches]
        self._synchronize()
        start = time.perf_counter()
        for batch, count in zip(moved, counts, strict=True):
            self.step(self.move(batch) if with_data else batch, count)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def measure_model(name: str, table: dict[str, list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind of batch."""
    task = "seq2seq" if name.startswith("vaswani") else "masked_lm"
    config = mb.tiny(name) if args.smoke else mb.preset(name)
    config = mb.vary(config, dropout=0.0, **({} if task == "seq2seq" else {"head": "masked_lm"}))
    size, num_warmup, num_measured = (8, 2, 2) if args.smoke else (args.batch, args.warmup, args.steps)
    vocab = config.input.vocab
    batches = [make_batch(task, vocab, size, table, seed) for seed in range(num_warmup + num_measured)]
    warmup, measured = batches[:num_warmup], batches[num_warmup:]
    tokens = sum(count_tokens(batch, task) for batch in measured)
    torch.manual_seed(0)
    model = mb.Transformer(config).to(args.device).train()
    compiled = args.device == "cuda" or args.compile
    runners = {kind: Runner(model, kind, args.device, compiled) for kind in KINDS}
    rows: dict[str, dict[str, Any]] = {}
    for kind, runner in runners.items():
        graphs, start = num_graphs(), time.perf_counter()
        runner.time_steps(warmup, with_data=False)
        setup = {"warmup_graphs": num_graphs() - graphs, "warmup_seconds": time.perf_counter() - start}
        print(f"{name}, {kind}: warmed up in {setup['warmup_seconds']:.0f} s", file=sys.stderr, flush=True)
        rows[kind] = {"model": name, "kind": kind, **setup, "seconds": [], "with_data": [], "measured_graphs": 0}
        rows[kind]["row_tokens"] = statistics.mean(runner.move(b).inputs["source"].numel() for b in measured)
        torch.cuda.reset_peak_memory_stats() if args.device == "cuda" else None
        runner.time_steps(warmup[:1], with_data=False)
        rows[kind]["peak"] = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    for _ in range(args.rounds):
        for kind, runner in runners.items():
            graphs = num_graphs()
            rows[kind]["seconds"].append(runner.time_steps(measured, with_data=False))
            rows[kind]["with_data"].append(runner.time_steps(measured, with_data=True))
            rows[kind]["measured_graphs"] += num_graphs() - graphs
    errors = compare_models(
        model, measured[0] if args.smoke else make_batch(task, vocab, 64, table, -1 % 2**32), args.device
    )
    for kind, row in rows.items():
        row |= {"tokens_per_second": tokens / min(row["seconds"]), "steps": num_measured, "batch": size}
        row["ratio"] = statistics.median(a / b for a, b in zip(rows["padded"]["seconds"], row["seconds"], strict=True))
        row["data_ratio"] = statistics.median(
            a / b for a, b in zip(rows["padded"]["with_data"], row["with_data"], strict=True)
        )
        row["errors"] = {key: value for key, value in errors.items() if key.startswith(f"{kind},")}
    return list(rows.values())


# -- the report -----------------------------------------------------------------------------------------------------


def format_steps(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | batch | tokens in a row of the source | ms per step | tokens/s | ratio | ms with data | ratio | "
        "peak GiB | graphs compiled in warm-up, after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        milliseconds, with_data = (1000 * min(row[key]) / row["steps"] for key in ("seconds", "with_data"))
        lines.append(
            f"| {row['model']} | {row['kind']} | {row['row_tokens']:,.0f} | {milliseconds:.2f} | "
            f"{row['tokens_per_second']:,.0f} | {row['ratio']:.2f} × | {with_data:.2f} | {row['data_ratio']:.2f} × | "
            f"{row['peak'] / 2**30:.2f} | {row['warmup_graphs']}, {row['measured_graphs']} |"
        )
    lines += ["", "| model | batch and precision | loss | relative error of the gradient |", "|---|---|---|---|"]
    for row in rows:
        for name, (loss, error) in row["errors"].items():
            lines.append(f"| {row['model']} | {name} | {loss:.6f} | {error:.1e} |")
    return lines


def format_kernel(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"| attention | by | {' | '.join(RESULT_NAMES)} |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['attention']} | {row['by']} | {' | '.join(f'{row[name]:.1e}' for name in RESULT_NAMES)} |"
        )
    return lines


def format_section(steps: list[dict[str, Any]], kernel: list[dict[str, Any]], args: argparse.Namespace) -> str:
    row, breaks = steps[0], sum(counters["graph_break"].values())
    precision = "bf16 autocast, compiled" if args.device == "cuda" else "fp32"
    lines = [
        f"{'One GPU' if args.device == 'cuda' else 'CPU'}, batches of {row['batch']:,}",
        "",
        f"{source()}, {precision}; graph breaks: {breaks}. "
        f"Batches of {row['batch']} with the lengths of Multi30k in random order, {row['steps']} different batches "
        f"after warm-up, rounds in turns: {args.rounds}. Times are the best of all rounds, ratios the "
        "median within a round. Tokens are those of the targets for vaswani, of the texts for bert, without "
        'padding. "With data": the batch is moved to the device, and its padding removed, within the step.',
        "",
        *format_steps(steps),
    ]
    if kernel:
        lines += ["", "The kernel for variable lengths in bf16: relative errors against the plain formula in fp64."]
        lines += ["", *format_kernel(kernel)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["vaswani-base", "bert-base"])
    parser.add_argument("--batch", type=int, default=512, help="sentences, or pairs of them")
    parser.add_argument("--steps", type=int, default=24, help="different batches that are measured")
    parser.add_argument("--warmup", type=int, default=12, help="further batches before them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile on a CPU as well")
    parser.add_argument("--data", type=Path, help="a folder with train.en and train.de of Multi30k")
    parser.add_argument("--lengths", type=Path, help="print the lengths in such a folder, and stop")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the tables to results/{RESULTS.name}")
    args = parser.parse_args()
    if args.lengths is not None:
        print(json.dumps(count_lengths(args.lengths)))
        return
    if args.smoke:
        args.rounds = 1
    table = LENGTHS if args.data is None else count_lengths(args.data)
    torch.set_float32_matmul_precision("highest")
    names = ATTENTIONS if args.device == "cuda" else ()
    kernel = [row for name in names for row in compare_kernel(name, table, 16 if args.smoke else 96)]
    if kernel:
        print("\n".join(format_kernel(kernel)), file=sys.stderr, flush=True)
    steps = [row for name in args.models for row in measure_model(name, table, args)]
    section = format_section(steps, kernel, args)
    print(json.dumps({"steps": steps, "kernel": kernel}, indent=2) if args.json else f"## {section}")
    if args.write and not args.smoke:
        write_section(RESULTS, "Batches without padding", section)


if __name__ == "__main__":
    main()
