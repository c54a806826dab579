"""Reversible rules between the fields of a Hugging Face config.json and our configuration.

    field("n_embd", "decoder.*.width", 768)          a field that sets one of our values (default 768)
    constant("decoder.*.attention.bias", "qkv")      one of our values that the family fixes without a field
    fixed_field("qk_ln", False)                      a field that must have this value
    FieldRule({…}, read, write)                      fields that are read and written together

Our values are given by paths in a configuration tree: nested dicts with a list of layers.

    tree = config_to_tree(config)
    get_value(tree, "decoder.*.attention.heads")                `*` is every layer, `**.eps` every field named eps
    set_value(tree, "decoder.*.width encoder.*.width", 96)      several paths are separated by spaces

Reading a config.json sets values in the tree of the family's template; writing gets them from the
tree of a model.  A field without a rule is an error, unless it is harmless (see `is_harmless`).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monoblock.config.knobs import FieldValues, rebuild
from monoblock.config.model import AttentionConfig, BlockConfig, EmbeddingConfig, InitConfig, ModelConfig
from monoblock.config.parts import Learned, Rotary
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError, InputError, MonoblockError, did_you_mean
from monoblock.untrusted_files import short_repr

ConfigTree = dict[str, Any]
MISSING: Any = object()
STACKS = ("encoder", "decoder")
MAX_LAYERS = 2_000


# -- configuration trees -----------------------------------------------------------------------------------------------


def config_to_tree(config: ModelConfig) -> ConfigTree:
    """Convert a configuration to a tree: nested dicts, in which each stack has a list of its layers."""
    tree = to_dict(config)
    for name, stack in config.stacks.items():
        blocks = {id(block): to_dict(block) for repeat in stack.pattern for block in repeat.blocks}
        layers = [copy.deepcopy(blocks[id(block)]) for block in stack.layers()]
        tied = any(repeat.tied for repeat in stack.pattern)  # all layers share one set of weights
        tree[name] = {"layers": layers, "tied": tied, "norm": tree[name]["norm"]}
    tree["share"] = config.tie in ("source_target", "three_way")  # one embedding for source and target
    return tree


def tree_to_config(tree: ConfigTree) -> ModelConfig:
    """Convert a tree back to a configuration, in which the layers of a stack are the shortest repeated pattern."""
    tree = {name: value for name, value in tree.items() if name != "share"}  # its values are not changed
    for name in STACKS:
        stack = tree.get(name)
        if stack is not None:
            layers = stack["layers"]
            repeats = [(layers[:1], len(layers))] if stack["tied"] else _compress_layers(layers)
            pattern = [{"blocks": blocks, "times": times, "tied": stack["tied"]} for blocks, times in repeats]
            tree[name] = {"pattern": pattern, "norm": stack["norm"]}
    return ModelConfig.from_dict(tree)


def _compress_layers(blocks: Sequence[ConfigTree]) -> list[tuple[Sequence[ConfigTree], int]]:
    """Return the blocks as (blocks, times) pairs, as few blocks as possible.

    There are at most three pairs: some first blocks, a sequence of blocks that is repeated, and the remaining blocks.
    """
    texts = [json.dumps(block, sort_keys=True, default=list) for block in blocks]
    ids = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    sequence = [ids[text] for text in texts]
    count, best = len(sequence), (len(sequence) + 1, 0, len(sequence))
    for first in range(min(count, 5)):
        tail = sequence[first:]
        period = next((p for p in range(1, len(tail)) if tail[p:] == tail[:-p]), len(tail))
        best = min(best, (first + period + len(tail) % period, first, period))
    _, first, period = best
    times = (count - first) // period
    rest = blocks[first + times * period :]
    repeats = [(blocks[:first], 1), (blocks[first : first + period], times), (rest, 1)]
    return [(part, times) for part, times in repeats if part]


def _resolve_path(node: Any, path: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Yield every (dict, key) that a path selects; nothing if the path does not exist in this tree."""
    key, rest = path[0], path[1:]
    if key == "**":
        if isinstance(node, dict) and rest[0] in node:
            yield node, rest[0]
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        for child in children:
            yield from _resolve_path(child, path)
    elif node is not None and key == "*":
        for layer in node["layers"]:
            yield from _resolve_path(layer, rest)
    elif isinstance(node, dict):
        if rest:
            yield from _resolve_path(node.get(key), rest)
        else:
            yield node, key


def set_value(tree: ConfigTree, paths: str, value: Any) -> None:
    """Set a value at each of these paths, which are separated by spaces."""
    for path in paths.split():
        stack, _, rest = path.partition(".")
        if rest == "depth":
            layers = tree[stack]["layers"]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_LAYERS:
                raise ConfigError(
                    f"{short_repr(value)} is not a number of layers; write a whole number from 1 to {MAX_LAYERS}"
                )
            tree[stack]["layers"] = [copy.deepcopy(layers[0]) for _ in range(value)]
            continue
        for node, key in _resolve_path(tree, path.split(".")):
            node[key] = copy.deepcopy(value) if isinstance(value, (dict, list)) else value


def get_value(tree: ConfigTree, paths: str) -> Any:
    """Return the value at the first of these space-separated paths that exists; MISSING if none exists."""
    for path in paths.split():
        stack, _, rest = path.partition(".")
        if rest == "depth":
            return len(tree[stack]["layers"])
        for node, key in _resolve_path(tree, path.split(".")):
            return node.get(key)
    return MISSING


# -- comparing configurations -----------------------------------------------------------------------------------------


def _drop_training_fields(part: Any, values: FieldValues) -> None:
    """Reset the values of a part of a configuration that do not change its output in inference, such as dropout."""
    for name in ("dropout", "word_dropout"):
        if name in values:
            values[name] = 0.0
    if isinstance(part, BlockConfig):
        values["layer_scale"] = None if part.layer_scale is None else 1.0  # its initial value
    if isinstance(part, ModelConfig):
        values["init"] = InitConfig()
    if isinstance(part, EmbeddingConfig):
        if not isinstance(part.positions, Learned):
            values["context"] = None
        if part.dim is None:
            values["projection"], values["projection_bias"] = "last", True


def _resolve_attention_sizes(attention: AttentionConfig | None, width: int) -> AttentionConfig | None:
    if attention is None:
        return None
    size = attention.key_size(width)

    def edit(part: Any, values: FieldValues) -> None:
        if isinstance(part, AttentionConfig):
            values.update(kv_heads=part.num_kv_heads, head_dim=size, value_dim=part.value_size(width))
            values["scale"] = size**-0.5 if part.scale is None else part.scale
            values["bias"] = "".join(sorted(part.bias))
            values["random_seed"] = part.random_seed if part.random_blocks else 0
        if isinstance(part, Rotary):
            values["dim"] = size if part.dim is None else part.dim

    return rebuild(attention, edit)


def resolve_sizes(config: ModelConfig) -> ModelConfig:
    """Fill in values that are None because other values determine them: head sizes, key/value heads, scales."""

    def edit(part: Any, values: FieldValues) -> None:
        if isinstance(part, BlockConfig):
            values.update({name: _resolve_attention_sizes(values[name], part.width) for name in ("attention", "cross")})

    return rebuild(config, edit)


def config_difference(a: ModelConfig, b: ModelConfig) -> str | None:
    """Return the first field of `a` that makes it compute something else than `b`, as "path=value", or None."""
    first, second = (config_to_tree(rebuild(resolve_sizes(config), _drop_training_fields)) for config in (a, b))
    return _tree_difference(first, second, "")


def _tree_difference(a: Any, b: Any, path: str) -> str | None:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(dict.fromkeys([*a, *b]), key=lambda key: key == "context")  # last: positions may decide it
        pairs = [(key, a.get(key), b.get(key)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(str(n), *values) for n, values in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, float) and isinstance(b, (int, float)) and math.isclose(a, b, rel_tol=1e-12):
        return None
    else:
        return None if a == b else f"{path}={short_repr(a)}"
    differences = (_tree_difference(x, y, f"{path}.{key}" if path else key) for key, x, y in pairs)
    return next((difference for difference in differences if difference), None)


# -- rules -------------------------------------------------------------------------------------------------------------


class FieldRule(NamedTuple):
    """A rule for some Hugging Face fields, given with their defaults, that are read and written together."""

    defaults: Mapping[str, Any]  # those in transformers; MISSING for a field that is required
    read: Callable[[Mapping[str, Any], ConfigTree], None]  # set values of our configuration from the fields
    write: Callable[[ConfigTree], dict[str, Any]]  # return the fields for a configuration


def without_fields(fields: Mapping[str, Any], ignored: Sequence[str]) -> Mapping[str, Any]:
    """Return the fields without the `ignored` ones, which the user says have no effect."""
    missing = next((name for name in ignored if name not in fields), None)
    if missing is not None:
        raise InputError(f"ignore_fields: the model's file has no field {missing!r}{did_you_mean(missing, fields)}")
    return {name: value for name, value in fields.items() if name not in ignored}


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
    """Return whether a field without a rule cannot change what the model computes in inference.

    So are fields whose name begins with an underscore (transformers' own bookkeeping), those listed above, and those
    whose value is null, false or empty: transformers, too, ignores fields that its class does not have, and a part of
    the model that a field leaves out is missed when the tensors are compared.  Any other field is refused.
    """
    is_off = value is None or value is False or value in ("", [], {})
    return is_off or name.startswith("_") or name in IGNORED_FIELDS or value in NEUTRAL_VALUES.get(name, ())


def check_fields(
    rules: Sequence[FieldRule], fields: Mapping[str, Any], harmless: Callable[[str, Any], bool] = is_harmless
) -> dict[str, Any]:
    """Return the fields of a config.json that have rules, with defaults filled in.

    `harmless` is a function of a name and a value: whether a field without a rule cannot change what is computed.
    Raise FileError if a required field is missing, or for a field without a rule that may change what is computed.
    """
    known = {name: default for rule in rules for name, default in rule.defaults.items()}
    unknown = {name: value for name, value in fields.items() if name not in known and not harmless(name, value)}
    if unknown:
        raise FileError(_describe_unknown(unknown))
    for name, default in known.items():
        if default is MISSING and name not in fields:
            raise FileError(f"it lacks the field {name!r}")
    return known | {name: value for name, value in fields.items() if name in known}


def _describe_unknown(fields: Mapping[str, Any], at_most: int = 6) -> str:
    """Return the error message for fields that have no rule and may matter."""
    names = [short_repr(name) for name in fields]
    named = ", ".join(f"{short_repr(name)} ({short_repr(value)})" for name, value in list(fields.items())[:at_most])
    named += f" and {len(names) - at_most} more" if len(names) > at_most else ""
    one = len(names) == 1
    return (
        f"its field{'' if one else 's'} {named} {'is' if one else 'are'} not known here and may change what the model "
        f"computes; if {'it has' if one else 'they have'} no effect, write ignore_fields=[{', '.join(names)}], or "
        f"monoblock convert … --ignore-field {'NAME' if len(names) > 1 else names[0]}"
    )


def read_fields(
    rules: Sequence[FieldRule], fields: Mapping[str, Any], template: ModelConfig, head: ConfigTree | None
) -> ConfigTree:
    """Return the configuration tree of a template, with this head and with the values from a config.json."""
    tree = config_to_tree(template)
    tree["head"], tree["tie"], tree["init"] = copy.deepcopy(head), "none", to_dict(InitConfig())
    for rule in rules:
        try:
            rule.read(fields, tree)
        except MonoblockError:
            raise
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as error:
            values = ", ".join(f"{name}={short_repr(fields[name])}" for name in rule.defaults)
            raise ConfigError(f"{values} is not valid: {' '.join(str(error).split())[:80]}") from None
    return tree
