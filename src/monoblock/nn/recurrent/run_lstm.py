"""Run the layers of an LSTM over rows of different lengths, in the precision of its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from monoblock.kernels.cpu import onednn
from monoblock.nn.kv_cache.lstm_state import LSTMState


def run_lstm(lstm: nn.Module, x: Tensor, lengths: Tensor | None, state: LSTMState | None) -> tuple[Tensor, LSTMState]:
    """Run an LSTM over rows; return the outputs, 0 on padding, and the state after the last token of each row."""
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        # Autocast would run the LSTM of cuDNN in fp16, where small gradients become 0 without loss scaling.
        dtype = next(lstm.parameters()).dtype
        start = None if state is None else LSTMState(*(tensor.to(dtype) for tensor in state))
        with torch.autocast("cuda", enabled=False):
            return run_lstm(lstm, x.to(dtype), lengths, start)
    with onednn.disabled_where_slow():
        if lengths is None:
            out, last = lstm(x, state)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, last = lstm(packed, state)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return out, LSTMState(*last)
