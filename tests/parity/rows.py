"""DATA: published classes at toy size, with the fields of their own configurations.

Sizes differ from each other and are odd where the class allows: three key/value heads, a head size that is not width /
heads, partly rotated heads, a prime vocabulary.  Other fields have the defaults of the class.
"""

from dataclasses import dataclass, replace
from typing import Any

from monoblock.interop.huggingface.load import FAMILIES

VOCAB, HIDDEN, CONTEXT, WINDOW, WIDTH, HEAD_DIM, EMBEDDING_DIM = 61, 46, 37, 5, 36, 10, 14


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published class, the fields of its configuration, and how it is compared."""

    class_name: str
    config_fields: dict[str, Any]
    accepts_position_ids: bool = True  # otherwise the class counts positions as we do, or only distances matter
    padding_sides: tuple[str, ...] = ("left", "right")
    extra_tolerance: float = 0.0  # for a constant that the class writes with few digits
    stores_tied_output: bool = False  # although its configuration declares it tied
    eos_token_id: int | None = None  # the id of the last token, which occurs nowhere else
    attn_implementation: str = "eager"
    requires_tying: bool = False  # refused if untied: its output would be projected, as in no published file


STANDARD = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": CONTEXT,
}
GROUPED_QUERY = STANDARD | {"num_attention_heads": 6, "num_key_value_heads": 3}
GROUPED_WITH_HEAD_DIM = GROUPED_QUERY | {"head_dim": HEAD_DIM}
GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT}
ROBERTA = STANDARD | {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
MPNET = STANDARD | {"max_position_embeddings": CONTEXT + 2, "layer_norm_eps": 1e-5}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": WIDTH,
    "hidden_dim": HIDDEN,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": CONTEXT,
}
MODERNBERT = STANDARD | {
    "num_hidden_layers": 4,
    "local_attention": 2 * (WINDOW - 1),
    "cls_token_id": 0,
    "sep_token_id": 2,
}
SMALL_EMBEDDING = STANDARD | {"embedding_size": EMBEDDING_DIM}
T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": HEAD_DIM,
    "d_ff": HIDDEN,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 17,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN + 7,
    "max_position_embeddings": CONTEXT,
}
NEO = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_layers": 3,
    "num_heads": 3,
    "max_position_embeddings": CONTEXT,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": WINDOW,
}
BLOOM = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 3, "n_head": 6}
MPT = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 3, "n_heads": 6, "max_seq_len": CONTEXT}
FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "ffn_hidden_size": HIDDEN,
}
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "ffn_dim": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": CONTEXT,
}
XGLM = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "ffn_dim": HIDDEN,
    "num_layers": 2,
    "attention_heads": 3,
    "max_position_embeddings": CONTEXT,
}
IMAGE = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}
IMAGE_CLASSIFIER = IMAGE | {"num_labels": 7}
ONE_NUMBER = {"problem_type": "regression", "num_labels": 1}
THREE_NUMBERS = {"problem_type": "regression", "num_labels": 3}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}


def rope(base: float = 10_000.0, kind: str = "default", **words: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **words}}


LLAMA3 = rope(
    500_000.0,
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
LONGROPE = rope(
    kind="longrope",
    partial_rotary_factor=0.67,
    short_factor=[1.0, 1.5],
    long_factor=[2.0, 7.0],
)

PUBLISHED_MODELS: dict[str, PublishedModel] = {
    "gpt2": PublishedModel(class_name="GPT2LMHeadModel", config_fields=GPT),
    "gpt2 by layer": PublishedModel(
        class_name="GPT2LMHeadModel", config_fields=GPT | {"scale_attn_by_inverse_layer_idx": True}
    ),
    "gpt2 headless": PublishedModel(class_name="GPT2Model", config_fields=GPT),
    "gpt2 untied": PublishedModel(class_name="GPT2LMHeadModel", config_fields=GPT | {"tie_word_embeddings": False}),
    "llama": PublishedModel(class_name="LlamaForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM),
    "llama tied, with biases": PublishedModel(
        class_name="LlamaForCausalLM",
        config_fields=GROUPED_WITH_HEAD_DIM | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3": PublishedModel(
        class_name="LlamaForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | {"rms_norm_eps": 1e-5} | LLAMA3
    ),
    "llama yarn": PublishedModel(
        class_name="LlamaForCausalLM",
        config_fields=GROUPED_WITH_HEAD_DIM | rope(kind="yarn", factor=4.0, original_max_position_embeddings=9),
    ),
    "llama linear": PublishedModel(
        class_name="LlamaForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | rope(kind="linear", factor=3.0)
    ),
    "mistral": PublishedModel(
        class_name="MistralForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | {"sliding_window": WINDOW}
    ),
    "qwen2": PublishedModel(class_name="Qwen2ForCausalLM", config_fields=GROUPED_QUERY),
    "qwen2 windowed": PublishedModel(
        class_name="Qwen2ForCausalLM",
        config_fields=GROUPED_QUERY
        | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": PublishedModel(
        class_name="Qwen3ForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | {"tie_word_embeddings": True} | rope(1e6)
    ),
    "phi3": PublishedModel(class_name="Phi3ForCausalLM", config_fields=GROUPED_QUERY | {"sliding_window": WINDOW}),
    "phi3 longrope": PublishedModel(
        class_name="Phi3ForCausalLM", config_fields=GROUPED_QUERY | {"original_max_position_embeddings": 31} | LONGROPE
    ),
    "granite": PublishedModel(
        class_name="GraniteForCausalLM",
        config_fields=GROUPED_QUERY
        | {
            "embedding_multiplier": 7.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.31,
            "logits_scaling": 3.0,
        },
    ),
    "smollm3": PublishedModel(
        class_name="SmolLM3ForCausalLM",
        config_fields=GROUPED_QUERY | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    ),
    "olmo2": PublishedModel(class_name="Olmo2ForCausalLM", config_fields=GROUPED_QUERY),
    "olmo3": PublishedModel(
        class_name="Olmo3ForCausalLM",
        config_fields=GROUPED_QUERY | {"num_hidden_layers": 3, "layer_types": LAYER_TYPES, "sliding_window": WINDOW},
    ),
    "bert": PublishedModel(class_name="BertModel", config_fields=STANDARD, padding_sides=("right",)),
    "bert masked": PublishedModel(class_name="BertForMaskedLM", config_fields=STANDARD),
    # The published poolers take the first column, which is padding if the padding is on the left.
    "bert classifier": PublishedModel(
        class_name="BertForSequenceClassification", config_fields=STANDARD | {"num_labels": 7}, padding_sides=("right",)
    ),
    "bert regression": PublishedModel(
        class_name="BertForSequenceClassification", config_fields=STANDARD | ONE_NUMBER, padding_sides=("right",)
    ),
    "bert regression of three numbers": PublishedModel(
        class_name="BertForSequenceClassification", config_fields=STANDARD | THREE_NUMBERS, padding_sides=("right",)
    ),
    "bert tagger": PublishedModel(class_name="BertForTokenClassification", config_fields=STANDARD | {"num_labels": 7}),
    "roberta": PublishedModel(
        class_name="RobertaModel", config_fields=ROBERTA, accepts_position_ids=False, padding_sides=("right",)
    ),
    "roberta masked": PublishedModel(
        class_name="RobertaForMaskedLM", config_fields=ROBERTA, accepts_position_ids=False
    ),
    "roberta classifier": PublishedModel(
        class_name="RobertaForSequenceClassification",
        config_fields=ROBERTA | {"num_labels": 7},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "roberta regression": PublishedModel(
        class_name="RobertaForSequenceClassification",
        config_fields=ROBERTA | THREE_NUMBERS,
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "xlm-roberta": PublishedModel(
        class_name="XLMRobertaForMaskedLM", config_fields=ROBERTA, accepts_position_ids=False
    ),
    "roberta-prelayernorm": PublishedModel(
        class_name="RobertaPreLayerNormForMaskedLM", config_fields=ROBERTA, accepts_position_ids=False
    ),
    "roberta-prelayernorm classifier": PublishedModel(
        class_name="RobertaPreLayerNormForSequenceClassification",
        config_fields=ROBERTA | {"num_labels": 7},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "camembert": PublishedModel(class_name="CamembertForMaskedLM", config_fields=ROBERTA, accepts_position_ids=False),
    "distilbert": PublishedModel(
        class_name="DistilBertModel", config_fields=DISTILBERT, accepts_position_ids=False, padding_sides=("right",)
    ),
    "distilbert masked": PublishedModel(
        class_name="DistilBertForMaskedLM",
        config_fields=DISTILBERT,
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "distilbert classifier": PublishedModel(
        class_name="DistilBertForSequenceClassification",
        config_fields=DISTILBERT | {"num_labels": 7},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "distilbert regression": PublishedModel(
        class_name="DistilBertForSequenceClassification",
        config_fields=DISTILBERT | ONE_NUMBER,
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "albert": PublishedModel(class_name="AlbertModel", config_fields=SMALL_EMBEDDING, padding_sides=("right",)),
    "albert masked": PublishedModel(class_name="AlbertForMaskedLM", config_fields=SMALL_EMBEDDING),
    "electra": PublishedModel(class_name="ElectraModel", config_fields=SMALL_EMBEDDING),
    "electra generator": PublishedModel(class_name="ElectraForMaskedLM", config_fields=SMALL_EMBEDDING),
    "electra discriminator": PublishedModel(class_name="ElectraForPreTraining", config_fields=SMALL_EMBEDDING),
    "electra classifier": PublishedModel(
        class_name="ElectraForSequenceClassification",
        config_fields=SMALL_EMBEDDING | {"num_labels": 7},
        padding_sides=("right",),
    ),
    "t5": PublishedModel(class_name="T5ForConditionalGeneration", config_fields=T5, accepts_position_ids=False),
    "t5 v1.1": PublishedModel(
        class_name="T5ForConditionalGeneration",
        config_fields=T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        accepts_position_ids=False,
        stores_tied_output=True,
    ),
    "t5 encoder": PublishedModel(class_name="T5EncoderModel", config_fields=T5, accepts_position_ids=False),
    "t5 v1.1 encoder": PublishedModel(
        class_name="T5EncoderModel", config_fields=T5 | {"feed_forward_proj": "gated-gelu"}, accepts_position_ids=False
    ),
    "umt5 encoder": PublishedModel(class_name="UMT5EncoderModel", config_fields=T5, accepts_position_ids=False),
    "mt5": PublishedModel(
        class_name="MT5ForConditionalGeneration", config_fields=T5, accepts_position_ids=False, stores_tied_output=True
    ),
    "umt5": PublishedModel(class_name="UMT5ForConditionalGeneration", config_fields=T5, accepts_position_ids=False),
    # BART counts padding and takes no position_ids: its valid tokens keep their positions only with right padding.
    "bart": PublishedModel(
        class_name="BartForConditionalGeneration",
        config_fields=BART,
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "mbart": PublishedModel(
        class_name="MBartForConditionalGeneration",
        config_fields=BART | {"scale_embedding": True},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "marian": PublishedModel(
        class_name="MarianMTModel",
        config_fields=BART | {"activation_function": "swish", "scale_embedding": True},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "marian, two vocabularies": PublishedModel(
        class_name="MarianMTModel",
        config_fields=BART | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "pegasus": PublishedModel(
        class_name="PegasusForConditionalGeneration",
        config_fields=BART | {"activation_function": "relu"},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "m2m100": PublishedModel(
        class_name="M2M100ForConditionalGeneration", config_fields=BART, accepts_position_ids=False
    ),
    "gpt_neox": PublishedModel(
        class_name="GPTNeoXForCausalLM", config_fields=STANDARD | rope(partial_rotary_factor=0.34)
    ),
    "gpt_neox in sequence": PublishedModel(
        class_name="GPTNeoXForCausalLM",
        config_fields=STANDARD
        | {"use_parallel_residual": False, "attention_bias": False}
        | rope(partial_rotary_factor=0.34),
    ),
    "gptj": PublishedModel(class_name="GPTJForCausalLM", config_fields=GPT | {"rotary_dim": 4}),
    "phi": PublishedModel(
        class_name="PhiForCausalLM",
        config_fields=GROUPED_QUERY | {"qk_layernorm": True} | rope(partial_rotary_factor=0.67),
    ),
    "gpt_neo": PublishedModel(class_name="GPTNeoForCausalLM", config_fields=NEO),
    "codegen": PublishedModel(
        class_name="CodeGenForCausalLM", config_fields=GPT | {"n_embd": 40, "n_head": 4, "rotary_dim": 4}
    ),
    "stablelm": PublishedModel(
        class_name="StableLmForCausalLM",
        config_fields=GROUPED_QUERY | {"use_qkv_bias": True} | rope(partial_rotary_factor=0.34),
    ),
    "stablelm 2": PublishedModel(
        class_name="StableLmForCausalLM",
        config_fields=GROUPED_QUERY
        | {"use_parallel_residual": True, "qk_layernorm": True}
        | rope(partial_rotary_factor=0.34),
    ),
    "starcoder2": PublishedModel(
        class_name="Starcoder2ForCausalLM", config_fields=GROUPED_QUERY | {"sliding_window": WINDOW}
    ),
    "cohere": PublishedModel(class_name="CohereForCausalLM", config_fields=GROUPED_QUERY),
    "cohere plus": PublishedModel(class_name="CohereForCausalLM", config_fields=GROUPED_QUERY | {"use_qk_norm": True}),
    "gemma": PublishedModel(class_name="GemmaForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM),
    "gemma2": PublishedModel(
        class_name="Gemma2ForCausalLM",
        config_fields=GROUPED_WITH_HEAD_DIM
        | {"num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 7},
    ),
    "gemma3": PublishedModel(
        class_name="Gemma3ForCausalLM",
        config_fields=GROUPED_WITH_HEAD_DIM
        | {"num_hidden_layers": 3, "layer_types": LAYER_TYPES, "sliding_window": WINDOW, "query_pre_attn_scalar": 7},
    ),
    # BLOOM's GELU rounds sqrt(2 / pi) to 0.79788456.
    "bloom": PublishedModel(
        class_name="BloomForCausalLM", config_fields=BLOOM, accepts_position_ids=False, extra_tolerance=1e-9
    ),
    "mpt": PublishedModel(class_name="MptForCausalLM", config_fields=MPT, accepts_position_ids=False),
    "mpt clipped": PublishedModel(
        class_name="MptForCausalLM",
        config_fields=MPT | {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}},
        accepts_position_ids=False,
    ),
    "falcon-7b": PublishedModel(class_name="FalconForCausalLM", config_fields=FALCON),
    "falcon-40b": PublishedModel(
        class_name="FalconForCausalLM", config_fields=FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3}
    ),
    "falcon-rw": PublishedModel(
        class_name="FalconForCausalLM",
        config_fields=FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        accepts_position_ids=False,
        attn_implementation="sdpa",  # the eager implementation adds the bias twice
    ),
    "opt": PublishedModel(class_name="OPTForCausalLM", config_fields=OPT),
    "opt-350m": PublishedModel(
        requires_tying=True,
        class_name="OPTForCausalLM",
        config_fields=OPT | {"word_embed_proj_dim": EMBEDDING_DIM, "do_layer_norm_before": False},
    ),
    "xglm": PublishedModel(class_name="XGLMForCausalLM", config_fields=XGLM),
    "biogpt": PublishedModel(class_name="BioGptForCausalLM", config_fields=STANDARD),
    "gpt_bigcode": PublishedModel(class_name="GPTBigCodeForCausalLM", config_fields=GPT),
    "gpt_bigcode, all heads": PublishedModel(
        class_name="GPTBigCodeForCausalLM", config_fields=GPT | {"multi_query": False}
    ),
    "mixtral": PublishedModel(class_name="MixtralForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | EXPERTS),
    "qwen3_moe": PublishedModel(
        class_name="Qwen3MoeForCausalLM",
        config_fields=GROUPED_WITH_HEAD_DIM
        | {
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": PublishedModel(
        class_name="GptOssForCausalLM",
        config_fields=GROUPED_WITH_HEAD_DIM
        | EXPERTS
        | {"sliding_window": WINDOW}
        | rope(150_000.0, "yarn", factor=4.0, truncate=False, original_max_position_embeddings=9),
    ),
    "olmo": PublishedModel(class_name="OlmoForCausalLM", config_fields=GROUPED_QUERY | {"clip_qkv": 0.7}),
    "nemotron": PublishedModel(
        class_name="NemotronForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | rope(partial_rotary_factor=0.4)
    ),
    "persimmon": PublishedModel(
        class_name="PersimmonForCausalLM", config_fields=STANDARD | rope(partial_rotary_factor=0.34)
    ),
    "glm4": PublishedModel(
        class_name="Glm4ForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | rope(partial_rotary_factor=0.4)
    ),
    "glm": PublishedModel(
        class_name="GlmForCausalLM", config_fields=GROUPED_WITH_HEAD_DIM | rope(partial_rotary_factor=0.4)
    ),
    "gemma3 headless": PublishedModel(class_name="Gemma3TextModel", config_fields=GROUPED_WITH_HEAD_DIM),
    "mpnet": PublishedModel(
        class_name="MPNetModel", config_fields=MPNET, accepts_position_ids=False, padding_sides=("right",)
    ),
    "mpnet masked": PublishedModel(class_name="MPNetForMaskedLM", config_fields=MPNET, accepts_position_ids=False),
    "mpnet classifier": PublishedModel(
        class_name="MPNetForSequenceClassification",
        config_fields=MPNET | {"num_labels": 7},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
    "modernbert": PublishedModel(class_name="ModernBertModel", config_fields=MODERNBERT),
    "modernbert masked": PublishedModel(class_name="ModernBertForMaskedLM", config_fields=MODERNBERT),
    "modernbert masked, another head": PublishedModel(
        class_name="ModernBertForMaskedLM",
        config_fields=MODERNBERT | {"classifier_activation": "relu", "classifier_bias": True},
    ),
    "modernbert classifier": PublishedModel(
        class_name="ModernBertForSequenceClassification",
        config_fields=MODERNBERT | {"num_labels": 7, "classifier_bias": True},
        padding_sides=("right",),
    ),
    "modernbert classifier, mean": PublishedModel(
        class_name="ModernBertForSequenceClassification",
        config_fields=MODERNBERT | {"num_labels": 7, "classifier_pooling": "mean"},
    ),
    "modernbert regression": PublishedModel(
        class_name="ModernBertForSequenceClassification",
        config_fields=MODERNBERT | ONE_NUMBER,
        padding_sides=("right",),
    ),
    "modernbert tagger": PublishedModel(
        class_name="ModernBertForTokenClassification", config_fields=MODERNBERT | {"num_labels": 7}
    ),
    "vit": PublishedModel(class_name="ViTForImageClassification", config_fields=IMAGE_CLASSIFIER),
    "vit without biases": PublishedModel(class_name="ViTModel", config_fields=IMAGE | {"qkv_bias": False}),
    "deit": PublishedModel(class_name="DeiTForImageClassification", config_fields=IMAGE_CLASSIFIER),
    "deit with teacher": PublishedModel(
        class_name="DeiTForImageClassificationWithTeacher", config_fields=IMAGE_CLASSIFIER
    ),
    "dinov2": PublishedModel(class_name="Dinov2Model", config_fields=IMAGE | {"mlp_ratio": 3}),
    "dinov2 giant": PublishedModel(class_name="Dinov2Model", config_fields=IMAGE | {"use_swiglu_ffn": True}),
    "clip text": PublishedModel(
        class_name="CLIPTextModel", config_fields=STANDARD | {"eos_token_id": VOCAB - 1}, eos_token_id=VOCAB - 1
    ),
    "clip text projected": PublishedModel(
        class_name="CLIPTextModelWithProjection",
        config_fields=STANDARD | {"eos_token_id": VOCAB - 1, "projection_dim": 13},
        eos_token_id=VOCAB - 1,
    ),
    "clip vision": PublishedModel(class_name="CLIPVisionModel", config_fields=IMAGE),
    "clip vision projected": PublishedModel(
        class_name="CLIPVisionModelWithProjection", config_fields=IMAGE | {"projection_dim": 13}
    ),
    "whisper": PublishedModel(
        class_name="WhisperForConditionalGeneration",
        config_fields=BART | {"num_mel_bins": 11, "max_source_positions": 17, "max_target_positions": CONTEXT},
        accepts_position_ids=False,
        padding_sides=("right",),
    ),
}


# Every decoder whose family has one, as a classifier: the last token that is not padding decides.
CLASSIFIERS = {
    language_model: class_name
    for family in FAMILIES.values()
    for language_model in family.classes
    for class_name in family.classes
    if language_model.endswith(("ForCausalLM", "LMHeadModel")) and class_name.endswith("ForSequenceClassification")
}
CLASSIFIER_BASES = {
    row.class_name: (name, row) for name, row in reversed(PUBLISHED_MODELS.items()) if row.class_name in CLASSIFIERS
}
for class_name, (name, row) in CLASSIFIER_BASES.items():
    PUBLISHED_MODELS[f"{name} classifier"] = replace(
        row, class_name=CLASSIFIERS[class_name], config_fields=row.config_fields | {"num_labels": 7}
    )
PUBLISHED_MODELS["llama regression"] = replace(
    PUBLISHED_MODELS["llama classifier"], config_fields=GROUPED_WITH_HEAD_DIM | ONE_NUMBER
)
