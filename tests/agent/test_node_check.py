"""Active checks at the agent: asked for, refused, made in a child, ended when somebody trains, reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent import node_check
from eagle_eye.agent.collector import CollectFailed, Drops
from eagle_eye.agent.config import read
from eagle_eye.agent.evidence.requests import EvidenceResponder
from eagle_eye.agent.node_check import (
    MEMORY_BYTES_MIN,
    OUTPUT_BYTES_MAX,
    WAITING_MAX,
    NodeCheckResponder,
    Ran,
    memory_limit_bytes,
)
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.schema.configuration import ConfigurationError
from tests.agent.fakes import REPOSITORY, until
from tests.agent.test_evidence_requests import EvidenceSite

REPORT = {"verdict": "healthy", "reason": "fine", "refused": False, "checks": []}
RANK = TrainingProcess(4711, "llm", 3, 8, 0)


class Host:
    """The agent's side, with a child and a server that only remember."""

    def __init__(self, command: Sequence[str] = ("check-it", "--quick"), memory_bytes: int | None = None) -> None:
        self.ran: list[list[str]] = []
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.answer = Ran(0, json.dumps(REPORT).encode(), "")
        self.may_begin = ""
        self.training: list[TrainingProcess] = []
        self.gate = threading.Event()
        self.gate.set()
        self.drops = Drops()
        self.checks = NodeCheckResponder(
            command, lambda: self.training, self._send, self.drops, self._run, lambda: memory_bytes
        )

    def _run(self, line: Sequence[str], _until_s: float, in_the_way: Callable[[], str]) -> Ran:
        self.ran.append(list(line))
        while not self.gate.wait(0.01):
            if why := in_the_way():
                return Ran(None, b"", "", why)
        return self.answer

    def _send(self, id_: str, content: bytes, _type: str, _s: float, _stop: threading.Event) -> str:
        word = json.loads(content)
        self.sent.append((id_, word))
        return self.may_begin if word["state"] == "begun" else ""

    def ask(self, *ids: str, **more: Any) -> None:
        fields = {"kind": "node_check", "deadline_s": 60.0, "checks": ["gemm", "gpu_facts"], "gemm_s": 30.0, **more}
        self.checks.answered({"accepted": 1, "requests": [{"id": id_, **fields} for id_ in ids]})

    def states(self) -> list[str]:
        return [word["state"] for _, word in self.sent]


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.gate.set()
    made.checks.close()


def test_a_check_is_begun_on_the_servers_word_made_and_reported(host: Host) -> None:
    host.ask("chk_1")
    until(lambda: host.states() == ["begun", "done"])
    (line,) = host.ran
    assert line[:5] == ["check-it", "--quick", "--json", "--deadline", "60"]
    assert line[5:] == ["--only", "gemm", "gpu_facts", "--gemm-seconds", "30"]
    assert host.sent[1] == ("chk_1", {"state": "done", "report": REPORT})


def test_a_search_for_silent_corruption_has_the_time_that_the_server_gives(host: Host) -> None:
    host.ask("chk_1", checks=["sdc_gemm", "sdc_all_reduce"], gemm_s=0, sdc_s=90.0)
    until(lambda: len(host.ran) == 1)
    assert host.ran[0][5:] == ["--only", "sdc_gemm", "sdc_all_reduce", "--seconds", "90"]


def test_everything_is_checked_where_no_check_is_named(host: Host) -> None:
    host.ask("chk_1", checks=[], gemm_s=0)
    until(lambda: len(host.ran) == 1)
    assert host.ran[0][2:] == ["--json", "--deadline", "60"]


def test_a_request_that_is_repeated_is_served_once(host: Host) -> None:
    host.ask("chk_1", "chk_1")
    host.ask("chk_1")
    host.ask("chk_2")
    until(lambda: len(host.sent) == 4)
    assert [id_ for id_, _ in host.sent] == ["chk_1", "chk_1", "chk_2", "chk_2"]


def test_without_the_servers_word_nothing_begins(host: Host) -> None:
    host.may_begin = "the server answered 409: check chk_1 is over"
    host.ask("chk_1")
    until(lambda: host.drops.snapshot() == {"node_check_not_begun": 1})
    assert host.ran == []


def test_where_somebody_trains_nothing_begins(host: Host) -> None:
    host.training = [RANK]
    host.ask("chk_1")
    until(lambda: len(host.sent) == 1)
    ((_, word),) = host.sent
    assert word["state"] == "refused"
    assert "rank 3 of job llm trains here" in word["detail"]
    assert host.ran == []


def test_a_check_ends_when_a_training_process_comes(host: Host) -> None:
    host.gate.clear()
    host.ask("chk_1")
    until(lambda: len(host.ran) == 1)
    host.training = [RANK]
    until(lambda: host.states() == ["begun", "refused"])
    assert "trains here" in host.sent[1][1]["detail"]


def test_a_stopping_agent_ends_its_check_and_says_so(host: Host) -> None:
    host.gate.clear()
    host.ask("chk_1")
    until(lambda: len(host.ran) == 1)
    host.checks.close()
    assert host.sent[-1][1] == {"state": "refused", "detail": "the agent stops"}


@pytest.mark.parametrize(
    ("command", "memory_bytes", "why"),
    [((), None, "node_check_command is not set"), (("x",), MEMORY_BYTES_MIN - 1, "the agent's control group allows")],
)
def test_an_agent_that_may_make_no_checks_says_so(command: tuple[str, ...], memory_bytes: int | None, why: str) -> None:
    host = Host(command, memory_bytes)
    host.ask("chk_1")
    until(lambda: len(host.sent) == 1)
    assert host.sent[0][1]["detail"].startswith(why)
    with pytest.raises(CollectFailed, match=why):
        host.checks.collect(0.0)
    host.checks.close()


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        (Ran(2, b"", "eagle-eye check: --only: no such check"), "it ended with 2 and without a report"),
        (Ran(0, b"[1]", ""), "without a report"),
        (Ran(0, b"[" * 100_000, ""), "without a report"),
        (Ran(None, b"", "", "it did not end in time"), "it did not end in time"),
        (Ran(1, json.dumps({**REPORT, "refused": True, "reason": "gpu 0: process 7"}).encode(), ""), "gpu 0: process"),
    ],
)
def test_what_is_no_report_is_no_verdict(host: Host, ran: Ran, why: str) -> None:
    host.answer = ran
    host.ask("chk_1")
    until(lambda: len(host.sent) == 2)
    assert host.sent[1][1]["state"] == "refused"
    assert why in host.sent[1][1]["detail"]


@pytest.mark.parametrize(
    "more",
    [
        {"deadline_s": "soon"},
        {"checks": ["gemm", "; rm -rf /"]},
        {"checks": ["--force"]},
        {"checks": ["x"] * 17},
        {"id": "../x"},
        {"gemm_s": None},
    ],
)
def test_what_is_not_understood_is_counted_and_not_run(host: Host, more: dict[str, Any]) -> None:
    fields = {"id": "chk_1", "kind": "node_check", "deadline_s": 5.0, **more}
    host.checks.answered({"requests": [fields, 7, None]})
    assert sum(host.drops.snapshot().values()) == 1
    assert host.ran == []


def test_what_does_not_fit_waits_with_the_server(host: Host) -> None:
    host.gate.clear()
    host.ask("first")
    until(lambda: len(host.ran) == 1)
    host.ask(*(f"chk_{number}" for number in range(WAITING_MAX + 1)))
    assert host.drops.snapshot() == {"node_check_too_many": 1}


def test_requests_for_evidence_and_for_checks_do_not_mind_each_other(host: Host) -> None:
    evidence = EvidenceSite()
    asked = [
        {"id": "ev_1", "kind": "evidence", "deadline_s": 20.0, "job": "j", "attempt": 0},
        {"id": "chk_1", "kind": "node_check", "deadline_s": 20.0},
    ]
    for taker in (evidence.requests, host.checks):
        assert isinstance(taker, (EvidenceResponder, NodeCheckResponder))
        taker.answered({"requests": asked})
    until(lambda: len(host.sent) == 2 and len(evidence.sent) == 1)
    assert evidence.drops.snapshot() == host.drops.snapshot() == {}
    evidence.requests.close()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_child_knows_none_of_our_secrets_and_is_the_first_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_EYE_TOKEN", "secret")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth9")
    code = "import os, json; print(json.dumps([dict(os.environ), open('/proc/self/oom_score_adj').read()]))"
    ran = node_check.run(python(code), time.monotonic() + 20, lambda: "")
    environment, score = json.loads(ran.output)
    assert ran.status == 0
    assert not {"EAGLE_EYE_TOKEN", "RANK"} & set(environment)
    assert (environment["NCCL_SOCKET_IFNAME"], score.strip()) == ("eth9", "500")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (f"print('x' * {OUTPUT_BYTES_MAX + 1})", "it said more than"),
        ("import time; time.sleep(60)", "it did not end in time"),
    ],
)
def test_a_child_that_says_too_much_or_does_not_end_is_ended(code: str, why: str) -> None:
    ran = node_check.run(python(code), time.monotonic() + 0.6, lambda: "")
    assert ran.status is None
    assert why in ran.why


def test_a_child_may_end_what_it_has_begun(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)\n"
    )
    ready = tmp_path / "ready"
    ran = node_check.run(python(code), time.monotonic() + 20, lambda: "somebody trains" if ready.exists() else "")
    assert ran.why == "somebody trains"
    assert (tmp_path / "ended").exists()


def test_a_child_goes_with_an_agent_that_was_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    inner = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    agent = (
        "import sys, time\n"
        "from eagle_eye.agent import node_check\n"
        f"node_check.run([sys.executable, '-c', {inner!r}], time.monotonic() + 60, lambda: '')\n"
    )
    with subprocess.Popen([sys.executable, "-c", agent], cwd=REPOSITORY) as process:
        until(lambda: note.exists() and note.read_text() != "")
        pid = int(note.read_text())
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not _runs(pid))


def test_a_command_that_is_not_there_is_said(host: Host) -> None:
    real = NodeCheckResponder(["/no/such/program"], list, host._send, host.drops, memory_bytes=lambda: None)
    real.answered({"requests": [{"id": "chk_1", "kind": "node_check", "deadline_s": 5.0}]})
    until(lambda: len(host.sent) == 2)
    assert "ended with" in host.sent[1][1]["detail"]
    assert "No such file" in host.sent[1][1]["detail"]
    real.close()


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "max", "a/b/memory.high": "900"}, 900),
        ("0::/\n", {"memory.max": "5000"}, 5000),
        ("0::/../../pod1\n", {"memory.max": "7000"}, 7000),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "3000"}, 3000),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/a\n", {}, None),
        ("spoiled", {}, None),
    ],
)
def test_the_least_limit_above_us_counts(tmp_path: Path, lines: str, files: dict[str, str], limit: int | None) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert memory_limit_bytes(tmp_path / "proc", tmp_path / "cgroup") == limit
    assert memory_limit_bytes(tmp_path / "none", tmp_path / "cgroup") is None


@pytest.mark.parametrize("words", [["eagle-eye", "check", "--force"], ["x", "--forc"], [""], ["x"] * 33, ["a\0b"]])
def test_a_command_that_would_disturb_somebody_is_no_configuration(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="node_check_command"):
        read(None, {}, {"node_check_command": words})


def test_the_agent_loads_nothing_heavy_for_it() -> None:
    code = "import sys, eagle_eye.agent.node_check; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"
