"""The ratios of `compare backtranslation`: the names of arms with a ratio, and curves of BLEU by ratio.

The ratio is that of synthetic to real pairs among those that training sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from monoblock.errors import ConfigError
from monoblock.experiments.frame.experiment import Metrics, SeedResults

RATIOS = ("0.5", "1", "2", "4")
MAIN_METRIC = "bleu_lowercased"
MIN_POINTS = 3  # of a curve: with fewer, it says no more than the table


def arm_name(method: str, ratio: str) -> str:
    return method if ratio == "1" or method == "none" else f"{method}-{ratio}"


def parse_ratios(text: str | float) -> list[str]:
    """Return the ratios in a comma-separated list, as they are written in RATIOS."""
    try:
        ratios = [f"{float(word):g}" for word in str(text).split(",")]
    except ValueError:
        raise ConfigError(f"ratios={text} is not a list of numbers; write ratios=0.5,1,2,4") from None
    unknown = next((ratio for ratio in ratios if ratio not in RATIOS), None)
    if unknown is not None:
        raise ConfigError(f"ratios={unknown} is not one of {', '.join(RATIOS)}")
    return ratios


def add_curves(results: SeedResults, methods: Sequence[str]) -> SeedResults:
    """Return the arms of ratio 1 with curves by ratio: BLEU, where ratio 0 is the arm "none", and BLEU minus beam's."""
    found: dict[str, dict[int, Metrics]] = {}
    for method in [name for name in methods if name != "none" and name in results]:
        seeds = results[method].items()
        found[method] = {seed: {**metrics, **_curves(results, method, seed)} for seed, metrics in seeds}
    return {method: seeds for method, seeds in found.items() if any("bleu_by_ratio" in m for m in seeds.values())}


def _curves(results: SeedResults, method: str, seed: int) -> Metrics:
    """Return the curves of a method and a seed; none if BLEU has so few points that the table says as much."""

    def bleu(arm: str) -> float | None:
        return results.get(arm, {}).get(seed, {}).get(MAIN_METRIC)

    names = {"0": "none"} | {ratio: arm_name(method, ratio) for ratio in RATIOS}
    values = {ratio: value for ratio, name in names.items() if (value := bleu(name)) is not None}
    if len(values) < MIN_POINTS:
        return {}
    beam = {ratio: bleu(arm_name("beam", ratio)) for ratio in RATIOS if method != "beam"}
    gains = {ratio: values[ratio] - one for ratio, one in beam.items() if one is not None and ratio in values}
    return {"bleu_by_ratio": values} | ({"bleu_minus_beam": gains} if gains else {})
