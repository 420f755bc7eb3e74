from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent.drops import Drops
from eagle_eye.agent.training_logs.line_search import line_at, starts_of
from eagle_eye.agent.training_logs.log_finder import BadPattern, Pattern, outputs, scheduler_task
from eagle_eye.agent.training_logs.tail import LINE_BYTES_MAX, Tail
from eagle_eye.agent.training_processes import TrainingProcess
from tests.agent.fakes import script

MUCH = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "train.log"
    file.write_bytes(b"")
    return file


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as file:
        file.write(data)


def test_each_line_is_read_once_and_a_partial_one_waits(log: Path) -> None:
    tail = Tail(log, Drops())
    append(log, b"one\ntw")
    assert tail.read(MUCH) == b"one\n"
    assert tail.read(MUCH) == b""
    append(log, b"o\nthree")
    assert tail.read(MUCH) == b"two\n"
    append(log, b"\n")
    assert tail.read(MUCH) == b"three\n"
    tail.close()


def test_a_carriage_return_ends_a_line(log: Path) -> None:
    tail = Tail(log, Drops())
    append(log, b" 10%|\r 20%|\r 30%|")
    assert tail.read(MUCH).split() == [b"10%|", b"20%|"]
    tail.close()


def test_a_file_that_was_cut_short_is_read_from_its_beginning(log: Path) -> None:
    tail = Tail(log, Drops())
    append(log, b"a long first line\nsecond par")
    tail.read(MUCH)
    log.write_bytes(b"new\n")
    assert tail.read(MUCH) == b"new\n"
    tail.close()


def test_a_file_that_was_renamed_or_removed_is_read_to_its_end(log: Path) -> None:
    tail = Tail(log, Drops())
    with log.open("ab") as file:
        log.rename(log.with_suffix(".log.1"))
        log.write_bytes(b"the next file\n")
        file.write(b"last words\n")
        file.flush()
        assert tail.read(MUCH) == b"last words\n"
        log.with_suffix(".log.1").unlink()
        file.write(b"the very last\n")
        file.flush()
        assert tail.read(MUCH) == b"the very last\n"
    tail.close()


def test_of_a_flood_the_newest_is_read_and_the_rest_counted(log: Path) -> None:
    drops = Drops()
    tail = Tail(log, drops)
    append(log, b"".join(b"line %06d\n" % number for number in range(100_000)))
    lines = tail.read(4_096).splitlines()
    assert lines[-1] == b"line 099999"
    assert all(len(line) == 11 for line in lines)
    assert drops.snapshot() == {"training_log_bytes_skipped": 100_000 * 12 - 4_096}
    tail.close()


def test_a_line_of_ten_megabytes_is_left_out_and_costs_no_memory(log: Path) -> None:
    drops = Drops()
    tail = Tail(log, drops)
    read = []
    append(log, b"before\n")
    for _ in range(100):
        append(log, b"x" * 100_000)
        read.append(tail.read(MUCH))
        assert len(tail._rest) <= LINE_BYTES_MAX
    append(log, b"\nafter\n")
    read.append(tail.read(MUCH))
    assert b"".join(read) == b"before\nafter\n"
    assert drops.snapshot() == {"training_log_long_lines": 1}
    tail.close()


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        Tail(pipe, Drops())
    with pytest.raises(FileNotFoundError):
        Tail(tmp_path / "none", Drops())
    (tmp_path / "log").write_text("x")
    with pytest.raises(OSError, match="exchanged"):
        Tail(tmp_path / "log", Drops(), (0, 0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=60), st.integers(1, 64), st.booleans()), max_size=20))
def test_any_bytes_in_any_pieces_are_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[bytes, int, bool]]
) -> None:
    log = tmp_path_factory.mktemp("tail") / "log"
    log.write_bytes(b"")
    tail = Tail(log, Drops())
    for data, most, cut in pieces:
        if cut:
            log.write_bytes(data)
        else:
            append(log, data)
        lines = tail.read(most)
        assert lines == b"" or lines.endswith(b"\n")
    tail.close()


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
