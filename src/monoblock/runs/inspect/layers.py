"""Parts of an inspection about layers and about the model: logit lens, norms, positions, masks, parameters."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from monoblock.errors import InputError
from monoblock.inspection.position_tables import position_tables
from monoblock.inspection.residual_stream import describe_text_loss, gradient_norms, logit_lens, residual_norms
from monoblock.nn.masks import Mask, mask_from_config
from monoblock.plots.curves import draw_bars, draw_curves, draw_lens
from monoblock.plots.figure import readable_tokens
from monoblock.plots.masks import draw_masks
from monoblock.plots.page import Section
from monoblock.plots.positions import draw_bias, draw_hands, draw_vectors
from monoblock.runs.account import account
from monoblock.runs.inspect.part import Part, Request

MAX_MASK_LENGTH = 48
SUBLAYERS = {"attention": "attention", "cross": "cross-attention", "feedforward": "feed-forward"}
MIN_POSITIONS, MAX_POSITIONS = 64, 256  # that are drawn


# -- layer by layer -----------------------------------------------------------------------------------------------


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
