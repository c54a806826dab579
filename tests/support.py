"""Helpers of the tests: tiny models of every preset, inputs, padding, cached runs, taps and comparisons.

Sizes differ from each other and from those of `tiny` (vocabulary 61, width 36, hidden 46, window 5, heads 3 or 6), so
that a swapped axis fails: B rows, T tokens of a text or a target, S tokens of a source.
"""

import functools

import torch
from torch import nn
from torch.testing import assert_close

from monoblock.config import presets
from monoblock.config.families import bert, gpt, llama, vaswani
from monoblock.config.model import EmbeddingConfig, ModelConfig
from monoblock.config.presets import PRESETS
from monoblock.model import Transformer
from monoblock.nn.norm import Norm

B, T, S = 11, 13, 17
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}
tiny = functools.cache(presets.tiny)


# -- presets and models ---------------------------------------------------------------------------------------------


def preset_names(keep=lambda config: True):
    """The names of the presets whose configuration passes `keep`."""
    return [name for name, row in PRESETS.items() if keep(row.config)]


def tiny_names(keep=lambda config: True):
    """The names of the presets whose configuration passes `keep`, one of those with the same tiny configuration."""
    return list({tiny(name): name for name in reversed(preset_names(keep))}.values())[::-1]


# Tiny models with knobs that no published model sets.
VARIANTS = {
    "linear attention": llama(
        vocab=61, width=36, depth=2, heads=6, context=64, hidden=46, kv_heads=3, attention="linear", qk_norm=True
    ),
    "linear encoder-decoder": vaswani(
        vocab=61, target_vocab=61, width=36, depth=2, heads=3, context=64, hidden=46, attention="linear"
    ),
    "sparse encoder": bert(
        **{"vocab": 61, "width": 36, "depth": 2, "heads": 3, "context": 64, "hidden": 46, "head": "masked_lm"},
        **{"window": 3, "global_tokens": True, "random_blocks": 1, "block_size": 2},
    ),
    "batch norm": gpt(vocab=61, width=36, depth=2, heads=3, context=64, hidden=46, norm="batch"),
    "attention only": gpt(
        **{"vocab": 61, "width": 36, "depth": 2, "heads": 3, "context": 64, "norm": "none", "residual": "none"},
        hidden=0,
    ),
}


def law_names(keep=lambda config: True):
    """The names of the presets and variants whose configuration passes `keep`, each tiny configuration once."""
    return tiny_names(keep) + [name for name, config in VARIANTS.items() if keep(config)]


def tiny_config(name):
    """The tiny configuration of a preset, or a variant."""
    return VARIANTS[name] if name in VARIANTS else tiny(name)


def has_decoder(config):
    return config.decoder is not None


def is_text(config):
    return isinstance(config.input, EmbeddingConfig)


def has_encoder(config):
    return is_text(config) and config.encoder is not None


def is_encoder_decoder(config):
    return config.family == "encoder-decoder"


def is_single_text(config):
    return is_text(config) and config.family != "encoder-decoder"


def block_configs(config):
    return [block for stack in config.stacks.values() for block in stack.layers()]


def has_experts(config):
    return any(block.feedforward.experts for block in block_configs(config))


@torch.no_grad()
def randomize_weights(model, seed=0):
    """Randomize every weight: matrices by fan in, norms around their start, biases and gains around 0."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(p) for m in model.modules() if isinstance(m, Norm) for p in m.parameters(recurse=False)}
    variances = {id(m.running_var) for m in model.modules() if isinstance(m, Norm)}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for weight in [*model.parameters(), *model.buffers()]:
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
        if id(weight) in norms:
            weight.add_(0.3 * noise)
        elif id(weight) in variances:
            weight.copy_(16 * torch.exp(0.3 * noise))
        elif weight.dim() < 2:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise if id(weight) in embeddings else noise * weight[0].numel() ** -0.5)
    return model


def build_model(config: ModelConfig, dtype=torch.float32, seed=0):
    """A model of this configuration with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    return randomize_weights(Transformer(config).to(dtype), seed).eval()


@functools.cache
def tiny_model(name, dtype=torch.float32):
    """The cached tiny model of a preset."""
    return build_model(tiny_config(name), dtype)


# -- input ----------------------------------------------------------------------------------------------------------


def random_tokens(rows=B, length=T, vocab=61, seed=0):
    """Random ids (B, T) from 1 up; 0 is left for padding and for changes."""
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_source(rows=B, length=S):
    return random_tokens(rows, length, seed=5)


def random_pixels(config, rows=B, dtype=torch.float32):
    patches = config.input
    shape = (rows, patches.channels, patches.image, patches.image)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


def example_inputs(model, rows=B, length=T):
    """Positional arguments for a model of any family."""
    if not is_text(model.config):
        return (random_pixels(model.config, rows, next(model.parameters()).dtype),)
    ids = random_tokens(rows, length)
    return (random_source(rows), ids) if is_encoder_decoder(model.config) else (ids,)


def run_model(model, ids, mask=None, *, source_ids=None, **options):
    """The output of a model for a text, or for a target with a source that is always the same by default."""
    if is_encoder_decoder(model.config):
        source_ids = random_source(ids.shape[0]) if source_ids is None else source_ids
        return model(source_ids, ids, target_mask=mask, **options)
    return model(ids, attention_mask=mask, **options)


def pad_rows(ids, left, right):
    """Pad rows with `left` and `right` tokens (numbers, or one for each row); also return the mask of valid tokens."""
    rows, length = ids.shape
    left, right = (torch.as_tensor(n).expand(rows) for n in (left, right))
    width = int((left + right).max()) + length
    index = torch.arange(width).expand(rows, width)
    valid = (index >= left[:, None]) & (index < left[:, None] + length)
    out = torch.zeros(rows, width, dtype=ids.dtype)
    out[valid] = ids.flatten()
    return out, valid


def ragged_padding(rows=B, limit=4):
    """0, 1, 2, … padding tokens, a different number in neighbouring rows."""
    return torch.arange(rows) % limit


PADDINGS = {"left": (3, 0), "right": (0, 5), "both": (2, 3), "ragged": (ragged_padding(), ragged_padding().flip(0))}


def unpad_rows(out, valid):
    """The valid tokens of (B, T, D); an output (B, D) stays as it is."""
    return out[valid].unflatten(0, (out.shape[0], -1)) if out.dim() == 3 else out


# -- cached runs ----------------------------------------------------------------------------------------------------


def chunk_lengths(length, sizes):
    """Lengths of chunks that add up to `length`, repeating `sizes`."""
    lengths, index = [], 0
    while sum(lengths) < length:
        lengths.append(min(sizes[index % len(sizes)], length - sum(lengths)))
        index += 1
    return lengths


def run_cached(model, ids, sizes, *, chunk=16, source_ids=None):
    """Logits of a text read through a cache in chunks of the given sizes."""
    cache, out = model.make_cache(ids.shape[0], ids.shape[1], chunk=chunk), []
    for chunk_ids in ids.split(chunk_lengths(ids.shape[1], sizes), dim=1):
        out.append(run_model(model, chunk_ids, cache=cache, source_ids=source_ids))
        cache.advance(chunk_ids.shape[1])
    return torch.cat(out, 1)


# -- taps -----------------------------------------------------------------------------------------------------------


class ActivationTap:
    """A tap that records and wants activations by the ends of their names, and so selects the plain path."""

    def __init__(self, *endings):
        self.endings, self.activations = endings, {}

    def wants(self, name):
        return name.endswith(self.endings)

    def __call__(self, name, tensor):
        if self.endings and name.endswith(self.endings):
            self.activations[name] = tensor
        return tensor


class LeafTap:
    """A tap that makes one activation a leaf of the graph, to read its gradient."""

    def __init__(self, name):
        self.name, self.leaf = name, None

    def wants(self, name):
        return False

    def __call__(self, name, tensor):
        if name != self.name:
            return tensor
        self.leaf = tensor.detach().requires_grad_()
        return self.leaf


def all_experts_tap():
    """A tap that runs every token through every expert, so that no bit depends on other rows."""
    return ActivationTap("feedforward.outputs")


def assert_near(actual, expected, dtype=None):
    """Compare up to rounding, for other shapes or another kernel."""
    limit = TOLERANCE[dtype or expected.dtype]
    assert_close(actual, expected, atol=limit, rtol=limit)


def assert_near_in_norm(actual, expected, limit=5e-4):
    """Compare up to activations rounded to 16 bits, as in products with quantized matrices on a CPU."""
    assert actual.shape == expected.shape
    assert float((actual - expected).norm()) <= limit * float(expected.norm())


def assert_bit_equal(actual, expected):
    """Compare bits, for the same shapes, threads and kernels."""
    assert_close(actual, expected, atol=0, rtol=0)
