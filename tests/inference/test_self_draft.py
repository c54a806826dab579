"""A quantized copy of the model as its draft: the text is that of the model, token by token; the copy is kept."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from operator_support import use_kernels_for_toys
from support import build_model, is_encoder_decoder, random_source, random_tokens, tiny_model

import monoblock as mb
from monoblock.inference import prepared_model, speculative
from monoblock.inference.engine import Engine
from monoblock.inference.runners.cpu import CpuStack
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import MAX_CHECKED, DraftModel
from monoblock.kernels.cpu import library
from monoblock.quantization import packing

NAMES = ["gpt2", "llama-7b", "gemma3-1b", "bloom-560m", "mistral-7b", "mixtral-8x7b", "t5-small", "bart-base"]
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "constrained": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.fixture(scope="module", autouse=True)
def compiler():
    status = library.load_kernels()
    assert status.is_ready, status.reason


@pytest.fixture(autouse=True)
def kernels_for_toys(monkeypatch):
    use_kernels_for_toys(monkeypatch)


def gpt(seed=0, **changes):
    return build_model(mb.gpt(vocab=61, width=64, depth=2, heads=4, context=41, **changes), seed=seed)


@pytest.mark.parametrize(("settings", "kind"), [*((name, "8-bit") for name in SETTINGS), ("greedy", "4-bit")])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_the_model_alone(name, settings, kind):
    model, options = tiny_model(name), SETTINGS[settings]
    for rows in (1, 3):
        ids = random_source(rows) if is_encoder_decoder(model.config) else random_tokens(rows, 5)
        alone = model.generate(ids, max_new_tokens=19, **options)
        assert torch.equal(mb.optimize(model).generate(ids, max_new_tokens=19, draft=kind, **options), alone)


@pytest.mark.parametrize("name", ["t5-small", "bart-base"])
def test_several_samples_of_one_source_are_those_of_the_model_alone(name):
    model, options = tiny_model(name), {"max_new_tokens": 13, "num_return_sequences": 2, "temperature": 0.9, "seed": 3}
    for rows in (1, 3):
        alone = model.generate(random_source(rows), **options)
        assert torch.equal(mb.optimize(model).generate(random_source(rows), draft="8-bit", **options), alone)


def decode_with_draft(model, draft, ids, **settings):
    """The new tokens and the number of steps."""
    engine = Engine(model, capacity=41, proposer=draft)
    engine.add(ids, Settings(max_new_tokens=30, **settings))
    steps, tokens = 0, []
    while engine.busy:
        tokens += [token for output in engine.step() for token in output.tokens]
        steps += 1
    return tokens, steps


def test_a_draft_that_is_right_saves_steps_and_one_that_is_wrong_proposes_fewer_tokens():
    model, ids = gpt(), random_tokens(1, 5)[0].tolist()
    alone, steps = decode_with_draft(model, None, ids)
    assert steps == 30
    right = DraftModel(model, 7)
    tokens, steps = decode_with_draft(model, right, ids)
    assert tokens == alone
    assert steps == 1 + 4  # the prompt gives the first token, then eight a step
    assert right.accepted == right.proposed == 3 * 7 + 4  # the last step needs five tokens, four of them proposed
    wrong, options = DraftModel(gpt(seed=5), 7), {"temperature": 5.0, "seed": 1}
    tokens, steps = decode_with_draft(model, wrong, ids, **options)
    assert tokens == decode_with_draft(model, None, ids, **options)[0]
    assert wrong.accepted < wrong.proposed / 2
    assert wrong.proposed < 4 * steps


def test_the_copy_is_kept():
    model, ids = mb.optimize(gpt()), random_tokens(1, 5)
    first = speculative.make_self_draft(model, "8-bit").model
    assert first.bits == 8
    model.generate(ids, draft="8-bit", max_new_tokens=3)
    assert speculative.make_self_draft(model, "8-bit").model is first
    assert speculative.make_self_draft(model, "4-bit").model.bits == 4


def test_a_plain_model_has_no_copy():
    with pytest.raises(mb.InputError, match=r"write mb\.optimize\(model\)\.generate"):
        gpt().generate(random_tokens(1, 5), draft="8-bit")


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_proposals_are_checked_by_the_operator_that_takes_single_steps(rows, monkeypatch):
    """So sums are computed in the same order, and near ties are decided alike."""
    taken, step = [], CpuStack.step

    def record(self, x, *args, **options):
        taken.append((self, x.shape[1]))
        return step(self, x, *args, **options)

    monkeypatch.setattr(CpuStack, "step", record)
    engine = Engine(mb.optimize(gpt()), capacity=41)
    for ids in random_tokens(rows, 5).tolist():
        engine.add(ids, Settings(max_new_tokens=20, draft="8-bit"))
    engine.step()  # prefill
    taken.clear()
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    sizes = [size for stack, size in taken if stack is engine.model.model.decoder.cpu_stack]
    assert len(sizes) == steps
    assert 1 < max(sizes) <= MAX_CHECKED // rows


def decode(engine, ids, **options):
    engine.add(ids, Settings(max_new_tokens=9, **options))
    tokens = []
    while engine.busy:
        tokens += [token for output in engine.step() for token in output.tokens]
    return tokens


def test_the_draft_of_a_request_ends_with_it():
    model, ids = gpt(), random_tokens(1, 5)
    engine = Engine(mb.optimize(model), capacity=41)
    assert engine.proposer is None
    for options in ({"draft": "8-bit"}, {"num_beams": 4}, {"draft": "4-bit"}, {"draft": "8-bit"}, {}):
        tokens = decode(engine, ids[0].tolist(), **options)
        plain = {name: value for name, value in options.items() if name != "draft"}
        assert tokens == model.generate(ids, max_new_tokens=9, **plain)[0, 5:].tolist()
        engine.add(ids[0].tolist(), Settings(max_new_tokens=30, **options))
        engine.step()
        engine.step()
        using = [kind for kind, draft in engine.drafts.items() if draft.own_rows]
        assert using == [options[name] for name in options if name == "draft"]
        engine.cancel(engine.last_request_id)
        assert all(draft.pages.num_in_use == 0 and not draft.own_rows for draft in engine.drafts.values())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "temperature": 1.0, "seed": 3}, {}])
def test_a_draft_of_one_request_refuses_no_other(steps, options):
    """Waiting or running, it is the choice of that request alone."""
    model, ids = gpt(), random_tokens(1, 5)
    engine, new = Engine(mb.optimize(model), capacity=41), {}
    first = engine.add(ids[0].tolist(), Settings(max_new_tokens=9, draft="8-bit"))
    outputs = [output for _ in range(steps) for output in engine.step()]
    other = engine.add(ids[0].tolist(), Settings(max_new_tokens=9, **options))
    while engine.busy:
        outputs += engine.step()
    for output in outputs:
        assert output.error is None
        new.setdefault((output.request_id, output.sequence_index), []).extend(output.tokens)
    assert new[first, 0] == model.generate(ids, max_new_tokens=9)[0, 5:].tolist()
    for row, tokens in enumerate(model.generate(ids, max_new_tokens=9, **options)[:, 5:].tolist()):
        assert new[other, row] == tokens


def test_the_proposer_of_an_engine_stays():
    proposer = DraftModel(gpt(seed=1))
    engine, ids = Engine(mb.optimize(gpt()), capacity=41, proposer=proposer), random_tokens(1, 5)[0].tolist()
    for options in ({"draft": "8-bit"}, {}):
        decode(engine, ids, **options)
        assert engine.proposer is proposer


def test_a_stream_gives_the_same_text():
    model, ids = gpt(), random_tokens(2, 5)
    streamed = torch.stack(list(mb.optimize(model).stream(ids, max_new_tokens=23, draft="8-bit")), 1)
    assert torch.equal(streamed, model.generate(ids, max_new_tokens=23)[:, 5:])


def test_without_a_compiler_the_model_decodes_alone(monkeypatch):
    model, ids = mb.optimize(gpt()), random_tokens(1, 5)
    alone = model.generate(ids)
    monkeypatch.setattr(speculative, "load_kernels", lambda: library.KernelStatus(False, "no compiler"))
    assert speculative.make_self_draft(model, "8-bit") is None
    assert torch.equal(model.generate(ids, draft="8-bit"), alone)


IDS = torch.ones(1, 3, dtype=torch.long)
INVALID = {
    "another kind": (lambda m: m.generate(IDS, draft="7-bit"), "'8-bit' or '4-bit'"),
    "beams": (lambda m: mb.optimize(m).generate(IDS, draft="8-bit", num_beams=2), "single sequences"),
    "prompt lookup as well": (lambda m: m.generate(IDS, draft="8-bit", prompt_lookup=2), "give one of them"),
    "no cache": (lambda m: m.generate(IDS, draft=m, use_cache=False), "use_cache=True"),
    "an engine without a cache": (
        lambda m: Engine(m, use_cache=False).add([1], Settings(draft="8-bit")),
        "use_cache=True",
    ),
    "an engine with a draft and no cache": (
        lambda m: Engine(m, use_cache=False, proposer=DraftModel(m)),
        "use_cache=True",
    ),
    "a quantized model": (
        lambda m: mb.optimize(mb.quantize(m).eval()).generate(IDS, draft="8-bit"),
        "quantized to 8 bits already",
    ),
    "another kind, in an engine": (lambda m: Engine(m).add([1], Settings(draft="fast")), "draft='fast' is not valid"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_call_is_an_error_of_one_line(case):
    call, message = INVALID[case]
    with pytest.raises(mb.InputError, match=message) as error:
        call(gpt())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("group", [32, 64, 80])
def test_the_quantization_kernel_equals_torch(group):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(97, group, generator=generator) * torch.logspace(-30, 20, 97)[:, None]
    weight[5] = 0
    weight[7, :3] = torch.tensor([127.0, 0.5, -2.5])  # halves are rounded to even
    weight[7, 3:] = 1.5
    packed, expected = torch.ops.monoblock.quantize_int8(weight), packing.quantize_int8_reference(weight)
    assert all(torch.equal(*pair) for pair in zip(packed, expected, strict=True))


def test_threads_build_one_quantized_copy(monkeypatch):
    model, counts, barrier = mb.optimize(gpt()), [], threading.Barrier(4)
    quantize = prepared_model.quantize

    def count(*args, **options):
        counts.append(1)
        return quantize(*args, **options)

    def build(_):
        barrier.wait()
        return speculative.make_self_draft(model, "8-bit")

    monkeypatch.setattr(prepared_model, "quantize", count)
    with ThreadPoolExecutor(4) as pool:
        drafts = list(pool.map(build, range(4)))
    assert len(counts) == len({id(draft.model) for draft in drafts}) == 1
