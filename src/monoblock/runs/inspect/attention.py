"""Parts of an inspection about attention: maps, statistics and scores of heads, coreference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from monoblock.errors import InputError, did_you_mean
from monoblock.inspection.head_scores import (
    find_coreference_head,
    head_statistics,
    score_repeated_tokens,
    text_chance,
    text_scores,
)
from monoblock.inspection.pruning import attention_layers
from monoblock.inspection.trace import Trace, trace
from monoblock.plots.attention import choose_scale, draw_attention, draw_head_grid, draw_layer, draw_patch_attention
from monoblock.plots.curves import draw_head_statistics
from monoblock.plots.figure import readable_tokens
from monoblock.plots.page import AttentionMap, Section, metrics_table
from monoblock.runs.inspect.inputs import InspectedInput
from monoblock.runs.inspect.part import Part, Request

MIN_NOTED = 2  # tokens; the statistics of fewer say nothing
MARGIN = 0.01  # by which a score must be above chance: less is of no use to a reader
MAX_WEIGHT_BYTES = 3 * 10**9
GRID_TITLES = {
    "encoder.attention": "encoder: all heads",
    "decoder.attention": "decoder: all heads",
    "decoder.cross": "cross-attention from the target to the source: all heads",
}


def attention_part(request: Request) -> Part:
    """Draw the attention of all heads, of one layer, or of one head."""
    layers = list(attention_layers(request.model.config))
    chosen = None if request.layer is None else _find_layer(request.layer, layers)
    seen = _trace_weights(request, layers if chosen is None else [chosen])
    weights = {name.removesuffix(".weights"): value[0].float().cpu().numpy() for name, value in seen.items()}
    maps = [AttentionMap(name, one, *_token_names(name, request.input)) for name, one in weights.items()]
    longest = max(max(one.shape[1:]) for one in weights.values())
    section = Section(
        "Attention of every head",
        "A row of a map is a token that attends, a column a token that is attended to; bright cells have much weight, "
        "grey ones are masked.",
    )
    if request.head is not None:
        return _one_head(request, section, chosen, weights, maps)
    shapes = {name: list(one.shape) for name, one in weights.items()}
    data = {"shapes": shapes, "queries": request.input.tokens, "keys": request.input.source_tokens}
    if request.input.pixels is not None:
        section.figures.append(_patch_figure(request, weights, chosen))
    section.text += f" The colour is the {choose_scale(longest).label}; a pixel of several cells shows the largest."
    heads: Any = None if chosen is None else weights[chosen]
    if chosen is not None:
        tokens = _token_names(chosen, request.input)
        section.figures.append((draw_layer(heads, *tokens, chosen, mask=(heads > 0).any(0)), chosen))
        return Part(section, data, maps)
    section.text += (
        " Above a map of self-attention: the token that has at least half of the weight (the first, the previous, …), "
        "with its share; else whether the head is local or global."
    )
    for group, title in GRID_TITLES.items():
        stack, kind = group.split(".")
        same = {name: one for name, one in weights.items() if name.startswith(stack) and name.endswith(kind)}
        if same:
            section.figures.append((_grid(request, same, title), title))
    return Part(section, data, maps)


def _grid(request: Request, layers: dict[str, Any], title: str) -> Any:
    """Draw the heads of layers of one kind; self-attention with what each head attends to."""
    queries, keys = _token_names(next(iter(layers)), request.input)
    titles = {name: f"layer {name.split('.')[1]}" for name in layers}
    notes: dict[str, list[str]] | None = None
    if not title.startswith("cross") and len(queries) > MIN_NOTED:
        is_target = next(iter(layers)).startswith("decoder")
        tensors = {name: torch.from_numpy(one)[None] for name, one in layers.items()}
        notes = {one: [] for one in titles.values()}
        for row in head_statistics(tensors, special=_special_tokens(request, -1 if is_target else 0)):
            notes[titles[row.layer]].append(row.describe())
    return draw_head_grid(
        {titles[name]: one for name, one in layers.items()},
        title,
        mask={titles[name]: (one > 0).any(0) for name, one in layers.items()},
        queries=queries,
        keys=keys,
        notes=notes,
    )


def _one_head(
    request: Request, section: Section, layer: str | None, weights: dict[str, Any], maps: list[AttentionMap]
) -> Part:
    if layer is None:
        raise InputError(f"--head needs --layer; write a number, or a name such as {list(weights)[-1]}")
    heads, number = weights[layer], request.head
    if number is None or not 0 <= number < len(heads):
        raise InputError(f"{layer} has heads 0 to {len(heads) - 1}, but head {number} was given")
    queries, keys = _token_names(layer, request.input)
    title = f"{layer}, head {number}"
    section.figures.append((draw_attention(heads[number], queries, keys, title, mask=(heads > 0).any(0)), title))
    data = {"layer": layer, "head": number, "queries": queries, "keys": keys}
    return Part(section, data | {"weights": heads[number].round(6).tolist()}, maps)


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
    last = max(int(name.split(".")[1]) for name in names)
    known = f"layers 0 to {last}" if last else "only layer 0"
    raise InputError(
        f"there is no layer {layer!r}; the model has {known}; write a number, or a name such as {names[-1]}"
        f"{did_you_mean(layer, names)}"
    )


def _trace_weights(request: Request, layers: Sequence[str]) -> Trace:
    """Trace the weights of attention layers; raise InputError if they take too much memory."""
    configs = attention_layers(request.model.config)
    sizes = [[len(tokens) for tokens in _token_names(layer, request.input)] for layer in layers]
    count = sum(4 * configs[layer].heads * T * S for layer, (T, S) in zip(layers, sizes, strict=True))
    if count > MAX_WEIGHT_BYTES:
        raise InputError(
            f"the attention weights of {len(layers)} layers on {len(request.input.tokens):,} tokens take "
            f"{count / 1e9:.1f} GB; give a shorter text, or draw one layer: --show attention --layer {len(layers) - 1}"
        )
    names = [f"{layer}.weights" for layer in layers]
    return trace(request.model, *request.input.arguments, names=names, **request.input.options)


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
    names = [name for name in attention_layers(request.model.config) if name.startswith(stack)]
    seen = _trace_weights(request, [name for name in names if name.endswith(".attention")])
    rows = [one.to_json() for one in head_statistics(seen, special=_special_tokens(request, -1))]
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


def _special_tokens(request: Request, argument: int) -> torch.Tensor | None:
    """Return which tokens of an argument of the model are special (1, T); None for an image."""
    if request.input.pixels is not None:
        return None
    ids, special = request.input.arguments[argument], request.pipe.tokenizer.special_ids
    return torch.tensor([[number in special for number in row] for row in ids.tolist()], device=ids.device)


def scores_part(request: Request) -> Part:
    """Score heads on repeated random tokens, and on the text: what each head attends to."""
    scores, level = score_repeated_tokens(request.model)
    rows = [one.to_json() for one in scores]
    ids = request.input.arguments[0][0].tolist()
    names = ["induction", "duplicate", "previous"]
    chance = dict.fromkeys(names, level)
    about = (
        "On random tokens that are repeated once: the mean weight on the token after the former occurrence "
        "(induction), on the former occurrence (duplicate) and on the token before (previous) (Olsson et al. 2022)."
    )
    if request.has_text and len(ids) > 2:
        names += ["positional", "rare"]
        about += (
            " On this text: the share of tokens whose largest weight is on one neighbour, always the same one "
            "(positional), or on the rarest token that they see (rare) (Voita et al. 2019)."
        )
        on_text = text_scores(request.model, [ids], special_ids=request.pipe.tokenizer.special_ids)
        rows = [row | {"positional": one.positional, "rare": one.rare} for row, one in zip(rows, on_text, strict=True)]
        chance |= text_chance(request.model, ids, special_ids=request.pipe.tokenizer.special_ids)
    rows = [{name: row[name] for name in ("layer", "head", *names)} for row in rows]
    section = Section("What heads look for", f"{about} {describe_best_heads(rows, chance)}")
    section.tables.append(metrics_table(rows))
    return Part(section, rows)


def describe_best_heads(rows: Sequence[Mapping[str, Any]], chance: Mapping[str, float]) -> str:
    """Say which head has the highest of each score, or that none is above chance."""
    best = {name: max(rows, key=itemgetter(name)) for name in chance}
    is_above = {name: row[name] >= chance[name] + MARGIN for name, row in best.items()}
    numbers = {name: f"({row[name]:.1%}; chance {chance[name]:.1%})" for name, row in best.items()}
    above = [f"{n}: {row['layer']} head {row['head']} {numbers[n]}" for n, row in best.items() if is_above[n]]
    below = [f"{name} {numbers[name]}" for name in best if not is_above[name]]
    parts = [f"Highest: {'; '.join(above)}."] if above else []
    parts += [f"No head is above chance in {', '.join(below)}."] if below else []
    return (
        f"{' '.join(parts)} Chance is what the best of the {len(rows)} heads reaches in 95 % of draws in which each "
        f"token puts its weights on random keys that it sees; a score is above it by {MARGIN:.0%} or more."
    )


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
        title = f"{result.layer}, head {result.head}; the pronoun is the {row.referent}"
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
