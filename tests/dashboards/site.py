"""A real server fed by a replayed fault, scraped by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import Change
from tests.loopback import free_port
from tests.server.builders import action, incident

PROGRAM = (sys.executable, "-m", "eagle_eye.cli.main")
WITHIN_S = 30.0
SERVER = """
[detection]
tick_s = 0.5
[policy]
mode = "act"
[webhooks]
allow_private = true
"""
PROMETHEUS = """
global: {{scrape_interval: 500ms}}
scrape_configs:
  - job_name: eagle-eye
    honor_labels: true
    static_configs: [{{targets: ["{server}"]}}]
"""
# The last moment at which the first replay's nodes had values, which are gone soon after it.
LAST_REPORTED = 'max(max_over_time(timestamp(eagle_eye_train_compute_seconds{{job="{job}"}})[2m:1s]))'


class Site(NamedTuple):
    """Where both answer, and of what the replayed trace told; ``at_s`` is when, None: now.

    Soon after the end of a replay its nodes are silent and their values gone, however busy this machine is meanwhile.
    """

    server: str
    prometheus: str
    job: str
    node: str
    at_s: float | None = None

    def ask(self, expr: str) -> list[Any]:
        """Return the series that an expression has at that moment."""
        return list(self._get("query", query=expr, time=self.at_s or time.time()))

    def over_time(self, expr: str, seconds: float) -> list[Any]:
        """Return the series that an expression had in the last seconds before it."""
        end_s = self.at_s or time.time()
        return list(self._get("query_range", query=expr, start=end_s - seconds, end=end_s, step=1))

    def _get(self, path: str, **asked: Any) -> Any:
        answer = httpx.get(f"{self.prometheus}/api/v1/{path}", params=asked, timeout=10.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]["result"]


@contextmanager
def watched(folder: Path) -> Iterator[Site]:
    """Run server and Prometheus until the trace of a lost GPU is told and scraped."""
    server, prometheus = (f"127.0.0.1:{free_port()}" for _ in range(2))
    (folder / "server.toml").write_text(f'topology_file = "{folder}/topology.json"\n{SERVER}', encoding="utf-8")
    (folder / "prometheus.yml").write_text(PROMETHEUS.format(server=server), encoding="utf-8")
    trace = folder / "trace"
    ours = (*PROGRAM, "server", "--config", f"{folder}/server.toml", "--listen", server, "--data", f"{folder}/data")
    theirs = (
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address={prometheus}",
    )
    fault = ("--fault", "gpu_lost", "--variant", "hangs", "--nodes", "2", "--gpus", "2", "--minutes", "2")
    _run("simulate", str(trace), *fault, "--seed", "3")
    nodes = [one["node"] for one in json.loads((trace / "trace.json").read_text(encoding="utf-8"))["nodes"]]
    places = {"rack_of_node": dict.fromkeys(nodes, "r1"), "switch_of_node": dict.fromkeys(nodes, "leaf1")}
    (folder / "topology.json").write_text(json.dumps(places), encoding="utf-8")
    _put_a_past_on_record(folder / "data")
    with _process(folder / "server.log", *ours):
        _until(f"http://{server}/healthz")
        _keep_checkpoints_in_memory(trace / "samples.parquet")
        reported = _run("replay", str(trace), "--server", f"http://{server}", "--speed", "20")
        words = reported.split()
        job = words[words.index("job") + 1].rstrip(";")
        node = reported.partition("the trace says")[2].split("on ")[1].split()[0]
        # Only now: what the first scrape sees of the accounts, it sees for a minute.
        with _process(folder / "prometheus.log", *theirs):
            _until(f"http://{prometheus}/-/ready")
            site = Site(f"http://{server}", f"http://{prometheus}", job, node)
            deadline_s = time.monotonic() + WITHIN_S
            # Rates need some scrapes, all with the action in them.
            while not site.ask("count_over_time(eagle_eye_action_asked_timestamp_seconds[5s]) > 5"):
                assert time.monotonic() < deadline_s, reported
                time.sleep(0.1)
            # What is measured while it happens needs something to happen while Prometheus looks.
            _run("replay", str(trace), "--server", f"http://{server}", "--speed", "40", "--suffix=-again")
            last = site.ask(LAST_REPORTED.format(job=job))
            yield site._replace(at_s=min(time.time(), float(last[0]["value"][1])))


def _put_a_past_on_record(folder: Path) -> None:
    """Have two incidents of yesterday on record: one that is over, one that was a false alarm in mode observe."""
    then_s = time.time() - 86_400.0
    times = {"onset_s": then_s - 40.0, "detected_s": then_s, "updated_s": then_s + 300.0, "ended_s": then_s + 300.0}
    over = incident("inc_over", job="past", state="closed", fault="gpu_lost", **times)
    false = incident("inc_false", job="past", state="false", **times)
    asked = action("act_false", "would_act", job="past", incident_id="inc_false", created_s=then_s, updated_s=then_s)
    folder.mkdir(mode=0o700)
    with closing(open_file(folder / RECORDS_FILE)) as store:
        store.commit(Change(incidents=(over, false), actions=(asked,)))


def _keep_checkpoints_in_memory(samples: Path) -> None:
    """Have the trace's nodes tell of checkpoints, which simulated jobs do not keep: one a second, a step behind."""
    table = pq.read_table(samples)
    step = pc.floor(pc.subtract(table["time"], pc.min(table["time"])))
    reported = {
        "step": step,
        "age_steps": 1.0,
        "copies": 4.0,
        "copies_wanted": 4.0,
        "captures_total": step,
        "skips_total": 0.0,
        "blocked_seconds_total": pc.multiply(step, 0.01),
        "bytes": 1e9,
        "persisted_step": 0.0,
        "persist_seconds": 0.0,
        "damaged_total": 0.0,
    }
    whole_node = pc.equal(table["device"], -1)
    for name, value in reported.items():
        spec = BY_NAME[f"memory_checkpoint_{name}"]
        values = pc.if_else(whole_node, value, pa.scalar(None, pa.float64()))
        table = table.append_column(spec.name, pc.cast(values, pa.float64() if spec.exact else pa.float32()))
    pq.write_table(table, samples)


@contextmanager
def _process(log: Path, *command: str) -> Iterator[None]:
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=_environ()) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()


def _environ() -> dict[str, str]:
    """Return the environment without settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_EYE_")}


def _run(*words: str) -> str:
    done = subprocess.run((*PROGRAM, *words), capture_output=True, text=True, check=False, env=_environ())
    assert done.returncode == 0, done.stderr
    return done.stdout


def _until(url: str) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=1.0, trust_env=False).status_code == 200:
                return
        assert time.monotonic() < deadline_s, f"{url} does not answer"
        time.sleep(0.05)
