"""Puts the end of a child process, or an error, into words where its own may be missing."""

from __future__ import annotations

import signal


def how_it_ended(code: int, said: str) -> str:
    """Return how a process ended, with its last words if it had any; a negative code is a signal."""
    if code >= 0:
        return f"ended with {code}: {said or 'it gave no reason'}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    killed = f"ended by {name}"
    if not said and -code == signal.SIGKILL:
        said = "perhaps for lack of memory (see the kernel log)"
    return f"{killed}: {said}" if said else f"{killed}, without a word"


def in_words(error: BaseException) -> str:
    """Return the error's kind and text; the kind alone where it has no text, as many timeouts have none."""
    return f"{type(error).__name__}: {error}".rstrip(": ")
