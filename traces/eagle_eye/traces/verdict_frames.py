"""Runs the server's engine over traces and returns its verdicts as a data frame. Touches: the traces' files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.server.backtest.run import judge_traces
from eagle_eye.traces.trace_frames import Trace, utc_times


def backtest(
    *traces: str | Path | Trace, config: str | Path | None = None, progress: Callable[[float], None] | None = None
) -> pd.DataFrame:
    """Return the verdicts of ``eagle-eye backtest`` on the traces: a row when raised, and whenever it changed.

    Columns: trace, id, time, onset (UTC), job, fault, nodes (lists), node (None: none, or several), device (-1: no
    single one), action (of policy in mode act), confidence (0 to 1), detectors (lists), summary, evidence (lists of
    dictionaries). No row is no health: ``attrs["report"]`` has the score against the labels and, as
    ``blind_ratio``, the share of judgements in which each detector could not tell; ``attrs["ignored"]`` counts what
    was left out of the traces, by reason.

    ``config`` is the server's configuration file; its environment variables count, too. ``progress`` is told the
    share that is judged. Raises BadTrace, OSError, ConfigurationError, and TypeError without any trace.
    """
    if not traces:
        raise TypeError("backtest expects at least one trace folder")
    folders = [trace.folder if isinstance(trace, Trace) else Path(trace) for trace in traces]
    judged = judge_traces(folders, None if config is None else Path(config), progress or (lambda _: None))
    lines = judged.lines
    frame = pd.DataFrame(
        {
            "trace": pd.Series([line.trace for line in lines], dtype="str"),
            "id": pd.Series([line.id for line in lines], dtype="str"),
            "time": utc_times([line.time for line in lines]),
            "onset": utc_times([line.onset for line in lines]),
            "job": pd.Series([line.job for line in lines], dtype="str"),
            "fault": pd.Series([line.fault for line in lines], dtype="str"),
            "nodes": pd.Series([line.nodes for line in lines], dtype=object),
            "node": pd.Series([line.node for line in lines], dtype=object),
            "device": np.array([WHOLE_NODE if line.device is None else line.device for line in lines], np.int16),
            "action": pd.Series([line.action for line in lines], dtype="str"),
            "confidence": np.array([line.confidence for line in lines], np.float64),
            "detectors": pd.Series([line.detectors for line in lines], dtype=object),
            "summary": pd.Series([line.summary for line in lines], dtype="str"),
            "evidence": pd.Series([msgspec.to_builtins(line.evidence) for line in lines], dtype=object),
        }
    )
    frame.attrs = {"report": judged.report(), "ignored": dict(judged.totals.ignored)}
    return frame
