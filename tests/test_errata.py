"""Mistakes of the source documents in the mathematics (docs/errata.md); counts are in test_source_documents.py."""

import inspect
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoblock as mb
from monoblock.classic.module13 import create_causal_mask
from monoblock.config.model import Alibi, Learned, Rotary, Sinusoid
from monoblock.nn.attention import attend
from monoblock.nn.masks import causal, everything
from monoblock.nn.norm import layer_norm
from monoblock.nn.positions import alibi_slopes, apply_rotary, rotary_angles, sinusoid
from monoblock.nn.token_positions import arange_positions


def decoder_without_positions(depth, **knobs):
    torch.manual_seed(depth)
    config = mb.gpt(vocab=23, width=12, depth=depth, heads=3, context=17, positions="none", std=0.4, **knobs)
    return mb.Transformer(config).double().eval()


def test_a_decoder_trained_without_a_mask_sees_the_answer():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(12, 3, 20, dropout=0.0, batch_first=True).double()
    target, memory = torch.randn(1, 5, 12).double(), torch.randn(1, 7, 12).double()
    changed = target.clone()
    changed[:, -1] += 1.0
    assert (layer(target, memory)[:, 0] - layer(changed, memory)[:, 0]).abs().max() > 1e-3
    model = mb.Transformer(mb.vaswani(vocab=23, width=12, depth=2, heads=3)).eval()
    source, ids = torch.tensor([[3, 5, 7]]), torch.tensor([[2, 4, 6, 8]])
    other = torch.tensor([[2, 4, 6, 9]])
    assert torch.equal(model(source, ids)[:, :3], model(source, other)[:, :3])


def test_label_smoothing_spreads_over_all_classes_the_target_included():
    logits, target, epsilon = torch.tensor([[2.0, -1.0, 1.5, 0.0, 1.0]]).double(), torch.tensor([2]), 0.1
    loss = F.cross_entropy(logits, target, label_smoothing=epsilon)
    expected = torch.full((1, 5), epsilon / 5).double()
    expected[0, 2] += 1 - epsilon
    torch.testing.assert_close(loss, -(expected * logits.log_softmax(-1)).sum())
    others = torch.full((1, 5), epsilon / 4).double()
    others[0, 2] = 1 - epsilon
    assert abs(loss + (others * logits.log_softmax(-1)).sum()) > 1e-3


def test_a_fresh_classifier_says_nothing_about_the_text():
    ids, predictions = torch.tensor([[3, 5, 7, 11]]), set()
    for seed in range(12):
        torch.manual_seed(seed)
        config = mb.bert(vocab=23, width=12, depth=2, heads=3, context=16, head="classifier", classes=2)
        predictions.add(int(mb.Transformer(config).eval()(ids).argmax()))
    assert predictions == {0, 1}


def test_a_token_sees_itself():
    assert causal.dense(arange_positions(5), arange_positions(5))[0, 0].diagonal().all()


def test_the_best_sequence_of_the_greedy_example_has_probability_016():
    first = {"w1": 0.5, "w2": 0.4}
    second = {"w1": [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], "w2": [0.1, 0.4, 0.2, 0.1, 0.0, 0.0]}
    greedy = 0.5 * max(second["w1"])
    best = max(first[word] * p for word in first for p in second[word])
    assert (round(greedy, 10), round(best, 10)) == (0.15, 0.16)


def test_sinusoid_exponents_start_at_zero():
    positions = torch.arange(9)
    torch.testing.assert_close(sinusoid(positions, 8, Sinusoid())[:, 0], positions.float().sin())


def test_layer_norm_divides_by_the_root_of_variance_plus_epsilon():
    x = torch.tensor([[0.001, -0.002, 0.003]]).double()
    centred = x - x.mean()
    variance = centred.square().mean()
    torch.testing.assert_close(layer_norm(x, eps=1e-5), centred / (variance + 1e-5).sqrt())
    assert (layer_norm(x, eps=1e-5) - centred / (variance.sqrt() + 1e-5)).abs().max() > 0.1


def test_byte_pair_encoding_has_a_three_way_tie_and_the_library_takes_de():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = ["BADD", "FAD", "FEEDE", "ADDEEF"]
    merged = [word.replace("AD", "1") for word in words]
    pairs = Counter(pair for word in merged for pair in itertools.pairwise(word))
    assert {pair for pair, count in pairs.items() if count == 2} == {("1", "D"), ("E", "E"), ("D", "E")}
    assert max(pairs.values()) == 2
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(words)], trainers.BpeTrainer(vocab_size=7, show_progress=False))
    assert sorted(token for token in tokenizer.get_vocab() if len(token) > 1) == ["AD", "DE"]


def test_attention_is_not_linear_in_its_input():
    torch.manual_seed(1)
    x, y = torch.randn(2, 1, 1, 5, 4).double()
    joint = attend(x + y, x + y, x + y)
    assert (joint - attend(x, x, x) - attend(y, y, y)).abs().max() > 0.1
    weights = torch.randn(5, 5).double().softmax(-1)  # linear for fixed weights
    torch.testing.assert_close(weights @ (x + y), weights @ x + weights @ y)


def test_the_walk_through_sums_to_7736():
    scores = torch.tensor([1.0, 0.0, 2.0, 1.0]).double() / math.sqrt(3)
    assert round(float(scores.exp().sum()), 3) == 7.736
    assert [round(w, 3) for w in scores.softmax(-1).tolist()] == [0.230, 0.129, 0.410, 0.230]


def test_attention_without_a_mask_is_equivariant_not_invariant():
    torch.manual_seed(2)
    x, order = torch.randn(1, 1, 5, 4).double(), torch.tensor([3, 1, 4, 0, 2])
    out, permuted = attend(x, x, x), attend(x[:, :, order], x[:, :, order], x[:, :, order])
    torch.testing.assert_close(permuted, out[:, :, order])
    assert (permuted - out).abs().max() > 0.1


@pytest.mark.parametrize(("depth", "notices"), [(1, False), (2, True)])
def test_with_a_causal_mask_two_layers_without_positions_tell_an_order(depth, notices):
    ids, swapped = torch.tensor([[3, 5, 7, 11]]), torch.tensor([[5, 3, 7, 11]])
    model = decoder_without_positions(depth)
    difference = (model(ids)[:, -1] - model(swapped)[:, -1]).abs().max()
    assert bool(difference > 1e-6) is notices


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_alibi_slopes_end_at_two_to_the_minus_eight(heads):
    slopes = alibi_slopes(heads, Alibi())
    assert slopes == [2.0 ** (-8 * k / heads) for k in range(1, heads + 1)]
    assert slopes[-1] == 2.0**-8


def test_the_residual_stream_grows_with_pre_norm_and_not_with_post_norm():
    sizes = {}
    for norm_place in ("pre", "post"):
        torch.manual_seed(4)
        config = mb.gpt(vocab=23, width=32, depth=16, heads=4, context=17, norm_place=norm_place, init="xavier")
        model = mb.Transformer(config).eval()
        traced = mb.trace(model, torch.arange(2, 15)[None], names="decoder.*.output")
        sizes[norm_place] = [float(traced[f"decoder.{n}.output"].square().mean().sqrt()) for n in range(16)]
    assert sizes["pre"][-1] > 2 * sizes["pre"][0]
    assert max(sizes["post"]) < 1.1 * min(sizes["post"])
    assert model.decoder.norm is None


@pytest.mark.parametrize(("depth", "matters"), [(1, False), (2, True)])
def test_a_mask_matters_when_a_whole_prefix_is_processed(depth, matters):
    model = decoder_without_positions(depth)
    ids = torch.tensor([[3, 5, 7, 11]])
    masked = model(ids)[:, -1]
    model.decoder.masks = [everything for _ in model.decoder.masks]
    difference = (model(ids)[:, -1] - masked).abs().max()
    assert bool(difference > 1e-6) is matters


def test_similarity_of_sinusoids_depends_exactly_on_distance():
    encodings = sinusoid(torch.arange(256), 128, Sinusoid()).double()
    similarity = F.cosine_similarity(encodings[:, None], encodings[None], dim=-1)
    for distance in (1, 7, 100):
        assert similarity.diagonal(distance).std() < 1e-6


def test_rotary_scores_are_equal_only_for_the_same_query_and_key():
    torch.manual_seed(6)
    q, k, other = torch.randn(3, 1, 1, 1, 8).double()

    def score(query, key, m, n):
        angles = [rotary_angles(Rotary(), 8, torch.tensor([[position]]), torch.float64) for position in (m, n)]
        return float((apply_rotary(query, angles[0]) * apply_rotary(key, angles[1])).sum())

    assert abs(score(q, k, 5, 12) - score(q, k, 10, 17)) < 1e-5
    assert abs(score(q, k, 5, 12) - score(q, other, 10, 17)) > 1e-2


def test_bert_learns_its_positions_and_bloom_and_mpt_use_alibi():
    assert isinstance(mb.preset("bert-base").input.positions, Learned)
    for name in ("bloom-560m", "mpt-7b"):
        assert all(isinstance(block.attention.positions, Alibi) for block in mb.preset(name).decoder.layers())


def test_multihead_attention_takes_embed_dim():
    names = inspect.signature(nn.MultiheadAttention.__init__).parameters
    assert "embed_dim" in names
    assert "d_model" not in names


def test_a_deviation_outside_autograd_cuts_the_gradient():
    x = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64, requires_grad=True)

    def gradient(y):
        return torch.autograd.grad((y * torch.tensor([1.0, -2.0, 0.5])).sum(), x)[0]

    centred = x - x.mean()
    detached = centred / (centred.square().mean() + 1e-5).detach().sqrt()
    assert torch.autograd.gradcheck(lambda t: layer_norm(t), x)
    assert (gradient(detached) - gradient(layer_norm(x))).abs().max() > 1e-2


def test_the_class_token_comes_first():
    from tokenizers import Tokenizer, models, processors

    bert = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "word": 3}, unk_token="[UNK]"))
    bert.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    assert bert.encode("word").tokens == ["[CLS]", "word", "[SEP]"]
    ours = mb.Tokenizer.train("wordpiece", ["a b c d"], 64, specials="masked_lm")
    assert ours.special_tokens_template(1)[0][0] == ours.id("<cls>")
    assert mb.preset("bert-base").head.pooling == "first"


def test_the_causal_mask_of_what_may_be_seen_is_lower_triangular():
    mask = create_causal_mask(4)[0]
    assert torch.equal(mask, mask.tril())
    assert torch.equal(mask.bool(), causal.dense(arange_positions(4), arange_positions(4))[0, 0])
    scores = torch.zeros(4, 4).masked_fill(mask == 0, -math.inf)  # what is upper triangular is what is added to scores
    assert torch.equal(scores.isinf(), torch.ones(4, 4).triu(1).bool())


def test_the_first_llama_has_a_gated_feed_forward_layer_with_silu():
    layers = mb.preset("llama-7b").decoder.layers()
    assert {(block.feedforward.gated, block.feedforward.activation) for block in layers} == {(True, "silu")}


def test_rotary_positions_fail_beyond_the_length_that_was_trained():
    """Copy the token five places back: perfect up to the 16 positions of training, worse than chance at 32 and 128."""
    torch.manual_seed(0)
    config = mb.llama(vocab=12, width=32, depth=1, heads=2, hidden=64, context=128)
    model = mb.Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        ids = torch.randint(12, (32, 16))
        loss = F.cross_entropy(model(ids)[:, 5:].flatten(0, 1), ids[:, :-5].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = torch.randint(12, (64, 128))
    logits = model.eval()(ids)
    losses = {position: F.cross_entropy(logits[:, position], ids[:, position - 5]) for position in (10, 15, 31, 127)}
    assert losses[10] < 0.1
    assert losses[15] < 0.1
    assert losses[31] > math.log(12)
    assert losses[127] > math.log(12)


def reversal_accuracy(length, *, attention):
    """Train an LSTM encoder-decoder to reverse strings of eight symbols, and return its accuracy by symbol."""
    torch.manual_seed(0)
    config = mb.RecurrentConfig(kind="encoder_decoder", vocab=9, width=48, depth=1, attention=attention)
    model = mb.Recurrent(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def batch(rows):
        source = torch.randint(1, 9, (rows, length))
        return source, F.pad(source.flip(1)[:, :-1], (1, 0)), source.flip(1)

    for _ in range(130):
        source, inputs, reversed_source = batch(32)
        loss = F.cross_entropy(model(source, inputs).flatten(0, 1), reversed_source.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source, inputs, reversed_source = batch(200)
    return float((model.eval()(source, inputs).argmax(-1) == reversed_source).float().mean())


@pytest.mark.slow
def test_an_lstm_reverses_short_strings_and_with_attention_longer_ones():
    assert reversal_accuracy(3, attention=False) > 0.97
    assert reversal_accuracy(8, attention=False) < 0.9
    assert reversal_accuracy(8, attention=True) > 0.95


def test_batch_norm_has_one_mean_for_each_feature_not_for_each_position():
    batch = nn.BatchNorm1d(768)
    batch(torch.randn(3, 768, 10))
    assert batch.running_mean.shape == batch.running_var.shape == (768,)
    x = torch.randn(3, 10, 768)
    assert x.mean(-1).shape == (3, 10)  # the statistics of layer norm
