"""Build the configuration of a model family from a few sizes; any knob of knobs.py may be added.

gpt(vocab=65, width=192, depth=6, heads=6, context=256, dropout=0.1)
llama(vocab=32000, width=4096, depth=32, heads=32, hidden=11008, context=2048, kv_heads=8)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from monoblock.config.knobs import (
    EncoderHead,
    HeadSizeKnobs,
    SizeKnobs,
    StyleKnobs,
    build_encoder_head,
    check_positive_int,
    resize_pattern,
    vary,
)
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    Repeat,
    Rotary,
    Sinusoid,
    StackConfig,
)

LAYER_NORM = NormConfig()
RMS_NORM = NormConfig(kind="rms", affine="scale", eps=1e-6)


def build_stack(depth: int, *blocks: BlockConfig, norm: NormConfig | None = None) -> StackConfig:
    """Build a stack of `depth` blocks, repeating the given blocks in order."""
    return StackConfig(pattern=resize_pattern((Repeat(blocks=blocks),), depth), norm=norm)


def _default_hidden(width: int, hidden: int | None = None) -> int:
    """Return `hidden`, or four times the width if it is None."""
    return 4 * check_positive_int("width", width) if hidden is None else hidden


def gpt(*, vocab: int, width: int, depth: int, heads: int, context: int, **knobs: Unpack[SizeKnobs]) -> ModelConfig:
    """GPT-2 (Radford et al. 2019): decoder-only, pre-norm, learned positions, tied output."""
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads),
        feedforward=FeedForwardConfig(hidden=_default_hidden(width), activation="gelu_tanh"),
    )
    config = ModelConfig(
        input=EmbeddingConfig(vocab=vocab, context=context, positions=Learned()),
        decoder=build_stack(depth, block, norm=LAYER_NORM),
        head=HeadConfig(kind="language_model"),
        tie="output",
    )
    return vary(config, **knobs)


def llama(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    hidden: int | None = None,
    context: int,
    **knobs: Unpack[HeadSizeKnobs],
) -> ModelConfig:
    """LLaMA (Touvron et al. 2023): RMS pre-norm, rotary positions, SwiGLU, no biases, untied output."""
    if hidden is None:
        hidden = 32 * -(-check_positive_int("width", width) // 12)  # 8/3 of the width, rounded up to a multiple of 32
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, bias="", positions=Rotary()),
        feedforward=FeedForwardConfig(hidden=hidden, activation="silu", gated=True, bias=False),
        norm=RMS_NORM,
    )
    config = ModelConfig(
        input=EmbeddingConfig(vocab=vocab, context=context),
        decoder=build_stack(depth, block, norm=RMS_NORM),
        head=HeadConfig(kind="language_model"),
    )
    return vary(config, **knobs)


def bert(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    context: int,
    head: EncoderHead = "pooled",
    classes: int | None = None,
    **knobs: Unpack[SizeKnobs],
) -> ModelConfig:
    """BERT (Devlin et al. 2019): encoder-only, post-norm, learned positions, two segments, by default with a pooler."""
    norm = NormConfig(eps=1e-12)
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, mask="full"),
        feedforward=FeedForwardConfig(hidden=_default_hidden(width)),
        norm=norm,
        norm_place="post",
    )
    config = ModelConfig(
        input=EmbeddingConfig(vocab=vocab, context=context, positions=Learned(), segments=2, norm=norm),
        encoder=build_stack(depth, block),
        head=build_encoder_head(head, classes, norm),
        tie="output" if head == "masked_lm" else "none",
    )
    return vary(config, **knobs)


def build_encoder_decoder(
    block: BlockConfig,
    *,
    depth: int,
    source: EmbeddingConfig,
    target: EmbeddingConfig | None,
    norm: NormConfig | None,
    head: HeadConfig,
    tie: Literal["none", "output", "source_target", "three_way"],
    init: InitConfig = InitConfig(),
) -> ModelConfig:
    """Build an encoder and a decoder of `depth` blocks each, those of the decoder causal and with cross-attention."""
    causal, cross = replace(block.attention, mask="causal"), replace(block.attention, positions=None)
    return ModelConfig(
        input=source,
        target=target,
        encoder=build_stack(depth, block, norm=norm),
        decoder=build_stack(depth, replace(block, attention=causal, cross=cross), norm=norm),
        head=head,
        tie=tie,
        init=init,
    )


def vaswani(
    *,
    vocab: int,
    width: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    context: int | None = None,
    target_vocab: int | None = None,
    **knobs: Unpack[HeadSizeKnobs],
) -> ModelConfig:
    """The Transformer (Vaswani et al. 2017): post-norm, ReLU, sinusoids, one matrix for source, target and output.

    With `target_vocab` source and target have separate embeddings, and the output is tied to the target embedding.
    """
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, mask="full"),
        feedforward=FeedForwardConfig(hidden=_default_hidden(width, hidden), activation="relu"),
        norm_place="post",
    )
    source = EmbeddingConfig(vocab=vocab, context=context, scale="sqrt_width", positions=Sinusoid())
    target = None
    if target_vocab is not None:
        target = EmbeddingConfig(vocab=target_vocab, context=context, scale="sqrt_width", positions=Sinusoid())
    config = build_encoder_decoder(
        block,
        depth=depth,
        source=source,
        target=target,
        norm=None,
        head=HeadConfig(kind="language_model"),
        tie="three_way" if target is None else "output",
        init=InitConfig(kind="xavier"),
    )
    return vary(config, **knobs)


def t5(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    hidden: int | None = None,
    head_dim: int | None = None,
    context: int | None = None,
    **knobs: Unpack[StyleKnobs],
) -> ModelConfig:
    """T5 (Raffel et al. 2020): RMS pre-norm, bucketed relative bias, unscaled scores, no biases, one tied matrix."""
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, head_dim=head_dim, bias="", scale=1.0, mask="full", positions=Buckets()),
        feedforward=FeedForwardConfig(hidden=_default_hidden(width, hidden), activation="relu", bias=False),
        norm=RMS_NORM,
    )
    config = build_encoder_decoder(
        block,
        depth=depth,
        source=EmbeddingConfig(vocab=vocab, context=context),
        target=None,
        norm=RMS_NORM,
        head=HeadConfig(kind="language_model", scale="inverse_sqrt_width"),
        tie="three_way",
        init=InitConfig(kind="t5"),
    )
    return vary(config, **knobs)


def bart(
    *,
    vocab: int,
    width: int,
    depth: int,
    heads: int,
    hidden: int | None = None,
    context: int,
    **knobs: Unpack[HeadSizeKnobs],
) -> ModelConfig:
    """BART (Lewis et al. 2020): post-norm, a norm after the embedding, learned positions, three-way tying."""
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, mask="full"),
        feedforward=FeedForwardConfig(hidden=_default_hidden(width, hidden)),
        norm_place="post",
    )
    embedding = EmbeddingConfig(vocab=vocab, context=context, positions=Learned(offset=2), norm=LAYER_NORM)
    config = build_encoder_decoder(
        block,
        depth=depth,
        source=embedding,
        target=embedding,
        norm=None,
        head=HeadConfig(kind="language_model", bias="fixed"),
        tie="three_way",
    )
    return vary(config, **knobs)


def vit(
    *,
    image: int,
    patch: int,
    width: int,
    depth: int,
    heads: int,
    classes: int,
    hidden: int | None = None,
    channels: int = 3,
    **knobs: Unpack[HeadSizeKnobs],
) -> ModelConfig:
    """ViT (Dosovitskiy et al. 2021): patches as tokens, a class token, pre-norm encoder, a classifier.

    With class_token=False the classifier reads the mean of the patches.
    """
    if knobs.get("class_token") is False:
        knobs.setdefault("pooling", "mean")
    norm = NormConfig(eps=1e-12)
    block = BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, mask="full"),
        feedforward=FeedForwardConfig(hidden=_default_hidden(width, hidden)),
        norm=norm,
    )
    config = ModelConfig(
        input=PatchConfig(image=image, patch=patch, channels=channels),
        encoder=build_stack(depth, block, norm=norm),
        head=HeadConfig(kind="classifier", classes=classes, bias="learned"),
    )
    return vary(config, **knobs)
