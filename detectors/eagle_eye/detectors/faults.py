"""The fault catalogue: every name a verdict may carry, with meaning, evidence, repair and default action."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

Repair = Literal["reset_gpu", "reboot", "replace", "inspect", "none"]
DefaultAction = Literal["exclude_node", "restart_job", "drain_node", "checkpoint_now", "notify", "none"]
# The kind of trouble a fault makes: it stops the job, corrupts its numbers, slows it through one node, slows it as a
# whole, or predicts a later failure. Within one kind, the cause explains the symptoms.
Trouble = Literal["stop", "numbers", "slow", "pace", "early"]
# The minimum that a restart must renew: the communicators of surviving processes, those plus the culprit's processes,
# or every process.
RestartScope = Literal["process_group", "rank", "job"]


class Fault(NamedTuple):
    """One fault: its name, kind of trouble, meaning, distinguishing evidence, repair and default action.

    ``restart_scope`` is the smallest restart that is safe after it.
    """

    name: str
    trouble: Trouble
    meaning: str
    evidence: str
    repair: Repair
    action: DefaultAction
    restart_scope: RestartScope = "job"


# In causal order: of several faults that explain one problem, the first is the cause and the others are symptoms.
FAULTS: tuple[Fault, ...] = (
    Fault(
        "switch_down",
        "stop",
        "A switch or rail is down: all that hangs on it is cut off.",
        "Most ports or nodes of one switch, and few others, lost their link or fell silent at once.",
        "inspect",
        "notify",
    ),
    Fault(
        "gpu_lost",
        "stop",
        "A GPU has left the PCIe bus.",
        "XID 79, NVML's code for a lost GPU, or the PCI device gone. An NVML that does not answer is not enough.",
        "reboot",
        "exclude_node",
    ),
    Fault(
        "gpu_memory_error",
        "stop",
        "A GPU's memory is failing.",
        "Uncontained or uncorrected ECC errors (XID 48, 64, 95, 140, or the counter). A contained error (XID 94)"
        " restarts the job; a pending remap or rising corrected errors ask for a planned replacement.",
        "reset_gpu",
        "exclude_node",
    ),
    Fault(
        "gpu_hang",
        "stop",
        "A GPU, its driver or its firmware has stopped working.",
        "XID 46, 62, 109, 119, 120 and their like, a fatal error of an NVLink (XID 74, 144 to 150) just before the job"
        " stopped, or a device that stopped answering while its job stands still.",
        "reset_gpu",
        "exclude_node",
    ),
    Fault(
        "host_errors",
        "stop",
        "A node's host or one of its devices has failed by its kernel's word, and the job stopped with it.",
        "An uncorrected machine check, a fatal PCIe error, a device gone, a CPU that is stuck or a disk that died,"
        " shortly before the job stopped. Without harm to the job it is reported, or drained.",
        "reboot",
        "exclude_node",
    ),
    Fault(
        "node_unreachable",
        "stop",
        "A node of the job is silent and the job has stopped.",
        "No frame from the agent and no goodbye, while the other nodes report that no step finishes or that"
        " their ranks have lost a peer. A silent node whose job goes on is only reported.",
        "reboot",
        "exclude_node",
    ),
    Fault(
        "silent_data_corruption",
        "numbers",
        "A node computes wrong numbers without any error.",
        "Its gradient or parameter checksum differed before the reduction from what its peers had, again and again"
        " on the same node, or was not finite in a step whose loss was.",
        "replace",
        "exclude_node",
    ),
    Fault(
        "out_of_memory",
        "stop",
        "A training process ran out of memory.",
        "The kernel's OOM kill together with a rank's exit by SIGKILL or its silence, or the program's own word that an"
        " allocation failed.",
        "none",
        "restart_job",
    ),
    Fault(
        "network_hang",
        "stop",
        "The job stands still because a node's network does not carry its collectives.",
        "All ranks wait in the same collective, and one node's port is down, or it alone counts errors and has not"
        " completed what its peers have, or sends nothing; or it alone could not reach the others as the attempt"
        " started.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "application_error",
        "stop",
        "The training program ends attempt after attempt with the same exception; no restart helps.",
        "The same type and place of an exception on most ranks in two attempts, the second no later in training; never"
        " one that a peer, a device, memory, the network, storage or a signal may have caused.",
        "none",
        "notify",
    ),
    Fault(
        "process_crash",
        "stop",
        "A training process ended by itself.",
        "A rank's exit by a signal or with an error that is not the echo of a peer's death.",
        "none",
        "restart_job",
        "process_group",  # the process is gone already, and nothing indicates bad state in its node or its peers
    ),
    Fault(
        "hang",
        "stop",
        "No step finishes although the job's own history says that one should have.",
        "The culprit's process says nothing, or it lags in collective sequence while its peers wait in the"
        " collective that it has not reached.",
        "inspect",
        "exclude_node",
        "rank",  # its peers wait in the collective until the culprit's process has ended
    ),
    Fault(
        "loss_not_finite",
        "numbers",
        "The loss or the gradient norm is NaN or infinite on all ranks, or the loss suddenly exactly zero, and no rank"
        " was first.",
        "Not finite everywhere at once, local gradients finite before: the data, the program or the precision. Where"
        " the loss is zero and the gradient norm finite, it is only reported.",
        "none",
        "restart_job",
    ),
    Fault(
        "loss_divergence",
        "numbers",
        "The loss has risen and stays up.",
        "The loss lies far above its own recent course on all ranks, step after step, without coming back. Less than"
        " twice its level without the gradient norm may be other data: it is only reported.",
        "none",
        "restart_job",
    ),
    Fault(
        "loss_spike",
        "numbers",
        "The loss or gradient norm jumped for a few steps.",
        "Far above its own recent course on all ranks alike: the data, until it repeats.",
        "none",
        "notify",
    ),
    Fault(
        "thermal_throttle",
        "slow",
        "A GPU is slow because it is hot.",
        "SM clock below its peers' with the thermal throttle bit or a temperature at the limit, and power down.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "power_throttle",
        "slow",
        "A GPU is slow because its power is capped.",
        "SM clock and power below its peers' with the power brake or cap bit or a lower power limit, and not hot.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "pcie_degraded",
        "slow",
        "A GPU's PCIe link has lost width or speed.",
        "Link width or generation below its peers', or replays, with less traffic over the link under the same load.",
        "reboot",
        "exclude_node",
    ),
    Fault(
        "nvlink_degraded",
        "slow",
        "A GPU's NVLinks have failed or lost bandwidth.",
        "Fewer active links or more errors than its peers', or XID 74 without the job's end.",
        "reset_gpu",
        "exclude_node",
    ),
    Fault(
        "nic_degraded",
        "slow",
        "A node's network adapter or cable is slow or failing.",
        "Its ports carry less than its peers' or show errors or flaps, its switch's other nodes do not.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "cpu_contention",
        "slow",
        "Something else takes the CPUs of a node that its training needs.",
        "CPU utilisation, pressure or steal above its peers' while all its GPUs wait, clocks and temperatures normal.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "straggler",
        "slow",
        "One node makes every step of the job longer.",
        "Its compute time is above its peers' for equal work; it waits least in collectives, or it was faster before;"
        " or it alone waits for its data, and its host shows why.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "network_congestion",
        "pace",
        "The network between nodes is overloaded.",
        "Congestion notifications or pauses on many nodes, or on one switch's, and longer collectives for all.",
        "none",
        "notify",
    ),
    Fault(
        "storage_stall",
        "pace",
        "The storage does not deliver.",
        "I/O wait, I/O pressure or blocked tasks on many nodes, and long waits for data or checkpoints.",
        "none",
        "notify",
    ),
    Fault(
        "workload_imbalance",
        "pace",
        "Steps are long because work is uneven, not because a node is bad.",
        "The slowest rank changes from step to step, or a whole pipeline stage is longer than the others.",
        "none",
        "notify",
    ),
    Fault(
        "throughput_drop",
        "pace",
        "The job as a whole has become slower.",
        "A lasting change in step time against the job's own history, on all nodes alike.",
        "none",
        "notify",
    ),
    Fault(
        "recurrent_node",
        "early",
        "A node fails again and again, across restarts and jobs.",
        "More incidents in which it was the culprit than its time in use explains.",
        "inspect",
        "drain_node",
    ),
    Fault(
        "node_anomaly",
        "early",
        "A learned model finds a node unlike its own past and its peers; no rule names it.",
        "The model's score far above that of the site's healthy history. It asks for a look and never acts alone.",
        "inspect",
        "notify",
    ),
)

BY_NAME = MappingProxyType({fault.name: fault for fault in FAULTS})
CAUSE_ORDER = MappingProxyType({fault.name: place for place, fault in enumerate(FAULTS)})
