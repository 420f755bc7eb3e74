"""Whose failure it is: of the script, which no restart helps, or perhaps of a node."""

from __future__ import annotations

import pytest

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.blame import Raised, cannot_run, exception, scripts_own
from eagle_eye.orchestrators.launch.state import Phase
from tests.orchestrators.test_machine import Story, failed, restart

KEY = """rank 1: Traceback (most recent call last):
  File "/shared/train.py", line 12, in <module>
    main()
  File "/shared/train.py", line 7, in main
    batch = batches[9941]
            ~~~~~~~^^^^^^
KeyError: 9941
"""


def of_rank(text: str) -> str:
    return "\n".join(f"[rank1]: {line}" for line in text.splitlines())


def raised(message: str) -> str:
    return KEY.replace("KeyError: 9941", message)


@pytest.mark.parametrize("log", [KEY, of_rank(KEY), KEY.replace("9941", "17"), f"{KEY}W1122 one more line\n", KEY[60:]])
def test_an_exception_is_told_by_its_place_and_line_without_numbers(log: str) -> None:
    assert exception(log) == "/shared/train.py:7: KeyError: #"


@pytest.mark.parametrize(
    "log",
    [
        "",
        "Killed",
        "no traceback: just words",
        raised("torch.distributed.DistBackendError: NCCL error"),
        raised("RuntimeError: [enforce fail] Connection closed by peer"),
        raised("RuntimeError: CUDA error: an illegal memory access was encountered"),
        raised("ConnectionResetError: [Errno 104] Connection reset by peer"),
        raised("OSError: [Errno 5] Input/output error"),
        raised("KeyboardInterrupt"),
    ],
)
def test_what_a_node_or_a_network_may_have_done_is_not_the_scripts(log: str) -> None:
    assert exception(log) == ""


def test_it_is_the_scripts_only_again_on_another_node_and_without_progress() -> None:
    first = Raised(50).and_also("n1", KEY)
    assert "on n1, n2" in scripts_own(first, Raised(50).and_also("n2", KEY))
    assert scripts_own(first, first) == ""
    assert scripts_own(first, Raised(75).and_also("n2", KEY)) == ""
    assert scripts_own(first, Raised(50).and_also("n2", raised("ValueError: x"))) == ""
    assert scripts_own(Raised(), Raised()) == ""


def fails(story: Story, *nodes: str, log: str = KEY) -> None:
    for node in nodes:
        story.happens(failed(node, story.state.attempt, detail=log))
    story.passes(600.0)


def test_the_launcher_does_not_restart_a_script_that_fails_in_the_same_way_again() -> None:
    story = Story().running()
    fails(story, "n1", "n3")
    story.stopped("n1", "n2", "n3")
    story.starts()
    fails(story, "n2")
    assert story.state.phase == "failed"
    assert story.ordered(to.End)[0].reason.startswith("the same exception again, on n1, n2, n3: /shared/train.py:7")


def test_it_counts_the_end_that_eagle_eye_restarted_for() -> None:
    story = Story().running()
    story.happens(*(failed(node, detail=KEY) for node in ("n1", "n2")), restart())
    story.stopped("n1", "n2", "n3")
    story.starts()
    fails(story, "n2")
    assert story.state.phase == "failed"


def test_it_counts_the_end_that_a_killed_launcher_restarted_for() -> None:
    story = Story().running()
    fails(story, "n1", "n2")
    story.stopped("n1", "n2", "n3")
    story.is_killed_and_started_again()
    story.running()
    fails(story, "n2")
    assert story.state.phase == "failed"


def test_who_starts_the_job_again_by_hand_has_changed_something() -> None:
    story = Story().running()
    fails(story, "n1", "n2")
    story.stopped("n1", "n2", "n3")
    story.starts()
    fails(story, "n1", "n2")
    story.is_killed_and_started_again()
    story.running()
    fails(story, "n1", "n2")
    assert story.state.phase != "failed"


def test_it_does_where_the_node_may_be_the_cause() -> None:
    story = Story().running()
    for _ in range(3):
        fails(story, "n1")
        story.stopped("n1", "n2", "n3")
        assert story.state.phase == "starting"
        story.starts()
    fails(story, "n1")
    assert "restarts are used up" in story.ordered(to.End)[0].reason


SYNTAX = """rank 0:   File "/shared/train.py", line 3
    def main(:
             ^
SyntaxError: invalid syntax
"""
NO_FILE = "rank 0: /usr/bin/python3: can't open file '/shared/trian.py': [Errno 2] No such file or directory"
USAGE = """rank 0: usage: train.py [-h] [--lr LR]
train.py: error: unrecognized arguments: --learning-rate 3"""
NO_CONFIG = """rank 0: Traceback (most recent call last):
  File "/shared/train.py", line 5, in <module>
    open("/shared/config.toml")
FileNotFoundError: [Errno 2] No such file or directory: '/shared/config.toml'
"""


def dies(story: Story, *nodes: str, log: str, in_touch: bool = True) -> None:
    attempt = story.state.attempt
    story.happens(*(on.RanksEnded(node, attempt, False, ((0, 2),), log, in_touch) for node in nodes))
    story.passes(600.0)


def twice(log: str) -> Story:
    """A job of one node that ends twice in this way before its first step."""
    story = Story(least=1, wanted=1).running()
    dies(story, "n1", log=log)
    story.stopped("n1")
    story.starts()
    dies(story, "n1", log=log)
    return story


def reason(story: Story) -> str:
    return story.ordered(to.End)[0].reason


@pytest.mark.parametrize(
    "log",
    [
        SYNTAX,
        SYNTAX.replace("SyntaxError", "IndentationError"),
        NO_FILE,
        "rank 0: /opt/venv/bin/python: No module named trian",
        "rank 0: /usr/bin/python3: can't find '__main__' module in '/shared'",
    ],
)
def test_a_script_that_cannot_begin_is_told_from_one_that_ended(log: str) -> None:
    assert cannot_run(log)


@pytest.mark.parametrize("log", [KEY, USAGE, NO_CONFIG, "", SYNTAX.replace("/shared/train.py", "<unknown>")])
def test_a_script_that_began_is_not_one_that_cannot(log: str) -> None:
    assert not cannot_run(log)


@pytest.mark.parametrize(("log", "last"), [(SYNTAX, "SyntaxError: invalid syntax"), (NO_FILE, NO_FILE[8:])])
def test_a_script_that_cannot_run_is_tried_once(log: str, last: str) -> None:
    story = Story(least=1, wanted=1).running()
    dies(story, "n1", log=log)
    assert reason(story).startswith(f"the script cannot run, on n1: {last}")


def test_a_script_that_one_node_of_three_lacks_is_tried_again() -> None:
    story = Story().running()
    dies(story, "n2", log=NO_FILE)
    assert story.is_in(Phase.GATHERING)


def test_a_script_that_two_nodes_lack_is_tried_once_without_a_server() -> None:
    story = Story().running()
    dies(story, "n1", "n2", log=NO_FILE, in_touch=False)
    assert reason(story).startswith("the script cannot run, on n1, n2: ")


@pytest.mark.parametrize("log", [USAGE, NO_CONFIG, KEY])
def test_the_same_end_before_a_first_step_is_the_scripts(log: str) -> None:
    story = twice(log)
    assert log.rstrip().splitlines()[-1] in reason(story)
    assert "a restart does not help" in reason(story)


@pytest.mark.parametrize(
    "log",
    [
        raised("RuntimeError: No CUDA GPUs are available"),
        raised("torch.distributed.DistNetworkError: the client socket has timed out"),
        raised("OSError: [Errno 5] Input/output error"),
        "rank 0: NCCL WARN Cuda failure 'unknown error'",
        "rank 0: OSError: [Errno 98] Address already in use",
    ],
)
def test_what_hardware_may_have_done_before_a_first_step_is_restarted(log: str) -> None:
    assert twice(log).is_in(Phase.GATHERING)


def test_a_signal_before_a_first_step_is_not_the_scripts() -> None:
    killed = Raised().and_also("n1", "last words", -11, early=True)
    assert scripts_own(killed, killed, members=1) == ""


def test_after_a_first_step_the_same_last_line_is_no_proof() -> None:
    story = Story(least=1, wanted=1).running()
    for _ in range(2):
        story.happens(on.StepSeen(story.state.attempt, 1, 1))
        dies(story, "n1", log=USAGE)
        story.stopped("n1")
        story.starts()
    assert story.is_in(Phase.VERIFYING)
