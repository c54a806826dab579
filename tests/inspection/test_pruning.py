"""Head pruning gives smaller weights, and the outputs of a model whose pruned heads are zero."""

import pytest
import torch

import monoblock as mb
from monoblock.config.presets import PRESETS
from monoblock.inspection.pruning import attention_layers, prune_heads, prune_in_rounds

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


# -- several rounds -------------------------------------------------------------------------------------------------


def build_model_with_equal_heads():
    """Build a layer of four heads: 0 and 1 are equal, and together larger than 2 and 3."""
    torch.manual_seed(3)
    model = mb.Transformer(mb.gpt(vocab=61, width=32, depth=1, heads=4, context=23)).double().eval()
    attention = model.get_submodule("decoder.0.attention")
    with torch.no_grad():
        for linear in (attention.query, attention.key, attention.value):
            linear.weight[8:16] = linear.weight[:8]
            linear.bias[8:16] = linear.bias[:8]
        columns = torch.linalg.qr(attention.output.weight)[0]
        columns[:, 8:16] = columns[:, :8]
        columns[:, 16:] *= 1.35  # more than one of the equal heads, less than both
        attention.output.weight.copy_(columns)
    return model


def squared_distance(reference):
    return lambda model, ids: (model(ids) - reference).square().sum()


def test_of_two_equal_heads_the_second_is_kept_once_the_first_is_removed():
    model = build_model_with_equal_heads()
    loss = squared_distance(run_model(model).detach())
    once = prune_in_rounds(model, [IDS], loss, 2, rounds=1, method="ablation")
    assert once.removed == {"decoder.0.attention": [0, 1]}
    twice = prune_in_rounds(model, [IDS], loss, 2, method="ablation")
    assert (once.num_rounds, twice.num_rounds) == (1, 2)
    first, second = twice.removed["decoder.0.attention"]
    assert first in (0, 1)
    assert second in (2, 3)
    assert [group.heads for group in twice.ranking[:2]] == [(first,), (second,)]
    assert sorted(group.heads[0] for group in twice.ranking) == [0, 1, 2, 3]
    losses = [loss(result.model, IDS).item() for result in (once, twice)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("name", "count", "rounds"), [("gpt2", 4, None), ("gpt2", 3, 2), ("llama3-8b", 6, None)])
def test_heads_removed_in_rounds_have_their_original_numbers(name, count, rounds):
    torch.manual_seed(3)
    model = mb.Transformer(mb.tiny(name)).double().eval()
    result = prune_in_rounds(model, [IDS[:1], IDS[1:]], squared_distance(0), count, rounds=rounds)
    assert result.num_rounds == 2 if name == "llama3-8b" or rounds else count  # 3 heads share keys and values
    assert sum(map(len, result.removed.values())) == count
    torch.testing.assert_close(run_model(result.model), run_model(model, ZeroHeads(result.removed)), rtol=0, atol=1e-10)
    assert mb.account(result.model.config).parameters == sum(p.numel() for p in result.model.parameters())
    ranked = [(group.layer, head) for group in result.ranking for head in group.heads]
    heads = {layer: range(config.heads) for layer, config in attention_layers(model.config).items()}
    assert sorted(ranked) == [(layer, head) for layer in heads for head in heads[layer]]
    assert sorted(ranked[:count]) == [
        (layer, head) for layer in sorted(result.removed) for head in result.removed[layer]
    ]


def test_a_count_that_cannot_be_removed_is_refused_before_anything_is_measured():
    model = mb.Transformer(mb.tiny("llama3-8b"))

    def fail(model, ids):
        raise AssertionError

    for options, message in (
        ({"count": 99}, "at most \\d+ can be removed, not 99"),
        ({"count": 4}, "3 heads share"),
        ({"rounds": 0}, "0 rounds"),
    ):
        with pytest.raises(mb.InputError, match=message):
            prune_in_rounds(model, [IDS], fail, **{"count": 3} | options)
