"""Opens, updates and ends incidents of nodes without a job, by the same rules as the detection loop but outside it.

Those of nodes with fewer GPUs or NVLinks than before, or than similar nodes, come from the inventory alone.
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from eagle_eye.detectors.types import Verdict
from eagle_eye.server.accounts.node_records import Stock, stock
from eagle_eye.server.engine.idle_faults import FEWER, INVENTORY, NO_JOB, fewer_gpus, gpus_missing, nvlinks_down
from eagle_eye.server.engine.incidents import OPEN_STATES, fold
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.respond import Book, Response
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Gpu, Incident
from eagle_eye.server.monitor.announcements import announcement
from eagle_eye.server.store.store import GPUS, INCIDENTS, NODES, Change, Store, repeat


def claimed(
    store: Store, known: Sequence[Incident], verdict: Verdict, policy: PolicySettings, public_url: str, now_s: float
) -> Change:
    """Return the change that opens an incident for the claim, or adds it to one of ``known``, with its events."""
    return _folded(store, known, (verdict,), policy, public_url, now_s)


def over(store: Store, incident: Incident, policy: PolicySettings, public_url: str, now_s: float) -> Change:
    """Return the change that ends an incident known to be over, with its events."""
    return _folded(store, [replace(incident, seen_s=0.0)], (), policy, public_url, now_s)


def _folded(
    store: Store,
    known: Sequence[Incident],
    verdicts: tuple[Verdict, ...],
    policy: PolicySettings,
    public_url: str,
    now_s: float,
) -> Change:
    judgement = Judgement(job=NO_JOB, attempt=0, now_s=now_s, verdicts=verdicts)
    folded = fold(known, judgement, {}, policy, store.new_id)
    return announcement(Response(tuple(folded), ()), Book(known, ()), policy, public_url, now_s).change


# Fewer GPUs or NVLinks. Touches: the store. Like the accounts, this runs beside the detection loop.

LOOK_S = 300.0  # for 100,000 GPUs a pass takes a third of a second
SETTLED_S = 300.0  # how long it must persist: a driver that was just loaded opens one GPU after another
HEARD_S = 60.0  # an agent silent for longer may have shown fewer GPUs and more again, unseen
COLLECTOR = "nvml"
LIKE_MIN = 4  # nodes with the same model...
LIKE_RATIO = 0.75  # ...of which this share must have equally many GPUs: then fewer are worth reporting
EARLIER_MAX = 50  # newest incidents of a node that are examined


class _Claim(NamedTuple):
    """A fault claimed of a node; ``marks`` is the content of its evidence, by which it is recognized."""

    verdict: Verdict
    marks: frozenset[object]


class MissingGpus:
    """Compares nodes' current reports with their earlier ones at every pass; incidents are its only memory."""

    def __init__(
        self, store: Store, clock: Clock, fleet: Fleet, policy: Callable[[], PolicySettings], public_url: str
    ) -> None:
        """Create it; ``policy()`` returns the current settings."""
        self._store = store
        self._clock = clock
        self._fleet = fleet
        self._policy = policy
        self._public_url = public_url
        self._since_s: dict[tuple[str, frozenset[object]], float] = {}  # by node and what is missing

    async def run(self) -> None:
        """Look every LOOK_S until cancelled."""
        await repeat(
            lambda: asyncio.to_thread(self.update_incidents), LOOK_S, "missing GPUs are not looked for", wait_first=True
        )

    def update_incidents(self) -> None:
        """Open incidents of nodes that lack GPUs; end those whose GPUs are back. Raises StoreUnavailable."""
        now_s = self._clock.now_s()
        stocks = _stocks(self._store.all(GPUS))
        claims = _claims(stocks)
        before, self._since_s = self._since_s, {}
        for node, claim in claims.items():
            key = (node, claim.marks)
            since_s = self._since_s[key] = before.get(key, now_s)
            if now_s - since_s >= SETTLED_S and self._is_seen(node, now_s):
                self._store.update(functools.partial(self._opened, claim=claim, now_s=now_s))
        for incident in self._store.open_incidents():
            if _is_ours(incident) and incident.node in stocks:
                still = claims.get(incident.node)
                if still is None or still.verdict.fault != incident.fault:
                    self._store.update(functools.partial(self._ended, id_=incident.id, now_s=now_s))

    def _is_seen(self, node: str, now_s: float) -> bool:
        """Return whether the node's agent is alive and its driver answers in full."""
        heard = self._fleet.last(node)
        if heard is None or heard.farewell or now_s - heard.received_s > max(HEARD_S, 3.0 * heard.interval_s):
            return False
        return heard.collectors.get(COLLECTOR) == "ok"

    def _opened(self, store: Store, claim: _Claim, now_s: float) -> Change:
        """Return the incident to open; none for a node that is out, nor for what is known or a person accepted."""
        (name,) = claim.verdict.nodes
        node = store.get(NODES, name)
        if node is None or node.state != "in_service":
            return Change()
        earlier = store.page(INCIDENTS, {"node": name}, limit=EARLIER_MAX).items
        if any(i.state in OPEN_STATES and (i.fault == claim.verdict.fault or i.job == NO_JOB) for i in earlier):
            return Change()
        accepted = {
            item.value if item.device is not None else claim.verdict.fault
            for i in earlier
            if _is_ours(i) and (i.state == "false" or node.updated_s >= i.since_s)  # it was put back as it was
            for item in i.evidence
        }
        if claim.marks <= accepted:
            return Change()
        return claimed(store, (), claim.verdict, self._policy(), self._public_url, now_s)

    def _ended(self, store: Store, id_: str, now_s: float) -> Change:
        incident = store.get(INCIDENTS, id_)
        if incident is None or incident.state not in OPEN_STATES:
            return Change()
        return over(store, incident, self._policy(), self._public_url, now_s)


def _is_ours(incident: Incident) -> bool:
    return incident.job == NO_JOB and incident.detectors == [INVENTORY]


def _stocks(gpus: Iterable[Gpu]) -> dict[str, Stock]:
    """Return each node's inventory, for nodes whose inventory is complete."""
    by_node: dict[str, list[Gpu]] = collections.defaultdict(list)
    for gpu in gpus:
        by_node[gpu.node].append(gpu)
    found = {node: stock(own) for node, own in by_node.items()}
    return {node: one for node, one in found.items() if one is not None}


def _claims(stocks: Mapping[str, Stock]) -> dict[str, _Claim]:
    """Return the claims against nodes: comparison with their own past takes precedence over that with others."""
    usual = _usual(stocks)
    found: dict[str, _Claim] = {}
    for node, (reported, missing) in stocks.items():
        seen_s = max(gpu.seen_s for gpu in reported)
        model = _model(reported)
        if missing:
            named = {gpu.uuid: gpu.device for gpu in missing}
            verdict = gpus_missing(node, named, len(reported), max(gpu.seen_s for gpu in missing))
            found[node] = _Claim(verdict, frozenset(named))
        elif len(reported) < usual.get(model, 0):
            verdict = fewer_gpus(node, model, len(reported), usual[model], seen_s)
            found[node] = _Claim(verdict, frozenset({FEWER}))
        elif (unlinked := _links_down(node, reported, seen_s)) is not None:
            found[node] = unlinked
    return found


def _links_down(node: str, reported: Sequence[Gpu], seen_s: float) -> _Claim | None:
    """Return a claim that GPUs lack NVLinks, compared with the most that any of the node's GPUs has or had here.

    No documented number replaces this comparison: on boards whose links are unused (virtual machines) none is up. Makes
    no claim for nodes with several GPU models, or where a GPU does not report its links.
    """
    due = max((gpu.nvlinks_most for gpu in reported), default=0)
    links = {gpu.device: gpu.nvlinks for gpu in reported if gpu.nvlinks is not None}
    up = {device: count for device, count in sorted(links.items()) if count < due}
    if len(links) < len(reported) or not _model(reported) or not up:
        return None
    alike = len(up) == len(reported) and len(set(up.values())) == 1
    return _Claim(nvlinks_down(node, up, due, alike, seen_s), frozenset(float(count) for count in up.values()))


def _usual(stocks: Mapping[str, Stock]) -> dict[str, int]:
    """Return for each model the number of GPUs of nearly all its nodes, where there is such a number."""
    counts: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for reported, missing in stocks.values():
        counts[_model(reported)][len(reported) + len(missing)] += 1
    found = {}
    for model, count in counts.items():
        number, nodes = count.most_common(1)[0]
        if model and count.total() >= LIKE_MIN and nodes >= LIKE_RATIO * count.total():
            found[model] = number
    return found


def _model(reported: Iterable[Gpu]) -> str:
    """Return the model of all of a node's GPUs, "" where they differ or it is unknown."""
    models = {gpu.model for gpu in reported}
    return models.pop() if len(models) == 1 else ""
