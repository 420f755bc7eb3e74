"""Builds the agent's collectors: which ones run, in which order, and what they share. Wiring only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eagle_eye.agent.clock import Clock, Waitable
from eagle_eye.agent.collector import CollectFailed, Collector, CollectorRunner, Drops, Observed, Unsupported
from eagle_eye.agent.collectors.clock_offset import ClockOffsetCollector
from eagle_eye.agent.collectors.dcgm_exporter import DcgmExporterCollector
from eagle_eye.agent.collectors.flight_recorder import FlightRecorderCollector
from eagle_eye.agent.collectors.host import HostCollector, TemperatureCollector
from eagle_eye.agent.collectors.kernel_log import KernelLogCollector
from eagle_eye.agent.collectors.memory_checkpoint import MemoryCheckpointCollector
from eagle_eye.agent.collectors.mounts import ANSWER_S, MountsCollector
from eagle_eye.agent.collectors.nccl_inspector import NcclInspectorCollector
from eagle_eye.agent.collectors.nccl_ras import NcclRasCollector
from eagle_eye.agent.collectors.network_ports import FabricCollector
from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.agent.collectors.processes import GpuDriver, HookedProcesses, ProcessesCollector
from eagle_eye.agent.collectors.tensorboard import TensorBoardCollector
from eagle_eye.agent.collectors.training import TrainingCollector
from eagle_eye.agent.collectors.training_log import TrainingLogCollector
from eagle_eye.agent.config import (
    AgentConfiguration,
    hook_socket_path,
    log_frameworks,
    log_patterns,
    tensorboard_patterns,
)
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses

PLACES_CHECKED_S = 0.1  # a one-shot check cannot wait until the driver has listed its GPUs
FIND_S = 15.0  # without a GPU, a hook and torch's launcher a process counts as a rank once it has lasted ten seconds
FIND_EVERY_S = 1.0


class Assembly:
    """All collectors of a host, each in its runner.

    ``state_folder`` None: keep no state between runs and read the kernel log from boot. ``wake`` is called for events
    that must not wait for the end of the interval.
    """

    def __init__(
        self,
        configuration: AgentConfiguration,
        drops: Drops,
        clock: Clock,
        wake: Callable[[], None],
        state_folder: Path | None,
        processes: TrainingProcesses,
        beside: Sequence[Collector] = (),
    ) -> None:
        """``processes`` is updated with the training processes found; ``beside`` are the caller's own collectors."""
        self.nvml = NvmlCollector(self._kernel_log_is_read)
        uuids, bus_ids = self.nvml.devices_by_uuid, self.nvml.devices_by_bus_id
        self.training = TrainingCollector(hook_socket_path(configuration), drops, wake, uuids)
        self._found = ProcessesCollector(
            processes,
            drops,
            driver=GpuDriver(self.nvml.compute_processes, uuids, bus_ids),
            hooks=HookedProcesses(self.training.pids, self.training.attempts),
            node=configuration.node,
            shared_host=configuration.shared_host,
            wake=wake,
        )
        self._logs = TrainingLogCollector(
            processes,
            drops,
            log_patterns(configuration),
            self.training.devices,
            frameworks=log_frameworks(configuration),
        )
        tensorboard = TensorBoardCollector(
            processes,
            drops,
            tensorboard_patterns(configuration),
            lambda: self.training.devices() | {*self._logs.steps},
        )
        folders = [Path(folder) for folder in configuration.nccl_inspector_folders]
        inspector = NcclInspectorCollector(processes, drops, folders, uuids, self._finished_step)
        ras = NcclRasCollector(
            processes,
            drops,
            configuration.nccl_ras_ports,
            configuration.nccl_ras_every_s,
            every_node=configuration.nccl_ras_every_node,
            taken=inspector.tells_of,
        )
        recorder = FlightRecorderCollector(
            processes,
            drops,
            configuration.flight_recorder_prefixes,
            configuration.flight_recorder_pipe_prefixes,
            taken=inspector.tells_of,
        )
        exporters: list[Collector] = []
        if configuration.dcgm_exporter:
            exporters.append(DcgmExporterCollector(configuration.dcgm_exporter, uuids, drops))
        kernel_log = KernelLogCollector(drops, bus_ids, state_folder)
        # Where two collectors report the same metric of one row, the later one wins: NVML over an exporter, the hook
        # over all others.
        collectors: Sequence[Collector] = (
            HostCollector(),
            MountsCollector(),
            ClockOffsetCollector(),
            TemperatureCollector(),
            FabricCollector(state_folder),
            kernel_log,
            *exporters,
            self.nvml,
            self._found,
            tensorboard,
            self._logs,
            inspector,
            ras,
            recorder,
            MemoryCheckpointCollector(processes, self._finished_step),
            self.training,
            *beside,
        )
        self.runners = tuple(CollectorRunner(collector, drops, clock.monotonic_s) for collector in collectors)
        self._kernel_log = next(runner for runner in self.runners if runner.collector is kernel_log)

    def happened(self) -> Observed:
        """Return ranks and events that occurred between two ticks, without rows."""
        news, found = self.training.happened(), self._found.happened()
        return Observed(events=news.events + found.events, ranks=news.ranks + found.ranks)

    def close(self) -> None:
        """Close every collector, except those that hang in a call."""
        for runner in self.runners:
            runner.close()

    def _kernel_log_is_read(self) -> bool:
        return self._kernel_log.state == "ok"

    def _finished_step(self, process: TrainingProcess) -> float | None:
        step = self.training.step(process.pid)
        return step if step is not None else self._logs.steps.get(process.device)


def host_collectors(drops: Drops, state_folder: Path | None) -> tuple[Collector, ...]:
    """Return the collectors of the host's own facts since boot, for a verdict on it; they change nothing."""
    nvml = NvmlCollector(for_verdict=True)
    return (
        MountsCollector(patience_s=2 * ANSWER_S),
        FabricCollector(state_folder),
        KernelLogCollector(drops, nvml.devices_by_bus_id, places_s=PLACES_CHECKED_S, to_the_end=True),
        nvml,
    )


def found_processes(drops: Drops, clock: Clock, wake: Waitable) -> tuple[TrainingProcess, ...]:
    """Return this host's training processes; retries until there are some, up to FIND_S, or until ``wake`` is set."""
    processes = TrainingProcesses()
    nvml = NvmlCollector()
    driver = GpuDriver(nvml.compute_processes, nvml.devices_by_uuid, nvml.devices_by_bus_id)
    found = ProcessesCollector(processes, drops, driver=driver)
    until_s = clock.monotonic_s() + FIND_S
    try:
        while True:
            with suppress(Unsupported, CollectFailed):  # a host without GPUs has training processes too
                nvml.collect(clock.now_s())
            found.collect(clock.now_s())
            if processes.all() or clock.monotonic_s() >= until_s or clock.wait(wake, FIND_EVERY_S):
                return processes.all()
    finally:
        found.close()
        nvml.close()
