from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.ingest.remote_write import mapping, wire
from eagle_eye.server.ingest.remote_write.intake import (
    FORGET_S,
    CellOf,
    RefusedSamples,
    RemoteWriteIntake,
    Taken,
    own_cell,
)
from eagle_eye.server.ingest.settings import RemoteWriteSettings
from eagle_eye.server.model.identity import SETTLED_S, Clusters, NameClaims, Naming
from eagle_eye.server.model.records import Watched
from tests.server.remote_write.requests import STALE, Written, series, v1

T = 1_700_000_000.0
GPU = {"gpu": "0", "UUID": "GPU-0", "Hostname": "n1", "instance": "10.0.0.1:9400", "job": "dcgm"}
NODE = {"instance": "n1:9100", "job": "node"}
SETTINGS = RemoteWriteSettings()
TABLE = mapping.load()
NODES_MAX = 3


class Site:
    """An intake and what it made of samples: the values of all rows, as they came to be known."""

    def __init__(
        self, series_max: int = 1_000, interval_s: float | None = 15.0, watched: dict[int, Watched] | None = None
    ) -> None:
        remembered, self.claims = watched or {}, NameClaims()
        naming = Naming(SETTINGS.node_labels, SETTINGS.cluster_labels, Clusters())
        self.intake = RemoteWriteIntake(
            *(TABLE, naming, self.claims, SETTINGS.job_labels, series_max, NODES_MAX),
            lambda _node: interval_s,
            lambda _node: remembered,
        )
        self.refused: dict[str, RefusedSamples] = {}
        self.values: dict[tuple[str, int | str, str, float], float] = {}
        self.events: list[tuple[str, int, float, object]] = []
        self.keeps = True

    def send(self, *written: Written, now_s: float | None = None, cell_of: CellOf = own_cell) -> Taken:
        read = wire.read_v1(v1(*written), TABLE.wanted, 1_000)
        latest_s = max((time_s for one in written for time_s, _ in one.samples), default=T)
        taken = Taken()
        self.intake.add_series(read.series, now_s or latest_s + 1, self.refused.get, taken, cell_of=cell_of)
        for moment in taken.moments if self.keeps else ():
            for rows in moment.values.values():
                for key, row in rows.items():
                    for metric, value in row.items():
                        self.values[moment.node.name, key, metric, moment.time_s - T] = value
            for event in moment.events:
                said = next(
                    (event.attributes[key] for key in ("code", "model", "what") if key in event.attributes), None
                )
                self.events.append((event.kind, event.device, event.time_s - T, said))
            moment.events.clear()
            moment.kept = moment.version
        return taken

    def row(self, metric: str, node: str = "n1", key: int | str = -1) -> list[tuple[float, float]]:
        """Return what is known of one series: (seconds since T, value)."""
        return sorted((at, value) for (n, k, m, at), value in self.values.items() if (n, k, m) == (node, key, metric))


def dcgm(name: str, value: float, at: float = 0.0, **labels: str) -> Written:
    return series(f"DCGM_FI_{name}", value, T + at, **{**GPU, **labels})


def node(name: str, value: float, at: float = 0.0, **labels: str) -> Written:
    return series(f"node_{name}", value, T + at, **{**NODE, **labels})


# The units of the table's series, by their own names.
SERIES = {use.origin.series: use.origin.unit for uses in TABLE.metrics.values() for use in uses}
SERIES |= {event.series: "" for event in TABLE.events.values()}


def meaning(name: str) -> tuple[tuple[mapping.Use, ...], mapping.EventRule | None]:
    return TABLE.metrics.get(name, ()), TABLE.events.get(name)


def by_opentelemetry(name: str, unit: str, *, counter: bool) -> str:
    """Translate a name as the collector's exporter does with add_metric_suffixes; units are words already."""
    words = name.split("_")
    main, per, second = unit.partition("_per_")
    words += [main] if main and main not in words else []
    words += [f"per_{second}"] if per else []
    return "_".join([word for word in words if word != "total"] + ["total"] if counter else words)


def test_every_rule_is_of_the_catalogue_and_makes_each_metric_once() -> None:
    made = {(use.rule.to, use.scope) for uses in TABLE.metrics.values() for use in uses}
    assert made == {(to, catalogue.BY_NAME[to].scope) for to, _ in made}
    rules = {id(use.rule): use.rule.to for uses in TABLE.metrics.values() for use in uses}
    assert len(rules) == len(set(rules.values()))


@pytest.mark.parametrize(
    ("name", "value", "metric", "expected"),
    [
        ("DEV_SM_CLOCK", 1980, "gpu_sm_clock_hertz", 1.98e9),
        ("DEV_MEM_CLOCK", 2619, "gpu_memory_clock_hertz", 2.619e9),
        ("DEV_FB_USED", 1024, "gpu_memory_used_bytes", 2.0**30),
        ("DEV_GPU_UTIL", 97, "gpu_utilization_ratio", 0.97),
        ("PROF_PIPE_TENSOR_ACTIVE", 0.4, "gpu_tensor_active_ratio", 0.4),
        ("DEV_ECC_DBE_VOL_TOTAL", 0, "gpu_ecc_uncorrected_total", 0.0),
    ],
)
def test_dcgms_units_become_the_catalogues(name: str, value: float, metric: str, expected: float) -> None:
    site = Site()
    site.send(dcgm(name, value))
    assert site.row(metric, key=0) == [pytest.approx((0.0, expected))]


@pytest.mark.parametrize(
    "value", [float(0x7FFFFFFFFFFFFFF0), 140737488355328.0, 140737488355330.0, float(0x7FFFFFF0), float(0x7FFFFFF2)]
)
def test_dcgms_blanks_are_not_measurements(value: float) -> None:
    site = Site()
    taken = site.send(dcgm("DEV_MEMORY_TEMP", value), dcgm("DEV_ECC_SBE_VOL_TOTAL", value))
    assert (site.values, taken.left_out, taken.refused) == ({}, {"blank": 2}, {})


@pytest.mark.parametrize(
    ("value", "reason"), [(101.0, "out_of_range"), (-1.0, "out_of_range"), (math.nan, "not_a_number")]
)
def test_what_cannot_be_is_left_out(value: float, reason: str) -> None:
    site = Site()
    assert site.send(dcgm("DEV_GPU_UTIL", value)).left_out == {reason: 1}
    assert site.values == {}


def test_what_a_gpu_is_called_is_told_every_hour() -> None:
    site = Site()
    for minute in range(0, 65, 5):
        for name, value in (("GPU_UTIL", 97.0), ("GPU_TEMP", 60.0)):
            site.send(dcgm(f"DEV_{name}", value, 60.0 * minute, modelName="NVIDIA H100 80GB HBM3"))
    assert site.events == [("inventory", 0, 60.0 * minute, "NVIDIA H100 80GB HBM3") for minute in (0, 60)]


def test_a_gpu_without_a_name_is_reported_as_ever() -> None:
    site = Site()
    site.send(dcgm("DEV_GPU_UTIL", 97), dcgm("DEV_GPU_TEMP", 50, gpu="1", modelName=""), node("procs_blocked", 1))
    assert (site.events, len(site.values)) == ([], 3)


def test_a_name_that_was_not_kept_comes_with_the_next_try() -> None:
    site = Site()
    site.keeps = False
    site.send(dcgm("DEV_GPU_UTIL", 97, modelName="H100"))
    site.keeps = True
    site.send(dcgm("DEV_GPU_UTIL", 97, modelName="H100"))
    assert site.events == [("inventory", 0, 0.0, "H100")]


def test_energy_tells_of_the_power_where_nothing_else_does() -> None:
    site = Site()
    for at, millijoules in ((0.0, 1e6), (10.0, 8e6)):
        site.send(dcgm("DEV_TOTAL_ENERGY_CONSUMPTION", millijoules, at))
    assert site.row("gpu_power_watts", key=0) == [pytest.approx((10.0, 700.0))]
    site.send(dcgm("DEV_POWER_USAGE", 650.0, 20.0), dcgm("DEV_TOTAL_ENERGY_CONSUMPTION", 15e6, 20.0))
    assert site.row("gpu_power_watts", key=0)[-1] == (20.0, 650.0)


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"Hostname": "a", "instance": "b:1"}, "a"),
        ({"hostname": "a", "instance": "b:1"}, "a"),
        ({"eagle_eye_node": "a", "Hostname": "b"}, "a"),
        ({"instance": "a:9400"}, "a"),
        ({"instance": "a"}, "a"),
        ({"instance": "[fd00::7]:9400"}, "fd00::7"),
        ({"instance": "10.1.2.3:9400"}, "10.1.2.3"),
    ],
)
def test_a_node_is_named_by_the_first_label_that_does(labels: dict[str, str], name: str) -> None:
    site = Site()
    site.send(series("DCGM_FI_DEV_GPU_TEMP", 50.0, T, gpu="0", **labels))
    assert [key[0] for key in site.values] == [name]


def test_parts_of_a_gpu_and_unknown_devices_are_left_out() -> None:
    site = Site()
    taken = site.send(dcgm("DEV_GPU_TEMP", 50.0, GPU_I_ID="3"), dcgm("DEV_GPU_TEMP", 50.0, gpu="left"))
    assert (site.values, taken.left_out) == ({}, {"part_of_a_gpu": 1, "no_row": 1})


def test_processor_time_becomes_ratios_of_all_processors() -> None:
    site = Site()
    modes = {"idle": 4.0, "iowait": 1.0, "steal": 0.5, "user": 4.5}
    for at in (0.0, 10.0):
        cpus = [
            node("cpu_seconds_total", at / 10 * grown, at, cpu=cpu, mode=mode)
            for cpu in ("0", "1")
            for mode, grown in modes.items()
        ]
        site.send(*cpus)
    assert site.row("node_cpu_utilization_ratio") == [pytest.approx((10.0, 0.45))]
    assert site.row("node_iowait_ratio") == [pytest.approx((10.0, 0.1))]
    assert site.row("node_cpu_steal_ratio") == [pytest.approx((10.0, 0.05))]


def bytes_in(at: float, **by_device: float) -> list[Written]:
    return [node("network_receive_bytes_total", value, at, device=name) for name, value in by_device.items()]


def test_a_sum_is_told_once_all_that_it_is_made_of_came_however_many_requests_bring_it() -> None:
    site = Site()
    site.send(*bytes_in(0.0, eth0=0.0, ib0=0.0, lo=0.0))
    site.send(*bytes_in(10.0, eth0=1_000.0))
    assert site.row("node_network_rx_bytes_per_second") == []
    site.send(*bytes_in(20.0, eth0=2_000.0))  # another connection is ahead
    site.send(*bytes_in(10.0, ib0=3_000.0, lo=1e9))
    assert site.row("node_network_rx_bytes_per_second") == [pytest.approx((10.0, 400.0))]


def test_an_interface_that_ended_is_waited_for_no_more() -> None:
    site = Site()
    site.send(*bytes_in(0.0, eth0=0.0, ib0=0.0))
    site.send(*bytes_in(10.0, eth0=1_000.0, ib0=STALE))
    site.send(*bytes_in(20.0, eth0=2_000.0))
    assert site.row("node_network_rx_bytes_per_second")[-1] == pytest.approx((20.0, 100.0))


def test_a_counter_that_reset_has_no_rate_until_its_next_sample() -> None:
    site = Site()
    reasons = [dict(site.send(*bytes_in(at, eth0=value)).left_out) for at, value in ((0, 500), (10, 100), (20, 300))]
    assert reasons == [{}, {"counter_reset": 1}, {}]
    assert site.row("node_network_rx_bytes_per_second") == [pytest.approx((20.0, 20.0))]


def test_a_ratio_needs_both_of_its_parts() -> None:
    site = Site()
    site.send(node("memory_MemTotal_bytes", 100.0), node("memory_MemAvailable_bytes", 25.0))
    site.send(node("memory_MemTotal_bytes", 100.0, 15.0))
    assert site.row("node_memory_used_ratio") == []
    site.send(node("memory_MemAvailable_bytes", 25.0, 15.0))
    assert site.row("node_memory_used_ratio") == [(15.0, 0.75)]


def test_ports_are_links_by_the_names_that_agents_use() -> None:
    site = Site()
    for at in (0.0, 15.0):
        for port, state in (("1", 4.0), ("2", 1.0)):
            site.send(node("infiniband_state_id", state, at, device="mlx5_0", port=port))
            site.send(node("infiniband_link_downed_total", 3.0, at, device="mlx5_0", port=port))
    assert site.row("link_up", key="mlx5_0")[-1] == (15.0, 1.0)
    assert site.row("link_up", key="mlx5_0:2")[-1] == (15.0, 0.0)
    assert site.row("node_rdma_link_downed_total")[-1] == (15.0, 6.0)


def test_a_port_that_came_later_adds_only_what_happens_since() -> None:
    site = Site()
    for at in (0.0, 15.0):
        site.send(node("infiniband_link_downed_total", 1.0, at, device="mlx5_0", port="1"))
    for at, downed in ((30.0, 50.0), (45.0, 51.0)):
        site.send(
            node("infiniband_link_downed_total", 1.0, at, device="mlx5_0", port="1"),
            node("infiniband_link_downed_total", downed, at, device="mlx5_1", port="1"),
        )
    assert site.row("node_rdma_link_downed_total")[-2:] == [(30.0, 1.0), (45.0, 2.0)]


def test_dcgms_sum_of_nvlinks_is_a_rate_in_its_own_unit() -> None:
    site = Site()
    for at, value in ((0.0, 0.0), (15.0, 200_000.0), (30.0, 120_000.0)):
        site.send(dcgm("DEV_NVLINK_BANDWIDTH_TOTAL", value, at))
    assert site.row("gpu_nvlink_bytes_per_second", key=0) == [(0.0, 0.0), (15.0, 2.048e11), (30.0, 1.2288e11)]


def test_a_total_stays_whole_over_an_outage() -> None:
    site = Site()
    for at in (0.0, 15.0, 4_000.0, 4_015.0):
        for name, value in (("CORRECTABLE", 5.0), ("UNCORRECTABLE", 1.0)):
            site.send(dcgm(f"DEV_{name}_REMAPPED_ROWS", value, at))
    assert {value for at, value in site.row("gpu_remapped_rows_total", key=0) if at > 0} == {6.0}


def test_a_series_that_vanished_without_a_word_is_waited_for_only_so_long() -> None:
    site = Site()
    site.send(*bytes_in(0.0, eth0=0.0, ib0=0.0))
    for at in range(15, 400, 15):
        site.send(*bytes_in(at, eth0=100.0 * at))
    known = site.row("node_network_rx_bytes_per_second")
    assert 300.0 < known[0][0] < 345.0
    assert known[0][1] == pytest.approx(100.0)


def test_nodes_beyond_the_limit_are_refused_also_when_they_come_in_one_request() -> None:
    taken = Site().send(*(dcgm("DEV_GPU_TEMP", 50.0, Hostname=f"n{i}") for i in range(NODES_MAX + 2)))
    assert (len(taken.moments), taken.refused) == (NODES_MAX, {"too_many_nodes": 2})


def test_links_of_a_node_are_limited_metric_by_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.ingest.remote_write.intake.LINKS_MAX", 2)
    site = Site()
    for at in (0.0, 15.0):
        for port in ("1", "2", "3"):
            for name, value in (("state_id", 4.0), ("link_downed_total", 3.0)):
                site.send(node(f"infiniband_{name}", value, at, device="mlx5_0", port=port))
    for metric in ("link_up", "link_downed_total"):
        assert {key for _, key, name, _ in site.values if name == metric} == {"mlx5_0", "mlx5_0:2"}


def test_bus_bandwidth_is_the_mean_over_the_widest_communicators_collectives() -> None:
    site = Site()
    seen = ((300.0, "8", "AllReduce"), (40.0, "64", "AllReduce"), (20.0, "64", "AllGather"))
    for at in (0.0, 30.0):
        for gbs, ranks, kind in seen:
            labels = {"node": "n1", "gpu": "GPU3", "nranks": ranks, "collective": kind, "comm_name": "c"}
            site.send(series("nccl_bus_bandwidth_gbs", gbs, T + at, instance="10.0.0.1:9100", **labels))
    assert site.row("nccl_bus_bandwidth_bytes_per_second", key=3)[-1] == pytest.approx((30.0, 30e9))


def xids(site: Site, codes: Iterable[tuple[float, float]], **labels: str) -> list[tuple[str, int, float, object]]:
    for at, code in codes:
        site.send(dcgm("DEV_GPU_TEMP", 50.0, at), dcgm("DEV_XID_ERRORS", code, at, **labels))
    return site.events


def test_an_xid_is_an_event_when_its_gauge_changes_and_only_then() -> None:
    assert xids(Site(), [(0, 0), (15, 79), (30, 79), (45, 0), (60, 79)]) == [
        ("xid", 0, 15.0, 79),
        ("xid", 0, 60.0, 79),
    ]


def facts(site: Site) -> list[tuple[int, float, object]]:
    return [(device, at, what) for kind, device, at, what in site.events if kind == "host_error"]


def test_what_dcgm_s_health_fails_for_is_told_when_it_begins() -> None:
    site = Site()
    for at, told in (
        (0, [("ALL", "DCGM_FR_OK", 0.0), ("THERMAL", "DCGM_FR_THERMAL_VIOLATIONS", 20.0)]),
        (15, [("ALL", "DCGM_FR_FALLEN_OFF_BUS", 10.0)]),
        (90, [("ALL", "DCGM_FR_FALLEN_OFF_BUS", 20.0)]),
        (105, [("ALL", "DCGM_FR_FALLEN_OFF_BUS", 20.0)]),
    ):
        site.send(
            dcgm("DEV_GPU_TEMP", 50.0, at),
            *(
                series("DCGM_EXP_GPU_HEALTH_STATUS", value, T + at, **GPU, health_watch=watch, health_error_code=code)
                for watch, code, value in told
            ),
        )
    assert facts(site) == [(0, 90.0, "gpu_lost")]


@pytest.mark.parametrize("name", ["DEV_GPU_RECOVERY_ACTION", "DEV_GET_GPU_RECOVERY_ACTION"])
def test_the_recovery_that_the_driver_asks_for_is_told_when_it_changes(name: str) -> None:
    site = Site()
    for at, action in ((0, 0), (15, 1), (30, 1), (45, 5), (60, 0)):
        site.send(dcgm(name, action, at))
    assert facts(site) == [(0, 15.0, "gpu_reset_required"), (0, 60.0, "gpu_repaired")]


def test_an_xid_that_stood_there_at_first_sight_is_no_news() -> None:
    assert xids(Site(), [(0, 79), (15, 79)]) == []


@pytest.mark.parametrize(("code", "reported"), [(31.0, 0), (0.0, 0), (79.0, 1)], ids=["the same", "none", "another"])
def test_an_xid_at_first_sight_is_news_where_another_is_remembered(code: float, reported: int) -> None:
    site = Site(watched={0: Watched(T - 1_000.0, T - 900.0, 31.0)})
    assert len(xids(site, [(0, code), (15, code)])) == reported


def test_samples_of_before_a_remembered_xid_that_come_again_are_no_news() -> None:
    site = Site(watched={0: Watched(T - 1_000.0, T + 15.0, 79.0)})
    assert xids(site, [(0, 0), (15, 79), (30, 79)]) == []


def test_an_xid_of_a_gauge_that_appears_is_news_where_the_gpu_is_remembered_without() -> None:
    assert len(xids(Site(watched={0: Watched(T - 1_000.0)}), [(0, 31)])) == 1


def test_an_xid_that_describes_itself_by_labels_is_told_once() -> None:
    site = Site()
    xids(site, [(0, 0)], err_code="0")
    assert xids(site, [(15, 79), (30, 79)], err_code="79", err_msg="lost") == [("xid", 0, 15.0, 79)]


@pytest.mark.parametrize(("watched_s", "reported"), [(30.0, 0), (90.0, 1)])
def test_an_xid_of_a_gauge_that_appears_is_news_once_the_gpu_was_watched_long_enough(
    watched_s: float, reported: int
) -> None:
    site = Site()
    for at in range(0, int(watched_s), 15):
        site.send(dcgm("DEV_GPU_TEMP", 50.0, at))
    assert len(xids(site, [(watched_s, 31)])) == reported


def test_a_sample_that_came_twice_or_late_changes_nothing() -> None:
    site = Site()
    site.send(dcgm("DEV_GPU_TEMP", 50.0, 15.0))
    assert site.send(dcgm("DEV_GPU_TEMP", 99.0, 15.0)).left_out == {"duplicate": 1}
    assert site.send(dcgm("DEV_GPU_TEMP", 99.0, 0.0)).left_out == {"out_of_order": 1}
    assert site.row("gpu_temperature_celsius", key=0) == [(15.0, 50.0)]


def test_what_could_not_be_kept_is_taken_again_with_its_events() -> None:
    site = Site()
    site.send(dcgm("DEV_GPU_TEMP", 50.0), dcgm("DEV_XID_ERRORS", 0.0))
    again = [dcgm("DEV_GPU_TEMP", 51.0, 15.0), dcgm("DEV_XID_ERRORS", 79.0, 15.0)]
    site.keeps = False
    site.send(*again)
    site.keeps = True
    assert site.send(*again).left_out == {}
    assert site.row("gpu_temperature_celsius", key=0)[-1] == (15.0, 51.0)
    assert site.events == [("xid", 0, 15.0, 79)]


def test_whether_an_exporter_that_is_no_node_answers_is_left_out_and_refused_to_nobody() -> None:
    site = Site()
    site.refused = {name: RefusedSamples("node", "the token speaks for others", True) for name in ("10.0.0.1", "n9")}
    up = series("up", 1.0, T, instance="10.0.0.1:9400", job="dcgm")
    for _ in range(2):
        taken = site.send(dcgm("DEV_GPU_TEMP", 50.0), up)
        assert (taken.refused, taken.left_out["unmapped"]) == ({}, 1)
    assert site.send(dcgm("DEV_GPU_TEMP", 50.0, Hostname="n9")).refused == {"node": 1}


@pytest.mark.parametrize(
    ("gaps_s", "expected"),
    [((15, 15), 15.0), ((60, 60), 60.0), ((1, 14, 1), 14.0), ((15, 4_000, 15, 15), 15.0), ((15,), None)],
    ids=["15 s", "60 s", "two Prometheus servers", "an outage between", "two scrapes only"],
)
def test_the_pace_is_that_of_the_scrapes(gaps_s: tuple[int, ...], expected: float | None) -> None:
    site, at = Site(interval_s=None), 0.0
    taken = site.send(dcgm("DEV_GPU_TEMP", 50.0))
    for gap_s in gaps_s:
        at += gap_s
        taken = site.send(dcgm("DEV_GPU_TEMP", 50.0, at))
    (moment,) = taken.moments
    assert moment.node.interval_s == expected


def test_a_jobs_label_counts_for_the_nodes_other_series() -> None:
    site = Site()
    (labelled,) = site.send(dcgm("DEV_GPU_TEMP", 50.0, eagle_eye_job="llama")).moments
    (bare,) = site.send(node("procs_blocked", 0.0)).moments
    assert (labelled.job, bare.job, bare.node.labelled_job(T + 1)) == ("llama", None, "llama")


def test_a_target_that_is_down_says_nothing_about_its_node() -> None:
    site = Site()
    assert site.send(series("up", 0.0, T, **NODE)).moments == {}
    (moment,) = site.send(node("procs_blocked", 0.0)).moments
    assert site.send(series("up", 0.0, T + 1, **NODE)).moments == {}
    assert moment.node.targets == {"node n1:9100": False}


def test_nodes_that_are_refused_are_refused_by_name_and_the_others_taken() -> None:
    site = Site()
    site.refused["n2"] = RefusedSamples("node", "n2 is not yours", True)
    site.refused["n3"] = RefusedSamples("has_agent", "", False)
    names = ("n1", "n2", "n3")
    taken = site.send(*(dcgm("DEV_GPU_TEMP", 50.0, Hostname=name) for name in names))
    assert ([moment.node.name for moment in taken.moments], taken.complaint) == (["n1"], "n2 is not yours")
    assert (taken.refused, taken.left_out) == ({"node": 1}, {"has_agent": 1})


def test_a_series_that_names_no_node_is_refused_with_the_labels_that_would() -> None:
    taken = Site().send(series("DCGM_FI_DEV_GPU_TEMP", 50.0, T, gpu="0"))
    assert taken.refused == {"node": 1}
    assert "eagle_eye_node" in taken.complaint


def test_a_time_that_is_none_is_refused() -> None:
    taken = Site().send(dcgm("DEV_GPU_TEMP", 50.0, -T), now_s=T)
    assert (taken.refused, taken.moments) == ({"time": 1}, {})


@pytest.mark.parametrize("at", [6.0, 3_600.0, 1e9, 1e12, 1.0 - T])
def test_a_time_that_cannot_be_is_of_its_receipt_and_counted(at: float) -> None:
    site = Site()
    taken = site.send(dcgm("DEV_GPU_TEMP", 50.0, at), now_s=T)
    assert site.row("gpu_temperature_celsius", key=0) == [(0.0, 50.0)]
    assert (taken.refused, taken.moved) == ({}, {"n1": 1})
    site.send(dcgm("DEV_GPU_TEMP", 51.0, 15.0))  # its series is not left out until that time has come
    assert site.row("gpu_temperature_celsius", key=0)[-1] == (15.0, 51.0)


def test_the_samples_of_a_sender_that_is_ahead_are_moved_by_as_much() -> None:
    site, taken = Site(), Taken()
    read = wire.read_v1(v1(dcgm("DEV_GPU_TEMP", 50.0, 60.0)), TABLE.wanted, 1_000)
    site.intake.add_series(read.series, T, site.refused.get, taken, -61.0)
    assert [moment.time_s for moment in taken.moments] == [T - 1.0]
    assert taken.moved == {"n1": 1}


def test_beyond_the_limit_new_series_are_refused_until_others_are_forgotten() -> None:
    site = Site(series_max=1)
    site.send(dcgm("DEV_GPU_TEMP", 50.0))
    assert site.send(dcgm("DEV_SM_CLOCK", 1980.0)).refused == {"series_limit": 1}
    assert site.send(dcgm("DEV_GPU_TEMP", 50.0, 15.0)).refused == {}
    for at in (FORGET_S, 2 * FORGET_S):
        site.send(now_s=T + 15 + at)
    assert site.send(dcgm("DEV_SM_CLOCK", 1980.0, 2 * FORGET_S)).refused == {}


def test_rows_of_devices_nodes_and_links_stand_apart() -> None:
    site = Site()
    (moment,) = site.send(dcgm("DEV_GPU_TEMP", 50.0), node("procs_blocked", 2.0)).moments
    assert moment.values == {
        Scope.DEVICE: {0: {"gpu_temperature_celsius": 50.0}},
        Scope.NODE: {-1: {"node_blocked_tasks": 2.0}},
    }


def test_the_document_names_every_series_and_metric_of_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "prometheus.md").read_text(encoding="utf-8")
    metrics = {use.rule.to for uses in TABLE.metrics.values() for use in uses}
    assert [name for name in (*SERIES, *metrics) if f"`{name}`" not in text] == []
    (kept,) = re.findall(r'regex: "(.*)", action: keep', text)
    assert [name for name in TABLE.wanted if not re.fullmatch(kept, name.decode())] == []


class TestTranslatedNames:
    """Names as OpenTelemetry's translation to Prometheus changes them."""

    @pytest.mark.parametrize("counter", [False, True])
    @pytest.mark.parametrize("with_unit", [False, True])
    def test_each_is_mapped_like_the_name_that_was_translated(self, *, with_unit: bool, counter: bool) -> None:
        for series_name, unit in SERIES.items():
            other = by_opentelemetry(series_name, unit if with_unit else "", counter=counter)
            assert meaning(other) == meaning(series_name) != ((), None), other

    def test_a_series_has_one_unit(self) -> None:
        units = {(use.origin.series, use.origin.unit) for uses in TABLE.metrics.values() for use in uses}
        assert len(units) == len({name for name, _ in units})

    def test_one_without_its_total_is_mapped_like_the_name_with_it(self) -> None:
        for series_name in SERIES:
            assert meaning(series_name.removesuffix("_total")) == meaning(series_name)

    def test_no_name_means_two_series(self) -> None:
        named = [other for series_name, unit in SERIES.items() for other in mapping.translated(series_name, unit)]
        assert len(named) == len(set(named)) == len(TABLE.wanted) - 1  # and `up`

    @pytest.mark.parametrize("unit", ["bytes", "kibibytes", "mebibytes", "seconds", "celsius", "percent", "ratio",
                                      "watts", "MHz", "hertz", "bytes_per_second", "joules", "mJ"])  # fmt: skip
    def test_one_that_says_another_unit_is_not_mapped(self, unit: str) -> None:
        others = [name for name, its_unit in SERIES.items() if its_unit != unit]
        assert {meaning(f"{name}_{unit}{total}") for name in others for total in ("", "_total")} == {((), None)}

    @pytest.mark.parametrize(("one", "other"), [("x", "x_total"), ("up_total", "y")])
    def test_a_table_where_a_name_means_two_series_is_refused(self, tmp_path: Path, one: str, other: str) -> None:
        table = tmp_path / "mapping.toml"
        table.write_text(
            f"""
            event = []
            exporter.e = {{ device = "gpu" }}
            metric = [
                {{ to = "gpu_power_watts", exporter = "e", from = [{{ series = "{one}" }}] }},
                {{ to = "gpu_temperature_celsius", exporter = "e", from = [{{ series = "{other}" }}] }},
            ]
            """
        )
        with pytest.raises(ValueError, match="may be"):
            mapping.load(table)

    def test_samples_under_both_names_are_those_of_one_series(self) -> None:
        site = Site()
        for at, name in enumerate(("", "_total", "", "_total")):
            site.send(dcgm(f"DEV_PCIE_REPLAY_COUNTER{name}", 7.0 + at, 15.0 * at))
            site.send(dcgm(f"DEV_XID_ERRORS{name}", 0.0 if at < 2 else 79.0, 15.0 * at))
            site.send(dcgm(f"DEV_FB_USED_mebibytes{name}", 1.0, 15.0 * at))
        assert [value for _, value in site.row("gpu_pcie_replays_total", key=0)] == [7.0, 8.0, 9.0, 10.0]
        assert {value for _, value in site.row("gpu_memory_used_bytes", key=0)} == {2.0**20}
        assert site.events == [("xid", 0, 30.0, 79)]


class TestOtherCells:
    """Series of nodes whose jobs another cell judges."""

    def test_they_are_put_aside_whole_and_become_no_node_here(self) -> None:
        site = Site()
        theirs, ours = dcgm("DEV_GPU_TEMP", 50.0, Hostname="n2"), dcgm("DEV_GPU_TEMP", 60.0)
        taken = site.send(theirs, ours, cell_of=lambda name, _: "west" if name == "n2" else "")
        assert [one.samples for one in taken.of_cells["west"]] == [[wire.Sample(round(T * 1000), 50.0)]]
        assert (list(taken.of_cells), taken.left_out, taken.refused) == (["west"], {}, {})
        assert site.row("gpu_temperature_celsius", "n2", 0) == []
        assert site.row("gpu_temperature_celsius", "n1", 0) == [(0.0, 60.0)]

    def test_once_their_job_is_this_cells_they_are_taken(self) -> None:
        site = Site()
        site.send(dcgm("DEV_GPU_TEMP", 50.0), cell_of=lambda *_: "west")
        taken = site.send(dcgm("DEV_GPU_TEMP", 51.0, 15.0))
        assert (taken.of_cells, site.row("gpu_temperature_celsius", key=0)) == ({}, [(15.0, 51.0)])

    def test_once_their_job_is_another_cells_they_are_put_aside(self) -> None:
        site = Site()
        site.send(dcgm("DEV_GPU_TEMP", 50.0))
        taken = site.send(dcgm("DEV_GPU_TEMP", 51.0, 15.0), cell_of=lambda *_: "west")
        assert (list(taken.of_cells), site.row("gpu_temperature_celsius", key=0)) == (["west"], [(0.0, 50.0)])


class TestIdentity:
    """Series of two machines under one name, and of one machine under two."""

    def test_all_exporters_of_a_machine_are_one_node(self) -> None:
        site = Site()
        site.send(dcgm("DEV_GPU_TEMP", 50.0), node("procs_blocked", 2.0, instance="N1.hpc.example.org:9100"))
        assert {name for name, *_ in site.values} == {"n1"}

    def test_localhost_names_no_node(self) -> None:
        site = Site()
        for host in ("10.0.0.1", "10.0.0.2"):
            site.send(dcgm("DEV_GPU_TEMP", 50.0, Hostname="localhost", instance=f"{host}:9400", UUID=host))
        assert {name for name, *_ in site.values} == {"10.0.0.1", "10.0.0.2"}

    def test_two_clusters_are_two_nodes_and_two_jobs(self) -> None:
        site = Site()
        theirs: dict[str, Any] = {"cluster": "b", "UUID": "GPU-b", "eagle_eye_job": "train"}
        site.send(dcgm("DEV_GPU_TEMP", 50.0, cluster="a", eagle_eye_job="train"), dcgm("DEV_GPU_TEMP", 60.0, **theirs))
        taken = site.send(dcgm("DEV_GPU_TEMP", 61.0, 15.0, **theirs))
        assert {(key[0], value) for key, value in site.values.items()} == {("n1", 50.0), ("n1@b", 60.0), ("n1@b", 61.0)}
        assert [moment.job for moment in taken.moments] == ["train@b"]

    def test_replicas_of_a_prometheus_are_one_machine(self) -> None:
        site = Site()
        for at in range(0, 90, 15):
            for replica in ("r1", "r2"):
                taken = site.send(dcgm("DEV_GPU_TEMP", 50.0, at, prometheus_replica=replica))
                assert taken.left_out["identity"] == 0
        assert len(site.row("gpu_temperature_celsius", key=0)) == 6

    def test_another_gpu_at_once_is_not_taken(self) -> None:
        site = Site()
        for at in range(0, 90, 15):
            site.send(xid(0.0, at))
        taken = site.send(xid(79.0, 92.0, UUID="GPU-other"))
        assert (site.events, taken.left_out) == ([], {"identity": 1})

    def test_a_disputed_node_says_goodbye_and_no_more(self) -> None:
        site = Site()
        site.send(dcgm("DEV_GPU_TEMP", 50.0), node("procs_blocked", 1.0))
        site.send(dcgm("DEV_GPU_TEMP", 90.0, 2.0, UUID="GPU-other"))
        taken = site.send(dcgm("DEV_GPU_TEMP", 51.0, 15.0), node("procs_blocked", 2.0, 15.0), xid(79.0, 15.0))
        assert (site.events, taken.left_out) == ([("agent_stop", -1, 15.0, None)], {"identity": 3})
        assert site.row("node_blocked_tasks") == [(0.0, 1.0)]

    def test_a_node_is_heard_again_once_the_other_machine_left(self) -> None:
        site = Site()
        for at, uuid in ((0.0, "GPU-0"), (2.0, "GPU-other"), (15.0, "GPU-0"), (30.0 + SETTLED_S, "GPU-0")):
            site.send(dcgm("DEV_GPU_TEMP", 50.0, at, UUID=uuid))
        assert [at for at, _ in site.row("gpu_temperature_celsius", key=0)] == [0.0, 30.0 + SETTLED_S]

    def test_a_replaced_gpus_old_code_is_no_news(self) -> None:
        site = Site()
        for at in range(0, 120, 15):
            site.send(xid(0.0, at))
        site.send(xid(79.0, 600.0, UUID="GPU-spare"))
        assert site.events == []
        site.send(xid(48.0, 660.0, UUID="GPU-spare"))
        assert site.events == [("xid", 0, 660.0, 48)]

    def test_a_restarted_server_knows_which_gpu_it_watched(self) -> None:
        site = Site(watched={0: Watched(T - 900, T - 900, 0.0, "GPU-old")})
        site.send(xid(79.0, 0.0))
        assert site.events == []

    def test_a_node_heard_under_its_agents_name_says_goodbye_once(self) -> None:
        site = Site()
        site.send(dcgm("DEV_GPU_TEMP", 50.0))
        site.refused["n1"] = RefusedSamples("has_agent", "", sender=False, departs=True)
        for at in (15.0, 30.0):
            assert site.send(dcgm("DEV_GPU_TEMP", 50.0, at)).left_out == {"has_agent": 1}
        assert site.events == [("agent_stop", -1, 16.0, None)]


def xid(code: float, at: float, **labels: str) -> Written:
    return dcgm("DEV_XID_ERRORS", code, at, **labels)
