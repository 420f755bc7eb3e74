from __future__ import annotations

import pytest

from eagle_eye.checks import node_checks
from eagle_eye.checks.check import Host, Result
from eagle_eye.checks.child import Children, WorkerProgress
from eagle_eye.checks.gpus import Watching
from eagle_eye.checks.node_checks import UnderLoad, under_load
from tests.checks.builders import answered, answering, asked, children, gpu, host

GEMM = {"wrong_rows": 0.0, "differing": 0.0, "repetitions": 90.0, "flops_per_second": 6e14}
MEMORY = {"wrong_words": 0.0, "bytes": 8e10, "passes": 5.0, "bytes_per_second": 3e12}
SUMS = {"wrong": 0.0, "bus_bytes_per_second": 4e11}
DISK = {
    "wrong_blocks": 0.0,
    "sync_seconds": 0.002,
    "sync_seconds_max": 0.01,
    "write_bytes_per_second": 1e9,
    "read_bytes_per_second": 2e9,
}


@pytest.fixture(autouse=True)
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watching, "looks", lambda _self: ())


def gemm_of(monkeypatch: pytest.MonkeyPatch, *courses: WorkerProgress, thresholds: tuple[str, ...] = ()) -> Result:
    answering(monkeypatch, children(*courses))
    return node_checks.run_gemm(asked(host(len(courses)), thresholds=thresholds))


def test_gpus_that_compute_rightly_and_alike_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gemm_of(monkeypatch, *(answered({**GEMM, "flops_per_second": 6e14 + n * 1e13}) for n in range(8)))
    assert found.state == "passed"
    assert "links and clocks are not judged" in found.reason


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"wrong_rows": 1.0}, "gpu 1: 1 rows of a product are not what they must be"),
        ({"differing": 3.0}, "gpu 1: 3 numbers differ between repetitions"),
        ({"flops_per_second": 4e14}, "gpu 1: throughput_ratio 0.6667 1, below 0.75"),
    ],
)
def test_a_gpu_with_wrong_numbers_or_far_slower_than_its_peers_is_sick(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, float], said: str
) -> None:
    found = gemm_of(monkeypatch, answered(GEMM), answered({**GEMM, **wrong}), answered(GEMM), answered(GEMM))
    assert (found.state, found.reason.startswith(said)) == ("sick", True)


def test_a_gpu_is_not_compared_with_those_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, children(answered(GEMM), answered({**GEMM, "flops_per_second": 1e14})))
    one, other = gpu(0), gpu(1)
    object.__setattr__(other, "model", "L40S")
    assert node_checks.run_gemm(asked(Host(gpus=(one, other)))).state == "passed"


def test_the_site_s_own_figure_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gemm_of(monkeypatch, answered(GEMM), thresholds=("gemm.flops_per_second=7e14",))
    assert (found.state, "given by the site" in found.reason) == ("sick", True)


def test_one_gpu_that_hangs_is_named_among_those_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    courses = (answered(GEMM), WorkerProgress("working", 80.0), answered(GEMM))
    answering(monkeypatch, children(*courses, status=None))
    found = node_checks.run_gemm(asked(host(3)))
    assert (found.state, found.reason) == ("sick", "gpu 1: did not finish: nothing for 20 s while working")
    assert {figure.device for figure in found.values} == {"gpu 0", "gpu 2"}


def test_one_gpu_without_an_answer_keeps_the_others_from_passing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gemm_of(monkeypatch, answered(GEMM), WorkerProgress("working", 1.0, None, "RuntimeError: no kernel image"))
    assert (found.state, found.reason) == ("could_not_check", "gpu 1: RuntimeError: no kernel image")
    assert gemm_of(monkeypatch, answered({"speed": 1.0})).state == "could_not_check"


@pytest.mark.parametrize(
    "on",
    [
        Host(gpu_problem="NVML does not answer"),
        Host(gpus=(gpu(0),), lost=("gpu 1: GPU is lost",)),
        Host(gpus=(gpu(0),), simulated=True),
        Host(gpus=(gpu(0, instances=7),)),
    ],
)
def test_gpus_that_cannot_be_given_work_are_not_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch, on: Host) -> None:
    answering(monkeypatch, children(answered(GEMM)))
    each = (node_checks.run_gemm, node_checks.run_memory, node_checks.run_all_reduce)
    assert [run(asked(on)).state for run in each] == ["could_not_check"] * 3


def test_a_torch_python_that_is_not_there_is_said() -> None:
    found = node_checks.run_gemm(asked())
    assert found.state == "could_not_check"
    assert "/no/python" in found.reason


def looks(**facts: float) -> list[Host]:
    return [Host(gpus=(gpu(0), gpu(1, facts)))] * 4


def test_a_link_and_a_brake_count_only_under_load() -> None:
    assert under_load(looks(utilization_ratio=0.1, pcie_link_generation=1.0)).keys() == {"gpu 0"}
    assert under_load(looks()[:2]) == {}


def test_a_link_that_recovers_under_load_is_whole() -> None:
    found = under_load([*looks(pcie_link_generation=1.0), *looks()])
    assert found["gpu 1"].link["pcie_link_generation"] == (5.0, 5.0)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"pcie_link_width": 8.0}, "gpu 1: pcie_link_width 8 of 16 under load"),
        ({"pcie_link_generation": 3.0}, "gpu 1: pcie_link_generation 3 of 5 under load"),
        ({"throttle_reasons": 64.0}, "gpu 1: throttled_ratio 1 1, above 0.5"),
    ],
)
def test_a_gpu_with_a_degraded_link_or_brakes_under_load_is_sick(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, float], said: str
) -> None:
    monkeypatch.setattr(Watching, "looks", lambda _self: looks(**facts))
    found = gemm_of(monkeypatch, answered(GEMM), answered(GEMM))
    assert (found.state, found.reason.startswith(said)) == ("sick", True)


def test_the_power_cap_is_no_brake() -> None:
    assert under_load(looks(throttle_reasons=4.0))["gpu 1"] == UnderLoad(
        0.0, {"pcie_link_width": (16.0, 16.0), "pcie_link_generation": (5.0, 5.0)}
    )


def test_memory_that_gives_back_something_else_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, children(answered(MEMORY), answered({**MEMORY, "wrong_words": 2.0})))
    found = node_checks.run_memory(asked(host(2)))
    assert (found.state, found.reason) == ("sick", "gpu 1: 2 words came back wrong of 74.5 GiB")


def test_a_sum_that_is_wrong_on_one_rank_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, children(answered(SUMS), answered({**SUMS, "wrong": 5.0})))
    assert node_checks.run_all_reduce(asked(host(2))).reason == "gpu 1: 5 numbers of a sum are wrong"


@pytest.mark.parametrize(
    ("changed", "state"), [({}, "passed"), ({"wrong_blocks": 1.0}, "sick"), ({"sync_seconds": 3.0}, "sick")]
)
def test_a_disk_that_forgets_or_takes_seconds_is_sick(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, float], state: str
) -> None:
    answering(monkeypatch, children(answered({**DISK, **changed})))
    assert node_checks.run_disk(asked()).state == state


def test_a_disk_that_answers_with_an_io_error_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Children(
        courses=(WorkerProgress("working", 1.0, None, "OSError: [Errno 5] Input/output error", hardware=True),),
        status=0,
        ended_s=2.0,
    )
    answering(monkeypatch, broken)
    assert node_checks.run_disk(asked()).state == "sick"
