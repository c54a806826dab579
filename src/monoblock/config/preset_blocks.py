"""Blocks and builders, used by presets.py, for published models that differ from their family in more than sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monoblock.config.families import bart, bert, build_stack, gpt, llama, vit
from monoblock.config.knobs import FieldValues, rebuild, vary
from monoblock.config.model import (
    Alibi,
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    Learned,
    ModelConfig,
    NormConfig,
    Repeat,
    Rotary,
    Sinusoid,
    StackConfig,
)

LM_HEAD = HeadConfig(kind="language_model")
LM_HEAD_WITH_BIAS = HeadConfig(kind="language_model", bias="learned")
LAYER_NORM_NO_SHIFT = NormConfig(affine="scale")
GEMMA_RMS_NORM = NormConfig(kind="rms", affine="scale", eps=1e-6, unit_offset=True, cast="after_scale")
OLMO_RMS_NORM = NormConfig(kind="rms", affine="scale", eps=1e-6, cast="after_scale")


def build_decoder_only(
    block: BlockConfig,
    *,
    vocab: int,
    context: int,
    depth: int,
    norm: NormConfig,
    tied: bool = True,
    head: HeadConfig = LM_HEAD,
) -> ModelConfig:
    """Build a decoder-only model of equal blocks, with no positions added to the embedding."""
    return ModelConfig(
        input=EmbeddingConfig(vocab=vocab, context=context),
        decoder=build_stack(depth, block, norm=norm),
        head=head,
        tie="output" if tied else "none",
    )


def replace_input(config: ModelConfig, **fields: Any) -> ModelConfig:
    """Return a copy of a configuration with some fields of its input changed."""
    return replace(config, input=replace(config.input, **fields))


def replace_attention(config: ModelConfig, **fields: object) -> ModelConfig:
    """Return a copy of a configuration with some fields of self-attention changed in every block."""

    def edit(part: object, values: FieldValues) -> None:
        if isinstance(part, BlockConfig):
            values["attention"] = replace(values["attention"], **fields)

    return rebuild(config, edit)


def factorize_embedding(config: ModelConfig, *, dim: int, tied: bool = False) -> ModelConfig:
    """Return a copy of an encoder's configuration with a token embedding of size `dim`.

    If `tied`, all blocks share their weights (ALBERT).
    """
    encoder = config.encoder
    assert encoder is not None
    pattern = tuple(replace(run, tied=tied) for run in encoder.pattern)
    return replace(replace_input(config, dim=dim), encoder=replace(encoder, pattern=pattern))


def roberta(vocab: int) -> ModelConfig:
    """RoBERTa: BERT with positions counted from 2 and a single segment."""
    config = bert(vocab=vocab, width=768, depth=12, heads=12, context=512, segments=1, eps=1e-5)
    return replace_input(config, positions=Learned(offset=2))


def modernbert() -> ModelConfig:
    """ModernBERT: pre-norm, rotary positions, global attention in every third block, else 64 tokens to each side."""
    global_block = BlockConfig(
        width=768,
        attention=AttentionConfig(heads=12, bias="", mask="full", positions=Rotary(base=160_000.0)),
        feedforward=FeedForwardConfig(hidden=1152, activation="gelu", gated=True, bias=False),
        norm=LAYER_NORM_NO_SHIFT,
    )
    local_attention = replace(global_block.attention, window=65, positions=Rotary(base=10_000.0))
    local_block = replace(global_block, attention=local_attention)
    first_block = replace(global_block, attention_norm=False)
    pattern = (Repeat(blocks=(first_block,)), Repeat(blocks=(local_block, local_block, global_block), times=7))
    return ModelConfig(
        input=EmbeddingConfig(vocab=50_368, context=8192, norm=LAYER_NORM_NO_SHIFT),
        encoder=StackConfig(pattern=pattern, norm=LAYER_NORM_NO_SHIFT),
    )


def gemma2() -> ModelConfig:
    """Gemma 2: sandwich norms, softcapped scores and logits, alternating local and global attention."""
    attention = AttentionConfig(
        heads=8, kv_heads=4, head_dim=256, bias="", scale=256**-0.5, softcap=50.0, window=4096, positions=Rotary()
    )
    local_block = BlockConfig(
        width=2304,
        attention=attention,
        feedforward=FeedForwardConfig(hidden=9216, activation="gelu_tanh", gated=True, bias=False),
        norm=GEMMA_RMS_NORM,
        norm_place="sandwich",
    )
    global_block = replace(local_block, attention=replace(attention, window=None))
    return ModelConfig(
        input=EmbeddingConfig(vocab=256_000, context=8192, scale="sqrt_width"),
        decoder=build_stack(26, local_block, global_block, norm=GEMMA_RMS_NORM),
        head=HeadConfig(kind="language_model", softcap=30.0),
        tie="output",
    )


def parallel_block(
    width: int, attention: AttentionConfig, feedforward: FeedForwardConfig, *, shared: bool
) -> BlockConfig:
    """Build a block whose attention and feed-forward read the same input, through one norm if `shared`, else two."""
    return BlockConfig(
        width=width,
        attention=attention,
        feedforward=feedforward,
        residual="parallel_shared" if shared else "parallel",
    )


PYTHIA_BLOCK = parallel_block(
    768, AttentionConfig(heads=12, positions=Rotary(dim=16)), FeedForwardConfig(hidden=3072), shared=False
)
GPTJ_BLOCK = parallel_block(
    4096,
    AttentionConfig(heads=16, bias="", positions=Rotary(dim=64, layout="interleaved")),
    FeedForwardConfig(hidden=16_384, activation="gelu_tanh"),
    shared=True,
)
FALCON_BLOCK = parallel_block(
    4544,
    AttentionConfig(heads=71, kv_heads=1, bias="", positions=Rotary()),
    FeedForwardConfig(hidden=18_176, bias=False),
    shared=True,
)
PHI_BLOCK = parallel_block(
    2560,
    AttentionConfig(heads=32, positions=Rotary(dim=32)),
    FeedForwardConfig(hidden=10_240, activation="gelu_tanh"),
    shared=True,
)
BLOOM_BLOCK = BlockConfig(
    width=1024,
    attention=AttentionConfig(heads=16, positions=Alibi()),
    feedforward=FeedForwardConfig(hidden=4096, activation="gelu_tanh"),
)
MPT_BLOCK = BlockConfig(
    width=4096,
    attention=AttentionConfig(heads=32, bias="", positions=Alibi()),
    feedforward=FeedForwardConfig(hidden=16_384, bias=False),
    norm=LAYER_NORM_NO_SHIFT,
)
OLMO2_BLOCK = BlockConfig(
    width=4096,
    attention=AttentionConfig(
        heads=32, bias="", positions=Rotary(base=500_000.0), qk_norm=OLMO_RMS_NORM, qk_norm_over="width"
    ),
    feedforward=FeedForwardConfig(hidden=11_008, activation="silu", gated=True, bias=False),
    norm=OLMO_RMS_NORM,
    norm_place="output",
)


def bloom() -> ModelConfig:
    """BLOOM: ALiBi, and a norm after the embedding."""
    config = build_decoder_only(BLOOM_BLOCK, vocab=250_880, context=2048, depth=24, norm=NormConfig())
    return replace_input(config, norm=NormConfig())


def electra() -> ModelConfig:
    """The discriminator of ELECTRA: predict for each token whether it was replaced."""
    config = bert(vocab=30_522, width=256, depth=12, heads=4, context=512, head="none")
    head = HeadConfig(kind="tagger", classes=1, transform="gelu", bias="learned")
    return replace(factorize_embedding(config, dim=128), head=head)


def gpt_neo() -> ModelConfig:
    """GPT-Neo: GPT-2 with unscaled scores; every second block has a window of 256."""
    config = gpt(vocab=50_257, width=2048, depth=24, heads=16, context=2048)
    config = replace_attention(config, bias="o", scale=1.0)
    assert config.decoder is not None
    global_block = next(config.decoder.layers())
    local_block = replace(global_block, attention=replace(global_block.attention, window=256))
    return replace(config, decoder=build_stack(24, global_block, local_block, norm=NormConfig()))


def gemma3() -> ModelConfig:
    """Gemma 3: Gemma 2 with QK norm instead of softcaps; five blocks in six have a window of 512."""
    config = vary(gemma2(), vocab=262_144, context=32_768, width=1152, hidden=6912, heads=4, kv_heads=1)
    block = next(config.decoder.layers())
    local_attention = replace(block.attention, softcap=None, window=512, qk_norm=GEMMA_RMS_NORM, positions=Rotary())
    global_attention = replace(local_attention, window=None, positions=Rotary(base=1_000_000.0))
    blocks = [replace(block, attention=local_attention)] * 5 + [replace(block, attention=global_attention)]
    return replace(config, decoder=build_stack(26, *blocks, norm=GEMMA_RMS_NORM), head=LM_HEAD)


def smollm3() -> ModelConfig:
    """SmolLM3: LLaMA without positions in every fourth block."""
    config = llama(
        vocab=128_256, width=2048, depth=1, heads=16, kv_heads=4, hidden=11_008, context=32_768, tie="output"
    )
    block = next(vary(config, rotary_base=2_000_000.0).decoder.layers())
    without_positions = replace(block, attention=replace(block.attention, positions=None))
    return replace(config, decoder=build_stack(36, block, block, block, without_positions, norm=block.norm))


def m2m100() -> ModelConfig:
    """M2M-100: BART with pre-norm, ReLU, and sinusoids that start at 2."""
    config = vary(
        bart(vocab=128_112, width=1024, depth=12, heads=16, context=1024), norm_place="pre", activation="relu"
    )
    embedding = EmbeddingConfig(
        vocab=128_112, context=1024, scale="sqrt_width", positions=Sinusoid(form="fairseq", offset=2)
    )
    return replace(config, input=embedding, target=embedding, head=LM_HEAD)


def deit() -> ModelConfig:
    """DeiT: ViT with a distillation token, and one classifier on the class token and one on the distillation token."""
    config = vit(image=224, patch=16, width=768, depth=12, heads=12, classes=1000)
    assert config.head is not None
    return replace(replace_input(config, distillation_token=True), head=replace(config.head, teacher=True))


COMMAND_R_BLOCK = parallel_block(
    8192,
    AttentionConfig(heads=64, bias="", positions=Rotary(base=500_000.0, layout="interleaved")),
    FeedForwardConfig(hidden=22_528, activation="silu", gated=True, bias=False),
    shared=True,
)
STARCODER2_BLOCK = BlockConfig(
    width=3072,
    attention=AttentionConfig(heads=24, kv_heads=2, positions=Rotary()),
    feedforward=FeedForwardConfig(hidden=12_288, activation="gelu_tanh"),
)


def opt() -> ModelConfig:
    """OPT: GPT-2 with ReLU and positions counted from 2."""
    config = gpt(vocab=50_272, width=768, depth=12, heads=12, context=2048, activation="relu")
    return replace_input(config, positions=Learned(offset=2))
