"""The same exception twice on most ranks is the program's: no restart is asked for again, and its owner is told."""

from __future__ import annotations

import msgspec
import pytest

from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident
from tests.server.engine.frames import Fleet
from tests.server.engine.test_respond import Office

TRACEBACK = """Traceback (most recent call last):
  File "/shared/train.py", line 12, in <module>
    main()
  File "/shared/train.py", line 7, in main
    batch = batches[index]
{error}
"""
KEY_ERROR = TRACEBACK.format(error="KeyError: 9941")


def lasting(office: Office, fleet: Fleet, attempt: int, steps: int) -> None:
    """The attempt runs for so many steps from the beginning."""
    fleet.declare(attempt)
    fleet.step, fleet.stopped = 0.0, not steps
    office.take(fleet.run(steps or 3))


def ends(office: Office, fleet: Fleet, error: str = KEY_ERROR, nodes: tuple[str, ...] = ("n0", "n1", "n2")) -> Incident:
    """Ranks of the nodes end with the error; return the attempt's incident, whose action was carried out."""
    for node in nodes:
        who = {"rank": fleet.nodes.index(node), "job": fleet.job, "attempt": fleet.attempt}
        fleet.happens(node, "training_error", text=error.replace("9941", str(who["rank"])), **who)
        fleet.happens(node, "process_exit", exit_code=1, pid=7, goodbye=False, **who)
    fleet.stopped = True
    office.take(fleet.run(6))
    for action in office.actions.values():
        if action.state == "requested":
            office.actions[action.id] = msgspec.structs.replace(action, state="done")
    (incident,) = [i for i in office.incidents.values() if i.attempt == fleet.attempt]
    return incident


def twice(first: int, second: int, error: str = KEY_ERROR, nodes: tuple[str, ...] = ("n0", "n1", "n2")) -> Office:
    """Two attempts of so many steps that end alike."""
    office, fleet = Office(), Fleet()
    for attempt, steps in enumerate((first, second)):
        lasting(office, fleet, attempt, steps)
        ends(office, fleet, error, nodes)
    return office


def faults(office: Office) -> list[str]:
    return [incident.fault for incident in office.incidents.values()]


@pytest.mark.parametrize(("first", "second"), [(20, 20), (20, 9), (0, 0), (20, 0)])
def test_after_the_second_equal_end_no_restart_is_asked_for(first: int, second: int) -> None:
    office = twice(first, second)
    assert faults(office) == ["process_crash", "application_error"]
    assert [action.kind for action in office.actions.values()] == ["restart_job"]


def test_the_owner_is_told_with_the_traceback_and_no_node_is_accused() -> None:
    incident = list(twice(20, 20).incidents.values())[-1]
    assert (incident.node, incident.nodes, incident.application, incident.action) == (None, [], True, "notify")
    assert incident.summary.startswith("KeyError at /shared/train.py:7 in main, at step 20, ended most ranks")
    (reported,) = [item.value for item in incident.evidence if item.metric == "traceback"]
    assert "batch = batches[index]" in str(reported)


def test_an_end_further_in_training_is_helped_by_restarts() -> None:
    office = twice(9, 20)
    assert faults(office) == ["process_crash", "process_crash"]
    assert [action.kind for action in office.actions.values()] == ["restart_job", "restart_job"]


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0]",
        "torch.distributed.DistBackendError: ncclRemoteError",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "RuntimeError: [1] Watchdog caught collective operation timeout",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15",
        "OSError: [Errno 5] Input/output error",
        "RuntimeError: DataLoader worker (pid 31) is killed by signal: Killed.",
        "ValueError: loss is nan",
    ],
)
def test_what_a_sick_peer_may_have_caused_is_restarted_each_time(error: str) -> None:
    assert "application_error" not in faults(twice(20, 20, TRACEBACK.format(error=error)))


def test_what_was_raised_while_a_peers_end_was_handled_is_not_the_programs() -> None:
    gone = TRACEBACK.format(error="RuntimeError: Connection closed by peer [10.0.0.3]:4711")
    handling = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert "application_error" not in faults(twice(20, 20, gone + handling + KEY_ERROR))


def test_a_minority_of_ranks_may_be_a_sick_nodes() -> None:
    assert "application_error" not in faults(twice(20, 20, nodes=("n1",)))


def test_another_exception_is_another_end() -> None:
    office, fleet = Office(), Fleet()
    for attempt, line in enumerate(("line 7", "line 8")):
        lasting(office, fleet, attempt, 20)
        ends(office, fleet, KEY_ERROR.replace("line 7", line))
    assert faults(office) == ["process_crash", "process_crash"]


def test_it_is_known_again_after_ends_of_another_kind_and_by_a_new_engine() -> None:
    office, fleet = Office(), Fleet()
    lasting(office, fleet, 0, 20)
    ends(office, fleet)
    fleet = Fleet()  # the server was started again: nothing but the records is left
    lasting(office, fleet, 1, 20)
    ends(office, fleet, nodes=("n1",))
    lasting(office, fleet, 2, 20)
    assert ends(office, fleet).fault == "application_error"


def test_a_nodes_fault_in_the_same_attempt_still_counts() -> None:
    office, fleet = Office(), Fleet()
    lasting(office, fleet, 0, 20)
    ends(office, fleet)
    lasting(office, fleet, 1, 20)
    ends(office, fleet)
    fleet.happens("n2", "xid", code=79, text="GPU has fallen off the bus.")
    office.take(fleet.run(4))
    last = list(office.actions.values())[-1]
    assert (last.fault, last.kind, last.exclude) == ("gpu_lost", "exclude_node", ["n2"])


def test_a_person_may_say_that_it_is_not_the_programs() -> None:
    office, fleet = Office(), Fleet()
    for attempt in (0, 1):
        lasting(office, fleet, attempt, 20)
        incident = ends(office, fleet)
    office.incidents[incident.id] = msgspec.structs.replace(incident, state="false")
    lasting(office, fleet, 2, 20)
    assert ends(office, fleet).fault == "process_crash"


def test_an_end_of_long_ago_proves_nothing() -> None:
    office, fleet = Office(), Fleet()
    office.settings = PolicySettings(mode="act", verdict_gone_s=10, repeat_window_s=20)
    for attempt in (0, 1):
        lasting(office, fleet, attempt, 20)
        ends(office, fleet)
    assert faults(office) == ["process_crash", "process_crash"]
