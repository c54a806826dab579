"""Checks of numbers: overflow, the layer where the first NaN appears, growth of the residual stream."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.doctor.examination import Examination, finding
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
                    self.first_bad = self.first_bad or name
                else:
                    self.largest[name] = max(self.largest.get(name, 0.0), float(tensor.abs().max()))

        return hook

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


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
        return finding(
            "overflow",
            "fail",
            {"first_bad_module": name, "attention_layer": layer},
            f"{reason}, because the softmax of attention in layer {layer} is given rows of -inf only: a query sees no "
            "key at all, or the softmax is taken over another axis than the keys",
            "take the softmax over the keys, scores.softmax(-1), and let each query see a key; one at padding may see "
            "itself",
        )
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


def check_gradient_flow(exam: Examination) -> Finding | None:
    """Compare the size of the gradients of the blocks, and look for weights that get none."""
    module = exam.subject.module
    assert module is not None
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        return finding(
            "gradient_flow",
            "fail",
            {"trainable_weights": 0},
            "no weight of the model takes part in training: requires_grad is False everywhere",
            "call model.requires_grad_(True), or leave the layers to train unfrozen",
        )
    gradients = _gradients(exam, list(parameters.values()))
    if gradients is None:
        return finding(
            "gradient_flow",
            "fail",
            {"weights_with_a_gradient": 0},
            "the output has no gradient: the forward pass runs under no_grad, or its result is detached",
            "remove torch.no_grad() and .detach() from the forward pass",
        )
    sizes = {
        name: 0.0 if g is None else float(g.norm()) / max(float(p.detach().norm()), 1e-3)
        for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
    blocks = find_blocks(module)
    by_block = [_block_size(block, module, sizes) for block in blocks]
    if by_block:
        exam.pictures["gradient norm by layer"] = by_block
    largest = max(sizes.values())
    without = [index for index, size in enumerate(by_block) if size == 0.0]
    if largest == 0 or without:
        return finding(
            "gradient_flow",
            "fail",
            {"blocks_without_gradient": len(without), "blocks": len(by_block)},
            f"no gradient reaches the blocks {without[:8]}: something above them is detached, or they are not used",
            "remove .detach(), .data and torch.no_grad() from the forward pass, and check that every block is called",
        )
    if len(by_block) > 1 and max(by_block) / max(min(by_block), 1e-30) > 1e3 and by_block[0] < by_block[-1]:
        ratio = by_block[0] / by_block[-1]
        return finding(
            "gradient_flow",
            "warn",
            {"first_block": by_block[0], "last_block": by_block[-1], "ratio": ratio},
            f"gradients vanish on their way down: the first block gets {ratio:.1g} of what the last one gets",
            "add residual connections, x = x + sublayer(norm(x)), and normalize before each sublayer",
        )
    return _check_residuals(exam, blocks)


def _check_residuals(exam: Examination, blocks: list[nn.Module]) -> Finding | None:
    """Compare the blocks by how much of their input they pass on: one without a residual connection passes on none."""
    slopes = _slopes(exam, blocks)
    lowest = min(slopes, key=lambda slope: slope[0] + slope[1], default=(1.0, 0.0))
    highest = max(slopes, key=lambda slope: slope[0] - slope[1], default=(0.0, 0.0))
    if sum(lowest) > 0.3 or highest[0] - highest[1] < 0.5:
        return None
    index = slopes.index(lowest)
    return finding(
        "gradient_flow",
        "warn",
        {"passed_on": lowest[0], "most_passed_on": highest[0], "block": index},
        f"block {index} does not pass its input on, while others do: one of its residual connections is missing",
        "add the input to the output of every sublayer: x = x + sublayer(norm(x))",
    )


def _slopes(exam: Examination, blocks: list[nn.Module]) -> list[tuple[float, float]]:
    """Estimate the mean slope of the outputs of each block by the same inputs, and four standard errors of it.

    The slope is 1 plus a little with residual connections and about 0 without; a norm after the block divides it by
    a number, but then the slopes of one output by the other inputs stay small, and it counts as 1.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    slopes: list[tuple[float, float]] = []

    def hook(block: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> None:
        given = [t for t in (*inputs, *options.values()) if isinstance(t, Tensor) and t.requires_grad]
        hidden = output[0] if isinstance(output, tuple) else output
        if given and isinstance(hidden, Tensor) and hidden.dim() == 3 and given[0].shape == hidden.shape:
            pairs.append((given[0], hidden))

    handles = [block.register_forward_hook(hook, with_kwargs=True) for block in blocks]
    try:
        with exam.subject.evaluating(), torch.enable_grad():
            exam.subject.logits(exam.ids[:2])
            if len(pairs) != len(blocks):
                return []
            for given, hidden in pairs:
                probe = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(hidden)
                product = torch.autograd.grad(hidden, given, probe, retain_graph=True, allow_unused=True)[0]
                if product is None:
                    return []
                size = float(product.norm() / probe.norm())
                slope = float((product * probe).sum() / probe.square().sum())
                is_scaled = slope > 0.3 * size  # nearly a multiple of the identity
                slopes.append((max(slope, 1.0) if is_scaled else slope, 4 * size / math.sqrt(probe.numel())))
    except RuntimeError:  # an operation without a gradient
        return []
    finally:
        for handle in handles:
            handle.remove()
    return slopes


def _gradients(exam: Examination, parameters: list[nn.Parameter]) -> Any:
    with exam.subject.evaluating(), torch.enable_grad():
        output = exam.subject.logits(exam.ids[:2])
        if not output.requires_grad:
            return None
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.device, output.dtype)
        loss = (output * weights).mean()
        return torch.autograd.grad(loss, parameters, allow_unused=True)


def _block_size(block: nn.Module, module: nn.Module, sizes: dict[str, float]) -> float:
    own = {id(p) for p in block.parameters()}
    names = [name for name, p in module.named_parameters() if id(p) in own and name in sizes]
    values = [sizes[name] for name in names]
    return max(values) if values else 1.0
