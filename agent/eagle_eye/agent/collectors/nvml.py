"""NVIDIA GPUs through the driver's management library (NVML)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from eagle_eye.agent.collector import CollectFailed, Observed, Unsupported
from eagle_eye.schema.events import Event

# Answers that will not change while the driver is loaded: the field is left out of the device's row for life.
_NEVER = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
_ECC_VOLATILE = pynvml.NVML_VOLATILE_ECC


class _Field(NamedTuple):
    """One reading of a device: a function of its handle, and the metrics that it yields."""

    name: str
    read: Callable[[Any], dict[str, float]]


def _utilization(handle: Any) -> dict[str, float]:
    return {"gpu_utilization_ratio": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0}


def _memory(handle: Any) -> dict[str, float]:
    return {"gpu_memory_used_bytes": float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)}


def _power(handle: Any) -> dict[str, float]:
    return {"gpu_power_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3}


def _power_limit(handle: Any) -> dict[str, float]:
    return {"gpu_power_limit_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3}


def _temperature(handle: Any) -> dict[str, float]:
    celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    return {"gpu_temperature_celsius": float(celsius)}


def _sm_clock(handle: Any) -> dict[str, float]:
    return {"gpu_sm_clock_hertz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6}


def _memory_clock(handle: Any) -> dict[str, float]:
    return {"gpu_memory_clock_hertz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM) * 1e6}


def _throttle_reasons(handle: Any) -> dict[str, float]:
    try:
        reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 535 know the old name only
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"gpu_throttle_reasons": float(reasons)}


def _ecc_corrected(handle: Any) -> dict[str, float]:
    kind = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    return {"gpu_ecc_corrected_total": float(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, _ECC_VOLATILE))}


def _ecc_uncorrected(handle: Any) -> dict[str, float]:
    kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return {"gpu_ecc_uncorrected_total": float(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, _ECC_VOLATILE))}


def _remapped_rows(handle: Any) -> dict[str, float]:
    corrected, uncorrected, pending, _failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {"gpu_remapped_rows_total": float(corrected + uncorrected), "gpu_remap_pending": float(bool(pending))}


def _pcie_width(handle: Any) -> dict[str, float]:
    return {"gpu_pcie_link_width": float(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle))}


def _pcie_generation(handle: Any) -> dict[str, float]:
    return {"gpu_pcie_link_generation": float(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))}


def _pcie_replays(handle: Any) -> dict[str, float]:
    return {"gpu_pcie_replays_total": float(pynvml.nvmlDeviceGetPcieReplayCounter(handle))}


def _pcie_rx(handle: Any) -> dict[str, float]:
    kilobytes = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    return {"gpu_pcie_rx_bytes_per_second": kilobytes * 1e3}


def _pcie_tx(handle: Any) -> dict[str, float]:
    kilobytes = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    return {"gpu_pcie_tx_bytes_per_second": kilobytes * 1e3}


def _memory_temperature(handle: Any) -> dict[str, float]:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_MEMORY_TEMP])[0]
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return {"gpu_memory_temperature_celsius": float(value.value.uiVal)}


def _nvlinks(handle: Any) -> dict[str, float]:
    states = [_nvlink_state(handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    if all(state is None for state in states):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return {"gpu_nvlinks_active": float(states.count(pynvml.NVML_FEATURE_ENABLED))}


def _nvlink_state(handle: Any, link: int) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
        return None  # this device has fewer links, or leaves this one unused


_FIELDS = (
    _Field("utilization", _utilization),
    _Field("memory", _memory),
    _Field("power", _power),
    _Field("power limit", _power_limit),
    _Field("temperature", _temperature),
    _Field("memory temperature", _memory_temperature),
    _Field("SM clock", _sm_clock),
    _Field("memory clock", _memory_clock),
    _Field("throttle reasons", _throttle_reasons),
    _Field("corrected ECC errors", _ecc_corrected),
    _Field("uncorrected ECC errors", _ecc_uncorrected),
    _Field("remapped rows", _remapped_rows),
    _Field("PCIe width", _pcie_width),
    _Field("PCIe generation", _pcie_generation),
    _Field("PCIe replays", _pcie_replays),
    _Field("PCIe receive", _pcie_rx),
    _Field("PCIe send", _pcie_tx),
    _Field("NVLinks", _nvlinks),
)


class _Device:
    """One GPU: its handle, its names, and the fields that it still has."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.uuid = str(pynvml.nvmlDeviceGetUUID(self.handle))
        self.bus_id = str(pynvml.nvmlDeviceGetPciInfo(self.handle).busId)
        self.fields = list(_FIELDS)
        self.lost = False

    def read(self) -> tuple[dict[str, float], str, bool]:
        """Return the row, what went wrong (empty: nothing), and whether NVML calls the device lost."""
        row: dict[str, float] = {}
        problem = ""
        for field in list(self.fields):
            error = self._read_field(field, row)
            if error is None:
                continue
            if error.value in _NEVER:
                self.fields.remove(field)
                continue
            problem = problem or f"gpu {self.index}: {field.name}: {error}"
            if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                return row, problem, True
        return row, problem, False

    def _read_field(self, field: _Field, row: dict[str, float]) -> Any:
        """Add the field to the row; return NVML's error, None when there was none."""
        try:
            row.update(field.read(self.handle))
        except pynvml.NVMLError as error:
            return error
        return None


class NvmlCollector:
    """A row for each GPU, keyed by NVML's index.

    A field that a device does not support is left out for life; one that fails is left out this time, named
    in ``problem``, and does not take the rest with it. Throughput over PCIe is measured by the driver over
    20 ms for each direction, during which the call waits.
    """

    name = "nvml"

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self.devices_by_uuid: dict[str, int] = {}  # filled when NVML answers; others look their GPU up in it
        self.devices_by_bus_id: dict[str, int] = {}  # likewise, by PCI address as NVML writes it
        self._sys = sys
        self._devices: list[_Device] | None = None

    def collect(self, now_s: float) -> Observed:
        """Return the GPUs' rows. Raises Unsupported without the library or a GPU, CollectFailed while NVML fails."""
        if self._devices is None:
            self._devices = self._open()
        observed = Observed()
        problems: list[str] = []
        for device in self._devices:
            row, problem, lost = device.read()
            if row:
                observed.devices[device.index] = row
            if problem:
                problems.append(problem)
            if lost and not device.lost and self._off_the_bus(device.bus_id):
                device.lost = True
                observed.events.append(Event(now_s, "gpu_lost", device.index, {"uuid": device.uuid}))
        observed.problem = "; ".join(problems)
        if problems and not observed.devices:
            self.close()  # the driver may have been reloaded: begin again
            raise CollectFailed(observed.problem)
        return observed

    def close(self) -> None:
        """Let go of the library."""
        if self._devices is not None:
            self._devices = None
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return  # the library is gone already

    def _open(self) -> list[_Device]:
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_FunctionNotFound) as error:
            raise Unsupported(f"no usable libnvidia-ml.so.1: {error}") from None
        except pynvml.NVMLError as error:
            raise CollectFailed(f"nvmlInit: {error}") from None
        try:
            devices = [_Device(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise CollectFailed(f"GPUs cannot be listed: {error}") from None
        if not devices:
            pynvml.nvmlShutdown()
            raise Unsupported("NVML sees no GPU")
        self.devices_by_uuid.update({device.uuid: device.index for device in devices})
        self.devices_by_bus_id.update({device.bus_id: device.index for device in devices})
        return devices

    def _off_the_bus(self, bus_id: str) -> bool:
        """Whether the PCI device is really gone: NVML also says so during resets and diagnostics."""
        domain, _, rest = bus_id.lower().partition(":")
        config = self._sys / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "config"
        try:
            with config.open("rb") as file:
                return file.read(4) == b"\xff\xff\xff\xff"
        except OSError:
            return True
