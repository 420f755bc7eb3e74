"""Kubernetes as an Orchestrator: cordons and marks nodes, evicts pods; their controllers do the rest.

It keeps no state: its changes are recorded in the cluster, so that another process can continue after one is killed in
the middle of an action. Touches the network, by Api and HealthEvents, and the clock.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx

from eagle_eye.orchestrators.fallback_layouts import misfit, no_spare, nodes_by_plan
from eagle_eye.orchestrators.kubernetes import api, objects
from eagle_eye.orchestrators.kubernetes.api import Api, Conflict, Ref, Workload
from eagle_eye.orchestrators.kubernetes.objects import (
    ATTEMPT_LABELS,
    JOB_LABELS,
    ClusterNode,
    Pod,
    attempt_of,
    began_s,
    found_by,
    members,
    pods_of,
    selectors,
)
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause, Exclusion, JobState, Restart
from eagle_eye.planning.plan import Plan, variable

# Sends node health to a site's own system, as CloudEvents in NVSentinel's format. Touches the network.
#
# NVSentinel exports its health events as structured CloudEvents over HTTP, the event itself under ``healthEvent``. Ours
# have the same shape with our own type, so that a site's sink accepts both.

log = logging.getLogger(__name__)

HEALTH_EVENT = "eagle_eye.node.health"
SINK_TIMEOUT_S = 5.0
SINK_RETRY_AFTER_S = (0.5, 2.0)

# What would repair the node (schema/action.py), in NVSentinel's terms.
RECOMMENDED = {
    "reset_gpu": "COMPONENT_RESET",
    "reboot": "RESTART_BM",
    "replace": "REPLACE_VM",
    "inspect": "CONTACT_SUPPORT",
    "none": "NONE",
}


def health_event(
    node: str, health: Literal["excluded", "readmitted"], cause: Cause | None, cluster: str, now: str
) -> dict[str, Any]:
    """Return the event. ``cause`` is None for a readmission, whose check is "eagle_eye"; ``now`` is RFC 3339.

    It requests no action: the node is cordoned already (``processingStrategy`` STORE_ONLY).
    """
    fault = cause.fault if cause is not None else "eagle_eye"
    bad = health == "excluded"
    repair = RECOMMENDED.get(cause.repair, "UNKNOWN") if cause is not None else "NONE"
    return {
        "specversion": "1.0",
        "id": f"{cause.action_id if cause is not None else now}/{node}/{health}",
        "type": HEALTH_EVENT,
        "source": f"/eagle-eye/{cluster}/nodes",
        "subject": node,
        "time": now,
        "datacontenttype": "application/json",
        "data": {
            "metadata": {"cluster": cluster},
            "healthEvent": {
                "version": 1,
                "agent": "eagle-eye",
                "componentClass": "GPU" if fault.startswith("gpu_") else "Node",
                "checkName": fault,
                "isFatal": bad,
                "isHealthy": not bad,
                "message": cause.reason if cause is not None else "readmitted",
                "recommendedAction": repair,
                "errorCode": [fault] if bad else [],
                "entitiesImpacted": [{"entityType": "Node", "entityValue": node}],
                "metadata": {"incident_id": cause.incident_id, "action_id": cause.action_id} if cause else {},
                "generatedTimestamp": now,
                "nodeName": node,
                "processingStrategy": "STORE_ONLY",
            },
        },
    }


class HealthEvents:
    """The sink for the events; three tries each. ``token_file`` holds a bearer token, read per event; None: none."""

    def __init__(
        self, url: str, cluster: str, token_file: Path | None = None, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self.cluster = cluster
        self._url = url
        self._token_file = token_file
        self._pause = pause
        self._http = httpx.Client(timeout=SINK_TIMEOUT_S, trust_env=False, follow_redirects=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, content: dict[str, Any]) -> str:
        """Send the event; returns "" or why it failed. A node's exclusion does not wait for it."""
        why = ""
        for pause_s in (*SINK_RETRY_AFTER_S, None):
            why, again = self._send(content)
            if not why or not again or pause_s is None:
                break
            self._pause(pause_s)
        if why:
            log.warning("health event %s was not delivered: %s", content["id"], why)
        return why

    def _send(self, content: dict[str, Any]) -> tuple[str, bool]:
        headers = {"content-type": "application/cloudevents+json"}
        if self._token_file is not None:
            try:
                headers["authorization"] = f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                return f"--health-events-token-file: {type(error).__name__}", False
        try:
            answer = self._http.post(self._url, json=content, headers=headers)
        except httpx.HTTPError as error:
            return type(error).__name__, True
        if answer.is_success:
            return "", False
        return f"HTTP {answer.status_code}", answer.status_code >= 500 or answer.status_code in (408, 429)


# Selects the pods to evict for a restart, and tracks the restart's progress.
#
# A restart evicts every pod of the job: ranks that wait for a lost one do not recover by themselves. Pods that started
# after the fault was reported stay: they already belong to the next attempt. So a restart that is requested twice, or
# was left half-done by a killed process, happens once. No pod of the job stays on an excluded node.
# Kubernetes' times are whole seconds; no fault is reported within a second of a pod's start.
TIME_RESOLUTION_S = 1.0
NAMED_MAX = 8
MIRROR = "kubernetes.io/config.mirror"

Scope = Literal["job", "nodes"]


class EvictionProgress(NamedTuple):
    """A job's progress towards running again. ``waiting`` says what is missing, as text; "" where it runs again."""

    done: bool
    waiting: str
    ended: bool = False


def victims(pods: Iterable[Pod], without: Collection[str], detected_s: float | None, scope: Scope) -> list[Pod]:
    """Return the pods to evict, those on excluded nodes first.

    ``scope`` "nodes" evicts only those, if any: for jobs whose other ranks continue without them.
    """
    there = [pod for pod in pods if pod.live and pod.spec.node_name]
    leaving = [pod for pod in there if pod.spec.node_name in without]
    if scope == "nodes" and without:
        return leaving
    rest = [pod for pod in there if pod.spec.node_name not in without and not _began_after(pod, detected_s)]
    return leaving + rest


def progress(pods: Sequence[Pod], gone: Collection[str], without: Collection[str], expected: int) -> EvictionProgress:
    """Return the job's progress: ``pods`` are its members now, ``gone`` the uids of those that were evicted.

    It runs again when as many pods as before run, none of them evicted and none on an excluded node.
    """
    live = [pod for pod in pods if pod.live and pod.metadata.uid not in gone]
    back = [pod for pod in live if pod.spec.node_name in without]
    if back:
        where = ", ".join(f"{pod.full_name} on {pod.spec.node_name}" for pod in back[:NAMED_MAX])
        return EvictionProgress(
            False, f"in spite of taint and cordon: {where}; look at the pod's tolerations and nodeName"
        )
    running = [pod for pod in live if pod.runs]
    if len(live) >= expected > 0 and len(running) == len(live):
        return EvictionProgress(True, "")
    if pods and not live and all(pod.status.phase == "Succeeded" for pod in pods):
        return EvictionProgress(True, "", ended=True)
    missing = [f"{pod.full_name} waits{_why(pod)}" for pod in live if not pod.runs]
    absent = expected - len(live)
    if absent > 0:
        leaving = [pod.full_name for pod in pods if pod.metadata.deletion_timestamp is not None]
        text = f"{absent} of {expected} pods are not back"
        if leaving:
            text += f"; still ending: {named(leaving)}"
        missing.insert(0, text)
    return EvictionProgress(False, "; ".join(missing[:NAMED_MAX]))


def stale(pods: Iterable[Pod], since_s: float) -> list[Pod]:
    """Return the pods on nodes that started before the job was resized: they got the previous layout."""
    return [pod for pod in pods if pod.live and pod.spec.node_name and began_s(pod) <= since_s]


def places(pods: Iterable[Pod], gone: Collection[str], without: Collection[str]) -> int | None:
    """Return how many of a job's pods have a node, once the scheduler finds none for the others; None: not yet.

    Nodes do not count as full while evicted pods are still terminating there.
    """
    here = [pod for pod in pods if pod.spec.node_name not in without]
    if any(pod.metadata.uid in gone for pod in here if pod.spec.node_name):
        return None
    live = [pod for pod in here if pod.live]
    placed = [pod for pod in live if pod.spec.node_name]
    return len(placed) if any(_has_no_place(pod) for pod in live) else None


def _has_no_place(pod: Pod) -> bool:
    said = pod.status.conditions or ()
    return not pod.spec.node_name and any(one.type == "PodScheduled" and one.status == "False" for one in said)


def bystanders(there: Iterable[Pod], job_uids: Collection[str]) -> list[str]:
    """Return which other pods run on a node, except the job's and the node's own."""
    return sorted(
        pod.full_name
        for pod in there
        if pod.live
        and pod.metadata.uid not in job_uids
        and MIRROR not in (pod.metadata.annotations or {})
        and not any(owner.kind in ("DaemonSet", "Node") for owner in pod.metadata.owner_references or ())
    )


def named(names: Sequence[str]) -> str:
    """Return some of the names, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _began_after(pod: Pod, detected_s: float | None) -> bool:
    return detected_s is not None and began_s(pod) > detected_s - TIME_RESOLUTION_S


def _why(pod: Pod) -> str:
    """Return the scheduler's reason for a pod that it cannot place."""
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False" and condition.message:
            return f" for a node: {condition.message[:300]}"
    return f" on {pod.spec.node_name}" if pod.spec.node_name else ""


# Resizes jobs that follow a plan to the pods that find a node, and sets their layout. Uses the network, through Api.
#
# The layout is written to the site's ConfigMap before the size changes: containers read it as they start.
@dataclass(frozen=True)
class Resizing:
    """Resizes the jobs of ``plans``; pods read their layout from ``config_map`` in the job's namespace."""

    api: Api
    plans: Mapping[str, Plan] = field(default_factory=dict)
    config_map: str = ""

    def workload(self, job: str, pods: Sequence[Pod]) -> Workload | None:
        """Return the current controller of the job's pods; None where the job follows no plan.

        Raises CannotCarryOutError where it cannot follow its plan.
        """
        plan = self.plans.get(job)
        if plan is None or not pods:
            return None
        found = self._read(api.made_by(pods))
        if why_not := misfit(plan, found.wanted, api.gpus_of(pods)):
            raise CannotCarryOutError(why_not)
        return found

    def resize(self, job: str, before: Workload, pods: int, action: str, clock: Callable[[], float]) -> Workload:
        """Set the job's number of pods and the layout for those that start from now on; return the result.

        Raises CannotCarryOutError: its size is unchanged.
        """
        plan, space = self.plans[job], before.ref.namespace
        if not self.api.set_config_map_key(self.config_map, space, job, variable(plan, pods)):
            raise CannotCarryOutError(f"there is no ConfigMap {self.config_map} in {space} to tell its pods of it")
        try:
            return self._change(before, pods, action, clock)
        except CannotCarryOutError:
            self.api.set_config_map_key(self.config_map, space, job, variable(plan, before.pods))
            raise

    def _change(self, known: Workload, pods: int, action: str, clock: Callable[[], float]) -> Workload:
        for _ in range(CONFLICTS_MAX):
            change = api.ScaleChange(known.wanted, pods, math.ceil(clock()), action)
            try:
                self.api.change_workload(known.ref, api.resized(known, change))
            except Conflict:
                known = self._read(known.ref)
            else:
                return known._replace(pods=pods, change=change if pods != known.wanted else None)
        raise CannotCarryOutError(f"{known.ref} was changed by others {CONFLICTS_MAX} times")

    def _read(self, ref: Ref) -> Workload:
        return api.read(ref, self.api.workload(ref))


NODE_NAMES_FOR_S = 60.0  # nodes seldom come and go
CONFLICTS_MAX = 5
POLL_S = 2.0
BLOCKED_S = 5.0  # between two attempts against a PodDisruptionBudget
# For a controller to recreate a pod that someone else deleted; deleted or suspended jobs do not come back.
NOTHING_LEFT_S = 60.0


@dataclass(frozen=True)
class Settings:
    """A site's settings. ``namespaces`` () are all; ``evict_wait_s`` applies where an action does not expire.

    ``resume_config_map`` is where jobs read the step to resume from; "": none. The jobs of ``plans`` continue with
    fewer pods where some have found no node for ``spare_wait_s``; ``layout_config_map`` gives them the layout.
    """

    namespaces: tuple[str, ...] = ()
    job_labels: tuple[str, ...] = JOB_LABELS
    attempt_labels: tuple[str, ...] = ATTEMPT_LABELS
    owner: str = "eagle-eye"
    taint_effect: objects.TaintEffect = "NoSchedule"
    scope: Scope = "job"
    start_wait_s: float = 600.0
    evict_wait_s: float = 600.0
    resume_config_map: str = ""
    plans: Mapping[str, Plan] = field(default_factory=dict)
    layout_config_map: str = ""
    spare_wait_s: float = 60.0


class _Before(NamedTuple):
    """A job before its restart: how many of its pods ran or should, and the selectors that find them.

    ``elastic`` is their controller if it can run fewer by plan, and ``rigid`` why it cannot despite a plan.
    """

    expected: int
    selectors: tuple[str, ...]
    elastic: Workload | None = None
    rigid: str = ""


def _suspect(request: Restart, untold: str, kept: str) -> str:
    """Return which checkpoints hold the damage, and whether the job was told; if not, a human must act.

    ``untold`` says why it was not told, ``kept`` why its next restart will be told the same; "" otherwise.
    """
    if request.distrust_since_s is None:
        return f"; what an earlier action has told its pods still stands: {untold}" if untold else ""
    reported = f" to resume from {request.resume_from}" if request.resume_from else ""
    word = f"not told{reported}: {untold}" if untold else f"told{reported}" if reported else "not told"
    again = f"; its next restart is told the same: {kept}" if kept else ""
    return (
        f"; checkpoints written since {_rfc3339(request.distrust_since_s)} may hold the damage, "
        f"and the job is {word}{again}"
    )


def _rfc3339(time_s: float) -> str:
    return dt.datetime.fromtimestamp(time_s, tz=dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class KubernetesOrchestrator:
    """One cluster."""

    name = "kubernetes"
    resumes = True

    def __init__(
        self,
        api: Api,
        settings: Settings,
        sink: HealthEvents | None = None,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._api = api
        self._settings = settings
        self._sink = sink
        self._clock = clock
        self._pause = pause
        self._names: tuple[float, frozenset[str]] = (float("-inf"), frozenset())
        self._resizing = Resizing(api, settings.plans, settings.layout_config_map)

    def close(self) -> None:
        """Close the connections. A pending restart ends with its process; the next process continues it."""
        self._api.close()
        if self._sink is not None:
            self._sink.close()

    def state(self, job: str) -> JobState | None:
        """Return the job's state from its pods; None where no pod has its name. Any node may be named."""
        if not job:
            return JobState(0, self._node_names(), running=False)
        pods = self._pods(job, cached=True)
        if not pods:
            return None
        labels = self._settings.attempt_labels
        running = any(pod.runs for pod in members(pods, labels))
        return JobState(attempt_of(pods, labels), self._node_names(), running)

    def stop(self, job: str, reason: str) -> str:  # noqa: ARG002 - the protocol's name
        """Refuse: evicted pods come back, and we have no right to change their controllers."""
        raise CannotCarryOutError(
            f"{job}: stopping is its controller's: kubectl patch KIND {job} --type=merge "
            """-p '{"spec":{"suspend":true}}' (Job, JobSet, TrainJob), or delete it"""
        )

    def exclude(self, request: Exclusion) -> str:
        """Cordon and mark the nodes; pods that run there stay. Returns which other pods run there."""
        done: list[str] = []
        for name in request.nodes:
            try:
                done.append(self._exclude(name, request))
            except CannotCarryOutError as error:
                raise CannotCarryOutError("; ".join([*done, str(error)])) from None
        return "; ".join(done)

    def restart(self, job: str, request: Restart) -> str:
        """Evict the job's pods and wait until as many run again. Raises CannotCarryOutError saying what is missing."""
        pods = self._pods(job)
        untold = self._tell_resume(job, pods, request.resume_from)
        try:
            said = self._restart(job, pods, request)
        except CannotCarryOutError as error:
            still = f"; its pods are still told to resume from {request.resume_from}"
            raise CannotCarryOutError(f"{error}{still if request.resume_from and not untold else ''}") from None
        # Its containers have it: by the next restart by someone else, the step is outdated.
        kept = self._tell_resume(job, pods, "") if request.resume_from and not untold else ""
        return said + _suspect(request, untold, kept)

    def _restart(self, job: str, pods: Sequence[Pod], request: Restart) -> str:
        expected = sum(pod.live for pod in members(pods, self._settings.attempt_labels))
        before = _Before(expected, tuple(found_by(job, pods, self._settings.job_labels)))
        attempt = attempt_of(pods, self._settings.attempt_labels)
        gone: set[str] = set()
        done = f"job {job} is at attempt {attempt} already"
        ahead = attempt <= request.over_attempt
        before = self._elastic(job, before, pods, request, grows=ahead)
        change = before.elastic.change if before.elastic is not None else None
        # All ranks of a job that follows a plan get the new layout.
        scope = self._settings.scope if before.elastic is None else "job"
        going = victims(pods, request.without, request.cause.detected_s, scope) if ahead else []
        if change is not None and change.action == request.cause.action_id:  # another process has resized it
            going += [pod for pod in stale(pods, change.since_s) if pod not in going]
        if ahead or going:
            self._evict(going, request)
            gone = {pod.metadata.uid for pod in going}
            done = f"evicted {len(going)} pods of {job}" if going else f"no pod of {job} was there to evict"
            request.cause.tell(f"{done}: {named([pod.full_name for pod in going])}" if going else done)
        return self._await(job, before, gone, request, done)

    def _elastic(self, job: str, before: _Before, pods: Sequence[Pod], request: Restart, *, grows: bool) -> _Before:
        """Return the job's size; with ``grows`` it gets back all the pods that it wants."""
        try:
            found = self._resizing.workload(job, pods)
            if found is None:
                return before
            ours = found.change is not None and found.change.action == request.cause.action_id
            if grows and not ours and found.pods < found.wanted:
                found = self._resizing.resize(job, found, found.wanted, request.cause.action_id, self._clock)
        except CannotCarryOutError as error:
            return before._replace(rigid=f"{job} has a plan for fewer nodes and cannot follow it: {error}")
        return before._replace(elastic=found, expected=found.pods)

    def readmit(self, nodes: Sequence[str]) -> str:
        """Remove our cordons, taints and annotations; marks of others, or changed ones, stay."""
        return "; ".join(self._readmit(name) for name in nodes)

    def preview(self, request: Exclusion | Restart) -> str:
        """Return what would be done; only reads."""
        if isinstance(request, Exclusion):
            return "; ".join(self._preview_exclusion(name) for name in request.nodes)
        reported = f", and tell the job to resume from {request.resume_from}" if request.resume_from else ""
        return f"evict the job's pods, except those that began after the fault was reported{reported}"

    # Exclusion and readmission

    def _exclude(self, name: str, request: Exclusion) -> str:
        cause = request.cause
        for _ in range(CONFLICTS_MAX):
            node = self._api.node(name)
            if node is None:
                return f"{name} is no node of the cluster any more"
            whose = objects.whose(node, self._settings.owner)
            if whose.state in ("theirs", "taken"):
                return f"{name} is out already, {whose.why}: left as it is"
            if whose.state == "ours" and whose.ours is not None:
                said = f"{name} is cordoned already, for incident {whose.ours.incident}"
                return said + (self._say(node, cause) if whose.ours.action == cause.action_id else "")
            patch = objects.marking(node, cause, self._settings.owner, self._settings.taint_effect, self._now())
            try:
                self._api.mark(name, patch)
            except Conflict:
                continue
            said = f"{name} is cordoned and tainted {objects.TAINT}={objects.taint_value(cause.reason)}"
            return (
                f"{said}:{self._settings.taint_effect}" + self._say(node, cause) + self._bystanders(name, request.job)
            )
        raise CannotCarryOutError(f"{name}: changed by others {CONFLICTS_MAX} times while it was to be cordoned")

    def _say(self, node: ClusterNode, cause: Cause) -> str:
        """Set the node's condition and notify the site's sink; returns what failed, for people."""
        name, message = node.metadata.name, f"{cause.reason} (incident {cause.incident_id})"
        failed = ""
        if not objects.has_condition(node, "True", message):
            failed = self._set_condition(name, "True", cause.fault, message)
        if self._sink is not None:
            why = self._sink.send(health_event(name, "excluded", cause, self._sink.cluster, self._now()))
            failed += f" (health event not delivered: {why})" if why else ""
        return failed

    def _set_condition(self, name: str, status: objects.ConditionStatus, reason: str, message: str) -> str:
        try:
            self._api.set_condition(name, objects.condition(status, reason, message, self._now()))
        except (CannotCarryOutError, Conflict) as error:
            # The cordon is what counts; this is for people.
            log.warning("condition %s of node %s: %s", objects.CONDITION, name, error)
            return f" (its condition was not set: {error})"
        return ""

    def _bystanders(self, name: str, job: str) -> str:
        try:
            own = {pod.metadata.uid for pod in self._pods(job, cached=True)} if job else set()
            others = bystanders(self._api.pods(self._settings.namespaces, node=name, cached=True), own)
        except CannotCarryOutError as error:
            return f" (who else runs there is not known: {error})"
        if not others:
            return ""
        fate = "have to go" if self._settings.taint_effect == "NoExecute" else "stay"
        return f"; others on it {fate}: {named(others)}"

    def _readmit(self, name: str) -> str:
        for _ in range(CONFLICTS_MAX):
            node = self._api.node(name)
            if node is None:
                return f"{name} is no node of the cluster"
            whose = objects.whose(node, self._settings.owner)
            if whose.ours is None or whose.state == "taken":
                return f"{name} is left as it is: {whose.why or 'not excluded by us'}"
            try:
                self._api.mark(name, objects.unmarking(node, uncordon=whose.state == "ours"))
            except Conflict:
                continue
            failed = self._unsay(node)
            if whose.state == "theirs":
                return f"{name} has no marks of ours any more; it stays cordoned: {whose.why}{failed}"
            return f"{name} takes pods again{failed}"
        raise CannotCarryOutError(f"{name}: changed by others {CONFLICTS_MAX} times while it was to be readmitted")

    def _unsay(self, node: ClusterNode) -> str:
        name, failed = node.metadata.name, ""
        if objects.shows_fault(node):
            failed = self._set_condition(name, "False", "Readmitted", "readmitted")
        if self._sink is not None:
            why = self._sink.send(health_event(name, "readmitted", None, self._sink.cluster, self._now()))
            failed += f" (health event not delivered: {why})" if why else ""
        return failed

    def _preview_exclusion(self, name: str) -> str:
        node = self._api.node(name)
        if node is None:
            return f"leave {name}, which is no node of the cluster"
        whose = objects.whose(node, self._settings.owner)
        if whose.state in ("free", "uncordoned"):
            return f"cordon {name} and taint it {objects.TAINT}:{self._settings.taint_effect}"
        return f"leave {name} as it is: {whose.why or 'cordoned already'}"

    # Restart

    def _evict(self, pods: Sequence[Pod], request: Restart) -> None:
        """Evict the pods. Raises CannotCarryOutError once the action is void, saying what kept them."""
        cause = request.cause
        until_s = cause.expires_s if cause.expires_s is not None else self._clock() + self._settings.evict_wait_s
        left, reported = list(pods), ""
        while True:
            kept: dict[str, str] = {}
            blocked: list[Pod] = []
            for number, pod in enumerate(left):
                try:
                    answer = self._api.evict(pod)
                except CannotCarryOutError as error:
                    done = len(pods) - len(blocked) - (len(left) - number)
                    raise CannotCarryOutError(f"{error}; evicted before: {done} of {len(pods)} pods") from None
                if not answer.gone:
                    blocked.append(pod)
                    kept[pod.full_name] = answer.why
            if not blocked:
                return
            left = blocked
            text = "; ".join(f"{name} may not be evicted yet: {why}" for name, why in list(kept.items())[:3])
            if text != reported:
                cause.tell(text)
                reported = text
            if self._clock() + BLOCKED_S >= until_s:
                cordoned = f"; cordoned all the same: {named(request.without)}" if request.without else ""
                raise CannotCarryOutError(
                    f"evicted {len(pods) - len(left)} of {len(pods)} pods, the rest not in time: {text}{cordoned}"
                )
            self._pause(BLOCKED_S)

    def _await(self, job: str, before: _Before, gone: Collection[str], request: Restart, done: str) -> str:
        """Wait until the job runs again; return its nodes. Raises CannotCarryOutError on a timeout."""
        limit_s = self._settings.start_wait_s
        if not gone and not before.expected:
            limit_s = min(limit_s, NOTHING_LEFT_S)
        until_s = self._clock() + limit_s
        reported, full_since_s = ("", ""), float("inf")
        while True:
            there = self._pods(job, before.selectors, cached=True)
            pods = members(there, self._settings.attempt_labels)
            far = progress(pods, gone, request.without, max(before.expected, 1))
            placed = None if before.elastic is None or far.done else places(there, gone, request.without)
            full_since_s = float("inf") if placed is None else min(full_since_s, self._clock())
            if placed is not None and self._clock() >= full_since_s + self._settings.spare_wait_s:
                before, more = self._shrink(job, before, placed, there, request)
                if more:
                    gone = {*gone, *(pod.metadata.uid for pod in more)}
                    done = f"{done}; {self._loss(job, before)}"
                    until_s, full_since_s = self._clock() + limit_s, float("inf")
                    continue
            if far.ended:
                return f"{done}; it has ended"
            if far.done:
                live = [pod for pod in pods if pod.live]
                nodes = sorted({pod.spec.node_name for pod in live})
                ending = [pod.full_name for pod in there if pod.metadata.uid in gone]
                rest = f"; still ending: {named(ending)}" if ending else ""
                return f"{done}; {len(live)} run on {named(nodes)}{rest}"
            if self._clock() >= until_s:
                limit = f"{limit_s:g} s" + (" (--start-wait)" if limit_s == self._settings.start_wait_s else "")
                why = f"{far.waiting}; {before.rigid}" if before.rigid else far.waiting
                raise CannotCarryOutError(f"{done}; it does not run again after {limit}: {why}")
            if (far.waiting, before.rigid) != reported:
                request.cause.tell("; ".join(filter(None, (done, far.waiting, before.rigid))))
                reported = (far.waiting, before.rigid)
            self._pause(POLL_S)

    def _loss(self, job: str, before: _Before) -> str:
        wanted = before.expected if before.elastic is None else before.elastic.wanted
        return no_spare(self._settings.plans[job], before.expected, wanted)

    def _shrink(
        self, job: str, before: _Before, placed: int, there: Sequence[Pod], request: Restart
    ) -> tuple[_Before, list[Pod]]:
        """Shrink the job to its plan's size for ``placed`` nodes; return the pods that were evicted.

        None where its size is unchanged: ``rigid`` says why.
        """
        elastic, plan = before.elastic, self._settings.plans[job]
        fewer = nodes_by_plan(plan, placed)
        if elastic is None or (fewer is not None and fewer >= elastic.pods):
            return before, []
        if fewer is None:
            need = f"its plan's layouts need {plan.nodes_min}: it waits for a spare"
            return before._replace(rigid=f"{placed} of its pods have a node, and {need}"), []
        try:
            found = self._resizing.resize(job, elastic, fewer, request.cause.action_id, self._clock)
        except CannotCarryOutError as error:
            why = f"{job} has a plan for fewer nodes and cannot follow it: {error}"
            return before._replace(elastic=None, rigid=why), []
        going = [pod for pod in there if pod.live and pod.spec.node_name]
        self._evict(going, request)
        return before._replace(elastic=found, expected=found.pods, rigid=""), going

    def _tell_resume(self, job: str, pods: Sequence[Pod], resume_from: str) -> str:
        """Set what the job's containers find in the site's ConfigMap from now on; return why this failed.

        With "" the entry is removed, including one left by a failed action.
        """
        config_map = self._settings.resume_config_map
        if not config_map or not pods:
            why = (
                "none of its pods is there, and so its namespace is not known"
                if config_map
                else "no --resume-config-map"
            )
            return why if resume_from else ""
        namespace = pods[0].metadata.namespace
        try:
            known = self._api.set_config_map_key(config_map, namespace, job, resume_from or None)
        except CannotCarryOutError as error:
            log.warning("%s", error)
            return str(error)
        return "" if known or not resume_from else f"there is no ConfigMap {config_map} in {namespace}"

    # What is read

    def _pods(self, job: str, known: Sequence[str] = (), *, cached: bool = False) -> list[Pod]:
        found: list[Pod] = []
        for selector in known or selectors(job, self._settings.job_labels):
            found += self._api.pods(self._settings.namespaces, label=selector, cached=cached)
        return pods_of(job, found, self._settings.job_labels)

    def _node_names(self) -> frozenset[str]:
        read_s, names = self._names
        now_s = self._clock()
        if not read_s <= now_s < read_s + NODE_NAMES_FOR_S:
            names = self._api.node_names()
            self._names = (now_s, names)
        return names

    def _now(self) -> str:
        return _rfc3339(self._clock())
