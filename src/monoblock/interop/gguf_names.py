"""DATA: what llama.cpp calls the fields and weights of the families it shares with us.

Its "llama" stores the rows of queries and keys so that pairs lie side by side, where ours turn the two halves of a head
against each other; the step WOVEN_QUERY puts them back. "gemma" stores 1 + w where ours stores w.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from monoblock.config import ModelConfig
from monoblock.errors import ConfigError
from monoblock.families import gpt, llama
from monoblock.interop.hf_config import Const, Field, Fixed, Row, Several, Tree, get, sized
from monoblock.interop.hf_family import LM, Family
from monoblock.interop.rename import ROWS, Heads, Rule, Step, fused
from monoblock.knobs import Values, rebuild
from monoblock.positions import rotary_frequencies
from monoblock.presets import GEMMA_RMS, preset
from monoblock.schema import from_dict, to_dict
from monoblock.schemes import Rotary, Scaling

B, A, F = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"
CLASS = "LanguageModel"
VOCAB, FACTORS = "vocab_size", "rope_freqs"  # told by tensors: the rows of token_embd, and rope_freqs.weight
LLAMA_LIKE = llama(vocab=8, width=8, depth=1, heads=1, context=8)
GPT_LIKE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)


# -- steps -------------------------------------------------------------------------------------------------------------


def _apart(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _together(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _of_query(h: Heads) -> int:
    return h.heads


def _of_key(h: Heads) -> int:
    return h.groups


def _woven(count: Any) -> Step:
    return Step(lambda t, h: [_apart(t[0], count(h))], lambda t, h: [_together(t[0], count(h))])


WOVEN_QUERY, WOVEN_KEY = _woven(_of_query), _woven(_of_key)
ONE_MORE = Step(lambda t, _: [t[0] - 1], lambda t, _: [t[0] + 1])


# -- rows --------------------------------------------------------------------------------------------------------------


def _rotary(full: bool = True) -> Several:
    """The angles; the factors of rope_freqs.weight divide the frequencies one by one (Llama 3)."""
    names = {
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": None,
        "rope.scaling.type": "none",
        "rope.scaling.factor": None,
        "rope.scaling.original_context_length": None,
        "rope.scaling.finetuned": None,
        FACTORS: None,
    }

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        for layer in tree["decoder"]["layers"]:
            attention = layer["attention"]
            size = attention["head_dim"] or layer["width"] // attention["heads"]
            dim = given["rope.dimension_count"] or size
            if full and dim != size:
                raise ConfigError(f"rope.dimension_count={dim} turns a part of heads of {size}, which is not read")
            attention["positions"] = {
                "kind": "rotary",
                "base": given["rope.freq_base"],
                "dim": None if dim == size else dim,
                "layout": "half",
                "scaling": _scaling(given, get(tree, "input.context")),
            }

    def write(tree: Tree) -> dict[str, Any]:
        layer = tree["decoder"]["layers"][0]
        positions = layer["attention"]["positions"]
        if positions is None or positions["kind"] != "rotary" or positions["layout"] != "half":
            raise ConfigError("its positions are not rotary by halves")
        size = layer["attention"]["head_dim"] or layer["width"] // layer["attention"]["heads"]
        found = {"rope.freq_base": positions["base"], "rope.dimension_count": positions["dim"] or size}
        scaling = positions["scaling"]
        if scaling is None:
            return found
        if scaling["kind"] == "linear":
            return found | {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
        if scaling["kind"] == "longrope" and scaling["short_factors"] == scaling["long_factors"]:
            return found | {FACTORS: _factors(from_dict(Rotary, positions, "positions"), size)}
        raise ConfigError(f"the rotary scaling {scaling['kind']!r} is not written")

    return Several(names, read, write)


def _scaling(given: Mapping[str, Any], context: int) -> dict[str, Any] | None:
    if given[FACTORS] is not None:
        return to_dict(Scaling(**_longrope(list(given[FACTORS]), context)))
    match given["rope.scaling.type"]:
        case "none":
            return None
        case "linear":
            return {"kind": "linear", "factor": given["rope.scaling.factor"]}
        case other:
            raise ConfigError(f"the rotary scaling {other!r:.40} is not read")


def _factors(rotary: Rotary, size: int) -> list[float]:
    """How much slower each pair turns than without scaling."""
    plain, _ = rotary_frequencies(replace(rotary, scaling=None), size)
    slowed, factor = rotary_frequencies(rotary, size)
    if factor != 1.0:
        raise ConfigError("its rotary scaling also scales attention, which is not written")
    return [float(one) for one in (plain.double() / slowed.double()).flatten().tolist()]


def by_factors(config: ModelConfig) -> ModelConfig:
    """The same model with the scaling of Llama 3 told by its factors, which is all that GGUF has words for."""
    context = config.context

    def edit(part: Any, values: Values) -> None:
        if isinstance(part, Rotary) and part.scaling is not None and part.scaling.kind == "llama3":
            assert part.dim is not None
            values["scaling"] = Scaling(**_longrope(_factors(part, part.dim), context))

    return rebuild(sized(config), edit)


def _longrope(factors: list[float], context: int | None) -> dict[str, Any]:
    plain = {"kind": "longrope", "factor": 1.0, "attention_factor": 1.0, "original_context": context}
    return plain | {"short_factors": tuple(factors), "long_factors": tuple(factors)}


def sizes(eps: str) -> tuple[Row, ...]:
    return (
        Field(VOCAB, "input.vocab"),
        Field("block_count", "decoder.depth"),
        Field("embedding_length", f"{B}.width"),
        Field("attention.head_count", f"{A}.heads"),
        Field("context_length", "input.context"),
        Field("feed_forward_length", f"{F}.hidden"),
        Field(eps, "**.eps"),
    )


RMS = "attention.layer_norm_rms_epsilon"
LLAMA = (
    *sizes(RMS),
    Field("attention.head_count_kv", f"{A}.kv_heads", None),
    Field("attention.key_length", f"{A}.head_dim", None),
    Field("attention.value_length", f"{A}.value_dim", None),
    Fixed("expert_count", None, (0,)),
    Fixed("expert_used_count", None, (0,)),
    _rotary(),
)
GEMMA = (
    Const(f"{B}.norm decoder.norm", to_dict(GEMMA_RMS)),
    *LLAMA,
    Const("input.scale", "sqrt_width"),
    Const(f"{F}.activation", "gelu_tanh"),
)

# -- weights -----------------------------------------------------------------------------------------------------------

_BLOCK = (
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
_NORMS = (
    Rule("decoder.*.attention_norm", "blk.*.attn_norm"),
    Rule("decoder.*.feedforward_norm", "blk.*.ffn_norm"),
    Rule("decoder.norm", "output_norm"),
)
_WOVEN = (
    Rule("decoder.*.attention.query", "blk.*.attn_q", WOVEN_QUERY),
    Rule("decoder.*.attention.key", "blk.*.attn_k", WOVEN_KEY),
)
_GPT2 = (
    Rule("input.position", "position_embd"),
    Rule(fused("decoder.*.attention"), "blk.*.attn_qkv", ROWS),
)


def family(kind: str, rows: tuple[Row, ...], weights: tuple[Rule, ...], start: Any = LLAMA_LIKE) -> Family:
    return Family(kind=kind, start=start, rows=rows, weights=weights, classes={CLASS: LM})


ARCHITECTURES = {
    one.kind: one
    for one in (
        family("llama", LLAMA, (*_WOVEN, *_BLOCK, *_NORMS)),
        family("qwen2", (*LLAMA, Const(f"{A}.bias", "qkv")), (*_BLOCK, *_NORMS)),
        family("qwen3", LLAMA, (*_BLOCK, *_NORMS), preset("qwen3-0.6b")),
        family("gemma", GEMMA, (*_BLOCK, *(rule._replace(step=ONE_MORE) for rule in _NORMS))),
        family("gpt2", sizes("attention.layer_norm_epsilon"), (*_GPT2, *_BLOCK, *_NORMS), GPT_LIKE),
    )
}
