"""Standbys: processes that have imported torch and become ranks, like what an interpreter would have executed."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from eagle_eye.orchestrators.launch import standby_process, standbys
from eagle_eye.orchestrators.launch.messages import (
    Configure,
    Ended,
    FromRunner,
    Ping,
    Prepare,
    Ready,
    Start,
    Started,
    ToRunner,
    decode_from_runner,
    line,
)
from eagle_eye.orchestrators.launch.standbys import REPLACED_AFTER_S, StandbyKeeper

PATIENCE_S = 90.0
START = Start(
    attempt=1, run_id="j-1", node="n1", node_rank=0, nodes=1, ranks_per_node=2, store_host="127.0.0.1", store_port=1,
    env={"EAGLE_EYE_ATTEMPT": "1"}, command=["train.py"], log_dir="",
)  # fmt: skip
LIKENESS = "from eagle_eye.orchestrators.launch.elastic import *; "
# Speaks as a standby does, and imports nothing; what it is told to import is what it says.
STAND_IN = """
import json, os, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
prepare = json.loads(control.recv(1 << 16))
control.send(json.dumps({"reason": " ".join(prepare["imports"]), "rss_bytes": 3 << 20}).encode())
while True:
    content, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
    if not content:
        break
    os.write(descriptors[0], str(json.loads(content)["attempt"]).encode())
    os.close(descriptors[0])
    control.send(b'{"pid": 1}')
"""


def python(code: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **more}
    command = [sys.executable, "-u", "-c", code, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def runs(script: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    return python(LIKENESS + f"run_as_main([{str(script)!r}, *{list(words)!r}])")


def test_proc_says_of_a_fork_what_it_would_say_of_an_executed_process() -> None:
    code = LIKENESS + (
        "import psutil; os.environ.update(RANK='3', ROOM=''); del os.environ['ROOM']; "
        "assert show(['python', '-u', 'train.py'], os.environ); me = psutil.Process(); "
        "assert me.environ()['RANK'] == '3'; assert me.environ()['HOME'] == os.environ['HOME']; "
        "assert [word for word in me.cmdline() if word.strip()] == ['python', '-u', 'train.py'], me.cmdline(); "
        "assert 'ROOM' not in me.environ(); import subprocess; "
        "said = subprocess.check_output(['sh', '-c', 'echo $RANK $HOME'], text=True); "
        "assert said.split() == ['3', '/somewhere'], said"
    )
    done = python(code, " " * 100, ROOM="." * 100, HOME="/somewhere")
    assert (done.returncode, done.stderr) == (0, "")


def test_where_there_is_little_room_the_new_variables_are_shown() -> None:
    code = LIKENESS + (
        "import psutil; os.environ.update(RANK='3', LOCAL_RANK='1'); show(['python', 'x' * 5000], os.environ); "
        "shown = psutil.Process().environ(); assert (shown['RANK'], shown['LOCAL_RANK']) == ('3', '1'), shown"
    )
    done = python(code, FILLS="a" * 10, IT="b" * 10)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import os; os._exit(0)", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_script_ends_with_the_exit_code_that_it_would_have(tmp_path: Path, text: str, code: int, stderr: str) -> None:
    done = runs(tmp_path / "train.py", text)
    assert done.returncode == code
    assert done.stderr.endswith(stderr)


def test_a_script_is_main_with_its_words_and_its_end_runs_what_it_registered(tmp_path: Path) -> None:
    text = (
        "import atexit, concurrent.futures, sys, threading, time\n"
        "pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(print, 'pooled').result()\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "atexit.register(print, 'at exit')\n"
        "print(__name__, __file__, *sys.argv[1:])\n"
    )
    script = tmp_path / "train.py"
    done = runs(script, text, "--lr", "3e-4")
    assert done.stdout.splitlines() == ["pooled", f"__main__ {script} --lr 3e-4", "thread", "at exit"]


def test_a_module_is_run_as_python_m_would(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text("import sys; print(__name__, sys.argv)")
    code = LIKENESS + f"sys.path[0] = {str(tmp_path)!r}; run_as_main(['-m', 'training', 'a'])"
    assert python(code).stdout == f"__main__ {[str(tmp_path / 'training.py'), 'a']}\n"


def test_files_of_the_parent_are_let_go_and_their_numbers_are_not_used_again(tmp_path: Path) -> None:
    code = LIKENESS + (
        "kept = os.open(sys.argv[1], os.O_RDONLY); ours, theirs = os.pipe(); forget({kept}); "
        "assert os.read(kept, 4) == b'data'; assert os.read(ours, 1) == b'', 'it is /dev/null'; "
        "assert os.open(sys.argv[1], os.O_RDONLY) > theirs"
    )
    (tmp_path / "file").write_text("data")
    assert python(code, str(tmp_path / "file")).returncode == 0


def test_handlers_of_the_parent_are_gone() -> None:
    code = LIKENESS + (
        "signal.signal(signal.SIGTERM, print); signal.signal(signal.SIGINT, print); default_signals(); "
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler; "
        "assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN"
    )
    assert python(code).returncode == 0


class Delivered:
    """A keeper, and the loop of a runner that turns it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.selector = selectors.DefaultSelector()
        self.keeper = StandbyKeeper(self.selector, lambda: self.now_s)

    def until(self, what: Callable[[], object]) -> None:
        until_s = time.monotonic() + 20.0
        while not what():
            assert time.monotonic() < until_s
            for key, _ in self.selector.select(0.1):
                key.data()

    def prepares(self, *imports: str) -> str:
        keeper = self.keeper
        keeper.prepare(Prepare(["train.py"], list(imports)))
        self.until(lambda: "being prepared" not in keeper.text)
        return keeper.text

    def starts(self) -> bytes | None:
        read_end, write_end = os.pipe()
        taken = self.keeper.start(START, write_end)
        os.close(write_end)
        with open(read_end, "rb") as said:  # noqa: PTH123
            return said.read() if taken else None


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Delivered]:
    monkeypatch.setattr(standbys, "PROCESS", ("-S", "-c", STAND_IN))
    made = Delivered()
    yield made
    made.keeper.close()
    assert not made.selector.get_map()


def test_a_standby_takes_one_attempt_after_the_other(delivered: Delivered) -> None:
    assert delivered.starts() is None
    assert delivered.prepares() == "ready: torch imported, 3 MiB"
    assert [delivered.starts(), delivered.starts()] == [b"1", b"1"]
    assert delivered.keeper.outcome(0.0) == ""


def test_one_that_cannot_be_used_is_reported_and_not_tried_again_and_again(delivered: Delivered) -> None:
    assert delivered.prepares("three", "threads") == "not used: three threads"
    assert delivered.keeper.outcome(0.0) == "three threads"
    assert delivered.starts() is None
    delivered.now_s += 1e6
    delivered.keeper.tend()
    assert (delivered.keeper.pid, delivered.keeper.why_not) == (None, "three threads")


def test_one_that_has_ended_is_replaced_after_a_while_and_later_each_time(delivered: Delivered) -> None:
    delivered.prepares()
    for wait_s in (REPLACED_AFTER_S, 2 * REPLACED_AFTER_S):
        first = delivered.keeper.pid
        assert first is not None
        psutil.Process(first).kill()
        delivered.until(lambda: delivered.keeper.pid is None)
        assert delivered.keeper.text == "not used: it has ended"
        delivered.now_s += wait_s - 1.0
        delivered.keeper.tend()
        assert delivered.keeper.pid is None
        delivered.now_s += 1.0
        delivered.keeper.tend()
        delivered.until(lambda: delivered.keeper.text.startswith("ready"))
        assert delivered.keeper.pid not in (None, first)


def test_one_that_dies_as_it_is_asked_leaves_the_attempt_to_others(delivered: Delivered) -> None:
    delivered.prepares()
    process = psutil.Process(delivered.keeper.pid)
    process.suspend()
    process.kill()
    assert delivered.starts() is None
    assert "does not take the attempt" in delivered.keeper.why_not


def test_one_that_is_late_is_not_waited_for(delivered: Delivered) -> None:
    delivered.keeper.prepare(Prepare(["train.py"]))
    reason = delivered.keeper.outcome(0.0)
    delivered.keeper.settle(reason)
    assert delivered.keeper.text == "not used: it was not ready within 0 s"
    assert delivered.keeper.pid is None


@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("initialised", [False, True])
def test_one_whose_imports_have_begun_to_use_gpus_is_never_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, initialised: bool, vouched: bool
) -> None:
    device = tmp_path / "nvidia-uvm"
    device.touch()
    monkeypatch.setattr(standby_process, "GPU_DEVICES", (str(device),))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: initialised)))
    with contextlib.nullcontext() if initialised else device.open():
        assert "begun to use GPUs" in standby_process.unsuited(0, vouched=vouched)
    assert ("begun to use GPUs" in standby_process.unsuited(0, vouched=vouched)) == initialised


TRAINING = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
import seen_by_all
assert seen_by_all.loaded_in != os.getpid()
from torch._C._distributed_c10d import _dump_fr_trace_json
import torch
assert "torch._dynamo" in sys.modules, "the first step of any optimizer imports it, which takes as long as a restart"
from eagle_eye.agent.training_hook.sender import Identity, collective_sequences
for _ in range(1 + dist.get_rank()):  # as a rank that its peers wait for would be behind
    work = dist.all_reduce(torch.ones(1), async_op=True)
assert b"all_reduce" in _dump_fr_trace_json(), "without the flight recorder nobody can tell which rank a hang waits for"
threads = os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
print(dist.get_rank(), collective_sequences(sys.modules)[0], threads, sys.argv[1:], flush=True)
print(Identity.of({**os.environ, "EAGLE_EYE_JOB": "j", "EAGLE_EYE_ATTEMPT": "1"}), flush=True)
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
if os.environ["EAGLE_EYE_ATTEMPT"] == "2":
    import time
    time.sleep(1000)
dist.barrier()
os._exit(0)
"""


class Served:
    """A runner in a process of its own."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eagle_eye.orchestrators.launch.runner", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def say(self, message: ToRunner) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line(message))
        self.process.stdin.flush()

    def hears(self, kind: type[FromRunner]) -> FromRunner:
        assert self.process.stdout is not None
        while text := self.process.stdout.readline():
            word = decode_from_runner(text)
            if isinstance(word, kind):
                return word
            self.say(Ping())
        raise AssertionError("the runner has ended")


def said_by(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.stdout.log").read_text()


@pytest.mark.slow
def test_ranks_come_from_a_standby_as_if_they_had_been_spawned_and_end_with_it(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'eagle-eye[ml]'")
    from eagle_eye.orchestrators.launch.store import AttemptStore

    (tmp_path / "seen_by_all.py").write_text("import os\nloaded_in = os.getpid()\n")
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = [str(script), "--lr", "3"]
    served = Served()
    with contextlib.closing(AttemptStore("127.0.0.1", 0)) as store, served.process:
        served.say(Configure({}, lease_s=60.0, node="n1", standby=Prepare(command, ["seen_by_all"], 2)))
        ready = served.hears(Ready)
        assert isinstance(ready, Ready)
        assert ready.standby.startswith("ready: torch, seen_by_all imported")
        start = msgspec.structs.replace(
            START, store_port=store.port, command=command, log_dir=str(tmp_path / "1" / "n1")
        )
        served.say(start)
        assert served.hears(Started)
        assert served.hears(Ended) == Ended(1, success=True)
        first, second = (said_by(tmp_path / "1" / "n1", rank) for rank in range(2))
        assert first.startswith("0 1 ('1', 1) ['--lr', '3']\nIdentity(job='j', attempt=1, rank=0, world_size=2")
        assert second.startswith("1 2 ('1', 1) ['--lr', '3']\nIdentity(job='j', attempt=1, rank=1, world_size=2")

        again = msgspec.structs.replace(
            start, attempt=2, run_id="j-2", log_dir=str(tmp_path / "2" / "n1"), env={"EAGLE_EYE_ATTEMPT": "2"}
        )
        served.say(again)
        started = served.hears(Started)
        assert isinstance(started, Started)
        assert started.standby
        ranks = [psutil.Process(rank.pid) for rank in started.ranks]
        until_s = time.monotonic() + PATIENCE_S
        while [rank.environ().get("RANK") for rank in ranks] != ["0", "1"]:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert ranks[1].environ()["EAGLE_EYE_ATTEMPT"] == "2"
        assert [word for word in ranks[1].cmdline() if word.strip()] == [sys.executable, "-u", *command]
        served.process.kill()
        _, alive = psutil.wait_procs(ranks, PATIENCE_S)
        assert not alive
