"""Convert between monoblock folders, Hugging Face folders and GGUF files; read .bin and .pt files.

Pickled files are opened only in a sandboxed process (unpickle.py), which writes their tensors to a safetensors file.
That file is then checked like any untrusted file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.huggingface.export import choose_family, export_hf
from monoblock.interop.huggingface.load import find_family
from monoblock.interop.model_folder import CONFIG_FILE, LABELS_FILE, ModelFolder, load_model, write_labels
from monoblock.interop.save import MAX_FILE_BYTES, OTHER_FILES, TOKENIZER_FILES, read_companions, save_model
from monoblock.interop.weights import INDEX_FILE, PICKLE_SUFFIXES, WEIGHTS_FILE
from monoblock.untrusted_files import safe_join

if TYPE_CHECKING:
    from monoblock.nn.transformer import Transformer

FORMATS = ("monoblock", "hf", "gguf")
PROGRAM = Path(__file__).with_name("unpickle.py")  # reads pickled files, in a process of its own
PICKLE_FILE, PICKLE_INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
COMPANION_FILES = (CONFIG_FILE, *TOKENIZER_FILES, *OTHER_FILES)  # are copied unchanged


class SourceModel(NamedTuple):
    """A loaded model and the folder or GGUF file that it was loaded from."""

    folder: ModelFolder
    model: Transformer


# -- pickles -----------------------------------------------------------------------------------------------------------


def pickle_to_safetensors(source: str | Path, target: str | Path, *, timeout: float = 600) -> int:
    """Convert a .pt or .bin file to safetensors in a sandboxed process; return the number of tensors."""
    source, target = Path(source), Path(target)
    if not source.is_file():
        raise FileError(f"there is no file {source} to convert")
    job = json.dumps({"source": str(source.resolve()), "target": str(target.resolve())})
    variables = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    try:
        process = subprocess.run(
            [sys.executable, "-I", str(PROGRAM)],
            input=job.encode(),
            capture_output=True,
            timeout=timeout,
            env=variables | {"OMP_NUM_THREADS": "1"},
            cwd=target.parent,
        )
        code = process.returncode
        result = json.loads(process.stdout) if process.stdout else {"error": f"its reader ended with exit code {code}"}
    except subprocess.TimeoutExpired:
        result = {"error": f"reading it takes longer than {timeout:g} s"}
    except ValueError:
        result = {"error": "the process that reads it returned no valid result"}
    if "error" in result:
        target.unlink(missing_ok=True)
        raise FileError(f"{source} cannot be used: {result['error']}")
    return int(result["tensors"])


def _convert_pickled_folder(folder: ModelFolder, target: Path) -> None:
    """Copy a Hugging Face folder to `target`, converting its pickled weights to safetensors."""
    for name in filter(folder.has, COMPANION_FILES):
        (target / name).write_bytes(folder.read_bytes(name, MAX_FILE_BYTES))
    if folder.has(PICKLE_INDEX_FILE):
        weight_map = folder.read_json(PICKLE_INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FileError(f"{folder.path / PICKLE_INDEX_FILE} has no weight_map, which lists the file of each tensor")
        shards = dict.fromkeys(map(str, weight_map.values()))
        files = {shard: f"{n:05}.safetensors" for n, shard in enumerate(shards)}
        for shard, file in files.items():
            pickle_to_safetensors(safe_join(folder.path, shard), target / file)
        index = {"weight_map": {name: files[str(shard)] for name, shard in weight_map.items()}}
        (target / INDEX_FILE).write_text(json.dumps(index))
        return
    names = sorted(name for name in os.listdir(folder.path) if name.endswith(PICKLE_SUFFIXES))
    names = [PICKLE_FILE] if PICKLE_FILE in names else [name for name in names if name != "training_args.bin"]
    if len(names) != 1:
        found = f"no {WEIGHTS_FILE}, and {len(names)} pickled files instead of one"
        raise FileError(f"{folder.path} has {found}; keep one file of weights")
    pickle_to_safetensors(safe_join(folder.path, names[0]), target / WEIGHTS_FILE)


# -- reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_model(source: str | Path, *, ignore_fields: Sequence[str] = ()) -> Iterator[SourceModel]:
    """Load a model of any format and yield it in a `with` block.

    A folder with pickled weights is first converted in a temporary folder, which is deleted when the block ends.
    `ignore_fields` are fields of a config.json or GGUF file that are read as if the file did not have them.
    """
    from monoblock.nn.transformer import Transformer

    folder, path = ModelFolder(source, ignore_fields), Path(source)
    if path.is_file() and path.suffix != ".gguf":
        if path.suffix not in PICKLE_SUFFIXES:
            raise FileError(f"{path} is not a model; give a folder, or a GGUF file")
        raise FileError(
            f"{path} has weights without a configuration; give a folder with this file and its {CONFIG_FILE}"
        )
    with tempfile.TemporaryDirectory(prefix="monoblock-") as temporary:
        if folder.format == "monoblock" and not isinstance(folder.config, ModelConfig):
            raise FileError(f"{path} contains no Transformer; Hugging Face and GGUF have no format for its model")
        if folder.format == "hf" and not folder.has(WEIGHTS_FILE) and not folder.has(INDEX_FILE):
            _convert_pickled_folder(folder, Path(temporary))
            folder = ModelFolder(temporary, ignore_fields)
        try:
            model = load_model(Transformer, folder)
            if folder.has_tokenizer:
                folder.tokenizer  # noqa: B018 - so that a faulty one is an error before anything is written
        except FileError as error:
            raise FileError(str(error).replace(str(folder.path), str(path))) from None
        yield SourceModel(folder, model)


@contextmanager
def merge_adapter(source: SourceModel, adapter: str | Path | None) -> Iterator[SourceModel]:
    """Yield the model with a LoRA adapter merged into its weights; with adapter=None, yield `source` itself.

    The merged model is written to a temporary folder, which is deleted when the `with` block ends.
    """
    if adapter is None:
        yield source
        return
    from monoblock.interop.adapters import load_adapter, read_base_digest
    from monoblock.interop.weights import compute_body_digest

    digest = compute_body_digest(source.model)
    load_adapter(source.model, adapter)
    if (read_base_digest(adapter) or digest) != digest:
        others = f"other weights than those of {source.folder.path}"
        raise FileError(f"{adapter} was trained for {others}; give the model it was trained for")
    with tempfile.TemporaryDirectory(prefix="monoblock-") as temporary:
        folder = Path(temporary) / source.folder.path.stem
        target_format = "monoblock"
        if source.folder.format == "hf":
            with suppress(ConfigError):  # the family cannot express the model with its new head
                choose_family(source.model.config, read_model_type(source.folder))
                target_format = "hf"
        write_model(source, folder, target_format)
        head, labels = source.model.config.head, ModelFolder(adapter)
        if head is not None and labels.has(LABELS_FILE) and head.classes == len(labels.labels):
            write_labels(folder, labels.labels, ModelFolder(folder).format)
        with open_model(folder) as merged:
            yield merged


# -- writing -----------------------------------------------------------------------------------------------------------


def write_model(
    source: SourceModel,
    target: str | Path,
    model_format: str,
    *,
    kind: str = "f16",
    family: str | None = None,
    dtype: str | None = None,
    with_tokenizer: bool = True,
) -> None:
    """Write a model in one of FORMATS.

    kind: the storage type of the matrices in a GGUF file: f32, f16 or q8_0.
    family: the model_type of a Hugging Face folder; by default that of the source, or the first that fits.
    dtype: the dtype of the weights in a folder; by default that of the source.
    with_tokenizer: whether to write the tokenizer of the source.
    """
    if model_format not in FORMATS:
        raise ConfigError(
            f"format={model_format!r} is not known; write {', '.join(FORMATS)}{did_you_mean(model_format, FORMATS)}"
        )
    target = Path(target)
    if target.resolve() == source.folder.path.resolve():
        raise ConfigError(f"{target} is the model to be converted; write to another path")
    if dtype is not None and model_format == "gguf":
        raise ConfigError(f"dtype={dtype} is for folders; for a GGUF file, write --kind f32, f16 or q8_0")
    companions = read_companions(source.folder)
    companions = companions if with_tokenizer else companions.without_tokenizer()
    if model_format == "gguf":
        from monoblock.interop.gguf.writer import save_gguf

        tokenizer = companions.load_tokenizer(source.model.config)
        save_gguf(
            source.model,
            target,
            tokenizer=tokenizer,
            generation=companions.generation,
            kind=kind,
            name=source.folder.path.stem,
        )
    elif model_format == "hf":
        export_hf(source.model, target, family=family, dtype=dtype, companions=companions)
    else:
        save_model(source.model, target, dtype=dtype, companions=companions)


def read_model_type(folder: ModelFolder) -> str:
    """Return the family of a Hugging Face folder: its model_type, or in old files the family of its class."""
    return find_family(folder.fields)[0].model_type
