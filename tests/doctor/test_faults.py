"""Every planted fault is found and named; every check can fire; students' models are told apart from mended ones."""

import functools
from collections import Counter

import pytest
import torch
from students import STUDENTS
from torch import nn

from monoblock.config.presets import tiny
from monoblock.doctor.checks import CHECKS
from monoblock.doctor.diagnose import diagnose_model
from monoblock.doctor.examination import REQUIREMENTS
from monoblock.doctor.faults import FAULTS, diagnose_with_fault
from monoblock.doctor.faults.fault import MODEL_KINDS, Fault, plant_fault
from monoblock.errors import InputError
from monoblock.model import Transformer


@functools.cache
def report_with_fault(name):
    return diagnose_with_fault(name)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    report = report_with_fault(name)
    found = [finding.check for finding in report.findings]
    assert FAULTS[name].check in found
    assert len(found) <= 3, found


CONTROLS = {(fault.kind, fault.control): fault for fault in FAULTS.values() if fault.control is not Fault.control}


@pytest.mark.parametrize("fault", CONTROLS.values(), ids=lambda fault: f"{fault.kind}, as for {fault.name}")
def test_the_control_of_a_fault_has_no_findings(fault):
    setup = plant_fault(fault, is_healthy=True)
    report = diagnose_model(setup.model, **setup.options)
    assert not report.findings, [(finding.check, finding.evidence) for finding in report.findings]
    passed = {result.name for result in report.checks if result.state == "passed"}
    assert fault.check in passed
    if "step" in setup.options:
        assert {"label_shift", "pad_in_loss", "overfit", "optimizer", "learning_rate", "dropout"} <= passed


# Words of the reason, for every fault of a check that can have several causes.
CAUSES = {
    "no_causal_mask": "sees all later tokens (counted over all layers): no causal mask is applied",
    "mask_off_by_one": "off by one: query i also sees key i + 1",
    "leaking_convolution": "outside attention: a convolution or a shift",
    "sequence_norm": "outside attention: a norm or a mean over the sequence",
    "window_off_by_one": "sees 6 keys (itself included); off by one",
    "window_forgotten": "sees 23 keys",
    "padding_mask_dropped": "attend to it",
    "padding_counted": "positions count the padding",
    "padding_in_pooling": "the pooling does not",
    "batch_norm": "statistics over the batch",
    "rows_mixed": "a reshape mixes rows",
    "packing_leak": "sees its neighbour",
    "packing_positions": "do not start again",
    "cache_position_off_by_one": "wrong position",
    "cache_padding_position": "counts the padding",
    "cache_unrotated_keys": "without their rotation",
    "cache_of_another_layer": "belong to another layer",
    "positions_added_twice": "added twice",
    "positions_in_every_layer": "again between the layers",
    "rotated_twice": "rotated twice",
    "mask_after_softmax": "the mask is applied after the softmax",
    "softmax_over_queries": "over the wrong axis, -2: queries instead of keys",
    "tokenizer_too_large": "ids that the embedding has no row for",
    "unknown_words": "tokens are unknown",
    "no_mask_token": "fills in a mask token",
    "fresh_head": "the head has its initial weights",
    "wrong_number_of_classes": "another number of outputs",
    "encoder_for_generation": "causal_lm needs a decoder",
    "decoder_read_at_first_token": "read at its first token",
    "labels_not_shifted": "not shifted",
    "labels_shifted_twice": "shifted twice",
    "rows_mixed_in_loss": "rows of the logits and of the labels are mixed",
    "labels_shuffled": "cannot learn a single batch",
    "softmax_before_cross_entropy": "the softmax is taken twice: the loss makes probabilities of the logits",
    "learning_rate_too_high": "too high",
    "learning_rate_of_one": "too high: one step changes the weights by",
    "optimizer_of_another_model": "holds other tensors than the model",
    "no_optimizer_step": "optimizer.step() is not called",
    "no_zero_grad": "optimizer.zero_grad() is not called",
    "no_eval_in_generation": "model.eval() is not called",
    "learning_rate_too_low": "too low",
    "detached_block": "detached",
    "shrinking_blocks": "gradients vanish",
    "mask_filled_with_zero": "too weak: it sets or lowers masked scores by the finite value 0",
    "heads_split_without_transpose": "heads are split without a transpose",
    "heads_merged_without_transpose": "heads are merged without a transpose",
    "mask_inverted": "the mask is inverted",
    "softmax_over_heads": "over the heads",
    "softmax_over_rows": "over the rows of the batch",
    "scale_missing": "not divided by sqrt(head size)",
    "scale_inverted": "multiplied by sqrt(head size)",
    "no_positions": "does not use positions",
    "one_position_for_all": "all tokens get the same position",
    "untied_copy": "two tensors",
    "one_block_for_all": "holds the same block 2 times",
    "dropout_left_on": "on in evaluation",
    "dropout_after_logits": "after the output layer",
    "no_residuals": "the results of attention and of the feed-forward layer replace the stream",
    "no_attention_residual": "the result of attention replaces the stream",
    "no_feedforward_residual": "the result of the feed-forward layer replaces the stream",
    "no_nonlinearity": "no non-linearity",
    "blocks_not_called": "never called",
    "blocks_not_registered": "plain Python list",
    "weights_zero": "are all zero",
    "residual_explosion": "grows",
    "no_norms": "no norm is computed",
    "duplicate_heads": "equal queries",
    "dead_head": "output is zero",
    "nan_in_a_layer": "first appears in",
    "fp16_overflow": "too large for fp16",
    "beta2_too_low": "beta2=0.5",
    "weight_decay_too_high": "weight_decay=2",
}


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_model_without_its_fault_has_no_findings(kind):
    """The healthy control of each fault: the model that it is planted into."""
    setup = plant_fault(Fault("none", "nothing", "", lambda setup: None, kind))
    assert diagnose_model(setup.model).findings == []


@pytest.mark.parametrize(("name", "words"), CAUSES.items())
def test_faults_of_one_check_are_told_apart(name, words):
    (finding,) = (f for f in report_with_fault(name).findings if f.check == FAULTS[name].check)
    assert words in finding.reason


def test_every_fault_of_a_check_with_several_has_its_cause_tested():
    counts = Counter(fault.check for fault in FAULTS.values())
    assert set(CAUSES) == {name for name, fault in FAULTS.items() if counts[fault.check] > 1}


def test_a_wrong_position_in_the_cache_is_told_from_a_missing_rotation():
    torch.manual_seed(0)
    report = diagnose_with_fault("cache_position_off_by_one", Transformer(tiny("llama-7b")))
    assert ["wrong position" in finding.reason for finding in report.findings] == [True]


@pytest.mark.parametrize("axis", ["queries", "heads", "rows of the batch"])
def test_a_softmax_over_another_axis_has_a_title_of_its_own(axis):
    name = {"queries": "softmax_over_queries", "heads": "softmax_over_heads"}.get(axis, "softmax_over_rows")
    report = report_with_fault(name)
    assert [finding.title for finding in report.findings] == [f"the softmax is taken over the {axis}"]
    assert f"FAIL  {report.findings[0].check}: the softmax is taken over the {axis}" in str(report)


def test_every_check_has_a_fault_and_comes_after_those_that_explain_it():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {fault.check for fault in FAULTS.values()} == set(names)
    for number, check in enumerate(CHECKS):
        assert set(check.explains) <= set(names[number + 1 :]), check.name
        assert set(check.needs) <= set(REQUIREMENTS), check.name


def examine(name, faulty):
    torch.manual_seed(0)
    model, options = STUDENTS[name][0](faulty)
    return diagnose_model(model, **options)


@pytest.mark.parametrize("name", STUDENTS)
def test_the_fault_of_a_student_is_named(name):
    report = examine(name, True)
    _, check, words = STUDENTS[name]
    assert [finding.check for finding in report.findings] == [check]
    assert words in report.findings[0].reason


@pytest.mark.parametrize("name", STUDENTS)
def test_a_mended_model_has_no_findings(name):
    report = examine(name, False)
    assert not report.findings, [(finding.check, finding.evidence) for finding in report.findings]


SEEN_FROM_OUTSIDE = {name for name in STUDENTS if name not in ("tied head silently untied", "off-by-one window")}


@pytest.mark.parametrize("name", sorted(SEEN_FROM_OUTSIDE - {"cross-attention ignoring source padding"}))
def test_a_function_of_ids_shows_the_same_fault(name):
    torch.manual_seed(0)
    model, options = STUDENTS[name][0](True)
    check = STUDENTS[name][1]
    mask = "attention_mask" if name.startswith("cache position") else None
    function = (lambda ids, attention_mask=None: model(ids, attention_mask)) if mask else (lambda ids: model(ids))
    report = diagnose_model(function, vocab=61, length=24, **options)
    assert [finding.check for finding in report.findings] == [check]


def test_a_window_can_be_declared_for_a_function():
    torch.manual_seed(0)
    for faulty, expected in ((True, ["window"]), (False, [])):
        model, _ = STUDENTS["off-by-one window"][0](faulty)
        report = diagnose_model(lambda ids, model=model: model(ids), vocab=61, length=24, window=5)
        assert [finding.check for finding in report.findings] == expected


def test_a_fault_that_does_not_fit_the_model_is_refused():
    with pytest.raises(InputError, match="needs an encoder-decoder"):
        diagnose_with_fault("source_padding_in_cross", Transformer(tiny("gpt2")))
    with pytest.raises(InputError, match="did you mean 'no_causal_mask'"):
        diagnose_with_fault("no_casual_mask")


class WithDropout(nn.Module):
    """A bigram model that declares a dropout; its layer has another one, none, or the same."""

    def __init__(self, declared, passed_on):
        super().__init__()
        self.dropout = declared
        self.tok, self.pos = nn.Embedding(61, 16), nn.Embedding(32, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(passed_on), nn.Linear(16, 61))

    def forward(self, ids):
        return self.mlp(self.tok(ids) + self.pos(torch.arange(ids.shape[1])))


@pytest.mark.parametrize(("passed_on", "expected"), [(0.1, ["dropout"]), (0.0, ["dropout"]), (0.3, [])])
def test_dropout_that_is_not_passed_on_is_found(passed_on, expected):
    report = diagnose_model(WithDropout(0.3, passed_on), checks=["dropout"])
    assert [finding.check for finding in report.findings] == expected


def test_a_function_of_a_model_in_training_mode_is_told_to_switch_dropout_off():
    torch.manual_seed(0)
    model = WithDropout(0.3, 0.3).train()
    report = diagnose_model(lambda ids: model(ids), vocab=61, length=24)
    assert [finding.check for finding in report.findings] == ["dropout"]
    assert "model.eval()" in report.findings[0].fix
