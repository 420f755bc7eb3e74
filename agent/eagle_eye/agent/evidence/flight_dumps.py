"""Flight-recorder dumps of the suspects: requested from the process if it answers, else the newest one on disk.

The bundle stores them as ``flight-recorder/<job>/rank_<rank>``, outside the node's folder: bundles of many nodes
unpacked into one folder give a folder that ``eagle-eye flight-recorder`` reads. A dump is included unchanged, or not at
all.
"""

from __future__ import annotations

import http.client
import os
import socket
import stat
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from eagle_eye.agent.evidence.bundle import PIECE_BYTES_MAX, safe_name
from eagle_eye.agent.evidence.source import Scene, Suspect, Task, environment, open_file_of, open_inside, read_open, why
from eagle_eye.agent.files.foreign import NotTheirs
from eagle_eye.agent.loop.collector import Drops
from eagle_eye.agent.nccl.flight_dump import dump_paths, request_dumps
from eagle_eye.agent.nccl.process_environment import Environments
from eagle_eye.agent.processes.process_registry import TrainingProcess

# Queries a training process through PyTorch's worker server socket; works even if its main thread hangs.
#
# A program opens it by ``torch.distributed.elastic.control_plane.worker_main`` at the path in
# TORCH_WORKER_SERVER_SOCKET.
VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
ANSWER_S_MAX = 2.0  # it answers in a tenth of a second; a stopped process never does

_CREDENTIALS = struct.Struct("=iII")


class NoWorkerServer(Exception):
    """The process was started without a worker server socket."""


def ask(scene: Scene, suspect: Suspect, handler: str, bytes_max: int) -> bytes:
    """Return the answer of the process to ``handler``. Raises NoWorkerServer, OSError, http.client.HTTPException.

    Nothing is sent if another process listens on the socket at the path.
    """
    path = environment(scene.proc, suspect.pid)[0].get(VARIABLE, "")
    if not path:
        raise NoWorkerServer(f"it was started without {VARIABLE}")
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


HANDLER = "fr_trace_json"
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
        return [Task(_name(rank), partial(self._gather, scene, suspect, rank)) for suspect, rank in ranks]

    def _gather(self, scene: Scene, suspect: Suspect, rank: TrainingProcess) -> None:
        try:
            content = ask(scene, suspect, HANDLER, PIECE_BYTES_MAX)
        except NoWorkerServer as error:
            said = str(error)
        except (OSError, http.client.HTTPException) as error:
            said = f"its worker server does not answer: {why(error)}"
        else:
            scene.bundle.add(self.name, f"{_name(rank)}.json", content)
            return
        environments = Environments(scene.proc)  # a separate instance: reading a stuck process's may never return
        wait_s = max(0.0, scene.left_s() - RESERVE_S)
        asked = request_dumps([rank], wait_s, environments, self._prefixes, self._pipe_prefixes, drops=self._drops)
        said = f"{asked.silent.get(rank, '')}; {said}"
        written_s, path = _newest(scene, suspect, _seen_by(rank, environments, self._prefixes))
        if not path:
            scene.bundle.miss(self.name, _name(rank), f"no dump on disk; {said}")
        elif written_s < suspect.started_s(scene.proc):
            scene.bundle.miss(self.name, _name(rank), f"the dump on disk is older than the process; {said}")
        else:
            self._take(scene, suspect, rank, path)

    def _take(self, scene: Scene, suspect: Suspect, rank: TrainingProcess, path: str) -> None:
        descriptor = open_file_of(scene.proc, suspect.pid, path)
        try:
            content, more = read_open(descriptor, PIECE_BYTES_MAX)
        finally:
            os.close(descriptor)
        if more:
            scene.bundle.miss(self.name, _name(rank), f"the dump has more than {PIECE_BYTES_MAX} bytes")
        elif not content:
            scene.bundle.miss(self.name, _name(rank), "the dump is empty")
        else:
            scene.bundle.add(self.name, _name(rank), content)


def _name(rank: TrainingProcess) -> str:
    return f"flight-recorder/{safe_name(rank.job)}/rank_{rank.rank}"


def _seen_by(rank: TrainingProcess, environments: Environments, prefixes: Sequence[str]) -> list[str]:
    """Return the rank's possible dump paths, as the process itself sees them."""
    environment = environments.of([rank]).get(rank)
    root = environment.root if environment is not None else Path("/")
    paths = dump_paths(rank, environment, prefixes)
    return [f"/{path.relative_to(root)}" for path in paths if path.is_relative_to(root)]


def _newest(scene: Scene, suspect: Suspect, paths: Sequence[str]) -> tuple[float, str]:
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
