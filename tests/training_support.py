"""What the tests of training share: tiny corpora and recipes, runs in this process and in one of their own."""

import copy
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import tomli_w
import torch
from safetensors.torch import load_file

import monoblock
from monoblock.cli.main import run as cli
from monoblock.tasks.recipe import read
from monoblock.tasks.run import prepare
from monoblock.training import metrics
from monoblock.training.events import Stepped

WORDS = ("and", "the", "king", "said", "unto", "them", "go", "up", "out", "of", "my", "land", "for", "it", "is", "day")
# Sizes differ, so that no swapped axis passes; dropout is on, so that a lost random state shows.
RECIPE = {
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
PAIRS = {
    "data": {"corpus": "pairs.tsv"},
    "tokenizer": {"kind": "bpe", "vocab": 60, "marker": "@@", "dropout": 0.1},
    "model": {"family": "vaswani", "width": 21, "depth": 1, "heads": 3, "hidden": 34, "context": 47, "dropout": 0.1},
    "train": {"objective": "pairs", "tokens": 260, "label_smoothing": 0.1, "schedule": "noam", "optimizer": "adam"},
}
MASKED = {
    "tokenizer": {"kind": "char"},
    "model": {"family": "bert", "width": 21, "depth": 1, "heads": 3, "hidden": 34, "context": 13, "head": "masked_lm"},
    "train": {"objective": "masked"},
}
VARIATIONS = {
    "a stream of text": {},
    "two workers": {"train": {"workers": 2}},
    "packed documents": {"data": {"corpus": "documents.jsonl", "packing": "documents"}},
    "accumulation": {"train": {"accumulate": 4, "batch": 2}},
    "a moving average": {"train": {"ema": 0.99}},
    "an average of checkpoints": {"train": {"average": 2}},
    "Muon": {"train": {"optimizer": "muon"}},
    "pairs by length with cut words": PAIRS,
    "masked tokens": MASKED,
}


def sentence(draw, least=3, most=17):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def write_corpora(folder, sentences=160, seed=3):
    """The same sentences as one text, as documents and as pairs."""
    draw = random.Random(seed)
    rows = [sentence(draw) for _ in range(sentences)]
    (folder / "text.txt").write_text(".\n".join(rows))
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pairs = [sentence(draw, 2, 6) for _ in range(sentences)]
    (folder / "pairs.tsv").write_text("".join(f"{row}\t{' '.join(reversed(row.split()))}\n" for row in pairs))


def merged(base, *changes):
    """Tables of a recipe, later ones over earlier ones; another [model] family replaces the whole table."""
    out = copy.deepcopy(base)
    for change in changes:
        for section, table in change.items():
            fresh = section == "model" and "family" in table
            out[section] = copy.deepcopy(table) if fresh else {**out.get(section, {}), **table}
    return out


def write_recipe(folder, *changes):
    """A recipe file beside its corpora."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "text.txt").exists():
        write_corpora(folder)
    table = merged({"data": {"corpus": "text.txt"}}, RECIPE, *changes)
    table["data"]["corpus"] = str(folder / table["data"]["corpus"])
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(table))
    return path


# -- runs in this process -------------------------------------------------------------------------------------------


def start(recipe, out, *, resume=False, stop=lambda: False):
    """A run that is ready to go."""
    return prepare(read(str(recipe)), out, resume=resume, stop=stop)


def train(recipe, out, *, resume=False, change=lambda run: None):
    """Run to the end; `change` may lay hands on the run first.  Returns the run and its events."""
    run = start(recipe, out, resume=resume)
    change(run)
    try:
        return run, list(run.events(resume=resume))
    finally:
        torch.use_deterministic_algorithms(False)  # the loop sets it for its process


def train_until(recipe, out, step, *, resume=False, saving=False):
    """Run up to a step and drop it there as a kill would, or let it save as Ctrl-C would."""
    asked = False
    run = start(recipe, out, resume=resume, stop=lambda: asked)
    events = run.events(resume=resume)
    for event in events:
        if isinstance(event, Stepped) and event.step >= step:
            asked = True
            if not saving:
                events.close()
                break
    torch.use_deterministic_algorithms(False)
    return run


def command(*words):
    """The command line in this process; its exit code."""
    try:
        return cli([str(word) for word in words])
    finally:
        torch.use_deterministic_algorithms(False)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


# -- what a run leaves ----------------------------------------------------------------------------------------------


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def told(folder):
    """All lines of the metrics, without what a clock said."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in metrics.read(folder)]


def assert_same_run(actual, expected, steps):
    """Every step told once and in order, the same bits in every figure, the same bits in the final weights."""
    lines = told(actual)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert lines == told(expected)
    assert digest(actual / "model.safetensors") == digest(expected / "model.safetensors")
    last = f"checkpoints/step-{steps}/model.safetensors"
    assert_same_weights(load_file(actual / last), load_file(expected / last))


def listing(folder):
    """Every file below a folder with its time and its hash."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return [(str(path), path.stat().st_mtime_ns, digest(path)) for path in files]


# -- runs in a process of their own ---------------------------------------------------------------------------------


def launch(recipe, out, *words, **options):
    """`monoblock train` on one thread; what it says goes to a file, so that nobody waits for a reader."""
    source = str(Path(monoblock.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "monoblock", "train", str(recipe), "--out", str(out), *words]
    with open(out.with_suffix(".log"), "w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, **options)


def said(out):
    return out.with_suffix(".log").read_text()


def steps_told(out):
    """The last step in the metrics of a run that may be writing them."""
    path = out / metrics.FILE
    lines = path.read_bytes().splitlines()[-2:] if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0
