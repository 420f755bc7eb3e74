"""A real Prometheus between exporters as they are in the field and a real server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loopback import free_port, served

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "how-to" / "prometheus.md"
WITHIN_S = 40.0
NODES = ("n1", "n2", "n3", "n4")
SCRAPE_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 900ms}}
scrape_configs:
  - job_name: exporters
    static_configs:
{targets}
remote_write:
  - url: {server}/api/v1/write
    authorization: {{credentials: {token}}}
    queue_config: {{batch_send_deadline: 200ms, max_shards: 2}}
    write_relabel_configs:
      - {{source_labels: [__name__], regex: "up|DCGM_.*|node_.*", action: keep}}
"""
TARGET = """
      - targets: ["127.0.0.1:{port}"]
        labels: {{__metrics_path__: /{node}/{kind}, instance: "{node}:{scraped}", eagle_eye_job: train}}
"""


@dataclass
class Exporters:
    """All exporters of a small fleet behind one port: /<node>/dcgm and /<node>/node."""

    started_s: float = field(default_factory=time.monotonic)
    xids: dict[tuple[str, int], int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # paths that do not answer any more

    def page(self, path: str) -> str | None:
        _, node, kind = path.split("/")
        if path in self.gone:
            return None
        return self._dcgm(node) if kind == "dcgm" else self._node()

    def _dcgm(self, node: str) -> str:
        lines = ["# TYPE DCGM_FI_DEV_SM_CLOCK gauge"]
        for gpu in range(2):
            labels = f'{{gpu="{gpu}",UUID="GPU-{node}-{gpu}",device="nvidia{gpu}",modelName="H100",Hostname="{node}"}}'
            xid = self.xids.get((node, gpu), 0)
            described = labels.replace("}", f',err_code="{xid}",err_msg="as DCGM says"}}')
            lines += [
                f"DCGM_FI_DEV_SM_CLOCK{labels} 1980",
                f"DCGM_FI_DEV_GPU_UTIL{labels} 98",
                f"DCGM_FI_DEV_FB_USED{labels} 70000",
                f"DCGM_FI_DEV_POWER_USAGE{labels} 640.5",
                f"DCGM_FI_DEV_MEMORY_TEMP{labels} 9223372036854775792",
                f"DCGM_FI_DEV_XID_ERRORS{described} {xid}",
            ]
        return "\n".join(lines) + "\n"

    def _node(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        return (
            f'node_network_receive_bytes_total{{device="eth0"}} {1e6 * elapsed_s}\n'
            f'node_network_receive_bytes_total{{device="ib0"}} {2e6 * elapsed_s}\n'
            f'node_network_receive_bytes_total{{device="lo"}} {9e9 * elapsed_s}\n'
            "node_memory_MemTotal_bytes 4e12\nnode_memory_MemAvailable_bytes 1e12\nnode_procs_blocked 0\n"
        )


@contextmanager
def listening(exporters: Exporters) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = exporters.page(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    with served(Handler) as port:
        yield port


@contextmanager
def process(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            yield
        finally:
            started.terminate()
            try:
                started.wait(10.0)
            except subprocess.TimeoutExpired:
                started.kill()


def token(data: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "eagle_eye.cli.main", "tokens", "create", "--data", str(data), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def eventually(claim: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Exporters, httpx.Client]]:
    """Exporters that Prometheus scrapes every second, and a client of the server that it writes to."""
    folder = tmp_path_factory.mktemp("prometheus")
    exporters, data, ours, its = Exporters(), folder / "data", free_port(), free_port()
    writing = token(data, "--scope", "remote_write", "--nodes", "n[1-3]", "--nodes", "n4")
    reading = token(data, "--scope", "read")
    server = f"http://127.0.0.1:{ours}"
    with listening(exporters) as port:
        targets = "".join(
            TARGET.format(port=port, node=node, kind=kind, scraped=scraped)
            for node in NODES
            for kind, scraped in (("dcgm", 9400), ("node", 9100))
        )
        config = folder / "prometheus.yml"
        config.write_text(SCRAPE_CONFIG.format(targets=targets, server=server, token=writing), encoding="utf-8")
        with (
            process(sys.executable, "-m", "eagle_eye.cli.main", "server", "--listen", server[7:], "--data", str(data)),
            httpx.Client(
                base_url=server, headers={"Authorization": f"Bearer {reading}"}, timeout=10.0, trust_env=False
            ) as client,
        ):
            eventually(lambda: _is_up(client))
            with process(
                "prometheus",
                f"--config.file={config}",
                "--enable-feature=agent",
                f"--storage.agent.path={folder / 'agent'}",
                f"--web.listen-address=127.0.0.1:{its}",
            ):
                yield exporters, client


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def newest(client: httpx.Client, metric: str, node: str = "n1") -> dict[object, float]:
    """Return each series' newest value by device."""
    now_s = time.time()
    answer = client.get(
        "/api/v1/query_range",
        params={"metric": metric, "node": node, "start": str(now_s - 60), "end": str(now_s), "step": "0.5"},
    )
    return {series["device"]: series["points"][-1][1] for series in answer.json()["series"]}


def test_prometheus_understands_the_documented_configuration(tmp_path: Path) -> None:
    documented = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    config = tmp_path / "prometheus.yml"
    config.write_text("\n".join(documented), encoding="utf-8")
    subprocess.run(["promtool", "check", "config", "--syntax-only", str(config)], check=True, capture_output=True)


def test_nodes_of_a_scraped_fleet_are_there(fleet: tuple[Exporters, httpx.Client]) -> None:
    _, client = fleet
    eventually(lambda: {item["node"] for item in client.get("/api/v1/nodes").json()["items"]} == set(NODES))
    eventually(lambda: "train" in {item["job"] for item in client.get("/api/v1/jobs").json()["items"]})


def test_metrics_come_in_the_catalogues_units(fleet: tuple[Exporters, httpx.Client]) -> None:
    _, client = fleet
    eventually(lambda: newest(client, "gpu_sm_clock_hertz") == {0: 1.98e9, 1: 1.98e9})
    assert newest(client, "gpu_memory_used_bytes")[0] == 70_000 * 2**20
    assert newest(client, "gpu_utilization_ratio")[0] == pytest.approx(0.98)
    assert newest(client, "gpu_memory_temperature_celsius") == {}
    eventually(lambda: newest(client, "node_memory_used_ratio") == {None: 0.75})


def test_a_counters_rate_is_that_of_all_interfaces_but_loopback(fleet: tuple[Exporters, httpx.Client]) -> None:
    _, client = fleet
    eventually(lambda: newest(client, "node_network_rx_bytes_per_second").get(None) == pytest.approx(3e6, rel=0.3))


def test_a_gpu_that_is_lost_becomes_an_incident_that_names_its_node(fleet: tuple[Exporters, httpx.Client]) -> None:
    exporters, client = fleet
    eventually(lambda: len(newest(client, "gpu_power_watts", "n3")) == 2)
    assert client.get("/api/v1/incidents").json()["items"] == []
    exporters.xids["n3", 1] = 79
    eventually(lambda: client.get("/api/v1/incidents").json()["items"] != [])
    incident = client.get("/api/v1/incidents").json()["items"][0]
    assert (incident["fault"], incident["node"], incident["device"]) == ("gpu_lost", "n3", 1)


def test_an_exporter_that_is_gone_leaves_its_node_heard(fleet: tuple[Exporters, httpx.Client]) -> None:
    exporters, client = fleet
    exporters.gone.add("/n4/dcgm")
    said = "failed: Prometheus cannot scrape it (up is 0)"
    eventually(lambda: said in str(client.get("/api/v1/nodes/n4").json()))
    assert "node_unreachable" not in str(client.get("/api/v1/incidents").json())
