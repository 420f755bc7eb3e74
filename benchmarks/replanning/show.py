"""The figures as tables, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.replanning.lost_node import P50_S_MAX, P95_S_MAX, STEPS_LOST_MAX
from benchmarks.replanning.throughput import LEFT_RATIO_MIN

_UNDISTURBED = "of_undisturbed_ratio"


def show(parts: Mapping[str, Mapping[str, Any]], misses: Sequence[str], console: Console) -> None:
    """All parts that there are, and what is missed."""
    for name, table in (
        ("lost_node", _lost_node),
        ("throughput", _throughput),
        ("storm", _storm),
        ("compare", _compare),
    ):
        if found := parts.get(name):
            table(found, console)
    for missed in misses:
        console.print(f"missed: {missed}", style="yellow", markup=False, soft_wrap=True)


def _lost_node(found: Mapping[str, Any], console: Console) -> None:
    waited, lost = found["first_step_s"], found["steps_lost"]
    table = Table("four nodes, no spare, one lost", "asked", f"{found['repetitions']} times")
    table.add_row("until a new step, p50", f"{P50_S_MAX:g} s", _seconds(waited["p50"]))
    table.add_row("p95", f"{P95_S_MAX:g} s", _seconds(waited["p95"]))
    for kind, one in found["by_kind"].items():
        table.add_row(f"{kind}: p50, max", "", f"{_seconds(one['p50'])}, {_seconds(one['max'])}")
    table.add_row("steps lost, at most", str(STEPS_LOST_MAX), f"{lost['max']} (mean {lost['mean']})")
    table.add_row("pause when it is back, p50", "", _seconds(found["grow_s"]["p50"]))
    console.print(table)


def _throughput(found: Mapping[str, Any], console: Console) -> None:
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


def _storm(found: Mapping[str, Any], console: Console) -> None:
    jobs, loss = found["jobs"], found["loss"]
    table = Table(f"{found['faults']} of {found['settings']['faults']} faults without a spare", f"{len(jobs)} jobs")
    rows = {
        "steps done": f"{sum(job['steps_done'] for job in jobs)} of {len(jobs) * found['steps']}",
        "deadlocks": str(found["deadlocks"]),
        "longest without a step": _seconds(found["longest_without_a_step_s"]),
        "attempts, steps lost": f"{found['attempts']}, {found['steps_lost']}",
        "effective training time in the storm": str(found["effective_training_ratio"]),
        "the loss, to that of an undisturbed job": _off(loss["difference_ratio"]),
        "the same of two undisturbed layouts": _off(loss["noise_ratio"]),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def _compare(found: Mapping[str, Any], console: Console) -> None:
    arms = found["arms"]
    table = Table(f"the same {found['settings']['faults']} faults", *arms)
    for name, stretch in (("undisturbed", "calm"), ("in the storm", "storm")):
        table.add_row(f"samples/s {name}", *(str(one[stretch]["samples_per_s"]) for one in arms.values()))
    table.add_row("of undisturbed", *(f"{one['of_undisturbed_ratio']:.1%}" for one in arms.values()))
    table.add_row("steps made again", *(str(one["storm"]["steps_again"]) for one in arms.values()))
    longest = (one["storm"]["longest_without_a_step_s"] for one in arms.values())
    table.add_row("longest without a step", *map(_seconds, longest))
    console.print(table)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _off(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e} off"
