"""The subject for any nn.Module and any function of ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from monoblock.doctor.options import Options
from monoblock.doctor.recorder import Recorder
from monoblock.doctor.subject import (
    LONG,
    Declared,
    Kind,
    Subject,
    difference,
    hooks,
    output_tensor,
    parameter_names,
    prime_length,
    usual_lengths,
)
from monoblock.errors import InputError, did_you_mean

MASK_NAMES = ("attention_mask", "padding_mask", "key_padding_mask", "src_key_padding_mask", "pad_mask")
SOURCE_MASK_NAMES = ("source_mask", "src_mask", "src_key_padding_mask", "source_padding_mask", "src_padding_mask")
POSITION_NAMES = ("position_ids", "positions", "pos_ids", "token_positions")
TARGET_NAMES = ("targets", "target", "labels", "y")  # with them, some models give the logits of every token
CONTEXT_NAMES = (
    "context",
    "block_size",
    "max_len",
    "max_length",
    "max_seq_len",
    "max_position_embeddings",
    "n_ctx",
    "context_length",
    "n_positions",
)
WINDOW_NAMES = ("window", "window_size", "sliding_window", "attention_window")
TIE_NAMES = ("tie_weights", "tie_word_embeddings", "tied", "tie", "weight_tying", "tie_embeddings")
DROPOUT_NAMES = ("dropout", "p_drop", "dropout_p", "drop", "dropout_rate")


class PlainSubject(Subject):
    left_padding = False  # only where positions can be given to the model
    inner_padding = False
    layout: Layout = "rows first"  # of what the model returns

    def __init__(self, model: Callable[..., Any], options: Options) -> None:
        super().__init__()
        self.function = model
        self.module = model if isinstance(model, nn.Module) else None
        self.name = type(model).__name__ if self.module is not None else getattr(model, "__name__", "model")
        self.name = "function of ids" if self.name == "<lambda>" else self.name
        self.parameters = parameter_names(model)
        self.pad_id = options.pad_id
        self.mask_argument, self.mask_is_padding = options.mask_argument, False
        self.source_mask_argument = options.source_mask_argument
        self.target_argument: str | None = None
        self.documents_argument, self.prefix_argument = options.documents_argument, options.prefix_argument
        self.takes_documents, self.takes_prefix = self.documents_argument is not None, self.prefix_argument is not None
        self._check_names(options)
        self._find_source(options)
        if self.mask_argument is None and not self.reads_source:
            self.mask_argument = next((name for name in MASK_NAMES if name in self.parameters), None)
            self.mask_is_padding = self.mask_argument is not None and "pad" in self.mask_argument
        with self.evaluating():
            self.vocab = options.vocab if options.vocab is not None else self._find_vocab(options.length)
            if self.vocab < 3:
                raise InputError(
                    f"vocab={self.vocab} is too small to examine; give the number of token ids, as vocab=61"
                )
            self._make_source(options)
            self.length = self._find_length(options.length)
            self._read_output(options.kind)
            self._find_mask()
            self._find_positions()
            self._find_own_loss()
        self.declared = self._declare(options)
        self._cached = options.cached
        self.has_cache = options.cached is not None
        if options.cached is not None:
            names = list(parameter_names(options.cached))
            self.masks_cache = len(names) > 2
            self.passes_mask_to_cache = self.masks_cache
            self.masks_cache = self.masks_cache or self.pad_id is not None

    def _check_names(self, options: Options) -> None:
        """Raise InputError for an argument that the model does not have."""
        if not self.parameters or any(p.kind == p.VAR_KEYWORD for p in self.parameters.values()):
            return
        for option in ("mask_argument", "source_mask_argument", "documents_argument", "prefix_argument"):
            name = getattr(options, option)
            if name is not None and name not in self.parameters:
                taken, hint = ", ".join(self.parameters), did_you_mean(name, self.parameters)
                raise InputError(f"{option}={name!r}: the model has no such argument, only {taken}{hint}")

    # -- finding out how it is called -------------------------------------------------------------------------------

    def _find_source(self, options: Options) -> None:
        required = {
            p.name
            for p in self.parameters.values()
            if p.default is inspect.Parameter.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        }
        named_masks = {*MASK_NAMES, options.mask_argument}
        self.requires_mask, self.requires_positions = bool(required & named_masks), bool(required & {*POSITION_NAMES})
        self.positions_argument = next((name for name in POSITION_NAMES if name in self.parameters), None)
        others = required - named_masks - {*POSITION_NAMES}
        kinds = (options.kind, getattr(getattr(self.module, "config", None), "family", None))
        self.reads_source = options.source is not None or len(others) == 2 or "encoder-decoder" in kinds

    def _make_source(self, options: Options) -> None:
        if not self.reads_source:
            return
        self.kind = "encoder-decoder"
        source = options.source
        self.source = super().probe(length=17, seed=7) if source is None else source[:, :17].to(self.device)
        if self.source_mask_argument is None:
            self.source_mask_argument = next((name for name in SOURCE_MASK_NAMES if name in self.parameters), None)
        self.takes_source_mask = self.source_mask_argument is not None or self.pad_id is not None

    def _find_vocab(self, length: int | None) -> int:
        """Find the number of rows of the table that ids are looked up in, by running ids of zero."""
        problem: Exception | None = None
        for size in (3, *usual_lengths(self._limit(length))):
            ids, recorder = torch.zeros(1, size, dtype=torch.long, device=self.device), Recorder()
            try:
                with recorder.recording(ids):
                    _ = self.function(ids, ids) if self.reads_source else self.logits(ids)
                problem = None
                break
            except Exception as error:
                problem = problem or error
        if problem is not None:
            called = "model(source, ids), as its arguments suggest" if self.reads_source else "ids of shape (1, 3)"
            raise InputError(
                f"the model cannot be called with {called}: {problem!s:.120}; if it reads texts of one length only, "
                "give length=…; else give a function of ids, and its vocabulary as vocab=…"
            ) from problem
        if not recorder.token_tables:
            raise InputError("no embedding of the ids was found; give the size of the vocabulary: vocab=61")
        return min(rows for rows, _ in recorder.token_tables)

    def _limit(self, length: int | None) -> int | None:
        """Return the length that the user gave, or the context that the model states, unless it is long."""
        if length is not None:
            return length
        context = find_attribute((self.module, getattr(self.module, "config", None)), CONTEXT_NAMES, int)
        return context if context is None or 0 < context <= LONG else None

    def _find_length(self, length: int | None) -> int:
        """Find a length that the model can be called with: a prime one that is no size of a weight, if it can be."""
        limit, problem = self._limit(length), None
        sizes = tuple({size for weight in self.weights for size in weight.shape})
        primes = (prime_length(min((n for n in (limit, most) if n), default=None), sizes) for most in (None, 13, 7))
        for size in chain(primes, usual_lengths(limit)):
            try:
                self.logits(super().probe(rows=2, length=size))
                return size
            except Exception as error:
                problem = problem or error
        raise InputError(
            f"the model cannot be called with two rows of ids below vocab={self.vocab}: {problem!s:.150}; check "
            "vocab= and length=, or wrap it in a function of ids"
        ) from problem

    def _read_output(self, kind: Kind | None) -> None:
        """Find the order of the axes, and whether the model gives an output for each token, and so its kind."""
        output = self.logits(super().probe(rows=2))
        self.layout = find_layout(output, self.length, self.vocab)
        output = to_rows(output, self.layout, 2)
        if output.dim() == 3 and output.shape[:2] == (2, 1) and output.shape[-1] >= self.vocab:
            # Given targets, such a model may give the logits of every token.
            self.target_argument = next((name for name in TARGET_NAMES if name in self.parameters), None)
            full = output
            with suppress(Exception):
                full = self.logits(super().probe(rows=2))
            if full.dim() >= 3 and full.shape[:2] == (2, self.length):
                output = full
            else:
                self.target_argument = None
        self.per_token = output.dim() >= 3 and output.shape[:2] == (2, self.length)
        is_last_only = output.dim() == 3 and output.shape[1] == 1  # logits of the last token, as in generation
        self.kind_is_presumed = kind is None
        if kind is not None:
            self.kind = kind
        elif self.kind != "encoder-decoder":
            is_causal = (self.per_token or is_last_only) and output.shape[-1] >= self.vocab
            self.kind = "causal" if is_causal else "bidirectional"

    def _find_mask(self) -> None:
        """Find the argument for a mask, and whether it is true for tokens or for padding."""
        if self.mask_argument is not None:
            self.takes_mask = True
            ids = super().probe(rows=2)
            plain = self.logits(ids)
            distances = []
            for is_padding in (False, True):
                self.mask_is_padding = is_padding
                try:
                    distances.append(difference(self.logits(ids, torch.ones_like(ids)), plain))
                except Exception:
                    distances.append(float("inf"))
            is_named_padding = "pad" in self.mask_argument
            close = [distance < 100 * self.tolerance for distance in distances]
            self.mask_is_padding = is_named_padding if close[0] == close[1] or self.requires_mask else close[1]
            if self.mask_is_padding and not is_named_padding:  # attention_mask is 1 for tokens everywhere else
                self.inverted_mask = distances[0]
        elif self.pad_id is not None:
            self.takes_mask = True  # the model finds the padding by its id

    def _find_positions(self) -> None:
        """Find whether the argument for positions takes those of the tokens: 0, 1, 2, … must change nothing."""
        name, self.left_padding = self.positions_argument, self.kind == "causal"
        if name is not None and not self.requires_positions:
            ids, self.positions_argument = super().probe(rows=2), None
            plain = self.logits(ids)
            self.positions_argument = name
            try:
                fits = difference(self.logits(ids, torch.ones_like(ids)), plain) < 100 * self.tolerance
                same = output_tensor(self.function(ids, **{name: torch.zeros_like(ids)}))
                fits = fits and difference(same, same[:, :1]) > self.tolerance  # else it picks the outputs to return
            except Exception:  # it means something else
                fits = False
            self.positions_argument = name if fits else None
        self.left_padding = self.left_padding and self.positions_argument is not None

    def _find_own_loss(self) -> None:
        """Find the loss that the forward pass returns when it is given targets."""
        self.loss_argument = next((name for name in TARGET_NAMES if name in self.parameters), None)
        if self.loss_argument is None or self.module is None or self.reads_source or not self.per_token:
            return
        ids, outputs = super().probe(rows=2), list[nn.Module]()

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.shape == logits.shape:
                outputs.append(module)

        logits, is_known = self.logits(ids), False
        handles = [module.register_forward_hook(hook) for module in self.module.modules()]
        with hooks(handles), suppress(Exception):  # the argument means something else
            is_known = _scalar(self.function(ids, **{self.loss_argument: ids})) is not None
        if is_known and outputs:
            self.head, self.own_loss = outputs[-1], self._loss_of_forward

    def _loss_of_forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss that the forward pass computes where its head gives these logits."""
        assert self.loss_argument is not None
        with self.head.register_forward_hook(lambda module, inputs, output: logits):
            ids = torch.zeros(labels.shape, dtype=torch.long, device=self.device)
            loss = _scalar(self.function(ids, **{self.loss_argument: labels.contiguous()}))
        assert loss is not None
        return loss

    def _declare(self, options: Options) -> Declared:
        owners = (self.module, getattr(self.module, "config", None))
        parts = () if self.module is None else (*self.module.modules(),)
        window = find_attribute((*owners, *parts), WINDOW_NAMES, int) if options.window is None else options.window
        return Declared(
            window=window,
            tied=find_attribute(owners, TIE_NAMES, bool) if options.tied is None else options.tied,
            dropout=find_attribute(owners, DROPOUT_NAMES, float),
            context=find_attribute(owners, CONTEXT_NAMES, int) if options.length is None else options.length,
        )

    # -- calls ------------------------------------------------------------------------------------------------------

    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        arguments: dict[str, Any] = {}
        if mask is None and self.requires_mask:
            mask = torch.ones_like(ids)
        if mask is not None and self.mask_argument is not None:
            arguments[self.mask_argument] = ~mask.bool() if self.mask_is_padding else mask.bool()
        if self.positions_argument is not None and (mask is not None or self.requires_positions):
            counted = (torch.ones_like(ids) if mask is None else mask.long()).cumsum(-1) - 1
            arguments[self.positions_argument] = counted.clamp(min=0)
        if mask is not None and self.pad_id is not None:
            ids = ids.masked_fill(~mask.bool(), self.pad_id)
        named = {
            self.documents_argument: options.get("documents"),
            self.prefix_argument: options.get("prefix"),
            self.target_argument: ids,
        }
        arguments |= {name: value for name, value in named.items() if name is not None and value is not None}
        inputs: tuple[Tensor, ...] = (ids,)
        if self.reads_source:
            source, source_mask = options.get("source"), options.get("source_mask")
            assert self.source is not None
            source = self.source[:1].expand(ids.shape[0], -1) if source is None else source
            if source_mask is not None and self.pad_id is not None:
                source = source.masked_fill(~source_mask.bool(), self.pad_id)
            if source_mask is not None and self.source_mask_argument is not None:
                is_padding = "pad" in self.source_mask_argument
                arguments[self.source_mask_argument] = ~source_mask.bool() if is_padding else source_mask.bool()
            inputs = (source, ids)
        return to_rows(output_tensor(self.function(*inputs, **arguments)), self.layout, len(ids))

    def cached(
        self, ids: Tensor, state: Any, mask: Tensor | None = None, *, recorded: bool = False
    ) -> tuple[Tensor, Any]:
        assert self._cached is not None
        if mask is not None and self.pad_id is not None:
            ids = ids.masked_fill(~mask[:, -ids.shape[1] :].bool(), self.pad_id)
        extra = (mask,) if self.passes_mask_to_cache and mask is not None else ()
        output, state = self._cached(ids, state, *extra)
        return to_rows(output_tensor(output), self.layout, len(ids)), state


def _scalar(output: Any) -> Tensor | None:
    """Return the loss among the outputs of a model: a single number."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
    found = [value for value in (*values, getattr(output, "loss", None)) if isinstance(value, Tensor)]
    return next((value for value in found if value.dim() == 0 and value.is_floating_point()), None)


Layout = Literal["rows first", "time first", "classes second", "flat"]  # (B, T, V), (T, B, V), (B, V, T), (B·T, V)


def find_layout(output: Tensor, length: int, vocab: int) -> Layout:
    """Return the order of the axes of an output for two rows; the length is equal to no other size."""
    shape = tuple(output.shape)
    if len(shape) == 3 and shape[:2] == (length, 2):
        return "time first"
    if len(shape) == 3 and shape[0] == 2 and shape[2] == length and shape[1] >= vocab:
        return "classes second"
    return "flat" if len(shape) == 2 and shape[0] == 2 * length else "rows first"


def to_rows(output: Tensor, layout: Layout, rows: int) -> Tensor:
    """Reorder the axes of an output to (B, T, *)."""
    if layout == "flat":
        return output.unflatten(0, (rows, -1)) if len(output) % rows == 0 else output
    if layout == "rows first" or output.dim() != 3:
        return output
    return output.transpose(0, 1) if layout == "time first" else output.transpose(1, 2)


def find_attribute(owners: tuple[object, ...], names: tuple[str, ...], kind: type) -> Any:
    """Return the first attribute with one of these names and this type."""
    for owner in owners:
        for name in names:
            value = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
                return value
    return None
