"""What is on record of a node: its GPUs, its repair tickets, and from all of it how likely it fails again. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from eagle_eye.schema.names import NAME_CHARS_MAX, is_name
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.model.records import Comparison, DriverError, Gpu, GpuChecks, Seat, Ticket

# GPU inventory: where each GPU is, its driver errors, and its checks for silent corruption. Agents are not trusted:
# implausible UUIDs and codes are ignored, and what is kept per GPU is limited.

UUID_CHARS_MAX = 96
MODEL_CHARS_MAX = 96
MARK_CHARS_MAX = 64  # of a PCI address, and of a serial number
MOVES_KEPT = 32  # per GPU; the oldest are dropped
MOVES_PLAUSIBLE = 6  # a UUID that moved more often within the window is shared by several GPUs (clones, simulated ones)
COMPARISONS_KEPT = 8  # per GPU, and as many with wrong numbers
DEVICES_MAX, LINKS_MAX = 256, 64  # per node, per GPU
# Of one scan of a node's GPUs; a GPU not reported for longer is gone for good, and not missing.
TOGETHER_S, MISSED_S = 5.0, 30 * 86_400.0
CODE_MAX = 100_000  # SXIDs have five digits
INVENTORY, ERRORS = "inventory", frozenset({"xid", "sxid"})


class GpuReport(NamedTuple):
    """One GPU as an agent reported it."""

    uuid: str
    node: str
    device: int
    model: str
    time_s: float
    pci_address: str = ""
    serial: str = ""
    told_with: int = 0
    nvlinks: int | None = None

    def joined(self, other: GpuReport) -> GpuReport:
        """Return the newer of both."""
        return other if other.time_s >= self.time_s else self


class ErrorCount(NamedTuple):
    """How often an error was reported, and when first and last."""

    times: int
    first_s: float
    last_s: float

    def joined(self, other: ErrorCount) -> ErrorCount:
        """Return both combined."""
        return ErrorCount(self.times + other.times, min(self.first_s, other.first_s), max(self.last_s, other.last_s))


def reported_gpus(node: str, device: int, attributes: Mapping[str, Any], time_s: float) -> GpuReport | None:
    """Return the contents of an inventory event, None when implausible."""
    uuid, model = attributes.get("uuid"), attributes.get("model")
    if not isinstance(uuid, str) or not 0 < len(uuid) <= UUID_CHARS_MAX or not uuid.isprintable() or device < 0:
        return None
    address, serial = (_plain(attributes.get(name), MARK_CHARS_MAX) for name in ("pci_address", "serial"))
    gpus, links = _count(attributes.get("gpus"), DEVICES_MAX) or 0, _count(attributes.get("nvlinks"), LINKS_MAX)
    return GpuReport(uuid, node, device, _plain(model, MODEL_CHARS_MAX), time_s, address, serial, gpus, links)


def _count(value: object, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _plain(text: object, most: int) -> str:
    return text[:most] if isinstance(text, str) and text.isprintable() else ""


def code_of(attributes: Mapping[str, Any]) -> int | None:
    """Return the code of an error event, None when there is none."""
    code = attributes.get("code")
    return code if isinstance(code, int) and not isinstance(code, bool) and 0 < code < CODE_MAX else None


def seated(known: Gpu | None, now: GpuReport) -> Gpu:
    """Return the GPU's updated record; another node or device is a move. Older reports change nothing."""
    if known is None:
        first = Gpu(
            uuid=now.uuid,
            node=now.node,
            device=now.device,
            model=now.model,
            since_s=now.time_s,
            first_seen_s=now.time_s,
            seen_s=now.time_s,
        )
        return _as_reported(first, now)
    if now.time_s <= known.seen_s:
        return known
    if (now.node, now.device) == (known.node, known.device):
        return _as_reported(known, now)
    moves = [*known.moves, Seat(known.node, known.device, known.since_s, now.time_s)]
    moved = replace(
        known,
        node=now.node,
        device=now.device,
        since_s=now.time_s,
        pci_address="",
        nvlinks_most=0,
        moves=moves[-MOVES_KEPT:],
        moves_dropped=known.moves_dropped + max(0, len(moves) - MOVES_KEPT),
    )
    return _as_reported(moved, now)


def _as_reported(known: Gpu, now: GpuReport) -> Gpu:
    return replace(
        known,
        seen_s=now.time_s,
        model=now.model or known.model,
        pci_address=now.pci_address or known.pci_address,
        serial=now.serial or known.serial,
        told_with=now.told_with,
        nvlinks=now.nvlinks,
        nvlinks_most=max(known.nvlinks_most, now.nvlinks or 0),
    )


class Stock(NamedTuple):
    """A node's GPUs in its latest scan, and those it reported before but no longer does."""

    reported: tuple[Gpu, ...]
    missing: tuple[Gpu, ...]


def stock(gpus: Sequence[Gpu]) -> Stock | None:
    """Return which of a node's GPUs are present; None where its latest scan is incomplete.

    A GPU replaced by another one, from elsewhere or new, is not missing.
    """
    newest_s = max((gpu.seen_s for gpu in gpus), default=0.0)
    reported = tuple(gpu for gpu in gpus if newest_s - gpu.seen_s <= TOGETHER_S)
    if not reported or any(gpu.told_with != len(reported) for gpu in reported):
        return None
    gone = [gpu for gpu in gpus if TOGETHER_S < newest_s - gpu.seen_s <= MISSED_S]
    came_s = sorted(_came_s(gpu) for gpu in reported)
    missing = []
    for gpu in sorted(gone, key=lambda gpu: -gpu.seen_s):
        if came_s and came_s[-1] > gpu.seen_s:
            came_s.pop()  # it was replaced
        else:
            missing.append(gpu)
    return Stock(reported, tuple(missing))


def _came_s(gpu: Gpu) -> float:
    """Return since when the GPU has been on its node, in whatever seat."""
    since_s = gpu.since_s
    for seat in reversed(gpu.moves):
        if seat.node != gpu.node:
            break
        since_s = seat.since_s
    return since_s


def sat_at(gpu: Gpu, time_s: float) -> tuple[str, int] | None:
    """Return the node and device of the GPU at that time; None before it was known."""
    if time_s >= gpu.since_s:
        return gpu.node, gpu.device
    return next(((s.node, s.device) for s in gpu.moves if s.since_s <= time_s < s.until_s), None)


def is_one_gpu(gpu: Gpu, since_s: float) -> bool:
    """Return whether the UUID moved seldom enough since then to belong to a single GPU."""
    return sum(seat.until_s >= since_s for seat in gpu.moves) <= MOVES_PLAUSIBLE


def error_id(node: str, device: int, kind: str, code: int, uuid: str) -> str:
    """Return the id of the record that counts a code for one device of a node and the GPU in it."""
    return f"{kind}:{code}:{device}:{uuid}:{node}"


def counted(known: DriverError | None, new: DriverError) -> DriverError:
    """Return the record with the new count added."""
    if known is None:
        return new
    return replace(
        known,
        count=known.count + new.count,
        first_s=min(known.first_s, new.first_s),
        last_s=max(known.last_s, new.last_s),
    )


def compared(known: GpuChecks | None, uuid: str, new: Comparison) -> GpuChecks:
    """Return a GPU's record of checks for silent corruption with one more."""
    if known is None:
        known = GpuChecks(
            uuid=uuid, checks=0, seconds=0.0, operations=0.0, wrong_numbers=0.0, first_s=new.time_s, last_s=new.time_s
        )
    newest = [*known.newest, new]
    wrong = [one for one in newest if one.wrong_numbers][-COMPARISONS_KEPT:]
    return replace(
        known,
        checks=known.checks + 1,
        seconds=known.seconds + new.seconds,
        operations=known.operations + new.operations,
        wrong_numbers=known.wrong_numbers + new.wrong_numbers,
        last_s=max(known.last_s, new.time_s),
        newest=[one for one in newest if one in wrong or one in newest[-COMPARISONS_KEPT:]],
    )


# Repair tickets, exported by the site's own system: CSV with a header, or one JSON object per line. Columns: ``id``,
# ``node``, ``opened``, and optionally ``closed`` and ``text``; others are ignored and listed. A file with any error is
# rejected as a whole.

TicketFormat = Literal["csv", "jsonl"]
TICKET_COLUMNS = ("id", "node", "opened", "closed", "text")
REQUIRED_COLUMNS = ("id", "node", "opened")
TICKETS_MAX = 10_000  # per import
TICKET_CHARS_MAX = 1_000  # kept of a ticket's text
OTHERS_NAMED_MAX = 20


class TicketFileWrong(ValueError):
    """The file is invalid; the message names line, column and what was expected."""


class ParsedTickets(NamedTuple):
    """The tickets of a file, the last line of each id, and the ignored columns."""

    tickets: list[Ticket]
    left_out: list[str]


def parse_tickets(text: str, form: TicketFormat, imported_s: float) -> ParsedTickets:
    """Return the file's tickets. Raises TicketFileWrong."""
    tickets: dict[str, Ticket] = {}
    left_out: dict[str, None] = {}
    for count, (line, row) in enumerate(_csv_rows(text) if form == "csv" else _json_rows(text)):
        if count >= TICKETS_MAX:
            raise TicketFileWrong(f"line {line}: more than {TICKETS_MAX} tickets; import the file in parts")
        left_out.update(dict.fromkeys(str(name)[:80] for name in row if name not in TICKET_COLUMNS))
        ticket = _ticket(line, row, imported_s)
        tickets[ticket.id] = ticket
    return ParsedTickets(list(tickets.values()), list(left_out)[:OTHERS_NAMED_MAX])


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        missing = [name for name in REQUIRED_COLUMNS if name not in header]
        if missing:
            raise TicketFileWrong(
                f"line 1: no column {', '.join(missing)}; expected a header with {','.join(TICKET_COLUMNS)}"
                " (closed and text may be left out)"
            )
        twice = [name for name in TICKET_COLUMNS if header.count(name) > 1]
        if twice:
            raise TicketFileWrong(f"line 1, column {twice[0]}: it is there twice")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise TicketFileWrong(f"line {reader.line_num}: {len(cells)} cells; the header has {len(header)}")
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise TicketFileWrong(f"line {reader.line_num}: no CSV: {error}") from None


def _json_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TicketFileWrong(f"line {number}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise TicketFileWrong(f"line {number}: expected a JSON object, got {type(row).__name__}")
        yield number, row


def _ticket(line: int, row: Mapping[str, Any], imported_s: float) -> Ticket:
    opened_s = _ticket_time(line, row, "opened")
    if opened_s is None:
        raise TicketFileWrong(f"line {line}, column opened: it is empty; expected when the ticket was opened")
    closed_s = _ticket_time(line, row, "closed")
    if closed_s is not None and closed_s < opened_s:
        raise TicketFileWrong(f"line {line}, column closed: {row['closed']!r} is before opened, {row['opened']!r}")
    said = row.get("text")
    return Ticket(
        id=_ticket_node(line, row, "id"),
        node=_ticket_node(line, row, "node"),
        opened_s=opened_s,
        closed_s=closed_s,
        text="" if said is None else str(said)[:TICKET_CHARS_MAX],
        imported_s=imported_s,
    )


def _ticket_node(line: int, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    # Ticket systems number their tickets, and JSON keeps the number.
    name = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not is_name(name):
        raise TicketFileWrong(
            f"line {line}, column {column}: expected 1 to {NAME_CHARS_MAX} printable characters,"
            f" got {str(value)[:80]!r}"
        )
    return name


def _ticket_time(line: int, row: Mapping[str, Any], column: str) -> float | None:
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        return unix_seconds(json.dumps(value) if not isinstance(value, str) else value.strip())
    except (ValueError, OverflowError):
        raise TicketFileWrong(
            f"line {line}, column {column}: expected an RFC 3339 time with its offset such as 2026-01-31T12:00:00Z,"
            f" or Unix seconds, got {str(value)[:80]!r}"
        ) from None


# Recurrence score of a node: how much its four-week record suggests that it will fail again.
#
# A few nodes make up most of a fleet's failures, and pass every test in between. The signals are those of Kokolis et
# al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025), where seven signals over
# 28 days found 40 lemons, more than 85% of them correctly, and removing those reduced failures of jobs of 512 and more
# GPUs from 14% to 4%: ``excl_jobid_count``, ``xid_cnt``, ``tickets``, ``out_count``, ``multi_node_node_fails``,
# ``single_node_node_fails``, ``single_node_node_failure_rate``. Their thresholds are tuned to their fleet and not
# published; the weights here are our own, given as data with the reason for each. An eighth signal is what the node's
# GPUs did in other nodes, since repairs move parts.
#
# The score is 1 - product(1 - weight x strength): independent signals support each other, and since no weight reaches
# ``RECURRENT_MIN`` no single kind of evidence makes a node recurrent. What half of the fleet's nodes have is attributed
# to the fleet (a driver, a cooling failure), not to the node, and is subtracted first.

DAY_S = 86_400.0
WINDOW_S = 28 * DAY_S  # as in the paper
RECURRENT_MIN = 0.75  # from here on a node is called recurrent; the paper says lemon
KNOWN_MIN_S = 7 * DAY_S  # a node known for less time has too little history
CULPRIT_ENOUGH = 3  # unless it failed this often already
FLEET_MIN = 5  # minimum number of nodes for a meaningful median
SINGLE_ATTEMPTS_MIN = 5  # minimum number for a failure rate


class RecurrenceSignal(NamedTuple):
    """One kind of evidence: at ``full`` (count or rate) it adds its whole ``weight``; ``field`` is the counted field.

    ``source`` is the paper's name for it, "" for our own.
    """

    field: str
    weight: float
    full: float
    source: str
    why: str


SIGNALS: tuple[RecurrenceSignal, ...] = (
    RecurrenceSignal(
        "multi_node_failures",
        0.6,
        3,
        "multi_node_node_fails",
        "Stops a whole job, and the node was told from its peers; three in four weeks is more than chance.",
    ),
    RecurrenceSignal(
        "excluding_jobs",
        0.5,
        3,
        "excl_jobid_count",
        "Different jobs are independent witnesses; one job may dislike a node for its own reasons.",
    ),
    RecurrenceSignal(
        "single_node_failures",
        0.4,
        3,
        "single_node_node_fails",
        "No peers to compare with: the program is more often to blame than among many nodes.",
    ),
    RecurrenceSignal(
        "single_node_failure_ratio",
        0.3,
        0.5,
        "single_node_node_failure_rate",
        "A busy node fails more often; the share of failing jobs takes that out. It rests on the same failures.",
    ),
    RecurrenceSignal(
        "taken_out",
        0.4,
        3,
        "out_count",
        "Somebody saw a reason each time; planned work takes nodes out too, so it is worth less than a failure.",
    ),
    RecurrenceSignal(
        "driver_errors",
        0.4,
        3,
        "xid_cnt",
        "Different codes that speak of hardware; many lines of one code are one trouble.",
    ),
    RecurrenceSignal(
        "tickets", 0.4, 2, "tickets", "A repair that did not last; tickets are also opened for the rack or the room."
    ),
    RecurrenceSignal(
        "inherited_failures",
        0.3,
        2,
        "",
        "Its GPUs were the culprits in other nodes before they came; the slot or the host there may have been.",
    ),
)


@dataclass(slots=True)
class NodeRecord:
    """One node's record within the window. ``known_s`` is how long the node has been known in total."""

    known_s: float = 0.0
    multi_node_failures: int = 0
    single_node_failures: int = 0
    single_node_attempts: int = 0
    excluding_jobs: int = 0
    taken_out: int = 0
    driver_errors: int = 0
    tickets: int = 0
    inherited_failures: int = 0
    incidents: int = 0  # in which it was the only one accused, of any kind; shown to people, not a signal

    @property
    def single_node_failure_ratio(self) -> float:
        """The share of its single-node attempts that it caused to fail; 0 while there are too few to tell."""
        if self.single_node_attempts < SINGLE_ATTEMPTS_MIN:
            return 0.0
        return min(self.single_node_failures / self.single_node_attempts, 1.0)


class Contribution(NamedTuple):
    """One signal's contribution: its value, the fleet's usual value, and how much it adds to the score."""

    signal: str
    value: float
    usual: float
    adds: float


@dataclass(frozen=True, slots=True)
class RecurrenceScore:
    """A node's score, 0 (nothing on record) to below 1; None if unknown, with the ``reason``."""

    score: float | None
    contributions: tuple[Contribution, ...] = ()
    reason: str = ""

    @property
    def is_recurrent(self) -> bool:
        """Whether the score reaches RECURRENT_MIN; False without a score."""
        return self.score is not None and self.score >= RECURRENT_MIN


def usual(pasts: Iterable[NodeRecord]) -> Mapping[str, float]:
    """Return the value of each signal that at least half of the fleet's nodes have; empty for a small fleet."""
    fleet: Sequence[NodeRecord] = list(pasts)
    if len(fleet) < FLEET_MIN:
        return {signal.field: 0.0 for signal in SIGNALS}
    return {signal.field: float(median(getattr(past, signal.field) for past in fleet)) for signal in SIGNALS}


def score(past: NodeRecord, fleet: Mapping[str, float]) -> RecurrenceScore:
    """Return a node's score; ``fleet`` is the result of ``usual`` for all nodes."""
    culprit = past.multi_node_failures + past.single_node_failures
    if past.known_s < KNOWN_MIN_S and culprit < CULPRIT_ENOUGH:
        return RecurrenceScore(
            None,
            reason=(
                f"known for {past.known_s / DAY_S:.1f} days, failures: {culprit};"
                f" {KNOWN_MIN_S / DAY_S:.0f} days or {CULPRIT_ENOUGH} failures are needed"
            ),
        )
    weighed = []
    innocent = 1.0
    for signal in SIGNALS:
        value = float(getattr(past, signal.field))
        strength = min(max(value - fleet[signal.field], 0.0) / signal.full, 1.0)
        if strength > 0:
            innocent *= 1 - signal.weight * strength
            weighed.append((signal, value, signal.weight * strength))
    total = 1 - innocent
    contributions = [
        Contribution(signal.field, value, fleet[signal.field], total - (1 - innocent / (1 - part)))
        for signal, value, part in weighed
    ]
    return RecurrenceScore(total, tuple(sorted(contributions, key=lambda c: (-c.adds, c.signal))))


@dataclass(frozen=True, slots=True)
class Scores:
    """The whole fleet's scores, as of ``made_s``."""

    made_s: float
    by_node: Mapping[str, RecurrenceScore] = field(default_factory=dict)
    pasts: Mapping[str, NodeRecord] = field(default_factory=dict)

    def recurrent_by_score(self) -> list[tuple[str, float]]:
        """Return the recurrent nodes, the worst first."""
        found = [(node, one.score) for node, one in self.by_node.items() if one.is_recurrent and one.score is not None]
        return sorted(found, key=lambda item: (-item[1], item[0]))


def scores(pasts: Mapping[str, NodeRecord], now_s: float) -> Scores:
    """Return every node's score."""
    fleet = usual(pasts.values())
    return Scores(now_s, {node: score(past, fleet) for node, past in pasts.items()}, pasts)
