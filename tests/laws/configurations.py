"""Random configurations for property tests: every option of a block, an input or a head, in small models.

Width 12, vocabulary 19, context 29 and hidden size 7 are small and different, and 12 has many divisors.
"""

from typing import get_args

from hypothesis import strategies as st

from monoblock.config.model import (
    Alibi,
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    Repeat,
    Rotary,
    Scaling,
    Sinusoid,
    StackConfig,
)
from monoblock.config.parts import (
    HEADS_WITH_CLASSES,
    NORM_ROWS,
    POSITION_SCHEMES,
    SEQUENCE_HEADS,
    VOCABULARY_HEADS,
    Activation,
)

WIDTH, VOCAB, CONTEXT, HIDDEN = 12, 19, 29, 7


def optional(strategy):
    return st.one_of(st.none(), strategy)


@st.composite
def norm_configs(draw):
    kind = draw(st.sampled_from(("layer", "rms", *NORM_ROWS)))  # the usual ones more often
    affine = draw(st.sampled_from(NORM_ROWS[kind].affine))
    return NormConfig(
        kind=kind,
        affine=affine,
        eps=draw(st.sampled_from((1e-5, 1e-6))),
        unit_offset=draw(st.booleans()),
        cast=draw(st.sampled_from(("before_scale", "after_scale"))),
    )


# The two scalings that depend on the length (dynamic, longrope) are left out: a longer text changes earlier logits.
SCALINGS = (
    Scaling(kind="linear", factor=3.0),
    Scaling(kind="ntk", factor=5.0),
    Scaling(kind="yarn", factor=4.0, original_context=13),
    Scaling(kind="yarn", factor=4.0, original_context=13, truncate=False, attention_factor=1.1),
    Scaling(kind="llama3", factor=8.0, original_context=13),
    Scaling(kind="proportional", factor=1.0),
)


@st.composite
def rotary_configs(draw, size):
    return Rotary(
        base=draw(st.sampled_from((100.0, 10_000.0))),
        dim=draw(st.sampled_from((None, *range(2, size + 1, 2)))),
        layout=draw(st.sampled_from(("half", "interleaved"))),
        scaling=draw(st.sampled_from((None, *SCALINGS))),
    )


BIAS_POSITIONS = (
    *(row.inside for row in POSITION_SCHEMES.values() if row.inside is not None and row.inside.bias),
    Alibi(max_bias=4.0),
    Alibi(form="falcon"),
    Buckets(count=8, max_distance=11),
    Buckets(count=8, max_distance=11, shared=False),
)


POSITION_CHOICES = ("none", *BIAS_POSITIONS, "rotary", "rotary", "rotary", "rotary", "rotary")
RARE_FLAG = st.sampled_from((False, False, False, True))


@st.composite
def attention_configs(draw, heads, mask, positions):
    """`positions` is "none", "rotary", or the configuration of a bias."""
    is_rotary = positions == "rotary"
    sizes = (2, 4, 6) if is_rotary else (2, 4, 5)
    divides_width = WIDTH % heads == 0 and (not is_rotary or WIDTH // heads % 2 == 0)
    head_dim = draw(st.sampled_from((None, *sizes) if divides_width else sizes))
    size = WIDTH // heads if head_dim is None else head_dim
    bias = None if positions == "none" or mask == "cross" else positions
    window = draw(st.sampled_from((None, None, 1, 3, 6))) if mask in ("causal", "full") else None
    is_linear = mask in ("causal", "full") and positions in ("none", "rotary") and draw(RARE_FLAG)
    window = None if is_linear else window
    return AttentionConfig(
        kind="linear" if is_linear else "softmax",
        heads=heads,
        kv_heads=draw(st.sampled_from((None, *(d for d in range(1, heads + 1) if heads % d == 0)))),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from((None, None, 3))),
        bias="".join(letter for letter in "qkvo" if draw(st.booleans())),
        scale=None if is_linear else draw(st.sampled_from((None, None, 1.0, 0.3))),
        mask="full" if mask == "cross" else mask,
        window=window,
        global_tokens=window is not None and draw(st.booleans()),
        random_blocks=draw(st.integers(0, 2)) if window is not None else 0,
        block_size=3,
        positions=draw(rotary_configs(size)) if is_rotary else bias,
        qk_norm=draw(optional(norm_configs())),
        qk_norm_over=draw(st.sampled_from(("head", "each_head", "width"))),
        softcap=5.0 if draw(RARE_FLAG) and not is_linear else None,
        clip=0.7 if draw(RARE_FLAG) else None,
        sinks=draw(RARE_FLAG) and not is_linear,
    )


@st.composite
def feedforward_configs(draw, *, required=True):
    experts, hidden = None, HIDDEN if required else draw(st.sampled_from((HIDDEN, HIDDEN, HIDDEN, 0)))
    if hidden and draw(RARE_FLAG):
        router = draw(st.sampled_from(("softmax_renormalized", "softmax", "top_k_softmax")))
        top_k = draw(st.integers(1, 3))
        experts = ExpertsConfig(count=3, top_k=top_k, router=router, router_bias=draw(st.booleans()))
    return FeedForwardConfig(
        hidden=hidden,
        activation=draw(st.sampled_from(get_args(Activation))),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        experts=experts,
    )


@st.composite
def block_configs(draw, heads, mask, positions, cross):
    norm_place = draw(st.sampled_from(("pre", "post", "output", "sandwich")))
    can_be_parallel = norm_place == "pre" and not cross
    parallel = ("parallel", "parallel_shared") if can_be_parallel else ()
    residual = draw(st.sampled_from(("sequential", "sequential", *parallel, "none")))
    return BlockConfig(
        width=WIDTH,
        attention=draw(attention_configs(heads, mask, positions)),
        feedforward=draw(feedforward_configs(required=residual in parallel)),
        cross=draw(attention_configs(draw(st.sampled_from((1, 3, 4))), "cross", "none")) if cross else None,
        norm=draw(norm_configs()),
        norm_place=norm_place,
        attention_norm=norm_place != "pre" or residual == "parallel_shared" or draw(st.booleans()),
        residual=residual,
        residual_scale=draw(st.sampled_from((1.0, 0.5))),
        layer_scale=draw(st.sampled_from((None, 0.1))),
        dropout=draw(st.sampled_from((0.0, 0.1))),
    )


@st.composite
def stack_configs(draw, mask, *, cross=False):
    heads, positions = draw(st.sampled_from((1, 2, 3, 4, 5, 6))), draw(st.sampled_from(POSITION_CHOICES))
    blocks = block_configs(heads, mask, positions, cross)
    repeats = st.builds(
        lambda blocks_of_repeat, times, tied: Repeat(blocks=tuple(blocks_of_repeat), times=times, tied=tied),
        st.lists(blocks, min_size=1, max_size=2),
        st.integers(1, 2),
        st.booleans(),
    )
    return StackConfig(
        pattern=tuple(draw(st.lists(repeats, min_size=1, max_size=2))), norm=draw(optional(norm_configs()))
    )


@st.composite
def embedding_configs(draw, vocab=VOCAB, dims=(None, None, 5, WIDTH)):
    added = [row.added for row in POSITION_SCHEMES.values()]
    sinusoids = [Sinusoid(form=form, offset=1) for form in ("interleaved", "halves", "fairseq")]
    return EmbeddingConfig(
        vocab=vocab,
        context=CONTEXT,
        dim=draw(st.sampled_from(dims)),
        projection_bias=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 0.5, "sqrt_width"))),
        positions=draw(st.sampled_from((*added, Learned(offset=2), *sinusoids))),
        segments=draw(st.sampled_from((0, 2))),
        norm=draw(optional(norm_configs())),
    )


@st.composite
def head_configs(draw, kinds):
    kind = draw(st.sampled_from(kinds))
    if kind is None:
        return None
    has_vocabulary, is_pooled, has_logits = (
        kind in VOCABULARY_HEADS,
        kind in SEQUENCE_HEADS,
        kind != "pooled",
    )
    return HeadConfig(
        kind=kind,
        classes=draw(st.sampled_from((1, 5))) if kind in HEADS_WITH_CLASSES else None,
        bias=draw(st.sampled_from(("none", "learned", "fixed"))) if has_logits else "none",
        pooling=draw(st.sampled_from(("first", "last", "mean"))) if is_pooled else "first",
        pooler=draw(st.sampled_from(("none", "tanh"))) if is_pooled else "none",
        normalize=kind == "pooled" and draw(st.booleans()),
        transform=draw(st.sampled_from((None, "gelu", "tanh"))) if kind == "masked_lm" else None,
        transform_bias=draw(st.booleans()),
        norm=draw(optional(norm_configs())) if has_vocabulary else None,
        scale=draw(st.sampled_from((1.0, 0.5, "inverse_sqrt_width"))) if has_logits else 1.0,
        softcap=5.0 if has_logits and draw(RARE_FLAG) else None,
    )


INIT_CONFIGS = st.sampled_from([InitConfig(kind=kind) for kind in ("normal", "xavier", "t5", "small")])
ENCODER_HEADS = ("masked_lm", "classifier", "regression", "tagger", "spans", "pooled", None)


@st.composite
def decoder_models(draw):
    head = draw(head_configs(("language_model", "language_model", None)))
    return ModelConfig(
        input=draw(embedding_configs()),
        decoder=draw(stack_configs(draw(st.sampled_from(("causal", "causal", "prefix"))))),
        head=head,
        tie=draw(st.sampled_from(("none", "output"))) if head else "none",
        init=draw(INIT_CONFIGS),
    )


@st.composite
def encoder_models(draw):
    embedding, head = draw(embedding_configs()), draw(head_configs(ENCODER_HEADS))
    has_vocabulary = head is not None and head.kind == "masked_lm"
    tie = draw(st.sampled_from(("none", "output"))) if has_vocabulary else "none"
    return ModelConfig(
        input=embedding, encoder=draw(stack_configs("full")), head=head, tie=tie, init=draw(INIT_CONFIGS)
    )


@st.composite
def encoder_decoder_models(draw):
    source, head = draw(embedding_configs()), draw(head_configs(("language_model",)))
    tie = draw(st.sampled_from(("none", "output", "source_target", "three_way")))
    is_tied = tie in ("source_target", "three_way")
    target = draw(embedding_configs(*((VOCAB, (source.dim,)) if is_tied else (17,))))
    return ModelConfig(
        input=source,
        target=None if is_tied and draw(st.booleans()) else target,
        encoder=draw(stack_configs("full")),
        decoder=draw(stack_configs("causal", cross=True)),
        head=head,
        tie=tie,
        init=draw(INIT_CONFIGS),
    )


@st.composite
def vision_models(draw):
    patches = PatchConfig(
        image=6,
        patch=draw(st.sampled_from((2, 3))),
        channels=draw(st.sampled_from((1, 3))),
        class_token=draw(st.booleans()),
        registers=draw(st.integers(0, 2)),
        bias=draw(st.booleans()),
        positions=draw(st.sampled_from((None, Learned(), Sinusoid(), Sinusoid(form="grid")))),
        norm=draw(optional(norm_configs())),
    )
    head = draw(head_configs(("classifier", "regression", "pooled", None)))
    return ModelConfig(input=patches, encoder=draw(stack_configs("full")), head=head, init=draw(INIT_CONFIGS))


def models_with_decoder():
    return st.one_of(decoder_models(), encoder_decoder_models())


def text_models():
    return st.one_of(decoder_models(), encoder_models(), encoder_decoder_models())


def all_models():
    return st.one_of(decoder_models(), encoder_models(), encoder_decoder_models(), vision_models())
