"""The kernels that a decoding step launches on a GPU, recorded without one: fake tensors, and launches that log."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import monoblock as mb
from monoblock.inference import fast_linear
from monoblock.inference.fast_modules import build_fast_model
from monoblock.kernels import gpu, gpu_attention, gpu_quantized
from monoblock.model import Transformer
from monoblock.nn.embedding import Embedding
from monoblock.nn.paged_cache import PagedCache, StaticRows

WIDE = {"vocab": 96, "width": 4096, "depth": 2, "heads": 32, "context": 512}
NARROW = {"vocab": 96, "width": 256, "depth": 2, "heads": 4, "context": 512}


class Log:
    """Stands for a module of Triton kernels: a launch adds the name of its kernel to a list."""

    def __init__(self, names):
        self._names = names

    def __getattr__(self, name):
        names = self._names

        class Kernel:
            def __getitem__(self, grid):
                return lambda *args, **options: names.append(name.removesuffix("_kernel"))

        return Kernel()


@pytest.fixture
def launches(monkeypatch):
    names = []
    monkeypatch.setattr(gpu, "_is_available", lambda: True)
    monkeypatch.setattr(gpu, "_launch_options", lambda device: {})
    monkeypatch.setattr(gpu, "_has_room_for_large_tiles", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (gpu, gpu_attention, gpu_quantized):
        monkeypatch.setattr(module, "triton_kernels", lambda *file: Log(names))
    monkeypatch.setattr(FakeTensor, "is_cuda", True)
    monkeypatch.setattr(Embedding, "check_inputs", lambda *args: None)  # it reads values
    monkeypatch.setattr(fast_linear, "adjacent_view", lambda tensors: None)  # it reads addresses
    return names


def record_step(config, bits, launches, monkeypatch):
    """The kernels of a step with one row in pages, as a CUDA graph has it."""
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16).eval()
    if bits is not None:
        model = mb.quantize(model, bits=bits, group=32).eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = model.to_empty(device="cpu")
        with monkeypatch.context() as building:
            building.setattr(Transformer, "device", torch.device("cuda"))
            fast = build_fast_model(model)
        cache = PagedCache(fast.decoder.config, fast.device)
        cache.grow(17)
        tables, length, count = torch.arange(1, 17, dtype=torch.int32)[None], torch.tensor([5]), torch.tensor([1])
        rows = StaticRows(cache, tables, length, count, 1)
        fast(torch.zeros(1, 1, dtype=torch.long), positions=length[None], cache=rows)
    return launches


ADDED = ["norm", "matvec", "attend_pages", "matvec", "norm"]  # products add the residual
# With the 8-bit form that the kernel before has computed
ROUNDED = ["quantized_matvec", "attend_pages", "quantized_matvec"]
GATED = ["quantized_matvec", "gated_activation", "quantized_matvec"]


@pytest.mark.parametrize(
    ("config", "bits", "expected"),
    [
        (mb.llama(**NARROW, hidden=512), None, [*ADDED, "matvec", "matvec"] * 2 + ["norm", "matvec"]),
        (mb.gpt(**NARROW), None, [*ADDED, "matvec", "matvec"] * 2 + ["norm", "matvec"]),
        (mb.llama(**NARROW, hidden=512), 8, ["norm", *ROUNDED, "norm", *GATED] * 2 + ["norm", "quantized_matvec"]),
        (mb.llama(**WIDE, hidden=4352), 8, ["norm", *ROUNDED, "norm", *GATED] * 2 + ["norm", "quantized_matvec"]),
        (mb.llama(**WIDE, hidden=4352), 4, ["norm", *[*ROUNDED, *GATED] * 2, "norm", "quantized_matvec"]),
    ],
)
def test_a_step_launches_one_kernel_for_each_product_with_its_norm_activation_and_residual(
    config, bits, expected, launches, monkeypatch
):
    assert record_step(config, bits, launches, monkeypatch) == expected
