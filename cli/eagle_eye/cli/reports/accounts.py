"""What a report on the accounts contains: goodput by job, fault and node, and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from eagle_eye.client import Client
from eagle_eye.server.store.store import PAGE_LIMIT_MAX

HOUR_S = 3_600.0
CAUSES = ("fault", "node")


class AccountsReport(NamedTuple):
    """The answers that a report is made of; ``causes`` are the losses by fault and by node."""

    jobs: Mapping[str, Any]
    causes: Mapping[str, Mapping[str, Any]]
    ledger: Mapping[str, Any]

    @property
    def unknown(self) -> tuple[str, ...]:
        """What this report cannot tell, in sentences."""
        total = self.jobs["total"]
        sentences = [f"{hours(one['seconds'])} hours: {one['reason']}" for one in total["unknown"]]
        uncounted_s = sum(amount["seconds_without_gpu_count"] for amount in total["lost"].values())
        if uncounted_s:
            sentences.append(f"{hours(uncounted_s)} lost hours are of jobs whose number of GPUs is not known")
        for answer, what in ((self.jobs, "jobs"), *((self.causes[by], f"{by}s") for by in CAUSES)):
            if answer["left_out"]:
                sentences.append(f"{answer['left_out']} more {what} are left out of the tables, not of the sums")
        if self.jobs["cut"]:
            sentences.append("there are more attempts on record than are read; the oldest ones are left out")
        if self.ledger["cut"]:
            sentences.append("there are more held-back actions on record than are read; the oldest are left out")
        return tuple(sentences)


def gather(
    client: Client,
    since_s: float | None,
    until_s: float | None,
    cell: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> AccountsReport:
    """Ask the server for all of it, or of one cell's; ``progress`` is told what is asked for. Raises ClientError."""
    query = {"since": since_s, "until": until_s, "cell": cell, "limit": PAGE_LIMIT_MAX}
    progress("the jobs' goodput")
    jobs = client.call("GET", "/api/v1/goodput", {**query, "by": "job"})
    causes = {}
    for by in CAUSES:
        progress(f"the losses by {by}")
        causes[by] = client.call("GET", "/api/v1/goodput", {**query, "by": by})
    progress("the ledger")
    ledger = client.call("GET", "/api/v1/ledger", {"since": since_s, "cell": cell, "limit": 1})
    return AccountsReport(jobs, causes, ledger)


def hours(seconds: float) -> str:
    """Return the hours, as people write them."""
    return f"{seconds / HOUR_S:,.2f}"


def job_row(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's account as cells of a table, by column."""
    unknown_s = sum(amount["seconds"] for amount in item["unknown"])
    return {
        "job": item["job"],
        "cell": item.get("cell", ""),
        "attempts": item["attempts"],
        "hours": hours(item["wall"]["seconds"]),
        "ettr": share(item["ettr_ratio"]),
        "goodput": share(item["goodput_ratio"]),
        "lost": hours(item["lost_gpu_seconds"]),
        "unknown": hours(unknown_s) if unknown_s else "",
    }


def total_row(name: str, counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ledger's count of claims as cells of a table, by column."""
    interval: Sequence[float] | None = counted["interval_95"]
    words = "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
    ratio = counted["precision"]
    return {**counted, "name": name, "precision": "" if ratio is None else f"{ratio:.2f}", "interval": words}


def share(ratio: float | None) -> str:
    """Return the ratio, or that it is not known."""
    return "cannot tell" if ratio is None else f"{ratio:.3f}"
