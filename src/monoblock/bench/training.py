"""Time a training step of a GPT beside transformers and torch's own layers, and what the hardware can do at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config.model import ModelConfig
from monoblock.model import Transformer
from monoblock.training.loss import CrossEntropyLoss

OURS, THEIRS, PLAIN = "monoblock", "transformers", "nanoGPT's operations"
WARMUP_ROUNDS = 3
CEILING_ROUNDS = 8


class PlainBlock(nn.Module):
    """A pre-norm block with one projection to queries, keys and values, and torch's fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feedforward_norm(x))))


class PlainGpt(nn.Module):
    """A GPT of torch's own layers, with the operations of nanoGPT: learned positions, exact GELU, tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        vocab, context, heads = _gpt_sizes(config)
        self.token = nn.Embedding(vocab, config.width)
        self.position = nn.Embedding(context, config.width)
        self.blocks = nn.ModuleList(PlainBlock(config.width, heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


def _gpt_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Return the vocabulary, the context and the number of heads of a GPT."""
    assert config.decoder is not None
    assert config.context is not None
    return config.input.vocab, config.context, next(iter(config.decoder.layers())).attention.heads  # type: ignore[union-attr]


def build_reference(config: ModelConfig) -> Any:
    """Build GPT-2 of the same shape in transformers, without dropout."""
    transformers: Any = import_module("transformers")
    vocab, context, heads = _gpt_sizes(config)
    sizes = {"n_embd": config.width, "n_layer": config.depth, "n_head": heads, "n_positions": context}
    special = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=vocab, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes, **special)
    )


def build_models(config: ModelConfig, with_peers: bool = True) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Build the models to compare; return them by name, and for each one that is not available the reason."""
    models: dict[str, nn.Module] = {OURS: Transformer(config)}
    if not with_peers:
        return models, {}
    models[PLAIN] = PlainGpt(config)
    if find_spec("transformers") is None:
        return models, {THEIRS: "not installed"}
    return models | {THEIRS: build_reference(config)}, {}


def time_step(model: nn.Module, ids: Tensor) -> float:
    """Return the seconds of one forward pass, loss and backward pass; our model has the loss of our trainer."""
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model.zero_grad(set_to_none=True)
    synchronize(str(ids.device))
    start = time.perf_counter()
    if isinstance(model, Transformer):
        loss = CrossEntropyLoss()(model, {"source": inputs}, labels) / labels.numel()
    else:
        out = model(inputs)
        logits = out if isinstance(out, Tensor) else out.logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    synchronize(str(ids.device))
    return time.perf_counter() - start


def time_models(models: dict[str, nn.Module], ids: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each model's steps; the models take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    warmup = min(WARMUP_ROUNDS, rounds)
    for round_number in range(rounds + warmup):
        for name, model in models.items():
            step_seconds = time_step(model.train(), ids)
            if round_number >= warmup:
                seconds[name].append(step_seconds)
    return seconds


# -- what the hardware can do at most ---------------------------------------------------------------------------------


class Ceilings(NamedTuple):
    flops: float  # per second, of a product of two large matrices in the dtype of the model
    bytes: float  # per second, read or copied in memory that is larger than the caches


def measure_ceilings(device: str, dtype: torch.dtype, small: bool = False) -> Ceilings:
    """Measure both on a device; `small` takes sizes that need no time, whose speed says nothing."""
    is_gpu = torch.device(device).type == "cuda"
    size = 64 if small else 8192 if is_gpu else 2048
    flops = 2 * size**3 / best_product_seconds(size, device, dtype)
    count = 1 << (16 if small else 30 if is_gpu else 28)  # numbers of four bytes
    numbers = torch.ones(count, device=device)
    copied = torch.empty_like(numbers)
    read = 4 * count / _best_seconds(numbers.sum, device)
    copy = 8 * count / _best_seconds(lambda: copied.copy_(numbers), device)
    return Ceilings(flops, max(read, copy))


def best_product_seconds(size: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Return the seconds of the fastest of some products of two matrices (size, size)."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return _best_seconds(lambda: a @ b, device)


def _best_seconds(work: Callable[[], Any], device: str) -> float:
    seconds = []
    for _ in range(CEILING_ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def synchronize(device: str) -> None:
    """Wait until a GPU has finished; on a CPU there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
