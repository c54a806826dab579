"""Build a small model of every family, check it, and draw masks and positions: `monoblock demo --families`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monoblock.cli._shared.output import echo, format_count, print_table

# One preset per family; toy models of the same structures are built here.
SHOWCASE_PRESETS = (
    "vaswani-base",
    "gpt2",
    "bert-base",
    "t5-small",
    "bart-base",
    "llama3-8b",
    "mixtral-8x7b",
    "gemma2-2b",
    "vit-b16",
)


def _random_ids(config: Any, length: int) -> Any:
    import torch

    return torch.randint(1, config.input.vocab, (2, length), generator=torch.Generator().manual_seed(1))


def _cached_difference(model: Any, config: Any) -> float | None:
    """Return the largest difference between the logits of cached decoding and of a full pass; None if no decoder."""
    import torch

    if config.decoder is None:
        return None
    ids, source = _random_ids(config, 13), _random_ids(config, 11)
    is_encoder_decoder = config.encoder is not None
    full = model(source, ids) if is_encoder_decoder else model(ids)
    cache, logits = model.make_cache(2, 13), []
    for step in range(13):
        new = ids[:, step : step + 1]
        logits.append(model(source, new, cache=cache) if is_encoder_decoder else model(new, cache=cache))
        cache.advance(1)
    return float((torch.cat(logits, 1) - full).abs().max())


def _output_shape(model: Any, config: Any) -> tuple[int, ...]:
    import torch

    if config.family == "vision":
        image = config.input.image
        return tuple(model(torch.zeros(2, config.input.channels, image, image)).shape)
    ids = _random_ids(config, 13)
    return tuple((model(ids, ids[:, :11]) if config.family == "encoder-decoder" else model(ids)).shape)


def check_family(name: str) -> dict[str, Any]:
    """Count the parameters of a preset, and run a toy model of the same structure with and without a cache."""
    import torch

    from monoblock.accounting.report import account
    from monoblock.config.presets import PRESETS, tiny
    from monoblock.model import Transformer

    with torch.device("meta"):
        built = sum(p.numel() for p in Transformer(PRESETS[name].config).parameters())
    parameters = account(PRESETS[name].config).parameters
    torch.manual_seed(0)
    config = tiny(name)
    model = Transformer(config).eval()
    with torch.no_grad():
        difference, shape = _cached_difference(model, config), _output_shape(model, config)
    return {
        "preset": name,
        "family": config.family,
        "parameters": parameters,
        "equals_built": built == parameters,
        "toy_output": list(shape),
        "cached_difference": difference,
    }


def save_pictures(folder: Path) -> list[str]:
    from monoblock.nn.masks import causal, everything, global_tokens, random_blocks, window
    from monoblock.plots.masks import save_masks
    from monoblock.plots.overview import save_overview
    from monoblock.plots.positions import save_positions

    masks = [
        ("everything", everything),
        ("causal", causal),
        ("causal & window(8)", causal & window(8)),
        ("window(5) | global", window(5) | global_tokens),
        ("… | random_blocks", window(5) | global_tokens | random_blocks(1, 4)),
    ]
    paths = (
        save_overview(folder / "overview.png"),
        save_masks(masks, 32, folder / "masks.png"),
        save_positions(128, 64, folder / "positions.png"),
    )
    return [str(path) for path in paths]


def print_diagrams() -> None:
    from monoblock.cli._shared.text_diagrams import mask_text, positions_text
    from monoblock.nn.masks import causal, window

    echo("\nAttention masks (one line per query):")
    echo(f"  {'causal':<26}causal & window(4)")
    for left, right in zip(mask_text(causal, 12), mask_text(causal & window(4), 12), strict=True):
        echo(f"  {left}  {right}")
    echo("\nSinusoidal positions (one line per position: sines on the left, fastest first, cosines on the right):")
    for line in positions_text(12, 64):
        echo(f"  {line}")


def print_report(rows: list[dict[str, Any]]) -> None:
    echo("Every family is built from one block. Parameters are counted from the configuration; a toy model is run.\n")
    columns = ("preset", "family", "parameters", "", "as built", "toy output", "cached vs. full")
    print_table(
        columns,
        [
            [
                row["preset"],
                row["family"],
                row["parameters"],
                format_count(row["parameters"]),
                row["equals_built"],
                "×".join(map(str, row["toy_output"])),
                "" if row["cached_difference"] is None else f"{row['cached_difference']:.1e}",
            ]
            for row in rows
        ],
    )
