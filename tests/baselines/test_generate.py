"""An LSTM decodes from its state as a Transformer does from its cache: greedy, beam search, batches."""

import itertools

import pytest
import torch

import monoblock as mb
from monoblock.baselines.generate import Decoder
from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import RecurrentConfig
from monoblock.errors import InputError
from monoblock.inference.settings import Settings

VOCAB, START = 7, 1
SOURCES = [(3, 5), (2, 4, 6, 5, 3), (6,), (5, 5, 2)]


def build(kind, **options):
    torch.manual_seed(3)
    model = Recurrent(RecurrentConfig(kind=kind, vocab=VOCAB, width=11, depth=2, **options)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (1.5 if weight.dim() > 1 else 0.5))
    return model


@pytest.fixture(scope="module")
def translator():
    return build("encoder_decoder")


@pytest.fixture(scope="module")
def language_model():
    return build("language_model")


def decode(model, requests, settings, **options):
    """For each request a list of (tokens, score), one for each returned sequence."""
    engine = Decoder(model if isinstance(model, list) else [model], **options)
    request_ids = [engine.add(ids, settings, source) for ids, source in requests]
    tokens, scores = {}, {}
    while engine.busy:
        for output in engine.step():
            key = output.request_id, output.sequence_index
            tokens[key], scores[key] = [*tokens.get(key, ()), *output.tokens], output.score
    keys = [[(request_id, index) for index in range(settings.num_return_sequences)] for request_id in request_ids]
    return [[(tokens[key], scores[key]) for key in row] for row in keys]


@torch.no_grad()
def greedy(model, source, count, eos_tokens=()):
    ids = torch.tensor([[START]])
    for _ in range(count):
        logits = model(torch.tensor([source]), ids)
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        if ids[0, -1].item() in eos_tokens:
            break
    return ids[0, 1:].tolist()


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_greedy_equals_a_full_pass_at_every_step(translator, rows):
    settings = Settings(max_new_tokens=9, eos_token_id=2)
    decoded = decode(translator, [((START,), source) for source in SOURCES], settings, max_rows=rows)
    expected = [greedy(translator, source, 9, eos_tokens=(2,)) for source in SOURCES]
    assert [sequences[0][0] for sequences in decoded] == expected


@torch.no_grad()
def test_enough_beams_find_the_most_probable_of_all_texts(translator):
    settings = Settings(max_new_tokens=3, num_beams=VOCAB**2, num_return_sequences=3)
    decoded = decode(translator, [((START,), source) for source in SOURCES], settings, max_rows=200)
    targets = torch.tensor(list(itertools.product(range(VOCAB), repeat=3)))
    inputs = torch.cat((torch.full((len(targets), 1), START), targets[:, :-1]), 1)
    for source, sequences in zip(SOURCES, decoded, strict=True):
        log_probs = translator(torch.tensor([source]).expand(len(targets), -1), inputs).log_softmax(-1)
        best = (log_probs.gather(-1, targets[..., None]).sum((1, 2)) / 3).topk(3)
        assert [tokens for tokens, _ in sequences] == targets[best.indices].tolist()
        assert [score for _, score in sequences] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_other_requests_change_no_beam(translator):
    settings = Settings(max_new_tokens=8, num_beams=3, num_return_sequences=2, eos_token_id=2)
    requests = [((START,), source) for source in SOURCES * 3]
    alone = [decode(translator, [request], settings)[0] for request in requests]
    for rows in (6, 9, 64):
        together = decode(translator, requests, settings, max_rows=rows)
        for sequences, expected in zip(together, alone, strict=True):
            assert [tokens for tokens, _ in sequences] == [tokens for tokens, _ in expected]


@torch.no_grad()
def test_a_language_model_decodes_prompts_of_different_lengths(language_model):
    prompts = [(3,), (2, 5, 6, 1), (4, 4)]
    decoded = decode(language_model, [(prompt, None) for prompt in prompts], Settings(max_new_tokens=6))
    for prompt, sequences in zip(prompts, decoded, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(6):
            ids = torch.cat((ids, language_model(ids)[:, -1:].argmax(-1)), 1)
        assert sequences[0][0] == ids[0, len(prompt) :].tolist()


def test_what_an_lstm_does_not_support_is_an_error(translator, language_model):
    with pytest.raises(InputError, match="needs a source"):
        Decoder([translator]).add((1,), Settings())
    with pytest.raises(InputError, match="no encoder"):
        Decoder([language_model]).add((1,), Settings(), source=(2,))
    with pytest.raises(InputError, match="cannot take back rejected tokens"):
        Decoder([language_model]).add((1,), Settings(draft="8-bit"))
    with pytest.raises(InputError, match="Engine takes a Transformer"):
        mb.Engine(language_model)
    with pytest.raises(InputError, match="optimize takes a Transformer"):
        mb.optimize(language_model)


# -- ensembles with a Transformer --------------------------------------------------------------------------------------


def transformer(kind="vaswani", vocab=VOCAB):
    torch.manual_seed(5)
    model = getattr(mb, kind)(vocab=vocab, width=16, depth=1, heads=2, context=12)
    return mb.Transformer(model).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("first", ["lstm", "transformer"])
def test_a_transformer_and_an_lstm_decode_together(translator, first):
    models = [translator, transformer()] if first == "lstm" else [transformer(), translator]
    decoded = decode(models, [((START,), source) for source in SOURCES], Settings(max_new_tokens=7, eos_token_id=2))
    for source, sequences in zip(SOURCES, decoded, strict=True):
        tokens = sequences[0][0]
        inputs = torch.tensor([source]), torch.tensor([[START, *tokens[:-1]]])
        log_probs = torch.stack([model(*inputs).log_softmax(-1)[0] for model in models]).mean(0)
        assert log_probs.argmax(-1).tolist() == tokens
        assert len(tokens) == 7 or tokens[-1] == 2


def test_an_ensemble_ends_at_the_context_of_its_transformer(language_model):
    models, texts = [language_model, transformer("gpt")], [((3,), None), ((2, 5, 6, 1), None)]
    lengths = [len(row[0][0]) for row in decode(models, texts, Settings(max_new_tokens=40))]
    assert lengths == [11, 8]
    with pytest.raises(InputError, match="leaves no room for new tokens in a context of 12 tokens"):
        Decoder(models).add(range(12), Settings())
    with pytest.raises(InputError, match="model 2 of the ensemble has a vocabulary of 9 tokens and the first 7"):
        Decoder([language_model, transformer("gpt", vocab=9)])


def test_an_ensemble_of_copies_decodes_as_its_model(translator):
    settings, requests = Settings(max_new_tokens=6, num_beams=3, eos_token_id=2), [((START,), s) for s in SOURCES]
    copies, single = (decode(models, requests, settings) for models in ([translator] * 3, [translator]))
    assert [row[0][0] for row in copies] == [row[0][0] for row in single]
    assert [row[0][1] for row in copies] == pytest.approx([row[0][1] for row in single], abs=1e-5)
