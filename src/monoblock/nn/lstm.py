"""Recurrent baselines: an LSTM language model, and an LSTM encoder-decoder with additive attention.

    model = Recurrent(matching_config(config))           # as many parameters as the Transformer of that config
    logits = model(ids)                                  # (B, T, V)   kind="language_model"
    logits = model(source, target)                       # (B, T, V)   kind="encoder_decoder"

The encoder-decoder follows Bahdanau et al. 2015: at step i the previous state is the query, the context is part of the
input of the LSTM, and a maxout layer predicts the token from state, context and previous token:

    e_ij = v · tanh(W_s s_{i-1} + W_h h_j)      a_i = softmax_j(e_ij)      c_i = Σ_j a_ij h_j
    s_i  = LSTM([E y_{i-1}; c_i], s_{i-1})      s_0 = tanh(W_0 (first annotation, backward half))
    logits_i = O maxout(U [s_i; c_i; E y_{i-1}]) + b

Legend: B batch, T target tokens (or those of a language model), S source tokens, D width, V vocabulary, L depth.

Number of parameters (V' = V unless target_vocab is given; an LSTM layer with I inputs has lstm(I) = 4D(I + D + 2)):

    language_model    VD + L·lstm(D) + V (+ VD untied)
    encoder_decoder   VD (+ V'D with target_vocab, else one table for both) + V' (+ V'D untied)
                      + 2·lstm(D) + 2(L-1)·lstm(2D) + lstm(3D) + (L-1)·lstm(D)      encoder, then decoder
                      + 3D² + D + LD(D + 1) + 2D(4D + 1)                            attention, first state, maxout
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from monoblock.config.model import RecurrentConfig
from monoblock.errors import ConfigError, InputError
from monoblock.nn.module_hooks import weight_if_plain
from monoblock.nn.tap import Tap, apply_tap, tap_wants

LSTMKind = Literal["language_model", "encoder_decoder"]


class LSTMState(NamedTuple):
    """The state of an LSTM between steps; beam search reorders its rows with `select`."""

    hidden: Tensor  # (L, B, D)
    cell: Tensor  # (L, B, D)

    def select(self, rows: Tensor) -> LSTMState:
        return LSTMState(self.hidden.index_select(1, rows), self.cell.index_select(1, rows))


class EncoderMemory(NamedTuple):
    """The encoded source, which every decoding step attends to."""

    values: Tensor  # (B, S, 2D) the annotations h: forward half, backward half
    keys: Tensor  # (B, S, D) W_h h
    valid: Tensor | None  # (B, S) False on padding; None if there is none

    def select(self, rows: Tensor) -> EncoderMemory:
        valid = None if self.valid is None else self.valid.index_select(0, rows)
        return EncoderMemory(self.values.index_select(0, rows), self.keys.index_select(0, rows), valid)


StepOutput = tuple[Tensor, LSTMState]  # logits, and the state after them


def additive_attention(query: Tensor, keys: Tensor, score: Tensor | nn.Module, valid: Tensor | None) -> Tensor:
    """Return the attention weights (B, S), the softmax of v · tanh(W_s s + W_h h) over the valid tokens.

    `query` is W_s s (B, D) and `keys` are W_h h (B, S, D).  `score` is the vector v (D,), or a module that maps
    (B, S, D) to (B, S, 1).
    """
    hidden = torch.tanh(query.unsqueeze(1) + keys)
    scores: Tensor = hidden @ score if isinstance(score, Tensor) else score(hidden).squeeze(-1)  # (B, S)
    if valid is not None:  # every row has a valid token: `encode` refuses others
        scores = scores.masked_fill(~valid, float("-inf"))
    return scores.softmax(-1)


class Recurrent(nn.Module):
    """An LSTM language model or encoder-decoder, called like a Transformer of that family."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        if config.kind == "language_model" and config.target_vocab is not None:
            raise ConfigError(f"target_vocab={config.target_vocab} has no meaning in a language model; leave it out")
        D, L, V = config.width, config.depth, config.target_vocab or config.vocab
        self.dropout = nn.Dropout(config.dropout)
        self.layer_dropout = config.dropout if L > 1 else 0.0  # torch warns about dropout with one layer
        self.input = nn.Embedding(config.vocab, D)
        self.target = None if config.target_vocab is None else nn.Embedding(V, D)
        # Tied weights are stored once, as the embedding.
        self.output = None if config.tie else nn.Linear(D, V, bias=False)
        self.bias = nn.Parameter(torch.empty(V))
        self.encoder: nn.LSTM | None = None
        if config.kind == "language_model":
            self.decoder: nn.Module = nn.LSTM(D, D, L, batch_first=True, dropout=self.layer_dropout)
        else:
            self.encoder = nn.LSTM(D, D, L, batch_first=True, dropout=self.layer_dropout, bidirectional=True)
            self.decoder = nn.ModuleList(nn.LSTMCell(3 * D if layer == 0 else D, D) for layer in range(L))
            shapes = {"query": (D, D), "key": (2 * D, D), "score": (D, 1)}  # no biases, as in the paper
            self.attention = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            self.start = nn.Linear(D, L * D)
            self.readout = nn.Linear(4 * D, 2 * D)
        _initialize(self)

    def forward(
        self,
        source: Tensor,
        target: Tensor | None = None,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        state: LSTMState | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V) of model(ids, mask) or of model(source, target, source_mask, target_mask).

        An encoder-decoder calls `tap("attention.weights", w)` with its attention weights w (B, T, S).
        """
        if self.config.kind == "language_model":
            masks = [mask for mask in (target, attention_mask) if mask is not None]
            if len(masks) > 1 or source_mask is not None or target_mask is not None:
                raise InputError("a language model takes one text and one mask; write model(ids, attention_mask=…)")
            return self.forward_with_state(source, masks[0] if masks else None, state)[0]
        if target is None or (attention_mask is not None and source_mask is not None):
            raise InputError("an encoder-decoder takes two texts; write model(source, target, source_mask=mask)")
        _check_ids("target", target, self._output_embedding.num_embeddings, "BT")
        _valid_lengths("target_mask", target_mask, target)  # only checked, since padding comes after all valid tokens
        memory = self.encode(source, attention_mask if source_mask is None else source_mask)
        return self._decode(target, state or self.initial_state(memory), memory, tap)

    if TYPE_CHECKING:  # nn.Module types a call as Any
        __call__ = forward

    def forward_with_state(
        self, ids: Tensor, attention_mask: Tensor | None = None, state: LSTMState | None = None
    ) -> StepOutput:
        """Return the logits (B, T, V) of a language model and the state after each row's last valid token."""
        self._require_kind("language_model", "forward_with_state")
        _check_ids("ids", ids, self.config.vocab, "BT")
        self._check_batch(len(ids), state)
        lengths = _valid_lengths("attention_mask", attention_mask, ids)
        x, state = _run_lstm(self.decoder, self.dropout(self.input(ids)), lengths, state)
        return self._logits(x), state

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> EncoderMemory:
        """Encode a source (B, S) in both directions."""
        self._require_kind("encoder_decoder", "encode")
        _check_ids("source", source, self.config.vocab, "BS")
        lengths = _valid_lengths("source_mask", source_mask, source)
        assert self.encoder is not None
        values, _ = _run_lstm(self.encoder, self.dropout(self.input(source)), lengths, None)
        return EncoderMemory(values, self.attention["key"](values), None if source_mask is None else source_mask.bool())

    def initial_state(self, memory: EncoderMemory) -> LSTMState:
        """Return the state before the first decoding step, computed from the backward annotation of the first token."""
        self._require_kind("encoder_decoder", "initial_state")
        D, L = self.config.width, self.config.depth
        first = torch.tanh(self.start(memory.values[:, 0, D:]))  # (B, L·D)
        hidden = first.view(-1, L, D).transpose(0, 1).contiguous()
        return LSTMState(hidden, torch.zeros_like(hidden))  # the paper's GRU has no cell; zeros add no weights

    def step(
        self,
        token: Tensor,
        state: LSTMState | None = None,
        memory: EncoderMemory | None = None,
        *,
        tap: Tap | None = None,
    ) -> StepOutput:
        """Read one token per row (B,); return the logits (B, V) of the next token and the new state.

        `state=None` is the state before the first token.  `tap("attention.weights", w)` is called with the attention
        weights w (B, S) and returns the weights to use.
        """
        _check_ids("token", token, self._output_embedding.num_embeddings, "B")
        if (memory is None) != (self.config.kind == "language_model"):
            raise InputError(
                "step needs memory=model.encode(source) for an encoder-decoder, and a language model takes none"
            )
        if memory is None:
            logits, state = self.forward_with_state(token.unsqueeze(1), None, state)
            return logits.squeeze(1), state
        state = state or self.initial_state(memory)
        self._check_batch(len(token), state, memory)
        x = self.dropout(self._output_embedding(token))
        state, context, _ = self._decoder_step(x, state, memory, tap)
        return self._logits(self._maxout(state.hidden[-1], context, x)), state

    def _decode(self, target: Tensor, state: LSTMState, memory: EncoderMemory, tap: Tap | None) -> Tensor:
        """Run the recurrence over given tokens, then compute the logits of all steps at once."""
        self._check_batch(len(target), state, memory)
        x = self.dropout(self._output_embedding(target))  # (B, T, D)
        steps = []
        for embedded in x.unbind(1):
            state, context, step_weights = self._decoder_step(embedded, state, memory, None)
            steps.append((state.hidden[-1], context, step_weights))
        states, contexts, weights = (torch.stack(tensors, 1) for tensors in zip(*steps, strict=True))
        if tap_wants(tap, "attention.weights") and apply_tap(tap, "attention.weights", weights) is not weights:
            raise InputError(
                "a tap cannot replace the attention weights in model(source, target), which computes all steps at "
                "once; replace them in model.step(…, tap=…)"
            )
        return self._logits(self._maxout(states, contexts, x))

    def _decoder_step(
        self, x: Tensor, state: LSTMState, memory: EncoderMemory, tap: Tap | None
    ) -> tuple[LSTMState, Tensor, Tensor]:
        """Read an embedded token (B, D); return the new state, the context (B, 2D) and the weights (B, S)."""
        query, score = self.attention["query"](state.hidden[-1]), weight_if_plain(self.attention["score"], nn.Linear)
        score = score[0] if isinstance(score, Tensor) else score
        weights = apply_tap(tap, "attention.weights", additive_attention(query, memory.keys, score, memory.valid))
        context = torch.einsum("bs,bsd->bd", weights, memory.values)
        layer_input, states = torch.cat([x, context], -1), []
        for layer, cell in enumerate(self.decoder.children()):
            states.append(cell(layer_input, (state.hidden[layer], state.cell[layer])))
            layer_input = F.dropout(states[-1][0], self.layer_dropout, self.training)
        return LSTMState(*(torch.stack(tensors) for tensors in zip(*states, strict=True))), context, weights

    def _maxout(self, state: Tensor, context: Tensor, x: Tensor) -> Tensor:
        pairs: Tensor = self.readout(torch.cat([state, context, x], -1))  # (…, 2D)
        return pairs.view(*x.shape, 2).amax(-1)  # (…, D)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        if self.output is None:
            return F.linear(x, self._output_embedding.weight, self.bias)
        weight = weight_if_plain(self.output, nn.Linear)
        return F.linear(x, weight, self.bias) if isinstance(weight, Tensor) else weight(x) + self.bias

    @property
    def device(self) -> torch.device:
        return self.bias.device

    @property
    def _output_embedding(self) -> nn.Embedding:
        """The embedding of target tokens."""
        return self.input if self.target is None else self.target

    def _require_kind(self, kind: LSTMKind, method: str) -> None:
        if self.config.kind != kind:
            raise InputError(f"{method} is for kind={kind!r}, but this model has kind={self.config.kind!r}")

    def _check_batch(self, rows: int, state: LSTMState | None, memory: EncoderMemory | None = None) -> None:
        if memory is not None and len(memory.values) != rows:
            raise InputError(
                f"the source has {len(memory.values)} rows, but the target has {rows}; give one source for each target"
            )
        shape = (self.config.depth, rows, self.config.width)
        if state is not None and state.hidden.shape != shape:
            raise InputError(f"state has shape {tuple(state.hidden.shape)}, but these ids need a state of {shape}")


def _run_lstm(lstm: nn.Module, x: Tensor, lengths: Tensor | None, state: LSTMState | None) -> tuple[Tensor, LSTMState]:
    """Run an LSTM over rows; return the outputs, 0 on padding, and the state after the last token of each row."""
    if lengths is None:
        out, last = lstm(x, state)
    else:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, last = lstm(packed, state)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return out, LSTMState(*last)


def _check_ids(name: str, ids: Tensor, vocab: int, axes: str) -> None:
    if ids.dim() != len(axes) or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(
            f"{name} has dtype {ids.dtype} and shape {tuple(ids.shape)}; give whole numbers of shape "
            f"({', '.join(axes)}), at least one"
        )
    if ids.device.type == "cpu" and (ids.min() < 0 or ids.max() >= vocab):  # on a GPU it would synchronize
        wrong = ids[(ids < 0) | (ids >= vocab)][0].item()
        raise InputError(f"{name} holds the id {wrong}, which is not in the vocabulary; give ids from 0 to {vocab - 1}")


def _valid_lengths(name: str, mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """Return the number of valid tokens in each row, a tensor (B,), or None without a mask."""
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)}, but its ids have {tuple(ids.shape)}; give a 1 or 0 for each id"
        )
    if ((mask != 0) & (mask != 1)).any():
        raise InputError(f"{name} has values other than 0 and 1; write 1 for a real token and 0 for padding")
    valid = mask.bool()
    if (valid[:, 1:] & ~valid[:, :-1]).any():
        raise InputError(f"{name} has padding before a real token, which an LSTM would read first; pad on the right")
    if not valid[:, 0].all():
        raise InputError(f"{name} leaves a row without a real token; drop that row")
    return valid.sum(1)


@torch.no_grad()
def _initialize(model: nn.Module) -> None:
    """Initialize embeddings uniformly in ±0.1, recurrent matrices orthogonally for each gate, other matrices by Xavier.

    Biases are 0, except those of the forget gates, which are 1.
    """
    for name, weight in model.named_parameters():
        if name in ("input.weight", "target.weight", "output.weight"):
            nn.init.uniform_(weight, -0.1, 0.1)
        elif weight.dim() == 1:
            nn.init.zeros_(weight)
            if "bias_ih" in name:
                weight.chunk(4)[1].fill_(1.0)  # gates in torch's order: input, forget, cell, output
        else:
            fill: Callable[[Tensor], Tensor] = nn.init.orthogonal_ if "_hh" in name else nn.init.xavier_uniform_
            for gate in weight.chunk(4 if "_ih" in name or "_hh" in name else 1):
                fill(gate)
