"""From this version to the next and back, as docs/how-to/upgrading.md has it: real servers on one real folder."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.events import Event
from tests.compatibility.next_version import next_version
from tests.server.builders import frame
from tests.server.own_process import OwnProcess, serving, wait_until

pytestmark = pytest.mark.slow  # several servers run

FRAMES = 5


@dataclass
class Version:
    """The code of a version, as the Python that has it."""

    python: str

    def serving(self, data: Path) -> Any:
        return serving(data, python=self.python)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-m", "eagle_eye.cli.main", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


THIS = Version(sys.executable)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return Version(next_version(tmp_path_factory.mktemp("newer")))


@dataclass
class Site:
    """A folder that this version has served, its backup, and what the API said of both."""

    data: Path
    backup: Path
    incidents: list[Any]
    power: list[Any]
    start_s: float


def sent(server: OwnProcess, first: int, start_s: float, *events: Event) -> None:
    for number in range(first, first + FRAMES):
        answer = server.send(frame(number, time_s=start_s + number, events=list(events) if number == first else []))
        assert answer.status_code == 200, answer.text


def incidents(server: OwnProcess) -> list[Any]:
    """Return who was accused of what: the state goes on, and fields are added."""
    items = server.client.get("/api/v1/incidents").json()["items"]
    return sorted([item["id"], item["fault"], item["nodes"]] for item in items)


def power(server: OwnProcess, start_s: float) -> list[Any]:
    """Return the readings of the first frames, as the API has them."""
    end_s = start_s + FRAMES + 0.5
    answer = server.client.get(f"/api/v1/query_range?metric=gpu_power_watts&job=job&start={start_s}&end={end_s}&step=1")
    assert answer.status_code == 200, answer.text
    return [series["points"] for series in answer.json()["series"]]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    data, backup, start_s = tmp_path / "data", tmp_path / "backup", time.time() - FRAMES
    with THIS.serving(data) as server:
        sent(server, 1, start_s, Event(start_s + 0.5, "xid", 0, {"code": 79}))
        wait_until(lambda: bool(incidents(server)))
        kept = Site(data, backup, incidents(server), power(server, start_s), start_s)
        copied = THIS.command("backup", str(backup), "--data", str(data))
        assert copied.returncode == 0, copied.stderr
    assert kept.power
    assert kept.power[0]
    return kept


def test_the_next_version_has_what_this_one_kept_and_goes_on(site: Site, newer: Version) -> None:
    with newer.serving(site.data) as server:
        assert incidents(server) == site.incidents
        assert power(server, site.start_s) == site.power
        sent(server, FRAMES + 1, site.start_s)
        assert server.storage() == "ok"


def test_this_version_goes_on_with_its_backup_and_with_the_frames_that_came_since(site: Site, newer: Version) -> None:
    with newer.serving(site.data) as server:
        sent(server, FRAMES + 1, site.start_s)
    restored = THIS.command("backup", "restore", str(site.backup), "--data", str(site.data))
    assert restored.returncode == 0, restored.stderr
    with THIS.serving(site.data) as server:
        assert incidents(server) == site.incidents
        assert power(server, site.start_s) == site.power


def test_this_version_goes_on_with_the_folder_as_the_next_one_left_it(site: Site, newer: Version) -> None:
    with newer.serving(site.data) as server:
        sent(server, FRAMES + 1, site.start_s)
    with THIS.serving(site.data) as server:
        assert incidents(server) == site.incidents
        assert power(server, site.start_s) == site.power
        assert server.storage() == "ok"
