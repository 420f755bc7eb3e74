"""What the launcher's parts do by themselves: checkpoints' content, logs, checks of nodes, progress, runners."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import logs
from eagle_eye.orchestrators.launch.checkpoints import find_checkpoints
from eagle_eye.orchestrators.launch.coordinator import ProgressReporter, flaw
from eagle_eye.orchestrators.launch.messages import RankSight, Seen, StartedRank
from eagle_eye.orchestrators.launch.runner import (
    LAUNCH_VARIABLE,
    Checked,
    check_node,
    end_leftovers,
    look_at_ranks,
    reaches,
    run_check,
)
from eagle_eye.orchestrators.launch.runners import ObservedProgress, _seen
from eagle_eye.orchestrators.launch.store import AttemptStore

WITHIN_S = 30.0


class Place:
    """As torch's table of contents has it: where something lies in a checkpoint."""

    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path, self.offset, self.length = relative_path, offset, length


class Table:
    def __init__(self, *places: Place) -> None:
        self.storage_data = dict(enumerate(places))


class Forged:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("forged",)


def checkpoint(folder: Path, table: object, **sizes: int) -> Path:
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    return folder


def test_a_checkpoint_that_holds_what_its_table_names_has_no_flaw(tmp_path: Path) -> None:
    table = Table(Place("a", 0, 10), Place("a", 10, 20), Place("b", 5, 5))
    assert flaw(checkpoint(tmp_path / "step_1", table, a=30, b=10)) == ""


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"a": 29, "b": 10}, "a has 29 bytes, its table of contents names 30"), ({"a": 30}, "b: No such file")],
)
def test_a_checkpoint_with_a_file_cut_short_or_missing_has_one(
    tmp_path: Path, sizes: dict[str, int], words: str
) -> None:
    table = Table(Place("a", 10, 20), Place("b", 5, 5))
    assert words in flaw(checkpoint(tmp_path / "step_1", table, **sizes))


def test_a_table_of_contents_runs_nothing_and_names_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flaw(checkpoint(tmp_path / "step_1", Table(Place("/etc/shadow", 0, 1), Place("../x", 0, 1))))
    flaw(checkpoint(tmp_path / "step_2", Forged()))
    assert not (tmp_path / "forged").exists()


def test_a_table_cut_short_is_a_flaw_and_one_of_another_kind_is_none(tmp_path: Path) -> None:
    cut = checkpoint(tmp_path / "step_1", Table(Place("a", 0, 1)), a=1)
    (cut / ".metadata").write_bytes((cut / ".metadata").read_bytes()[:-5])
    assert "cannot be read" in flaw(cut)
    assert flaw(checkpoint(tmp_path / "step_2", {"something": "else"})) == ""


@pytest.mark.slow
def test_a_real_checkpoint_of_torch_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'eagle-eye[ml]'")
    from torch.distributed.checkpoint.state_dict_saver import save

    with pytest.warns(UserWarning, match="single process"):
        save({"weight": torch.ones(100, 10), "step": torch.tensor(3)}, checkpoint_id=tmp_path / "step_3")
    assert flaw(tmp_path / "step_3") == ""
    (content,) = (tmp_path / "step_3").glob("*.distcp")
    os.truncate(content, content.stat().st_size - 1)
    assert f"{content.name} has" in flaw(tmp_path / "step_3")


def test_a_log_that_grows_too_long_is_cut_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rank0.stdout.log"
    with path.open("wb") as file:
        limit = logs.SizeLimit([path], bytes_max=100, every_s=3_600.0)
        limit.start()
        file.write(b"a" * 101)
        file.flush()
        limit.cut_long_files()
        file.write(b"b" * 10)
        file.flush()
        limit.stop()
    assert path.read_bytes() == b"b" * 10
    assert (tmp_path / "rank0.stdout.log.1").read_bytes() == b"a" * 101


def test_only_ends_of_ranks_logs_are_gathered_and_only_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "rank0.stdout.log").write_text("first" + "x" * logs.TAIL_BYTES)
    (tmp_path / "rank1.stderr.log").write_text("short")
    (tmp_path / "other.log").write_text("no")
    ends = logs.ends(tmp_path)
    assert {name: len(text) for name, text in ends.items()} == {
        "rank0.stdout.log": logs.TAIL_BYTES,
        "rank1.stderr.log": 5,
    }
    logs.gather(tmp_path / "here", {**ends, "../../rank0.stdout.log": "escape", ".launch": "x"})
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == sorted(ends)


def test_of_old_attempts_the_last_ones_keep_their_logs_and_those_whose_processes_run(tmp_path: Path) -> None:
    for attempt in (0, 1, 2, 3, 4):
        (tmp_path / f"attempt-{attempt}" / "n1").mkdir(parents=True)
    (tmp_path / "attempt-x").mkdir()
    logs.drop_old(tmp_path, 4, in_use={1, 4}, kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-1", "attempt-3", "attempt-4", "attempt-x"]


def test_a_runner_tells_the_launchers_own_folder_from_another_of_the_same_name(tmp_path: Path) -> None:
    logs.mark(tmp_path / "logs", "abc")
    assert logs.is_marked(tmp_path / "logs", "abc")
    assert not logs.is_marked(tmp_path / "logs", "xyz")
    assert not logs.is_marked(tmp_path / "elsewhere", "abc")


def says(verdict: str, code: int, reason: str = "", checks: str = "[]") -> list[str]:
    report = f'{{"verdict": "{verdict}", "reason": "{reason}", "checks": {checks}}}'
    return [sys.executable, "-I", "-S", "-c", f"print({report!r}); raise SystemExit({code})"]


SICK = '[{"name": "gemm", "state": "sick", "reason": "gpu 3: 17 numbers differ"}, {"name": "disk", "state": "passed"}]'


@pytest.mark.parametrize(
    ("command", "checked"),
    [
        (says("healthy", 0), Checked("healthy")),
        (says("sick", 3, "gemm", SICK), Checked("sick", "gemm: gpu 3: 17 numbers differ")),
        (says("cannot_tell", 1, "could not check memory"), Checked("cannot tell", "could not check memory")),
        (says("healthy", 1), Checked("cannot tell", "the check ended with 1")),
        (says("cannot_tell", 3), Checked("cannot tell", "the check ended with 3")),
        ([sys.executable, "-c", "raise SystemExit(3)"], Checked("cannot tell", "the check ended with 3")),
        (["/nonexistent"], Checked("cannot tell", "the check cannot be started: No such file or directory")),
    ],
)
def test_only_a_verdict_that_says_sick_keeps_a_node_out(command: list[str], checked: Checked) -> None:
    assert run_check(command, WITHIN_S) == checked


def test_a_check_that_does_not_end_is_ended_and_cannot_tell() -> None:
    began_s = time.monotonic()
    checked = run_check([sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"], 0.2)
    assert checked == Checked("cannot tell", "the check had not ended after 0.2 s")
    assert time.monotonic() - began_s < WITHIN_S


def test_without_gpus_nothing_is_checked_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.orchestrators.launch.runner._GPUS", ("/nonexistent",))
    assert check_node("auto", 1.0) == Checked("not checked", "no GPUs here")
    assert check_node("off", 1.0) == Checked("not checked")


def test_ranks_that_an_earlier_launcher_left_are_ended_and_nobody_elses() -> None:
    sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
    marks = ({LAUNCH_VARIABLE: "one", "EAGLE_EYE_NODE": "n1"}, {LAUNCH_VARIABLE: "one", "EAGLE_EYE_NODE": "n2"})
    children = [subprocess.Popen(sleeper, env=mark) for mark in (*marks, {"EAGLE_EYE_NODE": "n1"})]
    try:
        until_s = time.monotonic() + WITHIN_S
        while any(psutil.Process(child.pid).cmdline() != sleeper for child in children):
            assert time.monotonic() < until_s
        assert end_leftovers("one", "n1") == []
        assert children[0].wait(WITHIN_S) == -9
        assert [child.poll() for child in children[1:]] == [None, None]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_rank_that_has_come_to_the_store_and_one_that_is_stopped_are_told_from_one_that_has_not_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        come = f"import socket, sys; s = socket.create_connection(('127.0.0.1', {port})); print(); sys.stdin.read()"
        absent = "import sys; print(); sys.stdin.read()"
        ranks = [
            subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for script in (come, absent, come)
        ]
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        os.kill(ranks[2].pid, signal.SIGSTOP)
        found = look_at_ranks([StartedRank(i, i, process.pid) for i, process in enumerate(ranks)], port)
        for process in ranks:
            process.kill()
            process.communicate()
    assert found == [RankSight(0, False, True), RankSight(1, False, False), RankSight(2, True, True)]
    assert look_at_ranks([StartedRank(3, 0, ranks[0].pid)], port) == [RankSight(3, False, None)]


def test_a_node_reaches_a_store_that_listens_and_none_that_has_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.1", port)


def test_a_node_that_looks_whether_it_reaches_the_store_leaves_it_as_it_was() -> None:
    store = AttemptStore("127.0.0.1", 0)
    try:
        assert all(reaches(store.host, store.port) for _ in range(3))
        client = TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=WITHIN_S))
        client.set("rank", "1")
        assert client.get("rank") == b"1"
    finally:
        store.close()


@pytest.mark.parametrize(
    ("joined", "reached", "cut_off"),
    [(False, False, True), (False, True, False), (False, None, False), (True, False, True)],
)
def test_a_node_that_does_not_reach_the_store_is_cut_off(joined: bool, reached: bool | None, cut_off: bool) -> None:
    assert _seen("n1", Seen(1, [RankSight(0, False, joined)], reached), in_touch=True).cut_off is cut_off


class Watched:
    """A watcher looked at by hand, on a clock of its own."""

    def __init__(self, folder: Path | None = None) -> None:
        self.now_s = 100.0
        self.sight: ObservedProgress | None = None
        self.reported: list[on.LaunchEvent] = []
        self.watcher = ProgressReporter(folder, lambda: self.sight, self.reported.append, lambda: self.now_s)

    def sees(self, attempt: int, step: int, after_s: float = 1.0) -> None:
        self.now_s += after_s
        self.sight = ObservedProgress(attempt, step)
        self.watcher.report_progress()


def test_the_first_step_is_told_once_the_next_one_shows_the_pace() -> None:
    watched = Watched()
    watched.watcher.watch(2, 40, ())
    watched.sees(1, 90)  # of the attempt before
    watched.sees(2, 90, after_s=0.0)  # its last word, under the new number
    watched.sees(2, 45, after_s=4.0)
    assert watched.reported == []
    watched.sees(2, 47)
    # Two steps a second, five seconds since it began, thrice that and twenty.
    assert watched.reported == [on.StepSeen(2, 45, 40 + 30 + 20)]
    watched.sees(2, 49)
    assert len(watched.reported) == 1


def test_new_checkpoints_are_told_and_so_is_one_written_again(tmp_path: Path) -> None:
    def write(step: int, written_s: float) -> None:
        folder = tmp_path / f"step_{step}"
        folder.mkdir(exist_ok=True)
        (folder / ".metadata").touch()
        os.utime(folder / ".metadata", (written_s, written_s))

    write(10, 1_000.0)
    watched = Watched(tmp_path)
    watched.watcher.watch(2, 10, find_checkpoints(tmp_path))
    watched.watcher.report_progress()
    assert watched.reported == []
    write(20, 2_000.0)
    write(10, 3_000.0)
    watched.watcher.report_progress()
    watched.watcher.report_progress()
    assert watched.reported == [on.CheckpointWritten(2, 20), on.CheckpointWritten(2, 10)]
