"""The text of ``eagle-eye COMMAND --help`` besides the options: purpose, examples, exit codes, documentation."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_WIDTH = 78
_DONE = "0 done; 1 failed; 2 wrong usage or configuration."
_ANSWERED = "0 done; 1 the server cannot be reached, or refuses; 2 wrong usage."


class Guide(NamedTuple):
    """One command: ``purpose`` is a sentence, ``examples`` are command lines with reasons, ``pages`` are in docs/."""

    purpose: str
    examples: tuple[tuple[str, str], ...]
    exits: str
    pages: tuple[str, ...]


GUIDES: dict[str, Guide] = {
    "server": Guide(
        "Takes the agents' frames, finds faults and notifies subscribers, until it is stopped. SIGHUP makes it reread"
        " its configuration. Of two servers on one PostgreSQL one leads; the other stands by, forwards requests to it"
        " and takes over.",
        (
            ("eagle-eye server --data DIR", "for this machine alone, on port 8470"),
            ("eagle-eye server --config /etc/eagle-eye/server.toml", "as the system's service"),
            ("eagle-eye server --print-config", "every key with the value in force, secrets masked"),
            (
                "eagle-eye server --config FILE --check-job-sources",
                "what Slurm or Kubernetes answers; starts no server",
            ),
        ),
        "0 stopped by SIGTERM or SIGINT; 1 its address or files cannot be used, or a scheduler does not answer;"
        " 2 wrong configuration.",
        ("reference/configuration", "how-to/operations", "how-to/two-servers", "explanation/security"),
    ),
    "agent": Guide(
        "Watches this host and its training processes and reports to the server, until it is stopped.",
        (
            ("eagle-eye agent --config /etc/eagle-eye/agent.toml", "as the system's service"),
            ("eagle-eye agent --print --once", "one frame, shown instead of sent"),
            ("eagle-eye agent --print --simulate", "try it without a GPU"),
            ("eagle-eye agent --once --check --gpus 8", "in a prolog: is this host sick?"),
        ),
        "0 done or stopped; 1 failed; 2 wrong configuration. With --check: 0 healthy, 3 sick, 1 cannot tell.",
        ("reference/agent", "reference/hook", "reference/configuration"),
    ),
    "doctor": Guide(
        "Says what works on this host, what doesn't, and what to do about it. Changes nothing.",
        (
            ("eagle-eye doctor --config /etc/eagle-eye/agent.toml", "after installing an agent"),
            ("eagle-eye doctor --json", "for programs"),
        ),
        "0 everything that this host can have works; 1 something needs doing; 2 wrong configuration.",
        ("reference/agent",),
    ),
    "completion": Guide(
        "Prints a script with which your shell completes commands, options and files. Print it again after an upgrade.",
        (
            ("eagle-eye completion bash", "goes into ~/.local/share/bash-completion/completions/eagle-eye"),
            ("eagle-eye completion zsh", "goes into _eagle-eye in a folder of fpath, before compinit"),
            ("eagle-eye completion fish", "goes into ~/.config/fish/completions/eagle-eye.fish"),
        ),
        "0 done; 2 wrong usage.",
        ("get-started/quick-start",),
    ),
    "launch": Guide(
        "Runs a torchrun-style training job over a set of nodes with spares, restarts it without a node when Eagle Eye"
        " asks for it, and by itself when it fails and nobody asks.",
        (
            (
                "eagle-eye launch --job llm --nnodes 3 --nodes n1,n2,n3,n4 --exec 'ssh {node}' -- train.py",
                "on three nodes, with one spare",
            ),
        ),
        "0 finished; 1 failed; 2 wrong usage; 130 after Ctrl-C; 143 after SIGTERM.",
        ("how-to/launch",),
    ),
    "orchestrate": Guide(
        "Carries out what Eagle Eye asks for, with the site's own tools, and reports the outcome.",
        (
            (
                "eagle-eye orchestrate slurm --dry-run --token-file TOKEN_FILE",
                "what would it do?",
            ),
            ("eagle-eye orchestrate command --config /etc/eagle-eye/orchestrate-command.toml", "a program of yours"),
            ("eagle-eye orchestrate kubernetes --help", "the options of a kind"),
        ),
        "0 stopped by SIGTERM or SIGINT; 1 failed, start it again; 2 wrong usage or configuration.",
        (
            "how-to/orchestrators",
            "how-to/slurm",
            "how-to/kubernetes",
            "how-to/orchestrate-torchft",
            "how-to/orchestrate-command",
        ),
    ),
    "demo": Guide(
        "Starts a server, four nodes with an agent each and a real training job on three of them, harms a node from"
        " outside, and shows what follows.",
        (
            ("eagle-eye demo", "a hang"),
            ("eagle-eye demo --fault slow --keep", "a straggler; the page stays up"),
        ),
        "0 all of it truly happened; 1 it did not, or others keep the machine too busy; 2 wrong usage.",
        ("get-started/quick-start",),
    ),
    "simulate": Guide(
        "Writes a labelled trace of a job with a fault in it, or with something that only looks like one.",
        (
            ("eagle-eye simulate --list", "which faults and situations there are"),
            ("eagle-eye simulate /tmp/hot --fault thermal_throttle --nodes 32 --seed 1", "a GPU too hot"),
        ),
        _DONE,
        ("reference/traces", "reference/faults"),
    ),
    "loadtest": Guide(
        "Sends a server what the agents of a large fleet would send, and measures how it keeps up.",
        (("eagle-eye loadtest --nodes 1000 --duration 60 --json", "a thousand nodes, a frame a second each"),),
        "0 every frame was acknowledged; 1 some were not, or the server could not be reached; 2 wrong usage.",
        ("how-to/loadtest", "explanation/performance"),
    ),
    "replay": Guide(
        "Sends a trace through the wire as if it happened now, faster than it did.",
        (("eagle-eye replay /tmp/hot --speed 10 --suffix=-again", "into the server of this machine"),),
        "0 done; 1 something was not acknowledged; 2 wrong usage or trace.",
        ("reference/traces",),
    ),
    "record": Guide(
        "Writes a trace of a job from a running server's history, to be judged again.",
        (("eagle-eye record /tmp/monday --job llm --since -2h --until -1h", "an hour of it"),),
        _ANSWERED,
        ("reference/traces",),
    ),
    "import": Guide(
        "Writes a trace of a job from a Prometheus that scrapes dcgm-exporter and node_exporter.",
        (
            (
                "eagle-eye import /tmp/june --prometheus http://prometheus:9090 --job llm --since -2h --nodes 'gpu-*'",
                "the last two hours of some nodes",
            ),
        ),
        "0 done; 1 the Prometheus cannot be reached, or has nothing of it; 2 wrong usage.",
        ("reference/traces", "how-to/prometheus"),
    ),
    "backtest": Guide(
        "Judges recorded traces with the server's own engine, on the traces' clock, and scores it by their labels.",
        (
            ("eagle-eye backtest /tmp/hot", "for people"),
            ("eagle-eye backtest /tmp/hot --html report.html", "with the evidence drawn, to send to somebody"),
            ("eagle-eye backtest /tmp/hot /tmp/monday --report report.json --verdicts verdicts.jsonl", "for programs"),
        ),
        "0 done, also when faults were found; 1 a trace cannot be judged; 2 wrong usage or configuration.",
        ("reference/traces", "how-to/tuning", "explanation/detection"),
    ),
    "train": Guide(
        "Learns from traces or a server's history what healthy nodes of this site look like.",
        (
            ("eagle-eye train /tmp/monday --out site.model", "from a trace"),
            ("eagle-eye train --server http://127.0.0.1:8470 --job llm --since 7d --out site.model", "from history"),
            ("eagle-eye train --show site.model", "what a model was learned from"),
        ),
        "0 done; 1 no model was made, or the new one is no better; 2 wrong usage.",
        ("how-to/learning",),
    ),
    "check": Guide(
        "Puts this node to work and says whether it is sick: the site's own tools where they are installed, else small"
        " ones of ours. Never begins while a process computes on the GPUs.",
        (
            ("eagle-eye check --gpus 8", "an idle node, two minutes"),
            ("eagle-eye check --quick --json", "before a job, under 20 s"),
            ("eagle-eye check --sdc --seconds 600", "look for silent data corruption, for ten minutes"),
            ("eagle-eye check --list", "what there is to check"),
        ),
        "0 healthy; 3 sick; 1 cannot tell, stderr and --json say why; 2 wrong usage.",
        ("how-to/check", "explanation/probation"),
    ),
    "checkpoint": Guide(
        "Says where the copies of a job's checkpoints would be kept in its nodes' memory, and which losses they"
        " survive.",
        (
            ("eagle-eye checkpoint plan --nodes 16 --replicas 2", "how likely is it that a copy is left?"),
            (
                "eagle-eye checkpoint plan --nodes 'gpu[01-16]' --topology /etc/eagle-eye/topology.json",
                "no two copies behind one switch or in one rack, where possible",
            ),
            ("eagle-eye checkpoint plan --nodes 16 --shard-bytes 24GiB --keep 2", "and the memory that it takes"),
        ),
        _DONE,
        ("how-to/checkpoint",),
    ),
    "plan": Guide(
        "Plans how a pipeline-parallel job goes on when nodes are lost and no spare is left: the best layout for every"
        " number of nodes with the same global batch, and what is copied from whose memory when one goes.",
        (
            ("eagle-eye plan profile model:job --device cuda", "what each layer costs, measured: the profile's file"),
            (
                "eagle-eye plan --profile profile.json --nodes 8 --gpu-memory 72GiB --global-batch 256",
                "how long a step takes on eight nodes, on seven, ...",
            ),
            (
                "eagle-eye plan --profile profile.json --nodes 8 --gpu-memory 72GiB --global-batch 256 --json",
                "the plan's file; --svg FILE draws a step",
            ),
            ("eagle-eye plan lost n2 --plan plan.json", "n2 is gone: who trains what, and gets it from whom?"),
            ("eagle-eye plan layout --plan plan.json --nodes 7", "what a job's script puts into EAGLE_EYE_LAYOUT"),
        ),
        "0 done; 1 no layout for so few nodes, or failed; 2 wrong usage, profile or plan.",
        ("how-to/planning",),
    ),
    "flight-recorder": Guide(
        "Reads PyTorch's flight-recorder dumps of a hung job and names the rank that holds it up.",
        (("eagle-eye flight-recorder /tmp/nccl_traces", "one dump for each rank"),),
        "0 done, also when the dumps do not tell; 1 there are no dumps to read; 2 wrong usage.",
        ("how-to/flight-recorder",),
    ),
    "nodes": Guide(
        "Lists nodes and what is known of them; takes them out of service, puts them to work, takes them back.",
        (
            ("eagle-eye nodes", "the newest 100"),
            ("eagle-eye nodes show gpu-17", "its state, why it is out, and what to type next"),
            ("eagle-eye nodes exclude gpu-17 --reason 'riser card'", "out of service"),
            ("eagle-eye nodes check gpu-17", "is it sick? waits for the answer"),
            ("eagle-eye nodes readmit gpu-17", "back, after a check"),
            ("eagle-eye nodes forget --unheard-for 30d", "those that are gone for good"),
        ),
        _ANSWERED + " nodes check: 0 healthy, 3 sick, 1 cannot tell.",
        ("explanation/incidents", "explanation/probation", "explanation/accounts"),
    ),
    "jobs": Guide(
        "Lists jobs, their state, ranks and pace.",
        (("eagle-eye jobs", "the newest 100"), ("eagle-eye jobs show llm --json", "one, for programs")),
        _ANSWERED,
        ("explanation/concepts", "how-to/job-sources"),
    ),
    "accounts": Guide(
        "Writes a report on where the jobs' time went, by fault, node and job, and on what the ledger says.",
        (
            (
                "eagle-eye accounts report --since 30d --html accounts.html",
                "one file with pictures, to send",
            ),
            ("eagle-eye accounts report --since 30d --json", "its numbers, for programs"),
        ),
        _ANSWERED,
        ("how-to/reports", "explanation/accounts"),
    ),
    "incidents": Guide(
        "Lists incidents with their evidence; records what a person says about them.",
        (
            ("eagle-eye incidents --state open", "what is suspected or confirmed now"),
            ("eagle-eye incidents show INCIDENT", "the evidence, and what was done"),
            ("eagle-eye incidents report INCIDENT --html FILE", "all of it with pictures, to send to somebody"),
            ("eagle-eye incidents false INCIDENT", "it was a false alarm"),
        ),
        _ANSWERED,
        ("explanation/incidents", "how-to/runbooks", "how-to/reports"),
    ),
    "actions": Guide(
        "Lists the actions asked of orchestrators; approves, rejects or reports on them by hand.",
        (
            ("eagle-eye actions", "the newest 100"),
            ("eagle-eye actions approve ACTION", "in mode approve"),
            ("eagle-eye actions renew ACTION", "ask again for what has expired"),
            ("eagle-eye actions report ACTION done --detail 'requeued by hand'", "the outcome"),
        ),
        _ANSWERED,
        ("reference/policy", "how-to/orchestrators"),
    ),
    "audit": Guide(
        "Says who changed what, and when: people by their token, the server, the configuration.",
        (("eagle-eye audit --verb approve", "who approved what"),),
        _ANSWERED,
        ("how-to/operations", "explanation/security"),
    ),
    "goodput": Guide(
        "Says where the jobs' time went: training, or lost to which fault on which node.",
        (("eagle-eye goodput --by fault", "the last seven days"),),
        _ANSWERED,
        ("explanation/accounts",),
    ),
    "ledger": Guide(
        "Compares what policy would have done with what happened: is it time to let the server act?",
        (
            ("eagle-eye ledger --standing wrong", "where it would have been wrong"),
            ("eagle-eye ledger --steps", "fault by fault: is it enough for approve, for act?"),
            ("eagle-eye ledger --steps --fault hang", "and the lines of configuration for one"),
        ),
        _ANSWERED,
        ("explanation/accounts", "reference/policy"),
    ),
    "tickets": Guide(
        "Lists repair tickets, and imports those of the site's own system.",
        (("eagle-eye tickets import repairs.csv", "columns id, node, opened, closed, text"),),
        _ANSWERED,
        ("explanation/accounts",),
    ),
    "policy": Guide(
        "Says rule by rule why an action was asked for or not, and runs cases that a site has written.",
        (
            ("eagle-eye policy explain INCIDENT", "why, or why not"),
            ("eagle-eye policy test docs/reference/policy-cases.toml", "does the policy do what we want?"),
        ),
        "0 done, all cases passed; 1 one failed, or the server cannot be reached; 2 wrong usage or cases.",
        ("reference/policy",),
    ),
    "deliveries": Guide(
        "Lists webhooks, sent and to be sent, with what came back; sends one again.",
        (
            ("eagle-eye deliveries --state failed", "what did not arrive"),
            ("eagle-eye deliveries redeliver DELIVERY", "once more"),
        ),
        _ANSWERED,
        ("reference/webhooks",),
    ),
    "subscriptions": Guide(
        "Says who gets events; adds, changes, pauses, tests and repairs subscriptions.",
        (
            ("eagle-eye subscriptions add https://hooks.example/eagle-eye --job 'llm-*'", "prints the secret, once"),
            ("eagle-eye subscriptions ping SUBSCRIPTION", "does it arrive?"),
            ("eagle-eye subscriptions rotate SUBSCRIPTION", "a new secret; the old one signs for a while, too"),
        ),
        _ANSWERED,
        ("reference/webhooks", "how-to/webhook-receivers"),
    ),
    "silences": Guide(
        "Lists, makes and ends silences: for a time nobody gets news of a fault, a job or a node. Actions go on.",
        (
            ("eagle-eye silences", "the newest 100, those that ended too"),
            (
                "eagle-eye silences add --node gpu-17 --for 4h --reason 'its fan is being replaced'",
                "whatever its fault",
            ),
            (
                "eagle-eye silences add --fault straggler --job 'llm-*' --for 7d --reason 'known, ticket 4711'",
                "where both hold",
            ),
            ("eagle-eye silences end SILENCE", "what still goes on is sent then"),
        ),
        _ANSWERED,
        ("how-to/silences", "reference/webhooks"),
    ),
    "cells": Guide(
        "Lists the cells of a site, whose servers judge different jobs and share the records, and moves jobs.",
        (
            ("eagle-eye cells", "their leaders, and how much each has"),
            ("eagle-eye cells move JOB CELL", "the job's agents go there by themselves"),
            ("eagle-eye cells drain CELL", "before it is taken away; fill takes that back"),
        ),
        _ANSWERED,
        ("how-to/cells", "explanation/scale"),
    ),
    "tokens": Guide(
        "Makes, lists and revokes tokens in the server's files, on the server's host, as its user or as root.",
        (
            (
                "eagle-eye tokens create --scope admin --config /etc/eagle-eye/server.toml --out token",
                "yours, in a new file that is yours alone",
            ),
            ("eagle-eye tokens create --scope join --nodes 'gpu-*'", "for a day: hosts get their own with it"),
            ("eagle-eye tokens list", "never their text"),
        ),
        "0 done; 1 the server's files cannot be read or written; 2 wrong usage or configuration.",
        ("explanation/security", "get-started/install-hosts"),
    ),
    "sessions": Guide(
        "Ends the sessions of a person who signed in with the site's account, in every browser. Needs scope admin.",
        (("eagle-eye sessions end ada", "ada's next request is refused until she signs in again"),),
        _ANSWERED,
        ("how-to/sign-in",),
    ),
    "records": Guide(
        "Copies all records to another database while no server uses either, and compares the two row by row. If"
        " it is interrupted, the same command goes on where it stopped.",
        (
            (
                "eagle-eye records copy --from sqlite:/var/lib/eagle-eye --to postgresql://eagle_eye@db/eagle_eye",
                "from the server's folder to PostgreSQL",
            ),
        ),
        "0 copied, and the same; 1 failed, or other records are there; 2 wrong usage or configuration.",
        ("how-to/postgresql", "how-to/operations"),
    ),
    "backup": Guide(
        "Copies the server's files to a new folder while it runs, and puts them back while it does not.",
        (
            ("eagle-eye backup /backup/monday --config /etc/eagle-eye/server.toml", "all of it"),
            ("eagle-eye backup restore /backup/monday --config /etc/eagle-eye/server.toml", "the way back"),
        ),
        "0 done; 1 failed; 2 wrong usage or configuration.",
        ("how-to/operations",),
    ),
}


def overview(groups: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> str:
    """Return the list of commands for ``eagle-eye --help``: by task, each a name and a few words."""
    lines = ["first: eagle-eye demo, then server and agent; docs/get-started/quick-start.md"]
    for title, commands in groups:
        lines += ["", f"{title}:", *(f"  {name:<15} {words}" for name, words in commands)]
    lines += ["", "eagle-eye COMMAND --help: its options, examples, exit codes and where to read on.", ""]
    lines += textwrap.wrap(
        "server, agent and orchestrate read a TOML file (--config), overridden by the environment (EAGLE_EYE_...),"
        " overridden by flags. For the others EAGLE_EYE_SERVER and EAGLE_EYE_TOKEN_FILE say where the server is and"
        " who asks. EAGLE_EYE_TRACEBACK=1 shows where an error comes from.",
        _WIDTH,
    )
    return "\n".join([*lines, f"exit codes: {_DONE}"])


def complete(parser: argparse.ArgumentParser, name: str) -> None:
    """Complete the parser's help: the command's purpose, its own description, examples, exit codes, pages.

    Verbs get their one-line help as a description, for ``COMMAND VERB --help``.
    """
    guide = GUIDES[name]
    parser.description = textwrap.fill(guide.purpose, _WIDTH)
    own = f"{parser.epilog}\n\n" if parser.epilog else ""
    parser.epilog = own + "\n".join(_epilog(guide))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for verb, below in action.choices.items():
                said = helps.get(verb) or ""
                below.description = below.description or f"{said[:1].upper()}{said[1:]}."
                below.epilog = below.epilog or f"Examples and exit codes: {parser.prog} --help"


def _epilog(guide: Guide) -> Iterator[str]:
    yield "examples:"
    for command, why in guide.examples:
        yield f"  {command}"
        yield f"      {why}"
    yield ""
    yield from textwrap.wrap(f"exit codes: {guide.exits}", _WIDTH, subsequent_indent="  ")
    pages = "read on: " + " ".join(f"docs/{page}.md" for page in guide.pages)
    yield textwrap.fill(pages, _WIDTH, break_on_hyphens=False)  # what is copied must stay whole
