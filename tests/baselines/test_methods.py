"""An LSTM, with or without attention, has the methods of a Transformer: generate, stream, save_pretrained, …"""

import itertools

import pytest
import torch
from torch.testing import assert_close

import monoblock as mb
from monoblock.accounting.lstm import parameter_count

VOCAB, TARGET_VOCAB, START, WIDTH = 7, 13, 1, 11
SOURCES = torch.tensor([[3, 5, 2, 6, 4], [2, 4, 6, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def build(kind="encoder_decoder", **options):
    options = ({"target_vocab": TARGET_VOCAB} if kind == "encoder_decoder" else {}) | options
    torch.manual_seed(3)
    model = mb.Recurrent(mb.RecurrentConfig(kind=kind, vocab=VOCAB, width=WIDTH, depth=2, **options)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (1.5 if weight.dim() > 1 else 0.5))
    return model


@pytest.fixture(params=[True, False], ids=["attention", "no attention"])
def translator(request):
    return build(attention=request.param)


@pytest.fixture
def language_model():
    return build("language_model")


@torch.no_grad()
def greedy(model, source, count):
    """Run the whole target again for every token."""
    ids = torch.tensor([[START]])
    for _ in range(count):
        ids = torch.cat((ids, model(source, ids)[:, -1:].argmax(-1)), 1)
    return ids


# -- without attention -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_without_attention_every_step_reads_the_same_summary_of_the_source():
    """The definition of Cho et al. 2014, step by step with torch's cells, in fp64."""
    model, target = build(attention=False), torch.tensor([[1, 9, 4], [1, 2, 12]])
    D = WIDTH
    for row, length in enumerate(MASK.sum(1)):
        annotations, _ = model.encoder(model.input(SOURCES[row : row + 1, :length]))
        context = torch.cat([annotations[0, -1, :D], annotations[0, 0, D:]])
        first = torch.tanh(model.start(context[D:])).view(2, D)
        states = [(first[layer], torch.zeros(D, dtype=torch.float64)) for layer in range(2)]
        for step, token in enumerate(target[row]):
            x = model.target(token)
            layer_input = torch.cat([x, context])
            for layer, cell in enumerate(model.decoder):
                states[layer] = cell(layer_input, states[layer])
                layer_input = states[layer][0]
            maxout = model.readout(torch.cat([layer_input, context, x])).view(D, 2).amax(-1)
            logits = model(SOURCES, target, MASK)[row, step]
            assert_close(logits, model.target.weight @ maxout + model.bias, rtol=0, atol=1e-12)


def test_without_attention_there_are_no_attention_weights_to_train_or_to_trace():
    with_attention, without = build().config, build(attention=False).config
    assert parameter_count(with_attention) - parameter_count(without) == 3 * WIDTH**2 + WIDTH
    model = build(attention=False)
    assert parameter_count(without) == sum(weight.numel() for weight in model.parameters())
    assert "attention" not in " ".join(name for name, _ in model.named_parameters())
    flops = [mb.account(config).flops(batch=2, length=5).components for config in (with_attention, without)]
    removed = {"decoder.attention.projections", "decoder.attention.scores"}
    assert {name: count for name, count in flops[0].items() if name not in removed} == flops[1]
    with pytest.raises(mb.InputError, match=r"no activation matches attention\.weights"):
        mb.trace(model, SOURCES, SOURCES, names="attention.weights")
    with pytest.raises(mb.ConfigError, match="attention=False has no meaning in a language model"):
        build("language_model", attention=False)


# -- generate and stream -----------------------------------------------------------------------------------------------


def test_generate_equals_a_full_pass_at_every_step(translator):
    new = translator.generate(SOURCES, attention_mask=MASK, max_new_tokens=6, decoder_start_token_id=START)
    expected = [greedy(translator, SOURCES[:1], 6), greedy(translator, SOURCES[1:, :3], 6)]
    assert torch.equal(new, torch.cat(expected))
    steps = torch.stack(list(translator.stream(SOURCES[:1], max_new_tokens=6, decoder_start_token_id=START)), 1)
    assert torch.equal(steps, expected[0][:, 1:])


@torch.no_grad()
def test_generate_returns_the_log_probability_of_each_new_token(translator, language_model):
    options = {"max_new_tokens": 4, "return_scores": True}
    ids, scores = translator.generate(SOURCES, attention_mask=MASK, decoder_start_token_id=START, **options)
    expected = translator(SOURCES, ids[:, :-1], MASK).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert_close(scores, expected.float(), rtol=0, atol=1e-5)
    ids, scores = language_model.generate(torch.tensor([[3, 2, 5]]), **options)
    expected = language_model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[:, 2:, 0]
    assert_close(scores, expected.float(), rtol=0, atol=1e-5)


@torch.no_grad()
def test_enough_beams_find_the_most_probable_target(translator):
    new = translator.generate(
        SOURCES[:1], max_new_tokens=2, num_beams=TARGET_VOCAB, num_return_sequences=3, decoder_start_token_id=START
    )
    targets = torch.tensor(list(itertools.product(range(TARGET_VOCAB), repeat=2)))
    inputs = torch.cat((torch.full((len(targets), 1), START), targets[:, :1]), 1)
    log_probs = translator(SOURCES[:1].expand(len(targets), -1), inputs).log_softmax(-1)
    best = log_probs.gather(-1, targets[..., None]).sum((1, 2)).topk(3).indices
    assert torch.equal(new[:, 1:], targets[best])


@torch.no_grad()
def test_a_language_model_continues_its_prompt(language_model):
    prompts = torch.tensor([[3, 2, 5], [4, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    new = language_model.generate(prompts, attention_mask=mask, max_new_tokens=5)[:, 3:]
    for row, length in enumerate((3, 1)):
        ids = prompts[row : row + 1, :length]
        for _ in range(5):
            ids = torch.cat((ids, language_model(ids)[:, -1:].argmax(-1)), 1)
        assert torch.equal(new[row], ids[0, length:])
    sampled = language_model.generate(prompts, temperature=1.0, seed=4, max_new_tokens=9)
    assert torch.equal(sampled, language_model.generate(prompts, temperature=1.0, seed=4, max_new_tokens=9))
    assert not torch.equal(sampled[:, 3:8], new)


@pytest.mark.parametrize("option", [{"draft": "8-bit"}, {"prompt_lookup": 2}, {"draft": None}, {"use_cache": False}])
def test_what_an_lstm_cannot_do_is_an_error(language_model, option):
    if option == {"draft": None}:
        option = {"draft": mb.Transformer(mb.gpt(vocab=VOCAB, width=8, depth=1, heads=2, context=9))}
    with pytest.raises(mb.InputError, match=r"an LSTM (cannot take back|always decodes from its state)"):
        language_model.generate(torch.tensor([[3, 2]]), **option)
    transformer = mb.Transformer(mb.gpt(vocab=VOCAB, width=8, depth=1, heads=2, context=9))
    with pytest.raises(mb.InputError, match="DraftModel takes a Transformer, but got a Recurrent"):
        transformer.generate(torch.tensor([[3, 2]]), draft=language_model)


# -- trace and taps ----------------------------------------------------------------------------------------------------


def test_trace_records_every_named_activation(language_model):
    traced = mb.trace(language_model, torch.tensor([[3, 2, 5]]))
    assert {name: tuple(tensor.shape) for name, tensor in traced.items()} == {
        "input.output": (1, 3, WIDTH),
        "decoder.output": (1, 3, WIDTH),
        "head.logits": (1, 3, VOCAB),
    }
    assert torch.equal(traced["head.logits"], traced.logits)
    traced = mb.trace(build(), SOURCES, torch.tensor([[1, 9, 4], [1, 2, 12]]), source_mask=MASK)
    assert {name: tuple(tensor.shape) for name, tensor in traced.items()} == {
        "input.output": (2, 5, WIDTH),
        "encoder.output": (2, 5, 2 * WIDTH),
        "target.output": (2, 3, WIDTH),
        "attention.weights": (2, 3, 5),
        "decoder.output": (2, 3, WIDTH),
        "head.logits": (2, 3, TARGET_VOCAB),
    }
    assert_close(traced["attention.weights"].sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_a_tap_replaces_activations_also_while_generating(language_model):
    def tap(name, tensor):
        return tensor.index_fill(-1, torch.tensor([5]), 1e9) if name == "head.logits" else tensor

    assert language_model.generate(torch.tensor([[3, 2]]), max_new_tokens=4, tap=tap)[0, 2:].tolist() == [5] * 4
    names = []
    build().generate(SOURCES, max_new_tokens=2, tap=lambda name, tensor: (names.append(name), tensor)[1])
    assert names.count("attention.weights") == 2


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["language_model", "encoder_decoder", "without attention"])
def test_a_folder_is_read_back_bit_for_bit(kind, tmp_path):
    model = build(attention=False) if kind == "without attention" else build(kind)
    model.save_pretrained(tmp_path, max_shard_size=5000)
    loaded = mb.Recurrent.from_pretrained(tmp_path, dtype="fp64")
    assert loaded.config == model.config
    assert not loaded.training
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    with pytest.raises(mb.FileError, match="a Transformer is built from a ModelConfig, not from RecurrentConfig"):
        mb.Transformer.from_pretrained(tmp_path)


def test_a_subclass_is_loaded_and_a_transformer_is_refused(tmp_path):
    class Own(mb.Recurrent):
        pass

    build().save_pretrained(tmp_path / "lstm")
    assert type(Own.from_pretrained(tmp_path / "lstm")) is Own
    mb.Transformer(mb.gpt(vocab=VOCAB, width=8, depth=1, heads=2, context=9)).save_pretrained(tmp_path / "gpt")
    with pytest.raises(mb.FileError, match="a Recurrent is built from a RecurrentConfig, not from ModelConfig"):
        mb.Recurrent.from_pretrained(tmp_path / "gpt")
