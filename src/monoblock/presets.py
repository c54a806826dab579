"""DATA: published architectures, each a configuration with its source and its exact parameter count.

The count is of the model with exactly the head the configuration names.  `unverified` names a value of the row that
rests on memory rather than on a source at hand; such a row gives the count of its structure but claims no published
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    StackConfig,
)
from monoblock.errors import ConfigError, did_you_mean
from monoblock.families import bart, bert, gpt, llama, stack, t5, vaswani, vit
from monoblock.knobs import Values, rebuild


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
        values.update(heads=3 if own else 9, kv_heads=None if own else min(part.groups, 3))
        values["head_dim"] = HEAD_DIM if part.head_dim is not None else None
        values["scale"] = HEAD_DIM**-0.5 if part.scale not in (None, 1.0) else part.scale
    if isinstance(part, StackConfig):
        runs = (replace(run, times=min(run.times, 2 if len(run.blocks) == 1 else 1)) for run in values["pattern"])
        values["pattern"] = tuple(runs)
    if isinstance(part, HeadConfig) and part.classes is not None:
        values["classes"] = 7


_SMALL: dict[type, dict[str, int]] = {
    EmbeddingConfig: {"vocab": VOCAB, "context": CONTEXT},
    PatchConfig: {"image": 12, "patch": 4},
    BlockConfig: {"width": WIDTH},
    AttentionConfig: {"window": WINDOW},
    FeedForwardConfig: {"hidden": HIDDEN},
    ExpertsConfig: {"count": 5},
    Rotary: {"dim": 4},
}
