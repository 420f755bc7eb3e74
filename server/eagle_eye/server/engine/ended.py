"""Decides when a job has ended, on whose report, and how long its data is kept. Pure.

A node's rows go to all jobs that it is a member of, even while none of its ranks reports. A job that is over must not
receive any more: they would belong to the jobs that run there now.
"""

from __future__ import annotations

from collections.abc import Mapping

from eagle_eye.server.engine.job_track import JobTrack
from eagle_eye.server.engine.routing import Route
from eagle_eye.server.engine.scheduler_contact import FAILED_S, since_s
from eagle_eye.server.model.records import Job

# States in which a job has the nodes that its scheduler names.
HELD_STATES = frozenset({"running", "suspended", "completing", "maintenance"})
FINAL_STATES = frozenset({"finished", "cancelled"})  # after which a job does not continue in another attempt by itself
FORGET_JOB_S = 86_400.0  # a job without any report for this long is dropped from memory


def is_over(job: Job | None, track: JobTrack, now_s: float) -> bool:
    """Whether the attempt ended, according to its launcher or scheduler, so long ago that it is no longer judged."""
    if job is None or job.attempt < track.attempt or job.state in HELD_STATES:
        return False
    return now_s - since_s(job) > FAILED_S


def is_left(track: JobTrack, routes: Mapping[str, Route]) -> bool:
    """Whether all nodes of the attempt now report other jobs, and none this one."""
    known = [routes.get(node) for node in track.nodes]
    return bool(known) and all(
        route is not None and route.named and track not in route.tracks[: route.named] for route in known
    )


def may_go(job: Job | None, track: JobTrack, now_s: float, kept_s: float) -> bool:
    """Whether the job's data can be dropped; ``kept_s`` is how long it is kept after a final end."""
    untouched_s = now_s - track.touched_s
    if job is None or job.state not in FINAL_STATES or not is_over(job, track, now_s):
        return untouched_s > FORGET_JOB_S
    return min(untouched_s, now_s - since_s(job)) > min(kept_s, FORGET_JOB_S)


def is_past(job: Job, now_s: float) -> bool:
    """Whether the job is old and no longer reported by anything."""
    return job.state not in HELD_STATES and now_s - job.updated_s > FORGET_JOB_S
