"""The word in a job's comment that tells its script where the next attempt resumes. Pure.

A requeued job keeps the environment of its submission, which cannot be changed, but a script can read its comment. The
word is valid for one attempt only (SLURM_RESTART_COUNT): by the next restart its step is outdated.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"eagle-eye:attempt=\d+:resume_from=\S*", re.ASCII)


def resume_word(attempt: int, resume_from: str) -> str:
    """Return the word that makes this attempt resume from there (docs/how-to/checkpoint.md: the line that reads it)."""
    return f"eagle-eye:attempt={attempt}:resume_from={resume_from}"


def with_word(comment: str, word: str) -> str:
    """Return the comment prefixed with the word, replacing an earlier one. Long comments are read truncated."""
    others = [part for part in comment.split(" ") if part and not _WORD.fullmatch(part)]
    return " ".join([word, *others])
