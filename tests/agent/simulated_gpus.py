"""A process with the real collector and binding on the simulated library, driven step by step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None,
    reason="no C compiler is installed: apt-get install gcc libc6-dev",
)

CHILD = """
import ctypes, json, logging, sys, threading, time
from pathlib import Path

library, sys_folder = sys.argv[1:]
if library:
    ctypes.CDLL(library)

from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.agent.nvml import connection

connection.OPEN_GPUS_S = 0.5

class Log(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines, passed_s, kernel_log = [], 0.0, False
logging.getLogger("eagle_eye.agent").addHandler(Log())
logging.getLogger("eagle_eye.agent").setLevel(logging.INFO)
collector = NvmlCollector(lambda: kernel_log, Path(sys_folder), lambda: time.monotonic() + passed_s)
for line in sys.stdin:
    do, value = json.loads(line)
    answer = None
    if do == "collect":
        begin_s, cpu_s = time.monotonic(), time.process_time()
        try:
            seen = collector.collect(1000.0)
            events = [[e.time_s, e.kind, e.device, e.attributes] for e in seen.events]
            answer = {"rows": seen.devices, "events": events, "problem": seen.problem}
        except Exception as error:
            answer = {"raised": type(error).__name__, "problem": str(error)}
        answer |= {"took_s": time.monotonic() - begin_s, "cpu_s": time.process_time() - cpu_s, "log": list(lines)}
        answer["threads"] = threading.active_count()
        lines.clear()
    elif do == "pass":
        passed_s += value
    elif do == "kernel_log":
        kernel_log = value
    elif do == "tables":
        answer = [collector.devices_by_uuid, collector.devices_by_bus_id, collector.compute_processes()]
    elif do == "close":
        collector.close()
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Seen:
    """What one collection gave: rows by GPU, events, what went wrong, and what it cost."""

    rows: dict[int, dict[str, float]]
    events: list[list[Any]]
    problem: str
    raised: str
    log: list[str]
    took_s: float
    cpu_s: float
    threads: int


class Host:
    """A host with simulated GPUs, and a collector on it. ``library`` None: NVML is not installed."""

    def __init__(self, library: Path | None, folder: Path, *lines: str) -> None:
        self.folder = folder
        self.sys = folder / "sys"
        self._file = folder / "gpus"
        self.says(*lines)
        for row in range(8):
            self.on_the_bus(row)
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(library or ""), str(self.sys)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "EAGLE_EYE_SIMULATED_GPUS": str(self._file)},
        )

    def says(self, *lines: str) -> None:
        """Change what the GPUs show; ``simulated.c`` knows the words."""
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in ("steady", *lines)))
        new.replace(self._file)

    def on_the_bus(self, row: int, config: bytes = b"\xde\x10\x30\x23") -> None:
        """Have the kernel show the GPU's PCI configuration as ``config``, or not at all when that is empty."""
        device = self.sys / f"bus/pci/devices/0000:{0x10 + row:02x}:00.0"
        if not config:
            (device / "config").unlink()
            return
        device.mkdir(parents=True, exist_ok=True)
        (device / "config").write_bytes(config)

    def collect(self, after_s: float = 1.0) -> Seen:
        self._do("pass", after_s)
        found = self._do("collect")
        rows = {int(row): values for row, values in found.get("rows", {}).items()}
        rest = {key: found[key] for key in ("problem", "log", "took_s", "cpu_s", "threads")}
        return Seen(rows=rows, events=found.get("events", []), raised=found.get("raised", ""), **rest)

    def kernel_log_is_read(self, read: bool) -> None:
        self._do("kernel_log", read)

    def devices_by_uuid(self) -> dict[str, int]:
        found: dict[str, int] = self._do("tables")[0]
        return found

    def compute_processes(self) -> dict[int, int]:
        return {int(pid): row for pid, row in self._do("tables")[2].items()}

    def close_collector(self) -> None:
        self._do("close")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _do(self, what: str, value: object = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, value]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the collector's process has died"
        return json.loads(line)


def uuid(row: int) -> str:
    return f"GPU-51000000-0000-4000-8000-0000{row:08d}"


class Hosts:
    """Makes hosts; each ends with the test."""

    def __init__(self, library: Path | None, folder: Path) -> None:
        self._library = library
        self._folder = folder
        self._made: list[Host] = []

    def __call__(self, *lines: str) -> Host:
        folder = self._folder / str(len(self._made))
        folder.mkdir()
        self._made.append(Host(self._library, folder, *lines))
        return self._made[-1]

    def end(self) -> None:
        for host in self._made:
            host.end()
