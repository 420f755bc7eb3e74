"""``eagle-eye server --check-job-sources``: queries each configured source once and shows its answer.

Writes nothing. Touches: what the sources touch, stdout, stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.jobs.configured import sources_of
from eagle_eye.server.jobs.settings import JobSourceSettings
from eagle_eye.server.jobs.source import JobSource, Snapshot, SourceFailed
from eagle_eye.server.jobs.standing import is_our_reason
from eagle_eye.server.model.clock import Clock, SystemClock
from eagle_eye.server.model.timestamps import rfc3339

SHOWN_MAX = 20  # jobs, and nodes out of service, that are shown one by one
REFUSED_S = 2.0  # by then an API server has refused a watch that it does not allow
TEXT_CHARS_MAX = 60


def run(settings: JobSourceSettings, clock: Clock | None = None) -> int:
    """Show each source's answer; return 0 when all have answered, else 1.

    Raises ConfigurationError when none is configured.
    """
    clock = clock or SystemClock()
    sources = [source for source, _ in sources_of(settings, clock, os.environ)]
    if not sources:
        raise ConfigurationError(
            "job_sources: expected slurm.use or kubernetes.use, got neither: there is no scheduler to ask"
        )
    failed = 0
    for source in sources:
        try:
            snapshot, took_s = asyncio.run(_asked(source, clock))
        except SourceFailed as error:
            failed += 1
            sys.stderr.write(f"eagle-eye server: {source.name} gives no answer ({error.reason}): {error}\n")
        else:
            sys.stdout.write("\n".join(reported(source.name, snapshot, took_s)) + "\n")
    return 1 if failed else 0


async def _asked(source: JobSource, clock: Clock) -> tuple[Snapshot, float]:
    """Return the source's first answer and its duration. Raises SourceFailed, also if it cannot continue after it."""
    begun_s = clock.monotonic_s()
    async with contextlib.aclosing(source.snapshots(asyncio.Event())) as snapshots:
        first = await anext(snapshots)
        took_s = clock.monotonic_s() - begun_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(snapshots), REFUSED_S)
        return first, took_s


def reported(name: str, snapshot: Snapshot, took_s: float) -> Iterator[str]:
    """Yield the lines that show an answer."""
    states = Counter(job.state or f"unknown: {_clean(job.said)}" for job in snapshot.jobs)
    yield f"{name} answered in {took_s:.2f} s"
    yield f"jobs: {_counted(len(snapshot.jobs), states)}"
    yield from _table(
        ("ID", "CALLED", "STATE", "ATTEMPT", "NODES", "ENDS", "OWNER"),
        (
            (
                job.id,
                job.name,
                job.state or job.said,
                str(job.attempt),
                _some(job.nodes),
                "-" if job.ends_s is None else rfc3339(job.ends_s),
                job.owner or "-",
            )
            for job in snapshot.jobs[:SHOWN_MAX]
        ),
        len(snapshot.jobs),
    )
    if snapshot.nodes is not None:
        yield f"nodes: {_counted(len(snapshot.nodes), Counter(node.state for node in snapshot.nodes))}"
        out = [node for node in snapshot.nodes if node.state != "in_service" or node.maintenance]
        yield from _table(
            ("NODE", "STATE", "WHOSE", "REASON"),
            (
                (
                    node.name,
                    "maintenance" if node.maintenance else node.state,
                    "Eagle Eye's" if is_our_reason(node.reason) else "the scheduler's",
                    node.reason or "-",
                )
                for node in out[:SHOWN_MAX]
            ),
            len(out),
        )
    if snapshot.left_out:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(snapshot.left_out.items()))
        yield f"left out, as of no use: {counts}"


def _counted(total: int, kinds: Counter[str]) -> str:
    if not total:
        return "none"
    return f"{total} ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"


def _some(nodes: Sequence[str]) -> str:
    if not nodes:
        return "-"
    return f"{nodes[0]} and {len(nodes) - 1} more" if len(nodes) > 1 else nodes[0]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], total: int) -> Iterator[str]:
    """Yield aligned lines; not rich's, which break names at the terminal's width: this is copied into tickets."""
    shown = [head, *(tuple(map(_clean, row)) for row in rows)]
    if len(shown) == 1:
        return
    widths = [max(len(row[at]) for row in shown) for at in range(len(head))]
    for row in shown:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if total > SHOWN_MAX:
        yield f"  and {total - SHOWN_MAX} more"


def _clean(text: str) -> str:
    """Return a scheduler's text without control characters, which could move a terminal's cursor."""
    visible = "".join(char if char.isprintable() else "?" for char in text)
    return visible if len(visible) <= TEXT_CHARS_MAX else f"{visible[: TEXT_CHARS_MAX - 1]}…"
