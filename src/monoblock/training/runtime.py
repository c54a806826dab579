"""Choose the device, precision, compilation and determinism of a run, and give a reason for each choice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from monoblock.errors import ConfigError, did_you_mean
from monoblock.kernels.cpu import library
from monoblock.kernels.cpu.library import find_compiler
from monoblock.kernels.fp8_linear import has_fp8
from monoblock.training.events import DecisionEvent

COMPILE_CHOICES = ("auto", "yes", "no", "graphs")
CUDA_GRAPHS_MODE = "reduce-overhead"  # the mode of torch.compile that records CUDA graphs
CPU_PRECISION_REASON = "exact on every CPU; on a CPU with 16-bit units, train.precision=bf16 is a little faster"
MIN_STEPS_TO_COMPILE = 300  # with fewer steps, compiling takes longer than it saves
REQUESTED = "as requested"
AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class RuntimeConfig:
    """The device, precision and compilation of a run; `decisions` are the events that explain these choices."""

    device: torch.device
    autocast_dtype: torch.dtype | None
    compiled: bool
    deterministic: bool
    decisions: tuple[DecisionEvent, ...]
    compile_mode: str | None = None  # the mode of torch.compile
    fp8: bool = False  # products of linear layers in 8 bits

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the `with` block under torch.autocast in the chosen precision, or without it for fp32."""
        if self.autocast_dtype is None:
            yield
            return
        with torch.autocast(self.device.type, self.autocast_dtype):
            yield

    def apply_torch_settings(self) -> None:
        """Set the global flags of torch for determinism and for the precision and library of matrix products."""
        torch.use_deterministic_algorithms(self.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow
        if self.device.type == "cpu":  # set on and off, since an earlier model in this process may have changed it
            library.enable_onednn(library.is_onednn_fast())
        if self.device.type == "cuda" and not self.deterministic:
            torch.set_float32_matmul_precision("high")


def choose_runtime(
    device: str = "auto",
    precision: str = "auto",
    compile: str = "auto",
    *,
    deterministic: bool = False,
    steps: int = 0,
    no_compile_reason: str | None = None,
) -> RuntimeConfig:
    """Choose the device, precision and compilation of a run; "auto" depends on this machine and the number of steps.

    If `no_compile_reason` is given, the model is not compiled, for this reason.
    """
    has_gpu = torch.cuda.is_available()
    chosen_device = torch.device(("cuda" if has_gpu else "cpu") if device == "auto" else device)
    reason = REQUESTED if device != "auto" else "a GPU is available" if has_gpu else "no GPU is available"
    chosen_precision, precision_decision = _choose_precision(precision, chosen_device)
    compiled, compile_mode, compile_decision = _choose_compilation(
        compile, chosen_device.type, steps, no_compile_reason
    )
    decisions = [DecisionEvent(f"device {chosen_device}", reason), precision_decision, compile_decision]
    if chosen_device.type == "cpu" and chosen_precision == "fp32" and not compiled:
        if find_compiler() is None:
            decisions.append(DecisionEvent("no C++ kernels", "no C++ compiler is available"))
        else:
            built = "built with this machine's C++ compiler at the first use"
            decisions.append(DecisionEvent("C++ kernels where they are faster", built))
    if chosen_device.type == "cpu":
        decisions.append(DecisionEvent("deterministic", "always on a CPU"))
    elif deterministic:
        decisions.append(DecisionEvent("deterministic", REQUESTED))
    else:
        decisions.append(DecisionEvent("not deterministic", "faster; train.deterministic=true changes it"))
    return RuntimeConfig(
        device=chosen_device,
        autocast_dtype=AUTOCAST_DTYPES[chosen_precision],
        compiled=compiled,
        deterministic=deterministic or chosen_device.type == "cpu",
        decisions=tuple(decisions),
        compile_mode=compile_mode,
        fp8=chosen_precision == "fp8",
    )


def check_device(device: str, option: str = "train.device=", choices: str = "auto, cpu or cuda") -> None:
    """Raise ConfigError unless "auto", or the name of a device that this machine has, is given with an option."""
    try:
        chosen = torch.device("cpu" if device == "auto" else device)
    except RuntimeError:
        raise ConfigError(f"{option}{device} is not a device; write {choices}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"{option}{device} is not supported; write {choices}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{option}{device} is not available: torch finds no GPU; write {option}cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{option}{device} is not available: this machine has {torch.cuda.device_count()} GPUs")


def _choose_precision(precision: str, device: torch.device) -> tuple[str, DecisionEvent]:
    if precision not in ("auto", *AUTOCAST_DTYPES):
        raise ConfigError(
            f"precision={precision!r} is not one of auto, {', '.join(AUTOCAST_DTYPES)}"
            f"{did_you_mean(precision, AUTOCAST_DTYPES)}"
        )
    if precision == "fp8" and not has_fp8(device):
        raise ConfigError(
            f"train.precision=fp8 needs a GPU with 8-bit tensor cores (Ada or newer), not {device}; "
            "write train.precision=bf16"
        )
    reason = REQUESTED
    if precision == "auto":
        precision, reason = ("bf16", "fast on a GPU") if device.type == "cuda" else ("fp32", CPU_PRECISION_REASON)
    return precision, DecisionEvent(f"precision {precision}", reason)


def _choose_compilation(
    compile: str, device_type: str, steps: int, no_compile_reason: str | None
) -> tuple[bool, str | None, DecisionEvent]:
    """Return whether to compile, the mode of torch.compile, and the event that explains it.

    On a CPU, "graphs" means "auto".
    """
    if compile not in COMPILE_CHOICES:
        raise ConfigError(f"compile={compile!r} is not one of {', '.join(COMPILE_CHOICES)}")
    if no_compile_reason is not None:
        return False, None, DecisionEvent("not compiled", no_compile_reason)
    if compile == "graphs" and device_type == "cuda":
        return True, CUDA_GRAPHS_MODE, DecisionEvent("compiled to graphs", REQUESTED)
    if compile in ("yes", "no"):
        return compile == "yes", None, DecisionEvent("compiled" if compile == "yes" else "not compiled", REQUESTED)
    if device_type == "cuda" and steps >= MIN_STEPS_TO_COMPILE:
        return True, None, DecisionEvent("compiled", "it saves time on a GPU")
    return False, None, DecisionEvent("not compiled", "compiling would take longer than it saves")
