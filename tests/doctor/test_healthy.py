"""A healthy model has no findings: every preset, published families in eager and sdpa, an LSTM, a trained run."""

import pytest
import torch
from rows import PUBLISHED_MODELS

import monoblock as mb
from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import RecurrentConfig
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.config.presets import PRESETS, tiny
from monoblock.doctor.diagnose import diagnose_model
from monoblock.model import Transformer

DIFFERENT = {tiny(name): name for name in reversed(PRESETS)}  # one name for each tiny configuration

FAMILIES = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2",
    "gemma2",
    "gpt_neox",
    "phi",
    "gpt_neo",
    "bloom",
    "falcon-7b",
    "opt",
    "mixtral",
    "t5",
    "t5 encoder",
    "bart",
    "albert",
    "distilbert",
    "bert masked",
    "roberta masked",
    "bert classifier",
]


def names(report):
    return {finding.check: finding.evidence for finding in report.findings}


@pytest.mark.parametrize("name", DIFFERENT.values())
def test_a_preset_has_no_findings(name):
    torch.manual_seed(0)
    report = diagnose_model(Transformer(tiny(name)))
    assert not report.findings, names(report)
    assert not [row for row in report.not_checked if "failed" in row.reason]


EAGER_ONLY = ("bloom", "gpt_neo")  # their authors wrote no attention with sdpa


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, way) for name in FAMILIES for way in ("eager", "sdpa") if way == "eager" or name not in EAGER_ONLY],
)
def test_a_published_family_has_no_findings(name, attention):
    transformers = pytest.importorskip("transformers")
    row = PUBLISHED_MODELS[name]
    config_class = getattr(transformers, row.class_name)
    config = config_class.config_class(**row.config_fields)
    config._attn_implementation, config._experts_implementation = attention, "eager"
    torch.manual_seed(0)
    report = diagnose_model(config_class(config))
    assert not report.findings, names(report)
    assert not [row for row in report.not_checked if "failed" in row.reason]


def test_at_least_fifteen_families_are_examined_in_both_ways():
    classes = {PUBLISHED_MODELS[name].class_name.split("For")[0] for name in FAMILIES if name not in EAGER_ONLY}
    assert len(classes) >= 15, sorted(classes)


@pytest.mark.parametrize("kind", ["language_model", "encoder_decoder"])
def test_an_lstm_has_no_findings(kind):
    torch.manual_seed(0)
    report = diagnose_model(Recurrent(RecurrentConfig(kind=kind, vocab=61, width=36, depth=2)))
    assert not report.findings, names(report)


def test_an_examination_changes_neither_weights_nor_mode_nor_random_numbers():
    torch.manual_seed(0)
    model = Transformer(tiny("gpt2")).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(5, 61, (4, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def step():
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    report = diagnose_model(model, batch=(tokens[:, :-1], tokens[:, 1:]), step=step, optimizer=optimizer)
    assert torch.equal(torch.rand(3), expected)
    assert not report.findings, names(report)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# -- a healthy training ---------------------------------------------------------------------------------------------

TRAINING = ("label_shift", "pad_in_loss", "initial_loss", "overfit", "optimizer", "learning_rate", "optimizer_settings")
QUICK = {"gpt2", "command-r", "llama", "bert masked"}  # the rest is slow together


def examine_training(model, vocab, logits_of, *, is_causal, shifts=False):
    """Examine a model with a batch, its loss (or the own one, which shifts), a step, an optimizer and a generator."""
    ids = torch.randint(5, vocab, (4, 14), generator=torch.Generator().manual_seed(1))
    labels = torch.where(ids % 2 == 0, ids, -100)
    if is_causal:
        ids, labels = ids[:, :-1], ids[:, 1:].clone()
        labels[:2, 9:] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))

    def loss(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def step():
        optimizer.zero_grad()
        value = loss(logits_of(ids), labels)
        value.backward()
        optimizer.step()
        return value.item()

    def generate(prompt):
        model.eval()
        return logits_of(prompt)[:, -1].argmax(-1)

    given = {"batch": (ids, ids)} if shifts else {"batch": (ids, labels), "loss": loss}
    options = {**given, "step": step, "optimizer": optimizer, "generate": generate}
    report = diagnose_model(model, checks=[*TRAINING, "dropout"], **options)
    alone = diagnose_model(model, checks=["learning_rate"], optimizer=optimizer)
    for one in (report, alone):
        assert not one.findings, names(one)
        assert not [row for row in one.not_checked if "failed" in row.reason]
    assert {"overfit", "optimizer", "learning_rate"} <= {result.name for result in report.checks}


def mark(rows):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in rows]


def predicts_tokens(name):
    """Whether a preset reads one text and predicts a token at each position of it."""
    config = tiny(name)
    return config.family in ("decoder-only", "encoder-only") and getattr(config.head, "kind", "") in VOCABULARY_HEADS


@pytest.mark.parametrize("name", mark(filter(predicts_tokens, DIFFERENT.values())))
def test_a_healthy_training_of_a_preset_has_no_findings(name):
    config = tiny(name)
    torch.manual_seed(0)
    model = Transformer(config)
    assert model(torch.full((2, 7), 5)).shape == (2, 7, config.input.vocab)
    examine_training(model, config.input.vocab, model, is_causal=config.family == "decoder-only")


LANGUAGE_MODELS = [
    name
    for name, row in PUBLISHED_MODELS.items()
    if row.class_name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))
]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of GPT-BigCode
@pytest.mark.parametrize("name", mark(LANGUAGE_MODELS))
def test_a_healthy_training_of_a_published_family_has_no_findings(name):
    transformers = pytest.importorskip("transformers")
    row = PUBLISHED_MODELS[name]
    config_class = getattr(transformers, row.class_name)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = config_class.config_class(**{**tokens, **row.config_fields})
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    model, is_causal = config_class(config), not row.class_name.endswith("ForMaskedLM")
    vocab = config.get_text_config().vocab_size
    examine_training(model, vocab, lambda ids: model(ids).logits, is_causal=is_causal, shifts=is_causal)


def test_the_doctor_warns_of_batch_norm_and_of_nothing_else_that_was_swapped():
    sizes = {"vocab": 61, "width": 24, "depth": 2, "heads": 4, "context": 64}
    findings = {}
    for name, knobs in {"batch": {"norm": "batch"}, "linear": {"attention": "linear"}, "no ff": {"hidden": 0}}.items():
        torch.manual_seed(0)
        report = mb.diagnose(mb.Transformer(mb.gpt(**sizes, **knobs)))
        findings[name] = [(finding.check, finding.verdict) for finding in report.findings]
    assert findings == {"batch": [("batch", "warn")], "linear": [], "no ff": []}
