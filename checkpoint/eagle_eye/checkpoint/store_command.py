"""``eagle-eye checkpoint store``: the process that owns a node's copies."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import math
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_eye.checkpoint.sizes import size_bytes
from eagle_eye.checkpoint.status_command import shown
from eagle_eye.schema.checkpoint_files import COPY_RATE_VARIABLE, store_folder
from eagle_eye.schema.names import is_name
from eagle_eye.schema.service import NotifySocket

if TYPE_CHECKING:
    from eagle_eye.checkpoint.store import CheckpointStore, StoreSettings

_log = logging.getLogger(__name__)

SECONDS_MAX, PORT_MAX = 1e8, 65535
NAME = "store"
HELP = "own this node's copies of checkpoints in shared memory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    node = os.environ.get("EAGLE_EYE_NODE") or socket.gethostname()
    parser.add_argument("--folder", type=Path, default=None, metavar="DIR", help="in shared memory (the user's own)")
    parser.add_argument("--node", type=_node, default=node, metavar="NAME", help=f"this node ({node})")
    parser.add_argument(
        "--listen",
        type=_address,
        default="0.0.0.0:0",
        metavar="HOST:PORT",
        help="for other nodes (0.0.0.0:0: any port)",
    )
    parser.add_argument("--free-after", type=_seconds, default=3600.0, metavar="S", help="without ranks (3600)")
    parser.add_argument(
        "--persist-rate", type=_rate, default=None, metavar="SIZE", help="most bytes a second to storage (no limit)"
    )
    parser.add_argument(
        "--copy-rate",
        type=_rate,
        default=os.environ.get(COPY_RATE_VARIABLE),
        metavar="SIZE",
        help=f"most bytes a second to other nodes ({COPY_RATE_VARIABLE}, else no limit)",
    )
    parser.add_argument(
        "--copy-at-once", action="store_true", help="do not wait until training leaves the network idle"
    )
    parser.add_argument("--exit-when-idle", type=_seconds, default=None, metavar="S", help="without any job (never)")
    parser.add_argument("--scrub-every", type=_seconds, default=600.0, metavar="S", help="verify all copies (600)")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Copies stay."""
    from eagle_eye.checkpoint.store import StoreSettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    settings = StoreSettings(
        folder=args.folder or store_folder(args.node),
        node=args.node,
        listen=args.listen,
        free_after_s=args.free_after,
        persist_bytes_per_s=args.persist_rate,
        copy_bytes_per_s=args.copy_rate,
        paced=not args.copy_at_once,
        scrub_every_s=args.scrub_every,
        exit_when_idle_s=args.exit_when_idle,
    )
    try:
        return _own(settings)
    except OSError as error:
        print(f"the store cannot serve {shown(settings.folder)}: {error.strerror or error}", file=sys.stderr)
        return 1


def _own(settings: StoreSettings) -> int:
    """Serve the folder, unless another store does. Raises OSError."""
    from eagle_eye.checkpoint.store import LOCK, CheckpointStore

    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"a store serves {shown(settings.folder)} already", file=sys.stderr)
            return 0
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return asyncio.run(_serve(CheckpointStore(settings)))


async def _serve(store: CheckpointStore) -> int:
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(store.run(lambda: _say_ready(store.address)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return 0
    return 0


def _say_ready(address: str) -> None:
    """Log the address, and notify systemd that ranks can connect, where it waits for that."""
    _log.info("listening on %s", address)
    NotifySocket(os.environ, _log).send("READY=1")


def _address(text: str) -> tuple[str, int]:
    """Return host and port; port 0 is any."""
    host, _, port = text.rpartition(":")
    if not is_name(host) or not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, port 0 for any, got {text[:80]!r}")
    return host.strip("[]"), int(port)


def _node(text: str) -> str:
    """Return the name, which is a folder's as well."""
    if not is_name(text) or "/" in text or text in {".", ".."}:
        raise argparse.ArgumentTypeError(f"expected a node's name, got {text[:80]!r}")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"expected seconds, more than 0 and at most {SECONDS_MAX:g}, got {text[:80]!r}"
        )
    return seconds


def _rate(text: str) -> float:
    try:
        rate = size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if rate < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 byte a second, got {text[:80]!r}")
    return float(rate)
