"""Databases and segments that are damaged, missing or foreign: said with the remedy, and only they are lost."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.cli.main import main
from eagle_eye.schema.frame import CONTENT_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.server.admin import data_folder
from eagle_eye.server.admin.data_folder import Integrity, held
from eagle_eye.server.history.embedded_history import HISTORY_FILE
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.security import auth
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import INCIDENTS, Change
from tests.server.builders import NOW, FakeClock, Running, body, frame, incident, logging_put_back, running
from tests.server.segments.kept import compact

SEED = 20_261_123
MINUTE_S = 60.0
DATABASES = (RECORDS_FILE, HISTORY_FILE)
Break = Callable[[Path], object]


def fill(data: Path) -> None:
    """Make a folder with two segments, a journal, incidents and tokens."""
    clock = FakeClock()
    with running(data, clock) as server:
        _, token = auth.mint("read", None, NOW, None)
        incidents = tuple(incident(f"inc_{n}", summary="x" * 2_000) for n in range(50))
        server.dispatcher.services.store.commit(Change(incidents=incidents, tokens=(token,)))
        sequence = 0
        for part in range(3):
            for _ in range(4):
                sequence += 1
                clock.advance(MINUTE_S)
                time_s = clock.now_s()
                sent = frame(sequence, time_s=time_s, dropped={"x" * 20_000: 1})
                answer = server.send(body(sent, sent_s=time_s), authorization=f"Bearer {_text(server, clock)}")
                assert answer.status_code == 200, answer.text
            if part < 2:
                compact(_history(server))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("kept") / "data"
    fill(data)
    return data


def _text(server: Running, clock: FakeClock) -> str:
    text, token = auth.mint("agent", "n1", clock.now_s(), None)
    server.dispatcher.services.store.commit(Change(tokens=(token,)))
    return text


def _history(server: Running) -> Any:
    return server.dispatcher.services.history


@pytest.fixture
def data(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept, tmp_path / "data")
    return tmp_path / "data"


def garbage(path: Path, share: float = 0.5, size: int = 96 << 10) -> None:
    """Write noise over part of a file."""
    whole = bytearray(path.read_bytes())
    begin = min(int(len(whole) * share), max(len(whole) - size, 0))
    noise = random.Random(SEED).randbytes(min(size, len(whole)))
    whole[begin : begin + len(noise)] = noise[: len(whole) - begin]
    path.write_bytes(whole)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def other_programs(path: Path) -> None:
    """Put another program's database in the place of the file."""
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    other.close()


def text(path: Path) -> None:
    path.write_text("To whom it may concern\n" * 100)


def refused(data: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which the server refuses to start on the folder."""
    capsys.readouterr()
    with logging_put_back():
        assert main(["server", "--listen", "127.0.0.1:0", "--data", str(data)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


CASES = [(name, how) for name in DATABASES for how in (garbage, Path.unlink, emptied, other_programs, text)]


@pytest.mark.parametrize(("name", "break_it"), CASES, ids=[f"{name}-{how.__name__}" for name, how in CASES])
def test_a_database_in_trouble_is_said_with_the_remedy_and_the_other_is_served(
    data: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, name: str, break_it: Break
) -> None:
    before = (data / name).read_bytes()
    break_it(data / name)
    broken = (data / name).read_bytes() if (data / name).exists() else None
    said = refused(data, capsys)
    for named in (str(data / name), "eagle-eye backup restore", "eagle-eye server --accept-empty"):
        assert named in said
    assert str(data / (set(DATABASES) - {name}).pop()) not in said
    assert ((data / name).read_bytes() if (data / name).exists() else None) == broken

    with held(data) as hold:
        data_folder.ready(hold, accept_empty=True)
    assert f"{data / name}" in caplog.text
    assert "begins anew" in caplog.text
    if broken is not None:
        (aside,) = data.glob("set-aside-*")
        assert (aside / name).read_bytes() == broken != before

    with running(data, FakeClock()) as server:
        assert server.dispatcher.services.store.count(INCIDENTS) == (50 if name == HISTORY_FILE else 0)
        frames = sum(1 for _ in _history(server).query([], 0.0, 4e9))
        assert frames == (8 if name == HISTORY_FILE else 12)  # of history.db in trouble, the segments' are left


@pytest.mark.parametrize("break_it", [garbage, "tables", "folder", emptied])
def test_a_segment_in_trouble_is_set_aside_and_queries_say_which_times_they_lack(
    data: Path, capsys: pytest.CaptureFixture[str], break_it: Any
) -> None:
    segment = min((data / "history" / "raw").iterdir(), key=lambda path: int(path.name.split("-")[0]))
    if break_it == "folder":
        shutil.rmtree(segment)
    elif break_it == "tables":
        (segment / "samples.parquet").unlink()
    else:
        break_it(segment / "samples.parquet")
    shutil.rmtree(data / "history" / "1m" / segment.name)  # which would stand in for it
    with running(data, FakeClock(NOW + 12 * MINUTE_S)) as server:
        store = server.dispatcher.services.store
        secret, token = auth.mint("read", None, NOW, None)
        store.commit(Change(tokens=(token,)))
        server.client.headers["authorization"] = f"Bearer {secret}"
        query: dict[str, Any] = {"metric": "gpu_power_watts", "start": NOW, "end": NOW + 13 * MINUTE_S, "step": 60}
        for _ in range(2):  # when it is found, and from then on
            answer = server.client.get("/api/v1/query_range", params=query).json()
            points = [point for series in answer["series"] for point in series["points"]]
            assert len(points) == 8
            problems = [source for source in answer["sources"] if source["problem"] is not None]
            assert len(problems) == 1
            assert segment.name in problems[0]["problem"]
            assert "4 frames of n1" in problems[0]["problem"]
            assert (problems[0]["start"], problems[0]["end"]) == (_rfc3339(1), _rfc3339(4))
            assert [source["start"] for source in answer["sources"]] == [_rfc3339(0), _rfc3339(1), _rfc3339(4)]
        whole = server.client.get("/api/v1/query_range", params={**query, "start": NOW + 5 * MINUTE_S}).json()
        assert [source["problem"] for source in whole["sources"]] == [None]


def _rfc3339(minute: int) -> str:
    from eagle_eye.server.model.clock import rfc3339

    return rfc3339(NOW + minute * MINUTE_S)


def test_a_folder_that_is_new_or_was_only_given_tokens_begins_without_a_word(tmp_path: Path) -> None:
    for data in (tmp_path / "new", tmp_path / "tokens"):
        if data.name == "tokens":
            assert main(["tokens", "create", "--scope", "read", "--data", str(data)]) == 0
        with held(data) as hold:
            data_folder.ready(hold, accept_empty=False)
        assert not list(data.glob("set-aside-*"))


def test_the_folder_itself_remembers_which_databases_it_has_had(tmp_path: Path) -> None:
    with held(tmp_path) as hold:
        hold.write_owner("127.0.0.1:8470", DATABASES)
    with (
        held(tmp_path) as hold,
        pytest.raises(StoreUnavailable, match=r"records\.db is missing.*history\.db is missing"),
    ):
        data_folder.ready(hold, accept_empty=False)


def test_no_token_is_made_where_records_are_missing(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / RECORDS_FILE).unlink()
    assert main(["tokens", "create", "--scope", "read", "--data", str(data)]) == 1
    assert "eagle-eye backup restore" in capsys.readouterr().err
    assert not (data / RECORDS_FILE).exists()


def committed(data: Path, count: int) -> tuple[Path, bytes]:
    """Return a database that was killed with so many commits in its log, and its log."""
    store = open_file(data / RECORDS_FILE)
    for number in range(count):
        store.commit(Change(incidents=(incident(f"inc_{number}"),)))
    log = data / f"{RECORDS_FILE}-wal"
    killed = data.with_name("killed")
    shutil.copytree(data, killed)
    store.close()
    return killed, (killed / log.name).read_bytes()


def test_what_is_wrong_with_a_write_ahead_log_is_what_a_crash_cannot_have_done(tmp_path: Path) -> None:
    killed, whole = committed(tmp_path / "data", 12)
    log = killed / f"{RECORDS_FILE}-wal"
    (page_bytes,) = struct.unpack(">I", whole[8:12])
    step = page_bytes + data_folder.FRAME.size
    assert data_folder.troubles(killed, ()) == []
    assert data_folder.read_log(log).bytes == len(whole)
    rng = random.Random(SEED)
    for cut in [rng.randrange(len(whole)) for _ in range(20)]:  # a power cut
        log.write_bytes(whole[:cut] + rng.randbytes(rng.randrange(step)))
        assert data_folder.troubles(killed, ()) == []
    for at in [rng.randrange(len(whole) // 2) for _ in range(20)]:
        log.write_bytes(whole[:at] + rng.randbytes(64) + whole[at + 64 :])
        (found,) = data_folder.troubles(killed, ())
        assert found.path == log
    with held(killed) as hold:
        data_folder.ready(hold, accept_empty=True)
    assert data_folder.troubles(killed, ()) == []
    store = open_file(killed / RECORDS_FILE)
    kept = [one.id for one in store.all(INCIDENTS)]
    assert kept == [f"inc_{number}" for number in range(len(kept))]
    store.close()


def test_the_log_reaches_as_far_as_sqlite_says(tmp_path: Path) -> None:
    killed, whole = committed(tmp_path / "data", 12)
    log = killed / f"{RECORDS_FILE}-wal"
    for cut in range(0, len(whole), len(whole) // 15):
        log.write_bytes(whole[:cut])
        found = data_folder.read_log(log)
        copy = tmp_path / f"copy-{cut}"
        shutil.copytree(killed, copy)
        with sqlite3.connect(copy / RECORDS_FILE, isolation_level=None) as reader:
            (pages,) = reader.execute("PRAGMA page_count").fetchone()
            _, frames, _ = reader.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        reader.close()
        assert found.size_pages in (0, pages)
        assert frames <= 0 or found.bytes == data_folder.HEADER.size + frames * (4096 + data_folder.FRAME.size)


@pytest.mark.parametrize("name", DATABASES)
def test_a_database_that_was_cut_off_is_said(data: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    whole = (data / name).read_bytes()
    (data / name).write_bytes(whole[: len(whole) * 2 // 3])
    assert f"{data / name} is damaged" in refused(data, capsys)


@pytest.mark.parametrize("name", DATABASES)
def test_of_a_large_file_only_ends_and_tables_are_looked_at(
    data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(data_folder, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(data_folder, "whole", lambda *_: pytest.fail("all of it was read"))
    assert data_folder.troubles(data, DATABASES) == []
    garbage(data / name, share=0.0, size=(data / name).stat().st_size)
    assert [one.path for one in data_folder.troubles(data, DATABASES)] == [data / name]


def test_a_record_that_is_no_record_makes_the_server_unready_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        server.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        with sqlite3.connect(tmp_path / RECORDS_FILE) as other:
            other.execute('UPDATE incidents SET record = \'{"id": "inc\'')
        other.close()
        for _ in range(3):
            assert server.client.get("/api/v1/incidents").status_code == 503
        clock.advance(5.0)
        said = server.client.get("/readyz").json()
        assert f"{tmp_path / RECORDS_FILE} is damaged" in said["checks"]["storage"]
        assert server.send(body(frame(1))).status_code == 200
    assert len([one for one in caplog.records if "is damaged" in one.getMessage()]) == 1


@pytest.mark.parametrize("name", DATABASES)
def test_damage_beyond_what_a_start_looks_at_is_found_beside_the_server_and_named(
    data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    clock = FakeClock(NOW + 12 * MINUTE_S)
    with running(data, clock) as server:
        parts = server.dispatcher.services
        monkeypatch.setattr(data_folder, "ROWS_AT_ONCE", 1)
        assert list(data_folder.findings(data, lambda: None)) == []
        with sqlite3.connect(data / name) as other:  # as of a large file: in the middle, and not in memory yet
            table = "incidents" if name == RECORDS_FILE else "chunks"
            other.execute(
                f"UPDATE {table} SET record = 'noise' WHERE id = 'inc_25'"
                if name == RECORDS_FILE
                else "UPDATE chunks SET directory = x'00' WHERE id = 2"
            )
        other.close()
        assert server.dispatcher.services.doctor.check().checks["storage"] == "ok"
        checked = Integrity(data, parts.store, parts.history)  # type: ignore[arg-type]
        asyncio.run(checked.check())
        asyncio.run(checked.check())
        clock.advance(5.0)
        assert f"{data / name} is damaged" in parts.doctor.check().checks["storage"]
    assert len([one for one in caplog.records if f"{name} is damaged" in one.getMessage()]) == 1


def test_a_segment_that_nobody_reads_is_found_damaged_and_set_aside(data: Path) -> None:
    segment = min((data / "history" / "raw").iterdir())
    garbage(segment / "samples.parquet")
    shutil.rmtree(data / "history" / "1m" / segment.name)
    with running(data, FakeClock(NOW + 12 * MINUTE_S)) as server:
        parts = server.dispatcher.services
        asyncio.run(Integrity(data, parts.store, parts.history).check())  # type: ignore[arg-type]
        (gap,) = parts.history.gaps([], NOW, NOW + 12 * MINUTE_S, levels=True)
        assert segment.name in gap.problem
        assert (data / "history" / "set-aside" / segment.name).is_dir()
        assert parts.doctor.check().checks["storage"] == "ok"


def test_noise_in_the_middle_of_a_large_database_is_found(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_folder, "STRUCTURE_BYTES_MAX", 0)
    for name in DATABASES:
        garbage(data / name)
    assert {one.database for one in data_folder.findings(data, lambda: None)} == set(DATABASES)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/api/v1/frames", CONTENT_TYPE),
        ("/api/v1/frames", ROWS_CONTENT_TYPE),
        ("/api/v1/write", "application/x-protobuf"),
    ],
)
def test_telemetry_whose_token_cannot_be_looked_up_is_503_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    with running(tmp_path) as server:

        def damaged(_sha256: str) -> None:
            raise StoreUnavailable("records.db is damaged")

        secret, _ = auth.mint("agent", "n1", NOW, None)
        monkeypatch.setattr(server.dispatcher.services.store, "token_by_sha256", damaged)
        headers = {"content-type": kind, "content-encoding": "identity", "authorization": f"Bearer {secret}"}
        answer = server.client.post(path, content=body(frame(1)), headers=headers)
        assert (answer.status_code, answer.json()["reason"]) == (503, "storage")
        assert "retry-after" in answer.headers
    assert not [record for record in caplog.records if record.exc_info]
