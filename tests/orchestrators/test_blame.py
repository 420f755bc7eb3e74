"""Whose failure it is: of the script, which no restart helps, or perhaps of a node."""

from __future__ import annotations

import pytest

from eagle_eye.detectors.signs import exits
from eagle_eye.orchestrators.launch import blame
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.blame import Raised, exception, scripts_own
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


def test_the_launcher_and_the_detectors_know_the_same_words_for_a_connection_that_could_not_be_made() -> None:
    assert blame.CANNOT_CONNECT.pattern == exits.CANNOT_CONNECT.pattern
