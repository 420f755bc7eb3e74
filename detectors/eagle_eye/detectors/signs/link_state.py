"""Finds ports that are down or flapping, from link rows, per-node sums over ports, and events."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.signs.topology import SharedTrouble, ports, struck_at_once, struck_switches
from eagle_eye.detectors.types import Floats, Window

STATE_LINES = 3  # rows searched for a port's state
CARRIED = ("link_tx_bytes_per_second", "link_rx_bytes_per_second")
USED_BYTES_PER_S = 1e6  # health checks and an idle TCP session carry far less, the smallest exchange of a step more
FLAP_WINDOW_S = 300.0  # in which a port may go down twice (ByteRobust, SOSP 2025: two alerts in five minutes)
TOGETHER_S = 10.0  # ports taken down by one switch go down within this time...
TOGETHER_INTERVALS = 2.0  # ...or this many intervals
LONE_PORTS_MIN = 2  # ports of one node that go down at once before their switch is suspected


class PortOutage(NamedTuple):
    """A port that is down or went down in the last FLAP_WINDOW_S.

    ``node`` is the node's index, ``link`` the port's name ("" if only the sum over the node's ports is known), ``port``
    its index among the link rows (-1: none). ``since_s`` is when it last went down, ``downs`` how often in that time,
    ``down`` whether it is known to be still down. ``used`` is whether the job's traffic goes through it, None if nobody
    can tell.
    """

    node: int
    link: str
    port: int
    since_s: float
    downs: int
    down: bool
    used: bool | None = None


def outages(window: Window) -> list[PortOutage]:
    """Return every port that is down or recently went down, and that the job may use.

    Excluded are ports that were never up in the window or that are not used, and interfaces known only from the kernel
    log on a node with port metrics: for every port that carries traffic the rows show whether it is up.
    """
    found = {key: item for key, item in _from_events(window).items() if item.port >= 0 or not _told(window, item.node)}
    for item in _from_links(window):
        known = found.get((item.node, item.link))
        downs = max(item.downs, known.downs) if known is not None else item.downs
        found[item.node, item.link] = item._replace(downs=downs)
    named = {node for node, _ in found}
    sums = [item for item in _from_sums(window) if item.node not in named]
    told = (item._replace(used=_used(window, item)) for item in (*found.values(), *sums))
    return sorted(item for item in told if item.used is not False)


def observed(window: Window) -> bool:
    """Whether any data shows ports' states."""
    return (
        "link_up" in window.link or "link_downed_total" in window.link or "node_rdma_link_downed_total" in window.node
    )


def shared(window: Window, found: list[PortOutage]) -> SharedTrouble | None:
    """Return what the outages share: a switch that is mostly down, or too many nodes at once; None: nothing."""
    nodes_struck = len({item.node for item in found})
    if nodes_struck < 2:
        return _lone(window, found) if nodes_struck else None
    newest_s = max(item.since_s for item in found)
    at_once = [item for item in found if newest_s - item.since_s <= FLAP_WINDOW_S]
    if window.links and all(item.port >= 0 for item in at_once):
        places = ports(window)
        struck = np.zeros(len(window.links), dtype=np.bool_)
        struck[[item.port for item in at_once]] = True
        return struck_switches(struck, places.node_of, places.switch_of) or struck_at_once(
            struck, places.node_of, len(window.nodes)
        )
    nodes = np.arange(len(window.nodes))
    struck = np.zeros(len(window.nodes), dtype=np.bool_)
    struck[[item.node for item in at_once]] = True
    by_switch = struck_switches(struck, nodes, window.switches) if any(window.switches) else None
    return by_switch or struck_at_once(struck, nodes, len(window.nodes))


def together_s(window: Window) -> float:
    """Return the time within which ports taken down by one cause are seen to go down."""
    return max(TOGETHER_S, TOGETHER_INTERVALS * window.interval_s)


def _lone(window: Window, found: list[PortOutage]) -> SharedTrouble | None:
    """Return the switch that only one node of the job is on, if all its ports there went down at one moment.

    Cables and ports fail one by one. Several at once have a shared cause, and no other node can show whether that is
    the switch or the node's own network.
    """
    down = [item for item in found if item.down]
    if len(down) < LONE_PORTS_MIN or any(item.port < 0 for item in down):
        return None
    since_s = [item.since_s for item in down]
    switch_of = ports(window).switch_of
    switches = {switch_of[item.port] for item in down}
    if len(switches) != 1 or "" in switches or max(since_s) - min(since_s) > together_s(window):
        return None
    fallen, up = {item.port for item in down}, window.link.get("link_up")
    others = [port for port, switch in enumerate(switch_of) if switch in switches and port not in fallen]
    if up is None or (up[:, others] > 0).any():
        return None
    return SharedTrouble(tuple(switches), (down[0].node,))


def _told(window: Window, node: int) -> bool:
    """Whether the node's ports report their state themselves."""
    up, name = window.link.get("link_up"), window.nodes[node]
    own = [port for port, link in enumerate(window.links) if link.node == name]
    return up is not None and bool(np.isfinite(up[:, own]).any())


def _used(window: Window, item: PortOutage) -> bool | None:
    """Return whether the job's traffic goes through a port; None if nobody can tell.

    What it carried before it went down says so. Where that was not seen, most of the ports of its name on the job's
    other nodes do: collectives take the same rails on all nodes. Ports that only the node's sum counts are used.
    """
    if not item.link:
        return True
    carried = _carried(window, [item.port] if item.port >= 0 else [], item.since_s)
    if len(carried) == 0:
        node = window.nodes[item.node]
        peers = [port for port, link in enumerate(window.links) if link.link == item.link and link.node != node]
        carried = _carried(window, peers, item.since_s)
    return bool(2 * np.count_nonzero(carried >= USED_BYTES_PER_S) > len(carried)) if len(carried) else None


def _carried(window: Window, ports: list[int], until_s: float) -> Floats:
    """Return the most that each of the ports carried up to a moment, 0 if it was down; without those not observed."""
    then = window.link_times_s <= until_s
    up, most = window.link.get("link_up"), np.full(len(ports), np.nan)
    if up is not None:
        down = up[then][:, ports] == 0
        most[down.any(axis=0)] = 0.0
    for metric in CARRIED:
        if metric in window.link:
            values = window.link[metric][then][:, ports]
            if up is not None:
                values = np.where(down, np.nan, values)  # counters of a port that is down do not show what it carried
            most = np.fmax(most, np.fmax.reduce(values, axis=0, initial=np.nan))
    known: Floats = most[np.isfinite(most)]
    return known


def _from_links(window: Window) -> list[PortOutage]:
    up, downed = window.link.get("link_up"), window.link.get("link_downed_total")
    times_s = window.link_times_s
    if len(times_s) == 0 or (up is None and downed is None):
        return []
    suspect = np.zeros(len(window.links), dtype=np.bool_)
    state: Floats | None = None
    if up is not None:
        state = latest(up, STATE_LINES)
        suspect |= state == 0
    falls = _falls(downed, times_s, window.now_s) if downed is not None else None
    if falls is not None:
        suspect |= falls > 0
    if not suspect.any():
        return []
    found = []
    place = {node: index for index, node in enumerate(window.nodes)}
    for port in np.flatnonzero(suspect).tolist():
        node = place.get(window.links[port].node, -1)
        was_up = up is None or bool((up[:, port] > 0).any())
        if node < 0 or not was_up:
            continue
        down = state is not None and bool(state[port] == 0)
        downs = int(falls[port]) if falls is not None and falls[port] > 0 else 1
        since_s = _fell_s(up[:, port], times_s) if down and up is not None else -np.inf
        if downed is not None and falls is not None and falls[port] > 0:
            since_s = max(since_s, _grew_s(downed[:, port], times_s))
        found.append(PortOutage(node, window.links[port].link, port, since_s, downs, down))
    return found


def _from_sums(window: Window) -> list[PortOutage]:
    downed = window.node.get("node_rdma_link_downed_total")
    if downed is None or len(window.node_times_s) == 0:
        return []
    falls = _falls(downed, window.node_times_s, window.now_s)
    if falls is None or not (falls > 0).any():
        return []
    return [
        PortOutage(node, "", -1, _grew_s(downed[:, node], window.node_times_s), int(falls[node]), down=False)
        for node in np.flatnonzero(falls > 0).tolist()
    ]


def _from_events(window: Window) -> dict[tuple[int, str], PortOutage]:
    found: dict[tuple[int, str], PortOutage] = {}
    for event in window.events:
        if event.kind not in ("link_down", "link_up") or event.node not in window.nodes:
            continue
        node, link = window.nodes.index(event.node), str(event.attributes.get("link", ""))
        known = found.get((node, link))
        if event.kind == "link_down":
            recent = known is not None and event.time_s - known.since_s <= FLAP_WINDOW_S
            downs = known.downs + 1 if known is not None and recent else 1
            found[node, link] = PortOutage(node, link, -1, event.time_s, downs, down=True)
        elif known is not None:
            found[node, link] = known._replace(down=False)
    if found:
        port_of = {(link.node, link.link): port for port, link in enumerate(window.links)}
        found = {
            key: item._replace(port=port_of.get((window.nodes[item.node], item.link), -1))
            for key, item in found.items()
            if item.down or window.now_s - item.since_s <= FLAP_WINDOW_S
        }
    return found


def _falls(downed: Floats, times_s: Floats, now_s: float) -> Floats | None:
    """Return how often each counted port went down within FLAP_WINDOW_S: NaN unknown; None: too few rows."""
    if len(times_s) < 2:
        return None
    start = min(int(np.searchsorted(times_s, now_s - FLAP_WINDOW_S)), len(times_s) - 2)
    then = np.fmin.reduce(downed[start : start + STATE_LINES], axis=0)
    falls: Floats = np.fmax.reduce(downed[-STATE_LINES:], axis=0) - then
    return falls


def _fell_s(up: Floats, times_s: Floats) -> float:
    """Return the end of the last interval in which the port was seen up."""
    seen = np.flatnonzero(up > 0)
    return float(times_s[seen[-1]]) if len(seen) else float(times_s[0])


def _grew_s(downed: Floats, times_s: Floats) -> float:
    """Return the end of the last interval before the counter grew for the last time."""
    known = np.flatnonzero(np.isfinite(downed))
    steps = np.flatnonzero(np.diff(downed[known]) > 0)
    return float(times_s[known[steps[-1]]]) if len(steps) else float(times_s[0])
