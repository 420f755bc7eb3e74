"""Attributes an attempt's failure, from the end of its ranks' logs, to the script or to a connection. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from eagle_eye.schema.last_words import KINDS_OF_OTHERS, KINDS_OF_STORAGE, WAITED, WORDS_OF_OTHERS, cause

LINE_CHARS_MAX = 300
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:, in .+)?')  # without: a file that is not Python
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?\Z")
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+")
# What a program that was told to end says, or its runner.
_STOPPED = re.compile(r"SIGTERM|signal: 15", re.IGNORECASE)
_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch's prefix of each line
_OF_RANK = re.compile(r"rank \d+: ?")  # the runner's, before the end of a log
_CODE = "exit code "
# Of Python where it does not get as far as the script, and of a script that is not Python.
_NOT_OPENED = re.compile(
    r"\S*python[\d.]*: (?:can't (?:open file|find '__main__')|No module named|Error while finding module)"
)
_NOT_COMPILED = re.compile(r"(?:Syntax|Indentation|Tab)Error\b")


@dataclass(frozen=True)
class Raised:
    """How an attempt's ranks ended, and on which nodes; ``step`` is that of the last new checkpoint.

    ``early`` says that no first step was heard of: then every end counts that nothing but the script may have caused,
    else only exceptions. ``words`` are the program's own, of the first end that counts. ``hopeless`` are the nodes
    where the script could not even be opened or compiled.
    """

    step: int | None = None
    on: Mapping[str, frozenset[str]] = field(default_factory=dict)
    early: bool = False
    words: str = ""
    hopeless: frozenset[str] = frozenset()

    def and_also(self, node: str, log: str, exit_code: int = 1, *, early: bool = False) -> Raised:
        """Return a copy with the end of another rank's log on the node added."""
        name = exception(log, early=early) or (_last_line(log, exit_code) if early else "")
        if not name:
            return replace(self, early=early)
        return Raised(
            self.step,
            {**self.on, name: self.on.get(name, frozenset()) | {node}},
            early,
            self.words or (_lines(log) or [""])[-1].strip()[:LINE_CHARS_MAX],
            self.hopeless | {node} if early and cannot_run(log) else self.hopeless,
        )


def exception(log: str, *, early: bool = False) -> str:
    """Return where the log's final exception was raised, and its line; "" if none, or if caused from outside.

    Numbers in the line are ignored: they are ranks, sizes and addresses.
    """
    lines = _lines(log)
    for index in range(len(lines) - 1, 0, -1):
        said = _EXCEPTION.match(lines[index])
        if said is None or not lines[index - 1].startswith("  "):
            continue
        kind, message = said["kind"].rpartition(".")[2], said["message"] or ""
        place = next((frame for text in reversed(lines[:index]) if (frame := _FRAME.match(text))), None)
        # Before the first step a file that is not there is the script's to find, unless storage fails by its own words.
        others = KINDS_OF_OTHERS.search(kind) or (KINDS_OF_STORAGE.search(kind) and not early)
        if place is None or others or WORDS_OF_OTHERS.search(message):
            return ""
        line = _VARIES.sub("#", lines[index])[:LINE_CHARS_MAX]
        return f"{place['file']}:{place['line']}: {line}"
    return ""


def _last_line(log: str, exit_code: int) -> str:
    """Return the exit code and the last line of a log without an exception; "" if something else may have ended it."""
    words = _last_words(log)
    outside = WORDS_OF_OTHERS.search(words) or _STOPPED.search(words) or WAITED.search(words)
    if exit_code <= 0 or outside or cause(words) not in ("own", "") or "Traceback" in log:
        return ""
    line = next((text for text in reversed(_lines(log)) if text.strip()), "")
    return f"{_CODE}{exit_code}: {_VARIES.sub('#', line)[:LINE_CHARS_MAX]}".removesuffix(": ")


def cannot_run(log: str) -> bool:
    """Whether the script was not there, or is no Python: it did not begin."""
    lines = _lines(log)
    if not lines or _NOT_OPENED.match(lines[-1]):
        return bool(lines)
    place = next((frame for text in reversed(lines) if (frame := _FRAME.match(text))), None)
    if place is None:
        return False
    if _NOT_COMPILED.match(lines[-1]):
        return not place["file"].startswith("<")  # else of a text that the script read
    return "runpy" in place["file"] and lines[-1].startswith("FileNotFoundError")


def _lines(log: str) -> list[str]:
    return [_PREFIX.sub("", line, count=1) for line in _OF_RANK.sub("", log, count=1).rstrip().splitlines()]


def cannot_connect(log: str) -> bool:
    """Whether the log ends with a failed connection attempt."""
    return cause(_last_words(log)) == "unreached"


def followed(log: str) -> bool:
    """Whether the log ends because another rank exited or did not arrive."""
    words = _last_words(log)
    waited = WAITED.search(words) or _STOPPED.search(words)
    return cause(words) == "echo" or (cause(words) == "own" and waited is not None)


def _last_words(log: str) -> str:
    """Return the text after the last indented line: of a traceback, the exception."""
    lines = _lines(log)
    first = next((at + 1 for at in range(len(lines) - 1, -1, -1) if lines[at][:1].isspace()), 0)
    return "\n".join(lines[first:])


def scripts_own(before: Raised, now: Raised, members: int = 2) -> str:
    """Return, as text, why the script must be at fault, "" if it need not be.

    Two attempts ended alike, on at least two nodes or the job's only one; or the script cannot run on them at all.
    """
    if len(now.hopeless) >= min(members, 2):
        return f"the script cannot run, on {', '.join(sorted(now.hopeless))}: {now.words}"
    if before.step != now.step:
        return ""
    for name in sorted(before.on.keys() & now.on.keys()):
        nodes = before.on[name] | now.on[name]
        if len(nodes) > 1 or (members == 1 and before.early and now.early):
            ended = "the same end again" if name.startswith(_CODE) else "the same exception again"
            words = "" if now.words in name else f" ({now.words})"
            return f"{ended}, on {', '.join(sorted(nodes))}: {name}{words}"
    return ""
