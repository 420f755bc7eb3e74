"""The site that is simulated: jobs that begin, end and are restarted, nodes that come and leave, faults, repairs.

Everything is drawn from one seed. What the server asks for is carried out as an orchestrator would, and reported.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.faults import KINDS, Fault, Kind, inject
from benchmarks.soak.fleet import Agents, Membership
from benchmarks.soak.plan import Plan
from benchmarks.soak.site import Site, until
from eagle_eye.schema import action as schema
from eagle_eye.simulator.load.connection import enrol, load_target

JOB_NODES = (4, 6, 8, 12, 16)
SPARE_RATIO = 0.1  # of the places that no job takes
RESTART_S = (1.0, 4.0)
REPAIR_S = (15.0, 40.0)
FAREWELL_S = 10.0
FORGET_S = 45.0  # after a node has left for good
PATIENCE = 2.0  # times a fault's time, after which nobody waits for the server any more


@dataclass
class Run:
    """A job. ``places`` are its nodes' in the order of its ranks; ``fault``: what it suffers from."""

    name: str
    number: int
    places: list[int]
    ends_s: float
    attempt: int = 0
    began_s: float = 0.0
    fault: Fault | None = None
    busy: bool = False  # it is being started, restarted or ended


@dataclass
class World:
    """The site's state; ``killed_s`` and ``away_s`` are told by whoever stops the server."""

    site: Site
    agents: Agents
    plan: Plan
    random: random.Random
    runs: dict[str, Run] = field(default_factory=dict)
    spares: deque[int] = field(default_factory=deque)
    faults: list[Fault] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    unexplained: Counter[str] = field(default_factory=Counter)
    quiet: bool = False  # nothing new is begun
    _restarting: Counter[int] = field(default_factory=Counter)  # places whose agents are killed to be started again
    _left: deque[tuple[float, str]] = field(default_factory=deque)  # nodes that are gone, and when to forget them
    _turned_s: float = 0.0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _next_s: dict[str, float] = field(default_factory=dict)
    _kinds: list[Kind] = field(default_factory=list)
    _incidents: dict[str, str] = field(default_factory=dict)
    _actions: set[str] = field(default_factory=set)

    async def begin(self) -> None:
        """All nodes are enrolled and report; the first jobs run."""
        agents = self.agents
        agents.tokens[:] = await enrol(load_target(self.site.url), self.site.join, agents.names)
        for at in range(len(agents)):
            await agents.start(at)
        order = list(range(len(agents)))
        self.random.shuffle(order)
        self.spares.extend(order)
        now_s = time.time()
        for what, every_s in self.plan.every_s.items():
            self._next_s[what] = now_s + self.random.uniform(0.5, 1.0) * every_s
        self.turn()

    def turn(self) -> None:
        """Do what is due. Called once a second."""
        now_s = time.time()
        passed_s, self._turned_s = now_s - (self._turned_s or now_s), now_s
        self._abandon(passed_s)
        if self.quiet:
            return
        self._fill(now_s)
        for run in list(self.runs.values()):
            if now_s > run.ends_s and not run.busy and run.fault is None:
                self._do(self._end(run))
        self._forget_left(now_s)
        due = {"fault": self._fault, "node": self._replace, "agent": self._restart_agent}
        for what, act in due.items():
            if now_s >= self._next_s[what]:
                every_s = self.plan.every_s[what]
                self._next_s[what] = now_s + self.random.uniform(0.5, 1.5) * every_s
                act(now_s)

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event that came for the first time."""
        data, now_s = event["data"], time.time()
        if event["type"] == schema.INCIDENT_OPENED:
            self._hear_incident(data, now_s)
        elif event["type"] == schema.ACTION_REQUESTED:
            self._do(self._act(data, now_s))

    async def restart_agents(self) -> None:
        """Every agent that runs is killed and begins anew, as when a fleet is upgraded at once."""
        for at in range(len(self.agents)):
            if self.agents.is_on(at):
                await self._again(at)

    async def settle(self, patience_s: float) -> None:
        """Begin nothing new and wait until what is under way is over."""
        self.quiet = True
        await until(lambda: not self._tasks and not any(run.fault for run in self.runs.values()), patience_s)

    async def close(self) -> None:
        """Nothing goes on."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open_faults(self) -> int:
        """How many faults nobody has dealt with yet."""
        return sum(fault.over_s is None for fault in self.faults)

    def _do(self, work: Awaitable[object]) -> None:
        async def done() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - whatever it is, the soak has found it
                self.wrong.append(f"{type(error).__name__}: {error}")

        task = asyncio.get_running_loop().create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fill(self, now_s: float) -> None:
        """Begin jobs while there are nodes for them: as many of each size, so that the load stays the same."""
        kept = max(2, int(SPARE_RATIO * len(self.agents)))
        while True:
            running = Counter(len(run.places) for run in self.runs.values())
            sizes = {min(size, max(len(self.agents) // 3, 2)) for size in JOB_NODES}
            size = min(sizes, key=lambda size: (running[size], size))
            if len(self.spares) < size + kept:
                return
            self.counts["jobs"] += 1
            number = self.counts["jobs"]
            places = [self.spares.popleft() for _ in range(size)]
            # The first ones end at all times, as those that began before would.
            shares = (0.5, 1.5) if self.counts["jobs_ended"] else (0.1, 1.5)
            lasts_s = self.random.uniform(*shares) * self.plan.job_s
            run = Run(f"soak-job-{number:05d}", number, places, now_s + lasts_s, busy=True)
            self.runs[run.name] = run
            self._do(self._start(run))

    async def _start(self, run: Run) -> None:
        """An attempt of the job runs on its places."""
        run.busy = True
        await self._tell(run, "running")
        for at in run.places:
            self.agents.take_part(at, self._member(run, at))
        run.began_s, run.busy = time.time(), False

    async def _end(self, run: Run) -> None:
        run.busy = True
        await self._tell(run, "finished")
        for at in run.places:
            self.agents.take_part(at, None)
        del self.runs[run.name]
        self.spares.extend(run.places)
        self.counts["jobs_ended"] += 1

    async def _tell(self, run: Run, state: str) -> None:
        ranks = [
            {"rank": index * self.plan.gpus + device, "node": self.agents.names[at], "device": device}
            for index, at in enumerate(run.places)
            for device in range(self.plan.gpus)
        ]
        body = {"attempt": run.attempt, "state": state, "ranks": ranks, "restart_owner": "eagle-eye"}
        await self.site.ask("PUT", f"/api/v1/jobs/{run.name}", body)

    def _member(self, run: Run, at: int) -> Membership:
        gpus = self.plan.gpus
        return Membership(run.name, run.number, run.attempt, run.places.index(at) * gpus, len(run.places) * gpus)

    def _fault(self, now_s: float) -> None:
        """Something breaks in a job that nothing else happens to."""
        calm_s = self.plan.calm_s
        able = [
            run
            for run in self.runs.values()
            if not run.busy and run.fault is None and now_s - run.began_s > calm_s and run.ends_s - now_s > calm_s
        ]
        if not able or len(self.spares) < 2:
            return
        if not self._kinds:
            self._kinds = [kind for kind in KINDS if not self.plan.kinds or kind.name in self.plan.kinds]
            self.random.shuffle(self._kinds)
        run = self.random.choice(able)
        places = [at for at in run.places if not self._restarting[at]]  # a node whose agent comes back is not dead
        if not places:
            return
        kind, at, device = self._kinds.pop(), self.random.choice(places), self.random.randrange(self.plan.gpus)
        fault = Fault(kind, run.name, run.attempt, self.agents.names[at], at, device, now_s)
        run.fault, run.ends_s = fault, run.ends_s + 2 * kind.within_s
        self.faults.append(fault)
        self._do(inject(fault, self.agents, run.places, self._member(run, at)))

    def _replace(self, _now_s: float) -> None:
        """A spare node leaves for good, and one that nobody knows takes its place."""
        if self.spares:
            self._do(self._renew(self.spares.popleft()))

    async def _renew(self, at: int) -> None:
        self.counts["nodes_left"] += 1
        self._left.append((time.time() + FORGET_S, self.agents.names[at]))
        name = f"soak-{len(self.agents) + self.counts['nodes_left']:06d}"
        await self.agents.farewell(at, "decommissioned", FAREWELL_S)
        while True:
            try:
                (self.agents.tokens[at],) = await enrol(load_target(self.site.url), self.site.join, [name])
            except OSError:
                await asyncio.sleep(1.0)  # the server is away
            else:
                break
        await self.agents.start(at, name)
        self.spares.append(at)

    def _forget_left(self, now_s: float) -> None:
        """Have the server forget nodes that are gone for good, as whoever decommissions them does."""
        names = [name for due_s, name in self._left if due_s <= now_s]
        if names:
            self._left = deque(one for one in self._left if one[0] > now_s)
            body = {"nodes": names, "force": True, "reason": "decommissioned"}
            self._do(self.site.ask("POST", "/api/v1/nodes/forget", body))

    def _restart_agent(self, _now_s: float) -> None:
        faulty = {run.fault.at for run in self.runs.values() if run.fault is not None}
        on = [at for at in range(len(self.agents)) if self.agents.is_on(at) and at not in faulty]
        self._do(self._again(self.random.choice(on)))

    async def _again(self, at: int) -> None:
        """The agent of a place is killed and begins anew."""
        self._restarting[at] += 1
        try:
            await self.agents.kill(at)
            await self.agents.start(at)
        finally:
            self._restarting[at] -= 1
        self.counts["agents_restarted"] += 1

    def _hear_incident(self, data: dict[str, Any], now_s: float) -> None:
        id_ = data["incident_id"]
        fault = self._fault_of(data)
        if id_ in self._incidents:
            self.counts["incidents_come_back"] += 1
            return
        self._incidents[id_] = data["fault"]
        if fault is None:
            self.unexplained[data["fault"]] += 1
            return
        fault.incidents.append(id_)
        fault.reported_s = fault.reported_s or now_s
        if data["fault"] not in fault.kind.names:
            self.counts["incidents_of_another_name"] += 1

    def _fault_of(self, data: dict[str, Any]) -> Fault | None:
        known = [f for f in self.faults if (f.job, f.attempt) == (data["job"], data["attempt"])]
        return known[-1] if known else None

    async def _act(self, data: dict[str, Any], now_s: float) -> None:
        """Do what is asked for, and say so."""
        id_, run = data["action_id"], self.runs.get(data["job"])
        fault = self._fault_of(data)
        if id_ in self._actions:
            return
        self._actions.add(id_)
        if fault is None:
            self.wrong.append(
                f"{data['kind']} of {data['exclude']} in {data['job']} without a fault: {data['summary']}"
            )
        else:
            fault.actions.append(id_)
            fault.asked_s = fault.asked_s or now_s
            if not set(data["exclude"]) <= {fault.node}:
                self.wrong.append(f"{fault.kind.name} of {fault.node}: {data['exclude']} were to be excluded")
        if run is None or run.busy or run.attempt != data["attempt"]:
            await self._report(id_, "refused", "the job is over or was restarted")
            return
        run.busy = True
        await self._report(id_, "accepted")
        await asyncio.sleep(self.random.uniform(*RESTART_S))
        await self._next_attempt(run, set(data["exclude"]))
        await self._report(id_, "done")

    async def _report(self, action: str, state: str, detail: str = "") -> None:
        path = f"/api/v1/actions/{action}/reports"
        await self.site.ask("POST", path, {"state": state, "detail": detail}, accepted=(409,))

    async def _next_attempt(self, run: Run, without: set[str]) -> None:
        """The job goes on in another attempt, with spares for the nodes that leave."""
        fault, run.fault = run.fault, None
        leaving = [at for at in run.places if self.agents.names[at] in without]
        if fault is not None and fault.kind.excludes and fault.at in run.places and fault.at not in leaving:
            leaving.append(fault.at)  # nobody asked for it; it is broken all the same
        for at in leaving:
            self.agents.take_part(at, None)
            run.places[run.places.index(at)] = self.spares.popleft()
            self._do(self._repair(at, excluded=self.agents.names[at] in without))
        run.attempt += 1
        self.counts["attempts"] += 1
        await self._start(run)
        if fault is not None:
            fault.over_s = time.time()

    async def _repair(self, at: int, *, excluded: bool) -> None:
        """A node that was taken out comes back repaired, or another one does in its place."""
        await asyncio.sleep(self.random.uniform(*REPAIR_S))
        if not self.agents.is_on(at):
            await self.agents.start(at)
        if self.random.random() < 0.5:
            await self._renew(at)
            return
        if excluded:
            path = f"/api/v1/nodes/{self.agents.names[at]}/readmit?force=true&reason=repaired"
            await self.site.ask("POST", path, accepted=(404,))
        self.counts["nodes_repaired"] += 1
        self.spares.append(at)

    def _abandon(self, passed_s: float) -> None:
        """Restart jobs whose faults a server that runs has not found in time: they are missed."""
        for run in list(self.runs.values()):
            fault = run.fault
            if fault is None or run.busy:
                continue
            fault.waited_s += passed_s if self.site.serving else 0.0
            if fault.waited_s > PATIENCE * fault.kind.within_s:
                self.wrong.append(f"{fault.kind.name} of {fault.node} in {fault.job}: nothing was asked for")
                run.busy = True
                self._do(self._next_attempt(run, set()))
