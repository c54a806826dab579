"""Speculative decoding (Leviathan et al. 2023): a fast proposer proposes tokens, the model checks them in one pass.

A proposal is accepted if it is exactly the token that the model would have chosen there: the best one or, in sampling,
the one that the uniform random number of this step selects (sampling.py).  So the text is the one that the model alone
would generate; only the number of passes differs.  A draft model samples with the same uniform numbers, so that it
often proposes the model's token if the two distributions are similar.

    DraftModel(small_model)   proposes with a second model of the same vocabulary, such as a quantized copy of the first
    PromptLookup()            proposes the tokens that followed when the last few tokens occurred before (Saxena 2023)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from monoblock.decoding.backends.eager import CachedDecoderState
from monoblock.decoding.backends.protocol import RollbackState
from monoblock.decoding.backends.select import Backend, choose_backend
from monoblock.decoding.batch_filters import Filters, choose_tokens, uniform_numbers
from monoblock.decoding.prompt import Prompt
from monoblock.decoding.request import Request, RequestOutput, active_mask, request_rows
from monoblock.errors import InputError, with_article
from monoblock.nn.transformer import Transformer


class Proposer(Protocol):
    """An object that proposes the next tokens of every row in a batch."""

    def reset(self, capacity: int, rows_per_prompt: int) -> None:
        """Begin a new batch, whose rows have at most `capacity` tokens each."""
        ...

    def check_prompt(self, length: int) -> None:
        """Raise InputError if the proposer cannot propose tokens for a prompt of this length."""
        ...

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Append rows for new prompts to the batch."""
        ...

    def propose(
        self, rows: Sequence[Sequence[int]], requests: list[Request], max_tokens: int, active: Tensor | None
    ) -> Tensor:
        """Propose the next tokens of each row and return them as (rows, count), where count is at most `max_tokens`.

        rows: all tokens of each row so far, including the prompt.
        active: a mask (rows,) of the rows that are not finished; None if no row is finished.
        """
        ...

    def commit(self, counts: Tensor) -> None:
        """Update the proposer after a step in which the rows have gained `counts` (rows,) tokens.

        These are the accepted proposals of each row and one more token, which the model has chosen.
        """
        ...

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep only the rows with these indices, and put them in this order.

        `sources` are the indices of the prompts that are kept; None keeps all.
        """
        ...


def speculate(state: RollbackState, proposer: Proposer, requests: list[Request], capacity: int) -> list[RequestOutput]:
    """Let the proposer propose tokens, check them in one pass of the model, and append the accepted ones."""
    pairs = request_rows(requests)
    rows = [request.row_tokens(row) for request, row in pairs]
    running = {index for index, (request, row) in enumerate(pairs) if not request.is_row_done(row)}
    left = max(_tokens_left(*pairs[index]) for index in running)
    max_tokens = min(left - 1, *(capacity - len(rows[index]) for index in running))
    active = active_mask(requests, state.device)
    proposed = proposer.propose(rows, requests, max_tokens, active)  # (rows, count)
    last_tokens = torch.tensor([tokens[-1:] for tokens in rows], device=state.device)
    logits = state.score_tokens(torch.cat((last_tokens, proposed.to(state.device)), 1), active).float()
    outputs = _accept(requests, running, proposed.tolist(), logits)
    counts = [0] * len(pairs)
    for index, _ in outputs:
        counts[index] += 1
    accepted = torch.tensor(counts, device=state.device)
    state.commit(accepted)
    proposer.commit(accepted)
    return [output for _, output in outputs]


def _tokens_left(request: Request, row: int) -> int:
    return request.token_budget - len(request.sequences[row].new_tokens)


def _accept(
    requests: list[Request], running: set[int], proposed: list[list[int]], logits: Tensor
) -> list[tuple[int, RequestOutput]]:
    """Append the model's tokens to each running row, up to and including the first that differs from its proposal.

    running: the indices of the rows that are not finished.
    proposed: `count` tokens for each row.
    logits: (rows, count + 1, V), the model's logits after the newest token and after each proposal.
    Return (row index, output) for each appended token.
    """
    pairs, running = request_rows(requests), set(running)
    filters = Filters([request.settings for request, _ in pairs], logits.device)
    best = logits.argmax(-1).T.tolist() if filters.is_stateless and not filters.has_sampling else None
    outputs: list[tuple[int, RequestOutput]] = []
    for position in range(logits.shape[1]):
        tokens = best[position] if best is not None else choose_tokens(requests, logits[:, position], filters)
        for index in sorted(running):
            request, row = pairs[index]
            output = request.append_tokens(row, tokens[index : index + 1])
            if output is None:  # a logits processor has failed
                running.discard(index)
                continue
            outputs.append((index, output))
            if output.finish_reason or proposed[index][position : position + 1] != tokens[index : index + 1]:
                running.discard(index)
        if not running:
            break
    return outputs


class PromptLookup:
    """Propose the tokens that followed when the last few tokens of a row occurred before, in the prompt or later.

    This is useful for texts that quote their prompt.  At most `max_ngram` of the last tokens are compared.
    """

    def __init__(self, num_proposals: int = 8, max_ngram: int = 3) -> None:
        self.num_proposals, self.max_ngram = num_proposals, max_ngram

    def reset(self, capacity: int, rows_per_prompt: int) -> None:
        """Do nothing: a prompt lookup keeps no state."""

    def check_prompt(self, length: int) -> None:
        """Do nothing."""

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Do nothing."""

    def commit(self, counts: Tensor) -> None:
        """Do nothing."""

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Do nothing."""

    def propose(
        self, rows: Sequence[Sequence[int]], requests: list[Request], max_tokens: int, active: Tensor | None
    ) -> Tensor:
        count = min(self.num_proposals, max_tokens)
        proposals = [self._find_continuation(list(tokens), count) for tokens in rows]
        return torch.tensor(proposals, dtype=torch.long).view(len(rows), count)

    def _find_continuation(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens that followed when the last n tokens occurred before, most recently.

        A larger n is preferred.  If fewer than `count` tokens follow, the last token of the row is repeated.
        """
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            ngram = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == ngram:
                    continuation = tokens[start + size : start + size + count]
                    return (continuation + [tokens[-1]] * count)[:count]
        return [tokens[-1]] * count


class DraftModel:
    """Propose up to `max_proposals` tokens with a faster model than the main model.

    The tokens are chosen by the settings and uniform numbers of each row, as the main model chooses them.  After
    rejected proposals the next call proposes fewer tokens, and after accepted ones more again.  `max_checked` limits
    the number of tokens, of all rows together, that the main model checks in one pass; the newest token of each row
    counts too.  The limit is ignored if it allows less than one proposal per row.  The draft model runs in evaluation
    mode, like the main model.
    """

    def __init__(self, model: Transformer, max_proposals: int = 4, max_checked: int | None = None) -> None:
        if model.decoder is None:
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
        self.proposal_length = max(0, min(count, max_tokens, self.state.capacity - longest + 1))
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
