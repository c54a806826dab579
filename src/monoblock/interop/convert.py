"""From one form of model to another: our folder, a Hugging Face folder, GGUF; and .bin or .pt into any of them.

A pickle is opened in no other place than here, and here only by a process of its own (unpickle.py) that hands back
tensors in safetensors, which are then read like any stranger's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.folder import CONFIG, FORMAT, load_model, save_model
from monoblock.interop.labels import labels_in, write_labels
from monoblock.interop.safely import INDEX, WEIGHTS
from monoblock.untrusted import MB, inside, present, read_bytes, read_json

if TYPE_CHECKING:
    from monoblock.model import Transformer
    from monoblock.tokenizers.tokenizer import Tokenizer

FORMATS = ("monoblock", "hf", "gguf")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Beside the weights: small files that are read, or copied as they are.
BESIDE = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
LARGEST_BESIDE = 64 * MB
GENERATION = "generation_config.json"


class Source(NamedTuple):
    """A model that can be read: `folder` is ours, Hugging Face's, or a GGUF file."""

    kind: str  # monoblock, hf or gguf
    folder: Path
    model: Transformer
    tokenizer: Tokenizer | None


# -- pickles -----------------------------------------------------------------------------------------------------------


def unpickle(source: str | Path, target: str | Path, *, seconds: float = 600) -> int:
    """Write the tensors of a .pt or .bin file as safetensors, by a process that can do nothing else; their number."""
    source, target = Path(source), Path(target)
    if not source.is_file():
        raise FileError(f"there is no file {source}")
    program = Path(__file__).with_name("unpickle.py")
    job = json.dumps({"source": str(source.resolve()), "target": str(target.resolve())})
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(program)],
            input=job.encode(),
            capture_output=True,
            timeout=seconds,
            env=kept | {"OMP_NUM_THREADS": "1"},
            cwd=target.parent,
        )
        answer = json.loads(done.stdout) if done.stdout else {"error": f"its reader ended with {done.returncode}"}
    except subprocess.TimeoutExpired:
        answer = {"error": f"it takes longer than {seconds:g} s"}
    except ValueError:
        answer = {"error": "its reader gave no answer"}
    if "error" in answer:
        target.unlink(missing_ok=True)
        raise FileError(f"{source} cannot be used: {answer['error']}")
    return int(answer["tensors"])


def _without_pickle(folder: Path, beside: Path) -> None:
    """Make in `beside` the same Hugging Face folder with safetensors in the place of pickles."""
    for name in BESIDE:
        if present(folder, name):
            (beside / name).write_bytes(read_bytes(inside(folder, name), LARGEST_BESIDE))
    if present(folder, PICKLED_INDEX):
        places = read_json(inside(folder, PICKLED_INDEX)).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise FileError(f"{folder / PICKLED_INDEX} has no weight_map")
        files = {place: f"{n:05}.safetensors" for n, place in enumerate(dict.fromkeys(map(str, places.values())))}
        for place, name in files.items():
            unpickle(inside(folder, place), beside / name)
        index = {"weight_map": {name: files[str(place)] for name, place in places.items()}}
        (beside / INDEX).write_text(json.dumps(index))
    else:
        unpickle(inside(folder, _pickled(folder)), beside / WEIGHTS)


def _pickled(folder: Path) -> str:
    names = sorted(name for name in os.listdir(folder) if name.endswith(PICKLES) and name != "training_args.bin")
    if PICKLED in names:
        return PICKLED
    if len(names) != 1:
        raise FileError(f"{folder} has no {WEIGHTS}, and {len(names)} other files that could be weights; keep one")
    return names[0]


# -- reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def opened(source: str | Path) -> Iterator[Source]:
    """A model of any form; where it is pickled, a folder without pickles lives as long as the context."""
    from monoblock.model import Transformer
    from monoblock.tokenizers.tokenizer import Tokenizer

    given = Path(source)
    with tempfile.TemporaryDirectory(prefix="monoblock-") as beside:
        kind, folder = _kind(given), given
        if kind == "pickle":
            kind, folder = "hf", Path(beside)
            _without_pickle(given, folder)
        try:
            model = load_model(Transformer, folder)
            tokenizer = Tokenizer.from_pretrained(folder) if _has_tokenizer(folder) else None
        except FileError as problem:
            raise FileError(str(problem).replace(str(folder), str(given))) from None
        yield Source(kind, folder, model, tokenizer)


@contextmanager
def merged(source: Source, adapter: str | Path | None) -> Iterator[Source]:
    """The model with a LoRA adapter in its weights, in a folder that lives as long as the context."""
    if adapter is None:
        yield source
        return
    from monoblock.interop.adapters import base_in, load_adapter
    from monoblock.interop.digest import digest_of_body
    from monoblock.lora import folded

    digest = digest_of_body(source.model)
    load_adapter(source.model, adapter)
    if (base_in(adapter) or digest) != digest:
        raise FileError(f"{adapter} was trained beside other weights than those of {source.folder}; give that model")
    with tempfile.TemporaryDirectory(prefix="monoblock-") as beside:
        place = Path(beside) / source.folder.stem
        write(source._replace(model=folded(source.model)), place, "monoblock")
        with opened(place) as found:
            yield found


def _kind(given: Path) -> str:
    if given.is_file():
        if given.suffix == ".gguf":
            return "gguf"
        if given.suffix in PICKLES:
            raise FileError(f"{given} is weights without a configuration; give the folder with its {CONFIG}")
        raise FileError(f"{given} is no model; give a folder, or a GGUF file")
    if not present(given, CONFIG):
        raise FileError(f"{given} is no model folder: it has no {CONFIG}")
    if read_json(inside(given, CONFIG)).get("format") == FORMAT:
        return "monoblock"
    return "hf" if present(given, WEIGHTS) or present(given, INDEX) else "pickle"


def _has_tokenizer(folder: Path) -> bool:
    if folder.is_file():
        return True
    from monoblock.tokenizers.published import find

    return present(folder, "tokenizer.json") or find(folder) is not None


# -- writing -----------------------------------------------------------------------------------------------------------


def write(source: Source, target: str | Path, form: str, *, kind: str = "f16", family: str | None = None) -> None:
    """Write a model in one of FORMATS; `kind` is how GGUF stores matrices, `family` whose names Hugging Face gets."""
    if form not in FORMATS:
        raise ConfigError(f"format={form!r} is none of {', '.join(FORMATS)}{did_you_mean(form, FORMATS)}")
    target = Path(target)
    if target.resolve() == source.folder.resolve():
        raise ConfigError(f"{target} is what is converted; name another place for what is written")
    if form == "gguf":
        from monoblock.interop.gguf import save_gguf

        save_gguf(source.model, target, tokenizer=source.tokenizer, kind=kind, name=source.folder.stem)
        return
    if form == "hf":
        from monoblock.interop.hf import export_hf

        family = family or _own(source)
        export_hf(source.model, target, family=family, special=_special(source.tokenizer))
    else:
        save_model(source.model, target)
    head, labels = source.model.config.head, labels_in(source.folder)
    if head is not None and labels and head.classes == len(labels):
        write_labels(target, labels, form)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(target)
    if source.folder.is_dir() and present(source.folder, GENERATION):
        shutil.copyfile(inside(source.folder, GENERATION), target / GENERATION)


def _own(source: Source) -> str | None:
    """The family a Hugging Face folder is of already, which it stays."""
    return str(read_json(inside(source.folder, CONFIG))["model_type"]) if source.kind == "hf" else None


def _special(tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    return {f"{role}_token_id": number for role, number in ids.items() if number is not None}
