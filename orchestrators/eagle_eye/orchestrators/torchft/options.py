"""``eagle-eye orchestrate torchft``: its options."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from eagle_eye.orchestrators.errors import OrchestratorError
from eagle_eye.orchestrators.option_values import positive, seconds
from eagle_eye.orchestrators.torchft.orchestrator import Lighthouse, TorchftJob, TorchftMemory, TorchftOrchestrator


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add = parser.add_argument
    add("--job", required=True, help="the job that trains with this lighthouse, as Eagle Eye knows it")
    add("--lighthouse", default="http://127.0.0.1:29510", metavar="URL", help="http://HOST:29510")
    add("--groups", type=Path, metavar="FILE",
        help='JSON, {"replica group": ["node", ...]}; left out: a group is on its manager\'s host')  # fmt: skip
    add("--replicas-min", type=positive, default=1, metavar="N", help="so many groups are left over (1)")
    add("--exclude-file", type=Path, metavar="F", help="excluded nodes, one a line (STATE_DIR/excluded)")
    add("--gone-within", type=seconds, default=20.0, metavar="S", help="how long a group may take to end (20)")
    add("--on-within", type=seconds, default=60.0, metavar="S", help="until the others have taken a step (60)")
    add("--report-state", action="store_true", help="tell the server that the job runs")


def build(options: argparse.Namespace) -> TorchftOrchestrator:
    """Return the orchestrator. Raises OrchestratorError or ValueError naming the option."""
    job = TorchftJob(
        options.job,
        _groups(options.groups),
        options.replicas_min,
        options.gone_within,
        options.on_within,
        options.report_state,
    )
    memory = TorchftMemory(options.state_dir / "torchft.json", options.exclude_file or options.state_dir / "excluded")
    return TorchftOrchestrator(job, Lighthouse(options.lighthouse), memory)


def _groups(file: Path | None) -> dict[str, tuple[str, ...]]:
    if file is None:
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[str, ...]])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OrchestratorError(f"--groups {file}: {error}") from None
