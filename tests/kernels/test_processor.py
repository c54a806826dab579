"""The name of the processor from /proc/cpuinfo."""

import pytest

from monoblock.kernels.cpu import library

X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor @ 2.50GHz\nflags\t\t: fpu avx2\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (X86, "Intel(R) Xeon(R) Processor @ 2.50GHz"),
        (ARM.format(part="0xd0c"), "Neoverse-N1"),
        (ARM.format(part="0xfff"), "CPU"),
        (None, "CPU"),
    ],
)
def test_the_name_is_that_of_cpuinfo_or_of_the_arm_part(content, name, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(library, "CPUINFO", file)
    assert library.processor_name() == name
