"""The figures as tables, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.replanning.throughput import LEFT_RATIO_MIN

_UNDISTURBED = "of_undisturbed_ratio"


def show(found: Mapping[str, Any], misses: Sequence[str], console: Console) -> None:
    """What was simulated, and what is missed."""
    lost = Table(
        f"simulated: of {found['nodes']} nodes lost", *map(str, range(len(found["lost"]["Eagle Eye"][_UNDISTURBED])))
    )
    for name, one in found["lost"].items():
        lost.add_row(name, *(f"{ratio:.1%}" for ratio in one[_UNDISTURBED]))
    console.print(lost)
    console.print(
        f"of the share of the nodes left, on average: {found['of_nodes_left_ratio_mean']:.1%}"
        f" (asked {LEFT_RATIO_MIN:.0%})"
    )
    frequencies = found["frequencies"]
    table = Table(f"simulated: failures, repaired after {found['repair_s'] / 60:g} min", *frequencies)
    table.add_row("nodes there", *(f"{one['nodes_up_ratio']:.1%}" for one in frequencies.values()))
    for name in next(iter(frequencies.values()))[_UNDISTURBED]:
        table.add_row(name, *(f"{one[_UNDISTURBED][name]['mean']:.1%}" for one in frequencies.values()))
    console.print(table)
    for missed in misses:
        console.print(f"missed: {missed}", style="yellow", markup=False, soft_wrap=True)
