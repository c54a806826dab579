"""Head pruning gives smaller weights, and the outputs of a model whose pruned heads are zero."""

import pytest
import torch

import monoblock as mb
from monoblock.config.presets import PRESETS
from monoblock.inspection.pruning import prune_heads

IDS = torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(5))


class ZeroHeads:
    """A tap that zeroes named heads."""

    def __init__(self, heads):
        self.heads = heads

    def wants(self, name):
        return False

    def __call__(self, name, tensor):
        for attention, pruned in self.heads.items():
            if name == f"{attention}.heads":
                tensor = tensor.index_fill(1, torch.tensor(pruned), 0.0)
        return tensor


def run_model(model, tap=None):
    family = model.config.family
    if family == "vision":
        size = model.config.input.image
        pixels = torch.linspace(-1, 1, 2 * 3 * size * size, dtype=torch.float64)
        return model(pixels.view(2, 3, size, size), tap=tap)
    return model(IDS[:, :11], IDS, tap=tap) if family == "encoder-decoder" else model(IDS, tap=tap)


def choose_heads(config):
    """Choose the first group of heads in every second attention."""
    heads = {}
    for name, stack in config.stacks.items():
        for layer, block in enumerate(stack.layers()):
            for kind in ("attention", "cross"):
                attention = getattr(block, kind)
                if attention is not None and attention.num_kv_heads > 1 and (layer + (kind == "cross")) % 2 == 0:
                    heads[f"{name}.{layer}.{kind}"] = list(range(attention.heads // attention.num_kv_heads))
    return heads


def is_prunable(name):
    stacks = mb.tiny(name).stacks.values()
    blocks = [block for stack in stacks for block in stack.layers()]
    tied = any(run_model.tied for stack in stacks for run_model in stack.pattern)  # layers share their weights
    return not tied and all(b.attention.num_kv_heads > 1 and b.attention.qk_norm_over != "width" for b in blocks)


@pytest.mark.parametrize("name", [name for name in PRESETS if is_prunable(name)])
def test_a_pruned_model_equals_one_whose_pruned_heads_are_zero(name):
    torch.manual_seed(3)
    model = mb.Transformer(mb.tiny(name)).double().eval()
    heads = choose_heads(model.config)
    smaller = prune_heads(model, heads)
    torch.testing.assert_close(run_model(smaller), run_model(model, ZeroHeads(heads)), rtol=0, atol=1e-10)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    assert mb.account(smaller.config).parameters == sum(p.numel() for p in smaller.parameters())
    assert mb.ModelConfig.from_json(smaller.config.to_json()) == smaller.config


def test_pruning_twice_equals_pruning_once():
    torch.manual_seed(3)
    model = mb.Transformer(mb.vary(mb.tiny("bloom-560m"), heads=6, head_dim=7)).double().eval()
    once = prune_heads(model, {"decoder.1.attention": [0, 2, 5]})
    twice = prune_heads(prune_heads(model, {"decoder.1.attention": [2]}), {"decoder.1.attention": [0, 4]})
    torch.testing.assert_close(run_model(once), run_model(twice), rtol=0, atol=0)
    assert once.config == twice.config


@pytest.mark.parametrize(
    ("name", "heads", "message"),
    [
        ("gpt2", {"decoder.7.attention": [0]}, "no attention layer 'decoder.7.attention'; did you mean"),
        ("gpt2", {"decoder.0.attention": [3]}, "has heads 0 to 2"),
        ("gpt2", {"decoder.0.attention": [0, 1, 2]}, "keep at least one"),
        ("llama3-8b", {"decoder.0.attention": [0]}, r"prune such groups as a whole, for example heads \[0, 1, 2\]"),
        ("olmo2-7b", {"decoder.0.attention": [0]}, "across all heads"),
    ],
)
def test_heads_that_cannot_be_pruned_are_refused(name, heads, message):
    with pytest.raises(mb.InputError, match=message):
        prune_heads(mb.Transformer(mb.tiny(name)), heads)
