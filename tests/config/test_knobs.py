"""Knobs change one choice and keep the rest."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from support import block_configs, is_encoder_decoder, preset_names

from monoblock.accounting.report import account
from monoblock.config.families import bert, gpt, llama, t5, vaswani, vit
from monoblock.config.knobs import KNOBS, OTHER_NAMES, POSITION_SCHEMES, rebuild, resize_pattern, vary
from monoblock.config.model import HeadConfig, Repeat, StackConfig
from monoblock.config.presets import tiny
from monoblock.config.schema import nearest_divisor
from monoblock.errors import ConfigError
from monoblock.model import Transformer

GPT = gpt(vocab=11, width=12, depth=4, heads=3, context=13)
LLAMA = llama(vocab=11, width=12, depth=4, heads=3, hidden=7, context=13)
T5 = t5(vocab=11, width=12, depth=2, heads=3, hidden=7, context=13)
VIT = vit(image=6, patch=2, width=12, depth=1, heads=3, classes=5)
WINDOWED = vary(GPT, window=3)
EXPERTS = vary(LLAMA, experts=3)
BERT = bert(vocab=11, width=12, depth=1, heads=3, context=13, head="classifier", classes=2)

# knob -> a model, a value, and how the value is read back
CASES = {
    "vocab": (GPT, 17, lambda c: c.input.vocab),
    "context": (GPT, 17, lambda c: c.input.context),
    "segments": (GPT, 3, lambda c: c.input.segments),
    "embedding_scale": (GPT, "sqrt_width", lambda c: c.input.scale),
    "embedding_norm": (BERT, False, lambda c: c.input.norm is not None),
    "image": (VIT, 12, lambda c: c.input.image),
    "patch": (VIT, 3, lambda c: c.input.patch),
    "channels": (VIT, 1, lambda c: c.input.channels),
    "class_token": (VIT, False, lambda c: c.input.class_token),
    "width": (GPT, 24, lambda c: c.width),
    "depth": (GPT, 7, lambda c: c.depth),
    "attention": (GPT, "linear", lambda c: block_configs(c)[0].attention.kind),
    "heads": (GPT, 4, lambda c: block_configs(c)[0].attention.heads),
    "kv_heads": (GPT, 1, lambda c: block_configs(c)[0].attention.num_kv_heads),
    "head_dim": (GPT, 5, lambda c: block_configs(c)[0].attention.key_size(12)),
    "value_dim": (GPT, 5, lambda c: block_configs(c)[0].attention.value_size(12)),
    "scale": (GPT, 0.5, lambda c: block_configs(c)[0].attention.scale),
    "softcap": (GPT, 5.0, lambda c: block_configs(c)[0].attention.softcap),
    "mask": (GPT, "prefix", lambda c: block_configs(c)[0].attention.mask),
    "window": (GPT, 3, lambda c: block_configs(c)[0].attention.window),
    "global_tokens": (WINDOWED, True, lambda c: block_configs(c)[0].attention.global_tokens),
    "random_blocks": (WINDOWED, 2, lambda c: block_configs(c)[0].attention.random_blocks),
    "block_size": (vary(WINDOWED, random_blocks=2), 3, lambda c: block_configs(c)[0].attention.block_size),
    "qk_norm": (GPT, True, lambda c: block_configs(c)[0].attention.qk_norm is not None),
    "positions": (GPT, "rotary", lambda c: block_configs(c)[0].attention.positions.kind),
    "rotary_base": (LLAMA, 7.0, lambda c: block_configs(c)[0].attention.positions.base),
    "rotary_dim": (LLAMA, 2, lambda c: block_configs(c)[0].attention.positions.dim),
    "scaling": (LLAMA, None, lambda c: block_configs(c)[0].attention.positions.scaling),
    "hidden": (GPT, 5, lambda c: block_configs(c)[0].feedforward.hidden),
    "activation": (GPT, "relu2", lambda c: block_configs(c)[0].feedforward.activation),
    "gated": (GPT, True, lambda c: block_configs(c)[0].feedforward.gated),
    "experts": (GPT, 5, lambda c: block_configs(c)[0].feedforward.experts.count),
    "top_k": (EXPERTS, 3, lambda c: block_configs(c)[0].feedforward.experts.top_k),
    "norm": (GPT, "rms", lambda c: block_configs(c)[0].norm.kind),
    "eps": (GPT, 1e-3, lambda c: block_configs(c)[0].norm.eps),
    "norm_place": (GPT, "post", lambda c: block_configs(c)[0].norm_place),
    "residual": (GPT, "parallel", lambda c: block_configs(c)[0].residual),
    "bias": (GPT, False, lambda c: block_configs(c)[0].feedforward.bias or block_configs(c)[0].attention.bias != ""),
    "dropout": (GPT, 0.25, lambda c: block_configs(c)[0].dropout),
    "attention_dropout": (GPT, 0.25, lambda c: block_configs(c)[0].attention.dropout),
    "embedding_dropout": (GPT, 0.25, lambda c: c.input.dropout),
    "word_dropout": (GPT, 0.25, lambda c: c.input.word_dropout),
    "head_dropout": (GPT, 0.25, lambda c: c.head.dropout),
    "head": (BERT, "tagger", lambda c: c.head.kind),
    "classes": (BERT, 7, lambda c: c.head.classes),
    "pooling": (BERT, "mean", lambda c: c.head.pooling),
    "pooler": (BERT, "relu", lambda c: c.head.pooler),
    "tie": (GPT, "none", lambda c: c.tie),
    "init": (GPT, "small", lambda c: c.init.kind),
    "std": (GPT, 0.5, lambda c: c.init.std),
}


@pytest.mark.parametrize(
    ("knobs", "removed"),
    [
        ({"norm": "none"}, (2 * 4 + 1) * 2 * 12),
        ({"hidden": 0}, 4 * (2 * 12 * 48 + 48 + 12 + 2 * 12)),
        ({"residual": "none"}, 0),
        ({"norm": "batch"}, 0),
        ({"attention": "linear"}, 0),
        ({"scale": 1.0}, 0),
    ],
)
def test_a_part_is_removed_or_swapped(knobs, removed):
    """The number of parameters, by hand, and that of the model; the part comes back with the knob."""
    config = vary(GPT, **knobs)
    count = sum(p.numel() for p in Transformer(config).parameters())
    assert count == account(config).parameters == account(GPT).parameters - removed
    originals = {"norm": "layer", "hidden": 48, "residual": "sequential", "attention": "softmax", "scale": None}
    assert vary(config, **{name: originals[name] for name in knobs}) == GPT


def test_a_width_leaves_a_removed_feed_forward_network_removed():
    assert block_configs(vary(GPT, hidden=0, width=24))[0].feedforward.hidden == 0
    assert block_configs(vary(vary(GPT, hidden=0), width=24))[0].feedforward.hidden == 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"hidden": 0, "residual": "parallel"}, "hidden=0 leaves no"),
        ({"hidden": 0, "experts": 2}, "hidden=0 is too small"),
        ({"global_tokens": True}, "reach beyond a window"),
    ],
)
def test_parts_that_need_each_other_are_checked(knobs, message):
    with pytest.raises(ConfigError, match=message):
        vary(GPT, **knobs)


def test_the_norm_of_the_embedding_is_that_of_the_blocks():
    assert vary(LLAMA, embedding_norm=True).input.norm == block_configs(LLAMA)[0].norm
    assert vary(T5, embedding_norm=True).input.norm.kind == "rms"


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_sets_its_value_and_the_model_builds(knob):
    assert knob in CASES, "a new knob needs a row here"
    config, value, read = CASES[knob]
    varied = vary(config, **{knob: value})
    assert read(varied) == value
    Transformer(varied)


def test_knobs_of_one_call_are_applied_together():
    """Width 20 with 3 heads and width 12 with 5 are invalid, width 20 with 5 heads is valid."""
    varied = vary(GPT, width=20, heads=5)
    assert (varied.width, block_configs(varied)[0].attention.heads) == (20, 5)


@pytest.mark.parametrize(
    ("config", "knobs"),
    [
        (GPT, {"window": 3, "global_tokens": True, "random_blocks": 2, "block_size": 5}),
        (vary(GPT, window=3, random_blocks=2), {"window": None, "random_blocks": 0}),
        (vary(GPT, positions="alibi"), {"attention": "linear", "positions": "none"}),
        (vary(GPT, window=3), {"attention": "linear", "window": None}),
        (vary(GPT, attention="linear"), {"attention": "softmax", "scale": 0.5}),
    ],
)
def test_knobs_that_need_each_other_have_any_order(config, knobs):
    varied = vary(config, **knobs)
    assert vary(config, **dict(reversed(knobs.items()))) == varied
    assert {name: CASES[name][2](varied) for name in knobs if name != "positions"} == {
        name: value for name, value in knobs.items() if name != "positions"
    }
    Transformer(varied)


@pytest.mark.parametrize("config", [GPT, WINDOWED, T5])
def test_the_size_of_random_blocks_needs_random_blocks(config):
    with pytest.raises(ConfigError, match=r"block_size=5 changes nothing: .* write random_blocks=… too"):
        vary(config, block_size=5)


def test_a_regression_head_has_the_defaults_of_a_classifier_and_one_number():
    regression = vary(BERT, head="regression")
    assert regression.head == replace(vary(BERT, classes=1).head, kind="regression")
    assert vary(BERT, head="regression", classes=3).head.classes == vary(regression, classes=3).head.classes == 3
    assert vary(regression, head="classifier") == BERT
    assert HeadConfig(kind="regression").classes == 1


def test_a_specific_dropout_overrides_the_general_one_in_any_order():
    specific = {"attention_dropout": 0.1, "embedding_dropout": 0.3, "head_dropout": 0.5}
    varied = vary(GPT, **specific, dropout=0.2)
    assert varied == vary(GPT, dropout=0.2, **specific)
    block = block_configs(varied)[0]
    assert (block.dropout, block.feedforward.dropout, block.attention.dropout) == (0.2, 0.2, 0.1)
    assert (varied.input.dropout, varied.head.dropout) == (0.3, 0.5)


def test_hidden_keeps_its_ratio_to_the_width_unless_given():
    assert block_configs(vary(GPT, width=24))[0].feedforward.hidden == 96
    assert block_configs(vary(GPT, width=24, hidden=5))[0].feedforward.hidden == 5


def test_hidden_given_with_its_old_value_is_kept():
    assert block_configs(vary(GPT, width=24, hidden=48))[0].feedforward.hidden == 48


@pytest.mark.parametrize("name", preset_names())
def test_no_knobs_change_nothing(name):
    assert vary(tiny(name)) == tiny(name)
    assert rebuild(tiny(name), lambda part, values: None) == tiny(name)


@pytest.mark.parametrize("positions", POSITION_SCHEMES)
@pytest.mark.parametrize("config", [GPT, LLAMA, T5, VIT], ids=["gpt", "llama", "t5", "vit"])
def test_positions_replace_the_old_scheme_everywhere(config, positions):
    varied = vary(config, positions=positions)
    input_positions, attention_positions = (
        varied.input.positions,
        {type(block.attention.positions) for block in block_configs(varied)},
    )
    assert attention_positions == {type(POSITION_SCHEMES[positions].inside)}
    assert type(input_positions) is type(POSITION_SCHEMES[positions].added)
    assert all(block.cross is None or block.cross.positions is None for block in block_configs(varied))


def test_learned_positions_without_a_context_are_an_error():
    with pytest.raises(ConfigError, match="learned positions need a context"):
        vary(vaswani(vocab=11, width=12, heads=3), positions="learned")


@pytest.mark.parametrize("name", preset_names(is_encoder_decoder))
def test_a_window_does_not_change_cross_attention(name):
    assert all(block.cross is None or block.cross.window is None for block in block_configs(vary(tiny(name), window=3)))


@pytest.mark.parametrize("norm_place", ["pre", "post", "output", "sandwich"])
@pytest.mark.parametrize("config", [GPT, BERT], ids=["from pre", "from post"])
def test_there_is_a_final_norm_unless_blocks_end_with_one(config, norm_place):
    varied = vary(config, norm_place=norm_place)
    assert all((stack.norm is None) == (norm_place == "post") for stack in varied.stacks.values())


def test_all_norms_change_their_kind_and_keep_their_eps():
    varied = vary(GPT, norm="rms")
    assert {block.norm.kind for block in block_configs(varied)} == {varied.decoder.norm.kind} == {"rms"}
    assert varied.decoder.norm.eps == GPT.decoder.norm.eps
    assert vary(varied, norm="layer") == GPT


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"widht": 3}, "no knob 'widht'; did you mean 'width'"),
        ({"heads": 5}, "heads=5 does not divide width=12"),
        ({"rotary_base": 3.0}, "rotary_base=3.0 changes nothing"),
        ({"image": 3}, "image=3 changes nothing"),
        ({"top_k": 1}, "top_k=1 changes nothing"),
        ({"positions": "rotari"}, "did you mean 'rotary'"),
        ({"depth": 0}, "depth=0 is not a positive whole number"),
        ({"depth": 2.0}, "depth=2.0 is not a positive whole number"),
        ({"depth": True}, "depth=True is not a positive whole number"),
        ({"depth": 100_001}, "depth=100001 is too large; write 100000 or less"),
        ({"width": "24"}, "width='24' is not a positive whole number"),
        ({"width": 10**400 + 1}, r"=2\*\*\d+ or more is too large"),
        ({"experts": None}, "experts=None is not a positive whole number"),
        ({"experts": "4"}, "experts='4' is not a positive whole number"),
        ({"positions": ["a"]}, r"positions=\['a'\] is not one of none, sinusoid"),
        ({"qk_norm": "rms"}, "qk_norm='rms' is not true or false"),
        ({"qk_norm": "no"}, "qk_norm='no' is not true or false"),
        ({"qk_norm": None}, "qk_norm=None is not true or false"),
        ({"bias": "qkv"}, "bias='qkv' is not true or false"),
        ({"tie": "three_way"}, "this model has only one input"),
    ],
)
def test_an_invalid_knob_is_an_error_with_a_reason(knobs, message):
    with pytest.raises(ConfigError, match=message):
        vary(GPT, **knobs)


def test_fewer_experts_than_top_k_are_an_error():
    with pytest.raises(ConfigError, match="top_k"):
        vary(EXPERTS, experts=1)


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 210])
def test_the_suggested_divisor_is_the_nearest(number):
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    for wanted in range(1, 2 * number):
        assert abs(nearest_divisor(number, wanted) - wanted) == min(abs(d - wanted) for d in divisors)


@pytest.mark.parametrize(("wanted", "divisor"), [(12, 1), (10**9, 1), (10**20, 10**18 + 9)])
def test_a_divisor_of_a_large_prime_is_suggested_quickly(wanted, divisor):
    assert nearest_divisor(10**18 + 9, wanted) == divisor


# -- depth -----------------------------------------------------------------------------------------------------------

BLOCKS = [replace(block_configs(GPT)[0], layer_scale=number / 10) for number in range(1, 4)]
RUNS = st.builds(
    lambda run, times: Repeat(blocks=tuple(run), times=times),
    st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=3),
    st.integers(1, 3),
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(RUNS, min_size=1, max_size=3), st.integers(1, 20))
def test_a_pattern_is_cut_or_its_last_run_is_repeated(runs, depth):
    pattern = tuple(runs)
    before, after = (list(StackConfig(pattern=p).layers()) for p in (pattern, resize_pattern(pattern, depth)))
    assert len(after) == depth
    last = list(pattern[-1].blocks)
    extended = before + last * 20
    assert after == extended[:depth]


def test_a_run_equal_to_the_last_one_is_not_taken_for_it():
    once = Repeat(blocks=(BLOCKS[0],))
    pattern = (once, Repeat(blocks=(BLOCKS[1],)), once)
    assert list(StackConfig(pattern=resize_pattern(pattern, 3)).layers()) == [BLOCKS[0], BLOCKS[1], BLOCKS[0]]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *[("layers", "depth"), ("n_layer", "depth"), ("num_hidden_layers", "depth"), ("n_head", "heads")],
        *[("d_model", "width"), ("hidden_size", "width"), ("vocab_size", "vocab"), ("d_ff", "hidden")],
    ],
)
def test_a_name_of_a_paper_or_another_library_is_answered_with_the_knob(theirs, ours):
    with pytest.raises(ConfigError, match=f"there is no knob '{theirs}'; did you mean '{ours}'"):
        vary(GPT, **{theirs: 3})


def test_every_name_of_another_library_leads_to_a_knob_and_none_is_one():
    assert not OTHER_NAMES.keys() & KNOBS.keys()
    assert set(OTHER_NAMES.values()) <= KNOBS.keys()
