"""Check that a function that takes a model was given one."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from monoblock.config.model import ModelConfig
from monoblock.errors import InputError, with_article

WRAPPERS = ("model", "module", "_orig_mod")  # where a pipeline, DistributedDataParallel and torch.compile keep a model
ADVICE = "give mb.load(folder).model or mb.Transformer(config)"


def check_model(
    value: object, kinds: type[nn.Module] | tuple[type[nn.Module], ...], function: str, *, also: str = ""
) -> None:
    """Raise InputError unless `value` is a model of one of `kinds`; the message says which `function` takes.

    also: what else the function takes, such as "the name of a preset".
    """
    if isinstance(value, kinds):
        return
    names = [with_article(kind.__name__) for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
    names += [also] * bool(also)
    raise InputError(f"{function} takes {' or '.join(names)}, but got {describe(value)}; {_advice(value, kinds)}")


def describe(value: object) -> str:
    """Say what an argument is, in a few words: "the text 'gpt2'", "the class Transformer", "a Linear", "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Path):
        return f"the text {str(value)!r:.60}"
    return with_article(type(value).__name__)


def _advice(value: object, kinds: type[nn.Module] | tuple[type[nn.Module], ...]) -> str:
    if isinstance(value, type):
        return f"give an instance, such as {value.__name__}(…)"
    if isinstance(value, str | Path):
        return f"load it first: mb.load({str(value)!r:.60}).model"
    if isinstance(value, ModelConfig):
        return "build the model first: mb.Transformer(config)"
    if hasattr(value, "to_monoblock"):
        return "write model.to_monoblock()"
    inner = next((name for name in WRAPPERS if isinstance(getattr(value, name, None), kinds)), None)
    return ADVICE if inner is None else f"write its attribute .{inner}"
