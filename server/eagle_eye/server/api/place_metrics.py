"""How the nodes of each rack and switch stand, on ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.server.api import fleet_overview as overview
from eagle_eye.server.engine.ledger import phase
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.site_files.topology import Places
from eagle_eye.server.store.store import NODES, Store
from eagle_eye.server.telemetry.counters import metric_name


class PlaceCollector(Collector):
    """Nodes by rack and by switch as the site's file has them; those in no known place are left out."""

    def __init__(self, store: Store, fleet: Fleet, places: Places, clock: Clock, fresh_s: float) -> None:
        self._store = store
        self._fleet = fleet
        self._places = {"rack": places.rack_of_node, "switch": places.switch_of_node}
        self._clock = clock
        self._fresh_s = fresh_s

    def collect(self) -> Iterator[Metric]:
        """Yield the families, empty where the site names no racks or switches."""
        try:
            standings = self._standings() if any(self._places.values()) else {}
        except StoreUnavailable:
            return
        for kind, place_of in self._places.items():
            family = GaugeMetricFamily(
                metric_name(f"{kind}_nodes"), f"Nodes of a {kind}, by how they stand.", labels=[kind, "standing"]
            )
            counts = Counter((place_of[node], standing) for node, standing in standings.items() if node in place_of)
            for (place, standing), count in sorted(counts.items()):
                family.add_metric([place, standing], count)
            yield family

    def _standings(self) -> dict[str, overview.Standing]:
        now_s = self._clock.now_s()
        accused = overview.accused(self._store.open_incidents())
        heard = {one.node: one.is_fresh(now_s, self._fresh_s) for one in self._fleet.presences()}
        return {
            one.node: overview.standing(phase(one, now_s), accused.get(one.node), heard.get(one.node))
            for one in self._store.all(NODES)
        }
