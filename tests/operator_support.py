"""Helpers for tests of the CPU operators of decoding."""

import monoblock as mb
from monoblock.inference import fast_modules
from monoblock.inference.backends import cpu_step
from monoblock.inference.supported_models import reason_not_to_optimize


def record_operator_steps(monkeypatch):
    """Return a list that records for each step whether the operator took it; it is used for toy models too."""
    taken, run = [], cpu_step.FusedStack.__call__

    def record(self, *args):
        out = run(self, *args)
        taken.append(out is not None)
        return out

    monkeypatch.setattr(cpu_step.FusedStack, "__call__", record)
    use_kernels_for_toys(monkeypatch)
    return taken


def use_kernels_for_toys(monkeypatch):
    """Use the CPU kernels for models of every size."""
    monkeypatch.setattr(fast_modules, "MIN_NATIVE_WEIGHTS", 0)


def optimize(model):
    """The optimized model, or the model itself if it cannot be optimized."""
    return model if reason_not_to_optimize(model) else mb.optimize(model)


def search_operators(model):
    """The operators of a beam search with this model, None if it has none."""
    return None if reason_not_to_optimize(model) else mb.optimize(model).search_operators()
