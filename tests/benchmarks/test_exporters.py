"""The benchmark of healthy fleets seen through exporters: what counts, and a run of one fleet."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.detection.exporters import Fleet, figures, main


def test_every_disruptive_action_counts_with_its_fleet() -> None:
    calm, struck = (
        Fleet(1, 8, 15.0, 30.0, ()),
        Fleet(2, 4, 30.0, 15.0, ("exclude_node gpu_hang n1", "restart_job hang n2")),
    )
    got = figures([calm, struck])
    assert (got["fleets"], got["fleets_that_lost_something"]) == (2, 1)
    assert got["actions"] == {"exclude_node": 1, "restart_job": 1}
    assert [fleet["seed"] for fleet in got["of"]] == [2]


def test_a_healthy_fleet_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "exporters.json"
    assert main(["--fleets", "1", "--minutes", "6", "--first-seed", "161000100", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["actions"] == {}
