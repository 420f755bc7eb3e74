from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_eye.agent import hook
from eagle_eye.agent.hook import Training, attach
from eagle_eye.agent.training_hook.message import EVENTS_PER_MESSAGE_MAX, HookMessage
from eagle_eye.agent.training_hook.sender import SENDS_PER_EVENT, Identity, collective_sequences
from tests.agent.fakes import Listener, script, until

QUIET_S = 3600.0  # a heartbeat that never comes during a test


@pytest.fixture(autouse=True)
def sends_when_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "SEND_EVERY_S", QUIET_S)


@pytest.fixture
def training(listener: Listener) -> Iterator[Training]:
    made = attach(socket=listener.path, heartbeat_s=QUIET_S)
    yield made
    made.detach()


def step_and_send(training: Training, **values: Any) -> None:
    training.step(**values)
    if training._sender is not None:
        training._sender.send()


def test_totals_grow_with_each_step(training: Training, listener: Listener) -> None:
    step_and_send(training, loss=1.0, tokens=10)
    step_and_send(training, loss=2.0, tokens=10, grad_norm=5.0, work_units=7.0)
    last = listener.read_last()
    assert last.step == 2
    assert (last.totals.steps, last.totals.losses, last.totals.loss) == (2.0, 2.0, 3.0)
    assert (last.totals.grad_norms, last.totals.grad_norm, last.totals.work_units) == (1.0, 5.0, 7.0)


def test_a_lost_message_loses_nothing(training: Training, listener: Listener) -> None:
    for _ in range(5):
        step_and_send(training, loss=1.0)
    listener.read()  # nobody saw them
    step_and_send(training, loss=1.0)
    assert listener.read_last().totals.loss == 6.0


def test_the_first_step_without_a_model_has_no_duration(training: Training, listener: Listener) -> None:
    step_and_send(training, tokens=10)
    step_and_send(training, tokens=30)
    totals = listener.read_last().totals
    assert (totals.timed_steps, totals.token_steps, totals.timed_tokens) == (1.0, 1.0, 30.0)


def test_what_is_not_finite_is_counted_and_not_summed(training: Training, listener: Listener) -> None:
    for loss in (1.0, float("nan"), float("inf"), 2.0):
        step_and_send(training, loss=loss)
    totals = listener.read_last().totals
    assert (totals.losses, totals.loss, totals.loss_odd) == (2.0, 3.0, 2.0)


def test_a_job_resumes_at_its_step(listener: Listener) -> None:
    training = attach(socket=listener.path, heartbeat_s=QUIET_S, step=1000)
    assert listener.read_last().step == 1000
    step_and_send(training)
    assert listener.read_last().step == 1001
    step_and_send(training, step=2000)
    assert listener.read_last().step == 2000
    training.detach()


def test_values_that_make_no_sense_are_counted_and_the_step_stands(
    training: Training, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    step_and_send(training, loss="high", tokens=object(), work_units=-1.0, grad_norm=[1, 2])
    step_and_send(training, loss="high", tokens=object())
    assert listener.read_last().totals.steps == 2.0
    assert training.failures == 5
    assert len(caplog.records) == 1


def test_a_tensor_on_a_device_is_not_read(training: Training, listener: Listener) -> None:
    class OnDevice:
        is_cpu = False

        def __float__(self) -> float:
            raise AssertionError("reading it waits for the device")

    step_and_send(training, loss=OnDevice())
    last = listener.read_last()
    assert (last.unread, last.totals.losses) == (1, 0.0)
    assert training.failures == 0


def test_a_phase_is_told_when_it_begins_and_ends(training: Training, listener: Listener) -> None:
    step_and_send(training)
    with training.phase("eval"):
        inside = listener.read_last()
    after = listener.read_last()
    assert (inside.phase, after.phase) == ("eval", "train")
    assert [event.value for event in after.events if event.kind == "phase"][-2:] == ["eval", "train"]


def test_a_checkpoint_has_a_begin_and_an_end_with_its_step(training: Training, listener: Listener) -> None:
    training.step()
    with pytest.raises(KeyError), training.phase("checkpoint"):
        raise KeyError("the program's own error passes through")
    events = [(event.kind, event.value) for event in listener.read_last().events]
    assert ("checkpoint_begin", 1) in events
    assert ("checkpoint_end", 1) in events


def test_an_event_is_sent_in_several_messages_with_one_number(training: Training, listener: Listener) -> None:
    for _ in range(10):
        step_and_send(training)
    seen = [event.number for each in listener.read() for event in each.events if event.value == "start"]
    assert seen == [1] * SENDS_PER_EVENT


def test_events_wait_for_an_agent_that_comes_later(tmp_path: Path) -> None:
    training = attach(socket=tmp_path / "later.sock", heartbeat_s=QUIET_S)
    for _ in range(10):
        step_and_send(training)
    late = Listener(tmp_path / "later.sock")
    step_and_send(training)
    last = late.read_last()
    assert [event.value for event in last.events] == ["start", "train"]
    assert last.unsent == 11
    training.detach()
    late.close()


def test_events_are_bounded_while_nobody_listens(tmp_path: Path) -> None:
    training = attach(socket=tmp_path / "nobody.sock", heartbeat_s=QUIET_S)
    for _ in range(100):
        with training.phase("eval"):
            pass
    assert len(training._state.events) == EVENTS_PER_MESSAGE_MAX
    assert training.failures > 0
    training.detach()


def test_a_step_leaves_the_sending_to_another_thread(training: Training, listener: Listener) -> None:
    listener.read()
    for _ in range(1000):
        training.step(loss=1.0)
    assert listener.read() == []


def test_what_is_new_is_sent_before_the_next_heartbeat(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "SEND_EVERY_S", 0.01)
    training = attach(socket=listener.path, heartbeat_s=QUIET_S)
    listener.read()
    training.step(loss=1.0)
    heard: list[HookMessage] = []

    def hears() -> bool:
        heard.extend(listener.read())
        return bool(heard)

    until(hears)
    assert heard[0].step == 1
    time.sleep(0.1)
    assert listener.read() == []  # nothing is new
    training.detach()


def test_the_first_loss_that_is_not_finite_is_sent_at_once(training: Training, listener: Listener) -> None:
    training.step(loss=1.0)
    listener.read()
    for _ in range(3):
        training.step(loss=float("nan"))
    assert [message.totals.loss_odd for message in listener.read()] == [1.0]


def test_the_heartbeat_speaks_while_no_step_ends(listener: Listener) -> None:
    training = attach(socket=listener.path, heartbeat_s=0.01)
    numbers: list[int] = []

    def heard() -> bool:
        numbers.extend(each.number for each in listener.read())
        return len(numbers) >= 4

    until(heard)
    assert numbers == sorted(set(numbers))
    training.detach()


def test_a_reader_that_never_reads_blocks_nobody(training: Training, listener: Listener) -> None:
    begin_s = perf_counter()
    for _ in range(2000):
        step_and_send(training, loss=1.0)
    assert perf_counter() - begin_s < 2.0
    assert training._sender is not None
    assert training._sender.unsent > 1000  # the queue was full


@pytest.mark.parametrize("agent", ["absent", "stopped"])
def test_a_step_costs_less_than_10_us(agent: str, tmp_path: Path, listener: Listener) -> None:
    path = listener.path if agent == "stopped" else tmp_path / "absent.sock"
    training = attach(socket=path)
    costs = []
    for _ in range(5000):
        begin_s = perf_counter()
        training.step(loss=1.0, grad_norm=1.0, tokens=128)
        costs.append(perf_counter() - begin_s)
    training.detach()
    assert statistics.median(costs) < 10e-6


def test_detaching_says_goodbye_and_ends_the_thread(listener: Listener) -> None:
    training = attach(socket=listener.path, heartbeat_s=0.01)
    before = sys.excepthook
    training.detach()
    assert listener.read()[-1].goodbye
    assert "eagle-eye-hook" not in {thread.name for thread in threading.enumerate()}
    assert sys.excepthook is not before
    training.step(loss=1.0)  # and is harmless from here on
    assert training.failures == 0


def test_the_environment_says_which_attempt_is_reported_while_the_hook_is_attached(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_EYE_ATTEMPT", "7")
    training = attach(socket=listener.path, heartbeat_s=QUIET_S)
    assert os.environ["EAGLE_EYE_HOOK_ATTEMPT"] == "7"
    training.detach()
    assert "EAGLE_EYE_HOOK_ATTEMPT" not in os.environ


def test_attaching_again_ends_the_earlier_report(listener: Listener) -> None:
    first = attach(socket=listener.path, heartbeat_s=QUIET_S)
    process = listener.read_last().process
    second = attach(socket=listener.path, heartbeat_s=QUIET_S)
    goodbye, hello = listener.read()
    assert goodbye.goodbye
    assert goodbye.process == process != hello.process
    first.step()
    second.detach()


def test_an_impossible_socket_does_not_stop_training() -> None:
    training = attach(socket="/" + "x" * 500)
    sender = training._sender
    step_and_send(training, loss=1.0)
    training.detach()
    assert sender is not None
    assert sender.unsent > 0
    assert training.failures == 0


def test_a_model_that_is_none_of_torch_costs_only_its_own_timings(listener: Listener) -> None:
    training = attach(model=object(), socket=listener.path, heartbeat_s=QUIET_S)
    step_and_send(training, loss=1.0)
    assert listener.read_last().totals.losses == 1.0
    assert training.failures == 1
    training.detach()


def test_a_forked_child_says_nothing_in_the_ranks_name(training: Training, listener: Listener) -> None:
    listener.read()
    child = os.fork()
    if child == 0:
        step_and_send(training, loss=1.0)
        training.detach()
        os._exit(0)
    os.waitpid(child, 0)
    assert listener.read() == []
    step_and_send(training, loss=1.0)
    assert len(listener.read()) == 1


REPORT = """
    import sys
    from eagle_eye.agent.hook import attach
    training = attach(heartbeat_s=60)
    training.step(loss=1.0)
    {end}
"""


def test_the_end_of_the_program_is_announced(listener: Listener) -> None:
    with script(REPORT.format(end="sys.exit(3)"), EAGLE_EYE_HOOK_SOCKET=str(listener.path)) as program:
        assert program.wait(30) == 3
    last = listener.read_last()
    assert last.goodbye
    assert last.totals.steps == 1.0


def test_an_exception_is_reported_without_secrets_and_still_printed(listener: Listener) -> None:
    end = 'raise ValueError("bad token=abc123 " + "x" * 5000)'
    with script(REPORT.format(end=end), EAGLE_EYE_HOOK_SOCKET=str(listener.path)) as program:
        _, stderr = program.communicate(timeout=30)
    assert program.returncode == 1
    assert "ValueError: bad token=abc123" in stderr
    text = next(event.value for each in listener.read() for event in each.events if event.kind == "training_error")
    assert isinstance(text, str)
    assert len(text) <= 2048
    assert text.rstrip().endswith("x" * 1000)
    assert "abc123" not in text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Identity("default", 0, 0, 1, 0, "", 0)),
        (
            {"EAGLE_EYE_JOB": "a", "SLURM_JOB_ID": "7", "EAGLE_EYE_ATTEMPT": "3", "SLURM_RESTART_COUNT": "1"},
            Identity("a", 3, 0, 1, 0, "", 0),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, Identity("7", 1, 0, 1, 0, "", 0)),
        (
            {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2", "RANK": "5", "WORLD_SIZE": "8"},
            Identity("r", 2, 5, 8, 0, "", 0),
        ),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1"}, Identity("default", 0, 0, 1, 1, "", 1)),
        ({"RANK": "-1", "WORLD_SIZE": "many", "EAGLE_EYE_ROLE": "a\nb"}, Identity("default", 0, 0, 1, 0, "a?b", 0)),
        (
            {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"},
            Identity("default", 0, 0, 1, 1, "", 6, visible_devices="4,6"),
        ),
        (
            {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "5"},
            Identity("default", 0, 0, 1, 3, "", 5, visible_devices="5"),
        ),
    ],
)
def test_the_environment_says_who_we_are(environ: dict[str, str], expected: Identity) -> None:
    assert Identity.of(environ) == expected


GROUP = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 3, get_world_size=lambda: 4)
GROUPED = {"torch.distributed": GROUP}
UNGROUPED = {"torch.distributed": SimpleNamespace(is_initialized=lambda: False)}
LOCAL_ONLY = {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"}  # as Lightning's own launcher starts processes


@pytest.mark.parametrize(
    ("environ", "modules", "expected"),
    [
        (LOCAL_ONLY, GROUPED, (3, 4)),
        ({}, GROUPED, (3, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, GROUPED, (5, 8)),  # torchft: a group spans one replica group's ranks
        ({}, UNGROUPED, (0, 1)),
        ({}, {}, (0, 1)),
        (LOCAL_ONLY, UNGROUPED, None),
        (LOCAL_ONLY, {}, None),
        (LOCAL_ONLY, {"torch.distributed": object()}, None),
    ],
)
def test_the_process_group_numbers_a_rank_that_no_launcher_numbered(
    environ: dict[str, str], modules: dict[str, object], expected: tuple[int, int] | None
) -> None:
    found = Identity.known(environ, modules)
    assert (None if found is None else (found.rank, found.world_size)) == expected


def test_a_process_of_unknown_rank_speaks_once_it_is_known(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "SEND_EVERY_S", 0.01)
    for name, value in LOCAL_ONLY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.distributed", UNGROUPED["torch.distributed"])
    training = attach(socket=listener.path, heartbeat_s=0.01)
    try:
        training.step()
        until(lambda: training.failures > 0)
        assert listener.read() == []
        monkeypatch.setitem(sys.modules, "torch.distributed", GROUPED["torch.distributed"])
        until(lambda: [(each.rank, each.step) for each in listener.read()][-1:] == [(3, 1)])
    finally:
        training.detach()


def modules_with(*groups: tuple[int, int, int]) -> dict[str, object]:
    """A torch whose recorder knows these process groups: number, newest collective enqueued and completed."""
    status = {
        str(number): {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}
        for number, enqueued, completed in groups
    }
    dumped = json.dumps({"pg_status": status}).encode()

    class Distributed:
        @staticmethod
        def is_initialized() -> bool:
            return True

    class Binding:
        @staticmethod
        def _dump_fr_trace_json(_collectives: bool, _active: bool) -> bytes:
            return dumped

    return {"torch.distributed": Distributed, "torch._C._distributed_c10d": Binding}


def test_sequences_are_those_of_the_default_group() -> None:
    assert collective_sequences(modules_with((0, 11, 10), (1, 99, 99))) == (11, 10)


@pytest.mark.parametrize(("over", "reported"), [("1", (5, 4)), ("3", (-1, -1)), ("unknown", (-1, -1))])
def test_in_a_process_that_went_on_they_are_those_of_the_default_group_of_its_own_attempt(
    over: str, reported: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_EYE_LAST_PROCESS_GROUP", over)
    assert collective_sequences(modules_with((0, 811, 810), (1, 99, 99), (2, 5, 4), (3, 7, 7))) == reported


@pytest.mark.parametrize("modules", [{}, {"torch.distributed": object()}])
def test_without_torch_no_sequences_are_observed(modules: dict[str, object]) -> None:
    assert collective_sequences(modules) == (-1, -1)


def test_the_hook_imports_nothing_but_the_library() -> None:
    with script("import sys, eagle_eye.agent.hook; print(*sys.modules)") as program:
        out, _ = program.communicate(timeout=30)
    assert not {"torch", "numpy", "msgspec", "psutil", "pynvml"} & set(out.split())
