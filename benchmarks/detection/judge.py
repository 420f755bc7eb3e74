"""What one worker process does: simulate a case, have everybody judge it in each profile, delete it."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch
from threadpoolctl import threadpool_limits

from benchmarks.detection import generate
from benchmarks.detection.baselines.protocol import Accusation
from benchmarks.detection.matrix import TraceMatrix, read_matrix
from benchmarks.detection.panel import Panel
from benchmarks.detection.plan import Case
from benchmarks.detection.score import Outcome
from eagle_eye.server.backtest.run import Backtest
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings

_panels: dict[str, Panel] = {}


def prepare(panels: Mapping[str, Path]) -> None:
    """Set a worker up: one thread, no interruptions of its own, the baselines of each profile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the run and keeps what was measured
    torch.set_num_threads(1)
    threadpool_limits(1)  # as many workers as cores: more threads would only wait for each other
    for profile, path in panels.items():
        _panels[profile] = pickle.loads(path.read_bytes())


def matrices(case: Case, profiles: list[str]) -> dict[str, TraceMatrix]:
    """Return a case as the baselines read it, in each profile that shows it."""
    recording = generate.record(case)
    found = {}
    for profile in profiles:
        if generate.is_visible(case, profile):
            with generate.written(recording, profile) as folder:
                found[profile] = read_matrix(folder)
    return found


def outcomes(case: Case, profiles: list[str]) -> list[Outcome]:
    """Return what everybody says about a case, in each profile that shows it."""
    recording = generate.record(case)
    found = []
    for profile in profiles:
        if generate.is_visible(case, profile):
            with generate.written(recording, profile) as folder:
                found.append(judged(case, profile, folder, recording.slowdown, recording.packed))
    return found


def judged(case: Case, profile: str, folder: Path, slowdown: float, packed: bool) -> Outcome:
    """Return what Eagle Eye, with default settings, and the baselines say about one trace."""
    began_s = perf_counter()
    trace = Trace(folder)
    lines = list(Backtest(trace, DetectionSettings(), PolicySettings()).run())
    cost_s = {"Eagle Eye": perf_counter() - began_s}
    said: dict[str, tuple[list[Accusation], float]] = {}
    if profile in _panels:
        began_s = perf_counter()
        matrix = read_matrix(folder)
        read_s = perf_counter() - began_s
        said = _panels[profile].judge(matrix)
        cost_s.update({name: read_s + seconds for name, (_, seconds) in said.items()})
    header = trace.header
    return Outcome(
        key=case.key,
        profile=profile,
        kind=case.kind,
        fault=case.fault,
        nodes=len(header.nodes),
        seconds=header.end - header.start,
        labels=trace.labels() or [],
        lines=lines,
        accusations={name: accusations for name, (accusations, _) in said.items()},
        cost_s=cost_s,
        slowdown=slowdown,
        packed=packed,
    )
