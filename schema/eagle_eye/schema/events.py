"""The table of event kinds, and the record of one event."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

WHOLE_NODE = -1  # the device of an event or row that concerns the whole node


class EventSpec(NamedTuple):
    """One kind of event: its attributes and meaning."""

    kind: str
    attributes: tuple[str, ...]
    help: str


EVENTS: tuple[EventSpec, ...] = (
    EventSpec("xid", ("code", "text"), "NVIDIA driver error by its XID code."),
    EventSpec("sxid", ("code", "text"), "NVSwitch error by its SXID code."),
    EventSpec(
        "process_exit",
        ("exit_code", "rank", "pid", "goodbye", "job", "attempt"),
        "A training process ended. exit_code is negative for a signal, null when nobody could read it;"
        " goodbye says whether the process announced its end.",
    ),
    EventSpec("oom_kill", ("process",), "The kernel killed a process for memory."),
    EventSpec("link_down", ("link",), "A link went down."),
    EventSpec("link_up", ("link",), "A link came up."),
    EventSpec("gpu_lost", ("uuid",), "A GPU left the bus."),
    EventSpec(
        "inventory",
        ("uuid", "model", "pci_address", "serial", "gpus", "nvlinks"),
        "Which GPU is the device: one for each, when the agent starts, when one comes or goes or its links change (then"
        " once a minute at most), and every hour. gpus says how many there are in all, nvlinks how many of the GPU are"
        " up.",
    ),
    EventSpec("machine_check", ("text",), "A machine check exception."),
    EventSpec(
        "host_error",
        ("what", "device", "link", "text", "module", "holder"),
        "The kernel, or a GPU's driver otherwise than by an XID, says that the host or one of its devices fails. what:"
        " nic_failed, nic_stalled, pcie_fatal, device_gone, cpu_stuck, task_blocked (module: the kernel module that it"
        " waits in, holder: the task that holds the lock), disk_failed, disk_errors, storage_silent, gpu_unusable,"
        " gpu_lost, gpu_reset_required, gpu_reboot_required, gpu_drain_p2p, gpu_drain_and_reset, gpu_repaired,"
        " gpu_firmware_silent, gpu_hardware_error, gpu_memory_failed, nvlink_broken, fabric_failed, fabric_degraded.",
    ),
    EventSpec("kernel_panic", ("text",), "The kernel panicked before the last boot."),
    EventSpec("checkpoint_begin", ("step",), "A rank began to write a checkpoint."),
    EventSpec("checkpoint_end", ("step",), "A rank finished writing a checkpoint."),
    EventSpec(
        "checkpoint_stuck",
        ("step", "job", "text"),
        "The node has not brought a step from memory to storage for ten minutes.",
    ),
    EventSpec(
        "phase",
        ("name", "rank", "job", "attempt"),
        "A rank entered a phase: start, train, eval, checkpoint, ...",
    ),
    EventSpec(
        "training_error",
        ("text", "rank", "job", "attempt"),
        "An exception or an abort ended the training program of a rank; the text has its last words.",
    ),
    EventSpec(
        "nccl_warning",
        ("text", "rank", "job", "attempt"),
        "NCCL warned in a rank's log: of a peer, a port, a device that failed. It blames nobody by itself.",
    ),
    EventSpec("agent_start", ("version",), "The agent started."),
    EventSpec("agent_stop", ("reason",), "The agent said goodbye; its silence is no fault."),
    EventSpec("job_state", ("state", "attempt"), "The scheduler's word on the job."),
)

BY_KIND = MappingProxyType({spec.kind: spec for spec in EVENTS})


class Event(msgspec.Struct, frozen=True):
    """One event on a node.

    ``time_s`` is Unix seconds by the node's clock. ``device`` is -1 for the node as a whole.
    """

    time_s: float
    kind: str
    device: int = WHOLE_NODE
    attributes: dict[str, Any] = {}
