"""DATA: what the reference library calls our weights, a table a family of names.

A row is (ours, theirs, split): `*` stands for the number of a layer, a name for its `.weight` and its `.bias` too, and
`split(tensor, heads)` makes the tensors of our names, in their order, out of the one of theirs.
"""

import re

# -- how one tensor of theirs becomes ours ------------------------------------------------------------------------


def same(tensor, heads):
    return (tensor,)


def transposed(tensor, heads):
    """Their Conv1D multiplies from the right: (in, out)."""
    return (tensor.T if tensor.dim() == 2 else tensor,)


def only(tensor, heads):
    """Without the leading axes of size one, kept there for broadcasting."""
    return (tensor.reshape(tensor.squeeze().shape),)


def thirds(tensor, heads):
    """Rows [q | k | v]."""
    return tensor.chunk(3)


def transposed_thirds(tensor, heads):
    """Conv1D with columns [q | k | v]."""
    return transposed(tensor, heads)[0].chunk(3)


def by_head(tensor, heads):
    """Rows (head, 3, size): q, k and v of the first head, then of the second."""
    parts = tensor.unflatten(0, (heads, 3, -1))
    return tuple(parts[:, i].flatten(0, 1) for i in range(3))


def one_key_head(tensor, heads):
    """Rows of heads + 2: all queries, then the one key and the one value head."""
    size = tensor.shape[0] // (heads + 2)
    return tensor.split((heads * size, size, size))


def halves(tensor, heads):
    """Rows [gate | up]; of stacked experts in each."""
    return tensor.chunk(2, dim=-2)


# -- the tables ---------------------------------------------------------------------------------------------------


def attention(ours, theirs, names=("q_proj", "k_proj", "v_proj", "o_proj")):
    """The four projections, where theirs are stored apart too."""
    return tuple(
        (f"{ours}.{mine}", f"{theirs}.{name}", same)
        for mine, name in zip(("query", "key", "value", "output"), names, strict=True)
    )


def fused(ours):
    return " ".join(f"{ours}.{name}" for name in ("query", "key", "value"))


GPT2 = (
    ("input.token", "transformer.wte", same),
    ("input.position", "transformer.wpe", same),
    ("decoder.*.attention_norm", "transformer.h.*.ln_1", same),
    (fused("decoder.*.attention"), "transformer.h.*.attn.c_attn", transposed_thirds),
    ("decoder.*.attention.output", "transformer.h.*.attn.c_proj", transposed),
    ("decoder.*.feedforward_norm", "transformer.h.*.ln_2", same),
    ("decoder.*.feedforward.up", "transformer.h.*.mlp.c_fc", transposed),
    ("decoder.*.feedforward.down", "transformer.h.*.mlp.c_proj", transposed),
    ("decoder.norm", "transformer.ln_f", same),
)


def bert(prefix):
    """BERT and RoBERTa, under the prefix their head puts before the names."""
    layer = f"{prefix}encoder.layer.*"
    return (
        ("input.token", f"{prefix}embeddings.word_embeddings", same),
        ("input.position", f"{prefix}embeddings.position_embeddings", same),
        ("input.segment", f"{prefix}embeddings.token_type_embeddings", same),
        ("input.norm", f"{prefix}embeddings.LayerNorm", same),
        *attention(
            "encoder.*.attention", f"{layer}.attention", ("self.query", "self.key", "self.value", "output.dense")
        ),
        ("encoder.*.attention_norm", f"{layer}.attention.output.LayerNorm", same),
        ("encoder.*.feedforward.up", f"{layer}.intermediate.dense", same),
        ("encoder.*.feedforward.down", f"{layer}.output.dense", same),
        ("encoder.*.feedforward_norm", f"{layer}.output.LayerNorm", same),
        ("head.pooler", f"{prefix}pooler.dense", same),
        ("head", "cls.predictions", same),
        ("head.transform", "cls.predictions.transform.dense", same),
        ("head.norm", "cls.predictions.transform.LayerNorm", same),
        ("head", "lm_head", same),
        ("head.transform", "lm_head.dense", same),
        ("head.norm", "lm_head.layer_norm", same),
    )


def distilbert(prefix):
    layer = f"{prefix}transformer.layer.*"
    return (
        ("input.token", f"{prefix}embeddings.word_embeddings", same),
        ("input.position", f"{prefix}embeddings.position_embeddings", same),
        ("input.norm", f"{prefix}embeddings.LayerNorm", same),
        *attention("encoder.*.attention", f"{layer}.attention", ("q_lin", "k_lin", "v_lin", "out_lin")),
        ("encoder.*.attention_norm", f"{layer}.sa_layer_norm", same),
        ("encoder.*.feedforward.up", f"{layer}.ffn.lin1", same),
        ("encoder.*.feedforward.down", f"{layer}.ffn.lin2", same),
        ("encoder.*.feedforward_norm", f"{layer}.output_layer_norm", same),
        ("head.transform", "vocab_transform", same),
        ("head.norm", "vocab_layer_norm", same),
        ("head", "vocab_projector", same),
    )


def modernbert(prefix):
    layer = f"{prefix}layers.*"
    return (
        ("input.token", f"{prefix}embeddings.tok_embeddings", same),
        ("input.norm", f"{prefix}embeddings.norm", same),
        ("encoder.*.attention_norm", f"{layer}.attn_norm", same),
        (fused("encoder.*.attention"), f"{layer}.attn.Wqkv", thirds),
        ("encoder.*.attention.output", f"{layer}.attn.Wo", same),
        ("encoder.*.feedforward_norm", f"{layer}.mlp_norm", same),
        ("encoder.*.feedforward.gate encoder.*.feedforward.up", f"{layer}.mlp.Wi", halves),
        ("encoder.*.feedforward.down", f"{layer}.mlp.Wo", same),
        ("encoder.norm", f"{prefix}final_norm", same),
        ("head.transform", "head.dense", same),
        ("head.norm", "head.norm", same),
        ("head", "decoder", same),
    )


T5 = (
    ("input.token", "shared", same),
    ("encoder.position_bias", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", same),
    *attention("encoder.*.attention", "encoder.block.*.layer.0.SelfAttention", "qkvo"),
    ("encoder.*.attention_norm", "encoder.block.*.layer.0.layer_norm", same),
    ("encoder.*.feedforward.up", "encoder.block.*.layer.1.DenseReluDense.wi", same),
    ("encoder.*.feedforward.down", "encoder.block.*.layer.1.DenseReluDense.wo", same),
    ("encoder.*.feedforward_norm", "encoder.block.*.layer.1.layer_norm", same),
    ("encoder.norm", "encoder.final_layer_norm", same),
    ("decoder.position_bias", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias", same),
    *attention("decoder.*.attention", "decoder.block.*.layer.0.SelfAttention", "qkvo"),
    ("decoder.*.attention_norm", "decoder.block.*.layer.0.layer_norm", same),
    *attention("decoder.*.cross", "decoder.block.*.layer.1.EncDecAttention", "qkvo"),
    ("decoder.*.cross_norm", "decoder.block.*.layer.1.layer_norm", same),
    ("decoder.*.feedforward.up", "decoder.block.*.layer.2.DenseReluDense.wi", same),
    ("decoder.*.feedforward.down", "decoder.block.*.layer.2.DenseReluDense.wo", same),
    ("decoder.*.feedforward_norm", "decoder.block.*.layer.2.layer_norm", same),
    ("decoder.norm", "decoder.final_layer_norm", same),
)

OUT_PROJ = ("q_proj", "k_proj", "v_proj", "out_proj")


def bart_side(ours, given):
    layer = f"model.{ours}.layers.*"
    return (
        (f"{given}.position", f"model.{ours}.embed_positions", same),
        (f"{given}.norm", f"model.{ours}.layernorm_embedding", same),
        *attention(f"{ours}.*.attention", f"{layer}.self_attn", OUT_PROJ),
        (f"{ours}.*.attention_norm", f"{layer}.self_attn_layer_norm", same),
        *attention(f"{ours}.*.cross", f"{layer}.encoder_attn", OUT_PROJ),
        (f"{ours}.*.cross_norm", f"{layer}.encoder_attn_layer_norm", same),
        (f"{ours}.*.feedforward.up", f"{layer}.fc1", same),
        (f"{ours}.*.feedforward.down", f"{layer}.fc2", same),
        (f"{ours}.*.feedforward_norm", f"{layer}.final_layer_norm", same),
    )


BART = (
    ("input.token", "model.shared", same),
    *bart_side("encoder", "input"),
    *bart_side("decoder", "target"),
    ("head.fixed_bias", "final_logits_bias", only),
)

LLAMA = (
    ("input.token", "model.embed_tokens", same),
    ("decoder.*.attention_norm", "model.layers.*.input_layernorm", same),
    *attention("decoder.*.attention", "model.layers.*.self_attn"),
    ("decoder.*.attention.query_norm", "model.layers.*.self_attn.q_norm", same),
    ("decoder.*.attention.key_norm", "model.layers.*.self_attn.k_norm", same),
    ("decoder.*.feedforward_norm", "model.layers.*.post_attention_layernorm", same),
    ("decoder.*.feedforward.gate", "model.layers.*.mlp.gate_proj", same),
    ("decoder.*.feedforward.up", "model.layers.*.mlp.up_proj", same),
    ("decoder.*.feedforward.down", "model.layers.*.mlp.down_proj", same),
    ("decoder.norm", "model.norm", same),
    ("head.output", "lm_head", same),
)

MIXTRAL = (
    ("decoder.*.feedforward.router", "model.layers.*.mlp.gate", same),
    (
        "decoder.*.feedforward.gate decoder.*.feedforward.up",
        "model.layers.*.mlp.experts.gate_up_proj",
        halves,
    ),
    ("decoder.*.feedforward.down", "model.layers.*.mlp.experts.down_proj", same),
    *LLAMA,
)

# The norm called post_attention is the one after attention here, not the one before the feed-forward.
GEMMA2 = (
    ("decoder.*.attention_output_norm", "model.layers.*.post_attention_layernorm", same),
    ("decoder.*.feedforward_norm", "model.layers.*.pre_feedforward_layernorm", same),
    ("decoder.*.feedforward_output_norm", "model.layers.*.post_feedforward_layernorm", same),
    *LLAMA,
)
OLMO2 = (
    ("decoder.*.attention_norm", "model.layers.*.post_attention_layernorm", same),
    ("decoder.*.feedforward_norm", "model.layers.*.post_feedforward_layernorm", same),
    *LLAMA,
)

PHI = (
    ("decoder.*.attention.output", "model.layers.*.self_attn.dense", same),
    ("decoder.*.feedforward.up", "model.layers.*.mlp.fc1", same),
    ("decoder.*.feedforward.down", "model.layers.*.mlp.fc2", same),
    ("decoder.norm", "model.final_layernorm", same),
    ("head.output.weight", "lm_head.weight", same),
    ("head.bias", "lm_head.bias", same),
    *LLAMA,
)

NEOX = (
    ("input.token", "gpt_neox.embed_in", same),
    ("decoder.*.attention_norm", "gpt_neox.layers.*.input_layernorm", same),
    (fused("decoder.*.attention"), "gpt_neox.layers.*.attention.query_key_value", by_head),
    ("decoder.*.attention.output", "gpt_neox.layers.*.attention.dense", same),
    ("decoder.*.feedforward_norm", "gpt_neox.layers.*.post_attention_layernorm", same),
    ("decoder.*.feedforward.up", "gpt_neox.layers.*.mlp.dense_h_to_4h", same),
    ("decoder.*.feedforward.down", "gpt_neox.layers.*.mlp.dense_4h_to_h", same),
    ("decoder.norm", "gpt_neox.final_layer_norm", same),
    ("head.output", "lm_head", same),
)
GPTJ = (
    ("input.token", "transformer.wte", same),
    ("decoder.*.attention_norm", "transformer.h.*.ln_1", same),
    *attention("decoder.*.attention", "transformer.h.*.attn", OUT_PROJ),
    ("decoder.*.feedforward.up", "transformer.h.*.mlp.fc_in", same),
    ("decoder.*.feedforward.down", "transformer.h.*.mlp.fc_out", same),
    ("decoder.norm", "transformer.ln_f", same),
    ("head.output.weight", "lm_head.weight", same),
    ("head.bias", "lm_head.bias", same),
)


def big_science(split):
    """BLOOM, and Falcon that grew out of it."""
    return (
        ("input.token", "transformer.word_embeddings", same),
        ("input.norm", "transformer.word_embeddings_layernorm", same),
        ("decoder.*.attention_norm", "transformer.h.*.input_layernorm", same),
        (fused("decoder.*.attention"), "transformer.h.*.self_attention.query_key_value", split),
        ("decoder.*.attention.output", "transformer.h.*.self_attention.dense", same),
        ("decoder.*.feedforward_norm", "transformer.h.*.post_attention_layernorm", same),
        ("decoder.*.feedforward.up", "transformer.h.*.mlp.dense_h_to_4h", same),
        ("decoder.*.feedforward.down", "transformer.h.*.mlp.dense_4h_to_h", same),
        ("decoder.norm", "transformer.ln_f", same),
    )


MPT = (
    ("input.token", "transformer.wte", same),
    ("decoder.*.attention_norm", "transformer.blocks.*.norm_1", same),
    (fused("decoder.*.attention"), "transformer.blocks.*.attn.Wqkv", thirds),
    ("decoder.*.attention.output", "transformer.blocks.*.attn.out_proj", same),
    ("decoder.*.feedforward_norm", "transformer.blocks.*.norm_2", same),
    ("decoder.*.feedforward.up", "transformer.blocks.*.ffn.up_proj", same),
    ("decoder.*.feedforward.down", "transformer.blocks.*.ffn.down_proj", same),
    ("decoder.norm", "transformer.norm_f", same),
)
VIT = (
    ("input.class_token", "vit.embeddings.cls_token", only),
    ("input.position.weight", "vit.embeddings.position_embeddings", only),
    ("input.patch", "vit.embeddings.patch_embeddings.projection", same),
    ("encoder.*.attention_norm", "vit.layers.*.layernorm_before", same),
    *attention("encoder.*.attention", "vit.layers.*.attention"),
    ("encoder.*.feedforward_norm", "vit.layers.*.layernorm_after", same),
    ("encoder.*.feedforward.up", "vit.layers.*.mlp.fc1", same),
    ("encoder.*.feedforward.down", "vit.layers.*.mlp.fc2", same),
    ("encoder.norm", "vit.layernorm", same),
    ("head.output.weight", "classifier.weight", same),
    ("head.bias", "classifier.bias", same),
)


# -- reading a table ----------------------------------------------------------------------------------------------


def translate(table, theirs, heads):
    """Their state as ours; the first row that fits a name decides, and a name without a row is an error."""
    ours = {}
    for key, tensor in theirs.items():
        row = next(filter(None, (_fit(row, key) for row in table)), None)
        assert row is not None, f"no row of the table says what {key} is called with us"
        names, split = row
        for name, part in zip(names, split(tensor, heads), strict=True):
            assert name not in ours, f"two of their weights become our {name}"
            ours[name] = part.contiguous()
    return ours


def _fit(row, key):
    """Our names for a key of theirs by one row, and how to split; None where the row speaks of another."""
    mine, theirs, split = row
    pattern = re.escape(theirs).replace(r"\*", r"(?P<layer>\d+)")
    found = re.fullmatch(rf"{pattern}(?P<part>\.weight|\.bias)?", key)
    if found is None:
        return None
    layer = found.groupdict().get("layer") or ""
    return [name.replace("*", layer) + (found["part"] or "") for name in mine.split()], split
