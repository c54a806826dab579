"""All matrix-vector products of one token of GPT-2 124M, by every implementation that this machine offers.

Decoding one token reads every weight once, so these products limit its speed. Each implementation computes the whole
set (query, key and value joined, output, up and down of 12 blocks, and the logits) in sequence, so that nothing stays
in a small cache; implementations take turns, so that other load affects all of them. The table gives the median and the
best time per token, and the bytes of weights (with scales) read per second at the median. An implementation that cannot
run here is listed with the reason. --rows N multiplies N rows at once, --smoke runs a toy size once, --compiled adds
torch.compile.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.kernels.cpu.library import load_kernels
from monoblock.quantization.packing import pack, unpack

BLOCK = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
SHAPES = [*BLOCK * 12, (50257, 768)]
TOY = [(96, 64), (64, 96)]

Product = Callable[..., Tensor]
PrepareWeight = Callable[[Tensor], tuple[Any, ...]]  # weight -> the arguments of the product after x


class Implementation(NamedTuple):
    name: str
    prepare: PrepareWeight
    product: Product
    dtype: torch.dtype = torch.float32  # dtype of x


def keep_weight(weight: Tensor) -> tuple[Any, ...]:
    return (weight,)


def cast_to(dtype: torch.dtype) -> PrepareWeight:
    return lambda weight: (weight.to(dtype),)


def onednn_pack(weight: Tensor) -> tuple[Any, ...]:
    return (torch.ops.mkldnn._reorder_linear_weight(weight.clone(), 1),)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def torch_int8_pack(weight: Tensor) -> tuple[Any, ...]:
    numbers, scale = quantize_rows(weight)
    return numbers, scale.bfloat16()


def dynamic_pack(weight: Tensor) -> tuple[Any, ...]:
    """fbgemm or oneDNN: x is quantized per tensor, then int8 products."""
    numbers = torch.quantize_per_tensor(weight, float(weight.abs().max()) / 127, 0, torch.qint8)
    return (torch.ops.quantized.linear_prepack(numbers, None),)


def int_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x is quantized per row; torch._int_mm needs more than 16 rows, so the rows are repeated."""
    x_scale = x.abs().amax(-1, keepdim=True) / 127
    repeated = (x / x_scale).round().to(torch.int8).expand(max(17, x.shape[0]), -1).contiguous()
    return torch._int_mm(repeated, weight.T)[: x.shape[0]] * (x_scale * scale)


def torch_int4_pack(weight: Tensor) -> tuple[Any, ...]:
    numbers, scale, minimum = pack(weight, 4, 32)
    q = unpack(
        type(pack(weight[:1], 4, 32))(numbers, torch.ones_like(scale), torch.zeros_like(minimum)), weight.shape[1]
    )
    scales_and_zeros = torch.stack((scale, minimum + 8 * scale), -1).transpose(0, 1).contiguous().bfloat16()
    return torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32).contiguous(), 1), scales_and_zeros


def kleidi_pack(weight: Tensor) -> tuple[Any, ...]:
    scale = weight.unflatten(1, (-1, 32)).abs().amax(-1) / 7
    q = (weight.unflatten(1, (-1, 32)) / scale[..., None]).round().flatten(1).to(torch.int8) + 8
    nibbles = (q[:, 1::2] << 4 | q[:, ::2]).to(torch.uint8)
    rows, columns = weight.shape
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(nibbles, scale.flatten(), None, 32, columns, rows)
    return packed, 32, columns, rows


def pack_groups(bits: int, group: int) -> PrepareWeight:
    return lambda weight: tuple(part for part in pack(weight, bits, group) if part is not None)


def list_implementations() -> list[Implementation]:
    implementations = [
        Implementation("fp32  F.linear", keep_weight, F.linear),
        Implementation("fp32  torch.mv", keep_weight, lambda x, w: torch.mv(w, x[0])),
        Implementation("fp32  x @ transposed", lambda w: (w.T.contiguous(),), torch.matmul),
        Implementation(
            "fp32  oneDNN prepacked",
            onednn_pack,
            lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
        ),
        Implementation("bf16  F.linear", cast_to(torch.bfloat16), F.linear, torch.bfloat16),
        Implementation("fp16  F.linear", cast_to(torch.float16), F.linear, torch.float16),
        Implementation("int8  torch._weight_int8pack_mm", torch_int8_pack, torch._weight_int8pack_mm, torch.bfloat16),
        Implementation("int8  quantized.linear_dynamic", dynamic_pack, torch.ops.quantized.linear_dynamic),
        Implementation("int8  torch._int_mm, x in int8", quantize_rows, int_mm),
        Implementation(
            "int4  torch._weight_int4pack_mm_for_cpu",
            torch_int4_pack,
            lambda x, w, s: torch._weight_int4pack_mm_for_cpu(x, w, 32, s),
            torch.bfloat16,
        ),
        Implementation("int4  _dyn_quant_matmul_4bit", kleidi_pack, torch.ops.aten._dyn_quant_matmul_4bit),
    ]
    kernels = load_kernels()
    if not kernels.is_ready:
        print(f"the kernels of monoblock are not available: {kernels.reason}")
        return implementations
    ours = torch.ops.monoblock.linear
    return [
        *implementations,
        Implementation("fp32  our kernel", keep_weight, ours),
        Implementation("int8  our kernel, groups of 32", pack_groups(8, 32), ours),
        Implementation("int8  our kernel, groups of 64", pack_groups(8, 64), ours),
        Implementation("int8  our kernel, one group per row", lambda w: pack_groups(8, w.shape[1])(w), ours),
        *(Implementation(f"int4  our kernel, groups of {size}", pack_groups(4, size), ours) for size in (32, 64, 128)),
    ]


def list_compiled() -> list[Implementation]:
    """The plain formula for one row, compiled by inductor."""

    def scaled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (w.to(torch.float32) * x).sum(-1) * s

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (w.to(torch.float32) * x).sum(-1)

    return [
        Implementation("fp32  torch.compile", keep_weight, torch.compile(plain)),
        Implementation("bf16  torch.compile, cast to fp32", cast_to(torch.bfloat16), torch.compile(plain)),
        Implementation("int8  torch.compile, cast to fp32", quantize_rows, torch.compile(scaled)),
    ]


def weight_bytes(arguments: list[tuple[Any, ...]], shapes: list[tuple[int, int]]) -> int | None:
    tensors = [part for parts in arguments for part in parts if isinstance(part, Tensor)]
    if not tensors:  # opaque: assume one byte per weight
        return sum(rows * columns for rows, columns in shapes)
    try:
        return sum(tensor.nbytes for tensor in tensors)
    except RuntimeError:  # the layout of oneDNN hides its storage
        return sum(4 * rows * columns for rows, columns in shapes)


class PreparedProducts(NamedTuple):
    implementation: Implementation
    arguments: list[tuple[Any, ...]]
    inputs: list[Tensor]

    def time_token(self) -> float:
        start = time.perf_counter()
        for x, parts in zip(self.inputs, self.arguments, strict=True):
            self.implementation.product(x, *parts)
        return time.perf_counter() - start


def prepare(implementation: Implementation, weights: list[Tensor], rows: int) -> PreparedProducts | str:
    """Prepare the weights and check the first product; return the reason if the implementation cannot run."""
    try:
        arguments = [implementation.prepare(weight) for weight in weights]
        inputs = [torch.randn(rows, weight.shape[1]).to(implementation.dtype) for weight in weights]
        expected = inputs[0].float() @ weights[0].T
        actual = implementation.product(inputs[0], *arguments[0]).float().reshape(expected.shape)
        error = float((actual - expected).norm() / expected.norm())
        return PreparedProducts(implementation, arguments, inputs) if error < 0.15 else f"wrong: error {error:.2f}"
    except Exception as problem:
        return str(problem).split("\n")[0][:70]


@torch.no_grad()
def measure(
    implementations: list[Implementation], rows: int, rounds: int, shapes: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Return median and best milliseconds of each implementation; all run once in each round."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 0.02 for shape in shapes]
    prepared = {item.name: prepare(item, weights, rows) for item in implementations}
    seconds: dict[str, list[float]] = {name: [] for name, item in prepared.items() if not isinstance(item, str)}
    for round_number in range(rounds + 1):
        for name, times in seconds.items():
            products = prepared[name]
            assert isinstance(products, PreparedProducts)
            products.time_token()  # not counted: the caches still hold data of the previous implementation
            token_seconds = products.time_token()
            if round_number:
                times.append(token_seconds)
    table: list[dict[str, Any]] = []
    for name, products in prepared.items():
        if isinstance(products, str):
            table.append({"route": name, "problem": products})
            continue
        median, size = statistics.median(seconds[name]), weight_bytes(products.arguments, shapes)
        speed = {"ms": 1e3 * median, "best_ms": 1e3 * min(seconds[name]), "tokens_per_second": rows / median}
        table.append({"route": name, **speed, "gb_per_second": size / median / 1e9 if size else None})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="implementations whose name contains this")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    implementations = [*list_implementations(), *(list_compiled() if args.compiled else [])]
    selected = [item for item in implementations if args.only in item.name]
    table = measure(selected, args.rows, 1 if args.smoke else args.rounds, TOY if args.smoke else SHAPES)
    if args.json:
        print(json.dumps({"rows": args.rows, "threads": torch.get_num_threads(), "routes": table}))
        return
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"{platform.machine()} {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{args.rows} row(s)"
    )
    print(f"{'implementation':<42}{'ms/token':>9}{'best':>8}{'GB/s':>7}")
    for row in table:
        if "problem" in row:
            print(f"{row['route']:<42}  {row['problem']}")
        else:
            print(f"{row['route']:<42}{row['ms']:9.2f}{row['best_ms']:8.2f}{row['gb_per_second']:7.1f}")


if __name__ == "__main__":
    main()
