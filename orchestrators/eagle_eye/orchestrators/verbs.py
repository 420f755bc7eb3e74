"""Maps an action to an orchestrator's verbs, in order. Pure."""

from __future__ import annotations

from collections.abc import Callable

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.protocol import Cause, Exclusion, Restart
from eagle_eye.schema.action import ActionRequest, RestartScope
from eagle_eye.schema.memory_steps import MEMORY_PREFIX

# After these faults, checkpoints may contain the damage itself.
FAULTS_THAT_SPOIL_CHECKPOINTS = frozenset({"loss_not_finite", "loss_divergence", "silent_data_corruption"})

Verb = Exclusion | Restart


def verbs(action: ActionRequest, tell: Callable[[str], None] = lambda _: None) -> tuple[Verb, ...]:
    """Return the verbs in order; empty for a notice, and for a checkpoint, which cannot be made."""
    cause = Cause(
        incident_id=action.incident_id,
        action_id=action.action_id,
        fault=action.fault,
        summary=action.summary,
        repair=action.repair,
        detected_s=unix_seconds(action.detected, "detected"),
        expires_s=unix_seconds(action.expires, "expires"),
        tell=tell,
    )
    nodes = tuple(action.exclude)
    since_s = distrust_since_s(action) if restarts(action) else None
    asked: list[Verb] = []
    if action.kind in ("exclude_node", "drain_node"):
        asked.append(Exclusion(action.job, action.attempt, nodes, restarts(action), cause, since_s))
    if restarts(action):
        scope: RestartScope = action.restart_scope or "job"
        asked.append(Restart(action.attempt, since_s, cause, nodes, action.job, resume_from(action), scope))
    return tuple(asked)


def restarts(action: ActionRequest) -> bool:
    """Whether the job is to be restarted; where another system does that, nodes are only excluded."""
    return action.kind == "restart_job" or (action.kind == "exclude_node" and action.restart)


def resume_from(action: ActionRequest) -> str:
    """Return what the next attempt must resume from: the newest trusted step, where later ones are not.

    Otherwise "": the attempt finds the newest step itself, and the job may have progressed since the action was made.
    """
    if action.resume_from is None or distrust_since_s(action) is None:
        return ""
    return f"{MEMORY_PREFIX}{action.resume_from.step}"  # or the newest older one, in memory or on storage


def distrust_since_s(action: ActionRequest) -> float | None:
    """Return the Unix time from which on checkpoints are not trusted; None where they all are."""
    if action.fault not in FAULTS_THAT_SPOIL_CHECKPOINTS:
        return None
    return unix_seconds(action.onset, "onset")
