"""What a server acknowledged is kept for a while, and sent again to a server whose journal lacks it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport import spool as spool_module
from eagle_eye.agent.transport import spool_files
from eagle_eye.agent.transport.spool import STREAM_FRAMES_MAX, Spool
from eagle_eye.agent.transport.spool_files import (
    KEEP_S,
    PIECE_FRAMES_MAX,
    WRITE_FRAMES,
    KeptFrames,
    KeptPiece,
    SpooledFrame,
    parse,
    record,
    unpacked,
)
from eagle_eye.agent.transport.spool_files import opening as opening_of
from tests.agent.fakes import REPOSITORY, FakeClock, until

A, B, C = "a1", "b2", "c3"
SIZE = 600


@pytest.fixture
def drops() -> Drops:
    return Drops()


@pytest.fixture(autouse=True)
def _for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame waits for the server before it is written."""
    monkeypatch.setattr(spool_module, "ANSWER_WAIT_S", 0.0)


def opened(folder: Path, drops: Drops, clock: FakeClock, **more: float) -> Spool:
    return Spool(folder, "n1", drops, monotonic_s=clock.monotonic_s, now_s=clock.now_s, **more)  # type: ignore[arg-type]


@pytest.fixture
def spool(tmp_path: Path, drops: Drops, clock: FakeClock) -> Iterator[Spool]:
    made = opened(tmp_path, drops, clock)
    yield made
    made.close()


def content(stream: str, sequence: int) -> bytes:
    return random.Random(f"{stream} {sequence}").randbytes(SIZE)


def taken(spool: Spool, count: int, journal: str, clock: FakeClock) -> list[tuple[str, int]]:
    """Have a server take so many frames, one a second; return which."""
    found: list[tuple[str, int]] = []
    for _ in range(count):
        spool.append(content)
        clock.advance(1.0)
        batch = spool.newest(1000, 1 << 30)
        assert batch is not None
        spool.acknowledge(batch.stream, batch.frames[-1][0], journal, batch.frames)
        found += [(batch.stream, sequence) for sequence, _ in batch.frames]
    return found


def resent(spool: Spool, journal: str, requests_max: int = 1000) -> list[tuple[str, list[int]]]:
    """Send again to a server with this journal until it has all; return what it got, request by request."""
    found: list[tuple[str, list[int]]] = []
    while len(found) < requests_max and (batch := spool.lacking(journal, STREAM_FRAMES_MAX, 1 << 20)) is not None:
        assert all(raw == content(batch.stream, sequence) for sequence, raw in batch.frames)
        spool.resent(batch.stream, batch.frames[-1][0], journal)
        found.append((batch.stream, [sequence for sequence, _ in batch.frames]))
    return found


def flat(requests: list[tuple[str, list[int]]]) -> list[tuple[str, int]]:
    return [(stream, sequence) for stream, sequences in requests for sequence in sequences]


def written(spool: Spool) -> None:
    """Return once nothing that is due waits for the disk."""
    until(lambda: not spool._disk._unkept)


def test_a_server_with_another_journal_is_sent_all_that_was_acknowledged_the_newest_minute_first_and_each_in_order(
    spool: Spool, clock: FakeClock
) -> None:
    had = taken(spool, 300, A, clock)
    got = resent(spool, B)
    assert sorted(flat(got)) == sorted(had)
    assert all(sequences == sorted(sequences) for _, sequences in got)
    firsts = [sequences[0] for _, sequences in got]
    assert firsts == sorted(firsts, reverse=True)
    assert max(len(sequences) for _, sequences in got) <= PIECE_FRAMES_MAX
    assert resent(spool, B) == []


def test_the_server_that_acknowledged_is_sent_nothing_again(spool: Spool, clock: FakeClock) -> None:
    taken(spool, 100, A, clock)
    assert (spool.lacking_count(A), resent(spool, A)) == (0, [])


def test_each_of_two_servers_is_sent_what_only_the_other_has(spool: Spool, clock: FakeClock) -> None:
    by_a = taken(spool, 70, A, clock)
    by_b = taken(spool, 50, B, clock)
    assert sorted(flat(resent(spool, B))) == sorted(by_a)
    assert sorted(flat(resent(spool, A))) == sorted(by_b)
    assert spool.lacking_count(C) == 120


def test_how_much_a_server_lacks_counts_down(spool: Spool, clock: FakeClock) -> None:
    taken(spool, 100, A, clock)
    assert spool.lacking_count(B) == 100
    resent(spool, B, requests_max=1)
    assert spool.lacking_count(B) == 64
    resent(spool, B)
    assert spool.lacking_count(B) == 0


def test_what_is_refused_or_has_no_journal_is_not_kept(spool: Spool, clock: FakeClock) -> None:
    spool.append(content)
    spool.acknowledge(spool._live.name, 1, None, ())
    taken(spool, 1, "", clock)
    assert spool.kept() == (0, 0)


def test_after_fifteen_minutes_it_is_gone_from_disk_too(spool: Spool, clock: FakeClock, tmp_path: Path) -> None:
    taken(spool, PIECE_FRAMES_MAX, A, clock)
    written(spool)
    assert list(tmp_path.glob("*.kept")) != []
    clock.advance(KEEP_S + 1.0)
    taken(spool, 1, A, clock)
    assert spool.kept()[0] == 1
    until(lambda: list(tmp_path.glob("*.kept")) == [])


def test_what_the_server_lacks_is_kept_until_its_turn_has_come_but_not_for_ever(spool: Spool, clock: FakeClock) -> None:
    taken(spool, 40, A, clock)
    assert spool.lacking_count(B) == 40
    clock.advance(KEEP_S + 60.0)
    taken(spool, 1, B, clock)
    assert spool.lacking_count(B) == 40
    clock.advance(KEEP_S)
    assert spool.lacking_count(B) == 0


def test_nothing_is_kept_where_that_is_configured(tmp_path: Path, drops: Drops, clock: FakeClock) -> None:
    spool = opened(tmp_path, drops, clock, keep_s=0.0)
    taken(spool, 40, A, clock)
    assert spool.kept() == (0, 0)
    spool.close()
    assert list(tmp_path.glob("*.kept")) == []


def test_the_next_start_has_what_the_one_before_kept(tmp_path: Path, drops: Drops, clock: FakeClock) -> None:
    spool = opened(tmp_path, drops, clock)
    had = taken(spool, 150, A, clock)
    spool.close()
    again = opened(tmp_path, drops, clock)
    assert again.lacking_count(A) == 0
    assert sorted(flat(resent(again, B))) == sorted(had)
    again.close()
    assert drops.snapshot() == {}


def test_a_killed_agent_leaves_all_but_the_last_seconds(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, signal
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport import spool as module
module.ANSWER_WAIT_S = 0.0
from tests.agent.fakes import FakeClock
from tests.agent.test_spool_files import opened, taken, written
clock = FakeClock()
spool = opened(pathlib.Path({str(tmp_path)!r}), Drops(), clock)
taken(spool, 100, "a1", clock)
written(spool)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, env={**os.environ}, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    clock, drops = FakeClock(), Drops()
    clock.advance(100.0)
    spool = opened(tmp_path, drops, clock)
    got = sorted(sequence for _, sequence in flat(resent(spool, B)))
    assert got == list(range(1, len(got) + 1))
    assert len(got) >= 100 - WRITE_FRAMES
    spool.close()


def test_what_is_kept_for_another_node_is_not_sent(tmp_path: Path, drops: Drops, clock: FakeClock) -> None:
    spool = opened(tmp_path, drops, clock)
    taken(spool, 40, A, clock)
    spool.close()
    other = Spool(tmp_path, "n2", drops, monotonic_s=clock.monotonic_s, now_s=clock.now_s)
    assert other.lacking_count(B) == 0
    other.close()


def test_frames_that_wait_take_the_room_of_those_that_are_kept(tmp_path: Path, drops: Drops, clock: FakeClock) -> None:
    spool = Spool(tmp_path, "n1", drops, 1 << 20, clock.monotonic_s, clock.now_s)
    taken(spool, 300, A, clock)
    frames, size = spool.kept()
    assert size <= (1 << 20) // 8
    assert drops.snapshot() == {"kept_full": 300 - frames}
    for _ in range(1600):
        spool.append(content)
    assert spool.waiting() == 1600
    assert spool.kept()[0] < frames
    assert "spool_full" not in drops.snapshot()
    spool.close()


def test_while_the_disk_fails_what_is_kept_is_held_in_bounded_memory(
    spool: Spool, clock: FakeClock, drops: Drops, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eagle_eye.agent.transport.spool_files.SpoolFile.write", full)
    monkeypatch.setattr(spool_files, "HELD_BYTES_MAX", 200 * SIZE)
    had = taken(spool, 500, A, clock)
    frames, size = spool.kept()
    assert 100 < frames <= 200
    assert size <= 200 * SIZE
    assert sorted(flat(resent(spool, B))) == sorted(had[-frames:])
    assert drops.snapshot()["kept_full"] == 500 - frames


def test_an_answer_of_another_server_than_was_meant_leaves_it_to_be_sent(spool: Spool, clock: FakeClock) -> None:
    had = taken(spool, 30, A, clock)
    batch = spool.lacking(B, STREAM_FRAMES_MAX, 1 << 20)
    assert batch is not None
    spool.resent(batch.stream, batch.frames[-1][0], C)
    assert sorted(flat(resent(spool, B))) == sorted(had)


def test_a_piece_that_cannot_be_read_back_is_counted_and_the_others_are_sent(
    spool: Spool, clock: FakeClock, drops: Drops, tmp_path: Path
) -> None:
    taken(spool, 3 * PIECE_FRAMES_MAX, A, clock)
    written(spool)
    sorted(tmp_path.glob("*.kept"))[1].unlink()
    got = [sequence for _, sequence in flat(resent(spool, B))]
    assert sorted(got) == [*range(1, 65), *range(129, 193)]
    assert drops.snapshot() == {"kept_damaged": 64}


def test_a_stream_that_left_the_memory_while_its_answer_was_awaited_is_kept(spool: Spool, clock: FakeClock) -> None:
    for _ in range(STREAM_FRAMES_MAX):
        spool.append(content)
    batch = spool.newest(1000, 1 << 30)
    assert batch is not None
    for _ in range(3 * STREAM_FRAMES_MAX):
        spool.append(content)
    until(lambda: not spool._streams[batch.stream].loaded)
    spool.acknowledge(batch.stream, 10, A, batch.frames[:10])
    assert flat(resent(spool, B)) == [(batch.stream, sequence) for sequence in range(1, 11)]


class Disk:
    """Writes what is to be kept as a file would have it."""

    def __init__(self) -> None:
        self.files: dict[KeptPiece, bytes] = {}

    def write(self, piece: KeptPiece) -> None:
        frames = tuple(piece.held)
        before = self.files.get(piece) or opening_of("n1", piece.stream)
        self.files[piece] = before + b"".join(map(record, spool_files.packed(frames, 1.0)))
        piece.wrote(frames, len(self.files[piece]))

    def remove(self, piece: KeptPiece) -> None:
        self.files.pop(piece, None)

    def read(self, piece: KeptPiece) -> list[SpooledFrame]:
        return unpacked(parse(self.files[piece])) if piece in self.files else []


_ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from("st"), st.integers(1, 40), st.sampled_from([A, B])),
        st.tuples(st.just("resend"), st.just(""), st.integers(1, 3), st.sampled_from([A, B])),
        st.tuples(st.just("pass"), st.just(""), st.integers(1, 400), st.just("")),
    ),
    max_size=30,
)


@given(acts=_ACTS)
@settings(max_examples=150, deadline=None)
def test_in_any_order_of_events_each_journal_gets_all_it_lacks_once_and_each_piece_in_order(
    acts: list[tuple[str, str, int, str]],
) -> None:
    clock, disk = FakeClock(), Disk()
    kept = KeptFrames(KEEP_S, 1 << 30, Drops(), clock.monotonic_s, disk.write, disk.remove)
    sequences = {"s": 0, "t": 0}
    took: dict[tuple[str, int], tuple[float, str]] = {}
    have: dict[str, list[tuple[str, int]]] = {A: [], B: []}

    def send(journal: str, requests: int) -> None:
        while requests and (piece := kept.next_for(journal)) is not None:
            if not kept.is_loaded(piece):
                kept.load(piece, journal, disk.read(piece))
            batch = kept.batch(PIECE_FRAMES_MAX, 1 << 20)
            if batch is None:
                continue
            numbers = [sequence for sequence, _ in batch.frames]
            assert numbers == sorted(numbers)
            have[journal] += [(batch.stream, number) for number in numbers]
            kept.resent(batch.stream, numbers[-1], journal)
            requests -= 1

    for act, stream, count, journal in acts:
        if act == "take":
            for _ in range(count):
                clock.advance(1.0)
                sequences[stream] += 1
                frame = SpooledFrame(sequences[stream], clock.now_s(), content(stream, sequences[stream]))
                kept.add(stream, journal, [frame])
                took[stream, sequences[stream]] = (clock.passed_s, journal)
                have[journal].append((stream, sequences[stream]))
        elif act == "pass":
            clock.advance(float(count))
            kept.bound(clock.passed_s)
        else:
            send(journal, count)
    kept.bound(clock.passed_s)
    for journal in (A, B):
        send(journal, -1)
        assert kept.left(journal) == 0
        assert len(have[journal]) == len(set(have[journal]))  # nothing twice
        young = {one for one, (at_s, _) in took.items() if clock.passed_s - at_s <= KEEP_S}
        assert young <= set(have[journal])  # and nothing is missing


@given(cut=st.integers(0, 4000), flipped=st.integers(0, 4000))
@settings(max_examples=200, deadline=None)
def test_of_a_file_that_was_cut_or_spoiled_the_frames_before_are_read_and_no_wrong_one(cut: int, flipped: int) -> None:
    disk, piece = Disk(), KeptPiece("s", A, 0.0)
    for first in (1, 6, 11):
        piece.held += [SpooledFrame(n, float(n), content("s", n)) for n in range(first, first + 5)]
        disk.write(piece)
    whole = disk.files[piece]
    start = len(opening_of("n1", "s"))
    raw = bytearray(whole[: max(start, len(whole) - cut)])
    if flipped < len(raw) - start:
        raw[start + flipped] ^= 0x41
    frames = unpacked(parse(bytes(raw)))
    assert [kept.sequence for kept in frames] == list(range(1, len(frames) + 1))
    assert all(kept.frame == content("s", kept.sequence) for kept in frames)
    if cut == 0 and flipped >= len(raw) - start:
        assert len(frames) == 15
