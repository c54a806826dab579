"""Training on prepared tokens: as on the text, memory-mapped, and with an exact position for any number of ranks."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from training_support import MASKED_LM_RECIPE, read_metrics, run_command, train_to_end, write_corpora, write_recipe

import monoblock
from monoblock.data.prepare import TokenizerPlan, prepare_tokens
from monoblock.data.token_folder import TokenDataset
from monoblock.errors import ConfigError
from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import batch_iterator, prepare_run
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.events import StepEvent

TOKENS = {"data": {"corpus": "tokens"}}
EXACT = {"model": {"dropout": 0.0}, "train": {"batch": 17, "save_every": 100, "eval_every": 0, "schedule": "constant"}}


def prepare(folder, validation=0.0, source="documents.jsonl"):
    """Write the corpora, a tokenizer and the tokens of the documents."""
    folder.mkdir(parents=True, exist_ok=True)
    write_corpora(folder)
    texts = [json.loads(line)["text"] for line in (folder / "documents.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.train("char", texts, 60)
    tokenizer.save_pretrained(folder / "tokenizer")
    plan, sizes = TokenizerPlan(tokenizer), {"shard_tokens": 1009, "part_bytes": 2000}
    prepare_tokens([str(folder / source)], folder / "tokens", tokenizer=plan, validation=validation, **sizes)
    return folder / "tokens"


def losses(events):
    return [event.loss for event in events if isinstance(event, StepEvent)]


def test_training_on_tokens_equals_training_on_the_text(tmp_path):
    prepare(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/train.jsonl").write_bytes((tmp_path / "documents.jsonl").read_bytes())
    _, expected = train_to_end(
        write_recipe(tmp_path, {"data": {"corpus": "text"}, "tokenizer": {"folder": str(tmp_path / "tokenizer")}}),
        tmp_path / "a",
    )
    run, events = train_to_end(write_recipe(tmp_path, TOKENS), tmp_path / "b")
    assert losses(events) == losses(expected), "bit for bit"
    assert run.task_data.evaluation_batches is None
    assert Tokenizer.from_pretrained(tmp_path / "b").fingerprint == TokenDataset(tmp_path / "tokens").fingerprint


def test_validation_tokens_give_the_validation_loss_and_evaluate_the_same(tmp_path, capsys):
    prepare(tmp_path, validation=0.1)
    run, _ = train_to_end(write_recipe(tmp_path, TOKENS, {"train": {"eval_batches": 0}}), tmp_path / "run")
    lines = [line for line in read_metrics(tmp_path / "run") if "val_loss" in line]
    valid = TokenDataset(tmp_path / "tokens", "valid")
    assert lines[-1]["val_tokens"] == len(valid) - 1
    assert run.task_data.bytes_per_token == valid.files.bytes / len(valid)
    assert run_command("evaluate", tmp_path / "run", tmp_path / "tokens", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["split"] == "valid"
    assert figures["bits_per_byte"] == pytest.approx(lines[-1]["val_bits_per_byte"], rel=1e-3)


def test_the_tokens_are_mapped_and_not_read(tmp_path):
    prepare(tmp_path)
    run = prepare_run(read_recipe(str(write_recipe(tmp_path, TOKENS))), tmp_path / "run")
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / "tokens/train-0") in line
    ]
    assert len(mapped) >= 3
    assert all("r--s" in line or "r--p" in line for line in mapped)
    assert run.task_data.summary.startswith(f"{len(TokenDataset(tmp_path / 'tokens')):,} tokens to train on")


# -- the position ------------------------------------------------------------------------------------------------------


def part_of(rank, size):
    """The world of one of several processes, as far as reading batches needs it."""
    return SimpleNamespace(data_rank=rank, data_size=size)


@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_is_repeated_or_skipped_when_the_number_of_ranks_changes(tmp_path, workers):
    prepare(tmp_path)
    recipe = read_recipe(str(write_recipe(tmp_path, TOKENS, EXACT, {"train": {"workers": workers, "steps": 10**6}})))
    run = prepare_run(recipe, tmp_path / "run")
    plan = run.task_data.batch_plan
    assert plan.batches > 12
    whole = batch_iterator(recipe.train, run.task_data, part_of(0, 1))(0)
    expected = [next(whole) for _ in range(plan.batches + 2)]
    del whole
    cuts = [0, 3, 4, plan.batches // 2, plan.batches - 1, plan.batches + 2]
    for size, (first, stop) in zip((2, 1, 2, 3, 1), pairwise(cuts), strict=True):
        ranks = [batch_iterator(recipe.train, run.task_data, part_of(rank, size))(first) for rank in range(size)]
        for step in range(first, stop):
            shares = [next(batches) for batches in ranks]
            rows = sorted(row for share in shares for row in share.inputs["source"].tolist())
            assert rows == sorted(expected[step].inputs["source"].tolist()), "the ranks divide the batch"
            assert {share.epoch for share in shares} == {expected[step].epoch}
        del ranks
    epoch = [sample for batch in expected for sample in batch.samples if batch.epoch == 0]
    assert len(epoch) == len(set(epoch)) == plan.batches * 17, "none is repeated"
    assert plan.count - len(epoch) < 17, "only samples that do not fill a batch are left out"


# Records each sample that a process builds: its rank, epoch and index.
RECORDER = """
import os
from monoblock.data.blocks import BlockDataset
read = BlockDataset.sample
def sample(self, index, epoch, seed):
    with open(os.environ["SAMPLE_LOG"], "a") as log:
        log.write(f"{os.environ.get('RANK', '0')} {epoch} {index}\\n")
    return read(self, index, epoch, seed)
BlockDataset.sample = sample
"""


def train_and_record(folder, out, steps, processes, *, resume):
    """Run `monoblock train` up to a step in a number of processes; return (rank, epoch, sample) of all samples."""
    (folder / "recorder").mkdir(exist_ok=True)
    (folder / "recorder/sitecustomize.py").write_text(RECORDER)
    log = folder / "samples.log"
    log.write_text("")
    paths = os.pathsep.join([str(folder / "recorder"), str(Path(monoblock.__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "SAMPLE_LOG": str(log)}
    words = ["train", folder / "recipe.toml", f"train.steps={steps}", "--out", out]
    words += ["--nproc", "2"] * (processes == 2) + ["--resume"] * resume
    command = [sys.executable, "-m", "monoblock", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, line.split())) for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_then_one_then_two_see_every_sample_once(tmp_path):
    prepare(tmp_path)
    write_recipe(tmp_path, TOKENS, EXACT)
    plan = prepare_run(read_recipe(str(tmp_path / "recipe.toml")), tmp_path / "plan").task_data.batch_plan
    last = plan.batches + 2
    rows, first = [], 0
    for processes, stop in ((2, 4), (1, 7), (2, last)):
        seen = train_and_record(tmp_path, tmp_path / "run", stop, processes, resume=first > 0)
        assert {rank for rank, _, _ in seen} == set(range(processes)), "every rank reads a part"
        expected = [plan.batch_at(step) for step in range(first, stop)]
        assert sorted((epoch, index) for _, epoch, index in seen) == sorted(
            (batch.epoch, index) for batch in expected for index in batch.indices.tolist()
        )
        rows += seen
        first = stop
    epoch = [index for _, epoch, index in rows if epoch == 0]
    assert len(epoch) == len(set(epoch)) == plan.batches * 17
    train_and_record(tmp_path, tmp_path / "whole", last, 1, resume=False)
    lines, whole = ([line for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("run", "whole"))
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in whole], rel=1e-5)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": {"kind": "char", "folder": "other"}}, "was prepared with another tokenizer"),
        ({"tokenizer": {"kind": "bpe", "dropout": 0.1}}, "cannot be segmented anew|is for bpe|dropout"),
        ({"data": {"corpus": "tokens", "limit": 3}}, "data.limit counts texts"),
        ({"data": {"corpus": "tokens", "validation_rows": 3}}, "was divided when it was prepared"),
        ({"train": {"objective": "masked_lm"}, "model": MASKED_LM_RECIPE["model"]}, "the corpus .* is tokens"),
    ],
)
def test_what_tokens_do_not_allow_is_one_line(tmp_path, changes, message):
    prepare(tmp_path)
    Tokenizer.train("char", ["abc"], 20).save_pretrained(tmp_path / "other")
    if "folder" in changes.get("tokenizer", {}):
        changes = {"tokenizer": {"folder": str(tmp_path / "other")}}
    with pytest.raises(ConfigError, match=message):
        prepare_run(read_recipe(str(write_recipe(tmp_path, TOKENS, changes))), tmp_path / "run")


def test_a_run_is_not_resumed_on_other_tokens(tmp_path, capsys):
    prepare(tmp_path)
    recipe = write_recipe(tmp_path, TOKENS, {"train": {"steps": 6}})
    assert run_command("train", recipe, "--out", tmp_path / "run") == 0
    shard = tmp_path / "tokens/manifest.json"
    manifest = json.loads(shard.read_text())
    manifest["train"]["shards"][0]["sha256"] = "0" * 64
    shard.write_text(json.dumps(manifest, indent=2))
    assert run_command("train", recipe, "train.steps=8", "--resume", "--out", tmp_path / "run") == 1
    assert "another content of data.corpus, split train" in capsys.readouterr().err


def test_a_damaged_shard_is_named(tmp_path, capsys):
    tokens = prepare(tmp_path)
    recipe = write_recipe(tmp_path, TOKENS)
    (tokens / "train-00001.bin").write_bytes(b"short")
    assert run_command("train", recipe, "--out", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert "train-00001.bin has 5 bytes where the manifest states 2,018" in error
    assert error.count("\n") == 1
