"""The logit lens, norms by depth, probes, position tables and coreference."""

import math

import pytest
import torch

import monoblock as mb
from monoblock.inspection.head_scores import PAIRS, CoreferencePair, find_coreference_head, find_word
from monoblock.inspection.position_tables import position_tables
from monoblock.inspection.probing import LabelledText, layer_features, probe_layers
from monoblock.inspection.residual_stream import gradient_norms, logit_lens, residual_norms

IDS = torch.randint(1, 61, (1, 13), generator=torch.Generator().manual_seed(5))


def build(name, **changes):
    torch.manual_seed(3)
    return mb.Transformer(mb.vary(mb.tiny(name), **changes) if changes else mb.tiny(name)).eval()


def inputs_of(model):
    return (IDS[:, :11], IDS) if model.config.family == "encoder-decoder" else (IDS,)


@pytest.mark.parametrize("name", ["gpt2", "t5-small", "llama3-8b", "gemma2-2b"])
def test_the_last_layer_of_the_lens_is_the_model_and_the_first_layers_are_truncated_models(name):
    model = build(name)
    layers = logit_lens(model, *inputs_of(model), top=3)
    with torch.no_grad():
        logits = model(*inputs_of(model))[0]
    stack = model.config.decoder
    assert len(layers) == len(list(stack.layers())) + 1
    assert torch.equal(layers[-1].tokens[0, :, 0], logits.argmax(-1))
    assert (layers[-1].final_rank == 1).all()
    first = mb.trace(model, *inputs_of(model), names="decoder.0.output")["decoder.0.output"]
    last = f"decoder.{len(layers) - 2}.output"
    early = mb.trace(model, *inputs_of(model), edits=mb.patch(last, {last: first}))
    assert torch.equal(layers[1].tokens[0, :, 0], early.logits[0].argmax(-1))


def test_the_lens_of_several_rows_is_that_of_each_row():
    model = build("gpt2")
    ids = torch.randint(1, 61, (3, 7), generator=torch.Generator().manual_seed(5))
    together = logit_lens(model, ids, top=2)
    for row in range(3):
        for of_all, of_one in zip(together, logit_lens(model, ids[row : row + 1], top=2), strict=True):
            assert of_all.tokens.shape == (3, 7, 2)
            assert torch.equal(of_all.tokens[row], of_one.tokens[0])
            assert torch.equal(of_all.final_rank[row], of_one.final_rank[0])
            torch.testing.assert_close(of_all.probabilities[row], of_one.probabilities[0], rtol=0, atol=2e-5)


def test_the_lens_needs_a_head_over_tokens():
    with pytest.raises(mb.InputError, match="needs a model that predicts tokens"):
        logit_lens(build("vit-b16"), torch.zeros(1, 3, 12, 12))


def test_norms_are_those_of_the_trace_and_gradients_those_of_autograd():
    model = build("gpt2")
    (norms,) = gradient_norms(model, IDS)
    seen = mb.trace(model, IDS, names="*")
    assert norms.residual[1] == pytest.approx(float(seen["decoder.0.output"].norm(dim=-1).mean()))
    assert norms.updates["attention"][1] == pytest.approx(float(seen["decoder.1.attention.output"].norm(dim=-1).mean()))
    assert residual_norms(model, IDS)[0].residual == pytest.approx(norms.residual)
    logits = model(IDS)
    torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:]).backward()
    block = model.decoder.blocks[0]
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in block.parameters()))
    assert norms.weight_gradients[0] == pytest.approx(expected, rel=1e-4)
    assert all(value > 0 for value in norms.gradients)


@pytest.mark.parametrize("name", ["bert-base", "t5-small", "vit-b16"])
def test_every_family_has_norms(name):
    model = build(name)
    inputs = (torch.linspace(-1, 1, 432).view(1, 3, 12, 12),) if name == "vit-b16" else inputs_of(model)
    rows = gradient_norms(model, *inputs)
    assert [row.stack for row in rows] == list(model.config.stacks)
    assert all(value > 0 for row in rows for value in row.gradients)


# -- probes ---------------------------------------------------------------------------------------------------------


def test_a_probe_reads_what_is_there_and_the_control_task_does_not():
    """The label of a token is the parity of its id.

    In the control task every token is a type of its own, so that its random labels cannot be learned.
    """
    model = build("gpt2", depth=1)
    generator = torch.Generator().manual_seed(2)
    texts = []
    for number in range(60):
        ids = torch.randint(1, 61, (9,), generator=generator).tolist()
        texts.append(
            LabelledText(
                ids, [[n] for n in range(9)], [token % 2 for token in ids], [f"{number}.{n}" for n in range(9)]
            )
        )
    report = probe_layers(model, texts)
    assert [layer.name for layer in report.layers] == ["input", "layer 0"]
    assert report.layers[0].accuracy > 0.9
    assert report.layers[0].control_accuracy < 0.65
    assert report.layers[0].selectivity == report.layers[0].accuracy - report.layers[0].control_accuracy
    assert (report.num_train, report.num_test) == (42 * 9, 18 * 9)
    with pytest.raises(mb.InputError, match="too few"):
        probe_layers(model, texts[:2])


def test_the_features_of_a_probe_are_means_over_tokens():
    model = build("bert-base")
    features = layer_features(model, [LabelledText(IDS[0].tolist(), [[2, 3], [5]], [0, 1], ["a", "b"])])
    seen = mb.trace(model, IDS, names="encoder.1.output")["encoder.1.output"][0]
    torch.testing.assert_close(features["layer 1"], torch.stack((seen[2:4].mean(0), seen[5])))


# -- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt2", ["learned"]),
        ("vaswani-base", ["sinusoid"]),
        ("llama3-8b", ["rotary"]),
        ("bloom-560m", ["alibi"]),
        ("t5-small", ["buckets", "buckets"]),
        ("vit-b16", ["learned"]),
    ],
)
def test_every_scheme_has_a_table(name, kinds):
    model = build(name)
    tables = position_tables(model, 9)
    assert [table.kind for table in tables] == kinds
    for table in tables:
        assert (table.vectors is None) == (table.bias is not None)
        if table.bias is not None:
            assert table.bias.shape[1] == len(table.offsets)


def test_the_bias_of_alibi_is_slope_times_distance():
    (table,) = position_tables(build("bloom-560m"), 5)
    assert table.offsets.tolist() == [-4, -3, -2, -1, 0]
    slope = -table.bias[0, 3]
    torch.testing.assert_close(table.bias[0], -slope * torch.tensor([4.0, 3, 2, 1, 0]))


# -- coreference ----------------------------------------------------------------------------------------------------


def test_there_are_twenty_pairs_with_nouns_in_the_sentence():
    assert len(PAIRS) == 20
    for pair in PAIRS:
        assert pair.sentence.count("{}") == 1
        for noun in (pair.first_noun, pair.second_noun):
            assert f" {noun} " in pair.sentence


def test_the_best_head_of_a_random_encoder_is_scored_and_its_misses_are_listed():
    tokenizer = mb.Tokenizer.train("wordpiece", [pair.sentence for pair in PAIRS] * 3, 300)
    torch.manual_seed(3)
    model = mb.Transformer(mb.bert(vocab=300, width=24, depth=2, heads=3, context=64)).eval()
    pairs = (PAIRS[0], CoreferencePair("The cat saw the dog because it was {}.", "cat", "dog", "near", "big"))
    result = find_coreference_head(model, tokenizer, tokenizer.encode, pairs)
    assert result.num_heads == 6
    assert len(result.rows) == 4
    assert len(result.misses) == round(4 * (1 - result.score))
    assert 0.5 <= result.chance <= 1
    assert result.rows[0].referent == result.rows[1].other == "animal"
    with pytest.raises(mb.InputError, match="in an encoder"):
        find_coreference_head(build("gpt2"), tokenizer, tokenizer.encode)


def test_a_word_of_several_tokens_is_found():
    tokenizer = mb.Tokenizer.train("wordpiece", ["the suitcase is big", "a suit", "it"] * 9, 60)
    ids = tokenizer.encode("the suitcase")
    places = find_word(tokenizer, ids, "suitcase")
    assert places == list(range(1, len(ids)))
    assert find_word(tokenizer, ids, "suit") == []


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0], "has 1 labelled text, too few"), (range(12), "no label of the texts that are held out")],
)
def test_a_probe_refuses_labels_that_it_cannot_learn(labels, message):
    texts = [LabelledText([5, 6, 7], [[0, 1, 2]], [label], [str(label)]) for label in labels]
    with pytest.raises(mb.InputError, match=message):
        probe_layers(build("gpt2"), texts)
