"""The plots of experiments: a power law on logarithmic axes, panels of columns, and curves that leave the picture."""

from dataclasses import replace

import experiment_support as support
import numpy as np
import pytest

from monoblock.experiments.library import load_experiment
from monoblock.experiments.report import Report, draw_report
from monoblock.plots.arms import ArmCurves, draw_arm_curves, fit_power_law

pytest.importorskip("matplotlib")

SIZES = {"old": 100, "new": 1000, "same": 10_000}
LOSSES = {"old": 4.0, "new": 3.0, "same": 2.5}


def report(**changes):
    """A report of two seeds for each arm, whose losses lie at equal distances around those of the table."""
    experiment = replace(support.EXPERIMENT, curves={}, **changes)
    results = [
        support.make_result(arm, seed, {"loss": LOSSES[arm] + offset, "parameters": SIZES[arm]})
        for arm in SIZES
        for seed, offset in ((1, -0.1), (2, 0.1))
    ]
    return Report(experiment, tuple(results))


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


# -- one column over another ------------------------------------------------------------------------------------------


def test_a_scatter_has_a_point_for_each_arm_and_the_line_that_fits_the_means():
    (axis,) = draw_report(report(scatter=("parameters", "loss"))).axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("parameters", "loss")
    assert [(text.get_text(), text.xy) for text in axis.texts] == [(arm, (SIZES[arm], LOSSES[arm])) for arm in SIZES]
    bars = [tuple(bar.get_segments()[0][:, 1]) for bar in axis.collections]
    deviation = 0.02**0.5
    assert bars == [pytest.approx((mean - deviation, mean + deviation)) for mean in LOSSES.values()]

    slope, start = np.polyfit(np.log(list(SIZES.values())), np.log(list(LOSSES.values())), 1)
    (line,) = [line for line in axis.lines if line.get_label().startswith("loss")]
    assert list(line.get_xdata()) == list(SIZES.values())
    assert line.get_ydata() == pytest.approx([np.exp(start) * size**slope for size in SIZES.values()])
    assert legend(axis) == [f"loss ∝ (parameters)^{slope:.3g}"]


def test_a_scatter_of_two_arms_has_no_line_and_leaves_out_arms_without_the_columns():
    complete = report(scatter=("parameters", "loss"))
    rest = [one for one in complete.results if one.arm != "same"]
    fit = support.make_result("same", 1, {"exponent": 0.1})
    (axis,) = draw_report(Report(complete.experiment, (*rest, fit))).axes
    assert [text.get_text() for text in axis.texts] == ["old", "new"]
    assert axis.get_legend() is None


def test_a_power_law_is_found():
    assert fit_power_law([(x, 3.0 * x**-0.25) for x in (2.0, 5.0, 70.0)]) == pytest.approx((-0.25, 3.0))


# -- panels of columns ------------------------------------------------------------------------------------------------


def test_columns_are_drawn_before_the_curves():
    curves = report(plotted=("parameters",))
    results = [replace(one, metrics={**one.metrics, "curve": {"1": 2.0, "2": 1.0}}) for one in curves.results]
    columns, panel = draw_report(Report(replace(curves.experiment, curves={"curve": "step"}), tuple(results))).axes
    assert [container.lines[0].get_ydata()[0] for container in columns.containers] == list(SIZES.values())
    assert panel.get_xlabel() == "step"
    assert legend(panel) == list(SIZES)


@pytest.mark.parametrize(
    ("plotted", "labels"), [((), ["loss"]), (("parameters", "loss"), ["parameters", "loss"]), (("loss",), ["loss"])]
)
def test_the_columns_of_the_plot_have_a_panel_each(plotted, labels):
    axes = draw_report(report(plotted=plotted)).axes
    assert [axis.get_ylabel() for axis in axes] == labels
    for axis, label in zip(axes, labels, strict=True):
        assert [tick.get_text() for tick in axis.get_xticklabels()] == list(SIZES)
        heights = [container.lines[0].get_ydata()[0] for container in axis.containers]
        assert heights == pytest.approx(list((LOSSES if label == "loss" else SIZES).values()))


# -- curves that leave the picture ------------------------------------------------------------------------------------

FLAT, STEEP = [(2.0, 0.1)] * 4, [(1e-90, 0.0), (1e-60, 0.0), (1e-30, 0.0), (1.0, 0.0)]


def curves(guide=None, **arms):
    return ArmCurves("layer", "gradient", ["0", "1", "2", "3"], arms, guide)


def test_a_logarithmic_plot_starts_at_its_floor_and_names_the_curves_below():
    (axis,) = draw_arm_curves("title", [curves(flat=FLAT, steep=STEEP)], logarithmic=True, floor=1e-3).axes
    low, high = axis.get_ylim()
    assert low == 1e-3
    assert 2.1 < high < 2.1 * 2
    assert legend(axis) == ["flat", "steep (falls below 0.001)"]
    assert list(axis.lines[1].get_ydata()) == [mean for mean, _ in STEEP], "the slope at the edge is the true one"


def test_a_long_legend_is_beside_the_curves():
    few, many = ([f"arm{number}" for number in range(count)] for count in (8, 9))
    figure = draw_arm_curves("title", [curves(**dict.fromkeys(few, FLAT))])
    assert legend(figure.axes[0]) == few
    figure = draw_arm_curves("title", [curves(**dict.fromkeys(many, FLAT))])
    assert figure.axes[0].get_legend() is None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == many


@pytest.mark.parametrize(
    ("arms", "options"),
    [
        ({"flat": FLAT}, {"logarithmic": True, "floor": 1e-3}),  # nothing lies below
        ({"steep": STEEP}, {"logarithmic": True, "floor": 10.0}),  # nothing lies above
        ({"flat": FLAT, "steep": STEEP}, {"logarithmic": True}),
        ({"flat": FLAT, "steep": STEEP}, {"logarithmic": False, "floor": 1e-3}),
    ],
)
def test_a_floor_changes_no_other_plot(arms, options):
    (plain,) = draw_arm_curves("title", [curves(**arms)], logarithmic=options["logarithmic"]).axes
    (axis,) = draw_arm_curves("title", [curves(**arms)], **options).axes
    assert axis.get_ylim() == plain.get_ylim()


def test_a_guide_falls_by_its_factor_from_the_end_of_each_curve():
    panels = [curves(0.5, flat=FLAT, steep=STEEP), curves(flat=FLAT)]
    first, second = draw_arm_curves("title", panels, logarithmic=True, floor=1e-3).axes
    guides = [list(line.get_ydata()) for line in first.lines[2:]]
    assert guides == [[0.125, 0.25, 0.5, 1.0], [0.25, 0.5, 1.0, 2.0]]
    assert legend(first) == ["flat", "steep (falls below 0.001)", "a factor of 0.5 per layer"]
    assert len(second.lines) == 1


def test_an_arm_has_the_same_color_and_style_in_every_panel():
    first, second = draw_arm_curves("title", [curves(flat=FLAT, steep=STEEP), curves(steep=STEEP)]).axes
    one, other = first.lines[1], second.lines[0]
    assert (one.get_color(), one.get_linestyle(), one.get_marker()) == (
        other.get_color(),
        other.get_linestyle(),
        other.get_marker(),
    )
    assert one.get_color() != first.lines[0].get_color()


@pytest.mark.parametrize(
    ("points", "places"),
    [
        (["1", "2", "4", "6"], [0, 1, 2, np.log2(6)]),
        (["0", "0.5", "1"], [0, 1, 2]),  # equal distances
        (["0", "0.5", "2"], [-2, -1, 1]),  # 0 has no logarithm
        (["10", "20", "30"], [0, 1, 2]),
        (["small", "large"], [0, 1]),
    ],
)
def test_points_lie_at_their_logarithms_unless_their_distances_are_equal(points, places):
    panel = ArmCurves("length", "loss", points, {"arm": [(1.0, 0.0)] * len(points)}, None)
    (axis,) = draw_arm_curves("title", [panel]).axes
    assert list(axis.lines[0].get_xdata()) == pytest.approx(places)
    assert [text.get_text() for text in axis.get_xticklabels()] == points


# -- what the experiments declare -------------------------------------------------------------------------------------


def test_experiments_plot_only_what_they_measure():
    for name in ("smoothing", "scaling-law", "residuals"):
        experiment = load_experiment(name)
        assert {*experiment.plotted, *(experiment.scatter or ())} <= {*experiment.columns}
        assert {*experiment.guides} <= {*experiment.curves}
    assert load_experiment("smoothing").plotted == ("bleu_lowercased", "validation_perplexity")
    assert load_experiment("scaling-law").scatter == ("block_parameters", "loss")


def test_the_gradients_of_stacks_are_plotted_with_the_line_of_the_claim():
    gradients = {"residual-start": 1.0, "bare-start": 1e-4}  # the factor per layer
    results = [
        replace(
            support.make_result(arm, 1, {"gradient": {str(layer): factor ** (24 - layer) for layer in range(25)}}),
            experiment="residuals",
        )
        for arm, factor in gradients.items()
    ]
    (axis,) = draw_report(Report(load_experiment("residuals"), tuple(results))).axes
    assert axis.get_ylim()[0] == 1e-4
    assert axis.lines[-1].get_ydata()[0] == pytest.approx(0.9**24)
    assert legend(axis)[1:] == ["bare-start (falls below 0.0001)", "a factor of 0.9 per layer"]
