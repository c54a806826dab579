"""What is chosen for a device: compilation, and what is said of it."""

import pytest
import torch

from monoblock.errors import ConfigError
from monoblock.training.precision import choose


@pytest.mark.parametrize(
    ("device", "asked", "steps", "compiled", "mode"),
    [
        ("cuda", "graphs", 1, True, "reduce-overhead"),
        ("cuda", "yes", 1, True, None),
        ("cuda", "auto", 1000, True, None),
        ("cuda", "auto", 10, False, None),
        ("cpu", "graphs", 1000, False, None),  # a recipe for a GPU runs without one
        ("cpu", "yes", 1, True, None),
    ],
)
def test_graphs_are_for_a_gpu_and_elsewhere_as_if_nothing_were_asked(device, asked, steps, compiled, mode):
    choice = choose(device, compile=asked, steps=steps)
    assert (choice.compiled, choice.mode) == (compiled, mode)


def test_a_cpu_computes_in_fp32_unless_asked_and_the_reason_denies_no_cpu_its_16_bits():
    said = {chosen.what: chosen.why for chosen in choose("cpu").said}
    assert choose("cpu").autocast is None
    assert "train.precision=bf16" in said["precision fp32"]
    assert choose("cpu", precision="bf16").autocast == torch.bfloat16


def test_another_word_for_compilation_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="compile='maybe' is none of auto, yes, no, graphs"):
        choose("cpu", compile="maybe")
