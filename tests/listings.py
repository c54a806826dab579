"""The listings of the source documents as printed, without their comments: inputs of `classic/test_listings.py`.

A is the lecture, B the tutorial (by section), C the course module, E the textbook chapter (by section); D, the slides,
has no listings.  That of B, section 13, loads models from the hub and uses no class of the documents.
"""

import ast
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# What the listings import.  C has tensors of its own, made from arrays of NumPy.
IMPORTS = {"torch": torch, "nn": nn, "F": F, "math": math, "np": np, "Tensor": torch.asarray, "GELU": nn.GELU}


def run_listing(name, names, *, calls=True, definitions=True):
    """Run a listing with `names` in place of its imports, and return its variables.

    Without `definitions` it calls the classes and functions of `names`, and without `calls` it only defines its own.
    """
    defined = (ast.ClassDef, ast.FunctionDef)
    tree = ast.parse(LISTINGS[name])
    kept = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    kept = [node for node in kept if (definitions if isinstance(node, defined) else calls)]
    variables = {**names, **IMPORTS}
    exec(compile(ast.Module(kept, []), f"listing {name}", "exec"), variables)
    return variables


LISTINGS = {
    "A block": r"""
class TransformerBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(d_model)
        self.ffn = nn.Sequential(
            nn.Linear(d_model, d_ff),
            nn.GELU(),
            nn.Linear(d_ff, d_model),
        )

    def forward(self, x, mask=None):
        h = self.norm1(x)
        a, _ = self.attn(h, h, h, attn_mask=mask)
        x = x + a

        x = x + self.ffn(self.norm2(x))
        return x
""",
    "A attention": r"""
def multi_head_attention(x, Wq, Wk, Wv, Wo, n_heads):
    B, N, d = x.shape
    d_k = d // n_heads

    q = (x @ Wq).view(B, N, n_heads, d_k).transpose(1, 2)
    k = (x @ Wk).view(B, N, n_heads, d_k).transpose(1, 2)
    v = (x @ Wv).view(B, N, n_heads, d_k).transpose(1, 2)

    scores = q @ k.transpose(-2, -1) / math.sqrt(d_k)
    weights = scores.softmax(dim=-1)
    out = (weights @ v).transpose(1, 2).contiguous().view(B, N, d)

    return out @ Wo
""",
    "A masking": r"""
N = 128
mask = torch.triu(torch.ones(N, N), diagonal=1).bool()

out, _ = self.attn(x, x, x, attn_mask=mask)
""",
    "A GPT": r"""
class GPT(nn.Module):
    def __init__(self, vocab, d_model=192, n_heads=6, n_layers=6, max_len=256):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab, d_model)
        self.pos_emb = nn.Embedding(max_len, d_model)
        self.blocks = nn.ModuleList([TransformerBlock(d_model, n_heads, 4*d_model)
                                      for _ in range(n_layers)])

        self.norm_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, idx):
        B, N = idx.shape
        pos = torch.arange(N, device=idx.device)
        x = self.tok_emb(idx) + self.pos_emb(pos)

        mask = torch.triu(torch.ones(N, N), 1).bool().to(idx.device)
        for block in self.blocks:
            x = block(x, mask=mask)

        x = self.norm_f(x)
        return self.head(x)
""",
    "B 03": r"""
import torch
import math

class PositionalEncoding(torch.nn.Module):
    def __init__(self, d_model: int, max_len: int = 5000, dropout: float = 0.1):
        super().__init__()
        self.dropout = torch.nn.Dropout(p=dropout)

        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1).float()
        div_term = torch.exp(torch.arange(0, d_model, 2).float()
                        * (-math.log(10000.0) / d_model))

        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)

        pe = pe.unsqueeze(0)
        self.register_buffer('pe', pe)

    def forward(self, x):
        x = x + self.pe[:, :x.size(1)]
        return self.dropout(x)
""",
    "B 04": r"""
import torch
import torch.nn.functional as F
import math

def scaled_dot_product_attention(Q, K, V, mask=None):
    d_k = Q.size(-1)

    scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(d_k)

    if mask is not None:
        scores = scores.masked_fill(mask == 0, float('-inf'))

    attn_weights = F.softmax(scores, dim=-1)

    output = torch.matmul(attn_weights, V)

    return output, attn_weights

batch, heads, seq, d_k = 1, 1, 4, 8
Q = torch.randn(batch, heads, seq, d_k)
K = torch.randn(batch, heads, seq, d_k)
V = torch.randn(batch, heads, seq, d_k)

out, weights = scaled_dot_product_attention(Q, K, V)
print(f"Output shape:  {out.shape}")
print(f"Weights shape: {weights.shape}")
print(f"Weights sum:   {weights[0,0,0].sum():.4f}")
""",
    "B 05": r"""
import torch
import torch.nn as nn
import math

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"

        self.d_model    = d_model
        self.num_heads  = num_heads
        self.d_k        = d_model // num_heads

        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def split_heads(self, x, batch_size):
        x = x.view(batch_size, -1, self.num_heads, self.d_k)
        return x.transpose(1, 2)

    def forward(self, Q, K, V, mask=None):
        batch_size = Q.size(0)

        Q = self.split_heads(self.W_q(Q), batch_size)
        K = self.split_heads(self.W_k(K), batch_size)
        V = self.split_heads(self.W_v(V), batch_size)

        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float('-inf'))
        attn = torch.nn.functional.softmax(scores, dim=-1)
        context = torch.matmul(attn, V)

        context = context.transpose(1, 2).contiguous()
        context = context.view(batch_size, -1, self.d_model)

        return self.W_o(context)

mha = MultiHeadAttention(d_model=512, num_heads=8)
x = torch.randn(2, 10, 512)
out = mha(x, x, x)
print(f"Input:  {x.shape}")
print(f"Output: {out.shape}")
""",
    "B 06": r"""
import torch
import torch.nn as nn

class EncoderBlock(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float = 0.1):
        super().__init__()

        self.self_attn  = MultiHeadAttention(d_model, num_heads)
        self.norm1      = nn.LayerNorm(d_model)
        self.dropout1   = nn.Dropout(dropout)

        self.ffn = nn.Sequential(
            nn.Linear(d_model, d_ff),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(d_ff, d_model)
        )
        self.norm2    = nn.LayerNorm(d_model)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        attn_out = self.self_attn(x, x, x, mask)
        x = self.norm1(x + self.dropout1(attn_out))

        ffn_out = self.ffn(x)
        x = self.norm2(x + self.dropout2(ffn_out))

        return x

class Encoder(nn.Module):
    def __init__(self, num_blocks: int, d_model: int, num_heads: int, d_ff: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            [EncoderBlock(d_model, num_heads, d_ff) for _ in range(num_blocks)]
        )

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return x

encoder = Encoder(num_blocks=6, d_model=512, num_heads=8, d_ff=2048)
x = torch.randn(2, 10, 512)
enc_out = encoder(x)
print(f"Encoder output: {enc_out.shape}")
""",
    "B 07": r"""
class DecoderBlock(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float = 0.1):
        super().__init__()

        self.self_attn  = MultiHeadAttention(d_model, num_heads)
        self.norm1      = nn.LayerNorm(d_model)

        self.cross_attn = MultiHeadAttention(d_model, num_heads)
        self.norm2      = nn.LayerNorm(d_model)

        self.ffn = nn.Sequential(
            nn.Linear(d_model, d_ff),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(d_ff, d_model)
        )
        self.norm3   = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tgt, enc_output, tgt_mask=None, src_mask=None):
        sa_out = self.self_attn(tgt, tgt, tgt, tgt_mask)
        tgt    = self.norm1(tgt + self.dropout(sa_out))

        ca_out = self.cross_attn(tgt, enc_output, enc_output, src_mask)
        tgt    = self.norm2(tgt + self.dropout(ca_out))

        ffn_out = self.ffn(tgt)
        tgt     = self.norm3(tgt + self.dropout(ffn_out))

        return tgt
""",
    "B 08": r"""
class Transformer(nn.Module):
    def __init__(self, src_vocab: int, tgt_vocab: int,
                 d_model=512, num_heads=8, num_blocks=6,
                 d_ff=2048, max_len=5000, dropout=0.1):
        super().__init__()

        self.src_embed = nn.Embedding(src_vocab, d_model)
        self.tgt_embed = nn.Embedding(tgt_vocab, d_model)
        self.pos_enc   = PositionalEncoding(d_model, max_len, dropout)

        self.encoder   = Encoder(num_blocks, d_model, num_heads, d_ff)

        self.decoder   = nn.ModuleList(
            [DecoderBlock(d_model, num_heads, d_ff, dropout) for _ in range(num_blocks)]
        )

        self.out_proj  = nn.Linear(d_model, tgt_vocab)

    def encode(self, src, src_mask):
        src = self.pos_enc(self.src_embed(src) * (self.src_embed.embedding_dim ** 0.5))
        return self.encoder(src, src_mask)

    def decode(self, tgt, enc_out, tgt_mask, src_mask):
        tgt = self.pos_enc(self.tgt_embed(tgt) * (self.tgt_embed.embedding_dim ** 0.5))
        for block in self.decoder:
            tgt = block(tgt, enc_out, tgt_mask, src_mask)
        return tgt

    def forward(self, src, tgt, src_mask=None, tgt_mask=None):
        enc_out = self.encode(src, src_mask)
        dec_out = self.decode(tgt, enc_out, tgt_mask, src_mask)
        return self.out_proj(dec_out)

model = Transformer(src_vocab=37000, tgt_vocab=37000,
                     d_model=512, num_heads=8, num_blocks=6, d_ff=2048)

total_params = sum(p.numel() for p in model.parameters())
print(f"Total parameters: {total_params:,}")
""",
    "B 10": r"""
import torch
import torch.nn as nn

class WarmupScheduler(torch.optim.lr_scheduler._LRScheduler):
    def __init__(self, optimizer, d_model: int, warmup_steps: int):
        self.d_model      = d_model
        self.warmup_steps = warmup_steps
        super().__init__(optimizer)

    def get_lr(self):
        step = max(1, self._step_count)
        scale = self.d_model ** (-0.5) * min(
            step ** (-0.5),
            step * self.warmup_steps ** (-1.5)
        )
        return [scale for _ in self.base_lrs]

model     = Transformer(src_vocab=37000, tgt_vocab=37000)
optimizer = torch.optim.Adam(model.parameters(),
                              lr=1.0, betas=(0.9, 0.98), eps=1e-9)
scheduler = WarmupScheduler(optimizer, d_model=512, warmup_steps=4000)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)

def train_step(src, tgt):
    model.train()
    tgt_in  = tgt[:, :-1]
    tgt_out = tgt[:, 1:]

    logits = model(src, tgt_in)
    logits = logits.view(-1, logits.size(-1))
    loss   = criterion(logits, tgt_out.view(-1))

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()
""",
    "C pattern": r"""
model = GPT(vocab_size=50000, embed_dim=768, num_layers=12, num_heads=12)
logits = model.forward(tokens)
generated = model.generate(prompt, max_new_tokens=50)
""",
    "C 13.1": r"""
class LayerNorm:
    def __init__(self, normalized_shape, eps=1e-5):
        self.normalized_shape = normalized_shape
        self.eps = eps

        self.gamma = Tensor(np.ones(normalized_shape), requires_grad=True)
        self.beta = Tensor(np.zeros(normalized_shape), requires_grad=True)

    def forward(self, x):
        mean = x.mean(axis=-1, keepdims=True)
        diff = x - mean
        variance = (diff * diff).mean(axis=-1, keepdims=True)

        std = Tensor(np.sqrt(variance.data + self.eps))
        normalized = (x - mean) / std

        return normalized * self.gamma + self.beta
""",
    "C 13.2": r"""
def forward(self, x, mask=None):
    normed1 = self.ln1.forward(x)
    attention_out = self.attention.forward(normed1, mask)
    x = x + attention_out

    normed2 = self.ln2.forward(x)
    mlp_out = self.mlp.forward(normed2)
    output = x + mlp_out

    return output
""",
    "C 13.3": r"""
class MLP:
    def __init__(self, embed_dim, hidden_dim=None):
        if hidden_dim is None:
            hidden_dim = 4 * embed_dim

        self.linear1 = Linear(embed_dim, hidden_dim)
        self.gelu = GELU()
        self.linear2 = Linear(hidden_dim, embed_dim)

    def forward(self, x):
        hidden = self.linear1.forward(x)
        hidden = self.gelu.forward(hidden)
        output = self.linear2.forward(hidden)
        return output
""",
    "C mask": r"""
def create_causal_mask(seq_len: int) -> Tensor:
    mask = np.tril(np.ones((seq_len, seq_len), dtype=np.float32))
    return Tensor(mask[np.newaxis, :, :])
""",
    "C 13.4": r"""
class TransformerBlock:
    def __init__(self, embed_dim, num_heads, mlp_ratio=4):
        self.attention = MultiHeadAttention(embed_dim, num_heads)
        self.ln1 = LayerNorm(embed_dim)
        self.ln2 = LayerNorm(embed_dim)
        hidden_dim = int(embed_dim * mlp_ratio)
        self.mlp = MLP(embed_dim, hidden_dim)

    def forward(self, x, mask=None):
        normed1 = self.ln1.forward(x)
        attention_out = self.attention.forward(normed1, mask)
        x = x + attention_out

        normed2 = self.ln2.forward(x)
        mlp_out = self.mlp.forward(normed2)
        output = x + mlp_out

        return output
""",
    "C comparison": r"""
from tinytorch.core.transformers import TransformerBlock, GPT

block = TransformerBlock(embed_dim=512, num_heads=8)
output = block.forward(x)

model = GPT(vocab_size=50000, embed_dim=768, num_layers=12, num_heads=12)
logits = model.forward(tokens)
generated = model.generate(prompt, max_new_tokens=50, temperature=0.8)
""",
    "E 8.2.5": r"""
import torch
import torch.nn.functional as F

def scaled_dot_product_attention(Q, K, V, mask=None):
    d_k = Q.size(-1)
    scores = torch.matmul(Q, K.transpose(-2, -1)) / (d_k ** 0.5)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float('-inf'))
    weights = F.softmax(scores, dim=-1)
    output = torch.matmul(weights, V)
    return output, weights

Q = torch.randn(1, 4, 8)
K = torch.randn(1, 4, 8)
V = torch.randn(1, 4, 8)
output, weights = scaled_dot_product_attention(Q, K, V)
print(f"Output shape: {output.shape}")
print(f"Attention weights:\n{weights[0]}")
""",
    "E 8.3.3": r"""
import torch
import torch.nn as nn
import torch.nn.functional as F

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        self.h = h
        self.d_k = d_model // h
        self.W_Q = nn.Linear(d_model, d_model, bias=False)
        self.W_K = nn.Linear(d_model, d_model, bias=False)
        self.W_V = nn.Linear(d_model, d_model, bias=False)
        self.W_O = nn.Linear(d_model, d_model, bias=False)

    def forward(self, X, mask=None):
        B, T, d_model = X.shape
        Q = self.W_Q(X).view(B, T, self.h, self.d_k).transpose(1, 2)
        K = self.W_K(X).view(B, T, self.h, self.d_k).transpose(1, 2)
        V = self.W_V(X).view(B, T, self.h, self.d_k).transpose(1, 2)
        scores = torch.matmul(Q, K.transpose(-2, -1)) / (self.d_k ** 0.5)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float('-inf'))
        weights = F.softmax(scores, dim=-1)
        head_out = torch.matmul(weights, V)
        out = head_out.transpose(1, 2).reshape(B, T, d_model)
        return self.W_O(out), weights

mha = MultiHeadAttention(d_model=16, h=4)
X = torch.randn(1, 6, 16)
output, weights = mha(X)
print(f"Output shape: {output.shape}")
print(f"Head attention shapes: {weights.shape}")
""",
    "E 8.4.2": r"""
import torch
import math

def sinusoidal_positional_encoding(T, d_model):
    PE = torch.zeros(T, d_model)
    pos = torch.arange(0, T, dtype=torch.float).unsqueeze(1)
    i = torch.arange(0, d_model // 2, dtype=torch.float)
    freq = torch.exp(-math.log(10000.0) * 2 * i / d_model)
    PE[:, 0::2] = torch.sin(pos * freq)
    PE[:, 1::2] = torch.cos(pos * freq)
    return PE

PE = sinusoidal_positional_encoding(T=128, d_model=64)
print(f"PE shape: {PE.shape}")
print(f"Position 0 norm: {PE[0].norm():.4f}")
print(f"Position 127 norm: {PE[127].norm():.4f}")
""",
    "E 8.5.5": r"""
import torch
import torch.nn as nn
import torch.nn.functional as F

class TransformerBlock(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = MultiHeadAttention(d_model, h)
        self.norm2 = nn.LayerNorm(d_model)
        self.ff1 = nn.Linear(d_model, d_ff)
        self.ff2 = nn.Linear(d_ff, d_model)

    def forward(self, x, mask=None):
        attn_out, _ = self.attn(self.norm1(x), mask=mask)
        x = x + attn_out
        ff_out = self.ff2(F.relu(self.ff1(self.norm2(x))))
        x = x + ff_out
        return x

block = TransformerBlock(d_model=32, h=4, d_ff=128)
x = torch.randn(1, 5, 32)
out = block(x)
print(f"Input shape:  {x.shape}")
print(f"Output shape: {out.shape}")
""",
}
