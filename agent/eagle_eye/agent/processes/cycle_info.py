"""Extracts the job name from the paths of NVRx's cycle files. Pure: opens no file.

NVIDIA's resiliency extension describes each cycle of a job, a restart inside it, in a file, and gives each rank the
path of the link to the newest in ``NVRX_CURRENT_CYCLE_INFO``: ``<folder>/cycle_info.<job>.current``. The rest of the
files, which nodes take part and which are spares, is the launcher's plan; this agent reports the ranks that run.
"""

from __future__ import annotations

import re

_CURRENT = re.compile(r"(?:.*/)?cycle_info\.([^/]{1,253})\.current")


def job_of(current: str) -> str:
    """Return the job in the path of a ``.current`` link; "" where there is none."""
    found = _CURRENT.fullmatch(current)
    return found[1] if found else ""
