"""Slurmrestd asked over HTTP: versions, tokens, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.jobs import slurm
from eagle_eye.server.jobs.slurm import SlurmRest
from eagle_eye.server.jobs.source import SlurmSettings, Snapshot, SourceFailed
from tests.server.builders import FakeClock
from tests.server.job_sources.fake_http import Answer, Asked, serving

JOBS = b'{"jobs": [{"job_id": 17, "job_state": ["RUNNING"], "nodes": "n[1-2]"}], "errors": []}'
NODES = b'{"nodes": [{"name": "n1", "state": ["IDLE", "DRAIN"], "reason": "bad fan"}]}'


class Slurmrestd:
    """Has one version and takes one token."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.jobs = JOBS

    def __call__(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        if asked.headers.get("x-slurm-user-token") != "good":
            return 401, b"Authentication failure"
        bodies = {"/slurm/v0.0.40/jobs": self.jobs, "/slurm/v0.0.40/nodes": NODES}
        return (200, bodies[asked.path]) if asked.path in bodies else (404, b"Unable find requested URL")


def source(url: str, folder: Path, token: str = "good", **more: Any) -> SlurmRest:
    (folder / "token").write_text(f"SLURM_JWT={token}\n")
    return SlurmRest(SlurmSettings(use="rest", url=url, token_file=f"{folder}/token", **more), FakeClock())


async def _first(rest: SlurmRest, count: int = 1) -> list[Snapshot]:
    sooner = asyncio.Event()
    found = []
    async for snapshot in rest.snapshots(sooner):
        found.append(snapshot)
        sooner.set()
        if len(found) == count:
            break
    return found


def first(rest: SlurmRest, count: int = 1) -> list[Snapshot]:
    return asyncio.run(_first(rest, count))


def test_the_newest_version_that_it_has_is_found_once(tmp_path: Path) -> None:
    slurmrestd = Slurmrestd()
    with serving(slurmrestd) as url:
        snapshots = first(source(url, tmp_path, user="root"), 2)
    assert [(job.id, job.nodes) for job in snapshots[1].jobs] == [("17", ("n1", "n2"))]
    assert snapshots[0].nodes is not None
    assert (snapshots[0].nodes[0].state, snapshots[1].nodes) == ("excluded", None)
    paths = [asked.path for asked in slurmrestd.asked]
    assert paths[-3:] == ["/slurm/v0.0.40/jobs", "/slurm/v0.0.40/nodes", "/slurm/v0.0.40/jobs"]
    assert paths[0] == f"/slurm/{slurm.VERSIONS[0]}/jobs"
    assert slurmrestd.asked[0].headers["x-slurm-user-name"] == "root"


def test_a_token_that_is_refused_is_said_with_its_key(tmp_path: Path) -> None:
    with serving(Slurmrestd()) as url, pytest.raises(SourceFailed, match="token_file") as failed:
        first(source(url, tmp_path, token="old"))
    assert failed.value.reason == "unauthorised"


def test_a_renewed_token_is_used_from_then_on(tmp_path: Path) -> None:
    with serving(Slurmrestd()) as url:
        rest = source(url, tmp_path, token="old")
        with pytest.raises(SourceFailed):
            first(rest)
        (tmp_path / "token").write_text("good")
        assert len(first(rest)) == 1


@pytest.mark.parametrize("text", ["", "two words", "x" * 20_000, "a\nb"])
def test_a_file_without_a_token_is_not_sent(tmp_path: Path, text: str) -> None:
    rest = source("http://127.0.0.1:1", tmp_path)
    (tmp_path / "token").write_text(text)
    with pytest.raises(SourceFailed, match="holds no token"):
        first(rest)


def test_nobody_there_an_endless_answer_and_no_version_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceFailed, match="cannot be reached: ConnectError"):
        first(source("http://127.0.0.1:1", tmp_path))
    monkeypatch.setattr(slurm, "OUTPUT_BYTES_MAX", 1_000)
    slurmrestd = Slurmrestd()
    slurmrestd.jobs = b" " * 2_000
    with serving(slurmrestd) as url:
        with pytest.raises(SourceFailed, match="more than 1000 bytes"):
            first(source(url, tmp_path))
        with pytest.raises(SourceFailed, match=r"404 to GET /slurm/v0\.0\.39/jobs"):
            first(source(url, tmp_path, version="v0.0.39"))
    with (
        serving(lambda _: (404, b"")) as url,
        pytest.raises(SourceFailed, match=r"set job_sources\.slurm\.version"),
    ):
        first(source(url, tmp_path))
