"""Plots are well-formed, self-contained, named, reproducible; their small computations against plain ones."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from raytriever.reports.plots import (
    Interval,
    Panel,
    SettingPanel,
    curve_panels,
    heat_map,
    interval_panels,
    running_mean,
    setting_panels,
    shown,
    thin,
)  # fmt: skip

ODD = "a <b> & $x_1$ \\frac \n\x00 漢"
NAMESPACE = "{http://www.w3.org/2000/svg}"
VALUES = np.random.default_rng(0).normal(size=50)
STEPS = np.arange(1, 51)


def intervals(name: str) -> str:
    return interval_panels({name: [Interval(name, 0.1, 0.0, 0.2, True)]}, name, f"intervals {name}")


def curves(name: str) -> str:
    panels = [Panel(name, STEPS, VALUES), Panel("rate", STEPS, VALUES, smoothed=False)]
    return curve_panels(panels, f"curves {name}", [25.5])


def joined_settings(name: str) -> str:
    return setting_panels([setting(name, ["1", "2", "3"], is_joined=True)], f"joined {name}")


def dotted_settings(name: str) -> str:
    return setting_panels([setting(name, ["1e-6", "1e-4", "1"]), setting(name, ["x", "y", name])], f"dots {name}")


def setting(name: str, values: list[str], is_joined: bool = False) -> SettingPanel:
    return SettingPanel(name, name, values, np.array([0.5, np.nan, 0.7]), np.zeros(3), is_joined)


EVERY = [intervals, curves, joined_settings, dotted_settings]
PLOTS = pytest.mark.parametrize("plot", EVERY)


@PLOTS
@pytest.mark.parametrize("name", ["plain name", ODD])
def test_is_well_formed_and_refers_to_nothing_outside(plot: Callable[[str], str], name: str) -> None:
    svg = plot(name)
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{NAMESPACE}svg"
    assert "viewBox" in root.attrib
    assert re.findall("https?:[^\"']*", svg) == ["http://www.w3.org/2000/svg"]
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    referred = re.findall(r'href="([^"]*)"|url\(([^)]*)\)', svg)
    assert referred
    assert {(a or b).removeprefix("#") for a, b in referred} <= set(ids)
    assert not [element for element in root.iter() if element.tag in (f"{NAMESPACE}style", f"{NAMESPACE}image")]


@PLOTS
def test_same_numbers_same_bytes_and_the_users_style_is_left_alone(plot: Callable[[str], str]) -> None:
    first = plot(ODD)
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 30, "text.parse_math": True}):
        assert plot(ODD) == first
        assert mpl.rcParams["font.size"] == 30
    texts = {"".join(each.itertext()).strip() for each in ElementTree.fromstring(first).iter(f"{NAMESPACE}text")}
    assert "a <b> & $x_1$ \\frac � 漢" in texts  # names stay text as they are


def test_all_that_is_given_is_drawn() -> None:
    interval, both = Interval("a", 0.1, 0.0, 0.2, True), setting("m", ["1", "2", "3"], is_joined=True)
    panel = Panel("a", STEPS[:5], VALUES[:5], marked=None)
    changes: list[tuple[Callable[[Any], str], Any, dict[str, Any]]] = [
        (lambda each: interval_panels({"m": [each]}, "x", "d"), interval,
         {"low": 0.05, "high": 0.15, "is_significant": False}),
        (lambda each: curve_panels([each], "d"), panel,
         {"steps": STEPS[1:6], "values": VALUES[1:6], "smoothed": False}),
        (lambda each: curve_panels([each], "d"), replace(panel, smoothed=False), {"dots": True}),
        (lambda each: setting_panels([each], "d"), both,
         {"key": "k", "names": ["1", "2", "4"], "deviations": np.array([0.1, 0.2, 0.3]), "joined": False}),
    ]  # fmt: skip
    for draw, given, changed in changes:
        plain = draw(given)
        assert [name for name, value in changed.items() if draw(replace(given, **{name: value})) == plain] == []


def test_two_plots_on_a_page_share_no_id() -> None:
    ids = [set(re.findall(r'\bid="([^"]*)"', plot("name"))) for plot in EVERY]
    assert len(set.union(*ids)) == sum(map(len, ids))


ROUNDED = 0.4976969308567438, 0.49769693085674377


@pytest.mark.parametrize(
    "values",
    [np.zeros(1), np.full(7, 0.3), np.array([0.0, 1e6]), np.array(ROUNDED), np.array([1e-9, -0.0, 1e20, 1e20 + 2**15])],
)
def test_few_and_equal_values_can_be_drawn(values: np.ndarray) -> None:
    svg = curve_panels([Panel("a", np.arange(len(values)), values)], "three")
    ElementTree.fromstring(svg)
    assert "nan" not in svg.lower()


def test_running_mean_is_the_mean_of_a_full_window_around_each_step() -> None:
    values = np.random.default_rng(1).normal(size=80)
    steps = np.arange(80, dtype=np.float64)
    expected = {step: np.mean(values[step - 4 : step + 5]) for step in range(4, 76)}  # 80 // 10 + 1 = 9 points
    np.testing.assert_allclose(running_mean(steps), list(expected), rtol=1e-12)
    np.testing.assert_allclose(running_mean(values), list(expected.values()), rtol=1e-12)
    for points in (1, 2, 9, 10, 19):  # of few points it is the points
        np.testing.assert_array_equal(running_mean(steps[:points]), steps[:points])


def test_long_curves_are_thinned_to_means() -> None:
    values = np.random.default_rng(2).normal(size=1200)
    np.testing.assert_allclose(thin(values), values.reshape(400, 3).mean(axis=1))
    assert len(thin(values[:1000])) == 400
    np.testing.assert_array_equal(thin(values[:400]), values[:400])
    assert len(curve_panels([Panel("loss", np.arange(100_000), np.ones(100_000))], "long")) < 100_000


def test_the_marked_step_is_set_off_once(figures: list[Any]) -> None:
    panel = Panel("nDCG@10", np.array([0, 10, 20]), np.array([0.1, 0.3, 0.2]), smoothed=False)
    plain, marked, absent = (curve_panels([replace(panel, marked=step)], "plot") for step in (None, 10, 15))
    assert "#c8642b" not in plain
    assert "#c8642b" in marked
    assert absent == plain
    dot, level = figures[1].axes[0].lines[1:]
    assert (list(dot.get_xdata()), {*dot.get_ydata(), *level.get_ydata()}) == ([10], {0.3})


def test_a_plot_is_as_tall_as_what_it_shows() -> None:
    def inches(svg: str) -> float:
        return round(float(re.findall(r'viewBox="0 0 691.2 ([0-9.]+)"', svg)[0]) / 72, 6)

    interval, panel = Interval("a", 0.1, 0.0, 0.2, True), Panel("a", STEPS, VALUES)
    assert [inches(interval_panels({"m": [interval] * n, "o": []}, "x", "d")) for n in (1, 3)] == [1.44, 2.12]
    assert [inches(curve_panels([panel] * n, "d")) for n in (1, 2, 3)] == [1.95, 1.95, 3.9]
    for shape, height in (((2, 4), 4.24), ((4, 4), 8.08), ((8, 4), 8.08)):
        svg = heat_map(np.ones(shape, np.float32), np.zeros(shape, bool), "d")
        assert (inches(svg), svg.count("<image")) == (height, 2)  # of the matrix, and of the scale beside it


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are drawn."""
    drawn, save = list[Any](), Figure.savefig

    def note(figure: Figure, *args: Any, **how: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **how)

    monkeypatch.setattr(Figure, "savefig", note)
    return drawn


def test_intervals_of_all_measures_share_their_names(figures: list[Any]) -> None:
    both = [Interval(name, 0.75, 0.5, 1.0, True) for name in ("first", "second")]
    svg = interval_panels({"m": both, "o": both}, "x" * 80, "d")
    assert [svg.count(f">{name}<") for name in ("first", "second")] == [1, 1]
    left, right = figures[0].axes
    assert left.get_position().y0 == right.get_position().y0
    assert left.get_position().x1 < right.get_position().x0
    for axes in (left, right):
        low, high = axes.get_ylim()
        assert low < 0 < 1 < high < 2  # a row of each
        assert list(axes.lines[0].get_xdata()) == [0, 0]
        assert not axes.spines["left"].get_visible()
        assert [axis.get_major_ticks()[0].tick1line.get_markersize() > 0 for axis in (axes.xaxis, axes.yaxis)] == [
            True,
            False,
        ]
        assert [axis.get_gridlines()[0].get_visible() for axis in (axes.xaxis, axes.yaxis)] == [True, False]
    assert len(figures[0].get_supxlabel()) == 70
    assert [text.get_text() for text in left.get_yticklabels()] == ["second", "first"]
    interval_panels({name * 30: both for name in "abcdef"}, "x", "d")  # narrow ones
    for axes, other in pairwise(figures[1].axes):
        assert axes.get_tightbbox().x1 <= other.get_tightbbox().x0


def test_curves_stand_two_beside_each_other_over_whole_steps(figures: list[Any]) -> None:
    curve_panels([Panel("a", np.arange(3), VALUES[:3], smoothed=False)] * 3, "d", [1.5])
    axes = figures[0].axes
    assert [each.get_visible() for each in axes] == [True, True, True, False]
    assert [each.get_position().y0 == axes[0].get_position().y0 for each in axes] == [True, True, False, False]
    assert axes[0].get_tightbbox().y0 >= axes[2].get_tightbbox().y1
    assert not [place for place in axes[0].get_xticks() if place % 1]
    assert axes[0].get_xlabel() == "step"
    assert axes[0].xaxis.get_gridlines()[0].get_visible()


def test_cells_left_out_are_orange_and_the_scale_is_lower_than_the_matrix(figures: list[Any]) -> None:
    heat_map(np.eye(2, dtype=np.float32), np.array([[True, False], [False, False]]), "d")
    matrix, scale = figures[0].axes
    image = matrix.images[0]
    assert [mpl.colors.to_hex(image.cmap(image.norm(image.get_array()))[0, n]) for n in (0, 1)] == [
        "#c8642b",
        "#f7fbff",
    ]
    assert scale.get_position().height < matrix.get_position().height


def test_settings_are_dots_below_their_names_the_highest_a_large_one(figures: list[Any]) -> None:
    means = np.arange(40.0)
    panel = SettingPanel("m", "k" * 70, ["x", "y" * 20 + "/model-b"] * 20, means, np.zeros(40), joined=True)
    for panels in ([panel], [panel] * 2, [panel] * 3):
        setting_panels(panels, "d")
    assert [[each.get_visible() for each in figure.axes] for figure in figures] == [
        [True],
        [True] * 2,
        [True] * 3 + [False],
    ]
    assert [figure.get_size_inches()[1] for figure in figures] == [2.6, 2.6, 5.2]
    axes = figures[0].axes[0]
    dots, highest = axes.lines[0], axes.lines[-1]
    assert dots.get_linestyle() == "None"  # nothing lies between names
    assert [list(dots.get_xdata()), list(dots.get_ydata())] == [[0] * 20 + [1] * 20, [*means[::2], *means[1::2]]]
    assert [list(highest.get_xdata()), list(highest.get_ydata())] == [[1], [39]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["x", "…" + "y" * 16 + "/model-b"]
    assert (axes.get_title(loc="left"), len(axes.get_xlabel())) == ("m", 60)
    assert axes.xaxis.get_gridlines()[0].get_visible()


@pytest.mark.parametrize(("names", "is_even"), [
    (["0.5", "5", "50"], True),
    (["2", "20", "200"], True), (["2", "100", "198"], True), (["2", "20", "198"], False), (["0", "10", "20"], True),
])  # fmt: skip
def test_values_a_hundredfold_apart_are_on_a_logarithmic_scale(names: list[str], is_even: bool) -> None:
    svg = setting_panels([SettingPanel("m", "k", names, np.array([0.5, 0.7, 0.6]), np.zeros(3))], "d")
    x = [float(place) for place in re.findall(r'<use [^>]*x="([0-9.]+)"[^>]*fill: #1f5a94', svg)[:3]]
    assert (x[1] - x[0] == pytest.approx(x[2] - x[1])) == is_even


def test_a_long_name_is_cut() -> None:
    assert [shown("a" * 40), shown("a" * 41), shown("abc", 2)] == ["a" * 40, "a" * 39 + "…", "a…"]
