"""Presets against transformers: the same number of parameters and the same configuration."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from monoblock.accounting.report import account  # noqa: E402
from monoblock.config.presets import preset  # noqa: E402
from monoblock.interop.huggingface.field_rules import config_difference  # noqa: E402
from monoblock.interop.huggingface.load import find_family  # noqa: E402


def gpt2(width, depth, heads):
    config = transformers.GPT2Config(n_embd=width, n_layer=depth, n_head=heads)
    return transformers.GPT2LMHeadModel, config


def bert(**sizes):
    return transformers.BertModel, transformers.BertConfig(**sizes)


def roberta(name, vocab):
    config = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}Model"), config(
        vocab_size=vocab, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
    )


def t5(**sizes):
    return transformers.T5ForConditionalGeneration, transformers.T5Config(**sizes)


def causal(name, **sizes):
    return getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")(**sizes)


def default(name, suffix, **sizes):
    return getattr(transformers, f"{name}{suffix}"), getattr(transformers, f"{name}Config")(**sizes)


def llama(name="Llama", *, vocab, width, depth, heads, kv_heads, hidden, **options):
    return causal(
        name,
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=hidden,
        **options,
    )


REFERENCES = {
    "gpt2": lambda: gpt2(768, 12, 12),
    "gpt2-medium": lambda: gpt2(1024, 24, 16),
    "gpt2-large": lambda: gpt2(1280, 36, 20),
    "gpt2-xl": lambda: gpt2(1600, 48, 25),
    "bert-base": lambda: bert(),
    "bert-large": lambda: bert(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    "roberta-base": lambda: roberta("Roberta", 50_265),
    "xlm-roberta-base": lambda: roberta("XLMRoberta", 250_002),
    "distilbert": lambda: (transformers.DistilBertModel, transformers.DistilBertConfig()),
    "modernbert-base": lambda: (transformers.ModernBertModel, transformers.ModernBertConfig()),
    "t5-small": lambda: t5(),
    "t5-base": lambda: t5(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "bart-base": lambda: (
        transformers.BartForConditionalGeneration,
        transformers.BartConfig(
            d_model=768,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_ffn_dim=3072,
        ),
    ),
    "llama-7b": lambda: llama(vocab=32_000, width=4096, depth=32, heads=32, kv_heads=32, hidden=11_008),
    "llama2-70b": lambda: llama(
        vocab=32_000, width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, rms_norm_eps=1e-5
    ),
    "llama3-8b": lambda: llama(
        vocab=128_256,
        width=4096,
        depth=32,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
    ),
    "smollm2-135m": lambda: llama(
        vocab=49_152,
        width=576,
        depth=30,
        heads=9,
        kv_heads=3,
        hidden=1536,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
    ),
    "mistral-7b": lambda: llama(
        "Mistral", vocab=32_000, width=4096, depth=32, heads=32, kv_heads=8, hidden=14_336, rms_norm_eps=1e-5
    ),
    "mixtral-8x7b": lambda: llama(
        "Mixtral",
        vocab=32_000,
        width=4096,
        depth=32,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-0.6b": lambda: llama(
        "Qwen3",
        vocab=151_936,
        width=1024,
        depth=28,
        heads=16,
        kv_heads=8,
        hidden=3072,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e6,
    ),
    "gemma2-2b": lambda: llama(
        "Gemma2", vocab=256_000, width=2304, depth=26, heads=8, kv_heads=4, hidden=9216, head_dim=256
    ),
    "olmo2-7b": lambda: llama(
        "Olmo2",
        vocab=100_352,
        width=4096,
        depth=32,
        heads=32,
        kv_heads=32,
        hidden=11_008,
        rms_norm_eps=1e-6,
        rope_theta=500_000.0,
    ),
    "pythia-160m": lambda: causal(
        "GPTNeoX",
        vocab_size=50_304,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
    ),
    "gptj-6b": lambda: causal("GPTJ"),
    "bloom-560m": lambda: causal("Bloom", vocab_size=250_880, hidden_size=1024, n_layer=24, n_head=16),
    "mpt-7b": lambda: causal("Mpt", vocab_size=50_432, d_model=4096, n_layers=32, n_heads=32),
    "falcon-7b": lambda: causal("Falcon"),
    "phi-2": lambda: causal(
        "Phi",
        vocab_size=51_200,
        hidden_size=2560,
        intermediate_size=10_240,
        num_hidden_layers=32,
        num_attention_heads=32,
        partial_rotary_factor=0.4,
    ),
    "albert-xxlarge": lambda: default("Albert", "Model"),
    "electra-small": lambda: default("Electra", "ForPreTraining"),
    "mt5-small": lambda: default("MT5", "ForConditionalGeneration"),
    "m2m100-418m": lambda: default("M2M100", "ForConditionalGeneration", vocab_size=128_112),
    "gpt-neo-1.3b": lambda: causal("GPTNeo"),
    "opt-125m": lambda: causal("OPT"),
    "qwen2-0.5b": lambda: llama(
        "Qwen2",
        vocab=151_936,
        width=896,
        depth=24,
        heads=14,
        kv_heads=2,
        hidden=4864,
        tie_word_embeddings=True,
        rope_theta=1e6,
    ),
    "smollm3-3b": lambda: causal("SmolLM3"),
    "starcoder2-3b": lambda: causal("Starcoder2"),
    "command-r": lambda: causal("Cohere"),
    "gemma3-1b": lambda: (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(
            vocab_size=262_144,
            hidden_size=1152,
            intermediate_size=6912,
            num_attention_heads=4,
            num_key_value_heads=1,
            sliding_window=512,
        ),
    ),
    "persimmon-8b": lambda: causal("Persimmon"),
    "deit-base": lambda: default("DeiT", "ForImageClassificationWithTeacher", num_labels=1000),
    "vit-b16": lambda: (transformers.ViTForImageClassification, transformers.ViTConfig(num_labels=1000)),
}


UNTIED = {"mt5-small"}  # the published file has a separate output matrix, which the class by itself would tie


@pytest.mark.parametrize("name", REFERENCES)
def test_a_preset_has_as_many_parameters_as_the_reference_model(name):
    model, config = REFERENCES[name]()
    with torch.device("meta"):
        built = model(config)
    if getattr(config, "tie_word_embeddings", False):
        built.tie_weights()
    count = sum(parameter.numel() for parameter in built.parameters())
    assert count + (config.vocab_size * config.d_model if name in UNTIED else 0) == account(name).parameters


@pytest.mark.parametrize("name", REFERENCES)
def test_a_preset_equals_its_published_configuration(name):
    model, config = REFERENCES[name]()
    fields = json.loads(config.to_json_string()) | {"architectures": [model.__name__]}
    family, class_name = find_family(fields)
    tied = bool(fields.get("tie_word_embeddings", family.tied_by_default)) and name not in UNTIED
    converted = family.build_config(family.config_tree(fields, class_name), fields, tied=tied)
    assert config_difference(converted, preset(name)) is None
