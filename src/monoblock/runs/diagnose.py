"""`mb.diagnose`: examine a model, a function of ids, the folder of a model, or a training run."""

from __future__ import annotations

import ast
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import torch

from monoblock.config.model import ModelConfig
from monoblock.doctor.checks import CHECKS
from monoblock.doctor.diagnose import diagnose_model
from monoblock.doctor.options import DiagnoseOptions, TrainingHistory, check_names
from monoblock.doctor.report import Report
from monoblock.errors import FileError, InputError, MonoblockError
from monoblock.interop.model_folder import ModelFolder, load_model
from monoblock.model import Transformer
from monoblock.recipes.schema import Recipe
from monoblock.runs.load import load_folder, open_folder
from monoblock.runs.recipe import parse_recipe
from monoblock.runs.run import Run
from monoblock.tasks.loaded_model import DECODER_START_KEY, LoadedModel
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.events import METRICS_FILE, read_metrics

CHEAP_SECONDS = 1.2  # after which no further check is begun before a training
CODE = (".py", ".ipynb")
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
MAX_CODE = 1_000_000  # bytes of a file in which a class is looked for


def diagnose(model: Any, **options: Unpack[DiagnoseOptions]) -> Report:
    """Examine a model and return a report: what is wrong, by which numbers, why, and what to write instead.

        report = mb.diagnose(model)                                 # ours, of transformers, any nn.Module
        report = mb.diagnose(lambda ids: f(ids), vocab=61, length=24)      # any function of ids (B, T) to logits
        report = mb.diagnose("runs/demo-1")                         # a model folder or a run
        print(report); report.ok; report.findings

    Pass what the model cannot show itself; the report says what was not checked.

    model: a model, a function that maps ids (B, T) to logits (B, T, V) or (B, classes), or a folder.
    vocab, length: the number of token ids, and of tokens that the model can read; for functions. Causality is also
        checked in a text of this length, or of the context if the model states it.
    kind: "causal", "bidirectional" or "encoder-decoder", if the model cannot say it. "bidirectional" turns the
        causality check off; otherwise a model with one logit per vocabulary entry is assumed to be causal.
    pad_id, mask_argument: the id of padding, and the name of the argument that takes a mask (1 for tokens).
    source: ids of a source; the model is then called as model(source, ids). source_mask_argument names its mask.
    cached: f(ids, state) or f(ids, state, mask), which returns the logits of the next ids and the new state; the first
        state is None, the mask covers all tokens so far.
    window, tied: what the model is meant to have: a window of so many tokens, an output tied to the embedding.
    documents_argument, prefix_argument: the names of the arguments that take the number of the document of each token,
        and True for the tokens of a prefix, both (B, T).
    tokenizer, texts: the tokenizer of the model, and texts that it is meant for.
    batch: ids and labels. loss: f(logits, labels); by default cross-entropy without labels of -100.
    step: f(), which makes a training step of the module and may return its loss. The weights are restored afterwards.
    optimizer: the optimizer that trains the module. generate: f(ids), which generates from ids with the module.
    objective, labels, generation: the task (such as "causal_lm"), names of classes, default decoding options.
    checks: names of checks, as a list or separated by commas; by default all.
    """
    check_names(options)
    if not isinstance(model, str | Path):
        return diagnose_model(model, **options)
    folder = open_folder(model)
    if lines := lines_to_write(folder.path):
        raise InputError(f"{folder.path} holds code, which is not run here; write in Python: {'; '.join(lines)}")
    found = read_folder(folder)
    given = {name: value for name, value in options.items() if value is not None}
    report = diagnose_model(found.pop("model"), **{**found, **given})
    report.subject = f"{folder.path} ({report.subject})"
    return report


def lines_to_write(path: Path) -> list[str]:
    """Return the Python that examines the model of a file of code or of pickled weights; [] for other files.

    Neither is run or unpickled here.
    """
    if path.suffix not in CODE + PICKLES or not path.is_file():
        return []
    source = path.with_suffix(".py")
    call = _call_of_last_module(source) or "GPT(...)"
    module = source.stem if source.stem.isidentifier() else "my_file"
    weights = f"; model.load_state_dict(torch.load({path.name!r}, weights_only=True))" if path.suffix in PICKLES else ""
    return [
        f"import torch, monoblock as mb; from {module} import {call.partition('(')[0]}",
        f"model = {call}{weights}",
        "print(mb.diagnose(model))",
    ]


def _call_of_last_module(path: Path) -> str | None:
    """Return the call that builds the last nn.Module of a file, with the arguments it needs; the file is not run."""
    if not path.is_file() or path.stat().st_size > MAX_CODE:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("Module") or ast.unparse(base) in calls for base in node.bases
        ):
            init = next((f.args for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
            needed = [] if init is None else init.args[1 : len(init.args) - len(init.defaults)]
            calls[node.name] = f"{node.name}({', '.join(f'{argument.arg}=...' for argument in needed)})"
    return next(reversed(calls.values()), None)


def read_folder(folder: ModelFolder) -> dict[str, Any]:
    """Read a model from its folder with what belongs to it, as arguments of `diagnose_model`."""
    try:
        loaded = load_folder(folder, "cpu", torch.float32, force=True)
    except (FileError, InputError):  # perhaps only of the tokenizer, which is missing or belongs to another model
        model, tokenizer = load_model(Transformer, folder), None
        with suppress(MonoblockError):  # whether it fits the model is for the doctor to say
            tokenizer = folder.tokenizer
        options: dict[str, Any] = {} if tokenizer is None else {"tokenizer": tokenizer}
        return {"model": model, **options, **_read_generation(folder, model, tokenizer)}
    options = {
        "model": loaded.model,
        "tokenizer": loaded.tokenizer,
        "objective": loaded.objective,
        "labels": [] if all(name.startswith("LABEL_") for name in loaded.labels) else loaded.labels,
        **_read_generation(folder, loaded.model, loaded.tokenizer),
    }
    if folder.is_run and folder.has(METRICS_FILE):
        options["history"] = read_history(folder, loaded)
    return {name: value for name, value in options.items() if value is not None}


def load_model_to_examine(folder: str | Path) -> Transformer:
    """Load the Transformer of a folder; other models cannot have a fault planted."""
    model = read_folder(ModelFolder(folder))["model"]
    if not isinstance(model, Transformer):
        raise InputError("faults are planted into Transformers; leave MODEL out to use a small built-in one")
    return model


def _read_generation(folder: ModelFolder, model: Any, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Read the decoding options of a folder as they are written there, possible or not; {} if there are none.

    Ids of special tokens that they lack are the tokenizer's, as in generation.
    """
    config = model.config
    if not isinstance(config, ModelConfig) or config.decoder is None:
        return {}
    options = folder.generation
    if tokenizer is not None:
        start = tokenizer.pad_id if tokenizer.bos_id is None else tokenizer.bos_id
        own = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, DECODER_START_KEY: start}
        options = {name: token for name, token in own.items() if token is not None} | options
    return {"generation": options} if options else {}


def read_history(folder: ModelFolder, loaded: LoadedModel) -> TrainingHistory:
    """Read the settings and the metrics of a run."""
    rows, recipe = read_metrics(folder.path), parse_recipe({"name": "recipe", **(folder.recipe or {})})
    config = loaded.model.config
    vocab = getattr(config, "vocab", None) or (None if loaded.tokenizer is None else loaded.tokenizer.vocab_size)
    head = getattr(config, "head", None)
    outputs = head.classes if head is not None and head.classes else vocab
    history = _settings(recipe)
    history.steps = [row for row in rows if "loss" in row]
    history.evaluations = [row for row in rows if "val_loss" in row and "final" not in row]
    history.uniform_loss = math.log(outputs) if outputs and outputs > 1 else None
    return history


def _settings(recipe: Recipe) -> TrainingHistory:
    section = recipe.train
    return TrainingHistory(
        lr=section.lr,
        warmup=section.warmup,
        total_steps=section.steps,
        clip=section.clip,
        optimizer=section.optimizer,
        beta2=section.beta2,
        weight_decay=section.weight_decay,
        starts_fresh="folder" not in recipe.model,
        epochs=section.epochs,
    )


def check_before_training(run: Run) -> Report | None:
    """Run the cheap checks on the model of a run, in less than two seconds; None if it cannot be examined."""
    options: dict[str, Any] = {
        "tokenizer": run.task_data.tokenizer,
        "objective": run.task.name,
        "history": _settings(run.recipe),
        "checks": [
            check.name for check in CHECKS if not check.is_slow and check.name != "head"
        ],  # a fresh head will be trained
    }
    try:
        return diagnose_model(run.model, max_seconds=CHEAP_SECONDS, **options)
    except MonoblockError:  # such as a model of audio; training goes on
        return None
