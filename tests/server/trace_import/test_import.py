"""``eagle-eye import``: a fault in what exporters told a Prometheus, found by ``backtest``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.backtest.prometheus_import import ImportRequest, census, nodes_of, nothing_found, questions
from eagle_eye.server.backtest.trace import TraceEvent, read_header, read_lines
from eagle_eye.server.ingest.remote_write import mapping
from eagle_eye.server.model.identity import POD_LABELS, Clusters, Naming
from tests.server.remote_store.real_stores import PROMETHEUS, VICTORIA_METRICS, listening, show
from tests.server.remote_write.requests import V1_HEADERS, Written, snappy, v1

NODE_LABELS = ("Hostname", "node", "instance")
NODES = ("n1", "n2", "n3")
SCRAPE_S = 15.0
SCRAPES = 60
FELL_AT = 40


def scrape(at: int, time_s: float) -> Iterator[Written]:
    """Yield what the exporters of all nodes say at one scrape; GPU 1 of n2 falls off its bus, and n9 is another's."""

    def say(name: str, value: float, labels: dict[str, str], delay_s: float = 0.0) -> Written:
        return Written({"__name__": name, **labels}, [(time_s + delay_s, value)])

    for node in (*NODES, "n9"):
        for gpu in "01":
            labels = {"gpu": gpu, "Hostname": node, "instance": "dcgm:9400"}
            if node != "n9":
                labels["eagle_eye_job"] = "train"
            fallen = node == "n2" and gpu == "1" and at >= FELL_AT
            yield say("DCGM_FI_DEV_POWER_USAGE", 600.5, labels)
            yield say("DCGM_FI_DEV_GPU_UTIL", 99.0, labels)
            yield say("DCGM_FI_DEV_XID_ERRORS", 79.0 if fallen else 0.0, labels)
        exporter = {"instance": f"{node}:9100"}  # scraped a second and a half later
        for port, bytes_ in (("eth0", 1.5e7), ("ib0", 3e7)):
            yield say("node_network_receive_bytes_total", bytes_ * at, {"device": port, **exporter}, 1.5)


def fill(url: str, store: str, begin_s: float) -> None:
    with httpx.Client(trust_env=False, headers=V1_HEADERS, timeout=20.0) as http:
        for at in range(SCRAPES):
            body = snappy(v1(*scrape(at, begin_s + at * SCRAPE_S)))
            http.post(f"{url}/api/v1/write", content=body).raise_for_status()
    show(url, store)


@pytest.mark.parametrize("store", [PROMETHEUS, VICTORIA_METRICS])
def test_a_fault_that_a_prometheus_saw_is_found(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin_s = float(int(time.time())) - 1_200.0
    out, verdicts = tmp_path / "trace", tmp_path / "verdicts.jsonl"
    with listening(store, tmp_path) as url:
        fill(url, store, begin_s)
        since = ["--since", str(begin_s - 60), "--until", str(begin_s + SCRAPES * SCRAPE_S)]
        assert main(["import", str(out), "--prometheus", url, "--job", "train", *since, "--json"]) == 0
        imported = json.loads(capsys.readouterr().out)
        thin = tmp_path / "thin"
        flags = ["--nodes", "n[19]", "--step", "60", "--json"]
        assert main(["import", str(thin), "--prometheus", url, "--job", "x", *since, *flags]) == 0
        assert main(["import", str(tmp_path / "no"), "--prometheus", url, "--job", "other", *since]) == 1
        said = capsys.readouterr().err
    header = read_header(out)
    assert [(node.node, node.gpus) for node in header.nodes] == [(node, 2) for node in NODES]
    assert header.interval_s == SCRAPE_S
    assert (imported["nodes"], imported["samples"], imported["events"]) == (3, 3 * 8 * SCRAPES, 1)
    [event] = read_lines(out / "events.jsonl", TraceEvent)
    assert (event.node, event.device, event.kind, event.attributes["code"]) == ("n2", 1, "xid", 79)
    assert event.time == begin_s + FELL_AT * SCRAPE_S
    assert [node.node for node in read_header(thin).nodes] == ["n1", "n9"]
    assert "names the job" not in said
    assert "n1, n2, n3, n9" in said
    assert not (tmp_path / "no").exists()
    assert main(["backtest", str(out), "--verdicts", str(verdicts)]) == 0
    first = json.loads(verdicts.read_text(encoding="utf-8").splitlines()[0])
    assert (first["fault"], first["node"], first["device"]) == ("gpu_lost", "n2", 1)
    assert network_rates(out) == {3_000_000}  # both ports together


def network_rates(trace: Path) -> set[int]:
    column = pq.read_table(trace / "samples.parquet")["node_network_rx_bytes_per_second"].drop_null()
    return {round(rate) for rate in column.to_pylist()}


def wanted(**more: Any) -> ImportRequest:
    naming = Naming(NODE_LABELS, ("cluster",), Clusters())
    settings: dict[str, Any] = {"job": "train", "nodes": (), "matchers": "", "job_labels": ("eagle_eye_job",)}
    return ImportRequest(**{**settings, "naming": naming, **more})


GPU = {"Hostname": "n1", "instance": "dcgm:9400", "eagle_eye_job": "train"}
OTHERS = {"Hostname": "n2", "instance": "dcgm:9400"}
HOST = {"instance": "n1:9100"}


def test_one_label_of_the_job_brings_all_of_a_nodes_series() -> None:
    found = nodes_of([GPU, OTHERS, HOST], [{"node": "n3", "job": "eagle-eye", "exported_job": "train"}], wanted())
    assert (found.names, found.own) == ({"n1", "n3"}, {"n3"})
    by_instance = (("Hostname", ""), ("node", ""), ("cluster", ""))
    assert found.by_label == {
        ("Hostname", (("cluster", ""),)): {"n1": {"n1"}},
        ("instance", by_instance): {"n1": {"n1:9100"}},
    }


def test_no_question_asks_for_what_another_does() -> None:
    table = mapping.load()
    asked = questions(nodes_of([GPU, HOST], [], wanted()), ["n1"], table, wanted(matchers='cluster="a"'))
    by_hostname, by_instance = asked
    assert by_hostname.endswith(',Hostname=~"n1",cluster="a"}')
    assert by_hostname.startswith('{cluster="",__name__=~"')
    assert by_instance.startswith('{Hostname="",node="",cluster="",__name__=~"')
    assert by_instance.endswith(',instance=~"n1:9100",cluster="a"}')


def test_names_are_taken_literally() -> None:
    found = nodes_of([{"Hostname": 'a.b"|c'}], [], wanted(nodes=("*",)))
    [asked] = questions(found, ['a.b"|c'], mapping.load(), wanted())
    assert asked.endswith(r',Hostname=~"a\\.b\"\\|c"}')


def test_the_census_groups_by_what_names_nodes_and_jobs() -> None:
    of_exporters, of_ours = census(mapping.load(), wanted(), 300.0)
    grouped = ",".join((*NODE_LABELS, *POD_LABELS, "cluster", "eagle_eye_job"))
    assert of_exporters.startswith(f"group by ({grouped}) (last_over_time({{__name__=~")
    assert of_ours.startswith("group by (node,job,exported_job) (last_over_time({__name__=~")
    assert of_ours.endswith("[300000ms]))")


@pytest.mark.parametrize(
    ("series", "more", "says"),
    [
        ([], {}, "no series of dcgm-exporter"),
        ([{"pod": "x"}], {}, "--node-label"),
        ([OTHERS], {}, "--nodes, or the label with --job-label; there are n2"),
        ([OTHERS], {"nodes": ("gpu*",)}, "no node fits --nodes gpu*; there are n2"),
    ],
)
def test_whoever_gets_nothing_hears_why(series: list[dict[str, str]], more: dict[str, Any], says: str) -> None:
    asked = wanted(**more)
    found = nodes_of(series, [], asked)
    assert found.names == set()
    assert says in nothing_found(found, asked)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--prometheus", "http://127.0.0.1:9", "--since", "-1m"], 1, "gave no answer"),
        (["--prometheus", "prometheus:9090", "--since", "-1m"], 2, "--prometheus: expected an http"),
        (["--prometheus", "http://x", "--since", "now"], 2, "--since: expected a time before"),
        (["--prometheus", "http://x", "--since", "-1m", "--step", "0"], 2, "--step: expected"),
        (["--prometheus", "http://x", "--since", "-1m", "--header", "secret"], 2, "--header: expected NAME:VALUE"),
        (["--prometheus", "http://x", "--since", "-1m", "--token-file", "/none"], 1, "/none cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    flags: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(tmp_path / "out"), "--job", "train", *flags]) == code
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_machine_under_two_spellings_is_asked_for_by_both() -> None:
    gpu = {"Hostname": "gpu-01", "instance": "10.0.0.1:9400", "eagle_eye_job": "train"}
    host = {"instance": "GPU-01.hpc.example.org:9100"}
    request = wanted()
    found = nodes_of([gpu, host], [], request)
    assert found.names == {"gpu-01"}
    assert len(questions(found, ["gpu-01"], mapping.load(), request)) == 2


def test_a_job_of_two_clusters_keeps_their_nodes_apart() -> None:
    clusters = [{**GPU, "cluster": cluster} for cluster in "ba"]
    assert nodes_of(clusters, [], wanted()).names == {"n1", "n1@b"}
