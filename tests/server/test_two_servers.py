"""Two servers in processes of their own on one PostgreSQL: one leads, the other stands by and takes over."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.schema.action import ACTION_REQUESTED, PING
from eagle_eye.schema.frame import Rank, block, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import INCIDENTS, Change
from tests.loopback import free_port
from tests.server.builders import SECRET, action, frame
from tests.server.gate import gate
from tests.server.openid_provider import CLIENT_ID, CLIENT_SECRET, providing
from tests.server.own_process import WITHIN_S, OwnProcess, serving, wait_until
from tests.server.postgresql_server import PostgresqlServer
from tests.server.receiver import receiver
from tests.server.shipped_receiver import shipped

pytestmark = pytest.mark.slow  # pairs of servers, and what they wait for each other

JOB = JobState(0, frozenset({"n1", "n2"}), running=True)
MINUTES_S = 120
LEASE_S = 2.0
LONG_LEASE_S = 60.0
HALF_A_REQUEST = (
    b"POST /api/v1/subscriptions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
)


@dataclass
class Site:
    """The database, and what starts servers on it."""

    url: str
    folder: Path

    @contextmanager
    def server(self, name: str, lease_s: float, listen: str = "127.0.0.1:0", more: str = "") -> Iterator[OwnProcess]:
        file = self.folder / f"{name}.toml"
        file.write_text(
            f'{more}[records]\nurl = "{self.url}"\nlease_s = {lease_s}\n'
            + (f'server_url = "http://{listen}"\n' if more else "")
            + "[webhooks]\nallow_private = true\nheartbeat_s = 0.0\n",
            encoding="utf-8",
        )
        with serving(self.folder / name, "--config", str(file), "--listen", listen) as process:
            yield process

    def commit(self, change: Change) -> None:
        """Write as a command beside the servers does."""
        store = open_records(RecordsSettings(self.url), Path("/-"))
        store.commit(change)
        store.close()


@pytest.fixture
def site(postgresql: PostgresqlServer, tmp_path: Path) -> Site:
    return Site(postgresql.new_database(), tmp_path)


@contextmanager
def pair(site: Site, lease_s: float) -> Iterator[tuple[OwnProcess, OwnProcess]]:
    """Run a leader and its standby while the block runs."""
    with ExitStack() as stack:
        leader = stack.enter_context(site.server("a", lease_s))
        wait_until(lambda: leads(leader))
        yield leader, stack.enter_context(site.server("b", lease_s))


class KeepingAgent:
    """The spool and the uplink of one node's agent; its frames say a training step each."""

    def __init__(self, folder: Path, node: str, rank: int, servers: list[str]) -> None:
        self.node, self.rank, self.step = node, rank, 0
        self.spool = Spool(folder, node, Drops())
        self.uplink = Uplink(Destination(Servers(servers), backoff_s_max=0.5), self.spool, Drops(), SystemClock())
        self.uplink.start()

    def frame(self, time_s: float) -> None:
        values = {0: {"train_step": float(self.step)}}
        self.step += 1
        more: dict[str, Any] = {"ranks": [Rank("job", self.rank, 3, 0)], "blocks": [block(Scope.DEVICE, values)]}
        self.spool.append(lambda stream, number: encode_frame(frame(number, self.node, time_s, stream=stream, **more)))
        self.uplink.notify()

    def close(self) -> None:
        self.uplink.stop(0.0)
        self.spool.close()


@pytest.fixture
def both(site: Site) -> Iterator[tuple[OwnProcess, OwnProcess]]:
    """A leader and its standby."""
    with pair(site, LEASE_S) as servers:
        yield servers


def leads(server: OwnProcess) -> bool:
    try:
        return server.client.get("/leadz").status_code == 200
    except httpx.TransportError:
        return False  # between standing by and leading a server accepts and does not answer yet


def metric(server: OwnProcess, name: str) -> float:
    """Return its value, NaN where there is none yet."""
    lines = server.client.get("/metrics").text.splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(f"eagle_eye_{name} ")), "nan"))


def eventually(claim: Callable[[], bool]) -> None:
    def held() -> bool:
        try:
            return claim()
        except httpx.TransportError:
            return False

    wait_until(held)


def test_the_second_server_stands_by_and_says_who_leads(both: tuple[OwnProcess, OwnProcess]) -> None:
    leader, standby = both
    assert (metric(leader, "leads"), metric(standby, "leads")) == (1.0, 0.0)
    assert metric(leader, "epoch") == metric(standby, "epoch") == 1.0
    assert 0.0 < metric(leader, "lease_left_seconds") <= LEASE_S / 2
    assert "eagle_eye_incidents_escalated" in leader.client.get("/metrics").text
    assert "eagle_eye_incidents_escalated" not in standby.client.get("/metrics").text  # each alert is raised once
    ready = standby.client.get("/readyz")
    assert ready.status_code == 503
    assert f"stands by; http://{leader.listen} leads" in ready.json()["checks"]["leader"]
    assert leader.client.get("/readyz").json()["checks"]["leader"] == "ok"
    assert "<html" in standby.client.get("/").text


def test_what_a_standby_is_asked_the_leader_answers(both: tuple[OwnProcess, OwnProcess]) -> None:
    leader, standby = both
    with receiver() as target:
        answer = standby.client.post("/api/v1/subscriptions", json={"url": target.url})
    assert answer.status_code == 201
    assert [one["id"] for one in leader.client.get("/api/v1/subscriptions").json()["items"]] == [answer.json()["id"]]
    assert standby.send(frame(1, time_s=time.time())).status_code == 200
    for server in both:
        assert [one["node"] for one in server.client.get("/api/v1/nodes").json()["items"]] == ["n1"]
    assert standby.client.get("/api/v1/incidents/none").status_code == 404


def test_each_server_says_for_itself_who_leads(both: tuple[OwnProcess, OwnProcess]) -> None:
    leader, standby = both
    for server, leads_itself in ((leader, True), (standby, False)):
        said = server.client.get("/api/v1/leader").json()
        assert datetime.fromisoformat(said.pop("seen_since")).timestamp() <= time.time()
        assert said == {
            "leads": leads_itself,
            "leader": f"http://{leader.listen}",
            "epoch": 1,
            "problem": "",
            "nodes_in_vain": 0,
        }


def test_what_a_standby_reads_from_the_records_says_so(site: Site) -> None:
    with pair(site, LONG_LEASE_S) as (leader, standby):
        assert "eagle-eye-standby" not in standby.client.get("/api/v1/incidents").headers
        leader.process.kill()
        leader.process.wait()
        why = standby.client.get("/api/v1/incidents").headers["eagle-eye-standby"]
        assert why.startswith(f"http://{leader.listen} leads and cannot be reached")


@contextmanager
def signing_in(site: Site, lease_s: float) -> Iterator[tuple[OwnProcess, OwnProcess, str]]:
    """Run a pair at whose standby people sign in, and return a session's cookie that was begun there."""
    (site.folder / "secret").write_text(CLIENT_SECRET)
    with providing(time.time) as provider, ExitStack() as stack:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        more = (
            f'public_url = "http://{addresses[1]}"\n[sign_in]\nread_groups = ["*"]\n[sign_in.provider]\n'
            f'issuer = "{provider.url}"\nclient_id = "{CLIENT_ID}"\nclient_secret_file = "{site.folder / "secret"}"\n'
        )
        leader = stack.enter_context(site.server("a", lease_s, addresses[0], more))
        wait_until(lambda: leads(leader))
        standby = stack.enter_context(site.server("b", lease_s, addresses[1], more))
        begun = standby.client.get("/api/v1/sign-in/start")
        back = httpx.get(begun.headers["location"], trust_env=False).headers["location"]
        assert back.startswith(f"http://{addresses[1]}/api/v1/sign-in/callback?")
        signed_in = standby.client.get(back, headers={"Cookie": begun.headers["set-cookie"].partition(";")[0]})
        assert signed_in.status_code == 303, signed_in.text
        yield leader, standby, signed_in.headers["set-cookie"].partition(";")[0]


def me(server: OwnProcess, session: str) -> httpx.Response:
    return server.client.get("/api/v1/me", headers={"Cookie": session})


def test_a_session_that_was_begun_at_the_standby_counts_at_both_and_after_a_takeover(site: Site) -> None:
    with signing_in(site, LEASE_S) as (leader, standby, session):
        for server in (leader, standby):
            assert me(server, session).json()["person"] == "ada"
        leader.process.kill()
        leader.process.wait()
        eventually(lambda: leads(standby))
        assert me(standby, session).json()["person"] == "ada"


def test_sessions_that_were_ended_are_over_at_both_also_while_nobody_leads(site: Site) -> None:
    with signing_in(site, LONG_LEASE_S) as (leader, standby, session):
        asked = {"Cookie": session, "Eagle-Eye-Request": "1"}
        assert standby.client.post("/api/v1/sessions/end", headers=asked).status_code == 200
        assert me(leader, session).json()["reason"] == "session"
        leader.process.kill()
        leader.process.wait()
        answer = me(standby, session)
        assert (answer.status_code, answer.json()["reason"]) == (401, "session")
        assert "sign in again" in answer.json()["detail"]


def test_while_nobody_leads_a_session_counts_and_signing_in_says_why_it_cannot_be(site: Site) -> None:
    with signing_in(site, LONG_LEASE_S) as (leader, standby, session):
        begun = standby.client.get("/api/v1/sign-in/start")
        leader.process.kill()
        leader.process.wait()
        assert me(standby, session).json()["person"] == "ada"
        back = httpx.get(begun.headers["location"], trust_env=False).headers["location"]
        kept = {"Cookie": begun.headers["set-cookie"].partition(";")[0], "Accept": "text/html"}
        answer = standby.client.get(back, headers=kept)
        assert answer.status_code == 503
        assert "leads" in answer.text


def test_an_agent_with_both_servers_finds_the_leader_before_and_after_it_is_killed(
    both: tuple[OwnProcess, OwnProcess], tmp_path: Path
) -> None:
    leader, standby = both
    spool, clock = Spool(tmp_path / "spool", "n1", Drops()), SystemClock()
    servers = Servers([f"http://{standby.listen}", f"http://{leader.listen}"])
    uplink = Uplink(Destination(servers, backoff_s_max=0.5), spool, Drops(), clock)
    uplink.start()

    def sent(sequence: int) -> None:
        spool.append(lambda stream, number: encode_frame(frame(number, time_s=time.time(), stream=stream)))
        uplink.notify()
        wait_until(lambda: uplink.delivered == sequence)

    sent(1)
    assert servers.current == f"http://{leader.listen}"  # which the standby named
    sent(2)
    leader.process.kill()
    sent(3)
    assert servers.current == f"http://{standby.listen}"
    uplink.stop(1.0)
    spool.close()
    assert leads(standby)


def test_after_the_leaders_host_is_lost_the_next_leader_has_the_last_minutes_of_every_node_once(
    both: tuple[OwnProcess, OwnProcess], tmp_path: Path
) -> None:
    leader, standby = both
    nodes = [f"n{number}" for number in range(3)]
    servers = [f"http://{leader.listen}", f"http://{standby.listen}"]
    agents = [KeepingAgent(tmp_path / f"spool-{node}", node, place, servers) for place, node in enumerate(nodes)]
    first_s = float(int(time.time()) - MINUTES_S)
    with ExitStack() as stack:
        for agent in agents:
            stack.callback(agent.close)
        for second in range(MINUTES_S - 1):
            for agent in agents:
                agent.frame(first_s + second)
        eventually(lambda: all(agent.uplink.delivered == MINUTES_S - 1 for agent in agents))
        leader.process.kill()
        leader.process.wait()
        shutil.rmtree(tmp_path / "a")
        eventually(lambda: leads(standby))
        for agent in agents:
            agent.frame(first_s + MINUTES_S - 1)
        eventually(lambda: all(agent.spool.lacking_count(agent.uplink._journal) == 0 for agent in agents))
        eventually(lambda: metric(standby, "ingest_frames_total") == len(nodes) * MINUTES_S)
    assert metric(standby, "ingest_duplicates_total") == 0.0
    found = standby.client.get(
        "/api/v1/query_range",
        params={"metric": "train_step", "start": first_s - 1, "end": first_s + MINUTES_S, "job": "job"},
    ).json()
    of_node = {one["node"]: [value for _, value in one["points"]] for one in found["series"]}
    assert of_node == {node: [float(second) for second in range(MINUTES_S)] for node in nodes}
    # Of the job it has seen the last step itself, which says nothing of its pace.
    wait_until(lambda: "the windows reach back" in standby.said())
    assert "windows" not in standby.client.get("/readyz").json()["notes"]
    progress = standby.client.get("/api/v1/jobs/job").json()["progress"]
    assert (progress["step"], progress["step_seconds"]) == (MINUTES_S - 1.0, 1.0)


def test_a_leader_that_is_started_again_with_its_folder_is_sent_nothing_again(site: Site, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with site.server("a", LEASE_S) as server:
            listen = server.listen
            agent = KeepingAgent(tmp_path / "spool", "n1", 0, [f"http://{listen}"])
            stack.callback(agent.close)
            for second in range(100):
                agent.frame(time.time() - 200.0 + second)
            eventually(lambda: agent.uplink.delivered == 100)
        with site.server("a", LEASE_S, listen) as server:
            agent.frame(time.time())
            eventually(lambda: agent.uplink.delivered == 101)
            assert agent.spool.lacking_count(agent.uplink._journal) == 0
            assert metric(server, "ingest_resent_frames_total") == 0.0


def test_a_standby_whose_leader_is_not_reached_reads_from_the_records_and_refuses_the_rest(
    site: Site, both: tuple[OwnProcess, OwnProcess]
) -> None:
    leader, standby = both
    site.commit(Change(actions=(action(state="awaiting", expires_s=time.time() + 600),)))
    leader.process.kill()
    leader.process.wait()
    assert [one["id"] for one in standby.client.get("/api/v1/actions").json()["items"]] == ["act_1"]
    refused = standby.client.post("/api/v1/actions/act_1/approve")
    assert (refused.status_code, refused.json()["reason"]) == (503, "standby")
    assert refused.headers["eagle-eye-leader"] == f"http://{leader.listen}"
    assert standby.send(frame(1, time_s=time.time())).status_code == 503


def test_a_standby_leads_once_the_leader_is_killed_and_an_action_is_delivered_and_reported(
    site: Site, both: tuple[OwnProcess, OwnProcess]
) -> None:
    leader, standby = both
    with receiver() as target:
        assert leader.client.post("/api/v1/subscriptions", json={"url": target.url}).status_code == 201
        site.commit(Change(actions=(action(state="awaiting", expires_s=time.time() + 600),)))
        leader.process.kill()
        eventually(lambda: leads(standby))
        assert standby.client.get("/leadz").json()["epoch"] == 2
        assert standby.client.post("/api/v1/actions/act_1/approve").status_code == 200
        wait_until(lambda: len(target.got) == 2)
        ping, event = (json.loads(body) for _, body in target.got)
        assert (ping["type"], ping["data"]["epoch"]) == ("eagle_eye.ping", 2)
        assert (event["type"], event["data"]["epoch"]) == ("eagle_eye.action.requested", 2)
        reported = standby.client.post(event["data"]["report_to"], json={"state": "done", "detail": "excluded n1"})
        assert reported.json()["state"] == "done"
    assert metric(standby, "takeovers_total") == 1.0


def test_a_new_leader_judges_once_subscribers_have_answered_its_ping(site: Site) -> None:
    arrived, answering = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        arrived.set()
        answering.wait(LONG_LEASE_S)

    def judges(server: OwnProcess) -> bool:
        return bool(server.client.get("/readyz").json()["checks"].get("detection") == "ok")

    with pair(site, LONG_LEASE_S) as (leader, standby), gate() as target:
        assert leader.client.post("/api/v1/subscriptions", json={"url": target.url}).status_code == 201
        target.before = hold
        leader.process.send_signal(signal.SIGTERM)
        assert arrived.wait(WITHIN_S)
        assert not judges(standby)
        answering.set()
        wait_until(lambda: judges(standby), LONG_LEASE_S / 2 - 5.0)  # sooner than for one that does not answer
        assert metric(standby, 'leader_pings_total{outcome="answered"}') == 1.0


def test_a_stop_hands_over_without_waiting_for_the_lease(site: Site) -> None:
    with pair(site, LONG_LEASE_S) as (leader, standby):
        began_s = time.monotonic()
        leader.process.send_signal(signal.SIGTERM)
        eventually(lambda: leads(standby))
        assert time.monotonic() - began_s < LONG_LEASE_S / 2
        assert leader.process.wait(WITHIN_S) == 0


def test_a_leader_that_was_stopped_and_wakes_after_the_other_leads_stands_by(
    site: Site, both: tuple[OwnProcess, OwnProcess]
) -> None:
    before, after = both
    before.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: leads(after))
    finally:
        before.process.send_signal(signal.SIGCONT)
    eventually(lambda: not leads(before) and metric(before, "leads") == 0.0)
    assert leads(after)
    assert before.client.get("/api/v1/incidents").status_code == 200
    store = open_records(RecordsSettings(site.url), Path("/-"))
    assert store.all(INCIDENTS) == []
    store.close()


def test_a_woken_leader_says_in_one_line_what_it_breaks_off_and_stands_by(both: tuple[OwnProcess, OwnProcess]) -> None:
    before, after = both
    host, _, port = before.listen.partition(":")
    before.process.send_signal(signal.SIGSTOP)
    with ExitStack() as stack:
        try:
            eventually(lambda: leads(after))
            for _ in range(20):
                client = stack.enter_context(socket.create_connection((host, int(port))))
                client.sendall(HALF_A_REQUEST)
        finally:
            before.process.send_signal(signal.SIGCONT)
        wait_until(lambda: "part=standby" in before.said())
    said = before.said()
    assert "Traceback" not in said
    assert "graceful shutdown exceeded" not in said
    assert said.count("another server has taken over") == 1
    assert said.count("broken off: their clients ask again") <= 1


def subscribe(server: OwnProcess, url: str) -> None:
    assert server.client.post("/api/v1/subscriptions", json={"url": url, "secret": SECRET}).status_code == 201


def ask_for_an_action(site: Site, server: OwnProcess) -> None:
    site.commit(Change(actions=(action(state="awaiting", detected_s=time.time(), expires_s=time.time() + 600),)))
    assert server.client.post("/api/v1/actions/act_1/approve").status_code == 200


def test_what_a_former_leader_has_in_flight_after_the_new_one_has_pinged_is_refused_and_delivered_anew(
    site: Site, both: tuple[OwnProcess, OwnProcess]
) -> None:
    before, after = both
    in_flight, first_may_pass, second_may_pass = (threading.Event() for _ in range(3))

    def hold(event: dict[str, Any]) -> None:
        if event["type"] == ACTION_REQUESTED and event["data"]["epoch"] == 1:
            in_flight.set()
            first_may_pass.wait(WITHIN_S)
        elif event["type"] == ACTION_REQUESTED:
            second_may_pass.wait(WITHIN_S)

    with shipped(site.folder, JOB, SECRET) as orchestrator, gate(orchestrator.url) as target:
        target.before = hold
        subscribe(before, target.url)
        ask_for_an_action(site, before)
        assert in_flight.wait(WITHIN_S)
        before.process.send_signal(signal.SIGSTOP)
        try:
            assert target.wait_for(PING, 2) == 200
            first_may_pass.set()
            assert target.wait_for(ACTION_REQUESTED, 1) == 409
        finally:
            before.process.send_signal(signal.SIGCONT)
        assert orchestrator.queued() == []
        second_may_pass.set()
        assert target.wait_for(ACTION_REQUESTED, 2) == 202
        assert [one.epoch for one in orchestrator.queued()] == [2]
    eventually(lambda: not leads(before))
    assert (metric(after, "epoch"), metric(before, "epoch_rises_total")) == (2.0, 0.0)


def test_a_claim_that_waited_at_a_stopped_leader_is_not_granted_beside_the_next_ones(
    site: Site, both: tuple[OwnProcess, OwnProcess]
) -> None:
    before, after = both
    site.commit(Change(actions=(action(expires_s=time.time() + 600),)))
    answers: list[int] = []

    def claim(server: OwnProcess, name: str) -> int:
        body = {"state": "accepted", "claim": name, "epoch": 1}
        return server.client.post("/api/v1/actions/act_1/reports", json=body).status_code

    before.process.send_signal(signal.SIGSTOP)
    try:
        late = threading.Thread(target=lambda: answers.append(claim(before, "late")))
        late.start()
        eventually(lambda: leads(after))
        assert claim(after, "first") == 200
    finally:
        before.process.send_signal(signal.SIGCONT)
    late.join(WITHIN_S)
    assert answers in ([409], [503])
    (report,) = after.client.get("/api/v1/actions/act_1").json()["reports"]
    assert report["claim"] == "first"


def test_a_leader_whose_database_was_restored_rises_above_the_epoch_that_a_subscriber_has_seen(site: Site) -> None:
    with shipped(site.folder, JOB, SECRET) as orchestrator:
        orchestrator.ledger.highest_epoch(7)
        with site.server("a", LONG_LEASE_S) as leader:
            wait_until(lambda: leads(leader))
            subscribe(leader, orchestrator.url)
            ask_for_an_action(site, leader)
            wait_until(lambda: orchestrator.ledger.state_of("act_1") is not None)
            assert [one.epoch for one in orchestrator.queued()] == [8]
            assert leader.client.get("/leadz").json()["epoch"] == 8
            assert metric(leader, "epoch_rises_total") == 1.0
            (entry,) = leader.client.get("/api/v1/audit", params={"verb": "raise epoch"}).json()["items"]
            assert entry["detail"] == "to 8: the subscription had seen 7"
            assert "the epoch is raised above the one that a subscriber has seen" in leader.said()


def test_a_ping_finds_out_that_the_database_was_restored_before_it_is_judged(site: Site) -> None:
    with shipped(site.folder, JOB, SECRET) as orchestrator:
        with site.server("a", LONG_LEASE_S) as leader:
            wait_until(lambda: leads(leader))
            subscribe(leader, orchestrator.url)
            leader.process.send_signal(signal.SIGTERM)  # it gives the lease back: the next one need not wait for it
            leader.process.wait(WITHIN_S)
        orchestrator.ledger.highest_epoch(7)
        # Pings are waited for half a lease, and one that is refused is repeated within that.
        with site.server("b", LONG_LEASE_S) as leader:
            eventually(lambda: metric(leader, 'leader_pings_total{outcome="answered"}') == 1.0)
            assert leader.client.get("/leadz").json()["epoch"] == 8
