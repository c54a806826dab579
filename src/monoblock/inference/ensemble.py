"""Decode with several models of one vocabulary: in each step, their log-probabilities are averaged.

    Engine(model, ensemble=[second, third])

The mean of the log-probabilities takes the place of a model's logits, so sampling and beam search work as with one
model.  Normalized, it is the geometric mean of the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.backends.protocol import DecoderState
from monoblock.inference.backends.select import Backend
from monoblock.inference.prompt import Prompt

NO_DRAFT_WITH_ENSEMBLE = "speculative decoding takes a single model; leave out the draft or the ensemble"


class EnsembleBackend:
    """The backends of several models, which decode the same rows."""

    def __init__(self, members: Sequence[Backend]) -> None:
        first = members[0]
        for number, member in enumerate(members[1:], 2):
            for name, what in (("vocab_size", "a vocabulary of"), ("source_vocab_size", "a source vocabulary of")):
                if getattr(member, name) != getattr(first, name):
                    raise InputError(
                        f"model {number} of the ensemble has {what} {getattr(member, name)} tokens and the first "
                        f"{getattr(first, name)}; give models that were trained with the same tokenizer"
                    )
            if member.device != first.device:
                raise InputError(
                    f"model {number} of the ensemble is on {member.device}, not on {first.device}; move it"
                )
        self.members, self.device, self.family = tuple(members), first.device, first.family
        self.vocab_size, self.source_vocab_size = first.vocab_size, first.source_vocab_size
        self.has_encoder = first.has_encoder
        self.context = min((member.context for member in members if member.context is not None), default=None)
        limits = [member.max_source for member in members if member.max_source is not None]
        self.max_source: int | None = min(limits, default=None)

    def make_state(
        self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None, *, speculative: bool
    ) -> DecoderState:
        if speculative:
            raise InputError(NO_DRAFT_WITH_ENSEMBLE)
        shape = (capacity, rows_per_prompt, prefill_chunk)
        return EnsembleDecoderState([member.make_state(*shape, speculative=False) for member in self.members])

    def inference(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        for member in self.members:
            stack.enter_context(member.inference())
        return stack


class EnsembleDecoderState:
    """The decoder states of several models, which hold the same rows."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self, members: Sequence[DecoderState]) -> None:
        self.members = tuple(members)
        self.device, self.rows_per_prompt = members[0].device, members[0].rows_per_prompt

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        return mean_log_probs([member.prefill(prompts) for member in self.members])

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        return mean_log_probs([member.step(tokens, active) for member in self.members])

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        for member in self.members:
            member.reorder(rows, sources)

    def release(self) -> None:
        for member in self.members:
            member.release()


def mean_log_probs(logits: Sequence[Tensor]) -> Tensor:
    """Return the mean of the log-probabilities of several models, normalized; shape and vocabulary must be the same."""
    return torch.stack([one.float().log_softmax(-1) for one in logits]).mean(0).log_softmax(-1)
