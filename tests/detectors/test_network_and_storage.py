"""Network and storage by topology: what fires, and what must not be taken for a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eagle_eye.detectors.types import Blind, Detector, Pause, Verdict, Window, WindowEvent
from eagle_eye.server.engine.detector_schedule import build_detectors
from eagle_eye.server.engine.settings import DetectionSettings
from tests.detectors.slow_stories import hookless, slower
from tests.detectors.windows import NOW_S, Story

DETECTORS: dict[str, Detector] = {d.name: d for d in build_detectors(DetectionSettings())}
NETWORK = ("nic_degraded", "network_hang", "network_congestion", "switch_down")
OURS = (*NETWORK, "storage_stall", "node_silent")
ECHO = "RuntimeError: NCCL error: unhandled system error: remote process exited"
ROWS = 120
SINCE = 30  # rows since the trouble began


def detect(name: str, window: Window) -> list[Verdict]:
    return DETECTORS[name].detect(window)


def only(name: str, window: Window) -> Verdict:
    verdicts = detect(name, window)
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def quiet(story: Story, *names: str) -> None:
    window = story.window()
    for name in names or OURS:
        assert detect(name, window) == [], name


def job(nodes: int = 8, gpus: int = 1) -> Story:
    return Story(nodes=nodes, gpus=gpus, rows=ROWS).hardware()


def racks(story: Story, each: int = 4) -> Story:
    story.switches = tuple(f"leaf{i // each}" for i in range(len(story.nodes)))
    return story


def slower_by_network(story: Story, ratio: float = 0.3, rows: int = SINCE) -> Story:
    """Collectives of all ranks take longer, and with them the steps."""
    story.device["nccl_collective_seconds"][-rows:] += ratio * 0.5
    story.device["train_step_seconds"][-rows:] *= 1 + ratio
    return story


def count_up(counter: np.ndarray, per_row: float, rows: int = SINCE) -> None:
    counter[-rows:] += per_row * np.arange(1, rows + 1).reshape(-1, *[1] * (counter.ndim - 1))


class TestNicDegraded:
    def test_names_the_node_that_sends_pauses_while_all_collectives_take_longer(self) -> None:
        story = slower_by_network(job(), rows=65)
        story.node["node_pfc_tx_pause_packets_per_second"][-65:, 3] = 5_000
        story.node["node_pfc_rx_pause_packets_per_second"][-65:] = 700
        verdict = only("nic_degraded", story.window())
        assert (verdict.node, verdict.fault) == ("n3", "nic_degraded")
        assert verdict.kinds == {"pfc", "collective_time"}
        assert verdict.confidence >= 0.9
        assert verdict.slowdown_ratio == pytest.approx(0.3, abs=0.01)
        assert verdict.onset_s == pytest.approx(NOW_S - 65, abs=3)

    def test_pauses_on_a_leaf_whose_nodes_are_all_congested_are_not_one_nodes_card(self) -> None:
        """The same pauses accuse a card where whoever sends to it is notified, on whichever switch."""
        confidence = []
        for notified in (slice(0, 4), slice(None)):
            story = racks(slower_by_network(job(), rows=65))
            story.node["node_pfc_tx_pause_packets_per_second"][-65:, 3] = 5_000
            count_up(story.node["node_congestion_notifications_total"][:, notified], 500, rows=65)
            confidence.append(only("nic_degraded", story.window()).confidence)
        assert confidence[0] < 0.9 <= confidence[1]

    def test_pauses_that_all_send_accuse_nobody_when_they_end_and_one_nodes_row_is_not_there_yet(self) -> None:
        story = slower_by_network(job(), rows=65)
        sent = story.node["node_pfc_tx_pause_packets_per_second"]
        sent[-65:] = 5_000
        sent[-1] = 0
        sent[-1, 3] = np.nan
        assert detect("nic_degraded", story.window()) == []

    def test_pauses_alone_may_pass_by_themselves(self) -> None:
        story = slower_by_network(job())
        story.node["node_pfc_tx_pause_packets_per_second"][-SINCE:, 3] = 5_000
        assert only("nic_degraded", story.window()).confidence < 0.9

    @pytest.mark.parametrize(("rows", "found"), [((-31, -1), 0), ((-46, -31, -16, -1), 1)], ids=["twice", "always"])
    def test_pauses_that_rare_rows_show_must_be_in_all_of_the_newest_readings(self, rows: Any, found: int) -> None:
        story = slower_by_network(job(), rows=65)
        sent = story.node["node_pfc_tx_pause_packets_per_second"]
        sent[:, 3] = np.nan
        sent[-1::-15, 3] = 0.0
        sent[list(rows), 3] = 300.0
        assert len(detect("nic_degraded", story.window())) == found

    @pytest.mark.parametrize(("readings", "found"), [(1, 0), (4, 1)], ids=["one reading", "four readings"])
    def test_a_reading_of_pauses_that_is_repeated_has_not_lasted(self, readings: int, found: int) -> None:
        story = slower_by_network(job().ports(), rows=65)
        rates = [name for name in story.link if name.endswith("_per_second")]
        pauses = story.link["link_pfc_tx_pause_packets_per_second"]
        pauses[-20:, 7] = np.repeat(300.0 + np.arange(readings), 20 // readings)
        for name in rates if readings == 1 else []:
            story.link[name][-20:, 7] = story.link[name][-20, 7]
        assert len(detect("nic_degraded", story.window())) == found

    @pytest.mark.parametrize(("lasted", "found"), [(5, 1), (40, 0)])
    def test_pauses_that_others_ports_get_over_must_last_longer_than_theirs(self, lasted: int, found: int) -> None:
        story = slower_by_network(job().ports(), rows=30)
        pauses = story.link["link_pfc_tx_pause_packets_per_second"]
        pauses[10 : 10 + lasted, 0] = pauses[-30:, 7] = 5_000
        assert len(detect("nic_degraded", story.window())) == found

    @pytest.mark.parametrize(("share", "found"), [(0.75, 0), (1.0, 1)], ids=["a rack is capped", "all as before"])
    def test_without_the_hook_clocks_that_explain_the_slowness_acquit_a_port(self, share: float, found: int) -> None:
        story = slower(hookless(job(gpus=4)), rows=65, ratio=0.75)
        story.node["node_pfc_tx_pause_packets_per_second"][-65:, 3] = 5_000
        story.device["gpu_sm_clock_hertz"][-65:, :8] *= share
        assert len(detect("nic_degraded", story.window())) == found

    def test_a_port_that_always_counted_errors_is_not_what_slows_the_job_now(self) -> None:
        story = slower_by_network(job())
        count_up(story.node["node_rdma_errors_total"][:, 3], 2, rows=ROWS)
        quiet(story, "nic_degraded")

    def test_names_the_port_whose_errors_grow(self) -> None:
        story = slower_by_network(job().ports())
        count_up(story.link["link_errors_total"][:, 5], 40)
        verdict = only("nic_degraded", story.window())
        assert verdict.node == "n2"
        assert "mlx5_1" in verdict.summary
        assert verdict.kinds == {"nic_errors", "collective_time"}
        assert verdict.confidence >= 0.9

    def test_a_port_that_stays_down_while_the_job_goes_on_more_slowly(self) -> None:
        story = slower_by_network(job().ports())
        story.link["link_up"][-SINCE:, 5] = 0
        story.link["link_tx_bytes_per_second"][-SINCE:, 5] = 0
        verdict = only("nic_degraded", story.window())
        assert verdict.node == "n2"
        assert verdict.kinds == {"link_state", "bandwidth", "collective_time"}

    @pytest.mark.parametrize(
        ("rows", "congestion", "sure"), [(70, True, False), (140, True, True), (140, False, False)]
    )
    def test_a_port_that_falls_behind_in_load_alone_is_accused_if_it_lasts_and_congestion_would_be_seen(
        self, rows: int, congestion: bool, sure: bool
    ) -> None:
        story = slower_by_network(Story(nodes=8, rows=3 * ROWS).hardware().ports(), rows=rows)
        story.link["link_tx_bytes_per_second"][-rows:, 5] *= 0.3
        for name in ("node_congestion_notifications_total", "node_pfc_rx_pause_packets_per_second"):
            if not congestion:
                del story.node[name]
        verdict = only("nic_degraded", story.window())
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", sure)

    def test_a_port_whose_reading_has_more_of_a_pause_in_it_than_others_is_no_fault(self) -> None:
        """Rows are 15 s apart, and a pause ends in the middle of one for most nodes, later for one."""
        story = slower_by_network(Story(nodes=8, rows=3 * ROWS).hardware().ports(), rows=140)
        story.times_s = NOW_S - 15.0 * np.arange(3 * ROWS)[::-1]
        for values, own in ((story.link, [4, 5]), (story.node, [2])):
            for name in [name for name in values if name.endswith("_tx_bytes_per_second")]:
                values[name][-3:-1] *= [[0.2], [0.5]]
                values[name][-3:, own] *= [[0.05], [0.2], [0.85]]
        assert detect("nic_degraded", story.window(interval_s=15.0)) == []

    @pytest.mark.parametrize(("read_every", "lost"), [(11, 0), (1, 118)], ids=["read seldom", "rows lost"])
    def test_a_port_of_which_a_few_readings_missed_the_bursts_is_no_fault(self, read_every: int, lost: int) -> None:
        story = slower_by_network(Story(nodes=8, rows=3 * ROWS).hardware().ports(), rows=140)
        load = story.link["link_tx_bytes_per_second"]
        load *= np.where(np.arange(len(load)) % 4 == 0, 3.4, 0.2)[:, None]
        load[-140:, 5] *= 0.2 / np.where(np.arange(140) % 4 == 0, 3.4, 0.2)
        rows = np.arange(len(load))
        for values in story.link.values():
            values[:, 4:6] = values[rows - rows % read_every, 4:6]
            values[-lost - 1 : -1, 4:6] = np.nan
        quiet(story, "nic_degraded")

    def test_errors_that_reach_neighbours_accuse_none_of_them_where_nodes_report_in_turn(self) -> None:
        """Half of the nodes fill each second row, and a source of theirs is read every other time."""
        story = slower_by_network(Story(nodes=8, rows=2 * ROWS).hardware().ports(), rows=120)
        errors = story.link["link_errors_total"]
        errors[-120:, 5] += 25 * np.arange(1, 121)
        errors[-120:] += 1.2 * np.arange(1, 121)[:, None]
        for rows in range(len(errors)):
            turn = rows - rows % 4 + np.where(np.arange(errors.shape[1]) < 8, 0, 2)
            for values in story.link.values():
                values[rows] = values[np.minimum(turn, rows), np.arange(values.shape[1])]
        named = set()
        for last in range(-60, 0):
            window = story.window(now_s=float(story.times_s[last]))
            window = replace(
                window,
                interval_s=2.0,
                link={name: values[: len(values) + last + 1] for name, values in window.link.items()},
                link_times_s=window.times_s[: len(window.times_s) + last + 1],
            )
            named |= {verdict.node for verdict in detect("nic_degraded", window)}
        assert named == {"n2"}

    def test_a_port_that_carries_less_in_a_congested_network_is_no_fault(self) -> None:
        story = slower_by_network(Story(nodes=8, rows=2 * ROWS).hardware().ports(), rows=70)
        story.link["link_tx_bytes_per_second"][-70:, 5] *= 0.3
        count_up(story.node["node_congestion_notifications_total"][:, 1], 5_000, rows=70)
        quiet(story, "nic_degraded")

    def test_a_port_that_carries_less_while_most_nodes_are_told_to_pause_is_no_fault(self) -> None:
        story = slower_by_network(Story(nodes=8, rows=2 * ROWS).hardware().ports(), rows=70)
        story.link["link_tx_bytes_per_second"][-70:, 5] *= 0.3
        story.node["node_pfc_rx_pause_packets_per_second"][-70:] = 5_000
        quiet(story, "nic_degraded")

    def test_a_third_flap_in_five_minutes_is_a_finding(self) -> None:
        story = job().ports()
        for ago in (90, 60, 30):
            story.link["link_downed_total"][-ago:, 5] += 1
        verdict = only("nic_degraded", story.window())
        assert verdict.node == "n2"
        assert verdict.kinds == {"link_state"}

    def test_two_flaps_in_five_minutes_are_tolerated(self) -> None:
        story = job().ports()
        for ago in (90, 30):
            story.link["link_downed_total"][-ago:, 5] += 1
            story.link["link_up"][-ago : -ago + 4, 5] = 0
            story.node["node_rdma_link_downed_total"][-ago:, 2] += 1
        quiet(story)

    def test_flaps_known_from_events_alone_count(self) -> None:
        story = job()
        for ago in (200, 120, 40):
            story.events.append(WindowEvent(NOW_S - ago, "n2", -1, "link_down", {"link": "mlx5_0"}))
            story.events.append(WindowEvent(NOW_S - ago + 3, "n2", -1, "link_up", {"link": "mlx5_0"}))
        assert only("nic_degraded", story.window()).node == "n2"
        story.events = story.events[2:]
        quiet(story)

    def test_a_small_slowness_of_steady_steps_is_seen_when_it_lasts(self) -> None:
        story = slower_by_network(job(), ratio=0.04, rows=60)
        story.node["node_pfc_tx_pause_packets_per_second"][-60:, 3] = 5_000
        assert only("nic_degraded", story.window()).slowdown_ratio == pytest.approx(0.04, abs=0.01)

    def test_fires_within_fifteen_seconds(self) -> None:
        story = slower_by_network(job(), rows=16)
        count_up(story.node["node_rdma_errors_total"][:, 3], 20, rows=16)
        assert only("nic_degraded", story.window()).confidence >= 0.9

    def test_rows_a_minute_apart_do(self) -> None:
        story = slower_by_network(job(), rows=5)
        story.node["node_pfc_tx_pause_packets_per_second"][-5:, 3] = 5_000
        story.times_s = NOW_S - 60.0 * np.arange(ROWS - 1, -1, -1)
        assert only("nic_degraded", story.window(interval_s=60.0)).node == "n3"

    def test_errors_that_slow_nothing_are_no_fault_until_they_are_many(self) -> None:
        story = job()
        count_up(story.node["node_rdma_errors_total"][:, 3], 2)
        quiet(story)
        loud = job()
        count_up(loud.node["node_rdma_errors_total"][:, 3], 30)
        assert only("nic_degraded", loud.window()).confidence < 0.9

    def test_errors_amid_congestion_exclude_nobody(self) -> None:
        story = slower_by_network(job())
        count_up(story.node["node_rdma_errors_total"][:, 3], 20)
        for node in range(8):
            count_up(story.node["node_congestion_notifications_total"][:, node], 5_000)
        assert only("nic_degraded", story.window()).confidence < 0.9

    def test_errors_on_many_nodes_are_the_networks(self) -> None:
        story = slower_by_network(job())
        for node in (1, 3, 6):
            count_up(story.node["node_rdma_errors_total"][:, node], 20)
        quiet(story, "nic_degraded")

    def test_pauses_that_a_node_always_sent_are_its_place_in_the_network(self) -> None:
        story = slower_by_network(job())
        story.node["node_pfc_tx_pause_packets_per_second"][:, 3] = 5_000
        quiet(story, "nic_degraded")

    def test_a_burst_of_pauses_is_no_fault(self) -> None:
        story = slower_by_network(job(), rows=6)
        story.node["node_pfc_tx_pause_packets_per_second"][-6:, 3] = 5_000
        quiet(story, "nic_degraded")

    def test_a_slow_rank_that_others_wait_for_is_not_the_networks(self) -> None:
        story = slower_by_network(job())
        story.device["train_compute_seconds"][-SINCE:, 5] += 0.15
        story.node["node_pfc_tx_pause_packets_per_second"][-SINCE:, 3] = 5_000
        quiet(story, "nic_degraded")

    def test_a_port_that_was_never_up_is_unused_by_design(self) -> None:
        story = job().ports()
        for name in ("link_up", "link_tx_bytes_per_second", "link_rx_bytes_per_second"):
            story.link[name][:, 1::2] = 0
        quiet(story)

    def test_stages_with_unlike_traffic_are_alike_against_their_own_past(self) -> None:
        story = slower_by_network(job().ports())
        story.link["link_tx_bytes_per_second"][:, :4] *= 0.2
        quiet(story, "nic_degraded")

    def test_is_blind_without_any_network_metric(self) -> None:
        with pytest.raises(Blind, match="no link"):
            detect("nic_degraded", Story().window())


class TestNetworkHang:
    def test_names_the_node_whose_port_is_down_while_the_job_stands_still(self) -> None:
        story = job().ports().standstill(70)
        story.link["link_up"][-70:, 4:6] = 0
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.fault) == ("n2", "network_hang")
        assert verdict.kinds == {"standstill", "link_state"}
        assert verdict.confidence >= 0.9
        assert verdict.asks is None

    @pytest.mark.parametrize("accused", [False, True])
    def test_the_jobs_own_pauses_excuse_a_port_that_is_down_only_where_one_was_reported(self, accused: bool) -> None:
        story = job().ports().standstill(20)
        story.link["link_up"][-20:, 4:6] = 0
        story.pauses = [Pause("", 60.0, accused)]
        if accused:
            quiet(story, "network_hang")
        else:
            verdict = only("network_hang", story.window())
            assert verdict.node == "n2"
            assert verdict.confidence < 0.9

    @pytest.mark.parametrize(("pause_s", "out"), [(None, False), (4.0, True), (9.0, False)])
    def test_a_dead_port_is_acted_on_in_a_job_of_short_steps_once_all_its_known_pauses_are_exceeded(
        self, pause_s: float | None, out: bool
    ) -> None:
        story = job().ports().standstill(12)
        story.link["link_up"][-12:, 4:6] = 0
        story.device["train_step_seconds"][:] = 0.8
        story.pauses = [] if pause_s is None else [Pause("", pause_s, False)]
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.asks) == ("n2", None)
        assert (verdict.confidence >= 0.9) is out

    @pytest.mark.parametrize(("signs", "out"), [(2, True), (1, False)])
    def test_so_are_two_signs_of_one_card_and_one_is_not(self, signs: int, out: bool) -> None:
        story = job().standstill(12)
        count_up(story.node["node_rdma_errors_total"][:, 2], 5, rows=12)
        if signs > 1:
            story.device["nccl_completed_sequence"][-12:, 2] -= 1
        story.device["train_step_seconds"][:] = 0.8
        story.pauses = [Pause("", 4.0, False)]
        assert any(v.confidence >= 0.9 for v in detect("network_hang", story.window())) is out

    def test_an_event_is_enough(self) -> None:
        story = job().standstill(70)
        story.events.append(WindowEvent(NOW_S - 71, "n2", -1, "link_down", {"link": "mlx5_0"}))
        assert only("network_hang", story.window()).node == "n2"

    def test_of_a_link_that_only_the_kernels_log_knows_nobody_can_say_whether_the_job_uses_it(self) -> None:
        story = job().standstill(70)
        story.events.append(WindowEvent(NOW_S - 71, "n2", -1, "link_down", {"link": "eth2"}))
        verdict = only("network_hang", story.window())
        assert verdict.asks == "restart_job"
        assert "not known" in verdict.summary

    def test_a_link_down_accuses_nobody_while_the_ports_of_its_node_that_tell_are_up(self) -> None:
        story = job().ports()
        for node in story.nodes:
            story.exit(node, -6, 4)
        story.events.append(WindowEvent(NOW_S - 5, "n2", -1, "link_down", {"link": "eth2"}))
        quiet(story, "network_hang")

    def test_a_port_that_has_carried_nothing_accuses_nobody(self) -> None:
        found = []
        for used in (True, False):
            story = job().ports().standstill(70)
            story.link["link_up"][-70:, 4] = 0
            if not used:
                for way in ("rx", "tx"):
                    story.link[f"link_{way}_bytes_per_second"][:, 4] = 200.0
            found.append(detect("network_hang", story.window()))
        assert [[verdict.asks for verdict in one] for one in found] == [[None], []]

    @pytest.mark.parametrize(
        ("carried", "asks"), [(2e10, [None]), (200.0, []), (None, ["restart_job"])], ids=["used", "spare", "unknown"]
    )
    def test_ports_of_its_name_elsewhere_tell_whether_it_is_used(
        self, carried: float | None, asks: list[str | None]
    ) -> None:
        """The node with the port that went down reports no ports itself."""
        story = job().ports().standstill(70)
        for name in ("link_rx_bytes_per_second", "link_tx_bytes_per_second"):
            story.link[name][:] = np.nan if carried is None else carried
        story.links = tuple(link for link in story.links if link.node != "n2")
        story.link = {name: np.delete(values, [4, 5], axis=1) for name, values in story.link.items()}
        story.happened("link_down", "n2", 71, link="mlx5_0" if carried is not None else "eth2")
        assert [verdict.asks for verdict in detect("network_hang", story.window())] == asks

    def test_a_port_named_unlike_all_others_asks_for_a_restart(self) -> None:
        story = job().ports().standstill(70)
        story.link["link_up"][-70:, 4] = 0
        for name in ("link_rx_bytes_per_second", "link_tx_bytes_per_second"):
            story.link[name][:, 4] = np.nan
        story.links = tuple(replace(link, link=f"{link.link}-{link.node}") for link in story.links)
        assert only("network_hang", story.window()).asks == "restart_job"

    def test_a_spare_port_that_is_down_everywhere_accuses_nobody(self) -> None:
        story = job().ports().standstill(70)
        story.link["link_up"][:, 0::2] = 0
        story.link["link_up"][:-70, 4] = 1
        for name in ("link_rx_bytes_per_second", "link_tx_bytes_per_second"):
            story.link[name][:, 0::2] = np.nan
        quiet(story, "network_hang", "nic_degraded")

    def test_a_port_down_since_before_the_job_is_no_news(self) -> None:
        story = job().ports().standstill(70)
        story.link["link_up"][:, 4] = 0
        quiet(story, *NETWORK)

    def test_ranks_do_not_die_of_a_port_down_all_along(self) -> None:
        story = job()
        for node in story.nodes:
            story.exit(node, 1, 5, ECHO)
        story.happened("link_down", "n2", 110, link="mlx5_0")
        quiet(story, "network_hang")

    def test_the_only_node_of_a_job_hangs_of_no_port(self) -> None:
        story = job(nodes=1, gpus=8).ports().standstill(70)
        story.link["link_up"][-70:, 0] = 0
        quiet(story, "network_hang")

    def test_a_dead_port_of_a_stepping_job_is_a_notice(self) -> None:
        story = job().ports()
        story.link["link_up"][-70:, 4] = 0
        assert only("nic_degraded", story.window()).confidence < 0.9

    def test_says_so_early_and_less_surely(self) -> None:
        story = job().ports().standstill(5)
        story.link["link_up"][-5:, 4:6] = 0
        assert only("network_hang", story.window()).confidence < 0.9

    def test_a_port_that_came_back_asks_for_a_restart(self) -> None:
        story = job().ports().standstill(70)
        story.link["link_up"][-70:-60, 4] = 0
        story.link["link_downed_total"][-70:, 4] += 1
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.asks) == ("n2", "restart_job")

    def test_errors_on_one_node_alone_ask_for_a_restart(self) -> None:
        story = job().standstill(70)
        count_up(story.node["node_rdma_errors_total"][:, 2], 5, rows=60)
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.asks) == ("n2", "restart_job")

    def test_errors_on_the_node_that_alone_sends_nothing_name_it_before_the_floor(self) -> None:
        story = job().standstill(30)
        count_up(story.node["node_rdma_errors_total"][:, 2], 1)
        story.node["node_rdma_tx_bytes_per_second"][-30:] = 5e6
        story.node["node_rdma_tx_bytes_per_second"][-30:, 2] = 0.0
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.asks) == ("n2", None)
        assert verdict.kinds == {"standstill", "nic_errors", "traffic"}

    def test_a_node_whose_steps_send_in_short_bursts_has_sent(self) -> None:
        story = job().standstill(30)
        count_up(story.node["node_rdma_errors_total"][:, 2], 1)
        sent = story.node["node_rdma_tx_bytes_per_second"]
        sent[np.arange(len(sent)) % 30 != 0] = 5e6
        sent[-30:] = 5e6
        sent[-30:, 2] = 0.0
        assert only("network_hang", story.window()).kinds == {"standstill", "nic_errors", "traffic"}

    def test_errors_on_one_node_while_another_sends_nothing_are_not_its_own_alone(self) -> None:
        story = job().standstill(70)
        count_up(story.node["node_rdma_errors_total"][:, 2], 5, rows=60)
        story.node["node_rdma_tx_bytes_per_second"][-70:] = 5e6
        story.node["node_rdma_tx_bytes_per_second"][-70:, 5] = 0.0
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.asks) == ("n2", "restart_job")

    def test_ranks_that_died_of_a_lost_peer_died_of_the_port_that_is_down(self) -> None:
        story = job().ports().standstill(15)
        for node in story.nodes:
            story.exit(node, 1, 5, ECHO)
        story.link["link_up"][-15:, 4:6] = 0
        verdict = only("network_hang", story.window())
        assert verdict.node == "n2"
        assert verdict.kinds == {"exit", "link_state"}

    def test_a_rank_that_failed_by_itself_is_no_network_hang(self) -> None:
        story = job().ports().exit("n1", -11, 5)
        story.link["link_up"][-15:, 4:6] = 0
        quiet(story, "network_hang")

    def test_errors_and_an_open_collective_on_the_same_node_name_it(self) -> None:
        story = job().standstill(30)
        count_up(story.node["node_rdma_errors_total"][:, 2], 5)
        story.device["nccl_completed_sequence"][-30:, 2] -= 1
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.asks) == ("n2", None)
        assert verdict.kinds == {"standstill", "nic_errors", "collective_completion"}

    def test_a_node_that_alone_sends_nothing_and_has_not_completed_what_its_peers_have_is_named(self) -> None:
        story = job().standstill(30)
        story.device["nccl_completed_sequence"][-30:, 2] -= 1
        story.node["node_rdma_tx_bytes_per_second"][-30:] = 4e6
        story.node["node_rdma_tx_bytes_per_second"][-30:, 2] = 1e3
        verdict = only("network_hang", story.window())
        assert (verdict.node, verdict.asks) == ("n2", None)
        assert verdict.kinds == {"standstill", "traffic", "collective_completion"}

    def test_an_open_collective_accuses_nobody_whose_port_fell_out_of_sight(self) -> None:
        """A port that is down in all rows of a longer standstill may have fallen with its switch."""
        for state, asks in ((1, ["restart_job"]), (0, [])):
            story = job(nodes=9).ports().standstill(ROWS - 1)
            story.device["nccl_sequence"][0] = story.device["nccl_sequence"][1]
            story.device["gpu_tensor_active_ratio"][:] = 0.0
            story.device["nccl_completed_sequence"][:, 8] -= 1
            story.link["link_up"][:, 17] = state
            window = story.window(advanced_s=NOW_S - ROWS - 5, last_step=200.0)
            assert [verdict.asks for verdict in detect("network_hang", window)] == asks

    def test_what_a_node_sent_before_a_pause_counts_when_the_standstill_follows_the_pause(self) -> None:
        story = job().standstill(30)
        story.device["nccl_completed_sequence"][-30:, 2] -= 1
        story.node["node_rdma_tx_bytes_per_second"][-60:] = 4e6
        story.node["node_rdma_tx_bytes_per_second"][-30:, 2] = 0.0
        assert only("network_hang", story.window()).kinds == {"standstill", "traffic", "collective_completion"}

    def trying(self, rows: int, sent: float = 5e7) -> Story:
        """Ranks that report nothing wait; n2's network sends nothing, and all others send little."""
        story = Story(nodes=8, rows=2 * ROWS).hardware()
        for name in [name for name in story.device if name.startswith(("train_", "nccl_"))]:
            del story.device[name]
        story.waiting(rows)
        story.node["node_rdma_tx_bytes_per_second"][-rows:] = sent
        story.node["node_rdma_tx_bytes_per_second"][-rows:, 2] = 0.0
        return story

    def test_a_node_that_alone_sends_nothing_while_every_other_tries_again_is_named_when_it_has_lasted(self) -> None:
        verdict = only("network_hang", self.trying(62).window())
        assert (verdict.node, verdict.asks) == ("n2", None)
        assert verdict.kinds == {"standstill", "traffic"}
        assert verdict.confidence >= 0.9
        quiet(self.trying(50), "network_hang")

    def test_a_node_that_sends_nothing_is_not_named_for_it_where_others_are_as_silent_or_send_much(self) -> None:
        silent = self.trying(62)
        silent.node["node_rdma_tx_bytes_per_second"][-62:, 5] = 5e4
        quiet(silent, "network_hang")
        quiet(self.trying(62, sent=5e8), "network_hang")

    def test_nor_while_most_hosts_write(self) -> None:
        story = self.trying(62)
        story.node["node_disk_write_bytes_per_second"][-62:] = 2e9
        quiet(story, "network_hang")

    def test_one_sign_restarts_nothing_while_most_hosts_write(self) -> None:
        story, writing = job().standstill(70), job().standstill(70)
        for each in (story, writing):
            each.device["nccl_completed_sequence"][-70:, 2] -= 1
        assert only("network_hang", story.window()).asks == "restart_job"
        writing.node["node_disk_write_bytes_per_second"][-70:] = 2e9
        quiet(writing, "network_hang")

    def test_errors_on_one_node_and_an_open_collective_on_another_say_nothing(self) -> None:
        story = job().standstill(70)
        count_up(story.node["node_rdma_errors_total"][:, 2], 5, rows=60)
        story.device["nccl_completed_sequence"][-70:, 5] -= 1
        quiet(story, "network_hang")

    def test_ranks_that_count_from_different_offsets_do_not_lag(self) -> None:
        story = job().ports()
        story.device["nccl_sequence"][:, 6] -= 40
        story.device["nccl_completed_sequence"][:, 6] -= 40
        story.standstill(70)
        story.link["link_up"][-70:, 4:6] = 0
        assert only("network_hang", story.window()).node == "n2"

    def test_rows_of_different_moments_before_the_standstill_are_no_lag(self) -> None:
        story = job().ports()
        jitter = np.random.default_rng(9).integers(0, 30, story.device["nccl_sequence"].shape)
        story.device["nccl_sequence"] += jitter
        story.standstill(70)
        story.device["nccl_sequence"][-70:] = story.device["nccl_sequence"][-71].max() + 1
        story.device["nccl_completed_sequence"][-70:] = story.device["nccl_sequence"][-1] - 1
        story.link["link_up"][-70:, 4:6] = 0
        assert only("network_hang", story.window()).node == "n2"

    def test_the_first_node_that_enqueues_again_after_a_pause_has_not_left_a_collective_open(self) -> None:
        """Its row arrives before its peers', with collectives of the next step outstanding."""
        story = job()
        for name in ("train_step", "nccl_sequence", "nccl_completed_sequence"):
            story.device[name] = story.device[name].copy()
            story.device[name][-80:] = story.device[name][-81]
        story.device["gpu_tensor_active_ratio"][-80:] = 0.0
        story.device["nccl_sequence"][-1, 2] += 6
        assert detect("network_hang", story.window()) == []
        story.device["nccl_sequence"] = story.device["nccl_sequence"].copy()
        story.device["nccl_sequence"][-70:-1, 2] += 6
        assert only("network_hang", story.window()).nodes == ("n2",)  # at rest it is evidence

    def test_a_silent_process_is_the_likelier_culprit(self) -> None:
        story = job().standstill(70)
        count_up(story.node["node_rdma_errors_total"][:, 2], 5, rows=60)
        story.silent_s[5] = 60
        quiet(story, "network_hang")

    def test_another_node_that_lags_in_collectives_is_the_one(self) -> None:
        story = job().ports().standstill(70)
        count_up(story.link["link_errors_total"][:, 4], 5, rows=60)
        story.device["nccl_sequence"][-70:, 6] -= 1
        quiet(story, "network_hang")

    def test_a_standstill_without_network_evidence_says_nothing(self) -> None:
        quiet(job().ports().standstill(70), *NETWORK)

    def test_a_link_that_is_down_while_the_job_goes_on_is_no_hang(self) -> None:
        story = job().ports()
        story.link["link_up"][-70:, 4:6] = 0
        quiet(story, "network_hang")


class TestSwitchDown:
    def test_ports_of_one_switch_that_fall_together_are_one_finding(self) -> None:
        story = racks(job().ports()).standstill(20)
        story.link["link_up"][-20:, 0::2] = 0
        verdict = only("switch_down", story.window())
        assert verdict.fault == "switch_down"
        assert (verdict.node, verdict.nodes) == (None, story.nodes)
        assert "rail0" in verdict.summary
        assert verdict.asks == "notify"
        quiet(story, "network_hang", "nic_degraded")

    def alone(self, downs: dict[int, int]) -> Story:
        """The last of nine nodes has a switch of its own; its ports are down since so many rows ago."""
        story = job(nodes=9).ports().standstill(70)
        story.links = tuple(replace(link, switch="leaf1" if link.node == "n8" else "leaf0") for link in story.links)
        for port, rows in downs.items():
            story.link["link_up"][-rows:, 16 + port] = 0
        return story

    def test_all_ports_at_once_of_the_only_node_on_a_switch_are_what_they_share(self) -> None:
        story = self.alone({0: 70, 1: 70})
        verdict = only("switch_down", story.window())
        assert (verdict.node, verdict.nodes, verdict.asks) == (None, ("n8",), "notify")
        assert "leaf1 is down, or all of the node's network" in verdict.summary
        assert verdict.confidence < 0.9
        quiet(story, "network_hang", "nic_degraded")

    @pytest.mark.parametrize("downs", [{0: 70}, {0: 70, 1: 40}], ids=["one port", "one after the other"])
    def test_one_port_or_ports_that_fall_one_by_one_are_the_nodes_own(self, downs: dict[int, int]) -> None:
        story = self.alone(downs)
        assert only("network_hang", story.window()).node == "n8"
        quiet(story, "switch_down")

    def test_all_ports_of_a_node_whose_switch_serves_others_are_the_nodes_own(self) -> None:
        story = self.alone({0: 70, 1: 70})
        story.links = tuple(replace(link, switch="leaf0") for link in story.links)
        assert only("network_hang", story.window()).node == "n8"
        quiet(story, "switch_down")

    def test_is_reported_in_the_next_row(self) -> None:
        story = job().ports()
        story.link["link_up"][-1:, 0::2] = 0
        assert only("switch_down", story.window()).kinds == {"link_state"}

    def test_nodes_of_one_switch_that_fall_silent_as_the_job_stops(self) -> None:
        story = racks(job(nodes=16)).standstill(20).waiting(19)
        story.heard_s[4:8] = NOW_S - np.array([20.0, 20.4, 19.7, 20.1])
        verdict = only("switch_down", story.window())
        assert verdict.nodes == ("n4", "n5", "n6", "n7")
        assert "leaf1" in verdict.summary
        quiet(story, "node_silent")

    def test_one_that_is_not_yet_silent_long_enough_belongs_to_them(self) -> None:
        story = racks(job(nodes=16)).standstill(11).waiting(10)
        story.heard_s[4:8] = NOW_S - np.array([10.5, 9.6, 9.7, 9.8])
        assert only("switch_down", story.window()).nodes == ("n4", "n5", "n6", "n7")
        quiet(story, "node_silent")

    def test_without_a_topology_nodes_whose_agents_often_say_nothing_for_as_long_may_do_so_at_once(self) -> None:
        story = job(nodes=16).standstill(20).waiting(19)
        story.heard_s[[1, 6, 9]] = NOW_S - 20
        for node in (3, 12):
            for name in story.device:
                story.device[name][20:36, node] = np.nan
        quiet(story, "switch_down")

    def test_without_a_topology_many_at_one_moment_are_no_coincidence(self) -> None:
        story = job(nodes=16).standstill(20).waiting(19)
        story.heard_s[[1, 6, 9]] = NOW_S - 20
        verdict = only("switch_down", story.window())
        assert verdict.confidence < 0.9
        quiet(story, "node_silent")

    def test_explains_more_than_half_of_the_job_only_by_name(self) -> None:
        story = racks(job(nodes=6), each=4).standstill(20).waiting(19)
        story.heard_s[:4] = NOW_S - 20
        assert only("switch_down", story.window()).nodes == story.nodes[:4]
        story.switches = ("",) * 6
        assert detect("switch_down", story.window()) == []

    def test_one_silent_node_is_its_own(self) -> None:
        story = racks(job(nodes=16)).standstill(20).waiting(19)
        story.heard_s[5] = NOW_S - 20
        assert only("node_silent", story.window()).node == "n5"
        quiet(story, "switch_down")

    def test_silences_of_different_moments_are_each_their_own(self) -> None:
        story = job(nodes=16).standstill(30).waiting(29)
        story.heard_s[5], story.heard_s[9] = NOW_S - 30, NOW_S - 26
        assert [v.node for v in detect("node_silent", story.window())] == ["n5", "n9"]
        quiet(story, "switch_down")

    def test_a_management_network_that_is_out_is_reported_once(self) -> None:
        story = racks(job(nodes=16))
        story.heard_s[4:8] = NOW_S - 320
        verdict = only("node_silent", story.window())
        assert (verdict.node, verdict.nodes, verdict.asks) == (None, story.nodes[4:8], "notify")
        quiet(story, "switch_down")

    def test_agents_that_said_goodbye_are_no_switch(self) -> None:
        story = racks(job(nodes=16)).standstill(20)
        story.heard_s[4:8] = NOW_S - 20
        story.farewell[4:8] = True
        quiet(story, "switch_down", "node_silent")

    def test_ports_down_all_over_the_place_are_no_switch(self) -> None:
        story = racks(job(nodes=40).ports())
        story.link["link_up"][-40:, 10] = 0
        story.link["link_up"][-20:, 41] = 0
        quiet(story, "switch_down")


class TestNetworkCongestion:
    def congested(self, nodes: slice, rows: int = SINCE) -> Story:
        story = slower_by_network(job(nodes=16), rows=rows)
        for node in range(16)[nodes]:
            count_up(story.node["node_congestion_notifications_total"][:, node], 5_000, rows)
            story.node["node_pfc_rx_pause_packets_per_second"][-rows:, node] = 2_000
        return story

    def test_many_nodes_with_notifications_and_longer_collectives(self) -> None:
        verdict = only("network_congestion", self.congested(slice(None)).window())
        assert (verdict.fault, verdict.node, len(verdict.nodes)) == ("network_congestion", None, 16)
        assert verdict.asks == "notify"
        assert verdict.kinds == {"congestion", "collective_time"}

    def test_one_switch_is_named_with_its_nodes(self) -> None:
        story = racks(self.congested(slice(4, 8)))
        verdict = only("network_congestion", story.window())
        assert verdict.nodes == story.nodes[4:8]
        assert "leaf1" in verdict.summary

    def test_pauses_that_spread_from_one_switch_to_all_are_that_switchs(self) -> None:
        story = racks(self.congested(slice(None)))
        story.node["node_pfc_rx_pause_packets_per_second"][-SINCE:, 4:8] *= 1.5
        verdict = only("network_congestion", story.window())
        assert verdict.nodes == story.nodes[4:8]
        assert "leaf1" in verdict.summary

    @pytest.mark.parametrize(("lone", "named"), [(1_000, 8), (1_800, 9)], ids=["clearly less", "within the spread"])
    def test_one_node_elsewhere_tells_the_switch_only_when_it_gets_clearly_less(self, lone: float, named: int) -> None:
        """Of nodes that all get pauses one is the least hit by chance."""
        story = slower_by_network(job(nodes=9))
        story.switches = ("leaf0",) * 8 + ("leaf1",)
        received = story.node["node_pfc_rx_pause_packets_per_second"]
        received[-SINCE:] = np.append(np.linspace(2_000, 2_600, 8), lone)
        assert len(only("network_congestion", story.window()).nodes) == named

    def test_pauses_that_all_switches_get_alike_are_the_networks(self) -> None:
        assert len(only("network_congestion", racks(self.congested(slice(None))).window()).nodes) == 16

    def test_accuses_no_nic(self) -> None:
        quiet(self.congested(slice(None)), "nic_degraded", "network_hang", "switch_down")

    def test_a_short_burst_is_not_reported(self) -> None:
        quiet(self.congested(slice(None), rows=8))

    def test_notifications_that_slow_nothing_are_weather(self) -> None:
        story = job(nodes=16)
        for node in range(16):
            count_up(story.node["node_congestion_notifications_total"][:, node], 5_000)
        quiet(story)

    def test_longer_collectives_alone_are_not_congestion(self) -> None:
        quiet(slower_by_network(job(nodes=16)))

    def test_longer_compute_on_all_ranks_is_not_congestion(self) -> None:
        story = self.congested(slice(None))
        story.device["train_compute_seconds"][-SINCE:] += 0.15
        quiet(story, "network_congestion")

    def test_one_sender_of_pauses_explains_what_the_others_receive(self) -> None:
        story = self.congested(slice(None))
        story.node["node_pfc_tx_pause_packets_per_second"][-SINCE:, 3] = 5_000
        quiet(story, "network_congestion")
        assert only("nic_degraded", story.window()).node == "n3"


class TestStorageStall:
    def stalled(self, nodes: slice = slice(None), rows: int = SINCE) -> Story:
        story = job()
        story.node["node_iowait_ratio"][-rows:, nodes] = 0.4
        story.node["node_io_pressure_ratio"][-rows:, nodes] = 0.5
        story.node["node_blocked_tasks"][-rows:, nodes] = 12
        return story

    def waiting(self, story: Story, ratio: float = 0.5) -> Story:
        story.device["train_data_wait_seconds"] = np.full((ROWS, len(story.series)), 0.01)
        story.device["train_data_wait_seconds"][-SINCE:] += ratio * 0.5
        story.device["train_step_seconds"][-SINCE:] *= 1 + ratio
        return story

    def test_many_nodes_wait_for_io_and_all_steps_wait_for_data(self) -> None:
        verdict = only("storage_stall", self.waiting(self.stalled()).window())
        assert (verdict.fault, verdict.node, verdict.nodes) == ("storage_stall", None, ())
        assert verdict.kinds == {"io", "data_wait"}
        assert verdict.asks == "notify"
        assert verdict.slowdown_ratio == pytest.approx(0.5, abs=0.02)

    def test_a_standstill_with_many_nodes_waiting_for_io(self) -> None:
        verdict = only("storage_stall", self.stalled().standstill(SINCE).window())
        assert verdict.kinds == {"io", "standstill"}

    def test_nodes_whose_nfs_hangs_show_blocked_tasks_alone(self) -> None:
        story = job().standstill(SINCE)
        story.node["node_blocked_tasks"][-SINCE:] = 12
        assert "standstill" in only("storage_stall", story.window()).kinds

    def test_a_checkpoint_that_nobody_announced_gets_its_time(self) -> None:
        story = self.stalled().standstill(SINCE)
        story.node["node_disk_write_bytes_per_second"][-SINCE:] = 2e9
        quiet(story, "storage_stall")

    def test_and_is_then_reported_so_that_nothing_restarts_it(self) -> None:
        story = self.stalled(rows=70).standstill(70)
        story.node["node_disk_write_bytes_per_second"][-70:] = 2e9
        assert "standstill" in only("storage_stall", story.window()).kinds

    def test_a_checkpoint_has_its_own_history(self) -> None:
        story = self.stalled().standstill(SINCE)
        story.phase = ["checkpoint"] * 8
        story.phase_since_s[:] = NOW_S - SINCE
        story.pauses = [Pause("checkpoint", 50.0)]
        quiet(story, "storage_stall")

    def test_a_node_that_stands_by_waits_for_nothing_and_does_not_count(self) -> None:
        story = self.waiting(self.stalled(slice(0, 2)))
        busy = [column for column, series in enumerate(story.series) if series.node in ("n0", "n1")]
        for metric in ("gpu_tensor_active_ratio", "gpu_utilization_ratio"):
            story.device[metric][:, [c for c in range(len(story.series)) if c not in busy]] = 0.0
        verdict = only("storage_stall", story.window())
        assert (verdict.nodes, verdict.node) == ((), None)

    def test_a_checkpoint_beyond_its_history_is_a_stall(self) -> None:
        story = self.stalled(rows=80).standstill(80)
        story.phase = ["checkpoint"] * 8
        story.phase_since_s[:] = NOW_S - 80
        story.pauses = [Pause("checkpoint", 20.0)]
        assert "checkpoint" in only("storage_stall", story.window()).summary

    def test_one_node_that_waits_for_io_is_its_hosts_trouble(self) -> None:
        story = self.stalled(slice(2, 3))
        self.waiting(story)
        story.device["train_data_wait_seconds"][-SINCE:] -= 0.25
        story.device["train_data_wait_seconds"][-SINCE:, 2] += 0.25
        verdict = only("storage_stall", story.window())
        assert (verdict.node, verdict.asks) == ("n2", "notify")
        assert verdict.confidence < 0.9

    def test_io_that_the_job_does_not_feel_is_none_of_ours(self) -> None:
        quiet(self.stalled())
        quiet(self.stalled(slice(2, 3)))

    def test_io_that_was_always_so_explains_no_standstill(self) -> None:
        story = self.stalled(rows=ROWS).standstill(SINCE)
        quiet(story, "storage_stall")

    def test_slow_collectives_are_not_the_storages(self) -> None:
        quiet(slower_by_network(self.stalled()), "storage_stall")

    def test_is_blind_without_io_metrics(self) -> None:
        with pytest.raises(Blind, match="I/O"):
            detect("storage_stall", Story().window())


class TestOrdinaryLife:
    def test_a_healthy_job(self) -> None:
        quiet(job().ports())
        quiet(racks(job(nodes=16, gpus=4).ports(4)))

    def test_an_evaluation_in_which_all_traffic_falls_to_nothing(self) -> None:
        story = job().ports().standstill(SINCE)
        story.phase = ["eval"] * 8
        story.phase_since_s[:] = NOW_S - SINCE
        for metrics in (story.node, story.link):
            for name in metrics:
                if "bytes_per_second" in name:
                    metrics[name][-SINCE:] = 0
        quiet(story)

    def test_an_agent_that_restarted_begins_its_counters_anew(self) -> None:
        story = job().ports()
        for values in (*story.node.values(), *story.link.values()):
            values[-20:-12, 2] = np.nan
        story.node["node_rdma_errors_total"][:-20, 2] = 70_000.0
        story.link["link_errors_total"][:-20, 2] = 70_000.0
        quiet(story)

    def test_the_first_rows_of_a_job(self) -> None:
        for rows in (1, 2, 3, 5):
            story = Story(nodes=8, rows=rows).hardware().ports()
            story.node["node_rdma_errors_total"] += 1e6
            story.link["link_downed_total"] += 7
            quiet(story, "nic_degraded", "network_congestion", "switch_down", "node_silent")

    def test_gaps_in_all_metrics(self) -> None:
        story = racks(job(nodes=16).ports())
        rng = np.random.default_rng(5)
        for values in (*story.node.values(), *story.link.values()):
            values[rng.random(values.shape) < 0.3] = np.nan
        quiet(story)
