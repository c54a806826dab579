"""The block against the reference library: the same random weights give the same logits, a row of ROWS a structure.

    python tests/parity/test_logits.py        prints the greatest difference of every row
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weights as w  # noqa: E402

from monoblock.config import HeadConfig, ModelConfig, Scaling  # noqa: E402
from monoblock.knobs import vary  # noqa: E402
from monoblock.model import Transformer  # noqa: E402
from monoblock.presets import (  # noqa: E402
    CONTEXT,
    HEAD_DIM,
    HIDDEN,
    NO_SHIFT,
    VOCAB,
    WIDTH,
    WINDOW,
    tiny,
)

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
TOKENS, TARGET = 23, 19  # longer than a window and than T5's exact buckets
PADDING = (0, 4, 9)  # of each row of the batch
PROMPT = 11  # read at once before the rest is decoded token by token; longer than the ring of a window has room for
FIRST_ID, PAD_ID = 3, 1  # no real token is one of the special ids; RoBERTa counts places over what is not 1


@dataclass(frozen=True, kw_only=True)
class Row:
    preset: str  # whose structure is built, at toy size
    model: str  # the published class
    table: tuple[tuple[str, str, Callable], ...]
    sizes: dict[str, Any]  # theirs; what is not given is the published class's own default
    knobs: dict[str, Any] = field(default_factory=dict)  # ours
    change: Callable[[ModelConfig], ModelConfig] = lambda config: config  # what no knob reaches
    places: bool = True  # the class is told the places of a padded row; without it they must not matter, or be counted
    padded: str = "left"


# -- what each naming of sizes calls ours -------------------------------------------------------------------------

STANDARD = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": CONTEXT,
}
GROUPED = STANDARD | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": HEAD_DIM}
GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT}
DISTIL = {
    "vocab_size": VOCAB,
    "dim": WIDTH,
    "hidden_dim": HIDDEN,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": CONTEXT,
}
ROBERTA = STANDARD | {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
MODERN = STANDARD | {"num_hidden_layers": 4, "local_attention": 2 * (WINDOW - 1), "pad_token_id": PAD_ID}
BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "max_position_embeddings": CONTEXT,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 3 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": HIDDEN for side in ("encoder", "decoder")},
}
GROUPS = {"heads": 6, "kv_heads": 3, "head_dim": HEAD_DIM}
DEEP = {"depth": 3}


def rotary(base, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **scaling}}


def partial(fraction):
    return rotary(10_000.0, partial_rotary_factor=fraction)


def masked_lm(**choices):
    """The head a masked language model was trained with, in place of the preset's."""
    head = {"kind": "masked_lm", "transform": "gelu", "bias": "learned"}

    def change(config):
        norm = {"norm": config.input.norm}
        return replace(config, head=HeadConfig(**(head | norm | choices)), tie="output")

    return change


ROWS: dict[str, Row] = {
    "gpt2": Row(preset="gpt2", model="GPT2LMHeadModel", table=w.GPT2, sizes=GPT, knobs=DEEP),
    # BERT pools the first column, which under left padding is no token: padded on the right.
    "bert": Row(preset="bert-base", model="BertModel", table=w.bert(""), sizes=STANDARD, padded="right"),
    "bert, masked": Row(
        preset="bert-base", model="BertForMaskedLM", table=w.bert("bert."), sizes=STANDARD, change=masked_lm()
    ),
    "roberta": Row(preset="roberta-base", model="RobertaModel", table=w.bert(""), sizes=ROBERTA, padded="right"),
    # RoBERTa counts places itself, over the ids that are not padding.
    "roberta, masked": Row(
        preset="roberta-base",
        model="RobertaForMaskedLM",
        table=w.bert("roberta."),
        sizes=ROBERTA | DEEP_LAYERS if (DEEP_LAYERS := {"num_hidden_layers": 3}) else {},
        knobs=DEEP,
        change=masked_lm(),
        places=False,
    ),
    "distilbert": Row(preset="distilbert", model="DistilBertModel", table=w.distilbert(""), sizes=DISTIL),
    "distilbert, masked": Row(
        preset="distilbert",
        model="DistilBertForMaskedLM",
        table=w.distilbert("distilbert."),
        sizes=DISTIL,
        change=masked_lm(),
    ),
    "modernbert": Row(preset="modernbert-base", model="ModernBertModel", table=w.modernbert(""), sizes=MODERN),
    "modernbert, masked": Row(
        preset="modernbert-base",
        model="ModernBertForMaskedLM",
        table=w.modernbert("model."),
        sizes=MODERN,
        change=masked_lm(norm=NO_SHIFT, transform_bias=False),
    ),
}
