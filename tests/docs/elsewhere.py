"""Commands of the documents that test_commands.py does not type itself: the test that runs them, or why none does.

A command is found by its page and how it begins. The list is read from its top; what stands on no line of it is run.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.docs.commands import Line


class Elsewhere(NamedTuple):
    """Commands of pages that match ``page`` which begin as ``command`` says (regular expressions)."""

    page: str
    command: str
    test: str = ""  # the file whose tests run it
    word: str = ""  # which stands in that file
    why: str = ""  # no test runs it, because of this


ANY = ".*"
KNOWN = (
    Elsewhere(
        r"docs/how-to/checkpoint(-recipes)?\.md",
        r"eagle-eye checkpoint (status|verify)",
        "tests/checkpoint/test_store.py",
        "verify",
    ),
    Elsewhere(r"docs/how-to/planning\.md", r"eagle-eye plan profile", "tests/planning/test_measuring.py", "profile"),
    Elsewhere(
        r"docs/how-to/remote-store\.md",
        r"curl\b",
        why="only a server with a store has these metrics; tests/server/remote_store/test_sending.py reads them",
    ),
    Elsewhere(ANY, r"make demo", "tests/demo/test_loop.py", "demo"),
    Elsewhere(ANY, r"make images", "tests/packaging/container_site.py", "images"),
    Elsewhere(ANY, r"make\b", why="CI itself, or what a release is made with; the target must exist"),
    Elsewhere(ANY, r"(sudo )?podman\b", "tests/packaging/container_site.py", "podman"),
    Elsewhere(ANY, r"docker compose|export GRAFANA_ADMIN_PASSWORD", "tests/packaging/compose_site.py", "compose"),
    Elsewhere(ANY, r"kubectl\b", "tests/orchestrators/kubernetes/test_real_cluster.py", "uncordon"),
    Elsewhere(ANY, r"helm\b", "tests/packaging/test_helm_cluster.py", "helm"),
    Elsewhere(ANY, r"(\S*/)?pip install|python3? -m venv", "tests/packaging/test_installs.py", "pip"),
    Elsewhere(
        r"docs/get-started/install-hosts\.md",
        r"(apt|dnf|runuser|install|systemctl|journalctl|kill|eagle-eye (nodes|doctor|backup))\b",
        "tests/packaging/test_newcomer.py",
        "docs/get-started/install-hosts.md",
    ),
    Elsewhere(ANY, r"\S*python packaging/host/build\.py", "tests/packaging/test_host_install.py", "build.py"),
    Elsewhere(ANY, r"ln -s \S+ /usr/bin", why="changes the host's own folders"),
    Elsewhere(ANY, r"ft_launcher", why="NVIDIA's own launcher; tests/server/test_nvrx.py speaks what it speaks"),
    Elsewhere(ANY, r"eagle-eye launch", "tests/orchestrators/test_launch.py", "command"),
    Elsewhere(ANY, r"eagle-eye import", "tests/server/trace_import/test_import.py", "--prometheus"),
    Elsewhere(
        ANY, r"eagle-eye orchestrate kubernetes", "tests/orchestrators/kubernetes/test_real_cluster.py", "cordoned"
    ),
    Elsewhere(ANY, r"PYTHONPATH=packaging \S*python -m release\.version", "tests/packaging/test_version.py", "version"),
    Elsewhere(ANY, r"\S*python (-m )?tests[./]compatibility", why="records a release: tests/compatibility reads it"),
    Elsewhere(r"docs/how-to/releasing\.md", r"git (add|checkout|commit|tag|push)\b", why="changes the repository"),
    Elsewhere(
        r"docs/how-to/postgresql\.md",
        r'sudo -u postgres|systemctl (start|stop|restart) postgresql|cd /var/lib/postgresql|echo "restore_command',
        "tests/server/test_point_in_time_restore.py",
        "pg_basebackup",
    ),
    Elsewhere(ANY, r"create(user|db)\b", why="PostgreSQL's own; tests/server/postgresql_server.py makes roles by SQL"),
    Elsewhere(ANY, r"eagle-eye records copy", "tests/server/test_records_in_postgresql.py", "copy"),
    Elsewhere(ANY, r"eagle-eye orchestrate slurm", "tests/orchestrators/slurm/test_real.py", "orchestrator"),
    Elsewhere(ANY, r"eagle-eye train", "tests/learning/test_command.py", "train"),
    Elsewhere(ANY, r"eagle-eye nodes (check|readmit)", "tests/server/test_node_checks_end_to_end.py", "readmit"),
    Elsewhere(
        ANY,
        r"\S*python (-m )?benchmarks\b",
        why="hours; their arguments are parsed",
    ),
)
# They take more than seconds: only with EAGLE_EYE_TEST_DOCS=1, as make test-full sets it.
# Where a page's later commands need what an earlier one made, both stand here.
SLOW = (
    (ANY, r"eagle-eye check\b(?! --list)"),
    (ANY, r"eagle-eye simulate .*--nodes (32|[1-9]\d\d+)|eagle-eye backtest /tmp/hot|eagle-eye replay .*--speed 10\b"),
    (r"docs/.*/(traces|tuning)\.md", r"eagle-eye (record|backtest|replay)\b"),
    (r"docs/how-to/webhook-receivers\.md", r"eagle-eye simulate\b"),
    (r"docs/get-started/quick-start\.md", r"eagle-eye (simulate|backtest)\b"),
    (r"docs/.*", r"eagle-eye (server|loadtest)\b"),
    (r"docs/how-to/orchestrate-.*\.md", r"eagle-eye orchestrate"),
)


def elsewhere(line: Line) -> Elsewhere | None:
    """Return what says where the line is run, None where it is run here.

    Above a block may stand ``<!-- run by tests/... -->``.
    """
    if line.block.mark.startswith("run by "):
        return Elsewhere(line.block.page, "", test=line.block.mark.removeprefix("run by "))
    return next(
        (each for each in KNOWN if re.fullmatch(each.page, line.block.page) and re.match(each.command, line.text)), None
    )


def slow(line: Line) -> bool:
    """Whether it takes more than seconds."""
    return any(re.fullmatch(page, line.block.page) and re.match(command, line.text) for page, command in SLOW)
