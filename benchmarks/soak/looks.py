"""What is seen of the server from outside: its process in /proc, its files, its answers, its own metrics."""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
from pathlib import Path
from typing import NamedTuple

from benchmarks.ingest.processes import bytes_in, look
from benchmarks.soak.site import Site
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.history.segment_tables import BUCKET_S
from eagle_eye.simulator.load.sender import LatencyHistogram

PAGE = "/api/v1/fleet"
LAST_HOUR = b"eagle_eye_action_asked_timestamp_seconds{"
LAST_HOUR = b"eagle_eye_action_asked_timestamp_seconds{"
LOOKS = PROMETHEUS_PREFIX + "detection_seconds"
_JOB = re.compile(rb'job="([^"]*)"')


class Look(NamedTuple):
    """The server at one moment; NaN: not seen. ``life`` counts its starts.

    Latencies are of the time since the last look: of acknowledgements as agents see them, of the page's question
    to the API, of a scrape, and of one round of detection (the mean). ``windows_bytes`` is the memory that processes
    can share, which holds what detectors see of the jobs that run; ``rss_bytes`` is that which is the server's alone
    (mapped files, its libraries, are the kernel's to take and to give). ``data_bytes`` is what is stored but for
    ``levels_bytes``, what is downsampled: it comes and goes by hours of the clock; pages that databases will use again
    are not stored. ``job_scrape_bytes`` is what a scrape says of a job, on average; ``scrape_bytes`` is all other.
    """

    time_s: float
    life: int
    rss_bytes: float
    windows_bytes: float
    children_rss_bytes: float
    cpu_s: float
    files: float
    threads: float
    wal_bytes: float
    data_bytes: float
    levels_bytes: float
    acknowledged_p50_s: float
    acknowledged_p99_s: float
    detection_s: float
    api_s: float
    scrape_s: float
    scrape_bytes: float
    job_scrape_bytes: float


QUANTITIES = tuple(name for name in Look._fields if name not in ("time_s", "life", "cpu_s"))


class Looks:
    """Looks at the server of a site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._reported: tuple[int, float, float] = (0, 0.0, 0.0)  # life, seconds and rounds of detection so far

    async def look(self, time_s: float, latencies: LatencyHistogram) -> Look:
        """Return what is to be seen now; ``latencies`` are those of the acknowledgements since the last time."""
        site, life = self._site, self._site.server.starts
        pid = site.server.pid
        process = _process(pid) if pid is not None else {}
        page = await site.timed(PAGE)
        scrape = await site.timed("/metrics")
        levels_bytes = float(bytes_in(*(site.data / "history" / level for level in BUCKET_S)))
        return Look(
            time_s=time_s,
            life=life,
            rss_bytes=process.get("rss", math.nan),
            windows_bytes=process.get("windows", math.nan),
            children_rss_bytes=process.get("children", math.nan),
            cpu_s=process.get("cpu", math.nan),
            files=process.get("files", math.nan),
            threads=process.get("threads", math.nan),
            wal_bytes=float(bytes_in(*site.data.glob("*-wal"))),
            data_bytes=bytes_in(site.data) - levels_bytes - sum(_free_bytes(path) for path in site.data.glob("*.db")),
            levels_bytes=levels_bytes,
            acknowledged_p50_s=_or_nan(latencies.quantile_s(0.5)),
            acknowledged_p99_s=_or_nan(latencies.quantile_s(0.99)),
            detection_s=self._detection_s(life, scrape[1]) if scrape else math.nan,
            api_s=page[0] if page else math.nan,
            scrape_s=scrape[0] if scrape else math.nan,
            scrape_bytes=_bytes(scrape[1], of_jobs=False) if scrape else math.nan,
            job_scrape_bytes=_bytes(scrape[1], of_jobs=True) if scrape else math.nan,
        )

    def _detection_s(self, life: int, scrape: bytes) -> float:
        """Return how long a round of detection took since the last look, by the server's own count."""
        values = dict(
            line.rsplit(" ", 1)
            for line in scrape.decode().splitlines()
            if line.startswith((f"{LOOKS}_sum", f"{LOOKS}_count"))
        )
        seconds, rounds = float(values.get(f"{LOOKS}_sum", 0.0)), float(values.get(f"{LOOKS}_count", 0.0))
        before, self._reported = self._reported, (life, seconds, rounds)
        if before[0] != life or rounds <= before[2]:
            return math.nan
        return (seconds - before[1]) / (rounds - before[2])


def _process(pid: int) -> dict[str, float]:
    """Return what /proc says of a process; {} once it has ended."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, KeyError):  # one that was killed has a status, and no memory
        own = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
        tree = look(pid)
        rss, own_bytes, windows = (1024.0 * float(status[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssShmem"))
        found = {
            "rss": own_bytes,
            "windows": windows,
            "children": max(tree.rss_bytes - rss, 0.0),
            "cpu": tree.cpu_s,
            "files": float(sum(1 for _ in (own / "fd").iterdir())),
            "threads": float(status["Threads"]),
        }
    return found


def _bytes(scrape: bytes, *, of_jobs: bool) -> float:
    """Return how much is said of a job, or of all else. Without the actions of the last hour: it takes one."""
    lines = [line for line in scrape.splitlines(keepends=True) if not line.startswith(LAST_HOUR)]
    said = float(sum(len(line) for line in lines if (b'job="' in line) == of_jobs))
    if not of_jobs:
        return said
    jobs = {found[1] for line in lines if (found := _JOB.search(line))}
    return said / len(jobs) if jobs else math.nan


def _free_bytes(database: Path) -> float:
    """Return how much of a database's file is free for what it will hold."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=1.0)) as connection:
        try:
            (pages,), (page_bytes,) = (
                connection.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_size")
            )
        except sqlite3.OperationalError:  # it is being made, or locked
            return math.nan
    return float(pages * page_bytes)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
