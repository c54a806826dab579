"""The parts of an inspection: each computes numbers for JSON, tables and figures.

`PARTS` maps the name of a part, as in `monoblock inspect --show lens`, to its function.
"""

from __future__ import annotations

from collections.abc import Callable

from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.inspection.position_tables import position_tables
from monoblock.model import Transformer
from monoblock.runs.inspect.attention import attention_part, coreference_part, heads_part, scores_part
from monoblock.runs.inspect.layers import lens_part, masks_part, norms_part, parameters_part, positions_part
from monoblock.runs.inspect.measurements import probes_part, profile_part
from monoblock.runs.inspect.part import Part, Request

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
