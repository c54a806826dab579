"""`monoblock bench`: all runners generate the same tokens, and the report is consistent."""

import contextlib
import io
import json
import subprocess

import model_folders
import pytest
import torch

import monoblock as mb
from monoblock.bench import generation, startup, suite, training, translation
from monoblock.bench.generation import RUNNERS, BenchSetup, RunnerUnavailable, export_for_peers
from monoblock.cli import machine
from monoblock.cli.main import run

ON_CPU = ["--device", "cpu", "--dtype", "fp32"]
SMALL = ["--prompt", "5", "--new", "4", "--rounds", "1"]


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = mb.Transformer(mb.gpt(vocab=97, width=64, depth=2, heads=4, context=32, activation="gelu_tanh")).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small"
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("what", ["--all", "gpt2"])
def test_a_gpu_that_is_not_there_is_an_error(what, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["bench", what, "--device", "cuda"]) == 2
    assert "--device cuda is not available: torch finds no GPU; write --device cpu" in capsys.readouterr().err


def test_other_libraries_generate_the_same_tokens(model, tmp_path):
    assert export_for_peers(model, tmp_path / "theirs") is None
    setup = BenchSetup(model, tmp_path / "theirs", "cpu", 1)
    ids = torch.randint(1, 97, (2, 5), generator=torch.Generator().manual_seed(2)).tolist()
    expected = RUNNERS["monoblock"](setup).run(ids, 7)
    assert expected.shape == (2, 12)
    assert torch.equal(RUNNERS["transformers"](setup).run(ids, 7), expected)
    pytest.importorskip("ctranslate2")
    results = RUNNERS["CTranslate2, fp32"](setup).run(ids, 7)
    assert [result.sequences_ids[0] for result in results] == expected[:, 5:].tolist()
    pytest.importorskip("llama_cpp")
    assert RUNNERS["llama.cpp, f32"](setup).run(ids, 7) == expected[:, 5:].tolist()


def test_a_library_that_is_not_installed_is_reported(model, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "find_spec", lambda name: None)
    for name in RUNNERS:
        if not name.startswith("monoblock"):
            with pytest.raises(RunnerUnavailable, match="not installed"):
                RUNNERS[name](BenchSetup(model, tmp_path, "cpu", 1))


def test_json_has_a_row_for_each_runner(folder, capsys):
    assert run(["bench", folder, *SMALL, "--only", "monoblock", "--only", "transformers", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert set(report["runners"]) == {"monoblock", "transformers"}
    for row in report["runners"].values():
        decode_seconds = row["seconds_all"] - row["seconds_first"]  # four tokens of a toy model may be below the noise
        assert row["decode_tokens_per_second"] == (pytest.approx(4 / decode_seconds) if decode_seconds > 0 else None)
        assert row["prefill_tokens_per_second"] == pytest.approx(5 / row["seconds_first"])
        assert row["weight_bytes"] == 4 * mb.account(mb.Transformer.from_pretrained(folder).config).parameters
    assert report["kv_cache_bytes"] == 2 * 2 * 64 * 9 * 4
    assert "round 1 of 1" in err
    assert err.splitlines()[-1].startswith("Try: monoblock account")


def test_the_table_names_libraries_that_are_not_installed(folder, capsys, monkeypatch):
    monkeypatch.setattr(generation, "find_spec", lambda name: None)
    assert run(["bench", folder, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "monoblock" in out
    assert "decode tok/s" in out
    assert "llama.cpp, f32: not installed" in err


def test_an_encoder_decoder_is_measured(tmp_path, capsys):
    encoder_decoder = model_folders.seq2seq_folder(tmp_path)
    capsys.readouterr()
    assert run(["bench", str(encoder_decoder), *SMALL, "--no-peers", "--only", "monoblock", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runners"]["monoblock"]["prefill_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt22"], "did you mean 'gpt2'"),
        (["bert-base"], "generates no text"),
        (["gpt2", "--only", "transfomers"], "did you mean 'transformers'"),
        (["FOLDER", "--new", "60"], "but this model has 32"),
        (["gpt2", "--new", "0"], "is not in the range"),
        (["gpt2", "--all"], "WHAT has no effect"),
        (["--all", "--only", "monoblock"], "--only has no effect"),
        (["--small"], "--small has no effect without --all"),
    ],
)
def test_invalid_arguments_are_one_line_errors(folder, arguments, message, capsys):
    assert run(["bench", *(folder if word == "FOLDER" else word for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_a_table_that_cannot_be_written_is_an_error_before_anything_is_measured(capsys):
    assert run(["bench", "--all", "--out", "nowhere/table.md"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: there is no folder nowhere for --out nowhere/table.md; make it, or give another file\n"


@pytest.mark.parametrize("fails_at", ["build", "run"])
def test_another_library_that_fails_is_one_line_and_the_others_are_measured(folder, capsys, monkeypatch, fails_at):
    class Broken:
        weight_bytes = 0

        def run(self, ids, count):
            raise KeyError("no such\nlayer")

    monkeypatch.setitem(RUNNERS, "transformers", lambda setup: Broken() if fails_at == "run" else {}["no such layer"])
    assert run(["bench", folder, *SMALL, "--only", "monoblock", "--only", "transformers", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["runners"]) == ["monoblock"]
    assert report["absent"]["transformers"].startswith("failed with KeyError: ")
    assert "\n" not in report["absent"]["transformers"]


def test_the_default_lengths_fit_a_short_context(folder, capsys):
    assert run(["bench", folder, "--rounds", "1", "--only", "monoblock", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt"], report["new"]) == (10, 21)  # of a context of 32


@pytest.fixture(scope="module")
def whole_report(tmp_path_factory):
    """The report of `--all` with toy sizes where no other library is installed, and the page that it wrote."""
    page = tmp_path_factory.mktemp("bench") / "speed.md"
    with pytest.MonkeyPatch.context() as patch:
        for module in (generation, training, translation, startup):
            patch.setattr(module, "find_spec", lambda name: None)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            assert run(["bench", "--all", "--small", "--rounds", "1", "--json", "--out", str(page), *ON_CPU]) == 0
    return json.loads(output.getvalue()), page.read_text(encoding="utf-8")


def test_one_table_has_all_tasks_with_the_fraction_of_a_ceiling(whole_report):
    report, _ = whole_report
    ours = {row["task"].split(",")[0]: row for row in report["rows"] if row["runner"] == "monoblock"}
    assert list(ours) == ["training", "prefill", "decoding", "translation", "start-up to the first token"]
    assert min(report["ceilings"].values()) > 0
    for task, row in ours.items():
        assert row["ratio"] == pytest.approx(1) or row["note"] == "too short to measure"
        assert (row["fraction"] is None) == (task.startswith("start-up") or row["speed"] is None)
    assert {row["runner"] for row in report["rows"]} >= {"nanoGPT's operations", "monoblock, 8 bits"}


def test_libraries_that_are_not_installed_are_lines_of_the_table(whole_report):
    report, page = whole_report
    absent = {(row["task"].split(",")[0], row["runner"]) for row in report["rows"] if row["note"] == "not installed"}
    assert absent >= {
        ("training", "transformers"),
        ("decoding", "CTranslate2, int8"),
        ("translation", "transformers"),
        ("translation", "CTranslate2, fp32"),
        ("start-up to the first token", "llama.cpp"),
    }
    assert "| start-up to the first token | llama.cpp | not installed |" in page
    assert len([line for line in page.splitlines() if line.startswith("|")]) == 2 + len(report["rows"])


def test_the_fraction_of_a_ceiling_is_what_the_work_needs_over_what_the_hardware_does():
    config = mb.vaswani(vocab=61, width=32, depth=1, heads=2)
    weights = 4 * 32 * 32 + 2 * 32 * 128  # of an encoder block
    decoder = weights + 2 * 32 * 32 + 61 * 32  # of a target token: queries and output of cross-attention, and the table
    products = 2 * (weights + 2 * 32 * 32) * 15 + 2 * decoder * 4 * 14  # sources have their keys and values once
    assert suite.search_flops(config, 15) == pytest.approx(products, rel=0.2)  # the rest is attention
    row = suite.Row("a", "monoblock", 50.0, "tokens/s")
    assert suite.ratio_to_ours(row._replace(runner="other", speed=25.0), [row]) == 0.5
    startup_row = suite.Row("b", "monoblock", 2.0, "s")
    assert suite.ratio_to_ours(startup_row._replace(runner="other", speed=4.0), [startup_row]) == 0.5


def test_a_page_names_the_commit_only_if_the_program_is_tracked(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, "-C", tmp_path, *words], capture_output=True, text=True, check=True)

    program = tmp_path / "bench.py"
    program.write_text("")
    monkeypatch.setattr(machine, "__file__", str(program))
    assert machine._commit() is None, "there is no repository"
    git("init")
    assert machine._commit() is None, "the repository is somebody else's"
    git("add", "bench.py")
    git("commit", "-m", "first")
    commit = git("rev-parse", "--short", "HEAD").stdout.strip()
    assert machine._commit() == commit
    assert machine._describe_run().endswith(f", commit {commit}")
    program.write_text("changed")
    assert machine._commit() == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "foo"], "--device foo is not a device; write cpu or cuda"),
        (["--device", "meta"], "--device meta is not supported; write cpu or cuda"),
        (
            ["--only", "transformers", "--no-peers"],
            "--only 'transformers' is another library, but --no-peers leaves them out",
        ),
        (["--all", "--out", "/proc/table.md"], "--out /proc/table.md cannot be written: No such file or directory"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_measured(words, message, capsys):
    assert run(["bench", *(["gpt-tiny"] if "--all" not in words else []), *words]) in (1, 2)
    assert capsys.readouterr().err.strip() == f"error: {message}"


def test_our_training_step_has_the_loss_of_the_trainer(monkeypatch):
    """Its gradients are those of the cross-entropy of the next tokens."""
    model, ids = mb.Transformer(mb.tiny("gpt2")), torch.randint(0, 61, (2, 9))
    logits = model(ids[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    calls = []

    class Loss(training.CrossEntropyLoss):
        def __call__(self, *arguments):
            calls.append(arguments)
            return super().__call__(*arguments)

    monkeypatch.setattr(training, "CrossEntropyLoss", Loss)
    assert training.time_step(model, ids) > 0
    assert len(calls) == 1
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)
