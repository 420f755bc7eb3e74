"""Reads the GPUs through NVML, and whether they are in use. Touches: a child process, /sys."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_eye.agent.nvml.pci_presence import gpus_on_the_bus
from eagle_eye.checks import child
from eagle_eye.checks.check import CheckedGpu, Host, printable
from eagle_eye.checks.child import Children

LOOK_S = 12.0  # without its persistence daemon the driver takes a second or two for each GPU
USED_RATIO_MAX = 0.1  # of a GPU's memory; an idle one holds a few hundred megabytes
PIDS_SHOWN = 3
ENDS_S = 2.0  # for a child that looks twice a second
RDMA_DEVICES_MAX = 64


def host(until_s: float, sys: Path = Path("/sys")) -> Host:
    """Return this host's hardware. GPUs on the bus that NVML does not show are a problem, not an absence."""
    on_the_bus = gpus_on_the_bus(sys)
    try:
        seen = first(child.run("in_nvml", {}, 0, until_s))
    except OSError as error:
        seen = Host(gpu_problem=f"asking NVML: {error}")
    if not seen.gpus and not seen.lost:
        unseen = seen.gpu_problem or f"NVML shows none of the {on_the_bus} GPUs on the PCI bus"
        seen = Host(gpu_problem=unseen if on_the_bus else "")
    return dataclasses.replace(seen, rdma_devices=_rdma_devices(sys))


def first(children: Children) -> Host:
    """Return the child's first look."""
    looks = [answer for answer in children.answers if "gpus" in answer or "problem" in answer]
    if looks:
        return look(looks[0])
    if children.status is None:
        return Host(gpu_problem="NVML does not answer")
    return Host(gpu_problem=f"asking NVML ended with {children.status}: {children.complaint}")


def look(answer: dict[str, Any]) -> Host:
    """Return one of the child's readings; invalid GPUs are left out."""
    reported = answer.get("gpus")
    gpus = [gpu for each in (reported if isinstance(reported, list) else []) if (gpu := _gpu(each)) is not None]
    lost = answer.get("lost")
    return Host(
        gpus=tuple(gpus[: child.WORKERS_MAX]),
        lost=tuple(printable(str(text)) for text in (lost if isinstance(lost, list) else [])[: child.WORKERS_MAX]),
        gpu_problem=printable(str(answer.get("problem") or "")),
        simulated=answer.get("simulated") is True,
    )


def occupied(seen: Host) -> str:
    """Return which processes use the GPUs, "" for none. Where the driver does not say, they count as used."""
    for gpu in seen.gpus:
        if gpu.processes is None:
            return f"{gpu.name}: the driver does not say whether a process computes on it"
        others = gpu.processes
        if others:
            shown = ", ".join(f"{pid}{_program(pid)}" for pid in others[:PIDS_SHOWN])
            more = f" and {len(others) - PIDS_SHOWN} more" if len(others) > PIDS_SHOWN else ""
            return f"{gpu.name}: process {shown}{more} computes on it"
        used, total = gpu.facts.get("memory_used_bytes", 0.0), gpu.facts.get("memory_total_bytes", 0.0)
        if total > 0.0 and used > USED_RATIO_MAX * total:
            # In a container the driver does not report other containers' processes.
            return f"{gpu.name}: {used / 2**30:.1f} GiB of its memory are in use, by a process that is not shown here"
    return ""


def unavailable(until_s: float) -> str:
    """Return why the GPUs must not be loaded now, "" when they may be: a job may have started, a GPU gone."""
    seen = host(until_s)
    user = occupied(seen)
    if user:
        return f"{user}; it is not to be disturbed"
    return seen.lost[0] if seen.lost else seen.gpu_problem


class Watching:
    """Reads the GPUs while something else loads them: until exit, or the deadline."""

    def __init__(self, until_s: float) -> None:
        self._looks: Sequence[Host] = ()
        self._until_s = until_s
        self._folder = tempfile.TemporaryDirectory(prefix="eagle-eye-check-", ignore_cleanup_errors=True)
        self._thread = threading.Thread(target=self._look, name="nvml-looks", daemon=True)

    def __enter__(self) -> Watching:  # noqa: PYI034 - Self is newer than Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Make the child exit: it reads for as long as the folder exists."""
        self._folder.cleanup()

    def looks(self) -> Sequence[Host]:
        """Return all readings, once it is over; none when NVML did not answer."""
        self._thread.join(ENDS_S)
        return self._looks

    def _look(self) -> None:
        try:
            children = child.run("in_nvml", {"while": self._folder.name}, 0, self._until_s)
        except OSError:
            return  # no looks: said with the result
        self._looks = [look(answer) for answer in children.answers if "gpus" in answer]


def _gpu(reported: object) -> CheckedGpu | None:
    if not isinstance(reported, dict):
        return None
    row, uuid, facts, pids = reported.get("row"), reported.get("uuid"), reported.get("facts"), reported.get("processes")
    if not isinstance(row, int) or not isinstance(uuid, str) or not isinstance(facts, dict):
        return None
    instances = reported.get("instances")
    return CheckedGpu(
        row=row,
        uuid=uuid,
        model=printable(str(reported.get("model", ""))),
        facts={name: float(value) for name, value in facts.items() if child.is_number(value)},
        processes=tuple(pid for pid in pids if isinstance(pid, int)) if isinstance(pids, list) else None,
        instances=instances if isinstance(instances, int) else 0,
    )


def _program(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f" ({printable(name)})"


def _rdma_devices(sys: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in (sys / "class/infiniband").iterdir())[:RDMA_DEVICES_MAX])
    except OSError:
        return ()
