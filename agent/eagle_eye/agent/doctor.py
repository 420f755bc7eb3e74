"""The command ``eagle-eye doctor``: what works on this host, what doesn't, and how to fix it."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TextIO

from eagle_eye.agent import external_tool as tool
from eagle_eye.agent.assembly import host_collectors
from eagle_eye.agent.collector import Collector, CollectorRunner, CollectorStanding, Drops
from eagle_eye.agent.collectors.clock_offset import ClockOffsetCollector
from eagle_eye.agent.collectors.host import HostCollector, TemperatureCollector
from eagle_eye.agent.config import (
    AgentConfiguration,
    hook_socket_path,
    read,
    server_urls,
    spool_folder,
    token_path,
    trust,
)
from eagle_eye.agent.exposition import address, samples
from eagle_eye.agent.foreign_files import content
from eagle_eye.agent.host_verdict import HostVerdict, healthy, judge, look, repaired_s
from eagle_eye.agent.nvml.pci_presence import AMD_VENDOR, gpus_on_the_bus
from eagle_eye.agent.processes.environment import name_conflicts, node_names
from eagle_eye.agent.training_logs.followed_logs import UNREAD_LINES
from eagle_eye.agent.training_logs.rank_courses import LOG_LINES
from eagle_eye.agent.transport.servers import connect, path_on
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import CONTENT_TYPE, encode_request
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.schema.problem import LEADER_HEADER

# One-off checks of this host and the agent's setup, for the operator (``doctor``).
#
# Touches files and makes one request to the server. Each check returns findings and never raises: a check that cannot
# run is a finding, too.
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


def check_collectors(standings: Iterable[CollectorStanding]) -> Iterator[HostFinding]:
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


def check_host(verdict: HostVerdict) -> Iterator[HostFinding]:
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


def check_gpu_driver(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Iterator[HostFinding]:
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


def check_spool(folder: Path, bytes_max: int) -> Iterator[HostFinding]:
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


def check_hook_socket(path: Path) -> Iterator[HostFinding]:
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


def check_server(
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


def check_names(conflicts: Iterable[str]) -> Iterator[HostFinding]:
    """Yield the conflicting names of this node, as found by the caller."""
    conflicts = list(conflicts)
    for conflict in conflicts:
        yield HostFinding("node name", "failed", conflict, "set node to the name that the scheduler uses")
    if not conflicts:
        yield HostFinding("node name", "ok", "all agree")


def check_training_logs(metrics_listen: str) -> Iterator[HostFinding]:
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


def check_programs() -> Iterator[HostFinding]:
    """Yield which of the optional programs are installed."""
    for name, use in _PROGRAMS.items():
        path = tool.find(name)
        yield HostFinding(name, "ok", path) if path else HostFinding(name, "note", f"not installed; it gives {use}")


def check_permissions(proc: Path = Path("/proc")) -> Iterator[HostFinding]:
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


SYSTEM_CONFIG = Path("/etc/eagle-eye/agent.toml")  # of the host packages
PROC = Path("/proc")
PROCESSES_MAX = 100_000  # looked through
_OURS = ("eagle-eye", "eagle_eye.cli.main", "main.py")
_FLAGS = {"--server": "server", "--node": "node", "--token-file": "token_file", "--spool": "spool_dir"}
_FLAGS |= {"--hook-socket": "hook_socket"}


class RunningAgent(NamedTuple):
    """An agent's process: its configuration file (None: it has none), the flags over it, and its environment."""

    pid: int
    config: Path | None
    flags: Mapping[str, str | None]
    environ: Mapping[str, str]


class HostConfiguration(NamedTuple):
    """The configuration on this host, None if it cannot be read; ``environ`` is that of whoever runs with it."""

    configuration: AgentConfiguration | None
    environ: Mapping[str, str]
    finding: HostFinding


def find_configuration(
    environ: Mapping[str, str], *, proc: Path = PROC, system_config: Path = SYSTEM_CONFIG
) -> HostConfiguration:
    """Return the running agent's configuration, else that of the host's packages, else the defaults.

    Raises ConfigurationError for an invalid configuration.
    """
    running = sorted(_running(proc), key=lambda agent: agent.pid)
    if len(running) == 1:
        return _of(running[0], environ)
    if running:
        pids = ", ".join(str(one.pid) for one in running)
        finding = HostFinding("agent", "note", f"several run here (processes {pids}): --config says which is meant")
        return HostConfiguration(read(None, environ, {}), environ, finding)
    if os.access(system_config, os.R_OK):
        finding = HostFinding("agent", "note", f"none runs here; {system_config} is used")
        return HostConfiguration(read(system_config, environ, {}), environ, finding)
    finding = HostFinding("agent", "note", "none runs here; the defaults and EAGLE_EYE_* variables are used")
    return HostConfiguration(read(None, environ, {}), environ, finding)


def _of(agent: RunningAgent, environ: Mapping[str, str]) -> HostConfiguration:
    if agent.config is not None and not os.access(agent.config, os.R_OK):
        detail = f"process {agent.pid} runs with {agent.config}, which cannot be read"
        return HostConfiguration(None, environ, HostFinding("agent", "failed", detail, "run this as the agent's user"))
    try:
        configuration = read(agent.config, agent.environ, agent.flags)
    except ConfigurationError as error:
        raise ConfigurationError(f"process {agent.pid} runs with {agent.config}: {error}") from None
    with_what = agent.config or "flags and environment alone"
    finding = HostFinding("agent", "ok", f"process {agent.pid} runs with {with_what}, which is used here")
    return HostConfiguration(configuration, agent.environ, finding)


def _running(proc: Path) -> Iterator[RunningAgent]:
    with os.scandir(proc) as entries:
        numbered = (entry for entry in entries if entry.name.isdigit())
        for _, entry in zip(range(PROCESSES_MAX), numbered, strict=False):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if (agent := _agent(Path(entry.path))) is not None:
                    yield agent


def _agent(process: Path) -> RunningAgent | None:
    words = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    place = next(
        (at for at in range(1, len(words)) if words[at] == "agent" and Path(words[at - 1]).name in _OURS), None
    )
    if place is None:
        return None
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    for flag, key in _FLAGS.items():
        parser.add_argument(flag, dest=key)
    given = vars(parser.parse_known_args(words[place + 1 :])[0])
    config: Path | None = given.pop("config")
    folder = (process / "cwd").readlink()
    pairs = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return RunningAgent(int(process.name), None if config is None else folder / config, given, environ)


_COLOURS: Mapping[State, str] = {"ok": "32", "note": "0", "unsupported": "2", "failed": "31"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Says what works on this host, what doesn't, and what to do about it. Changes nothing."
    parser.add_argument("--config", type=Path, metavar="FILE", help="the agent's TOML file (that of the running agent)")
    parser.add_argument("--server", metavar="URL", help="where frames go")
    parser.add_argument("--node", metavar="NAME", help="this node's name (the host's name)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the node's token")
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Examine the host and report; return 1 when action is needed. Raises ConfigurationError."""
    logging.getLogger("eagle_eye.agent").setLevel(logging.CRITICAL)  # collectors' log messages appear in the table
    flags = {"server": args.server, "node": args.node, "token_file": args.token_file}
    if args.config is not None or any(flags.values()):
        configuration = read(args.config, os.environ, flags)
        findings = examine(configuration, _collectors(spool_folder(configuration, os.environ)), os.environ)
    else:
        found = find_configuration(os.environ)
        known = found.configuration
        folder = None if known is None else spool_folder(known, found.environ)
        findings = [found.finding, *examine(known, _collectors(folder), found.environ)]
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2, ensure_ascii=False))
    else:
        table(findings, sys.stdout, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def examine(
    configuration: AgentConfiguration | None, collectors: Sequence[Collector], environ: Mapping[str, str]
) -> list[HostFinding]:
    """Return all findings; without a configuration those that need none.

    The collectors look in threads of their own, and are closed. The verdict is that of ``agent --once --check``.
    """
    seen = look([CollectorRunner(collector, Drops(), time.monotonic) for collector in collectors])
    repaired = 0.0 if configuration is None else repaired_s(spool_folder(configuration, environ))
    expected = -1 if configuration is None else configuration.nvrx_health_gpus
    return [
        *check_collectors(seen.collectors),
        *check_host(judge(seen, expected if expected >= 0 else None, repaired)),
        *check_gpu_driver(),
        *([] if configuration is None else _configured(configuration, environ)),
        *check_permissions(),
        *check_programs(),
    ]


def _configured(configuration: AgentConfiguration, environ: Mapping[str, str]) -> list[HostFinding]:
    pod = "KUBERNETES_SERVICE_HOST" in environ
    named = node_names(configuration.node, socket.gethostname(), "", environ, pod=pod)
    return [
        *check_hook_socket(hook_socket_path(configuration)),
        *check_spool(spool_folder(configuration, environ), configuration.spool_bytes_max),
        *check_server(configuration, token_path(configuration, environ)),
        *check_names(name_conflicts(named)),
        *check_training_logs(configuration.metrics_listen),
    ]


def table(findings: Sequence[HostFinding], out: TextIO, *, colours: bool) -> None:
    """Write findings as aligned lines, with remedies, and their counts; a GPU host does not have rich."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        state = f"{finding.state:<11}"
        if colours:
            state = f"\033[{_COLOURS[finding.state]}m{state}\033[0m"
        out.write(f"{state} {finding.subject:<{width}}  {_one_line(finding.detail)}\n")
        if finding.remedy:
            out.write(f"{'':<11} {'':<{width}}  -> {_one_line(finding.remedy)}\n")
    failed = sum(finding.state == "failed" for finding in findings)
    out.write(f"{failed} to be done\n" if failed else "nothing to be done\n")


def _collectors(state_folder: Path | None = None) -> list[Collector]:
    """Return the read-only collectors: the hook's socket and log positions belong to the agent."""
    return [HostCollector(), *host_collectors(Drops(), state_folder), ClockOffsetCollector(), TemperatureCollector()]


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
