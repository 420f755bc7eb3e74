"""A metric of a trace as a picture: which node stands out, which time is marked, and what nobody observed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'eagle-eye[reports]'")

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from eagle_eye import traces
from eagle_eye.server.backtest.recorder import TraceWriter
from eagle_eye.server.backtest.trace import FORMAT, Header, Label, TraceNode
from eagle_eye.traces.trace_plot import FAULTS, PEERS
from tests.docs.pages import blocks

START_S = 1_700_000_000.0
SECONDS = 20
LABEL = Label(START_S + 8, START_S + 15, ["n1"], "thermal_throttle", "exclude")
WATTS = "gpu_power_watts"

Courses = Mapping[tuple[str, int], Mapping[int, float]]  # of (node, device) the value at each second


@pytest.fixture(autouse=True)
def _without_a_window() -> Iterator[None]:
    with mpl.rc_context({"backend": "Agg"}):
        yield
        plt.close("all")


def steady(value: float, seconds: range = range(1, SECONDS + 1)) -> dict[int, float]:
    return dict.fromkeys(seconds, value)


def trace(
    folder: Path,
    courses: Courses,
    labels: list[Label] | None,
    metric: str = WATTS,
    nodes: tuple[str, ...] = ("n1", "n2", "n3"),
) -> traces.Trace:
    rows = [(second, *key, value) for key, course in courses.items() for second, value in course.items()]
    header = Header(FORMAT, "j", 1.0, START_S, START_S + SECONDS, [TraceNode(node, 8) for node in nodes])
    with TraceWriter(folder / "trace") as writer:
        writer.samples(
            {
                "time": [START_S + second for second, *_ in rows],
                "node": [node for _, node, *_ in rows],
                "device": [device for *_, device, _ in rows],
                metric: [value for *_, value in rows],
            }
        )
        writer.finish(header, labels=labels)
    return traces.read(folder / "trace")


def healthy(*nodes: str) -> dict[tuple[str, int], Mapping[int, float]]:
    return {(node, device): steady(400.0 + device) for node in nodes for device in (0, 1)}


def lines(ax: Axes) -> dict[str, LineCollection]:
    """Return what was drawn by its name in the legend."""
    return {str(one.get_label()): one for one in ax.collections if isinstance(one, LineCollection)}


def pieces(drawn: LineCollection) -> list[tuple[list[int], list[float]]]:
    """Return the seconds and values of each unbroken piece of line."""
    found = [np.asarray(piece) for piece in drawn.get_segments()]
    return [
        ([round(day * 86_400 - START_S) for day in one[:, 0].tolist()], one[:, 1].astype(float).tolist())
        for one in found
    ]


def test_the_labelled_node_stands_out_from_the_others(tmp_path: Path) -> None:
    drawn = lines(trace(tmp_path, healthy("n1", "n2", "n3"), [LABEL]).plot(WATTS))
    assert list(drawn) == ["2 other nodes", "thermal throttle: n1"]
    others, accused = drawn.values()
    for one, colour in ((others, PEERS), (accused, FAULTS[0])):
        assert np.all(np.asarray(one.get_edgecolor()) == mpl.colors.to_rgba(colour))
    assert np.max(others.get_linewidth()) < np.min(accused.get_linewidth())
    assert (len(others.get_segments()), len(accused.get_segments())) == (4, 2)
    assert accused.get_zorder() > others.get_zorder()


def test_the_time_of_the_fault_is_marked(tmp_path: Path) -> None:
    (marked,) = trace(tmp_path, healthy("n1", "n2", "n3"), [LABEL]).plot(WATTS).patches
    seconds = [day * 86_400 - START_S for day in (marked.get_x(), marked.get_x() + marked.get_width())]  # type: ignore[attr-defined]
    assert seconds == pytest.approx([8, 15], abs=0.01)


def test_each_fault_has_its_colour_and_a_node_that_of_its_first(tmp_path: Path) -> None:
    again = Label(START_S + 16, START_S + 18, ["n1", "n2"], "gpu_lost", "exclude")
    ax = trace(tmp_path, healthy("n1", "n2", "n3"), [LABEL, again]).plot(WATTS)
    drawn = lines(ax)
    assert list(drawn) == ["1 other node", "thermal throttle: n1", "gpu lost: n1, n2"]
    assert [len(one.get_segments()) for one in drawn.values()] == [2, 2, 2]
    assert [mpl.colors.to_hex(one.get_facecolor()) for one in ax.patches] == list(FAULTS[:2])


def test_without_labels_nobody_stands_out(tmp_path: Path) -> None:
    ax = trace(tmp_path, healthy("n1", "n2", "n3"), None).plot(WATTS)
    assert list(lines(ax)) == ["3 nodes"]
    assert not ax.patches


def test_a_fault_of_no_node_is_marked_and_named(tmp_path: Path) -> None:
    spike = Label(START_S + 8, START_S + 15, [], "loss_spike", "job")
    ax = trace(tmp_path, healthy("n1", "n2", "n3"), [spike]).plot(WATTS)
    assert list(lines(ax)) == ["3 nodes", "loss spike: no single node"]
    assert len(ax.patches) == 1


def test_what_was_not_observed_is_a_gap_and_what_stands_alone_a_dot(tmp_path: Path) -> None:
    course = {**steady(400.0, range(1, 6)), 9: 300.0, **steady(350.0, range(14, 17))}
    ax = trace(tmp_path, {("n1", 0): course, **healthy("n2", "n3")}, [LABEL]).plot(WATTS)
    found = pieces(lines(ax)["thermal throttle: n1"])
    assert found == [([1, 2, 3, 4, 5], [400.0] * 5), ([14, 15, 16], [350.0] * 3)]
    (dot,) = (one for one in ax.lines if one.get_marker() == ".")
    assert list(np.asarray(dot.get_ydata())) == [300.0]


def test_rows_far_apart_are_a_line_where_that_is_usual(tmp_path: Path) -> None:
    slow = steady(400.0, range(1, SECONDS + 1, 5))
    drawn = lines(trace(tmp_path, {("n1", 0): slow, **healthy("n2", "n3")}, [LABEL]).plot(WATTS))
    assert pieces(drawn["thermal throttle: n1"]) == [([1, 6, 11, 16], [400.0] * 4)]


def test_nodes_that_nobody_observed_are_counted_and_the_labelled_one_named(tmp_path: Path) -> None:
    both = Label(LABEL.start, LABEL.end, ["n1", "n2"], "node_unreachable", "exclude")
    drawn = lines(trace(tmp_path, healthy("n2", "n3"), [both], nodes=("n1", "n2", "n3", "n4")).plot(WATTS))
    assert list(drawn) == ["1 other node, 1 more not observed", "node unreachable: n1, n2 (not observed: n1)"]


def test_the_axes_span_the_trace_not_what_was_observed(tmp_path: Path) -> None:
    ax = trace(tmp_path, {("n1", 0): steady(1.0, range(5, 9))}, [LABEL]).plot(WATTS)
    assert [round(day * 86_400 - START_S) for day in ax.get_xlim()] == [0, SECONDS]


def test_what_was_not_finite_is_a_cross_at_the_top(tmp_path: Path) -> None:
    course = {**steady(2.0), 12: math.inf}
    ax = trace(tmp_path, {("n1", 0): course}, None, metric="train_loss").plot("train_loss")
    (cross,) = (one for one in ax.lines if one.get_marker() == "x")
    assert cross.get_label() == "not finite"
    assert list(np.asarray(cross.get_xdata())) == pytest.approx([(START_S + 12) / 86_400])
    assert cross.get_transform() == ax.get_xaxis_transform()


def test_counters_are_drawn_from_their_first_value(tmp_path: Path) -> None:
    name = "gpu_ecc_corrected_total"
    course = {1: 1e6, 2: 1e6, 3: 1e6 + 5}
    ax = trace(tmp_path, {("n1", 0): course}, [LABEL], metric=name).plot(name)
    assert pieces(lines(ax)["thermal throttle: n1"]) == [([1, 2, 3], [0.0, 0.0, 5.0])]
    assert ax.get_title(loc="left").endswith(", since its first value")


def test_one_device_alone(tmp_path: Path) -> None:
    drawn = lines(trace(tmp_path, healthy("n1", "n2", "n3"), [LABEL]).plot(WATTS, device=1))
    assert [len(one.get_segments()) for one in drawn.values()] == [2, 1]
    assert pieces(drawn["thermal throttle: n1"])[0][1] == [401.0] * SECONDS


def test_a_node_that_the_header_lacks_is_drawn_too(tmp_path: Path) -> None:
    drawn = lines(trace(tmp_path, healthy("n1", "n2", "n3"), [LABEL], nodes=("n1", "n2")).plot(WATTS))
    assert list(drawn) == ["2 other nodes", "thermal throttle: n1"]


def test_of_a_large_fleet_median_and_range_are_drawn(tmp_path: Path) -> None:
    fleet = tuple(f"p{at}" for at in range(65))
    courses = healthy("n1", *fleet)
    for node in fleet:
        for device in (0, 1):
            courses[(node, device)] = {s: v for s, v in courses[(node, device)].items() if s != 7}
    ax = trace(tmp_path, courses, [LABEL], nodes=("n1", *fleet)).plot(WATTS)
    assert list(lines(ax)) == ["thermal throttle: n1"]
    (median,) = (one for one in ax.lines if str(one.get_label()).startswith("65 other nodes"))
    assert median.get_label() == "65 other nodes: median, range"
    expected = [math.nan if second == 7 else 400.5 for second in range(1, SECONDS + 1)]
    np.testing.assert_array_equal(np.asarray(median.get_ydata()), expected)
    seconds = [round(day * 86_400 - START_S) for day in np.asarray(median.get_xdata()).tolist()]
    assert seconds == list(range(1, SECONDS + 1))


def test_it_draws_into_the_axes_that_it_is_given(tmp_path: Path) -> None:
    _, given = plt.subplots()
    assert trace(tmp_path, healthy("n1"), [LABEL]).plot(WATTS, ax=given) is given


@pytest.mark.parametrize(
    ("metric", "device", "said"),
    [
        ("gpu_power_wats", None, r"trace has no metric 'gpu_power_wats'; did you mean gpu_power_watts\?"),
        ("device", None, "trace has no metric 'device'"),
        ("gpu_sm_clock_hertz", None, "gpu_sm_clock_hertz was never observed"),
        (WATTS, 9, "gpu_power_watts was observed of no device 9; of 0, 1 it was"),
    ],
)
def test_what_was_not_observed_is_an_error_that_says_so(
    metric: str, device: int | None, said: str, tmp_path: Path
) -> None:
    found = trace(tmp_path, healthy("n1"), None)
    with pytest.raises(ValueError, match=said):
        found.plot(metric, device=device)


def test_the_document_shows_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/traces.md"""
    trace(tmp_path, healthy("n1", "n2", "n3"), [LABEL]).folder.rename(tmp_path / "OUT")
    monkeypatch.chdir(tmp_path)
    (block,) = (one for one in blocks("docs/reference/traces.md") if one.mark == "run by tests/traces/test_plot.py")
    exec(block.text, {})
    assert (tmp_path / "power.png").stat().st_size > 1_000


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    folder = trace(tmp_path, healthy("n1"), None).folder
    program = (
        "import sys; sys.modules['matplotlib'] = None\nfrom eagle_eye import traces\n"
        f"try:\n    traces.read({str(folder)!r}).plot('{WATTS}')\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    needs = 'Trace.plot needs: pip install "eagle-eye[client,reports]" (no module matplotlib)\n'
    assert done.stdout == needs


def test_matplotlib_is_imported_when_a_plot_is_asked_for(tmp_path: Path) -> None:
    folder = trace(tmp_path, healthy("n1"), None).folder
    program = (
        "import sys; from eagle_eye import traces\n"
        f"traces.read({str(folder)!r}).samples; print('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
