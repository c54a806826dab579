"""`mb.train` and `mb.evaluate`: recipes, tasks, blocks, optimizers and batches of the user; events as progress."""

import re
import shutil
import signal
import sys
from pathlib import Path

import processes
import pytest
import torch

import monoblock as mb
from monoblock.runs import progress
from monoblock.training.events import EvaluationEvent, FinishedEvent, StepEvent, WarningEvent, read_metrics
from monoblock.training.loss import FunctionLoss

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SMALL = {
    "name": "small",
    "tokenizer": {"kind": "char", "vocab": 64},
    "model": {"family": "gpt", "width": 16, "depth": 1, "heads": 2, "context": 16},
    "train": {"steps": 4, "batch": 3, "warmup": 1, "device": "cpu", "compile": "no"},
}


@pytest.fixture(autouse=True)
def _restore_determinism():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def recipe(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("".join(f"the {n} sons and the {n % 7} kings went up\n" for n in range(90)), encoding="utf-8")
    return {**SMALL, "data": {"corpus": str(text)}}


def run_example(name, *arguments, code=None):
    """Run an example in a process of its own, or code that imports it."""
    if code is None:
        done = processes.run_script(EXAMPLES / name, *arguments, cwd=EXAMPLES)
    else:
        done = processes.run_code(code, *arguments, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_recipe_is_trained_from_python(recipe, tmp_path, capfd):
    events = []
    run = mb.train(recipe, {"train.steps": 3, "train.eval_every": 2}, out=tmp_path / "run", callbacks=[events.append])
    assert run.folder == tmp_path / "run"
    assert [event.step for event in events if isinstance(event, StepEvent)] == [1, 2, 3]
    assert any(isinstance(event, EvaluationEvent) for event in events)
    assert isinstance(events[-1], FinishedEvent)
    assert not run.model.training
    assert "loss" in capfd.readouterr().err
    loaded = mb.load(run.folder)
    assert mb.evaluate(run, recipe["data"]["corpus"])["loss"] == pytest.approx(run.metrics["val_loss"], rel=1e-5)
    assert mb.evaluate(loaded, recipe["data"]["corpus"], split="valid")["perplexity"] > 1
    with pytest.raises(KeyError, match="did you mean 'perplexity'"):
        mb.evaluate(loaded, recipe["data"]["corpus"])["perplexty"]


def test_overrides_may_be_a_list_and_progress_may_be_hidden(recipe, tmp_path, capfd):
    run = mb.train(recipe, ["train.steps=2", "train.seed=7"], out=tmp_path / "run", progress=False)
    assert (run.recipe.train.steps, run.recipe.train.seed) == (2, 7)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.stepps": 3}, "did you mean 'steps'"),
        ({"trian.steps": 3}, "did you mean 'train'"),
        ({"steps": 3}, "write section.key=value"),
        ({"train.objective": "causal_ml"}, "did you mean 'causal_lm'"),
    ],
)
def test_a_wrong_override_is_one_line(recipe, tmp_path, overrides, message):
    with pytest.raises(mb.ConfigError, match=message):
        mb.train(recipe, overrides, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_bit_for_bit_from_python(recipe, tmp_path):
    whole = mb.train(recipe, {"train.save_every": 2}, out=tmp_path / "whole", progress=False)
    part = {"train.save_every": 2, "train.steps": 2, "train.schedule": "constant"}
    mb.train(recipe, part, out=tmp_path / "part", progress=False)
    full = mb.train(recipe, part | {"train.steps": 4}, out=tmp_path / "part", resume=True, progress=False)
    again = mb.train(recipe, part | {"train.steps": 4}, out=tmp_path / "again", progress=False)
    assert whole.metrics.keys() == full.metrics.keys()
    states = full.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_the_attention_example_names_tokens_at_or_before_each_token(recipe, tmp_path):
    mb.train(recipe, {"model.depth": 3}, out=tmp_path / "run", progress=False)
    lines = run_example("attention.py", tmp_path / "run", "and the king").splitlines()
    heads = [line for line in lines if line.startswith("  head")]
    assert len(heads) == 6  # three layers of two heads
    assert all(": 0→0 100%" in " ".join(line.split()) for line in heads)


def test_a_run_is_not_resumed_with_fewer_steps_than_it_has_done(recipe, tmp_path):
    run = mb.train(recipe, {"train.steps": 4}, out=tmp_path / "run", progress=False)
    files = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(mb.ConfigError, match=r"train\.steps=3, but the run in .* has already done 4 steps"):
        mb.train(recipe, {"train.steps": 3}, out=tmp_path / "run", resume=True, progress=False)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == files


def test_a_run_resumed_with_more_steps_stores_their_number_and_says_so(recipe, tmp_path):
    run = mb.train(recipe, {"train.steps": 3}, out=tmp_path / "run", progress=False)
    seen = []
    options = {"out": tmp_path / "run", "resume": True, "progress": False, "callbacks": [seen.append]}
    mb.train(recipe, {"train.steps": 4}, **options)
    assert "steps = 4" in (run.folder / "recipe.toml").read_text()
    assert any("train.steps was 3 and is 4" in getattr(event, "text", "") for event in seen)


def test_a_task_from_outside_is_trained_evaluated_and_loaded_in_another_process(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"good {n} x\tbad {n % 7} y\n" for n in range(200)), encoding="utf-8")
    loss, accuracy = map(float, run_example("ranking_task.py", pairs, tmp_path / "run").split())
    assert loss < 0.3
    assert accuracy == 1
    code = (
        "import sys, monoblock as mb; from ranking_task import Ranking; pipe = mb.load(sys.argv[1], task=Ranking());"
        "print(*pipe.predict(['good 3 x', 'bad 3 y']), mb.evaluate(pipe, sys.argv[2])['accuracy'])"
    )
    better, worse, again = map(float, run_example("", tmp_path / "run", pairs, code=code).split())
    assert better > worse
    assert again == 1
    with pytest.raises(mb.ConfigError, match=r"train\.objective='ranking' is not one of"):
        mb.load(tmp_path / "run")


def test_the_task_of_the_example_takes_fewer_than_60_lines():
    lines = (
        (EXAMPLES / "ranking_task.py").read_text(encoding="utf-8").split('if __name__ == "__main__"')[0].splitlines()
    )
    assert sum(bool(line.strip()) for line in lines) < 60


def test_a_block_of_the_user_is_trained_and_loaded(recipe, tmp_path):
    sys.path.insert(0, str(EXAMPLES))
    try:
        from own_block import ScaledTransformer
    finally:
        sys.path.remove(str(EXAMPLES))
    run = mb.train(recipe, model_class=ScaledTransformer, out=tmp_path / "run", progress=False)
    scales = {name for name in run.model.state_dict() if name.endswith(".scale")}
    assert len(scales) == 1
    pipe = mb.load(run.folder, model_class=ScaledTransformer)
    assert isinstance(pipe.model, ScaledTransformer)
    assert all(torch.equal(pipe.model.state_dict()[name], run.model.state_dict()[name]) for name in scales)
    assert mb.evaluate(run, recipe["data"]["corpus"])["loss"] == pytest.approx(run.metrics["val_loss"], rel=1e-5)
    ids = torch.randint(20, (1, 5))
    plain = ids
    for _ in range(4):
        plain = torch.cat([plain, pipe.model(plain)[:, -1:].argmax(-1)], 1)
    assert torch.equal(pipe.model.generate(ids, max_new_tokens=4), plain), "fast paths step aside"


@pytest.mark.slow
def test_batches_of_the_user_and_an_optimizer_of_the_user(tmp_path):
    count, accuracy = run_example("own_data.py", tmp_path / "run").split()
    assert int(count) > 400
    assert float(accuracy) > 0.9


def make_batches(count):
    rows = [torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(n)) for n in range(count)]
    return [({"source": row[:, :-1]}, row[:, 1:]) for row in rows]


OWN = {"model": {"family": "gpt", "vocab": 11, "width": 16, "depth": 1, "heads": 2, "context": 8}}


def test_own_batches_are_repeated_and_skipped_on_resuming(tmp_path):
    recipe = {**OWN, "train": {"steps": 5, "save_every": 5, "schedule": "constant", "warmup": 0}}
    options = {"batches": make_batches(3), "progress": False}
    whole = mb.train(recipe, {"train.steps": 8}, out=tmp_path / "whole", **options)
    mb.train(recipe, out=tmp_path / "part", **options)
    resumed = mb.train(recipe, {"train.steps": 8}, out=tmp_path / "part", resume=True, **options)
    states = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert mb.load(tmp_path / "whole").tokenizer is None


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (iter(make_batches(2)), "ended after 2 and cannot be read again"),
        ([], "the batches are empty"),
        ([torch.zeros(2)], r"batch 0 is not a pair \(inputs, labels\)"),
    ],
)
def test_batches_that_cannot_be_used_are_one_line(tmp_path, batches, message):
    with pytest.raises(mb.InputError, match=message):
        mb.train({**OWN, "train": {"steps": 5}}, batches=batches, out=tmp_path / "run", progress=False)


def own_loss(reduce):
    """A task of the user whose loss is the cross-entropy of each target, reduced to one number by a function."""

    class Mine(mb.Task):
        name = "mine"

        def loss(self, model, inputs, labels):
            return reduce(torch.nn.functional.cross_entropy(model(**inputs).transpose(1, 2), labels, reduction="none"))

    return Mine()


OWN_TASK = {**OWN, "train": {"objective": "mine", "steps": 2, "warmup": 0, "device": "cpu", "compile": "no"}}


@pytest.mark.parametrize(
    ("reduce", "words"),
    [
        (torch.mean, "the loss seems to be a mean: .* return the sum over the targets"),
        (lambda losses: losses.sum(1).mean(), "the loss seems to be a mean"),
        (lambda losses: losses.sum() / 0, "the loss of the first row is inf; updates with such a loss are skipped"),
        (lambda losses: (losses - losses).sum().log() * 0, "the loss of the first row is nan"),
        (torch.sum, None),
        (lambda losses: losses.square().sum() + 3 * losses.sum(), None),
    ],
)
def test_a_loss_of_the_user_that_is_no_finite_sum_is_noticed_in_one_line(tmp_path, reduce, words):
    seen = []
    options = {"batches": make_batches(2), "progress": False, "callbacks": [seen.append]}
    mb.train(OWN_TASK, out=tmp_path / "run", task=own_loss(reduce), **options)
    warnings = [event.text for event in seen if isinstance(event, WarningEvent) and "the loss" in event.text]
    assert len(warnings) == (words is not None)
    assert all(re.match(words, text) for text in warnings)


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (lambda losses: losses.sum(1), r"the loss returned a tensor of shape \(3,\); return the sum over the targets"),
        (lambda losses: losses.sum().item(), "the loss returned float; return the sum over the targets"),
        (lambda losses: losses.sum().detach(), "the loss does not depend on the weights"),
    ],
)
def test_a_loss_of_the_user_that_cannot_be_trained_is_refused(tmp_path, reduce, message):
    with pytest.raises(mb.InputError, match=message):
        mb.train(OWN_TASK, out=tmp_path / "run", task=own_loss(reduce), batches=make_batches(2), progress=False)


def test_looking_at_the_loss_of_the_user_changes_no_bit_of_the_training(tmp_path, monkeypatch):
    recipe = {**OWN_TASK, "model": {**OWN["model"], "dropout": 0.3}}
    options = {"task": own_loss(torch.sum), "batches": make_batches(2), "progress": False}
    looked = mb.train(recipe, out=tmp_path / "looked", **options).model.state_dict()
    monkeypatch.setattr(FunctionLoss, "find_problem", lambda *arguments: None)
    plain = mb.train(recipe, out=tmp_path / "plain", **options).model.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in looked.items())


def smoothed_losses(text):
    return re.findall(r"step (\d+)/\d+  loss (\d+\.\d+) \(smoothed\)", text)


def test_the_smoothed_loss_continues_when_a_run_is_resumed(recipe, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    options = {"train.schedule": "constant", "train.steps": 9}
    mb.train(recipe, options, out=tmp_path / "whole")
    whole = smoothed_losses(capfd.readouterr().err)
    mb.train(recipe, options | {"train.steps": 5, "train.save_every": 4}, out=tmp_path / "part")
    capfd.readouterr()
    shutil.rmtree(tmp_path / "part/checkpoints/step-5")  # killed after step 5, it continues from step 4
    mb.train(recipe, options | {"train.save_every": 4}, out=tmp_path / "part", resume=True)
    resumed = smoothed_losses(capfd.readouterr().err)
    assert resumed == whole[-len(resumed) :]
    assert [step for step, _ in resumed] == ["5", "6", "7", "8", "9"]
    losses = [row["loss"] for row in mb.read_metrics(tmp_path / "whole") if "loss" in row]
    expected = losses[0]
    for loss in losses[1:]:
        expected = 0.95 * expected + 0.05 * loss
    assert resumed[-1][1] == f"{expected:.4f}"


def test_a_run_that_failed_before_its_first_checkpoint_starts_again_with_its_data(tmp_path):
    """The tokenizer of the failed run must not be used: it was trained on other data."""
    text = tmp_path / "book.txt"
    recipe = {**SMALL, "data": {"corpus": str(text)}, "tokenizer": {"kind": "char", "vocab": 64}}

    def fail(event):
        raise RuntimeError("stopped by the user")

    text.write_text("0123 4567\n" * 90, encoding="utf-8")
    with pytest.raises(RuntimeError, match="stopped"):
        mb.train(recipe, out=tmp_path / "run", callbacks=[fail], progress=False)
    text.write_text("the sons and the kings\n" * 90, encoding="utf-8")
    run = mb.train(recipe, out=tmp_path / "run", resume=True, progress=False)
    assert mb.load(tmp_path / "run").tokenizer.encode("kings") == run.task_data.tokenizer.encode("kings")
    assert run.task_data.tokenizer.decode(run.task_data.tokenizer.encode("the kings")) == "the kings"


def test_a_run_prints_as_one_short_line_and_the_card_names_the_optimizer(recipe, tmp_path):
    run = mb.train(
        recipe,
        out=tmp_path / "run",
        optimizer=lambda model: torch.optim.NAdam(model.parameters()),
        progress=False,
    )
    assert repr(run).startswith("Run('")
    assert "val_loss=" in repr(run)
    assert len(repr(run)) < 300
    assert "NAdam" in (run.folder / "README.md").read_text()


@pytest.fixture
def interruptible():
    """Let this process receive Ctrl-C, even if the tests run in the background, where a shell ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_saves_a_checkpoint_and_the_run_is_resumed_bit_for_bit(recipe, tmp_path):
    def interrupt(event):
        if isinstance(event, StepEvent) and event.step == 2:
            signal.raise_signal(signal.SIGINT)

    options = {"train.schedule": "constant", "train.steps": 5}
    run = mb.train(recipe, options, out=tmp_path / "run", callbacks=[interrupt], progress=False)
    assert run.interrupted
    assert run.trainer.step < 5
    assert not (tmp_path / "run" / "model.safetensors").exists()
    resumed = mb.train(recipe, options, out=tmp_path / "run", resume=True, progress=False)
    whole = mb.train(recipe, options, out=tmp_path / "whole", progress=False)
    assert not resumed.interrupted
    states = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": 3}, r"optimizer=3 is not a function of the model; write optimizer=lambda model"),
        ({"optimizer": "adamw"}, r"optimizer='adamw' is not a function of the model; .*or set train\.optimizer"),
        ({"optimizer": torch.optim.AdamW}, "is not a function of the model"),
        ({"optimizer": lambda model: None}, "the function optimizer returned NoneType, not a torch optimizer"),
        ({"model_class": 3}, "model_class=3 is not a class; give a subclass of mb.Transformer"),
        (
            {"task": "classification"},
            r"task='classification' is not an object of a subclass of mb\.Task; .* train\.objective",
        ),
        ({"callbacks": [3]}, "callbacks: 3 is not a function"),
        ({"batches": 3}, "batches=3 is not iterable; give a list of pairs"),
    ],
)
def test_an_argument_of_the_wrong_type_is_one_line(recipe, tmp_path, arguments, message):
    with pytest.raises(mb.MonoblockError, match=message) as caught:
        mb.train(recipe, out=tmp_path / "run", progress=False, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("warmup", "said"), [(5, True), (4, False), (0.5, False)])
def test_a_warmup_that_is_longer_than_the_run_is_said(recipe, tmp_path, warmup, said):
    events = []
    mb.train(recipe, {"train.warmup": warmup}, out=tmp_path / "run", progress=False, callbacks=[events.append])
    texts = [event.text for event in events if isinstance(event, WarningEvent)]
    assert (
        texts
        == [
            "train.warmup=5 is longer than the run of 4 steps, so the learning rate is still rising at the end; "
            "write train.warmup=0.1 for a tenth of the steps"
        ]
        * said
    )


def test_the_accuracy_of_tokens_has_another_name_than_that_of_targets(recipe, tmp_path):
    run = mb.train(recipe, {"train.eval_every": 2}, out=tmp_path / "run", progress=False)
    assert 0 <= run.metrics["val_token_accuracy"] <= 1
    lines = [line for line in read_metrics(run.folder) if "val_loss" in line]
    assert lines
    assert all("val_token_accuracy" in line and "val_accuracy" not in line for line in lines)
    assert "val_token_accuracy" in (run.folder / "README.md").read_text()


def test_sinusoidal_positions_without_scaled_embeddings_are_said(recipe, tmp_path):
    for name, scale, count in (("plain", 1.0, 1), ("scaled", "sqrt_width", 0)):
        events = []
        changes = {"train.steps": 1, "model.positions": "sinusoid", "model.embedding_scale": scale}
        mb.train(recipe, changes, out=tmp_path / name, progress=False, callbacks=[events.append])
        texts = [event.text for event in events if isinstance(event, WarningEvent)]
        assert len([text for text in texts if "embedding_scale=sqrt_width" in text]) == count


def test_a_device_that_is_not_there_is_an_error_before_a_file_is_written(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(mb.ConfigError, match=r"train\.device=cuda is not available"):
        mb.train(recipe, {"train.device": "cuda"}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
