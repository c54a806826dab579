"""Batches without padding have the same losses, gradients and runs as padded batches."""

import numpy as np
import pytest
import torch
from support import randomize_weights, tiny_config
from training_support import (
    MASKED_LM_RECIPE,
    SEQ2SEQ_RECIPE,
    assert_same_run,
    read_metrics,
    train_to_end,
    train_until,
    write_recipe,
)

from monoblock.config.families import bert
from monoblock.config.knobs import vary
from monoblock.data.encode import IGNORE_INDEX
from monoblock.errors import ConfigError
from monoblock.model import Transformer
from monoblock.runs.recipe import check_parallel, read_recipe
from monoblock.training.collate import (
    NUM_FILL,
    SpecialTokenIds,
    TensorBatch,
    collate_classification,
    collate_masked_lm,
    collate_seq2seq,
    collate_token_classification,
    remove_padding,
    round_size,
)
from monoblock.training.loss import CrossEntropyLoss

SPECIAL = SpecialTokenIds(pad_id=0, bos_id=1, eos_id=2, mask_id=3, unmaskable_ids=frozenset(range(4)), vocab_size=61)
CPU = torch.device("cpu")


def random_texts(count, longest, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 61, rng.integers(1, longest + 1)) for _ in range(count)]


def encoder(head, **sizes):
    return bert(vocab=61, width=36, depth=2, heads=3, context=64, hidden=46, head=head, **sizes)


def seq2seq_case():
    rows = [{"source": s, "target": t} for s, t in zip(random_texts(21, 13), random_texts(21, 19, 1), strict=True)]
    return tiny_config("vaswani-base"), collate_seq2seq(rows, SPECIAL, start=1)


def masked_lm_case():
    rows = [{"ids": ids, "sample": number} for number, ids in enumerate(random_texts(21, 30))]
    return encoder("masked_lm"), collate_masked_lm(rows, SPECIAL, seed=0, epoch=0, rate=0.3)


def labelled_rows(label):
    return [{"ids": ids, "segments": ids % 2, **label(ids)} for ids in random_texts(21, 13)]


def classification_case():
    rows = labelled_rows(lambda ids: {"label": ids[0] % 4})
    return encoder("classifier", classes=4), collate_classification(rows, SPECIAL)


def token_classification_case():
    rows = labelled_rows(lambda ids: {"labels": np.where(ids % 3 == 0, IGNORE_INDEX, ids % 5)})
    return encoder("tagger", classes=5), collate_token_classification(rows, SPECIAL)


CASES = {
    case.__name__.removesuffix("_case"): case
    for case in (seq2seq_case, masked_lm_case, classification_case, token_classification_case)
}


def loss_and_gradient(model, inputs, labels):
    loss = CrossEntropyLoss(label_smoothing=0.1)(model, inputs, labels)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.detach(), torch.cat([grad.flatten() for grad in grads if grad is not None])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_padded_batch(name, dtype):
    config, (inputs, labels) = CASES[name]()
    model = randomize_weights(Transformer(config)).to(dtype).eval()
    expected = loss_and_gradient(model, inputs, labels)
    found = loss_and_gradient(model, *remove_padding(inputs, labels))
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    for actual, value in zip(found, expected, strict=True):
        assert (actual - value).norm() <= limit * value.norm()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_tokens_are_those_of_the_batch_and_a_few_that_fill_the_row(device_type):
    _, (inputs, labels) = seq2seq_case()
    unpadded, new_labels = remove_padding(inputs, labels, device_type)
    assert unpadded.keys() == {"source", "target", "source_documents", "target_documents"}
    count, documents = int(inputs["source_mask"].sum()), unpadded["source_documents"]
    assert torch.equal(unpadded["source"][0, :count], inputs["source"][inputs["source_mask"]])
    assert unpadded["source"].shape[1] == round_size(count + NUM_FILL)
    assert torch.equal(new_labels[new_labels != IGNORE_INDEX], labels[labels != IGNORE_INDEX])
    assert new_labels.shape == unpadded["target"].shape
    lengths = documents.offsets.diff().tolist()
    assert lengths[:21] == inputs["source_mask"].sum(1).tolist()
    assert all(0 < length <= documents.max_length for length in lengths[: 21 + NUM_FILL])
    assert documents.num_documents() % 8 == 0 == sum(lengths[21 + NUM_FILL :])


def test_short_texts_and_many_of_them_fill_rows():
    for count, longest in ((1, 1), (3, 2), (700, 3), (2000, 8), (300, 90)):
        rows = [{"source": s, "target": s[:1]} for s in random_texts(count, longest)]
        inputs, labels = collate_seq2seq(rows, SPECIAL, start=1)
        for device_type in ("cpu", "cuda"):
            unpadded, _ = remove_padding(inputs, labels, device_type)
            assert unpadded["source"].shape[1] <= 17 / 16 * inputs["source"].numel() + 16


def test_sizes_are_few():
    assert len({round_size(size) for size in range(4096, 8192)}) == 17
    assert all(size <= round_size(size) <= size + max(size // 16, 7) for size in range(1, 3000))


def test_a_batch_is_split_before_its_padding_is_removed():
    config, (inputs, labels) = seq2seq_case()
    model, loss = randomize_weights(Transformer(config)).double().eval(), CrossEntropyLoss()
    batch = TensorBatch(inputs, labels, 0, list(range(21)), unpadded=True)
    parts = [part.to(CPU) for part in batch.split_alike(4, 21)]
    assert [part.labels.shape[0] for part in parts] == [1] * 4
    total = sum(loss(model, part.inputs, part.labels) for part in parts)
    torch.testing.assert_close(total, loss(model, inputs, labels), rtol=1e-10, atol=0)
    empty = batch.without_targets().to(CPU)
    assert loss(model, empty.inputs, empty.labels) == 0


# -- runs -------------------------------------------------------------------------------------------------------------

UNPADDED = {"data": {"padding": "none"}}
RUNS = {
    "seq2seq": [
        SEQ2SEQ_RECIPE,
        {"tokenizer": {"dropout": 0.0}, "model": {**SEQ2SEQ_RECIPE["model"], "dropout": 0.0}},
        {"train": {"steps": 8, "accumulate": 2}, "generate": {"scored_rows": 0}},
    ],
    "masked_lm": [
        MASKED_LM_RECIPE,
        {"data": {"corpus": "documents.jsonl", "packing": "documents"}},
        {"model": {**MASKED_LM_RECIPE["model"], "dropout": 0.0, "context": 60}, "train": {"steps": 8}},
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_without_padding_has_the_same_losses(name, tmp_path):
    for folder, change in (("padded", {}), ("unpadded", UNPADDED)):
        train_to_end(write_recipe(tmp_path / folder, *RUNS[name], change), tmp_path / folder / "run")
    expected, found = (read_metrics(tmp_path / folder / "run") for folder in ("padded", "unpadded"))
    assert len(found) == len(expected)
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_a_run_without_padding_is_resumed_bit_for_bit(tmp_path):
    recipe = write_recipe(tmp_path, SEQ2SEQ_RECIPE, UNPADDED, {"train": {"steps": 9, "save_every": 3}})
    train_to_end(recipe, tmp_path / "whole")
    train_until(recipe, tmp_path / "broken", 5)
    train_to_end(recipe, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "broken", tmp_path / "whole", 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "data.padding=none is for .*seq2seq.*, not causal_lm"),
        ([SEQ2SEQ_RECIPE, {"train": {"compile": "graphs"}}], "train.compile=graphs needs batches of one shape"),
        (
            [{"train": {"objective": "classification", "adversarial": 0.1}, "model": {"family": "bert"}}],
            "train.adversarial needs one text in a row",
        ),
    ],
)
def test_what_needs_padding_is_refused(changes, message, tmp_path):
    recipe = write_recipe(tmp_path, *changes, UNPADDED)
    with pytest.raises(ConfigError, match=message):
        read_recipe(str(recipe))


def test_strategies_that_divide_a_row_are_refused(tmp_path):
    recipe = read_recipe(str(write_recipe(tmp_path, SEQ2SEQ_RECIPE, UNPADDED, {"train": {"parallel": "tp"}})))
    with pytest.raises(ConfigError, match=r"cannot be used with train\.parallel=tp"):
        check_parallel(recipe, 2)


def test_a_model_that_reads_rows_only_is_refused(tmp_path):
    lstm = {"family": "lstm", "width": 21, "depth": 1}
    recipe = write_recipe(tmp_path, {**SEQ2SEQ_RECIPE, "model": lstm}, UNPADDED)
    with pytest.raises(ConfigError, match="is for Transformers that read text"):
        train_to_end(recipe, tmp_path / "run")


def test_dropout_is_drawn_anew_for_the_tokens_that_remain():
    """With dropout the losses differ from those of padded batches, but training is the same on average."""
    config, (inputs, labels) = seq2seq_case()
    model = Transformer(vary(config, dropout=0.2)).train()
    unpadded, new_labels = remove_padding(inputs, labels)
    losses = [CrossEntropyLoss()(model, unpadded, new_labels).item() for _ in range(2)]
    assert losses[0] != losses[1]
