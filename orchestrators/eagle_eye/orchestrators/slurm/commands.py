"""Runs Slurm's commands: argument lists and never a shell, bounded time and output, errors with Slurm's message.

Runs processes. The environment is cut down to what Slurm needs: SQUEUE_*, SINFO_* and SBATCH_* would change what the
commands do, and LC_ALL=C fixes their language.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_eye.orchestrators.slurm.errors import SlurmError, SlurmRefusedError

OUTPUT_BYTES_MAX = 64 << 20
ERROR_BYTES_MAX = 64 << 10
SAID_CHARS_MAX = 300
END_S = 2.0  # from terminate to kill
KEPT_VARIABLES = ("PATH", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "LD_LIBRARY_PATH", "HOME", "USER", "TZ")


def environment(environ: Mapping[str, str], conf: str) -> dict[str, str]:
    """Return the part of our environment passed to commands; ``conf`` is the path of slurm.conf, "" for the default."""
    kept = {name: environ[name] for name in KEPT_VARIABLES if name in environ}
    return {**kept, **({"SLURM_CONF": conf} if conf else {}), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


@dataclass(frozen=True)
class Commands:
    """Runs Slurm's commands; thread-safe. ``folder`` is where they are, "" for the PATH.

    ``jwt_file`` holds their authentication token; None: munge. It is read for each command.
    """

    folder: str = ""
    timeout_s: float = 20.0
    environ: Mapping[str, str] = field(default_factory=lambda: environment(os.environ, ""))
    jwt_file: Path | None = None

    def run(self, *words: str, before: Sequence[str] = (), given: bytes = b"") -> str:
        """Return the command's output. Raises SlurmError.

        ``before`` is a command prefix (sudo), ``given`` its stdin.
        """
        command = str(Path(self.folder, words[0])) if self.folder else words[0]
        shown = " ".join(words[:2])
        environ = self._environment()
        try:
            with tempfile.TemporaryFile() as source:  # not a pipe: a command that does not read must not block us
                source.write(given)
                source.seek(0)
                process = subprocess.Popen(
                    [*before, command, *words[1:]],
                    stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env=environ, start_new_session=True,
                )  # fmt: skip
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            remedy = "install Slurm's client commands here, or name their folder with --slurm-bin"
            raise SlurmError(f"{[*before, command][0]} cannot be run: {why}; {remedy}") from None
        try:
            out, err = self._read(process, shown)
        finally:
            _end(process)
        if process.returncode:
            lines = err.decode("utf-8", "replace").strip().splitlines() or ["nothing on stderr"]
            said = "".join(char for char in lines[-1] if char.isprintable())[:SAID_CHARS_MAX]
            raise SlurmRefusedError(f"{shown}: {said}", said)
        return out.decode("utf-8", "replace")

    def _environment(self) -> dict[str, str]:
        if self.jwt_file is None:
            return dict(self.environ)
        try:
            token = self.jwt_file.read_text(encoding="ascii").strip().removeprefix("SLURM_JWT=")
        except (OSError, UnicodeDecodeError) as error:
            raise SlurmError(f"--jwt-file {self.jwt_file}: {type(error).__name__}") from None
        if not token or not token.isprintable() or " " in token:
            raise SlurmError(f"--jwt-file {self.jwt_file}: expected one line, as scontrol token prints it")
        return {**self.environ, "SLURM_JWT": token}

    def _read(self, process: subprocess.Popen[bytes], shown: str) -> tuple[bytes, bytes]:
        """Return all of stdout and the beginning of stderr, once the process has exited. Raises SlurmError."""
        until_s = time.monotonic() + self.timeout_s
        read = {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for stream in read:
                assert stream is not None  # noqa: S101 - asked for above
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(max(until_s - time.monotonic(), 0.0)):
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        read[process.stderr] += part[: ERROR_BYTES_MAX - len(read[process.stderr])]
                    else:
                        read[process.stdout] += part
                if len(read[process.stdout]) > OUTPUT_BYTES_MAX:
                    raise SlurmError(f"{shown}: more than {OUTPUT_BYTES_MAX} bytes of output")
                if time.monotonic() >= until_s:
                    break
        try:
            process.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{shown}: no answer within {self.timeout_s:g} s (--command-timeout)") from None
        return bytes(read[process.stdout]), bytes(read[process.stderr])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, and close its pipes."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    for word in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, word)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
