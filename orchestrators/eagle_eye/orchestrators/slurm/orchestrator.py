"""Slurm as an Orchestrator: drains nodes, requeues jobs elsewhere, and undrains only its own. With its options."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from eagle_eye.orchestrators.command_line import seconds, token
from eagle_eye.orchestrators.fallback_layouts import add_layouts, misfit, pace_left_ratio, read_layouts
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Exclusion, JobState, OrchestratorError, Restart
from eagle_eye.orchestrators.server_client import ServerClient
from eagle_eye.orchestrators.slurm.answers import JobNames, SlurmError, SlurmJob, SlurmNode
from eagle_eye.orchestrators.slurm.cluster import Cluster, Commands, environment
from eagle_eye.orchestrators.slurm.decisions import (
    HOLDS_NODES,
    drain_of,
    foreign,
    hold_for_room,
    phase_of,
    reason_of,
    refusal_for_room,
    restarts_of,
    title_of,
    way_of,
)
from eagle_eye.orchestrators.slurm.restarting import (
    BegunRestart,
    Restarting,
    RestartTimeouts,
    Resubmission,
    SlurmMemory,
    Time,
)
from eagle_eye.planning.plan import Plan

NAMED_MAX = 8  # jobs in a sentence


@dataclass(frozen=True)
class SlurmOrchestrator:
    """All jobs of one cluster. ``owner`` signs our drains, ``plans`` are the jobs' plans by name."""

    cluster: Cluster
    names: JobNames
    memory: SlurmMemory
    restarting: Restarting
    owner: str
    plans: Mapping[str, Plan] = field(default_factory=dict)
    name: str = "Slurm"
    resumes: bool = True

    def state(self, job: str) -> JobState | None:
        """Return the job's current state in Slurm; None for one that it does not know (any more)."""
        if not job:
            return JobState(0, frozenset(node.name for node in self.cluster.quick().nodes()), running=False)
        cluster, job_id = self.cluster.quick(), self.names.id_of(job)
        found = () if job_id is None else cluster.jobs(job_id)
        if not found:
            return None
        nodes = frozenset(cluster.names_of(found))
        return JobState(restarts_of(found), nodes, phase_of(found) in HOLDS_NODES)

    def stop(self, job: str, reason: str) -> str:  # noqa: ARG002 - the protocol's name
        """Stop the job and hold it in the queue; cancel it where it may not be requeued."""
        found = self._found(job)
        if phase_of(found) not in (*HOLDS_NODES, "pending", "suspended"):
            return f"{title_of(found)} runs no more"
        if all(one.requeues and one.batch for one in found):
            self.cluster.requeue_held(found[0], incomplete=True)
            return f"{title_of(found)} requeued and held"
        self.cluster.cancel(found[0])
        return f"{title_of(found)} cancelled: it may not be requeued"

    def exclude(self, request: Exclusion) -> str:
        """Drain the nodes: running jobs continue to their end, nothing new starts there."""
        found: Sequence[SlurmJob] = self._found(request.job) if request.job else ()
        nodes = self._nodes(request.nodes)
        said: list[str] = []
        foretold = ""
        if request.now and self._is_ahead(found, request):
            found = self.restarting.settled(found)
            foretold = self._check_restart(found, request)
        for node in nodes:
            try:
                said.append(self._drain(node, request))
            except SlurmError as error:
                before = f" ({'; '.join(said)} before)" if said else ""
                raise CannotCarryOutError(f"{error}{before}") from None
        if found and not request.now and phase_of(found) == "pending":
            self.restarting.avoid(found, request.nodes)
        return "; ".join(filter(None, [*said, foretold, self._bystanders(found, request.nodes)]))

    def restart(self, job: str, request: Restart) -> str:
        """Restart the job without the nodes; it runs, or waits in the queue."""
        found = self._found(job)
        said = self.restarting.restart(found, request, self._plan(job, found)[0])
        if request.distrust_since_s is None:
            return said
        since = datetime.fromtimestamp(request.distrust_since_s, tz=timezone.utc).isoformat(timespec="seconds")
        choice = "" if request.resume_from else ", and which is resumed from is its script's choice"
        return f"{said}; checkpoints written since {since} are suspect{choice}"

    def readmit(self, nodes: Sequence[str]) -> str:
        """Undrain the nodes whose drain is ours and unchanged; jobs that we hold continue where they can.

        Another owner's drain stays, and the text says so: it would also be theirs the next time.
        """
        said = []
        for node in self.cluster.nodes(nodes) if nodes else ():
            if not node.drained:
                said.append(f"{node.name} is not drained")
            elif why := foreign(node, self.owner):
                said.append(f"{why}: left as it is")
            else:
                self.cluster.undrain(node)
                said.append(f"{node.name} is {'undrained, and down' if node.down else 'in service'}")
        for action_id, begun in self.memory.all().items():
            said += self._allow(action_id, begun, nodes)
        return "; ".join(dict.fromkeys(said)) or "none of these nodes is Slurm's"

    def pace_left(self) -> dict[str, float | None]:
        """Return running jobs' remaining pace ratio without one of their nodes, by plan; None where a spare is free."""
        reported: dict[str, float | None] = {}
        for job in self.plans:
            job_id = self.names.id_of(job)
            found = () if job_id is None else self.cluster.jobs(job_id)
            plan = self._plan(job, found)[0] if found and phase_of(found) in HOLDS_NODES else None
            if plan is not None:
                nodes = sum(one.nodes_wanted for one in found)
                spare = self.restarting.room(found, (), plan).free > nodes
                reported[job] = None if spare else pace_left_ratio(plan, nodes)
        return reported

    def preview(self, request: Exclusion | Restart) -> str:
        """Return what would be done. Raises CannotCarryOutError where it would be refused."""
        if isinstance(request, Exclusion):
            found = self._found(request.job) if request.job else ()
            foretold = ""
            if request.now and self._is_ahead(found, request):
                foretold = self._check_restart(found, request)
            drains = ", ".join(self._would_drain(node, request) for node in self._nodes(request.nodes))
            return f"{drains}{f' ({foretold})' if foretold else ''}"
        avoid = f" with {', '.join(request.without)} in its ExcNodeList" if request.without else ""
        if request.resume_from:
            avoid += f"{' and' if avoid else ' with'} where to resume from ({request.resume_from}) in its comment"
        if not request.job:
            return f"requeue the job{avoid}"
        found = self._found(request.job)
        way = way_of(found, request.without, self.cluster.required_by(found))
        if way == "requeue":
            return f"requeue {title_of(found)} (scontrol requeuehold Incomplete {found[0].name}, release){avoid}"
        return f"cancel {title_of(found)} and submit its script again{avoid}"

    def _found(self, job: str) -> tuple[SlurmJob, ...]:
        job_id = self.names.id_of(job)
        found = () if job_id is None else self.cluster.jobs(job_id)
        if not found:
            raise CannotCarryOutError(f"Slurm does not know job {job} (any more)")
        return found

    def _nodes(self, names: Sequence[str]) -> tuple[SlurmNode, ...]:
        found = self.cluster.nodes(names)
        if missing := sorted(set(names) - {node.name for node in found}):
            raise CannotCarryOutError(f"Slurm has no node {', '.join(missing)}")
        return found

    def _is_ahead(self, found: Sequence[SlurmJob], request: Exclusion) -> bool:
        """Whether the restart that follows the exclusion has not begun yet."""
        begun = self.memory.of(request.cause.action_id)
        return begun is None and restarts_of(found) <= request.attempt

    def _check_restart(self, found: Sequence[SlurmJob], request: Exclusion) -> str:
        """Return, before any change, what the following restart costs without a spare, "" with one.

        Raises CannotCarryOutError where that restart would be refused.
        """
        way_of(found, request.nodes, self.cluster.required_by(found))
        plan, why_not = self._plan(request.job, found)
        room = self.restarting.room(found, request.nodes, plan)
        if why := refusal_for_room(request.cause.fault, room, self.restarting.limits.when_full):
            raise CannotCarryOutError(
                f"{title_of(found)} is left alone: {why}{f' ({why_not})' if why_not else ''}; nothing was done"
            )
        return room.loss or (why_not if room.free < room.wanted else "")

    def _plan(self, job: str, found: Sequence[SlurmJob]) -> tuple[Plan | None, str]:
        """Return the plan that the job follows; or None, and why one for its name does not fit ("": there is none)."""
        plan = self.plans.get(job)
        if plan is None:
            return None, ""
        if len(found) > 1:
            return None, "its plan is for a job of one component"
        why_not = misfit(plan, self.restarting.wanted(found), self.cluster.gpus_per_node(found[0]))
        return (None, why_not) if why_not else (plan, "")

    def _drain(self, node: SlurmNode, request: Exclusion) -> str:
        if not node.drained:
            self.cluster.drain(node.name, reason_of(request.cause, self.owner))
            return f"{node.name} drained"
        drain = drain_of(node.reason)
        if drain is None:
            return f"{node.name} was drained already, not by us, and is left as it is: {node.reason or 'no reason'}"
        return f"{node.name} was drained already for incident {drain.incident_id}"

    def _would_drain(self, node: SlurmNode, request: Exclusion) -> str:
        if node.drained:
            return f"leave {node.name} drained as it is ({node.reason or 'no reason'})"
        reason = reason_of(request.cause, self.owner)
        return f'drain {node.name} (scontrol update NodeName={node.name} State=DRAIN Reason="{reason}")'

    def _bystanders(self, found: Sequence[SlurmJob], nodes: Sequence[str]) -> str:
        own = {job.id for job in found}
        others = [job for job in self.cluster.running_on(nodes) if job.id not in own]
        if not others:
            return ""
        named = ", ".join(f"{job.name} of {job.user}" for job in others[:NAMED_MAX])
        more = f" and {len(others) - NAMED_MAX} more" if len(others) > NAMED_MAX else ""
        return f"other jobs there go on to their end: {named}{more}"

    def _allow(self, action_id: str, begun: BegunRestart, nodes: Sequence[str]) -> list[str]:
        """Allow these nodes again for a waiting job restarted without them; release jobs that we hold."""
        back = [name for name in begun.without if name in nodes]
        found = self.cluster.jobs(begun.became or begun.slurm_id) if back or begun.held else ()
        fewer = sum(job.nodes_wanted for job in found)
        if found and back and fewer < begun.wanted and phase_of(found) in HOLDS_NODES:
            runs = f"{title_of(found)} runs on {fewer} of {begun.wanted} nodes"
            return [f"{runs}, and by plan on more after its next restart"]
        if begun.became or not found or phase_of(found) != "pending" or restarts_of(found) != begun.restarts + 1:
            return []
        self.restarting.avoid(found, (), allow=back)
        if not begun.held or not any(job.held for job in found):
            return []
        still_out = [name for name in begun.without if name not in nodes]
        room = self.restarting.room(found, still_out, self._plan(begun.job, found)[0])
        if hold_for_room(room, self.restarting.limits.when_full):
            return []
        self.restarting.lay_out(found, room)
        self.cluster.release(found[0])
        self.memory.keep(action_id, msgspec.structs.replace(begun, without=still_out, held=False))
        return [f"{title_of(found)} is released{f'; {room.loss}' if room.loss else ''}"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add = parser.add_argument
    add("--owner", default="eagle-eye", metavar="NAME",
        help="who our drains are signed by; only those of this name are lifted (eagle-eye)")  # fmt: skip
    add("--slurm-bin", default="", metavar="DIR", help="where Slurm's commands are (found on the PATH)")
    add("--slurm-conf", default="", metavar="FILE", help="the cluster's slurm.conf (Slurm's own default)")
    add("--jwt-file", type=Path, metavar="F",
        help="token by which the commands prove themselves to Slurm, as scontrol token prints it (munge)")  # fmt: skip
    add("--command-timeout", type=seconds, default=20.0, metavar="S", help="how long one command may take (20)")
    add("--node-prefix", default="", metavar="COMMAND",
        help="before scontrol where nodes are drained and resumed, as in 'sudo -n -u slurm'")  # fmt: skip
    add("--submit-prefix", default="", metavar="COMMAND",
        help="before sbatch where another user's job that may not be requeued is submitted again, as in "
        "'sudo -n -u {user}'")  # fmt: skip
    add("--stop-within", type=seconds, default=180.0, metavar="S", help="how long a job may take to end (180)")
    add("--run-within", type=seconds, default=600.0, metavar="S", help="how long a requeued job is waited for (600)")
    add("--when-full", choices=("queue", "hold", "refuse"), default="queue",
        help="what becomes of a job whose place nothing free can take now: it waits in the queue, is held, or is left "
        "alone (queue)")  # fmt: skip
    add_layouts(parser)


def build(options: argparse.Namespace) -> SlurmOrchestrator:
    """Return the orchestrator. Raises OrchestratorError naming the option."""
    if re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", options.owner) is None:
        raise OrchestratorError(f"--owner {options.owner!r}: expected letters, digits and '._@-'")
    environ = environment(os.environ, options.slurm_conf)
    commands = Commands(options.slurm_bin, options.command_timeout, environ, options.jwt_file)
    cluster = Cluster(commands, _words("--node-prefix", options.node_prefix))
    clock = Time()
    memory = SlurmMemory(options.state_dir / "slurm.json", clock.now)
    resubmission = Resubmission(cluster, _words("--submit-prefix", options.submit_prefix))
    limits = RestartTimeouts(options.stop_within, options.run_within, options.when_full)
    names = JobNames(ServerClient(options.server, token(options.token_file)), time.monotonic)
    restarting = Restarting(cluster, memory, resubmission, limits, clock)
    return SlurmOrchestrator(cluster, names, memory, restarting, options.owner, read_layouts(options.layouts))


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise OrchestratorError(f"{option} {text!r}: {error}") from None
