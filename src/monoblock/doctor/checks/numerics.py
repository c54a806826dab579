"""Checks of numbers: overflow, growth of the residual stream, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from monoblock.doctor.checks.attention import AXIS_FIX, softmax_over
from monoblock.doctor.checks.causality import mask_fix
from monoblock.doctor.checks.modules import (
    find_lost_residuals,
    find_missing_nonlinearity,
    find_missing_norms,
    find_uncalled,
    find_uninitialized,
    find_unregistered,
)
from monoblock.doctor.examination import MEASURED, Examination, check, fail, warn
from monoblock.doctor.recorder import AttentionRecord
from monoblock.doctor.report import Finding
from monoblock.doctor.subject import hooks

FP16_MAX = 65_504.0


def _run_watched(exam: Examination, module: nn.Module) -> tuple[dict[str, float], str | None]:
    """Return the largest output of each module, and the first module that makes a number infinite."""
    largest: dict[str, float] = {}
    bad: list[str] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if _is_bad(tensor):
                    bad.append(f"the operations before {name}" if any(map(_is_bad, inputs)) else name)
                elif _is_number(tensor) and tensor.numel():
                    largest[name] = max(largest.get(name, 0.0), float(tensor.abs().max()))

        return hook

    leaves = [(name, part) for name, part in module.named_modules() if name and not list(part.children())]
    with hooks([part.register_forward_hook(watch(name)) for name, part in leaves]):
        exam.run(exam.ids[:1])
    return largest, bad[0] if bad else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.is_floating_point()


def _is_bad(value: Any) -> bool:
    """Return whether a value is a tensor with numbers that are not finite."""
    return _is_number(value) and not bool(value.isfinite().all())


@check(
    "outputs and activations are finite and fit into fp16",
    explains=f"{MEASURED} dropout residual_growth gradient_flow learning_rate heads",
)
def check_overflow(exam: Examination) -> Finding | None:
    """Look for outputs that are not finite, and for activations too large for fp16."""
    module = exam.subject.module
    largest, bad = ({}, None) if module is None else _run_watched(exam, module)
    if bad is None and not bool(exam.output.isfinite().all()):
        bad = "the output" if module is None else "the operations between modules"
    if bad is not None:
        reason = f"NaN or inf first appears in {bad}"
        if (layer := _layer_without_keys(exam)) is not None:
            because, fix, title = _why_without_keys(exam, exam.recorded.attentions[layer])
            reason += f", because {because} in attention layer {layer}"
            return fail({"first_bad_module": bad, "attention_layer": layer}, reason, fix, title)
        return fail(
            {"first_bad_module": bad},
            reason,
            "compute softmax, norms and loss in fp32, mask with -inf only where a row keeps a key, add eps under "
            "square roots and in divisions, and look for weights that are not finite",
        )
    name = max(largest, key=lambda key: largest[key], default="")
    if not largest or largest[name] <= FP16_MAX:
        return None
    return warn(
        {"largest_activation": largest[name], "fp16_maximum": FP16_MAX, "module": name},
        f"activations of {name} are too large for fp16 and overflow there",
        "run the model in bf16 or fp32, or scale the weights down",
    )


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


@check("the residual stream does not explode", "module", group="training")
def check_residual_growth(exam: Examination) -> Finding | None:
    """Compare the norm of the hidden states after the last block with that after the first."""
    if found := find_missing_norms(exam):
        return found
    norms: list[float] = []  # of the hidden states after each block

    def hook(block: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.dim() == 3:
            norms.append(float(hidden.float().norm(dim=-1).mean()))

    with hooks([block.register_forward_hook(hook) for block in find_blocks(exam.module)]):
        exam.run(exam.ids[:1])
    if len(norms) < 2:
        return None
    exam.pictures["norm of the residual stream by layer"] = norms
    first, last = norms[0], norms[-1]
    growth = (last / max(first, 1e-12)) ** (1 / (len(norms) - 1))
    # Pre-norm streams grow like sqrt(depth), trained ones up to 2 times a layer.
    if not growth > 4 or last / max(first, 1e-12) < 50:
        return None
    return warn(
        {"norm_after_the_first_layer": first, "norm_after_the_last_layer": last, "factor_per_layer": growth},
        f"the residual stream grows {growth:.1f} times per layer, so later layers are drowned by their own scale",
        "normalize before each sublayer (pre-norm) and once at the end; initialize output projections with "
        "std / sqrt(2 * depth)",
    )


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the children of one module that have its most common class, at least two."""
    groups: list[list[nn.Module]] = [[]]
    for parent in module.modules():
        children = [child for child in parent.children() if list(child.children())]
        groups += ([child for child in children if type(child) is kind] for kind in {type(child) for child in children})
    groups = [group for group in groups if len(group) != 1]
    return max(groups, key=lambda group: sum(p.numel() for child in group for p in child.parameters()))


@check(
    "gradients reach every block", "module", explains="overfit optimizer learning_rate", group="training", is_slow=True
)
def check_gradient_flow(exam: Examination) -> Finding | None:
    """Compare the size of the gradients of the blocks, and look for weights that get none."""
    module = exam.module
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        return fail(
            {"trainable_weights": 0},
            "no weight of the model takes part in training: requires_grad is False everywhere",
            "call model.requires_grad_(True), or leave the layers to train unfrozen",
        )
    if found := find_unregistered(exam):
        return found
    blocks, used = find_blocks(module), set[nn.Module]()
    gradients = _gradients(exam, list(parameters.values()), used)
    if gradients is None:
        return fail(
            {"weights_with_a_gradient": 0},
            "the output has no gradient: the forward pass runs under no_grad, or its result is detached",
            "remove torch.no_grad() and .detach() from the forward pass",
        )
    sizes = {
        name: 0.0 if g is None else float(g.norm()) / max(float(p.detach().norm()), 1e-3)
        for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
    of_weight = {id(p): sizes[name] for name, p in parameters.items()}
    by_block = [max((of_weight[id(p)] for p in b.parameters() if id(p) in of_weight), default=1.0) for b in blocks]
    if by_block:
        exam.pictures["gradient norm by layer"] = by_block
    without = [index for index, size in enumerate(by_block) if size == 0.0]
    if found := find_uninitialized(exam) or find_uncalled(blocks, without, used):
        return found
    if without and not any(_is_output_used(exam, blocks[index]) for index in without):
        return fail(
            {"blocks_whose_output_is_not_used": len(without), "blocks": len(by_block)},
            f"the output of the blocks {without[:8]} is not used: what follows reads another tensor, so their weights "
            "do nothing and get no gradient",
            "give each block the output of the one before: for block in self.blocks: x = block(x); then "
            "logits = self.head(self.norm(x))",
            "blocks whose output is not used",
            explains=("positions",),
        )
    if without or max(sizes.values()) == 0:
        return fail(
            {"blocks_without_gradient": len(without), "blocks": len(by_block)},
            f"no gradient reaches the blocks {without[:8]}: something above them is detached",
            "remove .detach(), .data and torch.no_grad() from the forward pass",
        )
    reached = {id(p) for p, g in zip(parameters.values(), gradients, strict=True) if g is not None}
    cut_off = [name for name in parameters if _is_cut_off(module, blocks, used, reached, name)]
    if cut_off:
        return fail(
            {"weights_without_gradient": len(cut_off), "first": cut_off[0]},
            f"no gradient reaches {cut_off[0]}{f' and {len(cut_off) - 1} more weights' if cut_off[1:] else ''}, "
            "although the model computes with them: the result is detached or not used, and they are never trained",
            "remove .detach(), .data and torch.no_grad() after these weights; freeze weights on purpose with "
            "requires_grad_(False)",
        )
    if found := find_lost_residuals(exam):
        return found
    if len(by_block) > 1 and max(by_block) / max(min(by_block), 1e-30) > 1e3 and by_block[0] < by_block[-1]:
        ratio = by_block[0] / by_block[-1]
        return warn(
            {"first_block": by_block[0], "last_block": by_block[-1], "ratio": ratio},
            f"gradients vanish on their way down: the first block gets {ratio:.1g} of what the last one gets",
            "pass the stream on as it is, x = x + sublayer(norm(x)), and normalize before each sublayer",
        )
    return find_missing_nonlinearity(exam)


def _gradients(exam: Examination, parameters: list[nn.Parameter], used: set[nn.Module]) -> Any:
    """Return the gradients of a number that depends on the whole output; add the modules that are called to `used`."""

    handles = [m.register_forward_pre_hook(lambda module, inputs: used.add(module)) for m in exam.module.modules()]
    with hooks(handles), exam.subject.evaluating(), torch.enable_grad():
        output = exam.subject.logits(exam.ids[:2])
        if not output.requires_grad:
            return None
        generator = torch.Generator().manual_seed(2)
        weights = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        return torch.autograd.grad((output * weights).mean(), parameters, allow_unused=True)


def _is_output_used(exam: Examination, block: nn.Module) -> bool:
    """Return whether the output of the model changes with that of a block."""

    def change(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(change(block, inputs, part) for part in output)
        return 2 * output + 1 if isinstance(output, Tensor) and output.is_floating_point() else output

    before = exam.run(exam.ids[:2])
    with block.register_forward_hook(change):
        return not torch.equal(exam.run(exam.ids[:2]), before)


def _is_cut_off(module: nn.Module, blocks: list[nn.Module], used: set[nn.Module], reached: set[int], name: str) -> bool:
    """Return whether a weight is of a table or of a part of a block that is called, but gets no gradient.

    Other modules may be called for an output that the logits do not depend on, such as the pooler of an encoder, and
    a module may use some of its weights only with certain inputs.
    """
    owner = module.get_submodule(name.rpartition(".")[0])
    in_block = any(owner is part for block in blocks for part in block.modules())
    has_gradient = any(id(p) in reached for p in owner.parameters(recurse=False))
    return owner in used and not has_gradient and (in_block or isinstance(owner, nn.Embedding))
