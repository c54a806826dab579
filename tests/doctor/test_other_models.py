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


class Recurrent(nn.Module):
    """A language model over a GRU; each fault is a classic one of recurrent models."""

    def __init__(self, fault=None, outputs=VOCAB):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        width = WIDTH // 2 if fault == "bidirectional" else WIDTH
        self.gru = nn.GRU(WIDTH, width, batch_first=fault != "time first", bidirectional=fault == "bidirectional")
        self.head, self.fault, self.state = nn.Linear(WIDTH, outputs), fault, None

    def forward(self, ids):
        keeps = self.fault == "state" and self.state is not None and self.state.shape[1] == len(ids)
        x, state = self.gru(self.token(ids), self.state if keeps else None)
        self.state = state.detach()
        return self.head(x)


class RunningScale(Decoder):
    """A mean over all calls so far scales the embeddings; it moves in evaluation, too."""

    scale = 10.0

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        self.scale = 0.9 * self.scale + 0.1 * float(x.detach().std())
        x = x / self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Convolution(nn.Module):
    def __init__(self, fault=None):
        super().__init__()
        self.token, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.conv, self.fault = nn.Conv1d(WIDTH, WIDTH, 3, padding=1 if fault else 0), fault

    def forward(self, ids):
        x = self.token(ids).transpose(1, 2)
        return self.head(self.conv(x if self.fault else nn.functional.pad(x, (2, 0))).transpose(1, 2))


class PositionsOverBatch(Decoder):
    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(len(ids)))[:, None] + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NotFiniteBetweenModules(Decoder):
    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head((x - 1e9).log() if self.fault else x)


class LastState(Recurrent):
    """A classifier; with the fault it reads the state at the last position, padding or not."""

    def forward(self, ids):
        x = self.gru(self.token(ids))[0]
        last = torch.full((len(ids),), -1) if self.fault else (ids != 0).sum(1) - 1
        return self.head(x[torch.arange(len(ids)), last])


class RecurrentTranslator(nn.Module):
    def __init__(self, fault=None):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.encoder, self.decoder = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head, self.fault = nn.Linear(WIDTH, VOCAB), fault

    def forward(self, src, tgt):
        states, last = self.encoder(self.token(src))
        if self.fault != "padding":
            last = states[torch.arange(len(src)), (src != 0).sum(1) - 1][None].contiguous()
        return self.head(self.decoder(self.token(tgt), last * (self.fault != "ignored"))[0])


CAUSES = [
    (Recurrent, "bidirectional", {}, "causality", "gru is bidirectional", "bidirectional=False"),
    (Recurrent, "time first", {}, "batch", "gru takes the batch for the sequence", "batch_first=True"),
    (Recurrent, "state", {}, "batch", "keeps something from one call to the next", "take the state as an argument"),
    (
        RunningScale,
        None,
        {},
        "dropout",
        "keeps something from one call to the next",
        "start every call with an empty state",
    ),
    (Convolution, "both ends", {}, "causality", "convolution conv pads both ends", "pad on the left only"),
    (PositionsOverBatch, None, {}, "batch", "along the batch axis", "(1, T, width)"),
    (NotFiniteBetweenModules, "log", {}, "overflow", "operations before head", "eps"),
    (LastState, "last position", {"pad_id": 0}, "padding", "last state is that of padding", "lengths - 1"),
    (RecurrentTranslator, "padding", {"pad_id": 0}, "cross_padding", "recurrence", "lengths - 1"),
    (RecurrentTranslator, "ignored", {"pad_id": 0}, "cross_padding", "do not depend on the source", "cross-attention"),
]


@pytest.mark.parametrize(("model", "fault", "options", "check", "words", "fix"), CAUSES)
def test_the_cause_is_named_without_attention_too(model, fault, options, check, words, fix):
    torch.manual_seed(0)
    found = findings(mb.diagnose(model(fault), **options))
    assert set(found) == {check}
    assert words in found[check].reason
    assert fix in found[check].fix


@pytest.mark.parametrize("model", [Recurrent, Convolution, NotFiniteBetweenModules, LastState, RecurrentTranslator])
def test_a_mended_model_of_another_kind_has_no_findings(model):
    torch.manual_seed(0)
    has_padding = model in (LastState, RecurrentTranslator)
    checks = "overflow" if model is NotFiniteBetweenModules else None  # it is a bag of single tokens
    assert not mb.diagnose(model(), pad_id=0 if has_padding else None, checks=checks).findings


def test_padding_on_the_left_of_a_recurrent_model_is_not_called_a_position():
    (limit,) = mb.diagnose(Recurrent(), pad_id=0).unsupported
    assert limit.check == "padding"
    assert "recurrence" in limit.reason


class SomeLengths(Decoder):
    """It reads texts of one length, or of an even one, only."""

    def __init__(self, length=None, hides_the_future=True):
        super().__init__(rows=128)
        self.length, self.hides_the_future = length, hides_the_future

    def forward(self, ids):
        assert ids.shape[1] % 8 == 0 if self.length is None else ids.shape[1] == self.length, "a wrong length"
        return super().forward(ids if self.hides_the_future else ids.flip(1))


@pytest.mark.parametrize(("length", "options"), [(None, {}), (32, {}), (48, {"length": 48})])
def test_a_model_that_reads_some_lengths_only_is_examined(length, options):
    torch.manual_seed(0)
    report = mb.diagnose(SomeLengths(length), **options)
    assert not report.findings
    assert {"causality", "batch", "positions"} <= set(report.to_dict()["passed"])
    assert set(findings(mb.diagnose(SomeLengths(length, hides_the_future=False), **options))) == {"causality"}


def test_a_length_that_cannot_be_guessed_is_asked_for():
    with pytest.raises(mb.InputError, match=r"one length only, give length="):
        mb.diagnose(SomeLengths(77))


def test_a_module_without_attention_is_not_asked_for_an_uncompiled_one():
    rows = {row.check: row for row in mb.diagnose(Recurrent()).not_checked}
    assert rows["scale"].how == ""
    assert "the model has none" in rows["scale"].reason
