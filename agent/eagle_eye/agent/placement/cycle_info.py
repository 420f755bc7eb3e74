"""NVRx's cycle files: which nodes take part in which cycle (restart inside a job).

NVIDIA's resiliency extension writes ``cycle_info.<job>.<attempt>.<cycle>`` as JSON for each cycle, with a link
``cycle_info.<job>.current`` whose path each rank has in ``NVRX_CURRENT_CYCLE_INFO``. Nothing here opens them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from eagle_eye.agent.placement.node_names import NODES_MAX, expand
from eagle_eye.schema.frame import NAME_CHARS_MAX

FILE_BYTES_MAX = 1 << 20  # the node lists of 10,000 nodes take a few hundred kilobytes
_FILE = re.compile(r"cycle_info\.(.{1,253})\.(\d{1,9})\.(\d{1,9})")
_CURRENT = re.compile(r"(?:.*/)?cycle_info\.([^/]{1,253})\.current")


class BadCycleInfo(ValueError):  # noqa: N818 - it names the thing that is bad
    """A file that is no cycle's description."""


class CycleInfo(NamedTuple):
    """One cycle of one job. ``attempt`` counts the scheduler's restarts, ``cycle`` NVRx's own, both from 0.

    ``active`` and ``standby`` are host names; ``ended`` says whether the cycle is over.
    """

    job: str
    attempt: int
    cycle: int
    active: tuple[str, ...]
    standby: tuple[str, ...]
    ended: bool


class _File(msgspec.Struct):
    job_id: str
    attempt_index: int = 0
    cycle_number: int = 0
    cycle_end_time: str = ""
    active_nodes: str = ""
    standby_nodes: str = ""


def file_of(name: str) -> tuple[str, int, int] | None:
    """Return job, attempt and cycle from a file's name; None where it is not a cycle's."""
    found = _FILE.fullmatch(name)
    return (found[1], int(found[2]), int(found[3])) if found else None


def job_of(current: str) -> str:
    """Return the job that the path of a ``.current`` link names; "" where it names none."""
    found = _CURRENT.fullmatch(current)
    return found[1] if found else ""


def parse(data: bytes) -> CycleInfo:
    """Return what the file says. Raises BadCycleInfo; a half-written file is one, and whole a moment later."""
    if len(data) > FILE_BYTES_MAX:
        raise BadCycleInfo(f"{len(data)} bytes; at most {FILE_BYTES_MAX} are read")
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadCycleInfo(f"not a cycle's description: {error}") from None
    if not 0 < len(file.job_id) <= NAME_CHARS_MAX or not file.job_id.isprintable():
        raise BadCycleInfo(f"job_id {file.job_id[:80]!r}: expected 1 to {NAME_CHARS_MAX} printable characters")
    if min(file.attempt_index, file.cycle_number) < 0:
        raise BadCycleInfo(f"attempt_index {file.attempt_index}, cycle_number {file.cycle_number}: expected 0 or more")
    active, standby = expand(file.active_nodes), expand(file.standby_nodes)
    if active is None or standby is None:
        raise BadCycleInfo(f"active_nodes or standby_nodes is no list of at most {NODES_MAX} hosts")
    return CycleInfo(
        file.job_id, file.attempt_index, file.cycle_number, active, standby, ended=bool(file.cycle_end_time)
    )
