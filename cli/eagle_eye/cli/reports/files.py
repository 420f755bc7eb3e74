"""Writes a report's file, and says which extra is missing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from eagle_eye.schema.configuration import ConfigurationError


@contextlib.contextmanager
def needs_extra(flag: str) -> Iterator[None]:
    """Import what a page needs inside this. Raises ConfigurationError that names the extra where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        needs = f'{flag} needs: pip install "eagle-eye[reports]" (no module {error.name})'
        raise ConfigurationError(needs) from None


def write(file: Path, content: bytes) -> None:
    """Write the file and print its name and size. Raises OSError."""
    file.write_bytes(content)
    sys.stdout.write(f"{file}: {len(content) / 1e3:.0f} kB\n")
