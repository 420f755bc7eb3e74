from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.followed_logs import LOOK_S, BadPattern, Pattern, outputs, scheduler_task
from eagle_eye.agent.training_logs.lines import line_at, starts_of
from tests.agent.fakes import FakeClock, script
from tests.agent.training_log_site import Site, append, iteration


@given(st.binary(max_size=300), st.lists(st.binary(min_size=1, max_size=3), max_size=4))
def test_the_search_finds_just_the_lines_with_a_needle(lines: bytes, needles: list[bytes]) -> None:
    wanted = [needle for needle in needles if b"\n" not in needle]
    found = starts_of(lines, wanted)
    begins = [0, *(at + 1 for at, byte in enumerate(lines) if byte == 10)]
    parts = lines.split(b"\n")
    assert found == [begin for begin, part in zip(begins, parts, strict=True) if any(n in part for n in wanted)]
    for start in found:
        text, following = line_at(lines, start)
        assert len(text) <= following - start


def make(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")


def test_a_pattern_names_the_logs_of_the_jobs_that_run_here(tmp_path: Path) -> None:
    make(tmp_path, "a/train.log", "b/train.log", "c/train.log", "b/train.txt")
    found = Pattern(f"{tmp_path}/{{job}}/*.log", "n1").files(["a", "b", "b"])
    assert [(log.path.parent.name, log.job) for log in found] == [("a", "a"), ("b", "b")]


def test_a_pattern_reads_rank_and_local_rank_from_the_path(tmp_path: Path) -> None:
    make(
        tmp_path,
        "n1/attempt_0/3/stdout_rank_11.log",
        "n1/attempt_0/x/stdout_rank_y.log",
        "n2/attempt_0/1/stdout_rank_9.log",
    )
    (found,) = Pattern(f"{tmp_path}/{{node}}/**/{{local_rank}}/stdout_rank_{{rank}}.log", "n1").files([])
    assert (found.rank, found.local_rank, found.job) == (11, 3, None)


def test_names_of_jobs_and_nodes_are_no_patterns(tmp_path: Path) -> None:
    make(tmp_path, "a/train.log", "*/train.log", "secret.log")
    assert [log.job for log in Pattern(f"{tmp_path}/{{job}}/train.log", "n").files(["*"])] == ["*"]
    assert Pattern(f"{tmp_path}/a/{{job}}/secret.log", "n").files(["..", "\0"]) == []
    assert Pattern(f"{tmp_path}/{{node}}/train.log", "?").files([]) == []


def test_what_is_no_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "folder.log").mkdir()
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "link.log").symlink_to(tmp_path / "nowhere")
    assert Pattern(f"{tmp_path}/*.log", "n").files([]) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("run/*.log", "absolute path"),
        ("/run/\0.log", "absolute path"),
        ("/run/{host}/*.log", "places are"),
        ("/run/{rank}/{rank}.log", "twice"),
        ("/run/{rank", "places are"),
    ],
)
def test_a_pattern_that_cannot_be_used_says_why(text: str, why: str) -> None:
    with pytest.raises(BadPattern, match=why):
        Pattern(text, "n")


def test_a_processs_own_files_are_found_and_pipes_are_not(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    program = """
        import os, sys
        os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        print("ready", flush=True)
        sys.stdin.readline()
    """
    with script(program, str(log), SLURM_PROCID="5") as running:
        assert running.stdout is not None
        running.stdout.readline()
        process = TrainingProcess(running.pid, "j", 0, 1, 0)
        found, problem = outputs([process], Path("/proc"))
        state = log.stat()
        assert [(item.identity, item.process) for item in found] == [((state.st_dev, state.st_ino), process)]
        assert problem == ""
        assert scheduler_task(running.pid, Path("/proc")) == 5
        assert scheduler_task(os.getpid(), tmp_path) is None


def test_a_process_whose_files_may_not_be_seen_is_named(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.write_text("")  # what lies below is refused, as other users' descriptors are
    found, problem = outputs([TrainingProcess(1, "j", 0, 1, 0)], proc)
    assert found == []
    assert "run the agent as root" in problem


@pytest.fixture
def site(tmp_path: Path, clock: FakeClock) -> Site:
    return Site(tmp_path, clock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
def test_a_strangers_link_in_a_configured_folder_is_refused_counted_and_named(site: Site) -> None:
    site.runs(0, size=1)
    secret = site.log("secret", iteration(10))
    (site.folder / "train.log").symlink_to(secret)
    os.chown(site.folder / "train.log", 12_345, 12_345, follow_symlinks=False)
    agent = site.agent("*.log")
    observed = site.collect(agent)
    assert observed.devices == {}
    assert f"{site.folder}/train.log: a link on the way belongs to user 12345" in observed.problem
    assert site.drops.snapshot() == {"training_log_refused": 1}
    (site.folder / "train.log").unlink()
    (site.folder / "train.log").symlink_to(secret)  # root's own
    site.collect(agent, LOOK_S)
    append(secret, iteration(20))
    assert site.collect(agent).devices[0]["train_step"] == 20.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes of other users")
def test_an_output_that_is_not_the_processes_own_is_refused_unless_configuration_names_it(site: Site) -> None:
    site.user = 12_345
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    assert "belongs to user 0, the process to user 12345" in site.collect(site.agent()).problem
    assert site.drops.snapshot() == {"training_log_refused": 1}
    agent = site.agent("*.log")
    site.collect(agent)
    append(log, iteration(10))
    assert site.collect(agent).devices[0]["train_step"] == 10.0


def test_of_a_flood_what_is_left_out_is_counted(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    append(log, "x" * (1 << 21) + "\n" + iteration(10))
    assert site.collect(agent).devices[0]["train_step"] == 10.0
    assert site.drops.snapshot() == {"training_log_bytes_skipped": (1 << 21) + 1}
    append(log, "y" * (1 << 17))
    site.collect(agent)
    assert site.drops.snapshot()["training_log_long_lines"] == 1
