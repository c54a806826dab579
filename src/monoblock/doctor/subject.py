"""One interface to every model that is examined: ours, those of transformers, any nn.Module, any function of ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from monoblock.doctor.recorder import TableLookup
from monoblock.errors import InputError

KINDS = ("causal", "bidirectional", "encoder-decoder")
Kind = Literal["causal", "bidirectional", "encoder-decoder", "vision", "unknown"]
ROWS = 3
LARGE = 5e7  # parameters, from which probes are short, to keep a report quick
LONG, LONG_OF_LARGE = 512, 128  # tokens of the long text, at most
UNKNOWN_CONTEXT = 64  # tokens of the long text where no context is known
PRIMES = (23, 19, 17, 13, 11, 7, 5, 3)  # lengths of probes: equal to no other size, so that axes can be told apart
MULTIPLES = (24, 16, 32, 64, 128)  # lengths for a model that reads no prime one
TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-5, torch.bfloat16: 0.08, torch.float16: 0.02}


@dataclass
class Declared:
    """What a model declares in its configuration or its attributes; None where it declares nothing."""

    windows: tuple[int | None, ...] | None = None  # of each layer: keys that a token sees, itself included
    window: int | None = None  # of all layers, where their number is not known
    scales: tuple[float, ...] | None = None  # the factors on scores that are right; None: 1 / sqrt(head size)
    tied: bool | None = None
    dropout: float | None = None
    positions: str | None = None  # "none" if the model is meant to have none
    context: int | None = None
    table_offset: int | None = None  # rows of the position table before the first position
    post_norm: bool | None = None
    num_labels: int | None = None
    depth: int | None = None


class Subject:
    """A model under examination.  Subclasses define how it is called."""

    name = "model"
    kind: Kind = "unknown"
    module: nn.Module | None = None
    vocab: int = 0
    pad_id: int | None = None
    takes_mask = False
    left_padding = True  # whether padding on the left must change nothing
    inner_padding = True  # whether padding between tokens must change nothing
    takes_documents = False
    takes_prefix = False
    has_cache = False
    masks_cache = False  # whether cached steps take a mask
    source: Tensor | None = None  # of an encoder-decoder
    takes_source_mask = False
    asked_length: int | None = None  # the length that the user gave
    positions_argument: str | None = None  # the argument that takes the position of each token
    generation: Mapping[str, Any] | None = None  # the default decoding options that the model holds
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None  # that its forward computes, of logits and labels
    unset_tokens: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # of them, ids that are only defaults
    inverted_mask: float | None = None  # the change under a mask without padding, if the mask is inverted

    def __init__(self) -> None:
        self.declared = Declared()
        self.length = 23

    # -- how it is called -------------------------------------------------------------------------------------------

    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the output for ids (B, T): (B, T, *), or (B, *) if there is one output for a sequence.

        mask: 1 for tokens and 0 for padding, (B, T).
        options: source, source_mask, documents, prefix; each only if the subject takes it.
        """
        raise NotImplementedError

    def recorded_logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the same output, computed with plain operations that a Recorder recognizes."""
        return self.logits(ids, mask, **options)

    def cached(
        self, ids: Tensor, state: Any, mask: Tensor | None = None, *, recorded: bool = False
    ) -> tuple[Tensor, Any]:
        """Return the output for the next ids and the new state; mask covers all tokens so far, (B, past + T).

        recorded: compute it with plain operations that a Recorder recognizes.
        """
        raise NotImplementedError

    # -- probes -----------------------------------------------------------------------------------------------------

    @property
    def tolerance(self) -> float:
        """The largest difference, in standard deviations of the output, that rounding explains."""
        return TOLERANCE.get(self.dtype, 5e-5)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [] if self.module is None else list(self.module.parameters())

    @property
    def dtype(self) -> torch.dtype:
        return next((weight.dtype for weight in self.weights if weight.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        return next((weight.device for weight in self.weights), torch.device("cpu"))

    @property
    def is_large(self) -> bool:
        return sum(weight.numel() for weight in self.weights) > LARGE

    def long_lengths(self, lookups: list[TableLookup]) -> list[int]:
        """Return lengths to try for a long text, best first: the context, or less where it would take long."""
        known = self.declared.context
        if known is None:  # the table of positions says how far it goes
            rows = [t.rows for t in lookups if t.indices.shape[-1] == self.length and t.rows > self.length]
            known = min(rows, default=UNKNOWN_CONTEXT if self.device.type == "cpu" else 0)
        if self.asked_length is not None:
            longest = min(self.asked_length, self.declared.context or self.asked_length)
        else:
            longest = min(known, LONG_OF_LARGE if self.is_large else LONG)
        return [n for n in dict.fromkeys((longest, longest // 2)) if n > self.length]

    @property
    def rows(self) -> int:
        return 2 if self.is_large else ROWS

    @property
    def reads_tokens(self) -> bool:
        return self.kind != "vision"

    @property
    def first_id(self) -> int:
        """The first id of probes; those before it are often special tokens."""
        return 5 if self.vocab > 20 else 1 if self.vocab > 2 else 0

    def probe(self, rows: int = ROWS, length: int | None = None, seed: int = 0) -> Tensor:
        """Return random token ids (rows, length) without padding and special tokens."""
        length, low = self.length if length is None else length, self.first_id
        ids = torch.randint(low, self.vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
        if self.pad_id is not None and self.vocab > 2:
            ids[ids == self.pad_id] = low if low != self.pad_id else low + 1
        return ids.to(self.device)

    def other_tokens(self, ids: Tensor) -> Tensor:
        """Return ids that differ from these at every position."""
        low = self.first_id
        span = self.vocab - low
        changed = low + (ids - low + max(1, span // 2)) % span
        if self.pad_id is not None:
            changed = torch.where(changed == self.pad_id, low + (changed - low + 1) % span, changed)
        return changed

    @contextmanager
    def evaluating(self) -> Any:
        """Switch to evaluation mode without gradients, and back."""
        modes = {} if self.module is None else {module: module.training for module in self.module.modules()}
        if self.module is not None:
            self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextmanager
def hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of `with`."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two outputs in standard deviations of the second; inf if one is not finite."""
    a, b = a.detach().float(), b.detach().float()
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return 0.0 if torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()) else float("inf")
    if not a.numel():
        return 0.0
    spread = max(float(b.std()) if b.numel() > 1 else 0.0, 0.1 * float(b.abs().max()), 1e-6)
    return float((a - b).abs().max()) / spread


def prime_length(limit: int | None, taken: tuple[int, ...] = ()) -> int:
    """Return the length of probes: the largest prime within the limit that equals no other size of the model."""
    for prime in PRIMES:
        if (limit is None or prime <= limit) and prime not in taken:
            return prime
    raise InputError(f"the model reads at most {limit} tokens, too few to examine; give length=8 or more")


def usual_lengths(limit: int | None) -> list[int]:
    """Return lengths of probes for a model that accepts only some: its context, then multiples of 8."""
    return [n for n in (limit, *MULTIPLES) if n is not None and (limit is None or n <= limit)]


def output_tensor(output: Any) -> Tensor:
    """Return the logits in the output of a model."""
    read = output.get if isinstance(output, dict) else lambda name: getattr(output, name, None)
    found = [read(name) for name in ("logits", "last_hidden_state", "prediction_logits")]
    ends = [read(name) for name in ("start_logits", "end_logits")]
    if all(isinstance(value, Tensor) for value in ends):
        found.append(torch.stack(ends, -1))  # type: ignore[arg-type]
    found += [read("pooler_output"), output, read("output")]
    if isinstance(output, list | tuple):
        found += [value for value in output if isinstance(value, Tensor) and value.dim() >= 2]
    for value in found:
        if isinstance(value, Tensor):
            return value
    raise InputError(
        f"the model returned {type(output).__name__}; return logits, a tensor of shape (batch, length, vocabulary), or "
        "an object with .logits"
    )


def parameter_names(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or of the forward method of a module."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}
