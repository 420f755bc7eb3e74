from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.collectors import nccl_inspector
from eagle_eye.agent.collectors.nccl_inspector import (
    BYTES_PER_COLLECT_MAX,
    EXCHANGED_EVERY_S,
    LINES_PER_COLLECT_MAX,
    METRICS_EVERY_S,
    NcclInspectorCollector,
)
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.schema.metrics import BY_NAME
from tests.agent.fakes import FakeClock
from tests.agent.nccl_fakes import HOST, FakeProc, inspector_line, process, published

ON = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": "dumps"}


class Host:
    """A node on which processes may run with the Inspector."""

    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.proc = FakeProc(tmp_path)
        self.dumps = self.proc.folder / "dumps"
        self.dumps.mkdir()
        self.processes = TrainingProcesses()
        self.drops = Drops()
        self.steps: dict[int, float] = {}
        self.uuids: dict[str, int] = {}

    def agent(self, *folders: Path) -> NcclInspectorCollector:
        return NcclInspectorCollector(
            self.processes,
            self.drops,
            folders,
            self.uuids,
            lambda process: self.steps.get(process.rank),
            proc=self.proc.path,
            hostname=HOST,
            monotonic_s=self.clock.monotonic_s,
        )

    def runs(self, *processes: TrainingProcess, **environ: str) -> None:
        for one in processes:
            self.proc.runs(one.pid, ON | environ)
        self.processes.publish(processes)

    def writes(self, *lines: bytes, name: str = f"{HOST}-pid1000.log") -> Path:
        path = self.dumps / name
        with path.open("ab") as file:
            file.write(b"".join(lines))
        return path


@pytest.fixture
def host(tmp_path: Path, clock: FakeClock) -> Host:
    return Host(tmp_path, clock)


def rows(agent: NcclInspectorCollector, host: Host) -> dict[int, dict[str, float]]:
    host.clock.advance(1.0)
    observed = agent.collect(host.clock.now_s())
    assert observed.problem == ""
    assert all(name in BY_NAME for row in observed.devices.values() for name in row)
    return observed.devices


def test_a_ranks_log_is_found_by_its_environment_and_becomes_its_row(host: Host) -> None:
    host.runs(process(3, device=5, pid=1000))
    agent = host.agent()
    assert rows(agent, host) == {}
    host.writes(inspector_line(7, "ReduceScatter"))
    assert rows(agent, host) == {
        5: {
            "nccl_completed_sequence": 7.0,
            "nccl_reduce_scatter_seconds": pytest.approx(0.0004),
            "nccl_bus_bandwidth_bytes_per_second": pytest.approx(100e9),
        }
    }


def test_a_process_in_a_container_is_found_by_its_own_number_and_host_name(host: Host) -> None:
    one = process(pid=1000)
    host.proc.runs(1000, ON | {"HOSTNAME": "pod-0"}, own_pid=12)
    host.processes.publish([one])
    agent = host.agent()
    rows(agent, host)
    host.writes(inspector_line(7), name="pod-0-pid12.log")
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 7.0


def test_the_default_folder_is_named_after_the_job(host: Host) -> None:
    host.runs(process(), NCCL_INSPECTOR_DUMP_DIR="", SLURM_JOB_ID="77")
    host.dumps = host.proc.folder / "nccl-inspector-77"
    host.dumps.mkdir()
    agent = host.agent()
    rows(agent, host)
    host.writes(inspector_line(7))
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 7.0


def test_a_process_without_the_inspector_has_no_row(host: Host) -> None:
    host.runs(process(), NCCL_INSPECTOR_ENABLE="0")
    agent = host.agent()
    rows(agent, host)
    host.writes(inspector_line(7))
    assert rows(agent, host) == {}


def test_a_folder_that_was_configured_is_searched_for_this_hosts_processes(host: Host) -> None:
    host.runs(process(), NCCL_INSPECTOR_ENABLE="")  # set by the program itself: /proc does not show it
    agent = host.agent(host.dumps)
    host.writes(inspector_line(3))
    host.writes(inspector_line(900), name="node-8-pid1000.log")
    host.writes(inspector_line(901), name=f"{HOST}-pid1.log")
    rows(agent, host)
    host.writes(inspector_line(4))
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 4.0


def test_what_an_earlier_process_wrote_is_nobodys_progress(host: Host) -> None:
    host.writes(inspector_line(7))
    host.runs(process())
    agent = host.agent()
    assert rows(agent, host) == {}
    assert rows(agent, host) == {}
    host.writes(inspector_line(8))
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 8.0


def test_means_are_of_the_interval_and_repeat_while_nothing_comes(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    for microseconds in (1000, 3000):
        host.writes(inspector_line(7, "ReduceScatter", coll_exec_time_us=microseconds))
        for _ in range(3):
            row = rows(agent, host)[0]
            assert row["nccl_reduce_scatter_seconds"] == pytest.approx(microseconds / 1e6)


def test_a_rank_that_has_gone_has_no_row(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    host.writes(inspector_line(7))
    assert rows(agent, host)
    assert agent.tells_of(0)
    host.processes.publish([])
    assert rows(agent, host) == {}
    assert not agent.tells_of(0)


def test_time_in_collectives_is_told_by_the_step(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    host.steps[0] = 10
    host.writes(inspector_line(0))
    assert "nccl_collective_seconds" not in rows(agent, host)[0]
    host.writes(*(inspector_line(number) for number in range(1, 5)))
    rows(agent, host)
    host.steps[0] = 12
    host.writes(*(inspector_line(number) for number in range(5, 9)))
    assert rows(agent, host)[0]["nccl_collective_seconds"] == pytest.approx(8 * 0.0004 / 2)


def test_time_in_collectives_is_not_told_where_lines_were_left_unread(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    host.steps[0] = 10
    host.writes(inspector_line(0))
    rows(agent, host)
    host.steps[0] = 11
    lines = [inspector_line(number) for number in range(1, LINES_PER_COLLECT_MAX + 4)]
    host.writes(*lines)
    row = rows(agent, host)[0]
    assert "nccl_collective_seconds" not in row
    assert row["nccl_completed_sequence"] == len(lines)
    assert host.drops.snapshot() == {"nccl_inspector_skipped_bytes": sum(len(line) for line in lines[:3])}


def test_however_much_is_written_the_newest_line_is_read_at_a_bounded_cost(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    traces = [{"channel_id": channel, "kernel_start_ts": 1_752_867_229_235_181} for channel in range(400)]
    lines = [inspector_line(number, event_trace_ts=traces) for number in range(100)]
    assert len(lines[0]) > 20_000
    host.writes(*lines)
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 99.0
    skipped = host.drops.snapshot()["nccl_inspector_skipped_bytes"]
    assert sum(len(line) for line in lines) - skipped <= BYTES_PER_COLLECT_MAX


def test_what_cannot_be_used_is_counted(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    host.writes(
        b"{\n",
        inspector_line(1, coll_timing_source="collective_cpu"),
        inspector_line(2, n_ranks=-1),
    )
    rows(agent, host)
    assert host.drops.snapshot() == {
        "nccl_inspector_malformed": 1,
        "nccl_inspector_untimed": 1,
        "nccl_inspector_beyond": 1,
    }


def test_a_log_that_is_not_the_processes_own_is_refused_by_name(host: Host) -> None:
    host.runs(process())
    path = host.dumps / f"{HOST}-pid1000.log"
    os.mkfifo(path)
    observed = host.agent().collect(host.clock.now_s())
    assert observed.devices == {}
    assert observed.problem == f"{path}: not a regular file"
    assert host.drops.snapshot() == {"nccl_inspector_refused": 1}


def test_no_link_in_a_container_leads_to_the_hosts_files(host: Host, tmp_path: Path) -> None:
    container = tmp_path / "container"
    (container / "work").mkdir(parents=True)
    host.runs(process())
    host.proc.contains(1000, container)
    (host.proc.path / "1000/cwd").unlink()
    (host.proc.path / "1000/cwd").symlink_to(container / "work")
    (container / "work/dumps").symlink_to(host.dumps)
    agent = host.agent()
    rows(agent, host)
    host.writes(inspector_line(7))
    assert rows(agent, host) == {}
    (container / "work/dumps").unlink()
    (container / "work/dumps").mkdir()
    host.dumps = container / "work/dumps"
    host.writes(inspector_line(8))
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 8.0


def test_a_log_that_was_exchanged_is_read_to_its_end_and_the_new_one_from_its_beginning(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    path = host.writes(inspector_line(7))
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 7.0
    path.rename(path.with_suffix(".old"))
    host.writes(inspector_line(8), name=f"{HOST}-pid1000.old")
    host.writes(inspector_line(9))
    reported = [rows(agent, host)[0]["nccl_completed_sequence"] for _ in range(int(EXCHANGED_EVERY_S) + 2)]
    assert (reported[0], reported[-1]) == (8.0, 9.0)


def test_the_logs_of_ranks_that_have_gone_are_let_go_of(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    before = len(list(Path("/proc/self/fd").iterdir()))
    host.writes(inspector_line(7))
    rows(agent, host)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    host.processes.publish([])
    rows(agent, host)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_clock_that_jumps_changes_nothing(host: Host) -> None:
    host.runs(process())
    agent = host.agent()
    rows(agent, host)
    host.clock.jump(-1e6)
    host.writes(inspector_line(7))
    assert rows(agent, host)[0]["nccl_completed_sequence"] == 7.0


def test_the_files_that_are_watched_are_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_inspector, "FILES_MAX", 1)
    host.runs(process(0), process(1))
    rows(host.agent(), host)
    assert host.drops.snapshot() == {"nccl_inspector_beyond": 1}


def test_a_folder_too_large_to_search_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_inspector, "FOLDER_ENTRIES_MAX", 1)
    for name in "abc":
        (host.dumps / name).touch()
    observed = host.agent(host.dumps).collect(host.clock.now_s())
    assert observed.problem == f"{host.dumps}: more than 1 entries; give each job its own"


def test_an_environment_that_may_not_be_read_is_said_unless_folders_are_named(host: Host) -> None:
    host.runs(process())
    environ = host.proc.path / "1000/environ"
    environ.unlink()
    environ.mkdir()
    assert "environment of process 1000" in host.agent().collect(host.clock.now_s()).problem
    assert host.agent(host.dumps).collect(host.clock.now_s()).problem == ""


@pytest.mark.parametrize("spelt", ["GPU-11-22", "11-22"])
def test_a_metrics_file_gives_its_gpu_a_bandwidth_once_for_each_writing(host: Host, spelt: str) -> None:
    host.uuids["GPU-11-22"] = 3
    path = host.dumps / f"nccl_inspector_metrics_{spelt}.prom"
    path.write_text('nccl_bus_bandwidth_gbs{nranks="8"} 100\n')
    host.runs(process(device=3), NCCL_INSPECTOR_PROM_DUMP="1")
    agent = host.agent()
    assert rows(agent, host) == {}  # there before the agent: of whom is not known
    path.write_text('nccl_bus_bandwidth_gbs{nranks="8"} 200\n')
    host.clock.advance(METRICS_EVERY_S)
    assert rows(agent, host) == {3: {"nccl_bus_bandwidth_bytes_per_second": pytest.approx(200e9)}}
    host.clock.advance(METRICS_EVERY_S)
    assert rows(agent, host) == {}
    os.utime(path, (1, 1))
    host.clock.advance(METRICS_EVERY_S)
    assert 3 in rows(agent, host)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_metrics_file_of_another_user_is_refused_and_that_of_another_gpu_not_looked_at(host: Host) -> None:
    host.uuids.update({"GPU-1": 1, "GPU-2": 2})
    for uuid in host.uuids:
        (host.dumps / f"nccl_inspector_metrics_{uuid}.prom").touch()
        os.chown(host.dumps / f"nccl_inspector_metrics_{uuid}.prom", 12_345, 12_345)
    host.runs(process(device=2), NCCL_INSPECTOR_PROM_DUMP="1")
    problem = host.agent().collect(host.clock.now_s()).problem
    assert problem == f"{host.dumps}/nccl_inspector_metrics_GPU-2.prom: belongs to user 12345, the process to user 0"
    assert host.drops.snapshot() == {"nccl_inspector_refused": 1}


def test_without_training_processes_nothing_is_read(host: Host) -> None:
    host.writes(inspector_line(7))
    agent = NcclInspectorCollector(published(), host.drops, (host.dumps,), proc=host.proc.path, hostname=HOST)
    assert agent.collect(0.0).devices == {}
