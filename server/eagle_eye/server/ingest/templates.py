"""Templates by id: recently used ones in memory, the rest in the history.

Used on the event loop unless stated otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from eagle_eye.schema.frame import BadFrame
from eagle_eye.schema.rows import REQUEST_HEAD, ROW_HEAD, SIZE, decode_template, template_id
from eagle_eye.server.model.batch import ResolvedTemplate

KEPT_MAX = 32_768  # in memory, some KiB each; the history has the others

ALONE_BYTES = REQUEST_HEAD.size + SIZE.size + ROW_HEAD.size  # size of a one-row request without its numbers


class KnownTemplate:
    """A validated template.

    ``durable``: the history has it. ``used``: a row of it arrived since ``take_used``. ``admitted``: its node has been
    accepted. ``alone_bytes`` is the size of a request with one such row and nothing else; -1 if such rows are not read
    in columns.
    """

    __slots__ = (
        "admitted",
        "alone_bytes",
        "boot_id",
        "clock_base_s",
        "durable",
        "id",
        "interval_s",
        "node",
        "raw",
        "resolved",
        "used",
    )

    def __init__(self, id_: bytes, raw: bytes, resolved: ResolvedTemplate, *, durable: bool) -> None:
        self.id = id_
        self.raw = raw
        self.resolved = resolved
        self.durable = durable
        self.used = self.admitted = False
        self.node = resolved.node
        self.boot_id = resolved.hollow.boot_id
        self.interval_s = resolved.template.interval_s
        self.clock_base_s = resolved.hollow.base_s
        self.alone_bytes = -1 if resolved.layout is None else ALONE_BYTES + resolved.size


class Templates:
    """All templates that rows may reference; ``look_up`` fetches one from the history by id."""

    def __init__(self, look_up: Callable[[bytes], bytes | None], kept_max: int = KEPT_MAX) -> None:
        self._look_up = look_up
        self._kept_max = kept_max
        self._known: dict[bytes, KnownTemplate] = {}
        self._left: deque[bytes] = deque()

    def get(self, id_: bytes) -> KnownTemplate | None:
        """Return the template if it is in memory."""
        return self._known.get(id_)

    def recall(self, id_: bytes) -> KnownTemplate | None:
        """Return the template from memory or disk; None: it must be sent (again). Raises HistoryUnavailable."""
        known = self._known.get(id_)
        if known is None:
            raw = self._look_up(id_)
            try:
                known = None if raw is None else self._keep(raw, durable=True)
            except BadFrame:  # written by another server version
                return None
        return known

    def learn(self, raw: bytes) -> KnownTemplate:
        """Validate and return a template that an agent sent. Raises BadFrame."""
        return self._known.get(template_id(raw)) or self._keep(raw, durable=False)

    def take_used(self) -> list[bytes]:
        """Return the ids of templates used since the last call; from any thread."""
        found = [known for known in list(self._known.values()) if known.used]
        for known in found:
            known.used = False
        return [known.id for known in found]

    def forget(self, ids: Iterable[bytes]) -> None:
        """Mark templates as no longer in the history, after long disuse; from any thread."""
        for id_ in ids:
            known = self._known.get(id_)
            if known is not None:
                known.durable = False
                self._left.append(id_)  # removed by the next insertion: the event loop may be iterating over them now

    def expel(self, nodes: Collection[str]) -> None:
        """Have the next row of each of the nodes checked like one of a new node."""
        for known in self._known.values():
            if known.node in nodes:
                known.admitted = False

    def _keep(self, raw: bytes, *, durable: bool) -> KnownTemplate:
        self._drop_left()
        id_ = template_id(raw)
        known = self._known[id_] = KnownTemplate(id_, raw, ResolvedTemplate(*decode_template(raw)), durable=durable)
        while len(self._known) > self._kept_max:
            del self._known[next(iter(self._known))]
        return known

    def _drop_left(self) -> None:
        """Drop the templates that the history no longer has from memory, unless a row of them has arrived since."""
        while self._left:
            id_ = self._left.popleft()
            known = self._known.get(id_)
            if known is not None and not known.durable:
                del self._known[id_]
