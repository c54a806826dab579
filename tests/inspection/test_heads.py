"""Statistics, scores, importance and ranking of heads, against sums written out and constructed heads."""

import math

import pytest
import torch
import torch.nn.functional as F

import monoblock as mb
from monoblock.inspection.head_scores import (
    _count_hits,
    head_statistics,
    repeated_token_scores,
    score_repeated_tokens,
    text_chance,
    text_scores,
)
from monoblock.inspection.pruning import (
    HeadGroup,
    HeadImportance,
    choose_heads,
    head_importance,
    prunable_layers,
    rank_heads,
)
from monoblock.runs.inspect import describe_best_heads

T = 7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return mb.Transformer(mb.gpt(vocab=61, width=36, depth=2, heads=3, context=46)).eval()


def constructed_heads():
    """Attention of five heads over T tokens, in both directions: previous, next, first, own, uniform."""
    heads = torch.zeros(1, 5, T, T)
    for query in range(T):
        heads[0, 0, query, max(0, query - 1)] = 1
        heads[0, 1, query, min(T - 1, query + 1)] = 1
        heads[0, 2, query, 0] = 1
        heads[0, 3, query, query] = 1
    heads[0, 4] = 1 / T
    return heads


def test_constructed_heads_are_recognized():
    rows = head_statistics({"encoder.0.attention.weights": constructed_heads()})
    assert [row.fixed_token for row in rows] == ["previous", "next", "first", "own", ""]
    assert [row.scope for row in rows] == ["local", "local", "global", "local", "global"]
    uniform = rows[4]
    assert uniform.entropy == pytest.approx(math.log(T)) == pytest.approx(uniform.max_entropy)
    assert uniform.distance == pytest.approx(uniform.uniform_distance) == pytest.approx((T * T - 1) / (3 * T))
    assert uniform.first == pytest.approx(1 / T)
    assert (rows[0].entropy, rows[0].previous, rows[0].own) == pytest.approx((0, (T - 1) / T, 1 / T))
    assert rows[2].distance == pytest.approx((T - 1) / 2)


def test_statistics_of_a_causal_model_equal_sums_written_out(model):
    ids = torch.randint(61, (2, T))
    seen = mb.trace(model, ids, names="*.attention.weights")
    row = next(row for row in head_statistics(seen) if (row.layer, row.head) == ("decoder.1.attention", 2))
    weights = seen["decoder.1.attention.weights"][:, 2].double()
    queries = [(b, q) for b in range(2) for q in range(1, T)]  # the first query has one visible key

    def mean(function):
        return sum(function(weights[b, q], q) for b, q in queries) / len(queries)

    assert row.distance == pytest.approx(float(mean(lambda w, q: sum(w[k] * (q - k) for k in range(q + 1)))))
    assert row.entropy == pytest.approx(float(mean(lambda w, q: -sum(w[k] * w[k].log() for k in range(q + 1)))))
    assert row.max_entropy == pytest.approx(mean(lambda w, q: math.log(q + 1)))
    assert row.previous == pytest.approx(float(mean(lambda w, q: w[q - 1])))
    assert row.next == 0


def test_special_tokens_do_not_count_for_the_distance():
    weights = torch.zeros(1, 2, T, T)
    weights[0, 0, :, 0] = 0.9
    weights[0, 1] = 1 / T
    for query in range(T):
        weights[0, 0, query, max(1, query - 1)] += 0.1
    special = torch.arange(T)[None] == 0
    with_special, without = (head_statistics({"a.weights": weights}, special=mask)[0] for mask in (None, special))
    assert with_special.scope == "global"
    assert without.scope == "local"


def test_scores_on_repeated_tokens_equal_those_of_a_trace(model):
    rows = repeated_token_scores(model, length=5, batch=2, seed=1)
    half = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(1))
    seen = mb.trace(model, torch.cat((half, half), 1), names="*.attention.weights")
    row = next(row for row in rows if (row.layer, row.head) == ("decoder.1.attention", 1))
    weights = seen["decoder.1.attention.weights"][:, 1]

    def mean(offset):
        return float(sum(weights[b, q, q + offset] for b in range(2) for q in range(6, 10)) / 8)

    assert (row.induction, row.duplicate, row.previous) == pytest.approx((mean(-4), mean(-5), mean(-1)), abs=1e-6)


def test_positional_and_rare_token_hits_of_constructed_heads():
    heads = constructed_heads()[0]
    rare = torch.zeros(1, T, T)
    rare[..., 4] = 1
    hits = _count_hits(torch.cat((heads, rare)), torch.tensor([9.0, 8, 7, 6, 1, 5, 4]))
    assert hits[0].tolist() == [T - 2, 0, 1]  # token 4 is the one before token 5
    assert hits[1].tolist() == [0, T - 2, 1]
    assert hits[5].tolist() == [1, 1, T - 2]


def test_text_scores_are_shares(model):
    rows = text_scores(model, [[1, 2, 3, 4, 2, 1], [5, 2, 1, 2]])
    assert len(rows) == 6
    assert all(0 <= row.positional <= 1 and 0 <= row.rare <= 1 for row in rows)
    with pytest.raises(mb.InputError, match="too short"):
        text_scores(model, [[1, 2]])


def test_the_level_of_chance_is_that_of_weights_on_random_keys(model):
    rows, level = score_repeated_tokens(model, length=5, batch=2, seed=1)
    assert rows == repeated_token_scores(model, length=5, batch=2, seed=1)
    uniform = sum(1 / (query + 1) for query in range(6, 10)) / 4
    assert uniform < level < 1.1 * uniform  # a fresh model attends almost evenly
    level = text_chance(model, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert 1 / 9 < level["positional"] < 0.9
    assert level["rare"] == 1  # every token occurs once, so that each is the rarest


def test_scores_at_the_level_of_chance_name_no_head():
    rows = [
        {"layer": "decoder.0.attention", "head": 0, "induction": 0.0151, "previous": 0.31},
        {"layer": "decoder.0.attention", "head": 1, "induction": 0.0149, "previous": 0.02},
    ]
    words = describe_best_heads(rows, {"induction": 0.0150, "previous": 0.02})
    assert words.startswith("Highest: previous: decoder.0.attention head 0 (31.0%; chance 2.0%). No head is above ")
    assert "No head is above chance in induction (1.5%; chance 1.5%)." in words
    assert "Highest" not in describe_best_heads(rows, {"induction": 0.0150})


# -- importance -----------------------------------------------------------------------------------------------------


def batch_loss(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def test_importance_by_gradient_is_that_of_a_gate_on_each_head(model):
    """∂loss/∂gate of a gate that multiplies the output of a head, by a finite difference in fp64."""
    wide = mb.Transformer(model.config).double().eval()
    wide.load_state_dict(model.state_dict())
    batches = [torch.randint(61, (1, 11)) for _ in range(2)]
    rows = head_importance(wide, batches, batch_loss)
    assert [(row.layer, row.head) for row in rows[2:4]] == [("decoder.0.attention", 2), ("decoder.1.attention", 0)]
    name, step = "decoder.0.attention.heads", 1e-5

    def gated(ids, gate):
        seen = mb.trace(wide, ids, names=name)[name]
        edit = mb.patch(name, {name: seen * gate}, heads=[2])
        logits = mb.trace(wide, ids, names=(), edits=edit).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    expected = sum(abs(gated(ids, 1 + step) - gated(ids, 1 - step)) / (2 * step) for ids in batches) / 2
    assert rows[2].importance == pytest.approx(float(expected), rel=1e-5)


def test_importance_by_ablation_is_the_change_of_the_loss(model):
    batches = [torch.randint(61, (2, 11))]
    rows = head_importance(model, batches, batch_loss, method="ablation")
    with torch.no_grad():
        before = batch_loss(model, batches[0])
    logits = mb.trace(model, batches[0], names=(), edits=mb.ablate("decoder.1.attention.heads", heads=[1])).logits
    after = F.cross_entropy(logits[:, :-1].flatten(0, 1), batches[0][:, 1:].flatten(), reduction="sum")
    assert rows[4].importance == pytest.approx(float(after - before), abs=1e-3)
    with pytest.raises(mb.InputError, match="no batch"):
        head_importance(model, [], batch_loss)


def test_ranking_respects_groups_and_keeps_a_head_in_every_layer():
    config = mb.tiny("llama3-8b")  # 6 heads in 2 groups
    rows = [HeadImportance(f"decoder.{n}.attention", head, (n + 1) * (head + 1)) for n in range(2) for head in range(6)]
    sizes = prunable_layers(config)
    ranking = rank_heads(sizes, rows)
    assert [group.heads for group in ranking[:2]] == [(0, 1, 2)] * 2
    assert ranking[0].importance == pytest.approx(ranking[1].importance)  # a factor of a whole layer does not count
    measured = rank_heads(sizes, rows, normalize=False)
    assert [group.importance for group in measured[:2]] == [1 + 2 + 3, 2 * (1 + 2 + 3)]  # a change of the loss does
    assert choose_heads(ranking, 3) == {"decoder.0.attention": [0, 1, 2]}
    with pytest.raises(mb.InputError, match="at most 6 can be removed, not 7"):
        choose_heads(ranking, 7)
    with pytest.raises(mb.InputError, match="3 heads share keys and values"):
        choose_heads(ranking, 4)
    assert choose_heads(ranking, 4, exact=False) == choose_heads(ranking, 3)
    with pytest.raises(mb.InputError, match="no layer matches 'encoder"):
        prunable_layers(config, "encoder.*")


def test_the_least_important_head_is_kept_if_it_is_the_last_of_its_layer():
    groups = [
        HeadGroup("a", (0,), 0.1),
        HeadGroup("a", (1,), 0.2),
        HeadGroup("b", (0,), 0.3),
        HeadGroup("b", (1,), 0.4),
    ]
    assert choose_heads(groups, 2) == {"a": [0], "b": [0]}
