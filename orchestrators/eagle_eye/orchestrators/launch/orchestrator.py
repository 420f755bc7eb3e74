"""The launcher as an Orchestrator: what Eagle Eye asks becomes something that happens to the coordinator."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_eye.orchestrators.launch import happenings as on
from eagle_eye.orchestrators.launch.coordinator import Coordinator
from eagle_eye.orchestrators.protocol import Exclusion, JobState, Restart

STOPPED_EXIT_CODE = 1
# With a node of which this is so the job stands still, or computes what is wrong.
HALTING = frozenset({
    *("gpu_lost", "gpu_hang", "gpu_memory_error", "hang", "network_hang", "node_unreachable"),
    *("process_crash", "silent_data_corruption"),
})  # fmt: skip


class LaunchOrchestrator:
    """One job, run by one coordinator."""

    name = "eagle-eye launch"
    # What a killed launcher was asked for is in its memory: asked again, it is found done, or gone on with.
    resumes = True

    def __init__(self, coordinator: Coordinator, job: str) -> None:
        self._coordinator = coordinator
        self._job = job

    def state(self, job: str) -> JobState | None:
        """Return what is known about the job; None for another one."""
        return self._coordinator.job_state() if job == self._job else None

    def stop(self, job: str, reason: str) -> str:  # noqa: ARG002 - the protocol's name
        """The launcher is ending the job, and itself."""
        self._coordinator.post(on.Cancelled(reason, STOPPED_EXIT_CODE))
        return "stopping"

    def exclude(self, request: Exclusion) -> str:
        """The nodes are not used from the next start on; kept in the state folder."""
        reason, over, since_s = request.cause.reason, request.attempt, request.distrust_since_s
        waits = request.cause.fault in HALTING
        return self._coordinator.ask(
            lambda number: on.ExcludeAsked(number, request.nodes, request.now, reason, over, since_s, waits)
        )

    def restart(self, job: str, request: Restart) -> str:  # noqa: ARG002 - the protocol's name
        """The next attempt's ranks were spawned."""
        over, since_s, reason = request.over_attempt, request.distrust_since_s, request.cause.reason
        return self._coordinator.ask(
            lambda number: on.RestartAsked(
                number, over, since_s, reason, blames_nobody=not request.without, scope=request.scope
            )
        )

    def checkpoint(self, job: str) -> str:  # noqa: ARG002 - the protocol's name
        """A step that was captured after this was asked for is whole in the nodes' memory."""
        return self._coordinator.wait_for_checkpoint()

    def readmit(self, nodes: Sequence[str]) -> str:
        """The nodes are spares again."""
        names = tuple(nodes)
        return self._coordinator.ask(lambda request: on.ReadmitAsked(request, names))
