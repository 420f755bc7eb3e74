"""From an earlier version to this one and back, as docs/how-to/upgrading.md has it: real servers on one real folder."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.events import Event
from tests.server.builders import frame
from tests.server.own_process import OwnProcess, serving, wait_until

pytestmark = pytest.mark.slow  # an earlier version is installed, and several servers run

REPOSITORY = Path(__file__).parents[2]
EARLIER = "31f2c76075ee9062f6d9106e40efcd7efe347d0b"  # with loose modules, two levels of history, frames in the spool
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
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Version:
    folder = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(["git", "archive", EARLIER], cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"the earlier version is not in this copy: {archive.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=archive.stdout, check=True)
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    installed = sysconfig.get_path("purelib")  # a folder on the path: what its own .pth names is not
    library = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    portions = sorted(str(path.parent) for path in folder.glob("*/eagle_eye"))
    (Path(library) / "earlier.pth").write_text("\n".join([installed, *portions]), encoding="utf-8")
    return Version(str(environment / "bin/python"))


@dataclass
class Site:
    """A folder that the earlier version has served, its backup, and what the API said of both."""

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
def site(earlier: Version, tmp_path: Path) -> Site:
    data, backup, start_s = tmp_path / "data", tmp_path / "backup", time.time() - FRAMES
    with earlier.serving(data) as server:
        sent(server, 1, start_s, Event(start_s + 0.5, "xid", 0, {"code": 79}))
        wait_until(lambda: bool(incidents(server)))
        kept = Site(data, backup, incidents(server), power(server, start_s), start_s)
        copied = earlier.command("backup", str(backup), "--data", str(data))
        assert copied.returncode == 0, copied.stderr
    assert kept.power
    assert kept.power[0]
    return kept


def test_this_version_has_what_the_earlier_one_kept_and_goes_on(site: Site) -> None:
    with THIS.serving(site.data) as server:
        assert incidents(server) == site.incidents
        assert power(server, site.start_s) == site.power
        sent(server, FRAMES + 1, site.start_s)
        assert server.storage() == "ok"


def test_the_earlier_version_goes_on_with_its_backup_and_with_the_frames_that_came_since(
    site: Site, earlier: Version
) -> None:
    with THIS.serving(site.data) as server:
        sent(server, FRAMES + 1, site.start_s)
    restored = earlier.command("backup", "restore", str(site.backup), "--data", str(site.data))
    assert restored.returncode == 0, restored.stderr
    with earlier.serving(site.data) as server:
        assert incidents(server) == site.incidents
        assert power(server, site.start_s) == site.power


def test_the_earlier_version_goes_on_with_the_folder_as_it_is(site: Site, earlier: Version) -> None:
    with THIS.serving(site.data) as server:
        sent(server, FRAMES + 1, site.start_s)
    with earlier.serving(site.data) as server:
        assert incidents(server) == site.incidents
        assert power(server, site.start_s) == site.power
        assert server.storage() == "ok"
