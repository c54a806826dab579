"""Allow-lists of configuration fields and values that a backend supports.

    SUPPORTED = {**allow(BLOCK), **allow(ATTENTION, "attention."), "attention.mask": one_of("causal"), …}
    unsupported_field(block, SUPPORTED)     # None, or the first field that the table does not allow

A field that is missing from the table is not supported, whatever its value.  So no backend runs a configuration with a
new field until the field is added to that backend's table.  The C++ operators name the kinds of norm, positions and
activation that they know in the same way, so that a new kind runs in the PyTorch modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Rule = Callable[[Any], bool]
AllowList = Mapping[str, Rule]

# The fields of each configuration, stated once for all tables.  They are written out, not read from the classes, so
# that a new field is not allowed before somebody adds it here or in the table of one backend.
BLOCK = "width norm_place attention_norm residual residual_scale layer_scale dropout"
NORM = "kind eps affine unit_offset cast"
HEADS = "kind heads kv_heads head_dim value_dim kept_heads unpruned_heads bias scale dropout"
PATTERN = "mask window global_tokens random_blocks block_size random_seed"
SCORES = "qk_norm qk_norm_over softcap clip sinks"
ATTENTION = f"{HEADS} {PATTERN} {SCORES} positions"
POSITIONS = "kind base dim layout scaling form max_bias count max_distance shared"
SCALING = (
    "kind factor original_context low_freq_factor high_freq_factor beta_fast beta_slow truncate attention_factor "
    "short_factors long_factors"
)
FEEDFORWARD = "hidden activation gated clamp bias dropout"
EXPERTS = "count top_k router router_bias"

# The kinds that the C++ operators implement.
NATIVE_NORMS = ("layer", "rms")
NATIVE_RESIDUALS = ("sequential", "parallel", "parallel_shared")
NATIVE_POSITIONS = ("rotary", "alibi", "buckets")
NATIVE_ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid", "tanh", "identity")


def anything(value: object) -> bool:
    """Allow every value of a field."""
    return True


def one_of(*values: object) -> Rule:
    """Return a rule that allows only these values."""
    return lambda value: value in values


def positive(value: object) -> bool:
    """Allow numbers above 0."""
    return isinstance(value, int | float) and value > 0


def allow(names: str, prefix: str = "") -> dict[str, Rule]:
    """Return rules that allow every value of the fields in `names`, separated by spaces, with `prefix` before each."""
    return {f"{prefix}{name}": anything for name in names.split()}


def unsupported_field(config: object, allowed: AllowList) -> str | None:
    """Return the first field that is not allowed, such as "attention.window=128", or None if all are allowed."""
    for path, value in flatten(config):
        rule = allowed.get(path)
        if rule is None or not rule(value):
            return f"{path}={value!r}"
    return None


def flatten(config: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for each field of a configuration, including fields of nested configurations."""
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
