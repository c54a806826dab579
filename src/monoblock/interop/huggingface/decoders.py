"""DATA: Hugging Face decoder families: their templates, field rules, weight rules and classes.

A family that differs from another in a few fields has the rules of the other, changed (`derive`).  The defaults of
fields are those in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monoblock.config.families import gpt, llama
from monoblock.config.model import ExpertsConfig, FeedForwardConfig, Learned, ModelConfig, NormConfig, Sinusoid
from monoblock.config.preset_blocks import GEMMA_RMS_NORM, PYTHIA_BLOCK, build_decoder_only
from monoblock.config.presets import preset
from monoblock.config.schema import to_dict
from monoblock.interop.huggingface import field_converters as r, weight_rules as w
from monoblock.interop.huggingface.family import LM_HEAD, LM_HEAD_BIAS, Family, derive, head_tree
from monoblock.interop.huggingface.field_converters import FULL, SLIDING
from monoblock.interop.huggingface.field_rules import ConfigTree, FieldRule, get_value, set_value

BLOCK, ATTN, FFN = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"
LLAMA_TEMPLATE = llama(vocab=8, width=8, depth=1, heads=1, context=8)
GPT_TEMPLATE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)
CLASSIFIER_HEAD = head_tree("classifier", classes=2, pooling="last")
LAYER_NORM, LAYER_NORM_NO_SHIFT = to_dict(NormConfig()), to_dict(NormConfig(affine="scale"))

GPT2_OBSOLETE_WEIGHTS = tuple(  # masks that older versions of transformers stored
    f"transformer.h.*.attn.{name}"
    for name in ("bias", "masked_bias", "attention.bias", "attention.masked_bias", "causal_mask")
)


def norms(norm: ConfigTree) -> FieldRule:
    return r.constant(f"{BLOCK}.norm decoder.norm", norm)


def decoder_family(
    model_type: str,
    class_prefix: str,
    fields: Sequence[FieldRule],
    weights: Sequence[w.Rule],
    *,
    template: ModelConfig = GPT_TEMPLATE,
    prefix: str = "transformer.",
    head: ConfigTree = LM_HEAD,
    lm_class: str | None = None,
    has_classifier: bool = True,
    ignored_weights: tuple[str, ...] = GPT2_OBSOLETE_WEIGHTS,
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
        fields=(*fields, r.num_labels()),
        weights=weights,
        classes=classes | ({classifier: CLASSIFIER_HEAD} if has_classifier else {}),
        head_weights={classifier: w.SCORE},
        prefix=prefix,
        unprefixed_classes=(f"{class_prefix}Model",),
        ignored_weights=ignored_weights,
        **options,
    )


def size_fields(
    width: str = "hidden_size",
    depth: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    context: str = "max_position_embeddings",
) -> tuple[FieldRule, ...]:
    return (
        r.field("vocab_size", "input.vocab"),
        r.field(depth, "decoder.depth"),
        r.field(width, f"{BLOCK}.width"),
        r.field(heads, f"{ATTN}.heads"),
        r.field(context, "input.context"),
    )


def activation(theirs: str, default: str) -> FieldRule:
    return r.activation(theirs, f"{FFN}.activation", default)


def eps(theirs: str, default: float = 1e-5) -> FieldRule:
    return r.field(theirs, "**.eps", default)


# -- LLaMA and its descendants ----------------------------------------------------------------------------------------

LLAMA = (
    *size_fields(),
    r.field("num_key_value_heads", f"{ATTN}.kv_heads", None),
    r.field("head_dim", f"{ATTN}.head_dim", None),
    r.field("intermediate_size", f"{FFN}.hidden"),
    activation("hidden_act", "silu"),
    eps("rms_norm_eps", 1e-6),
    r.flag("attention_bias", f"{ATTN}.bias", False, "qkvo", ""),
    r.field("mlp_bias", f"{FFN}.bias", False),
    r.rotary(),
)
LLAMA_BASE = derive(LLAMA, drop="head_dim attention_bias mlp_bias")  # fields that many descendants lack
LLAMA_LAYER_NORM = derive(LLAMA_BASE, drop="rms_norm_eps")
QWEN_LAYER_TYPES = r.layer_types("decoder", r.qwen_layer_types, default=4096, has_switch=True, max_window_layers=28)
MISTRAL = derive(LLAMA, r.field("sliding_window", f"{ATTN}.window", 4096), drop="attention_bias mlp_bias")
MIXTRAL = derive(
    MISTRAL,
    eps("rms_norm_eps"),
    r.field("sliding_window", f"{ATTN}.window", None),
    r.rotary(base=1_000_000.0),
    r.field("num_local_experts", f"{FFN}.experts.count", 8),
    r.field("num_experts_per_tok", f"{FFN}.experts.top_k", 2),
)
GEMMA = derive(
    LLAMA,
    norms(to_dict(GEMMA_RMS_NORM)),
    eps("rms_norm_eps", 1e-6),
    activation("hidden_act", "gelu_pytorch_tanh"),
    r.field("head_dim", f"{ATTN}.head_dim", 256),
    r.rotary(),
    r.fixed_field("hidden_activation", None, "gelu_pytorch_tanh"),
    r.constant("input.scale", "sqrt_width"),
    drop="mlp_bias",
)
GEMMA2 = derive(
    GEMMA,
    activation("hidden_activation", "gelu_pytorch_tanh"),
    r.inverse_sqrt("query_pre_attn_scalar", f"{ATTN}.scale", 256),
    r.field("attn_logit_softcapping", f"{ATTN}.softcap", 50.0),
    r.logit_softcap(30.0),
    r.layer_types("decoder", r.every_nth(2, FULL, SLIDING), default=4096),
    r.fixed_field("hidden_act", "gelu_pytorch_tanh", "gelu"),  # in older files; hidden_activation decides
    r.unused_field("sliding_window_size", None),  # in older files; sliding_window decides
)
GEMMA3 = derive(
    GEMMA2,
    r.constant(f"{ATTN}.qk_norm", to_dict(GEMMA_RMS_NORM)),
    eps("rms_norm_eps", 1e-6),
    r.field("attn_logit_softcapping", f"{ATTN}.softcap", None),
    r.logit_softcap(None),
    r.layer_types(
        "decoder",
        r.every_nth("sliding_window_pattern", FULL, SLIDING),
        default=4096,
        sliding_window_pattern=6,
        _sliding_window_pattern=6,
    ),
    r.rotary(layer_bases=(1_000_000.0, 10_000.0), sliding_theta_key="rope_local_base_freq"),
)
GLM = derive(
    LLAMA,
    eps("rms_norm_eps", 1.5625e-07),
    r.field("head_dim", f"{ATTN}.head_dim", 128),
    r.flag("attention_bias", f"{ATTN}.bias", True, "qkv", ""),
    r.rotary(partial=0.5),
    r.constant(f"{ATTN}.positions.layout", "interleaved"),
    drop="mlp_bias",
)
GPT_OSS_FEEDFORWARD = FeedForwardConfig(
    hidden=8,
    activation="quick_gelu",
    gated=True,
    clamp=7.0,
    experts=ExpertsConfig(count=8, top_k=4, router="top_k_softmax", router_bias=True),
)


def llama_family(
    model_type: str,
    class_prefix: str,
    weights: Sequence[w.Rule],
    *changes: FieldRule,
    base: Sequence[FieldRule] = LLAMA,
    drop: str = "",
    template: str | None = None,
    tied_by_default: bool = False,
    **options: Any,
) -> Family:
    """Return a family with the fields of `base`, changed; `template` is the name of a preset, by default a LLaMA."""
    return decoder_family(
        model_type,
        class_prefix,
        derive(base, *changes, drop=drop),
        weights,
        template=LLAMA_TEMPLATE if template is None else preset(template),
        prefix="model.",
        ignored_weights=(),
        tied_by_default=tied_by_default,
        **options,
    )


LLAMA_FAMILIES = (
    llama_family("llama", "Llama", w.LLAMA),
    llama_family("mistral", "Mistral", w.LLAMA, base=MISTRAL),
    llama_family("qwen2", "Qwen2", w.LLAMA, r.constant(f"{ATTN}.bias", "qkv"), QWEN_LAYER_TYPES, base=LLAMA_BASE),
    llama_family(
        "qwen3",
        "Qwen3",
        w.LLAMA,
        r.field("head_dim", f"{ATTN}.head_dim", 128),
        QWEN_LAYER_TYPES,
        drop="mlp_bias",
        template="qwen3-0.6b",
    ),
    llama_family(
        "phi3",
        "Phi3",
        w.PHI3,
        eps("rms_norm_eps"),
        r.field("sliding_window", f"{ATTN}.window", None),
        r.rotary(partial=1.0, original_context=4096),
        r.fixed_field("attention_bias", False),
        base=LLAMA_BASE,
    ),
    llama_family(
        "granite",
        "Granite",
        w.LLAMA,
        r.field("embedding_multiplier", "input.scale", 1.0),
        r.field("residual_multiplier", f"{BLOCK}.residual_scale", 1.0),
        r.field("attention_multiplier", f"{ATTN}.scale", 1.0),
        r.inverse("logits_scaling", "head.scale", 1.0),
        drop="head_dim",
        has_classifier=False,
    ),
    llama_family(
        "smollm3",
        "SmolLM3",
        w.LLAMA,
        r.layer_types("decoder", lambda fields, depth: [FULL] * depth, has_switch=True, max_window_layers=28),
        r.rotary(base=2_000_000.0),
        r.no_rope_layers(),
        drop="head_dim",
        tied_by_default=True,
    ),
    llama_family("olmo2", "Olmo2", w.OLMO2, eps("rms_norm_eps"), drop="head_dim mlp_bias", template="olmo2-7b"),
    llama_family(
        "olmo3",
        "Olmo3",
        w.OLMO2,
        eps("rms_norm_eps"),
        r.layer_types("decoder", r.every_nth(4, FULL, SLIDING), default=4096),
        r.rotary(layer_bases=(500_000.0, 500_000.0)),
        drop="head_dim mlp_bias",
        template="olmo2-7b",
    ),
    llama_family(
        "olmo",
        "Olmo",
        w.LLAMA,
        norms(to_dict(NormConfig(affine="none"))),
        r.field("clip_qkv", f"{ATTN}.clip", None),
        drop="head_dim mlp_bias rms_norm_eps",
    ),
    llama_family(
        "stablelm",
        "StableLm",
        w.STABLELM,
        norms(LAYER_NORM),
        eps("layer_norm_eps"),
        r.flag("use_qkv_bias", f"{ATTN}.bias", False, "qkv", ""),
        r.fixed_field("use_norm_bias", True),
        r.flag("use_parallel_residual", f"{BLOCK}.residual", False, "parallel_shared", "sequential"),
        r.qk_norm("qk_layernorm", "each_head", NormConfig(affine="scale")),
        r.rotary(partial=0.25, fraction_key="rope_pct"),
        base=LLAMA_LAYER_NORM,
    ),
    llama_family(
        "starcoder2",
        "Starcoder2",
        w.STARCODER2,
        norms(LAYER_NORM),
        activation("hidden_act", "gelu_pytorch_tanh"),
        eps("norm_epsilon"),
        *r.biases("use_bias", True),
        r.field("sliding_window", f"{ATTN}.window", None),
        r.fixed_field("norm_type", "layer_norm"),
        r.fixed_field("mlp_type", "default"),
        r.constant(f"{FFN}.gated", False),
        # Names of GPT-BigCode, in some files; hidden_act and norm_epsilon decide.
        *(r.unused_field(name, None) for name in ("activation_function", "layer_norm_epsilon", "scale_attn_weights")),
        base=LLAMA_LAYER_NORM,
        tied_by_default=True,
    ),
    llama_family(
        "cohere",
        "Cohere",
        w.LLAMA,
        norms(LAYER_NORM_NO_SHIFT),
        r.rotary(base=500_000.0),
        eps("layer_norm_eps"),
        r.field("logit_scale", "head.scale", 0.0625),
        r.qk_norm("use_qk_norm", "each_head", NormConfig(affine="scale")),
        r.constant(f"{BLOCK}.residual", "parallel_shared"),
        r.constant(f"{ATTN}.positions.layout", "interleaved"),
        drop="head_dim mlp_bias rms_norm_eps",
        tied_by_default=True,
        has_classifier=False,
    ),
    llama_family(
        "phi",
        "Phi",
        w.PHI,
        activation("hidden_act", "gelu_new"),
        r.rotary(partial=0.5),
        eps("layer_norm_eps"),
        r.qk_norm("qk_layernorm", "head", NormConfig()),
        r.unused_field("rotary_dim", None),  # in older files; partial_rotary_factor decides
        base=LLAMA_LAYER_NORM,
        template="phi-2",
        head=LM_HEAD_BIAS,
    ),
    llama_family(
        "persimmon",
        "Persimmon",
        w.PERSIMMON,
        activation("hidden_act", "relu2"),
        r.rotary(partial=0.5),
        eps("layer_norm_eps"),
        r.qk_norm("qk_layernorm", "head", NormConfig(), default=True),
        base=LLAMA_LAYER_NORM,
        drop="num_key_value_heads",
        template="persimmon-8b",
    ),
    llama_family(
        "nemotron",
        "Nemotron",
        w.LLAMA,
        norms(LAYER_NORM | {"unit_offset": True}),
        activation("hidden_act", "relu2"),
        r.rotary(partial=0.5, fraction_key="rope_percent"),
        eps("norm_eps"),
        r.constant(f"{FFN}.gated", False),
        drop="rms_norm_eps",
    ),
    llama_family("glm", "Glm", w.GLM, base=GLM),
    llama_family("glm4", "Glm4", w.GLM4, r.constant(f"{BLOCK}.norm_place", "sandwich"), base=GLM),
    llama_family("gemma", "Gemma", w.LLAMA, base=GEMMA, tied_by_default=True),
    llama_family("gemma2", "Gemma2", w.GEMMA2, base=GEMMA2, template="gemma2-2b", tied_by_default=True),
    llama_family(
        "gemma3_text",
        "Gemma3Text",
        w.GEMMA2,
        base=GEMMA3,
        template="gemma2-2b",
        lm_class="Gemma3ForCausalLM",
        tied_by_default=True,
    ),
    llama_family("mixtral", "Mixtral", w.MIXTRAL, base=MIXTRAL, template="mixtral-8x7b"),
    llama_family(
        "gpt_oss",
        "GptOss",
        w.GPT_OSS,
        r.field("head_dim", f"{ATTN}.head_dim", 64),
        eps("rms_norm_eps"),
        r.flag("attention_bias", f"{ATTN}.bias", True, "qkvo", ""),
        r.layer_types("decoder", r.every_nth(2, FULL, SLIDING), default=128),
        r.rotary(base=150_000.0),
        r.fixed_field("hidden_act", "silu"),
        r.fixed_field("swiglu_limit", 7.0),
        r.constant(FFN, to_dict(GPT_OSS_FEEDFORWARD)),
        r.field("intermediate_size", f"{FFN}.hidden"),
        r.field("num_local_experts", f"{FFN}.experts.count", 128),
        r.field("num_experts_per_tok", f"{FFN}.experts.top_k", 4),
        r.constant(f"{ATTN}.sinks", True),
        drop="mlp_bias",
        field_aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    ),
    llama_family(
        "qwen3_moe",
        "Qwen3Moe",
        w.QWEN3_MOE,
        r.optional_window(),
        r.expert_layers(),
        drop="mlp_bias intermediate_size",
        template="qwen3-0.6b",
        field_aliases={"num_experts": "num_local_experts"},
    ),
)

# -- GPT-2 and its descendants ----------------------------------------------------------------------------------------

GPT2 = (
    *size_fields("n_embd", "n_layer", "n_head", "n_positions"),
    r.feedforward_size("n_inner"),
    activation("activation_function", "gelu_new"),
    eps("layer_norm_epsilon"),
)
GPTJ = (
    *GPT2,
    r.field("rotary_dim", f"{ATTN}.positions.dim", 64),
    r.fixed_field("rotary", True),
    r.fixed_field("scale_attn_weights", True),
)
BLOOM = (
    *derive(size_fields("hidden_size", "n_layer", "n_head"), drop="max_position_embeddings"),
    r.feedforward_ratio(),
    r.fixed_field("n_inner", None),
    eps("layer_norm_epsilon"),
    r.constant("input.context", None),
)
BIGCODE = derive(
    GPT2,
    activation("activation_function", "gelu_pytorch_tanh"),
    r.fixed_field("scale_attn_weights", True),
    FieldRule(
        {"multi_query": True, "num_key_value_heads": None},
        lambda fields, tree: set_value(tree, f"{ATTN}.kv_heads", 1 if fields["multi_query"] else None),
        lambda tree: {"multi_query": get_value(tree, f"{ATTN}.kv_heads") == 1},
    ),
)
FALCON = (
    *derive(size_fields(), r.field("max_position_embeddings", "input.context", 2048)),
    r.feedforward_size("ffn_hidden_size"),
    activation("activation", "gelu"),
    eps("layer_norm_epsilon"),
    *r.biases("bias", False),
    r.falcon_layers(),
    r.falcon_rotary(),
)
NEOX_OBSOLETE_WEIGHTS = tuple(
    f"gpt_neox.layers.*.attention.{name}" for name in ("rotary_emb.inv_freq", "bias", "masked_bias")
)

GPT2_FAMILIES = (
    decoder_family(
        "gpt2",
        "GPT2",
        (*GPT2, r.gpt2_attention_scale()),
        w.GPT2,
        lm_class="GPT2LMHeadModel",
    ),
    decoder_family(
        "gpt_bigcode",
        "GPTBigCode",
        BIGCODE,
        w.BIGCODE_MULTI_HEAD,
        weight_variants=((lambda config: next(config.decoder.layers()).attention.num_kv_heads == 1, w.BIGCODE),),
    ),
    decoder_family(
        "gpt_neo",
        "GPTNeo",
        (
            *size_fields(depth="num_layers", heads="num_heads"),
            r.feedforward_size("intermediate_size"),
            activation("activation_function", "gelu_new"),
            eps("layer_norm_epsilon"),
            r.gpt_neo_layers(),
            r.constant(f"{ATTN}.scale", 1.0),
            r.constant(f"{ATTN}.bias", "o"),
        ),
        w.GPT_NEO,
    ),
    decoder_family(
        "gptj",
        "GPTJ",
        GPTJ,
        w.GPTJ,
        template=preset("gptj-6b"),
        head=LM_HEAD_BIAS,
        tied_by_default=False,
    ),
    decoder_family(
        "codegen",
        "CodeGen",
        GPTJ,
        w.CODEGEN,
        template=preset("gptj-6b"),
        head=LM_HEAD_BIAS,
        tied_by_default=False,
        has_classifier=False,
    ),
    decoder_family(
        "gpt_neox",
        "GPTNeoX",
        (
            *size_fields(),
            r.field("intermediate_size", f"{FFN}.hidden"),
            activation("hidden_act", "gelu"),
            eps("layer_norm_eps"),
            r.flag("attention_bias", f"{ATTN}.bias", True, "qkvo", ""),
            r.flag("use_parallel_residual", f"{BLOCK}.residual", True, "parallel", "sequential"),
            r.fixed_field("is_decoder", False, True),
            r.rotary(partial=0.25, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
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
        field_aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    ),
    decoder_family(
        "mpt",
        "Mpt",
        (
            *derive(
                size_fields("d_model", "n_layers", "n_heads", "max_seq_len"),
                r.field("max_seq_len", "input.context", 2048),
            ),
            r.feedforward_ratio("expansion_ratio"),
            eps("layer_norm_epsilon"),
            r.fixed_field("no_bias", True),
            r.fixed_field("learned_pos_emb", True, False),  # has no effect with ALiBi
            r.fixed_field("norm_type", "low_precision_layernorm"),
            r.fixed_field("logit_scale", None),
            r.fixed_field("verbose", 0, False, None),
            r.mpt_attention(),
        ),
        w.MPT,
        template=preset("mpt-7b"),
        class_aliases={"MPTForCausalLM": "MptForCausalLM"},  # the class of the code in the published folders
    ),
    decoder_family(
        "falcon",
        "Falcon",
        FALCON,
        w.BLOOM,
        template=preset("falcon-7b"),
        weight_variants=((lambda config: next(config.decoder.layers()).residual == "parallel", w.FALCON_40B),),
        field_aliases={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"},
    ),
)

# -- decoders of fairseq ----------------------------------------------------------------------------------------------

SCALE_EMBEDDING = r.flag("scale_embedding", "input.scale", True, "sqrt_width", 1.0)
FAIRSEQ_FAMILIES = (
    decoder_family(
        "opt",
        "OPT",
        (
            *size_fields(),
            r.field("ffn_dim", f"{FFN}.hidden"),
            activation("activation_function", "relu"),
            r.flag("do_layer_norm_before", f"{BLOCK}.norm_place", True, "pre", "post"),
            r.flag("layer_norm_elementwise_affine", "**.affine", True, "scale_shift", "none"),
            r.opt_final_norm(),
            r.opt_embedding_size(),
            *r.biases("enable_bias", True),
            r.constant("input.positions", to_dict(Learned(offset=2))),
            r.constant("input.projection", "first"),
            r.constant("input.projection_bias", False),
        ),
        w.OPT,
        prefix="model.",
    ),
    decoder_family(
        "xglm",
        "XGLM",
        (
            *size_fields("d_model", "num_layers", "attention_heads"),
            r.field("ffn_dim", f"{FFN}.hidden"),
            activation("activation_function", "gelu"),
            SCALE_EMBEDDING,
            r.constant("input.positions", to_dict(Sinusoid(form="fairseq", offset=2))),
        ),
        w.XGLM,
        prefix="model.",
        ignored_weights=("model.embed_positions.weights",),
        has_classifier=False,
    ),
    decoder_family(
        "biogpt",
        "BioGpt",
        (
            *size_fields(),
            r.field("intermediate_size", f"{FFN}.hidden"),
            activation("hidden_act", "gelu"),
            SCALE_EMBEDDING,
            r.unused_field("layer_norm_eps", 1e-12),
            r.constant("input.positions", to_dict(Learned(offset=2))),
        ),
        w.BIOGPT,
        prefix="biogpt.",
    ),
)

DECODERS = (*GPT2_FAMILIES[:1], *LLAMA_FAMILIES, *GPT2_FAMILIES[1:], *FAIRSEQ_FAMILIES)
