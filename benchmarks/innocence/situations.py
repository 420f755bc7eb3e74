"""Everything that looks like a fault to whoever watches, and is none: each claims that nothing is asked of anybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.innocence.world import JOB, NEIGHBOUR, World
from eagle_eye.server.engine.ledger import SERVER, Offer, ReturnRequest, returning, stand, take_out
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Node
from eagle_eye.server.store.store import ACTIONS, NODES, Change

FROZEN = {"node_iowait_ratio": 0.6, "node_io_pressure_ratio": 0.9, "node_blocked_tasks": 24.0,
          "node_disk_read_bytes_per_second": 0.0, "node_disk_write_bytes_per_second": 0.0}  # fmt: skip
WRITING = {"node_iowait_ratio": 0.3, "node_io_pressure_ratio": 0.5, "node_blocked_tasks": 4.0,
           "node_disk_write_bytes_per_second": 4e7}  # fmt: skip
# What GPUs show that train, that wait in a collective, that evaluate, and that have nothing to do.
TRAINING = {"gpu_utilization_ratio": 0.99, "gpu_tensor_active_ratio": 0.45, "gpu_power_watts": 650.0}
SPINNING = {"gpu_utilization_ratio": 1.0, "gpu_tensor_active_ratio": 0.0, "gpu_power_watts": 280.0}
COMPUTING = {"gpu_utilization_ratio": 0.95, "gpu_tensor_active_ratio": 0.25, "gpu_power_watts": 500.0}
IDLE = {"gpu_utilization_ratio": 0.0, "gpu_tensor_active_ratio": 0.0, "gpu_power_watts": 110.0}
# What ranks show whose peers died a moment before them, of SIGTERM; by it alone everybody knows that it was meant.
LOST_PEER_EXIT, SIGKILL_EXIT = 1, -9


@dataclass(frozen=True)
class Situation:
    """``play`` lets it happen; what it returns speaks against us, None where nothing does.

    ``training``: whether the job makes steps before it. ``guilty``: whether it is a fault after all, which shows that
    the world is one in which faults are found.
    """

    name: str
    play: Callable[[World], str | None]
    training: bool = True
    guilty: bool = False

    @property
    def about(self) -> str:
        """Return what happens, in a sentence."""
        return (self.play.__doc__ or "").strip().partition("\n")[0]


def rolling_restart(world: World) -> None:
    """All agents are upgraded one after the other, some by SIGTERM, some by SIGKILL."""
    for number, node in enumerate(list(world.hosts)):
        world.agent_stops(node, goodbye=number % 2 == 0)
        world.run(world.pace.away_s)
        world.agent_starts(node)
        world.run(3)


def agents_restart_together(world: World) -> None:
    """A configuration management restarts all agents at once, without goodbye."""
    for node in world.hosts:
        world.agent_stops(node, goodbye=False)
    world.run(world.pace.away_s)
    for node in world.hosts:
        world.agent_starts(node)


def server_killed(world: World) -> None:
    """The server is killed and comes back after a while; agents have kept their frames."""
    world.server_dies()
    world.run(world.pace.away_s * 3)
    world.server_starts()


def server_killed_twice(world: World) -> None:
    """It is killed again before it has caught up."""
    for _ in range(2):
        world.server_dies()
        world.run(world.pace.away_s)
        world.server_starts()
        world.run(2)


def management_network_away(world: World) -> None:
    """No agent reaches the server for a minute; the job trains on."""
    for host in world.hosts.values():
        host.silent = True
    world.run(world.pace.network_s)
    for host in world.hosts.values():
        host.silent = False


def management_network_away_for_some(world: World) -> None:
    """A management switch takes two nodes' agents away for a minute."""
    some = list(world.hosts.values())[:2]
    for host in some:
        host.silent = True
    world.run(world.pace.network_s)
    for host in some:
        host.silent = False


def tokens_expired(world: World) -> None:
    """The tokens of half of the agents expire, later those of all; a while later all have new ones.

    Agents whose token is refused keep their frames: to the engine it is silence without goodbye.
    """
    hosts = list(world.hosts.values())
    for host in hosts[: len(hosts) // 2]:
        host.silent = True
    world.run(world.pace.network_s)
    for host in hosts:
        host.silent = True
    world.run(world.pace.network_s)
    for host in hosts:
        host.silent = False


def server_clock_steps(world: World) -> None:
    """The server's clock is set an hour ahead, and back."""
    for hour in (3600.0, -3600.0):
        world.clocks.wall_s += hour
        world.run(world.pace.calm_s)


def node_clock_steps(world: World) -> None:
    """A node's clock is set twelve seconds ahead; the server learns of it within two requests."""
    host = world.hosts["n1"]
    for offset_s in (12.0, -12.0):
        host.offset_s = offset_s
        world.run(2)
        host.offset_s = 0.0
        world.run(world.pace.calm_s)


def storage_frozen(world: World) -> None:
    """The file system hangs: all ranks wait for their data, none says a word, nothing is read or written."""
    for host in world.hosts.values():
        host.row = FROZEN
    world.run(3)
    world.stepping = False
    for _ in range(world.pace.storage_s):
        for host in world.hosts.values():
            host.rank_silent_s += 1.0
        world.run(1)
    for host in world.hosts.values():
        host.row, host.rank_silent_s = {}, 0.0
    world.stepping = True


def storage_frozen_in_a_collective(world: World) -> None:
    """The same, and the fastest ranks have already entered the next collective."""
    world.waiting = True
    world.hosts["n1"].behind = 1.0
    storage_frozen(world)
    world.waiting, world.hosts["n1"].behind = False, 0.0


def slow_checkpoint_on_rank_0(world: World) -> None:
    """Rank 0 writes for 20 minutes; the others have written and wait for it in the next collective."""
    for node in world.hosts:
        world.phase(node, "checkpoint")
        world.hosts[node].row = WRITING
    world.stepping = False
    world.run(5)
    for node in list(world.hosts)[1:]:
        world.phase(node, "train")
        world.hosts[node].row = {}
    world.waiting, world.hosts["n0"].behind = True, 1.0
    world.run(world.pace.checkpoint_s)
    world.phase("n0", "train")
    world.waiting, world.stepping = False, True
    world.hosts["n0"].behind, world.hosts["n0"].row = 0.0, {}


def lone_save(world: World) -> None:
    """Rank 0 saves for half a minute, for minutes, for ten, and says nothing of it; the others wait for it."""
    _lone_pauses(world, IDLE, 0.3, WRITING | {"node_disk_write_bytes_per_second": 1.5e9})


def lone_evaluation(world: World) -> None:
    """Rank 0 evaluates alone, as long, and says nothing of it."""
    _lone_pauses(world, COMPUTING, 1.1, {})


def lone_compilation(world: World) -> None:
    """Rank 0 compiles or tunes kernels alone, as long: its GPU runs nothing, a processor works."""
    _lone_pauses(world, IDLE, 1.0, {})


def lone_pause_unseen(world: World) -> None:
    """Rank 0 does something of which nothing is seen, for less than the site's floor, in a job without a pause yet."""
    _pause_alone(world, int(0.8 * world.pace.settings.hang_floor_s), IDLE, 0.02, {})


def cancelled(world: World) -> None:
    """The user cancels the job: its ranks die a moment before the scheduler is asked again."""
    _ended(world, "cancelled", LOST_PEER_EXIT)


def preempted(world: World) -> None:
    """The scheduler takes the nodes away and kills what lingers."""
    _ended(world, "preempted", SIGKILL_EXIT)


def time_limit(world: World) -> None:
    """The job's time is over."""
    _ended(world, "timeout", LOST_PEER_EXIT)


def neighbour_cancelled(world: World) -> None:
    """One of two jobs that share nodes is cancelled; the other trains on."""
    world.neighbours = tuple(world.hosts)[:2]
    world.schedule(JOB, "running")
    world.schedule(NEIGHBOUR, "running")
    world.run(world.pace.calm_s)
    world.schedule(NEIGHBOUR, "cancelled")
    world.ranks_die(LOST_PEER_EXIT, NEIGHBOUR)
    world.run(world.pace.calm_s)


def administrators_drain(world: World) -> str | None:
    """A node that an action of ours had drained gets another reason by an administrator: from then on it is his."""
    now_s = world.clocks.now_s()
    fresh = Node(node="n1", state="in_service", reason="", updated_s=now_s)
    ours = take_out(fresh, "recurrent_node", "recurrent_node: inc_1", "draining", now_s)
    if ours.by != SERVER:
        return f"our own drain is {ours.by}'s"
    world.store.commit(Change(nodes=(ours,)))
    world.run(world.pace.calm_s)
    theirs = stand(ours, "excluded", "bad fan", world.clocks.now_s(), "slurm")
    world.store.commit(Change(nodes=(theirs,)))
    world.run(world.pace.calm_s)
    found = world.store.get(NODES, "n1")
    if found != theirs:
        return f"the administrator's drain has become {found}"
    # Neither our next action on the node nor a return that we ask for touches it.
    again = take_out(theirs, "gpu_lost", "gpu_lost: inc_2", "excluded", world.clocks.now_s())
    if (again.reason, again.by) != ("bad fan", "slurm"):
        return f"an action of ours made it {again}"
    asking = ReturnRequest(who=SERVER, reason="repaired", check=False, force=False)
    answer = returning(theirs, asking, Offer("none", ""), world.store.all(ACTIONS), PolicySettings(), now_s)
    return None if (answer.way, answer.word) == ("refuse", "not_ours") else f"its return was answered {answer}"


def long_start(world: World) -> None:
    """Twenty minutes from the start of the processes to the first step: data set index, compilation."""
    world.run(world.pace.start_s)
    world.step = 0.0


def control_gpu_lost(world: World) -> None:
    """Control: a GPU falls off the bus, and the job stands still."""
    world.happens("n1", "xid", code=79, text="GPU has fallen off the bus")
    world.stepping, world.waiting = False, True
    world.run(world.pace.calm_s)


def control_hang(world: World) -> None:
    """Control: a rank hangs, all others wait for it in a collective."""
    world.stepping, world.waiting = False, True
    world.hosts["n1"].behind = 1.0
    for _ in range(world.pace.calm_s):
        world.hosts["n1"].rank_silent_s += 1.0
        world.run(1)


def control_hang_after_a_pause(world: World) -> None:
    """Control: rank 0 lags behind, its GPU runs nothing, its process does nothing, and longer than the job's pauses."""
    seconds = world.pace.lone_s[0]
    _pause_alone(world, seconds, IDLE, 1.0, {})
    world.run(world.pace.calm_s)
    _pause_alone(world, 2 * seconds, IDLE, 0.02, {})


def control_unreachable(world: World) -> None:
    """Control: a node is silent, and the job stands still because of it."""
    world.hosts["n1"].silent = True
    world.stepping, world.waiting = False, True
    world.run(world.pace.calm_s)


def control_crash(world: World) -> None:
    """Control: the ranks die as by scancel, but the scheduler says that nobody stopped the job."""
    _ended(world, "running", LOST_PEER_EXIT)


def _lone_pauses(world: World, gpu: dict[str, float], cpus: float, row: dict[str, float]) -> None:
    """Let rank 0 pause for ever longer, in the first attempt and in the next one."""
    for attempt in range(2):
        if attempt:
            world.attempt = attempt
            world.declare()
            world.run(world.pace.calm_s)
        for seconds in world.pace.lone_s:
            _pause_alone(world, seconds, gpu, cpus, row)
            world.run(world.pace.calm_s)


def _pause_alone(world: World, seconds: int, gpu: dict[str, float], cpus: float, row: dict[str, float]) -> None:
    """Let rank 0 do something alone while all others wait for it in the next collective."""
    for host in world.hosts.values():
        host.gpu, host.cpus = TRAINING, 1.2
    world.run(5)
    first, *others = world.hosts.values()
    for host in others:
        host.gpu = SPINNING
    first.gpu, first.cpus, first.row, first.behind = gpu, cpus, row, 1.0
    world.stepping, world.waiting = False, True
    world.run(seconds)
    world.stepping, world.waiting = True, False
    for host in world.hosts.values():
        host.gpu, host.cpus = TRAINING, 1.2
    first.row, first.behind = {}, 0.0


def _ended(world: World, state: str, exit_code: int) -> None:
    world.schedule(JOB, "running")
    world.run(world.pace.calm_s)
    while world.clocks.steady_s % world.heard_every_s != 1:
        world.run(1)
    world.ranks_die(exit_code)
    world.run(1)
    world.schedule(JOB, state)  # it is asked nine seconds later at the earliest
    world.run(world.pace.calm_s)


SITUATIONS = tuple(
    Situation(play.__name__, play, training=play is not long_start)
    for play in (
        rolling_restart, agents_restart_together, server_killed, server_killed_twice, management_network_away,
        management_network_away_for_some, tokens_expired, server_clock_steps, node_clock_steps, storage_frozen,
        storage_frozen_in_a_collective, slow_checkpoint_on_rank_0, lone_save, lone_evaluation, lone_compilation,
        lone_pause_unseen, long_start, cancelled, preempted, time_limit,
        neighbour_cancelled, administrators_drain,
    )
)  # fmt: skip
CONTROLS = tuple(
    Situation(play.__name__, play, guilty=True)
    for play in (control_gpu_lost, control_hang, control_hang_after_a_pause, control_unreachable, control_crash)
)
