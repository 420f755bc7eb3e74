"""A job's past in few words, for the tests of what is counted in it."""

from __future__ import annotations

from typing import Any

from eagle_eye.server.model.records import Attempt, Node
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.store.store import Change, Store
from tests.server.builders import NOW, action, incident

DAY = 86_400.0


def attempt(number: int = 0, begun: float = 0, over: float | None = None, **more: Any) -> Attempt:
    """Return an attempt of eight GPUs on two nodes, its times counted from NOW; ``over`` None: it goes on."""
    fields: dict[str, Any] = {
        "id": f"att_{number}",
        "run": "att_0",
        "job": "job",
        "attempt": number,
        "started_s": NOW + begun,
        "seen_s": NOW + (begun if over is None else over),
        "nodes": 2,
        "gpus": 8,
        "ended_s": None if over is None else NOW + over,
        "end": "" if over is None else "superseded",
    }
    for name, value in more.items():
        is_time = name.endswith("_s") and name != "step_s" and value is not None
        fields[name] = NOW + value if is_time else value
    return Attempt(**fields)


def course(number: int = 0, step: float | None = None, at: float = 0, **more: Any) -> JobProgress:
    """Return a look at the job: its step ``step`` ended ``at`` seconds after NOW, and steps take 2 s."""
    fields: dict[str, Any] = {
        "job": "job",
        "attempt": number,
        "state": "running",
        "declared": True,
        "started_s": NOW,
        "first_step": None if step is None else 1.0,
        "step": step,
        "progressed_s": None if step is None else NOW + at,
        "step_s": 2.0,
        "nodes": ("n1", "n2"),
        "gpus": 8,
    }
    return JobProgress(**{**fields, **more})


def known(node: str = "n1", days: float = 60) -> Node:
    """Return a node that has been known for so many days."""
    return Node(node=node, state="in_service", reason="", updated_s=NOW, known_since_s=NOW - days * DAY)


def three_failures(store: Store) -> None:
    """Put three jobs on record that n1 stopped, two of which had it taken out."""
    days = (3, 9, 20)
    store.commit(
        Change(
            nodes=(known("n1"), known("n2"), known("young", days=1)),
            incidents=tuple(
                incident(f"inc_{day}", job=f"job{day}", detected_s=NOW - day * DAY, onset_s=NOW - day * DAY)
                for day in days
            ),
            actions=tuple(
                action(f"act_{day}", "done", job=f"job{day}", created_s=NOW - day * DAY, updated_s=NOW - day * DAY)
                for day in days[:2]
            ),
        )
    )
