"""The launcher's runner on a node: keeps torch imported, runs attempts, kills them; exits with its coordinator.

Reads messages from stdin and writes them to stdout. Whatever happens to the coordinator or to the connection,
no rank outlives it for long: stdin's end, or silence longer than the lease, kills them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil

from eagle_eye.orchestrators.launch import logs
from eagle_eye.orchestrators.launch.attempt_process import become_attempt
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
from eagle_eye.orchestrators.launch.points import RestartPoints
from eagle_eye.orchestrators.launch.prepare import Checked, check_node, end_leftovers
from eagle_eye.orchestrators.launch.rank_sight import look_at_ranks, reaches
from eagle_eye.orchestrators.launch.standbys import StandbyKeeper
from eagle_eye.orchestrators.launch.store_keeper import StoreKeeper
from eagle_eye.schema.memory_steps import STORE_WORDS, read_steps, store_folder
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.schema.restart_names import SOCKET_VARIABLE
from eagle_eye.schema.restart_point import AtPoint, GoOn

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
