"""DATA: Hugging Face encoder-decoder families of text and audio: their templates, fields, weights and classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from monoblock.config.families import bart, t5
from monoblock.config.model import FramesConfig, Learned, ModelConfig, NormConfig, Sinusoid
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError
from monoblock.interop.huggingface import field_converters as r, weight_rules as w
from monoblock.interop.huggingface.family import LM_HEAD, LM_HEAD_FIXED_BIAS, Family, derive, is_gated
from monoblock.interop.huggingface.field_rules import ConfigTree, FieldRule, get_value, set_value
from monoblock.untrusted_files import short_repr

T5_TEMPLATE = t5(vocab=8, width=8, depth=1, heads=1, context=8)
BART_TEMPLATE = bart(vocab=8, width=8, depth=1, heads=1, context=8)
LAYER_NORM = to_dict(NormConfig())


def both_stacks(path: str) -> str:
    return f"encoder.*.{path} decoder.*.{path}"


def all_attentions(field: str) -> str:
    return " ".join(f"{path}.{field}" for path in ("encoder.*.attention", "decoder.*.attention", "decoder.*.cross"))


# -- T5 ---------------------------------------------------------------------------------------------------------------


def t5_activation(default: str) -> FieldRule:
    """Return the rule for T5's feed_forward_proj: an activation, with "gated-" before it if the layer is gated.

    "gated-gelu" is the tanh approximation of GELU.
    """

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        word = fields["feed_forward_proj"]
        gate, _, name = word.rpartition("-")
        if gate not in ("", "gated"):
            raise ConfigError(
                f"feed_forward_proj={short_repr(word)} is not valid; write an activation, or 'gated-' and an activation"
            )
        ours = "gelu_tanh" if word == "gated-gelu" else r.read_activation(name)
        set_value(tree, both_stacks("feedforward.activation"), ours)
        set_value(tree, both_stacks("feedforward.gated"), gate == "gated")

    def write(tree: ConfigTree) -> dict[str, Any]:
        act, gated = (get_value(tree, f"encoder.*.feedforward.{name}") for name in ("activation", "gated"))
        word = r.write_activation(act, "gelu_new")
        if gated:
            word = "gated-gelu" if act == "gelu_tanh" else f"gated-{word}"
        return {"feed_forward_proj": word}

    assert default.rpartition("-")[2] in r.ACTIVATIONS
    return FieldRule({"feed_forward_proj": default}, read, write)


def decoder_depth() -> FieldRule:
    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, "decoder.depth", fields["num_decoder_layers"] or get_value(tree, "encoder.depth"))

    def write(tree: ConfigTree) -> dict[str, Any]:
        return {"num_decoder_layers": get_value(tree, "decoder.depth")} if tree["decoder"] is not None else {}

    return FieldRule({"num_decoder_layers": None}, read, write)


def t5_output_scale() -> FieldRule:
    """Return the rule for T5's scale_decoder_outputs; if a file does not have it, see `apply_t5_tying`."""

    def write(tree: ConfigTree) -> dict[str, Any]:
        scaled = get_value(tree, "head.scale") == "inverse_sqrt_width"
        return {"scale_decoder_outputs": scaled, "tie_word_embeddings": scaled}

    return FieldRule({"scale_decoder_outputs": None, "tie_word_embeddings": None}, lambda fields, tree: None, write)


def apply_t5_tying(tree: ConfigTree, fields: Mapping[str, Any], tied: bool) -> ConfigTree:
    """Set the output scale of T5 by scale_decoder_outputs; without this field, tied models (T5 1.0) are scaled."""
    stated = fields.get("scale_decoder_outputs")
    if tree["head"] is not None:
        tree["head"]["scale"] = "inverse_sqrt_width" if (tied if stated is None else stated) else 1.0
    return tree


def t5_fields(activation_default: str) -> tuple[FieldRule, ...]:
    return (
        r.field("vocab_size", "input.vocab"),
        r.field("num_layers", "encoder.depth"),
        decoder_depth(),
        r.field("d_model", both_stacks("width")),
        r.field("d_kv", all_attentions("head_dim")),
        r.field("num_heads", all_attentions("heads")),
        r.field("d_ff", both_stacks("feedforward.hidden")),
        t5_activation(activation_default),
        r.field("relative_attention_num_buckets", both_stacks("attention.positions.count"), 32),
        r.field("relative_attention_max_distance", both_stacks("attention.positions.max_distance"), 128),
        r.field("layer_norm_epsilon", "**.eps", 1e-6),
        r.constant("input.context", None),
        r.unused_field("n_positions", 512),
    )


def t5_family(
    model_type: str, class_prefix: str, activation_default: str, *extra_fields: FieldRule, **options: Any
) -> Family:
    return Family(
        model_type=model_type,
        template=T5_TEMPLATE,
        fields=(*t5_fields(activation_default), *extra_fields),
        weights=w.T5,
        weight_variants=((is_gated, w.T5_GATED),),
        classes={
            f"{class_prefix}ForConditionalGeneration": LM_HEAD,
            f"{class_prefix}Model": None,
            f"{class_prefix}EncoderModel": None,
        },
        encoder_classes=(f"{class_prefix}EncoderModel",),
        weight_aliases={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
        ignored_weights=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        **options,
    )


# -- BART and its descendants, and Whisper ----------------------------------------------------------------------------


def bart_fields(activation_default: str, *, scale_embedding: bool = False) -> tuple[FieldRule, ...]:
    return (
        r.field("vocab_size", "input.vocab target.vocab"),
        r.field("encoder_layers", "encoder.depth"),
        r.field("decoder_layers", "decoder.depth"),
        r.field("d_model", both_stacks("width")),
        r.field("encoder_attention_heads", "encoder.*.attention.heads"),
        r.field("decoder_attention_heads", "decoder.*.attention.heads decoder.*.cross.heads"),
        r.field("encoder_ffn_dim", "encoder.*.feedforward.hidden"),
        r.field("decoder_ffn_dim", "decoder.*.feedforward.hidden"),
        r.field("max_position_embeddings", "input.context target.context"),
        r.activation("activation_function", both_stacks("feedforward.activation"), activation_default),
        r.flag("scale_embedding", "input.scale target.scale", scale_embedding, "sqrt_width", 1.0),
        r.unused_field("num_hidden_layers", None),
    )


PRE_NORM = (r.constant(both_stacks("norm_place"), "pre"), r.constant("encoder.norm decoder.norm", LAYER_NORM))
NO_EMBEDDING_NORM = r.constant("input.norm target.norm", None)


def embedding_positions(positions: Learned | Sinusoid) -> FieldRule:
    return r.constant("input.positions target.positions", to_dict(positions))


def marian_vocabularies() -> FieldRule:
    """Return the rule for Marian's vocabularies: source and target share an embedding, or each has its own."""
    defaults = {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": None}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        tree["share"] = bool(fields["share_encoder_decoder_embeddings"])
        set_value(tree, "target.vocab", fields["decoder_vocab_size"] or get_value(tree, "input.vocab"))

    def write(tree: ConfigTree) -> dict[str, Any]:
        return {
            "share_encoder_decoder_embeddings": tree["share"],
            "decoder_vocab_size": get_value(tree, "target.vocab"),
        }

    return FieldRule(defaults, read, write)


def bart_family(
    model_type: str,
    class_prefix: str,
    fields: Sequence[FieldRule],
    *,
    head: ConfigTree = LM_HEAD_FIXED_BIAS,
    lm_suffix: str = "ForConditionalGeneration",
    **options: Any,
) -> Family:
    return Family(
        model_type=model_type,
        template=BART_TEMPLATE,
        fields=fields,
        weights=w.BART,
        classes={f"{class_prefix}{lm_suffix}": head, f"{class_prefix}Model": None},
        prefix="model.",
        unprefixed_classes=(f"{class_prefix}Model",),
        weight_aliases={
            "model.encoder.embed_tokens.weight": "model.shared.weight",
            "model.decoder.embed_tokens.weight": "model.shared.weight",
        },
        **options,
    )


def whisper_template() -> ModelConfig:
    config = bart(vocab=8, width=8, depth=1, heads=1, context=8)
    assert config.target is not None
    target = replace(config.target, positions=replace(config.target.positions, offset=0), norm=None)  # type: ignore[type-var]
    return replace(config, input=FramesConfig(channels=8, context=8), target=target, tie="output")


WHISPER = (
    *derive(
        bart_fields("gelu"),
        r.field("vocab_size", "target.vocab"),
        r.flag("scale_embedding", "target.scale", False, "sqrt_width", 1.0),
        r.unused_field("max_position_embeddings", None),
    ),
    r.field("num_mel_bins", "input.channels", 80),
    r.field("max_source_positions", "input.context", 1500),
    r.field("max_target_positions", "target.context", 448),
    *PRE_NORM,
    r.constant(all_attentions("bias"), "qvo"),
)

SINUSOID_WEIGHTS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight",
          "model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")  # fmt: skip
has_separate_embeddings: Callable[[ModelConfig], bool] = lambda config: config.tie in ("none", "output")

SEQ2SEQ = (
    t5_family("t5", "T5", "relu", t5_output_scale(), apply_tying=apply_t5_tying),
    t5_family("mt5", "MT5", "gated-gelu", r.constant("head.scale", 1.0)),
    t5_family(
        "umt5",
        "UMT5",
        "gated-gelu",
        r.constant(both_stacks("attention.positions.shared"), False),
        apply_tying=apply_t5_tying,
    ),
    bart_family("bart", "Bart", bart_fields("gelu")),
    bart_family("mbart", "MBart", (*bart_fields("gelu"), *PRE_NORM)),
    bart_family(
        "marian",
        "Marian",
        (*bart_fields("gelu"), NO_EMBEDDING_NORM, embedding_positions(Sinusoid(form="halves")), marian_vocabularies()),
        lm_suffix="MTModel",
        ignored_weights=SINUSOID_WEIGHTS,
        weight_variants=((has_separate_embeddings, w.MARIAN_SEPARATE),),
    ),
    # Pegasus stores its table of sinusoids, so the table is loaded like a learned one.
    bart_family(
        "pegasus", "Pegasus", (*bart_fields("gelu"), *PRE_NORM, NO_EMBEDDING_NORM, embedding_positions(Learned()))
    ),
    bart_family(
        "m2m_100",
        "M2M100",
        (
            *bart_fields("relu", scale_embedding=True),
            *PRE_NORM,
            NO_EMBEDDING_NORM,
            embedding_positions(Sinusoid(form="fairseq", offset=2)),
            # positions start at pad_token_id + 1
            r.field(
                "pad_token_id",
                "input.positions.offset target.positions.offset",
                1,
                lambda pad: pad + 1,
                lambda first: first - 1,
            ),
        ),
        head=LM_HEAD,
        ignored_weights=SINUSOID_WEIGHTS,
    ),
    Family(
        model_type="whisper",
        template=whisper_template(),
        fields=WHISPER,
        weights=w.WHISPER,
        classes={"WhisperForConditionalGeneration": LM_HEAD, "WhisperModel": None},
        prefix="model.",
        unprefixed_classes=("WhisperModel",),
    ),
)
