"""The laws hold for random configurations, not only for presets."""

import tempfile

import torch
from configurations import CONTEXT, all_models, models_with_decoder, text_models
from hypothesis import HealthCheck, given, settings
from support import (
    ActivationTap,
    all_experts_tap,
    assert_bit_equal,
    assert_near,
    build_model,
    is_encoder_decoder,
    pad_rows,
    random_tokens,
    run_cached,
    run_model,
    unpad_rows,
)

from monoblock.accounting.report import account
from monoblock.config.knobs import rebuild
from monoblock.config.model import FeedForwardConfig, ModelConfig, NormConfig
from monoblock.config.parts import ACTIVATION_ROWS, NORM_ROWS, POSITION_SCHEMES
from monoblock.model import Transformer

ROWS, LENGTH = 3, 11
NAMES = ("kind", "activation")
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def examples(count):
    """Always the same configurations, so that a failure can be reproduced."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)


def random_text(config, length=LENGTH, seed=0):
    return random_tokens(ROWS, length, config.target_input.vocab, seed)


def random_source(config):
    return random_tokens(ROWS, 7, config.input.vocab, seed=5) if is_encoder_decoder(config) else None


def test_every_norm_activation_and_position_scheme_occurs():
    seen = set()

    @examples(90)
    @given(all_models())
    def collect(config):
        rebuild(config, lambda part, values: seen.update((type(part), getattr(part, name, "")) for name in NAMES))

    collect()
    assert {(NormConfig, kind) for kind in NORM_ROWS} <= seen
    assert {(FeedForwardConfig, kind) for kind in ACTIVATION_ROWS} <= seen
    parts = [part for row in POSITION_SCHEMES.values() for part in row[:2] if part]
    assert {(type(part), part.kind) for part in parts} <= seen


@examples(24)
@given(models_with_decoder())
def test_a_future_token_never_changes_a_past_logit(config):
    model, ids, source = build_model(config), random_text(config), random_source(config)
    changed = torch.cat((ids[:, :6], random_text(config, seed=1)[:, 6:]), 1)
    with torch.no_grad():
        before, after = (
            run_model(model, tokens, source_ids=source, tap=all_experts_tap()) for tokens in (ids, changed)
        )
    assert before.isfinite().all()
    assert_bit_equal(after[:, :6], before[:, :6])


@examples(24)
@given(text_models())
def test_padding_changes_nothing_for_real_tokens(config):
    model, ids, source = build_model(config, torch.float64), random_text(config), random_source(config)
    padded, valid = pad_rows(ids, torch.tensor([2, 0, 1]), torch.tensor([0, 3, 1]))
    with torch.no_grad():
        assert_near(
            unpad_rows(run_model(model, padded, valid, source_ids=source), valid),
            run_model(model, ids, source_ids=source),
        )
        if source is not None:
            padded, valid = pad_rows(source, torch.tensor([0, 2, 1]), torch.tensor([3, 0, 1]))
            assert_near(
                run_model(model, ids, source_ids=padded, source_mask=valid), run_model(model, ids, source_ids=source)
            )


@examples(24)
@given(models_with_decoder())
def test_cached_logits_are_the_full_ones(config):
    model, ids, source = build_model(config, torch.float64), random_text(config, 13), random_source(config)
    with torch.no_grad():
        full = run_model(model, ids, source_ids=source)
        for sizes, chunk in (((1,), 1), ((7, 1, 2), 2), ((13,), 1)):
            assert_near(run_cached(model, ids, sizes, chunk=chunk, source_ids=source), full)


@examples(24)
@given(models_with_decoder())
def test_a_truncated_draft_and_reordered_rows_leave_no_trace(config):
    model, ids, source = build_model(config, torch.float64), random_text(config, 12), random_source(config)
    order = torch.tensor([2, 0, 0, 1])
    cache = model.make_cache(ROWS, CONTEXT, chunk=3)
    with torch.no_grad():
        run_model(model, ids[:, :8], cache=cache, source_ids=source)
        cache.advance(8)
        run_model(model, ids[:, :3], cache=cache)
        cache.advance(3)
        cache.truncate(torch.tensor([8, 8, 8]))
        cache.select(order)
        actual = [run_model(model, ids[order, 8:9], cache=cache)]
        cache.advance(1)
        actual.append(run_model(model, ids[order, 9:12], cache=cache))
        expected = run_model(model, ids[order], source_ids=source if source is None else source[order])
    assert_near(torch.cat(actual, 1), expected[:, 8:12])


@examples(24)
@given(all_models())
def test_the_closed_form_counts_the_built_model(config):
    with torch.device("meta"):
        empty = Transformer(config)
    counts = [sum(weight.numel() for weight in model.parameters()) for model in (empty, Transformer(config))]
    assert counts == [account(config).parameters] * 2


@examples(24)
@given(all_models())
def test_saved_then_loaded_is_the_same_model_bit_for_bit(config):
    model = build_model(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = Transformer.from_pretrained(folder).eval()
    assert loaded.config == config == ModelConfig.from_json(config.to_json())
    for key, weight in model.state_dict().items():
        assert_bit_equal(loaded.state_dict()[key], weight)
    inputs = random_inputs(config)
    with torch.no_grad():
        assert_bit_equal(loaded(*inputs), model(*inputs))


@examples(24)
@given(all_models())
def test_plain_attention_is_fused_attention_and_permuting_the_batch_permutes_the_output(config):
    model, inputs = build_model(config, torch.float64), random_inputs(config, torch.float64)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        expected = model(*inputs)
        assert expected.isfinite().all()
        assert_near(model(*inputs, tap=ActivationTap("weights", "outputs")), expected)
        assert_near(model(*(tensor[order] for tensor in inputs)), expected[order])


@examples(24)
@given(text_models())
def test_rows_that_see_nothing_give_no_nan_in_either_direction(config):
    model, source = build_model(config), random_source(config)
    padded, valid = pad_rows(random_text(config), 2, 1)
    valid[1] = False
    for tap in (None, ActivationTap("weights")):
        out = run_model(model, padded, valid, source_ids=source, tap=tap)
        assert out.isfinite().all()
        out.sin().sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is None or weight.grad.isfinite().all(), name


def random_inputs(config, dtype=torch.float32):
    if config.family == "vision":
        image = config.input.image
        return (torch.randn(ROWS, config.input.channels, image, image, dtype=dtype),)
    return (random_source(config), random_text(config)) if is_encoder_decoder(config) else (random_text(config),)
