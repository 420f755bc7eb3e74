"""Queries NCCL's RAS service about the jobs on this node. Touches: the service's port on this host, /proc."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from eagle_eye.agent.loop.collector import Drops, Observed
from eagle_eye.agent.nccl.process_environment import Environments, ProcessEnvironment
from eagle_eye.agent.nccl.ras_client import DEFAULT_PORT, BadReply, Communicator, NoAnswer, Reply, TooLong, ask
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses

EVERY_S = 10.0  # and never more often: each query makes the service query every process of the job
DEADLINE_S = 12.0  # twice the service's own timeouts
COST_FACTOR = 1_000.0  # parsing replies may take a thousandth of one core
PORTS_MAX = 8
LOOPBACK = ("", "localhost", "::", "::1", "0.0.0.0", "127.0.0.1")  # noqa: S104 - what is asked is this host in any case

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class RasAnswer:
    """One service's answer, and its time in Unix seconds."""

    port: int
    time_s: float
    reply: Reply


class NcclRasCollector:
    """Queries RAS every EVERY_S for each job whose rank 0 runs here: one answer covers the whole job.

    Problems of ranks anywhere in the job go into ``Observed.problem``, and in full into ``answers`` for evidence; they
    accuse no rank by themselves. The number of collectives enqueued goes into rows only where all ranks of a job are
    compared: where the job has no other node, or every node asks (``every_node``).

    A refused connection is counted as ``nccl_ras_refused``, a service that does not answer as ``nccl_ras_unanswered``,
    an answer that is not a status as ``nccl_ras_malformed``.

    Cannot see: NCCL before 2.24 and jobs with NCCL_RAS_ENABLE=0; services not bound to this host's loopback, as in
    containers with their own network namespace; which of two jobs on one node will answer where both use one port,
    until the answer names it.
    """

    name = "nccl_ras"

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        ports: Sequence[int] = (),
        every_s: float = EVERY_S,
        *,
        every_node: bool = False,
        taken: Callable[[int], bool] = lambda _device: False,
        environments: Environments | None = None,
        addresses: Callable[[], frozenset[str]] | None = None,
        asker: Callable[..., Reply] = ask,
        monotonic_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """``ports`` are queried in addition to those in the processes' environments.

        ``taken`` says whether another source reports a device's sequences: numbers from two sources are not comparable.
        ``addresses`` returns this node's own.
        """
        self._processes = processes
        self._drops = drops
        self._ports = tuple(ports)
        self._every_s = max(every_s, EVERY_S)
        self._every_node = every_node
        self._taken = taken
        self._environments = Environments() if environments is None else environments
        self._addresses = own_addresses if addresses is None else addresses
        self._ask = asker
        self._monotonic_s = monotonic_s
        self._cpu_s = cpu_s
        self._due_s = -1.0
        self._problem = ""
        self._answers: dict[int, RasAnswer] = {}
        self._long: set[int] = set()  # ports whose JSON answer is too long

    def collect(self, now_s: float) -> Observed:
        """Return this node's rows if it has just asked; problems are repeated until it asks again."""
        monotonic_s = self._monotonic_s()
        if monotonic_s < self._due_s:
            return Observed(problem=self._problem)
        begin_s = self._cpu_s()
        observed = Observed()
        processes = self._processes.all()
        environments = self._environments.of(processes)
        problems: list[str] = []
        ports = self._ports_to_ask(processes, environments, problems)
        for port in ports:
            reply = self._reply(port, problems)
            if reply is not None:
                self._answers = {**self._answers, port: RasAnswer(port, now_s, reply)}
                problems.append(reply.problem())
                self._put_rows(reply, environments, observed)
        self._answers = {port: answer for port, answer in self._answers.items() if port in ports}
        self._due_s = monotonic_s + max(self._every_s, COST_FACTOR * (self._cpu_s() - begin_s))
        self._problem = observed.problem = "; ".join(dict.fromkeys(text for text in problems if text))
        return observed

    def answers(self) -> list[RasAnswer]:
        """Return the newest answer of each port; thread-safe."""
        return list(self._answers.values())

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _ports_to_ask(
        self,
        processes: Sequence[TrainingProcess],
        environments: Mapping[TrainingProcess, ProcessEnvironment],
        problems: list[str],
    ) -> list[int]:
        """Return the ports of the jobs that this node asks about."""
        asks = [process for process in processes if process.rank == 0]
        jobs = {process.job for process in asks}
        found = dict.fromkeys(self._ports) if asks or (self._every_node and processes) else {}
        for process in processes:
            environment = environments.get(process)
            if not self._every_node and process.job not in jobs:
                continue
            if environment is None:
                found.setdefault(DEFAULT_PORT)
            elif environment.first("NCCL_RAS_ENABLE") != "0":
                address = environment.first("NCCL_RAS_ADDR")
                port = _port(address)
                if port is None:
                    problems.append(f"NCCL_RAS_ADDR={address[:80]!r} of process {process.pid}: only loopback is asked")
                else:
                    found.setdefault(port)
        return list(found)[:PORTS_MAX]

    def _reply(self, port: int, problems: list[str]) -> Reply | None:
        try:
            return self._ask(port, DEADLINE_S, text=port in self._long)
        except TooLong as error:
            self._long.add(port)
            problems.append(f"{error}; asked in text from now on")
        except NoAnswer as error:
            self._drops.count("nccl_ras_refused" if error.refused else "nccl_ras_unanswered")
            # NCCL opens the port with its first communicator: until the first answer there may be none.
            if not error.refused or port in self._answers:
                problems.append(str(error))
        except BadReply as error:
            self._drops.count("nccl_ras_malformed")
            problems.append(f"port {port}: {error}")
        return None

    def _put_rows(
        self, reply: Reply, environments: Mapping[TrainingProcess, ProcessEnvironment], observed: Observed
    ) -> None:
        own = self._addresses()
        by_pid = {environment.own_pid: process for process, environment in environments.items()}
        width: dict[int, tuple[int, str]] = {}
        for communicator in reply.communicators:
            if not (self._every_node or _within(communicator, own)):
                continue
            for member in communicator.members:
                process = by_pid.get(member.pid) if member.host in own else None
                if process is None or self._taken(process.device):
                    continue
                rank_width = (communicator.size, communicator.id)
                if rank_width > width.get(process.device, (0, "")):
                    width[process.device] = rank_width
                    observed.devices[process.device] = {"nccl_sequence": float(member.enqueued)}


def own_addresses() -> frozenset[str]:
    """Return this node's IP addresses, as text."""
    return frozenset(address.address.partition("%")[0] for found in psutil.net_if_addrs().values() for address in found)


def _within(communicator: Communicator, own: frozenset[str]) -> bool:
    members = communicator.members
    return len(members) == communicator.size and all(member.host in own for member in members)


def _port(address: str) -> int | None:
    """Return the port in NCCL_RAS_ADDR; None where it is bound to anything but this host's loopback."""
    if not address:
        return DEFAULT_PORT
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        return None
    return int(match["port"]) if (match["host"] if match["v6"] is None else match["v6"]).lower() in LOOPBACK else None
