"""`model.generate` and `model.stream`: a batch of prompts through the engine, and tensors out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from monoblock.decoding.engine import Engine
from monoblock.decoding.lanes import Event
from monoblock.decoding.own_draft import own_draft
from monoblock.decoding.prepare import places
from monoblock.decoding.settings import Settings, settings
from monoblock.decoding.speculative import Draft, LookUp, Proposer
from monoblock.errors import InputError
from monoblock.model import Transformer

MANY = 512  # rows at once, of beams too


def generate(model: Transformer, ids: Tensor, **options: Any) -> Tensor:
    """The prompts with their continuations (B · num_return_sequences, T + new); finished rows are padded."""
    asked = Asked(model, ids, options)
    new: dict[tuple[int, int], list[int]] = {}
    for event in asked.events():
        new.setdefault((event.id, event.number), []).extend(event.tokens)
    return asked.laid([new.get((request, n), []) for request in asked.requests for n in range(asked.each)])


def stream(model: Transformer, ids: Tensor, **options: Any) -> Iterator[Tensor]:
    """New tokens (B,), one step at a time; rows that are over give the padding token."""
    asked = Asked(model, ids, options)
    if asked.settings.num_beams > 1:
        raise InputError("beams know their best text only at the end; stream with num_beams=1, or call generate")
    return _streamed(asked)


def _streamed(asked: Asked) -> Iterator[Tensor]:
    waiting: dict[tuple[int, int], list[int]] = {(r, n): [] for r in asked.requests for n in range(asked.each)}
    over: set[tuple[int, int]] = set()
    for events in asked.steps():
        for event in events:
            waiting[event.id, event.number] += event.tokens
            if event.finished:
                over.add((event.id, event.number))
        while any(waiting.values()) and all(tokens or row in over for row, tokens in waiting.items()):
            said = [tokens.pop(0) if tokens else asked.pad for tokens in waiting.values()]
            yield torch.tensor(said, device=asked.ids.device)


class Asked:
    """A call of `generate` or `stream`, checked and put to the engine."""

    def __init__(self, model: Transformer, ids: Tensor, options: dict[str, Any]) -> None:
        mask = options.pop("attention_mask", None)
        use_cache = options.pop("use_cache", True)
        start = options.pop("decoder_start_token_id", None)
        prompts = options.pop("decoder_input_ids", None)
        draft, lookup = options.pop("draft", None), options.pop("prompt_lookup", 0)
        if isinstance(draft, str):
            options["draft"], draft = draft, None
        self.settings, self.model, self.ids = settings(options), model, ids
        proposer = _proposer(model, draft, lookup, self.settings.draft)
        texts = _texts(ids, mask)
        pad = self.settings.pad_token_id
        self.pad = pad if pad is not None else (*self.settings.eos_token_id, 0)[0]
        both = model.encoder is not None and model.decoder is not None
        begin = start if start is not None else (pad if pad is not None else 0)
        heads = [[begin]] * len(texts) if prompts is None else prompts.tolist()
        self.prompts = (
            [(head, text) for head, text in zip(heads, texts, strict=True)] if both else [(t, None) for t in texts]
        )
        longest = max(len(head) for head, _ in self.prompts)
        if isinstance(proposer, Draft) and not proposer.reads(longest):
            proposer = None  # the text is the same without it
        self.models = [model, *([proposer.model] if isinstance(proposer, Draft) else ())]
        self.capacity = _capacity(model, longest, self.settings)
        rows = max(MANY, self.settings.rows)
        self.engine = _engine(model, rows, self.capacity, use_cache, proposer)
        self.requests = [self.engine.add(head, self.settings, text) for head, text in self.prompts]
        self.each = self.settings.num_return_sequences

    def steps(self) -> Iterator[list[Event]]:
        training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            while self.engine.busy:
                yield self.engine.step()
        finally:
            for model, was in zip(self.models, training, strict=True):
                model.train(was)

    def events(self) -> Iterator[Event]:
        for events in self.steps():
            yield from events

    def laid(self, new: list[list[int]]) -> Tensor:
        """Prompts as they were given, then what is new, filled up to one length."""
        longest = max(len(row) for row in new)
        tail = torch.tensor([row + [self.pad] * (longest - len(row)) for row in new], device=self.ids.device)
        given = self.ids if self.prompts[0][1] is None else self._heads()
        return torch.cat((given.repeat_interleave(self.each, 0), tail.to(given.dtype)), 1)

    def _heads(self) -> Tensor:
        return torch.tensor([head for head, _ in self.prompts], device=self.ids.device)


# What was recorded on a GPU for a model, for the next call of the same shapes; it goes when the model goes.
KEPT: WeakKeyDictionary[Transformer, tuple[tuple[int, ...], Engine]] = WeakKeyDictionary()


def _engine(model: Transformer, rows: int, capacity: int, use_cache: bool, proposer: Proposer | None) -> Engine:
    if not use_cache or proposer is not None or model.device.type != "cuda":
        return Engine(model, rows=rows, capacity=capacity, use_cache=use_cache, proposer=proposer)
    kept = KEPT.get(model)
    if kept is not None and kept[0] == places(model) and not kept[1].busy and kept[1].capacity == capacity:
        return kept[1]
    engine = Engine(model, rows=rows, capacity=capacity)
    KEPT[model] = places(model), engine
    return engine


def _proposer(model: Transformer, draft: Transformer | None, lookup: int, copy: str | None) -> Proposer | None:
    if lookup and (draft is not None or copy is not None):
        raise InputError("a draft and prompt_lookup both propose tokens; give one of them")
    if copy is not None:
        return own_draft(model, copy)
    if draft is None:
        return LookUp(lookup) if lookup else None
    own, other = model.config.output_input, draft.config.output_input
    if own.vocab != other.vocab:  # type: ignore[union-attr]
        raise InputError(
            f"the draft speaks {other.vocab} tokens and the model {own.vocab}; "  # type: ignore[union-attr]
            f"a draft needs the same vocabulary"
        )
    return Draft(draft)


def _texts(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The real tokens of each row."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise InputError("prompts are a tensor of token numbers (batch, length); write torch.tensor([[…]])")
    if not ids.numel():
        raise InputError(
            "an empty prompt gives nothing to go on from; give at least one token, such as the start token"
        )
    if mask is None:
        return ids.tolist()
    if mask.shape != ids.shape:
        raise InputError(f"a mask of shape {tuple(mask.shape)} does not fit prompts of shape {tuple(ids.shape)}")
    return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]


def _capacity(model: Transformer, longest: int, asked: Settings) -> int:
    wanted = longest + asked.max_new_tokens
    limit = model.config.context
    if limit is not None and longest >= limit:
        raise InputError(f"a prompt of {longest} tokens leaves no room in a context of {limit}; shorten it")
    return wanted if limit is None else min(wanted, limit)
