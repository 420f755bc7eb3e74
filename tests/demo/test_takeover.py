"""The demo with two servers: the leader is killed while a node hangs, and the loop still closes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from eagle_eye.cli.main import main
from eagle_eye.demo import two_servers
from tests.demo.running import demo_of

needs_postgresql = pytest.mark.skipif(bool(two_servers.postgresql_missing()), reason=two_servers.postgresql_missing())


@pytest.mark.slow
@needs_postgresql
def test_the_leader_is_killed_while_a_node_hangs_and_the_loop_closes_and_nothing_is_left() -> None:
    before = databases()
    reported = demo_of("--ha")
    # "busy" comes or not: tests run beside others.
    stages = [line["stage"] for line in reported if line.get("stage", "evidence") not in ("evidence", "busy")]
    assert stages == [
        *("start", "leads", "training", "fault", "killed", "leads", "verdict", "webhook", "excluded", "restarted"),
        *("training", "training", "standby"),
    ]
    assert reported[-1]["success"]
    assert databases() == before


def databases() -> set[Path]:
    """Return the folders of the databases of demos."""
    return set(Path(tempfile.gettempdir()).glob("eagle-eye-demo-postgresql-*"))


def test_without_postgresql_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(two_servers, "PLACES", ())
    monkeypatch.setenv("PATH", "")
    assert main(["demo", "--ha"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no initdb" in line
    assert line.endswith("apt-get install postgresql-15")


def test_another_fault_than_a_hang_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--ha", "--fault", "nan"]) == 2
    assert "--ha: expected --fault hang, got 'nan'" in capsys.readouterr().err


def test_the_newest_programs_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in ("9", "15", "14"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin/initdb").touch()
    monkeypatch.setattr(two_servers, "PLACES", (f"{tmp_path}/*/bin",))
    assert two_servers.postgresql_programs() == tmp_path / "15/bin"
