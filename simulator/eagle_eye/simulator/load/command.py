"""``eagle-eye loadtest``: a synthetic fleet that sends fresh values and counts durable acknowledgements."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.events import Event
from eagle_eye.simulator.load.connection import LoadTarget, NotEnrolled, allow_files, enrol, load_target
from eagle_eye.simulator.load.fleet import METRICS, FleetRows, FleetValues, Load, SimulatedFleet
from eagle_eye.simulator.load.sender import StreamSender, Tally, Waiting, drained

SLOT_S = 0.01  # frames that are due within it are made together
CONNECT_ATTEMPTS = 3
CONNECTING_MAX = 64  # at a time: a listening socket's queue has an end
CHECK_EVERY_S = 0.5
LATE_SEND_S = 0.05  # beyond it this program is what is slow


class Generator:
    """One run. ``reported(tally, seconds)`` is called about once a second."""

    def __init__(
        self,
        target: LoadTarget,
        load: Load,
        tokens: Sequence[str],
        drain_s: float,
        reported: Callable[[Tally, float], None],
    ) -> None:
        """``tokens``: one for each node, or a single one for all; [""]: none."""
        self._target = target
        self._load = load
        self._drain_s = drain_s
        self._reported = reported
        self._tokens = tokens
        self._stopping = asyncio.Event()
        self.tally = Tally()
        self.stream = f"load-{secrets.token_hex(8)}"

    def stop(self) -> None:
        """Generate no more frames; pending ones are awaited."""
        self._stopping.set()

    async def run(self) -> dict[str, Any]:
        """Send the load and return the figures. Raises OSError when the fleet cannot connect."""
        load, loop = self._load, asyncio.get_running_loop()
        allow_files(load.nodes)
        fleet = SimulatedFleet(load, self.stream)
        rows = FleetRows(fleet.frames)
        offset_s = time.time() - loop.time()
        senders = [
            StreamSender(self._target, self._tokens[at % len(self._tokens)], at, rows.wires[at], self.tally, offset_s)
            for at in range(load.nodes)
        ]
        try:
            await _open(senders)
            gc.collect()
            gc.freeze()  # the fleet lives as long as the process: looking through it again and again costs a tenth
            begin_s = (int(time.time() / load.interval_s) + 2) * load.interval_s
            self.tally.settled_s = begin_s + load.warm_up_s - offset_s
            self.tally.divide(begin_s - offset_s, load.intervals * load.interval_s)
            values = FleetValues(fleet.jobs, load.gpus, load.interval_s, load.step_s, begin_s, load.seed)
            checking = loop.create_task(self._check(senders, begin_s - offset_s))
            cpu_s = time.process_time()
            made = await self._make(senders, rows, values, begin_s, offset_s)
            seconds = made * load.interval_s
            cpu_s = time.process_time() - cpu_s
            wall_s = max(loop.time() - (begin_s - offset_s), 1e-9)
            figures = {"begin": begin_s, "seconds": seconds, "generator_cpu_ratio": cpu_s / wall_s}
            self.tally.goodbye_s = begin_s + made * load.interval_s - offset_s
            await self._goodbye(senders, fleet, rows, made + 1, begin_s + made * load.interval_s, offset_s)
            await drained(senders, self._drain_s)
            checking.cancel()
        finally:
            await asyncio.gather(*(sender.close() for sender in senders))
            gc.unfreeze()
        asked = {
            "nodes": load.nodes,
            "gpus": load.gpus,
            "metrics": len(METRICS),
            "interval_seconds": load.interval_s,
            "warm_up_seconds": load.warm_up_s,
        }
        return {**asked, **figures, "stream": self.stream, **self.tally.figures(seconds)}

    async def _make(
        self, senders: list[StreamSender], rows: FleetRows, values: FleetValues, begin_s: float, offset_s: float
    ) -> int:
        """Make and hand over all frames; return of how many intervals."""
        load = self._load
        samples = load.gpus * len(METRICS)
        slots = min(max(round(load.spread * load.interval_s / SLOT_S), 1), load.nodes)
        for interval in range(load.intervals):
            time_s = begin_s + interval * load.interval_s
            for slot in range(slots):
                due_s = time_s - offset_s + load.spread * load.interval_s * slot / slots
                await self._until(due_s)
                if self._stopping.is_set() and slot == 0:
                    return interval
                first, last = load.nodes * slot // slots, load.nodes * (slot + 1) // slots
                sequence = interval + 1
                raws = rows.encode(first, sequence, time_s, values.read(first, last, time_s))
                self._note_late(due_s, last - first)
                for at, raw in enumerate(raws, first):
                    senders[at].offer(Waiting(sequence, due_s, samples, raw))
        return load.intervals

    async def _goodbye(
        self,
        senders: list[StreamSender],
        fleet: SimulatedFleet,
        rows: FleetRows,
        sequence: int,
        time_s: float,
        offset_s: float,
    ) -> None:
        """Say goodbye for every node: a silence that was announced is no fault."""
        event = Event(time_s, "agent_stop", attributes={"reason": "the load test is over"})
        for at, (sender, frame) in enumerate(zip(senders, fleet.frames, strict=True)):
            due_s = time_s - offset_s + self._load.interval_s * at / len(senders)
            await self._until(due_s)
            sender.offer(Waiting(sequence, due_s, 0, rows.wires[at].telling(frame, sequence, time_s, [event])))

    async def _check(self, senders: list[StreamSender], begin_s: float) -> None:
        loop = asyncio.get_running_loop()
        reported_s = 0.0
        while True:
            now_s = loop.time()
            for sender in senders:
                sender.check(now_s)
            if now_s - reported_s >= 1.0:
                reported_s = now_s
                self._reported(self.tally, now_s - begin_s)
            await asyncio.sleep(CHECK_EVERY_S)

    async def _until(self, due_s: float) -> None:
        wait_s = due_s - asyncio.get_running_loop().time()
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)

    def _note_late(self, due_s: float, frames: int) -> None:
        if asyncio.get_running_loop().time() - due_s > LATE_SEND_S:
            self.tally.late_sends += frames


async def _open(senders: list[StreamSender]) -> None:
    """Connect all. Raises OSError, TimeoutError."""
    room = asyncio.Semaphore(CONNECTING_MAX)

    async def one(sender: StreamSender) -> None:
        async with room:
            for attempt in range(CONNECT_ATTEMPTS):
                try:
                    await sender.open()
                except (OSError, TimeoutError):
                    if attempt == CONNECT_ATTEMPTS - 1:
                        raise
                    await asyncio.sleep(0.1 * 2.0**attempt)
                else:
                    return

    tasks = [asyncio.create_task(one(sender)) for sender in senders]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


DONE, FAILED = 0, 1
DEFAULT_SERVER = "http://127.0.0.1:8470"
TOKEN_BYTES_MAX = 4_096
BUSY_RATIO = 0.9  # of a core: beyond it this program may be the bottleneck


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--server", metavar="URL", help=f"default {DEFAULT_SERVER}")
    parser.add_argument("--nodes", type=int, default=100, metavar="N", help="synthetic agents, a connection each (100)")
    parser.add_argument("--gpus", type=int, default=8, metavar="G", help="GPUs a node (8)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="I", help="seconds between frames (1)")
    parser.add_argument("--duration", type=float, default=60.0, metavar="S", help="seconds (60)")
    parser.add_argument("--job-nodes", type=int, default=128, metavar="N", help="nodes of each job (128)")
    parser.add_argument("--step-seconds", type=float, default=2.0, metavar="T", help="length of a training step (2)")
    parser.add_argument(
        "--spread", type=float, default=1.0, metavar="X", help="share of the interval over which nodes send (1)"
    )
    parser.add_argument(
        "--warm-up", type=float, default=0.0, metavar="S", help="acknowledgements after it are reported apart, too"
    )
    parser.add_argument("--drain", type=float, default=10.0, metavar="S", help="wait for acknowledgements at the end")
    parser.add_argument("--prefix", default="load", metavar="NAME", help="names of nodes and jobs begin so (load)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same values")
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token-file", type=Path, metavar="FILE", help="a token that may send any node's frames: admin")
    token.add_argument("--join-token-file", type=Path, metavar="FILE", help="a join token; each node is enrolled")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="who signed the server's certificate, PEM")
    parser.add_argument("--yes", action="store_true", help="the server is not on this machine, and may be loaded")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Send the load; 1 when something that was sent was not acknowledged."""
    load = Load(
        nodes=args.nodes,
        gpus=args.gpus,
        interval_s=args.interval,
        duration_s=args.duration,
        job_nodes=args.job_nodes,
        step_s=args.step_seconds,
        spread=args.spread,
        prefix=args.prefix,
        seed=args.seed,
        warm_up_s=args.warm_up,
    )
    load.check()
    server = load_target(args.server or os.environ.get("EAGLE_EYE_SERVER") or DEFAULT_SERVER, args.ca_file)
    if not server.is_loopback and not args.yes:
        raise ConfigurationError(
            f"--server: {server.url} is not on this machine; {load.nodes} nodes that do not exist will be in its fleet"
            " and its history: add --yes if that is wanted"
        )
    try:
        figures = asyncio.run(_load(server, load, args))
    except (OSError, NotEnrolled) as error:
        sys.stderr.write(f"eagle-eye loadtest: {server.url}: {error or type(error).__name__}\n")
        return FAILED
    sys.stdout.write(json.dumps(figures) + "\n" if args.json else _summary(figures))
    return DONE if figures["frames_lost"] == 0 else FAILED


async def _load(server: LoadTarget, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    named = args.token_file or os.environ.get("EAGLE_EYE_TOKEN_FILE")
    tokens = [_text(Path(named), "--token-file")] if named else [""]
    if args.join_token_file:
        tokens = await enrol(server, _text(args.join_token_file, "--join-token-file"), SimulatedFleet(load, "").names)
    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=2, transient=True) as live:

        def reported(tally: Tally, seconds: float) -> None:
            if console.is_terminal:
                live.update(_progress(tally, max(seconds, 0.0), load))

        generator = Generator(server, load, tokens, args.drain, reported)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, generator.stop)
        return await generator.run()


def _text(file: Path, flag: str) -> str:
    try:
        with file.open("rb") as opened:
            found = opened.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag}: {file} cannot be read: {type(error).__name__}") from None
    if len(found) > TOKEN_BYTES_MAX or not found.isprintable():  # it stands in a header
        raise ConfigurationError(f"{flag}: {file}: expected one line of ASCII, a token")
    return found


def _progress(tally: Tally, seconds: float, load: Load) -> Table:
    table = Table(title=f"{load.nodes} nodes, {seconds:.0f} of {load.duration_s:.0f} s", title_justify="left")
    for column in ("frames", "acknowledged", "waiting", "p50", "p99", "asked to wait", "errors"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{tally.made:,}",
        f"{tally.acknowledged:,}",
        f"{tally.lost - tally.dropped - tally.refused:,}",
        _milliseconds(tally.latencies.quantile_s(0.5)),
        _milliseconds(tally.latencies.quantile_s(0.99)),
        f"{tally.asked_to_wait.total():,}",
        f"{tally.errors.total():,}",
    )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _times(took: dict[str, float | None]) -> dict[str, str]:
    return {name: _milliseconds(seconds) for name, seconds in took.items()}


def _summary(figures: dict[str, Any]) -> str:
    asked = "{nodes} nodes of {gpus} GPUs, {metrics} metrics each, every {interval_seconds:g} s for {seconds:g} s"
    got = (
        "{frames_acknowledged:,} of {frames_sent:,} frames; {samples_acknowledged:,} samples, {samples_per_second:,.0f}"
    )
    lost = "  lost            {frames_lost:,} (refused {frames_refused:,}, dropped {frames_dropped:,})"
    times = "  acknowledged in p50 {p50}, p99 {p99}, at most {max}"
    lines = [
        asked.format(**figures),
        f"  acknowledged    {got.format(**figures)} a second",
        lost.format(**figures),
        times.format(**_times(figures["acknowledged_seconds"])),
    ]
    if figures["warm_up_seconds"]:
        lines.append(f"{times.format(**_times(figures['acknowledged_seconds_settled']))} after the warm-up")
    for title, name in (("asked to wait", "asked_to_wait"), ("errors", "errors")):
        if figures[name]:
            counts = ", ".join(f"{kind}: {count:,}" for kind, count in figures[name].items())
            lines.append(f"  {title:<16}{counts}")
    lines += [f"  {kind:<16}{detail}" for kind, detail in figures["details"].items()]
    if figures["generator_cpu_ratio"] > BUSY_RATIO or figures["sends_late"]:
        lines.append(
            f"  this program was busy {figures['generator_cpu_ratio']:.0%} of the time and sent"
            f" {figures['sends_late']:,} frames late: the figures are its own, not the server's"
        )
    return "\n".join(lines) + "\n"
