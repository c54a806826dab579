"""Helpers for the tests of training: small corpora and recipes, and runs in this or a separate process."""

import copy
import hashlib
import json
import random
from pathlib import Path

import strategy_worker
import tomli_w
import torch
from processes import Process, run_ranks
from safetensors.torch import load_file

import monoblock
from monoblock.cli.main import run as cli
from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training import events as training_events
from monoblock.training.events import METRICS_FILE, StepEvent

WORDS = ("and", "the", "king", "said", "unto", "them", "go", "up", "out", "of", "my", "land", "for", "it", "is", "day")
# Sizes differ, so that swapped axes fail; with dropout a lost random state changes the losses.
CAUSAL_RECIPE = {
    "tokenizer": {"kind": "char"},
    "model": {"family": "gpt", "width": 21, "depth": 2, "heads": 3, "context": 13, "dropout": 0.1},
    "train": {
        "steps": 23,
        "batch": 5,
        "warmup": 3,
        "save_every": 5,
        "eval_every": 10,
        "eval_batches": 2,
        "workers": 0,
        "device": "cpu",
    },
}
SEQ2SEQ_RECIPE = {
    "data": {"corpus": "pairs.tsv"},
    "tokenizer": {"kind": "bpe", "vocab": 60, "marker": "@@", "dropout": 0.1},
    "model": {"family": "vaswani", "width": 21, "depth": 1, "heads": 3, "hidden": 34, "context": 47, "dropout": 0.1},
    "train": {
        "objective": "seq2seq",
        "batch_tokens": 260,
        "label_smoothing": 0.1,
        "schedule": "noam",
        "optimizer": "adam",
    },
}
MASKED_LM_RECIPE = {
    "tokenizer": {"kind": "char"},
    "model": {"family": "bert", "width": 21, "depth": 1, "heads": 3, "hidden": 34, "context": 13, "head": "masked_lm"},
    "train": {"objective": "masked_lm"},
}
RECIPE_VARIATIONS = {
    "a stream of text": {},
    "two workers": {"train": {"workers": 2}},
    "packed documents": {"data": {"corpus": "documents.jsonl", "packing": "documents"}},
    "accumulation": {"train": {"accumulate": 4, "batch": 2}},
    "a moving average": {"train": {"ema": 0.99}},
    "an average of checkpoints": {"train": {"average_checkpoints": 2}},
    "a carried LSTM state": {
        "data": {"packing": "contiguous"},
        "model": {"family": "lstm", "width": 21, "depth": 2, "context": 13, "dropout": 0.1},
        "train": {"accumulate": 2, "batch": 2},
    },
    "batch norm, recomputed": {"model": {"norm": "batch"}, "train": {"activation_checkpointing": True}},
    "Muon": {"train": {"optimizer": "muon"}},
    "SGD": {"train": {"optimizer": "sgd", "lr": 0.5}},
    "pairs by length with cut words": SEQ2SEQ_RECIPE,
    "masked tokens": MASKED_LM_RECIPE,
}


def random_sentence(rng, shortest=3, longest=17):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(shortest, longest)))


def write_corpora(folder, sentences=160, seed=3):
    """Write random sentences as a text and as documents, and pairs of a sentence and its reverse."""
    rng = random.Random(seed)
    rows = [random_sentence(rng) for _ in range(sentences)]
    (folder / "text.txt").write_text(".\n".join(rows))
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pairs = [random_sentence(rng, 2, 6) for _ in range(sentences)]
    (folder / "pairs.tsv").write_text("".join(f"{row}\t{' '.join(reversed(row.split()))}\n" for row in pairs))


def merge_recipes(base, *changes):
    """Merge recipes, later ones over earlier ones; another model family replaces the [model] section."""
    merged = copy.deepcopy(base)
    for change in changes:
        for section, table in change.items():
            is_new_model = section == "model" and "family" in table
            merged[section] = copy.deepcopy(table) if is_new_model else {**merged.get(section, {}), **table}
    return merged


def write_recipe(folder, *changes):
    """Write a recipe file next to its corpora."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "text.txt").exists():
        write_corpora(folder)
    table = merge_recipes({"data": {"corpus": "text.txt"}}, CAUSAL_RECIPE, *changes)
    table["data"]["corpus"] = str(folder / table["data"]["corpus"])
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(table))
    return path


# -- runs in this process --------------------------------------------------------------------------------------------


def start_run(recipe, out, *, resume=False, stop=lambda: False):
    """Prepare a run without training."""
    return prepare_run(read_recipe(str(recipe)), out, resume=resume, stop=stop)


def train_to_end(recipe, out, *, resume=False, change=lambda run: None):
    """Train to the end, after `change(run)`; return the run and its events."""
    run = start_run(recipe, out, resume=resume)
    change(run)
    try:
        return run, list(run.events(resume=resume))
    finally:
        torch.use_deterministic_algorithms(False)  # the trainer sets it globally


def train_until(recipe, out, step, *, resume=False, save=False):
    """Train up to a step and abandon the run as a kill would, or save as Ctrl-C would."""
    should_stop = False
    run = start_run(recipe, out, resume=resume, stop=lambda: should_stop)
    events = run.events(resume=resume)
    for event in events:
        if isinstance(event, StepEvent) and event.step >= step:
            should_stop = True
            if not save:
                events.close()
                break
    torch.use_deterministic_algorithms(False)
    return run


def run_command(*words):
    """Run the command line in this process; return the exit code."""
    try:
        return cli([str(word) for word in words])
    finally:
        torch.use_deterministic_algorithms(False)


def clone_weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


# -- files of a run --------------------------------------------------------------------------------------------------


def file_digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_metrics(folder):
    """All lines of the metrics, without times."""
    lines = training_events.read_metrics(folder)
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_run(actual, expected, steps):
    """Assert that every step is logged once and in order, and that all metrics and final weights are equal."""
    lines = read_metrics(actual)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    for line, other in zip(lines, read_metrics(expected), strict=True):
        assert line == other
    assert file_digest(actual / "model.safetensors") == file_digest(expected / "model.safetensors")
    last = f"checkpoints/step-{steps}/model.safetensors"
    assert_same_weights(load_file(actual / last), load_file(expected / last))


def list_files(folder):
    """Every file below a folder, with its modification time and hash."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return [(str(path), path.stat().st_mtime_ns, file_digest(path)) for path in files]


# -- runs in a separate process --------------------------------------------------------------------------------------


def launch_training(recipe, out, *words, prepare=None):
    """Start `monoblock train` on one thread, with its output in a log file, after it has called `prepare`, if given."""
    words = ["train", str(recipe), "--out", str(out), *map(str, words)]
    source = str(Path(monoblock.__file__).parent.parent)  # of the processes that this one starts with --nproc
    return Process(_train, words, prepare, log=out.with_suffix(".log"), environment={"PYTHONPATH": source})


def _train(words, prepare):
    if prepare is not None:
        prepare()
    return cli(words)


def read_log(out):
    return out.with_suffix(".log").read_text()


def last_logged_step(out):
    """The last step in the metrics of a run, which may be writing them."""
    path = out / METRICS_FILE
    lines = path.read_bytes().splitlines()[-2:] if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


# -- runs in several processes with a strategy ---------------------------------------------------------------------


def run_jobs(folder, jobs, processes=2, dtype="float32"):
    """Run jobs of strategy_worker.py in several processes; return what each process saw."""
    (folder / "jobs.json").write_text(json.dumps([job | {"dtype": dtype} for job in jobs]))
    run_ranks(strategy_worker.main, folder, processes)
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(processes)]
