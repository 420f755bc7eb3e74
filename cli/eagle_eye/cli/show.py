"""What ``show`` prints for a person: an incident, an action, a node or a job on one screen, and what to type next."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from eagle_eye.cli.tables import Column, print_table, printable
from eagle_eye.client import Client, ClientError
from eagle_eye.schema import labels
from eagle_eye.schema.labels import AWAITING, author_label, chart_label, metric_label, shown_state, state_label
from eagle_eye.server.charts.dossier import typed

CHARTS_MAX = 4  # of an incident's metrics, drawn as one line each
CHART_CHARS = 40
INCIDENTS_MAX = 5  # of a node or job
STORY_MAX = 20
SILENCES_MAX = 1_000  # read to tell which incidents are silenced
ACTIONS_MAX = 1_000  # read to tell how far those of incidents have come
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"
_RECORD = Mapping[str, Any]

_EVIDENCE = (
    Column("observed", "metric"),
    Column("on", "on"),
    Column("value", "value"),
    Column("peers' median", "peers_median"),
    Column("threshold", "threshold"),
)
INCIDENT_COLUMNS = (
    Column("incident", "id"),
    Column("detected", "detected"),
    Column("state", "state"),
    Column("fault", "fault"),
    Column("job", "job", 2),
    Column("cell", "cell", 3),
    Column("nodes", "nodes"),
    Column("silenced until", "silenced_until", 3),
    Column("summary", "summary", 1, 36, below=True),
)
_STORY = (Column("time", "time"), Column("what", "kind"), Column("detail", "text"), Column("by", "who", 1))


# What may be said to an action in each state: why, and the verb.
_DECISIONS: Mapping[str, Sequence[tuple[str, str]]] = {
    AWAITING: (("carry it out", "approve"), ("decide against it", "reject")),
    "requested": (("take it back, if a person approved it", "withdraw"),),
    "expired": (("ask for it again", "renew"),),
}


def incident(client: Client, name: str) -> None:
    """Print the incident, its evidence, actions, what to type next and what happened. Raises ClientError."""
    path = f"/api/v1/incidents/{quote(name, safe='')}"
    dossier = client.call("GET", f"{path}/dossier")
    record = dossier["incident"]
    where = ", ".join(map(printable, record["nodes"])) or "no single node"
    device = "" if record["device"] is None else f", device {record['device']}"
    asked = [one["state"] for one in dossier["actions"] if not one["preliminary"]]
    state = shown_state(record["state"], asked[-1] if asked else "")
    _title(f"{words(record['fault'])} on {where}{device}", state, f"{record['confidence']:.0%} sure")
    _say(record["summary"])
    _say(dossier["meaning"])
    _facts(
        ("incident", record["id"]),
        ("job", f"{printable(record['job'])}, attempt {record['attempt']}{_labelled(', owner ', dossier['owner'])}"),
        *(("node", _place(place)) for place in dossier["where"]),
        ("more nodes", dossier["where_left_out"] or ""),
        ("began", record["onset"]),
        ("found", record["detected"]),
        ("over", record["ended"]),
        ("kinds of evidence", [words(kind) for kind in record["kinds"]]),
        ("usual repair", dossier["repair"]),
        ("held because", record["hold"]),
        ("acknowledged by", record["acknowledged_by"]),
        ("news silenced", _silenced(dossier.get("silence"))),
    )
    _section("Evidence")
    print_table(_EVIDENCE, [observation(item) for item in record["evidence"]])
    _charts(client, path, dossier["panels"])
    _section("Actions")
    _say("" if dossier["actions"] else "none")
    for one in dossier["actions"]:
        sys.stdout.write(f"{_asked(one)}: {state_label(printable(one['state']))} ({one['id']})\n")
        _reports(one)
    if dossier.get("carriers") is not None:  # of a server that says it
        _say(_carried_out(dossier["carriers"]))
    if dossier.get("hold_now"):
        _say(f"policy would hold it now: {dossier['hold_now']}")
    if dossier.get("aftermath"):  # of a server that says it
        _section("Was it right?")
        for sentence in dossier["aftermath"]:
            _say(sentence)
    _commands(dossier["commands"])
    _section("What happened")
    print_table(_STORY, dossier["story"][-STORY_MAX:])
    left_out = dossier["story_left_out"] + max(len(dossier["story"]) - STORY_MAX, 0)
    if left_out:
        sys.stderr.write(f"{left_out} older entries are not shown; eagle-eye audit has them\n")


def action(client: Client, name: str) -> None:
    """Print the action: what is asked of whom, why, and what was answered. Raises ClientError."""
    path = f"/api/v1/actions/{quote(name, safe='')}"
    record = client.call("GET", path)
    waits = record["state"] in (AWAITING, "requested")
    carriers = _carried_out(client.call("GET", f"{path}/preview")["carriers"]) if waits else ""
    _title(_asked(record), record["state"], f"{record['confidence']:.0%} sure")
    _say(record["summary"])
    _say(carriers)
    _facts(
        ("action", record["id"]),
        ("incident", record["incident_id"]),
        ("fault", f"{words(record['fault'])}{_labelled(' on ', record['node'])}"),
        ("job", f"{printable(record['job'])}, attempt {record['attempt']}, {len(record['ranks'])} ranks"),
        ("restart scope", words(record["restart_scope"] or "")),
        ("created", record["created"]),
        ("expires", record["expires"] if record["state"] in ("awaiting", "requested") else ""),
        ("usual repair", record["repair"]),
        ("withdrawn because", record["reason"]),
    )
    _section("Evidence")
    print_table(_EVIDENCE, [observation(item) for item in record["evidence"]])
    _section("Reports")
    _reports(record)
    decide = _DECISIONS.get(record["state"], ())
    _commands(
        [
            *({"why": why, "command": typed("actions", verb, record["id"])} for why, verb in decide),
            {"why": "why", "command": typed("incidents", "show", record["incident_id"])},
        ]
    )


def node(client: Client, name: str) -> None:
    """Print the node's state, its incidents, what its agent cannot observe, and what to type. Raises ClientError."""
    record = client.call("GET", f"/api/v1/nodes/{quote(name, safe='')}")
    agent, memory = record["agent"] or {}, record["memory"] or {}
    state = record["phase"] or record["state"]
    _title(printable(record["node"]), state, f"job {printable(agent['job'])}" if agent.get("job") else "no job")
    _say(record["reason"])
    _facts(
        ("since", record["updated"]),
        ("set by", author_label(printable(record["by"]))),
        ("known since", record["known_since"]),
        ("last report", agent.get("heard") or "none since the server started"),
        ("agent", agent.get("version")),
        ("watched until", record["watched_until"]),
        ("incidents, 30 days", memory.get("incidents_30_days")),
        *((f"no {words(source)}", why) for source, why in sorted(agent.get("troubles", {}).items())),
        *((f"dropped, {words(what)}", count) for what, count in sorted(agent.get("dropped", {}).items())),
    )
    if memory:
        _say(recurrence_words(memory))
    items = _incidents(client, {"node": name})
    if record["state"] == "in_service":
        verbs = [
            ("count it as out of service; its job goes on", "exclude"),
            ("count it as leaving once its job ends or restarts", "drain"),
        ]
    else:
        verbs = [("put it to work and see whether it is sick", "check"), ("return it to service", "readmit")]
    verbs.append(("all that happened to it", "history"))
    because = re.search(r"\binc_\w+", record["reason"])
    why_out = []
    if because:
        why_out.append({"why": "why, and was it right?", "command": typed("incidents", "show", because[0])})
    elif items:
        what = "why it was accused last, and was it right?"
        why_out.append({"why": what, "command": typed("incidents", "show", printable(items[0]["id"]))})
    _commands([*why_out, *({"why": why, "command": typed("nodes", verb, record["node"])} for why, verb in verbs)])


def job(client: Client, name: str) -> None:
    """Print the job's state, its progress and its incidents. Raises ClientError."""
    record = client.call("GET", f"/api/v1/jobs/{quote(name, safe='')}")
    progress = record["progress"] or {}
    step = progress.get("step")
    kept = (progress.get("memory_checkpoint") or {}).get("step")
    _title(f"job {printable(record['job'])}", record["state"], f"attempt {record['attempt']}")
    _say(record["said"])
    _facts(
        ("owner", record["owner"] or "unknown"),
        ("last step", "none seen" if step is None else f"{step:.0f} at {progress['progressed']}"),
        ("its log", progress.get("log", "")),
        ("a step takes", _seconds(progress.get("step_seconds"))),
        ("memory checkpoint", "" if kept is None else f"step {kept:.0f}"),
        ("nodes", record["nodes_total"] or "unknown"),
        ("ranks", len(record["ranks"])),
        ("reported by", record["source"]),
        ("scheduled as", record["scheduled_as"]),
        ("restarted by", record["restart_owner"] or "unknown"),
        ("held up by", record["held_up_by"]),
        ("ended before the others", [f"rank {one['rank']} with {one['exit_code']}" for one in record.get("exits", ())]),
        ("conflict", record["conflict"]),
    )
    _incidents(client, {"job": name})
    _commands([{"why": "where its time went", "command": "eagle-eye goodput"}])


def labelled(client: Client, items: Sequence[_RECORD]) -> list[_RECORD]:
    """Return a list's records with states as people read them, and incidents with their silence. Raises ClientError."""
    newest: dict[str, str] = {}  # states of actions, by incident
    if any(item.get("state") == "acting" for item in items):
        actions, _ = client.pages("/api/v1/actions", {}, len(items) + ACTIONS_MAX)
        for action in actions:
            if not action["preliminary"]:
                newest.setdefault(action["incident_id"], action["state"])
    silenced: dict[str, str] = {}
    if any("hold_rule" in item for item in items):  # incidents
        silences, _ = client.pages("/api/v1/silences", {"state": "active"}, SILENCES_MAX)
        silenced = {name: one["until"] for one in silences for name in one["incidents"]}
    found = []
    for item in items:
        state = shown_state(item["state"], newest.get(item.get("id", ""), "")) if "state" in item else ""
        shown = {**item, "silenced_until": silenced[item["id"]]} if item.get("id") in silenced else item
        found.append({**shown, "state": state_label(printable(state))} if state else shown)
    return found


def recurrence_words(remembered: Any) -> str:
    """Return the recurrence score as text."""
    if remembered["recurrence_score"] is None:
        return f"recurrence score: cannot tell, {printable(remembered['recurrence_reason'])}"
    failing = ", keeps failing" if remembered["recurrent"] else ""
    return f"recurrence score {remembered['recurrence_score']:.2f}{failing}"


def sparkline(values: Sequence[float | None], low: float, high: float, bars: str = _BARS) -> str:
    """Return a character for each value between ``low`` and ``high``; a space for None: nothing was observed."""
    span = high - low
    found = ""
    for value in values:
        share = 0.0 if value is None or span <= 0 else (min(max(value, low), high) - low) / span
        found += " " if value is None else bars[round(share * (len(bars) - 1))]
    return found


def thinned(values: Sequence[Any], most: int) -> list[float | None]:
    """Return at most ``most`` means of neighbours; None where none of them is a finite number."""
    each = math.ceil(len(values) / most) if values else 1
    parts = [[v for v in values[at : at + each] if isinstance(v, int | float)] for at in range(0, len(values), each)]
    return [sum(part) / len(part) if part else None for part in parts]


def _charts(client: Client, path: str, panels: Iterable[_RECORD]) -> None:
    """Print a line for the accused and one for its peers' median, of each metric that the detectors named."""
    bars = _BARS if "utf" in (sys.stdout.encoding or "").lower() else _ASCII_BARS
    for panel in [one for one in panels if one["evidence"]][:CHARTS_MAX]:
        query = {"metric": panel["metric"], "node": panel["node"], "device": panel["device"]}
        try:
            chart = client.call("GET", f"{path}/picture", query)
        except ClientError as error:
            sys.stderr.write(f"{panel['metric']} cannot be drawn: {error}\n")
            continue
        lines = {
            label: thinned(chart["columns"][column], CHART_CHARS)
            for label, column in ((printable(chart["name"]), "accused"), ("median of its peers", "median"))
        }
        known = [value for line in lines.values() for value in line if value is not None]
        if not known:
            continue
        low, high = min(known), max(known)
        spread = " to ".join(dict.fromkeys(figure(value, chart["unit"]) for value in (low, high)))
        sys.stdout.write(f"\n{chart_label(printable(panel['metric']), panel['form'])}, {spread}\n")
        width = max(map(len, lines))
        for label, line in lines.items():
            if any(value is not None for value in line):
                sys.stdout.write(f"  {label:<{width}}  {sparkline(line, low, high, bars)}\n")
        for sentence in chart["said"][:1]:
            _say(sentence)


def _incidents(client: Client, of: Mapping[str, str]) -> list[_RECORD]:
    """Print the newest incidents and return them."""
    _section("Incidents")
    items, more = client.pages("/api/v1/incidents", of, INCIDENTS_MAX)
    print_table([column for column in INCIDENT_COLUMNS if column.path != "job"], items)
    if more:
        sys.stdout.write(
            "older ones: eagle-eye incidents" + "".join(f" --{k} {printable(v)}" for k, v in of.items()) + "\n"
        )
    return items


def _reports(record: _RECORD) -> None:
    if not record["reports"]:
        _say("no report yet")
    for report in record["reports"]:
        by = _labelled(" by ", report.get("by"))
        sys.stdout.write(f"  {printable(report.get('time'))}  {printable(report['state'])}{by}")
        sys.stdout.write(f"{_labelled(': ', report.get('detail'))}\n")


def _commands(found: Sequence[_RECORD]) -> None:
    _section("Next")
    for one in found:
        if not one["command"]:
            continue  # of a name that cannot be typed
        sys.stdout.write(f"{printable(one['why'])}\n  {printable(one['command'])}\n")
        if one.get("undo"):
            sys.stdout.write(f"  undo: {printable(one['undo'])}\n")


def _title(what: str, state: str, more: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(soft_wrap=True).print(Text.assemble((what, "bold"), f"  {state_label(printable(state))}, {more}"))


def _section(title: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console().print(Text.assemble("\n", (title, "bold")))


def _say(sentence: str | None) -> None:
    """Print the sentence, indented, and wrapped on a terminal; nothing if there is none."""
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else sys.maxsize
    for line in textwrap.wrap(printable(sentence), width, initial_indent="  ", subsequent_indent="  "):
        sys.stdout.write(f"{line}\n")


def _facts(*facts: tuple[str, Any]) -> None:
    """Print the facts under each other; those that are None or empty are left out."""
    known = [(name, printable(value)) for name, value in facts if value not in (None, "", [])]
    width = max((len(name) for name, _ in known), default=0)
    sys.stdout.write("\n" + "".join(f"  {printable(name):<{width}}  {value}\n" for name, value in known))


def observation(item: _RECORD) -> dict[str, Any]:
    """Return the texts of an item of evidence: value, peers' median, threshold, metric, and where it was observed."""
    device = "" if item["device"] is None else f" device {item['device']}"
    on = f"{item['node']}{device}" if item["node"] else "the job"
    numbers = {name: figure(item[name], item["unit"]) for name in ("value", "peers_median", "threshold")}
    return {**numbers, "metric": metric_label(printable(item["metric"])), "on": on}


def _place(place: _RECORD) -> str:
    found = f"{printable(place['node'])}: {words(place['phase'] or place['state'] or 'unknown')}"
    found += _labelled(", rack ", place["rack"]) + _labelled(", switch ", place["switch"])
    return found + _labelled(", also runs ", place["other_jobs"])


def _silenced(silence: _RECORD | None) -> str:
    if silence is None:
        return ""
    until = f"until {printable(silence['until'])} ({printable(silence['id'])})"
    return f"by {printable(silence['by'])} {until}: {printable(silence['reason'])}; actions go on"


def _carried_out(carriers: Sequence[_RECORD]) -> str:
    if not carriers:
        return "nobody will carry it out: no subscription takes this action (eagle-eye subscriptions)"
    who = (
        f"{one['subscription_id']} ({one['url']})" + _labelled(", failing since ", one["failing_since"])
        for one in carriers
    )
    return f"to be carried out by {', '.join(who)}"


def _asked(record: _RECORD) -> str:
    return f"{words(record['kind'])} {printable(record['exclude'])}".rstrip()


def figure(value: Any, unit: str) -> str:
    """Return a value with its unit, "" for None; untrusted texts are made printable."""
    return printable(labels.figure(value, unit) if isinstance(value, int | float | str) else value)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} s"


def _labelled(label: str, value: Any) -> str:
    return f"{label}{printable(value)}" if value else ""


def words(name: str) -> str:
    """Return one of the API's identifiers as words."""
    return printable(name).replace("_", " ")
