"""Checks of numbers: overflow, the layer where the first NaN appears, growth of the residual stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from monoblock.doctor.checks.attention import AXIS_FIX, softmax_over
from monoblock.doctor.checks.causality import mask_fix
from monoblock.doctor.checks.wiring import check_norms
from monoblock.doctor.examination import Examination, finding
from monoblock.doctor.records import AttentionRecord
from monoblock.doctor.report import Finding

FP16_MAX = 65_504.0


class _Watch:
    """Hooks that remember the largest output of each module, and the first module that makes a number infinite."""

    def __init__(self, module: nn.Module) -> None:
        self.largest: dict[str, float] = {}
        self.first_bad: str | None = None
        self.handles = [
            part.register_forward_hook(self._hook(name))
            for name, part in module.named_modules()
            if name and not list(part.children())
        ]

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
            for tensor in tensors:
                if tensor.is_nested or not tensor.is_floating_point() or not tensor.numel():
                    continue
                if not bool(tensor.isfinite().all()):
                    is_given = any(_is_bad(value) for value in inputs)
                    self.first_bad = self.first_bad or (f"the operations before {name}" if is_given else name)
                else:
                    self.largest[name] = max(self.largest.get(name, 0.0), float(tensor.abs().max()))

        return hook

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _is_bad(value: Any) -> bool:
    """Return whether a value is a tensor with numbers that are not finite."""
    is_number = isinstance(value, Tensor) and not value.is_nested and value.is_floating_point()
    return is_number and not bool(value.isfinite().all())


def check_overflow(exam: Examination) -> Finding | None:
    """Look for outputs that are not finite, and for activations too large for fp16."""
    module = exam.subject.module
    is_finite = bool(exam.output.isfinite().all())
    if module is None:
        if is_finite:
            return None
        return _overflow_finding({"finite": 0}, "the output is not finite (NaN or inf)")
    watch = _Watch(module)
    try:
        exam.run(exam.ids[:1])
    finally:
        watch.remove()
    if not is_finite or watch.first_bad is not None:
        name = watch.first_bad or "the operations between modules"
        reason = f"NaN or inf first appears in {name}"
        if (layer := _layer_without_keys(exam)) is None:
            return _overflow_finding({"first_bad_module": name}, reason)
        because, fix, title = _why_without_keys(exam, exam.recorded.attentions[layer])
        reason += f", because {because} in attention layer {layer}"
        return finding("overflow", "fail", {"first_bad_module": name, "attention_layer": layer}, reason, fix, title)
    if not watch.largest:
        return None
    name = max(watch.largest, key=lambda key: watch.largest[key])
    if watch.largest[name] > FP16_MAX:
        return finding(
            "overflow",
            "warn",
            {"largest_activation": watch.largest[name], "fp16_maximum": FP16_MAX, "module": name},
            f"activations of {name} are too large for fp16 and overflow there",
            "run the model in bf16 or fp32, or scale the weights down",
        )
    return None


def _layer_without_keys(exam: Examination) -> int | None:
    """Return the first attention whose weights are NaN although no score is; None if there is none."""
    for layer, record in enumerate(exam.recorded.attentions):
        if not bool(record.weights.isfinite().all()):
            return None if bool(record.scores.isnan().any() | record.scores.isposinf().any()) else layer
    return None


def _why_without_keys(exam: Examination, record: AttentionRecord) -> tuple[str, str, str]:
    """Return why a softmax is given rows of -inf only, the line to write, and a title."""
    if record.softmax_axis != -1:
        others = softmax_over(record)
        return (
            f"the softmax is taken over another axis than the keys, over the {others} (dim={record.softmax_axis}): the "
            "scores that the mask hides are -inf in all of them, and the softmax of -inf alone is NaN",
            AXIS_FIX,
            f"the softmax is taken over the {others}",
        )
    seen = record.visible.any(0)
    if seen.shape[0] == seen.shape[1] and not bool(seen.tril(-1).any()) and bool(seen.triu(1).any()):
        return (
            "the mask is inverted: query i sees the keys after it and none before it, and the last query sees none,",
            mask_fix(exam, [record]),
            "the mask is inverted",
        )
    return (
        "a query sees no key at all, and its softmax is given a row of -inf only,",
        "let each query see a key; one at padding may see itself: mask = mask | torch.eye(T, dtype=torch.bool)",
        "a query sees no key",
    )


def _overflow_finding(evidence: dict[str, float | int | str], reason: str) -> Finding:
    return finding(
        "overflow",
        "fail",
        evidence,
        reason,
        "compute softmax, norms and loss in fp32, mask with -inf only where a row keeps a key, add eps under square "
        "roots and in divisions, and look for weights that are not finite",
    )


def check_residual_growth(exam: Examination) -> Finding | None:
    """Compare the norm of the hidden states after the last block with that after the first."""
    if found := check_norms(exam):
        return found
    norms = block_norms(exam)
    if len(norms) < 2:
        return None
    exam.pictures["norm of the residual stream by layer"] = norms
    first, last = norms[0], norms[-1]
    growth = (last / max(first, 1e-12)) ** (1 / (len(norms) - 1))
    if (
        not growth > 4 or last / max(first, 1e-12) < 50
    ):  # pre-norm streams grow like sqrt(depth), trained ones up to 2 a layer
        return None
    return finding(
        "residual_growth",
        "warn",
        {"norm_after_the_first_layer": first, "norm_after_the_last_layer": last, "factor_per_layer": growth},
        f"the residual stream grows {growth:.1f} times per layer, so later layers are drowned by their own scale",
        "normalize before each sublayer (pre-norm) and once at the end; initialize output projections with "
        "std / sqrt(2 * depth)",
    )


def block_norms(exam: Examination) -> list[float]:
    """Return the mean norm of the hidden states after each block; blocks are the longest list of equal modules."""
    module = exam.subject.module
    blocks = [] if module is None else find_blocks(module)
    norms: list[float] = []

    def hook(block: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.dim() == 3:
            norms.append(float(hidden.float().norm(dim=-1).mean()))

    handles = [block.register_forward_hook(hook) for block in blocks]
    try:
        exam.run(exam.ids[:1])
    finally:
        for handle in handles:
            handle.remove()
    return norms


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the children of one module that have its most common class, at least two."""
    best: list[nn.Module] = []
    for parent in module.modules():
        children = list(parent.children())
        kinds = {type(child) for child in children}
        for kind in kinds:
            same = [child for child in children if type(child) is kind and list(child.children())]
            weights = sum(p.numel() for child in same for p in child.parameters())
            if len(same) > 1 and weights > sum(p.numel() for child in best for p in child.parameters()):
                best = same
    return best
