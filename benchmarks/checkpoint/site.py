"""Where a measurement runs: a store for each node, all on this host, and the ranks of a job as processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from eagle_eye.checkpoint.store import SOCKET, ask_status
from eagle_eye.schema.checkpoint_files import FOLDER_VARIABLE, STORE_WORDS

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
STARTED_WITHIN_S = 60.0
TICK_S = 0.01


class RankFailed(RuntimeError):
    """A rank has ended with an error; the message is the end of what it said."""


class Site:
    """Folders for one measurement: ``stores`` in shared memory, ``disk`` on a disk."""

    def __init__(self, stores: Path, disk: Path) -> None:
        self.stores = stores
        self.disk = disk

    def folder(self, node: str) -> Path:
        """Return the folder of a node's store."""
        return self.stores / node

    def start_store(self, node: str) -> None:
        """A store answers for this node. Raises TimeoutError."""
        folder = self.folder(node)
        folder.mkdir(mode=0o700)
        command = [sys.executable, "-m", "eagle_eye.cli.main", *STORE_WORDS, "--folder", str(folder), "--node", node]
        with (self.stores / f"{node}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--listen", "127.0.0.1:0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )
        self._pid_file(node).write_text(str(process.pid))
        await_that((folder / SOCKET).exists, STARTED_WITHIN_S, f"the store of {node}")

    def lose_node(self, node: str) -> None:
        """The node is gone with its memory: its store is killed, its copies are no more."""
        pid = int(self._pid_file(node).read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # a child of another process of this measurement
            os.waitpid(pid, 0)
        self._pid_file(node).unlink()
        shutil.rmtree(self.folder(node))

    def end(self) -> None:
        """No store is left, and nothing in shared memory."""
        for file in self.stores.glob("*.pid"):
            self.lose_node(file.stem)
        shutil.rmtree(self.stores)

    def jobs_of(self, node: str) -> list[dict[str, Any]]:
        """Return what the node's store says of its jobs."""
        return ask_status(self.folder(node))

    def _pid_file(self, node: str) -> Path:
        return self.stores / f"{node}.pid"


@contextlib.contextmanager
def opened(nodes: list[str]) -> Iterator[Site]:
    """A site with a store for each of the nodes, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="eagle-eye-benchmark-") as disk:
        site = Site(Path(tempfile.mkdtemp(prefix="eagle-eye-benchmark-", dir=SHARED_MEMORY)), Path(disk))
        try:
            for node in nodes:
                site.start_store(node)
            yield site
        finally:
            site.end()


def run_ranks(
    site: Site,
    module: str,
    nodes: list[str],
    plan: msgspec.Struct,
    within_s: float,
    more: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """Return what each rank of a job has found, rank by rank: the JSON that it wrote. Raises RankFailed."""
    work = Path(tempfile.mkdtemp(prefix="ranks-", dir=site.disk))
    (work / "plan.json").write_bytes(msgspec.json.encode(plan))
    port = _free_port()
    processes = []
    try:
        for rank, node in enumerate(nodes):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                FOLDER_VARIABLE: str(site.folder(node)),
                "EAGLE_EYE_NODE": node,
                **more,
            }
            with (work / f"rank{rank}.log").open("wb") as log:
                command = [sys.executable, "-m", module, str(work), str(site.stores), str(site.disk)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment))
        until_s = time.monotonic() + within_s
        while any(process.poll() is None for process in processes):
            failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
            if failed is not None or time.monotonic() > until_s:
                break
            time.sleep(TICK_S)
        for rank, process in sorted(enumerate(processes), key=lambda one: not one[1].poll()):  # who failed comes first
            if process.poll() is None or process.returncode != 0:
                reported = (work / f"rank{rank}.log").read_text(errors="replace")
                why = f"ended with {process.poll()}" if process.poll() is not None else f"not done in {within_s:g} s"
                raise RankFailed(f"{module}: rank {rank} {why}: {reported[-1500:]}")
        return [msgspec.json.decode((work / f"rank{rank}.json").read_bytes()) for rank in range(len(nodes))]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def await_that(holds: Callable[[], bool], within_s: float, what: str) -> None:
    """Wait until something holds. Raises TimeoutError."""
    until_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(TICK_S)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
