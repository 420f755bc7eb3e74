"""Every option of every command with values that cannot be meant, each in a process of its own.

``python -m tests.cli.wrong_values`` loads all commands once and forks for each case that it reads on standard input, so
that thousands of them take minutes: a case that hangs, eats memory or breaks the process costs only itself.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_eye.cli import main as cli

WALL_S_MAX = 60.0
CPU_S_MAX = 20
ADDRESS_BYTES_MAX = 3 << 30  # beyond what the loaded program has
NOBODY = "http://127.0.0.1:1"

NUMBERS = ("", "x", "nan", "1e400", "0x10", "1,5", "\N{ARABIC-INDIC DIGIT FIVE}x", "9" * 5_000)  # no number at all
EXTREMES = ("-1", "0", "-0.0", "1e-300", "inf", "-inf", "999999999999999999999999", "1e18")
TEXTS = (
    "",
    " ",
    "bogus",
    "a\nb",
    "\x1b[2Jboo\x07",
    "\N{RIGHT-TO-LEFT OVERRIDE}evil",
    "\udcff\udcfe",
    "x" * 10_000,
    "../../x",
)
PLACES = ("", "missing", "folder", "binary", "empty", "/dev/zero", "/dev/full", "binary/below", "\udcff", "x" * 5_000)

# What is said beside the option under test: enough for the command to come to it, and to end by itself.
BASE: dict[str, list[str]] = {
    "server": ["--print-config"],
    "simulate": ["--nodes=2", "--gpus=1", "--minutes=1", "--seed=1"],
    "loadtest": ["--nodes=1", "--duration=0.1"],
    "import": ["--job=j", "--since=-1h", f"--prometheus={NOBODY}"],
    "record": ["--job=j", "--since=-1h"],
    "subscriptions redeliver": ["--since=-1h"],
    "silences add": ["--node=x", "--for=1h", "--reason=x"],
    "tokens create": ["--scope=read", "--data=data"],
    "tokens list": ["--data=data"],
    "tokens revoke": ["--data=data"],
    "backup": ["--data=data"],
    "train": ["--out=model"],
    "checkpoint plan": ["--nodes=3", "--shard-bytes=1GiB"],
    "plan": ["--profile=profile.json", "--nodes=3", "--gpu-memory=1GiB", "--global-batch=8"],
    "plan lost": ["--plan=plan.json"],
}
# They start what goes on, or look at this host for seconds: given only what is refused before.
GOES_ON = ("agent", "check", "checkpoint store", "demo", "doctor", "launch", "orchestrate")

PROFILE = {
    "format": "eagle-eye-profile/1", "micro_batch": 1,
    "layers": [
        {
            "layer": number, "forward_s": 0.01, "backward_s": 0.02, "parameter_bytes": 100_000_000,
            "optimizer_bytes": 200_000_000, "activation_bytes": 10_000_000,
        }
        for number in range(4)
    ],
}  # fmt: skip


class Case(NamedTuple):
    """Words of a command line; ``refused``: the value cannot be meant, so that only exit code 2 will do."""

    words: list[str]
    refused: bool


class Outcome(NamedTuple):
    """What came of it; ``code`` None: it had to be killed."""

    code: int | None
    out: str
    err: str
    rss_bytes: int


def leaves(parser: argparse.ArgumentParser, path: Sequence[str]) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Yield every command and verb with its parser."""
    yield [*path], parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from leaves(inner, [*path, name])


def cases() -> Iterator[Case]:
    """Yield all cases, of all commands that are installed."""
    for command in cli.COMMANDS:
        try:
            parser = cli.parser_of(command, cli.load(command))
        except ModuleNotFoundError:
            continue
        for path, leaf in leaves(parser, [command.name]):
            yield from _of_leaf(path, leaf)


def _of_leaf(path: list[str], leaf: argparse.ArgumentParser) -> Iterator[Case]:
    goes_on = path[0] in GOES_ON or " ".join(path) in GOES_ON
    base = BASE.get(" ".join(path), [])
    places = [action for action in leaf._actions if not action.option_strings]
    positional = [action for action in places if not isinstance(action, argparse._SubParsersAction)]
    filled = [next(iter(action.choices), "x") if action.choices else "x" for action in positional]
    for action in leaf._actions:
        if action.nargs == 0 or isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
            continue
        for value, refused in _values(action):
            if goes_on and not refused:
                continue
            if action.option_strings:
                words = [*path, *base, f"{action.option_strings[0]}={value}"]
                words += ["--", *filled] if filled and not goes_on else []
                yield Case(words, refused)
            elif not goes_on:
                given = [value if one is action else text for one, text in zip(positional, filled, strict=True)]
                yield Case([*path, *base, "--", *given], refused)


def _values(action: argparse.Action) -> Iterator[tuple[str, bool]]:
    name = action.dest
    if action.choices is not None:
        yield from ((text, True) for text in TEXTS)
    elif action.type in (int, float) or (callable(action.type) and action.type is not Path):
        yield from ((text, True) for text in NUMBERS)
        yield from ((text, False) for text in EXTREMES)
    elif name in ("since", "until"):
        yield from ((text, True) for text in (*TEXTS, *NUMBERS, "-1", "inf", "1e18", "now-1h"))
    elif action.type is Path or any(part in name for part in ("file", "data", "spool", "socket", "config", "traces")):
        yield from ((text, False) for text in (*PLACES, "\x1b[2J"))
    else:
        yield from ((text, False) for text in TEXTS)


class Runner:
    """Runs cases in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        (folder / "folder").mkdir()
        (folder / "data").mkdir()
        (folder / "binary").write_bytes(bytes(range(256)) * 64)
        (folder / "empty").write_bytes(b"")
        (folder / "profile.json").write_text(json.dumps(PROFILE))
        keep = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_EYE_")}
        environ = {**keep, "EAGLE_EYE_SERVER": NOBODY, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        command = [sys.executable, "-m", "tests.cli.wrong_values"]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, words: Sequence[str]) -> Outcome:
        """Return what comes of a command line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        encoded = [base64.b64encode(os.fsencode(word)).decode() for word in words]
        self._process.stdin.write(json.dumps(encoded) + "\n")
        self._process.stdin.flush()
        return Outcome(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WALL_S_MAX)
        assert self._process.stdout is not None
        self._process.stdout.close()


def complaint(case: Case, outcome: Outcome) -> str:
    """Return what is wrong with how a case ended, "" for nothing."""
    reported = outcome.err.removesuffix("\n")
    wrong = [
        (outcome.code is None, "it had to be killed"),
        (outcome.code not in (0, 1, 2, 3), f"exit code {outcome.code}"),
        (case.refused and outcome.code != 2, f"exit code {outcome.code} for a value that cannot be meant"),
        ("Traceback" in outcome.err + outcome.out, "a traceback"),
        (outcome.code == 2 and ("\n" in reported or not reported), "not one line on standard error"),
        (outcome.code == 1 and not (reported or outcome.out), "no word of what went wrong"),
        (outcome.code == 1 and "\n" in reported and case.words[0] not in ("agent", "doctor"), "more than one line"),
        (not all(char.isprintable() or char == "\n" for char in reported), "control characters on standard error"),
        (len(reported) > 4_000, f"{len(reported)} characters on standard error"),
        (outcome.rss_bytes > 1 << 30, f"{outcome.rss_bytes >> 20} MiB of memory"),
    ]
    return "; ".join(text for is_so, text in wrong if is_so)


def _serve() -> None:
    """Fork for each command line on standard input."""
    for command in cli.COMMANDS:
        try:
            cli.load(command)
        except ModuleNotFoundError:
            continue
    for line in sys.stdin:
        words = [os.fsdecode(base64.b64decode(word)) for word in json.loads(line)]
        sys.stdout.write(json.dumps(_forked(words)) + "\n")
        sys.stdout.flush()


def _forked(words: list[str]) -> list[Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _become(words, out.fileno(), err.fileno())
        until_s = time.monotonic() + WALL_S_MAX
        while True:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > until_s:
                os.killpg(child, signal.SIGKILL)
                _, status, usage = os.wait4(child, 0)
                break
            time.sleep(0.002)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read(1 << 20).decode("utf-8", "backslashreplace"))
        code = None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        return [code, *said, usage.ru_maxrss << 10]


def _become(words: list[str], out: int, err: int) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_BYTES_MAX,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20,) * 2)
    code = 99
    try:
        code = cli.main(words)
    except BaseException as error:  # noqa: BLE001 - whatever leaves main is what is looked for
        sys.stderr.write(f"Traceback: {type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
