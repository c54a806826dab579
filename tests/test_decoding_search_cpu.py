"""Searches whose steps are one operator: the texts and scores of the plain model in fp64, whatever goes on beside."""

from dataclasses import replace

import pytest
import torch
from support import build

import monoblock as mb
from monoblock.decoding import prepare, search_cpu
from monoblock.decoding.engine import Engine
from monoblock.decoding.prepare import prepared
from monoblock.decoding.search_cpu import Searched, operators
from monoblock.decoding.settings import Settings
from monoblock.lora import adapted, add_lora, folded
from monoblock.native import library

SIZES = {"vocab": 37, "width": 24, "depth": 2, "heads": 3, "hidden": 29, "context": 23}
KINDS = {
    "pre": {},
    "post": {"norm_place": "post"},
    "output": {"norm_place": "output", "norm": "rms"},
    "sandwich": {"norm_place": "sandwich", "activation": "gelu"},
    "gated": {"gated": True, "activation": "silu", "kv_heads": 1},
}
ASKED = Settings(max_new_tokens=17, num_beams=5, eos_token_id=(2, 7), num_return_sequences=2)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    if not library.load().ready:
        pytest.skip(library.load().reason)
    monkeypatch.setattr(prepare, "LARGE", 0)


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Whether searches were begun, and their steps taken, by the operator."""
    taken = {"enter": [], "advance": []}

    def counted(name, run):
        def noted(self, *given):
            found = run(self, *given)
            taken[name].append(found is not None and found is not False)
            return found

        return noted

    for name in taken:
        monkeypatch.setattr(search_cpu.Searched, name, counted(name, getattr(Searched, name)))
    return taken


def translator(**changes):
    return build(mb.vary(mb.vaswani(**SIZES), **changes), seed=5)


def sources(count):
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(3, 37, (2 + n % 7,), generator=chance).tolist() for n in range(count)]


def texts(model, given, asked=ASKED, late=0, rows=1000, **options):
    """By number of the source and rank: tokens and score.  The last `late` come when the others are under way."""
    engine, found = Engine(model, rows=rows, **options), {}
    order = {engine.add((1,), asked, source): n for n, source in enumerate(given[: len(given) - late])}
    steps = 0
    while engine.busy:
        found |= {(order[event.id], event.number): (event.tokens, event.score) for event in engine.step()}
        steps += 1
        if steps == 3:
            new = enumerate(given[len(given) - late :], len(given) - late) if late else ()
            order |= {engine.add((1,), asked, source): n for n, source in new}
    return found


def same(found, wanted):
    assert {key: tokens for key, (tokens, _) in found.items()} == {key: tokens for key, (tokens, _) in wanted.items()}
    for key, (_, score) in found.items():
        assert score == pytest.approx(wanted[key][1], abs=2e-5, rel=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_scores_are_those_of_the_plain_model_in_fp64(kind, served):
    model = translator(**KINDS[kind])
    assert operators(prepared(model)) is not None
    found = texts(model, sources(11))
    assert served == {"enter": [True], "advance": [True] * 17}
    same(found, texts(model.double(), sources(11), fast=False, use_cache=False))


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-0.7, 0.0, 1.3])
def test_searches_end_as_those_of_the_plain_model_do(early, penalty, served):
    model, asked = translator(), Settings(max_new_tokens=13, num_beams=3, num_return_sequences=3)
    said = texts(model, sources(11), asked)
    ends = tuple({tokens[3 + n % 7] for (n, _), (tokens, _) in said.items()} - {said[0, 0][0][0]})
    asked = replace(asked, eos_token_id=ends, early_stopping=early, length_penalty=penalty)
    found = texts(model, sources(11), asked)
    assert all(served["advance"])
    assert len({len(tokens) for tokens, _ in found.values()}) > 1
    same(found, texts(model.double(), sources(11), asked, fast=False, use_cache=False))


@pytest.mark.parametrize("changes", [{"embedding_norm": True}, {"positions": "learned"}, {"positions": "none"}])
def test_tokens_are_embedded_as_the_model_does(changes, served):
    model = translator(**changes)
    by = operators(prepared(model))
    assert (by.embedding is None) == ("embedding_norm" in changes)  # one with a norm is not the operator's
    found = texts(model, sources(11))
    assert served["advance"] == [True] * 17
    same(found, texts(model.double(), sources(11), fast=False, use_cache=False))


def test_neighbours_and_threads_change_nothing():
    model, given = translator(), sources(23)
    threads = torch.get_num_threads()
    wanted = texts(model, given)
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        same(texts(model, given), wanted)
    finally:
        torch.set_num_threads(threads)
    for first, count in ((0, 7), (7, 16)):
        found = texts(model, given[first : first + count])
        same(found, {(n - first, rank): one for (n, rank), one in wanted.items() if first <= n < first + count})


def test_two_engines_at_once_do_not_share_what_they_remember():
    model, given = translator(), sources(11)
    wanted, engines = texts(model, given), [Engine(model, rows=1000) for _ in range(2)]
    orders = [{engine.add((1,), ASKED, source): n for n, source in enumerate(given)} for engine in engines]
    found = [{}, {}]
    while any(engine.busy for engine in engines):
        for engine, order, one in zip(engines, orders, found, strict=True):
            one |= {(order[event.id], event.number): (event.tokens, event.score) for event in engine.step()}
    assert found == [wanted, wanted]


def test_a_request_that_is_cancelled_leaves_the_others_as_they_were():
    model, given = translator(), sources(11)
    wanted, engine, found = texts(model, given), Engine(model, rows=1000), {}
    order = {engine.add((1,), ASKED, source): n for n, source in enumerate(given)}
    for steps in range(100):
        found |= {(order[event.id], event.number): (event.tokens, event.score) for event in engine.step()}
        if steps == 4:
            engine.cancel(5)
    same(found, {key: one for key, one in wanted.items() if order[5] != key[0]})


@pytest.mark.parametrize("left", [0, 1, 4])
def test_cancelling_beside_texts_that_are_over(left):
    """All that run but a few are forgotten as soon as one text is over."""
    asked = Settings(max_new_tokens=13, num_beams=3, eos_token_id=tuple(range(3, 18)))
    model, given = translator(), sources(11)
    wanted, engine, found, gone = texts(model, given, asked), Engine(model, rows=1000), {}, set()
    order = {engine.add((1,), asked, source): n for n, source in enumerate(given)}
    while engine.busy:
        found |= {(order[event.id], event.number): (event.tokens, event.score) for event in engine.step()}
        running = [lane.id for lane in engine.lanes if not lane.done]
        if not gone and len(running) < len(engine.lanes):
            gone |= {order[one] for one in running[left:]}
            for one in running[left:]:
                engine.cancel(one)
    assert 0 < len(gone) < len(given)
    same(found, {key: one for key, one in wanted.items() if key[0] not in gone})


def test_a_newcomer_takes_the_room_of_a_text_that_is_over():
    asked = Settings(max_new_tokens=20, num_beams=5, eos_token_id=tuple(range(3, 18)))
    engine = Engine(translator(), rows=55)
    for source in sources(11):
        engine.add((1,), asked, source)
    while not any(lane.done for lane in engine.lanes):
        engine.step()
    assert len(engine.lanes) == 11
    late = engine.add((1,), asked, [4, 5])
    engine.step()
    assert late in {lane.id for lane in engine.lanes}


def test_under_autocast_the_plain_path_searches(served):
    with torch.autocast("cpu", torch.bfloat16):
        texts(translator(), sources(7))
    assert not any(served["advance"])


def test_what_is_ruled_out_is_never_said_and_a_shorter_text_may_not_end(served):
    asked = Settings(max_new_tokens=9, min_new_tokens=5, num_beams=4, eos_token_id=(2,), suppress_tokens=(11, 13))
    model = translator()
    found = texts(model, sources(7), asked)
    assert served == {"enter": [True], "advance": [True] * 9}
    same(found, texts(model.double(), sources(7), asked, fast=False, use_cache=False))


@pytest.mark.parametrize("rows", [25, 1000])
def test_newcomers_change_nothing(rows, served):
    """They come while others are under way, at once or as soon as there is room."""
    model = translator()
    found = texts(model, sources(11), late=4, rows=rows)
    assert sum(served["advance"]) > 10
    same(found, texts(model.double(), sources(11), fast=False, use_cache=False))


def test_rows_that_are_over_go_where_the_operator_does_not_run(served):
    """Samples are no search, and they would be computed to the end."""
    engine = Engine(translator(), capacity=23)
    for n, source in enumerate(sources(11)):
        asked = Settings(max_new_tokens=1 + n, num_return_sequences=3, temperature=1.0, seed=n)
        engine.add((1,), asked, source)
    engine.step()
    assert isinstance(engine.rows, Searched)
    while engine.lanes:
        assert 4 * sum(lane.done for lane in engine.lanes) < len(engine.lanes)
        assert engine.rows.cache.batch == 3 * len(engine.lanes)
        engine.step()
    assert not any(served["advance"])


@pytest.mark.parametrize("target", ["encoder.0.attention.query", "decoder.1.cross.output", "decoder.0.cross.key"])
def test_adapters_are_left_to_the_plain_way(target):
    model = translator()
    add_lora(model, rank=3, alpha=9, targets=(target,))
    for _, part in adapted(model):
        torch.nn.init.normal_(part.b)
    plain = folded(model).double()
    by = operators(prepared(model))
    assert (by is not None and by.encoder is not None) == target.endswith("key")  # the operator does not read that one
    same(texts(model, sources(11)), texts(plain, sources(11), fast=False, use_cache=False))


def test_a_decoder_alone_is_searched_from_prompts_of_several_tokens(served):
    model = build(mb.gpt(vocab=37, width=24, depth=2, heads=3, context=23), seed=3)
    assert operators(prepared(model)) is not None
    ids = torch.arange(3 * 5).view(3, 5) % 37
    asked = {"max_new_tokens": 11, "num_beams": 4, "eos_token_id": 2}
    found = model.generate(ids, **asked)
    assert served == {"enter": [False], "advance": [True] * 10}  # the prompts are read the plain way
    assert torch.equal(found, model.double().generate(ids, use_cache=False, **asked))


def test_the_encoder_reads_texts_side_by_side_as_it_does_padded():
    model = translator(norm_place="post", activation="gelu")
    by = operators(prepared(model))
    assert by.encoder is not None
    given = [mb.decoding.rows.Prompt((1,), tuple(source)) for source in sources(11)]
    with torch.inference_mode():
        memory, mask = Searched(prepared(model), 17, 3, by=by)._read_sources(given)
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([token for prompt in given for token in prompt.source])
        wanted = model.double().encode(ids, mask)
    torch.testing.assert_close(memory[mask].double(), wanted[mask], rtol=0, atol=2e-5)


@pytest.mark.parametrize("changes", [{"positions": "rotary"}, {"norm_place": "pre", "qk_norm": True}])
def test_what_the_operator_does_not_say_goes_the_plain_way(changes):
    model = translator(**changes)
    assert operators(prepared(model)) is None
    same(texts(model, sources(7)), texts(model.double(), sources(7), fast=False, use_cache=False))
