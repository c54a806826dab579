"""DATA: published decoders: the structure each starts from, the fields of its configuration, its classes, its weights.

A family that is another with a few words changed is that family's rows with those rows after them: a later row for a
field takes the place of an earlier one.  Defaults are those of the published classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from monoblock.config import ExpertsConfig, FeedForwardConfig, Learned, NormConfig, Sinusoid
from monoblock.families import gpt, llama
from monoblock.interop import hf_weights as w
from monoblock.interop.hf_config import Const, Field, Fixed, Row, Several, Tree, get, put
from monoblock.interop.hf_family import LM, LM_BIAS, Family, over, without
from monoblock.interop.hf_layers import (
    all_biases,
    attention_scale,
    falcon,
    mpt_attention,
    neo_layers,
    opt_norms,
    projected,
    qk_norm,
    sparse,
    unless_alibi,
    without_rope,
)
from monoblock.interop.hf_rotary import rotary
from monoblock.interop.hf_words import (
    FULL,
    SLIDING,
    activation,
    after_window_layers,
    always_four_times,
    every,
    flag,
    hidden,
    inverse,
    inverse_root,
    layer_types,
    switched_window,
    unheeded,
)
from monoblock.presets import GEMMA_RMS, PYTHIA, decoder, preset
from monoblock.schema import to_dict

B, A, F = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"
LLAMA_LIKE = llama(vocab=8, width=8, depth=1, heads=1, context=8)
GPT_LIKE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)
LAYER, SHIFTLESS = to_dict(NormConfig()), to_dict(NormConfig(affine="scale"))


def norms(norm: Tree) -> Const:
    return Const(f"{B}.norm decoder.norm", norm)


def family(
    kind: str,
    name: str,
    rows: Sequence[Row],
    weights: Sequence[w.Rule],
    *,
    start: Any = LLAMA_LIKE,
    prefix: str = "model.",
    head: Tree = LM,
    speaks: str = "ForCausalLM",
    **more: Any,
) -> Family:
    """A decoder with its language model class and its bare one."""
    classes = {f"{name}{speaks}": head, f"{name}Model": None}
    return Family(
        kind=kind,
        start=start,
        rows=rows,
        weights=weights,
        classes=classes,
        prefix=prefix,
        bare=(f"{name}Model",),
        **more,
    )


def sizes(
    width: str = "hidden_size",
    depth: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    context: str = "max_position_embeddings",
) -> tuple[Row, ...]:
    return (
        Field("vocab_size", "input.vocab"),
        Field(depth, "decoder.depth"),
        Field(width, f"{B}.width"),
        Field(heads, f"{A}.heads"),
        Field(context, "input.context"),
    )


# -- LLaMA and those that learned from it -----------------------------------------------------------------------------

LLAMA = (
    *sizes(),
    Field("num_key_value_heads", f"{A}.kv_heads", None),
    Field("head_dim", f"{A}.head_dim", None),
    Field("intermediate_size", f"{F}.hidden"),
    activation("hidden_act", f"{F}.activation", "silu"),
    Field("rms_norm_eps", "**.eps", 1e-6),
    flag("attention_bias", f"{A}.bias", False, "qkvo", ""),
    Field("mlp_bias", f"{F}.bias", False),
    rotary(),
)
FREE = without(LLAMA, "head_dim", "attention_bias", "mlp_bias")  # of switches that many do not have
PLAIN = without(LLAMA, "head_dim", "mlp_bias")
LAYERED = without(FREE, "rms_norm_eps")
WINDOW = Field("sliding_window", f"{A}.window", None)
EPS = Field("layer_norm_eps", "**.eps", 1e-5)
QWEN_TYPES = layer_types("decoder", after_window_layers, default=4096, switch=True, max_window_layers=28)
MISTRAL = over(without(LLAMA, "attention_bias", "mlp_bias"), replace(WINDOW, default=4096))
GEMMA = (
    *over(without(LLAMA, "mlp_bias"), activation("hidden_act", f"{F}.activation", "gelu_pytorch_tanh")),
    Field("head_dim", f"{A}.head_dim", 256),
    Fixed("hidden_activation", None, ("gelu_pytorch_tanh",)),
    Const("input.scale", "sqrt_width"),
)
GEMMA2 = over(
    without(GEMMA, "hidden_act", "hidden_activation"),
    activation("hidden_activation", f"{F}.activation", "gelu_pytorch_tanh"),
    inverse_root("query_pre_attn_scalar", f"{A}.scale", 256),
    Field("attn_logit_softcapping", f"{A}.softcap", 50.0),
    Field("final_logit_softcapping", "head.softcap", 30.0),
    layer_types("decoder", every(2, FULL, SLIDING), default=4096),
    Fixed("hidden_act", "gelu_pytorch_tanh", ("gelu",)),  # older files have it beside the one that is heeded
)
GEMMA3 = over(
    GEMMA2,
    Field("attn_logit_softcapping", f"{A}.softcap", None),
    Field("final_logit_softcapping", "head.softcap", None),
    layer_types(
        "decoder",
        lambda given, depth: every(given["sliding_window_pattern"], FULL, SLIDING)(given, depth),
        default=4096,
        sliding_window_pattern=6,
        _sliding_window_pattern=6,
    ),
    rotary(typed=(1_000_000.0, 10_000.0), near="rope_local_base_freq"),
)
GPT_OSS = FeedForwardConfig(
    hidden=8,
    activation="quick_gelu",
    gated=True,
    clamp=7.0,
    experts=ExpertsConfig(count=8, top_k=4, router="top_k_softmax", router_bias=True),
)
EXPERTS = (
    Field("num_local_experts", f"{F}.experts.count", 8),
    Field("num_experts_per_tok", f"{F}.experts.top_k", 2),
)

FROM_LLAMA = (
    family("llama", "Llama", LLAMA, w.LLAMA, tied=False),
    family("mistral", "Mistral", MISTRAL, w.LLAMA, tied=False),
    family("qwen2", "Qwen2", over((*FREE, Const(f"{A}.bias", "qkv")), QWEN_TYPES), w.LLAMA, tied=False),
    family(
        "qwen3",
        "Qwen3",
        over(without(LLAMA, "mlp_bias"), Field("head_dim", f"{A}.head_dim", 128), QWEN_TYPES),
        w.LLAMA,
        start=preset("qwen3-0.6b"),
        tied=False,
    ),
    family(
        "phi3",
        "Phi3",
        (
            *over(FREE, Field("rms_norm_eps", "**.eps", 1e-5), WINDOW, rotary(partial=1.0, original=4096)),
            Fixed("attention_bias", False),
        ),
        w.PHI3,
        tied=False,
    ),
    family(
        "granite",
        "Granite",
        (
            *without(LLAMA, "head_dim"),
            Field("embedding_multiplier", "input.scale", 1.0),
            Field("residual_multiplier", f"{B}.residual_scale", 1.0),
            Field("attention_multiplier", f"{A}.scale", 1.0),
            inverse("logits_scaling", "head.scale", 1.0),
        ),
        w.LLAMA,
        tied=False,
    ),
    family(
        "smollm3",
        "SmolLM3",
        over(
            without(LLAMA, "head_dim"),
            layer_types("decoder", lambda given, depth: [FULL] * depth, switch=True, max_window_layers=28),
            rotary(base=2_000_000.0),
            without_rope(),
        ),
        w.LLAMA,
    ),
    family(
        "olmo2",
        "Olmo2",
        over(PLAIN, Field("rms_norm_eps", "**.eps", 1e-5)),
        w.OLMO2,
        start=preset("olmo2-7b"),
        tied=False,
    ),
    family(
        "olmo3",
        "Olmo3",
        over(
            PLAIN,
            Field("rms_norm_eps", "**.eps", 1e-5),
            layer_types("decoder", every(4, FULL, SLIDING), default=4096),
            rotary(typed=(500_000.0, 500_000.0)),
        ),
        w.OLMO2,
        start=preset("olmo2-7b"),
        tied=False,
    ),
    family(
        "olmo",
        "Olmo",
        (
            norms(to_dict(NormConfig(affine="none"))),
            *without(PLAIN, "rms_norm_eps"),
            Field("clip_qkv", f"{A}.clip", None),
        ),
        w.LLAMA,
        tied=False,
    ),
    family(
        "stablelm",
        "StableLm",
        (
            norms(LAYER),
            *without(LAYERED, "rope_parameters"),
            EPS,
            flag("use_qkv_bias", f"{A}.bias", False, "qkv", ""),
            flag("use_parallel_residual", f"{B}.residual", False, "parallel_shared", "sequential"),
            qk_norm("qk_layernorm", "each_head", NormConfig(affine="scale")),
            rotary(partial=0.25, fraction="rope_pct"),
        ),
        w.STABLELM,
        tied=False,
    ),
    family(
        "starcoder2",
        "Starcoder2",
        (
            norms(LAYER),
            *over(LAYERED, activation("hidden_act", f"{F}.activation", "gelu_pytorch_tanh")),
            Field("norm_epsilon", "**.eps", 1e-5),
            all_biases("use_bias"),
            WINDOW,
            Fixed("norm_type", "layer_norm"),
            Fixed("mlp_type", "default"),
            Const(f"{F}.gated", False),
        ),
        w.STARCODER2,
    ),
    family(
        "cohere",
        "Cohere",
        (
            norms(SHIFTLESS),
            *over(without(PLAIN, "rms_norm_eps"), rotary(base=500_000.0)),
            EPS,
            Field("logit_scale", "head.scale", 0.0625),
            qk_norm("use_qk_norm", "each_head", NormConfig(affine="scale")),
            Const(f"{B}.residual", "parallel_shared"),
            Const(f"{A}.positions.layout", "interleaved"),
        ),
        w.LLAMA,
    ),
    family(
        "phi",
        "Phi",
        (
            *over(LAYERED, activation("hidden_act", f"{F}.activation", "gelu_new"), rotary(partial=0.5)),
            EPS,
            qk_norm("qk_layernorm", "head", NormConfig()),
        ),
        w.PHI,
        start=preset("phi-2"),
        head=LM_BIAS,
        tied=False,
    ),
    family(
        "persimmon",
        "Persimmon",
        (
            *over(
                without(LAYERED, "num_key_value_heads"),
                activation("hidden_act", f"{F}.activation", "relu2"),
                rotary(partial=0.5),
            ),
            EPS,
            replace(qk_norm("qk_layernorm", "head", NormConfig()), names={"qk_layernorm": True}),
        ),
        w.PERSIMMON,
        start=preset("persimmon-8b"),
        tied=False,
    ),
    family(
        "nemotron",
        "Nemotron",
        (
            norms(LAYER | {"unit_offset": True}),
            *over(
                without(LLAMA, "rms_norm_eps"),
                activation("hidden_act", f"{F}.activation", "relu2"),
                rotary(partial=0.5, fraction="rope_percent"),
            ),
            Field("norm_eps", "**.eps", 1e-5),
            Const(f"{F}.gated", False),
        ),
        w.LLAMA,
        tied=False,
    ),
    family(
        "glm4",
        "Glm4",
        (
            *over(
                without(LLAMA, "mlp_bias", "attention_bias", "rope_parameters"),
                Field("rms_norm_eps", "**.eps", 1.5625e-07),
            ),
            Field("head_dim", f"{A}.head_dim", 128),
            flag("attention_bias", f"{A}.bias", True, "qkv", ""),
            rotary(partial=0.5),
            Const(f"{B}.norm_place", "sandwich"),
            Const(f"{A}.positions.layout", "interleaved"),
        ),
        w.GLM4,
        tied=False,
    ),
    family("gemma", "Gemma", (norms(to_dict(GEMMA_RMS)), *GEMMA), w.LLAMA),
    family("gemma2", "Gemma2", GEMMA2, w.GEMMA2, start=preset("gemma2-2b")),
    family(
        "gemma3_text",
        "Gemma3",
        (Const(f"{A}.qk_norm", to_dict(GEMMA_RMS)), *GEMMA3),
        w.GEMMA2,
        start=preset("gemma2-2b"),
    ),
    family(
        "mixtral",
        "Mixtral",
        (
            *over(MISTRAL, Field("rms_norm_eps", "**.eps", 1e-5), WINDOW, rotary(base=1_000_000.0)),
            *EXPERTS,
        ),
        w.MIXTRAL,
        start=preset("mixtral-8x7b"),
        tied=False,
    ),
    family(
        "gpt_oss",
        "GptOss",
        (
            *over(
                without(LLAMA, "mlp_bias"),
                Field("head_dim", f"{A}.head_dim", 64),
                Field("rms_norm_eps", "**.eps", 1e-5),
                flag("attention_bias", f"{A}.bias", True, "qkvo", ""),
                layer_types("decoder", every(2, FULL, SLIDING), default=128),
                rotary(base=150_000.0),
            ),
            Fixed("hidden_act", "silu"),
            Fixed("swiglu_limit", 7.0),
            Const(f"{F}", to_dict(GPT_OSS)),
            Field("intermediate_size", f"{F}.hidden"),
            Field("num_local_experts", f"{F}.experts.count", 128),
            Field("num_experts_per_tok", f"{F}.experts.top_k", 4),
            Const(f"{A}.sinks", True),
        ),
        w.GPT_OSS,
        tied=False,
        synonyms={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    ),
    family(
        "qwen3_moe",
        "Qwen3Moe",
        (
            *without(LLAMA, "mlp_bias", "intermediate_size"),
            switched_window(f"{A}.window", 4096),
            sparse("num_local_experts"),
        ),
        w.QWEN3_MOE,
        start=preset("qwen3-0.6b"),
        tied=False,
        synonyms={"num_experts": "num_local_experts"},
    ),
)

# -- GPT-2 and those that learned from it -----------------------------------------------------------------------------

GPT_EPS = Field("layer_norm_epsilon", "**.eps", 1e-5)
GPT2 = (
    *sizes("n_embd", "n_layer", "n_head", "n_positions"),
    hidden("n_inner", f"{F}.hidden", f"{B}.width"),
    activation("activation_function", f"{F}.activation", "gelu_new"),
    GPT_EPS,
)
GPTJ = (
    *GPT2,
    Field("rotary_dim", f"{A}.positions.dim", 64),
    Fixed("rotary", True),
    Fixed("scale_attn_weights", True),
)
BLOOM = (
    *without(sizes("hidden_size", "n_layer", "n_head"), "max_position_embeddings"),
    always_four_times(f"{F}.hidden", f"{B}.width"),
    Fixed("n_inner", None),
    GPT_EPS,
    Const("input.context", None),
)
BIGCODE = (
    *over(GPT2, activation("activation_function", f"{F}.activation", "gelu_pytorch_tanh")),
    Fixed("scale_attn_weights", True),
    Several(
        {"multi_query": True, "num_key_value_heads": None},
        lambda given, tree: put(tree, f"{A}.kv_heads", 1 if given["multi_query"] else None),
        lambda tree: {"multi_query": get(tree, f"{A}.kv_heads") == 1},
    ),
)
FALCON = (
    *over(sizes(), Field("max_position_embeddings", "input.context", 2048)),
    hidden("ffn_hidden_size", f"{F}.hidden", f"{B}.width"),
    activation("activation", f"{F}.activation", "gelu"),
    GPT_EPS,
    replace(all_biases("bias"), names={"bias": False}),
    falcon(),
    unless_alibi(),
)
GPT_OLD = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias", "transformer.h.*.attn.attention.bias",
           "transformer.h.*.attn.attention.masked_bias", "transformer.h.*.attn.causal_mask")  # fmt: skip
TURNED_OLD = ("gpt_neox.layers.*.attention.rotary_emb.inv_freq", "gpt_neox.layers.*.attention.bias",
              "gpt_neox.layers.*.attention.masked_bias")  # fmt: skip

FROM_GPT2 = (
    family(
        "gpt2",
        "GPT2",
        (*GPT2, attention_scale()),
        w.GPT2,
        start=GPT_LIKE,
        prefix="transformer.",
        speaks="LMHeadModel",
        ignored=GPT_OLD,
    ),
    family(
        "gpt_bigcode",
        "GPTBigCode",
        BIGCODE,
        w.BIGCODE_HEADS,
        start=GPT_LIKE,
        prefix="transformer.",
        ignored=GPT_OLD,
        others=((lambda config: next(config.decoder.layers()).attention.groups == 1, w.BIGCODE),),
    ),
    family(
        "gpt_neo",
        "GPTNeo",
        (
            *sizes(depth="num_layers", heads="num_heads"),
            hidden("intermediate_size", f"{F}.hidden", f"{B}.width"),
            activation("activation_function", f"{F}.activation", "gelu_new"),
            GPT_EPS,
            neo_layers(),
            Const(f"{A}.scale", 1.0),
            Const(f"{A}.bias", "o"),
        ),
        w.GPT_NEO,
        start=GPT_LIKE,
        prefix="transformer.",
        ignored=GPT_OLD,
    ),
    family(
        "gptj",
        "GPTJ",
        GPTJ,
        w.GPTJ,
        start=preset("gptj-6b"),
        prefix="transformer.",
        head=LM_BIAS,
        ignored=GPT_OLD,
        tied=False,
    ),
    family(
        "codegen",
        "CodeGen",
        GPTJ,
        w.CODEGEN,
        start=preset("gptj-6b"),
        prefix="transformer.",
        head=LM_BIAS,
        ignored=GPT_OLD,
        tied=False,
    ),
    family(
        "gpt_neox",
        "GPTNeoX",
        (
            *sizes(),
            Field("intermediate_size", f"{F}.hidden"),
            activation("hidden_act", f"{F}.activation", "gelu"),
            EPS,
            flag("attention_bias", f"{A}.bias", True, "qkvo", ""),
            flag("use_parallel_residual", f"{B}.residual", True, "parallel", "sequential"),
            Fixed("is_decoder", False, (True,)),
            rotary(partial=0.25, theta="rotary_emb_base", fraction="rotary_pct"),
        ),
        w.NEOX,
        start=decoder(PYTHIA, vocab=8, context=8, depth=1, norm=NormConfig()),
        prefix="gpt_neox.",
        ignored=TURNED_OLD,
        tied=False,
    ),
    family(
        "bloom",
        "Bloom",
        BLOOM,
        w.BLOOM,
        start=preset("bloom-560m"),
        prefix="transformer.",
        synonyms={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    ),
    family(
        "mpt",
        "Mpt",
        (
            *over(sizes("d_model", "n_layers", "n_heads", "max_seq_len"), Field("max_seq_len", "input.context", 2048)),
            always_four_times(f"{F}.hidden", f"{B}.width", expansion_ratio=4),
            GPT_EPS,
            Fixed("no_bias", True),
            Fixed("learned_pos_emb", True, (False,)),  # not heeded beside ALiBi
            Fixed("norm_type", "low_precision_layernorm"),
            Fixed("logit_scale", None),
            Fixed("verbose", 0, (False, None)),
            mpt_attention(),
        ),
        w.MPT,
        start=preset("mpt-7b"),
        prefix="transformer.",
    ),
    family(
        "falcon",
        "Falcon",
        FALCON,
        w.BLOOM,
        start=preset("falcon-7b"),
        prefix="transformer.",
        others=((lambda config: next(config.decoder.layers()).residual == "parallel", w.FALCON_40B),),
        synonyms={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"},
    ),
)

# -- decoders that learned from fairseq -------------------------------------------------------------------------------

SCALED = flag("scale_embedding", "input.scale", True, "sqrt_width", 1.0)
FROM_FAIRSEQ = (
    family(
        "opt",
        "OPT",
        (
            *sizes(),
            Field("ffn_dim", f"{F}.hidden"),
            activation("activation_function", f"{F}.activation", "relu"),
            opt_norms(),
            projected(),
            all_biases("enable_bias"),
            Const("input.positions", to_dict(Learned(offset=2))),
            Const("input.projection", "first"),
            Const("input.projection_bias", False),
        ),
        w.OPT,
        start=GPT_LIKE,
    ),
    family(
        "xglm",
        "XGLM",
        (
            *sizes("d_model", "num_layers", "attention_heads"),
            Field("ffn_dim", f"{F}.hidden"),
            activation("activation_function", f"{F}.activation", "gelu"),
            SCALED,
            Const("input.positions", to_dict(Sinusoid(form="fairseq", offset=2))),
        ),
        w.XGLM,
        start=GPT_LIKE,
        ignored=("model.embed_positions.weights",),
    ),
    family(
        "biogpt",
        "BioGpt",
        (
            *sizes(),
            Field("intermediate_size", f"{F}.hidden"),
            activation("hidden_act", f"{F}.activation", "gelu"),
            SCALED,
            unheeded("layer_norm_eps", 1e-12),
            Const("input.positions", to_dict(Learned(offset=2))),
        ),
        w.BIOGPT,
        start=GPT_LIKE,
        prefix="biogpt.",
    ),
)

DECODERS = (*FROM_GPT2[:1], *FROM_LLAMA, *FROM_GPT2[1:], *FROM_FAIRSEQ)
