"""What a newcomer types, from an empty Debian to an incident, an upgrade and the end: the documents' own commands.

They and the files beside them are read out of the pages, in their order, and typed as they stand; only the upper-case
words, the choice among several distributions' lines and the training program are the reader's. The hosts have no
network: what the packages need and do not bring fails here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.commands import lines
from tests.docs.pages import Block, blocks, spans
from tests.packaging.booted_debian import Debian, Done, booted, missing

DIST = Path(os.environ.get("EAGLE_EYE_TEST_NEWCOMER", ""))
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
NEEDED = ("eagle-eye-agent_*_amd64.deb", "eagle-eye-server_*python{}_*.deb", "eagle_eye-*.whl")
INSTALL, RECEIVERS = "docs/get-started/install-hosts.md", "docs/how-to/webhook-receivers.md"
LATER = "99.0.0"
COMMAND_S = 900.0  # apt installs thousands of files, on a machine that may be busy with others
SEEN_S = 120.0
ALL_S = 3600.0  # for the whole way on one distribution
# Exit codes beside 0 that the documents give a meaning: without a GPU, and without a clock that somebody keeps.
ANSWERS = {"eagle-eye doctor": {0, 1}}
# What hook.md's lines stand in, and what makes a step of them.
PROGRAM = """
import itertools, time

class optimizer:
    step = staticmethod(lambda: time.sleep(0.2))

model, data, loss, n = None, itertools.count(), 3.0, 100
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "EAGLE_EYE_TEST_NEWCOMER" not in os.environ,
        reason="EAGLE_EYE_TEST_NEWCOMER=FOLDER, with what make dist made, on Debian as root (make test-newcomer)",
    ),
    pytest.mark.skipif(bool(missing()), reason=f"{missing()} is missing (make test-full installs what Debian has)"),
]


class Newcomer:
    """Somebody with one terminal on the host, the release in its folder, and the pages."""

    def __init__(self, debian: Debian, release: str) -> None:
        self.debian = debian
        self.release = release
        self.words = {"NODE": "gpu-1", "VERSION": LATER}  # what stands for the upper-case words
        self.stuck = ""
        self._until_s = time.monotonic() + ALL_S
        self.type("cd /root/release")

    def type(self, command: str, place: str = "") -> str:
        """Return what the command says; it has to succeed."""
        typed = re.sub(
            r"(?<![A-Za-z$-])[A-Z]{2,}(?![A-Za-z=/])", lambda word: self.words.get(word[0], word[0]), command
        )
        allowed = next((codes for begins, codes in ANSWERS.items() if typed.startswith(begins)), {0})
        try:
            done = self.debian.shell.type(typed, min(COMMAND_S, self._until_s - time.monotonic()))
        except TimeoutError as error:
            done = Done(-1, str(error))
        if done.code not in allowed:
            self.stuck = f"{place} {typed}"
            pytest.fail(f"{place} {typed}\nexit code {done.code}: {done.said}")
        return done.said

    def follow(self, page: str, heading: str, number: int | None = None) -> list[str]:
        """Do what the blocks under a heading say, or one of them by its number; return what the commands said."""
        under = [block for block in blocks(page) if block.heading == heading]
        assert under, f"{page} has no {heading!r} with a block"
        said = []
        for block in under if number is None else under[number : number + 1]:
            if block.language == "toml":
                self._write(block)
            elif block.language == "sh":
                said += [self.type(line.text, line.place) for line in lines(block) if self._is_mine(line.text)]
        assert said, f"{page}, {heading!r}: nothing of it is for {self.release}"
        return said

    def sees(self, command: str, *words: str) -> str:
        """Return what the command says once these words stand in it."""
        said = ""

        def has_come() -> bool:
            nonlocal said
            said = self.type(command)
            return all(word in said for word in words)

        self.until(has_come, f"{words} in {command}", lambda: said)
        return said

    def until(self, holds: Callable[[], bool], what: str, said: Callable[[], str] = str) -> None:
        """It holds now; where it never does the test fails and tells what was said."""
        until_s = min(time.monotonic() + SEEN_S, self._until_s)
        while not holds():
            if time.monotonic() > until_s:
                self.stuck = what
                pytest.fail(f"{what}: not within {SEEN_S:.0f} s\n{said()}")
            time.sleep(0.5)

    def heard(self) -> str:
        """Return when the server last heard this host's agent."""
        nodes = json.loads(self.type("eagle-eye nodes --json"))
        return str(next(node for node in nodes if node["node"] == "gpu-1")["agent"]["heard"])

    def _is_mine(self, line: str) -> bool:
        """Whether a line is this distribution's: of its package manager and its Python."""
        python = re.search(r"python(3\.\d+)", line)
        return not line.startswith("dnf ") and (python is None or python[1] == PYTHONS[self.release])

    def _write(self, block: Block) -> None:
        path = re.search(r"/etc/eagle-eye/[\w.-]+", block.before)
        assert path is not None, f"{block.place}: nobody says into which file this goes"
        with (self.debian.root / path[0][1:]).open("a" if "added" in block.before else "w") as file:
            file.write(f"\n{block.text}")


@pytest.fixture(scope="module", params=list(PYTHONS))
def arrived(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """A newcomer in front of an empty Debian, with a release and a later one."""
    folder = tmp_path_factory.mktemp("newcomer")
    with booted(request.param, folder, "gpu-1") as debian:
        release = debian.root / "root/release"
        release.mkdir()
        for pattern in NEEDED:
            found = list(DIST.glob(pattern.format(PYTHONS[request.param])))
            assert found, f"{DIST} has no {pattern}: make dist makes it"
            shutil.copy(found[0], release)
        # What a site's name service does.
        with (debian.root / "etc/hosts").open("a") as hosts:
            hosts.write("127.0.0.1 eagle-eye.example\n")
        yield Newcomer(debian, request.param)


@pytest.fixture
def newcomer(arrived: Newcomer) -> Newcomer:
    if arrived.stuck:
        pytest.skip(f"the newcomer did not get past {arrived.stuck}")
    return arrived


def test_the_server_answers_after_the_pages_first_commands(newcomer: Newcomer) -> None:
    *_, nodes = newcomer.follow(INSTALL, "The server")
    assert nodes == "none\n"


def test_an_agent_enrols_and_is_listed(newcomer: Newcomer) -> None:
    said = "".join(newcomer.follow(INSTALL, "The agent"))
    assert "ok          server " in said
    newcomer.sees("eagle-eye nodes", "gpu-1", "in_service")


def test_a_job_is_watched_by_the_hooks_two_lines(newcomer: Newcomer) -> None:
    newcomer.type("python3 -m venv TRAIN")
    newcomer.follow(INSTALL, "A job, and a first incident", 0)
    two_lines = next(block for block in blocks("docs/reference/hook.md") if block.language == "python")
    (newcomer.debian.root / "root/release/train.py").write_text(PROGRAM + two_lines.text)
    newcomer.type(
        "EAGLE_EYE_JOB=llm-1 RANK=0 WORLD_SIZE=1 TRAIN/bin/python train.py > train.log 2>&1 & echo $! > train.pid"
    )
    newcomer.words["PID"] = newcomer.type("cat train.pid").strip()
    newcomer.sees("eagle-eye jobs", "llm-1")
    newcomer.until(
        lambda: (json.loads(newcomer.type("eagle-eye jobs show llm-1 --json"))["progress"]["step"] or 0) > 2,
        "a third step is known",
    )


def test_a_receiver_takes_what_it_is_sent(newcomer: Newcomer) -> None:
    newcomer.follow(RECEIVERS, "Receivers to copy")
    program = next(block for block in blocks(RECEIVERS) if block.language == "python")
    (newcomer.debian.root / "root/release/receiver.py").write_text(program.text)
    start = next(span.text for span in spans(RECEIVERS) if "python3 receiver.py" in span.text)
    newcomer.type(f"{start.partition(' ')[2]} > receiver.log 2>&1 &")
    identity = "import json; print(json.load(open('subscription.json'))['id'])"
    newcomer.words["ID"] = newcomer.type(f'python3 -c "{identity}"').strip()
    newcomer.type("eagle-eye subscriptions ping ID")
    newcomer.sees("cat receiver.log", "eagle_eye.ping")
    newcomer.sees("eagle-eye deliveries --subscription ID", "delivered")


def test_the_end_of_a_rank_is_an_incident_and_the_receiver_is_told(newcomer: Newcomer) -> None:
    newcomer.follow(INSTALL, "A job, and a first incident", 1)
    newcomer.sees("eagle-eye incidents --state open", "process_crash", "llm-1", "gpu-1", "SIGSEGV")
    newcomer.sees("cat receiver.log", "eagle_eye.incident.opened", "llm-1")


def test_a_simulated_fault_is_judged_and_told(newcomer: Newcomer) -> None:
    *_, said = newcomer.follow(INSTALL, "A job, and a first incident", 2)
    assert "the server says  gpu_lost on bc0170" in said
    newcomer.sees("cat receiver.log", "left the PCIe bus")


def test_a_node_goes_out_and_comes_back(newcomer: Newcomer) -> None:
    said = "".join(newcomer.follow(INSTALL, "A job, and a first incident", 3))
    assert "readmit gpu-1: in service" in said
    newcomer.sees("eagle-eye nodes", "in_service")
    newcomer.sees("cat receiver.log", "eagle_eye.node.readmitted gpu-1")


def test_an_upgrade_keeps_everything(newcomer: Newcomer) -> None:
    release = newcomer.debian.root / "root/release"
    for package in [*release.glob("*.deb")]:
        later(package)
    newcomer.follow(INSTALL, "Upgrading, going back, removing", 0)
    assert newcomer.type("dpkg-query --show --showformat '${Version} ' 'eagle-eye-*'").count(LATER) == 2
    newcomer.sees("systemctl is-active eagle-eye-server eagle-eye-agent", "active\nactive")
    newcomer.sees("eagle-eye incidents --state open", "process_crash", "gpu_lost")
    before = newcomer.heard()
    newcomer.until(lambda: newcomer.heard() > before, "the agent is heard again")


def test_nothing_is_left_but_what_is_the_readers(newcomer: Newcomer) -> None:
    newcomer.follow(INSTALL, "Upgrading, going back, removing", 1)
    newcomer.type("apt purge eagle-eye-agent")
    left = newcomer.type("find / -xdev -name '*eagle*' -not -path '/root/*' -not -path '/var/log/*'").split()
    assert left == ["/etc/eagle-eye"]
    assert newcomer.type("ls /etc/eagle-eye") == "join-token\n"
    newcomer.sees("systemctl list-units --all 'eagle-eye*'", "0 loaded units listed")


def later(package: Path) -> None:
    """Lay the same package as a later version beside it."""
    tree = package.with_suffix("")
    version = package.name.partition("_")[2].partition("_")[0].partition("+")[0]
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {version}", f"Version: {LATER}"))
    made = package.with_name(package.name.replace(version, LATER, 1))
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, made], check=True)
    shutil.rmtree(tree)
