"""All faults and harmless look-alike situations, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from eagle_eye.simulator.faults import died, learning, lost, shared, slow, stuck
from eagle_eye.simulator.situations import facility, job_control, observers, pauses, work
from eagle_eye.simulator.story import Story


class Teller(NamedTuple):
    """Tells a story's causes; the docstring says what they are."""

    name: str
    tell: Callable[[Story], None]

    @property
    def help(self) -> str:
        """The first sentence of the docstring."""
        return (self.tell.__doc__ or "").strip().splitlines()[0]


def healthy(story: Story) -> None:
    """Nothing but training."""
    del story


def _named(*tellers: Callable[[Story], None]) -> dict[str, Teller]:
    return {tell.__name__: Teller(tell.__name__, tell) for tell in tellers}


FAULTS = {
    "none": Teller("none", healthy),
    **_named(
        lost.gpu_lost,
        died.gpu_memory_error,
        stuck.gpu_hang,
        stuck.hang,
        stuck.network_hang,
        lost.node_unreachable,
        learning.silent_data_corruption,
        slow.straggler,
        slow.thermal_throttle,
        slow.power_throttle,
        slow.pcie_degraded,
        slow.nic_degraded,
        slow.nvlink_degraded,
        slow.cpu_contention,
        died.process_crash,
        died.out_of_memory,
        learning.loss_not_finite,
        learning.loss_divergence,
        learning.loss_spike,
        shared.switch_down,
        shared.network_congestion,
        shared.storage_stall,
        shared.workload_imbalance,
        shared.throughput_drop,
        died.recurrent_node,
    ),
}

SITUATIONS = _named(
    pauses.checkpoint,
    pauses.long_checkpoint,
    pauses.evaluation,
    pauses.lone_pause,
    pauses.short_steps_pause,
    pauses.storage_stall_short,
    pauses.data_loader_hiccup,
    pauses.periodic_gc,
    work.packed_sequences,
    work.uneven_last_stage,
    work.hot_expert,
    work.long_documents,
    work.batch_size_change,
    work.mixed_gpu_models,
    job_control.warm_up,
    job_control.restart,
    job_control.scancel,
    job_control.preempted,
    job_control.elastic_leave,
    observers.benign_xids,
    observers.corrected_errors,
    observers.agent_restart,
    observers.agent_silent,
    observers.clock_skew,
    observers.ntp_step,
    facility.congestion_burst,
    facility.hot_node,
    facility.link_flap,
    facility.rack_power_cap,
    facility.diurnal_heat,
)
