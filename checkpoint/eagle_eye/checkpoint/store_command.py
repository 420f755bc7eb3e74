"""``eagle-eye checkpoint store``: the process that owns a node's copies."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_eye.checkpoint.sizes import size_bytes
from eagle_eye.schema.memory_steps import store_folder

if TYPE_CHECKING:
    from eagle_eye.checkpoint.store import Store

_log = logging.getLogger(__name__)

NAME = "store"
HELP = "own this node's copies of checkpoints in shared memory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    node = os.environ.get("EAGLE_EYE_NODE") or socket.gethostname()
    parser.add_argument("--folder", type=Path, default=None, metavar="DIR", help="in shared memory (the user's own)")
    parser.add_argument("--node", default=node, metavar="NAME", help=f"this node ({node})")
    parser.add_argument(
        "--listen", default="0.0.0.0:0", metavar="HOST:PORT", help="for other nodes (0.0.0.0:0: any port)"
    )
    parser.add_argument("--free-after", type=float, default=3600.0, metavar="S", help="without ranks (3600)")
    parser.add_argument(
        "--persist-rate", default=None, metavar="SIZE", help="most bytes a second to storage (no limit)"
    )
    parser.add_argument(
        "--copy-rate", default=None, metavar="SIZE", help="most bytes a second to other nodes (no limit)"
    )
    parser.add_argument(
        "--copy-at-once", action="store_true", help="do not wait until training leaves the network idle"
    )
    parser.add_argument("--exit-when-idle", type=float, default=None, metavar="S", help="without any job (never)")
    parser.add_argument("--scrub-every", type=float, default=600.0, metavar="S", help="verify all copies (600)")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Copies stay."""
    from eagle_eye.checkpoint.store import LOCK, Store, StoreSettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    host, port = _address(args.listen)
    settings = StoreSettings(
        folder=args.folder or store_folder(args.node),
        node=args.node,
        listen=(host, port),
        free_after_s=args.free_after,
        persist_bytes_per_s=float(size_bytes(args.persist_rate)) if args.persist_rate else None,
        copy_bytes_per_s=float(size_bytes(args.copy_rate)) if args.copy_rate else None,
        paced=not args.copy_at_once,
        scrub_every_s=args.scrub_every,
        exit_when_idle_s=args.exit_when_idle,
    )
    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"a store serves {settings.folder} already", file=sys.stderr)
            return 0
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return asyncio.run(_serve(Store(settings)))


async def _serve(store: Store) -> int:
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(store.run(lambda: _log.info("listening on %s", store.address)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return 0
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if port == "0" and host:
        return host, 0
    from eagle_eye.checkpoint.connection import address_of

    return address_of(text)
