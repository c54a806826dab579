"""All faults by name."""

from __future__ import annotations

from monoblock.doctor.diagnose import diagnose_model
from monoblock.doctor.faults.fault import Fault, plant_fault
from monoblock.doctor.faults.structure import STRUCTURE
from monoblock.doctor.faults.training import FIT, TRAINING
from monoblock.doctor.report import Report
from monoblock.errors import InputError, did_you_mean
from monoblock.model import Transformer

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*STRUCTURE, *FIT, *TRAINING)}


def find_fault(name: str) -> Fault:
    name = name.replace("-", "_")
    if name not in FAULTS:
        hint = did_you_mean(name, FAULTS) or "; monoblock doctor --list shows them"
        raise InputError(f"there is no fault {name!r}{hint}")
    return FAULTS[name]


def diagnose_with_fault(name: str, model: Transformer | None = None) -> Report:
    """Plant a fault into a copy of a model, or into a small built-in one, and examine it."""
    setup = plant_fault(find_fault(name), model)
    report = diagnose_model(setup.model, **setup.options)
    report.subject += f" with {name}"
    return report
