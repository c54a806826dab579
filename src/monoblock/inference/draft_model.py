"""A draft model: a faster model that proposes tokens in speculative decoding (speculative.py)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from monoblock.errors import InputError, with_article
from monoblock.inference.backends.eager import CachedDecoderState
from monoblock.inference.backends.prepared_model import PreparedModel
from monoblock.inference.backends.protocol import RollbackState
from monoblock.inference.backends.select import Backend, choose_backend
from monoblock.inference.backends.speculative_graph import DraftProposals, records_rounds
from monoblock.inference.batch_filters import Filters, uniform_numbers
from monoblock.inference.prompt import Prompt
from monoblock.inference.recorded_rounds import run_recorded_rounds
from monoblock.inference.request import Request, RequestOutput, request_rows
from monoblock.inference.settings import check_count
from monoblock.nn.check_model import check_model
from monoblock.nn.transformer import Transformer


class DraftModel:
    """Propose up to `max_proposals` tokens with a faster model than the main model.

    The tokens are chosen by the settings and uniform numbers of each row, as the main model chooses them.  After
    rejected proposals the next call proposes fewer tokens, and after accepted ones more again.  `max_checked` limits
    the number of tokens, of all rows together, that the main model checks in one pass; the newest token of each row
    counts too.  The limit is ignored if it allows less than one proposal per row.  The draft model runs in evaluation
    mode, like the main model.
    """

    def __init__(
        self, model: Transformer | PreparedModel, max_proposals: int = 4, max_checked: int | None = None
    ) -> None:
        if not isinstance(model, PreparedModel):
            check_model(model, Transformer, "DraftModel")
        check_count("max_proposals", max_proposals, 1)
        if max_checked is not None:
            check_count("max_checked", max_checked, 1)
        if model.config.decoder is None:
            raise InputError(f"{with_article(model.config.family)} model cannot generate text; give a decoder as draft")
        self.model, self.max_proposals, self.max_checked = model, max_proposals, max_checked
        self.num_proposals = max_proposals  # how many tokens the next call proposes
        self.proposed = self.accepted = 0  # numbers of tokens, of all rows together
        self.backend: Backend | None = None
        self.state: CachedDecoderState | None = None
        self.known_lengths: list[int] = []  # number of tokens in each row at the last proposal
        self.proposal_length = 0  # number of tokens in the last proposal

    def fits_prompt(self, length: int) -> bool:
        """Return whether a prompt of this length leaves room for a proposal in the draft model's context."""
        limit = self.model.config.context
        return limit is None or length < limit

    def check_prompt(self, length: int) -> None:
        if not self.fits_prompt(length):
            limit = self.model.config.context
            raise InputError(
                f"a prompt of {length} tokens is too long for the draft model's context of {limit} tokens; "
                f"leave out the draft"
            )

    def reset(self, capacity: int, rows_per_prompt: int) -> None:
        limit = self.model.config.context
        if limit is not None and limit < capacity and self.model.config.input.kind == "tokens":
            capacity = min(capacity, limit)
        self.backend = choose_backend(self.model)
        state = self.backend.make_state(capacity, rows_per_prompt, prefill_chunk=None, speculative=True)
        assert isinstance(state, CachedDecoderState)
        self.state, self.num_proposals = state, self.max_proposals

    def _inference(self) -> AbstractContextManager[object]:
        """Return the context manager for every use of the draft: no gradients, evaluation mode."""
        assert self.backend is not None
        return self.backend.inference()

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        assert self.state is not None
        with self._inference():
            self.state.prefill(prompts)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        assert self.state is not None
        with self._inference():
            self.state.reorder(rows, sources)

    def release(self) -> None:
        state, self.state = self.state, None
        if state is not None:
            state.release()

    def run_rounds(self, state: RollbackState, requests: list[Request]) -> list[RequestOutput] | None:
        """Run recorded rounds with the state of the main model; return None if these requests cannot be recorded."""
        draft, limit = self.state, self.model.config.context
        if not records_rounds(draft) or not draft.can_run_rounds(self.max_proposals):
            return None
        if limit is not None and limit < max(request.max_length for request in requests):
            return None
        found = run_recorded_rounds(
            state, requests, self.max_proposals, lambda _: DraftProposals(draft, self.max_proposals)
        )
        if found is None:
            return None
        outputs, counts = found
        used = [count for row in counts for count in row if count]
        self.proposed += self.max_proposals * len(used)
        self.accepted += sum(used) - len(used)
        return outputs

    def propose(
        self, rows: Sequence[Sequence[int]], requests: list[Request], max_tokens: int, active: Tensor | None
    ) -> Tensor:
        with self._inference():
            return self._propose(rows, requests, max_tokens, active)

    def _propose(
        self, rows: Sequence[Sequence[int]], requests: list[Request], max_tokens: int, active: Tensor | None
    ) -> Tensor:
        assert self.state is not None
        is_active = [True] * len(rows) if active is None else active.tolist()
        self.known_lengths = [len(tokens) for tokens in rows]
        longest = max(length for length, goes_on in zip(self.known_lengths, is_active, strict=True) if goes_on)
        count = self.num_proposals
        if self.max_checked is not None and self.max_checked // len(rows) >= 2:
            count = min(count, self.max_checked // len(rows) - 1)
        room = min(self.state.capacity - longest + 1, self.state.max_droppable)  # rejected tokens are dropped
        self.proposal_length = max(0, min(count, max_tokens, room))
        proposed: list[Tensor] = []
        filters = Filters([request.settings for request, _ in request_rows(requests)], self.state.device)
        for offset in range(self.proposal_length):
            logits = self._catch_up(rows, is_active) if offset == 0 else self.state.step(proposed[-1], active)
            proposed.append(filters.choose(logits.float(), uniform_numbers(requests, filters, offset)))
        if not proposed:
            return torch.zeros(len(rows), 0, dtype=torch.long, device=self.state.device)
        return torch.stack(proposed, 1)

    def _catch_up(self, rows: Sequence[Sequence[int]], is_active: list[bool]) -> Tensor:
        """Run the tokens that the draft model has not seen yet, and return the logits (rows, V) after the last one.

        Usually these are one or two tokens per row.
        """
        assert self.state is not None
        assert self.state.cache is not None
        device, lengths = self.state.device, self.state.cache.lengths.tolist()
        columns = zip(rows, lengths, is_active, strict=True)
        missing = [len(tokens) - length if goes_on else 0 for tokens, length, goes_on in columns]
        most = max(missing)
        if all(count in (0, most) for count in missing):
            tokens = torch.tensor([[*[0] * most, *tokens][-most:] for tokens in rows], device=device)
            active = None if all(is_active) else torch.tensor(is_active, device=device)
            logits = self.state.score_tokens(tokens, active)[:, -1]
            self.state.commit(most if active is None else most * active.long())
            return logits
        for back in range(most, 0, -1):  # rows that miss more tokens than others start earlier
            tokens = torch.tensor([tokens[-min(back, len(tokens))] for tokens in rows], device=device)
            logits = self.state.step(tokens, torch.tensor([count >= back for count in missing], device=device))
        return logits

    def commit(self, counts: Tensor) -> None:
        """Drop rejected proposals from the draft model's cache.

        `counts` is the number of tokens that each row has gained; all but the last of them were proposed.
        """
        assert self.state is not None
        assert self.state.cache is not None
        gained = counts.tolist()
        accepted = [min(count - 1, self.proposal_length) for count in gained if count]
        self.proposed += self.proposal_length * len(accepted)
        self.accepted += sum(accepted)
        if self.proposal_length:
            lengths = [
                known + max(0, min(count, self.proposal_length) - 1)
                for known, count in zip(self.known_lengths, gained, strict=True)
            ]
            with self._inference():
                self.state.cache.truncate(torch.tensor(lengths, device=self.state.device))
            self.num_proposals = min(self.max_proposals, max(1, 2 * (sum(accepted) // len(accepted)) + 1))
