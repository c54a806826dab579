"""Decode with LSTMs: rows of tokens advance together, one token per row in each step.

    decoder = Decoder([model])
    request_id = decoder.add((1,), Settings(num_beams=4), source=(5, 7, 11))
    while decoder.busy:
        for output in decoder.step():
            ...

A batch has requests with equally many rows and beams; those of another shape wait for the next batch.  Each row has a
recurrent state and, with an encoder, the source that it attends to.  Settings, filters, random numbers and beams are
those of `inference`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference import generate
from monoblock.inference.beam import BeamHypothesis, BeamSearches
from monoblock.inference.runners.plain import evaluation_mode
from monoblock.inference.sampler import Filters, TokenHistory, run_processors
from monoblock.inference.scheduler import (
    NAN_LOGITS,
    ModelLimits,
    Prompt,
    RequestOutput,
    check_prompt,
    combine_limits,
    pad_right,
    parse_prompt,
    random_streams,
)
from monoblock.inference.settings import Settings
from monoblock.kernels.cpu import library
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer

MAX_ROWS = 512  # decoded at the same time; each beam counts as one
NO_DRAFT = "an LSTM cannot take back rejected tokens, as speculative decoding requires; leave out the draft"


class GenerateCall(generate.GenerateCall):
    """One call of `Recurrent.generate` or `stream`; it takes the options of a Transformer that an LSTM can honour."""

    def __init__(self, model: Any, ids: Any, is_stream: bool, /, **options: Any) -> None:
        if not options.get("use_cache", True):
            raise InputError("an LSTM always decodes from its state; leave out use_cache=False")
        if options.get("draft") is not None or options.get("prompt_lookup"):
            raise InputError(NO_DRAFT)
        super().__init__(model, ids, is_stream, **options)

    def make_engine(self, model: Any, *, longest: int, **_: Any) -> Decoder:
        return Decoder([model], tap=self.tap)


@dataclass(eq=False)
class Request:
    """A prompt with its rows: the sequences to return or, in a beam search, the beams."""

    id: int
    prompt: Prompt
    settings: Settings
    limit_reason: str  # why a sequence with max_new_tokens ends

    def __post_init__(self) -> None:
        count = self.settings.rows_per_prompt
        self.new: list[list[int]] = [[] for _ in range(count)]
        self.ended = [False] * count
        self.streams = random_streams(self.settings)

    @property
    def is_done(self) -> bool:
        return all(self.ended)

    def append(self, row: int, token: int) -> RequestOutput:
        self.new[row].append(token)
        is_last = len(self.new[row]) == self.settings.max_new_tokens
        reason = "stop" if token in self.settings.eos_token_id else self.limit_reason if is_last else None
        self.ended[row] = reason is not None
        return RequestOutput(self.id, row, (token,), reason)

    def beam_outputs(self, best: Sequence[BeamHypothesis]) -> Iterator[RequestOutput]:
        for index, (tokens, score) in enumerate(best):
            reason = "stop" if tokens and tokens[-1] in self.settings.eos_token_id else self.limit_reason
            yield RequestOutput(self.id, index, tokens, reason, score)
        for index in range(len(best), self.settings.num_return_sequences):
            yield RequestOutput(self.id, index, (), "no_hypothesis")


class Decoder:
    """Decode requests in batches.  Several models, LSTMs and Transformers, average their log-probabilities."""

    def __init__(self, models: Sequence[Any], *, max_rows: int = MAX_ROWS, tap: Tap | None = None) -> None:
        if tap is not None and not callable(tap):
            raise InputError(f"tap={tap!r:.60} is not valid; write a function (name, activation) -> activation or None")
        self.models, self.max_rows = tuple(models), max_rows
        self.members = [TransformerRows(m) if isinstance(m, Transformer) else m.decoding_rows(tap) for m in models]
        self.limits = combine_limits([_limits_of(model) for model in models])
        self.device = self.limits.device
        self.context = sys.maxsize if self.limits.context is None else self.limits.context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.searches: BeamSearches | None = None  # of the running requests, if they have beams
        self.last_id = 0

    def add(self, ids: Sequence[int], settings: Settings, source: Sequence[int] | None = None) -> int:
        """Queue a prompt, and return the id of its request; raise InputError for what cannot be decoded."""
        prompt = parse_prompt(ids, source)
        if settings.draft is not None:
            raise InputError(NO_DRAFT)
        check_prompt(prompt, self.limits, self.context)
        settings.check_vocabulary(self.limits.vocab_size)
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
            stack.enter_context(library.without_slow_onednn())
            for model in self.models:
                stack.enter_context(evaluation_mode(model))
            if self.running:
                tokens = torch.tensor([request.new[row][-1] for request, row in self.rows], device=self.device)
                all_logits = [member.step(tokens).float() for member in self.members]
            else:
                all_logits = [logits.float() for logits in self._begin()]
            logits = all_logits[0]
            if len(all_logits) > 1:
                logits = torch.stack([one.log_softmax(-1) for one in all_logits]).mean(0).log_softmax(-1)
            outputs = self._choose_tokens(logits) if self.searches is None else self._choose_beams(logits)
            unfinished = [request for request in self.running if not request.is_done]
            if len(unfinished) <= 0.75 * len(self.running):  # rows are copied, so not for every request that ends
                self._keep(unfinished)
            return outputs

    def _begin(self) -> list[Tensor]:
        """Make a batch of the first waiting requests; return the logits (rows, V) of each model after the prompts."""
        settings, new = self.waiting[0].settings, [self.waiting.popleft()]
        while self.waiting and _shape(self.waiting[0].settings) == _shape(settings):
            if (len(new) + 1) * settings.rows_per_prompt > self.max_rows:
                break
            new.append(self.waiting.popleft())
        self._set_running(new)
        self.searches = None
        if settings.num_beams > 1:
            self.searches = BeamSearches(settings.num_beams, settings.num_beam_groups, self.device)
            options = [request.settings for request in new]
            self.searches.add(options, [own.max_new_tokens for own in options])
        prompts = [request.prompt for request in new]
        logits = [member.start(prompts, settings.rows_per_prompt) for member in self.members]
        if any(one.isnan().any() for one in logits):
            raise InputError(NAN_LOGITS)
        return logits

    def _set_running(self, requests: list[Request]) -> None:
        self.running = requests
        self.rows = [(request, row) for request in requests for row in range(request.settings.rows_per_prompt)]
        self.filters = Filters([request.settings for request, _ in self.rows], self.device)

    def _keep(self, requests: list[Request]) -> None:
        """Keep these of the running requests, and drop the rows of others."""
        if len(requests) < len(self.running):
            kept = [number for number, (request, _) in enumerate(self.rows) if request in requests]
            for member in self.members:
                member.select(torch.tensor(kept, dtype=torch.long, device=self.device))
            if self.searches is not None:
                self.searches.keep([index for index, request in enumerate(self.running) if request in requests])
            self._set_running(requests)

    def _constrain(self, logits: Tensor) -> Tensor:
        """Apply to logits (rows, V) what rules tokens out or depends on earlier ones, by the settings of each row."""
        history, counts = None, [len(request.new[row]) for request, row in self.rows]
        if self.filters.needs_history:
            texts = [[*request.prompt.ids, *request.new[row]] for request, row in self.rows]
            history = TokenHistory.of(texts, [len(request.prompt.ids) for request, _ in self.rows], self.device)
        logits = self.filters.apply_constraints(logits, history, counts)
        if self.filters.has_processors:
            processed = list(logits.split(1))
            for number, (request, row) in enumerate(self.rows):
                if request.settings.logits_processor and not request.is_done and not request.ended[row]:
                    ids = torch.tensor([texts[number]], device=self.device)
                    processed[number] = run_processors(request.settings, ids, processed[number])
            logits = torch.cat(processed)
        return logits

    def _choose_tokens(self, logits: Tensor) -> list[RequestOutput]:
        streams = [(request.streams[row], len(request.new[row])) for request, row in self.rows]
        numbers = [0.0 if stream is None else stream[step] for stream, step in streams]
        uniforms = torch.tensor(numbers, dtype=torch.double, device=self.device)
        tokens = self.filters.choose(self._constrain(logits), uniforms).tolist()
        rows = zip(self.rows, tokens, strict=True)
        return [request.append(row, token) for (request, row), token in rows if not request.ended[row]]

    def _choose_beams(self, logits: Tensor) -> list[RequestOutput]:
        assert self.searches is not None
        origins = self.searches.advance(self._constrain(logits.log_softmax(-1)), normalized=True)
        rows = torch.arange(0, len(self.rows), self.searches.num_beams)[:, None] + origins
        for member in self.members:
            member.select(rows.flatten().to(self.device), same_sources=True)
        outputs: list[RequestOutput] = []
        for index, (request, is_done) in enumerate(zip(self.running, self.searches.is_done, strict=True)):
            if is_done and not request.is_done:
                outputs += request.beam_outputs(self.searches.best_hypotheses(index))
            request.new, request.ended = self.searches.tokens(index), [is_done] * len(request.ended)
        return outputs


def _shape(settings: Settings) -> tuple[int, int, int]:
    return settings.rows_per_prompt, settings.num_beams, settings.num_beam_groups


def _limits_of(model: Any) -> ModelLimits:
    config, has_encoder = model.config, model.encoder is not None
    source = config.vocab_sizes[0] if has_encoder else None  # of any length
    return ModelLimits(model.device, config.vocab_sizes[-1], config.context, has_encoder, source, None)


class TransformerRows:
    """The rows of a batch in a Transformer that decodes together with an LSTM: all tokens run again at every step."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
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
        device = self.model.device
        ids, mask = pad_right([row.ids for row in self.rows], device)
        last = torch.tensor([[len(row.ids) - 1] for row in self.rows], device=device)
        if self.model.encoder is None:
            return self.model(ids, mask, logits_at=last)[:, 0]
        source, source_mask = pad_right([row.source or () for row in self.rows], device)
        return self.model(source, ids, source_mask, mask, logits_at=last)[:, 0]
