"""The check of gradients: they reach every block and every weight in use; residual connections pass them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from monoblock.doctor.checks import wiring
from monoblock.doctor.checks.numerics import find_blocks
from monoblock.doctor.examination import Examination, finding
from monoblock.doctor.report import Finding


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
    if (found := wiring.check_registered(exam)) is not None:
        return found
    blocks, used = find_blocks(module), set[nn.Module]()
    gradients = _gradients(exam, list(parameters.values()), used)
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
    by_block = [_block_size(block, module, sizes) for block in blocks]
    if by_block:
        exam.pictures["gradient norm by layer"] = by_block
    largest = max(sizes.values())
    without = [index for index, size in enumerate(by_block) if size == 0.0]
    if found := wiring.check_initialized(exam) or wiring.check_called(blocks, without, used):
        return found
    if without and not any(_is_output_used(exam, blocks[index]) for index in without):
        return finding(
            "gradient_flow",
            "fail",
            {"blocks_whose_output_is_not_used": len(without), "blocks": len(by_block)},
            f"the output of the blocks {without[:8]} is not used: what follows reads another tensor, so their weights "
            "do nothing and get no gradient",
            "give each block the output of the one before: for block in self.blocks: x = block(x); then "
            "logits = self.head(self.norm(x))",
            "blocks whose output is not used",
            explains=("positions",),
        )
    if largest == 0 or without:
        return finding(
            "gradient_flow",
            "fail",
            {"blocks_without_gradient": len(without), "blocks": len(by_block)},
            f"no gradient reaches the blocks {without[:8]}: something above them is detached",
            "remove .detach(), .data and torch.no_grad() from the forward pass",
        )
    reached = {id(p) for p, g in zip(parameters.values(), gradients, strict=True) if g is not None}
    cut_off = [name for name in parameters if _is_cut_off(module, blocks, used, reached, name)]
    if cut_off:
        return finding(
            "gradient_flow",
            "fail",
            {"weights_without_gradient": len(cut_off), "first": cut_off[0]},
            f"no gradient reaches {cut_off[0]}{f' and {len(cut_off) - 1} more weights' if cut_off[1:] else ''}, "
            "although the model computes with them: the result is detached or not used, and they are never trained",
            "remove .detach(), .data and torch.no_grad() after these weights; freeze weights on purpose with "
            "requires_grad_(False)",
        )
    if found := wiring.check_residuals(exam):
        return found
    if len(by_block) > 1 and max(by_block) / max(min(by_block), 1e-30) > 1e3 and by_block[0] < by_block[-1]:
        ratio = by_block[0] / by_block[-1]
        return finding(
            "gradient_flow",
            "warn",
            {"first_block": by_block[0], "last_block": by_block[-1], "ratio": ratio},
            f"gradients vanish on their way down: the first block gets {ratio:.1g} of what the last one gets",
            "pass the stream on as it is, x = x + sublayer(norm(x)), and normalize before each sublayer",
        )
    return wiring.check_nonlinearity(exam)


def _gradients(exam: Examination, parameters: list[nn.Parameter], used: set[nn.Module]) -> Any:
    """Return the gradients of a number that depends on the whole output; add the modules that are called to `used`."""

    def hook(module: nn.Module, inputs: Any) -> None:
        used.add(module)

    assert exam.subject.module is not None
    handles = [module.register_forward_pre_hook(hook) for module in exam.subject.module.modules()]
    try:
        with exam.subject.evaluating(), torch.enable_grad():
            output = exam.subject.logits(exam.ids[:2])
            if not output.requires_grad:
                return None
            generator = torch.Generator().manual_seed(2)
            weights = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
            return torch.autograd.grad((output * weights).mean(), parameters, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _is_output_used(exam: Examination, block: nn.Module) -> bool:
    """Return whether the output of the model changes with that of a block."""

    def change(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(change(block, inputs, part) for part in output)
        return 2 * output + 1 if isinstance(output, Tensor) and output.is_floating_point() else output

    before, handle = exam.run(exam.ids[:2]), block.register_forward_hook(change)
    try:
        return not torch.equal(exam.run(exam.ids[:2]), before)
    finally:
        handle.remove()


def _is_cut_off(module: nn.Module, blocks: list[nn.Module], used: set[nn.Module], reached: set[int], name: str) -> bool:
    """Return whether a weight is of a table or of a part of a block that is called, but gets no gradient.

    Other modules may be called for an output that the logits do not depend on, such as the pooler of an encoder, and
    a module may use some of its weights only with certain inputs.
    """
    owner = module.get_submodule(name.rpartition(".")[0])
    in_block = any(owner is part for block in blocks for part in block.modules())
    has_gradient = any(id(p) in reached for p in owner.parameters(recurse=False))
    return owner in used and not has_gradient and (in_block or isinstance(owner, nn.Embedding))


def _block_size(block: nn.Module, module: nn.Module, sizes: dict[str, float]) -> float:
    own = {id(p) for p in block.parameters()}
    names = [name for name, p in module.named_parameters() if id(p) in own and name in sizes]
    values = [sizes[name] for name in names]
    return max(values) if values else 1.0
