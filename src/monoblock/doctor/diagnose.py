"""Examine a model: make a subject of it, run the checks, and keep the findings that are causes."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from monoblock.doctor.checks import CHECKS
from monoblock.doctor.dependence import draw_dependence
from monoblock.doctor.examination import REQUIREMENTS, Check, Examination
from monoblock.doctor.known_subjects import OwnSubject, TransformersSubject, is_transformers_model
from monoblock.doctor.options import Options, check_names
from monoblock.doctor.plain_subject import PlainSubject
from monoblock.doctor.report import CheckResult, Finding, NotChecked, Report
from monoblock.doctor.subject import Subject
from monoblock.errors import InputError, did_you_mean
from monoblock.model import Transformer


def make_subject(model: Any, options: Options) -> Subject:
    """Adapt a model to the interface that the checks use."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(model, type):
        raise InputError(f"{model.__name__} is a class; give an instance: mb.diagnose({model.__name__}(…))")
    if isinstance(model, Transformer):
        return OwnSubject(model, pad_id=options.pad_id, length=options.length)
    if is_transformers_model(model):
        return TransformersSubject(model, pad_id=options.pad_id, length=options.length)
    if not callable(model):
        raise InputError(
            f"{model!r:.60} cannot be examined; give a model, a folder, or a function that maps ids (B, T) to logits"
        )
    if not isinstance(model, nn.Module) and options.vocab is None:
        raise InputError("the size of the vocabulary of a function is not known; give vocab=61")
    return PlainSubject(model, options)


def diagnose_model(
    model: Any,
    *,
    checks: str | Sequence[str] | None = None,
    cheap: bool = False,
    max_seconds: float = float("inf"),
    **options: Any,
) -> Report:
    """Examine a model, and return a report of what is wrong with it.

    checks: as in `mb.diagnose`.
    cheap: run only the checks that take a few passes.
    max_seconds: start no check after this time.
    options: the fields of `Options`.
    """
    started = time.perf_counter()
    names = checks.split(",") if isinstance(checks, str) else checks
    names = None if names is None else [name.strip() for name in names if name.strip()]
    known = [check.name for check in CHECKS]
    if unknown := next((name for name in names or () if name not in known), None):
        hint = did_you_mean(unknown, known) or "; monoblock doctor --list shows all"
        raise InputError(f"there is no check {unknown!r}{hint}")
    check_names(options)
    chosen_options = Options(**options)
    named_pad_id = chosen_options.pad_id
    if named_pad_id is None and chosen_options.tokenizer is not None:
        chosen_options = replace(chosen_options, pad_id=getattr(chosen_options.tokenizer, "pad_id", None))
    with torch.compiler.set_stance("force_eager"):  # compiled code shows no modules, and each probe would compile anew
        subject = make_subject(model, chosen_options)
        subject.asked_length = chosen_options.length
        if named_pad_id is not None and not 0 <= named_pad_id < max(subject.vocab, 1):
            raise InputError(
                f"pad_id={named_pad_id} is not a token id of the model, whose ids are 0 to {subject.vocab - 1}"
            )
        chosen = [c for c in CHECKS if (names is None or c.name in names) and not (cheap and c.is_slow)]
        exam = Examination(subject, chosen_options)
        parts = model.modules() if isinstance(model, nn.Module) else ()
        if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts):
            exam.notes.append("the model is compiled; it was examined without torch.compile")
        return _run_checks(exam, chosen, started, max_seconds)


def _run_checks(exam: Examination, checks: Sequence[Check], started: float, max_seconds: float) -> Report:
    report = Report(exam.subject.name, notes=exam.notes, pictures=exam.pictures)
    found: dict[str, tuple[Finding, float]] = {}
    with torch.random.fork_rng(devices=[]):
        _check_runs(exam)
        importlib.import_module("torch._dynamo")  # recording imports it, as the first step of an optimizer does
        deadline = time.perf_counter() + max_seconds
        for check in checks:
            skipped = _why_skipped(check, exam, deadline)
            if skipped is not None:
                report.not_checked.append(skipped)
                continue
            begin = time.perf_counter()
            try:
                result = check(exam)
            except Exception as error:  # a model may refuse what a check tries; the other checks go on
                how = "call the model in this way yourself to see why"
                result = NotChecked(f"the model failed: {_one_line(error):.120}", how, check=check.name)
            seconds = time.perf_counter() - begin
            if result is None:
                report.checks.append(CheckResult(check.name, "passed", seconds))
            elif isinstance(result, NotChecked):
                report.not_checked.append(result)
            else:
                assert {result.check, *result.explains} <= {one.name for one in CHECKS}
                found.setdefault(result.check, (result, seconds))
    _keep_causes(report, found)
    if math.isinf(max_seconds):
        try:
            with torch.random.fork_rng(devices=[]):
                report.pictures |= draw_dependence(exam, report)
        except Exception as error:  # the model refuses such a run
            report.notes.append(f"no picture of what outputs depend on was drawn: {_one_line(error):.100}")
    if exam.subject.reads_tokens:
        long = exam.__dict__.get("long_ids")
        report.lengths = (exam.ids.shape[1], *(() if long is None else (long.shape[1],)))
    report.seconds = time.perf_counter() - started
    return report


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _why_skipped(check: Check, exam: Examination, deadline: float) -> NotChecked | None:
    """Return why a check cannot run now; None if it can run."""
    missing = next((name for name in check.needs if not REQUIREMENTS[name].is_met(exam)), None)
    if missing is not None:
        is_known = REQUIREMENTS[missing].is_declared and not isinstance(exam.subject, PlainSubject)
        is_known = is_known or (missing == "attention" and exam.subject.module is not None)
        return REQUIREMENTS[missing].describe(check.name, is_known=is_known)
    if time.perf_counter() > deadline:
        return NotChecked("time limit reached", "run monoblock doctor on the model", check=check.name)
    parameters = sum(weight.numel() for weight in exam.subject.weights)
    if parameters > check.max_parameters:
        reason = f"the model has {parameters:,} parameters, too many for this check"
        return NotChecked(reason, f"pass checks=['{check.name}'] to a small copy", check=check.name)
    return None


def _check_runs(exam: Examination) -> None:
    """Raise InputError if the model cannot be called at all."""
    try:
        _ = exam.output
    except Exception as error:
        shape = tuple(exam.ids.shape)
        raise InputError(
            f"the model cannot be called with an input of shape {shape}: {_one_line(error):.160}; if it needs "
            "other inputs, give a function of ids: mb.diagnose(lambda ids: …, vocab=…)"
        ) from error
    if exam.options.loss is None or exam.options.batch is None:
        return
    ids, labels = exam.options.batch
    shape = (*ids.shape, *exam.output.shape[2:]) if exam.is_per_token else (len(ids), *exam.output.shape[1:])
    try:
        _ = exam.options.loss(torch.zeros(shape, device=exam.subject.device), labels.to(exam.subject.device))
    except Exception as error:
        raise InputError(
            f"loss(logits, labels) failed with logits of shape {tuple(shape)} and labels of {tuple(labels.shape)}: "
            f"{type(error).__name__}: {_one_line(error):.120}"
        ) from error


def _keep_causes(report: Report, found: dict[str, tuple[Finding, float]]) -> None:
    """Keep the findings that no other finding explains.

    A warning or a limit explains no other, with a few exceptions.
    """
    explained = {name: set(finding.explains) for name, (finding, _) in found.items()}
    for check in CHECKS:
        is_strong = check.name in found and found[check.name][0].verdict == "fail"
        if is_strong or check.name in found.keys() & {"softmax_precision", "scale", "initial_loss", "learning_rate"}:
            explained[check.name] |= {*check.explains}
    for name, (finding, seconds) in found.items():
        cause = next((other for other in found if name in explained[other]), None)
        if cause is None:
            (report.unsupported if finding.verdict == "unsupported" else report.findings).append(finding)
        report.checks.append(CheckResult(name, finding.verdict if cause is None else "explained", seconds, cause))
