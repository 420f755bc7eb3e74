"""A rank's side of a restart point, against a runner that a test plays."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'eagle-eye[checkpoint]'")

from eagle_eye.checkpoint import restart_point, run_restartable
from eagle_eye.schema.restart_names import HOOK_ATTEMPT_VARIABLE, LAST_GROUP_VARIABLE, SOCKET_VARIABLE
from eagle_eye.schema.restart_point import AtPoint, GoOn

CLOSED = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


class Keeper:
    """Keeps steps, as a MemoryCheckpointer does."""

    def __init__(self, captured: int) -> None:
        self.counts = {"captured": float(captured)}
        self.abandoned = False

    def abandon(self) -> None:
        self.abandoned = True


def begins(keeper: Keeper) -> None:
    """As in a training function: the state is restored, the hook attached."""
    restart_point.keeps(keeper)
    os.environ[HOOK_ATTEMPT_VARIABLE] = os.environ["EAGLE_EYE_ATTEMPT"]


class Runner:
    """Takes the rank's words, and tells it to go on as soon as it waits; or ends, if ``gone``."""

    def __init__(self, *, gone: bool = False) -> None:
        self.heard: list[AtPoint] = []
        self.when_it_waits: Callable[[], None] = lambda: None
        self.name = f"eagle-eye-test-{secrets.token_hex(8)}"
        self._gone = gone
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + self.name.encode())
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        rank, _ = self._listener.accept()
        with rank:
            while content := rank.recv(1 << 16):
                said = msgspec.json.decode(content, type=AtPoint)
                self.heard.append(said)
                if said.waits:
                    self.when_it_waits()
                    if self._gone:
                        return
                    env = {"EAGLE_EYE_ATTEMPT": str(said.attempt + 1), "MASTER_PORT": "7"}
                    rank.send(msgspec.json.encode(GoOn(said.attempt + 1, env)))

    def close(self) -> None:
        self._thread.join(10.0)
        self._listener.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    runners: list[Runner] = []

    def launch(*, gone: bool = False) -> Runner:
        runners.append(Runner(gone=gone))
        monkeypatch.setenv(SOCKET_VARIABLE, runners[-1].name)
        return runners[-1]

    for name, value in (("RANK", "3"), ("EAGLE_EYE_ATTEMPT", "1"), ("MASTER_PORT", "6")):
        monkeypatch.setenv(name, value)
    for name in (LAST_GROUP_VARIABLE, HOOK_ATTEMPT_VARIABLE):  # they are as before once the test has ended
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    yield launch
    for runner in runners:
        runner.close()


def test_after_a_broken_collective_the_training_is_called_again_in_the_next_attempt(
    launched: Callable[..., Runner],
) -> None:
    runner = launched()
    keepers: list[Keeper] = []

    def train() -> tuple[str, str]:
        keepers.append(Keeper(captured=5))
        begins(keepers[-1])
        if len(keepers) == 1:
            raise RuntimeError(CLOSED)
        return os.environ["EAGLE_EYE_ATTEMPT"], os.environ["MASTER_PORT"]

    assert run_restartable(train) == ("2", "7")
    runner.close()
    assert [(said.rank, said.attempt, said.waits) for said in runner.heard] == [
        (3, 1, False),
        (3, 1, True),
        (3, 2, False),
    ]
    assert "Connection closed by peer" in runner.heard[1].reason
    assert [keeper.abandoned for keeper in keepers] == [True, False]


def test_what_the_training_held_is_gone_before_its_rank_waits(launched: Callable[..., Runner]) -> None:
    runner = launched()
    held: list[weakref.ref[Keeper]] = []
    alive: list[bool] = []
    runner.when_it_waits = lambda: alive.append(held[0]() is not None)

    def train() -> None:
        model = Keeper(captured=1)
        model.itself = model  # type: ignore[attr-defined]  # wrapped models hold their groups in such cycles
        held.append(weakref.ref(model))
        begins(model)
        if len(held) == 1:
            raise RuntimeError(CLOSED)

    run_restartable(train)
    assert alive == [False]


@pytest.mark.parametrize(
    ("captured", "error"),
    [
        pytest.param(5, ValueError("no more data"), id="its own"),
        pytest.param(5, RuntimeError("ProcessGroupGloo::allreduce: unsupported layout"), id="of what it hands to gloo"),
        pytest.param(0, RuntimeError(CLOSED), id="before the first step was kept"),
    ],
)
def test_any_other_error_is_the_callers(captured: int, error: Exception, launched: Callable[..., Runner]) -> None:
    runner = launched()

    def train() -> None:
        begins(Keeper(captured))
        raise error

    with pytest.raises(type(error)):
        run_restartable(train)
    runner.close()
    assert [said.waits for said in runner.heard] == [False]


def test_a_rank_whose_hook_was_not_attached_in_the_training_ends(launched: Callable[..., Runner]) -> None:
    runner = launched()
    os.environ[HOOK_ATTEMPT_VARIABLE] = "1"  # attached before: its report would stay one of this attempt

    def train() -> None:
        restart_point.keeps(Keeper(captured=5))
        raise RuntimeError(CLOSED)

    with pytest.raises(RuntimeError, match="closed by peer"):
        run_restartable(train)
    runner.close()
    assert [said.waits for said in runner.heard] == [False]


def test_a_rank_whose_launcher_goes_while_it_waits_ends(launched: Callable[..., Runner]) -> None:
    launched(gone=True)

    def train() -> None:
        begins(Keeper(captured=5))
        raise RuntimeError(CLOSED)

    with pytest.raises(ConnectionError, match="has ended while this rank waited"):
        run_restartable(train)


@pytest.mark.parametrize("socket_name", ["", "eagle-eye-test-nobody-listens"])
def test_without_a_launcher_the_training_is_called_once(socket_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((SOCKET_VARIABLE, socket_name), ("RANK", "3"), ("EAGLE_EYE_ATTEMPT", "1")):
        monkeypatch.setenv(name, value)
    calls: list[int] = []

    def train() -> None:
        calls.append(1)
        raise RuntimeError(CLOSED)

    with pytest.raises(RuntimeError, match="closed by peer"):
        run_restartable(train)
    assert calls == [1]


def test_with_gpus_the_rank_has_no_restart_point(
    launched: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = launched()
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert run_restartable(lambda: 7) == 7
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:  # for the runner to end
        other.connect(b"\0" + runner.name.encode())
    runner.close()
    assert runner.heard == []
