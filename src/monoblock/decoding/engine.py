"""The decoding engine: it decodes a changing set of requests in one batch, one token per request in each step.

    engine = Engine(model)
    request_id = engine.add((5, 7, 11), Settings(max_new_tokens=20))
    while engine.busy:
        for output in engine.step():
            ...

`generate`, `stream`, beam search and speculative decoding all use it.  Each row of the batch has its own settings and
length, and its tokens do not depend on the other rows.  A request with another number of rows or beams waits until the
running requests are finished.  A backend computes the steps; backends/select.py chooses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from monoblock.decoding import beam
from monoblock.decoding.backends.protocol import DecoderState, can_burst, can_roll_back, can_search
from monoblock.decoding.backends.select import choose_backend
from monoblock.decoding.backends.self_draft import make_self_draft
from monoblock.decoding.batch_filters import Filters, choose_tokens, token_history
from monoblock.decoding.prompt import Prompt, check_prompt
from monoblock.decoding.request import Request, RequestOutput, active_mask, request_rows
from monoblock.decoding.settings import NO_DRAFT_WITH_BEAMS, Settings
from monoblock.decoding.speculative import Proposer, speculate
from monoblock.errors import InputError
from monoblock.nn.lstm import Recurrent
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer

GREEDY = Settings()
DRAFT_NEEDS_CACHE = "speculative decoding needs the key/value cache; write use_cache=True, or leave out the draft"


class Engine:
    """Decode requests together, at most `max_rows` sequences at a time.

    capacity: the maximum number of tokens in a sequence, prompt included; by default the model's context.
    prefill_chunk: the maximum number of prompt tokens in one pass; by default the whole prompt.
    proposer: proposes tokens for speculative decoding.
    max_burst: the maximum number of steps that a GPU runs before Python reads the tokens.
    optimize: whether to decode with a faster inference copy of the model where possible.
    tap: a function that observes or replaces activations, see nn/tap.py.
    """

    def __init__(
        self,
        model: Transformer | Recurrent,
        *,
        max_rows: int = 64,
        capacity: int | None = None,
        use_cache: bool = True,
        prefill_chunk: int | None = None,
        proposer: Proposer | None = None,
        max_burst: int = 16,
        optimize: bool = True,
        tap: Tap | None = None,
    ) -> None:
        self.model, self.use_cache = model, use_cache
        self.backend = choose_backend(model, use_cache=use_cache, optimize=optimize, tap=tap)
        if proposer is not None and not use_cache:
            raise InputError(DRAFT_NEEDS_CACHE)
        limit = capacity if capacity is not None else self.backend.context
        if limit is None:
            raise InputError("this model has no maximum sequence length, so set one in tokens, such as capacity=1024")
        self.max_rows, self.max_burst, self.capacity, self.prefill_chunk = max_rows, max_burst, limit, prefill_chunk
        self.proposer = proposer
        self.has_request_draft = False  # whether a request's `draft` made the proposer; dropped after the batch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their rows
        self.state: DecoderState | None = None
        self.filters: Filters | None = None
        self.last_request_id = 0

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, ids: Sequence[int], settings: Settings = GREEDY, source: Sequence[int] | None = None) -> int:
        """Queue a prompt and return the request's id.

        For an encoder-decoder `ids` are the first tokens of the target and `source` the tokens of the source.
        """
        prompt = Prompt(tuple(ids), None if source is None else tuple(source))
        if self.has_request_draft and not self.busy:
            self.proposer, self.has_request_draft = None, False
        self._check(prompt, settings)
        if settings.draft is not None and self.proposer is None and not self.busy:
            self.proposer, self.has_request_draft = make_self_draft(self.model, settings.draft), True
        budget = min(settings.max_new_tokens, self.capacity - len(prompt.ids))
        if settings.num_beams > 1:  # a search that reaches the end of the context ends there
            settings = replace(settings, max_new_tokens=budget, min_new_tokens=min(budget, settings.min_new_tokens))
        self.last_request_id += 1
        self.waiting.append(Request(self.last_request_id, prompt, settings, budget))
        return self.last_request_id

    def _check(self, prompt: Prompt, settings: Settings) -> None:
        backend = self.backend
        check_prompt(prompt, backend.vocab_size, self.capacity, backend.family, has_encoder=backend.has_encoder)
        settings.check_vocabulary(backend.vocab_size)
        if settings.rows_per_prompt > self.max_rows:
            raise InputError(
                f"one prompt with {settings.rows_per_prompt} beams or returned sequences does not fit in the engine's "
                f"{self.max_rows} rows; write max_rows={settings.rows_per_prompt} or more"
            )
        if settings.num_beams > 1 and self.proposer is not None:
            raise InputError(NO_DRAFT_WITH_BEAMS)
        if settings.draft is not None and not self.use_cache:
            raise InputError(DRAFT_NEEDS_CACHE)

    def cancel(self, request_id: int) -> None:
        """Drop a request, whether it is waiting or running."""
        self.waiting = deque(request for request in self.waiting if request.id != request_id)
        with self.backend.inference():
            self._remove([request for request in self.running if request.id == request_id or request.is_done])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Generate the next token of every running request, admit waiting requests, and return the new tokens.

        A request may get several tokens in one step: accepted proposals, or a burst of steps on a GPU.
        """
        with self.backend.inference():
            return self._step()

    def follow_model_changes(self) -> None:
        """Use the model as it is now; call this before a step if its weights or modules may have changed."""
        if (renewed := self.backend.renew(self.state)) is not None:
            (self.backend, self.state), self.filters = renewed, None

    def _step(self) -> list[RequestOutput]:
        new = self._admit_waiting()  # may remove finished requests, so `self.running` is read afterwards
        old = list(self.running)
        if not old and not new:
            return []
        if not old:
            self._begin_batch(new[0].settings.rows_per_prompt)
        count = 0 if new else self._burst_length(old)
        if count > 1:
            return self._run_burst(old, count)
        outputs = self._step_search(old, new)
        if outputs is not None:
            return outputs
        outputs, logits = [], None
        if old and self.proposer is not None:
            assert can_roll_back(self.state)
            outputs += speculate(self.state, self.proposer, old, self.capacity)
        elif old:
            logits = self._run_step(old)
        if new:
            new_logits = self._prefill(new)
            logits = new_logits if logits is None else torch.cat((logits, new_logits))
        if logits is not None:
            outputs += self._choose_tokens(old + new if self.proposer is None else new, logits.float())
        self._remove_finished()
        return outputs

    def _admit_waiting(self) -> list[Request]:
        """Take requests from the front of the queue and return them.

        It stops at the first request with a `batch_key` other than that of the running ones, and at `max_rows` rows.
        """
        admitted: list[Request] = []
        rows = sum(request.settings.rows_per_prompt for request in self.running if not request.is_done)
        while self.waiting:
            request, batch = self.waiting[0], self.running + admitted
            fits = not batch or batch[0].settings.batch_key == request.settings.batch_key
            if not fits or rows + request.settings.rows_per_prompt > self.max_rows:
                break
            admitted.append(self.waiting.popleft())
            rows += request.settings.rows_per_prompt
        if admitted and self.running:
            self._remove([request for request in self.running if request.is_done])
        return admitted

    def _begin_batch(self, rows_per_prompt: int) -> None:
        speculative = self.proposer is not None
        self.state = self.backend.make_state(
            self.capacity, rows_per_prompt, self.prefill_chunk, speculative=speculative
        )
        if self.proposer is not None:
            self.proposer.reset(self.capacity, rows_per_prompt)

    def _prefill(self, new: list[Request]) -> Tensor:
        assert self.state is not None
        prompts = [request.prompt for request in new]
        logits = self.state.prefill(prompts)
        if self.proposer is not None:
            self.proposer.prefill(prompts)
        self.running += new
        self.filters = None
        return logits

    def _run_step(self, requests: list[Request]) -> Tensor:
        assert self.state is not None
        tokens = [token for request in requests for token in request.last_tokens]
        return self.state.step(torch.tensor(tokens, device=self.state.device), active_mask(requests, self.state.device))

    def _burst_length(self, requests: list[Request]) -> int:
        """Return how many steps the state may run before Python reads the tokens; 0 if it must run single steps."""
        filters = self.filters
        if not can_burst(self.state) or self.proposer is not None or filters is None:
            return 0
        if requests[0].beam_search is not None or not filters.is_stateless:
            return 0
        rows = [(request, request.sequences[row]) for request, row in request_rows(requests)]
        left = [
            request.token_budget - len(sequence.new_tokens)
            for request, sequence in rows
            if not request.is_done and sequence.finish_reason is None
        ]
        return min(self.max_burst, *left)

    def _run_burst(self, requests: list[Request], count: int) -> list[RequestOutput]:
        """Run `count` steps on the device before reading the tokens; drop tokens generated after a request finished."""
        assert can_burst(self.state)
        assert self.filters is not None
        rows, device = request_rows(requests), self.state.device
        tokens = torch.tensor([request.last_token(row) for request, row in rows], device=device)
        uniforms = None
        if self.filters.has_sampling:
            numbers = [[request.uniform(row, offset) for offset in range(count)] for request, row in rows]
            uniforms = torch.tensor(numbers, dtype=torch.double, device=device)
        filters, active = self.filters, active_mask(requests, device)
        chosen = self.state.burst(tokens, count, uniforms, filters.choose, filters.cache_key, active).tolist()
        outputs = [request.append_tokens(row, new) for (request, row), new in zip(rows, chosen, strict=True)]
        self._remove_finished()
        return [output for output in outputs if output is not None]

    def _choose_tokens(self, requests: list[Request], logits: Tensor) -> list[RequestOutput]:
        filters = self._get_filters(requests)
        if requests[0].beam_search is not None:
            return self._step_beams(requests, logits, filters)
        tokens = choose_tokens(requests, logits, filters)
        rows = zip(request_rows(requests), tokens, strict=True)
        outputs = [request.append_tokens(row, [token]) for (request, row), token in rows]
        return [output for output in outputs if output is not None]

    def _get_filters(self, requests: list[Request]) -> Filters:
        """Return the filters for the rows of these requests; build them again if the rows have changed."""
        settings = [request.settings for request in requests for _ in range(request.settings.rows_per_prompt)]
        if self.filters is None or len(self.filters.settings) != len(settings):
            self.filters = Filters(settings, self.backend.device)
        return self.filters

    # -- beam search ----------------------------------------------------------------------------------------------

    def _step_beams(self, requests: list[Request], logits: Tensor, filters: Filters) -> list[RequestOutput]:
        assert self.state is not None
        searches = [request.beam_search for request in requests if request.beam_search is not None]
        unfinished = [request for request in requests if not request.is_done]
        suppressed = filters.suppressed_tokens([search.length for search in searches])
        if suppressed is not None and len(searches[0].groups) == 1:
            origins = beam.advance_from_logits(searches, logits, suppressed)
        else:
            counts = [request.num_new_tokens for request, _ in request_rows(requests)]
            log_probs = filters.apply_constraints(logits.log_softmax(-1), token_history(requests, filters), counts)
            origins = beam.advance_from_log_probs(searches, log_probs)
        if origins != list(range(len(origins))):
            self.state.reorder(torch.tensor(origins, device=self.state.device))
        return [output for request in unfinished if request.is_done for output in request.beam_outputs()]

    def _step_search(self, old: list[Request], new: list[Request]) -> list[RequestOutput] | None:
        """Run a beam-search step inside the state and return its outputs, or None if it cannot run this batch."""
        if not can_search(self.state):
            return None
        requests = old + new
        searches = [request.beam_search for request in requests if request.beam_search is not None]
        lengths = [search.length for search in searches if not search.is_done]
        plain = bool(lengths) and len(searches[0].groups) == 1 and not (old and new)
        suppressed = self._get_filters(requests).suppressed_tokens(lengths) if plain else None
        finished = None
        if suppressed is not None and (not new or self.state.begin_search([request.prompt for request in new])):
            self.running = requests
            finished = self.state.step_search(searches, suppressed)
        if finished is None:
            self.state.end_search()
            return None
        outputs = [output for index in finished for output in requests[index].beam_outputs()]
        self._remove_finished(wait_for_all=not self.waiting)  # finished rows cost the state nothing
        return outputs

    # -- removing finished requests -------------------------------------------------------------------------------

    def _remove_finished(self, wait_for_all: bool = False) -> None:
        """Remove finished requests if they are at least a quarter of the batch, since the remaining rows are copied.

        With `wait_for_all`, remove them only when all requests of the batch are finished.
        """
        done = [request for request in self.running if request.is_done]
        if done and (4 * len(done) >= len(self.running)) and (not wait_for_all or len(done) == len(self.running)):
            self._remove(done)

    def _remove(self, gone: list[Request]) -> None:
        if not gone:
            return
        kept = [index for index, request in enumerate(self.running) if request not in gone]
        rows_per_prompt = self.running[0].settings.rows_per_prompt
        state, self.running, self.filters = self.state, [self.running[index] for index in kept], None
        assert state is not None
        if not kept:
            state.release()
            self.state = None
            return
        rows = [index * rows_per_prompt + row for index in kept for row in range(rows_per_prompt)]
        row_indices, sources = torch.tensor(rows, device=state.device), torch.tensor(kept, device=state.device)
        state.reorder(row_indices, sources)
        if self.proposer is not None:
            self.proposer.reorder(row_indices, sources)
