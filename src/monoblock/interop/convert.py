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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.companions import MAX_FILE_BYTES, OTHER_FILES, TOKENIZER_FILES, has_tokenizer, read_companions
from monoblock.interop.folder import CONFIG_FILE, FORMAT_NAME, load_model, read_config, save_model
from monoblock.interop.huggingface.export import choose_family, export_hf
from monoblock.interop.labels import LABELS_FILE, read_labels, write_labels
from monoblock.interop.weights import INDEX_FILE, WEIGHTS_FILE
from monoblock.untrusted_files import has_file, read_bytes, read_json, safe_join

if TYPE_CHECKING:
    from monoblock.nn.transformer import Transformer
    from monoblock.tokenizers.tokenizer import Tokenizer

FORMATS = ("monoblock", "hf", "gguf")
PROGRAM = Path(__file__).with_name("unpickle.py")  # reads pickled files, in a process of its own
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_FILE, PICKLE_INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
COMPANION_FILES = (CONFIG_FILE, *TOKENIZER_FILES, *OTHER_FILES)  # are copied unchanged


class SourceModel(NamedTuple):
    """A loaded model and the folder or GGUF file that it was loaded from."""

    format: str  # monoblock, hf or gguf
    path: Path
    model: Transformer
    tokenizer: Tokenizer | None
    ignore_fields: tuple[str, ...] = ()  # fields of its config.json or GGUF file that were not read


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


def _convert_pickled_folder(folder: Path, target: Path) -> None:
    """Copy a Hugging Face folder to `target`, converting its pickled weights to safetensors."""
    for name in COMPANION_FILES:
        if has_file(folder, name):
            (target / name).write_bytes(read_bytes(safe_join(folder, name), MAX_FILE_BYTES))
    if has_file(folder, PICKLE_INDEX_FILE):
        weight_map = read_json(safe_join(folder, PICKLE_INDEX_FILE)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FileError(f"{folder / PICKLE_INDEX_FILE} has no weight_map, which lists the file of each tensor")
        shards = dict.fromkeys(map(str, weight_map.values()))
        files = {shard: f"{n:05}.safetensors" for n, shard in enumerate(shards)}
        for shard, file in files.items():
            pickle_to_safetensors(safe_join(folder, shard), target / file)
        index = {"weight_map": {name: files[str(shard)] for name, shard in weight_map.items()}}
        (target / INDEX_FILE).write_text(json.dumps(index))
    else:
        pickle_to_safetensors(safe_join(folder, _find_pickle(folder)), target / WEIGHTS_FILE)


def _find_pickle(folder: Path) -> str:
    names = sorted(
        name for name in os.listdir(folder) if name.endswith(PICKLE_SUFFIXES) and name != "training_args.bin"
    )
    if PICKLE_FILE in names:
        return PICKLE_FILE
    if len(names) != 1:
        raise FileError(
            f"{folder} has no {WEIGHTS_FILE}, and {len(names)} pickled files instead of one; keep one file of weights"
        )
    return names[0]


# -- reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_model(source: str | Path, *, ignore_fields: Sequence[str] = ()) -> Iterator[SourceModel]:
    """Load a model of any format and yield it in a `with` block.

    A folder with pickled weights is first converted in a temporary folder, which is deleted when the block ends.
    `ignore_fields` are fields of a config.json or GGUF file that are read as if the file did not have them.
    """
    from monoblock.nn.transformer import Transformer
    from monoblock.tokenizers.tokenizer import Tokenizer

    original = Path(source)
    with tempfile.TemporaryDirectory(prefix="monoblock-") as temporary:
        model_format, folder = _detect_format(original), original
        if model_format == "monoblock" and not isinstance(read_config(folder), ModelConfig):
            raise FileError(f"{original} contains no Transformer; Hugging Face and GGUF have no format for its model")
        if model_format == "pickle":
            model_format, folder = "hf", Path(temporary)
            _convert_pickled_folder(original, folder)
        try:
            model = load_model(Transformer, folder, ignore_fields=ignore_fields)
            tokenizer = Tokenizer.from_pretrained(folder) if has_tokenizer(folder) else None
        except FileError as error:
            raise FileError(str(error).replace(str(folder), str(original))) from None
        yield SourceModel(model_format, folder, model, tokenizer, tuple(ignore_fields))


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
        raise FileError(
            f"{adapter} was trained for other weights than those of {source.path}; give the model it was trained for"
        )
    with tempfile.TemporaryDirectory(prefix="monoblock-") as temporary:
        folder = Path(temporary) / source.path.stem
        write_model(source, folder, "hf" if _fits_source_family(source) else "monoblock")
        head = source.model.config.head
        if head is not None and has_file(adapter, LABELS_FILE) and head.classes == len(read_labels(Path(adapter))):
            write_labels(folder, read_labels(Path(adapter)), _detect_format(folder))
        with open_model(folder) as merged:
            yield merged


def _fits_source_family(source: SourceModel) -> bool:
    """Return whether the source is a Hugging Face folder whose family can express its model, even with a new head."""
    if source.format != "hf":
        return False
    try:
        choose_family(source.model.config, read_model_type(source.path))
    except ConfigError:
        return False
    return True


def _detect_format(path: Path) -> str:
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf"
        if path.suffix in PICKLE_SUFFIXES:
            raise FileError(
                f"{path} has weights without a configuration; give a folder with this file and its {CONFIG_FILE}"
            )
        raise FileError(f"{path} is not a model; give a folder, or a GGUF file")
    if not has_file(path, CONFIG_FILE):
        raise FileError(f"{path} is not a model folder: it has no {CONFIG_FILE}")
    if read_json(safe_join(path, CONFIG_FILE)).get("format") == FORMAT_NAME:
        return "monoblock"
    return "hf" if has_file(path, WEIGHTS_FILE) or has_file(path, INDEX_FILE) else "pickle"


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
    if target.resolve() == source.path.resolve():
        raise ConfigError(f"{target} is the model to be converted; write to another path")
    if dtype is not None and model_format == "gguf":
        raise ConfigError(f"dtype={dtype} is for folders; for a GGUF file, write --kind f32, f16 or q8_0")
    companions = read_companions(source.path)
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
            name=source.path.stem,
        )
    elif model_format == "hf":
        export_hf(source.model, target, family=family, dtype=dtype, companions=companions)
    else:
        save_model(source.model, target, dtype=dtype, companions=companions)


def read_model_type(folder: Path) -> str:
    """Return the family of a Hugging Face folder: its model_type, or in old files the family of its class."""
    from monoblock.interop.huggingface.load import find_family

    return find_family(read_json(safe_join(folder, CONFIG_FILE)))[0].model_type
