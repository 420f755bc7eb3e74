"""Sends series of nodes whose jobs other cells judge on to the leaders of these cells. Touches: the network.

The sender is answered once the other cell has them, so that a sender that tries again loses nothing while a cell has no
leader for as long as a takeover takes. A cell without one for longer must not hold up the others: what is for it is
dropped then, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import httpx

from eagle_eye.server.history import remote_series
from eagle_eye.server.ingest.remote_write import wire
from eagle_eye.server.ingest.remote_write.intake import Taken
from eagle_eye.server.ingest.remote_write.wire import WireSeries
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.transport.other_servers import OF_ONE_CELL

ANSWER_S = 10.0
RETRIED_S = 60.0  # so long the sender is asked to try again: a takeover takes seconds, and senders keep minutes
QUIET_S = 30.0  # without a try for so long, it begins anew
AGAIN_S = 5.0  # after that, how often the cell is tried, which may take seconds each
JOB_FRESH_S = 300.0  # how long a job label counts for the node's other series
LABELLED_MAX = 100_000  # nodes whose labels are remembered
SAMPLES_WRITTEN = "X-Prometheus-Remote-Write-Samples-Written"

_log = logging.getLogger(__name__)


class CellDirectory(Protocol):
    """What is known of the site's cells; see monitor/cells.py."""

    def other_cell_of(self, job: str) -> str:
        """Return the other cell that judges the job, "" if this one does or nobody was given it."""
        ...

    def url_of(self, cell: str) -> str:
        """Return the URL of the cell's leader, "" where it has none."""
        ...


class _Outage:
    """A cell that did not take what was for it."""

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.tried_s = now_s
        self.given_up = False


class OtherCells:
    """Knows whose a node's samples are, and brings them to ``path`` there.

    ``job_of`` returns a node's declared job.
    """

    def __init__(
        self,
        cells: CellDirectory,
        job_of: Callable[[str], str | None],
        client: httpx.AsyncClient,
        path: str,
        clock: Clock,
    ) -> None:
        self._cells = cells
        self._job_of = job_of
        self._client = client
        self._path = path
        self._clock = clock
        self._labelled: dict[str, tuple[float, str]] = {}
        self._outages: dict[str, _Outage] = {}

    def cell_of(self, node: str, job: str | None) -> str:
        """Return the other cell that judges the job on the node, "" for none; ``job`` None: no label names it."""
        if job is not None:
            cell = self._cells.other_cell_of(job)
            if cell and len(self._labelled) < LABELLED_MAX:
                self._labelled[node] = (self._clock.monotonic_s(), job)
            elif not cell:
                self._labelled.pop(node, None)
            return cell
        if node in self._labelled:
            seen_s, job = self._labelled[node]
            if self._clock.monotonic_s() - seen_s > JOB_FRESH_S:
                del self._labelled[node]
                job = None
        job = job or self._job_of(node)
        return "" if job is None else self._cells.other_cell_of(job)

    async def bring(self, taken: Taken, authorization: str) -> None:
        """Return once the other cells have what ``taken`` has of theirs, or it is counted there as dropped or refused.

        Raises Refusal 503 where the sender shall try again.
        """
        said = await asyncio.gather(
            *(self._bring(cell, series, authorization, taken) for cell, series in taken.of_cells.items()),
            return_exceptions=True,
        )
        for error in said:
            if error is not None:
                raise error

    async def _bring(self, cell: str, series: Sequence[WireSeries], authorization: str, taken: Taken) -> None:
        now_s = self._clock.monotonic_s()
        samples = sum(len(one.samples) for one in series)
        outage = self._outages.get(cell)
        if outage is not None and outage.given_up and now_s - outage.tried_s < AGAIN_S:
            taken.left_out["cell_unreached"] += samples
            return
        if outage is not None:
            if now_s - outage.tried_s > QUIET_S:
                outage.since_s, outage.given_up = now_s, False
            outage.tried_s = now_s
        try:
            no = await self._post(cell, series, authorization)
        except _Unreached as error:
            self._note(cell, str(error), samples, taken)
            return
        if self._outages.pop(cell, None) is not None:
            _log.info("cell %s takes samples of remote write again", cell)
        if no is not None:
            refused, detail = no
            taken.refuse("cell", refused, f"cell {cell}: {detail}")

    def _note(self, cell: str, why: str, samples: int, taken: Taken) -> None:
        """Have the sender try again, or drop the samples where it was asked to for long enough."""
        now_s = self._clock.monotonic_s()
        outage = self._outages.setdefault(cell, _Outage(now_s))
        outage.tried_s = now_s
        if now_s - outage.since_s < RETRIED_S:
            detail = f"cell {cell} judges jobs of these nodes, and {why}; send again"
            raise Refusal(503, "standby", detail, {"Retry-After": "1"})
        if not outage.given_up:
            outage.given_up = True
            _log.warning("samples of remote write for cell %s are dropped: %s for %d s", cell, why, RETRIED_S)
        taken.left_out["cell_unreached"] += samples

    async def _post(self, cell: str, series: Sequence[WireSeries], authorization: str) -> tuple[int, str] | None:
        """Return how many samples the cell refuses and why, None where it has all. Raises _Unreached."""
        url = self._cells.url_of(cell)
        if not url:
            raise _Unreached("it has no leader at present")
        body = await asyncio.to_thread(lambda: remote_series.compressed(wire.request_v1(series)))
        headers = {
            "content-type": remote_series.CONTENT_TYPE,
            "content-encoding": "snappy",
            OF_ONE_CELL.decode(): "1",
            **({"authorization": authorization} if authorization else {}),
        }
        try:
            answer = await self._client.post(httpx.URL(url).copy_with(path=self._path), content=body, headers=headers)
        except (httpx.HTTPError, OSError) as error:  # only the type: the text may contain an address
            raise _Unreached(f"its leader, {url}, cannot be reached ({type(error).__name__})") from error
        if answer.is_success:
            return None
        detail = f"HTTP {answer.status_code} {_detail(answer)}"
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise _Unreached(f"its leader, {url}, answers {detail}")
        written = answer.headers.get(SAMPLES_WRITTEN, "0")
        samples = sum(len(one.samples) for one in series)
        return samples - (min(int(written), samples) if written.isascii() and written.isdigit() else 0), detail


class _Unreached(Exception):
    """The cell did not take the samples, and may later."""


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])[:1000]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
