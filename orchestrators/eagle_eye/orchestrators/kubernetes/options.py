"""``eagle-eye orchestrate kubernetes``: its options, and the cluster it uses. Reads files and the environment."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle_eye.orchestrators.fallback_layouts import add_layouts, read_layouts
from eagle_eye.orchestrators.kubernetes.objects import ATTEMPT_LABELS, JOB_LABELS
from eagle_eye.orchestrators.protocol import Orchestrator, OrchestratorError

_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?\Z")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add Kubernetes' own options."""
    add = parser.add_argument
    add("--kubeconfig", type=Path, metavar="F", help="default: the pod's service account, else ~/.kube/config")
    add("--context", default="", metavar="NAME", help="of the kubeconfig; default: its current one")
    add("--namespace", action="append", type=_name, default=[], metavar="NS",
        help="look for jobs in it alone, repeatable; default: in all")  # fmt: skip
    add("--job-label", action="append", type=_label, default=[], metavar="KEY",
        help=f"the first of these that a pod has names its job; default: {', '.join(JOB_LABELS)}")  # fmt: skip
    add("--attempt-label", action="append", type=_label, default=[], metavar="KEY",
        help=f"likewise its attempt, by label or annotation; default: {', '.join(ATTEMPT_LABELS)}")  # fmt: skip
    add("--owner", type=_name, default="eagle-eye", metavar="NAME",
        help="who signs the cordons; only those of the same owner are lifted (default eagle-eye)")  # fmt: skip
    add("--taint-effect", choices=("NoSchedule", "PreferNoSchedule", "NoExecute"), default="NoSchedule",
        help="of the taint on an excluded node; NoExecute has everybody's pods go (default NoSchedule)")  # fmt: skip
    add("--evict", choices=("job", "nodes"), default="job",
        help="what a restart evicts: the job's pods, or those on excluded nodes alone (default job)")  # fmt: skip
    add("--start-wait", type=_seconds, default=600.0, metavar="S",
        help="how long a job may take to run again before the action has failed (default 600)")  # fmt: skip
    add("--resume-config-map", type=_name, metavar="NAME",
        help="of each job's namespace: tells it where to resume after faults that spoil checkpoints")  # fmt: skip
    add_layouts(parser)
    add("--layout-config-map", type=_name, metavar="NAME",
        help="of each job's namespace: tells the jobs of --layouts their layout")  # fmt: skip
    add("--spare-wait", type=_seconds, default=60.0, metavar="S",
        help="how long a job's pods may find no node before it goes on without, by its plan (default 60)")  # fmt: skip
    add("--health-events", type=_url, default="", metavar="URL",
        help="send a CloudEvent there for each node excluded or readmitted")  # fmt: skip
    add("--health-events-token-file", type=Path, metavar="F", help="holds a bearer token for it")
    add("--cluster", type=_name, default="kubernetes", metavar="NAME", help="the cluster's name in these events")


def build(options: argparse.Namespace) -> Orchestrator:
    """Return the orchestrator of the cluster. Raises OrchestratorError where no cluster is configured."""
    # Imported late: the client takes half a second and 30 MB.
    from kubernetes import client as official

    from eagle_eye.orchestrators.kubernetes.api import Api
    from eagle_eye.orchestrators.kubernetes.orchestrator import HealthEvents, KubernetesOrchestrator, Settings

    plans = read_layouts(options.layouts)
    if plans and not options.layout_config_map:
        raise OrchestratorError("--layouts: pods learn their layout from a ConfigMap: give --layout-config-map")
    if plans and options.spare_wait >= options.start_wait:
        waits = f"--spare-wait {options.spare_wait:g}: expected less than --start-wait, {options.start_wait:g}"
        raise OrchestratorError(waits)
    sink = None
    if options.health_events:
        sink = HealthEvents(options.health_events, options.cluster, options.health_events_token_file)
    settings = Settings(
        namespaces=tuple(options.namespace),
        job_labels=tuple(options.job_label) or JOB_LABELS,
        attempt_labels=tuple(options.attempt_label) or ATTEMPT_LABELS,
        owner=options.owner,
        taint_effect=options.taint_effect,
        scope=options.evict,
        start_wait_s=options.start_wait,
        resume_config_map=options.resume_config_map or "",
        plans=plans,
        layout_config_map=options.layout_config_map or "",
        spare_wait_s=options.spare_wait,
    )
    return KubernetesOrchestrator(Api(official.ApiClient(_cluster(options))), settings, sink)


def _cluster(options: argparse.Namespace) -> Any:
    """Return the client's configuration: from the given file, this pod's service account, or kubectl's file."""
    import yaml
    from kubernetes import client as official
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    found = official.Configuration()
    # Retries and their delays are ours; and the API server never redirects.
    found.retries = False
    try:
        if options.kubeconfig is None and not options.context and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(found)
        else:
            file = None if options.kubeconfig is None else str(options.kubeconfig)
            config.load_kube_config(file, options.context or None, found, persist_config=False)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError) as error:
        said = " ".join(str(error).split())[:300]
        raise OrchestratorError(f"no cluster to talk to: {said}; give --kubeconfig or run it in a pod") from None
    return found


def _label(text: str) -> str:
    if not _LABEL.match(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected the key of a label, such as example.com/job")
    return text


def _name(text: str) -> str:
    if not _NAME.match(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected at most 63 letters, digits and '-_.'")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, 1 to 86400")
    return seconds


def _url(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc):
        raise argparse.ArgumentTypeError(f"{text!r}: expected http(s)://HOST/PATH without a password")
    return text
