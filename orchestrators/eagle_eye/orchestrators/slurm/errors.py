"""Errors between us and Slurm.

CannotCarryOutError (orchestrators/errors.py)
└── SlurmError            a command could not be run, or did not answer in time, or not with what was expected
    └── SlurmRefusedError   Slurm answered, and said no
"""

from __future__ import annotations

from eagle_eye.orchestrators.errors import CannotCarryOutError


class SlurmError(CannotCarryOutError):
    """Slurm's state is unknown; the message names the command and is suitable for operators."""


class SlurmRefusedError(SlurmError):
    """Slurm refused; ``said`` is its last line on stderr."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said
