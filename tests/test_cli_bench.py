"""`monoblock bench`: every runner says the same tokens, and the figures are what was measured."""

import json

import decoding_folders as folders
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.cli.peers import RUNNERS, Absent, Bench, exported

SMALL = ["--prompt", "5", "--new", "4", "--rounds", "1"]


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    made = mb.Transformer(mb.gpt(vocab=97, width=64, depth=2, heads=4, context=32, activation="gelu_tanh")).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    return made


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("model") / "small"
    model.save_pretrained(place)
    return str(place)


def test_the_peers_continue_with_the_same_tokens(model, tmp_path):
    assert exported(model, tmp_path / "theirs") is None
    given = Bench(model, tmp_path / "theirs", "cpu", 1)
    ids = torch.randint(1, 97, (2, 5), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = RUNNERS["monoblock"](given).run(ids, 7)
    assert wanted.shape == (2, 12)
    assert torch.equal(RUNNERS["transformers"](given).run(ids, 7), wanted)
    pytest.importorskip("ctranslate2")
    said = RUNNERS["CTranslate2, fp32"](given).run(ids, 7)
    assert [result.sequences_ids[0] for result in said] == wanted[:, 5:].tolist()
    pytest.importorskip("llama_cpp")
    assert RUNNERS["llama.cpp, f32"](given).run(ids, 7) == wanted[:, 5:].tolist()


def test_a_peer_that_is_not_here_says_so(model, tmp_path, monkeypatch):
    from monoblock.cli import peers

    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    for name in RUNNERS:
        if not name.startswith("monoblock"):
            with pytest.raises(Absent, match="not installed"):
                RUNNERS[name](Bench(model, tmp_path, "cpu", 1))


def test_json_has_a_row_for_each_runner(folder, capsys):
    assert run(["bench", folder, *SMALL, "--only", "monoblock", "--only", "transformers", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(found["runners"]) == {"monoblock", "transformers"}
    for row in found["runners"].values():
        more = row["seconds_all"] - row["seconds_first"]  # four tokens of a toy may be lost in the noise
        assert row["decode_tokens_per_second"] == (pytest.approx(4 / more) if more > 0 else None)
        assert row["prefill_tokens_per_second"] == pytest.approx(5 / row["seconds_first"])
        assert row["weight_bytes"] == 4 * mb.account(mb.Transformer.from_pretrained(folder).config).parameters
    assert found["kv_cache_bytes"] == 2 * 2 * 64 * 9 * 4
    assert "round 1 of 1" in err
    assert err.splitlines()[-1].startswith("Try: monoblock account")


def test_a_table_is_printed_and_absent_peers_are_named(folder, capsys, monkeypatch):
    from monoblock.cli import peers

    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert run(["bench", folder, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "monoblock" in out
    assert "decode tok/s" in out
    assert "llama.cpp, f32: not installed" in err


def test_an_encoder_decoder_is_timed_too(tmp_path, capsys):
    both = folders.both(tmp_path)
    capsys.readouterr()
    assert run(["bench", str(both), *SMALL, "--no-peers", "--only", "monoblock", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runners"]["monoblock"]["prefill_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt22"], "did you mean 'gpt2'"),
        (["bert-base"], "makes no text"),
        (["gpt2", "--only", "transfomers"], "did you mean 'transformers'"),
        (["FOLDER", "--new", "60"], "the context is 32"),
        (["gpt2", "--new", "0"], "is not in the range"),
    ],
)
def test_what_cannot_be_timed_is_one_line(folder, words, said, capsys):
    assert run(["bench", *(folder if word == "FOLDER" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
