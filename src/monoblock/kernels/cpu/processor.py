"""The name of this machine's processor, for tables of measurements."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
ARM_PARTS = {  # "CPU part" of /proc/cpuinfo -> name
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}


def processor_name() -> str:
    """Return the name of the processor, or "CPU" if it is unknown."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return fields.get("model name") or ARM_PARTS.get(fields.get("CPU part", "")) or "CPU"
