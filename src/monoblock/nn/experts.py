"""Mixture of experts (Shazeer et al. 2017): a router sends each token through `top_k` feed-forward networks.

Each projection (up, gate and down) is one tensor with the weights of all experts.  `_run_all` runs every token through
every expert, so that the result for a token does not depend on its batch; `_run_selected` is faster, because it runs
each expert only on the tokens routed to it.  No token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from monoblock.config.model import ExpertsConfig, FeedForwardConfig
from monoblock.nn.feedforward import ACTIVATIONS, apply_activation
from monoblock.nn.tap import Tap, apply_tap, tap_changes, tap_wants


def route(
    logits: Float[Tensor, "N E"], config: ExpertsConfig
) -> tuple[Int[Tensor, "N {config.top_k}"], Float[Tensor, "N {config.top_k}"]]:
    """Select the `top_k` experts of each token from router logits; return their indices and their weights."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if config.router == "top_k_softmax":
        top_logits, expert_ids = wide.topk(config.top_k, dim=-1)
        return expert_ids, top_logits.softmax(-1).to(logits.dtype)
    weights, expert_ids = wide.softmax(-1).topk(config.top_k, dim=-1)
    if config.router == "softmax_renormalized":
        weights = weights / weights.sum(-1, keepdim=True)
    return expert_ids, weights.to(logits.dtype)


def load_balancing_loss(
    logits: Float[Tensor, "*places E"],
    top_k: int,
    valid: Bool[Tensor, "*places"] | None = None,
    sum_over_data: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, ""]:
    """Compute the load-balancing loss (Fedus et al. 2022, eq. 4), which is 1 if all experts are used equally.

    It is E * Σ_e (share of tokens routed to expert e) * (mean router probability of expert e).  `logits` are the router
    logits, which taps see as `feedforward.router`; `valid` is False on padding, which is not counted.  If other
    processes have other parts of the batch, `sum_over_data` returns the sum of a tensor over all of them.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    counts = torch.ones(flat.shape[0], device=flat.device) if valid is None else valid.reshape(-1).float()
    probabilities = flat.float().softmax(-1)
    routed = F.one_hot(probabilities.topk(top_k, dim=-1).indices, flat.shape[-1]).sum(1).float() / top_k
    sums = torch.cat(((routed * counts[:, None]).sum(0), counts.sum()[None]))
    sums = sums if sum_over_data is None else sum_over_data(sums)
    share = sums[:-1] / sums[-1].clamp(min=1)
    mean = (probabilities * counts[:, None]).sum(0) / counts.sum().clamp(min=1)
    return flat.shape[-1] * (share * mean).sum()


ROUTER = ".feedforward.router"


class RouterTap:
    """A tap that records the router logits of expert layers and passes every tensor on to another tap, if given."""

    def __init__(self, tap: Tap | None = None) -> None:
        self.router_logits: list[Tensor] = []
        self.tap = tap

    def wants(self, name: str) -> bool:
        return tap_wants(self.tap, name)

    def changes(self, name: str) -> bool:
        return tap_changes(self.tap, name)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(ROUTER):
            self.router_logits.append(tensor)
        return apply_tap(self.tap, name, tensor)


def _expert_linear(x: Tensor, matrices: Any, expert: int, bias: Tensor | None) -> Tensor:
    """Multiply x (n, inputs) by the matrix of one expert; `matrices` (E, outputs, inputs) may be a quantized module."""
    x = x if isinstance(matrices, Tensor) else matrices.round_input(x)
    return F.linear(x, matrices[expert], bias)


class Experts(nn.Module):
    def __init__(self, width: int, config: FeedForwardConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config, self.experts_config = config, config.experts
        E, D, hidden = config.experts.count, width, config.hidden
        self.router = nn.Linear(D, E, bias=config.experts.router_bias)
        self.up = nn.Parameter(torch.empty(E, hidden, D))
        self.gate = nn.Parameter(torch.empty(E, hidden, D)) if config.gated else None
        self.down = nn.Parameter(torch.empty(E, D, hidden))
        self.up_bias = nn.Parameter(torch.zeros(E, hidden)) if config.bias else None
        self.gate_bias = nn.Parameter(torch.zeros(E, hidden)) if config.bias and config.gated else None
        self.down_bias = nn.Parameter(torch.zeros(E, D)) if config.bias else None
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "B T D"], tap: Tap | None = None) -> Float[Tensor, "B T D"]:
        """Apply the selected experts to each token of x."""
        B, T, D = x.shape
        logits = apply_tap(tap, "router", self.router(x))  # (B, T, E)
        tokens = x.reshape(-1, D)
        expert_ids, weights = route(logits.reshape(-1, logits.shape[-1]), self.experts_config)
        weights = weights.to(x.dtype)  # under autocast, logits and outputs have 16 bits, x may have 32
        if x.is_meta or tap_wants(tap, "outputs") or torch.compiler.is_exporting():
            out = self._run_all(tokens, expert_ids, weights, tap)
        else:
            out = self._run_selected(tokens, expert_ids, weights)
        return out.reshape(B, T, D)

    def run_expert(self, expert: int, x: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """Run one expert on some tokens."""

        def bias(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else parameter[expert]

        up = _expert_linear(x, self.up, expert, bias(self.up_bias))
        gate = None if self.gate is None else _expert_linear(x, self.gate, expert, bias(self.gate_bias))
        hidden = apply_activation(self.activation, up, gate, self.config.clamp)
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        return _expert_linear(hidden, self.down, expert, bias(self.down_bias))

    def _run_all(self, x: Tensor, expert_ids: Tensor, weights: Tensor, tap: Tap | None) -> Tensor:
        """Run every expert on every token of x (N, D); return the weighted sum of the selected experts' outputs."""
        outputs = torch.stack([self.run_expert(e, x) for e in range(self.experts_config.count)], dim=1)  # (N, E, D)
        outputs = apply_tap(tap, "outputs", outputs)
        all_weights = torch.zeros(x.shape[0], self.experts_config.count, dtype=x.dtype, device=x.device)
        return (outputs * all_weights.scatter(1, expert_ids, weights)[..., None]).sum(1)

    def _run_selected(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Run each expert on the tokens of x (N, D) routed to it; return the weighted sum of the experts' outputs."""
        out = torch.zeros_like(x)
        for expert in range(self.experts_config.count):
            token, rank = (expert_ids == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.run_expert(expert, x[token]) * weights[token, rank, None])
        return out
