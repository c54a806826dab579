"""The parts of an inspection: each computes numbers for JSON, tables and figures.

`PARTS` maps the name of a part, as in `monoblock inspect --show lens`, to its function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from monoblock.accounting.report import account
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.errors import InputError, did_you_mean
from monoblock.inspection.coreference import find_coreference_head
from monoblock.inspection.head_scores import repeated_token_scores
from monoblock.inspection.head_statistics import head_statistics
from monoblock.inspection.lens import logit_lens
from monoblock.inspection.norms import gradient_norms, residual_norms
from monoblock.inspection.position_tables import position_tables
from monoblock.inspection.trace import trace
from monoblock.nn.masks import Mask, mask_from_config
from monoblock.nn.transformer import Transformer
from monoblock.plots.attention import draw_attention, draw_head_grid, draw_patch_attention
from monoblock.plots.curves import draw_bars, draw_curves, draw_head_statistics, draw_lens
from monoblock.plots.masks import draw_masks
from monoblock.plots.page import AttentionMap, Section, metrics_table
from monoblock.plots.positions import draw_bias, draw_hands, draw_vectors
from monoblock.plots.tokens import readable_tokens
from monoblock.runs.inspect.inputs import InspectedInput
from monoblock.runs.inspect.measurements import probes_part, profile_part
from monoblock.runs.inspect.part import Part, Request

MAX_MASK_LENGTH = 48
MIN_POSITIONS, MAX_POSITIONS = 64, 256  # that are drawn
GRID_TITLES = {
    "encoder.attention": "encoder: all heads",
    "decoder.attention": "decoder: all heads",
    "decoder.cross": "cross-attention from the target to the source: all heads",
}


# -- attention ----------------------------------------------------------------------------------------------------


def attention_part(request: Request) -> Part:
    """Draw the attention of all heads, of one layer, or of one head."""
    seen = trace(request.model, *request.input.arguments, names="*.weights", **request.input.options)
    weights = {name.removesuffix(".weights"): value[0].float().cpu().numpy() for name, value in seen.items()}
    chosen = None if request.layer is None else _find_layer(request.layer, list(weights))
    maps = [AttentionMap(name, one, *_token_names(name, request.input)) for name, one in weights.items()]
    section = Section(
        "Attention of every head",
        "A row of a map is a token that attends, a column a token that is attended to; bright cells have much weight. "
        "Each head is drawn from 0 to its own largest weight.",
    )
    if request.head is not None:
        name = chosen or _only_layer(list(weights))
        queries, keys = _token_names(name, request.input)
        heads = weights[name]
        if not 0 <= request.head < len(heads):
            raise InputError(f"{name} has heads 0 to {len(heads) - 1}, but head {request.head} was given")
        title = f"{name}, head {request.head}"
        mask: Any = (heads > 0).any(0)
        section.figures.append((draw_attention(heads[request.head], queries, keys, title, mask=mask), title))
        data = {"layer": name, "head": request.head, "queries": queries, "keys": keys}
        return Part(section, data | {"weights": heads[request.head].round(6).tolist()}, maps)
    if request.input.pixels is not None:
        section.figures.append(_patch_figure(request, weights, chosen))
    groups: dict[str, dict[str, Any]] = {}
    for name, one in weights.items():
        stack, number, kind = name.split(".")
        if chosen in (None, name):
            groups.setdefault(f"{stack}.{kind}", {})[f"layer {number}"] = one
    for group, layers in groups.items():
        masks = {name: (one > 0).any(0) for name, one in layers.items()}
        title = GRID_TITLES[group] if chosen is None else chosen
        section.figures.append((draw_head_grid(layers, title, mask=masks), title))
    shapes = {name: list(one.shape) for name, one in weights.items()}
    return Part(section, {"shapes": shapes, "queries": request.input.tokens, "keys": request.input.source_tokens}, maps)


def _token_names(layer: str, inspected: InspectedInput) -> tuple[list[str], list[str]]:
    """Return the tokens of the queries and of the keys of an attention layer."""
    stack, _, kind = layer.split(".")
    if not inspected.target_tokens or stack == "encoder":
        return inspected.source_tokens, inspected.source_tokens
    return inspected.target_tokens, inspected.source_tokens if kind == "cross" else inspected.target_tokens


def _find_layer(layer: str, names: list[str]) -> str:
    matching = [name for name in names if layer in (name, name.split(".")[1])]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise InputError(f"there are {len(matching)} layers {layer}; write one of {', '.join(matching)}")
    raise InputError(
        f"there is no layer {layer!r}; write a number, or a name such as {names[-1]}{did_you_mean(layer, names)}"
    )


def _only_layer(names: list[str]) -> str:
    raise InputError(f"--head needs --layer; write a number, or a name such as {names[-1]}")


def _patch_figure(request: Request, weights: dict[str, Any], chosen: str | None) -> tuple[Any, str]:
    name = chosen or list(weights)[-1]
    first = request.input.num_special
    # The class token sums up the image; without one, the mean over all patches does.
    heads = weights[name][:, 0] if first else weights[name].mean(1)
    query = "the class token" if first else "the mean of all patches"
    title = f"{name}: what {query} attends to"
    return draw_patch_attention(request.input.pixels, heads, title, first=first), title


def heads_part(request: Request) -> Part:
    """Say which heads are local and which global (Clark et al. 2019)."""
    stack = "decoder" if request.model.decoder is not None else "encoder"
    names = f"{stack}.*.attention.weights"
    seen = trace(request.model, *request.input.arguments, names=names, **request.input.options)
    rows = [one.to_json() for one in head_statistics(seen, special=_special_tokens(request))]
    local = sum(row["scope"] == "local" for row in rows)
    section = Section(
        "Local and global heads",
        f"{local} of {len(rows)} heads are local: the mean distance between a token and those it attends to is below "
        "half of that of uniform attention, special tokens left out. fixed_token names the token that has half of a "
        "head's weight. Entropies are in nats; all numbers are means over the tokens of this text (Clark et al. 2019).",
    )
    section.tables.append(metrics_table(rows))
    section.figures.append((draw_head_statistics(rows), "statistics of every head"))
    return Part(section, rows)


def _special_tokens(request: Request) -> torch.Tensor | None:
    """Return which tokens are special (1, T); None for an image."""
    if request.input.pixels is not None:
        return None
    ids, special = request.input.arguments[-1], request.pipe.tokenizer.special_ids
    return torch.tensor([[number in special for number in row] for row in ids.tolist()], device=ids.device)


def scores_part(request: Request) -> Part:
    """Score heads on repeated random tokens: induction, duplicate-token and previous-token heads."""
    rows = [one.to_json() for one in repeated_token_scores(request.model)]
    for row in rows:
        del row["positional"], row["rare"]
    best = {name: max(rows, key=itemgetter(name)) for name in ("induction", "duplicate", "previous")}
    described = "; ".join(f"{name}: {row['layer']} head {row['head']} ({row[name]:.0%})" for name, row in best.items())
    section = Section(
        "Induction, duplicate-token and previous-token heads",
        "Measured on random tokens that are repeated once: the mean weight on the token after the former occurrence "
        "(induction), on the former occurrence (duplicate) and on the token before (previous) (Olsson et al. 2022). "
        f"Highest: {described}.",
    )
    section.tables.append(metrics_table(rows))
    return Part(section, rows)


# -- layer by layer -----------------------------------------------------------------------------------------------


def lens_part(request: Request) -> Part:
    layers = logit_lens(request.model, *request.input.arguments, **request.input.options)
    tokenizer, tokens = request.pipe.tokenizer, request.input.tokens
    names = [readable_tokens(tokenizer, layer.tokens[:, 0].tolist()) for layer in layers]
    probabilities = np.stack([layer.probabilities[:, 0].cpu().numpy() for layer in layers])
    section = Section(
        "Logit lens",
        "What the model would predict after each token if it ended after this layer: the last norm and the head are "
        "applied to the residual stream (nostalgebraist 2020). The last row is the prediction of the model.",
    )
    figure = draw_lens([layer.name for layer in layers], tokens, names, probabilities)
    section.figures.append((figure, "predictions after each layer"))
    data = [
        {
            "layer": layer.name,
            "predictions": name,
            "probabilities": layer.probabilities[:, 0].cpu().double().numpy().round(4).tolist(),
            "final_rank": layer.final_rank.tolist(),
        }
        for layer, name in zip(layers, names, strict=True)
    ]
    return Part(section, {"tokens": tokens, "layers": data})


def norms_part(request: Request) -> Part:
    model, options = request.model, request.input.options
    has_gradients = all(p.requires_grad for p in model.parameters()) and next(model.parameters(), None) is not None
    measure = gradient_norms if has_gradients else residual_norms
    stacks = measure(model, *request.input.arguments, **options)
    section = Section(
        "Norms by depth",
        "The norm of the residual stream, of what each sublayer adds to it (means over tokens), and of the gradient of "
        "the cross-entropy of this text.",
    )
    for norms in stacks:
        points = ["input", *(str(layer) for layer in range(len(norms.residual) - 1))]
        curves = {"residual stream": norms.residual} | norms.updates
        starts = dict.fromkeys(norms.updates, 1)
        figure = draw_curves(f"{norms.stack}: residual stream", "after layer", "norm", points, curves, starts=starts)
        section.figures.append((figure, f"norms of the {norms.stack}"))
        if norms.gradients and any(norms.gradients):
            gradients = {"residual stream": norms.gradients, "weights of the block": norms.weight_gradients}
            title = f"{norms.stack}: gradient"
            figure = draw_curves(
                title, "after layer", "norm", points, gradients, starts={"weights of the block": 1}, logarithmic=True
            )
            section.figures.append((figure, f"gradient norms of the {norms.stack}"))
    return Part(section, [asdict(norms) for norms in stacks])


# -- the model, whatever the text ---------------------------------------------------------------------------------


def positions_part(request: Request) -> Part:
    length = max(MIN_POSITIONS, min(MAX_POSITIONS, len(request.input.tokens)))
    tables = position_tables(request.model, min(length, request.model.config.context or length))
    if not tables:
        raise InputError("this model has no position encoding")
    section = Section("Positions", "How the model tells positions apart.")
    data = []
    for table in tables:
        if table.vectors is not None:
            section.figures.append((draw_vectors(table.vectors, table.title), table.title))
        if table.frequencies is not None:
            title = "pairs of dimensions as hands: each turns by its own angle per position"
            section.figures.append((draw_hands(table.frequencies, title, length=length), title))
        if table.bias is not None and table.offsets is not None:
            section.figures.append((draw_bias(table.bias, table.offsets.tolist(), table.title), table.title))
        sizes = table.vectors if table.vectors is not None else table.bias
        data.append({"kind": table.kind, "title": table.title, "shape": list(sizes.shape)})  # type: ignore[union-attr]
    return Part(section, data)


def masks_part(request: Request) -> Part:
    masks: list[tuple[str, Mask]] = []
    for name, stack in request.model.config.stacks.items():
        for config in dict.fromkeys(block.attention for block in stack.layers()):
            mask = mask_from_config(config)
            layers = [str(n) for n, block in enumerate(stack.layers()) if block.attention == config]
            shown = (
                "all layers"
                if len(layers) == stack.depth
                else f"layers {', '.join(layers[:4])}" + " …" * (len(layers) > 4)
            )
            text = str(mask).replace(" & same_document", "").replace("same_document", "everything")
            masks.append((f"{name}, {shown}:\n{text}", mask))
    length = max(8, min(MAX_MASK_LENGTH, len(request.input.tokens)))
    section = Section("Masks", "Which tokens a token may attend to, from the configuration of the model.")
    section.figures.append((draw_masks(masks, length), "attention masks"))
    return Part(section, [title.replace("\n", " ") for title, _ in masks])


def parameters_part(request: Request) -> Part:
    components = dict(account(request.model.config).components)
    total = sum(components.values())
    section = Section("Parameters", f"{total:,} parameters, counted from the configuration.")
    figure = draw_bars(f"{total:,} parameters", "parameters", components)
    section.figures.append((figure, "parameters by component"))
    return Part(section, components)


def coreference_part(request: Request) -> Part:
    """Find the head that resolves pronouns best, over twenty pairs of sentences."""
    pipe = request.pipe
    template = pipe.loaded.input_template()
    result = find_coreference_head(
        request.model, pipe.tokenizer, lambda text: template(pipe.tokenizer.encode(text)).ids
    )
    best = f"{result.layer} head {result.head}"
    section = Section(
        "Coreference",
        f"{best} resolves the pronoun in {result.score:.1%} of {len(result.rows)} sentences, and in both sentences of "
        f"{result.pair_score:.0%} of the pairs: its weight from the pronoun is larger on the right noun than on the "
        f"other. It is the best of {result.num_heads} heads; a head that knows only positions resolves 50 %, and the "
        f"best of so many heads reaches up to {result.chance:.1%} by chance. The table lists its misses.",
    )
    columns = ("sentence", "the pronoun is", "weight on it", "other noun", "weight on that")
    rows = [(row.sentence, row.referent, row.referent_weight, row.other, row.other_weight) for row in result.misses]
    section.tables.append((columns, rows))
    for row in result.rows[:2]:
        ids = template(pipe.tokenizer.encode(row.sentence)).ids
        name = f"{result.layer}.weights"
        seen = trace(request.model, torch.tensor([ids], device=request.model.device), names=name)
        tokens = readable_tokens(pipe.tokenizer, ids)
        title = f"{result.layer}, head {result.head}"
        weights = seen[name][0, result.head].float().cpu().numpy()
        section.figures.append((draw_attention(weights, tokens, tokens, title), f"{title}: {row.sentence}"))
    data = {
        "layer": result.layer,
        "head": result.head,
        "score": result.score,
        "pair_score": result.pair_score,
        "chance": result.chance,
        "num_heads": result.num_heads,
        "misses": [row._asdict() for row in result.misses],
    }
    return Part(section, data)


PARTS: dict[str, Callable[[Request], Part]] = {
    "attention": attention_part,
    "heads": heads_part,
    "scores": scores_part,
    "lens": lens_part,
    "norms": norms_part,
    "positions": positions_part,
    "masks": masks_part,
    "parameters": parameters_part,
    "coreference": coreference_part,
    "profile": profile_part,
    "probes": probes_part,
}


def default_parts(model: Transformer) -> list[str]:
    """Return the names of the parts that apply to a model; coreference, profile and probes have to be asked for."""
    left_out = {"coreference", "profile", "probes"}
    if model.head is None or model.head.config.kind not in VOCABULARY_HEADS:
        left_out.add("lens")
    if model.config.family not in ("decoder-only", "encoder-only"):
        left_out.add("scores")
    if not any(position_tables(model, 8)):
        left_out.add("positions")
    return [name for name in PARTS if name not in left_out]
