"""The client of commands: ``eagle_eye.client`` with flags instead of arguments, and people instead of a log."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle_eye.cli.tables import printable
from eagle_eye.client import Client, ClientError


class CannotGoOn(ClientError):
    """What a command was asked for cannot be done; the message is for people."""


class CommandClient(Client):
    """A client whose errors name flags, and that tells of a standby on standard error."""

    URL = "--server"
    TOKEN_FILE = "--token-file"  # noqa: S105 - the flag's name
    LIMIT = "--limit"

    def say_standby(self, why: str) -> None:
        """Tell it on standard error, so that it is in no list and no JSON."""
        sys.stderr.write(f"{self.standby_words(printable(why))}\n")

    def say_cells(self, silent: str) -> None:
        """Tell it on standard error, so that it is in no list and no JSON."""
        sys.stderr.write(f"{self.cells_words(printable(silent))}\n")


def connect(server: str | None, token_file: Path | None) -> Client:
    """Return the client for a command's flags; defaults are in EAGLE_EYE_SERVER and EAGLE_EYE_TOKEN_FILE."""
    return CommandClient(server, token_file)
