"""Every C++ operator and method refuses wrong arguments with a Python error: none crashes, hangs or guesses."""

import fnmatch
import json
from pathlib import Path

import pytest
import torch
from operator_cases import CASES, block_fields, native_stack, norm_fields, paged_pass, stack
from processes import run_script

from monoblock.kernels.cpu import library

TIMEOUT = 600  # seconds for what takes about thirty, so that a call that hangs fails
REFUSALS = ("RuntimeError", "NotImplementedError", "TypeError", "ValueError")
FAKE_REFUSALS = ("AssertionError", "UnsupportedOperatorException")  # of a FakeTensor, by torch itself
# Variants that are correct calls: case / argument / variant.
ACCEPTED = (
    "can_multiply_many_rows / group / *",  # only compared
    # any number of rows, which may have gaps; what is narrower than a weight by less than a group may be its padding
    "linear* / x / one more dimension",
    "linear* / x / gaps",
    "linear* / x / * in dimension 0",
    "linear *int* / x / one too * in dimension 1",
    "linear exact* / exact / None",
    "linear* / bias / gaps",
    "linear* / bias / torch.float*",
    "linear_tiles_grad_input / grad / one more dimension",
    "linear_tiles_grad_input / grad / gaps",
    "linear_tiles_grad_input / grad / * in dimension 0",
    "linear_tiles_grad_input / weight / * in dimension 1",
    "quantize_int8 / weight / one more dimension",
    "quantize_int8 / weight / flat",
    "quantize_int8 / weight / * in dimension 0",
    # GELU reads any shape and stride
    *(
        f"gelu_tanh / x / {variant}"
        for variant in ("one more*", "no dim*", "empty", "gaps", "flat", "trans*", "* in dim*")
    ),
    "gelu_tanh_backward / * / gaps",
    # no query head; values of any size; strides that are not used
    "attend_* / q / nothing in dimension 1",
    "attend_causal / v / * in dimension 3",
    "attend_causal_backward / grad / gaps",
    "attend_causal_backward / log_sums / gaps",
    # any vocabulary, any number of suppressed tokens
    "topk_continuations / logits / one too * in dimension 1",
    "topk_continuations / suppressed / empty",
    "topk_continuations / suppressed / * in dimension 0",
    "topk_continuations / count / one more",
    # any number of blocks; options and optional weights.  How many tables there are, and how wide the values of a
    # source are, is known when a step is taken
    "NativeStack* / blocks / one too *",
    "NativeStack* / blocks / last: attention.window: *",
    "NativeStack* / blocks / last: attention.*_table: *",
    "NativeStack* / blocks / last: *attention*sinks*",
    "NativeStack* / blocks / last: *attention_gain*",
    "NativeStack / blocks / last: cross.output.weight: one too * in dimension 1",
    *(f"NativeStack* / * / *{field}" for field in (".bias", "norm.weight", ".bias: None", "norm.weight: None")),
    "NativeStack* / norm / empty",
    # tables may be longer; a row without new tokens is not read; only angles go by positions; a pool may be of any size
    "NativeStack.run* / tables / one too many in dimension 1",
    "NativeStack.run* / source_tables / one too many in dimension 1",
    "NativeStack.run* / x / gaps",
    "NativeStack.run* / *keys / last: gaps",
    "NativeStack.run* / positions / None",
    "NativeStack.run* / position_biases / *",
    "NativeStack.run* / exact / None",
    "NativeStack.run* / causal / None",
    "NativeStack.run int4 / source_values / last: one too * in dimension 3",
    "copy_pages / pools / empty",
    "copy_pages / pools / one too *",
    "copy_pages / pools / last: torch.*",
    "copy_pages / pools / last: a *",
    "copy_pages / pools / last: one too many in dimension 0",
    "copy_pages / pools / last: one too * in dimension [13]",
    "copy_pages / pools / last: nothing in dimension [13]",
    "* / bias / None",
    # what torch makes a plain tensor before it calls an operator; methods of classes are given it as it is
    *(f"[a-z]* / * / {variant}" for variant in ("a functional tensor", "a zero tensor", "a negated view")),
)


@pytest.fixture(autouse=True)
def compiled():
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)


@pytest.fixture(scope="module")
def outcomes():
    """The outcome of every call: "" or the error.  A crash ends the process, and the last line names the call."""
    done = run_script(Path(__file__).parents[1] / "operator_cases.py", timeout=TIMEOUT)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1:], done.stderr[-500:])
    return {(case, argument, variant): outcome for case, argument, variant, outcome in map(json.loads, lines)}


@pytest.mark.parametrize("case", CASES)
def test_correct_arguments_are_accepted_and_wrong_ones_raise_an_error(case, outcomes):
    assert outcomes[case, "", ""] == ""
    tried = {key: outcome for key, outcome in outcomes.items() if key[0] == case and key[1]}
    assert len(tried) > 4 * len(CASES[case][1]())
    for key, outcome in tried.items():
        if outcome:
            is_fake = key[2].endswith("a FakeTensor")
            assert outcome.startswith(REFUSALS + FAKE_REFUSALS * is_fake), (key, outcome)
        else:
            assert any(fnmatch.fnmatch(" / ".join(key), pattern) for pattern in ACCEPTED), key


def registered_names():
    """All operators, classes ("NativeStack") and their methods ("NativeStack.run"), as torch has them registered."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "monoblock":
            yield operator
    for schema in torch._C._jit_get_custom_class_schemas():
        owner = schema.arguments[0].type.annotation_str if schema.arguments else ""
        if ".monoblock." in owner:
            class_name = owner.rpartition(".")[2]
            yield class_name if schema.name == "__init__" else f"{class_name}.{schema.name}"


def test_every_operator_class_and_method_has_a_case():
    names = set(registered_names())
    assert {"attend_causal_backward", "NativeStack", "NativeStack.run"} <= names
    assert names == {case.split()[0] for case in CASES}


# -- the words of an error --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.quary.weight": torch.zeros(3)}, r"blocks\[0\]\['attention.quary.weight'\] is not a field"),
        ({"attention.query.weight": None}, r"blocks\[0\]\['attention.query.weight'\] is missing"),
        ({"attention.heads": 5}, r"blocks\[0\]\['attention.kv_heads'\] does not divide attention.heads \(2 and 5\)"),
        ({"activation": "swish"}, r"blocks\[0\]\['activation'\] is 'swish'; one of relu, relu2, gelu, "),
        ({"attention.scale": "much"}, r"blocks\[0\]\['attention.scale'\] is of type String; a float is needed"),
        ({"attention_norm.weight": torch.zeros(7)}, r"\['attention_norm.weight'\] has shape \(7\); \(24\) is needed"),
        (
            {"attention.key.bias": torch.zeros(12).double()},
            r"\['attention.key.bias'\] has dtype Double; Float is needed",
        ),
    ],
)
def test_an_error_names_the_field_what_was_given_and_what_is_needed(changes, message):
    with pytest.raises(RuntimeError, match=message):
        torch.classes.monoblock.NativeStack(width=24, blocks=[block_fields() | changes], norm=norm_fields("norm"))


# -- tensors of torch.func --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_a_method_refuses_the_tensors_of_a_transform(transform):
    native, given = native_stack(), paged_pass()  # made outside, so that only x is wrapped
    x = given.pop("x")
    with pytest.raises(RuntimeError, match=r"^x is a Strided tensor on cpu with dispatch keys .*; a plain tensor"):
        transform(lambda x: native.run(x=x, **given).sum())(x[None] if transform is torch.func.vmap else x)


def test_a_method_accepts_parameters_and_other_subclasses_with_memory():
    class Named(torch.Tensor):
        pass

    expected = native_stack().run(**paged_pass())
    for wrap in (torch.nn.Parameter, lambda x: x.as_subclass(Named)):
        assert torch.equal(native_stack().run(**paged_pass() | {"x": wrap(paged_pass()["x"])}), expected)


# -- what changes between calls ---------------------------------------------------------------------------------------


def test_weights_that_are_changed_in_place_are_read_and_those_that_moved_are_refused():
    given, weight = stack(), torch.ones(24, 24)
    given["blocks"][0] = given["blocks"][0] | {"attention.query.weight": weight}
    native = torch.classes.monoblock.NativeStack(**given)
    before = native.run(**paged_pass())
    weight.mul_(-3)
    assert not torch.equal(native.run(**paged_pass()), before)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="moved in memory since it was built; build it again"):
        native.run(**paged_pass())
