"""Where the site wants it, people who may only look see the jobs alone that they or their groups own."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from eagle_eye.schema.frame import Frame, Rank, decode_frame
from eagle_eye.schema.recording import messages
from eagle_eye.server.api.visibility import SHOWN
from eagle_eye.server.model.records import Attempt, EvidenceRequest, Job, Node
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.server import test_openapi as each
from tests.server.builders import NOW, Running, action, body, event, frame, incident, running, silence

MINE, THEIRS = "ada-run", "secret-run"
LOOK: dict[str, Any] = {
    "sign_in__proxy__user_header": "X-User",
    "sign_in__proxy__groups_header": "X-Groups",
    "sign_in__proxy__addresses": ("127.0.0.1",),
    "sign_in__read_groups": ("*",),
    "sign_in__operate_groups": ("gpu-ops",),
    "sign_in__admin_groups": ("root",),
}
ASKED: dict[str, dict[str, Any]] = {
    "/api/v1/query_range": {"metric": "gpu_power_watts", "start": NOW - 60, "end": NOW + 60},
    "/api/v1/jobs/{job}/recording": {"start": NOW - 60, "end": NOW + 60},
}
ENDLESS = "/api/v1/events"


def job(name: str, owner: str) -> Job:
    return Job(job=name, attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW, owner=owner)


def course(name: str, owner: str) -> JobProgress:
    return JobProgress(
        job=name,
        attempt=0,
        state="running",
        declared=True,
        started_s=NOW - 60,
        first_step=1.0,
        step=4.0,
        progressed_s=NOW,
        step_s=1.0,
        nodes=("n1",),
        gpus=8,
        heard=1,
        metrics=frozenset({"gpu_power_watts"}),
        owner=owner,
    )


def of_both(server: Running) -> None:
    """Keep one of each record for both jobs; what is mine speaks of theirs, as records of one node may."""
    each.one_of_each(server)
    said = f"n1 hangs; {THEIRS} runs there, too"
    changes = []
    for name, owner, word in ((MINE, "ada", "mine"), (THEIRS, "bob-secret", "secret")):
        found = incident(f"inc_{word}", job=name, summary=said, hold=said)
        changes.append(
            Change(
                incidents=(found,),
                actions=(action(f"act_{word}", job=name, incident_id=found.id, summary=said),),
                events=(event(f"evt-{word}", job=name, subject=found.id, group=found.id, data={"summary": said}),),
                jobs=(job(name, owner),),
                evidence=(replace(each.EVIDENCE, id=f"ev_{word}", job=name, incident_id=found.id),),
                deliveries=(replace(each.DELIVERY, id=f"d-{word}", event_id=f"evt-{word}"),),
            )
        )
    for change in changes:
        server.dispatcher.services.store.commit(change)
    node = Node(node="n1", state="draining", reason=f"the fault of {THEIRS}", updated_s=NOW)
    server.dispatcher.services.store.commit(Change(nodes=(node,)))
    text, agent = mint("agent", "n1", NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(agent,)))
    sent = body(frame(job=THEIRS, ranks=[Rank(THEIRS, 0, 1, 0), Rank(MINE, 0, 1, 0)]))
    assert server.send(sent, authorization=f"Bearer {text}").status_code == 200
    server.watcher.course = [course(MINE, "ada"), course(THEIRS, "bob-secret")]
    for name, word in ((MINE, "mine"), (THEIRS, "secret")):
        received(server, replace(each.EVIDENCE, id=f"ev_{word}", job=name, incident_id=f"inc_{word}"))


def received(server: Running, request: EvidenceRequest) -> None:
    """Keep a bundle that answers the request."""
    services = server.dispatcher.services
    incoming = services.evidence_requests.bundles.begin(request.id)
    incoming.write(gzip.compress(b"stacks"))
    incoming.finish()
    services.store.commit(Change(evidence=(replace(request, state="received"),)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data"), sign_in__jobs_visible="owners", **LOOK) as found:
        of_both(found)
        yield found


def ask(server: Running, path: str, groups: str = "staff", who: str = "ada", **more: Any) -> httpx.Response:
    return server.client.get(path, headers={"X-User": who, "X-Groups": groups}, params=more)


# Who asks, in which groups; the last four see all jobs or another's, whatever is ada's.
OWNER, OTHER, OPERATOR, ADMIN = ("ada", "staff"), ("bob", "staff"), ("eve", "gpu-ops"), ("ann", "root")


def by_token(server: Running, path: str, **more: Any) -> httpx.Response:
    """Ask with a token of scope read, which is nobody's: it sees all jobs."""
    text, record = mint("read", None, NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    return server.client.get(path, headers={"Authorization": f"Bearer {text}"}, params=more)


def ids(server: Running, path: str, key: str = "id", groups: str = "staff") -> set[str]:
    return {item[key] for item in ask(server, path, groups).json()["items"]}


def paths(server: Running) -> list[str]:
    found = [path for path, methods in server.client.get("/openapi.json").json()["paths"].items() if "get" in methods]
    assert len(found) > 30
    return [path for path in found if path != ENDLESS]


def known(word: str, name: str) -> dict[str, str]:
    ends = {"incident": f"inc_{word}", "action": f"act_{word}", "evidence": f"ev_{word}", "delivery": f"d-{word}"}
    return {**each.KNOWN, **ends, "job": name}


def test_no_endpoint_tells_of_anothers_job(server: Running) -> None:
    """Each is asked for what is mine, for what is another's, and with the other's job as a filter."""
    for path in paths(server):
        for record in (known("mine", MINE), known("secret", THEIRS)):
            for filters in ({}, {"job": MINE}, {"job": THEIRS}):
                answer = ask(server, path.format(**record), **ASKED.get(path, {}), **filters)
                echoed = {*record.values(), *filters.values()}
                text = answer.text
                if answer.status_code == 404:  # it repeats what was asked for, and says no more
                    text = re.sub("|".join(map(re.escape, sorted(echoed, key=len, reverse=True))), "", text)
                assert "secret" not in text, (path, record["job"], filters, answer.text[:2_000])


def test_what_is_mine_is_shown_by_every_endpoint_that_shows_jobs(server: Running) -> None:
    for path in SHOWN.keys() - {ENDLESS, "/api/v1/incidents/{incident}/picture"}:
        answer = ask(server, path.format(**known("mine", MINE)), **ASKED.get(path, {}), job=MINE)
        assert answer.status_code == 200, (path, answer.text)


def test_another_ones_record_is_refused_like_one_that_is_not_there(server: Running) -> None:
    for path, shown in SHOWN.items():
        if shown.record:
            refusals = []
            for name in (known("secret", THEIRS)[shown.record], "nothing-at-all"):
                answer = ask(server, path.format(**{shown.record: name}))
                refusals.append((answer.status_code, answer.text.replace(name, "")))
            assert refusals[0] == refusals[1]
            assert refusals[0][0] == 404


def test_an_endpoint_that_nobody_thought_of_is_refused_and_says_who_sees_it(server: Running) -> None:
    answer = ask(server, "/api/v1/ledger/steps")
    assert (answer.status_code, answer.json()["reason"]) == (403, "owners_only")
    assert "sign_in.jobs_visible" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/metrics", "those of one are at /api/v1/query_range?job=NAME"),
        ("/api/v1/ledger/steps", "trust in a step is counted over the decisions of all jobs"),
        ("/api/v1/tickets", "repair tickets are of nodes"),
        ("/api/v1/subscriptions", "this is of all jobs"),
        ("/api/v1/query_range?metric=gpu_power_watts&node=n1&start=0&end=1", "name one of yours with ?job=NAME"),
    ],
)
def test_what_is_of_the_whole_site_is_refused_to_owners_who_are_told_why_and_whom_to_ask(
    path: str, why: str, server: Running
) -> None:
    for who, groups in (OWNER, OTHER):
        answer = server.client.get(path, headers={"X-User": who, "X-Groups": groups})
        assert (answer.status_code, answer.json()["reason"]) == (403, "owners_only")
        assert why in answer.json()["detail"]
        assert "ask somebody in gpu-ops (sign_in.operate_groups)" in answer.json()["detail"]
    for who, groups in (OPERATOR, ADMIN):
        assert server.client.get(path, headers={"X-User": who, "X-Groups": groups}).status_code == 200
    text, record = mint("read", None, NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    assert server.client.get(path, headers={"Authorization": f"Bearer {text}"}).status_code == 200


PARTS_OF_A_JOB: dict[str, dict[str, Any]] = {
    f"/api/v1/jobs/{MINE}/recording": {"start": NOW - 60, "end": NOW + 60},
    f"/api/v1/jobs/{MINE}/course": {},
    "/api/v1/evidence/ev_mine/bundle": {},
    "/api/v1/incidents/inc_mine/dossier": {},
    "/api/v1/query_range": {"metric": "gpu_power_watts", "job": MINE, "node": "n1", "start": NOW - 60, "end": NOW + 60},
}


@pytest.mark.parametrize("path", PARTS_OF_A_JOB)
def test_a_jobs_recording_bundles_report_and_its_nodes_metrics_are_its_owners(path: str, server: Running) -> None:
    asked = PARTS_OF_A_JOB[path]
    seen = [ask(server, path, groups, who, **asked).status_code for who, groups in (OWNER, OTHER, OPERATOR, ADMIN)]
    assert seen == [200, 404, 200, 200]
    assert by_token(server, path, **asked).status_code == 200


def test_nvidias_report_of_the_whole_host_is_no_owners(tmp_path: Path) -> None:
    with running(tmp_path, sign_in__jobs_visible="owners", **LOOK) as server:
        of_both(server)
        report = replace(each.EVIDENCE, id="ev_mine", job=MINE, incident_id="inc_mine", kind="bug_report")
        received(server, report)
        refused = ask(server, "/api/v1/evidence/ev_mine/bundle")
        assert (refused.status_code, refused.json()["reason"]) == (403, "owners_only")
        assert "the processes of the whole host" in refused.json()["detail"]
        assert ask(server, "/api/v1/evidence/ev_mine/bundle", "gpu-ops").status_code == 200


def recorded(answer: httpx.Response) -> list[Frame]:
    """Return the frames of a recording."""
    assert answer.status_code == 200
    _, *frames = messages(BytesIO(answer.content).read)
    return [decode_frame(one) for one in frames]


def test_an_owners_recording_has_a_node_while_it_works_for_the_job_and_names_no_other(tmp_path: Path) -> None:
    with running(tmp_path, sign_in__jobs_visible="owners", **LOOK) as server:
        server.dispatcher.services.store.commit(Change(jobs=(job(MINE, "ada"), job(THEIRS, "bob"))))
        said = [
            (1, NOW - 40, [Rank(THEIRS, 0, 1, 0)]),  # the node is another's
            (2, NOW - 20, [Rank(MINE, 0, 1, 0)]),
            (3, NOW - 15, []),  # its rank has died, within the attempt
            (4, NOW - 10, [Rank(MINE, 0, 1, 0)]),
            (5, NOW - 5, []),  # nobody's, after the attempt
        ]
        text, agent = mint("agent", "n1", NOW, None)
        server.dispatcher.services.store.commit(Change(tokens=(agent,)))
        for number, at_s, ranks in said:
            one = body(frame(number, time_s=at_s, job=ranks[0].job if ranks else None, ranks=ranks))
            assert server.send(one, authorization=f"Bearer {text}").status_code == 200
        lasted: dict[str, Any] = {"started_s": NOW - 21, "seen_s": NOW - 9, "ended_s": NOW - 9}
        attempt = Attempt(id="a1", run="a1", job=MINE, attempt=0, nodes=1, node="n1", **lasted)
        server.dispatcher.services.store.commit(Change(attempts=(attempt,)))
        path = f"/api/v1/jobs/{MINE}/recording"
        asked: dict[str, Any] = {"start": NOW - 60, "end": NOW + 60}
        mine = recorded(ask(server, path, **asked))
        assert [one.sequence for one in mine] == [2, 3, 4]
        assert {one.job for one in mine} == {MINE, None}
        assert len(recorded(ask(server, path, "gpu-ops", **asked))) > 3


def test_what_is_of_all_jobs_is_shown_of_one_of_mine(server: Running) -> None:
    assert ask(server, "/api/v1/goodput").json()["reason"] == "owners_only"
    assert ask(server, "/api/v1/goodput", job=MINE).status_code == 200
    assert ask(server, "/api/v1/goodput", job=THEIRS).status_code == 404


def test_lists_have_what_is_mine_alone(server: Running) -> None:
    assert ids(server, "/api/v1/jobs", "job") == {MINE}
    assert ids(server, "/api/v1/incidents") == {"inc_mine"}
    assert ids(server, "/api/v1/actions") == {"act_mine"}


def test_a_groups_jobs_are_those_of_its_people(server: Running) -> None:
    assert ids(server, "/api/v1/jobs", "job", "staff,bob-secret") == {MINE, THEIRS}


def test_operators_see_all_jobs(server: Running) -> None:
    assert ids(server, "/api/v1/jobs", "job", "gpu-ops") >= {MINE, THEIRS, "job"}
    assert ask(server, "/api/v1/ledger/steps", "gpu-ops").status_code == 200


def test_the_ledger_counts_what_is_mine_alone(tmp_path: Path) -> None:
    with running(tmp_path, sign_in__jobs_visible="owners", **LOOK) as server:
        of_both(server)
        store = server.dispatcher.services.store
        for name, job_of in (("act_mine", MINE), ("act_secret", THEIRS)):
            store.commit(Change(actions=(action(name, job=job_of, state="would_act", incident_id="", exclude=["n1"]),)))
        ledger = ask(server, "/api/v1/ledger", since="0").json()
        assert [one["action_id"] for one in ledger["items"]] == ["act_mine"]
        counted = ("right", "wrong", "pending", "cannot_tell")
        for total in (ledger["total"], *ledger["by_fault"].values()):
            assert sum(total[name] for name in counted) == 1


def test_a_nodes_history_has_my_incidents_and_the_nodes_own_checks(server: Running) -> None:
    history = ask(server, "/api/v1/nodes/n1/history").json()
    assert {item["id"] for item in history["items"] if item["kind"] == "incident"} == {"inc_mine"}
    assert {item["id"] for item in history["items"] if item["kind"] == "action"} <= {"act_mine"}
    assert any(item["kind"] == "check" for item in history["items"])


def test_silences_of_other_jobs_are_not_there_and_others_name_mine_alone(tmp_path: Path) -> None:
    with running(tmp_path, sign_in__jobs_visible="owners", **LOOK) as server:
        of_both(server)
        for name, jobs in (("a", ["secret-*"]), ("b", ["*-run"]), ("c", [])):
            one = silence(name, jobs=jobs, nodes=[] if jobs else ["n*"])
            server.dispatcher.services.store.commit(Change(silences=(one,)))
        shown = {one["id"]: one for one in ask(server, "/api/v1/silences").json()["items"]}
        assert shown.keys() >= {"b", "c"}
        assert "a" not in shown
        assert shown["b"]["jobs"] == [MINE]
        assert ask(server, "/api/v1/silences/a").status_code == 404
        assert all("inc_secret" not in one["incidents"] for one in shown.values())


def test_a_nodes_facts_are_shown_without_the_name_of_anothers_job(server: Running) -> None:
    node = ask(server, "/api/v1/nodes/n1").json()
    assert node["agent"]["job"] is None
    assert [one["job"] for one in ask(server, "/api/v1/fleet").json()["jobs"]] == [MINE]
    assert node["reason"] == "the fault of another job"
    assert node["state"] == "draining"


def test_events_tell_of_my_jobs_alone(server: Running) -> None:
    headers = {"X-User": "ada", "X-Groups": "staff", "Last-Event-ID": "0"}
    store, heard = server.dispatcher.services.store, ""
    with server.client.stream("GET", ENDLESS, headers=headers) as answer:
        for chunk in answer.iter_text():
            heard += chunk
            if f'"job":"{MINE}"' in heard and f"id: {store.change_range()[1]}\n" in heard:
                break
    assert "secret" not in heard
    kinds = set(re.findall(r"event: (\w+)", heard))
    assert kinds == {"incident", "action", "job", "node"}


def test_a_job_is_seen_once_its_owner_is_known_and_no_longer_when_it_has_another(tmp_path: Path) -> None:
    with running(tmp_path, sign_in__jobs_visible="owners", **LOOK) as server:
        store = server.dispatcher.services.store
        for owner, seen in (("", set()), ("ada", {MINE}), ("bob", set())):
            store.commit(Change(jobs=(job(MINE, owner),)))
            assert ids(server, "/api/v1/jobs", "job") == seen


def test_a_job_that_is_called_like_a_word_of_the_api_changes_no_answer(tmp_path: Path) -> None:
    with running(tmp_path, sign_in__jobs_visible="owners", **LOOK) as server:
        server.dispatcher.services.store.commit(Change(jobs=(job(MINE, "ada"), job("running", "bob"))))
        (shown,) = ask(server, "/api/v1/jobs").json()["items"]
        assert shown["state"] == "running"


def test_unless_the_site_wants_it_everybody_sees_all_jobs(tmp_path: Path) -> None:
    with running(tmp_path, **LOOK) as server:
        server.dispatcher.services.store.commit(Change(jobs=(job(THEIRS, "bob"),)))
        assert THEIRS in json.dumps(ask(server, "/api/v1/jobs").json())
