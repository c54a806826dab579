"""Classifiers on decoders: the last token has seen the whole text; trained, used, and exported to transformers."""

import json

import pytest
import torch
from model_folders import edit_json, hf_folder

import monoblock as mb
from monoblock.cli.main import run
from monoblock.errors import ConfigError

transformers = pytest.importorskip("transformers")
LABELS = ["cold", "hot", "mild"]
WORDS = {"cold": "ice snow frost winter", "hot": "fire sun desert summer", "mild": "spring breeze cloud autumn"}
ROWS = [
    (label, f"the {word} was there {n}") for n in range(11) for label, text in WORDS.items() for word in text.split()
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("labelled") / "weather.csv"
    path.write_text("label,text\n" + "".join(f"{label},{text}\n" for label, text in ROWS))
    return path


@pytest.fixture(scope="module")
def classifier(corpus):
    """A run that fine-tuned a GPT-2 of transformers."""
    source, out = hf_folder(corpus.parent, "gpt2"), corpus.parent / "run"
    edit_json(source, "generation_config.json", lambda fields: fields.update(do_sample=True, temperature=0.5))
    words = ["train.epochs=7", "train.lr=4e-3", "train.batch=12", "data.max_length=32"]
    words += ["train.device=cpu", "train.eval_every=0", "train.save_every=0", "train.load_best=false"]
    assert run(["finetune", str(source), str(corpus), *words, "--out", str(out)]) == 0
    return out


def test_a_published_decoder_learns_to_classify(classifier):
    pipe = mb.load(classifier, device="cpu")
    head = pipe.model.config.head
    assert (head.kind, head.classes, head.pooling, head.bias) == ("classifier", 3, "last", "none")
    assert pipe.labels == LABELS
    texts = [text for _, text in ROWS[:12]]
    assert [best.label for (best,) in pipe.classify(texts)] == [label for label, _ in ROWS[:12]]


@torch.no_grad()
def test_it_is_exported_with_its_labels_and_gives_the_same_probabilities(classifier, tmp_path):
    pipe = mb.load(classifier, device="cpu")
    mb.export_hf(pipe.model, tmp_path / "python")
    assert run(["convert", str(classifier), "--to", str(tmp_path / "command"), "--format", "hf"]) == 0
    texts = [text for _, text in ROWS[:7]] + ["ice"]  # of different lengths, so that there is padding
    for name in ("python", "command"):
        model, info = transformers.GPT2ForSequenceClassification.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert model.config.id2label == dict(enumerate(LABELS))
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        encoded = tokenizer(texts, padding=True, return_tensors="pt")
        reference = model.eval()(**{key: encoded[key] for key in ("input_ids", "attention_mask")}).logits.softmax(-1)
        ours = torch.tensor([[dict(row)[label] for label in LABELS] for row in probabilities(pipe, texts)])
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5)
    back = mb.load(tmp_path / "command", device="cpu")
    assert [row[0].label for row in back.classify(texts)] == [row[0].label for row in pipe.classify(texts)]


def probabilities(pipe, texts):
    return [[(one.label, one.probability) for one in row] for row in pipe.classify(texts, top=len(LABELS))]


@pytest.mark.parametrize("model", [{"family": "llama", "width": 24, "depth": 1, "heads": 2}, {"family": "gpt"}])
def test_a_recipe_trains_one_from_nothing(model, corpus, tmp_path, capsys):
    sizes = {"width": 24, "depth": 1, "heads": 2, "context": 32, "hidden": 46} | model
    recipe = {
        "data": {"corpus": str(corpus)},
        "tokenizer": {"kind": "bpe", "vocab": 290},
        "model": sizes,
        "train": {"objective": "classification", "steps": 2, "batch": 5, "device": "cpu", "eval_every": 0},
    }
    trained = mb.train(recipe, out=tmp_path / "run")
    assert trained.model.config.family == "decoder-only"
    assert trained.model.config.tie == "none"
    assert run(["predict", str(tmp_path / "run"), "the ice was there"]) == 0
    assert capsys.readouterr().out.split("\t")[0] in LABELS
    mb.export_hf(trained.model, tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    names = {"llama": "LlamaForSequenceClassification", "gpt": "GPT2ForSequenceClassification"}
    assert fields["architectures"] == [names[model["family"]]]
    assert list(fields["id2label"].values()) == LABELS


def test_a_decoder_has_the_heads_of_published_ones_and_no_other():
    config = mb.gpt(vocab=61, width=24, depth=1, heads=2, context=16)
    head = mb.vary(config, head="classifier", classes=5).head
    assert (head.kind, head.classes, head.pooling) == ("classifier", 5, "last")
    assert mb.vary(config, head="none").head is None
    with pytest.raises(
        ConfigError, match="head='masked_lm' is not one of classifier, regression, none, which a decoder"
    ):
        mb.vary(config, head="masked_lm")
    with pytest.raises(ConfigError, match="is for an encoder or a decoder, not for an encoder-decoder"):
        mb.vary(mb.vaswani(vocab=61, width=24, depth=1, heads=2, context=16), head="classifier")
