"""The evidence sources, run all at once, one thread per piece, until a common deadline; what is unfinished is listed.

A system call may never return: a thread that hangs in one is abandoned, and counted.
"""

from __future__ import annotations

import errno
import http.client
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.collectors.flight_recorder import dump_paths, request_dumps
from eagle_eye.agent.collectors.kernel_log import RECORD_BYTES_MAX, open_log
from eagle_eye.agent.evidence.source import (
    BUNDLE_BYTES_MAX,
    PIECE_BYTES_MAX,
    Bundle,
    BundleManifest,
    EvidenceSource,
    Looked,
    Scene,
    Suspect,
    Task,
    environment,
    open_file_of,
    open_inside,
    read,
    read_open,
    safe_name,
    suspects,
    why,
)
from eagle_eye.agent.external_tool import NICENESS, find, run
from eagle_eye.agent.foreign_files import NotTheirs
from eagle_eye.agent.kernel_messages import record
from eagle_eye.agent.processes.process_files import Environments
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.redact import redact, redact_arguments, redact_environment

# Queries a training process through PyTorch's worker server socket; works even if its main thread hangs.
#
# A program opens it by ``torch.distributed.elastic.control_plane.worker_main`` at the path in
# TORCH_WORKER_SERVER_SOCKET.
WORKER_SERVER_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
ANSWER_S_MAX = 2.0  # it answers in a tenth of a second; a stopped process never does

_CREDENTIALS = struct.Struct("=iII")


class NoWorkerServer(Exception):
    """The process was started without a worker server socket."""


def ask_worker_server(scene: Scene, suspect: Suspect, handler: str, bytes_max: int) -> bytes:
    """Return the answer of the process to ``handler``. Raises NoWorkerServer, OSError, http.client.HTTPException.

    Nothing is sent if another process listens on the socket at the path.
    """
    path = environment(scene.proc, suspect.pid)[0].get(WORKER_SERVER_VARIABLE, "")
    if not path:
        raise NoWorkerServer(f"it was started without {WORKER_SERVER_VARIABLE}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.01, min(ANSWER_S_MAX, scene.left_s())))
        named = open_inside(scene.proc, suspect.pid, path)
        try:
            if not stat.S_ISSOCK(os.fstat(named).st_mode):
                raise NotTheirs(f"{path[:80]!r} is no socket")
            connection.connect(f"/proc/self/fd/{named}")
        finally:
            os.close(named)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        owner = _CREDENTIALS.unpack(raw)[0]
        if owner != suspect.pid:
            raise NotTheirs(f"{path[:80]!r} is answered by process {owner}, not by {suspect.pid}")
        return _post(connection, handler, bytes_max)


def _post(connection: socket.socket, handler: str, bytes_max: int) -> bytes:
    client = http.client.HTTPConnection("localhost")
    client.sock = connection
    client.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
    answer = client.getresponse()
    content = answer.read(bytes_max + 1)
    if answer.status != 200 or len(content) > bytes_max:
        raise http.client.HTTPException(f"{handler} answered {answer.status} with {len(content)} bytes or more")
    return content


# Flight-recorder dumps of the suspects: requested from the process if it answers, else the newest one on disk.
#
# The bundle stores them as ``flight-recorder/<job>/rank_<rank>``, outside the node's folder: bundles of many nodes
# unpacked into one folder give a folder that ``eagle-eye flight-recorder`` reads. A dump is included unchanged, or not
# at all.
DUMP_HANDLER = "fr_trace_json"
RESERVE_S = 0.5  # of the remaining time, when a process was asked for a dump and has not written it


class FlightDumps:
    """One dump per rank; a dump older than its process is left out.

    ``prefixes`` and ``pipe_prefixes`` are those of the flight recorder's collector: where dumps are, and pipes that
    request one, in addition to the processes' environments. A pipe that does not belong to the process is counted in
    ``drops``.
    """

    name = "flight_recorder"

    def __init__(
        self, prefixes: Sequence[str] = (), pipe_prefixes: Sequence[str] = (), *, drops: Drops | None = None
    ) -> None:
        self._prefixes = tuple(prefixes)
        self._pipe_prefixes = tuple(pipe_prefixes)
        self._drops = drops

    def tasks(self, scene: Scene) -> list[Task]:
        """Return a task for each rank."""
        ranks = [(suspect, suspect.rank) for suspect in scene.suspects if suspect.rank is not None]
        return [Task(_dump_name(rank), partial(self._gather, scene, suspect, rank)) for suspect, rank in ranks]

    def _gather(self, scene: Scene, suspect: Suspect, rank: TrainingProcess) -> None:
        try:
            content = ask_worker_server(scene, suspect, DUMP_HANDLER, PIECE_BYTES_MAX)
        except NoWorkerServer as error:
            said = str(error)
        except (OSError, http.client.HTTPException) as error:
            said = f"its worker server does not answer: {why(error)}"
        else:
            scene.bundle.add(self.name, f"{_dump_name(rank)}.json", content)
            return
        environments = Environments(scene.proc)  # a separate instance: reading a stuck process's may never return
        wait_s = max(0.0, scene.left_s() - RESERVE_S)
        asked = request_dumps([rank], wait_s, environments, self._prefixes, self._pipe_prefixes, drops=self._drops)
        said = f"{asked.silent.get(rank, '')}; {said}"
        written_s, path = _newest_dump(scene, suspect, _seen_by(rank, environments, self._prefixes))
        if not path:
            scene.bundle.miss(self.name, _dump_name(rank), f"no dump on disk; {said}")
        elif written_s < suspect.started_s(scene.proc):
            scene.bundle.miss(self.name, _dump_name(rank), f"the dump on disk is older than the process; {said}")
        else:
            self._take(scene, suspect, rank, path)

    def _take(self, scene: Scene, suspect: Suspect, rank: TrainingProcess, path: str) -> None:
        descriptor = open_file_of(scene.proc, suspect.pid, path)
        try:
            content, more = read_open(descriptor, PIECE_BYTES_MAX)
        finally:
            os.close(descriptor)
        if more:
            scene.bundle.miss(self.name, _dump_name(rank), f"the dump has more than {PIECE_BYTES_MAX} bytes")
        elif not content:
            scene.bundle.miss(self.name, _dump_name(rank), "the dump is empty")
        else:
            scene.bundle.add(self.name, _dump_name(rank), content)


def _dump_name(rank: TrainingProcess) -> str:
    return f"flight-recorder/{safe_name(rank.job)}/rank_{rank.rank}"


def _seen_by(rank: TrainingProcess, environments: Environments, prefixes: Sequence[str]) -> list[str]:
    """Return the rank's possible dump paths, as the process itself sees them."""
    environment = environments.of([rank]).get(rank)
    root = environment.root if environment is not None else Path("/")
    paths = dump_paths(rank, environment, prefixes)
    return [f"/{path.relative_to(root)}" for path in paths if path.is_relative_to(root)]


def _newest_dump(scene: Scene, suspect: Suspect, paths: Sequence[str]) -> tuple[float, str]:
    """Return when the newest dump was written, Unix seconds, and its path; (-1, "") where none is readable."""
    newest = (-1.0, "")
    for path in paths:
        try:
            descriptor = open_file_of(scene.proc, suspect.pid, path)
        except NotTheirs as error:
            scene.bundle.miss(FlightDumps.name, path, str(error))
            continue
        except OSError:
            continue
        newest = max(newest, (os.fstat(descriptor).st_mtime, path))
        os.close(descriptor)
    return newest


# NVIDIA's own bug report, as its support requests. Takes minutes, queries all of the driver, and is not redacted.
#
# It runs in safe mode, without the parts that may hang a system with a failing GPU.
PROGRAM = "nvidia-bug-report.sh"
REPORT = "nvidia-bug-report.log"
OUTPUT_BYTES_MAX = 1 << 16  # of its stdout, which is discarded


class BugReport:
    """One file, compressed by NVIDIA's tool."""

    name = "bug_report"

    def __init__(self, program: Callable[[], str | None] = lambda: find(PROGRAM)) -> None:
        self._program = program

    def tasks(self, scene: Scene) -> list[Task]:
        """Return the one task."""
        return [Task(f"{REPORT}.gz", lambda: self._gather(scene))]

    def _gather(self, scene: Scene) -> None:
        program = self._program()
        if program is None:
            scene.bundle.miss(self.name, REPORT, f"{PROGRAM} is not installed")
            return
        with tempfile.TemporaryDirectory(prefix="eagle-eye-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            arguments = [program, "--safe-mode", "--output-file", str(folder / REPORT)]
            ran = run(arguments, scene.tools_until_s, OUTPUT_BYTES_MAX, folder, scene.monotonic_s)
            reports = [path for path in (folder / f"{REPORT}.gz", folder / REPORT) if path.is_file()]
            if ran.status != 0 or not reports:
                ended = "was killed" if ran.status is None else f"ended with {ran.status}"
                scene.bundle.miss(self.name, REPORT, f"{PROGRAM} {ended}: {redact(ran.complaint)}")
            if reports:
                content, more = read(reports[0], PIECE_BYTES_MAX)
                scene.bundle.add(self.name, f"{scene.bundle.folder}/{reports[0].name}", content, cut=more)


LOG_BYTES_MAX = 1 << 20  # the newest part; distributions' buffers hold 256 KiB to 1 MiB
RECORDS_MAX = 1 << 18  # in a 16 MiB buffer, the largest common size, plus what is added while we read


class KernelLog:
    """One file with the newest lines, oldest first, stamped in seconds since boot."""

    name = "kernel_log"

    def __init__(
        self,
        path: Path = Path("/dev/kmsg"),
        opener: Callable[[Path], int] = open_log,
        read: Callable[[int, int], bytes] = os.read,
    ) -> None:
        self._path = path
        self._open = opener
        self._read = read

    def tasks(self, scene: Scene) -> list[Task]:
        """Return the one task."""
        return [Task("kernel.log", lambda: self._gather(scene))]

    def _gather(self, scene: Scene) -> None:
        lines: deque[str] = deque()
        size, cut = 0, False
        descriptor = self._open(self._path)
        try:
            for _ in range(RECORDS_MAX):
                if scene.left_s() <= 0:
                    cut = True
                    break
                try:
                    raw = self._read(descriptor, RECORD_BYTES_MAX)
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in (errno.EPIPE, errno.EINVAL):  # overwritten while we read, or malformed
                        continue
                    raise
                if not raw:
                    break
                found = record(raw)
                if found is None:
                    continue
                text = found.text.partition(b"\n")[0].decode("utf-8", "replace")
                line = f"[{found.stamp_s:12.6f}] {text}"
                lines.append(line)
                size += len(line) + 1
                while size > LOG_BYTES_MAX:
                    size -= len(lines.popleft()) + 1
                    cut = True
        finally:
            os.close(descriptor)
        content = "".join(
            f"{redact(line)}\n" for line in lines
        ).encode()  # line by line: one long search would block all threads
        scene.bundle.add(self.name, f"{scene.bundle.folder}/kernel.log", content, cut=cut)


# Kernel view of the suspects: state, threads, where each waits, and how they were started. Reads /proc.
#
# As root this works for every process, even stopped or stuck in the kernel. Reading thread states never blocks;
# reading a command line or an environment takes the process's memory lock, which a process stuck in a page fault may
# never release, so it is a separate task.
THREADS_MAX = 512  # per process; PyTorch has a few hundred
FILE_BYTES_MAX = 16_384
COMMAND_BYTES_MAX = 1 << 17
VARIABLES_MAX = 2_048
VALUE_CHARS_MAX = 4_096
OF_PROCESS = ("status", "limits", "cgroup", "oom_score", "sched", "io")
OF_THREAD = ("stat", "wchan", "syscall", "stack")

# Only variables that govern communication and computation are shown with their values; of all others only the names.
SHOWN = (
    *(
        "NCCL_",
        "RCCL_",
        "GLOO_",
        "UCX_",
        "FI_",
        "OMPI_",
        "PMI",
        "TORCH",
        "PYTORCH_",
        "XLA_",
        "CUDA_",
        "NVIDIA_",
        "HIP_",
    ),
    *(
        "OMP_",
        "MKL_",
        "SLURM_",
        "MASTER_",
        "EAGLE_EYE_JOB",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PYTHONPATH",
        "VIRTUAL_ENV",
    ),
    *("HOSTNAME", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)


class ProcessCommand(msgspec.Struct, frozen=True):
    """How a process was started, secrets masked; ``other_variables`` are names without their values."""

    executable: str
    arguments: list[str]
    environment: dict[str, str]
    other_variables: list[str]
    cut: bool


class ProcessStates:
    """Two files per suspect: what it is doing, and how it was started."""

    name = "process_states"

    def tasks(self, scene: Scene) -> list[Task]:
        """Return two tasks for each suspect."""
        found = []
        for suspect in scene.suspects:
            found.append(Task(f"{suspect.label}.txt", partial(self._state, scene, suspect)))
            found.append(Task(f"{suspect.label}.command.json", partial(self._command, scene, suspect)))
        return found

    def _state(self, scene: Scene, suspect: Suspect) -> None:
        folder = scene.proc / str(suspect.pid)
        lines = [f"== process {suspect.pid} {suspect.label}"]
        lines += [f"-- {name}\n{_text(folder / name)}" for name in OF_PROCESS]
        try:
            threads = sorted(os.listdir(folder / "task"), key=int)  # noqa: PTH208 - names, not paths
        except (OSError, ValueError) as error:
            threads = []
            scene.bundle.miss(self.name, f"{suspect.label}: threads", why(error))
        read_threads = 0
        for thread in threads[:THREADS_MAX]:
            if scene.left_s() <= 0:
                break
            lines.append(f"\n== thread {thread}")
            lines += [f"-- {name}\n{_text(folder / 'task' / thread / name)}" for name in OF_THREAD]
            read_threads += 1
        more = len(threads) - read_threads
        if more:
            lines.append(f"\n== {more} more threads")
        self._put(scene, suspect, f"{suspect.label}.txt", "\n".join(lines).encode(), cut=more > 0)

    def _command(self, scene: Scene, suspect: Suspect) -> None:
        raw, more = read(scene.proc / str(suspect.pid) / "cmdline", COMMAND_BYTES_MAX)
        arguments = raw.decode("utf-8", "replace").rstrip("\0").split("\0")
        variables, cut = environment(scene.proc, suspect.pid)
        shown = {name: value[:VALUE_CHARS_MAX] for name, value in variables.items() if name.startswith(SHOWN)}
        others = sorted(variables.keys() - shown.keys())
        try:
            executable = str((scene.proc / str(suspect.pid) / "exe").readlink())
        except OSError as error:
            executable = f"not known: {why(error)}"
        cut = cut or more or len(shown) > VARIABLES_MAX or len(others) > VARIABLES_MAX
        command = ProcessCommand(
            executable=executable,
            arguments=redact_arguments(arguments),
            environment=redact_environment(dict(sorted(shown.items())[:VARIABLES_MAX])),
            other_variables=[name[:VALUE_CHARS_MAX] for name in others[:VARIABLES_MAX]],
            cut=cut,
        )
        content = msgspec.json.format(msgspec.json.encode(command), indent=1)
        self._put(scene, suspect, f"{suspect.label}.command.json", content, cut=cut)

    def _put(self, scene: Scene, suspect: Suspect, name: str, content: bytes, *, cut: bool) -> None:
        if suspect.is_still(scene.proc):
            scene.bundle.add(self.name, f"{scene.bundle.folder}/processes/{name}", content, cut=cut)
        else:
            scene.bundle.miss(self.name, name, "the process ended")


def _text(path: Path) -> str:
    try:
        content, more = read(path, FILE_BYTES_MAX)
    except OSError as error:
        return f"not to be had: {why(error)}"
    return content.decode("utf-8", "replace").rstrip() + (" ..." if more else "")


# Python stacks of the suspects, without pausing them: by py-spy, else by PyTorch's own handler.
#
# py-spy reads the process's memory from outside. ``--nonblocking``: it does not pause the process. The price is that
# the stack of a running process may be inconsistent; a hung process's stack does not change. Neither tool shows local
# variables, which may hold anything.
STACK_BYTES_MAX = 4 << 20
AT_ONCE_MAX = 2  # py-spy takes some ten milliseconds per process, on cores that training needs
STACKS_HANDLER = "dump_traceback"


class Stacks:
    """One file per suspect. ``pyspy`` is the program's path, None where it is not installed."""

    name = "stacks"

    def __init__(self, pyspy: Callable[[], str | None] = lambda: find("py-spy")) -> None:
        self._pyspy = pyspy
        self._turn = threading.Semaphore(AT_ONCE_MAX)

    def tasks(self, scene: Scene) -> list[Task]:
        """Return a task for each suspect."""
        pyspy = self._pyspy()
        return [Task(f"{one.label}.txt", partial(self._gather, scene, one, pyspy)) for one in scene.suspects]

    def _gather(self, scene: Scene, suspect: Suspect, pyspy: str | None) -> None:
        said = "py-spy is not installed"
        if pyspy is not None:
            text, cut, said = self._seen_by(pyspy, scene, suspect)
            if text:
                self._put(scene, suspect, text, cut=cut)
                return
        try:
            content = ask_worker_server(scene, suspect, STACKS_HANDLER, STACK_BYTES_MAX)
        except NoWorkerServer as error:
            scene.bundle.miss(self.name, suspect.label, f"{said}, and {error}; the process's state has the kernel's")
        except (OSError, http.client.HTTPException) as error:
            scene.bundle.miss(self.name, suspect.label, f"{said}, and its worker server does not answer: {why(error)}")
        else:
            self._put(scene, suspect, content.decode("utf-8", "replace"), cut=False)

    def _seen_by(self, pyspy: str, scene: Scene, suspect: Suspect) -> tuple[str, bool, str]:
        """Return py-spy's output, whether it was cut, and why there is none."""
        if not self._turn.acquire(timeout=scene.left_s()):
            return "", False, "py-spy was busy with others until the deadline"
        try:
            ran = run(
                [pyspy, "dump", "--nonblocking", "--pid", str(suspect.pid)],
                scene.tools_until_s,
                STACK_BYTES_MAX,
                monotonic_s=scene.monotonic_s,
            )
        except OSError as error:
            return "", False, f"py-spy cannot be started: {why(error)}"
        finally:
            self._turn.release()
        if ran.status == 0 or ran.cut:
            # Its first line repeats the command line, which has its own file with secrets masked.
            return ran.output.decode("utf-8", "replace").partition("\n")[2], ran.cut, ""
        if ran.status is None:
            return "", False, "py-spy did not end in time"
        return "", False, f"py-spy failed: {' '.join(redact(ran.complaint).split()) or ran.status}"

    def _put(self, scene: Scene, suspect: Suspect, text: str, *, cut: bool) -> None:
        if suspect.is_still(scene.proc):
            name = f"{scene.bundle.folder}/stacks/{suspect.label}.txt"
            scene.bundle.add(self.name, name, redact(text).encode(), cut=cut)
        else:
            scene.bundle.miss(self.name, suspect.label, "the process ended")


EVIDENCE, BUG_REPORT = "evidence", "bug_report"
DEADLINES_S = {EVIDENCE: 5.0, BUG_REPORT: 600.0}  # defaults; a bug report takes minutes on a healthy host
HANGING_MAX = 256  # threads abandoned by earlier gatherings; beyond this no new gathering starts


class CannotGather(Exception):
    """Nothing was gathered; the message says why."""


class EvidenceGatherer:
    """Gathers evidence for one node. ``sources`` by kind: quick ones and slow ones are requested separately."""

    def __init__(
        self,
        node: str,
        agent_version: str,
        sources: dict[str, Sequence[EvidenceSource]] | None = None,
        proc: Path = Path("/proc"),
        monotonic_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._agent_version = agent_version
        self._sources = standard_sources() if sources is None else sources
        self._proc = proc
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._hanging: list[threading.Thread] = []
        self._lock = threading.Lock()

    def hanging(self) -> int:
        """Return how many threads of earlier gatherings have not returned."""
        with self._lock:
            self._hanging = [thread for thread in self._hanging if thread.is_alive()]
            return len(self._hanging)

    def gather(
        self,
        kind: str,
        processes: Iterable[TrainingProcess],
        deadline_s: float,
        job: str = "",
        attempt: int | None = None,
        bytes_max: int = BUNDLE_BYTES_MAX,
    ) -> tuple[BundleManifest, bytes]:
        """Gather ``kind`` within ``deadline_s``; return a manifest and a file of at most ``bytes_max``.

        Examines those of ``processes`` that belong to the job and the attempt; "" and None match any. Raises
        CannotGather.
        """
        hanging = self.hanging()
        if hanging >= HANGING_MAX:
            raise CannotGather(f"{hanging} threads of earlier gatherings hang; restart the agent, or the host")
        begun_s, until_s = self._now_s(), self._monotonic_s() + deadline_s
        known = list(processes)
        mine = [p for p in known if job in ("", p.job) and attempt in (None, p.attempt)]
        found, more = suspects(mine, self._proc)
        bundle = Bundle(self._node, begun_s, min(bytes_max, BUNDLE_BYTES_MAX))
        if not mine:
            others = sorted({f"{p.job} attempt {p.attempt}" for p in known})
            bundle.miss("processes", job or "any job", f"not on this node; there are: {', '.join(others) or 'none'}")
        if more:
            bundle.miss("processes", f"{more} processes", f"only {len(found)} are looked at")
        scene = Scene(found, bundle, until_s, self._proc, self._monotonic_s)
        self._run(scene, kind)
        return bundle.close(
            BundleManifest(
                node=self._node,
                job=job,
                attempt=attempt,
                kind=kind,
                agent_version=self._agent_version,
                begun_s=begun_s,
                ended_s=self._now_s(),
                deadline_s=deadline_s,
                processes=[Looked(s.label, s.pid, s.rank.rank if s.rank else None) for s in found],
                files=[],
                missing=[],
            )
        )

    def _run(self, scene: Scene, kind: str) -> None:
        threads: list[tuple[str, str, threading.Thread]] = []
        for source in self._sources[kind]:
            for task in source.tasks(scene):
                thread = threading.Thread(
                    target=_work, args=(scene, source.name, task), name=f"evidence-{source.name}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the host's limit on threads
                    scene.bundle.miss(source.name, task.what, str(error))
                else:
                    threads.append((source.name, task.what, thread))
        for name, what, thread in threads:
            thread.join(scene.left_s())
            if thread.is_alive():
                scene.bundle.miss(name, what, "not done at the deadline")
        with self._lock:
            self._hanging += [thread for _, _, thread in threads if thread.is_alive()]


def standard_sources(flight_dumps: FlightDumps | None = None) -> dict[str, Sequence[EvidenceSource]]:
    """Return all sources by kind."""
    return {
        EVIDENCE: (KernelLog(), ProcessStates(), Stacks(), flight_dumps or FlightDumps()),
        BUG_REPORT: (BugReport(),),
    }


def gather_now(
    out: Path,
    gatherer: EvidenceGatherer,
    processes: Iterable[TrainingProcess],
    job: str = "",
    kind: str = EVIDENCE,
    deadline_s: float | None = None,
) -> BundleManifest:
    """Gather at this host's console and write the bundle to ``out``, readable only by its owner.

    Raises CannotGather, OSError; FileExistsError when ``out`` exists.
    """
    if out.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
    manifest, content = gatherer.gather(kind, processes, deadline_s or DEADLINES_S[kind], job)
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return manifest


def _work(scene: Scene, source: str, task: Task) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    try:
        task.run()
    except Exception as error:  # noqa: BLE001 - one piece's failure is named, the others are gathered
        scene.bundle.miss(source, task.what, why(error))
