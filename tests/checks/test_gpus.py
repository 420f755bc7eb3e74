from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.nvml.simulation import compiled
from eagle_eye.checks import child, gpus, node_checks
from eagle_eye.checks.check import Host
from eagle_eye.checks.child import Children
from tests.agent.simulated_gpus import needs_compiler
from tests.checks.builders import answering, gpu, host, nested

FAR_S = 1e9


def test_an_idle_host_is_used_by_nobody() -> None:
    assert gpus.occupied(host(8)) == ""


def test_a_process_on_one_gpu_occupies_the_host() -> None:
    busy = Host(gpus=(gpu(0), gpu(1, processes=(os.getpid(), 4_000_000, 4_000_001, 4_000_002))))
    assert gpus.occupied(busy).startswith(f"gpu 1: process {os.getpid()} (")
    assert gpus.occupied(busy).endswith("4000000, 4000001 and 1 more computes on it")


def test_processes_that_the_driver_does_not_tell_of_count_as_there() -> None:
    assert "does not say" in gpus.occupied(Host(gpus=(gpu(0, processes=None),)))


def test_memory_in_use_by_nobody_that_is_shown_occupies_the_host() -> None:
    assert "20.0 GiB" in gpus.occupied(Host(gpus=(gpu(0, {"memory_used_bytes": 20.0 * 2**30}),)))


def made(**answer: Any) -> Children:
    return Children(courses=(), status=0, ended_s=1.0, answers=(answer,))


def test_a_driver_that_does_not_answer_is_a_problem_and_no_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    answering(monkeypatch, Children(courses=(), status=None, ended_s=1.0))
    assert gpus.host(FAR_S, tmp_path) == Host(gpu_problem="NVML does not answer")
    answering(monkeypatch, made(problem="NVML: Driver Not Loaded"))
    assert gpus.host(FAR_S, tmp_path).gpu_problem == "NVML: Driver Not Loaded"
    answering(monkeypatch, made(gpus=[]))
    assert gpus.host(FAR_S, tmp_path).gpu_problem == "NVML shows none of the 1 GPUs on the PCI bus"


def test_a_host_without_gpus_and_without_a_driver_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, made(problem="NVML: Library Not Found"))
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    found = gpus.host(FAR_S, tmp_path)
    assert not found.has_gpus
    assert found.rdma_devices == ("mlx5_0",)


ANYTHING = nested("row", "uuid", "facts", "processes", "instances", "x")


@given(st.dictionaries(st.sampled_from(["gpus", "lost", "problem", "simulated"]), ANYTHING))
def test_any_look_is_read_without_an_error(answer: dict[str, Any]) -> None:
    assert len(gpus.look(answer).gpus) <= child.WORKERS_MAX


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"remap_pending": 1.0}, "gpu 1: a row remap waits for a GPU reset"),
        ({"remap_failed": 1.0}, "gpu 1: a row could not be remapped"),
        ({"retired_pages_pending": 1.0}, "gpu 1: pages wait to be retired"),
        ({"ecc_uncorrected_total": 3.0}, "gpu 1: 3 uncorrectable memory errors"),
    ],
)
def test_what_the_driver_wants_repaired_is_sick(facts: dict[str, float], said: str) -> None:
    found = node_checks.judge_gpu_facts(Host(gpus=(gpu(0), gpu(1, facts))), 2)
    assert (found.state, found.reason.startswith(said)) == ("sick", True)


def test_gpus_that_are_lost_or_missing_are_sick() -> None:
    assert (
        node_checks.judge_gpu_facts(Host(gpus=(gpu(0),), lost=("gpu 1: GPU is lost",)), 2).reason
        == "gpu 1: GPU is lost"
    )
    assert node_checks.judge_gpu_facts(host(7), 8).reason == "NVML shows 7 of 8 GPUs"
    assert node_checks.judge_gpu_facts(host(8), 8).state == "passed"


def test_gpus_that_cannot_be_seen_are_not_healthy() -> None:
    assert node_checks.judge_gpu_facts(Host(gpu_problem="NVML does not answer"), 0).state == "could_not_check"
    assert node_checks.judge_gpu_facts(Host(gpus=(gpu(0),), gpu_problem="gpu 1: no answer"), 2).state == "sick"
    assert (
        node_checks.judge_gpu_facts(Host(gpus=(gpu(0),), gpu_problem="gpu 1: no answer"), 0).reason
        == "gpu 1: no answer"
    )
    assert node_checks.judge_gpu_facts(Host(), 0).reason == "NVML shows no GPU any more"
    assert node_checks.judge_gpu_facts(Host(gpus=(gpu(0),), simulated=True), 0).state == "could_not_check"


def test_looks_go_on_from_entering_to_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def run(work: str, job: dict[str, str], workers: int, until_s: float) -> Children:
        begun.set()
        while Path(job["while"]).is_dir() and time.monotonic() < until_s:
            time.sleep(0.005)
        assert (work, workers, time.monotonic() < until_s) == ("in_nvml", 0, True)
        look = {"gpus": [{"row": 0, "uuid": "GPU-0", "facts": {"utilization_ratio": 1.0}}]}
        return Children(courses=(), status=0, ended_s=0.0, answers=(look, {"problem": "no look"}, look))

    monkeypatch.setattr(child, "run", run)
    with gpus.Watching(time.monotonic() + 30.0) as watching:
        assert begun.wait(10.0)
        assert watching._thread.is_alive()
    assert [[seen.name for seen in look.gpus] for look in watching.looks()] == [["gpu 0"], ["gpu 0"]]


def test_where_nobody_can_look_there_are_no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_asked: object) -> Children:
        raise OSError("no processes left")

    monkeypatch.setattr(child, "run", run)
    with gpus.Watching(time.monotonic() + 30.0) as watching:
        pass
    assert watching.looks() == ()


def looked(folder: Path, monkeypatch: pytest.MonkeyPatch, *says: str) -> Host:
    """Return a look of the real child, through the real binding, at simulated GPUs."""
    library = compiled(folder / "made")
    (folder / "libnvidia-ml.so.1").symlink_to(library)
    (folder / "gpus").write_text("".join(f"{line}\n" for line in ("steady", *says)))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setattr(child, "_KEPT", (*child._KEPT, "EAGLE_EYE_SIMULATED_GPUS"))
    monkeypatch.setenv("EAGLE_EYE_SIMULATED_GPUS", str(folder / "gpus"))
    return gpus.host(time.monotonic() + 30.0, folder / "sys")


@needs_compiler
def test_the_child_tells_gpus_processes_and_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked(tmp_path, monkeypatch, "gpus 3", "process 1 4711 100", "lost 2", "ecc 0 2")
    assert [seen.name for seen in found.gpus] == ["gpu 0", "gpu 1"]
    assert [seen.processes for seen in found.gpus] == [(), (4711,)]
    assert found.gpus[0].facts["ecc_uncorrected_total"] == 2.0
    assert found.gpus[0].facts["pcie_link_width"] == 16.0
    assert found.lost == ("gpu 2: GPU is lost",)
    assert found.simulated
    assert json.dumps(dict(found.gpus[0].facts))  # numbers alone
