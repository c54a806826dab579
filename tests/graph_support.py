"""CUDA graphs without a GPU: a replay runs the recorded operations again, in the memory that they had."""

from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monoblock.inference import prepared_model
from monoblock.inference.runners import cuda, cuda_search

FIRST_BYTES = 1 << 22  # of pages, enough for the rows of a test; a GPU gets far more at once
HOST_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Graph(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: it keeps the operations of a function with the memory that they read and write.

    Nothing that Python computes is recorded, and reading a number on the host is an error.
    """

    def __init__(self, run):
        super().__init__()
        self.operations = []
        for _ in range(2):
            run()
        with self:
            run()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in HOST_READS, "a recorded function reads a number on the host"
        call = partial(function, *args, **(kwargs or {}))
        result = call()
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        outputs = result if isinstance(result, tuple | list) else (result,)
        new = [t.untyped_storage().data_ptr() not in inputs for t in outputs if isinstance(t, torch.Tensor)]
        if function._schema.is_mutable or any(new):
            self.operations.append((call, outputs if all(new) else ()))
        return result

    def replay(self):
        for call, outputs in self.operations:
            result = call()
            for old, fresh in zip(outputs, result if isinstance(result, tuple | list) else (result,), strict=False):
                old.copy_(fresh)


def record_passes(monkeypatch):
    """Record models as if they were on a GPU; return a list that gets the shape of each recording."""
    shapes = []

    class RecordedPass(cuda.RecordedPass):
        def __init__(self, model, cache, shape, *args):
            shapes.append(shape)
            super().__init__(model, cache, shape, *args)

    monkeypatch.setattr(cuda, "RecordedPass", RecordedPass)
    monkeypatch.setattr(cuda, "record", lambda run, device, pool: Graph(run).replay)
    monkeypatch.setattr(cuda_search, "record", lambda run, device: Graph(run).replay)
    monkeypatch.setattr(prepared_model, "supports_cuda_graph", lambda model: True)
    monkeypatch.setattr(cuda, "FIRST_BYTES", FIRST_BYTES)
    return shapes
