"""Receipts and batches: answers that are derived again, and files of requests."""

import json

import pytest
from serving_support import ask, tiny_app, tiny_pipeline

from monoblock.cli.main import run
from monoblock.errors import FileError
from monoblock.serving.batch import read_finished, read_requests
from monoblock.serving.receipts import replay
from monoblock.serving.served_model import ServedModel


def receipt_of(**body):
    ((status, answer),) = ask(tiny_app(exact=True), ("/v1/completions", {"prompt": "In the", "receipt": True, **body}))
    assert status == 200
    return json.loads(json.dumps(answer["receipt"]))


@pytest.mark.parametrize(
    "body", [{"max_tokens": 9, "seed": 3, "n": 2}, {"num_beams": 3, "n": 2}, {"prompt": ["a", "b"], "seed": 1}]
)
def test_a_receipt_is_derived_again(body):
    receipt = receipt_of(**body)
    result = replay(receipt, ServedModel("tiny", tiny_pipeline(), exact=True))
    assert result.is_equal
    assert not result.differences
    assert "no signature" in receipt["note"]


def test_a_receipt_has_the_edits_of_its_answer():
    edit = {"names": "decoder.1.output", "method": "zero", "heads": None, "positions": None}
    body = {"prompt": "In the", "max_tokens": 6, "temperature": 0, "receipt": True, "inspect": {"edits": [edit]}}
    ((status, answer),) = ask(tiny_app(), ("/v1/completions", body))
    assert status == 200
    assert answer["receipt"]["answers"][0]["edits"] == [edit]
    model = ServedModel("tiny", tiny_pipeline())
    assert replay(answer["receipt"], model).is_equal
    answer["receipt"]["answers"][0]["edits"] = []
    assert not replay(answer["receipt"], model).is_equal


def test_replay_names_what_differs_and_the_first_token():
    receipt = receipt_of(max_tokens=9, seed=3)
    receipt["answers"][0]["texts"][0][4] += 1
    receipt["computed_with"]["torch"] = "0.1"
    result = replay(receipt, ServedModel("tiny", tiny_pipeline(), exact=True))
    assert result.first_difference[:3] == (0, 0, 4)
    assert list(result.differences) == ["torch"]


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"version": 9},
        {"version": 1, "computed_with": {}, "answers": [{}]},
        {"version": 1, "computed_with": 3, "answers": 4},
        {"version": 1, "computed_with": {}, "answers": []},
    ],
)
def test_what_is_no_receipt_is_one_line(broken):
    with pytest.raises(FileError, match="receipt"):
        replay(broken, ServedModel("tiny", tiny_pipeline()))


@pytest.fixture
def folder(tmp_path):
    pipe = tiny_pipeline()
    pipe.model.save_pretrained(tmp_path / "tiny")
    pipe.tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path


def line(name, **body):
    request = {"custom_id": name, "method": "POST", "url": "/v1/completions"}
    return json.dumps({**request, "body": {"model": "tiny", "prompt": "In the", "max_tokens": 3, **body}}) + "\n"


def test_a_batch_answers_every_request_once_and_goes_on_after_a_kill(folder):
    (folder / "in.jsonl").write_text("".join(line(f"r{n}", seed=n) for n in range(7)))
    call = ["batch", str(folder / "in.jsonl"), "--model", str(folder / "tiny"), "--out", str(folder / "out.jsonl")]
    assert run(call) == 0
    results = {row["custom_id"]: row for row in map(json.loads, (folder / "out.jsonl").read_text().splitlines())}
    assert sorted(results) == [f"r{n}" for n in range(7)]
    assert all(row["response"]["status_code"] == 200 for row in results.values())
    lines = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "out.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])  # as a kill leaves it
    assert run(call) == 0
    again = {row["custom_id"]: row for row in map(json.loads, (folder / "out.jsonl").read_text().splitlines())}
    texts = [{name: row["response"]["body"]["choices"] for name, row in one.items()} for one in (results, again)]
    assert texts[0] == texts[1]
    assert len((folder / "out.jsonl").read_text().splitlines()) == 7


def test_a_request_that_fails_does_not_stop_the_others(folder):
    (folder / "in.jsonl").write_text(line("good") + line("bad", temprature=1))
    call = ["batch", str(folder / "in.jsonl"), "--model", str(folder / "tiny"), "--out", str(folder / "out.jsonl")]
    assert run(call) == 1
    rows = {
        row["custom_id"]: row["response"] for row in map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    }
    assert rows["good"]["status_code"] == 200
    assert rows["bad"]["status_code"] == 400


@pytest.mark.parametrize(
    "text", ["{", "[]\n", '{"custom_id": 1}\n', line("a") + line("a"), line("a").replace("POST", "GET")]
)
def test_a_file_that_is_no_batch_is_one_line(tmp_path, text):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(FileError, match=r"in\.jsonl"):
        list(read_requests(tmp_path / "in.jsonl"))


def test_a_batch_asks_routes_that_do_not_stream_and_goes_on_after_an_odd_line(folder):
    requests = [
        {"custom_id": "e", "url": "/v1/embeddings", "body": {"model": "tiny", "input": "a"}},
        {"custom_id": "\ud800", "url": "/v1/\ud800", "body": {}},
        {"custom_id": "t", "url": "/tokenize", "body": {"model": "tiny", "text": "In the"}},
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    call = ["batch", str(folder / "in.jsonl"), "--model", str(folder / "tiny"), "--out", str(folder / "out.jsonl")]
    assert run(call) == 1
    rows = {
        row["custom_id"]: row["response"] for row in map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    }
    assert [rows[name]["status_code"] for name in ("e", "t")] == [200, 200]
    assert rows["\ud800"]["status_code"] >= 400
    assert run(call) == 1  # what has failed before still counts


def test_results_of_something_else_are_not_overwritten(tmp_path):
    (tmp_path / "out.jsonl").write_text("a diary\n")
    with pytest.raises(FileError, match="--out"):
        read_finished(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "a diary\n"


def test_a_receipt_is_replayed_by_the_command_line(folder, capsys):
    (folder / "in.jsonl").write_text(line("a", seed=4, receipt=True))
    call = ["batch", str(folder / "in.jsonl"), "--model", str(folder / "tiny"), "--out", str(folder / "out.jsonl")]
    assert run(call) == 0
    answer = json.loads((folder / "out.jsonl").read_text())["response"]["body"]
    (folder / "answer.json").write_text(json.dumps(answer))
    call = ["replay", str(folder / "answer.json"), str(folder / "tiny"), "--json"]
    capsys.readouterr()
    assert run(call) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    answer["receipt"]["answers"][0]["texts"][0][0] += 1
    (folder / "answer.json").write_text(json.dumps(answer))
    assert run(call) == 3


def test_a_plan_says_what_fits(folder, capsys):
    assert run(["serve", str(folder / "tiny"), "--dry-run", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"] == "tiny"
    assert row["weights_bytes"] == sum(4 * weight.numel() for weight in tiny_pipeline().model.parameters())
    assert row["pages"] * 16 >= row["context"]
