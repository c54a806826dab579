"""All matrix-vector products of one GPT-2 124M token, by every route this machine offers.

Decoding one token reads every weight once, so these products set the pace.  Each route is given the whole set (query,
key and value joined, output, up and down of 12 blocks, and the logits), one after another, so that nothing stays in a
small cache; routes take turns, so that none has the quieter machine.  The table gives the median and the best time for
a token and the bytes of weights (with scales) read a second at the median.  A route that cannot run here says why.
--rows N multiplies N rows at once, --smoke a toy size once, --compiled adds the routes by torch.compile.
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

from monoblock.native.library import load
from monoblock.quantize.packing import pack, unpack

BLOCK = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
SHAPES = [*BLOCK * 12, (50257, 768)]
TOY = [(96, 64), (64, 96)]

Product = Callable[..., Tensor]
Prepare = Callable[[Tensor], tuple[Any, ...]]  # a weight to what the product is given after x


class Route(NamedTuple):
    name: str
    prepare: Prepare
    product: Product
    dtype: torch.dtype = torch.float32  # of x


def same(weight: Tensor) -> tuple[Any, ...]:
    return (weight,)


def as_dtype(dtype: torch.dtype) -> Prepare:
    return lambda weight: (weight.to(dtype),)


def prepacked(weight: Tensor) -> tuple[Any, ...]:
    return (torch.ops.mkldnn._reorder_linear_weight(weight.clone(), 1),)


def row_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def int8pack(weight: Tensor) -> tuple[Any, ...]:
    numbers, scale = row_int8(weight)
    return numbers, scale.bfloat16()


def dynamic(weight: Tensor) -> tuple[Any, ...]:
    """fbgemm or onednn: x quantised to 8 bits a tensor, then int8 products."""
    numbers = torch.quantize_per_tensor(weight, float(weight.abs().max()) / 127, 0, torch.qint8)
    return (torch.ops.quantized.linear_prepack(numbers, None),)


def int_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x quantised to 8 bits a row; torch._int_mm wants more than 16 rows, so it is given copies."""
    size = x.abs().amax(-1, keepdim=True) / 127
    small = (x / size).round().to(torch.int8).expand(max(17, x.shape[0]), -1).contiguous()
    return torch._int_mm(small, weight.T)[: x.shape[0]] * (size * scale)


def int4pack(weight: Tensor) -> tuple[Any, ...]:
    numbers, scale, least = pack(weight, 4, 32)
    q = unpack(type(pack(weight[:1], 4, 32))(numbers, torch.ones_like(scale), torch.zeros_like(least)), weight.shape[1])
    both = torch.stack((scale, least + 8 * scale), -1).transpose(0, 1).contiguous().bfloat16()
    return torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32).contiguous(), 1), both


def kleidi(weight: Tensor) -> tuple[Any, ...]:
    scale = weight.unflatten(1, (-1, 32)).abs().amax(-1) / 7
    q = (weight.unflatten(1, (-1, 32)) / scale[..., None]).round().flatten(1).to(torch.int8) + 8
    small = (q[:, 1::2] << 4 | q[:, ::2]).to(torch.uint8)
    rows, columns = weight.shape
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(small, scale.flatten(), None, 32, columns, rows)
    return packed, 32, columns, rows


def packed(bits: int, group: int) -> Prepare:
    return lambda weight: tuple(part for part in pack(weight, bits, group) if part is not None)


def ours(kind: str) -> Product:
    return lambda x, *parts: getattr(torch.ops.monoblock, kind)(x, *parts, None)


def routes() -> list[Route]:
    found = [
        Route("fp32  F.linear", same, F.linear),
        Route("fp32  torch.mv", same, lambda x, w: torch.mv(w, x[0])),
        Route("fp32  x @ transposed", lambda w: (w.T.contiguous(),), torch.matmul),
        Route(
            "fp32  oneDNN prepacked",
            prepacked,
            lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
        ),
        Route("bf16  F.linear", as_dtype(torch.bfloat16), F.linear, torch.bfloat16),
        Route("fp16  F.linear", as_dtype(torch.float16), F.linear, torch.float16),
        Route("int8  torch._weight_int8pack_mm", int8pack, torch._weight_int8pack_mm, torch.bfloat16),
        Route("int8  quantized.linear_dynamic", dynamic, torch.ops.quantized.linear_dynamic),
        Route("int8  torch._int_mm, x in int8", row_int8, int_mm),
        Route(
            "int4  torch._weight_int4pack_mm_for_cpu",
            int4pack,
            lambda x, w, s: torch._weight_int4pack_mm_for_cpu(x, w, 32, s),
            torch.bfloat16,
        ),
        Route("int4  _dyn_quant_matmul_4bit", kleidi, torch.ops.aten._dyn_quant_matmul_4bit),
    ]
    kernels = load()
    if not kernels.ready:
        print(f"our kernels are left out: {kernels.reason}")
        return found
    return [
        *found,
        Route("fp32  our kernel", same, ours("dense")),
        Route("bf16  our kernel, fp32 x", as_dtype(torch.bfloat16), ours("dense")),
        Route("int8  our kernel, groups of 32", packed(8, 32), ours("int8")),
        Route("int8  our kernel, groups of 64", packed(8, 64), ours("int8")),
        Route("int8  our kernel, a group a row", lambda w: packed(8, w.shape[1])(w), ours("int8")),
        Route("int4  our kernel, groups of 32", packed(4, 32), ours("int4")),
    ]


def compiled() -> list[Route]:
    """What inductor makes of the plain formula for one row."""

    def fused(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (w.to(torch.float32) * x).sum(-1) * s

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (w.to(torch.float32) * x).sum(-1)

    return [
        Route("fp32  torch.compile", same, torch.compile(plain)),
        Route("bf16  torch.compile, widened", as_dtype(torch.bfloat16), torch.compile(plain)),
        Route("int8  torch.compile, widened", row_int8, torch.compile(fused)),
    ]


def weights_bytes(given: list[tuple[Any, ...]], shapes: list[tuple[int, int]]) -> int | None:
    tensors = [part for parts in given for part in parts if isinstance(part, Tensor)]
    if not tensors:  # opaque: one byte a weight
        return sum(rows * columns for rows, columns in shapes)
    try:
        return sum(tensor.nbytes for tensor in tensors)
    except RuntimeError:  # oneDNN's own layout hides its storage
        return sum(4 * rows * columns for rows, columns in shapes)


class Ready(NamedTuple):
    route: Route
    given: list[tuple[Any, ...]]
    inputs: list[Tensor]

    def token(self) -> float:
        begun = time.perf_counter()
        for x, parts in zip(self.inputs, self.given, strict=True):
            self.route.product(x, *parts)
        return time.perf_counter() - begun


def ready(route: Route, weights: list[Tensor], rows: int) -> Ready | str:
    """The route with its weights laid out, or why it cannot run; its first product is compared with the plain one."""
    try:
        given = [route.prepare(weight) for weight in weights]
        inputs = [torch.randn(rows, weight.shape[1]).to(route.dtype) for weight in weights]
        expected = inputs[0].float() @ weights[0].T
        found = route.product(inputs[0], *given[0]).float().reshape(expected.shape)
        error = float((found - expected).norm() / expected.norm())
        return Ready(route, given, inputs) if error < 0.15 else f"wrong here: error {error:.2f}"
    except Exception as problem:
        return str(problem).split("\n")[0][:70]


@torch.no_grad()
def measure(chosen: list[Route], rows: int, rounds: int, shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Median and best milliseconds of each route; all routes run once in each round."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 0.02 for shape in shapes]
    laid = {route.name: ready(route, weights, rows) for route in chosen}
    seconds: dict[str, list[float]] = {name: [] for name, one in laid.items() if isinstance(one, Ready)}
    for turn in range(rounds + 1):
        for name, times in seconds.items():
            one = laid[name]
            assert isinstance(one, Ready)
            one.token()  # once unmeasured, for what the route before has left in the caches
            taken = one.token()
            if turn:
                times.append(taken)
    table: list[dict[str, Any]] = []
    for name, one in laid.items():
        if isinstance(one, str):
            table.append({"route": name, "problem": one})
            continue
        median, size = statistics.median(seconds[name]), weights_bytes(one.given, shapes)
        speed = {"ms": 1e3 * median, "best_ms": 1e3 * min(seconds[name]), "tokens_per_second": rows / median}
        table.append({"route": name, **speed, "gb_per_second": size / median / 1e9 if size else None})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="routes whose name holds this")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [route for route in [*routes(), *(compiled() if given.compiled else [])] if given.only in route.name]
    found = measure(chosen, given.rows, 1 if given.smoke else given.rounds, TOY if given.smoke else SHAPES)
    if given.json:
        print(json.dumps({"rows": given.rows, "threads": torch.get_num_threads(), "routes": found}))
        return
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"{platform.machine()} {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{given.rows} row(s)"
    )
    print(f"{'route':<42}{'ms/token':>9}{'best':>8}{'GB/s':>7}")
    for row in found:
        if "problem" in row:
            print(f"{row['route']:<42}  {row['problem']}")
        else:
            print(f"{row['route']:<42}{row['ms']:9.2f}{row['best_ms']:8.2f}{row['gb_per_second']:7.1f}")


if __name__ == "__main__":
    main()
