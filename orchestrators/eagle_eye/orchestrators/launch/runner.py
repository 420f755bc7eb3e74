"""The launcher's runner on a node: keeps torch imported, runs attempts, kills them; exits with its coordinator.

Reads messages from stdin and writes them to stdout. Whatever happens to the coordinator or to the connection,
no rank outlives it for long: stdin's end, or silence longer than the lease, kills them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import msgspec
import psutil

from eagle_eye.orchestrators.launch import logs
from eagle_eye.orchestrators.launch.messages import (
    Alive,
    CheckNode,
    Configure,
    Ended,
    FromRunner,
    Held,
    Hold,
    Logs,
    Look,
    Ping,
    RankAtPoint,
    RankDone,
    RankSight,
    Reached,
    ReachStore,
    Ready,
    Regroup,
    Seen,
    Start,
    Started,
    StartedRank,
    Stop,
    Stopped,
    Unfit,
    decode_from_runner,
    decode_to_runner,
    line,
)
from eagle_eye.orchestrators.launch.own_process import PR_SET_CHILD_SUBREAPER, note, prctl, write
from eagle_eye.orchestrators.launch.standby_process import become_attempt
from eagle_eye.orchestrators.launch.standbys import StandbyKeeper
from eagle_eye.schema.checkpoint_files import (
    STORE_IDLE_S,
    STORE_SOCKET,
    STORE_WORDS,
    read_steps,
    spawn_store,
    store_folder,
)
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.schema.restart_names import SOCKET_VARIABLE
from eagle_eye.schema.restart_point import PACKET_BYTES_MAX, REASON_CHARS_MAX, AtPoint, GoOn

# Prepares a node before it joins: ends an earlier launcher's leftovers, and checks the node.
#
# Touches processes. Runs in a thread, so that the runner keeps answering its coordinator.

LAUNCH_VARIABLE = "EAGLE_EYE_LAUNCH"
ENDED_WITHIN_S = 10.0
CHECK_OUTPUT_BYTES_MAX = 1 << 20
CHECK_REASON_CHARS_MAX = 500
DEADLINE_S_MIN = 5.0
GRACE_S = 2.0  # beyond the check's own deadline, which it should keep by itself
SICK_EXIT_CODE = 3
_GPUS = ("/proc/driver/nvidia/gpus", "/dev/nvidia0", "/dev/kfd")


class Checked(NamedTuple):
    """A check's result for the node. ``text`` is for people; "cannot tell" keeps no node from joining."""

    state: Literal["healthy", "sick", "cannot tell", "not checked"]
    text: str = ""

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.state}: {self.text}" if self.text else self.state


def end_leftovers(launch: str, node: str) -> list[int]:
    """Kill this node's ranks of earlier launchers with this id; return those that cannot be killed.

    Ranks of a launcher that was killed end by themselves with its runner's lease; until then they might write a
    checkpoint over that of the next attempt. They are recognized by their environment, which no other job's ranks
    share.
    """
    until_s = time.monotonic() + ENDED_WITHIN_S
    while (left := _leftovers(launch, node)) and time.monotonic() < until_s:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    return [process.pid for process in left]


def check_node(how: str, within_s: float) -> Checked:
    """Return the result of ``eagle-eye check``: "quick" or "full", "auto" is quick where there are GPUs."""
    if how == "off":
        return Checked("not checked")
    if how == "auto":
        if not any(map(os.path.exists, _GPUS)):
            return Checked("not checked", "no GPUs here")
        how = "quick"
    deadline_s = max(DEADLINE_S_MIN, within_s - GRACE_S)
    command = [sys.executable, "-m", "eagle_eye.cli.main", "check", "--json", "--deadline", f"{deadline_s:g}"]
    if how == "quick":
        command.append("--quick")
    return run_check(command, deadline_s + GRACE_S)


def run_check(command: list[str], within_s: float) -> Checked:
    """Return the result of a command that checks like ``eagle-eye check --json``, in time or not."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=Path("/"), start_new_session=True
        )
    except OSError as error:
        return Checked("cannot tell", f"the check cannot be started: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        return Checked("cannot tell", f"the check had not ended after {within_s:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    report = _report(output[:CHECK_OUTPUT_BYTES_MAX])
    # Both: 1 and 2 also come from other failures, and 0 from a child whose exit was collected elsewhere.
    if process.returncode == SICK_EXIT_CODE and report.get("verdict") == "sick":
        return Checked("sick", _reason(report))
    if process.returncode == 0 and report.get("verdict") == "healthy":
        return Checked("healthy")
    return Checked("cannot tell", _reason(report) or f"the check ended with {process.returncode}")


def _report(output: bytes) -> dict[str, object]:
    try:
        report = json.loads(output)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _reason(report: dict[str, object]) -> str:
    checks = report.get("checks")
    sick = [one for one in checks if _is_sick(one)] if isinstance(checks, list) else []
    text = "; ".join(f"{one.get('name')}: {one.get('reason')}" for one in sick) or str(report.get("reason", ""))
    return "".join(c if c.isprintable() else " " for c in text)[:CHECK_REASON_CHARS_MAX]


def _is_sick(check: object) -> bool:
    return isinstance(check, dict) and check.get("state") == "sick"


def _leftovers(launch: str, node: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            mine = environ.get(LAUNCH_VARIABLE) == launch and environ.get("EAGLE_EYE_NODE") == node
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# Observes a node's ranks during start: which processes are stopped, which have reached the store.
#
# Reads /proc, and connects to the store.
CONNECTED_WITHIN_S = 1.0  # a single lost segment is resent by then
PROCESSES_MAX = 64  # examined per rank: its data loaders are irrelevant here


def look_at_ranks(ranks: Iterable[StartedRank], store_port: int) -> list[RankSight]:
    """Return each rank's state. A rank has arrived once one of its processes has a connection to the store.

    That connection is made at ``init_process_group`` and kept; a rank that uses another rendezvous never arrives.
    Unreadable facts are None and not held against it. A process traced by a debugger does not count as stopped.
    """
    return [_look(rank, store_port) for rank in ranks]


def reaches(host: str, port: int) -> bool:
    """Return whether a connection to the store can be made from here, within CONNECTED_WITHIN_S."""
    try:
        with socket.create_connection((host, port), CONNECTED_WITHIN_S):
            return True
    except OSError:
        return False


def _look(rank: StartedRank, store_port: int) -> RankSight:
    stopped, joined, read = False, False, False
    for process in _family(rank.pid):
        with contextlib.suppress(psutil.Error, OSError):
            stopped = stopped or process.status() == psutil.STATUS_STOPPED
            joined = joined or _has_come(process, store_port)
            read = True
    return RankSight(rank.rank, stopped, joined if read else None)


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)][:PROCESSES_MAX]
    except psutil.Error:
        return []


def _has_come(process: psutil.Process, store_port: int) -> bool:
    # Its name before psutil 6.
    connections = getattr(process, "net_connections", None) or process.connections
    return any(
        one.raddr and one.raddr[1] == store_port and one.status == psutil.CONN_ESTABLISHED for one in connections("tcp")
    )


# Starts a node's store for in-memory checkpoints before its ranks. Touches processes.
#
# So the job does not wait for a spare's store to start.
LOOK_EVERY_S = STORE_IDLE_S / 3  # connecting also keeps it from exiting
PROGRAM = [sys.executable, "-m", "eagle_eye.cli.main"]


class StoreKeeper:
    """Starts a store where there is none. It outlives the runner, and exits by itself once no longer contacted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = 0.0

    def keep(self, folder: Path, node: str) -> None:
        """Make sure that a store serves the folder or starts. Never raises: ranks start one too, and report errors."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_EVERY_S
        if serves(folder):
            return
        try:
            spawn_store(PROGRAM, folder, node)
        except (OSError, subprocess.SubprocessError) as error:
            note(f"no store for checkpoints in memory is started: {error}")


def serves(folder: Path) -> bool:
    """Whether a store accepts connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECTED_WITHIN_S)
        try:
            probe.connect(str(folder / STORE_SOCKET))
        except OSError:
            return False
    return True


# The restart points of a node's ranks, as its runner sees them. Touches a Unix socket in the abstract namespace.
#
# Only a rank's own runner tells it to continue, and only while it waits: so none starts an attempt that is not its
# own.
CONNECTIONS_MAX = 1024
SENT_WITHIN_S = 1.0  # a waiting rank reads at once

_CREDENTIALS = struct.Struct("3i")
_decode = msgspec.json.Decoder(AtPoint).decode


@dataclass
class _Connection:
    socket: socket.socket
    said: AtPoint | None = None


class RestartPoints:
    """The restart points of the running ranks. ``heard`` gets their messages. Used only by the runner's main thread.

    ``name`` is the socket's; "" where there can be none, and then no rank has a restart point.
    """

    def __init__(self, selector: selectors.BaseSelector, heard: Callable[[AtPoint], None]) -> None:
        self._selector = selector
        self._heard = heard
        self._connections: list[_Connection] = []
        self.name = f"eagle-eye-restart-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(b"\0" + self.name.encode())
            self._listener.listen()
        except OSError as error:
            note(f"ranks have no restart points: {error}")
            self.name = ""
            return
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def ranks(self, attempt: int) -> set[int]:
        """Return the ranks that have a restart point in this attempt."""
        return {said.rank for one in self._connections if (said := one.said) is not None and said.attempt == attempt}

    def go_on(self, word: GoOn) -> None:
        """Tell ranks that wait, in an earlier attempt, to continue."""
        for one in list(self._connections):
            if one.said is not None and one.said.waits and one.said.attempt < word.attempt:
                try:
                    one.socket.sendall(msgspec.json.encode(word))
                except OSError as error:  # it has exited, which its agent reports
                    note(f"rank {one.said.rank} is not told to go on: {error}")
                    self._drop(one)

    def clear(self) -> None:
        """Forget all ranks: they have exited."""
        for one in list(self._connections):
            self._drop(one)

    def disown(self) -> None:
        """Release in a forked process, which does not own them."""
        for sock in (self._listener, *(one.socket for one in self._connections)):
            sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid() or len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        sock.settimeout(SENT_WITHIN_S)
        one = _Connection(sock)
        self._connections.append(one)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, one))

    def _read(self, one: _Connection) -> None:
        try:
            content = one.socket.recv(PACKET_BYTES_MAX)
            said = _decode(content) if content else None
        except (OSError, msgspec.DecodeError):
            said = None
        if said is None:
            self._drop(one)
            return
        one.said = msgspec.structs.replace(said, reason=said.reason[:REASON_CHARS_MAX])
        self._heard(one.said)

    def _drop(self, one: _Connection) -> None:
        self._connections.remove(one)
        self._selector.unregister(one.socket)
        one.socket.close()


KILL_DEADLINE_S = 3.0
POLL_S = 0.5
STANDBY_WITHIN_S = 120.0
REACH_NODES_MAX = 256  # of a job: in larger ones only nodes whose ranks have not arrived try to reach the store


class Runner:
    """Serves one coordinator until its connection ends."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._selector = selectors.DefaultSelector()
        self._selector.register(incoming, selectors.EVENT_READ, self._read_coordinator)
        self._unread = b""
        self._configured = Configure({}, float("inf"))
        self._heard_s = time.monotonic()
        self._child_pipe: int | None = None
        self._child_unread = b""
        self._child_attempt = 0
        self._child_ended = True
        self._ranks: list[StartedRank] = []
        self._store_host, self._store_port, self._nodes = "", 0, 0
        self._logs_owed: Path | None = None
        self._prepared, self._prepared_end = os.pipe()
        self._selector.register(self._prepared, selectors.EVENT_READ, self._join)
        self._preparing: threading.Thread | None = None
        self._doing = ""
        self._standbys = StandbyKeeper(self._selector)
        self._standby_outcome = ""
        self._points = RestartPoints(self._selector, self._at_point)
        self._regroup: Regroup | None = None
        self._store = StoreKeeper()
        self._answer: FromRunner | None = None
        self._start_owed: Start | None = None
        self._gone = False

    def serve(self) -> None:
        """Serve until the coordinator is gone, then kill every process that this runner started."""
        try:
            while not self._gone:
                # One at a time, the coordinator first: its message may close the others' source.
                ready = [key.data for key, _ in self._selector.select(POLL_S)]
                if ready:
                    (self._read_coordinator if self._read_coordinator in ready else ready[0])()
                self._standbys.tend()
                if time.monotonic() - self._heard_s > self._configured.lease_s:
                    note(f"nothing heard for {self._configured.lease_s:.0f} s; the ranks are stopped")
                    break
        finally:
            self._kill()
            self._standbys.close()

    def _read_coordinator(self) -> None:
        received = os.read(self._incoming, 65_536)
        if not received:
            self._gone = True
            return
        self._heard_s = time.monotonic()
        *lines, self._unread = (self._unread + received).split(b"\n")
        for text in lines:
            self._obey(text)

    def _obey(self, text: bytes) -> None:
        try:
            message = decode_to_runner(text)
        except msgspec.DecodeError as error:
            note(f"not understood: {error}")
            return
        match message:
            case Configure():
                # Before torch: some of its settings are read on import.
                os.environ.update(message.env)
                os.environ[SOCKET_VARIABLE] = self._points.name
                self._configured = message
                self._prepare()
            case CheckNode():
                self._prepare()
            case Start() | Regroup() | Stop():
                self._run_ranks(message)
            case Look(attempt):
                self._say(self._look(attempt))
            case ReachStore(host, port):
                self._say(Reached(reaches(host, port)))
            case Hold(job, node):
                self._say(Held(read_steps(store_folder(node), job)))
            case Ping(store):
                self._answer_ping(store=store)

    def _run_ranks(self, message: Start | Regroup | Stop) -> None:
        match message:
            case Start() if self._preparing is not None:
                self._start_owed = message
            case Start():
                self._kill()
                self._start(message)
            case Regroup():
                self._regroup_ranks(message)
            case Stop():
                self._start_owed = None
                survivors = self._kill()
                self._bring_logs()
                self._say(Stopped(survivors))

    def _answer_ping(self, *, store: bool) -> None:
        self._say(Alive(self._doing))
        if store:
            node = self._configured.node
            self._store.keep(store_folder(node), node)

    def _prepare(self) -> None:
        """Get ready in a thread, so that the runner keeps answering meanwhile."""
        if self._preparing is None:
            self._standbys.prepare(self._configured.standby)
            self._preparing = threading.Thread(target=self._get_ready, name="prepare", daemon=True)
            self._doing = "starting"
            self._preparing.start()
            self._say(Alive(self._doing))

    def _get_ready(self) -> None:
        configured = self._configured
        checking: list[Checked] = []
        check = threading.Thread(
            target=lambda: checking.append(check_node(configured.check, configured.check_within_s)), daemon=True
        )
        try:
            self._doing = "ending ranks of an earlier launcher"
            if survivors := configured.launch and end_leftovers(configured.launch, configured.node):
                self._answer = Unfit(f"{len(survivors)} processes of an earlier attempt cannot be killed")
                return
            check.start()
            self._doing = "importing torch"
            if configured.standby is not None:
                self._doing = ", ".join(["importing torch", *configured.standby.imports])
                self._standby_outcome = self._standbys.outcome(STANDBY_WITHIN_S)
            if configured.standby is None or self._standby_outcome:
                import eagle_eye.orchestrators.launch.elastic  # noqa: F401 - torch, once for all attempts

            self._doing = "checking its node"
            check.join()
            found = checking[0] if checking else Checked("cannot tell", "the check itself failed")
            self._answer = Unfit(found.text or "sick") if found.state == "sick" else Ready(os.getpid(), str(found))
        except Exception as error:  # noqa: BLE001 - whatever importing torch raises
            self._answer = None
            note(f"cannot get ready: {type(error).__name__}: {error}")
        finally:
            os.write(self._prepared_end, b".")

    def _join(self) -> None:
        """Report the result of getting ready. Its thread has ended: attempts are forked without threads."""
        os.read(self._prepared, 1)
        if self._preparing is not None:
            self._preparing.join()
        self._preparing, self._doing = None, ""
        self._standbys.settle(self._standby_outcome)
        if self._answer is None:  # another runner is tried; the last line of this one's log is reported
            self._gone = True
            return
        if isinstance(self._answer, Ready):
            self._answer = msgspec.structs.replace(self._answer, standby=self._standbys.text)
        self._say(self._answer)
        if (start := self._start_owed) is not None:
            self._start_owed = None
            self._start(start)

    def _start(self, start: Start) -> None:
        read_end, write_end = os.pipe()
        if not self._standbys.start(start, write_end):
            self._kill()
            if os.fork() == 0:
                os.close(read_end)
                self._selector.close()
                for descriptor in (self._incoming, self._outgoing, self._prepared, self._prepared_end):
                    os.close(descriptor)
                self._standbys.disown()
                self._points.disown()
                become_attempt(start, write_end)
        os.close(write_end)
        self._child_pipe, self._child_unread = read_end, b""
        self._child_attempt, self._child_ended = start.attempt, False
        self._ranks, self._nodes = [], start.nodes
        self._store_host, self._store_port = start.store_host, start.store_port
        folder = Path(start.log_dir)
        self._logs_owed = None if logs.is_marked(folder.parent.parent, self._configured.launch) else folder
        if self._logs_owed is not None:
            logs.drop_old(folder.parent.parent, start.attempt)
        self._selector.register(read_end, selectors.EVENT_READ, self._read_child)

    def _regroup_ranks(self, regroup: Regroup) -> None:
        """Continue the ranks in the new attempt, all at once; all their messages from now on belong to it."""
        self._regroup = regroup
        self._child_attempt = regroup.attempt
        self._store_host, self._store_port = regroup.store_host, regroup.store_port
        self._points.go_on(GoOn(regroup.attempt, regroup.env))

    def _at_point(self, said: AtPoint) -> None:
        self._say(RankAtPoint(said.attempt, said.rank, said.waits, said.reason))
        regroup = self._regroup
        if regroup is None or not self._points.ranks(regroup.attempt).issuperset(rank.rank for rank in self._ranks):
            return
        self._regroup = None
        self._say(Started(regroup.attempt, self._ranks, kept=True))

    def _look(self, attempt: int) -> Seen:
        if attempt != self._child_attempt:
            return Seen(attempt)
        ranks = look_at_ranks(self._ranks, self._store_port)
        tries = self._nodes <= REACH_NODES_MAX or any(one.joined is False for one in ranks)
        return Seen(attempt, ranks, reaches(self._store_host, self._store_port) if tries else None)

    def _read_child(self) -> None:
        assert self._child_pipe is not None  # noqa: S101 - registered only while there is one
        received = os.read(self._child_pipe, 65_536)
        if not received:
            self._child_gone()
            return
        *lines, self._child_unread = (self._child_unread + received).split(b"\n")
        for text in lines:
            message = decode_from_runner(text)
            if isinstance(message, Started):
                self._ranks = message.ranks
            if isinstance(message, Started) and not message.standby:
                message = msgspec.structs.replace(message, why_not=self._standbys.why_not)
            if isinstance(message, RankDone):
                message = msgspec.structs.replace(message, attempt=self._child_attempt)
            if isinstance(message, Ended):
                message = msgspec.structs.replace(message, attempt=self._child_attempt)  # they may have moved on
                self._child_ended = True
                self._bring_logs()
            self._say(message)

    def _child_gone(self) -> None:
        """The attempt's process has exited; if it could not report how, report it here."""
        ended, attempt = self._child_ended, self._child_attempt
        self._kill()
        if not ended:
            self._bring_logs()
            self._say(Ended(attempt, success=False, detail="the elastic agent ended without a word"))

    def _kill(self) -> list[int]:
        """Kill every descendant process, except the standby and the node's checkpoint store.

        Returns the pids of the unkillable.

        SIGKILL, because a stopped rank does not take SIGTERM and a hung one need not. Ranks are in sessions
        of their own, so that process groups do not reach them; orphans come to this process (a subreaper).
        """
        until_s = time.monotonic() + KILL_DEADLINE_S
        while (alive := _descendants(self._standbys.pid)) and time.monotonic() < until_s:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            _reap()
            time.sleep(0.005)
        _reap()
        self._points.clear()
        self._regroup = None
        if self._child_pipe is not None:
            self._selector.unregister(self._child_pipe)
            os.close(self._child_pipe)
        self._child_pipe = None
        self._child_ended = True
        return [process.pid for process in alive]

    def _bring_logs(self) -> None:
        """Send the coordinator the ends of the attempt's logs, if it does not see this folder itself."""
        if self._logs_owed is not None:
            self._say(Logs(self._child_attempt, logs.ends(self._logs_owed)))
            self._logs_owed = None

    def _say(self, message: FromRunner) -> None:
        try:
            write(self._outgoing, line(message))
        except BrokenPipeError:
            self._gone = True


def _descendants(spared: int | None) -> list[psutil.Process]:
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid == spared or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.cmdline()[3:5] != STORE_WORDS:  # a rank may have started it, and copies outlive ranks
                alive.append(process)
    return alive


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _terminated(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> None:
    """Serve the coordinator at the other end of stdin and stdout."""
    # Anything printed to stdout from here on must not corrupt the messages.
    outgoing = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    incoming = os.dup(sys.stdin.fileno())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.close(null)
    # The coordinator decides when ranks end, also after Ctrl-C in its terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminated)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    runner = Runner(incoming, outgoing)
    runner.serve()


if __name__ == "__main__":
    prepare_record_types()
    main()
