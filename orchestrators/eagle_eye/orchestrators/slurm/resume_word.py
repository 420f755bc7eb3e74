"""The word in a job's comment by which its script learns where its next attempt resumes. Pure.

A requeued job has the environment of its submission: nothing can be put into it, and a script can read its comment.
The word is of one attempt alone (SLURM_RESTART_COUNT): whoever restarts the job the next time, the step in it is an
old one by then.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"eagle-eye:attempt=\d+:resume_from=\S*", re.ASCII)


def resume_word(attempt: int, resume_from: str) -> str:
    """Return the word that has this attempt resume from there (docs/how-to/checkpoint.md: the line that reads it)."""
    return f"eagle-eye:attempt={attempt}:resume_from={resume_from}"


def with_word(comment: str, word: str) -> str:
    """Return the comment behind the word, without any that was in it before. Long comments are read cut off."""
    others = [part for part in comment.split(" ") if part and not _WORD.fullmatch(part)]
    return " ".join([word, *others])
