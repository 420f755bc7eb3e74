"""Nodes that somebody vouches for, those that a remote-write token makes up, and how either is forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.cli.main import main
from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS
from eagle_eye.schema.rows import encode_row, encode_rows_request, encode_template, template_id, template_of
from eagle_eye.server.ingest.fleet import Vouchers
from eagle_eye.server.model.identity import NodeNames
from eagle_eye.server.model.records import Job, Node, Token
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import INCIDENTS, NODES, Change
from tests.server.builders import NOW, FakeClock, Running, body, frame, incident, running
from tests.server.remote_write.requests import V1_HEADERS, series, snappy, v1

CAP = 3


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(tmp_path: Path, clock: FakeClock) -> Iterator[Running]:
    with running(tmp_path, clock, remote_write__token_nodes_max=CAP) as started:
        yield started


def token(server: Running, *nodes: str, nodes_max: int | None = None) -> tuple[str, Token]:
    text, made = mint("remote_write", None, NOW, None, nodes or ("*",), nodes_max=nodes_max)
    server.dispatcher.services.store.commit(Change(tokens=(made,)))
    return f"Bearer {text}", made


def admin(server: Running) -> dict[str, str]:
    text, made = mint("admin", None, NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(made,)))
    return {"authorization": f"Bearer {text}"}


def write(server: Running, bearer: str, *nodes: str, time_s: float = NOW) -> httpx.Response:
    written = [series("DCGM_FI_DEV_GPU_TEMP", 50.0, time_s, gpu="0", Hostname=node) for node in nodes]
    headers = {**V1_HEADERS, **({"authorization": bearer} if bearer else {})}
    return server.client.post("/api/v1/write", content=snappy(v1(*written)), headers=headers)


def known(server: Running) -> set[str]:
    return {node.node for node in server.dispatcher.services.store.all(NODES)}


class TestWhoVouches:
    def test_an_agent_counts_and_a_name_by_remote_write_does_not(self, server: Running) -> None:
        server.send(body(frame(1)))
        bearer, _ = token(server)
        assert write(server, bearer, "made-up").status_code == 204
        assert known(server) == {"n1", "made-up"}
        assert server.watcher.fleet_size() == 1
        assert server.metric("nodes_vouched") == 1

    def test_where_no_tokens_are_everybody_on_this_machine_is_believed(self, server: Running) -> None:
        assert write(server, "", "n1", "n2").status_code == 204
        assert server.watcher.fleet_size() == 2

    def test_an_administrator_and_a_token_that_names_the_node_are_believed(self, server: Running) -> None:
        bearer, _ = token(server, "n1", "gpu-*")
        assert write(server, bearer, "n1", "gpu-7").status_code == 204
        assert server.watcher.fleet_size() == 1
        assert write(server, admin(server)["authorization"], "n3").status_code == 204
        assert server.watcher.fleet_size() == 2

    def test_a_declared_job_and_an_agents_token_vouch(self, server: Running, clock: FakeClock) -> None:
        job = Job(
            job="llm", attempt=0, state="running", ranks=[MemberRank(0, "n1", 0)], restart_owner="", updated_s=NOW
        )
        _, enrolled = mint("agent", "n2", NOW, None)
        _, over = mint("agent", "n3", NOW, 5.0)
        server.dispatcher.services.store.commit(Change(jobs=(job,), tokens=(enrolled, over)))
        bearer, _ = token(server)
        clock.advance(20.0)
        assert write(server, bearer, "n1", "n2", "n3", "n4", time_s=NOW + 20).status_code == 204
        assert server.watcher.fleet_size() == 2

    def test_the_topology_file_vouches(self, tmp_path: Path) -> None:
        (tmp_path / "topology.json").write_text('{"switch_of_node": {"n1": "leaf1"}, "rack_of_node": {"n2": "r1"}}')
        with running(tmp_path / "data", topology_file=str(tmp_path / "topology.json")) as server:
            bearer, _ = token(server)
            assert write(server, bearer, "n1", "n2", "n3").status_code == 204
            assert server.watcher.fleet_size() == 2

    def test_a_scheduler_vouches_for_one_of_ours_by_each_of_its_names(self) -> None:
        vouchers = Vouchers()
        vouchers.use_scheduler("slurm", NodeNames(["gpu1", "gpu2.site"]))
        assert vouchers.vouch_for("GPU1")
        assert vouchers.vouch_for("gpu2")
        assert not vouchers.vouch_for("gpu2.elsewhere")
        assert vouchers.count({"gpu1", *(f"gpu1.made-up-{at}" for at in range(50))}) <= 2
        vouchers.use_scheduler("slurm", NodeNames([]))
        assert not vouchers.vouch_for("gpu1")

    @given(
        made_up=st.sets(st.text(min_size=1, max_size=8), max_size=20),
        named=st.sets(st.text(min_size=1, max_size=8), max_size=5),
    )
    def test_no_set_of_names_counts_for_more_than_those_who_vouch_say(self, made_up: set[str], named: set[str]) -> None:
        vouchers = Vouchers()
        vouchers.use_scheduler("slurm", NodeNames(named))
        # Of each of its names one by its domain, and all that differ by case alone.
        folded = {name.casefold() for name in named}
        exact = sum(name.casefold() in folded for name in made_up)
        assert vouchers.count(made_up) <= exact + len(named)


class TestTheCap:
    def test_new_nodes_beyond_a_tokens_cap_are_named_and_counted_and_the_rest_is_written(self, server: Running) -> None:
        bearer, _ = token(server)
        assert write(server, bearer, "a").status_code == 204
        answer = write(server, bearer, "a", "b", "c", "d", "e", time_s=NOW + 15)
        assert (answer.status_code, answer.json()["reason"]) == (400, "too_many_new_nodes")
        assert "remote_write.token_nodes_max" in answer.json()["detail"]
        assert known(server) == {"a", "b", "c"}
        assert server.metric("remote_write_left_out_total", reason="too_many_new_nodes") == 2
        assert write(server, bearer, "a", "b", "c", time_s=NOW + 30).status_code == 204

    def test_each_token_has_its_own_and_an_operator_raises_it(self, server: Running) -> None:
        first, second = token(server)[0], token(server, nodes_max=5)[0]
        names = [f"n{at}" for at in range(5)]
        assert write(server, first, *names).status_code == 400
        assert write(server, second, *(f"m{at}" for at in range(5))).status_code == 204
        assert len(known(server)) == CAP + 5

    def test_a_token_may_name_none_that_nobody_vouches_for(self, server: Running) -> None:
        bearer, _ = token(server, "n1", "x*", nodes_max=0)
        assert write(server, bearer, "n1").status_code == 204
        assert write(server, bearer, "x1").status_code == 400
        assert known(server) == {"n1"}

    def test_the_cap_holds_over_a_restart(self, tmp_path: Path, clock: FakeClock) -> None:
        for names, status in ((("a", "b", "c"), 204), (("d",), 400)):
            with running(tmp_path, clock, remote_write__token_nodes_max=CAP) as server:
                if status == 204:
                    bearer, _ = token(server)
                assert write(server, bearer, *names, time_s=clock.time_s).status_code == status
            clock.advance(60.0)

    def test_what_was_reserved_and_not_kept_is_given_back(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bearer, _ = token(server)
        with monkeypatch.context() as patched:
            full = lambda _batches: (_ for _ in ()).throw(server_unavailable())  # noqa: E731
            patched.setattr(server.dispatcher.services.history, "submit", full)
            assert write(server, bearer, "a", "b", "c").status_code == 503
        assert write(server, bearer, "d", "e", "f").status_code == 204

    def test_invented_nodes_take_no_real_ones_place(self, tmp_path: Path) -> None:
        with running(tmp_path, ingest__nodes_max=2, remote_write__token_nodes_max=10) as server:
            bearer, _ = token(server)
            join, made = mint("join", None, NOW, 3_600.0)
            server.dispatcher.services.store.commit(Change(tokens=(made,)))
            answer = write(server, bearer, "a", "b", "c")
            assert (answer.status_code, answer.json()["reason"]) == (400, "too_many_nodes")
            for node in ("n1", "n2"):
                headers = {"authorization": f"Bearer {join}"}
                enrolled = server.client.post("/api/v1/enrol", json={"node": node}, headers=headers)
                assert enrolled.status_code == 201
                sent = server.send(body(frame(node=node)), authorization=f"Bearer {enrolled.json()['token']}")
                assert sent.status_code == 200
            refused = server.client.post("/api/v1/enrol", json={"node": "n3"}, headers=headers)
            assert (refused.status_code, refused.json()["reason"]) == (403, "too_many_nodes")

    def test_a_node_leaves_the_cap_once_its_agent_speaks(self, server: Running) -> None:
        bearer, made = token(server)
        write(server, bearer, "a", "b", "c")
        server.send(body(frame(node="a")), **admin(server))
        assert write(server, bearer, "d").status_code == 204
        nodes = {one.node: one.introduced_by for one in server.dispatcher.services.store.all(NODES)}
        assert nodes == dict.fromkeys("abcd", made.id)


def server_unavailable() -> Exception:
    from eagle_eye.server.model.errors import HistoryUnavailable

    return HistoryUnavailable("the disk is full")


def forget(server: Running, **asked: Any) -> dict[str, Any]:
    answer = server.client.post("/api/v1/nodes/forget", json=asked)
    assert answer.status_code == 200, answer.text
    reported: dict[str, Any] = answer.json()
    return reported


class TestForgetting:
    def test_a_forgotten_node_is_in_no_list_count_or_memory_also_after_a_restart(
        self, tmp_path: Path, clock: FakeClock
    ) -> None:
        with running(tmp_path, clock) as server:
            server.send(body(frame(node="n1"), sent_s=NOW))
            server.send(body(frame(node="n2"), sent_s=NOW))
            clock.advance(3_600.0)
            assert forget(server, nodes=["n1"]) == {"forgotten": ["n1"], "kept": []}
            assert known(server) == {"n2"}
            assert server.dispatcher.services.fleet.names() == {"n2"}
            assert server.watcher.fleet_size() == 1
            assert server.client.get("/api/v1/nodes/n1").status_code == 404
            audit = server.client.get("/api/v1/audit").json()["items"]
            assert [(entry["verb"], entry["subject"]) for entry in audit] == [("forget", "n1")]
        with running(tmp_path, clock) as server:
            assert known(server) == {"n2"}
            assert server.dispatcher.services.fleet.names() == {"n2"}
            clock.advance(60.0)
            server.send(body(frame(2, node="n1", time_s=clock.time_s), sent_s=clock.time_s))
            assert known(server) == {"n1", "n2"}
        with running(tmp_path, clock) as server:
            assert server.dispatcher.services.fleet.names() == {"n1", "n2"}

    def test_a_node_by_rows_comes_back_as_a_new_one(self, server: Running, clock: FakeClock) -> None:
        template = template_of(frame())
        raw = encode_template(template)

        def row(sequence: int, *templates: bytes) -> None:
            one = frame(sequence, time_s=clock.time_s)
            content = encode_rows_request(templates, [encode_row(one, template, template_id(raw))], clock.time_s)
            headers = {"content-type": ROWS}
            assert server.client.post("/api/v1/frames", content=content, headers=headers).status_code == 200

        row(1, raw)
        row(2)
        assert forget(server, nodes=["n1"], force=True)["forgotten"] == ["n1"]
        assert known(server) == set()
        clock.advance(1.0)
        row(3)
        row(4)
        assert known(server) == {"n1"}
        assert server.dispatcher.services.fleet.names() == {"n1"}

    @pytest.mark.parametrize("case", ["heard", "out_of_service", "open_incident", "not_found"])
    def test_what_stands_against_it_is_named_and_force_does_it_all_the_same(
        self, server: Running, clock: FakeClock, case: str
    ) -> None:
        store = server.dispatcher.services.store
        if case != "not_found":
            server.send(body(frame()))
        if case != "heard":
            clock.advance(3_600.0)
        if case == "out_of_service":
            store.commit(Change(nodes=(Node(node="n1", state="excluded", reason="", updated_s=NOW),)))
        if case == "open_incident":
            store.commit(Change(incidents=(incident(),)))
        reported = forget(server, nodes=["n1"])
        assert (reported["forgotten"], [kept["reason"] for kept in reported["kept"]]) == ([], [case])
        assert forget(server, nodes=["n1"], force=True)["forgotten"] == ([] if case == "not_found" else ["n1"])
        assert len(store.all(INCIDENTS)) == (case == "open_incident")

    def test_all_that_were_not_heard_for_long_or_that_a_token_named_go_at_once(
        self, server: Running, clock: FakeClock
    ) -> None:
        server.send(body(frame(node="old")))
        bearer, made = token(server)
        write(server, bearer, "a", "b")
        headers = admin(server)
        clock.advance(8 * 86_400.0)
        server.send(body(frame(node="new", time_s=clock.time_s), sent_s=clock.time_s), **headers)
        server.client.headers.update(headers)
        would = forget(server, introduced_by=made.id, dry_run=True)
        assert sorted(would["forgotten"]) == ["a", "b"]
        assert known(server) == {"old", "new", "a", "b"}
        assert sorted(forget(server, introduced_by=made.id)["forgotten"]) == ["a", "b"]
        assert forget(server, unheard_for_s=7 * 86_400.0)["forgotten"] == ["old"]
        assert known(server) == {"new"}

    def test_a_forgotten_token_s_nodes_make_room(self, server: Running, clock: FakeClock) -> None:
        bearer, made = token(server)
        write(server, bearer, "a", "b", "c")
        clock.advance(3_600.0)
        server.client.headers.update(admin(server))
        forget(server, introduced_by=made.id)
        assert write(server, bearer, "d", time_s=clock.time_s).status_code == 204

    def test_operators_alone_may_and_who_says_nothing_forgets_nobody(self, server: Running) -> None:
        server.send(body(frame()))
        assert forget(server, force=True) == {"forgotten": [], "kept": []}
        text, made = mint("read", None, NOW, None)
        server.dispatcher.services.store.commit(Change(tokens=(made,)))
        headers = {"authorization": f"Bearer {text}"}
        assert server.client.post("/api/v1/nodes/forget", json={"nodes": ["n1"]}, headers=headers).status_code == 403

    def test_the_command_forgets_and_names_what_it_keeps(
        self, server: Running, clock: FakeClock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EAGLE_EYE_SERVER", server.url)
        server.send(body(frame(node="n1")))
        assert main(["nodes", "forget", "n1", "n9"]) == 1
        reported = capsys.readouterr()
        assert "n1 is kept: it was heard 0 s ago" in reported.err
        assert "n9 is kept: no node is called that\n" in reported.err
        assert main(["nodes", "forget", "n1", "--force", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"forgotten": ["n1"], "kept": []}
        assert main(["nodes", "forget"]) == 2
        assert "--unheard-for" in capsys.readouterr().err
        server.send(body(frame(2, node="n2")))
        clock.advance(8 * 86_400.0)
        assert main(["nodes", "forget", "--unheard-for", "7d"]) == 0
        assert "n2 forgotten" in capsys.readouterr().out
        assert known(server) == set()
