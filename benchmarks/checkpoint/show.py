"""The report for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint.restore import ARMS

WIDTH = 150


def show(result: dict[str, Any]) -> None:
    """The figures of every part that was measured are on stdout."""
    console = Console(highlight=False, width=WIDTH)
    shown = {"capture": _capture, "restore": _restore, "peers": _peers, "simulation": _simulation}
    for part, print_it in shown.items():
        if part in result:
            print_it(console, result[part]["figures"])


def _capture(console: Console, figures: dict[str, Any]) -> None:
    table = Table(
        "captures of", "step", "a rank's shard", "blocked", "of the step", "each tenth", "steps longer", "each tenth",
        "ms/GB", "CPU ms/GB", "memcpy CPU ms/GB", "skipped",
    )  # fmt: skip
    for name, one in figures.items():
        each, tenth = one["longer_steps_each"], one["longer_steps_tenth"]
        table.add_row(
            name, f"{one['step_s']:.3f} s", f"{one['shard_bytes'] / 1e6:.0f} MB", f"{one['blocked_ms']['median']} ms",
            f"{one['blocked_share_each_step']:.1%}", f"{one['blocked_share_each_tenth']:.2%}",
            f"{each['median']:.1%} ({each['q1']:.1%} to {each['q3']:.1%})",
            f"{tenth['median']:.1%} ({tenth['q1']:.1%} to {tenth['q3']:.1%})",
            f"{one['blocked_ms_per_gb']}", f"{one['cpu_ms_per_gb']}", f"{one['memcpy_cpu_ms_per_gb']}",
            f"{one['skipped']}",
        )  # fmt: skip
    console.print(table)


def _restore(console: Console, figures: dict[str, Any]) -> None:
    table = Table(f"{figures['rank_bytes'] / (1 << 30):g} GiB a rank from", "load", "GB/s, median and best")
    for arm in ARMS:
        rate = figures["gb_per_s"][arm]
        table.add_row(arm, f"{figures['load_s'][arm]['median']} s", f"{rate['median']}, {rate['best']}")
    for name in ("memcpy", "tcp_loopback"):
        rate = figures["gb_per_s"][name]
        table.add_row(f"({name})", "", f"{rate['median']}, {rate['best']}")
    console.print(table)
    own, tcp, sooner = figures["own_of_memcpy"], figures["neighbour_of_tcp"], figures["times_sooner"]
    console.print(f"own: {own['median']:.0%} of memcpy ({own['best']:.0%} at best), times sooner {sooner['own']}")
    console.print(
        f"neighbour: {tcp['median']:.0%} of TCP ({tcp['best']:.0%} at best), times sooner {sooner['neighbour']}"
    )


def _peers(console: Console, figures: dict[str, Any]) -> None:
    table = Table(
        "each step that may be", "step", "longer", "blocked p50", "p95", "saved of steps", "steps lost", "survives"
    )
    for name, one in figures.items():
        if "error" in one:
            table.add_row(name, one["error"][:200], *[""] * 6)
            continue
        table.add_row(
            name, f"{one['step_s']} s", f"{one['longer_ratio']:.1%}", f"{one['blocked_ms']['p50']} ms",
            f"{one['blocked_ms']['p95']} ms", f"{one['saved_ratio']:.0%}", f"{one['steps_lost']}", one["survives"],
        )  # fmt: skip
    console.print(table)


def _simulation(console: Console, figures: dict[str, Any]) -> None:
    for name, kinds in figures["effective_time_ratio"].items():
        sizes = list(next(iter(kinds.values())))
        table = Table(f"{name}, nodes:", *sizes)
        for kind, ratios in kinds.items():
            table.add_row(kind, *(f"{ratio:.3f}" for ratio in ratios.values()))
        console.print(table)
