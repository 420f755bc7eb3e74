"""Persists each device's last error code across restarts, to report changes in between but no old codes.

Codes become durable after their event: after a crash an event may be repeated but is never lost. Touches: store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import LastCodes, Watched
from eagle_eye.server.store.store import LAST_CODES, Change, Store

_log = logging.getLogger(__name__)


class CodeMemory:
    """The devices of all nodes, as stored or about to be; ``failed`` is called when they cannot be written.

    Raises StoreUnavailable when the store cannot be read. For the event loop.
    """

    def __init__(self, store: Store, failed: Callable[[], None]) -> None:
        self._store = store
        self._failed = failed
        self._nodes = {record.node: record.devices for record in store.all(LAST_CODES)}
        self._unwritten: set[str] = set()

    def of(self, node: str) -> Mapping[int, Watched]:
        """Return the node's devices as last known."""
        return self._nodes.get(node, {})

    def take(self, node: str, devices: Mapping[int, Watched]) -> None:
        """Have these devices of the node written by the next ``keep``."""
        if devices:
            self._nodes[node] = {**self.of(node), **devices}
            self._unwritten.add(node)

    def forget(self, nodes: Collection[str]) -> None:
        """Forget the nodes' devices; the store has deleted them already."""
        for node in nodes:
            self._nodes.pop(node, None)
        self._unwritten.difference_update(nodes)

    async def keep(self) -> None:
        """Return once what was taken is durable; if the store fails, the next call retries."""
        names, self._unwritten = self._unwritten, set()
        if not names:
            return
        records = tuple(LastCodes(node=name, devices=dict(self._nodes[name])) for name in sorted(names))
        try:
            await asyncio.to_thread(self._store.commit, Change(last_codes=records))
        except StoreUnavailable:
            self._unwritten |= names
            self._failed()
            _log.warning("devices' last error codes could not be written down; the next samples try again")
