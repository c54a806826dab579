"""Call every C++ operator and method with correct arguments, then with each argument wrong in many ways.

Run as a script: it prints a line before each call and one with its outcome after it, so that a crash shows its cause.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from monoblock.kernels.cpu.library import load_kernels
from monoblock.quantization.packing import pack

Arguments = dict[str, Any]
HUGE = 2**62
B, T, H, G, K, V, D, F, VOCABULARY = 4, 2, 4, 2, 6, 5, 24, 32, 37


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@functools.cache  # no operator changes it, and quantizing it again takes longer than most calls
def packed(rows: int, columns: int, bits: int) -> tuple[Tensor | None, ...]:
    return tuple(pack(draw(rows, columns), bits, 32))


# -- correct calls ----------------------------------------------------------------------------------------------------


def linear(bits: int, columns: int = 96) -> Arguments:
    inputs = columns - 13 if bits < 32 else columns
    x, bias = draw(3, inputs), draw(23)
    if bits == 32:
        return {"x": x, "weight": draw(23, inputs), "bias": bias}
    parts = zip(("weight", "scale", "least"), packed(23, inputs, bits), strict=True)
    return {"x": x} | {name: t for name, t in parts if t is not None} | {"bias": bias, "activation_bits": 8}


def norm_fields(name: str, size: int = D) -> Arguments:
    weights = {f"{name}.weight": draw(size), f"{name}.bias": draw(size)}
    return {f"{name}.kind": "layer", f"{name}.unit_offset": False, f"{name}.eps": 1e-5} | weights


def matrix_fields(name: str, rows: int, columns: int, bits: int = 32) -> Arguments:
    parts = (draw(rows, columns),) if bits == 32 else packed(rows, columns, bits)
    stored = dict(zip(("weight", "scale", "least"), parts, strict=False))
    fields = {f"{name}.{part}": t for part, t in stored.items() if t is not None} | {f"{name}.bias": draw(rows)}
    return fields | ({} if bits == 32 else {f"{name}.activation_bits": 16})


@functools.cache  # nobody changes it
def block_fields(bits: int = 32) -> Arguments:
    fields = {
        "norm_place": "pre",
        "residual": "sequential",
        "residual_scale": 1.0,
        "activation": "gelu",
        "feedforward.clamp": 0.0,
        "attention.heads": H,
        "attention.kv_heads": G,
        "attention.window": 0,
        "attention.scale": 0.3,
        "attention.softcap": 0.0,
        "attention.clip": 0.0,
        "attention.rotary_table": 0,
        "attention.rotary_interleaved": False,
        "attention.bias_table": 0,
    }
    fields |= {"attention.qk_norm": "head", "attention.sinks": draw(H), "attention_gain": draw(D)}
    fields |= norm_fields("attention.query_norm", K) | norm_fields("attention.key_norm", K)
    sizes = {"query": (H * K, D), "key": (G * K, D), "value": (G * V, D), "output": (D, H * V)}
    for name, (rows, columns) in sizes.items():
        fields |= matrix_fields(f"attention.{name}", rows, columns, bits)
    for name, (rows, columns) in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
        fields |= matrix_fields(f"feedforward.{name}", rows, columns, bits)
    fields |= norm_fields("attention_norm") | norm_fields("feedforward_norm")
    fields |= {"cross.heads": H, "cross.kv_heads": G, "cross.scale": 0.2} | norm_fields("cross_norm")
    fields |= matrix_fields("cross.query", H * K, D, bits) | matrix_fields("cross.output", D, H * V, bits)
    return fields


def stack(bits: int = 32) -> Arguments:
    return {"width": D, "blocks": [block_fields(bits)] * 2, "norm": norm_fields("norm")}


@functools.cache
def native_stack(bits: int = 32) -> Any:
    return torch.classes.monoblock.NativeStack(**stack(bits))


def paged_pass() -> Arguments:
    pools = {
        "keys": (9, G, 16, K),
        "values": (9, G, 16, V),
        "source_keys": (5, G, 16, K),
        "source_values": (5, G, 16, V),
    }
    return {
        "x": draw(B, T, D),
        "lengths": torch.tensor([3, 0, 15, 20]),
        "counts": torch.tensor([2, 1, 2, 0]),
        "tables": torch.tensor([[1, 0], [2, 0], [3, 4], [5, 6]], dtype=torch.int32),
        **{name: [draw(*shape) for _ in range(2)] for name, shape in pools.items()},
        "source_tables": torch.tensor([[1], [1], [2], [2]], dtype=torch.int32),
        "source_lengths": torch.tensor([7, 7, 16, 16]),
        "positions": torch.arange(T).repeat(B, 1),
        "rotary_cos": [draw(32, K // 2)],
        "rotary_sin": [draw(32, K // 2)],
        "position_biases": [draw(H, 32)],
        "exact": False,
        "causal": True,
    }


def heads() -> Arguments:
    return {"q": draw(3, H, 13, K), "k": draw(3, G, 13, K), "v": draw(3, G, 13, V), "scale": 0.3}


def causal_backward() -> Arguments:
    given = heads()
    out, log_sums = torch.ops.monoblock.attend_causal(**given)
    scale = given.pop("scale")
    return {"grad": draw(*out.shape)} | given | {"out": out, "log_sums": log_sums, "scale": scale}


def operator(name: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(torch.ops.monoblock, name)(**arguments)


def built(name: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(torch.classes.monoblock, name)(**arguments)


# Each: what is called, and a function that makes correct arguments.
CASES: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "linear": (operator("linear"), lambda: linear(32)),
    "linear int8": (operator("linear"), lambda: linear(8)),
    "linear int4": (operator("linear"), lambda: linear(4)),
    "linear exact": (operator("linear"), lambda: linear(32) | {"exact": True}),
    "linear exact int8": (operator("linear"), lambda: linear(8) | {"exact": True}),
    "linear exact int4": (operator("linear"), lambda: linear(4) | {"exact": True}),
    "quantize_int8": (operator("quantize_int8"), lambda: {"weight": draw(7, 32)}),
    "can_use_tiles": (operator("can_use_tiles"), dict),
    "can_multiply_many_rows": (operator("can_multiply_many_rows"), lambda: {"group": 64}),
    "linear_tiles": (operator("linear_tiles"), lambda: linear(32)),
    "linear_tiles_grad_input": (
        operator("linear_tiles_grad_input"),
        lambda: {"grad": draw(3, 23), "weight": draw(23, 96)},
    ),
    "gelu_tanh": (operator("gelu_tanh"), lambda: {"x": draw(7, 33)}),
    "gelu_tanh_backward": (operator("gelu_tanh_backward"), lambda: {"grad": draw(7, 33), "x": draw(7, 33)}),
    "attend_causal": (operator("attend_causal"), heads),
    "attend_causal_backward": (operator("attend_causal_backward"), causal_backward),
    "topk_continuations": (
        operator("topk_continuations"),
        lambda: {
            "logits": draw(6, VOCABULARY),
            "scores": draw(6),
            "suppressed": torch.tensor([3, 5]),
            "rows_per_prompt": 3,
            "count": 4,
        },
    ),
    "NativeStack": (built("NativeStack"), stack),
    "NativeStack int4": (built("NativeStack"), lambda: stack(4)),
    "NativeStack.run": (lambda **arguments: native_stack().run(**arguments), paged_pass),
    "NativeStack.run int4": (lambda **arguments: native_stack(bits=4).run(**arguments), paged_pass),
    "copy_pages": (
        operator("copy_pages"),
        lambda: {
            "pools": [draw(5, G, 16, size) for size in (K, V)],
            "sources": torch.tensor([1, 2]),
            "targets": torch.tensor([3, 4]),
            "used": torch.tensor([16, 3]),
        },
    ),
}


# -- wrong arguments --------------------------------------------------------------------------------------------------


def resized_to_nothing(t: Tensor) -> Tensor:
    wrong = t.clone()
    wrong.untyped_storage().resize_(0)
    return wrong


class WrapperSubclass(Tensor):
    """A tensor without memory, whose operators are in Python."""

    @staticmethod
    def __new__(cls, t: Tensor) -> "WrapperSubclass":
        return Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device=t.device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a WrapperSubclass")


def with_null_pointer(t: Tensor) -> Tensor:
    """A tensor whose storage has a size, but a null pointer."""
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), t.nbytes)
    return torch.empty(0, dtype=t.dtype).set_(storage, 0, t.shape, t.stride())


def tensors_without_memory(t: Tensor) -> Iterator[tuple[str, Any]]:
    """Tensors that call themselves dense and on the CPU, though their elements are elsewhere or nowhere."""
    yield "a FakeTensor", FakeTensorMode().from_tensor(t)
    yield "a subclass with __torch_dispatch__", WrapperSubclass(t)
    yield "a batched tensor of torch.func", torch._C._functorch._add_batch_dim(t[None], 0, 1)
    yield "a functional tensor", torch._to_functional_tensor(t)
    yield "a zero tensor", torch._efficientzerotensor(t.shape, dtype=t.dtype)
    if t.dtype == torch.float32:
        yield "a negated view", torch.complex(t, -t).conj().imag
    yield "a null pointer", with_null_pointer(t)


def wrong_tensors(t: Tensor) -> Iterator[tuple[str, Any]]:
    """Another rank, one element too few or too many in each dimension, strides, dtypes, devices."""
    yield "None", None
    yield "a list", t.tolist()
    yield "one more dimension", t[None].clone()
    yield "no dimension", t.flatten()[0].clone()
    yield "empty", t.new_empty(0)
    yield "gaps", torch.stack((t, t), -1)[..., 0]
    if t.dim() > 1:
        yield "flat", t.flatten()
        yield "transposed", t.transpose(0, -1)
    for axis in range(t.dim()):
        yield f"one too few in dimension {axis}", t.narrow(axis, 0, t.shape[axis] - 1).clone()
        yield f"one too many in dimension {axis}", torch.cat((t, t.narrow(axis, 0, 1)), axis)
        yield f"nothing in dimension {axis}", t.narrow(axis, 0, 0).clone()
    for dtype in (torch.double, torch.half, torch.int32, torch.int64, torch.bool):
        if dtype != t.dtype:
            yield str(dtype), t.to(dtype)
    yield "another device", t.to("meta")
    yield "sparse", t.to_sparse()
    yield "no storage", resized_to_nothing(t)
    yield from tensors_without_memory(t)
    if t.dtype == torch.int64:
        yield "negative", t - 100
        yield "too large", t + 10**6
        yield "far too large", t + HUGE


def wrong_values(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield from wrong_tensors(value)
    elif isinstance(value, bool):
        yield from (("None", None), ("a word", "yes"))
    elif isinstance(value, int):
        yield from (("None", None), ("a fraction", 0.5), ("negative", -7), ("zero", 0), ("one more", value + 1))
        yield from (("huge", HUGE), ("huge and negative", -HUGE), ("a word", "many"))
    elif isinstance(value, float):
        yield from (("None", None), ("a word", "half"), ("a tensor", torch.zeros(3)))
    elif isinstance(value, str):
        yield from (("None", None), ("another word", "unheard-of"), ("a number", 3))
    elif isinstance(value, list):
        yield from wrong_lists(value)
    elif isinstance(value, dict):
        yield from wrong_fields(value)
    else:  # an object of a class of ours
        yield from (("None", None), ("a number", 3), ("a tensor", torch.zeros(3)))


def wrong_lists(values: list[Any]) -> Iterator[tuple[str, Any]]:
    yield "None", None
    yield "empty", []
    yield "one too few", values[:-1]
    yield "one too many", [*values, values[-1]]
    for name, wrong in wrong_values(values[-1]):
        yield f"last: {name}", [*values[:-1], wrong]


def wrong_fields(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "None", None
    yield "empty", {}
    yield "an unknown field", fields | {"attention.quary.weight": torch.zeros(3)}
    yield "an unknown field of None", fields | {"attention.quary.weight": None}
    for field, value in fields.items():
        yield f"without {field}", {name: other for name, other in fields.items() if name != field}
        for name, wrong in wrong_values(value):
            yield f"{field}: {name}", fields | {field: wrong}


def run_case(name: str) -> None:
    call, make = CASES[name]
    print(json.dumps([name, "", "", describe(lambda: call(**make()))]), flush=True)
    print(json.dumps([name, "unknown", "", describe(lambda: call(**make(), unknown=1))]), flush=True)
    for argument in make():
        correct = make()
        for variant, wrong in wrong_values(correct[argument]):
            print(json.dumps([name, argument, variant, "a crash"]), flush=True)
            outcome = describe(lambda wrong=wrong, argument=argument: call(**(make() | {argument: wrong})))
            print(json.dumps([name, argument, variant, outcome]), flush=True)


def describe(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    assert load_kernels().is_ready
    torch.set_num_threads(2)
    for case in sys.argv[1:] or CASES:
        run_case(case)
