"""Tensor parallelism: each process computes some heads, some hidden units and some logits (Shoeybi et al. 2019).

The plan follows from the configuration:

attention      query, key, value by heads; output by the heads it reads
               fewer key/value heads than processes: each process computes the one that its queries use
feed-forward   up and gate by hidden units; down by the units it reads; experts likewise, each process a part of all
vocabulary     the token embedding and the output matrix by tokens, whether tied or not, and the loss with them

Everything else is computed by every process: norms, residuals, the router, and what cannot be divided evenly (see also
parallel/sequence_parallel.py). A weight that is split is a DTensor; a process computes with its local part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from monoblock.accounting.parallel import splits_heads
from monoblock.config.model import AttentionConfig
from monoblock.errors import ConfigError
from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.embedding import Embedding
from monoblock.nn.experts import Experts
from monoblock.nn.linear import Linear
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer
from monoblock.parallel.collectives import enter, leave
from monoblock.parallel.sequence_parallel import DividedPositions
from monoblock.parallel.vocabulary import replicate, split_parameter, split_table, to_local

View = Callable[[Tensor], Tensor]  # what a process computes with, made from the weight that it stores


def check_splittable(model: nn.Module) -> None:
    """Raise ConfigError if the matrices of a model cannot be split."""
    if not isinstance(model, Transformer) or model.block_class is not Block:
        raise ConfigError(
            "tensor parallelism splits the blocks of monoblock only; train with train.parallel=fsdp, or use one process"
        )


def split_model(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> list[str]:
    """Split the weights of a Transformer in place; return a sentence for each part that is not split.

    sequence: also divide the positions of norms, residual connections and dropout (parallel/sequence_parallel.py).
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
