"""In exact mode the bits of every logit depend on the request alone.

Each case decodes random requests together (samples, beams and proposals, arrivals, chunks, prefixes from the cache, few
pages), records the logits after every prefix of a row, and compares them with those of the request alone in a new
engine.
"""

import random
from dataclasses import replace

import pytest
import torch
from operator_support import use_kernels_for_toys
from support import build_model, tiny_config

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference.speculative import PromptLookup
from monoblock.kernels.cpu import library

VOCAB, CONTEXT = 61, 200
SIZES = {"vocab": VOCAB, "width": 96, "depth": 2, "heads": 4, "context": CONTEXT}
MODELS = {
    "rotary": mb.llama(**SIZES, kv_heads=2, hidden=160),
    "learned positions": mb.gpt(**SIZES),
    "window": mb.llama(**SIZES, kv_heads=1, hidden=100, window=19),
    "encoder-decoder": mb.vaswani(**SIZES),
    **{name: mb.vary(tiny_config(name), context=CONTEXT) for name in ("bloom-560m", "gemma2-2b", "t5-small")},
}


@pytest.fixture(scope="module", autouse=True)
def compiler():
    status = library.load_kernels()
    assert status.is_ready, status.reason


def build(name, bits=None):
    model = build_model(MODELS[name])
    return model if bits is None else mb.quantize(model, bits=bits)


def random_request(rng, model, shared):
    """Arguments of `Engine.add`; many prompts begin in the same way."""
    prompt = [rng.randrange(1, VOCAB) for _ in range(rng.choice((1, 3, 9, 40)))]
    prompt = shared[: rng.choice((16, 33, len(shared)))] + prompt if rng.random() < 0.5 else prompt
    options = {"max_new_tokens": rng.choice((3, 9, 20))}
    kind = rng.random()
    if kind < 0.3:
        options |= {"temperature": 1.0, "seed": rng.randrange(99), "num_return_sequences": rng.choice((1, 2))}
    elif kind < 0.5:
        options["num_beams"] = rng.choice((2, 3))
    elif kind < 0.7 and model.config.quantize is None:
        options["draft"] = "8-bit"
    if model.encoder is None:
        return prompt, mb.Settings(**options), None
    return prompt[: rng.choice((1, 5))], mb.Settings(**options), prompt


def record_logits(engine):
    """The bits of the logits after every prefix that an engine will run: by its source and tokens."""
    recorded, run = {}, engine.runner.run

    def run_and_record(passes):
        result = run(passes)
        rows = iter(result.logits.numpy())
        for one in passes:
            tokens = (*one.row.tokens[: one.start], *one.tokens)
            for end in range(len(tokens) - one.num_logits + 1, len(tokens) + 1):
                bits = next(rows).tobytes()
                recorded.setdefault((one.row.request.prompt.source, tokens[:end]), set()).add(bits)
        return result

    engine.runner.run = run_and_record
    return recorded


def decode(engine, requests, rng=None):
    """The texts of requests, by number and sequence; with `rng` they arrive at random steps."""
    waiting, numbers, texts = list(enumerate(requests)), {}, {}
    while waiting or engine.busy:
        for _ in range(rng.choice((0, 1, 2, 7)) if rng else len(waiting)):
            if waiting:
                number, request = waiting.pop(0)
                numbers[engine.add(*request)] = number
        for output in engine.step():
            assert output.error is None
            texts.setdefault((numbers[output.request_id], output.sequence_index), []).extend(output.tokens)
    return texts


def count_differences(model, exact, seed, count):
    """How many prefixes have other logits among others than alone, and how many texts differ."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, VOCAB) for _ in range(60)]
    requests = [random_request(rng, model, shared) for _ in range(count)]
    fast = mb.optimize(model, exact=exact)
    options = {"proposer": rng.choice((None, PromptLookup(3, 1), PromptLookup(8, 1))), "capacity": CONTEXT}
    engine = mb.Engine(
        fast, max_rows=rng.choice((3, 20)), num_pages=rng.choice((40, 200)), prefill_chunk=rng.choice((None, 7, 32)),
        **options,
    )  # fmt: skip
    together, texts = record_logits(engine), decode(engine, requests, rng)
    alone, alone_texts = {}, {}
    requests = [(prompt, replace(settings, draft=None), source) for prompt, settings, source in requests]
    for number, request in enumerate(requests):
        engine = mb.Engine(fast, **{**options, "proposer": None})
        recorded = record_logits(engine)
        alone_texts |= {(number, index): text for (_, index), text in decode(engine, [request]).items()}
        for prefix, bits in recorded.items():
            alone.setdefault(prefix, set()).update(bits)
    shared_prefixes = together.keys() & alone.keys()
    assert len(shared_prefixes) > count
    different = [prefix for prefix in shared_prefixes if len(together[prefix] | alone[prefix]) > 1]
    return len(different), sum(text != alone_texts[key] for key, text in texts.items())


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_the_request_alone(name, bits):
    assert count_differences(build(name, bits), True, 1, 10) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", MODELS)
def test_many_requests_have_the_bits_of_the_request_alone(name, bits):
    for seed in range(2, 5):
        assert count_differences(build(name, bits), True, seed, 25) == (0, 0)


def test_bits_differ_without_the_mode(monkeypatch):
    use_kernels_for_toys(monkeypatch)
    assert count_differences(build("rotary"), False, 1, 10)[0] > 0


def test_long_prompts_are_cut_into_pieces_that_the_operator_takes():
    model = build_model(mb.llama(**SIZES | {"context": 1300}, kv_heads=2, hidden=160))
    prompt = [n * n % VOCAB for n in range(1200)]
    texts = [
        decode(mb.Engine(model, exact=True, prefill_chunk=chunk), [(prompt, mb.Settings(max_new_tokens=4))])
        for chunk in (None, 500)
    ]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=4)[0, 1200:].tolist()
    assert texts == [{(0, 0): expected}] * 2


def test_scores_of_prompts_do_not_depend_on_chunks():
    fast, prompt = mb.optimize(build("rotary"), exact=True), list(range(1, 45))
    scores = []
    for chunk in (None, 1, 7):
        engine = mb.Engine(fast, prefill_chunk=chunk)
        engine.add(prompt, mb.Settings(max_new_tokens=1, score_prompt=True, logprobs=2))
        outputs = [output for _ in range(50) if engine.busy for output in engine.step()]
        scores.append(outputs[-1].prompt_scores)
    assert len(scores[0]) == len(prompt) - 1
    assert scores[0] == scores[1] == scores[2]


def test_the_same_tokens_as_the_model():
    model, ids = build("rotary"), torch.arange(1, 31).view(2, 15)
    fast = mb.optimize(model, exact=True)
    assert torch.equal(fast.generate(ids, max_new_tokens=30), model.generate(ids, max_new_tokens=30))
    scores = fast.generate(ids, max_new_tokens=30, return_scores=True).scores
    for row in range(2):
        alone = fast.generate(ids[row : row + 1], max_new_tokens=30, return_scores=True).scores
        assert torch.equal(alone[0], scores[row])


def refuse(call, text):
    with pytest.raises(InputError, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_is_not_covered_is_refused_by_name():
    model = build("rotary")
    fast, exact = mb.optimize(model), mb.optimize(model, exact=True)
    refuse(lambda: mb.Engine(fast, exact=True), "exact=True does not fit")
    refuse(lambda: mb.Engine(exact, exact=False), "exact=False does not fit")
    refuse(lambda: mb.Engine(model, exact=True, use_cache=False), "no use_cache=False")
    refuse(lambda: mb.Engine(model, exact=True, tap=lambda name, x: None), "no taps")
    refuse(lambda: mb.Engine(exact, ensemble=[model]), "without an ensemble")
    refuse(lambda: mb.Engine(model, exact=True, adapters={"a": model}), "without an ensemble")
    refuse(lambda: mb.Engine(exact).add([1], capture=["decoder.*"]), "edits and capture")
    refuse(lambda: mb.optimize(build_model(tiny_config("mixtral-8x7b")), exact=True), "experts")
    refuse(lambda: mb.optimize(build_model(MODELS["rotary"]).double(), exact=True), "float64")
