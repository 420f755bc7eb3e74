"""PostgreSQL is stopped for a while under two servers in processes of their own: frames are taken, nothing is decided.

That what is decided afterwards happens once is shown by the failover benchmark (``tests/benchmarks/test_failover.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from eagle_eye.server.model.records import Token
from eagle_eye.server.security.auth import sha256
from eagle_eye.server.store.store import Change
from tests.server.builders import frame
from tests.server.own_process import OwnProcess
from tests.server.postgresql_server import PostgresqlServer
from tests.server.test_two_servers import LEASE_S, Site, eventually, leads, metric, pair, site

pytestmark = pytest.mark.slow  # pairs of servers, and what they wait for

__all__ = ["site"]
AGENT, ADMIN = "ee_agent", "ee_admin"
AWAY_S = 15.0  # longer than the server's own patience with its detection loop


@contextmanager
def away(postgresql: PostgresqlServer) -> Iterator[None]:
    postgresql.control("stop", "--wait", "--mode=fast")
    try:
        yield
    finally:
        postgresql.control("start", "--wait")


def sent(server: OwnProcess, number: int) -> int:
    server.client.headers["authorization"] = f"Bearer {AGENT}"
    try:
        return server.send(frame(number, time_s=time.time())).status_code
    finally:
        server.client.headers["authorization"] = f"Bearer {ADMIN}"


def test_while_the_database_is_away_frames_are_taken_and_every_place_says_that_nothing_is_decided(
    site: Site, postgresql: PostgresqlServer
) -> None:
    tokens = (
        Token(id="n1", sha256=sha256(AGENT), scope="agent", node="n1", created_s=time.time()),
        Token(id="admin", sha256=sha256(ADMIN), scope="admin", node=None, created_s=time.time()),
    )
    site.commit(Change(tokens=tokens))
    with pair(site, LEASE_S) as (leader, standby):
        for server in (leader, standby):
            server.client.headers["authorization"] = f"Bearer {ADMIN}"
        assert metric(leader, "ready") in (0.0, 1.0)
        assert metric(standby, "leads") == 0.0
        assert sent(leader, 1) == 200
        with away(postgresql):
            began_s, number = time.monotonic(), 1
            while time.monotonic() - began_s < AWAY_S:
                number += 1
                assert sent(leader, number) == 200
                time.sleep(0.5)
            checks = leader.client.get("/readyz").json()["checks"]
            assert "PostgreSQL must run and be reachable" in checks["storage"]
            assert "nothing is decided until it is" in checks["leader"]
            assert "detectors go on in memory, and nothing was decided for" in checks["detection"]
            assert checks["agents"] == "ok"
            assert (metric(leader, "ready"), metric(leader, "lease_left_seconds")) == (0.0, 0.0)
            assert metric(leader, "ingest_frames_total") == number
            said = leader.client.get("/api/v1/leader").json()
            assert (said["leads"], "nothing is decided until it is" in said["problem"]) == (True, True)
            assert "who leads is not known" in standby.client.get("/readyz").json()["checks"]["leader"]
            assert metric(standby, "leads") == 0.0
            assert "<html" in leader.client.get("/").text
            assert leader.client.get("/api/v1/incidents").status_code == 503
            assert leader.said().count("nothing is decided while the records cannot be used") == 1
        eventually(lambda: any(leads(one) and metric(one, "lease_left_seconds") > 0.0 for one in (leader, standby)))
        eventually(lambda: any("decisions are made again" in one.said() for one in (leader, standby)) or leads(standby))
