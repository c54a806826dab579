"""Refuse recipes that a strategy for several processes cannot train, before a process or a file is made."""

from __future__ import annotations

from monoblock.errors import ConfigError
from monoblock.recipes.schema import Recipe

# The strategies for which each key of the section [parallel] means something.
KEY_STRATEGIES = {
    "tensor": ("tp", "fsdp+tp"),
    "sequence": ("tp", "fsdp+tp"),
    "reshard_after_forward": ("fsdp", "fsdp+tp"),
    "offload": ("fsdp", "fsdp+tp"),
    "pipeline": ("pp",),
    "microbatches": ("pp",),
    "schedule": ("pp",),
}


def check_parallel(recipe: Recipe, processes: int, *, has_own_loss: bool = False) -> None:
    """Raise ConfigError if a choice of the recipe does not work with weights that are split among processes.

    has_own_loss: whether the loss of the task is another function than the cross-entropy.
    """
    section = recipe.train
    if processes > 1 and recipe.data.packing == "contiguous":
        raise ConfigError(
            "data.packing=contiguous keeps the state of an LSTM in one process; write data.packing=stream, or train in "
            "one process"
        )
    if processes == 1 or section.parallel == "ddp":
        return
    name = f"train.parallel={section.parallel}"
    if recipe.data.padding == "none" and section.parallel != "fsdp":
        raise ConfigError(f"data.padding=none cannot be used with {name}; write train.parallel=fsdp, or leave it out")
    if section.adversarial:
        raise ConfigError(f"train.adversarial cannot be used with {name}; write train.parallel=ddp")
    if recipe.model.get("norm") == "batch":
        raise ConfigError(
            f"model.norm=batch cannot be used with {name}, which does not share running statistics among processes; "
            "write train.parallel=ddp, or model.norm=layer"
        )
    if section.precision in ("fp16", "fp8"):
        raise ConfigError(f"train.precision={section.precision} cannot be used with {name}; write train.precision=bf16")
    if section.parallel == "pp" and has_own_loss:
        raise ConfigError(f"an objective with a loss of its own cannot be used with {name}; write train.parallel=fsdp")
    if recipe.lora.rank:
        raise ConfigError(f"lora.rank cannot be used with {name}; write train.parallel=ddp")


def list_unused_keys(recipe: Recipe, processes: int) -> list[str]:
    """Return a note for each key of [parallel] that differs from its default and changes nothing."""
    section, default = recipe.parallel, type(recipe.parallel)()
    changed = [key for key in KEY_STRATEGIES if getattr(section, key) != getattr(default, key)]
    if processes == 1:
        return [f"parallel.{key} changes nothing in a single process" for key in changed]
    return [
        f"parallel.{key} changes nothing with train.parallel={recipe.train.parallel}"
        for key in changed
        if recipe.train.parallel not in KEY_STRATEGIES[key]
    ]
