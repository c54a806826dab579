"""Few-shot prompting: likelihoods against a transformers model token by token, and each part against its definition."""

import json
import math

import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.data.readers.records import LabelledText
from monoblock.errors import ConfigError, InputError
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.language_modeling.fewshot import (
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
PROMPTING = PromptTemplate("Film: {text}\nIt is {label}.\n", WORDS)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A random decoder as transformers runs it, and ours from its folder."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("decoder")
    texts = [PROMPTING.format_example(LabelledText(row.text, row.label)) for row in ROWS]
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
    theirs = transformers.LlamaForCausalLM(config).eval().double()
    theirs.save_pretrained(folder)
    model = mb.Transformer.from_pretrained(folder, dtype=torch.float64).eval()
    return LoadedModel(model, tokenizer), theirs


def by_hand(pipe, theirs, prompting, shown, text, label):
    """The whole text in one pass, no cache: log-probabilities of the tokens that the label's word adds."""
    prompt = prompting.format_prompt(shown, text)
    before = pipe.tokenizer.encode(prompt)
    whole = pipe.tokenizer.encode(prompt + prompting.label_completion(label))
    assert whole[: len(before)] == before
    with torch.no_grad():
        logs = theirs(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logs[place - 1, whole[place]]) for place in range(len(before), len(whole)))


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("batch", [2, 32])
def test_scores_are_the_log_probabilities_that_transformers_gives_the_labels_tokens(both, shots, batch):
    pipe, theirs = both
    shown = sample_balanced(ROWS, ["0", "1"], shots, seed=5)
    found = score_labels(pipe, PROMPTING, shown, TEXTS, batch=batch)
    wanted = [[by_hand(pipe, theirs, PROMPTING, shown, text, label) for label in WORDS] for text in TEXTS]
    lengths = {len(pipe.tokenizer.encode(PROMPTING.label_completion(label))) for label in WORDS}
    assert len(lengths) > 1, "labels of several tokens and of several lengths are among them"
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=2e-5)


def test_one_text_alone_has_the_scores_it_has_among_others(both):
    pipe, _ = both
    shown = sample_balanced(ROWS, ["0", "1"], 2, seed=1)
    among = score_labels(pipe, PROMPTING, shown, TEXTS)
    for place, text in enumerate(TEXTS):
        torch.testing.assert_close(score_labels(pipe, PROMPTING, shown, [text])[0], among[place], rtol=0, atol=1e-9)


def test_a_prompt_shows_its_examples_and_ends_where_the_label_would_stand():
    shown = [LabelledText("dull", "0"), LabelledText("{label} fun", "1")]
    assert (
        PROMPTING.format_prompt(shown, "x")
        == "Film: dull\nIt is bad.\nFilm: {label} fun\nIt is rather good.\nFilm: x\nIt is"
    )
    assert PROMPTING.label_completion("1") == " rather good"
    assert PromptTemplate("{text}\n{label}\n", WORDS).label_completion("0") == "bad"


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_examples_are_balanced_drawn_by_the_seed_and_of_the_training_rows(count):
    shown = sample_balanced(ROWS, ["0", "1"], count, seed=3)
    counts = [sum(row.label == label for row in shown) for label in ("0", "1")]
    assert sum(counts) == count == len(set(shown))
    assert max(counts) - min(counts) <= 1
    assert set(shown) <= set(ROWS)
    assert shown == sample_balanced(ROWS, ["0", "1"], count, seed=3)
    several = {tuple(sample_balanced(ROWS, ["0", "1"], 4, seed=seed)) for seed in range(5)}
    assert len(several) == 5
    with pytest.raises(InputError, match="10 examples of '0' were asked for and the training split has 9"):
        sample_balanced(ROWS, ["0", "1"], 19, seed=0)


def test_calibration_divides_by_what_a_text_that_says_nothing_gets(both):
    scores = torch.tensor([[0.6, 0.3], [0.8, 0.15]], dtype=torch.float64).log() - 7.0
    of_nothing = torch.tensor([[0.9, 0.1], [0.7, 0.3]], dtype=torch.float64).log() - 3.0
    found = calibrate_scores(scores, of_nothing).exp()
    for row, (one, other) in zip(found.tolist(), ((0.6, 0.3), (0.8, 0.15)), strict=True):
        one, other = one / 0.8, other / 0.2  # p(nothing) is 0.8 and 0.2 on the average
        assert row == pytest.approx([one / (one + other), other / (one + other)])
    pipe, _ = both
    nothing = score_content_free(pipe, PROMPTING, [])
    assert torch.equal(nothing, score_labels(pipe, PROMPTING, [], CONTENT_FREE))
    even = calibrate_scores(nothing[:1], nothing[:1]).exp()
    torch.testing.assert_close(even, torch.full_like(even, 1 / 3))


def test_accuracy_counts_the_most_likely():
    rows = [LabelledText("x", "b"), LabelledText("y", "a"), LabelledText("z", "b")]
    assert accuracy(torch.tensor([[0.0, 1.0], [0.0, 1.0], [-2.0, -1.0]]), rows, ["a", "b"]) == pytest.approx(200 / 3)


@pytest.fixture
def corpus(tmp_path):
    for split, rows in (("train", ROWS[:12]), ("test", ROWS[12:])):
        (tmp_path / f"{split}.tsv").write_text("".join(f"{row.label}\t{row.text}\n" for row in rows))
    return tmp_path


def test_a_corpus_is_measured_by_the_number_of_examples(both, corpus):
    pipe, theirs = both
    asked = EvaluationRequest(data=str(corpus), batch=4)
    words = {"0": "bad", "1": "good"}
    template = "Film: {text}\nIt is {label}.\n"
    measured = evaluate_few_shot(pipe, asked, [0, 2], template=template, words=words, calibrate=True, seed=4)
    prompting = PromptTemplate(template, words)
    for row, count in zip(measured.metrics["few_shot"], (0, 2), strict=True):
        shown = sample_balanced(ROWS[:12], ["0", "1"], count, seed=4)
        right = lifted = 0
        nothing = [[by_hand(pipe, theirs, prompting, shown, text, label) for label in words] for text in CONTENT_FREE]
        prior = [sum(math.exp(one[n]) / sum(map(math.exp, one)) for one in nothing) for n in range(2)]
        for sample in ROWS[12:]:
            scores = [by_hand(pipe, theirs, prompting, shown, sample.text, label) for label in words]
            right += "01"[scores[1] > scores[0]] == sample.label
            lifted += "01"[scores[1] - math.log(prior[1]) > scores[0] - math.log(prior[0])] == sample.label
        assert row == {"shots": count, "plain": 100 * right / 6, "accuracy": 100 * lifted / 6}
    assert measured.metrics["accuracy"] == measured.metrics["few_shot"][-1]["accuracy"]


def test_the_command_line_measures_few_shot_prompting(corpus, tmp_path, capsys):
    model = tmp_path / "model"
    words = ["train.steps=2", "train.warmup=1", "train.batch=2", "model.width=16", "model.depth=1", "model.heads=2"]
    (tmp_path / "text.txt").write_text("".join(PROMPTING.format_example(row) for row in ROWS * 20))
    text = ["model.context=96", f"data.corpus={tmp_path / 'text.txt'}", "tokenizer.vocab=270"]
    assert run(["train", "gpt-tiny", *words, *text, "--out", str(model), "--json"]) == 0
    capsys.readouterr()
    asked = ["evaluate", str(model), str(corpus), "--shots", "0,1", "--template", r"{text}\n{label}\n", "--json"]
    assert run([*asked, "--label", "0=bad", "--label", "1=good", "--calibrate"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["shots"] for row in found["few_shot"]] == [0, 1]
    assert found["sources"] == 6
    assert run([*asked, "--label", "3=bad"]) == 2 or "no label '3'" in capsys.readouterr().err
    assert run(["evaluate", str(model), str(corpus), "--shots", "many"]) == 2
    assert "is not a list of whole numbers; write --shots 0,4,8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "words", "said"),
    [
        ("{text}", WORDS, "needs {text} once and {label} once"),
        ("{label} {text}", WORDS, "asks for the label before the text"),
        ("{text} {label}", {"a": "same", "b": "same"}, "1 different words for labels"),
    ],
)
def test_a_template_that_cannot_be_is_one_line(template, words, said):
    with pytest.raises(ConfigError) as caught:
        PromptTemplate(template, words)
    assert said in str(caught.value)


def test_a_label_that_changes_the_tokens_before_it_is_refused():
    tokenizer = mb.Tokenizer.train("bpe", ["zab abab"] * 20, vocab_size=264, specials=["eos"])
    ids = [tokenizer.encode(text) for text in ("za", "zabqqq")]
    assert ids[1][: len(ids[0])] != ids[0]
    assert len(ids[1]) > len(ids[0])
    pipe = LoadedModel(mb.Transformer(mb.tiny("gpt2")), tokenizer)
    with pytest.raises(InputError, match="melts into the end of the prompt"):
        score_labels(pipe, PromptTemplate("{text}{label}", {"0": "bqqq", "1": "xqqq"}), [], ["za"])


def test_an_empty_prompt_is_the_start_token_or_one_line(both):
    pipe, theirs = both
    bare = PromptTemplate("{text} {label}", {"0": "bad", "1": "good film"})
    found = score_labels(pipe, bare, [], [""])[0]
    for place, label in enumerate(bare.labels):
        ids = [pipe.tokenizer.eos_id, *pipe.tokenizer.encode(bare.label_completion(label))]
        with torch.no_grad():
            logs = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = sum(float(logs[n - 1, ids[n]]) for n in range(1, len(ids)))
        assert float(found[place]) == pytest.approx(wanted, abs=1e-5)
    without = mb.Tokenizer.train("bpe", ["bad good"] * 9, vocab_size=262, specials=[])
    with pytest.raises(InputError, match=r"has no start token; put a word before \{text\}"):
        score_labels(LoadedModel(pipe.model, without), bare, [], [""])


def test_examples_are_not_drawn_from_what_is_measured(both, corpus):
    for split in ("all", "train"):
        with pytest.raises(ConfigError, match=f"the split {split} .* has the examples"):
            evaluate_few_shot(both[0], EvaluationRequest(data=str(corpus), split=split), [0, 2])


def test_what_cannot_be_prompted_is_one_line(both):
    pipe, _ = both
    with pytest.raises(InputError, match=r"have \d{3} tokens, and the model reads 331; show fewer examples"):
        score_labels(pipe, PROMPTING, ROWS, ["good film " * 200])
    encoder = LoadedModel(mb.Transformer(mb.tiny("bert-base")), pipe.tokenizer)
    with pytest.raises(InputError, match="labels are prompted for from a decoder, and this is an encoder-only model"):
        score_labels(encoder, PROMPTING, [], ["x"])
