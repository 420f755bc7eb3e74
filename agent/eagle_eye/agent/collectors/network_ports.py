"""Network ports: RDMA ports and physical Ethernet interfaces. Touches: /sys, ethtool, one file of ports seen up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from eagle_eye.agent.collector import CollectFailed, Observed, Unsupported
from eagle_eye.agent.network import (
    PORTS_MAX,
    Ask,
    Attributes,
    EthtoolStatistics,
    Port,
    PortReader,
    Role,
    UnreadableFile,
    link_statistics,
)
from eagle_eye.schema.names import is_name

FILE_NAME = "ports.json"
REMEMBER_S = 30 * 86_400.0  # a port that has been down this long is no longer expected
SAVE_EVERY_S = 3600.0
FIND_EVERY_S = 300.0  # when nothing seems to have changed; also how long a failed file is left alone
# Counters that grow faster than twice 1.6 Tb/s, more than a port can carry, have jumped.
BYTES_PER_S_MAX = 4e11
PACKETS_PER_S_MAX = BYTES_PER_S_MAX / 64  # the shortest frame, in bytes
ELSEWHERE_S = 60.0  # a driver releasing its hardware first removes the port: its fate is unknown until then
_SAID_MAX = 1000

_RATES = {
    **dict.fromkeys((Role.RDMA_RX, Role.RDMA_TX, Role.NETWORK_RX, Role.NETWORK_TX), BYTES_PER_S_MAX),
    **dict.fromkeys((Role.PAUSE_RX, Role.PAUSE_TX), PACKETS_PER_S_MAX),
}
_TOTALS = (Role.ERRORS, Role.DOWNED, Role.TRANSPORT, Role.NOTIFICATIONS)
_LINK_RATES = (
    ("link_rx_bytes_per_second", (Role.RDMA_RX, Role.NETWORK_RX)),
    ("link_tx_bytes_per_second", (Role.RDMA_TX, Role.NETWORK_TX)),
    ("link_pfc_rx_pause_packets_per_second", (Role.PAUSE_RX,)),
    ("link_pfc_tx_pause_packets_per_second", (Role.PAUSE_TX,)),
)
_NODE_RATES = (
    ("node_rdma_rx_bytes_per_second", Role.RDMA_RX),
    ("node_rdma_tx_bytes_per_second", Role.RDMA_TX),
    ("node_pfc_rx_pause_packets_per_second", Role.PAUSE_RX),
    ("node_pfc_tx_pause_packets_per_second", Role.PAUSE_TX),
)
_LINK_TOTALS = (("link_errors_total", Role.ERRORS), ("link_downed_total", Role.DOWNED))
_NODE_TOTALS = (
    ("node_rdma_errors_total", Role.TRANSPORT),
    ("node_rdma_link_downed_total", Role.DOWNED),
    ("node_congestion_notifications_total", Role.NOTIFICATIONS),
)


class _Known(msgspec.Struct):
    """A port that has been up, and when it was last up."""

    name: str
    device: str
    rdma: bool
    up_s: float
    passing: bool = False


class ExpectedPorts:
    """Expected ports: those that have been up, in this boot or an earlier one, by hardware address.

    Saved in ``folder``; None: not saved. ``problem`` says why saving failed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.problem = ""
        self.known: dict[str, _Known] = {}
        self._file = folder / FILE_NAME if folder is not None else None
        self._changed = False
        self._saved_s = 0.0

    def load(self, now_s: float) -> None:
        """Load what an earlier agent saved; an invalid file counts as none."""
        self._saved_s = now_s
        if self._file is None:
            return
        try:
            known = msgspec.json.decode(self._file.read_bytes(), type=dict[str, _Known])
            self.known = {
                key: item
                for key, item in list(known.items())[:PORTS_MAX]
                if is_name(item.name) and is_name(item.device)
            }
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self.problem = f"{self._file}: {error}"

    def saw(self, port: Port, up: bool, now_s: float) -> bool:
        """Record a port's state; return whether it belongs in the rows: it is up, or has been."""
        known = self.known.get(port.key)
        if not up:
            return known is not None
        if known is None or known.name != port.name:
            self._changed |= not port.passing
            self.known[port.key] = _Known(port.name, port.device, port.rdma, now_s, port.passing)
        else:
            known.up_s = now_s
        return True

    def forget(self, key: str) -> None:
        """Stop expecting the port."""
        del self.known[key]
        self._changed = True

    def expire(self, now_s: float) -> None:
        """Forget ports that have been down for REMEMBER_S."""
        for key in [key for key, known in self.known.items() if now_s - known.up_s > REMEMBER_S]:
            self.forget(key)

    def save(self, now_s: float, at_once: bool = False) -> None:
        """Write the file when ports came or went, and occasionally to update when they were last up."""
        if self._file is None or not (at_once or self._changed or abs(now_s - self._saved_s) > SAVE_EVERY_S):
            return
        self._changed, self._saved_s = False, now_s
        lasting = [(key, known) for key, known in self.known.items() if not known.passing]
        lasting.sort(key=lambda item: -item[1].up_s)
        new = self._file.with_suffix(".new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(dict(lasting[:PORTS_MAX])))
            new.replace(self._file)
        except OSError as error:
            self.problem = f"{self._file}: {error.strerror}"


class Total:
    """A sum of counters that never decreases: an unread source still counts, a counter reset adds nothing.

    It starts at the counters' values, or at 0 with ``from_zero``: a port that came later adds only its growth.
    """

    def __init__(self, *, from_zero: bool) -> None:
        self.value = 0.0
        self._from_zero = from_zero
        self._last: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> bool:
        """Add counters by source; return whether there were any."""
        if not self._from_zero:
            self.value, self._from_zero = sum(values.values()), True
        for source, value in values.items():
            self.value += max(0.0, value - self._last.get(source, value))
            self._last[source] = value
        return bool(values)

    def restart(self) -> None:
        """Treat the next counters as those of another device."""
        self._last.clear()


class _Track:
    """Per-port state between two collections."""

    def __init__(self, *, rdma: bool, from_zero: bool) -> None:
        self.rdma = rdma
        self.totals = {role: Total(from_zero=from_zero) for role in _TOTALS}
        self._before: Mapping[Role, Mapping[str, float]] = {}
        self._before_s = 0.0

    def rates(self, values: Mapping[Role, Mapping[str, float]], now_s: float) -> dict[Role, float | None]:
        """Return the growth per second of each of the port's roles; None: unknown this time."""
        before, elapsed_s = self._before, now_s - self._before_s
        self._before, self._before_s = values, now_s
        return {
            role: rate(before.get(role, {}), values.get(role, {}), elapsed_s, most)
            for role, most in _RATES.items()
            if role in before or role in values
        }

    def restart(self) -> None:
        """Forget the counters: the device is gone."""
        self._before = {}
        for total in self.totals.values():
            total.restart()


class FabricCollector:
    """A row for each port that is or has been up, and the node's sums over its RDMA ports.

    A port that was never up is unused and has no row; one whose hardware is gone has ``link_up`` 0 and is named in
    ``problem`` while it is remembered. Rates come from the second collection on.
    """

    name = "fabric"

    def __init__(
        self,
        folder: Path | None = None,
        sys: Path = Path("/sys"),
        ask: Ask | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        files_max: int | None = None,
    ) -> None:
        self._attributes = Attributes(files_max)
        self._ethtool = EthtoolStatistics(link_statistics, ask)
        self._ports = PortReader(sys, self._attributes, self._ethtool)
        self._inventory = ExpectedPorts(folder)
        self._monotonic_s = monotonic_s
        self._found: list[Port] = []
        self._listing: object = None
        self._find_s = 0.0
        self._tracks: dict[str, _Track] = {}
        self._first = True
        self._missed_s: dict[str, float] = {}
        self._said: set[str] = set()
        self._now_s = 0.0

    def collect(self, now_s: float) -> Observed:
        """Return the ports' rows and the node's. Raises Unsupported without a port, CollectFailed when none is seen."""
        self._now_s = now_s
        if self._first:
            self._inventory.load(now_s)
        self._inventory.expire(now_s)
        self._find()
        problems = self._fresh("ports", self._ports.failures)
        if not self._found and not self._inventory.known:
            if self._ports.failures:
                raise CollectFailed("; ".join(f"{failure.name}: {failure.reason}" for failure in self._ports.failures))
            if self._first:
                raise Unsupported("no RDMA device and no physical network interface")
        observed = Observed()
        rates: dict[Role, list[float | None]] = {}
        read: set[Role] = set()
        for port in self._found:
            self._observe(port, observed, rates, read, problems)
        problems += self._observe_gone(observed)
        observed.node = self._node(rates, read)
        self._inventory.save(now_s)
        if self._inventory.problem:
            problems += self._fresh("", [UnreadableFile("ports seen up", self._inventory.problem)])
            self._inventory.problem = ""
        observed.problem = "; ".join(problems)
        self._first = False
        return observed

    def close(self) -> None:
        """Close the files, and save when ports were last up."""
        self._attributes.close()
        self._ethtool.close()
        if not self._first:
            self._inventory.save(self._now_s, at_once=True)

    def _find(self) -> None:
        listing, now_s = self._ports.listing(), self._monotonic_s()
        if listing == self._listing and now_s < self._find_s:
            return
        before = {port.key for port in self._found}
        self._found = self._ports.find()
        keys = {port.key for port in self._found}
        if now_s >= self._find_s or keys != before:
            self._ports.refresh()
            self._find_s = now_s + FIND_EVERY_S
        self._listing = listing
        for key in self._tracks.keys() - keys:
            self._tracks[key].restart()
        new = {port.name for port in self._found if port.key not in self._inventory.known}
        for key, known in list(self._inventory.known.items()):
            if key not in keys and (known.name in new or known.passing):
                self._inventory.forget(key)  # replaced or destroyed

    def _is_elsewhere(self, known: _Known) -> bool:
        """Whether a port no longer seen still works in another network namespace."""
        return (not known.rdma or self._ports.rdma_is_private()) and self._ports.has_hardware(known.device)

    def _observe(
        self,
        port: Port,
        observed: Observed,
        rates: dict[Role, list[float | None]],
        read: set[Role],
        problems: list[str],
    ) -> None:
        """Add a port's row, add its rates to the node's, and record which roles it had readings for."""
        up = self._ports.is_up(port)
        if up is None:
            problems += self._fresh(port.name, [UnreadableFile("state", "cannot be read")])
        if not self._inventory.saw(port, bool(up), self._now_s):
            return
        track = self._tracks.get(port.key)
        if track is None:
            track = self._tracks[port.key] = _Track(rdma=port.rdma, from_zero=not self._first)
        sample = self._ports.read(port)
        problems += self._fresh(port.name, sample.failures)
        own = track.rates(sample.values, self._monotonic_s())
        row = {"link_up": float(up)} if up is not None else {}
        for metric, roles in _LINK_RATES:
            parts = [own[role] for role in roles if role in own]
            known = [part for part in parts if part is not None]
            if known and len(known) == len(parts):
                row[metric] = sum(known)
        seen = {role for role in _TOTALS if track.totals[role].add(sample.values.get(role, {}))}
        row.update({metric: track.totals[role].value for metric, role in _LINK_TOTALS if role in seen})
        if row:
            observed.links[port.name] = row
        if port.rdma:
            read |= seen
        for role, value in own.items():
            rates.setdefault(role, []).append(value)

    def _observe_gone(self, observed: Observed) -> list[str]:
        """Add rows of the ports that are gone with their hardware; return the messages about them."""
        present = {port.key for port in self._found}
        gone = {key: known for key, known in self._inventory.known.items() if key not in present}
        now_s, problems = self._monotonic_s(), []
        self._missed_s = {key: self._missed_s.get(key, now_s) for key in gone}
        for key, known in gone.items():
            if self._is_elsewhere(known):
                if now_s - self._missed_s[key] >= ELSEWHERE_S:
                    self._inventory.forget(key)
                continue
            # Where names shifted, its name now belongs to another port.
            if all(port.name != known.name for port in self._found):
                observed.links[known.name] = {"link_up": 0.0}
            problems.append(f"{known.name} is gone ({known.device.rpartition('/')[2]})")
        return problems

    def _node(self, rates: Mapping[Role, list[float | None]], read: set[Role]) -> dict[str, float]:
        row: dict[str, float] = {}
        for metric, role in _NODE_RATES:
            values = [value for value in rates.get(role, []) if value is not None]
            if values and len(values) == len(rates[role]):  # a sum without one of its ports would look like a fall
                row[metric] = sum(values)
        for metric, role in _NODE_TOTALS:
            if role in read:
                row[metric] = sum(track.totals[role].value for track in self._tracks.values() if track.rdma)
        return row

    def _fresh(self, name: str, failures: list[UnreadableFile]) -> list[str]:
        """Return the failures not yet reported, one sentence per reason."""
        if len(self._said) > _SAID_MAX:
            self._said.clear()
        sentences = []
        for reason in sorted({failure.reason for failure in failures}):
            files = [failure.name for failure in failures if failure.reason == reason]
            if f"{name} {reason}" not in self._said:
                self._said.add(f"{name} {reason}")
                sentences.append(f"{name}: {reason}: {files[0]}" + (f" and {len(files) - 1} more" if files[1:] else ""))
        return sentences


def rate(before: Mapping[str, float], now: Mapping[str, float], elapsed_s: float, most: float) -> float | None:
    """Return the growth per second of counters, by source; None where one is missing, was reset or jumped."""
    if elapsed_s <= 0.0 or not now or before.keys() != now.keys():
        return None
    grown = [value - before[source] for source, value in now.items()]
    if min(grown) < 0.0 or sum(grown) > most * elapsed_s:
        return None
    return sum(grown) / elapsed_s
