"""What experiments measure, against closed forms."""

import json
import math

import numpy as np
import pytest
import torch

from monoblock.config.families import gpt, vaswani
from monoblock.data.token_folder import TokenDataset
from monoblock.errors import ConfigError
from monoblock.experiments.library import backtranslation
from monoblock.experiments.library.kv_cache import cache_bytes, count_positions
from monoblock.experiments.library.norms import neighbour_change
from monoblock.experiments.library.residuals import ROWS, initial_norms, trained_gradients, trained_norms
from monoblock.experiments.library.scale import jacobian_norm
from monoblock.experiments.library.scaling_law import fit_line, predict_last, summarize
from monoblock.experiments.library.sparse import SparseOptions
from monoblock.experiments.timing import saved_bytes
from monoblock.experiments.training import training_metrics
from monoblock.model import Transformer
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.task_data import unigram_loss
from monoblock.tokenizers.tokenizer import Tokenizer


def test_the_jacobian_norm_is_that_of_the_softmax():
    scores = torch.randn(5, 7, dtype=torch.float64)
    jacobians = [torch.autograd.functional.jacobian(lambda x: x.softmax(-1), row) for row in scores]
    expected = torch.stack([jacobian.norm() for jacobian in jacobians])
    torch.testing.assert_close(jacobian_norm(scores.softmax(-1)), expected)


def test_a_law_predicts_its_own_points_and_misses_others_by_their_factor():
    points = [(x, 3.0 - 0.5 * x) for x in (0.0, 1.0, 2.0, 4.0)]
    assert predict_last(points) == pytest.approx(1.0)
    assert predict_last([*points[:-1], (4.0, 1.0 + math.log(2))]) == pytest.approx(0.5)


def test_lengths_of_sparse_are_sorted_and_divide_the_longest():
    assert SparseOptions(lengths="1024,256,1024").lengths_on("cpu") == [256, 1024]
    for values, words in (
        ({"lengths": "2000,256"}, "256 tokens do not divide 2000"),
        ({"lengths": 0}, "not a list of whole numbers"),
        ({"heads": 3}, "not a multiple of heads=3"),
        ({"rounds": -1}, "rounds"),
    ):
        with pytest.raises(ConfigError, match=words):
            SparseOptions(**values)


def test_the_fit_recovers_a_power_law():
    sizes = {"a": 1e3, "b": 1e4, "c": 1e5, "d": 1e6}
    results = {arm: {1: {"block_parameters": size, "loss": 5 * size**-0.07}} for arm, size in sizes.items()}
    fit = summarize(results)["fit"][1]
    assert fit["exponent"] == pytest.approx(0.07)
    assert fit["exponent_error"] == pytest.approx(0, abs=1e-9)
    assert summarize({"a": results["a"], "b": results["b"]}) == {}
    x, y = np.random.default_rng(0).normal(size=(2, 9))
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    assert fit_line(x, y) == pytest.approx((slope, math.sqrt(covariance[0, 0])))


def test_the_curve_of_a_method_of_back_translation_starts_without_synthetic_pairs():
    results = {
        arm: {seed: {"bleu_lowercased": bleu + seed, "chrf": 50.0} for seed in seeds}
        for arm, bleu, seeds in (
            ("none", 10.0, (1, 2)),
            ("beam-0.5", 20.0, (1,)),
            ("beam", 30.0, (1, 2)),
            ("beam-4", 40.0, (1, 2)),
            ("tagged", 25.0, (1, 2)),
            ("tagged-4", 35.0, (1,)),
        )
    }
    found = backtranslation.summarize(results)
    assert set(found) == {"beam", "tagged"}
    assert found["beam"][1] == {
        "bleu_lowercased": 31.0,
        "chrf": 50.0,
        "bleu_by_ratio": {"0": 11.0, "0.5": 21.0, "1": 31.0, "4": 41.0},
    }
    assert found["beam"][2]["bleu_by_ratio"] == {"0": 12.0, "1": 32.0, "4": 42.0}
    assert found["tagged"][1]["bleu_by_ratio"] == {"0": 11.0, "1": 26.0, "4": 36.0}
    assert found["tagged"][1]["bleu_minus_beam"] == {"1": -5.0, "4": -5.0}
    assert "bleu_by_ratio" not in found["tagged"][2]  # two points, which are in the table already
    del results["beam"]  # the arm that would have the curve
    results["tagged"][1].pop("bleu_lowercased")
    assert backtranslation.summarize(results) == {}


def test_the_cache_saves_66_times_the_positions():
    assert count_positions(50, 100, use_cache=True) == 149
    assert count_positions(50, 100, use_cache=False) == 9950
    model = Transformer(gpt(vocab=11, width=32, depth=3, heads=2, context=64)).eval()
    assert cache_bytes(model, 64) == pytest.approx(2 * 3 * 32 * 64 * 4, rel=0.02)


def test_saved_bytes_counts_each_storage_once():
    x = torch.randn(3, 5, requires_grad=True)
    assert saved_bytes(lambda: x.exp()) == 3 * 5 * 4, "exp keeps its result"
    assert saved_bytes(lambda: x * x) == 3 * 5 * 4, "one tensor that is kept twice"


def test_a_neighbour_changes_batch_norm_and_no_layer_norm():
    sizes = {"vocab": 29, "width": 16, "depth": 1, "heads": 2, "context": 64}
    layer, batch = (Transformer(vaswani(**sizes, norm=norm, norm_place="pre")) for norm in ("layer", "batch"))
    before = {name: tensor.clone() for name, tensor in batch.state_dict().items()}
    assert neighbour_change(layer, 1) < 1e-9
    assert neighbour_change(batch, 1) > 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in batch.state_dict().items())


def test_without_norms_and_residuals_no_gradient_arrives():
    sizes = {"vocab": 31, "width": 16, "depth": 12, "heads": 2, "context": 16, "norm": "none"}
    first = [initial_norms(gpt(**sizes, residual=kind), 1).weight_gradients[0] for kind in ("sequential", "none")]
    assert first[1] < 0.1 * first[0]


def test_the_gradients_of_a_trained_model_are_those_of_its_weights_on_the_first_rows_of_the_text(tmp_path):
    (tmp_path / "test.txt").write_text("abcab cabca bcabc\n" * 40)
    tokenizer = Tokenizer.train("char", ["abc \n"], vocab_size=10)
    model = Transformer(gpt(vocab=tokenizer.vocab_size, width=16, depth=2, heads=2, context=8))
    for parameter in model.parameters():  # other weights than those of a new model
        parameter.data.mul_(2.0)
    request = EvaluationRequest(data=str(tmp_path / "test.txt"), split="all")
    found = trained_norms(LoadedModel(model, tokenizer), request).weight_gradients

    text = tokenizer.encode((tmp_path / "test.txt").read_text())
    ids = torch.tensor(text[: ROWS * 8]).view(ROWS, 8)
    model.double()
    torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    squares = [sum(float(p.grad.square().sum()) for p in block.parameters()) for block in model.decoder.blocks]
    assert found == pytest.approx([square**0.5 for square in squares], rel=1e-4)


def test_the_first_gradient_after_training_is_that_of_the_first_layer():
    curve = {"1": 0.5, "2": 3.0}
    assert trained_gradients([0.5, 3.0]) == {"trained_weight_gradient": curve, "first_trained_gradient": 0.5}


def test_metrics_of_a_training_are_read_from_its_lines(tmp_path):
    lines = [{"step": step, "loss": 5.0 - step, "tokens": 10 * step, "seconds": 0.5} for step in (1, 2, 3)]
    lines[1:1] = [{"step": 1, "val_loss": 4.5}]
    lines += [{"step": 3, "val_loss": 2.5}, {"step": 4, "skipped": "spike"}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert training_metrics(tmp_path) == {
        "seconds_training": 1.5,
        "skipped": 1,
        "validation_loss": 2.5,
        "validation_by_step": {"1": 4.5, "3": 2.5},
        "tokens": 30,
        "training_loss": 2.0,
        "loss_by_step": {"1": 4.0, "2": 3.0, "3": 2.0},
    }


def test_skipped_steps_do_not_move_the_points_of_a_curve(tmp_path):
    kept = [step for step in range(1, 62) if step not in (2, 3, 40)]  # 61 steps: points at multiples of 3, and the last
    lines = [{"step": step, "loss": float(step), "tokens": step, "seconds": 0.5} for step in kept]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    curve = training_metrics(tmp_path)["loss_by_step"]
    assert list(curve) == [*(str(step) for step in range(3, 61, 3)), "61"]
    assert curve["3"] == 1.0
    assert curve["42"] == 41.5
    assert curve["61"] == 61.0


def test_the_loss_of_frequencies_is_that_of_counted_words():
    train, text = list("aabc"), list("acd")
    ids = {word: index for index, word in enumerate("abcd")}
    counts, total = {word: 1 + train.count(word) for word in ids}, len(train) + len(ids)
    expected = sum(math.log(total / counts[word]) for word in text) / len(text)
    tokens = [TokenDataset.from_documents([[ids[word] for word in words]], len(ids)) for words in (train, text)]
    assert unigram_loss(*tokens) == pytest.approx(expected)
