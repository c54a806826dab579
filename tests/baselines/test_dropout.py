"""Dropout of LSTM language models: variational masks, dropped recurrent weights, dropped words.

References are nn.LSTM in fp64 and the gates written out.  B 2, L 3, T 7, D 11, V 13, as in test_lstm.py.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import monoblock as mb
from monoblock.baselines.carried import CarriedLoss
from monoblock.baselines.dropout import DropoutLSTM, VariationalDropout, drop_words
from monoblock.config.schema import from_dict, to_dict
from monoblock.interop.model_folder import ModelFolder
from monoblock.kernels.cpu import library

B, L, T, D, V = 2, 3, 7, 11, 13
RATES = {"dropout": 0.3, "embedding_dropout": 0.4, "head_dropout": 0.5, "word_dropout": 0.2, "recurrent_dropout": 0.6}
ALL = {**RATES, "variational_dropout": True}
CASES = [
    *({name: rate} for name, rate in RATES.items()),
    {"variational_dropout": True},
    {"variational_dropout": True, "dropout": 0.3},
    ALL,
]


def build(dtype=torch.float64, **fields):
    torch.manual_seed(1)
    return mb.Recurrent(mb.RecurrentConfig(**{"vocab": V, "width": D, "depth": L, **fields})).to(dtype)


def layers(dropout=0.0, variational=False, recurrent_dropout=0.0, depth=L, width=D):
    torch.manual_seed(1)
    return DropoutLSTM(
        width, depth, dropout=dropout, variational=variational, recurrent_dropout=recurrent_dropout
    ).double()


def random_ids(rows=B, length=T, vocab=V, seed=2):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_input(rows=B, length=T, width=D, seed=3):
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_state(rows=B, seed=4):
    return tuple(random_input(L, rows, D, seed=seed + n) for n in (0, 1))


def within_five_deviations(share, rate, count):
    return abs(float(share) - rate) < 5 * math.sqrt(rate * (1 - rate) / count)


@pytest.fixture
def record_dropout(monkeypatch):
    """Record what F.dropout is given and returns, in order."""
    calls, dropout = [], F.dropout

    def recorded(x, p=0.5, training=True, inplace=False):
        out = dropout(x, p, training, inplace)
        calls.append((x, p, out))
        return out

    monkeypatch.setattr(F, "dropout", recorded)
    return calls


# -- nothing changes in evaluation, with rates of 0, or by default


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_in_evaluation_no_knob_changes_anything(fields):
    plain, model, ids = build().eval(), build(**fields).eval(), random_ids()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)  # the same initial weights
    assert_close(model(ids), plain(ids), rtol=0, atol=0)
    mask = torch.arange(T) < torch.tensor([[T], [4]])
    assert_close(model.forward_with_state(ids, mask), plain.forward_with_state(ids, mask), rtol=0, atol=0)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_default_is_nn_lstm_with_ordinary_dropout_bit_for_bit(rate):
    model, ids = build(torch.float32, dropout=rate).train(), random_ids()
    assert type(model.decoder) is torch.nn.LSTM
    torch.manual_seed(5)
    logits = model(ids)
    torch.manual_seed(5)
    x = F.dropout(model.input.weight[ids], rate)
    with library.without_slow_onednn():  # as in the model
        x = F.dropout(model.decoder(x)[0], rate)
    assert torch.equal(logits, x @ model.input.weight.T + model.bias)


def test_a_rate_for_embedding_or_head_replaces_that_of_dropout(record_dropout):
    build(dropout=0.3, embedding_dropout=0.4, head_dropout=0.0).train()(random_ids())
    assert [p for _, p, _ in record_dropout] == [0.4, 0.0]
    record_dropout.clear()
    build(dropout=0.3).train()(random_ids())
    assert [p for _, p, _ in record_dropout] == [0.3, 0.3]


# -- variational dropout


def test_a_variational_mask_is_the_same_at_all_time_steps_and_differs_between_rows():
    rate, width = 0.25, 997
    torch.manual_seed(3)
    out = VariationalDropout(rate)(torch.ones(B, T, width, dtype=torch.float64))
    assert_close(out, out[:, :1].expand(-1, T, -1), rtol=0, atol=0)
    assert not torch.equal(out[0], out[1])
    assert_close(out, out.sign() / (1 - rate))
    assert within_five_deviations((out[:, 0] == 0).double().mean(), rate, B * width)


def test_embedding_layers_and_output_have_variational_masks(record_dropout):
    build(**{**ALL, "word_dropout": 0.0, "recurrent_dropout": 0.0}).train()(random_ids())
    masks = [(p, tuple(out.shape)) for x, p, out in record_dropout if x.dim() == 3]
    assert masks == [(0.4, (B, 1, D)), (0.3, (B, 1, D)), (0.3, (B, 1, D)), (0.5, (B, 1, D))]


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_layers_are_those_of_nn_lstm_with_a_mask_between_them(record_dropout, is_padded):
    model, x, state = layers(dropout=0.4, variational=True).train(), random_input(), random_state()
    lengths = torch.tensor([4, T])  # not sorted: packing reorders the rows
    given = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, last = model(given if is_padded else x, state)
    if is_padded:
        out, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    masks = [out.view(B, D) for _, p, out in record_dropout if p == 0.4]
    assert len(masks) == L - 1
    for row in range(B):
        length, expected = int(lengths[row]) if is_padded else T, x[row : row + 1]
        mask_row = 1 - row if is_padded else row  # packed rows are sorted by length
        expected = expected[:, :length]
        for layer in range(L):
            single = torch.nn.LSTM(D, D, 1, batch_first=True).double()
            names = {name: f"{name.removesuffix('_l0')}_l{layer}" for name in single.state_dict()}
            single.load_state_dict({name: model.state_dict()[source] for name, source in names.items()})
            before = tuple(part[layer : layer + 1, row : row + 1].contiguous() for part in state)
            expected = expected * masks[layer - 1][mask_row] if layer else expected
            expected, after = single(expected, before)
            assert_close([part[layer, row] for part in last], [part[0, 0] for part in after], rtol=0, atol=1e-12)
        assert_close(out[row : row + 1, :length], expected, rtol=0, atol=1e-12)
        assert not out[row, length:].any()


def test_without_a_rate_the_layers_one_by_one_are_nn_lstm():
    model, x, state = layers(variational=True).train(), random_input(), random_state()
    reference = torch.nn.LSTM(D, D, L, batch_first=True).double()
    reference.load_state_dict(model.state_dict())
    for given in (None, state):
        results = [lstm(x, given) for lstm in (model, reference)]
        assert_close(*results, rtol=0, atol=1e-12)
        gradients = [
            torch.autograd.grad(r[0].square().sum(), m.parameters())
            for r, m in zip(results, (model, reference), strict=True)
        ]
        assert_close(*gradients, rtol=0, atol=1e-11)


# -- recurrent dropout


def test_recurrent_dropout_zeroes_its_share_of_hidden_weights_whose_gradient_is_zero(record_dropout):
    rate, width = 0.3, 61
    model = layers(recurrent_dropout=rate, depth=2, width=width).train()
    model(random_input(width=width))[0].square().sum().backward()
    dropped = [(x, out) for x, p, out in record_dropout if p == rate]
    assert [x is model.get_parameter(f"weight_hh_l{layer}") for layer, (x, _) in enumerate(dropped)] == [True, True]
    for weight, kept in dropped:
        is_zero = kept == 0
        assert within_five_deviations(is_zero.double().mean(), rate, is_zero.numel())
        assert_close(kept, torch.where(is_zero, 0, weight / (1 - rate)))
        assert not weight.grad[is_zero].any()
        assert (weight.grad[~is_zero] != 0).all()
    assert not torch.equal(dropped[0][1] == 0, dropped[1][1] == 0)
    assert all(weight.grad.any() for weight in model.parameters())


def test_the_same_weights_are_dropped_at_all_time_steps(record_dropout):
    """The gates written out with the recorded matrices."""
    model, x, state = layers(recurrent_dropout=0.5).train(), random_input(), random_state()
    out, last = model(x, state)
    matrices, expected = [out for _, p, out in record_dropout if p == 0.5], x
    for layer, matrix in enumerate(matrices):
        input_weight, *biases = (
            model.get_parameter(f"{name}_l{layer}") for name in ("weight_ih", "bias_ih", "bias_hh")
        )
        hidden, cell, steps = state[0][layer], state[1][layer], []
        for step in expected.unbind(1):
            gates = step @ input_weight.T + hidden @ matrix.T + sum(biases)
            i, f, g, o = gates.chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            steps.append(hidden)
        expected = torch.stack(steps, 1)
        assert_close([part[layer] for part in last], [hidden, cell], rtol=0, atol=1e-12)
    assert_close(out, expected, rtol=0, atol=1e-12)


# -- words


def test_words_are_dropped_by_type_in_each_row():
    rate, vocab, ids = 0.25, 97, random_ids(101, 89, 97)
    torch.manual_seed(3)
    factors = drop_words(torch.ones(101, 89, 5).double(), ids, rate, vocab, by_type=True)
    assert_close(factors, factors.sign() / (1 - rate))
    dropped = factors[..., 0] == 0
    pairs = ids + vocab * torch.arange(101).unsqueeze(1)  # a word of a row
    assert len(torch.cat([pairs[dropped].unique(), pairs[~dropped].unique()])) == len(pairs.unique())
    assert within_five_deviations(len(pairs[dropped].unique()) / len(pairs.unique()), rate, len(pairs.unique()))
    assert not torch.equal(ids[0][dropped[0]].unique(), ids[1][dropped[1]].unique())


def test_without_variational_dropout_every_occurrence_is_dropped_by_itself():
    torch.manual_seed(3)
    factors = drop_words(torch.ones(101, 89, 5).double(), torch.zeros(101, 89).long(), 0.25, 97, by_type=False)
    assert_close(factors, factors[..., :1].expand_as(factors), rtol=0, atol=0)
    assert within_five_deviations((factors[..., 0] == 0).double().mean(), 0.25, 101 * 89)


# -- training


@pytest.mark.parametrize("fields", [ALL, {"recurrent_dropout": 0.5, "dropout": 0.2}], ids=["all", "recurrent"])
@pytest.mark.parametrize("depth", [1, L])
def test_gradients_reach_every_parameter_and_a_mask_may_be_given(fields, depth):
    model = build(**fields, depth=depth).train()
    mask = torch.arange(T) < torch.tensor([[T], [4]])
    for given in (None, mask):
        model.zero_grad()
        model(random_ids(), given).square().sum().backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def test_the_state_is_kept_from_batch_to_batch_in_training():
    """Only the rates are zero: the code of training runs, and the pieces of a text must give what the text gives."""
    model, loss, ids = build(variational_dropout=True).train(), CarriedLoss(), random_ids(3, 20)
    inputs = [
        {"source": piece, "lanes": torch.arange(3), "blocks": torch.full((3,), number)}
        for number, piece in enumerate(ids.split(5, 1))
    ]
    pieces = torch.cat([loss.compute_logits(model, part) for part in inputs], 1)
    assert_close(pieces, build().eval()(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_fast", sorted({False, library.is_onednn_fast()}))
def test_training_works_under_autocast(is_fast, monkeypatch):
    monkeypatch.setattr(library, "is_onednn_fast", lambda: is_fast)
    model, is_enabled = build(torch.float32, **ALL).train(), torch.backends.mkldnn.enabled
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model.forward_with_state(random_ids())
        logits, _ = model.forward_with_state(random_ids(), None, state)
        assert torch.backends.mkldnn.enabled == is_enabled
    logits.float().square().sum().backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())


def test_hooks_on_the_layers_run_in_training():
    model, seen = build(**ALL).train(), []
    model.decoder.register_forward_hook(lambda module, inputs, output: seen.append(output[0].shape))
    model(random_ids())
    assert seen == [(B, T, D)]


def test_the_same_seed_drops_the_same():
    model, ids = build(**ALL).train(), random_ids()
    torch.manual_seed(5)
    first = model(ids)
    assert not torch.equal(model(ids), first)
    torch.manual_seed(5)
    assert_close(model(ids), first, rtol=0, atol=0)


# -- configurations


def test_a_configuration_is_read_back_and_fields_have_defaults(tmp_path):
    config = mb.RecurrentConfig(vocab=V, width=D, **ALL)
    assert from_dict(mb.RecurrentConfig, to_dict(config)) == config
    mb.Recurrent(config).save_pretrained(tmp_path)
    assert ModelFolder(tmp_path).config == config
    few = {"kind": "language_model", "vocab": V, "width": D, "depth": 2, "target_vocab": None, "tie": True}
    assert from_dict(mb.RecurrentConfig, {**few, "dropout": 0.5}) == mb.RecurrentConfig(vocab=V, width=D, dropout=0.5)


def test_dropout_has_no_parameters_and_costs_nothing_to_compute():
    plain, regularized = mb.RecurrentConfig(vocab=V, width=D), mb.RecurrentConfig(vocab=V, width=D, **ALL)
    assert mb.account(regularized).parameters == mb.account(plain).parameters


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1])
@pytest.mark.parametrize("name", RATES)
def test_a_rate_outside_0_to_1_is_refused_in_one_line(name, rate):
    with pytest.raises(mb.ConfigError, match=rf"{name}={rate} is not a rate; write 0 or more and less than 1") as error:
        mb.RecurrentConfig(vocab=V, width=D, **{name: rate})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields", [{"variational_dropout": True}, {"recurrent_dropout": 0.5}], ids=str)
def test_an_encoder_decoder_refuses_what_is_for_language_models(fields):
    with pytest.raises(mb.ConfigError, match="is for LSTM language models; leave it out"):
        mb.RecurrentConfig(kind="encoder_decoder", vocab=V, width=D, **fields)


def test_an_encoder_decoder_takes_the_other_knobs(record_dropout):
    config = mb.RecurrentConfig(kind="encoder_decoder", vocab=V, width=D, dropout=0.1, word_dropout=0.2)
    model = mb.Recurrent(replace(config, embedding_dropout=0.3, head_dropout=0.4)).train()
    model(random_ids(), random_ids()).sum().backward()
    assert {p for _, p, _ in record_dropout} == {0.1, 0.2, 0.3, 0.4}
