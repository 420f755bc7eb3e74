"""From this version to the next and back while one server always leads, as docs/how-to/two-servers.md has it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from eagle_eye.demo.two_servers import postgresql_programs
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import Change
from tests.compatibility.next_version import next_version
from tests.server.builders import SECRET, action
from tests.server.own_process import OwnProcess, serving, wait_until
from tests.server.postgresql_server import serving as serving_postgresql
from tests.server.shipped_receiver import Shipped, shipped

pytestmark = pytest.mark.slow  # six starts of servers

JOB = JobState(0, frozenset({"n1", "n2"}), running=True)
LEASE_S = 60.0  # what is handed over is not waited for


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of the next version: this one, whose tables have a version more."""
    return next_version(tmp_path_factory.mktemp("newer"))


class Site:
    """A database, a subscriber, and servers of both versions."""

    def __init__(self, url: str, folder: Path, orchestrator: Shipped) -> None:
        self.url = url
        self._folder = folder
        self.orchestrator = orchestrator

    @contextmanager
    def server(self, name: str, python: str) -> Iterator[OwnProcess]:
        file = self._folder / f"{name}.toml"
        records = f'[records]\nurl = "{self.url}"\nlease_s = {LEASE_S}\n'
        file.write_text(f"{records}[webhooks]\nallow_private = true\nheartbeat_s = 0.0\n", encoding="utf-8")
        with serving(self._folder / name, "--config", str(file), python=python) as process:
            yield process

    def delivered(self, leader: OwnProcess, identifier: str) -> int:
        """Have an action asked for; return the epoch with which it is delivered."""
        asked = action(id=identifier, state="awaiting", detected_s=time.time(), expires_s=time.time() + 600)
        store = open_records(RecordsSettings(self.url), Path("/-"))
        store.commit(Change(actions=(asked,)))
        store.close()
        assert leader.client.post(f"/api/v1/actions/{identifier}/approve").status_code == 200
        wait_until(lambda: self.orchestrator.ledger.state_of(identifier) is not None)
        [taken] = self.orchestrator.queued()
        assert taken.action_id == identifier
        return taken.epoch


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if (bin_ := postgresql_programs()) is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql-15)")
    with serving_postgresql(bin_) as postgresql, shipped(tmp_path, JOB, SECRET) as orchestrator:
        yield Site(postgresql.new_database(), tmp_path, orchestrator)


def leads(server: OwnProcess) -> bool:
    try:
        return server.client.get("/leadz").status_code == 200
    except httpx.TransportError:
        return False


def hand_over(leader: OwnProcess, standby: OwnProcess) -> None:
    """Stop the leader; the standby leads, long before the lease is over."""
    began_s = time.monotonic()
    leader.process.send_signal(signal.SIGTERM)
    wait_until(lambda: leads(standby))
    took_s = time.monotonic() - began_s
    print(f"handed over within {took_s:.1f} s")
    assert took_s < LEASE_S / 2
    assert leader.process.wait(60.0) == 0


def test_one_server_after_the_other_goes_to_the_next_version_and_back_and_each_action_is_delivered_once(
    site: Site, newer: str
) -> None:
    with ExitStack() as servers:

        def start(name: str, python: str) -> OwnProcess:
            return servers.enter_context(site.server(name, python))

        old_a = start("a", sys.executable)
        wait_until(lambda: leads(old_a))
        body = {"url": site.orchestrator.url, "secret": SECRET}
        assert old_a.client.post("/api/v1/subscriptions", json=body).status_code == 201
        new_b = start("b-next", newer)  # migrates the tables beside the older one, which leads
        assert "keeps it usable" not in new_b.said()
        epochs = [site.delivered(old_a, "act_1")]
        hand_over(old_a, new_b)
        new_a = start("a-next", newer)
        epochs.append(site.delivered(new_b, "act_2"))

        hand_over(new_b, new_a)
        old_b = start("b", sys.executable)  # on newer tables
        assert "version 9000 of a newer server, which keeps it usable" in old_b.said()
        hand_over(new_a, old_b)
        epochs.append(site.delivered(old_b, "act_3"))
        assert epochs == sorted(set(epochs))
        items = old_b.client.get("/api/v1/actions").json()["items"]
        assert sorted(one["id"] for one in items) == ["act_1", "act_2", "act_3"]
