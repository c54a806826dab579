"""Models of other kinds than a student's GPT: recurrent, convolutional, fixed in length, stateful, with a source."""

import pytest
import torch
from torch import nn

import monoblock as mb

VOCAB, WIDTH = 67, 32


def causal(T):
    return torch.ones(T, T, dtype=torch.bool).triu(1)


class Block(nn.Module):
    def __init__(self, fault=None):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.fault = fault

    def forward(self, x):
        h = self.norm(x)
        y = self.attention(h, h, h, attn_mask=causal(x.shape[1]))[0]
        x = x + (y.detach() if self.fault == "attention" else y)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, fault=None, rows=64):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(rows, WIDTH)
        self.blocks = nn.ModuleList([Block(fault) for _ in range(2)])
        self.head, self.fault = nn.Linear(WIDTH, VOCAB), fault

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        x = x.detach() if self.fault == "embedding" else x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def findings(report):
    return {finding.check: finding for finding in report.findings}


@pytest.mark.parametrize(
    ("fault", "weight"), [("attention", "blocks.0.norm.weight"), ("embedding", "token.weight"), (None, None)]
)
def test_weights_whose_result_is_detached_are_named(fault, weight):
    found = findings(mb.diagnose(Decoder(fault)))
    assert set(found) == ({"gradient_flow"} if fault else set())
    if fault:
        assert found["gradient_flow"].evidence["first"] == weight
        assert "detached" in found["gradient_flow"].reason
