from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.cli.main import main
from eagle_eye.orchestrators.orchestrate import settings
from eagle_eye.orchestrators.orchestrate.service import SecretFile, Service
from eagle_eye.orchestrators.orchestrate.settings import KINDS
from eagle_eye.orchestrators.protocol import OrchestratorError
from eagle_eye.orchestrators.site_program import CommandOrchestrator
from eagle_eye.schema.action import NODE_READMITTED
from tests.loopback import free_port
from tests.orchestrators.builders import (
    SECRET,
    StubServer,
    action,
    deliver,
    event_body,
    signed_headers,
    stub_server,
)

OTHER_SECRET = "whsec_b3RoZXItb3RoZXItb3RoZXItb3RoZXItb3RoZXI="

# Says what it was asked for; holds a restart up as long as the file "hold" is there.
PROGRAM = """
import json, os, sys, time
asked = json.load(sys.stdin)
here = os.path.dirname(sys.argv[0])
if asked["verb"] == "state":
    attempt = int(open(here + "/attempt").read())
    print(json.dumps({"attempt": attempt, "nodes": ["n1", "n2"], "running": True}))
    sys.exit()
with open(here + "/asked", "a") as file:
    file.write(json.dumps([asked["verb"], asked.get("nodes") or asked.get("without")]) + chr(10))
while asked["verb"] == "restart" and os.path.exists(here + "/hold"):
    time.sleep(0.02)
if asked["verb"] == "restart":
    open(here + "/attempt", "w").write("2")
print(asked["verb"], "done")
"""


class Site:
    """A server that records, a program, and the subscriber as users start it."""

    def __init__(self, folder: Path, server: StubServer) -> None:
        self.folder, self.server = folder, server
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.program = folder / "program"
        self.program.write_text(f"#!{sys.executable} -IS\n{PROGRAM}")
        self.program.chmod(0o755)
        (folder / "attempt").write_text("1")
        self.process: subprocess.Popen[str] | None = None

    def words(self, *flags: str) -> list[str]:
        return [
            *("--server", self.server.url, "--listen", f"127.0.0.1:{self.port}"),
            *("--state-dir", str(self.folder / "state"), "--json", *flags, "--", str(self.program)),
        ]

    @contextlib.contextmanager
    def served_here(self, *flags: str) -> Iterator[Service]:
        """The same in this process, which starts in no time but has no signals."""
        command = next(kind for kind in KINDS if kind.name == "command")
        with contextlib.closing(Service(command, settings.read(command, self.words(*flags), {}))) as service:
            codes: list[int] = []
            thread = threading.Thread(target=lambda: codes.append(service.serve()))
            thread.start()
            try:
                self.until(lambda: self.page("readyz").status_code == 200)
                yield service
            finally:
                service.stop("the test")
                thread.join(20.0)
        assert codes == [0]

    def start(self, *flags: str) -> None:
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eagle_eye.cli.main", "orchestrate", "command", *self.words(*flags)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.until(lambda: self.page("readyz").status_code == 200)

    def page(self, name: str) -> httpx.Response:
        try:
            with httpx.Client(trust_env=False, timeout=5.0) as client:
                return client.get(self.url + name)
        except httpx.TransportError:
            return httpx.Response(503)

    def until(self, met: Callable[[], bool], within_s: float = 20.0) -> None:
        until_s = time.monotonic() + within_s
        while not met():
            assert time.monotonic() < until_s, (self.folder / "log").read_text()
            time.sleep(0.02)

    def asked(self) -> list[Any]:
        try:
            return [json.loads(line) for line in (self.folder / "asked").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def send(self, body: bytes, event_id: str, secret: str) -> Any:
        answer = deliver(self.url, body, signed_headers(body, time.time(), event_id, secret))
        return answer.json().get("outcome", answer.status_code)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[Any]]:
        """The exit code and what was printed."""
        assert self.process is not None
        self.process.send_signal(number)
        printed, _ = self.process.communicate(timeout=20.0)
        code, self.process = self.process.returncode, None
        return code, [json.loads(line) for line in printed.splitlines()]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with stub_server() as server:
        made = Site(tmp_path, server)
        yield made
        if made.process is not None:
            made.end(signal.SIGKILL)


def test_an_action_survives_the_death_of_its_subscriber_and_is_done_once(site: Site) -> None:
    reports = "/api/v1/actions/act-1/reports"
    site.start("--resumes")
    (subscribed,) = site.server.reported("POST", "/api/v1/subscriptions")
    assert (subscribed["url"], subscribed["jobs"]) == (site.url, [])
    body = event_body(action(time.time(), report_to=f"{site.server.url}{reports}"))
    (site.folder / "hold").touch()
    assert site.send(body, "evt-1", SECRET) == "queued"
    site.until(lambda: len(site.asked()) == 2)
    site.server.wait("POST", reports, 2)
    site.end(signal.SIGKILL)
    (site.folder / "hold").unlink()
    site.until(lambda: (site.folder / "attempt").read_text() == "2")  # the program has outlived it

    site.start("--resumes")
    assert site.send(body, "evt-1", SECRET) == "known"
    reported = site.server.wait("POST", reports, 4)
    assert [report["state"] for report in reported] == ["accepted", "running", "running", "done"]
    assert (reported[2]["detail"], reported[3]["detail"]) == ("resumed after an interruption", "attempt 2 runs already")
    assert len(site.server.claimed(reports)) == 1
    assert site.asked() == [["exclude", ["n2"]], ["restart", ["n2"]]]
    old = event_body(action(time.time(), action_id="act-2"), event_id="evt-2")
    assert site.send(old, "evt-2", SECRET) == "refused"
    assert site.send(old, "evt-3", OTHER_SECRET) == 401

    back = event_body({"node": "n2"}, NODE_READMITTED, "evt-4")
    assert site.send(back, "evt-4", SECRET) == "queued"
    site.until(lambda: site.asked()[2:] == [["readmit", ["n2"]]])
    metrics = site.page("metrics").text
    assert 'eagle_eye_orchestrate_deliveries_total{kind="command",outcome="bad signature"} 1.0' in metrics
    assert 'eagle_eye_orchestrate_reports_total{action="exclude_node",kind="command",state="done"} 1.0' in metrics
    assert site.page("healthz").json()["orchestrator"] == "eagle-eye orchestrate command"

    code, printed = site.end()
    assert code == 0
    assert {"event": "action", "action_id": "act-1", "kind": "exclude_node", "job": "j", "state": "done",
            "detail": "attempt 2 runs already"} in printed  # fmt: skip
    # The subscription lasts: what is delivered meanwhile waits.
    assert len(site.server.reported("POST", "/api/v1/subscriptions")) == 1
    assert site.server.reported("DELETE", "/api/v1/subscriptions/sub-1") == []


def test_what_the_server_does_not_let_begin_changes_nothing(site: Site) -> None:
    reports, agreeable = "/api/v1/actions/act-1/reports", site.server.answer
    site.server.answer = lambda method, path: (409, {}) if path == reports else agreeable(method, path)
    with site.served_here():
        body = event_body(action(time.time(), report_to=f"{site.server.url}{reports}"))
        assert site.send(body, "evt-1", SECRET) == "queued"
        said = 'eagle_eye_orchestrate_claims_total{kind="command",outcome="refused"} 1.0'
        site.until(lambda: said in site.page("metrics").text)
        assert site.asked() == []


def test_a_subscription_made_by_hand_a_dry_run_and_the_state_of_a_job(site: Site) -> None:
    secrets = site.folder / "secrets"
    secrets.write_text(f"# since Monday\n{OTHER_SECRET}\n")
    with site.served_here("--secret-file", str(secrets), "--dry-run", "--jobs", "j", "--report-state", "--poll", "0.1"):
        body = event_body(action(time.time(), report_to=f"{site.server.url}/api/v1/actions/act-1/reports"))
        assert site.send(body, "evt-1", OTHER_SECRET) == "queued"
        reported = site.server.wait("POST", "/api/v1/actions/act-1/reports", 2)
        program = str(site.program)
        again = f"run {program} to restart the job, now at attempt 1"
        assert [(report["state"], report["detail"]) for report in reported] == [
            ("accepted", ""),
            ("refused", f"dry run: would run {program} to exclude n2; then {again}"),
        ]
        foreign = event_body(action(time.time(), action_id="act-2", job="k"), event_id="evt-2")
        assert site.send(foreign, "evt-2", OTHER_SECRET) == "refused"
        assert site.asked() == []
        (update,) = site.server.wait("PUT", "/api/v1/jobs/j", 1)
        assert (update["attempt"], update["state"]) == (1, "running")
        (site.folder / "attempt").write_text("2")
        assert site.server.wait("PUT", "/api/v1/jobs/j", 2)[1]["attempt"] == 2
        assert site.server.reported("POST", "/api/v1/subscriptions") == []


def test_the_server_hears_what_is_left_of_jobs_pace_when_it_changes_and_again_where_it_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: dict[str, float | None] = {"j": 0.75, "unknown": 0.5, "not-ours": 0.1}
    monkeypatch.setattr(CommandOrchestrator, "pace_left", lambda _: left, raising=False)
    answer = site.server.answer
    site.server.answer = lambda method, path: (404, {}) if "unknown" in path else answer(method, path)
    with site.served_here("--jobs", "j", "--jobs", "unknown", "--poll", "0.05"):
        site.server.wait("PUT", "/api/v1/jobs/unknown/pace-left", 3)
        assert site.server.reported("PUT", "/api/v1/jobs/j/pace-left") == [{"pace_left_ratio": 0.75}]
        left["j"] = None
        reported = site.server.wait("PUT", "/api/v1/jobs/j/pace-left", 2)
        assert reported[1:] == [{"pace_left_ratio": None}]
        assert site.server.reported("PUT", "/api/v1/jobs/not-ours/pace-left") == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--webhook-url is missing"),
        (["--server", "ftp://x"], "server is 'ftp://x'; expected http"),
        (["--token-file", "/nowhere"], "--token-file /nowhere: No such file"),
        (["--secret-file", "/nowhere"], "--secret-file /nowhere: No such file"),
        (["--report-state", "--jobs", "llm-*"], "--report-state: expected the jobs' names"),
        (["--env", "A"], "--env 'A': expected KEY=VALUE"),
        ([], "another orchestrator uses it"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    if not flags:
        fcntl.flock(lock, fcntl.LOCK_EX)
    given = ["--listen", "127.0.0.1:0", *flags, "--state-dir", str(tmp_path), "--", "/bin/true"]
    assert main(["orchestrate", "command", *given]) == 2
    os.close(lock)
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


def test_a_program_that_is_not_there_and_a_kind_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["orchestrate", "command", "--state-dir", str(tmp_path), "--", "no-such-program"]) == 2
    assert "'no-such-program' is not found or not executable" in capsys.readouterr().err
    assert main(["orchestrate", "command", "--state-dir", str(tmp_path)]) == 2
    assert "the program is missing" in capsys.readouterr().err.replace(
        "-- PROGRAM [ARGS] is missing", "the program is missing"
    )
    assert main(["orchestrate", "nomad"]) == 2
    assert "kind 'nomad' is unknown; expected one of " in capsys.readouterr().err


def test_a_secret_file_is_read_again_and_kept_when_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"{SECRET}\n")
    secrets = SecretFile(file)
    assert secrets() == [SECRET]
    file.write_text(f"{OTHER_SECRET}\n\n{SECRET}\n")
    assert secrets() == [OTHER_SECRET, SECRET]
    file.write_text("whsec_***\n")
    assert secrets() == [OTHER_SECRET, SECRET]
    file.unlink()
    assert secrets() == [OTHER_SECRET, SECRET]
    for text, words in (("", "holds no secret"), ("secret", "secret 1 is none; expected whsec_")):
        file.write_text(text)
        with pytest.raises(OrchestratorError, match=words):
            SecretFile(file)
