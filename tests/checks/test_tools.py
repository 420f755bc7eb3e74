"""The site's own tools: what they say, what they say wrongly, and what becomes of those that hang."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.checks import tools
from eagle_eye.checks.check import NO_GPU, ONE_GPU, THRESHOLDS, Host, Result
from tests.checks.builders import asked, gpu, host, output_with, tool

BUS = THRESHOLDS["nccl_tests.bus_bytes_per_second"]
SUMS = """#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong
 536870912 134217728 float sum -1 2500 214.7 375.8 0 2490 215.6 377.3 0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 376.55
#
"""
WRITE_BW = """---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      2000             392.10             391.44             0.746613
---------------------------------------------------------------------------------------
"""


def diagnostics(*results: dict[str, Any], category: str = "Hardware", outer: str = "DCGM Diagnostic") -> str:
    tests = [{"name": "memory", "results": list(results)}]
    return json.dumps({outer: {"test_categories": [{"category": category, "tests": tests}]}, "metadata": {}})


def failed(severity: int | None = None, **more: Any) -> dict[str, Any]:
    warning = {"warning": "it is bad", **({} if severity is None else {"error_severity": severity})}
    return {"entity_group": "GPU", "entity_id": 3, "status": "Fail", "warnings": [warning], **more}


PASS = {"entity_group": "GPU", "entity_id": 0, "status": "Pass"}
SKIP = {"status": "Skip"}


def judged(text: str, status: int = 0) -> Result:
    return tools.judge_dcgm(tools.parse_dcgm(text.encode()), status, "")


@pytest.mark.parametrize("outer", ["DCGM Diagnostic", "DCGM GPU Diagnostic"])
def test_diagnostics_of_every_version_pass_when_all_tests_do(outer: str) -> None:
    assert judged(diagnostics(PASS, {**PASS, "status": "PASS"}, SKIP, outer=outer)).reason == "2 tests passed"


@pytest.mark.parametrize(
    ("severity", "state"),
    [(2, "sick"), (4, "sick"), (6, "sick"), (1, "could_not_check"), (3, "could_not_check"), (5, "could_not_check")],
)
def test_a_failed_test_is_the_node_s_fault_when_dcgm_says_so(severity: int, state: str) -> None:
    found = judged(diagnostics(PASS, failed(severity)), status=226)
    assert found.state == state
    assert "memory on gpu 3: it is bad" in found.reason


def test_without_a_severity_only_software_tests_are_settings() -> None:
    old = {"gpu_ids": "3", "status": "Fail", "warnings": "it is bad"}
    assert judged(diagnostics(PASS, old)).state == "sick"
    assert judged(diagnostics(PASS, old, category="Deployment")).state == "could_not_check"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "gave no report: nothing at all"),
        ("Error: unable to connect to the host engine", "gave no report: Error: unable to connect"),
        (diagnostics(PASS)[:-5], "gave no report"),
        (diagnostics(PASS, {"status": "Perhaps"}), "the status 'perhaps' of a test is unknown"),
        (diagnostics(SKIP), "no test was made"),
        ("{}", "no test was made"),
        (json.dumps({"DCGM Diagnostic": {"runtime_error": "out of handles"}}), "dcgmi: out of handles"),
        (diagnostics(*[PASS] * 2_000), "more than 1000 results"),
    ],
)
def test_a_report_that_cannot_be_read_is_neither_healthy_nor_sick(text: str, said: str) -> None:
    found = judged(text)
    assert (found.state, said in found.reason, found.expected) == ("could_not_check", True, True)


def test_a_tool_that_fails_although_all_tests_passed_is_not_believed() -> None:
    assert judged(diagnostics(PASS), status=1).state == "could_not_check"


@given(output_with("DCGM Diagnostic", "test_categories", "tests", "results", "status", "warnings"))
def test_any_report_is_read_without_an_error(output: bytes) -> None:
    assert tools.judge_dcgm(tools.parse_dcgm(output), 0, "").state in ("passed", "sick", "could_not_check")


def test_dcgmi_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(
        tmp_path, "dcgmi", f"test \"$*\" = 'diag -r 1 -j' && echo 'log line' && echo '{diagnostics(PASS)}'", monkeypatch
    )
    assert tools.dcgm_absent(asked(host(1))) == ""
    assert tools.run_dcgm(asked(host(1))).state == "passed"


@pytest.mark.parametrize("script", ["sleep 100", "exec yes '{'", "exit 1", "kill -9 $$", "head -c 100000 /dev/urandom"])
def test_a_tool_that_hangs_chatters_or_dies_is_neither_healthy_nor_sick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    for name in ("dcgmi", "all_reduce_perf"):
        tool(tmp_path, name, script, monkeypatch)
    begin_s = time.monotonic()
    assert tools.run_dcgm(asked(host(2), within_s=1.0)).state == "could_not_check"
    assert tools.run_nccl_tests(asked(host(2), within_s=1.0)).state == "could_not_check"
    assert time.monotonic() - begin_s < 15.0


def test_a_tool_that_is_not_installed_is_not_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.dcgm_absent(asked(host(2))) == "dcgmi is not installed"
    assert "is not installed" in tools.nccl_tests_absent(asked(host(2)))
    assert "is not installed" in tools.ib_write_bw_absent(asked(Host(rdma_devices=("mlx5_0",))))


def test_a_tool_that_is_installed_is_asked_only_where_there_is_something_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dcgmi", "all_reduce_perf", "ib_write_bw"):
        tool(tmp_path, name, "exit 0", monkeypatch)
    assert [tools.dcgm_absent(asked(host(gpus))) for gpus in (0, 1)] == [NO_GPU, ""]
    assert [tools.nccl_tests_absent(asked(host(gpus))) for gpus in (0, 1, 2)] == [NO_GPU, ONE_GPU, ""]
    assert tools.ib_write_bw_absent(asked(host(2))) == "this host has no RDMA device"
    assert tools.ib_write_bw_absent(asked(Host(rdma_devices=("mlx5_0",)))) == ""


def test_sums_that_are_right_pass_with_their_bandwidth() -> None:
    found = tools.judge_nccl_tests(SUMS.encode(), 0, "", BUS)
    assert (found.state, found.values[1].value) == ("passed", 376.55e9)


def test_sums_that_are_wrong_are_sick() -> None:
    wrong = SUMS.replace(": 0 OK", ": 12 FAILED").encode()
    assert tools.judge_nccl_tests(wrong, 1, "", BUS).reason == "12 values of the sums are wrong"


def test_sums_below_the_site_s_bandwidth_are_sick() -> None:
    site = asked(thresholds=("nccl_tests.bus_bytes_per_second=4e11",)).site
    assert tools.judge_nccl_tests(SUMS.encode(), 0, "", site.thresholds[BUS.name]).state == "sick"


@pytest.mark.parametrize(
    ("output", "status"), [(SUMS[:150], 0), ("", 0), (SUMS, 3), (SUMS.replace("376.55", "nan"), 0)]
)
def test_sums_of_which_the_end_is_missing_are_not_judged(output: str, status: int) -> None:
    assert tools.judge_nccl_tests(output.encode(), status, "NCCL failure", BUS).state == "could_not_check"


@given(st.binary(max_size=300))
def test_any_output_of_nccl_tests_is_read_without_an_error(output: bytes) -> None:
    assert tools.judge_nccl_tests(output, 0, "", BUS).state == "could_not_check"


def test_all_reduce_perf_is_run_on_all_gpus_with_nccl_s_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tool(tmp_path, "all_reduce_perf", f"test $1$2$NCCL_ALGO = -g4Ring && cat <<.\n{SUMS}.", monkeypatch)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert tools.run_nccl_tests(asked(host(4))).state == "passed"
    path.unlink()
    assert tools.run_nccl_tests(asked(host(4))).state == "could_not_check"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WRITE_BW, 391.44e9 / 8),
        (WRITE_BW.replace("Gb/sec", "MB/sec"), 391.44 * (1 << 20)),
        (WRITE_BW.replace("Gb/sec", "furlongs/sec"), None),
        (WRITE_BW[:250], None),
        (WRITE_BW.replace("391.44", "nan"), None),
        (WRITE_BW.replace("391.44", "inf"), None),
        ("", None),
    ],
)
def test_the_bandwidth_is_read_in_every_unit(text: str, expected: float | None) -> None:
    assert tools.parse_ib_write_bw(text.encode()) == (None if expected is None else pytest.approx(expected))


@given(st.binary(max_size=300) | st.text().map(lambda text: (WRITE_BW[:250] + text).encode()))
def test_any_output_of_perftest_is_read_without_an_error(output: bytes) -> None:
    assert tools.parse_ib_write_bw(output) is None or b"BW average" in output


def test_a_device_far_slower_than_those_of_its_rate_is_sick() -> None:
    rates = {"mlx5_0": "400 Gb/sec", "mlx5_1": "400 Gb/sec", "mlx5_2": "400 Gb/sec", "mlx5_3": "25 Gb/sec"}
    speeds = {"mlx5_0": 4.9e10, "mlx5_1": 4.8e10, "mlx5_2": 1e10, "mlx5_3": 3e9}
    found = tools.judge_ib_write_bw(speeds, rates, [], THRESHOLDS)
    assert (found.state, found.reason.startswith("mlx5_2: throughput_ratio")) == ("sick", True)


def test_a_device_that_gave_no_figure_keeps_the_others_from_passing() -> None:
    assert tools.judge_ib_write_bw({"a": 1e10}, {"a": "1"}, ["b: no answer"], THRESHOLDS).state == "could_not_check"


def test_each_active_device_writes_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'for last; do :; done; if [ "$last" = 127.0.0.1 ]; then cat <<.\n{WRITE_BW}.\nelse exec sleep 1; fi'
    tool(tmp_path, "ib_write_bw", script, monkeypatch)
    monkeypatch.setattr(tools, "active_rate", lambda name: "400 Gb/sec" if name != "mlx5_9" else "")
    found = tools.run_ib_write_bw(asked(Host(gpus=(gpu(0),), rdma_devices=("mlx5_0", "mlx5_1", "mlx5_9"))))
    assert (found.state, found.reason) == ("passed", "2 devices, 391 Gb/s or more to themselves")
    for server in threading.enumerate():
        if server.name == "ib-server":  # the real one ends with its client
            server.join()


def test_only_active_ports_have_a_rate(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    rates = [tools.active_rate(name, tmp_path) for name in ("mlx5_0", "mlx5_1", "mlx5_2")]
    assert rates == ["400 Gb/sec (4X NDR)", "", ""]
