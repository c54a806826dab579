"""DATA: tables of rules between our weight names and those of the Hugging Face families (see rename.py).

A name without `.weight` or `.bias` matches both.  The first matching rule applies, so a table that differs from another
in a few names has its own rules first, followed by the other table.
"""

from __future__ import annotations

from monoblock.interop.rename import (
    CODEGEN_QKV,
    CONV1D,
    CONV1D_QKV,
    GATE_UP_INTERLEAVED,
    GATE_UP_ROWS,
    QKV_BY_KV_HEAD,
    QKV_ROWS,
    SQUEEZE_1,
    SQUEEZE_2,
    STACK,
    TRANSPOSE_EXPERTS,
    Rule,
    qkv_names,
)
from monoblock.interop.weights import TensorTransform

Rules = tuple[Rule, ...]
PROJECTIONS = ("query", "key", "value", "output")
OUT_PROJ_NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


def attention_rules(ours: str, theirs: str, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")) -> Rules:
    """Return rules for the four attention projections of a family that stores them separately."""
    pairs = zip(PROJECTIONS, names, strict=True)
    return tuple(Rule(f"{ours}.{projection}", f"{theirs}.{name}") for projection, name in pairs)


def gate_up_names(ours: str) -> str:
    return f"{ours}.gate {ours}.up"


# -- GPT-2 and its descendants ----------------------------------------------------------------------------------------


def gpt2_rules(qkv: TensorTransform, linear: TensorTransform | None) -> Rules:
    """Return the rules of GPT-2, which stores transposed matrices, or with `linear=None` of BigCode, which does not."""
    return (
        Rule("input.token", "transformer.wte"),
        Rule("input.position", "transformer.wpe"),
        Rule("decoder.*.attention_norm", "transformer.h.*.ln_1"),
        Rule(qkv_names("decoder.*.attention"), "transformer.h.*.attn.c_attn", qkv),
        Rule("decoder.*.attention.output", "transformer.h.*.attn.c_proj", linear),
        Rule("decoder.*.feedforward_norm", "transformer.h.*.ln_2"),
        Rule("decoder.*.feedforward.up", "transformer.h.*.mlp.c_fc", linear),
        Rule("decoder.*.feedforward.down", "transformer.h.*.mlp.c_proj", linear),
        Rule("decoder.norm", "transformer.ln_f"),
        Rule("head.output.weight", "lm_head.weight"),
    )


GPT2, BIGCODE, BIGCODE_MULTI_HEAD = (
    gpt2_rules(CONV1D_QKV, CONV1D),
    gpt2_rules(QKV_ROWS, None),
    gpt2_rules(QKV_BY_KV_HEAD, None),
)
GPT_NEO: Rules = (*attention_rules("decoder.*.attention", "transformer.h.*.attn.attention", OUT_PROJ_NAMES), *BIGCODE)
GPTJ: Rules = (
    *attention_rules("decoder.*.attention", "transformer.h.*.attn", OUT_PROJ_NAMES),
    Rule("decoder.*.feedforward.up", "transformer.h.*.mlp.fc_in"),
    Rule("decoder.*.feedforward.down", "transformer.h.*.mlp.fc_out"),
    Rule("head.bias", "lm_head.bias"),
    *BIGCODE,
)
CODEGEN: Rules = (
    Rule("decoder.*.attention.output", "transformer.h.*.attn.out_proj"),
    Rule(qkv_names("decoder.*.attention"), "transformer.h.*.attn.qkv_proj", CODEGEN_QKV),
    *GPTJ,
)
NEOX: Rules = (
    Rule("input.token", "gpt_neox.embed_in"),
    Rule("decoder.*.attention_norm", "gpt_neox.layers.*.input_layernorm"),
    Rule(qkv_names("decoder.*.attention"), "gpt_neox.layers.*.attention.query_key_value", QKV_BY_KV_HEAD),
    Rule("decoder.*.attention.output", "gpt_neox.layers.*.attention.dense"),
    Rule("decoder.*.feedforward_norm", "gpt_neox.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward.up", "gpt_neox.layers.*.mlp.dense_h_to_4h"),
    Rule("decoder.*.feedforward.down", "gpt_neox.layers.*.mlp.dense_4h_to_h"),
    Rule("decoder.norm", "gpt_neox.final_layer_norm"),
    Rule("head.output", "embed_out"),
)
BLOOM: Rules = (
    Rule("input.token", "transformer.word_embeddings"),
    Rule("input.norm", "transformer.word_embeddings_layernorm"),
    Rule("decoder.*.attention_norm", "transformer.h.*.input_layernorm"),
    Rule(qkv_names("decoder.*.attention"), "transformer.h.*.self_attention.query_key_value", QKV_BY_KV_HEAD),
    Rule("decoder.*.attention.output", "transformer.h.*.self_attention.dense"),
    Rule("decoder.*.feedforward_norm", "transformer.h.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward.up", "transformer.h.*.mlp.dense_h_to_4h"),
    Rule("decoder.*.feedforward.down", "transformer.h.*.mlp.dense_4h_to_h"),
    Rule("decoder.norm", "transformer.ln_f"),
    Rule("head.output", "lm_head"),
)
FALCON_40B: Rules = (
    Rule("decoder.*.attention_norm", "transformer.h.*.ln_attn"),
    Rule("decoder.*.feedforward_norm", "transformer.h.*.ln_mlp"),
    *BLOOM,
)
MPT: Rules = (
    Rule("input.token", "transformer.wte"),
    Rule("decoder.*.attention_norm", "transformer.blocks.*.norm_1"),
    Rule(qkv_names("decoder.*.attention"), "transformer.blocks.*.attn.Wqkv", QKV_ROWS),
    Rule("decoder.*.attention.output", "transformer.blocks.*.attn.out_proj"),
    Rule("decoder.*.feedforward_norm", "transformer.blocks.*.norm_2"),
    Rule("decoder.*.feedforward.up", "transformer.blocks.*.ffn.up_proj"),
    Rule("decoder.*.feedforward.down", "transformer.blocks.*.ffn.down_proj"),
    Rule("decoder.norm", "transformer.norm_f"),
    Rule("head.output", "lm_head"),
)

# -- LLaMA and its descendants ----------------------------------------------------------------------------------------

LLAMA: Rules = (
    Rule("input.token", "model.embed_tokens"),
    Rule("decoder.*.attention_norm", "model.layers.*.input_layernorm"),
    *attention_rules("decoder.*.attention", "model.layers.*.self_attn"),
    Rule("decoder.*.attention.query_norm", "model.layers.*.self_attn.q_norm"),
    Rule("decoder.*.attention.key_norm", "model.layers.*.self_attn.k_norm"),
    Rule("decoder.*.feedforward_norm", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward.gate", "model.layers.*.mlp.gate_proj"),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.up_proj"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.down_proj"),
    Rule("decoder.norm", "model.norm"),
    Rule("head.output", "lm_head"),
)
PHI3: Rules = (
    Rule(qkv_names("decoder.*.attention"), "model.layers.*.self_attn.qkv_proj", QKV_ROWS),
    Rule(gate_up_names("decoder.*.feedforward"), "model.layers.*.mlp.gate_up_proj", GATE_UP_ROWS),
    *LLAMA,
)
# In Gemma 2 post_attention_layernorm is the norm after attention; in LLaMA it is the one before the feed-forward.
GEMMA2: Rules = (
    Rule("decoder.*.attention_output_norm", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward_norm", "model.layers.*.pre_feedforward_layernorm"),
    Rule("decoder.*.feedforward_output_norm", "model.layers.*.post_feedforward_layernorm"),
    *LLAMA,
)
GLM: Rules = (
    Rule(gate_up_names("decoder.*.feedforward"), "model.layers.*.mlp.gate_up_proj", GATE_UP_ROWS),
    *LLAMA,
)
GLM4: Rules = (
    Rule("decoder.*.attention_output_norm", "model.layers.*.post_self_attn_layernorm"),
    Rule("decoder.*.feedforward_output_norm", "model.layers.*.post_mlp_layernorm"),
    *GLM,
)
OLMO2: Rules = (
    Rule("decoder.*.attention_norm", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward_norm", "model.layers.*.post_feedforward_layernorm"),
    *LLAMA,
)
PHI: Rules = (
    Rule("decoder.*.attention.output", "model.layers.*.self_attn.dense"),
    Rule("decoder.*.attention.query_norm", "model.layers.*.self_attn.q_layernorm"),
    Rule("decoder.*.attention.key_norm", "model.layers.*.self_attn.k_layernorm"),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.fc1"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.fc2"),
    Rule("decoder.norm", "model.final_layernorm"),
    Rule("head.bias", "lm_head.bias"),
    *LLAMA,
)
PERSIMMON: Rules = (
    Rule(qkv_names("decoder.*.attention"), "model.layers.*.self_attn.query_key_value", QKV_BY_KV_HEAD),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.dense_h_to_4h"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.dense_4h_to_h"),
    *PHI,
)
STABLELM: Rules = (
    Rule("decoder.*.attention.query_norm.weight", "model.layers.*.self_attn.q_layernorm.norms.#.weight", STACK),
    Rule("decoder.*.attention.key_norm.weight", "model.layers.*.self_attn.k_layernorm.norms.#.weight", STACK),
    *LLAMA,
)
STARCODER2: Rules = (
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.c_fc"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.c_proj"),
    *LLAMA,
)
MIXTRAL: Rules = (
    Rule("decoder.*.feedforward.router", "model.layers.*.block_sparse_moe.gate"),
    Rule("decoder.*.feedforward.gate", "model.layers.*.block_sparse_moe.experts.#.w1.weight", STACK),
    Rule("decoder.*.feedforward.down", "model.layers.*.block_sparse_moe.experts.#.w2.weight", STACK),
    Rule("decoder.*.feedforward.up", "model.layers.*.block_sparse_moe.experts.#.w3.weight", STACK),
    *LLAMA,
)
QWEN3_MOE: Rules = (
    Rule("decoder.*.feedforward.router", "model.layers.*.mlp.gate"),
    Rule("decoder.*.feedforward.gate", "model.layers.*.mlp.experts.#.gate_proj.weight", STACK),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.experts.#.down_proj.weight", STACK),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.experts.#.up_proj.weight", STACK),
    *LLAMA,
)
GPT_OSS: Rules = (
    Rule("decoder.*.attention.sinks", "model.layers.*.self_attn.sinks"),
    Rule("decoder.*.feedforward.router", "model.layers.*.mlp.router"),
    Rule(gate_up_names("decoder.*.feedforward"), "model.layers.*.mlp.experts.gate_up_proj", GATE_UP_INTERLEAVED),
    Rule(
        "decoder.*.feedforward.gate_bias decoder.*.feedforward.up_bias",
        "model.layers.*.mlp.experts.gate_up_proj_bias",
        GATE_UP_INTERLEAVED,
    ),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.experts.down_proj", TRANSPOSE_EXPERTS),
    Rule("decoder.*.feedforward.down_bias", "model.layers.*.mlp.experts.down_proj_bias"),
    *LLAMA,
)

# -- decoders and encoder-decoders of fairseq -------------------------------------------------------------------------


def fairseq_stack(ours: str, theirs: str, final: str = "layer_norm") -> Rules:
    layer = f"{theirs}.layers.*"
    return (
        *attention_rules(f"{ours}.*.attention", f"{layer}.self_attn", OUT_PROJ_NAMES),
        Rule(f"{ours}.*.attention_norm", f"{layer}.self_attn_layer_norm"),
        *attention_rules(f"{ours}.*.cross", f"{layer}.encoder_attn", OUT_PROJ_NAMES),
        Rule(f"{ours}.*.cross_norm", f"{layer}.encoder_attn_layer_norm"),
        Rule(f"{ours}.*.feedforward.up", f"{layer}.fc1"),
        Rule(f"{ours}.*.feedforward.down", f"{layer}.fc2"),
        Rule(f"{ours}.*.feedforward_norm", f"{layer}.final_layer_norm"),
        Rule(f"{ours}.norm", f"{theirs}.{final}"),
    )


OPT: Rules = (
    Rule("input.token", "model.decoder.embed_tokens"),
    Rule("input.position", "model.decoder.embed_positions"),
    Rule("input.projection", "model.decoder.project_in"),
    Rule("head.projection", "model.decoder.project_out"),
    *fairseq_stack("decoder", "model.decoder", "final_layer_norm"),
    Rule("head.output", "lm_head"),
)
XGLM: Rules = (
    Rule("input.token", "model.embed_tokens"),
    *fairseq_stack("decoder", "model"),
    Rule("head.output", "lm_head"),
)
BIOGPT: Rules = (
    Rule("input.token", "biogpt.embed_tokens"),
    Rule("input.position", "biogpt.embed_positions"),
    *fairseq_stack("decoder", "biogpt"),
    Rule("head.output", "output_projection"),
)
BART: Rules = (
    Rule("input.token", "model.shared"),
    Rule("input.position", "model.encoder.embed_positions"),
    Rule("input.norm", "model.encoder.layernorm_embedding"),
    *fairseq_stack("encoder", "model.encoder"),
    Rule("target.position", "model.decoder.embed_positions"),
    Rule("target.norm", "model.decoder.layernorm_embedding"),
    *fairseq_stack("decoder", "model.decoder"),
    Rule("head.fixed_bias", "final_logits_bias", SQUEEZE_1),
    Rule("head.output", "lm_head"),
)
MARIAN_SEPARATE: Rules = (  # source and target have their own vocabularies
    Rule("input.token", "model.encoder.embed_tokens"),
    Rule("target.token", "model.decoder.embed_tokens"),
    *BART,
)
WHISPER: Rules = (
    Rule("input.first", "model.encoder.conv1"),
    Rule("input.second", "model.encoder.conv2"),
    Rule("target.token", "model.decoder.embed_tokens"),
    Rule("head.output", "proj_out"),
    *BART,
)


# -- T5 ---------------------------------------------------------------------------------------------------------------


def t5_stack(ours: str, last: int) -> Rules:
    block = f"{ours}.block.*.layer"
    return (
        Rule(f"{ours}.position_bias", f"{ours}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        Rule(f"{ours}.*.attention.position_bias", f"{block}.0.SelfAttention.relative_attention_bias"),
        *attention_rules(f"{ours}.*.attention", f"{block}.0.SelfAttention", ("q", "k", "v", "o")),
        Rule(f"{ours}.*.attention_norm", f"{block}.0.layer_norm"),
        *attention_rules(f"{ours}.*.cross", f"{block}.1.EncDecAttention", ("q", "k", "v", "o")),
        Rule(f"{ours}.*.cross_norm", f"{block}.1.layer_norm"),
        Rule(f"{ours}.*.feedforward.down", f"{block}.{last}.DenseReluDense.wo"),
        Rule(f"{ours}.*.feedforward_norm", f"{block}.{last}.layer_norm"),
        Rule(f"{ours}.norm", f"{ours}.final_layer_norm"),
    )


def t5_rules(*names: tuple[str, str]) -> Rules:
    """Return the rules of T5; `names` are (our name, T5's name) of the feed-forward's one or two input matrices."""
    return (
        Rule("input.token", "shared"),
        *(
            Rule(f"encoder.*.feedforward.{ours}", f"encoder.block.*.layer.1.DenseReluDense.{name}")
            for ours, name in names
        ),
        *(
            Rule(f"decoder.*.feedforward.{ours}", f"decoder.block.*.layer.2.DenseReluDense.{name}")
            for ours, name in names
        ),
        *t5_stack("encoder", 1),
        *t5_stack("decoder", 2),
        Rule("head.output", "lm_head"),
    )


T5, T5_GATED = t5_rules(("up", "wi")), t5_rules(("gate", "wi_0"), ("up", "wi_1"))


# -- encoders ---------------------------------------------------------------------------------------------------------


def bert_rules(prefix: str, layer: str = "encoder.layer.*") -> Rules:
    """Return the rules of BERT and its descendants; in classes with a head, names begin with `prefix`."""
    layer = f"{prefix}.{layer}"
    names = ("self.query", "self.key", "self.value", "output.dense")
    return (
        Rule("input.token", f"{prefix}.embeddings.word_embeddings"),
        Rule("input.position", f"{prefix}.embeddings.position_embeddings"),
        Rule("input.segment", f"{prefix}.embeddings.token_type_embeddings"),
        Rule("input.norm", f"{prefix}.embeddings.LayerNorm"),
        *attention_rules("encoder.*.attention", f"{layer}.attention", names),
        Rule("encoder.*.attention_norm", f"{layer}.attention.output.LayerNorm"),
        Rule("encoder.*.feedforward.up", f"{layer}.intermediate.dense"),
        Rule("encoder.*.feedforward.down", f"{layer}.output.dense"),
        Rule("encoder.*.feedforward_norm", f"{layer}.output.LayerNorm"),
    )


SCORE: Rules = (Rule("head.output.weight", "score.weight"),)  # the classifier of a decoder
CLASSIFIER: Rules = (Rule("head.output.weight", "classifier.weight"), Rule("head.bias", "classifier.bias"))
QA_OUTPUTS: Rules = (Rule("head.output.weight", "qa_outputs.weight"), Rule("head.bias", "qa_outputs.bias"))
BERT: Rules = (*bert_rules("bert"), Rule("head.pooler", "bert.pooler.dense"))
BERT_MASKED_LM: Rules = (
    Rule("head.bias", "cls.predictions.bias"),
    Rule("head.output.weight", "cls.predictions.decoder.weight"),
    Rule("head.transform", "cls.predictions.transform.dense"),
    Rule("head.norm", "cls.predictions.transform.LayerNorm"),
)
ROBERTA: Rules = (*bert_rules("roberta"), Rule("head.pooler", "roberta.pooler.dense"))
ROBERTA_PRELAYERNORM: Rules = (
    Rule("encoder.*.attention_norm", "roberta_prelayernorm.encoder.layer.*.attention.LayerNorm"),
    Rule("encoder.*.feedforward_norm", "roberta_prelayernorm.encoder.layer.*.intermediate.LayerNorm"),
    Rule("encoder.norm", "roberta_prelayernorm.LayerNorm"),
    *bert_rules("roberta_prelayernorm"),
    Rule("head.pooler", "roberta_prelayernorm.pooler.dense"),
)
ROBERTA_MASKED_LM: Rules = (
    Rule("head.bias", "lm_head.bias"),
    Rule("head.output.weight", "lm_head.decoder.weight"),
    Rule("head.transform", "lm_head.dense"),
    Rule("head.norm", "lm_head.layer_norm"),
)
DENSE_CLASSIFIER: Rules = (
    Rule("head.pooler", "classifier.dense"),
    Rule("head.output.weight", "classifier.out_proj.weight"),
    Rule("head.bias", "classifier.out_proj.bias"),
)
ELECTRA: Rules = (*bert_rules("electra"), Rule("input.projection", "electra.embeddings_project"))
ELECTRA_MASKED_LM: Rules = (
    Rule("head.bias", "generator_lm_head.bias"),
    Rule("head.output.weight", "generator_lm_head.weight"),
    Rule("head.transform", "generator_predictions.dense"),
    Rule("head.norm", "generator_predictions.LayerNorm"),
)
ELECTRA_DISCRIMINATOR: Rules = (
    Rule("head.transform", "discriminator_predictions.dense"),
    Rule("head.output.weight", "discriminator_predictions.dense_prediction.weight"),
    Rule("head.bias", "discriminator_predictions.dense_prediction.bias"),
)
ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.*"
ALBERT: Rules = (
    *attention_rules("encoder.*.attention", f"{ALBERT_LAYER}.attention", ("query", "key", "value", "dense")),
    Rule("encoder.*.attention_norm", f"{ALBERT_LAYER}.attention.LayerNorm"),
    Rule("encoder.*.feedforward.up", f"{ALBERT_LAYER}.ffn"),
    Rule("encoder.*.feedforward.down", f"{ALBERT_LAYER}.ffn_output"),
    Rule("encoder.*.feedforward_norm", f"{ALBERT_LAYER}.full_layer_layer_norm"),
    Rule("input.projection", "albert.encoder.embedding_hidden_mapping_in"),
    Rule("head.pooler", "albert.pooler"),
    *bert_rules("albert"),
)
ALBERT_MASKED_LM: Rules = (
    Rule("head.bias", "predictions.bias"),
    Rule("head.output.weight", "predictions.decoder.weight"),
    Rule("head.transform", "predictions.dense"),
    Rule("head.norm", "predictions.LayerNorm"),
)
DISTILBERT: Rules = (
    Rule("input.token", "distilbert.embeddings.word_embeddings"),
    Rule("input.position", "distilbert.embeddings.position_embeddings"),
    Rule("input.norm", "distilbert.embeddings.LayerNorm"),
    *attention_rules(
        "encoder.*.attention", "distilbert.transformer.layer.*.attention", ("q_lin", "k_lin", "v_lin", "out_lin")
    ),
    Rule("encoder.*.attention_norm", "distilbert.transformer.layer.*.sa_layer_norm"),
    Rule("encoder.*.feedforward.up", "distilbert.transformer.layer.*.ffn.lin1"),
    Rule("encoder.*.feedforward.down", "distilbert.transformer.layer.*.ffn.lin2"),
    Rule("encoder.*.feedforward_norm", "distilbert.transformer.layer.*.output_layer_norm"),
)
DISTILBERT_MASKED_LM: Rules = (
    Rule("head.transform", "vocab_transform"),
    Rule("head.norm", "vocab_layer_norm"),
    Rule("head.bias", "vocab_projector.bias"),
    Rule("head.output.weight", "vocab_projector.weight"),
)
DISTILBERT_CLASSIFIER: Rules = (Rule("head.pooler", "pre_classifier"), *CLASSIFIER)
MPNET: Rules = (
    Rule("encoder.position_bias", "mpnet.encoder.relative_attention_bias"),
    *attention_rules("encoder.*.attention", "mpnet.encoder.layer.*.attention.attn", ("q", "k", "v", "o")),
    Rule("encoder.*.attention_norm", "mpnet.encoder.layer.*.attention.LayerNorm"),
    *bert_rules("mpnet"),
    Rule("head.pooler", "mpnet.pooler.dense"),
)
MODERNBERT: Rules = (
    Rule("input.token", "model.embeddings.tok_embeddings"),
    Rule("input.norm", "model.embeddings.norm"),
    Rule("encoder.*.attention_norm", "model.layers.*.attn_norm"),
    Rule(qkv_names("encoder.*.attention"), "model.layers.*.attn.Wqkv", QKV_ROWS),
    Rule("encoder.*.attention.output", "model.layers.*.attn.Wo"),
    Rule("encoder.*.feedforward_norm", "model.layers.*.mlp_norm"),
    Rule(gate_up_names("encoder.*.feedforward"), "model.layers.*.mlp.Wi", GATE_UP_ROWS),
    Rule("encoder.*.feedforward.down", "model.layers.*.mlp.Wo"),
    Rule("encoder.norm", "model.final_norm"),
)
MODERNBERT_HEAD: Rules = (Rule("head.transform", "head.dense"), Rule("head.norm", "head.norm"))
MODERNBERT_CLASSIFIER: Rules = (*MODERNBERT_HEAD, *CLASSIFIER)
MODERNBERT_MASKED_LM: Rules = (
    *MODERNBERT_HEAD,
    Rule("head.bias", "decoder.bias"),
    Rule("head.output.weight", "decoder.weight"),
)


# -- images -----------------------------------------------------------------------------------------------------------


def vit_rules(prefix: str) -> Rules:
    layer = f"{prefix}.encoder.layer.*"
    names = ("attention.query", "attention.key", "attention.value", "output.dense")
    return (
        Rule("input.class_token", f"{prefix}.embeddings.cls_token", SQUEEZE_2),
        Rule("input.distillation_token", f"{prefix}.embeddings.distillation_token", SQUEEZE_2),
        Rule("input.mask_token", f"{prefix}.embeddings.mask_token", SQUEEZE_1),
        Rule("input.position.weight", f"{prefix}.embeddings.position_embeddings", SQUEEZE_1),
        Rule("input.patch", f"{prefix}.embeddings.patch_embeddings.projection"),
        Rule("encoder.*.attention_norm", f"{layer}.layernorm_before"),
        *attention_rules("encoder.*.attention", f"{layer}.attention", names),
        Rule("encoder.*.feedforward_norm", f"{layer}.layernorm_after"),
        Rule("encoder.*.feedforward.up", f"{layer}.intermediate.dense"),
        Rule("encoder.*.feedforward.down", f"{layer}.output.dense"),
        Rule("encoder.norm", f"{prefix}.layernorm"),
        Rule("head.pooler", f"{prefix}.pooler.dense"),
    )


DEIT_TEACHER: Rules = (
    Rule("head.output.weight", "cls_classifier.weight"),
    Rule("head.bias", "cls_classifier.bias"),
    Rule("head.teacher", "distillation_classifier"),
)
DINOV2: Rules = (
    Rule("encoder.*.attention_norm", "dinov2.encoder.layer.*.norm1"),
    Rule("encoder.*.feedforward_norm", "dinov2.encoder.layer.*.norm2"),
    Rule("encoder.*.attention_gain", "dinov2.encoder.layer.*.layer_scale1.lambda1"),
    Rule("encoder.*.feedforward_gain", "dinov2.encoder.layer.*.layer_scale2.lambda1"),
    Rule("encoder.*.feedforward.up", "dinov2.encoder.layer.*.mlp.fc1"),
    Rule("encoder.*.feedforward.down", "dinov2.encoder.layer.*.mlp.fc2"),
    *vit_rules("dinov2"),
)
DINOV2_GATED: Rules = (
    Rule(gate_up_names("encoder.*.feedforward"), "dinov2.encoder.layer.*.mlp.weights_in", GATE_UP_ROWS),
    Rule("encoder.*.feedforward.down", "dinov2.encoder.layer.*.mlp.weights_out"),
    *DINOV2,
)


def clip_stack(ours: str, theirs: str) -> Rules:
    return (
        *attention_rules(f"{ours}.*.attention", f"{theirs}.encoder.layers.*.self_attn", OUT_PROJ_NAMES),
        Rule(f"{ours}.*.attention_norm", f"{theirs}.encoder.layers.*.layer_norm1"),
        Rule(f"{ours}.*.feedforward.up", f"{theirs}.encoder.layers.*.mlp.fc1"),
        Rule(f"{ours}.*.feedforward.down", f"{theirs}.encoder.layers.*.mlp.fc2"),
        Rule(f"{ours}.*.feedforward_norm", f"{theirs}.encoder.layers.*.layer_norm2"),
    )


CLIP_TEXT: Rules = (
    Rule("input.token", "text_model.embeddings.token_embedding"),
    Rule("input.position", "text_model.embeddings.position_embedding"),
    *clip_stack("decoder", "text_model"),
    Rule("decoder.norm", "text_model.final_layer_norm"),
    Rule("head.output", "text_projection"),
)
CLIP_VISION: Rules = (
    Rule("input.class_token", "vision_model.embeddings.class_embedding"),
    Rule("input.patch", "vision_model.embeddings.patch_embedding"),
    Rule("input.position", "vision_model.embeddings.position_embedding"),
    Rule("input.norm", "vision_model.pre_layrnorm"),
    *clip_stack("encoder", "vision_model"),
    Rule("encoder.norm", "vision_model.post_layernorm"),
    Rule("head.output", "visual_projection"),
)
