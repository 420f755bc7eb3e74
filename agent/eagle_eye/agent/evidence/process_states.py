"""Kernel view of the suspects: state, threads, where each waits, and how they were started. Reads /proc.

As root this works for every process, even stopped or stuck in the kernel. Reading thread states never blocks; reading a
command line or an environment takes the process's memory lock, which a process stuck in a page fault may never release,
so it is a separate task.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec

from eagle_eye.agent.evidence.proc_files import environment, read, why
from eagle_eye.agent.evidence.source import Scene, Task
from eagle_eye.agent.evidence.suspects import Suspect
from eagle_eye.agent.redact import redact_arguments, redact_environment

THREADS_MAX = 512  # per process; PyTorch has a few hundred
FILE_BYTES_MAX = 16_384
COMMAND_BYTES_MAX = 1 << 17
VARIABLES_MAX = 2_048
VALUE_CHARS_MAX = 4_096
OF_PROCESS = ("status", "limits", "cgroup", "oom_score", "sched", "io")
OF_THREAD = ("stat", "wchan", "syscall", "stack")

# Only variables that govern communication and computation are shown with their values; of all others only the names.
SHOWN = (
    *(
        "NCCL_",
        "RCCL_",
        "GLOO_",
        "UCX_",
        "FI_",
        "OMPI_",
        "PMI",
        "TORCH",
        "PYTORCH_",
        "XLA_",
        "CUDA_",
        "NVIDIA_",
        "HIP_",
    ),
    *(
        "OMP_",
        "MKL_",
        "SLURM_",
        "MASTER_",
        "EAGLE_EYE_JOB",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PYTHONPATH",
        "VIRTUAL_ENV",
    ),
    *("HOSTNAME", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)


class ProcessCommand(msgspec.Struct, frozen=True):
    """How a process was started, secrets masked; ``other_variables`` are names without their values."""

    executable: str
    arguments: list[str]
    environment: dict[str, str]
    other_variables: list[str]
    cut: bool


class ProcessStates:
    """Two files per suspect: what it is doing, and how it was started."""

    name = "process_states"

    def tasks(self, scene: Scene) -> list[Task]:
        """Return two tasks for each suspect."""
        found = []
        for suspect in scene.suspects:
            found.append(Task(f"{suspect.label}.txt", partial(self._state, scene, suspect)))
            found.append(Task(f"{suspect.label}.command.json", partial(self._command, scene, suspect)))
        return found

    def _state(self, scene: Scene, suspect: Suspect) -> None:
        folder = scene.proc / str(suspect.pid)
        lines = [f"== process {suspect.pid} {suspect.label}"]
        lines += [f"-- {name}\n{_text(folder / name)}" for name in OF_PROCESS]
        try:
            threads = sorted(os.listdir(folder / "task"), key=int)  # noqa: PTH208 - names, not paths
        except (OSError, ValueError) as error:
            threads = []
            scene.bundle.miss(self.name, f"{suspect.label}: threads", why(error))
        read_threads = 0
        for thread in threads[:THREADS_MAX]:
            if scene.left_s() <= 0:
                break
            lines.append(f"\n== thread {thread}")
            lines += [f"-- {name}\n{_text(folder / 'task' / thread / name)}" for name in OF_THREAD]
            read_threads += 1
        more = len(threads) - read_threads
        if more:
            lines.append(f"\n== {more} more threads")
        self._put(scene, suspect, f"{suspect.label}.txt", "\n".join(lines).encode(), cut=more > 0)

    def _command(self, scene: Scene, suspect: Suspect) -> None:
        raw, more = read(scene.proc / str(suspect.pid) / "cmdline", COMMAND_BYTES_MAX)
        arguments = raw.decode("utf-8", "replace").rstrip("\0").split("\0")
        variables, cut = environment(scene.proc, suspect.pid)
        shown = {name: value[:VALUE_CHARS_MAX] for name, value in variables.items() if name.startswith(SHOWN)}
        others = sorted(variables.keys() - shown.keys())
        try:
            executable = str((scene.proc / str(suspect.pid) / "exe").readlink())
        except OSError as error:
            executable = f"not known: {why(error)}"
        cut = cut or more or len(shown) > VARIABLES_MAX or len(others) > VARIABLES_MAX
        command = ProcessCommand(
            executable=executable,
            arguments=redact_arguments(arguments),
            environment=redact_environment(dict(sorted(shown.items())[:VARIABLES_MAX])),
            other_variables=[name[:VALUE_CHARS_MAX] for name in others[:VARIABLES_MAX]],
            cut=cut,
        )
        content = msgspec.json.format(msgspec.json.encode(command), indent=1)
        self._put(scene, suspect, f"{suspect.label}.command.json", content, cut=cut)

    def _put(self, scene: Scene, suspect: Suspect, name: str, content: bytes, *, cut: bool) -> None:
        if suspect.is_still(scene.proc):
            scene.bundle.add(self.name, f"{scene.bundle.folder}/processes/{name}", content, cut=cut)
        else:
            scene.bundle.miss(self.name, name, "the process ended")


def _text(path: Path) -> str:
    try:
        content, more = read(path, FILE_BYTES_MAX)
    except OSError as error:
        return f"not to be had: {why(error)}"
    return content.decode("utf-8", "replace").rstrip() + (" ..." if more else "")
