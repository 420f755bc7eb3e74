"""The Slurm job sources: squeue and sinfo, which run as processes, and slurmrestd over HTTP or a Unix socket.

An incomplete answer counts as none: a job missing from it would count as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from eagle_eye.server.jobs.slurm_answers import (
    JOB_FIELDS,
    NODE_FIELDS,
    SEPARATOR,
    jobs_of_json,
    jobs_of_text,
    nodes_of_json,
    nodes_of_text,
)
from eagle_eye.server.jobs.source import ScheduledNode, SlurmSettings, Snapshot, SourceFailed
from eagle_eye.server.model.clock import Clock

# squeue and sinfo: one call for all jobs, one for all nodes. No shell, an environment without variables that would
# change the output, a limit on time and bytes.

OUTPUT_BYTES_MAX = 256 << 20  # JSON of 20,000 jobs; columns take a hundredth of it
ERROR_BYTES_MAX = 64 << 10
READ_BYTES = 1 << 16
END_S = 2.0  # from SIGTERM until a command is killed
LISTS_STATES_SINCE = (23, 2)  # the version whose JSON has all words of a job's state
MISSED_MAX = 3  # unanswered queries before the source counts as unheard
KEPT_VARIABLES = ("PATH", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "LD_LIBRARY_PATH", "HOME", "USER", "TZ")

JOBS_TEXT = ",".join(f"{field}:{SEPARATOR}" for field in JOB_FIELDS)
NODES_TEXT = ",".join(f"{field}:{SEPARATOR}" for field in NODE_FIELDS)


class Squeue:
    """Slurm, queried with its commands."""

    name = "slurm"

    def __init__(self, settings: SlurmSettings, clock: Clock, environ: Mapping[str, str] | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._environ = _environment(os.environ if environ is None else environ, settings.conf)
        self._json: bool | None = {"json": True, "text": False}.get(settings.format)

    @property
    def patience_s(self) -> float:
        """Duration of three queries, plus the timeout of an answer."""
        return MISSED_MAX * self._settings.every_s + self._settings.timeout_s

    async def snapshots(self, sooner: asyncio.Event) -> AsyncGenerator[Snapshot, None]:
        """Yield squeue's answers, every ``every_s`` or sooner, occasionally with those of sinfo."""
        nodes_asked_s = -self._settings.nodes_every_s
        while True:
            sooner.clear()
            with_nodes = self._clock.monotonic_s() - nodes_asked_s >= self._settings.nodes_every_s
            if with_nodes:
                nodes_asked_s = self._clock.monotonic_s()
            yield await self.read_snapshot(with_nodes=with_nodes)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sooner.wait(), self._settings.every_s)

    async def read_snapshot(self, *, with_nodes: bool) -> Snapshot:
        """Return one answer. Raises SourceFailed."""
        if self._json is None:
            self._json = await self._version() >= LISTS_STATES_SINCE
        left_out: Counter[str] = Counter()
        asked_s = self._clock.now_s()
        form = ["--json"] if self._json else ["--noheader", f"--Format={JOBS_TEXT}"]
        said = await self._run(self._settings.squeue, "--all", "--states=all", *form)
        read = jobs_of_json if self._json else jobs_of_text
        jobs = await asyncio.to_thread(read, said, left_out)
        nodes = await self._nodes(left_out) if with_nodes else None
        return Snapshot(asked_s, jobs, nodes, dict(left_out))

    async def _nodes(self, left_out: Counter[str]) -> tuple[ScheduledNode, ...]:
        said = await self._run(self._settings.sinfo, "--all", "--Node", "--noheader", f"--Format={NODES_TEXT}")
        return await asyncio.to_thread(nodes_of_text, said, left_out)

    async def _version(self) -> tuple[int, int]:
        said = (await self._run(self._settings.squeue, "--version")).decode("ascii", "replace")
        found = re.search(r"(\d{2})\.(\d{1,2})", said)
        if found is None:
            raise SourceFailed("malformed", f"{self._settings.squeue} --version says {said[:80]!r}, no version")
        return int(found[1]), int(found[2])

    async def _run(self, command: str, *arguments: str) -> bytes:
        """Return the command's output. Raises SourceFailed."""
        try:
            process = await asyncio.create_subprocess_exec(
                command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            remedy = "install Slurm's client commands, or set job_sources.slurm.squeue and sinfo to their paths"
            raise SourceFailed("missing", f"{command} cannot be run: {why}; {remedy}") from None
        output: _Output | None = None
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                output = await _whole_output(process)
        except TimeoutError:
            limit = f"{self._settings.timeout_s:g} s (job_sources.slurm.timeout_s)"
            raise SourceFailed("timeout", f"{command} did not answer within {limit}") from None
        finally:
            if output is None:
                await _end(process)
        if output is None:
            raise SourceFailed("oversized", f"{command} wrote more than {OUTPUT_BYTES_MAX} bytes")
        if process.returncode:
            said = output.error.decode("utf-8", "replace").strip().splitlines() or ["nothing on stderr"]
            detail = "".join(char for char in said[-1][:300] if char.isprintable())
            raise SourceFailed("refused", f"{command} ended with {process.returncode}: {detail}")
        return output.text


class _Output(NamedTuple):
    text: bytes
    error: bytes


async def _whole_output(process: asyncio.subprocess.Process) -> _Output | None:
    """Return the process's complete output; None if it is too large."""
    assert process.stdout is not None  # noqa: S101 - asked for above
    assert process.stderr is not None  # noqa: S101 - likewise
    complaints = asyncio.create_task(_beginning(process.stderr, ERROR_BYTES_MAX))
    try:
        parts: list[bytes] = []
        size = 0
        while part := await process.stdout.read(READ_BYTES):
            size += len(part)
            if size > OUTPUT_BYTES_MAX:
                return None
            parts.append(part)
        error = await complaints
        await process.wait()
        return _Output(b"".join(parts), error)
    finally:
        complaints.cancel()
        await asyncio.gather(complaints, return_exceptions=True)


async def _beginning(stream: asyncio.StreamReader, most: int) -> bytes:
    """Return the first ``most`` bytes of a stream, after reading all of it."""
    kept = b""
    while part := await stream.read(READ_BYTES):
        kept += part[: most - len(kept)]
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """Terminate the process and its children, and drain its pipes."""
    for word in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, word)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_emptied(process), END_S)
            return


async def _emptied(process: asyncio.subprocess.Process) -> None:
    """Return once all writers have closed: a pipe that is not drained is never closed."""
    for stream in (process.stdout, process.stderr):
        while stream is not None and await stream.read(READ_BYTES):
            pass
    await process.wait()


def _environment(environ: Mapping[str, str], conf: str) -> dict[str, str]:
    """Return the commands' environment without SQUEUE_* and SINFO_*, which would change their output."""
    kept = {name: environ[name] for name in KEPT_VARIABLES if name in environ}
    conf_variable = {"SLURM_CONF": conf} if conf else {}
    return {**kept, **conf_variable, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


# slurmrestd. Touches the network and the token's file.

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
                yield await self.read_snapshot(client, with_nodes=with_nodes)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(sooner.wait(), self._settings.every_s)

    async def read_snapshot(self, client: httpx.AsyncClient, *, with_nodes: bool) -> Snapshot:
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
