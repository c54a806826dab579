"""Searches whose steps are one operator: the texts and scores of the plain model in fp64, whatever goes on beside."""

import pytest
import torch
from support import build

import monoblock as mb
from monoblock.decoding import prepare, searched
from monoblock.decoding.engine import Engine
from monoblock.decoding.prepare import prepared
from monoblock.decoding.searched import Searched, operators
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
    taken = {"enter": [], "best": []}

    def counted(name, run):
        def noted(self, *given):
            found = run(self, *given)
            taken[name].append(found is not None and found is not False)
            return found

        return noted

    for name in taken:
        monkeypatch.setattr(searched.Searched, name, counted(name, getattr(Searched, name)))
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
        assert score == pytest.approx(wanted[key][1], abs=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_scores_are_those_of_the_plain_model_in_fp64(kind, served):
    model = translator(**KINDS[kind])
    assert operators(prepared(model)) is not None
    found = texts(model, sources(11))
    assert served == {"enter": [True], "best": [True] * 17}
    same(found, texts(model.double(), sources(11), fast=False, use_cache=False))


def test_what_is_ruled_out_is_never_said_and_a_shorter_text_may_not_end(served):
    asked = Settings(max_new_tokens=9, min_new_tokens=5, num_beams=4, eos_token_id=(2,), suppress_tokens=(11, 13))
    model = translator()
    found = texts(model, sources(7), asked)
    assert served == {"enter": [True], "best": [True] * 9}
    same(found, texts(model.double(), sources(7), asked, fast=False, use_cache=False))


@pytest.mark.parametrize("rows", [25, 1000])
def test_newcomers_change_nothing(rows, served):
    """They come while others are under way, at once or as soon as there is room."""
    model = translator()
    found = texts(model, sources(11), late=4, rows=rows)
    assert sum(served["best"]) > 10
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
    assert not any(served["best"])


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
    assert served == {"enter": [False], "best": [True] * 10}  # the prompts are read the plain way
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
