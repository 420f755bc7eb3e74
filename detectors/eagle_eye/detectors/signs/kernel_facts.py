"""Facts that the kernels of a job's nodes report about hosts and devices, each once, and their effect on a job."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.gpu_errors import BEFORE_START_S, NO_GPUS
from eagle_eye.detectors.signs.stop import Standstill
from eagle_eye.detectors.types import Evidence, Window, WindowEvent
from eagle_eye.schema.attributes import text
from eagle_eye.schema.driver_facts import (
    BY_NAME,
    CPU_STUCK,
    DISK_FAILED,
    GPU_MODULES,
    MACHINE_CHECK,
    NIC_FAILED,
    NIC_STALLED,
    STORAGE_SILENT,
    TASK_BLOCKED,
    Repair,
    judged,
)

NETWORK, DISK, LOCKUP = (NIC_FAILED, NIC_STALLED), DISK_FAILED, CPU_STUCK
STORAGE = (STORAGE_SILENT,)
UNUSED_RATIO = 0.01  # of the traffic of the node's busiest port: the job does not use a port that carries less
_STUCK = re.compile(r"stuck for (\d{1,6})s")
HARD_LOCKUP_S, STALL_S = 10.0, 21.0  # how long a CPU is stuck before a report (kernel.watchdog_thresh, RCU)
# Functions in which a task waits for storage: filesystems, their protocols, block devices.
_IN_STORAGE = re.compile(
    r" in .*\b(?:nfs\w*|sunrpc|lustre|lov|osc|mdc|ptlrpc|ceph|libceph|cifs|fuse|xfs|ext4|jbd2|btrfs|nvme\w*|mmfs\w*"
    r"|beegfs|wekafsio|io_schedule|blk_\w+|submit_bio\w*|wait_on_page_\w+|folio_wait_\w+)\b"
)


@dataclass(frozen=True, slots=True)
class KernelFact:
    """One fact reported by a node's kernel, by its first line; ``link`` "": none named, or not a port.

    ``repair`` is what the node needs before its next job. ``module`` and ``holder`` are of a blocked task: the kernel
    module that it waits in, and the task that holds the lock; "" where the kernel did not say.
    """

    node: str
    device: int
    what: str
    part: str
    link: str
    said: str
    time_s: float
    repair: Repair = "none"
    module: str = ""
    holder: str = ""

    @property
    def began_s(self) -> float:
        """The onset: a watchdog reports late."""
        if self.what != LOCKUP:
            return self.time_s
        stuck = _STUCK.search(self.said)
        if stuck is not None:
            return self.time_s - float(stuck[1])
        return self.time_s - (HARD_LOCKUP_S if "LOCKUP" in self.said else STALL_S)

    @property
    def of_storage(self) -> bool:
        """Whether it concerns storage that may be shared."""
        return self.what in STORAGE or (
            self.what == TASK_BLOCKED and not self.in_driver and bool(_IN_STORAGE.search(self.said))
        )

    @property
    def in_driver(self) -> bool:
        """Whether it is a task that waits inside a GPU's driver."""
        return self.what == TASK_BLOCKED and self.module.startswith(GPU_MODULES)

    @property
    def evidence(self) -> Evidence:
        """Return the fact as evidence."""
        metric = MACHINE_CHECK if self.what == MACHINE_CHECK else "host_error"
        return Evidence(metric, self.node, self.device if self.device >= 0 else None, self.said[:160] or self.what)

    @property
    def named(self) -> str:
        """Return the fact as text for display."""
        part = f" ({self.link or self.part})" if self.link or self.part else ""
        known = BY_NAME.get(self.what)
        if not self.in_driver:
            return f"{known.meaning if known is not None else 'the kernel reports ' + self.what}{part} on {self.node}"
        held = f", its lock held by {self.holder}" if self.holder else ""
        return f"a task{part} is blocked inside the GPU driver ({self.module}{held}) on {self.node}"


def host_errors(window: Window) -> list[KernelFact]:
    """Return the host facts reported by kernels of this attempt's members, oldest first; each once per node."""
    found: dict[tuple[str, str, str], KernelFact] = {}
    for event in window.events:
        if event.kind != "host_error" or event.node is None or event.node not in window.nodes:
            continue
        known = BY_NAME.get(text(event.attributes, "what"))
        if known is not None and known.kind not in NO_GPUS:
            continue
        if event.time_s >= window.started_s - BEFORE_START_S:
            fact = _fact(event, event.node)
            key = (fact.node, fact.what, fact.part)
            if key not in found or fact.time_s < found[key].time_s:
                found[key] = fact
    return sorted(found.values(), key=lambda fact: (fact.began_s, fact.node, fact.what, fact.part))


def _fact(event: WindowEvent, node: str) -> KernelFact:
    said = event.attributes
    what, part, link = text(said, "what"), text(said, "device"), text(said, "link")
    judgement = judged(event.kind, said, event.device)
    repair = judgement.repair if judgement is not None else "none"
    module, holder = text(said, "module"), text(said, "holder")
    return KernelFact(node, event.device, what, part, link, text(said, "text"), event.time_s, repair, module, holder)


def may_have_stopped(window: Window, stop: Standstill, fact: KernelFact) -> bool:
    """Whether a fact may be why the job stopped: of a stopping kind, before the stop, of a part that the job uses."""
    known = BY_NAME.get(fact.what)
    if known is None or known.kind != "part" or fact.began_s > stop.died_s:
        return False
    if not (stop.beside(fact.node, fact.began_s) or stop.beside(fact.node, fact.time_s)):
        return False
    if fact.what == DISK:
        # A rank that hangs on its disk is found as such; one that ended on this node is told apart from its peers'
        # echoes.
        causes = {item.node for item in stop.exits if item.cause}
        return any(item.node == fact.node for item in stop.exits) and causes <= {fact.node}
    return fact.what not in NETWORK or not _is_unused(window, fact)


def _is_unused(window: Window, fact: KernelFact) -> bool:
    """Whether the fact's port is known to carry almost nothing compared with the node's busiest port."""
    own = [port for port, link in enumerate(window.links) if link.node == fact.node]
    mine = [port for port in own if window.links[port].link == fact.link]
    rates = [
        window.link[name] for name in ("link_rx_bytes_per_second", "link_tx_bytes_per_second") if name in window.link
    ]
    if not mine or not rates or not len(window.link_times_s):
        return False
    most = np.fmax.reduce([np.fmax.reduce(values, axis=0) for values in rates])
    busiest = float(np.fmax.reduce(most[own]))
    return busiest > 0 and bool(np.fmax.reduce(most[mine]) < UNUSED_RATIO * busiest)
