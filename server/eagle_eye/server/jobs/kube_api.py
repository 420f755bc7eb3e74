"""Kubernetes API client: lists objects of one kind in pages, then watches them. Touches the network and two files.

Not the official client that the orchestrators use: that one is synchronous, holds a watch in a thread that cannot be
cancelled, and reads bodies without a limit; and a server would install 30 MB for two endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import httpx
import msgspec

from eagle_eye.server.jobs.pods import KubernetesNode, Metadata, Pod
from eagle_eye.server.jobs.settings import KubernetesSettings
from eagle_eye.server.jobs.slurm_rest import read_token, trusting
from eagle_eye.server.jobs.source import JOBS_MAX, SourceFailed

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
