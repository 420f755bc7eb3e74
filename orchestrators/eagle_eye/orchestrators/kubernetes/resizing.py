"""Resizes jobs that follow a plan to the pods that find a node, and sets their layout. Uses the network, through Api.

The layout is written to the site's ConfigMap before the size changes: containers read it as they start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.fallback_layouts import misfit
from eagle_eye.orchestrators.kubernetes import workloads
from eagle_eye.orchestrators.kubernetes.api import Api, Conflict
from eagle_eye.orchestrators.kubernetes.objects import Pod
from eagle_eye.planning.plan import Plan
from eagle_eye.planning.rank_layout import variable

CONFLICTS_MAX = 5


@dataclass(frozen=True)
class Resizing:
    """Resizes the jobs of ``plans``; pods read their layout from ``config_map`` in the job's namespace."""

    api: Api
    plans: Mapping[str, Plan] = field(default_factory=dict)
    config_map: str = ""

    def workload(self, job: str, pods: Sequence[Pod]) -> workloads.Workload | None:
        """Return the current controller of the job's pods; None where the job follows no plan.

        Raises CannotCarryOutError where it cannot follow its plan.
        """
        plan = self.plans.get(job)
        if plan is None or not pods:
            return None
        found = self._read(workloads.made_by(pods))
        if why_not := misfit(plan, found.wanted, workloads.gpus_of(pods)):
            raise CannotCarryOutError(why_not)
        return found

    def resize(
        self, job: str, before: workloads.Workload, pods: int, action: str, clock: Callable[[], float]
    ) -> workloads.Workload:
        """Set the job's number of pods and the layout for those that start from now on; return the result.

        Raises CannotCarryOutError: its size is unchanged.
        """
        plan, space = self.plans[job], before.ref.namespace
        if not self.api.tell(self.config_map, space, job, variable(plan, pods)):
            raise CannotCarryOutError(f"there is no ConfigMap {self.config_map} in {space} to tell its pods of it")
        try:
            return self._change(before, pods, action, clock)
        except CannotCarryOutError:
            self.api.tell(self.config_map, space, job, variable(plan, before.pods))
            raise

    def _change(
        self, known: workloads.Workload, pods: int, action: str, clock: Callable[[], float]
    ) -> workloads.Workload:
        for _ in range(CONFLICTS_MAX):
            change = workloads.ScaleChange(known.wanted, pods, math.ceil(clock()), action)
            try:
                self.api.change_workload(known.ref, workloads.resized(known, change))
            except Conflict:
                known = self._read(known.ref)
            else:
                return known._replace(pods=pods, change=change if pods != known.wanted else None)
        raise CannotCarryOutError(f"{known.ref} was changed by others {CONFLICTS_MAX} times")

    def _read(self, ref: workloads.Ref) -> workloads.Workload:
        return workloads.read(ref, self.api.workload(ref))
