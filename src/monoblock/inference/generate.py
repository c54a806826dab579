"""`model.generate` and `model.stream`: run a batch of prompts through the engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.engine import MAX_BURST, Engine
from monoblock.inference.fast_modules import MIN_NATIVE_WEIGHTS
from monoblock.inference.pages import default_max_rows
from monoblock.inference.prepared_model import GenerativeModel, PreparedModel
from monoblock.inference.runners.plain import evaluation_mode, run_texts
from monoblock.inference.sampler import score_tokens
from monoblock.inference.scheduler import Prompt, RequestOutput, limits_of, pad_right, parse_prompt
from monoblock.inference.settings import NO_DRAFT_WITH_BEAMS, Settings, check_count, parse_settings, split_seeds
from monoblock.inference.speculative import DraftModel, PromptLookup, Proposer, make_self_draft
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.nn.generation_options import GeneratedTokens, TokenRows
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer

LONG_JOB = 2_000  # new tokens for which a faster copy of the model pays
MAX_SCORED = 8192  # tokens in one pass that scores texts, padding included
LONG_BURST = 128  # steps before tokens are read, if no text can end before its maximum length


class GenerateCall:
    """One call of `generate` or `stream`: it checks the options and adds the prompts to a new engine.

    ids: the prompts, (B, T) or B lists of token ids; for an encoder-decoder, the sources.
    seed: prompt n is sampled with seed + n, as it would be alone; a list gives each prompt its own seed.
    options: the fields of `Settings`.
    The result has shape (B · num_return_sequences, T + N), where N is the largest number of new tokens; sequences with
    fewer tokens are padded at the end.  For an encoder-decoder, T is the length of decoder_input_ids, by default 1.
    """

    def __init__(
        self,
        model: GenerativeModel,
        ids: TokenRows,
        is_stream: bool,
        /,
        *,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        tap: Tap | None = None,
        draft: Any = None,
        prompt_lookup: int | None = None,
        truncation: str | None = None,
        seed: int | Sequence[int] | None = None,
        decoder_start_token_id: int | None = None,
        decoder_input_ids: TokenRows | None = None,
        **options: Any,
    ) -> None:
        if isinstance(draft, str):
            options["draft"], draft = draft, None
        seeds = split_seeds(seed, len(ids) if hasattr(ids, "__len__") else 0)
        self.settings, self.ids, self.tap = parse_settings(options), ids, tap
        self.model = model.plain if isinstance(model, PreparedModel) else model
        if is_stream and self.settings.num_beams > 1:
            raise InputError(
                "beam search knows its text only at the end, so it cannot be streamed; write num_beams=1, or call "
                "generate"
            )
        proposer = _make_proposer(model, draft, 0 if prompt_lookup is None else prompt_lookup, self.settings)
        inputs, pad = read_prompts(ids, attention_mask), self.settings.pad_token_id
        self.pad_token = pad if pad is not None else (*self.settings.eos_token_id, 0)[0]
        if truncation is not None:
            context, has_encoder = self.model.config.context, self.model.encoder is not None
            limit = truncated_length(truncation, self.settings.max_new_tokens, context, has_encoder=has_encoder)
            inputs = [row if limit is None else row[-limit:] for row in inputs]
        self.prompts: list[tuple[list[int], list[int] | None]] = [(row, None) for row in inputs]
        if self.model.encoder is not None:
            first = next((token for token in (decoder_start_token_id, pad) if token is not None), 0)
            targets = [[first]] * len(inputs) if decoder_input_ids is None else read_prompts(decoder_input_ids, None)
            if len(targets) != len(inputs):
                raise InputError(
                    f"decoder_input_ids has {len(targets)} rows for {len(inputs)} sources; give one for each source"
                )
            self.prompts = list(zip(targets, inputs, strict=True))
        longest = max(len(prompt) for prompt, _ in self.prompts)
        if isinstance(proposer, DraftModel) and not proposer.fits_prompt(longest):
            proposer = None  # a draft changes only the speed, so decode without it
        # If no text can end before its maximum length, a GPU may run many steps before Python reads tokens.
        max_burst = MAX_BURST if is_stream or self.settings.eos_token_id else LONG_BURST
        self.engine = self.make_engine(
            model, longest=longest, use_cache=use_cache, proposer=proposer, max_burst=max_burst
        )
        if isinstance(model, Transformer) and use_cache and tap is None:
            _point_out_optimize(model, len(inputs) * self.settings.rows_per_prompt * self.settings.max_new_tokens)
        is_sampled = self.settings.temperature > 0
        requests = [
            self.engine.add(prompt, replace(self.settings, seed=own) if is_sampled else self.settings, source)
            for (prompt, source), own in zip(self.prompts, seeds, strict=True)
        ]
        count = self.settings.num_return_sequences
        self.sequences = [(request, index) for request in requests for index in range(count)]

    def make_engine(self, model: Any, *, longest: int, **options: Any) -> Any:
        """Make the engine, or what decodes a model in its own way, for prompts of at most `longest` tokens."""
        capacity, context = longest + self.settings.max_new_tokens, limits_of(self.model).context
        capacity = capacity if context is None else min(capacity, context)
        max_rows = max(default_max_rows(self.model, capacity), self.settings.rows_per_prompt)
        waits = len(self.prompts) * self.settings.rows_per_prompt > max_rows  # else all prompts begin at once
        return Engine(model, max_rows=max_rows, capacity=capacity, reuses_prefixes=waits, tap=self.tap, **options)

    def run(self, *, return_scores: bool = False) -> Tensor | GeneratedTokens:
        """Return the prompts with their new tokens and, if asked for, the log-probability of each new token."""
        new: dict[tuple[int, int], list[int]] = {sequence: [] for sequence in self.sequences}
        for outputs in self.steps():
            for output in outputs:
                new[output.request_id, output.sequence_index] += output.tokens
        rows = list(new.values())
        return GeneratedTokens(self.to_tensor(rows), self.score(rows)) if return_scores else self.to_tensor(rows)

    def stream(self) -> Iterator[Tensor]:
        """Yield the new tokens step by step, (rows,); a sequence that has ended yields the padding token."""
        pending: dict[tuple[int, int], list[int]] = {sequence: [] for sequence in self.sequences}
        finished: set[tuple[int, int]] = set()
        for outputs in self.steps():
            for output in outputs:
                pending[output.request_id, output.sequence_index] += output.tokens
                if output.finish_reason:
                    finished.add((output.request_id, output.sequence_index))
            while any(pending.values()) and all(tokens or row in finished for row, tokens in pending.items()):
                next_tokens = [tokens.pop(0) if tokens else self.pad_token for tokens in pending.values()]
                yield torch.tensor(next_tokens, device=self.model.device)

    def steps(self) -> Iterator[list[RequestOutput]]:
        while self.engine.busy:
            outputs = self.engine.step()
            for output in outputs:
                if output.error is not None:
                    raise output.error
            yield outputs

    def score(self, new: list[list[int]]) -> Tensor:
        """Return the log-probabilities (rows, N) of the new tokens, 0 for padding."""
        prompts = [parse_prompt(*prompt) for prompt in self.prompts for _ in range(self.settings.num_return_sequences)]
        alone = getattr(self.engine, "is_exact", False)  # then a row is scored in a pass of its own
        return pad_right(score_texts(self.model, prompts, new, self.tap, alone=alone), self.model.device)[0]

    def to_tensor(self, new: list[list[int]]) -> Tensor:
        """Append `new`, the new tokens of each returned sequence, to the prompts; pad the result to one length."""
        count = self.settings.num_return_sequences
        if isinstance(self.ids, Tensor) and self.model.encoder is None:  # its padding and its dtype stay
            prompts = self.ids.repeat_interleave(count, 0)
            return torch.cat((prompts, pad_right(new, prompts.device, self.pad_token)[0].to(prompts.dtype)), 1)
        starts = [ids for ids, _ in self.prompts for _ in range(count)]
        rows = [[*ids, *tokens] for ids, tokens in zip(starts, new, strict=True)]
        device = self.ids.device if isinstance(self.ids, Tensor) else self.model.device
        return pad_right(rows, device, self.pad_token)[0]


def _make_proposer(model: GenerativeModel, draft: Any, lookup: int, settings: Settings) -> Proposer | None:
    check_count("prompt_lookup", lookup, 0)
    if draft is None and settings.draft is None and not lookup:
        return None
    if settings.num_beams > 1:
        raise InputError(NO_DRAFT_WITH_BEAMS)
    if lookup and (draft is not None or settings.draft is not None):
        raise InputError(
            "draft and prompt_lookup are two ways to propose tokens for speculative decoding; give one of them"
        )
    if settings.draft is not None:
        return make_self_draft(model, settings.draft)
    if draft is None:
        return PromptLookup(lookup)
    return DraftModel(draft)


def _point_out_optimize(model: Transformer, new_tokens: int) -> None:
    """Warn, once in a process, that a long job on the modules of a large model has a faster way."""
    large = sum(weight.numel() for weight in model.parameters()) >= MIN_NATIVE_WEIGHTS
    if large and new_tokens >= LONG_JOB and reason_not_to_optimize(model) is None:
        words = "generate runs the modules of the model; mb.optimize(model).generate(…) gives the same tokens faster"
        warnings.warn(words, stacklevel=4)


def read_prompts(ids: TokenRows, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt; of a tensor (B, T) those that are valid in `mask` (B, T)."""
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        if mask is not None:
            raise InputError("lists of token ids have no padding; leave out attention_mask, or give a tensor")
        if not ids:
            raise InputError("there are no prompts; give at least one list of token ids")
        return [list(parse_prompt(row).ids) for row in ids]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise InputError(
            "prompts must be an integer tensor of token ids with shape (batch, length), or a list of lists of token "
            "ids; write torch.tensor([[…]]) or [[…]]"
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError("attention_mask must be a tensor (batch, length), True for tokens and False for padding")
    if not ids.numel():
        raise InputError("the prompt is empty; give at least one token, such as the start token")
    if mask is None:
        return ids.tolist()
    if mask.shape != ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, which does not fit prompts of shape {tuple(ids.shape)}; "
            f"give a mask of the same shape"
        )
    return [row[valid].tolist() for row, valid in zip(ids, mask.bool(), strict=True)]


def truncated_length(
    truncation: str, max_new_tokens: int, context: int | None, *, has_encoder: bool = False
) -> int | None:
    """Return how many of its last tokens a prompt keeps with this `truncation`; None for a model without a `context`.

    They leave room for max_new_tokens, but at least half of the context is kept.
    """
    if truncation != "left":
        raise InputError(f"truncation={truncation!r} is not valid; write 'left', which drops the first tokens")
    if has_encoder:
        raise InputError("truncation shortens the prompt of a decoder-only model; shorten the source itself")
    return None if context is None else max(context - max_new_tokens, context // 2, 1)


# -- scores ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score_texts(
    model: Any, prompts: Sequence[Prompt], new: Sequence[Sequence[int]], tap: Tap | None = None, *, alone: bool = False
) -> list[list[float]]:
    """Return the log-probability of each new token after its prompt, one list for each prompt.

    It is the probability in the distribution of the model itself: temperature, filters and forced tokens do not count.
    Passes of the model over whole sequences compute it, so that every backend gives the same scores.

    alone: whether every row has a pass of its own.
    """
    scores: list[list[float]] = []
    texts = list(zip(prompts, new, strict=True))
    with evaluation_mode(model):
        while len(scores) < len(texts):
            longest, rows = 0, list[tuple[Prompt, Sequence[int]]]()
            for prompt, tokens in texts[len(scores) :]:
                longest = max(longest, len(prompt.ids) + len(prompt.source or ()) + len(tokens))
                if rows and (alone or longest * (len(rows) + 1) > MAX_SCORED):
                    break
                rows.append((prompt, tokens))
            whole = [Prompt((*prompt.ids, *tokens[:-1]), prompt.source) for prompt, tokens in rows]
            # The logits at the last token of the prompt predict the first new token.
            starts = torch.tensor([[len(prompt.ids) - 1] for prompt, _ in rows], device=model.device)
            count = torch.arange(max(1, *(len(tokens) for _, tokens in rows)), device=model.device)
            at = (starts + count).clamp(max=max(len(text.ids) for text in whole) - 1)
            logits = run_texts(model, whole, logits_at=at, tap=tap)
            for own, (_, tokens) in zip(logits, rows, strict=True):
                scores.append([one.logprob for one in score_tokens(own[: len(tokens)], tokens)])
    return scores
