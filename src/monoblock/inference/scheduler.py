"""Requests, and which of their tokens run next: admission by free pages, prompts in chunks, priorities, preemption.

Requests wait in the order of priority and arrival.  The first is admitted as soon as its rows and the pages of its
prompt fit; later requests never overtake it.  Every running row gets its next token in every step, and the rest of the
step's tokens goes to prompts, in chunks.  If pages run out, the request that was admitted last, among those of the
lowest priority, gives its pages back and waits; later its tokens are run again as if they were its prompt.

Beam searches with a `search_shape` need no pages: those of one shape begin together, and later ones of this shape wait
until all of them have ended, while others go on.
"""

from __future__ import annotations

import bisect
import hashlib
import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from monoblock.config.parts import EmbeddingConfig, Learned
from monoblock.errors import InputError, with_article
from monoblock.inference.pages import OutOfPages, PageCopies, Pages
from monoblock.inference.settings import Settings, show
from monoblock.inference.streaming_text import StreamingText
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.arguments import check_model
from monoblock.nn.transformer import Transformer

FINISH_REASONS = {
    "stop": "an end token or a stop string",
    "length": "max_new_tokens is reached",
    "context": "the context of the model is full",
    "no_hypothesis": "beam search has found fewer hypotheses than num_return_sequences",
    "error": "the request has failed",
}
DRAW_SIZE = 64  # random numbers drawn at a time
MAX_STEP_TOKENS = 8192  # tokens of prompts in one step
NAN_LOGITS = "the logits of this model are NaN; its weights are damaged, or too large for the dtype"


class Prompt(NamedTuple):
    """The token ids that a sequence starts with and, for an encoder-decoder, the token ids of the encoder's input."""

    ids: tuple[int, ...]
    source: tuple[int, ...] | None = None


def pad_right(
    rows: Sequence[Sequence[float]], device: torch.device, padding: float = 0
) -> tuple[Tensor, Tensor | None]:
    """Pad rows of token ids on the right to one tensor (B, T); return it and the mask (B, T) of valid tokens.

    The mask is None if no row had to be padded.
    """
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.tensor([*map(list, rows)], device=device), None
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=device)
    return ids, torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]


def parse_prompt(ids: Sequence[int], source: Sequence[int] | None = None) -> Prompt:
    """Build a prompt from sequences of token ids; raise InputError if an element is not a whole number."""
    return Prompt(_token_ids(ids, "the prompt"), None if source is None else _token_ids(source, "the source"))


def _token_ids(ids: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, ids))
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a sequence of token ids, which are whole numbers: [5, 7, 11]") from None


# -- what a model accepts ---------------------------------------------------------------------------------------------


class ModelLimits(NamedTuple):
    """What a model, or several that decode together, accept as a prompt."""

    device: torch.device
    vocab_size: int
    context: int | None  # the most tokens of a sequence, None for no limit
    has_encoder: bool  # whether a prompt needs a source
    source_vocab_size: int | None  # None if there is no encoder, or if it does not read tokens
    max_source: int | None  # the most tokens of a source, None for no limit


def limits_of(model: Transformer) -> ModelLimits:
    """Return the limits of a model that generates text."""
    check_model(model, Transformer, "Engine", also="what mb.optimize(model) returns")
    if model.decoder is None or model.head is None or model.head.config.kind != "language_model":
        kind = with_article(model.config.family)
        raise InputError(f"{kind} model without a language-model head generates no text; use a model with one")
    source = model.config.input
    target = source if model.config.target is None else model.config.target
    assert isinstance(target, EmbeddingConfig)
    limits = ModelLimits(model.device, target.vocab, target.context, model.encoder is not None, None, None)
    if model.encoder is None or not isinstance(source, EmbeddingConfig):
        return limits
    max_source = source.context if isinstance(source.positions, Learned) else None
    return limits._replace(source_vocab_size=source.vocab, max_source=max_source)


def combine_limits(members: Sequence[ModelLimits]) -> ModelLimits:
    """Return the limits of models that decode the same rows."""
    first = members[0]
    for number, member in enumerate(members[1:], 2):
        for name, what in (("vocab_size", "a vocabulary of"), ("source_vocab_size", "a source vocabulary of")):
            if getattr(member, name) != getattr(first, name):
                raise InputError(
                    f"model {number} of the ensemble has {what} {getattr(member, name)} tokens and the first "
                    f"{getattr(first, name)}; give models that were trained with the same tokenizer"
                )
        if member.device != first.device:
            raise InputError(f"model {number} of the ensemble is on {member.device}, not on {first.device}; move it")
    contexts = [member.context for member in members if member.context is not None]
    sources = [member.max_source for member in members if member.max_source is not None]
    return first._replace(context=min(contexts, default=None), max_source=min(sources, default=None))


def check_prompt(prompt: Prompt, limits: ModelLimits, capacity: int) -> None:
    """Raise InputError if a model cannot continue a prompt.

    capacity: the maximum number of tokens in a sequence, prompt included.
    """
    if not prompt.ids:
        raise InputError("the prompt is empty; give at least one token, such as the start token")
    if len(prompt.ids) >= capacity:
        raise InputError(
            f"a prompt of {len(prompt.ids)} tokens leaves no room for new tokens in a context of {capacity} tokens; "
            f"shorten the prompt"
        )
    if (prompt.source is not None) != limits.has_encoder:
        what = (
            "needs a source for its encoder; give its token ids as `source`"
            if prompt.source is None
            else "has no encoder to read a source; leave out `source`"
        )
        raise InputError(f"this {'encoder-decoder' if limits.has_encoder else 'decoder-only'} model {what}")
    if prompt.source == ():
        raise InputError("the source is empty, so the encoder has nothing to read; give at least one token")
    if prompt.source is not None and limits.max_source is not None and len(prompt.source) > limits.max_source:
        raise InputError(
            f"a source of {len(prompt.source)} tokens is longer than the encoder's {limits.max_source} positions; "
            f"shorten the source"
        )
    check_ids(prompt.ids, limits.vocab_size, "prompt")
    if prompt.source is not None and limits.source_vocab_size is not None:
        check_ids(prompt.source, limits.source_vocab_size, "source")


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise InputError for a token id outside a vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InputError(
            f"token id {show(wrong)} is outside the vocabulary of {vocab_size} tokens; "
            f"encode the {name} with the tokenizer of this model"
        )


# -- what an engine returns -------------------------------------------------------------------------------------------


class TokenScores(NamedTuple):
    """The log-probability of a token in the distribution of the model, before any filter, and the best tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability), best first


class RequestOutput(NamedTuple):
    """The new tokens of one sequence of a request."""

    request_id: int
    sequence_index: int  # below num_return_sequences
    tokens: tuple[int, ...]  # those since the last output; a beam search has only one output, at its end
    finish_reason: str | None = None  # see FINISH_REASONS; None while the sequence goes on
    score: float | None = None  # beam search: sum of log-probabilities / length ** length_penalty
    error: Exception | None = None  # what ended the request, if finish_reason is "error"
    scores: tuple[TokenScores, ...] = ()  # of each new token, if Settings.logprobs asks for them
    prompt_scores: tuple[TokenScores, ...] = ()  # of the prompt after its first token, in the first output
    num_cached: int = 0  # tokens of the prompt that were found in pages, in the first output
    captured: dict[str, Tensor] | None = None  # activations by name, over the tokens run since the last output


class Edit(Protocol):
    """A change of activations in the passes of one request, such as what `mb.ablate` returns."""

    def matches(self, name: str) -> bool: ...

    def apply(self, name: str, tensor: Tensor, start: int) -> Tensor:
        """Return the activation to use instead of `tensor`, whose first token is number `start` of its row."""
        ...


@dataclass(frozen=True)
class Variant:
    """How the rows of a request differ from the plain model: rows of different variants run in different passes."""

    adapter: str | None = None
    edits: tuple[Edit, ...] = ()
    capture: tuple[str, ...] = ()

    @property
    def needs_own_pass(self) -> bool:
        """Whether each row has a pass of its own: it is edited or looked into."""
        return bool(self.edits or self.capture)


PLAIN = Variant()


# -- rows -------------------------------------------------------------------------------------------------------------


class RandomStream:
    """Uniform random numbers in [0, 1) for the steps of one sequence, indexed by the number of the step.

    They depend only on `seed` and on `stream`, the index of the sequence.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self.generator = np.random.Generator(np.random.Philox(key=[seed, stream]))
        self.buffer: list[float] = []

    def __getitem__(self, step: int) -> float:
        while step >= len(self.buffer):
            self.buffer += self.generator.random(DRAW_SIZE).tolist()
        return self.buffer[step]


def random_streams(settings: Settings) -> list[RandomStream | None]:
    """Return the random numbers of each row of a request, None if decoding is greedy."""
    if settings.temperature == 0:
        return [None] * settings.rows_per_prompt
    seed = settings.seed if settings.seed is not None else int(torch.randint(2**62, ()))  # as torch.manual_seed says
    return [RandomStream(seed, row) for row in range(settings.rows_per_prompt)]


@dataclass(eq=False)
class Row:
    """One sequence of a request, or one beam."""

    request: Request
    index: int
    tokens: list[int]  # with those of the prompt
    number: int | None = None  # of its row in the pages; None while it waits
    finish_reason: str | None = None
    random_stream: RandomStream | None = None  # None if decoding is greedy
    text: StreamingText | None = None  # of the new tokens, if there are stop strings
    digests: list[bytes] = field(default_factory=list)  # of the full pages of `tokens`, as far as they are known

    @property
    def place(self) -> int:
        """The number of its row in the pages."""
        assert self.number is not None
        return self.number

    @property
    def num_new(self) -> int:
        return len(self.tokens) - len(self.request.prompt.ids)

    @property
    def num_left(self) -> int:
        return self.request.token_budget - self.num_new

    def uniform(self, offset: int = 0) -> float:
        """Return the random number that selects the token after `offset` more; 0 if decoding is greedy."""
        return 0.0 if self.random_stream is None else self.random_stream[self.num_new + offset]

    def page_digests(self, count: int) -> list[bytes]:
        """Return digests of the first `count` full pages: each stands for all tokens up to the end of its page."""
        while len(self.digests) < count:
            end = (len(self.digests) + 1) * PAGE_SIZE
            before = self.digests[-1] if self.digests else self.request.root_digest
            self.digests.append(_digest((before, array("q", self.tokens[end - PAGE_SIZE : end]).tobytes())))
        return self.digests[:count]


class Request:
    """A prompt and its rows: the sequences to return or, in beam search, the beams.

    root: what besides the tokens decides about keys and values (salt, adapter, edits), for the reuse of prefixes.
    """

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        settings: Settings,
        token_budget: int,
        limit_reason: str = "length",
        variant: Variant = PLAIN,
        root: Iterable[object] = (),
    ) -> None:
        self.id, self.prompt, self.settings, self.variant = request_id, prompt, settings, variant
        self.token_budget = token_budget  # maximum number of new tokens, by max_new_tokens and the context
        self.limit_reason = limit_reason  # the finish reason of a sequence that reaches the budget
        streams = enumerate(random_streams(settings))
        self.rows = [Row(self, index, list(prompt.ids), random_stream=stream) for index, stream in streams]
        self.root = root
        self.source_number: int | None = None  # of its row in the pages of sources
        self.is_encoded = False  # whether its source has been encoded
        self.is_started = False  # whether its prompt has been run: all its rows have tokens of their own
        self.prompt_scores: list[TokenScores] = []
        self.num_cached = 0  # tokens of the prompt that were found in pages
        self.search_shape: object = None  # of a beam search that a GPU may run in recorded steps, see cuda_search.py
        self.proposer: Any = None  # a `Proposer`, if there is one for this request

    @cached_property
    def root_digest(self) -> bytes:
        return _digest([repr(part).encode() for part in (*self.root, self.prompt.source)])

    def restart(self) -> None:
        """Return to the state of a request that waits and has not begun."""
        self.source_number, self.is_encoded, self.is_started, self.prompt_scores = None, False, False, []
        for row in self.rows:
            row.number = row.finish_reason = row.text = None
            del row.tokens[len(self.prompt.ids) :]

    @property
    def source_place(self) -> int:
        """The number of the row of its source in the pages of sources."""
        assert self.source_number is not None
        return self.source_number

    @property
    def is_beam_search(self) -> bool:
        return self.settings.num_beams > 1

    @property
    def running_rows(self) -> list[Row]:
        """The rows that are not finished."""
        return [row for row in self.rows if row.finish_reason is None]

    @property
    def is_done(self) -> bool:
        return all(row.finish_reason for row in self.rows)

    @property
    def max_length(self) -> int:
        """The largest number of tokens that a row may reach, prompt included."""
        return len(self.prompt.ids) + self.token_budget

    def fail(self, error: Exception) -> list[RequestOutput]:
        """End the sequences that are not finished, because of an error, and return their last outputs."""
        count = self.settings.num_return_sequences
        unfinished = [row.index for row in self.running_rows if row.index < count]
        for row in self.running_rows:
            row.finish_reason = "error"
        return [RequestOutput(self.id, index, (), "error", error=error) for index in unfinished]


def end_of_text(row: Row, tokens: Sequence[int]) -> tuple[list[int], str | None]:
    """Return which of these next tokens a row takes, and its finish reason if it ends with them."""
    request, new = row.request, list(tokens[: row.num_left])
    for index, token in enumerate(new):
        if token in request.settings.eos_token_id:
            return new[: index + 1], "stop"
    return new, request.limit_reason if len(new) >= row.num_left else None


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


# -- what runs next ------------------------------------------------------------------------------------------------


class RowPass(NamedTuple):
    """Tokens to run after the first `start` tokens of a row; logits are wanted after the last `num_logits` of them."""

    row: Row
    tokens: Sequence[int]
    start: int
    num_logits: int

    @property
    def request(self) -> Request:
        return self.row.request

    @property
    def is_newest(self) -> bool:
        """Whether only the newest token of the row is run, not one of those that are run again after a preemption."""
        return len(self.tokens) == 1 and self.start + 1 == len(self.row.tokens)


class Scheduler:
    """The queue of requests, and the rows and pages of those that run.

    chunk: the maximum number of tokens of one prompt in a step; None for no limit.
    reuses_prefixes: whether a prompt may begin with published pages.
    """

    def __init__(
        self, pages: Pages, sources: Pages, *, max_rows: int, chunk: int | None = None, reuses_prefixes: bool = True
    ) -> None:
        self.pages, self.sources, self.max_rows, self.chunk = pages, sources, max_rows, chunk
        self.reuses_prefixes = reuses_prefixes
        self.step_tokens = MAX_STEP_TOKENS  # tokens of prompts in one step, at most
        self.num_prompt_tokens = 0  # of the step that was planned last
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in pages, in the order of their admission
        self.searching: list[Request] = []  # in recorded steps; they have one shape
        self.num_prefix_tokens = self.num_preemptions = 0  # so far: tokens of prompts found in pages, and preemptions

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_order)

    def drop(self, request: Request) -> None:
        """Remove a request, whether it waits or runs, and give back what it has."""
        for requests in (self.waiting, self.running, self.searching):
            if request in requests:
                requests.remove(request)
        for row in request.rows:
            self.give_back_row(row)
        if request.source_number is not None:
            self.sources.drop(request.source_number)
            request.source_number, request.is_encoded = None, False

    def give_back_row(self, row: Row) -> None:
        if row.number is not None:
            self.pages.drop(row.number)
            row.number = None

    # -- one step -------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[list[RowPass], PageCopies]:
        """Choose the tokens of the next step, and reserve their pages; return also the pages to copy before."""
        self._admit()
        while self.running:
            passes = self._select_passes()
            try:
                numbers, counts = [one.row.place for one in passes], [len(one.tokens) for one in passes]
                return passes, self.pages.reserve(numbers, counts)
            except OutOfPages:
                self._preempt(self.running)
        return [], PageCopies([], [], [])

    def _select_passes(self) -> list[RowPass]:
        rows = [row for request in self.running if request.is_started for row in request.running_rows]
        rows += [request.rows[0] for request in self.running if not request.is_started]
        starts = self.pages.lengths[[row.place for row in rows]].tolist()
        pending = [len(row.tokens) - start for row, start in zip(rows, starts, strict=True)]
        # The beams of a search advance together, so none runs its newest token before the others have caught up.
        behind = [row.request for row, count in zip(rows, pending, strict=True) if count > 1]
        held = {request for request in behind if request.is_beam_search and request.is_started}
        passes, left = [], self.step_tokens
        for row, start, count in zip(rows, starts, pending, strict=True):
            request, wanted = row.request, count
            if request in held:
                wanted -= 1
            if wanted > 1:
                wanted = min(wanted, left, self.chunk or wanted)
                left -= wanted
            if wanted > 0:
                is_scored = request.settings.score_prompt and not request.is_started
                num_logits = wanted if is_scored else int(wanted == count)
                passes.append(RowPass(row, row.tokens[start : start + wanted], start, num_logits))
        self.num_prompt_tokens = self.step_tokens - left
        return passes

    # -- admission and preemption ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        index, awaited = 0, self.searching[0].search_shape if self.searching else None
        shape = awaited
        rows = sum(len(one.rows) for one in (*self.running, *self.searching))
        spare = self._num_running_rows() if self.waiting else 0  # each may soon need a page
        while index < len(self.waiting):
            request = self.waiting[index]
            is_recorded = request.search_shape is not None
            if is_recorded and request.search_shape == awaited:
                index += 1
                continue
            fits = rows + len(request.rows) <= self.max_rows
            holders = self.running if fits else [*self.running, *self.searching]
            if fits and is_recorded and shape in (None, request.search_shape):
                self.searching.append(self.waiting.pop(index))
                shape, rows = request.search_shape, rows + len(request.rows)
            elif fits and self._place(request, spare):
                self.running.append(self.waiting.pop(index))
                rows, spare = rows + len(request.rows), spare + len(request.running_rows)
            elif any(one.settings.priority < request.settings.priority for one in holders):
                rows -= len(self._preempt(holders).rows)
                spare = self._num_running_rows()
            else:
                return

    def _num_running_rows(self) -> int:
        return sum(len(one.running_rows) for one in self.running)

    def _place(self, request: Request, spare: int) -> bool:
        """Give rows to a request, with the prefixes that are there already; return whether its pages fit.

        They fit if `spare` pages are left.
        """
        rows = request.running_rows if request.is_started else request.rows[:1]
        found = [self._find_prefix(row) for row in rows]
        idle = sum(page in self.pages.idle for page in {page for prefix in found for page in prefix})
        needed = sum(pages_of(len(row.tokens) + 1) - len(prefix) for row, prefix in zip(rows, found, strict=True))
        source = pages_of(len(request.prompt.source or ()))
        if needed + spare > self.pages.num_free - idle or source > self.sources.num_free:
            return False
        for row, prefix in zip(rows, found, strict=True):
            row.number = self.pages.add_row(prefix)
            self.num_prefix_tokens += len(prefix) * PAGE_SIZE
        if not request.is_started:
            request.num_cached = len(found[0]) * PAGE_SIZE
        if request.prompt.source is not None:
            request.source_number = self.sources.add_row()
            self.sources.reserve([request.source_number], [len(request.prompt.source)])
        return True

    def _find_prefix(self, row: Row) -> list[int]:
        """Return published pages with the first tokens of a row; its last token is never among them."""
        request = row.request
        is_read = request.settings.score_prompt or request.variant.capture  # every token has to be run
        if not self.reuses_prefixes or is_read or not self.pages.page_of:
            return []
        # The beams of a search exchange their tokens, but not those of the prompt.
        tokens = request.prompt.ids if request.is_beam_search else row.tokens
        return self.pages.find(row.page_digests((len(tokens) - 1) // PAGE_SIZE))

    def _preempt(self, requests: Sequence[Request]) -> Request:
        """Let the last of these running requests that have the lowest priority wait again, and return it."""
        last = min(reversed(requests), key=lambda request: request.settings.priority)
        self.drop(last)
        self.add(last)
        self.num_preemptions += 1
        if not last.is_started:  # its prompt will be run, and scored, from the beginning
            last.prompt_scores = []
        return last

    # -- after a step ---------------------------------------------------------------------------------------------

    def commit(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Count new tokens that have been run, and publish the pages that are full now."""
        numbers = [row.place for row in rows]
        self.pages.advance(numbers, counts)
        if not self.reuses_prefixes:
            return
        ends = self.pages.lengths[numbers]
        first, last = (ends - counts) // PAGE_SIZE, ends // PAGE_SIZE
        for place in np.flatnonzero(first < last).tolist():
            row = rows[place]
            if row.request.is_beam_search and row.request.is_started:
                continue
            for index in range(first[place], last[place]):
                self.pages.publish(numbers[place], index, row.page_digests(index + 1)[index])


def pages_of(length: int) -> int:
    return -(-length // PAGE_SIZE)


def _order(request: Request) -> tuple[int, int]:
    return -request.settings.priority, request.id
