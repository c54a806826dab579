"""Build the strategy that a recipe names."""

from __future__ import annotations

from monoblock.parallel.strategy import DataParallel, FullySharded, Strategy, TensorParallel
from monoblock.parallel.world import World


def build_strategy(
    name: str,
    world: World,
    *,
    reshard_after_forward: bool = True,
    offload: bool = False,
    sequence: bool = False,
    schedule: str = "1f1b",
    micro_batches: int = 0,
) -> Strategy:
    """Return the strategy of this name; a process without torchrun needs none."""
    if world.mesh is None:
        return Strategy(world)
    if name == "ddp" or (name == "pp" and world.pipeline_size == 1):
        return DataParallel(world)
    if name == "tp":
        return TensorParallel(world, sequence=sequence)
    if name == "pp":
        from monoblock.parallel.pipeline_parallel import PipelineParallel  # torch's pipelines take a second to import

        return PipelineParallel(world, schedule=schedule, micro_batches=micro_batches)
    return FullySharded(world, reshard_after_forward=reshard_after_forward, offload=offload, sequence=sequence)
