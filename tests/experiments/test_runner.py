"""What all experiments share: trials are not repeated, results merge, and rules conclude only what numbers carry."""

import json
from dataclasses import replace

import experiment_support as support
import processes
import pytest

from monoblock.errors import ConfigError, FileError
from monoblock.experiments.claims import Claim
from monoblock.experiments.library import load_experiment
from monoblock.experiments.report import Report, draw_report, format_mean, read_note, write_page
from monoblock.experiments.results import RESULTS_FILE, Result, read_results
from monoblock.experiments.rules import Rule, confidence_interval
from monoblock.experiments.runner import plan_trials, run_trials, select_results

EXPERIMENT, MIXED = support.EXPERIMENT, support.MIXED


def plan(folder, experiment=EXPERIMENT, *, more=(), overrides=(), **values):
    return plan_trials(experiment, values, folder=folder, overrides=overrides, more_results=more)


def run(folder, experiment=EXPERIMENT, *, jobs=1, **values):
    """Run the experiment; return its report and the trials that ran in this call."""
    folder.mkdir(exist_ok=True)
    log = folder / "ran.txt"
    before = log.read_text().splitlines() if log.exists() else []
    trials = plan(folder, experiment, **values)
    list(run_trials(trials, jobs))
    ran = (log.read_text().splitlines() if log.exists() else [])[len(before) :]
    return report_of(trials), ran


def report_of(trials):
    return Report(trials[0].experiment, tuple(select_results(trials)[0]))


# -- results ----------------------------------------------------------------------------------------------------------


def test_finished_trials_are_not_repeated_after_a_kill(tmp_path):
    tmp_path.joinpath("fail").touch()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert (tmp_path / "ran.txt").read_text().splitlines() == ["old, seed 1", "new, seed 1", "same, seed 1"]
    tmp_path.joinpath("fail").unlink()
    report, ran = run(tmp_path)
    assert ran[0] == "same, seed 1", "the arms before it have lines of results"
    assert len(ran) == 7
    assert {arm: sorted(seeds) for arm, seeds in report.by_seed.items()} == {a: [1, 2, 3] for a in support.LOSSES}
    assert run(tmp_path)[1] == []


def test_a_line_that_a_crash_cut_short_is_run_again(tmp_path):
    run(tmp_path, seeds="1")
    path = tmp_path / RESULTS_FILE
    path.write_text(path.read_text()[:-20])
    assert run(tmp_path, seeds="1")[1] == ["same, seed 1"]
    assert run(tmp_path, seeds="1")[1] == [], "the new line does not continue the one that was cut short"


def test_a_last_line_without_an_end_is_not_lost(tmp_path):
    run(tmp_path, seeds="1")
    path = tmp_path / RESULTS_FILE
    path.write_text(path.read_text().rstrip("\n"))
    report, ran = run(tmp_path, seeds="1,2")
    assert len(ran) == 3
    assert {arm: sorted(seeds) for arm, seeds in report.by_seed.items()} == {arm: [1, 2] for arm in support.LOSSES}


def test_a_folder_that_cannot_be_written_is_an_error_before_a_trial_runs(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="folder cannot be written: Not a directory"):
        list(run_trials(plan(tmp_path / "file" / "folder")))


@pytest.mark.parametrize(
    "damage",
    [{"settings": {"changes": [1]}}, {"settings": {"changes": None}}, {"machine": ["a"]}, {"seed": "1"}, {"arm": 3}],
)
def test_a_line_that_is_not_a_result_is_left_out(tmp_path, damage):
    run(tmp_path, seeds="1")
    lines = (tmp_path / RESULTS_FILE).read_text().splitlines()
    bad = json.dumps({**json.loads(lines[0]), **damage})
    (tmp_path / RESULTS_FILE).write_text("\n".join([bad, *lines[1:]]) + "\n")
    assert run(tmp_path, seeds="1")[1] == ["old, seed 1"]


def test_results_of_several_calls_and_machines_merge(tmp_path):
    run(tmp_path / "here", arms="old", seeds="1,2,3")
    run(tmp_path / "there", arms="new", seeds="1,2,3")
    lines = tmp_path / "there" / RESULTS_FILE
    changed = [json.loads(line) | {"machine": "another machine"} for line in lines.read_text().splitlines()]
    lines.write_text("".join(json.dumps(line) + "\n" for line in changed))
    report, ran = run(tmp_path / "here", arms="old,new", more=(lines,))
    assert ran == [], "the trials of the other machine count"
    assert report.arms == ["old", "new"]
    assert len(report.machines) == 2
    assert report.conclusions()[0].verdict == "confirmed"
    lines.rename(tmp_path / "here" / "there.jsonl")  # a file in the folder needs no option
    assert run(tmp_path / "here", arms="old,new")[0].arms == ["old", "new"]


def test_results_with_other_options_or_changes_are_not_mixed(tmp_path):
    run(tmp_path, arms="old", seeds="1")
    report, ran = run(tmp_path, arms="old", seeds="1", offset=1.0)
    assert ran == ["old, seed 1"]
    assert report.values("old", "loss") == [4.0]
    assert run(tmp_path, arms="old", seeds="1")[0].values("old", "loss") == [3.0]
    assert len(read_results([tmp_path / RESULTS_FILE], EXPERIMENT.name)) == 2


def test_results_that_differ_only_in_speed_are_the_same_trial():
    def result(*changes):
        settings = {"recipe": "wikitext2", "changes": ["model.depth=6", *changes]}
        return Result(experiment="one", arm="a", seed=1, settings=settings, machine="here", seconds=1.0)

    assert result("train.compile=no").key == result("train.compile=graphs", "train.workers=4").key
    assert result("train.compile=no").key != result("train.lr=1e-3").key


def test_a_run_with_other_settings_has_another_folder(tmp_path):
    """A model that was kept, or half trained when it was killed, is not taken for one with other settings."""
    one, other, same = (
        plan(tmp_path, arms="old", seeds="1", **values)[0] for values in ({}, {"offset": 1.0}, {"offset": 0.0})
    )
    assert one.run_folder != other.run_folder
    assert one.run_folder == same.run_folder


def test_arms_run_in_several_processes_after_what_they_share(tmp_path):
    report, ran = run(tmp_path, arms="old,new", seeds="1", jobs=2)
    assert sorted(ran) == ["new, seed 1", "old, seed 1"]
    assert (tmp_path / "shared.txt").is_file()
    assert report.arms == ["old", "new"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_trials_that_another_needs_run_first(tmp_path, jobs, monkeypatch):
    processes.spawn_quickly(monkeypatch)
    report, ran = run(tmp_path, support.DEPENDENT, arms="new", seeds="1", jobs=jobs)
    assert ran == ["old, seed 2", "new, seed 1"]
    assert report.values("new", "loss") == [3.1]
    assert run(tmp_path, support.DEPENDENT, arms="same", seeds="1")[1] == ["same, seed 1"], "old is there already"


def test_unknown_arms_options_and_seeds_are_errors(tmp_path):
    for values, message in (
        ({"arms": "ol"}, "no arm 'ol'.*did you mean"),
        ({"sead": "1"}, "no option sead="),
        ({"seeds": "one"}, "not a list of whole numbers"),
        ({"seeds": "1,99999999999999999999"}, "not between 0 and"),
        ({"seeds": "-1"}, "not between 0 and"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(tmp_path, **values)
    assert [trial.arm.name for trial in plan(tmp_path, arms="*e*", seeds=1)] == [
        "new",
        "same",
    ]


def test_trials_that_differ_in_speed_are_the_same_unless_their_arm_trains_for_a_time(tmp_path):
    record = load_experiment("language-models")

    def keys(arm):
        changes = (f"train.compile={word}" for word in ("no", "yes"))
        trials = [plan(tmp_path, record, arms=arm, seeds=1, overrides=(change,))[0] for change in changes]
        return {json.dumps(trial.settings.get("speed")) for trial in trials}

    assert keys("lstm") == {"null"}
    assert len(keys("lstm-time")) == 2


def test_a_device_that_is_not_there_is_an_error_before_a_trial_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    trials = [replace(trial, overrides=("train.device=cuda",)) for trial in plan(tmp_path)]
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        next(run_trials(trials))


# -- rules ------------------------------------------------------------------------------------------------------------


def conclude(values, formula, **options):
    rule = Rule("it is", formula, **options)
    return rule.conclude({"a": {seed: {"loss": value} for seed, value in enumerate(values)}})


def test_a_rule_says_nothing_if_the_numbers_are_too_close():
    assert conclude([1.0, 1.1, 0.9], "loss of a >= 0.5").verdict == "confirmed"
    assert conclude([1.0, 1.1, 0.9], "loss of a >= 2.0").verdict == "contradicted"
    assert conclude([1.0, 1.1, 0.9], "loss of a >= 0.95").verdict == "inconclusive"
    assert conclude([1.0, 1.1, 0.9], "loss of a <= 1.5").verdict == "confirmed"
    assert conclude([1.0, 1.1, 0.9], "loss of a <= 0.5").verdict == "contradicted"
    assert conclude([1.0], "loss of a >= 0.5").verdict == "inconclusive", "one seed has no interval"
    assert conclude([1.0, 1.0], "loss of a >= 0.5").verdict == "inconclusive", "that of two seeds says little"
    assert conclude([1.0], "loss of a >= 0.5", is_exact=True).verdict == "confirmed"
    assert conclude([], "loss of a >= 0.5").verdict == "not measured"
    assert "inconclusive" in conclude([1.0, 1.1, 0.9], "loss of a >= 0.95").sentence()


def test_a_seed_that_diverged_is_not_left_out_in_silence():
    """An infinite number is stored as None; the rest of the seeds alone would confirm the rule."""
    found = conclude([1.0, 1.1, None], "loss of a <= 1.5")
    assert found.verdict == "inconclusive"
    assert "1 of 3 seeds have no finite number" in found.sentence()
    assert conclude([1.0, 1.1, "1.0"], "loss of a <= 1.5").seeds == 2, "text is not a number"
    metrics = [{"loss": 1.0}, {"loss": None}]
    results = [support.make_result("old", seed, values) for seed, values in enumerate(metrics)]
    assert Report(EXPERIMENT, tuple(results)).table()[1][0][:3] == ["old", 2, "1.000 (1 not finite)"]


def test_a_rule_needs_its_condition():
    fair = Rule("it is fair", "loss of a <= 1")
    rule = Rule("b is worse", "loss of b >= 1", condition=fair)
    results = {arm: {seed: {"loss": 2.0 + seed / 100} for seed in range(3)} for arm in "ab"}
    experiment = replace(EXPERIMENT, rules=(fair, rule), arms=tuple(replace(EXPERIMENT.arms[0], name=n) for n in "ab"))
    rows = tuple(support.make_result(arm, seed, m) for arm, seeds in results.items() for seed, m in seeds.items())
    verdicts = [conclusion.verdict for conclusion in Report(experiment, rows).conclusions()]
    assert verdicts == ["contradicted", "inconclusive"]
    assert '"it is fair" is not confirmed' in Report(experiment, rows).conclusions()[1].sentence()
    assert rule.conclude({**results, "a": {n: {"loss": 0.5} for n in range(3)}}).verdict == "confirmed"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("confirmed", "contradicted"), "confirmed"),  # the second rule is against the claim
        (("contradicted", "confirmed"), "contradicted"),
        (("confirmed", "confirmed"), "partly confirmed"),
        (("confirmed", "inconclusive"), "inconclusive"),
        (("confirmed", "not measured"), "inconclusive"),
        (("not measured", "not measured"), "not measured"),
    ],
)
def test_the_verdict_on_a_claim_follows_from_its_rules(verdicts, expected):
    claim = Claim("here", "it is so", "old", rules=(0, 1), against=(1,))
    assert claim.judge(verdicts) == expected


def test_a_weak_experiment_does_not_contradict_a_claim():
    claim = Claim("here", "it is so", "old", rules=(0,), can_contradict=False)
    verdicts = ("confirmed", "contradicted", "inconclusive", "not measured")
    assert [claim.judge([one]) for one in verdicts] == ["confirmed", "inconclusive", "inconclusive", "not measured"]


def test_a_rule_may_have_two_bounds():
    formula = "0.85 <= loss of a <= 1.15"
    assert conclude([1.0, 1.01, 0.99], formula).verdict == "confirmed"
    assert conclude([0.5, 0.51, 0.49], formula).verdict == "contradicted"
    assert conclude([1.5, 1.51, 1.49], formula).verdict == "contradicted"
    assert conclude([1.1, 1.2, 1.0], formula).verdict == "inconclusive"
    assert conclude([1.0], formula).rule.bound == "loss of a between 0.85 and 1.15"


def test_a_number_near_the_bound_is_told_from_it():
    assert "95 % interval 0.99004 to" in conclude([0.99004, 0.99004, 0.99004], "loss of a <= 0.99").sentence()


def test_a_rule_that_was_added_later_says_so():
    assert (
        conclude([1.0], "loss of a <= 2.0", added_later="the rule")
        .sentence()
        .endswith("2; the rule was added after results).")
    )
    page = Report(replace(EXPERIMENT, rules=(replace(EXPERIMENT.rules[0], added_later="the rule"),)), ()).to_markdown()
    assert "fixed before the runs, except where it says otherwise:" in page


def test_a_smoke_run_has_no_conclusion(tmp_path):
    report = run(tmp_path)[0]
    smoke = [replace(result, settings={**result.settings, "smoke": True}) for result in report.results]
    verdicts = {one.verdict for one in Report(EXPERIMENT, tuple(smoke)).conclusions()}
    assert verdicts == {"inconclusive"}
    assert verdicts != {one.verdict for one in report.conclusions()}


def test_the_interval_is_that_of_student():
    values = [5.0, 5.5, 4.6, 5.2, 5.1]
    stats = pytest.importorskip("scipy.stats")
    expected = stats.t.interval(0.95, len(values) - 1, loc=sum(values) / 5, scale=stats.sem(values))
    assert confidence_interval(values) == pytest.approx(expected, rel=1e-3)


def test_seeds_are_compared_with_themselves():
    """The arms differ by 0.1 with every seed: a small difference that the spread of the seeds would hide."""
    results = {
        "a": {seed: {"loss": 3.0 + seed} for seed in range(3)},
        "b": {seed: {"loss": 3.1 + seed + 1e-4 * seed} for seed in range(4)},
    }
    rule = Rule("b is worse", "loss of b - loss of a >= 0.05")
    found = rule.conclude(results)
    assert (found.verdict, found.seeds) == ("confirmed", 3)


def test_a_rule_reads_points_of_curves():
    results = {"a": {seed: {"loss": {"1": 2.0, "6": 12.0 + seed / 10}} for seed in range(3)}}
    rule = Rule("worse", "loss of a at 6 / loss of a at 1 >= 5")
    assert rule.conclude(results).verdict == "confirmed"
    assert rule.bound == "loss of a at 6 divided by loss of a at 1 at least 5"


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_page_does_not_replace_results_that_it_leaves_out(tmp_path):
    report, _ = run(tmp_path / "run")
    _, lines, *_ = write_page(report, tmp_path)
    before = lines.read_text()
    write_page(report, tmp_path)  # the same results: nothing would be lost
    fewer = replace(report, results=tuple(result for result in report.results if result.arm != "old"))
    with pytest.raises(ConfigError, match=r"has 3 results that this call would delete \(arms old\)"):
        write_page(fewer, tmp_path)
    assert lines.read_text() == before


def test_a_page_keeps_its_note(tmp_path):
    report, _ = run(tmp_path / "runs", seeds="1")
    page = tmp_path / f"{EXPERIMENT.name}.md"
    for note, expected in (
        ("", ""),
        ("the GPU was shared", "the GPU was shared"),
        ("", "the GPU was shared"),
        ("b", "b"),
    ):
        write_page(replace(report, note=note), tmp_path)
        assert read_note(page) == expected


def test_the_page_names_keys_of_speed_that_differ_between_trials(tmp_path):
    first, second, *_ = run(tmp_path / "run")[0].results
    settings = [
        {**first.settings, "changes": [*first.settings.get("changes", ()), f"train.compile={word}"]}
        for word in ("no", "graphs")
    ]
    pair = (replace(first, settings=settings[0]), replace(second, settings=settings[1]))
    text = Report(EXPERIMENT, pair).to_markdown()
    assert "Trials differ in `train.compile`." in text
    assert "train.compile=" not in text
    assert "train.compile=no" in Report(EXPERIMENT, pair[:1]).to_markdown()


def test_the_page_has_tables_conclusions_and_circumstances(tmp_path):
    report, _ = run(tmp_path / "run")
    assert [conclusion.verdict for conclusion in report.conclusions()] == ["confirmed", "contradicted"]
    page, lines, *_ = write_page(report, tmp_path / "results")
    text = page.read_text()
    assert "| old | 3 | 3.000 ± 0.100 | 1,000 |" in text
    assert "**by_length**, by length" in text
    assert "it is lower by 0.5: confirmed (-1, 95 % interval -1 to -1 of 3 seeds" in text
    assert "Seeds 1, 2, 3" in text
    assert read_results([lines], EXPERIMENT.name) == list(report.results)
    result = report.to_json()
    assert result["rows"][0]["loss_deviation"] == pytest.approx(0.1)
    assert result["rows"][1]["curves"]["by_length"]["2"] == pytest.approx(3.0)


def test_a_page_names_the_corpus_only_if_it_stood_in():
    """A change that the experiment and its stand-in have in common says nothing."""
    experiment = replace(EXPERIMENT, stand_in=("data.corpus=kjv", "tokenizer.kind=bpe"))
    for changes, is_named in ((["tokenizer.kind=bpe"], False), (["data.corpus=kjv", "tokenizer.kind=bpe"], True)):
        result = support.make_result("old", 1, {"loss": 1.0}, changes)
        page = Report(experiment, (result,)).to_markdown()
        assert ("was used instead" in page) == ("the packaged corpus kjv was used instead" in page) == is_named


def test_numbers_have_the_digits_of_their_size():
    assert format_mean("loss", [3.14159]) == "3.142"
    assert format_mean("perplexity", [412.345, 413.345]) == "412.8 ± 0.7"
    assert format_mean("accuracy", [0.5]) == "50.00 %"
    assert format_mean("loss", []) == "–"


def table_of(*arms):
    """The cells of the column loss for arms with these losses by seed."""
    results = [
        support.make_result(name, seed, {"loss": loss})
        for name, losses in zip(("old", "new"), arms, strict=True)
        for seed, loss in enumerate(losses)
    ]
    return [row[2] for row in Report(EXPERIMENT, tuple(results)).table()[1]]


def test_a_column_has_the_decimals_that_its_smallest_deviation_needs():
    assert table_of([5.1, 5.3], [5.2, 5.202]) == ["5.200 ± 0.141", "5.201 ± 0.001"]
    assert table_of([5.1, 5.3], [52000.0, 52002.0]) == ["5.20 ± 0.14", "52001 ± 1"], "the sizes differ too much"


# -- pages ------------------------------------------------------------------------------------------------------------


def test_the_table_of_a_long_curve_has_some_of_its_points():
    experiment = replace(EXPERIMENT, curves={"by_step": "step"})
    curve = {str(10 * step): float(step) for step in range(1, 67)}
    columns, rows = Report(experiment, (support.make_result("old", 1, {"by_step": curve}),)).curve_table("by_step")
    assert columns[0] == "step (12 of 66)"
    assert [columns[1], columns[-1], len(columns)] == ["10", "660", 13]
    assert rows == [["old", *(format_mean("by_step", [curve[point]]) for point in columns[1:])]]


def test_a_page_names_what_a_call_changed():
    plain = support.make_result("old", 1, {"loss": 1.0})
    changed = replace(plain, settings={**plain.settings, "changes": ["train.steps=7"]})
    report = Report(EXPERIMENT, (changed,))
    assert report.about["overrides"] == ["train.steps=7"]
    assert "The call changed the budget or the model: `train.steps=7`." in report.to_markdown()
    assert "The call changed" not in Report(EXPERIMENT, (plain,)).to_markdown()


def test_a_page_names_what_a_call_changed_also_if_a_smoke_run_or_a_stand_in_would():
    experiment = replace(support.STANDING_IN, changes=("train.steps=2000", "model.width=256"))
    called = ["model.width=16", "train.steps=3", "tokenizer.kind=bpe"]
    result = support.make_result("old", 1, {"loss": 1.0}, [*experiment.changes, *called])
    assert sorted(Report(experiment, (result,)).about["overrides"]) == sorted(called)
    smoke = {"changes": [*experiment.changes, *experiment.smoke, "model.depth=3"], "smoke": True}
    assert Report(experiment, (replace(result, settings=smoke),)).about["overrides"] == ["model.depth=3"]
    stand_in = {"changes": [*experiment.changes, *experiment.stand_in, "model.depth=3"], "smoke": False}
    assert Report(experiment, (replace(result, settings=stand_in),)).about["overrides"] == ["model.depth=3"]


def test_a_page_names_what_a_call_changed_also_if_another_arm_would():
    old, new, _ = EXPERIMENT.arms
    experiment = replace(EXPERIMENT, arms=(old, replace(new, changes=("model.depth=1",))))
    result = support.make_result("old", 1, {"loss": 1.0}, ["model.depth=1"])
    assert Report(experiment, (result,)).about["overrides"] == ["model.depth=1"]


def test_a_page_speaks_of_deviations_only_if_there_are_several_seeds():
    first, second = (support.make_result("old", seed, {"loss": 1.0}) for seed in (1, 2))
    assert " Seed 1. Machine" in Report(EXPERIMENT, (first,)).to_markdown()
    assert " Seeds 1, 2; the deviation is that of the seeds" in Report(EXPERIMENT, (first, second)).to_markdown()


def test_a_page_names_the_settings_of_arms_that_others_change():
    old, *others = EXPERIMENT.arms
    shallow = replace(others[0], changes=("model.depth=1",))
    experiment = replace(EXPERIMENT, arms=(old, shallow), changes=("model.depth=6", "train.steps=3"))
    result = support.make_result("old", 1, {"loss": 1.0}, experiment.changes)
    page = Report(experiment, (result,)).to_markdown()
    assert "changes in all arms: `train.steps=3`. Changes in arms that do not set these keys: `model.depth=6`." in page
    assert "that do not set" not in Report(replace(experiment, arms=(old,)), (result,)).to_markdown()


def test_arms_that_are_left_empty_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="arms= names no arm; the arms are old, new, same"):
        plan(tmp_path, arms="")


def test_files_without_results_are_named(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("not a result\n")
    with pytest.raises(ConfigError, match="has no results of"):
        select_results(plan(tmp_path, more=(other,)))


def test_a_corpus_that_stands_in_is_named_before_the_first_trial(tmp_path):
    call = {"experiment": support.STANDING_IN, "seeds": "1", "arms": "old"}
    notice = "The corpus wikitext2 was not found"
    messages = list(run_trials(plan(tmp_path, **call)))
    assert messages[0].startswith(notice)
    assert messages[0].endswith("the packaged corpus kjv is used instead")
    assert not any(notice in message for message in messages[1:])
    again = list(run_trials(plan(tmp_path, **call)))
    assert again == ["1 of 1 trials have results already"], "nothing is trained"
    assert not plan(tmp_path, **call, overrides=("data.corpus=digits",))[0].stands_in, (
        "the call names a corpus of its own"
    )


def test_a_finished_call_leaves_no_empty_folders(tmp_path):
    run(tmp_path, seeds="1,2")
    assert not list(tmp_path.glob("work-*"))
    trial = replace(plan(tmp_path, seeds="3", arms="old")[0], keep=True)
    list(run_trials([trial]))
    assert trial.run_folder.is_dir(), "what is to be kept stays"


def test_results_with_a_stand_in_are_counted_if_they_are_left_out(tmp_path):
    experiment = replace(EXPERIMENT, stand_in=("data.corpus=kjv",))
    trials = plan(tmp_path, experiment)
    settings = trials[0].settings
    real, other = (support.make_result("old", 1, {"loss": loss}) for loss in (1.0, 2.0))
    real = replace(real, settings=settings)
    other = replace(other, settings={**settings, "changes": [*settings["changes"], "data.corpus=kjv"]})
    path = tmp_path / RESULTS_FILE
    path.write_text(other.to_line() + "\n")
    found, hidden = select_results(trials)
    assert ([result.metrics["loss"] for result in found], hidden) == ([2.0], 0)
    path.write_text(f"{other.to_line()}\n{real.to_line()}\n")
    found, hidden = select_results(trials)
    assert ([result.metrics["loss"] for result in found], hidden) == ([1.0], 1)


# -- arms that use no recipe ------------------------------------------------------------------------------------------


def test_an_arm_that_reads_no_corpus_needs_no_stand_in(tmp_path):
    trials = plan(tmp_path, MIXED, arms="old", seeds="1")
    assert not any("is used instead" in message for message in run_trials(trials))
    assert report_of(trials).about["stand_in"] is None
    trials = plan(tmp_path, MIXED, arms="old,new", seeds="1")
    messages = list(run_trials(trials))
    assert messages[0] == "1 of 2 trials have results already", "its results hold for both corpora"
    assert messages[1].endswith("the packaged corpus kjv is used instead")
    results, hidden = select_results(trials)
    assert {result.arm for result in results} == {"old", "new"}
    assert hidden == 0
    assert report_of(trials).about["stand_in"] == "kjv"


def test_results_with_the_corpus_are_preferred_beside_an_arm_that_reads_none(tmp_path):
    trials = plan(tmp_path, MIXED, arms="old,new", seeds="1")
    list(run_trials(trials))
    real = next(result for result in select_results(trials)[0] if result.arm == "new")
    changes = [change for change in real.settings["changes"] if change not in MIXED.stand_in]
    real = replace(real, settings={**real.settings, "changes": changes}, metrics={"loss": 7.0})
    with (tmp_path / RESULTS_FILE).open("a") as file:
        file.write(real.to_line() + "\n")
    results, hidden = select_results(trials)
    assert {result.arm: result.metrics["loss"] for result in results} == {"old": 3.0, "new": 7.0}
    assert hidden == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.depth=4", "the arm old trains nothing, so it has no model.depth; leave it out, or leave out the arm"),
        ("train.seed=4", "train.seed is the seed of a trial; write seeds=, as in seeds=4"),
        ("train.lr=0.5", "train.lr is what .* chooses by itself; leave it out"),
    ],
)
def test_an_override_without_effect_is_refused(tmp_path, override, message):
    arms = "old" if "depth" in override else "new"
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, replace(MIXED, set_by_measure=("train.lr",)), arms=arms, overrides=(override,))


def test_an_arm_that_cannot_be_compared_is_in_the_table_and_not_in_the_plot():
    old, new, same = EXPERIMENT.arms
    experiment = replace(EXPERIMENT, arms=(old, replace(new, is_plotted=False), same), curves={})
    results = [support.make_result(arm.name, 1, {"loss": 1.0}) for arm in experiment.arms]
    report = Report(experiment, tuple(results))
    assert [row[0] for row in report.table()[1]] == ["old", "new", "same"]
    (axes,) = draw_report(report).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["old", "same"]
