"""Signing secrets managed elsewhere: a file, reread when it changes."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

from eagle_eye.orchestrators.errors import OrchestratorError

log = logging.getLogger(__name__)

SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64


class SecretFile:
    """The secrets in a file, one a line, ``whsec_`` and base64; two during a rotation. Ignores empty lines and #...

    If the file becomes unreadable or empty, the last secrets stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Raise OrchestratorError where the file cannot be used."""
        self._path = path
        self._read_at = self._changed()
        self._secrets = self._read()

    def __call__(self) -> list[str]:
        """Return the currently valid secrets."""
        try:
            changed = self._changed()
            if changed != self._read_at:
                self._read_at = changed
                self._secrets = self._read()
                log.info("%s: %d signing secrets", self._path, len(self._secrets))
        except OrchestratorError as error:
            log.warning("%s; the secrets read before go on to count", error)
        return self._secrets

    def _changed(self) -> tuple[int, int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise OrchestratorError(f"--secret-file {self._path}: {error.strerror}") from None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino  # ctime: permissions changed

    def _read(self) -> list[str]:
        try:
            lines = self._path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"--secret-file {self._path}: {type(error).__name__}") from None
        secrets = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        for number, secret in enumerate(secrets, 1):
            if not _usable(secret):
                raise OrchestratorError(
                    f"--secret-file {self._path}: secret {number} is none; expected whsec_ and base64 of 24 to 64 bytes"
                )
        if not secrets:
            raise OrchestratorError(f"--secret-file {self._path}: holds no secret; expected whsec_... on a line")
        return secrets


def _usable(secret: str) -> bool:
    """Whether the server would sign with it. The library would accept any text as base64, even an empty one."""
    head, _, encoded = secret.partition("whsec_")
    try:
        decoded = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        return False
    return not head and SECRET_BYTES_MIN <= len(decoded) <= SECRET_BYTES_MAX
