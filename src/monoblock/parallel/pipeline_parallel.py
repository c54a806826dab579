"""Pipeline parallelism: each process has some of the blocks, and micro-batches pass through the processes in turn.

A stage is a run of successive blocks, with what must be computed before and after them. The blocks of the encoder and
then those of the decoder are divided evenly. The first stage has the input embedding, the stage where the decoder of an
encoder-decoder begins that of the target, and the last stage the head. A weight that several stages need has a copy in
each: a tied embedding, and the position bias that the blocks of a stack share.

A stage hands on the hidden states of its last block, those of the encoder (`memory`) once the decoder has begun, and
the router logits of all blocks with experts so far, from which the last stage computes the load-balancing loss.
torch.distributed.pipelining sends them and their gradients, in the order of the schedule. A step has no padding and no
approximation: micro-batches of different sizes, into which a batch may be split, run one size after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from monoblock.errors import ConfigError, MonoblockError
from monoblock.nn.arguments import either_argument, memory_positions, token_positions
from monoblock.nn.embedding import Embedding
from monoblock.nn.experts import ROUTER, RouterTap
from monoblock.nn.masks import TokenPositions, arange_positions
from monoblock.nn.stack import Stack
from monoblock.nn.tap import Tap, prefix_tap
from monoblock.nn.transformer import Transformer
from monoblock.parallel.strategy import (
    Metrics,
    MicroBatch,
    ShardedStrategy,
    copy_without_weights,
    count_bytes,
    total_norm,
)
from monoblock.parallel.world import DATA, PIPELINE, World

INPUT_PREFIX = "input_"  # of the names of model inputs among the keyword arguments of a stage
LABELS = "labels"
Objective = Callable[[Callable[..., Tensor], dict[str, Tensor], Tensor], Tensor]  # a function (model, inputs, labels)


class StagePlan(NamedTuple):
    """The layers of a stage; a range is empty if the stage has no layer of that stack."""

    encoder: range
    decoder: range
    is_first: bool
    is_last: bool
    has_both_stacks: bool

    @property
    def begins_decoder(self) -> bool:
        """Whether the decoder of an encoder-decoder begins in this stage."""
        return self.has_both_stacks and bool(self.decoder) and self.decoder.start == 0

    @property
    def sends_memory(self) -> bool:
        """Whether the hidden states of the encoder are handed on besides those of the decoder."""
        return self.has_both_stacks and bool(self.decoder) and not self.is_last

    def stacks(self, model: Transformer) -> list[tuple[str, Stack, range]]:
        """Return the name, the stack and the layers of each stack of the model."""
        stacks = [("encoder", model.encoder, self.encoder), ("decoder", model.decoder, self.decoder)]
        return [(name, stack, layers) for name, stack, layers in stacks if stack is not None]


def plan_stages(model: nn.Module, count: int) -> list[StagePlan]:
    """Divide the layers of a model into stages of nearly equal numbers of blocks; raise ConfigError if it cannot be."""
    if not isinstance(model, Transformer) or type(model).forward is not Transformer.forward:
        raise ConfigError("pipeline stages are made of the blocks of a Transformer only; write train.parallel=fsdp")
    orders = [[] if stack is None else stack.block_order for stack in (model.encoder, model.decoder)]
    if any(len(set(order)) < len(order) for order in orders):
        raise ConfigError(
            "layers of this model share weights, so they cannot be in different pipeline stages; write "
            "train.parallel=fsdp"
        )
    encoder, decoder = map(len, orders)
    if encoder + decoder < count:
        blocks = "1 block" if encoder + decoder == 1 else f"{encoder + decoder} blocks"
        raise ConfigError(
            f"this model has {blocks}, fewer than the {count} pipeline stages; lower parallel.pipeline, or write "
            f"train.parallel=fsdp"
        )
    size, rest = divmod(encoder + decoder, count)
    bounds = [number * size + min(number, rest) for number in range(count + 1)]
    return [
        StagePlan(
            range(min(start, encoder), min(stop, encoder)),
            range(max(start - encoder, 0), max(stop - encoder, 0)),
            is_first=start == 0,
            is_last=stop == encoder + decoder,
            has_both_stacks=bool(encoder and decoder),
        )
        for start, stop in itertools.pairwise(bounds)
    ]


def keep_stage(model: Transformer, plan: StagePlan) -> None:
    """Delete the modules of other stages; the names of the weights that remain do not change."""
    is_tied = model.head is not None and model.head.is_tied and plan.is_last
    owner = "target" if model.target is not None and model.target.token is not None else "input"
    reads_input = plan.begins_decoder and (model.target is None or model.target.token is None)
    if not (plan.is_first or (reads_input and model.target is None)):
        _keep_tokens(model, "input", keep=reads_input or (is_tied and owner == "input"))
    if model.target is not None and not plan.begins_decoder:
        _keep_tokens(model, "target", keep=is_tied and owner == "target")
    for _, stack, layers in plan.stacks(model):
        stack.keep_layers(layers)
    if not plan.is_last:
        model.head = None


def _keep_tokens(model: Transformer, name: str, *, keep: bool) -> None:
    """Reduce an input embedding to its token embedding, or delete it."""
    if not keep:
        setattr(model, name, nn.Identity() if name == "input" else None)
        return
    embedding = getattr(model, name)
    for part in ("position", "segment", "norm", "projection"):
        setattr(embedding, part, None)


class Stage(nn.Module):
    """The part of a model that one process computes.

    The arguments of `forward` are what the stage before hands on, then the inputs of the model with the prefix
    `INPUT_PREFIX` and the labels. The result is what the next stage needs; in the last stage it is what `objective`
    returns for a function that computes the output of the model, the inputs and the labels.
    """

    objective: Objective

    def __init__(self, model: Transformer, plans: Sequence[StagePlan], number: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.plan, self.previous, self.dtype = plans[number], plans[number - 1] if number else None, dtype
        # How many of the tensors received are hidden states; the rest are router logits.
        self.num_hidden = 0 if self.previous is None else 2 if self.previous.sends_memory else 1
        self.width = model.config.width
        self.reads_tokens = isinstance(model.input, Embedding)
        experts = [_expert_layers(model, plan) for plan in plans]
        self.received_routers = [row for rows in experts[:number] for row in rows]
        self.own_routers = experts[number]
        self.uses_flags = any(stack.uses_flags for _, stack, _ in self.plan.stacks(model))
        keep_stage(model, self.plan)
        self.model = model

    def forward(self, *received: Tensor, **keywords: Tensor) -> Tensor | tuple[Tensor, ...]:
        labels = keywords.pop(LABELS)
        inputs = {name.removeprefix(INPUT_PREFIX): tensor for name, tensor in keywords.items()}
        autocast = nullcontext() if self.dtype is None else torch.autocast(labels.device.type, self.dtype)
        with autocast:
            if self.plan.is_last:
                return self.objective(functools.partial(self._finish, received), inputs, labels)
            tap = RouterTap()
            hidden, memory, _ = self._run_layers(received, inputs, tap if self.own_routers else None)
        routers = [*received[self.num_hidden :], *tap.router_logits]
        results = [hidden, *([memory] if self.plan.sends_memory and memory is not None else []), *routers]
        return tuple(self._to_send(tensor) for tensor in results)

    def _to_send(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._sent_dtype).contiguous()
        needs_gradient = torch.is_grad_enabled() and not tensor.requires_grad  # all weights before it are frozen
        return tensor.detach().requires_grad_() if needs_gradient else tensor

    @property
    def _sent_dtype(self) -> torch.dtype:
        return next(iter(self.model.parameters())).dtype

    # -- a forward pass --------------------------------------------------------------------------------------------

    def _finish(self, received: tuple[Tensor, ...], *, tap: Tap | None = None, **inputs: Tensor) -> Tensor:
        """Run the last stage; return the output of the model, after the tap has seen the router logits so far."""
        routers = received[self.num_hidden :]
        for (name, _), logits in zip(self.received_routers, routers, strict=True):
            if tap is not None:
                tap(name, logits)
        hidden, _, positions = self._run_layers(received, inputs, tap)
        return self.model._apply_head(hidden, positions, inputs.get("logits_at"), tap)

    def _run_layers(
        self, received: tuple[Tensor, ...], inputs: dict[str, Tensor], tap: Tap | None
    ) -> tuple[Tensor, Tensor | None, TokenPositions]:
        """Return the hidden states after the last layer of this stage, the memory if there is one, and positions."""
        model, plan = self.model, self.plan
        mask = either_argument("source_mask", inputs.get("source_mask"), "attention_mask", inputs.get("attention_mask"))
        hidden = received[0] if received else None
        if not plan.has_both_stacks or plan.encoder:
            names = () if plan.has_both_stacks else ("segments", "positions", "documents", "flags")
            options: dict[str, Any] = {name: inputs.get(name) for name in names}
            if hidden is None:
                hidden, positions = model._embed_source(inputs["source"], mask, **options, tap=tap)
            else:
                positions = arange_positions(hidden.shape[1], device=hidden.device)
                if self.reads_tokens:
                    fields = (options.get("positions"), options.get("documents"), options.get("flags"))
                    positions = token_positions(inputs["source"], mask, *fields, None, uses_flags=self.uses_flags)
            stack, name = (model.encoder, "encoder") if plan.encoder else (model.decoder, "decoder")
            assert stack is not None
            hidden = stack(hidden, positions, tap=prefix_tap(tap, name))
            if not (plan.has_both_stacks and plan.decoder):
                return hidden, None, positions
        assert hidden is not None
        memory = hidden if plan.begins_decoder else received[1]
        target_positions = token_positions(
            inputs["target"], inputs.get("target_mask"), inputs.get("positions"), None, None, None
        )
        if plan.begins_decoder:
            hidden = model._embed(inputs["target"], target_positions, None, tap, side="target")
        assert model.decoder is not None
        hidden = model.decoder(
            hidden,
            target_positions,
            memory=memory,
            memory_positions=memory_positions(memory, mask, None, self.width),
            tap=prefix_tap(tap, "decoder"),
        )
        return hidden, memory, target_positions

    # -- what is sent ----------------------------------------------------------------------------------------------

    def examples(self, inputs: dict[str, Tensor], source_length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return tensors on the meta device like those that this stage receives, and returns, for a micro-batch."""

        def example(*shape: int) -> Tensor:
            return torch.empty(shape, device="meta", dtype=self._sent_dtype, requires_grad=True)

        def sent(plan: StagePlan, routers: list[tuple[str, int]]) -> tuple[Tensor, ...]:
            rows, in_decoder = inputs["source"].shape[0], plan.has_both_stacks and bool(plan.decoder)
            target_length = inputs["target"].shape[1] if in_decoder else source_length
            hidden = [example(rows, target_length, self.width)]
            hidden += [example(rows, source_length, self.width)] if plan.sends_memory else []
            for name, experts in routers:
                is_target = plan.has_both_stacks and name.startswith("decoder")
                hidden.append(example(rows, target_length if is_target else source_length, experts))
            return tuple(hidden)

        routers = [*self.received_routers, *self.own_routers]
        received = () if self.previous is None else sent(self.previous, self.received_routers)
        return received, (example(),) if self.plan.is_last else sent(self.plan, routers)


def _expert_layers(model: Transformer, plan: StagePlan) -> list[tuple[str, int]]:
    """Return the name of the router logits and the number of experts for each layer of a stage that has experts."""
    found = []
    for name, stack, layers in plan.stacks(model):
        configs = list(stack.config.layers())
        for layer in layers:
            experts: Any = configs[layer].feedforward.experts
            if experts is not None:
                found.append((f"{name}.{layer}{ROUTER}", experts.count))
    return found


CPU = torch.device("cpu")
BUCKET_BYTES = 64 * 2**20  # of the gradients that are summed at once
MICRO_BATCHES_PER_STAGE = 2  # by default, if the batch has as many rows


class PipelineParallel(ShardedStrategy):
    """Each process has some of the blocks; the other processes with the same blocks read other parts of every batch."""

    has_schedule = True
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

    def run_schedule(self, module: nn.Module, micro_batches: Sequence[MicroBatch], loss: Objective) -> Tensor:
        """Run all stages; the losses are computed in the last one, and 0 in the others."""
        groups = _group_by_rows(micro_batches, self._rows_of_parts(micro_batches) if self.has_experts else None)
        losses = [value for group in groups for value in self._run_schedule(group, loss, backward=True)]
        self._sum_gradients(module)
        return sum(losses, torch.zeros((), device=self.device))

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
        received, returned = self.stage.examples(first.inputs, self._source_length(first.inputs["source"]))
        stage = PipelineStage(
            self.stage,
            self.world.pipeline_rank,
            self.world.pipeline_size,
            self.device,
            input_args=received,
            output_args=returned,
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

    def gradient_norm(self, model: nn.Module) -> Tensor:
        square = total_norm(self.owned).to(self.device) ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

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
