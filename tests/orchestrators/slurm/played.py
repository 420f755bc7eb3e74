"""A played Slurm: enough of one to restart jobs in, at once and without processes. It is no proof of how Slurm behaves.

What the real one does is in test_real.py; this is for what must hold whatever Slurm says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from eagle_eye.orchestrators.slurm.answers import SlurmError, SlurmJob, SlurmNode, SlurmRefusedError
from eagle_eye.orchestrators.slurm.cluster import Cluster, Commands


class Played(Cluster):
    """Four nodes, and one job, 17, on two of them."""

    def __init__(self) -> None:
        super().__init__(Commands())
        self.known = {
            name: SlurmNode(name, frozenset({"idle"}), frozenset({"all"}), "") for name in ("n1", "n2", "n3", "n4")
        }
        self.job = SlurmJob(
            id=17, array_id=0, task=-1, het_id=0, words=("RUNNING",), restarts=0, requeues=True, batch=True,
            nodes_wanted=2, nodes="n1,n2", required="", partitions=frozenset({"all"}), user="ann", held=False,
            preempted=False, why="",
        )  # fmt: skip
        self.avoided: tuple[str, ...] = ()
        self.said = ""
        """The job's comment."""
        self.gpus: int | None = None
        self.done: list[str] = []
        self.instead_of_requeue: tuple[tuple[str, ...], int] | None = None
        self.fails = ""
        """The verb at which Slurm stops answering."""
        self.refuses = ""
        """The verb that this account may not do."""

    def quick(self) -> Played:
        return self

    def jobs(self, job_id: int) -> tuple[SlurmJob, ...]:
        if job_id != self.job.id:
            return ()
        if self.job.phase == "pending" and not self.job.held:
            free = [name for name, node in self.known.items() if node.usable and name not in self.avoided]
            if len(free) >= self.job.nodes_wanted:
                chosen = ",".join(free[: self.job.nodes_wanted])
                self.job = replace(self.job, words=("RUNNING",), nodes=chosen)
        return (self.job,)

    def running_on(self, nodes: Collection[str]) -> tuple[SlurmJob, ...]:
        return (self.job,) if set(nodes) & set(self.hosts(self.job.nodes)) else ()

    def nodes(self, names: Collection[str] = ()) -> tuple[SlurmNode, ...]:
        return tuple(node for name, node in self.known.items() if not names or name in names)

    def hosts(self, host_list: str) -> tuple[str, ...]:
        return tuple(name for name in host_list.split(",") if name)

    def excluded(self, job: SlurmJob) -> str:
        return ",".join(self.avoided)

    def drain(self, node: str, reason: str) -> None:
        self._do(f"drain {node}")
        self.known[node] = replace(self.known[node], words=frozenset({"idle", "drain"}), reason=reason)

    def undrain(self, node: SlurmNode) -> None:
        self._do(f"resume {node.name}")
        self.known[node.name] = replace(node, words=frozenset({"idle"}), reason="")

    def exclude(self, job: SlurmJob, host_list: str) -> None:
        self._do(f"exclude {host_list}")
        self.avoided = self.hosts(host_list)

    def gpus_per_node(self, job: SlurmJob) -> int | None:
        return self.gpus

    def resize(self, job: SlurmJob, nodes: int) -> None:
        self._do(f"resize {nodes}")
        self.job = replace(self.job, nodes_wanted=nodes)

    def comment(self, job: SlurmJob) -> str:
        return self.said

    def set_comment(self, job: SlurmJob, comment: str) -> None:
        self._do("comment")
        self.said = comment

    def requeue_held(self, job: SlurmJob, *, incomplete: bool) -> None:
        self._do("requeue")
        if self.instead_of_requeue is not None:
            words, restarts = self.instead_of_requeue
            self.job = replace(job, words=words, restarts=restarts)
            return
        if incomplete and self.job.phase not in ("running", "pending", "suspended"):
            return
        self.job = replace(job, words=("PENDING",), nodes="", held=True, restarts=job.restarts + 1)

    def release(self, job: SlurmJob) -> None:
        self._do("release")
        self.job = replace(self.job, held=False)

    def cancel(self, job: SlurmJob) -> None:
        self._do("cancel")
        self.job = replace(job, words=("CANCELLED",), nodes="")

    def _do(self, what: str) -> None:
        if self.fails and what.startswith(self.fails):
            raise SlurmError(f"{what}: no answer")
        if self.refuses and what.startswith(self.refuses):
            raise SlurmRefusedError(f"{what}: Access/permission denied", "Access/permission denied")
        self.done.append(what)
