"""DATA and rule: which config.json fields without a rule of their own cannot change the forward pass in inference.

A field is harmless if its name begins with an underscore (transformers' own bookkeeping), if it is listed below, or if
its value is null, false or empty: transformers, too, ignores fields that its class does not have, and a part of the
model that a field leaves out is missed when the tensors are compared.  Any other field without a rule is refused.
"""

from __future__ import annotations

from typing import Any

# Settings of training, initialization, the tokenizer and decoding, and hints for other programs.
IGNORED_NAMES = """
architectures model_type transformers_version dtype torch_dtype auto_map attn_implementation use_cache
gradient_checkpointing use_return_dict return_dict output_attentions output_hidden_states output_past torchscript
use_bfloat16 chunk_size_feed_forward is_encoder_decoder tf_legacy_loss problem_type finetuning_task language
model_name model_max_length tokenizer_class prefix suffix task_specific_params custom_pipelines initializer_range
initializer_factor initializer_cutoff_factor init_std init_device init_config init_method bos_token_id eos_token_id
eos_token_ids pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id eos_token decoder_start_token_id
forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens begin_suppress_tokens max_length min_length
num_beams num_beam_groups do_sample early_stopping temperature top_k top_p typical_p length_penalty repetition_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size diversity_penalty num_return_sequences return_dict_in_generate
output_scores remove_invalid_values exponential_decay_length_penalty id2label label2id num_labels tie_word_embeddings
tie_weights_ dropout attention_dropout activation_dropout hidden_dropout hidden_dropout_prob
attention_probs_dropout_prob classifier_dropout classifier_dropout_prob attn_pdrop embd_pdrop resid_pdrop emb_pdrop
embed_dropout resid_dropout embedding_dropout residual_dropout mlp_dropout dropout_rate qa_dropout seq_classif_dropout
summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj
encoder_layerdrop decoder_layerdrop layerdrop drop_path_rate ignored_index classif_dropout pretraining_tp
slow_but_exact reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 upcast_softmax
bias_dropout_fusion masked_softmax_fusion skip_bias_add skip_bias_add_qkv offset_alibi seq_length n_ctx use_flash_attn
flash_attn fused_mlp fused_bias_fc use_flash_attention deterministic_flash_attn reference_compile sparse_prediction
sparse_pred_ignore_index output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha
vocab_projection_size encoder_stride pooler_act pooler_output_size directionality pooler_fc_size
pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type add_bias_logits add_final_layer_norm
normalize_before normalize_embedding static_position_embeddings extra_pos_embeddings num_hidden_layers_encoder
gradient_clipping is_gated_act dense_act_fn n_positions attn_impl embedding_fraction apply_spec_augment
mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob
median_filter_width use_weighted_layer_sum classifier_proj_size alignment_heads lang_to_id task_to_id is_multilingual
no_timestamps_token_id max_initial_timestamp_index out_features out_indices stage_names reshape_hidden_states
apply_layernorm unsloth_version unsloth_fixed cache_implementation tokenizer_name force_bos_token_to_be_generated
repad_logits_with_grad initial_context_length save_step is_llama_config xla_device forced_decoder_ids n_special
predict_special_tokens transformers.js_config inference_runner pad_key_length pre_allocate_kv_cache
validate_runner_input end_token_id
"""
IGNORED_FIELDS = frozenset(IGNORED_NAMES.split())

# Fields that change nothing if they have one of these values, besides null, false and empty ones.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {"position_embedding_type": ("absolute",)}


def is_harmless(name: str, value: Any) -> bool:
    """Return whether a field without a rule cannot change what the model computes (see above)."""
    is_off = value is None or value is False or value in ("", [], {})
    return is_off or name.startswith("_") or name in IGNORED_FIELDS or value in NEUTRAL_VALUES.get(name, ())
