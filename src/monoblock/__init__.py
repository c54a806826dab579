"""The Transformer, complete and usable: one block, and every published arrangement of it as a row of data.

    import monoblock as mb

    config = mb.preset("gpt2")
    model = mb.Transformer(config)
    logits = model(ids)                         # (B, T, V)

The public names are `__all__`. Each is imported when it is first used, so that `import monoblock` costs milliseconds
and whoever only wants to count parameters never waits for torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module it lives in.
_HOME = {
    "Alibi": "config",
    "AttentionConfig": "config",
    "BlockConfig": "config",
    "Buckets": "config",
    "Cache": "cache",
    "ConfigError": "errors",
    "EmbeddingConfig": "config",
    "ExpertsConfig": "config",
    "FeedForwardConfig": "config",
    "FileError": "errors",
    "FramesConfig": "config",
    "HeadConfig": "config",
    "InitConfig": "config",
    "InputError": "errors",
    "Learned": "config",
    "ModelConfig": "config",
    "MonoblockError": "errors",
    "NormConfig": "config",
    "PRESETS": "presets",
    "PatchConfig": "config",
    "QuantizeConfig": "config",
    "Recurrent": "recurrent",
    "RecurrentConfig": "config",
    "Repeat": "config",
    "Rotary": "config",
    "Scaling": "config",
    "Sinusoid": "config",
    "StackConfig": "config",
    "Tokenizer": "tokenizers.tokenizer",
    "Transformer": "model",
    "Where": "masks",
    "account": "accounting.report",
    "add_lora": "lora",
    "bart": "families",
    "bert": "families",
    "causal": "masks",
    "export_hf": "interop.hf",
    "gpt": "families",
    "interpolated": "resizing",
    "llama": "families",
    "load": "tasks.pipeline",
    "load_adapter": "interop.adapters",
    "merge_lora": "lora",
    "preset": "presets",
    "quantized": "quantize.convert",
    "same_document": "masks",
    "save_adapter": "interop.adapters",
    "t5": "families",
    "tiny": "presets",
    "trace": "inspection.trace",
    "unmerge_lora": "lora",
    "vary": "knobs",
    "vaswani": "families",
    "vit": "families",
    "window": "masks",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from monoblock.errors import did_you_mean

        raise AttributeError(f"module 'monoblock' has no attribute {name!r}{did_you_mean(name, _HOME)}")
    value = getattr(import_module(f"monoblock.{_HOME[name]}"), name)
    globals()[name] = value  # the next use of the name is a plain lookup
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
