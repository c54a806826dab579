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
from monoblock.nn.masks import arange_positions, causal, everything
from monoblock.nn.norm import layer_norm
from monoblock.nn.positions import alibi_slopes, apply_rotary, rotary_angles, sinusoid


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


def copy_losses(positions, offset, seed):
    """Train a one-layer decoder to copy the token `offset` places back in texts of 16 tokens.

    Return its loss on the last four of 16, 32, 64 and 128 tokens.
    """
    torch.manual_seed(seed)
    config = mb.llama(vocab=12, width=32, depth=1, heads=2, hidden=64, context=128, positions=positions)
    model = mb.Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        ids = torch.randint(12, (32, 16))
        loss = F.cross_entropy(model(ids)[:, offset:].flatten(0, 1), ids[:, :-offset].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = torch.randint(12, (256, 128))
    logits = model.eval()(ids).detach()
    return {
        length: float(
            F.cross_entropy(
                logits[:, length - 4 : length].flatten(0, 1),
                ids[:, length - 4 - offset : length - offset].flatten(),
            )
        )
        for length in (16, 32, 64, 128)
    }


def test_rotary_positions_fail_at_four_times_the_length_that_was_trained():
    losses = copy_losses("rotary", offset=5, seed=1)
    assert losses[16] < 0.1
    assert min(losses[64], losses[128]) > math.log(12)  # worse than chance


def test_sinusoids_fail_at_twice_the_length_that_was_trained():
    losses = copy_losses("sinusoid", offset=5, seed=1)
    assert losses[16] < 0.1
    assert losses[32] > math.log(12)


@pytest.mark.slow
def test_over_seeds_and_offsets_sinusoids_fail_at_twice_the_length_and_rotary_positions_at_four_times_it():
    runs = {
        positions: [copy_losses(positions, offset, seed) for offset in (2, 5, 8) for seed in range(4)]
        for positions in ("rotary", "sinusoid")
    }
    assert all(losses[16] < 0.1 for both in runs.values() for losses in both)
    assert min(losses[32] for losses in runs["sinusoid"]) > math.log(12)
    twice = [losses[32] for losses in runs["rotary"]]
    assert min(twice) < 0.1  # sometimes still right at twice the length
    assert max(twice) > math.log(12)
    for length in (64, 128):
        losses = [run[length] for run in runs["rotary"]]
        assert min(losses) > 1.0
        assert sum(loss > 0.95 * math.log(12) for loss in losses) >= 10  # no better than chance in 10 of 12


def test_an_encoder_layer_of_pytorch_is_the_pre_norm_block_only_if_told_so():
    torch.manual_seed(0)
    options = {"d_model": 512, "nhead": 8, "dim_feedforward": 2048, "dropout": 0.0, "batch_first": True}
    default = nn.TransformerEncoderLayer(**options).eval()
    assert not default.norm_first
    assert default.activation is F.relu
    told = nn.TransformerEncoderLayer(**options, norm_first=True, activation="gelu").eval()
    told.load_state_dict(default.state_dict())
    # The block of the document: x + attention(norm(x)), then x + mlp(norm(x)) with GELU.
    x = torch.randn(2, 11, 512)
    h = told.norm1(x)
    block = x + told.self_attn(h, h, h, need_weights=False)[0]
    block = block + told.linear2(F.gelu(told.linear1(told.norm2(block))))
    assert (told(x) - block).abs().max() < 1e-4
    assert (default(x) - block).abs().max() > 0.3


@pytest.mark.filterwarnings("ignore")
def test_transformers_decodes_greedily_at_a_temperature_unless_told_to_sample():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=12, n_layer=1, n_head=3)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids, options = torch.tensor([[3, 5, 7]]), {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, temperature=0.8, **options), greedy)
    assert not torch.equal(model.generate(ids, temperature=0.8, do_sample=True, **options), greedy)


def test_few_models_scale_their_embedding_by_the_root_of_the_width():
    scaled = {
        name
        for name, preset in mb.PRESETS.items()
        if isinstance(preset.config.input, mb.EmbeddingConfig) and preset.config.input.scale == "sqrt_width"
    }
    assert scaled >= {"vaswani-base", "gemma2-2b"}
    assert not scaled & {"gpt2", "bert-base", "llama-7b", "t5-base", "bart-base"}
    assert len(scaled) < len(mb.PRESETS) / 4


def test_a_causal_mask_hides_padding_on_the_right_and_only_the_source_needs_a_mask():
    torch.manual_seed(0)
    model = mb.Transformer(mb.vaswani(vocab=61, width=24, depth=2, heads=3)).double().eval()
    source, target = torch.randint(1, 61, (1, 7)), torch.randint(1, 61, (1, 5))
    alone = model(source, target)
    padded_target, padded_source = F.pad(target, (0, 3)), F.pad(source, (0, 3))
    torch.testing.assert_close(model(source, padded_target)[:, :5], alone)  # no mask of the target is given
    assert (model(padded_source, target) - alone).abs().max() > 1e-3
    mask = F.pad(torch.ones(1, 7), (0, 3)).bool()
    torch.testing.assert_close(model(padded_source, target, source_mask=mask), alone)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("norm", "least", "most"), [("layer", 0.5, 2.1), ("none", 0.008, 0.02)])
def test_gradients_vanish_without_residuals_only_if_there_are_no_norms_either(norm, least, most, seed):
    torch.manual_seed(seed)
    knobs = {"init": "xavier", "residual": "none", "norm": norm, "norm_place": "post"}  # as in the tutorial
    model = mb.Transformer(mb.gpt(vocab=61, width=64, depth=6, heads=4, context=32, **knobs))
    ids = torch.randint(61, (4, 32))
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    norms = [
        math.sqrt(sum(float(weight.grad.square().sum()) for weight in block.parameters()))
        for block in model.decoder.blocks
    ]
    assert least < norms[0] / norms[-1] < most


def test_scores_overflow_in_fp16_but_a_softmax_does_not():
    scores = torch.tensor([6e4, 5e4, -6e4], dtype=torch.float16)
    assert torch.equal(scores.softmax(-1), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float16))
    q = torch.full((1, 64), 40.0, dtype=torch.float16)
    assert (q @ q.mT).isinf().all()  # 64 · 40² = 102,400 > 65,504
    assert torch.cat((q @ q.mT, q @ q.mT), 1).softmax(-1).isnan().all()


def test_adamw_has_another_second_beta_by_default():
    assert inspect.signature(torch.optim.AdamW).parameters["betas"].default == (0.9, 0.999)


def test_modern_decoders_place_their_norms_in_three_ways():
    places = {name: {block.norm_place for block in preset.config.decoder.layers()} for name, preset in DECODERS.items()}
    assert places["gpt2"] == places["llama-7b"] == {"pre"}
    assert places["gemma2-2b"] == places["gemma3-1b"] == {"sandwich"}
    assert places["olmo2-7b"] == {"output"}


DECODERS = {name: preset for name, preset in mb.PRESETS.items() if preset.config.family == "decoder-only"}


def feedforward_share(name):
    account = mb.account(name)
    own = sum(count for part, count in account.components.items() if part.endswith("feedforward"))
    return own / account.parameters


def test_the_feed_forward_layers_are_the_majority_of_large_models_only():
    assert round(100 * feedforward_share("vaswani-base"), 1) == 39.9  # the model that the chapter describes
    assert round(100 * feedforward_share("gpt2"), 1) == 45.5
    assert feedforward_share("gpt3-175b") > 0.66


def test_no_one_vocabulary_gives_both_65_and_213_million_parameters():
    base, big = mb.account("vaswani-base"), mb.account("vaswani-big")
    assert (base.parameters, big.parameters) == (63_082_496, 214_245_376)
    sizes = {}
    for account, published in ((base, 65e6), (big, 213e6)):
        width = account.config.width
        sizes[width] = (published - account.parameters) / width + account.config.input.vocab
    assert {width: round(size, -2) for width, size in sizes.items()} == {512: 40_700, 1024: 35_800}


def test_80_layers_are_those_of_llama_2_70b():
    assert (mb.preset("llama-7b").depth, mb.preset("llama2-70b").depth) == (32, 80)


def test_mqa_saves_as_many_times_as_there_are_heads():
    def saving(name, kv_heads):
        every_head = mb.vary(mb.preset(name), kv_heads=None)
        fewer = mb.vary(mb.preset(name), kv_heads=kv_heads)
        sizes = {"length": 1024, "dtype": "fp16"}
        return mb.account(every_head).kv_cache_bytes(**sizes) / mb.account(fewer).kv_cache_bytes(**sizes)

    assert saving("llama2-70b", 8) == 8  # grouped
    assert saving("llama2-70b", 1) == 64
    assert saving("gpt2", 1) == 12


def test_twice_the_width_is_about_three_times_the_parameters_of_the_course():
    narrow, wide = (mb.gpt(vocab=50_000, width=width, depth=12, heads=8, context=2048) for width in (512, 1024))
    assert round(mb.account(wide).parameters / mb.account(narrow).parameters, 1) == 3.2
    blocks = [mb.account(config).components["decoder.feedforward"] for config in (narrow, wide)]
    assert 3.99 < blocks[1] / blocks[0] < 4


def test_the_positional_encoding_as_listed_is_inexact_in_single_precision():
    position = torch.arange(5000).unsqueeze(1).float()
    term = torch.exp(torch.arange(0, 512, 2).float() * (-math.log(10000.0) / 512))
    listed = torch.stack(((position * term).sin(), (position * term).cos()), -1).flatten(1)
    angles = torch.arange(5000).double()[:, None] / 10_000 ** (torch.arange(0, 512, 2).double() / 512)
    exact = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
    error = (listed - exact).abs().amax(1)
    assert int((error > 1e-5).nonzero()[0]) == 156
    assert 3e-4 < float(error.max()) < 5e-4
    assert (sinusoid(torch.arange(5000), 512, Sinusoid()) - exact).abs().max() < 1e-7


def test_the_softmax_of_the_output_runs_over_the_vocabulary():
    torch.manual_seed(0)
    probabilities = torch.randn(2, 5, 7).softmax(-1)  # (B, T, V)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 5))
    assert (probabilities.sum(1) - 1).abs().max() > 0.1


def test_attention_weights_are_normalized_over_the_annotations_of_one_step():
    torch.manual_seed(0)
    scores = torch.randn(5, 3).double()  # of annotation i at step j
    weights = scores.exp() / scores.exp().sum(0, keepdim=True)  # sum over k of exp(α_kj)
    torch.testing.assert_close(weights.sum(0), torch.ones(3).double())
    as_printed = scores.exp() / (5 * scores.exp()[1])  # the sum over i of exp(α_kj), in which i does not occur
    assert (as_printed.sum(0) - 1).abs().max() > 0.1


def test_the_heads_are_mixed_by_an_output_projection():
    torch.manual_seed(0)
    model = mb.Transformer(mb.gpt(vocab=61, width=24, depth=1, heads=3, context=17)).eval()
    seen = mb.trace(model, torch.randint(61, (1, 7)), names="decoder.0.attention.*")
    concatenated = seen["decoder.0.attention.heads"].transpose(1, 2).flatten(2)
    projection = model.decoder.blocks[0].attention.output
    torch.testing.assert_close(seen["decoder.0.attention.output"], projection(concatenated))
    assert (seen["decoder.0.attention.output"] - concatenated).abs().max() > 1e-3


def test_the_tables_of_the_greedy_example_do_not_all_sum_to_one():
    tables = ([0.5, 0.4, 0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], [0.1, 0.4, 0.2, 0.1, 0.0, 0.0])
    assert [round(sum(table), 10) for table in tables] == [0.9, 1.0, 0.8]


def test_feed_forward_layers_are_equivariant_too():
    torch.manual_seed(2)
    x, order = torch.randn(1, 5, 4), torch.tensor([3, 1, 4, 0, 2])
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.testing.assert_close(network(x[:, order]), network(x)[:, order])
    assert (network(x[:, order]) - network(x)).abs().max() > 1e-2


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
