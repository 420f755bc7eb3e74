"""Clocks that are set under a real server: errors are incidents in their usual time and begin when they began."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from eagle_eye.agent.clock import ClockBase, SystemClock, Wake
from eagle_eye.agent.collector import CollectorRunner, Drops, Observed
from eagle_eye.agent.loop import Loop, LoopListeners, LoopSettings, LoopSources
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema import frame as whole
from eagle_eye.schema import rows
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame, Rank, block, encode_frame
from eagle_eye.schema.metrics import Scope
from tests.loopback import free_port
from tests.server.own_process import OwnProcess, serving, wait_until

HOURS_6_S = 6 * 3600.0
STEPS_S = [one * sign for one in (10.0, 30.0, 60.0, 90.0, 300.0, HOURS_6_S) for sign in (1, -1)]
YEAR_2099_S = 73 * 365 * 86_400.0
LATER_S = 2.0  # than a node whose clock is left alone, at most
SET_S, ERROR_S, WATCHED_S = 10.0, 20.0, 32.0  # after the beginning
SENDERS = 4
WORK_S = 0.4  # how long an error may lie back when its frame is sent


class Story(NamedTuple):
    """``ahead_s`` of the clock before and after it is set; ``says`` so or not."""

    before_s: float
    after_s: float
    says: bool
    number: int = 0  # of those that are alike

    @property
    def job(self) -> str:
        """Its job's name."""
        more = f" #{self.number}" if self.number else ""
        return f"{'says' if self.says else 'silent'} {self.before_s:+.0f} to {self.after_s:+.0f}{more}"


STORIES = [
    Story(*ahead_s, says)
    for says in (True, False)
    for step_s in (*STEPS_S, YEAR_2099_S)
    for ahead_s in ((step_s, 0.0), (0.0, step_s))
]
# As many, each beside one of them: an error waits for the next look at jobs, which comes sooner for some.
LEFT_ALONE = [Story(0.0, 0.0, story.says, number) for number, story in enumerate(STORIES)]


@dataclass
class Client:
    """A node that speaks the wire as the documents have it: rows that say the clock's base, or whole frames."""

    story: Story
    rank: int
    sequence: int = 0
    templates: set[bytes] = field(default_factory=set)

    @property
    def node(self) -> str:
        return f"{self.story.job} n{self.rank}".replace(" ", "_")

    def body(self, now_s: float, began_s: float, error_s: float | None) -> tuple[str, bytes]:
        """Return the next request; the clock of the first node is set, that of the second is right."""
        story = self.story
        ahead_s = 0.0 if self.rank else story.before_s if now_s < began_s + SET_S else story.after_s
        self.sequence += 1
        events = [] if error_s is None else [Event(error_s + ahead_s, "xid", 0, {"code": 79})]
        said: dict[str, Any] = {"clock_base_s": began_s - 500.0 + ahead_s} if story.says else {}
        one = Frame(
            version=whole.WIRE_VERSION,
            node=self.node,
            boot_id="boot",
            stream="stream",
            sequence=self.sequence,
            time_s=now_s + ahead_s,
            interval_s=1.0,
            agent_version="a strict client",
            ranks=[Rank(story.job, self.rank, 2, 0)],
            blocks=[block(Scope.DEVICE, {0: {"gpu_power_watts": 400.0, "train_step": float(self.sequence)}})],
            events=events,
            **said,
        )
        if not story.says:
            return whole.CONTENT_TYPE, whole.encode_request([encode_frame(one)], now_s + ahead_s)
        template = rows.template_of(one)
        raw = rows.encode_template(template)
        id_ = rows.template_id(raw)
        unknown = [] if id_ in self.templates else [raw]
        self.templates.add(id_)
        return rows.CONTENT_TYPE, rows.encode_rows_request(
            unknown, [rows.encode_row(one, template, id_)], now_s + ahead_s
        )


class Error(NamedTuple):
    """When an error was, and when the server had acknowledged it."""

    error_s: float
    acknowledged_s: float


def send(url: str, clients: list[Client], began_s: float, errors: dict[str, Error], number: int) -> None:
    """Send a frame of each of the clients every second, until it is over."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30.0)
    due_s = began_s + number / SENDERS
    while due_s < began_s + WATCHED_S:
        time.sleep(max(0.0, due_s - time.time()))
        for client in clients:
            now_s, error_s = time.time(), None
            if client.rank == 0 and now_s >= began_s + ERROR_S and client.story.job not in errors:
                error_s = now_s - WORK_S
            kind, content = client.body(now_s, began_s, error_s)
            connection.request("POST", "/api/v1/frames", content, {"Content-Type": kind})
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 200, said
            if error_s is not None:
                errors[client.story.job] = Error(error_s, time.time())
        due_s += 1.0
    connection.close()


class Found(NamedTuple):
    """An incident: how long after the error came, by how much later it is said to have begun, whom it names."""

    after_s: float
    onset_after_s: float
    node: str | None
    fault: str


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """Return each job's incidents."""
    pairs = zip(STORIES, LEFT_ALONE, strict=True)
    clients = [Client(story, rank) for pair in pairs for story in pair for rank in (0, 1)]
    errors: dict[str, Error] = {}
    with serving(tmp_path_factory.mktemp("clocks") / "data") as server:
        url = f"http://{server.listen}"
        began_s = time.time() + 1.0
        with ThreadPoolExecutor(SENDERS) as pool:
            parts = [clients[number::SENDERS] for number in range(SENDERS)]
            for done in [pool.submit(send, url, part, began_s, errors, number) for number, part in enumerate(parts)]:
                done.result()
        seen: dict[str, list[Found]] = {story.job: [] for story in (*STORIES, *LEFT_ALONE)}
        for one in incidents(server):
            error_s, acknowledged_s = errors[one["job"]]
            after_s, onset_s = seconds(one["detected"]) - acknowledged_s, seconds(one["onset"]) - error_s
            seen[one["job"]].append(Found(after_s, onset_s, one["node"], one["fault"]))
    for job, own in seen.items():
        print(f"{job:32} {[f'{one.fault} after {one.after_s:.1f} s, onset {one.onset_after_s:+.1f} s' for one in own]}")
    return seen


def incidents(server: OwnProcess) -> list[dict[str, Any]]:
    """Return all of them."""
    items: list[dict[str, Any]] = []
    at: dict[str, str] = {}
    while True:
        page = server.client.get("/api/v1/incidents", params={"limit": "100", **at}).json()
        items += page["items"]
        if page["next"] is None:
            return items
        at = {"cursor": page["next"]}


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.job.replace(" ", "-"))
def test_the_error_is_an_incident_in_its_usual_time(found: dict[str, list[Found]], story: Story) -> None:
    usual_s = max(one.after_s for left_alone in LEFT_ALONE for one in found[left_alone.job])
    (seen,) = found[story.job]
    assert (seen.fault, seen.node) == ("gpu_lost", Client(story, 0).node)
    assert seen.after_s <= usual_s + LATER_S
    assert abs(seen.onset_after_s) <= LATER_S


class SetClock(SystemClock):
    """The machine's clock, but ahead."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return time.time() + self.ahead_s


class Truth:
    """A collector whose rows say when they truly were, and which sees an error when asked to."""

    name = "truth"

    def __init__(self, clock: SetClock) -> None:
        self._clock = clock
        self.error_s: float | None = None
        self.wanted = False

    def collect(self, now_s: float) -> Observed:
        seen = Observed(devices={0: {"train_step": time.time()}}, ranks=[Rank("job", 0, 1, 0)])
        if self.wanted:
            self.wanted, self.error_s = False, time.time()
            seen.events.append(Event(self._clock.now_s(), "xid", 0, {"code": 79}))
        return seen

    def close(self) -> None:
        pass


class Agent:
    """The agent's own loop, spool and uplink, on a clock that is set."""

    def __init__(self, folder: Path, listen: str, ahead_s: float) -> None:
        self.clock, drops, wake = SetClock(), Drops(), Wake()
        self.clock.ahead_s = ahead_s
        self.truth = Truth(self.clock)
        base = ClockBase(self.clock, "boot")
        self.spool = Spool(folder, "n1", drops)
        self.uplink = Uplink(
            Destination(Servers([f"http://{listen}"]), backoff_s_max=1.0), self.spool, drops, self.clock, base=base
        )
        runners = [CollectorRunner(self.truth, drops, self.clock.monotonic_s)]
        sources, listeners = LoopSources(runners, Observed, wake), LoopListeners(self.uplink.notify)
        self.loop = Loop(LoopSettings("n1"), sources, self.spool, drops, self.clock, listeners, base)
        self.thread = threading.Thread(target=self.loop.run)

    def stop(self) -> None:
        """Let it say goodbye."""
        self.loop.stop("the end")
        self.thread.join(10.0)
        self.uplink.stop(3.0)
        self.spool.close()


@contextmanager
def running_agent(folder: Path, listen: str, ahead_s: float) -> Iterator[Agent]:
    """Run an agent that sends to the address, whoever listens there."""
    agent = Agent(folder, listen, ahead_s)
    agent.uplink.start()
    agent.thread.start()
    try:
        yield agent
    finally:
        agent.stop()


def rows_of(server: OwnProcess) -> list[tuple[float, float]]:
    """Return in which second each row of the node lies, and when it truly was."""
    now_s = time.time()
    asked = {"metric": "train_step", "node": "n1", "start": str(now_s - 200), "end": str(now_s + 60), "step": "1"}
    answer = server.client.get("/api/v1/query_range", params=asked).json()
    return [(seconds(at), value) for one in answer["series"] for at, value in one["points"]]


@pytest.mark.parametrize("ahead_s", [90.0, -90.0, HOURS_6_S, -HOURS_6_S, YEAR_2099_S])
def test_what_an_agent_kept_while_its_clock_was_set_lies_where_it_belongs(tmp_path: Path, ahead_s: float) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with running_agent(tmp_path / "spool", listen, ahead_s) as agent:
        wait_until(lambda: agent.spool.waiting() >= 5)  # nobody takes them yet
        agent.clock.ahead_s = 0.0
        wait_until(lambda: agent.spool.waiting() >= 8)
        with serving(tmp_path / "data", "--listen", listen) as server:
            wait_until(lambda: agent.uplink.delivered >= 8)
            agent.truth.wanted = True
            wait_until(lambda: bool(incidents(server)))
            (one,) = incidents(server)
            rows_seen = rows_of(server)
    assert agent.truth.error_s is not None
    assert abs(seconds(one["onset"]) - agent.truth.error_s) <= LATER_S
    assert len(rows_seen) >= 8
    assert max(abs(at_s - truly_s) for at_s, truly_s in rows_seen) <= 2.0
