"""Decode with LSTMs: rows of tokens advance together, one token per row in each step.

    decoder = Decoder([model])
    request_id = decoder.add((1,), Settings(num_beams=4), source=(5, 7, 11))
    while decoder.busy:
        for output in decoder.step():
            ...

A batch has requests with equally many rows and beams; those of another shape wait for the next batch.  An LSTM has no
cache: each row has a recurrent state and, with an encoder, the source that it attends to.  Settings, filters, random
numbers and beams are those of `inference`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from monoblock.baselines.lstm import EncoderMemory, LSTMState, Recurrent
from monoblock.config.inputs import EmbeddingConfig
from monoblock.config.positions import Learned
from monoblock.errors import InputError
from monoblock.inference.batch_filters import Filters, run_processors
from monoblock.inference.beam import BeamSearch, advance_from_log_probs
from monoblock.inference.ensemble import mean_log_probs
from monoblock.inference.evaluation_mode import evaluation_mode
from monoblock.inference.filters import TokenHistory
from monoblock.inference.generate import read_prompts, truncated_length
from monoblock.inference.prompt import Prompt, check_prompt, pad_right, parse_prompt
from monoblock.inference.request import RequestOutput
from monoblock.inference.sampling import RandomStream, fresh_seed
from monoblock.inference.settings import Settings, parse_settings, split_seeds
from monoblock.kernels.cpu import onednn
from monoblock.nn.inputs.generation_options import GeneratedTokens, ModelOptions, TokenRows
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer

MAX_ROWS = 512  # decoded at the same time; each beam counts as one
SCORED_ROWS = 64  # scored in one pass
NO_DRAFT = "an LSTM cannot take back rejected tokens, as speculative decoding requires; leave out the draft"


def generate(
    model: Recurrent, ids: TokenRows, *, return_scores: bool = False, **options: Unpack[ModelOptions]
) -> Tensor | GeneratedTokens:
    """Continue prompts, or write the targets of sources, as `Transformer.generate` does."""
    call = GenerateCall(model, ids, {**options})
    new: dict[tuple[int, int], list[int]] = {}
    while call.decoder.busy:
        for output in call.decoder.step():
            new.setdefault((output.request_id, output.sequence_index), []).extend(output.tokens)
    rows = [new[key] for key in call.sequences]
    return GeneratedTokens(call.to_tensor(rows), call.score(rows)) if return_scores else call.to_tensor(rows)


def stream(model: Recurrent, ids: TokenRows, **options: Unpack[ModelOptions]) -> Iterator[Tensor]:
    """Yield the new tokens (rows,) of each step; a sequence that has ended yields the padding token."""
    call = GenerateCall(model, ids, {**options}, max_rows=sys.maxsize)
    if call.settings.num_beams > 1:
        raise InputError(
            "beam search knows its text only at the end, so it cannot be streamed; write num_beams=1, or call generate"
        )
    return call.stream()


class GenerateCall:
    """One call of `generate` or `stream`: its options are checked, and its prompts wait in a decoder."""

    def __init__(self, model: Recurrent, ids: TokenRows, options: dict[str, Any], *, max_rows: int = MAX_ROWS) -> None:
        self.model, self.ids, self.tap = model, ids, options.pop("tap", None)
        if not options.pop("use_cache", True):
            raise InputError("an LSTM always decodes from its state; leave out use_cache=False")
        if options.pop("draft", None) is not None or options.pop("prompt_lookup", 0):
            raise InputError(NO_DRAFT)
        starts, first = options.pop("decoder_input_ids", None), options.pop("decoder_start_token_id", None)
        truncation, inputs = options.pop("truncation", None), read_prompts(ids, options.pop("attention_mask", None))
        seeds = split_seeds(options.pop("seed", None), len(inputs))
        self.settings = settings = parse_settings(options)
        if truncation is not None:  # it has no effect, because an LSTM reads texts of any length
            truncated_length(truncation, settings.max_new_tokens, None, has_encoder=model.encoder is not None)
        pad, self.copies = settings.pad_token_id, settings.num_return_sequences
        self.pad_token = pad if pad is not None else (*settings.eos_token_id, 0)[0]
        self.prompts = [Prompt(tuple(row)) for row in inputs]
        if model.encoder is not None:
            first = first if first is not None else pad if pad is not None else 0
            targets = [[first]] * len(inputs) if starts is None else read_prompts(starts, None)
            if len(targets) != len(inputs):
                raise InputError(
                    f"decoder_input_ids has {len(targets)} rows for {len(inputs)} sources; give one for each source"
                )
            self.prompts = [parse_prompt(*pair) for pair in zip(targets, inputs, strict=True)]
        self.decoder = Decoder([model], max_rows=max_rows, tap=self.tap)
        is_sampled = settings.temperature > 0
        requests = [
            self.decoder.add(prompt.ids, replace(settings, seed=seed) if is_sampled else settings, prompt.source)
            for prompt, seed in zip(self.prompts, seeds, strict=True)
        ]
        self.sequences = [(request, index) for request in requests for index in range(self.copies)]

    def stream(self) -> Iterator[Tensor]:
        while self.decoder.busy:
            new = {(one.request_id, one.sequence_index): one.tokens[0] for one in self.decoder.step()}
            yield torch.tensor([new.get(key, self.pad_token) for key in self.sequences], device=self.model.device)

    def to_tensor(self, new: list[list[int]]) -> Tensor:
        """Append the new tokens of each sequence to its prompt; pad the result to one length."""
        given = self.ids if isinstance(self.ids, Tensor) else torch.empty(0, dtype=torch.long, device=self.model.device)
        if isinstance(self.ids, Tensor) and self.model.encoder is None:  # with the padding that it has
            starts, dtype = given.repeat_interleave(self.copies, 0).tolist(), given.dtype
        else:
            starts, dtype = [list(prompt.ids) for prompt in self.prompts for _ in range(self.copies)], torch.long
        rows = [start + tokens for start, tokens in zip(starts, new, strict=True)]
        longest = max(map(len, rows))
        rows = [row + [self.pad_token] * (longest - len(row)) for row in rows]
        return torch.tensor(rows, dtype=dtype, device=given.device)

    @torch.no_grad()
    def score(self, new: list[list[int]]) -> Tensor:
        """Return the log-probability (rows, N) of each new token in the distribution of the model, 0 for padding."""
        model, pairs = self.model, list(zip((p for p in self.prompts for _ in range(self.copies)), new, strict=True))
        scores = torch.zeros(len(new), max(map(len, new)), device=model.device)
        with evaluation_mode(model):
            for first in range(0, len(pairs), SCORED_ROWS):
                some = pairs[first : first + SCORED_ROWS]
                ids, mask = pad_right([(*prompt.ids, *tokens[:-1]) for prompt, tokens in some], model.device)
                if model.encoder is None:
                    logits = model(ids, mask, tap=self.tap)
                else:
                    source, source_mask = pad_right([prompt.source or () for prompt, _ in some], model.device)
                    logits = model(source, ids, source_mask, mask, tap=self.tap)
                for row, (log_probs, (prompt, tokens)) in enumerate(
                    zip(logits.float().log_softmax(-1), some, strict=True)
                ):
                    places = range(len(prompt.ids) - 1, len(prompt.ids) - 1 + len(tokens))
                    scores[first + row, : len(tokens)] = log_probs[list(places), tokens]
        return scores


# -- requests and batches ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt with its rows: the sequences to return or, in a beam search, the beams."""

    id: int
    prompt: Prompt
    settings: Settings
    limit_reason: str  # why a sequence with max_new_tokens ends

    def __post_init__(self) -> None:
        count, seed = self.settings.rows_per_prompt, self.settings.seed
        self.search = BeamSearch(self.settings) if self.settings.num_beams > 1 else None
        self.new: list[list[int]] = [[] for _ in range(count)]
        self.ended = [False] * count
        self.streams: list[RandomStream] = []
        if self.settings.temperature > 0:
            seed = fresh_seed() if seed is None else seed
            self.streams = [RandomStream(seed, row) for row in range(count)]

    @property
    def is_done(self) -> bool:
        return all(self.ended) if self.search is None else self.search.is_done

    def new_tokens(self, row: int) -> Sequence[int]:
        return self.new[row] if self.search is None else self.search.running_tokens(row)

    def append(self, row: int, token: int) -> RequestOutput:
        self.new[row].append(token)
        is_last = len(self.new[row]) == self.settings.max_new_tokens
        reason = "stop" if token in self.settings.eos_token_id else self.limit_reason if is_last else None
        self.ended[row] = reason is not None
        return RequestOutput(self.id, row, (token,), reason)

    def beam_outputs(self) -> Iterator[RequestOutput]:
        assert self.search is not None
        best = self.search.best_hypotheses()
        for index, (tokens, score) in enumerate(best):
            reason = "stop" if tokens and tokens[-1] in self.settings.eos_token_id else self.limit_reason
            yield RequestOutput(self.id, index, tokens, reason, score)
        for index in range(len(best), self.settings.num_return_sequences):
            yield RequestOutput(self.id, index, (), "no_hypothesis")


class Decoder:
    """Decode requests in batches; with several models, which share a vocabulary, average their log-probabilities.

    Transformers may be among several models.
    """

    def __init__(
        self, models: Sequence[Recurrent | Transformer], *, max_rows: int = MAX_ROWS, tap: Tap | None = None
    ) -> None:
        if tap is not None and not callable(tap):
            raise InputError(f"tap={tap!r:.60} is not valid; write a function (name, activation) -> activation or None")
        self.models, self.max_rows = tuple(models), max_rows
        self.members = [LSTMRows(m, tap) if isinstance(m, Recurrent) else TransformerRows(m) for m in models]
        self.device, self.first = models[0].device, self.members[0]
        for number, member in enumerate(self.members[1:], 2):
            for name, what in (("vocab_size", "a vocabulary of"), ("source_vocab_size", "a source vocabulary of")):
                if getattr(member, name) != getattr(self.first, name):
                    raise InputError(
                        f"model {number} of the ensemble has {what} {getattr(member, name)} tokens and the first "
                        f"{getattr(self.first, name)}; give models that were trained with the same tokenizer"
                    )
        contexts = [model.config.context for model in models if model.config.context is not None]
        self.context = min(contexts, default=sys.maxsize)  # of Transformers; an LSTM has no limit
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.last_id = 0

    def add(self, ids: Sequence[int], settings: Settings, source: Sequence[int] | None = None) -> int:
        """Queue a prompt, and return the id of its request; raise InputError for what cannot be decoded."""
        prompt = parse_prompt(ids, source)
        if settings.draft is not None:
            raise InputError(NO_DRAFT)
        check_prompt(prompt, self.first, self.context)
        settings.check_vocabulary(self.first.vocab_size)
        room, reason = self.context - len(prompt.ids), "length"
        if settings.max_new_tokens > room:
            reason, shortest = "context", min(room, settings.min_new_tokens)
            settings = replace(settings, max_new_tokens=room, min_new_tokens=shortest)
        self.last_id += 1
        self.waiting.append(Request(self.last_id, prompt, settings, reason))
        return self.last_id

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def cancel(self, request_id: int) -> None:
        """Drop a request, whether it is waiting or running."""
        self.waiting = deque(request for request in self.waiting if request.id != request_id)
        self._keep([request for request in self.running if request.id != request_id])

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Advance every running request by one token, or begin the next batch; return the new tokens."""
        with ExitStack() as stack:
            stack.enter_context(onednn.disabled_where_slow())
            for model in self.models:
                stack.enter_context(evaluation_mode(model))
            if self.running:
                tokens = [(request.new_tokens(row) or (0,))[-1] for request, row in self.rows]
                logits = [member.step(torch.tensor(tokens, device=self.device)) for member in self.members]
            else:
                logits = self._begin()
            mean = logits[0].float() if len(logits) == 1 else mean_log_probs(logits)
            choose = self._choose_tokens if self.running[0].search is None else self._choose_beams
            outputs = choose(mean)
            unfinished = [request for request in self.running if not request.is_done]
            if len(unfinished) <= 0.75 * len(self.running):  # rows are copied, so not for every request that ends
                self._keep(unfinished)
            return outputs

    def _begin(self) -> list[Tensor]:
        """Make a batch of the first waiting requests; return the logits (rows, V) of each model after the prompts."""
        settings = self.waiting[0].settings
        while self.waiting and self.waiting[0].settings.batch_key == settings.batch_key:
            if self.running and (len(self.running) + 1) * settings.rows_per_prompt > self.max_rows:
                break
            self.running.append(self.waiting.popleft())
        self._list_rows(self.running)
        prompts = [request.prompt for request in self.running]
        logits = [member.start(prompts, settings.rows_per_prompt) for member in self.members]
        if any(one.isnan().any() for one in logits):
            raise InputError("the logits of this model are NaN; its weights are damaged, or too large for the dtype")
        return logits

    def _list_rows(self, requests: list[Request]) -> None:
        self.running = requests
        self.rows = [(request, row) for request in requests for row in range(request.settings.rows_per_prompt)]
        self.filters = Filters([request.settings for request, _ in self.rows], self.device)

    def _keep(self, requests: list[Request]) -> None:
        """Keep these of the running requests, and drop the rows of others."""
        if len(requests) < len(self.running):
            kept = [number for number, (request, _) in enumerate(self.rows) if request in requests]
            for member in self.members:
                member.select(torch.tensor(kept, dtype=torch.long, device=self.device))
            self._list_rows(requests)

    def _constrain(self, logits: Tensor) -> Tensor:
        """Apply to logits (rows, V) what rules tokens out or depends on earlier ones, by the settings of each row."""
        history, counts = None, [len(request.new_tokens(row)) for request, row in self.rows]
        if self.filters.needs_history:
            texts = [torch.tensor([*request.prompt.ids, *request.new_tokens(row)]) for request, row in self.rows]
            padded = pad_sequence(texts, batch_first=True, padding_value=-1).to(self.device)
            history = TokenHistory(padded, torch.tensor([len(text) for text in texts], device=self.device))
        logits = self.filters.apply_constraints(logits, history, counts)
        if self.filters.has_processors:
            rows = list(logits.split(1))
            for number, (request, row) in enumerate(self.rows):
                if request.settings.logits_processor and not request.is_done and not request.ended[row]:
                    rows[number] = run_processors(request.settings, texts[number][None].to(self.device), rows[number])
            logits = torch.cat(rows)
        return logits

    def _choose_tokens(self, logits: Tensor) -> list[RequestOutput]:
        numbers = [
            request.streams[row][len(request.new[row])] if request.streams else 0.0 for request, row in self.rows
        ]
        uniforms = torch.tensor(numbers, dtype=torch.double, device=self.device)
        tokens = self.filters.choose(self._constrain(logits), uniforms).tolist()
        rows = zip(self.rows, tokens, strict=True)
        return [request.append(row, token) for (request, row), token in rows if not request.ended[row]]

    def _choose_beams(self, logits: Tensor) -> list[RequestOutput]:
        searches = [request.search for request in self.running if request.search is not None]
        unfinished = [request for request in self.running if not request.is_done]
        origins = advance_from_log_probs(searches, self._constrain(logits.log_softmax(-1)))
        for member in self.members:
            member.select(torch.tensor(origins, device=self.device), same_sources=True)
        return [output for request in unfinished if request.is_done for output in request.beam_outputs()]


# -- the rows of a batch in one model ----------------------------------------------------------------------------------


class LSTMRows:
    """The recurrent state of each row and the source that it attends to."""

    max_source: int | None = None  # an LSTM reads texts of any length

    def __init__(self, model: Recurrent, tap: Tap | None) -> None:
        self.model, self.tap, self.family = model, tap, model.config.family
        self.vocab_size, self.has_encoder = model.config.target_vocab or model.config.vocab, model.encoder is not None
        self.source_vocab_size = model.config.vocab if self.has_encoder else None
        self.state: LSTMState
        self.memory: EncoderMemory | None = None

    def start(self, prompts: Sequence[Prompt], copies: int) -> Tensor:
        """Read prompts, each for some rows; return the logits (rows, V) after the last token of each."""
        model, self.memory = self.model, None
        if model.encoder is not None:
            self.memory = model.encode(
                *pad_right([prompt.source or () for prompt in prompts], model.device), tap=self.tap
            )
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


class TransformerRows:
    """The tokens of each row, which all run again at every step: for a Transformer in an ensemble with an LSTM."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.family, self.has_encoder = model, model.config.family, model.encoder is not None
        self.vocab_size: int = model.config.target_input.vocab  # type: ignore[union-attr]
        source = model.config.input if self.has_encoder else None
        self.source_vocab_size = source.vocab if isinstance(source, EmbeddingConfig) else None
        self.max_source = (
            source.context if isinstance(source, EmbeddingConfig) and isinstance(source.positions, Learned) else None
        )
        self.rows: list[Prompt] = []

    def start(self, prompts: Sequence[Prompt], copies: int) -> Tensor:
        self.rows = [prompt for prompt in prompts for _ in range(copies)]
        return self._run()

    def step(self, tokens: Tensor) -> Tensor:
        rows, context = zip(self.rows, tokens.tolist(), strict=True), self.model.config.context or sys.maxsize
        self.rows = [Prompt((*row.ids, token)[:context], row.source) for row, token in rows]  # rows may have ended
        return self._run()

    def select(self, rows: Tensor, *, same_sources: bool = False) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]

    def _run(self) -> Tensor:
        ids, mask = pad_right([row.ids for row in self.rows], self.model.device)
        last = torch.tensor([[len(row.ids) - 1] for row in self.rows], device=self.model.device)
        if not self.has_encoder:
            return self.model(ids, mask, logits_at=last)[:, -1]
        source, source_mask = pad_right([row.source or () for row in self.rows], self.model.device)
        return self.model(source, ids, source_mask, mask, logits_at=last)[:, -1]
