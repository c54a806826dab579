"""Few-shot prompting: log-probabilities equal those of transformers; sampling and calibration by definition."""

import json
import math
import re

import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.data.readers.records import LabelledText
from monoblock.errors import ConfigError, InputError
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.fewshot import (
    CONTENT_FREE,
    PromptTemplate,
    accuracy,
    calibrate_scores,
    evaluate_few_shot,
    sample_balanced,
    score_content_free,
    score_labels,
)
from monoblock.tasks.loaded_model import LoadedModel

ROWS = [
    LabelledText(f"{word} film number {n}", label) for n in range(9) for word, label in (("good", "1"), ("bad", "0"))
]
TEXTS = ["a good film", "bad", "such a very long and winding story of a film", "", "good good"]
WORDS = {"0": "bad", "1": "rather good", "2": "neither"}
TEMPLATE = PromptTemplate("Film: {text}\nIt is {label}.\n", WORDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random decoder of transformers, and ours loaded from its folder."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("decoder")
    texts = [TEMPLATE.format_example(LabelledText(row.text, row.label)) for row in ROWS]
    tokenizer = mb.Tokenizer.train("bpe", texts, vocab_size=290, specials=["eos"])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=331,
        initializer_range=0.3,
    )
    hf_model = transformers.LlamaForCausalLM(config).eval().double()
    hf_model.save_pretrained(folder)
    model = mb.Transformer.from_pretrained(folder, dtype=torch.float64).eval()
    return LoadedModel(model, tokenizer), hf_model


def reference_score(loaded, hf_model, template, examples, text, label):
    """The log-probability of the tokens of a label, from one pass of transformers without a cache."""
    prompt = template.format_prompt(examples, text)
    prompt_ids = loaded.tokenizer.encode(prompt)
    ids = loaded.tokenizer.encode(prompt + template.label_completion(label))
    assert ids[: len(prompt_ids)] == prompt_ids
    return sum(token_log_probs(hf_model, ids)[len(prompt_ids) - 1 :])


def token_log_probs(hf_model, ids):
    """The log-probability of each token but the first."""
    with torch.no_grad():
        log_probs = hf_model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(log_probs[position - 1, ids[position]]) for position in range(1, len(ids))]


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("batch", [2, 32])
def test_scores_are_the_log_probabilities_of_transformers(models, shots, batch):
    loaded, hf_model = models
    examples = sample_balanced(ROWS, ["0", "1"], shots, seed=5)
    scores = score_labels(loaded, TEMPLATE, examples, TEXTS, batch=batch)
    expected = [
        [reference_score(loaded, hf_model, TEMPLATE, examples, text, label) for label in WORDS] for text in TEXTS
    ]
    lengths = {len(loaded.tokenizer.encode(TEMPLATE.label_completion(label))) for label in WORDS}
    assert len(lengths) > 1, "labels must differ in their number of tokens"
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-5)


def test_the_scores_of_a_text_do_not_depend_on_the_batch(models):
    loaded, _ = models
    examples = sample_balanced(ROWS, ["0", "1"], 2, seed=1)
    batched = score_labels(loaded, TEMPLATE, examples, TEXTS)
    for index, text in enumerate(TEXTS):
        single = score_labels(loaded, TEMPLATE, examples, [text])[0]
        torch.testing.assert_close(single, batched[index], rtol=0, atol=1e-9)


def test_a_prompt_is_the_examples_and_the_text_up_to_its_label():
    examples = [LabelledText("dull", "0"), LabelledText("{label} fun", "1")]
    assert (
        TEMPLATE.format_prompt(examples, "x")
        == "Film: dull\nIt is bad.\nFilm: {label} fun\nIt is rather good.\nFilm: x\nIt is"
    )
    assert TEMPLATE.label_completion("1") == " rather good"
    assert PromptTemplate("{text}\n{label}\n", WORDS).label_completion("0") == "bad"


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_examples_are_balanced_distinct_and_determined_by_the_seed(count):
    examples = sample_balanced(ROWS, ["0", "1"], count, seed=3)
    counts = [sum(row.label == label for row in examples) for label in ("0", "1")]
    assert sum(counts) == count == len(set(examples))
    assert max(counts) - min(counts) <= 1
    assert set(examples) <= set(ROWS)
    assert examples == sample_balanced(ROWS, ["0", "1"], count, seed=3)
    samples = {tuple(sample_balanced(ROWS, ["0", "1"], 4, seed=seed)) for seed in range(5)}
    assert len(samples) == 5
    with pytest.raises(
        InputError, match="19 shots need 10 examples of the label '0', but the training split has only 9"
    ):
        sample_balanced(ROWS, ["0", "1"], 19, seed=0)


def test_calibration_divides_by_the_probabilities_after_content_free_texts(models):
    scores = torch.tensor([[0.6, 0.3], [0.8, 0.15]], dtype=torch.float64).log() - 7.0
    content_free = torch.tensor([[0.9, 0.1], [0.7, 0.3]], dtype=torch.float64).log() - 3.0
    calibrated = calibrate_scores(scores, content_free).exp()
    for row, (first, second) in zip(calibrated.tolist(), ((0.6, 0.3), (0.8, 0.15)), strict=True):
        first, second = first / 0.8, second / 0.2  # the mean content-free probabilities are 0.8 and 0.2
        assert row == pytest.approx([first / (first + second), second / (first + second)])
    loaded, _ = models
    content_free = score_content_free(loaded, TEMPLATE, [])
    assert torch.equal(content_free, score_labels(loaded, TEMPLATE, [], CONTENT_FREE))
    uniform = calibrate_scores(content_free[:1], content_free[:1]).exp()
    torch.testing.assert_close(uniform, torch.full_like(uniform, 1 / 3))


def test_accuracy_counts_rows_whose_label_has_the_highest_score():
    rows = [LabelledText("x", "b"), LabelledText("y", "a"), LabelledText("z", "b")]
    assert accuracy(torch.tensor([[0.0, 1.0], [0.0, 1.0], [-2.0, -1.0]]), rows, ["a", "b"]) == pytest.approx(2 / 3)


@pytest.fixture
def corpus(tmp_path):
    for split, rows in (("train", ROWS[:12]), ("test", ROWS[12:])):
        (tmp_path / f"{split}.tsv").write_text("".join(f"{row.label}\t{row.text}\n" for row in rows))
    return tmp_path


def test_the_accuracy_of_each_number_of_shots_equals_that_of_transformers(models, corpus):
    loaded, hf_model = models
    request = EvaluationRequest(data=str(corpus), batch=4)
    words = {"0": "bad", "1": "good"}
    text = "Film: {text}\nIt is {label}.\n"
    metrics = evaluate_few_shot(loaded, request, [0, 2], template=text, words=words, calibrate=True, seed=4).metrics
    template = PromptTemplate(text, words)
    for row, count in zip(metrics["few_shot"], (0, 2), strict=True):
        examples = sample_balanced(ROWS[:12], ["0", "1"], count, seed=4)

        def score(text, examples=examples):
            return [reference_score(loaded, hf_model, template, examples, text, label) for label in words]

        content_free = [[math.exp(log_prob) for log_prob in score(text)] for text in CONTENT_FREE]
        prior = [sum(probs[label] / sum(probs) for probs in content_free) for label in range(2)]
        plain = calibrated = 0
        for sample in ROWS[12:]:
            scores = score(sample.text)
            plain += "01"[scores[1] > scores[0]] == sample.label
            calibrated += "01"[scores[1] - math.log(prior[1]) > scores[0] - math.log(prior[0])] == sample.label
        assert row == {"shots": count, "plain": plain / 6, "accuracy": calibrated / 6}
    assert metrics["accuracy"] == metrics["few_shot"][-1]["accuracy"]


def test_the_command_line_evaluates_few_shot_prompts(corpus, tmp_path, capsys):
    model = tmp_path / "model"
    sizes = ["train.steps=2", "train.warmup=1", "train.batch=2", "model.width=16", "model.depth=1", "model.heads=2"]
    (tmp_path / "text.txt").write_text("".join(TEMPLATE.format_example(row) for row in ROWS * 20))
    data = ["model.context=96", f"data.corpus={tmp_path / 'text.txt'}", "tokenizer.vocab=270"]
    assert run(["train", "gpt-tiny", *sizes, *data, "--out", str(model), "--json"]) == 0
    capsys.readouterr()
    command = ["evaluate", str(model), str(corpus), "--shots", "0,1", "--template", r"{text}\n{label}\n", "--json"]
    assert run([*command, "--label", "0=bad", "--label", "1=good", "--calibrate"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert [row["shots"] for row in metrics["few_shot"]] == [0, 1]
    assert metrics["sources"] == 6
    assert run(command[:-1]) == 0
    assert re.search(r"^ *1 +[\d.]+ %$", capsys.readouterr().out, re.MULTILINE), "the row of one shot"
    assert run([*command, "--label", "3=bad"]) == 2 or "no label '3'" in capsys.readouterr().err
    assert run(["evaluate", str(model), str(corpus), "--shots", "many"]) == 2
    assert "is not a list of whole numbers; write --shots 0,4,8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "words", "message"),
    [
        ("{text}", WORDS, "must contain {text} once and {label} once"),
        ("{label} {text}", WORDS, "has {label} before {text}; swap them"),
        ("{text} {label}", {"a": "same", "b": "same"}, "2 labels have 1 different words"),
    ],
)
def test_invalid_templates_are_refused(template, words, message):
    with pytest.raises(ConfigError) as caught:
        PromptTemplate(template, words)
    assert message in str(caught.value)


def test_a_label_that_shares_a_token_with_the_prompt_is_refused():
    tokenizer = mb.Tokenizer.train("bpe", ["zab abab"] * 20, vocab_size=264, specials=["eos"])
    ids = [tokenizer.encode(text) for text in ("za", "zabqqq")]
    assert ids[1][: len(ids[0])] != ids[0]
    assert len(ids[1]) > len(ids[0])
    loaded = LoadedModel(mb.Transformer(mb.tiny("gpt2")), tokenizer)
    with pytest.raises(InputError, match="the word of a label is merged with the end of the prompt"):
        score_labels(loaded, PromptTemplate("{text}{label}", {"0": "bqqq", "1": "xqqq"}), [], ["za"])


def test_an_empty_prompt_is_the_start_token_or_refused(models):
    loaded, hf_model = models
    bare = PromptTemplate("{text} {label}", {"0": "bad", "1": "good film"})
    scores = score_labels(loaded, bare, [], [""])[0]
    for index, label in enumerate(bare.labels):
        ids = [loaded.tokenizer.eos_id, *loaded.tokenizer.encode(bare.label_completion(label))]
        assert float(scores[index]) == pytest.approx(sum(token_log_probs(hf_model, ids)), abs=1e-5)
    without_specials = mb.Tokenizer.train("bpe", ["bad good"] * 9, vocab_size=262, specials=[])
    with pytest.raises(InputError, match=r"has no start token; put a word before \{text\}"):
        score_labels(LoadedModel(loaded.model, without_specials), bare, [], [""])


def test_the_split_of_the_examples_is_not_evaluated(models, corpus):
    for split in ("all", "train"):
        with pytest.raises(ConfigError, match=f"the split {split} .* contains the examples"):
            evaluate_few_shot(models[0], EvaluationRequest(data=str(corpus), split=split), [0, 2])


def test_a_prompt_beyond_the_context_and_an_encoder_are_refused(models):
    loaded, _ = models
    with pytest.raises(InputError, match=r"have \d{3} tokens, but the model reads at most 331; use fewer shots"):
        score_labels(loaded, TEMPLATE, ROWS, ["good film " * 200])
    encoder = LoadedModel(mb.Transformer(mb.tiny("bert-base")), loaded.tokenizer)
    with pytest.raises(InputError, match="need a decoder-only language model, but this is an encoder-only model"):
        score_labels(encoder, TEMPLATE, [], ["x"])
