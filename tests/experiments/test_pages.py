"""The pages of benchmarks/results are what the lines beside them give, by the rules of today's experiments."""

from pathlib import Path

import pytest

from monoblock.experiments.experiment import SPEED_KEYS
from monoblock.experiments.library import EXPERIMENTS, load_experiment
from monoblock.experiments.report import Report, read_note
from monoblock.experiments.results import read_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_follows_from_its_lines(name):
    page, results = RESULTS / f"{name}.md", read_results([RESULTS / f"{name}.jsonl"], name)
    report = Report(load_experiment(name), tuple(results), read_note(page))
    written = report.to_markdown(f"{name}.png").splitlines()
    assert page.read_text(encoding="utf-8").splitlines() == written, f"compare {name} --table --write writes it again"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_stored_results_have_the_settings_of_the_experiment(name):
    experiment = load_experiment(name)
    for result in read_results([RESULTS / f"{name}.jsonl"], name):
        stored = dict(change.split("=", 1) for change in result.settings.get("changes", ()))
        own = dict(change.split("=", 1) for change in (*experiment.changes, *experiment.arm(result.arm).changes))
        changed = {key for key, value in own.items() if stored.get(key) != value} - {*SPEED_KEYS}
        assert not stored or not changed, f"{result.arm}, seed {result.seed}"
