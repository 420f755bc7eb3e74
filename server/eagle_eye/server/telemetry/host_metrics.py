"""The server's build and its folder's free space, on ``/metrics``. Touches: the folder's file system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX


class ServerHostCollector(Collector):
    """Read when scraped; yields nothing for a file system that does not answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = version("eagle-eye")

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        build = GaugeMetricFamily(PROMETHEUS_PREFIX + "build_info", "1, with the version.", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        try:
            room = shutil.disk_usage(self._folder)
        except OSError:
            return
        yield GaugeMetricFamily(
            PROMETHEUS_PREFIX + "data_dir_free_bytes", "Room on the file system of data_dir.", value=room.free
        )
        yield GaugeMetricFamily(
            PROMETHEUS_PREFIX + "data_dir_size_bytes", "Size of the file system of data_dir.", value=room.total
        )
