"""The Kubernetes job source: lists and watches pods, and cordoned nodes. Touches the network.

A silent watch proves nothing: the source counts as heard when an event or bookmark arrives, about every minute. When a
fault needs its report the pods are listed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import httpx
import msgspec

from eagle_eye.server.jobs.pods import KubernetesNode, Metadata, Pod, jobs_of, node_of
from eagle_eye.server.jobs.slurm import read_token, trusting
from eagle_eye.server.jobs.source import JOBS_MAX, KubernetesSettings, Snapshot, SourceFailed
from eagle_eye.server.model.clock import Clock

# The API client: lists objects of one kind in pages, then watches them. Touches the network and two files.
#
# Not the official client that the orchestrators use: that one is synchronous, holds a watch in a thread that cannot be
# cancelled, and reads bodies without a limit; and a server would install 30 MB for two endpoints.

PAGE = 500  # objects per page
PAGE_BYTES_MAX = 64 << 20
LINE_BYTES_MAX = 4 << 20  # of one event: etcd takes objects of 1.5 MB
PAGES_MAX = 2_000
KEY = "job_sources.kubernetes"

ObjectT = TypeVar("ObjectT", Pod, KubernetesNode)


class Expired(Exception):
    """The resource version to watch from is too old: list again (410)."""


class WatchEvent(NamedTuple, Generic[ObjectT]):
    """A watch event: ``kind`` ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    item: ObjectT


class Listed(NamedTuple, Generic[ObjectT]):
    """All objects, and the resource version to watch from."""

    items: list[ObjectT]
    version: str


class _ListMetadata(msgspec.Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: str = ""
    more: str = ""


class _Status(msgspec.Struct):
    code: int = 0


class KubeApi:
    """The API server, as one connection pool."""

    def __init__(self, settings: KubernetesSettings, environ: Mapping[str, str]) -> None:
        """Create the client. Raises SourceFailed if the API server's address is unknown."""
        self._settings = settings
        url = _url(settings, environ)
        self._client = httpx.AsyncClient(
            base_url=url,
            verify=trusting(settings.ca_file, f"{KEY}.ca_file") if url.startswith("https://") else False,
            trust_env=False,
            timeout=httpx.Timeout(settings.timeout_s),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def list(self, path: str, selector: str, kind: type[ObjectT]) -> Listed[ObjectT]:
        """Return all objects at the path, page by page. Raises SourceFailed."""
        shape = msgspec.defstruct("Page", [("items", list[kind]), ("metadata", _ListMetadata)])  # type: ignore[valid-type]
        decoder = msgspec.json.Decoder(shape)
        items: list[ObjectT] = []
        more = ""
        for _ in range(PAGES_MAX):
            query = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
            body = await self._get(path, {**query, **({"continue": more} if more else {})})
            try:
                page: Any = await asyncio.to_thread(decoder.decode, body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise SourceFailed("malformed", f"GET {path}: {str(error)[:200]}") from None
            items += page.items
            more = page.metadata.more
            if len(items) > JOBS_MAX:
                raise SourceFailed("oversized", f"GET {path}: more than {JOBS_MAX} objects; set {KEY}.label_selector")
            if not more:
                return Listed(items, page.metadata.resource_version)
        raise SourceFailed("oversized", f"GET {path}: more than {PAGES_MAX} pages")

    async def watch(
        self, path: str, selector: str, version: str, kind: type[ObjectT], seconds: float
    ) -> AsyncGenerator[WatchEvent[ObjectT], None]:
        """Yield changes after the version, for at most ``seconds``. Raises SourceFailed, Expired."""
        shape = msgspec.defstruct("Event", [("type", str), ("object", msgspec.Raw)])
        events, objects = msgspec.json.Decoder(shape), msgspec.json.Decoder(kind)
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(seconds)),
            **({"labelSelector": selector} if selector else {}),
        }
        # The API server sends nothing while nothing happens; it ends the watch itself.
        timeout = httpx.Timeout(self._settings.timeout_s, read=seconds + self._settings.timeout_s)
        try:
            async with self._client.stream("GET", path, params=query, headers=self._headers(), timeout=timeout) as said:
                if said.status_code == 410:
                    raise Expired
                _refuse(said.status_code, path)
                async for line in _lines(said.aiter_bytes()):
                    event: Any = events.decode(line)
                    if event.type == "ERROR":
                        if msgspec.json.decode(event.object, type=_Status).code == 410:
                            raise Expired
                        raise SourceFailed("status", f"watching {path}: the API server says {line[:200]!r}")
                    yield WatchEvent(event.type, objects.decode(event.object))
        except (TimeoutError, httpx.HTTPError) as error:
            raise SourceFailed("missing", f"watching {path}: {type(error).__name__}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SourceFailed("malformed", f"watching {path}: {str(error)[:200]}") from None

    async def _get(self, path: str, query: Mapping[str, str]) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async with (
                asyncio.timeout(self._settings.timeout_s),
                self._client.stream("GET", path, params=dict(query), headers=self._headers()) as response,
            ):
                _refuse(response.status_code, path)
                async for part in response.aiter_bytes():
                    size += len(part)
                    if size > PAGE_BYTES_MAX:
                        raise SourceFailed("oversized", f"GET {path}: an answer of more than {PAGE_BYTES_MAX} bytes")
                    parts.append(part)
        except (TimeoutError, httpx.TimeoutException):
            limit = f"{self._settings.timeout_s:g} s ({KEY}.timeout_s)"
            raise SourceFailed("timeout", f"GET {path}: no answer within {limit}") from None
        except httpx.HTTPError as error:
            raise SourceFailed("missing", f"GET {path}: {type(error).__name__}") from None
        return b"".join(parts)

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "application/json"}
        if self._settings.token_file:  # read each time: the kubelet renews it
            headers["authorization"] = f"Bearer {read_token(self._settings.token_file, f'{KEY}.token_file')}"
        return headers


def object_key(metadata: Metadata) -> str:
    """Return a key that is unique among objects of a kind, even for one recreated under the same name."""
    return metadata.uid or f"{metadata.namespace}/{metadata.name}"


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, however it is chunked. Raises SourceFailed for a line that is too long."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(rest) > LINE_BYTES_MAX:
            raise SourceFailed("oversized", f"an event of more than {LINE_BYTES_MAX} bytes")


def _refuse(status: int, path: str) -> None:
    if status in (401, 403):
        remedy = f"look at {KEY}.token_file and the service account's rights to list and watch"
        raise SourceFailed("unauthorised", f"GET {path}: the API server answers {status}; {remedy}")
    if status != 200:
        raise SourceFailed("status", f"GET {path}: the API server answers {status}")


def _url(settings: KubernetesSettings, environ: Mapping[str, str]) -> str:
    if settings.url:
        return settings.url.rstrip("/")
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        remedy = f"set {KEY}.url: KUBERNETES_SERVICE_HOST is not set, so this is no pod"
        raise SourceFailed("missing", f"nothing says where the API server is; {remedy}")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


# The source.

GATHER_S = 0.5  # a job's pods change one after the other: reported together
LISTS_S = 2.0  # minimum time between two lists
WATCHES_S = 1.0  # minimum time between two watches, in case the API server or a proxy ends each at once


class Kubernetes:
    """The job source that queries Kubernetes' API server."""

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings, clock: Clock, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._clock = clock
        self._environ = environ

    @property
    def patience_s(self) -> float:
        """Duration of one watch plus the time to start another."""
        return self._settings.watch_s + 2 * self._settings.timeout_s

    async def snapshots(self, sooner: asyncio.Event) -> AsyncGenerator[Snapshot, None]:
        """Yield all jobs whenever one changes, and when ``sooner`` is set. Raises SourceFailed."""
        api = KubeApi(self._settings, self._environ)
        news = asyncio.Event()
        pods = [Reflection(api, path, self._selector(), Pod, self._clock, news) for path in self._paths()]
        nodes = Reflection(api, "/api/v1/nodes", "", KubernetesNode, self._clock, news)
        watched: list[Reflection[Pod] | Reflection[KubernetesNode]] = [*pods]
        if self._settings.nodes:
            watched.append(nodes)
        tasks: list[asyncio.Task[None]] = []
        try:
            for one in watched:
                await one.list()
            tasks = [asyncio.create_task(one.follow(self._settings.watch_s)) for one in watched]
            while True:
                sooner.clear()
                news.clear()
                yield self._snapshot(pods, nodes if self._settings.nodes else None)
                await _first(tasks, news, sooner)
                if sooner.is_set():
                    for one in pods:
                        await one.list_again(LISTS_S)
                else:
                    await asyncio.sleep(GATHER_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await api.close()

    def _snapshot(self, pods: list[Reflection[Pod]], nodes: Reflection[KubernetesNode] | None) -> Snapshot:
        left_out: Counter[str] = Counter()
        there = [pod for one in pods for pod in one.items.values()]
        jobs = jobs_of(there, self._settings, left_out)
        seen = None if nodes is None else tuple(node_of(node) for node in nodes.items.values())
        return Snapshot(min(one.heard_s for one in pods), jobs, seen, dict(left_out))

    def _paths(self) -> list[str]:
        spaces = self._settings.namespaces
        return [f"/api/v1/namespaces/{space}/pods" for space in spaces] or ["/api/v1/pods"]

    def _selector(self) -> str:
        return self._settings.label_selector


class Reflection(Generic[ObjectT]):
    """A local copy of the objects at one path. It is current up to ``heard_s``, by the server's clock."""

    def __init__(
        self, api: KubeApi, path: str, selector: str, kind: type[ObjectT], clock: Clock, news: asyncio.Event
    ) -> None:
        self.items: dict[str, ObjectT] = {}
        self.heard_s = 0.0
        self._api = api
        self._path = path
        self._selector = selector
        self._kind: type[ObjectT] = kind
        self._clock = clock
        self._news = news
        self._version = ""
        self._listed_s = 0.0

    async def list(self) -> None:
        """List all objects. Raises SourceFailed."""
        asked_s = self._clock.now_s()
        listed = await self._api.list(self._path, self._selector, self._kind)
        self.items = {object_key(item.metadata): item for item in listed.items}
        self._version, self.heard_s = listed.version, asked_s
        self._listed_s = self._clock.monotonic_s()
        self._news.set()

    async def list_again(self, every_s: float) -> None:
        """List all objects again, unless that was done within ``every_s``; the watch continues from there."""
        await asyncio.sleep(max(self._listed_s + every_s - self._clock.monotonic_s(), 0.0))
        await self.list()

    async def follow(self, watch_s: float) -> None:
        """Apply changes from watches, for ever. Raises SourceFailed."""
        while True:
            begun_s = self._clock.monotonic_s()
            try:
                async for event in self._api.watch(self._path, self._selector, self._version, self._kind, watch_s):
                    self._take(event.kind, event.item)
            except Expired:
                await self.list_again(LISTS_S)
            if not self._version:
                raise SourceFailed("malformed", f"GET {self._path}: the list says no resourceVersion to watch from")
            await asyncio.sleep(max(begun_s + WATCHES_S - self._clock.monotonic_s(), 0.0))

    def _take(self, kind: str, item: ObjectT) -> None:
        version, key = item.metadata.resource_version, object_key(item.metadata)
        if _is_older(version, self._version):
            return  # already in a list that was read meanwhile
        self._version = version or self._version
        self.heard_s = self._clock.now_s()
        if kind == "DELETED":
            self.items.pop(key, None)
        elif kind in ("ADDED", "MODIFIED"):
            self.items[key] = item
            if len(self.items) > JOBS_MAX:
                detail = f"watching {self._path}: more than {JOBS_MAX} objects; set {KEY}.label_selector"
                raise SourceFailed("oversized", detail)
        self._news.set()


def _is_older(version: str, than: str) -> bool:
    """Return whether a resource version is before another; False if they are not numbers."""
    return version.isdigit() and than.isdigit() and int(version) < int(than)


async def _first(tasks: list[asyncio.Task[None]], *events: asyncio.Event) -> None:
    """Return once an event is set; raise the error that ended a task."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait([*tasks, *waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in done & {*tasks}:
            task.result()
    finally:
        for task in waiting:
            task.cancel()
