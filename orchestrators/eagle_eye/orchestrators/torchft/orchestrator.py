"""A torchft job as an Orchestrator: ends a replica group through the lighthouse while the others train on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.protocol import Cause, Exclusion, JobState, Restart
from eagle_eye.orchestrators.torchft.lighthouse import Lighthouse, LighthouseStatus, Replica
from eagle_eye.orchestrators.torchft.persisted_state import TorchftMemory
from eagle_eye.schema.action import JobUpdate

POLL_S = 0.2
# The lighthouse's default: a replica without a heartbeat for this long is dead.
HEARTBEAT_S = 5.0


@dataclass(frozen=True)
class TorchftJob:
    """One job: one lighthouse. ``groups`` gives the nodes of a replica group by its name.

    An unlisted group runs on its manager's host. ``replicas_min`` groups must remain when one is ended. Waits are in
    seconds: for a replica to be gone, and for the others to continue.
    """

    name: str
    groups: Mapping[str, tuple[str, ...]]
    replicas_min: int = 1
    gone_within_s: float = 20.0
    on_within_s: float = 60.0
    reported: bool = False


class TorchftOrchestrator:
    """The job as a whole has no attempts: it never ends. A late action is recognized by the replica.

    A replica that joined after the fault was found is a new one, and is left alone.
    """

    name = "eagle-eye orchestrate torchft"
    resumes = True

    def __init__(
        self,
        job: TorchftJob,
        lighthouse: Lighthouse,
        memory: TorchftMemory,
        clock: Callable[[], float] = time.time,
        poll_s: float = POLL_S,
    ) -> None:
        self._job = job
        self._lighthouse = lighthouse
        self._memory = memory
        self._clock = clock
        self._poll_s = poll_s
        self._nodes: dict[str, None] = {node: None for nodes in job.groups.values() for node in nodes}
        self._joined_s: dict[str, float] | None = None  # when each replica was first seen; None: not queried yet
        self._lock = threading.Lock()

    def state(self, job: str) -> JobState | None:
        """Return the current and past nodes of the replica groups, and whether any group trains."""
        if job != self._job.name:
            return None
        status = self._look()
        nodes = frozenset(self._nodes) | frozenset(self._memory.excluded)
        return JobState(0, nodes, running=bool(_alive(status)))

    def stop(self, job: str, reason: str) -> str:  # noqa: ARG002 - the protocol's names
        """Refuse: the replica groups would be started again."""
        raise CannotCarryOutError("torchft's replica groups are started by somebody else: end the job there")

    def exclude(self, request: Exclusion) -> str:
        """Write the nodes to the exclude file; with ``now`` also end the replica groups on them."""
        named = ", ".join(request.nodes)
        if not request.now:
            self._memory.exclude(request.nodes, request.cause.action_id)
            return f"{named} in the exclude file, for the next start of a replica group"
        doomed = self._memory.doomed(request.cause.action_id)
        if doomed is None:
            doomed = self._condemned(request, self._look())
            self._memory.doom(request.cause.action_id, doomed)
        self._memory.exclude(request.nodes, request.cause.action_id)
        if not doomed:
            return f"{named} in the exclude file; no replica group is on it now"
        self._end(doomed, request.cause)
        return f"{named} in the exclude file; killed {', '.join(doomed)}"

    def restart(self, job: str, request: Restart) -> str:  # noqa: ARG002 - the protocol's name
        """Return once the remaining groups train on. If no node was to blame and none trained, restart all of them.

        A group that exited by itself is no reason to end the others: it is restarted, with their state.
        """
        if request.distrust_since_s is not None:
            good = f" (EAGLE_EYE_RESUME_FROM={request.resume_from})" if request.resume_from else ""
            raise CannotCarryOutError(
                "torchft heals from its peers' memory, not from a checkpoint: restart the job from the last good one"
                f"{good}"
            )
        if request.without:
            return self._goes_on(self._memory.doomed(request.cause.action_id) or [])
        doomed = self._memory.doomed(request.cause.action_id)
        if doomed is None:
            if going := self._step_of([]):
                return f"{going}; no group was killed"
            doomed = [replica.id for replica in _alive(self._look())]
            self._memory.doom(request.cause.action_id, doomed)
        self._end(doomed, request.cause)
        return self._goes_on(doomed)

    def readmit(self, nodes: Sequence[str]) -> str:
        """Remove the nodes that were excluded from here from the exclude file."""
        were = self._memory.readmit(nodes)
        return f"{', '.join(were)} may be used again" if were else f"{', '.join(nodes)}: not excluded from here"

    def preview(self, request: Exclusion | Restart) -> str:
        """Return which replicas would be killed."""
        status = self._look()
        if isinstance(request, Restart):
            if request.without:
                return "see the other replica groups train on"
            named = _named([replica.id for replica in _alive(status)])
            return f"see replica groups train on, and kill {named} where none takes a step"
        written = f"write {', '.join(request.nodes)} into the exclude file"
        return f"{written} and kill {_named(self._condemned(request, status))}" if request.now else written

    def jobs(self) -> Mapping[str, JobUpdate]:
        """Return the job if it is reported to the server; always checks for new replicas."""
        status = self._look()
        return {self._job.name: JobUpdate(0, "running")} if self._job.reported and _alive(status) else {}

    def close(self) -> None:
        """Close the connections."""
        self._lighthouse.close()

    def _look(self) -> LighthouseStatus:
        status = self._lighthouse.status()
        now_s = self._clock()
        with self._lock:
            first = self._joined_s is None
            known = self._joined_s or {}
            # Replicas seen in the first query may have existed for any time.
            self._joined_s = {
                replica.id: known.get(replica.id, float("-inf") if first else now_s) for replica in status.replicas
            }
            for replica in status.replicas:
                self._nodes.update(dict.fromkeys(self._nodes_of(replica)))
        return status

    def _nodes_of(self, replica: Replica) -> tuple[str, ...]:
        return self._job.groups.get(replica.group) or ((replica.host,) if replica.host else ())

    def _condemned(self, request: Exclusion, status: LighthouseStatus) -> list[str]:
        """Return the replicas on the nodes. Raises CannotCarryOutError where they must not be ended."""
        alive = _alive(status)
        found = [replica for replica in alive if set(self._nodes_of(replica)) & set(request.nodes)]
        left = len(alive) - len(found)
        if found and left < self._job.replicas_min:
            raise CannotCarryOutError(
                f"{left} of {len(alive)} replica groups would be left; --replicas-min is {self._job.replicas_min}"
            )
        joined_s = self._joined_s or {}
        detected_s = request.cause.detected_s
        for replica in found:
            # Queried only every few seconds, by another clock: it may have joined a little earlier.
            if detected_s is not None and joined_s.get(replica.id, 0.0) - 2 * HEARTBEAT_S > detected_s:
                raise CannotCarryOutError(f"{replica.id} joined after the fault was found: somebody else replaced it")
        return [replica.id for replica in found]

    def _end(self, doomed: Sequence[str], cause: Cause) -> None:
        """End the replicas. Raises CannotCarryOutError where one stays."""
        for replica_id in doomed:
            if self._stays(replica_id):
                self._lighthouse.kill(replica_id)
                cause.tell(f"{replica_id} was told to end")
        until_s = time.monotonic() + self._job.gone_within_s
        while staying := [replica_id for replica_id in doomed if self._stays(replica_id)]:
            if time.monotonic() > until_s:
                raise CannotCarryOutError(
                    f"{', '.join(staying)} still takes part {self._job.gone_within_s:g} s after it was killed"
                )
            time.sleep(self._poll_s)

    def _stays(self, replica_id: str) -> bool:
        status = self._look()
        return replica_id in {replica.id for replica in _alive(status)}

    def _goes_on(self, doomed: Sequence[str]) -> str:
        """Wait until the other replicas take a step; return them."""
        if going := self._step_of(doomed):
            return going
        status = self._look()
        raise CannotCarryOutError(
            f"killed {', '.join(doomed) or 'nothing'}; no replica group has taken a step for "
            f"{self._job.on_within_s:g} s (step {status.step}, quorum {status.quorum_id})"
        )

    def _step_of(self, doomed: Sequence[str]) -> str:
        """Return the other replicas that have taken a step, "" where none does in ``on_within_s``.

        If some are ended, a new quorum without them is enough: groups that all restart begin at a lower step.
        """
        began = self._look()
        until_s = time.monotonic() + self._job.on_within_s
        while True:
            status = self._look()
            others = [replica for replica in _alive(status) if replica.id not in doomed]
            moved = status.step > began.step or (bool(doomed) and status.quorum_id > began.quorum_id)
            if others and moved and not {replica.id for replica in status.replicas} & set(doomed):
                back = {group for group in map(_group, doomed) if group in {replica.group for replica in others}}
                more = f"; {', '.join(sorted(back))} started again" if back else ""
                return f"{len(others)} replica groups train on, step {status.step}{more}"
            if time.monotonic() > until_s:
                return ""
            time.sleep(self._poll_s)


def _group(replica_id: str) -> str:
    return Replica(replica_id, 0, "").group


def _alive(status: LighthouseStatus) -> list[Replica]:
    """Return the replicas of the latest quorum that still send heartbeats."""
    return [r for r in status.replicas if status.heartbeats.get(r.id, float("inf")) < HEARTBEAT_S]


def _named(replicas: Sequence[str]) -> str:
    return ", ".join(replicas) or "no replica group"
