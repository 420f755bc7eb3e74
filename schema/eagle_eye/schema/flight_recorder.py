"""Reads PyTorch's flight-recorder dumps as plain containers: untrusted pickles from other machines.

A dump consists of plain containers (dict, list, text, numbers), so nothing else is accepted: every opcode that could
look up or call anything is refused before unpickling begins, and the unpickler also refuses every class. JSON dumps are
read too. The result is still untrusted: read each field with the functions below. Versions 1.x (a bare list) to 2.10 of
the format are supported as far as they name their process groups.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

DUMP_BYTES_MAX = 256 << 20  # a buffer of 20,000 entries with stacks has about 60 MB
OBJECTS_MAX = 32 << 20  # lists and dictionaries: one input byte can allocate a hundred
TEXT_CHARS_MAX = 512  # of a name
INTEGER_MAX = 1 << 63
MEMO_SLACK = 1_024
COMPLETED, LAST_COMPLETED = "completed", "last_completed_collective"

# Opcodes of plain data, by the layout of their argument; all others are refused.
_BARE = (
    *(pickle.MARK, pickle.STOP, pickle.MEMOIZE),
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
    4: (pickle.BINUNICODE, pickle.BINSTRING, pickle.BINBYTES),
    8: (pickle.BINUNICODE8, pickle.BINBYTES8),
}
# Size of each argument in bytes; negative: the size of its length prefix.
_ARGUMENT_BYTES: dict[int, int] = {
    **{opcode[0]: 0 for opcode in _BARE},
    **{opcode[0]: size for size, opcodes in _FIXED.items() for opcode in opcodes},
    **{opcode[0]: -size for size, opcodes in _COUNTED.items() for opcode in opcodes},
}
_STOP = pickle.STOP[0]


def _codes(*opcodes: bytes) -> frozenset[int]:
    return frozenset(opcode[0] for opcode in opcodes)


_CONTAINERS = _codes(
    *(pickle.LIST, pickle.EMPTY_LIST, pickle.DICT, pickle.EMPTY_DICT),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
)
# Effect of opcodes on the unpickler's stack: these push a value that may be a dictionary key, or one that may not;
_KEYS = _codes(
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINSTRING, pickle.SHORT_BINSTRING),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
)
_NO_KEYS = _CONTAINERS | _codes(pickle.EMPTY_TUPLE, pickle.BINFLOAT, pickle.LONG1)
# these pop their operands: a fixed number, or everything down to the mark.
_TAKEN: dict[int, int] = {
    **dict.fromkeys(_codes(pickle.APPEND, pickle.TUPLE1), 1),
    **dict.fromkeys(_codes(pickle.SETITEM, pickle.TUPLE2), 2),
    **dict.fromkeys(_codes(pickle.TUPLE3), 3),
    **dict.fromkeys(_codes(pickle.LIST, pickle.DICT, pickle.TUPLE, pickle.APPENDS, pickle.SETITEMS), 0),
}
_WITH_KEYS = _codes(pickle.DICT, pickle.SETITEM, pickle.SETITEMS)
_MARK, _MEMOIZE = pickle.MARK[0], pickle.MEMOIZE[0]
_PUTS, _GETS = _codes(pickle.BINPUT, pickle.LONG_BINPUT), _codes(pickle.BINGET, pickle.LONG_BINGET)
_KEY, _NO_KEY = 1, 2


class BadDump(ValueError):
    """An unusable dump; the message names the problem and the limit. The caller that read a file names it."""


def decode(raw: bytes, bytes_max: int = DUMP_BYTES_MAX, objects_max: int = OBJECTS_MAX) -> Any:
    """Return a dump's bytes, pickle or JSON, as plain containers. Raises BadDump; executes nothing."""
    if len(raw) > bytes_max:
        raise BadDump(f"{len(raw)} bytes; at most {bytes_max} are read")
    try:
        if raw.lstrip()[:1] in (b"{", b"["):
            _check_brackets(raw, objects_max)
            return msgspec.json.decode(raw)
        _check_opcodes(raw, objects_max)
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
    """Refuses every class; a second barrier behind ``_check_opcodes``."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise BadDump(f"it asks for {module_name[:80]}.{global_name[:80]}; a dump holds plain data only")

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - pickle's name
        raise BadDump("it asks for an object from elsewhere; a dump holds plain data only")


def _check_brackets(raw: bytes, objects_max: int) -> None:
    if raw.count(b"{") + raw.count(b"[") > objects_max:
        raise BadDump(f"more than {objects_max} lists and dictionaries")


def _check_opcodes(raw: bytes, objects_max: int) -> None:
    """Refuse anything but plain data, too much of it, and what ``_Stack`` refuses."""
    at, containers, end = 0, 0, len(raw)
    stack = _Stack()
    while at < end:
        code = raw[at]
        size = _ARGUMENT_BYTES.get(code)
        if size is None:
            raise BadDump(f"byte {at} is opcode {bytes([code])!r}; a dump holds plain data only")
        if code == _STOP:
            return
        if code in _CONTAINERS:
            containers += 1
            if containers > objects_max:
                raise BadDump(f"more than {objects_max} lists and dictionaries")
        at += 1
        if code in _KEYS:
            stack.kinds.append(_KEY)
        else:
            stack.follow(code, raw, at, size)
        at += size if size >= 0 else int.from_bytes(raw[at : at - size], "little") - size
    raise BadDump(f"it breaks off after {end} bytes")


class _Stack:
    """Models the unpickler's stack and memo: which values may be dictionary keys, that is text or small numbers.

    Hashing other values can take forever, with a tuple that holds one tuple twice, which holds one twice, and so on, or
    overflow the interpreter's stack. If the unpickler fails, the state here no longer matters.
    """

    def __init__(self) -> None:
        self.kinds = bytearray()
        self._marks: list[int] = []
        self._memo = bytearray()  # 0: empty
        self._remembered = 0

    def follow(self, code: int, raw: bytes, at: int, size: int) -> None:
        """Apply an opcode with its argument at ``at``. Raises BadDump; IndexError for damaged input."""
        if code in _PUTS:
            self._put(int.from_bytes(raw[at : at + size], "little"))
        elif code in _GETS:
            self.kinds.append(self._memo[int.from_bytes(raw[at : at + size], "little")])
        elif code == _MARK:
            self._marks.append(len(self.kinds))
        elif code == _MEMOIZE:
            self._put(self._remembered)
        else:
            if code in _TAKEN:
                self._take(code)
            if code in _NO_KEYS:
                self.kinds.append(_NO_KEY)

    def _put(self, number: int) -> None:
        if number > 2 * self._remembered + MEMO_SLACK:  # it would allocate gigabytes
            raise BadDump(f"it numbers an object {number}, far beyond the {self._remembered} that there are")
        if number >= len(self._memo):
            self._memo.extend(bytes(number + 1 - len(self._memo)))
        self._remembered += not self._memo[number]
        self._memo[number] = self.kinds[-1]

    def _take(self, code: int) -> None:
        taken = _TAKEN[code]
        begin = len(self.kinds) - taken if taken else self._marks.pop()
        if code in _WITH_KEYS and _NO_KEY in self.kinds[begin::2]:
            raise BadDump("a dictionary's key is neither a text nor a number of 32 bits")
        del self.kinds[begin:]


def dump_of(plain: Any) -> dict[str, Any]:
    """Return the result of ``decode`` as a dump; the oldest versions are a bare list of entries. Raises BadDump."""
    dump = {"entries": plain} if isinstance(plain, list) else plain
    if not isinstance(dump, dict) or not ({"entries", "pg_config", "pg_status"} & dump.keys()):
        raise BadDump("no flight-recorder dump: expected a dictionary with entries and pg_config")
    return dump


def entries_of(dump: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a dump's operations, oldest first. Raises BadDump."""
    entries = dump.get("entries") or []
    if not isinstance(entries, list):
        raise BadDump(f"entries is {shown(entries)}; expected a list")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadDump(f"entries[{number}] is {shown(entry)}; expected a dictionary")
    return _of_living_groups(entries)


def _of_living_groups(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of the last group of each name: a process that recreates its groups counts from 0 again.

    Groups are numbered on their rank in order of creation.
    """
    made = [(name, entry.get("pg_id")) for entry in entries if (name := _name_in(entry)) is not None]
    last: dict[str, int] = {}
    for name, number in made:
        if isinstance(number, int):
            last[name] = max(number, last.get(name, number))
    if len({pair for pair in made if isinstance(pair[1], int)}) == len(last):
        return entries
    return [
        entry
        for entry in entries
        if not isinstance(number := entry.get("pg_id"), int)
        or (name := _name_in(entry)) is None
        or number == last[name]
    ]


def _name_in(entry: Mapping[str, Any]) -> str | None:
    said = entry.get("process_group")
    name = said[0] if isinstance(said, (list, tuple)) and said else None
    return name if isinstance(name, str) else None


def sequence_of(entry: Mapping[str, Any]) -> tuple[int, bool]:
    """Return an operation's number, and whether it is point-to-point, which has its own numbering. Raises BadDump."""
    name = text_of(entry.get("profiling_name", ""))
    exchange = bool(entry.get("is_p2p", ":send" in name or ":recv" in name))
    # Before version 2 both shared one number.
    key = next((k for k in ("p2p_seq_id" if exchange else "collective_seq_id", "seq_id") if k in entry), None)
    if key is None:
        raise BadDump("collective_seq_id is missing")
    return integer_of(key, entry[key]), exchange


def group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and description of an operation's group; the oldest versions number it. Raises BadDump."""
    said = entry.get("process_group")
    if isinstance(said, (list, tuple)) and said:
        return text_of(said[0]), text_of(said[1]) if len(said) > 1 else ""
    return str(integer_of("pg_id", entry.get("pg_id", 0))), ""


def names_by_id(entries: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Return the names of the groups' numbers on their rank, as far as the entries show them. Raises BadDump."""
    return {
        integer_of("pg_id", entry["pg_id"]): group_of(entry)[0]
        for entry in entries
        if entry.get("process_group") and "pg_id" in entry
    }


def has_completed(entry: Mapping[str, Any], sequence: int, status: Mapping[str, Any] | None) -> bool:
    """Whether an operation has completed, by its own state or by ``status``, its group's. Raises BadDump.

    A retired operation may have failed: where states are not recorded at all (gloo) its group's count decides.
    """
    if entry.get("state") == COMPLETED:
        return True
    count = (status or {}).get(LAST_COMPLETED, -1)
    return entry.get("retired") is True and sequence <= integer_of(LAST_COMPLETED, count)


def status_of(
    dump: Mapping[str, Any], names: Collection[str], name_of_id: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Return the groups' own status, by name. A dump lists it only by the group's number on its rank.

    ``names`` are the names in ``pg_config``, ``name_of_id`` is from ``names_by_id``. Raises BadDump.
    """
    status = {integer_of("pg_status", key): value for key, value in mapping_of(dump, "pg_status").items()}
    known = dict(name_of_id)
    # Names count groups over all ranks, numbers those of this rank, both in order of creation.
    if len(status) == len(names) and all(name.isascii() and name.isdigit() for name in names):
        in_order = dict(zip(sorted(status), sorted(names, key=int), strict=True))
        if all(in_order.get(own_id) == name for own_id, name in known.items()):
            known = in_order
    return {known[own_id]: value for own_id, value in status.items() if own_id in known and isinstance(value, dict)}


def mapping_of(dump: Mapping[str, Any], key: str) -> dict[Any, Any]:
    """Return a field that holds a dictionary; {} if missing. Raises BadDump."""
    value = dump.get(key) or {}
    if not isinstance(value, dict):
        raise BadDump(f"{key} is {shown(value)}; expected a dictionary")
    return value


def integer_of(key: str, value: Any) -> int:
    """Return a 64-bit integer; JSON dumps write some as text. Raises BadDump naming the key."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -INTEGER_MAX <= value < INTEGER_MAX:
        raise BadDump(f"{key} is {shown(value)}; expected an integer of 64 bits")
    return value


def text_of(value: Any) -> str:
    """Return a name as printable text of at most TEXT_CHARS_MAX."""
    text = (value if isinstance(value, str) else shown(value))[:TEXT_CHARS_MAX]  # cut first: many may refer to one
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def shown(value: Any) -> str:
    """Return a value for a message; containers by type only, since they may be huge or contain themselves."""
    if isinstance(value, int) and abs(value) >= INTEGER_MAX:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80] if isinstance(value, (str, int, float, type(None))) else type(value).__name__
