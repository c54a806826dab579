"""The decoding engine: requests of every shape come and go, and are decoded in one batch.

    engine = Engine(mb.optimize(model))
    request_id = engine.add((5, 7, 11), Settings(max_new_tokens=20))
    while engine.busy:
        for output in engine.step():
            ...

It puts four things together: the `Scheduler` decides which tokens run next, `Pages` say where their keys and values
are, a `Runner` computes logits, and the `Sampler` chooses tokens.  Samples of one prompt are rows that share pages,
beams are rows that are regrouped after each step, and proposals of speculative decoding are further tokens in the pass
of a row.  A step commits at its end or not at all.  On a GPU, plain beam searches need no pages: those of one shape run
together in recorded steps (runners/cuda_search.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from monoblock.errors import InputError, did_you_mean
from monoblock.inference.beam import BeamHypothesis, BeamSearches
from monoblock.inference.optimized import GenerativeModel, OptimizedModel, optimize
from monoblock.inference.pages import OutOfPages, PageCopies, Pages, default_num_pages
from monoblock.inference.runners.cuda import MAX_STEPS, CudaRunner
from monoblock.inference.runners.cuda_search import search_shape
from monoblock.inference.runners.plain import Ensemble, ModelRunner, Runner, RunResult, UncachedRunner
from monoblock.inference.sampler import Sampler, score_tokens
from monoblock.inference.scheduler import (
    MAX_STEP_TOKENS,
    NAN_LOGITS,
    PLAIN,
    Edit,
    Plan,
    Request,
    RequestOutput,
    Row,
    RowPass,
    Scheduler,
    TokenScores,
    Variant,
    check_prompt,
    combine_limits,
    end_of_text,
    limits_of,
    pages_of,
    parse_prompt,
)
from monoblock.inference.settings import Settings, check_count
from monoblock.inference.speculative import Proposer, make_self_draft
from monoblock.inference.streaming_text import StreamingText
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer
from monoblock.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")
GREEDY = Settings()
DRAFT_NEEDS_CACHE = "speculative decoding needs the key/value cache; write use_cache=True, or leave out the draft"
NO_DRAFT_WITH_ENSEMBLE = "speculative decoding takes a single model; leave out the draft or the ensemble"
MAX_BURST = 16  # steps that a GPU runs before tokens are read: after an end token, the rest is in vain


@dataclass
class Choice:
    """What has been run in a step and what comes next; `Engine._commit` makes it true."""

    passes: Sequence[RowPass]
    captured: dict[Row, dict[str, Tensor]]
    tokens: dict[Row, list[int]] = field(default_factory=dict)
    proposed: dict[Row, list[int]] = field(default_factory=dict)
    scores: dict[Row, list[TokenScores]] = field(default_factory=dict)
    prompt_scores: dict[Request, list[TokenScores]] = field(default_factory=dict)
    origins: dict[Request, list[int]] = field(default_factory=dict)  # the beams that those of a search continue
    failed: dict[Request, Exception] = field(default_factory=dict)


def _take_rows(logits: Tensor, index: list[int]) -> Tensor:
    """Return these rows of logits, which are seldom others than all."""
    return logits if index == list(range(len(logits))) else logits[index]


def _select(passes: Sequence[RowPass], some: Sequence[Request], requests: Sequence[Request]) -> Sequence[RowPass]:
    """Return the passes of some of these requests, which are seldom others than all."""
    return passes if some is requests else [one for one in passes if one.row.request in some]


def _choose_exact(model: GenerativeModel, exact: bool | None, *, others: bool) -> GenerativeModel:
    """Return the model to decode: an exact copy of a plain model if `exact` asks for it."""
    is_exact = isinstance(model, OptimizedModel) and model.exact
    if isinstance(model, OptimizedModel) and exact is not None and exact != is_exact:
        wanted = "optimize(model, exact=True)" if exact else "optimize(model)"
        raise InputError(f"exact={exact} does not fit this optimized model; give the engine mb.{wanted}")
    if others and (exact or is_exact):
        raise InputError("an exact engine has one model, without an ensemble and adapters; leave them out, or exact")
    return optimize(model, exact=True) if exact and not is_exact else model  # type: ignore[arg-type]


def _propose_for(proposer: Proposer, rows: Sequence[Row], requests: Sequence[Request]) -> dict[Row, list[int]]:
    """Return what a proposer proposes for each row of these requests, if it does."""
    rows = [row for row in rows if row.request in requests]
    proposals = proposer.propose(rows, [row.num_left - 1 for row in rows])
    return {row: tokens for row, tokens in zip(rows, proposals, strict=True) if tokens}


class Engine:
    """Decode requests together, at most `max_rows` sequences at a time.

    capacity: the maximum number of tokens in a sequence, prompt included; by default the model's context.
    num_pages: the size of the key/value cache in pages of 16 tokens; by default what `max_rows` sequences may need, but
        at most a share of the memory.
    prefill_chunk: the maximum number of prompt tokens in one step; by default the whole prompt.
    reuses_prefixes: whether a prompt may begin with the keys and values of an earlier one with the same first tokens.
    proposer: proposes tokens for speculative decoding, for all requests that do not search with beams.
    max_burst: the maximum number of steps that a GPU runs before Python reads the tokens.
    tap: a function that observes or replaces activations, see nn/tap.py.
    ensemble: further models with the same vocabulary, whose log-probabilities are averaged with those of `model`.
    adapters: by name, models with the same weights and an adapter (`add` takes the name).
    tokenizer: decodes tokens, for `Settings.stop`.
    exact: whether the bits of every logit depend on its request alone (see exact.py); by default as `model` is.
    """

    def __init__(
        self,
        model: GenerativeModel,
        *,
        max_rows: int = 64,
        capacity: int | None = None,
        num_pages: int | None = None,
        use_cache: bool = True,
        prefill_chunk: int | None = None,
        reuses_prefixes: bool = True,
        proposer: Proposer | None = None,
        max_burst: int = MAX_BURST,
        tap: Tap | None = None,
        ensemble: Sequence[GenerativeModel] = (),
        adapters: Mapping[str, Transformer] | None = None,
        tokenizer: Tokenizer | None = None,
        exact: bool | None = None,
    ) -> None:
        model = _choose_exact(model, exact, others=bool(ensemble or adapters))
        options = {"max_rows": max_rows, "max_burst": max_burst}
        optional = {"capacity": capacity, "prefill_chunk": prefill_chunk, "num_pages": num_pages}
        for name, value in (options | {name: one for name, one in optional.items() if one is not None}).items():
            check_count(name, value, 1)
        if not hasattr(ensemble, "__len__"):
            raise InputError("ensemble is not a list of models; write ensemble=[second, third]")
        if proposer is not None and not isinstance(proposer, Proposer):
            raise InputError(f"proposer={proposer!r:.60} proposes no tokens; write PromptLookup() or DraftModel(model)")
        if proposer is not None and not use_cache:
            raise InputError(DRAFT_NEEDS_CACHE)
        if proposer is not None and ensemble:
            raise InputError(NO_DRAFT_WITH_ENSEMBLE)
        if tap is not None and not callable(tap):
            raise InputError(f"tap={tap!r:.60} is not valid; write a function (name, activation) -> activation or None")
        if not isinstance(adapters, Mapping | None):
            raise InputError("adapters is not a dictionary; write adapters={'name': model}")
        models = [model, *ensemble]
        plain = [one.plain if isinstance(one, OptimizedModel) else one for one in models]
        for name, adapted in (adapters or {}).items():
            if limits_of(adapted)[1:] != limits_of(plain[0])[1:]:
                raise InputError(f"the adapter {name!r} belongs to another model; give an adapted copy of this one")
        self.model, self.models = model, models
        self.is_exact = isinstance(model, OptimizedModel) and model.exact
        self.limits = combine_limits([limits_of(one) for one in plain])
        if proposer is not None:
            proposer.check_model(self.limits)
        limit = capacity if capacity is not None else self.limits.context
        if limit is None:
            raise InputError("this model has no maximum sequence length, so set one in tokens, such as capacity=1024")
        self.capacity = limit = min(limit, self.limits.context or limit)
        self.max_rows, self.max_burst, self.use_cache = max_rows, max_burst, use_cache
        count = default_num_pages(plain, limit, max_rows) if num_pages is None else num_pages + 1
        self.pages = Pages(count, max_rows)
        self.sources = Pages(1 + max_rows * pages_of(self.limits.max_source or 1 << 16), max_rows)
        # Modules may have changed when the engine has nothing to do, and a tap wants to see every token.
        self.keeps_prefixes = all(isinstance(one, OptimizedModel) for one in models) and not adapters
        reuses_prefixes = reuses_prefixes and use_cache and tap is None
        self.scheduler = Scheduler(
            self.pages, self.sources, max_rows=max_rows, chunk=prefill_chunk, reuses_prefixes=reuses_prefixes
        )
        runners: list[Runner] = []
        for one in models:
            if isinstance(one, OptimizedModel):
                if tap is not None or not use_cache:
                    option = "taps" if use_cache else "use_cache=False"
                    raise InputError(
                        f"an optimized model has no {option}; call the model itself, which runs its modules"
                    )
                runners.append(one.make_runner(self.pages, self.sources, adapters if one is model else None))
            else:
                kind = ModelRunner if use_cache else UncachedRunner
                own = adapters if one is model else None
                runners.append(kind(one, self.pages, self.sources, adapters=own, tap=tap))
        self.runner = runners[0] if len(runners) == 1 else Ensemble(runners)
        self.sampler = Sampler(self.limits.device)
        self.proposer, self.adapters, self.tokenizer = proposer, dict(adapters or {}), tokenizer
        self.drafts: dict[str, Proposer] = {}  # of requests with Settings.draft, by kind
        self.beams: list[BeamSearches] = []  # those of one shape that have begun together, or caught up
        self.texts: dict[Row, StreamingText] = {}  # of rows with stop strings
        self.unencoded: list[Request] = []  # admitted, but their sources are not encoded yet
        self.copies: list[PageCopies] = []  # of pages, to be made before the next pass
        self.last_request_id = 0

    # -- requests -------------------------------------------------------------------------------------------------

    def add(
        self,
        ids: Sequence[int],
        settings: Settings = GREEDY,
        source: Sequence[int] | None = None,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        edits: Sequence[Edit] = (),
        capture: Sequence[str] = (),
    ) -> int:
        """Queue a prompt and return the request's id.

        For an encoder-decoder `ids` are the first tokens of the target and `source` the tokens of the source.  A prompt
        or setting that this model cannot decode raises InputError here, so that it never affects other requests.

        salt: only requests with the same salt share the cached beginning of their prompts.
        adapter: the name of one of the engine's adapters.
        edits: changes of activations, what `mb.ablate`, `mb.patch` and `mb.add_vector` return.
        capture: names of activations to report with the tokens, as patterns such as "decoder.*.output".
        """
        prompt = parse_prompt(ids, source)
        check_prompt(prompt, self.limits, self.capacity)
        variant = self._check_variant(adapter, edits, capture)
        self._check(settings)
        budget = min(settings.max_new_tokens, self.capacity - len(prompt.ids))
        limit_reason = "length" if budget == settings.max_new_tokens else "context"
        if settings.num_beams > 1 and budget != settings.max_new_tokens:  # the search ends at the end of the context
            settings = replace(settings, max_new_tokens=budget, min_new_tokens=min(budget, settings.min_new_tokens))
        self.last_request_id += 1
        root = (salt, adapter, self.last_request_id if variant.edits else None)  # edits may change, so none are shared
        request = Request(self.last_request_id, prompt, settings, budget, limit_reason, variant, root)
        if self.scheduler.num_needed(request) > self.pages.count - 1:
            raise InputError(
                f"a prompt of {len(prompt.ids)} tokens with {budget} new ones in {len(request.rows)} rows needs "
                f"{self.scheduler.num_needed(request)} pages of the key/value cache, which has {self.pages.count - 1}; "
                f"shorten it, or give the engine more with num_pages"
            )
        if pages_of(len(prompt.source or ())) > self.sources.count - 1:
            raise InputError(f"a source of {len(prompt.source or ())} tokens is too long for this engine; shorten it")
        proposer = self._proposer_of(request)
        if proposer is not None:
            proposer.check_prompt(len(prompt.ids))
        if not self.busy and not self.keeps_prefixes:
            self.pages.forget()
        if isinstance(self.runner, CudaRunner) and not (self.runner.has_experts or self.is_exact):
            is_short = len(prompt.ids) <= (self.scheduler.chunk or MAX_STEP_TOKENS)
            request.search_shape = search_shape(request) if is_short else None
        self.scheduler.add(request)
        return request.id

    def _check(self, settings: Settings) -> None:
        if not isinstance(settings, Settings):
            raise InputError(f"settings={settings!r:.60} is not valid; write mb.Settings(max_new_tokens=20)")
        settings.check_vocabulary(self.limits.vocab_size)
        if settings.rows_per_prompt > self.max_rows:
            raise InputError(
                f"one prompt with {settings.rows_per_prompt} beams or returned sequences does not fit in the engine's "
                f"{self.max_rows} rows; write max_rows={settings.rows_per_prompt} or more"
            )
        if settings.draft is not None and len(self.models) > 1:
            raise InputError(NO_DRAFT_WITH_ENSEMBLE)
        if settings.draft is not None and not self.use_cache:
            raise InputError(DRAFT_NEEDS_CACHE)
        if settings.num_beams > 1 and (settings.stop or settings.logprobs is not None):
            raise InputError("a beam search has no stop strings and no logprobs; leave them out, or write num_beams=1")
        if settings.stop and not hasattr(self.tokenizer, "decode"):
            raise InputError("stop strings need a tokenizer; write Engine(model, tokenizer=tokenizer)")

    def _check_variant(self, adapter: str | None, edits: Sequence[Edit], capture: Sequence[str]) -> Variant:
        edits, capture = (tuple(value) if isinstance(value, list | tuple) else (value,) for value in (edits, capture))
        if adapter is not None and (not isinstance(adapter, str) or adapter not in self.adapters):
            raise InputError(f"the engine has no adapter {adapter!r}{did_you_mean(str(adapter), list(self.adapters))}")
        if (edits or capture) and len(self.models) > 1:
            raise InputError("edits and capture look into a single model; leave out the ensemble")
        if (edits or capture) and self.is_exact:
            raise InputError(
                "edits and capture run the modules of the model, which are not exact; leave out exact=True"
            )
        for edit in edits:
            if not hasattr(edit, "apply"):
                raise InputError(
                    f"edits={edit!r:.60} is not an edit; write mb.ablate(…), mb.patch(…) or mb.add_vector(…)"
                )
        if not all(isinstance(name, str) for name in capture):
            raise InputError("capture takes names of activations; write capture=['decoder.*.output']")
        return Variant(adapter, edits, capture) if adapter is not None or edits or capture else PLAIN

    def _proposer_of(self, request: Request) -> Proposer | None:
        """Return what proposes tokens for a request: the engine's proposer, or the draft that its settings ask for."""
        kind = request.settings.draft
        if request.is_beam_search:
            return None
        if self.proposer is not None or kind is None:
            return self.proposer
        if kind not in self.drafts:
            draft = make_self_draft(self.model, kind)
            if draft is None:
                return None
            self.drafts[kind] = draft
        return self.drafts[kind]

    def cancel(self, request_id: int) -> None:
        """Drop a request, whether it is waiting or running."""
        self._end([one for one in (*self.scheduler.waiting, *self.running) if one.id == request_id])

    def _end(self, requests: Sequence[Request]) -> None:
        """Give back everything that these requests have."""
        self.unencoded = [one for one in self.unencoded if one not in requests]
        for searches in self.beams:
            searches.keep([index for index, one in enumerate(searches.requests) if one not in requests])
        self.beams = [searches for searches in self.beams if len(searches)]
        for request in requests:
            self.scheduler.drop(request)
            for proposer in (self.proposer, *self.drafts.values()):
                if proposer is not None:
                    proposer.forget(request)
            for row in request.rows:
                self.texts.pop(row, None)

    @property
    def running(self) -> list[Request]:
        """The requests that run: those in pages, and then recorded searches, in the order of their admission."""
        return [*self.scheduler.running, *self.scheduler.searching]

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.scheduler.searching)

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the new tokens.

        Every running request gets its next token or, with accepted proposals or on a GPU, several; waiting requests are
        admitted.  A request that fails ends with the finish reason "error"; the others are not affected.  A step that
        is interrupted, as by Ctrl-C, is void: the next one goes on from the tokens returned before it.
        """
        with self._all_or_nothing(), self.runner.inference():
            plan = self.scheduler.plan()
            self.unencoded += plan.admitted
            self.copies.append(plan.copies)
            ended = self._run_searches()
            if not plan.passes:
                return self._end_searches(ended)
            if (choice := self._burst(plan)) is not None:
                return [*self._end_searches(ended), *self._commit(choice)]
            proposed, failed = self._propose(plan.passes)
            passes = plan.passes
            if proposed or failed:
                passes = [self._with_proposals(one, proposed) for one in passes if one.row.request not in failed]
            requests = list(dict.fromkeys(one.row.request for one in passes))
            done = self._bisect(requests, lambda some: self._run(_select(passes, some, requests)), failed)
            outputs = self._end_searches(ended)
            outputs += [output for problem in failed.items() for output in self._fail(*problem)]
            for part in done:
                outputs += self._commit(self._choose(*part, proposed))
            return outputs

    def _bisect(
        self, requests: Sequence[Request], call: Callable[[Sequence[Request]], T], failed: dict[Request, Exception]
    ) -> list[T]:
        """Return the results of a call for all requests; if it fails, call it for parts of them.

        Those for which it fails alone are added to `failed`, so that they do not affect the others.
        """
        try:
            return [call(requests)] if requests else []
        except Exception as problem:
            if len(requests) == 1:
                failed[requests[0]] = problem
                return []
        middle = len(requests) // 2
        return [
            *self._bisect(requests[:middle], call, failed),
            *self._bisect(requests[middle:], call, failed),
        ]

    def _burst(self, plan: Plan) -> Choice | None:
        """Let the GPU run several steps before the tokens are read; return None if a step needs Python."""
        if not isinstance(self.runner, CudaRunner) or not plan.is_decoding:
            return None
        rows = [one.row for one in plan.passes]
        count = min(self.max_burst, MAX_STEPS, *(row.num_left for row in rows))
        if count == 1 or any(row.request.is_beam_search or row.request.settings.logprobs is not None for row in rows):
            return None
        filters = self.sampler.filters_of(rows)
        if not filters.is_stateless or any(self._proposer_of(row.request) is not None for row in rows):
            return None
        try:
            self.copies.append(self.pages.reserve([row.place for row in rows], [count] * len(rows)))
        except OutOfPages:
            return None
        self._copy_pages()
        chosen = self.runner.burst(plan.passes, count, filters)
        if chosen is None:
            return None
        tokens = dict(zip(rows, chosen, strict=True))
        proposed = {row: own[:-1] for row, own in tokens.items()}  # all but the last have been run, as if accepted
        passes = [self._with_proposals(one, proposed) for one in plan.passes]
        return Choice(passes, {}, tokens=tokens, proposed=proposed)

    def _copy_pages(self) -> None:
        while self.copies:
            self.runner.copy_pages(self.copies[0])
            self.copies.pop(0)

    def _propose(self, passes: Sequence[RowPass]) -> tuple[dict[Row, list[int]], dict[Request, Exception]]:
        """Return proposals for rows that run their newest token, with pages reserved, and the requests that failed."""
        rows: dict[Proposer, list[Row]] = {}
        started = {one.row.request: None for one in passes if one.row.request.is_started}
        proposers = {request: self._proposer_of(request) for request in started if not request.variant.needs_own_pass}
        for one in passes if any(proposers.values()) else ():
            proposer = proposers.get(one.row.request)
            if proposer is not None and one.is_newest and one.row.num_left > 1:
                rows.setdefault(proposer, []).append(one.row)
        proposed, failed = dict[Row, list[int]](), dict[Request, Exception]()
        for proposer, own in rows.items():
            propose = partial(_propose_for, proposer, own)
            for part in self._bisect(list(dict.fromkeys(row.request for row in own)), propose, failed):
                proposed |= part
        for row, tokens in list(proposed.items()):
            try:
                self.copies.append(self.pages.reserve([row.place], [1 + len(tokens)]))
            except OutOfPages:
                del proposed[row]
        return proposed, failed

    @staticmethod
    def _with_proposals(one: RowPass, proposed: Mapping[Row, Sequence[int]]) -> RowPass:
        more = proposed.get(one.row)
        return one if not more else one._replace(tokens=[*one.tokens, *more], num_logits=1 + len(more))

    def _run(self, passes: Sequence[RowPass]) -> tuple[Sequence[RowPass], RunResult]:
        self._copy_pages()
        if self.unencoded:
            here = {one.row.request for one in passes}
            new = [request for request in self.unencoded if request in here]
            if new and self.limits.has_encoder:
                self.runner.encode(new)
            self.unencoded = [request for request in self.unencoded if request not in here]
        return passes, self.runner.run(passes)

    def _fail(self, request: Request, problem: Exception) -> list[RequestOutput]:
        outputs = request.fail(problem)
        self._end([request])
        return outputs

    # -- choosing tokens ------------------------------------------------------------------------------------------

    def _choose(self, passes: Sequence[RowPass], result: RunResult, proposed: Mapping[Row, list[int]]) -> Choice:
        """Choose the next tokens of rows whose logits are there; nothing changes but the state of beam searches."""
        logits, choice = result.logits, Choice(passes, result.captured)
        place: dict[Row, int] = {}  # of the logits after the newest token of a row
        end = 0  # of the logits of a pass
        for one in passes:
            request, first, end = one.row.request, end, end + one.num_logits
            if request.settings.score_prompt and not request.is_started:
                labels = request.prompt.ids[one.start + 1 : one.start + 1 + one.num_logits]
                scored = logits[first : first + len(labels)]
                choice.prompt_scores[request] = score_tokens(scored, labels, request.settings.logprobs or 0)
                first = end - 1
            if one.start + len(one.tokens) < len(one.row.tokens):
                continue
            place[one.row] = first
            if not request.is_started:
                if bool(logits[first].isnan().any()):
                    choice.failed[request] = InputError(NAN_LOGITS)
                place |= dict.fromkeys(request.rows, first)
        rows = [row for row in place if not row.request.is_beam_search and row.request not in choice.failed]
        if rows:
            self._choose_tokens(choice, rows, place, proposed, logits)
        if searching := list(dict.fromkeys(row.request for row in place if row.request.is_beam_search)):
            self._choose_beams(choice, [one for one in searching if one not in choice.failed], place, logits)
        return choice

    def _choose_tokens(
        self,
        choice: Choice,
        rows: list[Row],
        place: Mapping[Row, int],
        proposed: Mapping[Row, list[int]],
        logits: Tensor,
    ) -> None:
        tokens = [proposed.get(row, []) for row in rows]
        index = [place[row] + n for row, more in zip(rows, tokens, strict=True) for n in range(1 + len(more))]
        seen = _take_rows(logits, index)
        chosen, failed = self.sampler.accept(rows, tokens, seen.float())
        choice.failed |= {rows[index].request: problem for index, problem in failed.items()}
        first = 0
        for row, more, own in zip(rows, tokens, chosen, strict=True):
            choice.tokens[row], choice.proposed[row] = own, more
            if row.request.settings.logprobs is not None and own:
                choice.scores[row] = score_tokens(seen[first : first + len(own)], own, row.request.settings.logprobs)
            first += 1 + len(more)

    # -- beam search ----------------------------------------------------------------------------------------------

    def _choose_beams(self, choice: Choice, requests: list[Request], place: Mapping[Row, int], logits: Tensor) -> None:
        """Advance the searches of these requests by one token."""
        for request in requests:
            if not request.is_started:
                self._begin_search(request, requests)
        for searches in list(self.beams):
            is_ready = [request in requests for request in searches.requests]
            if not any(is_ready):
                continue
            if not all(is_ready):  # the others wait for pages
                self.beams.append(copy.copy(searches))
                self.beams[-1].keep([index for index, ready in enumerate(is_ready) if not ready])
                searches.keep([index for index, ready in enumerate(is_ready) if ready])
            rows = [row for request in searches.requests for row in request.rows]
            seen = _take_rows(logits, [place[row] for row in rows]).float()
            filters = self.sampler.filters_of(rows)
            counts = [length for length in searches.lengths for _ in range(searches.num_beams)]
            suppressed = filters.suppressed_tokens(counts)
            if suppressed is not None and searches.groups == 1:
                origins = searches.advance(seen, suppressed)
            else:
                log_probs, failed = self.sampler.constrain(rows, seen.log_softmax(-1))
                choice.failed |= {rows[index].request: problem for index, problem in failed.items()}
                origins = searches.advance(log_probs, normalized=True)
            choice.origins |= dict(zip(searches.requests, origins.tolist(), strict=True))

    def _begin_search(self, request: Request, ready: list[Request]) -> None:
        """Add the search of a request to those of its shape that advance in this step."""
        shape = request.settings.num_beams, request.settings.num_beam_groups
        for searches in self.beams:
            if (searches.num_beams, searches.groups) == shape and all(one in ready for one in searches.requests):
                break
        else:
            searches = BeamSearches(*shape, self.limits.device)
            self.beams.append(searches)
        searches.add(request.settings, request.token_budget, request)

    def _run_searches(self) -> dict[Request, list[BeamHypothesis]]:
        """Run some recorded steps of searches without pages; return the best hypotheses of those that have ended.

        If the steps fail, the searches wait again, to run in pages.
        """
        requests = self.scheduler.searching
        if not requests or not isinstance(self.runner, CudaRunner):
            return {}
        try:
            return self.runner.memory.searches.step(requests)
        except Exception:
            self.scheduler.searching = []
            for request in requests:
                request.search_shape = None
                self.scheduler.add(request)
            return {}

    def _end_searches(self, ended: Mapping[Request, Sequence[BeamHypothesis]]) -> list[RequestOutput]:
        self.scheduler.searching = [request for request in self.scheduler.searching if request not in ended]
        return [output for one in ended.items() for output in self._beam_outputs(*one)]

    # -- committing -----------------------------------------------------------------------------------------------

    def _commit(self, choice: Choice) -> list[RequestOutput]:
        """Count what has been run, append the chosen tokens, and return them."""
        outputs: list[RequestOutput] = []
        for request, scores in choice.prompt_scores.items():
            request.prompt_scores += scores
        events: dict[Row, RequestOutput] = {}
        for row, tokens in choice.tokens.items():
            try:
                if tokens and row.request not in choice.failed:
                    events[row] = self._append(row, tokens, choice)
            except Exception as problem:  # of the tokenizer
                choice.failed[row.request] = problem
        for failed in choice.failed.items():
            outputs += self._fail(*failed)
        events = {row: event for row, event in events.items() if row.request not in choice.failed}
        passes = [one for one in choice.passes if one.row.number is not None]
        counts = [len(one.tokens) for one in passes]
        for index, one in enumerate(passes):
            if more := choice.proposed.get(one.row):  # those that were not accepted do not count
                counts[index] += len(events[one.row].tokens) - 1 - len(more)
        self.scheduler.commit([one.row for one in passes], counts)
        self._learn(choice)
        for one in passes:
            request = one.row.request
            if not request.is_started and (one.row in events or request in choice.origins):
                self._begin(request)
        for searches in self.beams:
            if searches.requests[0] in choice.origins:
                outputs += self._regroup(searches, choice.origins)
        self._end([request for request in choice.origins if request.is_done and request not in choice.failed])
        for one in passes if choice.captured else ():
            if one.row in choice.captured and one.row not in events:
                outputs.append(RequestOutput(one.row.request.id, one.row.index, (), captured=choice.captured[one.row]))
        outputs += events.values()
        for row in events:
            if row.finish_reason is not None:
                self.scheduler.give_back_row(row)
        self._end([request for request in dict.fromkeys(row.request for row in events) if request.is_done])
        return outputs

    def _append(self, row: Row, tokens: Sequence[int], choice: Choice) -> RequestOutput:
        """Append tokens to a row, up to the one that ends it, and return them as an output."""
        request, is_first = row.request, not row.num_new and not row.index
        new, reason = end_of_text(row, tokens)
        if request.settings.stop:
            new, reason = self._stop(row, new, reason)
        row.tokens += new
        row.finish_reason = reason
        prompt_scores = tuple(request.prompt_scores) if is_first else ()
        scores = tuple(choice.scores.get(row, ()))[: len(new)]
        captured = choice.captured.get(row)
        return RequestOutput(
            request.id, row.index, tuple(new), reason, scores=scores, prompt_scores=prompt_scores, captured=captured
        )

    def _stop(self, row: Row, new: list[int], reason: str | None) -> tuple[list[int], str | None]:
        """Return the tokens up to the one that completes a stop string, and the finish reason."""
        assert self.tokenizer is not None
        if row not in self.texts:
            self.texts[row] = StreamingText(self.tokenizer, row.request.settings.stop, row.request.prompt.ids)
        text = self.texts[row]
        for index, token in enumerate(new):
            text.add(token)
            if text.matched_stop is not None:
                return new[: index + 1], "stop"
        return new, reason

    def _learn(self, choice: Choice) -> None:
        rows: dict[Proposer, list[Row]] = {}
        for row, tokens in choice.tokens.items():
            proposer = self._proposer_of(row.request)
            if proposer is not None and tokens:
                rows.setdefault(proposer, []).append(row)
        for proposer, own in rows.items():
            accepted = [len(choice.tokens[row]) - 1 for row in own]
            proposer.learn(own, [choice.proposed.get(row, []) for row in own], accepted)

    def _begin(self, request: Request) -> None:
        """Give the other rows of a request the prompt that its first row has run."""
        request.is_started = True
        for row in request.running_rows:
            if row.number is None:
                row.number = self.pages.fork(request.rows[0].place)

    def _regroup(self, searches: BeamSearches, origins: Mapping[Request, Sequence[int]]) -> list[RequestOutput]:
        """Let the rows of requests continue the beams that their searches have chosen."""
        outputs, numbers, continued = list[RequestOutput](), list[int](), list[int]()
        last = iter(searches.last_tokens)
        for index, request in enumerate(searches.requests):
            tokens = [[*request.rows[origin].tokens, next(last)] for origin in origins[request]]
            if searches.is_done[index]:
                outputs += self._beam_outputs(request, searches.best_hypotheses(index))
            for row, own in zip(request.rows, tokens, strict=True):
                row.tokens = own
                row.finish_reason = "stop" if searches.is_done[index] else None
            places = [row.place for row in request.rows]
            numbers += places
            continued += [places[origin] for origin in origins[request]]
        self.pages.regroup(numbers, continued)
        return outputs

    @staticmethod
    def _beam_outputs(request: Request, hypotheses: Sequence[BeamHypothesis]) -> list[RequestOutput]:
        """Return the outputs of a finished beam search: the best hypotheses, and empty ones if there are too few."""
        outputs = []
        for index, (tokens, score) in enumerate(hypotheses):
            reason = "stop" if tokens and tokens[-1] in request.settings.eos_token_id else request.limit_reason
            outputs.append(RequestOutput(request.id, index, tuple(tokens), reason, score))
        missing = range(len(outputs), request.settings.num_return_sequences)
        outputs += [RequestOutput(request.id, index, (), "no_hypothesis") for index in missing]
        return [outputs[0]._replace(prompt_scores=tuple(request.prompt_scores)), *outputs[1:]]

    # -- all or nothing -------------------------------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo what the block has changed if it does not reach its end."""
        saved = self._save()
        try:
            yield
        except BaseException:
            self._restore(*saved)
            raise

    def _save(self) -> tuple[Any, ...]:
        scheduler = self.scheduler
        requests = [*scheduler.running, *(one for one in scheduler.waiting if one.is_started)]
        rows = [(row, vars(row).copy(), len(row.tokens)) for request in requests for row in request.rows]
        texts = [(row, text, {**vars(text), "ids": [*text.ids]}) for row, text in self.texts.items()]
        beams = [(searches, searches.snapshot()) for searches in self.beams]
        own = [(request, vars(request).copy(), len(request.prompt_scores)) for request in requests]
        lists = [*scheduler.waiting], [*scheduler.running], [*scheduler.searching], [*self.unencoded], [*self.copies]
        return self.pages.save(), self.sources.save(), lists, rows, own, texts, beams

    def _restore(self, pages: Any, sources: Any, lists: Any, rows: Any, own: Any, texts: Any, beams: Any) -> None:
        self.pages.restore(pages)
        self.sources.restore(sources)
        scheduler = self.scheduler
        scheduler.waiting, scheduler.running, scheduler.searching, self.unencoded, self.copies = lists
        for request in set(scheduler.waiting) - {request for request, *_ in own}:
            request.restart()
        for row, values, length in rows:
            vars(row).update(values)
            del row.tokens[length:], row.digests[length // PAGE_SIZE :]
        for request, values, length in own:
            vars(request).update(values)
            del request.prompt_scores[length:]
        self.texts = {row: text for row, text, _ in texts}
        for _, text, values in texts:
            vars(text).update(values)
        self.beams = [searches for searches, _ in beams]
        for searches, state in beams:
            searches.restore(state)
