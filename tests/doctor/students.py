"""Twelve models as a student would write them in plain PyTorch, each with one subtle fault, or mended.

`STUDENTS` maps the name of a fault to (a function that builds the model and what is passed, the check that must
name the fault, a word of the cause that the reason must contain).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HEADS, DEPTH, CONTEXT, PAD = 61, 32, 4, 2, 40, 0


def causal_mask(T):
    return torch.tril(torch.ones(T, T, dtype=torch.bool))


class SelfAttention(nn.Module):
    """Attention with the options that the students' models need."""

    def __init__(self, mask_late=False):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mask_late = mask_late

    def forward(self, x, mask):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2))
        att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        if self.mask_late:
            att = F.softmax(att, dim=-1)
            att = att * mask
        else:
            att = att.masked_fill(~mask, float("-inf"))
            att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).reshape(B, T, WIDTH)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm, mask_late=False):
        super().__init__()
        self.ln1, self.ln2 = norm(WIDTH), norm(WIDTH)
        self.attn = SelfAttention(mask_late)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x, mask):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class BatchStatisticsNorm(nn.Module):
    """Meant to be a layer norm, but the mean and the variance are taken over the first axis."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(0, keepdim=True)
        var = ((x - mean) ** 2).mean(0, keepdim=True)
        return self.scale * (x - mean) / torch.sqrt(var + 1e-1) + self.shift


class GPT(nn.Module):
    """A small GPT; each keyword is one of the faults."""

    def __init__(self, window=None, window_fault=False, norm=nn.LayerNorm, mask_late=False, twice=False, tie=None):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(norm, mask_late) for _ in range(DEPTH)])
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.max_len = CONTEXT
        if window is not None:
            self.window = window
        self.window_fault, self.twice = window_fault, twice
        if tie is not None:
            self.tie_weights = True
            self.head.weight = nn.Parameter(self.tok.weight.clone()) if tie == "copied" else self.tok.weight

    def forward(self, ids):
        T = ids.size(1)
        pos = self.pos(torch.arange(T))
        x = self.tok(ids) + pos
        if self.twice:
            x = x + pos
        mask = causal_mask(T)
        if hasattr(self, "window"):
            distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
            mask = mask & (distance <= self.window if self.window_fault else distance < self.window)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.ln(x))


class ConvolutionGPT(nn.Module):
    """A GPT with a convolution over neighbours before its blocks."""

    def __init__(self, faulty):
        super().__init__()
        self.gpt = GPT()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1 if faulty else 0)
        self.faulty = faulty

    def forward(self, ids):
        x = self.gpt.tok(ids) + self.gpt.pos(torch.arange(ids.size(1)))
        h = x.transpose(1, 2)
        x = x + self.conv(h if self.faulty else F.pad(h, (2, 0))).transpose(1, 2)
        for block in self.gpt.blocks:
            x = block(x, causal_mask(ids.size(1)))
        return self.gpt.head(self.gpt.ln(x))


class Classifier(nn.Module):
    """An encoder that averages its tokens; it finds the padding by its id."""

    def __init__(self, faulty):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.out = nn.Linear(WIDTH, 5)
        self.faulty = faulty

    def forward(self, ids):
        real = ids != PAD
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        if self.faulty:
            return self.out(x.sum(1) / real.sum(1, keepdim=True))
        return self.out((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))


class DropoutGPT(GPT):
    def __init__(self, faulty):
        super().__init__()
        self.faulty = faulty

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        x = F.dropout(x, 0.1) if self.faulty else F.dropout(x, 0.1, training=self.training)
        for block in self.blocks:
            x = block(x, causal_mask(ids.size(1)))
        return self.head(self.ln(x))


def rotate(x, positions):
    """Rotate pairs of features by position; x is (B, H, T, K), positions (B, T)."""
    half = x.size(-1) // 2
    freqs = 1.0 / 100 ** (torch.arange(half) / half)
    angles = positions[:, None, :, None] * freqs
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class RopeGPT(nn.Module):
    """A GPT with rotary positions and a cache: step(ids, state, mask) gives logits and the new state."""

    def __init__(self, unrotated_cache=False, off_after_padding=False):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.unrotated_cache, self.off_after_padding = unrotated_cache, off_after_padding
        nn.init.normal_(self.tok.weight, std=1.0)

    def forward(self, ids, attention_mask=None):
        return self.step(ids, None, attention_mask)[0]

    def step(self, ids, state=None, mask=None):
        B, T = ids.shape
        past = 0 if state is None else state[0][0].size(2)
        mask = torch.ones(B, past + T) if mask is None else mask.float()
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        if self.off_after_padding and state is not None:
            positions = positions + (mask[:, 0] == 0)[:, None]
        visible = torch.arange(past + T)[None, :] <= torch.arange(past, past + T)[:, None]
        visible = visible & mask.bool()[:, None, None, :]
        visible = visible | torch.eye(past + T, dtype=torch.bool)[past:]  # padding sees itself
        x, new_state = self.tok(ids), []
        for i, block in enumerate(self.blocks):
            h = block.ln1(x)
            q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in block.attn.qkv(h).split(WIDTH, dim=2))
            q, rotated = rotate(q, positions), rotate(k, positions)
            stored = k if self.unrotated_cache else rotated
            keys, values = rotated, v
            if state is not None:
                keys, values = torch.cat((state[i][0], rotated), 2), torch.cat((state[i][1], v), 2)
                stored = torch.cat((state[i][0], stored), 2)
            new_state.append((stored, values))
            att = (q @ keys.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~visible, float("-inf"))
            y = (F.softmax(att, -1) @ values).transpose(1, 2).reshape(B, T, WIDTH)
            x = x + block.attn.proj(y)
            x = x + block.mlp(block.ln2(x))
        return self.head(self.ln(x)), new_state


class Translator(nn.Module):
    """An encoder-decoder that finds the padding of the source by its id."""

    def __init__(self, faulty):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Embedding(CONTEXT, WIDTH)
        self.encoder, self.decoder = Block(), Block()
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.faulty = faulty

    def forward(self, src, tgt):
        padding = src == PAD
        memory = self.encoder(self.src(src) + self.pos(torch.arange(src.size(1))), ~padding[:, None, None, :])
        x = self.tgt(tgt) + self.pos(torch.arange(tgt.size(1)))
        x = self.decoder(x, causal_mask(tgt.size(1)))
        x = x + self.cross(x, memory, memory, key_padding_mask=None if self.faulty else padding)[0]
        return self.head(x)


def loss_that_shifts(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def plain_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _window(faulty):
    return GPT(window=5, window_fault=faulty), {}


def _cache_after_padding(faulty):
    model = RopeGPT(off_after_padding=faulty)
    return model, {"cached": model.step, "pad_id": PAD}


def _unrotated(faulty):
    model = RopeGPT(unrotated_cache=faulty)
    return model, {"cached": model.step}


def _labels(faulty):
    tokens = torch.randint(1, VOCAB, (4, 14), generator=torch.Generator().manual_seed(1))
    loss = loss_that_shifts if faulty else plain_loss
    return GPT(), {"batch": (tokens[:, :-1], tokens[:, 1:]), "loss": loss}


STUDENTS = {
    "off-by-one window": (_window, "window", "off by one"),
    "cache position off by one after padding": (_cache_after_padding, "cache", "after padding"),
    "leak through a convolution": (lambda faulty: (ConvolutionGPT(faulty), {}), "causality", "convolution"),
    "batch statistics in a norm": (
        lambda faulty: (GPT(norm=BatchStatisticsNorm if faulty else nn.LayerNorm), {}),
        "batch",
        "statistics over the batch",
    ),
    "pad embedding summed in pooling": (lambda faulty: (Classifier(faulty), {"pad_id": PAD}), "padding", "pooling"),
    "rotation missing on cached keys": (_unrotated, "cache", "rotation"),
    "cross-attention ignoring source padding": (
        lambda faulty: (Translator(faulty), {"pad_id": PAD}),
        "cross_padding",
        "padding of the source",
    ),
    "tied head silently untied": (
        lambda faulty: (GPT(tie="copied" if faulty else "shared"), {}),
        "tying",
        "two tensors",
    ),
    "dropout left on": (lambda faulty: (DropoutGPT(faulty), {}), "dropout", "on in evaluation"),
    "mask after softmax": (lambda faulty: (GPT(mask_late=faulty), {}), "mask_after_softmax", "after the softmax"),
    "labels shifted twice": (_labels, "label_shift", "shifted twice"),
    "positions added twice": (lambda faulty: (GPT(twice=faulty), {}), "positions_twice", "added twice"),
}


def page_of(report, folder):
    """Return the HTML page of a report."""
    report.html(folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")
