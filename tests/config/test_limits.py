"""Sizes that no model has are refused with one line, before anything of that size is allocated or walked through."""

import json
import time
from dataclasses import replace

import pytest
import torch

import monoblock as mb
from monoblock.config.model import Learned, ModelConfig, Repeat, StackConfig
from monoblock.config.parts import MAX_CONTEXT
from monoblock.config.presets import PRESETS
from monoblock.errors import ConfigError
from monoblock.interop.huggingface.load import config_from_hf
from monoblock.runs.recipe import build_model_config, parse_recipe

SIZES = {"vocab": 31, "width": 24, "depth": 2, "heads": 3}
LLAMA_4_CONTEXT = 10_485_760


@pytest.mark.parametrize("size", [2**30, 2**62, 2**64, 10**4000], ids=["2**30", "2**62", "2**64", "10**4000"])
@pytest.mark.parametrize("name", ["vocab", "width", "depth", "heads", "context"])
@pytest.mark.parametrize("family", [mb.gpt, mb.bert, mb.t5], ids=["gpt", "bert", "t5"])
def test_a_size_beyond_every_model_is_one_line(family, name, size):
    start = time.perf_counter()
    with pytest.raises(ConfigError) as problem:
        family(**{**SIZES, "context": 23, name: size})
    assert len(str(problem.value)) < 300
    assert "\n" not in str(problem.value)
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize("preset", ["gpt2", "llama2-70b", "bert-base", "t5-small", "vit-b16"])
def test_vary_refuses_it_too(preset):
    config = PRESETS[preset].config
    with pytest.raises(ConfigError, match=r"(width|hidden)=\d+ is too large; write \d+ or less|does not divide"):
        mb.vary(config, width=2**30)
    if preset != "vit-b16":  # its context follows from the image
        with pytest.raises(ConfigError, match=r"context=1073741824 is too large; write \d+ or less"):
            mb.vary(config, context=2**30)


def numbers(tree, path=()):
    """The paths of all whole numbers in nested dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if isinstance(value, int) and not isinstance(value, bool):
            yield (*path, key)
        yield from numbers(value, (*path, key))


@pytest.mark.parametrize("preset", ["gpt2", "xlm-roberta-base", "t5-small", "vit-b16", "mixtral-8x7b", "llama2-70b"])
def test_no_number_of_a_configuration_can_be_huge(preset):
    """Seeds of random blocks and groups of integers aside, every whole number is a size."""
    config = PRESETS[preset].config
    paths = [path for path in numbers(config.to_dict()) if path[-1] not in ("random_seed", "scale", "residual_scale")]
    assert len(paths) > 5
    for path in paths:
        for size in (2**40, 10**400):
            tree = json.loads(config.to_json())
            inner = tree
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = size
            with pytest.raises(ConfigError) as problem:
                ModelConfig.from_dict(tree)
            assert len(str(problem.value)) < 300, path


def test_many_repetitions_of_many_blocks_are_counted_not_walked_through():
    block = mb.gpt(**SIZES, context=23).decoder.pattern[0].blocks[0]
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="a stack of 100000000 blocks is too deep; write 100000 or less"):
        StackConfig(pattern=(Repeat(blocks=(block,), times=100_000),) * 1000)
    assert time.perf_counter() - start < 60


def test_a_recipe_and_a_config_json_are_refused():
    tables = {"model": {"family": "llama", **SIZES, "kv_heads": 3, "hidden": 40, "context": 2**30}}
    recipe = parse_recipe({"name": "x", "data": {"corpus": "text.txt"}, **tables}, [])
    with pytest.raises(ConfigError, match=r"context=1073741824 is too large; write 67108864 or less"):
        build_model_config(recipe, 31, None)
    fields = {"model_type": "llama", "vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 2**30}
    with pytest.raises(ValueError, match=r"^[^\n]*1073741824[^\n]*$"):
        config_from_hf(fields)


def test_published_sizes_pass_and_nothing_is_allocated_for_a_declared_context():
    """Llama 4 declares ten million positions; the tables follow what is asked."""
    learned = replace(mb.gpt(**SIZES, context=16_384).input, positions=Learned(offset=2))
    assert learned.context == 16_384
    for context in (LLAMA_4_CONTEXT, MAX_CONTEXT):
        config = mb.llama(**SIZES, kv_heads=3, hidden=40, context=context)
        with _LargestTensor() as largest:
            model = mb.Transformer(config).eval()
            out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
            engine = mb.Engine(model)
            engine.add((1, 2, 3), mb.Settings(max_new_tokens=4))
            while engine.busy:
                engine.step()
        assert out.shape == (1, 7)
        assert largest.numel < 1_000_000


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // max(1, tensor.element_size()))
        return out
