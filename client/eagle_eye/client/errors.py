"""What goes wrong between a program and the server.

ClientError
    Refused            the server said no, by its problem details
    Unreachable        no answer, or not all of it
    UnreadableAnswer   what answered does not speak the API
    LimitReached       more than this client takes at once
    MissingExtra       a library for data frames is not installed (also an ImportError)

DataLacking is a warning: the answer stands, and says of which times the history has lost values.
"""

from __future__ import annotations

from typing import Any


class ClientError(Exception):
    """The base of the client's errors; the text is for people."""


class Refused(ClientError):
    """The server refused a request; the fields are those of its problem details (RFC 9457).

    ``reason`` is the stable word in which ``type`` ends. What answers without them (a proxy) has the type
    "about:blank" and the reason "". ``retry_after_s`` is when the server wants to be asked again, None: it did not say.
    """

    def __init__(self, problem: dict[str, Any], retry_after_s: float | None = None, hint: str = "") -> None:
        self.status = int(problem["status"])
        self.title = str(problem["title"])
        self.detail = str(problem["detail"])
        self.type = str(problem["type"])
        self.reason = str(problem["reason"])
        self.retry_after_s = retry_after_s
        super().__init__(f"HTTP {self.status}: {self.detail}{hint}")


class Unreachable(ClientError):
    """The server did not answer, or stopped in the middle of its answer."""


class UnreadableAnswer(ClientError):
    """An answer that is none of this API."""


class LimitReached(ClientError):
    """More than this client takes at once; the text says the limit and what to ask for instead."""


class MissingExtra(ClientError, ImportError):
    """Data frames need libraries that are not installed; the text says which extra brings them."""


class DataLacking(UserWarning):
    """Of some times values are lacking: damage, a store that does not answer, or nothing was observed at all."""
