"""NVRx's cycle files: the job that their names tell. Pure: nothing here opens them.

NVIDIA's resiliency extension describes each cycle of a job, a restart inside it, in a file, and gives each rank the
path of the link to the newest in ``NVRX_CURRENT_CYCLE_INFO``: ``<folder>/cycle_info.<job>.current``. What the files
say besides, which nodes take part and which stand by, is the launcher's plan; this agent tells the ranks that run.
"""

from __future__ import annotations

import re

_CURRENT = re.compile(r"(?:.*/)?cycle_info\.([^/]{1,253})\.current")


def job_of(current: str) -> str:
    """Return the job that the path of a ``.current`` link names; "" where it names none."""
    found = _CURRENT.fullmatch(current)
    return found[1] if found else ""
