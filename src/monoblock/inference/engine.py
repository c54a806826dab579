"""The decoding engine: it decodes a changing set of requests in one batch, one token per request in each step.

    engine = Engine(mb.optimize(model))
    request_id = engine.add((5, 7, 11), Settings(max_new_tokens=20))
    while engine.busy:
        for output in engine.step():
            ...

`generate`, `stream`, beam search and speculative decoding all use it.  Each row of the batch has its own settings and
length, and its tokens do not depend on the other rows.  A request with another number of rows or beams waits until the
running requests are finished.  A backend computes the steps (backends/select.py): that of a plain model runs its
modules, that of an optimized model its fast copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.backends.prepared_model import GenerativeModel
from monoblock.inference.backends.protocol import DecoderState
from monoblock.inference.backends.select import Backend, choose_backend
from monoblock.inference.backends.self_draft import make_self_draft
from monoblock.inference.ensemble import NO_DRAFT_WITH_ENSEMBLE, EnsembleBackend
from monoblock.inference.prompt import check_prompt, parse_prompt
from monoblock.inference.request import Request, RequestOutput
from monoblock.inference.running_batch import RunningBatch
from monoblock.inference.settings import NO_DRAFT_WITH_BEAMS, Settings, check_count
from monoblock.inference.speculative import Proposer
from monoblock.nn.tap import Tap

GREEDY = Settings()
DRAFT_NEEDS_CACHE = "speculative decoding needs the key/value cache; write use_cache=True, or leave out the draft"
MAX_BURST = 16  # steps that a GPU runs before tokens are read: after an end token, the rest is in vain
MIN_CAPACITY = 4096  # tokens per row in a batch, so that later requests fit; less if the context is shorter


class Engine:
    """Decode requests together, at most `max_rows` sequences at a time.

    capacity: the maximum number of tokens in a sequence, prompt included; by default the model's context.
    prefill_chunk: the maximum number of prompt tokens in one pass; by default the whole prompt.
    proposer: proposes tokens for speculative decoding.
    max_burst: the maximum number of steps that a GPU runs before Python reads the tokens.
    tap: a function that observes or replaces activations, see nn/tap.py.
    ensemble: further models with the same vocabulary, whose log-probabilities are averaged with those of `model`.
    """

    def __init__(
        self,
        model: GenerativeModel,
        *,
        max_rows: int = 64,
        capacity: int | None = None,
        use_cache: bool = True,
        prefill_chunk: int | None = None,
        proposer: Proposer | None = None,
        max_burst: int = MAX_BURST,
        tap: Tap | None = None,
        ensemble: Sequence[GenerativeModel] = (),
    ) -> None:
        options = {"max_rows": max_rows, "capacity": capacity, "prefill_chunk": prefill_chunk, "max_burst": max_burst}
        for name, value in options.items():
            if value is not None or name in ("max_rows", "max_burst"):
                check_count(name, value, 1)
        if not hasattr(ensemble, "__len__"):
            raise InputError("ensemble is not a list of models; write ensemble=[second, third]")
        if proposer is not None and not hasattr(proposer, "propose"):
            raise InputError(f"proposer={proposer!r:.60} proposes no tokens; write PromptLookup() or DraftModel(model)")
        self.model, self.use_cache, self.has_ensemble = model, use_cache, bool(ensemble)
        backend = choose_backend(model, use_cache=use_cache, tap=tap)
        if ensemble:
            others = [choose_backend(other, use_cache=use_cache, tap=tap) for other in ensemble]
            backend = EnsembleBackend([backend, *others])
        if proposer is not None and not use_cache:
            raise InputError(DRAFT_NEEDS_CACHE)
        if proposer is not None and ensemble:
            raise InputError(NO_DRAFT_WITH_ENSEMBLE)
        limit = capacity if capacity is not None else backend.context
        if limit is None:
            raise InputError("this model has no maximum sequence length, so set one in tokens, such as capacity=1024")
        self.max_rows, self.capacity = max_rows, limit
        self.min_capacity = limit if capacity is not None else min(limit, MIN_CAPACITY)
        self.proposer = proposer
        self.waiting: deque[Request] = deque()
        self.batch = RunningBatch(backend, prefill_chunk, max_burst)
        self.num_suspects = 0  # waiting requests to be admitted one by one, because together they have failed
        self.last_request_id = 0

    @property
    def backend(self) -> Backend:
        return self.batch.backend

    @property
    def running(self) -> list[Request]:
        """The requests of the batch, in the order of their rows."""
        return self.batch.requests

    @property
    def state(self) -> DecoderState | None:
        return self.batch.state

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, ids: Sequence[int], settings: Settings = GREEDY, source: Sequence[int] | None = None) -> int:
        """Queue a prompt and return the request's id.

        For an encoder-decoder `ids` are the first tokens of the target and `source` the tokens of the source.  A prompt
        or setting that this model cannot decode raises InputError here, so that it never affects other requests.
        """
        prompt, backend = parse_prompt(ids, source), self.backend
        check_prompt(prompt, backend, self.capacity)
        self._check(settings)
        if self.proposer is not None:
            self.proposer.check_prompt(len(prompt.ids))
        self._make_draft(settings)
        budget = min(settings.max_new_tokens, self.capacity - len(prompt.ids))
        limit_reason = "length" if budget == settings.max_new_tokens else "context"
        if settings.num_beams > 1 and budget != settings.max_new_tokens:  # the search ends at the end of the context
            settings = replace(settings, max_new_tokens=budget, min_new_tokens=min(budget, settings.min_new_tokens))
        self.last_request_id += 1
        self.waiting.append(Request(self.last_request_id, prompt, settings, budget, limit_reason))
        return self.last_request_id

    def _make_draft(self, settings: Settings) -> Proposer | None:
        """Return the proposer of the engine or, if it has none, the draft that a request asks for.

        A batch has the draft of a request that begins it.  The model keeps the copy that it quantizes for the first.
        """
        if self.proposer is not None or settings.draft is None:
            return self.proposer
        draft = make_self_draft(self.model, settings.draft)
        # It may have to continue the longest prompt that fits in a batch.
        return draft if draft is not None and draft.fits_prompt(self.capacity - 1) else None

    def _check(self, settings: Settings) -> None:
        if not hasattr(settings, "check_vocabulary"):
            raise InputError(f"settings={settings!r:.60} is not valid; write mb.Settings(max_new_tokens=20)")
        settings.check_vocabulary(self.backend.vocab_size)
        if settings.rows_per_prompt > self.max_rows:
            raise InputError(
                f"one prompt with {settings.rows_per_prompt} beams or returned sequences does not fit in the engine's "
                f"{self.max_rows} rows; write max_rows={settings.rows_per_prompt} or more"
            )
        if settings.num_beams > 1 and self.proposer is not None:
            raise InputError(NO_DRAFT_WITH_BEAMS)
        if settings.draft is not None and self.has_ensemble:
            raise InputError(NO_DRAFT_WITH_ENSEMBLE)
        if settings.draft is not None and not self.use_cache:
            raise InputError(DRAFT_NEEDS_CACHE)

    def cancel(self, request_id: int) -> None:
        """Drop a request, whether it is waiting or running."""
        self.waiting = deque(request for request in self.waiting if request.id != request_id)
        with self.backend.inference():
            self.batch.remove([request for request in self.running if request.id == request_id or request.is_done])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Generate the next token of every running request, admit waiting requests, and return the new tokens.

        A request may get several tokens in one step: accepted proposals, or a burst of steps on a GPU.  A request that
        fails, for example for lack of memory, ends with the finish reason "error"; the others are not affected.

        A step that is interrupted, as by Ctrl-C, is void: the next step goes on from the tokens returned before it.
        """
        running, waiting = [request for request in self.running if not request.is_done], list(self.waiting)
        for request in running:
            request.mark_returned()
        try:
            with self.backend.inference():
                return self._step()
        except BaseException:
            self.batch.end()  # its state may be that of half a step
            for request in (*running, *waiting):
                request.restart()
            self.waiting = deque((*running, *waiting))
            raise

    def _step(self) -> list[RequestOutput]:
        new = self._admit_waiting()  # may remove finished requests, so `self.running` is read afterwards
        if not self.running and not new:
            return []
        searched = False
        try:
            if not self.running:
                self._begin_batch(new)
            count = 0 if new else self.batch.burst_length()
            if count > 1:
                outputs = self.batch.run_burst(count)
            else:
                found = self.batch.step_search(new)
                searched = found is not None
                outputs = found if found is not None else self._step_rows(new)
        except Exception as problem:
            return self._end_batch(new, problem)
        is_closed = self.batch.is_closed or not self.waiting
        self.batch.remove_finished(wait_for_all=searched and is_closed)  # finished requests cost a search nothing
        return outputs

    def _step_rows(self, new: list[Request]) -> list[RequestOutput]:
        """Advance the running requests by one token, or by accepted proposals, and begin the new requests."""
        outputs: list[RequestOutput] = []
        old, logits = self.running, None
        if old and self.batch.proposer is not None:
            outputs += self.batch.speculate()
        elif old:
            logits = self.batch.step()
        if new:
            new_logits, failed = self._prefill(new)
            outputs += failed
            if new_logits is not None:
                logits = new_logits if logits is None else torch.cat((logits, new_logits))
        if logits is not None:
            # With a proposer, the tokens of the requests that were running are chosen already.
            chosen = self.running[len(old) :] if self.batch.proposer is not None else self.running
            outputs += self.batch.choose(chosen, logits.float())
        return outputs

    def _admit_waiting(self) -> list[Request]:
        """Take requests from the front of the queue and return them.

        It stops at the first request that cannot share the batch: one with another `batch_key`, or with more tokens
        than a row of the batch holds; and at `max_rows` rows.
        """
        admitted: list[Request] = []
        if self.running and self.batch.is_closed:
            return admitted
        rows = sum(request.settings.rows_per_prompt for request in self.running if not request.is_done)
        while self.waiting and not (self.num_suspects and admitted):
            request, first = self.waiting[0], next(iter(self.running or admitted), None)
            fits = first is None or first.settings.batch_key == request.settings.batch_key
            fits = fits and not (self.running and request.max_length > self.batch.capacity)
            if not fits or rows + request.settings.rows_per_prompt > self.max_rows:
                break
            admitted.append(self.waiting.popleft())
            rows += request.settings.rows_per_prompt
        if admitted and self.running:
            self.batch.remove([request for request in self.running if request.is_done])
        return admitted

    def _begin_batch(self, new: list[Request]) -> None:
        longest = max(request.max_length for request in (*new, *self.waiting))
        capacity = max(self.min_capacity, longest)
        drafted = next((request for request in new if request.settings.draft is not None), new[0])
        proposer = self._make_draft(drafted.settings)
        self.batch.begin(capacity, new[0].settings.rows_per_prompt, proposer)

    # -- failures -------------------------------------------------------------------------------------------------

    def _prefill(self, new: list[Request]) -> tuple[Tensor | None, list[RequestOutput]]:
        """Begin the new requests: return the logits after their prompts, and the outputs of a request that failed.

        If several requests fail together, they return to the queue and are admitted one by one.
        """
        old = self.running
        try:
            logits = self.batch.prefill(new)
        except Exception as problem:
            if not old:
                raise
            self.batch.keep_rows(old)
            return None, self._end_or_retry(new, problem)
        self.num_suspects = max(0, self.num_suspects - len(new))
        return logits, []

    def _end_batch(self, new: list[Request], problem: Exception) -> list[RequestOutput]:
        """End the running requests after an error; new requests that have not begun return to the queue."""
        running = self.running
        self.batch.end()
        if not running:  # the first requests of a batch have failed
            return self._end_or_retry(new, problem)
        self._return_to_queue([request for request in new if request not in running])
        return [output for request in running if not request.is_done for output in request.fail(problem)]

    def _end_or_retry(self, new: list[Request], problem: Exception) -> list[RequestOutput]:
        """Return the outputs of a single new request that failed; return several requests to the queue."""
        self.num_suspects = max(0, self.num_suspects - len(new))
        if len(new) == 1:
            return new[0].fail(problem)
        self._return_to_queue(new)
        self.num_suspects += len(new)
        return []

    def _return_to_queue(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            request.restart()
            self.waiting.appendleft(request)
