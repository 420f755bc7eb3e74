from __future__ import annotations

import math
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from eagle_eye.agent.collector import OTHER_REASONS, REASONS_MAX, CollectorStanding, Drops, Observed, TickFrame
from eagle_eye.agent.exposition import OWN, RENDER_EVERY_S, STALE_S_MIN, Exposition, FrameDelivery
from eagle_eye.schema.frame import Rank
from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX, MetricKind, Scope
from tests.agent.fakes import REPOSITORY, FakeClock

Series = dict[tuple[str, ...], float]

STANDINGS = (
    CollectorStanding("host", "ok", 0.004, 0),
    CollectorStanding("nvml", "failed: gpu 3: lost", 0.5, 7),
    CollectorStanding("fabric", "unsupported: no port", 0.0, 0),
)


def tick(seen: Observed | None = None, interval_s: float = 1.0) -> TickFrame:
    return TickFrame(1_000_000.0, interval_s, seen or Observed(), (), STANDINGS, 42)


class Page:
    """An exposition, and its page as Prometheus' own parser reads it."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.drops = Drops()
        self.delivery: FrameDelivery | None = FrameDelivery(
            17, 4_096, True, 25, server_ok=False, server_changes=2, kept=900, resent=64
        )
        self.uuids: dict[str, int] = {}
        self.exposition = Exposition(
            "n17", "1.2.3", self.drops, lambda: self.delivery, self.uuids, clock.monotonic_s, started_s=999_000.0
        )

    def text(self) -> str:
        self.clock.advance(RENDER_EVERY_S)
        return self.exposition.page().decode()

    def series(self, name: str) -> Series:
        """Return the values of one metric by the values of its labels, node left out, in the order of their names."""
        found: Series = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                if sample.name == PROMETHEUS_PREFIX + name:
                    assert sample.labels.pop("node") == "n17"
                    found[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
        return found


@pytest.fixture
def page(clock: FakeClock) -> Page:
    return Page(clock)


def everything() -> Observed:
    """A row of each scope with every metric of the catalogue."""
    return Observed(
        devices={gpu: {m.name: 1.0 + gpu for m in METRICS if m.scope is Scope.DEVICE} for gpu in range(8)},
        node={m.name: 0.5 for m in METRICS if m.scope is Scope.NODE},
        links={f"mlx5_{n}": {m.name: 2.0**60 for m in METRICS if m.scope is Scope.LINK} for n in range(8)},
        ranks=[Rank("llm", 8 + gpu, 16, gpu) for gpu in range(8)],
    )


def test_every_metric_of_the_catalogue_is_shown_with_its_type(page: Page) -> None:
    page.exposition.show(tick(everything()))
    families = {family.name: family for family in text_string_to_metric_families(page.text())}
    for spec in METRICS:
        name = PROMETHEUS_PREFIX + spec.name
        family = families[name.removesuffix("_total") if spec.kind is MetricKind.COUNTER else name]
        assert family.type == ("counter" if spec.kind is MetricKind.COUNTER else "gauge"), name
        assert family.documentation == spec.help
        assert len(family.samples) == (1 if spec.scope is Scope.NODE else 8)


def test_rows_have_few_labels_and_gpus_keep_theirs_when_the_job_changes(page: Page) -> None:
    page.exposition.show(tick(everything()))
    assert page.series("gpu_power_watts")[("3",)] == 4.0
    assert page.series("link_up")[("mlx5_3",)] == 2.0**60
    assert page.series("node_io_pressure_ratio") == {(): 0.5}
    assert page.series("train_loss")[("3", "llm", "11")] == 4.0
    assert page.series("rank_info")[("3", "llm", "11")] == 1.0


def test_of_two_ranks_on_one_gpu_the_newest_attempt_is_named(page: Page) -> None:
    ranks = [Rank("llm", 1, 2, 0, attempt=3), Rank("llm", 1, 2, 0, attempt=2), Rank("llm", 0, 2, 5)]
    page.exposition.show(tick(Observed(devices={0: {"train_step": 7.0}}, ranks=ranks)))
    assert page.series("train_step") == {("0", "llm", "1"): 7.0}
    assert page.series("rank_info") == {("0", "llm", "1"): 1.0, ("5", "llm", "0"): 1.0}


def test_a_row_without_a_known_rank_has_none(page: Page) -> None:
    page.exposition.show(tick(Observed(devices={2: {"train_loss": math.inf}})))
    assert page.series("train_loss") == {("2",): math.inf}


def test_gpus_are_named_by_their_uuid(page: Page) -> None:
    page.uuids.update({"GPU-b": 1, "GPU-a": 0})
    page.exposition.show(tick())
    assert page.series("gpu_info") == {("0", "GPU-a"): 1.0, ("1", "GPU-b"): 1.0}


def test_what_was_not_observed_is_not_shown(page: Page) -> None:
    page.exposition.show(tick(Observed(node={"node_memory_used_ratio": math.nan, "node_blocked_tasks": 0.0})))
    assert page.series("node_memory_used_ratio") == {}
    assert "node_memory_used_ratio" not in page.text()
    assert page.series("node_blocked_tasks") == {(): 0.0}


@pytest.mark.parametrize(("interval_s", "stale_s"), [(1.0, STALE_S_MIN), (60.0, 180.0)])
def test_stale_rows_are_left_out_and_the_agent_still_tells_of_itself(
    page: Page, interval_s: float, stale_s: float
) -> None:
    page.exposition.show(tick(Observed(node={"node_blocked_tasks": 3.0}), interval_s))
    page.clock.advance(stale_s - 1.0)
    assert page.series("node_blocked_tasks") == {(): 3.0}
    page.clock.advance(1.0)
    assert page.series("node_blocked_tasks") == {}
    assert page.series("agent_last_frame_timestamp_seconds") == {(): 1_000_000.0}
    assert page.series("agent_frames_total") == {(): 42.0}


def test_a_collector_that_this_host_cannot_have_is_not_one_that_fails(page: Page) -> None:
    page.exposition.show(tick())
    assert page.series("agent_collector_supported") == {("host",): 1.0, ("nvml",): 1.0, ("fabric",): 0.0}
    assert page.series("agent_collector_ok") == {("host",): 1.0, ("nvml",): 0.0}
    assert page.series("agent_collector_duration_seconds") == {("host",): 0.004, ("nvml",): 0.5}
    assert page.series("agent_collector_failures_total") == {("host",): 0.0, ("nvml",): 7.0}


def test_the_agent_tells_of_its_way_to_the_server(page: Page) -> None:
    assert page.series("agent_spool_frames") == {(): 17.0}
    assert page.series("agent_spool_bytes") == {(): 4096.0}
    assert page.series("agent_spool_in_memory") == {(): 1.0}
    assert page.series("agent_spool_kept_frames") == {(): 900.0}
    assert page.series("agent_frames_resent_total") == {(): 64.0}
    assert page.series("agent_frames_sent_total") == {(): 25.0}
    assert page.series("agent_server_ok") == {(): 0.0}
    assert page.series("agent_server_changes_total") == {(): 2.0}
    page.delivery = FrameDelivery(0, None, None, 0, server_ok=None, server_changes=0)
    assert page.series("agent_server_ok") == page.series("agent_spool_bytes") == {}
    page.delivery = None
    assert page.series("agent_spool_frames") == {}


def test_the_agent_tells_of_itself_before_the_first_frame(page: Page) -> None:
    page.drops.count("spool_full", 3)
    assert page.series("agent_info") == {("1.2.3",): 1.0}
    assert page.series("agent_start_time_seconds") == {(): 999_000.0}
    assert page.series("agent_dropped_total") == {("spool_full",): 3.0}
    assert 0.0 < page.series("agent_cpu_seconds_total")[()] < 1e6
    assert page.series("agent_resident_memory_bytes")[()] > 1e6


def test_reasons_of_drops_are_bounded(page: Page) -> None:
    for number in range(2 * REASONS_MAX):
        page.drops.count(f"rejected_{number}")
    page.drops.count("rejected_0")
    counted = page.series("agent_dropped_total")
    assert len(counted) == REASONS_MAX + 1
    assert (counted[("rejected_0",)], counted[(OTHER_REASONS,)]) == (2.0, float(REASONS_MAX))


def test_asking_often_costs_one_page(page: Page) -> None:
    page.exposition.show(tick(Observed(node={"node_blocked_tasks": 1.0})))
    first = page.text()
    page.exposition.show(tick(Observed(node={"node_blocked_tasks": 2.0})))
    page.clock.advance(RENDER_EVERY_S / 2)
    assert page.exposition.page().decode() == first
    assert page.text() != first


@given(st.text(min_size=1, max_size=30), st.floats(allow_nan=False))
def test_any_name_and_number_come_out_as_they_went_in(name: str, value: float) -> None:
    clock = FakeClock()
    exposition = Exposition("n17", "1", Drops(), monotonic_s=clock.monotonic_s)
    exposition.show(tick(Observed(links={name: {"link_errors_total": value}})))
    expected = name.encode("utf-8", "replace").decode()
    (found,) = [
        sample
        for family in text_string_to_metric_families(exposition.page().decode())
        for sample in family.samples
        if sample.name == "eagle_eye_link_errors_total"
    ]
    assert found.labels["link"] == expected
    assert found.value == value


def test_every_metric_of_the_agent_s_own_is_in_the_docs() -> None:
    text = (REPOSITORY / "docs" / "reference" / "agent.md").read_text(encoding="utf-8")
    for spec in OWN.values():
        assert f"| `{PROMETHEUS_PREFIX}{spec.name}` | {spec.help} |" in text


def test_prometheus_own_linter_has_no_complaint(page: Page) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    page.uuids["GPU-a"] = 0
    page.drops.count("spool_full")
    page.exposition.show(tick(everything()))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=page.text(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_page_of_a_full_host_is_small(page: Page) -> None:
    page.exposition.show(tick(everything()))
    assert len(page.text()) < 100_000
