"""What the tests of the Slurm orchestrator share: causes and requests, and the parts put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle_eye.orchestrators.protocol import Cause, Exclusion, RejectedError, Restart
from eagle_eye.orchestrators.slurm.answers import JobNames
from eagle_eye.orchestrators.slurm.cluster import Cluster
from eagle_eye.orchestrators.slurm.orchestrator import SlurmOrchestrator
from eagle_eye.orchestrators.slurm.restarting import Restarting, RestartTimeouts, Resubmission, SlurmMemory, Time
from eagle_eye.planning.plan import Plan


class Server:
    """A server that knows which of Slurm's jobs these are."""

    def __init__(self, **scheduled_as: str) -> None:
        self.scheduled_as = scheduled_as

    def call(self, method: str, path: str, body: object = None, timeout_s: float = 2.0) -> object:
        name = path.rpartition("/")[2]
        if name not in self.scheduled_as:
            raise RejectedError("no such job", 404)
        return {"job": name, "scheduled_as": self.scheduled_as[name]}


def cause(action_id: str = "act-1", fault: str = "gpu_lost", tell: Callable[[str], None] = lambda _: None) -> Cause:
    return Cause("inc-1", action_id, fault, "XID 79 on gpu 3", "replace", tell=tell)


def exclusion(job: str, *nodes: str, attempt: int = 0, now: bool = True, **of_cause: Any) -> Exclusion:
    return Exclusion(job, attempt, nodes, now, cause(**of_cause))


def restart(*without: str, over: int = 0, **of_cause: Any) -> Restart:
    return Restart(over, None, cause(**of_cause), without)


def orchestrator(
    cluster: Cluster,
    folder: Path,
    limits: RestartTimeouts | None = None,
    clock: Time | None = None,
    server: Server | None = None,
    owner: str = "eagle-eye",
    plans: Mapping[str, Plan] | None = None,
) -> SlurmOrchestrator:
    clock = clock or Time()
    memory = SlurmMemory(folder / "slurm.json", clock.now)
    restarting = Restarting(cluster, memory, Resubmission(cluster), limits or RestartTimeouts(), clock)
    names = JobNames(server or Server(), clock.monotonic)
    return SlurmOrchestrator(cluster, names, memory, restarting, owner, plans or {})
