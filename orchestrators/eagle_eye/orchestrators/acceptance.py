"""Decides whether an action may be carried out: on arrival, and again when its turn comes. Pure."""

from __future__ import annotations

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.schema.action import ActionRequest


def of_a_former_leader(epoch: int, highest: int) -> str | None:
    """Return why an event of this epoch is refused where the highest was seen; None where it is taken."""
    if epoch == 0 or epoch >= highest:
        return None
    return (
        f"epoch {epoch} is lower than {highest}, which was seen: it is from a server that leads no more, or from a"
        " database that was restored, whose server raises its epoch now (docs/how-to/two-servers.md)"
    )


def refusal(action: ActionRequest, job: JobState | None, now_s: float) -> str | None:
    """Return why the action is refused, as text for its report; None where it may be carried out."""
    if now_s >= unix_seconds(action.expires, "expires"):
        return f"expired at {action.expires}"
    if job is None:
        return f"job {action.job!r} is not run here"
    if action.attempt < job.attempt:
        return f"asked for attempt {action.attempt}; the job is at attempt {job.attempt} already"
    unknown = sorted(set(action.exclude) - job.nodes)
    if unknown:
        return f"unknown nodes: {', '.join(repr(name[:64]) for name in unknown[:8])}"
    runs_on = {rank.node for rank in action.ranks}
    if job.nodes and runs_on and runs_on.isdisjoint(job.nodes):
        return f"job {action.job!r} runs on other nodes here: it is not the one that is meant"
    if action.kind in ("exclude_node", "drain_node") and not action.exclude:
        return f"{action.kind} names no node"
    return None
