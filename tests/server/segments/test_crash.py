"""A process that is killed between any two steps, and any order of what may happen: nothing lost, nothing twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.segment_tables import Step
from tests.server.builders import NOW, FakeClock
from tests.server.segments.kept import WITHIN_S, batch, compact, opened, retain, rich, told

FIRST = [(node, n) for node in ("n1", "n2") for n in (1, 2, 3)]
LATER = [("n1", n) for n in (2_995, 2_996)]

# A fork a step, each killed one step later than the one before, until one comes to its end.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.server.segments import test_crash

for number in range(100):
    child = os.fork()
    if child == 0:
        test_crash.killed_at(Path(sys.argv[1]) / str(number), number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
    if not os.WIFSIGNALED(status):
        break
"""


def fill(history: EmbeddedHistory) -> None:
    for node in ("n1", "n2"):
        history.submit(batch([rich(n, node) for name, n in FIRST if name == node], NOW + 3_000)).result(WITHIN_S)


def killed_at(folder: Path, number: int) -> None:
    """Compact timely and late frames, and die at the step of this number."""
    left = [number]

    def step(_name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)

    with opened(folder) as history:
        fill(history)
        history.submit(batch([rich(n) for _, n in LATER], NOW + 3_000)).result(WITHIN_S)
        compact(history, step)


@pytest.mark.slow  # a process for each of a hundred steps
def test_a_process_that_is_killed_between_any_two_steps_loses_and_doubles_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    killed = [os.waitstatus_to_exitcode(int(status)) == -9 for status in done.stdout.split()]
    assert len(killed) > 12  # two segments of five steps, and what the server does
    assert killed == [True] * (len(killed) - 1) + [False]
    expected = sorted((node, f"stream-{node}", n, rich(n, node)) for node, n in FIRST + LATER)
    for number in range(len(killed)):
        with opened(tmp_path / str(number)) as history:
            assert told(history) == expected
            again = history.submit(batch([rich(n) for n in (1, 2_996, 2_997)], NOW + 3_001)).result(WITHIN_S)
            assert again.new == [False, False, True]
            compact(history)
            assert told(history) == sorted([*expected, ("n1", "stream-n1", 2_997, rich(2_997))])
            named = history.journal.reader.read("SELECT name FROM segments ORDER BY name", ())
            assert sorted(path.name for path in history.segment_store.folder.iterdir()) == [name for (name,) in named]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and the files are as they are."""


things: st.SearchStrategy[tuple[str, str, list[int]]] = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(["n1", "n2"]), st.lists(st.integers(1, 40), min_size=1, max_size=6)),
    st.tuples(st.just("compact"), st.just(""), st.just([])),
    st.tuples(st.just("kill"), st.just(""), st.lists(st.integers(0, 12), min_size=1, max_size=1)),
    st.tuples(st.just("restart"), st.just(""), st.just([])),
    st.tuples(st.just("retain"), st.just(""), st.just([])),
)


@settings(max_examples=8)
@given(st.lists(things, min_size=2, max_size=7))
def test_whatever_happens_in_whatever_order_a_query_tells_what_was_acknowledged(
    happens: list[tuple[str, str, list[int]]],
) -> None:
    acknowledged: dict[tuple[str, int], bytes] = {}
    clock = FakeClock()
    with TemporaryDirectory() as folder:
        pending = list(happens)
        while pending:
            with opened(Path(folder), clock) as history:
                while pending:
                    what, node, numbers = pending.pop(0)
                    clock.advance(400)
                    if what == "submit":
                        raws = [rich(n, node) for n in numbers]
                        appended = history.submit(batch(raws, clock.now_s())).result(WITHIN_S)
                        new = {n for n in numbers if (node, n) not in acknowledged}
                        assert sum(appended.new) == len(new)
                        acknowledged |= {(node, n): raw for n, raw in zip(numbers, raws, strict=True)}
                    elif what == "compact":
                        compact(history)
                    elif what == "kill":
                        try:
                            compact(history, _after(numbers[0]))
                        except Killed:
                            break
                    elif what == "retain":
                        retain(history)
                    else:
                        break
                    expected = sorted((node, f"stream-{node}", n, raw) for (node, n), raw in acknowledged.items())
                    assert told(history) == expected


def _after(steps: int) -> Step:
    left = [steps]

    def step(_name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return step
