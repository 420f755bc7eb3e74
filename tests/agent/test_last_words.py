"""The last words of programs: tracebacks, aborts, watchdogs, NCCL's warnings, and torchrun's table."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.training_hook.message import TEXT_BYTES_MAX
from eagle_eye.agent.training_logs.last_words import FailureTable, LastWords, RankFailure, WordsReader, text_of
from eagle_eye.agent.training_logs.lines import LogLine, without_prefixes
from eagle_eye.schema.last_words import cause, device_word, headline
from tests.agent.fakes import FakeClock
from tests.agent.training_log_site import FRAME, HEADER, Site, append, iteration, kinds

DATA = Path(os.environ["EAGLE_EYE_TEST_DATA"]) if os.environ.get("EAGLE_EYE_TEST_DATA") else None
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\n"
)
UNREACHED = "socketStartConnect: Connect to 10.0.0.7<41234> failed : No route to host"


def read(text: str) -> list[LastWords]:
    """Return what the reader finds in a log's lines."""
    reader = WordsReader()
    return [found for line in text.splitlines() if (found := reader.read_line(without_prefixes(line))) is not None]


def said(text: str) -> str:
    (found,) = read(text)
    return found.text


def tracebacks(*lines: str) -> list[str]:
    return [words.lines[-1] for words in read("\n".join(lines))]


BEGIN = HEADER.rstrip()
FRAMES = (*FRAME.splitlines(), "    ^^^^^^")


def test_the_line_that_ends_a_traceback_is_found() -> None:
    assert tracebacks(BEGIN, *FRAMES, "RuntimeError: shapes differ", "", "more: text") == [
        "RuntimeError: shapes differ"
    ]
    out_of_memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert tracebacks(BEGIN, *FRAMES, out_of_memory) == [out_of_memory]
    assert tracebacks(BEGIN, *FRAMES, "AssertionError") == ["AssertionError"]
    assert tracebacks(BEGIN, *FRAMES, "socket.timeout: timed out") == ["socket.timeout: timed out"]


def test_interleaved_tracebacks_of_ranks_are_kept_apart() -> None:
    lines = []
    for parts in zip((BEGIN, *FRAMES, "ValueError: a"), (BEGIN, *FRAMES, "KeyError: 'b'"), strict=True):
        lines += [f"[rank0]: {parts[0]}", f"[rank1]: {parts[1]}"]
    assert tracebacks(*lines) == ["ValueError: a", "KeyError: 'b'"]


@pytest.mark.parametrize(("prefix", "expected"), [("[rank2]: ", (2, None)), ("[rank2]:", (None, 2))])
def test_a_tracebacks_first_line_tells_rank_and_local_rank_apart(
    prefix: str, expected: tuple[int | None, int | None]
) -> None:
    (words,) = read("\n".join(prefix + line for line in (BEGIN, *FRAMES, "ValueError: x")))
    assert ((words.line.rank, words.line.local_rank), words.lines[-1]) == (expected, "ValueError: x")


def test_a_traceback_is_told_with_its_innermost_frame() -> None:
    outer = ('  File "train.py", line 90, in main', "    step()")
    assert said("\n".join(f"[rank2]: {line}" for line in (BEGIN, *outer, *FRAMES, "ValueError: x"))) == "\n".join(
        (*FRAMES[:2], "ValueError: x")
    )


@pytest.mark.parametrize(
    "last",
    [
        "KeyboardInterrupt",
        "SystemExit: 1",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "WARNING: something else",
        "step: 5 loss: 1.0",
        "",
    ],
)
def test_what_ends_no_program_by_an_error_is_none(last: str) -> None:
    assert tracebacks(BEGIN, *FRAMES, last) == []
    assert tracebacks("RuntimeError: no traceback before it") == []
    assert tracebacks(BEGIN, "ValueError: no frame between") == []


@given(st.lists(st.text(max_size=80), max_size=30))
def test_any_lines_go_through_the_traceback_reader(lines: list[str]) -> None:
    tracebacks(BEGIN, *lines)


def test_a_traceback_that_never_ends_is_given_up() -> None:
    reader = WordsReader()
    reader.read_line(LogLine(BEGIN))
    for _ in range(2_000):
        reader.read_line(LogLine("    frame"))
    assert not reader.under_way


def test_a_message_is_read_to_its_last_line() -> None:
    assert said(HEADER + FRAME + NCCL + UNREACHED + "\n\nmore\n") == FRAME + NCCL + UNREACHED
    assert headline(said(HEADER + FRAME + NCCL + UNREACHED)) == UNREACHED
    assert cause(said(HEADER + FRAME + NCCL + UNREACHED)) == "unreached"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[rank0]:[W927 10:00:00.123 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called",
        "W0927 10:00:00.123000 4242 torch/distributed/run.py:792] warning",
        "E0927 10:00:00.123000 4242 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1)",
        "2026-09-27 10:00:00,123 - INFO - saving",
        "[2026-09-27 10:00:00] saving",
        "WARNING: root: the network is down",
        "wandb: network error (ConnectionError), entering retry loop.",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98",
        "=====================================",
        "node1:984:1357 [4] NCCL INFO comm 0x55 rank 4 nranks 8 - Abort COMPLETE",
    ],
)
def test_what_another_writes_ends_a_message(line: str) -> None:
    assert said(f"{HEADER}{FRAME}ValueError: no batch\n{line}\nConnection closed by peer\n") == (
        FRAME + "ValueError: no batch"
    )


def test_a_frameworks_line_ends_a_message() -> None:
    reader = WordsReader()
    found = [
        reader.read_line(without_prefixes(line), lambda text: "iteration" in text)
        for line in (HEADER + FRAME + "ValueError: x\n" + iteration(3) + "peer gone\n").splitlines()
    ]
    assert [words.text for words in found if words] == [FRAME + "ValueError: x"]


def test_advice_below_a_message_is_left_out() -> None:
    advice = (
        "Search for `cudaErrorDevicesUnavailable' in https://docs.nvidia.com for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    )
    error = "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert said(f"{HEADER}{FRAME}{error}\n{advice}") == FRAME + error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: x\nmore\n\n",
            "c10::Error: CUDA error: x\nmore",
        ),
        ("terminate called after throwing an instance of 'std::bad_alloc'\nother\n", "std::bad_alloc"),
        (
            "libc++abi: terminating due to uncaught exception of type std::runtime_error: no device\n",
            "std::runtime_error: no device",
        ),
    ],
)
def test_the_c_plus_plus_runtimes_abort_is_read(text: str, words: str) -> None:
    assert said(text) == words


@pytest.mark.parametrize("text", ["terminate called without an active exception\n", "Fatal Python error: Aborted\n"])
def test_an_abort_without_an_exception_says_no_more_than_its_signal(text: str) -> None:
    assert read(text) == []


def test_what_an_abort_says_names_the_rank() -> None:
    (words,) = read(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 5] Process group watchdog thread terminated with exception: x\n"
    )
    assert words.line.rank == 5


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[E ProcessGroupNCCL.cpp:916] [Rank 5] NCCL watchdog thread terminated with exception: CUDA error: x", None),
        (
            "[rank5]:[E626 ProcessGroupNCCL.cpp:2] [Rank 5] Watchdog thread terminated with exception: CUDA error: x",
            5,
        ),
    ],
)
def test_the_watchdog_threads_end_is_read(line: str, rank: int | None) -> None:
    (words,) = read(line)
    assert words.text.lower().endswith("watchdog thread terminated with exception: cuda error: x")
    assert words.line.rank == rank


@pytest.mark.parametrize(
    ("line", "text", "pid"),
    [
        (
            "gpu-a:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got async event : port error",
            "NET/IB : Got async event : port error",
            984,
        ),
        (
            "[2026-05-04 19:55:27] GPU-606:534134:535429 [1] net_ib/p2p.cc:325 NCCL WARN NET/IB: Device 0 failed",
            "NET/IB: Device 0 failed",
            534_134,
        ),
    ],
)
def test_a_warning_of_nccl_is_read_with_its_process(line: str, text: str, pid: int) -> None:
    (words,) = read(line)
    assert (words.kind, words.text, words.pid) == ("warning", text, pid)


TABLE = """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-09-27_10:00:01
  host      : n1.example.org
  rank      : 13 (local_rank: 5)
  exitcode  : -6 (pid: 4242) (SIGABRT)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 4242
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-09-27_10:00:00
  host      : n1.example.org
  rank      : 12 (local_rank: 4)
  exitcode  : 1 (pid: 4241)
  error_file: /tmp/error.json
  traceback : Traceback (most recent call last):
    File "/work/train.py", line 3, in main
      step()
  ValueError: no batch

============================================================
""".replace("\n\n", "\n  \n")


def failures(text: str) -> list[RankFailure]:
    table = FailureTable()
    return [found for line in text.splitlines() if (found := table.read_line(without_prefixes(line).text)) is not None]


def test_torchruns_table_says_how_each_rank_ended() -> None:
    second, first = failures(TABLE)
    assert (second.host, second.rank, second.local_rank, second.exit_code, second.pid) == (
        "n1.example.org",
        *(13, 5, -6, 4242),
    )
    assert second.traceback is None
    assert (first.rank, first.exit_code) == (12, 1)
    assert first.traceback is not None
    assert first.traceback.text == '  File "/work/train.py", line 3, in main\n    step()\nValueError: no batch'


@given(st.lists(st.sampled_from(TABLE.splitlines()), max_size=60))
def test_no_order_of_lines_breaks_the_table(lines: list[str]) -> None:
    assert all(failure.rank in (12, 13) for failure in failures("\n".join(lines)))


@given(
    st.lists(
        st.sampled_from([HEADER, FRAME, "ValueError: x\n", NCCL, "terminate called \n", "  what():  y\n", "\n", "z\n"])
    )
)
def test_no_order_of_lines_breaks_the_reader(lines: list[str]) -> None:
    assert all(words.lines for words in read("".join(lines)))


@given(st.lists(st.text(max_size=3_000), min_size=1, max_size=8))
def test_what_is_sent_keeps_within_its_limit(texts: list[str]) -> None:
    words = [LastWords(without_prefixes(""), "traceback", lines=[text]) for text in texts]
    assert len(text_of(words).encode()) <= TEXT_BYTES_MAX


def test_a_long_message_keeps_its_place_and_its_last_line() -> None:
    text = text_of(read(HEADER + FRAME + "ValueError: x\n" + "y" * 500 + "\n" + "z" * 3_000 + "\n" + UNREACHED))
    assert text.startswith(FRAME + "ValueError: x")
    assert text.endswith(UNREACHED)


def test_an_abort_behind_a_traceback_is_its_end_alone() -> None:
    words = read(HEADER + FRAME + "KeyError: 3\n\nterminate called after throwing an instance of 'E'\n")
    assert text_of(words) == FRAME + "KeyError: 3"


def test_a_device_named_by_an_abort_behind_a_traceback_is_kept() -> None:
    ended = "[E ProcessGroupNCCL.cpp:916] [Rank 5] NCCL watchdog thread terminated with exception: CUDA error: "
    text = text_of(
        read(HEADER + FRAME + "RuntimeError: NCCL timeout\n" + ended + "uncorrectable ECC error encountered")
    )
    assert text.startswith(FRAME + "RuntimeError: NCCL timeout")
    word = device_word(text)
    assert word is not None
    assert word.name == "memory"


class TestOfOneNode:
    @pytest.fixture
    def site(self, tmp_path: Path, clock: FakeClock) -> Site:
        return Site(tmp_path, clock)

    def test_the_message_that_goes_on_in_the_next_collection_is_whole(self, site: Site) -> None:
        site.runs(0, size=1)
        log = site.log()
        site.writes_to(0, log)
        agent = site.agent()
        site.collect(agent)
        append(log, HEADER + FRAME + NCCL)
        site.collect(agent)
        append(log, UNREACHED + "\n")
        site.ends()
        (event,) = site.collect(agent).events
        assert event.attributes["text"].endswith(UNREACHED)

    def test_an_abort_is_the_error_of_the_rank_that_ended(self, site: Site) -> None:
        site.runs(5)
        log = site.log()
        site.writes_to(5, log)
        agent = site.agent()
        site.collect(agent)
        append(
            log,
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            "  what():  [Rank 5] watchdog: CUDA error: uncorrectable ECC error encountered\n",
        )
        site.ends()
        (event,) = site.collect(agent).events
        assert (event.kind, event.device) == ("training_error", 5)
        assert cause(event.attributes["text"]) == "device"

    def test_a_warning_is_told_at_once_and_only_once(self, site: Site) -> None:
        site.runs(4)
        log = site.log()
        site.writes_to(4, log)
        agent = site.agent()
        site.collect(agent)
        for length in (65536, 4096):
            append(log, f"gpu-a:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : status=12 len={length}\n")
        (event,) = site.collect(agent).events
        assert (event.kind, event.device) == ("nccl_warning", 4)
        assert event.attributes == {"text": "NET/IB : status=12 len=65536", "rank": 4, "job": "j", "attempt": 0}

    def test_a_warning_of_another_host_is_not_taken_by_its_number(self, site: Site) -> None:
        site.runs(*range(8), size=16)
        console = site.log("console.log")
        agent = site.agent("console.log")
        site.collect(agent)
        for host in ("elsewhere", os.uname().nodename):
            append(console, f"{host}:1003:1357 [3] ib_plugin.c:1615 NCCL WARN NET/IB : port error of {host}\n")
        events = site.collect(agent).events
        assert [(event.device, "elsewhere" in event.attributes["text"]) for event in events] == [(3, False)]

    def test_a_rank_gone_before_it_was_found_is_told_by_its_launchers_table(self, site: Site) -> None:
        site.runs(12, size=16)
        log = site.log()
        site.writes_to(12, log)
        agent = site.agent()
        site.collect(agent)
        append(log, TABLE.replace("n1.example.org", os.uname().nodename).replace("rank      : 12", "rank      : 11"))
        events = site.collect(agent).events
        assert kinds(events) == ["process_exit", "process_exit", "training_error"]
        assert events[0].attributes == {
            "exit_code": -6,
            "pid": 4242,
            "goodbye": False,
            "rank": 13,
            "job": "j",
            "attempt": 0,
        }
        assert events[0].device == 5

    def test_a_table_of_another_host_is_left_to_its_agent(self, site: Site) -> None:
        site.runs(0, size=16)
        log = site.log()
        site.writes_to(0, log)
        agent = site.agent()
        site.collect(agent)
        append(log, TABLE)
        assert site.collect(agent).events == []


@pytest.mark.skipif(DATA is None, reason="EAGLE_EYE_DATA does not name the folder with the reports")
@pytest.mark.parametrize(
    ("file", "causes"),
    [
        ("t01_devices_unavailable", ["device"]),
        ("t02_nccl_net_ib_12", ["own", "own", "own", "echo"]),
        ("t03_device_failed_229", ["own"]),
        ("t04_watchdog_elder", ["echo"]),
        ("t05_cpp_abort_ecc", ["device"]),
        ("t06_cpp_watchdog_ecc_E", ["device", "device"]),
    ],
)
def test_reported_logs_are_read(file: str, causes: list[str]) -> None:
    assert DATA is not None
    found = read((DATA / f"real/reports/{file}.log").read_text())
    assert [cause(words.text) for words in found] == causes


@pytest.mark.slow
def test_what_pytorch_and_torchrun_really_write_is_understood(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install eagle-eye[ml]")
    program = tmp_path / "train.py"
    program.write_text(
        "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\n"
        "if d.get_rank() == 1:\n    raise RuntimeError('of rank 1')\nd.barrier()\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--role", "rank", "--tee", "3", "--log-dir", str(tmp_path / "logs"), str(program)]
    done = subprocess.run(launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False)
    found = {words.line.rank: words.text for words in read(done.stdout)}
    place, *_, error = found[1].splitlines()
    assert place.endswith('train.py", line 5, in <module>')
    assert error == "RuntimeError: of rank 1"
    assert None not in found
    ended = {failure.rank: failure.exit_code for failure in failures(done.stdout)}
    assert ended[1] == 1
    (own,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert "RuntimeError: of rank 1" in own.read_text()
