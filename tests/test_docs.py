"""The documentation is true: its code runs, the files and tests it names exist, and shapes.md lists every name."""

import ast
import functools
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run_code
from support import random_pixels, random_tokens

import monoblock as mb
from monoblock.config.model import (
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
from monoblock.config.presets import PRESETS

ROOT = Path(__file__).parent.parent
SOURCE = str(ROOT / "src")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_named_in_the_documentation_exists(page):
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|h|cpp))`", text) + re.findall(r"\]\(([\w./-]+\.md)\)", text)
    names += re.findall(r"\b(benchmarks/\w+\.py|scripts/\w+)", text)
    folders = (ROOT, ROOT / "src" / "monoblock", page.parent)
    missing = [name for name in names if not any((folder / name).is_file() for folder in folders)]
    assert not missing


def test_every_name_in_the_guide_to_extending_is_in_its_file():
    text = (ROOT / "docs/adding.md").read_text(encoding="utf-8")
    pairs = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`\)", text) + re.findall(r"`(\w+)` in `(tests/[\w/]+\.py)`", text)
    assert len(pairs) > 15
    for name, file in pairs:
        path = ROOT / file if file.startswith("tests") else ROOT / "src/monoblock" / file
        assert all(re.search(rf"\b{part}\b", path.read_text(encoding="utf-8")) for part in name.split(".")), name


def test_every_erratum_names_a_test_that_exists():
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", (ROOT / "docs/errata.md").read_text(encoding="utf-8"))
    assert len(named) > 25
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def table_rows(page):
    """Return the cells of every row of the tables of a page, without its bold type."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("**", "").splitlines()
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines if line.startswith("| ")]


def test_the_errata_and_the_experiments_agree_on_every_claim():
    claims = [row for row in table_rows("experiments.md") if len(row) == 5]
    measured = [row for row in table_rows("errata.md") if row[3:] and re.fullmatch(r"`[\w-]+`", row[3])]
    assert len(claims) > 40
    refuted = [row[:4] for row in claims if row[2] in ("contradicted", "partly confirmed")]
    assert measured == refuted
    stated = " ".join(row[1] for row in table_rows("errata.md") if row not in measured)
    # What the errata call wrong is not called confirmed.
    for words in ("tying saves about", "sinusoids generalise to longer sequences"):
        assert words in stated
        assert [row[2] for row in claims if words in row[1]] not in ([], ["confirmed"])


def test_the_code_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    assert blocks
    for block in blocks:
        done = run_code(block, cwd=tmp_path, environment={"PYTHONPATH": SOURCE})
        assert done.returncode == 0, done.stderr


def listed_names(chapter):
    """Return the names in the first column of a table of docs/shapes.md, with braces expanded."""
    text = (ROOT / "docs/shapes.md").read_text(encoding="utf-8")
    rows = re.search(rf"## {chapter}\n(.*?)(?=\n## |\Z)", text, flags=re.S)[1].splitlines()
    patterns = [name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    alternatives = [[part.split(",") for part in re.split(r"[{}]", name)] for name in patterns]
    return {"".join(choice) for name in alternatives for choice in itertools.product(*name)}


def generic_name(name):
    """Return a name as docs/shapes.md writes it: decoder.3.norm is stack.N.norm."""
    return re.sub(r"\.\d+\.", ".N.", re.sub(r"^(encoder|decoder)\.", "stack.", name))


NORM = NormConfig()
GATED = {"hidden": 7, "gated": True, "bias": True}
ATTENTION = AttentionConfig(heads=3, sinks=True, qk_norm=NORM, positions=Buckets(shared=False), mask="full")
BLOCK = BlockConfig(
    width=12,
    attention=ATTENTION,
    feedforward=FeedForwardConfig(**GATED),
    norm_place="sandwich",
    layer_scale=0.1,
)
DECODER = replace(
    BLOCK,
    attention=replace(ATTENTION, mask="causal"),
    cross=replace(ATTENTION, positions=None),
    feedforward=FeedForwardConfig(**GATED, experts=ExpertsConfig(count=5, router_bias=True)),
)
TOKENS = EmbeddingConfig(vocab=61, context=37, dim=10, positions=Learned(), segments=2, norm=NORM)
MASKED_LM_HEAD = HeadConfig(kind="masked_lm", transform="gelu", norm=NORM, bias="learned")
ENCODER = StackConfig(pattern=(Repeat(blocks=(BLOCK,)),), norm=NORM)
EXTRA_CONFIGS = {
    "encoder-decoder with every option": ModelConfig(
        input=TOKENS,
        target=TOKENS,
        encoder=ENCODER,
        decoder=StackConfig(pattern=(Repeat(blocks=(DECODER,)),), norm=NORM),
        head=HeadConfig(kind="language_model", bias="fixed"),
    ),
    "masked language model": ModelConfig(input=TOKENS, encoder=ENCODER, head=MASKED_LM_HEAD),
    "tied output of a factorized embedding": replace(
        mb.gpt(vocab=61, width=12, depth=1, heads=3, context=37), input=replace(TOKENS, segments=0)
    ),
    "registers": replace(
        mb.vit(image=12, patch=4, width=12, depth=1, heads=3, classes=7),
        input=PatchConfig(image=12, patch=4, registers=3, norm=NORM),
    ),
    "distillation": replace(
        mb.vit(image=12, patch=4, width=12, depth=1, heads=3, classes=7),
        input=PatchConfig(image=12, patch=4, distillation_token=True, mask_token=True),
        head=HeadConfig(kind="classifier", classes=7, bias="learned", teacher=True),
    ),
    "audio": replace(
        mb.vaswani(vocab=61, target_vocab=61, width=12, depth=1, heads=3), input=FramesConfig(channels=7, context=13)
    ),
    "tagger": mb.bert(vocab=61, width=12, depth=1, heads=3, context=37, head="tagger", classes=7),
}
CONFIGS = {name: mb.tiny(name) for name in PRESETS} | EXTRA_CONFIGS


@functools.cache
def weight_names(name):
    with torch.device("meta"):
        return {generic_name(weight) for weight in mb.Transformer(CONFIGS[name]).state_dict()}


@functools.cache
def activation_names(name):
    names, config = set(), CONFIGS[name]

    def tap(activation, tensor):
        names.add(generic_name(activation))
        return tensor

    ids = random_tokens(2, 13)
    source = torch.zeros(2, config.input.channels, 2 * 13) if isinstance(config.input, FramesConfig) else ids
    inputs = {
        "vision": (random_pixels(config, 2),) if config.family == "vision" else (),
        "encoder-decoder": (source, ids),
    }
    with torch.no_grad():
        mb.Transformer(config)(*inputs.get(config.family, (ids,)), tap=tap)
    return names


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_and_activation_is_listed_in_shapes(name):
    assert weight_names(name) - listed_names("Weights") == set()
    assert activation_names(name) - listed_names("Activations") == set()


def test_every_weight_and_activation_in_shapes_belongs_to_some_model():
    assert listed_names("Weights") == set().union(*(weight_names(name) for name in CONFIGS))
    assert listed_names("Activations") == set().union(*(activation_names(name) for name in CONFIGS))
