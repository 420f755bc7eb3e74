from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.drops import Drops
from eagle_eye.agent.spool import FILE_NAME, Spool, SpoolTaken
from tests.agent.fakes import script


@pytest.fixture
def drops() -> Drops:
    return Drops()


@pytest.fixture
def spool(tmp_path: Path, drops: Drops) -> Iterator[Spool]:
    made = Spool(tmp_path, "n1", drops)
    yield made
    made.close()


def put(spool: Spool, count: int, size: int = 0) -> None:
    for _ in range(count):
        spool.append(lambda _stream, sequence: str(sequence).encode().rjust(size, b"."))


def sequences(spool: Spool) -> list[int]:
    return [sequence for sequence, _ in spool.oldest(1_000_000, 1 << 40)]


def test_frames_come_out_in_order_until_they_are_acknowledged(spool: Spool) -> None:
    put(spool, 5)
    assert spool.oldest(2, 1 << 20) == [(1, b"1"), (2, b"2")]
    spool.acknowledge(3)
    assert sequences(spool) == [4, 5]
    assert spool.waiting() == 2


def test_a_batch_is_limited_in_bytes_but_never_empty(spool: Spool) -> None:
    put(spool, 3, size=100)
    assert len(spool.oldest(10, 250)) == 2
    assert len(spool.oldest(10, 1)) == 1


def test_one_frame_can_be_discarded(spool: Spool) -> None:
    put(spool, 3)
    spool.discard(1)
    assert sequences(spool) == [2, 3]


def test_a_sequence_is_never_used_twice(tmp_path: Path, drops: Drops) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 3)
    first.acknowledge(3)
    first.close()
    second = Spool(tmp_path, "n1", drops)
    put(second, 1)
    assert sequences(second) == [4]
    assert second.stream == first.stream
    second.close()


def test_the_bound_drops_the_oldest_and_counts_them(tmp_path: Path, drops: Drops) -> None:
    spool = Spool(tmp_path, "n1", drops, bytes_max=10_000)
    put(spool, 30, size=1000)
    kept = sequences(spool)
    assert kept[-1] == 30
    assert len(kept) in (9, 10)
    assert drops.snapshot() == {"spool_full": 30 - len(kept)}
    spool.close()


def test_the_bound_holds_after_a_restart(tmp_path: Path, drops: Drops) -> None:
    for _ in range(4):
        spool = Spool(tmp_path, "n1", drops, bytes_max=10_000)
        put(spool, 6, size=1000)
        assert sum(len(frame) for _, frame in spool.oldest(100, 1 << 20)) <= 10_000
        spool.close()


def test_what_was_appended_survives_a_kill(tmp_path: Path, drops: Drops) -> None:
    writer = """
        import sys, pathlib
        from eagle_eye.agent.drops import Drops
        from eagle_eye.agent.spool import Spool
        spool = Spool(pathlib.Path(sys.argv[1]), "n1", Drops())
        while True:
            print(spool.append(lambda stream, sequence: b"x" * 500), flush=True)
            if spool.waiting() > 40:
                spool.acknowledge(spool.oldest(1, 1)[0][0] + 20)
    """
    with script(writer, str(tmp_path)) as program:
        assert program.stdout is not None
        last = max(int(program.stdout.readline()) for _ in range(100))
        program.send_signal(signal.SIGKILL)
        program.wait()
    spool = Spool(tmp_path, "n1", drops)
    found = sequences(spool)
    assert found[-1] >= last
    assert found == list(range(found[0], found[-1] + 1))
    assert drops.snapshot() == {}
    spool.close()


def test_a_file_that_is_no_spool_is_set_aside(tmp_path: Path, drops: Drops) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"this is no database " * 1000)
    spool = Spool(tmp_path, "n1", drops)
    put(spool, 1)
    assert sequences(spool) == [1]
    assert drops.snapshot() == {"spool_damaged": 1}
    assert (tmp_path / f"{FILE_NAME}.damaged").exists()
    spool.close()


def test_damage_found_later_starts_a_new_stream(tmp_path: Path, drops: Drops) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 50, size=4000)
    first.close()
    with (tmp_path / FILE_NAME).open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 4096 * 30)
    second = Spool(tmp_path, "n1", drops)
    second.oldest(100, 1 << 20)
    put(second, 1)
    assert sequences(second)[-1] >= 1
    assert drops.snapshot()["spool_damaged"] == 1
    assert second.stream != first.stream
    second.close()


def test_a_folder_that_cannot_be_had_leads_to_memory(tmp_path: Path, drops: Drops) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file" / "spool", "n1", drops)
    put(spool, 2)
    assert sequences(spool) == [1, 2]
    assert drops.snapshot() == {"spool_in_memory": 1}
    spool.close()


def test_a_full_disk_leads_to_memory_as_a_stream_of_its_own(spool: Spool, drops: Drops) -> None:
    put(spool, 3)
    before = spool.stream
    spool._database.execute("PRAGMA max_page_count = 4")  # as a full disk does: SQLITE_FULL
    put(spool, 1, size=100_000)
    assert spool.in_memory
    assert spool.stream != before
    assert sequences(spool) == [1]
    assert drops.snapshot() == {"spool_in_memory": 1}


def test_what_a_failed_disk_still_holds_is_sent_after_the_next_start(tmp_path: Path, drops: Drops) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 3)
    first._fall_back(sqlite3.OperationalError("disk I/O error"))
    first.close()
    second = Spool(tmp_path, "n1", drops)
    assert sequences(second) == [1, 2, 3]
    second.close()


def test_two_agents_do_not_share_a_spool(spool: Spool, tmp_path: Path, drops: Drops) -> None:
    with pytest.raises(SpoolTaken, match="in use by another agent"):
        Spool(tmp_path, "n1", drops)


def test_frames_of_another_node_are_dropped_and_counted(tmp_path: Path, drops: Drops) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 3)
    first.close()
    second = Spool(tmp_path, "n2", drops)
    assert sequences(second) == []
    assert second.stream != first.stream
    assert drops.snapshot() == {"spool_other_node": 3}
    second.close()
