"""`mb.account`: the parameters, FLOPs and memory of a preset, a configuration, a model or a stored model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from monoblock.accounting.report import Account, account as account_config
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.interop.config_file import read_any_config

if TYPE_CHECKING:  # counting needs no torch
    from monoblock.nn.recurrent.lstm import Recurrent
    from monoblock.nn.transformer import Transformer


def account(
    what: ModelConfig | RecurrentConfig | Transformer | Recurrent | str | Path, *, name: str | None = None
) -> Account:
    """Return the costs of a model, computed from its configuration alone.

    what: a configuration, a model, the name of a preset, or the path of a model folder, config.json or GGUF file.
    name: the name in the report; by default that of the preset or the path.
    """
    if isinstance(what, str | Path):
        return account_config(read_any_config(str(what)), name=name or str(what))
    config = what if isinstance(what, ModelConfig | RecurrentConfig) else what.config
    return account_config(config, name=name)
