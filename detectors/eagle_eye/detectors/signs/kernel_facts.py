"""Facts that the kernels of a job's nodes report about hosts and devices, each once, and their effect on a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from eagle_eye.detectors.signs.attributes import text
from eagle_eye.detectors.signs.gpu_errors import BEFORE_START_S
from eagle_eye.detectors.signs.stop import Standstill
from eagle_eye.detectors.types import Evidence, Window, WindowEvent

# Display text of each fact.
MEANINGS = MappingProxyType(
    {
        "nic_failed": "a network adapter has failed",
        "nic_stalled": "a network adapter does not answer",
        "pcie_fatal": "a fatal PCIe error",
        "device_gone": "a PCIe device is gone",
        "gpu_unusable": "a GPU could not be brought up",
        "cpu_stuck": "a CPU is stuck",
        "task_blocked": "a task is blocked",
        "disk_failed": "a disk or its filesystem has failed",
        "disk_errors": "a disk reports errors",
        "storage_silent": "storage does not answer",
        "machine_check": "a machine check was not corrected",
    }
)
NETWORK, DISK, LOCKUP = ("nic_failed", "nic_stalled"), "disk_failed", "cpu_stuck"
# Facts that stop a job by themselves. Blocked tasks, disk errors and silent storage occur on healthy busy nodes.
STOPPING = frozenset({*NETWORK, DISK, LOCKUP, "pcie_fatal", "device_gone", "gpu_unusable", "machine_check"})
STORAGE = ("storage_silent",)
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
    """One fact reported by a node's kernel, by its first line; ``link`` "": none named, or not a port."""

    node: str
    device: int
    what: str
    part: str
    link: str
    said: str
    time_s: float

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
        return self.what in STORAGE or (self.what == "task_blocked" and bool(_IN_STORAGE.search(self.said)))

    @property
    def evidence(self) -> Evidence:
        """Return the fact as evidence."""
        metric = "machine_check" if self.what == "machine_check" else "host_error"
        return Evidence(metric, self.node, self.device if self.device >= 0 else None, self.said[:160] or self.what)

    @property
    def named(self) -> str:
        """Return the fact as text for display."""
        part = f" ({self.link or self.part})" if self.link or self.part else ""
        return f"{MEANINGS.get(self.what, 'the kernel reports ' + self.what)}{part} on {self.node}"


def host_errors(window: Window) -> list[KernelFact]:
    """Return the host facts reported by kernels of this attempt's members, oldest first; each once per node."""
    found: dict[tuple[str, str, str], KernelFact] = {}
    for event in window.events:
        if event.kind != "host_error" or event.node is None or event.node not in window.nodes:
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
    return KernelFact(node, event.device, what, part, link, text(said, "text"), event.time_s)


def may_have_stopped(window: Window, stop: Standstill, fact: KernelFact) -> bool:
    """Whether a fact may be why the job stopped: of a stopping kind, before the stop, of a part that the job uses."""
    if fact.what not in STOPPING or fact.began_s > stop.died_s:
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
