"""``eagle-eye server``: reads the configuration, opens the files, listens, and tells systemd how it goes."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import tomli_w
import uvicorn

from eagle_eye.schema.configuration import ConfigurationError, masked
from eagle_eye.schema.service import NotifySocket, watchdog_s, why_not_listening
from eagle_eye.server import config as configuration
from eagle_eye.server import process
from eagle_eye.server.admin.data_folder import FolderLock, held, ready
from eagle_eye.server.app import create_app
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.history.embedded_history import HISTORY_FILE
from eagle_eye.server.history.settings import of_earlier_versions
from eagle_eye.server.jobs import keeper
from eagle_eye.server.parts import Services
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.sql_store import RECORDS_FILE, leadership_of, open_records
from eagle_eye.server.telemetry import logs
from eagle_eye.server.transport.connections import AcceptingServer
from eagle_eye.server.web.dispatcher import Dispatcher
from eagle_eye.server.web.frame_protocol import protocol_of, standby_protocol_of

ALIVE_RATIO = 1 / 3  # of the manager's deadline: two signs of life may be late

_log = logging.getLogger(__name__)


class ServiceManager:
    """What systemd knows of the server. What it did not take is sent again at the next ``alive``."""

    def __init__(
        self,
        environ: Mapping[str, str],
        monotonic_s: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        """``pid`` is this process's; the watchdog's deadline may be meant for another (WATCHDOG_PID)."""
        self._socket = NotifySocket(environ, _log)
        self._every_s = ALIVE_RATIO * watchdog_s(environ, os.getpid() if pid is None else pid)
        self._monotonic_s = monotonic_s
        self._alive_s = monotonic_s()
        self._unsent: tuple[str, ...] = ()

    def serving(self, url: str) -> None:
        """Requests are answered from now on: a start that was waited for has ended."""
        self._send("READY=1", f"STATUS=serving {url}")

    def alive(self) -> None:
        """The event loop runs: sent three times within the watchdog's deadline. Costs nothing where none is due."""
        if self._unsent:
            self._send(*self._unsent)
        now_s = self._monotonic_s()
        if now_s - self._alive_s >= self._every_s and self._socket.send("WATCHDOG=1"):
            self._alive_s = now_s

    def stopping(self) -> None:
        """The server was asked to end, and ends what is under way first."""
        self._send("STOPPING=1", "STATUS=stopping")

    def _send(self, *lines: str) -> None:
        self._unsent = () if self._socket.send(*lines) else lines


GRACE_S = 3  # how long requests under way may take once the server is asked to stop
SWITCH_S = 0.001  # how long the event loop may keep the writers of journal and records from the interpreter
BACKLOG = 8_192  # connections that wait to be accepted: a fleet's agents come back all at once


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to serve (default 127.0.0.1:8470)")
    parser.add_argument("--data", metavar="DIR", help="folder of the server's files")
    parser.add_argument(
        "--accept-empty",
        action="store_true",
        help="begin anew with databases that are missing or damaged; what there is of them is set aside",
    )
    parser.add_argument("--print-config", action="store_true", help="print the configuration in force and end")
    parser.add_argument(
        "--check-job-sources",
        action="store_true",
        help="ask the configured schedulers once, show what they say and end",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; 1 when the address is not to be had.

    Raises ConfigurationError; StoreUnavailable, HistoryUnavailable where the files are not to be had.
    """
    flags = {"listen": args.listen, "data_dir": args.data}
    config = configuration.load(args.config, os.environ, flags)
    if args.print_config:
        sys.stdout.write(tomli_w.dumps(masked(config)))
        return 0
    if args.check_job_sources:
        return keeper.check_job_sources(config.job_sources)
    # Until the server can do something about it, a wish for a reload is no reason to end.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # A service manager that finds us hung ends us with SIGABRT: its journal shows where the event loop stands. Of the
    # other threads nothing, for they may be running: to read their stacks then can end the process half-way through.
    faulthandler.enable(2, all_threads=False)
    raise_file_limit()
    logs.configure(config.log)
    for line in of_earlier_versions(config.history):
        logging.getLogger(__name__).warning("a setting is of earlier versions", extra={"why": line})
    for line in configuration.exposed_secrets(config):
        logging.getLogger(__name__).warning("a secret is open to all users", extra={"why": line})
    try:
        with held(Path(config.data_dir), config.listen) as hold:
            ready(hold, args.accept_empty, databases(config))
            refuse_unprotected_address(config)
            with listener(config) as bound:
                return serve(config, bound, lambda: configuration.load(args.config, os.environ, flags), hold)
    except (CannotListen, OSError) as error:
        sys.stderr.write(f"eagle-eye server: {error}\n")
        return 1


def databases(config: ServerConfig) -> tuple[str, ...]:
    """Return the names of the databases in the server's folder."""
    return (HISTORY_FILE,) if config.records.url else (RECORDS_FILE, HISTORY_FILE)


def raise_file_limit() -> None:
    """Let the process open as many files as the system allows it: each agent holds a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def refuse_unprotected_address(config: ServerConfig) -> None:
    """Return if the address is this machine's alone or a token exists; without TLS that is said in the log.

    Raises ConfigurationError.
    """
    if configuration.is_loopback(config.listen):
        return
    store = open_records(config.records, Path(config.data_dir))
    try:
        if store.any_token():
            if without := configuration.plain_text(config):
                logging.getLogger(__name__).warning("the server's address has no TLS", extra={"why": without})
            return
    finally:
        store.close()
    raise ConfigurationError(
        f"listen: {config.listen} can be reached from other machines and no token exists; make one first:"
        f" eagle-eye tokens create --scope admin --data {config.data_dir}"
    )


class CannotListen(Exception):
    """The server's address is not to be had; the message says why, who has it, and what to do."""


def listener(config: ServerConfig) -> socket.socket:
    """Return a socket bound to the address. Raises CannotListen."""
    host, port = configuration.address(config.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise CannotListen(
            f"{why_not_listening(error, host, port)}; --listen HOST:PORT takes another address"
        ) from None
    return bound


def serve(config: ServerConfig, bound: socket.socket, reread: Callable[[], ServerConfig], hold: FolderLock) -> int:
    """Serve on the socket until interrupted; SIGHUP has the configuration read anew."""
    port = bound.getsockname()[1]
    config = on_port(config, port)
    manager = ServiceManager(os.environ)

    def as_it_is_now() -> ServerConfig:
        return on_port(reread(), port)

    if not config.records.url:
        return 0 if _serve(config, bound, as_it_is_now, hold, manager, None).started else 1
    leadership = leadership_of(config.records, config.public_url)
    try:
        leadership.start()
        while True:
            server = _serve(config, bound.dup(), as_it_is_now, hold, manager, leadership)
            if server.asked_to_end or not server.started:
                return 0 if server.started else 1
            leadership.stand_by()
            config = _read_again(config, as_it_is_now)
    except KeyboardInterrupt:
        return 0  # while it was beginning to stand by or to lead
    finally:
        leadership.close()


def _read_again(config: ServerConfig, reread: Callable[[], ServerConfig]) -> ServerConfig:
    """Return the configuration as it is now, where it can be: it may have changed since a standby began."""
    try:
        return reread()
    except ConfigurationError as error:
        said = {"error": str(error)}
        logging.getLogger(__name__).warning("the configuration is refused, the one before stays", extra=said)
        return config


def _serve(
    config: ServerConfig,
    bound: socket.socket,
    reread: Callable[[], ServerConfig],
    hold: FolderLock,
    manager: ServiceManager,
    leadership: Leadership | None,
) -> _Server:
    """Serve until interrupted, or, with ``leadership``, until this server begins or ceases to lead."""
    dispatcher = create_app(config, reread=reread, leadership=leadership)
    hold.write_owner(config.listen, databases(config))
    server = _Server(dispatcher, bound, manager, config.public_url, leadership)
    signal.signal(signal.SIGHUP, lambda *_: dispatcher.reload())
    # A stop by the service manager is as orderly as one by the keyboard: uvicorn handles both while it serves
    # and raises the signal again once it has stopped, which _Server.run takes for what it is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger(__name__).info(
        "serving %s",
        config.public_url,
        extra={
            "data_dir": config.data_dir,
            "policy_mode": config.policy.mode,
            **({} if leadership is None else {"part": "standby" if dispatcher.forwarding else "leader"}),
        },
    )
    sys.setswitchinterval(SWITCH_S)
    process.keep_heap_blocks()
    process.collect_seldom()
    server.run()
    return server


def on_port(config: ServerConfig, found: int) -> ServerConfig:
    """Return the configuration with the port that was found, also in ``public_url``, where it asks for port 0."""
    host, port = configuration.address(config.listen)
    if port != 0:
        return config
    public_url = config.public_url
    if public_url.partition("://")[2] == config.listen:
        public_url = f"{public_url.removesuffix(':0')}:{found}"
    listen = f"[{host}]:{found}" if ":" in host else f"{host}:{found}"
    return msgspec.structs.replace(config, listen=listen, public_url=public_url)


def connection_options(dispatcher: Dispatcher[Services]) -> dict[str, Any]:
    """Return uvicorn's settings for new connections."""
    protocol = (standby_protocol_of if dispatcher.forwarding else protocol_of)(dispatcher.taker)
    certificates = dispatcher.services.certificates
    if certificates is None:
        return {"http": protocol, "ws": "none"}
    return {"http": protocol, "ws": "none", "ssl_context_factory": lambda *_: certificates.context}


class _Server(AcceptingServer):
    def __init__(
        self,
        dispatcher: Dispatcher[Services],
        bound: socket.socket,
        manager: ServiceManager,
        url: str,
        leadership: Leadership | None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                dispatcher,
                log_config=None,
                access_log=False,
                server_header=False,
                **connection_options(dispatcher),
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=65,  # longer than the agents' interval: they keep their connection
            ),
            bound,
            dispatcher.connections,
        )
        self._dispatcher = dispatcher
        self._manager = manager
        self._url = url
        self._leadership = leadership
        self.asked_to_end = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so."""
        await super().startup(sockets)
        if self.started:
            self._manager.serving(self._url)

    async def on_tick(self, counter: int) -> bool:
        """Give a sign of life from the event loop; return whether to end."""
        # Not by callback_notify of uvicorn's, which goes by the wall clock: set back, it would be silent.
        self._manager.alive()
        if self._leadership is not None:
            if self._leadership.leads is (self._dispatcher.forwarding is not None):
                self._dispatcher.stop()
                return True
            self._leadership.alive()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let event streams go first, which would never end by themselves."""
        self.asked_to_end = True
        self._manager.stopping()
        if self._leadership is not None:
            self._leadership.hand_over()
        self._dispatcher.stop()
        super().handle_exit(sig, frame)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal; SIGTERM and SIGINT both mean a stop that was wished for."""
        try:
            super().run(sockets)
        except KeyboardInterrupt:
            # uvicorn raises the signal again once it has stopped in good order.
            return
