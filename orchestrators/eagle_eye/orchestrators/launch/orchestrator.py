"""The launcher as an Orchestrator: turns Eagle Eye's requests into events for the coordinator."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch.coordinator import Coordinator
from eagle_eye.orchestrators.protocol import Exclusion, JobState, Restart

STOPPED_EXIT_CODE = 1
# Faults of a node with which the job stands still, or computes wrong results.
HALTING = frozenset({
    *("gpu_lost", "gpu_hang", "gpu_memory_error", "hang", "network_hang", "node_unreachable"),
    *("process_crash", "silent_data_corruption"),
})  # fmt: skip


class LaunchOrchestrator:
    """One job, run by one coordinator."""

    name = "eagle-eye launch"
    # Requests to a killed launcher are in its saved state: repeated, they are found done, or continued.
    resumes = True

    def __init__(self, coordinator: Coordinator, job: str) -> None:
        self._coordinator = coordinator
        self._job = job

    def state(self, job: str) -> JobState | None:
        """Return the job's state; None for another job."""
        return self._coordinator.job_state() if job == self._job else None

    def stop(self, job: str, reason: str) -> str:  # noqa: ARG002 - the protocol's name
        """End the job and the launcher."""
        self._coordinator.post(on.Cancelled(reason, STOPPED_EXIT_CODE))
        return "stopping"

    def exclude(self, request: Exclusion) -> str:
        """Exclude the nodes from the next start on; saved in the state folder."""
        reason, over, since_s = request.cause.reason, request.attempt, request.distrust_since_s
        waits = request.cause.fault in HALTING
        return self._coordinator.ask(
            lambda number: on.ExcludeAsked(number, request.nodes, request.now, reason, over, since_s, waits)
        )

    def restart(self, job: str, request: Restart) -> str:  # noqa: ARG002 - the protocol's name
        """Restart; returns once the next attempt's ranks are spawned."""
        over, since_s, reason = request.over_attempt, request.distrust_since_s, request.cause.reason
        return self._coordinator.ask(
            lambda number: on.RestartAsked(
                number, over, since_s, reason, blames_nobody=not request.without, scope=request.scope
            )
        )

    def checkpoint(self, job: str) -> str:  # noqa: ARG002 - the protocol's name
        """Return once a step captured after this request is complete in the nodes' memory."""
        return self._coordinator.wait_for_checkpoint()

    def readmit(self, nodes: Sequence[str]) -> str:
        """Make the nodes spares again."""
        names = tuple(nodes)
        return self._coordinator.ask(lambda request: on.ReadmitAsked(request, names))
