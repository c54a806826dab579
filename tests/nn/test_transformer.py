"""The model: its arguments, shapes, taps, and errors of one line."""

import copy

import pytest
import torch
from support import (
    ActivationTap,
    B,
    S,
    T,
    assert_near,
    build_model,
    example_inputs,
    has_decoder,
    is_encoder_decoder,
    random_source,
    random_tokens,
    run_model,
    tiny_model,
    tiny_names,
)

from monoblock.config.families import bert, gpt, vaswani
from monoblock.config.knobs import vary
from monoblock.config.presets import tiny
from monoblock.errors import InputError
from monoblock.model import Transformer

# -- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_names())
def test_outputs_have_the_shape_the_head_promises(name):
    model = tiny_model(name)
    config, head = model.config, model.config.head
    shapes = {
        "language_model": (B, T, config.target_input.vocab) if config.family != "vision" else None,
        "pooled": (B, config.width),
        "classifier": (B, head.classes if head else None),
        "tagger": (B, T, head.classes if head else None),
        None: (B, T, config.width),
    }
    assert model(*example_inputs(model)).shape == shapes[head.kind if head else None]


@pytest.mark.parametrize("name", tiny_names(is_encoder_decoder))
def test_an_encoder_decoder_is_encode_then_decode(name):
    model, source, ids = tiny_model(name), random_source(), random_tokens()
    memory = model.encode(source)
    assert memory.shape == (B, S, model.config.width)
    assert_near(model.decode(ids, memory), model(source, ids))
    assert_near(model(None, ids, memory=memory), model(source, ids))


def test_two_vocabularies_are_told_apart():
    model = build_model(vaswani(vocab=61, target_vocab=53, width=12, depth=1, heads=3))
    assert model(random_source(), random_tokens(vocab=53)).shape == (B, T, 53)


def test_the_mask_may_be_the_second_argument():
    model, ids = tiny_model("gpt2"), random_tokens()
    mask = torch.arange(T).expand(B, T) > 2
    assert torch.equal(model(ids, mask), model(ids, attention_mask=mask))
    assert torch.equal(model(ids, mask.long()), model(ids, attention_mask=mask))


def test_the_source_mask_may_be_called_attention_mask():
    model, mask = tiny_model("t5-small"), torch.arange(S).expand(B, S) > 2
    assert_near(
        model(random_source(), random_tokens(), attention_mask=mask),
        model(random_source(), random_tokens(), source_mask=mask),
    )


def test_segments_change_the_output():
    model, ids = tiny_model("bert-base"), random_tokens()
    assert torch.equal(model(ids), model(ids, segments=torch.zeros_like(ids)))
    assert not torch.allclose(model(ids), model(ids, segments=torch.ones_like(ids)))


def test_given_positions_move_a_model_only_by_their_distances_when_they_are_relative():
    ids, shifted = random_tokens(), torch.arange(T).expand(B, T) + 11
    relative, absolute = tiny_model("llama-7b", torch.float64), tiny_model("gpt2", torch.float64)
    torch.testing.assert_close(relative(ids, positions=shifted), relative(ids), atol=1e-4, rtol=0)  # angles in fp32
    assert not torch.allclose(absolute(ids, positions=shifted), absolute(ids), atol=1e-2)


def test_a_prefix_is_seen_from_both_sides():
    model, ids = build_model(vary(tiny("gpt2"), mask="prefix")), random_tokens()
    flags = torch.arange(T).expand(B, T) < 5
    changed = ids.index_fill(1, torch.tensor([4]), 0)
    with torch.no_grad():
        assert not torch.allclose(model(changed, flags=flags)[:, 0], model(ids, flags=flags)[:, 0])
        assert torch.equal(model(changed)[:, :4], model(ids)[:, :4])
        later = ids.index_fill(1, torch.tensor([7]), 0)
        assert torch.equal(model(later, flags=flags)[:, :7], model(ids, flags=flags)[:, :7])


def test_documents_are_packed_with_padding_after_them():
    model, ids = tiny_model("llama-7b", torch.float64), random_tokens()
    documents = torch.tensor([0] * 4 + [1] * 6 + [2] * 3).expand(B, T)
    mask = torch.arange(T).expand(B, T) < 10
    with torch.no_grad():
        found = model(ids, mask, documents=documents)
        assert_near(found[:, :4], model(ids[:, :4]))
        assert_near(found[:, 4:10], model(ids[:, 4:10]))


# -- taps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_names())
def test_a_tap_that_returns_what_it_gets_changes_nothing(name):
    model, names = tiny_model(name), []

    def tap(name, tensor):
        names.append(name)
        return tensor

    assert_near(model(*example_inputs(model), tap=tap), model(*example_inputs(model)))
    assert len(names) == len(set(names))
    for stack, config in model.config.stacks.items():
        for layer in range(config.depth):
            for part in ("input", "attention.query", "attention.weights", "attention.output", "feedforward.output"):
                assert f"{stack}.{layer}.{part}" in names


def test_what_a_tap_returns_goes_on():
    model, ids = tiny_model("gpt2"), random_tokens()

    def tap(name, tensor):
        return torch.zeros_like(tensor) if name == "decoder.1.output" else tensor

    expected = model.head(model.decoder.norm(torch.zeros(B, T, 36)), table=model.input.token.weight)
    assert_near(model(ids, tap=tap), expected)


def test_attention_weights_are_computed_only_if_wanted():
    model, tap = tiny_model("gpt2"), ActivationTap("decoder.1.attention.weights")
    model(random_tokens(), tap=tap)
    assert list(tap.activations) == ["decoder.1.attention.weights"]
    assert tap.activations["decoder.1.attention.weights"].shape == (B, 3, T, T)


# -- the model as a module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_names())
def test_weights_are_named_in_the_papers_words(name):
    for key in tiny_model(name).state_dict():
        first, *rest = key.split(".")
        assert first in ("input", "target", "encoder", "decoder", "head"), key
        assert not {"wte", "c_attn", "q_proj", "mlp", "fc1", "ln_1"} & set(rest), key


def test_tied_weights_are_stored_once():
    for name in tiny_names():
        weights = tiny_model(name).state_dict()
        assert len({tensor.data_ptr() for tensor in weights.values()}) == len(weights), name
    assert "head.output.weight" not in tiny_model("gpt2").state_dict()
    assert "target.token.weight" not in tiny_model("bart-base").state_dict()


@pytest.mark.parametrize("name", ["gpt2", "t5-small"])
def test_a_model_can_be_copied(name):
    model = tiny_model(name)
    assert_near(copy.deepcopy(model)(*example_inputs(model)), model(*example_inputs(model)))


def test_the_training_mode_drops_and_evaluation_does_not():
    model = build_model(gpt(vocab=61, width=12, depth=1, heads=3, context=37, dropout=0.3))
    assert torch.equal(model(random_tokens()), model(random_tokens()))
    model.train()
    assert not torch.equal(model(random_tokens()), model(random_tokens()))


def test_a_constructor_draws_from_torchs_generator_and_nothing_else(capsys):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    with torch.random.fork_rng():
        Transformer(tiny("gpt2"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capsys.readouterr() == ("", "")


# -- bad input: one line each ---------------------------------------------------------------------------------------


def assert_refused(message, call):
    """The call raises an InputError of one line with this message."""
    with pytest.raises(InputError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_ids_outside_the_vocabulary_are_named():
    ids = random_tokens()
    ids[1, 3] = 61
    assert_refused("id 61 is outside the vocabulary of 61", lambda: tiny_model("gpt2")(ids))
    assert_refused("id -1 is outside", lambda: tiny_model("gpt2")(-torch.ones_like(ids)))
    assert_refused("id 61 is outside", lambda: tiny_model("t5-small")(random_source(), ids))
    assert_refused("id 61 is outside", lambda: tiny_model("t5-small")(ids, random_tokens()))


def test_a_text_longer_than_the_learned_positions_is_refused():
    assert_refused(
        "38 tokens is longer than the 37 learned positions", lambda: tiny_model("gpt2")(random_tokens(length=38))
    )
    tiny_model("llama-7b")(random_tokens(length=38))


def test_learned_positions_end_in_the_cache_too():
    model, cache = tiny_model("gpt2"), tiny_model("gpt2").make_cache(B, 50)
    model(random_tokens(length=37), cache=cache)
    cache.advance(37)
    assert_refused(
        "38 tokens is longer than the 37 learned positions", lambda: model(random_tokens(length=1), cache=cache)
    )


def test_a_source_needs_a_target_and_the_other_way_round():
    model = tiny_model("t5-small")
    assert_refused(r"needs a target; write model\(source, target\)", lambda: model(random_source()))
    assert_refused(r"needs a source; write model\(source, target\)", lambda: model(None, random_tokens()))
    assert_refused("attends to memory", lambda: model.decode(random_tokens()))
    assert_refused("ids are missing", lambda: tiny_model("gpt2")(None))


def test_a_mask_of_another_shape_is_refused():
    ids = random_tokens()
    assert_refused("does not fit ids of shape", lambda: tiny_model("gpt2")(ids, torch.ones(B, T + 1)))
    assert_refused("does not fit ids of shape", lambda: tiny_model("gpt2")(ids, torch.ones(T)))
    assert_refused("does not fit", lambda: tiny_model("t5-small")(random_source(), ids, source_mask=torch.ones(B, T)))
    assert_refused("does not fit", lambda: tiny_model("t5-small")(random_source(), ids, target_mask=torch.ones(B, S)))


@pytest.mark.parametrize("field", ["segments", "positions", "documents", "flags"])
def test_whatever_goes_with_the_tokens_must_have_their_shape(field):
    model = tiny_model("bert-base") if field == "segments" else tiny_model("gpt2")
    assert_refused("shape", lambda: model(random_tokens(), **{field: torch.zeros(B, T + 1, dtype=torch.long)}))


def test_ids_need_a_batch():
    assert_refused(r"give \(batch, length\)", lambda: tiny_model("gpt2")(random_tokens()[0]))


def test_a_cache_that_overflows_is_refused():
    model, cache = tiny_model("llama-7b"), tiny_model("llama-7b").make_cache(B, 17)
    model(random_tokens(), cache=cache)
    cache.advance(T)
    assert_refused(
        "holds at most 17 tokens per row, but 13 are in it and 13 more were given",
        lambda: model(random_tokens(), cache=cache),
    )


def test_a_cache_is_for_as_many_rows_as_it_was_made_for():
    assert_refused(
        "does not fit a cache made for 3",
        lambda: tiny_model("gpt2")(random_tokens(), cache=tiny_model("gpt2").make_cache(3)),
    )


def test_only_decoders_have_something_to_cache():
    assert_refused("no decoder", lambda: tiny_model("bert-base").make_cache(B))
    cache = tiny_model("gpt2").make_cache(B)
    assert_refused("nothing to cache", lambda: tiny_model("bert-base")(random_tokens(), cache=cache))
    assert_refused(
        "capacity=",
        lambda: tiny_model("vaswani-base").__class__(vaswani(vocab=61, width=12, heads=3, depth=1)).make_cache(B),
    )


def test_encode_gives_the_hidden_states_of_a_decoder_only_model():
    model, ids = tiny_model("gpt2"), random_tokens()
    assert torch.equal(model.head(model.encode(ids), table=model.output_embedding), model(ids))


def test_calls_of_another_family_are_refused():
    assert_refused("has no decode method", lambda: tiny_model("gpt2").decode(random_tokens(), torch.zeros(B, S, 36)))


def test_an_image_of_the_wrong_size_is_refused():
    assert_refused(r"takes \(batch, 3, 12, 12\)", lambda: tiny_model("vit-b16")(torch.zeros(B, 3, 16, 16)))


@pytest.mark.parametrize("field", ["segments", "documents", "flags"])
def test_an_option_the_family_cannot_use_is_refused_not_ignored(field):
    assert_refused(
        field,
        lambda: tiny_model("t5-small")(random_source(), random_tokens(), **{field: torch.zeros_like(random_tokens())}),
    )


def test_segments_for_a_model_without_them_are_refused_not_ignored():
    assert_refused("segments", lambda: tiny_model("gpt2")(random_tokens(), segments=torch.ones_like(random_tokens())))


def test_a_segment_beyond_the_table_is_named():
    assert_refused(
        "segment", lambda: tiny_model("bert-base")(random_tokens(), segments=torch.full_like(random_tokens(), 2))
    )


def test_logits_at_places_beside_a_pooled_head_are_refused():
    model = build_model(bert(vocab=61, width=12, depth=1, heads=3, context=37))
    assert_refused("logits_at", lambda: model(random_tokens(), logits_at=torch.zeros(B, 1, dtype=torch.long)))


@pytest.mark.parametrize("name", tiny_names(has_decoder))
def test_one_row_of_one_token_is_fine(name):
    assert run_model(tiny_model(name), random_tokens(1, 1)).isfinite().all()
