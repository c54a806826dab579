"""Pipeline parallelism: each process has some of the blocks, and micro-batches pass through the processes in turn.

The stages are in parallel/pipeline_stage.py; torch.distributed.pipelining sends the hidden states and gradients, in the
order of the schedule. A step has no padding and no approximation: micro-batches of different sizes, into which a batch
may be split, run one size after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from monoblock.errors import MonoblockError
from monoblock.nn.embedding import Embedding
from monoblock.nn.transformer import Transformer
from monoblock.parallel.gather import copy_without_weights, count_bytes
from monoblock.parallel.pipeline_stage import INPUT_PREFIX, LABELS, Objective, Stage, plan_stages
from monoblock.parallel.strategy import Metrics, MicroBatch, ShardedStrategy
from monoblock.parallel.world import DATA, PIPELINE, World

CPU = torch.device("cpu")
BUCKET_BYTES = 64 * 2**20  # of the gradients that are summed at once
MICRO_BATCHES_PER_STAGE = 2  # by default, if the batch has as many rows


class PipelineParallel(ShardedStrategy):
    """Each process has some of the blocks; the other processes with the same blocks read other parts of every batch."""

    description = "each stores and computes some of the blocks"

    def __init__(self, world: World, *, schedule: str = "1f1b", micro_batches: int = 0) -> None:
        super().__init__(world)
        self.schedule, self.micro_batches = schedule, micro_batches

    def check_model(self, model: nn.Module) -> None:
        plan_stages(model, self.world.pipeline_size)

    def prepare(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        mesh = self.world.mesh
        assert mesh is not None
        self.group = mesh.get_group(PIPELINE)
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else CPU
        plans = plan_stages(model, self.world.pipeline_size)
        assert isinstance(model, Transformer)
        self._without_weights, self.split_bytes = copy_without_weights(model), count_bytes(model)
        names = {name for name, _ in model.named_parameters()}
        self.stage = Stage(model, plans, self.world.pipeline_rank, dtype)
        self.has_experts = any(self._gather(bool(self.stage.own_routers)))
        model.to(self.device)
        self.weights_elsewhere = frozenset(names - {name for name, _ in model.named_parameters()})
        self._share_weights(model)
        return self.stage

    # -- weights of several stages ---------------------------------------------------------------------------------

    def _share_weights(self, model: nn.Module) -> None:
        """Find the weights of which several stages have a copy, and make a group of processes for each set of stages.

        `shared` has the groups of this stage with their weights, and `owned` the weights that count in its norm.
        """
        weights = dict(model.named_parameters())
        holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self._gather(list(weights))):
            for name in names:
                holders.setdefault(name, []).append(stage)
        rank, size = self.world.pipeline_rank, self.world.data_size
        self.owned = [weight for name, weight in weights.items() if holders[name][0] == rank]
        self.shared: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        for stages in sorted({tuple(stages) for stages in holders.values() if len(stages) > 1}):
            for part in range(size):  # every process takes part in making every group
                ranks = [stage * size + part for stage in stages]
                group = dist.new_group(ranks, timeout=timedelta(seconds=self.world.timeout))
                if rank in stages and part == self.world.data_rank:
                    same = [weight for name, weight in weights.items() if tuple(holders[name]) == stages]
                    self.shared.append((group, same))

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all stages."""
        values: list[Any] = [None] * self.world.pipeline_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    # -- one step --------------------------------------------------------------------------------------------------

    def count_micro_batches(self, accumulate: int, rows: int) -> int:
        """Return the number of micro-batches of a step.

        The load-balancing loss of experts depends on how a batch is split, so they keep `accumulate` by default.
        """
        if self.micro_batches or self.has_experts:
            return max(accumulate, self.micro_batches)
        wanted = MICRO_BATCHES_PER_STAGE * self.world.pipeline_size
        equal = (count for count in range(max(wanted, accumulate), 2 * wanted) if rows % count == 0)
        return max(accumulate, next(equal, wanted))

    def compute_gradients(
        self,
        module: nn.Module,
        micro_batches: Sequence[MicroBatch],
        backward: Callable[[MicroBatch], Tensor],
        loss: Objective,
    ) -> float:
        groups = _group_by_rows(micro_batches, self._rows_of_parts(micro_batches) if self.has_experts else None)
        losses = [value for group in groups for value in self._run_schedule(group, loss, backward=True)]
        self._sum_gradients(module)
        return float(sum(self._gather(float(sum(losses)))))

    def _rows_of_parts(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[int, ...]]:
        """Return, for each micro-batch, its number of rows in every part of the batch."""
        rows = torch.zeros(self.world.data_size, len(micro_batches), dtype=torch.float64)
        rows[self.world.data_rank] = torch.tensor([batch.labels.shape[0] for batch in micro_batches])
        return [tuple(map(int, counts)) for counts in self.world.sum_tensor_over_data(rows).T.tolist()]

    def _run_schedule(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, *, backward: bool
    ) -> list[Tensor]:
        """Pass micro-batches of the same shapes through the pipeline; return their losses in the last stage."""
        count, first = len(micro_batches), micro_batches[0]
        keywords: dict[str, Any] = {
            INPUT_PREFIX + name: torch.cat([batch.inputs[name] for batch in micro_batches]).to(self.device)
            for name in first.inputs
        }
        keywords[LABELS] = torch.cat([batch.labels for batch in micro_batches]).to(self.device)
        self.stage.objective = objective
        length = self._source_length(first.inputs["source"])
        stage = PipelineStage(
            self.stage,
            self.world.pipeline_rank,
            self.world.pipeline_size,
            self.device,
            input_args=self.stage.example_inputs(first.inputs, length),
            output_args=self.stage.example_outputs(first.inputs, length),
            group=self.group,
        )
        is_1f1b = self.schedule == "1f1b" and count >= self.world.pipeline_size and backward
        schedule = (Schedule1F1B if is_1f1b else ScheduleGPipe)(
            stage, count, loss_fn=(lambda result, labels: result) if backward else None, scale_grads=False
        )
        losses: list[Tensor] = []
        try:
            schedule.step(
                target=keywords[LABELS] if backward else None,
                losses=losses if backward else None,
                return_outputs=False,
                **keywords,
            )
        except RuntimeError as problem:  # torch wraps the errors of a stage
            if isinstance(problem.__cause__, torch.OutOfMemoryError | MonoblockError):
                raise problem.__cause__ from None
            raise
        return [loss.detach() for loss in losses]

    def _source_length(self, source: Tensor) -> int:
        """Return the number of positions that the input embedding makes of a source."""
        model = self._without_weights
        assert isinstance(model, Transformer)
        if isinstance(model.input, Embedding):
            return source.shape[1]
        return model._embed_source(torch.empty_like(source, device="meta"))[0].shape[1]

    @torch.no_grad()
    def _sum_gradients(self, module: nn.Module) -> None:
        """Sum gradients over the stages that have a copy of a weight, then over the parts of the batch."""
        for group, weights in self.shared:
            _sum_together(weights, group)
        if self.world.data_size > 1:
            assert self.world.mesh is not None
            _sum_together(module.parameters(), self.world.mesh.get_group(DATA))

    def clip_gradients(self, model: nn.Module, max_norm: float) -> float:
        gradients = [weight.grad for weight in self.owned if weight.grad is not None]
        own = float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
        norm = float(torch.tensor(self._gather(own), dtype=torch.float64).norm())
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, torch.tensor(norm, device=self.device))
        return norm

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate_batch(self, metrics: Metrics, model: nn.Module, batch: MicroBatch) -> dict[str, float]:
        totals: dict[str, float] = {}

        def objective(run: Callable[..., Tensor], inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
            for name, value in metrics(run, inputs, labels).items():
                totals[name] = totals.get(name, 0) + value
            return torch.zeros((), device=labels.device)

        for group in _group_by_rows(batch.split(self.world.pipeline_size)):
            self._run_schedule(group, objective, backward=False)
        result: dict[str, float] = self._gather(totals)[-1]
        return result

    # -- whole weights ---------------------------------------------------------------------------------------------

    def whole_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Send the tensors of all stages to the main process, one after the other."""
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        whole: dict[str, Tensor] = {}
        if self.world.data_rank:
            return whole
        described = self._gather({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()})
        for stage, names in enumerate(described):
            source = stage * self.world.data_size
            for name, (shape, dtype) in names.items():
                if any(name in earlier for earlier in described[:stage]):
                    continue
                if self.world.is_main:
                    whole[name] = own[name] if stage == 0 else torch.empty(shape, dtype=dtype)
                    if stage:
                        dist.recv(whole[name], src=source)
                elif self.world.rank == source:
                    dist.send(own[name], dst=0)
        return whole


def _sum_together(weights: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of weights over the processes of a group, in buckets; a process may lack some of them."""
    trained = [weight for weight in weights if weight.requires_grad]
    for weight in trained:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in trained if weight.grad is not None]
    for bucket in _take_tensors(gradients, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))


def _group_by_rows(
    micro_batches: Sequence[MicroBatch], rows_of_parts: Sequence[tuple[int, ...]] | None = None
) -> list[list[MicroBatch]]:
    """Group micro-batches of the same size, which have the same shapes, because they are parts of one batch.

    rows_of_parts: the number of rows of each micro-batch in every part of the batch; with it, the processes of all
        parts run their micro-batches in the same order, because the load-balancing loss of experts sums over them.
    """
    groups: dict[object, list[MicroBatch]] = {}
    for number, batch in enumerate(micro_batches):
        key = batch.labels.shape[0] if rows_of_parts is None else rows_of_parts[number]
        groups.setdefault(key, []).append(batch)
    return list(groups.values())
