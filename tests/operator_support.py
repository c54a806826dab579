"""Helpers for tests of the CPU operators of decoding."""

from weakref import WeakKeyDictionary

from monoblock.decoding.backends import cpu_step, inference_copy, prepared_model


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
    """Use the CPU kernels for models of every size, and forget what was prepared without them."""
    monkeypatch.setattr(inference_copy, "MIN_NATIVE_WEIGHTS", 0)
    monkeypatch.setattr(prepared_model, "_PREPARED", WeakKeyDictionary())


def search_operators(model):
    """The operators of a beam search with this model, None if it has none."""
    prepared = prepared_model.prepare(model)
    return None if prepared is None else prepared.get_search_operators()
