"""The report for people, or as one line of JSON."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.recovery.keeping import Kept


def show(kept: Kept, *, as_json: bool) -> None:
    """The figures of a run are on stdout."""
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"figures": kept.figures, "without": kept.without}) + b"\n")
        sys.stdout.flush()
        return
    found, console = kept.figures, Console(highlight=False)
    table = Table("from fault to first new step", "runs", "aborted", "p50 s", "p95 s", "max s")
    times = found["first_step"]
    scopes = {f"scope {name}": one for name, one in times["by_scope"].items()}
    groups = {**times["by_kind"], **times["by_shape"], **scopes, "all": times["all"]}
    if times["from_the_second_fault"]["runs"]:
        groups["from the second fault"] = times["from_the_second_fault"]
    for name, one in groups.items():
        table.add_row(name, *(_cell(one[key]) for key in ("runs", "aborted", "p50_s", "p95_s", "max_s")))
    console.print(table)
    right, steps, lost = found["right_node"], found["steps_per_hour"], found["steps_lost"]
    lines = {
        "items, faults in them": f"{found['items']} of {kept.plan['items']}, {found['faults']}",
        "results": ", ".join(f"{count} {name}" for name, count in found["results"].items()),
        "right node named": f"{right['named']} of {right['named'] + len(right['missed'])}"
        f" (and {right['ended_by_the_restart_for_another']} ended by the restart for another)",
        "missed": "; ".join(right["missed"]) or "none",
        "healthy nodes excluded": "; ".join(found["healthy_nodes_excluded"]) or "none",
        "restarts": f"{found['restarts']}, for nothing: {'; '.join(found['restarts_double']) or 'none'}",
        "void actions carried out": "; ".join(found["stale_actions_done"]) or "none",
        "alarms by hand": ", ".join(f"{count} {name}" for name, count in found["alarms_by_hand"].items()) or "none",
        "ranks of nodes started": ", ".join(f"{count} {name}" for name, count in found["starts"].items()) or "-",
        "steps lost": f"{lost['all']} in all, {_cell(lost['p50'])} p50, {_cell(lost['p95'])} p95 a restart",
        "effective training time": _cell(found["effective_training_ratio"]),
        "where the time went": ", ".join(f"{share:.1%} {what}" for what, share in found["time_spent"].items()) or "-",
        "steps an hour": f"{steps['undisturbed']} undisturbed, {_cell(steps['under_fire'])} under fire",
    }
    if kept.without:
        lines["steps an hour with torchrun alone"] = (
            f"{kept.without['steps_per_hour']} ({kept.without['recovered_alone']} recovered by themselves,"
            f" {kept.without['a_person_had_to_help']} by a person after {kept.without['notice_s']:.0f} s)"
        )
    for name, text in lines.items():
        console.print(f"{name:<36}{text}", markup=False, soft_wrap=True)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
