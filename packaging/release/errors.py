"""What keeps a release from being made."""

from __future__ import annotations


class ReleaseError(Exception):
    """The repository cannot be released as it is; the message says what to mend."""
