"""The search for silent corruption: wrong numbers that nothing reports, injected into the children's work."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_eye.checks import command, corruption, runner
from eagle_eye.checks.check import CheckResult
from eagle_eye.checks.child import Children
from eagle_eye.checks.command import verdict_reason
from eagle_eye.checks.runner import CHECKS, SDC
from eagle_eye.checks.work import in_torch as work
from eagle_eye.checks.work.lines import FINDINGS_MAX, WorkerOutput
from eagle_eye.server.engine import ledger
from tests.checks.builders import answered, answering, asked, gpu, host
from tests.checks.test_command import report

CPU = torch.device("cpu")
SMALL = (work.Product("float32", 64, 128, 64), work.Product("float64", 64, 32, 1 << 20))
AT_ONCE = {"seconds": 0.0, "quick": False}
FINE = {"operations": 4_000.0, "wrong": 0.0, "seconds": 45.0}
FOUND = {"operation": "float32 64x128x64", "index": "7,9", "expected": "45.0", "got": "47.0"}


class Corrupting:
    """torch on a device that silently gets numbers of its products wrong, from the ``nth`` product on."""

    def __init__(self, nth: int, value: float = 47.0) -> None:
        self._left = nth
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def matmul(self, *operands: torch.Tensor) -> torch.Tensor:
        found = torch.matmul(*operands)
        if self._left <= 0:
            found[7, 9] = self._value
        self._left -= 1
        return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "CPU_PRODUCTS", SMALL)


def searched(on: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the work's values and what it told on the way."""
    read, write = os.pipe()
    values = work.sdc_gemm(on, CPU, AT_ONCE, 0, WorkerOutput(0, write))
    os.close(write)
    with os.fdopen(read, "rb") as lines:
        reported = [json.loads(text) for text in lines]
    return values, [line["finding"] for line in reported if "finding" in line]


def test_a_sound_device_computes_as_is_known() -> None:
    values, found = searched(torch)
    assert (values["operations"], values["wrong"], found) == (len(SMALL) * work.SDC_REPETITIONS, 0, [])


def test_a_wrong_number_is_told_with_its_place_what_was_expected_and_what_came() -> None:
    values, found = searched(Corrupting(0, 47.0))
    assert values["wrong"] == len(SMALL) * work.SDC_REPETITIONS
    known = work._known(torch, CPU, SMALL[0])
    assert found[0] == {
        "operation": "float32 64x128x64",
        "index": "7,9",
        "expected": repr(float((known.left.double() @ known.right.double())[7, 9])),
        "got": "47.0",
    }
    assert len(found) == FINDINGS_MAX


def test_a_product_that_is_wrong_from_the_first_time_on_is_no_truth() -> None:
    # Each repetition agrees with the first one, and all are wrong.
    assert searched(Corrupting(0))[0]["wrong"] > 0


def test_one_wrong_repetition_late_in_the_search_is_found() -> None:
    assert searched(Corrupting(len(SMALL) * work.SDC_REPETITIONS - 1))[0]["wrong"] == 1


def test_a_number_that_is_none_is_wrong() -> None:
    _, found = searched(Corrupting(0, float("nan")))
    assert found[0]["got"] == "nan"


def test_a_device_whose_comparison_is_broken_is_found_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    known = work._known(torch, CPU, SMALL[0])
    blind = known._replace(expected=known.expected.clone())
    blind.expected[7, 9] = 47.0  # what the device compares with is wrong in the same way
    result = blind.expected.clone()
    line = WorkerOutput(0, os.open(os.devnull, os.O_WRONLY))
    assert [work._wrong(result, blind, line, by_host=by_host) for by_host in (False, True)] == [0, 1]


def test_a_host_that_miscomputes_is_not_taken_for_the_truth() -> None:
    class Host:
        """torch on a host whose products are wrong."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def randint(self, *given: Any, **more: Any) -> torch.Tensor:
            return torch.randint(*given, **more).as_subclass(Miscomputing)

    with pytest.raises(work.HostMiscomputes, match="float32 64x128x64"):
        work._known(Host(), CPU, SMALL[0])


class Miscomputing(torch.Tensor):
    """A matrix whose product has one number wrong."""

    def __matmul__(self, other: Any) -> torch.Tensor:
        found = torch.matmul(self.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))
        found[3, 5] += 1
        return found


@pytest.mark.parametrize("product", [*work.PRODUCTS, *work.CPU_PRODUCTS], ids=lambda one: f"{one.name}-{one.most}")
def test_every_sum_and_every_part_of_it_is_exact_in_its_type(product: work.Product) -> None:
    assert product.inner * product.most**2 <= work.EXACT[product.number]
    number = getattr(torch, product.number)
    limit = work.EXACT[product.number]
    assert [float(torch.tensor(whole, dtype=number)) for whole in (limit, limit - 1)] == [limit, limit - 1]
    assert product.rows * product.inner * product.most**2 < 1 << 63  # the checksums'


def test_nothing_found_says_for_how_long_and_how_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Children(courses=(answered(FINE), answered(FINE)), status=0, ended_s=100.0))
    found = corruption.run_gemm(asked(host(2)))
    assert (found.state, found.reason) == ("passed", "nothing found in 45 s, 8000 products on 2 GPUs")
    outcome = CheckResult(name="sdc_gemm", state="passed", reason=found.reason, duration_s=1.0, expected=True)
    assert verdict_reason("healthy", [outcome], "") == f"{found.reason}; beyond that it says nothing"


@pytest.mark.parametrize("check", [corruption.SDC_GEMM, corruption.SDC_ALL_REDUCE])
def test_a_gpu_with_wrong_numbers_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    lines = ({"worker": 1, "at_s": 1.0, "finding": FOUND},)
    courses = (answered(FINE), answered({**FINE, "wrong": 3.0}))
    answering(monkeypatch, Children(courses=courses, status=0, ended_s=100.0, answers=lines))
    found = check.run(asked(host(2)))
    assert found.state == "sick"
    assert found.reason.startswith("gpu 1: 3 wrong numbers in 4000 ")
    assert found.reason.endswith("(GPU-1): float32 64x128x64 [7,9] expected 45.0, got 47.0")
    assert {figure.device: figure.value for figure in found.values if figure.name == "wrong_numbers"} == {
        "GPU-0": 0.0,
        "GPU-1": 3.0,
    }


def test_what_a_child_tells_of_wrong_numbers_is_not_trusted() -> None:
    lines: tuple[dict[str, Any], ...] = (
        {"worker": 0, "finding": {"operation": "x\n\x1b[2J" * 500, "got": [1]}},
        {"worker": "0", "finding": FOUND},
        {"worker": 0, "finding": "text"},
    )
    (reported,) = corruption.findings(Children(courses=(), status=0, ended_s=1.0, answers=lines))[0]
    assert (len(reported) <= corruption.FINDING_CHARS_MAX, reported.isprintable()) == (True, True)


def test_gpus_that_cannot_be_given_work_are_not_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Children(courses=(answered(FINE),), status=0, ended_s=1.0))
    divided = host(0).__class__(gpus=(gpu(0, instances=7),))
    assert [check.run(asked(divided)).state for check in (corruption.SDC_GEMM, corruption.SDC_ALL_REDUCE)] == [
        "could_not_check"
    ] * 2


def test_it_is_looked_for_only_when_that_is_asked_for() -> None:
    assert tuple(check.name for check in CHECKS if check.on_request) == SDC


@pytest.mark.parametrize("seconds", [corruption.WORK_S_MIN, corruption.WORK_S, corruption.WORK_S_MAX])
@pytest.mark.parametrize("starts_s", [command.SDC_STARTS_S, ledger.SDC_STARTS_S])
def test_the_second_half_has_its_time_when_the_first_took_half_a_minute_to_start(
    seconds: float, starts_s: float
) -> None:
    site = replace(asked().site, sdc_s=seconds)
    left_s = seconds + starts_s - corruption.GEMM_SHARE * seconds - 30.0
    check = corruption.SDC_ALL_REDUCE
    assert left_s >= runner.BEGIN_RATIO * (check.limit_s + check.longer_s(site))
    assert left_s >= (1.0 - corruption.GEMM_SHARE) * seconds + 30.0


@pytest.mark.slow
def test_the_command_finds_what_a_corrupting_torch_computes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\nright = torch.matmul\n"
        "def wrong(*operands, **more):\n    found = right(*operands, **more)\n    found[7, 9] += 2\n    return found\n"
        "torch.matmul = wrong\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    nowhere = "gpus.host = lambda until_s: Host()"
    flags = ("--sdc", "--seconds", "2", "--torch-python", str(python))
    status, reported, _ = report(tmp_path / "lock", *flags, more=nowhere)
    assert (status, reported["verdict"], reported["reason"]) == (3, "sick", "sdc_gemm")
    products, sums = reported["checks"]
    assert "wrong numbers" in products["reason"]
    assert "[7,9] expected" in products["reason"]
    assert sums["state"] == "passed"  # the sums were right


@pytest.mark.slow
def test_the_command_finds_nothing_on_a_sound_host(tmp_path: Path) -> None:
    status, reported, _ = report(
        tmp_path / "lock", "--sdc", "--seconds", "2", more="gpus.host = lambda until_s: Host()"
    )
    assert (status, reported["verdict"]) == (0, "healthy")
    assert reported["reason"].startswith("nothing found in ")
