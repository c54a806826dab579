"""The baselines attention replaced: an LSTM language model, and an LSTM encoder-decoder with additive attention.

    model = Recurrent(matching(config))                  # as many weights as the Transformer of that config
    logits = model(ids)                                  # (B, T, V)   kind="language_model"
    logits = model(source, target)                       # (B, T, V)   kind="encoder_decoder"

The encoder-decoder keeps the order of Bahdanau et al. 2015: at step i the state before it is the query, the context is
part of what the LSTM reads, and the word is read off state, context and previous word through a maxout layer:

    e_ij = v · tanh(W_s s_{i-1} + W_h h_j)      a_i = softmax_j(e_ij)      c_i = Σ_j a_ij h_j
    s_i  = LSTM([E y_{i-1}; c_i], s_{i-1})      s_0 = tanh(W_0 (first annotation, backward half))
    logits_i = O maxout(U [s_i; c_i; E y_{i-1}]) + b

Legend: B batch, T target places (or a language model's), S source places, D width, V vocabulary, L depth.

How many weights (V' = V unless target_vocab is given; an LSTM layer reading I numbers owns lstm(I) = 4D(I + D + 2)):

    language_model    VD + L·lstm(D) + V (+ VD untied)
    encoder_decoder   VD (+ V'D with target_vocab, else one table for both) + V' (+ V'D untied)
                      + 2·lstm(D) + 2(L-1)·lstm(2D) + lstm(3D) + (L-1)·lstm(D)      encoder, then decoder
                      + 3D² + D + LD(D + 1) + 2D(4D + 1)                            attention, first state, maxout
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from monoblock.accounting.parameters import parameters
from monoblock.accounting.recurrent import recurrent_parameters
from monoblock.config import EmbeddingConfig, Family, ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, InputError
from monoblock.tap import Tap, tapped, wants

Kind = Literal["language_model", "encoder_decoder"]
COUNTERPART: dict[Family, Kind] = {"decoder-only": "language_model", "encoder-decoder": "encoder_decoder"}


class State(NamedTuple):
    """What an LSTM remembers between steps; beam search keeps rows of it by `select`."""

    hidden: Tensor  # (L, B, D)
    cell: Tensor  # (L, B, D)

    def select(self, rows: Tensor) -> State:
        return State(self.hidden.index_select(1, rows), self.cell.index_select(1, rows))


class Memory(NamedTuple):
    """The encoded source: what every decoding step looks at."""

    values: Tensor  # (B, S, 2D), the annotations h: forward half, backward half
    keys: Tensor  # (B, S, D), W_h h, the same at every step
    real: Tensor | None  # (B, S), False on padding; None: no padding

    def select(self, rows: Tensor) -> Memory:
        real = None if self.real is None else self.real.index_select(0, rows)
        return Memory(self.values.index_select(0, rows), self.keys.index_select(0, rows), real)


Advanced = tuple[Tensor, State]  # logits, and the state after them


def additive(query: Tensor, keys: Tensor, score: Tensor, real: Tensor | None) -> Tensor:
    """softmax of v · tanh(W_s s + W_h h) over what is real: query W_s s (B, D), keys W_h h (B, S, D), score v (D)."""
    scores = torch.tanh(query.unsqueeze(1) + keys) @ score  # (B, S)
    if real is not None:  # every row has a real token: `encode` refuses others
        scores = scores.masked_fill(~real, float("-inf"))
    return scores.softmax(-1)


class Recurrent(nn.Module):
    """An LSTM language model or encoder-decoder, called like a Transformer of the same task."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        if config.kind == "language_model" and config.target_vocab is not None:
            raise ConfigError(f"target_vocab={config.target_vocab} has no meaning in a language model; leave it out")
        D, L, V = config.width, config.depth, config.target_vocab or config.vocab
        self.dropout = nn.Dropout(config.dropout)
        self.between = config.dropout if L > 1 else 0.0  # torch warns of dropout between the layers of one
        self.input = nn.Embedding(config.vocab, D)
        self.target = None if config.target_vocab is None else nn.Embedding(V, D)
        # Tied weights are one weight under one name: nothing to merge when saved, nothing to forget when loaded.
        self.output = None if config.tie else nn.Linear(D, V, bias=False)
        self.bias = nn.Parameter(torch.empty(V))
        self.encoder: nn.LSTM | None = None
        if config.kind == "language_model":
            self.decoder: nn.Module = nn.LSTM(D, D, L, batch_first=True, dropout=self.between)
        else:
            self.encoder = nn.LSTM(D, D, L, batch_first=True, dropout=self.between, bidirectional=True)
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
        state: State | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits (B, T, V) of a source and a target, or of a language model's ids; its second argument is its mask.

        `tap("attention.weights", w)` is shown the encoder-decoder's attention as one (B, T, S).
        """
        if self.config.kind == "language_model":
            masks = [given for given in (target, attention_mask) if given is not None]
            if len(masks) > 1 or source_mask is not None or target_mask is not None:
                raise InputError("a language model takes one text; write model(ids, attention_mask=…)")
            return self.read(source, masks[0] if masks else None, state)[0]
        if target is None or (attention_mask is not None and source_mask is not None):
            raise InputError("an encoder-decoder takes two texts; write model(source, target, source_mask=…)")
        _check_ids("target", target, self._table.num_embeddings, "BT")
        _lengths("target_mask", target_mask, target)  # only checked: a padded place comes after all that is real
        memory = self.encode(source, attention_mask if source_mask is None else source_mask)
        return self._decode(target, state or self.initial(memory), memory, tap)

    def read(self, ids: Tensor, attention_mask: Tensor | None = None, state: State | None = None) -> Advanced:
        """Language model: logits (B, T, V), and the state after each row's last real token, to go on reading from."""
        self._need("language_model", "read")
        _check_ids("ids", ids, self.config.vocab, "BT")
        self._check_rows(len(ids), state)
        lengths = _lengths("attention_mask", attention_mask, ids)
        x, state = _run(self.decoder, self.dropout(self.input(ids)), lengths, state)
        return self._logits(x), state

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Memory:
        """Encoder-decoder: read the source (B, S) in both directions."""
        self._need("encoder_decoder", "encode")
        _check_ids("source", source, self.config.vocab, "BS")
        lengths = _lengths("source_mask", source_mask, source)
        assert self.encoder is not None
        values, _ = _run(self.encoder, self.dropout(self.input(source)), lengths, None)
        return Memory(values, self.attention["key"](values), None if source_mask is None else source_mask.bool())

    def initial(self, memory: Memory) -> State:
        """Encoder-decoder: the state before the first step, from the first token as read backwards."""
        self._need("encoder_decoder", "initial")
        D, L = self.config.width, self.config.depth
        first = torch.tanh(self.start(memory.values[:, 0, D:]))  # (B, L·D)
        hidden = first.view(-1, L, D).transpose(0, 1).contiguous()
        return State(hidden, torch.zeros_like(hidden))  # the paper's unit has no cell; an empty one adds no weights

    def step(
        self, token: Tensor, state: State | None = None, memory: Memory | None = None, *, tap: Tap | None = None
    ) -> Advanced:
        """One token (B,) further: logits (B, V) for the next and the state after it; state=None is the beginning.

        `tap("attention.weights", w)` sees w (B, S), and what it returns is used.
        """
        _check_ids("token", token, self._table.num_embeddings, "B")
        if (memory is None) != (self.config.kind == "language_model"):
            raise InputError("step looks at model.encode(source) in an encoder-decoder; a language model has no memory")
        if memory is None:
            logits, state = self.read(token.unsqueeze(1), None, state)
            return logits.squeeze(1), state
        state = state or self.initial(memory)
        self._check_rows(len(token), state, memory)
        x = self.dropout(self._table(token))
        state, context, _ = self._advance(x, state, memory, tap)
        return self._logits(self._maxout(state.hidden[-1], context, x)), state

    def _decode(self, target: Tensor, state: State, memory: Memory, tap: Tap | None) -> Tensor:
        """`step` over given tokens; only the recurrence is a loop, the logits are read off all places at once."""
        self._check_rows(len(target), state, memory)
        x = self.dropout(self._table(target))  # (B, T, D)
        steps = []
        for place in x.unbind(1):
            state, context, weight = self._advance(place, state, memory, None)
            steps.append((state.hidden[-1], context, weight))
        states, contexts, weights = (torch.stack(part, 1) for part in zip(*steps, strict=True))
        if wants(tap, "attention.weights") and tapped(tap, "attention.weights", weights) is not weights:
            raise InputError("the attention of a whole run is over when seen; change it in model.step(…, tap=…)")
        return self._logits(self._maxout(states, contexts, x))

    def _advance(self, x: Tensor, state: State, memory: Memory, tap: Tap | None) -> tuple[State, Tensor, Tensor]:
        """The recurrence: an embedded token (B, D) in; the new state, its context (B, 2D) and weights (B, S) out."""
        query, score = self.attention["query"](state.hidden[-1]), self.attention.get_parameter("score.weight")
        weights = tapped(tap, "attention.weights", additive(query, memory.keys, score[0], memory.real))
        context = torch.einsum("bs,bsd->bd", weights, memory.values)
        below, layers = torch.cat([x, context], -1), []
        for layer, unit in enumerate(self.decoder.children()):
            layers.append(unit(below, (state.hidden[layer], state.cell[layer])))
            below = F.dropout(layers[-1][0], self.between, self.training)
        return State(*(torch.stack(part) for part in zip(*layers, strict=True))), context, weights

    def _maxout(self, state: Tensor, context: Tensor, x: Tensor) -> Tensor:
        pairs: Tensor = self.readout(torch.cat([state, context, x], -1))  # (…, 2D)
        return pairs.view(*x.shape, 2).amax(-1)  # (…, D)

    def _logits(self, x: Tensor) -> Tensor:
        weight = self._table.weight if self.output is None else self.output.weight
        return F.linear(self.dropout(x), weight, self.bias)

    @property
    def device(self) -> torch.device:
        return self.bias.device

    @property
    def _table(self) -> nn.Embedding:  # of the tokens the model writes
        return self.input if self.target is None else self.target

    def _need(self, kind: Kind, method: str) -> None:
        if self.config.kind != kind:
            raise InputError(f"{method} belongs to kind={kind!r}, and this model is kind={self.config.kind!r}")

    def _check_rows(self, rows: int, state: State | None, memory: Memory | None = None) -> None:
        if memory is not None and len(memory.values) != rows:
            raise InputError(f"the source has {len(memory.values)} rows and the target {rows}; give them in pairs")
        wanted = (self.config.depth, rows, self.config.width)
        if state is not None and state.hidden.shape != wanted:
            raise InputError(f"state has shape {tuple(state.hidden.shape)}; for these ids give {wanted}")


def _run(lstm: nn.Module, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
    """An LSTM over rows of unequal length: outputs (0 on padding), and the state after each row's last real place."""
    if lengths is None:
        out, last = lstm(x, state)
    else:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, last = lstm(packed, state)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return out, State(*last)


def _check_ids(name: str, ids: Tensor, vocab: int, axes: str) -> None:
    if ids.dim() != len(axes) or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(f"{name} is {ids.dtype} of shape {tuple(ids.shape)}; give whole numbers ({', '.join(axes)})")
    if ids.device.type == "cpu" and (ids.min() < 0 or ids.max() >= vocab):  # elsewhere looking would stall the device
        wrong = ids[(ids < 0) | (ids >= vocab)][0].item()
        raise InputError(f"{name} holds the id {wrong}, outside the vocabulary; write ids from 0 to {vocab - 1}")


def _lengths(name: str, mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """How many real tokens each row begins with (B,); None without a mask."""
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise InputError(f"{name} has shape {tuple(mask.shape)}, its ids {tuple(ids.shape)}; give a 1 or 0 for each")
    if ((mask != 0) & (mask != 1)).any():
        raise InputError(f"{name} holds more than 0 and 1; write 1 for a real token and 0 for padding")
    real = mask.bool()
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise InputError(f"{name} has padding before a real token, and an LSTM reads in order; pad on the right")
    if not real[:, 0].all():
        raise InputError(f"{name} leaves a row without a real token; drop that row")
    return real.sum(1)


@torch.no_grad()
def _initialize(model: nn.Module) -> None:
    """Tables uniform in ±0.1, recurrent matrices orthogonal a gate, other matrices Xavier, biases 0, forget gates 1."""
    for name, weight in model.named_parameters():
        if name in ("input.weight", "target.weight", "output.weight"):
            nn.init.uniform_(weight, -0.1, 0.1)
        elif weight.dim() == 1:
            nn.init.zeros_(weight)
            if "bias_ih" in name:
                weight.chunk(4)[1].fill_(1.0)  # torch's order of gates: input, forget, cell, output
        else:
            fill: Callable[[Tensor], Tensor] = nn.init.orthogonal_ if "_hh" in name else nn.init.xavier_uniform_
            for gate in weight.chunk(4 if "_ih" in name or "_hh" in name else 1):
                fill(gate)


def parameter_count(config: RecurrentConfig) -> int:
    """The formula at the top of this file: how many weights a Recurrent of this config owns, without building it."""
    return sum(recurrent_parameters(config).values())


def matching(config: ModelConfig, kind: Kind | None = None, *, depth: int = 2) -> RecurrentConfig:
    """The baseline for a Transformer: its vocabulary and tying, at the width that comes nearest to its parameters."""
    kind, words = kind or COUNTERPART.get(config.family), config.output_input
    if not isinstance(config.input, EmbeddingConfig) or not isinstance(words, EmbeddingConfig):
        raise ConfigError("a model of image patches has no recurrent counterpart; give one that reads tokens")
    if kind is None:
        raise ConfigError("an encoder alone has no counterpart here; write kind='language_model' to match its size")
    shared = kind == "language_model" or config.target is None or config.tie in ("source_target", "three_way")
    vocab, target = (words.vocab, None) if shared else (config.input.vocab, words.vocab)
    base = RecurrentConfig(kind=kind, vocab=vocab, target_vocab=target, width=1, depth=depth, dropout=words.dropout)
    base = replace(base, tie=config.tie in ("output", "three_way"))

    def count(width: int) -> int:
        return parameter_count(replace(base, width=width))

    wanted = sum(parameters(config).values())
    above = 1 + bisect_left(range(1, wanted), wanted, key=count)  # the first width with as many weights or more
    return replace(base, width=min(max(1, above - 1), above, key=lambda width: abs(count(width) - wanted)))
