"""The whole model: what its arguments mean, its shapes, its taps, and one line for what it cannot be given."""

import copy

import pytest
import torch
from support import Asks, B, S, T, build, close, given, has_both, is_decoder, presets, read, source, tokens, toy

from monoblock.errors import InputError
from monoblock.families import bert, gpt, vaswani
from monoblock.knobs import vary
from monoblock.model import Transformer
from monoblock.presets import tiny

# -- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_outputs_have_the_shape_the_head_promises(name):
    model = toy(name)
    config, head = model.config, model.config.head
    shapes = {
        "language_model": (B, T, config.output_input.vocab) if config.family != "vision" else None,
        "pooled": (B, config.width),
        "classifier": (B, head.classes if head else None),
        "tagger": (B, T, head.classes if head else None),
        None: (B, T, config.width),
    }
    assert model(*given(model)).shape == shapes[head.kind if head else None]


@pytest.mark.parametrize("name", presets(has_both))
def test_an_encoder_decoder_is_encode_then_decode(name):
    model, src, ids = toy(name), source(), tokens()
    memory = model.encode(src)
    assert memory.shape == (B, S, model.config.width)
    close(model.decode(ids, memory), model(src, ids))
    close(model(None, ids, memory=memory), model(src, ids))


def test_two_vocabularies_are_told_apart():
    model = build(vaswani(vocab=61, target_vocab=53, width=12, depth=1, heads=3))
    assert model(source(), tokens(vocab=53)).shape == (B, T, 53)


def test_the_mask_may_be_the_second_argument():
    model, ids = toy("gpt2"), tokens()
    mask = torch.arange(T).expand(B, T) > 2
    assert torch.equal(model(ids, mask), model(ids, attention_mask=mask))
    assert torch.equal(model(ids, mask.long()), model(ids, attention_mask=mask))


def test_the_source_mask_may_be_called_attention_mask():
    model, mask = toy("t5-small"), torch.arange(S).expand(B, S) > 2
    close(model(source(), tokens(), attention_mask=mask), model(source(), tokens(), source_mask=mask))


def test_segments_are_felt():
    model, ids = toy("bert-base"), tokens()
    assert torch.equal(model(ids), model(ids, segments=torch.zeros_like(ids)))
    assert not torch.allclose(model(ids), model(ids, segments=torch.ones_like(ids)))


def test_given_positions_move_a_model_only_by_their_distances_when_they_are_relative():
    ids, shifted = tokens(), torch.arange(T).expand(B, T) + 11
    relative, absolute = toy("llama-7b", torch.float64), toy("gpt2", torch.float64)
    torch.testing.assert_close(relative(ids, positions=shifted), relative(ids), atol=1e-4, rtol=0)  # angles in fp32
    assert not torch.allclose(absolute(ids, positions=shifted), absolute(ids), atol=1e-2)


def test_a_prefix_is_seen_from_both_sides():
    model, ids = build(vary(tiny("gpt2"), mask="prefix")), tokens()
    flags = torch.arange(T).expand(B, T) < 5
    changed = ids.index_fill(1, torch.tensor([4]), 0)
    with torch.no_grad():
        assert not torch.allclose(model(changed, flags=flags)[:, 0], model(ids, flags=flags)[:, 0])
        assert torch.equal(model(changed)[:, :4], model(ids)[:, :4])
        later = ids.index_fill(1, torch.tensor([7]), 0)
        assert torch.equal(model(later, flags=flags)[:, :7], model(ids, flags=flags)[:, :7])


def test_documents_are_packed_with_padding_after_them():
    model, ids = toy("llama-7b", torch.float64), tokens()
    documents = torch.tensor([0] * 4 + [1] * 6 + [2] * 3).expand(B, T)
    mask = torch.arange(T).expand(B, T) < 10
    with torch.no_grad():
        found = model(ids, mask, documents=documents)
        close(found[:, :4], model(ids[:, :4]))
        close(found[:, 4:10], model(ids[:, 4:10]))


# -- taps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_a_tap_that_returns_what_it_gets_changes_nothing(name):
    model, names = toy(name), []

    def tap(name, tensor):
        names.append(name)
        return tensor

    close(model(*given(model), tap=tap), model(*given(model)))
    assert len(names) == len(set(names))
    for stack, config in model.config.stacks.items():
        for layer in range(config.depth):
            for part in ("input", "attention.query", "attention.weights", "attention.output", "feedforward.output"):
                assert f"{stack}.{layer}.{part}" in names


def test_what_a_tap_returns_goes_on():
    model, ids = toy("gpt2"), tokens()

    def tap(name, tensor):
        return torch.zeros_like(tensor) if name == "decoder.1.output" else tensor

    expected = model.head(model.decoder.norm(torch.zeros(B, T, 36)), table=model.input.token.weight)
    close(model(ids, tap=tap), expected)


def test_weights_are_made_only_when_asked_for():
    model, tap = toy("gpt2"), Asks("decoder.1.attention.weights")
    model(tokens(), tap=tap)
    assert list(tap.seen) == ["decoder.1.attention.weights"]
    assert tap.seen["decoder.1.attention.weights"].shape == (B, 3, T, T)


# -- the model as a module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_weights_are_named_in_the_papers_words(name):
    for key in toy(name).state_dict():
        first, *rest = key.split(".")
        assert first in ("input", "target", "encoder", "decoder", "head"), key
        assert not {"wte", "c_attn", "q_proj", "mlp", "fc1", "ln_1"} & set(rest), key


def test_tied_weights_are_stored_once():
    for name in presets():
        weights = toy(name).state_dict()
        assert len({tensor.data_ptr() for tensor in weights.values()}) == len(weights), name
    assert "head.output.weight" not in toy("gpt2").state_dict()
    assert "target.token.weight" not in toy("bart-base").state_dict()


@pytest.mark.parametrize("name", ["gpt2", "t5-small"])
def test_a_model_can_be_copied(name):
    model = toy(name)
    close(copy.deepcopy(model)(*given(model)), model(*given(model)))


def test_the_training_mode_drops_and_evaluation_does_not():
    model = build(gpt(vocab=61, width=12, depth=1, heads=3, context=37, dropout=0.3))
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))


def test_a_constructor_draws_from_torchs_generator_and_nothing_else(capsys):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    with torch.random.fork_rng():
        Transformer(tiny("gpt2"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capsys.readouterr() == ("", "")


# -- bad input: one line each ---------------------------------------------------------------------------------------


def wrong(message, call):
    """The call is refused by one line that says this."""
    with pytest.raises(InputError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_ids_outside_the_vocabulary_are_named():
    ids = tokens()
    ids[1, 3] = 61
    wrong("id 61 is outside the vocabulary of 61", lambda: toy("gpt2")(ids))
    wrong("id -1 is outside", lambda: toy("gpt2")(-torch.ones_like(ids)))
    wrong("id 61 is outside", lambda: toy("t5-small")(source(), ids))
    wrong("id 61 is outside", lambda: toy("t5-small")(ids, tokens()))


def test_a_text_longer_than_the_learned_positions_is_refused():
    wrong("38 tokens is longer than the 37 learned positions", lambda: toy("gpt2")(tokens(length=38)))
    toy("llama-7b")(tokens(length=38))


def test_learned_positions_end_in_the_cache_too():
    model, cache = toy("gpt2"), toy("gpt2").make_cache(B, 50)
    model(tokens(length=37), cache=cache)
    cache.advance(37)
    wrong("38 tokens is longer than the 37 learned positions", lambda: model(tokens(length=1), cache=cache))


def test_a_source_needs_a_target_and_the_other_way_round():
    model = toy("t5-small")
    wrong(r"needs a target: model\(source, target\)", lambda: model(source()))
    wrong(r"needs a source: model\(source, target\)", lambda: model(None, tokens()))
    wrong("looks at memory", lambda: model.decode(tokens()))
    wrong("nothing was given", lambda: toy("gpt2")(None))


def test_a_mask_of_another_shape_is_refused():
    ids = tokens()
    wrong("does not fit tokens of shape", lambda: toy("gpt2")(ids, torch.ones(B, T + 1)))
    wrong("does not fit tokens of shape", lambda: toy("gpt2")(ids, torch.ones(T)))
    wrong("does not fit", lambda: toy("t5-small")(source(), ids, source_mask=torch.ones(B, T)))
    wrong("does not fit", lambda: toy("t5-small")(source(), ids, target_mask=torch.ones(B, S)))


@pytest.mark.parametrize("field", ["segments", "positions", "documents", "flags"])
def test_whatever_goes_with_the_tokens_must_have_their_shape(field):
    model = toy("bert-base") if field == "segments" else toy("gpt2")
    wrong("shape", lambda: model(tokens(), **{field: torch.zeros(B, T + 1, dtype=torch.long)}))


def test_ids_need_a_batch():
    wrong(r"give \(batch, length\)", lambda: toy("gpt2")(tokens()[0]))


def test_a_cache_that_overflows_is_refused():
    model, cache = toy("llama-7b"), toy("llama-7b").make_cache(B, 17)
    model(tokens(), cache=cache)
    cache.advance(T)
    wrong("holds 17 tokens a row: 13 are in it and 13 more were given", lambda: model(tokens(), cache=cache))


def test_a_cache_is_for_as_many_rows_as_it_was_made_for():
    wrong("does not fit a cache made for 3", lambda: toy("gpt2")(tokens(), cache=toy("gpt2").make_cache(3)))


def test_only_decoders_have_something_to_cache():
    wrong("no decoder", lambda: toy("bert-base").make_cache(B))
    cache = toy("gpt2").make_cache(B)
    wrong("nothing to cache", lambda: toy("bert-base")(tokens(), cache=cache))
    wrong(
        "capacity=", lambda: toy("vaswani-base").__class__(vaswani(vocab=61, width=12, heads=3, depth=1)).make_cache(B)
    )


def test_what_a_family_cannot_do_is_said():
    wrong("has no encoder", lambda: toy("gpt2").encode(tokens()))
    wrong("decodes no memory", lambda: toy("gpt2").decode(tokens(), torch.zeros(B, S, 36)))


def test_an_image_of_the_wrong_size_is_refused():
    wrong(r"takes \(batch, 3, 12, 12\)", lambda: toy("vit-b16")(torch.zeros(B, 3, 16, 16)))


@pytest.mark.parametrize("field", ["segments", "documents", "flags"])
def test_an_option_the_family_cannot_use_is_refused_not_ignored(field):
    wrong(field, lambda: toy("t5-small")(source(), tokens(), **{field: torch.zeros_like(tokens())}))


def test_segments_for_a_model_without_them_are_refused_not_ignored():
    wrong("segments", lambda: toy("gpt2")(tokens(), segments=torch.ones_like(tokens())))


def test_a_segment_beyond_the_table_is_named():
    wrong("segment", lambda: toy("bert-base")(tokens(), segments=torch.full_like(tokens(), 2)))


def test_logits_at_places_beside_a_pooled_head_are_refused():
    model = build(bert(vocab=61, width=12, depth=1, heads=3, context=37))
    wrong("logits_at", lambda: model(tokens(), logits_at=torch.zeros(B, 1, dtype=torch.long)))


@pytest.mark.parametrize("name", presets(is_decoder))
def test_one_row_of_one_token_is_fine(name):
    assert read(toy(name), tokens(1, 1)).isfinite().all()
