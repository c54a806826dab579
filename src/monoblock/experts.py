"""Mixture of experts (Shazeer et al. 2017): a router sends each token through its `top_k` best feed-forward networks.

Weights of all experts lie in one tensor each, so that they move and shard as one.  Two ways to run them: the plain one
puts every token through every expert and weighs (bit-equal whatever the neighbours); the gathered one collects each
expert's tokens first and does only the work that counts.  No token is ever dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config import ExpertsConfig, FeedForwardConfig
from monoblock.feedforward import ACTIVATIONS, inner
from monoblock.tap import Tap, tapped, wants


def route(logits: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """The chosen experts of each token and their weights, each (N, top_k), from router logits (N, E)."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if config.router == "top_k_softmax":
        best, chosen = wide.topk(config.top_k, dim=-1)
        return chosen, best.softmax(-1).to(logits.dtype)
    weights, chosen = wide.softmax(-1).topk(config.top_k, dim=-1)
    if config.router == "softmax_renormalized":
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(logits.dtype)


def load_balancing_loss(logits: Tensor, top_k: int, real: Tensor | None = None) -> Tensor:
    """E * sum over experts of (share of tokens sent there) * (mean probability): 1 when even (Fedus et al. 2022).

    `logits` (…, E) are what the tap sees as `feedforward.router`; `real` (…) leaves padding out.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    counted = torch.ones(flat.shape[0], device=flat.device) if real is None else real.reshape(-1).float()
    probabilities = flat.float().softmax(-1)
    sent = F.one_hot(probabilities.topk(top_k, dim=-1).indices, flat.shape[-1]).sum(1).float() / top_k
    share = (sent * counted[:, None]).sum(0) / counted.sum()
    mean = (probabilities * counted[:, None]).sum(0) / counted.sum()
    return flat.shape[-1] * (share * mean).sum()


class Experts(nn.Module):
    def __init__(self, width: int, config: FeedForwardConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config, self.experts = config, config.experts
        E, D, hidden = config.experts.count, width, config.hidden
        self.router = nn.Linear(D, E, bias=config.experts.router_bias)
        self.up = nn.Parameter(torch.empty(E, hidden, D))
        self.gate = nn.Parameter(torch.empty(E, hidden, D)) if config.gated else None
        self.down = nn.Parameter(torch.empty(E, D, hidden))
        self.up_bias = nn.Parameter(torch.zeros(E, hidden)) if config.bias else None
        self.gate_bias = nn.Parameter(torch.zeros(E, hidden)) if config.bias and config.gated else None
        self.down_bias = nn.Parameter(torch.zeros(E, D)) if config.bias else None
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        B, T, D = x.shape
        logits = tapped(tap, "router", self.router(x))  # (B, T, E)
        tokens = x.reshape(-1, D)
        chosen, weights = route(logits.reshape(-1, logits.shape[-1]), self.experts)
        if x.is_meta or wants(tap, "outputs") or torch.compiler.is_exporting():
            out = self._plain(tokens, chosen, weights, tap)
        else:
            out = self._gathered(tokens, chosen, weights)
        return out.reshape(B, T, D)

    def one(self, expert: int, x: Tensor) -> Tensor:
        """One expert on tokens (n, D)."""

        def bias(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else parameter[expert]

        up = F.linear(x, self.up[expert], bias(self.up_bias))
        gate = None if self.gate is None else F.linear(x, self.gate[expert], bias(self.gate_bias))
        hidden = inner(self.activation, up, gate, self.config.clamp)
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        return F.linear(hidden, self.down[expert], bias(self.down_bias))

    def _plain(self, x: Tensor, chosen: Tensor, weights: Tensor, tap: Tap | None) -> Tensor:
        outputs = torch.stack([self.one(e, x) for e in range(self.experts.count)], dim=1)  # (N, E, D)
        outputs = tapped(tap, "outputs", outputs)
        spread = torch.zeros(x.shape[0], self.experts.count, dtype=x.dtype, device=x.device)
        return (outputs * spread.scatter(1, chosen, weights)[..., None]).sum(1)

    def _gathered(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.experts.count):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.one(expert, x[token]) * weights[token, place, None])
        return out
