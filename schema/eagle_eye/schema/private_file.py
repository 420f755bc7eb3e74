"""Creates new files for tokens or secrets, readable only by their owner. Touches: the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from eagle_eye.schema.configuration import ConfigurationError


@contextmanager
def private_file(path: Path, option: str) -> Iterator[TextIO]:
    """Create the file before its contents, and remove it again if writing fails; flushed to disk on success.

    Raises ConfigurationError naming the option if the file exists, as a link too, or cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigurationError(f"{option}: {path} exists, and is left as it is; name another file") from None
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be made: {error.strerror or error}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
