"""The Kubernetes job source: lists and watches pods, and cordoned nodes. Touches the network.

A silent watch proves nothing: the source counts as heard when an event or bookmark arrives, about every minute. When a
fault needs its report the pods are listed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Generic

from eagle_eye.server.jobs.kube_api import KEY, Expired, KubeApi, ObjectT, object_key
from eagle_eye.server.jobs.pods import KubernetesNode, Pod, jobs_of, node_of
from eagle_eye.server.jobs.settings import KubernetesSettings
from eagle_eye.server.jobs.source import JOBS_MAX, Snapshot, SourceFailed
from eagle_eye.server.model.clock import Clock

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
