"""A vocabulary that is split among processes: embedding, output and cross-entropy, each on its own part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from monoblock.nn.norm import HALF_DTYPES
from monoblock.parallel.collectives import enter, leave


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


def cross_entropy(logits: DTensor, labels: Tensor, *, ignore_index: int, label_smoothing: float) -> Tensor:
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
