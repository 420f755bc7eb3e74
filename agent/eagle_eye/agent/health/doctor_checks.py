"""One-off checks of this host and the agent's setup, for the operator (``doctor``).

Touches files and makes one request to the server. Each check returns findings and never raises: a check that cannot run
is a finding, too.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.agent import external_tool as tool
from eagle_eye.agent.config import AgentConfiguration, server_urls, trust
from eagle_eye.agent.exposition.parser import samples
from eagle_eye.agent.exposition.server import address
from eagle_eye.agent.files.bounded import content
from eagle_eye.agent.health.host_verdict import HostVerdict, healthy
from eagle_eye.agent.loop.tick_result import CollectorStanding
from eagle_eye.agent.nvml.pci_presence import AMD_VENDOR, gpus_on_the_bus
from eagle_eye.agent.training_logs.followed_logs import UNREAD_LINES
from eagle_eye.agent.training_logs.rank_courses import LOG_LINES
from eagle_eye.agent.transport.server_connection import connect, path_on
from eagle_eye.schema.frame import CONTENT_TYPE, encode_request
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.schema.problem import LEADER_HEADER

CLOCK_DIFFERENCE_S_MAX = 2.0  # the server's clock is reported in whole seconds
FREE_BYTES_MIN = 64 << 20
FILE_BYTES_MAX = 4_096
ANSWER_BYTES_MAX = 1 << 16
PAGE_BYTES_MAX, PAGE_S = 1 << 22, 5.0  # of the running agent's metrics
LOG_LINES_METRIC = f"{PROMETHEUS_PREFIX}{LOG_LINES}"
_MAKE_TOKEN = "eagle-eye tokens create --scope agent --node NAME"  # noqa: S105 - a command

State = Literal["ok", "note", "unsupported", "failed"]

# Remedies for collectors that do not work, where their own message does not give one.
_REMEDIES = MappingProxyType(
    {
        "nvml": "load the driver (nvidia-smi must work); in a container set NVIDIA_DRIVER_CAPABILITIES=utility",
        "kernel_log": "run the agent as root or with CAP_SYSLOG; in a container add the device /dev/kmsg",
        "clock_offset": "run one of chrony, systemd-timesyncd or ntpd",
        "mounts": "bring the file server back, or unmount lazily (umount -l)",
        "dcgm_exporter": "start dcgm-exporter, or leave dcgm_exporter empty",
    }
)
# Programs that the agent uses where installed, and for what.
_PROGRAMS = MappingProxyType(
    {
        "py-spy": "stacks of training processes that hang (pip install py-spy)",
        "dcgmi": "DCGM's diagnostics (package datacenter-gpu-manager)",
        "nvidia-bug-report.sh": "the driver's report for NVIDIA's support (comes with the driver)",
    }
)
# Linux capabilities by number, and what is lost without them.
_CAPABILITIES = MappingProxyType(
    {
        "CAP_SYSLOG": (34, "the kernel's log where kernel.dmesg_restrict is 1"),
        "CAP_SYS_PTRACE": (19, "exit codes, environments and stacks of other users' training processes"),
        "CAP_DAC_READ_SEARCH": (2, "training logs and dumps in folders of other users, dumps of kernel panics"),
    }
)


class HostFinding(NamedTuple):
    """One line: what was checked, its state, what was seen, and the remedy (empty: none).

    ``note`` and ``unsupported`` are normal on some hosts; ``failed`` calls for action.
    """

    subject: str
    state: State
    detail: str
    remedy: str = ""


def collectors(standings: Iterable[CollectorStanding]) -> Iterator[HostFinding]:
    """Yield each collector's standing."""
    for standing in standings:
        subject = f"collector {standing.name}"
        remedy = _REMEDIES.get(standing.name, "")
        if standing.ok:
            yield HostFinding(subject, "ok", f"answered within {standing.duration_s * 1e3:.0f} ms")
        elif standing.supported:
            yield HostFinding(subject, "failed", standing.state.removeprefix("failed: "), remedy)
        else:
            detail = standing.state.removeprefix("unsupported: ")
            lacks_right = "may not" in detail or "permission" in detail.lower()
            yield HostFinding(
                subject, "failed" if lacks_right else "unsupported", detail, remedy if lacks_right else ""
            )


def host(verdict: HostVerdict) -> Iterator[HostFinding]:
    """Yield the verdict on this host: a finding for each reason, or what was judged."""
    remedy = "repair it before the next job; after a repair without a reboot: touch the file repaired beside the spool"
    for reason in verdict.reasons:
        yield HostFinding("this host", "failed", f"sick: {reason}", remedy)
    if verdict.state == "healthy":
        yield HostFinding("this host", "ok", f"healthy: {healthy(verdict)}")
    elif verdict.state == "cannot_tell":
        yield HostFinding("this host", "note", f"cannot tell: {'; '.join(verdict.unseen)}")
    for told in verdict.noted:
        yield HostFinding("this host", "note", told)


def gpu_driver(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Iterator[HostFinding]:
    """Yield whether this host's NVIDIA devices have their driver."""
    devices = gpus_on_the_bus(sys)
    version = _text(sys / "module/nvidia/version")
    if version:
        seen = _entries(proc / "driver/nvidia/gpus")
        detail = f"NVIDIA {version}, {seen} of {devices} GPUs on the PCI bus"
        remedy = "see the kernel's log (dmesg | grep NVRM) for the GPUs that the driver could not start"
        yield HostFinding(
            "GPU driver", "ok" if seen >= devices else "failed", detail, "" if seen >= devices else remedy
        )
    elif devices:
        detail = f"{devices} NVIDIA GPUs on the PCI bus and no driver for them"
        yield HostFinding("GPU driver", "failed", detail, "install and load NVIDIA's driver")
    if amd := gpus_on_the_bus(sys, AMD_VENDOR):
        detail = f"{amd} AMD GPUs on the PCI bus, judged by the kernel's log alone"
        yield HostFinding("GPU driver", "note", detail)
    elif not version and not devices:
        yield HostFinding("GPU driver", "unsupported", "no NVIDIA GPU on the PCI bus")


def spool(folder: Path, bytes_max: int) -> Iterator[HostFinding]:
    """Yield whether frames can be spooled to disk here, up to ``bytes_max`` bytes."""
    place = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield HostFinding("spool", "failed", f"{place} cannot be written", "run as the agent's user, or set spool_dir")
        return
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield HostFinding("spool", "failed", f"{place}: {error.strerror}", "set spool_dir to a folder on a local disk")
        return
    detail = f"{folder}, {free >> 20} MiB free of the {bytes_max >> 20} MiB that frames may take"
    if free < FREE_BYTES_MIN:
        yield HostFinding("spool", "failed", detail, "free space: an outage of the server loses frames")
    else:
        yield HostFinding("spool", "ok" if free >= bytes_max else "note", detail)


def hook_socket(path: Path) -> Iterator[HostFinding]:
    """Yield whether training processes of every user can reach an agent at ``path``."""
    start = "start the agent (systemctl start eagle-eye-agent)"
    try:
        mode = path.stat().st_mode
        closed = [str(each) for each in path.parents if not each.stat().st_mode & stat.S_IXOTH]
    except FileNotFoundError:
        yield HostFinding("hook socket", "failed", f"{path} does not exist: no agent listens", start)
        return
    except OSError as error:
        yield HostFinding("hook socket", "failed", f"{path}: {error.strerror}", "run the doctor as a user who trains")
        return
    if not stat.S_ISSOCK(mode) or not mode & stat.S_IWOTH or closed:
        detail = f"{path} is not open to other users" + (f": {closed[0]} is closed to them" if closed else "")
        yield HostFinding("hook socket", "failed", detail, "set hook_socket to a place that all users reach")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        try:
            end.connect(str(path))
        except OSError as error:
            yield HostFinding("hook socket", "failed", f"{path}: {error.strerror}: no agent listens", start)
            return
    yield HostFinding("hook socket", "ok", f"{path}, open to all users")


def server(
    configuration: AgentConfiguration, token_file: Path | None, now_s: Callable[[], float] = time.time
) -> Iterator[HostFinding]:
    """Yield whether each server is reachable, accepts the token in ``token_file``, and has the same time.

    A missing file is not an error where the agent obtains its token with a join token.
    """
    headers = {"Content-Type": CONTENT_TYPE, "Accept": "application/json"}
    if token_file is not None:
        token = _text(token_file)
        if not token and configuration.join_token_file:
            detail = f"nothing to be read in {token_file}: this node is not enrolled yet, or this user is not root"
            remedy = "start the agent; its log says why a join token was refused (journalctl -u eagle-eye-agent)"
            yield HostFinding("token", "failed", detail, remedy)
            return
        if not token.isascii() or not token.isprintable() or " " in token or not token:
            detail = f"{token_file} holds no token"
            yield HostFinding("token", "failed", detail, f"make one on the server: {_MAKE_TOKEN}")
            return
        headers["Authorization"] = f"Bearer {token}"
    for url in server_urls(configuration):
        yield from _server(configuration, url, headers, now_s)


def _server(
    configuration: AgentConfiguration, url: str, headers: Mapping[str, str], now_s: Callable[[], float]
) -> Iterator[HostFinding]:
    try:
        connection = connect(url, trust(configuration), configuration.connect_s, configuration.answer_s)
        with contextlib.closing(connection):
            asked_s = now_s()
            # A request without frames: the server checks the token before it complains about the missing frames.
            connection.request(
                "POST", path_on(url, "/api/v1/frames"), body=encode_request([], asked_s), headers=headers
            )
            answer = connection.getresponse()
            content = answer.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException, ValueError) as error:
        remedy = "check server, ca_file and the way there (curl the same address); frames wait in the spool"
        yield HostFinding("server", "failed", f"{url}: {type(error).__name__}: {error}", remedy)
        return
    leader = answer.getheader(LEADER_HEADER)
    if answer.status in (401, 403):
        yield HostFinding("server", "ok", f"{url} answers")
        sent = "Authorization" in headers
        detail = f"the server answered {answer.status}{'' if sent else ' to a request without a token'}"
        yield HostFinding("token", "failed", detail, _token_remedy(configuration, sent=sent))
    elif answer.status == 503 and b'"standby"' in content:
        remedy = "see /leadz of each server: the one that leads is to be in servers, or reached by this one"
        yield HostFinding("server", "failed", f"{url} stands by and passes nothing on", remedy)
        return
    elif answer.status != 400:
        remedy = "does server name an Eagle Eye server, and nothing in between?"
        yield HostFinding("server", "failed", f"{url} answered {answer.status} to a request without frames", remedy)
        return
    else:
        yield HostFinding("server", "ok", f"{url} {f'passes frames on to {leader}' if leader else 'takes frames'}")
        yield HostFinding("token", "ok", "accepted" if "Authorization" in headers else "none is asked for")
    yield from _server_clock(answer.getheader("Date", ""), asked_s, now_s())


def _token_remedy(configuration: AgentConfiguration, *, sent: bool) -> str:
    """Return what to do where the server refuses: a node that is enrolled needs no token made by hand."""
    if not sent:
        make = f"if this node has none yet, make one on the server: {_MAKE_TOKEN}"
        return f"name the file of this node's token (token_file, --token-file); {make}"
    if configuration.join_token_file:
        return (
            "was it revoked, or is it for another node? remove the spool's file token and restart the agent: it enrols"
        )
    return f"was it revoked, or is it for another node? make a new one on the server: {_MAKE_TOKEN}"


def _server_clock(date: str, asked_s: float, answered_s: float) -> Iterator[HostFinding]:
    try:
        server_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        yield HostFinding("clocks", "note", "the server does not say its time")
        return
    # The server's clock was truncated to whole seconds somewhere between our two readings.
    early_s, late_s = server_s - answered_s, server_s + 1.0 - asked_s
    difference_s = 0.0 if early_s <= 0.0 <= late_s else min(early_s, late_s, key=abs)
    if abs(difference_s) > CLOCK_DIFFERENCE_S_MAX:
        detail = f"the server's clock is {difference_s:+.0f} s from this host's"
        yield HostFinding("clocks", "failed", detail, "keep both by NTP; the server corrects frames as well as it can")
    else:
        yield HostFinding("clocks", "ok", f"the server's and this host's agree within {CLOCK_DIFFERENCE_S_MAX:g} s")


def names(conflicts: Iterable[str]) -> Iterator[HostFinding]:
    """Yield the conflicting names of this node, as found by the caller."""
    conflicts = list(conflicts)
    for conflict in conflicts:
        yield HostFinding("node name", "failed", conflict, "set node to the name that the scheduler uses")
    if not conflicts:
        yield HostFinding("node name", "ok", "all agree")


def training_logs(metrics_listen: str) -> Iterator[HostFinding]:
    """Yield whether steps are read in the logs of this host's ranks, as the running agent's metrics page says.

    ``metrics_listen`` is the page's address; empty: there is none.
    """
    subject = "training logs"
    if not metrics_listen:
        yield HostFinding(subject, "note", "not known: the agent serves no metrics (metrics_listen is empty)")
        return
    try:
        host, port = address(metrics_listen)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - listens on all, asked on one
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=PAGE_S)) as connection:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read(PAGE_BYTES_MAX).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        yield HostFinding(subject, "note", f"not known: the agent's metrics page at {metrics_listen}: {error}")
        return
    read = {one.labels.get("device", "?"): one.value for one in samples(page, {LOG_LINES_METRIC}) if one is not None}
    unread = {device: lines for device, lines in read.items() if lines >= UNREAD_LINES}
    for device, lines in sorted(unread.items()):
        detail = f"{lines:,.0f} lines without a step that is read, by the rank on device {device}"
        remedy = "the agent's log names the file; training_log_patterns can name its format, the hook reports more"
        yield HostFinding(subject, "failed", detail, remedy)
    if not unread:
        yield HostFinding(subject, "ok", "no rank's log goes on without steps that are read")


def programs() -> Iterator[HostFinding]:
    """Yield which of the optional programs are installed."""
    for name, use in _PROGRAMS.items():
        path = tool.find(name)
        yield HostFinding(name, "ok", path) if path else HostFinding(name, "note", f"not installed; it gives {use}")


def permissions(proc: Path = Path("/proc")) -> Iterator[HostFinding]:
    """Yield what this process may read, and the kernel settings that decide it."""
    line = next((each for each in _text(proc / "self/status").splitlines() if each.startswith("CapEff:")), "")
    try:
        held = int(line.partition(":")[2], 16)
    except ValueError:
        yield HostFinding("capabilities", "note", f"{proc}/self/status does not tell")
        return
    for name, (number, use) in _CAPABILITIES.items():
        if held >> number & 1:
            yield HostFinding(name, "ok", "held")
        else:
            yield HostFinding(name, "note", f"not held by this process; without it the agent misses {use}")
    restrict = _text(proc / "sys/kernel/dmesg_restrict")
    if restrict:
        yield HostFinding("kernel.dmesg_restrict", "ok", f"{restrict}{'' if restrict == '0' else ': needs CAP_SYSLOG'}")
    scope = _text(proc / "sys/kernel/yama/ptrace_scope")
    if scope == "3":
        yield HostFinding(
            "kernel.yama.ptrace_scope", "note", "3: nobody may read stacks, not even root, until a reboot"
        )
    elif scope:
        yield HostFinding(
            "kernel.yama.ptrace_scope", "ok", f"{scope}{'' if scope == '0' else ': needs CAP_SYS_PTRACE'}"
        )


def _entries(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


def _text(file: Path) -> str:
    try:
        return content(str(file), FILE_BYTES_MAX).decode("utf-8", "replace").strip()
    except OSError:
        return ""
