"""Files damaged at any place, before a start and under a running server: said, never a traceback, never silence."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.history.embedded_history import HISTORY_FILE
from eagle_eye.server.store.sql_store import RECORDS_FILE
from tests.server.builders import frame
from tests.server.own_process import OwnProcess, ended, serving, wait_until
from tests.server.test_damage import fill

SEED = 23
REMEDIES = ("eagle-eye backup restore", "eagle-eye server --accept-empty")
PLACES = {"header": 0.0, "first pages": 0.02, "middle": 0.5, "end": 1.0}
NOISE_BYTES = 20_000  # a few pages
TABLES = ("frames.parquet", "samples.parquet")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("kept") / "data"
    fill(data)
    return data


@pytest.fixture
def data(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept, tmp_path / "data")
    return tmp_path / "data"


def noise(path: Path, place: float, size: int) -> None:
    """Write noise over a part of the file, in place."""
    length = path.stat().st_size
    size = min(size, length)
    with path.open("rb+") as file:
        file.seek(min(int(place * length), length - size))
        file.write(random.Random(f"{SEED} {place} {size}").randbytes(size))


def send(server: OwnProcess, sequence: int) -> int:
    return server.send(frame(sequence, "n2", time.time())).status_code


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [RECORDS_FILE, HISTORY_FILE])
def test_noise_in_a_database_is_one_line_with_the_remedy_or_harms_nothing(data: Path, name: str, place: str) -> None:
    noise(data / name, PLACES[place], NOISE_BYTES)
    broken = (data / name).read_bytes()
    options: tuple[str, ...] = ()
    try:
        with serving(data) as server:  # within a value, where nothing can tell
            assert "Traceback" not in server.said()
    except AssertionError as error:
        if "serving" in str(error):
            raise
        said = ended(data)
        assert (said.returncode, said.stderr.count("\n")) == (1, 1), said.stderr
        assert str(data / name) in said.stderr
        assert all(remedy in said.stderr for remedy in REMEDIES)
        assert (data / name).read_bytes() == broken
        options = ("--accept-empty",)
    with serving(data, *options) as server:
        wait_until(lambda: send(server, 1) == 200 or send(server, 1) == 401)
        assert "Traceback" not in server.said()
    assert not options or any((aside / name).read_bytes() == broken for aside in data.glob("set-aside-*"))


@pytest.mark.parametrize("name", [RECORDS_FILE, HISTORY_FILE])
def test_a_database_that_is_damaged_under_a_running_server_is_said_once_and_nothing_is_acknowledged_in_vain(
    data: Path, name: str
) -> None:
    with serving(data) as server:
        size = (data / name).stat().st_size
        noise(data / name, 0.05, int(0.9 * size))
        acknowledged = 0
        sequence = 0

        def unready() -> bool:
            nonlocal acknowledged, sequence
            sequence += 1
            acknowledged += send(server, sequence) == 200
            server.client.get("/api/v1/incidents")
            query: dict[str, Any] = {"metric": "gpu_power_watts", "start": 0, "end": time.time(), "step": 86_400}
            server.client.get("/api/v1/query_range", params={**query, "start": time.time() - 1_000 * 86_400})
            return server.storage() != "ok"

        wait_until(unready)
        assert str(data / name) in server.storage()
        assert server.client.get("/readyz").status_code == 503
        time.sleep(5.0)  # of a line a second there would be some
        assert server.said().count("is damaged") <= 3
        assert "Traceback" not in server.said()
        assert server.said().count(f"{data / name} is damaged: ") >= 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("table", TABLES)
def test_noise_in_a_segment_costs_that_segment_and_its_times_are_named(data: Path, table: str, place: str) -> None:
    for segment in (data / "history" / "raw").iterdir():
        noise(segment / table, PLACES[place], 200)
    (data / RECORDS_FILE).unlink()  # so that no token is asked for
    with serving(data, "--accept-empty") as server:
        query: dict[str, Any] = {"metric": "gpu_power_watts", "start": 1_699_999_999, "end": 1_700_001_000, "step": 1}
        answer = server.client.get("/api/v1/query_range", params=query)
        assert answer.status_code == 200
        points = sum(len(series["points"]) for series in answer.json()["series"])
        lost = [source for source in answer.json()["sources"] if source["problem"] is not None]
        assert points == 12 - 4 * len(lost) or (len(lost) == 1 and points == 4)
        assert "Traceback" not in server.said()
