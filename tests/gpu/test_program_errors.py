"""A program's own error on the GPU: the XID that the driver tells, the error that the hook tells, and no harm to us."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from eagle_eye.agent.collector import CollectFailed, Drops, Unsupported
from eagle_eye.agent.collectors.kernel_log import KernelLogCollector, KernelLogHost, open_log
from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.agent.collectors.training import TrainingCollector
from eagle_eye.schema.driver_facts import XIDS
from eagle_eye.schema.events import Event
from tests.agent.fakes import until
from tests.gpu.conftest import Keep
from tests.gpu.machine import PROGRAMS, TorchPython, child_environment, needs_gpu

pytestmark = needs_gpu
REPORTED_S = 30.0
# NVIDIA, XID Errors: what a program's store to nobody's address is told as, and what follows its end.
PROGRAMS_OWN = {xid.code for xid in XIDS if xid.kind in ("application", "cleanup")}


def fault() -> None:
    """Make an illegal access in a child process, on the first GPU."""
    command = [sys.executable, str(PROGRAMS / "illegal_address.py")]
    done = subprocess.run(
        command,
        env=child_environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def xid_from(collect: Callable[[], list[Event]]) -> Event:
    """Return the first XID that is told, within TOLD_S."""
    found: list[Event] = []

    def reported() -> bool:
        time.sleep(0.2)
        found.extend(event for event in collect() if event.kind == "xid")
        return bool(found)

    until(reported, REPORTED_S)
    return found[0]


def from_now_on(path: Path) -> int:
    """Open the kernel's log behind its newest record."""
    descriptor = open_log(path)
    os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor


@pytest.fixture
def nvml() -> Iterator[NvmlCollector]:
    made = NvmlCollector()
    made.collect(time.time())
    yield made
    made.close()


@pytest.fixture
def first(nvml: NvmlCollector) -> int:
    """The row of the GPU that CUDA calls the first: by PCI address, as NVML counts."""
    return min(nvml.devices_by_bus_id.items())[1]


def test_nvml_tells_the_xid_of_a_programs_error(nvml: NvmlCollector, first: int, keep: Keep) -> None:
    pynvml.nvmlInit()
    try:
        handle: Any = pynvml.nvmlDeviceGetHandleByIndex(first)
        reported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
    finally:
        pynvml.nvmlShutdown()
    if not reported & pynvml.nvmlEventTypeXidCriticalError:
        pytest.skip("this driver tells no XIDs by NVML (a virtual GPU)")
    fault()
    event = xid_from(lambda: nvml.collect(time.time()).events)
    keep("xid_by_nvml", event.attributes["code"])
    assert (event.device, event.attributes["code"] in PROGRAMS_OWN) == (first, True)


def test_the_kernels_log_tells_the_xid_of_a_programs_error(nvml: NvmlCollector, first: int, keep: Keep) -> None:
    host = KernelLogHost(opener=from_now_on)  # repeats of before are folded
    log = KernelLogCollector(Drops(), nvml.devices_by_bus_id, host=host)
    try:
        log.collect(time.time())
    except (Unsupported, CollectFailed) as error:
        pytest.skip(f"the kernel's log cannot be read here: {error}")
    fault()
    event = xid_from(lambda: log.collect(time.time()).events)
    keep("xid_by_kernel_log", dict(event.attributes))
    assert (event.device, event.attributes["code"] in PROGRAMS_OWN) == (first, True)


def test_a_cuda_error_in_a_rank_is_told_by_the_hook_and_hurts_nobody_else(
    nvml: NvmlCollector, cuda_python: TorchPython, tmp_path: Path, keep: Keep
) -> None:
    collector = TrainingCollector(tmp_path / "hook.sock", Drops())
    collector.open()
    events: list[Event] = []

    def reported(kind: str) -> bool:
        time.sleep(0.1)
        events.extend(collector.collect(time.time()).events)
        return any(event.kind == kind for event in events)

    environ = child_environment(EAGLE_EYE_JOB="fails")
    command = [cuda_python.path, str(PROGRAMS / "fails.py"), str(tmp_path / "hook.sock")]
    try:
        with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
            try:
                until(lambda: reported("process_exit"), 180.0)
                assert process.wait(60.0) != 0
            finally:
                process.kill()
    finally:
        collector.close()
    errors = [event.attributes["text"] for event in events if event.kind == "training_error"]
    keep("training_error", errors)
    assert len(errors) == 1
    assert "CUDA error" in errors[0]
    row = nvml.collect(time.time()).devices
    assert row
    assert all("gpu_temperature_celsius" in one for one in row.values())
