"""A torchft job as an Orchestrator, with its options: ends a replica group while the others train on."""

from __future__ import annotations

import argparse
import contextlib
import html
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from eagle_eye.orchestrators.command_line import positive, seconds
from eagle_eye.orchestrators.ledger import write_whole
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause, Exclusion, JobState, OrchestratorError, Restart
from eagle_eye.orchestrators.server_client import authorities
from eagle_eye.schema.action import JobUpdate

# torchft's lighthouse over HTTP: the members, their steps, and ending a replica.
#
# The lighthouse has no API for machines: /status is a fragment of its page (torchft 0.1 and 0.2). Missing data is an
# error, never an empty quorum.
TIMEOUT_S = 5.0
# The lighthouse waits 10 s for a manager that does not answer, and so do all later actions on the job.
KILL_TIMEOUT_S = 2.0
PAGE_BYTES_MAX = 4 << 20
_QUORUM = re.compile(r"Current quorum_id:\s*(-?\d+)")
_MEMBER = re.compile(
    r"<b>\s*(?P<id>[^<]+?)\s*</b>.*?Step:\s*(?P<step>-?\d+).*?Manager:\s*(?P<manager>\S*?)\s*<br", re.DOTALL
)
_HEARTBEAT = re.compile(r"^\s*(?P<id>\S+): seen (?P<age>[0-9.e+-]+)s ago", re.MULTILINE)


class NoAnswerError(CannotCarryOutError):
    """The lighthouse has the request, and did not answer in time."""


@dataclass(frozen=True)
class Replica:
    """A replica group in the latest quorum. ``id`` is its name, a colon and a part that is new at each start."""

    id: str
    step: int
    host: str

    @property
    def group(self) -> str:
        """Return the name that is kept across restarts of the group."""
        return self.id.rpartition(":")[0] or self.id


@dataclass(frozen=True)
class LighthouseStatus:
    """The lighthouse's state. ``heartbeats``: seconds since each replica's last heartbeat, by id, also of dead ones."""

    quorum_id: int
    replicas: tuple[Replica, ...]
    heartbeats: dict[str, float]

    @property
    def step(self) -> int:
        """Return the highest step of the latest quorum, -1 where there was none."""
        return max((replica.step for replica in self.replicas), default=-1)


class Lighthouse:
    """One lighthouse; ``url`` as in TORCHFT_LIGHTHOUSE. Every call raises CannotCarryOutError where it fails."""

    def __init__(self, url: str) -> None:
        """Raise ValueError for an invalid URL."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--lighthouse is {url!r}; expected http://HOST:29510")
        self._http = httpx.Client(timeout=TIMEOUT_S, verify=authorities(), trust_env=False, follow_redirects=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def status(self) -> LighthouseStatus:
        """Return the lighthouse's current state."""
        return parse_status(self._answered(lambda: self._http.get(f"{self.url}/status")).text)

    def kill(self, replica_id: str) -> None:
        """Tell the lighthouse to end the replica. Only a later status shows whether it did.

        A manager that obeys exits before it answers, which the lighthouse reports as an error. One that is stopped or
        cannot be reached does not answer at all: it is not waited for.
        """
        path = f"{self.url}/replica/{quote(replica_id, safe=':')}/kill"
        with contextlib.suppress(NoAnswerError):
            self._answered(lambda: self._http.post(path, timeout=KILL_TIMEOUT_S), fine=500)

    def _answered(self, call: Callable[[], httpx.Response], fine: int = 200) -> httpx.Response:
        try:
            answer = call()
        except httpx.ReadTimeout:
            raise NoAnswerError(f"the lighthouse {self.url}: ReadTimeout") from None
        except httpx.HTTPError as error:
            raise CannotCarryOutError(f"the lighthouse {self.url}: {type(error).__name__}") from None
        if not answer.is_success and answer.status_code != fine:
            raise CannotCarryOutError(f"the lighthouse {self.url}: HTTP {answer.status_code}")
        if len(answer.content) > PAGE_BYTES_MAX:
            raise CannotCarryOutError(f"the lighthouse {self.url}: a page of over {PAGE_BYTES_MAX} bytes")
        return answer


def parse_status(page: str) -> LighthouseStatus:
    """Return the page's data. Raises CannotCarryOutError where it is not a lighthouse's."""
    quorum = _QUORUM.search(page)
    if quorum is None:
        raise CannotCarryOutError("the lighthouse's /status is not understood; is --lighthouse a lighthouse?")
    try:
        return _status(int(quorum[1]), page)
    except ValueError as error:  # from an invalid number or address
        raise CannotCarryOutError(f"the lighthouse's /status is not understood: {str(error)[:200]}") from None


def _status(quorum_id: int, page: str) -> LighthouseStatus:
    members, _, heartbeats = page.partition("Heartbeats")
    replicas = []
    for block in members.split('<div class="member')[1:]:
        found = _MEMBER.search(block)
        if found is None:
            raise CannotCarryOutError("a member on the lighthouse's /status is not understood")
        host = urlsplit(html.unescape(found["manager"])).hostname or ""
        replicas.append(Replica(html.unescape(found["id"]), int(found["step"]), host))
    ages = {html.unescape(found["id"]): float(found["age"]) for found in _HEARTBEAT.finditer(heartbeats)}
    if replicas and not ages:
        # Without it every replica would seem dead.
        raise CannotCarryOutError("the heartbeats on the lighthouse's /status are not understood")
    return LighthouseStatus(quorum_id, tuple(replicas), ages)


ACTIONS_MAX = 200  # the latest are kept


class Kept(msgspec.Struct, frozen=True):
    """``excluded``: action by node. ``doomed``: the replicas that each action ends, by action."""

    excluded: dict[str, str] = {}
    doomed: dict[str, list[str]] = {}


class TorchftMemory:
    """A state file, and another with the excluded nodes, one per line, for the launcher of replica groups."""

    def __init__(self, file: Path, exclude_file: Path) -> None:
        """Raise OrchestratorError where the state file is not ours or the other cannot be written."""
        self._file, self._exclude_file = file, exclude_file
        self._lock = threading.Lock()
        try:
            self._kept = msgspec.json.decode(file.read_bytes(), type=Kept)
        except FileNotFoundError:
            self._kept = Kept()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"{file}: {error}; repair or remove it") from None
        try:
            self._publish()
        except OSError as error:
            raise OrchestratorError(f"--exclude-file {exclude_file}: {error.strerror}") from None

    @property
    def excluded(self) -> dict[str, str]:
        """Return the excluded nodes, and the action of each."""
        return self._kept.excluded

    def doomed(self, action_id: str) -> list[str] | None:
        """Return the replicas that the action ends, None where it ends none yet."""
        return self._kept.doomed.get(action_id)

    def exclude(self, nodes: Sequence[str], action_id: str) -> None:
        """Add the nodes to both files."""
        with self._lock:
            self._keep(Kept({**self._kept.excluded, **dict.fromkeys(nodes, action_id)}, self._kept.doomed))
            self._publish()

    def readmit(self, nodes: Sequence[str]) -> list[str]:
        """Remove the nodes; return those that were excluded."""
        with self._lock:
            were = [node for node in nodes if node in self._kept.excluded]
            left = {node: action for node, action in self._kept.excluded.items() if node not in were}
            self._keep(Kept(left, self._kept.doomed))
            self._publish()
        return were

    def doom(self, action_id: str, replicas: Sequence[str]) -> None:
        """Record that the action ends these replicas, also if it is repeated."""
        with self._lock:
            doomed = {**self._kept.doomed, action_id: list(replicas)}
            self._keep(Kept(self._kept.excluded, dict(list(doomed.items())[-ACTIONS_MAX:])))

    def _keep(self, kept: Kept) -> None:
        write_whole(self._file, msgspec.json.encode(kept))
        self._kept = kept

    def _publish(self) -> None:
        lines = "".join(f"{node}\n" for node in sorted(self._kept.excluded))
        write_whole(self._exclude_file, lines.encode())
        # For the launchers of other users: node names are not secret.
        self._exclude_file.chmod(0o644)


POLL_S = 0.2
# The lighthouse's default: a replica without a heartbeat for this long is dead.
HEARTBEAT_S = 5.0


@dataclass(frozen=True)
class TorchftJob:
    """One job: one lighthouse. ``groups`` gives the nodes of a replica group by its name.

    An unlisted group runs on its manager's host. ``replicas_min`` groups must remain when one is ended. Waits are in
    seconds: for a replica to be gone, and for the others to continue.
    """

    name: str
    groups: Mapping[str, tuple[str, ...]]
    replicas_min: int = 1
    gone_within_s: float = 20.0
    on_within_s: float = 60.0
    reported: bool = False


class TorchftOrchestrator:
    """The job as a whole has no attempts: it never ends. A late action is recognized by the replica.

    A replica that joined after the fault was found is a new one, and is left alone.
    """

    name = "eagle-eye orchestrate torchft"
    resumes = True

    def __init__(
        self,
        job: TorchftJob,
        lighthouse: Lighthouse,
        memory: TorchftMemory,
        clock: Callable[[], float] = time.time,
        poll_s: float = POLL_S,
    ) -> None:
        self._job = job
        self._lighthouse = lighthouse
        self._memory = memory
        self._clock = clock
        self._poll_s = poll_s
        self._nodes: dict[str, None] = {node: None for nodes in job.groups.values() for node in nodes}
        self._joined_s: dict[str, float] | None = None  # when each replica was first seen; None: not queried yet
        self._lock = threading.Lock()

    def state(self, job: str) -> JobState | None:
        """Return the current and past nodes of the replica groups, and whether any group trains."""
        if job != self._job.name:
            return None
        status = self._look()
        nodes = frozenset(self._nodes) | frozenset(self._memory.excluded)
        return JobState(0, nodes, running=bool(_alive(status)))

    def stop(self, job: str, reason: str) -> str:  # noqa: ARG002 - the protocol's names
        """Refuse: the replica groups would be started again."""
        raise CannotCarryOutError("torchft's replica groups are started by somebody else: end the job there")

    def exclude(self, request: Exclusion) -> str:
        """Write the nodes to the exclude file; with ``now`` also end the replica groups on them."""
        named = ", ".join(request.nodes)
        if not request.now:
            self._memory.exclude(request.nodes, request.cause.action_id)
            return f"{named} in the exclude file, for the next start of a replica group"
        doomed = self._memory.doomed(request.cause.action_id)
        if doomed is None:
            doomed = self._condemned(request, self._look())
            self._memory.doom(request.cause.action_id, doomed)
        self._memory.exclude(request.nodes, request.cause.action_id)
        if not doomed:
            return f"{named} in the exclude file; no replica group is on it now"
        self._end(doomed, request.cause)
        return f"{named} in the exclude file; killed {', '.join(doomed)}"

    def restart(self, job: str, request: Restart) -> str:  # noqa: ARG002 - the protocol's name
        """Return once the remaining groups train on. If no node was to blame and none trained, restart all of them.

        A group that exited by itself is no reason to end the others: it is restarted, with their state.
        """
        if request.distrust_since_s is not None:
            good = f" (EAGLE_EYE_RESUME_FROM={request.resume_from})" if request.resume_from else ""
            raise CannotCarryOutError(
                "torchft heals from its peers' memory, not from a checkpoint: restart the job from the last good one"
                f"{good}"
            )
        if request.without:
            return self._goes_on(self._memory.doomed(request.cause.action_id) or [])
        doomed = self._memory.doomed(request.cause.action_id)
        if doomed is None:
            if going := self._step_of([]):
                return f"{going}; no group was killed"
            doomed = [replica.id for replica in _alive(self._look())]
            self._memory.doom(request.cause.action_id, doomed)
        self._end(doomed, request.cause)
        return self._goes_on(doomed)

    def readmit(self, nodes: Sequence[str]) -> str:
        """Remove the nodes that were excluded from here from the exclude file."""
        were = self._memory.readmit(nodes)
        return f"{', '.join(were)} may be used again" if were else f"{', '.join(nodes)}: not excluded from here"

    def preview(self, request: Exclusion | Restart) -> str:
        """Return which replicas would be killed."""
        status = self._look()
        if isinstance(request, Restart):
            if request.without:
                return "see the other replica groups train on"
            named = _named([replica.id for replica in _alive(status)])
            return f"see replica groups train on, and kill {named} where none takes a step"
        written = f"write {', '.join(request.nodes)} into the exclude file"
        return f"{written} and kill {_named(self._condemned(request, status))}" if request.now else written

    def jobs(self) -> Mapping[str, JobUpdate]:
        """Return the job if it is reported to the server; always checks for new replicas."""
        status = self._look()
        return {self._job.name: JobUpdate(0, "running")} if self._job.reported and _alive(status) else {}

    def close(self) -> None:
        """Close the connections."""
        self._lighthouse.close()

    def _look(self) -> LighthouseStatus:
        status = self._lighthouse.status()
        now_s = self._clock()
        with self._lock:
            first = self._joined_s is None
            known = self._joined_s or {}
            # Replicas seen in the first query may have existed for any time.
            self._joined_s = {
                replica.id: known.get(replica.id, float("-inf") if first else now_s) for replica in status.replicas
            }
            for replica in status.replicas:
                self._nodes.update(dict.fromkeys(self._nodes_of(replica)))
        return status

    def _nodes_of(self, replica: Replica) -> tuple[str, ...]:
        return self._job.groups.get(replica.group) or ((replica.host,) if replica.host else ())

    def _condemned(self, request: Exclusion, status: LighthouseStatus) -> list[str]:
        """Return the replicas on the nodes. Raises CannotCarryOutError where they must not be ended."""
        alive = _alive(status)
        found = [replica for replica in alive if set(self._nodes_of(replica)) & set(request.nodes)]
        left = len(alive) - len(found)
        if found and left < self._job.replicas_min:
            raise CannotCarryOutError(
                f"{left} of {len(alive)} replica groups would be left; --replicas-min is {self._job.replicas_min}"
            )
        joined_s = self._joined_s or {}
        detected_s = request.cause.detected_s
        for replica in found:
            # Queried only every few seconds, by another clock: it may have joined a little earlier.
            if detected_s is not None and joined_s.get(replica.id, 0.0) - 2 * HEARTBEAT_S > detected_s:
                raise CannotCarryOutError(f"{replica.id} joined after the fault was found: somebody else replaced it")
        return [replica.id for replica in found]

    def _end(self, doomed: Sequence[str], cause: Cause) -> None:
        """End the replicas. Raises CannotCarryOutError where one stays."""
        for replica_id in doomed:
            if self._stays(replica_id):
                self._lighthouse.kill(replica_id)
                cause.tell(f"{replica_id} was told to end")
        until_s = time.monotonic() + self._job.gone_within_s
        while staying := [replica_id for replica_id in doomed if self._stays(replica_id)]:
            if time.monotonic() > until_s:
                raise CannotCarryOutError(
                    f"{', '.join(staying)} still takes part {self._job.gone_within_s:g} s after it was killed"
                )
            time.sleep(self._poll_s)

    def _stays(self, replica_id: str) -> bool:
        status = self._look()
        return replica_id in {replica.id for replica in _alive(status)}

    def _goes_on(self, doomed: Sequence[str]) -> str:
        """Wait until the other replicas take a step; return them."""
        if going := self._step_of(doomed):
            return going
        status = self._look()
        raise CannotCarryOutError(
            f"killed {', '.join(doomed) or 'nothing'}; no replica group has taken a step for "
            f"{self._job.on_within_s:g} s (step {status.step}, quorum {status.quorum_id})"
        )

    def _step_of(self, doomed: Sequence[str]) -> str:
        """Return the other replicas that have taken a step, "" where none does in ``on_within_s``.

        If some are ended, a new quorum without them is enough: groups that all restart begin at a lower step.
        """
        began = self._look()
        until_s = time.monotonic() + self._job.on_within_s
        while True:
            status = self._look()
            others = [replica for replica in _alive(status) if replica.id not in doomed]
            moved = status.step > began.step or (bool(doomed) and status.quorum_id > began.quorum_id)
            if others and moved and not {replica.id for replica in status.replicas} & set(doomed):
                back = {group for group in map(_group, doomed) if group in {replica.group for replica in others}}
                more = f"; {', '.join(sorted(back))} started again" if back else ""
                return f"{len(others)} replica groups train on, step {status.step}{more}"
            if time.monotonic() > until_s:
                return ""
            time.sleep(self._poll_s)


def _group(replica_id: str) -> str:
    return Replica(replica_id, 0, "").group


def _alive(status: LighthouseStatus) -> list[Replica]:
    """Return the replicas of the latest quorum that still send heartbeats."""
    return [r for r in status.replicas if status.heartbeats.get(r.id, float("inf")) < HEARTBEAT_S]


def _named(replicas: Sequence[str]) -> str:
    return ", ".join(replicas) or "no replica group"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add = parser.add_argument
    add("--job", required=True, help="the job that trains with this lighthouse, as Eagle Eye knows it")
    add("--lighthouse", default="http://127.0.0.1:29510", metavar="URL", help="http://HOST:29510")
    add("--groups", type=Path, metavar="FILE",
        help='JSON, {"replica group": ["node", ...]}; left out: a group is on its manager\'s host')  # fmt: skip
    add("--replicas-min", type=positive, default=1, metavar="N", help="so many groups are left over (1)")
    add("--exclude-file", type=Path, metavar="F", help="excluded nodes, one a line (STATE_DIR/excluded)")
    add("--gone-within", type=seconds, default=20.0, metavar="S", help="how long a group may take to end (20)")
    add("--on-within", type=seconds, default=60.0, metavar="S", help="until the others have taken a step (60)")
    add("--report-state", action="store_true", help="tell the server that the job runs")


def build(options: argparse.Namespace) -> TorchftOrchestrator:
    """Return the orchestrator. Raises OrchestratorError or ValueError naming the option."""
    job = TorchftJob(
        options.job,
        _groups(options.groups),
        options.replicas_min,
        options.gone_within,
        options.on_within,
        options.report_state,
    )
    memory = TorchftMemory(options.state_dir / "torchft.json", options.exclude_file or options.state_dir / "excluded")
    return TorchftOrchestrator(job, Lighthouse(options.lighthouse), memory)


def _groups(file: Path | None) -> dict[str, tuple[str, ...]]:
    if file is None:
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[str, ...]])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OrchestratorError(f"--groups {file}: {error}") from None
