"""All faults and harmless look-alike situations, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from eagle_eye.simulator import faults, situations
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
        faults.gpu_lost,
        faults.gpu_memory_error,
        faults.gpu_hang,
        faults.hang,
        faults.network_hang,
        faults.node_unreachable,
        faults.silent_data_corruption,
        faults.straggler,
        faults.thermal_throttle,
        faults.power_throttle,
        faults.pcie_degraded,
        faults.nic_degraded,
        faults.nvlink_degraded,
        faults.cpu_contention,
        faults.process_crash,
        faults.out_of_memory,
        faults.loss_not_finite,
        faults.loss_divergence,
        faults.loss_spike,
        faults.switch_down,
        faults.network_congestion,
        faults.storage_stall,
        faults.workload_imbalance,
        faults.throughput_drop,
        faults.recurrent_node,
    ),
}

SITUATIONS = _named(
    situations.checkpoint,
    situations.long_checkpoint,
    situations.evaluation,
    situations.lone_pause,
    situations.short_steps_pause,
    situations.storage_stall_short,
    situations.data_loader_hiccup,
    situations.periodic_gc,
    situations.packed_sequences,
    situations.uneven_last_stage,
    situations.hot_expert,
    situations.long_documents,
    situations.batch_size_change,
    situations.mixed_gpu_models,
    situations.warm_up,
    situations.restart,
    situations.scancel,
    situations.preempted,
    situations.elastic_leave,
    situations.benign_xids,
    situations.corrected_errors,
    situations.agent_restart,
    situations.agent_silent,
    situations.clock_skew,
    situations.ntp_step,
    situations.congestion_burst,
    situations.hot_node,
    situations.link_flap,
    situations.rack_power_cap,
    situations.diurnal_heat,
)
