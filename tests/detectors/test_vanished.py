"""Devices whose values are gone: three samples of their own interval, while others of the same kind go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagle_eye.detectors.signs.vanished import Vanished, vanished
from eagle_eye.detectors.types import Window
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.grid import Grid
from tests.detectors.windows import NOW_S, Story

SCRAPE_S = 15.0
GPUS = 2
OFFSETS_S = (0.5, 4.0, 8.5, 13.0)  # when each node's GPU exporter is scraped


class Exporters:
    """Four nodes of two GPUs, each scraped at its own offset for ten minutes; ``lost`` samples never came."""

    def __init__(self, every_s: float | tuple[float, ...] = SCRAPE_S) -> None:
        self.every_s = every_s if isinstance(every_s, tuple) else (every_s,) * len(OFFSETS_S)
        self.end_s = NOW_S
        self.lost: dict[tuple[int, int], tuple[float, float]] = {}

    def missed(self, node: int, since_s: float, until_s: float = np.inf, devices: Any = range(GPUS)) -> Exporters:
        """Some devices of a node had no values from ``since_s`` until ``until_s``."""
        self.lost |= {(node, device): (since_s, until_s) for device in devices}
        return self

    def until(self, end_s: float) -> Exporters:
        """End at this time."""
        self.end_s = end_s
        return self

    def scrapes_s(self, node: int) -> Any:
        """When the node is scraped."""
        return np.arange(NOW_S - 600 + OFFSETS_S[node], self.end_s, self.every_s[node])

    def find(self) -> list[Vanished]:
        """What has vanished by the end."""
        return vanished(self.window())

    def window(self) -> Window:
        """Return the engine's grid of these rows."""
        grid = Grid(Scope.DEVICE, SCRAPE_S, 64)
        grid.add_columns(len(OFFSETS_S) * GPUS)
        scrapes = sorted((time_s, node) for node in range(len(OFFSETS_S)) for time_s in self.scrapes_s(node).tolist())
        for time_s, node in scrapes:
            lost = [self.lost.get((node, device), (np.inf, np.inf)) for device in range(GPUS)]
            here = [node * GPUS + device for device in range(GPUS) if not lost[device][0] <= time_s < lost[device][1]]
            line = grid.line(time_s)
            if here and line is not None:
                grid.write(line, ("gpu_power_watts",), np.array(here), np.full((1, len(here)), 600.0))
        hosts_s = np.arange(NOW_S - 600, self.end_s, 1.0)  # hosts are scraped at any other moment
        return Story(len(OFFSETS_S), GPUS).window(
            now_s=self.end_s,
            interval_s=SCRAPE_S,
            times_s=grid.times(),
            device={"gpu_power_watts": grid.view("gpu_power_watts")},
            node={"node_cpu_utilization_ratio": np.full((len(hosts_s), len(OFFSETS_S)), 0.2)},
            node_times_s=hosts_s,
            heard_s=np.full(len(OFFSETS_S), self.end_s),
        )


def gone(rows: int, columns: list[int], story: Story | None = None) -> list[Vanished]:
    """What has vanished where an agent has had no values of some devices in the newest ``rows`` rows."""
    story = (story or Story(gpus=GPUS)).hardware()
    for name, values in story.device.items():
        if name.startswith("gpu_"):
            values[-rows:, columns] = np.nan
    return vanished(story.window())


@pytest.mark.parametrize("end_s", np.arange(NOW_S - 30, NOW_S, 1.0).tolist())
def test_a_host_read_since_then_proves_no_silence(end_s: float) -> None:
    assert Exporters().until(end_s).find() == []


@pytest.mark.parametrize("end_s", np.arange(NOW_S - 60, NOW_S, 5.0).tolist())
def test_a_slower_exporter_has_its_own_interval(end_s: float) -> None:
    assert Exporters((15.0, 15.0, 45.0, 60.0)).until(end_s).find() == []


def test_two_missed_scrapes_are_no_proof() -> None:
    for end_s in np.arange(NOW_S - 35, NOW_S - 1.5, 1.0).tolist():
        assert Exporters().missed(3, NOW_S - 600 + 13.0 + 15 * 37).until(end_s).find() == []


def test_a_node_has_vanished_once_three_of_its_scrapes_are_missing() -> None:
    found = Exporters().missed(1, NOW_S - 75).find()
    assert [(item.column, item.whole_node) for item in found] == [(2, True), (3, True)]


def test_a_device_has_vanished_once_three_scrapes_of_its_node_lack_it() -> None:
    found = Exporters().missed(1, NOW_S - 47, devices=[1]).find()
    assert [(item.column, item.whole_node) for item in found] == [(3, False)]


def test_exporters_that_are_all_late_come_back_one_by_one() -> None:
    for end_s in np.arange(NOW_S - 90, NOW_S, 1.0).tolist():
        exporters = Exporters().until(end_s)
        for node in range(4):
            exporters.missed(node, NOW_S - 150, NOW_S - 60)
        assert exporters.find() == []


def test_half_the_exporters_that_stop_at_once_have_another_cause() -> None:
    for end_s in np.arange(NOW_S - 90, NOW_S, 1.0).tolist():
        exporters = Exporters().until(end_s)
        for node in range(3):
            exporters.missed(node, NOW_S - 100)
        assert exporters.find() == []


def test_a_silence_like_those_that_passed_is_no_proof() -> None:
    exporters = Exporters().missed(1, NOW_S - 75)
    scrapes_s = exporters.scrapes_s
    exporters.scrapes_s = lambda node: scrapes_s(node)[: 12 if node == 1 else None]  # type: ignore[method-assign]
    assert exporters.find() != []
    exporters = Exporters().missed(1, NOW_S - 75)
    # The same exporter had been away for a minute before.
    exporters.scrapes_s = lambda node: np.delete(scrapes_s(node), slice(8, 12) if node == 1 else [])  # type: ignore[method-assign]
    assert exporters.find() == []


def test_two_samples_show_no_interval() -> None:
    exporters = Exporters()
    scrapes_s = exporters.scrapes_s
    exporters.scrapes_s = lambda node: scrapes_s(node)[: 2 if node == 1 else None]  # type: ignore[method-assign]
    assert exporters.find() == []


def test_a_gpu_beside_others_is_missed_after_three_rows() -> None:
    assert gone(2, [3]) == []
    assert [item.column for item in gone(3, [3])] == [3]


def test_a_whole_node_is_missed_a_row_later() -> None:
    assert gone(3, [2, 3]) == []
    assert [item.column for item in gone(4, [2, 3])] == [2, 3]


def test_a_node_that_is_not_heard_is_left_to_others() -> None:
    story = Story(gpus=GPUS)
    story.heard_s[1] = NOW_S - 20
    assert gone(20, [2, 3], story) == []


def test_the_only_node_has_nothing_to_compare_it_with() -> None:
    assert gone(20, [0, 1], Story(nodes=1, gpus=GPUS)) == []
