"""The command ``eagle-eye agent``."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_eye.agent.assembly import Assembly, found_processes, host_collectors
from eagle_eye.agent.clock import ClockBase, SystemClock, Wake
from eagle_eye.agent.collector import CollectFailed, Collector, CollectorRunner, CollectorStanding, Drops, TickFrame
from eagle_eye.agent.config import (
    AgentConfiguration,
    exposed_secrets,
    read,
    server_urls,
    spool_folder,
    token_path,
    trust,
)
from eagle_eye.agent.evidence.gather import (
    BUG_REPORT,
    EVIDENCE,
    CannotGather,
    EvidenceGatherer,
    FlightDumps,
    gather_now,
    standard_sources,
)
from eagle_eye.agent.evidence.requests import EvidenceResponder, Upload, UploadTarget
from eagle_eye.agent.evidence.source import BundleStuck
from eagle_eye.agent.exposition import Exposition, FrameDelivery, MetricsServer
from eagle_eye.agent.host_verdict import EXIT_CODES, judge, lines, look, repaired_s
from eagle_eye.agent.loop import (
    Loop,
    LoopListeners,
    LoopSettings,
    LoopSources,
    ServiceManager,
    Sink,
    agent_version,
    boot_id,
)
from eagle_eye.agent.node_check import PATH as NODE_CHECK_PATH
from eagle_eye.agent.node_check import NodeCheckResponder
from eagle_eye.agent.node_check import run as run_child
from eagle_eye.agent.nvml.simulation import SimulationFailed, cache_folder, simulate
from eagle_eye.agent.processes.process_registry import TrainingProcesses
from eagle_eye.agent.transport.servers import NodeToken, Servers
from eagle_eye.agent.transport.spool import Spool, SpoolTaken
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import Frame, values_of
from eagle_eye.schema.rows import read_written

if TYPE_CHECKING:  # needs a package that is not installed everywhere
    from eagle_eye.agent.nvrx_health import HostHealth, NvrxHealth


_log = logging.getLogger("eagle_eye.agent")


class Greeting:
    """Logs one line at the first tick for which ``server`` returns a URL: "" before the server has taken a frame."""

    def __init__(self, node: str, server: Callable[[], str]) -> None:
        self._node = node
        self._server = server
        self._said = False

    def show(self, tick: TickFrame) -> None:
        """Take the newest tick."""
        url = "" if self._said else self._server()
        if url:
            self._said = True
            _log.info("%s", greeting(self._node, url, tick.collectors))


def greeting(node: str, url: str, collectors: Sequence[CollectorStanding]) -> str:
    """Return the line: how many sources are read, which are not, and whether that is to be mended."""
    parts = (
        ("simulated", [one.name for one in collectors if one.simulated]),
        ("to be mended, as eagle-eye doctor says", [one.name for one in collectors if one.failing]),
        ("not on this host, which is no fault", [one.name for one in collectors if not one.supported]),
    )
    count = sum(one.ok for one in collectors)
    read = f"connected to {url} as {node}: {count} source{'' if count == 1 else 's'} read in full"
    return "; ".join([read, *(f"{what}: {', '.join(sorted(names))}" for what, names in parts if names)])


# glibc starts with this threshold and raises it, up to 32 MiB, to the size of any freed mapped block: after that such
# blocks are allocated from a heap, and stay there.
LARGE_BYTES = 128 << 10
# Otherwise each collector's thread has its own heap, which grows to that thread's peak and serves no other. A shared
# one causes hardly any contention: threads run under the GIL.
HEAPS_MAX = 1

# malloc.h
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def share_heap() -> bool:
    """Make threads started from now on share one heap, and return large blocks to the kernel when freed.

    Return whether the C library supports this. It also stops raising the trim threshold (mallopt(3)).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_ARENA_MAX, HEAPS_MAX))


class Printer:
    """Prints frames as JSON lines."""

    def __init__(self) -> None:
        self._sequence = 0

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        """Print the frame that ``make`` encodes."""
        self._sequence += 1
        print(json.dumps(readable(read_written(make("print", self._sequence)).frame), ensure_ascii=False), flush=True)
        return self._sequence


def readable(frame: Frame) -> dict[str, Any]:
    """Return a frame as plain data for people: rows by name, unobserved values left out, infinity as text."""
    rows: dict[str, dict[str, dict[str, float | str]]] = {}
    for item in frame.blocks:
        values = values_of(item)
        scope = rows.setdefault(item.scope.value, {})
        for row, key in enumerate(item.keys):
            scope[str(key)] = {
                metric: value if math.isfinite(value) else "+inf"
                for column, metric in enumerate(item.metrics)
                if not math.isnan(value := values[column * len(item.keys) + row])
            }
    return {
        "node": frame.node,
        "time_s": frame.time_s,
        "interval_s": frame.interval_s,
        "sequence": frame.sequence,
        "job": frame.job,
        "ranks": [{field: getattr(rank, field) for field in rank.__struct_fields__} for rank in frame.ranks],
        "rows": rows,
        "events": [
            {"time_s": e.time_s, "kind": e.kind, "device": e.device, "attributes": e.attributes} for e in frame.events
        ],
        "collectors": frame.collectors,
        "dropped": frame.dropped,
    }


FLUSH_S = 1.0  # how long a stopping agent tries to send its last frames
FLUSH_ONCE_S = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Watches this node and its training processes, and reports to the server."
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; flags and environment override it")
    parser.add_argument("--server", metavar="URL", help="where frames go (http://127.0.0.1:8470)")
    parser.add_argument("--node", metavar="NAME", help="this node's name (the host's name)")
    parser.add_argument("--job", metavar="JOB", help="the job on this node (what its training processes say)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the node's token")
    parser.add_argument("--interval", type=float, metavar="S", help="seconds between frames (1)")
    parser.add_argument("--spool", metavar="DIR", help="where frames wait for the server")
    parser.add_argument("--hook-socket", metavar="PATH", help="where training processes report")
    parser.add_argument("--simulate", action="store_true", help="eight simulated GPUs in place of the driver's")
    modes = parser.add_argument_group("instead of running until stopped")
    modes.add_argument("--once", action="store_true", help="make one frame, deliver it and exit")
    modes.add_argument("--print", action="store_true", help="print frames as JSON lines instead of sending them")
    modes.add_argument("--check", action="store_true", help="with --once: say whether this host is sick; sends nothing")
    modes.add_argument("--gpus", type=int, metavar="N", help="with --check: how many GPUs the host should have")
    modes.add_argument("--evidence", type=Path, metavar="OUT", help="gather evidence into OUT, a .tar.gz, and exit")
    modes.add_argument("--bug-report", action="store_true", help="with --evidence: the driver's bug report; minutes")


def run(args: argparse.Namespace) -> int:
    """Run the agent until it is stopped; return the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="eagle-eye agent: %(message)s")
    # A service manager that finds the agent hung sends SIGABRT: its journal then shows the main loop's stack. The other
    # threads are left out: they may be running, and reading their stacks then can crash the process half-way through.
    faulthandler.enable(all_threads=False)
    share_heap()  # before any thread starts
    flags = {
        "server": args.server,
        "node": args.node,
        "job": args.job,
        "token_file": args.token_file,
        "interval_s": args.interval,
        "spool_dir": args.spool,
        "hook_socket": args.hook_socket,
    }
    try:
        configuration = read(args.config, os.environ, flags)
        _check_modes(args)
        if args.simulate:
            _log.info("GPUs are simulated: %s stands in for the driver's library", simulate(cache_folder(os.environ)))
    except (ConfigurationError, SimulationFailed) as error:
        print(f"eagle-eye agent: {error}", file=sys.stderr)
        return 2
    try:
        if args.check:
            return _check(configuration, args.gpus)
        if args.evidence is not None:
            return _gather(configuration, args.evidence, BUG_REPORT if args.bug_report else EVIDENCE)
        if args.print:
            return _run_printing(configuration, once=args.once)
        return _run_sending(configuration, once=args.once)
    except SpoolTaken as error:
        print(f"eagle-eye agent: spool_dir: {error}; name another with --spool", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 0
    except Exception as error:  # noqa: BLE001 - one line for the user, never a traceback
        _log.debug("details", exc_info=True)
        print(f"eagle-eye agent: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _check_modes(args: argparse.Namespace) -> None:
    if args.check and not args.once:
        raise ConfigurationError("--check: expected --once beside it")
    if args.gpus is not None and not (args.check and args.gpus >= 0):
        raise ConfigurationError("--gpus: expected a number from 0, with --check beside it")
    if args.bug_report and args.evidence is None:
        raise ConfigurationError("--bug-report: expected --evidence beside it")


def _run_printing(configuration: AgentConfiguration, *, once: bool) -> int:
    # Without a state folder: printing must not move the service's saved position.
    drops, clock, wake = Drops(), SystemClock(), Wake()
    assembly = Assembly(configuration, drops, clock, wake.set, None, TrainingProcesses())
    exposition = Exposition(configuration.node, agent_version(), drops, lambda: None, assembly.nvml.devices_by_uuid)
    _run_loop(configuration, assembly, Printer(), drops, clock, wake, exposition, once=once)
    return 0


def _run_sending(configuration: AgentConfiguration, *, once: bool) -> int:
    drops, clock, wake = Drops(), SystemClock(), Wake()
    folder = spool_folder(configuration, os.environ)
    spool = Spool(folder, configuration.node, drops, configuration.spool_bytes_max, keep_s=configuration.spool_keep_s)
    servers = Servers(server_urls(configuration), clock.monotonic_s)
    for line in exposed_secrets(configuration, os.environ):
        _log.warning(line)
    destination = Destination(
        servers=servers,
        token_file=token_path(configuration, os.environ),
        trust=trust(configuration),
        connect_s=configuration.connect_s,
        answer_s=configuration.answer_s,
        backoff_s_max=configuration.backoff_s_max,
    )
    token = NodeToken(
        servers,
        configuration.node,
        destination.token_file,
        Path(configuration.join_token_file) if configuration.join_token_file else None,
        destination.trust,
        configuration.answer_s,
        clock.monotonic_s,
    )
    place = UploadTarget(servers, token.text, destination.trust, destination.connect_s, destination.answer_s)
    try:
        processes = TrainingProcesses()
        beside: list[Collector] = []
        answered: Callable[[Mapping[str, object]], None] = _ignore
        if not once:  # a frame that lists "evidence" or "node_check" invites requests
            gatherer = _gatherer(configuration, drops)
            evidence = EvidenceResponder(gatherer, processes.all, Upload(place, clock).send, drops)
            checks_send = Upload(place, clock, path=NODE_CHECK_PATH).send
            checks = NodeCheckResponder(configuration.node_check_command, processes.all, checks_send, drops)
            beside = [evidence, checks] if configuration.node_check_command else [evidence]
            answered = partial(_hand_on, (evidence.answered, checks.answered))
        assembly = Assembly(configuration, drops, clock, wake.set, folder, processes, beside)
        base = ClockBase(clock, boot_id())
        uplink = Uplink(destination, spool, drops, clock, token=token, answered=answered, base=base)

        def delivery() -> FrameDelivery:
            waiting = (spool.waiting(), spool.waiting_bytes(), spool.in_memory)
            sent = (uplink.delivered, uplink.is_well, servers.changes)
            return FrameDelivery(*waiting, *sent, spool.kept()[0], uplink.again.delivered)

        exposition = Exposition(configuration.node, agent_version(), drops, delivery, assembly.nvml.devices_by_uuid)
        uplink.start()
        with contextlib.ExitStack() as stack:
            if configuration.nvrx_health_socket and not once:
                stack.callback(_answer_nvrx(configuration, drops).stop)
            common = (drops, clock, wake, exposition, uplink.notify, base)
            greet = Greeting(configuration.node, lambda: servers.current if uplink.delivered else "").show
            _run_loop(configuration, assembly, spool, *common, greet, once=once)
        uplink.stop(FLUSH_ONCE_S if once else FLUSH_S)
        left = spool.waiting()
    finally:
        spool.close()
    if left:
        _log.warning("%d frames wait in the spool for the next start", left)
    return 1 if once and left else 0


def _run_loop(
    configuration: AgentConfiguration,
    assembly: Assembly,
    sink: Sink,
    drops: Drops,
    clock: SystemClock,
    wake: Wake,
    exposition: Exposition,
    handed_on: Callable[[bool], None] = lambda _urgent: None,
    base: ClockBase | None = None,
    greet: Callable[[TickFrame], None] | None = None,
    *,
    once: bool,
) -> None:
    def shown(tick: TickFrame) -> None:
        exposition.show(tick)
        if greet is not None:
            greet(tick)

    metrics = None
    if configuration.metrics_listen and not once:
        metrics = MetricsServer(configuration.metrics_listen, exposition.page, drops)
    loop = Loop(
        LoopSettings(configuration.node, configuration.job, configuration.interval_s),
        LoopSources(assembly.runners, assembly.happened, wake),
        sink,
        drops,
        clock,
        LoopListeners(handed_on, shown, None if once else ServiceManager(os.environ)),
        base,
    )

    def stop(number: int, _frame: object) -> None:
        loop.stop(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        assembly.training.open()  # ranks may already be reporting
    except CollectFailed as error:
        _log.warning("%s", error)
    try:
        if metrics is not None:
            metrics.start()
        if once:
            loop.run_once()
        else:
            loop.run()
    finally:
        if metrics is not None:
            metrics.stop()
        assembly.close()


def _check(configuration: AgentConfiguration, gpus: int | None) -> int:
    """Report whether this host is sick. Leaves spool, server and hook socket to the agent running here."""
    drops, folder = Drops(), spool_folder(configuration, os.environ)
    runners = [CollectorRunner(one, drops, time.monotonic) for one in host_collectors(drops, folder)]
    verdict = judge(look(runners), gpus, repaired_s(folder))
    reported, unseen = lines(verdict)
    for line in reported:
        print(line)
    for line in unseen:
        print(line, file=sys.stderr)
    return EXIT_CODES[verdict.state]


def _answer_nvrx(configuration: AgentConfiguration, drops: Drops) -> NvrxHealth:
    """Answer NVRx with the result of ``--once --check``, each in a child that reads the kernel log from boot."""
    from eagle_eye.agent.nvrx_health import VERDICT_S_MAX, NvrxHealth, health_of

    command = [sys.executable, "-m", "eagle_eye.cli.main", "agent", "--once", "--check"]
    command += ["--node", configuration.node, "--spool", str(spool_folder(configuration, os.environ))]
    if configuration.nvrx_health_gpus >= 0:
        command += ["--gpus", str(configuration.nvrx_health_gpus)]

    def check(in_the_way: Callable[[], str]) -> HostHealth:
        return health_of(run_child(command, time.monotonic() + VERDICT_S_MAX, in_the_way))

    health = NvrxHealth(Path(configuration.nvrx_health_socket), check, drops)
    health.start()
    return health


def _gather(configuration: AgentConfiguration, out: Path, kind: str) -> int:
    """Gather evidence of this host's training processes for a human."""
    _log.info("looking for training processes, then gathering; %s at most", "10 min" if kind == BUG_REPORT else "20 s")
    try:
        drops = Drops()
        found = found_processes(drops, SystemClock(), Wake())
        manifest = gather_now(out, _gatherer(configuration, drops), found, configuration.job, kind)
    except (CannotGather, BundleStuck, OSError) as error:
        print(f"eagle-eye agent: --evidence: {error}", file=sys.stderr)
        return 1
    for missing in manifest.missing:
        print(f"missing: {missing.source} {missing.what}: {missing.why}", file=sys.stderr)
    print(f"{out}: {len(manifest.files)} files of {len(manifest.processes)} processes")
    return 0


def _gatherer(configuration: AgentConfiguration, drops: Drops) -> EvidenceGatherer:
    prefixes, pipes = configuration.flight_recorder_prefixes, configuration.flight_recorder_pipe_prefixes
    dumps = FlightDumps(prefixes, pipes, drops=drops)
    return EvidenceGatherer(configuration.node, agent_version(), standard_sources(dumps))


def _hand_on(takers: Sequence[Callable[[Mapping[str, object]], None]], fields: Mapping[str, object]) -> None:
    for take in takers:
        take(fields)


def _ignore(_fields: Mapping[str, object]) -> None:
    """Ignore what the server says besides its acknowledgement."""
