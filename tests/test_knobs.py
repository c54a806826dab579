"""One choice swapped and the rest kept."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from support import blocks, has_both, presets

from monoblock.config import Alibi, Buckets, Learned, Repeat, Rotary, Sinusoid, StackConfig
from monoblock.errors import ConfigError
from monoblock.families import bert, gpt, llama, t5, vaswani, vit
from monoblock.knobs import KNOBS, POSITIONS, deepen, rebuild, vary
from monoblock.model import Transformer
from monoblock.presets import tiny
from monoblock.schema import nearest_divisor

GPT = gpt(vocab=11, width=12, depth=4, heads=3, context=13)
LLAMA = llama(vocab=11, width=12, depth=4, heads=3, hidden=7, context=13)
T5 = t5(vocab=11, width=12, depth=2, heads=3, hidden=7, context=13)
VIT = vit(image=6, patch=2, width=12, depth=1, heads=3, classes=5)
EXPERTS = vary(LLAMA, experts=3)
BERT = bert(vocab=11, width=12, depth=1, heads=3, context=13, head="classifier", classes=2)

# knob -> a model, a value, and how the value is read back
READ = {
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
    "heads": (GPT, 4, lambda c: blocks(c)[0].attention.heads),
    "kv_heads": (GPT, 1, lambda c: blocks(c)[0].attention.groups),
    "head_dim": (GPT, 5, lambda c: blocks(c)[0].attention.key_size(12)),
    "value_dim": (GPT, 5, lambda c: blocks(c)[0].attention.value_size(12)),
    "scale": (GPT, 0.5, lambda c: blocks(c)[0].attention.scale),
    "softcap": (GPT, 5.0, lambda c: blocks(c)[0].attention.softcap),
    "mask": (GPT, "prefix", lambda c: blocks(c)[0].attention.mask),
    "window": (GPT, 3, lambda c: blocks(c)[0].attention.window),
    "qk_norm": (GPT, True, lambda c: blocks(c)[0].attention.qk_norm is not None),
    "positions": (GPT, "rotary", lambda c: blocks(c)[0].attention.positions.kind),
    "rotary_base": (LLAMA, 7.0, lambda c: blocks(c)[0].attention.positions.base),
    "rotary_dim": (LLAMA, 2, lambda c: blocks(c)[0].attention.positions.dim),
    "scaling": (LLAMA, None, lambda c: blocks(c)[0].attention.positions.scaling),
    "hidden": (GPT, 5, lambda c: blocks(c)[0].feedforward.hidden),
    "activation": (GPT, "relu2", lambda c: blocks(c)[0].feedforward.activation),
    "gated": (GPT, True, lambda c: blocks(c)[0].feedforward.gated),
    "experts": (GPT, 5, lambda c: blocks(c)[0].feedforward.experts.count),
    "top_k": (EXPERTS, 3, lambda c: blocks(c)[0].feedforward.experts.top_k),
    "norm": (GPT, "rms", lambda c: blocks(c)[0].norm.kind),
    "eps": (GPT, 1e-3, lambda c: blocks(c)[0].norm.eps),
    "norm_place": (GPT, "post", lambda c: blocks(c)[0].norm_place),
    "residual": (GPT, "parallel", lambda c: blocks(c)[0].residual),
    "bias": (GPT, False, lambda c: blocks(c)[0].feedforward.bias or blocks(c)[0].attention.bias != ""),
    "dropout": (GPT, 0.25, lambda c: blocks(c)[0].dropout),
    "attention_dropout": (GPT, 0.25, lambda c: blocks(c)[0].attention.dropout),
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


def test_a_norm_of_the_embedding_is_as_that_of_the_blocks():
    assert vary(LLAMA, embedding_norm=True).input.norm == blocks(LLAMA)[0].norm
    assert vary(T5, embedding_norm=True).input.norm.kind == "rms"


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_writes_what_it_says_and_the_model_still_builds(knob):
    assert knob in READ, "a new knob needs a row here"
    config, value, back = READ[knob]
    varied = vary(config, **{knob: value})
    assert back(varied) == value
    Transformer(varied)


def test_several_knobs_are_turned_together():
    """Neither width 20 with 3 heads nor width 12 with 5 can be; both together can."""
    varied = vary(GPT, width=20, heads=5)
    assert (varied.width, blocks(varied)[0].attention.heads) == (20, 5)


def test_a_particular_dropout_is_kept_beside_the_general_one_in_either_order():
    particular = {"attention_dropout": 0.1, "embedding_dropout": 0.3, "head_dropout": 0.5}
    varied = vary(GPT, **particular, dropout=0.2)
    assert varied == vary(GPT, dropout=0.2, **particular)
    block = blocks(varied)[0]
    assert (block.dropout, block.feedforward.dropout, block.attention.dropout) == (0.2, 0.2, 0.1)
    assert (varied.input.dropout, varied.head.dropout) == (0.3, 0.5)


def test_hidden_keeps_its_proportion_to_the_width_unless_given():
    assert blocks(vary(GPT, width=24))[0].feedforward.hidden == 96
    assert blocks(vary(GPT, width=24, hidden=5))[0].feedforward.hidden == 5


def test_hidden_given_as_it_was_stays_as_given():
    assert blocks(vary(GPT, width=24, hidden=48))[0].feedforward.hidden == 48


@pytest.mark.parametrize("name", presets())
def test_nothing_turned_is_nothing_changed(name):
    assert vary(tiny(name)) == tiny(name)
    assert rebuild(tiny(name), lambda part, values: None) == tiny(name)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("config", [GPT, LLAMA, T5, VIT], ids=["gpt", "llama", "t5", "vit"])
def test_positions_are_swapped_whole(config, positions):
    varied = vary(config, positions=positions)
    added, attended = varied.input.positions, {type(block.attention.positions) for block in blocks(varied)}
    kinds = {"rotary": Rotary, "alibi": Alibi, "buckets": Buckets}
    assert attended == {kinds.get(positions, type(None))}
    assert isinstance(added, {"learned": Learned, "sinusoid": Sinusoid}.get(positions, type(None)))
    assert all(block.cross is None or block.cross.positions is None for block in blocks(varied))


def test_learned_positions_without_a_context_are_refused():
    with pytest.raises(ConfigError, match="learned positions need context"):
        vary(vaswani(vocab=11, width=12, heads=3), positions="learned")


@pytest.mark.parametrize("name", presets(has_both))
def test_windows_and_masks_leave_cross_attention_alone(name):
    assert all(block.cross is None or block.cross.window is None for block in blocks(vary(tiny(name), window=3)))


@pytest.mark.parametrize("place", ["pre", "post", "output", "sandwich"])
@pytest.mark.parametrize("config", [GPT, BERT], ids=["from pre", "from post"])
def test_a_final_norm_is_there_exactly_when_blocks_do_not_end_with_one(config, place):
    varied = vary(config, norm_place=place)
    assert all((stack.norm is None) == (place == "post") for stack in varied.stacks.values())


def test_every_norm_changes_its_kind_and_keeps_its_eps():
    varied = vary(GPT, norm="rms")
    assert {block.norm.kind for block in blocks(varied)} == {varied.decoder.norm.kind} == {"rms"}
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
        ({"depth": 0}, "depth=0 cannot be"),
        ({"depth": 2.0}, "depth=2.0 cannot be"),
        ({"depth": True}, "depth=True cannot be"),
        ({"depth": 100_001}, "depth=100001 is deeper than any stack; write 100000 or less"),
        ({"width": "24"}, "width='24' cannot be: it is a whole number"),
        ({"width": 10**400 + 1}, "does not divide width"),
        ({"experts": None}, "experts=None cannot be: it is a whole number"),
        ({"experts": "4"}, "experts='4' cannot be: it is a whole number"),
        ({"positions": ["a"]}, r"positions=\['a'\] is none of none, sinusoid"),
        ({"qk_norm": "rms"}, "qk_norm='rms' cannot be: it is there or not; write true or false"),
        ({"qk_norm": "no"}, "qk_norm='no' cannot be"),
        ({"qk_norm": None}, "qk_norm=None cannot be"),
        ({"bias": "qkv"}, "bias='qkv' cannot be: it is there or not"),
        ({"tie": "three_way"}, "there is one input"),
    ],
)
def test_a_knob_that_cannot_be_turned_says_why(knobs, message):
    with pytest.raises(ConfigError, match=message):
        vary(GPT, **knobs)


def test_an_experts_knob_smaller_than_top_k_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="top_k"):
        vary(EXPERTS, experts=1)


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 210])
def test_the_divisor_suggested_is_the_nearest(number):
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    for wanted in range(1, 2 * number):
        assert abs(nearest_divisor(number, wanted) - wanted) == min(abs(d - wanted) for d in divisors)


@pytest.mark.parametrize(("wanted", "found"), [(12, 1), (10**9, 1), (10**20, 10**18 + 9)])
def test_a_divisor_of_a_prime_of_nineteen_digits_is_suggested_at_once(wanted, found):
    assert nearest_divisor(10**18 + 9, wanted) == found


# -- depth ----------------------------------------------------------------------------------------------------------

PARTS = [replace(blocks(GPT)[0], layer_scale=number / 10) for number in range(1, 4)]
RUNS = st.builds(
    lambda run, times: Repeat(blocks=tuple(run), times=times),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3),
    st.integers(1, 3),
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(RUNS, min_size=1, max_size=3), st.integers(1, 20))
def test_a_pattern_is_cut_or_its_last_run_goes_on(runs, depth):
    pattern = tuple(runs)
    before, after = (list(StackConfig(pattern=p).layers()) for p in (pattern, deepen(pattern, depth)))
    assert len(after) == depth
    last = list(pattern[-1].blocks)
    endless = before + last * 20
    assert after == endless[:depth]


def test_a_run_that_comes_twice_is_not_taken_for_the_last():
    once = Repeat(blocks=(PARTS[0],))
    pattern = (once, Repeat(blocks=(PARTS[1],)), once)
    assert list(StackConfig(pattern=deepen(pattern, 3)).layers()) == [PARTS[0], PARTS[1], PARTS[0]]
