"""The folder of a run: the files that it has before the first training step, its identity, and its lock.

The identity is what must not change when a run is resumed. The lock, so that no two processes train in the same folder,
is a file that its process holds with `flock`; the system releases it when the process ends, however it ends. The file
names the process, for the error message, and for file systems without `flock`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError
from monoblock.interop.model_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, LABELS_FILE, RECIPE_FILE, format_config
from monoblock.parallel.faults import LOGS_FOLDER
from monoblock.recipes.schema import GenerateSection, Recipe
from monoblock.runs.initial_weights import WarmStart
from monoblock.tasks.loaded_model import DECODER_START_KEY, SETTINGS_FIELDS
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData
from monoblock.training.events import TENSORBOARD_FOLDER
from monoblock.untrusted_files import has_file, safe_folder, write_atomically

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "run.lock"
MAX_LOCK_BYTES = 4096
_descriptors: set[int] = set()  # of the locks that this process holds
CHECKPOINTS_FOLDER = "checkpoints"
# Adapters are stored there in the format of the library peft; in the model of the run they are merged into its weights.
ADAPTER_FOLDER = "adapter"
SUBFOLDERS = (CHECKPOINTS_FOLDER, LOGS_FOLDER, TENSORBOARD_FOLDER, ADAPTER_FOLDER)
# What a run that was killed before it stored its recipe may leave; a run can start in a folder that has nothing else.
BEFORE_THE_RUN = (LOCK_FILE, LOGS_FOLDER, f"{RECIPE_FILE}.tmp")


def has_run(folder: Path) -> bool:
    """Return whether a run was started in this folder."""
    return (folder / RECIPE_FILE).is_file()


def check_run_folder(folder: Path, resume: bool) -> None:
    """Raise an error unless a run can start in this folder or, with `resume`, be resumed."""
    for name in filter(lambda name: has_file(folder, name), SUBFOLDERS):
        safe_folder(folder, name)  # else what is written and deleted there would be elsewhere
    if resume and not has_run(folder):
        raise FileError(f"there is nothing to resume in {folder}; leave out --resume to start a run there")
    if not resume and folder.exists() and any(path.name not in BEFORE_THE_RUN for path in folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty; continue its run with --resume (in Python, resume=True), "
            "or choose another folder with --out (out=…)"
        )


def write_initial_files(
    folder: Path,
    recipe: Recipe,
    task: Task,
    config: ModelConfig | RecurrentConfig,
    task_data: TaskData,
    start: WarmStart | None = None,
) -> None:
    """Write the recipe, the configuration, the tokenizer, the labels and generation_config.json.

    start: the stored model that training starts from; its token ids and settings of generation are kept.
    """
    tokenizer, labels = task_data.tokenizer, task_data.labels
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileError(f"{folder} cannot be created: {problem.strerror}") from None
    write_atomically(folder / RECIPE_FILE, recipe.to_toml())
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    write_atomically(folder / CONFIG_FILE, format_config(config, fingerprint, start.published if start else None))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    stored = start.generation if start is not None and task.decoding != "none" else {}
    tokens = start.special_tokens if start is not None else {}
    defaults = _generation_config(recipe, task, task_data, config.context, stored) | dict(tokens)
    write_atomically(folder / GENERATION_CONFIG_FILE, json.dumps(defaults, indent=2) + "\n")
    for name, fields in task_data.model_files.items():
        write_atomically(folder / name, json.dumps(fields, indent=2) + "\n")
    if labels:
        write_atomically(folder / LABELS_FILE, json.dumps(labels, indent=2, ensure_ascii=False) + "\n")


def _generation_config(
    recipe: Recipe, task: Task, task_data: TaskData, context: int | None, stored: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of generation_config.json for a run.

    It has the options for sampling or beam search, as `task.decoding` says, and the ids of special tokens. If training
    starts from a model with settings of its own, `stored`, these are kept, but for those that the recipe changes.

    context: the maximum number of tokens of the model, None for no limit.
    """
    section, tokenizer = recipe.generate, task_data.tokenizer
    section = replace(section, max_new_tokens=section.new_tokens_within(context))
    if stored:
        default = GenerateSection()
        default = replace(default, max_new_tokens=default.new_tokens_within(context))
        changed = {name: value for name, value in asdict(section).items() if value != getattr(default, name)}
        stated = {name: value for name, value in changed.items() if name in SETTINGS_FIELDS}
        return {**stored, **stated} | ({"do_sample": section.temperature > 0} if "temperature" in changed else {})
    data: dict[str, Any] = {"max_new_tokens": section.max_new_tokens}
    if task.decoding == "sampling":
        sampling = {"temperature": section.temperature, "top_p": section.top_p, "top_k": section.top_k}
        data = {"do_sample": section.temperature > 0, **sampling, **data}
    elif task.decoding == "beam_search":
        search: dict[str, Any] = {"num_beams": section.num_beams, "length_penalty": section.length_penalty}
        if section.length_penalty_form != "length":  # a field of ours, which transformers ignores
            search["length_penalty_form"] = section.length_penalty_form
        data = {"do_sample": False, **search, **data}
    if tokenizer is None:
        return data
    tokens = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.bos_id}
    if "encoder-decoder" in task.families:
        has_bos = task.decoding != "none" and tokenizer.bos_id is not None
        tokens[DECODER_START_KEY] = tokenizer.bos_id if has_bos else tokenizer.pad_id
    return data | tokens


# The keys of [train] that may be changed when a run is resumed.
CHANGEABLE_ON_RESUME = (
    "steps",
    "epochs",
    "save_every",
    "save_async",
    "eval_every",
    "sample_every",
    "keep_checkpoints",
    "workers",
    "device",
    "compile",
    "parallel",
    "eval_batches",
    "load_best",
)


def run_identity(
    recipe: Recipe, task: Task, config: ModelConfig | RecurrentConfig, task_data: TaskData, start: WarmStart | None
) -> dict[str, Any]:
    """Return what must not change when a run is resumed.

    It has the keys of the recipe with their values, and digests of the configuration, the data, the initial weights and
    the tokenizer.
    """
    tables = recipe.to_tables()
    sections = ("train", "data", "model", task.name, *(["lora"] if recipe.lora.rank else []))
    values = {key: value for name in sections for key, value in _flatten(tables.get(name, {}), name)}
    for key in CHANGEABLE_ON_RESUME:
        values.pop(f"train.{key}", None)
    # Of the tokenizer, the digest says everything but how training texts are sampled.
    values |= {"tokenizer.dropout": recipe.tokenizer.dropout, "tokenizer.alpha": recipe.tokenizer.alpha}
    values["model configuration"] = json_digest(to_dict(config))
    for split, digest in task_data.content_digests.items():
        values[f"content of data.corpus, split {split}"] = digest
    if start is not None:
        values["set of weights in model.folder"] = start.digest
    return values | {"tokenizer": task_data.tokenizer.fingerprint if task_data.tokenizer is not None else None}


def _flatten(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all keys of nested tables; the name of a key begins with `path`, as in "train.lr"."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# -- the lock ---------------------------------------------------------------------------------------------------------


@contextmanager
def lock_run_folder(folder: Path, *, create: bool = True, is_main: bool = True) -> Iterator[None]:
    """Hold the lock of a run folder; raise FileError if another process holds it.

    create: create the folder if there is none, and delete it at the end if it is still empty; otherwise a missing
        folder is not locked.
    is_main: only the main process of several that train together locks the folder.
    """
    if not is_main or not (create or folder.is_dir()):
        yield
        return
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileError(f"{folder} cannot be created: {problem.strerror}") from None
    try:
        descriptor = _acquire(folder)
        _descriptors.add(descriptor)
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK_FILE).unlink()  # before the lock is released, so that it is not that of another process
            _descriptors.discard(descriptor)
            os.close(descriptor)
    finally:
        with suppress(OSError):  # it is not empty
            for path in new_folders:
                path.rmdir()


def _acquire(folder: Path) -> int:
    """Return the descriptor of the locked lock file."""
    path = folder / LOCK_FILE
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as problem:
            raise FileError(f"{path} cannot be written: {problem.strerror}") from None
        try:
            is_free = _try_flock(descriptor)
            owner = _read_owner(descriptor)
            if is_free is False or (is_free is None and _is_running(owner)):
                raise FileError(_describe_owner(folder, owner))
            if _is_same_file(descriptor, path):  # its last owner may have deleted it since it was opened
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
                return descriptor
        except OSError as problem:
            os.close(descriptor)
            raise FileError(f"{path} cannot be written: {problem.strerror}") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _try_flock(descriptor: int) -> bool | None:
    """Lock a file and return whether it was free; return None if the system cannot lock it."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Return what a lock file says about its process; {} if it is damaged or the process is about to write it."""
    try:
        owner = json.loads(os.pread(descriptor, MAX_LOCK_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}


def _describe_owner(folder: Path, owner: dict[str, Any]) -> str:
    process = f"process {owner['pid']}" if owner else "another process"
    if owner and owner.get("host") != platform.node():
        process += f" on {str(owner.get('host'))[:80]}"
    return (
        f"{process} is training in {folder}; wait until it ends, or stop it, or choose another folder with --out "
        "(in Python, out=…)"
    )


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": platform.node(), "boot": _boot_id(), "started": _start_time(os.getpid())}


def _is_running(owner: dict[str, Any]) -> bool:
    """Return whether the process that wrote a lock file still runs on this machine, since the same start of it."""
    if not owner or owner.get("host") != platform.node() or owner.get("boot") != _boot_id():
        return False
    pid = owner["pid"]
    if os.name != "posix" or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return owner.get("started") == _start_time(pid)


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _start_time(pid: int) -> str:
    """Return when a process started, as Linux counts it, so that another process with the same id is recognized."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return ""


def _close_in_child() -> None:
    """Close the locks in a forked process, such as a worker that loads data, which may outlive this one."""
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
