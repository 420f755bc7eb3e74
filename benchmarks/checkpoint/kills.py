"""Checkpoints in memory under random kills: whatever is restored must be, bit by bit, what training made at that step.

    python -m benchmarks.checkpoint.kills --kills 200 --seed 1 --out benchmarks/results/checkpoint-kills.json

A real job of three nodes with a rank each (on gloo), their stores and their memory, and a supervisor that starts
all ranks again after each kill. What every step's state is was written down by an undisturbed run before. Killed by
SIGKILL are a rank, all ranks, a store, or a node with its rank, its store and its memory: at any time, while shards are
copied, while a step goes to storage, and with the node's memory full (a tmpfs each: as root). Exit code 1: a state was
another one, a step that had been announced as whole was gone, or the job did not come back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoint.warm import Forked, Warm
from eagle_eye.checkpoint.store import ask_status

NODES = ("n1", "n2", "n3")
VICTIMS = ("rank", "ranks", "store", "node")
TIMES = ("any time", "during copy", "during persist", "memory full")
TMPFS_BYTES = 192 << 20  # a store leaves 64 MiB to others
STEPS_A_KILL = 25
HIDDEN = 8000  # 1 MB of parameters, 3 MB of state
PERSIST_EVERY = 5
WITHIN_S = 120.0


class Gone(Exception):
    """The job did not come back: why."""


@dataclass
class Node:
    """A node's memory and its store."""

    name: str
    folder: Path
    warm: Warm
    log: Path
    store: Forked | None = None

    def serve(self) -> None:
        """A store answers here."""
        if self.store is not None and self.store.poll() is None:
            return
        arguments = {"folder": str(self.folder / "store"), "node": self.name}
        self.store = self.warm.fork("benchmarks.checkpoint.kills:serve", arguments, {}, self.log)
        _until(self._answers, f"the store of {self.name} answers")

    def kill_store(self) -> None:
        """It is dead; its files are there."""
        if self.store is not None:
            self.store.kill()
            _until(lambda: self.store is None or self.store.poll() is not None, "the store is dead")
        for process in psutil.process_iter():  # one that a rank has started, too
            with suppress(psutil.Error):
                if str(self.folder / "store") in process.cmdline():
                    process.kill()

    def lose(self) -> None:
        """The store is dead and the memory is gone."""
        self.kill_store()
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        self.empty()

    def fill(self, left_bytes: int) -> None:
        """All memory but so much is somebody else's."""
        space = os.statvfs(self.folder)
        with (self.folder / "others").open("wb") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(space.f_bavail * space.f_frsize - left_bytes, 1))

    def empty(self) -> None:
        """It is free again."""
        (self.folder / "others").unlink(missing_ok=True)

    def _answers(self) -> bool:
        with suppress(OSError):
            ask_status(self.folder / "store")
            return True
        return False


@dataclass
class Attempt:
    """The ranks of one attempt, and what they say."""

    ranks: list[Forked]
    files: list[Path]
    log: Path

    def said(self, rank: int) -> list[dict[str, Any]]:
        """Return a rank's whole lines."""
        with suppress(FileNotFoundError):
            lines = self.files[rank].read_bytes().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith(b"\n")]
        return []

    def resumed(self) -> list[dict[str, Any]]:
        """Return what each rank has said of where it goes on, once all have. Raises Gone."""
        found = []
        for rank in range(len(self.ranks)):
            end_s = time.monotonic() + WITHIN_S
            while not (lines := self.said(rank)):
                if self.ranks[rank].poll() is not None and not self.said(rank):
                    raise Gone(f"rank {rank} ended ({self.ranks[rank].code}): {self.log.read_text()[-2000:]}")
                if time.monotonic() > end_s:
                    raise Gone(f"rank {rank} said nothing within {WITHIN_S:g} s: {self.log.read_text()[-2000:]}")
                time.sleep(0.002)
            if "failed" in lines[0]:
                raise Gone(f"rank {rank}: {lines[0]['failed']}: {lines[0]['text']}")
            found.append(lines[0])
        return found

    def step(self) -> int:
        """Return the last step that any rank has made, -1 for none."""
        return max((line.get("step", -1) for rank in range(len(self.ranks)) for line in self.said(rank)), default=-1)

    def whole(self) -> int:
        """Return the last step that any rank knew to be whole."""
        return max(
            (line.get("whole") or 0 for rank in range(len(self.ranks)) for line in self.said(rank)[-1:]), default=0
        )

    def ended(self) -> bool:
        """Whether a rank has ended."""
        return any(rank.poll() is not None for rank in self.ranks)

    def kill(self) -> None:
        """All of them are dead."""
        for rank in self.ranks:
            rank.kill()
        _until(lambda: all(rank.poll() is not None for rank in self.ranks), "the ranks are dead")


@dataclass
class Kill:
    """One kill, and what came after it."""

    victim: str
    at: str
    node: str
    step: int
    whole: int
    restored: int = -1
    back_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """The steps that were made and are to be made again."""
        return max(self.step - self.restored, 0)


class Yard:
    """The nodes, the job, and what each step's state must be."""

    def __init__(self, folder: Path, memory: dict[str, Path], warm: Warm, source: random.Random) -> None:
        self._folder, self._warm, self._source = folder, warm, source
        self.nodes = [Node(name, memory[name], warm, folder / f"store-{name}.log") for name in NODES]
        self._attempts = 0
        self._right: list[dict[int, tuple[str, dict[str, int]]]] = []

    def undisturbed(self, steps: int) -> None:
        """Write down what the state is at each step."""
        attempt = self._start(steps=steps, keeps=False, leaves="exit")
        _until(lambda: all(rank.poll() is not None for rank in attempt.ranks), "the undisturbed run ends", 3600.0)
        self._right = [
            {
                int(line.get("step", line.get("resumed", 0))): (line["number"], line["loader"])
                for line in said
                if "number" in line
            }
            for said in (attempt.said(rank) for rank in range(len(NODES)))
        ]
        if any(steps not in right for right in self._right):
            raise Gone(f"the undisturbed run did not get to step {steps}: {attempt.log.read_text()[-2000:]}")

    def begin(self) -> Attempt:
        """Start all ranks, and the stores where there is none."""
        for node in self.nodes:
            node.serve()
        steps = max(self._right[0])
        return self._start(steps=steps, persist_every=PERSIST_EVERY, leaves="stay", step_s=0.005)

    def strike(self, attempt: Attempt, victim: str, at: str) -> Kill:
        """Kill when it is time to; all ranks are dead afterwards. The node's memory stays as full as it is."""
        number = self._source.randrange(len(NODES))
        node, steps = self.nodes[number], self._source.randint(1, 12)
        begun = attempt.step()
        _until(lambda: attempt.step() >= max(begun, 0) + steps or attempt.ended(), f"{steps} steps are made")
        if at == "during copy":
            last = attempt.step()
            _until(lambda: attempt.step() > last or attempt.ended(), "a step is made")
            time.sleep(self._source.uniform(0.0, 0.01))
        elif at == "during persist":
            _until(lambda: any(self._shared.glob("*.partial")) or attempt.ended(), "a step goes to storage")
            time.sleep(self._source.uniform(0.0, 0.005))
        elif at == "memory full":
            node.fill(self._source.randrange(0, 2 << 20))
            last = attempt.step()
            _until(lambda: attempt.step() > last + 5 or attempt.ended(), "steps are made with the memory full")
        else:
            time.sleep(self._source.uniform(0.0, 0.05))
        if victim == "rank":
            attempt.ranks[number].kill()
        elif victim == "store":
            self._kill_store(attempt, node)
        elif victim == "node":
            attempt.ranks[number].kill()
            node.lose()
        attempt.kill()
        return Kill(victim, at, node.name, attempt.step(), attempt.whole())

    def _kill_store(self, attempt: Attempt, node: Node) -> None:
        """Kill a store: and the ranks with it, or after it is back, or after it has been of use again."""
        node.kill_store()
        then = self._source.randrange(3)
        if then:
            node.serve()
        if then == 2 and not (node.folder / "others").exists():
            step = attempt.step()
            _until(lambda: attempt.whole() > step or attempt.ended(), "a step after the store's death is whole")
            if attempt.ended():
                raise Gone(f"a rank ended as its store did: {attempt.log.read_text()[-2000:]}")

    def judge(self, kill: Kill, attempt: Attempt) -> None:
        """See what was restored: the kill's ``wrong`` says what is not as it was."""
        began_s = time.time()
        try:
            resumed = attempt.resumed()
        except Gone as gone:
            kill.wrong.append(str(gone))
            return
        kill.back_s = max(line["t_s"] for line in resumed) - began_s
        kill.restored = resumed[0]["resumed"]
        if kill.restored < kill.whole:
            kill.wrong.append(f"step {kill.whole} was whole, and step {kill.restored} is restored")
        for rank, line in enumerate(resumed):
            number, loader = self._right[rank][line["resumed"]]
            if line["number"] != number:
                kill.wrong.append(f"rank {rank}: step {line['resumed']} is another state than it was")
            if line["loader"] != loader:
                kill.wrong.append(f"rank {rank}: step {line['resumed']} has read {line['loader']}, and had {loader}")

    def end(self) -> None:
        """All stores are dead."""
        for node in self.nodes:
            node.kill_store()

    @property
    def _shared(self) -> Path:
        return self._folder / "shared"

    def _start(self, **said: Any) -> Attempt:
        self._attempts += 1
        folder = self._folder / f"attempt-{self._attempts}"
        folder.mkdir()
        attempt = Attempt([], [folder / f"rank-{rank}" for rank in range(len(NODES))], folder / "log")
        for rank, node in enumerate(self.nodes):
            arguments = {
                "rank": rank,
                "world": len(NODES),
                "meet": str(folder / "meet"),
                "hidden": HIDDEN,
                "kind": "gathered",
            } | said
            arguments |= {"directory": str(self._shared), "said": str(attempt.files[rank])}
            environment = {"EAGLE_EYE_CHECKPOINT_STORE": str(node.folder / "store"), "EAGLE_EYE_NODE": node.name}
            attempt.ranks.append(
                self._warm.fork("benchmarks.checkpoint.job:train", arguments, environment, attempt.log)
            )
        return attempt


def serve(folder: str, node: str) -> None:
    """Be a store."""
    from eagle_eye.checkpoint.command import configure_store, run_store

    parser = argparse.ArgumentParser()
    configure_store(parser)
    run_store(parser.parse_args(["--folder", folder, "--node", node, "--listen", "127.0.0.1:0"]))


def storm(kills: int, seed: int, tell: Callable[[str], None]) -> list[Kill]:
    """Return the kills, all of which the job has been started again after."""
    source, done = random.Random(seed), list[Kill]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle-eye-kills-")))
        warm = stack.enter_context(Warm())
        memory, times = stack.enter_context(_memory(tell))
        yard = Yard(folder, memory, warm, source)
        stack.callback(yard.end)
        yard.undisturbed(kills * STEPS_A_KILL + 50)
        tell("the undisturbed run is written down")
        attempt = yard.begin()
        attempt.resumed()
        plan = [(victim, at) for at in times for victim in VICTIMS]
        while len(done) < kills:
            round_of = source.sample(plan, len(plan))  # each of them as often as any other
            for victim, at in round_of[: kills - len(done)]:
                try:
                    kill = yard.strike(attempt, victim, at)
                except Gone as gone:
                    return [*done, Kill(victim, at, "", attempt.step(), attempt.whole(), wrong=[str(gone)])]
                attempt = yard.begin()
                yard.judge(kill, attempt)
                for node in yard.nodes:
                    node.empty()
                done.append(kill)
                if kill.wrong:
                    tell(f"kill {len(done)}: {kill.victim} on {kill.node}, {kill.at}: {'; '.join(kill.wrong)}")
                if kill.restored < 0:
                    return done
                if len(done) % 20 == 0:
                    tell(f"{len(done)} kills, step {attempt.step()}")
        attempt.kill()
    return done


@contextmanager
def _memory(tell: Callable[[str], None]) -> Iterator[tuple[dict[str, Path], tuple[str, ...]]]:
    """Yield a folder of memory for each node: a tmpfs of its own where one can be mounted, that it may be full."""
    base = Path(tempfile.mkdtemp(prefix="eagle-eye-kills-", dir="/dev/shm"))
    folders = {name: base / name for name in NODES}
    mounted = []
    try:
        for path in folders.values():
            path.mkdir()
            words = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(path)]
            if subprocess.run(words, capture_output=True, check=False).returncode == 0:
                mounted.append(path)
        full = len(mounted) == len(folders)
        if not full:
            tell("no tmpfs can be mounted here (as root it can): no kill with the memory full")
        yield folders, TIMES if full else TIMES[:-1]
    finally:
        for path in mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=False)
        shutil.rmtree(base, ignore_errors=True)


def figures(kills: list[Kill], seed: int, wall_s: float) -> dict[str, Any]:
    """Return them all, by when and by whom."""
    rows = []
    for key in [(victim, at) for at in TIMES for victim in VICTIMS]:
        of = [kill for kill in kills if (kill.victim, kill.at) == key]
        if of:
            lost = [kill.lost for kill in of]
            rows.append(
                {
                    "victim": key[0],
                    "at": key[1],
                    "kills": len(of),
                    "steps_lost_mean": round(statistics.mean(lost), 2),
                    "steps_lost_max": max(lost),
                    "back_s_median": round(statistics.median(kill.back_s for kill in of), 3),
                    "wrong": sum(bool(kill.wrong) for kill in of),
                }
            )
    return {
        "kills": len(kills),
        "seed": seed,
        "wrong": sum(bool(kill.wrong) for kill in kills),
        "steps_lost_mean": round(statistics.mean(kill.lost for kill in kills), 2),
        "steps_lost_max": max(kill.lost for kill in kills),
        "wall_s": round(wall_s, 1),
        "host": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": rows,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures as a table."""
    table = [f"{'when':<16}{'killed':<8}{'kills':>6}{'steps lost':>12}{'at most':>9}{'back in':>10}{'wrong':>7}"]
    table += [
        f"{row['at']:<16}{row['victim']:<8}{row['kills']:>6}{row['steps_lost_mean']:>12.2f}"
        f"{row['steps_lost_max']:>9}{row['back_s_median']:>8.2f} s{row['wrong']:>7}"
        for row in found["rows"]
    ]
    total = f"{found['kills']} kills in {found['wall_s']:.0f} s: {found['steps_lost_mean']:.2f} steps lost on average"
    return [*table, f"{total}, {found['steps_lost_max']} at most; {found['wrong']} were not as they had been"]


def _until(true: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end_s:
            raise Gone(f"not within {within_s:g} s: {what}")
        time.sleep(0.002)


def main(words: list[str] | None = None) -> int:
    """Run the storm, print the table; return 1 where anything was not as it had been."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    parser.add_argument("--out", type=Path, help="write them there, too")
    args = parser.parse_args(words)
    began_s = time.monotonic()
    kills = storm(args.kills, args.seed, lambda text: print(text, file=sys.stderr, flush=True))
    found = figures(kills, args.seed, time.monotonic() - began_s)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2) if args.json else "\n".join(lines(found)))
    return 1 if found["wrong"] or len(kills) < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
