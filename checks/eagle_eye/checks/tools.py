"""The checks with the site's own tools, where installed: nccl-tests, perftest's ib_write_bw, DCGM's diagnostics."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eagle_eye.agent import external_tool as tool
from eagle_eye.checks import devices
from eagle_eye.checks.check import (
    NO_GPU,
    ONE_GPU,
    Check,
    CheckOptions,
    Measured,
    Result,
    Threshold,
    against_peers,
    could_not_check,
    passed,
    printable,
    sick,
)
from eagle_eye.checks.child import bounded_command

NCCL_TESTS_OUTPUT_BYTES_MAX = 1 << 20
BUS_BANDWIDTH = "bus_bytes_per_second"
# From latency-bound to bandwidth-bound sizes; checked (-c); few iterations: this is not a benchmark.
NCCL_TESTS_ARGUMENTS = ("-b", "8M", "-e", "512M", "-f", "8", "-c", "1", "-w", "2", "-n", "10")

_OUT_OF_BOUNDS = re.compile(rb"^#\s*Out of bounds values\s*:\s*(\d{1,18})\b", re.MULTILINE)
_BANDWIDTH = re.compile(rb"^#\s*Avg bus bandwidth\s*:\s*(\d{1,12}(?:\.\d{1,12})?)\s*$", re.MULTILINE)


def nccl_tests_absent(asked: CheckOptions) -> str:
    """Return why it cannot run here, or has no device."""
    if tool.find(asked.site.all_reduce_perf) is None:
        return f"{asked.site.all_reduce_perf} is not installed (--all-reduce-perf names its place)"
    if not asked.host.has_gpus:
        return NO_GPU
    return ONE_GPU if len(asked.host.gpus) == 1 else ""


def run_nccl_tests(asked: CheckOptions) -> Result:
    """Return whether all sums were right, and the bus bandwidth."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    path = tool.find(asked.site.all_reduce_perf) or asked.site.all_reduce_perf
    command = bounded_command(path, ("-g", str(len(asked.host.gpus)), *NCCL_TESTS_ARGUMENTS), asked.until_s)
    try:
        ran = tool.run(command, asked.until_s, NCCL_TESTS_OUTPUT_BYTES_MAX)
    except OSError as error:
        return could_not_check(f"{path}: {error.strerror or error}")
    if ran.status is None:
        why = "said too much and was stopped" if ran.cut else "did not finish in time"
        return could_not_check(f"{path} {why}")
    return judge_nccl_tests(ran.output, ran.status, ran.complaint, asked.site.thresholds[f"nccl_tests.{BUS_BANDWIDTH}"])


def judge_nccl_tests(output: bytes, status: int, complaint: str, threshold: Threshold) -> Result:
    """Judge the output: its last lines count the wrong values, and give the mean bus bandwidth."""
    wrong, bandwidth = _OUT_OF_BOUNDS.search(output), _BANDWIDTH.search(output)
    if wrong is None or bandwidth is None:
        said = complaint or output.decode("utf-8", "replace").strip()[-200:] or "nothing"
        return could_not_check(f"ended with {status} and without a result: {printable(said)}")
    source = "nccl-tests: values that differ from the known sum"
    count = Measured(name="out_of_bounds", value=float(wrong[1]), unit="1", threshold=0.0, source=source)
    reason, figure = devices.measured(BUS_BANDWIDTH, float(bandwidth[1]) * 1e9, "", threshold)
    if int(wrong[1]):
        return sick(f"{int(wrong[1])} values of the sums are wrong", count, figure)
    if status != 0:
        return could_not_check(f"ended with {status}: {complaint or 'no reason given'}", count, figure)
    if reason:
        return sick(reason, count, figure)
    return passed(f"every sum right, {float(bandwidth[1]):.1f} GB/s", count, figure)


NCCL_TESTS = Check(
    name="nccl_tests",
    needs="all_reduce_perf of nccl-tests, two GPUs or more",
    measures="NVIDIA's own all-reduce test among the node's GPUs: wrong values, bus bandwidth",
    limit_s=45.0,
    quick_limit_s=None,
    absent=nccl_tests_absent,
    run=run_nccl_tests,
    loads_gpus=True,
)


IB_PROGRAM = "ib_write_bw"
IB_OUTPUT_BYTES_MAX = 64 << 10
IB_DEVICES_MAX = 16
IB_DEVICE_S = 8.0  # for one device; it takes a second
IB_LISTEN_S = 0.5  # until the server's end listens; asked again while there is time
IB_MESSAGES = "2000"
BANDWIDTH = "bytes_per_second"
ACTIVE = "ACTIVE"

_UNITS = {"Gb/sec": 1e9 / 8, "MB/sec": float(1 << 20), "MiB/sec": float(1 << 20)}  # perftest's MB are MiB
_HEADER = re.compile(r"#bytes.*BW average\[([A-Za-z]+/sec)\]")


def ib_write_bw_absent(asked: CheckOptions) -> str:
    """Return why it cannot run here, or has no device."""
    if not asked.host.rdma_devices:
        return "this host has no RDMA device"
    return "" if tool.find(IB_PROGRAM) else f"{IB_PROGRAM} (perftest) is not installed"


def run_ib_write_bw(asked: CheckOptions) -> Result:
    """Return each active device's bandwidth to itself, and whether one is an outlier."""
    path = tool.find(IB_PROGRAM) or IB_PROGRAM
    rates = {name: rate for name in asked.host.rdma_devices if (rate := active_rate(name))}
    if not rates:
        return could_not_check("no RDMA device has an active port")
    speeds: dict[str, float] = {}
    problems = []
    for name in list(rates)[:IB_DEVICES_MAX]:
        if time.monotonic() >= asked.until_s:
            problems.append(f"{name}: no time was left")
            continue
        try:
            speed, problem = _loopback(path, name, min(asked.until_s, time.monotonic() + IB_DEVICE_S))
        except OSError as error:
            speed, problem = None, str(error.strerror or error)
        if speed is None:
            problems.append(f"{name}: {problem}")
        else:
            speeds[name] = speed
    return judge_ib_write_bw(speeds, rates, problems, asked.site.thresholds)


def judge_ib_write_bw(
    speeds: Mapping[str, float], rates: Mapping[str, str], problems: list[str], thresholds: Mapping[str, Threshold]
) -> Result:
    """Judge the devices' bandwidths; ``rates``: the port's rate, by which they are comparable."""
    ratios = against_peers(speeds, rates)
    figures: list[Measured] = []
    reasons = []
    for name, speed in speeds.items():
        for what, value in ((BANDWIDTH, speed), ("throughput_ratio", ratios.get(name))):
            if value is None:
                continue
            reason, figure = devices.measured(what, value, name, thresholds[f"{IB_PROGRAM}.{what}"])
            figures.append(figure)
            reasons += [f"{name}: {reason}"] if reason else []
    if reasons:
        return sick("; ".join(reasons), *figures)
    if problems:
        return could_not_check("; ".join(problems), *figures)
    slowest = min(speeds.values(), default=0.0)
    return passed(f"{len(speeds)} devices, {slowest * 8e-9:.0f} Gb/s or more to themselves", *figures)


def active_rate(name: str, sys: Path = Path("/sys")) -> str:
    """Return the rate of the device's first port as the kernel writes it; "" when it is not active."""
    port = sys / "class/infiniband" / name / "ports/1"
    try:
        state = (port / "state").read_text(encoding="ascii", errors="replace")
        return (port / "rate").read_text(encoding="ascii", errors="replace").strip() if ACTIVE in state else ""
    except OSError:
        return ""


def parse_ib_write_bw(output: bytes) -> float | None:
    """Return the average bandwidth in bytes a second; None where the output has none."""
    lines = output.decode("utf-8", "replace").splitlines()
    for header, line in itertools.pairwise(lines):
        if not (found := _HEADER.search(header)) or found[1] not in _UNITS:
            continue
        fields = line.split()  # bytes, iterations, peak, average
        try:
            value = float(fields[3]) * _UNITS[found[1]]
        except (IndexError, ValueError):
            return None
        return value if 0.0 < value < 1e15 else None
    return None


def _loopback(path: str, device: str, until_s: float) -> tuple[float | None, str]:
    """Return the bandwidth from a device to itself, or why there is none. Raises OSError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = ("-d", device, "-p", port, "-n", IB_MESSAGES, "-s", "65536", "-F", "--report_gbits")
    server = threading.Thread(
        target=_serve, args=(bounded_command(path, arguments, until_s), until_s), name="ib-server", daemon=True
    )
    server.start()
    said = "no answer in time"
    while (left_s := until_s - time.monotonic()) > 0.0:
        time.sleep(min(IB_LISTEN_S, left_s))
        ran = tool.run(bounded_command(path, (*arguments, "127.0.0.1"), until_s), until_s, IB_OUTPUT_BYTES_MAX)
        if ran.status == 0:
            found = parse_ib_write_bw(ran.output)
            return found, "" if found is not None else f"no bandwidth in what {IB_PROGRAM} said"
        said = "no answer in time" if ran.status is None else f"ended with {ran.status}: {ran.complaint[-200:]}"
        if not server.is_alive():
            break  # the server has given up, and would not be there at the next try either
    return None, printable(said)


def _serve(command: tuple[str, ...], until_s: float) -> None:
    try:
        tool.run(command, until_s, IB_OUTPUT_BYTES_MAX)
    except OSError:
        return  # the client's end says that nobody answers


IB_WRITE_BW = Check(
    name="ib_write_bw",
    needs="ib_write_bw (perftest), an RDMA device with an active port",
    measures="what each RDMA device moves to itself, against the others of its rate",
    limit_s=40.0,
    quick_limit_s=None,
    absent=ib_write_bw_absent,
    run=run_ib_write_bw,
)


DCGMI = "dcgmi"
DCGM_OUTPUT_BYTES_MAX = 4 << 20  # level 2 on 16 GPUs says some ten kilobytes
DCGM_LEVELS = (1, 2)
DCGM_TESTS_MAX = 1_000
DCGM_REASONS_MAX = 8

# What DCGM recommends for an error. Source: DCGM, Diagnostic Errors, Error Severity Enum. Isolating, examining or
# resetting the GPU count against the node; monitoring, configuring and "unknown" do not.
_SICK = {2: "isolate", 4: "triage", 6: "reset"}
_CONFIGURATION = 5
# DCGM before 3.2 gives no severity. Its deployment tests check software and settings.
_SETTINGS_CATEGORY = "deployment"


class FailedTest(NamedTuple):
    """One test that failed on one device: its severity, as far as DCGM says, and its text."""

    where: str
    text: str
    of_the_node: bool


class DcgmReport(NamedTuple):
    """The diagnostics' result: how many tests passed, and what failed. ``problem``: why they could not run."""

    passes: int
    failures: tuple[FailedTest, ...]
    problem: str


def dcgm_absent(asked: CheckOptions) -> str:
    """Return why it cannot run here."""
    if tool.find(DCGMI) is None:
        return f"{DCGMI} is not installed"
    return "" if asked.host.has_gpus else NO_GPU


def run_dcgm(asked: CheckOptions) -> Result:
    """Return DCGM's verdict on the node."""
    path = tool.find(DCGMI) or DCGMI
    command = bounded_command(path, ("diag", "-r", str(asked.site.dcgm_level), "-j"), asked.until_s)
    begin_s = time.monotonic()
    try:
        ran = tool.run(command, asked.until_s, DCGM_OUTPUT_BYTES_MAX)
    except OSError as error:
        return could_not_check(f"{path}: {error.strerror or error}")
    if ran.cut:
        return could_not_check(f"{DCGMI} said more than {DCGM_OUTPUT_BYTES_MAX >> 20} MiB and was stopped")
    if ran.status is None:
        return could_not_check(f"{DCGMI} did not finish within {time.monotonic() - begin_s:.0f} s")
    return judge_dcgm(parse_dcgm(ran.output), ran.status, ran.complaint)


def judge_dcgm(report: DcgmReport, status: int, complaint: str) -> Result:
    """Judge a report. dcgmi also exits with a nonzero status for mere settings: the report decides."""
    figures = (Measured(name="tests_passed", value=float(report.passes), unit="1"),)
    own = [failure for failure in report.failures if failure.of_the_node]
    if own:
        return sick(_texts(own), *figures)
    if report.failures:
        return could_not_check(f"a setting, not the hardware, failed: {_texts(report.failures)}", *figures)
    if report.problem or report.passes == 0:
        why = report.problem or f"no test was made ({DCGMI} ended with {status}: {complaint or 'no reason given'})"
        return could_not_check(why, *figures)
    if status != 0:
        return could_not_check(f"{DCGMI} ended with {status} although no test failed: {complaint}", *figures)
    return passed(f"{report.passes} tests passed", *figures)


def parse_dcgm(output: bytes) -> DcgmReport:
    """Parse a report of any version; an invalid one is a problem.

    Versions 2 to 4 name the outermost object and the devices differently; the tree of categories, tests and results
    is the same.
    """
    text = output.decode("utf-8", "replace")
    try:
        # Libraries print around it.
        whole = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return DcgmReport(0, (), f"{DCGMI} gave no report: {printable(text) or 'nothing at all'}")
    diagnostic = next((whole[key] for key in whole if "Diagnostic" in key and isinstance(whole[key], dict)), whole)
    if error := diagnostic.get("runtime_error"):
        return DcgmReport(0, (), f"{DCGMI}: {printable(str(error))}")
    passes, failures = 0, list[FailedTest]()
    for number, (category, test, result) in enumerate(_results(diagnostic)):
        if number >= DCGM_TESTS_MAX:
            return DcgmReport(0, tuple(failures), f"the report has more than {DCGM_TESTS_MAX} results")
        state = str(result.get("status", "")).strip().lower()
        if state == "pass":
            passes += 1
        elif state == "fail":
            failures += _failures(category, test, result)
        elif state not in ("skip", "not run", "notrun", "warn"):
            return DcgmReport(0, tuple(failures), f"the status {printable(state)[:40]!r} of a test is unknown")
    return DcgmReport(passes, tuple(failures), "")


def _results(diagnostic: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for category in _objects(diagnostic.get("test_categories")):
        for test in _objects(category.get("tests")):
            for result in _objects(test.get("results")):
                yield str(category.get("category", "")), printable(str(test.get("name", "a test"))), result


def _failures(category: str, test: str, result: dict[str, Any]) -> Iterator[FailedTest]:
    device = result.get("entity_id", result.get("gpu_ids", result.get("gpu_id")))
    where = f"{test} on gpu {printable(str(device))[:40]}" if device is not None else test
    warnings = result.get("warnings")
    reported = [warning for warning in warnings if warning] if isinstance(warnings, list) else [warnings or {}]
    for warning in reported[:DCGM_REASONS_MAX] or [{}]:
        severity = warning.get("error_severity") if isinstance(warning, dict) else None
        text = warning.get("warning", "") if isinstance(warning, dict) else warning
        if isinstance(severity, int):
            of_the_node = severity in _SICK
            wanted = f" ({_SICK[severity]})" if of_the_node else " (a setting)" if severity == _CONFIGURATION else ""
        else:
            of_the_node, wanted = category.strip().lower() != _SETTINGS_CATEGORY, ""
        yield FailedTest(where, f"{printable(str(text)) or 'failed'}{wanted}", of_the_node)


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))


def _texts(failures: list[FailedTest] | tuple[FailedTest, ...]) -> str:
    return "; ".join(f"{failure.where}: {failure.text}" for failure in failures[:DCGM_REASONS_MAX])


DCGM = Check(
    name="dcgm",
    needs="dcgmi (DCGM), and the host engine that it asks",
    measures="DCGM's diagnostics: level 1, or 2 with --dcgm-level 2",
    limit_s=60.0,
    quick_limit_s=None,
    absent=dcgm_absent,
    run=run_dcgm,
    loads_gpus=True,
)
