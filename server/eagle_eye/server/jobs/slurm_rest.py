"""The Slurm job source that uses slurmrestd, over HTTP or a Unix socket. Touches the network and the token's file."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx

from eagle_eye.server.jobs.settings import SlurmSettings
from eagle_eye.server.jobs.slurm_answers import jobs_of_json, nodes_of_json
from eagle_eye.server.jobs.slurm_squeue import MISSED_MAX, OUTPUT_BYTES_MAX
from eagle_eye.server.jobs.source import Snapshot, SourceFailed
from eagle_eye.server.model.clock import Clock

# Newest first. The fields that we read have the same names in all of them.
VERSIONS = tuple(f"v0.0.{minor}" for minor in range(45, 36, -1))
TOKEN_BYTES_MAX = 16_384
NOT_FOUND = (404, 405)


class SlurmRest:
    """Slurm, queried through slurmrestd."""

    name = "slurm"

    def __init__(self, settings: SlurmSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._version = settings.version

    @property
    def patience_s(self) -> float:
        """Duration of three queries, plus the timeout of an answer."""
        return MISSED_MAX * self._settings.every_s + self._settings.timeout_s

    async def snapshots(self, sooner: asyncio.Event) -> AsyncGenerator[Snapshot, None]:
        """Yield slurmrestd's answers, every ``every_s`` or sooner, occasionally with the nodes."""
        nodes_asked_s = -self._settings.nodes_every_s
        async with self._client() as client:
            while True:
                sooner.clear()
                with_nodes = self._clock.monotonic_s() - nodes_asked_s >= self._settings.nodes_every_s
                if with_nodes:
                    nodes_asked_s = self._clock.monotonic_s()
                yield await self.ask(client, with_nodes=with_nodes)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(sooner.wait(), self._settings.every_s)

    async def ask(self, client: httpx.AsyncClient, *, with_nodes: bool) -> Snapshot:
        """Return one answer. Raises SourceFailed."""
        left_out: Counter[str] = Counter()
        asked_s = self._clock.now_s()
        jobs = await asyncio.to_thread(jobs_of_json, await self._get(client, "jobs"), left_out)
        nodes = None
        if with_nodes:
            nodes = await asyncio.to_thread(nodes_of_json, await self._get(client, "nodes"), left_out)
        return Snapshot(asked_s, jobs, nodes, dict(left_out))

    async def _get(self, client: httpx.AsyncClient, what: str) -> bytes:
        """Return one endpoint's answer, in the newest API version that slurmrestd supports. Raises SourceFailed."""
        for version in (self._version,) if self._version else VERSIONS:
            status, body = await self._once(client, f"/slurm/{version}/{what}")
            if status in NOT_FOUND and not self._version:
                continue
            if status in (401, 403):
                remedy = "look at job_sources.slurm.token_file and user, and whether the token has expired"
                raise SourceFailed("unauthorised", f"slurmrestd answers {status}: {remedy}")
            if status != 200:
                raise SourceFailed("status", f"slurmrestd answers {status} to GET /slurm/{version}/{what}")
            self._version = version
            return body
        known = f"{VERSIONS[-1]} to {VERSIONS[0]}"
        raise SourceFailed("status", f"slurmrestd has none of {known}: set job_sources.slurm.version")

    async def _once(self, client: httpx.AsyncClient, path: str) -> tuple[int, bytes]:
        parts: list[bytes] = []
        size = 0
        try:
            async with (
                asyncio.timeout(self._settings.timeout_s),
                client.stream("GET", path, headers=self._headers()) as response,
            ):
                async for part in response.aiter_bytes():
                    size += len(part)
                    if size > OUTPUT_BYTES_MAX:
                        raise SourceFailed("oversized", f"slurmrestd's answer has more than {OUTPUT_BYTES_MAX} bytes")
                    parts.append(part)
                return response.status_code, b"".join(parts)
        except (TimeoutError, httpx.TimeoutException):
            limit = f"{self._settings.timeout_s:g} s (job_sources.slurm.timeout_s)"
            raise SourceFailed("timeout", f"slurmrestd did not answer within {limit}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Never str(error) of the request: it may contain the URL with a password.
            raise SourceFailed("missing", f"slurmrestd cannot be reached: {type(error).__name__}") from None

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "application/json"}
        if self._settings.user:
            headers["X-SLURM-USER-NAME"] = self._settings.user
        if self._settings.token_file:
            headers["X-SLURM-USER-TOKEN"] = read_token(self._settings.token_file, "job_sources.slurm.token_file")
        return headers

    def _client(self) -> httpx.AsyncClient:
        url = self._settings.url.rstrip("/")
        # Slurmrestd closes idle connections; no proxy is used between a server and its scheduler.
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=0)
        if url.startswith("unix:"):
            transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix:"), limits=limits)
            return httpx.AsyncClient(transport=transport, base_url="http://slurmrestd", trust_env=False, timeout=None)  # noqa: S113 - each query has its own
        verify = trusting(self._settings.ca_file, "job_sources.slurm.ca_file")
        return httpx.AsyncClient(base_url=url, verify=verify, trust_env=False, timeout=None, limits=limits)  # noqa: S113 - likewise


def read_token(file: str, key: str) -> str:
    """Return the file's token. Raises SourceFailed naming the configuration key."""
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise SourceFailed("unauthorised", f"{key}: {file} cannot be read: {error.strerror}") from None
    token = raw.decode("ascii", "replace").strip().removeprefix("SLURM_JWT=")
    if not token or len(raw) > TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise SourceFailed("unauthorised", f"{key}: {file} holds no token: expected one line of visible characters")
    return token


def trusting(ca_file: str, key: str) -> ssl.SSLContext:
    """Return an SSL context that verifies against ``ca_file``. Raises SourceFailed naming the key."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SourceFailed("missing", f"{key}: {ca_file} cannot be used: {why}; expected certificates in PEM") from None
