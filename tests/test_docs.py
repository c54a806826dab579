"""The pages say what is so: the README's code runs, errata name tests that exist, names in shapes.md are real."""

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import pixels, tokens

import monoblock as mb
from monoblock.config import (
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    FramesConfig,
    HeadConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    Repeat,
    StackConfig,
)
from monoblock.presets import PRESETS

ROOT = Path(__file__).parent.parent
SOURCE = str(ROOT / "src")


def test_every_erratum_names_a_test_that_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs/errata.md").read_text(encoding="utf-8"))
    assert len(named) > 25
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_the_code_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    assert blocks
    for block in blocks:
        subprocess.run(
            [sys.executable, "-c", block], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": SOURCE}
        )


def listed(chapter):
    """The names in the first column of a table of docs/shapes.md, braces written out."""
    text = (ROOT / "docs/shapes.md").read_text(encoding="utf-8")
    rows = re.search(rf"## {chapter}\n(.*?)(?=\n## |\Z)", text, flags=re.S)[1].splitlines()
    spelled = [name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    pieces = [[part.split(",") for part in re.split(r"[{}]", name)] for name in spelled]
    return {"".join(choice) for name in pieces for choice in itertools.product(*name)}


def spoken(name):
    """A name as docs/shapes.md writes it: decoder.3.norm is stack.N.norm."""
    return re.sub(r"\.\d+\.", ".N.", re.sub(r"^(encoder|decoder)\.", "stack.", name))


NORM = NormConfig()
GATED = {"hidden": 7, "gated": True, "bias": True}
OWN = AttentionConfig(heads=3, sinks=True, qk_norm=NORM, positions=Buckets(shared=False), mask="full")
BLOCK = BlockConfig(
    width=12,
    attention=OWN,
    feedforward=FeedForwardConfig(**GATED),
    norm_place="sandwich",
    layer_scale=0.1,
)
DECODER = replace(
    BLOCK,
    attention=replace(OWN, mask="causal"),
    cross=replace(OWN, positions=None),
    feedforward=FeedForwardConfig(**GATED, experts=ExpertsConfig(count=5, router_bias=True)),
)
TOKENS = EmbeddingConfig(vocab=61, context=37, dim=10, positions=Learned(), segments=2, norm=NORM)
MASKED = HeadConfig(kind="masked_lm", transform="gelu", norm=NORM, bias="learned")
ENCODER = StackConfig(pattern=(Repeat(blocks=(BLOCK,)),), norm=NORM)
EXTRA = {
    "everything on both sides": ModelConfig(
        input=TOKENS,
        target=TOKENS,
        encoder=ENCODER,
        decoder=StackConfig(pattern=(Repeat(blocks=(DECODER,)),), norm=NORM),
        head=HeadConfig(kind="language_model", bias="fixed"),
    ),
    "masked words": ModelConfig(input=TOKENS, encoder=ENCODER, head=MASKED),
    "a tied output of a factorised embedding": replace(
        mb.gpt(vocab=61, width=12, depth=1, heads=3, context=37), input=replace(TOKENS, segments=0)
    ),
    "registers": replace(
        mb.vit(image=12, patch=4, width=12, depth=1, heads=3, classes=7),
        input=PatchConfig(image=12, patch=4, registers=3, norm=NORM),
    ),
    "a teacher": replace(
        mb.vit(image=12, patch=4, width=12, depth=1, heads=3, classes=7),
        input=PatchConfig(image=12, patch=4, distillation_token=True, mask_token=True),
        head=HeadConfig(kind="classifier", classes=7, bias="learned", teacher=True),
    ),
    "sound": replace(
        mb.vaswani(vocab=61, target_vocab=61, width=12, depth=1, heads=3), input=FramesConfig(channels=7, context=13)
    ),
    "tags": mb.bert(vocab=61, width=12, depth=1, heads=3, context=37, head="tagger", classes=7),
}
CONFIGS = {name: mb.tiny(name) for name in PRESETS} | EXTRA


@functools.cache
def weights(name):
    with torch.device("meta"):
        return {spoken(weight) for weight in mb.Transformer(CONFIGS[name]).state_dict()}


@functools.cache
def activations(name):
    seen, config = set(), CONFIGS[name]

    def tap(activation, tensor):
        seen.add(spoken(activation))
        return tensor

    ids = tokens(2, 13)
    source = torch.zeros(2, config.input.channels, 2 * 13) if isinstance(config.input, FramesConfig) else ids
    inputs = {"vision": (pixels(config, 2),) if config.family == "vision" else (), "encoder-decoder": (source, ids)}
    with torch.no_grad():
        mb.Transformer(config)(*inputs.get(config.family, (ids,)), tap=tap)
    return seen


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_and_activation_is_listed_in_shapes(name):
    assert weights(name) - listed("Weights") == set()
    assert activations(name) - listed("Activations") == set()


def test_every_weight_and_activation_in_shapes_is_one_of_some_model():
    assert listed("Weights") == set().union(*(weights(name) for name in CONFIGS))
    assert listed("Activations") == set().union(*(activations(name) for name in CONFIGS))
