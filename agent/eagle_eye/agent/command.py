"""The command ``eagle-eye agent``."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_eye.agent.clock import SystemClock, Wake
from eagle_eye.agent.collector import CollectFailed
from eagle_eye.agent.collectors.fabric import FabricCollector
from eagle_eye.agent.collectors.host import HostCollector
from eagle_eye.agent.collectors.kernel_log import KernelLogCollector
from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.agent.collectors.training import TrainingCollector
from eagle_eye.agent.config import AgentConfiguration, hook_socket_path, read, spool_folder
from eagle_eye.agent.drops import Drops
from eagle_eye.agent.loop import Loop, Sink
from eagle_eye.agent.runner import Runner
from eagle_eye.agent.spool import Spool, SpoolTaken
from eagle_eye.agent.uplink import Destination, Uplink
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import Frame, decode_frame, values_of

FLUSH_S = 1.0  # how long a stopping agent tries to send its last frames
FLUSH_ONCE_S = 5.0

_log = logging.getLogger("eagle_eye.agent")


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
    parser.add_argument("--once", action="store_true", help="make one frame, deliver it and exit")
    parser.add_argument("--print", action="store_true", help="print frames as JSON lines instead of sending them")


def run(args: argparse.Namespace) -> int:
    """Run the agent until it is told to stop; return the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="eagle-eye agent: %(message)s")
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
    except ConfigurationError as error:
        print(f"eagle-eye agent: {error}", file=sys.stderr)
        return 2
    try:
        if args.print:
            return _run_printing(configuration, once=args.once)
        return _run_sending(configuration, once=args.once)
    except SpoolTaken as error:
        print(f"eagle-eye agent: spool_dir: {error}; name another with --spool", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our lines has gone
        sys.stderr.close()
        return 0
    except Exception as error:  # noqa: BLE001 - one line for the user, never a traceback
        _log.debug("details", exc_info=True)
        print(f"eagle-eye agent: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


class Printer:
    """Prints frames as JSON lines."""

    def __init__(self) -> None:
        self._sequence = 0

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        """Print the frame that ``make`` encodes."""
        self._sequence += 1
        print(json.dumps(readable(decode_frame(make("print", self._sequence))), ensure_ascii=False), flush=True)
        return self._sequence


def readable(frame: Frame) -> dict[str, Any]:
    """Return a frame as plain data for people: rows by name, what was not observed left out, infinity as text."""
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


def _run_printing(configuration: AgentConfiguration, *, once: bool) -> int:
    # Without a state folder: printing does not move the place that the service has reached.
    _run_loop(configuration, Printer(), Drops(), lambda: None, None, once=once)
    return 0


def _run_sending(configuration: AgentConfiguration, *, once: bool) -> int:
    drops, clock = Drops(), SystemClock()
    folder = spool_folder(configuration, os.environ)
    spool = Spool(folder, configuration.node, drops, configuration.spool_bytes_max)
    destination = Destination(
        server=configuration.server,
        token_file=Path(configuration.token_file) if configuration.token_file else None,
        ca_file=Path(configuration.ca_file) if configuration.ca_file else None,
        connect_s=configuration.connect_s,
        answer_s=configuration.answer_s,
        backoff_s_max=configuration.backoff_s_max,
    )
    uplink = Uplink(destination, spool, drops, clock)
    try:
        uplink.start()
        _run_loop(configuration, spool, drops, uplink.notify, folder, once=once)
        uplink.stop(FLUSH_ONCE_S if once else FLUSH_S)
        left = spool.waiting()
    finally:
        spool.close()
    if left:
        _log.warning("%d frames wait in the spool for the next start", left)
    return 1 if once and left else 0


def _run_loop(
    configuration: AgentConfiguration,
    sink: Sink,
    drops: Drops,
    handed_on: Callable[[], None],
    state_folder: Path | None,
    *,
    once: bool,
) -> None:
    clock, wake = SystemClock(), Wake()
    nvml = NvmlCollector()
    training = TrainingCollector(hook_socket_path(configuration), drops, wake.set, nvml.devices_by_uuid)
    kernel_log = KernelLogCollector(drops, nvml.devices_by_bus_id, state_folder)
    collectors = (HostCollector(), nvml, FabricCollector(state_folder), kernel_log, training)
    runners = tuple(Runner(collector, drops, clock.monotonic_s) for collector in collectors)
    loop = Loop(
        configuration.node,
        configuration.job,
        configuration.interval_s,
        runners,
        training.happened,
        sink,
        drops,
        clock,
        wake,
        handed_on,
    )

    def stop(number: int, _frame: object) -> None:
        loop.stop(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        training.open()  # ranks may already be reporting
    except CollectFailed as error:
        _log.warning("%s", error)
    try:
        if once:
            loop.run_once()
        else:
            loop.run()
    finally:
        for runner in runners:
            runner.close()
