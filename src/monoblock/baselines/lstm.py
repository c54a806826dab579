"""Recurrent baselines: an LSTM language model, and an LSTM encoder-decoder with or without additive attention.

    model = Recurrent(matching_config(config))           # as many parameters as the Transformer of that config
    logits = model(ids)                                  # (B, T, V)   kind="language_model"
    logits = model(source, target)                       # (B, T, V)   kind="encoder_decoder"

The encoder-decoder follows Bahdanau et al. 2015: at step i the previous state is the query, the context is part of the
input of the LSTM, and a maxout layer predicts the token from state, context and previous token:

    e_ij = v · tanh(W_s s_{i-1} + W_h h_j)      a_i = softmax_j(e_ij)      c_i = Σ_j a_ij h_j
    s_i  = LSTM([E y_{i-1}; c_i], s_{i-1})      s_0 = tanh(W_0 (first annotation, backward half))
    logits_i = O maxout(U [s_i; c_i; E y_{i-1}]) + b

With attention=False every c_i is the same vector, the last annotation forward and the first backward (Cho et al. 2014).

Legend: B batch, T target tokens (or those of a language model), S source tokens, D width, V vocabulary, L depth.

Number of parameters (V' = V unless target_vocab is given; an LSTM layer with I inputs has lstm(I) = 4D(I + D + 2)):

    language_model    VD + L·lstm(D) + V (+ VD untied)
    encoder_decoder   VD (+ V'D with target_vocab, else one table for both) + V' (+ V'D untied)
                      + 2·lstm(D) + 2(L-1)·lstm(2D) + lstm(3D) + (L-1)·lstm(D)      encoder, then decoder
                      + LD(D + 1) + 2D(4D + 1) (+ 3D² + D)                          first state, maxout, attention
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, Unpack, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from monoblock.baselines.dropout import VariationalDropout, drop_words, language_model_layers
from monoblock.baselines.generate import GenerateCall
from monoblock.config.model import RecurrentConfig
from monoblock.errors import ConfigError, InputError
from monoblock.inference.scheduler import Prompt, pad_right
from monoblock.interop.model_folder import load_model
from monoblock.interop.save import save_model
from monoblock.kernels.cpu import library
from monoblock.nn.arguments import select_tokens
from monoblock.nn.generation_options import GeneratedTokens, ModelOptions, TokenRows
from monoblock.nn.tap import Tap, apply_tap, tap_wants

LSTMKind = Literal["language_model", "encoder_decoder"]
StepOutput = tuple[Tensor, "LSTMState"]  # logits, and the state after them


def additive_attention(query: Tensor, keys: Tensor, score: Callable[[Tensor], Tensor], valid: Tensor | None) -> Tensor:
    """Return the attention weights (B, S), the softmax of v · tanh(W_s s + W_h h) over the valid tokens.

    `query` is W_s s (B, D) and `keys` are W_h h (B, S, D).  `score` multiplies (B, S, D) by v, which gives
    (B, S, 1).
    """
    hidden = torch.tanh(query.unsqueeze(1) + keys)
    scores = score(hidden).squeeze(-1)  # (B, S)
    if valid is not None:  # every row has a valid token: `encode` refuses others
        scores = scores.masked_fill(~valid, float("-inf"))
    return scores.softmax(-1)


class LSTMState(NamedTuple):
    """The state of an LSTM between steps; beam search reorders its rows with `select`."""

    hidden: Tensor  # (L, B, D)
    cell: Tensor  # (L, B, D)

    def select(self, rows: Tensor) -> LSTMState:
        return LSTMState(self.hidden.index_select(1, rows), self.cell.index_select(1, rows))


class EncoderMemory(NamedTuple):
    """The encoded source, which every decoding step attends to; without attention, its summary (S = 1)."""

    values: Tensor  # (B, S, 2D) the annotations h: forward half, backward half
    keys: Tensor  # (B, S, D) W_h h; without attention of size 0, (B, 1, 0)
    valid: Tensor | None  # (B, S) False on padding; None if there is none

    def select(self, rows: Tensor) -> EncoderMemory:
        valid = None if self.valid is None else self.valid.index_select(0, rows)
        return EncoderMemory(self.values.index_select(0, rows), self.keys.index_select(0, rows), valid)


class Recurrent(nn.Module):
    """An LSTM language model or encoder-decoder, called like a Transformer of that family."""

    loaded_from: Path | None = None  # the folder of a loaded model; what lies there is saved with the model

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        if not isinstance(config, RecurrentConfig):
            raise ConfigError(f"a Recurrent is built from a RecurrentConfig, not from {config!r:.60}; write one")
        self.config = config
        if config.kind == "language_model" and (config.target_vocab is not None or not config.attention):
            option = f"target_vocab={config.target_vocab}" if config.attention else "attention=False"
            raise ConfigError(f"{option} has no meaning in a language model; leave it out")
        D, L, V = config.width, config.depth, config.target_vocab or config.vocab
        dropout = VariationalDropout if config.variational_dropout else nn.Dropout
        rates = (config.embedding_dropout, config.head_dropout)
        self.embedding_dropout, self.head_dropout = (dropout(config.dropout if p is None else p) for p in rates)
        self.layer_dropout = config.dropout if L > 1 else 0.0  # torch warns about dropout with one layer
        self.input = nn.Embedding(config.vocab, D)
        self.target = None if config.target_vocab is None else nn.Embedding(V, D)
        # Tied weights are stored once, as the embedding.
        self.output = None if config.tie else nn.Linear(D, V, bias=False)
        self.bias = nn.Parameter(torch.empty(V))
        self.encoder: nn.LSTM | None = None
        if config.kind == "language_model":
            self.decoder: nn.Module = language_model_layers(config, self.layer_dropout)
        else:
            self.encoder = nn.LSTM(D, D, L, batch_first=True, dropout=self.layer_dropout, bidirectional=True)
            self.decoder = nn.ModuleList(nn.LSTMCell(3 * D if layer == 0 else D, D) for layer in range(L))
            shapes = {"query": (D, D), "key": (2 * D, D), "score": (D, 1)} if config.attention else {}  # without biases
            self.attention = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            self.start = nn.Linear(D, L * D)
            self.readout = nn.Linear(4 * D, 2 * D)
        initialize_lstm(self)

    def forward(
        self,
        source: Tensor,
        target: Tensor | None = None,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        state: LSTMState | None = None,
        logits_at: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V) of model(ids, mask) or of model(source, target, source_mask, target_mask).

        `logits_at` (B, n) selects the tokens to compute logits for.
        `tap(name, tensor)` is called with "input.output" and "target.output" (embeddings), "encoder.output" (B, S, 2D),
        "attention.weights" (B, T, S), which it cannot replace here, "decoder.output" (B, T, D) and "head.logits".
        """
        if self.config.kind == "language_model":
            masks = [mask for mask in (target, attention_mask) if mask is not None]
            if len(masks) > 1 or source_mask is not None or target_mask is not None:
                raise InputError("a language model takes one text and one mask; write model(ids, attention_mask=…)")
            return self.forward_with_state(source, masks[0] if masks else None, state, logits_at=logits_at, tap=tap)[0]
        if target is None or (attention_mask is not None and source_mask is not None):
            raise InputError("an encoder-decoder takes two texts; write model(source, target, source_mask=mask)")
        check_ids("target", target, self._output_embedding.num_embeddings, "BT")
        valid_lengths("target_mask", target_mask, target)  # only checked, since padding comes after all valid tokens
        memory = self.encode(source, attention_mask if source_mask is None else source_mask, tap=tap)
        return self._decode(target, state or self.initial_state(memory), memory, logits_at, tap)

    if TYPE_CHECKING:  # nn.Module types a call as Any
        __call__ = forward

    def forward_with_state(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        state: LSTMState | None = None,
        *,
        logits_at: Tensor | None = None,
        tap: Tap | None = None,
    ) -> StepOutput:
        """Return the logits (B, T, V) of a language model and the state after each row's last valid token."""
        self._require_kind("language_model", "forward_with_state")
        check_ids("ids", ids, self.config.vocab, "BT")
        self._check_batch(len(ids), state)
        lengths = valid_lengths("attention_mask", attention_mask, ids)
        x = self._embed("input", self.input, ids, tap)
        x, state = run_lstm(self.decoder, x, lengths, state)
        return self._logits(x, tap, logits_at), state

    def encode(self, source: Tensor, source_mask: Tensor | None = None, *, tap: Tap | None = None) -> EncoderMemory:
        """Encode a source (B, S) in both directions."""
        self._require_kind("encoder_decoder", "encode")
        check_ids("source", source, self.config.vocab, "BS")
        lengths = valid_lengths("source_mask", source_mask, source)
        assert self.encoder is not None
        x = self._embed("input", self.input, source, tap)
        values, _ = run_lstm(self.encoder, x, lengths, None)
        values = apply_tap(tap, "encoder.output", values)
        if not self.config.attention:
            D, rows = self.config.width, torch.arange(len(values), device=values.device)
            last = values[:, -1] if lengths is None else values[rows, lengths.to(values.device) - 1]
            summary = torch.cat([last[:, :D], values[:, 0, D:]], -1).unsqueeze(1)
            return EncoderMemory(summary, summary[..., :0], None)
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

        `state=None` is the state before the first token.  `tap` is called as in `forward`, without the axis T; here it
        may also replace the attention weights (B, S).
        """
        check_ids("token", token, self._output_embedding.num_embeddings, "B")
        if (memory is None) != (self.config.kind == "language_model"):
            raise InputError("an encoder-decoder needs memory=model.encode(source) here; a language model takes none")
        if memory is None:
            logits, state = self.forward_with_state(token.unsqueeze(1), None, state, tap=tap)
            return logits.squeeze(1), state
        state = state or self.initial_state(memory)
        self._check_batch(len(token), state, memory)
        x = self._embed("target", self._output_embedding, token, tap)
        state, context, _ = self._decoder_step(x, state, memory, tap)
        return self._logits(self._maxout(state.hidden[-1], context, x), tap), state

    def _embed(self, name: str, embedding: nn.Embedding, ids: Tensor, tap: Tap | None) -> Tensor:
        x = apply_tap(tap, f"{name}.output", embedding(ids))
        rate, by_type = self.config.word_dropout, self.config.variational_dropout
        x = drop_words(x, ids, rate, self.config.vocab, by_type=by_type) if self.training and rate else x
        return cast(Tensor, self.embedding_dropout(x))

    def _decode(
        self, target: Tensor, state: LSTMState, memory: EncoderMemory, logits_at: Tensor | None, tap: Tap | None
    ) -> Tensor:
        """Run the recurrence over given tokens, then compute the logits of all steps at once."""
        self._check_batch(len(target), state, memory)
        x = self._embed("target", self._output_embedding, target, tap)  # (B, T, D)
        steps = []
        for embedded in x.unbind(1):
            state, context, step_weights = self._decoder_step(embedded, state, memory, None)
            steps.append((state.hidden[-1], context, step_weights))
        states, contexts, weights = (torch.stack(tensors, 1) for tensors in zip(*steps, strict=True))
        if (
            self.config.attention
            and tap_wants(tap, "attention.weights")
            and apply_tap(tap, "attention.weights", weights) is not weights
        ):
            raise InputError(
                "a tap cannot replace the attention weights in model(source, target); use model.step(…, tap=…) instead"
            )
        return self._logits(self._maxout(states, contexts, x), tap, logits_at)

    def _decoder_step(
        self, x: Tensor, state: LSTMState, memory: EncoderMemory, tap: Tap | None
    ) -> tuple[LSTMState, Tensor, Tensor]:
        """Read an embedded token (B, D); return the new state, the context (B, 2D) and the weights (B, S)."""
        weights = self._attention_weights(state.hidden[-1], memory, tap)
        context = torch.einsum("bs,bsd->bd", weights, memory.values)
        layer_input, states = torch.cat([x, context], -1), []
        for layer, cell in enumerate(self.decoder.children()):
            states.append(cell(layer_input, (state.hidden[layer], state.cell[layer])))
            layer_input = F.dropout(states[-1][0], self.layer_dropout, self.training)
        return LSTMState(*(torch.stack(tensors) for tensors in zip(*states, strict=True))), context, weights

    def _attention_weights(self, query: Tensor, memory: EncoderMemory, tap: Tap | None) -> Tensor:
        if not self.config.attention:
            return query.new_ones(len(query), 1)  # the memory is one vector
        query = self.attention["query"](query)
        weights = additive_attention(query, memory.keys, self.attention["score"], memory.valid)
        return apply_tap(tap, "attention.weights", weights)

    def _maxout(self, state: Tensor, context: Tensor, x: Tensor) -> Tensor:
        pairs: Tensor = self.readout(torch.cat([state, context, x], -1))  # (…, 2D)
        return pairs.view(*x.shape, 2).amax(-1)  # (…, D)

    def _logits(self, x: Tensor, tap: Tap | None, logits_at: Tensor | None = None) -> Tensor:
        x = apply_tap(tap, "decoder.output", x)
        x = self.head_dropout(x if logits_at is None else select_tokens(x, logits_at, None))
        if self.output is None:
            logits = F.linear(x, self._output_embedding.weight, self.bias)
        else:
            logits = self.output(x) + self.bias
        return apply_tap(tap, "head.logits", logits)

    # -- generation and folders ---------------------------------------------------------------------------------------

    @overload
    def generate(
        self, ids: TokenRows, *, return_scores: Literal[False] = False, **options: Unpack[ModelOptions]
    ) -> Tensor: ...
    @overload
    def generate(
        self, ids: TokenRows, *, return_scores: Literal[True], **options: Unpack[ModelOptions]
    ) -> GeneratedTokens: ...
    def generate(
        self, ids: TokenRows, *, return_scores: bool = False, **options: Unpack[ModelOptions]
    ) -> Tensor | GeneratedTokens:
        """Return the prompts with their continuations, or the targets of sources, as `Transformer.generate` does."""
        return GenerateCall(self, ids, False, **options).run(return_scores=return_scores)

    def stream(self, ids: TokenRows, **options: Unpack[ModelOptions]) -> Iterator[Tensor]:
        """Yield the new tokens (B,) after each step; `options` are those of `generate`."""
        return GenerateCall(self, ids, True, **options).stream()

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, dtype: torch.dtype | str = torch.float32, device: str = "cpu"
    ) -> Self:
        """Load a model from a folder with config.json and model.safetensors."""
        return load_model(cls, folder, dtype=dtype, device=device)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | str | None = None, max_shard_size: int = 5 * 10**9
    ) -> None:
        """Write config.json and model.safetensors to a folder, split into files of at most `max_shard_size` bytes.

        `dtype` rounds the weights.
        """
        save_model(self, folder, dtype=dtype, max_shard_size=max_shard_size)

    def decoding_rows(self, tap: Tap | None = None) -> LSTMRows:
        return LSTMRows(self, tap)

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


class LSTMRows:
    """The rows of a batch in an LSTM: the recurrent state of each, and the source that it attends to."""

    def __init__(self, model: Recurrent, tap: Tap | None) -> None:
        self.model, self.tap = model, tap
        self.state: LSTMState
        self.memory: EncoderMemory | None = None

    def start(self, prompts: Sequence[Prompt], copies: int) -> Tensor:
        """Read prompts, each for some rows; return the logits (rows, V) after the last token of each."""
        model, self.memory = self.model, None
        if model.encoder is not None:
            source, mask = pad_right([prompt.source or () for prompt in prompts], model.device)
            self.memory = model.encode(source, mask, tap=self.tap)
        ids, mask = pad_right([prompt.ids for prompt in prompts], model.device)
        logits, self.state = model.step(ids[:, 0], None, self.memory, tap=self.tap)
        for position in range(1, ids.shape[1]):
            old, logits = (logits, *self.state), self.step(ids[:, position])
            if mask is not None:
                pairs = zip((logits, *self.state), old, strict=True)
                logits, hidden, cell = (torch.where(mask[:, position, None], *pair) for pair in pairs)
                self.state = LSTMState(hidden, cell)
        rows = torch.arange(len(prompts), device=model.device).repeat_interleave(copies)
        self.select(rows)
        return logits[rows]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; return the logits (rows, V) after it."""
        logits, self.state = self.model.step(tokens, self.state, self.memory, tap=self.tap)
        return logits

    def select(self, rows: Tensor, *, same_sources: bool = False) -> None:
        """Continue with these rows; with same_sources, each takes the place of a row of the same request."""
        self.state = self.state.select(rows)
        if self.memory is not None and not same_sources:
            self.memory = self.memory.select(rows)


def run_lstm(lstm: nn.Module, x: Tensor, lengths: Tensor | None, state: LSTMState | None) -> tuple[Tensor, LSTMState]:
    """Run an LSTM over rows; return the outputs, 0 on padding, and the state after the last token of each row."""
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        # Autocast would run the LSTM of cuDNN in fp16, where small gradients become 0 without loss scaling.
        dtype = next(lstm.parameters()).dtype
        start = None if state is None else LSTMState(*(tensor.to(dtype) for tensor in state))
        with torch.autocast("cuda", enabled=False):
            return run_lstm(lstm, x.to(dtype), lengths, start)
    with library.without_slow_onednn():
        if lengths is None:
            out, last = lstm(x, state)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, last = lstm(packed, state)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return out, LSTMState(*last)


@torch.no_grad()
def initialize_lstm(model: nn.Module) -> None:
    """Initialize an LSTM model: embeddings uniformly in ±0.1, recurrent matrices orthogonally, others by Xavier.

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


def check_ids(name: str, ids: Tensor, vocab: int, axes: str) -> None:
    if ids.dim() != len(axes) or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(
            f"{name} has dtype {ids.dtype} and shape {tuple(ids.shape)}; give whole numbers of shape "
            f"({', '.join(axes)}), at least one"
        )
    if ids.device.type == "cpu" and (ids.min() < 0 or ids.max() >= vocab):  # on a GPU it would synchronize
        wrong = ids[(ids < 0) | (ids >= vocab)][0].item()
        raise InputError(f"{name} holds the id {wrong}, which is not in the vocabulary; give ids from 0 to {vocab - 1}")


def valid_lengths(name: str, mask: Tensor | None, ids: Tensor) -> Tensor | None:
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
