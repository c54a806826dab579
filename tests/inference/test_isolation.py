"""Requests of one engine leave nothing behind that changes another: each has the results that it has alone."""

import copy

import pytest
import torch
from support import build_model

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import DraftModel

SIZES = {"vocab": 65, "width": 64, "depth": 2, "heads": 2, "context": 128}
PROMPT = list(range(3, 37))


def build(config, seed=0):
    """A model whose log-probabilities depend clearly on every token that it sees."""
    model = build_model(config, seed=seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model


def gpt(**options):
    return build(mb.gpt(**SIZES | options))


def translator():
    return build(mb.vaswani(**SIZES))


def drain(engine):
    return [output for _ in range(500) if engine.busy for output in engine.step()]


def first_score(engine, **options):
    """The log-probability of the first new token."""
    engine.add(PROMPT, Settings(max_new_tokens=1, logprobs=0), **options)
    (output,) = drain(engine)
    return output.scores[0].logprob


def test_the_pages_of_an_edit_are_not_those_of_another():
    """A sweep makes an edit for each request; Python gives a new object the number of one that is gone."""
    fast = mb.optimize(gpt())
    engine = mb.Engine(fast)
    for strength in torch.linspace(0, 1, 60).tolist():
        edit = lambda strength=strength: mb.add_vector("decoder.0.output", strength * torch.arange(64.0))
        found = first_score(engine, edits=[edit()])
        assert found == pytest.approx(first_score(mb.Engine(fast), edits=[edit()]), abs=1e-4)


def test_an_edit_of_the_source_stays_where_it_is_if_the_prefix_is_reused():
    engine, source = mb.Engine(mb.optimize(translator())), [5, 6, 7, 8, 9, 10]
    edit = mb.add_vector("encoder.0.output", 20 * torch.arange(64.0), positions=[2])
    edited = [first_score(engine, source=source, edits=[edit]) for _ in range(2)]
    assert edited[0] == pytest.approx(edited[1], abs=1e-4)
    assert edited[0] != pytest.approx(first_score(engine, source=source), abs=1e-2)


def test_an_edit_of_a_token_stays_where_it_is_without_a_cache():
    model = gpt()
    edit = mb.add_vector("decoder.0.output", 0.05 * torch.arange(64.0), positions=range(2, 20))
    scores = []
    for use_cache in (True, False):
        engine = mb.Engine(model, use_cache=use_cache)
        engine.add(PROMPT[:20], Settings(max_new_tokens=4, logprobs=0), edits=[edit])
        scores.append([output.scores[0].logprob for output in drain(engine)])
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_adapted", [True, False], ids=["adapter", "edit"])
def test_modules_beside_a_fast_copy_use_no_dropout(is_adapted):
    model = gpt(dropout=0.5)
    fast, other = mb.optimize(model), copy.deepcopy(model)
    mb.add_lora(other, rank=4, dropout=0.5)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
    model.train()
    other.train()
    options = {"adapter": "a"} if is_adapted else {"edits": [mb.ablate("decoder.0.output", positions=[3])]}
    adapters = {"a": other} if is_adapted else None
    scores = [first_score(mb.Engine(fast, adapters=adapters), **options) for _ in range(2)]
    assert scores[0] == scores[1]
    assert model.training
    assert other.training


def test_an_adapter_that_has_changed_has_no_pages():
    model = gpt()
    adapted = copy.deepcopy(model)
    mb.add_lora(adapted, rank=4)
    engine = mb.Engine(mb.optimize(model), adapters={"a": adapted})
    before = first_score(engine, adapter="a")
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
    fresh = mb.Engine(mb.optimize(model), adapters={"a": adapted})
    assert first_score(engine, adapter="a") == pytest.approx(first_score(fresh, adapter="a"), abs=1e-4) != before


def test_a_processor_that_works_in_place_does_not_change_the_raw_scores():
    def restrict(ids, logits):
        logits[:, :60] = -torch.inf
        return logits

    scores = []
    for processor in (restrict, lambda ids, logits: restrict(ids, logits.clone())):
        engine = mb.Engine(gpt())
        engine.add(PROMPT, Settings(max_new_tokens=4, logprobs=2, logits_processor=processor))
        scores.append([output.scores for output in drain(engine)])
    assert scores[0] == scores[1]
    assert scores[0][0][0].logprob < scores[0][0][0].top[0][1]


@pytest.mark.parametrize("seed", range(3))
def test_beams_that_are_preempted_twice_keep_their_own_pages(seed):
    """The second hypothesis overtakes after pages of the first have been published by another request."""
    fast = mb.optimize(build(mb.gpt(**SIZES), seed=seed))
    prompt, first, second, rest = PROMPT[:14], 40, 41, 42

    def steer(ids, logits):
        done = ids.shape[1] - len(prompt)
        if done >= 30:
            return logits
        out = torch.full_like(logits, -torch.inf)
        if done == 0:
            out[0, first], out[0, second] = -0.1, -2.3
        else:
            out[0, rest] = -10.0 if done == 8 and ids[0, len(prompt)] == first else -0.01
        return out

    def search(*, is_disturbed):
        engine = mb.Engine(fast, max_rows=4)
        own = engine.add(prompt, Settings(max_new_tokens=36, num_beams=2, logits_processor=steer))
        engine.add(prompt, Settings(max_new_tokens=12, logits_processor=steer, priority=1))
        outputs = []
        for step in range(100):
            if is_disturbed and step in (5, 21):
                count = 3 if step == 5 else 4
                sampled = {"temperature": 1.0, "seed": 0, "num_return_sequences": count}
                engine.add([1, 2, 3], Settings(max_new_tokens=3, priority=5, **sampled))
            outputs += engine.step() if engine.busy else []
        return next(output for output in outputs if output.request_id == own)

    alone, found = search(is_disturbed=False), search(is_disturbed=True)
    assert found.tokens == alone.tokens
    assert found.score == pytest.approx(alone.score, abs=1e-5)


def test_what_is_run_again_after_a_preemption_gets_no_proposals():
    """Its tokens are run one by one, as those of a prompt: only the newest one is followed by proposals."""
    model = build_model(mb.gpt(**SIZES))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    options = {"max_new_tokens": 30, "temperature": 1.3, "seed": 5}
    alone = mb.Engine(model)
    alone.add(PROMPT, Settings(**options))
    engine = mb.Engine(model, num_pages=6, prefill_chunk=1, reuses_prefixes=False, proposer=DraftModel(model, 4))
    own = engine.add(PROMPT, Settings(**options))
    outputs = []
    for step in range(200):
        if step == len(PROMPT) + 2:
            engine.add(PROMPT[::-1], Settings(max_new_tokens=40, priority=1))
        outputs += engine.step()
    assert not engine.busy
    found = [token for output in outputs if output.request_id == own for token in output.tokens]
    assert found == [token for output in drain(alone) for token in output.tokens]


def test_a_text_that_cannot_be_decoded_ends_its_own_request():
    """The model has more tokens than the tokenizer, as with a padded vocabulary."""
    tokenizer = mb.Tokenizer.train("bpe", ["hello world how are you"] * 20, vocab_size=300)
    engine = mb.Engine(gpt(vocab=400), tokenizer=tokenizer)
    good = engine.add([5, 6], Settings(max_new_tokens=3))
    bad = engine.add([5, 6], Settings(max_new_tokens=3, stop="zz", logit_bias={390: 1000}))
    outputs = drain(engine)
    assert [output.finish_reason for output in outputs if output.request_id == bad] == ["error"]
    assert sum(len(output.tokens) for output in outputs if output.request_id == good) == 3
    assert engine.pages.num_in_use == 0


def test_the_context_ends_a_text_also_with_a_larger_capacity():
    engine = mb.Engine(gpt(), capacity=1000)
    engine.add(PROMPT, Settings(max_new_tokens=500))
    outputs = drain(engine)
    assert outputs[-1].finish_reason == "context"
    assert sum(len(output.tokens) for output in outputs) == SIZES["context"] - len(PROMPT)


def test_what_cannot_be_honoured_is_refused():
    model, other = gpt(), gpt(vocab=90)
    cases = {
        "no stop strings and no logprobs": lambda: mb.Engine(model).add([3], Settings(num_beams=2, logprobs=1)),
        "stop strings need a tokenizer": lambda: mb.Engine(model, tokenizer="abc").add([3], Settings(stop="x")),
        "write numbers by token id": lambda: Settings(logit_bias={None: 1.0}),
        "belongs to another model": lambda: mb.Engine(model, adapters={"a": other}),
        "vocabulary of 90 tokens": lambda: mb.Engine(model, proposer=DraftModel(other)),
        "draft model needs a source": lambda: mb.Engine(model, proposer=DraftModel(translator())),
        "a source of 65537 tokens": lambda: mb.Engine(translator(), max_rows=1).add([3], source=[3] * 65537),
        "adapters is not a dictionary": lambda: mb.Engine(model, adapters=[model]),
        "no adapter": lambda: mb.Engine(model).add([3], adapter=["a"]),
        "write mb.Settings": lambda: mb.Engine(model).add([3], Settings),
        "optimized already": lambda: mb.optimize(mb.optimize(model)),
        "is not a proposer": lambda: mb.Engine(model, proposer=[3]),
    }
    for words, call in cases.items():
        with pytest.raises(InputError, match=words):
            call()


@pytest.mark.parametrize("options", [{"edits": [mb.ablate("decodr.0.output")]}, {"capture": ["decodr.0.output"]}])
def test_a_name_without_an_activation_ends_the_request(options):
    engine = mb.Engine(gpt())
    engine.add(PROMPT, Settings(max_new_tokens=2), **options)
    (output,) = drain(engine)
    assert "names no activation" in str(output.error)


def test_a_submodule_in_training_mode_is_not_optimized():
    model = gpt()
    model.decoder.train()
    with pytest.raises(InputError, match="training mode"):
        mb.optimize(model)
