"""Law: a cache of one shape, written in place, gives the logits of one that grows; so its passes can be replayed."""

import pytest
import torch
from support import T, close, has_both, is_decoder, presets, source, tokens, toy


@pytest.mark.parametrize("name", presets(is_decoder))
def test_a_fixed_cache_gives_the_logits_of_a_growing_one(name):
    model, ids = toy(name), tokens()
    memory = model.encode(source()) if has_both(model.config) else None

    def run(cache, part):
        return model(part, cache=cache) if memory is None else model.decode(part, memory, cache=cache)

    grown, fixed = (model.make_cache(len(ids), T + 5) for _ in range(2))
    for cache in (grown, fixed):
        run(cache, ids[:, :7])
        cache.advance(7)
    fixed.fix()
    held = fixed.lengths.data_ptr(), fixed.slots[0].keys.data_ptr()
    for place in range(7, T):
        close(*(run(cache, ids[:, place : place + 1]) for cache in (fixed, grown)))
        grown.advance(1)
        fixed.lengths.add_(1)
    assert held == (fixed.lengths.data_ptr(), fixed.slots[0].keys.data_ptr())
    fixed.loosen()
    assert torch.equal(fixed.lengths, grown.lengths)
    close(run(fixed, ids[:, :3]), run(grown, ids[:, :3]))
