"""What the launcher runs and reports to: the user's job, and the link to Eagle Eye's server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from eagle_eye.schema.action import JobUpdate


@dataclass(frozen=True)
class LaunchedJob:
    """The job, and how a command is run on a node.

    ``{node}`` and ``{index}`` (its place in the list of nodes) are substituted in each word of ``exec_words``
    and in the values of ``env``. ``command`` is what follows ``python`` on the command line of a rank. ``check`` is
    how a node is checked before it joins (prepare.py). ``standby`` is "auto", "on" or "off" (standbys.py);
    ``standby_imports`` are the modules that standbys import besides torch. ``owner`` is the user who runs it.
    """

    name: str
    nodes: tuple[str, ...]
    ranks_per_node: int
    command: tuple[str, ...]
    exec_words: tuple[str, ...]
    python: str
    env: Mapping[str, str]
    store_host: str
    store_port: int
    checkpoint_dir: Path | None
    log_dir: Path
    log_bytes_max: int = 64 << 20
    check: str = "off"
    check_within_s: float = 60.0
    standby: str = "off"
    standby_imports: tuple[str, ...] = ()
    owner: str = ""

    def on_node(self, text: str, node: str) -> str:
        """Return the text with the node's name and index substituted."""
        return text.replace("{node}", node).replace("{index}", str(self.nodes.index(node)))


class ObservedProgress(NamedTuple):
    """An attempt's progress when the server was queried: the last finished step."""

    attempt: int
    step: int


class ServerLink(Protocol):
    """Reports the job's state to Eagle Eye."""

    @property
    def in_touch(self) -> bool:
        """Whether reports from Eagle Eye can be expected."""

    def tell(self, job: str, update: JobUpdate) -> None:
        """Report the update to the server."""

    def take_out(self, node: str, reason: str) -> None:
        """Have the server count the node as out of service, if it knows the node."""

    def flush(self, within_s: float) -> bool:
        """Return whether the server has received everything, after at most ``within_s``."""


class NoServer:
    """No server to report to."""

    in_touch = False

    def tell(self, job: str, update: JobUpdate) -> None:
        """Do nothing."""

    def take_out(self, node: str, reason: str) -> None:
        """Do nothing."""

    def flush(self, within_s: float) -> bool:  # noqa: ARG002 - the protocol's name
        """Return True: nothing is pending."""
        return True
