"""Answers that are spans of a text: windows, decoding, the loss and the official measure, against independent ones."""

import json

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.config.schema import from_dict
from monoblock.data.readers.records import Question
from monoblock.data.readers.squad import to_squad_json
from monoblock.errors import ConfigError, InputError
from monoblock.metrics.squad import exact_match, f1_score, normalize_answer, score_answers
from monoblock.recipes.schema import Recipe
from monoblock.runs.build_data import build_task_data
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.question_answering.predict import answer_questions, best_spans
from monoblock.tasks.question_answering.windows import NO_ANSWER, ContextWindow, QuestionEncoder
from monoblock.training.loss import CrossEntropyLoss

CONTEXT = "And Moses said unto the  people — é, Fear ye not: stand still; and Aaron went up. The LORD is one LORD."
KINDS = {"bpe": 300, "wordpiece": 90, "unigram": 80, "char": 70, "word": 60}


def tokenizer(kind="bpe", lowercase=False):
    texts = [CONTEXT, "Who said unto the people, Fear ye not?"] * 3
    return mb.Tokenizer.train(kind, texts, KINDS[kind], specials=["pad", "cls", "sep", "mask"], lowercase=lowercase)


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("longest", "stride"), [(None, None), (29, None), (29, 5), (17, 100)])
def test_windows_cover_the_context_and_know_its_characters(kind, longest, stride):
    cut = tokenizer(kind)
    windows = QuestionEncoder(cut, longest, stride)("Who said it?", CONTEXT)
    assert (len(windows) == 1) == (longest is None or len(windows[0].offsets) == len(cut.pieces(CONTEXT)))
    seen = set()
    for window in windows:
        assert longest is None or len(window.ids) <= longest
        assert len(window.ids) == len(window.segments)
        inside = window.ids[window.context_start : window.context_start + len(window.offsets)]
        assert window.segments[window.context_start : window.context_start + len(window.offsets)] == [1] * len(
            window.offsets
        )
        assert window.ids[0] == cut.cls_id
        assert window.ids[window.context_start - 1] == window.ids[-1] == cut.sep_id
        for number, (start, end) in zip(inside, window.offsets, strict=True):
            assert CONTEXT[start:end] == CONTEXT[start:end].strip()
            assert kind != "char" or start == end or cut.token(number) == CONTEXT[start:end]
            seen.update(range(start, end))
    assert seen == {place for place, sign in enumerate(CONTEXT) if not sign.isspace()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_to_places_and_back_to_the_same_characters(kind):
    window = QuestionEncoder(tokenizer(kind))("Who?", CONTEXT)[0]
    for answer in ("Moses", "the  people — é", "stand still", "And Moses said", "one LORD"):
        start = CONTEXT.index(answer)
        first, last = window.token_span(start, start + len(answer))
        a, b = window.offsets[first - window.context_start][0], window.offsets[last - window.context_start][1]
        assert CONTEXT[a:b].startswith(answer)
        assert CONTEXT[a:b].rstrip(",.;:") == answer, "but for a sign that a tokenizer of words leaves on"


def test_a_window_without_the_whole_answer_is_asked_for_nowhere():
    windows = QuestionEncoder(tokenizer("char"), 41, 11)("Who?", CONTEXT)
    start = CONTEXT.index("Aaron went up")
    found = [window.token_span(start, start + 13) for window in windows]
    assert (NO_ANSWER, NO_ANSWER) in found
    whole = [place for place in found if place != (NO_ANSWER, NO_ANSWER)]
    assert whole
    assert all(last - first == 12 for first, last in whole)


def test_a_gold_answer_with_spaces_around_it_is_found_all_the_same(tmp_path):
    data = tmp_path / "questions.json"
    asked = [Question("who?", f"then said Ruth {n}", (" Ruth ",), (9,), str(n)) for n in range(20)]
    data.write_text(json.dumps(to_squad_json(asked)), encoding="utf-8")
    model = {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 31}
    parts = {"data": {"corpus": str(data)}, "tokenizer": {"kind": "word", "vocab": 64}, "model": model}
    ground = build_task_data(from_dict(Recipe, parts | {"train": {"objective": "answers", "batch": 18}}), 31)
    batch = ground.build_batch(ground.batch_plan.batch_at(0))
    where = {int(ids[first]) for ids, (first, _) in zip(batch.inputs["source"], batch.labels.tolist(), strict=True)}
    assert where == {ground.tokenizer.id("Ruth")}


def test_a_lower_casing_tokenizer_leaves_the_text_as_it_was_given():
    small = tokenizer("wordpiece", lowercase=True)
    window = QuestionEncoder(small)("who?", CONTEXT)[0]
    first, last = window.token_span(4, 9)
    assert (
        CONTEXT[window.offsets[first - window.context_start][0] : window.offsets[last - window.context_start][1]]
        == "Moses"
    )
    assert "m" in {sign for number in window.ids[first : last + 1] for sign in small.token(number)}


def test_a_long_question_leaves_half_a_window_to_the_context():
    windows = QuestionEncoder(tokenizer("char"), 31)("Who said unto the people, Fear ye not, stand still?", CONTEXT)
    assert all(len(window.ids) <= 31 for window in windows)
    assert len(windows[0].offsets) == 14
    with pytest.raises(ConfigError, match="6 tokens are too few"):
        QuestionEncoder(tokenizer("char"), 6)


def test_the_pair_is_framed_as_transformers_frames_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    cut = tokenizer("wordpiece")
    cut.save_pretrained(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    options = {"max_length": 23, "stride": 6, "truncation": "only_second", "return_overflowing_tokens": True}
    wanted = theirs("Who said it?", CONTEXT, return_offsets_mapping=True, return_token_type_ids=True, **options)
    room = 23 - 3 - len(cut.encode("Who said it?"))
    windows = QuestionEncoder(cut, 23, room - 6)(
        "Who said it?", CONTEXT
    )  # theirs is the overlap, ours what is moved on by
    assert [window.ids for window in windows] == wanted["input_ids"]
    assert [window.segments for window in windows] == wanted["token_type_ids"]
    for window, offsets in zip(windows, wanted["offset_mapping"], strict=True):
        assert window.offsets == [
            tuple(one) for one in offsets[window.context_start : window.context_start + len(window.offsets)]
        ]


# -- decoding ---------------------------------------------------------------------------------------------------------


def brute(windows, scores, longest, impossible):
    """Every span of every window, one by one; best first."""
    found = {}
    for window, table in zip(windows, scores, strict=True):
        for i, (start, _) in enumerate(window.offsets):
            for j in range(i, min(i + longest, len(window.offsets))):
                if window.offsets[i][0] < window.offsets[i][1] and window.offsets[j][0] < window.offsets[j][1]:
                    key = (start, window.offsets[j][1])
                    score = float(table[window.context_start + i, 0] + table[window.context_start + j, 1])
                    found[key] = max(score, found.get(key, -1e9))
    if impossible:
        found[0, 0] = min(float(table[0].sum()) for table in scores)
    return sorted(found.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize(("longest", "room"), [(1, None), (5, None), (30, 23), (7, 19)])
def test_the_best_spans_are_those_of_a_search_through_all(longest, room, impossible):
    windows = QuestionEncoder(tokenizer(), room)("Who said it?", CONTEXT)
    draw = torch.Generator().manual_seed(longest)
    for _ in range(7):
        scores = [torch.randn(len(window.ids), 2, generator=draw) for window in windows]
        wanted = brute(windows, scores, longest, impossible)[:5]
        found = best_spans(windows, scores, CONTEXT, n_best=5, longest=longest, impossible=impossible)
        assert [(one.start, one.end) for one in found] == [key for key, _ in wanted]
        assert [one.score for one in found] == pytest.approx([score for _, score in wanted], abs=1e-5)
        assert all(one.text == CONTEXT[one.start : one.end] for one in found)
        assert all(one.text == one.text.strip() for one in found)


def test_probabilities_are_shares_of_all_spans():
    windows = QuestionEncoder(tokenizer("word"))("Who?", CONTEXT)
    scores = [torch.randn(len(windows[0].ids), 2, generator=torch.Generator().manual_seed(3))]
    every = best_spans(windows, scores, CONTEXT, n_best=10_000, longest=100, impossible=True)
    count = len(windows[0].offsets)
    assert len(every) == count * (count + 1) // 2 + 1
    assert sum(one.probability for one in every) == pytest.approx(1, abs=1e-5)
    assert [one.probability for one in every] == sorted((one.probability for one in every), reverse=True)


def test_no_answer_is_given_only_where_it_may_be_and_by_the_least_sure_window():
    windows = [ContextWindow([1, 5, 2, 7, 8, 2], [0, 0, 0, 1, 1, 1], 3, [(0, 3), (4, 6)])] * 2
    sure, unsure = torch.zeros(6, 2), torch.zeros(6, 2)
    sure[0], unsure[0] = 9.0, 1.0
    unsure[4] = 2.0
    found = best_spans(windows, [sure, unsure], "abc de", impossible=True)[0]
    assert (found.text, found.start) == ("de", 4)
    assert best_spans(windows, [sure, sure], "abc de", impossible=True)[0].text == ""
    assert best_spans(windows, [sure, sure], "abc de")[0].text != ""


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_published_one_and_padding_changes_nothing():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    theirs = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=31, **sizes)).eval()
    ids, answer = torch.randint(31, (3, 13)), torch.tensor([[2, 5], [0, 0], [7, 12]])
    with torch.no_grad():
        wanted = theirs(ids, start_positions=answer[:, 0], end_positions=answer[:, 1])
        logits = torch.stack((wanted.start_logits, wanted.end_logits), -1)
        loss = CrossEntropyLoss(over_positions=True)
        found = loss(lambda source: logits, {"source": ids}, answer)
    assert float(found) / answer.numel() == pytest.approx(float(wanted.loss), rel=1e-5)
    longer = torch.cat((logits, torch.full((3, 4, 2), 50.0)), 1)
    real = torch.arange(17).expand(3, 17) < 13
    padded = loss(lambda source, attention_mask: longer, {"source": ids, "attention_mask": real}, answer)
    assert torch.equal(padded, found)


# -- the measure ------------------------------------------------------------------------------------------------------

# Answer, gold answers, exact match, F1: each worked out by hand from the official definition.
CASES = [
    ("the king", ["King"], 1, 1),  # articles and capitals do not count
    ("Moses", ["Moses", "the prophet"], 1, 1),  # the nearest gold answer counts
    ("King David", ["David"], 0, 2 / 3),  # 1 of 2 and 1 of 1: 2 · 0.5 · 1 / 1.5
    ("David", ["the king David of Judah"], 0, 2 / 5),  # 1 of 1 and 1 of 4
    ("Saul, the son of Kish.", ["Saul the son of Kish"], 1, 1),  # punctuation does not count
    ("Aaron", ["Moses"], 0, 0),
    ("don't", ["dont"], 1, 1),  # a sign is taken out, not made a space
    ("to to to", ["to"], 0, 1 / 2),  # words count as often as they occur: 1 of 3 and 1 of 1
    ("", [], 1, 1),  # there was no answer, and none was given
    ("Moses", [], 0, 0),  # there was none, and one was given
    ("", ["Moses"], 0, 0),
    ("a an the", ["Moses", "..."], 0, 0),  # nothing is left of the answer, and "..." is no gold answer
]


@pytest.mark.parametrize(("answer", "golds", "same", "share"), CASES)
def test_exact_match_and_f1_by_hand(answer, golds, same, share):
    assert exact_match(answer, golds) == same
    assert f1_score(answer, golds) == pytest.approx(share)


def test_the_measure_is_that_of_transformers_on_random_answers():
    metrics = pytest.importorskip("transformers.data.metrics.squad_metrics")
    draw = np.random.default_rng(5)
    words = np.array(["the", "a", "Moses", "moses,", "king", "of", "an", "Judah.", "—", "son's", "7"])
    texts = [" ".join(draw.choice(words, draw.integers(0, 6))) for _ in range(400)]
    for answer, gold in zip(texts[:200], texts[200:], strict=True):
        assert normalize_answer(answer) == metrics.normalize_answer(answer)
        if metrics.normalize_answer(gold):
            assert exact_match(answer, [gold]) == metrics.compute_exact(gold, answer)
            assert f1_score(answer, [gold]) == pytest.approx(metrics.compute_f1(gold, answer))


def test_means_over_questions_and_over_both_sorts():
    found = score_answers(["Moses", "King David", "", "Saul"], [["Moses"], ["David"], [], []])
    assert found["exact_match"] == 50
    assert found["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1) / 4)
    assert found["answerable_exact_match"] == 50
    assert found["answerable_f1"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert found["unanswerable_accuracy"] == 50
    assert (found["questions"], found["unanswerable"]) == (4, 2)
    assert "answerable_f1" not in score_answers(["a"], [["b"]])
    with pytest.raises(InputError, match="1 answers to 0 questions"):
        score_answers(["a"], [])


# -- from a file to answers -------------------------------------------------------------------------------------------

NAMES = ["Moses", "Aaron", "David", "Saul", "Joab", "Esther", "Ruth", "Gideon"]
RECIPE = """
[data]
corpus = "{}"
impossible = {}
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
objective = "answers"
steps = {}
batch = 16
lr = 2e-2
optimizer = "muon"
warmup = 5
eval_every = 0
device = "cpu"
compile = "no"
"""


def rows(impossible=False):
    """The name that follows "said" is the answer; with "died" there is none."""
    made = []
    for n in range(64):
        one, other = NAMES[n % 8], NAMES[(3 * n + 1 + n // 8) % 8]
        context = f"then said {one} unto {other} go up"
        made.append(Question(f"who spake {n % 4}", context, (one,), (10,), f"a{n}"))
        if impossible:
            made.append(Question(f"who died {n % 4}", context, (), (), f"b{n}"))
    return made


def trained(place, impossible=False, steps=150):
    data = place / "questions.json"
    data.write_text(json.dumps(to_squad_json(rows(impossible))), encoding="utf-8")
    (place / "recipe.toml").write_text(RECIPE.format(data, str(impossible).lower(), steps), encoding="utf-8")
    assert run(["train", str(place / "recipe.toml"), "--out", str(place / "run")]) == 0
    torch.use_deterministic_algorithms(False)
    return place / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("answers"), impossible=True)


def test_a_model_learns_what_answers_and_when_nothing_does(folder):
    pipe = mb.load(folder)
    assert pipe.answer("who spake 1", "then said Ruth unto Joab go up") == "Ruth"
    assert pipe.answer("who died 1", "then said Ruth unto Joab go up") == ""
    assert pipe.answer("who died 1", "then said Ruth unto Joab go up", impossible=False) != ""
    several = pipe.answer(["who spake 2", "who died 3"], ["then said Saul unto Ruth go up"] * 2)
    assert several == ["Saul", ""]
    assert pipe.answer([("who spake 2", "then said Saul unto Ruth go up")]) == ["Saul"]
    with pytest.raises(InputError, match="line 2: the text is empty"):
        pipe.answer(["who?", "who?"], ["he", " "])


def test_an_answer_is_always_a_slice_of_the_text_even_where_nothing_is_known(folder):
    pipe = mb.load(folder)
    text = "  Strange — wörds\tand 7 more; of which none was seen before, over and over " * 5
    for one in pipe.answer("what is this?", text, n_best=5, impossible=False):
        assert one.text
        assert text[one.start : one.end] == one.text
    assert len(pipe.answer("what?", text, n_best=1, longest=1, impossible=False)[0].text.split()) == 1


def test_batches_and_neighbours_change_no_answer(folder):
    pipe = mb.load(folder)
    some = [(row.question, row.context + " and went" * (n % 5)) for n, row in enumerate(rows(True)[:23])]
    alone = [answer_questions(pipe.loaded, [one], n_best=3)[0] for one in some]
    together = answer_questions(pipe.loaded, some, n_best=3, batch=7)
    for a, b in zip(alone, together, strict=True):
        assert [one[:3] for one in a] == [one[:3] for one in b]
        assert [one.probability for one in a] == pytest.approx([one.probability for one in b], abs=1e-5)


def test_evaluate_prints_the_official_figures_of_a_whole_strange_file(folder, tmp_path, capsys):
    strange = tmp_path / "dev.json"
    strange.write_text(json.dumps(to_squad_json(rows(True)[:11])), encoding="utf-8")
    assert run(["evaluate", str(folder), str(strange), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    pipe = mb.load(folder)
    texts = [pipe.answer(row.question, row.context) for row in rows(True)[:11]]
    wanted = score_answers(texts, [row.answers for row in rows(True)[:11]])
    assert {name: told[name] for name in wanted} == pytest.approx(wanted)
    assert (told["questions"], told["split"]) == (11, "all")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "val_exact_match" in card
    assert "val_f1" in card


def test_predict_reads_a_question_and_a_text_a_line(folder, capsys):
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


def test_questions_without_answers_must_be_expected(tmp_path):
    data = tmp_path / "questions.json"
    data.write_text(json.dumps(to_squad_json(rows(True))), encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE.format(data, "false", 1), encoding="utf-8")
    assert run(["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]) != 0
    one = from_dict(
        Recipe,
        {
            "data": {"corpus": str(data)},
            "model": {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 31},
            "train": {"objective": "answers"},
        },
    )
    with pytest.raises(ConfigError, match=r"57 of 115 questions of .* have no answer; write data.impossible=true"):
        build_task_data(one, 31)


def test_every_question_is_asked_for_its_places(tmp_path):
    data = tmp_path / "questions.json"
    data.write_text(json.dumps(to_squad_json(rows())), encoding="utf-8")
    parts = {"corpus": str(data), "stride": 2}
    model = {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 11}
    recipe = {"data": parts, "tokenizer": {"kind": "word", "vocab": 64}, "model": model}
    ground = build_task_data(from_dict(Recipe, recipe | {"train": {"objective": "answers", "batch": 13}}), 11)
    batches = [ground.build_batch(ground.batch_plan.batch_at(step)) for step in range(9)]
    found = 0
    for batch in batches:
        assert batch.labels.shape == (batch.batch_size, 2)
        assert batch.inputs["segments"].shape == batch.inputs["source"].shape
        for ids, (first, last) in zip(batch.inputs["source"], batch.labels.tolist(), strict=True):
            said = ground.tokenizer.id("said")
            if first or last:
                assert first == last
                assert ids[first - 1] == said or said not in ids.tolist()
                found += 1
            else:
                assert said not in ids.tolist() or ids.tolist()[-2] == said
    assert found >= 50


def test_a_model_without_the_head_says_what_it_is_for():
    config = mb.bert(vocab=31, width=16, depth=1, heads=2, context=19)
    pipe = Pipeline(LoadedModel(mb.Transformer(config), tokenizer()))
    with pytest.raises(InputError, match="answer needs a model with the head 'spans'"):
        pipe.answer("who?", "he")


def test_a_published_model_answers_as_its_own_logits_say(tmp_path):
    transformers = pytest.importorskip("transformers")
    cut = tokenizer("wordpiece")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=cut.vocab_size, max_position_embeddings=29, **sizes)
    theirs = transformers.BertForQuestionAnswering(config).eval()
    for weight in theirs.parameters():
        weight.data.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path)
    cut.save_pretrained(tmp_path)
    pipe = mb.load(tmp_path)
    for question in ("Who said it?", "What is the LORD?"):
        windows = QuestionEncoder(cut, 29)(question, CONTEXT)
        with torch.no_grad():
            out = [theirs(torch.tensor([w.ids]), token_type_ids=torch.tensor([w.segments])) for w in windows]
        logits = [torch.stack((one.start_logits[0], one.end_logits[0]), -1) for one in out]
        wanted = brute(windows, logits, 30, False)[:3]
        found = pipe.answer(question, CONTEXT, n_best=3)
        assert [(one.start, one.end) for one in found] == [key for key, _ in wanted]
        assert [one.score for one in found] == pytest.approx([score for _, score in wanted], abs=1e-3)


def test_questions_that_lose_their_end_are_told(tmp_path):
    data = tmp_path / "questions.json"
    long = [row._replace(question="who spake " * 9) if number % 7 == 0 else row for number, row in enumerate(rows())]
    data.write_text(json.dumps(to_squad_json(long)), encoding="utf-8")
    model = {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 19}
    recipe = {"data": {"corpus": str(data)}, "tokenizer": {"kind": "word", "vocab": 64}, "model": model}
    ground = build_task_data(from_dict(Recipe, recipe | {"train": {"objective": "answers"}}), 19)
    assert ground.summary == "57 questions to train on (9 of them cut to half a window)"
