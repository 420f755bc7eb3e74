"""The report for people, or as one line of JSON."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.failover.figures import NONE, missed
from benchmarks.failover.keeping import Kept


def show(kept: Kept, *, as_json: bool) -> None:
    """The figures of a run are on stdout."""
    found = kept.figures
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"settings": kept.settings, "figures": found}) + b"\n")
        sys.stdout.flush()
        return
    if not found:
        return
    console = Console(highlight=False)
    table = Table(
        "seconds from the event", "takeovers", "another leads", "webhook taken", "acted p50", "p95", "max", "rows whole"
    )
    for kind, one in found["by_kind"].items():
        middle = (one[name]["p50_s"] for name in ("another_leads", "webhook_taken"))
        acted = (one["acted"][name] for name in ("p50_s", "p95_s", "max_s"))
        table.add_row(kind, str(one["takeovers"]), *map(_cell, (*middle, *acted, one["rows_whole"]["max_s"])))
    console.print(table)
    lines = {
        "takeovers": f"{found['takeovers']}, a lease of {kept.settings['lease_s']:g} s",
        "acted on, p95 (asked: 20 s)": _cell(found["acted"]["p95_s"]),
        "hand-over, longest (asked: 3 s)": _cell(found["hand_over"]["max_s"]),
        **{name.replace("_", " "): str(found[name]) for name in NONE},
        "rows counted": str(found["acknowledged_rows"]),
        "webhooks refused for their epoch": str(found["webhooks_refused_for_their_epoch"]),
        "load average": _cell(found["load_average"]),
        "missed": "; ".join(missed(found, kept.settings["lease_s"])) or "nothing",
    }
    for name, text in lines.items():
        console.print(f"{name:<44}{text}", markup=False, soft_wrap=True)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
