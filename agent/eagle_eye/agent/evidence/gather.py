"""Runs all evidence sources at once, one thread per piece, until a common deadline; what is unfinished is listed.

A system call may never return: a thread that hangs in one is abandoned, and counted.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from eagle_eye.agent.evidence.bug_report import BugReport
from eagle_eye.agent.evidence.bundle import BUNDLE_BYTES_MAX, Bundle, BundleManifest, Looked
from eagle_eye.agent.evidence.flight_dumps import FlightDumps
from eagle_eye.agent.evidence.kernel_log import KernelLog
from eagle_eye.agent.evidence.proc_files import why
from eagle_eye.agent.evidence.process_states import ProcessStates
from eagle_eye.agent.evidence.source import EvidenceSource, Scene, Task
from eagle_eye.agent.evidence.stacks import Stacks
from eagle_eye.agent.evidence.suspects import suspects
from eagle_eye.agent.external_tool import NICENESS
from eagle_eye.agent.processes.process_registry import TrainingProcess

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
