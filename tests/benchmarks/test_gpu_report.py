"""``make test-gpu``: what is kept of a run on a GPU, and that nothing is kept where there was none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import OUT, ROOT, main
from benchmarks.gpu.report import BadReport, Machine, file_name, has_shown, outcomes, table

MACHINE = Machine(
    gpus=["NVIDIA H100 80GB HBM3"] * 8, driver="580.1", cuda="13.0", python="3.11.2", torch="2.9", processors=16
)
TESTS = """
import json
import pytest

def test_measures(record_property):
    record_property("step_s", json.dumps(0.25))
    record_property("readings", json.dumps({"gpu_power_watts": 71.5}))

@pytest.mark.skip(reason="no Python with torch for CUDA")
def test_needs_torch():
    pass
"""
FAILING = """
def test_fails():
    assert 1 == 2, "one is not two"
"""
NOTHING = """
import pytest

@pytest.mark.skip(reason="no NVIDIA GPU")
def test_needs_gpu():
    pass
"""


def run(folder: Path, text: str) -> tuple[int, dict[str, Any] | None]:
    """Run such tests as if on a machine with eight GPUs; return the exit code and what was kept."""
    tests = folder / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(text)
    (tests / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")  # as in this project
    code = main(["--tests", str(tests), "--out", str(folder / "out")], lambda: MACHINE, "abc+")
    kept = folder / "out" / "nvidia-h100-80gb-hbm3-x8.json"
    return code, json.loads(kept.read_text()) if kept.exists() else None


@pytest.mark.slow
def test_a_run_is_kept_with_its_machine_its_figures_and_what_was_skipped(tmp_path: Path) -> None:
    code, kept = run(tmp_path, TESTS)
    assert code == 0
    assert kept is not None
    assert (kept["format"], kept["commit"], kept["machine"]["driver"]) == ("eagle-eye-gpu-results/1", "abc+", "580.1")
    measured, skipped = kept["outcomes"]
    assert (measured["test"], measured["state"]) == ("test_it.test_measures", "passed")
    assert measured["figures"] == {"step_s": 0.25, "readings": {"gpu_power_watts": 71.5}}
    assert (skipped["state"], skipped["reason"]) == ("skipped", "no Python with torch for CUDA")


@pytest.mark.slow
def test_pytests_own_output_is_kept_beside_it(tmp_path: Path) -> None:
    run(tmp_path, TESTS)
    assert "1 passed, 1 skipped" in (tmp_path / "out" / "nvidia-h100-80gb-hbm3-x8.txt").read_text()


@pytest.mark.slow
def test_a_failure_is_kept_too_and_is_the_exit_code(tmp_path: Path) -> None:
    code, kept = run(tmp_path, FAILING)
    assert code == 1
    assert kept is not None
    assert kept["outcomes"][0]["state"] == "failed"
    assert "one is not two" in kept["outcomes"][0]["reason"]


@pytest.mark.slow
def test_where_nothing_ran_nothing_is_kept_and_the_reason_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, NOTHING) == (2, None)
    assert not (tmp_path / "out").exists()
    assert "nothing is kept: no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_tests_that_cannot_be_collected_are_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tests", str(tmp_path / "none"), "--out", str(tmp_path / "out")], lambda: MACHINE, "") == 2
    assert "pytest ended with 4" in capsys.readouterr().err


def test_each_test_is_a_line_with_its_numbers_or_why_there_are_none() -> None:
    xml = (
        '<testsuites><testsuite><testcase classname="tests.gpu.test_overhead" name="test_a" time="61.2"><properties>'
        '<property name="overhead_ratio" value="0.00123"/><property name="readings" value="{}"/></properties>'
        '</testcase><testcase classname="tests.gpu.test_check" name="test_b" time="0"><skipped message="why"/>'
        '</testcase></testsuite></testsuites>'
    )  # fmt: skip
    found = outcomes(xml)
    assert table(found).splitlines() == [
        "passed      61.2 s  test_overhead.test_a: overhead_ratio 0.00123",
        "skipped      0.0 s  test_check.test_b: why",
        "1 passed, 1 skipped",
    ]
    assert has_shown(found)
    assert not has_shown(found[1:])


def test_what_is_no_report_is_said() -> None:
    with pytest.raises(BadReport, match="expected pytest's report"):
        outcomes("<testsuites>")


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (["NVIDIA GB200"] * 4, "nvidia-gb200-x4"),
        (["NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB"], "nvidia-a100-sxm4-80gb-nvidia-h100-pcie-x2"),
        (["../é"], "-----x1"),
        ([], "unknown-x0"),
    ],
)
def test_a_file_is_named_by_its_gpus(gpus: list[str], name: str) -> None:
    machine = Machine(gpus=gpus, driver="", cuda="", python="", torch="", processors=1)
    assert file_name(machine) == name


def test_what_runs_without_a_gpu_is_not_among_those_tests() -> None:
    """It would make a result of a machine that has none."""
    files = list((ROOT / "tests" / "gpu").glob("test_*.py"))
    assert len(files) >= 5
    assert [file.name for file in files if "\npytestmark = needs_gpu\n" not in file.read_text()] == []


def test_each_kept_result_is_of_a_real_run() -> None:
    """Nothing but what the command writes belongs there."""
    for file in OUT.glob("*.json"):
        kept = json.loads(file.read_text())
        machine = Machine(**kept["machine"])
        assert (kept["format"], file.stem) == ("eagle-eye-gpu-results/1", file_name(machine))
        assert file.with_suffix(".txt").exists()
    assert {file.suffix for file in OUT.iterdir()} <= {".json", ".txt", ".md"}
