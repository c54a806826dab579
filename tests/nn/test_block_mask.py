"""Block masks that are built from tiles equal those that FlexAttention builds by evaluating the mask."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from monoblock.config.model import AttentionConfig
from monoblock.nn.masks import TokenPositions, arange_positions, mask_from_config
from monoblock.nn.sparse_attention import RECOMPILE_LIMIT, build_from_tiles, compile_once

CONFIGS = {
    "causal": {},
    "window": {"window": 128},
    "odd window": {"window": 200},
    "both sides": {"window": 300, "mask": "full"},
    "global": {"window": 128, "global_tokens": True},
    "random": {"window": 128, "global_tokens": True, "random_blocks": 2},
}


def flex_blocks(resolved, batch):
    mask = resolved.mask.to_mask_mod(resolved.q, resolved.k)
    q, k = resolved.q.length, resolved.k.length
    return create_block_mask(mask, batch if batch > 1 else None, None, q, k, device="cpu").to_dense().bool()


@pytest.mark.parametrize("length", [1024, 1111])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_blocks_are_those_of_flex_attention(name, length):
    config = AttentionConfig(heads=2, **CONFIGS[name])
    tokens = arange_positions(length)
    if config.global_tokens:
        flags = torch.zeros(1, length, dtype=torch.bool)
        flags[0, 0] = True
        tokens = TokenPositions(tokens.positions, prefix_or_global=flags)
    resolved = mask_from_config(config).resolve(tokens, tokens)
    block_mask = build_from_tiles(resolved)
    blocks, expected = block_mask.to_dense().bool(), flex_blocks(resolved, 1)
    assert (blocks | ~expected).all(), "a block with visible tokens is missing"
    if name != "random":
        assert torch.equal(blocks, expected), "a block is computed in vain"
    assert block_mask.seq_lengths == (length, length)


def test_rows_with_padding_have_their_own_blocks():
    length, lengths = 600, torch.tensor([600, 140, 333])
    valid = torch.arange(length) < lengths[:, None]
    tokens = TokenPositions(torch.arange(length)[None], valid=valid)
    resolved = mask_from_config(AttentionConfig(heads=1, window=100)).resolve(tokens, tokens)
    blocks, expected = build_from_tiles(resolved).to_dense().bool(), flex_blocks(resolved, 3)
    assert (blocks | ~expected).all()
    assert blocks.shape == expected.shape
    assert not blocks[1, 0, :, 2:].any(), "no block of padding only"


@pytest.mark.parametrize(("limit", "expected"), [(8, RECOMPILE_LIMIT), (1000, 1000)])
def test_many_masks_stay_compiled(limit, expected, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with torch._dynamo.config.patch(recompile_limit=limit):
        compile_once(lambda x: x + 1)
        assert torch._dynamo.config.recompile_limit == expected
    compile_once.cache_clear()
