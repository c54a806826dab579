"""The Transformer, complete and usable: one block, and every published architecture as a configuration of it.

    import monoblock as mb

    config = mb.preset("gpt2")
    model = mb.Transformer(config)
    logits = model(ids)                         # (B, T, V)

The public names are listed in `__all__`. Each is imported when it is first used, so that `import monoblock` takes
milliseconds and counting parameters does not import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "Alibi": "config.model",
    "AttentionConfig": "config.model",
    "Block": "nn.block",
    "BlockConfig": "config.model",
    "Buckets": "config.model",
    "Cache": "nn.cache",
    "ConfigError": "errors",
    "EmbeddingConfig": "config.model",
    "Engine": "inference.engine",
    "Evaluation": "tasks.evaluation_report",
    "ExpertsConfig": "config.model",
    "FeedForwardConfig": "config.model",
    "FileError": "errors",
    "Finding": "doctor.report",
    "FramesConfig": "config.model",
    "HeadConfig": "config.model",
    "InitConfig": "config.model",
    "InputError": "errors",
    "Learned": "config.model",
    "ModelConfig": "config.model",
    "MonoblockError": "errors",
    "NormConfig": "config.model",
    "OptimizedModel": "inference.optimized",
    "PRESETS": "config.presets",
    "PackedDocuments": "nn.packed_documents",
    "PatchConfig": "config.model",
    "Pipeline": "runs.pipeline",
    "Prediction": "tasks.labels",
    "QuantizeConfig": "config.model",
    "Recurrent": "baselines.lstm",
    "RecurrentConfig": "config.model",
    "Repeat": "config.model",
    "Report": "doctor.report",
    "Rotary": "config.model",
    "Run": "runs.run",
    "Scaling": "config.model",
    "Settings": "inference.settings",
    "Sinusoid": "config.model",
    "StackConfig": "config.model",
    "Task": "tasks.task",
    "TaskData": "tasks.task_data",
    "TaskInputs": "tasks.task_data",
    "TokenPositions": "nn.masks",
    "Tokenizer": "tokenizers.tokenizer",
    "Transformer": "model",
    "ablate": "inspection.edits",
    "account": "runs.account",
    "add_lora": "nn.lora",
    "add_vector": "inspection.edits",
    "bart": "config.families",
    "bert": "config.families",
    "causal": "nn.masks",
    "diagnose": "runs.diagnose",
    "draw": "runs.draw",
    "evaluate": "runs.evaluate",
    "export_hf": "interop.huggingface.export",
    "fold_lora": "nn.lora",
    "gpt": "config.families",
    "interpolate": "nn.interpolate_positions",
    "join_processes": "parallel.inference",
    "llama": "config.families",
    "load": "runs.load",
    "load_adapter": "interop.adapters",
    "merge_lora": "nn.lora",
    "optimize": "inference.optimized",
    "patch": "inspection.edits",
    "preset": "config.presets",
    "quantize": "quantization.convert",
    "read_metrics": "training.events",
    "same_document": "nn.masks",
    "save_adapter": "interop.adapters",
    "t5": "config.families",
    "tiny": "config.presets",
    "trace": "inspection.trace",
    "train": "runs.train",
    "unmerge_lora": "nn.lora",
    "vary": "config.knobs",
    "vaswani": "config.families",
    "vit": "config.families",
    "window": "nn.masks",
}

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
