"""The faults: every name that a verdict may carry, what it means, what tells it apart, repair and default action."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

Repair = Literal["reset_gpu", "reboot", "replace", "inspect", "none"]
DefaultAction = Literal["exclude_node", "restart_job", "drain_node", "checkpoint_now", "notify", "none"]


class Fault(NamedTuple):
    """One fault: its name, what it means, the evidence that tells it from others, repair and action."""

    name: str
    meaning: str
    evidence: str
    repair: Repair
    action: DefaultAction


FAULTS: tuple[Fault, ...] = (
    Fault(
        "node_unreachable",
        "A node of the job is silent and the job has stopped.",
        "No frame from the agent and no goodbye, while the other nodes report that no step finishes or that"
        " their ranks have lost a peer. A silent node whose job goes on is only told of.",
        "reboot",
        "exclude_node",
    ),
    Fault(
        "process_crash",
        "A training process ended by itself.",
        "A rank's exit by a signal or with an error that is not the echo of a peer's death.",
        "none",
        "restart_job",
    ),
    Fault(
        "out_of_memory",
        "The kernel killed a training process for memory.",
        "The kernel's OOM kill together with a rank's exit by SIGKILL.",
        "none",
        "restart_job",
    ),
    Fault(
        "hang",
        "No step finishes although the job's own history says that one should have.",
        "The culprit's process says nothing, or it lags in collective sequence while its peers wait in the"
        " collective that it has not reached.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "straggler",
        "One node makes every step of the job longer.",
        "Its compute time is above its peers' and it arrives last, so that it waits least in collectives.",
        "inspect",
        "exclude_node",
    ),
    Fault(
        "loss_not_finite",
        "The loss or the gradient norm is NaN or infinite on all ranks, and no rank was first.",
        "Not finite everywhere at once, local gradients finite before: the data, the program or the precision.",
        "none",
        "restart_job",
    ),
    Fault(
        "silent_data_corruption",
        "A node computes wrong numbers without any error.",
        "Its gradient was not finite before the reduction in a step whose loss was finite, its peers' was.",
        "replace",
        "exclude_node",
    ),
)

BY_NAME = MappingProxyType({fault.name: fault for fault in FAULTS})
