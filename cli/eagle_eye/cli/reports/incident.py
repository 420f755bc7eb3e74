"""What a report on one incident contains: its dossier, its charts, and when training went on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from eagle_eye.client import Client, ClientError
from eagle_eye.schema.labels import metric_label
from eagle_eye.schema.notation import number
from eagle_eye.schema.times import unix_seconds

CHARTS_MAX = 6
LATER_S = 1_800.0  # after the incident's last change in which training is expected to have gone on
TRAINS = ("training", "slow")
EXECUTED = ("running", "done", "failed")  # reports by which an action had begun


class Mark(NamedTuple):
    """A moment that the charts show; Unix seconds."""

    time_s: float
    name: str


class IncidentReport(NamedTuple):
    """The answers that a report is made of. ``undrawn`` maps metrics that were to be drawn to why they are not."""

    dossier: Mapping[str, Any]
    charts: tuple[Mapping[str, Any], ...]
    undrawn: Mapping[str, str]
    trains_again_s: float | None

    @property
    def record(self) -> Mapping[str, Any]:
        """The incident."""
        record: Mapping[str, Any] = self.dossier["incident"]
        return record

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Onset, verdict, actions, the end and the first step after it, in this order."""
        record = self.record
        found = [Mark(unix_seconds(record["onset"]), "onset"), Mark(unix_seconds(record["detected"]), "verdict")]
        found += [Mark(unix_seconds(one["created"]), one["kind"].replace("_", " ")) for one in self.dossier["actions"]]
        if record["ended"]:
            found.append(Mark(unix_seconds(record["ended"]), "end"))
        if self.trains_again_s is not None:
            found.append(Mark(self.trains_again_s, "trains again"))
        return tuple(found)

    @property
    def took(self) -> tuple[tuple[str, str], ...]:
        """How long each stage took since the onset, as text; what did not happen, or is not known, is left out."""
        first: dict[str, float] = {}
        for mark in self.marks:
            first.setdefault(mark.name, mark.time_s)
        onset_s = first.pop("onset")
        return tuple((name, number(max(0.0, time_s - onset_s), "seconds")) for name, time_s in first.items())

    @property
    def unknown(self) -> tuple[str, ...]:
        """What this report cannot tell, in sentences."""
        sentences = [f"{metric_label(metric)} could not be drawn: {why}" for metric, why in self.undrawn.items()]
        for chart in self.charts:
            seen = any(value is not None for value in chart["columns"]["accused"])
            if not seen:
                sentences.append(f"{metric_label(chart['metric'])}: nothing was observed of {chart['name']}")
            elif chart["silences"]:
                times = "once" if len(chart["silences"]) == 1 else f"{len(chart['silences'])} times"
                label = metric_label(chart["metric"])
                sentences.append(f"{label}: {chart['name']} was silent {times} while its peers were observed")
        if not self.dossier["actions"]:
            sentences.append("no action was asked for, so that nobody reported what became of it")
        elif self.trains_again_s is None:
            sentences.append("when training went on is not known")
        if self.dossier["story_left_out"] or self.dossier["cut"]:
            sentences.append("older entries of what happened are left out; eagle-eye audit has them")
        if self.dossier["where_left_out"]:
            sentences.append(f"{self.dossier['where_left_out']} more nodes are concerned")
        return tuple(sentences)


def gather(client: Client, incident: str, progress: Callable[[str], None] = lambda _: None) -> IncidentReport:
    """Ask the server for all of it; ``progress`` is told what is asked for. Raises ClientError."""
    path = f"/api/v1/incidents/{quote(incident, safe='')}"
    progress("the incident")
    dossier = client.call("GET", f"{path}/dossier")
    charts, undrawn = [], {}
    for panel in dossier["panels"][:CHARTS_MAX]:
        progress(f"the course of {metric_label(panel['metric'])}")
        query = {"metric": panel["evidence"] or panel["metric"], "node": panel["node"], "device": panel["device"]}
        try:
            charts.append(client.call("GET", f"{path}/picture", query))
        except ClientError as error:
            undrawn[panel["metric"]] = str(error)
    progress("what the job did afterwards")
    return IncidentReport(dossier, tuple(charts), undrawn, _trains_again_s(client, dossier))


def _trains_again_s(client: Client, dossier: Mapping[str, Any]) -> float | None:
    """Return when the job's first step after the first executed action began to count; None: not known."""
    acted = [
        unix_seconds(report["time"])
        for action in dossier["actions"]
        for report in action["reports"]
        if report["state"] in EXECUTED and report.get("time")
    ]
    if not acted:
        return None
    since_s = min(acted)
    query = {"since": since_s, "until": since_s + LATER_S, "points": 10}
    try:
        course = client.call("GET", f"/api/v1/jobs/{quote(dossier['incident']['job'], safe='')}/course", query)
    except ClientError:
        return None
    return next((start_s for start_s, part in _parts(course) if part in TRAINS and start_s > since_s), None)


def _parts(course: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    for part in course["parts"]:
        yield unix_seconds(part["start"]), part["part"]
