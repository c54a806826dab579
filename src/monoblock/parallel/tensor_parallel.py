"""Tensor parallelism: each process computes some heads, some hidden units and some logits (Shoeybi et al. 2019).

The plan follows from the configuration, and `parallelize_module` applies it:

attention      query, key, value by heads; output by the heads it reads
               fewer key/value heads than processes: each process computes the one that its queries use
feed-forward   up and gate by hidden units; down by the units it reads; experts likewise, each process a part of all
vocabulary     the token embedding and the output matrix by tokens, whether tied or not, and the loss with them

Everything else is computed by every process: norms, residuals, the router, and what cannot be divided evenly. A weight
that is split is a DTensor; a process computes with its local part, by the code of a model with fewer heads.

Norms, residual connections and dropout treat every position alone, so with parallel.sequence each process computes them
for some positions only, and stores the activations of these only (Korthikanti et al. 2022). Before attention and
feed-forward layers, the processes gather all positions; after them, the sum of their parts is scattered. Together this
sends as much as the all-reduce of tensor parallelism alone. Positions are divided only while gradients are computed;
their number is padded to a multiple of the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from monoblock.accounting.parallel import splits_heads
from monoblock.config.model import AttentionConfig
from monoblock.errors import ConfigError
from monoblock.nn.attention import Attention, AttentionContext
from monoblock.nn.block import Block
from monoblock.nn.embedding import Embedding
from monoblock.nn.experts import Experts
from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer

View = Callable[[Tensor], Tensor | None]  # what a process computes with, made from the weight that it stores


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
    plan = Plan(model, mesh, sequence=sequence)
    parallelize_module(model, mesh, dict(plan.layers))
    return list(dict.fromkeys(plan.notes))


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass
class SplitLayer(ParallelStyle):
    """What a process has of the weights of a layer, and what the processes exchange before and after it.

    split: the dimension along which a weight is divided; the layer computes with the local part.
    views: what the layer computes with in place of other weights; the weights stay what they are.
    inputs: applied to the first argument of the layer, and `memory` to the argument of this name.
    outputs: applied to the result.
    before: called with the arguments.
    """

    split: dict[str, int] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    inputs: Callable[[Tensor], Tensor] | None = None
    memory: Callable[[Tensor], Tensor] | None = None
    outputs: Callable[[Any], Any] | None = None
    before: Callable[..., None] | None = None

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, dim in self.split.items():
            module._parameters[name] = split_parameter(module._parameters[name], mesh, dim)
        views: dict[str, View] = {**dict.fromkeys(self.split, to_local), **self.views}
        views = {
            name: view for name, view in views.items() if (module._parameters | module._buffers).get(name) is not None
        }

        def enter_layer(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if self.before is not None:
                self.before(*args)
            for name, view in views.items():  # an attribute of this name hides the weight until the layer has run
                module.__dict__[name] = view(cast(Tensor, module._parameters.get(name, module._buffers.get(name))))
            if self.memory is not None and options.get("memory") is not None:
                options = options | {"memory": self.memory(options["memory"])}
            return (args if self.inputs is None else (self.inputs(args[0]), *args[1:])), options

        def leave_layer(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            for name in views:
                module.__dict__.pop(name, None)
            return out if self.outputs is None or out is None else self.outputs(out)

        module.register_forward_pre_hook(enter_layer, with_kwargs=True)
        module.register_forward_hook(leave_layer, always_call=True)
        return module


class Plan:
    """How the layers of a Transformer are split: `layers` by their names, and `notes` on what is not split."""

    def __init__(self, model: Transformer, mesh: DeviceMesh, *, sequence: bool = False) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.positions = DividedPositions(self.group) if sequence else None
        self.enter, self.leave = partial(enter, group=self.group), partial(leave, group=self.group)
        self.names = {module: name for name, module in model.named_modules()}
        self.layers: dict[str, SplitLayer] = {}
        self.notes: list[str] = []
        for stack in (model.encoder, model.decoder):
            if stack is not None:
                self.add_stack(stack)
        for embedding in (model.input, model.target):
            if isinstance(embedding, Embedding) and embedding.token is not None:
                self.add_embedding(embedding.token)
        head = model.head
        if head is not None and head.output is not None and head.config.kind in ("language_model", "masked_lm"):
            vocab, output = head.output.out_features, head.output
            whole = lambda logits: self.whole_logits(logits, vocab, keep=output.training)
            self.add(output, split={"weight": 0}, inputs=self.enter, outputs=whole)
            bias: View = lambda bias: replicate(bias, mesh) if head.training else bias
            self.add(head, views={"bias": bias, "fixed_bias": bias})

    def add(self, module: nn.Module | None, **changes: Any) -> None:
        if module is not None:
            layer = self.layers.setdefault(self.names[module], SplitLayer())
            for name, value in changes.items():
                setattr(layer, name, getattr(layer, name) | value if isinstance(value, dict) else value)

    def add_sums(self, module: nn.Module | None) -> None:
        """Sum the gradients of a module's own weights, of which each process uses a part or for some positions."""
        if module is not None:
            self.add(module, views=dict.fromkeys(module._parameters, self.enter))

    # -- stacks ------------------------------------------------------------------------------------------------------

    def add_stack(self, stack: Stack) -> None:
        for block in dict.fromkeys(stack.blocks):
            for attention in (block.attention, block.cross):
                if attention is not None and not self.add_attention(attention):
                    self.gather_around(attention)
            if block.feedforward is not None and not self.add_feedforward(block.feedforward):
                self.gather_around(block.feedforward)
            if self.positions is not None:
                for name, child in block.named_children():
                    if name.endswith("_norm"):
                        self.add_sums(child)
                self.add_sums(block)  # its gains
                self.add(block, before=self.positions.remember_length)
        if self.positions is not None:
            self.add(stack, inputs=self.positions.divide, outputs=self.positions.gather_for_all)
            self.add_sums(stack.norm)
        width = stack.config.width
        sized = [replace(c, head_dim=c.key_size(width), value_dim=c.value_size(width)) for c in stack.attention_configs]
        local = [self.local_config(config) for config in sized]
        stack.attention_configs = [new or old for new, old in zip(local, stack.attention_configs, strict=True)]
        if stack.position_bias is not None and local[0] is not None:  # all layers have as many heads
            self.add_sums(stack.position_bias)

    def local_config(self, config: AttentionConfig) -> AttentionConfig | None:
        """Return the configuration of the heads of this process; None if they cannot be divided."""
        heads, n = config.heads, self.size
        if not splits_heads(config, n):
            return None
        kept = config.kept_heads or tuple(range(heads))
        first = self.rank * heads // n
        return replace(
            config,
            heads=heads // n,
            kv_heads=max(1, config.num_kv_heads // n),
            kept_heads=kept[first : first + heads // n],
            unpruned_heads=config.num_unpruned_heads,
        )

    def add_attention(self, attention: Attention) -> bool:
        """Split attention by heads; return whether it can be."""
        config = attention.config
        key_size = attention.query.out_features // config.heads
        config = replace(config, head_dim=key_size, value_dim=attention.output.in_features // config.heads)
        local = self.local_config(config)
        if local is None:
            self.notes.append(f"attention with {config.heads} heads is not split among {self.size} processes")
            return False
        heads, kv_heads = config.heads, config.num_kv_heads
        for layer, count in ((attention.query, heads), (attention.key, kv_heads), (attention.value, kv_heads)):
            self.add_rows(layer, count)
        self.add_columns(attention.output)
        for norm, count in ((attention.query_norm, heads), (attention.key_norm, kv_heads)):
            if norm is not None and config.qk_norm_over == "each_head":
                self.add_rows(norm, count)
            else:
                self.add_sums(norm)
        self.add_sums(attention.position_bias)
        self.add(attention, split={} if attention.sinks is None else {"sinks": 0})
        self.add(attention, inputs=self.gather, memory=self.enter)
        attention.config = local
        return True

    def add_feedforward(self, module: Any) -> bool:
        """Split a feed-forward network by hidden units; return whether it can be."""
        hidden = module.config.hidden
        if hidden % self.size:
            self.notes.append(f"a feed-forward network with {hidden} units is not split among {self.size} processes")
            return False
        if isinstance(module, Experts):
            self.add_experts(module)
            return self.positions is None  # else all positions are gathered around the router, too
        for layer in (module.up, module.gate):
            if layer is not None:
                self.add_rows(layer, hidden)
        self.add_columns(module.down)
        self.add(module, inputs=self.gather)
        return True

    def add_experts(self, module: Experts) -> None:
        dims = {"up": 1, "gate": 1, "up_bias": 1, "gate_bias": 1, "down": 2}
        split = {name: dim for name, dim in dims.items() if module._parameters.get(name) is not None}
        # One process adds the bias of the sum.
        self.add(module, split=split, views={"down_bias": lambda bias: self.enter(bias) * (self.rank == 0)})
        for name in ("_run_selected", "_run_all"):  # what follows the router, which every process computes
            setattr(module, name, partial(self.run_experts, getattr(module, name)))

    def run_experts(self, run: Callable[..., Tensor], x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        return self.leave(run(self.enter(x), ids, self.enter(weights), *rest))

    def gather_around(self, module: nn.Module) -> None:
        """Let a module that every process computes run on all positions."""
        if self.positions is not None:
            self.add(module, inputs=self.positions.gather_for_all, outputs=self.positions.select)

    # -- layers ------------------------------------------------------------------------------------------------------

    def add_rows(self, layer: nn.Module, groups: int) -> None:
        """Split the rows of all weights of a layer, which belong to `groups` heads, or select those of one head."""
        names = [name for name, weight in layer._parameters.items() if weight is not None]
        if groups % self.size == 0:
            self.add(layer, split=dict.fromkeys(names, 0))
            return

        def select(weight: Tensor) -> Tensor:
            rows = weight.shape[0] // groups
            return self.enter(weight).narrow(0, self.rank * groups // self.size * rows, rows)

        self.add(layer, views=dict.fromkeys(names, select))

    def add_columns(self, layer: nn.Linear) -> None:
        """Split the columns of the weight of a layer; the outputs of all processes are summed, then the bias added."""

        def sum_outputs(part: Tensor) -> Tensor:
            if self.positions is None or not self.positions.is_active:
                out = self.leave(part)
                return out if layer.bias is None else out + layer.bias
            out = self.positions.scatter_sum(part)
            return out if layer.bias is None else out + self.enter(layer.bias)

        self.add(layer, split={"weight": 1}, views={"bias": lambda bias: None}, outputs=sum_outputs)

    def gather(self, x: Tensor) -> Tensor:
        """Return the input of a layer of which each process computes a part."""
        is_divided = self.positions is not None and self.positions.is_active
        return self.positions.gather_for_parts(x) if is_divided and self.positions is not None else self.enter(x)

    def add_embedding(self, token: nn.Embedding) -> None:
        """Split the rows of a token embedding, with which a tied output multiplies, too."""
        vocab, first, is_own = token.num_embeddings, first_row(token.num_embeddings, self.mesh), list[Tensor]()

        def find(ids: Tensor) -> Tensor:
            index = ids - first
            is_own.append((index >= 0) & (index < len(to_local(token._parameters["weight"]))))
            return index.masked_fill(~is_own[-1], 0)

        def linear(x: Tensor, bias: Tensor | None = None) -> Tensor:
            rows = to_local(token._parameters["weight"])
            part = None if bias is None else self.enter(bias)[first : first + len(rows)]
            return self.whole_logits(F.linear(self.enter(x), rows, part), vocab, keep=token.training)

        sum_found = lambda found: self.leave(found * is_own.pop()[..., None])  # others find the other tokens
        self.add(token, split={"weight": 0}, inputs=find, outputs=sum_found)
        vars(token)["linear"] = linear

    def whole_logits(self, part: Tensor, vocab: int, *, keep: bool) -> Tensor:
        """Return the logits of all processes: split, as a DTensor, if they are to be kept so, otherwise gathered."""
        shape = torch.Size((*part.shape[:-1], vocab))
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(part, self.mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
        return whole if keep else whole.full_tensor()


def split_parameter(weight: Tensor | None, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Return the part of a weight that this process stores, as a DTensor that is split along `dim`."""
    assert weight is not None
    part = distribute_tensor(weight.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(part, requires_grad=weight.requires_grad)


def to_local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process stores."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicate(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that every process has as a DTensor, to add it to one that is split."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def first_row(rows: int, mesh: DeviceMesh) -> int:
    """Return the first row of this process, if `rows` rows are split as evenly as torch.chunk does."""
    size = -(-rows // mesh.size())
    return min(mesh.get_local_rank() * size, rows)


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int, label_smoothing: float) -> Tensor:
    """Compute F.cross_entropy with reduction="sum" for logits (N, V) that are split along the vocabulary.

    No process needs all logits: the maximum, the sum of the exponentials and the logit of the label are exchanged.
    """
    assert isinstance(logits, DTensor)
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


# -- positions ---------------------------------------------------------------------------------------------------------


class DividedPositions:
    """The positions of the blocks of a model, divided among the processes of a group while gradients are computed.

    Each function takes x with all positions (B, T, D) or with those of this process, padded (B, ceil(T / n), D).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.length = 0  # positions of the sequence that a block runs on

    @property
    def is_active(self) -> bool:
        return torch.is_grad_enabled()

    def remember_length(self, x: Tensor, context: AttentionContext, *args: object) -> None:
        """Remember how many positions a block runs on, also when it is run again in the backward pass."""
        self.length = context.resolved_mask.q.length

    def divide(self, x: Tensor) -> Tensor:
        """Return the positions of this process of the input of a stack."""
        self.length = x.shape[1]
        return self.select(x)

    def gather_for_parts(self, x: Tensor) -> Tensor:
        """Gather all positions, of which each process then computes a part; the gradients of the parts are summed."""
        return exchange(x, self.group, _gather, _scatter_sum)[:, : self.length]

    def gather_for_all(self, x: Tensor) -> Tensor:
        """Gather all positions, with which every process then computes the same."""
        return exchange(x, self.group, _gather, _select)[:, : self.length] if self.is_active else x

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Sum what the processes have computed for all positions, and return the positions of this process."""
        return exchange(self._pad(x), self.group, _scatter_sum, _gather)

    def select(self, x: Tensor) -> Tensor:
        """Return the positions of this process of x, which every process has."""
        return exchange(self._pad(x), self.group, _select, _gather) if self.is_active else x

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.shape[1] % self.size))


# -- what the processes exchange ---------------------------------------------------------------------------------------

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
