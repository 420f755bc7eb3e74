"""What is used of the fleet's budgets of exclusions and restarts, on ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.server.engine.budgets import fleet_limit
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.engine.situation import Situation, counted
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.store import Store
from eagle_eye.server.telemetry.counters import metric_name


class FleetBudgetCollector(Collector):
    """The budgets as policy's mode for all counts them: in mode observe with what would have been done."""

    def __init__(
        self, store: Store, policy: Callable[[], PolicySettings], fleet_size: Callable[[], int], clock: Clock
    ) -> None:
        self._store = store
        self._policy = policy
        self._fleet_size = fleet_size
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        settings, now_s = self._policy(), self._clock.now_s()
        try:
            actions = self._store.actions_since(now_s - settings.window_s)
        except StoreUnavailable:
            return
        # Only what the fleet's budgets depend on.
        situation = Situation(
            settings=settings, actions=actions, fleet_size=self._fleet_size(), now_s=now_s,
            members=0, job_state="", restart_owner="", blind="",
        )  # fmt: skip
        asked = counted(situation, settings.mode)
        used = GaugeMetricFamily(
            metric_name("fleet_budget_used"), "Of the fleet's budget, within policy.window_s.", labels=["budget"]
        )
        limit = GaugeMetricFamily(metric_name("fleet_budget_limit"), "The fleet's budget.", labels=["budget"])
        used.add_metric(["exclusions"], sum(len(action.exclude) for action in asked))
        limit.add_metric(["exclusions"], fleet_limit(situation))
        used.add_metric(["restarts"], sum(action.restart for action in asked))
        limit.add_metric(["restarts"], settings.restarts_fleet)
        yield from (used, limit)
