"""Published models: the configuration, source and exact parameter count of each.

`parameters` counts the model together with the head in its configuration. `unverified` names values not checked against
a source; `parameters` then follows from the configuration and is not a published number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from monoblock.config.families import bart, bert, gpt, llama, t5, vaswani, vit
from monoblock.config.knobs import FieldValues, rebuild, vary
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    NormConfig,
    PatchConfig,
    Repeat,
    Rotary,
    StackConfig,
)
from monoblock.config.preset_blocks import (
    COMMAND_R_BLOCK,
    FALCON_BLOCK,
    GPTJ_BLOCK,
    LAYER_NORM_NO_SHIFT,
    LM_HEAD,
    LM_HEAD_WITH_BIAS,
    MPT_BLOCK,
    OLMO2_BLOCK,
    OLMO_RMS_NORM,
    PHI_BLOCK,
    PYTHIA_BLOCK,
    STARCODER2_BLOCK,
    bloom,
    build_decoder_only,
    deit,
    electra,
    factorize_embedding,
    gemma2,
    gemma3,
    gpt_neo,
    m2m100,
    modernbert,
    opt,
    replace_attention,
    roberta,
    smollm3,
)
from monoblock.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published model: its configuration, parameter count, source and weights."""

    config: ModelConfig
    parameters: int
    source: str
    hub: str | None = None  # the repository of the weights on the Hugging Face hub
    unverified: str = ""


LLAMA_8B = llama(vocab=32_000, width=4096, depth=32, heads=32, kv_heads=8, hidden=14_336, context=32_768, eps=1e-5)
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
        source="a small GPT for 65 characters",
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
        config=vary(LLAMA_8B, vocab=128_256, context=8192, rotary_base=500_000.0),
        parameters=8_030_261_248,
        source="Grattafiori et al. 2024",
        hub="meta-llama/Meta-Llama-3-8B",
    ),
    "mistral-7b": Preset(
        config=vary(LLAMA_8B, window=4096),
        parameters=7_241_732_096,
        source="Jiang et al. 2023",
        hub="mistralai/Mistral-7B-v0.1",
    ),
    "mixtral-8x7b": Preset(
        config=vary(LLAMA_8B, rotary_base=1e6, experts=8),
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
        config=build_decoder_only(PYTHIA_BLOCK, vocab=50_304, context=2048, depth=12, norm=NormConfig(), tied=False),
        parameters=162_322_944,
        source="Biderman et al. 2023",
        hub="EleutherAI/pythia-160m",
    ),
    "gptj-6b": Preset(
        config=build_decoder_only(
            GPTJ_BLOCK, vocab=50_400, context=2048, depth=28, norm=NormConfig(), tied=False, head=LM_HEAD_WITH_BIAS
        ),
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
        config=build_decoder_only(MPT_BLOCK, vocab=50_432, context=2048, depth=32, norm=LAYER_NORM_NO_SHIFT),
        parameters=6_649_286_656,
        source="MosaicML 2023",
        hub="mosaicml/mpt-7b",
    ),
    "falcon-7b": Preset(
        config=build_decoder_only(FALCON_BLOCK, vocab=65_024, context=2048, depth=32, norm=NormConfig()),
        parameters=6_921_720_704,
        source="Almazrouei et al. 2023",
        hub="tiiuae/falcon-7b",
    ),
    "phi-2": Preset(
        config=build_decoder_only(
            PHI_BLOCK, vocab=51_200, context=2048, depth=32, norm=NormConfig(), tied=False, head=LM_HEAD_WITH_BIAS
        ),
        parameters=2_779_683_840,
        source="Javaheripi et al. 2023",
        hub="microsoft/phi-2",
        unverified="rotary fraction 0.4",
    ),
    "olmo2-7b": Preset(
        config=build_decoder_only(OLMO2_BLOCK, vocab=100_352, context=4096, depth=32, norm=OLMO_RMS_NORM, tied=False),
        parameters=7_298_617_344,
        source="OLMo Team 2024",
        hub="allenai/OLMo-2-1124-7B",
        unverified="rotary base 500,000",
    ),
    "albert-xxlarge": Preset(
        config=factorize_embedding(
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
            head=LM_HEAD,
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
        config=replace_attention(
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
        config=build_decoder_only(STARCODER2_BLOCK, vocab=49_152, context=4096, depth=30, norm=NormConfig()),
        parameters=3_030_371_328,
        source="Lozhkov et al. 2024",
        hub="bigcode/starcoder2-3b",
        unverified="rotary base and window",
    ),
    "command-r": Preset(
        config=build_decoder_only(
            replace(COMMAND_R_BLOCK, norm=LAYER_NORM_NO_SHIFT),
            vocab=256_000,
            context=8192,
            depth=40,
            norm=LAYER_NORM_NO_SHIFT,
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


def find_preset(name: str) -> Preset:
    """Return the preset with this name; raise ConfigError if there is none."""
    if not isinstance(name, str) or name not in PRESETS:
        name = str(name)
        raise ConfigError(
            f"there is no preset {name!r}{did_you_mean(name, PRESETS)} (`monoblock ls presets` lists them)"
        )
    return PRESETS[name]


def preset(name: str) -> ModelConfig:
    """Return the configuration of a published model by name."""
    return find_preset(name).config


# -- tiny models -----------------------------------------------------------------------------------------------------

# All sizes differ, so that swapped axes fail a test.
TINY_VOCAB, TINY_HIDDEN, TINY_CONTEXT, TINY_WINDOW, TINY_WIDTH, TINY_HEAD_DIM = 61, 46, 37, 5, 36, 10


def tiny(name: str) -> ModelConfig:
    """Return a preset reduced to tiny sizes, with the same choices, kinds of blocks and attention (MHA, GQA or MQA)."""
    return rebuild(preset(name), _shrink)


def _shrink(part: object, values: FieldValues) -> None:
    for cls, sizes in _TINY_SIZES.items():
        if isinstance(part, cls):
            values.update({key: size for key, size in sizes.items() if values[key] is not None})
    if isinstance(part, AttentionConfig):
        if part.num_kv_heads == part.heads:
            values.update(heads=3, kv_heads=None)
        else:
            values.update(heads=9, kv_heads=1 if part.num_kv_heads == 1 else 3)
        values["head_dim"] = TINY_HEAD_DIM if part.head_dim is not None else None
        values["scale"] = TINY_HEAD_DIM**-0.5 if part.scale not in (None, 1.0) else part.scale
    if isinstance(part, ExpertsConfig):
        values["count"] = part.top_k + 3
    if isinstance(part, StackConfig):
        values["pattern"] = tuple(_shrink_run(run) for run in values["pattern"])
    if isinstance(part, HeadConfig) and part.classes is not None:
        values["classes"] = min(part.classes, 7)


def _shrink_run(run: Repeat) -> Repeat:
    """Keep one of equal neighbours, and repeat a single block at most twice."""
    blocks = tuple(block for block, _ in groupby(run.blocks))
    return replace(run, blocks=blocks, times=min(run.times, 2 if len(blocks) == 1 else 1))


_TINY_SIZES: dict[type, dict[str, int]] = {
    EmbeddingConfig: {"vocab": TINY_VOCAB, "context": TINY_CONTEXT, "dim": 14},
    PatchConfig: {"image": 12, "patch": 4},
    BlockConfig: {"width": TINY_WIDTH},
    AttentionConfig: {"window": TINY_WINDOW},
    FeedForwardConfig: {"hidden": TINY_HIDDEN},
    Rotary: {"dim": 4},
}
