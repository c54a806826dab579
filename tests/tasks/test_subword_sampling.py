"""Random segmentations in training: of running text anew in every epoch, of every task that can, or refused."""

import json

import pytest
import torch

import monoblock as mb
from monoblock.errors import ConfigError, FileError
from monoblock.runs.build_data import build_task_data
from monoblock.runs.recipe import parse_recipe
from monoblock.training.events import StepEvent

WORDS = [
    "the",
    "king",
    "of",
    "the",
    "north",
    "went",
    "up",
    "and",
    "the",
    "kingdoms",
    "of",
    "the",
    "southern",
    "lands",
    "came",
    "down",
    "upon",
    "them",
]
SIZES = {"width": 16, "depth": 1, "heads": 2, "context": 24}
MODELS = {
    "causal_lm": {"family": "gpt"},
    "masked_lm": {"family": "bert", "head": "masked_lm"},
    "span_corruption": {"family": "t5"},
    "seq2seq": {"family": "vaswani"},
    "classification": {"family": "bert", "head": "classifier"},
    "token_classification": {"family": "bert", "head": "tagger"},
}
SAMPLED = {"bpe": {"dropout": 0.3}, "unigram": {"alpha": 0.1}}


@pytest.fixture
def corpora(tmp_path):
    lines = [f"{' '.join(WORDS[n % 5 :])} {n}" for n in range(150)]
    files = {
        "text.txt": "".join(f"{line}.\n" for line in lines),
        "documents.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in lines),
        "pairs.tsv": "".join(f"{line}\t{line[::-1]}\n" for line in lines),
        "labelled.tsv": "".join(f"l{n % 3}\t{line}\n" for n, line in enumerate(lines)),
        "two.tsv": "".join(f"l{n % 3}\t{line}\t{line[:9]}\n" for n, line in enumerate(lines)),
        "tagged.conll": "".join("".join(f"{w} T{len(w)}\n" for w in line.split()) + "\n" for line in lines),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


FILES = dict.fromkeys(("causal_lm", "masked_lm", "span_corruption"), "text.txt")
FILES |= {"seq2seq": "pairs.tsv", "classification": "labelled.tsv", "token_classification": "tagged.conll"}


def make_recipe(corpora, objective, kind="bpe", *, file=None, packing="stream", train=None, **tokenizer):
    tables = {
        "data": {"corpus": str(corpora / (file or FILES[objective])), "packing": packing},
        "tokenizer": {"kind": kind, "vocab": 420, **tokenizer},
        "model": {**MODELS[objective], **SIZES},
        "train": {"objective": objective, "batch": 4, "device": "cpu", "compile": "no", **(train or {})},
    }
    return parse_recipe(tables)


def batches(recipe, *steps):
    data = build_task_data(recipe, 24)
    return data, [data.build_batch(data.batch_plan.batch_at(step)) for step in steps]


def same(one, other):
    return one.inputs.keys() == other.inputs.keys() and all(
        torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs
    )


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("objective", MODELS)
def test_a_recipe_that_samples_trains_on_other_tokens_and_again_on_the_same(objective, kind, corpora):
    plain = batches(make_recipe(corpora, objective, kind), 0, 3)[1]
    recipe = make_recipe(corpora, objective, kind, **SAMPLED[kind])
    sampled, again = batches(recipe, 0, 3)[1], batches(recipe, 3, 0)[1]
    assert not any(same(a, b) for a, b in zip(plain, sampled, strict=True))
    assert all(same(a, b) for a, b in zip(sampled, again[::-1], strict=True)), "a batch depends on its step alone"


@pytest.mark.parametrize(
    ("objective", "file", "packing"),
    [("causal_lm", "documents.jsonl", "documents"), ("classification", "two.tsv", "stream")],
)
def test_packed_documents_and_pairs_of_texts_are_sampled(objective, file, packing, corpora):
    plain, sampled = (
        batches(make_recipe(corpora, objective, file=file, packing=packing, dropout=dropout), 1)[1][0]
        for dropout in (0.0, 0.3)
    )
    assert not same(plain, sampled)
    assert sampled.target_count > 0


@pytest.mark.parametrize("kind", SAMPLED)
def test_running_text_is_segmented_anew_in_every_epoch_and_is_still_the_text(kind, corpora):
    data = build_task_data(make_recipe(corpora, "causal_lm", kind, **SAMPLED[kind]), 24)
    text, per_epoch = (corpora / "text.txt").read_text(), data.batch_plan.batches
    streams = []
    for epoch in range(2):
        rows = [data.build_batch(data.batch_plan.batch_at(epoch * per_epoch + n)) for n in range(per_epoch)]
        blocks = [row.tolist() for batch in rows for row in batch.inputs["source"]]
        assert all(data.tokenizer.decode(block).strip() in text for block in blocks)
        assert len({tuple(block) for block in blocks}) == len(blocks), "no block twice in an epoch"
        streams.append({tuple(block) for block in blocks})
    assert len(streams[0] & streams[1]) < len(streams[0]) // 4


def test_the_smallest_dropout_changes_nothing_but_the_choice_of_blocks(corpora):
    data, plain = (build_task_data(make_recipe(corpora, "causal_lm", dropout=p), 24) for p in (1e-12, 0.0))
    assert data.batch_plan.batches == plain.batch_plan.batches

    def epoch(one):
        rows = [one.build_batch(one.batch_plan.batch_at(n)) for n in range(one.batch_plan.batches)]
        return {tuple(row.tolist()) for batch in rows for row in batch.inputs["source"]}

    assert len(epoch(data) ^ epoch(plain)) <= 8  # a few blocks do not fill a batch, and others are left out


def losses(recipe, folder, **options):
    events = []
    mb.train(recipe, out=folder, progress=False, callbacks=[events.append], **options)
    return {event.step: event.loss for event in events if isinstance(event, StepEvent)}


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(kind, corpora, tmp_path):
    """The run of two epochs is interrupted in the second, in which the text is segmented again."""
    steps = {"eval_every": 0, "save_every": 5, "batch": 40, "warmup": 2, "schedule": "constant"}
    recipes = [
        make_recipe(corpora, "causal_lm", kind, train={**steps, "steps": count}, **SAMPLED[kind]) for count in (15, 10)
    ]
    assert build_task_data(recipes[0], 24).batch_plan.batches < 10
    whole = losses(recipes[0], tmp_path / "whole")
    first = losses(recipes[1], tmp_path / "parts")
    assert first | losses(recipes[0], tmp_path / "parts", resume=True) == whole
    other = make_recipe(corpora, "causal_lm", kind, train={**steps, "steps": 17})
    with pytest.raises(FileError, match=r"another tokenizer\.(dropout|alpha)"):
        losses(other, tmp_path / "parts", resume=True)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        (
            "unigram",
            {"dropout": 0.1},
            r"tokenizer\.dropout does not apply: a unigram tokenizer is sampled with",
        ),
        ("bpe", {"alpha": 0.1}, r"tokenizer\.alpha does not apply: a bpe tokenizer.*write tokenizer\.dropout=0\.1"),
        ("char", {"dropout": 0.1}, r"a char tokenizer has only one segmentation of a text; leave it out"),
    ],
)
def test_a_key_of_another_kind_of_tokenizer_is_refused(kind, keys, message, corpora):
    with pytest.raises(ConfigError, match=message):
        build_task_data(make_recipe(corpora, "causal_lm", kind, **keys), 24)


def test_a_task_that_cannot_sample_says_so(corpora):
    rows = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello"}]
    (corpora / "chat.jsonl").write_text((json.dumps({"messages": rows}) + "\n") * 20)
    tables = {
        "data": {"corpus": str(corpora / "chat.jsonl")},
        "tokenizer": {"dropout": 0.1, "vocab": 300},
        "model": {**MODELS["causal_lm"], **SIZES},
        "train": {"objective": "chat"},
    }
    with pytest.raises(ConfigError, match=r"tokenizer\.dropout is for causal_lm, .*, not chat; leave it out"):
        build_task_data(parse_recipe(tables), 24)
