"""Requests that another server answers: from a standby to the leader, and from a cell to the others.

Touches: the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

import httpx
import msgspec

from eagle_eye.schema.problem import CELL_LEADER_HEADER, LEADER_HEADER, STANDBY_HEADER, WITHOUT_CELLS_HEADER
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.security.auth import CERTIFICATE_NAMES
from eagle_eye.server.security.settings import TlsSettings
from eagle_eye.server.store.store import ACTIONS, EVIDENCE, INCIDENTS, Store
from eagle_eye.server.transport.raw_http import FORWARDED, OF_ONE_CELL, ASGIMessage, Receive, Send, server_client

UNREACHED_NODES_MAX = 131_072  # beyond it the oldest are forgotten


class UnreachedNodes:
    """The nodes whose frames a standby could not pass on, for it did not reach the leader.

    Noted on the event loop, counted from any thread.
    """

    def __init__(self, within_s: float, monotonic_s: Callable[[], float]) -> None:
        """A node counts for ``within_s`` after it has asked."""
        self._within_s = within_s
        self._monotonic_s = monotonic_s
        self._asked_s: dict[str, float] = {}  # the latest last

    def record_node(self, node: str) -> None:
        """Note that the node's agent has asked in vain."""
        self._asked_s.pop(node, None)
        if len(self._asked_s) >= UNREACHED_NODES_MAX:
            del self._asked_s[next(iter(self._asked_s))]
        self._asked_s[node] = self._monotonic_s()

    def count(self) -> int:
        """Return how many nodes have asked in vain lately."""
        since_s = self._monotonic_s() - self._within_s
        return sum(asked_s >= since_s for asked_s in tuple(self._asked_s.values()))


_LEADER = LEADER_HEADER.lower().encode()
# Of one connection alone (RFC 9110, section 7.6.1), or set anew by who answers.
_OF_A_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"date", b"server", _LEADER),
    }
)


class LeaderUnreached(Exception):
    """The leader gave no answer, and nothing was sent to the client; the text says why."""


class Forwarding:
    """Answers with what the leader answers. ``leader()`` is its URL, "" where there is none."""

    def __init__(
        self,
        leader: Callable[[], str],
        tls: TlsSettings,
        unreached: UnreachedNodes,
        to: httpx.AsyncClient | None = None,
    ) -> None:
        """``tls`` says whether every client must show the servers a certificate of its own."""
        self.unreached = unreached
        self._leader = leader
        self._certificates_needed = bool(tls.client_ca_file) and tls.client_certificates == "all"
        self._client = to or server_client()
        self._open: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def leader(self) -> str:
        """The leader's URL, "" where there is none."""
        return self._leader()

    async def answer(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Send the request on and answer it, with the leader's name. Raises LeaderUnreached."""
        await self.answer_of(self._leader(), scope, receive, send)

    async def answer_of(
        self, leader: str, scope: ASGIMessage, receive: Receive, send: Send, mark: bytes = FORWARDED
    ) -> None:
        """Send the request on to a server, "" for none, and answer it, with its name. Raises LeaderUnreached.

        What has the ``mark`` already goes no further.
        """
        self._loop = asyncio.get_running_loop()
        request = self._request(leader, scope, receive, mark)
        asking = asyncio.create_task(self._asked(leader, request))
        self._open.add(asking)
        try:
            await asyncio.wait({asking})
        finally:
            self._open.discard(asking)
            asking.cancel()
        if asking.cancelled():
            raise LeaderUnreached("this server no longer stands by")
        response = asking.result()
        passing = asyncio.create_task(_pass_on(response, leader, send))
        gone = asyncio.create_task(_end_of(receive))
        self._open.add(passing)
        try:
            await asyncio.wait({passing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.discard(passing)
            for task in (passing, gone):
                task.cancel()
            # A leader that breaks off has the client's connection closed: its answer is not whole.
            await asyncio.gather(passing, gone, return_exceptions=True)
            await response.aclose()

    def stop(self) -> None:
        """End the requests that are under way, answered or not; may be called from any thread or a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._open])

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    def _request(self, leader: str, scope: ASGIMessage, receive: Receive, mark: bytes) -> httpx.Request:
        named = {name for name, _ in scope["headers"]}
        if not leader:
            raise LeaderUnreached("nobody leads at present")
        if mark in named:
            raise LeaderUnreached("another server took this one for the leader")
        if self._certificates_needed or scope.get("state", {}).get(CERTIFICATE_NAMES):
            raise LeaderUnreached("a client's certificate counts on its own connection only")
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [one for one in scope["headers"] if one[0] not in _OF_A_CONNECTION and one[0] != FORWARDED]
        has_body = b"content-length" in named or b"transfer-encoding" in named
        return httpx.Request(
            scope["method"],
            httpx.URL(leader).copy_with(raw_path=scope["raw_path"] + query),
            headers=[*headers, (mark, b"1")],
            content=_body(receive) if has_body else None,
        )

    async def _asked(self, leader: str, request: httpx.Request) -> httpx.Response:
        try:
            return await self._client.send(request, stream=True)
        except (httpx.HTTPError, OSError) as error:
            # Only the type of error: its text may contain an address.
            raise LeaderUnreached(f"{leader} leads and cannot be reached ({type(error).__name__})") from error


async def _pass_on(response: httpx.Response, leader: str, send: Send) -> None:
    headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _OF_A_CONNECTION]
    other = response.headers.get(CELL_LEADER_HEADER)  # of another cell, which judges the node's job
    headers.append((_LEADER, (other or leader).encode("latin-1", "replace")))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for chunk in response.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise OSError("the client left before its request was whole")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _end_of(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# One answer for all cells, from whichever server is asked: records are common, what is live is one cell's. Who asks
# about one job, incident, action or node is answered by the cell that judges the job or hears the node. A list is this
# server's, in which what other cells see of its jobs and nodes is put in; ``cell`` says whose each one is. A cell that
# does not answer is named in the answer's head (WITHOUT_CELLS_HEADER), and what it alone knows is missing.

API_PATH = "/api/v1/"
CELL_ANSWER_S = 5.0  # how long another cell may take
BY_JOB, BY_NODE = "jobs", "nodes"
_JOINT_KINDS = ("incidents", "actions", "evidence")
_ACCOUNTS = ("goodput", "ledger")
_UNHEARD = frozenset({"silent", "unheard"})  # standings of a node that another cell may hear

Answer = dict[str, Any]


class Asked(NamedTuple):
    """What is asked for: the collection, the one in it ("" for the list), and the query."""

    collection: str
    one: str
    query: Mapping[str, Sequence[str]]
    whole: bool = True  # the list or the record itself, not a part of it


def asked(scope: ASGIMessage) -> Asked | None:
    """Return what a request asks for, None for what has nothing to do with cells."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    parts = path.decode("ascii", "replace").split("/")
    if not scope["path"].startswith(API_PATH) or len(parts) < 4:
        return None
    query = parse_qs(scope["query_string"].decode("ascii", "replace"))
    one = unquote(parts[4]) if len(parts) > 4 else ""
    if parts[3] == "query_range":
        for name, of in (("job", BY_JOB), ("node", BY_NODE)):
            if name in query:
                return Asked(of, query[name][0], query, whole=False)
        return None
    if parts[3] == "fleet":
        return Asked("fleet", one, query, whole=one in ("", "nodes"))
    if parts[3] in _ACCOUNTS:
        return None if one else Asked(parts[3], "", query)
    if parts[3] not in (BY_JOB, BY_NODE, *_JOINT_KINDS) or (parts[3], one) == (BY_NODE, "forget"):
        return None
    return Asked(parts[3], one, query, whole=len(parts) <= 5 and parts[3] != "evidence")


class JointAnswers:
    """Knows which cell answers, and joins what several say."""

    def __init__(self, cells: Cells, store: Store, tls: TlsSettings) -> None:
        self._cells = cells
        self._store = store
        self._forwarding = Forwarding(lambda: "", tls, UnreachedNodes(0.0, lambda: 0.0))
        self._client = server_client(CELL_ANSWER_S)

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()
        await self._forwarding.close()

    def concerned(self, scope: ASGIMessage) -> Asked | None:
        """Return what is asked for where other cells have a part in the answer, else None."""
        if not self._cells.several or any(name == OF_ONE_CELL for name, _ in scope["headers"]):
            return None
        what = asked(scope)
        reads = scope["method"] in ("GET", "HEAD")
        return what if what is not None and (reads or (what.collection == BY_NODE and what.one)) else None

    async def forward(self, cell: str, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer with the answer of the cell's leader. Raises LeaderUnreached."""
        await self._forwarding.answer_of(self._cells.url_of(cell), scope, receive, send, OF_ONE_CELL)

    async def other_cell(self, what: Asked, scope: ASGIMessage) -> str:
        """Return the cell that answers for one job, node or record; "" for this one."""
        if not what.one or what.collection == "fleet":
            return ""
        if what.collection == BY_NODE:
            return await self._cell_of_node(what.one, scope)
        job = what.one
        if what.collection != BY_JOB:
            job = await asyncio.to_thread(self._job_of, what)
            if not job:
                return ""
        cell = self._cells.cell_of(job)
        return "" if cell == self._cells.own else cell

    async def joined(self, what: Asked, scope: ASGIMessage, mine: bytes) -> tuple[bytes, dict[str, str]]:
        """Return this server's answer with what the other cells say, and the heads that it gets for that."""
        answer: Answer = msgspec.json.decode(mine)
        if what.collection in ("incidents", "actions", *_ACCOUNTS):
            self._mark(answer)
            return msgspec.json.encode(answer), {}
        theirs, silent = await self._of_others(scope)
        if what.collection == "fleet":
            if what.one:
                _join_map(answer, theirs)
                _mark_map(answer, {self._cells.own: msgspec.json.decode(mine), **theirs})
            else:
                _join_fleet(answer, theirs)
                self._mark(answer, "jobs")
        else:
            _join_items(answer, theirs, "node" if what.collection == BY_NODE else "job", self._cells)
        wanted = what.query.get("cell")
        for name in ("items", "jobs"):
            if wanted and what.one == "" and isinstance(answer.get(name), list):
                answer[name] = [one for one in answer[name] if one.get("cell") == wanted[0]]
        heads = {WITHOUT_CELLS_HEADER: ", ".join(silent)} if silent else {}
        return msgspec.json.encode(answer), heads

    def _mark(self, answer: Answer, name: str = "items") -> None:
        """Say of each item which cell judges its job."""
        items = answer.get(name, [answer])
        for item in items:
            if isinstance(item, dict) and "job" in item:
                item["cell"] = self._cells.cell_of(item["job"])

    def _job_of(self, what: Asked) -> str:
        """Return the job of an incident, an action or a request for evidence, "" for none."""
        if what.collection == "incidents":
            incident = self._store.get(INCIDENTS, what.one)
            return "" if incident is None else incident.job
        if what.collection == "actions":
            action = self._store.get(ACTIONS, what.one)
            return "" if action is None else action.job
        evidence = self._store.get(EVIDENCE, what.one)
        return "" if evidence is None else evidence.job

    async def _cell_of_node(self, node: str, scope: ASGIMessage) -> str:
        if self._cells.hears(node):
            return ""
        path = f"{API_PATH}nodes/{httpx.URL('/').copy_with(path='/' + node).raw_path.decode()[1:].replace('/', '%2F')}"
        theirs, _ = await self._of_others({**scope, "raw_path": path.encode(), "query_string": b"", "method": "GET"})
        return next((cell for cell, said in theirs.items() if said.get("agent")), "")

    async def _of_others(self, scope: ASGIMessage) -> tuple[dict[str, Answer], list[str]]:
        """Return what the leaders of the other cells answer to the request, and the cells without an answer."""
        others = {name: one.url for name, one in self._cells.living().items() if name != self._cells.own}
        said = await asyncio.gather(*(self._ask(url, scope) for url in others.values()))
        found = {name: answer for name, answer in zip(others, said, strict=True) if answer is not None}
        return found, sorted(self._cells.all().keys() - found.keys() - {self._cells.own})

    async def _ask(self, url: str, scope: ASGIMessage) -> Answer | None:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        # Of the headers only who asks: the answer is not passed on as it is.
        headers = [one for one in scope["headers"] if one[0] in (b"authorization", b"cookie") or one[0][:2] == b"x-"]
        target = httpx.URL(url).copy_with(raw_path=scope["raw_path"] + query)
        try:
            answer = await self._client.get(target, headers=[*headers, (OF_ONE_CELL, b"1")])
        except (httpx.HTTPError, OSError):
            return None
        if answer.status_code != 200 or STANDBY_HEADER in answer.headers:
            return None
        decoded: Answer = answer.json()
        return decoded


def _join_items(answer: Answer, theirs: Mapping[str, Answer], key: str, cells: Cells) -> None:
    """Put into the items what other cells see of them; jobs that only their agents speak of are added."""
    live = "agent" if key == "node" else "progress"
    items = {item[key]: item for item in answer["items"]} if "items" in answer else {answer[key]: answer}
    for item in items.values():
        item["cell"] = cells.own if item[live] else None
    for cell, said in theirs.items():
        for item in said.get("items", ()):
            mine = items.get(item[key])
            if mine is None and item.get("state") == "observed":
                items[item[key]] = {**item, "cell": cell}
            elif mine is not None and item[live] and not mine[live]:
                mine.update({**item, "cell": cell})
    if key == "job":
        for item in items.values():
            item["cell"] = cells.cell_of(item["job"])
    if "items" in answer:
        answer["items"] = list(items.values())


def _join_fleet(answer: Answer, theirs: Mapping[str, Answer]) -> None:
    """Add the jobs and nodes of other cells to the overview."""
    jobs = {job["job"]: job for said in theirs.values() for job in said["jobs"]}
    jobs.update({job["job"]: job for job in answer["jobs"]})
    answer["jobs"] = sorted(jobs.values(), key=lambda job: job["progressed"] or job["started"])
    for name in ("jobs_left_out", "nodes_heard", "nodes_recent"):
        answer[name] += sum(said[name] for said in theirs.values())
    answer["nodes"] = max([answer["nodes"], *(said["nodes"] for said in theirs.values())])
    answer["nodes_recent"] = min(answer["nodes_recent"], answer["nodes"])


def _join_map(answer: Answer, theirs: Mapping[str, Answer]) -> None:
    """Put into the map how nodes stand that other cells hear, and their jobs."""
    at = {node: index for index, node in enumerate(answer["nodes"])}
    job_at = {job: index for index, job in enumerate(answer["jobs"])}
    unheard = {index for index, name in enumerate(answer["standings"]) if name in _UNHEARD}
    for said in theirs.values():
        for index, node in enumerate(said["nodes"]):
            place = at.get(node)
            if place is None or said["standing"][index] in unheard:
                continue
            if answer["standing"][place] in unheard:
                answer["standing"][place] = said["standing"][index]
            job = said["job"][index]
            if job >= 0:
                answer["job"][place] = job_at.setdefault(said["jobs"][job], len(job_at))
    answer["jobs"] = list(job_at)


def _mark_map(answer: Answer, said_by: Mapping[str, Answer]) -> None:
    """Say of each node when it was heard last and by which cell, where the map has such details; -1: by none."""
    if answer["heard"] is None:
        return
    heard: dict[str, tuple[str, str]] = {}
    for cell, said in said_by.items():
        for node, time in zip(said["nodes"], said["heard"] or (), strict=False):
            if time is not None:
                heard[node] = max(heard.get(node, ("", "")), (time, cell))
    cells = sorted(said_by)
    answer["cells"] = cells
    answer["cell"] = [cells.index(heard[node][1]) if node in heard else -1 for node in answer["nodes"]]
    answer["heard"] = [heard[node][0] if node in heard else None for node in answer["nodes"]]
