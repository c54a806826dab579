"""Extractive question answering: windows, span decoding, loss and SQuAD metrics, against independent computations."""

import json

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.data.readers.records import Question
from monoblock.data.readers.squad import to_squad_json
from monoblock.errors import ConfigError, InputError
from monoblock.metrics.squad import exact_match, f1_score, normalize_answer, score_answers
from monoblock.runs.build_data import build_task_data
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.recipe import parse_recipe
from monoblock.tasks.question_answering import NO_ANSWER, ContextWindow, QuestionEncoder, answer_questions, best_spans
from monoblock.training.loss import CrossEntropyLoss

CONTEXT = "And Moses said unto the  people — é, Fear ye not: stand still; and Aaron went up. The LORD is one LORD."
KINDS = {"bpe": 300, "wordpiece": 90, "unigram": 80, "char": 70, "word": 60}


def train_tokenizer(kind="bpe", lowercase=False):
    texts = [CONTEXT, "Who said unto the people, Fear ye not?"] * 3
    return mb.Tokenizer.train(kind, texts, KINDS[kind], specials=["pad", "cls", "sep", "mask"], lowercase=lowercase)


def covered_text(window, first, last):
    """The characters of the context from token `first` to token `last` of a window."""
    start, end = window.offsets[first - window.context_start][0], window.offsets[last - window.context_start][1]
    return CONTEXT[start:end]


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("longest", "stride"), [(None, None), (29, None), (29, 5), (17, 100)])
def test_windows_cover_the_context_and_know_its_characters(kind, longest, stride):
    tokenizer = train_tokenizer(kind)
    windows = QuestionEncoder(tokenizer, longest, stride)("Who said it?", CONTEXT)
    assert (len(windows) == 1) == (longest is None or len(windows[0].offsets) == len(tokenizer.pieces(CONTEXT)))
    covered = set()
    for window in windows:
        assert longest is None or len(window.ids) <= longest
        assert len(window.ids) == len(window.segments)
        context = slice(window.context_start, window.context_start + len(window.offsets))
        assert window.segments[context] == [1] * len(window.offsets)
        assert window.ids[0] == tokenizer.cls_id
        assert window.ids[window.context_start - 1] == window.ids[-1] == tokenizer.sep_id
        for token, (start, end) in zip(window.ids[context], window.offsets, strict=True):
            assert CONTEXT[start:end] == CONTEXT[start:end].strip()
            assert kind != "char" or start == end or tokenizer.token(token) == CONTEXT[start:end]
            covered.update(range(start, end))
    assert covered == {index for index, character in enumerate(CONTEXT) if not character.isspace()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_maps_to_tokens_and_back_to_the_same_characters(kind):
    window = QuestionEncoder(train_tokenizer(kind))("Who?", CONTEXT)[0]
    for answer in ("Moses", "the  people — é", "stand still", "And Moses said", "one LORD"):
        start = CONTEXT.index(answer)
        first, last = window.token_span(start, start + len(answer))
        text = covered_text(window, first, last)
        assert text.startswith(answer)
        assert text.rstrip(",.;:") == answer, "but for a punctuation mark that a word tokenizer keeps"


def test_the_target_of_a_window_without_the_whole_answer_is_no_answer():
    windows = QuestionEncoder(train_tokenizer("char"), 41, 11)("Who?", CONTEXT)
    start = CONTEXT.index("Aaron went up")
    spans = [window.token_span(start, start + 13) for window in windows]
    assert (NO_ANSWER, NO_ANSWER) in spans
    answers = [span for span in spans if span != (NO_ANSWER, NO_ANSWER)]
    assert answers
    assert all(last - first == 12 for first, last in answers)


def test_spaces_around_a_gold_answer_are_ignored(tmp_path):
    data = tmp_path / "questions.json"
    questions = [Question("who?", f"then said Ruth {n}", (" Ruth ",), (9,), str(n)) for n in range(20)]
    data.write_text(json.dumps(to_squad_json(questions)), encoding="utf-8")
    model = {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 31}
    recipe = {"data": {"corpus": str(data)}, "tokenizer": {"kind": "word", "vocab": 64}, "model": model}
    task_data = build_task_data(parse_recipe(recipe | {"train": {"objective": "question_answering", "batch": 18}}), 31)
    batch = task_data.build_batch(task_data.batch_plan.batch_at(0))
    first_tokens = {
        int(ids[first]) for ids, (first, _) in zip(batch.inputs["source"], batch.labels.tolist(), strict=True)
    }
    assert first_tokens == {task_data.tokenizer.id("Ruth")}


def test_a_lowercasing_tokenizer_keeps_the_case_of_the_answer():
    tokenizer = train_tokenizer("wordpiece", lowercase=True)
    window = QuestionEncoder(tokenizer)("who?", CONTEXT)[0]
    first, last = window.token_span(4, 9)
    assert covered_text(window, first, last) == "Moses"
    assert "m" in {character for token in window.ids[first : last + 1] for character in tokenizer.token(token)}


def test_a_long_question_leaves_half_a_window_to_the_context():
    windows = QuestionEncoder(train_tokenizer("char"), 31)(
        "Who said unto the people, Fear ye not, stand still?", CONTEXT
    )
    assert all(len(window.ids) <= 31 for window in windows)
    assert len(windows[0].offsets) == 14
    with pytest.raises(ConfigError, match="6 tokens are too few"):
        QuestionEncoder(train_tokenizer("char"), 6)


def test_windows_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer("wordpiece")
    tokenizer.save_pretrained(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    options = {"max_length": 23, "stride": 6, "truncation": "only_second", "return_overflowing_tokens": True}
    expected = theirs("Who said it?", CONTEXT, return_offsets_mapping=True, return_token_type_ids=True, **options)
    size = 23 - 3 - len(tokenizer.encode("Who said it?"))
    stride = size - options["stride"]  # theirs is the overlap of two windows, ours the distance of their starts
    windows = QuestionEncoder(tokenizer, 23, stride)("Who said it?", CONTEXT)
    assert [window.ids for window in windows] == expected["input_ids"]
    assert [window.segments for window in windows] == expected["token_type_ids"]
    for window, offsets in zip(windows, expected["offset_mapping"], strict=True):
        context = slice(window.context_start, window.context_start + len(window.offsets))
        assert window.offsets == [tuple(offset) for offset in offsets[context]]


# -- decoding ---------------------------------------------------------------------------------------------------------


def spans_by_enumeration(windows, logits, longest, impossible):
    """Every span of every window with its score, best first."""
    scores = {}
    for window, values in zip(windows, logits, strict=True):
        for i, (start, _) in enumerate(window.offsets):
            for j in range(i, min(i + longest, len(window.offsets))):
                if window.offsets[i][0] < window.offsets[i][1] and window.offsets[j][0] < window.offsets[j][1]:
                    span = (start, window.offsets[j][1])
                    score = float(values[window.context_start + i, 0] + values[window.context_start + j, 1])
                    scores[span] = max(score, scores.get(span, -1e9))
    if impossible:
        scores[0, 0] = min(float(values[0].sum()) for values in logits)
    return sorted(scores.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize(("longest", "max_length"), [(1, None), (5, None), (30, 23), (7, 19)])
def test_the_best_spans_are_those_of_an_exhaustive_search(longest, max_length, impossible):
    windows = QuestionEncoder(train_tokenizer(), max_length)("Who said it?", CONTEXT)
    generator = torch.Generator().manual_seed(longest)
    for _ in range(7):
        logits = [torch.randn(len(window.ids), 2, generator=generator) for window in windows]
        expected = spans_by_enumeration(windows, logits, longest, impossible)[:5]
        answers = best_spans(windows, logits, CONTEXT, n_best=5, longest=longest, impossible=impossible)
        assert [(answer.start, answer.end) for answer in answers] == [span for span, _ in expected]
        assert [answer.score for answer in answers] == pytest.approx([score for _, score in expected], abs=1e-5)
        assert all(answer.text == CONTEXT[answer.start : answer.end] for answer in answers)
        assert all(answer.text == answer.text.strip() for answer in answers)


def test_probabilities_are_normalized_over_all_spans():
    windows = QuestionEncoder(train_tokenizer("word"))("Who?", CONTEXT)
    logits = [torch.randn(len(windows[0].ids), 2, generator=torch.Generator().manual_seed(3))]
    answers = best_spans(windows, logits, CONTEXT, n_best=10_000, longest=100, impossible=True)
    count = len(windows[0].offsets)
    assert len(answers) == count * (count + 1) // 2 + 1
    probabilities = [answer.probability for answer in answers]
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    assert probabilities == sorted(probabilities, reverse=True)


def test_no_answer_needs_permission_and_has_the_lowest_score_of_the_windows():
    windows = [ContextWindow([1, 5, 2, 7, 8, 2], [0, 0, 0, 1, 1, 1], 3, [(0, 3), (4, 6)])] * 2
    certain, uncertain = torch.zeros(6, 2), torch.zeros(6, 2)
    certain[0], uncertain[0] = 9.0, 1.0
    uncertain[4] = 2.0
    answer = best_spans(windows, [certain, uncertain], "abc de", impossible=True)[0]
    assert (answer.text, answer.start) == ("de", 4)
    assert best_spans(windows, [certain, certain], "abc de", impossible=True)[0].text == ""
    assert best_spans(windows, [certain, certain], "abc de")[0].text != ""


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_transformers_and_padding_does_not_change_it():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    theirs = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=31, **sizes)).eval()
    ids, answer = torch.randint(31, (3, 13)), torch.tensor([[2, 5], [0, 0], [7, 12]])
    with torch.no_grad():
        expected = theirs(ids, start_positions=answer[:, 0], end_positions=answer[:, 1])
        logits = torch.stack((expected.start_logits, expected.end_logits), -1)
        loss = CrossEntropyLoss(over_positions=True)
        actual = loss(lambda source: logits, {"source": ids}, answer)
    assert float(actual) / answer.numel() == pytest.approx(float(expected.loss), rel=1e-5)
    padded_logits = torch.cat((logits, torch.full((3, 4, 2), 50.0)), 1)
    valid = torch.arange(17).expand(3, 17) < 13
    padded = loss(lambda source, attention_mask: padded_logits, {"source": ids, "attention_mask": valid}, answer)
    assert torch.equal(padded, actual)


# -- SQuAD metrics -----------------------------------------------------------------------------------------------------

# Answer, gold answers, exact match and F1, worked out by hand from the official definition.
CASES = [
    ("the king", ["King"], 1, 1),  # articles and capitals do not count
    ("Moses", ["Moses", "the prophet"], 1, 1),  # the best gold answer counts
    ("King David", ["David"], 0, 2 / 3),  # 1 of 2 and 1 of 1: 2 · 0.5 · 1 / 1.5
    ("David", ["the king David of Judah"], 0, 2 / 5),  # 1 of 1 and 1 of 4
    ("Saul, the son of Kish.", ["Saul the son of Kish"], 1, 1),  # punctuation does not count
    ("Aaron", ["Moses"], 0, 0),
    ("don't", ["dont"], 1, 1),  # punctuation is removed, not replaced by a space
    ("to to to", ["to"], 0, 1 / 2),  # words count as often as they occur: 1 of 3 and 1 of 1
    ("", [], 1, 1),  # no answer was expected, and none was given
    ("Moses", [], 0, 0),  # no answer was expected, but one was given
    ("", ["Moses"], 0, 0),
    ("a an the", ["Moses", "..."], 0, 0),  # nothing is left of the answer, and "..." is no gold answer
]


@pytest.mark.parametrize(("answer", "golds", "exact", "f1"), CASES)
def test_exact_match_and_f1_are_those_worked_out_by_hand(answer, golds, exact, f1):
    assert exact_match(answer, golds) == exact
    assert f1_score(answer, golds) == pytest.approx(f1)


def test_metrics_are_those_of_transformers_on_random_answers():
    metrics = pytest.importorskip("transformers.data.metrics.squad_metrics")
    rng = np.random.default_rng(5)
    words = np.array(["the", "a", "Moses", "moses,", "king", "of", "an", "Judah.", "—", "son's", "7"])
    texts = [" ".join(rng.choice(words, rng.integers(0, 6))) for _ in range(400)]
    for answer, gold in zip(texts[:200], texts[200:], strict=True):
        assert normalize_answer(answer) == metrics.normalize_answer(answer)
        if metrics.normalize_answer(gold):
            assert exact_match(answer, [gold]) == metrics.compute_exact(gold, answer)
            assert f1_score(answer, [gold]) == pytest.approx(metrics.compute_f1(gold, answer))


def test_means_are_over_all_questions_and_over_answerable_and_unanswerable_ones():
    metrics = score_answers(["Moses", "King David", "", "Saul"], [["Moses"], ["David"], [], []])
    assert metrics["exact_match"] == 50
    assert metrics["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1) / 4)
    assert metrics["answerable_exact_match"] == 50
    assert metrics["answerable_f1"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert metrics["unanswerable_accuracy"] == 0.5
    assert (metrics["questions"], metrics["unanswerable"]) == (4, 2)
    assert "answerable_f1" not in score_answers(["a"], [["b"]])
    with pytest.raises(InputError, match="1 answers to 0 questions"):
        score_answers(["a"], [])


# -- training and prediction ------------------------------------------------------------------------------------------

NAMES = ["Moses", "Aaron", "David", "Saul", "Joab", "Esther", "Ruth", "Gideon"]
RECIPE = """
[data]
corpus = "{}"
[question_answering]
unanswerable = {}
[tokenizer]
kind = "word"
vocab = 64
[model]
family = "bert"
head = "spans"
width = 32
depth = 2
heads = 2
context = 24
[train]
objective = "question_answering"
steps = {}
batch = 16
lr = 2e-2
optimizer = "muon"
warmup = 5
eval_every = 0
device = "cpu"
compile = "no"
"""


def make_questions(impossible=False):
    """The answer is the name after "said"; a question with "died" has none."""
    questions = []
    for n in range(64):
        speaker, hearer = NAMES[n % 8], NAMES[(3 * n + 1 + n // 8) % 8]
        context = f"then said {speaker} unto {hearer} go up"
        questions.append(Question(f"who spake {n % 4}", context, (speaker,), (10,), f"a{n}"))
        if impossible:
            questions.append(Question(f"who died {n % 4}", context, (), (), f"b{n}"))
    return questions


def train_model(workspace, impossible=False, steps=150):
    data = workspace / "questions.json"
    data.write_text(json.dumps(to_squad_json(make_questions(impossible))), encoding="utf-8")
    recipe = workspace / "recipe.toml"
    recipe.write_text(RECIPE.format(data, str(impossible).lower(), steps), encoding="utf-8")
    assert run(["train", str(recipe), "--out", str(workspace / "run")]) == 0
    torch.use_deterministic_algorithms(False)
    return workspace / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train_model(tmp_path_factory.mktemp("answers"), impossible=True)


def test_a_model_learns_the_answer_and_when_there_is_none(folder):
    pipe = mb.load(folder)
    assert pipe.answer("who spake 1", "then said Ruth unto Joab go up") == "Ruth"
    assert pipe.answer("who died 1", "then said Ruth unto Joab go up") == ""
    assert pipe.answer("who died 1", "then said Ruth unto Joab go up", impossible=False) != ""
    contexts = ["then said Saul unto Ruth go up"] * 2
    assert pipe.answer(["who spake 2", "who died 3"], contexts) == ["Saul", ""]
    assert pipe.answer([("who spake 2", "then said Saul unto Ruth go up")]) == ["Saul"]
    with pytest.raises(InputError, match="line 2: the context of the question is empty"):
        pipe.answer(["who?", "who?"], ["he", " "])


def test_an_answer_is_a_slice_of_the_text_even_if_its_words_are_unknown(folder):
    pipe = mb.load(folder)
    text = "  Strange — wörds\tand 7 more; of which none was seen before, over and over " * 5
    for answer in pipe.answer("what is this?", text, n_best=5, impossible=False):
        assert answer.text
        assert text[answer.start : answer.end] == answer.text
    assert len(pipe.answer("what?", text, n_best=1, longest=1, impossible=False)[0].text.split()) == 1


def test_answers_do_not_depend_on_the_batch(folder):
    pipe = mb.load(folder)
    questions = [(row.question, row.context + " and went" * (n % 5)) for n, row in enumerate(make_questions(True)[:23])]
    alone = [answer_questions(pipe, [question], n_best=3)[0] for question in questions]
    batched = answer_questions(pipe, questions, n_best=3, batch=7)
    for ours, theirs in zip(alone, batched, strict=True):
        assert [answer[:3] for answer in ours] == [answer[:3] for answer in theirs]
        expected = [answer.probability for answer in theirs]
        assert [answer.probability for answer in ours] == pytest.approx(expected, abs=1e-5)


def test_evaluate_reports_the_official_metrics_on_another_file(folder, tmp_path, capsys):
    path, rows = tmp_path / "dev.json", make_questions(True)[:11]
    path.write_text(json.dumps(to_squad_json(rows)), encoding="utf-8")
    assert run(["evaluate", str(folder), str(path), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    pipe = mb.load(folder)
    texts = [pipe.answer(row.question, row.context) for row in rows]
    expected = score_answers(texts, [row.answers for row in rows])
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert (metrics["questions"], metrics["split"]) == (11, "all")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "val_exact_match" in card
    assert "val_f1" in card


def test_predict_reads_a_question_and_a_text_per_line(folder, capsys):
    text = "then said Ruth unto Joab go up"
    assert run(["predict", str(folder), f"who spake 1\t{text}", "", "--json"]) == 0
    first, empty = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["question"], first["context"]) == ("who spake 1", text)
    assert first["answers"][0]["text"] == text[first["answers"][0]["start"] : first["answers"][0]["end"]] == "Ruth"
    assert empty["answers"] == []
    assert run(["predict", str(folder), f"who spake 1\t{text}", "--top", "2"]) == 0
    assert capsys.readouterr().out.split("\t")[0] == "Ruth"
    assert run(["predict", str(folder), "who spake"]) == 1
    assert "write question<TAB>text" in capsys.readouterr().err


def test_questions_without_answers_are_refused_unless_the_recipe_allows_them(tmp_path):
    data = tmp_path / "questions.json"
    data.write_text(json.dumps(to_squad_json(make_questions(True))), encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE.format(data, "false", 1), encoding="utf-8")
    assert run(["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]) != 0
    recipe = parse_recipe(
        {
            "data": {"corpus": str(data), "split": "last"},
            "model": {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 31},
            "train": {"objective": "question_answering"},
        },
    )
    with pytest.raises(
        ConfigError, match=r"57 of 115 questions of .* have no answer; write question_answering.unanswerable=true"
    ):
        build_task_data(recipe, 31)


def test_the_target_of_a_window_is_the_position_of_the_answer(tmp_path):
    data = tmp_path / "questions.json"
    data.write_text(json.dumps(to_squad_json(make_questions())), encoding="utf-8")
    model = {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 11}
    recipe = {"data": {"corpus": str(data)}, "tokenizer": {"kind": "word", "vocab": 64}, "model": model}
    recipe |= {"question_answering": {"stride": 2}}
    task_data = build_task_data(parse_recipe(recipe | {"train": {"objective": "question_answering", "batch": 13}}), 11)
    batches = [task_data.build_batch(task_data.batch_plan.batch_at(step)) for step in range(9)]
    num_answers = 0
    said = task_data.tokenizer.id("said")
    for batch in batches:
        assert batch.labels.shape == (batch.batch_size, 2)
        assert batch.inputs["segments"].shape == batch.inputs["source"].shape
        for ids, (first, last) in zip(batch.inputs["source"], batch.labels.tolist(), strict=True):
            if first or last:
                assert first == last
                assert ids[first - 1] == said or said not in ids.tolist()
                num_answers += 1
            else:
                assert said not in ids.tolist() or ids.tolist()[-2] == said
    assert num_answers >= 50


def test_a_model_with_another_head_is_refused():
    config = mb.bert(vocab=31, width=16, depth=1, heads=2, context=19)
    pipe = Pipeline(mb.Transformer(config), train_tokenizer())
    with pytest.raises(InputError, match="answer needs a model with the head 'spans'"):
        pipe.answer("who?", "he")


def test_a_model_of_transformers_gives_the_best_spans_of_its_own_logits(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer("wordpiece")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=29, **sizes)
    theirs = transformers.BertForQuestionAnswering(config).eval()
    for weight in theirs.parameters():
        weight.data.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = mb.load(tmp_path)
    for question in ("Who said it?", "What is the LORD?"):
        windows = QuestionEncoder(tokenizer, 29)(question, CONTEXT)
        with torch.no_grad():
            outputs = [theirs(torch.tensor([w.ids]), token_type_ids=torch.tensor([w.segments])) for w in windows]
        logits = [torch.stack((output.start_logits[0], output.end_logits[0]), -1) for output in outputs]
        expected = spans_by_enumeration(windows, logits, 30, False)[:3]
        answers = pipe.answer(question, CONTEXT, n_best=3)
        assert [(answer.start, answer.end) for answer in answers] == [span for span, _ in expected]
        assert [answer.score for answer in answers] == pytest.approx([score for _, score in expected], abs=1e-3)


def test_the_summary_counts_truncated_questions(tmp_path):
    data = tmp_path / "questions.json"
    questions = [
        row._replace(question="who spake " * 9) if index % 7 == 0 else row for index, row in enumerate(make_questions())
    ]
    data.write_text(json.dumps(to_squad_json(questions)), encoding="utf-8")
    model = {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 19}
    recipe = {"data": {"corpus": str(data)}, "tokenizer": {"kind": "word", "vocab": 64}, "model": model}
    task_data = build_task_data(parse_recipe(recipe | {"train": {"objective": "question_answering"}}), 19)
    assert task_data.summary == "57 questions to train on (9 of them cut to half a window)"
