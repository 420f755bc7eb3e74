"""What the documents have their reader type: commands of a shell block, synopses, and their placeholders."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.docs.pages import Block

WRAPPERS = {"sudo", "timeout", "env", "exec", "nohup", "time", "if", "!", "then"}
IN_CONTAINERS = {"docker", "podman", "kubectl"}
_REDIRECTION = re.compile(r"(?<!\S)\d*(?:>>|>|<)(?:&\d|\s*[^\s|;&]+)")
_SUBSTITUTED = re.compile(r"\$\(([^()]*)\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class Line(NamedTuple):
    """One logical line of a shell block, without its comment: what is typed before the return key."""

    block: Block
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.block.page}:{self.line}"

    @property
    def program(self) -> str:
        """The first simple command's program, "" where only a variable is set."""
        words = next(iter(simple_commands(self.text)), [])
        return words[0].rpartition("/")[2] if words else ""


def lines(block: Block) -> list[Line]:
    """Return a shell block's logical lines: continued ones in one, open quotes closed, comments and blanks left out."""
    if is_script(block.text):
        return [Line(block, block.line, block.text)]
    found: list[Line] = []
    begun, start = "", 0
    for number, text in enumerate(block.text.splitlines(), block.line):
        start = start if begun else number
        begun = f"{begun}{text}"
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            bare = without_comment(begun)
        except ValueError:
            begun += "\n"  # a quote is open
            continue
        if bare.strip():
            found.append(Line(block, start, bare.strip()))
        begun = ""
    if begun.strip():
        found.append(Line(block, start, begun.strip()))
    return found


def is_script(text: str) -> bool:
    """Whether a shell block is one program instead of commands that are typed one after the other."""
    return text.startswith("#!") or bool(re.search(r"^(for|while|if|case)\b|\(\) *\{$|<<", text, re.MULTILINE))


def without_comment(line: str) -> str:
    """Return the line before its comment. Raises ValueError where a quote is open."""
    quote = ""
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (place == 0 or line[place - 1] != "\\"):
            quote = character
        elif character == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    if quote:
        raise ValueError("an open quote")
    return line


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command, without redirections, wrappers and assignments before it."""
    for inner in _SUBSTITUTED.findall(text):
        yield from simple_commands(inner)
    plain = _REDIRECTION.sub(" ", _SUBSTITUTED.sub("substituted", text))
    reader = shlex.shlex(plain, posix=True, punctuation_chars="();|&")
    reader.commenters = ""
    reader.whitespace_split = True
    words: list[str] = []
    try:
        tokens = [*reader, ";"]
    except ValueError:
        return
    for token in tokens:
        if token and set(token) <= set("();|&"):
            if words := _unwrapped(words):
                yield words
            words = []
        else:
            words.append(token)


def _unwrapped(words: list[str]) -> list[str]:
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    if words[:2] in (["sudo", "-u"], ["runuser", "-u"]):
        words = words[4:] if words[3:4] == ["--"] else words[3:]
    if words and (words[0] in WRAPPERS or (words[0] in IN_CONTAINERS and "exec" in words)):
        return next((words[place:] for place, word in enumerate(words) if is_eagle_eye(word)), words)
    return words


def is_eagle_eye(word: str) -> bool:
    """Whether a word calls our command."""
    return word == "eagle-eye" or word.endswith("/bin/eagle-eye")


def eagle_eye_calls(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of our command within a logical line."""
    for words in simple_commands(text):
        if words and is_eagle_eye(words[0]):
            yield words[1:]


def is_synopsis(text: str) -> bool:
    """Whether a line shows what may be given, instead of a command: brackets, alternatives, an ellipsis."""
    return bool(re.match(r"eagle-eye\b[^'\"]*(\[-|\]\.\.\.|\S\|\S|(?<!_)…)", text))


def spelled_out(synopsis: str, *, whole: bool = True) -> list[str]:
    """Return a synopsis with everything optional given, or nothing of it, and each alternative in turn.

    ``[--by job|node]`` stands for both ``--by job`` and ``--by node``; ``[--nodes GLOB]...`` for one of them.
    """
    text = re.sub(r"[\[\]]", " ", synopsis) if whole else re.sub(r"\[[^]]*\]", " ", synopsis)
    words = text.replace("…", " ").replace("...", " ").split()
    choices = max((word.count("|") + 1 for word in words), default=1)
    return [" ".join(word.split("|")[min(turn, word.count("|"))] for word in words) for turn in range(choices)]
