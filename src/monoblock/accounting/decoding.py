"""The cost of generating text token by token: positions computed, FLOPs, bytes moved.

The first step computes the prompt of P tokens once. With a cache, each of the n - 1 steps after it computes one new
position for every beam; without a cache, it computes the whole text so far. The numbers of positions with b beams
(greedy decoding is b = 1) are

    with a cache      P + b·(n - 1)
    without a cache   P + b·Σ (P + i), i = 1 … n - 1

Logits are computed for the last position only. An encoder runs once; without a cache the keys and values of
cross-attention are computed again in each step. The bytes moved are the matrices of decoder and head, which are read
once per step for any number of rows, and the keys and values written and read. Of the experts, a step reads as many as
its rows can be routed to.

A step with a cache computes the scores of all cached keys, and masks those that it may not see. With a window, only the
keys in it are cached (the spare columns of the ring are not counted). With global tokens or random blocks too, all keys
are cached, and a step costs as much as one without a window.
"""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.accounting.flops import (
    BatchShape,
    count_visible_keys,
    feedforward_flops,
    linear_attention_flops,
    matrix_flops,
    pair_flops,
    resolve_batch_shape,
    stack_flops,
)
from monoblock.accounting.memory import (
    block_bytes,
    head_bytes,
    kv_elements_per_position,
    linear_state_elements,
    stored_bytes,
)
from monoblock.accounting.parameters import attention_linears, block_matrix_weights, count_blocks, head_linears
from monoblock.config.model import BlockConfig, ModelConfig, RecurrentConfig
from monoblock.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DecodingCost:
    """The cost of generating text; `bytes_moved` counts the weights, keys and values that are read or written."""

    steps: int
    positions: int  # computed in the decoder, over all sequences and hypotheses
    flops: int
    bytes_moved: int


@dataclass(frozen=True, kw_only=True)
class DecodingSetup:
    """Lengths and options of text generation; all counts are for one sequence with all its beams."""

    prompt_length: int
    new_tokens: int
    num_beams: int
    use_cache: bool

    @property
    def logit_positions(self) -> int:
        """The number of positions whose logits are computed."""
        return 1 + self.num_beams * (self.new_tokens - 1)

    @property
    def positions(self) -> int:
        recomputed = _sum_to(self.prompt_length + self.new_tokens - 1) - _sum_to(self.prompt_length)
        return self.prompt_length + self.num_beams * (self.new_tokens - 1 if self.use_cache else recomputed)

    def attention_pairs(self, window: int | None) -> int:
        """Count the (query, key) pairs for which attention is computed.

        A prompt or a recomputed text of T tokens has T² pairs; a step with a cache has one query and at most `window`
        keys (None: all so far).
        """
        end = self.prompt_length + self.new_tokens - 1
        if self.use_cache:
            window = window or end
            generated = count_visible_keys(end, window) - count_visible_keys(self.prompt_length, window)
        else:
            generated = _sum_of_squares(end) - _sum_of_squares(self.prompt_length)
        return self.prompt_length**2 + self.num_beams * generated

    def keys_read(self, window: int | None) -> int:
        """Count the keys read in all steps by all beams; as many values are read.

        The first step reads the keys of the prompt; a step with a cache reads at most `window` keys (None: all so far).
        """
        end = self.prompt_length + self.new_tokens - 1
        window = window or end if self.use_cache else end
        generated = count_visible_keys(end, window) - count_visible_keys(self.prompt_length, window)
        return self.prompt_length + self.num_beams * generated


def _sum_to(number: int) -> int:
    return number * (number + 1) // 2


def _sum_of_squares(number: int) -> int:
    return number * (number + 1) * (2 * number + 1) // 6


def _block_flops(block: BlockConfig, setup: DecodingSetup, source: int) -> int:
    flops = matrix_flops(attention_linears(block.attention, block.width), setup.positions)
    flops += _attention_flops(block, setup)
    flops += feedforward_flops(block, setup.positions)
    if block.cross:
        query, key, value, output = attention_linears(block.cross, block.width)
        source_passes = 1 if setup.use_cache else setup.logit_positions
        flops += matrix_flops((query, output), setup.positions) + matrix_flops((key, value), source_passes * source)
        flops += setup.positions * source * pair_flops(block.cross, block.width)
    return flops


def _attention_flops(block: BlockConfig, setup: DecodingSetup) -> int:
    """Count the FLOPs of self-attention without its projections; linear attention with a cache updates its sums."""
    attention, width = block.attention, block.width
    if attention.kind != "linear":
        return setup.attention_pairs(attention.cached_window) * pair_flops(attention, width)
    end = setup.prompt_length + setup.new_tokens - 1
    flops = linear_attention_flops(attention, width, setup.prompt_length)
    if setup.use_cache:
        steps = setup.num_beams * (setup.new_tokens - 1)
        return flops + steps * linear_attention_flops(attention, width, 1, needed_only=True)
    lengths = range(setup.prompt_length + 1, end + 1)
    return flops + setup.num_beams * sum(linear_attention_flops(attention, width, length) for length in lengths)


def _sums_moved(config: ModelConfig, setup: DecodingSetup) -> int:
    """Count the fp32 elements of the sums of linear attention that one sequence writes, and reads in later steps."""
    assert config.decoder is not None
    blocks = count_blocks(config.decoder).items()
    sums = sum(times * linear_state_elements(block.attention, block.width) for block, times in blocks)
    return sums * (1 + 2 * setup.num_beams * (setup.new_tokens - 1)) if setup.use_cache else 0


def _block_weights_read(block: BlockConfig, rows: int) -> int:
    """Count the matrix weights of a block that a step over `rows` tokens reads; few tokens read only some experts."""
    return block_matrix_weights(block, _experts_read(block, rows))


def _experts_read(block: BlockConfig, rows: int) -> int | None:
    experts = block.feedforward.experts
    return min(experts.count, rows * experts.top_k) if experts else None


def _block_cache_traffic(block: BlockConfig, setup: DecodingSetup, source: int) -> int:
    """Count the elements of keys and values that a block writes and reads for one sequence."""
    positions = setup.positions + setup.keys_read(block.attention.cached_window)
    elements = positions * kv_elements_per_position(block.attention, block.width)
    if block.attention.kind == "linear" and setup.use_cache:
        elements = 0  # see `_sums_moved`
    if block.cross:
        written = source * (1 if setup.use_cache else setup.logit_positions)
        elements += (written + setup.logit_positions * source) * kv_elements_per_position(block.cross, block.width)
    return elements


def _elements_moved(config: ModelConfig, setup: DecodingSetup, shape: BatchShape) -> int:
    """Count the weights, keys and values that decoder and head read or write in all steps."""
    assert config.decoder is not None
    elements = setup.new_tokens * sum(linear.num_weights for linear in head_linears(config))
    for block, times in count_blocks(config.decoder).items():
        weights = _block_weights_read(block, shape.batch * setup.prompt_length)
        weights += (setup.new_tokens - 1) * _block_weights_read(block, _rows_per_step(setup, shape))
        elements += times * (weights + shape.batch * _block_cache_traffic(block, setup, shape.source))
    return elements


def _rows_per_step(setup: DecodingSetup, shape: BatchShape) -> int:
    """Return the number of tokens computed in the second step; without a cache, later steps compute more."""
    return shape.batch * setup.num_beams * (1 if setup.use_cache else setup.prompt_length + 1)


def _quantization_savings(config: ModelConfig, setup: DecodingSetup, shape: BatchShape, dtype: str) -> int:
    """Count how many fewer bytes of weights are read because the model is quantized."""
    head_weights = sum(linear.num_weights for linear in head_linears(config))
    savings = setup.new_tokens * (stored_bytes(head_weights, dtype) - head_bytes(config, dtype))
    passes = {  # for each stack, pairs of a number of steps and the rows in each of them
        "decoder": ((1, shape.batch * setup.prompt_length), (setup.new_tokens - 1, _rows_per_step(setup, shape))),
        "encoder": ((1, shape.batch * shape.source),),
    }
    for name, stack in config.stacks.items():
        for block, times in count_blocks(stack).items():
            for steps, rows in passes[name]:
                experts = _experts_read(block, rows)
                unquantized = stored_bytes(block_matrix_weights(block, experts), dtype)
                savings += steps * times * (unquantized - block_bytes(config, block, dtype, experts))
    return savings


def decoding_cost(
    config: ModelConfig | RecurrentConfig,
    *,
    prompt: int = 1,
    new: int,
    batch: int = 1,
    beams: int = 1,
    cached: bool = True,
    source: int | None = None,
    dtype: str = "bf16",
) -> DecodingCost:
    """Compute the cost of generating `new` tokens after a prompt of `prompt` tokens, for `batch` sequences.

    An encoder-decoder also reads `source` tokens.
    """
    if isinstance(config, RecurrentConfig) or config.decoder is None:
        raise InputError("an encoder or LSTM has no decoding cost; give a decoder-only or encoder-decoder Transformer")
    for name, value in (("prompt", prompt), ("new", new), ("beams", beams)):
        if value < 1:
            raise InputError(f"{name}={value} is too small; write 1 or more")
    if source is not None and config.encoder is None:
        raise InputError(f"source={source} is for an encoder-decoder, but this model is decoder-only; leave it out")
    length = prompt + new - 1
    shape = resolve_batch_shape(config, batch, *((source, length) if config.encoder else (length, None)))
    setup = DecodingSetup(prompt_length=prompt, new_tokens=new, num_beams=beams, use_cache=cached)
    flops = setup.logit_positions * matrix_flops(head_linears(config), 1)
    for block, times in count_blocks(config.decoder).items():
        flops += times * _block_flops(block, setup, shape.source)
    flops *= batch
    elements = _elements_moved(config, setup, shape)
    if config.encoder:
        flops += sum(stack_flops(config.encoder, batch, shape.source, 0).values())
        for block, times in count_blocks(config.encoder).items():
            elements += times * _block_weights_read(block, batch * shape.source)
    moved = stored_bytes(elements, dtype) + 4 * batch * _sums_moved(config, setup)
    if config.quantize:
        moved -= _quantization_savings(config, setup, shape, dtype)
    return DecodingCost(steps=new, positions=batch * setup.positions, flops=flops, bytes_moved=moved)
