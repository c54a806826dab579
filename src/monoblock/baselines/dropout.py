"""Dropout of LSTM language models: masks that stay the same over time, and recurrent weights that are dropped.

A new mask at every time step disturbs what a recurrence remembers, so ordinary dropout only acts on the inputs and
outputs of its layers, and a small corpus is overfitted all the same.  Two papers go further:

    variational dropout   one mask (B, 1, D) for all time steps of a row (Gal and Ghahramani 2016); words are dropped by
                          type: if a word is dropped in a row, every occurrence of it there is
    recurrent dropout     DropConnect: weights of the hidden-to-hidden matrices are dropped, once for each batch, and
                          stay so for all its time steps (Merity et al. 2018, AWD-LSTM)

All of them scale what remains by 1 / (1 - rate), so nothing changes in evaluation.

Legend: B batch, T tokens, D width, V vocabulary, L depth, N packed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from monoblock.config.model import RecurrentConfig
from monoblock.nn.embedding import draw_kept_words


class VariationalDropout(nn.Dropout):
    """Dropout of x (B, T, D) with one mask for all time steps of a row (Gal and Ghahramani 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(torch.ones_like(x[:, :1]), self.p) if self.training and self.p else x


def drop_words(x: Tensor, ids: Tensor, rate: float, vocab: int, *, by_type: bool) -> Tensor:
    """Zero the embeddings (…, D) of random tokens and scale up the rest.

    by_type: drop words of the vocabulary in each row of ids (B, T), with all their occurrences there.
    """
    if by_type:
        return x * F.dropout(x.new_ones(len(ids), vocab), rate).gather(1, ids).unsqueeze(-1)
    return x * draw_kept_words(x, rate)


class DropoutLSTM(nn.LSTM):
    """An nn.LSTM that drops recurrent weights, or the same features at all time steps, in training.

    It has the weights of nn.LSTM, and is nn.LSTM in evaluation.  In training its layers run one after another, each as
    one call of torch.lstm, which uses cuDNN on a GPU.  `dropout` is the rate between the layers.
    """

    def __init__(self, width: int, depth: int, *, dropout: float, variational: bool, recurrent_dropout: float) -> None:
        super().__init__(width, width, depth, batch_first=True, dropout=dropout)
        self.variational, self.recurrent_dropout = variational, recurrent_dropout

    def forward(self, x: Any, state: tuple[Tensor, Tensor] | None = None) -> Any:
        """Return the outputs, packed if the input (B, T, D) is, and the last state, two tensors (L, B, D)."""
        if not self.training:
            return super().forward(x, state)
        packed = x if isinstance(x, PackedSequence) else None
        data, batch_sizes = (x, None) if packed is None else (packed.data, packed.batch_sizes)
        if state is None:
            rows = len(data) if batch_sizes is None else int(batch_sizes[0])
            state = (data.new_zeros(self.num_layers, rows, self.hidden_size),) * 2
        elif packed is not None:
            state = self.permute_hidden(state, packed.sorted_indices)
        states = []
        for layer, (hidden, cell) in enumerate(zip(*state, strict=True)):
            data = self._drop_features(data, batch_sizes) if layer else data
            data, *last = self._run_layer(layer, data, batch_sizes, [hidden[None], cell[None]])
            states.append(last)
        hidden, cell = (torch.cat(tensors) for tensors in zip(*states, strict=True))
        if packed is None:
            return data, (hidden, cell)
        return packed._replace(data=data), self.permute_hidden((hidden, cell), packed.unsorted_indices)

    def _run_layer(
        self, layer: int, data: Tensor, batch_sizes: Tensor | None, state: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = self._layer_weights(layer)
        # with biases, one layer, dropout 0, in training, in one direction
        if batch_sizes is None:
            return torch.lstm(data, state, weights, True, 1, 0.0, True, False, True)
        return torch.lstm(data, batch_sizes, state, weights, True, 1, 0.0, True, False)

    def _layer_weights(self, layer: int) -> list[Tensor]:
        """Return the weights of a layer in torch's order, with recurrent weights dropped."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights: list[Tensor] = [getattr(self, f"{name}_l{layer}") for name in names]
        weights[1] = F.dropout(weights[1], self.recurrent_dropout)
        if not weights[0].is_cuda:
            return weights
        # cuDNN reads the weights of a call from one buffer; if they lie elsewhere, torch warns and copies them.
        flat = torch.cat([weight.flatten() for weight in weights]).split([weight.numel() for weight in weights])
        return [part.view_as(weight) for part, weight in zip(flat, weights, strict=True)]

    def _drop_features(self, data: Tensor, batch_sizes: Tensor | None) -> Tensor:
        """Apply the dropout between two layers to (B, T, D), or to packed (N, D)."""
        if not self.variational or not self.dropout:
            return F.dropout(data, self.dropout)
        if batch_sizes is None:
            return data * F.dropout(torch.ones_like(data[:, :1]), self.dropout)
        # step t of a packed batch holds the first batch_sizes[t] rows
        rows = torch.cat([torch.arange(int(size), device=data.device) for size in batch_sizes])
        return data * F.dropout(torch.ones_like(data[: int(batch_sizes[0])]), self.dropout)[rows]


def language_model_layers(config: RecurrentConfig, dropout: float) -> nn.LSTM:
    """Return the layers of a language model, with a rate of dropout between them."""
    D, L, is_variational, rate = config.width, config.depth, config.variational_dropout, config.recurrent_dropout
    if not is_variational and not rate:
        return nn.LSTM(D, D, L, batch_first=True, dropout=dropout)
    return DropoutLSTM(D, L, dropout=dropout, variational=is_variational, recurrent_dropout=rate)
