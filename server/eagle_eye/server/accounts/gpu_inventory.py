"""GPU inventory: where each GPU is, its driver errors, and its checks for silent corruption. Pure.

Agents are not trusted: implausible UUIDs and codes are ignored, and what is kept per GPU is limited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from eagle_eye.server.model.account_records import Comparison, DriverError, Gpu, GpuChecks, Seat

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


def reported(node: str, device: int, attributes: Mapping[str, Any], time_s: float) -> GpuReport | None:
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
