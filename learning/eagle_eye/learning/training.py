"""The work of ``eagle-eye train``: reads history, trains, checks, and writes the model if it passes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.learning.features import HealthyHistory, read
from eagle_eye.learning.model import CHECK, HealthyCheck, check, make, no_worse, parts
from eagle_eye.schema import configuration
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.times import option_time
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.site_files import ModelMetadata, write_learned_model
from eagle_eye.server.site_files import read_learned_model as read_model

SINCE = "7d"  # also in the command's help, which does not wait for this module


class Failed(Exception):
    """No model was made; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The source of history and the training settings; kept in the file, so that a refresh uses the same."""

    traces: tuple[str, ...] = ()
    server: str = ""
    token_file: str = ""
    job: str = ""
    since: str = SINCE
    until: str = "now"
    config: str = ""
    seed: int = 0

    def plain(self) -> dict[str, Any]:
        """Return them as stored: secrets only by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def run(args: argparse.Namespace) -> int:
    """Train and write. Raises ConfigurationError, and errors that say why no model was made."""
    reported = _description(*read_model(args.show)) if args.show is not None else _train(args)
    _tell(reported, as_json=args.json)
    return 0


def _train(args: argparse.Namespace) -> dict[str, Any]:
    if (args.out is None) == (args.refresh is None):
        raise ConfigurationError("one of --out MODEL and --refresh MODEL: expected where the model goes")
    old = read_model(args.refresh) if args.refresh is not None else None
    options = _options(args, old[1].options if old else {})
    config = configuration.load(ServerConfig, Path(options.config) if options.config else None, os.environ, {})
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar, _traces(options, bar) as folders:
        bar.add_task(f"reading {len(folders)} traces", total=None)
        history = read(folders, config.detection)
        bar.add_task(f"learning from {history.node_days:.2f} healthy node-days", total=None)
        model, result = make(history, options.seed)
    if not result.passed:
        raise Failed(
            f"no model was written: on {result.node_days:.2f} healthy node-days kept back it raised"
            f" {result.seen} alarms where {result.expected:.1f} were promised; take a longer history or more nodes"
        )
    before = _of_old(old[0], history, options.seed) if old else None
    if before is not None and not no_worse(result, before):
        raise Failed(
            f"{args.refresh} was left as it is: on {result.node_days:.2f} healthy node-days kept back the new model"
            f" raised {result.seen} alarms, the old one {before.seen}"
        )
    report = {
        "check": result._asdict(),
        "before": before._asdict() if before else None,
        "nodes": len(history.nodes),
        "left_out": dict(history.left_out),
    }
    metadata = ModelMetadata(
        created_s=time.time(), job=history.job, seed=options.seed, options=options.plain(), report=report
    )
    path: Path = args.out or args.refresh
    return {"model": str(path), **_description(write_learned_model(path, model, metadata), metadata)}


def _of_old(model: LearnedModel, history: HealthyHistory, seed: int) -> HealthyCheck | None:
    """Return the old model's check on the held-out part, None where it can no longer judge this history."""
    same = (model.view.span_s, model.view.past_s, model.looks) == (
        history.shape.view.span_s,
        history.shape.view.past_s,
        history.shape.looks,
    )
    known = {metric.name for metric in history.shape.view.metrics}
    if not same or any(metric.name not in known for metric in model.view.metrics):
        return None
    return check(model, history, parts(history, seed) == CHECK)


def _options(args: argparse.Namespace, kept: dict[str, Any]) -> TrainingOptions:
    """Return the options: given ones override those of the model to refresh."""
    names = ("server", "token_file", "job", "since", "until", "config", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.traces:
        given["traces"] = tuple(str(Path(folder).resolve()) for folder in args.traces)
    known = {name: kept[name] for name in TrainingOptions.__slots__ if name in kept}
    if "traces" in given or "server" in given:
        known |= {"traces": (), "server": ""}  # one source takes the other's place
    options = TrainingOptions(**{**known, "traces": tuple(known.get("traces", ())), **given})
    if bool(options.traces) == bool(options.server):
        raise ConfigurationError("TRACE… or --server URL: expected one of them to learn from")
    if options.server and not options.job:
        raise ConfigurationError("--job: expected the job whose history is to be learned from")
    for flag, text in (("--since", options.since), ("--until", options.until)):
        try:
            option_time(text, time.time())
        except ValueError as error:
            raise ConfigurationError(f"{flag}: {error}") from None
    return options


@contextmanager
def _traces(options: TrainingOptions, bar: Progress) -> Iterator[list[Path]]:
    """Yield the trace folders; those from a server's history are fetched, and gone afterwards."""
    if options.traces:
        yield [Path(folder) for folder in options.traces]
        return
    with tempfile.TemporaryDirectory(prefix="eagle-eye-train-") as folder:
        out = Path(folder) / "trace"
        bar.add_task(f"fetching the history of {options.job} from {options.server}", total=None)
        command = [sys.executable, "-m", "eagle_eye.cli.main", "record", str(out), "--server", options.server]
        command += ["--job", options.job, "--since", options.since, "--until", options.until]
        command += ["--token-file", options.token_file] if options.token_file else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()
            raise Failed(said[-1] if said else f"eagle-eye record ended with {done.returncode}")
        yield [out]


def _description(model: LearnedModel, metadata: ModelMetadata) -> dict[str, Any]:
    return {
        "created": datetime.fromtimestamp(metadata.created_s, UTC).isoformat(timespec="seconds"),
        "job": metadata.job,
        "from": datetime.fromtimestamp(model.from_s, UTC).isoformat(timespec="seconds"),
        "until": datetime.fromtimestamp(model.until_s, UTC).isoformat(timespec="seconds"),
        "node_days": round(model.node_days, 3),
        "metrics": [metric.name for metric in model.view.metrics],
        "interval_s": model.interval_s,
        "gpus_per_node": list(model.gpus_per_node),
        "gpu_models": list(model.gpu_models),
        "power_limits_watts": list(model.power_limits_watts),
        "digest": model.digest,
        **metadata.report,
    }


def _tell(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    console = Console(highlight=False)
    seen = result.get("check") or {}
    console.print(
        f"{result.get('model', 'model')}: {len(result['metrics'])} metrics, {result['node_days']} healthy node-days"
        f" of {result.get('nodes', '?')} nodes, {result['from']} to {result['until']}",
        markup=False,
    )
    if seen:
        console.print(
            f"on {seen['node_days']:.2f} node-days kept back: {seen['seen']} alarms where {seen['expected']:.1f} were"
            f" expected, {seen['at_default']} at the default of one in 1,000 node-days",
            markup=False,
        )
    for reason, count in sorted((result.get("left_out") or {}).items(), key=lambda item: -item[1]):
        console.print(f"left out: {count} looks, {reason}", markup=False, style="dim")
