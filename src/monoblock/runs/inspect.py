"""Inspect a stored model on a text, a source with its target, or an image: attention, layers, positions, cost, probes.

`PARTS` maps the name of a part, as in `monoblock inspect --show lens`, to the function that computes its numbers for
JSON, tables and figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monoblock.config.model import EmbeddingConfig, PatchConfig
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.data.corpora.load import infer_corpus_kind, load_corpus
from monoblock.data.corpora.table import CORPORA
from monoblock.errors import InputError, did_you_mean
from monoblock.inspection.head_scores import (
    find_coreference_head,
    head_statistics,
    score_repeated_tokens,
    text_chance,
    text_scores,
)
from monoblock.inspection.position_tables import position_tables
from monoblock.inspection.probing import LabelledText, probe_layers
from monoblock.inspection.profile import ProfileRow, profile_sweep
from monoblock.inspection.pruning import attention_layers
from monoblock.inspection.residual_stream import describe_text_loss, gradient_norms, logit_lens, residual_norms
from monoblock.inspection.trace import Trace, trace
from monoblock.model import Transformer
from monoblock.nn.masks import Mask, mask_from_config
from monoblock.plots.attention import choose_scale, draw_attention, draw_head_grid, draw_layer, draw_patch_attention
from monoblock.plots.curves import draw_bars, draw_curves, draw_head_statistics, draw_lens
from monoblock.plots.figure import check_length, check_plot_path, readable_tokens, save_figure
from monoblock.plots.masks import draw_masks
from monoblock.plots.page import AttentionMap, Section, metrics_table
from monoblock.plots.positions import draw_bias, draw_hands, draw_vectors
from monoblock.runs.account import account
from monoblock.runs.load import load
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.images import read_pixels
from monoblock.tasks.input_template import WordEncoder

MAX_TARGET = 64  # tokens of a target that the model writes itself
MIN_NOTED = 2  # tokens; the statistics of fewer say nothing
MARGIN = 0.01  # by which a score must be above chance: less is of no use to a reader
MAX_WEIGHT_BYTES = 3 * 10**9
MAX_MASK_LENGTH = 48
MIN_POSITIONS, MAX_POSITIONS = 64, 256  # that are drawn
DEFAULT_LENGTHS = (32, 64, 128, 256)
GRID_TITLES = {
    "encoder.attention": "encoder: all heads",
    "decoder.attention": "decoder: all heads",
    "decoder.cross": "cross-attention from the target to the source: all heads",
}
SUBLAYERS = {"attention": "attention", "cross": "cross-attention", "feedforward": "feed-forward"}
KINDS = {"attention": "attention", "feedforward": "feed-forward"}


@dataclass(frozen=True)
class InspectedInput:
    """The arguments of the model for one input, and the names of its tokens."""

    arguments: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    source_tokens: list[str] = field(default_factory=list)  # of a model of one stack: its tokens
    target_tokens: list[str] = field(default_factory=list)  # of an encoder-decoder
    pixels: Any = None  # (channels, height, width), from 0 to 1
    num_special: int = 0  # tokens before the first patch of an image

    @property
    def tokens(self) -> list[str]:
        """The tokens that the model predicts from: those of the target, if there is one."""
        return self.target_tokens or self.source_tokens


@dataclass(frozen=True)
class Request:
    """What is inspected."""

    pipe: Pipeline
    input: InspectedInput
    layer: str | None = None  # a number, or a name such as "decoder.3.cross"
    head: int | None = None
    has_text: bool = True  # else the input is an example, and only parts that need no text are asked for
    lengths: tuple[int, ...] = ()  # of the profile; () chooses them
    batches: tuple[int, ...] = (1,)
    labelled_data: str | None = None  # the corpus of the probes
    data_folder: Path | None = None
    limit: int = 300  # texts that probes use

    @property
    def model(self) -> Transformer:
        return transformer_of(self.pipe)


@dataclass
class Part:
    section: Section
    data: Any = None  # for JSON
    maps: list[AttentionMap] = field(default_factory=list)  # for the viewer of an HTML page


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


def save_attention(folder: Path, text: str, path: Path) -> Path:
    """Draw the attention of every head of a model folder on a text to a .png, .svg or .pdf file."""
    check_plot_path(path)
    pipe = load(folder, device="cpu")
    figure, _ = attention_part(Request(pipe, encode_input(pipe, text))).section.figures[0]
    return save_figure(figure, path)


# -- what is inspected ------------------------------------------------------------------------------------------------


def transformer_of(pipe: Pipeline) -> Transformer:
    if not isinstance(pipe.model, Transformer):
        raise InputError("inspect reads Transformers, but this model is an LSTM; use mb.trace in Python")
    return pipe.model


def encode_input(pipe: Pipeline, text: str, target: str | None = None) -> InspectedInput:
    """Encode a text as the model was trained to read it; of a vision model, the text is the path of an image."""
    model = transformer_of(pipe)
    if target is not None and model.config.family != "encoder-decoder":
        raise InputError(f"a target is for an encoder-decoder, but this model is {model.config.family}; leave it out")
    if isinstance(model.config.input, PatchConfig):
        return _encode_image(pipe, model, Path(text))
    if not isinstance(model.config.input, EmbeddingConfig):
        raise InputError("inspect reads texts and images, but this model reads audio; use mb.trace in Python")
    if not text.strip():
        raise InputError("the text to inspect is empty; give at least one word")
    if model.config.family == "encoder-decoder":
        return _encode_pair(pipe, model, text, target)
    loaded, options = pipe, {}
    if model.encoder is None:
        ids = list(loaded.encode_prompt(text).ids)
    else:
        encoded = loaded.input_template()(pipe.tokenizer.encode(text))
        ids = encoded.ids
        if model.config.input.segments > 1:
            options["segments"] = torch.tensor([encoded.segments], device=model.device)
    check_length(len(ids))
    return InspectedInput((torch.tensor([ids], device=model.device),), options, readable_tokens(pipe.tokenizer, ids))


def _encode_image(pipe: Pipeline, model: Transformer, path: Path) -> InspectedInput:
    config = model.config.input
    assert isinstance(config, PatchConfig)
    preprocessing = pipe.image_preprocessing
    pixels = read_pixels(path, config, preprocessing)[0]
    tensor = preprocessing(torch.from_numpy(pixels))[None].to(model.device, model_dtype(model))
    num_special = config.num_class_tokens + config.registers
    side = config.image // config.patch
    special = [f"token {number}" for number in range(num_special)]
    if config.class_token:
        special[0] = "class"
    patches = [f"{row},{column}" for row in range(side) for column in range(side)]
    return InspectedInput((tensor,), {}, special + patches, pixels=pixels, num_special=num_special)


def model_dtype(model: Transformer) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _encode_pair(pipe: Pipeline, model: Transformer, text: str, target: str | None) -> InspectedInput:
    prompt = pipe.encode_prompt(text)
    assert prompt.source is not None
    check_length(len(prompt.source))
    if target is None:
        settings = pipe.resolve_settings({"max_new_tokens": MAX_TARGET})
        target_ids = list(pipe.decode([prompt], settings)[0][0].ids)
    else:
        target_ids = pipe.tokenizer.encode(target)
        check_length(len(target_ids))
    ids = [*prompt.ids, *target_ids]
    source_tokens, target_tokens = (readable_tokens(pipe.tokenizer, list(part)) for part in (prompt.source, ids))
    arguments = tuple(torch.tensor([list(part)], device=model.device) for part in (prompt.source, ids))
    return InspectedInput(arguments, {}, source_tokens, target_tokens)


# -- attention --------------------------------------------------------------------------------------------------------


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
        name = chosen or list(weights)[-1]
        first = request.input.num_special
        # The class token sums up the image; without one, the mean over all patches does.
        over_patches = weights[name][:, 0] if first else weights[name].mean(1)
        title = f"{name}: what {'the class token' if first else 'the mean of all patches'} attends to"
        section.figures.append((draw_patch_attention(request.input.pixels, over_patches, title, first=first), title))
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
    template = pipe.input_template()
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


# -- layer by layer ---------------------------------------------------------------------------------------------------


def lens_part(request: Request) -> Part:
    layers = logit_lens(request.model, *request.input.arguments, **request.input.options)
    tokenizer, tokens = request.pipe.tokenizer, request.input.tokens
    names = [readable_tokens(tokenizer, layer.tokens[0, :, 0].tolist()) for layer in layers]
    probabilities = np.stack([layer.probabilities[0, :, 0].cpu().numpy() for layer in layers])
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
            "probabilities": layer.probabilities[0, :, 0].cpu().double().numpy().round(4).tolist(),
            "final_rank": layer.final_rank[0].tolist(),
        }
        for layer, name in zip(layers, names, strict=True)
    ]
    return Part(section, {"tokens": tokens, "layers": data})


def norms_part(request: Request) -> Part:
    model, options = request.model, request.input.options
    weights = list(model.parameters())
    has_gradients = bool(weights) and all(weight.requires_grad for weight in weights)
    measure = gradient_norms if has_gradients else residual_norms
    stacks = measure(model, *request.input.arguments, **options)
    section = Section(
        "Norms by depth",
        "The Euclidean norm of the residual stream and of what each sublayer computes from it (means over tokens); and "
        f"of the gradient of {describe_text_loss(model)}, with respect to the residual stream and to the weights of "
        "each block.",
    )
    for norms in stacks:
        points = ["input", *(str(layer) for layer in range(len(norms.residual) - 1))]
        updates = {f"output of {SUBLAYERS[name]}": values for name, values in norms.updates.items()}
        curves = {"residual stream": norms.residual} | updates
        title, starts = f"{norms.stack}: residual stream and sublayers", dict.fromkeys(updates, 1)
        figure = draw_curves(title, "after layer", "norm, mean over tokens", points, curves, starts=starts)
        section.figures.append((figure, f"norms of the {norms.stack}"))
        if norms.gradients and any(norms.gradients):
            gradients = {"residual stream": norms.gradients, "weights of the block": norms.weight_gradients}
            title = f"{norms.stack}: gradient"
            figure = draw_curves(
                title,
                "after layer",
                "norm of the gradient",
                points,
                gradients,
                starts={"weights of the block": 1},
                logarithmic=True,
            )
            section.figures.append((figure, f"gradient norms of the {norms.stack}"))
    return Part(section, [asdict(norms) for norms in stacks])


# -- the model, whatever the text -------------------------------------------------------------------------------------


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
    count = len(request.input.tokens)
    length = max(8, min(MAX_MASK_LENGTH, count))
    note = f"; the first {length} of {count:,} positions" if length < count else ""
    section = Section("Masks", "Which tokens a token may attend to, from the configuration of the model.")
    section.figures.append((draw_masks(masks, length, note=note), "attention masks"))
    return Part(section, [title.replace("\n", " ") for title, _ in masks])


def parameters_part(request: Request) -> Part:
    components = dict(account(request.model).components)
    total = sum(components.values())
    section = Section("Parameters", f"{total:,} parameters, counted from the configuration.")
    figure = draw_bars(f"{total:,} parameters", "parameters", components)
    section.figures.append((figure, "parameters by component"))
    return Part(section, components)


# -- what takes longer ------------------------------------------------------------------------------------------------


def profile_part(request: Request) -> Part:
    """Measure forward and backward passes by kind over lengths and batches, and by layer at the largest."""
    model, context = request.model, request.model.config.context
    lengths = request.lengths or tuple(n for n in DEFAULT_LENGTHS if context is None or n <= context) or (context or 1,)
    rows = list(profile_sweep(model, lengths, request.batches))
    (largest,) = profile_sweep(model, lengths[-1:], request.batches[-1:], by="layer")
    section = Section(
        "Profile",
        f"Time of forward and backward passes over random tokens on {model.device}, and the bytes that the forward "
        "pass saves for the backward pass. Of three passes the fastest counts; a share is that of both passes, and "
        "rest is the time outside of all parts. On a GPU, the time of launching kernels does not count.",
    )
    table = [entry for row in rows for entry in _entries(row)]
    section.tables.append(metrics_table(table))
    for batch in request.batches:
        chosen = [row for row in rows if row.batch == batch]
        curves = {
            f"{name}, {direction}": [1000 * getattr(row.costs[kind], field) for row in chosen]
            for direction, field in (("forward pass", "seconds"), ("backward pass", "backward_seconds"))
            for kind, name in KINDS.items()
        }
        title = f"attention and feed-forward by length, batch {batch}"
        figure = draw_curves(title, "length in tokens", "milliseconds", lengths, curves, logarithmic=True)
        section.figures.append((figure, title))
    times = {
        name: 1000 * (cost.seconds + cost.backward_seconds) for name, cost in largest.costs.items() if name != "total"
    }
    title = f"milliseconds by layer, batch {largest.batch}, {largest.length} tokens"
    section.figures.append((draw_bars(title, "milliseconds, forward and backward", times), title))
    return Part(section, {"by_kind": table, "by_layer": _entries(largest)})


def _entries(row: ProfileRow) -> list[dict[str, Any]]:
    total = row.costs["total"].seconds + row.costs["total"].backward_seconds
    return [
        {
            "length": row.length,
            "batch": row.batch,
            "part": name,
            "forward_ms": round(1000 * cost.seconds, 3),
            "backward_ms": round(1000 * cost.backward_seconds, 3),
            "share": round((cost.seconds + cost.backward_seconds) / total, 4),
            "saved_bytes": cost.kept_bytes,
        }
        for name, cost in row.costs.items()
    ]


def probes_part(request: Request) -> Part:
    """Train a linear probe on every layer, for the labels of a corpus."""
    if request.labelled_data is None:
        raise InputError("probes need labelled data; give a corpus with --probe")
    texts, unit = _labelled_texts(request)
    report = probe_layers(request.model, texts)
    rows = [
        {
            "layer": layer.name,
            "accuracy": round(layer.accuracy, 4),
            "control": round(layer.control_accuracy, 4),
            "selectivity": round(layer.selectivity, 4),
        }
        for layer in report.layers
    ]
    best = report.best
    section = Section(
        "Probes by layer",
        f"A linear classifier reads the labels of {unit} in {request.labelled_data} from the residual stream: best "
        f"after {best.name} ({best.accuracy:.1%}; always the most frequent label: {report.majority:.1%}). Trained on "
        f"{report.num_train:,} {unit}, tested on {report.num_test:,}. In the control task every distinct "
        f"{unit.removesuffix('s')} has a random label (Hewitt and Liang 2019); selectivity is the accuracy minus "
        "that of the control task.",
    )
    section.tables.append(metrics_table(rows))
    curves = {
        "accuracy": [layer.accuracy for layer in report.layers],
        "control task": [layer.control_accuracy for layer in report.layers],
        "selectivity": [layer.selectivity for layer in report.layers],
    }
    names = [layer.name.removeprefix("layer ") for layer in report.layers]
    level = ("most frequent label", report.majority)
    figure = draw_curves(
        f"linear probes: {unit} of {request.labelled_data}", "after layer", "", names, curves, level=level
    )
    section.figures.append((figure, "accuracy of probes by layer"))
    data = {"majority": report.majority, "num_train": report.num_train, "num_test": report.num_test, "layers": rows}
    return Part(section, data)


def _labelled_texts(request: Request) -> tuple[list[LabelledText], str]:
    """Encode the first rows of a corpus of tagged sentences or labelled texts; return them and what is labelled."""
    name, loaded = str(request.labelled_data), request.pipe
    kind = None if name in CORPORA else infer_corpus_kind(name, ("tagged", "labelled"), folder=request.data_folder)
    corpus = load_corpus(name, "train", folder=request.data_folder, kind=kind)
    labels = {label: number for number, label in enumerate(corpus.labels())}
    template, rows = loaded.input_template(request.model.config.context), corpus.rows[: request.limit]
    if corpus.kind == "tagged":
        encoder = WordEncoder(loaded.tokenizer, template)
        texts = []
        for row in rows:
            encoded = encoder(row.words)
            count = len(encoded.word_positions)
            sizes = [len(encoder.encode_word(word)) for word in row.words[:count]]
            positions = [range(start, start + size) for start, size in zip(encoded.word_positions, sizes, strict=True)]
            numbers = [labels[label] for label in row.labels[:count]]
            texts.append(LabelledText(encoded.ids, positions, numbers, [word.lower() for word in row.words[:count]]))
        return texts, "words"
    if corpus.kind == "labelled":
        encoded_rows = [template(loaded.tokenizer.encode(row.text)) for row in rows]
        return [
            LabelledText(encoded.ids, [range(len(encoded.ids))], [labels[row.label]], [row.text])
            for encoded, row in zip(encoded_rows, rows, strict=True)
        ], "texts"
    raise InputError(f"{name} is {corpus.kind}; probes need labelled texts or tagged words")


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
