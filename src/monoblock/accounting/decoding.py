"""What it costs to write text token by token: token positions run, operations, bytes moved.

The first step runs the prompt of P tokens once.  With a cache each of the n - 1 steps after it runs one new position
for every hypothesis, without one the whole text so far:

    positions   P + b·(n - 1)   against   P + b·Σ (P + i), i = 1 … n - 1          with b beams; greedy: b = 1

Only the logits of the last position are computed.  An encoder runs once; without a cache the keys and values it gives
to cross-attention are made anew in each step.  Bytes moved are the matrices of decoder and head, read once a step
however many rows pass (of the experts as many as the rows can reach), and the keys and values written and read.
"""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.accounting.flops import (
    Sizes,
    feedforward_flops,
    matrix_flops,
    pair_flops,
    seen_before,
    sizes,
    stack_flops,
)
from monoblock.accounting.memory import slot, stored_bytes
from monoblock.accounting.parameters import attention_linears, block_counts, head_linears, matrix_weights
from monoblock.accounting.quantized import block_bytes, head_bytes
from monoblock.config import BlockConfig, ModelConfig, RecurrentConfig
from monoblock.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Decoding:
    steps: int
    positions: int  # run through the decoder, over all sequences and hypotheses
    flops: int
    bytes_moved: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a text is written; counts are of one sequence, all its hypotheses together."""

    prompt: int
    new: int
    beams: int
    cached: bool

    @property
    def rows(self) -> int:
        """Positions of which the logits are asked for."""
        return 1 + self.beams * (self.new - 1)

    @property
    def positions(self) -> int:
        return self.prompt + self.beams * (self.new - 1 if self.cached else self.reread)

    @property
    def reread(self) -> int:
        """The lengths of all texts so far, after the prompt."""
        return _triangle(self.prompt + self.new - 1) - _triangle(self.prompt)

    def pairs(self, window: int | None) -> int:
        """(Query, key) pairs computed: the prompt and a repeated text as a full square, a cached step as one row."""
        end = self.prompt + self.new - 1
        if self.cached:
            kept = window or end
            later = seen_before(end, kept) - seen_before(self.prompt, kept)
        else:
            later = _squares(end) - _squares(self.prompt)
        return self.prompt**2 + self.beams * later

    def places(self, window: int | None) -> int:
        """Keys and values read, once a step and hypothesis."""
        end = self.prompt + self.new - 1
        kept = window or end if self.cached else end
        return self.prompt + self.beams * (seen_before(end, kept) - seen_before(self.prompt, kept))


def _triangle(number: int) -> int:
    return number * (number + 1) // 2


def _squares(number: int) -> int:
    return number * (number + 1) * (2 * number + 1) // 6


def _block_flops(block: BlockConfig, plan: Plan, source: int) -> int:
    found = matrix_flops(attention_linears(block.attention, block.width), plan.positions)
    found += plan.pairs(block.attention.window) * pair_flops(block.attention, block.width)
    found += feedforward_flops(block, plan.positions)
    if block.cross:
        query, key, value, output = attention_linears(block.cross, block.width)
        readings = 1 if plan.cached else plan.rows
        found += matrix_flops((query, output), plan.positions) + matrix_flops((key, value), readings * source)
        found += plan.positions * source * pair_flops(block.cross, block.width)
    return found


def _block_weights(block: BlockConfig, rows: int) -> int:
    """Weights one step reads when `rows` tokens pass."""
    experts = block.feedforward.experts
    return matrix_weights(block, min(experts.count, rows * experts.top_k) if experts else None)


def _block_places(block: BlockConfig, plan: Plan, source: int) -> int:
    """Numbers of keys and values that a block writes and reads for one sequence."""
    found = (plan.positions + plan.places(block.attention.window)) * slot(block.attention, block.width)
    if block.cross:
        written = source * (1 if plan.cached else plan.rows)
        found += (written + plan.rows * source) * slot(block.cross, block.width)
    return found


def _moved(config: ModelConfig, plan: Plan, size: Sizes) -> int:
    """Numbers moved by decoder and head."""
    assert config.decoder is not None
    found = plan.new * sum(linear.matrix for linear in head_linears(config))
    later = size.batch * plan.beams * (1 if plan.cached else plan.prompt + 1)
    for block, times in block_counts(config.decoder).items():
        weights = _block_weights(block, size.batch * plan.prompt) + (plan.new - 1) * _block_weights(block, later)
        found += times * (weights + size.batch * _block_places(block, plan, size.source))
    return found


def _saved(config: ModelConfig, plan: Plan, size: Sizes, dtype: str) -> int:
    """Bytes that need not be moved because the matrices read are quantised."""
    head = sum(linear.matrix for linear in head_linears(config))
    saved = plan.new * (stored_bytes(head, dtype) - head_bytes(config, dtype))
    later = size.batch * plan.beams * (1 if plan.cached else plan.prompt + 1)
    readings = {
        "decoder": ((1, size.batch * plan.prompt), (plan.new - 1, later)),
        "encoder": ((1, size.batch * size.source),),
    }
    for name, stack in config.stacks.items():
        for block, times in block_counts(stack).items():
            for steps, rows in readings[name]:
                experts = block.feedforward.experts
                reached = min(experts.count, rows * experts.top_k) if experts else None
                wide = stored_bytes(matrix_weights(block, reached), dtype)
                saved += steps * times * (wide - block_bytes(config, block, dtype, reached))
    return saved


def decoding(
    config: ModelConfig | RecurrentConfig,
    *,
    prompt: int = 1,
    new: int,
    batch: int = 1,
    beams: int = 1,
    cached: bool = True,
    source: int | None = None,
    dtype: str = "bf16",
) -> Decoding:
    """The cost of `new` tokens after a prompt; for an encoder-decoder after `source` tokens and a prompt of one."""
    if isinstance(config, RecurrentConfig) or config.decoder is None:
        raise InputError("only a Transformer with a decoder writes text step by step here; give one")
    for name, value in (("prompt", prompt), ("new", new), ("beams", beams)):
        if value < 1:
            raise InputError(f"{name}={value} cannot be counted; write 1 or more")
    if source is not None and config.encoder is None:
        raise InputError(f"source={source} is for an encoder-decoder; a decoder alone has only a prompt")
    length = source if config.encoder else prompt + new - 1
    size = sizes(config, batch, length, prompt + new - 1 if config.encoder else None)
    plan = Plan(prompt=prompt, new=new, beams=beams, cached=cached)
    work = plan.rows * matrix_flops(head_linears(config), 1)
    for block, times in block_counts(config.decoder).items():
        work += times * _block_flops(block, plan, size.source)
    numbers = _moved(config, plan, size)
    work *= batch
    if config.encoder:
        work += sum(stack_flops(config.encoder, batch, size.source, 0).values())
        read = batch * size.source
        numbers += sum(times * _block_weights(block, read) for block, times in block_counts(config.encoder).items())
    moved = stored_bytes(numbers, dtype) - (_saved(config, plan, size, dtype) if config.quantize else 0)
    return Decoding(steps=new, positions=batch * plan.positions, flops=work, bytes_moved=moved)
