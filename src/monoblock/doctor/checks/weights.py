"""Checks of the module: tied weights, dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from monoblock.doctor.checks.wiring import check_shared_blocks
from monoblock.doctor.examination import Examination, finding, not_applicable
from monoblock.doctor.report import Finding, Outcome
from monoblock.doctor.subject import difference

PROMPT = 3  # tokens to generate from


def _embedding_and_output(exam: Examination) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the matrices of the token embedding and of the output, if the module has both as such."""
    module, vocab = exam.subject.module, exam.subject.vocab
    assert module is not None
    owner: Any = module
    if hasattr(module, "get_input_embeddings") and hasattr(module, "get_output_embeddings"):
        table, output = owner.get_input_embeddings(), owner.get_output_embeddings()
        if not (isinstance(table, nn.Embedding) and isinstance(output, nn.Linear)):
            return None
        return (table.weight, output.weight) if table.weight.shape == output.weight.shape else None
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == vocab]
    linears = [m.weight for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == vocab]
    pairs = [(t, w) for t in tables for w in linears[-1:] if t.shape == w.shape]
    return next((p for p in pairs if p[0] is p[1] or p[0].data_ptr() == p[1].data_ptr()), pairs[0] if pairs else None)


def check_tying(exam: Examination) -> Outcome:
    """Compare the storage of the token embedding with that of the output matrix."""
    if found := check_shared_blocks(exam):
        return found
    pair = _embedding_and_output(exam)
    if pair is None and exam.subject.declared.tied:
        return None  # there is no second matrix that could differ
    if pair is None:
        return not_applicable("tying", "no output matrix of the shape of the embedding was found")
    table, output = pair
    is_shared, declared = table.data_ptr() == output.data_ptr(), exam.subject.declared.tied
    is_copy = not is_shared and difference(table, output) < 1e-3
    if is_shared and declared is False and type(exam.subject).__name__ != "PlainSubject":
        return finding(
            "tying",
            "fail",
            {"shared": 1, "declared": 0},
            "the output shares the matrix of the embedding, although the configuration says that it has its own",
            "build the output as a matrix of its own, or write tie = true in the configuration",
        )
    if is_shared or not (declared or is_copy):
        return None
    values = "with the same values" if is_copy else "with other values"
    return finding(
        "tying",
        "fail",
        {"shared": 0, "difference": difference(output, table)},
        f"the embedding and the output are meant to be tied, but are two tensors {values}: they drift apart in "
        f"training, and {table.numel():,} parameters are counted twice",
        "share the parameter itself, last in __init__: self.head.weight = self.embedding.weight (no .clone(), no "
        "nn.Parameter(…), no initialization after it)",
    )


def check_dropout(exam: Examination) -> Finding | None:
    """Run twice in evaluation mode, and compare the probabilities of all dropouts with the declared one."""
    first, second = exam.output, exam.run(exam.ids)
    if not torch.equal(first.nan_to_num(), second.nan_to_num()) and difference(first, second) > exam.subject.tolerance:
        draws = exam.recorded.random_draws
        if not draws and exam.subject.module is not None:
            return finding(
                "dropout",
                "fail",
                {"difference_between_two_runs": difference(first, second), "random_operations": 0},
                "two runs on the same ids differ, although no random numbers are drawn: the model keeps something from "
                "one call to the next, such as a state or a cache in self",
                "begin every call anew; take the state as an argument and return it: logits, state = model(ids, state)",
            )
        return finding(
            "dropout",
            "fail",
            {"difference_between_two_runs": difference(first, second), "random_operations": draws},
            "two runs on the same ids differ: dropout (or other noise) is on in evaluation",
            "call model.eval() before use; write F.dropout(x, p, training=self.training), or use nn.Dropout",
        )
    module = exam.subject.module
    if module is None:
        return None
    found = _check_logits_kept(exam, module) or _check_probabilities(exam, module)
    return found or _check_mode_of_generation(exam, module)


class _CountDropouts(TorchDispatchMode):
    """Counts the dropouts that are on."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("native_dropout", "bernoulli", "bernoulli_")
        return func(*args, **(kwargs or {}))


def _check_mode_of_generation(exam: Examination, module: nn.Module) -> Finding | None:
    """Generate from a model in training mode, as a training loop leaves it: its dropouts must be switched off."""
    if exam.handed.generate is None:
        return None
    with exam.subject.evaluating(), _CountDropouts() as dropouts:
        module.train()
        exam.handed.generate(exam.ids[:1, :PROMPT].clone())
    if not dropouts.count:
        return None
    return finding(
        "dropout",
        "fail",
        {"dropouts_that_are_on": dropouts.count, "expected": 0},
        "text is generated in training mode: model.eval() is not called before, so that dropout changes every token",
        "call model.eval() before you generate, and model.train() before training goes on",
        "no eval() in generation",
    )


def _check_logits_kept(exam: Examination, module: nn.Module) -> Finding | None:
    """Run once in training mode: a dropout after the logits sets some of them to 0."""
    if exam.is_per_token and exam.output.shape[-1] < exam.subject.vocab:
        return None  # hidden states, on which a head follows
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}  # those of a batch norm move
    with exam.subject.evaluating():
        module.train()
        output = exam.subject.logits(exam.ids)
    for buffer, kept in buffers.items():
        buffer.copy_(kept)
    dropped = float((output == 0).float().mean())
    if dropped < 0.01 or bool((exam.output == 0).any()):
        return None
    return finding(
        "dropout",
        "fail",
        {"share_of_logits_set_to_0": dropped},
        f"in training {dropped:.0%} of the logits are set to 0, because dropout comes after the output layer: the loss "
        "is computed from scores of which some are lost, often that of the right token",
        "put dropout before the output layer, or leave it out there: return self.head(x)",
        "dropout after the logits",
    )


def _check_probabilities(exam: Examination, module: nn.Module) -> Finding | None:
    """Look for dropouts whose probability is not the declared one: it was not passed on."""
    declared = exam.subject.declared.dropout
    found = {name: m.p for name, m in module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)}
    found |= {
        name: float(m.dropout)
        for name, m in module.named_modules()
        if name and isinstance(getattr(m, "dropout", None), float)
    }
    if total := [name for name, p in found.items() if p >= 1]:
        return finding(
            "dropout",
            "fail",
            {"probability": found[total[0]], "where": total[0], "dropouts": len(total)},
            f"{total[0]} drops everything: with p = {found[total[0]]:g} its output in training is 0",
            "p is the share that is dropped, not kept: nn.Dropout(0.1)",
        )
    if declared is None:
        return None
    other = {name: p for name, p in found.items() if p > 0 and abs(p - declared) > 1e-9}  # 0 is switched off
    active = [p for p in found.values() if p > 0]
    if declared > 0 and not active:
        return finding(
            "dropout",
            "warn",
            {"declared": declared, "dropouts_with_it": 0},
            f"dropout={declared:g} is declared, but no part of the model has it",
            "pass it on to every layer: Block(width, heads, dropout=dropout)",
        )
    if not other:
        return None
    name, p = next(iter(other.items()))
    return finding(
        "dropout",
        "warn",
        {"declared": declared, "found": p, "where": name, "dropouts_with_another_value": len(other)},
        f"dropout={declared:g} is declared, but {name} has {p:g}: the argument is not passed on to it",
        "pass it on to every layer: Block(width, heads, dropout=dropout)",
    )
