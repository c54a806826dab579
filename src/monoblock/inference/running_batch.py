"""The requests that are decoded at the same time, and the backend state with one row for each of their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference import beam
from monoblock.inference.backends.protocol import DecoderState, can_burst, can_roll_back, can_search
from monoblock.inference.backends.select import Backend
from monoblock.inference.backends.speculative_graph import records_rounds
from monoblock.inference.batch_filters import Filters, choose_tokens, constrain_logits
from monoblock.inference.request import Request, RequestOutput, active_mask, error_outputs, request_rows
from monoblock.inference.speculative import Proposer, speculate


class RunningBatch:
    """A batch of requests; the engine adds waiting requests to it, and removes finished ones.

    capacity: the maximum number of tokens in a row, prompt included.
    prefill_chunk: the maximum number of prompt tokens in one pass; None for the whole prompt.
    max_burst: the maximum number of steps that a GPU runs before Python reads the tokens.
    """

    def __init__(self, backend: Backend, prefill_chunk: int | None, max_burst: int) -> None:
        self.backend, self.prefill_chunk, self.max_burst = backend, prefill_chunk, max_burst
        self.requests: list[Request] = []  # in the order of their rows
        self.state: DecoderState | None = None
        self.proposer: Proposer | None = None
        self.filters: Filters | None = None
        self.capacity = 0

    def begin(self, capacity: int, rows_per_prompt: int, proposer: Proposer | None) -> None:
        """Make the state of an empty batch."""
        self.capacity, self.proposer = capacity, proposer
        self.state = self.backend.make_state(
            capacity, rows_per_prompt, self.prefill_chunk, speculative=proposer is not None
        )
        if proposer is not None:
            proposer.reset(capacity, rows_per_prompt)

    def prefill(self, new: list[Request]) -> Tensor:
        """Add requests to the batch and return the logits (new rows, V) after their prompts and tokens."""
        assert self.state is not None
        prompts = [request.started_prompt for request in new]
        logits = self.state.prefill(prompts)
        if logits.isnan().any():
            raise InputError("the logits of this model are NaN; its weights are damaged, or too large for the dtype")
        if self.proposer is not None:
            self.proposer.prefill(prompts)
        logits = self._run_returned_tokens(new, logits)
        self.requests = self.requests + new
        self.filters = None
        return logits

    def _run_returned_tokens(self, new: list[Request], logits: Tensor) -> Tensor:
        """Run the tokens that several rows of one prompt have got before a restart; return the logits after them."""
        assert self.state is not None
        if len(new[0].sequences) == 1:
            return logits  # they have been part of the prompt
        device, old = self.state.device, len(request_rows(self.requests))
        sequences = [sequence for request in new for sequence in request.sequences]
        rows: list[list[int]] = [[]] * old
        rows += [sequence.new_tokens if sequence.finish_reason is None else [] for sequence in sequences]
        for index in range(max(map(len, rows))):
            tokens = torch.tensor([row[index] if index < len(row) else 0 for row in rows], device=device)
            active = torch.tensor([index < len(row) for row in rows], device=device)
            stepped = self.state.step(tokens, active)
            logits = torch.where(active[old:, None], stepped[old:], logits)
        return logits

    def step(self) -> Tensor:
        """Run the newest token of every row and return the logits (rows, V) after it."""
        assert self.state is not None
        tokens = [token for request in self.requests for token in request.last_tokens]
        active = active_mask(self.requests, self.state.device)
        return self.state.step(torch.tensor(tokens, device=self.state.device), active)

    def speculate(self) -> list[RequestOutput]:
        assert can_roll_back(self.state)
        assert self.proposer is not None
        return speculate(self.state, self.proposer, self.requests, self.capacity) + error_outputs(self.requests)

    # -- choosing tokens ------------------------------------------------------------------------------------------

    def choose(self, requests: list[Request], logits: Tensor) -> list[RequestOutput]:
        """Choose the next token of every row of these requests, given logits (rows, V), and return the new tokens."""
        filters = self._get_filters(requests)
        if requests[0].beam_search is not None:
            return self._choose_beams(requests, logits, filters)
        tokens = choose_tokens(requests, logits, filters)
        rows = zip(request_rows(requests), tokens, strict=True)
        outputs = [request.append_tokens(row, [token]) for (request, row), token in rows]
        return [output for output in outputs if output is not None] + error_outputs(requests)

    def _get_filters(self, requests: list[Request]) -> Filters:
        """Return the filters for the rows of these requests; build them again if the rows have changed."""
        num_rows = sum(request.settings.rows_per_prompt for request in requests)
        if self.filters is None or len(self.filters.settings) != num_rows:
            rows = [request.settings for request in requests for _ in range(request.settings.rows_per_prompt)]
            self.filters = Filters(rows, self.backend.device)
        return self.filters

    def burst_length(self) -> int:
        """Return how many steps the state may run before Python reads the tokens; 0 if it must run single steps."""
        filters = self.filters
        if not can_burst(self.state) or self.proposer is not None or filters is None:
            return 0
        if self.requests[0].beam_search is not None or not filters.is_stateless:
            return 0
        rows = [(request, request.sequences[row]) for request, row in request_rows(self.requests)]
        left = [
            request.token_budget - len(sequence.new_tokens)
            for request, sequence in rows
            if not request.is_done and sequence.finish_reason is None
        ]
        return min(self.max_burst, *left)

    def run_burst(self, count: int) -> list[RequestOutput]:
        """Run `count` steps on the device before reading the tokens; drop tokens generated after a request finished."""
        assert can_burst(self.state)
        assert self.filters is not None
        rows, device = request_rows(self.requests), self.state.device
        tokens = torch.tensor([request.last_token(row) for request, row in rows], device=device)
        uniforms = None
        if self.filters.has_sampling:
            numbers = [[request.uniform(row, offset) for offset in range(count)] for request, row in rows]
            uniforms = torch.tensor(numbers, dtype=torch.double, device=device)
        filters, active = self.filters, active_mask(self.requests, device)
        chosen = self.state.burst(tokens, count, uniforms, filters.choose, filters.cache_key, active).tolist()
        outputs = [request.append_tokens(row, new) for (request, row), new in zip(rows, chosen, strict=True)]
        return [output for output in outputs if output is not None]

    # -- beam search ----------------------------------------------------------------------------------------------

    def _choose_beams(self, requests: list[Request], logits: Tensor, filters: Filters) -> list[RequestOutput]:
        assert self.state is not None
        searches = [request.beam_search for request in requests if request.beam_search is not None]
        unfinished = [request for request in requests if not request.is_done]
        suppressed = filters.suppressed_tokens([search.length for search in searches])
        if suppressed is not None and len(searches[0].groups) == 1:
            origins = beam.advance_from_logits(searches, logits, suppressed)
        else:
            origins = beam.advance_from_log_probs(searches, constrain_logits(requests, logits.log_softmax(-1), filters))
        if origins != list(range(len(origins))):
            self.state.reorder(torch.tensor(origins, device=self.state.device))
        done = [request for request in unfinished if request.is_done and request.error is None]
        return [output for request in done for output in request.beam_outputs()] + error_outputs(requests)

    @property
    def is_closed(self) -> bool:
        """Whether no request can be added before all requests of the batch are finished."""
        return can_search(self.state) and self.state.is_closed

    def step_search(self, new: list[Request]) -> list[RequestOutput] | None:
        """Run a beam-search step inside the state and return its outputs, or None if it cannot run this batch."""
        if not can_search(self.state):
            return None
        old, requests = self.requests, self.requests + new
        searches = [request.beam_search for request in requests if request.beam_search is not None]
        lengths = [search.length for search in searches if not search.is_done]
        plain = bool(lengths) and len(searches[0].groups) == 1 and not (old and new)
        suppressed = self._get_filters(requests).suppressed_tokens(lengths) if plain else None
        finished = None
        if suppressed is not None and (not new or self.state.begin_search([request.prompt for request in new])):
            finished = self.state.step_search(searches, suppressed)
        if finished is None:
            self.state.end_search()
            return None
        self.requests = requests
        return [output for index in finished for output in requests[index].beam_outputs()]

    # -- removing requests ----------------------------------------------------------------------------------------

    def remove_finished(self, wait_for_all: bool = False) -> None:
        """Remove finished requests if they are at least a quarter of the batch, since the remaining rows are copied.

        With `wait_for_all`, and while recorded rounds run, remove them only when all requests are finished.
        """
        wait_for_all = wait_for_all or (records_rounds(self.state) and self.state.graph is not None)
        done = [request for request in self.requests if request.is_done]
        if done and (4 * len(done) >= len(self.requests)) and (not wait_for_all or len(done) == len(self.requests)):
            self.remove(done)

    def remove(self, gone: list[Request]) -> None:
        """Remove requests and their rows; without any request left, the state is released."""
        if not gone:
            return
        gone_ids = {request.id for request in gone}
        kept = [index for index, request in enumerate(self.requests) if request.id not in gone_ids]
        rows_per_prompt = self.requests[0].settings.rows_per_prompt
        state, self.requests, self.filters = self.state, [self.requests[index] for index in kept], None
        assert state is not None
        if not kept:
            self.end()
            return
        rows = [index * rows_per_prompt + row for index in kept for row in range(rows_per_prompt)]
        row_indices, sources = torch.tensor(rows, device=state.device), torch.tensor(kept, device=state.device)
        state.reorder(row_indices, sources)
        if self.proposer is not None:
            self.proposer.reorder(row_indices, sources)

    def keep_rows(self, requests: list[Request]) -> None:
        """Keep only the rows of the first requests of the batch, after a prefill that failed half-way."""
        assert self.state is not None
        rows_per_prompt = requests[0].settings.rows_per_prompt
        rows = torch.arange(len(requests) * rows_per_prompt, device=self.state.device)
        sources = torch.arange(len(requests), device=self.state.device)
        self.requests, self.filters = requests, None
        self.state.reorder(rows, sources)
        if self.proposer is not None:
            self.proposer.reorder(rows, sources)

    def end(self) -> None:
        """Drop all requests and release the state."""
        state, self.requests, self.state, self.filters = self.state, [], None, None
        proposer, self.proposer = self.proposer, None
        if proposer is not None:
            proposer.release()
        if state is not None:
            state.release()
