"""DATA: published encoder-decoders: structure, fields, classes and weights of each (see hf_decoders.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monoblock.config import Learned, ModelConfig, NormConfig, Sinusoid
from monoblock.errors import ConfigError
from monoblock.families import bart, t5
from monoblock.interop import hf_weights as w
from monoblock.interop.hf_config import Const, Field, Row, Several, Tree, get, put
from monoblock.interop.hf_family import LM, LM_FIXED, Family
from monoblock.interop.hf_words import ACTIVATIONS, activation, flag, from_activation, to_activation, unheeded
from monoblock.schema import to_dict
from monoblock.untrusted import shown

T5_LIKE = t5(vocab=8, width=8, depth=1, heads=1, context=8)
BART_LIKE = bart(vocab=8, width=8, depth=1, heads=1, context=8)
LAYER = to_dict(NormConfig())


def both(path: str) -> str:
    return f"encoder.*.{path} decoder.*.{path}"


ATTENTIONS = ("encoder.*.attention", "decoder.*.attention", "decoder.*.cross")


def heads(field: str) -> str:
    return " ".join(f"{place}.{field}" for place in ATTENTIONS)


# -- T5 ---------------------------------------------------------------------------------------------------------------


def projection(default: str) -> Several:
    """T5's feed_forward_proj: an activation, or one that gates; "gated-gelu" has always meant the tanh form."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        word = given["feed_forward_proj"]
        gate, _, name = word.rpartition("-")
        if gate not in ("", "gated"):
            raise ConfigError(f"feed_forward_proj={shown(word)} is no activation, nor 'gated-' and one")
        put(tree, both("feedforward.gated"), gate == "gated")
        put(tree, both("feedforward.activation"), "gelu_tanh" if word == "gated-gelu" else to_activation(name))

    def write(tree: Tree) -> dict[str, Any]:
        act, gated = (get(tree, f"encoder.*.feedforward.{name}") for name in ("activation", "gated"))
        word = from_activation(act, "gelu_new")
        if gated:
            word = "gated-gelu" if act == "gelu_tanh" else f"gated-{word}"
        return {"feed_forward_proj": word}

    assert default.rpartition("-")[2] in ACTIVATIONS
    return Several({"feed_forward_proj": default}, read, write)


def decoder_depth() -> Several:
    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, "decoder.depth", given["num_decoder_layers"] or get(tree, "encoder.depth"))

    return Several({"num_decoder_layers": None}, read, lambda tree: {"num_decoder_layers": get(tree, "decoder.depth")})


def t5_scale() -> Several:
    """Whether the decoder's output is scaled down: older files say it by the tie alone (see `settle_scale`)."""

    def write(tree: Tree) -> dict[str, Any]:
        scaled = get(tree, "head.scale") == "inverse_sqrt_width"
        return {"scale_decoder_outputs": scaled, "tie_word_embeddings": scaled}

    return Several({"scale_decoder_outputs": None, "tie_word_embeddings": None}, lambda given, tree: None, write)


def settle_scale(tree: Tree, given: Mapping[str, Any], tied: bool) -> Tree:
    """T5 scales its output where that is the embedding (version 1.0), unless the file says otherwise."""
    said = given.get("scale_decoder_outputs")
    if tree["head"] is not None:
        tree["head"]["scale"] = "inverse_sqrt_width" if (tied if said is None else said) else 1.0
    return tree


def t5_rows(default: str) -> tuple[Row, ...]:
    return (
        Field("vocab_size", "input.vocab"),
        Field("num_layers", "encoder.depth"),
        decoder_depth(),
        Field("d_model", both("width")),
        Field("d_kv", heads("head_dim")),
        Field("num_heads", heads("heads")),
        Field("d_ff", both("feedforward.hidden")),
        projection(default),
        Field("relative_attention_num_buckets", both("attention.positions.count"), 32),
        Field("relative_attention_max_distance", both("attention.positions.max_distance"), 128),
        Field("layer_norm_epsilon", "**.eps", 1e-6),
        Const("input.context", None),
        unheeded("n_positions", 512),
    )


def is_gated(config: ModelConfig) -> bool:
    assert config.encoder is not None
    return next(config.encoder.layers()).feedforward.gated


def t5_family(kind: str, name: str, default: str, *also: Row, **more: Any) -> Family:
    return Family(
        kind=kind,
        start=T5_LIKE,
        rows=(*t5_rows(default), *also),
        weights=w.T5,
        others=((is_gated, w.T5_GATED),),
        classes={f"{name}ForConditionalGeneration": LM, f"{name}Model": None},
        alike={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        **more,
    )


# -- BART and those that learned from it ------------------------------------------------------------------------------


def bart_rows(act: str, *, scaled: bool = False) -> tuple[Row, ...]:
    return (
        Field("vocab_size", "input.vocab target.vocab"),
        Field("d_model", both("width")),
        Field("encoder_layers", "encoder.depth"),
        Field("decoder_layers", "decoder.depth"),
        Field("d_model", both("width")),
        Field("encoder_attention_heads", "encoder.*.attention.heads"),
        Field("decoder_attention_heads", "decoder.*.attention.heads decoder.*.cross.heads"),
        Field("encoder_ffn_dim", "encoder.*.feedforward.hidden"),
        Field("decoder_ffn_dim", "decoder.*.feedforward.hidden"),
        Field("max_position_embeddings", "input.context target.context"),
        activation("activation_function", both("feedforward.activation"), act),
        flag("scale_embedding", "input.scale target.scale", scaled, "sqrt_width", 1.0),
        unheeded("num_hidden_layers", None),
    )


PRE = (Const(both("norm_place"), "pre"), Const("encoder.norm decoder.norm", LAYER))
NO_EMBEDDING_NORM = Const("input.norm target.norm", None)


def added(positions: Learned | Sinusoid) -> Const:
    return Const("input.positions target.positions", to_dict(positions))


def after_padding(offset: str) -> Field:
    """Places are counted from the id of padding on."""
    return Field("pad_token_id", offset, 1, lambda pad: pad + 1, lambda first: first - 1)


def vocabularies() -> Several:
    """Marian: source and target with one table, or each with its own."""
    names = {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": None}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        tree["share"] = bool(given["share_encoder_decoder_embeddings"])
        put(tree, "target.vocab", given["decoder_vocab_size"] or get(tree, "input.vocab"))

    def write(tree: Tree) -> dict[str, Any]:
        return {
            "share_encoder_decoder_embeddings": tree["share"],
            "decoder_vocab_size": get(tree, "target.vocab"),
        }

    return Several(names, read, write)


def bart_family(
    kind: str,
    name: str,
    rows: Sequence[Row],
    *,
    head: Tree = LM_FIXED,
    speaks: str = "ForConditionalGeneration",
    **more: Any,
) -> Family:
    return Family(
        kind=kind,
        start=BART_LIKE,
        rows=rows,
        weights=w.BART,
        classes={f"{name}{speaks}": head, f"{name}Model": None},
        prefix="model.",
        bare=(f"{name}Model",),
        alike={
            "model.encoder.embed_tokens.weight": "model.shared.weight",
            "model.decoder.embed_tokens.weight": "model.shared.weight",
        },
        **more,
    )


TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight",
          "model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")  # fmt: skip
has_own_tables: Callable[[ModelConfig], bool] = lambda config: config.tie in ("none", "output")

SEQ2SEQ = (
    t5_family("t5", "T5", "relu", t5_scale(), settle=settle_scale),
    t5_family("mt5", "MT5", "gated-gelu", Const("head.scale", 1.0)),
    t5_family("umt5", "UMT5", "gated-gelu", Const(both("attention.positions.shared"), False), settle=settle_scale),
    bart_family("bart", "Bart", bart_rows("gelu")),
    bart_family("mbart", "MBart", (*bart_rows("gelu"), *PRE)),
    bart_family(
        "marian",
        "Marian",
        (*bart_rows("gelu"), NO_EMBEDDING_NORM, added(Sinusoid(form="halves")), vocabularies()),
        speaks="MTModel",
        ignored=TABLES,
        others=((has_own_tables, w.MARIAN_APART),),
    ),
    # Pegasus stores its table of sinusoids, so that it may as well have been learned.
    bart_family("pegasus", "Pegasus", (*bart_rows("gelu"), *PRE, NO_EMBEDDING_NORM, added(Learned()))),
    bart_family(
        "m2m_100",
        "M2M100",
        (
            *bart_rows("relu", scaled=True),
            *PRE,
            NO_EMBEDDING_NORM,
            added(Sinusoid(form="fairseq", offset=2)),
            after_padding("input.positions.offset target.positions.offset"),
        ),
        head=LM,
        ignored=TABLES,
    ),
)
