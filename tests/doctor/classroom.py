"""Mistakes of the classroom: three small GPTs as students write them, and for each mistake the lines that it replaces.

`STYLES` holds the source of each healthy script: a model, a batch, a loss, an optimizer, a step and a generator.
`MISTAKES` is the table mistake x style: the replaced lines, or the reason why the mistake cannot be made in that style;
the check that must name it, and words that its reason and its fix must contain.  `build` executes a script.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch

# A batch of sentences, filled up with 0, the id of padding; the same in each script.
DATA = """
torch.manual_seed(1337)
lengths = torch.tensor([24, 24, 17, 13])
data = torch.randint(1, 61, (4, 24))
data[torch.arange(24) >= lengths[:, None]] = 0  # padding
"""

# -- (a) as in the lecture: heads one by one in a list, scores (B, T, T) --------------------------------------------
LECTURE = '''
import torch
import torch.nn as nn
from torch.nn import functional as F

vocab_size = 61
block_size = 40
n_embd = 32
n_head = 4
n_layer = 3
dropout = 0.1
learning_rate = 3e-4

class Head(nn.Module):
    """ one head of self-attention """

    def __init__(self, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer('tril', torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        k = self.key(x)
        q = self.query(x)
        # compute attention scores ("affinities")
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float('-inf'))
        wei = F.softmax(wei, dim=-1)
        wei = self.dropout(wei)
        # perform the weighted aggregation of the values
        v = self.value(x)
        out = wei @ v
        return out

class MultiHeadAttention(nn.Module):
    """ multiple heads of self-attention in parallel """

    def __init__(self, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        out = self.dropout(self.proj(out))
        return out

class FeedForward(nn.Module):
    """ a simple linear layer followed by a non-linearity """

    def __init__(self, n_embd):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd),
            nn.ReLU(),
            nn.Linear(4 * n_embd, n_embd),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)

class Block(nn.Module):
    """ Transformer block: communication followed by computation """

    def __init__(self, n_embd, n_head):
        super().__init__()
        head_size = n_embd // n_head
        self.sa = MultiHeadAttention(n_head, head_size)
        self.ffwd = FeedForward(n_embd)
        self.ln1 = nn.LayerNorm(n_embd)
        self.ln2 = nn.LayerNorm(n_embd)

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        x = x + self.ffwd(self.ln2(x))
        return x

class GPTLanguageModel(nn.Module):

    def __init__(self):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head=n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd) # final layer norm
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets=None):
        B, T = idx.shape
        tok_emb = self.token_embedding_table(idx) # (B,T,C)
        pos_emb = self.position_embedding_table(torch.arange(T)) # (T,C)
        x = tok_emb + pos_emb # (B,T,C)
        x = self.blocks(x) # (B,T,C)
        x = self.ln_f(x) # (B,T,C)
        logits = self.lm_head(x) # (B,T,vocab_size)
        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape
            logits = logits.view(B*T, C)
            targets = targets.view(B*T)
            loss = F.cross_entropy(logits, targets, ignore_index=0)
        return logits, loss

    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            idx_cond = idx[:, -block_size:]
            logits, loss = self(idx_cond)
            probs = F.softmax(logits[:, -1, :], dim=-1)
            idx_next = torch.multinomial(probs, num_samples=1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx

# --data--
x = data[:, :-1].contiguous()
y = data[:, 1:].contiguous()

model = GPTLanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

def train_step():
    model.train()
    logits, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item()

@torch.no_grad()
def sample(ids):
    model.eval()
    return model.generate(ids, max_new_tokens=8)
'''

# -- (b) as nanoGPT: one product for queries, keys and values, scores (B, H, T, T) ----------------------------------
NANOGPT = """
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        # key, query, value projections for all heads, but in a batch
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        # output projection
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        # regularization
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size))
                                    .view(1, 1, config.block_size, config.block_size))

    def forward(self, x):
        B, T, C = x.size() # batch size, sequence length, embedding dimensionality (n_embd)
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) # (B, nh, T, hs)
        # causal self-attention; Self-attend: (B, nh, T, hs) x (B, nh, hs, T) -> (B, nh, T, T)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C) # re-assemble all head outputs side by side
        # output projection
        y = self.resid_dropout(self.c_proj(y))
        return y

class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        x = self.dropout(x)
        return x

class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x

@dataclass
class GPTConfig:
    block_size: int = 40
    vocab_size: int = 61
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.1
    bias: bool = True

class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte = nn.Embedding(config.vocab_size, config.n_embd),
            wpe = nn.Embedding(config.block_size, config.n_embd),
            drop = nn.Dropout(config.dropout),
            h = nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f = nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight # https://paperswithcode.com/method/weight-tying
        # init all weights
        self.apply(self._init_weights)
        # apply special scaled init to the residual projections, per GPT-2 paper
        for pn, p in self.named_parameters():
            if pn.endswith('c_proj.weight'):
                torch.nn.init.normal_(p, mean=0.0, std=0.02/math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        device = idx.device
        b, t = idx.size()
        assert t <= self.config.block_size, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=device) # shape (t)
        # forward the GPT model itself
        tok_emb = self.transformer.wte(idx) # token embeddings of shape (b, t, n_embd)
        pos_emb = self.transformer.wpe(pos) # position embeddings of shape (t, n_embd)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            # if we are given some desired targets also calculate the loss
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=0)
        else:
            # inference-time mini-optimization: only forward the lm_head on the very last position
            logits = self.lm_head(x[:, [-1], :]) # note: using list [-1] to preserve the time dim
            loss = None
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            idx_cond = idx if idx.size(1) <= self.config.block_size else idx[:, -self.config.block_size:]
            logits, _ = self(idx_cond)
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < v[:, [-1]]] = -float('Inf')
            probs = F.softmax(logits, dim=-1)
            idx_next = torch.multinomial(probs, num_samples=1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx

# --data--
x, y = data[:, :-1], data[:, 1:]

model = GPT(GPTConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

def train_step():
    model.train()
    logits, loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss

def sample(ids):
    model.eval()
    return model.generate(ids, 8, temperature=0.8, top_k=20)
"""

# -- (c) with nn.MultiheadAttention and attn_mask -------------------------------------------------------------------
MULTIHEAD = """
import torch
from torch import nn
import torch.nn.functional as F

VOCAB, D_MODEL, NUM_HEADS, NUM_LAYERS, MAX_LEN, PAD = 61, 32, 4, 3, 40, 0

class TransformerBlock(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, num_heads, dropout=dropout, batch_first=True)
        self.ff = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.GELU(),
            nn.Linear(4 * d_model, d_model),
        )
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        h = self.norm1(x)
        attn_out, _ = self.attn(h, h, h, attn_mask=mask, need_weights=False)
        x = x + self.dropout(attn_out)
        x = x + self.dropout(self.ff(self.norm2(x)))
        return x

class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_emb = nn.Embedding(VOCAB, D_MODEL)
        self.pos_emb = nn.Embedding(MAX_LEN, D_MODEL)
        self.layers = nn.ModuleList([TransformerBlock(D_MODEL, NUM_HEADS) for _ in range(NUM_LAYERS)])
        self.norm = nn.LayerNorm(D_MODEL)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(D_MODEL, VOCAB)

    def forward(self, ids):
        seq_len = ids.size(1)
        positions = torch.arange(seq_len, device=ids.device)
        x = self.dropout(self.token_emb(ids) + self.pos_emb(positions))
        # True: this key may not be seen
        mask = torch.triu(torch.ones(seq_len, seq_len, dtype=torch.bool), diagonal=1)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return self.out(x)

def loss_fn(logits, labels):
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=PAD)

# --data--
x = data[:, :-1]
y = data[:, 1:]

model = TinyGPT()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

def train_step():
    model.train()
    optimizer.zero_grad()
    logits = model(x)
    loss = loss_fn(logits, y)
    loss.backward()
    optimizer.step()
    return loss.item()

@torch.no_grad()
def sample(ids):
    model.eval()
    for _ in range(8):
        logits = model(ids[:, -MAX_LEN:])
        probs = torch.softmax(logits[:, -1], dim=-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return ids
"""

STYLES = {"lecture": LECTURE, "nanogpt": NANOGPT, "multihead": MULTIHEAD}

Lines = tuple[tuple[str, str], ...]  # (line of the healthy script, line in its place), stripped; "" leaves it out


@dataclass(frozen=True)
class Mistake:
    """One row of the table.

    cells: style -> the replaced lines, or the reason why the mistake cannot be made in that style.
    check: the check that must name it.
    words: a part of the reason that a student understands.
    fix: a part of the line to write; a mapping where it differs from style to style.
    hand_over: what the student gives to `mb.diagnose` beside the model; names of `Student`.
    """

    name: str
    cells: Mapping[str, Lines | str]
    check: str
    words: str
    fix: str | Mapping[str, str]
    hand_over: tuple[str, ...] = ()

    def line(self, style: str) -> str:
        return self.fix if isinstance(self.fix, str) else self.fix[style]


def lines(*pairs: str) -> Lines:
    """Return pairs of lines, old and new one after the other."""
    return tuple(zip(pairs[::2], pairs[1::2], strict=True))


def replace_lines(source: str, replaced: Lines) -> str:
    """Return a script in which each old line (found by its text without indent and comment) is the new one."""
    rows = source.replace("# --data--", DATA.strip("\n")).split("\n")
    for old, new in replaced:
        places = [i for i, row in enumerate(rows) if row.split(" # ")[0].strip() == old]
        assert places, f"no line {old!r}"
        for i in places:
            indent = rows[i][: len(rows[i]) - len(rows[i].lstrip())]
            rows[i] = "\n".join(indent + part for part in new.split("\n")) if new else ""
    return "\n".join(rows)


def build(style: str, mistake: Mistake | None = None, changes: Lines = ()) -> SimpleNamespace:
    """Execute a script; return its names: model, x, y, optimizer, train_step, sample, and loss_fn if it has one."""
    replaced = () if mistake is None else mistake.cells[style]
    assert not isinstance(replaced, str), replaced
    namespace: dict[str, object] = {"__name__": f"{style}_gpt"}
    rng_state = torch.get_rng_state()
    try:
        exec(compile(replace_lines(STYLES[style], (*changes, *replaced)), f"<{style}>", "exec"), namespace)
    finally:
        torch.set_rng_state(rng_state)
    return SimpleNamespace(**namespace)


# What a student can pass: the argument of mb.diagnose -> how it is taken from the executed script.
HANDED = {
    "batch": lambda s: (s.x, s.y),
    "loss": lambda s: getattr(s, "loss_fn", None),  # in two styles the loss is inside `forward`
    "step": lambda s: s.train_step,
    "optimizer": lambda s: s.optimizer,
    "pad_id": lambda s: 0,
    "generate": lambda s: s.sample,
}


def options_of(student: SimpleNamespace, names: tuple[str, ...]) -> dict[str, object]:
    return {name: HANDED[name](student) for name in names}


# -- lines of the scripts that several mistakes change --------------------------------------------------------------
L_MASK = "wei = wei.masked_fill(self.tril[:T, :T] == 0, float('-inf'))"
N_MASK = "att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))"
M_MASK = "mask = torch.triu(torch.ones(seq_len, seq_len, dtype=torch.bool), diagonal=1)"
L_SOFTMAX, N_SOFTMAX = "wei = F.softmax(wei, dim=-1)", "att = F.softmax(att, dim=-1)"
L_SCORES = "wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5"
N_SCORES = "att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))"
L_ATTENTION, L_FEEDFORWARD = "x = x + self.sa(self.ln1(x))", "x = x + self.ffwd(self.ln2(x))"
N_ATTENTION, N_FEEDFORWARD = "x = x + self.attn(self.ln_1(x))", "x = x + self.mlp(self.ln_2(x))"
M_ATTENTION, M_FEEDFORWARD = "x = x + self.dropout(attn_out)", "x = x + self.dropout(self.ff(self.norm2(x)))"
L_LOSS = "loss = F.cross_entropy(logits, targets, ignore_index=0)"
N_LOSS = "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=0)"
M_LOSS = "return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=PAD)"
L_FLAT, N_LOGITS, M_LOGITS = "logits = logits.view(B*T, C)", "logits = self.lm_head(x)", "return self.out(x)"
L_BLOCKS = "self.blocks = nn.Sequential(*[Block(n_embd, n_head=n_head) for _ in range(n_layer)])"
N_BLOCKS = "h = nn.ModuleList([Block(config) for _ in range(config.n_layer)]),"
M_BLOCKS = "self.layers = nn.ModuleList([TransformerBlock(D_MODEL, NUM_HEADS) for _ in range(NUM_LAYERS)])"
N_SPLIT = "k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)"
N_MODEL = "model = GPT(GPTConfig())"
L_LOGITS = "logits = self.lm_head(x)"
MASK_LINE = {
    "lecture": "scores = scores.masked_fill(",
    "nanogpt": "scores = scores.masked_fill(",
    "multihead": "attn_mask=torch.triu(torch.ones(",
}
ZEROS = "for p in model.parameters():\n    if p.dim() > 1:\n        nn.init.zeros_(p)"

# Other ways to write a healthy model: style and replaced lines.
VARIANTS = {
    "post-norm": (
        "lecture",
        lines(L_ATTENTION, "x = self.ln1(x + self.sa(x))", L_FEEDFORWARD, "x = self.ln2(x + self.ffwd(x))"),
    ),
    "parallel": (
        "nanogpt",
        lines(N_ATTENTION, "", N_FEEDFORWARD, "x = x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))"),
    ),
    "scaled_dot_product_attention": (
        "nanogpt",
        lines(
            *(part for line in (N_SCORES, N_MASK, N_SOFTMAX, "att = self.attn_dropout(att)") for part in (line, "")),
            "y = att @ v",
            "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        ),
    ),
    "weights of attention asked for": (
        "multihead",
        lines(
            "attn_out, _ = self.attn(h, h, h, attn_mask=mask, need_weights=False)",
            "attn_out, _ = self.attn(h, h, h, attn_mask=mask)",
        ),
    ),
}
LAYERS = {  # style -> the line that sets the number of layers, and how it is written for another
    "lecture": ("n_layer = 3", "n_layer = {}"),
    "nanogpt": ("n_layer: int = 3", "n_layer: int = {}"),
    "multihead": tuple(
        f"VOCAB, D_MODEL, NUM_HEADS, NUM_LAYERS, MAX_LEN, PAD = 61, 32, 4, {count}, 40, 0" for count in ("3", "{}")
    ),
}

IN_THE_MODULE = "nn.MultiheadAttention computes the softmax and the scale itself; no line of the student has them"
TRAINING = ("step", "optimizer")
LOSS = ("batch", "loss")

MISTAKES = (
    # -- the mask ------------------------------------------------------------------------------------------------------
    Mistake(
        "no mask",
        {
            "lecture": lines(L_MASK, ""),
            "nanogpt": lines(N_MASK, ""),
            "multihead": lines(
                "attn_out, _ = self.attn(h, h, h, attn_mask=mask, need_weights=False)",
                "attn_out, _ = self.attn(h, h, h, need_weights=False)",
            ),
        },
        "causality",
        "no causal mask is applied",
        MASK_LINE,
    ),
    Mistake(
        "mask inverted",
        {
            "lecture": lines(L_MASK, L_MASK.replace("== 0", "== 1")),
            "nanogpt": lines(N_MASK, N_MASK.replace("== 0", "== 1")),
            "multihead": lines(M_MASK, "mask = torch.tril(torch.ones(seq_len, seq_len, dtype=torch.bool))"),
        },
        "overflow",
        "the mask is inverted",
        MASK_LINE,
    ),
    Mistake(
        "mask inverted, each token sees itself",
        {
            "lecture": lines(
                L_MASK, "wei = wei.masked_fill(torch.tril(torch.ones(T, T), diagonal=-1) == 1, float('-inf'))"
            ),
            "nanogpt": lines(N_MASK, "att = att.masked_fill(self.bias[:, :, :T, :T].mT == 0, float('-inf'))"),
            "multihead": lines(M_MASK, "mask = torch.tril(torch.ones(seq_len, seq_len), diagonal=-1).bool()"),
        },
        "causality",
        "the mask is inverted",
        MASK_LINE,
    ),
    Mistake(
        "mask filled with 0",
        {
            "lecture": lines(L_MASK, L_MASK.replace("float('-inf')", "0")),
            "nanogpt": lines(N_MASK, N_MASK.replace("float('-inf')", "0")),
            "multihead": lines(M_MASK, "mask = torch.tril(torch.ones(seq_len, seq_len))"),
        },
        "causality",
        "the mask is too weak",
        MASK_LINE,
    ),
    Mistake(
        "mask off by one",
        {
            "lecture": lines(
                "self.register_buffer('tril', torch.tril(torch.ones(block_size, block_size)))",
                "self.register_buffer('tril', torch.tril(torch.ones(block_size, block_size), diagonal=1))",
            ),
            "nanogpt": lines(
                'self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size))',
                'self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size), 1)',
            ),
            "multihead": lines(M_MASK, M_MASK.replace("diagonal=1", "diagonal=2")),
        },
        "causality",
        "off by one",
        "diagonal=1",
    ),
    Mistake(
        "masked_fill not assigned",
        {
            "lecture": lines(L_MASK, L_MASK.removeprefix("wei = ")),
            "nanogpt": lines(N_MASK, N_MASK.removeprefix("att = ")),
            "multihead": lines(
                M_MASK, "mask = torch.zeros(seq_len, seq_len)\nmask.masked_fill(mask.T == 1, float('-inf'))"
            ),
        },
        "causality",
        "no causal mask is applied",
        MASK_LINE,
    ),
    Mistake(
        "mask after the softmax",
        {
            "lecture": lines(L_MASK, "", L_SOFTMAX, L_SOFTMAX + "\nwei = wei.masked_fill(self.tril[:T, :T] == 0, 0)"),
            "nanogpt": lines(N_MASK, "", N_SOFTMAX, N_SOFTMAX + "\natt = att * self.bias[:, :, :T, :T]"),
            "multihead": IN_THE_MODULE,
        },
        "mask_after_softmax",
        "the mask is applied after the softmax",
        ".softmax(-1)",
    ),
    Mistake(
        "float mask of 0 and 1",
        {
            "lecture": "its mask is a condition of masked_fill",
            "nanogpt": "its mask is a condition of masked_fill",
            "multihead": lines(M_MASK, "mask = torch.triu(torch.ones(seq_len, seq_len), diagonal=1)"),
        },
        "causality",
        "of floats, which are added to the scores (+1)",
        "mask.bool()",
    ),
    # -- the softmax and the scale -------------------------------------------------------------------------------------
    Mistake(
        "softmax with dim=1 on (B, T, T)",
        {
            "lecture": lines(L_SOFTMAX, "wei = F.softmax(wei, dim=1)"),
            "nanogpt": "its scores are (B, H, T, T)",
            "multihead": IN_THE_MODULE,
        },
        "mask_after_softmax",
        "queries",
        "dim=-1",
    ),
    Mistake(
        "softmax with dim=1 on (B, H, T, S)",
        {
            "lecture": "its scores are (B, T, T)",
            "nanogpt": lines(N_SOFTMAX, "att = F.softmax(att, dim=1)"),
            "multihead": IN_THE_MODULE,
        },
        "overflow",
        "heads",
        "dim=-1",
    ),
    Mistake(
        "softmax over the queries",
        {
            "lecture": lines(L_SOFTMAX, "wei = wei.softmax(-2)"),
            "nanogpt": lines(N_SOFTMAX, "att = F.softmax(att, dim=2)"),
            "multihead": IN_THE_MODULE,
        },
        "mask_after_softmax",
        "queries",
        "dim=-1",
    ),
    Mistake(
        "softmax over the batch",
        {
            "lecture": lines(L_SOFTMAX, "wei = F.softmax(wei, dim=0)"),
            "nanogpt": lines(N_SOFTMAX, "att = F.softmax(att, dim=0)"),
            "multihead": IN_THE_MODULE,
        },
        "overflow",
        "rows of the batch",
        "dim=-1",
    ),
    Mistake(
        "scale missing",
        {
            "lecture": lines(L_SCORES, "wei = q @ k.transpose(-2, -1)"),
            "nanogpt": lines(N_SCORES, "att = q @ k.transpose(-2, -1)"),
            "multihead": IN_THE_MODULE,
        },
        "scale",
        "are not divided by sqrt(head size)",
        "/ math.sqrt(",
    ),
    Mistake(
        "scale inverted",
        {
            "lecture": lines(L_SCORES, "wei = q @ k.transpose(-2, -1) * k.shape[-1] ** 0.5"),
            "nanogpt": lines(N_SCORES, "att = (q @ k.transpose(-2, -1)) * math.sqrt(k.size(-1))"),
            "multihead": IN_THE_MODULE,
        },
        "scale",
        "multiplied by sqrt(head size)",
        "/ math.sqrt(",
    ),
    Mistake(
        "scale without the root",
        {
            "lecture": lines(L_SCORES, "wei = q @ k.transpose(-2, -1) / k.shape[-1]"),
            "nanogpt": lines(N_SCORES, "att = (q @ k.transpose(-2, -1)) / k.size(-1)"),
            "multihead": IN_THE_MODULE,
        },
        "scale",
        "divided by the head size, 8, without the square root",
        "/ math.sqrt(",
    ),
    Mistake(
        "weights transposed",
        {
            "lecture": lines("out = wei @ v", "out = wei.transpose(-2, -1) @ v"),
            "nanogpt": lines("y = att @ v", "y = att.transpose(-2, -1) @ v"),
            "multihead": IN_THE_MODULE,
        },
        "mask_after_softmax",
        "the weights are transposed before they meet the values",
        "weights @ v",
    ),
    # -- positions, norms, heads, blocks -------------------------------------------------------------------------------
    Mistake(
        "no positions",
        {
            "lecture": lines("x = tok_emb + pos_emb", "x = tok_emb"),
            "nanogpt": lines("x = self.transformer.drop(tok_emb + pos_emb)", "x = self.transformer.drop(tok_emb)"),
            "multihead": lines(
                "x = self.dropout(self.token_emb(ids) + self.pos_emb(positions))",
                "x = self.dropout(self.token_emb(ids))",
            ),
        },
        "positions",
        "does not use positions",
        "position(torch.arange(T))",
    ),
    Mistake(
        "one position for all",
        {
            "lecture": lines(
                "pos_emb = self.position_embedding_table(torch.arange(T))",
                "pos_emb = self.position_embedding_table(torch.zeros(T, dtype=torch.long))",
            ),
            "nanogpt": lines(
                "pos = torch.arange(0, t, dtype=torch.long, device=device)",
                "pos = torch.tensor([t - 1], dtype=torch.long, device=device)",
            ),
            "multihead": lines(
                "x = self.dropout(self.token_emb(ids) + self.pos_emb(positions))",
                "x = self.dropout(self.token_emb(ids) + self.pos_emb.weight[0])",
            ),
        },
        "positions",
        "all tokens get the same position",
        "torch.arange(T)",
    ),
    Mistake(
        "batch norm",
        {
            "lecture": lines(
                "self.ln1 = nn.LayerNorm(n_embd)",
                "self.ln1 = nn.BatchNorm1d(n_embd)",
                L_ATTENTION,
                "x = x + self.sa(self.ln1(x.transpose(1, 2)).transpose(1, 2))",
            ),
            "nanogpt": lines(
                "self.ln_1 = nn.LayerNorm(config.n_embd)",
                "self.ln_1 = nn.BatchNorm1d(config.n_embd)",
                N_ATTENTION,
                "x = x + self.attn(self.ln_1(x.mT).mT)",
            ),
            "multihead": lines(
                "self.norm1 = nn.LayerNorm(d_model)",
                "self.norm1 = nn.BatchNorm1d(d_model)",
                "h = self.norm1(x)",
                "h = self.norm1(x.permute(0, 2, 1)).permute(0, 2, 1)",
            ),
        },
        "batch",
        "batch norm",
        "nn.LayerNorm(",
    ),
    Mistake(
        "wrong view of heads",
        {
            "lecture": "each head has its own projections; nothing is split",
            "nanogpt": lines(
                *(
                    row
                    for t in "kqv"
                    for row in (N_SPLIT.replace("k = k", f"{t} = {t}"), f"{t} = {t}.reshape(B, self.n_head, T, -1)")
                )
            ),
            "multihead": "nn.MultiheadAttention splits the heads itself",
        },
        "causality",
        "heads are split without a transpose",
        "q = q.view(B, T, heads, -1).transpose(1, 2)",
    ),
    Mistake(
        "no transpose when merging heads",
        {
            "lecture": lines(
                "out = torch.cat([h(x) for h in self.heads], dim=-1)",
                "out = torch.stack([h(x) for h in self.heads], dim=1).view(x.shape)",
            ),
            "nanogpt": lines("y = y.transpose(1, 2).contiguous().view(B, T, C)", "y = y.contiguous().view(B, T, C)"),
            "multihead": "nn.MultiheadAttention merges the heads itself",
        },
        "causality",
        "heads are merged without a transpose",
        "y = y.transpose(1, 2).reshape(B, T, width)",
    ),
    Mistake(
        "blocks never called",
        {
            "lecture": lines("x = self.blocks(x)", ""),
            "nanogpt": lines("for block in self.transformer.h:", "", "x = block(x)", ""),
            "multihead": lines("for layer in self.layers:", "", "x = layer(x, mask)", ""),
        },
        "gradient_flow",
        "never called",
        "x = block(x)",
    ),
    Mistake(
        "no residual",
        {
            "lecture": lines(L_ATTENTION, "x = self.sa(self.ln1(x))", L_FEEDFORWARD, "x = self.ffwd(self.ln2(x))"),
            "nanogpt": lines(N_ATTENTION, "x = self.attn(self.ln_1(x))", N_FEEDFORWARD, "x = self.mlp(self.ln_2(x))"),
            "multihead": lines(
                M_ATTENTION, "x = self.dropout(attn_out)", M_FEEDFORWARD, "x = self.dropout(self.ff(self.norm2(x)))"
            ),
        },
        "gradient_flow",
        "residual connection",
        "x = x + ",
    ),
    Mistake(
        "no residual around attention",
        {
            "lecture": lines(L_ATTENTION, "x = self.sa(self.ln1(x))"),
            "nanogpt": lines(N_ATTENTION, "x = self.attn(self.ln_1(x))"),
            "multihead": lines(M_ATTENTION, "x = self.dropout(attn_out)"),
        },
        "gradient_flow",
        "residual connection",
        "x = x + ",
    ),
    Mistake(
        "no residual around the feed-forward layer",
        {
            "lecture": lines(L_FEEDFORWARD, "x = self.ffwd(self.ln2(x))"),
            "nanogpt": lines(N_FEEDFORWARD, "x = self.mlp(self.ln_2(x))"),
            "multihead": lines(M_FEEDFORWARD, "x = self.dropout(self.ff(self.norm2(x)))"),
        },
        "gradient_flow",
        "residual connection",
        "x = x + ",
    ),
    Mistake(
        "heads in a Python list",
        {
            "lecture": lines(
                "self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])",
                "self.heads = [Head(head_size) for _ in range(num_heads)]",
            ),
            "nanogpt": "its heads are slices of one product; there is no list of them",
            "multihead": "its heads are inside nn.MultiheadAttention; there is no list of them",
        },
        "gradient_flow",
        "Python list",
        "nn.ModuleList(",
    ),
    Mistake(
        "blocks in a Python list",
        {
            "lecture": lines(
                L_BLOCKS,
                "self.blocks = [Block(n_embd, n_head=n_head) for _ in range(n_layer)]",
                "x = self.blocks(x)",
                "for block in self.blocks:\n    x = block(x)",
            ),
            "nanogpt": lines(
                N_BLOCKS,
                "",
                "self.apply(self._init_weights)",
                "self.layers = [Block(config) for _ in range(config.n_layer)]\nself.apply(self._init_weights)",
                "for block in self.transformer.h:",
                "for block in self.layers:",
            ),
            "multihead": lines(M_BLOCKS, M_BLOCKS.replace("nn.ModuleList([", "[").replace("])", "]")),
        },
        "gradient_flow",
        "Python list",
        "nn.ModuleList(",
    ),
    Mistake(
        "one block three times",
        {
            "lecture": lines(L_BLOCKS, "self.blocks = nn.Sequential(*([Block(n_embd, n_head=n_head)] * n_layer))"),
            "nanogpt": lines(N_BLOCKS, "h = nn.ModuleList([Block(config)] * config.n_layer),"),
            "multihead": lines(
                M_BLOCKS,
                "layer = TransformerBlock(D_MODEL, NUM_HEADS)\n"
                "self.layers = nn.ModuleList([layer for _ in range(NUM_LAYERS)])",
            ),
        },
        "tying",
        "same block",
        "for _ in range(",
    ),
    Mistake(
        "one head four times",
        {
            "lecture": lines(
                "self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])",
                "self.heads = nn.ModuleList([Head(head_size)] * num_heads)",
            ),
            "nanogpt": "one product computes all its heads",
            "multihead": "nn.MultiheadAttention computes its heads itself",
        },
        "tying",
        "same head",
        "build each head",
    ),
    Mistake(
        "output of the blocks not used",
        {
            "lecture": lines("x = self.blocks(x)", "y = self.blocks(x)"),
            "nanogpt": lines("x = block(x)", "y = block(x)"),
            "multihead": lines("x = layer(x, mask)", "y = layer(x, mask)"),
        },
        "gradient_flow",
        "is not used",
        "x = block(x)",
    ),
    Mistake(
        "blocks detached",
        {
            "lecture": lines("x = self.blocks(x)", "x = self.blocks(x).detach()"),
            "nanogpt": lines("x = block(x)", "x = block(x).detach()"),
            "multihead": lines("x = layer(x, mask)", "x = layer(x, mask).data"),
        },
        "gradient_flow",
        "detached",
        "remove .detach()",
    ),
    Mistake(
        "no non-linearity",
        {
            "lecture": lines("nn.ReLU(),", ""),
            "nanogpt": lines("x = self.gelu(x)", ""),
            "multihead": lines("nn.GELU(),", ""),
        },
        "gradient_flow",
        "no non-linearity",
        "nn.GELU()",
    ),
    Mistake(
        "no norm",
        {
            "lecture": lines(
                L_ATTENTION, "x = x + self.sa(x)", L_FEEDFORWARD, "x = x + self.ffwd(x)", "x = self.ln_f(x)", ""
            ),
            "nanogpt": lines(
                N_ATTENTION,
                "x = x + self.attn(x)",
                N_FEEDFORWARD,
                "x = x + self.mlp(x)",
                "x = self.transformer.ln_f(x)",
                "",
            ),
            "multihead": lines(
                "h = self.norm1(x)",
                "h = x",
                M_FEEDFORWARD,
                "x = x + self.dropout(self.ff(x))",
                "x = self.norm(x)",
                "",
            ),
        },
        "residual_growth",
        "no norm",
        "nn.LayerNorm(",
    ),
    Mistake(
        "weights all zero",
        {
            "lecture": lines("model = GPTLanguageModel()", "model = GPTLanguageModel()\n" + ZEROS),
            "nanogpt": lines(N_MODEL, N_MODEL + "\n" + ZEROS),
            "multihead": lines("model = TinyGPT()", "model = TinyGPT()\n" + ZEROS),
        },
        "gradient_flow",
        "zero",
        "nn.init.normal_(",
    ),
    Mistake(
        "dropout after the logits",
        {
            "lecture": lines(L_LOGITS, "logits = self.dropout(self.lm_head(x))"),
            "nanogpt": lines(
                N_LOGITS,
                "logits = self.transformer.drop(self.lm_head(x))",
                "logits = self.lm_head(x[:, [-1], :])",
                "logits = self.transformer.drop(self.lm_head(x[:, [-1], :]))",
            ),
            "multihead": lines(M_LOGITS, "return self.dropout(self.out(x))"),
        },
        "dropout",
        "logits",
        "return self.head(x)",
    ),
    # -- the loss and its labels ---------------------------------------------------------------------------------------
    Mistake(
        "labels not shifted",
        {
            "lecture": lines("y = data[:, 1:].contiguous()", "y = data[:, :-1].contiguous()"),
            "nanogpt": lines("x, y = data[:, :-1], data[:, 1:]", "x, y = data, data"),
            "multihead": lines("y = data[:, 1:]", "y = x.clone()"),
        },
        "label_shift",
        "not shifted",
        "labels = tokens[:, 1:]",
        LOSS,
    ),
    Mistake(
        "labels shifted twice, in the data",
        {
            "lecture": lines(
                "x = data[:, :-1].contiguous()",
                "x = data[:, :-2].contiguous()",
                "y = data[:, 1:].contiguous()",
                "y = data[:, 2:].contiguous()",
            ),
            "nanogpt": lines("x, y = data[:, :-1], data[:, 1:]", "x, y = data[:, :-2], data[:, 2:]"),
            "multihead": lines("x = data[:, :-1]", "x = data[:, :-2]", "y = data[:, 1:]", "y = data[:, 2:]"),
        },
        "label_shift",
        "shifted twice",
        "labels = tokens[:, 1:]",
        LOSS,
    ),
    Mistake(
        "labels shifted twice, in the loss",
        {
            "lecture": lines(
                L_FLAT,
                "logits = logits[:, :-1].reshape(-1, C)",
                "targets = targets.view(B*T)",
                "targets = targets[:, 1:].reshape(-1)",
            ),
            "nanogpt": lines(
                N_LOSS,
                "loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=0)",
            ),
            "multihead": lines(
                M_LOSS,
                "return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), "
                "ignore_index=PAD)",
            ),
        },
        "label_shift",
        "shifted twice",
        "no shift in the loss",
        LOSS,
    ),
    Mistake(
        "softmax before the cross-entropy",
        {
            "lecture": lines(L_LOGITS, "logits = F.softmax(self.lm_head(x), dim=-1)"),
            "nanogpt": lines(
                N_LOGITS,
                "logits = F.softmax(self.lm_head(x), dim=-1)",
                "logits = self.lm_head(x[:, [-1], :])",
                "logits = F.softmax(self.lm_head(x[:, [-1], :]), dim=-1)",
            ),
            "multihead": lines(M_LOGITS, "return torch.softmax(self.out(x), dim=-1)"),
        },
        "overfit",
        "probabilities",
        "return logits",
        LOSS,
    ),
    Mistake(
        "rows mixed in the loss, outside the model",
        {
            "lecture": lines(
                "logits, loss = model(x, y)",
                "logits, _ = model(x)\n"
                "loss = F.cross_entropy(logits.transpose(0, 1).reshape(-1, vocab_size), y.reshape(-1), "
                "ignore_index=0)",
            ),
            "nanogpt": lines(
                "logits, loss = model(x, y)",
                "logits, _ = model(x, y)\n"
                "loss = F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), y.flatten(), ignore_index=0)",
            ),
            "multihead": lines(
                M_LOSS,
                "return F.cross_entropy(logits.transpose(0, 1).reshape(-1, VOCAB), labels.reshape(-1), "
                "ignore_index=PAD)",
            ),
        },
        "label_shift",
        "rows",
        "logits.flatten(0, 1)",
        ("batch", "loss", "step"),
    ),
    Mistake(
        "rows mixed in the loss, inside `forward`",
        {
            "lecture": lines(L_FLAT, "logits = logits.transpose(0, 1).reshape(B*T, C)"),
            "nanogpt": lines(
                N_LOSS,
                "loss = F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), targets.flatten(), ignore_index=0)",
            ),
            "multihead": "its forward returns logits only; the loss is outside",
        },
        "label_shift",
        "rows",
        "logits.flatten(0, 1)",
        LOSS,
    ),
    Mistake(
        "padding counted in the loss",
        {
            "lecture": lines(L_LOSS, "loss = F.cross_entropy(logits, targets)"),
            "nanogpt": lines(N_LOSS, N_LOSS.replace(", ignore_index=0", "")),
            "multihead": lines(M_LOSS, M_LOSS.replace(", ignore_index=PAD", "")),
        },
        "pad_in_loss",
        "padding",
        "ignore_index=0",
        ("batch", "loss", "pad_id"),
    ),
    # -- the step ------------------------------------------------------------------------------------------------------
    Mistake(
        "no step()",
        {style: lines("optimizer.step()", "") for style in STYLES},
        "optimizer",
        "optimizer.step() is not called",
        "optimizer.step()",
        TRAINING,
    ),
    Mistake(
        "no zero_grad()",
        {
            "lecture": lines("optimizer.zero_grad(set_to_none=True)", ""),
            "nanogpt": lines("optimizer.zero_grad(set_to_none=True)", ""),
            "multihead": lines("optimizer.zero_grad()", ""),
        },
        "optimizer",
        "zero_grad",
        "optimizer.zero_grad()",
        TRAINING,
    ),
    Mistake(
        "optimizer of another model",
        {
            "lecture": lines(
                "optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)",
                "optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)\nmodel = GPTLanguageModel()",
            ),
            "nanogpt": lines(
                "optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)",
                "optimizer = torch.optim.AdamW(GPT(GPTConfig()).parameters(), lr=6e-4)",
            ),
            "multihead": lines(
                "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)",
                "optimizer = torch.optim.Adam(TinyGPT().parameters(), lr=1e-3)",
            ),
        },
        "optimizer",
        "other tensors",
        "AdamW(model.parameters())",
        TRAINING,
    ),
    Mistake(
        "lr=1.0",
        {
            "lecture": lines("learning_rate = 3e-4", "learning_rate = 1.0"),
            "nanogpt": lines(
                "optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)",
                "optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)",
            ),
            "multihead": lines(
                "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)",
                "optimizer = torch.optim.Adam(model.parameters(), lr=1.0)",
            ),
        },
        "learning_rate",
        "too high",
        "3e-4",
        ("optimizer",),
    ),
    Mistake(
        "no eval() when generating",
        {style: lines("model.eval()", "") for style in STYLES},
        "dropout",
        "eval()",
        "model.eval()",
        ("generate",),
    ),
)
