"""Device, number format and compilation: chosen automatically, said in words, each settable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from monoblock.errors import ConfigError, did_you_mean
from monoblock.native.library import find_compiler
from monoblock.training.events import Chosen

COMPILE = ("auto", "yes", "no", "graphs")
GRAPHS = "reduce-overhead"  # torch's word for: kernels are recorded once and replayed, which spares the CPU
CPU_PRECISION = "exact on every CPU; some have 16-bit units, where train.precision=bf16 gains a little"
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Choice:
    device: torch.device
    autocast: torch.dtype | None
    compiled: bool
    deterministic: bool
    said: tuple[Chosen, ...]
    mode: str | None = None  # of torch.compile

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Run what is inside in the chosen number format."""
        if self.autocast is None:
            yield
            return
        with torch.autocast(self.device.type, self.autocast):
            yield

    def prepare(self) -> None:
        """Set what torch keeps globally; deterministic algorithms always on a CPU, on CUDA when asked."""
        torch.use_deterministic_algorithms(self.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
        if self.device.type == "cuda" and not self.deterministic:
            torch.set_float32_matmul_precision("high")


def choose(
    device: str = "auto",
    precision: str = "auto",
    compile: str = "auto",
    *,
    deterministic: bool = False,
    steps: int = 0,
    plain: str | None = None,
) -> Choice:
    """Decide, and say why; `plain` is why nothing can be compiled."""
    cuda = torch.cuda.is_available()
    place = torch.device(("cuda" if cuda else "cpu") if device == "auto" else device)
    said = [
        Chosen(f"device {place}", "asked for" if device != "auto" else "a GPU is here" if cuda else "no GPU is here")
    ]
    if precision not in ("auto", *PRECISIONS):
        raise ConfigError(
            f"precision={precision!r} is none of auto, {', '.join(PRECISIONS)}{did_you_mean(precision, PRECISIONS)}"
        )
    name, why = precision, "asked for"
    if precision == "auto":
        name, why = ("bf16", "the GPU computes in it") if place.type == "cuda" else ("fp32", CPU_PRECISION)
    said.append(Chosen(f"precision {name}", why))
    if compile not in COMPILE:
        raise ConfigError(f"compile={compile!r} is none of {', '.join(COMPILE)}")
    graphs = compile == "graphs" and place.type == "cuda"
    compiled, why = compile == "yes" or graphs, "asked for"
    if compile == "auto" or (compile == "graphs" and not graphs):
        compiled = place.type == "cuda" and steps >= 300
        why = "it pays on a GPU" if compiled else "it would take longer than it saves"
    if plain is not None:
        graphs, compiled, why = False, False, plain
    said.append(Chosen(f"compiled{' to graphs' if graphs else ''}" if compiled else "not compiled", why))
    if place.type == "cpu" and name == "fp32" and not compiled:
        said.append(_kernels())
    exact = deterministic or place.type == "cpu"
    said.append(
        Chosen(
            "deterministic" if exact else "not deterministic",
            "as on every CPU"
            if place.type == "cpu"
            else "asked for"
            if exact
            else "faster; train.deterministic=true changes it",
        )
    )
    return Choice(place, PRECISIONS[name], compiled, exact, tuple(said), GRAPHS if graphs else None)


def _kernels() -> Chosen:
    if find_compiler() is None:
        return Chosen("no kernels of our own", "no C++ compiler is here")
    return Chosen("kernels of our own where they pay", "a C++ compiler is here; it takes half a minute, once a machine")
