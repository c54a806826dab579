"""Read the configuration of a model from config.json, whether monoblock or transformers wrote it, or from a GGUF file.

This needs no torch, so that models are counted quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monoblock.config.model import AnyConfig, ModelConfig, parse_config
from monoblock.config.presets import PRESETS, preset
from monoblock.errors import ConfigError, FileError
from monoblock.untrusted_files import has_file, parse_json, read_bytes, reading, safe_join

CONFIG_FILE, FORMAT_NAME = "config.json", "monoblock"
ADVICE = "give a preset, a config.json file or a model folder"


def read_any_config(what: str) -> AnyConfig:
    """Return the configuration of `what`: a preset, a config.json, a GGUF file or a model folder."""
    if what in PRESETS:
        return PRESETS[what].config
    if not what:
        raise ConfigError("WHAT is empty; give the name of a preset, a config.json file or a model folder")
    path = Path(what)
    file = path
    if path.is_dir():
        if not has_file(path, CONFIG_FILE):
            raise FileError(f"the folder {what} has no {CONFIG_FILE}; {ADVICE}")
        file = safe_join(path, CONFIG_FILE)
    elif not file.is_file():
        if path.name != what or path.suffix == ".json":  # it looks like a path
            raise FileError(f"there is no file or folder {what}; {ADVICE}")
        return preset(what)  # raises an error that names similar presets
    with reading(file):
        if file.suffix == ".gguf":
            from monoblock.interop.gguf.reader import read_gguf_config

            return read_gguf_config(file)
        return _read_config_file(file)


def _read_config_file(file: Path) -> AnyConfig:
    data: Any = parse_json(read_bytes(file), str(file))
    if not isinstance(data, dict) or data.get("format", FORMAT_NAME) != FORMAT_NAME:
        raise FileError(
            f"{file} is not the configuration of a monoblock model; give a config.json that monoblock wrote"
        )
    if "model_type" in data or "architectures" in data:
        return _read_hf_config(file, data)
    return parse_config(data)


def _read_hf_config(file: Path, data: dict[str, Any]) -> ModelConfig:
    from monoblock.interop.huggingface.load import config_from_hf

    try:
        return config_from_hf(data)
    except (ConfigError, FileError) as problem:
        raise FileError(f"{file}: {problem}") from None
