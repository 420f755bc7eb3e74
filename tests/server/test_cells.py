"""Two cells in processes of their own on one PostgreSQL, each of which judges its own jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.cli.main import main
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank, block, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import Change
from tests.server.builders import action, frame
from tests.server.own_process import OwnProcess, serving, wait_until
from tests.server.postgresql_server import PostgresqlServer, free_port
from tests.server.receiver import Receiver, receiver
from tests.server.remote_write.requests import V1_HEADERS, series, snappy, v1
from tests.server.test_docs import OF_LEADING, documented_metrics, shown_metrics

pytestmark = pytest.mark.slow  # servers in processes of their own

LEASE_S = 1.0
STANDINGS = ("right", "wrong", "pending", "cannot_tell")


@dataclass
class Site:
    """The database, and what starts servers on it."""

    url: str
    folder: Path

    @contextmanager
    def server(self, name: str, cell: str, listen: str = "127.0.0.1:0") -> Iterator[OwnProcess]:
        file = self.folder / f"{name}.toml"
        file.write_text(
            f'[records]\nurl = "{self.url}"\nlease_s = {LEASE_S}\ncell = "{cell}"\n'
            '[policy]\nmode = "act"\n[webhooks]\nallow_private = true\nheartbeat_s = 0.0\n[detection]\ntick_s = 0.2\n',
            encoding="utf-8",
        )
        with serving(self.folder / name, "--config", str(file), "--listen", listen) as process:
            yield process


@dataclass
class Agent:
    """The spool and the uplink of one node's agent; its frames say a training step each."""

    folder: Path
    node: str
    servers: Servers
    step: int = 0
    spool: Spool = field(init=False)
    uplink: Uplink = field(init=False)

    def __post_init__(self) -> None:
        self.spool = Spool(self.folder / self.node, self.node, Drops())
        self.uplink = Uplink(Destination(self.servers, backoff_s_max=0.5), self.spool, Drops(), SystemClock())
        self.uplink.start()

    def say(self, job: str, *events: Event) -> None:
        """Send a frame of a node that has a rank of the job; "" for none."""
        values = {0: {"train_step": float(self.step)}}
        self.step += 1
        more: dict[str, Any] = {"job": None, "blocks": [block(Scope.DEVICE, values)], "events": list(events)}
        ranks = [Rank(job, int(self.node[1:]), 1, 0)] if job else []
        self.spool.append(
            lambda stream, number: encode_frame(
                frame(number, self.node, time.time(), stream=stream, ranks=ranks, **more)
            )
        )
        self.uplink.notify(urgent=True)

    def close(self) -> None:
        self.uplink.stop(0.0)
        self.spool.close()


def leads(server: OwnProcess) -> bool:
    try:
        return server.client.get("/leadz").status_code == 200
    except httpx.TransportError:
        return False


def cell_of(url: str, job: str) -> str:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        found = connection.execute("SELECT cell FROM job_cells WHERE job = %s", (job,)).fetchone()
    return "" if found is None else str(found[0])


def events(target: Receiver) -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the data of each event that came."""
    found = [json.loads(content) for _, content in target.got]
    return [(one["type"], one["data"]) for one in found]


def judged(server: OwnProcess) -> set[str]:
    """Return the jobs that the server judges."""
    lines = server.client.get("/metrics").text.splitlines()
    return {line.partition('job="')[2].partition('"')[0] for line in lines if line.startswith("eagle_eye_job_nodes{")}


@dataclass
class Spread:
    """Two cells, each with a leader, and four nodes with two jobs: "one" is the default cell's, "two" is b's."""

    site: Site
    default: OwnProcess
    other: OwnProcess
    agents: dict[str, Agent]
    next: str  # where b's next server is to listen; agents know it

    @property
    def urls(self) -> list[str]:
        return [f"http://{one.listen}" for one in (self.default, self.other)]

    def until(self, claim: Callable[[], bool]) -> None:
        """Have all agents speak until it holds."""

        def held() -> bool:
            for name, agent in self.agents.items():
                agent.say("one" if name in ("n1", "n2") else "two")
            time.sleep(0.1)
            return claim()

        wait_until(held)


@contextmanager
def spread_over(site: Site) -> Iterator[Spread]:
    """Run the two cells, until each judges its job."""
    with ExitStack() as stack:
        default, other = (stack.enter_context(site.server(name, name)) for name in ("default", "b"))
        wait_until(lambda: leads(default) and leads(other))
        wait_until(lambda: all("cells" in one.client.get("/readyz").json()["checks"] for one in (default, other)))
        after = f"127.0.0.1:{free_port()}"
        servers = [f"http://{one}" for one in (default.listen, other.listen, after)]
        agents = {name: Agent(site.folder / "agents", name, Servers(servers)) for name in ("n1", "n2", "n3", "n4")}
        for one in agents.values():
            stack.callback(one.close)
        made = Spread(site, default, other, agents, after)
        made.until(lambda: judged(default) == {"one"} and judged(other) == {"two"})
        yield made


@pytest.fixture(scope="module")
def spread(postgresql: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    with spread_over(Site(postgresql.new_database(), tmp_path_factory.mktemp("cells"))) as made:
        yield made


def test_jobs_are_spread_over_the_cells(spread: Spread) -> None:
    assert (cell_of(spread.site.url, "one"), cell_of(spread.site.url, "two")) == ("default", "b")


def test_agents_go_to_the_cell_that_judges_their_job(spread: Spread) -> None:
    default, other = spread.urls
    found = [spread.agents[name].uplink.live._server for name in ("n1", "n2", "n3", "n4")]
    assert found == [default, default, other, other]


@pytest.mark.parametrize("asked", ["default", "other"])
def test_every_server_shows_the_nodes_and_jobs_of_all_cells(spread: Spread, asked: str) -> None:
    server: OwnProcess = getattr(spread, asked)

    def whole() -> bool:
        nodes = server.client.get("/api/v1/nodes").json()["items"]
        return all(one["agent"] for one in nodes) and len(nodes) == 4

    spread.until(whole)
    nodes = {one["node"]: one for one in server.client.get("/api/v1/nodes").json()["items"]}
    assert {name: one["cell"] for name, one in nodes.items()} == {
        "n1": "default",
        "n2": "default",
        "n3": "b",
        "n4": "b",
    }
    assert {name: one["agent"]["job"] for name, one in nodes.items()} == {
        "n1": "one",
        "n2": "one",
        "n3": "two",
        "n4": "two",
    }
    fleet = server.client.get("/api/v1/fleet").json()
    assert {(one["job"], one["cell"], one["nodes"]) for one in fleet["jobs"]} == {
        ("one", "default", 2),
        ("two", "b", 2),
    }
    assert fleet["nodes_heard"] == 4
    mapped = server.client.get("/api/v1/fleet/nodes").json()
    in_service = mapped["standings"].index("in_service")
    assert dict(zip(mapped["nodes"], mapped["standing"], strict=True)) == dict.fromkeys(
        ("n1", "n2", "n3", "n4"), in_service
    )
    assert {node: mapped["jobs"][job] for node, job in zip(mapped["nodes"], mapped["job"], strict=True)} == {
        "n1": "one",
        "n2": "one",
        "n3": "two",
        "n4": "two",
    }
    jobs = {one["job"]: one["cell"] for one in server.client.get("/api/v1/jobs").json()["items"]}
    assert jobs == {"one": "default", "two": "b"}


@pytest.mark.parametrize("asked", ["default", "other"])
def test_lists_can_be_filtered_by_cell(spread: Spread, asked: str) -> None:
    server: OwnProcess = getattr(spread, asked)
    for path, key, found in (
        ("/api/v1/nodes", "node", {"n3", "n4"}),
        ("/api/v1/jobs", "job", {"two"}),
    ):
        items = server.client.get(path, params={"cell": "b"}).json()["items"]
        assert {one[key] for one in items} == found
    assert {one["job"] for one in server.client.get("/api/v1/fleet", params={"cell": "b"}).json()["jobs"]} == {"two"}


@pytest.mark.parametrize("asked", ["default", "other"])
def test_the_accounts_say_whose_each_job_is_and_can_be_filtered_by_cell(spread: Spread, asked: str) -> None:
    server: OwnProcess = getattr(spread, asked)

    def jobs(**query: str) -> dict[str, str]:
        items = server.client.get("/api/v1/goodput", params=query).json()["items"]
        return {one["job"]: one["cell"] for one in items}

    spread.until(lambda: set(jobs()) == {"one", "two"})
    assert jobs() == {"one": "default", "two": "b"}
    assert jobs(cell="b") == {"two": "b"}
    assert jobs(cell="default") == {"one": "default"}
    assert jobs(cell="c") == {}
    assert server.client.get("/api/v1/goodput", params={"cell": "c"}).json()["total"]["wall"]["seconds"] == 0


def claim(spread: Spread, id_: str, job: str) -> None:
    """Write what policy would have done to the job into the records."""
    now_s = time.time()
    with closing(open_records(RecordsSettings(spread.site.url), spread.site.folder)) as store:
        of = {"job": job, "incident_id": f"inc_{id_}", "created_s": now_s, "updated_s": now_s}
        store.commit(Change(actions=(action(f"act_{id_}", "would_act", **of),)))


@pytest.mark.parametrize("asked", ["default", "other"])
def test_the_ledger_says_whose_each_claim_is_and_counts_those_of_a_cell(spread: Spread, asked: str) -> None:
    server: OwnProcess = getattr(spread, asked)
    for job in ("one", "two"):
        claim(spread, f"{job}_{asked}", job)
    whole = server.client.get("/api/v1/ledger").json()
    assert {(one["job"], one["cell"]) for one in whole["items"]} == {("one", "default"), ("two", "b")}
    of_b = server.client.get("/api/v1/ledger", params={"cell": "b"}).json()
    assert {one["job"] for one in of_b["items"]} == {"two"}
    assert 2 * sum(of_b["total"][name] for name in STANDINGS) == sum(whole["total"][name] for name in STANDINGS) > 0


@pytest.mark.parametrize("asked", ["default", "other"])
def test_the_list_of_nodes_on_the_page_has_whose_each_node_is(spread: Spread, asked: str) -> None:
    server: OwnProcess = getattr(spread, asked)
    spread.until(lambda: True)
    mapped = server.client.get("/api/v1/fleet/nodes?details=true").json()
    cells = [mapped["cells"][at] for at in mapped["cell"]]
    assert dict(zip(mapped["nodes"], cells, strict=True)) == {"n1": "default", "n2": "default", "n3": "b", "n4": "b"}
    assert None not in mapped["heard"]
    assert "cell" not in server.client.get("/api/v1/fleet/nodes").json()


@pytest.mark.parametrize("asked", ["default", "other"])
def test_every_metric_of_a_cells_leader_is_in_the_document(spread: Spread, asked: str) -> None:
    server: OwnProcess = getattr(spread, asked)
    shown = shown_metrics(server.client.get("/metrics").text)
    assert shown >= OF_LEADING
    assert shown - documented_metrics() == set()


def test_events_say_whose_each_record_is(spread: Spread) -> None:
    claim(spread, "event", "two")
    with spread.default.client.stream("GET", "/api/v1/events", headers={"Last-Event-ID": "1"}) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line == "event: action")
        record = json.loads(next(lines).removeprefix("data: "))
    assert (record["job"], record["cell"]) in {("one", "default"), ("two", "b")}


@pytest.mark.parametrize(
    ("command", "there", "gone"),
    [
        (["goodput"], "two", "one"),
        (["ledger"], "two", "one"),
        (["jobs"], "two", "one"),
        (["nodes"], "n3", "n1"),
    ],
)
def test_commands_have_the_column_and_the_filter(
    spread: Spread,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    there: str,
    gone: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    spread.until(lambda: len(spread.default.client.get("/api/v1/goodput").json()["items"]) == 2)
    if command == ["ledger"]:
        for job in ("one", "two"):
            claim(spread, f"{job}_command", job)
    assert main([*command, "--server", spread.urls[0]]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if " cell " in f"{line} ")
    assert head.split()[0] in ("job", "created", "node")
    assert main([*command, "--cell", "b", "--server", spread.urls[0]]) == 0
    shown = capsys.readouterr().out.split()
    assert there in shown
    assert gone not in shown


def test_the_report_on_the_accounts_is_of_one_cell_where_one_is_named(
    spread: Spread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread.until(lambda: len(spread.default.client.get("/api/v1/goodput").json()["items"]) == 2)
    file = tmp_path / "report.html"
    command = ["accounts", "report", "--cell", "b", "--server", spread.urls[0]]
    assert main([*command, "--json"]) == 0
    assert [(one["job"], one["cell"]) for one in json.loads(capsys.readouterr().out)["jobs"]["items"]] == [("two", "b")]
    assert main([*command, "--html", str(file)]) == 0
    assert "<th>cell</th>" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("asked", ["default", "other"])
def test_one_job_and_one_node_are_answered_by_their_cell(spread: Spread, asked: str) -> None:
    server: OwnProcess = getattr(spread, asked)
    spread.until(lambda: True)
    for job in ("one", "two"):
        assert server.client.get(f"/api/v1/jobs/{job}").json()["progress"]["step"] is not None
    for node in spread.agents:
        assert server.client.get(f"/api/v1/nodes/{node}").json()["agent"] is not None
    query = {"metric": "train_step", "job": "two", "start": str(time.time() - 60), "end": str(time.time())}
    series = server.client.get("/api/v1/query_range", params=query).json()["series"]
    assert {one["node"] for one in series} == {"n3", "n4"}


def test_what_prometheus_writes_to_one_cell_reaches_the_cell_that_judges_the_job(spread: Spread) -> None:
    spread.until(lambda: True)
    hosts = {"n8": "two", "n9": "one"}

    def written(server: OwnProcess) -> int:
        now_s = time.time()
        samples = [
            series("DCGM_FI_DEV_GPU_TEMP", 50.0, now_s, gpu="0", Hostname=node, eagle_eye_job=job)
            for node, job in hosts.items()
        ]
        return server.client.post("/api/v1/write", content=snappy(v1(*samples)), headers=V1_HEADERS).status_code

    def spread_out() -> bool:
        assert {written(spread.default), written(spread.other)} == {204}
        heard = {one["node"]: one["cell"] for one in spread.default.client.get("/api/v1/nodes").json()["items"]}
        return (heard.get("n8"), heard.get("n9")) == ("b", "default")

    spread.until(spread_out)
    for server, node in ((spread.default, "n8"), (spread.other, "n9")):
        own = server.client.get("/api/v1/nodes", headers={"Eagle-Eye-Of-One-Cell": "1"}).json()["items"]
        assert node not in {one["node"] for one in own if one["agent"]}


def test_a_fault_that_the_other_cell_finds_is_delivered_by_the_default_cell(spread: Spread) -> None:
    with receiver() as target:
        made = spread.other.client.post("/api/v1/subscriptions", json={"url": target.url}).json()
        spread.agents["n3"].say("two", Event(time.time(), "xid", 0, {"code": 79}))
        spread.until(lambda: any(data.get("job") == "two" for _, data in events(target)))
        leader = spread.default.client.get("/api/v1/leader").json()
        assert {data["epoch"] for _, data in events(target)} == {leader["epoch"]}
        spread.default.client.delete(f"/api/v1/subscriptions/{made['id']}")
    found = spread.default.client.get("/api/v1/incidents", params={"cell": "b"}).json()["items"]
    assert {(one["job"], one["cell"]) for one in found} == {("two", "b")}
    assert spread.other.client.get("/api/v1/incidents", params={"cell": "default"}).json()["items"] == []


def test_a_job_of_which_something_is_open_stays(spread: Spread) -> None:
    answer = spread.other.client.post("/api/v1/cells/default/jobs/two")
    assert answer.status_code == 409
    assert answer.json()["reason"] == "busy"


def test_a_job_that_is_moved_is_judged_by_its_new_cell_and_its_agents_go_there(spread: Spread) -> None:
    assert main(["cells", "move", "one", "b", "--server", spread.urls[0]]) == 0
    spread.until(lambda: judged(spread.default) == set() and judged(spread.other) == {"one", "two"})
    spread.until(lambda: {one.uplink.live._server for one in spread.agents.values()} == {spread.urls[1]})
    assert [one["verb"] for one in spread.default.client.get("/api/v1/audit?subject=one").json()["items"]] == [
        "move",
        "assign",
    ]


def test_a_cell_without_a_leader_is_named_by_the_others(spread: Spread) -> None:
    spread.other.process.kill()
    spread.other.process.wait()
    wait_until(
        lambda: "cell b has no leader: its 2 jobs" in spread.default.client.get("/readyz").json()["checks"]["cells"]
    )
    answer = spread.default.client.get("/api/v1/fleet")
    assert answer.headers["eagle-eye-without-cells"] == "b"
    cells = {one["cell"]: one["leads"] for one in spread.default.client.get("/api/v1/cells").json()["items"]}
    assert cells == {"default": True, "b": False}


def test_the_next_leader_of_a_cell_judges_its_jobs_and_their_agents_find_it(spread: Spread) -> None:
    assert spread.other.process.poll() is not None  # the test before killed it
    with spread.site.server("b2", "b", spread.next) as following:
        spread.until(lambda: leads(following) and judged(following) == {"one", "two"})
        spread.until(lambda: {one.uplink.live._server for one in spread.agents.values()} == {f"http://{spread.next}"})
        wait_until(lambda: spread.default.client.get("/readyz").json()["checks"]["cells"] == "ok")
        spread.until(lambda: spread.default.client.get("/api/v1/fleet").json()["nodes_heard"] == 4)
