"""Documented limits and capabilities of GPU types, each figure with its public source. Pure.

A figure that has not been published is None, and a device whose name is not in the table has no type; callers must
handle both as unknown. Names are full NVML names (``nvmlDeviceGetName``): a similar name (a simulated GPU, a custom
board) may be another device.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class PublishedFigure(NamedTuple):
    """One documented value and its source; the unit is in the name of the field that holds it."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """An NVLink domain that spans nodes: its number of GPUs, of nodes (compute trays) and of switch trays."""

    name: str
    gpus: PublishedFigure
    compute_trays: PublishedFigure | None = None  # each is a node
    switch_trays: PublishedFigure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """Documented properties of the devices with one of ``names``.

    Above ``max_operating_c`` the driver lowers the clocks, at ``slowdown_c`` the hardware does, at ``shutdown_c`` the
    GPU is switched off; above ``memory_max_operating_c`` the driver lowers the clocks to protect the memory.
    ``nvlinks`` is the number that every board of the type uses, None where that depends on bridges.
    ``nvlink_bytes_per_second`` is the rate of one link in each direction. ``rack`` is the rack-scale NVLink domain that
    such GPUs are sold in; the NVML name does not tell whether a board is in one. ``counters`` are those of our metrics
    that these GPUs have and some others lack, ``counters_source`` where that is documented.
    """

    name: str
    names: tuple[str, ...]
    max_operating_c: PublishedFigure | None = None
    slowdown_c: PublishedFigure | None = None
    shutdown_c: PublishedFigure | None = None
    memory_max_operating_c: PublishedFigure | None = None
    nvlinks: PublishedFigure | None = None
    nvlink_bytes_per_second: PublishedFigure | None = None
    rack: Rack | None = None
    counters: frozenset[str] = frozenset()
    counters_source: str = ""


_NVLINK = "NVIDIA, NVLink, table of generations: https://www.nvidia.com/en-us/data-center/nvlink/"
_AMPERE = (
    "NVIDIA A100 Tensor Core GPU Architecture, third-generation NVLink:"
    " https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
)
_HOPPER = (
    "NVIDIA Hopper Architecture In-Depth, fourth-generation NVLink:"
    " https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/"
)
_H100_PCIE = (
    "NVIDIA H100 PCIe GPU, Product Brief PB-11133-001:"
    " https://www.nvidia.com/content/dam/en-zz/Solutions/gtcs22/data-center/h100/PB-11133-001_v01.pdf"
)
# NVIDIA publishes no document with these limits; the driver reports them for each card.
_A100_CARD = "what nvidia-smi -q -d TEMPERATURE prints of such a card: https://docs.nvidia.com/deploy/nvidia-smi/"
_GB200 = (
    "NVIDIA DGX SuperPOD with DGX GB200, Reference Architecture: https://docs.nvidia.com/dgx-superpod/"
    "reference-architecture-scalable-infrastructure-gb200/latest/dgx-superpod-components.html"
)
_GB300 = "NVIDIA GB300 NVL72: https://www.nvidia.com/en-us/data-center/gb300-nvl72/"
_NVML = "NVML API Reference, Field Value Enums, row remapper and GPM: https://docs.nvidia.com/deploy/nvml-api/"

_REMAPPED = frozenset({"gpu_remapped_rows_total", "gpu_remap_pending"})  # NVML: Ampere and newer
_ACTIVITY = frozenset({"gpu_sm_active_ratio", "gpu_tensor_active_ratio", "gpu_dram_active_ratio"})  # GPM: from Hopper

_NVL72_GB200 = Rack(
    name="GB200 NVL72",
    gpus=PublishedFigure(72, _GB200),
    compute_trays=PublishedFigure(18, _GB200),
    switch_trays=PublishedFigure(9, _GB200),
)
_NVL72_GB300 = Rack(name="GB300 NVL72", gpus=PublishedFigure(72, _GB300))

# Since Hopper the driver reports the remaining margin instead of a limit (T.Limit), and no limit for boards soldered to
# a baseboard is published.
DEVICE_TYPES: tuple[DeviceType, ...] = (
    DeviceType(
        name="A100 SXM",
        names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"),
        max_operating_c=PublishedFigure(85, _A100_CARD),
        slowdown_c=PublishedFigure(89, _A100_CARD),
        shutdown_c=PublishedFigure(92, _A100_CARD),
        memory_max_operating_c=PublishedFigure(95, _A100_CARD),
        nvlinks=PublishedFigure(12, _AMPERE),
        nvlink_bytes_per_second=PublishedFigure(25e9, _AMPERE),
        counters=_REMAPPED,
        counters_source=_NVML,
    ),
    DeviceType(
        name="A100 PCIe 40GB",
        names=("NVIDIA A100-PCIE-40GB",),
        nvlink_bytes_per_second=PublishedFigure(25e9, _AMPERE),
        counters=_REMAPPED,
        counters_source=_NVML,
    ),
    DeviceType(
        name="A100 PCIe 80GB",
        names=("NVIDIA A100 80GB PCIe",),
        max_operating_c=PublishedFigure(85, _A100_CARD),
        slowdown_c=PublishedFigure(89, _A100_CARD),
        shutdown_c=PublishedFigure(92, _A100_CARD),
        memory_max_operating_c=PublishedFigure(95, _A100_CARD),
        nvlink_bytes_per_second=PublishedFigure(25e9, _AMPERE),
        counters=_REMAPPED,
        counters_source=_NVML,
    ),
    DeviceType(
        name="H100 SXM",
        names=("NVIDIA H100 80GB HBM3",),
        nvlinks=PublishedFigure(18, _HOPPER),
        nvlink_bytes_per_second=PublishedFigure(25e9, _HOPPER),
        counters=_REMAPPED | _ACTIVITY,
        counters_source=_NVML,
    ),
    DeviceType(
        name="H100 PCIe",
        names=("NVIDIA H100 PCIe",),
        max_operating_c=PublishedFigure(87, _H100_PCIE),
        slowdown_c=PublishedFigure(89, _H100_PCIE),
        shutdown_c=PublishedFigure(92, _H100_PCIE),
        memory_max_operating_c=PublishedFigure(95, _H100_PCIE),
        nvlink_bytes_per_second=PublishedFigure(25e9, _HOPPER),
        counters=_REMAPPED | _ACTIVITY,
        counters_source=_NVML,
    ),
    DeviceType(
        name="H100 NVL",
        names=("NVIDIA H100 NVL",),
        nvlink_bytes_per_second=PublishedFigure(25e9, _HOPPER),
        counters=_REMAPPED | _ACTIVITY,
        counters_source=_NVML,
    ),
    DeviceType(
        name="H200 SXM",
        names=("NVIDIA H200",),
        nvlinks=PublishedFigure(18, _NVLINK),
        nvlink_bytes_per_second=PublishedFigure(25e9, _NVLINK),
        counters=_REMAPPED | _ACTIVITY,
        counters_source=_NVML,
    ),
    DeviceType(
        name="B200 SXM",
        names=("NVIDIA B200",),
        nvlinks=PublishedFigure(18, _NVLINK),
        nvlink_bytes_per_second=PublishedFigure(50e9, _NVLINK),
        counters=_REMAPPED | _ACTIVITY,
        counters_source=_NVML,
    ),
    DeviceType(
        name="GB200",
        names=("NVIDIA GB200",),
        nvlinks=PublishedFigure(18, _NVLINK),
        nvlink_bytes_per_second=PublishedFigure(50e9, _NVLINK),
        rack=_NVL72_GB200,
        counters=_REMAPPED | _ACTIVITY,
        counters_source=_NVML,
    ),
    DeviceType(
        name="GB300",
        names=("NVIDIA GB300",),
        nvlinks=PublishedFigure(18, _NVLINK),
        nvlink_bytes_per_second=PublishedFigure(50e9, _NVLINK),
        rack=_NVL72_GB300,
        counters=_REMAPPED | _ACTIVITY,
        counters_source=_NVML,
    ),
)
_BRAND = "NVIDIA "  # which drivers before 470 leave out
_BY_NAME = MappingProxyType({name.removeprefix(_BRAND): kind for kind in DEVICE_TYPES for name in kind.names})


def device_type(name: str) -> DeviceType | None:
    """Return the entry for a device by its NVML name; None if the table has no such device."""
    return _BY_NAME.get(name.removeprefix(_BRAND))
