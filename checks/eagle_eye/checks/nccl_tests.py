"""Runs nccl-tests' all_reduce_perf, where installed."""

from __future__ import annotations

import re

from eagle_eye.agent import external_tool as tool
from eagle_eye.checks import devices
from eagle_eye.checks.check import (
    NO_GPU,
    ONE_GPU,
    Check,
    CheckOptions,
    Measured,
    Result,
    could_not_check,
    passed,
    printable,
    sick,
)
from eagle_eye.checks.child import bounded_command
from eagle_eye.checks.thresholds import Threshold

OUTPUT_BYTES_MAX = 1 << 20
BUS_BANDWIDTH = "bus_bytes_per_second"
# From latency-bound to bandwidth-bound sizes; checked (-c); few iterations: this is not a benchmark.
ARGUMENTS = ("-b", "8M", "-e", "512M", "-f", "8", "-c", "1", "-w", "2", "-n", "10")

_OUT_OF_BOUNDS = re.compile(rb"^#\s*Out of bounds values\s*:\s*(\d{1,18})\b", re.MULTILINE)
_BANDWIDTH = re.compile(rb"^#\s*Avg bus bandwidth\s*:\s*(\d{1,12}(?:\.\d{1,12})?)\s*$", re.MULTILINE)


def absent(asked: CheckOptions) -> str:
    """Return why it cannot run here, or has no device."""
    if tool.find(asked.site.all_reduce_perf) is None:
        return f"{asked.site.all_reduce_perf} is not installed (--all-reduce-perf names its place)"
    if not asked.host.has_gpus:
        return NO_GPU
    return ONE_GPU if len(asked.host.gpus) == 1 else ""


def run(asked: CheckOptions) -> Result:
    """Return whether all sums were right, and the bus bandwidth."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    path = tool.find(asked.site.all_reduce_perf) or asked.site.all_reduce_perf
    command = bounded_command(path, ("-g", str(len(asked.host.gpus)), *ARGUMENTS), asked.until_s)
    try:
        ran = tool.run(command, asked.until_s, OUTPUT_BYTES_MAX)
    except OSError as error:
        return could_not_check(f"{path}: {error.strerror or error}")
    if ran.status is None:
        why = "said too much and was stopped" if ran.cut else "did not finish in time"
        return could_not_check(f"{path} {why}")
    return judge(ran.output, ran.status, ran.complaint, asked.site.thresholds[f"nccl_tests.{BUS_BANDWIDTH}"])


def judge(output: bytes, status: int, complaint: str, threshold: Threshold) -> Result:
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


CHECK = Check(
    name="nccl_tests",
    needs="all_reduce_perf of nccl-tests, two GPUs or more",
    measures="NVIDIA's own all-reduce test among the node's GPUs: wrong values, bus bandwidth",
    limit_s=45.0,
    quick_limit_s=None,
    absent=absent,
    run=run,
    loads_gpus=True,
)
