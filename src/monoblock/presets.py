"""DATA: published architectures, each a configuration with its source and its exact parameter count.

The count is of the model with exactly the head the configuration names.  `unverified` names a value of the row that
rests on memory rather than on a source at hand; such a row gives the count of its structure but claims no published
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from monoblock.config import (
    Alibi,
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    Repeat,
    Rotary,
    Sinusoid,
    StackConfig,
)
from monoblock.errors import ConfigError, did_you_mean
from monoblock.families import bart, bert, gpt, llama, stack, t5, vaswani, vit
from monoblock.knobs import Values, rebuild, vary


@dataclass(frozen=True, kw_only=True)
class Preset:
    config: ModelConfig
    parameters: int
    source: str
    hub: str | None = None  # where the weights are published
    unverified: str = ""


LANGUAGE_MODEL = HeadConfig(kind="language_model")
NO_SHIFT = NormConfig(affine="scale")
GEMMA_RMS = NormConfig(kind="rms", affine="scale", eps=1e-6, unit_offset=True, cast="after_scale")
OLMO_RMS = NormConfig(kind="rms", affine="scale", eps=1e-6, cast="after_scale")


def decoder(
    block: BlockConfig,
    *,
    vocab: int,
    context: int,
    depth: int,
    norm: NormConfig,
    tied: bool = True,
    head: HeadConfig = LANGUAGE_MODEL,
) -> ModelConfig:
    return ModelConfig(
        input=EmbeddingConfig(vocab=vocab, context=context),
        decoder=stack(depth, block, norm=norm),
        head=head,
        tie="output" if tied else "none",
    )


def roberta(vocab: int) -> ModelConfig:
    """BERT's encoder with positions from 2 on and a single segment."""
    config = bert(vocab=vocab, width=768, depth=12, heads=12, context=512, segments=1, eps=1e-5)
    return replace(config, input=replace(config.input, positions=Learned(offset=2)))


def modernbert() -> ModelConfig:
    """Pre-norm with rotary positions; every third block sees all, the others 64 places to each side."""
    everywhere = BlockConfig(
        width=768,
        attention=AttentionConfig(heads=12, bias="", mask="full", positions=Rotary(base=160_000.0)),
        feedforward=FeedForwardConfig(hidden=1152, activation="gelu", gated=True, bias=False),
        norm=NO_SHIFT,
    )
    near = replace(everywhere.attention, window=65, positions=Rotary(base=10_000.0))
    local = replace(everywhere, attention=near)
    first = replace(everywhere, attention_norm=False)
    pattern = (Repeat(blocks=(first,)), Repeat(blocks=(local, local, everywhere), times=7))
    return ModelConfig(
        input=EmbeddingConfig(vocab=50_368, context=8192, norm=NO_SHIFT),
        encoder=StackConfig(pattern=pattern, norm=NO_SHIFT),
    )


def gemma2() -> ModelConfig:
    """Sandwich norms, softcapped scores and logits, local and global blocks in turn."""
    attention = AttentionConfig(
        heads=8, kv_heads=4, head_dim=256, bias="", scale=256**-0.5, softcap=50.0, window=4096, positions=Rotary()
    )
    local = BlockConfig(
        width=2304,
        attention=attention,
        feedforward=FeedForwardConfig(hidden=9216, activation="gelu_tanh", gated=True, bias=False),
        norm=GEMMA_RMS,
        norm_place="sandwich",
    )
    everywhere = replace(local, attention=replace(attention, window=None))
    return ModelConfig(
        input=EmbeddingConfig(vocab=256_000, context=8192, scale="sqrt_width"),
        decoder=stack(26, local, everywhere, norm=GEMMA_RMS),
        head=HeadConfig(kind="language_model", softcap=30.0),
        tie="output",
    )


def parallel(width: int, attention: AttentionConfig, feedforward: FeedForwardConfig, *, shared: bool) -> BlockConfig:
    """Attention and feed-forward read the same input and are added together."""
    return BlockConfig(
        width=width,
        attention=attention,
        feedforward=feedforward,
        residual="parallel_shared" if shared else "parallel",
    )


PYTHIA = parallel(
    768, AttentionConfig(heads=12, positions=Rotary(dim=16)), FeedForwardConfig(hidden=3072), shared=False
)
GPTJ = parallel(
    4096,
    AttentionConfig(heads=16, bias="", positions=Rotary(dim=64, layout="interleaved")),
    FeedForwardConfig(hidden=16_384, activation="gelu_tanh"),
    shared=True,
)
FALCON = parallel(
    4544,
    AttentionConfig(heads=71, kv_heads=1, bias="", positions=Rotary()),
    FeedForwardConfig(hidden=18_176, bias=False),
    shared=True,
)
PHI = parallel(
    2560,
    AttentionConfig(heads=32, positions=Rotary(dim=32)),
    FeedForwardConfig(hidden=10_240, activation="gelu_tanh"),
    shared=True,
)
BLOOM = BlockConfig(
    width=1024,
    attention=AttentionConfig(heads=16, positions=Alibi()),
    feedforward=FeedForwardConfig(hidden=4096, activation="gelu_tanh"),
)
MPT = BlockConfig(
    width=4096,
    attention=AttentionConfig(heads=32, bias="", positions=Alibi()),
    feedforward=FeedForwardConfig(hidden=16_384, bias=False),
    norm=NO_SHIFT,
)
OLMO2 = BlockConfig(
    width=4096,
    attention=AttentionConfig(
        heads=32, bias="", positions=Rotary(base=500_000.0), qk_norm=OLMO_RMS, qk_norm_over="width"
    ),
    feedforward=FeedForwardConfig(hidden=11_008, activation="silu", gated=True, bias=False),
    norm=OLMO_RMS,
    norm_place="output",
)
HEAD_BIAS = HeadConfig(kind="language_model", bias="learned")


def bloom() -> ModelConfig:
    config = decoder(BLOOM, vocab=250_880, context=2048, depth=24, norm=NormConfig())
    return replace(config, input=replace(config.input, norm=NormConfig()))


def reading(config: ModelConfig, **fields: Any) -> ModelConfig:
    """The same with some fields of its input changed."""
    return replace(config, input=replace(config.input, **fields))


def factorised(config: ModelConfig, *, dim: int, tied: bool = False) -> ModelConfig:
    """An encoder on an embedding smaller than its width; `tied`: one block run again and again (ALBERT)."""
    encoder = config.encoder
    assert encoder is not None
    pattern = tuple(replace(run, tied=tied) for run in encoder.pattern)
    return replace(reading(config, dim=dim), encoder=replace(encoder, pattern=pattern))


def attention_with(config: ModelConfig, **fields: object) -> ModelConfig:
    """The same with some fields of every self-attention changed."""

    def edit(part: object, values: Values) -> None:
        if isinstance(part, BlockConfig):
            values["attention"] = replace(values["attention"], **fields)

    return rebuild(config, edit)


def electra() -> ModelConfig:
    """The discriminator: for each token whether it was replaced."""
    config = bert(vocab=30_522, width=256, depth=12, heads=4, context=512, head="none")
    head = HeadConfig(kind="tagger", classes=1, transform="gelu", bias="learned")
    return replace(factorised(config, dim=128), head=head)


def gpt_neo() -> ModelConfig:
    """GPT-2's block with unscaled scores; every second one sees 256 places."""
    config = gpt(vocab=50_257, width=2048, depth=24, heads=16, context=2048)
    everywhere = attention_with(config, bias="o", scale=1.0)
    assert everywhere.decoder is not None
    far = next(everywhere.decoder.layers())
    near = replace(far, attention=replace(far.attention, window=256))
    return replace(everywhere, decoder=stack(24, far, near, norm=NormConfig()))


def gemma3() -> ModelConfig:
    """Gemma 2 with normed queries and keys in place of the softcap; five blocks in six see 512 places."""
    config = vary(gemma2(), vocab=262_144, context=32_768, width=1152, hidden=6912, heads=4, kv_heads=1)
    block = next(config.decoder.layers())  # type: ignore[union-attr]
    near = replace(block.attention, softcap=None, window=512, qk_norm=GEMMA_RMS, positions=Rotary())
    far = replace(near, window=None, positions=Rotary(base=1_000_000.0))
    local, everywhere = replace(block, attention=near), replace(block, attention=far)
    pattern = stack(26, *[local] * 5, everywhere, norm=GEMMA_RMS)
    return replace(config, decoder=pattern, head=LANGUAGE_MODEL)


def smollm3() -> ModelConfig:
    """LLaMA, every fourth block of which turns nothing."""
    config = llama(
        vocab=128_256, width=2048, depth=1, heads=16, kv_heads=4, hidden=11_008, context=32_768, tie="output"
    )
    block = next(vary(config, rotary_base=2_000_000.0).decoder.layers())  # type: ignore[union-attr]
    still = replace(block, attention=replace(block.attention, positions=None))
    return replace(config, decoder=stack(36, block, block, block, still, norm=block.norm))


def m2m100() -> ModelConfig:
    """BART's block normed first, sinusoids that begin at 2."""
    config = vary(
        bart(vocab=128_112, width=1024, depth=12, heads=16, context=1024), norm_place="pre", activation="relu"
    )
    side = EmbeddingConfig(
        vocab=128_112, context=1024, scale="sqrt_width", positions=Sinusoid(form="fairseq", offset=2)
    )
    return replace(config, input=side, target=side, head=LANGUAGE_MODEL)


def deit() -> ModelConfig:
    """ViT with a token that learned from a teacher, and a classifier on either."""
    config = vit(image=224, patch=16, width=768, depth=12, heads=12, classes=1000)
    assert config.head is not None
    return replace(reading(config, distillation_token=True), head=replace(config.head, teacher=True))


COMMAND_R = parallel(
    8192,
    AttentionConfig(heads=64, bias="", positions=Rotary(base=500_000.0, layout="interleaved")),
    FeedForwardConfig(hidden=22_528, activation="silu", gated=True, bias=False),
    shared=True,
)
STARCODER2 = BlockConfig(
    width=3072,
    attention=AttentionConfig(heads=24, kv_heads=2, positions=Rotary()),
    feedforward=FeedForwardConfig(hidden=12_288, activation="gelu_tanh"),
)


def opt() -> ModelConfig:
    config = gpt(vocab=50_272, width=768, depth=12, heads=12, context=2048, activation="relu")
    return reading(config, positions=Learned(offset=2))


PRESETS: dict[str, Preset] = {
    "vaswani-base": Preset(
        config=vaswani(vocab=37_000, dropout=0.1),
        parameters=63_082_496,
        source="Vaswani et al. 2017, table 3 (65 M), 37,000 shared tokens",
    ),
    "vaswani-big": Preset(
        config=vaswani(vocab=37_000, width=1024, heads=16, dropout=0.3),
        parameters=214_245_376,
        source="Vaswani et al. 2017, table 3 (213 M), 37,000 shared tokens",
    ),
    "gpt-tiny": Preset(
        config=gpt(vocab=65, width=192, depth=6, heads=6, context=256),
        parameters=2_731_200,
        source="lecture-size GPT: 192 wide, 6 deep, 6 heads, 256 long, 65 characters",
    ),
    "gpt2": Preset(
        config=gpt(vocab=50_257, width=768, depth=12, heads=12, context=1024),
        parameters=124_439_808,
        source="Radford et al. 2019",
        hub="openai-community/gpt2",
    ),
    "gpt2-medium": Preset(
        config=gpt(vocab=50_257, width=1024, depth=24, heads=16, context=1024),
        parameters=354_823_168,
        source="Radford et al. 2019",
        hub="openai-community/gpt2-medium",
    ),
    "gpt2-large": Preset(
        config=gpt(vocab=50_257, width=1280, depth=36, heads=20, context=1024),
        parameters=774_030_080,
        source="Radford et al. 2019",
        hub="openai-community/gpt2-large",
    ),
    "gpt2-xl": Preset(
        config=gpt(vocab=50_257, width=1600, depth=48, heads=25, context=1024),
        parameters=1_557_611_200,
        source="Radford et al. 2019",
        hub="openai-community/gpt2-xl",
    ),
    "gpt3-175b": Preset(
        config=gpt(vocab=50_257, width=12_288, depth=96, heads=96, context=2048),
        parameters=174_604_259_328,
        source="Brown et al. 2020, table 2.1 (175.0 B)",
        unverified="dense attention throughout: the paper alternates dense and banded sparse layers",
    ),
    "bert-base": Preset(
        config=bert(vocab=30_522, width=768, depth=12, heads=12, context=512),
        parameters=109_482_240,
        source="Devlin et al. 2019, uncased, with pooler",
        hub="google-bert/bert-base-uncased",
    ),
    "bert-large": Preset(
        config=bert(vocab=30_522, width=1024, depth=24, heads=16, context=512),
        parameters=335_141_888,
        source="Devlin et al. 2019, uncased, with pooler",
        hub="google-bert/bert-large-uncased",
    ),
    "roberta-base": Preset(
        config=roberta(50_265),
        parameters=124_645_632,
        source="Liu et al. 2019, with pooler",
        hub="FacebookAI/roberta-base",
        unverified="norm eps 1e-5",
    ),
    "xlm-roberta-base": Preset(
        config=roberta(250_002),
        parameters=278_043_648,
        source="Conneau et al. 2020, with pooler",
        hub="FacebookAI/xlm-roberta-base",
        unverified="norm eps 1e-5",
    ),
    "distilbert": Preset(
        config=bert(vocab=30_522, width=768, depth=6, heads=12, context=512, head="none", segments=0),
        parameters=66_362_880,
        source="Sanh et al. 2019, no head",
        hub="distilbert/distilbert-base-uncased",
    ),
    "modernbert-base": Preset(
        config=modernbert(),
        parameters=149_014_272,
        source="Warner et al. 2024, no head",
        hub="answerdotai/ModernBERT-base",
    ),
    "t5-small": Preset(
        config=t5(vocab=32_128, width=512, depth=6, heads=8, context=512),
        parameters=60_506_624,
        source="Raffel et al. 2020",
        hub="google-t5/t5-small",
    ),
    "t5-base": Preset(
        config=t5(vocab=32_128, width=768, depth=12, heads=12, context=512),
        parameters=222_903_552,
        source="Raffel et al. 2020",
        hub="google-t5/t5-base",
    ),
    "bart-base": Preset(
        config=bart(vocab=50_265, width=768, depth=6, heads=12, context=1024),
        parameters=139_420_416,
        source="Lewis et al. 2020",
        hub="facebook/bart-base",
    ),
    "llama-7b": Preset(
        config=llama(vocab=32_000, width=4096, depth=32, heads=32, hidden=11_008, context=2048),
        parameters=6_738_415_616,
        source="Touvron et al. 2023",
    ),
    "llama2-70b": Preset(
        config=llama(vocab=32_000, width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, context=4096, eps=1e-5),
        parameters=68_976_648_192,
        source="Touvron et al. 2023b",
        hub="meta-llama/Llama-2-70b-hf",
    ),
    "llama3-8b": Preset(
        config=llama(
            vocab=128_256,
            width=4096,
            depth=32,
            heads=32,
            kv_heads=8,
            hidden=14_336,
            context=8192,
            eps=1e-5,
            rotary_base=500_000.0,
        ),
        parameters=8_030_261_248,
        source="Grattafiori et al. 2024",
        hub="meta-llama/Meta-Llama-3-8B",
    ),
    "mistral-7b": Preset(
        config=llama(
            vocab=32_000,
            width=4096,
            depth=32,
            heads=32,
            kv_heads=8,
            hidden=14_336,
            context=32_768,
            eps=1e-5,
            window=4096,
        ),
        parameters=7_241_732_096,
        source="Jiang et al. 2023",
        hub="mistralai/Mistral-7B-v0.1",
    ),
    "mixtral-8x7b": Preset(
        config=llama(
            vocab=32_000,
            width=4096,
            depth=32,
            heads=32,
            kv_heads=8,
            hidden=14_336,
            context=32_768,
            eps=1e-5,
            rotary_base=1e6,
            experts=8,
        ),
        parameters=46_702_792_704,
        source="Jiang et al. 2024",
        hub="mistralai/Mixtral-8x7B-v0.1",
    ),
    "smollm2-135m": Preset(
        config=llama(
            vocab=49_152,
            width=576,
            depth=30,
            heads=9,
            kv_heads=3,
            hidden=1536,
            context=8192,
            eps=1e-5,
            rotary_base=100_000.0,
            tie="output",
        ),
        parameters=134_515_008,
        source="Allal et al. 2025",
        hub="HuggingFaceTB/SmolLM2-135M",
    ),
    "qwen3-0.6b": Preset(
        config=llama(
            vocab=151_936,
            width=1024,
            depth=28,
            heads=16,
            kv_heads=8,
            head_dim=128,
            hidden=3072,
            context=40_960,
            rotary_base=1e6,
            qk_norm=True,
            tie="output",
        ),
        parameters=596_049_920,
        source="Yang et al. 2025",
        hub="Qwen/Qwen3-0.6B",
        unverified="tied output",
    ),
    "gemma2-2b": Preset(
        config=gemma2(),
        parameters=2_614_341_888,
        source="Gemma Team 2024",
        hub="google/gemma-2-2b",
    ),
    "pythia-160m": Preset(
        config=decoder(PYTHIA, vocab=50_304, context=2048, depth=12, norm=NormConfig(), tied=False),
        parameters=162_322_944,
        source="Biderman et al. 2023",
        hub="EleutherAI/pythia-160m",
    ),
    "gptj-6b": Preset(
        config=decoder(GPTJ, vocab=50_400, context=2048, depth=28, norm=NormConfig(), tied=False, head=HEAD_BIAS),
        parameters=6_050_882_784,
        source="Wang and Komatsuzaki 2021",
        hub="EleutherAI/gpt-j-6b",
    ),
    "bloom-560m": Preset(
        config=bloom(),
        parameters=559_214_592,
        source="Le Scao et al. 2022",
        hub="bigscience/bloom-560m",
    ),
    "mpt-7b": Preset(
        config=decoder(MPT, vocab=50_432, context=2048, depth=32, norm=NO_SHIFT),
        parameters=6_649_286_656,
        source="MosaicML 2023",
        hub="mosaicml/mpt-7b",
    ),
    "falcon-7b": Preset(
        config=decoder(FALCON, vocab=65_024, context=2048, depth=32, norm=NormConfig()),
        parameters=6_921_720_704,
        source="Almazrouei et al. 2023",
        hub="tiiuae/falcon-7b",
    ),
    "phi-2": Preset(
        config=decoder(PHI, vocab=51_200, context=2048, depth=32, norm=NormConfig(), tied=False, head=HEAD_BIAS),
        parameters=2_779_683_840,
        source="Javaheripi et al. 2023",
        hub="microsoft/phi-2",
        unverified="rotary fraction 0.4",
    ),
    "olmo2-7b": Preset(
        config=decoder(OLMO2, vocab=100_352, context=4096, depth=32, norm=OLMO_RMS, tied=False),
        parameters=7_298_617_344,
        source="OLMo Team 2024",
        hub="allenai/OLMo-2-1124-7B",
        unverified="rotary base 500,000",
    ),
    "albert-xxlarge": Preset(
        config=factorised(
            bert(vocab=30_000, width=4096, depth=12, heads=64, context=512, activation="gelu_tanh"), dim=128, tied=True
        ),
        parameters=222_595_584,
        source="Lan et al. 2020, with pooler",
        hub="albert/albert-xxlarge-v2",
    ),
    "electra-small": Preset(
        config=electra(),
        parameters=13_549_057,
        source="Clark et al. 2020, discriminator",
        hub="google/electra-small-discriminator",
    ),
    "mt5-small": Preset(
        config=replace(
            t5(
                vocab=250_112, width=512, depth=8, heads=6, hidden=1024, head_dim=64, activation="gelu_tanh", gated=True
            ),
            head=LANGUAGE_MODEL,
            tie="source_target",
        ),
        parameters=300_176_768,
        source="Xue et al. 2021",
        hub="google/mt5-small",
    ),
    "m2m100-418m": Preset(
        config=m2m100(),
        parameters=483_905_536,
        source="Fan et al. 2020",
        hub="facebook/m2m100_418M",
    ),
    "gpt-neo-1.3b": Preset(
        config=gpt_neo(),
        parameters=1_315_575_808,
        source="Black et al. 2021",
        hub="EleutherAI/gpt-neo-1.3B",
    ),
    "opt-125m": Preset(
        config=opt(),
        parameters=125_239_296,
        source="Zhang et al. 2022",
        hub="facebook/opt-125m",
    ),
    "qwen2-0.5b": Preset(
        config=attention_with(
            llama(
                vocab=151_936,
                width=896,
                depth=24,
                heads=14,
                kv_heads=2,
                hidden=4864,
                context=131_072,
                rotary_base=1e6,
                tie="output",
            ),
            bias="qkv",
        ),
        parameters=494_032_768,
        source="Yang et al. 2024",
        hub="Qwen/Qwen2-0.5B",
        unverified="all sizes",
    ),
    "smollm3-3b": Preset(
        config=smollm3(),
        parameters=3_075_098_624,
        source="Bakouch et al. 2025",
        hub="HuggingFaceTB/SmolLM3-3B",
        unverified="rotary base 2,000,000",
    ),
    "starcoder2-3b": Preset(
        config=decoder(STARCODER2, vocab=49_152, context=4096, depth=30, norm=NormConfig()),
        parameters=3_030_371_328,
        source="Lozhkov et al. 2024",
        hub="bigcode/starcoder2-3b",
        unverified="rotary base and window",
    ),
    "command-r": Preset(
        config=decoder(
            replace(COMMAND_R, norm=NO_SHIFT),
            vocab=256_000,
            context=8192,
            depth=40,
            norm=NO_SHIFT,
            head=HeadConfig(kind="language_model", scale=0.0625),
        ),
        parameters=34_980_831_232,
        source="Cohere 2024",
        hub="CohereForAI/c4ai-command-r-v01",
        unverified="rotary base and context",
    ),
    "gemma3-1b": Preset(
        config=gemma3(),
        parameters=999_885_952,
        source="Gemma Team 2025",
        hub="google/gemma-3-1b-pt",
        unverified="all sizes",
    ),
    "deit-base": Preset(
        config=deit(),
        parameters=87_338_192,
        source="Touvron et al. 2021, 1,000 classes",
        hub="facebook/deit-base-distilled-patch16-224",
    ),
    "persimmon-8b": Preset(
        config=gpt(
            vocab=262_144,
            width=4096,
            depth=36,
            heads=64,
            context=16_384,
            activation="relu2",
            positions="rotary",
            rotary_dim=32,
            qk_norm=True,
            tie="none",
        ),
        parameters=9_397_175_296,
        source="Elsen et al. 2023",
        hub="adept/persimmon-8b-base",
        unverified="rotary base",
    ),
    "vit-b16": Preset(
        config=vit(image=224, patch=16, width=768, depth=12, heads=12, classes=1000),
        parameters=86_567_656,
        source="Dosovitskiy et al. 2021, 1,000 classes",
        hub="google/vit-base-patch16-224",
    ),
}


def find(name: str) -> Preset:
    """The row of a preset, by name."""
    if not isinstance(name, str) or name not in PRESETS:
        name = str(name)
        raise ConfigError(
            f"there is no preset {name!r}{did_you_mean(name, PRESETS)} (`monoblock ls presets` lists them)"
        )
    return PRESETS[name]


def preset(name: str) -> ModelConfig:
    """A published architecture by name."""
    return find(name).config


# -- the same structures at toy size ------------------------------------------------------------------------------

# Sizes are different from each other, so that no swapped axis passes a test, and odd where the structure allows.
VOCAB, HIDDEN, CONTEXT, WINDOW, WIDTH, HEAD_DIM = 61, 46, 37, 5, 36, 10


def tiny(name: str) -> ModelConfig:
    """A preset shrunk to toy size, its structure kept: every choice, every kind of block, MHA, GQA or MQA."""
    return rebuild(preset(name), _shrink)


def _shrink(part: object, values: Values) -> None:
    for cls, sizes in _SMALL.items():
        if isinstance(part, cls):
            values.update({key: size for key, size in sizes.items() if values[key] is not None})
    if isinstance(part, AttentionConfig):
        own = part.groups == part.heads  # each query head has keys of its own
        values.update(heads=3 if own else 9, kv_heads=None if own else 1 if part.groups == 1 else 3)
        values["head_dim"] = HEAD_DIM if part.head_dim is not None else None
        values["scale"] = HEAD_DIM**-0.5 if part.scale not in (None, 1.0) else part.scale
    if isinstance(part, StackConfig):
        runs = (replace(run, times=min(run.times, 2 if len(run.blocks) == 1 else 1)) for run in values["pattern"])
        values["pattern"] = tuple(runs)
    if isinstance(part, HeadConfig) and part.classes is not None:
        values["classes"] = min(part.classes, 7)


_SMALL: dict[type, dict[str, int]] = {
    EmbeddingConfig: {"vocab": VOCAB, "context": CONTEXT, "dim": 14},
    PatchConfig: {"image": 12, "patch": 4},
    BlockConfig: {"width": WIDTH},
    AttentionConfig: {"window": WINDOW},
    FeedForwardConfig: {"hidden": HIDDEN},
    ExpertsConfig: {"count": 5},
    Rotary: {"dim": 4},
}
