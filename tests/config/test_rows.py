"""What a norm, an activation, a position scheme or an optimizer is stands in one row: every reader takes every row."""

import html
from typing import get_args

import pytest
import torch

import monoblock as mb
from monoblock.accounting.memory import OPTIMIZER_STATES
from monoblock.accounting.report import account
from monoblock.config.knobs import KNOBS, list_knobs, read_knob, vary
from monoblock.config.parts import (
    ACTIVATION_ROWS,
    NORM_ROWS,
    POSITION_SCHEMES,
    Activation,
    NormConfig,
    NormKind,
    PositionScheme,
)
from monoblock.config.presets import tiny
from monoblock.errors import ConfigError
from monoblock.model import Transformer
from monoblock.nn.feedforward import ACTIVATIONS
from monoblock.plots.architecture import draw
from monoblock.training.optimizer import OPTIMIZERS

ROWS = [
    *(("norm", kind, [row.label] if kind != "none" else []) for kind, row in NORM_ROWS.items()),
    *(("activation", kind, [row.label]) for kind, row in ACTIVATION_ROWS.items()),
    *(
        ("positions", kind, [part.label for part in row[:2] if part] + [row.inside.bias if row.inside else ""])
        for kind, row in POSITION_SCHEMES.items()
    ),
]


def test_the_names_of_rows_are_the_choices_of_types():
    assert get_args(NormKind) == tuple(NORM_ROWS)
    assert get_args(Activation) == tuple(ACTIVATION_ROWS) == tuple(ACTIVATIONS)
    assert get_args(PositionScheme) == tuple(POSITION_SCHEMES)
    assert set(OPTIMIZERS) <= set(OPTIMIZER_STATES)


@pytest.mark.parametrize(("knob", "kind", "drawn"), ROWS)
def test_every_reader_knows_every_row(knob, kind, drawn):
    config = vary(tiny("gpt2"), **{knob: kind, "qk_norm": knob == "norm"})
    assert read_knob(config, knob) == [kind]
    picture = html.unescape(draw(config).svg)
    assert all(words in picture for words in drawn)
    model = Transformer(config)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    model(torch.arange(22).view(2, 11)).mean().backward()
    costs = account(config)
    assert costs.parameters == sum(weight.numel() for weight in model.parameters())
    for optimizer in OPTIMIZER_STATES:
        assert costs.training_bytes(2, 11, optimizer=optimizer).total > 0
    for checkpointing in (False, "selective", True):
        assert costs.plan("fsdp", 2, checkpointing=checkpointing).memory.peak > 0


def test_every_position_scheme_is_public():
    parts = [part for row in POSITION_SCHEMES.values() for part in row[:2] if part]
    assert {type(part).__name__ for part in parts} <= set(mb.__all__)


@pytest.mark.parametrize("knob", ["norm", "activation", "positions"])
def test_an_unknown_kind_is_an_error(knob):
    with pytest.raises(ConfigError, match="'nonesuch' is not one of"):
        vary(tiny("gpt2"), **{knob: "nonesuch"})


def test_an_unknown_optimizer_is_an_error():
    with pytest.raises(ConfigError, match="'nonesuch' is not one of"):
        account("gpt2").training_bytes(optimizer="nonesuch")


@pytest.mark.parametrize("kind", NORM_ROWS)
def test_a_norm_has_the_affine_of_its_row_only(kind):
    for affine in ("scale_shift", "scale", "none"):
        if affine in NORM_ROWS[kind].affine:
            assert NormConfig(kind=kind, affine=affine).row is NORM_ROWS[kind]
        else:
            with pytest.raises(ConfigError, match=f"has no affine='{affine}'"):
                NormConfig(kind=kind, affine=affine)


def test_papers_are_those_of_the_rows():
    papers = {knob.name: knob.paper for knob in list_knobs()}
    for knob, rows in (("norm", NORM_ROWS), ("activation", ACTIVATION_ROWS), ("positions", POSITION_SCHEMES)):
        assert all(f"{kind}: {row.paper}" in papers[knob] for kind, row in rows.items() if row.paper)
    assert set(papers) == set(KNOBS)
