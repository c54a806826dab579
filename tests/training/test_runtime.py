"""The automatic choice of precision and compilation, and its reasons."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from monoblock.errors import ConfigError
from monoblock.kernels.cpu import library
from monoblock.training.runtime import check_device, choose_runtime


@pytest.mark.parametrize(
    ("device", "compile", "steps", "compiled", "mode"),
    [
        ("cuda", "graphs", 1, True, "reduce-overhead"),
        ("cuda", "yes", 1, True, None),
        ("cuda", "auto", 1000, True, None),
        ("cuda", "auto", 10, False, None),
        ("cpu", "graphs", 1000, False, None),  # a recipe for a GPU also runs on a CPU
        ("cpu", "yes", 1, True, None),
    ],
)
def test_graphs_are_for_a_gpu_and_mean_auto_on_a_cpu(device, compile, steps, compiled, mode):
    runtime = choose_runtime(device, compile=compile, steps=steps)
    assert (runtime.compiled, runtime.compile_mode) == (compiled, mode)


def test_a_cpu_computes_in_fp32_by_default_and_the_reason_mentions_bf16():
    reasons = {event.decision: event.reason for event in choose_runtime("cpu").decisions}
    assert choose_runtime("cpu").autocast_dtype is None
    assert "train.precision=bf16" in reasons["precision fp32"]
    assert choose_runtime("cpu", precision="bf16").autocast_dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matrix_products_of_a_run_do_not_change_the_library_of_later_ones(precision):
    """On an ARM processor without bfloat16, torch itself warns and switches oneDNN off at the first such product."""
    torch.backends.mkldnn.enabled = precision == "bf16"  # fp32: as a model in bfloat16 may have left it
    runtime = choose_runtime("cpu", precision=precision)
    try:
        runtime.apply_torch_settings()
        before = torch.backends.mkldnn.enabled
        assert before == library.is_onednn_fast()
        with warnings.catch_warnings(action="error"), runtime.autocast():
            F.linear(torch.randn(64, 48), torch.randn(32, 48))
        assert torch.backends.mkldnn.enabled == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuad", "cuad is not a device; write auto, cpu or cuda"),
        ("cuda:0", "torch finds no GPU"),
        ("meta", "train.device=meta is not supported; write auto, cpu or cuda"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(device, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        check_device(device)
    check_device("auto")
    check_device("cpu")


def test_a_gpu_beyond_the_last_one_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(ConfigError, match="cuda:2 is not available: this machine has 2 GPUs"):
        check_device("cuda:2")


def test_an_unknown_compile_option_is_an_error_that_lists_the_options():
    with pytest.raises(ConfigError, match="compile='maybe' is not one of auto, yes, no, graphs"):
        choose_runtime("cpu", compile="maybe")
