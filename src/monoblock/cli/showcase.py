"""Every family built from the one block, checked and counted, and pictures of what it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import human_count, table

# One preset a family; the toy model built here keeps its structure.
SHOWN = (
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


def _ids(config: Any, length: int) -> Any:
    import torch

    return torch.randint(1, config.input.vocab, (2, length), generator=torch.Generator().manual_seed(1))


def _cached_difference(model: Any, config: Any) -> float | None:
    """The largest difference between logits made token by token with the cache and in one pass."""
    import torch

    if config.decoder is None:
        return None
    ids, source = _ids(config, 13), _ids(config, 11)
    double = config.encoder is not None
    full = model(source, ids) if double else model(ids)
    cache, parts = model.make_cache(2, 13), []
    for place in range(13):
        new = ids[:, place : place + 1]
        parts.append(model(source, new, cache=cache) if double else model(new, cache=cache))
        cache.advance(1)
    return float((torch.cat(parts, 1) - full).abs().max())


def _shape(model: Any, config: Any) -> tuple[int, ...]:
    import torch

    if config.family == "vision":
        image = config.input.image
        return tuple(model(torch.zeros(2, config.input.channels, image, image)).shape)
    ids = _ids(config, 13)
    return tuple((model(ids, ids[:, :11]) if config.family == "encoder-decoder" else model(ids)).shape)


def family_row(name: str) -> dict[str, Any]:
    """Count the preset, build its toy twin, run it, and compare cached with full decoding."""
    import torch

    from monoblock.accounting.report import account
    from monoblock.model import Transformer
    from monoblock.presets import PRESETS, tiny

    with torch.device("meta"):
        built = sum(p.numel() for p in Transformer(PRESETS[name].config).parameters())
    counted = account(PRESETS[name].config)
    torch.manual_seed(0)
    config = tiny(name)
    model = Transformer(config).eval()
    with torch.no_grad():
        difference, shape = _cached_difference(model, config), _shape(model, config)
    return {
        "preset": name,
        "family": config.family,
        "parameters": counted.parameters,
        "equals_built": built == counted.parameters,
        "toy_output": list(shape),
        "cached_difference": difference,
    }


def pictures(folder: Path) -> list[str]:
    from monoblock.inspection.plots import save_masks, save_positions
    from monoblock.masks import causal, everything, global_tokens, random_blocks, window

    masks = [
        ("everything", everything),
        ("causal", causal),
        ("causal & window(8)", causal & window(8)),
        ("window(5) | global", window(5) | global_tokens),
        ("… | random_blocks", window(5) | global_tokens | random_blocks(1, 4)),
    ]
    return [str(save_masks(masks, 32, folder / "masks.png")), str(save_positions(128, 64, folder / "positions.png"))]


def draw() -> None:
    from monoblock.inspection.plots import mask_text, positions_text
    from monoblock.masks import causal, window

    click.echo("\nWho may see whom (a line a query):")
    click.echo(f"  {'causal':<26}causal & window(4)")
    for left, right in zip(mask_text(causal, 12), mask_text(causal & window(4), 12), strict=True):
        click.echo(f"  {left}  {right}")
    click.echo("\nSinusoidal positions (a line a position; left the sines, fast ones first, right the cosines):")
    for line in positions_text(12, 64):
        click.echo(f"  {line}")


def report(rows: list[dict[str, Any]]) -> None:
    click.echo("One block, every family: counted from the configuration, built, and run at toy size.\n")
    columns = ("preset", "family", "parameters", "", "as built", "toy output", "cached against full")
    table(
        columns,
        [
            [
                row["preset"],
                row["family"],
                row["parameters"],
                human_count(row["parameters"]),
                row["equals_built"],
                "×".join(map(str, row["toy_output"])),
                "" if row["cached_difference"] is None else f"{row['cached_difference']:.1e}",
            ]
            for row in rows
        ],
    )
