"""What the tests share: toy models of every preset with weights that matter, tokens, padding, cached runs.

Sizes differ from each other and from those of `tiny` (vocabulary 61, width 36, hidden 46, window 5, heads 3 or 6), so
that no swapped axis passes: B rows, T tokens of a text or a target, S tokens of a source.
"""

import functools

import torch
from torch import nn
from torch.testing import assert_close

from monoblock.config import EmbeddingConfig, ModelConfig
from monoblock.model import Transformer
from monoblock.norm import Norm
from monoblock.presets import PRESETS, tiny

B, T, S = 11, 13, 17
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-10}


# -- presets and models ---------------------------------------------------------------------------------------------


def presets(keep=lambda config: True):
    """The names of all presets, or of those whose configuration passes."""
    return [name for name, row in PRESETS.items() if keep(row.config)]


def is_decoder(config):
    return config.decoder is not None


def is_text(config):
    return isinstance(config.input, EmbeddingConfig)


def has_encoder(config):
    return is_text(config) and config.encoder is not None


def has_both(config):
    return config.family == "encoder-decoder"


def is_single_text(config):
    return is_text(config) and config.family != "encoder-decoder"


def blocks(config):
    return [block for stack in config.stacks.values() for block in stack.layers()]


def has_experts(config):
    return any(block.feedforward.experts for block in blocks(config))


@torch.no_grad()
def stir(model, seed=0):
    """Give every weight a value that matters: matrices by fan in, norms around their start, biases and gains near 0."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(p) for m in model.modules() if isinstance(m, Norm) for p in m.parameters(recurse=False)}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for weight in [*model.parameters(), *model.buffers()]:
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
        if id(weight) in norms:
            weight.add_(0.3 * noise)
        elif weight.dim() < 2:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise if id(weight) in embeddings else noise * weight[0].numel() ** -0.5)
    return model


def build(config: ModelConfig, dtype=torch.float32, seed=0):
    """A model of this configuration, stirred, in evaluation mode."""
    torch.manual_seed(seed)
    return stir(Transformer(config).to(dtype), seed).eval()


@functools.cache
def toy(name, dtype=torch.float32):
    """The tiny model of a preset, built once."""
    return build(tiny(name), dtype)


# -- input ----------------------------------------------------------------------------------------------------------


def tokens(rows=B, length=T, vocab=61, seed=0):
    """Ids from 1 up: 0 is left for padding and for changes."""
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def source(rows=B, length=S):
    return tokens(rows, length, seed=5)


def pixels(config, rows=B, dtype=torch.float32):
    given = config.input
    shape = (rows, given.channels, given.image, given.image)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


def given(model, rows=B, length=T):
    """What a model of any family reads, as positional arguments."""
    if not is_text(model.config):
        return (pixels(model.config, rows, next(model.parameters()).dtype),)
    ids = tokens(rows, length)
    return (source(rows), ids) if has_both(model.config) else (ids,)


def read(model, ids, mask=None, *, src=None, **options):
    """The model's answer to a text, or to a target beside a source that is always the same."""
    if has_both(model.config):
        src = source(ids.shape[0]) if src is None else src
        return model(src, ids, target_mask=mask, **options)
    return model(ids, attention_mask=mask, **options)


def padded(ids, left, right):
    """Rows of one length with so much padding before and after each (numbers, or one a row); and the mask."""
    rows, length = ids.shape
    left, right = (torch.as_tensor(n).expand(rows) for n in (left, right))
    wide = int((left + right).max()) + length
    places = torch.arange(wide).expand(rows, wide)
    real = (places >= left[:, None]) & (places < left[:, None] + length)
    out = torch.zeros(rows, wide, dtype=ids.dtype)
    out[real] = ids.flatten()
    return out, real


def ragged(rows=B, most=4):
    """0, 1, 2 … of padding, a different number in neighbouring rows."""
    return torch.arange(rows) % most


PADDINGS = {"left": (3, 0), "right": (0, 5), "both": (2, 3), "ragged": (ragged(), ragged().flip(0))}


def real_part(out, real):
    """The real places of (B, T, …); one vector a sequence stays as it is."""
    return out[real].unflatten(0, (out.shape[0], -1)) if out.dim() == 3 else out


# -- cached runs ----------------------------------------------------------------------------------------------------


def cut(length, sizes):
    """Lengths of chunks: `sizes` again and again until `length` is used up."""
    out, place = [], 0
    while sum(out) < length:
        out.append(min(sizes[place % len(sizes)], length - sum(out)))
        place += 1
    return out


def cached(model, ids, sizes, *, chunk=16, src=None):
    """Logits of a text read through a cache in pieces of the given sizes."""
    cache, out = model.make_cache(ids.shape[0], ids.shape[1], chunk=chunk), []
    for piece in ids.split(cut(ids.shape[1], sizes), dim=1):
        out.append(read(model, piece, cache=cache, src=src))
        cache.advance(piece.shape[1])
    return torch.cat(out, 1)


# -- taps -----------------------------------------------------------------------------------------------------------


class Asks:
    """A tap that changes nothing and asks for the activations whose names end so: it picks the plain path."""

    def __init__(self, *endings):
        self.endings, self.seen = endings, {}

    def wants(self, name):
        return name.endswith(self.endings)

    def __call__(self, name, tensor):
        if self.endings and name.endswith(self.endings):
            self.seen[name] = tensor
        return tensor


class Leaf:
    """A tap that makes one activation a leaf, so that gradients can be asked of it."""

    def __init__(self, name):
        self.name, self.leaf = name, None

    def wants(self, name):
        return False

    def __call__(self, name, tensor):
        if name != self.name:
            return tensor
        self.leaf = tensor.detach().requires_grad_()
        return self.leaf


def all_experts():
    """A tap that sends every token through every expert, so that neighbours cannot move a bit."""
    return Asks("feedforward.outputs")


def close(actual, expected, dtype=None):
    """Equal up to rounding: other shapes or another kernel."""
    limit = CLOSE[dtype or expected.dtype]
    assert_close(actual, expected, atol=limit, rtol=limit)


def near(actual, expected, limit=5e-4):
    """Equal up to activations rounded to 16 bits, as quantised matrices are multiplied on a CPU, through a model."""
    assert actual.shape == expected.shape
    assert float((actual - expected).norm()) <= limit * float(expected.norm())


def bit_equal(actual, expected):
    """The same bits: same shapes, threads and kernels."""
    assert_close(actual, expected, atol=0, rtol=0)
