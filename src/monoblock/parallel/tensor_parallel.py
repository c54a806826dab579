"""Tensor parallelism: each process computes some heads, some hidden units and some logits (Shoeybi et al. 2019).

The plan follows from the configuration:

attention      query, key, value by heads; output by the heads it reads
               fewer key/value heads than processes: each process computes the one that its queries use
feed-forward   up and gate by hidden units; down by the units it reads; experts likewise, each process a part of all
vocabulary     the token embedding and the output matrix by tokens, whether tied or not, and the loss with them

Everything else is computed by every process: norms, residuals, the router, and what cannot be divided evenly. A weight
that is split is a DTensor; a process computes with its local part.

Norms, residual connections and dropout treat every position alone, so with parallel.sequence each process computes them
for some positions only, and stores the activations of these only (Korthikanti et al. 2022). Before attention and
feed-forward layers, the processes gather all positions; after them, the sum of their parts is scattered. Together this
sends as much as the all-reduce of tensor parallelism alone. Positions are divided only while gradients are computed;
their number is padded to a multiple of the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from monoblock.accounting.parallel import splits_heads
from monoblock.config.model import AttentionConfig
from monoblock.errors import ConfigError
from monoblock.nn.attention import Attention, AttentionContext
from monoblock.nn.block import Block
from monoblock.nn.embedding import Embedding
from monoblock.nn.experts import Experts
from monoblock.nn.linear import Linear
from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer

View = Callable[[Tensor], Tensor]  # what a process computes with, made from the weight that it stores


def check_splittable(model: nn.Module) -> None:
    """Raise ConfigError if the matrices of a model cannot be split."""
    if not isinstance(model, Transformer) or model.block_class is not Block:
        raise ConfigError(
            "tensor parallelism splits the blocks of monoblock only; train with train.parallel=fsdp, or use one process"
        )


def split_model(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> list[str]:
    """Split the weights of a Transformer in place; return a sentence for each part that is not split.

    sequence: also divide the positions of norms, residual connections and dropout.
    """
    check_splittable(model)
    assert isinstance(model, Transformer)
    splitter = _Splitter(mesh, sequence)
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            splitter.split_stack(stack)
    for embedding in (model.input, model.target):
        if isinstance(embedding, Embedding) and embedding.token is not None:
            embedding.token = split_table(embedding.token, mesh)
    head = model.head
    if head is not None and head.output is not None and head.config.kind in ("language_model", "masked_lm"):
        head.output = split_table(head.output, mesh)
        whole = {"bias": lambda bias: replicate(bias, mesh) if head.training else bias}
        use_views(head, whole | {"fixed_bias": whole["bias"]})
    return list(dict.fromkeys(splitter.notes))


class _Splitter:
    def __init__(self, mesh: DeviceMesh, sequence: bool = False) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.positions = DividedPositions(self.group) if sequence else None
        self.split_layers: list[nn.Module] = []  # those whose inputs and outputs are gathered and summed
        self.notes: list[str] = []

    def split_stack(self, stack: Stack) -> None:
        for block in dict.fromkeys(stack.blocks):
            self.split_attention(block.attention)
            if block.cross is not None:
                self.split_attention(block.cross)
            if block.feedforward is not None:
                self.split_feedforward(block)
            self.divide_block(block)
        if self.positions is not None:
            self.positions.divide_stack(stack)
            self.sum_gradients(stack.norm)
        width = stack.config.width
        sized = [replace(c, head_dim=c.key_size(width), value_dim=c.value_size(width)) for c in stack.attention_configs]
        local = [self.local_config(config) for config in sized]
        stack.attention_configs = [new or old for new, old in zip(local, stack.attention_configs, strict=True)]
        if stack.position_bias is not None and local[0] is not None:  # all layers have as many heads
            use_views(stack.position_bias, {"weight": self.enter})

    def enter(self, tensor: Tensor) -> Tensor:
        return enter(tensor, self.group)

    # -- positions --------------------------------------------------------------------------------------------------

    def divide_block(self, block: Block) -> None:
        """Let a block run on the positions of this process; attention and feed-forward layers gather all of them."""
        if self.positions is None:
            return
        for module in (block.attention, block.cross, block.feedforward):
            if module is not None and module not in self.split_layers:
                self.positions.gather_around(module)
        for name, child in block.named_children():
            if name.endswith("_norm"):
                self.sum_gradients(child)
        if any(gain is not None for gain in block._parameters.values()):
            self.sum_gradients(block)
        self.positions.follow_block(block)

    def sum_gradients(self, module: nn.Module | None) -> None:
        """Sum the gradients of a module's own weights, which each process uses for its positions."""
        if module is not None:
            use_views(module, dict.fromkeys(module._parameters, self.enter))

    # -- attention --------------------------------------------------------------------------------------------------

    def local_config(self, config: AttentionConfig) -> AttentionConfig | None:
        """Return the configuration of the heads of this process; None if they cannot be divided."""
        heads, kv_heads, n = config.heads, config.num_kv_heads, self.size
        if not splits_heads(config, n):
            return None
        kept = config.kept_heads or tuple(range(heads))
        first = self.rank * heads // n
        return replace(
            config,
            heads=heads // n,
            kv_heads=max(1, kv_heads // n),
            kept_heads=kept[first : first + heads // n],
            unpruned_heads=config.num_unpruned_heads,
        )

    def split_attention(self, attention: Attention) -> None:
        config = attention.config
        key_size = attention.query.out_features // config.heads
        config = replace(config, head_dim=key_size, value_dim=attention.output.in_features // config.heads)
        local = self.local_config(config)
        if local is None:
            self.notes.append(f"attention with {config.heads} heads is not split among {self.size} processes")
            return
        for layer, heads in ((attention.query, config.heads), (attention.key, config.num_kv_heads)):
            self.split_rows(layer, heads)
        self.split_rows(attention.value, config.num_kv_heads)
        attention.output = self.split_columns(attention.output)
        if attention.sinks is not None:
            attention.sinks = split_parameter(attention.sinks, self.mesh, 0)
            use_views(attention, {"sinks": to_local})
        for norm, heads in ((attention.query_norm, config.heads), (attention.key_norm, config.num_kv_heads)):
            if norm is not None and config.qk_norm_over == "each_head":
                self.split_rows(norm, heads)
            elif norm is not None:
                use_views(norm, dict.fromkeys(norm._parameters, self.enter))
        if attention.position_bias is not None:
            use_views(attention.position_bias, {"weight": self.enter})
        attention.config = local
        self.enter_layer(attention)

    def split_rows(self, layer: nn.Module, groups: int) -> None:
        """Split the rows of all weights of a layer, which belong to `groups` heads, or select those of one head."""
        for name, weight in list(layer._parameters.items()):
            if weight is not None and groups % self.size == 0:
                layer._parameters[name] = split_parameter(weight, self.mesh, 0)
        if groups % self.size == 0:
            use_views(layer, dict.fromkeys(layer._parameters, to_local))
            return

        def select(weight: Tensor) -> Tensor:
            rows = weight.shape[0] // groups
            return self.enter(weight).narrow(0, self.rank * groups // self.size * rows, rows)

        use_views(layer, dict.fromkeys(layer._parameters, select))

    def split_columns(self, layer: Linear) -> Linear:
        """Split the columns of the weight of a layer; return a layer that sums the outputs of all processes."""
        layer.weight = split_parameter(layer.weight, self.mesh, 1)
        return _SummedLinear(layer, self.group, self.positions)

    def enter_layer(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(self._enter_inputs, with_kwargs=True)
        self.split_layers.append(layer)

    def _enter_inputs(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("memory") is not None:
            options = options | {"memory": self.enter(options["memory"])}
        gather = (
            self.positions.gather_for_parts if self.positions is not None and self.positions.is_active else self.enter
        )
        return (gather(args[0]), *args[1:]), options

    # -- feed-forward -----------------------------------------------------------------------------------------------

    def split_feedforward(self, block: Block) -> None:
        module: Any = block.feedforward
        hidden = module.config.hidden
        if hidden % self.size:
            self.notes.append(f"a feed-forward network with {hidden} units is not split among {self.size} processes")
        elif isinstance(module, Experts):
            block.feedforward = self.split_experts(module)
        else:
            for layer in (module.up, module.gate):
                if layer is not None:
                    self.split_rows(layer, hidden)
            module.down = self.split_columns(module.down)
            self.enter_layer(module)

    def split_experts(self, module: Experts) -> Experts:
        views: dict[str, View] = {}
        for name, dim in (("up", 1), ("gate", 1), ("up_bias", 1), ("gate_bias", 1), ("down", 2)):
            weight = module._parameters.get(name)
            if weight is not None:
                module._parameters[name] = split_parameter(weight, self.mesh, dim)
                views[name] = to_local
        if module.down_bias is not None:  # added by one process only
            views["down_bias"] = lambda bias: self.enter(bias) * (self.rank == 0)
        experts = _SummedExperts(module, self.group)
        use_views(experts, views)
        return experts


class _SummedLinear(Linear):
    """A linear layer of which each process has some input features; the outputs are summed."""

    def __init__(self, layer: Linear, group: Any, positions: DividedPositions | None) -> None:
        self.__dict__.update(layer.__dict__)
        self.group, self.positions = group, positions

    def forward(self, x: Tensor) -> Tensor:
        part = F.linear(x, to_local(self.weight))
        if self.positions is None or not self.positions.is_active:
            out = leave(part, self.group)
            return out if self.bias is None else out + self.bias
        out = self.positions.scatter_sum(part)
        return out if self.bias is None else out + enter(self.bias, self.group)


class _SummedExperts(Experts):
    """Experts of which each process has some hidden units; the outputs are summed."""

    def __init__(self, experts: Experts, group: Any) -> None:
        self.__dict__.update(experts.__dict__)
        self.group = group

    def _run_selected(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        x, weights = enter(x, self.group), enter(weights, self.group)
        return leave(super()._run_selected(x, expert_ids, weights), self.group)

    def _run_all(self, x: Tensor, expert_ids: Tensor, weights: Tensor, tap: Any) -> Tensor:
        x, weights = enter(x, self.group), enter(weights, self.group)
        return leave(super()._run_all(x, expert_ids, weights, tap), self.group)


def use_views(module: nn.Module, views: Mapping[str, View]) -> None:
    """Let a module compute with views of its tensors; its state_dict still has the tensors."""
    stored: list[tuple[dict[str, Any], str, Tensor]] = []

    def replace_tensors(module: nn.Module, inputs: Any) -> None:
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        stored.extend((table, name, table[name]) for table in tables for name in views if table.get(name) is not None)
        for table, name, tensor in stored:
            table[name] = views[name](tensor)

    def restore_tensors(module: nn.Module, inputs: Any, output: Any) -> None:
        for table, name, tensor in stored:
            table[name] = tensor
        stored.clear()

    module.register_forward_pre_hook(replace_tensors)
    module.register_forward_hook(restore_tensors, always_call=True)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions (B, n · T, D) of all n processes, each of which has x (B, T, D)."""
    n = dist.get_world_size(group)
    parts = x.new_empty((n * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions (B, T, D) of this process of the sum of x (B, n · T, D) over all n processes."""
    n = dist.get_world_size(group)
    parts = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own


def _select(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions (B, T, D) of this process of x (B, n · T, D)."""
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class DividedPositions:
    """The positions of the blocks of a model, divided among the processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.length = 0  # positions of the sequence that a block runs on

    @property
    def is_active(self) -> bool:
        return torch.is_grad_enabled()

    # Each is a function of x with all positions (B, T, D) or with those of this process, padded (B, ceil(T / n), D).

    def gather_for_parts(self, x: Tensor) -> Tensor:
        """Gather all positions, of which each process then computes a part; the gradients of the parts are summed."""
        return exchange(x, self.group, _gather, _scatter_sum)[:, : self.length]

    def gather_for_all(self, x: Tensor) -> Tensor:
        """Gather all positions, with which every process then computes the same."""
        return exchange(x, self.group, _gather, _select)[:, : self.length]

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Sum what the processes have computed for all positions, and return the positions of this process."""
        return exchange(self._pad(x), self.group, _scatter_sum, _gather)

    def select(self, x: Tensor) -> Tensor:
        """Return the positions of this process of x, which every process has."""
        return exchange(self._pad(x), self.group, _select, _gather)

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.shape[1] % self.size))

    # -- hooks --------------------------------------------------------------------------------------------------------

    def divide_stack(self, stack: nn.Module) -> None:
        """Let a stack run on the positions of this process, and return all of them."""

        def divide(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            self.length = args[0].shape[1]
            return ((self.select(args[0]), *args[1:]) if self.is_active else args), options

        stack.register_forward_pre_hook(divide, with_kwargs=True)
        stack.register_forward_hook(lambda module, args, out: self.gather_for_all(out) if self.is_active else out)

    def follow_block(self, block: nn.Module) -> None:
        """Remember how many positions a block runs on, also when it is run again in the backward pass."""

        def remember(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            context: AttentionContext = args[1]
            self.length = context.resolved_mask.q.length

        block.register_forward_pre_hook(remember, with_kwargs=True)

    def gather_around(self, module: nn.Module) -> None:
        """Let a module that every process computes run on all positions."""

        def gather(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return ((self.gather_for_all(args[0]), *args[1:]) if self.is_active else args), options

        module.register_forward_pre_hook(gather, with_kwargs=True)
        module.register_forward_hook(lambda module, args, out: self.select(out) if self.is_active else out)


def split_parameter(weight: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Return the part of a weight that this process stores, as a DTensor that is split along `dim`."""
    part = distribute_tensor(weight.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(part, requires_grad=weight.requires_grad)


def to_local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process stores."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicate(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that every process has as a DTensor, to add it to one that is split."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


class VocabularyPart(nn.Module):
    """A table (V, D) of which this process stores some rows; it is an embedding, an output matrix, or both."""

    weight: nn.Parameter

    def __init__(self, table: nn.Embedding | nn.Linear, mesh: DeviceMesh) -> None:
        self.__dict__.update(table.__dict__)
        self.vocab, self.mesh = table.weight.shape[0], mesh
        self.weight = split_parameter(table.weight, mesh, 0)

    @property
    def first(self) -> int:
        """The first token whose row this process stores."""
        return first_row(self.vocab, self.mesh)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of x (…, D): in training those of all processes as a DTensor, otherwise gathered."""
        group, rows = self.mesh.get_group(), to_local(self.weight)
        part = None if bias is None else enter(bias, group)[self.first : self.first + len(rows)]
        logits = F.linear(enter(x, group), rows, part)
        shape = torch.Size((*logits.shape[:-1], self.vocab))
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(logits, self.mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
        return whole if self.training else whole.full_tensor()


class EmbeddingPart(VocabularyPart, nn.Embedding):  # type: ignore[misc]
    def forward(self, ids: Tensor) -> Tensor:
        """Look up the tokens of this process; the others are looked up by other processes."""
        rows = to_local(self.weight)
        index = ids - self.first
        is_own = (index >= 0) & (index < len(rows))
        found = F.embedding(index.masked_fill(~is_own, 0), rows)
        return leave(found * is_own[..., None], self.mesh.get_group())


class OutputPart(VocabularyPart, nn.Linear):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def split_table(table: nn.Embedding | nn.Linear, mesh: DeviceMesh) -> Any:
    """Split the rows of an nn.Embedding or nn.Linear without bias; return the part of this process."""
    return EmbeddingPart(table, mesh) if isinstance(table, nn.Embedding) else OutputPart(table, mesh)


def first_row(rows: int, mesh: DeviceMesh) -> int:
    """Return the first row of this process, if `rows` rows are split as evenly as torch.chunk does."""
    size = -(-rows // mesh.size())
    return min(mesh.get_local_rank() * size, rows)


def vocabulary_cross_entropy(logits: DTensor, labels: Tensor, *, ignore_index: int, label_smoothing: float) -> Tensor:
    """Compute F.cross_entropy with reduction="sum" for logits (N, V) that are split along the vocabulary.

    No process needs all logits: the maximum, the sum of the exponentials and the logit of the label are exchanged.
    """
    mesh, part = logits.device_mesh, logits.to_local()
    group, part, vocab = mesh.get_group(), part.float() if part.dtype in HALF_DTYPES else part, logits.shape[-1]
    highest = part.detach().amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    normalizer = highest + leave((part - highest[:, None]).exp().sum(-1), group).log()
    index = labels - first_row(vocab, mesh)
    is_own = (index >= 0) & (index < part.shape[-1])
    own = part.gather(-1, index.masked_fill(~is_own, 0)[:, None])[:, 0]
    losses = normalizer - leave(own * is_own, group)
    if label_smoothing:
        spread = normalizer - leave(part.sum(-1), group) / vocab
        losses = (1 - label_smoothing) * losses + label_smoothing * spread
    return losses[labels != ignore_index].sum()


Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.collective = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.collective(grad, ctx.group), None, None, None


def exchange(x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
    """Return forward(x, group), whose gradient is backward(gradient, group)."""
    result: Tensor = _Exchange.apply(x, group, forward, backward)
    return result


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, of which each process then uses a part; the gradients of the parts are summed."""
    return exchange(x, group, _same, _sum)


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the parts x that the processes have computed."""
    return exchange(x, group, _sum, _same)


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
