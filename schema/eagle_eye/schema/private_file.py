"""Files of tokens and secrets: new ones are readable only by their owner, others are looked at. Touches: the file."""

from __future__ import annotations

import os
import stat
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


def open_to_others(key: str, file: Path) -> str:
    """Return what is wrong if every user of this machine can read the file that ``key`` names; "" otherwise.

    A folder on its way that others may not enter protects it. "" too where it cannot be looked at.
    """
    try:
        place = file.expanduser().resolve()
        entered = all(each.stat().st_mode & stat.S_IXOTH for each in place.parents)
        if not entered or not place.stat().st_mode & stat.S_IROTH:
            return ""
    except OSError:
        return ""
    return f"{key}: every user of this machine can read {file}; chmod o-r {place}, and renew what it holds if in doubt"
