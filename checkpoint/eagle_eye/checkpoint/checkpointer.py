"""``MemoryCheckpointer``: a training job's state in memory, on its node and at its neighbours, at each step.

TRANSOM's checkpoint engine (TCE, arXiv 2310.10046) and Gemini (SOSP 2023) in one: ``capture`` copies a rank's shard
into shared memory and returns; the node's store copies it to other nodes, and whole steps to storage, in the
background; ``restore`` reads the newest step of which every shard has a copy left.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from eagle_eye.checkpoint import restart_point
from eagle_eye.checkpoint.connection import connect
from eagle_eye.checkpoint.messages import (
    Blob,
    Captured,
    CaptureEvery,
    CopyInfo,
    Find,
    Found,
    GetBlob,
    Grant,
    JobNode,
    KeptStep,
    Message,
    MetadataMade,
    MetadataWanted,
    Open,
    Persisted,
    Skipped,
    SlotsOpened,
    Whole,
)
from eagle_eye.checkpoint.placement import place, read_failure_domains, together
from eagle_eye.checkpoint.shards import (
    DeviceCopies,
    HostCopies,
    JobLayout,
    LocalShard,
    MemoryReader,
    RemoteShard,
    Shard,
    ShardLayout,
    ShardWriter,
    copies_for,
    named,
    unpack,
)
from eagle_eye.checkpoint.shared_memory import mapped
from eagle_eye.checkpoint.slots import kept_from_before
from eagle_eye.checkpoint.state import KeptState
from eagle_eye.checkpoint.storage import folder_of, set_aside
from eagle_eye.checkpoint.store_client import AttemptConnection, StoreClient
from eagle_eye.schema.checkpoint_files import MEMORY_PREFIX, has_all_ranks, step_folders, step_of, store_folder

_log = logging.getLogger(__name__)

KEY_FILE, COMMITTED_FILE = ".eagle-eye-key", ".eagle-eye-committed"
RESUME_VARIABLE = "EAGLE_EYE_RESUME_FROM"
REMOTE_WITHIN_S = 30.0
NAMED_MAX = 5

T = TypeVar("T")


class NoCheckpoint(RuntimeError):
    """There should be a step to resume from, but no copy of one is left."""


class AnotherModel(ValueError):
    """The checkpoint is of another model: tensors are missing from it or have another shape."""


class NotTheSame(ValueError):
    """Ranks have different parameters under one name, which torch.distributed.checkpoint treats as copies."""


class _Reported(msgspec.Struct, frozen=True):
    """What each rank reports to the others before they decide where to resume.

    For the launcher's instruction (``resume_from``) and the steps ``on_storage``, rank 0's values are used.
    """

    node: str
    address: str
    attempt: int
    copies: tuple[CopyInfo, ...]
    kept: tuple[int, ...] = ()
    resume_from: str = ""
    on_storage: tuple[int, ...] = ()

    def newest_on_storage(self, at_most: int | None) -> int | None:
        """Return the newest step on storage that is no later than this one, None where there is none."""
        return max((step for step in self.on_storage if at_most is None or step <= at_most), default=None)


class _Step(msgspec.Struct, frozen=True):
    """A step with a copy of every shard: ``where`` are (node, address) by rank."""

    step: int
    attempt: int
    plan: str
    tails: dict[int, tuple[int, ...]]
    lengths: dict[int, int]
    where: dict[int, tuple[tuple[str, str], ...]]


class MemoryCheckpointer:
    """Keeps a training job's state in memory. Create it and call ``restore`` on every rank before training.

    ``state`` names the objects to keep: models, optimizers, tensors, and anything with ``state_dict`` and
    ``load_state_dict``. ``directory`` is shared storage: every ``persist_every`` steps (0: never) a whole step goes
    there as a plain torch.distributed.checkpoint folder ``step_N``. ``replicas`` counts the node's own copy, ``keep``
    the whole steps. With ``reach_s`` two more are kept, so that once the job has run that long, a whole step of that
    age is in memory. With a ``topology`` file (the server's) copies are spread over several switches and racks where
    possible. ``resumed_from`` says where ``restore`` found the state: step, where (memory, storage) and nodes; None:
    nowhere.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        directory: str | os.PathLike[str],
        persist_every: int = 0,
        *,
        replicas: int = 2,
        keep: int = 2,
        reach_s: float = 0.0,
        job: str | None = None,
        node: str | None = None,
        topology: str | os.PathLike[str] | None = None,
    ) -> None:
        if replicas < 1 or keep < 1 or persist_every < 0:
            raise ValueError(f"replicas={replicas}, keep={keep}, persist_every={persist_every}: at least 1, 1 and 0")
        if not 0 <= reach_s < math.inf:
            raise ValueError(f"reach_s={reach_s}: expected seconds, 0 or more")
        self._state = KeptState(state)
        self._directory = Path(directory).absolute()
        self._persist_every = persist_every
        self._replicas = replicas
        self._keep = keep
        self._reach_s = reach_s
        self._topology = None if topology is None else Path(topology)
        self._node = node or os.environ.get("EAGLE_EYE_NODE") or socket.gethostname()
        self._job = job or os.environ.get("EAGLE_EYE_JOB") or self._directory.name
        self._distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if self._distributed else 0
        self._world = dist.get_world_size() if self._distributed else 1
        # Objects travel over the CPU's network, whatever the training's backend is.
        self._group = dist.new_group(backend="gloo") if self._distributed else None
        self._key = self._shared(self._make_key)
        self._client = StoreClient(store_folder(self._node), self._node, self._job, self._key)
        self._plan: tuple[JobLayout, ShardWriter] | None = None
        self._slots: dict[str, tuple[memoryview, list[torch.Tensor]]] = {}
        self._copies: DeviceCopies = HostCopies()
        self._granted: Grant | None = None
        self._lock = threading.Lock()
        self._line: AttemptConnection | None = None
        self._whole: int | None = None
        self._calls, self._capture_every = 0, 1
        self._committed = False
        self._said: set[str] = set()
        self.resumed_from: dict[str, Any] | None = None
        self.counts: dict[str, float] = {"captured": 0, "skipped": 0, "not_due": 0, "blocked_s": 0.0, "bytes": 0}

    @property
    def whole_step(self) -> int | None:
        """The newest step with all copies of all shards whole, None before the first."""
        return self._whole

    def restore(self) -> int:
        """Load the state and return its step; 0 for a job that has never had one. Every rank calls it, once.

        Loads what the launcher names (``EAGLE_EYE_RESUME_FROM``: a folder, or ``memory:STEP``), else the newest step
        that is whole in memory or on storage. Raises NoCheckpoint, AnotherModel, NotTheSame, DoesNotFit, and OSError.
        """
        everyone = self._gathered(self._tell)
        step, chosen = self._resume(everyone)
        if everyone[0].resume_from.startswith(MEMORY_PREFIX):
            self._shared(lambda: self._set_aside_later(step, _next_attempt(everyone)))
        # Asking a data loader for its state starts it, which draws random numbers: not from the restored ones.
        with torch.random.fork_rng(devices=[], enabled=step > 0):
            self._plan, self._whole = self._planned(), step or None
        self._copies = copies_for(self._plan[1].devices, self._state.optimizers)
        self._agreed(lambda: self._client.open(self._opening(everyone, step, chosen), self._attach, self._hear))
        restart_point.keeps(self)
        return step

    def capture(self, step: int) -> None:
        """Capture the state at the end of this step, greater than any before. Never raises, never blocks.

        Every rank calls it at the same steps. A step that cannot be kept now is skipped, counted, and logged once.
        Where fewer than half become whole, all ranks make only every n-th capture: the others are not due.
        """
        began_s = time.monotonic()
        try:
            if self._is_due():
                self._capture(step, began_s)
            else:
                self.counts["not_due"] += 1
                self._client.say(Skipped(step, "another capture is due", due=False))
        except Exception as error:  # noqa: BLE001 - training must go on whatever happens to its checkpoints
            self._skip(step, f"{type(error).__name__}: {error}")
        self.counts["blocked_s"] += time.monotonic() - began_s

    def close(self, within_s: float = 60.0) -> None:
        """End the training normally: its memory is freed once every rank has called this.

        Waits up to ``within_s`` for the last capture to become whole, and to reach storage if it goes there.
        """
        self._client.close(ended=True, within_s=within_s)
        with self._lock:
            self._granted, self._slots = None, {}
            self._copies.close()

    def abandon(self) -> None:
        """Release this checkpointer for a successor: whole steps stay in memory for it, as if the process had died.

        Stops capturing.
        """
        self._client.close(ended=False)
        with self._lock:
            self._granted, self._line, self._slots = None, None, {}
            self._copies.close()

    # Where to resume.

    def _resume(self, everyone: Sequence[_Reported]) -> tuple[int, _Step | None]:
        """Load the best available step; return it, with its copies if it came from memory.

        If the launcher names a step in memory, later ones are not trusted, and earlier ones may be used.
        """
        word = everyone[0].resume_from
        if word and not word.startswith(MEMORY_PREFIX):
            return self._load_folder(Path(word)), None
        steps, newest = whole_steps(everyone), _step_of(word) if word else None
        if newest == 0:
            return 0, None  # start from scratch: no existing step is trusted
        on_storage = everyone[0].newest_on_storage(newest)
        if newest is not None:
            steps = [one for one in steps if one.step <= newest]
        looked_for = []
        for one in steps:
            if on_storage is not None and one.step < on_storage:
                continue
            try:
                self._load_memory(one)
            except (OSError, ValueError) as error:
                if isinstance(error, AnotherModel):
                    raise
                looked_for.append(f"step {one.step} in memory: {error}")
                _log.warning("step %d is not read from memory: %s", one.step, error)
                continue
            nodes = sorted({node for held in one.where.values() for node, _ in held})
            self.resumed_from = {"step": one.step, "where": "memory", "nodes": nodes}
            return one.step, one
        if on_storage is not None:
            return self._load_folder(folder_of(str(self._directory), on_storage)), None
        if word or looked_for or self._shared((self._directory / COMMITTED_FILE).exists):
            held = sorted({copy.step for one in everyone for copy in one.copies})
            whole = [one.step for one in steps]
            looked_for.append(f"copies in memory of steps {held or 'none'}, whole ones {whole or 'none'}")
            looked_for.append(f"folders step_N in {self._directory}")
            raise NoCheckpoint(
                f"job {self._job} has had a step, and none is left ({'; '.join(looked_for)}). To begin anew on purpose,"
                f" remove {self._directory / COMMITTED_FILE}"
            )
        return 0, None

    def _set_aside_later(self, step: int, attempt: int) -> None:
        """Make sure that a later restart without a launcher does not find the steps that this one must not trust."""
        renamed = set_aside(str(self._directory), step, attempt)
        if step == 0:
            (self._directory / COMMITTED_FILE).unlink(missing_ok=True)  # no remaining step counts
        if renamed:
            _log.warning("resumed at step %d, as told; set aside in %s: %s", step, self._directory, ", ".join(renamed))

    def _load_memory(self, step: _Step) -> None:
        layout = self._agreed(lambda: self._layout_of(step))
        reader = MemoryReader(layout, dict(step.tails), lambda rank: self._shards(step, rank), step.step)
        self._load(reader)

    def _load_folder(self, path: Path) -> int:
        step = step_of(path.name)
        if step is None:
            raise NoCheckpoint(f"{path} is no checkpoint of ours: its name should be step_N")
        self._load(FileSystemReader(path))
        self.resumed_from = {"step": step, "where": "storage", "nodes": []}
        return step

    def _load(self, reader: StorageReader) -> None:
        def read() -> dict[str, Any]:
            metadata = reader.read_metadata()
            state = self._state.to_load(metadata.state_dict_metadata, self._rank)
            _compare(state, metadata)
            planner = DefaultLoadPlanner(allow_partial_load=True)
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                    # Each rank reads what it needs without communication; success is agreed on below.
                    load(state, storage_reader=reader, planner=planner, no_dist=True)
            except (Exception, CheckpointException) as error:
                raise OSError(_first_line(error)) from error
            return state

        state = self._agreed(read)
        self._agreed(lambda: self._state.load(state))

    def _layout_of(self, step: _Step) -> JobLayout:
        data = self._client.blob(step.plan)
        addresses = {address for held in step.where.values() for _, address in held} if data is None else set()
        for address in sorted(addresses):
            try:
                connection = connect(address, self._job, self._key, REMOTE_WITHIN_S)
                try:
                    data = connection.request(GetBlob(step.plan), Blob).data
                finally:
                    connection.close()
            except OSError as error:
                _log.warning("%s does not say what is laid out where: %s", address, error)
            if data is not None:
                break
        if data is None:
            raise OSError(f"nobody says what is laid out where in step {step.step}")
        return unpack(data, self._key)

    def _shards(self, step: _Step, rank: int) -> Iterator[Shard]:
        """Yield a shard's copies: this node's own, then other nodes'. Raises OSError where there is none."""
        what = f"rank {rank}'s shard of step {step.step}"
        reasons = []
        for node, address in sorted(step.where[rank], key=lambda held: held[0] != self._node):
            try:
                if node == self._node:
                    found = self._client.find(step.plan, rank, step.step)
                    if found.path is not None and found.copy is not None and found.copy.attempt == step.attempt:
                        yield LocalShard(found.path, found.length, found.sums, f"{what} on {self._node}")
                        continue
                else:
                    connection = connect(address, self._job, self._key, REMOTE_WITHIN_S)
                    try:
                        copy = connection.request(Find(step.plan, rank, step.step), Found).copy
                    except BaseException:
                        connection.close()
                        raise
                    if copy is not None and copy.attempt == step.attempt:
                        named = (step.plan, rank, step.step)
                        yield RemoteShard(connection, named, step.lengths[rank], f"{what} on {node}")
                        continue
                    connection.close()
                reasons.append(f"{node} does not hold it any more")
            except OSError as error:
                reasons.append(f"{node}: {error}")
        if reasons:
            raise OSError(f"{what} is nowhere: {'; '.join(reasons)}")

    def _steps_on_storage(self) -> tuple[int, ...]:
        return tuple(one.step for one in step_folders(self._directory) if one.completed_s is not None)

    # Starting an attempt.

    def _tell(self) -> _Reported:
        welcome = self._client.hello()
        reported = _Reported(
            self._node, self._reachable(welcome.address), welcome.attempt, welcome.copies, welcome.kept
        )
        if self._rank != 0:
            return reported
        return msgspec.structs.replace(
            reported, resume_from=os.environ.get(RESUME_VARIABLE, ""), on_storage=self._steps_on_storage()
        )

    def _reachable(self, address: str) -> str:
        """Return the store's address as reachable by other nodes: on the network that this job uses."""
        host, _, port = address.rpartition(":")
        if host not in {"0.0.0.0", "::"}:  # noqa: S104 - that is what it is compared with
            return address
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return f"{probe.getsockname()[0]}:{port}"
        finally:
            probe.close()

    def _opening(self, everyone: Sequence[_Reported], step: int, resumed: _Step | None) -> Open:
        layout, writer = self._plan_of_all()
        nodes: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            nodes.setdefault(one.node, []).append(rank)
        address = {one.node: one.address for one in everyone}
        members = tuple(JobNode(node, address[node], tuple(ranks)) for node, ranks in nodes.items())
        replicas = min(self._replicas, len(nodes))
        holders = place(sorted(nodes), replicas, self._domains()).holders[self._node]
        kept = self._kept(everyone, layout.plan, resumed)
        return Open(
            job=self._job,
            key=self._key,
            attempt=_next_attempt(everyone),
            rank=self._rank,
            members=members,
            holders=holders,
            plan=layout.plan,
            blob=layout.pack(self._key),
            capacity_bytes=writer.capacity_bytes,
            keep=self._keep,
            step=step,
            resumed_step=resumed.step if resumed is not None else None,
            sources=self._sources(everyone, layout.plan, kept),
            directory=str(self._directory),
            persist_every=self._persist_every,
            persisted_step=everyone[0].newest_on_storage(step) or 0,
            resumed_attempt=resumed.attempt if resumed is not None else 0,
            reach_s=self._reach_s,
            kept=kept,
        )

    def _kept(self, everyone: Sequence[_Reported], plan: str, resumed: _Step | None) -> tuple[KeptStep, ...]:
        if resumed is None:
            return ()
        last = max(one.attempt for one in everyone)
        known = {step for one in everyone if one.attempt == last for step in one.kept}
        copies = [copy for one in everyone for copy in one.copies]
        return kept_from_before(plan, copies, known, (resumed.step, resumed.attempt), self._reach_s)

    def _sources(self, everyone: Sequence[_Reported], plan: str, kept: Sequence[KeptStep]) -> tuple[str, ...]:
        """Return the addresses of the stores with this rank's shards of the kept steps."""
        wanted = {(plan, self._rank, one.step, one.attempt) for one in kept}
        found = {
            one.address: None
            for one in everyone
            if any((copy.plan, copy.rank, copy.step, copy.attempt) in wanted for copy in one.copies)
        }
        return tuple(found)

    def _domains(self) -> dict[str, frozenset[str]]:
        return {} if self._topology is None else together(read_failure_domains(self._topology))

    def _plan_of_all(self) -> tuple[JobLayout, ShardWriter]:
        if self._plan is None:
            raise RuntimeError("restore() is called before the first capture()")
        return self._plan

    def _planned(self) -> tuple[JobLayout, ShardWriter]:
        """Agree with all ranks on the layout, as torch.distributed.checkpoint does when it saves."""
        planner = DefaultSavePlanner()

        def local_plan() -> tuple[SavePlan, dict[str, bytes]]:
            planner.set_up_planner(self._state.collect(self._rank), is_coordinator=self._rank == 0)
            return planner.create_local_plan(), self._state.fingerprints()

        reported = self._gathered(local_plan)
        _require_same([fingerprints for _, fingerprints in reported])
        plans = [plan for plan, _ in reported]
        made: list[tuple[ShardWriter, Metadata]] = []

        def shard_layout() -> ShardLayout:
            final, metadata = planner.create_global_plan(plans)
            made.append((ShardWriter(planner, planner.finish_plan(final[self._rank])), metadata))
            return made[0][0].layout

        layouts = self._gathered(shard_layout)
        self._state.forget_probe()
        writer, metadata = made[0]
        return named(layouts, metadata), writer

    def _attach(self, opened: SlotsOpened, line: AttemptConnection) -> None:
        """Map the (possibly recreated) slots, and write the parts that no capture writes."""
        with self._lock:
            self._granted, before = None, self._slots
            self._slots = {path: self._prepared(path) for path in opened.slots}
            self._line = line
        for view, _ in before.values():
            self._copies.detach(view)

    def _prepared(self, path: str) -> tuple[memoryview, list[torch.Tensor]]:
        _, writer = self._plan_of_all()
        view = memoryview(mapped(path, writer.capacity_bytes))
        self._copies.attach(view)
        return view, writer.prepare(view)

    # During training.

    def _is_due(self) -> bool:
        """Whether this capture is one that all ranks make, as the job has agreed."""
        self._calls += 1  # calls, not steps: all ranks count them alike, whatever their steps' increments
        return self._calls % self._capture_every == 0

    def _capture(self, step: int, began_s: float) -> None:
        _, writer = self._plan_of_all()
        with self._lock:
            grant, self._granted, line = self._granted, None, self._line
            if grant is None or line is None:
                self._skip(step, "no slot is free: earlier steps are still being copied, or the store is away")
                return
            view, targets = self._slots[grant.path]
            self._copies.begin()
            try:
                length, tail = writer.write(self._state.collect(self._rank), view, targets, self._copies)
            except BaseException:
                self._granted = grant
                raise
            finally:
                copied = self._copies.end()
                self._state.forget_probe()
            line.say(Captured(step, grant.slot, length, tail, time.time(), time.monotonic() - began_s), copied)
        self.counts["captured"] += 1
        self.counts["bytes"] += length

    def _skip(self, step: int, reason: str) -> None:
        self.counts["skipped"] += 1
        self._client.say(Skipped(step, reason[:500]))
        kind = reason.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("step %d is not kept in memory: %s (counted from now on, and not said again)", step, reason)

    def _hear(self, message: Message) -> None:
        match message:
            case Grant(_, path):
                prepared = self._slots.get(path) or self._prepared(path)  # a capture does not wait for that
                with self._lock:
                    self._slots[path] = prepared
                    self._granted = message
            case CaptureEvery(captures):
                self._capture_every = captures
            case Whole(step):
                if not self._committed and self._rank == 0:
                    self._commit(step)
                self._whole = self._client.whole = step
            case MetadataWanted(step, tails):
                self._make_metadata(step, tails)
            case Persisted(step, path):
                _log.info("step %d is on storage: %s", step, path)

    def _make_metadata(self, step: int, tails: Mapping[int, tuple[int, ...]]) -> None:
        layout, _ = self._plan_of_all()
        metadata = layout.metadata_of(dict(tails), str(folder_of(str(self._directory), step)))
        self._client.say(MetadataMade(step, pickle.dumps(metadata)))

    def _commit(self, step: int) -> None:
        """Record that the job has had a step: starting from scratch would lose it."""
        try:
            path = self._directory / COMMITTED_FILE
            said = {"job": self._job, "step": step, "time_s": time.time()}
            path.write_text(json.dumps(said) + "\n", encoding="utf-8")
            self._committed = True
        except OSError as error:
            _log.warning("%s is not written: %s", COMMITTED_FILE, error)

    # Collective operations.

    def _gather(self, mine: T) -> list[T]:
        if not self._distributed:
            return [mine]
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def _shared(self, make: Callable[[], T]) -> T:
        """Return rank 0's result. Raises its exception on all ranks."""
        made: list[Any] = [None, None]
        if self._rank == 0:
            try:
                made = [make(), None]
            except Exception as error:  # noqa: BLE001 - as above
                made = [None, _carried(error)]
        if self._distributed:
            dist.broadcast_object_list(made, src=0, group=self._group)
        if made[1] is not None:
            raise made[1]
        result: T = made[0]
        return result

    def _gathered(self, work: Callable[[], T]) -> list[T]:
        """Return every rank's result, by rank. If one fails all do, with the error of the first.

        Work that itself gathers must fail on all ranks or on none.
        """
        mine: tuple[Any, Exception | None]
        try:
            mine = work(), None
        except Exception as error:  # noqa: BLE001 - the others must hear of it, or they wait for this rank forever
            mine = None, _carried(error)
        everyone: list[tuple[Any, Exception | None]] = self._gather(mine)
        failed = next((error for _, error in everyone if error is not None), None)
        if failed is not None:
            # Not this rank's own: the handling depends on the error's type, and must be the same everywhere.
            raise failed from (None if failed is mine[1] else mine[1])
        return [result for result, _ in everyone]

    def _agreed(self, work: Callable[[], T]) -> T:
        """Return this rank's own result, once every rank has one: like ``_gathered``, without exchanging results."""
        results: list[T] = []
        self._gathered(lambda: results.append(work()))
        return results[0]

    def _make_key(self) -> bytes:
        """Return the job's key, stored beside its checkpoints, readable only by its owner."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / KEY_FILE
        if not path.exists():
            part = path.with_suffix(f".{secrets.token_hex(4)}")
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(secrets.token_bytes(32).hex())
            part.rename(path)  # atomic: a process killed in between leaves no partial key
        return bytes.fromhex(path.read_text(encoding="ascii"))


def whole_steps(everyone: Iterable[_Reported]) -> list[_Step]:
    """Return the steps with a copy of every shard on some node, best to resume from first. Pure.

    Copies captured by different attempts do not form a step: each attempt is a separate course of training, and a node
    that was away has copies of an abandoned one. The latest course comes first.
    """
    held: dict[tuple[int, str, int], dict[int, dict[str, tuple[str, CopyInfo]]]] = {}
    last_s: dict[int, float] = {}
    for one in everyone:
        for copy in one.copies:
            of_step = held.setdefault((copy.attempt, copy.plan, copy.step), {})
            of_step.setdefault(copy.rank, {})[one.node] = (one.address, copy)
            last_s[copy.attempt] = max(last_s.get(copy.attempt, 0.0), copy.captured_s)
    found = []
    for (attempt, plan, step), ranks in held.items():
        if not has_all_ranks(plan, ranks):
            continue
        first = {rank: next(iter(nodes.values()))[1] for rank, nodes in ranks.items()}
        found.append(
            _Step(
                step,
                attempt,
                plan,
                {rank: copy.tail for rank, copy in first.items()},
                {rank: copy.length for rank, copy in first.items()},
                {rank: tuple((node, address) for node, (address, _) in nodes.items()) for rank, nodes in ranks.items()},
            )
        )
    return sorted(found, key=lambda one: (last_s[one.attempt], one.step), reverse=True)


def _require_same(fingerprints: Sequence[Mapping[str, bytes]]) -> None:
    """Raise NotTheSame where ranks have different parameters under one name: all but one would be lost."""
    first: dict[str, tuple[int, bytes]] = {}
    wrong: dict[str, str] = {}
    for rank, mine in enumerate(fingerprints):
        for name, fingerprint in mine.items():
            before, known = first.setdefault(name, (rank, fingerprint))
            if known != fingerprint:
                wrong.setdefault(name, f"{name} on ranks {before} and {rank}")
    if wrong:
        more = f", and {len(wrong) - NAMED_MAX} more" if len(wrong) > NAMED_MAX else ""
        raise NotTheSame(
            f"different parameters of one name: {'; '.join(list(wrong.values())[:NAMED_MAX])}{more}."
            " Shard them as DTensors, or pass each rank's model under a name of its own"
        )


def _next_attempt(everyone: Iterable[_Reported]) -> int:
    return max(one.attempt for one in everyone) + 1


def _step_of(word: str) -> int:
    """Return STEP of ``memory:STEP``. Raises ValueError."""
    text = word.removeprefix(MEMORY_PREFIX)
    if not text.isdecimal():
        raise ValueError(f"{RESUME_VARIABLE}={word!r}: expected a folder, or {MEMORY_PREFIX}STEP")
    return int(text)


def _compare(state: Mapping[str, Any], metadata: Metadata) -> None:
    """Raise AnotherModel where a tensor of the state is missing from the checkpoint, or has another shape there."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    wrong = []
    flat, _ = flatten_state_dict(dict(state))
    for name, value in flat.items():
        saved = metadata.state_dict_metadata.get(name)
        if saved is None:
            wrong.append(f"{name} is not in it")
        elif isinstance(value, torch.Tensor) and isinstance(saved, TensorStorageMetadata) and value.shape != saved.size:
            wrong.append(f"{name} is {tuple(saved.size)} there and {tuple(value.shape)} here")
    if wrong:
        more = f", and {len(wrong) - NAMED_MAX} more" if len(wrong) > NAMED_MAX else ""
        raise AnotherModel(f"the checkpoint is of another model: {'; '.join(wrong[:NAMED_MAX])}{more}")


def _carried(error: Exception) -> Exception:
    """Return the error in a form that can be sent to the other ranks."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what this line has pickled
    except Exception:  # noqa: BLE001 - whatever it is about the error
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
