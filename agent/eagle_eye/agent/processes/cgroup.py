"""Finds a process's owner from its cgroup: the Slurm job or Kubernetes pod that it runs in.

Both managers write their own ids into the path: Slurm (cgroup.conf, cgroup_v2 documentation) as
``/slurm/uid_1000/job_7/step_0`` or ``/system.slice/slurmstepd.scope/job_7/step_0/user/task_0``, the kubelet as
``/kubepods/burstable/pod<uid>/<container>`` or ``/kubepods.slice/.../kubepods-burstable-pod<uid>.slice/...``. Inside a
container paths begin elsewhere (``/../../pod<uid>/...``), so only their ends are matched.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# A node with several slurmds has its name in the path: slurm_<node>, <node>_slurmstepd.scope.
_SLURM = re.compile(
    r"/(?:slurm(?:_[^/]{1,253})?(?:/uid_\d{1,10})?|(?:[^/]{1,253}_)?slurmstepd\.scope)/job_(\d{1,10})(?:/|$)"
)
_POD = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?:[/:]|$)")


class Cgroup(NamedTuple):
    """The owners named in the path; "": none. ``pod_uid`` is written with hyphens, as in the API."""

    slurm_job: str = ""
    pod_uid: str = ""


def parse(text: str) -> Cgroup:
    """Return the process's owner, from ``/proc/<pid>/cgroup`` of version 1 (a line per controller), 2 or both."""
    slurm_job = pod_uid = ""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]  # hierarchy, controllers, path; a path may hold colons
        if not slurm_job and (found := _SLURM.search(path)):
            slurm_job = found[1]
        if not pod_uid and (found := _POD.search(path)):
            pod_uid = found[1].replace("_", "-")
    return Cgroup(slurm_job, pod_uid)
