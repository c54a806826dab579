"""Load a model folder: a run, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig
from monoblock.errors import FileError, InputError
from monoblock.inference.fast_linear import arrange_weights
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.interop.folder import CONFIG_FILE, load_model
from monoblock.interop.hub import resolve_model_path
from monoblock.interop.labels import read_labels
from monoblock.interop.tokenizer_folder import load_tokenizer
from monoblock.model import Transformer
from monoblock.recipes.parse import RECIPE_FILE, recipe_path
from monoblock.runs.generation_config import read_generation_defaults
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.recipe import read_recipe
from monoblock.tasks.image_inputs import read_image_preprocessing
from monoblock.tasks.loaded_model import GenerationDefaults, LoadedModel
from monoblock.tasks.task import Task
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted_files import has_file, read_json, reading, safe_folder, safe_join

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from monoblock.parallel.world import World

TOKENIZER_FILE = "tokenizer.json"
POOLING_FOLDER = "1_Pooling"  # where sentence-transformers stores how token vectors are pooled


def load(
    folder: str | Path,
    *,
    task: Task | None = None,
    model_class: type[Transformer] = Transformer,
    device: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    force: bool = False,
    ignore_fields: Sequence[str] = (),
    ensemble: Sequence[str | Path] = (),
    world: World | None = None,
    optimize: bool = True,
) -> Pipeline:
    """Load a run folder, a Hugging Face folder or a GGUF file as a Pipeline; owner/name is fetched from the hub.

    owner/name@revision pins a commit, a tag or a branch of the hub.
    task: the task of the run, if it is not one of the package.
    model_class: the subclass of Transformer that was trained.
    force: use the tokenizer of a published folder even if it seems to belong to another model.
    device: None takes a CUDA GPU if there is one, else the CPU.
    ignore_fields: fields of a Hugging Face config.json or GGUF file that have no effect, but are not known here.
    ensemble: further models with the same tokenizer; to generate, the log-probabilities of all models are averaged.
    world: the processes that share every matrix of the model, from `mb.join_processes()`; all must call this and the
        methods of the pipeline, with the same arguments. Each reads and stores a part of the weights only.
    optimize: generate with a fast copy of the model (see `mb.optimize`), made at the first text; later changes of
        `pipeline.model`, such as hooks, are then not seen. False runs the modules of the model itself.
    """
    mesh = None if world is None else world.tensor_mesh
    if mesh is not None:
        device = mesh.device_type
    device = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    loaded, *others = (
        _load_checked(name, device, dtype, task, model_class, force=force, ignore_fields=ignore_fields, mesh=mesh)
        for name in (folder, *ensemble)
    )
    for name, other in zip(ensemble, others, strict=True):
        if other.tokenizer is None or other.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
            raise InputError(f"{name} has another tokenizer than {folder}; the models of an ensemble must share one")
    loaded.ensemble, loaded.optimize = tuple(other.model for other in others), optimize
    return Pipeline(loaded, task)


def _load_checked(name: str | Path, *arguments: Any, **options: Any) -> LoadedModel:
    """Call load_folder with the local folder of a model; raise FileError if there is none."""
    folder = resolve_model_path(name)
    if not folder.exists():
        raise FileError(f"there is no folder or file {folder}; train a model first, or give the folder of a model")
    with reading(folder):
        return load_folder(folder, *arguments, **options)


def load_folder(
    folder: Path,
    device: str,
    dtype: torch.dtype | str,
    task: Task | None = None,
    model_class: type[Transformer] = Transformer,
    *,
    force: bool = False,
    ignore_fields: Sequence[str] = (),
    mesh: DeviceMesh | None = None,
) -> LoadedModel:
    """Read the model of a folder with its tokenizer, labels, default decoding options and training recipe."""
    model = _load_model(folder, device, dtype, model_class, ignore_fields, mesh)
    tokenizer = load_tokenizer(folder, model.config, force=force) if _has_tokenizer(folder, model) else None
    if tokenizer is None:
        defaults = GenerationDefaults(from_recipe=has_file(folder, RECIPE_FILE))
    else:
        defaults = read_generation_defaults(folder, tokenizer)
    recipe = read_recipe(recipe_path(folder), task=task) if defaults.from_recipe else None
    return LoadedModel(
        model.eval(),
        cast(Tokenizer, tokenizer),  # None for images, and for a run on batches without one
        defaults,
        None if recipe is None else recipe.data,
        None if recipe is None else recipe.train.objective,
        None if recipe is None else recipe.task,
        _read_labels(folder, model),
        _read_pooling(folder),
        read_image_preprocessing(folder),
    )


def _has_tokenizer(folder: Path, model: Transformer | Recurrent) -> bool:
    """Return whether a folder should have a tokenizer: not for images, nor for a run on batches that was given none."""
    if isinstance(model.config, ModelConfig) and model.config.family == "vision":
        return False
    is_run = folder.is_dir() and has_file(folder, RECIPE_FILE)
    return not is_run or has_file(folder, TOKENIZER_FILE)


def _load_model(
    folder: Path,
    device: str,
    dtype: torch.dtype | str,
    model_class: type[Transformer],
    ignore_fields: Sequence[str],
    mesh: DeviceMesh | None,
) -> Transformer | Recurrent:
    data = _read_json_if_present(folder)
    if "format" in data and "recurrent" in data:
        return load_model(Recurrent, folder, dtype=dtype, device=device, mesh=mesh)
    if mesh is not None:
        return load_model(model_class, folder, dtype=dtype, device=device, ignore_fields=ignore_fields, mesh=mesh)
    model = model_class.from_pretrained(folder, dtype=dtype, device=device, ignore_fields=ignore_fields).eval()
    if model.device.type == "cuda" and reason_not_to_optimize(model) is None:
        arrange_weights(model)
    return model


def _read_labels(folder: Path, model: Transformer | Recurrent) -> list[str]:
    """Return the class names of the head; LABEL_0, LABEL_1, … if the folder names none."""
    head = model.config.head if isinstance(model.config, ModelConfig) else None
    classes = 0 if head is None else head.classes or 0
    labels = read_labels(folder) if classes else []
    if labels and len(labels) != classes:
        raise FileError(
            f"{folder} names {len(labels)} labels, but the head of its model has {classes} classes; make them agree"
        )
    return labels or [f"LABEL_{index}" for index in range(classes)]


def _read_pooling(folder: Path) -> str | None:
    """Return the pooling that sentence-transformers stored in the folder, None if there is none."""
    if not (folder.is_dir() and has_file(folder, POOLING_FOLDER)):
        return None
    data = _read_json_if_present(safe_folder(folder, POOLING_FOLDER))
    names = {"pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
    return next((pooling for name, pooling in names.items() if data.get(name) is True), None)


def _read_json_if_present(folder: Path) -> dict[str, Any]:
    return read_json(safe_join(folder, CONFIG_FILE)) if folder.is_dir() and has_file(folder, CONFIG_FILE) else {}
