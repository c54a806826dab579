"""DATA: the supported architectures of llama.cpp, as tables of GGUF fields and tensor names.

"llama" rotates neighbouring rows of queries and keys together, while our models rotate the two halves of a head;
INTERLEAVED_QUERY and INTERLEAVED_KEY reorder the rows.  "gemma" stores norm weights as 1 + w, our models as w.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from monoblock.config.families import gpt, llama
from monoblock.config.knobs import FieldValues, rebuild
from monoblock.config.model import ModelConfig
from monoblock.config.parts import Rotary, Scaling
from monoblock.config.preset_blocks import GEMMA_RMS_NORM
from monoblock.config.presets import preset
from monoblock.config.schema import from_dict, to_dict
from monoblock.errors import ConfigError
from monoblock.interop.huggingface.family import LM_HEAD, Family
from monoblock.interop.huggingface.field_converters import constant, field, fixed_field, head_dim_of
from monoblock.interop.huggingface.field_rules import ConfigTree, FieldRule, get_value, resolve_sizes
from monoblock.interop.rename import QKV_ROWS, Rule, qkv_names
from monoblock.interop.weights import AttentionShape, TensorTransform
from monoblock.nn.positions import rotary_frequencies

BLOCK, ATTN, FFN = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"
LM_CLASS = "LanguageModel"
VOCAB_SIZE, ROPE_FACTORS = "vocab_size", "rope_freqs"  # read from the tensors token_embd and rope_freqs
LLAMA_TEMPLATE = llama(vocab=8, width=8, depth=1, heads=1, context=8)
GPT_TEMPLATE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)


# -- transforms --------------------------------------------------------------------------------------------------------


def _deinterleave(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _interleave(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _interleaved_rows(heads: Callable[[AttentionShape], int]) -> TensorTransform:
    return TensorTransform(lambda t, a: [_deinterleave(t[0], heads(a))], lambda t, a: [_interleave(t[0], heads(a))])


INTERLEAVED_QUERY = _interleaved_rows(lambda attention: attention.heads)
INTERLEAVED_KEY = _interleaved_rows(lambda attention: attention.kv_heads)
PLUS_ONE = TensorTransform(lambda t, _: [t[0] - 1], lambda t, _: [t[0] + 1])


# -- fields ------------------------------------------------------------------------------------------------------------


def _rotary_fields() -> FieldRule:
    """Return the rule for rotary positions of whole heads.

    If the file has the tensor rope_freqs.weight, it contains the numbers that divide the frequencies (Llama 3).
    """
    defaults = {
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": None,
        "rope.scaling.type": "none",
        "rope.scaling.factor": None,
        "rope.scaling.original_context_length": None,
        "rope.scaling.finetuned": None,
        ROPE_FACTORS: None,
    }

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        for layer in tree["decoder"]["layers"]:
            attention = layer["attention"]
            head_dim = head_dim_of(layer)
            dim = fields["rope.dimension_count"] or head_dim
            if dim != head_dim:
                raise ConfigError(f"rope.dimension_count={dim} is not supported: it must be the head size, {head_dim}")
            attention["positions"] = {
                "kind": "rotary",
                "base": fields["rope.freq_base"],
                "dim": None,
                "layout": "half",
                "scaling": _read_scaling(fields, get_value(tree, "input.context")),
            }

    def write(tree: ConfigTree) -> dict[str, Any]:
        layer = tree["decoder"]["layers"][0]
        positions = layer["attention"]["positions"]
        if positions is None or positions["kind"] != "rotary" or positions["layout"] != "half":
            raise ConfigError("the model's positions are not rotary with layout='half'")
        head_dim = head_dim_of(layer)
        fields = {"rope.freq_base": positions["base"], "rope.dimension_count": positions["dim"] or head_dim}
        scaling = positions["scaling"]
        if scaling is None:
            return fields
        if scaling["kind"] == "linear":
            return fields | {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
        if scaling["kind"] == "longrope" and scaling["short_factors"] == scaling["long_factors"]:
            return fields | {ROPE_FACTORS: _rope_factors(from_dict(Rotary, positions, "positions"), head_dim)}
        raise ConfigError(f"the model's rotary scaling {scaling['kind']!r} cannot be written in GGUF")

    return FieldRule(defaults, read, write)


def _read_scaling(fields: Mapping[str, Any], context: int) -> dict[str, Any] | None:
    if fields[ROPE_FACTORS] is not None:
        return to_dict(Scaling(**_longrope_scaling(list(fields[ROPE_FACTORS]), context)))
    match fields["rope.scaling.type"]:
        case "none":
            return None
        case "linear":
            return {"kind": "linear", "factor": fields["rope.scaling.factor"]}
        case kind:
            raise ConfigError(f"rope.scaling.type={kind!r:.40} is not supported; only 'none' and 'linear' are")


def _rope_factors(rotary: Rotary, head_dim: int) -> list[float]:
    """Return the numbers by which rotary scaling divides the frequency of each rotary pair."""
    unscaled, _ = rotary_frequencies(replace(rotary, scaling=None), head_dim)
    scaled, attention_factor = rotary_frequencies(rotary, head_dim)
    if attention_factor != 1.0:
        raise ConfigError("the model's rotary scaling also scales attention scores, which GGUF cannot express")
    return [float(factor) for factor in (unscaled.double() / scaled.double()).flatten().tolist()]


def with_rope_factors(config: ModelConfig) -> ModelConfig:
    """Replace Llama 3's rotary scaling by one factor per frequency, since GGUF stores it only in this form."""
    context = config.context

    def edit(part: Any, values: FieldValues) -> None:
        if isinstance(part, Rotary) and part.scaling is not None and part.scaling.kind == "llama3":
            assert part.dim is not None
            values["scaling"] = Scaling(**_longrope_scaling(_rope_factors(part, part.dim), context))

    return rebuild(resolve_sizes(config), edit)


def _longrope_scaling(factors: list[float], context: int | None) -> dict[str, Any]:
    scaling = {"kind": "longrope", "factor": 1.0, "attention_factor": 1.0, "original_context": context}
    return scaling | {"short_factors": tuple(factors), "long_factors": tuple(factors)}


def size_fields(eps: str) -> tuple[FieldRule, ...]:
    return (
        field(VOCAB_SIZE, "input.vocab"),
        field("block_count", "decoder.depth"),
        field("embedding_length", f"{BLOCK}.width"),
        field("attention.head_count", f"{ATTN}.heads"),
        field("context_length", "input.context"),
        field("feed_forward_length", f"{FFN}.hidden"),
        field(eps, "**.eps"),
    )


RMS_EPS = "attention.layer_norm_rms_epsilon"
LLAMA = (
    *size_fields(RMS_EPS),
    field("attention.head_count_kv", f"{ATTN}.kv_heads", None),
    field("attention.key_length", f"{ATTN}.head_dim", None),
    field("attention.value_length", f"{ATTN}.value_dim", None),
    fixed_field("expert_count", None, 0),
    fixed_field("expert_used_count", None, 0),
    _rotary_fields(),
)
GEMMA = (
    constant(f"{BLOCK}.norm decoder.norm", to_dict(GEMMA_RMS_NORM)),
    *LLAMA,
    constant("input.scale", "sqrt_width"),
    constant(f"{FFN}.activation", "gelu_tanh"),
)

# -- weights -----------------------------------------------------------------------------------------------------------

_BLOCK_RULES = (
    Rule("input.token", "token_embd"),
    Rule("decoder.*.attention.query", "blk.*.attn_q"),
    Rule("decoder.*.attention.key", "blk.*.attn_k"),
    Rule("decoder.*.attention.value", "blk.*.attn_v"),
    Rule("decoder.*.attention.output", "blk.*.attn_output"),
    Rule("decoder.*.attention.query_norm", "blk.*.attn_q_norm"),
    Rule("decoder.*.attention.key_norm", "blk.*.attn_k_norm"),
    Rule("decoder.*.feedforward.gate", "blk.*.ffn_gate"),
    Rule("decoder.*.feedforward.up", "blk.*.ffn_up"),
    Rule("decoder.*.feedforward.down", "blk.*.ffn_down"),
    Rule("head.output", "output"),
)
_NORM_RULES = (
    Rule("decoder.*.attention_norm", "blk.*.attn_norm"),
    Rule("decoder.*.feedforward_norm", "blk.*.ffn_norm"),
    Rule("decoder.norm", "output_norm"),
)
_INTERLEAVED_RULES = (
    Rule("decoder.*.attention.query", "blk.*.attn_q", INTERLEAVED_QUERY),
    Rule("decoder.*.attention.key", "blk.*.attn_k", INTERLEAVED_KEY),
)
_GPT2_RULES = (
    Rule("input.position", "position_embd"),
    Rule(qkv_names("decoder.*.attention"), "blk.*.attn_qkv", QKV_ROWS),
)


def gguf_family(
    architecture: str, fields: tuple[FieldRule, ...], weights: tuple[Rule, ...], template: Any = LLAMA_TEMPLATE
) -> Family:
    return Family(
        model_type=architecture, template=template, fields=fields, weights=weights, classes={LM_CLASS: LM_HEAD}
    )


ARCHITECTURES = {
    family.model_type: family
    for family in (
        gguf_family("llama", LLAMA, (*_INTERLEAVED_RULES, *_BLOCK_RULES, *_NORM_RULES)),
        gguf_family("qwen2", (*LLAMA, constant(f"{ATTN}.bias", "qkv")), (*_BLOCK_RULES, *_NORM_RULES)),
        gguf_family("qwen3", LLAMA, (*_BLOCK_RULES, *_NORM_RULES), preset("qwen3-0.6b")),
        gguf_family("gemma", GEMMA, (*_BLOCK_RULES, *(rule._replace(transform=PLUS_ONE) for rule in _NORM_RULES))),
        gguf_family(
            "gpt2",
            size_fields("attention.layer_norm_epsilon"),
            (*_GPT2_RULES, *_BLOCK_RULES, *_NORM_RULES),
            GPT_TEMPLATE,
        ),
    )
}
