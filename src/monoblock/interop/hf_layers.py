"""Rows for what only one published family says: its switches on layers, norms, positions and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monoblock.config import Alibi, NormConfig, Rotary
from monoblock.interop.hf_config import Several, Tree, get, put
from monoblock.interop.hf_rotary import rotary
from monoblock.schema import to_dict

B, A, F = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"


def sparse(experts: str) -> Several:
    """Which layers have experts: every so many-th, and none of those named; the others one feed-forward."""
    names = {experts: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
             "decoder_sparse_step": 1, "mlp_only_layers": (), "intermediate_size": 6144}  # fmt: skip

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        router = "softmax_renormalized" if given["norm_topk_prob"] else "softmax"
        for n, layer in enumerate(tree["decoder"]["layers"]):
            dense = (
                n in (given["mlp_only_layers"] or ()) or (n + 1) % given["decoder_sparse_step"] or not given[experts]
            )
            routed = {"count": given[experts], "top_k": given["num_experts_per_tok"], "router": router}
            layer["feedforward"]["experts"] = None if dense else routed
            layer["feedforward"]["hidden"] = given["intermediate_size" if dense else "moe_intermediate_size"]

    def write(tree: Tree) -> dict[str, Any]:
        all_ = [layer["feedforward"] for layer in tree["decoder"]["layers"]]
        routed = next(f for f in all_ if f["experts"] is not None)
        dense = next((f for f in all_ if f["experts"] is None), routed)
        return {
            experts: routed["experts"]["count"],
            "num_experts_per_tok": routed["experts"]["top_k"],
            "norm_topk_prob": routed["experts"]["router"] == "softmax_renormalized",
            "moe_intermediate_size": routed["hidden"],
            "intermediate_size": dense["hidden"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n, f in enumerate(all_) if f["experts"] is None],
        }

    return Several(names, read, write)


def without_rope() -> Several:
    """SmolLM3: some layers turn nothing."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        layers = tree["decoder"]["layers"]
        every_ = given["no_rope_layer_interval"]
        turned = given["no_rope_layers"] or [(n + 1) % every_ != 0 for n in range(len(layers))]
        for layer, on in zip(layers, turned, strict=True):
            layer["attention"]["positions"] = layer["attention"]["positions"] if on else None

    def write(tree: Tree) -> dict[str, Any]:
        layers = tree["decoder"]["layers"]
        return {"no_rope_layers": [int(layer["attention"]["positions"] is not None) for layer in layers]}

    return Several({"no_rope_layers": None, "no_rope_layer_interval": 4}, read, write)


def qk_norm(theirs: str, over_what: str, norm: NormConfig) -> Several:
    """A switch of theirs for norms on queries and keys."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, f"{A}.qk_norm", to_dict(norm) | {"eps": get(tree, f"{B}.norm.eps")} if given[theirs] else None)
        put(tree, f"{A}.qk_norm_over", over_what if given[theirs] else "head")

    return Several({theirs: False}, read, lambda tree: {theirs: get(tree, f"{A}.qk_norm") is not None})


def attention_scale() -> Several:
    """GPT-2's two switches on the scores: by the root of the head size, and by the number of the layer."""
    names = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        for n, layer in enumerate(tree["decoder"]["layers"]):
            scale = (layer["width"] // layer["attention"]["heads"]) ** -0.5 if given["scale_attn_weights"] else 1.0
            scale = scale / (n + 1) if given["scale_attn_by_inverse_layer_idx"] else scale
            layer["attention"]["scale"] = None if not n and given["scale_attn_weights"] else scale
            if given["scale_attn_weights"] and not given["scale_attn_by_inverse_layer_idx"]:
                layer["attention"]["scale"] = None

    def write(tree: Tree) -> dict[str, Any]:
        layers = tree["decoder"]["layers"]
        first, last = layers[0]["attention"], layers[-1]["attention"]
        return {
            "scale_attn_weights": first["scale"] == first["head_dim"] ** -0.5,
            "scale_attn_by_inverse_layer_idx": first["scale"] != last["scale"],
        }

    return Several(names, read, write)


def neo_layers() -> Several:
    """GPT-Neo: attention_types as [[[types…], times], …], global or within a window."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        kinds = [kind for run, times in given["attention_types"] for _ in range(times) for kind in run]
        for layer, kind in zip(tree["decoder"]["layers"], kinds, strict=True):
            layer["attention"]["window"] = {"global": None, "local": given["window_size"]}[kind]

    def write(tree: Tree) -> dict[str, Any]:
        windows = [layer["attention"]["window"] for layer in tree["decoder"]["layers"]]
        kinds = ["global" if window is None else "local" for window in windows]
        near = next((window for window in windows if window is not None), 256)
        return {"attention_types": [[kinds, 1]], "window_size": near}

    names = {"attention_types": [[["global", "local"], 12]], "window_size": 256, "attention_layers": None}
    return Several(names, read, write)


def mpt_attention() -> Several:
    usual = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False}
    free = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None}
    silent = {"attn_impl", "attn_pdrop", "model_type"}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        said = usual | free | (given["attn_config"] or {})
        for name, value in said.items():
            if name not in {*free, *silent} and (name not in usual or value != usual[name]):
                raise KeyError(f"attn_config.{name}={value!r} is not known here")
        if not said["alibi"]:
            raise KeyError("attn_config.alibi must be true: the published class has no other positions")
        put(tree, f"{A}.positions", to_dict(Alibi(max_bias=said["alibi_bias_max"])))
        put(tree, f"{A}.clip", said["clip_qkv"])
        put(tree, f"{A}.scale", said["softmax_scale"])

    def write(tree: Tree) -> dict[str, Any]:
        attention = tree["decoder"]["layers"][0]["attention"]
        usual_scale = attention["scale"] == attention["head_dim"] ** -0.5
        found = {
            "alibi": True,
            "alibi_bias_max": attention["positions"]["max_bias"],
            "clip_qkv": attention["clip"],
            "softmax_scale": None if usual_scale else attention["scale"],
        }
        return {"attn_config": found}

    return Several({"attn_config": None}, read, write)


def falcon() -> Several:
    """Falcon's three shapes: one key head and one norm; key heads in groups and two norms; ALiBi in sequence."""
    names = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False,
             "num_kv_heads": None, "num_ln_in_parallel_attn": None}  # fmt: skip

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        new, heads = given["new_decoder_architecture"], get(tree, f"{A}.heads")
        groups = 1 if given["multi_query"] and not new else given["num_kv_heads"] or heads
        norms = given["num_ln_in_parallel_attn"] or (2 if new else 1)
        together = "parallel" if new and norms == 2 else "parallel_shared"
        if new and not given["parallel_attn"]:
            raise KeyError("the new decoder architecture is parallel")
        put(tree, f"{A}.kv_heads", groups)
        put(tree, f"{B}.residual", together if given["parallel_attn"] else "sequential")
        put(tree, f"{A}.positions", to_dict(Alibi(form="falcon") if given["alibi"] else Rotary()))

    def write(tree: Tree) -> dict[str, Any]:
        layer = tree["decoder"]["layers"][0]
        heads, groups = layer["attention"]["heads"], layer["attention"]["kv_heads"]
        new = layer["residual"] == "parallel" or groups not in (1, heads)
        return {
            "new_decoder_architecture": new,
            "multi_query": groups == 1 and not new,
            "parallel_attn": layer["residual"] != "sequential",
            "alibi": layer["attention"]["positions"]["kind"] == "alibi",
            "num_kv_heads": groups,
            "num_ln_in_parallel_attn": (2 if layer["residual"] == "parallel" else 1) if new else None,
        }

    return Several(names, read, write)


def unless_alibi() -> Several:
    turned = rotary()

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        if get(tree, f"{A}.positions")["kind"] == "rotary":
            turned.read(given, tree)

    def write(tree: Tree) -> dict[str, Any]:
        return turned.write(tree) if get(tree, f"{A}.positions")["kind"] == "rotary" else {}

    return Several(turned.names, read, write)


def opt_norms() -> Several:
    """OPT: norms before with one at the end, or after (350m); with weights or, in Galactica, biases nowhere."""
    names = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        norm = to_dict(NormConfig(affine="scale_shift" if given["layer_norm_elementwise_affine"] else "none"))
        before = given["do_layer_norm_before"]
        put(tree, f"{B}.norm", norm)
        put(tree, f"{B}.norm_place", "pre" if before else "post")
        put(tree, "decoder.norm", norm if before and not given["_remove_final_layer_norm"] else None)

    def write(tree: Tree) -> dict[str, Any]:
        before = get(tree, f"{B}.norm_place") == "pre"
        return {
            "do_layer_norm_before": before,
            "_remove_final_layer_norm": before and get(tree, "decoder.norm") is None,
            "layer_norm_elementwise_affine": get(tree, f"{B}.norm.affine") != "none",
        }

    return Several(names, read, write)


def projected() -> Several:
    """OPT: the size of the embedding where it is not the width."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        size, width = given["word_embed_proj_dim"], get(tree, f"{B}.width")
        put(tree, "input.dim", None if size in (None, width) else size)

    def write(tree: Tree) -> dict[str, Any]:
        return {"word_embed_proj_dim": get(tree, "input.dim") or get(tree, f"{B}.width")}

    return Several({"word_embed_proj_dim": None}, read, write)


def all_biases(theirs: str) -> Several:
    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, f"{A}.bias", "qkvo" if given[theirs] else "")
        put(tree, f"{F}.bias", bool(given[theirs]))

    return Several({theirs: True}, read, lambda tree: {theirs: get(tree, f"{F}.bias")})
