"""The operator's terms for single jobs: whether they may be restarted and by whom, sizes, costs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta, Struct

from eagle_eye.server.engine.job_names import NAMES_MAX, is_exact, matches
from eagle_eye.server.model.bounds import Count

# Restart owners for which we request the restart; "": not stated.
OUR_RESTART_OWNERS = frozenset({"", "eagle-eye"})

Seconds = Annotated[float, Meta(ge=0)]
Limit = Annotated[int, Meta(ge=0)]


class JobTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Terms for the jobs whose names match one of ``jobs`` (glob patterns); omitted fields are as for all jobs."""

    jobs: Annotated[list[str], Meta(min_length=1, max_length=NAMES_MAX)]
    may_restart: bool | None = None
    restart_owner: str | None = None
    nodes_min: Count | None = None
    spares: Limit | None = None
    exclusions_per_job: Limit | None = None
    restarts_per_job: Limit | None = None
    lost_work_s: Seconds | None = None
    restart_s: Seconds | None = None
    queue_s: Seconds | None = None
    remaining_s: Seconds | None = None
    checkpoint_wait_s: Seconds | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of one job, and where the operator set them ("policy.jobs[0]"; settings for all jobs are not listed).

    ``spares`` are nodes ready to replace excluded ones, None: not known, which counts as none. ``restart_owner`` is ""
    if the operator names none: then the job's own value counts. ``restart_s``, ``queue_s`` and ``lost_work_s`` are the
    costs of a restart, ``remaining_s`` how long the job is assumed to run on. ``checkpoint_wait_s`` is how long a
    planned exclusion waits for a checkpoint, 0: not at all.
    """

    may_restart: bool = True
    restart_owner: str = ""
    nodes_min: int = 1
    spares: int | None = None
    exclusions_per_job: int
    restarts_per_job: int
    lost_work_s: float
    restart_s: float
    queue_s: float
    remaining_s: float
    checkpoint_wait_s: float

    @property
    def cost_s(self) -> float:
        """The cost of one restart."""
        return self.lost_work_s + self.restart_s + self.queue_s


# Of equally specific terms the more careful value counts: that with the highest of these.
_CAREFUL: MappingProxyType[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "may_restart": lambda allowed: not allowed,
        "restart_owner": lambda owner: (owner not in OUR_RESTART_OWNERS, owner),
        "nodes_min": lambda count: count,
        "spares": lambda count: -count,
        "exclusions_per_job": lambda limit: -limit,
        "restarts_per_job": lambda limit: -limit,
        "lost_work_s": lambda seconds: seconds,
        "restart_s": lambda seconds: seconds,
        "queue_s": lambda seconds: seconds,
        "remaining_s": lambda seconds: -seconds,
        "checkpoint_wait_s": lambda seconds: seconds,
    }
)


def terms_of(job: str, given: Iterable[JobTerms], defaults: Terms) -> Terms:
    """Return the terms of the job.

    Terms that give its exact name override those that match it by a pattern; among equals the more careful value
    counts, whatever their order.
    """
    fitting = [(is_exact(terms.jobs, job), terms) for terms in given if matches(terms.jobs, job)]
    changed: dict[str, Any] = {}
    for name, careful in _CAREFUL.items():
        said = [(exact, value) for exact, terms in fitting if (value := getattr(terms, name)) is not None]
        if said:
            changed[name] = max(said, key=lambda one: (one[0], careful(one[1])))[1]
    return dataclasses.replace(defaults, **changed) if changed else defaults
