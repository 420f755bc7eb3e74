"""Which machine a name means, and when two machines have one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.ingest.settings import RemoteWriteSettings
from eagle_eye.server.model.identity import SETTLED_S, Clusters, NameClaims, Naming, NodeNames, NoName

NAMES = NodeNames(
    ["gpu1.cluster.local", "GPU2", "a.rack1", "a.rack2", "b", "b.rack1", "10.0.0.1", "c@west", "d.site@west"]
)
SETTINGS = RemoteWriteSettings()


def naming(home: str = "") -> Naming:
    return Naming(SETTINGS.node_labels, SETTINGS.cluster_labels, Clusters(home))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("gpu1", "gpu1.cluster.local"),
        ("GPU1.Cluster.Local", "gpu1.cluster.local"),
        ("gpu1.other", None),
        ("gpu2.cluster.local", "GPU2"),
        ("a", None),
        ("a.rack1", "a.rack1"),
        ("b.rack2", "b"),
        ("gpu3", None),
        ("10.0.0.1", "10.0.0.1"),
        ("10", None),
        ("10.0.0.2", None),
        ("c", None),
        ("c.site@west", "c@west"),
        ("d@west", "d.site@west"),
        ("d.site@east", None),
    ],
)
def test_a_name_is_found_but_for_case_and_domain(theirs: str, ours: str | None) -> None:
    assert NAMES.ours(theirs) == ours


@given(st.sets(st.sampled_from(["n", "n.a", "n.b", "m", "m.a"])), st.sampled_from(["n", "n.a", "m"]))
def test_a_removed_name_leaves_no_trace(names: set[str], gone: str) -> None:
    changed, rest = NodeNames([*names, gone]), NodeNames(names - {gone})
    changed.discard(gone)
    for asked in ("n", "N.A", "n.b", "m", "m.a", "m.b"):
        assert sorted(changed.matching(asked)) == sorted(rest.matching(asked))


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"k8s_node_name": "gpu-01", "Hostname": "x", "instance": "10.0.0.1:9400"}, "gpu-01"),
        ({"node": "gpu-01", "Hostname": "x"}, "gpu-01"),
        ({"host_name": "gpu-01", "instance": "10.0.0.1:9400"}, "gpu-01"),
        ({"Hostname": "localhost", "instance": "10.0.0.1:9400"}, "10.0.0.1"),
        ({"Hostname": "nvidia-dcgm-exporter-x7k2p", "instance": "10.0.0.1:9400"}, "10.0.0.1"),
        ({"Hostname": "metrics-0", "pod": "metrics-0", "instance": "10.0.0.1:9400"}, "10.0.0.1"),
        ({"Hostname": "gpu-01", "pod": "train-0", "instance": "10.0.0.1:9400"}, "gpu-01"),
        ({"instance": "localhost:9400"}, "localhost"),
        ({"instance": "[fe80::1]:9400"}, "fe80::1"),
        ({"instance": "gpu-01.hpc.example.org:9100"}, "gpu-01.hpc.example.org"),
    ],
)
def test_the_machine_is_named_not_its_exporter(labels: dict[str, str], name: str) -> None:
    assert naming().node(labels).name == name


def test_a_host_name_and_an_address_with_domain_are_one_node() -> None:
    names = naming()
    names.add(names.node({"Hostname": "gpu-01"}).name)
    assert names.node({"instance": "gpu-01.hpc.example.org:9100"}).name == "gpu-01"
    assert names.node({"node": "GPU-01"}).name == "gpu-01"


def test_a_short_name_of_two_domains_is_refused() -> None:
    names = naming()
    for full in ("gpu-01.a.org", "gpu-01.b.org"):
        names.add(names.node({"node": full}).name)
    with pytest.raises(NoName, match=r"may be any of gpu-01\.a\.org, gpu-01\.b\.org"):
        names.node({"node": "gpu-01"})


def test_clusters_share_no_node() -> None:
    names = naming()
    for cluster, name in (("a", "gpu-01"), ("b", "gpu-01@b"), ("a", "gpu-01"), ("", "gpu-01")):
        found = names.node({"Hostname": "gpu-01", "cluster": cluster}).name
        names.add(found)
        assert found == name


def test_the_configured_cluster_is_home() -> None:
    assert naming("b").node({"Hostname": "gpu-01", "cluster": "a"}).name == "gpu-01@a"
    assert naming("b").node({"Hostname": "gpu-01", "k8s_cluster_name": "b"}).name == "gpu-01"


class Heard:
    """One name, under which machines are heard every ten seconds."""

    def __init__(self) -> None:
        self.claims = NameClaims()

    def __call__(self, value: str, time_s: float) -> bool:
        return self.claims.heard("n1", "boot id", value, time_s, 10.0)

    def disputed(self, time_s: float) -> bool:
        return self.claims.is_disputed("n1", time_s)


def test_a_machine_that_was_booted_keeps_its_name() -> None:
    heard = Heard()
    assert (heard("old", 0.0), heard("new", 31.0), heard.disputed(31.0)) == (True, True, False)


def test_a_second_machine_speaks_for_nobody() -> None:
    heard = Heard()
    assert [heard(value, time_s) for value, time_s in (("a", 0.0), ("b", 5.0), ("a", 10.0), ("b", 15.0))] == [
        *(True, False, True, False)
    ]
    assert str(heard.claims.dispute("n1", 15.0)) == "two machines report as n1: boot id is a and b by turns"


def test_a_successor_right_after_is_no_dispute() -> None:
    heard = Heard()
    assert (heard("a", 0.0), heard("b", 5.0), heard("b", 35.0), heard.disputed(35.0)) == (True, False, True, False)


def test_a_short_silence_does_not_hand_over_a_disputed_name() -> None:
    heard = Heard()
    for value, time_s in (("a", 0.0), ("b", 5.0), ("a", 10.0)):
        heard(value, time_s)
    assert not heard("b", 10.0 + SETTLED_S)
    assert heard("b", 11.0 + SETTLED_S)


def test_a_dispute_ends_once_the_other_is_gone() -> None:
    heard = Heard()
    for value, time_s in (("a", 0.0), ("b", 5.0), ("a", 10.0), ("a", 5.0 + SETTLED_S)):
        heard(value, time_s)
    assert heard.disputed(5.0 + SETTLED_S)
    assert heard("a", 10.0 + SETTLED_S)
    assert not heard.disputed(10.0 + SETTLED_S)
    assert list(heard.claims.disputes(10.0 + SETTLED_S)) == []


def test_samples_that_arrive_late_dispute_nothing() -> None:
    heard = Heard()
    assert (heard("a", 0.0), heard("b", 40.0), heard("a", -10.0), heard.disputed(40.0)) == (True, True, False, False)


def test_a_forgotten_node_is_claimed_by_nobody() -> None:
    heard = Heard()
    for value, time_s in (("a", 0.0), ("b", 5.0), ("a", 10.0)):
        heard(value, time_s)
    heard.claims.forget(["n1"])
    assert (heard("b", 11.0), heard.disputed(11.0)) == (True, False)
