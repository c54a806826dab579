"""The decoding engine: requests of every shape come and go, and are decoded in one batch.

    engine = Engine(mb.optimize(model))
    request_id = engine.add((5, 7, 11), Settings(max_new_tokens=20))
    while engine.busy:
        for output in engine.step():
            ...

It puts four things together: the `Scheduler` decides which tokens run next, `Pages` say where their keys and values
are, a `ModelRunner` computes logits, and the `Sampler` chooses tokens.  Samples of a prompt are rows that share pages,
beams are rows that are regrouped after each step, and proposals of speculative decoding are further tokens in the pass
of a row.  A step commits at its end or not at all.  On a GPU, plain beam searches need no pages: those of one shape run
together in recorded steps (runners/cuda_search.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from monoblock.errors import InputError, did_you_mean
from monoblock.inference.beam import BeamHypothesis, BeamSearches
from monoblock.inference.pages import OutOfPages, PageCopies, Pages, default_num_pages
from monoblock.inference.prepared_model import GenerativeModel, PreparedModel
from monoblock.inference.runners.cuda import MAX_STEPS, CudaRunner
from monoblock.inference.runners.cuda_search import search_shape
from monoblock.inference.runners.plain import Ensemble, ModelRunner, RunResult, UncachedRunner
from monoblock.inference.sampler import Sampler, score_tokens
from monoblock.inference.scheduler import (
    MAX_STEP_TOKENS,
    NAN_LOGITS,
    PLAIN,
    Edit,
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
Part = TypeVar("Part", Row, RowPass)
GREEDY = Settings()
DRAFT_NEEDS_CACHE = "speculative decoding needs the key/value cache; write use_cache=True, or leave out the draft"
NO_DRAFT_WITH_ENSEMBLE = "speculative decoding takes a single model; leave out the draft or the ensemble"
MAX_BURST = 16  # steps that a GPU runs before tokens are read: what follows an end token is wasted


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
        if isinstance(model, PreparedModel) and exact not in (None, model.exact):
            wanted = "optimize(model, exact=True)" if exact else "optimize(model)"
            raise InputError(f"exact={exact} does not fit this optimized model; give the engine mb.{wanted}")
        self.is_exact = bool(exact) or (isinstance(model, PreparedModel) and model.exact)
        if self.is_exact and (ensemble or adapters):
            raise InputError(
                "an exact engine has one model, without an ensemble and adapters; leave them out, or exact"
            )
        if exact and not isinstance(model, PreparedModel):
            model = PreparedModel(model, exact=True)
        optional = {"capacity": capacity, "prefill_chunk": prefill_chunk, "num_pages": num_pages}
        for name, value in ({"max_rows": max_rows, "max_burst": max_burst} | optional).items():
            if not (value is None and name in optional):
                check_count(name, value, 1)
        if not hasattr(ensemble, "__len__"):
            raise InputError("ensemble is not a list of models; write ensemble=[second, third]")
        if not isinstance(proposer, Proposer | None):
            raise InputError(f"proposer={proposer!r:.60} is not a proposer; write PromptLookup() or DraftModel(model)")
        if proposer is not None and (not use_cache or ensemble):
            raise InputError(NO_DRAFT_WITH_ENSEMBLE if use_cache else DRAFT_NEEDS_CACHE)
        if not (tap is None or callable(tap)):
            raise InputError(f"tap={tap!r:.60} is not valid; write a function (name, activation) -> activation or None")
        if not isinstance(adapters, Mapping | None):
            raise InputError("adapters is not a dictionary; write adapters={'name': model}")
        models = [model, *ensemble]
        plain = [one.plain if isinstance(one, PreparedModel) else one for one in models]
        for name, adapted in (adapters or {}).items():
            if limits_of(adapted)[1:] != limits_of(plain[0])[1:]:
                raise InputError(f"the adapter {name!r} belongs to another model; give an adapted copy of this one")
        self.model, self.models = model, models
        self.limits = combine_limits([limits_of(one) for one in plain])
        if proposer is not None:
            proposer.check_model(self.limits)
        limit = capacity if capacity is not None else self.limits.context
        if limit is None:
            raise InputError("this model has no maximum sequence length, so set one in tokens, such as capacity=1024")
        self.capacity = limit = min(limit, self.limits.context or limit)
        self.max_rows, self.max_burst, self.use_cache = max_rows, max_burst, use_cache
        self.pages = Pages(default_num_pages(plain, limit, max_rows) if num_pages is None else num_pages + 1, max_rows)
        self.sources = Pages(1 + max_rows * pages_of(self.limits.max_source or 1 << 16), max_rows)
        # Modules may have changed when the engine has nothing to do, and a tap wants to see every token.
        self.keeps_prefixes = all(isinstance(one, PreparedModel) for one in models) and not adapters
        reuses_prefixes = reuses_prefixes and use_cache and tap is None
        self.scheduler = Scheduler(
            self.pages, self.sources, max_rows=max_rows, chunk=prefill_chunk, reuses_prefixes=reuses_prefixes
        )
        runners: list[ModelRunner] = []
        for one in models:
            own = adapters if one is model else None
            if not isinstance(one, PreparedModel):
                kind = ModelRunner if use_cache else UncachedRunner
                runners.append(kind(one, self.pages, self.sources, adapters=own, tap=tap))
            elif tap is None and use_cache:
                runners.append(one.make_runner(self.pages, self.sources, own))
            else:
                option = "taps" if use_cache else "use_cache=False"
                raise InputError(f"an optimized model has no {option}; call the model itself, which runs its modules")
        self.runner = runners[0] if len(runners) == 1 else Ensemble(runners)
        self.sampler = Sampler(self.limits.device)
        self.proposer, self.adapters, self.tokenizer = proposer, dict(adapters or {}), tokenizer
        self.drafts: dict[str, Proposer | None] = {}  # of requests with Settings.draft, by kind
        self.beams: list[BeamSearches] = []  # those of one shape that have begun together, or caught up
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
        self._check_settings(settings)
        budget = min(settings.max_new_tokens, self.capacity - len(prompt.ids))
        limit_reason = "length" if budget == settings.max_new_tokens else "context"
        if settings.num_beams > 1 and budget != settings.max_new_tokens:  # the search ends at the end of the context
            settings = replace(settings, max_new_tokens=budget, min_new_tokens=min(budget, settings.min_new_tokens))
        self.last_request_id += 1
        root = (salt, adapter, self.last_request_id if variant.edits else None)  # edits may change, so none are shared
        request = Request(self.last_request_id, prompt, settings, budget, limit_reason, variant, root)
        needed, source_length = len(request.rows) * (pages_of(request.max_length) + 1), len(prompt.source or ())
        if needed > self.pages.count - 1:
            raise InputError(
                f"a prompt of {len(prompt.ids)} tokens with {budget} new ones in {len(request.rows)} rows needs "
                f"{needed} pages of the key/value cache, which has {self.pages.count - 1}; "
                f"shorten it, or give the engine more with num_pages"
            )
        if pages_of(source_length) > self.sources.count - 1:
            raise InputError(f"a source of {source_length} tokens is too long for this engine; shorten it")
        if not (request.is_beam_search or variant.needs_own_pass):
            kind, request.proposer = settings.draft, self.proposer
            if kind is not None and self.proposer is None:
                if kind not in self.drafts:
                    self.drafts[kind] = make_self_draft(self.model, kind)
                request.proposer = self.drafts[kind]
        if request.proposer is not None:
            request.proposer.check_prompt(len(prompt.ids))
        if not self.busy and not self.keeps_prefixes:
            self.pages.forget()
        is_short = len(prompt.ids) <= (self.scheduler.chunk or MAX_STEP_TOKENS)
        if is_short and isinstance(self.runner, CudaRunner) and not (self.runner.has_experts or self.is_exact):
            request.search_shape = search_shape(request)
        self.scheduler.add(request)
        return request.id

    def _check_settings(self, settings: Settings) -> None:
        if not isinstance(settings, Settings):
            raise InputError(f"settings={settings!r:.60} is not valid; write mb.Settings(max_new_tokens=20)")
        settings.check_vocabulary(self.limits.vocab_size)
        if settings.rows_per_prompt > self.max_rows:
            raise InputError(
                f"one prompt with {settings.rows_per_prompt} beams or returned sequences does not fit in the engine's "
                f"{self.max_rows} rows; write max_rows={settings.rows_per_prompt} or more"
            )
        if settings.draft is not None and (len(self.models) > 1 or not self.use_cache):
            raise InputError(NO_DRAFT_WITH_ENSEMBLE if len(self.models) > 1 else DRAFT_NEEDS_CACHE)
        if settings.num_beams > 1 and (settings.stop or settings.logprobs is not None):
            raise InputError("a beam search has no stop strings and no logprobs; leave them out, or write num_beams=1")
        if settings.stop and not hasattr(self.tokenizer, "decode"):
            raise InputError("stop strings need a tokenizer; write Engine(model, tokenizer=tokenizer)")

    def _check_variant(self, adapter: str | None, edits: Sequence[Edit], capture: Sequence[str]) -> Variant:
        edits, capture = (tuple(value) if isinstance(value, list | tuple) else (value,) for value in (edits, capture))
        if adapter is not None and (not isinstance(adapter, str) or adapter not in self.adapters):
            raise InputError(f"the engine has no adapter {adapter!r}{did_you_mean(str(adapter), list(self.adapters))}")
        if not (edits or capture):
            return PLAIN if adapter is None else Variant(adapter)
        if len(self.models) > 1:
            raise InputError("edits and capture look into a single model; leave out the ensemble")
        if self.is_exact:
            raise InputError(
                "edits and capture run the modules of the model, which are not exact; leave out exact=True"
            )
        wrong = next((edit for edit in edits if not hasattr(edit, "apply")), None)
        if wrong is not None:
            raise InputError(f"edits={wrong!r:.60} is not an edit; write mb.ablate(…), mb.patch(…) or mb.add_vector(…)")
        if not all(isinstance(name, str) for name in capture):
            raise InputError("capture takes names of activations; write capture=['decoder.*.output']")
        return Variant(adapter, edits, capture)

    def cancel(self, request_id: int) -> None:
        """Drop a request, whether it is waiting or running."""
        self._end([one for one in (*self.scheduler.waiting, *self.running) if one.id == request_id])

    def _end(self, requests: Sequence[Request]) -> None:
        """Give back everything that these requests have."""
        for searches in self.beams if requests else ():
            searches.keep([index for index, one in enumerate(searches.requests) if one not in requests])
        self.beams = [searches for searches in self.beams if len(searches)]
        for request in requests:
            self.scheduler.drop(request)
            if request.proposer is not None:
                request.proposer.forget(request)
                request.proposer = None

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
            passes, copies = self.scheduler.plan()
            self.copies = [copies]
            outputs = self._run_searches()
            if not passes:
                return outputs
            if (found := self._burst(passes)) is not None:
                return [*outputs, *found]
            failed: dict[Request, Exception] = {}
            proposed = self._propose(passes, failed)
            if proposed or failed:
                passes = [_with_proposals(one, proposed) for one in passes if one.request not in failed]
            done = self._bisect(passes, self._run, failed)
            outputs += [output for problem in failed.items() for output in self._fail(*problem)]
            for some, result in done:
                outputs += self._choose(some, result, proposed)
            return outputs

    def _bisect(
        self, parts: Sequence[Part], call: Callable[[Sequence[Part]], T], failed: dict[Request, Exception]
    ) -> list[T]:
        """Return the results of a call for rows or passes; if it fails, call it for those of some requests at a time.

        Requests for which it fails alone are added to `failed`, so that they do not affect the others.
        """
        try:
            return [call(parts)] if parts else []
        except Exception as problem:
            requests = list(dict.fromkeys(part.request for part in parts))
            if len(requests) == 1:
                failed[requests[0]] = problem
                return []
        halves: tuple[list[Part], list[Part]] = [], []
        for part in parts:
            halves[requests.index(part.request) >= len(requests) // 2].append(part)
        return [result for half in halves for result in self._bisect(half, call, failed)]

    def _run(self, passes: Sequence[RowPass]) -> tuple[Sequence[RowPass], RunResult]:
        self._copy_pages()
        if self.limits.has_encoder:
            new = [one for one in dict.fromkeys(one.row.request for one in passes) if not one.is_encoded]
            if new:
                self.runner.encode(new)
            for request in new:
                request.is_encoded = True
        return passes, self.runner.run(passes)

    def _copy_pages(self) -> None:
        while self.copies:
            self.runner.copy_pages(self.copies[0])
            self.copies.pop(0)

    def _fail(self, request: Request, problem: Exception) -> list[RequestOutput]:
        outputs = request.fail(problem)
        self._end([request])
        return outputs

    # -- several tokens in a step ---------------------------------------------------------------------------------

    def _burst(self, passes: Sequence[RowPass]) -> list[RequestOutput] | None:
        """Let the GPU run several steps before the tokens are read; return None if a step needs Python."""
        if not isinstance(self.runner, CudaRunner):
            return None
        rows = [one.row for one in passes]
        for one in passes:
            request = one.row.request
            reads_every_step = request.is_beam_search or request.proposer or request.settings.logprobs is not None
            if reads_every_step or not (request.is_started and one.is_newest):
                return None
        # Rows that end within the burst run on in page 0, which nobody reads, as far as the context goes.
        left, room = [row.num_left for row in rows], min(self.capacity - len(row.tokens) for row in rows)
        count, filters = min(self.max_burst, MAX_STEPS, max(left), room), self.sampler.filters_of(rows)
        if count == 1 or not filters.is_stateless:
            return None
        try:
            self.copies.append(self.pages.reserve([row.place for row in rows], [min(count, own) for own in left]))
        except OutOfPages:
            return None
        self._copy_pages()
        chosen = self.runner.burst(passes, count, filters)
        if chosen is None:
            return None
        tokens = dict(zip(rows, chosen, strict=True))
        proposed = {row: own[:-1] for row, own in tokens.items()}  # all but the last have been run, as if accepted
        return self._commit([_with_proposals(one, proposed) for one in passes], tokens, proposed)

    def _propose(self, passes: Sequence[RowPass], failed: dict[Request, Exception]) -> dict[Row, list[int]]:
        """Return proposals for rows that run their newest token, with pages reserved for them."""
        rows: dict[Proposer, list[Row]] = {}
        for one in passes:
            request = one.row.request
            if request.proposer is not None and request.is_started and one.is_newest and one.row.num_left > 1:
                rows.setdefault(request.proposer, []).append(one.row)
        proposed: dict[Row, list[int]] = {}
        for proposer, own in rows.items():
            for found in self._bisect(own, proposer.propose_for, failed):
                for row, tokens in found.items():
                    try:
                        if tokens:
                            self.copies.append(self.pages.reserve([row.place], [1 + len(tokens)]))
                            proposed[row] = tokens
                    except OutOfPages:
                        pass  # proposals change only the speed
        return proposed

    # -- choosing tokens ------------------------------------------------------------------------------------------

    def _choose(
        self, passes: Sequence[RowPass], result: RunResult, proposed: Mapping[Row, list[int]]
    ) -> list[RequestOutput]:
        """Choose the next tokens of the rows whose logits are there, and return them."""
        logits, failed, begun = result.logits, dict[Request, Exception](), dict[Request, int]()
        place: dict[Row, int] = {}  # of the logits after the newest token of a row
        end = 0  # of the logits of a pass
        for one in passes:
            request, first, end = one.row.request, end, end + one.num_logits
            if request.settings.score_prompt and not request.is_started:
                labels = request.prompt.ids[one.start + 1 : one.start + 1 + one.num_logits]
                scores = score_tokens(logits[first : first + len(labels)], labels, request.settings.logprobs or 0)
                request.prompt_scores = [*request.prompt_scores, *scores]
                first = end - 1
            if one.start + len(one.tokens) < len(one.row.tokens):
                continue
            place[one.row] = first
            if not request.is_started:
                begun[request] = first
                place |= dict.fromkeys(request.rows, first)
        if begun:
            is_damaged = _take_rows(logits, list(begun.values())).isnan().any(-1).tolist()
            failed = {one: InputError(NAN_LOGITS) for one, damaged in zip(begun, is_damaged, strict=True) if damaged}
        rows = [row for row in place if row.request not in failed]
        searching = [row.request for row in rows if row.request.is_beam_search]
        tokens, scored = dict[Row, list[int]](), dict[Row, list[TokenScores]]()
        if len(searching) < len(rows):
            rows = [row for row in rows if not row.request.is_beam_search] if searching else rows
            ahead = [proposed.get(row, ()) for row in rows]
            index = [place[row] + n for row, more in zip(rows, ahead, strict=True) for n in range(1 + len(more))]
            seen = _take_rows(logits, index)
            chosen, problems = self.sampler.accept(rows, ahead, seen.float())
            failed |= {rows[index].request: problem for index, problem in problems.items()}
            tokens, first = dict(zip(rows, chosen, strict=True)), 0
            for row, more, own in zip(rows, ahead, chosen, strict=True):
                if row.request.settings.logprobs is not None and own:
                    scored[row] = score_tokens(seen[first : first + len(own)], own, row.request.settings.logprobs)
                first += 1 + len(more)
        outputs = self._commit(passes, tokens, proposed, scored, result.captured, failed)
        if searching:
            outputs += self._search(list(dict.fromkeys(searching)), place, logits)
        return outputs

    def _commit(
        self,
        passes: Sequence[RowPass],
        tokens: Mapping[Row, Sequence[int]],
        proposed: Mapping[Row, Sequence[int]],
        scores: Mapping[Row, Sequence[TokenScores]] | None = None,
        captured: Mapping[Row, dict[str, Tensor]] | None = None,
        failed: dict[Request, Exception] | None = None,
    ) -> list[RequestOutput]:
        """Count what has been run, append the chosen tokens, and return them."""
        scores, captured, failed = scores or {}, captured or {}, failed or {}
        events: dict[Row, RequestOutput] = {}
        learned: dict[Proposer, list[Row]] = {}
        for row, new in tokens.items():
            try:
                if new and row.request not in failed:
                    events[row] = self._append(row, new, scores.get(row, ()), captured.get(row))
                    if row.request.proposer is not None:
                        learned.setdefault(row.request.proposer, []).append(row)
            except Exception as problem:  # of the tokenizer
                failed[row.request] = problem
        outputs = [output for problem in failed.items() for output in self._fail(*problem)]
        if failed:
            events = {row: event for row, event in events.items() if row.request not in failed}
            passes = [one for one in passes if one.request not in failed]
        counts = [len(one.tokens) for one in passes]
        for index, one in enumerate(passes) if proposed else ():
            if more := proposed.get(one.row):  # those that were not accepted do not count
                counts[index] += len(events[one.row].tokens) - 1 - len(more)
        self.scheduler.commit([one.row for one in passes], counts)
        for proposer, rows in learned.items():
            proposer.learn(rows, [proposed.get(row, ()) for row in rows], [len(tokens[row]) - 1 for row in rows])
        for row, found in captured.items():
            if row not in events and row.request not in failed:
                outputs.append(RequestOutput(row.request.id, row.index, (), captured=found))
        for row in events:
            if not row.request.is_started:
                self._begin(row.request)
            if row.finish_reason is not None:
                self.scheduler.give_back_row(row)
        ended = dict.fromkeys(row.request for row in events if row.finish_reason is not None)
        self._end([request for request in ended if request.is_done])
        return [*outputs, *events.values()]

    def _append(
        self, row: Row, tokens: Sequence[int], scores: Sequence[TokenScores], captured: dict[str, Tensor] | None
    ) -> RequestOutput:
        """Append tokens to a row, up to the one that ends it, and return them as an output."""
        request, is_first = row.request, not row.num_new and not row.index
        new, reason = end_of_text(row, tokens)
        if request.settings.stop:
            assert self.tokenizer is not None
            if row.text is None:
                row.text = StreamingText(self.tokenizer, request.settings.stop, request.prompt.ids)
                if row.num_new:  # after an interrupt
                    row.text.add(*row.tokens[-row.num_new :])
            for index, token in enumerate(new):
                row.text.add(token)
                if row.text.matched_stop is not None:
                    new, reason = new[: index + 1], "stop"
                    break
        row.tokens += new
        row.finish_reason = reason
        about = _about_prompt(request) if is_first else {}
        return RequestOutput(
            request.id,
            row.index,
            tuple(new),
            reason,
            scores=tuple(scores[: len(new)]),
            captured=captured,
            **about,
        )

    def _begin(self, request: Request) -> None:
        """Give the other rows of a request the prompt that its first row has run."""
        request.is_started = True
        for row in request.running_rows:
            if row.number is None:
                row.number = self.pages.fork(request.rows[0].place)

    # -- beam search ----------------------------------------------------------------------------------------------

    def _search(self, requests: Sequence[Request], place: Mapping[Row, int], logits: Tensor) -> list[RequestOutput]:
        """Advance the searches of these requests by one token; their rows continue the beams that are chosen."""
        outputs: list[RequestOutput] = []
        for request in requests:
            if request.is_started:
                continue
            self._begin(request)
            shape = request.settings.num_beams, request.settings.num_beam_groups
            for searches in self.beams:  # those that advance in this step
                if (searches.num_beams, searches.groups) == shape and all(one in requests for one in searches.requests):
                    break
            else:
                searches = BeamSearches(*shape, self.limits.device)
                self.beams.append(searches)
            searches.add([request.settings], [request.token_budget], [request])
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
            suppressed, failed = filters.suppressed_tokens(counts), dict[int, Exception]()
            if suppressed is not None and searches.groups == 1:
                origins = searches.advance(seen, suppressed)
            else:
                log_probs, failed = self.sampler.constrain(rows, seen.log_softmax(-1))
                origins = searches.advance(log_probs, normalized=True)
            continued = dict(zip(searches.requests, origins.tolist(), strict=True))
            for request, problem in {rows[index].request: problem for index, problem in failed.items()}.items():
                outputs += self._fail(request, problem)
            outputs += self._regroup(searches, continued)
        return outputs

    def _regroup(self, searches: BeamSearches, origins: Mapping[Request, Sequence[int]]) -> list[RequestOutput]:
        """Let the rows of requests continue the beams that their searches have chosen."""
        outputs, numbers, continued, ended = list[RequestOutput](), list[int](), list[int](), list[Request]()
        last = iter(searches.last_tokens)
        for index, request in enumerate(searches.requests):
            tokens = [[*request.rows[origin].tokens, next(last)] for origin in origins[request]]
            for row, own in zip(request.rows, tokens, strict=True):
                row.tokens = own
            if searches.is_done[index]:
                outputs += _beam_outputs(request, searches.best_hypotheses(index))
                ended.append(request)
                continue
            places = [row.place for row in request.rows]
            numbers += places
            continued += [places[origin] for origin in origins[request]]
        self.pages.regroup(numbers, continued)
        self._end(ended)
        return outputs

    def _run_searches(self) -> list[RequestOutput]:
        """Run some recorded steps of searches without pages; return the best hypotheses of those that have ended.

        If the steps fail, the searches wait again, to run in pages.
        """
        requests = self.scheduler.searching
        if not requests or not isinstance(self.runner, CudaRunner):
            return []
        try:
            ended = self.runner.memory.searches.step(requests)
        except Exception:
            self.scheduler.searching = []
            for request in requests:
                request.search_shape = None
                self.scheduler.add(request)
            return []
        self.scheduler.searching = [request for request in requests if request not in ended]
        return [output for one in ended.items() for output in _beam_outputs(*one)]

    # -- all or nothing -------------------------------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo what the block has changed if it does not reach its end."""
        scheduler = self.scheduler
        requests = [*scheduler.running, *(one for one in scheduler.waiting if one.is_started)]
        rows = [row for request in requests for row in request.rows]
        lists = [*scheduler.waiting], [*scheduler.running], [*scheduler.searching], [*self.beams]
        changing = [(one, vars(one).copy()) for one in (*requests, *rows, *self.beams)]
        lengths = [len(row.tokens) for row in rows]
        pages, sources = self.pages.save(), self.sources.save()
        try:
            yield
        except BaseException:
            self.pages.restore(pages)
            self.sources.restore(sources)
            scheduler.waiting, scheduler.running, scheduler.searching, self.beams = lists
            for request in set(scheduler.waiting) - set(requests):
                request.restart()
            for one, values in changing:
                vars(one).update(values)
            for row, length in zip(rows, lengths, strict=True):
                row.text = None  # it is decoded again from the tokens
                del row.tokens[length:], row.digests[length // PAGE_SIZE :]
            raise


def _take_rows(logits: Tensor, index: list[int]) -> Tensor:
    """Return these rows of logits, which are usually all of them."""
    return logits if index == list(range(len(logits))) else logits[index]


def _with_proposals(one: RowPass, proposed: Mapping[Row, Sequence[int]]) -> RowPass:
    more = proposed.get(one.row)
    return one if not more else one._replace(tokens=[*one.tokens, *more], num_logits=1 + len(more))


def _beam_outputs(request: Request, hypotheses: Sequence[BeamHypothesis]) -> list[RequestOutput]:
    """Return the outputs of a finished beam search: the best hypotheses, and empty ones if there are too few."""
    outputs = []
    for index, (tokens, score) in enumerate(hypotheses):
        reason = "stop" if tokens and tokens[-1] in request.settings.eos_token_id else request.limit_reason
        outputs.append(RequestOutput(request.id, index, tuple(tokens), reason, score))
    missing = range(len(outputs), request.settings.num_return_sequences)
    outputs += [RequestOutput(request.id, index, (), "no_hypothesis") for index in missing]
    return [outputs[0]._replace(**_about_prompt(request)), *outputs[1:]]


def _about_prompt(request: Request) -> dict[str, Any]:
    """Return what the first output of a request says of its prompt."""
    return {"prompt_scores": tuple(request.prompt_scores), "num_cached": request.num_cached}
