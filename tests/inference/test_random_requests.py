"""Random requests to one engine, with every mix of beams, samples, speculation, chunks, options, priorities, few pages,
cancellations, failures and interrupts.  Each text is the one that plain decoding of its prompt alone gives, in fp64, so
that rounding decides no tie.

The plain text comes from whole passes of the model (`use_cache=False`, `optimize=False`), one request at a time.
"""

import itertools
import random
import resource
import time
from dataclasses import replace

import pytest
import torch
from interrupt_support import interrupted_step
from operator_support import optimize
from support import build_model

import monoblock as mb
from monoblock.config.presets import tiny
from monoblock.inference.speculative import DraftModel, PromptLookup

VOCAB, CONTEXT = 31, 61
SIZES = {"vocab": VOCAB, "width": 16, "depth": 2, "heads": 2, "context": CONTEXT}
ROTARY = mb.llama(**SIZES, kv_heads=1, hidden=19)


def preset(name):
    return mb.vary(tiny(name), vocab=VOCAB, context=CONTEXT)


MODELS = {
    "rotary": ROTARY,
    "learned positions": mb.gpt(**SIZES),
    "ALiBi": preset("bloom-560m"),
    "ALiBi with a window": mb.vary(preset("mpt-7b"), window=7),
    "window of 6": mb.vary(ROTARY, window=6),
    "window of 1": mb.vary(ROTARY, window=1),
    "windows in every other block": preset("gemma2-2b"),
    "windows of two rotary bases": preset("gemma3-1b"),
    "linear attention": mb.vary(ROTARY, attention="linear"),
    "encoder-decoder": mb.vaswani(**SIZES),
    "encoder-decoder with relative positions": preset("t5-small"),
    "encoder-decoder with a window": mb.vary(mb.vaswani(**SIZES), window=5),
}


def build(name, seed):
    """A model in fp64 with weights so large that its texts depend on every token that it sees."""
    model = build_model(MODELS[name], seed=seed).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return model


def random_settings(rng):
    """Options of one request: greedy, sampled, or a beam search."""
    options = {"max_new_tokens": rng.choice((1, 2, 3, 5, 9, 17, 40))}
    if rng.random() < 0.6:
        options["eos_token_id"] = tuple(rng.sample(range(VOCAB), rng.choice((1, 3))))
    if rng.random() < 0.2:
        options["min_new_tokens"] = rng.randint(0, options["max_new_tokens"])
    if rng.random() < 0.2:
        options["repetition_penalty"] = 1.3
    if rng.random() < 0.1:
        options["no_repeat_ngram_size"] = 3
    if rng.random() < 0.1:
        options["bad_words_ids"] = [[rng.randrange(VOCAB)], [rng.randrange(VOCAB), rng.randrange(VOCAB)]]
    if rng.random() < 0.1:
        options |= {"presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {rng.randrange(VOCAB): 3.0}}
    options["priority"] = rng.choice((0, 0, 0, 1))
    kind = rng.random()
    if kind < 0.3:
        options |= {"temperature": rng.choice((0.7, 1.3)), "seed": rng.randrange(1000)}
        options |= {"num_return_sequences": rng.choice((1, 1, 2, 3)), "top_k": rng.choice((0, 5)), "top_p": 0.9}
    elif kind < 0.4:
        options["num_beams"] = rng.choice((2, 3))
        if options["num_beams"] == 2 and rng.random() < 0.4:
            options |= {"num_beam_groups": 2, "diversity_penalty": 0.7}
    elif kind < 0.45:
        options["draft"] = rng.choice(("8-bit", "4-bit"))
    return mb.Settings(**options)


def random_prompt(rng):
    """Some prompts repeat themselves, so that a prompt lookup finds something."""
    if rng.random() < 0.5:
        return [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 13, 29)))]
    part = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
    return (part * 9)[: rng.randint(2, 29)]


def random_proposer(rng, name, model):
    """No proposer, a prompt lookup, or a draft: the model itself, or one of other weights."""
    kind = rng.randrange(4)
    if kind == 1:
        return PromptLookup(rng.choice((1, 3, 8, 15, 16, 17, 24, 40)), rng.choice((1, 3)))
    if kind > 1:
        draft = model if kind == 2 else build(name, 1)
        return DraftModel(draft, rng.choice((1, 4, 16, 17, 24)), rng.choice((None, 9)))
    return None


def fail(ids, logits):
    """A logits processor that works for two tokens."""
    if ids.shape[1] % 3 == 0:
        raise ValueError("the request has failed")
    return logits


def decode_alone(model, ids, settings, source):
    """The texts of one request by whole passes over all its tokens, without a cache, a copy or a draft."""
    engine = mb.Engine(model, use_cache=False)
    engine.add(ids, replace(settings, draft=None), source)
    texts = {}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            texts.setdefault(output.sequence_index, []).extend(output.tokens)
    return texts


def run_batch(rng, name, count):
    """Decode `count` random requests with one engine; return (request, found, alone) of those that differ."""
    model = build(name, 0)
    proposer = random_proposer(rng, name, model)
    use_cache = proposer is not None or rng.random() < 0.9
    engine = mb.Engine(
        optimize(model) if use_cache and rng.random() < 0.7 else model,
        max_rows=rng.choice((3, 7, 64)),
        num_pages=rng.choice((None, 20, 40)),  # with few pages requests wait, and give theirs back
        prefill_chunk=rng.choice((None, None, 1, 2, 5, 17, 30)),
        proposer=proposer,
        use_cache=use_cache,
    )
    has_source, interrupts = MODELS[name].family == "encoder-decoder", rng.random() < 0.5
    requests, texts, cancelled, waiting = {}, {}, set(), count
    while engine.busy or waiting:
        for _ in range(min(waiting, rng.choice((0, 1, 2, 9)))):
            settings = random_settings(rng)
            if settings.draft is not None and (not engine.use_cache or engine.model is model):
                continue
            if rng.random() < 0.03:  # a request that fails ends alone
                settings = replace(settings, logits_processor=fail, draft=None)
            prompt = random_prompt(rng)
            call = ([rng.randrange(VOCAB)] if has_source else prompt, settings, prompt if has_source else None)
            requests[engine.add(*call)] = call
            waiting -= 1
        if requests and rng.random() < 0.02:
            cancelled.add(chosen := rng.choice(list(requests)))
            engine.cancel(chosen)
        interrupt = rng.randint(1, 700) if interrupts and rng.random() < 0.3 else 0
        for output in interrupted_step(engine, interrupt)[0] if interrupt else engine.step():
            if output.error is not None:
                assert requests[output.request_id][1].logits_processor, output.error
                cancelled.add(output.request_id)
            texts.setdefault(output.request_id, {}).setdefault(output.sequence_index, []).extend(output.tokens)
    assert engine.pages.num_in_use == engine.sources.num_in_use == 0
    differing = []
    for request, call in requests.items():
        ids, settings, source = call
        alone = decode_alone(model, ids, replace(settings, logits_processor=()), source)
        found = texts.get(request, {})
        if request in cancelled:  # what there is of it is the beginning
            alone = {row: alone[row][: len(found[row])] for row in found}
        if found != alone:
            differing.append((call, found, alone))
    return differing


def run_requests(count, seed, sizes):
    """Decode `count` requests in batches of these sizes over all models in turn; return those that differ."""
    rng, differing, names = random.Random(seed), [], itertools.cycle(MODELS)
    while count > 0:
        name, size = next(names), min(count, rng.choice(sizes))
        count -= size
        differing += [(name, *one) for one in run_batch(rng, name, size)]
    return differing


def test_random_requests_have_the_texts_that_they_have_alone():
    differing = run_requests(2 * len(MODELS), seed=1, sizes=(2,))
    assert not differing, differing[0]


@pytest.mark.slow
def test_twenty_thousand_random_requests_have_the_texts_that_they_have_alone():
    """Memory is flat: the last 18,000 need no more of it than the first 2,000."""
    start, differing, peaks = time.perf_counter(), [], []
    for seed in range(10):
        differing += run_requests(2000, seed, sizes=(1, 4, 9, 17))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        print(f"{2000 * (seed + 1)} requests, {len(differing)} differ, at most {peaks[-1]:.0f} MiB", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    assert not differing, differing[0]
    assert peaks[-1] < peaks[0] + 100
