"""Reading PyTorch's flight-recorder dumps, which are pickles from other machines and trusted in nothing.

A dump is written as plain containers (dict, list, text, numbers), so nothing else is read: every opcode that could
look up or call anything is refused before unpickling begins, the unpickler refuses every class besides, and what
comes out is checked field by field. JSON dumps are read too. Versions 1.x (a bare list) to 2.10 are understood as
far as they name their process groups.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.detectors.signs.flight_record import COMPLETED, Group, Operation, Recording

DUMP_BYTES_MAX = 256 << 20  # a buffer of 20,000 entries with stacks has about 60 MB
FILES_MAX = 200_000
RANKS_MAX = 1 << 20  # of one group
TEXT_CHARS_MAX = 512  # of a name
SHAPES_MAX = 64  # tensors of one operation, and dimensions of one tensor, that are kept
INTEGER_MAX = 1 << 63
MEMO_SLACK = 1_024

_RANK_IN_NAME = re.compile(r"(\d{1,9})(\.(?:pkl|pickle|pt|bin|json|dump|trace))?$", re.IGNORECASE)

# Opcodes of plain data, by how their argument is laid out; all others are refused.
_BARE = (
    *(pickle.MARK, pickle.STOP, pickle.POP, pickle.POP_MARK, pickle.DUP, pickle.MEMOIZE),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.APPEND, pickle.APPENDS, pickle.LIST, pickle.EMPTY_LIST),
    *(pickle.DICT, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.TUPLE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
)
_FIXED = {
    1: (pickle.PROTO, pickle.BININT1, pickle.BINGET, pickle.BINPUT),
    2: (pickle.BININT2,),
    4: (pickle.BININT, pickle.LONG_BINGET, pickle.LONG_BINPUT),
    8: (pickle.BINFLOAT, pickle.FRAME),
}
_COUNTED = {
    1: (pickle.SHORT_BINUNICODE, pickle.SHORT_BINSTRING, pickle.SHORT_BINBYTES, pickle.LONG1),
    4: (pickle.BINUNICODE, pickle.BINSTRING, pickle.BINBYTES, pickle.LONG4),
    8: (pickle.BINUNICODE8, pickle.BINBYTES8),
}
# The bytes of each one's argument; negative: how many bytes tell how long it is.
_ARGUMENT_BYTES: dict[int, int] = {
    **{opcode[0]: 0 for opcode in _BARE},
    **{opcode[0]: size for size, opcodes in _FIXED.items() for opcode in opcodes},
    **{opcode[0]: -size for size, opcodes in _COUNTED.items() for opcode in opcodes},
}
_STOP, _LONG_PUT = pickle.STOP[0], pickle.LONG_BINPUT[0]


class BadDump(ValueError):  # noqa: N818 - it names the thing that is bad
    """A file that is no usable dump; the message names the file, what is wrong and the limit."""


@dataclass(slots=True)
class Folder:
    """The dumps of a folder; ``unreadable`` says what is wrong with bad files, ``skipped`` are other files."""

    recordings: list[Recording] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_folder(folder: Path) -> Folder:
    """Return what the folder's files say; a bad file costs its rank only. Raises BadDump when none can be read."""
    found, groups = Folder(), _Groups()
    path_of: dict[int, Path] = {}
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise BadDump(f"{folder}: {error.strerror}; expected a folder with one dump for each rank") from None
    if len(paths) > FILES_MAX:
        raise BadDump(f"{folder}: {len(paths)} files; at most {FILES_MAX} are read")
    for path in paths:
        if rank_in_name(path) is None and path.suffix.lower() != ".json":
            found.skipped.append(path.name)
            continue
        try:
            recording = _recording(path, groups)
        except BadDump as error:
            found.unreadable.append(str(error))
            continue
        if recording.rank in path_of:
            found.unreadable.append(f"{path}: rank {recording.rank} has another dump, {path_of[recording.rank].name}")
            continue
        path_of[recording.rank] = path
        found.recordings.append(recording)
    if not found.recordings:
        why = f": {found.unreadable[0]}" if found.unreadable else "; a dump's name ends with its rank"
        raise BadDump(f"{folder}: no readable dump{why}")
    return found


def read_dump(path: Path) -> Recording:
    """Return one rank's dump. Raises BadDump."""
    return _recording(path, _Groups())


def rank_in_name(path: Path) -> int | None:
    """Return the rank that a file's name ends with, as in nccl_trace_rank_12 or rank_3.json."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None


def _recording(path: Path, groups: _Groups) -> Recording:
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


def decode(raw: bytes) -> Any:
    """Return a dump's bytes, pickle or JSON, as plain containers. Raises BadDump; runs nothing of what they say."""
    if len(raw) > DUMP_BYTES_MAX:
        raise BadDump(f"{len(raw)} bytes; at most {DUMP_BYTES_MAX} are read")
    try:
        if raw.lstrip()[:1] in (b"{", b"["):
            return msgspec.json.decode(raw)
        _check_opcodes(raw)
        return _PlainUnpickler(io.BytesIO(raw)).load()
    except BadDump:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadDump(f"no JSON: {error}") from None
    except (RecursionError, MemoryError) as error:
        raise BadDump(f"nested too deep or too large to read: {type(error).__name__}") from None
    except Exception as error:  # noqa: BLE001 - damaged pickles fail in many ways, none of which may end the program
        raise BadDump(f"damaged or truncated: {type(error).__name__}: {error}"[:300]) from None


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class; the second lock behind ``_check_opcodes``."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise BadDump(f"it asks for {module_name[:80]}.{global_name[:80]}; a dump holds plain data only")

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002
        raise BadDump("it asks for an object from elsewhere; a dump holds plain data only")


def _check_opcodes(raw: bytes) -> None:
    """Refuse whatever is not plain data, and memo numbers that would make the unpickler reserve gigabytes."""
    at, puts, end = 0, 0, len(raw)
    while at < end:
        code = raw[at]
        size = _ARGUMENT_BYTES.get(code)
        if size is None:
            raise BadDump(f"byte {at} is opcode {bytes([code])!r}; a dump holds plain data only")
        if code == _STOP:
            return
        if code == _LONG_PUT:
            puts += 1
            if int.from_bytes(raw[at + 1 : at + 5], "little") > 2 * puts + MEMO_SLACK:
                raise BadDump(f"byte {at} numbers an object far beyond those that there are")
        at += 1
        at += size if size >= 0 else int.from_bytes(raw[at : at - size], "little") - size
    raise BadDump(f"it breaks off after {end} bytes")


class _Groups:
    """Groups as they were read, each once: every rank of a large job spells the same thousands of ranks out."""

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
    """One dump's plain containers as a Recording."""

    def __init__(self, plain: Any, groups: _Groups) -> None:
        self._dump: Mapping[str, Any] = {"entries": plain} if isinstance(plain, list) else plain
        if not isinstance(self._dump, dict) or not ({"entries", "pg_config", "pg_status"} & self._dump.keys()):
            raise BadDump("no flight-recorder dump: expected a dictionary with entries and pg_config")
        self._groups = groups
        self._by_name: dict[str, Group] = {}
        for name, config in _mapping(self._dump, "pg_config").items():
            if not isinstance(config, dict):
                raise BadDump(f"pg_config.{_short(name)} is {_short(config)}; expected a dictionary")
            self._by_name[_text(name)] = groups.get(
                _text(config.get("name", name)), _text(config.get("desc", "")), config.get("ranks", "")
            )
        self._name_of_id: dict[int, str] = {}

    def recording(self, rank_in_name: int | None) -> Recording:
        rank = self._dump.get("rank", rank_in_name)
        if rank is None:
            raise BadDump("neither the file's name nor its content tells the rank")
        known = Recording.of(_integer("rank", rank), self._by_name.values(), self._operations())
        return replace(known, enqueued=self._enqueued())

    def _operations(self) -> Iterator[Operation]:
        entries = self._dump.get("entries") or []
        if not isinstance(entries, list):
            raise BadDump(f"entries is {_short(entries)}; expected a list")
        for number, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise BadDump(f"entries[{number}] is {_short(entry)}; expected a dictionary")
            try:
                yield self._operation(entry)
            except BadDump as error:
                raise BadDump(f"entries[{number}].{error}") from None

    def _operation(self, entry: dict[str, Any]) -> Operation:
        name = _text(entry.get("profiling_name", ""))
        exchange = bool(entry.get("is_p2p", ":send" in name or ":recv" in name))
        # Before version 2 there was one number for both.
        key = next((k for k in ("p2p_seq_id" if exchange else "collective_seq_id", "seq_id") if k in entry), None)
        if key is None:
            raise BadDump("collective_seq_id is missing")
        operation = Operation(
            group=self._group(entry),
            sequence=_integer(key, entry[key]),
            name=name,
            state=_text(entry.get("state", "")),
            point_to_point=exchange,
        )
        if operation.state == COMPLETED:  # of thousands of these only the number counts
            return operation
        return replace(
            operation,
            input_sizes=_shapes(entry.get("input_sizes")),
            output_sizes=_shapes(entry.get("output_sizes")),
            dtypes=(*_texts(entry.get("input_dtypes")), *_texts(entry.get("output_dtypes"))),
        )

    def _group(self, entry: dict[str, Any]) -> Group:
        said = entry.get("process_group")
        own_id = entry.get("pg_id", 0)
        if isinstance(said, (list, tuple)) and said:
            name, description = _text(said[0]), _text(said[1]) if len(said) > 1 else ""
            if isinstance(own_id, int):
                self._name_of_id[own_id] = name
        else:
            name, description = str(_integer("pg_id", own_id)), ""
        return self._by_name.get(name) or self._groups.get(name, description, "")

    def _enqueued(self) -> dict[Group, int]:
        """Return what the groups claim to have enqueued. They are listed by their number on this rank alone."""
        status = {_integer("pg_status", key): value for key, value in _mapping(self._dump, "pg_status").items()}
        names = dict(self._name_of_id)
        # Names count groups over all ranks, numbers those of this rank, both in the order in which they were made.
        if len(status) == len(self._by_name) and all(name.isascii() and name.isdigit() for name in self._by_name):
            in_order = dict(zip(sorted(status), sorted(self._by_name, key=int), strict=True))
            if all(in_order.get(own_id) == name for own_id, name in names.items()):
                names = in_order
        claimed = {}
        for own_id, value in status.items():
            group = self._by_name.get(names.get(own_id, ""))
            if group is not None and isinstance(value, dict) and "last_enqueued_collective" in value:
                claimed[group] = _integer("last_enqueued_collective", value["last_enqueued_collective"])
        return claimed


def _mapping(dump: Mapping[str, Any], key: str) -> dict[Any, Any]:
    value = dump.get(key) or {}
    if not isinstance(value, dict):
        raise BadDump(f"{key} is {_short(value)}; expected a dictionary")
    return value


def _integer(key: str, value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -INTEGER_MAX <= value < INTEGER_MAX:
        raise BadDump(f"{key} is {_short(value)}; expected an integer of 64 bits")
    return value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else _short(value)
    if text.isprintable() and len(text) <= TEXT_CHARS_MAX:
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:TEXT_CHARS_MAX])


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(item) for item in value[:SHAPES_MAX]) if isinstance(value, list) else ()


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        return ()
    return tuple(
        tuple(_integer("sizes", number) for number in shape[:SHAPES_MAX]) if isinstance(shape, (list, tuple)) else ()
        for shape in value[:SHAPES_MAX]
    )


def _short(value: Any) -> str:
    """Return a value for a message; containers by type only, for they may be huge or hold themselves."""
    if isinstance(value, int) and abs(value) >= INTEGER_MAX:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80] if isinstance(value, (str, int, float, type(None))) else type(value).__name__
