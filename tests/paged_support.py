"""Rows of a stack with keys and values in pages, and what the plain modules compute for whole sequences."""

import copy
import random

import torch

from monoblock.inference.runners.cpu import fuse_stack
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.masks import TokenPositions


def randomize(stack, seed=0):
    """A copy with weights of which none is zero or one."""
    stack, generator = copy.deepcopy(stack).eval(), torch.Generator().manual_seed(seed)
    for weight in stack.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.data = weight + noise * (0.3 if weight.dim() == 1 else 0.5 * weight.shape[-1] ** -0.5)
    return stack


def tokens_of(length, rows=1):
    return TokenPositions(torch.arange(length).expand(rows, length))


def on_whole_sequences(stack, inputs, sources):
    """The outputs of a stack in fp64 for each sequence (T, D) by itself."""
    outputs = []
    for x, source in zip(inputs, sources, strict=True):
        options = {}
        if source is not None:
            options = {"memory": source.double()[None], "memory_positions": tokens_of(len(source))}
        outputs.append(stack(x.double()[None], tokens_of(len(x)), **options)[0])
    return outputs


class PagedRows:
    """Rows of a stack with keys and values in pages, in any order; what is not written is NaN."""

    def __init__(self, stack, sources, pages=90, seed=0):
        self.stack, self.rows = fuse_stack(stack), len(sources)
        assert self.stack is not None
        self.random = random.Random(seed)
        self.free = self.random.sample(range(1, pages), pages - 1)
        self.tables = torch.zeros(self.rows, 80, dtype=torch.int32)
        self.lengths = torch.zeros(self.rows, dtype=torch.long)
        self.pools = [self._pools(block.attention, pages) for block in stack.blocks]
        self.sources = [self._pools(block.cross, pages) for block in stack.blocks if block.cross is not None]
        self.source_tables, self.source_lengths = torch.zeros(self.rows, 48, dtype=torch.int32), None
        if self.sources:
            self.source_lengths = torch.tensor([len(source) for source in sources])
            for row, source in enumerate(sources):
                self._write_source(stack, row, source)

    @staticmethod
    def _pools(attention, pages):
        groups = attention.config.num_kv_heads
        sizes = [layer.weight.shape[0] // groups for layer in (attention.key, attention.value)]
        return [torch.full((pages, groups, PAGE_SIZE, size), torch.nan) for size in sizes]

    def _write_source(self, stack, row, source):
        crosses = [block.cross for block in stack.blocks if block.cross is not None]
        count = -(-len(source) // PAGE_SIZE)
        self.source_tables[row, :count] = torch.tensor([self.free.pop() for _ in range(count)], dtype=torch.int32)
        for cross, pools in zip(crosses, self.sources, strict=True):
            groups = cross.config.num_kv_heads
            for pool, flat in zip(pools, (cross.key(source), cross.value(source)), strict=True):
                heads = flat.unflatten(-1, (groups, -1)).transpose(0, 1)
                for start in range(0, len(source), PAGE_SIZE):
                    part = heads[:, start : start + PAGE_SIZE]
                    pool[self.source_tables[row, start // PAGE_SIZE], :, : part.shape[1]] = part

    def fork(self, source, row):
        """Make an empty row begin with the tokens of another; whole pages are shared, the last one is copied."""
        self.lengths[row], length = self.lengths[source], int(self.lengths[source])
        self.tables[row] = self.tables[source]
        if used := length % PAGE_SIZE:
            last, page = length // PAGE_SIZE, self.free.pop()
            sources, pools = self.tables[row, last : last + 1].long(), [pool for pair in self.pools for pool in pair]
            torch.ops.monoblock.copy_pages(pools, sources, torch.tensor([page]), torch.tensor([used]))
            self.tables[row, last] = page

    def step(self, parts, **options):
        """The outputs for the next tokens of each row, a list of (count, D)."""
        counts = torch.tensor([len(part) for part in parts])
        x = torch.full((self.rows, int(counts.max()) + 1, parts[0].shape[1]), torch.nan)
        for row, part in enumerate(parts):
            x[row, : len(part)] = part
            first, end = (-(-int(length) // PAGE_SIZE) for length in (self.lengths[row], self.lengths[row] + len(part)))
            for number in range(first, end):
                self.tables[row, number] = self.free.pop()
        assert self.stack.supports(x, int(counts.sum()))
        keys, values = zip(*self.pools, strict=True)
        source_keys, source_values = zip(*self.sources, strict=True) if self.sources else ((), ())
        tables = self.source_tables if self.sources else None
        out = self.stack.step(
            x,
            self.lengths,
            counts,
            self.tables,
            keys,
            values,
            source_keys,
            source_values,
            tables,
            self.source_lengths,
            **options,
        )
        assert all((out[row, count:] == 0).all() for row, count in enumerate(counts))
        self.lengths += counts
        return [out[row, :count] for row, count in enumerate(counts)]

    def run(self, inputs, sizes, **options):
        """The outputs for whole inputs, some tokens of each row at a time; a size may be 0."""
        outputs, done = [[] for _ in inputs], [0] * len(inputs)
        while any(count < len(x) for count, x in zip(done, inputs, strict=True)):
            chunks = [x[count : count + self.random.choice(sizes)] for count, x in zip(done, inputs, strict=True)]
            if not any(len(chunk) for chunk in chunks):
                continue
            for row, out in enumerate(self.step(chunks, **options)):
                outputs[row].append(out)
                done[row] += len(out)
        return [torch.cat(parts) for parts in outputs]


def assert_close(actual, expected, tolerance=2e-5):
    for row, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        error = (mine.double() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert float(error.max()) < tolerance, (row, error)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def draw_rows(lengths, width):
    return [draw(length, width, seed=row) for row, length in enumerate(lengths)]


def no_sources(inputs):
    return [None] * len(inputs)
