"""Real training processes on gloo: killed, moved, grown and shrunk, they go on where they were, bit by bit.

Each rank has a node of its own. Runs are shared: one that is killed is what several tests restore from.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.checkpoint.warm import Forked, Warm
from eagle_eye.checkpoint import store_client
from eagle_eye.checkpoint.checkpointer import (
    MemoryCheckpointer,
    NoCheckpoint,
    NotTheSame,
    _Reported,
    _require_same,
    whole_steps,
)
from eagle_eye.checkpoint.connection import BlockingConnection
from eagle_eye.checkpoint.messages import Captured, CaptureEvery, CopyInfo, Welcome
from eagle_eye.checkpoint.state import KeptState, RandomState
from eagle_eye.checkpoint.store import ask_status
from tests.checkpoint.stores import Node, until

WITHIN_S = 120.0
JOB = "eagle_eye.checkpoint.MemoryCheckpointer"
_meetings = itertools.count()


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as warm:
        yield warm


@dataclass
class Run:
    """One attempt: what its ranks have said, by rank."""

    processes: list[Forked]
    files: list[Path]
    logs: list[Path]

    def said(self, rank: int = 0) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [
                json.loads(line) for line in self.files[rank].read_text().splitlines(keepends=True) if line[-1] == "\n"
            ]
        return []

    def of(self, what: str, rank: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.said(rank) if what in line]

    def until(
        self, true: Callable[[list[dict[str, Any]]], bool], what: str, ranks: Sequence[int] | None = None
    ) -> None:
        """All ranks have said it. Fails, with what they printed, where one ends before."""
        end_s = time.monotonic() + WITHIN_S
        for rank in range(len(self.processes)) if ranks is None else ranks:
            while not true(self.said(rank)):
                ended = self.processes[rank].poll()
                if (ended is not None and not true(self.said(rank))) or time.monotonic() > end_s:
                    printed = "\n".join(log.read_text()[-3000:] for log in self.logs if log.exists())
                    pytest.fail(f"rank {rank} ({ended}): not {what}\n{printed}")
                time.sleep(0.005)

    def until_said(self, what: str) -> Run:
        self.until(lambda lines: any(what in line for line in lines), what)
        return self

    def until_step(self, step: int) -> Run:
        self.until(lambda lines: any(line.get("step", -1) >= step for line in lines), f"step {step}")
        return self

    def kill(self) -> Run:
        for process in self.processes:
            process.kill()
        end_s = time.monotonic() + WITHIN_S
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < end_s
            time.sleep(0.005)
        return self

    @property
    def resumed(self) -> dict[str, Any]:
        return self.of("resumed")[0]

    def number(self, step: int) -> str:
        """Return what the state was at a step."""
        return next(str(line["number"]) for line in self.said() if line.get("step") == step)


@dataclass
class Site:
    """Nodes with their stores, and a directory that they share."""

    warm: Warm
    folder: Path
    memory: Path
    nodes: dict[str, Node] = field(default_factory=dict)

    def node(self, name: str) -> Node:
        if name not in self.nodes:
            self.nodes[name] = Node(self.memory / name, name).start()
        return self.nodes[name]

    def lose(self, *names: str) -> None:
        """A node is gone with its memory; another one of its name has none."""
        for name in names:
            self.node(name).stop()
            shutil.rmtree(self.nodes.pop(name).folder)

    def run(self, nodes: str, resume: str = "", directory: str = "shared", **said: Any) -> Run:
        """Start a rank on each node, these being named by one letter each."""
        number = next(_meetings)
        run = Run([], [], [])
        for rank, name in enumerate(nodes):
            run.files.append(self.folder / f"said-{number}-{rank}")
            run.logs.append(self.folder / f"log-{number}-{rank}")
            arguments = {
                "rank": rank,
                "world": len(nodes),
                "meet": str(self.folder / f"meet-{number}"),
                "directory": str(self.folder / directory),
                "said": str(run.files[-1]),
            }
            environment = {
                "EAGLE_EYE_CHECKPOINT_STORE": str(self.node(name).folder),
                "EAGLE_EYE_NODE": name,
                "EAGLE_EYE_RESUME_FROM": resume,
            }
            run.processes.append(
                self.warm.fork("benchmarks.checkpoint.job:train", arguments | said, environment, run.logs[-1])
            )
        return run

    def restored(self, nodes: str, **said: Any) -> Run:
        """Begin an attempt, and end it as a failed job ends once it has said where it goes on."""
        return self.run(nodes, steps=0, leaves="exit", **said).until_said("ended").kill()

    def end(self) -> None:
        for node in self.nodes.values():
            node.stop()


@pytest.fixture(scope="module")
def site_of(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Site]]:
    sites: list[Site] = []
    memory = Path(tempfile.mkdtemp(prefix="eagle-eye-test-", dir="/dev/shm"))

    def make(name: str) -> Site:
        (memory / name).mkdir()
        sites.append(Site(warm, tmp_path_factory.mktemp(name), memory / name))
        return sites[-1]

    try:
        yield make
    finally:
        for site in sites:
            site.end()
        shutil.rmtree(memory)


@dataclass
class Killed:
    """A run that was killed at its last step, and the site where its memory is. Tests only restore from it."""

    site: Site
    run: Run
    nodes: str
    step: int


@pytest.fixture(scope="module")
def undisturbed(site_of: Callable[[str], Site]) -> Run:
    """A run that nobody kept, and nobody killed."""
    return site_of("alone").run("ab", steps=9, keeps=False, leaves="exit").until_said("ended").kill()


@pytest.fixture(scope="module")
def killed(site_of: Callable[[str], Site]) -> Killed:
    """Two ranks by DDP, killed at step 5: in memory are steps 4 and 5, on storage steps 2 and 4."""
    site = site_of("two")
    run = site.run("ab", steps=5, waits=True, persist_every=2, leaves="stay").until_said("ended")
    shared = site.folder / "shared"
    end_s = time.monotonic() + WITHIN_S
    while not all((shared / f"step_{step}").exists() for step in (2, 4)):
        assert time.monotonic() < end_s, list(shared.iterdir())
        time.sleep(0.01)
    return Killed(site, run.kill(), "ab", 5)


@pytest.fixture(scope="module")
def killed_three(site_of: Callable[[str], Site]) -> Killed:
    """Three ranks by DDP, killed at step 4; each node's shards have a copy on the next one."""
    site = site_of("three")
    return Killed(site, site.run("abc", steps=4, waits=True, leaves="stay").until_said("ended").kill(), "abc", 4)


@pytest.fixture(scope="module")
def killed_sharded(site_of: Callable[[str], Site]) -> Killed:
    """Two ranks by FSDP2, killed at step 4."""
    site = site_of("sharded")
    run = site.run("ab", kind="fsdp", steps=4, waits=True, leaves="stay").until_said("ended").kill()
    return Killed(site, run, "ab", 4)


def equal(restored: Run, killed: Killed, step: int | None = None) -> None:
    step = killed.step if step is None else step
    assert restored.resumed["resumed"] == step
    assert restored.resumed["number"] == killed.run.number(step)


class TestKilled:
    def test_all_ranks_go_on_as_if_nobody_had_killed_them(self, killed: Killed, undisturbed: Run) -> None:
        run = killed.site.restored("ab")
        equal(run, killed)
        assert run.resumed["number"] == undisturbed.number(5)

    def test_what_belongs_to_a_rank_is_restored_rank_by_rank(self, killed: Killed) -> None:
        run = killed.site.restored("ab")
        for rank in (0, 1):
            assert run.of("resumed", rank)[0]["loader"] == killed.run.of("step", rank)[-1]["loader"]

    @pytest.mark.parametrize("nodes", ["a", "b", "abc", "ba", "cd"])
    def test_on_other_nodes_and_more_or_fewer_of_them(self, killed: Killed, nodes: str) -> None:
        # On c and d there is nothing: what is on storage serves.
        equal(killed.site.restored(nodes), killed, 4 if nodes == "cd" else 5)

    def test_fewer_ranks_than_three(self, killed_three: Killed) -> None:
        equal(killed_three.site.restored("ca"), killed_three)
        equal(killed_three.site.restored("bc"), killed_three)

    def test_a_node_that_is_lost_with_its_memory(self, killed_three: Killed) -> None:
        killed_three.site.lose("b")
        equal(killed_three.site.restored("abc"), killed_three)

    def test_a_copy_that_is_damaged_is_read_from_another_node(self, killed: Killed) -> None:
        site = copy_of(killed, "damaged")
        for path in site.node("a").slot_files:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 8)
                file.write(b"?" * 1000)
        equal(site.restored("ab"), killed)

    @pytest.mark.parametrize("nodes", ["ab", "a", "abc"])
    def test_sharded_parameters(self, killed_sharded: Killed, nodes: str) -> None:
        equal(killed_sharded.site.restored(nodes, kind="fsdp"), killed_sharded)

    def test_what_follows_is_what_would_have_followed(self, site_of: Callable[[str], Site], undisturbed: Run) -> None:
        site = site_of("follows")
        site.run("ab", steps=5, waits=True, leaves="stay").until_said("ended").kill()
        again = site.run("ab", steps=9, waits=True, leaves="close").until_said("ended")
        assert again.resumed["resumed"] == 5
        assert [again.number(step) for step in range(6, 10)] == [undisturbed.number(step) for step in range(6, 10)]
        end_s = time.monotonic() + WITHIN_S
        while any(ask_status(site.node(name).folder) for name in "ab"):
            assert time.monotonic() < end_s, "close frees the memory"
            time.sleep(0.01)


class TestWhereItGoesOn:
    def test_a_job_that_never_had_a_step_begins_with_its_optimizer_untouched(self, killed: Killed) -> None:
        assert killed.run.resumed["resumed"] == 0
        assert killed.run.of("step")[0]["adams"] == [1]

    def test_a_folder_that_the_launcher_names(self, killed: Killed) -> None:
        folder = killed.site.folder / "shared" / "step_2"
        equal(copy_of(killed, "folder").restored("ab", resume=str(folder)), killed, 2)

    def test_a_step_in_memory_that_the_launcher_names(self, killed: Killed) -> None:
        equal(copy_of(killed, "named").restored("ab", resume="memory:4"), killed, 4)

    def test_an_older_one_in_memory_where_that_is_not_there(self, killed: Killed) -> None:
        equal(copy_of(killed, "older").restored("ab", resume="memory:99"), killed, 5)

    def test_one_that_reaches_further_back_and_is_whole_in_every_shard(self, site_of: Callable[[str], Site]) -> None:
        site = site_of("reach")
        begin, kept = site.folder / "begin", dict[str, Any](reach_s=3600.0, kind="gathered")
        run = site.run("abc", steps=7, waits=True, leaves="stay", begin=str(begin), **kept).until_said("resumed")
        # Training does not wait for slots: until all are reserved a node keeps the newest steps alone.
        until(lambda: all(site.node(name).has_all_slots for name in "abc"), "all slots are reserved")
        begin.touch()
        reaching = Killed(site, run.until_said("ended").kill(), "abc", 7)
        site.lose("b")
        # Of the slots three take the newest steps in turn: the fifth may be there still, the fourth is not.
        equal(site.restored("abc", resume="memory:4", **kept), reaching, 2)
        # What was lost with the node is there again, and what came after the step is not.
        until(lambda: site.node("b").steps == {(rank, step) for rank in (0, 1) for step in (1, 2)}, "b has its copies")

    def test_an_older_one_on_storage_where_none_in_memory_is_old_enough(self, killed: Killed) -> None:
        folder = killed.site.folder
        shutil.copytree(folder / "shared", folder / "not_trusted")  # of which later ones will be set aside
        equal(killed.site.restored("cd", resume="memory:3", directory="not_trusted"), killed, 2)

    def test_another_model_is_named_tensor_by_tensor(self, killed: Killed) -> None:
        failed = killed.site.run("ab", steps=0, hidden=33).until_said("failed").kill().of("failed")[0]
        assert failed["failed"] == "AnotherModel"
        assert "model.0.weight is (32, 16) there and (33, 16) here" in failed["text"]

    def test_where_nothing_is_left_it_says_what_it_looked_for(self, killed: Killed, tmp_path: Path) -> None:
        shared = killed.site.folder / "empty"
        shared.mkdir()
        for name in (".eagle-eye-committed", ".eagle-eye-key"):
            shutil.copy(killed.site.folder / "shared" / name, shared / name)
        failed = killed.site.run("cd", directory="empty", steps=0).until_said("failed").kill().of("failed")[0]
        assert failed["failed"] == "NoCheckpoint"
        assert "copies in memory of steps none, whole ones none" in failed["text"]
        assert f"folders step_N in {shared}" in failed["text"]
        assert f"To begin anew on purpose, remove {shared / '.eagle-eye-committed'}" in failed["text"]

    def test_the_folder_on_storage_is_anybodys(self, killed: Killed, warm: Warm, tmp_path: Path) -> None:
        folder = str(killed.site.folder / "shared" / "step_4")
        said = tmp_path / "said"
        process = warm.fork(
            "benchmarks.checkpoint.job:plain", {"folder": folder, "said": str(said)}, {}, tmp_path / "log"
        )
        run = Run([process], [said], [tmp_path / "log"]).until_said("number")
        assert run.said()[0]["number"] == killed.run.number(4)


class TestTraining:
    def test_goes_on_without_its_store_and_is_kept_again_once_that_is_back(
        self, site_of: Callable[[str], Site]
    ) -> None:
        site = site_of("stores")
        stop = site.folder / "stop"
        run = site.run("ab", steps=10**6, step_s=0.02, stop=str(stop)).until_step(5)
        # Of the ranks' own starting, and in a process, so that it can be killed.
        site.nodes.pop("b").stop()
        store = site.memory / "b"
        run.until(lambda lines: lines[-1].get("skipped", 0) > 3, "steps are skipped", [1])
        (process,) = stores_on(store)
        skipped = run.said(1)[-1]
        run.until(lambda lines: lines[-1]["captured"] > skipped["captured"] + 5, "steps are captured again", [1])
        os.kill(process.pid, signal.SIGKILL)
        step = run.said(1)[-1]["step"]
        run.until(lambda lines: (lines[-1].get("whole") or 0) > step, "a later step is whole")
        stop.touch()
        run.until_said("ended").kill()
        for left in stores_on(store):
            os.kill(left.pid, signal.SIGKILL)
        assert [process.code for process in run.processes] == [0, 0]


class Alone:
    """A job of one process, this one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = Node(folder / "a").start()
        monkeypatch.setenv("EAGLE_EYE_CHECKPOINT_STORE", str(self.node.folder))
        monkeypatch.setenv("EAGLE_EYE_NODE", "a")
        self.folder = folder / "shared"
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def begin(self, **options: Any) -> MemoryCheckpointer:
        self.kept = MemoryCheckpointer(self.objects, self.folder, **options)
        self.resumed = self.kept.restore()
        return self.kept

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()

    def keep(self, step: int) -> None:
        """Capture a step once there is a slot for it, and wait until it is whole."""
        captured = self.kept.counts["captured"]
        until(lambda: self.kept._granted is not None, "a slot is granted")
        self.kept.capture(step)
        assert self.kept.counts["captured"] == captured + 1
        until(lambda: self.kept.whole_step == step, f"step {step} is whole")

    def leave_a_step(self) -> None:
        """Begin, keep step 1, and end as a job that failed."""
        self.begin()
        self.train()
        self.keep(1)
        self.kept._client.close(ended=False)

    def end(self) -> None:
        self.kept._client.close(ended=False)
        self.node.stop()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Alone]:
    alone = Alone(tmp_path, monkeypatch)
    yield alone
    alone.end()


class TestCapture:
    def test_an_optimizer_that_has_made_no_step_is_as_it_was(self, alone: Alone) -> None:
        alone.begin()
        alone.keep(1)
        assert not alone.optimizer.state
        alone.train()
        assert {int(state["step"]) for state in alone.optimizer.state.values()} == {1}

    def test_a_state_of_another_shape_is_skipped_and_the_next_right_one_is_kept(self, alone: Alone) -> None:
        kept = alone.begin()
        alone.train()
        alone.keep(1)
        until(lambda: kept._granted is not None, "a slot is granted")
        weight = alone.model.weight
        alone.model.weight = torch.nn.Parameter(torch.zeros(5, 3))
        kept.capture(2)
        alone.model.weight = weight
        assert kept.counts["skipped"] == 1
        alone.keep(3)

    def test_what_was_said_to_a_store_that_is_gone_is_not_said_to_the_next(self, alone: Alone) -> None:
        # It would be of a slot that this one has not granted, and nobody has written.
        kept = alone.begin()
        alone.train()
        alone.keep(1)
        until(lambda: kept._granted is not None, "a slot is granted")
        line, grant = kept._line, kept._granted
        assert line is not None
        assert grant is not None
        alone.node.stop()
        alone.node.start()
        until(lambda: kept._line is not line and kept._granted is not None, "the attempt goes on")
        line.say(Captured(2, grant.slot, 100, (), 1.0))
        alone.keep(3)
        assert (0, 2) not in alone.node.steps

    def test_a_rank_that_ends_while_it_connects_anew_leaves_no_connection(
        self, alone: Alone, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = alone.begin()._client
        connected, goes_on = threading.Event(), threading.Event()
        greeted = client._greeted

        def slowly() -> tuple[BlockingConnection, Welcome]:
            made = greeted()
            connected.set()
            assert goes_on.wait(WITHIN_S)
            return made

        monkeypatch.setattr(client, "_greeted", slowly)
        monkeypatch.setattr(store_client, "SAID_WITHIN_S", 0.01)
        alone.node.stop()
        alone.node.start()
        assert connected.wait(WITHIN_S)
        before = client._connection
        client.close(ended=False)
        goes_on.set()
        assert client._receiver is not None
        client._receiver.join(WITHIN_S)
        assert client._connection is not None
        assert client._connection is not before
        assert client._connection._socket.fileno() == -1

    def test_of_several_captures_the_one_that_is_due_is_made_whatever_its_step(self, alone: Alone) -> None:
        kept = alone.begin()
        kept._hear(CaptureEvery(4))
        for step in (11, 13, 15):
            kept.capture(step)
        assert (kept.counts["captured"], kept.counts["not_due"], kept.counts["skipped"]) == (0, 3, 0)
        alone.keep(17)

    @pytest.mark.parametrize("reach_s", [-1.0, float("nan"), float("inf")])
    def test_a_reach_that_is_no_time_is_refused(self, reach_s: float, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"reach_s=.*: expected seconds, 0 or more"):
            MemoryCheckpointer({}, tmp_path, reach_s=reach_s)

    def test_a_state_that_was_read_in_part_is_no_fresh_start(self, alone: Alone) -> None:
        alone.leave_a_step()
        for path in alone.node.slot_files:
            with contextlib.suppress(FileNotFoundError):  # the store frees slots that hold nothing once a rank has left
                path.write_bytes(bytes(path.stat().st_size))
        (alone.folder / ".eagle-eye-committed").unlink()
        with pytest.raises(NoCheckpoint, match=r"step 1 in memory: .* does not have its checksum"):
            alone.begin()


class Draws:
    """What draws a random number when it is asked for its state, as data loaders do that have not begun."""

    def state_dict(self) -> dict[str, Any]:
        torch.rand(1)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class TestRandomNumbers:
    def test_they_go_on_where_they_were_though_restoring_asks_for_states(self, alone: Alone) -> None:
        alone.objects |= {"loader": Draws(), "random": RandomState()}
        alone.begin()
        alone.train()
        alone.keep(1)
        kept = torch.get_rng_state()
        alone.kept._client.close(ended=False)
        torch.manual_seed(0)
        alone.begin()
        assert alone.resumed == 1
        assert torch.equal(torch.get_rng_state(), kept)


class TestLaterOnes:
    def test_a_later_checkpoint_on_storage_is_set_aside_where_the_launcher_says_where_to_go_on(
        self, alone: Alone, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alone.leave_a_step()
        spoilt = alone.folder / "step_9"
        spoilt.mkdir()
        (spoilt / ".metadata").write_bytes(b"")
        monkeypatch.setenv("EAGLE_EYE_RESUME_FROM", "memory:1")
        alone.begin()
        assert alone.resumed == 1
        alone.kept._client.close(ended=False)
        monkeypatch.delenv("EAGLE_EYE_RESUME_FROM")
        alone.begin()
        assert alone.resumed == 1, "a restart with no word does not find it"
        assert [path.name for path in alone.folder.glob("step_9*")] == ["step_9.set_aside_2"]

    def test_a_job_that_is_told_to_begin_anew_does_so_whatever_is_there(
        self, alone: Alone, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alone.leave_a_step()
        monkeypatch.setenv("EAGLE_EYE_RESUME_FROM", "memory:0")
        alone.begin()
        assert alone.resumed == 0
        alone.kept._client.close(ended=False)
        monkeypatch.delenv("EAGLE_EYE_RESUME_FROM")
        alone.begin()
        assert alone.resumed == 0, "the spoilt copy is gone, and nobody misses it"

    def test_nothing_is_set_aside_where_nobody_says_where_to_go_on(self, alone: Alone) -> None:
        alone.leave_a_step()
        (alone.folder / "step_9").mkdir()  # by somebody who is still writing it
        alone.begin()
        assert (alone.folder / "step_9").exists()


class TestWhoseStore:
    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to somebody else")
    def test_the_jobs_key_is_not_told_to_whoever_was_first(self, alone: Alone) -> None:
        os.chown(alone.node.folder, 12345, -1)
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            alone.begin()
        os.chown(alone.node.folder, 0, -1)
        alone.begin()

    def test_a_folder_that_everybody_may_write_to_is_not_used(self, alone: Alone) -> None:
        alone.node.folder.chmod(0o777)
        with pytest.raises(PermissionError, match="everybody may write"):
            alone.begin()
        alone.node.folder.chmod(0o700)
        alone.begin()


class TestOneName:
    def test_ranks_with_different_parameters_of_one_name_are_refused(self) -> None:
        state = KeptState({"model": torch.nn.Linear(3, 2)})
        other = KeptState({"model": torch.nn.Linear(3, 2)})
        with pytest.raises(NotTheSame, match=r"model.weight on ranks 0 and 2"):
            _require_same([state.fingerprints(), state.fingerprints(), other.fingerprints()])

    def test_copies_of_one_parameter_and_ranks_with_others_of_other_names_are_not(self) -> None:
        state, stage = KeptState({"model": torch.nn.Linear(3, 2)}), KeptState({"stage1": torch.nn.Linear(3, 2)})
        _require_same([state.fingerprints(), state.fingerprints(), stage.fingerprints()])
        assert state.fingerprints().keys() == {"model.weight", "model.bias"}

    def test_buffers_may_differ(self) -> None:
        norms = [torch.nn.BatchNorm1d(3) for _ in range(2)]
        norms[1].get_buffer("running_mean").add_(1.0)
        _require_same([KeptState({"model": norm}).fingerprints() for norm in norms])


def reported(node: str, *copies: CopyInfo) -> _Reported:
    return _Reported(node, f"{node}:1", 9, copies)


def copy(rank: int, step: int, attempt: int, captured_s: float) -> CopyInfo:
    return CopyInfo("2-plan", rank, step, 10, (), captured_s, attempt)


class TestWholeSteps:
    def test_copies_of_two_courses_of_training_make_no_step(self) -> None:
        assert whole_steps([reported("a", copy(0, 5, 1, 1.0)), reported("b", copy(1, 5, 2, 2.0))]) == []

    def test_the_last_course_comes_first_and_in_it_the_last_step(self) -> None:
        away = [copy(rank, 15, 1, 100.0) for rank in (0, 1)]  # of a node that was away when the others went on from 10
        here = [copy(rank, step, 2, 200.0 + step) for rank in (0, 1) for step in (11, 12)]
        found = whole_steps([reported("a", *away), reported("b", *here)])
        assert [(one.step, one.attempt) for one in found] == [(12, 2), (11, 2), (15, 1)]


# Helpers.


def copy_of(killed: Killed, name: str) -> Site:
    """Return another site with the same memory and directory: what is tried there changes nothing here."""
    for node in killed.nodes:
        killed.site.node(node).stop()
    memory = killed.site.memory.with_name(f"{killed.site.memory.name}-{name}")
    shutil.copytree(killed.site.memory, memory, ignore=shutil.ignore_patterns("socket", "port"))
    for node in killed.nodes:
        killed.site.node(node).start()
    return Copied(killed.site.warm, killed.site.folder, memory)


class Copied(Site):
    """A site that ends with what was tried there."""

    def restored(self, nodes: str, **said: Any) -> Run:
        try:
            return super().restored(nodes, **said)
        finally:
            self.end()


def stores_on(folder: Path) -> list[psutil.Process]:
    """Return the processes that serve a folder, once there is one."""
    end_s = time.monotonic() + WITHIN_S
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "store" in words and str(folder) in words and words[0] != "/bin/sh":
                    found.append(process)
        if found or time.monotonic() > end_s:
            return found
        time.sleep(0.02)
