"""Queries NCCL's RAS service about the jobs on this node. Touches: the service's port on this host, /proc."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.processes.process_files import Environments, ProcessEnvironment
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses

# Parses NCCL RAS replies, JSON and text, into one record.
#
# Formats of NCCL 2.24 and later (src/ras/client_support.cc). Collective counts are the host's at enqueue time: ranks
# normally differ by a few at any moment. The text format lists only anomalies.
OBJECTS_MAX = 250_000  # per document, and VALUES_MAX: three and twenty for each rank of each communicator
VALUES_MAX = 1_000_000
TROUBLES_MAX = 256  # per reply; the rest is counted
TEXT_CHARS_MAX = 256  # of one detail
LINE_CHARS_MAX = 4_096
COUNT_MAX = 1 << 53  # exact in the wire's float64
SUCCESS, IN_PROGRESS = 0, 7  # of ncclResult_t

# Problems by the service's own names; a MISMATCH is normal while a job runs.
GRAVE = ("DEAD", "INCOMPLETE", "ERROR", "ABORT")


class BadReply(ValueError):
    """A reply that is not a status; the message says what is wrong."""


class RasProblem(msgspec.Struct, frozen=True):
    """An anomaly. ``kind`` is RAS's own name: DEAD, INCOMPLETE, ERROR, ABORT, MISMATCH, TIMEOUT.

    ``communicator`` is its hash, "" for the whole job; ``rank`` is the rank in the communicator. None: unknown.
    """

    kind: str
    detail: str
    communicator: str = ""
    rank: int | None = None
    host: str = ""
    pid: int | None = None


class RasMember(msgspec.Struct, frozen=True, gc=False):
    """One rank of a communicator, and how many collectives its host has enqueued there."""

    rank: int
    host: str
    pid: int
    enqueued: int


class Communicator(msgspec.Struct, frozen=True):
    """One communicator and those of its ranks that answered and are running."""

    id: str
    size: int
    members: tuple[RasMember, ...]


class Reply(msgspec.Struct, frozen=True):
    """The state of a job as collected by one of its processes. Text replies have no ``communicators``.

    ``left_out`` counts troubles beyond TROUBLES_MAX.
    """

    nccl_version: str
    communicators: tuple[Communicator, ...] = ()
    troubles: tuple[RasProblem, ...] = ()
    left_out: int = 0

    def problem(self) -> str:
        """Return what is wrong in one sentence, "" where nothing serious is."""
        grave = [trouble for trouble in self.troubles if trouble.kind in GRAVE]
        if not grave:
            return ""
        named = list(dict.fromkeys(_named(trouble) for trouble in grave))
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        return f"NCCL RAS: {'; '.join(named[:4])}{more}"


_Integer = Annotated[
    int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)
]  # JSON's have any length, MessagePack's 64 bits


class _Status(msgspec.Struct, gc=False):
    init_state: _Integer = SUCCESS
    async_error: _Integer = SUCCESS
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct):
    rank: _Integer = -1
    host: str = ""
    pid: _Integer = -1
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: dict[str, int] = {}


class _Communicator(msgspec.Struct):
    hash: str = ""
    secondary_hash: str = ""
    size: _Integer = 0
    ranks: list[_Rank] = []
    missing_ranks: list[_Rank] = []


class _Ras(msgspec.Struct):
    timeouts_count: _Integer = 0


class _Document(msgspec.Struct):
    nccl_version: str = ""
    communicators: list[_Communicator] = []
    ras: _Ras = msgspec.field(default_factory=_Ras)


_decoder = msgspec.json.Decoder(_Document)
# A line that ends a value followed by one that begins the next, without a comma: NCCL 2.28.9 omits one.
_NO_COMMA = re.compile(rb'([}\]"0-9el])([ \t]*\r?\n[ \t]*)(?=["{])')


def parse_reply(raw: bytes) -> Reply:
    """Return a reply, JSON or text. Raises BadReply."""
    begin = raw.find(b"{")
    # Some builds print their banner before the document.
    if begin >= 0 and b"communicators" in raw[begin : begin + LINE_CHARS_MAX]:
        return _from_json(raw[begin:])
    return _from_text(raw.decode("utf-8", errors="replace"))


def _from_json(raw: bytes) -> Reply:
    if raw.count(b"{") > OBJECTS_MAX or raw.count(b":") > VALUES_MAX:  # each takes a hundred times its bytes in memory
        raise BadReply(f"more than {OBJECTS_MAX} objects or {VALUES_MAX} values in {len(raw)} bytes")
    try:
        try:
            document = _decoder.decode(raw)
        except msgspec.DecodeError:
            document = _decoder.decode(_NO_COMMA.sub(rb"\1,\2", raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReply(f"no status in JSON: {error}"[:TEXT_CHARS_MAX]) from None
    communicators: list[Communicator] = []
    found = _Troubles()
    for item in document.communicators:
        members = tuple(
            RasMember(rank.rank, rank.host[:TEXT_CHARS_MAX], rank.pid, enqueued)
            for rank in item.ranks
            if (enqueued := _enqueued(rank)) is not None
        )
        # Two communicators may share one hash; the second one disambiguates.
        name = f"{item.hash} {item.secondary_hash}".strip()[:TEXT_CHARS_MAX]
        communicators.append(Communicator(name, item.size, members))
        found.of_ranks(name, item)
    for communicator in communicators:  # last: they are many, and normal while a job runs
        found.of_counts(communicator)
    if document.ras.timeouts_count > 0:
        found.add(RasProblem("TIMEOUT", f"{document.ras.timeouts_count} timeouts while the state was gathered"))
    return Reply(document.nccl_version[:64], tuple(communicators), tuple(found.kept), found.left_out)


def _enqueued(rank: _Rank) -> int | None:
    """Return how many collectives of all kinds a running rank has enqueued."""
    status = rank.status
    if status.abort_flag or status.finalize_called or status.destroy_flag or status.init_state != SUCCESS:
        return None
    counts = rank.collective_counts.values()
    total = sum(counts)
    return total if rank.rank >= 0 and min(counts, default=0) >= 0 and total < COUNT_MAX else None


class _Troubles:
    """Collects problems up to the limit, and the details of each up to its own."""

    def __init__(self) -> None:
        self.kept: list[RasProblem] = []
        self.left_out = 0

    def add(self, trouble: RasProblem) -> None:
        if len(self.kept) < TROUBLES_MAX:
            self.kept.append(msgspec.structs.replace(trouble, detail=trouble.detail[:TEXT_CHARS_MAX]))
        else:
            self.left_out += 1

    def of_ranks(self, name: str, item: _Communicator) -> None:
        """Add ranks that did not answer, or that report errors. Ranks that left the communicator are not a problem."""
        for rank in item.missing_ranks:
            if rank.status.considered_dead:
                self._rank("DEAD", "considered dead", name, rank)
            elif rank.status.unresponsive:
                self._rank("INCOMPLETE", "did not answer", name, rank)
        for rank in item.ranks:
            for said, code in (("initialization", rank.status.init_state), ("asynchronous", rank.status.async_error)):
                if code not in (SUCCESS, IN_PROGRESS):
                    self._rank("ERROR", f"{said} error {code}", name, rank)
            if rank.status.abort_flag:
                self._rank("ABORT", "aborts the communicator", name, rank)

    def of_counts(self, communicator: Communicator) -> None:
        """Add ranks whose number of enqueued collectives differs from most."""
        counts = Counter(member.enqueued for member in communicator.members)
        if len(counts) < 2:
            return
        usual = max(counts, key=lambda count: (counts[count], count))
        for member in communicator.members:
            if member.enqueued != usual:
                detail = f"enqueued {member.enqueued} collectives, most {usual}"
                self.add(RasProblem("MISMATCH", detail, communicator.id, member.rank, member.host, member.pid))

    def _rank(self, kind: str, detail: str, name: str, rank: _Rank) -> None:
        self.add(RasProblem(kind, detail, name, rank.rank, rank.host[:TEXT_CHARS_MAX], rank.pid))


_VERSION = re.compile(r"(?:NCCL|RCCL) version (\S{1,64})")
_HEADING = re.compile(r"(?:#\S{1,32} \(([0-9a-fx]{1,32})\) )?(INCOMPLETE|DEAD|TIMEOUT|MISMATCH|ERROR|ABORT)\s*$")
_ON_NODE = re.compile(r"[Pp]rocess (\d{1,9}) on node (\S{1,253})")
_RANK = re.compile(r"Rank (\d{1,9})\b")


def _from_text(text: str) -> Reply:
    version = _VERSION.search(text[:LINE_CHARS_MAX])
    if version is None:
        raise BadReply(f"no status: {text[:80]!r}")
    if "\nWarnings\n" not in text:  # the last section, written also where it is empty
        raise BadReply(f"it breaks off after {len(text)} characters")
    found = _Troubles()
    for trouble in _sections(text):
        found.add(trouble)
    return Reply(version[1], (), tuple(found.kept), found.left_out)


def _sections(text: str) -> Iterator[RasProblem]:
    """Yield each indented line below a heading: "#0-0 (abc) MISMATCH", or one for the whole job."""
    heading: re.Match[str] | None = None
    for raw in text.splitlines():
        line = raw[:LINE_CHARS_MAX]
        if not line.startswith("  "):
            heading = _HEADING.match(line)
        elif heading is not None:
            place, rank = _ON_NODE.search(line), _RANK.search(line)
            yield RasProblem(
                kind=heading[2],
                detail=line.strip(),
                communicator=heading[1] or "",
                rank=int(rank[1]) if rank is not None else None,
                host=place[2] if place is not None else "",
                pid=int(place[1]) if place is not None else None,
            )


def _named(trouble: RasProblem) -> str:
    if trouble.rank is None or not trouble.host:
        return f"{trouble.kind}: {trouble.detail}"
    return f"{trouble.kind}: rank {trouble.rank} on {trouble.host}, process {trouble.pid}"


# Asks the service, within a deadline.
DEFAULT_PORT = 28_028
PROTOCOL = 2
REPLY_BYTES_MAX = 16 << 20  # a rank of one communicator is about 600 bytes in JSON
LINE_BYTES_MAX = 4_096
GATHER_S = 3  # how long the service waits for its peers: a healthy job answers within milliseconds
HANDSHAKE_S = 1.0
# All processes of a node listen on one port and the kernel picks one: a stopped process must not block the others.
HANDSHAKES_MAX = 4


class NoAnswer(Exception):
    """The service did not answer; ``refused`` where nothing listens."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class TooLong(NoAnswer):
    """The reply exceeds the limit; the text format is shorter."""


def ask_ras(
    port: int, deadline_s: float, *, text: bool = False, monotonic_s: Callable[[], float] = time.monotonic
) -> Reply:
    """Return what the service on this host's ``port`` knows of its job. Raises NoAnswer, BadReply.

    Requests JSON unless ``text``; accepts text where the service is older than 2.28.7.
    """
    until_s = monotonic_s() + deadline_s
    for attempt in range(HANDSHAKES_MAX):
        try:
            connection = _Connection(port, until_s, monotonic_s)
            break
        except TimeoutError:
            if attempt == HANDSHAKES_MAX - 1 or monotonic_s() >= until_s:
                raise NoAnswer(f"port {port}: no handshake within {HANDSHAKE_S:g} s; is its process stopped?") from None
        except ConnectionRefusedError:
            raise NoAnswer(f"port {port}: nobody listens", refused=True) from None
        except OSError as error:
            raise NoAnswer(f"port {port}: {error.strerror or error}") from None
    try:
        return parse_reply(connection.status(text=text))
    except TimeoutError:
        raise NoAnswer(f"port {port}: no status within {deadline_s:g} s") from None
    except OSError as error:
        raise NoAnswer(f"port {port}: {error.strerror or error}") from None
    finally:
        connection.close()


class _Connection:
    """One connection; the service closes it after one status. Raises OSError, TimeoutError, NoAnswer."""

    def __init__(self, port: int, until_s: float, monotonic_s: Callable[[], float]) -> None:
        self._port = port
        self._until_s = until_s
        self._monotonic_s = monotonic_s
        self._unread = b""
        self._socket = socket.create_connection(("localhost", port), timeout=self._rest_s(HANDSHAKE_S))
        try:
            self._greet()
        except BaseException:
            self._socket.close()
            raise

    def status(self, *, text: bool) -> bytes:
        """Return the reply, as JSON where the service supports it and ``text`` is not set."""
        rest_s = self._rest_s()
        self._command(f"TIMEOUT {GATHER_S}", rest_s)  # a service without this command keeps its own timeout
        if not text:
            self._command("SET FORMAT json", rest_s)  # likewise, it then answers in text
        self._send("VERBOSE STATUS")
        parts, size = [self._unread], len(self._unread)
        while True:
            self._socket.settimeout(self._rest_s())
            part = self._socket.recv(1 << 16)
            if not part:
                return b"".join(parts)
            size += len(part)
            if size > REPLY_BYTES_MAX:
                raise TooLong(f"port {self._port}: more than {REPLY_BYTES_MAX} bytes; its job is too large for JSON")
            parts.append(part)

    def close(self) -> None:
        self._socket.close()

    def _greet(self) -> None:
        greeting = self._command(f"CLIENT PROTOCOL {PROTOCOL}", HANDSHAKE_S)
        if not greeting.upper().startswith("SERVER PROTOCOL "):
            raise NoAnswer(f"port {self._port}: no RAS service: it says {greeting[:80]!r}")

    def _send(self, command: str) -> None:
        self._socket.settimeout(self._rest_s())
        self._socket.sendall(command.encode() + b"\n")

    def _command(self, command: str, timeout_s: float) -> str:
        """Return the one-line answer to a command."""
        self._send(command)
        until_s = min(self._until_s, self._monotonic_s() + timeout_s)
        while b"\n" not in self._unread:
            if len(self._unread) > LINE_BYTES_MAX:
                raise NoAnswer(f"port {self._port}: no RAS service: a line of more than {LINE_BYTES_MAX} bytes")
            rest_s = until_s - self._monotonic_s()
            if rest_s <= 0:
                raise TimeoutError
            self._socket.settimeout(rest_s)
            part = self._socket.recv(LINE_BYTES_MAX)
            if not part:
                raise NoAnswer(f"port {self._port}: it closed the connection")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("utf-8", errors="replace").rstrip("\r")

    def _rest_s(self, most_s: float = float("inf")) -> float:
        rest_s = min(most_s, self._until_s - self._monotonic_s())
        if rest_s <= 0:
            raise TimeoutError
        return rest_s


# Asks about each of this node's jobs in turn.
EVERY_S = 10.0  # and never more often: each query makes the service query every process of the job
DEADLINE_S = 12.0  # twice the service's own timeouts
COST_FACTOR = 1_000.0  # parsing replies may take a thousandth of one core
PORTS_MAX = 8
LOOPBACK = ("", "localhost", "::", "::1", "0.0.0.0", "127.0.0.1")  # noqa: S104 - what is asked is this host in any case

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class RasAnswer:
    """One service's answer, and its time in Unix seconds."""

    port: int
    time_s: float
    reply: Reply


def own_addresses() -> frozenset[str]:
    """Return this node's IP addresses, as text."""
    return frozenset(address.address.partition("%")[0] for found in psutil.net_if_addrs().values() for address in found)


@dataclass(frozen=True)
class RasHost:
    """What the collector uses of its host. ``addresses`` returns the node's own, ``asker`` what the service answers."""

    proc: Path = Path("/proc")
    addresses: Callable[[], frozenset[str]] = own_addresses
    asker: Callable[..., Reply] = ask_ras
    monotonic_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[], float] = time.thread_time


THIS_HOST = RasHost()


class NcclRasCollector:
    """Queries RAS every EVERY_S for each job whose rank 0 runs here: one answer covers the whole job.

    Problems of ranks anywhere in the job go into ``Observed.problem``, and in full into ``answers`` for evidence; they
    accuse no rank by themselves. The number of collectives enqueued goes into rows only where all ranks of a job are
    compared: where the job has no other node, or every node asks (``every_node``).

    A refused connection is counted as ``nccl_ras_refused``, a service that does not answer as ``nccl_ras_unanswered``,
    an answer that is not a status as ``nccl_ras_malformed``.

    Cannot see: NCCL before 2.24 and jobs with NCCL_RAS_ENABLE=0; services not bound to this host's loopback, as in
    containers with their own network namespace; which of two jobs on one node will answer where both use one port,
    until the answer names it.
    """

    name = "nccl_ras"

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        ports: Sequence[int] = (),
        every_s: float = EVERY_S,
        *,
        every_node: bool = False,
        taken: Callable[[int], bool] = lambda _device: False,
        host: RasHost = THIS_HOST,
    ) -> None:
        """``ports`` are queried in addition to those in the processes' environments.

        ``taken`` says whether another source reports a device's sequences: numbers from two sources are not comparable.
        """
        self._processes = processes
        self._drops = drops
        self._ports = tuple(ports)
        self._every_s = max(every_s, EVERY_S)
        self._every_node = every_node
        self._taken = taken
        self._environments = Environments(host.proc)
        self._addresses = host.addresses
        self._ask = host.asker
        self._monotonic_s = host.monotonic_s
        self._cpu_s = host.cpu_s
        self._due_s = -1.0
        self._problem = ""
        self._answers: dict[int, RasAnswer] = {}
        self._long: set[int] = set()  # ports whose JSON answer is too long

    def collect(self, now_s: float) -> Observed:
        """Return this node's rows if it has just asked; problems are repeated until it asks again."""
        monotonic_s = self._monotonic_s()
        if monotonic_s < self._due_s:
            return Observed(problem=self._problem)
        begin_s = self._cpu_s()
        observed = Observed()
        processes = self._processes.all()
        environments = self._environments.of(processes)
        problems: list[str] = []
        ports = self._ports_to_ask(processes, environments, problems)
        for port in ports:
            reply = self._reply(port, problems)
            if reply is not None:
                self._answers = {**self._answers, port: RasAnswer(port, now_s, reply)}
                problems.append(reply.problem())
                self._put_rows(reply, environments, observed)
        self._answers = {port: answer for port, answer in self._answers.items() if port in ports}
        self._due_s = monotonic_s + max(self._every_s, COST_FACTOR * (self._cpu_s() - begin_s))
        self._problem = observed.problem = "; ".join(dict.fromkeys(text for text in problems if text))
        return observed

    def answers(self) -> list[RasAnswer]:
        """Return the newest answer of each port; thread-safe."""
        return list(self._answers.values())

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _ports_to_ask(
        self,
        processes: Sequence[TrainingProcess],
        environments: Mapping[TrainingProcess, ProcessEnvironment],
        problems: list[str],
    ) -> list[int]:
        """Return the ports of the jobs that this node asks about."""
        asks = [process for process in processes if process.rank == 0]
        jobs = {process.job for process in asks}
        found = dict.fromkeys(self._ports) if asks or (self._every_node and processes) else {}
        for process in processes:
            environment = environments.get(process)
            if not self._every_node and process.job not in jobs:
                continue
            if environment is None:
                found.setdefault(DEFAULT_PORT)
            elif environment.first("NCCL_RAS_ENABLE") != "0":
                address = environment.first("NCCL_RAS_ADDR")
                port = _port(address)
                if port is None:
                    problems.append(f"NCCL_RAS_ADDR={address[:80]!r} of process {process.pid}: only loopback is asked")
                else:
                    found.setdefault(port)
        return list(found)[:PORTS_MAX]

    def _reply(self, port: int, problems: list[str]) -> Reply | None:
        try:
            return self._ask(port, DEADLINE_S, text=port in self._long)
        except TooLong as error:
            self._long.add(port)
            problems.append(f"{error}; asked in text from now on")
        except NoAnswer as error:
            self._drops.count("nccl_ras_refused" if error.refused else "nccl_ras_unanswered")
            # NCCL opens the port with its first communicator: until the first answer there may be none.
            if not error.refused or port in self._answers:
                problems.append(str(error))
        except BadReply as error:
            self._drops.count("nccl_ras_malformed")
            problems.append(f"port {port}: {error}")
        return None

    def _put_rows(
        self, reply: Reply, environments: Mapping[TrainingProcess, ProcessEnvironment], observed: Observed
    ) -> None:
        own = self._addresses()
        by_pid = {environment.own_pid: process for process, environment in environments.items()}
        width: dict[int, tuple[int, str]] = {}
        for communicator in reply.communicators:
            if not (self._every_node or _within(communicator, own)):
                continue
            for member in communicator.members:
                process = by_pid.get(member.pid) if member.host in own else None
                if process is None or self._taken(process.device):
                    continue
                rank_width = (communicator.size, communicator.id)
                if rank_width > width.get(process.device, (0, "")):
                    width[process.device] = rank_width
                    observed.devices[process.device] = {"nccl_sequence": float(member.enqueued)}


def _within(communicator: Communicator, own: frozenset[str]) -> bool:
    members = communicator.members
    return len(members) == communicator.size and all(member.host in own for member in members)


def _port(address: str) -> int | None:
    """Return the port in NCCL_RAS_ADDR; None where it is bound to anything but this host's loopback."""
    if not address:
        return DEFAULT_PORT
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        return None
    return int(match["port"]) if (match["host"] if match["v6"] is None else match["v6"]).lower() in LOOPBACK else None
