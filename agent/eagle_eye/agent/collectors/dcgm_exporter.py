"""Scrapes a dcgm-exporter on this host for what DCGM measures and NVML does not. Touches: one HTTP request."""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.agent.collector import CollectFailed, Drops, Observed
from eagle_eye.agent.exposition import ParsedSample, samples

ASK_EVERY_S = 10.0  # the exporter itself asks DCGM every 30 s by default
ANSWER_S = 3.0  # from connecting to the last byte
PAGE_BYTES_MAX = 4 << 20  # eight GPUs with all fields and Kubernetes' labels are 300 KB
BLANK_MIN = 1e14  # DCGM writes 0x7ffffffffffffff0 and 140737488355328 for "not known"


class DcgmField(NamedTuple):
    """A DCGM field: the metric it maps to, its scale factor and its largest plausible value."""

    metric: str
    factor: float
    most: float


_BYTES_PER_S_MAX = 1e13  # a hundred times PCIe 7, five times NVLink 6

# DCGM's field identifiers, as dcgm-exporter names its metrics. Profiling fields are already rates and ratios, even
# where an older exporter declares them counters.
SOURCES: Mapping[str, DcgmField] = MappingProxyType(
    {
        "DCGM_FI_PROF_SM_ACTIVE": DcgmField("gpu_sm_active_ratio", 1.0, 1.0),
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": DcgmField("gpu_tensor_active_ratio", 1.0, 1.0),
        "DCGM_FI_PROF_DRAM_ACTIVE": DcgmField("gpu_dram_active_ratio", 1.0, 1.0),
        "DCGM_FI_PROF_PCIE_RX_BYTES": DcgmField("gpu_pcie_rx_bytes_per_second", 1.0, _BYTES_PER_S_MAX),
        "DCGM_FI_PROF_PCIE_TX_BYTES": DcgmField("gpu_pcie_tx_bytes_per_second", 1.0, _BYTES_PER_S_MAX),
        "DCGM_FI_PROF_NVLINK_RX_BYTES": DcgmField("gpu_nvlink_rx_bytes_per_second", 1.0, _BYTES_PER_S_MAX),
        "DCGM_FI_PROF_NVLINK_TX_BYTES": DcgmField("gpu_nvlink_tx_bytes_per_second", 1.0, _BYTES_PER_S_MAX),
        # KiB a second, divided by 1,000, although declared a counter.
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": DcgmField("gpu_nvlink_bytes_per_second", 1_024_000.0, _BYTES_PER_S_MAX),
        "DCGM_FI_DEV_GPU_UTIL": DcgmField("gpu_utilization_ratio", 0.01, 1.0),
        "DCGM_FI_DEV_FB_USED": DcgmField("gpu_memory_used_bytes", float(1 << 20), 1e13),
        "DCGM_FI_DEV_POWER_USAGE": DcgmField("gpu_power_watts", 1.0, 1e5),
        "DCGM_FI_DEV_GPU_TEMP": DcgmField("gpu_temperature_celsius", 1.0, 200.0),
        "DCGM_FI_DEV_MEMORY_TEMP": DcgmField("gpu_memory_temperature_celsius", 1.0, 200.0),
        "DCGM_FI_DEV_SM_CLOCK": DcgmField("gpu_sm_clock_hertz", 1e6, 1e10),
        "DCGM_FI_DEV_MEM_CLOCK": DcgmField("gpu_memory_clock_hertz", 1e6, 1e11),
    }
)


class DcgmExporterCollector:
    """Rows of the GPUs known to NVML, only in the collection in which the exporter was scraped.

    They are not repeated until the next scrape: a ratio from half a minute ago would make a hung job look busy. Where
    NVML has the same metric, NVML's value wins: this collector comes before NVML's in the list. Rows are matched by GPU
    UUID; rows of MIG instances, which share their GPU's UUID, are left out. Dropped samples are counted as
    ``dcgm_exporter_malformed``, ``_unknown_gpu``, ``_mig`` and ``_range``; DCGM's blanks mean unknown.
    """

    name = "dcgm_exporter"

    def __init__(
        self,
        url: str,
        devices_by_uuid: Mapping[str, int],
        drops: Drops,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``devices_by_uuid`` may be filled later, by the GPU collector. Raises ValueError for a malformed URL."""
        self._host, self._port, self._path = address(url)
        self._url = url
        self._devices_by_uuid = devices_by_uuid
        self._drops = drops
        self._monotonic_s = monotonic_s
        self._due_s = -math.inf
        self._problem = ""

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - the exporter says no times
        """Return the GPUs' rows if a scrape was due. Raises CollectFailed."""
        monotonic_s = self._monotonic_s()
        if monotonic_s >= self._due_s:
            self._due_s = monotonic_s + ASK_EVERY_S
            self._problem = ""
            try:
                return self._observed(self._page())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._problem = f"{self._url}: {str(error) or type(error).__name__}"[:300]
        if self._problem:
            raise CollectFailed(self._problem)
        return Observed()

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _page(self) -> str:
        """Return the exporter's page. Raises OSError, HTTPException, ValueError."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.connect()
            # A socket timeout restarts with each byte; a server that trickles bytes is cut off at the deadline.
            cut = threading.Timer(ANSWER_S, _shut, [connection.sock])
            cut.daemon = True
            cut.start()
            try:
                connection.request("GET", self._path, headers={"Accept": "text/plain"})
                answer = connection.getresponse()
                page = answer.read(PAGE_BYTES_MAX + 1)
                # A page without a Content-Length ends with the connection: closed by the server, or by us at the
                # deadline.
                whole = answer.isclosed() or (answer.length is None and not answer.read(1))
                in_time = cut.is_alive()
            finally:
                cut.cancel()
        if answer.status != 200:
            raise ValueError(f"it answered {answer.status}")
        if len(page) > PAGE_BYTES_MAX:
            raise ValueError(f"its page has more than {PAGE_BYTES_MAX} bytes; serve fewer fields")
        if not in_time:
            raise ValueError(f"its page did not arrive within {ANSWER_S:g} s")
        if not whole:
            raise ValueError(f"its page was cut off after {len(page)} bytes")
        return page.decode("utf-8", "replace")

    def _observed(self, page: str) -> Observed:
        if not self._devices_by_uuid:
            raise ValueError("NVML has named no GPU that its rows could belong to")
        observed = Observed()
        any_known = False
        for sample in samples(page, SOURCES):
            if sample is None:
                self._drops.count("dcgm_exporter_malformed")
                continue
            any_known = True
            self._take(sample, observed)
        if not any_known:
            raise ValueError("its page has none of the metrics that are read (docs/reference/agent.md)")
        return observed

    def _take(self, sample: ParsedSample, observed: Observed) -> None:
        if sample.labels.get("GPU_I_ID"):
            self._drops.count("dcgm_exporter_mig")
            return
        device = self._devices_by_uuid.get(sample.labels.get("UUID", ""))
        if device is None:
            self._drops.count("dcgm_exporter_unknown_gpu")
            return
        if math.isnan(sample.value) or sample.value >= BLANK_MIN:
            return
        source = SOURCES[sample.name]
        value = sample.value * source.factor
        if not 0.0 <= value <= source.most:
            self._drops.count("dcgm_exporter_range")
            return
        observed.devices.setdefault(device, {})[source.metric] = value


def address(url: str) -> tuple[str, int, str]:
    """Return host, port and path of ``http://host:port/path``. Raises ValueError naming the expected form."""
    parts = urlsplit(url)
    port = parts.port  # raises for an invalid port
    if parts.scheme != "http" or not parts.hostname or parts.username or parts.query or not url.isprintable():
        raise ValueError(f"expected http://host:port/metrics, got {url[:200]!r}")
    return parts.hostname, port or 80, parts.path or "/metrics"


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
