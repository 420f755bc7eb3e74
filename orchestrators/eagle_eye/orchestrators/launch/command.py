"""``eagle-eye launch``: its flags, and the wiring of launcher, receiver and server."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import pwd
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from eagle_eye.orchestrators import command_line
from eagle_eye.orchestrators.command_line import address, count, positive, seconds_or_none, token
from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch.coordinator import Coordinator, MemoryFile
from eagle_eye.orchestrators.launch.logs import Output
from eagle_eye.orchestrators.launch.runners import LEASE_S, LaunchedJob, NoServer, ObservedProgress
from eagle_eye.orchestrators.launch.state import LauncherNodes, Rules
from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import Exclusion, JobState, OrchestratorError, Restart, ServerUnreachableError
from eagle_eye.orchestrators.receiver import Receiver, WebhookIntake, listen_on, url_of
from eagle_eye.orchestrators.server_client import Claims, Reporter, ServerClient
from eagle_eye.orchestrators.subscriber import Subscriber
from eagle_eye.orchestrators.subscription import SubscriptionKeeper, WantedSubscription
from eagle_eye.planning.files import read_plan
from eagle_eye.planning.plan import LAYOUT_BYTES_MAX, LAYOUT_VARIABLE, Plan, variable
from eagle_eye.schema.configuration import ConfigurationError

STOPPED_EXIT_CODE = 1
# Faults of a node with which the job stands still, or computes wrong results.
HALTING = frozenset({
    *("gpu_lost", "gpu_hang", "gpu_memory_error", "hang", "network_hang", "node_unreachable"),
    *("process_crash", "silent_data_corruption"),
})  # fmt: skip


class LaunchOrchestrator:
    """One job, run by one coordinator."""

    name = "eagle-eye launch"
    # Requests to a killed launcher are in its saved state: repeated, they are found done, or continued.
    resumes = True

    def __init__(self, coordinator: Coordinator, job: str) -> None:
        self._coordinator = coordinator
        self._job = job

    def state(self, job: str) -> JobState | None:
        """Return the job's state; None for another job."""
        return self._coordinator.job_state() if job == self._job else None

    def stop(self, job: str, reason: str) -> str:  # noqa: ARG002 - the protocol's name
        """End the job and the launcher."""
        self._coordinator.post(on.Cancelled(reason, STOPPED_EXIT_CODE))
        return "stopping"

    def exclude(self, request: Exclusion) -> str:
        """Exclude the nodes from the next start on; saved in the state folder."""
        reason, over, since_s = request.cause.reason, request.attempt, request.distrust_since_s
        waits = request.cause.fault in HALTING
        return self._coordinator.request(
            lambda number: on.ExcludeAsked(number, request.nodes, request.now, reason, over, since_s, waits)
        )

    def restart(self, job: str, request: Restart) -> str:  # noqa: ARG002 - the protocol's name
        """Restart; returns once the next attempt's ranks are spawned."""
        over, since_s, reason = request.over_attempt, request.distrust_since_s, request.cause.reason
        return self._coordinator.request(
            lambda number: on.RestartAsked(
                number, over, since_s, reason, blames_nobody=not request.without, scope=request.scope
            )
        )

    def checkpoint(self, job: str) -> str:  # noqa: ARG002 - the protocol's name
        """Return once a step captured after this request is complete in the nodes' memory."""
        return self._coordinator.wait_for_checkpoint()

    def readmit(self, nodes: Sequence[str]) -> str:
        """Make the nodes spares again."""
        names = tuple(nodes)
        return self._coordinator.request(lambda request: on.ReadmitAsked(request, names))


log = logging.getLogger(__name__)

# A leading dash would be read as an option by ssh and the like.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}\Z")
REPORTS_WITHIN_S = 3.0
LAST_STATE_WITHIN_S = 3.0
LOOK_WITHIN_S = 2.0
WITHOUT_SERVER = "training goes on; no fault is found, and what fails is restarted by this launcher alone"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; the training command follows ``--``."""
    parser.description = (
        "Runs a torchrun-style training job over a set of nodes with spares, restarts it without a node "
        "when Eagle Eye asks for it, and by itself when it fails and nobody asks."
    )
    add = parser.add_argument
    add("--job", required=True, help="the job's name, as Eagle Eye knows it")
    add("--nnodes", required=True, metavar="N|MIN:N", help="nodes wanted; with MIN it may shrink to that many")
    add("--nodes", required=True, metavar="A,B,...", help="the nodes: the first N start, the rest are spares")
    add("--nproc-per-node", type=positive, default=1, metavar="K", help="ranks on each node (default 1)")
    add("--exec", default="", metavar="TEMPLATE", help="how to run a command on a node, e.g. 'ssh {node}'")
    add("--python", default=sys.executable, help="the Python on the nodes (default: this one)")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="for every rank; {node} and {index} work")
    add("--rdzv-host", default="127.0.0.1", metavar="ADDR", help="this machine's address as the nodes reach it")
    add("--rdzv-port", type=int, default=0, metavar="P", help="port of the rendezvous store (default: a free one)")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="where the job writes step_<N> checkpoints")
    add("--state-dir", type=Path, metavar="DIR", help="what must survive the launcher (default ./JOB.launch)")
    add("--log-dir", type=Path, metavar="DIR", help="logs of ranks and runners (default STATE_DIR/logs)")
    add("--restarts-max", type=count, default=3, metavar="N", help="restarts by the launcher itself (default 3)")
    add("--verdict-wait", type=seconds_or_none, default=30.0, metavar="S",
        help="after a failure, how long to wait for Eagle Eye before restarting by itself (default 30)")  # fmt: skip
    add("--stop-wait", type=seconds_or_none, default=5.0, metavar="S",
        help="how long a node may take to stop its ranks before it is given up (default 5)")  # fmt: skip
    add("--start-wait", type=seconds_or_none, default=180.0, metavar="S",
        help="how long a node may take to get ready before it is given up (default 180)")  # fmt: skip
    add("--silence", type=seconds_or_none, default=20.0, metavar="S",
        help="how long a node that has spoken may be silent before it is given up (default 20)")  # fmt: skip
    add("--backoff", type=seconds_or_none, default=10.0, metavar="S",
        help="wait before the second own restart, doubling from there to 300 (default 10)")  # fmt: skip
    add("--settled-after", type=seconds_or_none, default=300.0, metavar="S",
        help="after so long, and a new checkpoint, earlier own restarts are forgotten (default 300)")  # fmt: skip
    add("--regroup-wait", type=seconds_or_none, default=30.0, metavar="S",
        help="how long ranks may take to come to their restart points, and then to a first step, before a larger "
        "restart follows; 0: every restart renews every process (default 30)")  # fmt: skip
    add("--verify-wait", type=seconds_or_none, default=1800.0, metavar="S",
        help="how long to wait for the first step of an attempt (default 1800)")  # fmt: skip
    add("--warm-wait", type=seconds_or_none, default=600.0, metavar="S",
        help="the least before a start is looked at that is known to take less (default 600)")  # fmt: skip
    add("--layouts", type=Path, metavar="FILE",
        help="what eagle-eye plan --json printed: without a spare the job takes that for fewer nodes")  # fmt: skip
    add("--grow", choices=("restart", "checkpoint"),
        help="when a job that shrank takes nodes back: at the next restart anyway, or by one after the next "
        "checkpoint (default restart; with --layouts checkpoint)")  # fmt: skip
    add("--check", choices=("auto", "off", "quick", "full"), default="auto",
        help="eagle-eye check on each node before it joins; auto: quick, where there are GPUs (default)")  # fmt: skip
    add("--check-wait", type=seconds_or_none, default=60.0, metavar="S",
        help="how long a check may take; one that takes longer keeps no node out (default 60)")  # fmt: skip
    add("--log-mib", type=positive, default=64, metavar="M",
        help="how long a rank's log may grow; one older part of it is kept (default 64)")  # fmt: skip
    add("--standby", choices=("auto", "on", "off"), default="off",
        help="ranks come from a process on each node that has imported torch already; on: also where an import "
        "started threads, or little memory is left (default off)")  # fmt: skip
    add("--standby-import", default="", metavar="A,B,...", help="modules that this process imports besides torch")
    add("--json", action="store_true", help="one JSON object a line on stdout")
    server = parser.add_argument_group("Eagle Eye")
    server.add_argument("--server", metavar="URL[,URL...]", default="http://127.0.0.1:8470",
        help="one, or several of which one leads; default %(default)s")  # fmt: skip
    server.add_argument("--without-server", action="store_true", help="launch and restart, but ask nobody")
    server.add_argument("--token-file", type=Path, metavar="F", help="holds the bearer token")
    server.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where webhooks arrive")
    server.add_argument("--webhook-url", metavar="URL", help="the same as the server reaches it, where it differs")
    usage = "-- SCRIPT [ARGS] | -- -m MODULE [ARGS]"
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar=usage, help="what each rank runs")


def run(arguments: argparse.Namespace) -> int:
    """Run the job until it ends; return 0 finished, 1 failed, 2 wrong usage, 130 or 143 after a signal."""
    try:
        _require_torch()
        job, rules = read_job(arguments), read_rules(arguments)
        memory = MemoryFile(_state_dir(arguments), job.name)
    except (ConfigurationError, OrchestratorError) as error:
        sys.stderr.write(f"eagle-eye launch: {error}\n")
        return 2
    command_line.to_stderr()
    output = Output(sys.stdout, job.name, as_json=arguments.json)
    with contextlib.closing(memory):
        if arguments.without_server:
            coordinator = Coordinator(job, rules, memory, NoServer(), output)
            return _run(coordinator)
        try:
            return _run_with_server(arguments, job, rules, memory, output)
        except (ConfigurationError, OrchestratorError) as error:
            sys.stderr.write(f"eagle-eye launch: {error}\n")
            return 2


def read_job(arguments: argparse.Namespace) -> LaunchedJob:
    """Return the job to run. Raises ConfigurationError naming the flag."""
    if not _NAME.match(arguments.job):
        raise ConfigurationError(f"--job {arguments.job!r}: expected letters, digits and '._:-'")
    nodes = tuple(arguments.nodes.split(","))
    for node in nodes:
        if not _NAME.match(node):
            raise ConfigurationError(f"--nodes: {node!r} is no node name; expected letters, digits and '._:-'")
    if len(set(nodes)) != len(nodes):
        raise ConfigurationError("--nodes: a node is named twice")
    command = tuple(arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command)
    if not command or command == ("-m",):
        raise ConfigurationError("the training command is missing; expected -- SCRIPT [ARGS] or -- -m MODULE [ARGS]")
    if command[0].startswith("-") and command[0] != "-m":
        raise ConfigurationError(f"{command[0]!r}: expected a script or -m after --")
    env = {}
    for assignment in arguments.env:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise ConfigurationError(f"--env {assignment!r}: expected KEY=VALUE")
        env[name] = value
    try:
        exec_words = tuple(shlex.split(arguments.exec))
    except ValueError as error:
        raise ConfigurationError(f"--exec {arguments.exec!r}: {error}") from None
    return LaunchedJob(
        name=arguments.job,
        nodes=nodes,
        ranks_per_node=arguments.nproc_per_node,
        command=command,
        exec_words=exec_words,
        python=arguments.python,
        env=env,
        store_host=arguments.rdzv_host,
        store_port=arguments.rdzv_port,
        checkpoint_dir=arguments.checkpoint_dir and arguments.checkpoint_dir.absolute(),
        log_dir=(arguments.log_dir or _state_dir(arguments) / "logs").absolute(),
        log_bytes_max=arguments.log_mib << 20,
        check=arguments.check,
        check_within_s=arguments.check_wait,
        standby=arguments.standby,
        standby_imports=_modules(arguments.standby_import),
        owner=_user(),
    )


def _user() -> str:
    """Return the user's name from the system, not the environment; the uid of one without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def read_rules(arguments: argparse.Namespace) -> Rules:
    """Return the rules for keeping the job running. Raises ConfigurationError naming the flag."""
    counts = re.fullmatch(r"(?:(\d+):)?(\d+)", arguments.nnodes)
    if counts is None:
        raise ConfigurationError(f"--nnodes {arguments.nnodes!r}: expected N or MIN:N")
    wanted = int(counts[2])
    least = int(counts[1] or wanted)
    nodes = tuple(arguments.nodes.split(","))
    if not 1 <= least <= wanted <= len(nodes):
        raise ConfigurationError(
            f"--nnodes {arguments.nnodes}: expected 1 <= MIN <= N <= {len(nodes)}, the number of --nodes"
        )
    layouts = None if arguments.layouts is None else _read_layouts(arguments, wanted)
    if layouts is not None:
        least = max(int(counts[1] or 0), layouts.nodes_min)
    return Rules(
        fleet=LauncherNodes(nodes, least, wanted),
        verdict_wait_s=arguments.verdict_wait,
        restarts_max=arguments.restarts_max,
        ready_within_s=arguments.start_wait,
        stopped_within_s=arguments.stop_wait,
        silent_within_s=arguments.silence,
        lease_s=LEASE_S,
        backoff_s=arguments.backoff,
        settled_after_s=arguments.settled_after,
        # Where no step could ever be reported, none is waited for.
        verified_within_s=0.0 if arguments.without_server and not arguments.checkpoint_dir else arguments.verify_wait,
        warm_within_s=arguments.warm_wait,
        checkpoints=arguments.checkpoint_dir is not None,
        grow_at_checkpoint=(arguments.grow or ("checkpoint" if layouts else "restart")) == "checkpoint",
        check=arguments.check != "off",
        layouts=layouts,
        regroup_within_s=arguments.regroup_wait,
    )


def _read_layouts(arguments: argparse.Namespace, wanted: int) -> Plan:
    """Return the plan that the job follows. Raises ConfigurationError where it is for another job."""
    plan = read_plan(arguments.layouts, "--layouts")
    hardware, file = plan.hardware, f"--layouts: {arguments.layouts}"
    if plan.job not in ("", arguments.job):
        raise ConfigurationError(f"{file} is the plan of job {plan.job!r}, not of {arguments.job!r}; plan again")
    if hardware.gpus_per_node != arguments.nproc_per_node:
        raise ConfigurationError(
            f"{file} is for other hardware: {hardware.gpus_per_node} GPUs of a node, and --nproc-per-node is"
            f" {arguments.nproc_per_node}; plan again"
        )
    if not plan.nodes_min <= wanted <= hardware.nodes:
        raise ConfigurationError(
            f"{file} has layouts for {plan.nodes_min} to {hardware.nodes} nodes, and --nnodes wants {wanted};"
            " plan again"
        )
    size = max(len(variable(plan, nodes)) for nodes in range(plan.nodes_min, wanted + 1))
    if size > LAYOUT_BYTES_MAX:
        raise ConfigurationError(
            f"{file}: {LAYOUT_VARIABLE} would have {size} bytes; {LAYOUT_BYTES_MAX} fit into a variable"
        )
    return plan


def _run(coordinator: Coordinator) -> int:
    def cancel(number: int, _: object) -> None:
        coordinator.post(on.Cancelled(signal.Signals(number).name, 128 + number))

    former = {number: signal.signal(number, cancel) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return coordinator.run()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@dataclass
class _Parts:
    client: ServerClient
    ledger: Ledger
    reporter: Reporter


@contextlib.contextmanager
def _parts(arguments: argparse.Namespace) -> Iterator[_Parts]:
    try:
        client = ServerClient(arguments.server, token(arguments.token_file))
    except ValueError as error:
        raise ConfigurationError(f"--server: {error}") from None
    ledger = Ledger(_state_dir(arguments) / "ledger.sqlite")
    reporter = Reporter(client, ledger)
    try:
        yield _Parts(client, ledger, reporter)
    finally:
        ledger.close()
        client.close()


def _run_with_server(
    arguments: argparse.Namespace, job: LaunchedJob, rules: Rules, memory: MemoryFile, output: Output
) -> int:
    with _parts(arguments) as parts, contextlib.closing(listen_on(*_address(arguments.listen))) as listening:
        url = arguments.webhook_url or url_of(listening)

        def changed(reason: str, away_s: float) -> None:
            attempt = coordinator.job_state().attempt
            if reason:
                output.say("server_lost", attempt, {"reason": reason, "meanwhile": WITHOUT_SERVER})
            else:
                output.say("server_back", attempt, {"away_s": round(away_s, 1)})

        file = _state_dir(arguments) / "subscription.json"
        subscription = SubscriptionKeeper(parts.client, WantedSubscription(url, (job.name,)), file, changed=changed)

        def look() -> ObservedProgress | None:
            return _sight(parts.client, job.name)

        coordinator = Coordinator(job, rules, memory, subscription, output, subscription.attempt_of(job.name), look)
        orchestrator = LaunchOrchestrator(coordinator, job.name)
        intake = WebhookIntake(parts.ledger, orchestrator.state, parts.reporter, subscription.secrets)
        receiver = Receiver(intake, listening)
        claims = Claims(parts.client, parts.ledger)
        subscriber = Subscriber(orchestrator, parts.ledger, intake.work, parts.reporter, claim=claims)
        intake.resume()
        receiver.start()
        for part in (parts.reporter, subscription, subscriber):
            part.start()
        output.say("listening", coordinator.job_state().attempt, {"webhook_url": url, "server": parts.client.url})
        try:
            return _run(coordinator)
        finally:
            if not subscription.flush(LAST_STATE_WITHIN_S):
                log.warning("the server has not heard how the job ended")
            subscription.stop()
            receiver.stop()
            subscriber.stop(REPORTS_WITHIN_S)
            if not parts.reporter.stop(REPORTS_WITHIN_S):
                log.warning("reports are still owed; the next launcher with this --state-dir sends them")


def _sight(client: ServerClient, job: str) -> ObservedProgress | None:
    try:
        answer = client.call("GET", f"/api/v1/jobs/{quote(job, safe='')}", timeout_s=LOOK_WITHIN_S)
    except ServerUnreachableError:
        return None  # the subscription reports it
    progress = answer.get("progress") if isinstance(answer, dict) else None
    step, attempt = (progress.get("step"), answer.get("attempt")) if isinstance(progress, dict) else (None, None)
    return ObservedProgress(attempt, int(step)) if isinstance(step, int | float) and isinstance(attempt, int) else None


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError("torch is not installed here; pip install 'eagle-eye[ml]'")


def _state_dir(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.state_dir or Path(f"{arguments.job}.launch")
    return folder.absolute()


def _address(text: str) -> tuple[str, int]:
    try:
        return address(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"--listen: {error}") from None


def _modules(text: str) -> tuple[str, ...]:
    modules = tuple(text.split(",")) if text else ()
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigurationError(f"--standby-import: {module!r} is no module's name; expected A,B.C,...")
    return modules
