"""DATA: published classes at toy size, in the words of their own configurations.

Sizes are unlike each other and odd where the class allows: three key/value heads, heads of a size of their own, parts
of them turned, a vocabulary of a prime number.  What is not given is the published class's own default.
"""

from dataclasses import dataclass
from typing import Any

VOCAB, HIDDEN, CONTEXT, WINDOW, WIDTH, HEAD_DIM, EMBEDDED = 61, 46, 37, 5, 36, 10, 14


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str  # the published class
    sizes: dict[str, Any]
    places: bool = True  # the class takes position_ids; without, it counts as we do or only distances matter
    padded: tuple[str, ...] = ("left", "right")
    rounded: float = 0.0  # further from ours by a constant the class writes with so few digits
    untie: bool = False  # the output is stored, although the configuration calls it tied
    end: int | None = None  # the id of the last token, which stands nowhere else
    kernel: str = "eager"  # which of its implementations the class is to run
    only_tied: bool = False  # untied it is refused: its output would be projected, which no published file is


NAMED = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": CONTEXT,
}
GROUPED = NAMED | {"num_attention_heads": 6, "num_key_value_heads": 3}
SIZED = GROUPED | {"head_dim": HEAD_DIM}
GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT}
ROBERTA = NAMED | {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": WIDTH,
    "hidden_dim": HIDDEN,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": CONTEXT,
}
MODERNBERT = NAMED | {
    "num_hidden_layers": 4,
    "local_attention": 2 * (WINDOW - 1),
    "cls_token_id": 0,
    "sep_token_id": 2,
}
SMALLER = NAMED | {"embedding_size": EMBEDDED}
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
LABELLED = IMAGE | {"num_labels": 7}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
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

ROWS: dict[str, Row] = {
    "gpt2": Row(model="GPT2LMHeadModel", sizes=GPT),
    "gpt2 by layer": Row(model="GPT2LMHeadModel", sizes=GPT | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 headless": Row(model="GPT2Model", sizes=GPT),
    "gpt2 untied": Row(model="GPT2LMHeadModel", sizes=GPT | {"tie_word_embeddings": False}),
    "llama": Row(model="LlamaForCausalLM", sizes=SIZED),
    "llama tied, with biases": Row(
        model="LlamaForCausalLM", sizes=SIZED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "llama3": Row(model="LlamaForCausalLM", sizes=SIZED | {"rms_norm_eps": 1e-5} | LLAMA3),
    "llama yarn": Row(
        model="LlamaForCausalLM",
        sizes=SIZED | rope(kind="yarn", factor=4.0, original_max_position_embeddings=9),
    ),
    "llama linear": Row(model="LlamaForCausalLM", sizes=SIZED | rope(kind="linear", factor=3.0)),
    "mistral": Row(model="MistralForCausalLM", sizes=SIZED | {"sliding_window": WINDOW}),
    "qwen2": Row(model="Qwen2ForCausalLM", sizes=GROUPED),
    "qwen2 windowed": Row(
        model="Qwen2ForCausalLM",
        sizes=GROUPED
        | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": Row(model="Qwen3ForCausalLM", sizes=SIZED | {"tie_word_embeddings": True} | rope(1e6)),
    "phi3": Row(model="Phi3ForCausalLM", sizes=GROUPED | {"sliding_window": WINDOW}),
    "phi3 longrope": Row(model="Phi3ForCausalLM", sizes=GROUPED | {"original_max_position_embeddings": 31} | LONGROPE),
    "granite": Row(
        model="GraniteForCausalLM",
        sizes=GROUPED
        | {
            "embedding_multiplier": 7.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.31,
            "logits_scaling": 3.0,
        },
    ),
    "smollm3": Row(model="SmolLM3ForCausalLM", sizes=GROUPED | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "olmo2": Row(model="Olmo2ForCausalLM", sizes=GROUPED),
    "olmo3": Row(
        model="Olmo3ForCausalLM",
        sizes=GROUPED | {"num_hidden_layers": 3, "layer_types": TYPES, "sliding_window": WINDOW},
    ),
    "bert": Row(model="BertModel", sizes=NAMED, padded=("right",)),
    "bert masked": Row(model="BertForMaskedLM", sizes=NAMED),
    # The published poolers take the first column, which under left padding is no token.
    "bert classifier": Row(model="BertForSequenceClassification", sizes=NAMED | {"num_labels": 7}, padded=("right",)),
    "bert tagger": Row(model="BertForTokenClassification", sizes=NAMED | {"num_labels": 7}),
    "roberta": Row(model="RobertaModel", sizes=ROBERTA, places=False, padded=("right",)),
    "roberta masked": Row(model="RobertaForMaskedLM", sizes=ROBERTA, places=False),
    "roberta classifier": Row(
        model="RobertaForSequenceClassification", sizes=ROBERTA | {"num_labels": 7}, places=False, padded=("right",)
    ),
    "xlm-roberta": Row(model="XLMRobertaForMaskedLM", sizes=ROBERTA, places=False),
    "camembert": Row(model="CamembertForMaskedLM", sizes=ROBERTA, places=False),
    "distilbert": Row(model="DistilBertModel", sizes=DISTILBERT, places=False, padded=("right",)),
    "distilbert masked": Row(model="DistilBertForMaskedLM", sizes=DISTILBERT, places=False, padded=("right",)),
    "distilbert classifier": Row(
        model="DistilBertForSequenceClassification",
        sizes=DISTILBERT | {"num_labels": 7},
        places=False,
        padded=("right",),
    ),
    "albert": Row(model="AlbertModel", sizes=SMALLER, padded=("right",)),
    "albert masked": Row(model="AlbertForMaskedLM", sizes=SMALLER),
    "electra": Row(model="ElectraModel", sizes=SMALLER),
    "electra generator": Row(model="ElectraForMaskedLM", sizes=SMALLER),
    "electra discriminator": Row(model="ElectraForPreTraining", sizes=SMALLER),
    "electra classifier": Row(
        model="ElectraForSequenceClassification", sizes=SMALLER | {"num_labels": 7}, padded=("right",)
    ),
    "t5": Row(model="T5ForConditionalGeneration", sizes=T5, places=False),
    "t5 v1.1": Row(
        model="T5ForConditionalGeneration",
        sizes=T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        places=False,
        untie=True,
    ),
    "mt5": Row(model="MT5ForConditionalGeneration", sizes=T5, places=False, untie=True),
    "umt5": Row(model="UMT5ForConditionalGeneration", sizes=T5, places=False),
    # BART counts columns, padding too, and takes no places: only right padding leaves its real tokens where they were.
    "bart": Row(model="BartForConditionalGeneration", sizes=BART, places=False, padded=("right",)),
    "mbart": Row(
        model="MBartForConditionalGeneration",
        sizes=BART | {"scale_embedding": True},
        places=False,
        padded=("right",),
    ),
    "marian": Row(
        model="MarianMTModel",
        sizes=BART | {"activation_function": "swish", "scale_embedding": True},
        places=False,
        padded=("right",),
    ),
    "marian, two vocabularies": Row(
        model="MarianMTModel",
        sizes=BART | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53},
        places=False,
        padded=("right",),
    ),
    "pegasus": Row(
        model="PegasusForConditionalGeneration",
        sizes=BART | {"activation_function": "relu"},
        places=False,
        padded=("right",),
    ),
    "m2m100": Row(model="M2M100ForConditionalGeneration", sizes=BART, places=False),
    "gpt_neox": Row(model="GPTNeoXForCausalLM", sizes=NAMED | rope(partial_rotary_factor=0.34)),
    "gpt_neox in sequence": Row(
        model="GPTNeoXForCausalLM",
        sizes=NAMED | {"use_parallel_residual": False, "attention_bias": False} | rope(partial_rotary_factor=0.34),
    ),
    "gptj": Row(model="GPTJForCausalLM", sizes=GPT | {"rotary_dim": 4}),
    "phi": Row(model="PhiForCausalLM", sizes=GROUPED | {"qk_layernorm": True} | rope(partial_rotary_factor=0.67)),
    "gpt_neo": Row(model="GPTNeoForCausalLM", sizes=NEO),
    "codegen": Row(model="CodeGenForCausalLM", sizes=GPT | {"n_embd": 40, "n_head": 4, "rotary_dim": 4}),
    "stablelm": Row(
        model="StableLmForCausalLM", sizes=GROUPED | {"use_qkv_bias": True} | rope(partial_rotary_factor=0.34)
    ),
    "stablelm 2": Row(
        model="StableLmForCausalLM",
        sizes=GROUPED | {"use_parallel_residual": True, "qk_layernorm": True} | rope(partial_rotary_factor=0.34),
    ),
    "starcoder2": Row(model="Starcoder2ForCausalLM", sizes=GROUPED | {"sliding_window": WINDOW}),
    "cohere": Row(model="CohereForCausalLM", sizes=GROUPED),
    "cohere plus": Row(model="CohereForCausalLM", sizes=GROUPED | {"use_qk_norm": True}),
    "gemma": Row(model="GemmaForCausalLM", sizes=SIZED),
    "gemma2": Row(
        model="Gemma2ForCausalLM",
        sizes=SIZED | {"num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 7},
    ),
    "gemma3": Row(
        model="Gemma3ForCausalLM",
        sizes=SIZED
        | {"num_hidden_layers": 3, "layer_types": TYPES, "sliding_window": WINDOW, "query_pre_attn_scalar": 7},
    ),
    # BLOOM's own GELU writes sqrt(2 / pi) as 0.79788456.
    "bloom": Row(model="BloomForCausalLM", sizes=BLOOM, places=False, rounded=1e-9),
    "mpt": Row(model="MptForCausalLM", sizes=MPT, places=False),
    "mpt clipped": Row(
        model="MptForCausalLM",
        sizes=MPT | {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}},
        places=False,
    ),
    "falcon-7b": Row(model="FalconForCausalLM", sizes=FALCON),
    "falcon-40b": Row(model="FalconForCausalLM", sizes=FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3}),
    "falcon-rw": Row(
        model="FalconForCausalLM",
        sizes=FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        places=False,
        kernel="sdpa",  # the eager one adds the bias twice
    ),
    "opt": Row(model="OPTForCausalLM", sizes=OPT),
    "opt-350m": Row(
        only_tied=True,
        model="OPTForCausalLM",
        sizes=OPT | {"word_embed_proj_dim": EMBEDDED, "do_layer_norm_before": False},
    ),
    "xglm": Row(model="XGLMForCausalLM", sizes=XGLM),
    "biogpt": Row(model="BioGptForCausalLM", sizes=NAMED),
    "gpt_bigcode": Row(model="GPTBigCodeForCausalLM", sizes=GPT),
    "gpt_bigcode, all heads": Row(model="GPTBigCodeForCausalLM", sizes=GPT | {"multi_query": False}),
    "mixtral": Row(model="MixtralForCausalLM", sizes=SIZED | EXPERTS),
    "qwen3_moe": Row(
        model="Qwen3MoeForCausalLM",
        sizes=SIZED
        | {
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": Row(
        model="GptOssForCausalLM",
        sizes=SIZED
        | EXPERTS
        | {"sliding_window": WINDOW}
        | rope(150_000.0, "yarn", factor=4.0, truncate=False, original_max_position_embeddings=9),
    ),
    "olmo": Row(model="OlmoForCausalLM", sizes=GROUPED | {"clip_qkv": 0.7}),
    "nemotron": Row(model="NemotronForCausalLM", sizes=SIZED | rope(partial_rotary_factor=0.4)),
    "persimmon": Row(model="PersimmonForCausalLM", sizes=NAMED | rope(partial_rotary_factor=0.34)),
    "glm4": Row(model="Glm4ForCausalLM", sizes=SIZED | rope(partial_rotary_factor=0.4)),
    "modernbert": Row(model="ModernBertModel", sizes=MODERNBERT),
    "modernbert masked": Row(model="ModernBertForMaskedLM", sizes=MODERNBERT),
    "vit": Row(model="ViTForImageClassification", sizes=LABELLED),
    "vit without biases": Row(model="ViTModel", sizes=IMAGE | {"qkv_bias": False}),
    "deit": Row(model="DeiTForImageClassification", sizes=LABELLED),
    "deit with teacher": Row(model="DeiTForImageClassificationWithTeacher", sizes=LABELLED),
    "dinov2": Row(model="Dinov2Model", sizes=IMAGE | {"mlp_ratio": 3}),
    "dinov2 giant": Row(model="Dinov2Model", sizes=IMAGE | {"use_swiglu_ffn": True}),
    "clip text": Row(model="CLIPTextModel", sizes=NAMED | {"eos_token_id": VOCAB - 1}, end=VOCAB - 1),
    "clip text projected": Row(
        model="CLIPTextModelWithProjection",
        sizes=NAMED | {"eos_token_id": VOCAB - 1, "projection_dim": 13},
        end=VOCAB - 1,
    ),
    "clip vision": Row(model="CLIPVisionModel", sizes=IMAGE),
    "clip vision projected": Row(model="CLIPVisionModelWithProjection", sizes=IMAGE | {"projection_dim": 13}),
    "whisper": Row(
        model="WhisperForConditionalGeneration",
        sizes=BART | {"num_mel_bins": 11, "max_source_positions": 17, "max_target_positions": CONTEXT},
        places=False,
        padded=("right",),
    ),
}
