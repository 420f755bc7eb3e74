from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.agent.collector import Observed
from eagle_eye.agent.collectors.training_log import TrainingLogCollector
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.followed_logs import LINGER_S, LOOK_S
from tests.agent.fakes import FakeClock, script, until
from tests.agent.training_log_site import FRAME, HEADER, Site, append, iteration, kinds


@pytest.fixture
def site(tmp_path: Path, clock: FakeClock) -> Site:
    return Site(tmp_path, clock)


def test_a_real_process_that_writes_to_a_file_is_read(site: Site) -> None:
    log = site.folder / "out.log"
    program = """
        import os, sys
        output = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        print("ready", flush=True)
        os.dup2(output, 2)
        os.dup2(output, 1)
        print("[titan] starting", flush=True)
        for line in sys.stdin:
            if "fail" in line:
                raise RuntimeError("the disk is full")
            print(line, end="", flush=True)
    """
    with script(program, str(log)) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdout.readline()
        until(lambda: log.exists() and log.stat().st_size > 0)
        site.processes.publish([TrainingProcess(running.pid, "j", 0, 1, 0)])
        agent = TrainingLogCollector(site.processes, site.drops, monotonic_s=site.clock.monotonic_s)
        agent.collect(site.clock.now_s())
        running.stdin.write(iteration(3))
        running.stdin.flush()
        until(lambda: b"iteration" in log.read_bytes())
        assert site.collect(agent).devices[0]["train_step"] == 3.0
        running.stdin.write("fail\n")
        running.stdin.flush()
        running.wait()
        (event,) = site.collect(agent).events
        *place, error = event.attributes["text"].splitlines()
        assert error == "RuntimeError: the disk is full"
        assert place[0].endswith("in <module>")
        agent.close()


def test_a_rank_with_the_hook_is_not_told_twice(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    site.hooked = {0}
    append(log, iteration(10) + HEADER + FRAME + "ValueError: x\n")
    site.alive.clear()
    assert site.collect(agent) == Observed()
    assert agent.steps == {}


def test_the_error_that_ended_a_process_is_told_with_its_rank(site: Site) -> None:
    site.runs(3)
    out, errors = site.log("out"), site.log("err")
    site.writes_to(3, out)
    site.writes_to(3, errors, 2)
    agent = site.agent()
    site.collect(agent)
    append(errors, HEADER + FRAME)
    site.collect(agent)
    append(errors, "torch.OutOfMemoryError: CUDA out of memory. api_key=abcd1234\n\nmore\n")
    assert site.collect(agent).events == []
    site.ends()
    (event,) = site.collect(agent).events
    text = FRAME + "torch.OutOfMemoryError: CUDA out of memory. api_key=[redacted]"
    assert event.attributes == {"text": text, "rank": 3, "job": "j", "attempt": 0}
    assert (event.kind, event.device) == ("training_error", 3)
    assert site.collect(agent).events == []


def test_an_error_is_told_with_what_it_was_raised_for(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    handling = "\nDuring handling of the above exception, another exception occurred:\n\n"
    append(log, HEADER + FRAME + "ConnectionError: gone\n" + handling + HEADER + FRAME + "ValueError: no batch\n")
    site.collect(agent)
    site.ends()
    (event,) = site.collect(agent).events
    assert event.attributes["text"] == FRAME + "ConnectionError: gone\n" + HEADER + FRAME + "ValueError: no batch"


def test_an_error_before_the_next_step_was_caught(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    append(log, iteration(1) + HEADER + FRAME + "ConnectionError: retrying\n" + iteration(2))
    site.collect(agent)
    site.ends()
    assert site.collect(agent).events == []


def test_last_words_after_the_end_are_still_read(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    site.ends()
    site.collect(agent)
    append(log, iteration(7) + HEADER + FRAME + "ValueError: late\n")
    observed = site.collect(agent)
    assert observed.devices[0]["train_step"] == 7.0
    assert kinds(observed.events) == ["training_error"]
    site.collect(agent, LINGER_S + LOOK_S)
    assert agent._logs.all() == []


def test_a_local_prefix_blames_no_rank_of_another_node(site: Site) -> None:
    site.runs(0, size=16)
    console = site.log("console.log")
    agent = site.agent("console.log")
    site.collect(agent)
    for line in (HEADER + FRAME + "ValueError: of the other node's first rank\n").splitlines():
        append(console, f"[rank0]:{line}\n")
    site.ends()
    observed = site.collect(agent)
    assert observed.events == []
    assert "nothing says which rank" in observed.problem
