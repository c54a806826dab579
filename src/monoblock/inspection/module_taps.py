"""Call a tap in a module that has none, such as a transformers model, by forward hooks.

The output of every module is an activation with the name of the module.  The attention modules of transformers call an
attention function from a table; a function in its place gives the tap `….heads` (B, H, T, K) and, if it wants them,
`….weights` (B, H, T, S), which are computed beside the function that the model uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.nn.tap import Tap, apply_tap, tap_changes, tap_wants

ATTENTION_TABLE = "ALL_ATTENTION_FUNCTIONS"  # in the modules of transformers


@contextmanager
def tap_modules(model: nn.Module, tap: Tap) -> Iterator[None]:
    """Call a tap with the output of every module of a model inside the `with` block."""
    names = {id(module): name for name, module in model.named_modules() if name}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(_output_hook(tap, name))
                stack.callback(handle.remove)
        for table in _attention_tables(model):
            stack.enter_context(_replace_functions(table, names, tap))
        yield


def _output_hook(tap: Tap, name: str) -> Callable[..., Any]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return apply_tap(tap, name, output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (apply_tap(tap, name, output[0]), *output[1:])
        return None  # anything else stays as it is

    return hook


def _attention_tables(model: nn.Module) -> list[Any]:
    """Return the tables of attention functions that the modules of a transformers model read."""
    modules = {type(module).__module__ for module in model.modules()}
    tables = {
        id(table): table
        for name in modules
        if name.startswith("transformers.") and (table := getattr(sys.modules[name], ATTENTION_TABLE, None)) is not None
    }
    return list(tables.values())


@contextmanager
def _replace_functions(table: Any, names: dict[int, str], tap: Tap) -> Iterator[None]:
    """Replace the attention functions in a table; other models that run meanwhile are not affected."""
    original = dict(table._local_mapping)
    for key in ("eager", "sdpa"):
        table[key] = _tapped_function(original.get(key, table._global_mapping.get(key)), names, tap)
    try:
        yield
    finally:
        table._local_mapping.clear()
        table._local_mapping.update(original)


def _tapped_function(function: Callable[..., Any] | None, names: dict[int, str], tap: Tap) -> Callable[..., Any]:
    def run(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        run_original = function or eager
        out, weights = run_original(module, q, k, v, mask, **options)
        if id(module) not in names:
            return out, weights
        name = names[id(module)]
        if tap_wants(tap, f"{name}.weights"):
            if weights is None:
                _, weights = eager(module, q, k, v, _additive_mask(module, q, k, mask, options), **options)
            weights = apply_tap(tap, f"{name}.weights", weights)
            if tap_changes(tap, f"{name}.weights"):
                values = v if v.shape[1] == weights.shape[1] else v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
                out = (weights.to(v.dtype) @ values).transpose(1, 2)
        # (B, T, H, K) in transformers
        out = apply_tap(tap, f"{name}.heads", out.transpose(1, 2)).transpose(1, 2).contiguous()
        return out, weights

    return run


def _additive_mask(
    module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor | None:
    """Return the mask as the plain attention of transformers adds it to the scores.

    Its fused attention takes booleans, or no mask at all if the attention is causal.
    """
    least = torch.finfo(q.dtype).min
    if mask is None:
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not is_causal or q.shape[2] == 1:
            return None
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, least)
    return mask
