"""A model's own quantised copy runs ahead: the text is the model's, token by token; the copy is kept and renewed."""

from weakref import WeakKeyDictionary

import pytest
import torch
from support import build, has_both, source, tokens, toy

import monoblock as mb
from monoblock.decoding import own_draft, prepare, step_cpu
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.decoding.speculative import Draft
from monoblock.native import library
from monoblock.quantize import packing

NAMES = ["gpt2", "llama-7b", "gemma3-1b", "bloom-560m", "mistral-7b", "mixtral-8x7b", "t5-small", "bart-base"]
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "ruled": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.fixture(scope="module", autouse=True)
def compiler():
    found = library.load()
    assert found.ready, found.reason


@pytest.fixture(autouse=True)
def toys_by_the_operator(monkeypatch):
    """As large models are run; and no twin or copy that another test has made."""
    monkeypatch.setattr(prepare, "LARGE", 0)
    monkeypatch.setattr(prepare, "TWINS_MADE", WeakKeyDictionary())
    monkeypatch.setattr(own_draft, "COPIES", WeakKeyDictionary())


def gpt(seed=0, **more):
    return build(mb.gpt(vocab=61, width=64, depth=2, heads=4, context=41, **more), seed=seed)


@pytest.mark.parametrize(("way", "kind"), [*((way, "8-bit") for way in WAYS), ("greedy", "4-bit")])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_what_the_model_says_alone(name, way, kind):
    model = toy(name)
    both = has_both(model.config)
    for rows in (1, 3):
        ids = source(rows) if both else tokens(rows, 5)
        alone = model.generate(ids, max_new_tokens=19, **WAYS[way])
        assert torch.equal(model.generate(ids, max_new_tokens=19, draft=kind, **WAYS[way]), alone)


@pytest.mark.parametrize("name", ["t5-small", "bart-base"])
def test_several_samples_of_one_source_are_those_of_the_model_alone(name):
    model, asked = toy(name), {"max_new_tokens": 13, "num_return_sequences": 2, "temperature": 0.9, "seed": 3}
    for rows in (1, 3):
        alone = model.generate(source(rows), **asked)
        assert torch.equal(model.generate(source(rows), draft="8-bit", **asked), alone)


def drafted(model, draft, ids, **settings):
    engine = Engine(model, capacity=41, proposer=draft)
    engine.add(ids, Settings(max_new_tokens=30, **settings))
    steps, said = 0, []
    while engine.busy:
        said += [token for event in engine.step() for token in event.tokens]
        steps += 1
    return said, steps


def test_a_draft_that_is_always_right_is_asked_seldom_and_one_that_is_wrong_runs_less_far():
    model, ids = gpt(), tokens(1, 5)[0].tolist()
    alone, steps = drafted(model, None, ids)
    assert steps == 30
    right = Draft(model, 7)
    said, steps = drafted(model, right, ids)
    assert said == alone
    assert steps == 1 + 4  # the prompt gives the first token, then eight a step
    assert right.accepted == right.proposed == 3 * 7 + 4  # of the last eight only five were asked for
    wrong, lively = Draft(gpt(seed=5), 7), {"temperature": 5.0, "seed": 1}
    said, steps = drafted(model, wrong, ids, **lively)
    assert said == drafted(model, None, ids, **lively)[0]
    assert wrong.accepted < wrong.proposed / 2
    assert wrong.proposed < 4 * steps


def test_the_copy_is_kept_and_made_anew_when_a_weight_has_changed():
    model, ids = gpt(), tokens(1, 5)
    first = own_draft.own_draft(model, "8-bit").model
    assert first.config.quantize.bits == 8
    model.generate(ids, draft="8-bit", max_new_tokens=3)
    assert own_draft.own_draft(model, "8-bit").model is first
    with torch.no_grad():
        model.decoder.get_submodule("0.feedforward.up").weight.mul_(1.5)
    second = own_draft.own_draft(model, "8-bit").model
    assert second is not first
    assert torch.equal(model.generate(ids, draft="8-bit"), model.generate(ids))
    assert own_draft.own_draft(model, "4-bit").model.config.quantize.bits == 4


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_what_is_proposed_is_checked_by_the_operator_that_takes_steps_alone(rows, monkeypatch):
    """So that sums are made in the same order, and near ties fall alike."""
    taken, run = [], step_cpu.Whole.__call__

    def noted(self, x, *given):
        found = run(self, x, *given)
        if found is not None:
            taken.append((self, x.shape[1]))
        return found

    monkeypatch.setattr(step_cpu.Whole, "__call__", noted)
    engine = Engine(gpt(), capacity=41)
    for ids in tokens(rows, 5).tolist():
        engine.add(ids, Settings(max_new_tokens=20, draft="8-bit"))
    engine.step()  # the prompts
    taken.clear()
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    sizes = [size for whole, size in taken if whole is engine.model.decoder.whole]
    assert len(sizes) == steps
    assert 1 < max(sizes) <= step_cpu.MOST // rows


def all_of(engine, ids, **asked):
    engine.add(ids, Settings(max_new_tokens=9, **asked))
    said = []
    while engine.busy:
        said += [token for event in engine.step() for token in event.tokens]
    return said


def test_a_draft_that_a_request_names_is_gone_when_the_next_names_none():
    model, ids = gpt(), tokens(1, 5)
    engine = Engine(model, capacity=41)
    for asked in ({"draft": "8-bit"}, {"num_beams": 4}, {"draft": "4-bit"}, {"draft": "8-bit"}, {}):
        said = all_of(engine, ids[0].tolist(), **asked)
        plain = {name: value for name, value in asked.items() if name != "draft"}
        assert said == model.generate(ids, max_new_tokens=9, **plain)[0, 5:].tolist()
        bits = None if engine.proposer is None else f"{engine.proposer.model.config.quantize.bits}-bit"
        assert bits == asked.get("draft")


def test_a_proposer_that_the_engine_was_given_stays():
    given = Draft(gpt(seed=1))
    engine, ids = Engine(gpt(), capacity=41, proposer=given), tokens(1, 5)[0].tolist()
    for asked in ({"draft": "8-bit"}, {}):
        all_of(engine, ids, **asked)
        assert engine.proposer is given


def test_a_stream_says_the_same():
    model, ids = gpt(), tokens(2, 5)
    said = torch.stack(list(model.stream(ids, max_new_tokens=23, draft="8-bit")), 1)
    assert torch.equal(said, model.generate(ids, max_new_tokens=23)[:, 5:])


def test_without_a_compiler_the_model_speaks_alone(monkeypatch):
    model, ids = gpt(), tokens(1, 5)
    alone = model.generate(ids)
    monkeypatch.setattr(own_draft, "load", lambda: library.Kernels(False, "no compiler"))
    assert own_draft.own_draft(model, "8-bit") is None
    assert torch.equal(model.generate(ids, draft="8-bit"), alone)


def lstm():
    return mb.Recurrent(mb.RecurrentConfig(vocab=7, width=8)).eval()


ONE = torch.ones(1, 3, dtype=torch.long)
BAD = {
    "another word": (lambda m: m.generate(ONE, draft="7-bit"), "'8-bit' or '4-bit'"),
    "beams": (lambda m: m.generate(ONE, draft="8-bit", num_beams=2), "single sequences"),
    "looking up as well": (lambda m: m.generate(ONE, draft="8-bit", prompt_lookup=2), "give one of them"),
    "no cache": (lambda m: m.generate(ONE, draft="8-bit", use_cache=False), "use_cache=True"),
    "an engine without a cache": (
        lambda m: Engine(m, use_cache=False).add([1], Settings(draft="8-bit")),
        "use_cache=True",
    ),
    "an engine without a cache and a draft of its own": (
        lambda m: Engine(m, use_cache=False, proposer=Draft(m)),
        "use_cache=True",
    ),
    "a model that is quantised": (lambda m: mb.quantized(m).generate(ONE, draft="8-bit"), "has 8 bits already"),
    "an engine, another word": (lambda m: Engine(m).add([1], Settings(draft="fast")), "draft='fast' cannot be"),
    "an LSTM": (
        lambda m: Engine(lstm(), capacity=9).add([1], Settings(draft="8-bit")),
        "LSTM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_one_line(case):
    call, said = BAD[case]
    with pytest.raises(mb.InputError, match=said) as caught:
        call(gpt())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("group", [32, 64, 80])
def test_the_kernel_that_packs_says_what_torch_says(group):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(97, group, generator=draw) * torch.logspace(-30, 20, 97)[:, None]
    weight[5] = 0
    weight[7, :3] = torch.tensor([127.0, 0.5, -2.5])  # halves go to the even neighbour
    weight[7, 3:] = 1.5
    for found, expected in zip(torch.ops.monoblock.pack8(weight), packing.eight(weight), strict=True):
        assert torch.equal(found, expected)
