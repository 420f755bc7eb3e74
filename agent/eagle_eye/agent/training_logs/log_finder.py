"""Finds the logs to follow: configured ones, and the training processes' own outputs.

Touches: file names, /proc/<pid>/fd and /proc/<pid>/environ; reads no log.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.agent.files.foreign import Identity, open_output
from eagle_eye.agent.processes.process_files import ProcessFiles
from eagle_eye.agent.processes.process_registry import TrainingProcess

MATCHES_MAX = 1_024  # per pattern: more are archives of old runs
JOBS_MAX = 16  # jobs per node filled into a pattern
OUTPUTS = (1, 2)  # stdout, stderr

_FIELD = re.compile(r"\{(job|node|rank|local_rank)\}")
_WILD = re.compile(r"\*\*/|\*+|\?|\[[^\]]{1,100}\]|\{rank\}|\{local_rank\}")
_WILD_MEANS = {"**/": "(?:.*/)?", "?": "[^/]", "{rank}": r"([0-9]{1,7})", "{local_rank}": r"([0-9]{1,5})"}


class BadPattern(ValueError):
    """An invalid pattern; the message says why."""


@dataclass(frozen=True)
class FoundLog:
    """A pattern's match, as of the search; ``rank``, ``local_rank`` and ``job`` come from its path."""

    path: Path
    identity: Identity
    changed_s: float
    rank: int | None = None
    local_rank: int | None = None
    job: str | None = None


class Pattern:
    """A glob pattern: placeholders ``{job}`` and ``{node}`` are filled in, ``{rank}`` and ``{local_rank}`` parsed.

    ``/shared/run/{job}/rank_{rank}.log`` matches the logs of the jobs that run on this node, and identifies their
    ranks.
    """

    def __init__(self, text: str, node: str) -> None:
        """Raises BadPattern for a relative path, and for unknown or repeated placeholders."""
        self.text = text
        if not text.startswith("/") or not text.isprintable():
            raise BadPattern(f"expected an absolute path, got {text[:200]!r}")
        places = _FIELD.findall(text)
        unknown = re.search(r"[{}]", _FIELD.sub("", text))
        if unknown is not None:
            raise BadPattern(f"{text[:200]!r}: places are {{job}}, {{node}}, {{rank}} and {{local_rank}}")
        if places.count("rank") > 1 or places.count("local_rank") > 1:
            raise BadPattern(f"{text[:200]!r} names {{rank}} or {{local_rank}} twice")
        self._text = text.replace("{node}", glob.escape(node))
        self._groups = [place for place in places if place in ("rank", "local_rank")]

    def files(self, jobs: Sequence[str]) -> list[FoundLog]:
        """Return the regular files that the pattern matches now. ``jobs`` run on this node."""
        if "{job}" not in self._text:
            return self._matches(self._text, None)
        found = []
        for job in list(dict.fromkeys(jobs))[:JOBS_MAX]:
            if job not in (".", "..") and "/" not in job and job.isprintable():
                found += self._matches(self._text.replace("{job}", glob.escape(job)), job)
        return found

    def _matches(self, pattern: str, job: str | None) -> list[FoundLog]:
        wanted = pattern.replace("{rank}", "*").replace("{local_rank}", "*")
        exact = re.compile(_expression(pattern)) if self._groups else None
        found = []
        names = glob.iglob(wanted, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        for name in itertools.islice(names, MATCHES_MAX):
            said = exact.fullmatch(name) if exact is not None else None
            if exact is not None and said is None:
                continue
            try:
                state = os.stat(name)  # noqa: PTH116 - thousands of names: no object for each
            except OSError:  # gone again, or a dangling link
                continue
            if stat.S_ISREG(state.st_mode):
                numbers = dict(zip(self._groups, said.groups(), strict=True)) if said is not None else {}
                rank, local_rank = numbers.get("rank"), numbers.get("local_rank")
                found.append(
                    FoundLog(
                        Path(name),
                        (state.st_dev, state.st_ino),
                        state.st_mtime,
                        None if rank is None else int(rank),
                        None if local_rank is None else int(local_rank),
                        job,
                    )
                )
        return found


@dataclass(frozen=True)
class ProcessOutput:
    """A regular file that is a training process's stdout or stderr."""

    path: Path  # through /proc: the file itself, whatever its path in the process's container
    identity: Identity
    process: TrainingProcess

    def open(self) -> int:
        """Return a descriptor to read the file. Raises OSError, NotTheirs as ``open_output`` does."""
        status = ProcessFiles(self.path.parents[2]).status(self.process.pid)
        if status is None:
            raise ProcessLookupError(errno.ESRCH, f"process {self.process.pid} has ended", str(self.path))
        return open_output(self.path, status.user, identity=self.identity)


def outputs(processes: Iterable[TrainingProcess], proc: Path) -> tuple[list[ProcessOutput], str]:
    """Return the files that are the processes' stdout and stderr, and any problem, "" for none."""
    found: list[ProcessOutput] = []
    problem = ""
    for process in processes:
        for number in OUTPUTS:
            path = proc / str(process.pid) / "fd" / str(number)
            try:
                state = path.stat()
            except FileNotFoundError:  # the process has exited, or closed it
                continue
            except OSError as error:
                problem = problem or f"{path}: {error.strerror or error}; run the agent as root or as the job's user"
                continue
            if stat.S_ISREG(state.st_mode):
                found.append(ProcessOutput(path, (state.st_dev, state.st_ino), process))
    return found, problem


def scheduler_task(pid: int, proc: Path) -> int | None:
    """Return the process's Slurm task number; None: there is none, or it is not visible."""
    try:
        environ = ProcessFiles(proc).environment(pid) or b""
    except OSError:
        return None
    found = re.search(rb"(?:^|\0)SLURM_PROCID=([0-9]{1,9})(?:\0|$)", environ)
    return int(found[1]) if found is not None else None


def _expression(pattern: str) -> str:
    """Return the pattern as a regular expression with a group per parsed placeholder."""
    parts, at = [], 0
    for wild in _WILD.finditer(pattern):
        parts.append(re.escape(pattern[at : wild.start()]))
        token = wild[0]
        parts.append("[^/]" if token.startswith("[") else _WILD_MEANS.get(token, "[^/]*"))
        at = wild.end()
    parts.append(re.escape(pattern[at:]))
    return "".join(parts)
