"""The laws hold for every configuration that can be written, not only for the published ones."""

import tempfile

import torch
from configurations import CONTEXT, decoders, models, texts
from hypothesis import HealthCheck, given, settings
from support import Asks, all_experts, bit_equal, build, cached, close, has_both, padded, read, real_part, tokens

from monoblock.accounting.report import account
from monoblock.config import ModelConfig
from monoblock.model import Transformer

ROWS, LENGTH = 3, 11
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def drawn(examples):
    """Always the same configurations: a failure is found again by running the test again."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)


def text(config, length=LENGTH, seed=0):
    return tokens(ROWS, length, config.output_input.vocab, seed)


def source_of(config):
    return tokens(ROWS, 7, config.input.vocab, seed=5) if has_both(config) else None


@drawn(80)
@given(decoders())
def test_a_future_token_never_moves_a_past_logit(config):
    model, ids, src = build(config), text(config), source_of(config)
    changed = torch.cat((ids[:, :6], text(config, seed=1)[:, 6:]), 1)
    with torch.no_grad():
        before, after = (read(model, one, src=src, tap=all_experts()) for one in (ids, changed))
    assert before.isfinite().all()
    bit_equal(after[:, :6], before[:, :6])


@drawn(80)
@given(texts())
def test_padding_changes_nothing_for_real_tokens(config):
    model, ids, src = build(config, torch.float64), text(config), source_of(config)
    wide, real = padded(ids, torch.tensor([2, 0, 1]), torch.tensor([0, 3, 1]))
    with torch.no_grad():
        close(real_part(read(model, wide, real, src=src), real), read(model, ids, src=src))
        if src is not None:
            wide, real = padded(src, torch.tensor([0, 2, 1]), torch.tensor([3, 0, 1]))
            close(read(model, ids, src=wide, source_mask=real), read(model, ids, src=src))


@drawn(80)
@given(decoders())
def test_cached_logits_are_the_full_ones(config):
    model, ids, src = build(config, torch.float64), text(config, 13), source_of(config)
    with torch.no_grad():
        full = read(model, ids, src=src)
        for sizes, chunk in (((1,), 1), ((7, 1, 2), 2), ((13,), 1)):
            close(cached(model, ids, sizes, chunk=chunk, src=src), full)


@drawn(80)
@given(decoders())
def test_a_draft_taken_back_and_rows_moved_leave_no_trace(config):
    model, ids, src = build(config, torch.float64), text(config, 12), source_of(config)
    order = torch.tensor([2, 0, 0, 1])
    cache = model.make_cache(ROWS, CONTEXT, chunk=3)
    with torch.no_grad():
        read(model, ids[:, :8], cache=cache, src=src)
        cache.advance(8)
        read(model, ids[:, :3], cache=cache)
        cache.advance(3)
        cache.truncate(torch.tensor([8, 8, 8]))
        cache.select(order)
        found = [read(model, ids[order, 8:9], cache=cache)]
        cache.advance(1)
        found.append(read(model, ids[order, 9:12], cache=cache))
        expected = read(model, ids[order], src=src if src is None else src[order])
    close(torch.cat(found, 1), expected[:, 8:12])


@drawn(100)
@given(models())
def test_the_closed_form_counts_what_is_built(config):
    with torch.device("meta"):
        empty = Transformer(config)
    counts = [sum(weight.numel() for weight in model.parameters()) for model in (empty, Transformer(config))]
    assert counts == [account(config).parameters] * 2


@drawn(60)
@given(models())
def test_saved_then_loaded_is_the_same_model_bit_for_bit(config):
    model = build(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = Transformer.from_pretrained(folder).eval()
    assert loaded.config == config == ModelConfig.from_json(config.to_json())
    for key, weight in model.state_dict().items():
        bit_equal(loaded.state_dict()[key], weight)
    arguments = _given(config)
    with torch.no_grad():
        bit_equal(loaded(*arguments), model(*arguments))


@drawn(80)
@given(models())
def test_plain_attention_is_fused_attention_and_rows_move_with_the_batch(config):
    model, arguments = build(config, torch.float64), _given(config, torch.float64)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        expected = model(*arguments)
        assert expected.isfinite().all()
        close(model(*arguments, tap=Asks("weights", "outputs")), expected)
        close(model(*(given[order] for given in arguments)), expected[order])


@drawn(60)
@given(texts())
def test_rows_that_see_nothing_give_no_nan_in_either_direction(config):
    model, src = build(config), source_of(config)
    wide, real = padded(text(config), 2, 1)
    real[1] = False
    for tap in (None, Asks("weights")):
        out = read(model, wide, real, src=src, tap=tap)
        assert out.isfinite().all()
        out.sin().sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is None or weight.grad.isfinite().all(), name


def _given(config, dtype=torch.float32):
    if config.family == "vision":
        image = config.input.image
        return (torch.randn(ROWS, config.input.channels, image, image, dtype=dtype),)
    return (source_of(config), text(config)) if has_both(config) else (text(config),)
