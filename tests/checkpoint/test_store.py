"""A store as ranks and other stores see it: what it holds, what it refuses, and what it outlives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from eagle_eye.checkpoint import command, held_job, job_service
from eagle_eye.checkpoint.command import status_lines
from eagle_eye.checkpoint.connection import ProtocolError, StoreConnection, connect
from eagle_eye.checkpoint.held_job import FILES, Record
from eagle_eye.checkpoint.messages import (
    FRAME_BYTES_MAX,
    VERSION,
    Blob,
    Bytes,
    Captured,
    Challenge,
    Close,
    CopyInfo,
    Find,
    Found,
    GetBlob,
    Greet,
    Hello,
    KeptStep,
    MetadataMade,
    MetadataWanted,
    Persisted,
    Proceed,
    Proof,
    Put,
    RanksDone,
    Read,
    RequestRefused,
    Reserve,
    Reserved,
    Skipped,
    SlotsOpened,
    Stored,
    Welcome,
)
from eagle_eye.checkpoint.peer import Peer
from eagle_eye.checkpoint.shared_memory import DoesNotFit, SlotFile, reserve
from eagle_eye.checkpoint.storage import CHUNK_BYTES, Damaged, complete, partial, sums_of, write_shard
from eagle_eye.checkpoint.store import SOCKET, ask_status, ask_verify
from eagle_eye.schema.checkpoint_files import read_steps, whole_in_memory
from tests.checkpoint.stores import (
    JOB,
    KEY,
    WITHIN_S,
    Node,
    Rank,
    close,
    contents,
    opened,
    opening,
    put,
    running,
    stored,
    until,
)

PLAN = "2-plan"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Node]:
    with running([tmp_path / "a"]) as (node,):
        yield node


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Node]]:
    with running([tmp_path / "a", tmp_path / "b"]) as nodes:
        yield nodes


def of(step: int, rank: int = 0, length: int = 3000, plan: str = PLAN) -> CopyInfo:
    return CopyInfo(plan, rank, step, length, (), float(step), 1)


def whole(ranks: list[Rank], *steps: int) -> None:
    """All ranks capture the steps, each a second after the one before, and each is whole before the next."""
    for step in steps:
        for rank in ranks:
            rank.capture(step, contents(rank.rank, step))
        for rank in ranks:
            rank.whole(step)


def read(node: Node, rank: int, step: int, plan: str = PLAN) -> bytes:
    """Return a copy, as a rank of another node reads it."""
    connection = connect(node.store.address, JOB, KEY, WITHIN_S)
    try:
        found = connection.request(Find(plan, rank, step), Found)
        assert found.copy is not None, f"no copy of rank {rank}, step {step} on {node.name}"
        connection.send(Read(plan, rank, step, 0, found.length))
        reported = connection.receive()
        assert isinstance(reported, Bytes)
        data = bytearray(reported.length)
        connection.receive_into(memoryview(data))
        assert reported.sums == sums_of(memoryview(data))
        return bytes(data)
    finally:
        connection.close()


class TestCopies:
    def test_a_step_is_whole_once_its_store_has_verified_it(self, one: Node) -> None:
        (rank,) = opened([one])
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        assert one.steps == {(0, 1)}
        close(rank)

    def test_a_copy_arrives_at_the_other_node_as_it_was_written(self, two: list[Node]) -> None:
        ranks = opened(two, capacity_bytes=3 * CHUNK_BYTES)
        data = [os.urandom(2 * CHUNK_BYTES + 17) for _ in ranks]
        for rank in ranks:
            rank.capture(1, data[rank.rank])
        for rank in ranks:
            rank.whole(1)
        for node in two:
            assert [read(node, number, 1) for number in (0, 1)] == data
        close(*ranks)

    def test_a_step_is_not_whole_before_every_rank_has_captured_it(self, two: list[Node]) -> None:
        ranks = opened(two)
        ranks[0].capture(1, contents(0, 1))
        until(lambda: two[1].steps == {(0, 1)}, "the copy is on b")
        assert two[0].status["whole_step"] is None
        close(*ranks)

    def test_what_lies_where_is_kept_at_each_holder(self, two: list[Node]) -> None:
        ranks = opened(two)
        for node in two:
            connection = connect(node.store.address, JOB, KEY, WITHIN_S)
            assert connection.request(GetBlob(PLAN), Blob).data == b"what lies where"
            connection.close()
        close(*ranks)

    def test_the_kept_steps_stay_and_older_ones_go(self, two: list[Node]) -> None:
        ranks = opened(two)
        for step in range(1, 8):
            for rank in ranks:
                rank.capture(step, contents(rank.rank, step))
            for rank in ranks:
                rank.whole(step)
        for node in two:
            assert {(0, 6), (0, 7), (1, 6), (1, 7)} <= node.steps
            assert all(step > 4 for _, step in node.steps)
        close(*ranks)

    def test_a_step_that_one_rank_skips_does_not_keep_later_ones_from_being_whole(self, two: list[Node]) -> None:
        ranks = opened(two, keep=1)
        for step in range(1, 6):
            for rank in ranks:
                if (step + rank.rank) % 3:
                    rank.capture(step, contents(rank.rank, step))
                else:
                    rank.connection.send(Skipped(step, "told to"))
        for rank in ranks:
            rank.capture(6, contents(rank.rank, 6))
        for rank in ranks:
            rank.whole(6)
        close(*ranks)

    def test_who_hears_that_a_step_is_whole_may_write_into_the_slot_that_it_made_free(self, one: Node) -> None:
        (rank,) = opened([one], keep=1)
        for step in range(1, 20):
            rank.capture(step, contents(0, step))
            rank.whole(step)
            assert rank.has_grant
        close(rank)

    def test_a_copy_waits_for_a_slot_until_the_step_before_it_is_whole(self, two: list[Node]) -> None:
        # A rank whose steps go to storage has a slot more than other nodes have for it.
        ranks = opened(two, keep=1, persist_every=1000)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
        for rank in ranks:
            rank.whole(1)
        ranks[0].capture(2, contents(0, 2))
        until(lambda: (0, 2) in two[1].steps, "step 2 is on b")
        ranks[0].capture(3, contents(0, 3))
        ranks[1].capture(2, contents(1, 2))
        ranks[1].whole(2)
        ranks[1].capture(3, contents(1, 3))
        ranks[1].whole(3)
        assert "copies_failed" not in two[0].status["counts"]
        close(*ranks)

    def test_the_file_of_steps_says_what_is_whole(self, two: list[Node]) -> None:
        ranks = opened(two)
        for rank in ranks:
            rank.capture(4, contents(rank.rank, 4))

        def said() -> list[int]:
            return [step for node in two for step in whole_in_memory(read_steps(node.folder, JOB))]

        until(lambda: said() == [4, 4], "both files name step 4")
        close(*ranks)

    def test_a_node_that_is_new_gets_the_copies_of_the_step_that_is_resumed(self, tmp_path: Path) -> None:
        with running([tmp_path / name for name in "abc"]) as nodes:
            ranks = opened(nodes[:2])
            for rank in ranks:
                rank.capture(1, contents(rank.rank, 1))
            for rank in ranks:
                rank.whole(1)
            close(*ranks)
            source = nodes[0].store.address
            others = opened(
                [nodes[0], nodes[2]], attempt=2, step=1, resumed_step=1, resumed_attempt=1, sources=(source,)
            )
            until(lambda: nodes[2].steps == {(0, 1), (1, 1)}, "both shards are on c")
            assert read(nodes[2], 1, 1) == contents(1, 1)
            close(*others)

    def test_a_slot_that_is_being_filled_is_not_given_to_the_rank(self, tmp_path: Path) -> None:
        with running(
            [tmp_path / name for name in "abc"],
        ) as nodes:
            ranks = opened(nodes[:2], capacity_bytes=3 * CHUNK_BYTES)
            for rank in ranks:
                rank.capture(1, contents(rank.rank, 1, CHUNK_BYTES))
            for rank in ranks:
                rank.whole(1)
            close(*ranks)
            said = {"attempt": 2, "step": 1, "resumed_step": 1, "resumed_attempt": 1, "capacity_bytes": 3 * CHUNK_BYTES}
            others = opened([nodes[0], nodes[2]], sources=(nodes[0].store.address,), **said)
            for step in (2, 3, 4):
                for rank in others:
                    rank.capture(step, contents(rank.rank, step, CHUNK_BYTES))
                for rank in others:
                    rank.whole(step)
            assert [text for node in (nodes[0], nodes[2]) for text in node.status["troubles"]] == []
            assert not ask_verify(nodes[2].folder).damaged
            close(*others)

    def test_copies_stay_where_the_next_attempts_objects_are_longer(self, two: list[Node]) -> None:
        ranks = opened(two)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
        for rank in ranks:
            rank.whole(1)
        close(*ranks)
        ranks = opened(two, attempt=2, step=1, resumed_step=1, resumed_attempt=1, capacity_bytes=6000)
        assert [node.steps for node in two] == [{(0, 1), (1, 1)}] * 2
        for rank in ranks:
            rank.capture(2, contents(rank.rank, 2, 5500))
        for rank in ranks:
            rank.whole(2)
        assert [node.steps for node in two] == [{(0, 2), (1, 2)}] * 2
        close(*ranks)

    def test_a_copy_of_another_course_of_training_does_not_count_as_that_of_the_resumed_step(
        self, two: list[Node]
    ) -> None:
        ranks = opened(two)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
        for rank in ranks:
            rank.whole(1)
        close(*ranks)
        close(*opened(two, attempt=3, step=1, resumed_step=1, resumed_attempt=2))
        assert [node.steps for node in two] == [set(), set()]


class TestReach:
    def test_older_steps_stay_at_each_holder_and_reach_back(self, two: list[Node]) -> None:
        ranks = opened(two, reach_s=4.0)
        whole(ranks, *range(1, 16))
        kept = two[0].status["whole_steps"]
        assert kept[0] in range(8, 12)  # between once and twice as old as it has to be
        assert kept[-2:] == [14, 15]
        for node in two:
            until(lambda node=node: node.status["whole_steps"] == kept, f"{node.name} keeps the same")  # type: ignore[misc]
            assert {(rank, step) for rank in (0, 1) for step in kept} <= node.steps
            assert node.status["older_steps"] == kept[:-2]
            assert node.status["reserved_bytes"] == 2 * (2 + 2 + 1) * 5000
        close(*ranks)

    def test_the_file_of_steps_names_them(self, two: list[Node]) -> None:
        ranks = opened(two, reach_s=100.0)
        whole(ranks, 1, 2, 3, 4, 5, 6)
        until(
            lambda: all({1, 2, 5, 6} <= whole_in_memory(read_steps(node.folder, JOB)).keys() for node in two),
            "both files name steps 1 and 2",
        )
        close(*ranks)

    def test_the_next_attempt_keeps_those_before_the_step_that_it_resumes(self, two: list[Node]) -> None:
        ranks = opened(two, reach_s=100.0)
        whole(ranks, 1, 2, 3, 4, 5)
        close(*ranks)
        assert set(hello(two[1]).kept) == {1, 2, 4, 5}
        kept = tuple(KeptStep(step, 1, float(step)) for step in (1, 2, 4))
        ranks = opened(two, attempt=2, step=4, resumed_step=4, resumed_attempt=1, reach_s=100.0, kept=kept)
        whole(ranks, 5, 6, 7)
        for node in two:
            assert node.status["whole_steps"] == [1, 2, 6, 7]
            assert {(rank, step) for rank in (0, 1) for step in (1, 2, 6, 7)} <= node.steps
        close(*ranks)

    def test_a_store_that_is_started_anew_still_keeps_them(self, two: list[Node]) -> None:
        ranks = opened(two, reach_s=100.0)
        whole(ranks, 1, 2, 3, 4, 5)
        close(ranks[0])
        two[0].stop()
        two[0].start()
        ranks[0] = Rank(two[0], 0)
        ranks[0].hello()
        ranks[0].open(opening(two, 0, again=True, resumed_step=5, resumed_attempt=1, reach_s=100.0))
        whole(ranks, 6, 7)
        assert [node.status["whole_steps"] for node in two] == [[1, 2, 6, 7]] * 2
        close(*ranks)

    def test_a_node_that_is_new_gets_them(self, tmp_path: Path) -> None:
        with running([tmp_path / name for name in "abc"]) as nodes:
            ranks = opened(nodes[:2], reach_s=100.0)
            whole(ranks, 1, 2, 3, 4, 5)
            close(*ranks)
            others = opened(
                [nodes[0], nodes[2]],
                attempt=2,
                step=5,
                resumed_step=5,
                resumed_attempt=1,
                sources=(nodes[0].store.address,),
                reach_s=100.0,
                kept=tuple(KeptStep(step, 1, float(step)) for step in (1, 2, 5)),
            )
            shards = {(rank, step) for rank in (0, 1) for step in (1, 2, 5)}
            until(lambda: nodes[2].steps == shards, "all shards are on c")
            assert read(nodes[2], 1, 1) == contents(1, 1)
            close(*others)

    def test_captures_on_a_node_that_is_new_leave_room_for_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, goes_on = Peer.fetch, threading.Event()

        async def slow(self: Peer, copy: CopyInfo, into: memoryview) -> bytes | None:
            await asyncio.get_running_loop().run_in_executor(None, goes_on.wait, WITHIN_S)
            return await real(self, copy, into)

        monkeypatch.setattr(Peer, "fetch", slow)
        with running([tmp_path / name for name in "abc"]) as nodes:
            ranks = opened(nodes[:2], reach_s=100.0)
            whole(ranks, 1, 2, 3, 4, 5)
            close(*ranks)
            kept = tuple(KeptStep(step, 1, float(step)) for step in (1, 2, 5))
            said = {"attempt": 2, "step": 5, "resumed_step": 5, "resumed_attempt": 1, "reach_s": 100.0, "kept": kept}
            others = opened([nodes[0], nodes[2]], sources=(nodes[0].store.address,), **said)
            for step in (6, 7):
                others[1].capture(step, contents(1, step))
            until(lambda: (1, 7) in nodes[2].steps, "step 7 is captured on c")
            (service,) = nodes[2].store._jobs.values()
            assert [shard.slots.granted for shard in service.job.local] == [None]
            goes_on.set()
            until(lambda: {(1, step) for step in (1, 2, 5)} <= nodes[2].steps, "older steps are on c")
            close(*others)


class TestInterval:
    def alternately(self, ranks: list[Rank]) -> None:
        """Each rank captures the steps that the other one skips, until both are told to make common ones."""
        for step in range(1, 100):
            if all(rank.capture_every == 2 for rank in ranks):
                return
            for rank in ranks:
                if (step + rank.rank) % 2:
                    rank.capture(step, contents(rank.rank, step))
                else:
                    rank.connection.send(Skipped(step, "no slot is free"))
        pytest.fail(f"of how many captures one is made: {[rank.capture_every for rank in ranks]}")

    def test_ranks_that_capture_steps_of_their_own_are_told_to_make_common_ones(self, two: list[Node]) -> None:
        ranks = opened(two)
        self.alternately(ranks)
        assert [node.status["capture_every"] for node in two] == [2, 2]
        assert two[0].status["whole_step"] is None
        whole(ranks, 102)
        close(*ranks)

    def test_a_rank_is_told_again_where_its_store_is_started_anew(self, two: list[Node]) -> None:
        ranks = opened(two)
        self.alternately(ranks)
        whole(ranks, 102)
        close(ranks[1])
        two[1].stop()
        two[1].start()
        again = Rank(two[1], 1)
        again.hello()
        again.open(opening(two, 1, again=True, resumed_step=102, resumed_attempt=1))
        again.granted()
        assert again.capture_every == 2
        close(ranks[0], again)

    def test_a_step_that_was_not_due_is_counted_apart_and_voids_nothing(self, two: list[Node]) -> None:
        ranks = opened(two)
        ranks[0].connection.send(Skipped(1, "another capture is due", due=False))
        whole(ranks, 2)
        assert two[0].status["counts"]["not_due"] == 1
        assert not {"skipped", "void"} & two[0].status["counts"].keys()
        close(*ranks)


class TestAnotherStore:
    def test_a_put_that_ends_in_the_middle_leaves_nothing_and_a_later_one_arrives(self, two: list[Node]) -> None:
        ranks = opened(two)
        data = contents(0, 1)[:3000]
        connection, proceed = put(two[1], of(1), data)
        assert proceed.yes
        connection._socket.sendall(data[:1000])
        connection.close()
        until(lambda: not put_open(two[1]), "the store has seen the end")
        assert two[1].steps == set()
        assert stored(two[1], of(1), data).yes
        assert read(two[1], 0, 1) == data
        close(*ranks)

    def test_a_chunk_that_is_not_what_its_checksum_says_is_refused_by_number(self, two: list[Node]) -> None:
        ranks = opened(two, capacity_bytes=2 * CHUNK_BYTES)
        data = bytearray(os.urandom(CHUNK_BYTES + 9))
        connection, _ = put(two[1], of(1, length=len(data)), bytes(data))
        data[-1] ^= 1
        connection._socket.sendall(data)
        answer = connection.receive()
        assert isinstance(answer, Stored)
        assert not answer.yes
        assert "chunk 1" in answer.reason
        assert two[1].steps == set()
        connection.close()
        close(*ranks)

    def test_an_attempt_that_is_over_puts_nothing(self, two: list[Node]) -> None:
        close(*opened(two))
        ranks = opened(two, attempt=2)
        connection, proceed = put(two[1], of(1), b"x" * 3000, attempt=1)
        assert not proceed.yes
        connection.close()
        close(*ranks)

    def test_an_attempt_that_is_over_reserves_nothing(self, two: list[Node]) -> None:
        close(*opened(two))
        ranks = opened(two, attempt=2)
        connection = connect(two[1].store.address, JOB, KEY, WITHIN_S)
        with pytest.raises(ProtocolError, match="attempt 1 is over: attempt 2 has begun"):
            connection.request(Reserve(1, 0, PLAN, b"", 100, 1, None), Reserved)
        connection.close()
        close(*ranks)

    @pytest.mark.parametrize("length", [0, -1, 5001])
    def test_a_copy_that_fits_no_slot_is_refused(self, two: list[Node], length: int) -> None:
        ranks = opened(two)
        connection = connect(two[1].store.address, JOB, KEY, WITHIN_S)
        said = Put(1, of(1, length=length), b"s" * 8 if length > 0 else b"")
        assert not connection.request(said, Proceed).yes
        connection.close()
        close(*ranks)

    def test_nobody_else_writes_into_the_slots_of_a_rank_of_this_node(self, two: list[Node]) -> None:
        ranks = opened(two)
        connection, proceed = put(two[0], of(1, rank=0), b"x" * 3000)
        assert not proceed.yes
        connection.close()
        close(*ranks)

    def test_who_has_another_key_is_told_nothing(self, two: list[Node]) -> None:
        ranks = opened(two)
        with pytest.raises(ProtocolError, match="does not have this job's key"):
            connect(two[1].store.address, JOB, b"other", WITHIN_S)
        close(*ranks)

    def test_who_does_not_prove_that_it_has_the_key_is_cut_off(self, two: list[Node]) -> None:
        ranks = opened(two)
        connection = unproven(two[1])
        assert isinstance(connection_ask(connection, Greet(VERSION, JOB, b"n" * 16)), Challenge)
        connection.sendall(frame(Proof(b"p" * 32)))
        connection.sendall(frame(Find(PLAN, 0, 1)))
        assert hung_up(connection)
        close(*ranks)

    def test_another_version_is_told_which_one_is_spoken(self, two: list[Node]) -> None:
        ranks = opened(two)
        connection = unproven(two[1])
        refused = connection_ask(connection, Greet(VERSION + 1, JOB, b"n" * 16))
        assert isinstance(refused, RequestRefused)
        assert refused.reason == f"version {VERSION} is spoken here"
        connection.close()
        close(*ranks)

    @pytest.mark.parametrize(
        "sent",
        [
            (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
            (1 << 17).to_bytes(4, "big"),
            (4).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1",
            (1 << 10).to_bytes(4, "big") + b"half",
            b"GET / HTTP/1.1\r\n\r\n",
        ],
        ids=["oversized", "too-large-for-a-unproven", "garbage", "half-a-frame", "http"],
    )
    def test_what_is_no_message_ends_the_connection_and_nothing_else(self, one: Node, sent: bytes) -> None:
        (rank,) = opened([one])
        for connection in (unproven(one), local_unproven(one)):
            connection.sendall(sent)
            with contextlib.suppress(OSError):  # the store may have hung up by now
                connection.shutdown(socket.SHUT_WR)
            assert hung_up(connection)
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        close(rank)

    def test_a_store_that_was_started_anew_with_nothing_is_asked_for_memory_again(self, two: list[Node]) -> None:
        ranks = opened(two)
        close(ranks[1])
        two[1].stop()
        for path in (two[1].folder / "jobs").glob("*/*"):
            path.unlink()
        two[1].start()
        again = Rank(two[1], 1)
        again.hello()
        again.open(opening(two, 1, again=True))
        ranks[0].capture(1, contents(0, 1))
        again.capture(1, contents(1, 1))
        again.whole(1)
        assert two[1].steps == {(0, 1), (1, 1)}
        close(ranks[0], again)

    def test_who_waits_on_a_connection_that_is_ended_hears_of_it(self) -> None:
        async def ended() -> None:
            ours, theirs = socket.socketpair()
            connection = StoreConnection(ours)
            waiting = asyncio.ensure_future(connection.receive())
            await asyncio.sleep(0)
            connection.close()
            assert await asyncio.wait_for(waiting, WITHIN_S) is None
            assert ours.fileno() == -1
            theirs.close()

        asyncio.run(ended())


class TestConnectionsLost:
    def test_one_that_is_being_made_while_the_peer_is_closed_is_not_kept(self, two: list[Node]) -> None:
        close(*opened(two))

        async def closed_meanwhile() -> Peer:
            peer = Peer("b", two[1].store.address, JOB, KEY)
            telling = asyncio.ensure_future(peer.send_message(RanksDone(0, "a")))
            await asyncio.sleep(0)
            peer.close()
            with pytest.raises(ConnectionError, match="b is not spoken to any more"):
                await telling
            return peer

        assert asyncio.run(closed_meanwhile())._words is None

    def test_none_is_made_for_a_job_that_has_ended(self, two: list[Node]) -> None:
        close(*opened(two))
        service = two[0].store._jobs[JOB]
        service.close()
        with pytest.raises(ConnectionError, match="job has ended here"):
            service._peer("b")

    def test_one_that_comes_while_the_store_ends_is_not_taken(self, tmp_path: Path) -> None:
        async def cancelled_once_it_came() -> None:
            loop, store = asyncio.get_running_loop(), Node(tmp_path / "a").store
            server, client, (says, hears) = (
                socket.socket(socket.AF_UNIX),
                socket.socket(socket.AF_UNIX),
                socket.socketpair(),
            )
            with server, client, says, hears:
                server.bind(str(tmp_path / "socket"))
                server.listen()
                accepting = asyncio.ensure_future(store._accept(server, store._serve_local))
                await asyncio.sleep(0.01)
                loop.add_reader(hears, accepting.cancel)
                client.connect(str(tmp_path / "socket"))
                says.send(b"?")  # the loop sees both at once
                with contextlib.suppress(asyncio.CancelledError):
                    await accepting
                loop.remove_reader(hears)
                server.accept()[0].close()

        asyncio.run(cancelled_once_it_came())


class TestStartedAnew:
    def test_it_finds_its_copies_again(self, two: list[Node]) -> None:
        ranks = opened(two)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
        for rank in ranks:
            rank.whole(1)
        close(*ranks)
        two[1].stop()
        two[1].start()
        assert {(copy.rank, copy.step) for copy in hello(two[1]).copies} == {(0, 1), (1, 1)}
        assert read(two[1], 1, 1) == contents(1, 1)

    def test_it_is_found_at_the_same_address(self, one: Node) -> None:
        address = one.store.address
        one.stop()
        assert one.start().store.address == address

    def test_a_copy_that_was_damaged_meanwhile_is_not_used_and_named(self, one: Node) -> None:
        (rank,) = opened([one])
        for step in (1, 2):
            rank.capture(step, contents(0, step))
            rank.whole(step)
        damaged = next(path for path in one.slot_files if path.read_bytes().startswith(contents(0, 2)))
        close(rank)
        one.stop()
        with damaged.open("r+b") as file:
            file.write(b"?")
        one.start()
        assert one.steps == {(0, 1)}
        assert any("rank 0, step 2: chunk 0" in text for text in one.status["troubles"])

    def test_a_slot_that_a_rank_may_be_writing_into_is_not_used_again(self, one: Node) -> None:
        (rank,) = opened([one])
        slot = rank.granted()
        one.stop()
        rank.slots[slot][:5] = b"still"
        one.start()
        assert not Path(rank.paths[slot]).exists()
        until(lambda: len(one.slot_files) == 3, "there are as many as before")
        close(rank)

    def test_what_is_on_record_of_another_version_is_removed(self, one: Node) -> None:
        (rank,) = opened([one])
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        close(rank)
        one.stop()
        (folder,) = one.folder.glob("jobs/*")
        record = Record(folder)
        saved = msgspec.msgpack.decode(record.read() or b"")
        record.write(msgspec.msgpack.encode(saved | {"version": VERSION + 1}))
        one.start()
        assert ask_status(one.folder) == []
        assert one.slot_files == set()

    def test_a_record_that_cannot_be_read_is_removed_with_its_memory(self, one: Node) -> None:
        (rank,) = opened([one])
        close(rank)
        one.stop()
        for path in one.folder.glob("jobs/*/record.*"):
            path.write_bytes(b"\xc1")
        one.start()
        assert one.slot_files == set()

    @pytest.mark.parametrize("which", [0, 1], ids=["the-coordinator", "another"])
    def test_in_the_middle_of_an_attempt_it_keeps_others_copies_and_later_steps_are_whole(
        self, two: list[Node], which: int
    ) -> None:
        ranks = opened(two, keep=1)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
        for rank in ranks:
            rank.whole(1)
        close(ranks[which])
        two[which].stop()
        two[which].start()
        ranks[which] = Rank(two[which], which)
        ranks[which].hello()
        ranks[which].open(opening(two, which, keep=1, again=True, resumed_step=1, resumed_attempt=1))
        assert two[which].steps == {(0, 1), (1, 1)}
        for step in (2, 3):
            for rank in ranks:
                rank.capture(step, contents(rank.rank, step))
            for rank in ranks:
                rank.whole(step)
            assert all({(0, step), (1, step)} <= node.steps for node in two)
        close(*ranks)

    def test_a_step_that_others_know_to_be_whole_is_not_dropped(self, two: list[Node]) -> None:
        # Its own rank has not heard of step 2: the store ended before it could say so.
        ranks = opened(two, keep=1)
        for step in (1, 2):
            for rank in ranks:
                rank.capture(step, contents(rank.rank, step))
            for rank in ranks:
                rank.whole(step)
        close(ranks[0])
        two[0].stop()
        two[0].start()
        again = Rank(two[0], 0)
        again.hello()
        again.open(opening(two, 0, keep=1, again=True, resumed_step=1, resumed_attempt=1))
        assert {(0, 2), (1, 2)} <= two[0].steps
        close(again, ranks[1])

    def test_killed_it_leaves_its_copies_to_the_next(self, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
        node = Node(tmp_path / "a")
        node.store.address = f"127.0.0.1:{(node.folder / 'port').read_text()}"
        (rank,) = opened([node])
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        process.kill()
        process.wait()
        close(rank)
        node.start()
        try:
            assert read(node, 0, 1, "1-plan") == contents(0, 1)
        finally:
            node.stop()

    def test_one_whose_folder_is_removed_ends(self, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
        shutil.rmtree(tmp_path / "a")
        assert process.wait(WITHIN_S) == 0

    def test_a_second_one_on_the_same_folder_leaves_it_to_the_first(
        self, process: subprocess.Popen[bytes], tmp_path: Path
    ) -> None:
        second = subprocess.run(store_words(tmp_path / "a"), capture_output=True, text=True, check=False)
        assert second.returncode == 0
        assert f"a store serves {tmp_path / 'a'} already" in second.stderr
        assert process.poll() is None
        process.terminate()
        assert process.wait(WITHIN_S) == 0


class TestRanks:
    def test_a_rank_of_another_version_is_told_to_update(self, one: Node) -> None:
        rank = Rank(one)
        refused = rank.connection.request(Hello(VERSION + 1, JOB, KEY), RequestRefused)
        assert "update the older one" in refused.reason
        close(rank)

    def test_an_attempt_that_is_over_is_not_begun_again(self, one: Node) -> None:
        (rank,) = opened([one], attempt=5)
        late = Rank(one)
        assert late.hello().attempt == 5
        with pytest.raises(ProtocolError, match="attempt 4 of job is over: attempt 5 has begun"):
            late.open(opening([one], attempt=4))
        close(rank, late)

    def test_a_shard_longer_than_its_slot_ends_the_connection_alone(self, one: Node) -> None:
        (rank,) = opened([one])
        rank.connection.send(Captured(1, rank.granted(), 5001, (), 1.0))
        assert rank.ended()
        assert hello(one).copies == ()
        close(rank)

    @pytest.mark.parametrize("slot", [99, -1])
    def test_a_slot_that_was_not_granted_holds_nothing(self, one: Node, slot: int) -> None:
        (rank,) = opened([one])
        rank.connection.send(Captured(1, slot, 10, (), 1.0))
        assert rank.ended()
        assert hello(one).copies == ()
        close(rank)

    def test_what_a_stopped_rank_goes_on_to_write_is_in_nobodys_copy(self, one: Node) -> None:
        (stopped,) = opened([one])
        slot = stopped.granted()
        (rank,) = opened([one], attempt=2)
        granted = rank.granted()
        rank.slots[granted][:3000] = contents(0, 1)[:3000]
        for memory in (stopped.slots[slot],):
            memory[:3000] = b"!" * 3000
        rank.connection.send(Captured(1, granted, 3000, (), 1.0))
        rank.whole(1)
        stopped.slots[slot][:3000] = b"!" * 3000
        assert read(one, 0, 1, "1-plan") == contents(0, 1)[:3000]
        assert not ask_verify(one.folder).damaged
        close(stopped, rank)

    def test_what_a_stopped_rank_goes_on_to_say_is_no_copy(self, two: list[Node]) -> None:
        ranks = opened(two)
        stopped = ranks[1]
        slot = stopped.granted()
        # The new attempt is heard of from the other node's store first.
        connection = connect(two[1].store.address, JOB, KEY, WITHIN_S)
        connection.request(Reserve(2, 0, PLAN, b"", 5000, 2, None), Reserved)
        stopped.write(1, contents(1, 1), slot)
        assert stopped.ended()
        assert two[1].steps == set()
        connection.close()
        close(*ranks)

    def test_the_memory_of_a_rank_that_never_began_is_freed_in_the_end(self, tmp_path: Path) -> None:
        with running([tmp_path / "a"], free_after_s=0.1) as (node,):
            rank = Rank(node)
            rank.hello()
            close(rank)
            until(lambda: ask_status(node.folder) == [], "nothing is held of it")


@pytest.fixture
def reserving(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """As many slots are reserved as it is released for; in the end all."""
    may = threading.Semaphore(0)

    def reserved(path: Path, capacity_bytes: int) -> SlotFile:
        assert may.acquire(timeout=WITHIN_S)
        return reserve(path, capacity_bytes)

    monkeypatch.setattr(held_job, "reserve", reserved)
    yield may
    may.release(100)


class TestMemory:
    def test_a_store_answers_while_it_reserves(self, one: Node, reserving: threading.Semaphore) -> None:
        rank = Rank(one)
        rank.hello()
        rank.connection.send(opening([one]))
        until(lambda: len(ask_status(one.folder)) == 1, "it says what it holds")
        reserving.release(2)
        assert len(rank.expect(SlotsOpened).slots) == 2
        close(rank)

    def test_training_begins_with_two_slots_and_the_others_come_behind(
        self, one: Node, reserving: threading.Semaphore
    ) -> None:
        reserving.release(2)
        (rank,) = opened([one], waits=False, keep=2)
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        rank.capture(2, contents(0, 2))
        rank.whole(2)
        reserving.release()
        until(lambda: one.status["reserved_bytes"] == 3 * 5000, "the third slot is there")
        for step in (3, 4):
            rank.capture(step, contents(0, step))
            rank.whole(step)
        assert sorted(rank.slots) == [0, 1, 2]
        close(rank)

    @pytest.mark.parametrize("slots", [2, 3, 4])
    def test_of_steps_that_made_room_before_all_slots_were_there_none_counts_as_kept(
        self, two: list[Node], monkeypatch: pytest.MonkeyPatch, slots: int
    ) -> None:
        room = threading.Event()

        def reserved(path: Path, capacity_bytes: int) -> SlotFile:
            of_the_same_rank = list(path.parent.glob(f"{path.name.partition('-')[0]}-*.slot"))
            if len(of_the_same_rank) >= slots and not room.is_set():
                raise DoesNotFit("no room yet")
            return reserve(path, capacity_bytes)

        monkeypatch.setattr(held_job, "reserve", reserved)
        ranks = opened(two, reach_s=100.0)
        whole(ranks, 1, 2, 3, 4, 5, 6)
        room.set()
        until(lambda: all(node.status["reserved_bytes"] == 2 * 5 * 5000 for node in two), "all slots are there")
        whole(ranks, *range(7, 13))
        kept = two[0].status["whole_steps"]
        assert len(kept) == 4
        assert kept[0] <= 7, "one of the first that could stay"
        for node in two:
            until(lambda node=node: node.status["whole_steps"] == kept, f"{node.name} keeps the same")  # type: ignore[misc]
            assert {(rank, step) for rank in (0, 1) for step in kept} <= node.steps
        close(*ranks)

    def test_another_nodes_copies_begin_with_two_slots_as_well(self, one: Node, reserving: threading.Semaphore) -> None:
        rank = Rank(one)
        rank.hello()
        reserving.release(2)
        connection = connect(one.store.address, JOB, KEY, WITHIN_S)
        connection.request(Reserve(1, 1, PLAN, b"", 5000, 2, None), Reserved)
        assert len(one.slot_files) == 2
        connection.close()
        close(rank)

    def test_a_full_tmpfs_refuses_with_the_arithmetic(self, tmpfs: Path) -> None:
        with running([tmpfs]) as (node,):
            rank = Rank(node)
            rank.hello()
            with pytest.raises(ProtocolError, match=r"20,971,520 bytes for \S+ do not fit: .* bytes free"):
                rank.open(opening([node], capacity_bytes=20 << 20))
            assert node.slot_files == set()
            close(rank)

    def test_slots_that_do_not_all_fit_are_fewer_and_steps_go_on(self, tmpfs: Path) -> None:
        with running([tmpfs]) as (node,):
            (rank,) = opened([node], capacity_bytes=6 << 20)
            assert len(rank.paths) == 2
            for step in (1, 2, 3):
                rank.capture(step, contents(0, step))
                rank.whole(step)
            assert ["rank 0 has 2 of 3 slots" in text for text in node.status["troubles"]] == [True]
            close(rank)

    def test_a_slot_that_was_missing_comes_once_there_is_room(self, tmpfs: Path) -> None:
        with running([tmpfs]) as (node,):
            (tmpfs / "others").write_bytes(bytes(5 << 20))
            (rank,) = opened([node], capacity_bytes=4 << 20)
            assert len(rank.paths) == 2
            (tmpfs / "others").unlink()
            until(lambda: node.status["reserved_bytes"] == 3 * (4 << 20), "there are three slots")
            for step in (1, 2):
                rank.capture(step, contents(0, step))
                rank.whole(step)
            assert rank.grant().path not in rank.paths
            close(rank)

    def test_one_slot_alone_is_refused(self, tmpfs: Path) -> None:
        with running([tmpfs]) as (node,):
            rank = Rank(node)
            rank.hello()
            with pytest.raises(ProtocolError, match="do not fit"):
                rank.open(opening([node], capacity_bytes=10 << 20))
            assert node.slot_files == set()
            close(rank)

    def test_a_tmpfs_that_others_fill_up_ends_nothing(self, tmpfs: Path) -> None:
        with running([tmpfs]) as (node,):
            (rank,) = opened([node], capacity_bytes=1 << 20)
            with pytest.raises(OSError, match="No space left"):
                (tmpfs / "others").write_bytes(bytes(200 << 20))
            for step in (1, 2, 3, 4):
                rank.capture(step, contents(0, step, 900_000))
                rank.whole(step)
            (tmpfs / "others").unlink()
            until(lambda: 4 in whole_in_memory(read_steps(tmpfs, JOB)), "it says so in its file, too")
            close(rank)
            node.stop()
            node.start()
            assert (0, 4) in node.steps


class TestTheEnd:
    def test_the_memory_is_free_once_every_rank_has_ended(self, two: list[Node]) -> None:
        ranks = opened(two)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
            rank.connection.send(Close())
        assert all(rank.ended() for rank in ranks)
        until(lambda: all(ask_status(node.folder) == [] for node in two), "nothing is held any more")
        assert [node.slot_files for node in two] == [set(), set()]
        close(*ranks)

    def test_no_node_frees_its_memory_before_every_rank_has_ended(self, two: list[Node]) -> None:
        ranks = opened(two)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
        for rank in ranks:
            rank.whole(1)
        ranks[1].connection.send(Close())
        assert ranks[1].ended()
        assert [node.steps for node in two] == [{(0, 1), (1, 1)}] * 2
        close(*ranks)

    def test_copies_stay_after_an_end_that_nobody_meant(self, one: Node) -> None:
        (rank,) = opened([one])
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        close(rank)
        until(lambda: one.status["without_ranks_for_s"] is not None, "it has seen the end")
        assert one.steps == {(0, 1)}

    def test_and_are_free_after_a_while(self, tmp_path: Path) -> None:
        with running([tmp_path / "a"], free_after_s=0.1) as (node,):
            (rank,) = opened([node])
            rank.capture(1, contents(0, 1))
            rank.whole(1)
            close(rank)
            until(lambda: ask_status(node.folder) == [], "nothing is held any more")

    def test_a_store_without_a_job_stays_for_as_long_as_somebody_looks_for_it(self, tmp_path: Path) -> None:
        with running([tmp_path / "a"], exit_when_idle_s=1.5) as (node,):
            until_s = time.monotonic() + 3.0
            while time.monotonic() < until_s:
                assert answers(node)
                time.sleep(0.05)
            until(lambda: not (node.folder / SOCKET).exists(), "it has ended")

    def test_another_job_of_the_name_waits_for_its_ranks(self, one: Node) -> None:
        (rank,) = opened([one])
        other = Rank(one, key=b"other")
        with pytest.raises(ProtocolError, match="is here with another key"):
            other.hello()
        close(rank, other)

    def test_another_job_of_the_name_takes_the_place_of_one_without_ranks(self, one: Node) -> None:
        (rank,) = opened([one])
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        close(rank)
        until(lambda: one.status["without_ranks_for_s"] is not None, "it has seen the end")
        other = Rank(one, key=b"other")
        assert other.hello().copies == ()
        assert one.slot_files == set()
        close(other)


def metadata_for(rank: Rank, step: int) -> None:
    wanted = rank.expect(MetadataWanted, lambda word: word.step == step)
    rank.connection.send(MetadataMade(wanted.step, b"metadata"))


class TestStorage:
    def test_a_step_goes_there_as_a_complete_folder(self, two: list[Node], tmp_path: Path) -> None:
        ranks = opened(two, directory=str(tmp_path / "shared"), persist_every=2)
        for step in (1, 2):
            for rank in ranks:
                rank.capture(step, contents(rank.rank, step))
        metadata_for(ranks[0], 2)
        assert ranks[0].expect(Persisted).path == str(tmp_path / "shared" / "step_2")
        folder = tmp_path / "shared" / "step_2"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            ".metadata": b"metadata",
            "__0_0.distcp": contents(0, 2),
            "__1_0.distcp": contents(1, 2),
        }
        assert [path.name for path in folder.parent.iterdir()] == ["step_2"]
        close(*ranks)

    def test_the_last_step_gets_there_though_its_ranks_have_ended(self, two: list[Node], tmp_path: Path) -> None:
        ranks = opened(two, directory=str(tmp_path / "shared"), persist_every=1)
        for rank in ranks:
            rank.capture(1, contents(rank.rank, 1))
            rank.connection.send(Close())
        metadata_for(ranks[0], 1)
        assert all(rank.ended() for rank in ranks)
        assert (tmp_path / "shared" / "step_1" / ".metadata").exists()
        close(*ranks)

    def test_storage_that_fails_is_reported_and_steps_go_on(self, two: list[Node], tmp_path: Path) -> None:
        (tmp_path / "shared").write_text("a file")
        ranks = opened(two, directory=str(tmp_path / "shared"), persist_every=1)
        for step in range(1, 6):
            for rank in ranks:
                rank.capture(step, contents(rank.rank, step))
            for rank in ranks:
                rank.whole(step)
        until(lambda: "persist_failed" in two[0].status["counts"], "it is counted")
        assert any("is not on storage" in text for text in two[0].status["troubles"])
        assert two[0].status["persisted_step"] is None
        close(*ranks)

    def test_storage_that_hangs_holds_up_neither_steps_nor_the_end_of_the_store(
        self, one: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs, goes_on = threading.Event(), threading.Event()

        def hang(*_: object) -> None:
            hangs.set()
            goes_on.wait(WITHIN_S)

        monkeypatch.setattr(job_service, "write_shard", hang)
        (rank,) = opened([one], directory=str(tmp_path / "shared"), persist_every=1)
        for step in range(1, 8):
            rank.capture(step, contents(0, step))
            rank.whole(step)
        assert hangs.is_set()
        assert one.status["persisting_step"] == 1
        assert one.status["persisting_for_s"] >= 0
        assert (0, 1) in one.steps
        close(rank)
        began_s = time.monotonic()
        one.stop()
        assert time.monotonic() - began_s < WITHIN_S / 2
        goes_on.set()

    def test_steps_go_on_at_other_nodes_while_storage_is_slow(
        self, two: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes_on = threading.Event()
        monkeypatch.setattr(job_service, "write_shard", lambda *_: goes_on.wait(WITHIN_S))
        ranks = opened(two, directory=str(tmp_path / "shared"), persist_every=1, keep=1)
        for step in range(1, 6):
            for rank in ranks:
                rank.capture(step, contents(rank.rank, step))
            for rank in ranks:
                rank.whole(step)
        assert two[0].status["persisting_step"] == 1
        close(*ranks)
        goes_on.set()

    def test_what_an_earlier_attempt_still_writes_is_in_no_folder_that_is_read(
        self, one: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, held, goes_on = write_shard, threading.Event(), threading.Event()

        def slow(*arguments: object) -> None:
            if not held.is_set():
                held.set()
                goes_on.wait(WITHIN_S)
            real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(job_service, "write_shard", slow)
        said = {"directory": str(tmp_path / "shared"), "persist_every": 1}
        (old,) = opened([one], **said)
        old.capture(1, b"old")
        assert held.wait(WITHIN_S)
        (rank,) = opened([one], attempt=2, **said)
        rank.capture(1, b"new")
        metadata_for(rank, 1)
        rank.expect(Persisted)
        goes_on.set()
        assert (tmp_path / "shared" / "step_1" / "__0_0.distcp").read_bytes() == b"new"
        close(old, rank)

    def test_memory_that_was_damaged_does_not_get_there(self, tmp_path: Path) -> None:
        data = bytearray(contents(0, 1))
        sums = sums_of(memoryview(data))
        data[7] ^= 1
        with pytest.raises(Damaged, match="rank 0: chunk 0"):
            write_shard(tmp_path / "part", 0, memoryview(data), sums, None, lambda: True)

    def test_a_shard_that_nobody_wants_any_more_is_not_written_on(self, tmp_path: Path) -> None:
        data = memoryview(contents(0, 1))
        with pytest.raises(InterruptedError, match="another attempt has begun"):
            write_shard(tmp_path / "part", 0, data, sums_of(data), None, lambda: False)

    def test_a_folder_of_the_same_step_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "step_4").mkdir()
        (tmp_path / "step_4" / "old").write_bytes(b"")
        partial(str(tmp_path), 4, 2).mkdir()
        assert complete(str(tmp_path), 4, 2, b"metadata", 0.0) == tmp_path / "step_4"
        assert [path.name for path in (tmp_path / "step_4").iterdir()] == [".metadata"]
        assert [path.name for path in tmp_path.iterdir()] == ["step_4"]

    def test_what_earlier_attempts_left_half_written_is_removed(self, one: Node, tmp_path: Path) -> None:
        partial(str(tmp_path / "shared"), 9, 1).mkdir(parents=True)
        (rank,) = opened([one], attempt=2, directory=str(tmp_path / "shared"), persist_every=2)
        until(lambda: not list((tmp_path / "shared").iterdir()), "nothing is left")
        close(rank)


class TestRecord:
    def test_what_was_written_last_is_read(self, tmp_path: Path) -> None:
        for data in (b"one", b"two" * 100_000, b"three"):
            Record(tmp_path).write(data)
            assert Record(tmp_path).read() == data

    def test_there_is_none_before_the_first(self, tmp_path: Path) -> None:
        assert Record(tmp_path).read() is None

    @pytest.mark.parametrize("bytes_written", [0, 5, 20, 30])
    def test_whoever_is_killed_in_the_middle_leaves_the_one_before(self, tmp_path: Path, bytes_written: int) -> None:
        record = Record(tmp_path)
        for data in (b"one", b"two", b"three"):
            record.write(data)
        path = tmp_path / FILES[1]  # the third
        before = path.read_bytes()
        path.write_bytes(before[:bytes_written] + bytes(len(before) - bytes_written))
        assert Record(tmp_path).read() == (b"two" if bytes_written < 29 else b"three")


class TestScrub:
    def damage(self, node: Node, data: bytes) -> None:
        path = next(path for path in node.slot_files if path.read_bytes().startswith(data))
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"\0\0\0")

    def test_a_copy_that_was_damaged_is_named_and_gone(self, one: Node) -> None:
        (rank,) = opened([one])
        for step in (1, 2):
            rank.capture(step, contents(0, step))
            rank.whole(step)
        self.damage(one, contents(0, 1))
        verified = ask_verify(one.folder)
        assert verified.copies == 1
        assert verified.damaged == ("job: the copy of rank 0, step 1: chunk 0 of 1 MiB does not have its checksum",)
        assert one.steps == {(0, 2)}
        assert not ask_verify(one.folder).damaged
        close(rank)

    def test_it_is_found_without_anybody_asking(self, tmp_path: Path) -> None:
        with running([tmp_path / "a"], scrub_every_s=0.05) as (node,):
            (rank,) = opened([node])
            rank.capture(1, contents(0, 1))
            rank.whole(1)
            self.damage(node, contents(0, 1))
            until(lambda: node.status["counts"].get("damaged") == 1, "it is found")
            close(rank)


def run(*words: str) -> int:
    parser = ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(words))


class TestCommands:
    def test_status_tells_people(self, one: Node, capsys: pytest.CaptureFixture[str]) -> None:
        (rank,) = opened([one])
        rank.capture(7, contents(0, 7))
        rank.whole(7)
        assert run("status", "--folder", str(one.folder)) == 0
        said = capsys.readouterr().out
        assert "job, attempt 1: step 7 is whole on all nodes" in said
        assert "step 7        rank 0" in said
        close(rank)

    def test_status_tells_people_what_reaches_back_and_how_seldom_steps_are_captured(self, one: Node) -> None:
        (rank,) = opened([one], reach_s=100.0)
        whole([rank], 1, 2, 3, 4)
        (service,) = one.store._jobs.values()
        service.job.capture_every = 4
        said = status_lines([one.status])
        assert "  further back: step 1, 2" in said
        assert "  one of 4 captures is made: of all, fewer than half became whole" in said
        close(rank)

    def test_status_of_a_store_that_holds_nothing(self, one: Node, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("status", "--folder", str(one.folder)) == 0
        assert capsys.readouterr().out == "This store holds nothing of any job.\n"

    def test_status_tells_machines(self, one: Node, capsys: pytest.CaptureFixture[str]) -> None:
        (rank,) = opened([one])
        assert run("status", "--folder", str(one.folder), "--json") == 0
        (job,) = json.loads(capsys.readouterr().out)["jobs"]
        assert (job["job"], job["ranks_connected"], job["reserved_bytes"]) == (JOB, 1, 15000)
        close(rank)

    @pytest.mark.parametrize("verb", ["status", "verify"])
    def test_where_no_store_answers_they_say_so(
        self, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(verb, "--folder", str(tmp_path)) == 1
        assert f"no store answers in {tmp_path}" in capsys.readouterr().err

    def test_verify_tells_people_and_machines(self, one: Node, capsys: pytest.CaptureFixture[str]) -> None:
        (rank,) = opened([one])
        rank.capture(1, contents(0, 1))
        rank.whole(1)
        assert run("verify", "--folder", str(one.folder)) == 0
        assert capsys.readouterr().out == "1 copies are what was written (2.9 KiB read)\n"
        TestScrub().damage(one, contents(0, 1))
        assert run("verify", "--folder", str(one.folder), "--json") == 1
        figures = json.loads(capsys.readouterr().out)
        assert (figures["copies"], len(figures["damaged"])) == (0, 1)
        close(rank)


# Helpers.


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 80 MB, of which a store leaves 67 MB to others."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a tmpfs: run as root")
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80M", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here ({mounted.stderr.strip()}): run where root may mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def hello(node: Node) -> Welcome:
    rank = Rank(node)
    try:
        return rank.hello()
    finally:
        close(rank)


def put_open(node: Node) -> bool:
    """Whether a put is on its way to the only shard of another node."""
    (service,) = node.store._jobs.values()
    return any(shard.slots.granted is not None for shard in service.job.shards.values() if not shard.local)


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def unproven(node: Node) -> socket.socket:
    host, _, port = node.store.address.rpartition(":")
    return socket.create_connection((host, int(port)), WITHIN_S)


def local_unproven(node: Node) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WITHIN_S)
    sock.connect(str(node.folder / "socket"))
    return sock


def connection_ask(sock: socket.socket, message: object) -> object:
    from eagle_eye.checkpoint.messages import decode

    sock.sendall(frame(message))
    head = sock.recv(4, socket.MSG_WAITALL)
    return decode(sock.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))


def hung_up(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    finally:
        sock.close()
    return True


def store_words(folder: Path) -> list[str]:
    words = [sys.executable, "-m", "eagle_eye.cli.main", "checkpoint", "store", "--folder", str(folder)]
    return [*words, "--node", "a", "--listen", "127.0.0.1:0"]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A store in a process of its own."""
    node = Node(tmp_path / "a")
    with subprocess.Popen(store_words(node.folder), stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(node), "the store answers")
            yield process
        finally:
            process.kill()


def answers(node: Node) -> bool:
    try:
        ask_status(node.folder)
    except OSError:
        return False
    return True
