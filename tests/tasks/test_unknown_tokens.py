"""A tokenizer that does not know the training text is refused before training, with what to do."""

import pytest

import monoblock as mb
from monoblock.errors import ConfigError
from monoblock.runs.build_data import MAX_CHARACTERS, build_task_data, unknown_share
from monoblock.runs.recipe import parse_recipe

ENGLISH = "the king went up to the land of the north and came down again"
GERMAN = "Ärger über größere Häuser führt zu süßen Träumen"


def make_recipe(path, **tokenizer):
    model = {"family": "gpt", "width": 16, "depth": 1, "heads": 2, "context": 16}
    return parse_recipe({"data": {"corpus": str(path)}, "tokenizer": tokenizer, "model": model})


@pytest.fixture
def german(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"{GERMAN} " * 60, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["char", "wordpiece", "unigram"])
def test_a_loaded_tokenizer_that_does_not_know_the_text_is_refused(kind, german, tmp_path):
    mb.Tokenizer.train(kind, [ENGLISH], 60).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"% of the tokens of .*a\.txt are unknown.*leave out tokenizer\.folder"):
        build_task_data(make_recipe(german, folder=str(tmp_path / "tokenizer")), 16)


def test_a_vocabulary_with_too_few_characters_is_refused(german):
    with pytest.raises(ConfigError, match=r"are unknown to the tokenizer.*; raise tokenizer\.vocab=12, or write"):
        build_task_data(make_recipe(german, kind="char", vocab=12), 16)


def test_a_tokenizer_that_knows_every_byte_is_not_measured(german, tmp_path):
    mb.Tokenizer.train("bpe", [ENGLISH], 300).save_pretrained(tmp_path / "tokenizer")
    task_data = build_task_data(make_recipe(german, folder=str(tmp_path / "tokenizer")), 16)
    assert task_data.tokenizer.kind == "bpe"
    assert not any("unknown" in str(notice) for notice in task_data.notices)


@pytest.mark.parametrize(("rare", "refused"), [(1, False), (5, False), (40, True)])
def test_a_vocabulary_of_words_may_leave_out_rare_words(tmp_path, rare, refused):
    lines = [" ".join(f"common{n}" for n in range(50 - rare)) for _ in range(40)]
    rows = [f"{line} {' '.join(f'rare{n}x{row}' for n in range(rare))}\n" for row, line in enumerate(lines)]
    (tmp_path / "a.txt").write_text("".join(rows), encoding="utf-8")
    recipe = make_recipe(tmp_path / "a.txt", kind="word", vocab=53 - rare)
    if refused:
        with pytest.raises(ConfigError, match="are unknown to the tokenizer"):
            build_task_data(recipe, 16)
        return
    said = [event for event in build_task_data(recipe, 16).notices if "unknown" in event.decision]
    assert len(said) == (rare == 5)


def test_an_unknown_token_that_is_written_out_in_the_text_does_not_count():
    tokenizer = mb.Tokenizer.train("word", ["the <unk> king"] * 3, 10)
    assert tokenizer.encode("<unk>") == [tokenizer.unk_id]
    assert unknown_share(tokenizer, ["the <unk> king"] * 50) == 0
    assert unknown_share(tokenizer, ["the queen"] * 50) == 0.5


@pytest.mark.parametrize(
    "texts", [["known known other"] * (MAX_CHARACTERS // 4), ["known known other " * MAX_CHARACTERS]]
)
def test_a_long_corpus_is_measured_in_parts(texts):
    tokenizer = mb.Tokenizer.train("word", ["known"], 10)
    assert unknown_share(tokenizer, texts) == pytest.approx(1 / 3, rel=0.01)
