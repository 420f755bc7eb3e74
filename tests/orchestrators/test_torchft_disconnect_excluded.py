"""A replica group's wait ends once the node that it waits for is excluded."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.orchestrators.torchft.disconnect_excluded import Release


class Peers:
    """A connection between two nodes of this machine, and the exclude file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "excluded"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.ours = socket.create_connection(listener.getsockname())
            self.theirs = listener.accept()[0]
        self.theirs.setblocking(False)

    def exclude(self, *nodes: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{node}\n" for node in nodes), encoding="ascii")
        new.replace(self.file)

    def connected(self) -> bool:
        try:
            return self.theirs.recv(1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setattr(Release, "_watch", lambda _: None)  # the tests look themselves
    made = Peers(tmp_path)
    yield made
    made.close()


def release(peers: Peers, address: str = "127.0.0.1") -> Release:
    return Release(peers.file, lambda _: [address])


def test_a_wait_ends_once_a_node_is_excluded_during_it(peers: Peers) -> None:
    made = release(peers)
    with made.waiting():
        made.end_if_due(time.monotonic())
        peers.exclude("n2")
        made.end_if_due(time.monotonic() + 2.0)
    assert (made.released, peers.connected()) == (1, False)


def test_a_short_wait_is_left_alone(peers: Peers) -> None:
    made = release(peers)
    with made.waiting():
        made.end_if_due(time.monotonic())
        peers.exclude("n2")
        made.end_if_due(time.monotonic() + 0.5)
    assert (made.released, peers.connected()) == (0, True)


def test_a_node_that_was_excluded_before_the_wait_is_not_waited_for(peers: Peers) -> None:
    made = release(peers)
    peers.exclude("n2")
    made.end_if_due(time.monotonic())
    with made.waiting():
        made.end_if_due(time.monotonic() + 2.0)
    assert (made.released, peers.connected()) == (0, True)


def test_connections_to_other_nodes_stay(peers: Peers) -> None:
    made = release(peers, "127.0.0.9")
    with made.waiting():
        made.end_if_due(time.monotonic())
        peers.exclude("n2")
        made.end_if_due(time.monotonic() + 2.0)
    assert (made.released, peers.connected()) == (1, True)


def test_a_node_without_an_address_is_counted_and_raises_nothing(peers: Peers) -> None:
    def unknown(node: str) -> list[str]:
        raise OSError(f"{node} is unknown")

    made = Release(peers.file, unknown)
    with made.waiting():
        made.end_if_due(time.monotonic())
        peers.exclude("n2")
        made.end_if_due(time.monotonic() + 2.0)
    assert (made.failures, peers.connected()) == (1, True)
