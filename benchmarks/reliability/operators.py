"""Call the C++ operators with random wrong arguments, in child processes; none may crash or hang.

A correct call of tests/operator_cases.py is changed in one to three arguments: sizes (also zero), strides, dtypes,
devices, short scales and values, numbers out of range, and tensors that share memory with another argument. A call must
raise a Python error or, if it is correct after all, return.

    python benchmarks/reliability/operators.py --calls 2000
    python benchmarks/reliability/operators.py --calls 2000 --sanitize address
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _sanitizer import TESTS, build_kernels, make_environment, use_environment
from torch import Tensor

CALLS_PER_PROCESS = 250
TIMEOUT = 900  # seconds for the calls of one process, so that a call that hangs is found
ERRORS = (RuntimeError, TypeError, ValueError, MemoryError)  # NotImplementedError is a RuntimeError
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
INTEGERS = (0, 1, -1, 2, 7, 63, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, -(2**31), -(2**62))
FLOATS = (0.0, -1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
WORDS = ("", "x", "layer", "pre", "gelu", "true", "rms", "parallel")


# -- changes of one value: each takes the value, a generator and all tensors of the call ------------------------------


def change_size(t: Tensor, rng: random.Random, others: list[Tensor]) -> Tensor:
    if not t.dim():
        return t.expand(rng.randint(0, 3))
    axis = rng.randrange(t.dim())
    size = rng.choice((0, 1, t.shape[axis] - 1, t.shape[axis] + 1, 2 * t.shape[axis], 8 * t.shape[axis] + 3))
    if not t.shape[axis]:
        return t
    index = torch.arange(max(size, 0)) % t.shape[axis]
    return t.index_select(axis, index)


def change_rank(t: Tensor, rng: random.Random, others: list[Tensor]) -> Tensor:
    return rng.choice((lambda: t[None], lambda: t[..., None], t.flatten, lambda: t.flatten()[:1].squeeze()))()


def change_strides(t: Tensor, rng: random.Random, others: list[Tensor]) -> Tensor:
    if not t.dim() or not t.numel():
        return t
    axis = rng.randrange(t.dim())
    return rng.choice(
        (
            lambda: t.transpose(axis, -1),
            lambda: torch.stack((t, t), -1)[..., 0],
            lambda: torch.cat((t, t), axis).narrow(axis, 1, t.shape[axis]),
            lambda: t.narrow(axis, 0, 1).expand(t.shape),
            lambda: t.narrow(axis, 0, 1).expand([2**45 if n == axis else s for n, s in enumerate(t.shape)]),
            lambda: t.as_strided(t.shape, [0] * t.dim()),
            lambda: t.flip(axis).as_strided(t.shape, [1] * t.dim()),
        )
    )()


def change_memory(t: Tensor, rng: random.Random, others: list[Tensor]) -> Tensor:
    kind = rng.randrange(4)
    if kind == 0:
        return t.to("meta")
    if kind == 1:
        return t.to_sparse() if t.dim() else t
    wrong = t.clone()
    wrong.untyped_storage().resize_(0 if kind == 2 else wrong.untyped_storage().nbytes() // 2)
    return wrong


def share_memory(t: Tensor, rng: random.Random, others: list[Tensor]) -> Tensor:
    """Return a tensor of the same shape, if possible, in the memory of another argument."""
    other = rng.choice(others)
    if other.dtype != t.dtype or other.device != t.device or other.layout != torch.strided:
        return other
    size = other.untyped_storage().nbytes() // max(1, other.element_size())
    if t.numel() > size:
        return other
    strides = torch.empty(t.shape, device="meta").stride()
    return other.as_strided(t.shape, strides, rng.randint(0, size - t.numel()))


def change_values(t: Tensor, rng: random.Random, others: list[Tensor]) -> Tensor:
    if not t.numel() or t.dtype == torch.bool:
        return ~t if t.dtype == torch.bool else t
    wrong = t.clone(memory_format=torch.contiguous_format)
    number = rng.choice(FLOATS) if t.is_floating_point() else rng.choice(INTEGERS)
    if not t.is_floating_point():
        number = max(torch.iinfo(t.dtype).min, min(number, torch.iinfo(t.dtype).max))
    wrong.view(-1)[rng.randrange(t.numel())] = number
    return wrong


def change_dtype(t: Tensor, rng: random.Random, others: list[Tensor]) -> Tensor:
    return t.to(rng.choice(DTYPES))


TENSOR_CHANGES: tuple[Callable[[Tensor, random.Random, list[Tensor]], Tensor], ...] = (
    change_size,
    change_size,
    change_rank,
    change_strides,
    change_memory,
    share_memory,
    change_values,
    change_dtype,
)


def change(value: Any, rng: random.Random, others: list[Tensor]) -> Any:
    """Return a wrong value in place of an argument, an element of a list or a field of a dict."""
    if rng.random() < 0.03:
        return rng.choice((None, 3, 0.5, "x", [], {}, torch.zeros(3)))
    if isinstance(value, Tensor):
        return rng.choice(TENSOR_CHANGES)(value, rng, others)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*INTEGERS, value + 1, value - 1))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(WORDS)
    if isinstance(value, list):
        return change_list(value, rng, others)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: other for name, other in value.items() if name != key}
        return value | {key: change(value[key], rng, others)}
    return rng.choice((None, 3, torch.zeros(3)))


def change_list(values: list[Any], rng: random.Random, others: list[Tensor]) -> list[Any]:
    if not values or rng.random() < 0.2:
        return rng.choice(([], values[:-1], [*values, *values[-1:]], values[::-1]))
    index = rng.randrange(len(values))
    return [*values[:index], change(values[index], rng, others), *values[index + 1 :]]


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


# -- calls ------------------------------------------------------------------------------------------------------------


def run_calls(seed: int, first: int, last: int) -> None:
    """Run calls in this process: print the number and the operator of each before it, and its outcome after it."""
    use_environment()
    from operator_cases import CASES

    torch.set_num_threads(2)
    names = [name for name, (_, make) in CASES.items() if make()]
    for number in range(first, last):
        rng = random.Random(f"{seed} {number}")
        name = rng.choice(names)
        call, make = CASES[name]
        arguments = make()
        others = tensors_in(arguments) or [torch.zeros(3)]
        # Each is changed once: torch itself crashes if it is to change a tensor whose memory is gone.
        for argument in rng.sample(list(arguments), min(len(arguments), rng.choice((1, 1, 1, 2, 3)))):
            arguments[argument] = change(arguments[argument], rng, others)
        print(json.dumps([number, name, "crash"]), flush=True)
        try:
            call(**arguments)
            outcome = "accepted"
        except ERRORS:
            outcome = "refused"
        print(json.dumps([number, name, outcome]), flush=True)


def run_in_children(calls: int, seed: int, environment: dict[str, str]) -> tuple[Counter[str], list[str]]:
    """Return the number of calls by outcome, and a description of each crash; the next child goes on behind it."""
    outcomes: Counter[str] = Counter()
    crashes: list[str] = []
    first = 0
    while first < calls:
        last = min(calls, first + CALLS_PER_PROCESS)
        command = [sys.executable, __file__, "--child", str(seed), str(first), str(last)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
            code, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as problem:
            code, output, errors = "a hang", (problem.stdout or b"").decode(), ""
        lines = [json.loads(line) for line in output.splitlines()]
        outcomes.update(outcome for _, _, outcome in lines if outcome != "crash")
        if code == 0:
            first = last
            continue
        if not lines:
            raise SystemExit(f"a child process did not start: {errors[-2000:]}")
        number, name, outcome = lines[-1]
        report = next((line for line in errors.splitlines() if "ERROR: AddressSanitizer" in line), errors[-300:])
        crashes.append(f"call {number} of {name} ({'during' if outcome == 'crash' else 'after'} it): {code}: {report}")
        outcomes["crashed"] += 1
        first = number + 1
    return outcomes, crashes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--smoke", action="store_true", help="make 50 calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", choices=["address"], help="build the kernels with this sanitizer")
    parser.add_argument("--kernels", type=Path, help="kernels built with the sanitizer before")
    parser.add_argument("--child", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_calls(*options.child)
    calls = 50 if options.smoke else options.calls
    with tempfile.TemporaryDirectory() as folder:
        kernels = options.kernels
        if options.sanitize and kernels is None:
            kernels = build_kernels(options.sanitize, Path(folder))
        outcomes, crashes = run_in_children(calls, options.seed, make_environment(options.sanitize, kernels))
    for crash in crashes:
        print(crash)
    print(json.dumps({"calls": calls, **{name: outcomes[name] for name in ("refused", "accepted", "crashed")}}))
    sys.exit(1 if crashes else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
