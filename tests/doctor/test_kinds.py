"""Models that are no plain decoder: encoders of transformers, recurrent and compiled models, functions of one token."""

import warnings

import pytest
import torch
from torch import nn

import monoblock as mb

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
VOCAB = 50


def build(name, config, **sizes):
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()


ENCODERS = {
    "BertGenerationEncoder": ("BertGenerationConfig", SIZES),
    "SplinterModel": ("SplinterConfig", SIZES),
    "SiglipTextModel": ("SiglipTextConfig", SIZES),
    "NomicBertModel": ("NomicBertConfig", SIZES),
    "DPRQuestionEncoder": ("DPRConfig", SIZES),
    "XLNetLMHeadModel": ("XLNetConfig", {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "Gemma3TextModel": (
        "Gemma3TextConfig",
        SIZES | {"num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True},
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_of_transformers_are_not_asked_to_be_causal(name):
    config, sizes = ENCODERS[name]
    report = mb.diagnose(build(name, config, **sizes))
    assert [finding.check for finding in report.findings] == []
    assert "causality" in {row.check for row in report.not_checked}


def test_a_language_model_whose_attention_is_not_causal_is_a_finding():
    model = build("LlamaForCausalLM", "LlamaConfig", **SIZES, attn_implementation="sdpa")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    assert [finding.check for finding in mb.diagnose(model, checks="causality").findings] == ["causality"]


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_question_answering_models_of_transformers_are_examined(family):
    report = mb.diagnose(build(f"{family}ForQuestionAnswering", f"{family}Config", **SIZES))
    assert report.findings == []


def test_a_recurrent_model_that_forgets_quickly_uses_positions():
    decay = 0.4  # of the state, from one token to the next: nothing is left of the first tokens at the end of the text
    rows = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(0))

    def model(ids):
        state, states = torch.zeros(len(ids), 16), []
        for token in ids.T:
            state = decay * state + rows[token]
            states.append(state)
        return torch.stack(states, 1) @ rows.T

    assert mb.diagnose(model, vocab=VOCAB, checks="positions").findings == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda ids: torch.zeros(*ids.shape, VOCAB), "the same for all tokens"),
        (lambda ids: torch.eye(VOCAB)[ids], "the token there only"),
        (lambda ids: torch.eye(VOCAB)[ids].cumsum(1), "swapped without any change"),
    ],
)
def test_the_reason_says_what_a_model_without_positions_reads(model, words):
    (finding,) = mb.diagnose(model, vocab=VOCAB, checks="positions").findings
    assert words in finding.reason
    assert (finding.evidence["difference_with_other_tokens"] > 0) == ("same" not in words)


def test_attention_to_padding_on_the_left_is_named():
    class Unmasked(nn.Module):
        """A decoder that is given a mask and positions, and uses the positions only."""

        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
            self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, VOCAB)

        def forward(self, ids, attention_mask=None):
            mask = torch.ones_like(ids) if attention_mask is None else attention_mask
            x = self.token(ids) + self.position((mask.cumsum(1) - 1).clamp(min=0))
            q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
            return self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])

    torch.manual_seed(0)
    (finding,) = mb.diagnose(Unmasked(), checks="padding").findings
    assert finding.reason.startswith("tokens attend to")


@pytest.mark.parametrize("how", ["attention", "recurrence"])
def test_padding_that_a_mask_should_hide_is_not_called_a_wrong_position(how):
    if how == "attention":
        model = build("LlamaForCausalLM", "LlamaConfig", **SIZES)
        forward = model.model.forward
        model.model.forward = lambda attention_mask, **options: forward(
            attention_mask=None if attention_mask is None else torch.ones_like(attention_mask), **options
        )
    else:
        model = build("RwkvForCausalLM", "RwkvConfig", **SIZES, context_length=64, attention_hidden_size=32)
    (finding,) = mb.diagnose(model, checks="padding").findings
    assert finding.reason.startswith("tokens attend to the padding" if how == "attention" else "the padding before")
    assert "cumsum" not in finding.fix


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_models_are_examined_without_compiling(how):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    model = mb.Transformer(mb.gpt(vocab=VOCAB, width=32, depth=2, heads=4, context=64)).eval()
    plain = mb.diagnose(model)
    if how == "wrapped":
        model = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
    with warnings.catch_warnings(action="error"):
        report = mb.diagnose(model)
    assert not compiled
    assert (report.subject, report.findings, len(report.checks)) == (plain.subject, [], len(plain.checks))
    assert any("compiled" in note for note in report.notes)


def test_attention_over_the_batch_is_told_how_to_put_the_batch_first():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
            self.attention = nn.MultiheadAttention(32, 4)

        def forward(self, ids):
            x = self.token(ids)
            return self.head(x + self.attention(x, x, x)[0])

    (finding,) = mb.diagnose(TimeFirst(), checks="batch").findings
    assert "batch_first=True" in finding.fix


class Decoder(nn.Module):
    """A decoder as one writes it by hand, with one fault."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.token, self.position = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.qkv, self.mix, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, VOCAB)

    def split(self, x):
        B, T, _ = x.shape
        return x.reshape(B, 4, T, 8) if self.fault == "reshape" else x.view(B, T, 4, 8).transpose(1, 2)

    def forward(self, ids):
        B, T = ids.shape
        places = torch.arange(T)
        x = self.token(ids) + self.position(places.flip(0) if self.fault == "from the end" else places)
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        weights = scores.softmax(1 if self.fault == "softmax over heads" else -1)
        logits = self.head(x + self.mix((weights @ v).transpose(1, 2).reshape(B, T, 32)))
        return logits.softmax(-1) if self.fault == "softmax of logits" else logits


@pytest.mark.parametrize(
    ("fault", "check", "words", "fix"),
    [
        ("from the end", "causality", "how many tokens follow", "torch.arange(T)"),
        ("reshape", "causality", "a reshape without a transpose", ".transpose(1, 2)"),
        ("softmax over heads", "overflow", "another axis than the keys, over the heads", "scores.softmax(dim=-1)"),
        ("softmax of logits", "overfit", "outputs are probabilities", "return logits"),
    ],
)
def test_the_cause_of_a_common_fault_is_named(fault, check, words, fix):
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (8, 17))
    batch = (ids[:, :-1], ids[:, 1:])
    assert mb.diagnose(Decoder(None), batch=batch).findings == []
    (finding,) = mb.diagnose(Decoder(fault), batch=batch).findings
    assert finding.check == check
    assert words in finding.reason
    assert fix in finding.fix
