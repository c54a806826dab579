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
    count_visible_keys,
    feedforward_flops,
    linear_attention_flops,
    matrix_flops,
    pair_flops,
    resolve_batch_shape,
    stack_flops,
)
from monoblock.accounting.memory import kv_elements_per_position, linear_state_elements, matrix_bytes, stored_bytes
from monoblock.accounting.parameters import (
    attention_linears,
    block_linears,
    count_blocks,
    head_linears,
    router_linear,
)
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
    attention, width = block.attention, block.width
    flops = matrix_flops(attention_linears(attention, width), setup.positions) + feedforward_flops(
        block, setup.positions
    )
    if attention.kind != "linear":
        flops += setup.attention_pairs(attention.cached_window) * pair_flops(attention, width)
    else:
        flops += linear_attention_flops(attention, width, setup.prompt_length)
        if setup.use_cache:  # a step updates the sums
            steps = setup.num_beams * (setup.new_tokens - 1)
            flops += steps * linear_attention_flops(attention, width, 1, needed_only=True)
        else:
            lengths = range(setup.prompt_length + 1, setup.prompt_length + setup.new_tokens)
            flops += setup.num_beams * sum(linear_attention_flops(attention, width, length) for length in lengths)
    if block.cross:
        query, key, value, output = attention_linears(block.cross, width)
        source_passes = 1 if setup.use_cache else setup.logit_positions
        flops += matrix_flops((query, output), setup.positions) + matrix_flops((key, value), source_passes * source)
        flops += setup.positions * source * pair_flops(block.cross, width)
    return flops


def _cache_bytes(block: BlockConfig, setup: DecodingSetup, source: int, dtype: str) -> int:
    """Return the bytes of keys, values and sums of linear attention that a block writes and reads for one sequence."""
    attention, width, elements, sums = block.attention, block.width, 0, 0
    if attention.kind == "linear" and setup.use_cache:  # the prompt writes the sums, each later step reads and writes
        sums = linear_state_elements(attention, width) * (1 + 2 * setup.num_beams * (setup.new_tokens - 1))
    else:
        positions = setup.positions + setup.keys_read(attention.cached_window)
        elements = positions * kv_elements_per_position(attention, width)
    if block.cross:
        written = source * (1 if setup.use_cache else setup.logit_positions)
        elements += (written + setup.logit_positions * source) * kv_elements_per_position(block.cross, width)
    return stored_bytes(elements, dtype) + 4 * sums


def _weight_bytes_read(config: ModelConfig, block: BlockConfig, rows: int, dtype: str) -> int:
    """Return the bytes of a block's matrices that a step over `rows` tokens reads; few tokens read only some experts.

    The router is not quantized.
    """
    experts, router = block.feedforward.experts, router_linear(block.feedforward, block.width)
    count = min(experts.count, rows * experts.top_k) if experts else None
    router_bytes = stored_bytes(router.num_weights, dtype) if router else 0
    return matrix_bytes(config, block_linears(block, count), dtype) + router_bytes


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
    flops = batch * setup.logit_positions * matrix_flops(head_linears(config), 1)
    moved = new * matrix_bytes(config, head_linears(config), dtype)
    rows = batch * beams * (1 if cached else prompt + 1)  # in the second step; without a cache, later ones compute more
    for block, times in count_blocks(config.decoder).items():
        flops += times * batch * _block_flops(block, setup, shape.source)
        weights = _weight_bytes_read(config, block, batch * prompt, dtype)
        weights += (new - 1) * _weight_bytes_read(config, block, rows, dtype)
        moved += times * (weights + batch * _cache_bytes(block, setup, shape.source, dtype))
    if config.encoder:
        flops += sum(stack_flops(config.encoder, batch, shape.source, 0).values())
        for block, times in count_blocks(config.encoder).items():
            moved += times * _weight_bytes_read(config, block, batch * shape.source, dtype)
    return DecodingCost(steps=new, positions=batch * setup.positions, flops=flops, bytes_moved=moved)
