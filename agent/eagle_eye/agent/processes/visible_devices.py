"""Determines which GPU a process uses, as far as its environment shows; rows are NVML's indexes.

CUDA numbers visible devices from 0 in the order of ``CUDA_VISIBLE_DEVICES`` and stops at the first invalid entry (CUDA
programming guide, environment variables). Its indexes follow the PCI bus with ``CUDA_DEVICE_ORDER= PCI_BUS_ID``, and
also without it where all GPUs are of one model; where they are not, the fastest is 0 and the environment is not enough:
NVML's list of processes is.

Slurm gives global ids in ``SLURM_STEP_GPUS`` (or ``SLURM_JOB_GPUS``, the batch script's), while its
``CUDA_VISIBLE_DEVICES`` counts from 0 within the job where devices are constrained by cgroups, and not where they
are not. A container that was given some GPUs (``NVIDIA_VISIBLE_DEVICES``) sees only those, in the order of the bus.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ENTRIES_MAX = 1_024
_MIG_OF_OLD = re.compile(r"mig-(gpu-[0-9a-f-]{36})/\d{1,3}/\d{1,3}")  # drivers before 470: parent, GPU and compute id
_INDEX_DIGITS_MAX = 4


class Gpus(NamedTuple):
    """The node's GPUs: rows by UUID, including known MIG instances, and the rows in bus order."""

    by_uuid: Mapping[str, int]
    in_order: Sequence[int]


def gpus(devices_by_uuid: Mapping[str, int], devices_by_bus_id: Mapping[str, int]) -> Gpus:
    """Return the node's GPUs as this module looks them up."""
    by_uuid = {uuid.lower(): device for uuid, device in devices_by_uuid.items()}
    return Gpus(by_uuid, [device for _, device in sorted((key.lower(), row) for key, row in devices_by_bus_id.items())])


def hides_gpus(variables: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves the process no GPU."""
    text = variables.get("CUDA_VISIBLE_DEVICES")
    return text is not None and not _entries(text)


def named_device(variables: Mapping[str, str], node: Gpus) -> int | None:
    """Return the only GPU or MIG instance in CUDA_VISIBLE_DEVICES if given by UUID; None otherwise."""
    entries = _entries(variables.get("CUDA_VISIBLE_DEVICES", ""))
    return _by_uuid(entries[0], node) if len(entries) == 1 else None


def listed_device(variables: Mapping[str, str], local_rank: int, node: Gpus) -> int | None:
    """Return the rank's GPU among the visible ones: the only one, else the one at its local rank; None: unknown."""
    seen = _seen(variables, node)
    if seen is None:
        return None
    if len(seen) == 1:
        return seen[0]
    return seen[local_rank] if local_rank < len(seen) else None


def _seen(variables: Mapping[str, str], node: Gpus) -> list[int] | None:
    """Return the rows that the process sees, in CUDA's order; None where unknown."""
    given = _given(variables, node)
    text = variables.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return given
    entries = _entries(text)
    if not entries or not all(_is_index(entry) for entry in entries):
        rows = [_by_uuid(entry, node) for entry in entries]
        return [row for row in rows if row is not None] if None not in rows else None
    indexes = [int(entry) for entry in entries]
    slurm = _entries(variables.get("SLURM_STEP_GPUS") or variables.get("SLURM_JOB_GPUS", ""))
    if slurm and all(_is_index(entry) for entry in slurm):
        reported = _of_slurm(indexes, [int(entry) for entry in slurm])
        return None if reported is None else _rows(reported, node.in_order)
    return _rows(indexes, given if given is not None else node.in_order)


def _given(variables: Mapping[str, str], node: Gpus) -> list[int] | None:
    """Return the rows that the container was given, in bus order; None where unknown."""
    entries = _entries(variables.get("NVIDIA_VISIBLE_DEVICES", ""))
    rows: set[int] = set()
    for entry in entries:
        found = _rows([int(entry)], node.in_order) if _is_index(entry) else []
        row = found[0] if found else _by_uuid(entry, node)
        if row is None:  # also "all", "void" and device folders
            return None
        rows.add(row)
    order = {row: place for place, row in enumerate(node.in_order)}
    return sorted(rows, key=lambda row: order.get(row, row)) or None


def _of_slurm(indexes: Sequence[int], allocated: Sequence[int]) -> list[int] | None:
    """Return global indexes; None where counting within the job and globally are both possible and differ."""
    ways: list[list[int]] = []
    if all(index in allocated for index in indexes):
        ways.append(list(indexes))
    if all(index < len(allocated) for index in indexes):
        ways.append([allocated[index] for index in indexes])
    return ways[0] if ways and ways[0] == ways[-1] else None


def _rows(indexes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the rows at the indexes; without NVML's order the index itself, up to CUDA's first invalid entry."""
    if not order:
        return list(indexes)
    rows: list[int] = []
    for index in indexes:
        if index >= len(order):
            break
        rows.append(order[index])
    return rows


def _by_uuid(entry: str, node: Gpus) -> int | None:
    """Return the row of a UUID or of a prefix of one; None: unknown or ambiguous."""
    entry = entry.lower()
    if not entry.startswith(("gpu-", "mig-")):
        return None
    old = _MIG_OF_OLD.fullmatch(entry)
    if old:
        entry = old[1]
    if entry in node.by_uuid:
        return node.by_uuid[entry]
    found = [row for uuid, row in node.by_uuid.items() if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _entries(text: str) -> list[str]:
    """Return the entries as CUDA reads them: up to the first invalid one."""
    entries: list[str] = []
    for item in text.split(",", ENTRIES_MAX)[:ENTRIES_MAX]:
        entry = item.strip()
        if not entry or entry.startswith("-"):
            break
        entries.append(entry)
    return entries


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.isdecimal() and len(entry) <= _INDEX_DIGITS_MAX
