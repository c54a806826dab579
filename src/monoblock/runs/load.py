"""Load a model folder: a run, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.errors import FileError, InputError
from monoblock.inference.fast_linear import arrange_weights
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.interop.model_folder import CONFIG_FILE, ModelFolder, load_model
from monoblock.interop.save import POOLING_FOLDER
from monoblock.model import Transformer
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.recipe import parse_recipe
from monoblock.tasks.images import ImagePreprocessing, read_image_preprocessing
from monoblock.tasks.loaded_model import GenerationDefaults, read_generation_defaults
from monoblock.tasks.task import Task
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted_files import Folder, reading, safe_folder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from monoblock.parallel.world import World

TOKENIZER_FILE = "tokenizer.json"


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
        load_folder(open_folder(name, ignore_fields), device, dtype, task, model_class, force=force, mesh=mesh)
        for name in (folder, *ensemble)
    )
    for name, other in zip(ensemble, others, strict=True):
        if other.tokenizer is None or other.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
            raise InputError(f"{name} has another tokenizer than {folder}; the models of an ensemble must share one")
    loaded.ensemble, loaded.optimize = tuple(other.model for other in others), optimize
    return loaded


def open_folder(path: str | Path, ignore_fields: Sequence[str] = ()) -> ModelFolder:
    """Return the folder or file of a model; raise FileError if there is none."""
    folder = ModelFolder(path, ignore_fields)
    if not folder.path.exists():
        raise FileError(f"there is no folder or file {folder.path}; train a model first, or give the folder of a model")
    return folder


def load_folder(
    folder: ModelFolder,
    device: str,
    dtype: torch.dtype | str,
    task: Task | None = None,
    model_class: type[Transformer] = Transformer,
    *,
    force: bool = False,
    mesh: DeviceMesh | None = None,
) -> Pipeline:
    """Read the model of a folder with its tokenizer, labels, default decoding options and training recipe."""
    with reading(folder.path):
        is_lstm = folder.format == "monoblock" and isinstance(folder.config, RecurrentConfig)
        kind: Any = Recurrent if is_lstm else model_class
        model = load_model(kind, folder, dtype=dtype, device=device, mesh=mesh).eval()
        if mesh is None and not is_lstm and model.device.type == "cuda" and reason_not_to_optimize(model) is None:
            arrange_weights(model)
        is_vision = model.config.family == "vision"
        tokenizer, defaults = None, GenerationDefaults(from_recipe=folder.is_run)
        if not is_vision and (not folder.is_run or folder.has(TOKENIZER_FILE)):  # a run on batches may have none
            tokenizer = folder.load_tokenizer(model.config, force=force)
            defaults = read_generation_defaults(folder, tokenizer)
        recipe = None
        if folder.recipe is not None:
            recipe = parse_recipe({"name": "recipe", **folder.recipe}, task=task)
        return Pipeline(
            model,
            cast(Tokenizer, tokenizer),  # None for images, and for a run on batches without one
            defaults,
            data_section=None if recipe is None else recipe.data,
            objective=None if recipe is None else recipe.train.objective,
            task_section=None if recipe is None else recipe.task,
            labels=_labels_of_head(folder, model),
            pooling=_read_pooling(folder),
            image_preprocessing=read_image_preprocessing(folder) if is_vision else ImagePreprocessing(),
            task=task,
        )


def _labels_of_head(folder: ModelFolder, model: Transformer | Recurrent) -> list[str]:
    """Return the class names of the head; LABEL_0, LABEL_1, … if the folder names none."""
    head = model.config.head if isinstance(model.config, ModelConfig) else None
    classes = 0 if head is None else head.classes or 0
    labels = folder.labels if classes else []
    if labels and len(labels) != classes:
        raise FileError(
            f"{folder.path} names {len(labels)} labels, but the head of its model has {classes} classes; "
            "make them agree"
        )
    return labels or [f"LABEL_{index}" for index in range(classes)]


def _read_pooling(folder: ModelFolder) -> str | None:
    """Return the pooling that sentence-transformers stored in the folder, None if there is none."""
    if not folder.has(POOLING_FOLDER):
        return None
    data = Folder(safe_folder(folder.path, POOLING_FOLDER)).read_json(CONFIG_FILE)
    names = {"pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
    return next((pooling for name, pooling in names.items() if data.get(name) is True), None)
