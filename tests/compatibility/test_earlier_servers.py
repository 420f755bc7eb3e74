"""What earlier servers kept is there after an upgrade, and means the same; see tests/data/compatibility."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.sql_store import open_file
from tests.compatibility import server_recording
from tests.compatibility.server_recording import DATABASES, FRAMES, KINDS, meaning_of
from tests.server.builders import NOW, FakeClock, running

ROOT = Path(__file__).parent.parent / "data" / "compatibility"
FOLDERS = sorted(path.parent for path in ROOT.glob("*/data.json"))
WITH_RECORDS = [folder for folder in FOLDERS if (folder / f"{DATABASES[0]}.gz").exists()]


@pytest.fixture(params=[*WITH_RECORDS, None], ids=[*(folder.name for folder in WITH_RECORDS), "this"])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A recording of an earlier server; of this one, too, as later ones will find it."""
    folder: Path | None = request.param
    if folder is None:
        folder = tmp_path / "recording"
        server_recording.main(folder)
    return folder


def upgraded(earlier: Path, data: Path, *databases: str) -> Path:
    """Return a data folder as the earlier server left it."""
    data.mkdir()
    for database in databases or DATABASES:
        (data / database).write_bytes(gzip.decompress((earlier / f"{database}.gz").read_bytes()))
    return data


def without_news(now: Any, then: Any) -> Any:
    """Return ``now`` without the fields that records have got since ``then``."""
    if isinstance(then, list) and isinstance(now, list):
        return [without_news(*pair) for pair in zip(now, then, strict=True)]
    if isinstance(then, dict) and isinstance(now, dict):
        return {key: without_news(now[key], then[key]) for key in then if key in now}
    return now


def test_every_record_means_what_it_meant(earlier: Path, tmp_path: Path) -> None:
    then = json.loads((earlier / "data.json").read_text(encoding="utf-8"))
    store = open_file(upgraded(earlier, tmp_path / "data") / DATABASES[0])
    now = {**meaning_of(store), "frames": then["frames"]}
    store.close()
    assert {kind: len(then[kind]) for kind in KINDS} == {kind: len(now[kind]) for kind in KINDS}
    assert without_news(now, then) == then


def test_the_upgraded_server_goes_on_where_the_earlier_one_stopped(earlier: Path, tmp_path: Path) -> None:
    with running(upgraded(earlier, tmp_path / "data"), FakeClock(NOW + FRAMES)) as server:
        assert server.client.get("/api/v1/incidents").status_code == 401  # its tokens are asked for still
        assert len(server.dispatcher.services.store.open_incidents()) == 1
        then = json.loads((earlier / "data.json").read_text(encoding="utf-8"))["frames"]
        assert [[seen.node, seen.sequence, received_s] for seen, received_s in server.watcher.recovered] == then
        assert [stream.watermark for stream in server.dispatcher.services.history.streams()] == [FRAMES]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_history_of_an_earlier_server_is_taken_over(folder: Path, tmp_path: Path) -> None:
    with running(upgraded(folder, tmp_path / "data", DATABASES[1]), FakeClock(NOW + FRAMES)) as server:
        then = json.loads((folder / "data.json").read_text(encoding="utf-8"))["frames"]
        assert [[seen.node, seen.sequence, received_s] for seen, received_s in server.watcher.recovered] == then
        assert [stream.watermark for stream in server.dispatcher.services.history.streams()] == [FRAMES]


@pytest.mark.parametrize("newer", ["PRAGMA user_version = 9999", "UPDATE alembic_version SET version_num = '9999'"])
def test_a_file_of_a_newer_server_is_refused_and_left_alone(earlier: Path, tmp_path: Path, newer: str) -> None:
    data = upgraded(earlier, tmp_path / "data")
    store = open_file(data / DATABASES[0])
    store.close()
    with closing(sqlite3.connect(data / DATABASES[0])) as other, other:
        other.execute(newer)
    before = (data / DATABASES[0]).read_bytes()
    with pytest.raises(StoreUnavailable, match="start the newer server"):
        open_file(data / DATABASES[0])
    assert (data / DATABASES[0]).read_bytes() == before


def test_there_are_recordings() -> None:
    assert [folder.name for folder in FOLDERS] == ["0150563", "851ada8", "d690683"]


def test_this_version_can_be_recorded_for_later_ones(tmp_path: Path) -> None:
    server_recording.main(tmp_path / "recording")
    recorded = json.loads((tmp_path / "recording/data.json").read_text(encoding="utf-8"))
    assert recorded["frames"] == [["n1", number, NOW + FRAMES] for number in range(1, FRAMES + 1)]
    store = open_file(upgraded(tmp_path / "recording", tmp_path / "data") / DATABASES[0])
    assert {**meaning_of(store), "frames": recorded["frames"]} == recorded
    store.close()
