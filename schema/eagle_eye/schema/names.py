"""Names of jobs, nodes, roles, links and streams: their validity, their order, and known ones for mistyped ones.

Only the invalid name is dropped: refusing a node's frames for its job's name would make the node invisible. A frame's
own identity, its node and stream, must be valid.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from eagle_eye.schema.events import Event

# Known names are suggested for mistyped ones: on command lines, in files, requests and the environment. Argparse does
# it only from Python 3.14 on, and only for its own choices.

COMPARED_CHARS_MAX = 200  # of a name that is compared: a longer one is not a typo
LIKENESS_MIN = 0.72  # difflib's ratio: two letters of eight may differ


def nearest(name: str, known: Iterable[str], likeness_min: float = LIKENESS_MIN) -> str | None:
    """Return the most similar known name, ignoring case; None if none is similar."""
    if len(name) > COMPARED_CHARS_MAX:
        return None
    by_folded = {one.casefold(): one for one in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=likeness_min)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?", "" if no known name is similar."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found}?"


_DIGITS = re.compile(r"(\d+)")


def natural_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that sorts n2 before n10."""
    parts = _DIGITS.split(name)
    return tuple((0, int(part[:18])) if part.isdecimal() else (1, part) for part in parts if part)


# A Frame and a Rank; their module imports this one.
FrameT = TypeVar("FrameT", bound=Any)
RankT = TypeVar("RankT", bound=Any)

NAME_CHARS_MAX = 253  # the longest DNS name
COUNT_MAX = (1 << 31) - 1  # of a rank, an attempt, a world's size
DEVICES_MAX = 1_024
UNKNOWN = "unknown"  # replaces an invalid boot id or version
RULE = f"1 to {NAME_CHARS_MAX} printable characters"
# Event attributes that are names; the others are texts and numbers.
_NAMES_OF_EVENTS = ("link", "name", "process", "uuid")
_QUOTED_CHARS_MAX = 40


def is_name(text: str) -> bool:
    """Return whether the text is a name: not empty, not too long, all of it printable.

    This excludes NUL, line ends and other control characters, lone surrogates, white space except the blank, and
    direction marks.
    """
    return 0 < len(text) <= NAME_CHARS_MAX and text.isprintable()


def bad_name(what: str, text: str) -> str:
    """Return the report of an invalid name, in ASCII and truncated."""
    return f"name {what} {text[:_QUOTED_CHARS_MAX]!a}"


def with_names(frame: FrameT) -> tuple[FrameT, list[str]]:
    """Return the frame without invalid names and ranks, and what was dropped, as reported by ``bad_name``."""
    left_out: list[str] = []
    changed: dict[str, Any] = {}
    if frame.job is not None and not is_name(frame.job):
        changed["job"] = None
        left_out.append(bad_name("job", frame.job))
    if not is_name(frame.boot_id):
        changed["boot_id"] = UNKNOWN
        left_out.append(bad_name("boot_id", frame.boot_id))
    if frame.agent_version and not is_name(frame.agent_version):
        changed["agent_version"] = UNKNOWN
        left_out.append(bad_name("agent_version", frame.agent_version))
    for field in ("collectors", "dropped"):
        said = getattr(frame, field)
        if not all(map(is_name, said)):
            bad = [name for name in said if not is_name(name)]
            changed[field] = {name: value for name, value in said.items() if name not in bad}
            left_out += [bad_name(field, name) for name in bad]
    if not all(map(_is_usable, frame.ranks)):
        changed["ranks"], _, reported = usable_ranks(frame.ranks)
        left_out += reported
    events = [_with_names(event, left_out) for event in frame.events]
    if any(now is not was for now, was in zip(events, frame.events)):  # noqa: B905 - equally long, and Python 3.9
        changed["events"] = [event for event in events if event is not None]
    return (msgspec.structs.replace(frame, **changed) if changed else frame), left_out


def usable_ranks(ranks: Sequence[RankT]) -> tuple[list[RankT], list[int], list[str]]:
    """Return the usable ranks, their positions, and what was dropped from them or their number."""
    usable: list[RankT] = []
    places: list[int] = []
    left_out: list[str] = []
    for place, rank in enumerate(ranks):
        if _is_usable(rank):
            usable.append(rank)
            places.append(place)
            continue
        if not is_name(rank.job):
            left_out.append(bad_name("rank.job", rank.job))
            continue
        wrong = _wrong_number(rank)
        if wrong:
            left_out.append(wrong)
            continue
        if rank.role and not is_name(rank.role):
            left_out.append(bad_name("rank.role", rank.role))
            rank = msgspec.structs.replace(rank, role="")  # noqa: PLW2901
        usable.append(rank)
        places.append(place)
    return usable, places, left_out


def _is_usable(rank: Any) -> bool:
    """Return whether no part of the rank has to be dropped: one expression, since it runs for every frame's ranks."""
    return (
        is_name(rank.job)
        and 0 <= rank.rank <= COUNT_MAX
        and 0 <= rank.world_size <= COUNT_MAX
        and 0 <= rank.attempt <= COUNT_MAX
        and -1 <= rank.device < DEVICES_MAX
        and (not rank.role or is_name(rank.role))
    )


def _wrong_number(rank: Any) -> str:
    for field in ("rank", "world_size", "attempt"):
        if not 0 <= getattr(rank, field) <= COUNT_MAX:
            return f"number rank.{field} {getattr(rank, field)}"
    return "" if -1 <= rank.device < DEVICES_MAX else f"number rank.device {rank.device}"


def _with_names(event: Event, left_out: list[str]) -> Event | None:
    """Return the event; None if its kind or job is not a valid name, since it could be assigned to a wrong job."""
    for what, text in (("event", event.kind), ("event.job", event.attributes.get("job", UNKNOWN))):
        if not isinstance(text, str) or not is_name(text):
            left_out.append(bad_name(what, str(text)))
            return None
    said = event.attributes
    bad = [name for name in said if not is_name(name)]
    bad += [name for name in _NAMES_OF_EVENTS if isinstance(said.get(name), str) and not is_name(said[name])]
    if not bad:
        return event
    left_out += [bad_name("event.attribute", name if name not in _NAMES_OF_EVENTS else said[name]) for name in bad]
    return msgspec.structs.replace(event, attributes={k: value for k, value in said.items() if k not in bad})
