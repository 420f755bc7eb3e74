from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.metrics import BY_NAME, Scope

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: apt-get install gcc libc6-dev"
)

COLLECT = """
import json, sys
from pathlib import Path
from eagle_eye.agent.collectors.nvml import NvmlCollector
collector = NvmlCollector(sys=Path(sys.argv[1]))
answers = []
for _ in range(2):
    try:
        seen = collector.collect(1000.0)
        answers.append([seen.devices, [[e.kind, e.device, e.attributes] for e in seen.events], seen.problem])
    except Exception as error:
        answers.append([type(error).__name__, str(error)])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The library as it is now, and an older one."""
    folders = {}
    for name, flags in (("new", []), ("old", ["-DOLD"])):
        folder = tmp_path_factory.mktemp(name)
        source = Path(__file__).with_name("fake_nvml.c")
        command = ["gcc", "-shared", "-fPIC", "-w", *flags, "-Wl,-soname,libnvidia-ml.so.1"]
        subprocess.run([*command, "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True)
        folders[name] = folder
    return folders


def collect(folder: Path, sys_folder: Path = Path("/nonexistent"), **settings: str) -> list[Any]:
    """Two collections in a process that finds the library in ``folder``."""
    environ = {"LD_LIBRARY_PATH": str(folder), "PATH": "/usr/bin:/bin", **settings}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(sys_folder)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_every_reading_is_in_the_catalogues_units(libraries: dict[str, Path]) -> None:
    rows, events, problem = collect(libraries["new"])[0]
    assert rows["0"] == {
        "gpu_utilization_ratio": 0.5,
        "gpu_memory_used_bytes": 30.0,
        "gpu_power_watts": 350.5,
        "gpu_power_limit_watts": 700.0,
        "gpu_temperature_celsius": 61.0,
        "gpu_sm_clock_hertz": 1.98e9,
        "gpu_memory_clock_hertz": 2.619e9,
        "gpu_throttle_reasons": 0x48,
        "gpu_ecc_corrected_total": 5.0,
        "gpu_ecc_uncorrected_total": 1.0,
        "gpu_remapped_rows_total": 3.0,
        "gpu_remap_pending": 1.0,
        "gpu_pcie_link_width": 16.0,
        "gpu_pcie_link_generation": 5.0,
        "gpu_pcie_replays_total": 9.0,
        "gpu_pcie_tx_bytes_per_second": 1e6,
        "gpu_pcie_rx_bytes_per_second": 2e6,
        "gpu_nvlinks_active": 5.0,
    }
    assert set(rows) == {"0", "1"}
    assert (events, problem) == ([], "")
    assert all(BY_NAME[name].scope is Scope.DEVICE for name in rows["0"])


def test_an_older_driver_knows_throttling_by_its_older_name(libraries: dict[str, Path]) -> None:
    assert collect(libraries["old"])[0][0]["0"]["gpu_throttle_reasons"] == 0x8


def test_what_a_gpu_does_not_support_is_left_out_and_no_failure(libraries: dict[str, Path]) -> None:
    for rows, _, problem in collect(libraries["new"], FAKE_NVML_BARE="1"):
        assert rows["1"] == {"gpu_temperature_celsius": 62.0}
        assert len(rows["0"]) > 10
        assert problem == ""


def test_a_lost_gpu_is_told_once_and_the_others_go_on(libraries: dict[str, Path]) -> None:
    first, second = collect(libraries["new"], FAKE_NVML_LOST="1")
    assert set(first[0]) == {"0"}
    assert first[1] == [["gpu_lost", 1, {"uuid": "GPU-1"}]]
    assert first[2] == second[2] == "gpu 1: utilization: GPU is lost"
    assert second[1] == []


def test_a_gpu_that_is_still_on_the_bus_is_not_called_lost(libraries: dict[str, Path], tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:02:00.0"
    device.mkdir(parents=True)
    (device / "config").write_bytes(b"\xde\x10\x30\x23")
    assert collect(libraries["new"], tmp_path, FAKE_NVML_LOST="1")[0][1] == []
    (device / "config").write_bytes(b"\xff\xff\xff\xff")
    assert len(collect(libraries["new"], tmp_path, FAKE_NVML_LOST="1")[0][1]) == 1


def test_when_no_gpu_answers_the_collection_failed(libraries: dict[str, Path]) -> None:
    answers = collect(libraries["new"], FAKE_NVML_GPUS="1", FAKE_NVML_LOST="0")
    assert answers[0][0] == "CollectFailed"
    assert "GPU is lost" in answers[0][1]


def test_a_driver_that_is_not_loaded_may_be_loaded_later(libraries: dict[str, Path]) -> None:
    assert [name for name, _ in collect(libraries["new"], FAKE_NVML_INIT="9")] == ["CollectFailed"] * 2


def test_a_host_without_gpus_is_unsupported(libraries: dict[str, Path]) -> None:
    assert collect(libraries["new"], FAKE_NVML_GPUS="0")[0] == ["Unsupported", "NVML sees no GPU"]


def test_a_host_without_the_library_is_unsupported(tmp_path: Path) -> None:
    if Path("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").exists():
        pytest.skip("this machine has NVIDIA's library")
    assert collect(tmp_path)[0][0] == "Unsupported"
