"""A healthy model has no findings: every preset, published families in eager and sdpa, an LSTM, a trained run."""

import pytest
import torch
from rows import PUBLISHED_MODELS

from monoblock.config.model import RecurrentConfig
from monoblock.config.presets import PRESETS, tiny
from monoblock.doctor.diagnose import diagnose_model
from monoblock.nn.recurrent.lstm import Recurrent
from monoblock.nn.transformer import Transformer

DIFFERENT = {tiny(name): name for name in reversed(PRESETS)}  # one name for each tiny configuration

FAMILIES = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2",
    "gemma2",
    "gpt_neox",
    "phi",
    "gpt_neo",
    "bloom",
    "falcon-7b",
    "opt",
    "mixtral",
    "t5",
    "t5 encoder",
    "bart",
    "albert",
    "distilbert",
    "bert masked",
    "roberta masked",
    "bert classifier",
]


def names(report):
    return {finding.check: finding.evidence for finding in report.findings}


@pytest.mark.parametrize("name", DIFFERENT.values())
def test_a_preset_has_no_findings(name):
    torch.manual_seed(0)
    report = diagnose_model(Transformer(tiny(name)))
    assert not report.findings, names(report)
    assert not [row for row in report.not_checked if "failed" in row.reason]


EAGER_ONLY = ("bloom", "gpt_neo")  # their authors wrote no attention with sdpa


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, way) for name in FAMILIES for way in ("eager", "sdpa") if way == "eager" or name not in EAGER_ONLY],
)
def test_a_published_family_has_no_findings(name, attention):
    transformers = pytest.importorskip("transformers")
    row = PUBLISHED_MODELS[name]
    config_class = getattr(transformers, row.class_name)
    config = config_class.config_class(**row.config_fields)
    config._attn_implementation, config._experts_implementation = attention, "eager"
    torch.manual_seed(0)
    report = diagnose_model(config_class(config))
    assert not report.findings, names(report)
    assert not [row for row in report.not_checked if "failed" in row.reason]


def test_at_least_fifteen_families_are_examined_in_both_ways():
    classes = {PUBLISHED_MODELS[name].class_name.split("For")[0] for name in FAMILIES if name not in EAGER_ONLY}
    assert len(classes) >= 15, sorted(classes)


def test_an_lstm_has_no_findings():
    torch.manual_seed(0)
    report = diagnose_model(Recurrent(RecurrentConfig(kind="language_model", vocab=61, width=36, depth=2)))
    assert not report.findings, names(report)


def test_an_examination_changes_neither_weights_nor_mode_nor_random_numbers():
    torch.manual_seed(0)
    model = Transformer(tiny("gpt2")).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(5, 61, (4, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def step():
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    report = diagnose_model(model, batch=(tokens[:, :-1], tokens[:, 1:]), step=step, optimizer=optimizer)
    assert torch.equal(torch.rand(3), expected)
    assert not report.findings, names(report)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
