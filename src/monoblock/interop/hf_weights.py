"""DATA: what published families call our weights, a table a family of names, as they lie in its files.

A name without `.weight` or `.bias` stands for both.  The first row that fits decides, so a table that differs from
another in a few names is those rows before the other's.
"""

from __future__ import annotations

from monoblock.interop.rename import (
    CONV,
    CONV_ROWS,
    FLAT1,
    FLAT2,
    GROUPED,
    HALVES,
    ROWS,
    SHARDED,
    STACKED,
    TURNED_EACH,
    WOVEN,
    Rule,
    Step,
    fused,
)

Table = tuple[Rule, ...]
OURS = ("query", "key", "value", "output")
OUT_PROJ = ("q_proj", "k_proj", "v_proj", "out_proj")
SEVERAL_OUTPUTS = (Rule("head.output.weight", "lm_head.weight"), Rule("head.bias", "lm_head.bias"))


def attention(ours: str, theirs: str, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")) -> Table:
    """The four projections, where theirs are stored apart too."""
    return tuple(Rule(f"{ours}.{mine}", f"{theirs}.{name}") for mine, name in zip(OURS, names, strict=True))


def gate_up(ours: str) -> str:
    return f"{ours}.gate {ours}.up"


# -- decoders that learned from GPT-2 ---------------------------------------------------------------------------------


def gpt2(qkv: Step, other: Step | None) -> Table:
    """GPT-2, whose matrices lie transposed, and BigCode's, whose do not."""
    return (
        Rule("input.token", "transformer.wte"),
        Rule("input.position", "transformer.wpe"),
        Rule("decoder.*.attention_norm", "transformer.h.*.ln_1"),
        Rule(fused("decoder.*.attention"), "transformer.h.*.attn.c_attn", qkv),
        Rule("decoder.*.attention.output", "transformer.h.*.attn.c_proj", other),
        Rule("decoder.*.feedforward_norm", "transformer.h.*.ln_2"),
        Rule("decoder.*.feedforward.up", "transformer.h.*.mlp.c_fc", other),
        Rule("decoder.*.feedforward.down", "transformer.h.*.mlp.c_proj", other),
        Rule("decoder.norm", "transformer.ln_f"),
        Rule("head.output.weight", "lm_head.weight"),
    )


GPT2, BIGCODE, BIGCODE_HEADS = gpt2(CONV_ROWS, CONV), gpt2(ROWS, None), gpt2(GROUPED, None)
GPT_NEO: Table = (*attention("decoder.*.attention", "transformer.h.*.attn.attention", OUT_PROJ), *BIGCODE)
GPTJ: Table = (
    *attention("decoder.*.attention", "transformer.h.*.attn", OUT_PROJ),
    Rule("decoder.*.feedforward.up", "transformer.h.*.mlp.fc_in"),
    Rule("decoder.*.feedforward.down", "transformer.h.*.mlp.fc_out"),
    Rule("head.bias", "lm_head.bias"),
    *BIGCODE,
)
CODEGEN: Table = (
    Rule("decoder.*.attention.output", "transformer.h.*.attn.out_proj"),
    Rule(fused("decoder.*.attention"), "transformer.h.*.attn.qkv_proj", SHARDED),
    *GPTJ,
)
NEOX: Table = (
    Rule("input.token", "gpt_neox.embed_in"),
    Rule("decoder.*.attention_norm", "gpt_neox.layers.*.input_layernorm"),
    Rule(fused("decoder.*.attention"), "gpt_neox.layers.*.attention.query_key_value", GROUPED),
    Rule("decoder.*.attention.output", "gpt_neox.layers.*.attention.dense"),
    Rule("decoder.*.feedforward_norm", "gpt_neox.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward.up", "gpt_neox.layers.*.mlp.dense_h_to_4h"),
    Rule("decoder.*.feedforward.down", "gpt_neox.layers.*.mlp.dense_4h_to_h"),
    Rule("decoder.norm", "gpt_neox.final_layer_norm"),
    Rule("head.output", "embed_out"),
)
BLOOM: Table = (
    Rule("input.token", "transformer.word_embeddings"),
    Rule("input.norm", "transformer.word_embeddings_layernorm"),
    Rule("decoder.*.attention_norm", "transformer.h.*.input_layernorm"),
    Rule(fused("decoder.*.attention"), "transformer.h.*.self_attention.query_key_value", GROUPED),
    Rule("decoder.*.attention.output", "transformer.h.*.self_attention.dense"),
    Rule("decoder.*.feedforward_norm", "transformer.h.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward.up", "transformer.h.*.mlp.dense_h_to_4h"),
    Rule("decoder.*.feedforward.down", "transformer.h.*.mlp.dense_4h_to_h"),
    Rule("decoder.norm", "transformer.ln_f"),
    Rule("head.output", "lm_head"),
)
FALCON_40B: Table = (
    Rule("decoder.*.attention_norm", "transformer.h.*.ln_attn"),
    Rule("decoder.*.feedforward_norm", "transformer.h.*.ln_mlp"),
    *BLOOM,
)
MPT: Table = (
    Rule("input.token", "transformer.wte"),
    Rule("decoder.*.attention_norm", "transformer.blocks.*.norm_1"),
    Rule(fused("decoder.*.attention"), "transformer.blocks.*.attn.Wqkv", ROWS),
    Rule("decoder.*.attention.output", "transformer.blocks.*.attn.out_proj"),
    Rule("decoder.*.feedforward_norm", "transformer.blocks.*.norm_2"),
    Rule("decoder.*.feedforward.up", "transformer.blocks.*.ffn.up_proj"),
    Rule("decoder.*.feedforward.down", "transformer.blocks.*.ffn.down_proj"),
    Rule("decoder.norm", "transformer.norm_f"),
    Rule("head.output", "lm_head"),
)

# -- decoders that learned from LLaMA ---------------------------------------------------------------------------------

LLAMA: Table = (
    Rule("input.token", "model.embed_tokens"),
    Rule("decoder.*.attention_norm", "model.layers.*.input_layernorm"),
    *attention("decoder.*.attention", "model.layers.*.self_attn"),
    Rule("decoder.*.attention.query_norm", "model.layers.*.self_attn.q_norm"),
    Rule("decoder.*.attention.key_norm", "model.layers.*.self_attn.k_norm"),
    Rule("decoder.*.feedforward_norm", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward.gate", "model.layers.*.mlp.gate_proj"),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.up_proj"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.down_proj"),
    Rule("decoder.norm", "model.norm"),
    Rule("head.output", "lm_head"),
)
PHI3: Table = (
    Rule(fused("decoder.*.attention"), "model.layers.*.self_attn.qkv_proj", ROWS),
    Rule(gate_up("decoder.*.feedforward"), "model.layers.*.mlp.gate_up_proj", HALVES),
    *LLAMA,
)
# The norm called post_attention is the one after attention here, not the one before the feed-forward.
GEMMA2: Table = (
    Rule("decoder.*.attention_output_norm", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward_norm", "model.layers.*.pre_feedforward_layernorm"),
    Rule("decoder.*.feedforward_output_norm", "model.layers.*.post_feedforward_layernorm"),
    *LLAMA,
)
GLM4: Table = (
    Rule("decoder.*.attention_output_norm", "model.layers.*.post_self_attn_layernorm"),
    Rule("decoder.*.feedforward_output_norm", "model.layers.*.post_mlp_layernorm"),
    Rule(gate_up("decoder.*.feedforward"), "model.layers.*.mlp.gate_up_proj", HALVES),
    *LLAMA,
)
OLMO2: Table = (
    Rule("decoder.*.attention_norm", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.*.feedforward_norm", "model.layers.*.post_feedforward_layernorm"),
    *LLAMA,
)
PHI: Table = (
    Rule("decoder.*.attention.output", "model.layers.*.self_attn.dense"),
    Rule("decoder.*.attention.query_norm", "model.layers.*.self_attn.q_layernorm"),
    Rule("decoder.*.attention.key_norm", "model.layers.*.self_attn.k_layernorm"),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.fc1"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.fc2"),
    Rule("decoder.norm", "model.final_layernorm"),
    Rule("head.bias", "lm_head.bias"),
    *LLAMA,
)
PERSIMMON: Table = (
    Rule(fused("decoder.*.attention"), "model.layers.*.self_attn.query_key_value", GROUPED),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.dense_h_to_4h"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.dense_4h_to_h"),
    *PHI,
)
STABLELM: Table = (
    Rule("decoder.*.attention.query_norm.weight", "model.layers.*.self_attn.q_layernorm.norms.#.weight", STACKED),
    Rule("decoder.*.attention.key_norm.weight", "model.layers.*.self_attn.k_layernorm.norms.#.weight", STACKED),
    *LLAMA,
)
STARCODER2: Table = (
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.c_fc"),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.c_proj"),
    *LLAMA,
)
MIXTRAL: Table = (
    Rule("decoder.*.feedforward.router", "model.layers.*.block_sparse_moe.gate"),
    Rule("decoder.*.feedforward.gate", "model.layers.*.block_sparse_moe.experts.#.w1.weight", STACKED),
    Rule("decoder.*.feedforward.down", "model.layers.*.block_sparse_moe.experts.#.w2.weight", STACKED),
    Rule("decoder.*.feedforward.up", "model.layers.*.block_sparse_moe.experts.#.w3.weight", STACKED),
    *LLAMA,
)
QWEN3_MOE: Table = (
    Rule("decoder.*.feedforward.router", "model.layers.*.mlp.gate"),
    Rule("decoder.*.feedforward.gate", "model.layers.*.mlp.experts.#.gate_proj.weight", STACKED),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.experts.#.down_proj.weight", STACKED),
    Rule("decoder.*.feedforward.up", "model.layers.*.mlp.experts.#.up_proj.weight", STACKED),
    *LLAMA,
)
GPT_OSS: Table = (
    Rule("decoder.*.attention.sinks", "model.layers.*.self_attn.sinks"),
    Rule("decoder.*.feedforward.router", "model.layers.*.mlp.router"),
    Rule(gate_up("decoder.*.feedforward"), "model.layers.*.mlp.experts.gate_up_proj", WOVEN),
    Rule(
        "decoder.*.feedforward.gate_bias decoder.*.feedforward.up_bias",
        "model.layers.*.mlp.experts.gate_up_proj_bias",
        WOVEN,
    ),
    Rule("decoder.*.feedforward.down", "model.layers.*.mlp.experts.down_proj", TURNED_EACH),
    Rule("decoder.*.feedforward.down_bias", "model.layers.*.mlp.experts.down_proj_bias"),
    *LLAMA,
)

# -- decoders and encoder-decoders that learned from fairseq ----------------------------------------------------------


def fairseq_stack(ours: str, theirs: str, final: str = "layer_norm") -> Table:
    layer = f"{theirs}.layers.*"
    return (
        *attention(f"{ours}.*.attention", f"{layer}.self_attn", OUT_PROJ),
        Rule(f"{ours}.*.attention_norm", f"{layer}.self_attn_layer_norm"),
        *attention(f"{ours}.*.cross", f"{layer}.encoder_attn", OUT_PROJ),
        Rule(f"{ours}.*.cross_norm", f"{layer}.encoder_attn_layer_norm"),
        Rule(f"{ours}.*.feedforward.up", f"{layer}.fc1"),
        Rule(f"{ours}.*.feedforward.down", f"{layer}.fc2"),
        Rule(f"{ours}.*.feedforward_norm", f"{layer}.final_layer_norm"),
        Rule(f"{ours}.norm", f"{theirs}.{final}"),
    )


OPT: Table = (
    Rule("input.token", "model.decoder.embed_tokens"),
    Rule("input.position", "model.decoder.embed_positions"),
    Rule("input.projection", "model.decoder.project_in"),
    Rule("head.projection", "model.decoder.project_out"),
    *fairseq_stack("decoder", "model.decoder", "final_layer_norm"),
    Rule("head.output", "lm_head"),
)
XGLM: Table = (
    Rule("input.token", "model.embed_tokens"),
    *fairseq_stack("decoder", "model"),
    Rule("head.output", "lm_head"),
)
BIOGPT: Table = (
    Rule("input.token", "biogpt.embed_tokens"),
    Rule("input.position", "biogpt.embed_positions"),
    *fairseq_stack("decoder", "biogpt"),
    Rule("head.output", "output_projection"),
)
BART: Table = (
    Rule("input.token", "model.shared"),
    Rule("input.position", "model.encoder.embed_positions"),
    Rule("input.norm", "model.encoder.layernorm_embedding"),
    *fairseq_stack("encoder", "model.encoder"),
    Rule("target.position", "model.decoder.embed_positions"),
    Rule("target.norm", "model.decoder.layernorm_embedding"),
    *fairseq_stack("decoder", "model.decoder"),
    Rule("head.fixed_bias", "final_logits_bias", FLAT1),
    Rule("head.output", "lm_head"),
)
MARIAN_APART: Table = (  # source and target each with a vocabulary
    Rule("input.token", "model.encoder.embed_tokens"),
    Rule("target.token", "model.decoder.embed_tokens"),
    *BART,
)
WHISPER: Table = (
    Rule("input.first", "model.encoder.conv1"),
    Rule("input.second", "model.encoder.conv2"),
    Rule("target.token", "model.decoder.embed_tokens"),
    Rule("head.output", "proj_out"),
    *BART,
)


# -- T5 ---------------------------------------------------------------------------------------------------------------


def t5_stack(ours: str, last: int) -> Table:
    block = f"{ours}.block.*.layer"
    return (
        Rule(f"{ours}.position_bias", f"{ours}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        Rule(f"{ours}.*.attention.position_bias", f"{block}.0.SelfAttention.relative_attention_bias"),
        *attention(f"{ours}.*.attention", f"{block}.0.SelfAttention", ("q", "k", "v", "o")),
        Rule(f"{ours}.*.attention_norm", f"{block}.0.layer_norm"),
        *attention(f"{ours}.*.cross", f"{block}.1.EncDecAttention", ("q", "k", "v", "o")),
        Rule(f"{ours}.*.cross_norm", f"{block}.1.layer_norm"),
        Rule(f"{ours}.*.feedforward.down", f"{block}.{last}.DenseReluDense.wo"),
        Rule(f"{ours}.*.feedforward_norm", f"{block}.{last}.layer_norm"),
        Rule(f"{ours}.norm", f"{ours}.final_layer_norm"),
    )


def t5(*names: tuple[str, str]) -> Table:
    """T5; `names` are those of the matrices into the feed-forward, one or two."""
    return (
        Rule("input.token", "shared"),
        *(Rule(f"encoder.*.feedforward.{mine}", f"encoder.block.*.layer.1.DenseReluDense.{n}") for mine, n in names),
        *(Rule(f"decoder.*.feedforward.{mine}", f"decoder.block.*.layer.2.DenseReluDense.{n}") for mine, n in names),
        *t5_stack("encoder", 1),
        *t5_stack("decoder", 2),
        Rule("head.output", "lm_head"),
    )


T5, T5_GATED = t5(("up", "wi")), t5(("gate", "wi_0"), ("up", "wi_1"))


# -- encoders ---------------------------------------------------------------------------------------------------------


def bert(prefix: str, layer: str = "encoder.layer.*") -> Table:
    """BERT and its descendants, under the prefix their head puts before the names."""
    layer = f"{prefix}.{layer}"
    names = ("self.query", "self.key", "self.value", "output.dense")
    return (
        Rule("input.token", f"{prefix}.embeddings.word_embeddings"),
        Rule("input.position", f"{prefix}.embeddings.position_embeddings"),
        Rule("input.segment", f"{prefix}.embeddings.token_type_embeddings"),
        Rule("input.norm", f"{prefix}.embeddings.LayerNorm"),
        *attention("encoder.*.attention", f"{layer}.attention", names),
        Rule("encoder.*.attention_norm", f"{layer}.attention.output.LayerNorm"),
        Rule("encoder.*.feedforward.up", f"{layer}.intermediate.dense"),
        Rule("encoder.*.feedforward.down", f"{layer}.output.dense"),
        Rule("encoder.*.feedforward_norm", f"{layer}.output.LayerNorm"),
    )


CLASSIFIER: Table = (Rule("head.output.weight", "classifier.weight"), Rule("head.bias", "classifier.bias"))
SPANS: Table = (Rule("head.output.weight", "qa_outputs.weight"), Rule("head.bias", "qa_outputs.bias"))
BERT: Table = (*bert("bert"), Rule("head.pooler", "bert.pooler.dense"))
BERT_MASKED: Table = (
    Rule("head.bias", "cls.predictions.bias"),
    Rule("head.output.weight", "cls.predictions.decoder.weight"),
    Rule("head.transform", "cls.predictions.transform.dense"),
    Rule("head.norm", "cls.predictions.transform.LayerNorm"),
)
ROBERTA: Table = (*bert("roberta"), Rule("head.pooler", "roberta.pooler.dense"))
ROBERTA_MASKED: Table = (
    Rule("head.bias", "lm_head.bias"),
    Rule("head.output.weight", "lm_head.decoder.weight"),
    Rule("head.transform", "lm_head.dense"),
    Rule("head.norm", "lm_head.layer_norm"),
)
DENSE_CLASSIFIER: Table = (
    Rule("head.pooler", "classifier.dense"),
    Rule("head.output.weight", "classifier.out_proj.weight"),
    Rule("head.bias", "classifier.out_proj.bias"),
)
ELECTRA: Table = (*bert("electra"), Rule("input.projection", "electra.embeddings_project"))
ELECTRA_MASKED: Table = (
    Rule("head.bias", "generator_lm_head.bias"),
    Rule("head.output.weight", "generator_lm_head.weight"),
    Rule("head.transform", "generator_predictions.dense"),
    Rule("head.norm", "generator_predictions.LayerNorm"),
)
ELECTRA_FOUND: Table = (
    Rule("head.transform", "discriminator_predictions.dense"),
    Rule("head.output.weight", "discriminator_predictions.dense_prediction.weight"),
    Rule("head.bias", "discriminator_predictions.dense_prediction.bias"),
)
SHARED_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.*"
ALBERT: Table = (
    *attention("encoder.*.attention", f"{SHARED_LAYER}.attention", ("query", "key", "value", "dense")),
    Rule("encoder.*.attention_norm", f"{SHARED_LAYER}.attention.LayerNorm"),
    Rule("encoder.*.feedforward.up", f"{SHARED_LAYER}.ffn"),
    Rule("encoder.*.feedforward.down", f"{SHARED_LAYER}.ffn_output"),
    Rule("encoder.*.feedforward_norm", f"{SHARED_LAYER}.full_layer_layer_norm"),
    Rule("input.projection", "albert.encoder.embedding_hidden_mapping_in"),
    Rule("head.pooler", "albert.pooler"),
    *bert("albert"),
)
ALBERT_MASKED: Table = (
    Rule("head.bias", "predictions.bias"),
    Rule("head.output.weight", "predictions.decoder.weight"),
    Rule("head.transform", "predictions.dense"),
    Rule("head.norm", "predictions.LayerNorm"),
)
DISTILBERT: Table = (
    Rule("input.token", "distilbert.embeddings.word_embeddings"),
    Rule("input.position", "distilbert.embeddings.position_embeddings"),
    Rule("input.norm", "distilbert.embeddings.LayerNorm"),
    *attention(
        "encoder.*.attention", "distilbert.transformer.layer.*.attention", ("q_lin", "k_lin", "v_lin", "out_lin")
    ),
    Rule("encoder.*.attention_norm", "distilbert.transformer.layer.*.sa_layer_norm"),
    Rule("encoder.*.feedforward.up", "distilbert.transformer.layer.*.ffn.lin1"),
    Rule("encoder.*.feedforward.down", "distilbert.transformer.layer.*.ffn.lin2"),
    Rule("encoder.*.feedforward_norm", "distilbert.transformer.layer.*.output_layer_norm"),
)
DISTILBERT_MASKED: Table = (
    Rule("head.transform", "vocab_transform"),
    Rule("head.norm", "vocab_layer_norm"),
    Rule("head.bias", "vocab_projector.bias"),
    Rule("head.output.weight", "vocab_projector.weight"),
)
MODERNBERT: Table = (
    Rule("input.token", "model.embeddings.tok_embeddings"),
    Rule("input.norm", "model.embeddings.norm"),
    Rule("encoder.*.attention_norm", "model.layers.*.attn_norm"),
    Rule(fused("encoder.*.attention"), "model.layers.*.attn.Wqkv", ROWS),
    Rule("encoder.*.attention.output", "model.layers.*.attn.Wo"),
    Rule("encoder.*.feedforward_norm", "model.layers.*.mlp_norm"),
    Rule(gate_up("encoder.*.feedforward"), "model.layers.*.mlp.Wi", HALVES),
    Rule("encoder.*.feedforward.down", "model.layers.*.mlp.Wo"),
    Rule("encoder.norm", "model.final_norm"),
)
MODERNBERT_MASKED: Table = (
    Rule("head.transform", "head.dense"),
    Rule("head.norm", "head.norm"),
    Rule("head.bias", "decoder.bias"),
    Rule("head.output.weight", "decoder.weight"),
)


# -- images -----------------------------------------------------------------------------------------------------------


def vit(prefix: str) -> Table:
    layer = f"{prefix}.encoder.layer.*"
    names = ("attention.query", "attention.key", "attention.value", "output.dense")
    return (
        Rule("input.class_token", f"{prefix}.embeddings.cls_token", FLAT2),
        Rule("input.distillation_token", f"{prefix}.embeddings.distillation_token", FLAT2),
        Rule("input.mask_token", f"{prefix}.embeddings.mask_token", FLAT1),
        Rule("input.position.weight", f"{prefix}.embeddings.position_embeddings", FLAT1),
        Rule("input.patch", f"{prefix}.embeddings.patch_embeddings.projection"),
        Rule("encoder.*.attention_norm", f"{layer}.layernorm_before"),
        *attention("encoder.*.attention", f"{layer}.attention", names),
        Rule("encoder.*.feedforward_norm", f"{layer}.layernorm_after"),
        Rule("encoder.*.feedforward.up", f"{layer}.intermediate.dense"),
        Rule("encoder.*.feedforward.down", f"{layer}.output.dense"),
        Rule("encoder.norm", f"{prefix}.layernorm"),
        Rule("head.pooler", f"{prefix}.pooler.dense"),
    )


DEIT_TEACHER: Table = (
    Rule("head.output.weight", "cls_classifier.weight"),
    Rule("head.bias", "cls_classifier.bias"),
    Rule("head.teacher", "distillation_classifier"),
)
DINOV2: Table = (
    Rule("encoder.*.attention_norm", "dinov2.encoder.layer.*.norm1"),
    Rule("encoder.*.feedforward_norm", "dinov2.encoder.layer.*.norm2"),
    Rule("encoder.*.attention_gain", "dinov2.encoder.layer.*.layer_scale1.lambda1"),
    Rule("encoder.*.feedforward_gain", "dinov2.encoder.layer.*.layer_scale2.lambda1"),
    Rule("encoder.*.feedforward.up", "dinov2.encoder.layer.*.mlp.fc1"),
    Rule("encoder.*.feedforward.down", "dinov2.encoder.layer.*.mlp.fc2"),
    *vit("dinov2"),
)
DINOV2_GATED: Table = (
    Rule(gate_up("encoder.*.feedforward"), "dinov2.encoder.layer.*.mlp.weights_in", HALVES),
    Rule("encoder.*.feedforward.down", "dinov2.encoder.layer.*.mlp.weights_out"),
    *DINOV2,
)


def clip_stack(ours: str, theirs: str) -> Table:
    return (
        *attention(f"{ours}.*.attention", f"{theirs}.encoder.layers.*.self_attn", OUT_PROJ),
        Rule(f"{ours}.*.attention_norm", f"{theirs}.encoder.layers.*.layer_norm1"),
        Rule(f"{ours}.*.feedforward.up", f"{theirs}.encoder.layers.*.mlp.fc1"),
        Rule(f"{ours}.*.feedforward.down", f"{theirs}.encoder.layers.*.mlp.fc2"),
        Rule(f"{ours}.*.feedforward_norm", f"{theirs}.encoder.layers.*.layer_norm2"),
    )


CLIP_TEXT: Table = (
    Rule("input.token", "text_model.embeddings.token_embedding"),
    Rule("input.position", "text_model.embeddings.position_embedding"),
    *clip_stack("decoder", "text_model"),
    Rule("decoder.norm", "text_model.final_layer_norm"),
    Rule("head.output", "text_projection"),
)
CLIP_VISION: Table = (
    Rule("input.class_token", "vision_model.embeddings.class_embedding"),
    Rule("input.patch", "vision_model.embeddings.patch_embedding"),
    Rule("input.position", "vision_model.embeddings.position_embedding"),
    Rule("input.norm", "vision_model.pre_layrnorm"),
    *clip_stack("encoder", "vision_model"),
    Rule("encoder.norm", "vision_model.post_layernorm"),
    Rule("head.output", "visual_projection"),
)
