"""`monoblock generate` and `monoblock chat`: what they print, in a terminal or through a pipe, and what they refuse."""

import io
import json
import sys

import decoding_folders as folders
import pytest

import monoblock as mb
from monoblock.cli.main import run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def speaker(place):
    return str(folders.causal(place))


@pytest.fixture(scope="module")
def talker(place):
    pytest.importorskip("transformers")
    return str(folders.published(place, "gpt2"))


@pytest.fixture
def typed(monkeypatch):
    """Text on standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_text_is_printed_with_its_prompt_and_the_next_verb_on_stderr(speaker, capsys):
    assert run(["generate", speaker, "And the 7", "--temperature", "0", "--max-new-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    wanted = mb.load(speaker).generate("And the 7", temperature=0, max_new_tokens=9)
    assert out == f"And the 7{wanted}\n"
    assert err.splitlines()[-1] == f"Try: monoblock bench {speaker}"


@pytest.mark.parametrize(
    "words",
    [
        ["--temperature", "0", "--num-beams", "3"],
        ["--seed", "5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01"],
        ["--seed", "5", "--num-return-sequences", "2", "--temperature", "1.5"],
    ],
)
def test_json_is_one_object_with_counts_and_reasons(speaker, words, capsys):
    assert run(["generate", speaker, "And the 7", "--max-new-tokens", "9", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == "And the 7"
    assert found["prompt_tokens"] == len(mb.load(speaker).tokenizer.encode("And the 7"))
    options = {words[n][2:].replace("-", "_"): float(words[n + 1]) for n in range(0, len(words), 2)}
    options = {
        name: value if name in ("temperature", "top_p", "min_p") else int(value) for name, value in options.items()
    }
    wanted = mb.load(speaker).answers(["And the 7"], max_new_tokens=9, **options)[0]
    assert [(text["text"], text["tokens"], text["finished"]) for text in found["texts"]] == [
        (answer.text, answer.tokens, answer.finished) for answer in wanted
    ]
    assert ("score" in found["texts"][0]) == ("--num-beams" in words)


def test_a_draft_changes_nothing_but_the_time(speaker, capsys):
    words = ["generate", speaker, "And the 7", "--seed", "5", "--temperature", "0.7", "--max-new-tokens", "19"]
    texts = []
    for more in ([], ["--draft", "8-bit"]):
        assert run([*words, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert run([*words, "--draft", "7-bit"]) == 2
    assert "'8-bit' or '4-bit'" in capsys.readouterr().err


def test_a_stop_string_ends_the_text(speaker, capsys):
    words = ["generate", speaker, "And the 7", "--temperature", "0", "--max-new-tokens", "20"]
    assert run(words) == 0
    whole = capsys.readouterr().out.removesuffix("\n").removeprefix("And the 7")
    stop = whole[6:8]
    assert run([*words, "--stop", stop, "--stop", "never said"]) == 0
    assert capsys.readouterr().out == f"And the 7{whole[: whole.index(stop)]}\n"


def test_a_prompt_may_come_through_a_pipe(speaker, typed, capsys):
    typed("And the 7")
    assert run(["generate", speaker, "-", "--temperature", "0", "--max-new-tokens", "5"]) == 0
    piped = capsys.readouterr().out
    run(["generate", speaker, "And the 7", "--temperature", "0", "--max-new-tokens", "5"])
    assert piped == capsys.readouterr().out


def test_without_a_prompt_a_text_begins_with_the_start_token(talker, capsys):
    assert run(["generate", talker, "--max-new-tokens", "5"]) == 0
    pipe = mb.load(talker)
    assert capsys.readouterr().out == pipe.generate("", max_new_tokens=5) + "\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--temperature", "-1"], 2, "temperature=-1.0 cannot be"),
        (["--num-beams", "2", "--temperature", "0.5"], 2, "temperature=0 or num_beams=1"),
        (["--top-p", "x"], 2, "not a valid float"),
        (["--num-beems", "2"], 2, "--num-beams"),
        (["--stop", ""], 1, "empty stop string"),
        (["--dtype", "fp7"], 2, "no format for weights"),
    ],
)
def test_what_cannot_be_is_one_line(speaker, words, code, said, capsys):
    assert run(["generate", speaker, "And", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


def test_no_model_no_start_and_too_long_a_prompt_are_one_line(speaker, capsys):
    for words, said in [
        (["generate", "nowhere", "And"], "there is no nowhere"),
        (["generate", speaker], "no start token"),
        (["generate", speaker, "king " * 60], "leaves no room"),
        (["chat", speaker], "no chat template"),
    ]:
        assert run(words) == 1
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        assert said in err


# -- chat -------------------------------------------------------------------------------------------------------------


def test_a_conversation_through_a_pipe_remembers_until_it_is_reset(talker, typed, capsys):
    typed("the king\n\nthe house\n/reset\nthe king\n/exit\nnever read\n")
    assert run(["chat", talker, "--max-new-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    pipe = mb.load(talker)
    said = lambda messages: pipe.chat(messages, max_new_tokens=6)
    first = said([{"role": "user", "content": "the king"}])
    second = said(
        [
            {"role": "user", "content": "the king"},
            {"role": "assistant", "content": first.strip()},
            {"role": "user", "content": "the house"},
        ]
    )
    assert out == f"{first}\n{second}\n{first}\n"
    assert "a new conversation" in err
    assert err.splitlines()[-1].startswith("Try: monoblock bench")


def test_a_conversation_as_json_is_an_object_a_line(talker, typed, capsys):
    typed("the king\nthe house\n")
    assert run(["chat", talker, "--max-new-tokens", "4", "--json", "--system", "Be brief."]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["role"] for row in rows] == ["assistant", "assistant"]
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the king"}]
    assert rows[0]["content"] == mb.load(talker).chat(system, max_new_tokens=4).strip()


def test_a_conversation_that_no_longer_fits_is_one_line(talker, typed, capsys):
    typed("the king " * 60 + "\n")
    assert run(["chat", talker]) == 1
    assert "leaves no room" in capsys.readouterr().err
