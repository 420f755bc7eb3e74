"""The kinds of orchestrators that ``eagle-eye orchestrate`` supports: each a package beside this one."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple, Protocol

from eagle_eye.orchestrators.protocol import Orchestrator


class Options(Protocol):
    """The interface of a kind's ``options`` module."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the kind's own options, long ones only."""
        ...

    def build(self, options: argparse.Namespace) -> Orchestrator:
        """Return the orchestrator. Raises OrchestratorError or ValueError with one line for people."""
        ...


class OrchestratorKind(NamedTuple):
    """One kind; ``module`` is imported only when the kind is used."""

    name: str
    module: str
    help: str

    def load(self) -> Options:
        """Return the kind's options module."""
        module: Options = importlib.import_module(self.module)
        return module


KINDS: tuple[OrchestratorKind, ...] = (
    OrchestratorKind("slurm", "eagle_eye.orchestrators.slurm.options", "drain nodes and requeue jobs in Slurm"),
    OrchestratorKind(
        "torchft", "eagle_eye.orchestrators.torchft.options", "kill a replica group, have the others train on"
    ),
    OrchestratorKind("command", "eagle_eye.orchestrators.command.options", "run a program of yours for each verb"),
    OrchestratorKind("kubernetes", "eagle_eye.orchestrators.kubernetes.options", "cordon nodes, evict a job's pods"),
)
