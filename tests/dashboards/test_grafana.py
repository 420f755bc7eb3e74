"""Dashboards: made of their source, asking only for metrics that exist, and getting answers of a real Prometheus."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.grafana.source import __main__ as source
from dashboards.grafana.source.parts import described
from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX
from tests.dashboards.boards import GRAFANA, METRIC, NAMES, Asked, filled, panels, queries, read, variables
from tests.dashboards.site import Site, watched
from tests.server.builders import running

ASKED = tuple(queries())


def served(page: str) -> set[str]:
    """Return the series' names that a page of metrics may have."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (eagle_eye_\w+) (\w+)", page, re.MULTILINE):
        found |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return found


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every series that may be asked for: the catalogue's and the server's own."""
    with running(tmp_path_factory.mktemp("server")) as server:
        own = served(server.client.get("/metrics").text)
    # Absent before the first word of a node, and without schedulers.
    own |= {"eagle_eye_ingest_age_seconds"}
    return own | {PROMETHEUS_PREFIX + spec.name for spec in METRICS}


def test_the_json_is_what_the_source_says() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / "dashboards").iterdir()}
    assert written == source.texts(), "run make dashboards"


def test_no_panel_asks_for_a_metric_that_does_not_exist(known: set[str]) -> None:
    unknown = {(one.board, one.panel, name) for one in ASKED for name in METRIC.findall(one.expr) if name not in known}
    assert unknown == set()


def test_no_variable_asks_for_a_metric_that_does_not_exist(known: set[str]) -> None:
    asked = {name for board in NAMES for query in variables(read(board)).values() for name in METRIC.findall(query)}
    assert asked
    assert asked <= known


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_has_a_lasting_address_and_no_two_panels_of_one_number(name: str) -> None:
    board = read(name)
    assert board["uid"] == f"eagle-eye-{name}"
    numbers = [panel["id"] for panel in board["panels"] if "id" in panel]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("incidents", {"Time to detect", "Time to recover", "Precision by the ledger"}),
        ("fleet", {"Exclusion budget", "Racks with nodes in trouble", "Switches with nodes in trouble"}),
        ("job", {"Effective training time"}),
    ],
)
def test_what_people_ask_first_has_a_panel(name: str, titles: set[str]) -> None:
    assert titles <= {panel["title"] for panel in panels(read(name))}


@pytest.mark.parametrize("name", NAMES)
def test_no_two_panels_lie_on_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in read(name)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert taken


def test_panels_say_in_which_unit_they_are() -> None:
    without = {
        (name, panel["title"])
        for name in NAMES
        for panel in panels(read(name))
        if panel["type"] != "table" and "unit" not in panel["fieldConfig"]["defaults"]
    }
    assert without == set()


@pytest.mark.parametrize("name", NAMES)
def test_each_panel_says_what_it_shows(name: str) -> None:
    silent = [panel["title"] for panel in panels(read(name)) if panel.get("targets") and not panel.get("description")]
    assert silent == []


def test_a_metric_that_is_documented_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="eagle_eye_surprise_total: expected a metric"):
        described({"title": "x", "type": "stat", "targets": [{"expr": "rate(eagle_eye_surprise_total[5m])"}]})


@pytest.mark.parametrize("name", NAMES)
def test_incidents_and_actions_are_annotations_everywhere(name: str) -> None:
    found = {one["name"]: one for one in read(name)["annotations"]["list"]}
    assert "eagle_eye_incident_onset_timestamp_seconds" in found["Incidents"]["target"]["expr"]
    # Grafana takes the value as the moment, in milliseconds.
    assert found["Actions"]["useValueForTime"] is True
    assert found["Actions"]["target"]["expr"].endswith("* 1000")


def test_links_between_dashboards_lead_to_dashboards() -> None:
    targets = set(re.findall(r"/d/([\w-]+)", "".join(source.texts().values())))
    assert targets
    assert targets <= {f"eagle-eye-{name}" for name in NAMES}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    if "EAGLE_EYE_TEST_DASHBOARDS" not in os.environ:
        pytest.skip("takes a minute: make test-full runs it, or EAGLE_EYE_TEST_DASHBOARDS=1 make test")
    with watched(Path(tmp_path_factory.mktemp("site"))) as site:
        yield site


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED, ids=lambda one: f"{one.board}: {one.panel}")
def test_each_panel_shows_something_of_a_replayed_fault(site: Site, asked: Asked) -> None:
    expr = filled(asked.expr, job=site.job, node=site.node)
    series = site.ask(expr) if asked.instant else site.over_time(expr, 30.0)
    assert series, expr


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_variable_offers_what_was_replayed(site: Site, name: str) -> None:
    for variable, query in variables(read(name)).items():
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert found is not None
        label = found[2]
        values = {one["metric"].get(label) for one in site.ask(filled(found[1], job=site.job))}
        assert {"job": site.job, "node": site.node}[variable] in values
