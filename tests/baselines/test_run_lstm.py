"""The precision of an LSTM under autocast for a GPU, whose settings exist without one.  B 2, T 5, width 7, depth 3."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from monoblock.baselines.lstm import LSTMState, run_lstm

B, T, D, L = 2, 5, 7, 3


class RecordingLSTM(nn.LSTM):
    """An LSTM that records whether autocast is on in its forward pass."""

    autocast = None

    def forward(self, x, state=None):
        self.autocast = torch.is_autocast_enabled("cuda")
        return super().forward(x, state)


@contextmanager
def cuda_autocast(dtype):
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def build(dtype=torch.float32):
    torch.manual_seed(1)
    return RecordingLSTM(D, D, L, batch_first=True).to(dtype)


def random_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    x, hidden, cell = (torch.randn(*size, generator=generator) for size in ((B, T, D), (L, B, D), (L, B, D)))
    return x.to(dtype), LSTMState(hidden, cell)


@pytest.mark.parametrize("lengths", [None, torch.tensor([5, 3])])
def test_under_bf16_an_lstm_runs_in_fp32_and_without_autocast(lengths):
    lstm, (x, state) = build(), random_inputs()
    expected, last = run_lstm(lstm, x, lengths, state)
    with cuda_autocast(torch.bfloat16):
        out, found = run_lstm(lstm, x, lengths, state)
        assert torch.is_autocast_enabled("cuda"), "autocast goes on after the LSTM"
    assert lstm.autocast is False
    assert torch.equal(out, expected)
    assert torch.equal(found.hidden, last.hidden)
    assert torch.equal(found.cell, last.cell)


def test_activations_in_bf16_are_converted():
    lstm, (x, _) = build(), random_inputs(torch.bfloat16)
    with cuda_autocast(torch.bfloat16):
        out, _ = run_lstm(lstm, x, None, None)
    assert_close(out, run_lstm(lstm, x.float(), None, None)[0], rtol=0, atol=0)


def test_weights_in_bf16_take_inputs_and_a_state_in_fp32():
    # so it is with FSDP, which gathers the weights in bf16, and with the state that batches carry
    lstm, (x, state) = build(torch.bfloat16), random_inputs()
    with cuda_autocast(torch.bfloat16):
        out, last = run_lstm(lstm, x, None, state)
    assert out.dtype == last.hidden.dtype == torch.bfloat16
    assert_close(out.float(), run_lstm(build(), x, None, state)[0], rtol=0.05, atol=0.02)


def test_fp16_is_left_to_autocast_because_its_loss_is_scaled():
    lstm, (x, state) = build(), random_inputs()
    with cuda_autocast(torch.float16):
        run_lstm(lstm, x, None, state)
    assert lstm.autocast is True
