"""A static cache, written in place, gives the logits of a dynamic one, so that its passes can be replayed."""

import pytest
import torch
from support import (
    T,
    assert_near,
    has_decoder,
    is_encoder_decoder,
    random_source,
    random_tokens,
    tiny_model,
    tiny_names,
)


@pytest.mark.parametrize("name", tiny_names(has_decoder))
def test_a_static_cache_gives_the_logits_of_a_dynamic_one(name):
    model, ids = tiny_model(name), random_tokens()
    memory = model.encode(random_source()) if is_encoder_decoder(model.config) else None

    def run(cache, ids_chunk):
        return model(ids_chunk, cache=cache) if memory is None else model.decode(ids_chunk, memory, cache=cache)

    dynamic, static = (model.make_cache(len(ids), T + 5) for _ in range(2))
    for cache in (dynamic, static):
        run(cache, ids[:, :7])
        cache.advance(7)
    static.make_static()
    addresses = static.lengths.data_ptr(), static.layers[0].keys.data_ptr()
    for index in range(7, T):
        assert_near(*(run(cache, ids[:, index : index + 1]) for cache in (static, dynamic)))
        dynamic.advance(1)
        static.lengths.add_(1)
    assert addresses == (static.lengths.data_ptr(), static.layers[0].keys.data_ptr())
    static.make_dynamic()
    assert torch.equal(static.lengths, dynamic.lengths)
    assert_near(run(static, ids[:, :3]), run(dynamic, ids[:, :3]))
