"""The report, its JSON, its page, the command `doctor`, the documentation, and the checks before a training."""

import contextlib
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from students import DropoutGPT, page_of

import monoblock as mb
from monoblock.cli.main import run
from monoblock.doctor.checks import CHECKS
from monoblock.doctor.diagnose import diagnose_model
from monoblock.doctor.faults import FAULTS, diagnose_with_fault
from monoblock.runs.diagnose import CHEAP_SECONDS

DOCS = (Path(__file__).parents[2] / "docs/doctor.md").read_text(encoding="utf-8")
BOOK = "".join(f"And the {n} sons of the king went up to the house of the LORD.\n" for n in range(600))
RECIPE = """
[data]
corpus = "{book}"

[tokenizer]
kind = "bpe"
vocab = 270

[model]
family = "gpt"
width = 16
depth = 2
heads = 2
context = 29

[train]
steps = 20
warmup = 4
batch = 5
eval_every = 10
device = "cpu"

[generate]
max_new_tokens = 8
"""


def run_verb(*words):
    """Run a verb; return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def report():
    return diagnose_with_fault("no_causal_mask")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A small run, trained by the command line, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "book.txt").write_text(BOOK)
    (folder / "small.toml").write_text(RECIPE.format(book=folder / "book.txt"))
    code, _, printed = run_verb("train", folder / "small.toml", "--out", folder / "small")
    assert code == 0, printed
    return folder / "small", printed


def test_a_finding_has_numbers_a_reason_and_a_fix(report):
    assert not report.ok
    (finding,) = report.findings
    assert finding.evidence["max_difference"] > 0
    assert "no causal mask" in finding.reason
    assert "masked_fill" in finding.fix
    text = str(report)
    assert "FAIL  causality" in text
    assert "because of causality" in text


def test_json_has_the_documented_keys(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert list(data) == ["ok", "findings", "unsupported", "notes", "passed", "explained", "not_checked"]
    names = [*data["passed"], *data["explained"], *(row["check"] for row in data["findings"] + data["not_checked"])]
    assert sorted(names) == sorted(check.name for check in CHECKS)  # each check ended in one way
    assert data["explained"]["cache"] == "causality"
    assert [list(row) for row in data["not_checked"]] == [["check", "reason", "how"]] * len(data["not_checked"])
    assert "label_shift" in {row["check"] for row in data["not_checked"]}
    assert list(data["findings"][0]) == ["check", "verdict", "evidence", "reason", "fix", "docs"]


def test_the_page_needs_nothing_from_outside(report, tmp_path):
    page = page_of(report, tmp_path)
    assert "causality" in page
    assert "<img" in page
    assert all(link.startswith(("#", "data:")) for link in re.findall(r"(?:src|href)=\"(.*?)\"", page))
    assert not re.search(r"https?://|@import", page)


def test_a_page_without_matplotlib_has_no_pictures_and_says_so(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = page_of(report, tmp_path)
    assert "causality" in page
    assert "<img" not in page
    assert "Without pictures: figures need matplotlib; write pip install" in page


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_chromium_shows_the_page_without_errors(report, tmp_path):
    page = tmp_path / "report.html"
    report.html(page)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *options, "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "no causal mask is applied" in shown.stdout
    assert "<img" in shown.stdout
    assert "CONSOLE" not in shown.stderr


def examined():
    """A report on each kind of model: plain, a function, of transformers, ours, recurrent."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    table = torch.randn(61, 61)
    plain = torch.nn.Sequential(torch.nn.Embedding(61, 12), torch.nn.Linear(12, 61))
    sizes = {"vocab_size": 61, "n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 40}
    foreign = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=None, eos_token_id=None, **sizes))
    yield "Sequential", mb.diagnose(plain, length=24)
    yield "function of ids", mb.diagnose(lambda ids: table[ids], vocab=61, length=24)
    yield "GPT2LMHeadModel", mb.diagnose(foreign)
    yield "decoder-only", mb.diagnose(mb.Transformer(mb.tiny("gpt2")))


def test_a_page_can_be_written_for_any_model(tmp_path):
    for name, report in examined():
        report.html(str(tmp_path / f"{name}.html"))
        page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>")
        assert f"<h1>Report on {report.subject}</h1>" in page
        assert all(result.name in page for result in report.checks)
        assert page.count("<img") >= 1, name
    with pytest.raises(mb.FileError, match=r"nowhere/x\.html cannot be written: No such file"):
        report.html(tmp_path / "nowhere/x.html")


STUDENTS_FILE = """
from torch import nn
open("was_run", "w").close()
class Part(nn.Module): pass
class Base(nn.Module): pass
class MyGPT(Base):
    def __init__(self, vocab, width=12):
        super().__init__()
        self.token, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.token(ids))
class Config: pass
"""


def test_a_file_of_code_or_of_weights_is_answered_with_three_lines_that_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("gpt_of_a_student.py").write_text(STUDENTS_FILE)
    for name in ("gpt_of_a_student.py", "gpt_of_a_student.pt"):
        if name.endswith(".pt"):  # a pickle that would run code
            Path(name).write_bytes(b"cos\nmkdir\n(S'was_unpickled'\ntR.")
        code, printed, problem = run_verb("doctor", name)
        assert (code, len(printed.splitlines()), len(problem.splitlines())) == (2, 3, 1)
        assert "the three lines above" in problem
        assert not Path("was_run").exists()
        assert not Path("was_unpickled").exists()
        with pytest.raises(mb.InputError, match="from gpt_of_a_student import MyGPT"):
            mb.diagnose(name)
        assert "model = MyGPT(vocab=...)" in printed
        if name.endswith(".pt"):
            model = {}
            exec(STUDENTS_FILE, model)
            torch.save(model["MyGPT"](61).state_dict(), name)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(printed.replace("vocab=...", "vocab=61"), {})
        assert "FAIL  positions" in out.getvalue()
        Path("was_run").unlink()
    with pytest.raises(mb.FileError, match=r"no folder or file missing\.py"):
        mb.diagnose("missing.py")


def test_a_report_says_what_was_not_checked_and_how_to_hand_it_over():
    table = torch.randn(61, 61, generator=torch.Generator().manual_seed(0))
    report = mb.diagnose(lambda ids: table[ids], vocab=61, length=24)
    assert [finding.check for finding in report.findings] == ["positions"]
    rows = {row.check: row.how for row in report.not_checked}
    assert "cached=f" in rows["cache"]
    assert "pad_id" in rows["padding"]
    assert "batch=" in rows["label_shift"]


def test_misuse_is_one_line():
    with pytest.raises(mb.InputError, match="give vocab=61"):
        mb.diagnose(lambda ids: ids)
    with pytest.raises(mb.InputError, match="cannot be examined"):
        mb.diagnose(3)
    with pytest.raises(mb.InputError, match="there is no check 'casuality'"):
        mb.diagnose(mb.Transformer(mb.tiny("gpt2")), checks=["casuality"])
    with pytest.raises(mb.FileError, match="there is no folder"):
        mb.diagnose("no/such/folder")


def test_the_documentation_has_every_check_and_every_fault():
    headings = re.findall(r"^### (\w+)$", DOCS, re.MULTILINE)
    assert sorted(headings) == sorted(check.name for check in CHECKS)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| \[(\w+)\]\(#(\w+)\) \|$", DOCS, re.MULTILINE)
    assert rows == [(fault.name, fault.about, fault.check, fault.check) for fault in FAULTS.values()]


def test_the_code_of_the_documentation_prints_what_it_says():
    torch.manual_seed(0)
    tokens = torch.randint(1, 61, (4, 20))
    tokens[:2, 14:] = 0
    names = {"torch": torch, "F": torch.nn.functional, "mb": mb, "model": DropoutGPT(faulty=False), "tokens": tokens}
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(block, names)
        said = [re.escape(line).replace("…", ".*") for line in re.findall(r"print\(.*  # (.*)", block)]
        assert len(said) == len(out.getvalue().splitlines())
        assert all(re.fullmatch(a, b) for a, b in zip(said, out.getvalue().splitlines(), strict=True)), out.getvalue()
        if not said:
            assert names["report"].ok
            assert {"label_shift", "pad_in_loss", "overfit"} <= {result.name for result in names["report"].checks}


def test_the_code_of_the_guide_examines_what_it_names():
    guide = (Path(__file__).parents[2] / "docs/how-to/does-not-train.md").read_text(encoding="utf-8")
    names, checked = {}, set()
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block, names)
        assert names["report"].findings == []
        checked |= {result.name for result in names["report"].checks}
    assert {"label_shift", "pad_in_loss", "overfit", "optimizer", "learning_rate", "dropout"} <= checked


def test_a_trained_run_has_no_findings(run_folder):
    folder, printed = run_folder
    report = mb.diagnose(folder)
    assert not report.findings, [(finding.check, finding.evidence) for finding in report.findings]
    checked = {result.name for result in report.checks}
    assert {"tokenizer", "generation_defaults", "learning_rate", "warmup", "initial_loss", "cache"} <= checked
    assert "checks passed before the first step" in printed


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["demo", "reverse"])
def test_a_few_steps_of_a_recipe_of_the_package_have_no_findings(recipe, tmp_path):
    few = {"train.steps": 4, "train.batch": 4, "train.warmup": 2, "train.device": "cpu", "train.eval_batches": 1}
    run_folder = mb.train(recipe, few, out=tmp_path / recipe).folder
    report = mb.diagnose(run_folder)
    assert not report.findings, [(finding.check, finding.evidence) for finding in report.findings]
    assert {"causality", "initial_loss", "warmup"} <= {result.name for result in report.checks}


def test_a_folder_without_a_tokenizer_or_with_that_of_another_model_is_examined(run_folder, tmp_path):
    torch.manual_seed(0)
    mb.export_hf(mb.Transformer(mb.tiny("llama-7b")), tmp_path)
    report = mb.diagnose(tmp_path)
    assert not report.findings
    assert "tokenizer" in {row.check for row in report.not_checked}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (run_folder[0] / name).is_file():
            shutil.copy(run_folder[0] / name, tmp_path)
    assert [finding.check for finding in mb.diagnose(tmp_path).findings] == ["tokenizer"]


def test_no_check_begins_after_the_time_of_the_checks_before_training(monkeypatch):
    torch.manual_seed(0)
    model = mb.Transformer(mb.preset("gpt-tiny"))
    complete = diagnose_model(model, cheap=True, objective="causal_lm")
    assert not any(row.reason == "time limit reached" for row in complete.not_checked)
    clock = itertools.count(step=CHEAP_SECONDS / 4)
    monkeypatch.setattr("monoblock.doctor.diagnose.time.perf_counter", lambda: float(next(clock)))
    report = diagnose_model(model, cheap=True, objective="causal_lm", max_seconds=CHEAP_SECONDS)
    assert 0 < len(report.checks) <= 3
    late = {row.check for row in report.not_checked if row.reason == "time limit reached"}
    assert late == {row.name for row in complete.checks} - {row.name for row in report.checks}


def test_the_command_examines_injects_and_lists(run_folder, tmp_path):
    folder = run_folder[0]
    code, printed, _ = run_verb("doctor", folder, "--json")
    printed = json.loads(printed)
    assert (code, printed["ok"], printed["findings"]) == (0, True, [])
    assert "overfit" in {row["check"] for row in printed["not_checked"]}
    page = tmp_path / "report.html"
    code, printed, _ = run_verb("doctor", folder, "--inject", "no_causal_mask", "--html", page)
    assert code == 3
    assert "FAIL  causality" in printed
    assert page.is_file()
    _, printed, _ = run_verb("doctor", "--list", "--json")
    assert len(json.loads(printed)["faults"]) == len(FAULTS)
    _, printed, _ = run_verb("doctor", folder, "--checks", "causality,cache")
    assert "passed (2): causality, cache" in printed
    code, _, problem = run_verb("doctor")
    assert code == 2
    assert "give the folder of a model" in problem


@pytest.mark.slow
def test_a_report_on_gpt2_takes_less_than_twenty_seconds_on_two_cores():
    torch.manual_seed(0)
    model = mb.Transformer(mb.preset("gpt2"))
    begin = time.process_time()  # of all threads, so that other programs do not count
    report = diagnose_model(model)
    assert not report.findings
    assert (time.process_time() - begin) / 2 < 20
