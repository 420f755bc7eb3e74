"""Finds the dumps of PyTorch's flight recorder, and requests new ones. Touches: files, named pipes.

A dump is requested by writing a byte to the pipe ``<TORCH_NCCL_DEBUG_INFO_PIPE_FILE><rank>.pipe``; the process then
writes ``<prefix><rank>`` from a separate thread while training continues.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle_eye.agent.files.foreign import OWN_ROOT, NotTheirs, open_pipe, shown, stat_of
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.nccl.process_environment import Environments, ProcessEnvironment, root_of
from eagle_eye.agent.processes.process_registry import TrainingProcess

POLL_S = 0.1  # the recorder's thread checks its pipe every second
OLD_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - PyTorch before 2.7 writes there
NEW_DEFAULT = "torch/comm_lib_trace_rank_"  # in the user's cache folder

Stamp = tuple[int, int, int]  # inode, size, time of the last change in ns
_Place = tuple[Path, Path]  # a file, and the folder that no link on the way may lead out of


@dataclass(frozen=True)
class DumpRequest:
    """Which of the ranks asked have written a dump, and why the others have not."""

    answered: tuple[TrainingProcess, ...] = ()
    silent: Mapping[TrainingProcess, str] = field(default_factory=dict)


def dump_paths(process: TrainingProcess, environment: ProcessEnvironment | None, prefixes: Sequence[str]) -> list[Path]:
    """Return the paths where a rank's dump may be: from its environment, else PyTorch's defaults; plus ``prefixes``."""
    paths = [Path(f"{prefix}{process.rank}") for prefix in prefixes]
    if environment is not None:
        said = environment.first("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        cache = environment.first("XDG_CACHE_HOME") or f"{environment.first('HOME') or '/tmp'}/.cache"  # noqa: S108 - as PyTorch
        own = (said,) if said else (f"{cache}/{NEW_DEFAULT}", OLD_DEFAULT)
        paths += [environment.path(f"{prefix}{process.rank}") for prefix in own]
    return list(dict.fromkeys(paths))


def stamp_of(path: Path, root: Path = OWN_ROOT) -> Stamp | None:
    """Return a stamp that changes when a file below ``root`` is written; None where it is missing or not visible.

    Raises NotTheirs where it is something else.
    """
    try:
        found = stat_of(path, root)
    except NotTheirs:
        raise
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise NotTheirs(f"{shown(path)}: not a regular file")
    return found.st_ino, found.st_size, found.st_mtime_ns


def request_dumps(
    processes: Sequence[TrainingProcess],
    deadline_s: float,
    environments: Environments,
    prefixes: Sequence[str] = (),
    pipe_prefixes: Sequence[str] = (),
    *,
    drops: Drops | None = None,
    monotonic_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> DumpRequest:
    """Ask the ranks for dumps and wait at most ``deadline_s``; return which ranks answered.

    ``pipe_prefixes`` are tried in addition to the processes' environments. Training is not delayed: writes are
    non-blocking, and each rank dumps from a separate thread. A rank without a pipe reader was not asked; one that was
    asked and wrote nothing is stopped, stuck, or older than the pipe, which alone is no evidence against it. A path
    that is not a pipe, or not the process's own, is counted in ``drops`` as ``flight_recorder_refused``.
    """
    known = environments.of(processes)
    silent: dict[TrainingProcess, str] = {}
    waiting: dict[TrainingProcess, dict[_Place, Stamp | None]] = {}
    for process in processes:
        environment = known.get(process)
        places = [(path, root_of(path, environment)) for path in dump_paths(process, environment, prefixes)]
        before = {place: _stamp(place) for place in places}
        why_not = _ask(process, environment, pipe_prefixes, drops or Drops())
        if why_not:
            silent[process] = why_not
        elif before:
            waiting[process] = before
        else:
            silent[process] = "where it writes its dump is not known"
    answered = _await(waiting, monotonic_s() + deadline_s, monotonic_s, sleep)
    for process in waiting:
        if process not in answered:
            silent[process] = f"asked, but wrote no dump within {deadline_s:g} s"
    return DumpRequest(tuple(answered), silent)


def _ask(
    process: TrainingProcess, environment: ProcessEnvironment | None, prefixes: Sequence[str], drops: Drops
) -> str:
    """Write to the process's pipe; return why this failed, or ""."""
    paths = [Path(f"{prefix}{process.rank}.pipe") for prefix in prefixes]
    said = environment.first("TORCH_NCCL_DEBUG_INFO_PIPE_FILE") if environment is not None else ""
    if environment is not None and said:
        paths.append(environment.path(f"{said}{process.rank}.pipe"))
    why_not = "no pipe: set TORCH_NCCL_DEBUG_INFO_PIPE_FILE for the job"
    for path in dict.fromkeys(paths):
        try:
            uid = environment.uid if environment is not None else None
            descriptor = open_pipe(path, root_of(path, environment), uid)
        except NotTheirs as error:
            drops.count("flight_recorder_refused")
            why_not = str(error)
            continue
        except OSError as error:
            why_not = f"{shown(path)}: {'nobody reads it' if error.errno == errno.ENXIO else error.strerror or error}"
            continue
        try:
            os.write(descriptor, b"1")
        except OSError as error:
            full = isinstance(error, BlockingIOError)
            why_not = f"{shown(path)}: {'full: its process does not read it' if full else error.strerror or error}"
            continue
        finally:
            os.close(descriptor)
        return ""
    return why_not


def _stamp(place: _Place) -> Stamp | None:
    try:
        return stamp_of(*place)
    except NotTheirs:
        return None  # the reader of dumps reports it


def _await(
    waiting: Mapping[TrainingProcess, Mapping[_Place, Stamp | None]],
    until_s: float,
    monotonic_s: Callable[[], float],
    sleep: Callable[[float], None],
) -> list[TrainingProcess]:
    """Return the processes with a new dump file that no longer changes, as soon as all have one."""
    answered: list[TrainingProcess] = []
    last: dict[_Place, Stamp | None] = {}
    while len(answered) < len(waiting):
        for process, before in waiting.items():
            if process in answered:
                continue
            for place, old in before.items():
                stamp = _stamp(place)
                if stamp is not None and stamp != old and stamp[1] > 0 and stamp == last.get(place):
                    answered.append(process)
                    break
                last[place] = stamp
        if len(answered) == len(waiting) or monotonic_s() >= until_s:
            break
        sleep(POLL_S)
    return answered
