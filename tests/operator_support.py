"""Helpers for tests of the CPU operators of decoding."""

import monoblock as mb
from monoblock.inference import fast_modules, generate
from monoblock.inference.runners.cpu import CpuStack
from monoblock.inference.supported_models import reason_not_to_optimize


def record_operator_steps(monkeypatch):
    """Return a list of the number of tokens in each step of a decoder that the operator takes, also for toy models."""
    taken, step = [], CpuStack.step

    def record(self, x, lengths, counts, *args, **options):
        if options.get("causal", True):
            taken.append(int(counts.sum()))
        return step(self, x, lengths, counts, *args, **options)

    monkeypatch.setattr(CpuStack, "step", record)
    use_kernels_for_toys(monkeypatch)
    return taken


def use_kernels_for_toys(monkeypatch):
    """Use the CPU kernels for models of every size."""
    assert generate.MIN_NATIVE_WEIGHTS, "it is imported before, so that it keeps its own number"
    monkeypatch.setattr(fast_modules, "MIN_NATIVE_WEIGHTS", 0)


def optimize(model):
    """The optimized model, or the model itself if it cannot be optimized."""
    return model if reason_not_to_optimize(model) else mb.optimize(model)
