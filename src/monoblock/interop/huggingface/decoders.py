"""DATA: Hugging Face decoder families: their templates, field rules, weight rules and classes.

A family that differs from another in a few fields has the rules of the other, followed by its own (`override`).  The
defaults of fields are those in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from monoblock.config.families import gpt, llama
from monoblock.config.model import ExpertsConfig, FeedForwardConfig, Learned, NormConfig, Sinusoid
from monoblock.config.preset_blocks import GEMMA_RMS_NORM, PYTHIA_BLOCK, build_decoder_only
from monoblock.config.presets import preset
from monoblock.config.schema import to_dict
from monoblock.interop.huggingface import weight_rules as w
from monoblock.interop.huggingface.family import LM_HEAD, LM_HEAD_BIAS, Family, head_tree, override, without
from monoblock.interop.huggingface.field_converters import (
    FULL,
    SLIDING,
    activation,
    all_biases,
    every_nth,
    expert_layers,
    falcon_layers,
    feedforward_ratio,
    feedforward_size,
    flag,
    gpt2_attention_scale,
    gpt_neo_layers,
    inverse,
    inverse_sqrt,
    layer_types,
    logit_softcap,
    mpt_attention,
    no_rope_layers,
    num_labels,
    opt_embedding_size,
    opt_norms,
    optional_window,
    qk_norm,
    qwen_layer_types,
    unused_field,
)
from monoblock.interop.huggingface.field_rules import (
    ConfigTree,
    Constant,
    Field,
    FieldGroup,
    FieldRule,
    FixedField,
    get_value,
    set_value,
)
from monoblock.interop.huggingface.rotary import falcon_rotary, rotary

BLOCK, ATTN, FFN = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"
LLAMA_TEMPLATE = llama(vocab=8, width=8, depth=1, heads=1, context=8)
GPT_TEMPLATE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)
CLASSIFIER_HEAD = head_tree(kind="classifier", classes=2, pooling="last")
LAYER_NORM, LAYER_NORM_NO_SHIFT = to_dict(NormConfig()), to_dict(NormConfig(affine="scale"))


def norms(norm: ConfigTree) -> Constant:
    return Constant(f"{BLOCK}.norm decoder.norm", norm)


def decoder_family(
    model_type: str,
    class_prefix: str,
    fields: Sequence[FieldRule],
    weights: Sequence[w.Rule],
    *,
    template: Any = LLAMA_TEMPLATE,
    prefix: str = "model.",
    head: ConfigTree = LM_HEAD,
    lm_class: str | None = None,
    has_classifier: bool = True,
    **options: Any,
) -> Family:
    """Return a decoder family with three classes: a language model, the decoder without a head, and a classifier.

    lm_class: the name of the language model, if it is not the prefix and "ForCausalLM".
    has_classifier: whether transformers has the third class; it classifies by the last token that is not padding.
    """
    classifier = f"{class_prefix}ForSequenceClassification"
    classes = {lm_class or f"{class_prefix}ForCausalLM": head, f"{class_prefix}Model": None}
    return Family(
        model_type=model_type,
        template=template,
        fields=(*fields, num_labels()),
        weights=weights,
        classes=classes | ({classifier: CLASSIFIER_HEAD} if has_classifier else {}),
        head_weights={classifier: w.SCORE},
        prefix=prefix,
        unprefixed_classes=(f"{class_prefix}Model",),
        **options,
    )


def size_fields(
    width: str = "hidden_size",
    depth: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    context: str = "max_position_embeddings",
) -> tuple[FieldRule, ...]:
    return (
        Field("vocab_size", "input.vocab"),
        Field(depth, "decoder.depth"),
        Field(width, f"{BLOCK}.width"),
        Field(heads, f"{ATTN}.heads"),
        Field(context, "input.context"),
    )


# -- LLaMA and its descendants ----------------------------------------------------------------------------------------

LLAMA = (
    *size_fields(),
    Field("num_key_value_heads", f"{ATTN}.kv_heads", None),
    Field("head_dim", f"{ATTN}.head_dim", None),
    Field("intermediate_size", f"{FFN}.hidden"),
    activation("hidden_act", f"{FFN}.activation", "silu"),
    Field("rms_norm_eps", "**.eps", 1e-6),
    flag("attention_bias", f"{ATTN}.bias", False, "qkvo", ""),
    Field("mlp_bias", f"{FFN}.bias", False),
    rotary(),
)
LLAMA_BASE = without(LLAMA, "head_dim", "attention_bias", "mlp_bias")  # fields that many descendants lack
LLAMA_WITH_BIAS = without(LLAMA, "head_dim", "mlp_bias")
LLAMA_LAYER_NORM = without(LLAMA_BASE, "rms_norm_eps")
SLIDING_WINDOW = Field("sliding_window", f"{ATTN}.window", None)
LAYER_NORM_EPS = Field("layer_norm_eps", "**.eps", 1e-5)
QWEN_LAYER_TYPES = layer_types("decoder", qwen_layer_types, default=4096, has_switch=True, max_window_layers=28)
MISTRAL = override(without(LLAMA, "attention_bias", "mlp_bias"), replace(SLIDING_WINDOW, default=4096))
GEMMA = (
    *override(without(LLAMA, "mlp_bias"), activation("hidden_act", f"{FFN}.activation", "gelu_pytorch_tanh")),
    Field("head_dim", f"{ATTN}.head_dim", 256),
    FixedField("hidden_activation", None, ("gelu_pytorch_tanh",)),
    Constant("input.scale", "sqrt_width"),
)
GEMMA2 = override(
    without(GEMMA, "hidden_act", "hidden_activation"),
    activation("hidden_activation", f"{FFN}.activation", "gelu_pytorch_tanh"),
    inverse_sqrt("query_pre_attn_scalar", f"{ATTN}.scale", 256),
    Field("attn_logit_softcapping", f"{ATTN}.softcap", 50.0),
    logit_softcap(30.0),
    layer_types("decoder", every_nth(2, FULL, SLIDING), default=4096),
    FixedField("hidden_act", "gelu_pytorch_tanh", ("gelu",)),  # in older files; hidden_activation decides
    unused_field("sliding_window_size", None),  # in older files; sliding_window decides
)
GEMMA3 = override(
    GEMMA2,
    Field("attn_logit_softcapping", f"{ATTN}.softcap", None),
    logit_softcap(None),
    layer_types(
        "decoder",
        lambda fields, depth: every_nth(fields["sliding_window_pattern"], FULL, SLIDING)(fields, depth),
        default=4096,
        sliding_window_pattern=6,
        _sliding_window_pattern=6,
    ),
    rotary(layer_bases=(1_000_000.0, 10_000.0), sliding_theta_key="rope_local_base_freq"),
)
GLM = (
    *override(
        without(LLAMA, "mlp_bias", "attention_bias", "rope_parameters"),
        Field("rms_norm_eps", "**.eps", 1.5625e-07),
    ),
    Field("head_dim", f"{ATTN}.head_dim", 128),
    flag("attention_bias", f"{ATTN}.bias", True, "qkv", ""),
    rotary(partial=0.5),
    Constant(f"{ATTN}.positions.layout", "interleaved"),
)
GPT_OSS_FEEDFORWARD = FeedForwardConfig(
    hidden=8,
    activation="quick_gelu",
    gated=True,
    clamp=7.0,
    experts=ExpertsConfig(count=8, top_k=4, router="top_k_softmax", router_bias=True),
)
EXPERTS = (
    Field("num_local_experts", f"{FFN}.experts.count", 8),
    Field("num_experts_per_tok", f"{FFN}.experts.top_k", 2),
)

LLAMA_FAMILIES = (
    decoder_family("llama", "Llama", LLAMA, w.LLAMA, tied_by_default=False),
    decoder_family("mistral", "Mistral", MISTRAL, w.LLAMA, tied_by_default=False),
    decoder_family(
        "qwen2",
        "Qwen2",
        override((*LLAMA_BASE, Constant(f"{ATTN}.bias", "qkv")), QWEN_LAYER_TYPES),
        w.LLAMA,
        tied_by_default=False,
    ),
    decoder_family(
        "qwen3",
        "Qwen3",
        override(without(LLAMA, "mlp_bias"), Field("head_dim", f"{ATTN}.head_dim", 128), QWEN_LAYER_TYPES),
        w.LLAMA,
        template=preset("qwen3-0.6b"),
        tied_by_default=False,
    ),
    decoder_family(
        "phi3",
        "Phi3",
        (
            *override(
                LLAMA_BASE,
                Field("rms_norm_eps", "**.eps", 1e-5),
                SLIDING_WINDOW,
                rotary(partial=1.0, original_context=4096),
            ),
            FixedField("attention_bias", False),
        ),
        w.PHI3,
        tied_by_default=False,
    ),
    decoder_family(
        "granite",
        "Granite",
        (
            *without(LLAMA, "head_dim"),
            Field("embedding_multiplier", "input.scale", 1.0),
            Field("residual_multiplier", f"{BLOCK}.residual_scale", 1.0),
            Field("attention_multiplier", f"{ATTN}.scale", 1.0),
            inverse("logits_scaling", "head.scale", 1.0),
        ),
        w.LLAMA,
        tied_by_default=False,
        has_classifier=False,
    ),
    decoder_family(
        "smollm3",
        "SmolLM3",
        override(
            without(LLAMA, "head_dim"),
            layer_types("decoder", lambda fields, depth: [FULL] * depth, has_switch=True, max_window_layers=28),
            rotary(base=2_000_000.0),
            no_rope_layers(),
        ),
        w.LLAMA,
    ),
    decoder_family(
        "olmo2",
        "Olmo2",
        override(LLAMA_WITH_BIAS, Field("rms_norm_eps", "**.eps", 1e-5)),
        w.OLMO2,
        template=preset("olmo2-7b"),
        tied_by_default=False,
    ),
    decoder_family(
        "olmo3",
        "Olmo3",
        override(
            LLAMA_WITH_BIAS,
            Field("rms_norm_eps", "**.eps", 1e-5),
            layer_types("decoder", every_nth(4, FULL, SLIDING), default=4096),
            rotary(layer_bases=(500_000.0, 500_000.0)),
        ),
        w.OLMO2,
        template=preset("olmo2-7b"),
        tied_by_default=False,
    ),
    decoder_family(
        "olmo",
        "Olmo",
        (
            norms(to_dict(NormConfig(affine="none"))),
            *without(LLAMA_WITH_BIAS, "rms_norm_eps"),
            Field("clip_qkv", f"{ATTN}.clip", None),
        ),
        w.LLAMA,
        tied_by_default=False,
    ),
    decoder_family(
        "stablelm",
        "StableLm",
        (
            norms(LAYER_NORM),
            *without(LLAMA_LAYER_NORM, "rope_parameters"),
            LAYER_NORM_EPS,
            flag("use_qkv_bias", f"{ATTN}.bias", False, "qkv", ""),
            FixedField("use_norm_bias", True),
            flag("use_parallel_residual", f"{BLOCK}.residual", False, "parallel_shared", "sequential"),
            qk_norm("qk_layernorm", "each_head", NormConfig(affine="scale")),
            rotary(partial=0.25, fraction_key="rope_pct"),
        ),
        w.STABLELM,
        tied_by_default=False,
    ),
    decoder_family(
        "starcoder2",
        "Starcoder2",
        (
            norms(LAYER_NORM),
            *override(LLAMA_LAYER_NORM, activation("hidden_act", f"{FFN}.activation", "gelu_pytorch_tanh")),
            Field("norm_epsilon", "**.eps", 1e-5),
            all_biases("use_bias"),
            SLIDING_WINDOW,
            FixedField("norm_type", "layer_norm"),
            FixedField("mlp_type", "default"),
            Constant(f"{FFN}.gated", False),
            # Names of GPT-BigCode, in some files; hidden_act and norm_epsilon decide.
            *(unused_field(name, None) for name in ("activation_function", "layer_norm_epsilon", "scale_attn_weights")),
        ),
        w.STARCODER2,
    ),
    decoder_family(
        "cohere",
        "Cohere",
        (
            norms(LAYER_NORM_NO_SHIFT),
            *override(without(LLAMA_WITH_BIAS, "rms_norm_eps"), rotary(base=500_000.0)),
            LAYER_NORM_EPS,
            Field("logit_scale", "head.scale", 0.0625),
            qk_norm("use_qk_norm", "each_head", NormConfig(affine="scale")),
            Constant(f"{BLOCK}.residual", "parallel_shared"),
            Constant(f"{ATTN}.positions.layout", "interleaved"),
        ),
        w.LLAMA,
        has_classifier=False,
    ),
    decoder_family(
        "phi",
        "Phi",
        (
            *override(LLAMA_LAYER_NORM, activation("hidden_act", f"{FFN}.activation", "gelu_new"), rotary(partial=0.5)),
            LAYER_NORM_EPS,
            qk_norm("qk_layernorm", "head", NormConfig()),
            unused_field("rotary_dim", None),  # in older files; partial_rotary_factor decides
        ),
        w.PHI,
        template=preset("phi-2"),
        head=LM_HEAD_BIAS,
        tied_by_default=False,
    ),
    decoder_family(
        "persimmon",
        "Persimmon",
        (
            *override(
                without(LLAMA_LAYER_NORM, "num_key_value_heads"),
                activation("hidden_act", f"{FFN}.activation", "relu2"),
                rotary(partial=0.5),
            ),
            LAYER_NORM_EPS,
            replace(qk_norm("qk_layernorm", "head", NormConfig()), defaults={"qk_layernorm": True}),
        ),
        w.PERSIMMON,
        template=preset("persimmon-8b"),
        tied_by_default=False,
    ),
    decoder_family(
        "nemotron",
        "Nemotron",
        (
            norms(LAYER_NORM | {"unit_offset": True}),
            *override(
                without(LLAMA, "rms_norm_eps"),
                activation("hidden_act", f"{FFN}.activation", "relu2"),
                rotary(partial=0.5, fraction_key="rope_percent"),
            ),
            Field("norm_eps", "**.eps", 1e-5),
            Constant(f"{FFN}.gated", False),
        ),
        w.LLAMA,
        tied_by_default=False,
    ),
    decoder_family("glm", "Glm", GLM, w.GLM, tied_by_default=False),
    decoder_family("glm4", "Glm4", (*GLM, Constant(f"{BLOCK}.norm_place", "sandwich")), w.GLM4, tied_by_default=False),
    decoder_family("gemma", "Gemma", (norms(to_dict(GEMMA_RMS_NORM)), *GEMMA), w.LLAMA),
    decoder_family("gemma2", "Gemma2", GEMMA2, w.GEMMA2, template=preset("gemma2-2b")),
    decoder_family(
        "gemma3_text",
        "Gemma3Text",
        (Constant(f"{ATTN}.qk_norm", to_dict(GEMMA_RMS_NORM)), *GEMMA3),
        w.GEMMA2,
        template=preset("gemma2-2b"),
        lm_class="Gemma3ForCausalLM",
    ),
    decoder_family(
        "mixtral",
        "Mixtral",
        (
            *override(MISTRAL, Field("rms_norm_eps", "**.eps", 1e-5), SLIDING_WINDOW, rotary(base=1_000_000.0)),
            *EXPERTS,
        ),
        w.MIXTRAL,
        template=preset("mixtral-8x7b"),
        tied_by_default=False,
    ),
    decoder_family(
        "gpt_oss",
        "GptOss",
        (
            *override(
                without(LLAMA, "mlp_bias"),
                Field("head_dim", f"{ATTN}.head_dim", 64),
                Field("rms_norm_eps", "**.eps", 1e-5),
                flag("attention_bias", f"{ATTN}.bias", True, "qkvo", ""),
                layer_types("decoder", every_nth(2, FULL, SLIDING), default=128),
                rotary(base=150_000.0),
            ),
            FixedField("hidden_act", "silu"),
            FixedField("swiglu_limit", 7.0),
            Constant(f"{FFN}", to_dict(GPT_OSS_FEEDFORWARD)),
            Field("intermediate_size", f"{FFN}.hidden"),
            Field("num_local_experts", f"{FFN}.experts.count", 128),
            Field("num_experts_per_tok", f"{FFN}.experts.top_k", 4),
            Constant(f"{ATTN}.sinks", True),
        ),
        w.GPT_OSS,
        tied_by_default=False,
        field_aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    ),
    decoder_family(
        "qwen3_moe",
        "Qwen3Moe",
        (
            *without(LLAMA, "mlp_bias", "intermediate_size"),
            optional_window(f"{ATTN}.window", 4096),
            expert_layers("num_local_experts"),
        ),
        w.QWEN3_MOE,
        template=preset("qwen3-0.6b"),
        tied_by_default=False,
        field_aliases={"num_experts": "num_local_experts"},
    ),
)

# -- GPT-2 and its descendants ----------------------------------------------------------------------------------------

GPT2_EPS = Field("layer_norm_epsilon", "**.eps", 1e-5)
GPT2 = (
    *size_fields("n_embd", "n_layer", "n_head", "n_positions"),
    feedforward_size("n_inner", f"{FFN}.hidden", f"{BLOCK}.width"),
    activation("activation_function", f"{FFN}.activation", "gelu_new"),
    GPT2_EPS,
)
GPTJ = (
    *GPT2,
    Field("rotary_dim", f"{ATTN}.positions.dim", 64),
    FixedField("rotary", True),
    FixedField("scale_attn_weights", True),
)
BLOOM = (
    *without(size_fields("hidden_size", "n_layer", "n_head"), "max_position_embeddings"),
    feedforward_ratio(f"{FFN}.hidden", f"{BLOCK}.width"),
    FixedField("n_inner", None),
    GPT2_EPS,
    Constant("input.context", None),
)
BIGCODE = (
    *override(GPT2, activation("activation_function", f"{FFN}.activation", "gelu_pytorch_tanh")),
    FixedField("scale_attn_weights", True),
    FieldGroup(
        {"multi_query": True, "num_key_value_heads": None},
        lambda fields, tree: set_value(tree, f"{ATTN}.kv_heads", 1 if fields["multi_query"] else None),
        lambda tree: {"multi_query": get_value(tree, f"{ATTN}.kv_heads") == 1},
    ),
)
FALCON = (
    *override(size_fields(), Field("max_position_embeddings", "input.context", 2048)),
    feedforward_size("ffn_hidden_size", f"{FFN}.hidden", f"{BLOCK}.width"),
    activation("activation", f"{FFN}.activation", "gelu"),
    GPT2_EPS,
    replace(all_biases("bias"), defaults={"bias": False}),
    falcon_layers(),
    falcon_rotary(),
)
GPT2_OBSOLETE_WEIGHTS = tuple(  # masks that older versions of transformers stored
    f"transformer.h.*.attn.{name}"
    for name in ("bias", "masked_bias", "attention.bias", "attention.masked_bias", "causal_mask")
)
NEOX_OBSOLETE_WEIGHTS = tuple(
    f"gpt_neox.layers.*.attention.{name}" for name in ("rotary_emb.inv_freq", "bias", "masked_bias")
)

GPT2_FAMILIES = (
    decoder_family(
        "gpt2",
        "GPT2",
        (*GPT2, gpt2_attention_scale()),
        w.GPT2,
        template=GPT_TEMPLATE,
        prefix="transformer.",
        lm_class="GPT2LMHeadModel",
        ignored_weights=GPT2_OBSOLETE_WEIGHTS,
    ),
    decoder_family(
        "gpt_bigcode",
        "GPTBigCode",
        BIGCODE,
        w.BIGCODE_MULTI_HEAD,
        template=GPT_TEMPLATE,
        prefix="transformer.",
        ignored_weights=GPT2_OBSOLETE_WEIGHTS,
        weight_variants=((lambda config: next(config.decoder.layers()).attention.num_kv_heads == 1, w.BIGCODE),),
    ),
    decoder_family(
        "gpt_neo",
        "GPTNeo",
        (
            *size_fields(depth="num_layers", heads="num_heads"),
            feedforward_size("intermediate_size", f"{FFN}.hidden", f"{BLOCK}.width"),
            activation("activation_function", f"{FFN}.activation", "gelu_new"),
            GPT2_EPS,
            gpt_neo_layers(),
            Constant(f"{ATTN}.scale", 1.0),
            Constant(f"{ATTN}.bias", "o"),
        ),
        w.GPT_NEO,
        template=GPT_TEMPLATE,
        prefix="transformer.",
        ignored_weights=GPT2_OBSOLETE_WEIGHTS,
    ),
    decoder_family(
        "gptj",
        "GPTJ",
        GPTJ,
        w.GPTJ,
        template=preset("gptj-6b"),
        prefix="transformer.",
        head=LM_HEAD_BIAS,
        ignored_weights=GPT2_OBSOLETE_WEIGHTS,
        tied_by_default=False,
    ),
    decoder_family(
        "codegen",
        "CodeGen",
        GPTJ,
        w.CODEGEN,
        template=preset("gptj-6b"),
        prefix="transformer.",
        head=LM_HEAD_BIAS,
        ignored_weights=GPT2_OBSOLETE_WEIGHTS,
        tied_by_default=False,
        has_classifier=False,
    ),
    decoder_family(
        "gpt_neox",
        "GPTNeoX",
        (
            *size_fields(),
            Field("intermediate_size", f"{FFN}.hidden"),
            activation("hidden_act", f"{FFN}.activation", "gelu"),
            LAYER_NORM_EPS,
            flag("attention_bias", f"{ATTN}.bias", True, "qkvo", ""),
            flag("use_parallel_residual", f"{BLOCK}.residual", True, "parallel", "sequential"),
            FixedField("is_decoder", False, (True,)),
            rotary(partial=0.25, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
        ),
        w.NEOX,
        template=build_decoder_only(PYTHIA_BLOCK, vocab=8, context=8, depth=1, norm=NormConfig()),
        prefix="gpt_neox.",
        ignored_weights=NEOX_OBSOLETE_WEIGHTS,
        tied_by_default=False,
    ),
    decoder_family(
        "bloom",
        "Bloom",
        BLOOM,
        w.BLOOM,
        template=preset("bloom-560m"),
        prefix="transformer.",
        field_aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    ),
    decoder_family(
        "mpt",
        "Mpt",
        (
            *override(
                size_fields("d_model", "n_layers", "n_heads", "max_seq_len"),
                Field("max_seq_len", "input.context", 2048),
            ),
            feedforward_ratio(f"{FFN}.hidden", f"{BLOCK}.width", expansion_ratio=4),
            GPT2_EPS,
            FixedField("no_bias", True),
            FixedField("learned_pos_emb", True, (False,)),  # has no effect with ALiBi
            FixedField("norm_type", "low_precision_layernorm"),
            FixedField("logit_scale", None),
            FixedField("verbose", 0, (False, None)),
            mpt_attention(),
        ),
        w.MPT,
        template=preset("mpt-7b"),
        prefix="transformer.",
        class_aliases={"MPTForCausalLM": "MptForCausalLM"},  # the class of the code in the published folders
    ),
    decoder_family(
        "falcon",
        "Falcon",
        FALCON,
        w.BLOOM,
        template=preset("falcon-7b"),
        prefix="transformer.",
        weight_variants=((lambda config: next(config.decoder.layers()).residual == "parallel", w.FALCON_40B),),
        field_aliases={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"},
    ),
)

# -- decoders of fairseq ----------------------------------------------------------------------------------------------

SCALE_EMBEDDING = flag("scale_embedding", "input.scale", True, "sqrt_width", 1.0)
FAIRSEQ_FAMILIES = (
    decoder_family(
        "opt",
        "OPT",
        (
            *size_fields(),
            Field("ffn_dim", f"{FFN}.hidden"),
            activation("activation_function", f"{FFN}.activation", "relu"),
            opt_norms(),
            opt_embedding_size(),
            all_biases("enable_bias"),
            Constant("input.positions", to_dict(Learned(offset=2))),
            Constant("input.projection", "first"),
            Constant("input.projection_bias", False),
        ),
        w.OPT,
        template=GPT_TEMPLATE,
    ),
    decoder_family(
        "xglm",
        "XGLM",
        (
            *size_fields("d_model", "num_layers", "attention_heads"),
            Field("ffn_dim", f"{FFN}.hidden"),
            activation("activation_function", f"{FFN}.activation", "gelu"),
            SCALE_EMBEDDING,
            Constant("input.positions", to_dict(Sinusoid(form="fairseq", offset=2))),
        ),
        w.XGLM,
        template=GPT_TEMPLATE,
        ignored_weights=("model.embed_positions.weights",),
        has_classifier=False,
    ),
    decoder_family(
        "biogpt",
        "BioGpt",
        (
            *size_fields(),
            Field("intermediate_size", f"{FFN}.hidden"),
            activation("hidden_act", f"{FFN}.activation", "gelu"),
            SCALE_EMBEDDING,
            unused_field("layer_norm_eps", 1e-12),
            Constant("input.positions", to_dict(Learned(offset=2))),
        ),
        w.BIOGPT,
        template=GPT_TEMPLATE,
        prefix="biogpt.",
    ),
)

DECODERS = (*GPT2_FAMILIES[:1], *LLAMA_FAMILIES, *GPT2_FAMILIES[1:], *FAIRSEQ_FAMILIES)
