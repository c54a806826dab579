"""A model as the engine sees it: what runs it, what it accepts as a prompt, and how much of it fits into memory.

`PreparedModel` is what decodes a model fast, in one object: its fast copy, CUDA graphs and quantized copies.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from monoblock.config.inputs import EmbeddingConfig
from monoblock.config.model import ModelConfig
from monoblock.config.positions import Learned
from monoblock.errors import InputError, with_article
from monoblock.inference.exact import reason_not_exact
from monoblock.inference.fast_modules import build_fast_model
from monoblock.inference.pages import Pages
from monoblock.inference.request import Prompt
from monoblock.inference.runners.cuda import CudaRunner, DevicePages, supports_cuda_graph
from monoblock.inference.runners.plain import ModelRunner, UncachedRunner
from monoblock.inference.settings import DRAFT_BITS, show
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.arguments import check_model
from monoblock.nn.kv_cache.paged import token_bytes
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import quantize

MAX_CPU_BYTES = 8 << 30  # of the key/value cache
CPU_ROWS = 512  # each beam counts as one
MAX_GPU_ROWS = 2560  # of a small model, the fastest measured on an H200 with 5 beams; fewer leave the GPU idle
MEMORY_SHARE = 0.4  # of the free memory of the GPU, for caches and logits


class PreparedModel:
    """The fast copy of a model with its recorded graphs and quantized copies (see `OptimizedModel`).

    Several threads may decode with it at the same time.
    """

    def __init__(self, model: nn.Module, *, exact: bool = False) -> None:
        if isinstance(model, PreparedModel):
            raise InputError("this model is optimized already; use it as it is, or give optimize the plain model")
        check_model(model, Transformer, "optimize")
        assert isinstance(model, Transformer)
        if (reason := reason_not_to_optimize(model)) is not None:
            raise InputError(f"this model cannot be optimized: {reason}; call model.generate, which runs its modules")
        if exact and (reason := reason_not_exact(model)) is not None:
            raise InputError(f"this model has no exact mode: {reason}; leave out exact=True")
        self.plain, self.exact = model, exact
        self.model = build_fast_model(model, exact=exact)
        self._drafts: dict[str, PreparedModel] = {}
        self._idle_pages: list[DevicePages] = []  # of the engine that ended last
        self._lock = threading.RLock()

    @property
    def config(self) -> ModelConfig:
        return self.plain.config

    @property
    def device(self) -> torch.device:
        return self.plain.device

    @property
    def bits(self) -> int | None:
        """The bits of a quantized weight; None if the weights are not quantized."""
        return None if self.config.quantize is None else self.config.quantize.bits

    def close(self) -> None:
        """Free recorded graphs, buffers and quantized copies; they are made again when they are needed."""
        with self._lock:
            self._drafts, self._idle_pages = {}, []
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __repr__(self) -> str:
        bits = "" if self.bits is None else f", {self.bits} bits"
        return f"{type(self).__name__}({self.config.family}, {self.device}{bits})"

    def draft(self, kind: str) -> PreparedModel:
        """Return the copy of the model quantized to "8-bit" or "4-bit", made on first use."""
        with self._lock:
            if kind not in self._drafts:
                with torch.inference_mode(False), torch.no_grad():
                    self._drafts[kind] = PreparedModel(quantize(self.plain, bits=DRAFT_BITS[kind]).eval())
            return self._drafts[kind]

    def make_runner(self, pages: Pages, sources: Pages, adapters: Mapping[str, Transformer] | None) -> ModelRunner:
        """Return what runs the fast copy, on a GPU with the recordings of the engine that ended last."""
        options: dict[str, Any] = {"plain": self.plain, "adapters": adapters, "exact": self.exact}
        if not supports_cuda_graph(self.model):
            return ModelRunner(self.model, pages, sources, **options)
        with self._lock:
            memory = self._idle_pages.pop() if self._idle_pages else DevicePages(self.model)
        runner = CudaRunner(self.model, pages, sources, memory=memory, **options)
        weakref.finalize(runner, _give_back, weakref.ref(self), memory).atexit = False
        return runner


def _give_back(owner: weakref.ref[PreparedModel], memory: DevicePages) -> None:
    """Keep the pages of an engine that has ended for the next one."""
    prepared = owner()
    if prepared is not None:
        with prepared._lock:
            prepared._idle_pages = [memory]


GenerativeModel = Transformer | PreparedModel  # what the engine decodes


def plain_model(model: GenerativeModel) -> Transformer:
    """Return the model as it was given to `optimize`, or itself."""
    return model.plain if isinstance(model, PreparedModel) else model


def make_runner(
    model: GenerativeModel,
    pages: Pages,
    sources: Pages,
    *,
    use_cache: bool = True,
    tap: Tap | None = None,
    adapters: Mapping[str, Transformer] | None = None,
) -> ModelRunner:
    """Return what runs a model: its modules, or the fast copy of an optimized model."""
    if isinstance(model, PreparedModel):
        if tap is not None or not use_cache:
            option = "taps" if use_cache else "use_cache=False"
            raise InputError(f"an optimized model has no {option}; call the model itself, which runs its modules")
        return model.make_runner(pages, sources, adapters)
    kind = ModelRunner if use_cache else UncachedRunner
    return kind(model, pages, sources, adapters=adapters, tap=tap)


# -- what fits into memory --------------------------------------------------------------------------------------------


def default_max_rows(model: Transformer, capacity: int) -> int:
    """Return how many sequences of at most `capacity` tokens to decode at the same time.

    On a GPU these are as many as fit into its free memory, at least one and at most MAX_GPU_ROWS.
    """
    if model.device.type != "cuda":
        return CPU_ROWS
    return max(1, min(MAX_GPU_ROWS, _free_bytes(model.device) // row_bytes(model, capacity)))


def _free_bytes(device: torch.device) -> int:
    """Return how much memory of a GPU caches and logits may take."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(MEMORY_SHARE * free)


def row_bytes(model: Transformer, capacity: int) -> int:
    """Return an estimate of the memory of one row in bytes: its keys and values, and three copies of its logits."""
    assert model.decoder is not None
    vocab: int = model.config.target_input.vocab  # type: ignore[union-attr]
    return token_bytes(model.decoder.config, next(model.parameters()).element_size()) * capacity + 3 * 4 * vocab


def default_num_pages(models: Sequence[GenerativeModel], capacity: int, max_rows: int) -> int:
    """Return the number of pages with which `max_rows` rows of `capacity` tokens run, or as many as fit into memory.

    It is an upper limit: the memory of pages is taken when they are first used.  One full row always fits.
    """
    full = -(-capacity // PAGE_SIZE) + 2
    device = models[0].device
    budget = _free_bytes(device) if device.type == "cuda" else MAX_CPU_BYTES
    size = sum(row_bytes(plain_model(model), PAGE_SIZE) for model in models)
    return 1 + max(full, min(max_rows * full, budget // size))


# -- what a model accepts ---------------------------------------------------------------------------------------------


class ModelLimits(NamedTuple):
    """What a model, or several that decode together, accept as a prompt."""

    family: str  # such as "decoder-only", for error texts
    device: torch.device
    vocab_size: int
    context: int | None  # the most tokens of a sequence, None for no limit
    has_encoder: bool  # whether a prompt needs a source
    source_vocab_size: int | None  # None if there is no encoder, or if it does not read tokens
    max_source: int | None  # the most tokens of a source, None for no limit


def limits_of(model: GenerativeModel) -> ModelLimits:
    """Return the limits of a model that generates text."""
    if not isinstance(model, PreparedModel):
        check_model(model, Transformer, "Engine", also="what mb.optimize(model) returns")
    plain = plain_model(model)
    if plain.decoder is None or plain.head is None or plain.head.config.kind != "language_model":
        kind = with_article(model.config.family)
        raise InputError(f"{kind} model without a language-model head generates no text; use a model with one")
    config, has_encoder = plain.config, plain.encoder is not None
    source_vocab_size = max_source = None
    if has_encoder and isinstance(config.input, EmbeddingConfig):
        source_vocab_size = config.input.vocab
        max_source = config.input.context if isinstance(config.input.positions, Learned) else None
    vocab_size: int = config.target_input.vocab  # type: ignore[union-attr]
    limits = (vocab_size, config.context, has_encoder, source_vocab_size, max_source)
    return ModelLimits(config.family, plain.device, *limits)


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
        raise InputError(f"this {limits.family} model {what}")
    if prompt.source == ():
        raise InputError("the source is empty, so the encoder has nothing to read; give at least one token")
    if prompt.source is not None and limits.max_source is not None and len(prompt.source) > limits.max_source:
        raise InputError(
            f"a source of {len(prompt.source)} tokens is longer than the encoder's {limits.max_source} positions; "
            f"shorten the source"
        )
    _check_ids(prompt.ids, limits.vocab_size, "prompt")
    if prompt.source is not None and limits.source_vocab_size is not None:
        _check_ids(prompt.source, limits.source_vocab_size, "source")


def _check_ids(ids: tuple[int, ...], vocab_size: int, name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(
            f"token id {show(wrong)} is outside the vocabulary of {vocab_size} tokens; "
            f"encode the {name} with the tokenizer of this model"
        )
