"""Runs perftest's ib_write_bw from each RDMA device to itself, where installed."""

from __future__ import annotations

import itertools
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from eagle_eye.agent import external_tool as tool
from eagle_eye.checks import devices
from eagle_eye.checks.check import (
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
from eagle_eye.checks.thresholds import Threshold, against_peers

PROGRAM = "ib_write_bw"
OUTPUT_BYTES_MAX = 64 << 10
DEVICES_MAX = 16
DEVICE_S = 8.0  # for one device; it takes a second
LISTEN_S = 0.5  # until the server's end listens; asked again while there is time
MESSAGES = "2000"
BANDWIDTH = "bytes_per_second"
ACTIVE = "ACTIVE"

_UNITS = {"Gb/sec": 1e9 / 8, "MB/sec": float(1 << 20), "MiB/sec": float(1 << 20)}  # perftest's MB are MiB
_HEADER = re.compile(r"#bytes.*BW average\[([A-Za-z]+/sec)\]")


def absent(asked: CheckOptions) -> str:
    """Return why it cannot run here, or has no device."""
    if not asked.host.rdma_devices:
        return "this host has no RDMA device"
    return "" if tool.find(PROGRAM) else f"{PROGRAM} (perftest) is not installed"


def run(asked: CheckOptions) -> Result:
    """Return each active device's bandwidth to itself, and whether one is an outlier."""
    path = tool.find(PROGRAM) or PROGRAM
    rates = {name: rate for name in asked.host.rdma_devices if (rate := active_rate(name))}
    if not rates:
        return could_not_check("no RDMA device has an active port")
    speeds: dict[str, float] = {}
    problems = []
    for name in list(rates)[:DEVICES_MAX]:
        if time.monotonic() >= asked.until_s:
            problems.append(f"{name}: no time was left")
            continue
        try:
            speed, problem = _loopback(path, name, min(asked.until_s, time.monotonic() + DEVICE_S))
        except OSError as error:
            speed, problem = None, str(error.strerror or error)
        if speed is None:
            problems.append(f"{name}: {problem}")
        else:
            speeds[name] = speed
    return judge(speeds, rates, problems, asked.site.thresholds)


def judge(
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
            reason, figure = devices.measured(what, value, name, thresholds[f"{PROGRAM}.{what}"])
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


def parse(output: bytes) -> float | None:
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
    arguments = ("-d", device, "-p", port, "-n", MESSAGES, "-s", "65536", "-F", "--report_gbits")
    server = threading.Thread(
        target=_serve, args=(bounded_command(path, arguments, until_s), until_s), name="ib-server", daemon=True
    )
    server.start()
    said = "no answer in time"
    while (left_s := until_s - time.monotonic()) > 0.0:
        time.sleep(min(LISTEN_S, left_s))
        ran = tool.run(bounded_command(path, (*arguments, "127.0.0.1"), until_s), until_s, OUTPUT_BYTES_MAX)
        if ran.status == 0:
            found = parse(ran.output)
            return found, "" if found is not None else f"no bandwidth in what {PROGRAM} said"
        said = "no answer in time" if ran.status is None else f"ended with {ran.status}: {ran.complaint[-200:]}"
        if not server.is_alive():
            break  # the server has given up, and would not be there at the next try either
    return None, printable(said)


def _serve(command: tuple[str, ...], until_s: float) -> None:
    try:
        tool.run(command, until_s, OUTPUT_BYTES_MAX)
    except OSError:
        return  # the client's end says that nobody answers


CHECK = Check(
    name="ib_write_bw",
    needs="ib_write_bw (perftest), an RDMA device with an active port",
    measures="what each RDMA device moves to itself, against the others of its rate",
    limit_s=40.0,
    quick_limit_s=None,
    absent=absent,
    run=run,
)
