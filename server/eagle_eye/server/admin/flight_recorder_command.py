"""``eagle-eye flight-recorder``: finds the ranks that block a hung job, from all ranks' PyTorch dumps."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.detectors.progress.flight_recorder import StuckRanks, Wait, analyse
from eagle_eye.detectors.signs.flight_record import Group, Operation, ReducedDump
from eagle_eye.detectors.types import Blind
from eagle_eye.schema.flight_recorder import (
    COMPLETED,
    DUMP_BYTES_MAX,
    INTEGER_MAX,
    BadDump,
    decode,
    dump_of,
    entries_of,
    group_of,
    has_completed,
    integer_of,
    mapping_of,
    names_by_id,
    sequence_of,
    shown,
    status_of,
    text_of,
)

# The dumps in a folder, each field of which is validated.

FILES_MAX = 200_000
RANKS_MAX = 1 << 20  # per group
SHAPES_MAX = 64  # tensors kept per operation, and dimensions per tensor

_RANK_IN_NAME = re.compile(r"(\d{1,9})(\.(?:pkl|pickle|pt|bin|json|dump|trace))?$", re.IGNORECASE)


@dataclass(slots=True)
class Folder:
    """The dumps of a folder; ``unreadable`` has the errors of bad files, ``skipped`` are other files.

    ``unread`` are the ranks that bad files may have been of, by their names or contents: they left a dump.
    """

    recordings: list[ReducedDump] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_folder(folder: Path) -> Folder:
    """Return the folder's dumps; a bad file loses only its rank. Raises BadDump when none can be read."""
    found, groups = Folder(), _Groups()
    path_of: dict[int, Path] = {}
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise BadDump(f"{folder}: {error.strerror}; expected a folder with one dump for each rank") from None
    if len(paths) > FILES_MAX:
        raise BadDump(f"{folder}: {len(paths)} files; at most {FILES_MAX} are read")
    for path in paths:
        named = rank_in_name(path)
        if named is None and path.suffix.lower() != ".json":
            found.skipped.append(path.name)
            continue
        try:
            recording = _recording(path, groups)
        except BadDump as error:
            found.unreadable.append(str(error))
        else:
            other = path_of.setdefault(recording.rank, path)
            if other is path:
                found.recordings.append(recording)
                continue
            found.unreadable.append(f"{path}: rank {recording.rank} has another dump, {other.name}")
        found.unread |= set() if named is None else {named}
    found.unread -= path_of.keys()
    if not found.recordings:
        why = f": {found.unreadable[0]}" if found.unreadable else "; a dump's name ends with its rank"
        raise BadDump(f"{folder}: no readable dump{why}")
    return found


def read_dump(path: Path) -> ReducedDump:
    """Return one rank's dump. Raises BadDump."""
    return _recording(path, _Groups())


def rank_in_name(path: Path) -> int | None:
    """Return the rank at the end of a file's name, as in nccl_trace_rank_12 or rank_3.json."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None


def _recording(path: Path, groups: _Groups) -> ReducedDump:
    try:
        size = path.stat().st_size
        if size > DUMP_BYTES_MAX:
            raise BadDump(f"{path}: {size} bytes; at most {DUMP_BYTES_MAX} are read")
        raw = path.read_bytes()
    except OSError as error:
        raise BadDump(f"{path}: {error.strerror}") from None
    try:
        plain = decode(raw)
        return _Reader(plain, groups).recording(rank_in_name(path))
    except BadDump as error:
        raise BadDump(f"{path}: {error}") from None


class _Groups:
    """Interned groups: every rank of a large job lists the same thousands of ranks."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], Group] = {}

    def get(self, name: str, description: str, ranks: Any) -> Group:
        if isinstance(ranks, (list, tuple)):
            ranks = ",".join(str(rank) for rank in ranks if isinstance(rank, int) and 0 <= rank < INTEGER_MAX)
        spelt = ranks if isinstance(ranks, str) else ""
        known = self._known.get((name, description, spelt))
        if known is None:
            members = tuple(int(number) for number in re.findall(r"\d{1,9}", spelt))
            if len(members) > RANKS_MAX:
                raise BadDump(f"group {name!r} has {len(members)} ranks; at most {RANKS_MAX} are read")
            known = self._known[name, description, spelt] = Group(name, description, members)
        return known


class _Reader:
    """Converts one dump's plain containers to a Recording."""

    def __init__(self, plain: Any, groups: _Groups) -> None:
        self._dump = dump_of(plain)
        self._groups = groups
        self._by_name: dict[str, Group] = {}
        for name, config in mapping_of(self._dump, "pg_config").items():
            if not isinstance(config, dict):
                raise BadDump(f"pg_config.{shown(name)} is {shown(config)}; expected a dictionary")
            self._by_name[text_of(name)] = groups.get(
                text_of(config.get("name", name)), text_of(config.get("desc", "")), config.get("ranks", "")
            )
        self._entries = entries_of(self._dump)
        self._status = status_of(self._dump, self._by_name, names_by_id(self._entries))

    def recording(self, rank_in_name: int | None) -> ReducedDump:
        rank = self._dump.get("rank", rank_in_name)
        if rank is None:
            raise BadDump("neither the file's name nor its content tells the rank")
        return ReducedDump.of(integer_of("rank", rank), self._by_name.values(), self._operations(), self._enqueued())

    def _operations(self) -> Iterator[Operation]:
        for number, entry in enumerate(self._entries):
            try:
                yield self._operation(entry)
            except BadDump as error:
                raise BadDump(f"entries[{number}].{error}") from None

    def _operation(self, entry: dict[str, Any]) -> Operation:
        sequence, exchange = sequence_of(entry)
        name, description = group_of(entry)
        completed = has_completed(entry, sequence, self._status.get(name))
        operation = Operation(
            group=self._by_name.get(name) or self._groups.get(name, description, ""),
            sequence=sequence,
            name=text_of(entry.get("profiling_name", "")),
            state=COMPLETED if completed else text_of(entry.get("state", "")),
            point_to_point=exchange,
        )
        if completed:  # there are thousands of these, and only their number matters
            return operation
        return replace(
            operation,
            input_sizes=_shapes(entry.get("input_sizes")),
            output_sizes=_shapes(entry.get("output_sizes")),
            dtypes=(*_texts(entry.get("input_dtypes")), *_texts(entry.get("output_dtypes"))),
        )

    def _enqueued(self) -> dict[Group, int]:
        """Return the operations that the groups claim to have enqueued."""
        return {
            self._by_name[name]: integer_of("last_enqueued_collective", status["last_enqueued_collective"])
            for name, status in self._status.items()
            if name in self._by_name and "last_enqueued_collective" in status
        }


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text_of(item) for item in value[:SHAPES_MAX]) if isinstance(value, list) else ()


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        return ()
    return tuple(
        tuple(integer_of("sizes", number) for number in shape[:SHAPES_MAX]) if isinstance(shape, (list, tuple)) else ()
        for shape in value[:SHAPES_MAX]
    )


# The command.

WAITS_SHOWN = 8
RANKS_SHOWN = 16
GAPS_RATIO_MAX = 4


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the dumps, one for each rank, named by rank")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the blocking ranks; 0 also for "cannot tell". Raises BadDump when no dump can be read."""
    folder = read_folder(args.folder)
    found: StuckRanks | str
    try:
        found = analyse(folder.recordings, folder.unread)
    except Blind as reason:
        found = str(reason)
    if args.json:
        sys.stdout.write(msgspec.json.encode(report(folder, found)).decode() + "\n")
        return 0
    for problem in folder.unreadable:
        sys.stderr.write(f"not read: {problem}\n")
    sys.stdout.write("\n".join(_lines(folder, found)) + "\n")
    return 0


def report(folder: Folder, found: StuckRanks | str) -> dict[str, Any]:
    """Return the answer as plain data; ``kind`` is None with the reason in ``cannot_tell``."""
    reported: dict[str, Any] = {"kind": None, "cannot_tell": found, "culprits": [], "waits": [], "without_dump": []}
    if isinstance(found, StuckRanks):
        reported = {
            "kind": found.kind,
            "cannot_tell": None,
            "culprits": found.culprits,
            "certain": found.certain and not _without_dump(folder, found),
            "application": found.application,
            "summary": found.summary,
            "hidden": found.hidden,
            "waits": [_wait(wait) for wait in found.waits],
            "without_dump": _without_dump(folder, found),
        }
    return {**reported, "dumps": len(folder.recordings), "unreadable": folder.unreadable, "skipped": folder.skipped}


def _wait(wait: Wait) -> dict[str, Any]:
    return {
        "group": wait.group.name,
        "description": wait.group.description,
        "sequence": wait.sequence,
        "operation": wait.operation,
        "waiting": wait.waiting,
        "absent": wait.absent,
    }


def _lines(folder: Folder, found: StuckRanks | str) -> list[str]:
    dumps = f"{len(folder.recordings)} dumps read"
    without = _without_dump(folder, found)
    one = len(without) == 1
    missing = f"no dump of {'rank' if one else 'ranks'} {_ranks(without)}"
    rest = f"; no dump of {_ranks(without)}" if without else ""
    may = f"{missing}: {'it' if one else 'one of them'} may be what holds the job up"
    if isinstance(found, str):
        return [*([may] if without else []), f"cannot tell: {found}", dumps + rest]
    who = ", ".join(f"rank {rank}" for rank in found.culprits) or "nobody"
    lines = [f"{found.kind}: {who}", found.summary]
    if not set(without) <= set(found.culprits):
        # A rank without a dump may have hung too hard to write one: it must be examined first.
        headline = missing if found.application else may
        lines = [headline, f"of the ranks with a dump, {found.kind}: {who}", found.summary]
        if found.kind == "missing":
            lines[1] = f"{found.kind}: {who}"
    lines += [*([found.hidden] if found.hidden else []), ""]
    for wait in found.waits[:WAITS_SHOWN]:
        lines.append(f"group {wait.group}, number {wait.sequence}: {wait.operation}")
        lines.append(f"    in it:      {_ranks(wait.waiting)}")
        if wait.absent:
            lines.append(f"    not in it:  {_ranks(wait.absent)}")
    if len(found.waits) > WAITS_SHOWN:
        lines.append(f"and {len(found.waits) - WAITS_SHOWN} more operations; --json shows them")
    return [*lines, "", dumps + rest]


def _without_dump(folder: Folder, found: StuckRanks | str) -> tuple[int, ...]:
    """Return the ranks without a readable dump that a group expects, or that are between others."""
    present = {recording.rank for recording in folder.recordings}
    expected = set(found.without_dump) if isinstance(found, StuckRanks) else set[int]()
    highest = max(present, default=-1)
    if highest < GAPS_RATIO_MAX * len(present):  # else ranks are not numbered from 0, or most dumps are missing
        expected |= set(range(highest)) - present
    return tuple(sorted(expected))


def _ranks(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return ", ".join(str(rank) for rank in ranks[:RANKS_SHOWN]) + more
