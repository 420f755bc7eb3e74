from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport import spool as spool_module
from eagle_eye.agent.transport.spool import STREAM_FRAMES_MAX, Spool, SpoolTaken
from eagle_eye.agent.transport.spool_files import SpooledFrame, opening, read, record
from tests.agent.fakes import script, until


@pytest.fixture
def drops() -> Drops:
    return Drops()


@pytest.fixture
def spool(tmp_path: Path, drops: Drops) -> Iterator[Spool]:
    made = Spool(tmp_path, "n1", drops)
    yield made
    made.close()


@pytest.fixture
def _for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame waits for the server before it is written."""
    monkeypatch.setattr(spool_module, "ANSWER_WAIT_S", 0.0)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames wait for the server as long as a busy machine takes to be one that answers at once."""
    monkeypatch.setattr(spool_module, "ANSWER_WAIT_S", 5.0)


def put(spool: Spool, count: int, size: int = 0) -> list[int | None]:
    return [spool.append(lambda _stream, sequence: str(sequence).encode().rjust(size, b".")) for _ in range(count)]


def newest(spool: Spool, frames_max: int = 1000) -> list[int]:
    batch = spool.newest(frames_max, 1 << 30)
    return [sequence for sequence, _ in batch.frames] if batch else []


def drained(spool: Spool) -> list[tuple[str, list[int]]]:
    """Take everything as a server would that answers at once: live frames, then the backlog."""
    taken = []
    for source in (spool.newest, spool.backlog):
        while (batch := source(1000, 1 << 30)) is not None:
            taken.append((batch.stream, [sequence for sequence, _ in batch.frames]))
            spool.acknowledge(batch.stream, batch.frames[-1][0])
    return taken


def test_frames_come_out_in_order_until_they_are_acknowledged(spool: Spool) -> None:
    put(spool, 5)
    batch = spool.newest(2, 1 << 20)
    assert batch is not None
    assert batch.frames == [(1, b"1"), (2, b"2")]
    spool.acknowledge(batch.stream, 3)
    assert newest(spool) == [4, 5]
    assert (spool.waiting(), spool.waiting_bytes() > 0) == (2, True)
    spool.acknowledge(batch.stream, 5)
    assert (spool.waiting(), spool.waiting_bytes()) == (0, 0)


def test_a_batch_is_limited_in_bytes_but_never_empty(spool: Spool) -> None:
    put(spool, 3, size=100)
    for bytes_max, count in ((250, 2), (1, 1)):
        batch = spool.newest(10, bytes_max)
        assert batch is not None
        assert len(batch.frames) == count


def test_when_many_wait_a_new_stream_begins_and_the_newest_two_come_first_in_order(spool: Spool) -> None:
    put(spool, 4 * STREAM_FRAMES_MAX + 3)
    assert spool.has_backlog()
    taken = drained(spool)
    whole = list(range(1, STREAM_FRAMES_MAX + 1))
    assert [sequences for _, sequences in taken] == [whole, [1, 2, 3], whole, whole, whole]
    assert len({stream for stream, _ in taken}) == 5
    assert (spool.waiting(), spool.has_backlog()) == (0, False)


def test_new_frames_are_next_also_while_the_backlog_waits(spool: Spool) -> None:
    put(spool, 10 * STREAM_FRAMES_MAX)
    while newest(spool):
        batch = spool.newest(1000, 1 << 30)
        assert batch is not None
        spool.acknowledge(batch.stream, batch.frames[-1][0])
    (sequence,) = put(spool, 1)
    assert newest(spool) == [sequence]
    assert spool.waiting() == 8 * STREAM_FRAMES_MAX + 1


def test_the_backlog_leaves_the_memory_for_the_disk(spool: Spool) -> None:
    put(spool, 20 * STREAM_FRAMES_MAX, size=1000)
    until(lambda: sum(len(stream.frames) for stream in spool._streams.values()) <= 2 * STREAM_FRAMES_MAX)
    assert len(drained(spool)) == 20


@pytest.mark.usefixtures("_for_the_disk")
def test_while_the_server_answers_there_is_one_stream(spool: Spool) -> None:
    for _ in range(3 * STREAM_FRAMES_MAX):
        put(spool, 1)
        batch = spool.newest(10, 1 << 20)
        assert batch is not None
        spool.acknowledge(batch.stream, batch.frames[-1][0])
    assert put(spool, 1) == [3 * STREAM_FRAMES_MAX + 1]


@pytest.mark.usefixtures("_for_the_disk")
def test_while_the_server_answers_soon_the_file_stays_small_and_nothing_is_synced(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr("eagle_eye.agent.transport.spool_disk.SYNC_S", 0.02)
    for _ in range(50):
        put(spool, 1, size=1000)
        batch = spool.newest(10, 1 << 20)
        assert batch is not None
        spool.acknowledge(batch.stream, batch.frames[-1][0])
    threading.Event().wait(0.1)
    (file,) = tmp_path.glob("*.frames")
    assert file.stat().st_size < 2000
    assert synced == []


@pytest.mark.usefixtures("_patient")
def test_what_the_server_takes_at_once_never_touches_the_disk(spool: Spool, tmp_path: Path) -> None:
    put(spool, 1)

    def send() -> None:
        batch = spool.newest(10, 1 << 20)
        assert batch is not None
        spool.acknowledge(batch.stream, batch.frames[-1][0])

    send()
    until(lambda: [file.name for file in tmp_path.iterdir()] == ["lock"])
    folder = tmp_path.stat().st_mtime_ns
    spool.listen(lambda: threading.Timer(0.001, send).start())
    assert put(spool, 20) == list(range(2, 22))
    assert spool.waiting() == 0
    assert tmp_path.stat().st_mtime_ns == folder


def test_what_the_server_has_is_not_kept_to_be_sent_again(
    tmp_path: Path, drops: Drops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "ANSWER_WAIT_S", 5.0)
    spool = Spool(tmp_path, "n1", drops)
    put(spool, 40)  # a short outage
    put(spool, 1)
    spool.acknowledge(spool._live.name, 41)
    until(lambda: not list(tmp_path.glob("*.frames")))
    spool.listen(lambda: threading.Timer(0.001, spool.acknowledge, (spool._live.name, 99)).start())
    put(spool, 10)
    assert list(tmp_path.glob("*.frames")) == []
    monkeypatch.setattr(spool_module, "ANSWER_WAIT_S", 0.0)
    spool.listen(lambda: None)
    put(spool, 2)  # the server is away again
    (file,) = tmp_path.glob("*.frames")
    assert [kept.sequence for kept in read(file).frames] == [52, 53]
    spool.close()


def test_a_server_that_falls_silent_delays_the_loop_once_and_the_disk_has_the_frame(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "ANSWER_WAIT_S", 0.5)
    put(spool, 1)
    spool.acknowledge(spool._live.name, 1)
    begin_s = time.monotonic()
    put(spool, 1)
    first_s = time.monotonic() - begin_s
    put(spool, 50)
    assert first_s >= 0.5
    assert time.monotonic() - begin_s < 2 * 0.5 + 1.0  # not 50 times
    (file,) = tmp_path.glob("*.frames")
    assert [kept.sequence for kept in read(file).frames] == list(range(2, 53))


def test_what_waits_longer_than_a_second_is_synced(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr("eagle_eye.agent.transport.spool_disk.SYNC_S", 0.05)
    put(spool, 20)
    until(lambda: len(synced) == 2)  # the file and the folder's entry of it: one group for all


def test_each_start_begins_a_stream_so_that_no_sequence_is_used_twice(tmp_path: Path, drops: Drops) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 3)
    first.close()
    for file in tmp_path.glob("*.frames"):
        file.unlink()  # as a power cut does that takes the newest frames, which the server may have
    second = Spool(tmp_path, "n1", drops)
    put(second, 1)
    (one, two) = (first.newest(9, 1 << 20), second.newest(9, 1 << 20))
    assert one is not None
    assert two is not None
    assert one.stream != two.stream
    second.close()


def test_what_an_agent_left_is_sent_before_what_the_next_one_makes(tmp_path: Path, drops: Drops) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 3)
    first.close()
    second = Spool(tmp_path, "n1", drops)
    put(second, 1)
    assert [sequences for _, sequences in drained(second)] == [[1, 2, 3], [1]]
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_backlog_keeps_its_order_over_restarts(tmp_path: Path, drops: Drops) -> None:
    made = []
    for _ in range(5):
        spool = Spool(tmp_path, "n1", drops)
        put(spool, 2)
        made.append(spool._live.name)
        spool.close()
    spool = Spool(tmp_path, "n1", drops)
    assert spool.waiting() == 10
    assert [stream for stream, _ in drained(spool)] == [made[4], *made[:4]]
    spool.close()


def test_the_bound_drops_the_oldest_and_says_how_much(
    tmp_path: Path, drops: Drops, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path, "n1", drops, bytes_max=100_000, now_s=lambda: 1_700_000_000.0)
    put(spool, 300, size=1000)
    spool.close()
    kept = spool.waiting()
    assert 70 < kept < 100
    assert drops.snapshot() == {"spool_full": 300 - kept}
    said = [each.getMessage() for each in caplog.records if "spool is full" in each.getMessage()]
    assert len(said) == 2  # the first at once, all others of the minute in one
    assert "2023-11-14T22:13:20Z to 2023-11-14T22:13:20Z" in said[0]
    assert sum(int(each.split("dropped, ")[1].split(" ")[0]) for each in said) == 300 - kept


def test_the_bound_is_that_of_the_folder(tmp_path: Path, drops: Drops) -> None:
    for _ in range(3):
        spool = Spool(tmp_path, "n1", drops, bytes_max=100_000)
        put(spool, 150, size=1000)
        spool.close()
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 100_000
    spool = Spool(tmp_path, "n1", drops, bytes_max=30_000)  # a bound that was lowered
    assert sum(len(sequences) for _, sequences in drained(spool)) < 30
    spool.close()


def test_a_frame_larger_than_the_spool_is_dropped(tmp_path: Path, drops: Drops) -> None:
    spool = Spool(tmp_path, "n1", drops, bytes_max=10_000)
    assert put(spool, 1, size=20_000) == [None]
    assert put(spool, 1, size=100) == [1]
    assert drops.snapshot() == {"spool_full": 1}
    spool.close()


def test_a_storm_of_restarts_makes_no_storm_of_files(
    tmp_path: Path, drops: Drops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "STREAMS_MAX", 5)
    for _ in range(9):
        spool = Spool(tmp_path, "n1", drops)
        put(spool, 1)
        spool.close()
    assert len(list(tmp_path.glob("*.frames"))) == 5
    assert drops.snapshot() == {"spool_full": 4}


def test_an_answer_about_a_stream_that_was_dropped_changes_nothing(spool: Spool) -> None:
    put(spool, 1)
    spool.acknowledge("gone", 10)
    assert spool.waiting() == 1


def test_an_answer_about_a_stream_that_left_the_memory_is_remembered(spool: Spool) -> None:
    put(spool, STREAM_FRAMES_MAX)
    batch = spool.newest(1000, 1 << 30)
    assert batch is not None
    put(spool, 2 * STREAM_FRAMES_MAX)  # while the request was under way
    until(lambda: not spool._backlog[0].loaded)
    spool.acknowledge(batch.stream, 60)
    assert spool.waiting() == 3 * STREAM_FRAMES_MAX - 60
    rest = spool.backlog(1000, 1 << 30)
    assert rest is not None
    assert (rest.stream, rest.frames[0][0]) == (batch.stream, 61)


WRITER = """
    import sys, pathlib
    from eagle_eye.agent.collector import Drops
    from eagle_eye.agent.transport.spool import Spool
    spool = Spool(pathlib.Path(sys.argv[1]), "n1", Drops())
    while True:
        made = []
        sequence = spool.append(lambda stream, sequence: made.append(stream) or b"x" * 5000)
        print(made[0], sequence, flush=True)
        if sys.argv[2] == "answered" and sequence % 7 == 0:
            batch = spool.newest(100, 1 << 20)
            spool.acknowledge(batch.stream, sequence - 3)
            print(batch.stream, 3 - sequence, flush=True)
"""


@pytest.mark.parametrize("server", ["absent", "answered"])
@pytest.mark.parametrize("lines", [1, 100, 1000])
def test_what_was_appended_survives_a_kill(tmp_path: Path, drops: Drops, server: str, lines: int) -> None:
    with script(WRITER, str(tmp_path), server) as program:
        assert program.stdout is not None
        said = [program.stdout.readline() for _ in range(lines)]
        program.send_signal(signal.SIGKILL)
        said += program.stdout.read().splitlines()
        program.wait()
    promised: set[tuple[str, int]] = set()
    for stream, number in (line.split() for line in said if len(line.split()) == 2):
        if int(number) > 0:
            promised.add((stream, int(number)))
        else:
            promised -= {(stream, sequence) for sequence in range(1, 1 - int(number))}
    spool = Spool(tmp_path, "n1", drops)
    taken = [(stream, sequence) for stream, sequences in drained(spool) for sequence in sequences]
    assert promised <= set(taken)
    assert len(taken) == len(set(taken))
    assert drops.snapshot().keys() <= {"spool_torn"}
    put(spool, 1)
    assert drained(spool)[0][0] not in {stream for stream, _ in taken}
    spool.close()


def test_a_frame_that_a_kill_cut_off_is_counted_and_costs_no_other(tmp_path: Path, drops: Drops) -> None:
    whole = opening("n1", "s1") + record(SpooledFrame(1, 1.0, b"one"))
    (tmp_path / "0000000001.frames").write_bytes(whole + record(SpooledFrame(2, 2.0, b"two"))[:-1])
    spool = Spool(tmp_path, "n1", drops)
    assert drained(spool) == [("s1", [1])]
    assert drops.snapshot() == {"spool_torn": 1}
    spool.close()


def test_two_agents_do_not_share_a_spool(spool: Spool, tmp_path: Path, drops: Drops) -> None:
    with pytest.raises(SpoolTaken, match="in use by another agent"):
        Spool(tmp_path, "n1", drops)


def test_frames_of_another_node_are_dropped_and_counted(tmp_path: Path, drops: Drops) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 3)
    first.close()
    second = Spool(tmp_path, "n2", drops)
    assert drained(second) == []
    assert drops.snapshot() == {"spool_other_node": 3}
    assert list(tmp_path.glob("*.frames")) == []
    second.close()


def test_many_threads_lose_and_repeat_nothing(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    taken: list[tuple[str, int]] = []
    done = threading.Event()

    def send() -> None:
        while not (done.is_set() and spool.waiting() == 0):
            batch = spool.backlog(10, 1 << 20) or spool.newest(1000, 1 << 20)
            if batch is not None:
                taken.extend((batch.stream, sequence) for sequence, _ in batch.frames)
                spool.acknowledge(batch.stream, batch.frames[-1][0])
            else:
                done.wait(0.001)

    sender = threading.Thread(target=send)
    sender.start()
    put(spool, 1000)
    done.set()
    sender.join(20.0)
    assert not sender.is_alive()
    assert (len(taken), len(set(taken))) == (1000, 1000)
    assert caplog.records == []
