"""The Transformer, complete and usable: one block, and every published architecture as a configuration of it.

    import monoblock as mb

    config = mb.preset("gpt2")
    model = mb.Transformer(config)
    logits = model(ids)                         # (B, T, V)

The public names are those of __init__.pyi. Each is imported when it is first used, so that `import monoblock` takes
milliseconds and counting parameters does not import torch.
"""

import re
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def _read_stub() -> dict[str, str]:
    """Return the module of each public name, from the imports of the stub that type checkers read."""
    with open(f"{__file__}i", encoding="utf-8") as stub:
        imports = re.findall(r"from monoblock\.([\w.]+) import ([^\n(]+|\([^)]*\))", stub.read())
    return {name: module for module, names in imports for name in re.findall(r"(\w+) as", names)}


_HOME = dict(sorted(_read_stub().items()))
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from monoblock.errors import did_you_mean

        raise AttributeError(f"module 'monoblock' has no attribute {name!r}{did_you_mean(name, _HOME)}")
    module = import_module(f"monoblock.{_HOME[name]}")
    value = getattr(module, name)
    globals()[name] = value  # later uses do not call __getattr__
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
