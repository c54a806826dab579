"""Experts for the few tokens of a step on a GPU: all shapes are fixed, so that the step can be recorded."""

from __future__ import annotations

from torch import Tensor

from monoblock.nn.experts import Experts
from monoblock.nn.feedforward import apply_activation

MAX_TOKENS = 64  # for more, it is faster to run each expert on its tokens


def needs_fixed_shapes(x: Tensor) -> bool:
    """Return whether tokens x (N, D) may be those of a step that is recorded."""
    return x.is_cuda and x.shape[0] <= MAX_TOKENS


class InferenceExperts(Experts):
    """Experts that gather the weights of each token or, if there are fewer experts than that, run all of them."""

    def _run_selected(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        if not needs_fixed_shapes(x):
            return super()._run_selected(x, expert_ids, weights)
        if expert_ids.numel() < self.experts_config.count and isinstance(self.up, Tensor):
            return self._run_gathered(x, expert_ids, weights)
        return self._run_all(x, expert_ids, weights, None)

    def _run_gathered(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Multiply each token of x (N, D) with copies of the weights of its experts; return the weighted sum."""
        ids = expert_ids.flatten()

        def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = (weight[ids] @ rows.unsqueeze(-1)).squeeze(-1)
            return out if bias is None else out + bias[ids]

        rows = x.repeat_interleave(expert_ids.shape[1], 0)
        gate = None if self.gate is None else project(rows, self.gate, self.gate_bias)
        hidden = apply_activation(self.activation, project(rows, self.up, self.up_bias), gate, self.config.clamp)
        outputs = project(hidden, self.down, self.down_bias).view(*expert_ids.shape, -1)
        return (outputs * weights.unsqueeze(-1)).sum(1)
