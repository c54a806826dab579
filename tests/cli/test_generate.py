"""`monoblock generate` and `monoblock chat`: their output, on a terminal or a pipe, and their errors."""

import io
import json
import sys

import model_folders
import pytest

import monoblock as mb
from monoblock.cli.main import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def causal_model(folder):
    return str(model_folders.causal_folder(folder))


@pytest.fixture(scope="module")
def chat_model(folder):
    pytest.importorskip("transformers")
    return str(model_folders.hf_folder(folder, "gpt2"))


@pytest.fixture
def type_input(monkeypatch):
    """Set the text of standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_the_text_is_printed_after_its_prompt_and_a_suggestion_on_stderr(causal_model, capsys):
    assert run(["generate", causal_model, "And the 7", "--temperature", "0", "--max-new-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    expected = mb.load(causal_model).generate("And the 7", temperature=0, max_new_tokens=9)
    assert out == f"And the 7{expected}\n"
    assert err.splitlines()[-1] == f"Try: monoblock bench {causal_model}"


NOTE = "note: the text ends here because its context of 48 tokens, prompt included, is full"


@pytest.mark.parametrize(
    "arguments",
    [[], ["--num-beams", "3"], ["--num-beams", "3", "--num-return-sequences", "2"], ["--max-new-tokens", "100"]],
)
def test_a_text_that_ends_where_the_context_does_says_so_in_one_line(causal_model, arguments, capsys):
    common = ["--temperature", "0"] if arguments[:1] == ["--max-new-tokens"] else []
    assert run(["generate", causal_model, "And the 7", *common, *arguments]) == 0
    assert capsys.readouterr().err.splitlines().count(NOTE) == 1


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "9"], ["--json"]])
def test_another_end_and_json_which_has_the_reason_need_no_note(causal_model, arguments, capsys):
    assert run(["generate", causal_model, "And the 7", *arguments]) == 0
    assert NOTE not in capsys.readouterr().err


def test_an_answer_of_a_chat_that_ends_where_the_context_does_says_so(chat_model, type_input, capsys):
    type_input("Hello\n")
    assert run(["chat", chat_model, "--temperature", "0", "--max-new-tokens", "500", "--min-new-tokens", "400"]) == 0
    assert capsys.readouterr().err.count("note: the text ends here because its context of 128 tokens") == 1


def test_the_defaults_of_a_documented_run_fit_its_context_and_the_doctor_agrees(causal_model, capsys):
    """The recipe says nothing about `generate`, whose 120 tokens are more than the context of 48."""
    with open(f"{causal_model}/generation_config.json") as file:
        assert json.load(file)["max_new_tokens"] == 47
    run(["doctor", causal_model, "--json"])
    assert "generation_defaults" in json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "0", "--num-beams", "3"],
        ["--seed", "5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01"],
        ["--seed", "5", "--num-return-sequences", "2", "--temperature", "1.5"],
    ],
)
def test_json_is_one_object_with_token_counts_and_finish_reasons(causal_model, arguments, capsys):
    assert run(["generate", causal_model, "And the 7", "--max-new-tokens", "9", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] == "And the 7"
    assert result["prompt_tokens"] == len(mb.load(causal_model).tokenizer.encode("And the 7"))
    options = {arguments[n][2:].replace("-", "_"): float(arguments[n + 1]) for n in range(0, len(arguments), 2)}
    options = {
        name: value if name in ("temperature", "top_p", "min_p") else int(value) for name, value in options.items()
    }
    expected = mb.load(causal_model).generate_hypotheses(["And the 7"], max_new_tokens=9, **options)[0]
    assert [(text["text"], text["tokens"], text["finished"]) for text in result["texts"]] == [
        (answer.text, answer.num_tokens, answer.finish_reason) for answer in expected
    ]
    assert ("score" in result["texts"][0]) == ("--num-beams" in arguments)


def test_a_draft_does_not_change_the_text(causal_model, capsys):
    arguments = ["generate", causal_model, "And the 7", "--seed", "5", "--temperature", "0.7", "--max-new-tokens", "19"]
    texts = []
    for extra in ([], ["--draft", "8-bit"]):
        assert run([*arguments, *extra]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert run([*arguments, "--draft", "7-bit"]) == 2
    assert "'8-bit' or '4-bit'" in capsys.readouterr().err


def test_a_stop_string_ends_the_text(causal_model, capsys):
    arguments = ["generate", causal_model, "And the 7", "--temperature", "0", "--max-new-tokens", "20"]
    assert run(arguments) == 0
    full_text = capsys.readouterr().out.removesuffix("\n").removeprefix("And the 7")
    stop = full_text[6:8]
    assert run([*arguments, "--stop", stop, "--stop", "never generated"]) == 0
    assert capsys.readouterr().out == f"And the 7{full_text[: full_text.index(stop)]}\n"


def test_a_prompt_may_come_through_a_pipe(causal_model, type_input, capsys):
    type_input("And the 7")
    assert run(["generate", causal_model, "-", "--temperature", "0", "--max-new-tokens", "5"]) == 0
    piped = capsys.readouterr().out
    run(["generate", causal_model, "And the 7", "--temperature", "0", "--max-new-tokens", "5"])
    assert piped == capsys.readouterr().out


def test_without_a_prompt_a_text_begins_with_the_start_token(chat_model, capsys):
    assert run(["generate", chat_model, "--max-new-tokens", "5"]) == 0
    pipe = mb.load(chat_model)
    assert capsys.readouterr().out == pipe.generate("", max_new_tokens=5) + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--temperature", "-1"], 2, "temperature=-1.0 is not valid"),
        (["--num-beams", "2", "--temperature", "0.5"], 2, "temperature=0 or num_beams=1"),
        (["--top-p", "x"], 2, "not a valid float"),
        (["--num-beems", "2"], 2, "--num-beams"),
        (["--stop", ""], 1, "empty stop string"),
        (["--dtype", "fp7"], 2, "not a dtype for weights"),
    ],
)
def test_invalid_options_are_one_line_errors(causal_model, arguments, code, message, capsys):
    assert run(["generate", causal_model, "And", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_missing_model_or_start_token_and_a_long_prompt_are_one_line_errors(causal_model, capsys):
    for arguments, message in [
        (["generate", "nowhere", "And"], "there is no folder or file nowhere"),
        (["generate", causal_model], "no start token"),
        (["generate", causal_model, "king " * 60], "leaves no room"),
        (["chat", causal_model], "no chat template"),
    ]:
        assert run(arguments) == 1
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        assert message in err


# -- chat -------------------------------------------------------------------------------------------------------------


def test_a_conversation_through_a_pipe_remembers_until_it_is_reset(chat_model, type_input, capsys):
    type_input("the king\n\nthe house\n/reset\nthe king\n/exit\nnever read\n")
    assert run(["chat", chat_model, "--max-new-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    pipe = mb.load(chat_model)
    reply = lambda messages: pipe.chat(messages, max_new_tokens=6)
    first = reply([{"role": "user", "content": "the king"}])
    second = reply(
        [
            {"role": "user", "content": "the king"},
            {"role": "assistant", "content": first.strip()},
            {"role": "user", "content": "the house"},
        ]
    )
    assert out == f"{first}\n{second}\n{first}\n"
    assert "new conversation" in err
    assert err.splitlines()[-1].startswith("Try: monoblock bench")


def test_with_json_each_reply_is_one_object(chat_model, type_input, capsys):
    type_input("the king\nthe house\n")
    assert run(["chat", chat_model, "--max-new-tokens", "4", "--json", "--system", "Be brief."]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["role"] for row in rows] == ["assistant", "assistant"]
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the king"}]
    assert rows[0]["content"] == mb.load(chat_model).chat(system, max_new_tokens=4).strip()


def test_a_conversation_beyond_the_context_is_a_one_line_error(chat_model, type_input, capsys):
    type_input("the king " * 60 + "\n")
    assert run(["chat", chat_model]) == 1
    assert "leaves no room" in capsys.readouterr().err
