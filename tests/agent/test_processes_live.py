"""Who runs here, with real processes and the kernel's own /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.collectors.processes import SETTLE_S, GpuDriver, ProcessesCollector, ProcessHost
from eagle_eye.agent.collectors.training_log import TrainingLogCollector
from eagle_eye.agent.processes.exit_watcher import Ends, exits_are_reported
from eagle_eye.agent.processes.process_registry import TrainingProcesses
from eagle_eye.detectors.progress.process_exit import ProcessExit
from eagle_eye.detectors.types import Verdict, WindowEvent
from eagle_eye.schema.events import Event
from tests.agent.fakes import REPOSITORY, FakeClock, Listener, script, until
from tests.detectors.windows import NOW_S, Story

KERNEL_TELLS = exits_are_reported(os.uname().release)
# Maps a file of torch's name, starts a data loader that inherits everything, and ends as it is told.
TRAINING = """
    import mmap, os, signal, sys
    file = open(sys.argv[1], "rb")
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    loader = os.fork()
    if loader == 0:
        signal.pause()
    print(loader, flush=True)
    command = sys.stdin.readline()
    os.kill(loader, signal.SIGKILL)
    os.waitpid(loader, 0)
    exec(command)
"""
REFUSED = """
    import os, sys
    import torch
    print("ready", flush=True)
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print("starting", flush=True)
    sys.stdin.readline()
    raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable", 46)
"""
HOOKED = """
    import sys
    from pathlib import Path
    from eagle_eye.agent.hook import attach
    attach(socket=Path(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
"""


class Host:
    """This machine, with a clock of its own."""

    def __init__(self, clock: FakeClock, job: str) -> None:
        self.clock, self.job = clock, job
        self.drops, self.processes = Drops(), TrainingProcesses()
        self.on_gpu: dict[int, int] = {}
        self.collector = ProcessesCollector(
            self.processes,
            self.drops,
            driver=GpuDriver(lambda: dict(self.on_gpu)),
            host=ProcessHost(monotonic_s=clock.monotonic_s),
        )
        self.events: list[Event] = []

    def pids(self) -> list[int]:
        """Look again and return the processes of the test's own job."""
        self.clock.advance(2 * SETTLE_S)
        seen = self.collector.collect(time.time()).events
        self.events += [event for event in seen if event.attributes["job"] == self.job]
        return [process.pid for process in self.processes.all() if process.job == self.job]


@pytest.fixture
def host(clock: FakeClock) -> Iterator[Host]:
    host = Host(clock, f"test-{os.getpid()}")
    yield host
    host.collector.close()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "libtorch_cpu.so").write_bytes(b"x" * 4_096)
    return tmp_path / "libtorch_cpu.so"


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def says(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def test_a_real_rank_is_found_and_its_data_loader_is_not(host: Host, library: Path) -> None:
    with script(TRAINING, str(library), EAGLE_EYE_JOB=host.job, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1") as training:
        loader = int(line(training))
        until(lambda: host.pids() == [training.pid])
        found = host.processes.by_pid(training.pid)
        assert found is not None
        assert (found.rank, found.world_size, found.local_rank, found.device) == (3, 4, 1, 1)
        assert host.processes.by_pid(loader) is None
        says(training, "os._exit(0)")
        training.wait()
        until(lambda: host.pids() == [])


def test_a_shell_that_starts_a_rank_is_none(host: Host, library: Path) -> None:
    with script(
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.readline()",
        EAGLE_EYE_JOB=host.job,
        RANK="0",
    ) as shell:
        child = int(line(shell))
        assert host.pids() == []
        assert host.pids() == []
        os.kill(child, 9)


@pytest.mark.skipif(not KERNEL_TELLS, reason="needs Linux 6.15: tells the exit code to whoever holds a pidfd")
@pytest.mark.parametrize(
    ("command", "code"), [("os._exit(0)", 0), ("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGSEGV)", -11)]
)
def test_a_real_end_is_told_with_its_code(host: Host, library: Path, command: str, code: int) -> None:
    with script(TRAINING, str(library), EAGLE_EYE_JOB=host.job, RANK="3", WORLD_SIZE="4") as training:
        line(training)
        until(lambda: host.pids() == [training.pid])
        says(training, command)
        training.wait()
        until(lambda: bool(host.pids() == [] and host.events))
        (event,) = host.events
        assert (event.kind, event.attributes["exit_code"], event.attributes["rank"]) == ("process_exit", code, 3)
        assert abs(event.time_s - time.time()) < 30.0


@pytest.mark.skipif(not KERNEL_TELLS, reason="needs Linux 6.15: tells the exit code to whoever holds a pidfd")
def test_a_rank_that_cuda_refuses_is_told_with_its_error(host: Host, tmp_path: Path) -> None:
    environ = {"EAGLE_EYE_JOB": host.job, "TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "2"}
    logs = TrainingLogCollector(host.processes, host.drops, monotonic_s=host.clock.monotonic_s)
    log = tmp_path / "log"
    waits = "import sys; print(flush=True); sys.stdin.readline()"
    with (
        script(waits, **environ, RANK="0", LOCAL_RANK="0") as peer,
        script(REFUSED, str(log), **environ, RANK="1", LOCAL_RANK="1") as training,
    ):
        line(peer)
        host.on_gpu = {peer.pid: 0}
        line(training)
        until(lambda: log.exists() and log.stat().st_size > 0)
        until(lambda: host.pids() == [peer.pid, training.pid])
        logs.collect(time.time())
        says(training, "")
        training.wait()
        (error,) = logs.collect(time.time()).events
        until(lambda: bool(host.pids() == [peer.pid] and host.events))
    (end,) = host.events
    assert (end.attributes["rank"], end.attributes["exit_code"], end.device) == (1, 1, 1)
    assert (error.kind, error.attributes["rank"], error.device) == ("training_error", 1, 1)
    assert "CUDA-capable device(s) is/are busy or unavailable" in str(error.attributes["text"])
    logs.close()


ENVIRONMENTS: list[dict[str, str]] = [
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "run"},
    {"RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
    {"SLURM_JOB_ID": "7", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_RESTART_COUNT": "3"},
    {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "RANK": "9", "WORLD_SIZE": "16", "TORCHELASTIC_RESTART_COUNT": "2"},
    {"EAGLE_EYE_JOB": "Größe 7", "EAGLE_EYE_ATTEMPT": "5", "EAGLE_EYE_ROLE": "pp0", "RANK": "0", "SLURM_JOB_ID": "7"},
]


@pytest.mark.parametrize("environ", ENVIRONMENTS)
def test_the_hook_of_the_same_process_says_the_same(
    host: Host, listener: Listener, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "EAGLE_EYE_", "OMPI_"))]:
        monkeypatch.delenv(name)
    with script(HOOKED, str(listener.path), **environ) as training:
        assert line(training) == "ready"
        host.on_gpu = {training.pid: 0}
        host.pids()
        said, found = listener.read_last(), host.processes.by_pid(training.pid)
        assert found is not None
        assert (found.job, found.attempt, found.rank, found.world_size, found.role) == (
            *(said.job, said.attempt, said.rank, said.world_size, said.role),
        )


@pytest.mark.parametrize(
    ("release", "reported"),
    [("6.15.0", True), ("6.18.44-fc", True), ("7.0", True), ("6.14.9", False), ("5.14.0-503.el9", False), ("x", False)],
)
def test_which_kernels_tell_every_exit_code(release: str, reported: bool) -> None:
    assert exits_are_reported(release) == reported


def test_on_an_older_kernel_a_code_that_could_be_read_by_chance_is_not() -> None:
    ends: list[tuple[int, int | None]] = []
    watch = Ends(lambda pid, code: ends.append((pid, code)), "5.15.0-100-generic")
    child = subprocess.Popen([sys.executable, "-S", "-c", "import os, sys; sys.stdin.read(1); os._exit(7)"], stdin=-1)
    watch.watch(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    until(lambda: bool(ends))  # not reaped yet: the code is in /proc
    assert ends == [(child.pid, None)]
    child.wait()
    watch.close()


def test_what_is_forgotten_or_gone_is_not_told() -> None:
    ends: list[int] = []
    watch = Ends(lambda pid, code: ends.append(pid))
    with script("import sys; sys.stdin.read(1)") as one, script("import sys; sys.stdin.read(1)") as other:
        watch.watch(one.pid)
        watch.watch(other.pid)
        watch.forget(one.pid)
        for process in (one, other):
            process.kill()
            process.wait()
        until(lambda: ends == [other.pid])
        with pytest.raises(ProcessLookupError):
            watch.watch(one.pid)
    before = len(list(Path("/proc/self/fd").iterdir()))
    watch.close()
    watch.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2


def test_where_no_descriptor_can_be_had_ends_are_found_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.agent.processes.exit_watcher.open_pidfd", lambda pid: None)
    ends: list[tuple[int, int | None]] = []
    watch = Ends(lambda pid, code: ends.append((pid, code)))
    with script("import sys; sys.stdin.read(1)") as process:
        watch.watch(process.pid)
        watch.poll()
        assert ends == []
        process.kill()
        process.wait()
        watch.poll()
        assert ends == [(process.pid, None)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: looks as another user")
def test_another_user_s_rank_on_a_gpu_is_named_as_not_seen(library: Path) -> None:
    program = """
        import os, sys
        from eagle_eye.agent.collectors.processes import GpuDriver, ProcessesCollector, ProcessHost
        from eagle_eye.agent.collector import Drops
        from eagle_eye.agent.processes.process_registry import TrainingProcesses
        os.setgid(65534); os.setuid(65534)
        drops, pid = Drops(), int(sys.argv[1])
        now = iter(range(0, 10_000, 60))
        collector = ProcessesCollector(
            TrainingProcesses(),
            drops,
            driver=GpuDriver(lambda: {pid: 0}),
            host=ProcessHost(monotonic_s=lambda: next(now)),
        )
        first = [collector.collect(1.0) for _ in range(50)]
        print(first[0].problem, first[0].ranks, sep="|")
        print(first[-1].problem)
        print(drops.snapshot().get("process_environment_unreadable", 0) > 0)
    """
    with script("import sys; sys.stdin.read(1)", RANK="0") as training:
        with script(program, str(training.pid)) as agent:
            out, error = agent.communicate(timeout=60)
        first, last, counted = (out.splitlines() + [error] * 3)[:3]
    assert f"processes {training.pid} use GPUs and their environment may not be read" in first
    assert "processes of other users may not be read: ranks among them are not seen" in first
    assert first.endswith("|[]")
    assert f"processes {training.pid} use GPUs" in last
    assert "of other users" not in last
    assert counted == "True"


def verdicts(ends: list[Event], nodes: int) -> list[Verdict]:
    """What the detector says of a job whose agents reported these ends, a node each."""
    story = Story(nodes)
    story.events += [
        WindowEvent(NOW_S - 20.0, f"n{i}", end.device, end.kind, end.attributes) for i, end in enumerate(ends)
    ]
    return ProcessExit(settle_s=2.0, silent_s=5.0).detect(story.window())


@pytest.mark.skipif(not KERNEL_TELLS, reason="needs Linux 6.15: tells the exit code to whoever holds a pidfd")
@pytest.mark.parametrize(("commands", "faults"), [(["0", "0"], []), (["0", "7"], ["process_crash"])])
def test_a_job_that_ends_well_is_no_crash_and_one_that_does_not_is(
    host: Host, library: Path, commands: list[str], faults: list[str]
) -> None:
    for number, code in enumerate(commands):
        with script(TRAINING, str(library), EAGLE_EYE_JOB=host.job, RANK=str(number), WORLD_SIZE="2") as training:
            line(training)
            until(lambda pid=training.pid: pid in host.pids())  # type: ignore[misc]
            says(training, f"os._exit({code})")
            training.wait()
            until(lambda: host.pids() == [] and len(host.events) == number + 1)  # noqa: B023 - asked at once
    assert [verdict.fault for verdict in verdicts(host.events, len(commands))] == faults


def test_the_agent_s_package_needs_nothing_that_a_gpu_host_lacks() -> None:
    program = "import sys, eagle_eye.agent.collectors.processes; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert not {"numpy", "torch", "httpx", "fastapi"} & set(done.stdout.split())
